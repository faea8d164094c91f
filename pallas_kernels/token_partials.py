"""Partial softmax and argmax results of rows over some ids, and the kernels that merge them.

Used by `token_logprobs`, which has the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import gpu, rounding

# Rows merged by one block of the two kernels, one per thread.
MERGED_ROWS = 128
# Register layout of one statistic of these rows.
STATISTIC = plgpu.Layout.WG_STRIDED((MERGED_ROWS,), vec_size=1)
UNROLL = 8


class Partial(NamedTuple):
  """Partial softmax and argmax of a row over some ids; f32 each.

  Attributes:
    raw_maximum: m of z.
    raw_total: l of z.
    maximum: m of t.
    total: l of t.
    weighted: s of t.
    score: the highest t + gumbel; 1e30 if the target is here, -1e30 if it is elsewhere.
    token: id with this score.
    logit: z of this id.
  """

  raw_maximum: Any
  raw_total: Any
  maximum: Any
  total: Any
  weighted: Any
  score: Any
  token: Any
  logit: Any


NUM_STATISTICS = len(Partial._fields)


def merge(a: Partial, b: Partial, interpret: bool) -> Partial:
  """Merges the partials of two ranges of ids, f32[128] each; a has the lower ids."""
  product = functools.partial(rounding.product, layout=STATISTIC, interpret=interpret)
  raw_maximum = jnp.maximum(a.raw_maximum, b.raw_maximum)
  maximum = jnp.maximum(a.maximum, b.maximum)

  def scaled(part: Partial) -> tuple[Any, Any, Any]:
    below = part.maximum - maximum
    factor = jnp.exp(below)
    weighted = part.weighted + product(below, part.total)
    return (
      product(jnp.exp(part.raw_maximum - raw_maximum), part.raw_total),
      product(factor, part.total),
      product(factor, weighted),
    )

  raw_total, total, weighted = (x + y for x, y in zip(scaled(a), scaled(b)))
  return Partial(raw_maximum, raw_total, maximum, total, weighted, *higher(a[5:], b[5:]))


def higher(a: Sequence[Any], b: Sequence[Any]) -> Sequence[Any]:
  """Returns (score, token, logit) with the higher score; on a tie a's, which has lower ids."""
  is_higher = b[0] > a[0]
  return tuple(jnp.where(is_higher, new, old) for old, new in zip(a, b))


def fold_tiles(partials: jax.Array, slabs: int, interpret: bool) -> jax.Array:
  """Merges each slab's tiles from left to right: f32[tiles, 8, n] to f32[slabs, 8, n]."""
  num_tiles, (_, statistics, padded) = partials.shape[0] // slabs, partials.shape

  def body(partials_ref, slabs_ref):
    block = lax.axis_index("block")
    slab, rows = lax.rem(block, slabs), pl.ds(lax.div(block, slabs) * MERGED_ROWS, MERGED_ROWS)
    tile = lambda i: _read(partials_ref, slab * num_tiles + i, rows)

    def fold(first, count, total):
      # Reads all of them before merging the first, so that latencies overlap.
      for part in [tile(first + i) for i in range(count)]:
        total = merge(total, part, interpret)
      return total

    total = tile(0)
    steps, rest = divmod(num_tiles - 1, UNROLL)
    total = lax.fori_loop(0, steps, lambda i, total: fold(1 + i * UNROLL, UNROLL, total), total)
    total = fold(1 + steps * UNROLL, rest, total)
    for i, value in enumerate(total):
      slabs_ref[slab, i, rows] = value

  return gpu.kernel(
    body,
    name="token_logprobs_fold",
    out_type=jax.ShapeDtypeStruct((slabs, statistics, padded), jnp.float32),
    scratch={},
    num_blocks=slabs * padded // MERGED_ROWS,
    interpret=interpret,
  )(partials)


def merge_slabs(partials: jax.Array, inverse: jax.Array, interpret: bool) -> jax.Array:
  """Merges slabs as a tree: token, logprob, raw_logprob, entropy, logsumexp of t and of z."""
  slabs, _, padded = partials.shape

  def body(partials_ref, inverse_ref, out_ref):
    rows = pl.ds(lax.axis_index("block") * MERGED_ROWS, MERGED_ROWS)
    parts = [_read(partials_ref, slab, rows) for slab in range(slabs)]
    while len(parts) > 1:
      parts = [merge(a, b, interpret) for a, b in zip(parts[::2], parts[1::2])]
    (whole,) = parts
    normaliser = whole.maximum + jnp.log(whole.total)
    raw_normaliser = whole.raw_maximum + jnp.log(whole.raw_total)
    product = functools.partial(rounding.product, layout=STATISTIC, interpret=interpret)
    logprob = product(whole.logit, inverse_ref[rows]) - normaliser
    # Not a quotient, which would be computed with a product that ptxas may fuse.
    entropy = jnp.log(whole.total) - product(whole.weighted, 1 / whole.total)
    results = (
      whole.token, logprob, whole.logit - raw_normaliser, entropy, normaliser, raw_normaliser
    )  # fmt: skip
    for i, value in enumerate(results):
      out_ref[i, rows] = value

  return gpu.kernel(
    body,
    name="token_logprobs_merge",
    out_type=jax.ShapeDtypeStruct((6, padded), jnp.float32),
    scratch={},
    num_blocks=padded // MERGED_ROWS,
    interpret=interpret,
  )(partials, inverse)


def _read(partials_ref: Any, index: Any, rows: Any) -> Partial:
  return Partial(*(partials_ref[index, i, rows] for i in range(NUM_STATISTICS)))
