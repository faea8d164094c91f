"""Every step preserves the cells' sums, and matches a computation by hand."""

from __future__ import annotations

import numpy as np
from pipeline_cases import ENVIRONMENT, EVERY_STEP
import pytest

from experiments.problems import denoising
from experiments.problems.denoising import pipeline


@pytest.mark.parametrize("name", list(EVERY_STEP))
def test_every_step_keeps_cells_sums_and_finite_counts(name: str):
  artefact = {"steps": EVERY_STEP[name]}
  denoised = ENVIRONMENT.denoise(artefact)
  assert np.isfinite(denoised).all() and denoised.min() >= 0
  np.testing.assert_allclose(denoised.sum(axis=1), ENVIRONMENT.train.sum(axis=1), rtol=1e-9)
  assert (ENVIRONMENT.denoise(artefact) == denoised).all()


@pytest.mark.parametrize("name", ["normalise", "sqrt", "log", "invert"])
def test_scale_and_undone_transforms_change_nothing(name: str):
  denoised = ENVIRONMENT.denoise({"steps": EVERY_STEP[name]})
  np.testing.assert_allclose(denoised, ENVIRONMENT.train, rtol=1e-9, atol=1e-9)


def test_shrink_by_hand():
  # Cells of 4 and 2 molecules (median 3), genes' shares 1/2 each.
  train = np.array([[3.0, 1.0], [0.0, 2.0]])
  denoised = pipeline.run([{"op": "shrink", "strength": 1.0}], train)
  sizes = np.array([[4 / 3], [2 / 3]])
  np.testing.assert_allclose(
    denoised, (sizes * train + np.array([[2.0, 2.0], [1.0, 1.0]])) / (sizes + 1)
  )


def test_blend_by_hand():
  train = np.array([[3.0, 1.0], [0.0, 2.0]])
  denoised = pipeline.run([{"op": "blend", "source": "mean", "weight": 0.5}], train)
  np.testing.assert_allclose(denoised, [[2.5, 1.5], [0.5, 1.5]])


def test_a_pipeline_that_overflows_is_refused(tmp_path):
  counts = (np.random.default_rng(0).random((20, 15)) * 2**31).astype(np.int64)
  np.savez(tmp_path / "large.npz", counts=counts)
  environment = denoising.Denoising(tmp_path / "large.npz")
  steps = [{"op": "power", "exponent": 1.5}] * 7 + [{"op": "svd", "rank": 3}]
  assert "far from overflow" in environment.verify({"steps": steps}).reason
