"""What tasks share about splits: which rows are held out, and the refusals of a wrong one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

HELDOUT_EVERY = 10  # In a single file, every tenth row is held out.


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
