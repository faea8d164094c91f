"""Segments (which rows attend to which pages), and the derived work lists, tiles and splits."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import gpu
from pallas_kernels.attention.config import ROW_GROUP, ROWS, WORKSPACE_BYTES, Config, Static


class Segments(NamedTuple):
  """Segments of rows, and the pages to which each attends.

  A segment is up to `query_tile` consecutive rows that are consecutive positions of one sequence.
  Segments are in the order of their rows; rows and segments after the last one are padding.

  Attributes:
    positions: i32[n], absolute position of each row in its sequence.
    segment_start: i32[s], first row of the segment.
    segment_length: i32[s], number of valid rows of the segment.
    page_table: i32[s, p], pages of the segment's sequence by position // page_size.
    num_segments: i32[], number of valid segments.
  """

  positions: jax.Array
  segment_start: jax.Array
  segment_length: jax.Array
  page_table: jax.Array
  num_segments: jax.Array


class Work(NamedTuple):
  """The work list, computed by XLA once per call.

  Attributes:
    count: i32[1], number of units. Each is done for every key/value head.
    segment: i32[u], segment of the unit.
    split: i32[u], first split of the unit.
    num_splits: i32[u], number of splits that the unit folds; 1 in mode "parallel".
    first_position: i32[s], first position of the segment.
    last_position: i32[s], last position of the segment.
    row_groups: i32[s], groups of 8 live rows.
    first_group: i32[u], first group of the unit's partial in the workspace of a key/value head.
    page_table: i32[s, p], padded to whole splits.
  """

  count: jax.Array
  segment: jax.Array
  split: jax.Array
  num_splits: jax.Array
  first_position: jax.Array
  last_position: jax.Array
  row_groups: jax.Array
  first_group: jax.Array
  page_table: jax.Array


def _places(ascending: jax.Array, values: jax.Array, *, side: str) -> jax.Array:
  """Returns `jnp.searchsorted` as i32, in one launch instead of a loop of many."""
  return jnp.searchsorted(ascending, values, side=side, method="scan_unrolled").astype(jnp.int32)


def is_used(segments: Segments) -> jax.Array:
  """Returns which segments are not padding, bool[s]."""
  numbers = jnp.arange(segments.segment_start.shape[0], dtype=jnp.int32)
  return (numbers < segments.num_segments) & (segments.segment_length > 0)


def segment_of_rows(segments: Segments) -> tuple[jax.Array, jax.Array]:
  """Returns each row's segment, i32[n], and whether it has one, bool[n]."""
  rows = jnp.arange(segments.positions.shape[0], dtype=jnp.int32)
  # Padding segments start after all rows, so that the search never finds them.
  start = jnp.where(is_used(segments), segments.segment_start, rows.shape[0])
  segment = _places(start, rows, side="right") - 1
  segment = jnp.maximum(segment, 0)
  offset = rows - segments.segment_start[segment]
  live = (offset >= 0) & (offset < segments.segment_length[segment])
  return segment, live & is_used(segments)[segment]


def split_range(static: Static, segments: Segments) -> tuple[jax.Array, jax.Array]:
  """Returns (first, count) of the splits that each segment sees, i32[s] each; none for padding."""
  used = is_used(segments)
  first_position = segments.positions[segments.segment_start]
  split = jnp.int32(static.config.kv_split)
  first = jnp.zeros_like(first_position)
  if static.window is not None:
    first = jnp.maximum(first_position - jnp.int32(static.window - 1), 0) // split
  last = (first_position + segments.segment_length - 1) // split
  return jnp.where(used, first, 0), jnp.where(used, last - first + 1, 0)


