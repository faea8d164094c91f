"""`layers_backward` for slabs on several devices: each handler is split where slabs are summed.

    inputs      recompute a chunk; cotangents of local columns, partial sums of the norm's cotangent
    inputs_end  add all slabs' partial sums in the tree; go back through the norm
    after       recompute a chunk; cotangents of the local part of the MLP, partial sums likewise
    after_end   all slabs' partial sums, back through the norm and the projection

Everything is computed by the functions of the unsplit handlers, in the same order: the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from seerjax.array_typing import Array
from seerjax.backends.native import ffi, products
from seerjax.backends.native.layer_parts import (
  DOWN,
  DOWN_A,
  DOWN_B,
  GATE_UP,
  GATE_UP_A,
  GATE_UP_B,
  MIXED,
  MLP_NORM,
  NO,
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
  SCALARS_AFTER,
  SIZES,
  SIZES_AFTER,
  WAITING,
  ZERO,
  add_sum,
  f32_of,
  gathered_rows,
  mlp_inputs,
  read_rows,
  scalar,
  scale_row,
  scratch,
  scratch_of,
  weights_of,
)
from seerjax.backends.native.layers_backward import (
  CHUNK_ROWS,
  back,
  back_low,
  back_slab,
  back_sum,
  back_through_norm,
  back_to_attended,
  blocks_of_chunk,
  gate_up_again,
  input_cotangents,
  input_scales,
  live_of_chunk,
  of_mlp_slab,
)
from seerjax.backends.native.numbers import jit, read_row

# Operands after those of a stage.
_FIRST, _SECOND, _THIRD, _X, _DY = map(np.int64, (14, 15, 16, 17, 18))
_SUMS, _LOWS = np.int64(12), np.int64(13)
_SCRATCH_INPUTS, _SCRATCH_END = np.int64(7), np.int64(3)
_SCRATCH_AFTER, _SCRATCH_AFTER_END = np.int64(12), np.int64(7)


# Operands: those of `attention_inputs`, with the chunk's first row as the last size; cotangents
# f[n, k, g, c], f[n, k, c] and f[n, k, c]. Results, for the chunk's rows, f32: the norm, its low
# rank, the cotangents of qkv, the norms' scales of each slab's queries and keys; the slabs' parts
# of the norm's cotangent f32[r, m, d], and of the low rank's f32[r, m, rank].
@jit
def _inputs(arguments, results, first, last, worker):
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  layer, c = ffi.integer(arguments, SIZES, 1), ffi.dimension(arguments, 12, 3)
  slabs, columns = ffi.dimension(arguments, QKV, 1), ffi.dimension(arguments, QKV, 3)
  rank, base = ffi.dimension(arguments, QKV_A, 3), ffi.integer(arguments, SIZES, 2)
  size, m = min(n, CHUNK_ROWS), ffi.dimension(results, 0, 0)
  scales = scratch_of(results, _SCRATCH_INPUTS, worker)
  x = scales + 4 * (d + 3 * c + columns)
  again = x + 4 * size * d
  panel = again + 4 * size * columns
  input_scales(arguments, scales)
  end = products.BLOCK_ROWS * last
  for begin in range(products.BLOCK_ROWS * first, end, CHUNK_ROWS):
    rows = live_of_chunk(arguments, SIZES, begin, min(CHUNK_ROWS, end - begin))
    if rows == 0:
      continue
    normed = ffi.address(results, 0) + 4 * begin * d
    low = ffi.address(results, 1) + 4 * begin * rank
    of_qkv = ffi.address(results, 2) + 4 * begin * slabs * columns
    of_query = ffi.address(results, 3) + 4 * begin * slabs * c
    of_key = ffi.address(results, 4) + 4 * begin * slabs * c
    input_cotangents(
      arguments, base + begin, rows, scales, x, again, normed, low, of_qkv, of_query, of_key
    )
    for slab in range(slabs):
      place = 4 * (slab * m + begin)
      back_slab(
        arguments, QKV, QKV_B, layer, slab, rows, of_qkv + 4 * slab * columns, slabs * columns,
        ffi.address(results, 5) + place * d, ffi.address(results, 6) + place * rank, panel,
      )  # fmt: skip


# Operands: those of `attention_inputs`; all slabs' partial sums f32[r, m, d] and f32[r, m, rank];
# the array that result 0 overwrites. Results: gradient f[n, d]; for the chunk's rows, f32, the low
# rank's cotangent, the norm's scale.
@jit
def _inputs_end(arguments, results, first, last, worker):
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  rank, base = ffi.dimension(arguments, QKV_A, 3), ffi.integer(arguments, SIZES, 2)
  lora_scale, size = scalar(arguments, SCALARS, 1), min(n, CHUNK_ROWS)
  scale = scratch_of(results, _SCRATCH_END, worker)
  x = scale + 4 * d
  sums = x + 4 * size * d
  lows = sums + 4 * WAITING * size * d
  panel = lows + 4 * WAITING * size * rank
  read_rows(arguments, NORM, ZERO, ONE, d, scale)
  end = products.BLOCK_ROWS * last
  for begin in range(products.BLOCK_ROWS * first, end, CHUNK_ROWS):
    rows = live_of_chunk(arguments, SIZES, begin, min(CHUNK_ROWS, end - begin))
    if rows == 0:
      continue
    of_low = ffi.address(results, 1) + 4 * begin * rank
    of_scale = ffi.address(results, 2) + 4 * begin * d
    read_rows(arguments, ZERO, base + begin, rows, d, x)
    gathered_rows(arguments, _SUMS, begin, rows, sums)
    gathered_rows(arguments, _LOWS, begin, rows, lows)
    back_sum(arguments, QKV_A, lora_scale, rows, sums, lows, of_low, panel)
    back_through_norm(arguments, results, base + begin, rows, x, scale, sums, of_scale)


# Operands: those of `after_attention`, with the chunk's first row as the last size; the cotangent
# f[n, d]; all slabs' partial sums of the projection f32[r, n, d] and f32[r, n, rank]. Results, for
# the chunk's rows, f32: the attention output, hidden rows after it, the projection's low rank; the
# norm and its low rank, the cotangent of gate and up, the inner features, the cotangent of their
# low rank, the given cotangent; the slabs' parts of the cotangents of the norm f32[r, m, d] and of
# its low rank f32[r, m, rank], and of the inner low rank f32[r, m, rank].
@jit
def _after(arguments, results, first, last, worker):
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  is_bf16, layer = ffi.is_bfloat16(arguments, 0), ffi.integer(arguments, SIZES_AFTER, 1)
  slabs, inputs = ffi.dimension(arguments, OUT, 1), ffi.dimension(arguments, OUT, 2)
  features, base = ffi.dimension(arguments, DOWN, 2), ffi.integer(arguments, SIZES_AFTER, 2)
  out_rank, rank = ffi.dimension(arguments, OUT_A, 3), ffi.dimension(arguments, GATE_UP_A, 3)
  down_rank, down_scale = ffi.dimension(arguments, DOWN_A, 3), scalar(arguments, SCALARS_AFTER, 3)
  size, m, width = min(n, CHUNK_ROWS), ffi.dimension(results, 0, 0), 2 if is_bf16 else 4
  scale = scratch_of(results, _SCRATCH_AFTER, worker)
  gate_up = scale + 4 * d
  sums = gate_up + 12 * size * features
  lows = sums + 4 * WAITING * size * d
  panel = lows + 4 * WAITING * size * max(out_rank, rank, down_rank)
  read_rows(arguments, MLP_NORM, ZERO, ONE, d, scale)
  end = products.BLOCK_ROWS * last
  for begin in range(products.BLOCK_ROWS * first, end, CHUNK_ROWS):
    rows = live_of_chunk(arguments, SIZES_AFTER, begin, min(CHUNK_ROWS, end - begin))
    if rows == 0:
      continue
    x, out_low = (
      ffi.address(results, 1) + 4 * begin * d, ffi.address(results, 2) + 4 * begin * out_rank
    )  # fmt: skip
    normed, low = (
      ffi.address(results, 3) + 4 * begin * d, ffi.address(results, 4) + 4 * begin * rank
    )  # fmt: skip
    of_gate_up = ffi.address(results, 5) + 8 * begin * slabs * features
    inner = ffi.address(results, 6) + 4 * begin * slabs * features
    of_down = ffi.address(results, 7) + 4 * begin * down_rank
    dy = ffi.address(results, 8) + 4 * begin * d
    attended = ffi.address(results, 0) + 4 * begin * slabs * inputs
    read_rows(arguments, MIXED, base + begin, rows, slabs * inputs, attended)
    read_rows(arguments, ZERO, base + begin, rows, d, x)
    read_row(ffi.address(arguments, _FIRST) + width * (base + begin) * d, is_bf16, dy, rows * d)
    gathered_rows(arguments, _SECOND, base + begin, rows, sums)
    gathered_rows(arguments, _THIRD, base + begin, rows, lows)
    add_sum(arguments, OUT_B, ZERO, ZERO, rows, x, sums, lows)
    read_row(lows, NO, out_low, rows * out_rank)
    mlp_inputs(arguments, ZERO, rows, x, scale, normed, low)
    back(arguments, DOWN_B, ZERO, ZERO, dy, d, rows, lows, down_rank, ZERO, panel)
    back_low(lows, down_scale, is_bf16, rows * down_rank, of_down)
    for slab in range(slabs):
      place = 4 * (slab * m + begin)
      to = ffi.address(results, 11) + place * down_rank
      gate_up_again(arguments, slab, rows, normed, low, gate_up)
      of_mlp_slab(
        arguments, slab, rows, gate_up, dy, of_down, of_gate_up, inner, to,
        gate_up + 8 * rows * features, panel,
      )  # fmt: skip
      back_slab(
        arguments, GATE_UP, GATE_UP_B, layer, slab, rows, of_gate_up + 8 * slab * features,
        2 * slabs * features, ffi.address(results, 9) + place * d,
        ffi.address(results, 10) + place * rank, panel,
      )  # fmt: skip


# Operands: those of `after_attention`; all slabs' partial sums f32[r, m, d], f32[r, m, rank] and
# f32[r, m, rank]; hidden rows after attention and the given cotangent, f32[m, d]; the arrays that
# results 0 and 1 overwrite. Results: gradients f[n, d], f[n, k, g, c]; for the chunk's rows, f32,
# the cotangents of the projection's low rank and of the projection, the norm's scale, the cotangent
# of its low rank, the inner low rank.
@jit
def _after_end(arguments, results, first, last, worker):
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  is_bf16, base = ffi.is_bfloat16(arguments, 0), ffi.integer(arguments, SIZES_AFTER, 2)
  inputs, out_rank = ffi.dimension(arguments, OUT, 2), ffi.dimension(arguments, OUT_A, 3)
  rank, down_rank = ffi.dimension(arguments, GATE_UP_A, 3), ffi.dimension(arguments, DOWN_A, 3)
  gate_up_scale, down_scale = (
    scalar(arguments, SCALARS_AFTER, 2), scalar(arguments, SCALARS_AFTER, 3)
  )  # fmt: skip
  size = min(n, CHUNK_ROWS)
  scale = scratch_of(results, _SCRATCH_AFTER_END, worker)
  mixed = scale + 4 * d
  sums = mixed + 4 * size * inputs
  lows = sums + 4 * WAITING * size * d
  panel = lows + 4 * WAITING * size * max(out_rank, rank, down_rank)
  read_rows(arguments, MLP_NORM, ZERO, ONE, d, scale)
  end = products.BLOCK_ROWS * last
  for begin in range(products.BLOCK_ROWS * first, end, CHUNK_ROWS):
    rows = live_of_chunk(arguments, SIZES_AFTER, begin, min(CHUNK_ROWS, end - begin))
    if rows == 0:
      continue
    of_out = ffi.address(results, 2) + 4 * begin * out_rank
    dx, of_scale = ffi.address(results, 3) + 4 * begin * d, ffi.address(results, 4) + 4 * begin * d
    of_low = ffi.address(results, 5) + 4 * begin * rank
    down_low = ffi.address(results, 6) + 4 * begin * down_rank
    x, dy = ffi.address(arguments, _X) + 4 * begin * d, ffi.address(arguments, _DY) + 4 * begin * d
    gathered_rows(arguments, _THIRD, begin, rows, lows)
    scale_row(lows, down_scale, is_bf16, rows * down_rank)
    read_row(lows, NO, down_low, rows * down_rank)
    gathered_rows(arguments, _FIRST, begin, rows, sums)
    gathered_rows(arguments, _SECOND, begin, rows, lows)
    back_sum(arguments, GATE_UP_A, gate_up_scale, rows, sums, lows, of_low, panel)
    back_to_attended(
      arguments, results, base + begin, rows, x, scale, sums, dy, dx, of_scale, lows, of_out,
      mixed, panel,
    )  # fmt: skip


@jit
def _cost_of_inputs(arguments):
  """A chunk's products, recomputed and backward."""
  rows = live_of_chunk(arguments, SIZES, ZERO, ffi.dimension(arguments, 0, 0))
  return 2 * rows * weights_of(arguments, QKV)


