"""Block sizes, data in flight, and the required shared memory."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp

from pallas_kernels import gpu

HEAD_DIMS = (64, 128)
# Query rows of one warpgroup, and maximum number of multiplying warpgroups.
ROWS = 64
MAX_WARPGROUPS = 2
# Rows per block in which partials are written to memory; only live rows are written.
ROW_GROUP = 8
# Maximum memory of partials in mode "auto", in addition to a step's weights and pages.
WORKSPACE_BYTES = 256 << 20
# Registers of the copying warpgroup and of the computing ones, if there are three warpgroups.
COPY_REGISTERS = 40
COMPUTE_REGISTERS = 232
# Scores and weighted values that a thread can hold at a time.
HELD_REGISTERS = 160
# Of merges and of the backward pass, with one warpgroup per block.
BLOCKS_PER_MULTIPROCESSOR = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Block sizes, and data in flight.

  Attributes:
    kv_split: contract. Positions of one split, aligned to absolute positions.
    key_block: contract. Keys that are multiplied at a time within a split.
    query_tile: tuning. Maximum positions of a segment; times the query heads per key/value head, at
      most 128 rows.
    mode: tuning. "sequential" or "parallel", see the package; "auto" is `layout.mode_of`.
    stages: tuning. Blocks of keys, and of values, in flight; at most 4.
    skip_blocks: tuning. Skip blocks of a split in which no row of the tile sees a key, which would
      add zeros, and the mask of a split in which every row sees every key.
  """

  kv_split: int = 256
  key_block: int = 128
  query_tile: int = 16
  mode: Literal["auto", "sequential", "parallel"] = "auto"
  stages: int = 2
  skip_blocks: bool = True

  def __post_init__(self) -> None:
    if self.key_block not in (64, 128, 256):
      raise ValueError(f"got key_block={self.key_block}; expected 64, 128 or 256.")
    if self.kv_split < 1 or self.kv_split % self.key_block:
      raise ValueError(
        f"got kv_split={self.kv_split}; expected a positive multiple of key_block={self.key_block}."
      )
    if self.mode not in ("auto", "sequential", "parallel"):
      raise ValueError(f"got mode={self.mode!r}; expected 'auto', 'sequential' or 'parallel'.")
    if self.query_tile < 1:
      raise ValueError(f"got query_tile={self.query_tile}; expected at least 1.")
    if not 1 <= self.stages <= 4:
      raise ValueError(f"got stages={self.stages}; expected 1 to 4.")

  def warpgroups(self, group: int) -> int:
    """Returns the number of computing warpgroups for `group` query heads per key/value head."""
    return -(-self.query_tile * group // ROWS)

  def parks(self, head_dim: int) -> bool:
    """Returns whether a fold stores its weighted values in p's buffer while it has scores.

    A thread holds kv_split / 2 scores and head_dim / 2 weighted values; both do not fit in its
    registers together with wgmma's needs and addresses.
    """
    fits = head_dim <= self.key_block < self.kv_split
    return self.mode != "parallel" and fits and self.kv_split + head_dim > 2 * HELD_REGISTERS

  def scratch(self, group: int, head_dim: int, page_size: int, sinks: bool) -> gpu.Scratch:
    """Returns the scratch of one block of the forward pass."""
    compute = self.warpgroups(group)
    copies = -(-self.key_block // page_size)
    blocks = self.kv_split // self.key_block
    keys = gpu.Buffer((self.stages, self.key_block, head_dim), jnp.bfloat16, swizzled=True)
    scratch = {
      "q": gpu.Buffer((compute, ROWS, head_dim), jnp.bfloat16, swizzled=True),
      "p": gpu.Buffer((compute, blocks, ROWS, self.key_block), jnp.bfloat16, swizzled=True),
      "k": keys,
      "v": keys,
      "q_loaded": gpu.Barriers(num_arrivals=compute + sinks),
      "k_loaded": gpu.Barriers(num_arrivals=copies, num_barriers=self.stages),
      "v_loaded": gpu.Barriers(num_arrivals=copies, num_barriers=self.stages),
      "q_free": gpu.Barriers(num_arrivals=compute),
      "k_free": gpu.Barriers(num_arrivals=compute, num_barriers=self.stages),
      "v_free": gpu.Barriers(num_arrivals=compute, num_barriers=self.stages),
    }
    if self.mode == "parallel":
      scratch["partial"] = gpu.Buffer((compute, ROWS, head_dim), jnp.float32, swizzled=True)
    if sinks:
      scratch["sinks"] = gpu.Buffer((compute, ROWS), jnp.float32)
    return scratch

  def shared_memory_bytes(self, group: int, head_dim: int, page_size: int, sinks: bool) -> int:
    """Returns the maximum shared memory of a block over all kernels."""
    scratches = [self.scratch(group, head_dim, page_size, sinks)]
    scratches.append(backward_scratch(head_dim, 3, 2 * ROWS))
    if self.mode == "parallel":
      scratches.append(self.merge_scratch(head_dim, sinks))
    return max(gpu.shared_memory_bytes(scratch) for scratch in scratches)

  def merge_scratch(self, head_dim: int, sinks: bool) -> gpu.Scratch:
    """Returns the scratch of one block of the merge of partials."""
    scratch = {
      "partial": gpu.Buffer((self.stages, ROWS, head_dim), jnp.float32, swizzled=True),
      "stats": gpu.Buffer((self.stages, 2, ROWS), jnp.float32),
      "mean": gpu.Buffer((ROWS, head_dim), jnp.bfloat16, swizzled=True),
      "loaded": gpu.Barriers(num_barriers=self.stages * (ROWS // ROW_GROUP)),
      "stats_loaded": gpu.Barriers(num_barriers=self.stages),
    }
    if sinks:
      scratch["sinks"] = gpu.Buffer((ROWS,), jnp.float32)
      scratch["sinks_loaded"] = gpu.Barriers()
    return scratch


class Static(NamedTuple):
  """Compile-time parameters of a kernel; the mode of `config` is not "auto" here."""

  config: Config
  window: int | None
  interpret: bool


def backward_scratch(head_dim: int, num_copies: int, passing_copies: int) -> gpu.Scratch:
  """Returns the scratch of one block of the backward pass, for queries or for keys and values.

  Args:
    head_dim: c.
    num_copies: copies that fill the buffers `held` for a whole item: q and do, or k and v.
    passing_copies: copies that fill one of the two buffers of the other operands, `passing`.
  """
  return {
    "held": gpu.Buffer((2, ROWS, head_dim), jnp.bfloat16, swizzled=True),
    "passing": gpu.Buffer((2, 2, ROWS, head_dim), jnp.bfloat16, swizzled=True),
    "weights": gpu.Buffer((2, ROWS, ROWS), jnp.bfloat16, swizzled=True),
    "rows": gpu.Buffer((2, 3, ROWS), jnp.float32),
    "held_loaded": gpu.Barriers(num_arrivals=num_copies),
    "loaded": gpu.Barriers(num_arrivals=passing_copies, num_barriers=2),
  }
