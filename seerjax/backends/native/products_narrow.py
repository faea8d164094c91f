"""Products on processors with registers for a dozen sums of 8 floats (AVX2, NEON).

Registers hold blocks of 6 rows and 16 columns, or 96 columns of one row; with the 4 rows and 96
columns of `products_wide`, three sums of four would be in memory at every step. For many rows, the
weights are first packed into a panel in a near cache: rows of weights that are a power of two apart
would evict each other from it; and bfloat16 is widened once. `products` defines the results.
"""

from __future__ import annotations

import numpy as np

from seerjax.backends.native import vectors, vectors_narrow as narrow
from seerjax.backends.native.numbers import f32, jit
from seerjax.backends.native.pointers import floats, stack_floats

_row_6, _row_bf16_6 = (vectors.product_block(1, 6, is_bf16) for is_bf16 in (False, True))
_row_1, _row_bf16_1 = (vectors.product_block(1, 1, is_bf16) for is_bf16 in (False, True))
_few, _few_bf16 = (vectors.product_block(4, 1, is_bf16) for is_bf16 in (False, True))
_tall, _tall_bf16 = (vectors.product_block(6, 1, is_bf16) for is_bf16 in (False, True))
_rest, _rest_bf16 = (
  vectors.product_block(4, 1, is_bf16, is_partial=True) for is_bf16 in (False, True)
)

_turned_1, _turned_bf16_1 = (narrow.transposed_block(1, 2, is_bf16) for is_bf16 in (False, True))
_turned_4, _turned_bf16_4 = (narrow.transposed_block(4, 2, is_bf16) for is_bf16 in (False, True))
_turned_8, _turned_bf16_8 = (narrow.transposed_block(8, 1, is_bf16) for is_bf16 in (False, True))
transpose_f32, transpose_bf16 = (narrow.transposition(is_bf16) for is_bf16 in (False, True))

