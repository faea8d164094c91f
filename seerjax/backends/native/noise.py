"""Gumbel noise like JAX's: the same Threefry numbers, with our own logarithm.

Source: Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405 (20 rounds of two words).
"""

from __future__ import annotations

import numpy as np

from seerjax.backends.native.numbers import f32, inlined, jit, log
from seerjax.backends.native.pointers import float_of, floats

u32 = np.uint32
# The smallest normal number, which JAX draws instead of zero.
_TINY = f32(np.finfo(np.float32).tiny)


@inlined
def _mix(a, b, turn):
  a = u32(a + b)
  b = u32(u32(b << u32(turn)) | u32(b >> u32(32 - turn)))
  return a, u32(a ^ b)


@inlined
def threefry(k0, k1, a, b):
  """Returns Threefry-2x32 of a key's two words and a counter's two words, all u32."""
  k2 = u32(k0 ^ k1 ^ u32(0x1BD11BDA))
  a, b = u32(a + k0), u32(b + k1)
  a, b = _mix(a, b, 13)
  a, b = _mix(a, b, 15)
  a, b = _mix(a, b, 26)
  a, b = _mix(a, b, 6)
  a, b = u32(a + k1), u32(b + k2 + u32(1))
  a, b = _mix(a, b, 17)
  a, b = _mix(a, b, 29)
  a, b = _mix(a, b, 16)
  a, b = _mix(a, b, 24)
  a, b = u32(a + k2), u32(b + k0 + u32(2))
  a, b = _mix(a, b, 13)
  a, b = _mix(a, b, 15)
  a, b = _mix(a, b, 26)
  a, b = _mix(a, b, 6)
  a, b = u32(a + k0), u32(b + k1 + u32(3))
  a, b = _mix(a, b, 17)
  a, b = _mix(a, b, 29)
  a, b = _mix(a, b, 16)
  a, b = _mix(a, b, 24)
  a, b = u32(a + k1), u32(b + k2 + u32(4))
  a, b = _mix(a, b, 13)
  a, b = _mix(a, b, 15)
  a, b = _mix(a, b, 26)
  a, b = _mix(a, b, 6)
  return u32(a + k2), u32(b + k0 + u32(5))


@jit
def fold_in(k0, k1, data):
  """Returns `jax.random.fold_in` of a key's two words and 32 bits of data."""
  return threefry(k0, k1, u32(0), u32(data))


@inlined
def gumbel(k0, k1, place):
  """Returns entry `place` (u32) of `jax.random.gumbel(key, (v,))`, for any v."""
  a, b = threefry(k0, k1, u32(0), place)
  # Threefry is partitionable: a number's counter is its index, and its bits are a ^ b.
  mantissa = u32(u32(a ^ b) >> u32(9))
  uniform = float_of(np.int32(mantissa | u32(0x3F800000))) - f32(1.0)
  return -log(-log(max(uniform + _TINY, _TINY)))


@jit
def noisy_row(z, divisor, k0, k1, first, target, count):
  """Writes z / divisor + noise, for ids from `first` on."""
  values, out = floats(z), floats(target)
  for i in range(count):
    out[i] = values[i] / divisor + gumbel(k0, k1, u32(first + i))
