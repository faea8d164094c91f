"""Products over rows, x^T @ cotangents: each output is one chain, in the order of the rows."""

from __future__ import annotations

import numpy as np

from seerjax.backends.native import products, vectors
from seerjax.backends.native.numbers import jit
from seerjax.backends.native.pointers import floats

# Rows that are transposed at once, and columns of the transpose that stay in a cache.
TURNED, COLUMNS = 256, 192
# Not literals for numba, which would compile a product anew for each literal.
_ONE, _NO, _TURNED = np.int64(1), np.bool_(False), np.int64(TURNED)
_LANES = vectors.LANES


@jit
def _turn(source, source_row, rows, columns, target):
  """Transposes f32[rows, columns], of up to `TURNED` rows, to f32[columns, TURNED]."""
  whole_rows, whole_columns = rows // _LANES * _LANES, columns // _LANES * _LANES
  for row in range(0, whole_rows, _LANES):
    for column in range(0, whole_columns, _LANES):
      at = source + 4 * (row * source_row + column)
      vectors.transpose_f32(at, source_row, target + 4 * (column * TURNED + row), _TURNED)
  wide, out = floats(source), floats(target)
  for row in range(rows):
    for column in range(whole_columns if row < whole_rows else 0, columns):
      out[column * TURNED + row] = wide[row * source_row + column]


@jit
def add_product(a, a_row, rows, a_columns, w, w_row, columns, c, c_row, is_added, turned):
  """Computes c[a_columns, columns] (+)= a[rows, a_columns]^T @ w[rows, columns], all float32.

  An output is one chain over rows. The left side is transposed first: otherwise, each read of a few
  columns of a long row would touch a cache line of its own.

  Args:
    a (address): rows of `a_row` elements.
    rows (int): any number.
    a_columns (int): any number; up to `COLUMNS` keep the transpose in a cache.
    w (address): rows of `w_row` elements.
    c (address): rows of `c_row` elements.
    is_added (int): as in `product`.
    turned (address): scratch, f32[a_columns, TURNED].
  """
  if rows == 0:
    products.product(a, _ONE, a_row, a_columns, w, _NO, w_row, columns, rows, c, c_row, is_added)
  for row in range(0, rows, TURNED):
    count, goes_on = min(TURNED, rows - row), 1 if row > 0 else is_added
    _turn(a + 4 * row * a_row, a_row, count, a_columns, turned)
    products.product(
      turned, _TURNED, _ONE, a_columns, w + 4 * row * w_row, _NO, w_row, columns, count, c, c_row,
      goes_on,
    )  # fmt: skip
