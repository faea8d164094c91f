"""Draws, numbers, files and the ways to name a task."""

from __future__ import annotations

import contextlib
from fractions import Fraction
import json

import hypothesis
from hypothesis import strategies as st
import pytest

from seerjax import tasks
from seerjax.tasks import base
from seerjax.types import Problem

MY_TASK = """
from seerjax.types import Problem, Verdict

class MyTask:
  name = "mine"
  def __init__(self, path="nowhere"):
    self.path = path
  def num_problems(self, split):
    return 1
  def problem(self, split, index):
    return Problem(problem_id="0", prompt=self.path)
  def verdict(self, problem, text):
    return Verdict(reward=1.0, correct=True, well_formed=True)

an_instance = MyTask("made already")

def reward(prompt, text):
  return float(prompt in text)

def half_a_task():
  pass
half_a_task.problem = None
"""


@pytest.fixture
def outside(tmp_path):
  """A folder of the user's own, as the current directory."""
  (tmp_path / "outside_task_module.py").write_text(MY_TASK)
  (tmp_path / "prompts.jsonl").write_text('{"prompt": "say a", "answer": 3}\n\n{"prompt": "b"}\n')
  with contextlib.chdir(tmp_path):
    yield tmp_path


def test_draws_are_the_same_on_every_machine():
  draws = base.Draws("golden", 7)
  assert [draws.below(1000) for _ in range(6)] == GOLDEN_DRAWS
  assert base.Draws("golden", 8).below(1000) != GOLDEN_DRAWS[0]


GOLDEN_DRAWS = [10, 768, 396, 952, 616, 255]


@hypothesis.given(st.integers(1, 10**9), st.integers(0, 10**9))
def test_draws_stay_in_range(limit, seed):
  draws = base.Draws(seed)
  assert 0 <= draws.below(limit) < limit
  assert 5 <= draws.between(5, 4 + limit) <= 4 + limit


def test_draws_cover_their_range_evenly():
  draws = base.Draws("even")
  counts = [0] * 10
  for _ in range(5000):
    counts[draws.below(10)] += 1
  assert min(counts) > 400 and max(counts) < 600
  assert abs(sum(draws.chance(0.3) for _ in range(5000)) - 1500) < 150


def test_sample_takes_each_item_once():
  assert sorted(base.Draws("s").sample("abcdef", 6)) == list("abcdef")


def test_an_empty_range_is_refused():
  with pytest.raises(ValueError, match="got limit=0, expected at least 1"):
    base.Draws("x").below(0)


@pytest.mark.parametrize(
  ("text", "value"),
  [
    ("12", Fraction(12)),
    (" -3 ", Fraction(-3)),
    ("+4", Fraction(4)),
    ("7/2", Fraction(7, 2)),
    ("14/4", Fraction(7, 2)),
    ("0.25", Fraction(1, 4)),
    ("007", Fraction(7)),
    ("7/0", None),
    ("1e5", None),
    ("1_000", None),
    ("١٢", None),
    ("", None),
    ("- 3", None),
    ("9" * 41, None),
    ("9" * 10_000, None),
    ("1/" + "9" * 10_000, None),
  ],
)
def test_reads_numbers(text, value):
  assert base.read_number(text) == value


@hypothesis.given(st.fractions())
def test_number_text_reads_back(value):
  hypothesis.assume(len(str(abs(value.numerator))) <= 40 and len(str(value.denominator)) <= 40)
  assert base.read_number(base.number_text(value)) == value


@pytest.mark.parametrize(
  ("text", "reward", "well_formed"),
  [
    ("12+7=19\n#### 19", 1.0, True),
    ("#### 19 \n", 1.0, True),
    ("#### 38/2", 1.0, True),
    ("#### 19.0", 1.0, True),
    ("#### 20", 0.0, True),
    ("19", 0.0, False),
    ("", 0.0, False),
    ("####", 0.0, False),
    ("#### 19\n#### 19", 0.0, False),
    ("#### 19 and more", 0.0, False),
    ("##### 19", 0.0, False),
    ("#### 1\x009", 0.0, False),
    ("#### １９", 0.0, False),
  ],
)
def test_number_verdict_by_hand(text, reward, well_formed):
  verdict = base.number_verdict(Problem(problem_id="p", prompt="?", answer="19"), text)
  assert (verdict.reward, verdict.well_formed) == (reward, well_formed)
  assert verdict.correct == (reward == 1.0)


@hypothesis.given(st.text(max_size=200), st.text("0123456789-/.# \n\x00", max_size=300))
def test_number_verdict_never_raises(words, digits):
  problem = Problem(problem_id="p", prompt="?", answer="19")
  for text in (words, digits, f"{words}#### {digits}", "#### " + digits * 40):
    verdict = base.number_verdict(problem, text)
    assert verdict.reward in (0.0, 1.0)
    assert verdict.well_formed or not verdict.correct


