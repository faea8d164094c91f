"""Products of bfloat16 on processors with dot products of pairs (AVX512-BF16).

A dot product is two steps of the chain that `products` defines (`vectors_dots`), so these products
have the same bits as those of `products_wide`, in half the instructions. Rows come as floats: their
values are bfloat16 wherever the compute type is, and are packed into pairs first. Rows with any
other value (cotangents that no one rounds, for instance) are multiplied by `products_wide`, or,
with packed weights, by fused multiply-adds. Weights may come as floats, too: the rows over which a
gradient of weights is added.

The weights of many rows are packed into a panel of pairs in a near cache. Registers hold blocks of
4 rows and 96 columns.
"""

from __future__ import annotations

import numpy as np

from seerjax.backends.native import products_wide, vectors, vectors_dots
from seerjax.backends.native.numbers import inlined, jit
from seerjax.backends.native.pointers import halves, stack_floats, unsigned

_BLOCK_ROWS, _PANEL, _LANES = 4, products_wide.PANEL, vectors.LANES
# Maximum rows for which weights that are not packed are widened: reading them decides their time.
_WIDENED_ROWS = 8
# Maximum steps of k of a packed panel (27 KiB), and rows that are packed into pairs with them.
_STEPS, _GROUP = 144, 256
_panel, _pairs = stack_floats(_STEPS // 2 * _PANEL), stack_floats(_STEPS // 2 * _GROUP)
# Maximum steps of k of few rows whose weights are transposed.
_FEW_STEPS = 4096
_few_pairs = stack_floats(_FEW_STEPS // 2 * products_wide.FEW_ROWS)

_pack_6, _pack_1 = (vectors_dots.pack_block(count) for count in (6, 1))
_dots_6, _dots_3, _dots_1 = (
  vectors_dots.dot_block(_BLOCK_ROWS, count, True) for count in (6, 3, 1)
)
_fmas_6, _fmas_1 = (vectors_dots.widened_block(_BLOCK_ROWS, count) for count in (6, 1))
_fmas_rest = vectors_dots.widened_block(_BLOCK_ROWS, 1, is_partial=True)
_turned_1, _turned_8 = (vectors_dots.transposed_block(rows) for rows in (1, products_wide.FEW_ROWS))
# Not literals for numba, which would compile a product anew for each literal.
_NO, _ONE, _PAIR_ROW = np.bool_(False), np.int64(1), np.int64(_STEPS // 2)
# Bits of a pair: the first step, the second one, and the bits of each.
_FIRST, _SECOND, _HALF = np.uint32(0xFFFF0000), np.uint32(0xFFFF), np.uint32(16)

few_rows = products_wide.few_rows
transpose_f32, transpose_bf16 = products_wide.transpose_f32, products_wide.transpose_bf16


@inlined
def _steps_of(k):
  """Returns the steps of the parts of k: even, and about equal in number."""
  parts = max((k + _STEPS - 1) // _STEPS, 1)
  return (k // 2 + parts - 1) // parts * 2


@jit
def pair_rows(a, a_row, rows, k, pairs, pairs_row):
  """Packs f32[rows, k], k even, into pairs [rows, k / 2]; returns whether all are bfloat16."""
  seen = np.uint32(0)
  for row in range(rows):
    x, out = unsigned(a + 4 * row * a_row), unsigned(pairs + 4 * row * pairs_row)
    for i in range(k // 2):
      first, second = x[2 * i], x[2 * i + 1]
      seen = np.uint32(seen | first | second)
      out[i] = np.uint32((first & _FIRST) | (second >> _HALF))
  return np.uint32(seen & _SECOND) == np.uint32(0)


@jit
def _by_panels(pairs, rows, w, w_step, columns, k, c, c_row, is_added):
  """Computes whole vectors of columns of a group of rows, packing a panel of weights at a time."""
  panel = _panel()
  first = 0
  while first < columns:
    at, to = w + 2 * first, c + 4 * first
    if columns - first >= _PANEL:
      _pack_6(at, w_step, k // 2, panel, _PANEL)
      for row in range(0, rows, _BLOCK_ROWS):
        _dots_6(
          pairs + 4 * row * _PAIR_ROW, _PAIR_ROW, rows - row, panel, _PANEL, k // 2,
          to + 4 * row * c_row, c_row, is_added,
        )  # fmt: skip
      first += _PANEL
    else:
      _pack_1(at, w_step, k // 2, panel, _LANES)
      for row in range(0, rows, _BLOCK_ROWS):
        _dots_1(
          pairs + 4 * row * _PAIR_ROW, _PAIR_ROW, rows - row, panel, _LANES, k // 2,
          to + 4 * row * c_row, c_row, is_added,
        )  # fmt: skip
      first += _LANES


@jit
def _pack_floats(w, w_step, columns, k, panel):
  """Packs f32[k, columns], k even, into pairs [k / 2, columns]; returns if all are bfloat16."""
  seen = np.uint32(0)
  for i in range(k // 2):
    x, y = unsigned(w + 8 * i * w_step), unsigned(w + 4 * (2 * i + 1) * w_step)
    out = unsigned(panel + 4 * i * columns)
    for column in range(columns):
      first, second = x[column], y[column]
      seen = np.uint32(seen | first | second)
      out[column] = np.uint32((first & _FIRST) | (second >> _HALF))
  return np.uint32(seen & _SECOND) == np.uint32(0)


@jit
def _by_float_panels(a, a_row, pairs, rows, w, w_step, columns, k, c, c_row, is_added):
  """Like `_by_panels`, for float32 weights whose values are bfloat16 in some panels or in all."""
  panel = _panel()
  first = 0
  while first < columns:
    at, to = w + 4 * first, c + 4 * first
    wide = _PANEL if columns - first >= _PANEL else _LANES
    if not _pack_floats(at, w_step, wide, k, panel):
      products_wide.product(a, a_row, _ONE, rows, at, _NO, w_step, wide, k, to, c_row, is_added)
    elif wide == _PANEL:
      for row in range(0, rows, _BLOCK_ROWS):
        _dots_6(
          pairs + 4 * row * _PAIR_ROW, _PAIR_ROW, rows - row, panel, _PANEL, k // 2,
          to + 4 * row * c_row, c_row, is_added,
        )  # fmt: skip
    else:
      for row in range(0, rows, _BLOCK_ROWS):
        _dots_1(
          pairs + 4 * row * _PAIR_ROW, _PAIR_ROW, rows - row, panel, _LANES, k // 2,
          to + 4 * row * c_row, c_row, is_added,
        )  # fmt: skip
    first += wide


@jit
def _may_be_halves(w, count):
  """Returns whether the first `count` floats are bfloat16, which is rare among other weights."""
  x, seen = unsigned(w), np.uint32(0)
  for i in range(count):
    seen = np.uint32(seen | x[i])
  return np.uint32(seen & _SECOND) == np.uint32(0)


@jit
def product(a, a_row, a_step, rows, w, is_bf16, w_step, columns, k, c, c_row, is_added):
  """See `products.product`."""
  whole = columns // _LANES * _LANES
  may_pair = rows > _WIDENED_ROWS and a_step == 1 and k > 0 and k % 2 == 0 and whole > 0
  if not may_pair or not (is_bf16 or _may_be_halves(w, _LANES)):
    products_wide.product(
      a, a_row, a_step, rows, w, is_bf16, w_step, columns, k, c, c_row, is_added
    )
    return
  pairs, steps, size = _pairs(), _steps_of(k), 2 if is_bf16 else 4
  for row in range(0, rows, _GROUP):
    count = min(_GROUP, rows - row)
    left, to = a + 4 * row * a_row, c + 4 * row * c_row
    for begin in range(0, k, steps):
      here, at = left + 4 * begin, w + size * begin * w_step
      part, goes_on = min(steps, k - begin), 1 if begin > 0 else is_added
      if not pair_rows(here, a_row, count, part, pairs, _PAIR_ROW):
        products_wide.product(
          here, a_row, _ONE, count, at, is_bf16, w_step, whole, part, to, c_row, goes_on
        )
      elif is_bf16:
        _by_panels(pairs, count, at, w_step, whole, part, to, c_row, goes_on)
      else:
        _by_float_panels(here, a_row, pairs, count, at, w_step, whole, part, to, c_row, goes_on)
  if whole < columns:
    products_wide.product(
      a, a_row, _ONE, rows, w + size * whole, is_bf16, w_step, columns - whole, k, c + 4 * whole,
      c_row, is_added,
    )  # fmt: skip


@inlined
def are_pairs(is_bf16, k):
  """Returns whether weights [columns, k] are packed into pairs, not floats."""
  return is_bf16 and k % 2 == 0 and k > 0


@jit
def pack_pairs(source, source_row, columns, k, panel):
  """Writes up to `_PANEL` rows bf16[columns, k] as columns of pairs [k / 2, _PANEL]."""
  out, narrow = unsigned(panel), halves(source)
  blocks, parts = columns // 16, k // 32
  for block in range(blocks):
    for part in range(parts):
      at = source + 2 * (16 * block * source_row + 32 * part)
      to = panel + 4 * (16 * part * _PANEL + 16 * block)
      vectors_dots.transpose_pairs(at, source_row, to, _PANEL)
  for column in range(columns):
    begin = 16 * parts if column < 16 * blocks else 0
    for pair in range(begin, k // 2):
      place = column * source_row + 2 * pair
      first, second = np.uint32(narrow[place]), np.uint32(narrow[place + 1])
      out[pair * _PANEL + column] = np.uint32((first << _HALF) | second)
  for pair in range(k // 2):
    for column in range(columns, _PANEL):
      out[pair * _PANEL + column] = np.uint32(0)


@jit
def _of_pairs(pairs, rows, panel, columns, k, c, c_row, is_added):
  """Computes whole vectors of columns of a group of rows by dot products."""
  for row in range(0, rows, _BLOCK_ROWS):
    at, to = pairs + 4 * row * _PAIR_ROW, c + 4 * row * c_row
    first = 0
    while first < columns:
      here = panel + 4 * first
      if columns - first >= 96:
        _dots_6(at, _PAIR_ROW, rows - row, here, _PANEL, k // 2, to + 4 * first, c_row, is_added)
        first += 96
      elif columns - first >= 48:
        _dots_3(at, _PAIR_ROW, rows - row, here, _PANEL, k // 2, to + 4 * first, c_row, is_added)
        first += 48
      else:
        _dots_1(at, _PAIR_ROW, rows - row, here, _PANEL, k // 2, to + 4 * first, c_row, is_added)
        first += 16


@jit
def _of_floats(a, a_row, rows, panel, columns, k, c, c_row, is_added):
  """Computes all columns of rows of any values by fused multiply-adds."""
  for row in range(0, rows, _BLOCK_ROWS):
    at, to = a + 4 * row * a_row, c + 4 * row * c_row
    first = 0
    while first < columns:
      here, left = panel + 4 * first, columns - first
      if left >= 96:
        _fmas_6(at, a_row, rows - row, here, _PANEL, k // 2, to + 4 * first, c_row, is_added, 0)
        first += 96
      elif left >= 16:
        _fmas_1(at, a_row, rows - row, here, _PANEL, k // 2, to + 4 * first, c_row, is_added, 0)
        first += 16
      else:
        _fmas_rest(
          at, a_row, rows - row, here, _PANEL, k // 2, to + 4 * first, c_row, is_added, left
        )
        first += 16


@jit
def product_of_pairs(a, a_row, rows, panel, columns, k, c, c_row, is_added):
  """Computes c[rows, columns] (+)= a[rows, k] @ a panel of `pack_pairs`, k even."""
  whole = columns // _LANES * _LANES
  pairs, steps = _pairs(), _steps_of(k)
  for row in range(0, rows, _GROUP):
    count = min(_GROUP, rows - row)
    left, to = a + 4 * row * a_row, c + 4 * row * c_row
    for begin in range(0, k, steps):
      part, at = min(steps, k - begin), panel + 2 * begin * _PANEL
      goes_on = 1 if begin > 0 else is_added
      if pair_rows(left + 4 * begin, a_row, count, part, pairs, _PAIR_ROW):
        _of_pairs(pairs, count, at, whole, part, to, c_row, goes_on)
        if whole < columns:
          _of_floats(
            left + 4 * begin, a_row, count, at + 4 * whole, columns - whole, part, to + 4 * whole,
            c_row, goes_on,
          )  # fmt: skip
      else:
        _of_floats(left + 4 * begin, a_row, count, at, columns, part, to, c_row, goes_on)


@jit
def few_transposed(a, a_row, rows, w, is_bf16, w_row, columns, k, c, c_row):
  """See `products.few_transposed`."""
  pairs = _few_pairs()
  if not is_bf16 or k % 32 != 0 or k > _FEW_STEPS or not pair_rows(
    a, a_row, rows, k, pairs, k // 2
  ):  # fmt: skip
    return products_wide.few_transposed(a, a_row, rows, w, is_bf16, w_row, columns, k, c, c_row)
  whole = columns // 16 * 16
  for column in range(0, whole, 16):
    at, to = w + 2 * column * w_row, c + 4 * column
    if rows == 1:
      _turned_1(pairs, k // 2, rows, at, w_row, k, to, c_row)
    else:
      _turned_8(pairs, k // 2, rows, at, w_row, k, to, c_row)
  return whole
