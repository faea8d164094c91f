"""Configuration of `matmul`, and the resulting tiles."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels import gpu
from pallas_kernels.matmul_tiles import Plan

# Shared memory is laid out in tiles of 8 rows x 64 bfloat16, and TMA copies whole tiles: n and k
# are multiples of 64; more than 8 tokens are padded with up to 7 rows of zeros.
MULTIPLE = 64
ROW_MULTIPLE = 8
# Weights with at most this many columns have narrow tiles, so that slabs fill more of the machine.
NARROW_COLUMNS = 1024
# Maximum number of tokens in the swapped orientation by default.
MOST_SWAPPED_ROWS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The reduction, and its distribution over the machine.

  Attributes:
    block_k: contract. Elements of the contraction that are copied and added at a time.
    shards: contract. Equal parts of the contraction, added as one tree: 1, 2, 4 or 8.
    swapped_rows: tuning. Maximum number of tokens in the swapped orientation, which reads a weight
      faster for few tokens; both orientations, and every width of the swapped one, gave the same
      bits on an H100 (docs/results/gpu.md). None is 64 on a GPU, and 0 in the interpreter, where
      bits depend on the shape of a product. Engines check this at their start (`run.self_test`).
    block_m: tuning. Tokens of a tall tile: 64 per warpgroup.
    block_n: tuning. Columns of a tall tile; halved for a pair and if parts are added, at most 128
      for a weight (or a slab) of at most 1,024 columns. It does not depend on the number of rows.
    swapped_block_n: tuning. Columns of a swapped tile: 64 per warpgroup.
    max_stages: tuning. Maximum depth of the ring, if it fits in shared memory.
    snake_width: tuning. Tiles along n that are visited together, to reuse L2; reduced to its
      greatest common divisor with the number of tiles.
    mode: tuning. "sequential", "parallel", or "auto": parallel if a product of several parts has
      tiles for fewer than a third of the multiprocessors (and no bias). Both give the same bits.
  """

  block_k: int = 64
  shards: int = 1
  swapped_rows: int | None = None
  block_m: int = 128
  block_n: int = 256
  swapped_block_n: int = 64
  max_stages: int = 8
  snake_width: int = 8
  mode: str = "auto"

  def __post_init__(self) -> None:
    choices = {
      "block_k": (64, 128),
      "shards": (1, 2, 4, 8),
      "swapped_rows": (None, 0, 8, 16, 32, 64),
      "block_m": (64, 128),
      "block_n": (128, 256),
      "swapped_block_n": (64, 128),
      "mode": ("auto", "sequential", "parallel"),
    }
    gpu.check_config(self, choices, {"max_stages": 2, "snake_width": 1})

  def shared_memory_bytes(
    self, num_rows: int, *, pair: bool = False, residual: bool = False
  ) -> int:
    """Returns the shared memory of a block for `num_rows` tokens."""
    return plan(
      self, num_rows, pair=pair, residual_dtype=jnp.bfloat16 if residual else None
    ).shared_memory_bytes


def plan(
  config: Config,
  num_rows: int,
  *,
  columns: int | None = None,
  pair: bool = False,
  joined: bool = False,
  slabs: int | None = None,
  x_k_last: bool = True,
  w_k_last: bool = False,
  out_dtype: Any = jnp.bfloat16,
  residual_dtype: Any = None,
  interpret: bool = False,
) -> Plan:
  """Returns the tiles for `num_rows` tokens; no order of sums depends on them.

  Args:
    config: see `Config`.
    num_rows: m.
    columns: n, if it may make tiles narrow.
    pair: whether it is a `swiglu`.
    joined: whether its weights are one array.
    slabs: number of slabs that are added; None if K is divided into the config's shards instead.
    x_k_last: see `Plan`.
    w_k_last: see `Plan`.
    out_dtype: see `Plan`.
    residual_dtype: see `Plan`.
    interpret: for a CPU.
  """
  shards = config.shards if slabs is None else slabs
  swapped_rows = config.swapped_rows
  if swapped_rows is None:
    swapped_rows = 0 if interpret else MOST_SWAPPED_ROWS
  # If tokens are contracted (dw) there is no short side, so tiles stay tall.
  swapped = x_k_last and num_rows <= swapped_rows
  if swapped:
    block_m = next(size for size in (8, 16, 32, 64) if num_rows <= size)
    # With only 64 columns, a tile's second 64 columns would overwrite the first.
    block_n = config.swapped_block_n if columns is None else min(config.swapped_block_n, columns)
  else:
    block_m = config.block_m
    block_n = config.block_n // 2 if pair or shards > 1 else config.block_n
    if columns is not None and columns <= NARROW_COLUMNS:
      block_n = min(block_n, 128)
  return Plan(
    block_m=block_m,
    block_n=block_n,
    block_k=config.block_k,
    swapped=swapped,
    num_weights=2 if pair else 1,
    joined=joined,
    x_k_last=x_k_last,
    w_k_last=w_k_last,
    shards=shards,
    slabs_summed=slabs is not None,
    rounds_first=slabs is not None,
    out_dtype=jnp.dtype(out_dtype),
    residual_dtype=residual_dtype,
    max_stages=config.max_stages,
    snake_width=config.snake_width,
  )
