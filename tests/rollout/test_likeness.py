"""Correlation of lengths: by hand, and against simpler averages."""

from __future__ import annotations

import numpy as np
import pytest

from seerjax.rollout import likeness


def test_rank_correlation_by_hand():
  done = np.ones((4, 2), bool)
  rising = np.array([[1, 5], [2, 6], [3, 7], [4, 8]])
  assert likeness.rank_correlation(rising, done) == (1.0, 0.0, 6)
  falling = np.stack([rising[:, 0], rising[::-1, 1]], 1)
  assert likeness.rank_correlation(falling, done) == (-1.0, 0.0, 6)
  # One of the six orders turned: (5 - 1) / 6. Without group 0 or 3 it is 1/3, else 1.
  found = likeness.rank_correlation(np.array([[1, 5], [2, 7], [3, 6], [4, 8]]), done)
  assert found.correlation == pytest.approx(4 / 6)
  assert found.error == pytest.approx(np.sqrt(3 / 4 * 4 * (1 / 3) ** 2))
  # Two that still run at 3 are longer than all finished ones, and their order is unknown.
  bounds = np.array([[1, 1], [2, 2], [3, 3], [3, 3]])
  finished = np.array([[True, True], [True, True], [False, False], [False, False]])
  assert likeness.rank_correlation(bounds, finished) == (1.0, 0.0, 5)
  assert likeness.rank_correlation(bounds, finished & False).num_known == 0
  assert likeness.rank_correlation(np.zeros((0, 2), int), np.zeros((0, 2), bool))[2] == 0


def test_rank_correlation_of_larger_groups_is_the_mean_over_pairs_of_places():
  rng = np.random.default_rng(3)
  lengths, finished = rng.integers(1, 9, (7, 4)), rng.random((7, 4)) < 0.7
  agreed = known = 0
  for i in range(4):
    for j in range(i):
      pair = likeness.rank_correlation(lengths[:, [i, j]], finished[:, [i, j]])
      agreed += round(pair.correlation * pair.num_known)
      known += pair.num_known
  found = likeness.rank_correlation(lengths, finished)
  assert found.num_known == known > 30
  assert found.correlation == pytest.approx(agreed / known)


def test_rank_correlation_tells_alike_from_not_alike_while_the_long_ones_still_run():
  rng = np.random.default_rng(0)
  for rho, low, high in ((0.0, -0.2, 0.2), (0.8, 0.6, 1.0)):
    group, own = rng.standard_normal((32, 1)), rng.standard_normal((32, 4))
    lengths = np.exp(6 + 0.8 * (np.sqrt(rho) * group + np.sqrt(1 - rho) * own)).astype(int)
    level = int(np.median(lengths))
    found = likeness.rank_correlation(np.minimum(lengths, level), lengths <= level)
    assert low < found.correlation < high and 0 < found.error < 0.15
