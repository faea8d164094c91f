"""Training nano for sleep: its data, its rewards, and how facts are counted."""

from __future__ import annotations

from collections.abc import Sequence
import itertools
import re

import numpy as np
import pytest

from experiments.learning import pretrain_nano
from experiments.sleep import train_nano as nano_sleep
import seerjax
from seerjax.models import huggingface, loading
from seerjax.tasks import stateful, stories
from seerjax.tasks.draws import Draws
from seerjax.tasks.stateful import StatefulWordProblems
from seerjax.types import Problem

TASK = StatefulWordProblems()
DOCUMENTS = list(itertools.islice(nano_sleep.documents(0), 200))


def words(text: str) -> set[str]:
  return set(re.findall("[A-Za-z]+", text))


def test_no_person_and_no_verb_of_the_test_split_is_learnt():
  seen = set().union(*(words(prompt) | words(answer) for prompt, answer in DOCUMENTS))
  unread = {*stateful.TEST_NAMES, *stateful.TEST_VERBS, *nano_sleep.PROBE_NAMES}
  assert not seen & unread
  assert {*nano_sleep.LEARNT_NAMES} <= seen
  # All their names are prefixes of other names, so that no part of a name is new.
  for name in (*stateful.TEST_NAMES, *nano_sleep.PROBE_NAMES):
    assert any(word.startswith(name) for word in seen)
  # Twin: the run's own contexts contain them.
  test = set().union(*(words(context.text) for context in TASK.contexts("test")[:20]))
  assert test & {*stateful.TEST_NAMES} and test & {*stateful.TEST_VERBS}


def test_people_have_other_names_in_every_document():
  names = [nano_sleep.new_names(Draws("names", number), 9) for number in range(300)]
  assert all(len({*several}) == 9 for several in names)
  # The form that documents and the regular expression of facts require.
  assert all(re.fullmatch("[A-Z][a-z]+", name) for several in names for name in several)
  drawn = [name for several in names for name in several]
  share = sum(name in nano_sleep.LEARNT_NAMES for name in drawn) / len(drawn)
  assert 0.4 < share < 0.6
  invented = {*drawn} - {*nano_sleep.LEARNT_NAMES}
  assert not invented & {*stories.NAMES} and len(invented) > 350
  assert names[0] == nano_sleep.new_names(Draws("names", 0), 9)


def test_whole_names_alone_are_renamed():
  text = "Ana has 3 pens. Anana has 4 pens. How many pens does Ana have?"
  assert nano_sleep.renamed(text, {"Ana": "Benor"}) == (
    "Benor has 3 pens. Anana has 4 pens. How many pens does Benor have?"
  )
  assert nano_sleep.renamed("Ana, Ben", {"Ana": "Ben", "Ben": "Ana"}) == "Ben, Ana"


def test_other_adverbs_never_make_a_sentence_of_the_test_split():
  draws = Draws("adverbs", 0)
  for sentence in (
    "At first Ana starts with 3 pens.",
    "Later Ana finds 4 more pens.",
    "Now, how many pens does Ana have?",
  ):
    assert nano_sleep.UNTOLD.fullmatch(sentence)
  changed = 0
  for number in range(300):
    context = TASK.contexts("train")[number]
    for text in (context.text, TASK.questions("train", number)[0].question):
      new = nano_sleep.varied(text, draws)
      assert re.findall(r"\d+|[A-Z]?[a-z]+s\b", new.lower()) == re.findall(
        r"\d+|[A-Z]?[a-z]+s\b", text.lower()
      )
      assert not any(nano_sleep.UNTOLD.fullmatch(one) for one in re.split(r"(?<=[.?]) ", new))
      changed += new != text
  assert 100 < changed < 400


