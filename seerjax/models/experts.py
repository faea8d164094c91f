"""The part of a layer after attention with a mixture of experts, in three passes.

    rows      output projection, norm, router, shared MLP      in tiles of rows
    experts   the chosen experts of each row                   in tiles of rows of one expert
    rows      the sum is added to the residual stream          in tiles of rows

XLA's backends run these definitions, with `ops.moe` between them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from seerjax.array_typing import Array
from seerjax.backends.adapters import RowAdapters
from seerjax.backends.protocol import Backend, LayerShape, MixtureStage, Operations
from seerjax.layer_kinds import Experts
from seerjax.models import mlp
from seerjax.models.parameters import Params
from seerjax.ops import routing

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
  of_layer = {name: leaf for name, leaf in weights.items() if name != LOADS}
  stage = MixtureStage(shape, axis, routed_rows, added_rows)
  out, normed, ids = backend.mixture(stage, of_layer, rows, num_rows, adapters)
  if watch is None:
    return out, ()
  return out, watch(backend, kind.routing, weights, normed, ids, num_rows)


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
  ids, chosen = routing.route_rows(normed, routing.router_of(weights), kind.routing)
  if not kind.shared_size:
    return x, normed, ids, chosen
  return x, normed, ids, chosen, mlp.gated_rows(operations, kind, axis, weights, normed, one)


def added_rows(
  operations: Operations,
  shape: LayerShape,
  axis: str | None,
  weights: Params,
  rows: tuple[Array, ...],
  one: Array,
) -> Array:
  """Adds the experts' sum f32[n, d], and the shared MLP's, to the residual stream."""
  del axis, one
  x, mixed, *shared = rows
  for part in shared:
    mixed = mixed + part.astype(jnp.float32)
  out = mixed.astype(x.dtype)
  return x + mlp.normed_output(operations, shape, weights, "mlp_out_norm", out)
