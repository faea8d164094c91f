"""A task with problems from a file and a function that judges answers."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses

from seerjax import types
from seerjax.tasks import splits
from seerjax.types import Problem, Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileTask(splits.Splits):
  """Problems read from a file, with a function that judges answers.

  Attributes:
    name, train, heldout: see `Splits`.
    judge: (problem, text) -> verdict; must not raise for any text.
  """

  judge: Callable[[Problem, str], Verdict]

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Calls `judge` with a copy of the problem."""
    return self.judge(types.copied(problem), text)
