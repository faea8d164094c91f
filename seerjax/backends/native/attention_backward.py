"""The gradient of attention over pages, as chains over a batch's rows in batch order.

With w the softmax of a row's scores over the keys that it sees, and d the row's gradient,

    dv[x] = sum over rows of w[x] d                  dw[x] = d . v[x]
    ds[x] = w[x] (dw[x] - sum over y of w[y] dw[y])
    dk[x] = sum over rows of ds[x] q                 dq = sum over x of ds[x] k[x]

where q is scaled and rounded as in the forward pass. The sum over y is 16 partial sums by position
mod 16, then a tree; every other sum is one chain of fused multiply-adds: over features, over
positions, or over rows in batch order and over the query heads of each. With a window, x and y are
the keys that the row sees, as in the forward pass. A soft cap multiplies ds by 1 - tanh(score /
cap) ** 2. A sink with weight w gets the sum over rows of -w (sum over y of w[y] dw[y]): one chain
over each half of the segments (see below), and their sum. Several sequences may share
a page. Everything is float32. A page's gradients are zeroed when a segment first names it; pages
that no segment names, which are most pages of a nearly empty batch, are zeroed only if `is_whole`.

An item of work is half of a head's segments if the halves share no page, otherwise the head.
Consecutive rows of a sequence are processed in blocks of 32, and each page of their keys and values
is transposed once per block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from numba import types
import numpy as np

from seerjax.array_typing import Array
from seerjax.backends.native import ffi, products, soft_caps, threads, vectors
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
from seerjax.backends.native.ffi import address, dimension, integer, is_bfloat16
from seerjax.backends.native.numbers import (
  exp,
  f32,
  float_of_half,
  jit,
  read_row,
  write_row,
  zero_row,
)
from seerjax.backends.native.pointers import floats, halves, integers
from seerjax.ops.attention import AttentionRule
from seerjax.types import TokenBatch

# Rows of a block, a multiple of `BLOCK_ROWS`, which share the transposed pages.
ROWS = 32
_LANES = vectors.LANES
# Not literals for numba, which would compile anew for each literal.
_ONE, _NO = np.int64(1), np.bool_(False)
_Q, _KEYS, _POSITIONS, _STARTS, _LENGTHS, _TABLE, _SEGMENTS, _LIVE = map(
  np.int64, (0, 1, 3, 4, 5, 6, 7, 8)
)
_RULE, _SINKS, _GRADIENT, _WHOLE = map(np.int64, (9, 10, 11, 12))


@jit
def _product(a, a_row, a_step, rows, w, w_step, columns, k, c, c_row, is_added):
  """Computes c[rows, columns] (+)= a[rows, k] @ w[k, columns], like float32 `products.product`."""
  for row in range(0, rows, products.BLOCK_ROWS):
    high = min(products.BLOCK_ROWS, rows - row)
    products.few_rows(
      a + 4 * row * a_row, a_row, a_step, high, w, w_step, columns, k, c + 4 * row * c_row, c_row,
      is_added, 0,
    )  # fmt: skip


@jit
def _transpose(source, is_bf16, rows, columns, target):
  """Transposes f[rows, columns] to f32[columns, rows]."""
  size = 2 if is_bf16 else 4
  whole_rows, whole_columns = rows // _LANES * _LANES, columns // _LANES * _LANES
  for row in range(0, whole_rows, _LANES):
    for column in range(0, whole_columns, _LANES):
      at, to = source + size * (row * columns + column), target + 4 * (column * rows + row)
      if is_bf16:
        vectors.transpose_bf16(at, columns, to, rows)
      else:
        vectors.transpose_f32(at, columns, to, rows)
  wide, narrow, out = floats(source), halves(source), floats(target)
  for row in range(rows):
    for column in range(whole_columns if row < whole_rows else 0, columns):
      place = row * columns + column
      out[column * rows + row] = float_of_half(narrow[place]) if is_bf16 else wide[place]


@jit
def _zero_unseen(row, first, begin, seen, end):
  """Zeroes a row's floats at positions from `first` to `end` outside of [begin, seen)."""
  x = floats(row)
  for position in range(first, begin):
    x[position] = f32(0.0)
  for position in range(seen, end):
    x[position] = f32(0.0)


