"""The baselines "one step off" and "partial rollouts": time saved, and its cost."""

from __future__ import annotations

import dataclasses

import pytest

from seerjax.rollout.policies import Divided, GroupFCFS
from seerjax.simulate import baselines, workloads

SMALL = dataclasses.replace(
  workloads.MOONLIGHT, data_parallel_size=4, num_groups=24, mean_tokens=2000, max_tokens=8000
)


def test_training_is_the_rest_of_the_iteration():
  assert baselines.training_seconds(workloads.MOONLIGHT) == pytest.approx(3910 * 16 / 84)


def test_one_step_off_is_never_fresh_and_waits_for_the_slower_part():
  step = baselines.one_step_off(SMALL, GroupFCFS(), 0, shares=(0.5,))
  assert step.stale_share == 1.0
  assert step.seconds >= baselines.training_seconds(SMALL) / 0.5
  assert baselines.one_step_off(SMALL, GroupFCFS(), 0).seconds <= step.seconds
  assert baselines.synchronous(SMALL, GroupFCFS(), 0).stale_share == 0.0


def test_partial_rollouts_leave_the_longest_for_later():
  policy = Divided(chunk_tokens=500)
  plain = baselines.synchronous(SMALL, policy, 0)
  first, *later = baselines.partial(SMALL, policy, range(3))
  assert first.stale_share == 0.0
  assert first.mean_tokens < plain.mean_tokens
  assert all(0 < step.stale_share < 1 for step in later)
  # With exactly as many as needed, no rollout is left over and none is stale.
  exact = baselines.partial(SMALL, policy, range(2), oversample=1.0)
  assert [step.stale_share for step in exact] == [0.0, 0.0]
  assert exact[0].seconds == pytest.approx(plain.seconds)


def test_fewer_groups_than_needed_are_refused():
  with pytest.raises(ValueError, match="got oversample=0.5, expected at least 1"):
    baselines.partial(SMALL, GroupFCFS(), [0], oversample=0.5)
