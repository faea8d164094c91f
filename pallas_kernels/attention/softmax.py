"""Partial softmax sums, their merge, and the products of one tile."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import rounding
from pallas_kernels.attention.config import ROWS

# A masked score, and the maximum of a split without a visible key: exp2 of their difference is 0,
# so masked keys add exactly nothing. Real scores are far above both.
MASKED = -1e30
FLOOR = -1e29


class Partial(NamedTuple):
  """A softmax sum over some keys: maximum and total f32[r], weighted values f32[r, c]."""

  maximum: jax.Array
  total: jax.Array
  weighted: jax.Array


def scale_of(head_dim: int) -> float:
  """Returns scale = log2(e) / sqrt(c), with exp(x / sqrt(c)) = exp2(x * scale)."""
  return math.log2(math.e) / math.sqrt(head_dim)


def rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Broadcasts one value per row to all columns."""
  return lax.broadcast_in_dim(x, shape, (0,))


def nothing(head_dim: int) -> Partial:
  return Partial(
    jnp.full((ROWS,), FLOOR, jnp.float32),
    jnp.zeros((ROWS,), jnp.float32),
    jnp.zeros((ROWS, head_dim), jnp.float32),
  )


def power(x: jax.Array, interpret: bool) -> jax.Array:
  """Returns 2^x for x <= 0, and zero below 2^-126, like the GPU's exp2 without subnormals."""
  y = jnp.exp2(x)
  return jnp.where(x < -126, jnp.float32(0), y) if interpret else y


def merge(left: Partial, right: Partial, interpret: bool) -> Partial:
  """Returns the sum over both key sets; a set without visible keys does not change the other."""
  shape = left.weighted.shape
  scale = scale_of(shape[1])
  maximum = jnp.maximum(left.maximum, right.maximum)

  def scaled(part: Partial) -> tuple[jax.Array, jax.Array]:
    factor = power((part.maximum - maximum) * scale, interpret)
    total = rounding.product(part.total, factor, layout=rounding.ROWS, interpret=interpret)
    weighted = rounding.product(
      part.weighted, rows(factor, shape), layout=rounding.TILE, interpret=interpret
    )
    return total, weighted

  left_total, left_weighted = scaled(left)
  right_total, right_weighted = scaled(right)
  return Partial(maximum, left_total + right_total, left_weighted + right_weighted)


def park(weighted: jax.Array, place: Any) -> None:
  """Stores f32[64, c] in two blocks bf16[64, x] of shared memory, x >= c: high halves, then low."""
  bits = lax.bitcast_convert_type(weighted, jnp.uint32)
  for i, half in enumerate((bits >> 16, bits)):
    half = lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.bfloat16)
    place[i, :, pl.ds(0, weighted.shape[1])] = half


def unpark(place: Any, head_dim: int) -> jax.Array:
  """Returns the f32[64, c] stored by `park`."""
  halves = [place[i, :, pl.ds(0, head_dim)] for i in range(2)]
  high, low = (lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) for x in halves)
  return lax.bitcast_convert_type((high << 16) | low, jnp.float32)


def finish(total: Partial, sinks: jax.Array | None, interpret: bool) -> tuple[Partial, jax.Array]:
  """Returns the sum with the sinks, and the mean f32[r, c]."""
  shape = total.weighted.shape
  if sinks is not None:
    # Equals `merge` with a partial of total 1 and weighted values 0.
    maximum = jnp.maximum(total.maximum, sinks)
    factor, sink = (
      power((x - maximum) * scale_of(shape[1]), interpret) for x in (total.maximum, sinks)
    )
    total = Partial(
      maximum,
      rounding.product(total.total, factor, layout=rounding.ROWS, interpret=interpret) + sink,
      total.weighted * rows(factor, shape),
    )
  inverse = 1 / jnp.where(total.total > 0, total.total, jnp.float32(1))
  return total, total.weighted * rows(inverse, shape)


def visible(
  row: Any, key: Any, group: int, window: int | None, shape: tuple[int, ...], rows_axis: int = 0
) -> Any:
  """Returns which keys the rows of a tile see, bool[shape].

  One or two limits along the first axis are compared with a counter along the second. A thread's
  own part of the counter is subtracted from the limit, so that it keeps few limits and compares
  them with constants; otherwise the compiler would keep a counter per element in registers.

  Args:
    row: i32[], the first row, relative to the tile's first position; `group` rows per position.
    key: i32[], the first key, relative to the tile's first position.
    group: query heads per key/value head.
    window: a row sees its own position and window - 1 before it; None is all before it.
    shape: rows along `rows_axis`, keys along the other.
    rows_axis: 0 or 1.
  """
  first = lax.iota(jnp.int32, shape[0])
  counter = lax.broadcasted_iota(jnp.int32, shape, 1)
  # wgmma gives a thread the same positions in every eight columns.
  own, eights = counter & 7, counter & ~7
  # Key x is seen by row r if x <= r // group, that is x * group <= r.
  if rows_axis == 0:
    limit = rows(lax.div(first + row, jnp.int32(group)) - key, shape) - own
    seen = eights <= limit
    if window is not None:
      seen = seen & (eights > limit - window)
    return seen
  limit = rows((first + key) * group - row, shape) - own
  seen = eights >= limit
  if window is not None:
    seen = seen & (eights < limit + window * group)
  return seen


def multiply(left: Any, right: Any, columns: int) -> jax.Array:
  """Returns left @ right of two references, f32[64, columns]."""

  def body(accumulator):
    plgpu.wgmma(accumulator, left, right)
    return accumulator[...]

  return pl.run_scoped(body, plgpu.WGMMAAccumulatorRef((ROWS, columns), jnp.float32))
