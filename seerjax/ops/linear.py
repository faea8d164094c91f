"""Matrix products over slabs.

    columns   y[r] = x @ w[r]                   output columns in r slabs, kept apart
    contract  y = sum_r x[r] @ w[r]             contraction in r slabs, added as one binary tree

Operands are in the compute dtype; sums are in float32 and rounded once. On the rows of one tile
(see `tiles.map_rows`), these functions alone determine the bits of a product.
"""

from __future__ import annotations

from jax import lax
import jax.numpy as jnp

from seerjax import parallel
from seerjax.array_typing import Array, Float
from seerjax.ops import tiles


def dot(x: Float[Array, "n a"], w: Float[Array, "a e"]) -> Float[Array, "n e"]:
  """Returns f32[n, e], `x @ w` with float32 sums."""
  if x.shape[1] == 1:
    # XLA turns a contraction of one term into an elementwise product, and, depending on the program
    # around it, fuses that with an addition into one multiply-add. Two terms stay a product.
    x, w = jnp.pad(x, ((0, 0), (0, 1))), jnp.pad(w, ((0, 1), (0, 0)))
  return lax.dot_general(
    x,
    w,
    (((x.ndim - 1,), (0,)), ((), ())),
    precision=lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )


def dot_rows(x: Float[Array, "n d"], table: Float[Array, "v d"]) -> Float[Array, "n v"]:
  """Returns f32[n, v], `x @ table^T` with float32 sums; embeddings hold columns as rows."""
  return lax.dot_general(
    x,
    table,
    (((1,), (1,)), ((), ())),
    precision=lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )


def columns(
  x: Float[Array, "n d"],
  w: Float[Array, "r d e"],
  one: Array,
  axis: str | None,
) -> Float[Array, "r n e"]:
  """Returns f[r, n, e] in x's dtype: the product's columns, slab by slab."""
  product = lambda x, w: dot(x, w).astype(x.dtype)
  return tiles.map_slabs(product, x, w, one, axis)


def contract(
  x: Float[Array, "r n e"],
  w: Float[Array, "r e d"] | tiles.LayerSlabs,
  one: Array,
  axis: str | None,
) -> Float[Array, "n d"]:
  """Returns f[n, d] in x's dtype: partial products in float32, added in the fixed tree.

  Args:
    x: f[r, n, e], the local slabs of the contracted dimension.
    w: f[r, e, d].
    one: `tiles.traced_one`.
    axis: mesh axis the slabs are sharded over, None on one device.
  """
  product = lambda _, slab: dot(slab[0], slab[1])
  partials = tiles.map_slabs(product, (), (x, w), one, axis)
  return parallel.sum_slabs(partials, axis).astype(x.dtype)


def linear_reference(x: Float[Array, "n d"], w: Float[Array, "d e"]) -> Float[Array, "n e"]:
  """Reference implementation in float32."""
  return jnp.matmul(x.astype(jnp.float32), w.astype(jnp.float32), precision=lax.Precision.HIGHEST)
