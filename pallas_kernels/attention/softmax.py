"""Sums of a softmax over some keys, how two are merged, and the products of one tile."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.attention.config import ROWS

# A masked score, and the maximum of a split without a visible key: exp2 of their difference is 0,
# so that what is masked adds exactly nothing. Scores lie far above both.
MASKED = -1e30
FLOOR = -1e29


class Partial(NamedTuple):
  """A softmax sum over some keys: f32[r] maximum and total, f32[r, c] weighted values."""

  maximum: jax.Array
  total: jax.Array
  weighted: jax.Array


def scale_of(head_dim: int) -> float:
  """Returns log2(e) / sqrt(c): exp(x / sqrt(c)) = exp2(x * scale)."""
  return math.log2(math.e) / math.sqrt(head_dim)


def rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """One value a row, for every column."""
  return lax.broadcast_in_dim(x, shape, (0,))


def sum_of(x: jax.Array, y: jax.Array) -> jax.Array:
  """Returns x + y for two products that are rounded first: a fused multiply-add would round once,
  and whether the compiler fuses depends on the program around."""
  x, y = lax.optimization_barrier((x, y))
  return x + y


def nothing(head_dim: int) -> Partial:
  return Partial(
    jnp.full((ROWS,), FLOOR, jnp.float32),
    jnp.zeros((ROWS,), jnp.float32),
    jnp.zeros((ROWS, head_dim), jnp.float32),
  )


def merge(left: Partial, right: Partial) -> Partial:
  """Returns the sum over both key sets; one without a visible key leaves the other's bits."""
  shape = left.weighted.shape
  scale = scale_of(shape[1])
  maximum = jnp.maximum(left.maximum, right.maximum)
  left_scale = jnp.exp2((left.maximum - maximum) * scale)
  right_scale = jnp.exp2((right.maximum - maximum) * scale)
  return Partial(
    maximum,
    sum_of(left.total * left_scale, right.total * right_scale),
    sum_of(left.weighted * rows(left_scale, shape), right.weighted * rows(right_scale, shape)),
  )


def finish(total: Partial, sinks: jax.Array | None) -> tuple[Partial, jax.Array]:
  """Returns the sum with the sinks, and its mean f32[r, c]."""
  if sinks is not None:
    one, zero = jnp.full((ROWS,), 1, jnp.float32), jnp.zeros(total.weighted.shape, jnp.float32)
    total = merge(total, Partial(sinks, one, zero))
  inverse = 1 / jnp.where(total.total > 0, total.total, jnp.float32(1))
  return total, total.weighted * rows(inverse, total.weighted.shape)


def visible(
  row: Any, key: Any, group: int, window: int | None, shape: tuple[int, ...], rows_axis: int = 0
) -> Any:
  """Returns bool[shape]: which keys the rows of a tile see.

  Args:
    row: i32[], the first row, counted from the tile's first position; `group` rows a position.
    key: i32[], the first key, counted from the tile's first position.
    group: query heads of a key/value head.
    window: a row sees its own position and window - 1 before it; None is all before it.
    shape: rows along `rows_axis`, keys along the other.
    rows_axis: 0 or 1.
  """
  # Key x is seen by row r if x <= r // group, that is x * group <= r.
  rows = lax.broadcasted_iota(jnp.int32, shape, rows_axis)
  keys = lax.broadcasted_iota(jnp.int32, shape, 1 - rows_axis)
  difference = rows - keys * group
  least = key * group - row
  visible = difference >= least
  if window is not None:
    visible = visible & (difference < least + window * group)
  return visible


def multiply(left: Any, right: Any, columns: int) -> jax.Array:
  """Returns f32[64, columns], left @ right of two references."""

  def body(accumulator):
    plgpu.wgmma(accumulator, left, right)
    return accumulator[...]

  return pl.run_scoped(body, plgpu.WGMMAAccumulatorRef((ROWS, columns), jnp.float32))
