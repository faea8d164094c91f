"""JAX's own kernels for Hopper, each with a good configuration from its own search."""

from __future__ import annotations

import importlib

import jax


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
  """Returns x @ w."""
  shipped = importlib.import_module("jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu")
  config = shipped.TuningConfig(
    tile_m=128 if x.shape[0] % 128 == 0 else 64,
    tile_n=128 if w.shape[1] % 256 == 0 else 64,
    tile_k=64,
    max_concurrent_steps=4,
    grid_minor_dim=shipped.MatmulDimension.N,
    grid_tile_width=8,
  )
  return shipped.matmul(x, w, None, config)


def ragged_dot(x: jax.Array, sizes: jax.Array, w: jax.Array) -> jax.Array:
  """Returns each row times its group's weight."""
  shipped = importlib.import_module("jax.experimental.pallas.ops.gpu.ragged_dot_mgpu")
  return shipped.ragged_dot(
    x,
    w,
    group_sizes=sizes,
    block_m=128 if x.shape[0] > 64 * w.shape[0] else 64,
    block_n=128,
    block_k=64,
    max_concurrent_steps=4,
    grid_block_n=2,
  )


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  """Returns causal attention over contiguous keys, in float16."""
  shipped = importlib.import_module("jax.experimental.pallas.ops.gpu.attention_mgpu")
  config = shipped.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2, causal=True)
  return shipped.attention(q, k, v, config)
