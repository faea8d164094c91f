"""The part of a layer after attention with a mixture of experts, in three passes.

    rows      output projection, norm, router, shared MLP      in tiles of rows
    experts   the chosen experts of each row                   in tiles of rows of one expert
    rows      the sum is added to the residual stream          in tiles of rows

A backend runs the first pass as it runs other definitions; `ops.moe` and the last pass are XLA's.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

import jax.numpy as jnp

from seerjax.array_typing import Array
from seerjax.backends.adapters import RowAdapters
from seerjax.backends.protocol import Backend, LayerShape, Operations, Stage
from seerjax.layer_kinds import Experts
from seerjax.models import mlp
from seerjax.models.parameters import Params
from seerjax.ops import moe, routing

# Weights that only the second pass reads.
SLABS = {"expert_gate_up": "gate_up", "expert_down": "down"}
# Numbers of each expert, f32[E], that are for a watch and no weights.
LOADS = "expert_loads"

# `(backend, rule, weights of the layer, normed rows f[n, d], ids i32[n, e], num_rows)` -> what it
# keeps of a layer's choices.
Watch = Callable[[Backend, routing.RoutingConfig, Params, Array, Array, Array], Any]


def after_attention(
  backend: Backend,
  shape: LayerShape,
  axis: str | None,
  weights: Params,
  rows: Any,
  num_rows: Array,
  adapters: RowAdapters | None = None,
  watch: Watch | None = None,
) -> tuple[Array, Any]:
  """Maps hidden rows f[n, d] and attention outputs f[n, k, g, c] to hidden rows f[n, d].

  Returns them and what `watch` keeps, () without it.

  Args:
    backend: backend of the passes over rows.
    shape: shape of the layer; its feed-forward part is `Experts`.
    axis: mesh axis of the slabs, None on one device.
    weights: weights of the layer.
    rows: (hidden rows, attention outputs).
    num_rows: i32[], rows that are computed.
    adapters: as in `Backend.after_attention`.
    watch: sees the layer's choices; it changes no bit of the rows.
  """
  kind = shape.kind.feed_forward
  assert isinstance(kind, Experts)
  of_rows = {name: leaf for name, leaf in weights.items() if name not in (*SLABS, LOADS)}
  stage = Stage(shape, axis, routed_rows)
  x, normed, ids, chosen, *shared = backend.after_attention(
    stage, of_rows, rows, num_rows, adapters
  )
  slabs = {short: weights[name] for name, short in SLABS.items()}
  mixed = moe.experts(normed, ids, chosen, slabs, num_rows, axis, backend.numerics)
  scales = {name: weights[name] for name in ("mlp_out_norm",) if name in weights}
  add = functools.partial(_added_rows, backend, shape)
  out = backend.map_rows(add, scales, (x, mixed, *shared), num_rows)
  if watch is None:
    return out, ()
  return out, watch(backend, kind.routing, weights, normed, ids, num_rows)


def router_of(weights: Params) -> routing.Router:
  """Returns a layer's router."""
  biases = (weights.get(name) for name in ("router_bias", "router_correction_bias"))
  return routing.Router(weights["router"], *biases)


def routed_rows(
  operations: Operations,
  shape: LayerShape,
  axis: str | None,
  weights: Params,
  rows: Any,
  one: Array,
) -> tuple[Array, ...]:
  """Returns hidden rows, normed rows f[n, d], ids i32[n, e], weights f32[n, e] and shared MLP."""
  kind = shape.kind.feed_forward
  assert isinstance(kind, Experts)
  x = mlp.projected_rows(operations, shape, axis, weights, rows, one)
  normed = mlp.normed_rows(operations, shape, weights["mlp_norm"], x)
  ids, chosen = routing.route_rows(normed, router_of(weights), kind.routing)
  if not kind.shared_size:
    return x, normed, ids, chosen
  return x, normed, ids, chosen, mlp.gated_rows(operations, kind, axis, weights, normed, one)


def _added_rows(
  operations: Operations, shape: LayerShape, weights: Params, rows: tuple[Array, ...], one: Array
) -> Array:
  """Adds the experts' sum f32[n, d], and the shared MLP's, to the residual stream."""
  x, mixed, *shared = rows
  for part in shared:
    mixed = mixed + part.astype(jnp.float32)
  out = mixed.astype(x.dtype)
  return x + mlp.normed_output(operations, shape, weights, "mlp_out_norm", out)
