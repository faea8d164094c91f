"""Sums of a contraction's parts as one tree, whether added within a tile or from memory.

  y = ((p[0] + p[1]) + (p[2] + p[3])) + ...      (+ residual)

Parts are f32 and every addition is one IEEE sum, without an adjacent product that a compiler could
fuse with it. `matmul` writes parts to memory if a product has too few tiles for the machine; a mesh
with some slabs per device gathers the devices' parts.

A block reads 16 rows x 64 columns of all parts with one TMA copy, then continues with the next.

Shared memory: 4 KiB per part, 4 KiB for y and the same for a residual.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import gpu

ROWS = 16
COLUMNS = 64
MAX_PARTS = 8
BLOCKS_PER_MULTIPROCESSOR = 4


def add_tree(partials: Sequence[Any]) -> Any:
  """Adds partial sums as one binary tree: ((0+1)+(2+3))+...; an odd one moves to the next level."""
  values = list(partials)
  while len(values) > 1:
    paired = [a + b for a, b in zip(values[::2], values[1::2])]
    values = paired + values[2 * len(paired) :]
  return values[0]


def is_supported(
  partials: jax.Array | jax.ShapeDtypeStruct,
  stream: jax.Array | jax.ShapeDtypeStruct | None = None,
  *,
  out_dtype: Any = jnp.float32,
  interpret: bool = False,
) -> str | None:
  """Returns None if the kernel can run on these arguments here, else the reason."""
  floats = (jnp.bfloat16, jnp.float32)
  if partials.ndim != 3 or partials.dtype != jnp.float32:
    return f"got partials {partials.dtype}{list(partials.shape)}, expected float32 [s, m, n]"
  if partials.shape[0] not in (1, 2, 4, MAX_PARTS):
    return f"got {partials.shape[0]} partials, expected 1, 2, 4 or {MAX_PARTS} for one tree"
  if not partials.shape[2] or partials.shape[2] % COLUMNS:
    return f"got n={partials.shape[2]}, expected a positive multiple of {COLUMNS}: pad it"
  expected = partials.shape[1:]
  if stream is not None and (stream.shape != expected or stream.dtype not in floats):
    return (
      f"got stream {stream.dtype}{list(stream.shape)}, expected bfloat16 or float32"
      f" {list(expected)}"
    )
  if jnp.dtype(out_dtype) not in floats:
    return f"got out_dtype={jnp.dtype(out_dtype)}, expected bfloat16 or float32"
  return gpu.device_reason(interpret)


def reference(
  partials: jax.Array, stream: jax.Array | None = None, *, out_dtype: Any = jnp.float32
) -> jax.Array:
  """Computes the definition: the tree in float32, rounded to `out_dtype`, added to the stream."""
  total = add_tree(list(partials)).astype(out_dtype)
  if stream is None:
    return total
  return (total.astype(jnp.float32) + stream.astype(jnp.float32)).astype(out_dtype)


def add_partials(
  partials: jax.Array,
  *,
  stream: jax.Array | None = None,
  out_dtype: Any = jnp.float32,
  interpret: bool = False,
) -> jax.Array:
  """Returns the rounded sum of the parts, or stream + sum, rounded again: f[m, n].

  Applied to the partial products of a mesh's devices in order, the result has the bits of
  `matmul.contract_slabs` on one device with all slabs.

  Args:
    partials: f32[s, m, n], with 1, 2, 4 or 8 parts.
    stream: bf16 or f32 [m, n].
    out_dtype: bfloat16 or float32.
    interpret: run on a CPU; slow, for tests.

  Raises:
    NotImplementedError: with the reason given by `is_supported`.
  """
  reason = is_supported(partials, stream, out_dtype=out_dtype, interpret=interpret)
  gpu.refuse("add_partials", reason)
  return _add_partials(partials, stream, jnp.dtype(out_dtype).name, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _add_partials(
  partials: jax.Array, stream: jax.Array | None, out_dtype: str, interpret: bool
) -> jax.Array:
  whole_stream = None if stream is None else stream[None]
  return add_parts(partials[None], whole_stream, True, jnp.dtype(out_dtype), interpret)[0]


def _add_partials_forward(partials, stream, out_dtype, interpret):
  # The gradient only needs shapes and dtypes of the addends.
  kinds = (partials[:, :0], None if stream is None else stream[:0])
  return _add_partials(partials, stream, out_dtype, interpret), kinds


def _add_partials_backward(out_dtype, interpret, kinds, dy):
  del out_dtype, interpret
  partials, stream = kinds
  dpartials = jnp.broadcast_to(dy.astype(jnp.float32), (partials.shape[0], *dy.shape))
  return dpartials, None if stream is None else dy.astype(stream.dtype)


_add_partials.defvjp(_add_partials_forward, _add_partials_backward)


@functools.partial(jax.jit, static_argnames=("rounds_first", "out_dtype", "interpret"))
def add_parts(
  partials: jax.Array,
  residual: jax.Array | None,
  rounds_first: bool,
  out_dtype: Any,
  interpret: bool,
) -> jax.Array:
  """Runs the kernel: f32[q, s, m, n] (and f[q, m, n]) to f[q, m, n].

  Args:
    partials: parts of q sums.
    residual: added to each sum.
    rounds_first: whether the sum is rounded before the residual is added, and again after.
    out_dtype: dtype of y.
    interpret: run on a CPU.
  """
  planes, num_parts, m, n = partials.shape
  if m == 0:
    return jnp.zeros((planes, m, n), out_dtype)
  scratch: dict[str, gpu.Buffer | gpu.Barriers] = {
    "parts": gpu.Buffer((num_parts, ROWS, COLUMNS), jnp.float32),
    "y": gpu.Buffer((ROWS, COLUMNS), out_dtype),
    "loaded": gpu.Barriers(1 if residual is None else 2),
  }
  if residual is not None:
    scratch["added"] = gpu.Buffer((ROWS, COLUMNS), residual.dtype)
  grid = (planes, -(-m // ROWS), n // COLUMNS)

  def body(parts_ref, *refs, parts, y, loaded, added: Any = None):
    *residual_refs, y_ref = refs

    @plgpu.nd_loop(grid, collective_axes="block")
    def _(loop: plgpu.NDLoopInfo) -> None:
      plane, row, column = loop.index
      square = (pl.ds(row * ROWS, ROWS), pl.ds(column * COLUMNS, COLUMNS))
      all_parts = parts_ref.at[(plane, pl.ds(0, num_parts), *square)]
      plgpu.copy_gmem_to_smem(all_parts, parts, loaded)
      for residual_ref in residual_refs:
        plgpu.copy_gmem_to_smem(residual_ref.at[(plane, *square)], added, loaded)
      plgpu.barrier_wait(loaded)
      total = add_tree([parts.at[i][...] for i in range(num_parts)])
      if added is not None:
        if rounds_first:
          total = total.astype(out_dtype).astype(jnp.float32)
        total = total + added[...].astype(jnp.float32)
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      y[...] = total.astype(out_dtype)
      # All threads pass here, so the parts have been read before the next ones are copied.
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(y, y_ref.at[(plane, *square)])

    plgpu.wait_smem_to_gmem(0)

  num_items = grid[0] * grid[1] * grid[2]
  return gpu.kernel(
    body,
    name="add_parts",
    out_type=jax.ShapeDtypeStruct((planes, m, n), out_dtype),
    scratch=scratch,
    num_blocks=min(num_items, BLOCKS_PER_MULTIPROCESSOR * gpu.num_multiprocessors(interpret)),
    interpret=interpret,
  )(partials, *([] if residual is None else [residual]))
