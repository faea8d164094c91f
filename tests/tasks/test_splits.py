"""Selection of held-out rows."""

from __future__ import annotations

from seerjax.tasks import splits
from seerjax.types import Problem


def test_every_tenth_row_is_held_out():
  train, heldout = splits.split_rows(range(25))
  assert heldout == [9, 19]
  assert sorted(train + heldout) == list(range(25))


def test_problems_are_found_by_split_and_index():
  train, heldout = (Problem(problem_id=name, prompt="?") for name in ("a", "b"))
  found = splits.Splits(name="mine", train=(train,), heldout=(heldout,))
  assert found.problem("train", 0) == train and found.problems("heldout") == (heldout,)
  assert found.num_problems("train") == 1
