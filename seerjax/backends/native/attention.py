"""Attention of segments over pages; a row's chains depend on positions only.

A score is one chain of fused multiply-adds over the features. The softmax uses the maximum over all
keys that a row sees, which is exact in any order, so no splits are needed; exponentials are added
as 16 partial sums by position mod 16, then as a tree. Values are four chains by position mod 4,
added as (0 + 1) + (2 + 3) and divided by the sum. Keys beyond a row's position are not read.

With a window, a row's maximum, sums and chains are those of the keys that it sees, by position too:
a tree of partial sums does not depend on which of them is the first. A sink enters the row's
maximum, and is the last term of the sum.

An item of work is a segment and a head; its rows (positions x query heads of the head's group) are
processed in blocks of four, which share every page that is read. All segments of a head come before
the next head, so that the pages of a common prompt are still in cache.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from numba import types

from seerjax.array_typing import Array, Float
from seerjax.backends.native import (
  attention_few,
  ffi,
  pages as native_pages,
  soft_caps,
  threads,
  vectors,
)
from seerjax.backends.native.attention_backward import attend_backward
from seerjax.backends.native.attention_scores import (
  BLOCK_ROWS,
  first_seen_key,
  most_scores,
  rule_operand,
  scale_of,
  scaled_queries,
  score_width,
  scores_of,
  soft_cap_of,
  window_of,
)
from seerjax.backends.native.attention_values import go_on, shared_positions, wide_chains
from seerjax.backends.native.ffi import address, dimension, integer, is_bfloat16
from seerjax.backends.native.numbers import exp, f32, jit, round_row, write_row
from seerjax.backends.native.pointers import floats, halves, integers
from seerjax.ops.attention import CAUSAL, AttentionRule
from seerjax.types import TokenBatch

_LANES, _CHAINS = vectors.LANES, vectors.CHAINS


@jit
def _block(
  q, rows, first_seen, group, keys, values, is_bf16, table, page_size, head_dim, rule, sinks,
  scores, width, chains, totals,
):  # fmt: skip
  """Computes the chains of weighted values of up to four rows, and the sums that divide them.

  Row r is query head (first row + r) mod group of its position; `first_seen` is the index of the
  first row in (position, head) order, counted from the sequence's start: row r sees the keys before
  (first_seen + r) // group + 1, the last `window` of them. `sinks` is the address of f32[group], or
  0 without sinks.
  """
  window, soft_cap = window_of(rule), soft_cap_of(rule)
  fewest = first_seen // group + 1
  most = (first_seen + rows - 1) // group + 1
  first = first_seen_key(fewest, window)
  scores_of(q, rows, keys, is_bf16, table, page_size, head_dim, first, most, scores, width)
  for row in range(rows):
    seen = (first_seen + row) // group + 1
    begin = first_seen_key(seen, window)
    here, count = scores + 4 * (row * width + begin), seen - begin
    x = floats(here)
    if soft_cap > f32(0.0):
      soft_caps.cap_row(here, soft_cap, count)
    maximum = vectors.maximum_of(here, here, count)
    sink = maximum
    if sinks != 0:
      sink = floats(sinks)[(first_seen + row) % group]
      maximum = max(maximum, sink)
    for place in range(count):
      x[place] = exp(x[place] - maximum)
    total = vectors.sum_of(here, here, count)
    floats(totals)[row] = total + exp(sink - maximum) if sinks != 0 else total
    round_row(here, is_bf16, count)
  out = floats(chains)
  for place in range(rows * _CHAINS * head_dim):
    out[place] = f32(0.0)
  low, high = shared_positions(first_seen, rows, group, window, page_size)
  features = head_dim // _LANES * _LANES if high > 0 else 0
  for row in range(rows if first_seen_key(most, window) > 0 else 0):
    begin = first_seen_key((first_seen + row) // group + 1, window)
    here, to = scores + 4 * row * width, chains + 4 * row * _CHAINS * head_dim
    go_on(here, values, is_bf16, table, page_size, head_dim, begin, low, 0, features, to)
  wide_chains(
    scores, width, rows, values, is_bf16, table, page_size, head_dim, low, high, 0, 1, chains
  )
  for row in range(rows):
    seen = (first_seen + row) // group + 1
    begin = first_seen_key(seen, window)
    here, to = scores + 4 * row * width, chains + 4 * row * _CHAINS * head_dim
    go_on(here, values, is_bf16, table, page_size, head_dim, high, seen, 0, features, to)
    go_on(here, values, is_bf16, table, page_size, head_dim, begin, seen, features, head_dim, to)


@jit
def _items(arguments):
  """Returns heads times segments, plus one item that zeroes padding rows."""
  return integer(arguments, 7, 0) * dimension(arguments, 0, 1) + 1


@jit
def _attend(arguments, results, first, last, worker):
  """Operands: q f[n, k, g, c], key pages f[k, m, c, z], value pages, positions, the segments'
  starts, lengths and page table, the counts of segments and rows, the rule, and sinks f32[k, g].
  Pages may have fewer heads than q: consecutive heads then share one.

  Scratch: queries f32[4, c], their chains f32[4, 4, c], sums, scores f32[4, x].
  """
  num_rows, num_heads = dimension(arguments, 0, 0), dimension(arguments, 0, 1)
  group, head_dim = dimension(arguments, 0, 2), dimension(arguments, 0, 3)
  num_pages, page_size = dimension(arguments, 1, 1), dimension(arguments, 1, 3)
  sharers = num_heads // dimension(arguments, 1, 0)
  pages_of_segment = dimension(arguments, 6, 1)
  positions = integers(address(arguments, 3))
  starts, lengths = integers(address(arguments, 4)), integers(address(arguments, 5))
  num_segments, live = integer(arguments, 7, 0), integer(arguments, 8, 0)
  rows_are_bf16, pages_are_bf16 = is_bfloat16(arguments, 0), is_bfloat16(arguments, 1)
  row_size, size = 2 if rows_are_bf16 else 4, 2 if pages_are_bf16 else 4
  q, out = address(arguments, 0), address(results, 0)
  queries = address(results, 1) + 4 * worker * dimension(results, 1, 1)
  chains = queries + 4 * BLOCK_ROWS * head_dim
  totals = chains + 4 * BLOCK_ROWS * _CHAINS * head_dim
  scores = totals + 4 * _LANES
  width = score_width(pages_of_segment, page_size)
  rule, sinks = address(arguments, 9), address(arguments, 10)
  if dimension(arguments, 10, 0) == 0:
    sinks = types.int64(0)
  for item in range(first, last):
    if item == num_segments * num_heads:
      row_elements = num_heads * group * head_dim
      bits = halves(out + row_size * live * row_elements)
      for place in range((num_rows - live) * row_elements * row_size // 2):
        bits[place] = 0
      continue
    head, segment = item // num_segments, item % num_segments
    start = types.int64(starts[segment])
    position = types.int64(positions[start])
    table = address(arguments, 6) + 4 * segment * pages_of_segment
    head_pages = size * (head // sharers) * num_pages * page_size * head_dim
    keys, values = address(arguments, 1) + head_pages, address(arguments, 2) + head_pages
    num_queries = lengths[segment] * group
    for block in range(0, num_queries, BLOCK_ROWS):
      rows = min(BLOCK_ROWS, num_queries - block)
      for row in range(rows):
        place = block + row
        where = ((start + place // group) * num_heads + head) * group + place % group
        source = q + row_size * where * head_dim
        to = queries + 4 * row * head_dim
        scaled_queries(source, rows_are_bf16, head_dim, scale_of(rule), to)
      own_sinks = sinks + 4 * head * group if sinks != 0 else sinks
      _block(
        queries, rows, position * group + block, group, keys, values, pages_are_bf16, table,
        page_size, head_dim, rule, own_sinks, scores, width, chains, totals,
      )  # fmt: skip
      for row in range(rows):
        place = block + row
        where = ((start + place // group) * num_heads + head) * group + place % group
        total = floats(totals)[row]
        x = floats(chains + 4 * row * _CHAINS * head_dim)
        for feature in range(head_dim):
          low = x[feature] + x[head_dim + feature]
          high = x[2 * head_dim + feature] + x[3 * head_dim + feature]
          x[feature] = (low + high) / total
        target = out + row_size * where * head_dim
        write_row(chains + 4 * row * _CHAINS * head_dim, target, rows_are_bf16, head_dim)


@jit
def _cost(arguments):
  """Two products of a row with each key that it sees; exp and memory cost three times as much."""
  positions, starts = integers(address(arguments, 3)), integers(address(arguments, 4))
  lengths, keys = integers(address(arguments, 5)), types.int64(0)
  window = integer(arguments, 9, 0)
  for segment in range(integer(arguments, 7, 0)):
    before = min(types.int64(positions[starts[segment]]), window)
    keys += lengths[segment] * (before + lengths[segment])
  heads = dimension(arguments, 0, 1) * dimension(arguments, 0, 2)
  return 8 * keys * heads * dimension(arguments, 0, 3)


_ATTEND = ffi.Handler("seerjax_attend", _items, _attend, _cost)
_FEW = attention_few.handler(_cost)


def attend(
  q: Float[Array, "n k g c"],
  pages: tuple[Float[Array, "j m c z"], Float[Array, "j m z c"]],
  batch: TokenBatch,
  rule: AttentionRule = CAUSAL,
  sinks: Float[Array, "k g"] | None = None,
) -> Float[Array, "n k g c"]:
  """Causal attention of every row over its own sequence's pages; `ops.attention.attend`.

  Args:
    q: f[n, k, g, c], queries by key/value head; scaled here, in float32.
    pages: keys f[j, m, c, z] and values f[j, m, z, c]; the rows' own are already written. j is k or
      a divisor of it, as in `ops.attention.attend`.
    batch: rows and segments.
    rule: keys that a row sees, and how scores become weights.
    sinks: f[k, g], score of a key of every row that has no value, by head; None for none.

  Returns:
    f[n, k, g, c] in q's dtype; zero in rows past the last.
  """
  return _attended(rule, q, *pages, _wide_sinks(sinks), batch)


def _wide_sinks(sinks: Array | None) -> Array:
  """Returns sinks for the handlers, f32[k, g]; without elements if there are none."""
  return jnp.zeros((0, 0), jnp.float32) if sinks is None else sinks.astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attended(rule, q, keys, values, sinks, batch):
  page_size, head_dim = values.shape[2:]
  width = most_scores(batch.page_table.shape[1], page_size)
  scratch = BLOCK_ROWS * head_dim * (1 + _CHAINS) + _LANES + BLOCK_ROWS * width
  out, own = (
    jax.ShapeDtypeStruct(q.shape, q.dtype),
    jax.ShapeDtypeStruct((threads.number(), scratch), jnp.float32),
  )
  operands = (
    q,
    keys,
    values,
    batch.positions,
    batch.segment_start,
    batch.segment_length,
    batch.page_table,
    batch.num_segments,
    batch.num_rows,
    rule_operand(rule, head_dim),
    sinks,
  )
  if attention_few.suits(*q.shape[:3]):
    return _FEW([out, *attention_few.scratch(out, width)], *operands)[0]
  return _ATTEND([out, own], *operands)[0]


def _attended_forward(rule, q, keys, values, sinks, batch):
  return _attended(rule, q, keys, values, sinks, batch), (q, keys, values, sinks, batch)


def _attended_backward(rule, residuals, gradient):
  q, keys, values, sinks, batch = residuals
  grad_q, *grad_pages, grad_sinks = attend_backward(
    q, keys, values, sinks, batch, gradient, rule, is_whole=True
  )
  grad_keys, grad_values = (x.astype(keys.dtype) for x in grad_pages)
  return grad_q, grad_keys, grad_values, grad_sinks, None


_attended.defvjp(_attended_forward, _attended_backward)


def attend_own(
  q: Float[Array, "n k g c"],
  values: tuple[Float[Array, "n k c"], Float[Array, "n k c"]],
  pages: tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct],
  batch: TokenBatch,
  rule: AttentionRule = CAUSAL,
  sinks: Float[Array, "k g"] | None = None,
) -> Float[Array, "n k g c"]:
  """Combines `pages.write_pages` and `attend` for rows that attend only to each other.

  Pages are allocated for the call and not zeroed: an unwritten slot is uninitialised, and is never
  read. The operating system maps no memory for pages that are never written.

  Args:
    q: f[n, k, g, c].
    values: the rows' keys and values, f[n, k, c] each, of q's dtype.
    pages: shapes of the pages, f[k, m, c, z] and f[k, m, z, c].
    batch: rows and segments.
    rule: as in `attend`, like `sinks`.
    sinks: f[k, g].

  Returns:
    As `attend`.
  """
  (keys, own_values), (key_pages, value_pages) = values, pages
  own = _OwnPages((key_pages.shape, value_pages.shape), key_pages.dtype, rule)
  return _attended_own(own, q, keys, own_values, _wide_sinks(sinks), batch)


class _OwnPages(NamedTuple):
  """Shapes of a call's own pages, their dtype, and the rule of the attention."""

  shapes: tuple[tuple[int, ...], tuple[int, ...]]
  dtype: jnp.dtype
  rule: AttentionRule


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attended_own(own, q, keys, values, sinks, batch):
  return _attended_own_forward(own, q, keys, values, sinks, batch)[0]


