"""Kernels with one deliberate defect each that the compile report refuses, and sound twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import gpu, rounding

ROWS = 64
# A function and the shapes of its arguments.
Call = tuple[Callable[..., Any], tuple[Any, ...]]


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype)


def centred(num_columns: int) -> Call:
  """Rows minus their maximum, f32[64, c]: a warpgroup holds all columns, c / 2 registers a thread.

  128 columns take 64 registers a thread; 640 columns take more than a thread has.
  """
  shape = (ROWS, num_columns)

  def body(x_ref, y_ref, buffer, loaded):
    plgpu.copy_gmem_to_smem(x_ref, buffer, loaded)
    plgpu.barrier_wait(loaded)
    x = plgpu.layout_cast(buffer[...], plgpu.Layout.WGMMA)
    highest = jnp.max(x, axis=1)
    buffer[...] = x - jax.lax.broadcast_in_dim(highest, shape, (0,))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, y_ref)
    plgpu.wait_smem_to_gmem(0)

  kernel = gpu.kernel(
    body,
    name="centred",
    out_type=struct(*shape),
    scratch={"buffer": gpu.Buffer(shape, jnp.float32, swizzled=True), "loaded": gpu.Barriers()},
    num_blocks=1,
    interpret=False,
  )
  return kernel, (struct(*shape),)


def fold(name: str, *, is_rounded: bool) -> Call:
  """x * x + y * y of f32[64, 64], each product rounded, or left to ptxas to fuse.

  The function is named after a kernel in which the report counts fused multiply-adds.
  """
  shape = (ROWS, 64)

  def multiply(x: jax.Array) -> jax.Array:
    if not is_rounded:
      return x * x
    return rounding.product(x, x, layout=rounding.TILE, interpret=False)

  def body(x_ref, y_ref, out_ref, x_buffer, y_buffer, loaded):
    plgpu.copy_gmem_to_smem(x_ref, x_buffer, loaded)
    plgpu.copy_gmem_to_smem(y_ref, y_buffer, loaded)
    plgpu.barrier_wait(loaded)
    x, y = (plgpu.layout_cast(b[...], plgpu.Layout.WGMMA) for b in (x_buffer, y_buffer))
    x_buffer[...] = multiply(x) + multiply(y)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(x_buffer, out_ref)
    plgpu.wait_smem_to_gmem(0)

  buffer = gpu.Buffer(shape, jnp.float32, swizzled=True)
  kernel = gpu.kernel(
    body,
    name=name,
    out_type=struct(*shape),
    scratch={"x_buffer": buffer, "y_buffer": buffer, "loaded": gpu.Barriers(num_arrivals=2)},
    num_blocks=1,
    interpret=False,
  )
  return kernel, (struct(*shape), struct(*shape))


def products(num_accumulators: int) -> Call:
  """The sum of several products x @ w, f32[64, 256], with all accumulators live at once.

  One accumulator takes 128 registers of a thread and two take all registers; ptxas then serialises
  the wgmma instructions.
  """
  shapes = {"x_buffer": (ROWS, 64), "w_buffer": (64, 256), "y_buffer": (ROWS, 256)}
  dtypes = {"x_buffer": jnp.bfloat16, "w_buffer": jnp.bfloat16, "y_buffer": jnp.float32}

  def body(x_ref, w_ref, y_ref, x_buffer, w_buffer, y_buffer, loaded):
    plgpu.copy_gmem_to_smem(x_ref, x_buffer, loaded)
    plgpu.copy_gmem_to_smem(w_ref, w_buffer, loaded)
    plgpu.barrier_wait(loaded)

    def multiply(*accumulators):
      for _ in range(2):
        for accumulator in accumulators:
          plgpu.wgmma(accumulator, x_buffer, w_buffer)
      plgpu.wgmma_wait(0)
      return tuple(accumulator[...] for accumulator in accumulators)

    accumulator = plgpu.WGMMAAccumulatorRef((ROWS, 256), jnp.float32)
    first, *others = pl.run_scoped(multiply, *[accumulator] * num_accumulators)
    y_buffer[...] = sum(others, first)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(y_buffer, y_ref)
    plgpu.wait_smem_to_gmem(0)

  scratch = {n: gpu.Buffer(shapes[n], dtypes[n], swizzled=True) for n in shapes}
  kernel = gpu.kernel(
    body,
    name="products",
    out_type=struct(ROWS, 256),
    scratch={**scratch, "loaded": gpu.Barriers(num_arrivals=2)},
    num_blocks=1,
    interpret=False,
  )
  x, w = struct(ROWS, 64, dtype=jnp.bfloat16), struct(64, 256, dtype=jnp.bfloat16)
  return kernel, (x, w)
