"""Shared parts of the layer handlers, forward and backward: operands, rows, slabs and their tree.

An operand is identified by its index. Weights are f[l, r, a, b]: `l` layers, `r` slabs.

If rows choose among adapters, these are f[e, r, a, b], padded to one rank, and the sizes have more
entries:

    num_rows, layer | layer's first adapter, adapters per layer, rows[n], ranks[target, e]

A row has the products of its own adapter only, up to that adapter's rank: no zero is added to a
chain.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seerjax.array_typing import Array
from seerjax.backends.adapters import RowAdapters
from seerjax.backends.native import ffi, norms, products, threads
from seerjax.backends.native.numbers import (
  exp,
  f32,
  gelu_and_slope,
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

# Maximum number of sums that wait for a neighbour in a tree of up to 8, the newest included.
WAITING = 4

# Weights of one layer; the slabs of this device.
Params = dict[str, Any]


def _numbers(first: int, last: int) -> list[np.int64]:
  """Returns numbers that are not literals for numba, which would compile anew for each literal."""
  return [np.int64(number) for number in range(first, last + 1)]


ZERO, ONE, TWO, THREE = _numbers(0, 3)
NO = np.bool_(False)
# Operands of `attention_inputs`, after the rows.
COS, SIN, SIZES, SCALARS, NORM, QKV = _numbers(1, 6)
BIAS, QUERY_NORM, KEY_NORM, QKV_A, QKV_B = _numbers(7, 11)
# Operands of every part of `after_attention`; the last two are for its later parts only.
MIXED, SIZES_AFTER, SCALARS_AFTER, OUT, OUT_A, OUT_B, MLP_NORM = _numbers(1, 7)
GATE_UP, GATE_UP_A, GATE_UP_B, DOWN, DOWN_A, DOWN_B = _numbers(8, 13)
PARTS, LOWS = _numbers(14, 15)


@jit
def blocks(arguments):
  """Returns the number of items of a call: blocks of 4 rows of the first operand."""
  return (ffi.dimension(arguments, 0, 0) + products.BLOCK_ROWS - 1) // products.BLOCK_ROWS


@inlined
def scalar(arguments, operand, place):
  """Returns an element of an f32 operand."""
  return floats(ffi.address(arguments, operand))[place]


@inlined
def scratch_of(results, place, worker):
  """Returns the address of a worker's row of scratch memory f32[w, ...]."""
  return ffi.address(results, place) + 4 * worker * ffi.dimension(results, place, 1)


@inlined
def slab_of(arguments, operand, layer, slab):
  """Returns the address of a slab of f[l, r, a, b]; with a single layer, the index is ignored."""
  layers, slabs = ffi.dimension(arguments, operand, 0), ffi.dimension(arguments, operand, 1)
  size = ffi.dimension(arguments, operand, 2) * ffi.dimension(arguments, operand, 3)
  width = 2 if ffi.is_bfloat16(arguments, operand) else 4
  return ffi.address(arguments, operand) + width * (min(layer, layers - 1) * slabs + slab) * size


@jit
def weights_of(arguments, operand):
  """Returns the number of weights in all slabs f[l, r, a, b] of one layer."""
  size = ffi.dimension(arguments, operand, 2) * ffi.dimension(arguments, operand, 3)
  return ffi.dimension(arguments, operand, 1) * size


@jit
def live_rows(arguments, sizes):
  """Returns the number of valid rows of the first operand."""
  return min(ffi.integer(arguments, sizes, 0), ffi.dimension(arguments, 0, 0))


@inlined
def is_apart(arguments):
  """Returns whether the output of `after_attention` is its MLP's alone, without the residual."""
  place = ffi.dimension(arguments, SCALARS_AFTER, 0) - 2
  return scalar(arguments, SCALARS_AFTER, place) > f32(0.0)


@inlined
def uses_gelu(arguments):
  """Returns whether the activation of `after_attention` is gelu in its tanh form, not silu."""
  place = ffi.dimension(arguments, SCALARS_AFTER, 0) - 1
  return scalar(arguments, SCALARS_AFTER, place) > f32(0.0)


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
  """Rotates one head in place, in float32 (`ops.rotary`)."""
  half = features // 2
  x, c, s = floats(head), floats(cos), floats(sin)
  for i in range(half):
    first, second = x[i], x[i + half]
    x[i] = first * c[i] - second * s[i]
    x[i + half] = second * c[i] + first * s[i]


