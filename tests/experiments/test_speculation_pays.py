"""Drafts against none: intervals by hand, and every part on a few questions."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest

from experiments import speculation_pays
from experiments.speculation_pays import Workload
from seerjax.types import Completion

SMALL = dict(
  batches=(1, 3), pairs=2, group_size=4, tail_batches=(2,), tail_groups=2, tail_siblings=2,
  max_tokens=10,
)  # fmt: skip


def test_an_interval_by_hand():
  # Logarithms -1, 0, 1: mean 0, deviation 1, Student's 4.303 with two degrees of freedom.
  mean, low, high = speculation_pays.bound([np.exp(-1), 1.0, np.exp(1)])
  assert mean == pytest.approx(1)
  assert np.log(high) == pytest.approx(4.3027 / np.sqrt(3), abs=1e-3)
  assert low == pytest.approx(1 / high)


def test_a_table_by_hand():
  pairs = {4: [(2.0, 1.0, 100), (2.0, 1.0, 100)]}
  rates = {1: [(10.0, 20.0, 40.0), (10.0, 20.0, 40.0)]}
  lines = speculation_pays.tables(pairs, rates).splitlines()
  assert lines[2] == "| 4 | 50 | 100 | 2.00 | 2.00 to 2.00 |"
  assert lines[-1] == "| 1 | 10 | 20 | 40 | 4.00 (4.00 to 4.00) | 2.00 (2.00 to 2.00) |"


@pytest.mark.long
def test_every_part_runs_and_is_written(tiny, tmp_path):
  text = speculation_pays.run(Workload(model=tiny, **SMALL), tmp_path)
  results = json.loads((tmp_path / "results.json").read_text())
  assert {batch: len(rows) for batch, rows in results["pairs"].items()} == {"1": 2, "3": 2}
  assert all(min(row) > 0 for rows in results["pairs"].values() for row in rows)
  assert [len(row) for row in results["tail"]["2"]] == [3, 3]
  assert (tmp_path / "table.md").read_text() == text + "\n"


def test_other_bits_are_refused():
  one = Completion(
    request_id="0/0/0",
    tokens=(1, 2),
    behaviour_logprobs=np.zeros(2, np.float32),
    raw_logprobs=np.zeros(2, np.float32),
    text="",
    finish_reason="stop",
    policy_version=0,
  )
  speculation_pays.check_same([one], [one], "batch 1")
  other = dataclasses.replace(one, tokens=(1, 3))
  with pytest.raises(ValueError, match=r"batch 1: got other bits for request '0/0/0'"):
    speculation_pays.check_same([one], [other], "batch 1")


def test_a_workload_without_an_interval_is_refused():
  with pytest.raises(ValueError, match=re.escape("Workload: got pairs=1")):
    Workload(pairs=1)
