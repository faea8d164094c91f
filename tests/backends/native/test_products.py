"""Native products have the bits of chains of fused multiply-adds in NumPy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import native_reference as reference
import numpy as np
import pytest

from seerjax.backends.native import (
  ffi,
  objects,
  products,
  products_dots,
  products_over_rows,
  products_wide,
  vectors_dots,
)
from seerjax.backends.native.numbers import jit

# (rows, k, columns): one row, a block and a rest, columns that no vector or panel divides; the last
# ones' weights are streamed, for a few rows over all columns and for more by panels.
SHAPES = (
  (1, 128, 384), (3, 17, 5), (7, 33, 50), (64, 128, 112), (5, 320, 97),
  (1, 700, 210), (2, 700, 210), (7, 700, 210), (9, 700, 210),
)  # fmt: skip


@jit
def one(arguments):
  return 1


@jit
def multiply(arguments, results, first, last, worker):
  n, k = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  e = ffi.dimension(arguments, 1, 1)
  products.product(
    ffi.address(arguments, 0), k, 1, n, ffi.address(arguments, 1), ffi.is_bfloat16(arguments, 1),
    e, e, k, ffi.address(results, 0), e, 0,
  )  # fmt: skip


@jit
def multiply_transposed(arguments, results, first, last, worker):
  n, k = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  e = ffi.dimension(arguments, 1, 0)
  products.product_transposed(
    ffi.address(arguments, 0), k, n, ffi.address(arguments, 1), ffi.is_bfloat16(arguments, 1),
    k, e, k, ffi.address(results, 0), e, 0, ffi.address(results, 1),
  )  # fmt: skip


@jit
def multiply_few(arguments, results, first, last, worker):
  n, k = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  e = ffi.dimension(arguments, 1, 0)
  left, w = ffi.address(arguments, 0), ffi.address(arguments, 1)
  is_bf16, to = ffi.is_bfloat16(arguments, 1), ffi.address(results, 0)
  done = products.few_transposed(left, k, n, w, is_bf16, k, e, k, to, e)
  products.product_transposed(
    left, k, n, w + (2 if is_bf16 else 4) * done * k, is_bf16, k, e - done, k, to + 4 * done, e, 0,
    ffi.address(results, 1),
  )  # fmt: skip


@jit
def multiply_over_rows(arguments, results, first, last, worker):
  n, k = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  e = ffi.dimension(arguments, 1, 1)
  products_over_rows.add_product(
    ffi.address(arguments, 0), k, n, k, ffi.address(arguments, 1), e, e, ffi.address(results, 0), e,
    0, ffi.address(results, 1),
  )  # fmt: skip


@jit
def multiply_added(arguments, results, first, last, worker):
  """Adds to the third operand; the result takes its place."""
  n, k = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  e = ffi.dimension(arguments, 1, 1)
  products.product(
    ffi.address(arguments, 0), k, 1, n, ffi.address(arguments, 1), ffi.is_bfloat16(arguments, 1),
    e, e, k, ffi.address(results, 0), e, 1,
  )  # fmt: skip


@jit
def multiply_widened(arguments, results, first, last, worker):
  n, k = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  e = ffi.dimension(arguments, 1, 1)
  products_wide.product(
    ffi.address(arguments, 0), k, 1, n, ffi.address(arguments, 1), ffi.is_bfloat16(arguments, 1),
    e, e, k, ffi.address(results, 0), e, 0,
  )  # fmt: skip


OVER_ROWS = ffi.Handler("test_multiply_over_rows", one, multiply_over_rows)
MULTIPLY = ffi.Handler("test_multiply", one, multiply)
TRANSPOSED = ffi.Handler("test_multiply_transposed", one, multiply_transposed)
FEW = ffi.Handler("test_multiply_few", one, multiply_few)
ADDED = ffi.Handler("test_multiply_added", one, multiply_added)
WIDENED = ffi.Handler("test_multiply_widened", one, multiply_widened)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=("f32", "bf16"))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_one_chain_an_output_whatever_its_blocks(shape, dtype):
  n, k, e = shape
  generator = np.random.default_rng(n)
  x = generator.standard_normal((n, k)).astype(np.float32)
  w = generator.standard_normal((k, e)).astype(dtype)
  out = jax.ShapeDtypeStruct((n, e), jnp.float32)
  panel = jax.ShapeDtypeStruct((k, products.PANEL), jnp.float32)
  (got,) = jax.jit(lambda x, w: MULTIPLY([out], x, w))(x, w)
  transposed = np.ascontiguousarray(w.T)
  other, _ = jax.jit(lambda x, w: TRANSPOSED([out, panel], x, w))(x, transposed)
  expected = reference.product(x, w)
  np.testing.assert_array_equal(np.asarray(got).view(np.int32), expected.view(np.int32))
  np.testing.assert_array_equal(np.asarray(other).view(np.int32), expected.view(np.int32))
  if n <= products.FEW_ROWS:
    few, _ = jax.jit(lambda x, w: FEW([out, panel], x, w))(x, transposed)
    np.testing.assert_array_equal(np.asarray(few).view(np.int32), expected.view(np.int32))


# (rows, k, columns) of bfloat16 rows: one row and a few, which no dot product multiplies; a rest of
# rows, of columns and of a panel, an odd k, several parts of k, and several groups of rows.
BFLOAT16_SHAPES = (
  (1, 64, 48), (8, 32, 7), (9, 34, 112), (10, 33, 48), (13, 448, 23), (64, 300, 245), (131, 290, 97)
)  # fmt: skip


@pytest.mark.parametrize("is_rounded", [True, False], ids=("bf16 rows", "f32 rows"))
@pytest.mark.parametrize("shape", BFLOAT16_SHAPES, ids=str)
def test_bfloat16_weights_give_the_chain_for_rows_of_bfloat16_and_of_others(shape, is_rounded):
  n, k, e = shape
  generator = np.random.default_rng(n)
  x = generator.standard_normal((n, k)).astype(np.float32)
  if is_rounded:
    x = reference.rounded(x, "bfloat16")
  # Ordinary weights, some with denormal products, and zeros of both signs.
  w = generator.standard_normal((k, e)) * generator.choice([1, 1, 1, 1e-38, 0], (k, e))
  w = w.astype(ml_dtypes.bfloat16)
  start = generator.standard_normal((n, e)).astype(np.float32)
  out = jax.ShapeDtypeStruct((n, e), jnp.float32)
  panel = jax.ShapeDtypeStruct((k, products.PANEL), jnp.float32)
  (got,) = jax.jit(lambda x, w: MULTIPLY([out], x, w))(x, w)
  (added,) = jax.jit(lambda x, w, c: ADDED([out], x, w, c, aliases={2: 0}))(x, w, start)
  turned = np.ascontiguousarray(w.T)
  other, _ = jax.jit(lambda x, w: TRANSPOSED([out, panel], x, w))(x, turned)
  expected = reference.product(x, w)
  for name, found, wanted in (
    ("product", got, expected),
    ("product added", added, reference.product(x, w, start)),
    ("transposed", other, expected),
  ):
    bits, wanted_bits = np.asarray(found).view(np.int32), wanted.view(np.int32)
    np.testing.assert_array_equal(bits, wanted_bits, err_msg=name)


def _needs_dots():
  if not (objects.has_dot_products() and vectors_dots.have_same_bits()):
    pytest.skip("the processor, or what numba compiles for, has no dot products of bfloat16")


def test_dot_products_are_used_where_the_processor_has_them():
  _needs_dots()
  assert products.product is products_dots.product


def test_dot_products_have_the_bits_of_widened_products():
  _needs_dots()
  generator = np.random.default_rng(3)
  x = reference.rounded(generator.standard_normal((66, 576)).astype(np.float32), "bfloat16")
  w = generator.standard_normal((576, 352)).astype(ml_dtypes.bfloat16)
  out = jax.ShapeDtypeStruct((66, 352), jnp.float32)
  dots, widened = (
    np.asarray(jax.jit(functools.partial(handler, [out]))(x, w)[0])
    for handler in (MULTIPLY, WIDENED)
  )
  np.testing.assert_array_equal(dots.view(np.int32), widened.view(np.int32))


def test_the_check_of_a_dot_product_tells_another_order_apart():
  _needs_dots()
  for exponents in ((-8, 8), (-72, -60)):
    totals, x, y = vectors_dots.checked_numbers(exponents)
    wanted = vectors_dots.expected(totals, x, y)
    swapped = [(pairs << 16) | (pairs >> 16) for pairs in (x, y)]
    assert np.any(vectors_dots.expected(totals, *swapped) != wanted)


# (rows, columns of x, of w): none, a few, and more than are transposed at once.
# Some values or all are bfloat16: a few columns that are not leave the others' panels alone.
@pytest.mark.parametrize("rounded", ["none", "x", "w", "some of w", "both"])
@pytest.mark.parametrize("shape", [(0, 3, 5), (3, 5, 17), (530, 70, 233)], ids=str)
def test_a_product_over_rows_is_one_chain_in_their_order(shape, rounded):
  n, k, e = shape
  generator = np.random.default_rng(n)
  x = generator.standard_normal((n, k)).astype(np.float32)
  w = generator.standard_normal((n, e)).astype(np.float32)
  if rounded in ("x", "some of w", "both"):
    x = reference.rounded(x, "bfloat16")
  if rounded in ("w", "both"):
    w = reference.rounded(w, "bfloat16")
  elif rounded == "some of w":
    w[:, :130] = reference.rounded(w[:, :130], "bfloat16")
  results = [
    jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((k, e), (k, products_over_rows.TURNED))
  ]
  got, _ = jax.jit(lambda x, w: OVER_ROWS(results, x, w))(x, w)
  expected = reference.product(np.ascontiguousarray(x.T), w)
  np.testing.assert_array_equal(np.asarray(got).view(np.int32), expected.view(np.int32))


def test_a_chain_that_begins_elsewhere_has_other_bits():
  generator = np.random.default_rng(0)
  x = generator.standard_normal((2, 40)).astype(np.float32)
  w = generator.standard_normal((40, 16)).astype(np.float32)
  late = reference.product(x[:, 20:], w[20:]) + reference.product(x[:, :20], w[:20])
  assert np.any(reference.product(x, w) != late)
