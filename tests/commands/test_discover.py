"""Discovery by command: baselines at equal time, the problem checker, and a whole run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
import contextlib
import functools
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest
import tiny_problem

from experiments.problems import names
from seerjax import ttt
from seerjax.commands import discover, train
from seerjax.discovery import environment as environment_lib, starts as starts_lib
from seerjax.discovery.config import DiscoverConfig
from seerjax.discovery.objective import ObjectiveConfig

ROOT = pathlib.Path(__file__).parents[2]
PROBLEM = str(tiny_problem.__file__)


def run(*flags: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, "-m", "seerjax.commands", "discover", f"--config.problem={PROBLEM}", *flags],
    cwd=ROOT,
    env=os.environ | {"PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    check=False,
    timeout=500,
  )


def test_random_sentences_find_something():
  config = DiscoverConfig(problem=PROBLEM, prompts_per_step=2, group_size=8)
  environment = names.load(PROBLEM)
  found = list(itertools.islice(discover.random_policy(config, environment), 40))
  values = [value for _, value in found]
  # It is maximised: values are as the archive has them.
  archive = starts_lib.first_archive(config, environment)
  assert values[0] == max(state.value for state in archive.states)
  assert values[0] < max(values)
  assert all(environment.verify(artefact).value == value for artefact, value in found)
  assert found == list(itertools.islice(discover.random_policy(config, environment), 40))


def nothing_of(values: Iterable[float]) -> Iterator[tuple[None, float]]:
  return ((None, value) for value in values)


def test_improvements_within_a_time_by_hand():
  environment = names.load(PROBLEM)  # Higher is better.
  values = [math.nan, 3.0, math.nan, 5.0, 4.0]
  found = discover.improvements_within(environment, nothing_of(values), 1e9)
  assert [value for _, value in found] == [3.0, 5.0] and 0.0 <= found[0][0] <= found[1][0]
  assert discover.best_of(found) == 5.0
  # With no time the first value counts; without a valid one the result is NaN.
  endless = nothing_of(itertools.count(1.0))
  ((_, first),) = discover.improvements_within(environment, endless, 0.0)
  assert first == 1.0
  none = discover.improvements_within(environment, nothing_of([math.nan]), 1.0)
  assert math.isnan(discover.best_of(none))


class Lucky(tiny_problem.Row):
  """A timed problem: an artefact is [measured value, true value]."""

  def confirm(self, artefact):
    return environment_lib.Score(is_valid=True, value=artefact[1], reward=1.0)


def test_what_seems_better_by_luck_of_a_clock_is_no_improvement():
  seen = [[3.0, 2.0], [9.0, 1.5], [2.5, 2.25], [2.0, 8.0]]
  found = discover.improvements_within(Lucky(), ((one, one[0]) for one in seen), 1e9)
  assert [value for _, value in found] == [2.0, 2.25]  # The last one was never measured as better.


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_rivals_that_a_problem_has_not_are_not_compared(num_workers: int):
  config = DiscoverConfig(problem=PROBLEM, prompts_per_step=2, num_workers=num_workers)
  found = discover.rivals(config, names.load(PROBLEM), 0.0, functools.partial(names.load, PROBLEM))
  # With no time each still has its first value.
  _, first = next(discover.random_policy(config, names.load(PROBLEM)))
  assert found == {"random_edits": first}


@pytest.mark.long
def test_rivals_side_by_side_end_with_ctrl_c():
  config = DiscoverConfig(problem=PROBLEM, prompts_per_step=2, num_workers=1)
  # A shell's background jobs ignore SIGINT.
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  threading.Timer(3.0, os.kill, [os.getpid(), signal.SIGINT]).start()
  begin = time.monotonic()
  try:
    with pytest.raises(KeyboardInterrupt):
      discover.rivals(config, names.load(PROBLEM), 60.0, functools.partial(names.load, PROBLEM))
  finally:
    signal.signal(signal.SIGINT, before)
  assert time.monotonic() - begin < 40 and not multiprocessing.active_children()


def test_rivals_are_those_that_a_problem_can_have():
  everyone = ("classical", "tool_from_random_starts", "random_edits")
  assert discover.rival_names(names.load("circle_packing:5")) == everyone
  assert discover.rival_names(names.load(PROBLEM)) == ("random_edits",)
  assert discover.rival_names(tiny_problem.Row(language=None)) == ()


def without_a_language(tmp_path: pathlib.Path) -> str:
  path = tmp_path / "mine.py"
  path.write_text(pathlib.Path(PROBLEM).read_text().replace("LANGUAGE = Digits()", ""))
  return str(path)


def test_what_cannot_be_done_is_refused_before_anything_is_written(tmp_path: pathlib.Path):
  problem = f"--config.problem={without_a_language(tmp_path)}"
  workdir = f"--workdir={tmp_path / 'run'}"
  done = run(problem, workdir, "--compare")
  assert done.returncode == 2
  assert "which has neither a language of edits nor baselines, expected one" in done.stderr
  done = run("--preset=papers", workdir)
  assert done.returncode == 2 and "choose one of ['flagship', 'paper']" in done.stderr
  done = run("--workdir=")
  assert done.returncode and "got an empty path, expected a directory; name one" in done.stderr
  assert not (tmp_path / "run").exists()


def test_its_help_shows_where_it_begins_and_where_it_writes():
  output = run("--help").stdout
  assert "--preset=flagship (flagship|paper)" in output and "--workdir=runs/ttt_discover" in output
  assert output.startswith("Test-time training: trains on a single problem")


def test_the_papers_preset_is_as_published():
  paper = discover.PAPER
  assert (paper.num_steps, paper.prompts_per_step, paper.group_size) == (50, 8, 64)
  assert (paper.lora_rank, paper.optimizer.learning_rate) == (32, 4e-5)
  room = paper.engine.max_model_len - paper.programs.answer_tokens
  assert 26_000 <= room < 26_100 and paper.search == ttt.puct.SearchConfig()
  assert paper.objective == ObjectiveConfig()


def test_the_papers_preset_says_what_memory_it_takes_before_weights_are_read(capsys):
  paper = discover.PAPER
  config = paper.shared(names.load("circle_packing:26", allow_weak_sandbox=True))
  with contextlib.suppress(ValueError):  # Most machines lack the memory.
    train.say_memory(config, paper.model)
  output = capsys.readouterr().out
  assert "trainer.rows_per_micro_batch=32768, trainer.sequences_per_micro_batch=1" in output


@pytest.mark.long
def test_a_model_writes_programs_by_command(tmp_path: pathlib.Path):
  done = run(
    "--preset=paper", "--config.model=nano", "--config.num_steps=1", "--config.prompts_per_step=2",
    "--config.group_size=4", "--config.engine.max_model_len=1024", "--config.lora_rank=4",
    "--config.programs.thinking_tokens=32", "--config.programs.answer_tokens=32",
    "--config.trainer.rows_per_micro_batch=4096", f"--workdir={tmp_path / 'run'}",
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert "sandbox: " in done.stdout and (tmp_path / "run" / "report.html").is_file()


@pytest.mark.long
def test_a_run_leaves_its_best_and_its_page_and_refuses_to_begin_again(tmp_path: pathlib.Path):
  small = (
    "--config.num_steps=2", "--config.prompts_per_step=2", "--config.group_size=8",
    "--config.tiny.warm_sentences=64", f"--workdir={tmp_path}", "--compare", "--price=2",
  )  # fmt: skip
  done = run(*small)
  assert done.returncode == 0, done.stderr
  assert json.loads((tmp_path / "best.json").read_text())["problem"]
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert "random_edits" in summary["rivals"] and (tmp_path / "report.html").is_file()
  again = run(*small)
  assert again.returncode == 2 and "got the directory of another run" in again.stderr
  more = run(*small, "--resume", "--config.num_steps=3")
  assert more.returncode == 0 and "resumed after step 2 of 3" in more.stdout, more.stderr
  other = run(*small, "--resume", "--config.group_size=9")
  assert other.returncode == 2 and "group_size was 8 and is 9" in other.stderr
