"""Splits of tasks: which problems are held out, access by index, and errors."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
import dataclasses
import hashlib
import os
import pathlib
from typing import TypedDict, TypeVar

from seerjax.types import Problem

T = TypeVar("T")

HELDOUT_EVERY = 10  # In a single file, every tenth row is held out.
# Generated problems by split: more than any run uses, and few enough for an index.
SIZES = {"train": 300_000, "heldout": 30_000, "pretrain": 30_000_000}
HELDOUT_SHARE = 8  # Of generated problems, one core in this many is in "heldout" only.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Splits:
  """Base of tasks with problems from files; subclasses add the verdict.

  Attributes:
    name: name of the task, for logs and messages.
    train: training problems, in the order of the file.
    heldout: evaluation problems.
  """

  name: str
  train: tuple[Problem, ...]
  heldout: tuple[Problem, ...]

  def problems(self, split: str) -> tuple[Problem, ...]:
    """Returns the problems of a split.

    Raises:
      ValueError: if the split is neither "train" nor "heldout".
    """
    if split == "train":
      return self.train
    if split == "heldout":
      return self.heldout
    raise unknown_split(self.name, split, ("train", "heldout"))

  def num_problems(self, split: str) -> int:
    """Returns the number of problems in a split.

    Raises:
      ValueError: see `problems`.
    """
    return len(self.problems(split))

  def problem(self, split: str, index: int) -> Problem:
    """Returns problem `index` of a split, in the order of its file.

    Raises:
      ValueError: see `problems`; also if the index is out of range.
    """
    problems = self.problems(split)
    check_index(self.name, split, index, len(problems))
    return problems[index]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn(abc.ABC):
  """Base of tasks that generate their problems; subclasses draw a problem and judge a text.

  Attributes:
    name: name of the task, for logs and messages.
  """

  name: str

  def num_problems(self, split: str) -> int:
    """Returns the number of problems in a split; they repeat if there are fewer different ones.

    Raises:
      ValueError: for an unknown split.
    """
    if split not in SIZES:
      raise unknown_split(self.name, split, tuple(SIZES))
    return SIZES[split]

  def problem(self, split: str, index: int) -> Problem:
    """Returns problem `index` of a split.

    Raises:
      ValueError: see `num_problems`; also if the index is out of range.
    """
    check_index(self.name, split, index, self.num_problems(split))
    return self.drawn(split, index)

  @abc.abstractmethod
  def drawn(self, split: str, index: int) -> Problem:
    """Returns a problem of an existing split and index."""


def check_index(task: str, split: str, index: int, num_problems: int) -> None:
  """Raises ValueError if an index is out of range."""
  if not 0 <= index < num_problems:
    raise ValueError(
      f"{task}: got problem index {index} of split {split!r}, expected 0 <= index <"
      f" {num_problems}; take the index modulo num_problems({split!r})."
    )


def unknown_split(task: str, split: str, splits: Sequence[str]) -> ValueError:
  """Returns the error for a split that a task does not have."""
  return ValueError(
    f"{task}: got split {split!r}, expected one of {tuple(splits)}; 'train' is usual."
  )


def is_heldout(core: str, share: int = HELDOUT_SHARE) -> bool:
  """Returns whether a generated problem belongs to "heldout", from its core and not its index.

  So no held-out problem is a rewording of a problem in another split. About one core in `share` is
  held out, by SHA-256, equally on every machine.
  """
  return hashlib.sha256(core.encode()).digest()[0] % share == 0


def split_rows(rows: Sequence[T]) -> tuple[list[T], list[T]]:
  """Returns (train, heldout) of one file: every tenth row is held out.

  With fewer than ten rows, both splits are the whole file.
  """
  if len(rows) < HELDOUT_EVERY:
    return list(rows), list(rows)
  is_heldout = [index % HELDOUT_EVERY == HELDOUT_EVERY - 1 for index in range(len(rows))]
  train = [row for row, held in zip(rows, is_heldout, strict=True) if not held]
  heldout = [row for row, held in zip(rows, is_heldout, strict=True) if held]
  return train, heldout


class Parts(TypedDict):
  """The arguments train and heldout of `Splits`."""

  train: tuple[Problem, ...]
  heldout: tuple[Problem, ...]


def of_files(
  path: str | os.PathLike[str],
  read: Callable[[pathlib.Path], Sequence[Problem]],
  names: tuple[str, str] = ("train.jsonl", "test.jsonl"),
) -> Parts:
  """Returns the problems of a task from files.

  Args:
    path: a directory with two files or folders, or one file, which `split_rows` splits.
    read: reads one of them.
    names: their names in the directory.
  """
  path = pathlib.Path(path)
  train, heldout = (
    map(read, (path / name for name in names)) if path.is_dir() else split_rows(read(path))
  )
  return {"train": tuple(train), "heldout": tuple(heldout)}


def with_instruction(question: str, instruction: str) -> str:
  """Returns a prompt: the question, and the instruction on a separate line unless it is empty."""
  return f"{question}\n{instruction}" if instruction else question
