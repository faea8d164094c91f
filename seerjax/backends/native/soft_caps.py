"""Soft caps on scores and logits: cap * tanh(x / cap), in place; a cap of 0 is none."""

from __future__ import annotations

from seerjax.backends.native.numbers import f32, jit, tanh
from seerjax.backends.native.pointers import floats


@jit
def cap_row(x, cap, count):
  """Caps `count` floats at an address."""
  values = floats(x)
  for i in range(count):
    values[i] = cap * tanh(values[i] / cap)


@jit
def cap_row_for_gradient(x, cap, count, slopes):
  """Works like `cap_row`, and writes the derivatives to another address."""
  values, out = floats(x), floats(slopes)
  for i in range(count):
    y = tanh(values[i] / cap)
    values[i] = cap * y
    out[i] = f32(1.0) - y * y


@jit
def scale_row_by(x, slopes, count):
  """Multiplies `count` floats in place by those at another address."""
  values, factors = floats(x), floats(slopes)
  for i in range(count):
    values[i] = values[i] * factors[i]
