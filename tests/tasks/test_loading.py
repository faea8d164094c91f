"""The ways to name a task."""

from __future__ import annotations

import pytest

from seerjax import tasks
from seerjax.tasks import built_in


def test_own_tasks_load_by_name():
  assert tasks.load("word_problems").name == "word_problems"
  assert tasks.load("countdown").name == "countdown"


def test_the_tasks_of_the_package_are_found_in_its_modules():
  names = [
    "code",
    "math",
    "countdown",
    "gsm8k",
    "mmlu",
    "commonsense_qa",
    "puzzles",
    "sudoku",
    "word_problems",
  ]
  assert list(built_in.sources()) == names
  with pytest.raises(ValueError, match=f"expected {', '.join(map(repr, names))}, 'reasoning_gym."):
    tasks.load("gsm")


def test_tasks_load_from_the_current_directory(outside):
  task = tasks.load("outside_task_module:MyTask")
  assert task.problem("train", 0).prompt == "nowhere"
  task = tasks.load("outside_task_module:MyTask", path="somewhere")
  assert task.problem("train", 0).prompt == "somewhere"
  task = tasks.load("outside_task_module:an_instance")
  assert task.problem("train", 0).prompt == "made already"


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("word_problem", "'word_problem', expected 'code', 'math', 'countdown', .*'reasoning_gym.GENE"),
    ("gsm8k", "gsm8k: got no path, expected the original JSON lines; set --config.task_path to"),
    ("math", "math: got no path, expected the published folders or JSON lines; set"),
    ("mmlu", "mmlu: got no path, expected the published folders of CSV"),
    ("commonsense_qa", "commonsense_qa: got no path, expected the published JSON lines"),
    ("code", 'code: got no path, expected JSON lines with "prompt" and "tests"'),
    ("no_such_module:x", "but module 'no_such_module' cannot be imported"),
    (":x", "but module '' cannot be imported"),
    ("outside_task_module:Absent", "has no 'Absent'.*it has .*'MyTask'"),
    ("outside_task_module:reward", "got a bare reward function and no path"),
    ("outside_task_module:half_a_task", r"without \['name', 'num_problems', 'verdict'\]"),
  ],
)
def test_unusable_names_are_refused(outside, name, message):
  with pytest.raises(ValueError, match=message):
    tasks.load(name)


@pytest.mark.parametrize("name", ["word_problems", "countdown", "sudoku", "puzzles"])
def test_a_path_for_generated_problems_is_refused(name):
  with pytest.raises(ValueError, match=f"{name}: got path 'x', expected none"):
    tasks.load(name, path="x")
