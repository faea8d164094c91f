"""Matrix products: each output is one chain of fused multiply-adds, in ascending k.

The number of rows and columns that are computed together changes no chain, so a row's bits do not
depend on the rows around it. Block heights depend on the load, and block widths on the processor's
registers (`products_wide`, `products_narrow`). Dot products of bfloat16 are two steps of a chain
where the processor has them (`products_dots`).
"""

from __future__ import annotations

import numpy as np

from seerjax.backends.native import (
  objects,
  products_dots,
  products_narrow,
  products_wide,
  vectors_dots,
)
from seerjax.backends.native.numbers import f32, float_of_half, jit
from seerjax.backends.native.pointers import floats, halves

# Rows of an item of work, and columns of a panel of transposed weights.
BLOCK_ROWS = 4
PANEL = 96
# Maximum rows for which transposed weights are transposed in registers.
FEW_ROWS = 8

_HAS_DOTS = objects.has_dot_products() and vectors_dots.have_same_bits()
_blocks = products_wide if objects.has_wide_vectors() else products_narrow
_blocks = products_dots if _HAS_DOTS else _blocks
# (a, a_row, a_step, rows, w, is_bf16, w_step, columns, k, c, c_row, is_added):
# c[rows, columns] (+)= a[rows, k] @ w[k, columns]; addresses point to a first element.
#   a (address): f32; `a_row` and `a_step` are the elements between two rows and between two steps
#     of k.
#   rows (int): any number.
#   w (address): f32 or bf16 (`is_bf16`), rows of `w_step` elements.
#   k (int): 0 gives zeros.
#   c (address): f32, rows of `c_row` elements.
#   is_added (int): 1 continues the chains in c, 0 starts at zero.
product = _blocks.product
# (a, a_row, a_step, rows, w, w_step, columns, k, c, c_row, is_added, ahead): like `product`, for up
# to `BLOCK_ROWS` rows and float32 weights, and `k` of at least 1.
few_rows = _blocks.few_rows
# (a, a_row, rows, w, is_bf16, w_row, columns, k, c, c_row): like `product_transposed` from zero,
# for up to `FEW_ROWS` rows, without packing the weights. Returns the number of columns computed:
# those of whole blocks, 0 if 32 does not divide k.
few_transposed = _blocks.few_transposed

# Not literals for numba, which would compile a product anew for each literal.
_ONE, _NO, _PANEL = np.int64(1), np.bool_(False), np.int64(PANEL)


@jit
def _pack_floats(source, is_bf16, source_row, columns, k, panel):
  """Writes up to `PANEL` rows f[columns, k] as columns f32[k, PANEL]; the rest is zero."""
  out = floats(panel)
  size = 2 if is_bf16 else 4
  blocks, steps = columns // 16, k // 16
  for block in range(blocks):
    for step in range(steps):
      at = source + size * (16 * block * source_row + 16 * step)
      to = panel + 4 * (16 * step * PANEL + 16 * block)
      if is_bf16:
        _blocks.transpose_bf16(at, source_row, to, PANEL)
      else:
        _blocks.transpose_f32(at, source_row, to, PANEL)
  wide, narrow = floats(source), halves(source)
  for column in range(columns):
    begin = 16 * steps if column < 16 * blocks else 0
    for step in range(begin, k):
      place = column * source_row + step
      out[step * PANEL + column] = float_of_half(narrow[place]) if is_bf16 else wide[place]
  for step in range(k):
    for column in range(columns, PANEL):
      out[step * PANEL + column] = f32(0.0)


@jit
def _product_of_floats(a, a_row, rows, panel, is_bf16, columns, k, c, c_row, is_added):
  product(a, a_row, _ONE, rows, panel, _NO, _PANEL, columns, k, c, c_row, is_added)


@jit
def _pack_pairs(source, is_bf16, source_row, columns, k, panel):
  """Like `_pack_floats`, but packs bfloat16 as pairs."""
  if products_dots.are_pairs(is_bf16, k):
    products_dots.pack_pairs(source, source_row, columns, k, panel)
  else:
    _pack_floats(source, is_bf16, source_row, columns, k, panel)


@jit
def _product_of_pairs(a, a_row, rows, panel, is_bf16, columns, k, c, c_row, is_added):
  if products_dots.are_pairs(is_bf16, k):
    products_dots.product_of_pairs(a, a_row, rows, panel, columns, k, c, c_row, is_added)
  else:
    _product_of_floats(a, a_row, rows, panel, is_bf16, columns, k, c, c_row, is_added)


# (source, is_bf16, source_row, columns, k, panel): packs up to `PANEL` rows f[columns, k] of
# weights as columns into f32[k, PANEL], for `product_of_panel`.
pack_transposed = _pack_pairs if _HAS_DOTS else _pack_floats
# (a, a_row, rows, panel, is_bf16, columns, k, c, c_row, is_added): like `product`, with weights
# that `pack_transposed` packed.
product_of_panel = _product_of_pairs if _HAS_DOTS else _product_of_floats


@jit
def product_transposed(a, a_row, rows, w, is_bf16, w_row, columns, k, c, c_row, is_added, panel):
  """Computes c[rows, columns] (+)= a[rows, k] @ w[columns, k]^T; scratch `panel` f32[k, PANEL]."""
  size = 2 if is_bf16 else 4
  for column in range(0, columns, PANEL):
    wide = min(PANEL, columns - column)
    pack_transposed(w + size * column * w_row, is_bf16, w_row, wide, k, panel)
    product_of_panel(a, a_row, rows, panel, is_bf16, wide, k, c + 4 * column, c_row, is_added)
