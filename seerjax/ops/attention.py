"""Attention of segments over pages, in splits of fixed size merged in order.

One item of work is (segment, split): `query_tile` positions x g query heads against `kv_split`
positions of the segment's sequence. Key/value heads are processed one after another; for each, all
items go through one program of `slot_tile` items, and are then merged by segment.

    positions   0        kv_split     2 kv_split
    splits      |---- 0 ----|---- 1 ----|-- 2: no item
                 (m, l, acc)  (m, l, acc)               each with its own maximum, from zero
                      `--merge--'                       left fold, ascending

The partition depends on absolute positions, never on a batch or a length, and merging a fully
masked split changes nothing. Decoding (one live row), verification (1 + drafts), prefill and
training (full segments) are therefore one program with one set of bits; its time depends on the
actual number of positions.

A window begins inside a split: splits before it are no items, and its first split is masked up to
the row's first key. A sink is one more term of the last merge, so it does not depend on which
splits a row's segment has:

    positions   0        kv_split     2 kv_split
    window      .             ---|------- w -------|       keys p - w + 1 to p of row p
    splits        no item    |---- 1 ----|-- 2             then merge(..., sink)

Sources: Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867; flash-decoding; He et al. 2025
(Thinking Machines) for fixed split sizes; Mistral 7B, https://arxiv.org/abs/2310.06825, for
windows; Gemma 2, https://arxiv.org/abs/2408.00118, for soft caps; gpt-oss,
https://arxiv.org/abs/2508.10925, for sinks.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import layout
import jax.numpy as jnp

from seerjax import fields, numerics as numerics_lib
from seerjax.array_typing import Array, Float, Int
from seerjax.ops import tiles
from seerjax.types import KeyCopies, TokenBatch

# A masked score. Finite, so that a fully masked row subtracts equal numbers instead of inf - inf.
MASKED = -1e30
# Maximum rows of a product that XLA's CPU backend processes at a time.
QUERY_ROWS = 8
# Query positions that the gradient processes at a time.
BACKWARD_BLOCK = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionRule:
  """States which keys a row sees and how scores become weights; the defaults are causal.

  Attributes:
    window: positions that a row sees, its own included; None for all before it.
    soft_cap: scores s become soft_cap * tanh(s / soft_cap), before they are masked; None for none.
    scale: factor on scores; None is 1 / sqrt(c).
  """

  window: int | None = None
  soft_cap: float | None = None
  scale: float | None = None

  def __post_init__(self):
    fields.check(
      self,
      window=fields.or_none(fields.at_least(1, "write None for a layer without a window")),
      soft_cap=fields.or_none(fields.positive("write None for scores without a cap")),
      scale=fields.or_none(fields.positive("write None for 1 / sqrt(head_dim)")),
    )

  def factor(self, head_dim: int) -> float:
    """Returns the factor on scores for heads of `head_dim` features."""
    return head_dim**-0.5 if self.scale is None else self.scale

  def is_visible(self, keys: Array, rows: Array) -> Array:
    """Returns bool[...], whether rows at positions `rows` see keys at positions `keys`."""
    visible = keys <= rows
    return visible if self.window is None else visible & (keys > rows - self.window)

  def capped(self, scores: Array) -> Array:
    """Returns the scores under the soft cap."""
    if self.soft_cap is None:
      return scores
    cap = jnp.float32(self.soft_cap)
    return cap * jnp.tanh(scores / cap)


CAUSAL = AttentionRule()


class Partial(NamedTuple):
  """A softmax sum over some keys: f32[..., q] maximum and sum, f32[..., q, c] weighted values."""

  maximum: Array
  total: Array
  weighted: Array


class SegmentRows(NamedTuple):
  """Index maps between rows, segments and items of work; computed once per forward.

  Segments are in b blocks of `slot_tile`; the items of a block are its segments' splits, ascending.

  Attributes:
    row_of: i32[s, q], row of each segment position; 0 past the end of a segment.
    position_of: i32[s, q], absolute position of each, -1 past the end of a segment.
    place_of: i32[n], flat place (segment * query_tile + offset) of each row.
    page_table: i32[s, p], the batch's page table, with s padded to whole blocks.
    num_splits: i32[b, slot_tile], number of items of each segment; under a window these are the
      splits from that of its first row's first key on.
    first_item: i32[b, slot_tile], first item of each segment.
    segment_of: i32[b, w], segment of each item.
    split_of: i32[b, w], split of each item.
  """

  row_of: Int[Array, "s q"]
  position_of: Int[Array, "s q"]
  place_of: Int[Array, "n"]
  page_table: Int[Array, "s p"]
  num_splits: Int[Array, "b z"]
  first_item: Int[Array, "b z"]
  segment_of: Int[Array, "b w"]
  split_of: Int[Array, "b w"]


def segment_rows(
  batch: TokenBatch,
  numerics: numerics_lib.NumericsConfig,
  page_size: int,
  window: int | None = None,
) -> SegmentRows:
  """Returns the maps between rows, segments and items. Segments are in the order of their rows.

  With a window, the maps are those of layers with an `AttentionRule` of this window.
  """
  num_segments, num_rows = batch.segment_start.shape[0], batch.tokens.shape[0]
  query_tile, slot_tile = numerics.query_tile, numerics.slot_tile
  offsets = jnp.arange(query_tile, dtype=jnp.int32)
  live = offsets[None, :] < batch.segment_length[:, None]
  row_of = jnp.where(live, batch.segment_start[:, None] + offsets[None, :], 0)
  position_of = jnp.where(live, batch.positions[row_of], -1)
  # Padding segments start past every row, so that the search never finds them.
  used = jnp.arange(num_segments, dtype=jnp.int32) < batch.num_segments
  start = jnp.where(used, batch.segment_start, num_rows)
  rows = jnp.arange(num_rows, dtype=jnp.int32)
  segment = jnp.searchsorted(start, rows, side="right").astype(jnp.int32) - 1
  segment = jnp.clip(segment, 0, num_segments - 1)
  offset = jnp.clip(rows - start[segment], 0, query_tile - 1)
  # At least two blocks and two tiles of items: see `tiles.whole`.
  padding = tiles.whole(num_segments, slot_tile) - num_segments
  row_of = jnp.pad(row_of, ((0, padding), (0, 0)))
  position_of = jnp.pad(position_of, ((0, padding), (0, 0)), constant_values=-1)
  page_table = jnp.pad(batch.page_table, ((0, padding), (0, 0)))
  last = jnp.max(position_of, axis=1).reshape(-1, slot_tile)
  num_splits = jnp.where(last >= 0, last // numerics.kv_split + 1, 0)
  all_splits = per_segment = batch.page_table.shape[1] * page_size // numerics.kv_split
  first_split = None
  if window is not None:
    first_key = jnp.maximum(position_of[:, 0].reshape(-1, slot_tile) - (window - 1), 0)
    first_split = jnp.where(last >= 0, first_key // numerics.kv_split, 0)
    num_splits = num_splits - first_split
    per_segment = min(all_splits, touched_splits(window + query_tile - 1, numerics.kv_split))
  ends = jnp.cumsum(num_splits, axis=1, dtype=jnp.int32)
  first_item = ends - num_splits
  items = jnp.arange(slot_tile * max(2, per_segment), dtype=jnp.int32)
  find = functools.partial(jnp.searchsorted, side="right")
  within = jax.vmap(find, in_axes=(0, None))(ends, items).astype(jnp.int32)
  within = jnp.minimum(within, slot_tile - 1)
  split_of = items[None, :] - jnp.take_along_axis(first_item, within, axis=1)
  if first_split is not None:
    split_of = split_of + jnp.take_along_axis(first_split, within, axis=1)
  blocks = jnp.arange(ends.shape[0], dtype=jnp.int32)[:, None]
  return SegmentRows(
    row_of=row_of,
    position_of=position_of,
    place_of=segment * query_tile + offset,
    page_table=page_table,
    num_splits=num_splits,
    first_item=first_item,
    segment_of=blocks * slot_tile + within,
    # Items past the last one read valid data, but nothing reads their results.
    split_of=jnp.clip(split_of, 0, max(all_splits - 1, 0)),
  )


def touched_splits(count: int, split: int) -> int:
  """Returns the most splits that `count` consecutive positions touch."""
  return (count - 2 + split) // split + 1


def whole_queries(query_tile: int, group: int) -> int:
  """Returns the query rows allocated for an item: `query_tile` positions of `group` heads.

  XLA processes a product's rows `QUERY_ROWS` at a time, and sums the remaining rows in another
  order: with 2 positions of 3 heads, the second would not have the first one's bits. With a power
    of
  two, either no row remains or all rows do.
  """
  count = query_tile * group
  if query_tile == 1 or count & (count - 1) == 0:
    return count  # With a single position, each head always has the same place.
  return -(-count // QUERY_ROWS) * QUERY_ROWS


def nothing(shape: tuple[int, ...], head_dim: int, anchor: Array | None = None) -> Partial:
  """Returns the sum over no keys, the start of a merge; `anchor` as in `late_zeros`."""
  whole = (*shape, head_dim)
  return Partial(
    jnp.full(shape, MASKED, jnp.float32),
    jnp.zeros(shape, jnp.float32),
    jnp.zeros(whole, jnp.float32)
    if anchor is None
    else tiles.late_zeros(whole, jnp.float32, anchor),
  )


def split_partial(
  q: Float[Array, "z q c"],
  k: Float[Array, "z x c"],
  v: Float[Array, "z x c"],
  visible: Array,
  rule: AttentionRule = CAUSAL,
) -> Partial:
  """Returns the softmax sum of one split, with its own maximum.

  Args:
    q: f[z, q, c], scaled queries of z segments.
    k: f[z, x, c], keys of the split.
    v: f[z, x, c], values of the split.
    visible: bool[z, q, x], whether a query sees a key.
    rule: its soft cap is used.
  """
  batched = (((2,), (2,)), ((0,), (0,)))
  scores = lax.dot_general(
    q, k, batched, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
  )
  scores = jnp.where(visible, rule.capped(scores), jnp.float32(MASKED))
  maximum = jnp.max(scores, axis=-1)
  weights = jnp.where(visible, jnp.exp(scores - maximum[..., None]), jnp.float32(0))
  weighted = lax.dot_general(
    weights.astype(v.dtype),
    v,
    (((2,), (1,)), ((0,), (0,))),
    precision=lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )
  return Partial(maximum, jnp.sum(weights, axis=-1), weighted)


def merge(left: Partial, right: Partial) -> Partial:
  """Returns the sum over both key sets; merging a fully masked one keeps the other's bits."""
  maximum = jnp.maximum(left.maximum, right.maximum)
  left_scale = jnp.exp(left.maximum - maximum)
  right_scale = jnp.exp(right.maximum - maximum)
  return Partial(
    maximum,
    left.total * left_scale + right.total * right_scale,
    left.weighted * left_scale[..., None] + right.weighted * right_scale[..., None],
  )


