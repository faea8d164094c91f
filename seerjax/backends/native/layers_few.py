"""The parts of a layer around attention for few rows: all threads share every product's columns.

A step of few rows is bound by reading weights, so each thread reads a part of them once for all
rows; in `layers`, threads share rows, and each would read all weights. A product's columns are
pieces of a stage (`threads.claim`), and a stage begins when the previous one is done:

    attention_inputs   rows: norm | heads: qkv, norms, rotation
    after_attention    columns: projection | rows: residual, norm | columns: gate, up, product
                       | columns: down | rows: residual

Each output is the same chain as in `layers`, and each sum the same tree: the same bits.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from seerjax.array_typing import Array
from seerjax.backends.native import ffi, norms, threads, vectors
from seerjax.backends.native.layer_parts import (
  BIAS,
  COS,
  DOWN,
  DOWN_A,
  DOWN_B,
  GATE_UP,
  GATE_UP_A,
  GATE_UP_B,
  KEY_NORM,
  MIXED,
  MLP_NORM,
  NORM,
  ONE,
  OUT,
  OUT_A,
  OUT_B,
  QKV,
  QKV_A,
  QKV_B,
  QUERY_NORM,
  SCALARS,
  SIN,
  SIZES,
  SIZES_AFTER,
  THREE,
  TWO,
  WAITING,
  ZERO,
  add_low_to_columns,
  add_row,
  add_sum,
  blocks,
  gate,
  live_rows,
  low_product,
  merge,
  mlp_inputs,
  product_of_columns,
  read_rows,
  rotate,
  scalar,
  scale_low,
  scratch,
  scratch_of,
  uses_gelu,
  waiting,
  weights_of,
  write_rows,
)
from seerjax.backends.native.numbers import inlined, jit, read_row, round_row, write_row, zero_row

# Maximum rows of a program that uses this path.
MOST_ROWS = 128
# Minimum rows of a piece of a stage of rows, and minimum columns of a piece of a product.
_PIECE_ROWS, _PIECE_COLUMNS = np.int64(4), np.int64(96)
# Maximum pieces of a product with two or more threads.
_PIECES = np.int64(8)
# Cost of reading a weight from memory, in multiply-adds, that is, in rows.
_READ_ROWS = 8
_STAGES = tuple(np.int64(stage) for stage in range(threads.STAGES))
_NONE, _LANES = np.int64(-1), np.int64(vectors.LANES)


@inlined
def _row_pieces(rows):
  return (rows + _PIECE_ROWS - 1) // _PIECE_ROWS


@inlined
def _columns_of_piece(team, columns, unit):
  """Returns the columns of a piece, a multiple of `unit`; all columns for a single thread."""
  if team == 0:
    return columns
  least = (columns + _PIECES - 1) // _PIECES
  least = max(least, min(_PIECE_COLUMNS, columns))
  return (least + unit - 1) // unit * unit


@jit
def _sum_of_columns(
  arguments, operand, layer, x, x_row, rows, first, columns, parts, out
):  # fmt: skip
  """Computes `columns` of out = x[rows, r a] @ f[r, a, b], adding the slabs' sums in the tree."""
  slabs, k = ffi.dimension(arguments, operand, 1), ffi.dimension(arguments, operand, 2)
  width = ffi.dimension(arguments, operand, 3)
  to = out + 4 * first
  if slabs == 1:
    product_of_columns(
      arguments, operand, layer, ZERO, x, x_row, rows, first, columns, to, width, ZERO
    )
    return
  for slab in range(slabs):
    part = parts + 4 * waiting(slab) * rows * columns
    product_of_columns(
      arguments, operand, layer, slab, x + 4 * slab * k, x_row, rows, first, columns, part, columns,
      ZERO,
    )  # fmt: skip
    merge(parts, slab, rows * columns)
  for row in range(rows):
    read_row(parts + 4 * row * columns, False, to + 4 * row * width, columns)


