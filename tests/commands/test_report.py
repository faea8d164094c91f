"""The command `report`: the page of a run of either kind, at one spelling."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
import tiny_problem

from seerjax import metrics
from seerjax.commands import report

ROOT = pathlib.Path(__file__).parents[2]
LOADER = "seerjax.commands.problems:load"


def write_run(directory: pathlib.Path) -> pathlib.Path:
  """Writes the metrics of a run of three steps."""
  directory.mkdir(exist_ok=True)
  with metrics.Writer(directory, console="off", tensorboard=False) as writer:
    for step in range(3):
      writer.write(step, {"rollout/reward_mean": 0.1 * step})
  return directory


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, "-m", "seerjax.commands", "report", *arguments],
    cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True,
  )  # fmt: skip


def test_it_runs_from_the_command_line(tmp_path: pathlib.Path):
  run = write_run(tmp_path / "run")
  done = command(str(run))
  assert done.stdout.strip() == str(run / "report.html"), done.stderr
  assert "Reward" in (run / "report.html").read_text()
  done = command()
  assert done.returncode == 2
  assert done.stderr.startswith("seerjax report: got no run, expected directories of runs; write")


def test_a_run_of_discovery_has_the_page_of_its_problem(tmp_path: pathlib.Path):
  problem = tiny_problem.Row()
  best = dict(
    problem=problem.name, value=12.0, certificate="", step=1, artefact=[1, 0, 0, 0, 0, 0],
    lineage=[dict(step=0, value=10.0, tokens=[]), dict(step=1, value=12.0, tokens=[0, 2, 9])],
    tree=[dict(id=0, parent=None, step=0, value=10.0), dict(id=1, parent=0, step=1, value=12.0)],
  )  # fmt: skip
  (tmp_path / "best.json").write_text(json.dumps(best))
  (tmp_path / "config.json").write_text(json.dumps(dict(problem=tiny_problem.__file__)))
  page = report.render(tmp_path, LOADER)
  assert "problem report" in page.read_text() or problem.name in page.read_text()


@pytest.mark.parametrize(
  ("files", "message"),
  [
    ({}, "report: got .*, which has none of metrics.jsonl"),
    ({"best.json": "{}", "config.json": "{}"}, "problem: got '', expected 'my_module:MyProblem'"),
  ],
)
def test_what_is_no_run_is_refused(tmp_path, files, message):
  for name, text in files.items():
    (tmp_path / name).write_text(text)
  with pytest.raises(ValueError, match=message):
    report.render(tmp_path, LOADER)
