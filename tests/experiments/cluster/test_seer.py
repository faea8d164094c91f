"""The rollout experiment under memory pressure: a small one, whole."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from experiments.cluster import seer as seer_rollout

ROOT = pathlib.Path(__file__).parents[3]


def command(*arguments: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, "-m", "experiments.cluster.seer", *arguments],
    capture_output=True,
    text=True,
    cwd=ROOT,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
    check=False,
  )


def test_lengths_are_alike_within_a_group():
  one = seer_rollout.Workload(num_groups=400, correlation=0.9, max_tokens=10**6)
  logs = np.log(seer_rollout.lengths(one))
  between = logs.mean(axis=1).var()
  assert between > 4 * logs.var(axis=1).mean()
  assert seer_rollout.lengths(one).mean() == pytest.approx(120, rel=0.25)
  assert seer_rollout.lengths(seer_rollout.Workload()).max() <= 480


@pytest.mark.long
def test_a_small_rollout_says_the_same_in_every_system(tmp_path):
  done = command(
    f"--workdir={tmp_path}",
    "--config.num_groups=4",
    "--config.group_size=4",
    "--config.mean_tokens=24.0",
    "--config.max_tokens=48",
    "--config.data_parallel_size=2",
    "--config.num_pages=17",
    "--config.max_num_seqs=6",
    "--config.rows=32",
    "--config.chunk_tokens=16",
  )
  assert done.returncode == 0, done.stderr
  assert "equal bits: every system sampled the same tokens" in done.stdout
  results = json.loads((tmp_path / "results.json").read_text())["results"]
  assert results["groups, preempting"]["preemptions_a_request"] > 0
  for name, row in results.items():
    assert row["steps"] > 0 and (name == "groups, preempting" or not row["preemptions_a_request"])
  assert results["ours + drafts"]["steps"] < results["ours"]["steps"]
  assert (tmp_path / "rollouts.html").read_text().count("<svg") == 2 * len(results)
  assert (tmp_path / "table.md").read_text().count("\n") == len(results) + 2


def test_a_workload_that_cannot_be_is_refused():
  with pytest.raises(ValueError, match=r"Workload: got correlation=2.0, .* expected 0 to 1"):
    seer_rollout.Workload(correlation=2.0)
  with pytest.raises(
    ValueError, match=r"Workload: got data_parallel_size=100000, .* expected 1 to"
  ):
    seer_rollout.Workload(data_parallel_size=100000)