def with_sinks(total: Partial, sinks: Float[Array, "..."]) -> Partial:
  """Returns the sum with a key of score `sinks` f32[..., q] and value zero: the last merge."""
  maximum = jnp.broadcast_to(sinks, total.maximum.shape)
  return merge(total, Partial(maximum, jnp.ones_like(total.total), jnp.zeros_like(total.weighted)))


def attend(
  q: Float[Array, "n k g c"],
  k_pages: Float[Array, "j m z c"],
  v_pages: Float[Array, "j m z c"],
  batch: TokenBatch,
  rows: SegmentRows,
  numerics: numerics_lib.NumericsConfig,
  read: Callable[..., Array] | None = None,
  *,
  rule: AttentionRule = CAUSAL,
  sinks: Float[Array, "k g"] | None = None,
) -> Float[Array, "n k g c"]:
  """Causal attention of every row over its own sequence's pages.

  Args:
    q: f[n, k, g, c], queries by key/value head; scaled here, in float32.
    k_pages: f[j, m, z, c], keys by head, page and offset; the rows' own keys are already written.
      If j is less than k, each is the head of k / j consecutive heads of q, without a gradient.
    v_pages: f[j, m, z, c], values likewise.
    batch: rows and segments.
    rows: `segment_rows` of the batch, with the rule's window.
    numerics: sizes of tiles and splits.
    read: forward pass `(rule, numerics, q, k_pages, v_pages, sinks, batch, rows)`; None is the
      tiled one.
    rule: keys that a row sees, and how scores become weights.
    sinks: f[k, g], score of a key of every row that has no value, by head; None for none.

  Returns:
    f[n, k, g, c] in q's dtype. The gradient assumes the training layout of pages: row j of a
    micro-batch's sequences owns pages 1 + j * p to (j + 1) * p, where p is the page table's width,
    and writes its rows there. The last page of its page table must be its own; earlier pages may
    belong to other sequences.
  """
  read = _tiled if read is None else read
  return _attend(read, rule, numerics, q, k_pages, v_pages, sinks, batch, rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(read, rule, numerics, q, k_pages, v_pages, sinks, batch, rows):
  return read(rule, numerics, q, k_pages, v_pages, sinks, batch, rows)


def _tiled(rule, numerics, q, k_pages, v_pages, sinks, batch, rows):
  num_rows, num_heads, group, head_dim = q.shape
  num_stored, num_pages, page_size = k_pages.shape[:3]
  sharers = num_heads // num_stored
  query_tile, slot_tile, split = numerics.query_tile, numerics.slot_tile, numerics.kv_split
  pages_per_split = split // page_size
  num_segments, num_items = rows.row_of.shape[0], rows.segment_of.shape[1]
  # Heads and pages form one leading axis: a page of a head is one contiguous block.
  k_blocks = k_pages.reshape(num_stored * num_pages, page_size, head_dim)
  v_blocks = v_pages.reshape(num_stored * num_pages, page_size, head_dim)
  queries = q.reshape(num_rows * num_heads, group, head_dim)
  scale = jnp.float32(rule.factor(head_dim))
  zero, one = jnp.int32(0), tiles.traced_one(batch.num_rows)
  num_queries = query_tile * group
  query_rows = whole_queries(query_tile, group)
  offsets = jnp.arange(pages_per_split, dtype=jnp.int32)
  columns = jnp.arange(split, dtype=jnp.int32)

  def take(source: Array, index: Array) -> Array:
    # Indices come from our own tables; a clamped gather would cost a pass.
    return source.at[index].get(mode="promise_in_bounds")

  def items_body(block: Array, head: Array, tile: Array, done: Partial) -> Partial:
    first = tile * slot_tile
    segments = lax.dynamic_slice(rows.segment_of, (block, first), (1, slot_tile))[0]
    splits = lax.dynamic_slice(rows.split_of, (block, first), (1, slot_tile))[0]
    q_rows = take(queries, take(rows.row_of, segments) * num_heads + head)
    q_rows = (q_rows.astype(jnp.float32) * scale).astype(q.dtype)
    q_rows = q_rows.reshape(slot_tile, num_queries, head_dim)
    missing = (0, query_rows - num_queries)
    q_rows = jnp.pad(q_rows, ((0, 0), missing, (0, 0)))
    pages = splits[:, None] * pages_per_split + offsets[None, :]
    blocks = rows.page_table.at[segments[:, None], pages].get(mode="promise_in_bounds")
    stored = head if sharers == 1 else head // sharers
    blocks = blocks + stored * num_pages

    def read(source: Array) -> Array:
      return take(source, blocks).reshape(slot_tile, split, head_dim)

    key_positions = splits[:, None] * split + columns[None, :]
    positions = jnp.repeat(take(rows.position_of, segments), group, axis=1)
    positions = jnp.pad(positions, ((0, 0), missing), constant_values=-1)
    visible = rule.is_visible(key_positions[:, None, :], positions[:, :, None])
    parts = split_partial(q_rows, read(k_blocks), read(v_blocks), visible, rule)
    return jax.tree.map(
      lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, first, 0), done, parts
    )

  def block_body(block: Array, carry: tuple[Array, Partial]) -> tuple[Array, Partial]:
    num_splits = lax.dynamic_index_in_dim(rows.num_splits, block, 0, False)
    first_item = lax.dynamic_index_in_dim(rows.first_item, block, 0, False)
    num_tiles = (jnp.sum(num_splits, dtype=jnp.int32) + (slot_tile - 1)) // slot_tile
    most_splits = jnp.max(num_splits)

    def head_body(head: Array, carry: tuple[Array, Partial]) -> tuple[Array, Partial]:
      out, items = carry
      items = lax.fori_loop(zero, num_tiles, functools.partial(items_body, block, head), items)

      def merge_body(index: Array, total: Partial) -> Partial:
        where = jnp.minimum(first_item + index, num_items - 1)
        merged = merge(total, jax.tree.map(lambda whole: take(whole, where), items))
        has_it = index < num_splits

        def chosen(new: Array, old: Array) -> Array:
          return jnp.where(has_it.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

        return jax.tree.map(chosen, merged, total)

      total = nothing((slot_tile, query_rows), head_dim)
      total = lax.fori_loop(zero, most_splits, merge_body, total)
      if sinks is not None:
        own = jnp.tile(take(sinks, head).astype(jnp.float32), query_tile)
        total = with_sinks(total, jnp.pad(own, (0, query_rows - num_queries))[None])
      # Rows without a position see no key: 0 / 1.
      mean = total.weighted / jnp.where(total.total > 0, total.total, 1.0)[..., None]
      mean = mean[:, :num_queries].astype(q.dtype)
      mean = mean.reshape(1, slot_tile, query_tile, group, head_dim)
      return lax.dynamic_update_slice(out, mean, (head, block * slot_tile, zero, zero, zero)), items

    return lax.fori_loop(zero, jnp.int32(num_heads) * one, head_body, carry)

  num_blocks = (batch.num_segments + (slot_tile - 1)) // slot_tile
  out = tiles.late_zeros((num_heads, num_segments, query_tile, group, head_dim), q.dtype, q)
  # The results of splits share one buffer, which every head and block of segments fills anew.
  items = nothing((num_items, query_rows), head_dim, q)
  out, _ = lax.fori_loop(zero, num_blocks, block_body, (out, items))
  out = out.reshape(num_heads, num_segments * query_tile, group, head_dim)
  return jnp.swapaxes(out[:, rows.place_of], 0, 1)


def _attend_forward(read, rule, numerics, q, k_pages, v_pages, sinks, batch, rows):
  out = _attend(read, rule, numerics, q, k_pages, v_pages, sinks, batch, rows)
  return out, (q, k_pages, v_pages, sinks, batch)


def _attend_backward(forward, rule, numerics, residuals, gradient):
  """Differentiates causal attention by sequence and block of queries, in float32.

  The gradients are exact, in one fixed order: one program for one key/value head, looped over the
  local heads; the time depends on the actual lengths.
  """
  del forward
  q, k_pages, v_pages, sinks, batch = residuals
  num_heads, num_pages, page_size, head_dim = k_pages.shape
  assert q.shape[1] == num_heads, f"got pages of {num_heads} heads for {q.shape[1]}"
  pages_per_sequence = batch.page_table.shape[1]
  num_sequences = (num_pages - 1) // pages_per_sequence
  length = pages_per_sequence * page_size
  live = jnp.arange(q.shape[0], dtype=jnp.int32) < batch.num_rows
  # Padding rows are written to the dump page 0, which no sequence owns.
  slots = jnp.where(live, batch.slots, 0)
  scale = jnp.float32(rule.factor(head_dim))
  block = min(BACKWARD_BLOCK, numerics.kv_split)  # Divides the length.
  # i32[b] each: the first position of a sequence's rows, and the end of the last one.
  offsets = jnp.arange(length, dtype=jnp.int32)
  is_row = jnp.zeros((num_sequences * length + page_size,), jnp.bool_).at[slots].set(True)
  is_row = is_row[page_size:].reshape(num_sequences, length)
  firsts = jnp.min(jnp.where(is_row, offsets, length), axis=1)
  ends = jnp.max(jnp.where(is_row, offsets + 1, 0), axis=1)
  # i32[b, p], each sequence's pages: its own, or those of its segments; it owns the last one.
  tables = 1 + jnp.arange(num_pages - 1, dtype=jnp.int32).reshape(num_sequences, -1)
  used = jnp.arange(batch.page_table.shape[0], dtype=jnp.int32) < batch.num_segments
  owner = batch.page_table[:, -1] // pages_per_sequence - 1
  tables = tables.at[jnp.where(used, owner, num_sequences)].set(batch.page_table, mode="drop")
  places = Places(live, slots, tables, firsts, ends)
  head = functools.partial(_head_backward, rule, (block, scale))
  by_head = lambda x: jnp.swapaxes(x, 0, 1)
  slabs = by_head(q), by_head(gradient), k_pages, v_pages, sinks
  one = tiles.traced_one(batch.num_rows)
  found = tiles.looped_slabs(head, places, slabs, one, gradient)
  grad_q, grad_k, grad_v, grad_sinks = found
  return by_head(grad_q), grad_k, grad_v, grad_sinks, None, None


class Places(NamedTuple):
  """Places of rows and sequences in a gradient's pages.

  Attributes:
    live: bool[n], whether a row is valid.
    slots: i32[n], slot of each row.
    tables: i32[b, p], pages of each sequence.
    firsts: i32[b], first position of its rows.
    ends: i32[b], end of its rows.
  """

  live: Array
  slots: Array
  tables: Array
  firsts: Array
  ends: Array


def _softmax(scores: Array, sinks: Array | None) -> tuple[Array, Array | None]:
  """Returns the weights of keys f32[q, g, x], and of sinks f32[q, g] if there are any."""
  if sinks is None:
    return jax.nn.softmax(scores, axis=-1), None
  own = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, None], (*scores.shape[:2], 1))
  weights = jax.nn.softmax(jnp.concatenate([scores, own], axis=-1), axis=-1)
  return weights[..., :-1], weights[..., -1]


