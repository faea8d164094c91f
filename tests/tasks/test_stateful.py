"""Contexts and their questions: the state after a story, held-out names, and verdicts."""

from __future__ import annotations

import collections
import dataclasses
from fractions import Fraction
import functools
import json
import pathlib
import re

import numpy as np
import pytest

from seerjax.tasks import answers, equations, stateful, stories
from seerjax.tasks.stateful import Sleeper, StatefulConfig, StatefulContext, StatefulWordProblems
from seerjax.types import Problem

TASK = StatefulWordProblems()
GOLDEN = pathlib.Path(__file__).parent / "stateful_golden.json"


@functools.cache
def contexts(split: str, count: int = 24) -> tuple[StatefulContext, ...]:
  return TASK.contexts(split)[:count]


def words(text: str) -> set[str]:
  return set(re.findall("[A-Za-z]+", text))


def test_contexts_and_questions_are_the_same_on_every_machine():
  for entry in json.loads(GOLDEN.read_text()):
    split, index = entry["split"], entry["index"]
    fields = entry["config"]
    if "steps" in fields:
      fields["steps"] = tuple(fields["steps"])
    config = StatefulConfig(**fields)
    task = StatefulWordProblems(config=config)
    assert task.contexts(split)[index] == StatefulContext(**entry["context"])
    problem = entry["problem"] | {"messages": ()}  # JSON has no tuples.
    assert task.questions(split, index)[entry["number"]] == Problem(**problem)


def test_facts_follow_from_notes_and_solutions_from_facts():
  for split in stateful.SPLITS:
    for index, context in enumerate(contexts(split)[:8]):
      verdict = TASK.sleep_verdict(context, context.notes)
      assert verdict.reward == 1.0 and verdict.num_false_equations == 0
      assert verdict.num_equations == context.num_steps >= 1
      assert TASK.rewritten(context.notes) == TASK.facts(context) == context.facts
      has = {p: int(n) for p, n in re.findall(r"(\w+) has (\d+) \w+\.", context.facts)}
      numbers = set(re.findall(r"=(\d+)", context.notes)) | set(re.findall(r"\d+", context.text))
      assert {str(n) for n in has.values()} <= numbers
      questions = TASK.questions(split, index)
      assert len(questions) == 10
      for problem in questions:
        assert problem.context == context.text
        assert problem.prompt == TASK.wake_prompt(problem.question, context.text)
        assert TASK.verdict(problem, problem.solution).correct
        assert not equations.false_ones(problem.solution)
        assert len(equations.stated(problem.solution)) == problem.num_steps
        assert Fraction(problem.answer) == from_facts(problem.question, has)


def from_facts(question: str, has: dict[str, int]) -> Fraction:
  """Returns the answer to a question from a person's facts alone."""
  who = [has[name] for name in dict.fromkeys(re.findall("[A-Z][a-z]+", question)) if name in has]
  numbers = [int(n) for n in re.findall(r"\d+", question)]
  if "friend" in question:
    return Fraction(who[0], numbers[0])
  if "coins" in question:
    return Fraction(who[0] * numbers[0])
  if "need" in question:
    return Fraction(numbers[0] - who[0])
  if len(who) == 2:
    return Fraction(max(who) - min(who) if " more " in question else sum(who))
  return Fraction(who[0])


