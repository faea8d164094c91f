"""Tokens per step by draft length and siblings, and the draft of least time."""

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


def test_a_draft_that_costs_is_shorter():
  chance = np.array([0.8])
  flat = lambda gamma: 1.0
  assert speculation_lib.draft_tokens(chance, 8, flat, lambda gamma: 0.2 * gamma) == 4
  assert speculation_lib.draft_tokens(chance, 8, flat, lambda gamma: 1.0 * gamma) == 0


def test_both_formulas_by_hand():
  # 1 + 0.9 + 0.81 + ... of 5 terms; of 9.
  assert speculation_lib.leviathan(0.9, 4, 0.0) == pytest.approx(4.0951)
  assert speculation_lib.leviathan(0.9, 4, 0.05) == pytest.approx(4.0951 / 1.2)
  assert speculation_lib.leviathan(1.0, 8, 0.0) == 9 and speculation_lib.leviathan(0.5, 0, 9) == 1
  # The article's own p gives 2.6 and 4.1, and 8 only where every token holds.
  assert speculation_lib.article(0.9, 4) == pytest.approx(3.7 / 1.4)
  assert speculation_lib.article(0.9, 8) == pytest.approx(7.3 / 1.8)
  assert speculation_lib.article(1.0, 8) == 8.0


def test_a_roofline_pays_for_rows_and_for_the_draft():
  target, draft = speculation_lib.qwen3_pair()
  speed = lambda batch, chance, length, pair=(target, draft): speculation_lib.speed_up(
    *pair, chance=chance, length=length, batch=batch, context=1024
  )
  cost = draft.step_seconds(1, 1024) / target.step_seconds(1, 1024)
  assert 0.015 < cost < 0.025
  assert speed(1, 0.8, 8) == pytest.approx(speculation_lib.leviathan(0.8, 8, cost), rel=0.02)
  best = {batch: max(speed(batch, 0.8, n) for n in range(1, 17)) for batch in (1, 8, 32, 128)}
  assert best[1] > best[8] > best[32] > best[128]
  # No cell up to 8 drafted tokens gives 8 times, even where 98 % hold.
  assert max(speed(batch, 0.98, n) for batch in best for n in range(1, 9)) < 7.6
  slow = speculation_lib.qwen3_pair(1e-3)
  assert speed(1, 0.98, 8, slow) < speed(1, 0.98, 8) - 1
  assert "| 0.9 | 8 |" in speculation_lib.table()


def test_what_is_no_chance_is_refused():
  for call in (
    lambda: speculation_lib.leviathan(80, 4, 0.1),
    lambda: speculation_lib.article(1.1, 4),
    lambda: speculation_lib.leviathan(0.8, -1, 0.1),
  ):
    with pytest.raises(ValueError, match=r"expected a chance of 0 to 1 and no negative .* 0\.8"):
      call()


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
