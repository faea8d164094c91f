"""GPU kernels (`pallas_kernels`), all rows at once: their sums do not depend on the batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import attention as attention_kernel, matmul, rms_norm, token_logprobs
from seerjax import numerics as numerics_lib, parallel
from seerjax.array_typing import Array
from seerjax.backends.protocol import Stage
from seerjax.backends.tiled import Tiled
from seerjax.ops import attention, sampling, tiles
from seerjax.types import TokenBatch, TokenScores

# Keys that the kernel multiplies at a time, where a split has as many.
KEY_BLOCK = 128


@dataclasses.dataclass(frozen=True)
class MosaicGpu(Tiled):
  """See `protocol.Backend`."""

  @property
  def smallest_width(self) -> int:
    return matmul.MULTIPLE

  @property
  def holds_logits(self) -> bool:
    return False

  @property
  def shares_pages_under_gradient(self) -> bool:
    return False

  def whole_rows(self, count: int) -> int:
    return count

  def whole_segments(self, count: int) -> int:
    return count

  def map_rows(
    self,
    function: tiles.RowFunction,
    weights: Any,
    rows: Any,
    num_rows: Array,
    *,
    gradient_of: tiles.RowFunction | None = None,
  ) -> Any:
    return tiles.all_rows(function, weights, rows, num_rows, gradient_of=gradient_of)

  def map_slabs(
    self, function: tiles.SlabFunction, shared: Any, slabs: Any, one: Array, axis: str | None
  ) -> Any:
    del one, axis
    return tiles.each_slab(function, shared, slabs)

  def dot(self, x: Array, w: Array) -> Array:
    columns = w.shape[1]
    x, w = _padded(x, 1), _padded(_padded(w, 0), 1)
    out = matmul.matmul(x, w, out_dtype=jnp.float32, interpret=self.numerics.is_interpreted)
    return out[:, :columns]

  def dot_rows(self, x: Array, table: Array) -> Array:
    return matmul.matmul(
      x, table, transposed=True, out_dtype=jnp.float32, interpret=self.numerics.is_interpreted
    )

  def contract(self, x: Array, w: Any, one: Array, axis: str | None) -> Array:
    partials = self.map_slabs(lambda _, slab: self.dot(*slab), (), (x, w), one, axis)
    return parallel.tree_sum(parallel.gather_slabs(partials, axis)).astype(x.dtype)

  def rms_norm_rows(self, x: Array, scale: Array, eps: float) -> Array:
    """As the tiled one, but rounded once, at the end."""
    flat = x.reshape(-1, x.shape[-1])
    normed = rms_norm.rms_norm(flat, scale, eps=eps, interpret=self.numerics.is_interpreted)
    return normed.reshape(x.shape)

  def write_pages(
    self, pages: tuple[Array, ...], values: tuple[Array, ...], slots: Array, num_rows: Array
  ) -> tuple[Array, ...]:
    """All rows at once, which is no sum: valid slots differ, and padding rows are dropped."""

    def write(whole: Array, new: Array) -> Array:
      num_pages, page_size = whole.shape[1:3]
      live = jnp.arange(slots.shape[0], dtype=jnp.int32) < num_rows
      page = jnp.where(live, slots // page_size, num_pages)
      update = jnp.swapaxes(new, 0, 1).astype(whole.dtype)
      return whole.at[:, page, slots % page_size].set(update, mode="drop")

    return tuple(write(whole, new) for whole, new in zip(pages, values, strict=True))

  def attend(
    self, q: Array, pages: tuple[Array, ...], batch: TokenBatch, rows: attention.SegmentRows
  ) -> Array:
    del rows
    keys, values = pages
    config = attention_kernel.Config(
      kv_split=self.numerics.kv_split,
      key_block=min(self.numerics.kv_split, KEY_BLOCK),
      query_tile=self.numerics.query_tile,
    )
    segments = attention_kernel.Segments(
      batch.positions,
      batch.segment_start,
      batch.segment_length,
      batch.page_table,
      batch.num_segments,
    )
    return attention_kernel.attention(
      q, keys, values, segments, config=config, interpret=self.numerics.is_interpreted
    )

  def head(
    self, stage: Stage, weights: Any, rows: Any, num_rows: Array
  ) -> tuple[Array, TokenScores]:
    """One kernel, which holds no logits; a biased, filtered or restricted row is tiled.

    Which of the two a row takes follows its own parameters, never its neighbours'.
    """
    hidden, forced, parameters, seeds, positions, _ = rows
    key = numerics_lib.wrap_key(weights["key"])
    fold = lambda seed, position: jax.random.fold_in(jax.random.fold_in(key, seed), position)
    normed = self.rms_norm_rows(hidden, weights["final_norm"], stage.shape.norm_eps)
    tokens, *scores = token_logprobs.token_logprobs(
      normed,
      # Every device of the axis scores whole rows: its slabs are the table's, its bits too.
      parallel.gather_slabs(weights["head"], stage.axis),
      forced,
      parameters.temperature,
      jax.random.key_data(jax.vmap(fold)(seeds, positions)),
      config=token_logprobs.Config(shards=self.numerics.reduction_shards),
      interpret=self.numerics.is_interpreted,
    )
    is_special = sampling.is_filtered(parameters) | sampling.is_restricted(parameters)
    is_special |= jnp.any(parameters.bias_ids >= 0, axis=1)
    common = tokens, TokenScores(*scores)
    tiled = Tiled(dataclasses.replace(self.numerics, implementation="tiled"))
    special = lax.cond(
      jnp.any(is_special),
      lambda: tiled.head(stage, weights, rows, num_rows),
      lambda: jax.tree.map(jnp.zeros_like, common),
    )
    return jax.tree.map(lambda a, b: jnp.where(is_special, a, b), special, common)


def _padded(x: Array, axis: int) -> Array:
  """Adds zeros up to the kernel's multiple, which add nothing to a sum; adapters need it."""
  missing = -x.shape[axis] % matmul.MULTIPLE
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, missing)
  return jnp.pad(x, widths) if missing else x
