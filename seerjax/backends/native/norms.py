"""Root-mean-square norm of a row (`ops.norms`), with one `dot_of` as its sum of squares.

A scale is bfloat16 if rows are, and then the normalised row is rounded before it is scaled. The
factors 1 + w of other models are float32, and only the product is rounded.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from seerjax.backends.native import vectors
from seerjax.backends.native.numbers import f32, jit, round_row
from seerjax.backends.native.pointers import floats
from seerjax.ops.norms import Weights

# A layer's norms within its handlers, by the names of their weights.
OF_LAYER = ("attention_norm", "query_norm", "key_norm", "mlp_norm")


def factors(kind: Weights, weights: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
  """Returns the weights with what those norms multiply by, as handlers read it."""
  if kind == "w":
    return weights
  own = {name: 1 + weights[name].astype(jnp.float32) for name in names if name in weights}
  return weights | own


@jit
def inverse_root(x, count, eps):
  """Returns 1 / sqrt(mean(x ** 2) + eps) of `count` floats at an address."""
  return f32(1.0) / f32(math.sqrt(vectors.dot_of(x, x, count) / f32(count) + eps))


@jit
def norm_row(x, scale, count, eps, is_bf16, is_narrow, out):
  """Computes out = x * inverse_root(x) * scale, rounded if `is_bf16`.

  All are addresses of floats; `out` may be `x`. `is_narrow` states whether the scale was bfloat16.
  """
  inverse = inverse_root(x, count, eps)
  source, scales, target = floats(x), floats(scale), floats(out)
  for i in range(count):
    target[i] = source[i] * inverse
  round_row(out, is_narrow, count)
  for i in range(count):
    target[i] = target[i] * scales[i]
  round_row(out, is_bf16, count)


@jit
def norm_row_gradient(x, scale, count, eps, is_bf16, is_narrow, cotangent, of_x, of_scale):
  """Computes the gradient of `norm_row`: the row's, and this row's part of the scale's.

  All are addresses of floats; `of_x` may be `cotangent`.
  """
  inverse = inverse_root(x, count, eps)
  source, scales, given = floats(x), floats(scale), floats(cotangent)
  row, part = floats(of_x), floats(of_scale)
  for i in range(count):
    part[i] = source[i] * inverse
  round_row(of_scale, is_narrow, count)
  for i in range(count):
    part[i] = part[i] * given[i]
  round_row(of_scale, is_narrow, count)
  for i in range(count):
    row[i] = given[i] * scales[i]
  round_row(of_x, is_narrow, count)
  along = vectors.dot_of(of_x, x, count) / f32(count) * (inverse * inverse * inverse)
  for i in range(count):
    row[i] = row[i] * inverse - source[i] * along
  round_row(of_x, is_bf16, count)
