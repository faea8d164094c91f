"""Draws are equal on every machine, uniform, and within their range."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st

from seerjax.tasks.draws import Draws


def test_draws_are_the_same_on_every_machine():
  draws = Draws("golden", 7)
  assert [draws.below(1000) for _ in range(6)] == GOLDEN_DRAWS
  assert Draws("golden", 8).below(1000) != GOLDEN_DRAWS[0]


GOLDEN_DRAWS = [10, 768, 396, 952, 616, 255]


@hypothesis.given(st.integers(1, 10**9), st.integers(0, 10**9))
def test_draws_stay_in_range(limit, seed):
  draws = Draws(seed)
  assert 0 <= draws.below(limit) < limit
  assert 5 <= draws.between(5, 4 + limit) <= 4 + limit


def test_draws_cover_their_range_evenly():
  draws = Draws("even")
  counts = [0] * 10
  for _ in range(5000):
    counts[draws.below(10)] += 1
  assert min(counts) > 400 and max(counts) < 600
  assert abs(sum(draws.chance(0.3) for _ in range(5000)) - 1500) < 150


def test_sample_takes_each_item_once():
  assert sorted(Draws("s").sample("abcdef", 6)) == list("abcdef")
