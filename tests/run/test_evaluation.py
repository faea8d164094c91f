"""Held-out accuracy by hand: a sampler that knows its answers, and a task that counts letters."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from seerjax.models import tokenizer as tokenizer_lib
from seerjax.run import evaluation
from seerjax.types import Completion, Problem, Verdict

TOKENIZER = tokenizer_lib.load(pathlib.Path(tokenizer_lib.__file__).parent / "nano")
# (text, number of tokens, why it ended) of the first request, the second, and so on.
ANSWERS = (("aa", 2, "stop"), ("b", 1, "stop"), ("abca", 3, "length"), ("bb", 6, "stop"))


class Letters:
  """Texts with an a are correct, those of an even length well-formed."""

  name = "letters"

  def __init__(self, num_heldout: int = 4):
    self.num_heldout = num_heldout

  def num_problems(self, split: str) -> int:
    return {"train": 0, "heldout": self.num_heldout}[split]

  def problem(self, split: str, index: int) -> Problem:
    assert split == "heldout"
    return Problem(problem_id=str(index), prompt=f"{index}?")

  def verdict(self, problem: Problem, text: str) -> Verdict:
    return Verdict(reward=0.0, correct="a" in text, well_formed=len(text) % 2 == 0)


def evaluate(
  seen=None, *, is_reversed=False, seed=0, num_heldout=4, by=evaluation.evaluate, **changes
):
  def generate(requests):
    if seen is not None:
      seen.extend(requests)
    completions = [
      Completion(
        request_id=request.request_id,
        tokens=(1,) * length,
        behaviour_logprobs=np.zeros(length, np.float32),
        raw_logprobs=np.zeros(length, np.float32),
        text=text,
        finish_reason=reason,
        policy_version=0,
      )
      for request, (text, length, reason) in zip(requests, ANSWERS)
    ]
    return completions[::-1] if is_reversed else completions

  return by(
    evaluation.EvaluationConfig(**changes),
    generate=generate,
    task=Letters(num_heldout),
    tokenizer=TOKENIZER,
    max_tokens=6,
    seed=seed,
  )


def test_the_first_answer_is_to_the_first_request_of_all():
  every, first = [], []
  evaluate(every, seed=5)
  answer = evaluate(first, seed=5, by=evaluation.first_answer)
  assert first == every[:1]
  assert answer.completion.text == "aa" and answer.verdict.correct
  assert answer.problem.prompt == f"{answer.problem.problem_id}?"


@pytest.mark.parametrize("is_reversed", [False, True])
def test_fractions_by_hand_whoever_finishes_first(is_reversed):
  assert evaluate(is_reversed=is_reversed) == dict(
    accuracy=0.5,
    standard_error=0.25,  # A fair coin deviates by a half; four throws by a quarter.
    well_formed=0.75,
    ended=0.75,
    accuracy_well_formed=2 / 3,
    length=3.0,
  )


def test_each_problem_is_asked_once_with_seeds_of_the_run():
  seen = []
  evaluate(seen, temperature=0.5)
  assert len({request.prompt for request in seen}) == 4
  assert len({request.seed for request in seen}) == 4
  assert {request.sampling.temperature for request in seen} == {0.5}
  assert {request.sampling.max_tokens for request in seen} == {6}
  again, other = [], []
  evaluate(again, temperature=0.5)
  evaluate(other, temperature=0.5, seed=1)
  assert again == seen
  assert {request.seed for request in other}.isdisjoint(request.seed for request in seen)


def test_fewer_problems_are_the_first_of_all():
  seen, few = [], []
  evaluate(seen)
  assert evaluate(few, num_problems=2)["accuracy"] == 0.5
  assert few == seen[:2]


def test_the_line_for_people_says_every_number():
  assert evaluation.describe(evaluate()) == (
    "50.0% correct (standard error 25.0%), 66.7% of the well-formed 75.0%, 75.0% ended by"
    " themselves, 3.0 tokens on average"
  )


@pytest.mark.parametrize("changes", [dict(num_problems=0), dict(every=-1)])
def test_a_config_that_cannot_be_is_refused(changes):
  with pytest.raises(ValueError, match=r"EvaluationConfig: got num_problems=\d+, every=-?\d, expe"):
    evaluation.EvaluationConfig(**changes)


@pytest.mark.parametrize("temperature", [-1.0, 1e-5, 1e5, float("inf"), float("nan")])
def test_a_temperature_that_cannot_be_is_refused(temperature):
  with pytest.raises(ValueError, match=r"EvaluationConfig.temperature: got .*, expected 0 or 0.0"):
    evaluation.EvaluationConfig(temperature=temperature)


def test_a_task_with_nothing_to_measure_on_is_refused():
  with pytest.raises(ValueError, match=r"letters: got 0 problems in split 'heldout', expected at"):
    evaluate(num_heldout=0)
