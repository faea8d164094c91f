"""Sampling costs are counted where they occur."""

from __future__ import annotations

import pathlib
import shutil

import pytest
from small_run import rows_of, train

pytestmark = pytest.mark.usefixtures("programs_on_disk")


@pytest.mark.thorough
def test_steps_read_from_the_journal_do_not_slow_the_run(whole, tmp_path):
  copy = pathlib.Path(shutil.copytree(whole[0], tmp_path / "run"))
  for step in (2, 4):
    shutil.rmtree(copy / "checkpoints" / f"step_{step:08d}")
  summary = train(copy, resume=True, num_steps=5).summary
  rows = [row for row in rows_of(copy, without=()) if "rollout_train/kl" in row]
  rates = [row["rollout/tokens_per_second"] for row in rows]
  assert rates[:4] == [0.0] * 4
  seconds = [row["rollout/seconds"] for row in rows]
  assert summary["tokens_per_second"] == pytest.approx(rates[4] * seconds[4] / sum(seconds))
