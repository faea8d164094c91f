"""Functions of floats as IEEE operations, independent of the machine's libraries.

`exp`, `log` and `tanh` are the polynomials of Cephes (Moshier, https://www.netlib.org/cephes/),
accurate to about an ulp, with every multiply-add fused. bfloat16 is float32's upper half, rounded
to nearest.
"""

from __future__ import annotations

import numpy as np

from seerjax.backends.native.front import inlined, jit
from seerjax.backends.native.pointers import bits_of, float_of, floats, fma, halves

f32 = np.float32
# Outside of these, exp is zero (the smallest normal number), or would overflow.
_SMALLEST, _LARGEST = f32(-87.3), f32(88.0)


@inlined
def exp(x):
  """Returns e ** x; 0 below -87.3, and e ** 88 above 88. NaN stays NaN."""
  inside = min(max(x, _SMALLEST), _LARGEST)
  shifted = fma(inside, f32(1.44269504), f32(12582912.0))
  n = shifted - f32(12582912.0)
  r = fma(n, f32(-0.693359375), inside)
  r = fma(n, f32(2.12194440e-4), r)
  y = f32(1.9875691500e-4)
  y = fma(y, r, f32(1.3981999507e-3))
  y = fma(y, r, f32(8.3334519073e-3))
  y = fma(y, r, f32(4.1665795894e-2))
  y = fma(y, r, f32(1.6666665459e-1))
  y = fma(y, r, f32(5.0000001201e-1))
  y = fma(y, r * r, r) + f32(1.0)
  exponent = np.int32(bits_of(shifted) - np.int32(0x4B400000))
  y = y * float_of(np.int32((exponent + np.int32(127)) << np.int32(23)))
  y = y if x >= _SMALLEST else f32(0.0)
  return y if x == x else x


@inlined
def tanh(x):
  """Returns the hyperbolic tangent: a polynomial below 0.625, 1 - 2 / (e ** 2x + 1) above."""
  size, z = abs(x), x * x
  y = fma(f32(-5.70498872745e-3), z, f32(2.06390887954e-2))
  y = fma(y, z, f32(-5.37397155531e-2))
  y = fma(y, z, f32(1.33314422036e-1))
  y = fma(y, z, f32(-3.33332819422e-1))
  large = f32(1.0) - f32(2.0) / (exp(size + size) + f32(1.0))
  large = -large if x < f32(0.0) else large
  return fma(y * z, x, x) if size < f32(0.625) else large


@inlined
def gelu_and_slope(x):
  """Returns x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x ** 3), and its derivative."""
  square = x * x
  t = tanh(f32(0.7978845608) * fma(f32(0.044715) * square, x, x))
  half = f32(0.5) * (f32(1.0) + t)
  inner = f32(0.7978845608) * fma(f32(0.134145), square, f32(1.0))
  return x * half, fma(f32(0.5) * x * (f32(1.0) - t * t), inner, half)


@inlined
def log(x):
  """Returns the natural logarithm of a positive normal number."""
  bits = bits_of(x)
  exponent = np.int32((bits - np.int32(0x3F3504F3)) >> np.int32(23))
  m = float_of(np.int32(bits - np.int32(exponent << np.int32(23)))) - f32(1.0)
  z = m * m
  y = f32(7.0376836292e-2)
  y = fma(y, m, f32(-1.1514610310e-1))
  y = fma(y, m, f32(1.1676998740e-1))
  y = fma(y, m, f32(-1.2420140846e-1))
  y = fma(y, m, f32(1.4249322787e-1))
  y = fma(y, m, f32(-1.6668057665e-1))
  y = fma(y, m, f32(2.0000714765e-1))
  y = fma(y, m, f32(-2.4999993993e-1))
  y = fma(y, m, f32(3.3333331174e-1))
  y = y * m * z
  e = f32(exponent)
  y = fma(e, f32(-2.12194440e-4), y)
  y = fma(z, f32(-0.5), y)
  return fma(e, f32(0.693359375), m + y)


@inlined
def half_of(x):
  """Returns the bits of the bfloat16 nearest to x, ties to even; NaN stays NaN."""
  bits = np.uint32(bits_of(x))
  rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
  upper = np.uint32(rounded >> np.uint32(16))
  return np.uint16(upper) if x == x else np.uint16(0x7FC0)


@inlined
def float_of_half(bits):
  """Returns the float32 of a bfloat16's bits."""
  return float_of(np.int32(np.uint32(bits) << np.uint32(16)))


@jit
def read_row(source, is_bf16, target, count):
  """Copies `count` elements at an address, float32 or bfloat16, to floats."""
  out = floats(target)
  if is_bf16:
    narrow = halves(source)
    for i in range(count):
      out[i] = float_of_half(narrow[i])
  else:
    wide = floats(source)
    for i in range(count):
      out[i] = wide[i]


@jit
def write_row(source, target, is_bf16, count):
  """Copies `count` floats to an address of float32 or bfloat16, rounding."""
  values = floats(source)
  if is_bf16:
    narrow = halves(target)
    for i in range(count):
      narrow[i] = half_of(values[i])
  else:
    wide = floats(target)
    for i in range(count):
      wide[i] = values[i]


@jit
def zero_row(target, is_bf16, count):
  """Writes `count` zeros to an address of float32 or bfloat16."""
  if is_bf16:
    narrow = halves(target)
    for i in range(count):
      narrow[i] = np.uint16(0)
  else:
    wide = floats(target)
    for i in range(count):
      wide[i] = f32(0.0)


@jit
def round_row(values, is_bf16, count):
  """Rounds `count` floats in place to bfloat16, if that is the compute type."""
  if is_bf16:
    x = floats(values)
    for i in range(count):
      x[i] = float_of_half(half_of(x[i]))
