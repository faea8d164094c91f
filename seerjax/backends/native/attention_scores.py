"""Scores of up to four queries over a sequence's pages, for attention and its gradient.

Handlers read an `AttentionRule` from one operand (`rule_operand`), so one handler serves all rules.
"""

from __future__ import annotations

import jax.numpy as jnp
from numba import types
import numpy as np

from seerjax.array_typing import Array
from seerjax.backends.native import objects, vectors
from seerjax.backends.native.numbers import f32, float_of_half, inlined, jit, read_row, round_row
from seerjax.backends.native.pointers import float_of, floats, fma, halves, integers
from seerjax.ops.attention import AttentionRule

# Rows of a block.
BLOCK_ROWS = 4
_LANES = vectors.LANES
# The window of a rule that has none.
_ALL = np.iinfo(np.int32).max

# On processors with few registers, a block of several rows computes one vector of positions.
_IS_WIDE = objects.has_wide_vectors()
_scores_1_4 = vectors.score_block(1, 4, False)
_scores_2_4 = vectors.score_block(2, 4, False)
_scores_3_4 = vectors.score_block(3, 4, False)
_scores_4_4 = vectors.score_block(4, 4, False)
_scores_4_1 = vectors.score_block(4, 1, False)
_scores_bf16_1_4 = vectors.score_block(1, 4, True)
_scores_bf16_2_4 = vectors.score_block(2, 4, True)
_scores_bf16_3_4 = vectors.score_block(3, 4, True)
_scores_bf16_4_4 = vectors.score_block(4, 4, True)
_scores_bf16_4_1 = vectors.score_block(4, 1, True)


@inlined
def _slots_at(keys, size, table, page_size, page_elements, chunk):
  """Returns the address of the 16 slots from position 16 * chunk on."""
  position = _LANES * chunk
  page = types.int64(integers(table)[position // page_size])
  return keys + size * (page * page_elements + position % page_size)


@jit
def _narrow_scores(q, rows, keys, is_bf16, table, page_size, head_dim, begin, end, scores, width):
  """Like `scores_of`, for page sizes that 16 does not divide."""
  pages = integers(table)
  for page in range(begin // page_size, (end + page_size - 1) // page_size):
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
def scores_of(q, rows, keys, is_bf16, table, page_size, head_dim, begin, end, scores, width):
  """Computes scores[row, x] = q[row] . key x for the positions x in [begin, end) of a sequence.

  Args:
    q (address): f32[rows, head_dim], up to four rows.
    keys (address): page 0 of the head.
    table (address): i32[p], the sequence's pages.
    scores (address): f32[rows, width]; whole vectors are written: `begin` is rounded down and
      `end` up to pages and to vectors of 16.
  """
  if page_size % _LANES != 0:
    _narrow_scores(q, rows, keys, is_bf16, table, page_size, head_dim, begin, end, scores, width)
    return
  size = 2 if is_bf16 else 4
  elements = page_size * head_dim
  last = (end - 1) // _LANES
  chunk = begin // _LANES
  k0 = _slots_at(keys, size, table, page_size, elements, chunk)
  k1 = _slots_at(keys, size, table, page_size, elements, min(chunk + 1, last))
  k2 = _slots_at(keys, size, table, page_size, elements, min(chunk + 2, last))
  k3 = _slots_at(keys, size, table, page_size, elements, min(chunk + 3, last))
  while chunk + 3 <= last and (_IS_WIDE or rows == 1):
    n0 = _slots_at(keys, size, table, page_size, elements, min(chunk + 4, last))
    n1 = _slots_at(keys, size, table, page_size, elements, min(chunk + 5, last))
    n2 = _slots_at(keys, size, table, page_size, elements, min(chunk + 6, last))
    n3 = _slots_at(keys, size, table, page_size, elements, min(chunk + 7, last))
    to = scores + 4 * _LANES * chunk
    if is_bf16:
      if rows == 1:
        _scores_bf16_1_4(
          q, head_dim, rows, k0, k1, k2, k3, n0, n1, n2, n3, page_size, head_dim, to, width
        )
      elif rows == 2:
        _scores_bf16_2_4(
          q, head_dim, rows, k0, k1, k2, k3, n0, n1, n2, n3, page_size, head_dim, to, width
        )
      elif rows == 3:
        _scores_bf16_3_4(
          q, head_dim, rows, k0, k1, k2, k3, n0, n1, n2, n3, page_size, head_dim, to, width
        )
      else:
        _scores_bf16_4_4(
          q, head_dim, rows, k0, k1, k2, k3, n0, n1, n2, n3, page_size, head_dim, to, width
        )
    elif rows == 1:
      _scores_1_4(q, head_dim, rows, k0, k1, k2, k3, n0, n1, n2, n3, page_size, head_dim, to, width)
    elif rows == 2:
      _scores_2_4(q, head_dim, rows, k0, k1, k2, k3, n0, n1, n2, n3, page_size, head_dim, to, width)
    elif rows == 3:
      _scores_3_4(q, head_dim, rows, k0, k1, k2, k3, n0, n1, n2, n3, page_size, head_dim, to, width)
    else:
      _scores_4_4(q, head_dim, rows, k0, k1, k2, k3, n0, n1, n2, n3, page_size, head_dim, to, width)
    k0, k1, k2, k3 = n0, n1, n2, n3
    chunk += 4
  while chunk <= last:
    n0 = _slots_at(keys, size, table, page_size, elements, min(chunk + 1, last))
    to = scores + 4 * _LANES * chunk
    if is_bf16:
      _scores_bf16_4_1(
        q, head_dim, rows, k0, k0, k0, k0, n0, n0, n0, n0, page_size, head_dim, to, width
      )
    else:
      _scores_4_1(q, head_dim, rows, k0, k0, k0, k0, n0, n0, n0, n0, page_size, head_dim, to, width)
    k0 = n0
    chunk += 1


@jit
def scaled_queries(q, is_bf16, head_dim, scale, out):
  """Reads a row and scales it in float32, rounded to the row's dtype."""
  read_row(q, is_bf16, out, head_dim)
  x = floats(out)
  for feature in range(head_dim):
    x[feature] = x[feature] * scale
  round_row(out, is_bf16, head_dim)


@inlined
def first_seen_key(seen, window):
  """Returns the first key that a row sees if its window ends before key `seen`."""
  return max(seen - window, 0)


def rule_operand(rule: AttentionRule, head_dim: int) -> Array:
  """Returns a rule for handlers, i32[3]: its window, and the bits of its scale and soft cap."""
  soft_cap = 0.0 if rule.soft_cap is None else rule.soft_cap
  window = _ALL if rule.window is None else min(rule.window, _ALL)
  bits = np.array([rule.factor(head_dim), soft_cap], np.float32).view(np.int32)
  return jnp.asarray([window, *bits], jnp.int32)


@inlined
def window_of(rule):
  """Returns the window of a rule at an address."""
  return types.int64(integers(rule)[0])


@inlined
def scale_of(rule):
  """Returns the factor on the scores of a rule at an address."""
  return float_of(integers(rule)[1])


@inlined
def soft_cap_of(rule):
  """Returns the soft cap of a rule at an address, 0 for none."""
  return float_of(integers(rule)[2])


def most_scores(pages_of_segment: int, page_size: int) -> int:
  """Returns the maximum number of scores of a row, in whole vectors."""
  return -(-pages_of_segment * page_size // _LANES) * _LANES


score_width = jit(most_scores)