def test_the_test_split_has_names_verbs_and_kinds_of_its_own():
  seen: dict[str, set[str]] = {}
  kinds: dict[str, set[str]] = {}
  for split in stateful.SPLITS:
    kinds[split] = {context.kind for context in contexts(split)}
    texts = [context.text for context in contexts(split)]
    texts += [q.question for i in range(24) for q in TASK.questions(split, i)]
    seen[split] = set().union(*map(words, texts))
  for split in ("train", "heldout"):
    assert not seen[split] & {*stateful.TEST_NAMES, *stateful.TEST_VERBS}
    assert kinds[split] == set(stateful.TRAIN_KINDS)
  assert not seen["test"] & set(stateful.TRAIN_NAMES)
  assert seen["test"] >= {*stateful.TEST_NAMES, *stateful.TEST_VERBS}
  assert kinds["test"] == set(stateful.TEST_KINDS) > kinds["train"]
  # A model that was pretrained on all stories has seen every word.
  forms = [*stories.TRAIN_FORMS.values(), *stories.HELDOUT_FORMS.values()]
  known = words(" ".join(form for group in forms for form in group))
  known |= {*stories.NAMES, *stories.OBJECTS}
  assert set().union(*seen.values()) <= known
  for what, forms_of_test in stateful.FORMS["test"].items():
    assert not {*forms_of_test} & {*stateful.FORMS["train"][what]}
  train, heldout = ({c.text for c in contexts(s)} for s in ("train", "heldout"))
  assert len(train & heldout) <= 2


def test_questions_follow_the_law_of_zipf():
  for exponent in (0.0, 1.5):
    config = StatefulConfig(predictability=exponent, kinds=("story",), num_questions=10)
    task = StatefulWordProblems(config=config)
    marks = {"goal": "need", "share": "friend", "price": "coins", "now": ""}
    counts: collections.Counter[str] = collections.Counter()
    num_contexts = 0
    for index in range(24):
      value = int(re.findall(r"\d+", task.contexts("train")[index].facts)[0])
      if value >= 4:  # All four are asked of these.
        num_contexts += 1
        for q in task.questions("train", index):
          counts[next(what for what, mark in marks.items() if re.search(mark, q.question))] += 1
    weights = np.array([1 / (rank + 1) ** exponent for rank in range(4)])
    expected = 10 * num_contexts * weights / weights.sum()
    got = np.array([counts[what] for what in ("now", "goal", "share", "price")])
    # Chi-squared of three degrees of freedom, one in a hundred thousand.
    assert ((got - expected) ** 2 / expected).sum() < 26, (exponent, got, expected)


def test_predictability_changes_questions_and_no_context():
  sure = StatefulWordProblems(config=StatefulConfig(predictability=3.0))
  assert sure.contexts("test")[7] == TASK.contexts("test")[7]
  assert sure.questions("test", 7) != TASK.questions("test", 7)


def test_the_length_of_a_context_is_a_knob():
  for kind, steps in (("story", 6), ("trade", 7), ("mixed", 9), ("people", 3), ("star", 4)):
    config = StatefulConfig(steps=(steps, steps), kinds=(kind,), distractor_rate=0.0)
    for context in StatefulWordProblems(config=config).contexts("test")[:12]:
      # A gift is a step for each of two.
      assert steps <= context.num_steps <= 2 * steps
      assert kind in ("trade", "mixed") or context.num_steps == steps
  quiet, noisy = (
    StatefulWordProblems(config=StatefulConfig(distractor_rate=rate)) for rate in (0.0, 1.0)
  )
  num_sentences = [
    sum(context.text.count(".") for context in task.contexts("test")[:20])
    for task in (quiet, noisy)
  ]
  assert num_sentences[1] > 1.5 * num_sentences[0]


@pytest.mark.parametrize(
  "text, expected",
  [
    ("Ana has 19 pens.\nBen has 3 pens.", (2, 2, 0)),
    ("12+7=19\n- Ana has 19 pens.\n- Ben has 3 pens.", (2, 2, 0)),
    ("-Ana has 19 pens.\n- - Ben has 3 pens.", (2, 0, 0)),
    ("12+7=19\nAna has 19 pens.", (2, 1, 0)),
    ("Ana has 19 pens. Ana has 19 pens. Ben has 3 pens.", (2, 2, 0)),
    ("Ana has 19 pens.\nAna has 20 pens.", (2, 1, 1)),
    ("Ana has 19 cups.\nZed has 3 pens.", (2, 0, 2)),
    ("Ana has 19 pens", (2, 0, 0)),
    ("", (2, 0, 0)),
  ],
)
def test_a_sleepers_facts_are_counted(text: str, expected: tuple[int, int, int]):
  verdict = stateful.judge_notes("Ana has 19 pens. Ben has 3 pens.", text)
  assert verdict[:3] == expected


