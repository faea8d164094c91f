"""The command `compare`: one table and one page of several runs."""

from __future__ import annotations

import pathlib
import re

import numpy as np
import pytest

from seerjax import metrics
from seerjax.commands import compare
from seerjax.reports import comparison, run_directory


def write_run(directory: pathlib.Path, *, after: float, seed: int) -> pathlib.Path:
  """Writes a run of three steps, with two evaluations."""
  directory.mkdir(parents=True)
  with metrics.Writer(directory, console="off", tensorboard=False) as writer:
    for step in range(4):
      row = {"rollout/reward_mean": 0.1 * step + after, "rollout_train/kl": 0.0, "train/loss": 0.5}
      if step in (0, 3):
        row |= {"heldout/accuracy": 0.25 if step == 0 else after, "heldout/standard_error": 0.01}
      writer.write(step, row)
  metrics.write_summary(
    directory / "summary.json",
    dict(
      accuracy_before=0.25, accuracy_after=after, gain=after - 0.25,
      gain_interval_95=[after - 0.25 - 0.02, after - 0.25 + 0.02],
      reward_before=0.3, reward_after=0.4, reward_gain=0.1, reward_gain_interval_95=[0.08, 0.12],
      kl_max=0.0, max_abs_logprob_gap=0.0, seconds=61.0, length_mean=120.0, length_p99=200.0,
    ),
  )  # fmt: skip
  metrics.write_summary(
    directory / "config.json", dict(seed=seed, model="nano", loss=dict(clip_low=0.2))
  )
  return directory


@pytest.fixture
def runs(tmp_path: pathlib.Path) -> list[pathlib.Path]:
  return [
    write_run(tmp_path / "sweep" / "seed_0", after=0.375, seed=0),
    write_run(tmp_path / "sweep" / "seed_1", after=0.5, seed=1),
  ]


def test_a_column_per_run_with_before_after_and_intervals(runs, tmp_path):
  table = compare.compare(runs, tmp_path / "out" / "page.html").splitlines()
  cells = [re.split(r"  +", line.strip()) for line in table]
  assert cells[0] == ["seed_0", "seed_1"]
  found = {row[0]: row[1:] for row in cells[1:]}
  assert found["held-out accuracy before"] == ["25.0 %", "25.0 %"]
  assert found["held-out accuracy after"] == ["37.5 %", "50.0 %"]
  assert found["gain, points [95 %]"] == ["+12.5 [+10.5, +14.5]", "+25.0 [+23.0, +27.0]"]
  assert found["gain of reward [95 %]"] == ["+0.1 [+0.08, +0.12]"] * 2
  assert found["largest KL, nats"] == found["largest gap, nats"] == ["0.0", "0.0"]
  assert found["seconds"] == ["61", "61"] and found["mean length, tokens"] == ["120", "120"]
  assert found["steps"] == ["4", "4"]


def test_the_page_overlays_the_curves_and_says_which_settings_differ(runs, tmp_path):
  compare.compare(runs, tmp_path / "page.html")
  page = (tmp_path / "page.html").read_text()
  assert "<script" not in page and "http" not in page.replace("http-equiv", "")
  assert page.count("<figure>") == 3  # Accuracy, reward, KL: the metrics that a run has.
  assert "Held-out accuracy" in page and "± 2 %" in page
  # An interval for each run, in the chart that has standard errors.
  assert page.count("opacity: 0.15") == 2
  assert "Settings that differ" in page and "<td>seed</td><td>0</td><td>1</td>" in page
  assert "loss.clip_low" not in page


def test_a_run_without_a_summary_has_dashes(runs, tmp_path):
  (runs[1] / "summary.json").unlink()
  rows = comparison.rows([run_directory.load(run) for run in runs])
  assert rows["held-out accuracy after"] == ["37.5 %", "-"]
  (runs[0] / "summary.json").unlink()
  assert list(comparison.rows([run_directory.load(run) for run in runs])) == ["steps"]


def test_colours_begin_again_with_dashes(runs):
  many = [run_directory.load(runs[0])] * 8
  chart = comparison.overlay(comparison.OVERLAYS[2], [str(i) for i in range(8)], many)
  assert chart.count("stroke-dasharray: none") == 6 and chart.count("stroke-dasharray: 6 3") == 2
  assert comparison.overlay(comparison.OVERLAYS[5], ["0"], many[:1]) == ""


def test_values_that_are_not_finite_are_not_drawn(tmp_path):
  with metrics.Writer(tmp_path, console="off", tensorboard=False) as writer:
    for step, value in enumerate((1.0, np.nan, 2.0)):
      writer.write(step, {"train/entropy": float(value)})
  run = run_directory.load(tmp_path)
  chart = comparison.overlay(comparison.OVERLAYS[5], ["a"], [run])
  assert chart.count("<title>") == 2 and "nan" not in chart.lower()


@pytest.mark.parametrize("names", [[], ["a"], ["a", "a"], ["a", "./a"]])
def test_two_different_runs_are_needed(tmp_path, names):
  with pytest.raises(ValueError, match="seerjax compare: got .*, expected two or more different"):
    compare.compare([tmp_path / name for name in names], tmp_path / "page.html")


def test_what_is_no_run_is_refused(runs, tmp_path):
  (tmp_path / "empty").mkdir()
  with pytest.raises(ValueError, match="report: got .*empty, which has none of"):
    compare.compare([*runs, tmp_path / "empty"], tmp_path / "page.html")
  assert not (tmp_path / "page.html").exists()