def _pages_of(own, keys, values, batch):
  key_shape, value_shape = (jax.ShapeDtypeStruct(shape, own.dtype) for shape in own.shapes)
  return native_pages.written_anew(
    (key_shape, value_shape), (keys, values), batch.slots, batch.num_rows
  )


def _attended_own_forward(own, q, keys, values, sinks, batch):
  # Rows are kept instead of pages, which have room for whole contexts and are quickly rewritten.
  pages = _pages_of(own, keys, values, batch)
  return _attended(own.rule, q, *pages, sinks, batch), (q, keys, values, sinks, batch)


def _attended_own_backward(own, residuals, gradient):
  q, keys, values, sinks, batch = residuals
  key_pages, value_pages = _pages_of(own, keys, values, batch)
  grad_q, *grad_pages, grad_sinks = attend_backward(
    q, key_pages, value_pages, sinks, batch, gradient, own.rule, is_whole=False
  )
  num_rows, heads, _, features = q.shape
  grad_keys, grad_values = native_pages.taken(
    grad_pages, (num_rows, heads, features), batch.slots, batch.num_rows
  )
  # Rounded like gradients of pages, then like those of rows.
  grad_rows = (x.astype(own.dtype).astype(q.dtype) for x in (grad_keys, grad_values))
  return grad_q, *grad_rows, grad_sinks, None


_attended_own.defvjp(_attended_own_forward, _attended_own_backward)
