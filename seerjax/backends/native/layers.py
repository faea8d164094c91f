"""What surrounds attention in a layer (`models.attention`, `models.mlp`), natively.

    attention_inputs   norm, qkv (+ adapter, bias), norms of the heads, rotation
    after_attention    projection (+ adapter), residual, norm, gated MLP (+ adapters), residual

Rows go through all of it in chunks, so that what lies between is never in memory as a whole. A
product's output is one chain (`products`); the projection's and the MLP's contractions are one
chain a slab, and slabs are added in the tree. An adapter's x @ A @ B goes on with the chain of
x @ W (out, down: with the sum of the slabs), so that a B of zeros changes no bit.

With a mesh axis after_attention is three calls of the same functions: partial sums by slab leave
one, are gathered, and enter the next.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seerjax import parallel
from seerjax.array_typing import Array
from seerjax.backends.native import ffi, norms, products
from seerjax.backends.native.numbers import (
  exp,
  f32,
  jit,
  read_row,
  round_row,
  write_row,
  zero_row,
)
from seerjax.backends.native.pointers import floats
from seerjax.backends.protocol import Stage
from seerjax.backends.tiled import Tiled
from seerjax.numerics import NumericsConfig
from seerjax.ops import tiles

# Rows that go through a layer together: what lies between two products of theirs stays in cache.
CHUNK_ROWS = 64
# Sums of slabs that wait for a neighbour in a tree of up to 8, the newest included.
_WAITING = 4

# Weights of one layer, of this device's slabs.
Params = dict[str, Any]


def _numbers(first: int, last: int) -> list[np.int64]:
  """Returns numbers that numba does not take for literals, for which it would compile anew."""
  return [np.int64(number) for number in range(first, last + 1)]


_ZERO, _ONE, _TWO, _THREE = _numbers(0, 3)
# Operands of `attention_inputs`, behind the rows.
_COS, _SIN, _SIZES, _SCALARS, _NORM, _QKV = _numbers(1, 6)
_BIAS, _QUERY_NORM, _KEY_NORM, _QKV_A, _QKV_B = _numbers(7, 11)
# Operands of every part of `after_attention`; the last two of its later parts alone.
_MIXED, _SIZES_AFTER, _SCALARS_AFTER, _OUT, _OUT_A, _OUT_B, _MLP_NORM = _numbers(1, 7)
_GATE_UP, _GATE_UP_A, _GATE_UP_B, _DOWN, _DOWN_A, _DOWN_B = _numbers(8, 13)
_PARTS, _LOWS = _numbers(14, 15)


@jit
def blocks(arguments):
  """Items of a call: blocks of 4 rows of the first operand."""
  return (ffi.dimension(arguments, 0, 0) + products.BLOCK_ROWS - 1) // products.BLOCK_ROWS


@jit
def scalar(arguments, operand, place):
  """An element of an f32 operand."""
  return floats(ffi.address(arguments, operand))[place]


@jit
def scratch_of(results, place, worker):
  """Address of a worker's row of scratch memory f32[w, ...]."""
  return ffi.address(results, place) + 4 * worker * ffi.dimension(results, place, 1)


@jit
def slab_of(arguments, operand, layer, slab):
  """Address of a slab of weights f[l, r, a, b]; of one layer the index is not looked at."""
  layers, slabs = ffi.dimension(arguments, operand, 0), ffi.dimension(arguments, operand, 1)
  size = ffi.dimension(arguments, operand, 2) * ffi.dimension(arguments, operand, 3)
  width = 2 if ffi.is_bfloat16(arguments, operand) else 4
  return ffi.address(arguments, operand) + width * (min(layer, layers - 1) * slabs + slab) * size


@jit
def read_rows(arguments, operand, begin, rows, count, target):
  """Copies rows of an operand f[n, ...], `count` elements each, to floats."""
  is_bf16 = ffi.is_bfloat16(arguments, operand)
  width = 2 if is_bf16 else 4
  source = ffi.address(arguments, operand) + width * begin * count
  read_row(source, is_bf16, target, rows * count)


