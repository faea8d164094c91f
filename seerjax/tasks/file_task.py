"""A task of problems from a file and a function that judges."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses

from seerjax.tasks import splits
from seerjax.types import Problem, Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileTask:
  """Problems that were read, and how answers to them are judged.

  Attributes:
    name: for logs and messages.
    train, heldout: problems in the order of their files.
    judge: (problem, text) -> verdict; never raises on any text.
  """

  name: str
  train: tuple[Problem, ...]
  heldout: tuple[Problem, ...]
  judge: Callable[[Problem, str], Verdict]

  @property
  def _splits(self) -> splits.Splits:
    return splits.Splits(self.name, self.train, self.heldout)

  def num_problems(self, split: str) -> int:
    """Returns how many problems the split has."""
    return len(self._splits.problems(split))

  def problem(self, split: str, index: int) -> Problem:
    """Returns problem `index`, in the order of the file."""
    return self._splits.problem(split, index)

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Returns what `judge` says."""
    return self.judge(problem, text)
