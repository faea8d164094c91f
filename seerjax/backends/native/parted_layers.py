"""Layers with parts that are computed apart: with norms after their parts, or with experts.

    projected   projection.projected     with a mesh or adapters, `layers.after_attention`: its MLP
                                         has one feature of weight zero, and adds zero
    gated       layers.after_attention   its projection has one feature of weight zero
    added       x + norm(part), by the definition on tiles

In a layer with norms after its parts, `gated` returns the MLP's output alone (`layer_parts`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from seerjax.array_typing import Array
from seerjax.backends.adapters import RowAdapters
from seerjax.backends.native import layers, norms, projection
from seerjax.backends.native.layer_parts import Params
from seerjax.backends.protocol import LayerShape, Operations, Stage
from seerjax.backends.tiled import Tiled
from seerjax.ops import tiles


def has_post_norms(shape: LayerShape) -> bool:
  """Returns whether what a part adds to the residual stream is normed first."""
  return shape.kind.norm_placement == "pre_and_post"


def after_attention(
  tiled: Tiled,
  stage: Stage,
  weights: Params,
  rows: Any,
  num_rows: Array,
  chosen: RowAdapters | None,
) -> Array:
  """Works like `layers.adapted_after_attention`, for a layer with norms after its parts."""
  x = attended(tiled, stage, weights, rows, num_rows, chosen)
  inner = gated(stage, weights, x, num_rows, chosen)
  return added(tiled, stage, weights["mlp_out_norm"], x, inner, num_rows)


def attended(
  tiled: Tiled,
  stage: Stage,
  weights: Params,
  rows: Any,
  num_rows: Array,
  chosen: RowAdapters | None,
) -> Array:
  """Adds attention's output projection to the residual stream, normed in layers that do."""
  x, mixed = rows
  if not has_post_norms(stage.shape):
    return projected(stage, weights, rows, num_rows, chosen)
  out = projected(stage, weights, (jnp.zeros_like(x), mixed), num_rows, chosen)
  return added(tiled, stage, weights["attention_out_norm"], x, out, num_rows)


def projected(
  stage: Stage, weights: Params, rows: Any, num_rows: Array, chosen: RowAdapters | None
) -> Array:
  """Adds the output projection to rows f[n, d]."""
  x = rows[0]
  slabs, d = tiles.num_slabs(weights["out"]), x.shape[1]
  own = {name: weights[name] for name in ("out", "out_lora") if name in weights} | {
    "mlp_norm": jnp.ones((d,), x.dtype),
    "gate_up": jnp.zeros((slabs, d, 2), x.dtype),
    "down": jnp.zeros((slabs, 1, d), x.dtype),
  }
  plain = dataclasses.replace(stage.shape.kind, norm_placement="pre")
  stage = stage._replace(shape=stage.shape._replace(kind=plain))
  if stage.axis is None and chosen is None and "out_lora" not in own:
    return projection.projected(stage, own, rows, num_rows)
  left = None if chosen is None else chosen.without(("gate_up_lora", "down_lora"))
  return _run(stage, own, rows, num_rows, left)


def gated(
  stage: Stage, weights: Params, x: Array, num_rows: Array, chosen: RowAdapters | None
) -> Array:
  """Returns the gated MLP of rows f[n, d], added to them in layers without norms after parts."""
  gate_up, slabs = weights["gate_up"], tiles.num_slabs(weights["gate_up"])
  out = jnp.zeros((slabs, 1, x.shape[1]), x.dtype)
  if isinstance(gate_up, tiles.LayerSlabs):
    out = tiles.LayerSlabs(out[None], gate_up.index)
  names = ("mlp_norm", "gate_up", "down", "gate_up_lora", "down_lora")
  own = {name: weights[name] for name in names if name in weights} | {"out": out}
  none = jnp.zeros((x.shape[0], slabs, 1, 1), x.dtype)
  left = None if chosen is None else chosen.without(("out_lora",))
  return _run(stage, own, (x, none), num_rows, left)


def added(
  tiled: Tiled, stage: Stage, scale: Array, x: Array, part: Array, num_rows: Array
) -> Array:
  """Adds the norm of a part's output to rows f[n, d]."""

  def rows_of(
    operations: Operations, shape: LayerShape, axis: str | None, scale: Array, rows: Any, one: Array
  ) -> Array:
    del axis, one
    x, part = rows
    return x + operations.rms_norm_rows(part, scale, shape.norm_eps, shape.norm_weights)

  return tiled.defined(stage._replace(rows=rows_of), scale, (x, part), num_rows)


def _run(
  stage: Stage, weights: Params, rows: Any, num_rows: Array, chosen: RowAdapters | None
) -> Array:
  weights = norms.factors(stage.shape.norm_weights, weights, norms.OF_LAYER)
  if chosen is None:
    return layers.after_attention(stage, weights, rows, num_rows)
  return layers.adapted_after_attention(stage, weights, rows, num_rows, chosen)
