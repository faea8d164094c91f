"""What nano learns to sleep from, what it is rewarded for, and how its facts are counted."""

from __future__ import annotations

import itertools
import re

import pytest

from experiments import nano_sleep
from seerjax.tasks import stateful
from seerjax.tasks.stateful import StatefulWordProblems
from seerjax.types import Problem

TASK = StatefulWordProblems()
DOCUMENTS = list(itertools.islice(nano_sleep.documents(0), 200))


def words(text: str) -> set[str]:
  return set(re.findall("[A-Za-z]+", text))


def test_no_person_and_no_verb_of_the_test_split_is_learnt():
  told = set().union(*(words(prompt) | words(answer) for prompt, answer in DOCUMENTS))
  assert not told & {*stateful.TEST_NAMES, *stateful.TEST_VERBS}
  assert {*stateful.TRAIN_NAMES} <= told
  # The twin: its own contexts tell of them.
  test = set().union(*(words(context.text) for context in TASK.contexts("test")[:20]))
  assert test & {*stateful.TEST_NAMES} and test & {*stateful.TEST_VERBS}


def test_documents_are_of_four_kinds_and_four_lengths():
  notes = [answer for _, answer in DOCUMENTS if "####" not in answer]
  assert 0.25 < len(notes) / len(DOCUMENTS) < 0.45
  assert all("- " in answer and stateful.facts_in(answer) for answer in notes)
  asked = [prompt for prompt, answer in DOCUMENTS if "####" in answer]
  for length in (0, 1, 2):
    share = sum(prompt.endswith(f"({length})") for prompt in asked) / len(asked)
    assert 0.04 < share < 0.22
  for prompt, answer in DOCUMENTS:
    if prompt.endswith("(0)"):
      assert answer.startswith("#### ")
  assert list(itertools.islice(nano_sleep.documents(0), 20)) == DOCUMENTS[:20]
  assert list(itertools.islice(nano_sleep.documents(1), 5)) != DOCUMENTS[:5]


def test_after_the_facts_only_what_they_do_not_say_is_calculated():
  context = TASK.contexts("heldout")[1]
  kinds = set()
  for place in range(12):
    context = TASK.contexts("heldout")[place]
    for problem in TASK.questions("heldout", place):
      left = nano_sleep.steps_after(problem, context.notes)
      *steps, answer = left.solution.split("\n")
      assert answer == problem.solution.split("\n")[-1] and left.answer == problem.answer
      assert len(steps) <= 1 and not {*steps} & {*context.notes.split("\n")}
      assert TASK.verdict(left, left.solution).correct
      kinds.add(len(steps))
  assert kinds == {0, 1}


def test_lessons_are_sleepers_and_wakers_and_each_has_its_own_verdict():
  lessons = nano_sleep.Lessons()
  assert lessons.num_problems("train") == 4 * len(TASK.contexts("train"))
  sleep, wake = lessons.problem("train", 9), lessons.problem("train", 11)
  context = TASK.contexts("train")[2]
  assert sleep.prompt == TASK.sleep_prompt(context)
  assert lessons.verdict(sleep, context.notes).reward == 1.0
  assert lessons.verdict(sleep, f"#### {wake.answer}").reward == 0.0
  assert wake.prompt == f"{context.facts} {TASK.questions('train', 2)[0].question}"
  assert lessons.verdict(wake, wake.solution).correct
  assert not lessons.verdict(wake, context.notes).correct
  assert lessons.problem("train", 10).prompt == sleep.prompt


def test_reinforcement_is_the_main_job_on_lessons():
  config = nano_sleep.reinforcement("nano", num_steps=3, seed=7)
  assert (config.num_steps, config.seed, config.num_instances) == (3, 7, 1)
  assert config.task == "experiments.nano_sleep:Lessons"
  assert config.rollout.temperature == 1.0 and config.rollout.max_tokens == 160


@pytest.mark.thorough
def test_shipped_nano_knows_no_facts_and_is_compared_with_itself():
  found = nano_sleep.right_facts("nano", "heldout", 16, 0)
  assert found.shape == (16,) and (found == 0).mean() > 0.5
  line = nano_sleep.compare("nano", "nano", "heldout", 16, 0)
  assert "gain 0.0 ± 0.0 points" in line and "16 contexts" in line


def test_a_problem_keeps_what_is_not_its_solution():
  problem = TASK.questions("train", 0)[0]
  left = nano_sleep.steps_after(problem, "")
  assert isinstance(left, Problem) and left.solution == problem.solution
  assert (left.question, left.context) == (problem.question, problem.context)
