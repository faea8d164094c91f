"""Knights and knaves: a truth table decides, in the generator and in the checker."""

from __future__ import annotations

import itertools
import re

import hypothesis
from hypothesis import strategies as st
import pytest

from seerjax import tasks
from seerjax.tasks import puzzles, splits
from seerjax.tasks.puzzles import Puzzles, PuzzlesConfig
from seerjax.types import Problem

TASK = Puzzles()
# If Ada is a knight, Ben is a knave, and his "both of us are knights" is a lie, as it must be. If
# Ada is a knave, Ben would be a knight who lies.
GIVEN = Problem(problem_id="p", prompt="?", answer="Ada:!B Ben:&AB")


def test_a_problem_is_the_same_on_every_machine():
  problem = TASK.problem("heldout", 2)
  assert problem.prompt.split("\n") == [
    "Knights always tell the truth, knaves always lie.",
    "Flo says: Gus is a knave.",
    "Gus says: Gus is a knave if and only if Flo is a knave.",
    "Ida says: Gus is a knave and Flo is a knight.",
    "Who is a knight, who a knave?",
  ]
  assert problem.answer == "Flo:!G Gus:=!G!F Ida:&!GF"
  assert problem.solution.split("\n") == [
    "Flo knight, Gus knight, Ida knight: not so, says Flo.",
    "Flo knight, Gus knight, Ida knave: not so, says Flo.",
    "#### Flo knight, Gus knave, Ida knight",
  ]
  assert tasks.load("puzzles").problem("heldout", 2) == problem


@pytest.mark.parametrize(
  ("formula", "rows"),  # Of A, B: TT, TF, FT, FF.
  [
    ("A", "1100"),
    ("!A", "0011"),
    ("!!B", "1010"),
    ("&AB", "1000"),
    ("|AB", "1110"),
    ("=AB", "1001"),
    (">AB", "1011"),
    ("!>AB", "0100"),
    ("&A!B", "0100"),
    ("|&AB!A", "1011"),
    (">>ABA", "1100"),
  ],
)
def test_truth_tables_by_hand(formula, rows):
  found = [
    puzzles.value(formula, dict(A=a, B=b)) for a, b in itertools.product((True, False), repeat=2)
  ]
  assert found == [row == "1" for row in rows]


@pytest.mark.parametrize(
  ("formula", "message"),
  [
    ("", "got '' with '' where a formula begins"),
    ("&A", "got '' with '' where"),
    ("AB", "got 'AB' with 'B' too much, expected one formula in Polish notation over the letters"),
    ("C", "got 'C' with 'C' where a formula begins"),
    ("A and B", "got 'A and B' with ' and B' too much"),
  ],
)
def test_what_is_no_formula_is_refused(formula, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    puzzles.value(formula, dict(A=True, B=False))


def test_solutions_by_hand():
  assert puzzles.solutions(dict(A="!B", B="&AB")) == [dict(A=True, B=False)]
  # A knight Ben makes a true statement about a knave Ada: anything follows from a false premise.
  assert puzzles.solutions(dict(A="!B", B=">AB")) == [
    dict(A=True, B=False), dict(A=False, B=True)
  ]  # fmt: skip
  assert puzzles.solutions(dict(A="!A")) == []  # The liar.
  assert len(puzzles.solutions(dict(A="A"))) == 2


@pytest.mark.parametrize(
  ("text", "reward", "well_formed"),
  [
    ("#### Ada knight, Ben knave", 1.0, True),
    ("Ada first.\n#### Ben is a knave, and Ada is a knight.", 1.0, True),
    ("#### Ada knave, Ben knight", 0.0, True),
    ("#### Ada knight, Ben knight", 0.0, True),
    ("#### Ada knight", 0.0, False),
    ("#### Ada knight, Ben knave, Cid knave", 0.0, False),
    ("#### Ada knight, Ada knight", 0.0, False),
    ("#### Ada knight, Bob knave", 0.0, False),
    ("#### Ada knight, Ben knave\n#### Ada knight, Ben knave", 0.0, False),
    ("Ada knight, Ben knave", 0.0, False),
    ("#### Ada is a knight and Ben is a knave", 0.0, False),
    ("#### ada knight, ben knave", 0.0, False),
    ("####", 0.0, False),
    ("#### " + "Ada knight, " * 1_000, 0.0, False),
  ],
)
def test_verdict_by_hand(text, reward, well_formed):
  verdict = TASK.verdict(GIVEN, text)
  assert (verdict.reward, verdict.well_formed) == (reward, well_formed)
  assert verdict.answer in ("", "Ada knight, Ben knave") or not verdict.correct


@pytest.mark.parametrize("most", [2, 3, 5])
def test_every_problem_has_one_solution_by_every_assignment_judged(most):
  task = Puzzles(config=PuzzlesConfig(max_people=most))
  counts = set()
  for split, index in itertools.product(splits.SIZES, range(90 // most**2)):
    problem = task.problem(split, index)
    assert task.verdict(problem, problem.solution).correct
    names = [part.partition(":")[0] for part in problem.answer.split()]
    judged = [
      task.verdict(
        problem, "#### " + ", ".join(f"{n} {kind}" for n, kind in zip(names, kinds, strict=True))
      )
      for kinds in itertools.product(("knight", "knave"), repeat=len(names))
    ]
    assert all(verdict.well_formed for verdict in judged)
    assert sum(verdict.correct for verdict in judged) == 1
    counts.add(len(names))
  assert counts == set(range(2, most + 1))


def test_no_heldout_puzzle_is_another_split_s_with_other_names():
  def core(problem):
    formulas = [part.partition(":") for part in problem.answer.split()]
    letters = "".join(name[0] for name, _, _ in formulas)
    table = str.maketrans(letters, "ABCDEFGHIJ"[: len(letters)])
    return " ".join(formula for _, _, formula in formulas).translate(table)

  heldout = {core(TASK.problem("heldout", index)) for index in range(30)}
  train = {core(TASK.problem("train", index)) for index in range(60)}
  assert len(heldout) > 10 and len(train) > 30
  assert not heldout & train
  assert all(map(splits.is_heldout, heldout)) and not any(map(splits.is_heldout, train))


def test_a_sentence_by_hand():
  assert puzzles.sentence(">A!B") == "if Ada is a knight, then Ben is a knave"
  assert puzzles.sentence("!=!CA") == (
    "it is not so that Cid is a knave if and only if Ada is a knight"
  )


@hypothesis.given(
  st.text(max_size=300),
  st.lists(st.sampled_from(["Ada", "Ben", "knight", "knave", ", ", " is a ", "and "]), max_size=9),
)
def test_verdict_never_raises(words, pieces):
  for text in (words, f"#### {words}", f"#### {' '.join(pieces)}", f"{words}####{''.join(pieces)}"):
    verdict = TASK.verdict(GIVEN, text)
    assert verdict.well_formed or not verdict.correct
