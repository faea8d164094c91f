"""Learning on real weights: intervals and table by hand, and a measured run."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

import pytest

from experiments import cells as cells_lib
from experiments.learning import real as real_learning
from experiments.learning.real import Cell, Settings


def test_arms_differ_in_what_learns():
  settings = Settings(model="nano")
  full, lora = (
    real_learning.config_of(settings, Cell("products", arm, 3)) for arm in real_learning.ARMS
  )
  assert (full.lora_rank, lora.lora_rank, lora.seed) == (0, 8, 3)
  assert lora.optimizer.learning_rate > full.optimizer.learning_rate


def test_the_table_has_runs_that_have_not_ended():
  record = dict(
    generator="products", arm="full", seed=1,
    settings=dataclasses.asdict(Settings(model="nano", heldout=100)),
    steps=[1, 2], rewards=[0.25, 0.75], kl=[0.0, 0.0], gap=[0.0, 0.0],
    heldout=[(0, 0.2), (2, 0.5)],
  )  # fmt: skip
  text = real_learning.table([record])
  assert "| products | full | 1 | 2 | 20.0% (13.3% to 28.9%), step 0 |" in text
  assert "| 50.0% (40.4% to 59.6%), step 2 |" in text
  assert "| 0.50, 0.50 | 0.0 | 0.0 |" in text


@pytest.mark.long
def test_a_cell_leaves_its_rewards_and_a_picture(tiny: str, tmp_path: pathlib.Path):
  settings = Settings(
    model=tiny, num_steps=2, prompts_per_step=2, group_size=2, max_tokens=4, heldout=4, every=1
  )
  (record,) = cells_lib.completed(
    [Cell("products", "lora", 0)], tmp_path, dataclasses.asdict(settings),
    functools.partial(real_learning.measure, settings, tmp_path),
  )  # fmt: skip
  assert record["kl"] == record["gap"] == [0.0, 0.0] and len(record["rewards"]) == 2
  assert [step for step, _ in record["heldout"]] == [0, 1, 2]
  assert "| products | lora | 0 | 2 |" in real_learning.write(settings, tmp_path)
  assert (tmp_path / "learning.png").stat().st_size > 1000
