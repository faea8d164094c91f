"""Matrix products over slabs.

    columns   y[r] = x @ w[r]                   output columns in r slabs, kept apart
    contract  y = sum_r x[r] @ w[r]             contraction in r slabs, added as one binary tree

Operands are in the compute dtype, sums in float32, rounded once. Called on the rows of one tile
(see `tiles.map_rows`), or with kernels on all rows, these are the whole story of a product's bits.
"""

from __future__ import annotations

from jax import lax
import jax.numpy as jnp

from pallas_kernels import matmul
from seerjax import numerics as numerics_lib, parallel
from seerjax.array_typing import Array, Float
from seerjax.ops import tiles


def dot(
  x: Float[Array, "n a"], w: Float[Array, "a e"], numerics: numerics_lib.NumericsConfig
) -> Float[Array, "n e"]:
  """Returns f32[n, e], `x @ w` with float32 sums."""
  if numerics.uses_kernels:
    columns = w.shape[1]
    x, w = _padded(x, 1), _padded(_padded(w, 0), 1)
    out = matmul.matmul(x, w, out_dtype=jnp.float32, interpret=numerics.is_interpreted)
    return out[:, :columns]
  return lax.dot_general(
    x,
    w,
    (((x.ndim - 1,), (0,)), ((), ())),
    precision=lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )


def dot_rows(
  x: Float[Array, "n d"], table: Float[Array, "v d"], numerics: numerics_lib.NumericsConfig
) -> Float[Array, "n v"]:
  """Returns f32[n, v], `x @ table^T` with float32 sums; embeddings hold columns as rows."""
  if numerics.uses_kernels:
    return matmul.matmul(
      x, table, transposed=True, out_dtype=jnp.float32, interpret=numerics.is_interpreted
    )
  return lax.dot_general(
    x,
    table,
    (((1,), (1,)), ((), ())),
    precision=lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )


def _padded(x: Array, axis: int) -> Array:
  """Adds zeros up to the kernel's multiple, which add nothing to a sum; adapters need it."""
  missing = -x.shape[axis] % matmul.MULTIPLE
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, missing)
  return jnp.pad(x, widths) if missing else x


def columns(
  x: Float[Array, "n d"],
  w: Float[Array, "r d e"],
  one: Array,
  axis: str | None,
  numerics: numerics_lib.NumericsConfig,
) -> Float[Array, "r n e"]:
  """Returns f[r, n, e] in x's dtype: the product's columns, slab by slab."""
  product = lambda x, w: dot(x, w, numerics).astype(x.dtype)
  return tiles.map_slabs(product, x, w, one, axis, numerics)


def contract(
  x: Float[Array, "r n e"],
  w: Float[Array, "r e d"] | tiles.LayerSlabs,
  one: Array,
  axis: str | None,
  numerics: numerics_lib.NumericsConfig,
) -> Float[Array, "n d"]:
  """Returns f[n, d] in x's dtype: partial products in float32, added in the fixed tree.

  Args:
    x: f[r, n, e], the local slabs of the contracted dimension.
    w: f[r, e, d].
    one: `tiles.traced_one`.
    axis: mesh axis the slabs are sharded over, None on one device.
    numerics: what decides bits.
  """
  product = lambda _, slab: dot(slab[0], slab[1], numerics)
  partials = tiles.map_slabs(product, (), (x, w), one, axis, numerics)
  return parallel.tree_sum(parallel.gather_slabs(partials, axis)).astype(x.dtype)


def linear_reference(x: Float[Array, "n d"], w: Float[Array, "d e"]) -> Float[Array, "n e"]:
  """The definition, in float32."""
  return jnp.matmul(
    x.astype(jnp.float32), w.astype(jnp.float32), precision=lax.Precision.HIGHEST
  )