@jit
def _cost_of_mlp(arguments):
  """Like `_cost_of_inputs`."""
  rows = live_of_chunk(arguments, SIZES_AFTER, ZERO, ffi.dimension(arguments, 0, 0))
  return 2 * rows * (weights_of(arguments, GATE_UP) + weights_of(arguments, DOWN))


@jit
def _cost_of_projection(arguments):
  """The products back through the projection; unlike in `_cost_of_mlp`, nothing is recomputed."""
  rows = live_of_chunk(arguments, SIZES_AFTER, ZERO, ffi.dimension(arguments, 0, 0))
  return rows * weights_of(arguments, OUT)


_INPUTS = ffi.Handler(
  "seerjax_attention_inputs_gradient_parts", blocks_of_chunk, _inputs, _cost_of_inputs
)
_INPUTS_END = ffi.Handler("seerjax_attention_inputs_gradient_end", blocks_of_chunk, _inputs_end)
_AFTER = ffi.Handler(
  "seerjax_after_attention_gradient_parts", blocks_of_chunk, _after, _cost_of_mlp
)
_AFTER_END = ffi.Handler(
  "seerjax_after_attention_gradient_end", blocks_of_chunk, _after_end, _cost_of_projection
)


def inputs(operands: list[Array], cotangent: Sequence[Array], m: int) -> list[Array]:
  """Computes the local part of a chunk of m rows: inputs of weight gradients, and partial sums."""
  (n, d), (_, slabs, _, columns) = operands[0].shape, operands[QKV].shape
  rank, size, c = operands[QKV_A].shape[3], min(n, CHUNK_ROWS), cotangent[0].shape[3]
  features = operands[QUERY_NORM].shape[0]
  widths = (d, rank, slabs * columns, slabs * features, slabs * features)
  own = scratch(
    (d + 3 * c + columns,), (size, d + columns), (max(columns, rank, 1), products.PANEL)
  )
  results = [*(f32_of(m, width) for width in widths), f32_of(slabs, m, d), f32_of(slabs, m, rank)]
  return list(_INPUTS([*results, own], *operands, *cotangent)[:-1])


