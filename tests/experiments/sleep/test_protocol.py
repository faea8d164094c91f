"""The table of arms by hand; and the command, on nano and on a killed run's journal."""

from __future__ import annotations

import math
import pathlib
import subprocess
import sys

import pytest

from experiments.sleep import protocol as sleep_protocol
from seerjax.sleep import prompts as prompts_lib
from seerjax.sleep.protocol import Row
from seerjax.tasks.stateful import StatefulConfig, StatefulWordProblems

ROOT = pathlib.Path(__file__).parents[3]


def row(context: str, arm: str, reward: float, tokens: int, **fields) -> Row:
  fields = dict(verbosity=0, num_parallel=0, max_tokens=9, num_sharing=2) | fields
  return Row(
    context_id=context, problem_id="p", arm=arm, reward=reward, num_tokens=tokens, **fields
  )


def test_a_table_by_hand():
  rows = [
    row("a", "wake", 1.0, 4, num_sleep_tokens=20, num_parallel=1),
    row("a", "wake", 0.0, 6, num_sleep_tokens=20, num_parallel=1),
    row("b", "wake", 1.0, 5, num_sleep_tokens=40, num_parallel=1),
    row("b", "wake", 0.0, 0, num_parallel=1, error="no answer"),
    row("a", "test", 1.0, 10),
    row("a", "test", 1.0, 3, max_tokens=3),
  ]
  lines = sleep_protocol.lines_of(rows, 10)
  assert [(one.arm, one.max_tokens) for one in lines] == [("test", 9), ("test", 3), ("wake", 9)]
  wake = lines[2]
  assert (wake.num_rows, wake.num_marked) == (3, 1)
  assert wake.accuracy == pytest.approx(2 / 3)
  assert wake.error == pytest.approx(0.25)  # Of the contexts' means, 1/2 and 1.
  assert wake.num_sleep_tokens == pytest.approx((10 + 10 + 20) / 3)
  assert wake.cost == pytest.approx(50 + 40 / 3)
  assert math.isnan(lines[0].error)
  text = sleep_protocol.table(lines, 10)
  assert "| wake | 0 | 1 | 9 | 3 | 1 | 66.7 ± 25.0 | 5.0 | 13.3 | 63 |" in text
  assert text.splitlines()[0].endswith("| cost at t = 10 |")


def test_tasks_are_stories_files_or_repositories(tmp_path: pathlib.Path):
  config = StatefulConfig(num_questions=2)
  task = sleep_protocol.load_task(sleep_protocol.STORIES, config)
  assert isinstance(task, StatefulWordProblems) and task.config == config
  path = tmp_path / "rows.jsonl"
  path.write_text('{"question": "It is 1. How late is it?", "answer": "1"}\n')
  assert sleep_protocol.load_task(str(path), config).name == "rows"
  with pytest.raises(FileNotFoundError, match="none: got no such file, expected JSON lines"):
    sleep_protocol.load_task(str(tmp_path / "none"), config)
  (tmp_path / "repository" / ".git").mkdir(parents=True)
  with pytest.raises(ValueError, match="from 'git rev-list', expected a repository"):
    sleep_protocol.load_task(str(tmp_path / "repository"), config)
  taught = sleep_protocol.prompts_for(task, follows_orders=False)
  assert taught.num_verbosities == 4
  ordered = sleep_protocol.prompts_for(task, follows_orders=True)
  assert ordered.num_verbosities == len(prompts_lib.VERBOSITIES) == 5


@pytest.mark.thorough
def test_the_command_prints_arms_and_asks_nothing_that_its_journal_has(tmp_path: pathlib.Path):
  journal = tmp_path / "calls.jsonl"

  def run(*others: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "experiments.sleep.protocol", "--num_contexts=1"]
    command += ["--num_questions=2", "--verbosities=3", "--parallel=1", "--wake_tokens=24"]
    command += ["--arms=test,wake,facts", f"--journal={journal}", *others]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

  first = run()
  assert first.returncode == 0, first.stderr
  assert "| facts | 3 |  | 24 | 2 |" in first.stdout
  size = journal.stat().st_size
  assert run().stdout == first.stdout and journal.stat().st_size == size
  other = run("--endpoint=http://127.0.0.1:9", "--model=m")
  assert other.returncode == 2 and "got a different thinker (endpoint was None" in other.stderr
  bad = run("--num_contexts=0")
  assert bad.returncode == 2 and "--num_contexts: got 0, expected at least 1" in bad.stderr
