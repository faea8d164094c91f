"""A task of problems from a file and a function that judges."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses

from seerjax import types
from seerjax.tasks import splits
from seerjax.types import Problem, Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileTask(splits.Splits):
  """Problems that were read, and how answers to them are judged.

  Attributes:
    name, train, heldout: see `Splits`.
    judge: (problem, text) -> verdict; never raises on any text.
  """

  judge: Callable[[Problem, str], Verdict]

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Returns what `judge` returns for a copy of the problem."""
    return self.judge(types.copied(problem), text)
