"""A drafter for tests that knows the answers and errs at a given rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from made_drafters import Observed
import numpy as np


class Guesser(Observed):
  """Drafts paths that are right for some tokens, wrong, too long, or outside the vocabulary.

  The first path errs more often, so that a side path may be accepted for longer. A share `silent`
  of visits gets no draft.
  """

  def __init__(
    self,
    answers: Mapping[str, Sequence[int]],
    seed: int,
    *,
    right: float = 0.8,
    max_paths: int = 3,
    max_draft: int = 6,
    silent: float = 0.0,
  ):
    super().__init__()
    self._answers = answers
    self._rng = np.random.default_rng(seed)
    self._right = right
    self._max_paths = max_paths
    self._max_draft = max_draft
    self._silent = silent

  def draft(self, queries):
    if self._rng.random() < self._silent:
      return ()
    rights = [self._right / 2] + [self._right] * (self._max_paths - 1)
    return [[self._path(query, right) for right in rights[: self._count()]] for query in queries]

  def _count(self) -> int:
    return int(self._rng.integers(0, self._max_paths + 1))

  def _path(self, query, right: float) -> list[int]:
    num_sampled = len(query.tokens) - query.num_prompt
    rest = list(self._answers.get(query.request_id, ()))[num_sampled:]
    count = int(self._rng.integers(0, self._max_draft + 1))
    path = (rest + [0] * count)[:count]
    wrong = [-1, 0, 1, 2, 2**31 - 1]
    return [
      token if self._rng.random() < right else wrong[self._rng.integers(len(wrong))]
      for token in path
    ]
