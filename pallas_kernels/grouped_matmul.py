"""Matmul of tokens sorted by expert with the weights of their experts; forward and backward.

  y[i] = x[i] @ w[expert of i]

Group g of x's rows follows group g - 1 and has `group_sizes[g]` rows, a number that is only known
on the GPU. Rows after the last group are zero in y.

The kernel, and so the reduction, is that of `matmul`: start at zero, then blocks of `block_k` in
ascending order, f32 sums of bf16 products, one rounding. A tile has rows of one expert, so a row's
bits depend on that row and its expert's weight, not on the size of its group or its position in it.

XLA first writes two small arrays:

  a copy of x in which each group starts at a multiple of 8 rows, because TMA moves 8 rows at a time
    (at most 7 rows of zeros per non-empty group; y has the same rows and is copied back),
  the work list: (expert, first row, past row) for each tile of `block_m` rows; at most one tile per
    non-empty group, plus one for every `block_m` rows.

A group's last rows are written in blocks of eight, so that no tile writes another group's rows.

        x    | g0 g0 g0 0 0 0 0 0 | g2 g2 g2 g2 g2 g2 g2 g2 | g2 0 0 0 0 0 0 0 |     8 rows each
        tiles  (0, 0, 8)            (2, 8, 24)                        none for the empty g1

Backward: dx uses the same kernel with the weights transposed. dw[g] is the sum over g's rows in
ascending order, in blocks of 64 that start at g's first row; for this, groups are padded to
multiples of 64, an empty group to 64 rows of zeros.

Shared memory: as in `matmul`.

Source: Gale et al. 2022, https://arxiv.org/abs/2211.15841, for tiles with one expert each.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import gpu, matmul
from pallas_kernels.matmul_tiles import WGMMA_ROWS, Groups

# Rows per block of dw; each group's part of the contraction is padded to a multiple of it.
PART_ROWS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The reduction, and its distribution over the machine; see `matmul.Config`.

  Attributes:
    block_k: contract. Elements of the contraction that are copied and added at a time.
    block_m: tuning. Rows of a tile, 64 per warpgroup; 64 if experts have at most 64 rows on
      average. No instruction depends on it.
    block_n: tuning. Columns of a tile.
    max_stages: tuning. Maximum depth of the ring, if it fits in shared memory.
    snake_width: tuning. Neighbouring tiles along n that are visited together, to reuse L2.
  """

  block_k: int = 64
  block_m: int = 128
  block_n: int = 256
  max_stages: int = 8
  snake_width: int = 8

  def __post_init__(self) -> None:
    self.for_rows(WGMMA_ROWS + 1, 1)  # Validates the fields.

  def for_rows(self, num_rows: int, num_experts: int) -> matmul.Config:
    """Returns the Config of `matmul`; tiles have one warpgroup if experts have few rows each."""
    is_short = num_rows <= num_experts * WGMMA_ROWS
    block_m = min(self.block_m, WGMMA_ROWS) if is_short else self.block_m
    # Swapped tiles are not implemented for groups.
    fields: dict[str, Any] = dataclasses.asdict(self) | {"block_m": block_m, "swapped_rows": 0}
    return matmul.Config(**fields)

  def shared_memory_bytes(self, num_rows: int, num_experts: int) -> int:
    """Returns the shared memory of a block in bytes."""
    return self.for_rows(num_rows, num_experts).shared_memory_bytes(num_rows)


def is_supported(
  x: matmul.Shaped,
  group_sizes: matmul.Shaped,
  w: matmul.Shaped,
  *,
  transposed: bool = False,
  out_dtype: Any = None,
  config: Config = Config(),
  interpret: bool = False,
) -> str | None:
  """Returns None if the kernel can run on these arguments here, else the reason."""
  weight = "w[e, n, k]" if transposed else "w[e, k, n]"
  if w.ndim != 3 or w.shape[0] == 0:
    return f"got w{list(w.shape)}, expected {weight} of at least one expert"
  if group_sizes.shape != w.shape[:1] or group_sizes.dtype != jnp.int32:
    return (
      f"got group_sizes {group_sizes.dtype}{list(group_sizes.shape)}, expected"
      f" int32[{w.shape[0]}], one for each expert"
    )
  if x.ndim != 2 or x.shape[1] != w.shape[2 if transposed else 1]:
    return f"got x{list(x.shape)} and w{list(w.shape)}, expected x[m, k] and {weight}"
  return matmul.is_supported(
    x,
    jax.ShapeDtypeStruct(w.shape[1:], w.dtype),
    transposed=transposed,
    out_dtype=out_dtype,
    config=config.for_rows(x.shape[0], w.shape[0]),
    interpret=interpret,
  )


