"""cos and sin of rotary positions, in IEEE float64 operations, rounded once.

The angle is `position * radians` in float32, as in published models. It is reduced by multiples of
pi / 2 in two parts, and the polynomials are those of fdlibm (Sun Microsystems 1993,
https://www.netlib.org/fdlibm/), so the result is independent of the machine's libraries.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from numba import types
import numpy as np

from seerjax.array_typing import Array
from seerjax.backends.native import ffi
from seerjax.backends.native.numbers import f32, inlined, jit
from seerjax.backends.native.pointers import floats, integers
from seerjax.ops import rotary

_TWO_OVER_PI = 6.36619772367581382433e-01
# pi / 2 in two parts; the first has 33 bits, so its product with a small integer is exact.
_HALF_PI, _HALF_PI_REST = 1.57079632673412561417e00, 6.07710050650619224932e-11
_TO_WHOLE = 6755399441055744.0  # 1.5 * 2 ** 52: adding it rounds to a whole number.


@inlined
def _sine(x, z):
  y = -2.50507602534068634195e-08 + z * 1.58969099521155010221e-10
  y = 2.75573137070700676789e-06 + z * y
  y = -1.98412698298579493134e-04 + z * y
  y = 8.33333333332248946124e-03 + z * y
  return x + x * z * (-1.66666666666666324348e-01 + z * y)


@inlined
def _cosine(z):
  y = 2.08757232129817482790e-09 + z * -1.13596475577881948265e-11
  y = -2.75573143513906633035e-07 + z * y
  y = 2.48015872894767294178e-05 + z * y
  y = -1.38888888888741095749e-03 + z * y
  y = 4.16666666666666019037e-02 + z * y
  return 1.0 - 0.5 * z + z * z * y


@jit
def _count(arguments):
  return types.int64(integers(ffi.address(arguments, 3))[0])


@jit
def _work(arguments, results, first, last, worker):
  positions, radians = integers(ffi.address(arguments, 0)), floats(ffi.address(arguments, 1))
  factor = floats(ffi.address(arguments, 2))[0]
  cosines, sines = floats(ffi.address(results, 0)), floats(ffi.address(results, 1))
  width = ffi.dimension(results, 0, 1)
  for row in range(first, last):
    position = f32(positions[row])
    for column in range(width):
      angle = np.float64(f32(position * radians[column]))
      whole = (angle * _TWO_OVER_PI + _TO_WHOLE) - _TO_WHOLE
      x = (angle - whole * _HALF_PI) - whole * _HALF_PI_REST
      z = x * x
      sine, cosine = _sine(x, z), _cosine(z)
      quadrant = np.int64(whole) & 3
      if quadrant & 1:
        sine, cosine = cosine, -sine
      if quadrant & 2:
        sine, cosine = -sine, -cosine
      place = row * width + column
      cosines[place], sines[place] = f32(cosine) * factor, f32(sine) * factor
  if last == _count(arguments):  # Rows past the last one get the identity rotation.
    for place in range(last * width, ffi.dimension(results, 0, 0) * width):
      cosines[place], sines[place] = f32(1.0), f32(0.0)


_HANDLER = ffi.Handler("seerjax_rotation", _count, _work)


def table_rows(config: rotary.RotaryConfig, positions: Array, num_rows: Array) -> tuple[Array, ...]:
  """Returns cos and sin, f32[n, c / 2], of the first `num_rows` rows; 1 and 0 after them.

  Args:
    config: rotary configuration.
    positions: i32[n], below 2 ** 17.
    num_rows: i32[], valid rows.
  """
  radians, factor = rotary.frequencies(config)
  shape = jax.ShapeDtypeStruct((positions.shape[0], config.head_dim // 2), jnp.float32)
  factors = jnp.full((1,), factor, jnp.float32)
  return _HANDLER(
    [shape, shape], positions, jnp.asarray(radians), factors, jnp.reshape(num_rows, (1,))
  )
