"""Gradients of the parts of a layer around attention: calls the handlers chunk by chunk of rows.

On one device, a chunk is one call of `layers_backward`. With a mesh axis, it is two calls of
`layers_backward_mesh`, between which the slabs' partial sums are gathered.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from seerjax import parallel
from seerjax.array_typing import Array
from seerjax.backends.native import (
  layers_backward,
  layers_backward_mesh as mesh_backward,
  products,
  products_over_rows,
)
from seerjax.backends.native.layer_parts import (
  DOWN,
  DOWN_A,
  GATE_UP_A,
  OUT,
  OUT_A,
  QKV,
  QKV_A,
  SIZES,
  SIZES_AFTER,
  WAITING,
  Params,
  after_operands,
  f32_of,
  input_operands,
  scratch,
)
from seerjax.backends.native.layers_backward import CHUNK_ROWS
from seerjax.backends.protocol import Stage
from seerjax.ops import tiles

HEAD_NORMS = ("query_norm", "key_norm")

# Terms of weight gradients f32[r, a, b] by name: x f32[m, ...] and cotangents f32[m, ...].
Terms = dict[str, tuple[Array, Array]]


def attention_inputs_gradient(
  stage: Stage, weights: Params, rows: Any, num_rows: Array, cotangent: Any
) -> tuple[Params, Any]:
  """Returns the gradients of `layers.attention_inputs` to the weights and the rows."""
  x, c = rows[0], stage.shape.kind.attention.head_dim
  operands = input_operands(stage, weights, rows, num_rows)
  (n, d), (_, slabs, _, columns) = x.shape, operands[QKV].shape
  rank, size = operands[QKV_A].shape[3], min(n, CHUNK_ROWS)
  features, m = c if "query_norm" in weights else 0, min(n, layers_backward.ROWS)
  own = scratch(
    (d + 3 * c + columns,),
    (size, d + columns + WAITING * (d + rank)),
    (max(columns, rank, 1), products.PANEL),
  )
  shapes = (
    (d,),
    (rank,),
    (rank,),
    (slabs * columns,),
    (d,),
    (slabs * features,),
    (slabs * features,),
  )
  results = [jax.ShapeDtypeStruct(x.shape, x.dtype), *(f32_of(m, *shape) for shape in shapes), own]

  def chunk(sizes: Array, into: tuple[Array, ...]) -> tuple[tuple[Array, ...], Terms]:
    here = [sizes if place == SIZES else operand for place, operand in enumerate(operands)]
    if stage.axis is None:
      place = len(here) + len(cotangent)
      out = layers_backward.INPUTS(results, *here, *cotangent, *into, aliases={place: 0})
      dx, normed, low, of_low, of_qkv, of_scale, of_query, of_key, _ = out
    else:
      normed, low, of_qkv, of_query, of_key, *partials = mesh_backward.inputs(here, cotangent, m)
      partials = parallel.gather_slabs(partials, stage.axis)
      dx, of_low, of_scale = mesh_backward.inputs_end(here, partials, into, m)
    one = jnp.ones((m, 1), jnp.float32)
    terms = {
      "attention_norm": (one, of_scale),
      "qkv": (normed, of_qkv),
      "qkv_bias": (one, of_qkv),
      "query_norm": (one, of_query),
      "key_norm": (one, of_key),
      "qkv_lora.a": (normed, of_low),
      "qkv_lora.b": (low, of_qkv),
    }
    return (dx,), terms

  totals = {
    "attention_norm": (1, 1, d),
    "qkv": (slabs, d, columns),
    "qkv_bias": (slabs, 1, columns),
    "query_norm": (slabs, 1, c),
    "key_norm": (slabs, 1, c),
    "qkv_lora.a": (1, d, rank),
    "qkv_lora.b": (slabs, rank, columns),
  }
  (dx,), gradient = _by_chunks(
    chunk, operands[SIZES], (x,), weights, totals, cotangent[0], stage.axis
  )
  return gradient, (dx, None, None)


def after_attention_gradient(
  stage: Stage,
  weights: Params,
  rows: Any,
  num_rows: Array,
  cotangent: Array,
  found: tuple[Array, Array],
) -> tuple[Params, Any]:
  """Returns the gradients of `layers.after_attention` to the weights and the rows.

  `found` has the values kept by `layers_kept.after_attention`; with a mesh axis, it has all slabs'
  partial sums of the projection, f32[r, n, d], and of its adapter's x @ A, f32[r, n, rank].
  """
  x, mixed = rows
  operands = after_operands(stage, weights, rows, num_rows)
  (n, d), (_, slabs, inputs, _) = x.shape, operands[OUT].shape
  features, size, m = operands[DOWN].shape[2], min(n, CHUNK_ROWS), min(n, layers_backward.ROWS)
  ranks = tuple(operands[place].shape[3] for place in (OUT_A, GATE_UP_A, DOWN_A))
  out_rank, rank, down_rank = ranks
  own = scratch(
    (d,),
    (size, max(features, inputs) + WAITING * (d + max(ranks))),
    (max(2 * features, d, *ranks), products.PANEL),
  )
  widths = (
    slabs * inputs, out_rank, out_rank, d, d, d, rank, rank, 2 * slabs * features,
    slabs * features, down_rank, down_rank, d,
  )  # fmt: skip
  of = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
  results = [of(x), of(mixed), *(f32_of(m, width) for width in widths), own]

  def chunk(sizes: Array, into: tuple[Array, ...]) -> tuple[tuple[Array, ...], Terms]:
    here = [sizes if place == SIZES_AFTER else operand for place, operand in enumerate(operands)]
    if stage.axis is None:
      place = len(here) + 3
      aliases = {place: 0, place + 1: 1}
      out = layers_backward.AFTER(results, *here, cotangent, *found, *into, aliases=aliases)
      dx, d_mixed, attended, out_low, of_out, of_x, of_scale, normed, low, of_low, *more, _ = out
      of_gate_up, inner, down_low, of_down, dy = more
    else:
      of_rows, partials = mesh_backward.after(here, cotangent, found, m)
      attended, after, out_low, normed, low, of_gate_up, inner, of_down, dy = of_rows
      partials = parallel.gather_slabs(partials, stage.axis)
      out = mesh_backward.after_end(here, partials, after, dy, into, m)
      dx, d_mixed, of_out, of_x, of_scale, of_low, down_low = out
    terms = {
      "out": (attended, of_x),
      "out_lora.a": (attended, of_out),
      "out_lora.b": (out_low, of_x),
      "mlp_norm": (jnp.ones((m, 1), jnp.float32), of_scale),
      "gate_up": (normed, of_gate_up),
      "gate_up_lora.a": (normed, of_low),
      "gate_up_lora.b": (low, of_gate_up),
      "down": (inner, dy),
      "down_lora.a": (inner, of_down),
      "down_lora.b": (down_low, dy),
    }
    return (dx, d_mixed), terms

  totals = {
    "out": (slabs, inputs, d),
    "out_lora.a": (slabs, inputs, out_rank),
    "out_lora.b": (1, out_rank, d),
    "mlp_norm": (1, 1, d),
    "gate_up": (slabs, d, 2 * features),
    "gate_up_lora.a": (1, d, rank),
    "gate_up_lora.b": (slabs, rank, 2 * features),
    "down": (slabs, features, d),
    "down_lora.a": (slabs, features, down_rank),
    "down_lora.b": (1, down_rank, d),
  }
  sizes = operands[SIZES_AFTER]
  of_rows, gradient = _by_chunks(chunk, sizes, (x, mixed), weights, totals, cotangent, stage.axis)
  return gradient, of_rows


def _by_chunks(
  chunk: Any,
  sizes: Array,
  rows: tuple[Array, ...],
  weights: Params,
  shapes: dict[str, tuple[int, ...]],
  anchor: Array,
  axis: str | None,
) -> tuple[tuple[Array, ...], Params]:
  """Processes chunks of rows in batch order; returns the gradients of rows, and of weights.

  Args:
    chunk: `(sizes, gradients of rows so far) -> (the same with the chunk's, terms by name)`.
    sizes: i32[2], num_rows and layer.
    rows: arrays for which gradients are computed.
    weights: weights of the layer; those of other stages get no gradient.
    shapes: r, a, b of the gradients by name; an adapter has two.
    anchor: any cotangent: no zeros are allocated before it is available.
    axis: mesh axis of the slabs, None on one device.
  """
  names = [name for name in shapes if name.partition(".")[0] in weights]
  zeros = lambda shape, dtype: tiles.late_zeros(shape, dtype, anchor)
  begin = tuple(zeros(leaf.shape, leaf.dtype) for leaf in rows)
  turned = scratch((products_over_rows.COLUMNS, products_over_rows.TURNED))

  def body(index: Array, carry: Any) -> Any:
    into, totals = carry
    here = jnp.append(sizes, index * layers_backward.ROWS)
    into, terms = chunk(here, into)
    new = {}
    for name in names:
      (x, given), (r, a, b) = terms[name], shapes[name]
      m, total = x.shape[0], totals.get(name)
      operands = here, x.reshape(m, -1, a), given.reshape(m, -1, b)
      operands, aliases = (operands, None) if total is None else ((*operands, total), {3: 0})
      results = [f32_of(r, a, b), turned]
      new[name], _ = layers_backward.ADD_GRADIENT(results, *operands, aliases=aliases)
    return into, new

  count = rows[0].shape[0]
  if count <= layers_backward.ROWS:
    of_rows, totals = body(jnp.int32(0), (begin, {}))
  else:
    totals = {name: zeros(shapes[name], jnp.float32) for name in names}
    trips = (sizes[0] + layers_backward.ROWS - 1) // layers_backward.ROWS
    of_rows, totals = lax.fori_loop(jnp.int32(0), trips, body, (begin, totals))
  # Weights that all slabs share have one slab: the slabs' partial gradients are added.
  shared = {name: totals[name] for name in names if name in HEAD_NORMS}
  if axis is not None and shared:
    shared = parallel.after(shared, of_rows[0])
  shared = parallel.gather_slabs(shared, axis)
  if axis is not None and shared:
    of_rows = parallel.after(of_rows, shared)
  totals |= {name: parallel.tree_sum(total)[None] for name, total in shared.items()}
  gradient: Params = dict.fromkeys(weights)
  for name, total in totals.items():
    name, _, part = name.partition(".")
    leaf = weights[name][part] if part else weights[name]
    total = total.reshape(leaf.shape).astype(leaf.dtype)
    if part:
      gradient[name] = {"scale": None, **(gradient[name] or {}), part: total}
    else:
      gradient[name] = total
  return of_rows, gradient
