"""A checkout in which scripts of launch/ run with this Python, and checks of their processes."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import time

import small_run

from seerjax import checkpoint
from seerjax.models import huggingface

# Flags of a run that takes a minute, mostly for compiling.
RUN_FLAGS = (
  "--config.checkpoint_every=1", "--config.rollout.prompts_per_step=2",
  "--config.rollout.group_size=2", "--config.rollout.max_tokens=8",
  "--config.evaluation.num_problems=2", "--config.engine.num_pages=64",
  "--config.engine.max_model_len=96", "--nobitwise",
)  # fmt: skip
ROOT = pathlib.Path(__file__).parents[2]
MINOR = "{}.{}".format(*sys.version_info[:2])
# A shell's background jobs ignore SIGINT, and a script cannot trap a signal ignored at its start.
HEARING = (
  "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL);"
  " os.execvp(sys.argv[1], sys.argv[1:])"
)


def checkout_in(root: pathlib.Path, *, locks: tuple[str, ...] = ("runtime",)) -> pathlib.Path:
  """Returns a checkout with this Python's environment, marked as installed from `locks`."""
  shutil.copytree(ROOT / "launch", root / "launch")
  binaries = root / ".venv" / "bin"
  binaries.mkdir(parents=True)
  (binaries / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
  (binaries / "python").chmod(0o755)
  stamps = root / ".venv" / "seerjax"
  stamps.mkdir()
  for name in locks:
    lock = root / "launch" / "locks" / f"{name}-{MINOR}.txt"
    with lock.open() as file:
      sums = subprocess.run(["cksum"], stdin=file, capture_output=True, text=True, check=True)
    (stamps / lock.name).write_text(sums.stdout)
  version = sys.version.split()[0]
  (stamps / "identity").write_text(f"{version} {sys.base_prefix} for {root}\n")
  return root


def with_experiments(root: pathlib.Path) -> pathlib.Path:
  """Adds the experiments and the library under test to a checkout."""
  for name in ("experiments", "seerjax", "pallas_kernels"):
    (root / name).symlink_to(ROOT / name)
  return root


def start(checkout: pathlib.Path, script: str, *arguments: str) -> subprocess.Popen:
  """Starts a script of launch/ in a checkout."""
  environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
  return subprocess.Popen(
    [sys.executable, "-c", HEARING, "bash", f"launch/{script}.sh", *arguments],
    cwd=checkout,
    env=environment | {"SEERJAX_PYTHON": sys.executable, "PYTHONPATH": "."},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    start_new_session=True,
  )


def run_script(checkout: pathlib.Path, script: str, *arguments: str) -> tuple[int, str]:
  """Runs a script of launch/ in a checkout to its end; returns its status and its output."""
  process = start(checkout, script, *arguments)
  text, _ = process.communicate(timeout=200)
  return process.returncode, text


def wait_for_step(directory: pathlib.Path, step: int, process: subprocess.Popen) -> None:
  """Waits until a run that a script started has a checkpoint after `step` or later."""
  for _ in range(18_000):  # Enough for a loaded machine.
    if (checkpoint.latest_step(directory / "checkpoints") or 0) >= step:
      return
    assert process.poll() is None, process.stdout and process.stdout.read()
    time.sleep(0.1)
  raise AssertionError(f"{directory} never had a checkpoint after step {step}")


def write_model(directory: pathlib.Path) -> pathlib.Path:
  """Writes a one-layer model with nano's vocabulary, for runs with `RUN_FLAGS`."""
  policy = small_run.policy()
  huggingface.save(directory, policy.params, policy.model, tokenizer=policy.tokenizer)
  return directory


def run_alone(directory: pathlib.Path, *arguments: str) -> pathlib.Path:
  """Runs `seerjax train` in its own process, and returns the run's directory."""
  done = subprocess.run(
    [sys.executable, "-m", "seerjax.commands", "train", *arguments, f"--workdir={directory}"],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  return directory


def is_alive(pid: int) -> bool:
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  return True


def processes_of(text: str) -> list[int]:
  """Returns the ids of other processes with a text in their command line."""
  found = subprocess.run(["pgrep", "-f", "--", text], capture_output=True, text=True)
  return [int(word) for word in found.stdout.split() if int(word) != os.getpid()]
