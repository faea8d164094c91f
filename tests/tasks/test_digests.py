"""Data digests change with every input of a prompt or a verdict, and with nothing else."""

from __future__ import annotations

import json
import pathlib
import shutil
import sys
import textwrap
from typing import Any

import pytest

from seerjax import tasks
from seerjax.tasks import digests
from seerjax.tasks.file_task import FileTask
from seerjax.tasks.function_task import function_task
from seerjax.types import Problem, Verdict

ROWS: list[dict[str, Any]] = [
  {"prompt": f"{i}?", "answer": f"#### {i}", "level": i % 3} for i in range(20)
]


def write(path: pathlib.Path, rows: list[dict[str, Any]]) -> pathlib.Path:
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


def two_arguments(prompt: str, text: str) -> float:
  return 0.0


def three_arguments(prompt: str, text: str, row: Any) -> float:
  return 0.0


def changed(index: int, **fields: Any) -> list[dict[str, Any]]:
  return [row | fields if place == index else row for place, row in enumerate(ROWS)]


@pytest.mark.parametrize(
  ("rows", "moved"),
  [
    (ROWS[::-1], {"train", "heldout"}),
    ([ROWS[1], ROWS[0], *ROWS[2:]], {"train"}),
    ([*ROWS[:9], ROWS[10], ROWS[9], *ROWS[11:]], {"train", "heldout"}),  # Swaps a held-out row.
    (ROWS[:-1], {"heldout"}),
    ([*ROWS, ROWS[0]], {"train"}),
    (changed(3, prompt="3? "), {"train"}),
    (changed(3, answer="#### 4"), {"train"}),
    (changed(9, answer="#### 4"), {"heldout"}),
    (changed(3, messages=[{"role": "user", "content": "a"}]), {"train"}),
    (changed(3, level=7), set()),  # No reward of two arguments reads it.
    (ROWS, set()),
  ],
)
def test_what_a_run_reads_of_a_file_moves_its_digests(tmp_path, rows, moved: set[str]):
  one = function_task("own", write(tmp_path / "a.jsonl", ROWS), two_arguments)
  other = function_task("own", write(tmp_path / "a.jsonl", rows), two_arguments)
  stored, current = digests.of_task(one), digests.of_task(other)
  assert {name for name in stored if stored[name] != current[name]} == moved
  if moved:
    message = r"--resume: got data that differ from the run's \(.*(train|heldout) was '\w{16}'"
    with pytest.raises(ValueError, match=f"{message}.*or pass --accept_new_data, which"):
      digests.require_same(stored, current, what="--resume")
  else:
    digests.require_same(stored, current, what="--resume")


def test_a_column_counts_where_a_reward_is_given_the_row(tmp_path):
  found = [
    digests.of_task(function_task("own", write(tmp_path / "a.jsonl", rows), three_arguments))
    for rows in (ROWS, changed(3, level=7))
  ]
  assert found[0]["train"] != found[1]["train"] and found[0]["heldout"] == found[1]["heldout"]


FILES = {
  "gsm8k": [{"question": f"{i}?", "answer": f"#### {i}"} for i in range(20)],
  "math": [{"problem": f"{i}?", "solution": f"\\boxed{{{i}}}"} for i in range(20)],
  "code": [{"prompt": f"{i}?", "tests": f"assert f() == {i}"} for i in range(20)],
}


@pytest.mark.parametrize("name", FILES)
def test_every_task_of_files_has_digests_of_both_splits(tmp_path, name: str):
  path, rows = tmp_path / "rows.jsonl", FILES[name]
  found = []
  for order in (rows, rows, rows[::-1]):
    task = tasks.load(name, path=write(path, order))
    found.append(digests.of_task(task, path))
    if name == "code":
      task.close()  # pyright: ignore[reportAttributeAccessIssue]
  assert set(found[0]) == {"train", "heldout"}  # The code is this library's.
  assert found[0] == found[1] and not {*found[0].values()} & {*found[2].values()}


def test_a_set_of_an_evaluation_has_the_digest_of_what_it_asks(tmp_path):
  task = function_task("own", write(tmp_path / "a.jsonl", ROWS), two_arguments)
  found = digests.of_set("more", task)
  assert set(found) == {"more.heldout", "more.source"}
  assert found["more.heldout"] == digests.of_task(task)["heldout"]
  assert set(digests.data_of(found)) == {"more.heldout"}
  message = r"got data that differ from the run's \(more.heldout was '\w{16}' and is None"
  with pytest.raises(ValueError, match=message):
    digests.require_same(found, {}, what="--resume")


def test_drawn_tasks_have_none():
  for name in ("word_problems", "countdown", "sudoku", "puzzles"):
    assert digests.of_task(tasks.load(name)) == {}


def test_a_task_of_ones_own_that_reads_a_path_has_the_digest_of_its_files(tmp_path, own_modules):
  module = tmp_path / "own_task_of_digests.py"
  module.write_text(
    textwrap.dedent(
      """
      class Own:
        name = "own"

        def __init__(self, path):
          self.path = path

        def num_problems(self, split):
          return 10**9

        def problem(self, split, index): ...

        def verdict(self, problem, text): ...
      """
    )
  )
  data = tmp_path / "data"
  (data / "deep").mkdir(parents=True)
  write(data / "deep" / "a.jsonl", ROWS)
  write(data / "b.jsonl", ROWS)
  task = tasks.load("own_task_of_digests:Own", path=data)
  first = digests.of_task(task, data)
  assert set(first) == {"task_path", "source"}
  assert first["source"].startswith("own_task_of_digests ")
  assert digests.of_task(task, data) == first
  shutil.move(data / "b.jsonl", data / "c.jsonl")
  assert digests.of_task(task, data)["task_path"] != first["task_path"]
  # Changed source code is reported, and not refused.
  module.write_text(module.read_text() + "\n# Changed.\n")
  second = digests.of_task(task, data) | {"task_path": first["task_path"]}
  assert digests.differences(first, second) == [
    f"source was {first['source']!r} and is {second['source']!r}"
  ]
  digests.require_same(first, second, what="--resume")


@pytest.fixture
def own_modules(tmp_path):
  """The folder is one of those that modules are imported from."""
  sys.path.append(str(tmp_path))
  yield
  sys.path.remove(str(tmp_path))
  sys.modules.pop("own_task_of_digests", None)


def test_the_source_is_that_of_the_function_which_judges():
  def judge(problem: Problem, text: str) -> Verdict:
    return Verdict(reward=0.0, correct=False, well_formed=True)

  problem = Problem(problem_id="0", prompt="a")
  task = FileTask(name="own", train=(problem,), heldout=(problem,), judge=judge)
  (name, digest) = digests.of_task(task)["source"].split()
  assert name.endswith("test_digests") and digest == digests.of_files(pathlib.Path(__file__))
  assert digests.of_source(tasks.load) == digests.of_source(len) == {}
