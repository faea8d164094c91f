"""Scores of up to four queries over a sequence's pages, for attention and its gradient."""

from __future__ import annotations

import math

from numba import types

from seerjax.backends.native import objects, vectors
from seerjax.backends.native.numbers import f32, float_of_half, inlined, jit, read_row, round_row
from seerjax.backends.native.pointers import floats, fma, halves, integers

# Rows of a block.
BLOCK_ROWS = 4
_LANES = vectors.LANES

# On processors with few registers, a block of several rows computes one vector of positions.
_IS_WIDE = objects.has_wide_vectors()
_scores_1_4 = vectors.score_block(1, 4, False)
_scores_2_4 = vectors.score_block(2, 4, False)
_scores_4_4 = vectors.score_block(4, 4, False)
_scores_4_1 = vectors.score_block(4, 1, False)
_scores_bf16_1_4 = vectors.score_block(1, 4, True)
_scores_bf16_2_4 = vectors.score_block(2, 4, True)
_scores_bf16_4_4 = vectors.score_block(4, 4, True)
_scores_bf16_4_1 = vectors.score_block(4, 1, True)


@inlined
def _slots_at(keys, size, table, page_size, page_elements, chunk):
  """Returns the address of the 16 slots from position 16 * chunk on."""
  position = _LANES * chunk
  page = types.int64(integers(table)[position // page_size])
  return keys + size * (page * page_elements + position % page_size)


@jit
def _narrow_scores(q, rows, keys, is_bf16, table, page_size, head_dim, count, scores, width):
  """Like `scores_of`, for page sizes that 16 does not divide."""
  pages = integers(table)
  for page in range((count + page_size - 1) // page_size):
    here = types.int64(pages[page]) * page_size * head_dim
    wide, narrow = floats(keys + 4 * here), halves(keys + 2 * here)
    for row in range(rows):
      query = floats(q + 4 * row * head_dim)
      out = floats(scores + 4 * (row * width + page * page_size))
      for slot in range(page_size):
        out[slot] = f32(0.0)
      for feature in range(head_dim):
        for slot in range(page_size):
          place = feature * page_size + slot
          key = float_of_half(narrow[place]) if is_bf16 else wide[place]
          out[slot] = fma(query[feature], key, out[slot])


@jit
def scores_of(q, rows, keys, is_bf16, table, page_size, head_dim, count, scores, width):
  """Computes scores[row, x] = q[row] . key x for the first `count` positions x of a sequence.

  Args:
    q (address): f32[rows, head_dim], up to four rows.
    keys (address): page 0 of the head.
    table (address): i32[p], the sequence's pages.
    scores (address): f32[rows, width]; whole vectors are written: `count` rounded up to pages and
      to vectors of 16.
  """
  if page_size % _LANES != 0:
    _narrow_scores(q, rows, keys, is_bf16, table, page_size, head_dim, count, scores, width)
    return
  size = 2 if is_bf16 else 4
  elements = page_size * head_dim
  last = (count - 1) // _LANES
  chunk = 0
  while chunk + 3 <= last and (_IS_WIDE or rows == 1):
    k0 = _slots_at(keys, size, table, page_size, elements, chunk)
    k1 = _slots_at(keys, size, table, page_size, elements, chunk + 1)
    k2 = _slots_at(keys, size, table, page_size, elements, chunk + 2)
    k3 = _slots_at(keys, size, table, page_size, elements, chunk + 3)
    to = scores + 4 * _LANES * chunk
    if is_bf16:
      if rows == 1:
        _scores_bf16_1_4(q, head_dim, rows, k0, k1, k2, k3, page_size, head_dim, to, width)
      elif rows == 2:
        _scores_bf16_2_4(q, head_dim, rows, k0, k1, k2, k3, page_size, head_dim, to, width)
      else:
        _scores_bf16_4_4(q, head_dim, rows, k0, k1, k2, k3, page_size, head_dim, to, width)
    elif rows == 1:
      _scores_1_4(q, head_dim, rows, k0, k1, k2, k3, page_size, head_dim, to, width)
    elif rows == 2:
      _scores_2_4(q, head_dim, rows, k0, k1, k2, k3, page_size, head_dim, to, width)
    else:
      _scores_4_4(q, head_dim, rows, k0, k1, k2, k3, page_size, head_dim, to, width)
    chunk += 4
  while chunk <= last:
    k0 = _slots_at(keys, size, table, page_size, elements, chunk)
    to = scores + 4 * _LANES * chunk
    if is_bf16:
      _scores_bf16_4_1(q, head_dim, rows, k0, k0, k0, k0, page_size, head_dim, to, width)
    else:
      _scores_4_1(q, head_dim, rows, k0, k0, k0, k0, page_size, head_dim, to, width)
    chunk += 1


@jit
def scaled_queries(q, is_bf16, head_dim, out):
  """Reads a row and scales it by 1 / sqrt(head_dim) in float32, rounded to the row's dtype."""
  scale = f32(1.0 / math.sqrt(types.float64(head_dim)))
  read_row(q, is_bf16, out, head_dim)
  x = floats(out)
  for feature in range(head_dim):
    x[feature] = x[feature] * scale
  round_row(out, is_bf16, head_dim)


def most_scores(pages_of_segment: int, page_size: int) -> int:
  """Returns the maximum number of scores of a row, in whole vectors."""
  return -(-pages_of_segment * page_size // _LANES) * _LANES


score_width = jit(most_scores)