def test_a_row_may_be_a_conversation(tmp_path):
  messages = [
    dict(role="system", content="Be brief."), dict(role="user", content="a?"),
    dict(role="assistant", content="b"), dict(role="user", content="c?"),
  ]  # fmt: skip
  path = tmp_path / "rows.jsonl"
  path.write_text(json.dumps(dict(messages=messages)) + "\n" + json.dumps(dict(prompt="d?")))
  task = base.function_task("mine", path, lambda prompt, text: float(prompt == "c?"))
  first, second = (task.problem("train", index) for index in range(2))
  assert first.messages == tuple(messages) and first.prompt == first.question == "c?"
  assert second.messages == () and second.prompt == "d?"
  assert task.verdict(first, "").correct and not task.verdict(second, "").correct


@pytest.mark.parametrize(
  ("row", "message"),
  [
    ({"text": "a"}, r"row 1: got the keys \('text',\) and messages=None, expected \"prompt\", or"),
    ({"messages": "a"}, "row 1: got the keys .* and messages='a', expected \"prompt\", or"),
    ({"messages": [{"content": "a"}]}, "row 1: got the keys .* expected \"prompt\", or"),
    ({"messages": [{"role": "user"}]}, "row 1: got messages without a user's last text, expected"),
    ({"messages": [{"role": "system", "content": "a"}]}, "row 1: got messages without a user's"),
    ({"prompt": " "}, "row 1: got prompt=' ', expected a string that is not empty; repair or"),
    ({"prompt": 5}, "row 1: got prompt=5, expected a string that is not empty; repair or remove"),
  ],
)
def test_a_row_that_asks_nothing_is_refused(tmp_path, row, message):
  path = tmp_path / "rows.jsonl"
  path.write_text(json.dumps(row))
  with pytest.raises(ValueError, match=message):
    base.function_task("mine", path, lambda prompt, text: 1.0)


def test_own_tasks_load_by_name():
  assert tasks.load("word_problems").name == "word_problems"
  assert tasks.load("countdown").name == "countdown"


def test_tasks_load_from_the_current_directory(outside):
  task = tasks.load("outside_task_module:MyTask")
  assert task.problem("train", 0).prompt == "nowhere"
  task = tasks.load("outside_task_module:MyTask", path="somewhere")
  assert task.problem("train", 0).prompt == "somewhere"
  task = tasks.load("outside_task_module:an_instance")
  assert task.problem("train", 0).prompt == "made already"


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


def test_every_tenth_row_is_held_out():
  train, heldout = base.split_rows(range(25))
  assert heldout == [9, 19]
  assert sorted(train + heldout) == list(range(25))


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None, "1.0", [1.0, 2.0]])
def test_a_reward_that_is_no_finite_number_is_refused_with_its_prompt(outside, reward):
  task = tasks.load("mine", path=outside / "prompts.jsonl", reward=lambda prompt, text: reward)
  with pytest.raises(ValueError, match="for the prompt 'say a', expected a finite float"):
    task.verdict(task.problem("train", 0), "text")


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("word_problem", "got name 'word_problem', expected 'word_problems', 'countdown', 'gsm8k'"),
    ("gsm8k", "gsm8k: got no path, expected the original JSON lines"),
    ("no_such_module:x", "whose module 'no_such_module' cannot be imported"),
    (":x", "whose module '' cannot be imported"),
    ("outside_task_module:Absent", "has no 'Absent'.*it has .*'MyTask'"),
    ("outside_task_module:reward", "got a bare reward function and no path"),
    ("outside_task_module:half_a_task", r"without \['name', 'num_problems', 'verdict'\]"),
  ],
)
def test_unusable_names_are_refused(outside, name, message):
  with pytest.raises(ValueError, match=message):
    tasks.load(name)


def test_a_path_for_generated_problems_is_refused():
  with pytest.raises(ValueError, match="word_problems: got path 'x', expected none"):
    tasks.load("word_problems", path="x")


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (b'{"prompt": "a"}\n{"prompt"', "line 2: got text that is not JSON"),
    (b"[1]", "line 1: got a JSON list, expected an object"),
    (b'\n{"text": "a"}', r"line 2: got the keys \('text',\), expected 'prompt' among them"),
    (b'{"prompt": ""}', "line 1: got prompt='', expected a string that is not empty"),
    (b'{"prompt": 5}', "line 1: got prompt=5, expected a string"),
    (b"\n \n", "got an empty file, expected at least one row"),
    (b'{"prompt": "\xff"}', "got bytes that are no UTF-8 at offset 12"),
    (b"[" * 100_000, "line 1: got text that is not JSON"),
  ],
)
def test_broken_files_are_refused_by_line(tmp_path, content, message):
  path = tmp_path / "rows.jsonl"
  path.write_bytes(content)
  with pytest.raises(ValueError, match=message):
    base.read_rows(path, ("prompt",))


def test_a_missing_file_is_refused(tmp_path):
  with pytest.raises(FileNotFoundError, match="absent.jsonl: got no such file, expected JSON"):
    base.read_rows(tmp_path / "absent.jsonl", ("prompt",))


def test_an_unknown_split_or_index_is_refused(outside):
  task = tasks.load("mine", path=outside / "prompts.jsonl", reward=lambda prompt, text: 1.0)
  with pytest.raises(ValueError, match="got split 'test', expected one of"):
    task.num_problems("test")
  with pytest.raises(ValueError, match="got problem index 2 of split 'train', expected 0 <= index"):
    task.problem("train", 2)
