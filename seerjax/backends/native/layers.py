"""Native handlers for the parts of a layer around attention (`models.attention`, `models.mlp`).

    attention_inputs   norm, qkv (+ adapter, bias), norms of the heads, rotation
    after_attention    projection (+ adapter), residual, norm, gated MLP (+ adapters), residual

Rows go through all of it in chunks, so intermediate values are never in memory as a whole. A
product's output is one chain (`products`); the contractions of projection and MLP are one chain per
slab, and slabs are added in the tree. An adapter's x @ A @ B continues the chain of x @ W (out,
down: the sum of the slabs), so a B of zeros changes no bit. If rows choose among adapters, they
share x @ W; neighbouring rows with the same adapter share its products.

With a mesh axis, after_attention is three calls of the same functions: partial sums by slab are
results of one call, are gathered, and are operands of the next.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from seerjax import parallel
from seerjax.array_typing import Array
from seerjax.backends.adapters import RowAdapters
from seerjax.backends.native import (
  ffi,
  layers_few,
  layers_gradient,
  layers_kept,
  norms,
  products,
)
from seerjax.backends.native.layer_parts import (
  BIAS,
  COS,
  DOWN,
  DOWN_A,
  DOWN_B,
  GATE_UP,
  GATE_UP_A,
  KEY_NORM,
  LOWS,
  MIXED,
  MLP_NORM,
  NORM,
  ONE,
  OUT,
  OUT_A,
  OUT_B,
  PARTS,
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
  Params,
  add_low,
  add_row,
  add_sum,
  after_operands,
  blocks,
  f32_of,
  gathered_rows,
  input_operands,
  live_rows,
  low_product,
  merge,
  mlp,
  mlp_inputs,
  product,
  projected,
  read_rows,
  rotate,
  scalar,
  scale_low,
  scratch,
  scratch_of,
  waiting,
  weights_of,
  write_rows,
)
from seerjax.backends.native.numbers import jit, round_row, write_row, zero_row
from seerjax.backends.protocol import Stage

# Rows that go through a layer together, so that values between two products stay in cache.
CHUNK_ROWS = 64


@jit
def _attention_inputs(arguments, results, first, last, worker):
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  slabs, columns = ffi.dimension(arguments, QKV, 1), ffi.dimension(arguments, QKV, 3)
  heads, group, c = (
    ffi.dimension(results, 0, 1), ffi.dimension(results, 0, 2), ffi.dimension(results, 0, 3)
  )  # fmt: skip
  rank = ffi.dimension(arguments, QKV_A, 3)
  is_bf16, num_rows = ffi.is_bfloat16(arguments, 0), ffi.integer(arguments, SIZES, 0)
  is_narrow = ffi.is_bfloat16(arguments, NORM)
  layer, eps = ffi.integer(arguments, SIZES, 1), scalar(arguments, SCALARS, 0)
  width = 2 if is_bf16 else 4
  size = min(n, CHUNK_ROWS)
  normed = scratch_of(results, THREE, worker)
  qkv = normed + 4 * size * d
  low = qkv + 4 * size * columns
  scale = low + 4 * size * rank
  bias = scale + 4 * d
  query_scale = bias + 4 * columns
  key_scale = query_scale + 4 * c
  read_rows(arguments, NORM, ZERO, ONE, d, scale)
  has_norms = ffi.dimension(arguments, QUERY_NORM, 0) > 0
  if has_norms:
    read_rows(arguments, QUERY_NORM, ZERO, ONE, c, query_scale)
    read_rows(arguments, KEY_NORM, ZERO, ONE, c, key_scale)
  has_bias = ffi.dimension(arguments, BIAS, 1) > 0
  own = heads // slabs
  end = min(n, products.BLOCK_ROWS * last)
  for begin in range(products.BLOCK_ROWS * first, end, CHUNK_ROWS):
    rows = min(CHUNK_ROWS, end - begin)
    live = min(max(num_rows - begin, 0), rows)
    read_rows(arguments, ZERO, begin, live, d, normed)
    for row in range(live):
      at = normed + 4 * row * d
      norms.norm_row(at, scale, d, eps, is_bf16, is_narrow, at)
    low_product(arguments, SIZES, QKV_A, ZERO, begin, normed, d, live, low)
    scale_low(arguments, SIZES, SCALARS, ZERO, begin, rank, live, low)
    for slab in range(slabs):
      product(arguments, QKV, layer, slab, normed, d, live, qkv, ZERO)
      add_low(arguments, SIZES, QKV_B, ZERO, slab, begin, low, live, qkv)
      round_row(qkv, is_bf16, live * columns)
      if has_bias:
        read_rows(arguments, BIAS, slab, ONE, columns, bias)
        for row in range(live):
          add_row(qkv + 4 * row * columns, bias, columns)
        round_row(qkv, is_bf16, live * columns)
      for row in range(live):
        place = begin + row
        cos = ffi.address(arguments, COS) + 4 * place * (c // 2)
        sin = ffi.address(arguments, SIN) + 4 * place * (c // 2)
        for head in range(own * (group + 2)):
          at = qkv + 4 * (row * columns + head * c)
          is_query, is_key = head < own * group, head < own * (group + 1)
          if is_key and has_norms:
            own_scale = query_scale if is_query else key_scale
            norms.norm_row(at, own_scale, c, eps, is_bf16, is_narrow, at)
          if is_key:
            rotate(at, cos, sin, c)
          index = place * heads + slab * own
          if is_query:
            target = ffi.address(results, 0) + width * (index * group + head) * c
          elif is_key:
            target = ffi.address(results, 1) + width * (index + head - own * group) * c
          else:
            target = ffi.address(results, 2) + width * (index + head - own * (group + 1)) * c
          write_row(at, target, is_bf16, c)
    for result in range(3):
      count = heads * c * (group if result == 0 else 1)
      dead = ffi.address(results, result) + width * (begin + live) * count
      zero_row(dead, is_bf16, (rows - live) * count)


@jit
def _after_attention(arguments, results, first, last, worker):
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  slabs, features = ffi.dimension(arguments, OUT, 1), ffi.dimension(arguments, DOWN, 2)
  inputs = slabs * ffi.dimension(arguments, OUT, 2)
  out_rank, rank = ffi.dimension(arguments, OUT_A, 3), ffi.dimension(arguments, GATE_UP_A, 3)
  down_rank = ffi.dimension(arguments, DOWN_A, 3)
  num_rows, size = ffi.integer(arguments, SIZES_AFTER, 0), min(n, CHUNK_ROWS)
  scale = scratch_of(results, ONE, worker)
  x = scale + 4 * d
  mixed = x + 4 * size * d
  normed = mixed + 4 * size * inputs
  low = normed + 4 * size * d
  inner = low + 4 * size * rank
  sums = inner + 8 * size * features
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
    mlp_inputs(arguments, begin, live, x, scale, normed, low)
    for slab in range(slabs):
      place = 4 * waiting(slab) * live
      to = lows + place * down_rank
      mlp(arguments, slab, begin, live, normed, low, inner, sums + place * d, to)
      merge(sums, slab, live * d)
      merge(lows, slab, live * down_rank)
    add_sum(arguments, DOWN_B, TWO, begin, live, x, sums, lows)
    write_rows(x, rows, d, results, ZERO, begin, live)


@jit
def _project(arguments, results, first, last, worker):
  """Computes the first part with a mesh axis: partial sums f32[r, n, d] and f32[r, n, rank]."""
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  slabs, rank = ffi.dimension(arguments, OUT, 1), ffi.dimension(arguments, OUT_A, 3)
  inputs, num_rows = slabs * ffi.dimension(arguments, OUT, 2), ffi.integer(arguments, 2, 0)
  mixed = scratch_of(results, TWO, worker)
  end = min(num_rows, products.BLOCK_ROWS * last)
  for begin in range(products.BLOCK_ROWS * first, end, CHUNK_ROWS):
    rows = min(CHUNK_ROWS, end - begin)
    read_rows(arguments, MIXED, begin, rows, inputs, mixed)
    for slab in range(slabs):
      place = 4 * (slab * n + begin)
      sums, lows = ffi.address(results, 0) + place * d, ffi.address(results, 1) + place * rank
      projected(arguments, slab, begin, rows, mixed, sums, lows)


@jit
def _between(arguments, results, first, last, worker):
  """Computes the part between two gathers: hidden rows f[n, d], partial sums like `_project`."""
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  slabs, features = ffi.dimension(arguments, DOWN, 1), ffi.dimension(arguments, DOWN, 2)
  rank, down_rank = (
    ffi.dimension(arguments, GATE_UP_A, 3), ffi.dimension(arguments, DOWN_A, 3)
  )  # fmt: skip
  num_rows, size = ffi.integer(arguments, SIZES_AFTER, 0), min(n, CHUNK_ROWS)
  scale = scratch_of(results, THREE, worker)
  x = scale + 4 * d
  normed = x + 4 * size * d
  low = normed + 4 * size * d
  inner = low + 4 * size * rank
  sums = inner + 8 * size * features
  lows = sums + 4 * WAITING * size * d
  read_rows(arguments, MLP_NORM, ZERO, ONE, d, scale)
  end = min(n, products.BLOCK_ROWS * last)
  for begin in range(products.BLOCK_ROWS * first, end, CHUNK_ROWS):
    rows = min(CHUNK_ROWS, end - begin)
    live = min(max(num_rows - begin, 0), rows)
    read_rows(arguments, ZERO, begin, live, d, x)
    gathered_rows(arguments, PARTS, begin, live, sums)
    gathered_rows(arguments, LOWS, begin, live, lows)
    add_sum(arguments, OUT_B, ZERO, begin, live, x, sums, lows)
    write_rows(x, rows, d, results, ZERO, begin, live)
    mlp_inputs(arguments, begin, live, x, scale, normed, low)
    for slab in range(slabs):
      place = 4 * (slab * n + begin)
      to, to_low = ffi.address(results, 1) + place * d, ffi.address(results, 2) + place * down_rank
      mlp(arguments, slab, begin, live, normed, low, inner, to, to_low)


@jit
def _finish(arguments, results, first, last, worker):
  """Computes the last part with a mesh axis: hidden rows f[n, d]."""
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  num_rows, size = ffi.integer(arguments, SIZES_AFTER, 0), min(n, CHUNK_ROWS)
  x = scratch_of(results, ONE, worker)
  sums = x + 4 * size * d
  lows = sums + 4 * WAITING * size * d
  end = min(n, products.BLOCK_ROWS * last)
  for begin in range(products.BLOCK_ROWS * first, end, CHUNK_ROWS):
    rows = min(CHUNK_ROWS, end - begin)
    live = min(max(num_rows - begin, 0), rows)
    read_rows(arguments, ZERO, begin, live, d, x)
    gathered_rows(arguments, PARTS, begin, live, sums)
    gathered_rows(arguments, LOWS, begin, live, lows)
    add_sum(arguments, DOWN_B, TWO, begin, live, x, sums, lows)
    write_rows(x, rows, d, results, ZERO, begin, live)


@jit
def _cost_of_inputs(arguments):
  return live_rows(arguments, SIZES) * weights_of(arguments, QKV)


@jit
def _cost_of_projection(arguments):
  return live_rows(arguments, SIZES_AFTER) * weights_of(arguments, OUT)


@jit
def _cost_of_mlp(arguments):
  weights = weights_of(arguments, GATE_UP) + weights_of(arguments, DOWN)
  return live_rows(arguments, SIZES_AFTER) * weights


@jit
def _cost_after(arguments):
  return _cost_of_projection(arguments) + _cost_of_mlp(arguments)


_INPUTS = ffi.Handler("seerjax_attention_inputs", blocks, _attention_inputs, _cost_of_inputs)
_AFTER = ffi.Handler("seerjax_after_attention", blocks, _after_attention, _cost_after)
_PROJECT = ffi.Handler("seerjax_after_attention_project", blocks, _project, _cost_of_projection)
_BETWEEN = ffi.Handler("seerjax_after_attention_between", blocks, _between, _cost_of_mlp)
_FINISH = ffi.Handler("seerjax_after_attention_finish", blocks, _finish)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention_inputs(stage: Stage, weights: Params, rows: Any, num_rows: Array) -> Any:
  """Like `adapted_attention_inputs` without adapters by row, but with a gradient."""
  return adapted_attention_inputs(stage, weights, rows, num_rows, None)


def adapted_attention_inputs(
  stage: Stage, weights: Params, rows: Any, num_rows: Array, chosen: RowAdapters | None
) -> Any:
  """Maps x f[n, d], cos and sin f32[n, c / 2] to f[n, k, g, c], f[n, k, c], f[n, k, c].

  Args:
    stage: stage of the model.
    weights: weights of one layer, or of stacked ones (`tiles.LayerSlabs`); the local slabs.
    rows: x, cos, sin.
    num_rows: i32[]; rows from there on are zero.
    chosen: the rows' adapters; without a gradient.
  """
  x, c, group = rows[0], stage.shape.kind.attention.head_dim, stage.shape.kind.attention.group
  operands = input_operands(stage, weights, rows, num_rows, chosen)
  (n, d), (_, slabs, _, columns) = x.shape, operands[QKV].shape
  rank = operands[QKV_A].shape[3]
  heads = slabs * (columns // (c * (group + 2)))
  of = lambda *shape: jax.ShapeDtypeStruct(shape, x.dtype)
  results = of(n, heads, group, c), of(n, heads, c), of(n, heads, c)
  if n <= layers_few.MOST_ROWS:
    return layers_few.attention_inputs(results, operands)
  own = scratch((min(n, CHUNK_ROWS), d + columns + rank), (d + columns + 2 * c,))
  return _INPUTS((*results, own), *operands)[:3]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def after_attention(stage: Stage, weights: Params, rows: Any, num_rows: Array) -> Array:
  """Like `adapted_after_attention` without adapters by row, but with a gradient."""
  return adapted_after_attention(stage, weights, rows, num_rows, None)


def adapted_after_attention(
  stage: Stage, weights: Params, rows: Any, num_rows: Array, chosen: RowAdapters | None
) -> Array:
  """Maps hidden rows f[n, d] and attention outputs f[n, k, g, c] to hidden rows f[n, d].

  Args:
    stage: stage of the model.
    weights: as in `attention_inputs`.
    rows: x, mixed.
    num_rows: i32[]; rows from there on are zero.
    chosen: the rows' adapters; without a gradient.
  """
  x = rows[0]
  operands = after_operands(stage, weights, rows, num_rows, chosen)
  (n, d), (_, slabs, inputs, _) = x.shape, operands[OUT].shape
  features, size = operands[DOWN].shape[2], min(n, CHUNK_ROWS)
  out_rank, rank, down_rank = (operands[i].shape[3] for i in (OUT_A, GATE_UP_A, DOWN_A))
  hidden = jax.ShapeDtypeStruct(x.shape, x.dtype)
  sums = WAITING * (d + max(out_rank, down_rank))
  mlp = d + rank + 2 * features
  if stage.axis is None and n <= layers_few.MOST_ROWS:
    return layers_few.after_attention(hidden, operands)
  if stage.axis is None:
    own = scratch((d,), (size, d + slabs * inputs + mlp + sums))
    return _AFTER((hidden, own), *operands)[0]

  parts, lows = _projection(stage, operands)
  own = scratch((d,), (size, d + mlp + sums))
  results = (hidden, f32_of(slabs, n, d), f32_of(slabs, n, down_rank), own)
  x, *partials, _ = _BETWEEN(results, *operands, parts, lows)
  own = scratch((size, d + sums))
  partials = parallel.gather_slabs(partials, stage.axis)
  return _FINISH((hidden, own), x, *operands[1:], *partials)[0]


def _projection(stage: Stage, operands: list[Array]) -> tuple[Array, Array]:
  """Returns all slabs' partial sums of the projection, f32[r, n, d], and of its adapter's x @ A."""
  (n, d), (_, slabs, inputs, _) = operands[0].shape, operands[OUT].shape
  own = scratch((min(n, CHUNK_ROWS), slabs * inputs))
  partials = f32_of(slabs, n, d), f32_of(slabs, n, operands[OUT_A].shape[3])
  parts, lows, _ = _PROJECT((*partials, own), *operands)
  return parallel.gather_slabs((parts, lows), stage.axis)


def _inputs_forward(stage: Stage, weights: Params, rows: Any, num_rows: Array) -> Any:
  return attention_inputs(stage, weights, rows, num_rows), (weights, rows, num_rows)


def _inputs_backward(stage: Stage, residuals: Any, cotangent: Any) -> Any:
  weights, rows, num_rows = residuals
  gradient = layers_gradient.attention_inputs_gradient(stage, weights, rows, num_rows, cotangent)
  return *gradient, None


def _after_forward(stage: Stage, weights: Params, rows: Any, num_rows: Array) -> Any:
  if stage.axis is not None:
    return after_attention(stage, weights, rows, num_rows), (weights, rows, num_rows, None)
  x, kept = layers_kept.after_attention(after_operands(stage, weights, rows, num_rows))
  return x, (weights, rows, num_rows, kept)


def _after_backward(stage: Stage, residuals: Any, cotangent: Array) -> Any:
  weights, rows, num_rows, found = residuals
  if stage.axis is not None:
    operands = after_operands(stage, weights, rows, num_rows)
    operands[0] = parallel.after(operands[0], cotangent)
    found = _projection(stage, operands)
  gradient = layers_gradient.after_attention_gradient(
    stage, weights, rows, num_rows, cotangent, found
  )
  return *gradient, None


attention_inputs.defvjp(_inputs_forward, _inputs_backward)
after_attention.defvjp(_after_forward, _after_backward)
