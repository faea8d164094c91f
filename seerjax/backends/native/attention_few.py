"""Attention of few rows: threads share each row's keys and values, not only segments and heads.

With one sequence there are as many items of work as key/value heads, which may be fewer than the
threads, or divide unevenly: three heads keep one of two threads idle for a quarter of the time. So
here an item is a block of up to four rows of one segment and head, all threads work on all items,
and a stage begins when the previous one is done (`threads.claim`):

    positions: scores, maximum | positions: exponentials | rows: sum, rounding, first values
                               | chains: values          | rows: last values, sum of chains

A score, an exponential and a feature's chains are those of `attention`, and a maximum is exact in
any order: the same bits.
"""

from __future__ import annotations

import jax
from numba import types
import numpy as np

from seerjax.backends.native import ffi, soft_caps, threads, vectors
from seerjax.backends.native.attention_scores import (
  BLOCK_ROWS,
  first_seen_key,
  scale_of,
  scaled_queries,
  score_width,
  scores_of,
  soft_cap_of,
  window_of,
)
from seerjax.backends.native.attention_values import go_on, shared_positions, wide_chains
from seerjax.backends.native.ffi import address, dimension, integer, is_bfloat16
from seerjax.backends.native.layer_parts import f32_of
from seerjax.backends.native.numbers import exp, f32, inlined, jit, round_row, write_row, zero_row
from seerjax.backends.native.pointers import floats, integers

# Maximum parts of an item's positions.
_PARTS = np.int64(8)
# Minimum positions of a part.
_LEAST_POSITIONS = np.int64(256)
# Parts of an item's chains.
_HALVES = np.int64(2)
# Items per thread from which on `attention` divides the work evenly enough.
_ITEMS_PER_THREAD = 4
_LANES, _CHAINS = np.int64(vectors.LANES), np.int64(vectors.CHAINS)
_STAGES = 5
_NONE, _ROWS = np.int64(-1), np.int64(BLOCK_ROWS)
# Floats of an item before its chains: each part's maximum of each row, and the rows' sums.
_HEAD = np.int64((_PARTS + 1) * _ROWS)


def suits(num_rows: int, num_heads: int, group: int) -> bool:
  """Returns whether a program of `num_rows` rows has too few items for `attention`'s division."""
  return most_items(num_rows, num_heads, group) < _ITEMS_PER_THREAD * threads.number()


