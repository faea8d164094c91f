"""Tiles of our GPU kernels: the choices, and the same order of tiles in plain XLA for a CPU."""

from __future__ import annotations

import dataclasses

import jax
from jax import lax
import jax.numpy as jnp

from experiments.problems.kernel_speed.rules import Field
from pallas_kernels import matmul, rms_norm

MATMUL_FIELDS: tuple[Field, ...] = (
  Field("block_k", (64, 128), "elements of the contraction that are copied at once"),
  Field("swapped_rows", (0, 8, 16, 32, 64), "up to so many tokens take the swapped orientation"),
  Field("block_m", (64, 128), "tokens of a tall tile"),
  Field("block_n", (128, 256), "columns of a tall tile"),
  Field("swapped_block_n", (64, 128), "columns of a swapped tile"),
  Field("max_stages", (2, 3, 4, 5, 6, 7, 8), "depth of the ring"),
  Field("snake_width", (1, 2, 4, 8, 16, 32), "tiles along n that are walked together"),
)
NORM_FIELDS: tuple[Field, ...] = (
  Field("padding", (1024, 2048, 4096, 8192), "a row is padded to a multiple of so many features"),
  Field("blocks_per_multiprocessor", (1, 2, 4, 6, 8, 12, 16), "rows in flight"),
)


def walked_matmul(tiles: matmul.Config, x: jax.Array, w: jax.Array) -> jax.Array:
  """Returns x @ w, bf16[m, n], computed in plain XLA in the kernel's order of tiles.

  `max_stages` has no effect, because nothing is prefetched here.

  Args:
    tiles: configuration of the kernel.
    x: bf16[m, k].
    w: bf16[k, n].
  """
  if x.shape[0] <= (tiles.swapped_rows or 0):
    # The few tokens are along the width of a tile.
    swapped = dataclasses.replace(tiles, swapped_rows=0, block_m=tiles.swapped_block_n, block_n=128)
    return walked_matmul(swapped, w.T, x.T).T
  block_m, block_n, block_k = tiles.block_m, tiles.block_n, tiles.block_k
  rows, columns = x.shape[0], w.shape[1]
  x, w = _padded(x, (block_m, block_k)), _padded(w, (block_k, block_n))
  shape = x.shape[0] // block_m, w.shape[1] // block_n
  walk = [
    (i, j)
    for band in range(0, shape[1], tiles.snake_width)
    # Goes down one band and up the next.
    for i in (range(shape[0]) if band // tiles.snake_width % 2 == 0 else reversed(range(shape[0])))
    for j in range(band, min(band + tiles.snake_width, shape[1]))
  ]

  def tile(place: jax.Array) -> jax.Array:
    def add(step: jax.Array, total: jax.Array) -> jax.Array:
      left = lax.dynamic_slice(x, (place[0] * block_m, step * block_k), (block_m, block_k))
      right = lax.dynamic_slice(w, (step * block_k, place[1] * block_n), (block_k, block_n))
      return total + jnp.dot(left, right, preferred_element_type=jnp.float32)

    start = jnp.zeros((block_m, block_n), jnp.float32)
    return lax.fori_loop(0, x.shape[1] // block_k, add, start).astype(x.dtype)

  found = lax.map(tile, jnp.asarray(walk, jnp.int32))
  order = sorted(range(len(walk)), key=walk.__getitem__)
  whole = found[jnp.asarray(order)].reshape(*shape, block_m, block_n).swapaxes(1, 2)
  return whole.reshape(x.shape[0], w.shape[1])[:rows, :columns]


def walked_norm(tiles: rms_norm.Config, x: jax.Array, scale: jax.Array) -> jax.Array:
  """Returns the norm of x, bf16[n, d], in plain XLA, with the kernel's number of rows at a time.

  Args:
    tiles: configuration of the kernel.
    x: bf16[n, d].
    scale: bf16[d].
  """
  at_once = tiles.blocks_per_multiprocessor
  padded = _padded(x, (at_once, tiles.padding))
  # Padding adds nothing to the sum of squares; the weight corrects the mean.
  weight = padded.shape[1] / x.shape[1]
  scales = _padded(scale[None, :], (1, tiles.padding)).astype(jnp.float32)

  def norm(rows: jax.Array) -> jax.Array:
    wide = rows.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True) * weight
    return (wide / jnp.sqrt(mean + jnp.float32(1e-6)) * scales).astype(x.dtype)

  found = lax.map(norm, padded.reshape(-1, at_once, padded.shape[1]))
  return found.reshape(padded.shape)[: x.shape[0], : x.shape[1]]


def _padded(x: jax.Array, multiples: tuple[int, int]) -> jax.Array:
  """Returns a matrix padded with zeros to multiples of rows and columns."""
  return jnp.pad(x, [(0, -size % multiple) for size, multiple in zip(x.shape, multiples)])


def plain_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
  """Returns the norm as defined, compiled by XLA."""
  return rms_norm.reference(x, scale).astype(x.dtype)
