"""Sums of a softmax over some keys, how two are merged, and the products of one tile."""

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


def nothing(head_dim: int) -> Partial:
  return Partial(
    jnp.full((ROWS,), FLOOR, jnp.float32),
    jnp.zeros((ROWS,), jnp.float32),
    jnp.zeros((ROWS, head_dim), jnp.float32),
  )


def merge(left: Partial, right: Partial, interpret: bool) -> Partial:
  """Returns the sum over both key sets; one without a visible key leaves the other's bits."""
  shape = left.weighted.shape
  scale = scale_of(shape[1])
  maximum = jnp.maximum(left.maximum, right.maximum)

  def scaled(part: Partial) -> tuple[jax.Array, jax.Array]:
    factor = jnp.exp2((part.maximum - maximum) * scale)
    total = rounding.product(part.total, factor, layout=rounding.ROWS, interpret=interpret)
    weighted = rounding.product(
      part.weighted, rows(factor, shape), layout=rounding.TILE, interpret=interpret
    )
    return total, weighted

  left_total, left_weighted = scaled(left)
  right_total, right_weighted = scaled(right)
  return Partial(maximum, left_total + right_total, left_weighted + right_weighted)


def finish(total: Partial, sinks: jax.Array | None, interpret: bool) -> tuple[Partial, jax.Array]:
  """Returns the sum with the sinks, and its mean f32[r, c]."""
  shape = total.weighted.shape
  if sinks is not None:
    # `merge` with a partial of total 1 and weighted values 0.
    maximum = jnp.maximum(total.maximum, sinks)
    factor, sink = (jnp.exp2((x - maximum) * scale_of(shape[1])) for x in (total.maximum, sinks))
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
  """Returns bool[shape]: which keys the rows of a tile see.

  One or two limits along the first axis, compared with a counter along the second, so that what a
  thread keeps is a value for each of its rows and not one for each of its elements.

  Args:
    row: i32[], the first row, counted from the tile's first position; `group` rows a position.
    key: i32[], the first key, counted from the tile's first position.
    group: query heads of a key/value head.
    window: a row sees its own position and window - 1 before it; None is all before it.
    shape: rows along `rows_axis`, keys along the other.
    rows_axis: 0 or 1.
  """
  first = lax.iota(jnp.int32, shape[0])
  counter = lax.broadcasted_iota(jnp.int32, shape, 1)
  # Key x is seen by row r if x <= r // group, that is x * group <= r.
  if rows_axis == 0:
    last_key = lax.div(first + row, jnp.int32(group))
    keys = counter + key
    seen = keys <= rows(last_key, shape)
    if window is not None:
      seen = seen & (keys > rows(last_key - window, shape))
    return seen
  first_row = (first + key) * group
  tile_rows = counter + row
  seen = tile_rows >= rows(first_row, shape)
  if window is not None:
    seen = seen & (tile_rows < rows(first_row + window * group, shape))
  return seen


def multiply(left: Any, right: Any, columns: int) -> jax.Array:
  """Returns f32[64, columns], left @ right of two references."""

  def body(accumulator):
    plgpu.wgmma(accumulator, left, right)
    return accumulator[...]

  return pl.run_scoped(body, plgpu.WGMMAAccumulatorRef((ROWS, columns), jnp.float32))
