"""The part of a layer after attention: the output projection and the gated MLP.

`models.experts` has the part of a layer with experts.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from seerjax import parallel
from seerjax.array_typing import Array
from seerjax.backends.protocol import LayerShape, Operations
from seerjax.layer_kinds import Experts, Gated
from seerjax.models import lora
from seerjax.models.parameters import Params
from seerjax.ops import tiles

# Functions of a gate, by `layer_kinds.Gated.activation`.
ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}


def output_rows(
  operations: Operations,
  shape: LayerShape,
  axis: str | None,
  weights: Params,
  rows: Any,
  one: Array,
) -> Array:
  """Adds output projection and gated MLP to the residual stream: f[n, d] -> f[n, d]."""
  x = projected_rows(operations, shape, axis, weights, rows, one)
  normed = normed_rows(operations, shape, weights["mlp_norm"], x)
  inner = gated_rows(operations, shape.kind.feed_forward, axis, weights, normed, one)
  return x + normed_output(operations, shape, weights, "mlp_out_norm", inner)


def projected_rows(
  operations: Operations,
  shape: LayerShape,
  axis: str | None,
  weights: Params,
  rows: Any,
  one: Array,
) -> Array:
  """Adds the output projection of attention to the residual stream: f[n, d] -> f[n, d]."""
  x, mixed = rows
  num_rows, num_slabs = x.shape[0], tiles.num_slabs(weights["out"])
  by_slab = jnp.swapaxes(mixed.reshape(num_rows, num_slabs, -1), 0, 1)
  if "out_lora" in weights:
    partials, low = operations.map_slabs(
      lambda _, slab: tuple(operations.dot(slab[0], w) for w in slab[1:]),
      (),
      (by_slab, weights["out"], weights["out_lora"]["a"]),
      one,
      axis,
    )
    out = lora.adapted_sum(operations, partials, low, weights["out_lora"], x.dtype, axis)
  else:
    out = operations.contract(by_slab, weights["out"], one, axis)
  return x + normed_output(operations, shape, weights, "attention_out_norm", out)


def normed_rows(operations: Operations, shape: LayerShape, scale: Array, x: Array) -> Array:
  """Normalises rows f[n, d] as the layer does."""
  return operations.rms_norm_rows(x, scale, shape.norm_eps, shape.norm_weights)


def normed_output(
  operations: Operations, shape: LayerShape, weights: Params, name: str, out: Array
) -> Array:
  """Normalises what a part adds to the residual stream, in layers that do."""
  has_post_norms = shape.kind.norm_placement == "pre_and_post"
  return normed_rows(operations, shape, weights[name], out) if has_post_norms else out


def gated_rows(
  operations: Operations,
  kind: Gated | Experts,
  axis: str | None,
  weights: Params,
  x: Array,
  one: Array,
) -> Array:
  """Returns activation(x @ gate) * (x @ up) @ down, slab by slab in one loop."""
  slabs, low = {name: weights[name] for name in ("gate_up", "down")}, None
  activation = ACTIVATIONS[kind.activation]
  if "gate_up_lora" in weights:
    adapter = weights["gate_up_lora"]
    low = lora.low_rank(operations.dot(x, adapter["a"]), adapter, x.dtype)
    slabs["gate_up_lora"] = adapter["b"]
  if "down_lora" in weights:
    slabs["down_lora"] = weights["down_lora"]["a"]

  def slab(shared: tuple[Array, Array | None], weights: Params) -> Any:
    x, low = shared
    gate_up = operations.dot(x, weights["gate_up"])
    if low is not None:
      gate_up = gate_up + operations.dot(low, weights["gate_up_lora"])
    gate, up = jnp.split(gate_up, 2, axis=-1)
    inner = (activation(gate) * up).astype(x.dtype)
    down = operations.dot(inner, weights["down"])
    if "down_lora" in weights:
      return down, operations.dot(inner, weights["down_lora"])
    return down

  partials = operations.map_slabs(slab, (x, low), slabs, one, axis)
  if "down_lora" in weights:
    return lora.adapted_sum(
      operations, partials[0], partials[1], weights["down_lora"], x.dtype, axis
    )
  return parallel.sum_slabs(partials, axis).astype(x.dtype)
