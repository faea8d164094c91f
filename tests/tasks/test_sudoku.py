"""Sudoku: unique solutions, and a checker that uses the rules alone."""

from __future__ import annotations

import itertools

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from seerjax import tasks
from seerjax.tasks import splits, sudoku
from seerjax.tasks.sudoku import Sudoku, SudokuConfig
from seerjax.types import Problem

TASK = Sudoku()
GIVEN = Problem(problem_id="p", prompt="?", answer=".132 2341 ..14 14..")


def test_a_problem_is_the_same_on_every_machine():
  problem = TASK.problem("heldout", 3)
  assert problem.prompt == (
    "Fill in the sudoku, digits 1 to 4, boxes of 2 by 2.\n.132\n2341\n..14\n14.."
  )
  assert problem.answer == GIVEN.answer
  assert problem.solution == "r1c1=4 r3c1=3 r3c2=2 r4c3=2 r4c4=3\n#### 4132 2341 3214 1423"
  assert tasks.load("sudoku").problem("heldout", 3) == problem


@pytest.mark.parametrize(
  ("text", "reward", "well_formed"),
  [
    ("#### 4132 2341 3214 1423", 1.0, True),
    ("r1c1=4\n####\n4132\n2341\n3214\n1423\n", 1.0, True),
    ("#### 4132234132141423", 1.0, True),
    ("#### 4132 2341 2314 1423", 0.0, True),  # A column holds 2 twice.
    ("#### 1234 3412 2143 4321", 0.0, True),  # Keeps the rules, but not the given digits.
    ("#### .132 2341 3214 1423", 0.0, False),
    ("#### 4132 2341 3214 142", 0.0, False),
    ("#### 4132 2341 3214 1425", 0.0, False),
    ("#### 4132 2341 3214 1423\n#### 4132 2341 3214 1423", 0.0, False),
    ("4132 2341 3214 1423", 0.0, False),
    ("#### ４132 2341 3214 1423", 0.0, False),
    ("####", 0.0, False),
    ("#### " + "1" * 10_000, 0.0, False),
  ],
)
def test_verdict_by_hand(text, reward, well_formed):
  verdict = TASK.verdict(GIVEN, text)
  assert (verdict.reward, verdict.well_formed) == (reward, well_formed)


def test_another_solution_is_right_where_there_are_two():
  problem = Problem(problem_id="p", prompt="?", answer="12.. .... 21.. ....")
  found = list(sudoku.solutions((1, 2, *[0] * 6, 2, 1, *[0] * 6), 4))
  assert len(found) > 1
  for grid in found:
    assert TASK.verdict(problem, f"#### {sudoku.rows_text(grid, 4, ' ')}").correct


def test_solutions_agree_with_all_grids_tried():
  rows = np.array([*itertools.permutations(range(1, 5))])
  picked = np.array([*itertools.product(range(24), repeat=4)])
  grids = rows[picked]  # Every grid with each digit once per row: 24^4 of 4 by 4.
  bits = 1 << grids
  columns = bits.sum(axis=1)
  boxes = bits.reshape(-1, 2, 2, 2, 2).sum(axis=(2, 4)).reshape(-1, 4)
  right = ((columns == 30) & (boxes == 30)).all(axis=1)  # 2 + 4 + 8 + 16: no other four sum so.
  expected = {tuple(grid) for grid in grids[right].reshape(-1, 16).tolist()}
  assert len(expected) == 288  # As is known.
  assert set(sudoku.solutions((0,) * 16, 4)) == expected
  assert all(sudoku.is_solved(grid, (0,) * 16, 4) for grid in expected)
  wrong = grids[~right].reshape(-1, 16)[::1_000].tolist()
  assert not any(sudoku.is_solved(tuple(grid), (0,) * 16, 4) for grid in wrong)


@pytest.mark.parametrize(
  ("size", "count"), [(4, 12), (6, 1), pytest.param(9, 2, marks=pytest.mark.thorough)]
)
def test_every_problem_has_one_solution_and_its_steps_lead_there(size, count):
  task = Sudoku(config=SudokuConfig(size=size))
  num_empty = set()
  for split, index in itertools.product(splits.SIZES, range(count)):
    problem = task.problem(split, index)
    givens = tuple(0 if sign == "." else int(sign) for sign in problem.answer.replace(" ", ""))
    (solved,) = sudoku.solutions(givens, size)
    assert problem.solution.endswith(f"#### {sudoku.rows_text(solved, size, ' ')}")
    assert task.verdict(problem, problem.solution).correct
    assert problem.num_steps == givens.count(0) == problem.solution.count("=")
    assert splits.is_heldout(sudoku.rows_text(solved, size, " ")) == (split == "heldout")
    num_empty.add(givens.count(0))
  assert count < 12 or (min(num_empty) <= 5 and max(num_empty) >= 8)


@hypothesis.given(st.text(max_size=300), st.text("0123456789. \n#", max_size=140))
def test_verdict_never_raises(words, digits):
  for text in (words, f"#### {words}", f"#### {digits}", f"{words}####{digits}"):
    verdict = TASK.verdict(GIVEN, text)
    assert verdict.well_formed or not verdict.correct
