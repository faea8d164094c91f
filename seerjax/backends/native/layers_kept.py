"""The part of a layer after attention, for training: it also returns what its gradient needs.

In addition to the result, the forward pass returns the hidden rows after attention, and gate and up
before their product, so that the gradient need not recompute them. The products are those of
`layers.after_attention`, in the same order, and so have the same bits.
"""

from __future__ import annotations

import jax

from seerjax.array_typing import Array
from seerjax.backends.native import ffi, layers_backward, products
from seerjax.backends.native.layer_parts import (
  DOWN,
  DOWN_A,
  DOWN_B,
  GATE_UP,
  GATE_UP_A,
  GATE_UP_B,
  MIXED,
  MLP_NORM,
  ONE,
  OUT,
  OUT_A,
  OUT_B,
  SIZES_AFTER,
  THREE,
  TWO,
  WAITING,
  ZERO,
  add_low,
  add_sum,
  blocks,
  f32_of,
  gate,
  live_rows,
  low_product,
  merge,
  mlp_inputs,
  product,
  projected,
  read_rows,
  scratch,
  scratch_of,
  uses_gelu,
  waiting,
  weights_of,
  write_rows,
)
from seerjax.backends.native.numbers import jit, read_row

# Rows that go through a layer together.
CHUNK_ROWS = layers_backward.CHUNK_ROWS


@jit
def _mlp(arguments, slab, begin, rows, normed, low, gate_up, inner, sums, lows):
  """Like `layer_parts.mlp`, but keeps gate and up f32[rows, 2 i]."""
  is_bf16, layer = ffi.is_bfloat16(arguments, 0), ffi.integer(arguments, SIZES_AFTER, 1)
  d, features = ffi.dimension(arguments, 0, 1), ffi.dimension(arguments, DOWN, 2)
  product(arguments, GATE_UP, layer, slab, normed, d, rows, gate_up, ZERO)
  add_low(arguments, SIZES_AFTER, GATE_UP_B, ONE, slab, begin, low, rows, gate_up)
  for row in range(rows):
    at = gate_up + 8 * row * features
    to = inner + 4 * row * features
    gate(at, at + 4 * features, uses_gelu(arguments), is_bf16, features, to)
  product(arguments, DOWN, layer, slab, inner, features, rows, sums, ZERO)
  low_product(arguments, SIZES_AFTER, DOWN_A, slab, begin, inner, features, rows, lows)


# Operands: those of `layers.after_attention`. Results: hidden rows f[n, d]; hidden rows after
# attention f32[n, d]; gate and up f32[r, n, 2 i] of each slab.
@jit
def _after_attention(arguments, results, first, last, worker):
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  slabs, features = ffi.dimension(arguments, OUT, 1), ffi.dimension(arguments, DOWN, 2)
  inputs = slabs * ffi.dimension(arguments, OUT, 2)
  out_rank, rank = ffi.dimension(arguments, OUT_A, 3), ffi.dimension(arguments, GATE_UP_A, 3)
  down_rank, size = ffi.dimension(arguments, DOWN_A, 3), min(n, CHUNK_ROWS)
  num_rows = live_rows(arguments, SIZES_AFTER)
  scale = scratch_of(results, THREE, worker)
  x = scale + 4 * d
  mixed = x + 4 * size * d
  normed = mixed + 4 * size * inputs
  low = normed + 4 * size * d
  inner = low + 4 * size * rank
  sums = inner + 4 * size * features
  lows = sums + 4 * WAITING * size * d
  read_rows(arguments, MLP_NORM, ZERO, ONE, d, scale)
  end = min(n, products.BLOCK_ROWS * last)
  for begin in range(products.BLOCK_ROWS * first, end, CHUNK_ROWS):
    rows = min(CHUNK_ROWS, end - begin)
    live = min(max(num_rows - begin, 0), rows)
    read_rows(arguments, ZERO, begin, live, d, x)
    read_rows(arguments, MIXED, begin, live, inputs, mixed)
    for slab in range(slabs):
      place = 4 * waiting(slab) * live
      projected(arguments, slab, begin, live, mixed, sums + place * d, lows + place * out_rank)
      merge(sums, slab, live * d)
      merge(lows, slab, live * out_rank)
    add_sum(arguments, OUT_B, ZERO, begin, live, x, sums, lows)
    read_row(x, False, ffi.address(results, 1) + 4 * begin * d, live * d)
    mlp_inputs(arguments, begin, live, x, scale, normed, low)
    for slab in range(slabs):
      place = 4 * waiting(slab) * live
      gate_up = ffi.address(results, TWO) + 8 * (slab * n + begin) * features
      _mlp(
        arguments, slab, begin, live, normed, low, gate_up, inner, sums + place * d,
        lows + place * down_rank,
      )  # fmt: skip
      merge(sums, slab, live * d)
      merge(lows, slab, live * down_rank)
    add_sum(arguments, DOWN_B, TWO, begin, live, x, sums, lows)
    write_rows(x, rows, d, results, ZERO, begin, live)


@jit
def _cost(arguments):
  weights = weights_of(arguments, OUT) + weights_of(arguments, GATE_UP)
  return live_rows(arguments, SIZES_AFTER) * (weights + weights_of(arguments, DOWN))


_AFTER = ffi.Handler("seerjax_after_attention_kept", blocks, _after_attention, _cost)


def after_attention(operands: list[Array]) -> tuple[Array, tuple[Array, Array]]:
  """Returns hidden rows f[n, d], and the gradient's inputs f32[n, d] and f32[r, n, 2 i]."""
  (n, d), (_, slabs, inputs, _) = operands[0].shape, operands[OUT].shape
  features, size = operands[DOWN].shape[2], min(n, CHUNK_ROWS)
  out_rank, rank, down_rank = (operands[place].shape[3] for place in (OUT_A, GATE_UP_A, DOWN_A))
  sums = WAITING * (d + max(out_rank, down_rank))
  own = scratch((d,), (size, 2 * d + slabs * inputs + rank + features + sums))
  hidden = jax.ShapeDtypeStruct((n, d), operands[0].dtype)
  results = hidden, f32_of(n, d), f32_of(slabs, n, 2 * features), own
  x, after, gate_up, _ = _AFTER(results, *operands)
  return x, (after, gate_up)
