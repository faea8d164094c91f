"""What tasks share about splits: which rows are held out, what each has, and the refusals."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import hashlib
from typing import TypeVar

from seerjax.types import Problem

T = TypeVar("T")

HELDOUT_EVERY = 10  # In a single file, every tenth row is held out.
HELDOUT_SHARE = 8  # Of drawn problems, one in so many has a core that only "heldout" asks.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Splits:
  """A task's problems where they come from files; what a task adds is how it judges.

  Attributes:
    name: of the task, for logs and messages.
    train: problems to learn from, in the order of their file.
    heldout: problems to measure on.
  """

  name: str
  train: tuple[Problem, ...]
  heldout: tuple[Problem, ...]

  def problems(self, split: str) -> tuple[Problem, ...]:
    """Returns the problems of a split.

    Raises:
      ValueError: for a split that is neither.
    """
    if split == "train":
      return self.train
    if split == "heldout":
      return self.heldout
    raise unknown_split(self.name, split, ("train", "heldout"))

  def num_problems(self, split: str) -> int:
    """Returns how many problems a split has.

    Raises:
      ValueError: as `problems`.
    """
    return len(self.problems(split))

  def problem(self, split: str, index: int) -> Problem:
    """Returns problem `index` of a split, in the order of its file.

    Raises:
      ValueError: as `problems`, and for an index outside of it.
    """
    problems = self.problems(split)
    check_index(self.name, split, index, len(problems))
    return problems[index]


def check_index(task: str, split: str, index: int, num_problems: int) -> None:
  """Refuses an index outside of the split."""
  if not 0 <= index < num_problems:
    raise ValueError(
      f"{task}: got problem index {index} of split {split!r}, expected 0 <= index <"
      f" {num_problems}; take the index modulo num_problems({split!r})."
    )


def unknown_split(task: str, split: str, splits: Sequence[str]) -> ValueError:
  """Returns the refusal of a split that a task does not have."""
  return ValueError(
    f"{task}: got split {split!r}, expected one of {tuple(splits)}; 'train' is usual."
  )


def is_heldout(core: str, share: int = HELDOUT_SHARE) -> bool:
  """Returns whether a drawn problem is of "heldout": what it is at heart decides, not its index.

  So no held-out problem is one of another split in other clothes. About one core in `share` is held
  out, by SHA-256, on every machine the same.
  """
  return hashlib.sha256(core.encode()).digest()[0] % share == 0


def split_rows(rows: Sequence[T]) -> tuple[list[T], list[T]]:
  """Returns (train, heldout) of one file: every tenth row is held out.

  Fewer than ten rows are too few to part; then both splits are the whole file.
  """
  if len(rows) < HELDOUT_EVERY:
    return list(rows), list(rows)
  is_heldout = [index % HELDOUT_EVERY == HELDOUT_EVERY - 1 for index in range(len(rows))]
  train = [row for row, held in zip(rows, is_heldout, strict=True) if not held]
  heldout = [row for row, held in zip(rows, is_heldout, strict=True) if held]
  return train, heldout
