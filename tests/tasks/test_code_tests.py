"""Programs with unit tests: passes, failures, cheats, and refused files."""

from __future__ import annotations

import itertools
import json

import hypothesis
from hypothesis import strategies as st
import pytest

from seerjax import tasks
from seerjax.sandbox.sandbox import Limits, Sandbox
from seerjax.tasks import code_tests
from seerjax.tasks.code_tests import CodeTests, UnitTests
from seerjax.types import Problem

ADD = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", 'assert add("a", "b") == "ab"']
CHECK = """
def check(candidate):
  assert candidate(1, 2) == 3
  try:
    candidate(1, None)
  except TypeError:
    return
  raise AssertionError("no error")

check(add)
"""


@pytest.fixture(scope="module")
def task():
  with Sandbox() as sandbox:
    yield CodeTests(
      train=(), heldout=(), sandbox=sandbox, limits=Limits(wall_seconds=20.0, cpu_seconds=1.0)
    )


def judged(task, tests, program):
  problem = Problem(problem_id="p", prompt="?", answer=tests)
  return task.verdict(problem, f"Here it is.\n```python\n{program}\n```\n")


@pytest.mark.thorough
@pytest.mark.parametrize(
  ("program", "correct"),
  [
    ("def add(a, b):\n  return a + b", True),
    ("import numpy as np\ndef add(a, b):\n  return a + b if a == 'a' else np.int64(a + b)", True),
    ("def add(a, b):\n  return a - b", False),
    ("def add(a, b):\n  raise ValueError", False),
    ("def plus(a, b):\n  return a + b", False),
    ("def add(a, b):\n  return [a + b]", False),
    # An object that equals everything, an early exit, and the first expected value only.
    ("class A:\n  def __eq__(s, o):\n    return True\ndef add(a, b):\n  return A()", False),
    ("import os\nos._exit(0)", False),
    ("import sys\nsys.exit(0)", False),
    ("def add(a, b):\n  return 3", False),
    ("def _values_of_tests(expressions):\n  return [True] * len(expressions)", False),
    ("def add(a, b):\n  while True: pass", False),
  ],
)
def test_values_are_compared_outside(task, program, correct):
  assert len(UnitTests.read("\n".join(ADD)).values) == 3
  verdict = judged(task, "\n".join(ADD), program)
  assert verdict.correct == correct == bool(verdict.reward) and verdict.well_formed


@pytest.mark.thorough
@pytest.mark.parametrize(
  ("program", "correct"),
  [
    ("def add(a, b):\n  return a + b", True),
    ("def add(a, b):\n  return 3", False),
    ("def add(a, b):\n  return a - b", False),
    ("import os\nos._exit(0)", False),
  ],
)
def test_tests_that_are_a_text_run_behind_the_program(task, program, correct):
  assert not UnitTests.read(CHECK).values
  assert judged(task, CHECK, program).correct == correct


def test_a_test_without_a_literal_makes_all_of_them_run():
  tests = UnitTests.read("assert f(1) == 2\nassert f(2) == g(2)")
  assert not tests.values


@pytest.mark.parametrize(
  "text",
  [
    "no program",
    "```python\ndef add(a, b):\n  return a + b",
    "```python\ndef add(a, b:\n```",
    "```python\n" + "x = 1\n" * 20_000 + "```",
    "```\ndef add(a, b):\n  return a + b\n```",
  ],
)
def test_a_text_without_a_program_is_not_well_formed(task, text):
  problem = Problem(problem_id="p", prompt="?", answer=ADD[0])
  verdict = task.verdict(problem, text)
  assert (verdict.reward, verdict.correct, verdict.well_formed) == (0.0, False, False)


@hypothesis.given(st.text(max_size=200))
def test_reading_a_program_never_raises(words):
  for text in (words, f"```python\n{words}\n```"):
    code_tests.read_program(text)


VALUES = st.recursive(
  st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 2.0]) | st.text("ab"),
  lambda inner: (
    st.lists(inner, max_size=2)
    | st.lists(inner, max_size=2).map(tuple)
    | st.dictionaries(st.text("ab", max_size=1), inner, max_size=2)
    | st.sets(st.integers(0, 2), max_size=2)
  ),
  max_leaves=4,
)


@hypothesis.given(VALUES, VALUES)
def test_values_are_equal_where_python_s_are(one, other):
  plain = [json.loads(json.dumps(code_tests.plain(value))) for value in (one, other)]
  assert (plain[0] == plain[1]) == (one == other)
  assert json.loads(json.dumps(code_tests.plain(one))) == plain[0]


def test_values_of_each_kind_by_hand():
  values = [
    1, "1", b"1", 1j, 1.5, None, [1], (1,), {1}, {1: 2}, {"1": 2}, [[1]], [(1,)], {(1, 2): [3]}
  ]  # fmt: skip
  found = [json.loads(json.dumps(code_tests.plain(value))) for value in values]
  for (i, one), (j, other) in itertools.product(enumerate(found), enumerate(found)):
    assert (one == other) == (i == j)


@pytest.mark.thorough
def test_a_file_is_read_and_an_answer_judged(tmp_path):
  path = tmp_path / "code.jsonl"
  rows = [{"prompt": "Write add(a, b).", "tests": ADD, "solution": "s"}]
  rows += [{"prompt": "Write add(a, b) again.\n", "tests": CHECK}]
  path.write_text("\n".join(map(json.dumps, rows)))
  task = tasks.load("code", path=path)
  assert isinstance(task, CodeTests)
  assert task.num_problems("train") == task.num_problems("heldout") == 2
  problem = task.problem("train", 0)
  assert problem.prompt == (
    "Write add(a, b).\nAnswer with one fenced block of Python that begins with ```python."
  )
  assert problem.solution == "s" and problem.answer == "\n".join(ADD)
  for index in range(2):
    found = task.problem("heldout", index)
    assert task.verdict(found, "```python\nadd = lambda a, b: a + b\n```").correct
  task.close()
  with pytest.raises(ValueError, match="got a call after close"):
    task.verdict(problem, "```python\nadd = 1\n```")