@jit
def _softmax(scores, count, soft_cap, cap_slopes, sinks, one):
  """Turns a row's scores into weights in place, and returns the weight of its sink.

  Args:
    cap_slopes (address): written if there is a cap: the derivative of each capped score.
    sinks (address): of the group's sinks, 0 for none; `one` is the row's head in its group.
  """
  x = floats(scores)
  if soft_cap > f32(0.0):
    soft_caps.cap_row_for_gradient(scores, soft_cap, count, cap_slopes)
  maximum = vectors.maximum_of(scores, scores, count)
  sink = maximum
  if sinks != 0:
    sink = floats(sinks)[one]
    maximum = max(maximum, sink)
  for place in range(count):
    x[place] = exp(x[place] - maximum)
  total = vectors.sum_of(scores, scores, count)
  of_sink = exp(sink - maximum)
  total = total + of_sink if sinks != 0 else total
  for place in range(count):
    x[place] = x[place] / total
  return of_sink / total


@jit
def _of_scores(weights, slopes, count, soft_cap, cap_slopes):
  """Turns gradients of a row's weights into those of its scores, and returns their mean."""
  inner = vectors.dot_of(weights, slopes, count)
  w, x = floats(weights), floats(slopes)
  for place in range(count):
    x[place] = w[place] * (x[place] - inner)
  if soft_cap > f32(0.0):
    soft_caps.scale_row_by(slopes, cap_slopes, count)
  return inner


