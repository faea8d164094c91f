"""Products on processors with vectors of 16 floats and 32 registers for them (AVX-512).

Registers hold blocks of 4 rows and 96 columns, or 192 columns of one row. `products` defines the
results.
"""

from __future__ import annotations

from seerjax.backends.native import vectors
from seerjax.backends.native.numbers import f32, jit
from seerjax.backends.native.pointers import floats

# Rows and columns of a block, and maximum rows that go over all columns of streamed weights.
BLOCK_ROWS, PANEL, FEW_ROWS = 4, 96, 8

_turned_1, _turned_8 = (vectors.transposed_block(rows, False) for rows in (1, FEW_ROWS))
_turned_bf16_1, _turned_bf16_8 = (vectors.transposed_block(rows, True) for rows in (1, FEW_ROWS))
transpose_f32, transpose_bf16 = vectors.transpose_f32, vectors.transpose_bf16

_row_12 = vectors.product_block(1, 12, False)
_row_6 = vectors.product_block(1, 6, False)
_row_4 = vectors.product_block(1, 4, False)
_row_3 = vectors.product_block(1, 3, False)
_row_2 = vectors.product_block(1, 2, False)
_row_1 = vectors.product_block(1, 1, False)
_row_rest = vectors.product_block(1, 1, False, is_partial=True)
_rows_6 = vectors.product_block(BLOCK_ROWS, 6, False)
_rows_4 = vectors.product_block(BLOCK_ROWS, 4, False)
_rows_3 = vectors.product_block(BLOCK_ROWS, 3, False)
_rows_2 = vectors.product_block(BLOCK_ROWS, 2, False)
_rows_1 = vectors.product_block(BLOCK_ROWS, 1, False)
_rows_rest = vectors.product_block(BLOCK_ROWS, 1, False, is_partial=True)
_row_bf16_12 = vectors.product_block(1, 12, True)
_row_bf16_6 = vectors.product_block(1, 6, True)
_row_bf16_4 = vectors.product_block(1, 4, True)
_row_bf16_3 = vectors.product_block(1, 3, True)
_row_bf16_2 = vectors.product_block(1, 2, True)
_row_bf16_1 = vectors.product_block(1, 1, True)
_row_bf16_rest = vectors.product_block(1, 1, True, is_partial=True)
_rows_bf16_6 = vectors.product_block(BLOCK_ROWS, 6, True)
_rows_bf16_4 = vectors.product_block(BLOCK_ROWS, 4, True)
_rows_bf16_3 = vectors.product_block(BLOCK_ROWS, 3, True)
_rows_bf16_2 = vectors.product_block(BLOCK_ROWS, 2, True)
_rows_bf16_1 = vectors.product_block(BLOCK_ROWS, 1, True)
_rows_bf16_rest = vectors.product_block(BLOCK_ROWS, 1, True, is_partial=True)

# Larger weights (in elements) are streamed: they are read in steps of k over all columns, so that
# memory is read in whole rows.
_STREAMED = 1 << 17
_STREAM_STEPS, _CACHE_STEPS = 16, 256


@jit
def _row(a, a_row, a_step, rows, w, w_step, columns, k, c, c_row, is_added, ahead):
  """Computes all columns of one row."""
  size = 4
  first = 0
  while columns - first >= 16:
    left = (columns - first) // 16
    at, to = w + size * first, c + 4 * first
    if left >= 12:
      _row_12(a, a_row, a_step, rows, at, w_step, k, to, c_row, is_added, 0, ahead)
      first += 192
    elif left >= 6:
      _row_6(a, a_row, a_step, rows, at, w_step, k, to, c_row, is_added, 0, ahead)
      first += 96
    elif left >= 4:
      _row_4(a, a_row, a_step, rows, at, w_step, k, to, c_row, is_added, 0, ahead)
      first += 64
    elif left >= 3:
      _row_3(a, a_row, a_step, rows, at, w_step, k, to, c_row, is_added, 0, ahead)
      first += 48
    elif left >= 2:
      _row_2(a, a_row, a_step, rows, at, w_step, k, to, c_row, is_added, 0, ahead)
      first += 32
    else:
      _row_1(a, a_row, a_step, rows, at, w_step, k, to, c_row, is_added, 0, ahead)
      first += 16
  if first < columns:
    at, to = w + size * first, c + 4 * first
    left = columns - first
    _row_rest(a, a_row, a_step, rows, at, w_step, k, to, c_row, is_added, left, ahead)


@jit
def few_rows(a, a_row, a_step, rows, w, w_step, columns, k, c, c_row, is_added, ahead):
  """Computes all columns of up to four rows."""
  size = 4
  first = 0
  while columns - first >= 16:
    left = (columns - first) // 16
    at, to = w + size * first, c + 4 * first
    if left >= 6:
      _rows_6(a, a_row, a_step, rows, at, w_step, k, to, c_row, is_added, 0, ahead)
      first += 96
    elif left >= 4:
      _rows_4(a, a_row, a_step, rows, at, w_step, k, to, c_row, is_added, 0, ahead)
      first += 64
    elif left >= 3:
      _rows_3(a, a_row, a_step, rows, at, w_step, k, to, c_row, is_added, 0, ahead)
      first += 48
    elif left >= 2:
      _rows_2(a, a_row, a_step, rows, at, w_step, k, to, c_row, is_added, 0, ahead)
      first += 32
    else:
      _rows_1(a, a_row, a_step, rows, at, w_step, k, to, c_row, is_added, 0, ahead)
      first += 16
  if first < columns:
    at, to = w + size * first, c + 4 * first
    left = columns - first
    _rows_rest(a, a_row, a_step, rows, at, w_step, k, to, c_row, is_added, left, ahead)


