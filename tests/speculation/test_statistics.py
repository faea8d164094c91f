"""Acceptance statistics by hand, and errors."""

from __future__ import annotations

import pytest

from seerjax.speculation.statistics import Acceptance


def test_stats_by_hand():
  stats = Acceptance()
  stats.add(3, 1)
  stats.add(2, 2, num_references=15)
  stats.add(0, 0)
  assert (stats.num_steps, stats.num_drafted, stats.num_accepted) == (3, 5, 3)
  assert stats.length == 2.0 and stats.rate == 0.6
  assert stats.rate_at == (1.0, 0.5, 0.0)
  assert stats.length_by_references == {0: 1.5, 15: 3.0}


def test_stats_of_nothing():
  assert (Acceptance().length, Acceptance().rate, Acceptance().rate_at) == (1.0, 0.0, ())


def test_two_are_as_one_that_saw_both():
  one, other, both = Acceptance(), Acceptance(), Acceptance()
  for drafted, held, references in ((3, 1, 0), (1, 1, 2)):
    one.add(drafted, held, references)
    both.add(drafted, held, references)
  for drafted, held, references in ((4, 4, 2), (0, 0, 5)):
    other.add(drafted, held, references)
    both.add(drafted, held, references)
  one.include(other)
  assert one == both
  one.include(Acceptance())
  assert one == both


@pytest.mark.parametrize(
  "call, message",
  [
    (lambda: Acceptance().add(1, 2), "got 2 accepted of 1 drafted"),
  ],
)
def test_refusals(call, message):
  with pytest.raises(ValueError, match=message.replace("(", "[(]").replace(")", "[)]")):
    call()
