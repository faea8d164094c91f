"""Minimal hand-made rollouts and groups, for tests of training and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from seerjax import types

PLAIN = types.SamplingParams()
NOTHING = types.Verdict(reward=0.0, correct=False, well_formed=False)


def completion(
  name: str,
  tokens: Sequence[int],
  *,
  logprobs: Sequence[float] | None = None,
  text: str = "",
  finish_reason: str = "stop",
  policy_version: int = 0,
) -> types.Completion:
  """Returns a completion with these log-probabilities, or ones that follow from its tokens."""
  given = None if logprobs is None else np.asarray(logprobs, np.float32)
  return types.Completion(
    request_id=name,
    tokens=tuple(tokens),
    behaviour_logprobs=-np.asarray(tokens, np.float32) / 16 if given is None else given,
    raw_logprobs=-np.asarray(tokens, np.float32) / 8 if given is None else given,
    text=text,
    finish_reason=finish_reason,
    policy_version=policy_version,
  )


def rollout(
  prompt: Sequence[int],
  tokens: Sequence[int],
  *,
  name: str = "r",
  sampling: types.SamplingParams = PLAIN,
  verdict: types.Verdict = NOTHING,
  **others: Any,
) -> types.Rollout:
  """Returns a rollout of a completion as above."""
  return types.Rollout(
    request=types.Request(request_id=name, prompt=tuple(prompt), sampling=sampling),
    completion=completion(name, tokens, **others),
    verdict=verdict,
  )


def of_pairs(
  pairs: Iterable[tuple[types.Request, types.Completion]], index: int = 0
) -> types.RolloutGroup:
  """Returns a group of sampled requests."""
  made = (types.Rollout(request=asked, completion=one, verdict=NOTHING) for asked, one in pairs)
  return group(index, *made)


def group(index: int, *rollouts: types.Rollout) -> types.RolloutGroup:
  """Returns a group of responses to one problem, which is named by its number."""
  problem = types.Problem(problem_id=str(index), prompt="")
  return types.RolloutGroup(group_index=index, problem=problem, rollouts=rollouts)
