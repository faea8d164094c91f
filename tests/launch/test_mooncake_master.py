"""launch/mooncake_master.sh, as far as it runs without a network; the master itself runs in
tests/kv/test_mooncake_store.py."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "launch" / "mooncake_master.sh"


def run(*arguments: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    ["bash", str(SCRIPT), *arguments], capture_output=True, text=True, check=False
  )


def test_help_says_how_runs_join():
  done = run("--help")
  assert done.returncode == 0 and "--config.kv_pool.mooncake=HOST:PORT" in done.stdout


@pytest.mark.parametrize(
  "argument, message",
  [
    ("--port=fast", "got the port 'fast', expected a number"),
    ("--metrics_port=", "got the port '', expected a number"),
    ("--ports=1", "got '--ports=1', expected --port=N or --metrics_port=N"),
  ],
)
def test_wrong_arguments_are_refused_before_anything_is_made(argument, message):
  done = run(argument)
  assert done.returncode == 1 and message in done.stderr
