"""The fit recovers unknown parameters."""

from __future__ import annotations

import dataclasses

import pytest

from seerjax.simulate import calibration, workloads

# An eightieth of Moonlight: seconds become milliseconds of computing.
SMALL = dataclasses.replace(
  workloads.MOONLIGHT, data_parallel_size=2, num_groups=24, mean_tokens=2000, max_tokens=8000
)


@pytest.mark.thorough
def test_the_fit_finds_the_parameters_that_made_the_columns():
  truth = dataclasses.replace(
    SMALL, fitted=dataclasses.replace(SMALL.fitted, fixed_seconds=0.02, sigma=0.7)
  )
  made = calibration.baseline_columns(truth, range(2))
  published = dataclasses.replace(
    SMALL.published,
    baseline_seconds=made["seconds"],
    baseline_tail_seconds=made["seconds"] * made["tail_share"],
  )
  start = dataclasses.replace(
    SMALL,
    free=("fixed_seconds", "sigma"),
    published=published,
    fitted=dataclasses.replace(SMALL.fitted, fixed_seconds=0.015, sigma=0.8),
  )
  seen = []
  found = calibration.fit(
    start, range(2), num_steps=4, on_step=lambda now, columns: seen.append(columns)
  )
  assert len(seen) == 4
  columns = calibration.baseline_columns(found, range(2))
  assert columns["seconds"] == pytest.approx(made["seconds"], rel=0.03)
  assert columns["tail_share"] == pytest.approx(made["tail_share"], rel=0.05)


def test_as_many_parameters_as_columns():
  with pytest.raises(ValueError, match=r"got the free parameters \('sigma',\) .* expected 2, one"):
    calibration.fit(dataclasses.replace(SMALL, free=("sigma",)), [0])
