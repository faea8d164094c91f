"""Arrays and marks that the tests of GPU kernels share."""

from __future__ import annotations

import functools

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

needs_interpreter = pytest.mark.skipif(
  not hasattr(plgpu, "InterpretGPUParams"),
  reason="the GPU interpreter is public from JAX 0.11.1 on",
)
long = functools.partial(pytest.param, marks=pytest.mark.long)


def array(*shape: int, seed: int = 0, dtype=jnp.bfloat16) -> jax.Array:
  """Standard normal numbers."""
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def as_float64(x) -> np.ndarray:
  return np.asarray(x, np.float64)