def test_naming_every_number_earns_less_than_knowing_one():
  facts = "Ana has 19 pens."
  every = "\n".join(f"Ana has {n} pens." for n in range(100))
  assert stateful.judge_notes(facts, every).reward == 1 / 100
  assert stateful.judge_notes(facts, facts).reward == 1.0


def test_a_sleepers_false_equations_are_counted():
  verdict = stateful.judge_notes("Ana has 19 pens.", "12+7=18\n18+1=19\nAna has 19 pens.")
  assert (verdict.num_equations, verdict.num_false_equations) == (2, 1)


def test_the_sleeper_is_a_task_of_its_own():
  task = Sleeper()
  problem = task.problem("heldout", 5)
  context = TASK.contexts("heldout")[5]
  assert problem.prompt == TASK.sleep_prompt(context) == f"{context.text} {problem.question}"
  assert re.fullmatch(r"How many [a-z]+ does each have now\?", problem.question)
  assert task.verdict(problem, problem.solution).correct
  assert task.verdict(problem, problem.solution).well_formed
  wrong = task.verdict(problem, "1+1=3\n" + problem.answer)
  assert wrong.correct and not wrong.well_formed
  assert task.verdict(problem, "nothing").reward == 0.0
  assert task.num_problems("train") == 1_000_000


def test_problems_are_those_of_contexts():
  count = len(TASK.contexts("test"))
  assert TASK.num_problems("test") == 10 * count
  assert TASK.problem("test", 3 * count + 11) == TASK.questions("test", 11)[3]
  assert isinstance(TASK, stateful.StatefulTask)


def test_a_waker_reads_the_context_its_rewrite_or_both():
  ask = TASK.wake_prompt
  assert ask("How many?", "Ana has 2 pens.") == "Ana has 2 pens. How many?"
  assert ask("How many?", rewritten="Ana has 2 pens.") == "Ana has 2 pens. How many?"
  assert ask("How many?", "c", "r") == "c r How many?"


def test_answers_have_four_lengths():
  problem = next(p for p in (TASK.problem("test", i) for i in range(99)) if p.num_steps > 3)
  lines = problem.solution.split("\n")
  for length in stateful.LENGTHS:
    text = stateful.solution_of(problem, length)
    assert text.split("\n") == (lines if length is None else lines[-length - 1 :])
    assert TASK.verdict(problem, text).correct
  assert stateful.with_length("How many?", 0) == "How many? (0)"
  assert stateful.with_length("How many?", None) == "How many?"
  assert stateful.solution_of(problem, 99) == problem.solution


def test_a_rewrite_by_rule_drops_what_does_not_matter():
  task = StatefulWordProblems(config=StatefulConfig(distractor_rate=0.5))
  num_shorter = 0
  for context in task.contexts("test")[:20]:
    rewritten = task.by_rule(context)
    num_shorter += len(rewritten) < len(context.text)
    assert {*re.findall(r"\d+", context.facts)} <= {
      *re.findall(r"\d+", rewritten), *re.findall(r"=(\d+)", context.notes),
    }  # fmt: skip
  assert num_shorter > 5


