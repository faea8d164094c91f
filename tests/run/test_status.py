"""status.json reports a run's state to observers."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from seerjax.run import status, stops

ROOT = pathlib.Path(__file__).parents[2]


def of(directory):
  return json.loads((directory / "status.json").read_text())


def test_a_run_is_running_and_then_finished(tmp_path):
  with status.kept(tmp_path, step=2) as kept:
    first = of(tmp_path)
    kept.step = 3
    kept.beat("step 4 of 9: sampling")
    second = of(tmp_path)
  last = of(tmp_path)
  assert (first["state"], first["step"], first["pid"]) == ("running", 2, os.getpid())
  assert (second["state"], second["step"]) == ("running", 3)
  assert second["at"] == "step 4 of 9: sampling"
  assert (last["state"], last["why"], last["step"]) == ("finished", "", 3)
  assert {path.name for path in tmp_path.iterdir()} == {"status.json"}


@pytest.mark.parametrize(
  ("error", "state", "why"),
  [
    (stops.Interrupted("stopped by SIGTERM after step 2 of 4", 143), "stopped", "stopped by SIGT"),
    (stops.Terminated(), "stopped", "by SIGTERM; saved results are kept"),
    (KeyboardInterrupt(), "stopped", "by Ctrl-C; saved results are kept"),
    (ValueError("got 1, expected 2"), "failed", "ValueError: got 1, expected 2"),
    (SystemExit(3), "failed", "SystemExit: 3"),
  ],
)
def test_a_run_that_ends_otherwise_says_why(tmp_path, error, state, why):
  with pytest.raises(type(error)), status.kept(tmp_path):
    raise error
  assert of(tmp_path)["state"] == state
  assert of(tmp_path)["why"].startswith(why)


RUNNING = """
import pathlib, sys, time
from seerjax.run import status
with status.kept(pathlib.Path(sys.argv[1])):
  print("running", flush=True)
  time.sleep(600)
"""


def test_a_run_that_was_killed_can_be_told_from_one_that_is_running(tmp_path):
  command = [sys.executable, "-c", RUNNING, str(tmp_path)]
  with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
    assert process.stdout is not None and process.stdout.readline() == "running\n"
    alive = status.read(tmp_path)
    with pytest.raises(ValueError, match=f"got a run that process {process.pid} is running, exp"):
      status.kept(tmp_path).__enter__()
    process.kill()
  assert alive is not None and alive["state"] == "running"
  dead = status.read(tmp_path)
  assert dead is not None and (dead["state"], dead["pid"]) == ("killed", process.pid)
  assert of(tmp_path)["state"] == "running"  # The killed process could not update it.
  with status.kept(tmp_path):
    pass
  assert of(tmp_path)["state"] == "finished"


def test_a_number_that_another_process_has_by_now_is_no_sign_of_life(tmp_path):
  with status.kept(tmp_path):
    record = of(tmp_path)
  record |= dict(state="running", process_started="another 1", pid=os.getppid())
  (tmp_path / "status.json").write_text(json.dumps(record))
  found = status.read(tmp_path)
  assert found is not None and found["state"] == "killed"


def test_a_run_of_another_host_may_be_running(tmp_path):
  with status.kept(tmp_path):
    record = of(tmp_path)
  (tmp_path / "status.json").write_text(json.dumps(record | dict(state="running", host="afar")))
  found = status.read(tmp_path)
  assert found is not None and found["state"] == "running"
  with status.kept(tmp_path):
    pass  # It cannot be seen from here, and may be gone.


@pytest.mark.parametrize("text", ["", "{", "[]", '{"state": "running"}', '"running"'])
def test_a_damaged_file_is_none(tmp_path, text):
  (tmp_path / "status.json").write_text(text)
  assert status.read(tmp_path) is None
  with status.kept(tmp_path):
    pass


def test_a_directory_without_one_has_none(tmp_path):
  assert status.read(tmp_path) is None