@jit
def product(arguments, operand, layer, slab, x, x_row, rows, out, is_added):
  """Computes out[rows, b] (+)= x[rows, a] @ a slab f[a, b] of weights f[l, r, a, b]."""
  columns = ffi.dimension(arguments, operand, 3)
  product_of_columns(
    arguments, operand, layer, slab, x, x_row, rows, ZERO, columns, out, columns, is_added
  )


@jit
def product_of_columns(
  arguments, operand, layer, slab, x, x_row, rows, first, columns, out, out_row, is_added
):
  """Like `product`, for `columns` of the slab from `first` on; `out` rows have `out_row` floats."""
  k, width = ffi.dimension(arguments, operand, 2), ffi.dimension(arguments, operand, 3)
  is_bf16 = ffi.is_bfloat16(arguments, operand)
  weights = slab_of(arguments, operand, layer, slab) + (2 if is_bf16 else 4) * first
  products.product(x, x_row, ONE, rows, weights, is_bf16, width, columns, k, out, out_row, is_added)


# Indices in the sizes if rows have different adapters; the rows' adapters follow.
FIRST_ADAPTER, NUM_ADAPTERS, ROW_ADAPTERS = 2, 3, 4


@inlined
def are_rows_apart(arguments, sizes):
  """Returns whether rows choose among adapters; otherwise there are at most three sizes."""
  return ffi.dimension(arguments, sizes, 0) > NUM_ADAPTERS


@jit
def rows_alike(arguments, sizes, begin, row, rows):
  """Returns how many of `rows` rows (from `begin` on), starting at `row`, have the same adapter."""
  if not are_rows_apart(arguments, sizes):
    return rows - row
  first = ROW_ADAPTERS + begin
  own = ffi.integer(arguments, sizes, first + row)
  end = row + 1
  while end < rows and ffi.integer(arguments, sizes, first + end) == own:
    end += 1
  return end - row


@jit
def adapter_at(arguments, sizes, row):
  """Returns the adapter of a row, -1 for none."""
  if not are_rows_apart(arguments, sizes):
    return ZERO
  return ffi.integer(arguments, sizes, ROW_ADAPTERS + row) - 1


@jit
def adapter_slab(arguments, sizes, own):
  """Returns the index of a layer's adapter among the adapters of all layers."""
  if not are_rows_apart(arguments, sizes):
    return ZERO
  return ffi.integer(arguments, sizes, FIRST_ADAPTER) + own


@jit
def rank_at(arguments, sizes, operand, target, own):
  """Returns the rank of an adapter with the given B operand; the rest of the operand is padding."""
  if not are_rows_apart(arguments, sizes):
    return ffi.dimension(arguments, operand, 2)
  count, n = ffi.integer(arguments, sizes, NUM_ADAPTERS), ffi.dimension(arguments, 0, 0)
  return ffi.integer(arguments, sizes, ROW_ADAPTERS + n + target * count + own)


@jit
def scale_at(arguments, sizes, scalars, target, own):
  """Returns the scale of an adapter; scalars are eps, then the scales of each target."""
  if not are_rows_apart(arguments, sizes):
    return scalar(arguments, scalars, 1 + target)
  return scalar(arguments, scalars, 1 + target * ffi.integer(arguments, sizes, NUM_ADAPTERS) + own)


@jit
def low_product(arguments, sizes, operand, slab, begin, x, x_row, rows, low):
  """Computes low[rows, rank] = x[rows, a] @ a slab of each row's A; zeros without an adapter."""
  rank = ffi.dimension(arguments, operand, 3)
  row = ZERO
  while row < rows:
    count = rows_alike(arguments, sizes, begin, row, rows)
    own = adapter_at(arguments, sizes, begin + row)
    to = low + 4 * row * rank
    if own >= 0:
      at = adapter_slab(arguments, sizes, own)
      product(arguments, operand, at, slab, x + 4 * row * x_row, x_row, count, to, ZERO)
    else:
      zero_row(to, NO, count * rank)
    row += count


