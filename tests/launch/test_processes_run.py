"""launch/processes.sh with a training run that is stopped, killed and resumed.

The model has one layer; each of the three tests starts processes that compile, which takes minutes.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
import signal
import subprocess
import time

import launched
from launched import processes_of
import pytest

from seerjax import checkpoint

NUM_STEPS = 6
FLAGS = ("--config.data_parallel_size=2", f"--config.num_steps={NUM_STEPS}", *launched.RUN_FLAGS)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> pathlib.Path:
  """The directory of a model of one layer with nano's vocabulary."""
  return launched.write_model(tmp_path_factory.mktemp("model"))


def start(checkout: pathlib.Path, *arguments: str) -> subprocess.Popen:
  return launched.start(checkout, "processes", "--platform=cpu", *arguments)


def learnt(directory: pathlib.Path) -> str:
  """Returns the digest of a run's weights and of the lines that its journal has of rollouts."""
  digest = hashlib.sha256((directory / "model" / "model.safetensors").read_bytes())
  lines = (directory / "journal.jsonl").read_text().splitlines()[1:]
  digest.update("".join(sorted(json.dumps(json.loads(line)["record"]) for line in lines)).encode())
  return digest.hexdigest()


@pytest.mark.long
def test_a_run_is_stopped_killed_and_resumed_and_learns_what_one_process_learns(model, tmp_path):
  whole = launched.with_experiments(launched.checkout_in(tmp_path / "checkout"))
  directory = tmp_path / "run"
  arguments = ("--num_processes=2", "train", f"--config.model={model}", *FLAGS)
  of_run = f"--workdir={directory}"

  script = start(whole, *arguments, of_run)
  launched.wait_for_step(directory, 1, script)
  script.send_signal(signal.SIGINT)
  text, _ = script.communicate(timeout=600)
  print(text)
  assert script.returncode == 130, text
  assert re.search(rf"stopped by Ctrl-C after step \d of {NUM_STEPS}; --resume", text)
  assert processes_of(of_run) == []

  script = start(whole, *arguments, of_run, "--resume")
  done = checkpoint.latest_step(directory / "checkpoints") or 0
  launched.wait_for_step(directory, done + 1, script)
  [victim] = [one for one in processes_of("--process_id=1") if one in processes_of(of_run)]
  os.kill(victim, signal.SIGKILL)
  begin = time.monotonic()
  text, _ = script.communicate(timeout=600)
  print(text, f"ended {time.monotonic() - begin:.1f} s after the kill")
  assert time.monotonic() - begin < 60
  assert script.returncode not in (0, 130) and "ended with status" in text
  assert processes_of(of_run) == [] and not launched.is_alive(victim)

  script = start(whole, *arguments, of_run, "--resume")
  text, _ = script.communicate(timeout=600)
  print(text)
  assert script.returncode == 0, text
  assert text.count("report   ") == 1

  # The same run as one process.
  alone = launched.run_alone(tmp_path / "alone", f"--config.model={model}", *FLAGS)
  assert learnt(directory) == learnt(alone)
