"""Molecules are split binomially, and both metrics match values by hand."""

from __future__ import annotations

import math
import pickle

import numpy as np
from pipeline_cases import ENVIRONMENT, MAGIC
import pytest

from experiments.problems import denoising
from experiments.problems.denoising import rules


def test_mse_by_hand():
  # Cells of one molecule a gene and of two: both normalise to 5000 a gene.
  same = rules.mse(np.array([[1.0, 1.0]]), np.array([[2.0, 2.0]]))
  assert same == 0
  got = rules.mse(np.array([[1.0, 1.0], [1.0, 0.0]]), np.array([[1.0, 3.0], [5.0, 0.0]]))
  log = math.log1p
  expected = ((log(5000) - log(2500)) ** 2 + (log(5000) - log(7500)) ** 2) / 4
  assert got == pytest.approx(expected, rel=1e-12)


def test_poisson_by_hand():
  # Train had 8 molecules, these are 4: expectations are halved.
  got = rules.poisson(np.array([[2.0, 6.0]]), np.array([[1.0, 3.0]]), 8.0)
  assert got == pytest.approx(((1 - math.log(1)) + (3 - 3 * math.log(3))) / 2, abs=1e-6)
  unseen = rules.poisson(np.array([[8.0, 0.0]]), np.array([[3.0, 1.0]]), 8.0)
  assert unseen == pytest.approx((4 - 3 * math.log(4) - math.log(1e-6)) / 2, abs=1e-5)


def test_parts_add_up_and_are_binomial():
  counts = np.full((200, 100), 40.0)
  train, validation, heldout = rules.split(counts, 3)
  assert (train + validation + heldout == counts).all()
  for part, share in ((train, 0.6), (validation, 0.2), (heldout, 0.2)):
    # 20,000 draws: five standard errors of a mean and of a variance.
    variance = 40 * share * (1 - share)
    assert part.mean() == pytest.approx(40 * share, abs=5 * math.sqrt(variance / 20_000))
    assert part.var() == pytest.approx(variance, rel=5 * math.sqrt(2 / 20_000))
    assert (part == np.floor(part)).all() and part.min() >= 0
  assert np.corrcoef(train.ravel(), validation.ravel())[0, 1] == pytest.approx(
    -math.sqrt(0.6 * 0.2 / (0.4 * 0.8)), abs=0.03
  )


def test_the_split_and_the_simulated_set_follow_the_seed_alone():
  again, other = denoising.Denoising(), denoising.Denoising(seed=1)
  assert (again.train == ENVIRONMENT.train).all()
  assert (again.validation == ENVIRONMENT.validation).all()
  assert (other.train != ENVIRONMENT.train).any()
  assert again.verify(MAGIC) == ENVIRONMENT.verify(MAGIC)
  assert pickle.loads(pickle.dumps(again)).verify(MAGIC) == ENVIRONMENT.verify(MAGIC)
