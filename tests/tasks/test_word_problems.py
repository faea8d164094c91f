"""Word problems: their questions, their solutions, and their splits."""

from __future__ import annotations

import collections
from fractions import Fraction
import functools
import json
import pathlib
import re
import string

import hypothesis
from hypothesis import strategies as st
import pytest

from seerjax.tasks import answers, splits, stories, word_problems
from seerjax.types import Problem

TASK = word_problems.WordProblems()
GOLDEN = pathlib.Path(__file__).parent / "word_problems_golden.json"


@functools.cache
def problems(split: str, count: int) -> list[Problem]:
  stride = TASK.num_problems(split) // count
  return [TASK.problem(split, index * stride) for index in range(count)]


def words(text: str) -> set[str]:
  return set(re.findall("[A-Za-z]+", text))


def as_pattern(form: str) -> re.Pattern[str]:
  """A form as a pattern of the sentences that it makes."""
  person, thing, number = "[A-Z][a-z]+", "[a-z]+", "[0-9]+"
  slots = dict(p=person, q=person, o=thing, x=thing, n=number, k=number)
  pieces = string.Formatter().parse(form)
  return re.compile("".join(re.escape(text) + (slots[slot] if slot else "")
                            for text, slot, _, _ in pieces))  # fmt: skip


def test_problems_are_the_same_on_every_machine():
  golden = json.loads(GOLDEN.read_text())
  assert len(golden) >= 6
  for entry in golden:
    assert TASK.problem(entry["split"], entry["index"]) == Problem(**entry["problem"])


@pytest.mark.thorough
def test_every_solution_is_judged_correct_and_every_line_is_true():
  for split in splits.SIZES:
    for problem in problems(split, 1000):
      verdict = TASK.verdict(problem, problem.solution)
      assert verdict.correct and verdict.well_formed and verdict.answer == problem.answer
      *lines, last = problem.solution.split("\n")
      assert last == f"#### {problem.answer}"
      assert len(lines) == problem.num_steps >= 1
      for line in lines:
        left, _, right = line.partition("=")
        first, sign, second = re.fullmatch(r"(\d+)([-+*/])(\d+)", left).groups()
        value = {
          "+": lambda a, b: a + b,
          "-": lambda a, b: a - b,
          "*": lambda a, b: a * b,
          "/": lambda a, b: a / b,
        }[sign](Fraction(first), Fraction(second))
        assert value == answers.read_number(right) and value >= 0, line
      assert answers.read_number(lines[-1].partition("=")[2]) == answers.read_number(problem.answer)


def test_a_story_told_by_hand():
  # The numbers of a story's prompt, taken in order, give the lines of its solution.
  num_checked = 0
  for index in range(1000):
    problem = TASK.problem("train", index)
    words = set(re.findall(r"\w+", problem.context))
    if words & {"boxes", "times", "half", "day", "days", "years"} or any(
      len(words & {*of}) > 1 for of in (stories.NAMES, stories.OBJECTS)
    ):
      continue
    num_checked += 1
    numbers = [int(n) for n in re.findall(r"\d+", problem.context)]
    value = numbers[0]
    for sentence, number in zip(problem.context.split(". ")[1:], numbers[1:], strict=True):
      is_loss = re.search("sells|loses|takes|to a friend|gives a friend", sentence)
      value += -number if is_loss else number
    assert problem.answer == str(value)
  assert num_checked > 100


def test_context_and_question_make_the_prompt_and_contexts_are_shared():
  for split in splits.SIZES:
    for index in range(50):
      group = TASK.questions(split, index)
      assert len({problem.context for problem in group}) == 1
      assert len({problem.problem_id for problem in group}) == len(group) == 3
      assert len({problem.prompt for problem in group}) == 3
      for number, problem in enumerate(group):
        assert problem.prompt == f"{problem.context} {problem.question}"
        assert problem.question.endswith("?")
        assert problem == TASK.problem(split, index + number * TASK.num_contexts(split))


