"""What the handlers of a layer share, forward and backward: operands, rows, slabs and their tree.

An operand is named by its place. Weights are f[l, r, a, b]: one of `l` layers, `r` slabs.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seerjax.array_typing import Array
from seerjax.backends.native import ffi, norms, products, threads
from seerjax.backends.native.numbers import (
  exp,
  f32,
  inlined,
  jit,
  read_row,
  round_row,
  write_row,
  zero_row,
)
from seerjax.backends.native.pointers import floats
from seerjax.backends.protocol import Stage
from seerjax.ops import tiles

# Sums of slabs that wait for a neighbour in a tree of up to 8, the newest included.
WAITING = 4

# Weights of one layer, of this device's slabs.
Params = dict[str, Any]


def _numbers(first: int, last: int) -> list[np.int64]:
  """Returns numbers that numba does not take for literals, for which it would compile anew."""
  return [np.int64(number) for number in range(first, last + 1)]


ZERO, ONE, TWO, THREE = _numbers(0, 3)
NO = np.bool_(False)
# Operands of `attention_inputs`, behind the rows.
COS, SIN, SIZES, SCALARS, NORM, QKV = _numbers(1, 6)
BIAS, QUERY_NORM, KEY_NORM, QKV_A, QKV_B = _numbers(7, 11)
# Operands of every part of `after_attention`; the last two of its later parts alone.
MIXED, SIZES_AFTER, SCALARS_AFTER, OUT, OUT_A, OUT_B, MLP_NORM = _numbers(1, 7)
GATE_UP, GATE_UP_A, GATE_UP_B, DOWN, DOWN_A, DOWN_B = _numbers(8, 13)
PARTS, LOWS = _numbers(14, 15)


@jit
def blocks(arguments):
  """Items of a call: blocks of 4 rows of the first operand."""
  return (ffi.dimension(arguments, 0, 0) + products.BLOCK_ROWS - 1) // products.BLOCK_ROWS


@inlined
def scalar(arguments, operand, place):
  """An element of an f32 operand."""
  return floats(ffi.address(arguments, operand))[place]


@inlined
def scratch_of(results, place, worker):
  """Address of a worker's row of scratch memory f32[w, ...]."""
  return ffi.address(results, place) + 4 * worker * ffi.dimension(results, place, 1)


@inlined
def slab_of(arguments, operand, layer, slab):
  """Address of a slab of weights f[l, r, a, b]; of one layer the index is not looked at."""
  layers, slabs = ffi.dimension(arguments, operand, 0), ffi.dimension(arguments, operand, 1)
  size = ffi.dimension(arguments, operand, 2) * ffi.dimension(arguments, operand, 3)
  width = 2 if ffi.is_bfloat16(arguments, operand) else 4
  return ffi.address(arguments, operand) + width * (min(layer, layers - 1) * slabs + slab) * size


@jit
def weights_of(arguments, operand):
  """How many weights all slabs f[l, r, a, b] of one layer are."""
  size = ffi.dimension(arguments, operand, 2) * ffi.dimension(arguments, operand, 3)
  return ffi.dimension(arguments, operand, 1) * size


@jit
def live_rows(arguments, sizes):
  """How many rows of the first operand are no padding."""
  return min(ffi.integer(arguments, sizes, 0), ffi.dimension(arguments, 0, 0))


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
def product(arguments, operand, layer, slab, x, x_row, rows, out, is_added):
  """out[rows, b] (+)= x[rows, a] @ a slab f[a, b] of weights f[l, r, a, b]."""
  k, columns = ffi.dimension(arguments, operand, 2), ffi.dimension(arguments, operand, 3)
  products.product(
    x, x_row, ONE, rows, slab_of(arguments, operand, layer, slab),
    ffi.is_bfloat16(arguments, operand), columns, columns, k, out, columns, is_added,
  )  # fmt: skip


@inlined
def waiting(slab):
  """How many sums wait while a tree of slabs comes to `slab`: its bits that are one."""
  count = 0
  while slab > 0:
    count += slab & 1
    slab >>= 1
  return count


@jit
def merge(sums, slab, count):
  """Adds what waits, now that the sum of `slab` stands behind it (`parallel.tree_sum`)."""
  place = waiting(slab)
  while slab & 1:
    add_row(sums + 4 * (place - 1) * count, sums + 4 * place * count, count)
    place -= 1
    slab >>= 1


@jit
def add_sum(arguments, operand, scale, rows, x, sums, lows):
  """x += the slabs' sum and its adapter's term, whose B is the operand, rounded."""
  is_bf16 = ffi.is_bfloat16(arguments, 0)
  rank, d = ffi.dimension(arguments, operand, 2), ffi.dimension(arguments, operand, 3)
  scale_row(lows, scale, is_bf16, rows * rank)
  product(arguments, operand, ZERO, ZERO, lows, rank, rows, sums, ONE)
  round_row(sums, is_bf16, rows * d)
  add_row(x, sums, rows * d)
  round_row(x, is_bf16, rows * d)


@jit
def projected(arguments, slab, rows, mixed, sums, lows):
  """A slab's part of the output projection, and of its adapter's x @ A."""
  width = ffi.dimension(arguments, OUT, 1) * ffi.dimension(arguments, OUT, 2)
  at = mixed + 4 * slab * ffi.dimension(arguments, OUT, 2)
  layer = ffi.integer(arguments, SIZES_AFTER, 1)
  product(arguments, OUT, layer, slab, at, width, rows, sums, ZERO)
  product(arguments, OUT_A, ZERO, slab, at, width, rows, lows, ZERO)


@jit
def mlp_inputs(arguments, rows, x, scale, normed, low):
  """What the MLP reads of the residual stream: its norm, and its adapter's x @ A."""
  is_bf16, d = ffi.is_bfloat16(arguments, 0), ffi.dimension(arguments, 0, 1)
  eps, rank = scalar(arguments, SCALARS_AFTER, 0), ffi.dimension(arguments, GATE_UP_A, 3)
  for row in range(rows):
    at = 4 * row * d
    norms.norm_row(x + at, scale, d, eps, is_bf16, normed + at)
  product(arguments, GATE_UP_A, ZERO, ZERO, normed, d, rows, low, ZERO)
  scale_row(low, scalar(arguments, SCALARS_AFTER, 2), is_bf16, rows * rank)


@jit
def mlp(arguments, slab, rows, normed, low, inner, sums, lows):
  """A slab's part of the MLP, and of its last adapter's x @ A; `inner` is f32[rows, 2 i]."""
  is_bf16, layer = ffi.is_bfloat16(arguments, 0), ffi.integer(arguments, SIZES_AFTER, 1)
  d, rank = ffi.dimension(arguments, 0, 1), ffi.dimension(arguments, GATE_UP_A, 3)
  features = ffi.dimension(arguments, DOWN, 2)
  product(arguments, GATE_UP, layer, slab, normed, d, rows, inner, ZERO)
  product(arguments, GATE_UP_B, ZERO, slab, low, rank, rows, inner, ONE)
  for row in range(rows):
    at = inner + 8 * row * features
    gate, up = floats(at), floats(at + 4 * features)
    for i in range(features):
      gate[i] = gate[i] / (f32(1.0) + exp(-gate[i])) * up[i]
    round_row(at, is_bf16, features)
  product(arguments, DOWN, layer, slab, inner, 2 * features, rows, sums, ZERO)
  product(arguments, DOWN_A, ZERO, slab, inner, 2 * features, rows, lows, ZERO)


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
  """Scratch memory of each worker, which holds these shapes behind each other."""
  return f32_of(threads.number(), sum(math.prod(shape) for shape in shapes))


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
