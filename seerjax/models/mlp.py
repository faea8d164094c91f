"""What follows a row's attention: the output projection and the gated MLP."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from seerjax import numerics as numerics_lib, parallel
from seerjax.array_typing import Array
from seerjax.models import lora
from seerjax.models.config import TransformerConfig
from seerjax.models.parameters import Params
from seerjax.ops import linear, norms, tiles


def output_rows(
  config: TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  axis: str | None,
  weights: Params,
  rows: Any,
  one: Array,
) -> Array:
  """Output projection and gated MLP, each added to the residual stream: f[n, d] -> f[n, d]."""
  x, mixed = rows
  num_rows, num_slabs = x.shape[0], tiles.num_slabs(weights["out"])
  by_slab = jnp.swapaxes(mixed.reshape(num_rows, num_slabs, -1), 0, 1)
  if "out_lora" in weights:
    partials, low = tiles.map_slabs(
      lambda _, slab: tuple(linear.dot(slab[0], w, numerics) for w in slab[1:]),
      (),
      (by_slab, weights["out"], weights["out_lora"]["a"]),
      one,
      axis,
      numerics,
    )
    x = x + lora.adapted_sum(partials, low, weights["out_lora"], x.dtype, axis, numerics)
  else:
    x = x + linear.contract(by_slab, weights["out"], one, axis, numerics)
  normed = norms.rms_norm_rows(x, weights["mlp_norm"], config.norm_eps, numerics)
  return x + _mlp(normed, weights, one, axis, numerics)


def _mlp(
  x: Array,
  weights: Params,
  one: Array,
  axis: str | None,
  numerics: numerics_lib.NumericsConfig,
) -> Array:
  """silu(x @ gate) * (x @ up) @ down, slab by slab in one loop."""
  slabs, low = {name: weights[name] for name in ("gate_up", "down")}, None
  if "gate_up_lora" in weights:
    adapter = weights["gate_up_lora"]
    low = lora.low_rank(linear.dot(x, adapter["a"], numerics), adapter, x.dtype)
    slabs["gate_up_lora"] = adapter["b"]
  if "down_lora" in weights:
    slabs["down_lora"] = weights["down_lora"]["a"]

  def slab(shared: tuple[Array, Array | None], weights: Params) -> Any:
    x, low = shared
    gate_up = linear.dot(x, weights["gate_up"], numerics)
    if low is not None:
      gate_up = gate_up + linear.dot(low, weights["gate_up_lora"], numerics)
    gate, up = jnp.split(gate_up, 2, axis=-1)
    inner = (jax.nn.silu(gate) * up).astype(x.dtype)
    down = linear.dot(inner, weights["down"], numerics)
    if "down_lora" in weights:
      return down, linear.dot(inner, weights["down_lora"], numerics)
    return down

  partials = tiles.map_slabs(slab, (x, low), slabs, one, axis, numerics)
  if "down_lora" in weights:
    return lora.adapted_sum(partials[0], partials[1], weights["down_lora"], x.dtype, axis, numerics)
  return parallel.tree_sum(parallel.gather_slabs(partials, axis)).astype(x.dtype)