@pytest.mark.thorough
def test_all_kinds_of_questions_are_asked_in_every_split():
  kinds = ("now", "goal", "share", "price", "both", "difference")
  for split, forms in (
    ("pretrain", stories.TRAIN_FORMS),
    ("train", stories.TRAIN_FORMS),
    ("heldout", stories.HELDOUT_FORMS),
  ):
    found = collections.Counter(
      kind
      for problem in problems(split, 1000)
      for kind in kinds
      if any(as_pattern(form).fullmatch(problem.question) for form in forms[kind])
    )
    assert set(found) == set(kinds)
    assert sum(found.values()) >= 1000


def test_heldout_forms_are_unseen_but_made_of_seen_words():
  train, heldout = stories.TRAIN_FORMS, stories.HELDOUT_FORMS
  assert train.keys() == heldout.keys()
  train_patterns = [as_pattern(form) for forms in train.values() for form in forms]
  example = dict(p="Ana", q="Ben", o="pens", x="cups", n=12, k=3)
  for forms in heldout.values():
    for form in forms:
      assert not any(p.fullmatch(form.format(**example)) for p in train_patterns), form
  of_train = set().union(*(words(re.sub("{.}", "", f)) for fs in train.values() for f in fs))
  of_heldout = set().union(*(words(re.sub("{.}", "", f)) for fs in heldout.values() for f in fs))
  assert of_heldout <= of_train


def test_splits_are_disjoint():
  prompts = {split: {p.prompt for p in problems(split, 1000)} for split in splits.SIZES}
  assert all(len(found) > 950 for found in prompts.values())
  assert not prompts["heldout"] & (prompts["train"] | prompts["pretrain"])
  assert len(prompts["train"] & prompts["pretrain"]) < 3  # Very short ones may meet by chance.


def test_heldout_numbers_are_larger():
  def numbers(split: str) -> list[int]:
    return [int(n) for p in problems(split, 1000) for n in re.findall(r"\d+", p.context)]

  train, heldout = numbers("train"), numbers("heldout")
  assert max(train) == 40 and max(heldout) == 56
  assert sum(heldout) / len(heldout) > 1.2 * sum(train) / len(train)


def test_lengths_have_a_long_tail_and_belong_to_the_context():
  steps = sorted(problem.num_steps for problem in problems("train", 1000))
  assert 2 <= steps[500] <= 4
  assert steps[980] >= 3.5 * steps[500]
  assert 20 <= steps[-1] <= stories.MAX_STEPS + 4
  groups = [[p.num_steps for p in TASK.questions("train", i)] for i in range(300)]
  mean = sum(map(sum, groups)) / (3 * len(groups))
  between = sum((sum(g) / 3 - mean) ** 2 for g in groups) / len(groups)
  total = sum((s - mean) ** 2 for g in groups for s in g) / (3 * len(groups))
  assert between > 0.6 * total


def test_some_answers_are_fractions_but_few():
  share = sum("/" in problem.answer for problem in problems("train", 1000)) / 1000
  assert 0.001 < share < 0.05


@pytest.mark.parametrize("split", splits.SIZES)
def test_knobs_at_their_limits_make_sound_problems(split):
  for config in (
    word_problems.WordProblemsConfig(max_operand=4, max_total=8),
    word_problems.WordProblemsConfig(max_operand=99, max_total=400),
  ):
    task = word_problems.WordProblems(config=config)
    for index in range(40):
      for problem in task.questions(split, index):
        assert task.verdict(problem, problem.solution).correct
        assert problem.num_steps <= 2 * stories.MAX_STEPS + 2
        # No person is left with zero or less; only a difference may be 0.
        assert "=0\n" not in problem.solution.rpartition("\n")[0]
        assert "=-" not in problem.solution


@hypothesis.given(st.text(max_size=400))
def test_verdict_never_raises(text):
  problem = TASK.problem("train", 0)
  for response in (
    text,
    f"{text}#### {text}",
    (text + "#### 7") * 20,
    "#### " + "7" * 10_000,
    text * 30,
  ):
    TASK.verdict(problem, response)