@jit
def _block(
  rows, first_seen, group, keys, values, is_bf16, table, page_size, head_dim, rule, sinks, width,
  queries, gradients, grad_queries, weights, slopes, of_sinks, cap_slopes, turned, grad_keys,
  grad_values,
):  # fmt: skip
  """Computes gradients of up to `ROWS` rows of a sequence; row r sees the keys before
  (first_seen + r) // group + 1, the last `window` of them.

  Args:
    keys, values: page 0 of the head; grad_keys, grad_values: likewise, f32, added to.
    queries, gradients: f32[rows, c], scaled queries and the rows' cotangents.
    grad_queries: f32[rows, c], written: the gradient of the scaled queries.
    of_sinks: f32[rows], written if there are sinks: minus the gradient of each row's sink.
    weights, slopes, cap_slopes: scratch, f32[rows, width]; turned: f32[z, c].
  """
  window, soft_cap = window_of(rule), soft_cap_of(rule)
  size = 2 if is_bf16 else 4
  elements = page_size * head_dim
  pages = integers(table)
  most = (first_seen + rows - 1) // group + 1
  num_pages = (most + page_size - 1) // page_size
  first = first_seen_key(first_seen // group + 1, window)
  first_page = first // page_size
  first_slot, end = first_page * page_size, num_pages * page_size
  for row in range(0, rows, BLOCK_ROWS):
    scores_of(
      queries + 4 * row * head_dim, min(BLOCK_ROWS, rows - row), keys, is_bf16, table, page_size,
      head_dim, first, most, weights + 4 * row * width, width,
    )  # fmt: skip
  for row in range(rows):
    seen, one = (first_seen + row) // group + 1, (first_seen + row) % group
    begin, place = first_seen_key(seen, window), row * width
    at = 4 * (place + begin)
    floats(of_sinks)[row] = _softmax(
      weights + at, seen - begin, soft_cap, cap_slopes + at, sinks, one
    )
    _zero_unseen(weights + 4 * place, first_slot, begin, seen, end)
  for page in range(first_page, num_pages):
    here = types.int64(pages[page]) * elements
    _transpose(values + size * here, is_bf16, page_size, head_dim, turned)
    _product(
      gradients, head_dim, _ONE, rows, turned, page_size, page_size, head_dim,
      slopes + 4 * page * page_size, width, 0,
    )  # fmt: skip
  for row in range(rows):
    seen = (first_seen + row) // group + 1
    begin, place = first_seen_key(seen, window), row * width
    at = 4 * (place + begin)
    inner = _of_scores(weights + at, slopes + at, seen - begin, soft_cap, cap_slopes + at)
    floats(of_sinks)[row] = floats(of_sinks)[row] * inner
    _zero_unseen(slopes + 4 * place, first_slot, begin, seen, end)
  for page in range(first_page, num_pages):
    here = types.int64(pages[page]) * elements
    # Slots that none of the rows sees may be uninitialised.
    slots = min(page_size, most - page * page_size)
    w, x = weights + 4 * page * page_size, slopes + 4 * page * page_size
    _transpose(keys + size * here, is_bf16, head_dim, page_size, turned)
    _product(
      x, width, _ONE, rows, turned, head_dim, head_dim, slots, grad_queries, head_dim,
      1 if page > first_page else 0,
    )  # fmt: skip
    _product(
      queries, _ONE, head_dim, head_dim, x, width, slots, rows, grad_keys + 4 * here, page_size, 1
    )
    _product(
      w, _ONE, width, slots, gradients, head_dim, head_dim, rows, grad_values + 4 * here, head_dim,
      1,
    )  # fmt: skip


@jit
def _zero_pages(pages, count, is_named, keys, values, elements):
  """Zeroes a head's gradients in those of `count` pages that were not named yet, and marks them."""
  for place in range(count):
    page = types.int64(pages[place])
    if is_named[page] == 0:
      is_named[page] = 1
      zero_row(keys + 4 * page * elements, _NO, elements)
      zero_row(values + 4 * page * elements, _NO, elements)


@jit
def _same_pages(table, pages_of_segment, one, other):
  """Returns whether two segments have the same pages."""
  left = integers(table + 4 * one * pages_of_segment)
  right = integers(table + 4 * other * pages_of_segment)
  differing = 0
  for page in range(pages_of_segment):
    differing += left[page] != right[page]
  return differing == 0


@jit
def _pages_to(arguments, segment):
  """Returns how many pages the rows of a segment see."""
  starts, lengths = integers(address(arguments, _STARTS)), integers(address(arguments, _LENGTHS))
  position = integers(address(arguments, _POSITIONS))[starts[segment]]
  end, page_size = types.int64(position) + lengths[segment], dimension(arguments, _KEYS, 3)
  return (end + page_size - 1) // page_size


@jit
def _cut(arguments, last_of):
  """Returns the first segment of the second half; no segment before it shares a page with the rest.

  Its first row is as near to the middle row as possible; 0 if there is no such segment, as when all
  segments share a page. `last_of` is scratch, i32[m]: the last segment that names each page.
  """
  num_segments, live = integer(arguments, _SEGMENTS, 0), integer(arguments, _LIVE, 0)
  pages_of_segment = dimension(arguments, _TABLE, _ONE)
  table, starts = integers(address(arguments, _TABLE)), integers(address(arguments, _STARTS))
  last = integers(last_of)
  for segment in range(num_segments):
    for place in range(_pages_to(arguments, segment)):
      last[table[segment * pages_of_segment + place]] = segment
  cut, reach, nearest = 0, 0, live
  for segment in range(num_segments):
    away = abs(2 * types.int64(starts[segment]) - live)
    if segment > reach and away < nearest:
      cut, nearest = segment, away
    for place in range(_pages_to(arguments, segment)):
      reach = max(reach, types.int64(last[table[segment * pages_of_segment + place]]))
  return cut


@jit
def _halves_of_heads(arguments):
  return 2 * dimension(arguments, _Q, _ONE)


@jit
def _attend_backward(arguments, results, first, last, worker):
  """Operands: those of `attention`, the cotangent f[n, k, g, c], and whether to zero every page.

  Results: gradients of q, f[n, k, g, c], of keys f32[k, m, c, z] and values f32[k, m, z, c], and
  each half's gradient of the sinks f32[2, k, g]. Scratch: queries, gradients, gradients of queries
  f32[r, c], weights and slopes f32[r, x], sinks f32[r], a page, flags of the named pages i32[m],
  and derivatives of capped scores f32[r, x] if there is a cap.
  """
  num_rows, num_heads = dimension(arguments, _Q, 0), dimension(arguments, _Q, _ONE)
  group, head_dim = dimension(arguments, _Q, 2), dimension(arguments, _Q, 3)
  num_pages, page_size = dimension(arguments, _KEYS, _ONE), dimension(arguments, _KEYS, 3)
  pages_of_segment = dimension(arguments, _TABLE, _ONE)
  positions, tables = integers(address(arguments, _POSITIONS)), address(arguments, _TABLE)
  starts, lengths = integers(address(arguments, _STARTS)), integers(address(arguments, _LENGTHS))
  num_segments, live = integer(arguments, _SEGMENTS, 0), integer(arguments, _LIVE, 0)
  rows_are_bf16, is_bf16 = is_bfloat16(arguments, _Q), is_bfloat16(arguments, _KEYS)
  row_size, size = 2 if rows_are_bf16 else 4, 2 if is_bf16 else 4
  width = score_width(pages_of_segment, page_size)
  queries = address(results, 4) + 4 * worker * dimension(results, 4, _ONE)
  gradients = queries + 4 * ROWS * head_dim
  grad_queries = gradients + 4 * ROWS * head_dim
  weights = grad_queries + 4 * ROWS * head_dim
  slopes = weights + 4 * ROWS * width
  of_sinks = slopes + 4 * ROWS * width
  turned = of_sinks + 4 * ROWS
  elements = page_size * head_dim
  is_named = integers(turned + 4 * elements)
  cap_slopes = turned + 4 * (elements + num_pages)
  is_whole = integer(arguments, _WHOLE, 0)
  rule, sinks = address(arguments, _RULE), address(arguments, _SINKS)
  if dimension(arguments, _SINKS, 0) == 0:
    sinks = types.int64(0)
  scale = scale_of(rule)
  head_elements = num_pages * elements
  middle = _cut(arguments, turned + 4 * elements)
  cut = 0 if is_whole else middle
  for item in range(first, last):
    head, half = item // 2, item % 2
    if half == 1 and cut == 0:
      continue
    keys = address(arguments, _KEYS) + size * head * head_elements
    values = address(arguments, 2) + size * head * head_elements
    grad_keys = address(results, 1) + 4 * head * head_elements
    grad_values = address(results, 2) + 4 * head * head_elements
    own_sinks, half_sinks = sinks, 4 * num_heads * group
    grad_sinks = address(results, 3) + 4 * head * group
    if sinks != 0:
      own_sinks = sinks + 4 * head * group
      zero_row(grad_sinks + half * half_sinks, _NO, group)
      if cut == 0:
        zero_row(grad_sinks + half_sinks, _NO, group)
    for page in range(num_pages):
      is_named[page] = 0
    for row in range(live if half == 0 else num_rows, num_rows):
      place = row_size * (row * num_heads + head) * group * head_dim
      bits = halves(address(results, 0) + place)
      for half_word in range(group * head_dim * row_size // 2):
        bits[half_word] = 0
    segment = cut if half == 1 else 0
    end = cut if half == 0 and cut > 0 else num_segments
    while segment < end:
      # Segments that continue the previous one are one piece.
      piece = segment
      start = types.int64(starts[piece])
      position = types.int64(positions[start])
      count = types.int64(lengths[piece])
      segment += 1
      while (
        segment < end
        and starts[segment] == start + count
        and positions[start + count] == position + count
        and _same_pages(tables, pages_of_segment, piece, segment)
      ):
        count += lengths[segment]
        segment += 1
      table = tables + 4 * piece * pages_of_segment
      named = (position + count + page_size - 1) // page_size
      _zero_pages(integers(table), named, is_named, grad_keys, grad_values, elements)
      for block in range(0, count * group, ROWS):
        rows = min(ROWS, count * group - block)
        for row in range(rows):
          place = block + row
          where = ((start + place // group) * num_heads + head) * group + place % group
          at = row_size * where * head_dim
          to = 4 * row * head_dim
          scaled_queries(address(arguments, _Q) + at, rows_are_bf16, head_dim, scale, queries + to)
          read_row(address(arguments, _GRADIENT) + at, rows_are_bf16, gradients + to, head_dim)
        _block(
          rows, position * group + block, group, keys, values, is_bf16, table, page_size, head_dim,
          rule, own_sinks, width, queries, gradients, grad_queries, weights, slopes, of_sinks,
          cap_slopes, turned, grad_keys, grad_values,
        )  # fmt: skip
        if sinks != 0:
          total = floats(grad_sinks + (half_sinks if 0 < middle <= piece else 0))
          for row in range(rows):
            one = (block + row) % group
            total[one] = total[one] - floats(of_sinks)[row]
        for row in range(rows):
          place = block + row
          where = ((start + place // group) * num_heads + head) * group + place % group
          out = floats(grad_queries + 4 * row * head_dim)
          for feature in range(head_dim):
            out[feature] = out[feature] * scale
          target = address(results, 0) + row_size * where * head_dim
          write_row(grad_queries + 4 * row * head_dim, target, rows_are_bf16, head_dim)
    for page in range(num_pages if is_whole else 0):
      if is_named[page] == 0:
        zero_row(grad_keys + 4 * page * elements, _NO, elements)
        zero_row(grad_values + 4 * page * elements, _NO, elements)


@jit
def _cost(arguments):
  """Five products of every row with the keys before it, by head."""
  positions, lengths = (
    integers(address(arguments, _POSITIONS)), integers(address(arguments, _LENGTHS))
  )  # fmt: skip
  starts, keys = integers(address(arguments, _STARTS)), types.int64(0)
  window = integer(arguments, _RULE, 0)
  for segment in range(integer(arguments, _SEGMENTS, 0)):
    before = min(types.int64(positions[starts[segment]]), window)
    keys += lengths[segment] * (before + lengths[segment])
  heads = dimension(arguments, _Q, _ONE) * dimension(arguments, _Q, 2)
  return 5 * keys * heads * dimension(arguments, _Q, 3)


_BACKWARD = ffi.Handler("seerjax_attend_backward", _halves_of_heads, _attend_backward, _cost)


def attend_backward(
  q: Array,
  keys: Array,
  values: Array,
  sinks: Array,
  batch: TokenBatch,
  gradient: Array,
  rule: AttentionRule,
  *,
  is_whole: bool,
) -> tuple[Array, Array, Array, Array]:
  """Returns the gradients of `attention.attend`'s queries, keys, values and sinks.

  Args:
    q: f[n, k, g, c].
    keys: f[k, m, c, z].
    values: f[k, m, z, c].
    sinks: f32[k, g], or without elements.
    batch: rows and segments.
    gradient: f[n, k, g, c], the cotangent of the result.
    rule: keys that a row sees, and how scores become weights.
    is_whole: whether pages that no segment names are zeroed; otherwise they are uninitialised.

  Returns:
    f[n, k, g, c], zero in rows past the last; f32[k, m, c, z] and f32[k, m, z, c]; f32[k, g].
  """
  assert q.shape[1] == keys.shape[0], f"got pages of {keys.shape[0]} heads for {q.shape[1]}"
  page_size, head_dim = values.shape[2:]
  width = most_scores(batch.page_table.shape[1], page_size)
  scratch = ROWS * (3 * head_dim + 2 * width + 1) + page_size * head_dim + values.shape[1]
  scratch += 0 if rule.soft_cap is None else ROWS * width
  results = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
  results += [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (keys, values)]
  results += [
    jax.ShapeDtypeStruct(shape, jnp.float32)
    for shape in ((2, *sinks.shape), (threads.number(), scratch))
  ]
  grad_q, grad_keys, grad_values, grad_sinks, _ = _BACKWARD(
    results,
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
    gradient.astype(q.dtype),
    jnp.int32(is_whole),
  )
  return grad_q, grad_keys, grad_values, grad_sinks[0] + grad_sinks[1]