# Maximum rows for which weights are read in place: memory bandwidth decides their time.
_UNPACKED_ROWS = 8
# Maximum steps of k, and columns, of a packed panel: 108 KiB on the thread's stack.
_STEPS, _PANEL = 288, 96
_panel = stack_floats(_STEPS * _PANEL)
_pack, _pack_bf16 = (vectors.pack_block(_PANEL // 16, is_bf16) for is_bf16 in (False, True))
_pack_1, _pack_bf16_1 = (vectors.pack_block(1, is_bf16) for is_bf16 in (False, True))
# Larger weights (in elements) are streamed: they are read in steps of k over all columns, so that
# memory is read in whole rows.
_STREAMED, _STREAM_STEPS = 1 << 17, 16
# Not literals for numba, which would compile a product anew for each literal.
_NO, _LANES = np.bool_(False), np.int64(16)


@jit
def _columns(a, a_row, a_step, rows, w, is_bf16, w_step, k, c, c_row, is_added):
  """Computes 16 columns of several rows."""
  row = 0
  while row < rows:
    left, at, to = rows - row, a + 4 * row * a_row, c + 4 * row * c_row
    if left > 8 or left == 5 or left == 6:
      if is_bf16:
        _tall_bf16(at, a_row, a_step, left, w, w_step, k, to, c_row, is_added, 0, 0)
      else:
        _tall(at, a_row, a_step, left, w, w_step, k, to, c_row, is_added, 0, 0)
      row += 6
    else:  # Two blocks of four cover eight rows; a block of six would leave a rest.
      if is_bf16:
        _few_bf16(at, a_row, a_step, left, w, w_step, k, to, c_row, is_added, 0, 0)
      else:
        _few(at, a_row, a_step, left, w, w_step, k, to, c_row, is_added, 0, 0)
      row += 4


@jit
def _last_columns(a, a_row, a_step, rows, w, is_bf16, w_step, columns, k, c, c_row, is_added):
  """Computes the last columns, fewer than 16, which do not fill a vector."""
  for row in range(0, rows, 4):
    left, at, to = rows - row, a + 4 * row * a_row, c + 4 * row * c_row
    if is_bf16:
      _rest_bf16(at, a_row, a_step, left, w, w_step, k, to, c_row, is_added, columns, 0)
    else:
      _rest(at, a_row, a_step, left, w, w_step, k, to, c_row, is_added, columns, 0)


@jit
def _one_row(a, a_step, w, is_bf16, w_step, columns, k, c, is_added):
  """Computes all whole vectors of columns of one row."""
  size = 2 if is_bf16 else 4
  first = 0
  while columns - first >= 16:
    at, to = w + size * first, c + 4 * first
    if columns - first >= 96:
      if is_bf16:
        _row_bf16_6(a, 0, a_step, 1, at, w_step, k, to, 0, is_added, 0, 0)
      else:
        _row_6(a, 0, a_step, 1, at, w_step, k, to, 0, is_added, 0, 0)
      first += 96
    else:
      if is_bf16:
        _row_bf16_1(a, 0, a_step, 1, at, w_step, k, to, 0, is_added, 0, 0)
      else:
        _row_1(a, 0, a_step, 1, at, w_step, k, to, 0, is_added, 0, 0)
      first += 16


@jit
def _unpacked(a, a_row, a_step, rows, w, is_bf16, w_step, columns, k, c, c_row, is_added):
  """Reads the weights in place."""
  size = 2 if is_bf16 else 4
  whole = columns // 16 * 16
  if rows == 1:
    _one_row(a, a_step, w, is_bf16, w_step, whole, k, c, is_added)
  else:
    for first in range(0, whole, 16):
      at, to = w + size * first, c + 4 * first
      _columns(a, a_row, a_step, rows, at, is_bf16, w_step, k, to, c_row, is_added)
  if whole < columns:
    at, to = w + size * whole, c + 4 * whole
    left = columns - whole
    _last_columns(a, a_row, a_step, rows, at, is_bf16, w_step, left, k, to, c_row, is_added)


@jit
def few_rows(a, a_row, a_step, rows, w, w_step, columns, k, c, c_row, is_added, ahead):
  """See `products.few_rows`; `ahead` is ignored."""
  _unpacked(a, a_row, a_step, rows, w, _NO, w_step, columns, k, c, c_row, is_added)


@jit
def _packed(a, a_row, a_step, rows, w, is_bf16, w_step, columns, k, c, c_row, is_added):
  """Packs a panel of weights at a time, of at most `_STEPS` of k, and reads that."""
  size, panel = 2 if is_bf16 else 4, _panel()
  first = 0
  while columns - first >= 16:
    at = w + size * first
    if columns - first >= _PANEL:
      count = _PANEL // 16
      if is_bf16:
        _pack_bf16(at, w_step, k, panel)
      else:
        _pack(at, w_step, k, panel)
    else:
      count = 1
      if is_bf16:
        _pack_bf16_1(at, w_step, k, panel)
      else:
        _pack_1(at, w_step, k, panel)
    for vector in range(count):
      here, to = panel + 64 * k * vector, c + 4 * (first + 16 * vector)
      _columns(a, a_row, a_step, rows, here, _NO, _LANES, k, to, c_row, is_added)
    first += 16 * count
  if first < columns:
    at, to = w + size * first, c + 4 * first
    left = columns - first
    _last_columns(a, a_row, a_step, rows, at, is_bf16, w_step, left, k, to, c_row, is_added)


@jit
def product(a, a_row, a_step, rows, w, is_bf16, w_step, columns, k, c, c_row, is_added):
  """See `products.product`."""
  size = 2 if is_bf16 else 4
  if k == 0 and not is_added:
    for row in range(rows):
      out = floats(c + 4 * row * c_row)
      for column in range(columns):
        out[column] = f32(0.0)
  is_packed = rows > _UNPACKED_ROWS
  steps = max(k, 1)
  if is_packed:  # Equal parts: each part reads and writes all sums.
    parts = max((k + _STEPS - 1) // _STEPS, 1)
    steps = max((k + parts - 1) // parts, 1)
  elif k * columns > _STREAMED:
    steps = _STREAM_STEPS
  for begin in range(0, k, steps):
    count = min(steps, k - begin)
    goes_on = 1 if begin > 0 else is_added
    left, at = a + 4 * begin * a_step, w + size * begin * w_step
    if is_packed:
      _packed(left, a_row, a_step, rows, at, is_bf16, w_step, columns, count, c, c_row, goes_on)
    else:
      _unpacked(left, a_row, a_step, rows, at, is_bf16, w_step, columns, count, c, c_row, goes_on)


@jit
def few_transposed(a, a_row, rows, w, is_bf16, w_row, columns, k, c, c_row):
  """See `products.few_transposed`."""
  size = 2 if is_bf16 else 4
  whole = columns // 32 * 32 if k % 32 == 0 else 0
  width = 16 if rows <= 4 else 8
  for column in range(0, whole, width):
    at, to = w + size * column * w_row, c + 4 * column
    if rows == 1:
      if is_bf16:
        _turned_bf16_1(a, a_row, rows, at, w_row, k, to, c_row)
      else:
        _turned_1(a, a_row, rows, at, w_row, k, to, c_row)
    elif rows <= 4:
      if is_bf16:
        _turned_bf16_4(a, a_row, rows, at, w_row, k, to, c_row)
      else:
        _turned_4(a, a_row, rows, at, w_row, k, to, c_row)
    elif is_bf16:
      _turned_bf16_8(a, a_row, rows, at, w_row, k, to, c_row)
    else:
      _turned_8(a, a_row, rows, at, w_row, k, to, c_row)
  return whole
