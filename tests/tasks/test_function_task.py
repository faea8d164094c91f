"""Tasks made of a prompt file and a reward function."""

from __future__ import annotations

import json

import numpy as np
import pytest

from seerjax import tasks
from seerjax.tasks.function_task import function_task
from seerjax.types import Verdict


def test_a_row_may_be_a_conversation(tmp_path):
  messages = [
    dict(role="system", content="Be brief."), dict(role="user", content="a?"),
    dict(role="assistant", content="b"), dict(role="user", content="c?"),
  ]  # fmt: skip
  path = tmp_path / "rows.jsonl"
  path.write_text(json.dumps(dict(messages=messages)) + "\n" + json.dumps(dict(prompt="d?")))
  task = function_task("mine", path, lambda prompt, text: float(prompt == "c?"))
  first, second = (task.problem("train", index) for index in range(2))
  assert first.messages == tuple(messages) and first.prompt == first.question == "c?"
  assert second.messages == () and second.prompt == "d?"
  assert task.verdict(first, "").correct and not task.verdict(second, "").correct


def test_a_reward_may_take_the_whole_row(tmp_path):
  path = tmp_path / "rows.jsonl"
  rows = [dict(prompt="a?", answer={"low": 1, "high": 3}), dict(prompt="b?", unit="m")]
  path.write_text("\n".join(map(json.dumps, rows)))

  def reward(prompt, text, row):
    assert row["prompt"] == prompt
    return float(row["answer"]["low"] <= int(text) <= row["answer"]["high"])

  task = function_task("mine", path, reward)
  first, second = (task.problem("train", index) for index in range(2))
  assert task.verdict(first, "2").correct and not task.verdict(first, "4").correct
  with pytest.raises(KeyError, match="answer"):  # What the function raises is passed on.
    task.verdict(second, "2")
  # A third argument with a default is the function's own.
  plain = function_task("mine", path, lambda prompt, text, scale=0.5: scale)
  assert plain.verdict(first, "2").reward == 0.5


def test_a_bare_reward_function_is_a_task(outside):
  task = tasks.load("outside_task_module:reward", path=outside / "prompts.jsonl")
  assert task.num_problems("train") == task.num_problems("heldout") == 2
  problem = task.problem("train", 0)
  assert (problem.prompt, problem.answer) == ("say a", "3")
  assert task.verdict(problem, "I say a").correct
  assert task.verdict(problem, "no").reward == 0.0
  given = tasks.load("mine", path=outside / "prompts.jsonl", reward=lambda prompt, text: 0.5)
  assert given.verdict(problem, "x").reward == 0.5
  assert given.name == "mine"


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None, "1.0", [1.0, 2.0]])
def test_a_reward_that_is_no_finite_number_is_refused_with_its_prompt(outside, reward):
  task = tasks.load("mine", path=outside / "prompts.jsonl", reward=lambda prompt, text: reward)
  with pytest.raises(ValueError, match="for the prompt 'say a', expected a finite float"):
    task.verdict(task.problem("train", 0), "text")


def task_of(tmp_path, reward):
  path = tmp_path / "rows.jsonl"
  path.write_text(json.dumps(dict(prompt="a?")))
  return function_task("mine", path, reward)


@pytest.mark.parametrize(
  ("parts", "reward", "correct", "well_formed"),
  [
    ({"format": 1.0, "correct": 0.0}, 1.0, False, True),
    ({"format": 0.0, "correct": 1.0}, 1.0, True, False),
    ({"correct": 1, "brevity": -0.5}, 0.5, True, True),
    ({"brevity": 0.5}, 0.5, False, True),
    ({"brevity": 1.0, "style": 1.0}, 2.0, True, True),
    ({"brevity": 1.0, "style": 0.9}, 1.9, False, True),
    ({"correct": np.float32(1)}, 1.0, True, True),
    ({"correct": np.bool_(True)}, 1.0, True, True),
  ],
)
def test_a_reward_may_have_named_parts(tmp_path, parts, reward, correct, well_formed):
  task = task_of(tmp_path, lambda prompt, text: parts)
  verdict = task.verdict(task.problem("train", 0), "x")
  assert verdict == Verdict.of_parts(
    {name: float(value) for name, value in parts.items()},
    correct=correct,
    well_formed=well_formed,
  )
  assert verdict.reward == pytest.approx(reward) and list(verdict.parts) == list(parts)


@pytest.mark.parametrize(
  "reward",
  [
    {}, {"a": "1"}, {"a": float("nan")}, {"a": float("inf")}, {"a": None}, {"a": [1.0]},
    {"a": {"b": 1.0}}, {"a": 1.0, "b": b"1"}, None, "1", [1.0],
  ],
)  # fmt: skip
def test_a_reward_that_is_no_number_and_no_numbers_by_name_is_refused(tmp_path, reward):
  task = task_of(tmp_path, lambda prompt, text: reward)
  with pytest.raises(ValueError, match=r"mine: got reward .* for the prompt 'a\?', expected a f"):
    task.verdict(task.problem("train", 0), "x")
