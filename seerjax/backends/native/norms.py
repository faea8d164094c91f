"""Root-mean-square norm of a row (`ops.norms`), with one `dot_of` as its sum of squares."""

from __future__ import annotations

import math

from seerjax.backends.native import vectors
from seerjax.backends.native.numbers import f32, jit, round_row
from seerjax.backends.native.pointers import floats


@jit
def inverse_root(x, count, eps):
  """Returns 1 / sqrt(mean(x ** 2) + eps) of `count` floats at an address."""
  return f32(1.0) / f32(math.sqrt(vectors.dot_of(x, x, count) / f32(count) + eps))


@jit
def norm_row(x, scale, count, eps, is_bf16, out):
  """Computes out = x * inverse_root(x) * scale, rounding each product if `is_bf16`.

  All are addresses of floats; `out` may be `x`.
  """
  inverse = inverse_root(x, count, eps)
  source, scales, target = floats(x), floats(scale), floats(out)
  for i in range(count):
    target[i] = source[i] * inverse
  round_row(out, is_bf16, count)
  for i in range(count):
    target[i] = target[i] * scales[i]
  round_row(out, is_bf16, count)


@jit
def norm_row_gradient(x, scale, count, eps, is_bf16, cotangent, of_x, of_scale):
  """Computes the gradient of `norm_row`: the row's, and this row's part of the scale's.

  All are addresses of floats; `of_x` may be `cotangent`.
  """
  inverse = inverse_root(x, count, eps)
  source, scales, given = floats(x), floats(scale), floats(cotangent)
  row, part = floats(of_x), floats(of_scale)
  for i in range(count):
    part[i] = source[i] * inverse
  round_row(of_scale, is_bf16, count)
  for i in range(count):
    part[i] = part[i] * given[i]
  round_row(of_scale, is_bf16, count)
  for i in range(count):
    row[i] = given[i] * scales[i]
  round_row(of_x, is_bf16, count)
  along = vectors.dot_of(of_x, x, count) / f32(count) * (inverse * inverse * inverse)
  for i in range(count):
    row[i] = row[i] * inverse - source[i] * along
  round_row(of_x, is_bf16, count)
