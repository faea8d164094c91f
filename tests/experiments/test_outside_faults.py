"""Faults from outside: which are drawn, which processes they target, and their effects."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from experiments import outside_faults

# Starts two children under a worker's name, prints a line, and waits for them.
RUN = """
import subprocess, sys, time
name, seconds = sys.argv[1:]
loop = f"exec -a '{name}' sleep {seconds}"
children = [subprocess.Popen(["bash", "-c", loop]) for _ in range(2)]
print("begun", flush=True)
for child in children:
  child.wait()
"""


def start(seconds: int = 60) -> subprocess.Popen:
  process = subprocess.Popen(
    [sys.executable, "-c", RUN, f"{outside_faults.WORKER}.run()", str(seconds)],
    stdout=subprocess.PIPE, text=True,
  )  # fmt: skip
  assert process.stdout is not None and process.stdout.readline() == "begun\n"
  while len(outside_faults.processes_below(process.pid, outside_faults.WORKER)) < 2:
    time.sleep(0.02)  # Until both have taken their names.
  return process


def outsider(pages: pathlib.Path, *kinds: str, rollouts: int = 3, resumable: bool = True):
  return outside_faults.Outsider(
    [outside_faults.Fault(kind, rollouts, 0.0) for kind in kinds],
    seed=0,
    pages=pages,
    stop_seconds=0.5,
    num_rollouts=lambda: 3,
    is_resumable=lambda: resumable,
  )


def test_faults_are_drawn_in_order_each_kind_as_often_as_it_is_asked_for(seed):
  faults = outside_faults.drawn(seed, 240)
  assert faults == outside_faults.drawn(seed, 240) != outside_faults.drawn(seed + 1, 240)
  kinds = [one.kind for one in faults]
  assert {kind: kinds.count(kind) for kind in kinds} == outside_faults.COUNTS
  assert len(faults) > outside_faults.LEAST
  moments = [one.rollouts for one in faults]
  assert moments == sorted(moments) and moments[0] >= 24 and moments[-1] < 216
  assert len(outside_faults.drawn(seed, 2)) == len(faults)


def test_workers_are_found_below_a_run_and_nothing_else_is():
  runs = [start(), start()]
  found = [outside_faults.processes_below(run.pid, outside_faults.WORKER) for run in runs]
  assert [len(some) for some in found] == [2, 2] and not {*found[0]} & {*found[1]}
  assert {*found[0], *found[1]} <= {
    *outside_faults.processes_below(os.getpid(), outside_faults.WORKER)
  }
  for process in found[0] + found[1]:
    os.kill(process, signal.SIGKILL)
  assert [run.wait() for run in runs] == [0, 0]


def test_killed_workers_are_gone_and_a_run_that_ends_tells_its_status(tmp_path):
  faults = outsider(tmp_path, "kill", "kill")
  assert faults.accompany(start()) == 0  # It ends when both of its children have.
  assert faults.met == {"kill": 2}


def test_a_stopped_worker_goes_on(tmp_path):
  faults = outsider(tmp_path, "stop")
  begin = time.monotonic()
  assert faults.accompany(start(seconds=1)) == 0
  assert faults.met == {"stop": 1} and time.monotonic() - begin < 30


def test_a_run_is_killed_when_it_may_be_and_not_before(tmp_path):
  run = start(seconds=1)
  faults = outsider(tmp_path, "driver", resumable=False)
  assert faults.accompany(run) == 0 and not faults.met
  run = start(seconds=1)
  faults = outsider(tmp_path, "driver")
  assert faults.accompany(run) is None and run.returncode == -signal.SIGKILL
  assert faults.met == {"driver": 1}


@pytest.mark.parametrize("kind, left", [("damage", 2), ("forget", 0)])
def test_page_sets_that_are_there_are_spoiled_and_a_worker_goes_with_them(kind, left, tmp_path):
  data = bytes(range(256))
  for owner in "ab":
    (tmp_path / owner).mkdir()
    (tmp_path / owner / "pages.kv").write_bytes(data)
    (tmp_path / owner / "lock").touch()
  faults = outsider(tmp_path, kind)
  assert faults.accompany(start(seconds=1)) == 0 and faults.met[kind] == 1
  found = [path.read_bytes() for path in sorted(tmp_path.glob("*/*.kv"))]
  assert len(found) == left and len([*tmp_path.glob("*/lock")]) == 2
  for one in found:
    bits = np.frombuffer(one, np.uint8) ^ np.frombuffer(data, np.uint8)
    assert int(np.bitwise_count(bits).sum()) == 1


def test_what_can_befall_nothing_waits(tmp_path):
  faults = outsider(tmp_path, "damage", "kill")  # No page set is there.
  assert faults.accompany(start(seconds=1)) == 0 and faults.met["kill"] == 1
  assert not faults.met["damage"]
  early = outsider(tmp_path, "kill", rollouts=4)  # And three rollouts alone.
  assert early.accompany(start(seconds=1)) == 0 and not early.met
