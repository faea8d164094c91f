"""Minimal hand-made rollouts and groups, for tests of training and metrics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from seerjax import types

PLAIN = types.SamplingParams()
NOTHING = types.Verdict(reward=0.0, correct=False, well_formed=False)


def rollout(
  prompt: Sequence[int],
  tokens: Sequence[int],
  *,
  name: str = "r",
  sampling: types.SamplingParams = PLAIN,
  verdict: types.Verdict = NOTHING,
  finish_reason: str = "stop",
) -> types.Rollout:
  """Returns a rollout whose log-probabilities follow from its tokens."""
  return types.Rollout(
    request=types.Request(request_id=name, prompt=tuple(prompt), sampling=sampling),
    completion=types.Completion(
      request_id=name,
      tokens=tuple(tokens),
      behaviour_logprobs=-np.asarray(tokens, np.float32) / 16,
      raw_logprobs=-np.asarray(tokens, np.float32) / 8,
      text="",
      finish_reason=finish_reason,
      policy_version=0,
    ),
    verdict=verdict,
  )


def group(index: int, *rollouts: types.Rollout) -> types.RolloutGroup:
  """Returns a group of responses to one problem, which is named by its number."""
  problem = types.Problem(problem_id=str(index), prompt="")
  return types.RolloutGroup(group_index=index, problem=problem, rollouts=rollouts)
