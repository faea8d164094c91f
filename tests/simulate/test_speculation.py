"""Tokens a step by draft length and siblings, and the draft of least time."""

from __future__ import annotations

import numpy as np
import pytest

from seerjax.simulate import speculation as speculation_lib
from seerjax.simulate.speculation import SpeculationConfig


def test_the_published_table_comes_back():
  config = SpeculationConfig()
  chance = speculation_lib.acceptance(config, 15)
  assert chance.shape == (16,)
  assert (np.diff(chance) > 0).all()
  tokens = speculation_lib.tokens_per_step(chance, 8)
  for siblings, published in config.published:
    assert tokens[siblings] == pytest.approx(published)


def test_tokens_a_step_by_hand():
  found = speculation_lib.tokens_per_step(np.array([0.5, 0.0]), 2)
  np.testing.assert_allclose(found, [1.75, 1.0])
  np.testing.assert_allclose(speculation_lib.tokens_per_step(np.array([0.5]), 0), [1.0])


def test_the_draft_is_that_of_least_time():
  chance = np.array([0.5, 0.5])
  assert speculation_lib.draft_tokens(chance, 8, lambda gamma: 1.0) == 8
  assert speculation_lib.draft_tokens(chance, 8, lambda gamma: 1.0 + gamma) == 0
  # 1, 1.1 / 1.5, 1.4 / 1.75, ...
  assert speculation_lib.draft_tokens(chance, 2, lambda gamma: (1.0, 1.1, 1.4)[gamma]) == 1


@pytest.mark.parametrize(
  "settings, message",
  [
    ({"max_draft_tokens": 0}, "got max_draft_tokens=0"),
    ({"published": ((1, 2.0), (0, 1.5))}, r"references \[1, 0\], expected"),
    ({"published": ()}, r"references \[\], expected"),
    ({"published": ((0, 9.5),)}, "got 9.5 tokens a step, expected 1 to 9"),
  ],
)
def test_tables_that_cannot_be_are_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    SpeculationConfig(**settings)
