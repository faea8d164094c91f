"""Each verb's effect, computed by hand."""

from __future__ import annotations

import copy

from plan_cases import LANGUAGE, THREE, sentence
import pytest


@pytest.mark.parametrize(
  ("edit", "made"),
  [
    # In the middle of run 1, turns 20 to 59, for 4 turns.
    (("paint", 1, 8, 23, 3), [[0, 0, 20], [0, 1, 40], [2, 3, 44], [0, 1, 60], [1, 0, 120]]),
    # For 100 turns from turn 20: over all that follows.
    (("paint", 1, 0, 23, 15), [[0, 0, 20], [2, 3, 120]]),
    # Run 3 is the idle end; counted modulo 4, so is run 7.
    (("paint", 7, 9, 23, 1), [*THREE, [2, 3, 122]]),
    # A neighbour of the same machine is joined.
    (("paint", 1, 0, 0, 3), [[0, 0, 24], [0, 1, 60], [1, 0, 120]]),
    (("insert", 1, 8, 23, 3), [[0, 0, 20], [0, 1, 40], [2, 3, 44], [0, 1, 64], [1, 0, 124]]),
    (("delete", 1, 0, 0, 0), [[0, 0, 60], [1, 0, 120]]),
    (("delete", 1, 6, 0, 0), [[0, 0, 20], [1, 0, 120]]),
    (("delete", 1, 11, 0, 0), [[0, 0, 20], [1, 0, 80]]),
    (("delete", 0, 0, 0, 0), [[0, 1, 60], [1, 0, 120]]),
    (("delete", 2, 6, 0, 0), [[0, 0, 20], [0, 1, 60]]),
    (("move", 1, 0, 0, 8), [[0, 0, 20], [0, 1, 61], [1, 0, 120]]),
    (("move", 0, 0, 0, 0), [[0, 1, 60], [1, 0, 120]]),
    (("move", 2, 0, 0, 15), [[0, 0, 20], [0, 1, 60], [1, 0, 150]]),
    (("slide", 0, 1, 0, 15), [[0, 0, 50], [0, 1, 90], [1, 0, 120]]),
    (("slide", 1, 15, 0, 0), [[0, 0, 20], [0, 1, 30], [1, 0, 90]]),
    (("slide", 1, 0, 0, 0), [[0, 0, 20], [0, 1, 30], [1, 0, 120]]),
    (("change", 1, 0, 37, 0), [[0, 0, 20], [3, 1, 60], [1, 0, 120]]),
    (("change", 1, 6, 37, 0), [[0, 0, 20], [0, 7, 60], [1, 0, 120]]),
    (("change", 1, 11, 37, 0), [[0, 0, 20], [3, 7, 60], [1, 0, 120]]),
    (("swap", 0, 0, 0, 0), [[0, 1, 40], [0, 0, 60], [1, 0, 120]]),
    (("rekind", 0, 0, 7, 0), [[0, 7, 20], [0, 1, 60], [1, 7, 120]]),
    (("rekind", 2, 8, 7, 0), [[0, 0, 20], [0, 1, 60], [1, 7, 120]]),
  ],
)
def test_edits_by_hand(edit, made):
  before = copy.deepcopy(THREE)
  assert LANGUAGE.apply(THREE, sentence(edit), 0) == made
  assert before == THREE


def test_edits_of_a_sentence_follow_one_another():
  edits = sentence(("paint", 0, 0, 5, 3), ("paint", 1, 0, 17, 0), ("insert", 0, 0, 3, 9))
  assert LANGUAGE.apply([], edits, 0) == [[0, 3, 16], [0, 5, 20], [1, 7, 21]]


def test_clips_where_the_turns_end():
  assert LANGUAGE.apply([[0, 0, 490]], sentence(("insert", 0, 8, 11, 15)), 0) == [
    [0, 0, 245], [1, 1, 345], [0, 0, 500],
  ]  # fmt: skip
  assert LANGUAGE.apply([[0, 0, 500]], sentence(("paint", 1, 15, 11, 15)), 0) == [
    [0, 0, 468], [1, 1, 500],
  ]  # fmt: skip