@jit
def scale_low(arguments, sizes, scalars, target, begin, rank, rows, low):
  """Scales the result of `low_product`, each row by its adapter's scale, and rounds it."""
  is_bf16 = ffi.is_bfloat16(arguments, 0)
  row = ZERO
  while row < rows:
    count = rows_alike(arguments, sizes, begin, row, rows)
    own = adapter_at(arguments, sizes, begin + row)
    if own >= 0:
      scale = scale_at(arguments, sizes, scalars, target, own)
      scale_row(low + 4 * row * rank, scale, is_bf16, count * rank)
    row += count


@jit
def add_low(arguments, sizes, operand, target, slab, begin, low, rows, out):
  """Continues out[rows, b] with low[rows, rank] @ a slab of each row's own B."""
  columns = ffi.dimension(arguments, operand, 3)
  add_low_to_columns(
    arguments, sizes, operand, target, slab, begin, low, rows, ZERO, columns, out, columns
  )


@jit
def add_low_to_columns(
  arguments, sizes, operand, target, slab, begin, low, rows, first, columns, out, out_row
):
  """Like `add_low`, for `columns` of the slab from `first` on; `out` rows have `out_row` floats."""
  rank, width = ffi.dimension(arguments, operand, 2), ffi.dimension(arguments, operand, 3)
  is_bf16 = ffi.is_bfloat16(arguments, operand)
  row = ZERO
  while row < rows:
    count = rows_alike(arguments, sizes, begin, row, rows)
    own = adapter_at(arguments, sizes, begin + row)
    if own >= 0:
      weights = slab_of(arguments, operand, adapter_slab(arguments, sizes, own), slab)
      k = rank_at(arguments, sizes, operand, target, own)
      products.product(
        low + 4 * row * rank, rank, ONE, count, weights + (2 if is_bf16 else 4) * first, is_bf16,
        width, columns, k, out + 4 * row * out_row, out_row, ONE,
      )  # fmt: skip
    row += count


@inlined
def waiting(slab):
  """Returns how many sums wait in a tree of slabs at `slab`: the number of its one bits."""
  count = 0
  while slab > 0:
    count += slab & 1
    slab >>= 1
  return count


@jit
def merge(sums, slab, count):
  """Adds waiting sums after the sum of `slab` was stored behind them (`parallel.tree_sum`)."""
  place = waiting(slab)
  while slab & 1:
    add_row(sums + 4 * (place - 1) * count, sums + 4 * place * count, count)
    place -= 1
    slab >>= 1


@jit
def gathered_rows(arguments, operand, begin, rows, sums):
  """Adds slabs f32[r, n, d] in the tree; the rows' sum is the first of `sums`."""
  slabs, n = ffi.dimension(arguments, operand, 0), ffi.dimension(arguments, operand, 1)
  columns = ffi.dimension(arguments, operand, 2)
  count = rows * columns
  for slab in range(slabs):
    source = ffi.address(arguments, operand) + 4 * (slab * n + begin) * columns
    read_row(source, False, sums + 4 * waiting(slab) * count, count)
    merge(sums, slab, count)


@jit
def add_sum(arguments, operand, target, begin, rows, x, sums, lows):
  """Adds to x the slabs' sum and the adapter's term (with the given B operand), rounded.

  An MLP's output that is wanted apart replaces x.
  """
  is_bf16 = ffi.is_bfloat16(arguments, 0)
  rank, d = ffi.dimension(arguments, operand, 2), ffi.dimension(arguments, operand, 3)
  scale_low(arguments, SIZES_AFTER, SCALARS_AFTER, target, begin, rank, rows, lows)
  add_low(arguments, SIZES_AFTER, operand, target, ZERO, begin, lows, rows, sums)
  round_row(sums, is_bf16, rows * d)
  if target == TWO and is_apart(arguments):
    zero_row(x, NO, rows * d)
  add_row(x, sums, rows * d)
  round_row(x, is_bf16, rows * d)


