"""A user's module and data file, in the current directory."""

from __future__ import annotations

import contextlib

import pytest

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
