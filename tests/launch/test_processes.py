"""launch/processes.sh with a small experiment: its logs, its exits, and errors."""

from __future__ import annotations

import pathlib
import re
import signal
import subprocess
import time

import launched
import pytest

EXPERIMENT = '''"""Claim: none.
Command: none
"""
import os, signal, sys, time

rank = next(word.partition("=")[2] for word in sys.argv if word.startswith("--process_id="))
print("process", rank, os.getpid(), *sys.argv[1:], flush=True)
if "--dies" in sys.argv and rank == "1":
  sys.exit(7)
if "--ends" in sys.argv:
  sys.exit(0)


def stop(number, frame):
  print("stopped by", number, flush=True)
  sys.exit(128 + number)


signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
print("waits", flush=True)
while True:
  time.sleep(0.05)
'''


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
  """A checkout with one experiment, in a path with a space."""
  root = launched.checkout_in(tmp_path / "a checkout")
  (root / "experiments").mkdir()
  (root / "experiments" / "__init__.py").write_text("")
  (root / "experiments" / "small.py").write_text(EXPERIMENT)
  return root


def start(checkout: pathlib.Path, *arguments: str) -> subprocess.Popen:
  return launched.start(checkout, "processes", "--platform=cpu", *arguments)


def lines_of(checkout: pathlib.Path, rank: int, wanted: str) -> str:
  """Waits until a process' log has a line, and returns the log."""
  log = checkout / "runs" / "processes" / f"process_{rank}.log"
  for _ in range(1800):  # Of a loaded machine.
    if log.is_file() and wanted in log.read_text():
      return log.read_text()
    time.sleep(0.1)
  raise AssertionError(f"{log} never had {wanted!r}")


def pid_of(text: str) -> int:
  found = re.search(r"process \d (\d+)", text)
  assert found is not None, text
  return int(found[1])


def test_each_process_gets_its_number_and_one_address_and_the_first_prints_here(checkout):
  script = start(checkout, "--num_processes=3", "experiments.small", "--ends", "--x=1")
  text, _ = script.communicate(timeout=200)
  assert re.search(r"^process 0 \d+ --ends --x=1 --num_processes=3 --coord", text, re.M), text
  addresses = re.findall(r"--coordinator=(127\.0\.0\.1:\d+)", text)
  for rank in (1, 2):
    own = lines_of(checkout, rank, "process")
    assert f"--process_id={rank}" in own and f"--coordinator={addresses[0]}" in own
    assert f"process {rank} " not in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_ends_all_of_them(checkout, number):
  script = start(checkout, "--num_processes=2", "experiments.small")
  pids = [pid_of(lines_of(checkout, 1, "waits"))]
  script.send_signal(number)
  text, _ = script.communicate(timeout=200)
  pids.append(pid_of(text))
  assert script.returncode == 128 + number, text
  assert f"stopped by {number.value}" in text
  assert f"stopped by {number.value}" in lines_of(checkout, 1, "stopped")
  assert not any(map(launched.is_alive, pids))


def test_where_one_dies_the_others_are_ended_with_a_message(checkout):
  script = start(checkout, "--num_processes=2", "--patience=1", "experiments.small", "--dies")
  text, _ = script.communicate(timeout=200)
  assert script.returncode == 7, text
  assert "process 1 ended with status 7; its lines and the others' are here and in" in text
  assert "1 of the others did not end within 1 s and are killed; --resume continues." in text
  assert not launched.is_alive(pid_of(text))


@pytest.mark.parametrize(
  "arguments, message",
  [
    ((), "--num_processes: got '', expected a number of at least 1"),
    (("--num_processes=two",), "--num_processes: got 'two', expected a number of at least 1"),
    (("--num_processes=2", "--port=fast"), "--port: got 'fast', expected a number"),
    (("--num_processes=2", "--patience="), "--patience: got '', expected whole seconds"),
    (("--num_processes=2", "experiments.none"), "got the experiment 'experiments.none', expected"),
  ],
)
def test_wrong_arguments_are_refused_before_anything_runs(checkout, arguments, message):
  status, text = launched.run_script(checkout, "processes", "--platform=cpu", *arguments)
  assert status == 1 and message in text


def test_a_dry_run_says_what_would_be_run(checkout):
  _, text = launched.run_script(
    checkout, "processes", "--platform=cpu", "--num_processes=2", "--dry-run", "experiments.small"
  )
  assert text.splitlines() == [
    f"run experiments.small --num_processes=2 --coordinator=127.0.0.1:FREE --process_id={rank}"
    for rank in range(2)
  ]


def test_help_says_how_it_ends():
  script = str(launched.ROOT / "launch" / "processes.sh")
  done = subprocess.run(["bash", script, "--help"], capture_output=True, text=True)
  assert done.returncode == 0 and "Ctrl-C and SIGTERM stop all" in done.stdout
