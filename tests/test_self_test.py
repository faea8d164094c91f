"""The start-up measurement: what it says of this backend, and that it can say no."""

from __future__ import annotations

import jax
import pytest

from seerjax import self_test
from seerjax.numerics import NumericsConfig

TILED = NumericsConfig(row_tile=16, query_tile=4, kv_split=64)
UNTILED = NumericsConfig(row_tile=16, query_tile=4, kv_split=64, implementation="untiled")


def test_tiled_rows_are_invariant_here():
  finding = self_test.measure(TILED)
  assert finding.is_invariant
  assert finding.num_values > 5000
  assert {name for name, _, _ in finding.by_comparison} == {
    "two tiles", "tile by tile", "alone", "decode",
  }  # fmt: skip
  assert str(finding) == f"rows are invariant: 0 of {finding.num_values} values differ"
  self_test.require(TILED)
  # Measured once.
  assert self_test.measure(TILED) is finding


def test_the_line_for_people_says_where_and_what():
  line = self_test.describe(TILED)
  assert line.startswith(f"cpu ({jax.devices()[0].device_kind}, {len(jax.devices())} devices)")
  assert f"JAX {jax.__version__}, tiled float32: rows are invariant: 0 of" in line
  assert "\n" not in line


def test_untiled_rows_are_refused_with_the_finding():
  # The twin that must fail: were it invariant too, the measurement would show nothing.
  assert not self_test.measure(UNTILED).is_invariant
  with pytest.raises(ValueError, match="got implementation='untiled' on .*, where rows are NOT"):
    self_test.require(UNTILED)
  with pytest.raises(ValueError, match="values differ (.*); expected 0 that differ. Set"):
    self_test.require(UNTILED)


def test_splits_shorter_than_a_sequence_are_measured_too():
  short = NumericsConfig(row_tile=4, query_tile=1, slot_tile=2, kv_split=4, reduction_shards=1)
  assert self_test.measure(short).is_invariant


def test_a_finding_names_the_comparisons_that_differ():
  finding = self_test.Finding(
    num_values=30, num_differing=4, by_comparison=(("alone", 4, 10), ("decode", 0, 20))
  )
  assert str(finding) == "rows are NOT invariant: 4 of 30 values differ (alone 4 of 10)"
