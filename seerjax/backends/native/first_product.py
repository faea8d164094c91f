"""A product with its exp and log: the handler that `availability` checks first."""

from __future__ import annotations

from numba import types

from seerjax.backends.native import ffi, products
from seerjax.backends.native.numbers import exp, f32, jit, log
from seerjax.backends.native.pointers import floats


@jit
def _count(arguments):
  return types.int64(1)


@jit
def _work(arguments, results, first, last, worker):
  rows, k = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  columns = ffi.dimension(arguments, 1, 1)
  products.product(
    ffi.address(arguments, 0), k, types.int64(1), rows, ffi.address(arguments, 1),
    ffi.is_bfloat16(arguments, 1), columns, columns, k, ffi.address(results, 0), columns,
    types.int64(0),
  )  # fmt: skip
  product, exps = floats(ffi.address(results, 0)), floats(ffi.address(results, 1))
  logs = floats(ffi.address(results, 2))
  for i in range(rows * columns):
    exps[i] = exp(product[i])
    logs[i] = log(exps[i] + f32(1.0))


# Operands f32[n, k] and f32[k, e]; results f32[n, e]: the product, its exp, log(1 + exp).
HANDLER = ffi.Handler("seerjax_first_product", _count, _work)
