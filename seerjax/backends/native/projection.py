"""Attention's output projection, added to the rows, for layers with an MLP that is computed apart.

Rows and columns are items, so threads share the weights of few rows, too. An output has the bits of
`layers.after_attention` with an MLP that adds zero: one chain per slab, slabs added in the tree.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from seerjax.array_typing import Array
from seerjax.backends.native import ffi, layers, vectors
from seerjax.backends.native.layer_parts import (
  ONE,
  WAITING,
  ZERO,
  Params,
  add_row,
  layered,
  live_rows,
  merge,
  product_of_columns,
  read_rows,
  scratch,
  scratch_of,
  waiting,
  weights_of,
)
from seerjax.backends.native.numbers import f32, jit, read_row, round_row, write_row, zero_row
from seerjax.backends.native.pointers import floats
from seerjax.backends.protocol import Stage

# Operands, after the rows.
_MIXED, _SIZES, _OUT = map(np.int64, range(1, 4))
# Rows of an item; parts of all columns, and minimum columns of one.
_ROWS, _PARTS, _COLUMNS, _LANES = map(np.int64, (64, 8, 96, vectors.LANES))
# Cost of reading a weight from memory, in multiply-adds, that is, in rows.
_READ_ROWS = 8


@jit
def _columns_of_item(arguments):
  d = ffi.dimension(arguments, 0, 1)
  least = max((d + _PARTS - 1) // _PARTS, min(_COLUMNS, d))
  return (least + _LANES - 1) // _LANES * _LANES


@jit
def _items(arguments):
  n, d, columns = (
    ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1), _columns_of_item(arguments)
  )  # fmt: skip
  return (n + _ROWS - 1) // _ROWS * ((d + columns - 1) // columns)


@jit
def _add_zero(x, count):
  """Adds zero, which turns -0.0 into 0.0."""
  values = floats(x)
  for i in range(count):
    values[i] = values[i] + f32(0.0)


@jit
def _project(arguments, results, first, last, worker):
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  slabs, k = ffi.dimension(arguments, _OUT, 1), ffi.dimension(arguments, _OUT, 2)
  is_bf16, layer = ffi.is_bfloat16(arguments, 0), ffi.integer(arguments, _SIZES, 1)
  live, width, size = live_rows(arguments, _SIZES), 2 if is_bf16 else 4, min(n, _ROWS)
  mixed = scratch_of(results, ONE, worker)
  sums = mixed + 4 * size * slabs * k
  x = sums + 4 * WAITING * size * d
  some = _columns_of_item(arguments)
  of_rows = (d + some - 1) // some
  item = first
  while item < last:  # Items of the same rows go together.
    begin, column = item // of_rows * _ROWS, item % of_rows * some
    end = min(last, item // of_rows * of_rows + of_rows)
    columns = min(d, column + (end - item) * some) - column
    rows = min(_ROWS, n - begin)
    alive = min(max(live - begin, 0), rows)
    read_rows(arguments, _MIXED, begin, alive, slabs * k, mixed)
    for slab in range(slabs):
      to = sums + 4 * waiting(slab) * alive * columns
      product_of_columns(
        arguments, _OUT, layer, slab, mixed + 4 * slab * k, slabs * k, alive, column, columns, to,
        columns, ZERO,
      )  # fmt: skip
      merge(sums, slab, alive * columns)
    round_row(sums, is_bf16, alive * columns)
    for row in range(rows):
      place = width * ((begin + row) * d + column)
      if row < alive:
        read_row(ffi.address(arguments, 0) + place, is_bf16, x, columns)
        add_row(x, sums + 4 * row * columns, columns)
        round_row(x, is_bf16, columns)
        _add_zero(x, columns)
        write_row(x, ffi.address(results, 0) + place, is_bf16, columns)
      else:
        zero_row(ffi.address(results, 0) + place, is_bf16, columns)
    item = end


@jit
def _cost(arguments):
  return max(live_rows(arguments, _SIZES), _READ_ROWS) * weights_of(arguments, _OUT)


_PROJECT = ffi.Handler("seerjax_projection", _items, _project, _cost)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def projected(stage: Stage, weights: Params, rows: Any, num_rows: Array) -> Array:
  """Adds the output projection of attention outputs f[n, k, g, c] to hidden rows f[n, d].

  Args:
    stage: stage of the model on one device.
    weights: those of `layers.after_attention`, without adapters; its MLP adds zero. A gradient is
      that of `layers.after_attention`.
    rows: x, mixed.
    num_rows: i32[]; rows from there on are zero.
  """
  del stage
  (x, mixed), (out, layer) = rows, layered(weights["out"])
  (n, d), (_, slabs, k, _) = x.shape, out.shape
  sizes = jnp.stack([jnp.asarray(size, jnp.int32) for size in (num_rows, layer)])
  own = scratch((min(n, int(_ROWS)), slabs * k + WAITING * d), (d,))
  hidden = jax.ShapeDtypeStruct(x.shape, x.dtype)
  return _PROJECT((hidden, own), x, mixed, sizes, out)[0]


def _forward(stage, weights, rows, num_rows):
  whole = functools.partial(layers.after_attention, stage)
  return jax.vjp(whole, weights, rows, lax.optimization_barrier(num_rows))


def _backward(stage, pull, cotangent):
  del stage
  return pull(cotangent)


projected.defvjp(_forward, _backward)
