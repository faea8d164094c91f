"""Intervals, clocks and tables of measurements, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from experiments import measure


def test_a_ratio_by_hand():
  # Logarithms -1, 0, 1: mean 0, deviation 1, Student's 4.303 with two degrees of freedom.
  mean, low, high = measure.ratio([np.exp(-1), 1.0, np.exp(1)])
  assert mean == pytest.approx(1)
  assert np.log(high) == pytest.approx(4.3027 / np.sqrt(3), abs=1e-3)
  assert low == pytest.approx(1 / high)


def test_a_share_by_hand():
  value, low, high = measure.share(0.5, 100)
  assert (value, round(low, 3), round(high, 3)) == (0.5, 0.404, 0.596)
  value, low, high = measure.share(0.0, 10)
  assert (value, round(low, 9), round(high, 3)) == (0.0, 0.0, 0.278)


def test_a_mean_by_hand():
  found = measure.mean([1.0, 2.0, 3.0])  # Deviation 1, standard error 1 / sqrt(3).
  assert found.value == 2 and found.high == pytest.approx(2 + 1.96 / math.sqrt(3))
  assert found.text() == "2.0 (0.9 to 3.1)" and found.text(100, 0) == "200 (87 to 313)"
  assert math.isnan(measure.mean([1.0]).low)


def test_a_table_by_hand():
  text = measure.table(("a", "b"), [(1, "x"), ("2", measure.holds(False))])
  assert text.splitlines() == ["| a | b |", "|---|---|", "| 1 | x |", "| 2 | **no** |"]
  assert measure.spread([3000.0, 1000.0, 2500.0]) == "2,500 (1,000 to 3,000)"


def test_every_second_turn_is_backwards():
  assert [measure.in_turn("abc", turn) for turn in range(3)] == [
    ["a", "b", "c"], ["c", "b", "a"], ["a", "b", "c"]
  ]  # fmt: skip


def test_a_call_is_clocked():
  result, took = measure.clocked(lambda: sum(range(100_000)))
  assert result == 4_999_950_000 and took.seconds > 0 and took.cpu_seconds > 0
