"""launch/cluster.sh: dry runs and errors; with Ray a run, a dead worker and the shutdown."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess

import launched
import pytest

FLAGS = ("--config.num_steps=4", *launched.RUN_FLAGS)


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
  root = launched.checkout_in(tmp_path / "a checkout", locks=("runtime", "cluster"))
  return launched.with_experiments(root)


def start(checkout: pathlib.Path, *arguments: str) -> subprocess.Popen:
  return launched.start(checkout, "cluster", "--platform=cpu", *arguments)


def run_script(checkout: pathlib.Path, *arguments: str) -> tuple[int, str]:
  return launched.run_script(checkout, "cluster", "--platform=cpu", *arguments)


def test_a_dry_run_says_what_would_be_run(checkout):
  arguments = ("--workers=2", "--port=7000", "--dry-run", "train", "--x=1")
  status, text = run_script(checkout, *arguments, "--store_bytes=0")
  assert status == 0
  head, run = text.splitlines()
  assert head.startswith("python -P -m ray.scripts.scripts start --head --block --node-ip-addr")
  assert "--port=7000 --num-cpus=2 " in head
  assert run == (
    "python -P -m seerjax.commands train --x=1 --config.cluster.workers=2"
    " --config.cluster.address=127.0.0.1:7000"
  )


@pytest.mark.parametrize(
  "arguments, message",
  [
    ((), "--workers: got '', expected a number of at least 1; write --workers=2."),
    (("--workers=none",), "--workers: got 'none', expected a number of at least 1"),
    (("--workers=2", "--port=fast"), "got --port='fast', --num_cpus='2', expected numbers"),
    (("--workers=2", "--store_bytes=some"), "--store_bytes: got 'some', expected bytes, or 0"),
    (("--workers=2", "experiments.none"), "got the experiment 'experiments.none', expected"),
  ],
)
def test_wrong_arguments_are_refused_before_anything_runs(checkout, arguments, message):
  status, text = run_script(checkout, *arguments)
  assert status == 1 and message in text


def test_a_master_of_mooncake_is_started_where_it_is_there_and_asked_for(checkout):
  pytest.importorskip("mooncake.store", reason="Mooncake is not installed", exc_type=ImportError)
  arguments = ("--workers=2", "--dry-run", "train")
  _, text = run_script(checkout, *arguments)
  master, _, run = text.splitlines()
  assert master == "mooncake_master --rpc_port FREE"
  assert run.endswith(
    " --config.kv_pool.mooncake=127.0.0.1:FREE --config.kv_pool.store_bytes=268435456"
  )
  for others in (("--host=10.0.0.1",), ("--config.kv_pool.disk=here",)):
    _, text = run_script(checkout, *arguments, *others)
    assert "kv_pool.mooncake" not in text and len(text.splitlines()) == 2


def test_where_ray_does_not_start_it_says_where_to_read(checkout):
  python = checkout / ".venv" / "bin" / "python"
  usual = python.read_text().partition("\n")[2]
  python.write_text(
    f'#!/bin/sh\ncase "$*" in *ray.scripts*) echo no such module; exit 1 ;; esac\n{usual}'
  )
  status, text = run_script(checkout, "--workers=2", "--port=7000")
  assert status == 1
  assert re.search(r"Ray has not started; see .*/runs/cluster/ray.log", text), text
  assert "no such module" in (checkout / "runs" / "cluster" / "ray.log").read_text()


def test_ray_that_does_not_come_up_in_its_time_is_started_again(checkout):
  python = checkout / ".venv" / "bin" / "python"
  usual = python.read_text().partition("\n")[2]
  python.write_text(
    '#!/bin/sh\ncase "$*" in *ray.scripts*)'
    " echo The current node timed out during startup; exit 1 ;; esac\n" + usual
  )
  status, text = run_script(checkout, "--workers=2", "--port=7000", "--store_bytes=0")
  assert status == 1 and text.count("Ray has not started within 30 s; starting it again") == 2
  assert re.search(r"Ray has not started; see .*/runs/cluster/ray.log", text), text


def learnt(directory: pathlib.Path) -> bytes:
  return (directory / "model" / "model.safetensors").read_bytes()


@pytest.mark.long
def test_a_run_on_a_cluster_loses_a_worker_stops_resumes_and_learns_what_one_engine_learns(
  checkout, tmp_path
):
  pytest.importorskip("ray", reason="Ray is not installed")
  model, directory = launched.write_model(tmp_path / "model"), tmp_path / "run"
  of_run = f"--workdir={directory}"
  arguments = ("--workers=2", "train", f"--config.model={model}", *FLAGS, of_run)

  others = launched.processes_of("ray::_Actor")  # Processes of other programs on this machine.
  script = start(checkout, *arguments)
  launched.wait_for_step(directory, 1, script)
  workers = [one for one in launched.processes_of("ray::_Actor") if one not in others]
  assert len(workers) == 2
  os.kill(workers[0], signal.SIGKILL)
  launched.wait_for_step(directory, 2, script)
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

  alone = launched.run_alone(tmp_path / "alone", f"--config.model={model}", *FLAGS)
  assert learnt(directory) == learnt(alone)