@jit
def projected(arguments, slab, begin, rows, mixed, sums, lows):
  """Computes a slab's part of the output projection, and of its adapter's x @ A."""
  width = ffi.dimension(arguments, OUT, 1) * ffi.dimension(arguments, OUT, 2)
  at = mixed + 4 * slab * ffi.dimension(arguments, OUT, 2)
  layer = ffi.integer(arguments, SIZES_AFTER, 1)
  product(arguments, OUT, layer, slab, at, width, rows, sums, ZERO)
  low_product(arguments, SIZES_AFTER, OUT_A, slab, begin, at, width, rows, lows)


@jit
def mlp_inputs(arguments, begin, rows, x, scale, normed, low):
  """Computes the MLP's inputs from the residual stream: its norm, and its adapter's x @ A."""
  is_bf16, d = ffi.is_bfloat16(arguments, 0), ffi.dimension(arguments, 0, 1)
  eps, rank = scalar(arguments, SCALARS_AFTER, 0), ffi.dimension(arguments, GATE_UP_A, 3)
  for row in range(rows):
    at = 4 * row * d
    norms.norm_row(
      x + at, scale, d, eps, is_bf16, ffi.is_bfloat16(arguments, MLP_NORM), normed + at
    )
  low_product(arguments, SIZES_AFTER, GATE_UP_A, ZERO, begin, normed, d, rows, low)
  scale_low(arguments, SIZES_AFTER, SCALARS_AFTER, ONE, begin, rank, rows, low)


@jit
def gate(gates, ups, is_gelu, is_bf16, count, out):
  """Computes out = silu(gate) * up, or gelu(gate) * up, of `count` floats, rounded.

  `out` may be `gates`.
  """
  x, y, to = floats(gates), floats(ups), floats(out)
  if is_gelu:
    for i in range(count):
      to[i] = gelu_and_slope(x[i])[0] * y[i]
  else:
    for i in range(count):
      to[i] = x[i] / (f32(1.0) + exp(-x[i])) * y[i]
  round_row(out, is_bf16, count)


@jit
def mlp(arguments, slab, begin, rows, normed, low, inner, sums, lows):
  """Computes a slab's part of the MLP, and of `down`'s x @ A; `inner` is f32[rows, 2 i] scratch."""
  is_bf16, layer = ffi.is_bfloat16(arguments, 0), ffi.integer(arguments, SIZES_AFTER, 1)
  d, features = ffi.dimension(arguments, 0, 1), ffi.dimension(arguments, DOWN, 2)
  product(arguments, GATE_UP, layer, slab, normed, d, rows, inner, ZERO)
  add_low(arguments, SIZES_AFTER, GATE_UP_B, ONE, slab, begin, low, rows, inner)
  for row in range(rows):
    at = inner + 8 * row * features
    gate(at, at + 4 * features, uses_gelu(arguments), is_bf16, features, at)
  product(arguments, DOWN, layer, slab, inner, 2 * features, rows, sums, ZERO)
  low_product(arguments, SIZES_AFTER, DOWN_A, slab, begin, inner, 2 * features, rows, lows)


class Leaf(NamedTuple):
  """Weights in the handlers' format.

  Attributes:
    slabs: f[l, r, a, b]; l and r are 1 for a single layer or slab.
    layer: i32[], index of the layer.
  """

  slabs: Array
  layer: Array


def layered(leaf: Array | tiles.LayerSlabs) -> Leaf:
  """Returns the slabs f[r, a, b] of one layer, or those of all layers with an index, unsliced."""
  if isinstance(leaf, tiles.LayerSlabs):
    return Leaf(leaf.layers, leaf.index)
  return Leaf(leaf[None], jnp.int32(0))