def reference(
  x: jax.Array, group_sizes: jax.Array, w: jax.Array, *, transposed: bool = False
) -> jax.Array:
  """Computes the definition in float32, f32[m, n]: each row times all weights, one selected."""
  expert = expert_of_rows(group_sizes, x.shape[0])
  w32 = w.astype(jnp.float32)
  x32 = x.astype(jnp.float32)
  product = "mk,enk->emn" if transposed else "mk,ekn->emn"
  each = jnp.einsum(product, x32, w32, precision=lax.Precision.HIGHEST)
  mine = jnp.arange(w.shape[0])[:, None] == expert[None, :]
  return jnp.sum(jnp.where(mine[:, :, None], each, 0.0), axis=0)


def grouped_matmul(
  x: jax.Array,
  group_sizes: jax.Array,
  w: jax.Array,
  *,
  transposed: bool = False,
  out_dtype: Any = None,
  config: Config = Config(),
  interpret: bool = False,
) -> jax.Array:
  """Returns each row times its expert's weight: f[m, n], rounded once.

  Args:
    x: bf16[m, k], sorted by expert; m may be 0.
    group_sizes: i32[e], non-negative, with a sum of at most m; later rows give zeros.
    w: bf16[e, k, n], or bf16[e, n, k] if `transposed`.
    transposed: whether w is stored with the contraction last.
    out_dtype: bfloat16 or float32; None is x's dtype.
    config: see `Config`.
    interpret: run on a CPU; slow, for tests.

  Raises:
    NotImplementedError: with the reason given by `is_supported`.
  """
  reason = is_supported(
    x, group_sizes, w, transposed=transposed, out_dtype=out_dtype, config=config,
    interpret=interpret,
  )  # fmt: skip
  gpu.refuse("grouped_matmul", reason)
  dtype = jnp.dtype(out_dtype or x.dtype).name
  return _grouped_matmul(x, group_sizes, w, transposed, dtype, config, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _grouped_matmul(x, group_sizes, w, transposed, out_dtype, config, interpret):
  num_rows, n = x.shape[0], w.shape[1 if transposed else 2]
  if num_rows == 0:
    return jnp.zeros((0, n), out_dtype)
  each = config.for_rows(num_rows, w.shape[0])
  padded = padded_groups(group_sizes, num_rows, matmul.ROW_MULTIPLE)
  work = row_tiles(padded, num_rows, each.block_m)
  tiles = matmul.plan(each, num_rows, w_k_last=transposed, out_dtype=jnp.dtype(out_dtype))
  y = matmul.contract(tiles, padded.rows_of(x), (w,), None, None, interpret, work)
  return jnp.take(y, padded.place, axis=0, mode="fill", fill_value=0)


def _grouped_matmul_forward(x, group_sizes, w, transposed, out_dtype, config, interpret):
  y = _grouped_matmul(x, group_sizes, w, transposed, out_dtype, config, interpret)
  return y, (x, group_sizes, w)


def _grouped_matmul_backward(transposed, out_dtype, config, interpret, saved, dy):
  x, group_sizes, w = saved
  rounded = dy.astype(x.dtype)
  dx = _grouped_matmul(rounded, group_sizes, w, not transposed, x.dtype.name, config, interpret)
  return dx, None, _weight_gradient(x, group_sizes, w, rounded, transposed, config, interpret)


_grouped_matmul.defvjp(_grouped_matmul_forward, _grouped_matmul_backward)


def _weight_gradient(
  x: jax.Array,
  group_sizes: jax.Array,
  w: jax.Array,
  dy: jax.Array,
  transposed: bool,
  config: Config,
  interpret: bool,
) -> jax.Array:
  """Returns the sum of x^T dy over each expert's rows, with w's shape and dtype."""
  if x.shape[0] == 0:
    return jnp.zeros_like(w)
  left, right = (dy, x) if transposed else (x, dy)
  each = dataclasses.replace(config.for_rows(left.shape[1], 1), block_k=PART_ROWS)
  padded = padded_groups(group_sizes, x.shape[0], PART_ROWS, least=PART_ROWS)
  experts = jnp.arange(w.shape[0], dtype=jnp.int32)
  work = Groups(
    jnp.stack([experts, padded.first, padded.past], axis=1),
    jnp.full((1,), w.shape[0], jnp.int32),
  )
  tiles = matmul.plan(each, left.shape[1], x_k_last=False, out_dtype=w.dtype)
  rows, columns = padded.rows_of(left), padded.rows_of(right)
  return matmul.contract(tiles, rows, (columns,), None, None, interpret, work)


def expert_of_rows(group_sizes: jax.Array, num_rows: int) -> jax.Array:
  """Returns each row's expert, i32[num_rows]; the number of experts for rows after all groups."""
  ends = jnp.cumsum(group_sizes)
  return jnp.searchsorted(ends, jnp.arange(num_rows), side="right").astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class PaddedGroups:
  """Groups padded with rows of zeros, so that their first rows are multiples of one number.

  Attributes:
    first, past: i32[e]. Range of a group's rows, zeros included.
    place: i32[m]. New index of each row; out of range for rows after the last group.
    num_rows: number of rows in the worst case.
  """

  first: jax.Array
  past: jax.Array
  place: jax.Array
  num_rows: int

  def rows_of(self, x: jax.Array) -> jax.Array:
    """Returns x's rows at their new indices, f[num_rows, k]."""
    source = jnp.full((self.num_rows,), x.shape[0], jnp.int32)
    source = source.at[self.place].set(jnp.arange(x.shape[0], dtype=jnp.int32), mode="drop")
    return jnp.take(x, source, axis=0, mode="fill", fill_value=0)


def padded_groups(
  group_sizes: jax.Array, num_rows: int, multiple: int, *, least: int = 0
) -> PaddedGroups:
  """Returns groups padded to a multiple, and to at least `least` rows."""
  num_experts = group_sizes.shape[0]
  expert = expert_of_rows(group_sizes, num_rows)
  sizes = jnp.maximum(-(-group_sizes // multiple) * multiple, least)
  past = jnp.cumsum(sizes)
  # Each group may be padded by `multiple - 1` rows; an empty group by `least`.
  if least:
    most = num_rows + num_experts * least
  else:
    most = num_rows + min(num_experts, num_rows) * (multiple - 1)
  most = -(-most // multiple) * multiple
  shift = (past - sizes) - (jnp.cumsum(group_sizes) - group_sizes)
  shift = jnp.take(shift, expert, mode="fill", fill_value=most)
  place = jnp.arange(num_rows, dtype=jnp.int32) + shift
  return PaddedGroups(past - sizes, past, place, most)


def row_tiles(padded: PaddedGroups, num_rows: int, block_m: int) -> Groups:
  """Returns the work list: each group's rows in tiles of `block_m`, in order."""
  num_experts = padded.first.shape[0]
  with_rows = min(num_experts, num_rows)
  most = with_rows + (num_rows - with_rows) // block_m
  num_tiles = -(-(padded.past - padded.first) // block_m)
  past_tile = jnp.cumsum(num_tiles)
  tile = jnp.arange(most, dtype=jnp.int32)
  # Tiles after the last one repeat the last expert; they are not visited.
  expert = jnp.searchsorted(past_tile, tile, side="right").astype(jnp.int32)
  expert = jnp.minimum(expert, num_experts - 1)
  within = tile - (past_tile - num_tiles)[expert]
  first = padded.first[expert] + within * block_m
  items = jnp.stack([expert, first, padded.past[expert]], axis=1)
  return Groups(items, past_tile[-1:])