def most_splits(config: Config, window: int | None, num_pages: int, page_size: int) -> int:
  """Returns the maximum number of splits that a segment of `num_pages` pages can see."""
  splits = -(-num_pages * page_size // config.kv_split)
  if window is None:
    return splits
  return min(splits, (window + config.query_tile - 2) // config.kv_split + 2)


def most_groups(config: Config, group: int, num_segments: int, num_rows: int) -> int:
  """Returns the maximum number of groups of 8 live rows of all segments, per key/value head."""
  of_tiles = num_segments * config.warpgroups(group) * ROWS // ROW_GROUP
  return min(of_tiles, num_segments + num_rows * group // ROW_GROUP)


def mode_of(
  config: Config,
  window: int | None,
  shape: tuple[int, ...],
  table_shape: tuple[int, ...],
  page_size: int,
  has_sinks: bool,
  multiprocessors: int,
) -> Literal["sequential", "parallel"]:
  """Returns the mode: `config.mode`, or for "auto" the one that fills the GPU.

  Both give the same bits. "auto" is "parallel" if there are fewer than two (segment, key/value
  head) pairs per multiprocessor, so that whole segments would leave many idle, a segment can have
  more than one split, and partials fit in shared memory and in `WORKSPACE_BYTES`; else it is
  "sequential", which writes no partials.

  Args:
    config: configuration of the call.
    window: window of the call.
    shape: n, k, g, c of the queries.
    table_shape: s, p of the page table.
    page_size: z.
    has_sinks: whether the call has sinks.
    multiprocessors: number of the GPU's multiprocessors.
  """
  if config.mode != "auto":
    return config.mode
  num_rows, num_heads, group, head_dim = shape
  num_segments, num_pages = table_shape
  splits = most_splits(config, window, num_pages, page_size)
  groups = splits * most_groups(config, group, num_segments, num_rows)
  parallel = dataclasses.replace(config, mode="parallel")
  shared = parallel.shared_memory_bytes(group, head_dim, page_size, has_sinks)
  fills = num_segments * num_heads < 2 * multiprocessors and splits > 1
  has_room = shared <= gpu.SHARED_MEMORY_LIMIT_BYTES
  has_room &= groups * num_heads * ROW_GROUP * head_dim * 4 <= WORKSPACE_BYTES
  return "parallel" if fills and has_room else "sequential"


def plan(static: Static, group: int, segments: Segments, page_size: int) -> tuple[Work, Work, int]:
  """Returns (work of the forward kernel, work of the merge kernel, maximum number of groups)."""
  config = static.config
  num_segments, num_pages = segments.page_table.shape
  pages_per_split = config.kv_split // page_size
  page_table = jnp.pad(segments.page_table, ((0, 0), (0, -num_pages % pages_per_split)))
  splits = most_splits(config, static.window, num_pages, page_size)
  first, num_splits = split_range(static, segments)
  live = (segments.segment_length * group + (ROW_GROUP - 1)) // ROW_GROUP
  first_position = segments.positions[segments.segment_start]
  common = dict(
    first_position=first_position,
    last_position=first_position + segments.segment_length - 1,
    row_groups=live.astype(jnp.int32),
    page_table=page_table,
  )
  # Long segments start first, so that the last ones are short.
  order = jnp.argsort(-num_splits, stable=True).astype(jnp.int32)
  count = jnp.sum(num_splits > 0, dtype=jnp.int32)[None]
  nothing = jnp.zeros_like(order)
  whole = Work(
    count=count,
    segment=order,
    split=first[order],
    num_splits=num_splits[order],
    first_group=nothing,
    **common,
  )
  if config.mode == "sequential":
    return whole, whole, 0
  ends = jnp.cumsum(num_splits, dtype=jnp.int32)
  first_unit = ends - num_splits
  groups = num_splits * live
  first_group = jnp.cumsum(groups, dtype=jnp.int32) - groups
  units = jnp.arange(num_segments * splits, dtype=jnp.int32)
  segment = _places(ends, units, side="right")
  segment = jnp.minimum(segment, num_segments - 1)
  offset = units - first_unit[segment]
  parts = Work(
    count=ends[-1:],
    segment=segment,
    split=first[segment] + offset,
    num_splits=jnp.ones_like(segment),
    first_group=first_group[segment] + offset * live[segment],
    **common,
  )
  merges = whole._replace(split=first_unit[order], first_group=first_group[order])
  most = most_groups(config, group, num_segments, segments.positions.shape[0])
  return parts, merges, most * splits


def readers(
  static: Static, segments: Segments, page_size: int, num_pages: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the segments that see each page: (segment i32[x], index i32[x], start i32[m + 1])."""
  width = segments.page_table.shape[1]
  first_position = segments.positions[segments.segment_start]
  last = jnp.where(is_used(segments), first_position + segments.segment_length - 1, -1)
  begin = jnp.arange(width, dtype=jnp.int32) * page_size
  seen = begin[None, :] <= last[:, None]
  if static.window is not None:
    seen = seen & (begin[None, :] + page_size > first_position[:, None] - (static.window - 1))
  pages = jnp.where(seen, segments.page_table, num_pages).reshape(-1)
  order = jnp.argsort(pages, stable=True).astype(jnp.int32)
  start = _places(pages[order], jnp.arange(num_pages + 1, dtype=jnp.int32), side="left")
  return order // width, order % width, start


def tiles(static: Static, group: int, x: jax.Array, segments: Segments) -> jax.Array:
  """Rearranges f[n, k, g, c] to f[s, k, r, c]: rows by segment, position and head; else zero."""
  num_rows, num_heads, _, head_dim = x.shape
  offsets = jnp.arange(static.config.query_tile, dtype=jnp.int32)
  row = jnp.minimum(segments.segment_start[:, None] + offsets[None, :], num_rows - 1)
  live = offsets[None, :] < segments.segment_length[:, None]
  tiles = jnp.where(live[:, :, None, None, None], x[row], jnp.zeros((), x.dtype))
  tiles = jnp.swapaxes(tiles, 1, 2).reshape(row.shape[0], num_heads, -1, head_dim)
  padding = static.config.warpgroups(group) * ROWS - tiles.shape[2]
  return jnp.pad(tiles, ((0, 0), (0, 0), (0, padding), (0, 0)))


def from_tiles(static: Static, group: int, tiles: jax.Array, segments: Segments) -> jax.Array:
  """Rearranges f[s, k, r, c] to f[n, k, g, c]; zero in rows without a segment."""
  num_segments, num_heads, _, head_dim = tiles.shape
  query_tile = static.config.query_tile
  segment, live = segment_of_rows(segments)
  rows = jnp.arange(segment.shape[0], dtype=jnp.int32)
  offset = jnp.clip(rows - segments.segment_start[segment], 0, query_tile - 1)
  tiles = tiles[:, :, : query_tile * group]
  tiles = tiles.reshape(num_segments, num_heads, query_tile, group, head_dim)
  return jnp.where(live[:, None, None, None], tiles[segment, :, offset], jnp.zeros((), tiles.dtype))


def sink_rows(static: Static, sinks: jax.Array, head_dim: int) -> jax.Array:
  """Expands f[k, g] to f32[k, w, 64]: each row's sink as an unscaled score."""
  rows = static.config.warpgroups(sinks.shape[1]) * ROWS
  group = sinks.shape[1]
  scores = sinks.astype(jnp.float32) * jnp.float32(math.sqrt(head_dim))
  scores = jnp.tile(scores, (1, static.config.query_tile))
  scores = jnp.pad(scores, ((0, 0), (0, rows - static.config.query_tile * group)))
  return scores.reshape(scores.shape[0], -1, ROWS)


def items(count: Any, num_heads: int, num_blocks: int) -> Any:
  """Returns the number of items, of count * num_heads, of this block of a persistent grid."""
  block = lax.axis_index("block")
  return lax.div(count * num_heads - block + (num_blocks - 1), num_blocks)


def pieces(pages: jax.Array, piece: int) -> jax.Array:
  """Reshapes pages to f[k, m * z / piece, piece, c], so that copies start at whole indices."""
  return pages.reshape(pages.shape[0], -1, piece, pages.shape[-1])


def listed(x: jax.Array | None) -> list[jax.Array]:
  return [] if x is None else [x]