def refusals():
  task = TASK
  bad = lambda **fields: lambda: StatefulConfig(**fields)
  yield bad(predictability=3.5), "StatefulConfig.predictability: got 3.5, expected 0 to 3.0; 0 asks"
  yield bad(predictability=float("nan")), "predictability: got nan, expected a finite number"
  yield bad(num_questions=0), "StatefulConfig.num_questions: got 0, expected 1 to 100; 10 is usual"
  yield bad(steps=(3, 2)), r"StatefulConfig.steps: got (3, 2), expected (least, most) with"
  yield bad(distractor_rate=1.5), "distractor_rate: got 1.5, expected 0 to 1; 0 leaves out all"
  yield bad(kinds=("storey",)), "kinds: got ('storey',), expected kinds of ('story', 'trade'"
  yield bad(max_operand=3), "StatefulConfig.max_operand: got 3, expected at least 4"
  yield bad(max_total=79), "max_total: got 79, expected at least 2 * max_operand = 2 * 40; raise it"
  mixed = StatefulWordProblems(config=StatefulConfig(kinds=("mixed",)))
  yield lambda: mixed.contexts("train"), "expected at least one of ('story', 'trade', 'people')"
  yield lambda: task.contexts("dev"), "got split 'dev', expected one of ('train', 'heldout', 't"
  yield lambda: TASK.questions("test", 10_000), "got problem index 10000 of split 'test'"
  yield lambda: TASK.problem("test", -1), "got problem index -1 of split 'test'"
  yield lambda: task.wake_prompt(" ", "c"), "got the question ' ', expected at least one charact"
  yield lambda: task.wake_prompt("How?"), "'How?' without context and without rewrite, expected"
  yield (
    lambda: StatefulContext(context_id="7", text=" "),
    "StatefulContext '7': got an empty context, expected at least one character that is not a"
    " space",
  )


@pytest.mark.parametrize("act, message", list(refusals()))
def test_bad_input_is_refused(act, message: str):
  with pytest.raises(ValueError, match=re.escape(message)):
    act()


def test_an_index_outside_is_refused():
  with pytest.raises(IndexError, match="got index 10000, expected -10000 <= index"):
    TASK.contexts("test")[10_000]
  assert TASK.contexts("test")[-1] == TASK.contexts("test")[9_999]


def write_golden() -> None:
  entries = []
  for split, index, number, config in (
    ("train", 3, 2, {}), ("train", 8, 0, {"predictability": 2.0}), ("heldout", 0, 9, {}),
    ("test", 0, 3, {}), ("test", 1, 4, {"steps": (6, 8)}), ("test", 4, 1, {"distractor_rate": 0.9}),
  ):  # fmt: skip
    task = StatefulWordProblems(config=StatefulConfig(**config))
    entries.append({
      "split": split, "index": index, "number": number, "config": config,
      "context": dataclasses.asdict(task.contexts(split)[index]),
      "problem": dataclasses.asdict(task.questions(split, index)[number]) | {"messages": ()},
    })  # fmt: skip
  GOLDEN.write_text(json.dumps(entries, indent=1) + "\n")


if __name__ == "__main__":
  write_golden()
  print(f"{GOLDEN}: written, {answers.ANSWER_MARK} ends every solution")


def test_a_branch_is_told_to_who_asks_and_is_never_a_star():
  task = StatefulWordProblems(config=StatefulConfig(kinds=("branch",), steps=(2, 5)))
  num_compared_with_the_first = 0
  for place in range(100):
    context = task.contexts("train")[place]
    assert context.kind == "branch"
    compared = re.findall(r"([A-Z][a-z]+)(?: has)?\.", context.text)
    first = context.text.replace("At first ", "").split()[0]
    num_compared_with_the_first += compared.count(first)
    names = [fact.split()[0] for fact in stateful.facts_in(context.facts)]
    # The last person is compared with someone other than the first.
    says = rf"{names[-1]} (?:has|gets) \d+ [^.]*?([A-Z][a-z]+)(?: has)?\."
    (last,) = re.findall(says, context.text)
    assert last in names[1:-1]
    assert task.sleep_verdict(context, context.notes).reward == 1.0
  assert num_compared_with_the_first > 100
  assert all(one.kind != "branch" for one in StatefulWordProblems().contexts("train")[:100])
  with pytest.raises(ValueError, match="the kinds of the split 'test'"):
    task.contexts("test")
