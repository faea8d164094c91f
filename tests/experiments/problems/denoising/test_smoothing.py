"""Low-rank approximation and diffusion by hand, and their invariants."""

from __future__ import annotations

import math

import numpy as np
from pipeline_cases import ENVIRONMENT
import pytest

from experiments.problems.denoising import pipeline, smoothing


def test_alra_restores_zeros_and_keeps_what_was_seen():
  denoised = pipeline.run([{"op": "alra", "rank": 8, "quantile": 0.0}], ENVIRONMENT.train)
  low = pipeline.run([{"op": "svd", "rank": 8}], ENVIRONMENT.train)
  seen = ENVIRONMENT.train > 0
  assert (denoised[seen] > 0).all()
  assert (denoised[~seen] == 0).mean() > (low[~seen] == 0).mean()


def test_full_rank_svd_and_long_nmf_give_back_the_counts():
  counts = np.random.default_rng(0).poisson(5.0, (12, 6)).astype(float)
  np.testing.assert_allclose(pipeline.run([{"op": "svd", "rank": 8}], counts), counts, atol=1e-9)
  wide = counts.T.copy()
  np.testing.assert_allclose(pipeline.run([{"op": "svd", "rank": 8}], wide), wide, atol=1e-9)
  product = np.outer([1.0, 2.0, 3.0, 4.0], [5.0, 1.0, 2.0, 2.0])
  nmf = [{"op": "nmf", "rank": 1, "iterations": 30}]
  np.testing.assert_allclose(pipeline.run(nmf, product), product, rtol=1e-9)


@pytest.mark.parametrize("shape", [(40, 10), (10, 40)])
def test_diffusion_averages_and_keeps_what_is_constant(shape: tuple[int, int]):
  x = np.random.default_rng(1).normal(size=shape)
  smooth = smoothing.diffuse(x, 4, 3, 2.0)
  assert smooth.var(axis=0).sum() < x.var(axis=0).sum()
  assert (smooth.max(axis=0) <= x.max(axis=0) + 1e-12).all()
  constant = np.full(shape, 3.0)
  np.testing.assert_allclose(smoothing.diffuse(constant, 4, 3, 2.0), constant)


def test_diffusion_by_hand():
  # Two pairs far apart: with one neighbour and a hard kernel, partners are averaged only.
  x = np.array([[0.0, 0.0], [0.0, 1.0], [100.0, 0.0], [100.0, 1.0]])
  smooth = smoothing.diffuse(x, 1, 1, 16.0)
  share = math.exp(-1) / (1 + math.exp(-1))
  np.testing.assert_allclose(smooth[:, 1], [share, 1 - share, share, 1 - share], atol=1e-9)
  np.testing.assert_allclose(smooth[:, 0], x[:, 0], atol=1e-9)
