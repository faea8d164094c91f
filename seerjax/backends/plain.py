"""Plain XLA on all rows at once; rows depend on the batch. It measures the cost of invariance."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from jax import lax
import jax.numpy as jnp

from seerjax.array_typing import Array
from seerjax.backends import adapters as adapters_lib
from seerjax.backends.adapters import RowAdapters
from seerjax.backends.protocol import AnyStage
from seerjax.backends.tiled import Tiled
from seerjax.backends.traits import Traits
from seerjax.ops import attention, tiles
from seerjax.types import TokenBatch


@dataclasses.dataclass(frozen=True)
class Plain(Tiled):
  """Implements `protocol.Backend`."""

  traits: ClassVar[Traits] = Traits(holds_all_logits=True, shares_out_rows=False)

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
    del gradient_of  # Plain differentiates the function itself.
    return function(weights, rows, tiles.traced_one(num_rows))

  def _adapted(
    self, stage: AnyStage, weights: Any, rows: Any, num_rows: Array, adapters: RowAdapters | None
  ) -> Any:
    run = lambda weights: self.defined(stage, weights, rows, num_rows)
    return run(weights) if adapters is None else adapters_lib.by_selection(run, weights, adapters)

  def attend(
    self,
    q: Array,
    pages: tuple[Array, ...],
    batch: TokenBatch,
    rows: attention.SegmentRows,
    rule: attention.AttentionRule = attention.CAUSAL,
    sinks: Array | None = None,
  ) -> Array:
    keys, values = pages
    numerics, read = self.numerics, read_splits
    return attention.attend(q, keys, values, batch, rows, numerics, read, rule=rule, sinks=sinks)


def read_splits(rule, numerics, q, k_pages, v_pages, sinks, batch, rows):
  """Processes all segments and heads at once, split by split up to the longest sequence.

  This is what one would write without the contract: shapes, and so bits, depend on the batch.
  """
  num_stored, _, page_size, head_dim = k_pages.shape
  num_heads = q.shape[1]
  num_segments, query_tile = batch.segment_start.shape[0], numerics.query_tile
  split, group = numerics.kv_split, q.shape[2]
  pages_per_split = split // page_size
  position_of = rows.position_of[:num_segments]
  queries = q[rows.row_of[:num_segments]] * jnp.asarray(rule.factor(head_dim), q.dtype)
  columns = jnp.arange(split, dtype=jnp.int32)

  def body(index: Array, total: attention.Partial) -> attention.Partial:
    pages = lax.dynamic_slice_in_dim(batch.page_table, index * pages_per_split, pages_per_split, 1)

    def read(source: Array) -> Array:
      part = source.at[:, pages].get(mode="promise_in_bounds")
      part = jnp.repeat(part, num_heads // num_stored, axis=0)
      return part.reshape(num_heads, num_segments, split, head_dim)

    scores = jnp.einsum(
      "sqkgc,ksxc->ksqgx", queries, read(k_pages), preferred_element_type=jnp.float32
    )
    visible = rule.is_visible(index * split + columns[None, None, :], position_of[:, :, None])
    visible = visible[None, :, :, None, :]
    scores = jnp.where(visible, rule.capped(scores), jnp.float32(attention.MASKED))
    maximum = jnp.max(scores, axis=-1)
    weights = jnp.where(visible, jnp.exp(scores - maximum[..., None]), jnp.float32(0))
    values = read(v_pages)
    weighted = jnp.einsum(
      "ksqgx,ksxc->ksqgc", weights.astype(values.dtype), values,
      preferred_element_type=jnp.float32,
    )  # fmt: skip
    return attention.merge(total, attention.Partial(maximum, jnp.sum(weights, axis=-1), weighted))

  total = attention.nothing((num_heads, num_segments, query_tile, group), head_dim)
  total = lax.fori_loop(jnp.int32(0), jnp.max(position_of) // split + 1, body, total)
  if sinks is not None:
    total = attention.with_sinks(total, sinks.astype(jnp.float32)[:, None, None, :])
  out = total.weighted / jnp.where(total.total > 0, total.total, 1.0)[..., None]
  out = out.astype(q.dtype).reshape(num_heads, num_segments * query_tile, group, head_dim)
  return jnp.swapaxes(out[:, rows.place_of], 0, 1)
