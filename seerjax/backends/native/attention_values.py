"""Weighted sums of values over a sequence's pages: four chains by position mod 4."""

from __future__ import annotations

from numba import types

from seerjax.backends.native import objects, vectors
from seerjax.backends.native.attention_scores import first_seen_key
from seerjax.backends.native.numbers import float_of_half, jit
from seerjax.backends.native.pointers import floats, fma, halves, integers

_LANES, _CHAINS = vectors.LANES, vectors.CHAINS

# On processors with few registers, a block of several rows computes one chain at a time.
_IS_WIDE = objects.has_wide_vectors()
_AT_ONCE = _CHAINS if _IS_WIDE else 1
_values_1_4, _values_bf16_1_4 = (vectors.value_block(1, 4, is_bf16, 2) for is_bf16 in (False, True))
_values_2_4, _values_bf16_2_4 = (vectors.value_block(2, 4, is_bf16, 2) for is_bf16 in (False, True))
_values_3_4, _values_bf16_3_4 = (vectors.value_block(3, 4, is_bf16, 2) for is_bf16 in (False, True))
_values_4_4, _values_bf16_4_4 = (vectors.value_block(4, 4, is_bf16, 1) for is_bf16 in (False, True))
_values_2_2, _values_bf16_2_2 = (
  vectors.value_block(2, 2, is_bf16, _AT_ONCE) for is_bf16 in (False, True)
)
_values_1_1, _values_bf16_1_1 = (
  vectors.value_block(1, 1, is_bf16, _CHAINS) for is_bf16 in (False, True)
)
_values_4_1, _values_bf16_4_1 = (
  vectors.value_block(4, 1, is_bf16, _AT_ONCE) for is_bf16 in (False, True)
)


@jit
def _four_vectors(
  weights, width, rows, at, is_bf16, head_dim, table, page_size, count, part, num_parts, to
):
  """Continues the chains of 64 features for `wide_chains`."""
  row, chain = _CHAINS * head_dim, head_dim
  step, half = types.int64(1 if rows == 4 else 2), types.int64(_CHAINS) // num_parts
  for begin in range(part * half, (part + 1) * half, step):
    if is_bf16:
      if rows == 1:
        _values_bf16_1_4(
          weights, width, rows, at, head_dim, table, page_size, count, begin, to, row, chain
        )
      elif rows == 2:
        _values_bf16_2_4(
          weights, width, rows, at, head_dim, table, page_size, count, begin, to, row, chain
        )
      elif rows == 3:
        _values_bf16_3_4(
          weights, width, rows, at, head_dim, table, page_size, count, begin, to, row, chain
        )
      else:
        _values_bf16_4_4(
          weights, width, rows, at, head_dim, table, page_size, count, begin, to, row, chain
        )
    elif rows == 1:
      _values_1_4(
        weights, width, rows, at, head_dim, table, page_size, count, begin, to, row, chain
      )
    elif rows == 2:
      _values_2_4(
        weights, width, rows, at, head_dim, table, page_size, count, begin, to, row, chain
      )
    elif rows == 3:
      _values_3_4(
        weights, width, rows, at, head_dim, table, page_size, count, begin, to, row, chain
      )
    else:
      _values_4_4(
        weights, width, rows, at, head_dim, table, page_size, count, begin, to, row, chain
      )


@jit
def _whole_pages(
  weights, width, rows, values, is_bf16, table, page_size, head_dim, count, part, num_parts, chains
):
  """Continues chains for `wide_chains` over the first `count` positions of a table."""
  size = 2 if is_bf16 else 4
  row, chain = _CHAINS * head_dim, head_dim
  first = 0
  while first + _LANES <= head_dim:
    left = (head_dim - first) // _LANES
    at, to = values + size * first, chains + 4 * first
    if _IS_WIDE and left >= 4:
      _four_vectors(
        weights, width, rows, at, is_bf16, head_dim, table, page_size, count, part, num_parts, to
      )
      first += 4 * _LANES
    elif part > 0:
      return
    elif left >= 2 and (rows == 2 or (_IS_WIDE and rows == 1)):
      for begin in range(0, _CHAINS, _AT_ONCE):
        if is_bf16:
          _values_bf16_2_2(
            weights, width, rows, at, head_dim, table, page_size, count, begin, to, row, chain
          )
        else:
          _values_2_2(
            weights, width, rows, at, head_dim, table, page_size, count, begin, to, row, chain
          )
      first += 2 * _LANES
    elif rows == 1:
      if is_bf16:
        _values_bf16_1_1(
          weights, width, rows, at, head_dim, table, page_size, count, 0, to, row, chain
        )
      else:
        _values_1_1(weights, width, rows, at, head_dim, table, page_size, count, 0, to, row, chain)
      first += _LANES
    else:
      for begin in range(0, _CHAINS, _AT_ONCE):
        if is_bf16:
          _values_bf16_4_1(
            weights, width, rows, at, head_dim, table, page_size, count, begin, to, row, chain
          )
        else:
          _values_4_1(
            weights, width, rows, at, head_dim, table, page_size, count, begin, to, row, chain
          )
      first += _LANES


@jit
def wide_chains(
  weights, width, rows, values, is_bf16, table, page_size, head_dim, low, high, part, num_parts,
  chains,
):  # fmt: skip
  """Continues chains of whole vectors of features over positions [low, high), multiples of 4.

  Registers hold many columns of few rows, or few columns of many rows.

  Args:
    part (int): 0; with two parts 0 or 1.
    num_parts (int): 1 for all chains. With 2, each part computes half of the chains of 64 features
      together, and reads only its own positions; part 0 computes the other features.
  """
  size, position = 2 if is_bf16 else 4, low
  while position < high:
    # Whole pages together, after the rest of a page in which a window begins.
    slot = position % page_size
    count = min(page_size - slot, high - position) if slot > 0 else high - position
    _whole_pages(
      weights + 4 * position, width, rows, values + size * slot * head_dim, is_bf16,
      table + 4 * (position // page_size), page_size, head_dim, count, part, num_parts, chains,
    )  # fmt: skip
    position += count


@jit
def shared_positions(first_seen, rows, group, window, page_size):
  """Returns the range of positions for `wide_chains`, which all rows of a block see; or (0, 0).

  A block is described as in `attention`.
  """
  first = first_seen_key((first_seen + rows - 1) // group + 1, window)
  low = (first + _CHAINS - 1) // _CHAINS * _CHAINS
  high = (first_seen // group + 1) // _CHAINS * _CHAINS
  if page_size % _CHAINS != 0 or low >= high:
    return types.int64(0), types.int64(0)
  return low, high


@jit
def go_on(weights, values, is_bf16, table, page_size, head_dim, begin, end, first, last, chains):
  """Continues a row's chains of features [first, last) over positions [begin, end)."""
  if first >= last:
    return
  weight, pages = floats(weights), integers(table)
  for position in range(begin, end):
    page = types.int64(pages[position // page_size])
    here = (page * page_size + position % page_size) * head_dim
    wide, narrow = floats(values + 4 * here), halves(values + 2 * here)
    out = floats(chains + 4 * (position % _CHAINS) * head_dim)
    x = weight[position]
    for feature in range(first, last):
      value = float_of_half(narrow[feature]) if is_bf16 else wide[feature]
      out[feature] = fma(x, value, out[feature])
