"""Numbers to check kernels with, and comparisons of values and bits."""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses
import math
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

# Maximum multiplications of f64 on the host; beyond, the f32 definition on the device is used.
HOST_PRODUCTS = 1 << 34
# Up to this many random numbers are drawn on the host, without compilation.
HOST_NUMBERS = 1 << 24
# Limits of (total relative error, worst element relative to its size and the mean size).
# bfloat16 rounds by up to 2^-9; attention rounds p as well.
BFLOAT16 = (2**-8, 2**-7)
FLOAT32 = (2**-13, 2**-10)
ATTENTION = (2**-7, 2**-5)
GRADIENT = (2**-6, 2**-4)


Kind: TypeAlias = Literal["agreement", "invariance", "claim", "question"]


@dataclasses.dataclass(frozen=True)
class Check:
  """The result of one check, with what was observed."""

  kernel: str
  kind: Kind
  what: str
  passed: bool
  seen: str


def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
  if math.prod(shape) > HOST_NUMBERS:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)


def uneven(seed: int, *shape: int) -> jax.Array:
  """Returns normal numbers times powers of two from 2^-8 to 2^8: sums depend on the order."""
  rng = np.random.default_rng(seed)
  powers = np.exp2(rng.integers(-8, 9, shape)).astype(np.float32)
  return jnp.asarray(rng.standard_normal(shape, np.float32) * powers, jnp.bfloat16)


def as_float64(x: Any) -> np.ndarray:
  return np.asarray(x).astype(np.float64)


def num_differing(found: Any, expected: Any) -> int:
  """Returns the number of entries that differ in any bit; for trees, over all leaves."""
  count = 0
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    a, b = (np.ascontiguousarray(x) for x in (a, b))
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    count += int((a.view(unsigned) != b.view(unsigned)).sum())
  return count


def agreement(
  kernel: str, what: str, found: Any, expected: Any, limits: tuple[float, float]
) -> Check:
  """Compares values; NaN fails."""
  found, expected = as_float64(found), as_float64(expected)
  mean = np.sqrt(np.mean(expected**2)) or 1.0
  error = np.abs(found - expected)
  relative = float(np.sqrt(np.mean(error**2)) / mean)
  worst = float(np.max(error / (np.abs(expected) + mean)))
  seen = f"error {relative:.1e} (at most {limits[0]:.1e}), worst {worst:.1e} ({limits[1]:.1e})"
  return Check(kernel, "agreement", what, relative <= limits[0] and worst <= limits[1], seen)


def same_bits(kernel: str, kind: Kind, what: str, pairs: Iterable[tuple[Any, Any]]) -> Check:
  """Compares bits of (found, expected) pairs."""
  count = total = 0
  for found, expected in pairs:
    count += num_differing(found, expected)
    total += sum(x.size for x in jax.tree.leaves(expected))
  seen = "equal" if count == 0 else "differ"
  return Check(kernel, kind, what, count == 0, f"{seen}: {count:,} of {total:,} entries")
