"""Pages of the native backend, and the writing of keys and values into them.

A page of a head holds keys transposed, f[c, z] with the slots side by side, so that a query reads
16 slots at a time; values are f[z, c]. Padding rows, and rows with a slot outside the pages, are
not written at all, not even to the dump page.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from numba import types
import numpy as np

from seerjax.array_typing import Array, Float, Int
from seerjax.backends.native import ffi
from seerjax.backends.native.ffi import address, dimension, integer, is_bfloat16
from seerjax.backends.native.numbers import jit
from seerjax.backends.native.pointers import halves, integers, unsigned
from seerjax.types import KeyCopies

# Operands of a write after pages and rows' keys and values, and slots.
_ROWS, _COPIED, _COPY_SLOTS, _COPIES = map(np.int64, (5, 6, 7, 8))


@jit
def _rows_and_copies(arguments):
  return integer(arguments, _ROWS, 0) + integer(arguments, _COPIES, 0)


@jit
def _write(arguments, results, first, last, worker):
  """Writes rows f[n, k, c] in place; operands: pages f[k, m, ...], rows, slots, counts, copies.

  A copy is read from its row and not from a page, so that items are independent of each other.
  """
  heads, pages = dimension(results, 0, 0), dimension(results, 0, 1)
  head_dim, page_size = dimension(results, 0, 2), dimension(results, 0, 3)
  slots = integers(address(arguments, 4))
  key_pages, value_pages = address(results, 0), address(results, 1)
  keys, values = address(arguments, 2), address(arguments, 3)
  copied = integers(address(arguments, _COPIED))
  copy_slots = integers(address(arguments, _COPY_SLOTS))
  narrow = is_bfloat16(arguments, 0)
  num_rows = integer(arguments, _ROWS, 0)
  for item in range(first, last):
    is_copy = item >= num_rows
    row = types.int64(copied[item - num_rows]) if is_copy else item
    place = types.int64(copy_slots[item - num_rows] if is_copy else slots[item])
    page, slot = place // page_size, place % page_size
    if page < 0 or page >= pages:  # Outside of the pages is other memory.
      continue
    for head in range(heads):
      at = (head * pages + page) * page_size * head_dim
      source = (row * heads + head) * head_dim
      # Bits are copied, so the two dtypes differ in width only.
      if narrow:
        to, given = halves(key_pages + 2 * (at + slot)), halves(keys + 2 * source)
        for feature in range(head_dim):
          to[feature * page_size] = given[feature]
        to, given = halves(value_pages + 2 * (at + slot * head_dim)), halves(values + 2 * source)
        for feature in range(head_dim):
          to[feature] = given[feature]
      else:
        out, wide = unsigned(key_pages + 4 * (at + slot)), unsigned(keys + 4 * source)
        for feature in range(head_dim):
          out[feature * page_size] = wide[feature]
        out = unsigned(value_pages + 4 * (at + slot * head_dim))
        wide = unsigned(values + 4 * source)
        for feature in range(head_dim):
          out[feature] = wide[feature]


_WRITE = ffi.Handler("seerjax_write_pages", _rows_and_copies, _write)


@jit
def _take(arguments, results, first, last, worker):
  """Gradients of pages f[k, m, ...]; operands: those, rows f[n, k, c] for the shape, slots, rows.

  The rows' slots are moved from the pages' gradients to the rows' gradients, and are zero there.
  """
  heads, pages = dimension(results, 0, 0), dimension(results, 0, 1)
  head_dim, page_size = dimension(results, 0, 2), dimension(results, 0, 3)
  slots = integers(address(arguments, 4))
  key_pages, value_pages = address(results, 0), address(results, 1)
  keys, values = address(results, 2), address(results, 3)
  narrow = is_bfloat16(arguments, 0)
  rows = integer(arguments, 5, 0)
  for row in range(first, last):
    is_row = row < rows
    page, slot = slots[row] // page_size, slots[row] % page_size
    for head in range(heads):
      at = (head * pages + page) * page_size * head_dim
      target = (row * heads + head) * head_dim
      if narrow:
        given, to = halves(key_pages + 2 * (at + slot)), halves(keys + 2 * target)
        for feature in range(head_dim):
          to[feature] = given[feature * page_size] if is_row else 0
          if is_row:
            given[feature * page_size] = 0
        given, to = halves(value_pages + 2 * (at + slot * head_dim)), halves(values + 2 * target)
        for feature in range(head_dim):
          to[feature] = given[feature] if is_row else 0
          if is_row:
            given[feature] = 0
      else:
        wide, out = unsigned(key_pages + 4 * (at + slot)), unsigned(keys + 4 * target)
        for feature in range(head_dim):
          out[feature] = wide[feature * page_size] if is_row else 0
          if is_row:
            wide[feature * page_size] = 0
        wide = unsigned(value_pages + 4 * (at + slot * head_dim))
        out = unsigned(values + 4 * target)
        for feature in range(head_dim):
          out[feature] = wide[feature] if is_row else 0
          if is_row:
            wide[feature] = 0


@jit
def _all_rows(arguments):
  return dimension(arguments, 2, 0)


_TAKE = ffi.Handler("seerjax_take_pages", _all_rows, _take)


def _like(array: Array) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(array.shape, array.dtype)


def write_pages(
  pages: tuple[Float[Array, "k m c z"], Float[Array, "k m z c"]],
  values: tuple[Float[Array, "n k c"], Float[Array, "n k c"]],
  slots: Int[Array, "n"],
  num_rows: Array,
  copies: KeyCopies | None = None,
) -> tuple[Array, ...]:
  """Returns the pages with the first `num_rows` rows' keys and values at their slots, in place.

  Args:
    pages: keys f[k, m, c, z] and values f[k, m, z, c].
    values: the rows' keys and values, f[n, k, c] each.
    slots: i32[n], page * z + offset.
    num_rows: i32[], valid rows.
    copies: rows that are also written to further slots; they have no gradient.
  """
  if copies is None:
    return _written(*pages, *values, slots, num_rows)
  key_pages, value_pages = pages
  return _write_in_place(key_pages, value_pages, *values, slots, num_rows, copies)


def _write_in_place(
  key_pages: Array,
  value_pages: Array,
  keys: Array,
  values: Array,
  slots: Array,
  num_rows: Array,
  copies: KeyCopies,
) -> tuple[Array, ...]:
  keys, values = keys.astype(key_pages.dtype), values.astype(value_pages.dtype)
  results = [_like(key_pages), _like(value_pages)]
  operands = (key_pages, value_pages, keys, values, slots, num_rows, *copies)
  return _WRITE(results, *operands, aliases={0: 0, 1: 1})


def _no_copies() -> KeyCopies:
  none = jnp.zeros((0,), jnp.int32)
  return KeyCopies(none, none, jnp.int32(0))


def written_anew(
  pages: tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct],
  values: tuple[Float[Array, "n k c"], Float[Array, "n k c"]],
  slots: Int[Array, "n"],
  num_rows: Array,
) -> tuple[Array, ...]:
  """Like `write_pages`, for pages that the call allocates: other slots are uninitialised.

  It has no gradient; `taken` computes the rows' part of one.
  """
  none = [jnp.zeros((0,), page.dtype) for page in pages]
  keys, own_values = (x.astype(page.dtype) for x, page in zip(values, pages, strict=True))
  return _WRITE(pages, *none, keys, own_values, slots, num_rows, *_no_copies())


def taken(
  gradients: Sequence[Array], shape: tuple[int, int, int], slots: Int[Array, "n"], num_rows: Array
) -> tuple[Array, Array]:
  """Returns the rows' part of the gradients of pages, f[n, k, c] each, in the pages' dtype.

  Args:
    gradients: gradients of keys f[k, m, c, z] and values f[k, m, z, c]; only the rows' slots are
      read.
    shape: n, k, c.
    slots: i32[n].
    num_rows: i32[]; rows from there on are zero.
  """
  row = jax.ShapeDtypeStruct(shape, gradients[0].dtype)
  # The two operands in the middle only provide the number of rows.
  operands = (*gradients, slots, slots, slots, num_rows)
  *_, keys, values = _TAKE([*map(_like, gradients), row, row], *operands, aliases={0: 0, 1: 1})
  return keys, values


@jax.custom_vjp
def _written(key_pages, value_pages, keys, values, slots, num_rows):
  return _write_in_place(key_pages, value_pages, keys, values, slots, num_rows, _no_copies())


def _written_forward(key_pages, value_pages, keys, values, slots, num_rows):
  out = _written(key_pages, value_pages, keys, values, slots, num_rows)
  return out, (keys, values, slots, num_rows)


def _written_backward(residuals, gradients):
  keys, values, slots, num_rows = residuals
  dtype = gradients[0].dtype
  results = [
    *map(_like, gradients),
    *(jax.ShapeDtypeStruct(x.shape, dtype) for x in (keys, values)),
  ]
  operands = (*gradients, keys.astype(dtype), values.astype(dtype), slots, num_rows)
  key_pages, value_pages, new_keys, new_values = _TAKE(results, *operands, aliases={0: 0, 1: 1})
  return (
    key_pages, value_pages, new_keys.astype(keys.dtype), new_values.astype(values.dtype), None, None
  )  # fmt: skip


_written.defvjp(_written_forward, _written_backward)