def most_items(num_rows: int, num_heads: int, group: int) -> int:
  """Returns the maximum number of items: each row may be a segment of its own."""
  return num_rows * num_heads * -(-group // BLOCK_ROWS)


@jit
def _num_blocks(arguments, group):
  """Returns the number of blocks of all segments."""
  lengths, count = integers(address(arguments, 5)), types.int64(0)
  for segment in range(integer(arguments, 7, 0)):
    count += (lengths[segment] * group + _ROWS - 1) // _ROWS
  return count


@inlined
def _segment_of(arguments, group, block):
  """Returns the segment of a block, and the block's index in that segment."""
  lengths, segment = integers(address(arguments, 5)), types.int64(0)
  count = (lengths[0] * group + _ROWS - 1) // _ROWS
  while block >= count:
    block -= count
    segment += 1
    count = (lengths[segment] * group + _ROWS - 1) // _ROWS
  return segment, block


@jit
def _positions_of_part(count, unit):
  """Returns the positions of a part, a multiple of `unit`."""
  least = max((count + _PARTS - 1) // _PARTS, _LEAST_POSITIONS)
  return (least + unit - 1) // unit * unit


@jit
def _maximum(maxima, row, num_parts):
  """Returns the maximum of a row's scores in all parts."""
  x = floats(maxima)
  maximum = x[row]
  for part in range(1, num_parts):
    maximum = max(maximum, x[part * _ROWS + row])
  return maximum


@jit
def _attend(arguments, results, team, worker):
  """Operands: those of `attention`'s handler. Scratch: for each item maxima and sums, chains
  f32[4, 4, c], then scores f32[4, x]; for each thread queries f32[4, c].
  """
  num_rows, num_heads = dimension(arguments, 0, 0), dimension(arguments, 0, 1)
  group, head_dim = dimension(arguments, 0, 2), dimension(arguments, 0, 3)
  num_pages, page_size = dimension(arguments, 1, 1), dimension(arguments, 1, 3)
  sharers = num_heads // dimension(arguments, 1, 0)
  pages_of_segment = dimension(arguments, 6, 1)
  positions = integers(address(arguments, 3))
  starts, lengths = integers(address(arguments, 4)), integers(address(arguments, 5))
  live = integer(arguments, 8, 0)
  rows_are_bf16, pages_are_bf16 = is_bfloat16(arguments, 0), is_bfloat16(arguments, 1)
  row_size, size = 2 if rows_are_bf16 else 4, 2 if pages_are_bf16 else 4
  queries = address(results, 2) + 4 * worker * dimension(results, 2, 1)
  width = score_width(pages_of_segment, page_size)
  rule, sinks = address(arguments, 9), address(arguments, 10)
  if dimension(arguments, 10, 0) == 0:
    sinks = types.int64(0)
  window, soft_cap = window_of(rule), soft_cap_of(rule)
  blocks = _num_blocks(arguments, group)
  items = blocks * num_heads

  for stage in range(_STAGES):
    of_item = _PARTS if stage < 2 else (_HALVES if stage == 3 else _ROWS)
    piece = threads.claim(team, stage, _NONE)
    while piece < items * of_item:
      item, part = piece // of_item, piece % of_item
      head = item // blocks
      segment, block = _segment_of(arguments, group, item % blocks)
      start = types.int64(starts[segment])
      first_row = block * _ROWS
      rows = min(_ROWS, lengths[segment] * group - first_row)
      first_seen = positions[start] * group + first_row
      most = (first_seen + rows - 1) // group + 1
      table = address(arguments, 6) + 4 * segment * pages_of_segment
      head_pages = size * (head // sharers) * num_pages * page_size * head_dim
      values = address(arguments, 2) + head_pages
      maxima = address(results, 1) + 4 * item * dimension(results, 1, 1)
      totals = maxima + 4 * _PARTS * _ROWS
      chains = totals + 4 * _ROWS
      scores = chains + 4 * _ROWS * _CHAINS * head_dim
      unit = page_size if page_size % _LANES == 0 else page_size * _LANES
      base = first_seen_key(first_seen // group + 1, window) // unit * unit
      some = _positions_of_part(most - base, unit)
      begin, end = base + part * some, min(base + (part + 1) * some, most)
      low, high = shared_positions(first_seen, rows, group, window, page_size)
      features = head_dim // _LANES * _LANES if high > 0 else types.int64(0)
      if stage == 0 and begin < end:
        for row in range(rows):
          place = first_row + row
          where = ((start + place // group) * num_heads + head) * group + place % group
          source = address(arguments, 0) + row_size * where * head_dim
          to = queries + 4 * row * head_dim
          scaled_queries(source, rows_are_bf16, head_dim, scale_of(rule), to)
        scores_of(
          queries, rows, address(arguments, 1) + head_pages, pages_are_bf16, table, page_size,
          head_dim, begin, end, scores, width,
        )  # fmt: skip
        for row in range(rows):
          seen = (first_seen + row) // group + 1
          own = max(begin, first_seen_key(seen, window))
          here, count = scores + 4 * (row * width + own), min(seen, end) - own
          if count > 0 and soft_cap > f32(0.0):
            soft_caps.cap_row(here, soft_cap, count)
          maximum = vectors.maximum_of(here, here, count) if count > 0 else f32(-np.inf)
          floats(maxima)[part * _ROWS + row] = maximum
      elif stage == 1 and begin < end:
        for row in range(rows):
          maximum = _maximum(maxima, row, (most - base + some - 1) // some)
          if sinks != 0:
            maximum = max(maximum, floats(sinks)[head * group + (first_row + row) % group])
          seen = (first_seen + row) // group + 1
          x = floats(scores + 4 * row * width)
          for position in range(max(begin, first_seen_key(seen, window)), min(seen, end)):
            x[position] = exp(x[position] - maximum)
      elif stage == 2 and part < rows:
        seen = (first_seen + part) // group + 1
        first = first_seen_key(seen, window)
        weights = scores + 4 * part * width
        total = vectors.sum_of(weights + 4 * first, weights + 4 * first, seen - first)
        if sinks != 0:
          sink = floats(sinks)[head * group + (first_row + part) % group]
          maximum = max(_maximum(maxima, part, (most - base + some - 1) // some), sink)
          total = total + exp(sink - maximum)
        floats(totals)[part] = total
        round_row(weights + 4 * first, pages_are_bf16, seen - first)
        to = chains + 4 * part * _CHAINS * head_dim
        for place in range(_CHAINS * head_dim):
          floats(to)[place] = f32(0.0)
        go_on(
          weights, values, pages_are_bf16, table, page_size, head_dim, first, low, 0, features, to
        )
      elif stage == 3:
        wide_chains(
          scores, width, rows, values, pages_are_bf16, table, page_size, head_dim, low, high, part,
          _HALVES, chains,
        )  # fmt: skip
      elif stage == 4 and part < rows:
        place = first_row + part
        seen = (first_seen + part) // group + 1
        first = first_seen_key(seen, window)
        weights, to = scores + 4 * part * width, chains + 4 * part * _CHAINS * head_dim
        go_on(
          weights, values, pages_are_bf16, table, page_size, head_dim, high, seen, 0, features, to
        )
        go_on(
          weights, values, pages_are_bf16, table, page_size, head_dim, first, seen, features,
          head_dim, to,
        )  # fmt: skip
        x, total = floats(to), floats(totals)[part]
        for feature in range(head_dim):
          low_sum = x[feature] + x[head_dim + feature]
          x[feature] = (low_sum + (x[2 * head_dim + feature] + x[3 * head_dim + feature])) / total
        where = ((start + place // group) * num_heads + head) * group + place % group
        target = address(results, 0) + row_size * where * head_dim
        write_row(to, target, rows_are_bf16, head_dim)
      threads.settle(team, stage)
      piece = threads.claim(team, stage, piece)
    threads.wait(team, stage, items * of_item)
  if worker == 0:
    row_elements = num_heads * group * head_dim
    dead = address(results, 0) + row_size * live * row_elements
    zero_row(dead, rows_are_bf16, (num_rows - live) * row_elements)


@jit
def _nothing(arguments):
  return types.int64(0)


def handler(cost) -> ffi.Handler:
  """Returns the handler; `cost` is that of `attention`'s."""
  return ffi.Handler("seerjax_attend_few", _nothing, _attend, cost, is_staged=True)


def scratch(rows: jax.ShapeDtypeStruct, most_positions: int) -> tuple[jax.ShapeDtypeStruct, ...]:
  """Returns the shapes of the handler's scratch memory: that of items, that of threads.

  Args:
    rows: shape of the queries, f[n, k, g, c].
    most_positions: number of scores of a row.
  """
  num_rows, num_heads, group, head_dim = rows.shape
  of_item = int(_HEAD) + BLOCK_ROWS * (vectors.CHAINS * head_dim + most_positions)
  return (
    f32_of(most_items(num_rows, num_heads, group), of_item),
    f32_of(threads.number(), BLOCK_ROWS * head_dim),
  )
