"""Runs of two processes learn one process's bits, and only the first process writes."""

from __future__ import annotations

import collections
import json
import pathlib
import re

import pytest
import slice_jobs

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("programs_on_disk")]


def records_of(directory: pathlib.Path) -> list[str]:
  """Returns what a run's journal holds, but for its first line, in one order."""
  lines = (directory / "journal.jsonl").read_text().splitlines()[1:]
  return sorted(json.dumps(json.loads(line)["record"]) for line in lines)


def test_two_processes_learn_the_bits_of_one_and_the_first_alone_writes(tmp_path, tell_events):
  events = collections.Counter()
  expected = slice_jobs.trained(tmp_path / "one", data_parallel_size=1)
  for status, found, text in slice_jobs.run("trained", str(tmp_path / "two")):
    assert status == 0, text
    assert found == {"digest": expected}, text
    events["processes"] += 1
  names = lambda run: sorted(path.name for path in run.iterdir())
  assert names(tmp_path / "two") == names(tmp_path / "one")
  # The rollouts themselves, written once each.
  assert records_of(tmp_path / "two") == records_of(tmp_path / "one")
  events["records"] += len(records_of(tmp_path / "two"))
  tell_events("run", events, ("processes", "records"))


def test_verdicts_are_the_first_processs_and_twin_each_ones_own_end_both(tmp_path):
  expected = slice_jobs.trained(tmp_path / "one", data_parallel_size=1)
  for status, found, text in slice_jobs.run("judged", str(tmp_path)):
    assert status == 0 and found["digest"] == expected, text
    message = r"micro-batches of a gradient: got \[0\].advantages that differs"
    assert re.match(message, found["differs"])