def adapter(
  weights: Params, name: str, chosen: RowAdapters | None
) -> tuple[Array, Array, list[Array]]:
  """Returns (A f[e, r, a, rank], B f[e, r, rank, b], scales f32[e]); rank 0 without an adapter.

  The matrix that all slabs share has one slab. For a single adapter, e is 1 and the scale f32[].
  """
  slabs = layered(weights[name]).slabs
  of_columns, name = name in ("qkv", "gate_up"), f"{name}_lora"
  if chosen is not None:
    (form,) = chosen.forms
    if name in form.layers:
      a, b = (_of_all(form.layers[name][part], chosen) for part in ("a", "b"))
      a, b = (a[:, None], b) if of_columns else (a, b[:, None])
      return a, b, list(form.scales)
  elif name in weights:
    own = weights[name]
    a, b = own["a"], own["b"]
    a, b = (a[None, None], b[None]) if of_columns else (a[None], b[None, None])
    return a, b, [own["scale"]]
  _, r, rows, columns = slabs.shape
  a = jnp.zeros((1, 1 if of_columns else r, rows, 0), slabs.dtype)
  b = jnp.zeros((1, r if of_columns else 1, 0, columns), slabs.dtype)
  return a, b, [jnp.float32(1.0)] * (1 if chosen is None else chosen.forms[0].count)


def _of_all(leaf: Array, chosen: RowAdapters) -> Array:
  """Returns the adapters of all layers concatenated, unsliced."""
  return leaf if chosen.layer is None else leaf.reshape(-1, *leaf.shape[2:])


def adapter_sizes(
  num_rows: Array, layer: Array, names: tuple[str, ...], chosen: RowAdapters | None
) -> Array:
  """Returns the operand of sizes, i32[s]."""
  if chosen is None:
    return jnp.stack([num_rows, layer]).astype(jnp.int32)
  (form,) = chosen.forms
  first = jnp.int32(0) if chosen.layer is None else chosen.layer * form.count
  none = jnp.zeros(form.count, jnp.int32)
  ranks = [form.ranks.get(f"{name}_lora", none) for name in names]
  heads = jnp.stack([num_rows, layer, first, jnp.int32(form.count)]).astype(jnp.int32)
  return jnp.concatenate([heads, chosen.rows, *ranks])


def scratch(*shapes: tuple[int, ...]) -> jax.ShapeDtypeStruct:
  """Returns the shape of scratch memory f32[w, ...] with room for these shapes per worker."""
  return f32_of(threads.number(), sum(math.prod(shape) for shape in shapes))


def f32_of(*shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def input_operands(
  stage: Stage,
  weights: Params,
  rows: Any,
  num_rows: Array,
  chosen: RowAdapters | None = None,
) -> list[Array]:
  """Returns the operands of `attention_inputs`."""
  x, cos, sin = rows
  qkv, layer = layered(weights["qkv"])
  a, b, scales = adapter(weights, "qkv", chosen)
  none = jnp.zeros((0,), x.dtype)
  return [
    x,
    cos,
    sin,
    adapter_sizes(num_rows, layer, ("qkv",), chosen),
    jnp.stack([jnp.float32(stage.shape.norm_eps), *scales]),
    weights["attention_norm"],
    qkv,
    weights["qkv_bias"] if "qkv_bias" in weights else jnp.zeros((qkv.shape[1], 0), x.dtype),
    weights.get("query_norm", none),
    weights.get("key_norm", none),
    a,
    b,
  ]


def after_operands(
  stage: Stage,
  weights: Params,
  rows: Any,
  num_rows: Array,
  chosen: RowAdapters | None = None,
) -> list[Array]:
  """Returns the operands of `after_attention`.

  In a layer with norms after its parts, the MLP's output is wanted apart.
  """
  x, mixed = rows
  out, layer = layered(weights["out"])
  gate_up, down = layered(weights["gate_up"]).slabs, layered(weights["down"]).slabs
  out_a, out_b, out_scales = adapter(weights, "out", chosen)
  gate_up_a, gate_up_b, gate_up_scales = adapter(weights, "gate_up", chosen)
  down_a, down_b, down_scales = adapter(weights, "down", chosen)
  eps, kind = jnp.float32(stage.shape.norm_eps), stage.shape.kind
  settings = (kind.norm_placement == "pre_and_post", kind.feed_forward.activation == "gelu_tanh")
  settings = [jnp.float32(setting) for setting in settings]
  return [
    x,
    mixed,
    adapter_sizes(num_rows, layer, ("out", "gate_up", "down"), chosen),
    jnp.stack([eps, *out_scales, *gate_up_scales, *down_scales, *settings]),
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
