"""The order of sums of token scores, and the resulting tiles."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels import gpu, matmul

# Rows of one wgmma, and of one warpgroup.
ROWS = 64
WARPGROUPS = 2
# Columns in which dz is written at a time.
STRIP = 32
# TMA copies whole tiles of 8 rows x 64 bfloat16.
ROW_MULTIPLE = 8
MULTIPLE = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The order of all sums, and the distribution of work over the machine.

  Attributes:
    shards: contract. Slabs of the vocabulary, merged as one tree: 1, 2, 4 or 8.
    vocabulary_tile: contract. Ids of one partial.
    block_k: contract. Features that are copied and added at a time.
    gradient_columns: contract of dhidden. Ids with dz in memory at a time.
    gradient: configuration of the gradient's products. Its `shards` must be 1, because a row of dz
      has no logical shards.
    max_stages: tuning. Maximum depth of the ring, if it fits in shared memory.
    snake_width: tuning. Tiles of the vocabulary that are visited together, to reuse L2.
  """

  shards: int = 8
  vocabulary_tile: int = 256
  block_k: int = 64
  gradient_columns: int = 16384
  gradient: matmul.Config = matmul.Config()
  max_stages: int = 8
  snake_width: int = 8

  def __post_init__(self) -> None:
    choices = {
      "shards": (1, 2, 4, 8),
      "vocabulary_tile": (64, 128, 256),
      "block_k": (64, 128),
    }
    gpu.check_config(self, choices, {"max_stages": 2, "snake_width": 1})
    if self.gradient_columns < MULTIPLE or self.gradient_columns % MULTIPLE:
      raise ValueError(
        f"got gradient_columns={self.gradient_columns}; expected a positive multiple of {MULTIPLE}."
      )
    if self.gradient.shards != 1:
      raise ValueError(f"got gradient.shards={self.gradient.shards}; expected 1.")

  def shared_memory_bytes(self, num_rows: int) -> int:
    """Returns the maximum shared memory of a block for `num_rows` rows, forward or backward."""
    return max(
      gpu.shared_memory_bytes(tiles.scratch(tiles.stages))
      for tiles in (plan(self, num_rows), plan(self, num_rows, backward=True))
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """The work of a block's two warpgroups: `row_groups` x 64 rows, `column_groups` tiles of ids."""

  row_groups: int
  column_groups: int
  vocabulary_tile: int
  block_k: int
  backward: bool
  max_stages: int

  def scratch(self, stages: int) -> gpu.Scratch:
    hidden = (stages, self.row_groups * ROWS, self.block_k)
    table = (stages, self.column_groups * self.vocabulary_tile, self.block_k)
    scratch = {
      "hidden": gpu.Buffer(hidden, jnp.bfloat16, swizzled=True),
      "table": gpu.Buffer(table, jnp.bfloat16, swizzled=True),
      "full": gpu.Barriers(1 + self.column_groups, stages),
      "empty": gpu.Barriers(WARPGROUPS, stages),
    }
    if self.backward:
      strips = (WARPGROUPS, 2, ROWS, STRIP)
      scratch["strips"] = gpu.Buffer(strips, jnp.bfloat16, swizzled=True)
    return scratch

  @property
  def stages(self) -> int:
    """Depth of the deepest ring that fits."""
    return gpu.deepest_ring(self.scratch, self.max_stages)


def plan(config: Config, num_rows: int, *, backward: bool = False) -> Plan:
  """Returns the plan of a block for `num_rows` rows; no order of sums depends on it."""
  row_groups = 1 if num_rows <= ROWS else WARPGROUPS
  return Plan(
    row_groups=row_groups,
    column_groups=WARPGROUPS // row_groups,
    vocabulary_tile=config.vocabulary_tile,
    block_k=config.block_k,
    backward=backward,
    max_stages=config.max_stages,
  )
