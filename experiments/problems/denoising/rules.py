"""Splits molecules into three parts, and judges denoised counts against one part."""

from __future__ import annotations

import numpy as np

# Shares of the molecules; the rest is held out.
TRAIN_SHARE, VALIDATION_SHARE = 0.6, 0.2
# Molecules per cell after normalisation; offset that keeps a logarithm finite.
TARGET_SUM = 1e4
POISSON_EPSILON = 1e-6


def split(counts: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Splits molecules into (train, validation, heldout), f64[c, g] each, which sum to `counts`."""
  rng = np.random.default_rng([seed, 0x5EED])
  whole = counts.astype(np.int64)
  train = rng.binomial(whole, TRAIN_SHARE)
  validation = rng.binomial(whole - train, VALIDATION_SHARE / (1 - TRAIN_SHARE))
  parts = (train, validation, whole - train - validation)
  return tuple(part.astype(np.float64) for part in parts)  # pyright: ignore[reportReturnType]


def mse(denoised: np.ndarray, observed: np.ndarray) -> float:
  """Returns the mean square distance after normalisation to `TARGET_SUM` and log(1 + x)."""
  return float(np.mean((log_normalised(denoised) - log_normalised(observed)) ** 2))


def poisson(denoised: np.ndarray, observed: np.ndarray, train_total: float) -> float:
  """Returns the mean negative log-likelihood (nats, up to log y!) of observed molecules.

  Args:
    denoised: f64[c, g], on the scale of train.
    observed: f64[c, g].
    train_total: total molecules of train.
  """
  expected = denoised * (observed.sum() / train_total)
  return float(np.mean(expected - observed * np.log(expected + POISSON_EPSILON)))


def log_normalised(counts: np.ndarray) -> np.ndarray:
  sums = counts.sum(axis=1, keepdims=True)
  return np.log1p(counts * np.divide(TARGET_SUM, sums, out=np.zeros_like(sums), where=sums > 0))
