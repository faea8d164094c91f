"""Tiles of `matmul` and `grouped_matmul`: shapes, buffers and positions."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import gpu

# Rows of one wgmma; side of the squares in which y is written.
WGMMA_ROWS = 64
SQUARE = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """The tiles of one kernel, and the layout of its operands.

  Attributes:
    block_m, block_n, block_k: a tile's tokens, columns, and elements of the contraction at a time.
    swapped: whether the weight's columns are on wgmma's 64-row axis.
    num_weights: 2 for a pair of matrices; their columns are multiplied together.
    joined: whether the pair is one array: the columns of its first half, then of its second.
    x_k_last, w_k_last: whether the contraction is the last axis.
    shards: parts of the contraction that are added as one tree.
    slabs_summed: whether the parts are slabs, [r, ...], rather than slices of the contraction.
    apart: whether each part is a separate tile with its own plane of y; nothing is added.
    rounds_first: whether the sum is rounded before the residual is added, and again after.
    out_dtype: dtype of y.
    residual_dtype: dtype of the residual, if there is one.
    max_stages: maximum depth of the ring, if it fits in shared memory.
    snake_width: tiles along n that are visited together.
  """

  block_m: int
  block_n: int
  block_k: int
  swapped: bool
  num_weights: int = 1
  joined: bool = False
  x_k_last: bool = True
  w_k_last: bool = False
  shards: int = 1
  slabs_summed: bool = False
  apart: bool = False
  rounds_first: bool = False
  out_dtype: Any = jnp.bfloat16
  residual_dtype: Any = None
  max_stages: int = 8
  snake_width: int = 8

  @property
  def warpgroups(self) -> int:
    """Number of multiplying warpgroups."""
    return (self.block_n if self.swapped else self.block_m) // WGMMA_ROWS

  @property
  def square(self) -> tuple[int, int]:
    """Piece of y that is written at a time, as (tokens, columns)."""
    return (self.block_m, SQUARE) if self.swapped else (WGMMA_ROWS, SQUARE)

  @property
  def parts_of_tile(self) -> int:
    """Parts of the contraction that one tile processes."""
    return 1 if self.apart else self.shards

  @property
  def parks(self) -> bool:
    """Whether the sum of the first half of the parts is stored in shared memory meanwhile.

    With eight parts, four sums are alive while the last part is multiplied, too many for registers.
    """
    return not self.swapped and self.parts_of_tile > 4

  def scratch(self, stages: int) -> gpu.Scratch:
    x_tile = (self.block_m, self.block_k) if self.x_k_last else (self.block_k, self.block_m)
    w_tile = (self.block_n, self.block_k) if self.w_k_last else (self.block_k, self.block_n)
    weights = {
      f"w{i}": gpu.Buffer((stages, *w_tile), jnp.bfloat16, swizzled=True)
      for i in range(self.num_weights)
    }
    scratch = {
      "x": gpu.Buffer((stages, *x_tile), jnp.bfloat16, swizzled=True),
      **weights,
      "y": gpu.Buffer((self.warpgroups, 2, *self.square), self.out_dtype, swizzled=True),
      "full": gpu.Barriers(1 + self.num_weights, stages),
      "empty": gpu.Barriers(self.warpgroups, stages),
    }
    if self.parks:
      shape = (self.warpgroups, WGMMA_ROWS, self.block_n)
      scratch["parked"] = gpu.Buffer(shape, jnp.float32, swizzled=True)
    if self.residual_dtype is not None:
      shape = (self.warpgroups, *self.square)
      scratch["residual"] = gpu.Buffer(shape, self.residual_dtype, swizzled=True)
      scratch["residual_full"] = gpu.Barriers(1, self.warpgroups)
    return scratch

  @property
  def stages(self) -> int:
    """Depth of the deepest ring that fits."""
    return gpu.deepest_ring(self.scratch, self.max_stages)

  @property
  def shared_memory_bytes(self) -> int:
    return gpu.shared_memory_bytes(self.scratch(self.stages))


class Groups(NamedTuple):
  """Work list by expert: each tile of rows, or each part of the contraction, has one weight.

  If x's rows are divided (`Plan.x_k_last`), an item is a tile of `block_m` rows. It starts at a
  multiple of 8, and writes rows up to `past`, a multiple of 8. Otherwise an item is one expert's
  part of the contraction, with start and non-zero length in multiples of `block_k`.

  Attributes:
    items: i32[i, 3] of (expert, first, past).
    num_items: i32[1], number of valid items.
  """

  items: jax.Array
  num_items: jax.Array


class Tile(NamedTuple):
  """A tile of y: its corner, its range of steps, and the rows that it may write.

  `x`, `weight` and `plane` select among several matrices x, w and y; `shard` is the tile's only
  part of the contraction if parts are apart.
  """

  row: Any
  column: Any
  steps: Any
  first_part: Any = 0
  x: Any = None
  weight: Any = None
  plane: Any = None
  past_row: Any = None
  shard: Any = 0
