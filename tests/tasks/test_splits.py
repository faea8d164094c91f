"""Which rows are held out."""

from __future__ import annotations

from seerjax.tasks import splits


def test_every_tenth_row_is_held_out():
  train, heldout = splits.split_rows(range(25))
  assert heldout == [9, 19]
  assert sorted(train + heldout) == list(range(25))