@jit
def _row_bf16(a, a_row, a_step, rows, w, w_step, columns, k, c, c_row, is_added, ahead):
  """Computes all columns of one row."""
  size = 2
  first = 0
  while columns - first >= 16:
    left = (columns - first) // 16
    at, to = w + size * first, c + 4 * first
    if left >= 12:
      _row_bf16_12(a, a_row, a_step, rows, at, w_step, k, to, c_row, is_added, 0, ahead)
      first += 192
    elif left >= 6:
      _row_bf16_6(a, a_row, a_step, rows, at, w_step, k, to, c_row, is_added, 0, ahead)
      first += 96
    elif left >= 4:
      _row_bf16_4(a, a_row, a_step, rows, at, w_step, k, to, c_row, is_added, 0, ahead)
      first += 64
    elif left >= 3:
      _row_bf16_3(a, a_row, a_step, rows, at, w_step, k, to, c_row, is_added, 0, ahead)
      first += 48
    elif left >= 2:
      _row_bf16_2(a, a_row, a_step, rows, at, w_step, k, to, c_row, is_added, 0, ahead)
      first += 32
    else:
      _row_bf16_1(a, a_row, a_step, rows, at, w_step, k, to, c_row, is_added, 0, ahead)
      first += 16
  if first < columns:
    at, to = w + size * first, c + 4 * first
    left = columns - first
    _row_bf16_rest(a, a_row, a_step, rows, at, w_step, k, to, c_row, is_added, left, ahead)


@jit
def _rows_bf16(a, a_row, a_step, rows, w, w_step, columns, k, c, c_row, is_added, ahead):
  """Computes all columns of up to four rows."""
  size = 2
  first = 0
  while columns - first >= 16:
    left = (columns - first) // 16
    at, to = w + size * first, c + 4 * first
    if left >= 6:
      _rows_bf16_6(a, a_row, a_step, rows, at, w_step, k, to, c_row, is_added, 0, ahead)
      first += 96
    elif left >= 4:
      _rows_bf16_4(a, a_row, a_step, rows, at, w_step, k, to, c_row, is_added, 0, ahead)
      first += 64
    elif left >= 3:
      _rows_bf16_3(a, a_row, a_step, rows, at, w_step, k, to, c_row, is_added, 0, ahead)
      first += 48
    elif left >= 2:
      _rows_bf16_2(a, a_row, a_step, rows, at, w_step, k, to, c_row, is_added, 0, ahead)
      first += 32
    else:
      _rows_bf16_1(a, a_row, a_step, rows, at, w_step, k, to, c_row, is_added, 0, ahead)
      first += 16
  if first < columns:
    at, to = w + size * first, c + 4 * first
    left = columns - first
    _rows_bf16_rest(a, a_row, a_step, rows, at, w_step, k, to, c_row, is_added, left, ahead)


@jit
def product(a, a_row, a_step, rows, w, is_bf16, w_step, columns, k, c, c_row, is_added):
  """See `products.product`."""
  size = 2 if is_bf16 else 4
  if k == 0 and not is_added:
    for row in range(rows):
      out = floats(c + 4 * row * c_row)
      for column in range(columns):
        out[column] = f32(0.0)
  is_streamed = k * columns > _STREAMED
  # Few rows go over all columns of some steps; more rows go over one panel's steps.
  is_wide = rows <= BLOCK_ROWS or (is_streamed and rows <= FEW_ROWS)
  width = max(columns, 1) if is_wide else PANEL
  steps = max(k, 1)
  if is_streamed:
    steps = _STREAM_STEPS if is_wide else _CACHE_STEPS
  for begin in range(0, k, steps):
    count = min(steps, k - begin)
    goes_on = 1 if begin > 0 else is_added
    for column in range(0, columns, width):
      wide = min(width, columns - column)
      at = w + size * (begin * w_step + column)
      # Prefetch distance: to the next panel of these steps, or to the first panel of the next
      # steps, which after the last step are those of the next slab.
      ahead = width if column + width < columns else count * w_step - column
      for row in range(0, rows, BLOCK_ROWS):
        high = min(BLOCK_ROWS, rows - row)
        left, to = a + 4 * (row * a_row + begin * a_step), c + 4 * (row * c_row + column)
        later = ahead if is_streamed and row == 0 else 0
        if is_bf16:
          if high == 1:
            _row_bf16(left, a_row, a_step, high, at, w_step, wide, count, to, c_row, goes_on, later)
          else:
            _rows_bf16(
              left, a_row, a_step, high, at, w_step, wide, count, to, c_row, goes_on, later
            )
        elif high == 1:
          _row(left, a_row, a_step, high, at, w_step, wide, count, to, c_row, goes_on, later)
        else:
          few_rows(left, a_row, a_step, high, at, w_step, wide, count, to, c_row, goes_on, later)


@jit
def few_transposed(a, a_row, rows, w, is_bf16, w_row, columns, k, c, c_row):
  """See `products.few_transposed`."""
  size = 2 if is_bf16 else 4
  whole = columns // 16 * 16 if k % 32 == 0 else 0
  for column in range(0, whole, 16):
    at, to = w + size * column * w_row, c + 4 * column
    if is_bf16:
      if rows == 1:
        _turned_bf16_1(a, a_row, rows, at, w_row, k, to, c_row)
      else:
        _turned_bf16_8(a, a_row, rows, at, w_row, k, to, c_row)
    elif rows == 1:
      _turned_1(a, a_row, rows, at, w_row, k, to, c_row)
    else:
      _turned_8(a, a_row, rows, at, w_row, k, to, c_row)
  return whole