def _head_backward(
  rule: AttentionRule, sizes: tuple[int, Array], places: Places, given: Any
) -> tuple[Array | None, ...]:
  """Returns one head's gradients: queries f[n, g, c], keys and values f[m, z, c], sinks f[g]."""
  (block, scale), (q, gradient, k_pages, v_pages, sinks) = sizes, given
  num_pages, page_size, head_dim = k_pages.shape
  live, slots, tables, firsts, ends = places
  num_sequences, pages_per_sequence = tables.shape
  length = pages_per_sequence * page_size
  offsets = jnp.arange(length, dtype=jnp.int32)
  zero = jnp.int32(0)

  def by_sequence(x: Array) -> Array:
    """Scatters f[n, g, c] to f32[b, length, g, c] by each row's slot."""
    x = jnp.where(live[:, None, None], x, jnp.zeros((), x.dtype))
    whole = tiles.late_zeros((num_pages * page_size, *x.shape[1:]), jnp.float32, x)
    whole = whole.at[slots].set(x.astype(jnp.float32))
    return whole[page_size:].reshape(num_sequences, length, *x.shape[1:])

  def from_sequence(x: Array) -> Array:
    whole = x.reshape(num_sequences * length, *x.shape[2:])
    rows = whole[jnp.maximum(slots - page_size, 0)]
    return jnp.where(live[:, None, None], rows, jnp.float32(0))

  q_seq, gradient_seq = by_sequence(q), by_sequence(gradient)  # f32[b, t, g, c]
  k_all, v_all = (pages.astype(jnp.float32) for pages in (k_pages, v_pages))

  def read(whole: Array, table: Array) -> Array:
    """Gathers a sequence's f32[length, c] from f32[m, z, c]."""
    return whole.at[table].get(mode="promise_in_bounds").reshape(length, head_dim)

  def add_to(whole: Array, part: Array, table: Array) -> Array:
    part = part.reshape(pages_per_sequence, page_size, head_dim)
    # A sequence has no page twice.
    return whole.at[table].add(part, mode="promise_in_bounds", unique_indices=True)

  def sequence_body(sequence: Array, totals):
    grad_q, grad_k, grad_v, grad_sinks = totals
    table = tables[sequence]
    k, v = read(k_all, table), read(v_all, table)

    def block_body(index: Array, carry):
      grad_q, own_k, own_v, grad_sinks = carry
      first = index * block
      start, size = (sequence, first, zero, zero), (1, block, *q_seq.shape[2:])
      # Positions of other sequences' rows are zero in both, and so are all their gradients.
      q_block = lax.dynamic_slice(q_seq, start, size)[0]
      gradient_block = lax.dynamic_slice(gradient_seq, start, size)[0]
      positions = first + jnp.arange(block, dtype=jnp.int32)
      visible = rule.is_visible(offsets[None, None, :], positions[:, None, None])
      scores = rule.capped(jnp.einsum("qgc,xc->qgx", q_block * scale, k))
      # The barrier prevents fusion with the sums, with which XLA's CPU products are much slower.
      (weights, of_sinks), grad_weights = lax.optimization_barrier(
        (
          _softmax(jnp.where(visible, scores, jnp.float32(MASKED)), sinks),
          jnp.einsum("qgc,xc->qgx", gradient_block, v),
        )
      )
      inner = jnp.sum(weights * grad_weights, axis=-1, keepdims=True)
      grad_scores = weights * (grad_weights - inner)
      if rule.soft_cap is not None:
        grad_scores = grad_scores * (1 - jnp.square(scores / jnp.float32(rule.soft_cap)))
      if of_sinks is not None:
        grad_sinks = grad_sinks - jnp.sum(of_sinks * inner[..., 0], axis=0)
      part = jnp.einsum("qgx,xc->qgc", grad_scores, k) * scale
      return (
        lax.dynamic_update_slice(grad_q, part[None], start),
        own_k + jnp.einsum("qgx,qgc->xc", grad_scores, q_block * scale),
        own_v + jnp.einsum("qgx,qgc->xc", weights, gradient_block),
        grad_sinks,
      )

    num_blocks = (ends[sequence] + (block - 1)) // block
    carry = grad_q, jnp.zeros_like(k), jnp.zeros_like(v), grad_sinks
    carry = lax.fori_loop(firsts[sequence] // block, num_blocks, block_body, carry)
    grad_q, own_k, own_v, grad_sinks = carry
    return grad_q, add_to(grad_k, own_k, table), add_to(grad_v, own_v, table), grad_sinks

  zeros = lambda like: tiles.late_zeros(like.shape, jnp.float32, gradient_seq)
  totals = jax.tree.map(zeros, (q_seq, k_all, v_all, sinks))
  totals = lax.fori_loop(zero, jnp.int32(num_sequences), sequence_body, totals)
  grad_q, grad_k, grad_v, grad_sinks = totals
  to_pages = lambda x: x.at[0].set(0).astype(k_pages.dtype)
  if sinks is not None:
    grad_sinks = grad_sinks.astype(sinks.dtype)
  return from_sequence(grad_q).astype(q.dtype), to_pages(grad_k), to_pages(grad_v), grad_sinks


_attend.defvjp(_attend_forward, _attend_backward)


def write_pages(
  pages: Float[Array, "k m z c"],
  values: Float[Array, "n k c"],
  slots: Int[Array, "n"],
  num_rows: Array,
) -> Float[Array, "k m z c"]:
  """Returns the pages with the first `num_rows` rows' keys (or values) at their slots."""
  return _write_pages(pages, values, slots, num_rows)


@jax.custom_vjp
def _write_pages(pages, values, slots, num_rows):
  def body(row: Array, pages: Array) -> Array:
    return _with_row(pages, values, row, slots[row])

  return lax.fori_loop(jnp.int32(0), num_rows, body, pages)


def write_copies(
  pages: Float[Array, "k m z c"], values: Float[Array, "n k c"], copies: KeyCopies
) -> Float[Array, "k m z c"]:
  """Returns the pages with rows' keys (or values) at further slots; it has no gradient."""

  def body(index: Array, pages: Array) -> Array:
    return _with_row(pages, values, copies.rows[index], copies.slots[index])

  return lax.fori_loop(jnp.int32(0), copies.count, body, pages)


def _with_row(pages: Array, values: Array, row: Array, slot: Array) -> Array:
  """Returns the pages with one row's keys (or values) at a slot."""
  num_heads, _, page_size, head_dim = pages.shape
  update = lax.dynamic_index_in_dim(values, row, 0, False).astype(pages.dtype)
  zero = jnp.int32(0)
  where = (zero, slot // page_size, slot % page_size, zero)
  pages = lax.dynamic_update_slice(pages, update.reshape(num_heads, 1, 1, head_dim), where)
  return _as_they_are_read(pages)


def _as_they_are_read(pages: Array) -> Array:
  """Returns the pages; on a TPU, constrains their memory layout to the order of their axes.

  XLA chooses the layout there. For rows that are written one by one, it would put a row's heads
  side by side, and then, for attention, copy all pages into the other layout: twice in every layer
  of a step.
  """

  def in_order(pages: Array) -> Array:
    return layout.with_layout_constraint(pages, layout.Layout(tuple(range(pages.ndim))))

  return lax.platform_dependent(pages, tpu=in_order, default=lambda pages: pages)


def _write_pages_forward(pages, values, slots, num_rows):
  return _write_pages(pages, values, slots, num_rows), (slots, num_rows, values)


def _write_pages_backward(residuals, gradient):
  slots, num_rows, values = residuals
  num_heads, num_pages, page_size, head_dim = gradient.shape
  flat = gradient.reshape(num_heads, num_pages * page_size, head_dim)
  live = jnp.arange(slots.shape[0], dtype=jnp.int32) < num_rows
  rows = jnp.swapaxes(flat[:, slots], 0, 1).astype(values.dtype)
  rows = jnp.where(live[:, None, None], rows, jnp.zeros((), rows.dtype))
  # Padding rows have an index past the last slot, where a scatter drops them.
  kept = flat.at[:, jnp.where(live, slots, num_pages * page_size)].set(0, mode="drop")
  return kept.reshape(gradient.shape), rows, None, None


_write_pages.defvjp(_write_pages_forward, _write_pages_backward)


def attention_reference(
  q: Float[Array, "t k g c"],
  k: Float[Array, "t k c"],
  v: Float[Array, "t k c"],
  *,
  rule: AttentionRule = CAUSAL,
  sinks: Float[Array, "k g"] | None = None,
) -> Float[Array, "t k g c"]:
  """Returns the causal attention of one whole sequence, f32[t, k, g, c], as a reference."""
  q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
  scores = jnp.einsum("qkgc,xkc->kgqx", q, k, precision=lax.Precision.HIGHEST)
  scores = scores * jnp.float32(rule.factor(q.shape[-1]))
  if rule.soft_cap is not None:
    scores = rule.soft_cap * jnp.tanh(scores / rule.soft_cap)
  length = q.shape[0]
  visible = jnp.tril(jnp.ones((length, length), bool))
  if rule.window is not None:
    visible = visible & ~jnp.tril(jnp.ones((length, length), bool), -rule.window)
  scores = jnp.where(visible[None, None], scores, -jnp.inf)
  if sinks is not None:
    own = jnp.broadcast_to(sinks.astype(jnp.float32)[:, :, None, None], (*scores.shape[:3], 1))
    scores = jnp.concatenate([scores, own], axis=-1)
  weights = jax.nn.softmax(scores, axis=-1)[..., :length]
  return jnp.einsum("kgqx,xkc->qkgc", weights, v, precision=lax.Precision.HIGHEST)