def inputs_end(
  operands: list[Array], partials: list[Array], into: tuple[Array, ...], m: int
) -> list[Array]:
  """Returns the gradients of hidden rows, low rank and scale from all slabs' partial sums."""
  x, rank = operands[0], operands[QKV_A].shape[3]
  (n, d), size = x.shape, min(x.shape[0], CHUNK_ROWS)
  own = scratch((d,), (size, d + WAITING * (d + rank)), (max(rank, 1), products.PANEL))
  results = [jax.ShapeDtypeStruct((n, d), x.dtype), f32_of(m, rank), f32_of(m, d), own]
  place = len(operands) + len(partials)
  return list(_INPUTS_END(results, *operands, *partials, *into, aliases={place: 0})[:-1])


def after(
  operands: list[Array], cotangent: Array, projection: Any, m: int
) -> tuple[list[Array], list[Array]]:
  """Like `inputs`: (inputs of weight gradients, partial sums by slab)."""
  (n, d), (_, slabs, inputs, _) = operands[0].shape, operands[OUT].shape
  features, size = operands[DOWN].shape[2], min(n, CHUNK_ROWS)
  out_rank, rank, down_rank = (operands[place].shape[3] for place in (OUT_A, GATE_UP_A, DOWN_A))
  most = max(out_rank, rank, down_rank)
  widths = (
    slabs * inputs, d, out_rank, d, rank, 2 * slabs * features, slabs * features, down_rank, d,
  )  # fmt: skip
  partials = [f32_of(slabs, m, width) for width in (d, rank, down_rank)]
  own = scratch(
    (d,), (size, 3 * features + WAITING * (d + most)), (max(2 * features, d, most), products.PANEL)
  )
  results = [*(f32_of(m, width) for width in widths), *partials, own]
  out = _AFTER(results, *operands, cotangent, *projection)
  return list(out[: len(widths)]), list(out[len(widths) : -1])


def after_end(
  operands: list[Array],
  partials: list[Array],
  x: Array,
  dy: Array,
  into: tuple[Array, ...],
  m: int,
) -> list[Array]:
  """Like `inputs_end`: gradients of hidden rows and attention output, then inputs of weights'."""
  (n, d), inputs = operands[0].shape, operands[OUT].shape[2]
  out_rank, rank, down_rank = (operands[place].shape[3] for place in (OUT_A, GATE_UP_A, DOWN_A))
  size, most = min(n, CHUNK_ROWS), max(out_rank, rank, down_rank)
  own = scratch((d,), (size, inputs + WAITING * (d + most)), (max(d, most), products.PANEL))
  widths = out_rank, d, d, rank, down_rank
  of = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in into]
  place = len(operands) + len(partials) + 2
  aliases = {place: 0, place + 1: 1}
  results = [*of, *(f32_of(m, width) for width in widths), own]
  return list(_AFTER_END(results, *operands, *partials, x, dy, *into, aliases=aliases)[:-1])