@jit
def _sum_of_lows(arguments, operand, begin, x, x_row, rows, lows):
  """Computes an adapter's x @ A of several rows, adding the slabs' sums in the tree."""
  slabs, k = ffi.dimension(arguments, operand, 1), ffi.dimension(arguments, operand, 2)
  rank = ffi.dimension(arguments, operand, 3)
  for slab in range(slabs):
    part = lows + 4 * waiting(slab) * rows * rank
    low_product(arguments, SIZES_AFTER, operand, slab, begin, x + 4 * slab * k, x_row, rows, part)
    merge(lows, slab, rows * rank)


@jit
def _attention_inputs(arguments, results, team, worker):
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  slabs, columns = ffi.dimension(arguments, QKV, 1), ffi.dimension(arguments, QKV, 3)
  heads, group, c = (
    ffi.dimension(results, 0, 1), ffi.dimension(results, 0, 2), ffi.dimension(results, 0, 3)
  )  # fmt: skip
  rank, live = ffi.dimension(arguments, QKV_A, 3), live_rows(arguments, SIZES)
  is_bf16, layer = ffi.is_bfloat16(arguments, 0), ffi.integer(arguments, SIZES, 1)
  is_narrow = ffi.is_bfloat16(arguments, NORM)
  eps, width = scalar(arguments, SCALARS, 0), 2 if is_bf16 else 4
  normed = scratch_of(results, THREE, ZERO)  # Shared by all threads.
  low = normed + 4 * n * d
  scale = scratch_of(results, THREE, worker) + 4 * n * (d + rank)
  qkv = scale + 4 * d
  bias = qkv + 4 * n * columns
  query_scale = bias + 4 * columns
  key_scale = query_scale + 4 * c
  read_rows(arguments, NORM, ZERO, ONE, d, scale)
  has_norms = ffi.dimension(arguments, QUERY_NORM, 0) > 0
  if has_norms:
    read_rows(arguments, QUERY_NORM, ZERO, ONE, c, query_scale)
    read_rows(arguments, KEY_NORM, ZERO, ONE, c, key_scale)
  has_bias = ffi.dimension(arguments, BIAS, 1) > 0

  pieces = _row_pieces(live)
  piece = threads.claim(team, _STAGES[0], _NONE)
  while piece < pieces:
    begin = _PIECE_ROWS * piece
    rows = min(_PIECE_ROWS, live - begin)
    read_rows(arguments, ZERO, begin, rows, d, normed + 4 * begin * d)
    for row in range(begin, begin + rows):
      at = normed + 4 * row * d
      norms.norm_row(at, scale, d, eps, is_bf16, is_narrow, at)
    to = low + 4 * begin * rank
    low_product(arguments, SIZES, QKV_A, ZERO, begin, normed + 4 * begin * d, d, rows, to)
    scale_low(arguments, SIZES, SCALARS, ZERO, begin, rank, rows, to)
    threads.settle(team, _STAGES[0])
    piece = threads.claim(team, _STAGES[0], piece)
  threads.wait(team, _STAGES[0], pieces)

  own = heads // slabs
  some = _columns_of_piece(team, columns, c)
  of_slab = (columns + some - 1) // some
  pieces = slabs * of_slab
  piece = threads.claim(team, _STAGES[1], _NONE)
  while piece < pieces:
    slab, first = piece // of_slab, piece % of_slab * some
    count = min(some, columns - first)
    product_of_columns(arguments, QKV, layer, slab, normed, d, live, first, count, qkv, count, ZERO)
    add_low_to_columns(
      arguments, SIZES, QKV_B, ZERO, slab, ZERO, low, live, first, count, qkv, count
    )
    round_row(qkv, is_bf16, live * count)
    if has_bias:
      read_rows(arguments, BIAS, slab, ONE, columns, bias)
      for row in range(live):
        add_row(qkv + 4 * row * count, bias + 4 * first, count)
      round_row(qkv, is_bf16, live * count)
    for row in range(live):
      cos = ffi.address(arguments, COS) + 4 * row * (c // 2)
      sin = ffi.address(arguments, SIN) + 4 * row * (c // 2)
      index = row * heads + slab * own
      for head in range(first // c, (first + count) // c):
        at = qkv + 4 * (row * count + head * c - first)
        is_query, is_key = head < own * group, head < own * (group + 1)
        if is_key and has_norms:
          own_scale = query_scale if is_query else key_scale
          norms.norm_row(at, own_scale, c, eps, is_bf16, is_narrow, at)
        if is_key:
          rotate(at, cos, sin, c)
        if is_query:
          target = ffi.address(results, 0) + width * (index * group + head) * c
        elif is_key:
          target = ffi.address(results, 1) + width * (index + head - own * group) * c
        else:
          target = ffi.address(results, 2) + width * (index + head - own * (group + 1)) * c
        write_row(at, target, is_bf16, c)
    threads.settle(team, _STAGES[1])
    piece = threads.claim(team, _STAGES[1], piece)
  if worker == 0:
    for result in range(3):
      count = heads * c * (group if result == 0 else 1)
      dead = ffi.address(results, result) + width * live * count
      zero_row(dead, is_bf16, (n - live) * count)


@jit
def _after_attention(arguments, results, team, worker):
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  slabs, features = ffi.dimension(arguments, DOWN, 1), ffi.dimension(arguments, DOWN, 2)
  inputs = slabs * ffi.dimension(arguments, OUT, 2)
  out_rank, rank = ffi.dimension(arguments, OUT_A, 3), ffi.dimension(arguments, GATE_UP_A, 3)
  down_rank = ffi.dimension(arguments, DOWN_A, 3)
  is_bf16, layer = ffi.is_bfloat16(arguments, 0), ffi.integer(arguments, SIZES_AFTER, 1)
  live = live_rows(arguments, SIZES_AFTER)
  x = scratch_of(results, ONE, ZERO)  # Shared by all threads, like the next four.
  sums = x + 4 * n * d
  normed = sums + 4 * n * d
  low = normed + 4 * n * d
  inner = low + 4 * n * rank
  mixed = scratch_of(results, ONE, worker) + 4 * n * (3 * d + rank + slabs * features)
  parts = mixed + 4 * n * inputs  # Sums that wait for others, or gate and up.
  lows = parts + 4 * n * max(WAITING * d, 2 * features)
  scale = lows + 4 * n * WAITING * max(out_rank, down_rank)
  read_rows(arguments, MLP_NORM, ZERO, ONE, d, scale)
  read_rows(arguments, MIXED, ZERO, live, inputs, mixed)

  some = _columns_of_piece(team, d, _LANES)
  pieces = (d + some - 1) // some
  piece = threads.claim(team, _STAGES[0], _NONE)
  while piece < pieces:
    first = piece * some
    count = min(some, d - first)
    _sum_of_columns(arguments, OUT, layer, mixed, inputs, live, first, count, parts, sums)
    threads.settle(team, _STAGES[0])
    piece = threads.claim(team, _STAGES[0], piece)
  threads.wait(team, _STAGES[0], pieces)

  row_pieces = _row_pieces(live)
  piece = threads.claim(team, _STAGES[1], _NONE)
  while piece < row_pieces:
    begin = _PIECE_ROWS * piece
    rows = min(_PIECE_ROWS, live - begin)
    place = 4 * begin * d
    read_rows(arguments, ZERO, begin, rows, d, x + place)
    _sum_of_lows(arguments, OUT_A, begin, mixed + 4 * begin * inputs, inputs, rows, lows)
    add_sum(arguments, OUT_B, ZERO, begin, rows, x + place, sums + place, lows)
    mlp_inputs(arguments, begin, rows, x + place, scale, normed + place, low + 4 * begin * rank)
    threads.settle(team, _STAGES[1])
    piece = threads.claim(team, _STAGES[1], piece)
  threads.wait(team, _STAGES[1], row_pieces)

  most = _columns_of_piece(team, features, _LANES)
  of_slab = (features + most - 1) // most
  pieces_of_mlp = slabs * of_slab
  piece = threads.claim(team, _STAGES[2], _NONE)
  while piece < pieces_of_mlp:
    slab, first = piece // of_slab, piece % of_slab * most
    count = min(most, features - first)
    ups = parts + 4 * count
    for part in range(2):
      begin = part * features + first
      to = ups if part == 1 else parts
      product_of_columns(
        arguments, GATE_UP, layer, slab, normed, d, live, begin, count, to, 2 * count, ZERO
      )
      add_low_to_columns(
        arguments, SIZES_AFTER, GATE_UP_B, ONE, slab, ZERO, low, live, begin, count, to, 2 * count
      )
    for row in range(live):
      at = 8 * row * count
      to = inner + 4 * (row * slabs * features + slab * features + first)
      gate(parts + at, ups + at, uses_gelu(arguments), is_bf16, count, to)
    threads.settle(team, _STAGES[2])
    piece = threads.claim(team, _STAGES[2], piece)
  threads.wait(team, _STAGES[2], pieces_of_mlp)

  width = slabs * features
  piece = threads.claim(team, _STAGES[3], _NONE)
  while piece < pieces:
    first = piece * some
    count = min(some, d - first)
    _sum_of_columns(arguments, DOWN, layer, inner, width, live, first, count, parts, sums)
    threads.settle(team, _STAGES[3])
    piece = threads.claim(team, _STAGES[3], piece)
  threads.wait(team, _STAGES[3], pieces)

  piece = threads.claim(team, _STAGES[4], _NONE)
  while piece < row_pieces:
    begin = _PIECE_ROWS * piece
    rows = min(_PIECE_ROWS, live - begin)
    place = 4 * begin * d
    _sum_of_lows(arguments, DOWN_A, begin, inner + 4 * begin * width, width, rows, lows)
    add_sum(arguments, DOWN_B, TWO, begin, rows, x + place, sums + place, lows)
    write_rows(x + place, rows, d, results, ZERO, begin, rows)
    piece = threads.claim(team, _STAGES[4], piece)
  if worker == 0:
    size = 2 if is_bf16 else 4
    zero_row(ffi.address(results, 0) + size * live * d, is_bf16, (n - live) * d)


@jit
def _cost_of_inputs(arguments):
  return max(live_rows(arguments, SIZES), _READ_ROWS) * weights_of(arguments, QKV)


@jit
def _cost_after(arguments):
  weights = weights_of(arguments, OUT) + weights_of(arguments, GATE_UP)
  weights += weights_of(arguments, DOWN)
  return max(live_rows(arguments, SIZES_AFTER), _READ_ROWS) * weights


_INPUTS = ffi.Handler(
  "seerjax_attention_inputs_few", blocks, _attention_inputs, _cost_of_inputs, is_staged=True
)
_AFTER = ffi.Handler(
  "seerjax_after_attention_few", blocks, _after_attention, _cost_after, is_staged=True
)


def attention_inputs(
  results: tuple[jax.ShapeDtypeStruct, ...], operands: list[Array]
) -> tuple[Any, ...]:
  """Returns f[n, k, g, c], f[n, k, c], f[n, k, c]; operands: those of `layers.attention_inputs`."""
  (n, d), columns = operands[0].shape, operands[QKV].shape[3]
  rank, c = operands[QKV_A].shape[3], results[0].shape[3]
  own = scratch((n, 2 * d + rank + columns), (d + columns + 2 * c,))
  return _INPUTS((*results, own), *operands)[:3]


def after_attention(hidden: jax.ShapeDtypeStruct, operands: list[Array]) -> Array:
  """Returns hidden rows f[n, d]; operands: those of `layers.after_attention`."""
  (n, d), (_, slabs, inputs, _) = operands[0].shape, operands[OUT].shape
  features = operands[DOWN].shape[2]
  out_rank, rank, down_rank = (operands[i].shape[3] for i in (OUT_A, GATE_UP_A, DOWN_A))
  shared = 3 * d + rank + slabs * features
  parts = max(WAITING * d, 2 * features) + WAITING * max(out_rank, down_rank)
  own = scratch((n, shared + slabs * inputs + parts), (d,))
  return _AFTER((hidden, own), *operands)[0]
