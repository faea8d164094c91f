"""The gradient of `experts.mixture`: of its norm and router by a handler, of its experts by XLA.

    ops.moe.gradient     expert by expert, its rows in ascending order; weights' gradients
    handler, by rows     weights -> logits -> normed rows -> rows
    products over rows   router, biases, norm (`layers_backward.ADD_GRADIENT`)

The experts are those that the forward has chosen: a choice has no gradient.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from seerjax import numerics as numerics_lib, parallel
from seerjax.array_typing import Array
from seerjax.backends.native import (
  choices,
  ffi,
  layers_backward,
  norms,
  products,
  products_over_rows,
)
from seerjax.backends.native.layer_parts import (
  ONE,
  ZERO,
  Params,
  add_row,
  blocks,
  f32_of,
  live_rows,
  read_rows,
  scalar,
  scratch,
  scratch_of,
  write_rows,
)
from seerjax.backends.native.numbers import jit, read_row, round_row
from seerjax.backends.protocol import MixtureStage
from seerjax.backends.tiled import EXPERT_ADAPTERS, EXPERTS, slabs_of
from seerjax.layer_kinds import Experts
from seerjax.ops import moe, routing

# Operands, after the rows, and results, after the rows' gradient.
_OF_NORMED, _SIZES, _SCALARS, _NORM, _ROUTER, _BIAS, _IDS, _OF_WEIGHTS = map(np.int64, range(1, 9))
_OF_SCALE, _NORMED, _OF_LOGITS, _SCRATCH = map(np.int64, range(1, 5))
# Entries of the sizes, after the number of rows.
_SCORING, _IS_RENORMALISED = np.int64(1), np.int64(2)


@jit
def _route_gradient(arguments, results, first, last, worker):
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  count, chosen = ffi.dimension(arguments, _ROUTER, 1), ffi.dimension(arguments, _IDS, 1)
  is_bf16, eps = ffi.is_bfloat16(arguments, 0), scalar(arguments, _SCALARS, 0)
  is_narrow = ffi.is_bfloat16(arguments, _NORM)
  narrow, live = ffi.is_bfloat16(arguments, _ROUTER), live_rows(arguments, _SIZES)
  has_bias, block = ffi.dimension(arguments, _BIAS, 0) > 0, products.BLOCK_ROWS
  x = scratch_of(results, _SCRATCH, worker)
  given = x + 4 * block * d
  scale = given + 4 * block * d
  logits = scale + 4 * d
  bias = logits + 4 * block * count
  few = bias + 4 * count
  panel = few + 8 * chosen
  read_rows(arguments, _NORM, ZERO, ONE, d, scale)
  if has_bias:
    read_rows(arguments, _BIAS, ZERO, ONE, count, bias)
  for item in range(first, last):
    begin = block * item
    rows = min(block, n - begin)
    alive = min(max(live - begin, 0), rows)
    normed = ffi.address(results, _NORMED) + 4 * begin * d
    of_logits = ffi.address(results, _OF_LOGITS) + 4 * begin * count
    of_scale = ffi.address(results, _OF_SCALE) + 4 * begin * d
    read_rows(arguments, ZERO, begin, alive, d, x)
    for row in range(alive):
      at = 4 * row * d
      norms.norm_row(x + at, scale, d, eps, is_bf16, is_narrow, normed + at)
    router = ffi.address(arguments, _ROUTER)
    products.product(normed, d, ONE, alive, router, narrow, count, count, d, logits, count, ZERO)
    for row in range(alive):
      own, place = logits + 4 * row * count, 4 * (begin + row) * chosen
      if has_bias:
        add_row(own, bias, count)
      choices.choose_gradient(
        own, ffi.integer(arguments, _SIZES, _SCORING), count, chosen,
        ffi.integer(arguments, _SIZES, _IS_RENORMALISED) > 0, scalar(arguments, _SCALARS, 1),
        ffi.address(arguments, _IDS) + place, ffi.address(arguments, _OF_WEIGHTS) + place, few,
        of_logits + 4 * row * count,
      )  # fmt: skip
    # Products of a bfloat16 router take rounded rows (`products`).
    read_row(of_logits, False, logits, alive * count)
    round_row(logits, narrow, alive * count)
    products.product_transposed(
      logits, count, alive, router, narrow, count, d, count, given, d, ZERO, panel
    )
    round_row(given, is_bf16, alive * d)
    read_rows(arguments, _OF_NORMED, begin, alive, d, of_scale)
    add_row(given, of_scale, alive * d)
    round_row(given, is_bf16, alive * d)
    for row in range(alive):
      at = given + 4 * row * d
      to = of_scale + 4 * row * d
      norms.norm_row_gradient(x + 4 * row * d, scale, d, eps, is_bf16, is_narrow, at, at, to)
    write_rows(given, rows, d, results, ZERO, begin, alive)


@jit
def _cost(arguments):
  count = ffi.dimension(arguments, _ROUTER, 1)
  return 2 * live_rows(arguments, _SIZES) * ffi.dimension(arguments, 0, 1) * count


_ROUTE_GRADIENT = ffi.Handler("seerjax_route_gradient", blocks, _route_gradient, _cost)


def mixture_gradient(
  stage: MixtureStage,
  numerics: numerics_lib.NumericsConfig,
  weights: Params,
  x: Array,
  kept: tuple[Array, Array, Array],
  num_rows: Array,
  cotangent: Array,
  of_kept: Array,
) -> tuple[Params, Array, Array]:
  """Returns the gradients of `experts.mixture` to the weights, to x and to the residual rows.

  Args:
    stage: stage of the model.
    numerics: its `expert_tile` is used.
    weights: norm, router and experts of one layer.
    x: f[n, d], rows that were normed and routed.
    kept: normed rows f32[n, d], experts i32[n, e] and their weights f32[n, e] of the forward.
    num_rows: i32[], rows that were computed.
    cotangent: f[n, d], of the hidden rows.
    of_kept: f[n, d], cotangent of the normed rows.
  """
  kind, router = stage.shape.kind.feed_forward, routing.router_of(weights)
  assert isinstance(kind, Experts)
  rule = kind.routing
  normed, ids, chosen = kept
  (n, d), e = x.shape, rule.num_chosen
  is_live = jnp.arange(n, dtype=jnp.int32)[:, None] < num_rows
  live = lambda leaf: jnp.where(is_live, leaf, jnp.zeros((), leaf.dtype))
  cotangent, of_kept = lax.optimization_barrier((live(cotangent), live(of_kept)))
  slabs = slabs_of(weights)
  of_normed, of_chosen, of_slabs = moe.gradient(
    normed.astype(x.dtype), ids, chosen, slabs, num_rows, stage.axis, numerics,
    cotangent.astype(jnp.float32),
  )  # fmt: skip
  of_normed = lax.optimization_barrier(of_normed) + of_kept
  sizes = [num_rows, choices.SCORINGS[rule.scoring], int(rule.is_renormalised)]
  operands = (
    x,
    of_normed,
    jnp.stack([jnp.asarray(size, jnp.int32) for size in sizes]),
    jnp.asarray([stage.shape.norm_eps, rule.scale], jnp.float32),
    weights["mlp_norm"],
    router.weight,
    jnp.zeros((0,), jnp.float32) if router.bias is None else router.bias,
    ids,
    of_chosen,
  )
  count, block = rule.num_experts, products.BLOCK_ROWS
  own = scratch((2 * block + 1, d), (block + 1, count), (2, e), (count, products.PANEL))
  results = (jax.ShapeDtypeStruct(x.shape, x.dtype), f32_of(n, d), f32_of(n, d), f32_of(n, count))
  of_x, of_scale, normed, of_logits, _ = _ROUTE_GRADIENT((*results, own), *operands)
  one = jnp.ones((n, 1), jnp.float32)
  terms: dict[str, tuple[Array, Array]] = {
    "mlp_norm": (one, of_scale),
    "router": (normed, of_logits),
    "router_bias": (one, of_logits),
  }
  gradient: dict[str, Any] = {name: of_slabs[short] for name, short in EXPERTS.items()}
  for name, short in EXPERT_ADAPTERS.items():
    if name in weights:  # A scale is not trained.
      gradient[name] = of_slabs[short] | {"scale": jnp.zeros_like(weights[name]["scale"])}
  of_rows = jnp.stack([num_rows, jnp.int32(0), jnp.int32(0)])
  turned = scratch((products_over_rows.COLUMNS, products_over_rows.TURNED))
  for name, leaf in weights.items():
    if name in terms:
      left, given = (part[:, None] for part in terms[name])
      total = f32_of(1, left.shape[2], given.shape[2])
      found, _ = layers_backward.ADD_GRADIENT([total, turned], of_rows, left, given)
      gradient[name] = found.reshape(leaf.shape).astype(leaf.dtype)
    elif name not in gradient:
      gradient[name] = jnp.zeros_like(leaf)
  # On a mesh, collectives of the shared MLP's gradient come after those of the experts'.
  of_residual = cotangent if stage.axis is None else parallel.after(cotangent, of_x)
  # The residual's is added to others outside; barriers leave its products unfused on any mesh.
  return gradient, *lax.optimization_barrier((of_x, of_residual))
