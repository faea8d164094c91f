"""Countdown: expressions are parsed, never executed, and evaluated exactly."""

from __future__ import annotations

from fractions import Fraction
import json
import pathlib
import re

import hypothesis
from hypothesis import strategies as st
import pytest

from seerjax.tasks import countdown, splits
from seerjax.types import Problem

TASK = countdown.Countdown()


def test_problems_are_the_same_on_every_machine():
  golden = json.loads((pathlib.Path(__file__).parent / "countdown_golden.json").read_text())
  assert len(golden) >= 6
  for entry in golden:
    assert TASK.problem(entry["split"], entry["index"]) == Problem(**entry["problem"])


@pytest.mark.parametrize("split", splits.SIZES)
def test_every_problem_has_a_solution_and_every_line_is_true(split):
  for index in range(250):
    problem = TASK.problem(split, index)
    assert TASK.verdict(problem, problem.solution).correct
    for first, sign, second, result in re.findall(r"(\d+)([-+*/])(\d+)=(\d+)", problem.solution):
      value = {
        "+": int(first) + int(second),
        "-": int(first) - int(second),
        "*": int(first) * int(second),
        "/": Fraction(int(first), int(second)),
      }[sign]
      assert value == int(result) > 0


def test_heldout_has_a_number_that_train_never_has():
  for index in range(300):
    given = [int(n) for n in re.findall(r"\d+", TASK.problem("heldout", index).answer)][1:]
    assert max(given) > countdown.MAX_NUMBER
    given = [int(n) for n in re.findall(r"\d+", TASK.problem("train", index).answer)][1:]
    assert max(given) <= countdown.MAX_NUMBER


def test_solutions_show_between_no_and_many_failed_tries():
  tries = [TASK.problem("train", i).solution.count("\n") for i in range(500)]
  assert min(tries) == 1 and max(tries) == countdown.MAX_ATTEMPTS + 1


@pytest.mark.parametrize(
  ("expression", "value"),
  [
    ("3*7+25", Fraction(46)),
    ("25 + 7*3", Fraction(46)),
    ("(25-7)/3", Fraction(6)),
    ("7/3", Fraction(7, 3)),
    ("7/3/25", Fraction(7, 75)),
    ("3", Fraction(3)),
    ("((3))", Fraction(3)),
    ("3+3", None),
    ("7+4", None),
    ("25/(7-7)", None),
    ("25/(3-7+4)", None),
    ("-3+7", None),
    ("+3", None),
    ("3**7", None),
    ("7//3", None),
    ("3.0+7", None),
    ("3+", None),
    ("", None),
    ("()", None),
    ("3(7)", None),
    ("007", None),
    ("3, 7", None),
    ("__import__('os')", None),
    ("3 if 7 else 25", None),
    ("3\x00", None),
    ("3\n+7", None),
    ("３+7", None),
    ("(" * 60 + "3" + ")" * 60, Fraction(3)),
    ("(" * 64 + "3" + ")" * 64, None),
    ("9" * 10_000, None),
  ],
)
def test_evaluate_by_hand(expression, value):
  assert countdown.evaluate(expression, (3, 7, 25)) == value


def test_a_number_given_twice_may_be_used_twice():
  assert countdown.evaluate("5*5", (5, 5)) == 25
  assert countdown.evaluate("5*5*5", (5, 5)) is None
  assert countdown.evaluate("4/(5-5)", (4, 5, 5)) is None


@pytest.mark.parametrize(
  ("text", "reward", "well_formed"),
  [
    ("3*7=21, 21+25=46\n#### 3*7+25", 1.0, True),
    ("#### 25+3*7 \n", 1.0, True),
    ("#### 25+7", 0.0, True),
    ("#### 46", 0.0, False),
    ("#### 3*7+25 = 46", 0.0, False),
    ("3*7+25", 0.0, False),
    ("#### 3*7+25\n#### 3*7+25", 0.0, False),
    ("####", 0.0, False),
  ],
)
def test_verdict_by_hand(text, reward, well_formed):
  verdict = TASK.verdict(Problem(problem_id="p", prompt="?", answer="46 = 3 7 25"), text)
  assert (verdict.reward, verdict.well_formed) == (reward, well_formed)


@hypothesis.given(st.text(max_size=300), st.text("0123456789+-*/() ", max_size=140))
def test_verdict_never_raises(words, expression):
  problem = TASK.problem("train", 0)
  for text in (
    words,
    f"#### {words}",
    f"#### {expression}",
    words * 40,
    f"{words}####{expression}",
  ):
    TASK.verdict(problem, text)
