"""The cluster simulation: a small cluster's row by hand, the table, and errors."""

from __future__ import annotations

import json

import numpy as np
import pytest

from experiments import cluster_simulation
from experiments.cluster_simulation import JournalCost
from seerjax.simulate import workloads


def test_a_journal_keeps_all_of_a_chunk(tmp_path):
  short, long = (
    cluster_simulation.journal_cost(tmp_path / name, tokens, num_records=3)
    for name, tokens in (("short", 16), ("long", 512))
  )
  # An id of up to six digits and two floats of four bytes, as text.
  assert 0 < short.num_bytes < long.num_bytes and short.seconds > 0
  assert 10 < (long.num_bytes - short.num_bytes) / (512 - 16) < 24


def test_shares_are_those_of_what_was_simulated():
  cost = JournalCost(seconds=0.001, wait_seconds=0.01, num_bytes=1000.0)
  row = cluster_simulation.measured(64, 2, cost, seed=0)
  assert (row["instances"], row["requests"]) == (2, 2 * 2 * workloads.KIMI_K2.group_size)
  assert row["chunks"] >= row["requests"]
  assert row["iteration_seconds"] > row["rollout_seconds"] > 0
  assert row["journal_share"] == pytest.approx(
    (row["chunks"] * 0.001 + row["journal_waits"] * 0.01) / row["iteration_seconds"]
  )
  assert row["scheduler_share"] == pytest.approx(
    row["chunks"] * row["decision_seconds"] / row["iteration_seconds"]
  )
  assert row["journal_gigabytes"] == pytest.approx(row["chunks"] * 1e-6)


def test_chunks_that_end_while_the_disk_is_waited_for_wait_for_it_together():
  cost = JournalCost(seconds=1.0, wait_seconds=2.0, num_bytes=0.0)
  # The second and third end while the first is written; the last one finds nothing to do.
  ends = np.asarray([0.0, 2.5, 1.0, 50.0])
  assert cluster_simulation.num_waits(ends, cost) == 3
  assert cluster_simulation.num_waits(np.zeros(5), cost) == 1
  assert cluster_simulation.num_waits(np.zeros(0), cost) == 0


def test_a_run_writes_its_table(tmp_path):
  rows = cluster_simulation.run((32,), 1, 0, tmp_path)
  assert json.loads((tmp_path / "results.json").read_text())["rows"] == rows
  assert (tmp_path / "table.md").read_text().splitlines()[2].startswith("| 32 | 1 | 8 |")


@pytest.mark.parametrize("devices", [8, 48])
def test_an_instance_must_go_into_the_devices(devices, tmp_path):
  with pytest.raises(ValueError, match=f"got {devices} devices, expected a multiple of 32"):
    cluster_simulation.run((32, devices), 1, 0, tmp_path)
  assert not [*tmp_path.iterdir()]
