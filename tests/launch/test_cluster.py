"""launch/cluster.sh: what it would run and refuses; with Ray a run, a dead worker, an end."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import launched
import pytest
import small_run

from seerjax import checkpoint
from seerjax.models import huggingface

FLAGS = (
  "--config.num_steps=4", "--config.checkpoint_every=1",
  "--config.rollout.groups_per_step=2", "--config.rollout.group_size=2",
  "--config.rollout.max_tokens=8", "--config.evaluation.num_problems=2",
  "--config.engine.num_pages=64", "--config.engine.max_context=96", "--nobitwise",
)  # fmt: skip


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
  root = launched.checkout_in(tmp_path / "a checkout", locks=("runtime", "cluster"))
  return launched.with_experiments(root)


def start(checkout: pathlib.Path, *arguments: str) -> subprocess.Popen:
  return launched.start(checkout, "cluster", "--platform=cpu", *arguments)


def test_a_dry_run_says_what_would_be_run(checkout):
  script = start(checkout, "--workers=2", "--port=7000", "--dry-run", "experiments.grpo", "--x=1")
  text, _ = script.communicate(timeout=200)
  assert script.returncode == 0
  head, run = text.splitlines()
  assert head.startswith("python -P -m ray.scripts.scripts start --head --block --node-ip-addr")
  assert "--port=7000 --num-cpus=2 " in head
  assert run == (
    "python -P -m experiments.grpo --x=1 --config.cluster.workers=2"
    " --config.cluster.address=127.0.0.1:7000"
  )


@pytest.mark.parametrize(
  "arguments, message",
  [
    ((), "--workers: got '', expected a number from 1; write --workers=2."),
    (("--workers=none",), "--workers: got 'none', expected a number from 1"),
    (("--workers=2", "--port=fast"), "got --port='fast', --num_cpus='2', expected numbers"),
    (("--workers=2", "experiments.none"), "got the experiment 'experiments.none', expected"),
  ],
)
def test_wrong_arguments_are_refused_before_anything_runs(checkout, arguments, message):
  script = start(checkout, *arguments)
  text, _ = script.communicate(timeout=200)
  assert script.returncode == 1 and message in text


def test_where_ray_does_not_start_it_says_where_to_read(checkout):
  python = checkout / ".venv" / "bin" / "python"
  usual = python.read_text().partition("\n")[2]
  python.write_text(
    f'#!/bin/sh\ncase "$*" in *ray.scripts*) echo no such module; exit 1 ;; esac\n{usual}'
  )
  script = start(checkout, "--workers=2", "--port=7000")
  text, _ = script.communicate(timeout=200)
  assert script.returncode == 1
  assert re.search(r"Ray has not started; .*/runs/cluster/ray.log says why", text), text
  assert "no such module" in (checkout / "runs" / "cluster" / "ray.log").read_text()


def learnt(directory: pathlib.Path) -> bytes:
  return (directory / "model" / "model.safetensors").read_bytes()


@pytest.mark.long
def test_a_run_on_a_cluster_loses_a_worker_stops_resumes_and_learns_what_one_engine_learns(
  checkout, tmp_path
):
  pytest.importorskip("ray", reason="Ray is not installed")
  policy, model = small_run.policy(), tmp_path / "model"
  huggingface.save(model, policy.params, policy.model, tokenizer=policy.tokenizer)
  directory = tmp_path / "run"
  of_run = f"--workdir={directory}"
  arguments = ("--workers=2", "experiments.grpo", f"--config.model={model}", *FLAGS, of_run)

  others = launched.processes_of("ray::_Actor")  # Of whatever else runs on this machine.
  script = start(checkout, *arguments)
  while (checkpoint.latest_step(directory / "checkpoints") or 0) < 1:
    assert script.poll() is None
    time.sleep(0.1)
  workers = [one for one in launched.processes_of("ray::_Actor") if one not in others]
  assert len(workers) == 2
  os.kill(workers[0], signal.SIGKILL)
  while (checkpoint.latest_step(directory / "checkpoints") or 0) < 2:
    assert script.poll() is None
    time.sleep(0.1)
  script.send_signal(signal.SIGINT)
  text, _ = script.communicate(timeout=900)
  print(text)
  assert script.returncode == 130 and "by Ctrl-C after step" in text
  assert launched.processes_of(of_run) == launched.processes_of("seerjax_ray.") == []
  assert not any(map(launched.is_alive, workers))

  script = start(checkout, *arguments, "--resume")
  text, _ = script.communicate(timeout=900)
  print(text)
  assert script.returncode == 0 and text.count("report   ") == 1
  assert launched.processes_of("seerjax_ray.") == []

  alone = tmp_path / "alone"
  done = subprocess.run(
    [sys.executable, "-m", "experiments.grpo", f"--config.model={model}", *FLAGS,
     f"--workdir={alone}"],
    cwd=launched.ROOT, capture_output=True, text=True,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert learnt(directory) == learnt(alone)