@jit
def write_rows(source, rows, count, results, place, begin, live):
  """Writes floats to rows of a result f[n, ...]; zeros to those of `rows` that are not live."""
  is_bf16 = ffi.is_bfloat16(results, place)
  width = 2 if is_bf16 else 4
  target = ffi.address(results, place) + width * begin * count
  write_row(source, target, is_bf16, live * count)
  zero_row(target + width * live * count, is_bf16, (rows - live) * count)


@jit
def add_row(target, other, count):
  """Adds `count` floats at an address to those at another."""
  x, y = floats(target), floats(other)
  for i in range(count):
    x[i] = x[i] + y[i]


@jit
def scale_row(x, scale, is_bf16, count):
  """Scales `count` floats in place and rounds them."""
  values = floats(x)
  for i in range(count):
    values[i] = values[i] * scale
  round_row(x, is_bf16, count)


@jit
def rotate(head, cos, sin, features):
  """Turns one head in place, in float32 (`ops.rotary`)."""
  half = features // 2
  x, c, s = floats(head), floats(cos), floats(sin)
  for i in range(half):
    first, second = x[i], x[i + half]
    x[i] = first * c[i] - second * s[i]
    x[i + half] = second * c[i] + first * s[i]


@jit
def _attention_inputs(arguments, results, first, last, worker):
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  slabs, columns = ffi.dimension(arguments, _QKV, 1), ffi.dimension(arguments, _QKV, 3)
  heads, group, c = (
    ffi.dimension(results, 0, 1), ffi.dimension(results, 0, 2), ffi.dimension(results, 0, 3)
  )  # fmt: skip
  rank = ffi.dimension(arguments, _QKV_A, 3)
  is_bf16, num_rows = ffi.is_bfloat16(arguments, 0), ffi.integer(arguments, _SIZES, 0)
  layer, eps = ffi.integer(arguments, _SIZES, 1), scalar(arguments, _SCALARS, 0)
  width = 2 if is_bf16 else 4
  size = min(n, CHUNK_ROWS)
  normed = scratch_of(results, _THREE, worker)
  qkv = normed + 4 * size * d
  low = qkv + 4 * size * columns
  scale = low + 4 * size * rank
  bias = scale + 4 * d
  query_scale = bias + 4 * columns
  key_scale = query_scale + 4 * c
  read_rows(arguments, _NORM, _ZERO, _ONE, d, scale)
  has_norms = ffi.dimension(arguments, _QUERY_NORM, 0) > 0
  if has_norms:
    read_rows(arguments, _QUERY_NORM, _ZERO, _ONE, c, query_scale)
    read_rows(arguments, _KEY_NORM, _ZERO, _ONE, c, key_scale)
  has_bias = ffi.dimension(arguments, _BIAS, 1) > 0
  own = heads // slabs
  end = min(n, products.BLOCK_ROWS * last)
  for begin in range(products.BLOCK_ROWS * first, end, CHUNK_ROWS):
    rows = min(CHUNK_ROWS, end - begin)
    live = min(max(num_rows - begin, 0), rows)
    read_rows(arguments, _ZERO, begin, live, d, normed)
    for row in range(live):
      at = normed + 4 * row * d
      norms.norm_row(at, scale, d, eps, is_bf16, at)
    _product(arguments, _QKV_A, _ZERO, _ZERO, normed, d, live, low, _ZERO)
    scale_row(low, scalar(arguments, _SCALARS, 1), is_bf16, live * rank)
    for slab in range(slabs):
      _product(arguments, _QKV, layer, slab, normed, d, live, qkv, _ZERO)
      _product(arguments, _QKV_B, _ZERO, slab, low, rank, live, qkv, _ONE)
      round_row(qkv, is_bf16, live * columns)
      if has_bias:
        read_rows(arguments, _BIAS, slab, _ONE, columns, bias)
        for row in range(live):
          add_row(qkv + 4 * row * columns, bias, columns)
        round_row(qkv, is_bf16, live * columns)
      for row in range(live):
        place = begin + row
        cos = ffi.address(arguments, _COS) + 4 * place * (c // 2)
        sin = ffi.address(arguments, _SIN) + 4 * place * (c // 2)
        for head in range(own * (group + 2)):
          at = qkv + 4 * (row * columns + head * c)
          is_query, is_key = head < own * group, head < own * (group + 1)
          if is_key and has_norms:
            norms.norm_row(at, query_scale if is_query else key_scale, c, eps, is_bf16, at)
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
def _product(arguments, operand, layer, slab, x, x_row, rows, out, is_added):
  """out[rows, b] (+)= x[rows, a] @ a slab f[a, b] of weights f[l, r, a, b]."""
  k, columns = ffi.dimension(arguments, operand, 2), ffi.dimension(arguments, operand, 3)
  products.product(
    x, x_row, _ONE, rows, slab_of(arguments, operand, layer, slab),
    ffi.is_bfloat16(arguments, operand), columns, columns, k, out, columns, is_added,
  )  # fmt: skip


@jit
def _waiting(slab):
  """How many sums wait while a tree of slabs comes to `slab`: its bits that are one."""
  count = 0
  while slab > 0:
    count += slab & 1
    slab >>= 1
  return count


@jit
def _merge(sums, slab, count):
  """Adds what waits, now that the sum of `slab` stands behind it (`parallel.tree_sum`)."""
  place = _waiting(slab)
  while slab & 1:
    add_row(sums + 4 * (place - 1) * count, sums + 4 * place * count, count)
    place -= 1
    slab >>= 1


@jit
def _gathered(arguments, operand, begin, rows, sums):
  """Adds slabs f32[r, n, d] in the tree: the rows' sum is the first of `sums`."""
  slabs, n = ffi.dimension(arguments, operand, 0), ffi.dimension(arguments, operand, 1)
  columns = ffi.dimension(arguments, operand, 2)
  count = rows * columns
  for slab in range(slabs):
    source = ffi.address(arguments, operand) + 4 * (slab * n + begin) * columns
    read_row(source, False, sums + 4 * _waiting(slab) * count, count)
    _merge(sums, slab, count)


@jit
def _add(arguments, operand, scale, rows, x, sums, lows):
  """x += the slabs' sum and its adapter's term, whose B is the operand, rounded."""
  is_bf16 = ffi.is_bfloat16(arguments, 0)
  rank, d = ffi.dimension(arguments, operand, 2), ffi.dimension(arguments, operand, 3)
  scale_row(lows, scale, is_bf16, rows * rank)
  _product(arguments, operand, _ZERO, _ZERO, lows, rank, rows, sums, _ONE)
  round_row(sums, is_bf16, rows * d)
  add_row(x, sums, rows * d)
  round_row(x, is_bf16, rows * d)


@jit
def _projected(arguments, slab, rows, mixed, sums, lows):
  """A slab's part of the output projection, and of its adapter's x @ A."""
  width = ffi.dimension(arguments, _OUT, 1) * ffi.dimension(arguments, _OUT, 2)
  at = mixed + 4 * slab * ffi.dimension(arguments, _OUT, 2)
  layer = ffi.integer(arguments, _SIZES_AFTER, 1)
  _product(arguments, _OUT, layer, slab, at, width, rows, sums, _ZERO)
  _product(arguments, _OUT_A, _ZERO, slab, at, width, rows, lows, _ZERO)


@jit
def _norm(arguments, rows, x, scale, normed, low):
  """What the MLP reads of the residual stream: its norm, and its adapter's x @ A."""
  is_bf16, d = ffi.is_bfloat16(arguments, 0), ffi.dimension(arguments, 0, 1)
  eps, rank = scalar(arguments, _SCALARS_AFTER, 0), ffi.dimension(arguments, _GATE_UP_A, 3)
  for row in range(rows):
    at = 4 * row * d
    norms.norm_row(x + at, scale, d, eps, is_bf16, normed + at)
  _product(arguments, _GATE_UP_A, _ZERO, _ZERO, normed, d, rows, low, _ZERO)
  scale_row(low, scalar(arguments, _SCALARS_AFTER, 2), is_bf16, rows * rank)


@jit
def _mlp(arguments, slab, rows, normed, low, inner, sums, lows):
  """A slab's part of the MLP, and of its last adapter's x @ A; `inner` is f32[rows, 2 i]."""
  is_bf16, layer = ffi.is_bfloat16(arguments, 0), ffi.integer(arguments, _SIZES_AFTER, 1)
  d, rank = ffi.dimension(arguments, 0, 1), ffi.dimension(arguments, _GATE_UP_A, 3)
  features = ffi.dimension(arguments, _DOWN, 2)
  _product(arguments, _GATE_UP, layer, slab, normed, d, rows, inner, _ZERO)
  _product(arguments, _GATE_UP_B, _ZERO, slab, low, rank, rows, inner, _ONE)
  for row in range(rows):
    at = inner + 8 * row * features
    gate, up = floats(at), floats(at + 4 * features)
    for i in range(features):
      gate[i] = gate[i] / (f32(1.0) + exp(-gate[i])) * up[i]
    round_row(at, is_bf16, features)
  _product(arguments, _DOWN, layer, slab, inner, 2 * features, rows, sums, _ZERO)
  _product(arguments, _DOWN_A, _ZERO, slab, inner, 2 * features, rows, lows, _ZERO)


@jit
def _after_attention(arguments, results, first, last, worker):
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  slabs, features = ffi.dimension(arguments, _OUT, 1), ffi.dimension(arguments, _DOWN, 2)
  inputs = slabs * ffi.dimension(arguments, _OUT, 2)
  out_rank, rank = ffi.dimension(arguments, _OUT_A, 3), ffi.dimension(arguments, _GATE_UP_A, 3)
  down_rank = ffi.dimension(arguments, _DOWN_A, 3)
  num_rows, size = ffi.integer(arguments, _SIZES_AFTER, 0), min(n, CHUNK_ROWS)
  scale = scratch_of(results, _ONE, worker)
  x = scale + 4 * d
  mixed = x + 4 * size * d
  normed = mixed + 4 * size * inputs
  low = normed + 4 * size * d
  inner = low + 4 * size * rank
  sums = inner + 8 * size * features
  lows = sums + 4 * _WAITING * size * d
  read_rows(arguments, _MLP_NORM, _ZERO, _ONE, d, scale)
  end = min(n, products.BLOCK_ROWS * last)
  for begin in range(products.BLOCK_ROWS * first, end, CHUNK_ROWS):
    rows = min(CHUNK_ROWS, end - begin)
    live = min(max(num_rows - begin, 0), rows)
    read_rows(arguments, _ZERO, begin, live, d, x)
    read_rows(arguments, _MIXED, begin, live, inputs, mixed)
    for slab in range(slabs):
      place = 4 * _waiting(slab) * live
      _projected(arguments, slab, live, mixed, sums + place * d, lows + place * out_rank)
      _merge(sums, slab, live * d)
      _merge(lows, slab, live * out_rank)
    _add(arguments, _OUT_B, scalar(arguments, _SCALARS_AFTER, 1), live, x, sums, lows)
    _norm(arguments, live, x, scale, normed, low)
    for slab in range(slabs):
      place = 4 * _waiting(slab) * live
      to = lows + place * down_rank
      _mlp(arguments, slab, live, normed, low, inner, sums + place * d, to)
      _merge(sums, slab, live * d)
      _merge(lows, slab, live * down_rank)
    _add(arguments, _DOWN_B, scalar(arguments, _SCALARS_AFTER, 3), live, x, sums, lows)
    write_rows(x, rows, d, results, _ZERO, begin, live)


@jit
def _project(arguments, results, first, last, worker):
  """The first part with a mesh axis: partial sums f32[r, n, d] and f32[r, n, rank]."""
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  slabs, rank = ffi.dimension(arguments, _OUT, 1), ffi.dimension(arguments, _OUT_A, 3)
  inputs, num_rows = slabs * ffi.dimension(arguments, _OUT, 2), ffi.integer(arguments, 2, 0)
  mixed = scratch_of(results, _TWO, worker)
  end = min(num_rows, products.BLOCK_ROWS * last)
  for begin in range(products.BLOCK_ROWS * first, end, CHUNK_ROWS):
    rows = min(CHUNK_ROWS, end - begin)
    read_rows(arguments, _MIXED, begin, rows, inputs, mixed)
    for slab in range(slabs):
      place = 4 * (slab * n + begin)
      sums, lows = ffi.address(results, 0) + place * d, ffi.address(results, 1) + place * rank
      _projected(arguments, slab, rows, mixed, sums, lows)


@jit
def _between(arguments, results, first, last, worker):
  """The part between two gatherings: hidden rows f[n, d], and partial sums as `_project`'s."""
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  slabs, features = ffi.dimension(arguments, _DOWN, 1), ffi.dimension(arguments, _DOWN, 2)
  rank, down_rank = (
    ffi.dimension(arguments, _GATE_UP_A, 3), ffi.dimension(arguments, _DOWN_A, 3)
  )  # fmt: skip
  num_rows, size = ffi.integer(arguments, _SIZES_AFTER, 0), min(n, CHUNK_ROWS)
  scale = scratch_of(results, _THREE, worker)
  x = scale + 4 * d
  normed = x + 4 * size * d
  low = normed + 4 * size * d
  inner = low + 4 * size * rank
  sums = inner + 8 * size * features
  lows = sums + 4 * _WAITING * size * d
  read_rows(arguments, _MLP_NORM, _ZERO, _ONE, d, scale)
  end = min(n, products.BLOCK_ROWS * last)
  for begin in range(products.BLOCK_ROWS * first, end, CHUNK_ROWS):
    rows = min(CHUNK_ROWS, end - begin)
    live = min(max(num_rows - begin, 0), rows)
    read_rows(arguments, _ZERO, begin, live, d, x)
    _gathered(arguments, _PARTS, begin, live, sums)
    _gathered(arguments, _LOWS, begin, live, lows)
    _add(arguments, _OUT_B, scalar(arguments, _SCALARS_AFTER, 1), live, x, sums, lows)
    write_rows(x, rows, d, results, _ZERO, begin, live)
    _norm(arguments, live, x, scale, normed, low)
    for slab in range(slabs):
      place = 4 * (slab * n + begin)
      to, to_low = ffi.address(results, 1) + place * d, ffi.address(results, 2) + place * down_rank
      _mlp(arguments, slab, live, normed, low, inner, to, to_low)


@jit
def _finish(arguments, results, first, last, worker):
  """The last part with a mesh axis: hidden rows f[n, d]."""
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  num_rows, size = ffi.integer(arguments, _SIZES_AFTER, 0), min(n, CHUNK_ROWS)
  x = scratch_of(results, _ONE, worker)
  sums = x + 4 * size * d
  lows = sums + 4 * _WAITING * size * d
  end = min(n, products.BLOCK_ROWS * last)
  for begin in range(products.BLOCK_ROWS * first, end, CHUNK_ROWS):
    rows = min(CHUNK_ROWS, end - begin)
    live = min(max(num_rows - begin, 0), rows)
    read_rows(arguments, _ZERO, begin, live, d, x)
    _gathered(arguments, _PARTS, begin, live, sums)
    _gathered(arguments, _LOWS, begin, live, lows)
    _add(arguments, _DOWN_B, scalar(arguments, _SCALARS_AFTER, 3), live, x, sums, lows)
    write_rows(x, rows, d, results, _ZERO, begin, live)


_INPUTS = ffi.Handler("seerjax_attention_inputs", blocks, _attention_inputs)
_AFTER = ffi.Handler("seerjax_after_attention", blocks, _after_attention)
_PROJECT = ffi.Handler("seerjax_after_attention_project", blocks, _project)
_BETWEEN = ffi.Handler("seerjax_after_attention_between", blocks, _between)
_FINISH = ffi.Handler("seerjax_after_attention_finish", blocks, _finish)


class Leaf(NamedTuple):
  """Weights as handlers read them.

  Attributes:
    slabs: f[l, r, a, b]; l and r are 1 where there is nothing to choose from.
    layer: i32[], which of the l.
  """

  slabs: Array
  layer: Array


def layered(leaf: Array | tiles.LayerSlabs) -> Leaf:
  """Returns the slabs f[r, a, b] of one layer, or of the layer of many, uncut."""
  if isinstance(leaf, tiles.LayerSlabs):
    return Leaf(leaf.layers, leaf.index)
  return Leaf(leaf[None], jnp.int32(0))


def adapter(weights: Params, name: str) -> tuple[Array, Array, Array]:
  """Returns (A f[1, r, a, rank], B f[1, r, rank, b], scale f32[]); rank 0 where there is none.

  The one of the two that all slabs share has one slab.
  """
  slabs = layered(weights[name]).slabs
  of_columns = name in ("qkv", "gate_up")
  if f"{name}_lora" in weights:
    own = weights[f"{name}_lora"]
    a, b = own["a"], own["b"]
    a, b = (a[None, None], b[None]) if of_columns else (a[None], b[None, None])
    return a, b, own["scale"]
  _, r, rows, columns = slabs.shape
  a = jnp.zeros((1, 1 if of_columns else r, rows, 0), slabs.dtype)
  b = jnp.zeros((1, r if of_columns else 1, 0, columns), slabs.dtype)
  return a, b, jnp.float32(1.0)


def scratch(*shapes: tuple[int, ...]) -> jax.ShapeDtypeStruct:
  """Scratch memory of one worker, which holds these shapes behind each other."""
  return f32_of(1, sum(math.prod(shape) for shape in shapes))


def f32_of(*shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def input_operands(stage: Stage, weights: Params, rows: Any, num_rows: Array) -> list[Array]:
  """Returns the operands of `attention_inputs`."""
  x, cos, sin = rows
  qkv, layer = layered(weights["qkv"])
  a, b, scale = adapter(weights, "qkv")
  none = jnp.zeros((0,), x.dtype)
  return [
    x,
    cos,
    sin,
    jnp.stack([num_rows, layer]).astype(jnp.int32),
    jnp.stack([jnp.float32(stage.shape.norm_eps), scale]),
    weights["attention_norm"],
    qkv,
    weights["qkv_bias"] if "qkv_bias" in weights else jnp.zeros((qkv.shape[1], 0), x.dtype),
    weights.get("query_norm", none),
    weights.get("key_norm", none),
    a,
    b,
  ]


def after_operands(stage: Stage, weights: Params, rows: Any, num_rows: Array) -> list[Array]:
  """Returns the operands of `after_attention`."""
  x, mixed = rows
  out, layer = layered(weights["out"])
  gate_up, down = layered(weights["gate_up"]).slabs, layered(weights["down"]).slabs
  out_a, out_b, out_scale = adapter(weights, "out")
  gate_up_a, gate_up_b, gate_up_scale = adapter(weights, "gate_up")
  down_a, down_b, down_scale = adapter(weights, "down")
  eps = jnp.float32(stage.shape.norm_eps)
  return [
    x,
    mixed,
    jnp.stack([num_rows, layer]).astype(jnp.int32),
    jnp.stack([eps, out_scale, gate_up_scale, down_scale]),
    out,
    out_a,
    out_b,
    weights["mlp_norm"],
    gate_up,
    gate_up_a,
    gate_up_b,
    down,
    down_a,
    down_b,
  ]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention_inputs(stage: Stage, weights: Params, rows: Any, num_rows: Array) -> Any:
  """Hidden rows f[n, d], cos and sin f32[n, c / 2] -> f[n, k, g, c], f[n, k, c], f[n, k, c].

  Args:
    stage: of the model.
    weights: of one layer, or of stacked ones (`tiles.LayerSlabs`); the local slabs.
    rows: x, cos, sin.
    num_rows: i32[]; rows from there on are zero.
  """
  x, c, group = rows[0], stage.shape.head_dim, stage.shape.group
  operands = input_operands(stage, weights, rows, num_rows)
  (n, d), (_, slabs, _, columns) = x.shape, operands[_QKV].shape
  rank = operands[_QKV_A].shape[3]
  heads = slabs * (columns // (c * (group + 2)))
  of = lambda *shape: jax.ShapeDtypeStruct(shape, x.dtype)
  own = scratch((min(n, CHUNK_ROWS), d + columns + rank), (d + columns + 2 * c,))
  results = (of(n, heads, group, c), of(n, heads, c), of(n, heads, c), own)
  return _INPUTS(results, *operands)[:3]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def after_attention(stage: Stage, weights: Params, rows: Any, num_rows: Array) -> Array:
  """Hidden rows f[n, d] and what they attended f[n, k, g, c] -> hidden rows f[n, d].

  Args:
    stage: of the model.
    weights: as `attention_inputs`.
    rows: x, mixed.
    num_rows: i32[]; rows from there on are zero.
  """
  x = rows[0]
  operands = after_operands(stage, weights, rows, num_rows)
  (n, d), (_, slabs, inputs, _) = x.shape, operands[_OUT].shape
  features, size = operands[_DOWN].shape[2], min(n, CHUNK_ROWS)
  out_rank, rank, down_rank = (operands[i].shape[3] for i in (_OUT_A, _GATE_UP_A, _DOWN_A))
  hidden = jax.ShapeDtypeStruct(x.shape, x.dtype)
  sums = _WAITING * (d + max(out_rank, down_rank))
  mlp = d + rank + 2 * features
  if stage.axis is None:
    own = scratch((d,), (size, d + slabs * inputs + mlp + sums))
    return _AFTER((hidden, own), *operands)[0]

  def gathered(*partials: Array) -> list[Array]:
    return [parallel.gather_slabs(part, stage.axis) for part in partials]

  partial = lambda rank: (f32_of(slabs, n, d), f32_of(slabs, n, rank))
  own = scratch((size, slabs * inputs))
  parts, lows, _ = _PROJECT((*partial(out_rank), own), *operands)
  own = scratch((d,), (size, d + mlp + sums))
  results = (hidden, *partial(down_rank), own)
  x, parts, lows, _ = _BETWEEN(results, *operands, *gathered(parts, lows))
  own = scratch((size, d + sums))
  return _FINISH((hidden, own), x, *operands[1:], *gathered(parts, lows))[0]


def _with_residuals(function: Any, stage: Stage, weights: Params, rows: Any, num_rows: Array):
  return function(stage, weights, rows, num_rows), (weights, rows, num_rows)


def _defined_gradient(stage: Stage, residuals: Any, cotangent: Any) -> Any:
  """The gradient of the stage's definition, by XLA."""
  weights, rows, num_rows = residuals
  definition = functools.partial(stage.rows, Tiled(NumericsConfig()), stage.shape, stage.axis)
  run = lambda weights, rows: tiles.all_rows(definition, weights, rows, num_rows)
  _, pull = jax.vjp(run, weights, rows)
  return *pull(cotangent), None


attention_inputs.defvjp(functools.partial(_with_residuals, attention_inputs), _defined_gradient)
after_attention.defvjp(functools.partial(_with_residuals, after_attention), _defined_gradient)
