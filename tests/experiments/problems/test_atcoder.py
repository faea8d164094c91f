"""Published totals of a contest become means, which are not comparable with our scores."""

from __future__ import annotations

from experiments.problems import atcoder


def test_totals_become_means_that_do_not_compare():
  first, second = atcoder.published((300, "A", 2024), (150, "B", 2025))
  assert (first.value, first.who, first.year) == (2.0, "A", 2024) and second.value == 1.0
  assert not first.is_comparable and "150 inputs, which are not ours" in first.source
