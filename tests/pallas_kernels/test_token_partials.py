"""Parts of a vocabulary are merged by rounded products, in the interpreter and in PTX."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from kernel_arrays import needs_interpreter
import numpy as np

from pallas_kernels import gpu, token_partials


def merged_by_numpy(partials: np.ndarray, *, rounded: bool = True) -> np.ndarray:
  """Merges f32[tiles, 8, n] from left to right, each product rounded, or fused into its sum."""
  wide = lambda x: x if rounded else x.astype(np.float64)
  single = lambda x: np.asarray(x, np.float32)
  exp = lambda x: np.asarray(jnp.exp(x))
  total = token_partials.Partial(*partials[0])
  for part in partials[1:]:
    b = token_partials.Partial(*part)
    raw_maximum = np.maximum(total.raw_maximum, b.raw_maximum)
    maximum = np.maximum(total.maximum, b.maximum)
    raw, sums, weighted = [], [], []
    for x in (total, b):
      below, raw_factor = x.maximum - maximum, exp(x.raw_maximum - raw_maximum)
      factor = exp(below)
      raw.append(wide(raw_factor) * x.raw_total)
      sums.append(wide(factor) * x.total)
      weighted.append(wide(factor) * single(x.weighted + wide(below) * x.total))
    is_higher = b.score > total.score
    best = [np.where(is_higher, new, old) for old, new in zip(total[5:], b[5:])]
    sums = [single(x[0] + x[1]) for x in (raw, sums, weighted)]
    total = token_partials.Partial(raw_maximum, sums[0], maximum, *sums[1:], *best)
  return np.stack(total)


@needs_interpreter
def test_parts_of_a_vocabulary_are_merged_by_rounded_products(seed):
  rng = np.random.default_rng(seed)
  partials = rng.standard_normal((11, 8, token_partials.MERGED_ROWS)).astype(np.float32)
  partials[:, [1, 3]] = np.exp(partials[:, [1, 3]])
  fold = jax.jit(functools.partial(token_partials.fold_tiles, slabs=1, interpret=True))
  (found,) = np.asarray(fold(jnp.asarray(partials)))
  np.testing.assert_array_equal(found, merged_by_numpy(partials))
  # The twin: products that are fused into their sums give other bits.
  assert (found != merged_by_numpy(partials, rounded=False)).any()


def test_ptx_rounds_the_products_of_every_sum():
  partials = jax.ShapeDtypeStruct((16, 8, 128), jnp.float32)
  inverse = jax.ShapeDtypeStruct((128,), jnp.float32)
  for module in (
    gpu.lower_for_cuda(lambda x: token_partials.fold_tiles(x, 1, False), partials),
    gpu.lower_for_cuda(lambda x, y: token_partials.merge_slabs(x, y, False), partials, inverse),
  ):
    assert "mul.rn.f32" in module