@pytest.mark.thorough
def test_vectors_of_things_and_of_endings_are_spread(tmp_path):
  numerics = pretrain_nano.numerics_for(64)
  words = seerjax.load_model("nano").tokenizer
  assert words is not None

  def cosine(embed: np.ndarray, several: Sequence[str]) -> float:
    rows = embed[[words.encode(one)[0] for one in several]]
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return float((rows @ rows.T)[np.triu_indices(len(rows), 1)].mean())

  start = str(loading.path_of("nano"))
  nano_sleep.spread(start, tmp_path, 0)
  (before, _), (after, _) = (huggingface.load(name, numerics) for name in (start, tmp_path))
  first, last = (np.asarray(one["embed"], np.float32) for one in (before, after))
  things = [f" {thing}" for thing in stories.OBJECTS]
  for several in (things, [end for end in nano_sleep.ENDINGS if len(end) == 1]):
    assert cosine(first, several) > 0.9 and cosine(last, several) < 0.7
  digit = words.encode("7")[0]
  assert (first[digit] == last[digit]).all()
  assert all((before["layers"][0][name] == one).all() for name, one in after["layers"][0].items())


def test_documents_are_of_four_kinds_and_four_lengths():
  notes = [answer for _, answer in DOCUMENTS if "####" not in answer]
  assert abs(len(notes) / len(DOCUMENTS) - nano_sleep.KINDS["sleep"] / 100) < 0.1
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
  sleep, wake = lessons.problem("heldout", 9), lessons.problem("heldout", 11)
  context = TASK.contexts("heldout")[2]
  assert sleep.prompt == TASK.sleep_prompt(context)
  assert lessons.verdict(sleep, context.notes).reward == 1.0
  assert lessons.verdict(sleep, f"#### {wake.answer}").reward == 0.0
  assert wake.prompt == f"{context.facts} {TASK.questions('heldout', 2)[0].question}"
  assert lessons.verdict(wake, wake.solution).correct
  assert not lessons.verdict(wake, context.notes).correct
  assert lessons.problem("heldout", 10).prompt == sleep.prompt


def test_lessons_of_training_tell_of_drawn_people_and_reward_each_fact():
  lessons = nano_sleep.Lessons()
  seen = set()
  for index in range(40):
    problem = lessons.problem("train", index)
    seen |= words(problem.prompt)
    assert lessons.verdict(problem, problem.solution).reward == 1.0
    if problem.problem_id.startswith("sleep-"):
      facts = stateful.facts_in(problem.answer)
      assert lessons.verdict(problem, facts[0]).reward == 1 / len(facts)
      assert all(fact.split()[0] in words(problem.context) for fact in facts)
  assert not seen & {*stateful.TEST_NAMES, *nano_sleep.PROBE_NAMES}
  first, second = (lessons.problem("train", index).prompt for index in (0, 1))
  assert first != second and re.sub("[A-Z][a-z]+", "", first) == re.sub("[A-Z][a-z]+", "", second)


def test_reinforcement_is_the_main_job_on_lessons():
  config = nano_sleep.reinforcement("nano", num_steps=3, seed=7)
  assert (config.num_steps, config.seed, config.data_parallel_size) == (3, 7, 1)
  assert config.task == "experiments.sleep.train_nano:Lessons"
  assert config.rollout.temperature == 1.0 and config.rollout.max_tokens == 160


@pytest.mark.thorough
def test_shipped_nano_knows_no_facts_and_is_compared_with_itself():
  stated = nano_sleep.stated("nano", "heldout", 16, 0)
  assert [{*facts} for facts in stated] == [
    {fact.split()[0] for fact in stateful.facts_in(context.facts)}
    for context in TASK.contexts("heldout")[:16]
  ]
  found = nano_sleep.right_facts(stated)
  assert found.shape == (16,) and (found == 0).mean() > 0.5
  line = nano_sleep.compare("nano", "nano", "heldout", 16, 0)
  assert "gain 0.0 ± 0.0 points" in line and "16 contexts" in line


def test_a_problem_keeps_what_is_not_its_solution():
  problem = TASK.questions("train", 0)[0]
  left = nano_sleep.steps_after(problem, "")
  assert isinstance(left, Problem) and left.solution == problem.solution
  assert (left.question, left.context) == (problem.question, problem.context)
