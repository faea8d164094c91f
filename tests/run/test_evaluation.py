"""Held-out accuracy by hand: a sampler with known responses, and a task that counts letters."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

import made_rollouts
import numpy as np
import pytest

from seerjax.models import tokenizer as tokenizer_lib
from seerjax.run import evaluation
from seerjax.types import Problem, Verdict

TOKENIZER = tokenizer_lib.load(pathlib.Path(tokenizer_lib.__file__).parent / "nano")
# (text, number of tokens, why it ended) of the first request, the second, and so on.
ANSWERS = (("a", 2, "stop"), ("b", 1, "stop"), ("abca", 3, "length"), ("bb", 6, "stop"))


class Letters:
  """A task: texts with an "a" are correct, texts of even length well-formed."""

  name = "letters"

  def __init__(self, num_heldout: int = 4, has_parts: bool = False):
    self.num_heldout = num_heldout
    self.has_parts = has_parts

  def num_problems(self, split: str) -> int:
    return {"train": 0, "heldout": self.num_heldout}[split]

  def problem(self, split: str, index: int) -> Problem:
    assert split == "heldout"
    return Problem(problem_id=str(index), prompt=f"{index}?")

  def verdict(self, problem: Problem, text: str) -> Verdict:
    if self.has_parts:
      parts = {"short": float(len(text) < 3), "letters": float(len(text))}
      return Verdict.of_parts(parts, correct="a" in text, well_formed=True)
    reward = 0.5 * ("b" in text and "c" not in text)
    return Verdict(reward=reward, correct="a" in text, well_formed=len(text) % 2 == 0)


def evaluate(
  seen=None, *, is_reversed=False, seed=0, num_heldout=4, by=evaluation.evaluate,
  has_parts=False, reward_weights=None, **changes,
):  # fmt: skip
  def generate(requests):
    if seen is not None:
      seen.extend(requests)
    completions = [
      made_rollouts.completion(request.request_id, (1,) * length, text=text, finish_reason=reason)
      for request, (text, length, reason) in zip(requests, ANSWERS)
    ]
    return completions[::-1] if is_reversed else completions

  return by(
    evaluation.EvaluationConfig(**changes),
    generate=generate,
    task=Letters(num_heldout, has_parts),
    tokenizer=TOKENIZER,
    max_tokens=6,
    seed=seed,
    reward_weights=reward_weights,
  )


def test_the_first_answer_is_to_the_first_request_of_all():
  every, first = [], []
  evaluate(every, seed=5)
  answer = evaluate(first, seed=5, by=evaluation.first_answer)
  assert first == every[:1]
  assert answer.completion.text == "a" and answer.verdict.correct
  assert answer.problem.prompt == f"{answer.problem.problem_id}?"


@pytest.mark.parametrize("is_reversed", [False, True])
def test_fractions_by_hand_whoever_finishes_first(is_reversed):
  assert evaluate(is_reversed=is_reversed) == dict(
    accuracy=0.5,
    standard_error=0.25,  # A fair coin deviates by a half; four throws by a quarter.
    reward=0.25,  # Of 0, 0.5, 0 and 0.5.
    reward_standard_error=0.125,
    well_formed=0.5,
    ended=0.75,
    accuracy_well_formed=1 / 2,  # Not the first, which is correct all the same.
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
    "mean reward 0.25 (95 % interval 0.005 to 0.495), "
    "50.0% correct (standard error 25.0%), 50.0% of the well-formed 50.0%, 75.0% ended before"
    " the limit, 3.0 tokens on average"
  )


def test_a_task_with_nothing_to_measure_on_is_refused():
  with pytest.raises(ValueError, match=r"letters: got 0 problems in split 'heldout', expected at"):
    evaluate(num_heldout=0)


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(num_samples):
  for num_correct in range(num_samples + 1):
    answers = [place < num_correct for place in range(num_samples)]
    for k in range(1, num_samples + 1):
      subsets = [any(one) for one in itertools.combinations(answers, k)]
      found = evaluation.pass_at(k, num_samples, num_correct)
      assert found == pytest.approx(np.mean(subsets), abs=1e-12)
  # Sums of binomials would overflow.
  assert evaluation.pass_at(1000, 20_000, 1) == pytest.approx(0.05)


def test_several_samples_of_a_problem_are_one_problem_to_the_errors():
  seen, reversed_too = [], []
  how: dict[str, Any] = dict(num_problems=2, num_samples=2, pass_at=(1, 2), temperature=1.0)
  found = evaluate(seen, **how)
  assert evaluate(reversed_too, is_reversed=True, **how) == found
  assert [request.request_id for request in seen] == ["-1/0/0", "-1/0/1", "-1/1/0", "-1/1/1"]
  assert len({request.seed for request in seen}) == 4
  # The first samples equal those of an evaluation with one sample.
  alone = []
  evaluate(alone, num_problems=2, temperature=1.0)
  assert alone == seen[::2]
  assert found["accuracy"] == found["pass_at_1"] == 0.5 and found["pass_at_2"] == 1.0
  assert found["standard_error"] == found["pass_at_2_standard_error"] == 0.0
  assert found["reward"] == 0.25 and found["reward_standard_error"] == 0.0
  line = evaluation.describe(found)
  assert "mean reward 0.25 (95 % interval 0.25 to 0.25), 50.0% correct" in line
  assert "50.0% pass@1, 100.0% pass@2, " in line


def test_parts_are_means_and_weighted_in_the_reward():
  found = evaluate(has_parts=True, reward_weights={"letters": 0.5})
  assert found["part/letters"] == 2.0 and found["part/short"] == 0.75
  assert found["reward"] == 0.5 * 2.0 + 0.75
  assert "(95 % interval" in evaluation.describe(found)
  assert "parts letters 2 and short 0.75, " in evaluation.describe(found)


def test_sets_are_tasks_by_name_with_their_paths(tmp_path):
  config = evaluation.EvaluationConfig(sets={"easy": "countdown", "hard": f"gsm8k={tmp_path}"})
  with pytest.raises((ValueError, FileNotFoundError)):
    evaluation.load_sets(config)
  (tmp_path / "test.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n')
  (tmp_path / "train.jsonl").write_text('{"question": "1+2?", "answer": "#### 3"}\n')
  found = evaluation.load_sets(config)
  assert [found["easy"].name, found["hard"].num_problems("heldout")] == ["countdown", 1]
  further = {"own": found["easy"]}
  assert evaluation.load_sets(evaluation.EvaluationConfig(), further) == further
  for name in ("My Set", "easy"):
    with pytest.raises(ValueError, match=rf"evaluation sets: got a task named '{name}', exp"):
      evaluation.load_sets(config, {name: found["hard"]})
  for best, sets in (("heldout_easy/reward", {}), ("heldout_esy/reward", {"easy": "countdown"})):
    other = evaluation.EvaluationConfig(sets=sets, best=best)
    with pytest.raises(ValueError, match=rf"best: got '{best}', expected a metric of one of"):
      evaluation.load_sets(other)
  unknown = evaluation.EvaluationConfig(sets={"easy": "countdwon"})
  with pytest.raises(ValueError, match=r"EvaluationConfig.sets.easy: tasks.load: got name 'cou"):
    evaluation.load_sets(unknown)
