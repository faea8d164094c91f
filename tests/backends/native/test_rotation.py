"""Native cos and sin against float64, and single rows against rows in a batch."""

import jax
import jax.numpy as jnp
import numpy as np

from seerjax.backends.native import rotation
from seerjax.ops import rotary

CONFIG = rotary.RotaryConfig(head_dim=10, base=10_000.0)


def run(positions, num_rows):
  call = jax.jit(lambda positions, count: rotation.table_rows(CONFIG, positions, count))
  return [np.asarray(part) for part in call(jnp.asarray(positions, jnp.int32), num_rows)]


def test_cos_and_sin_are_those_of_float64_rounded_once():
  positions = np.array([0, 1, 2, 3, 17, 100, 1023, 40_959, 131_071])
  cos, sin = run(positions, len(positions))
  radians, _ = rotary.frequencies(CONFIG)
  angles = (positions.astype(np.float32)[:, None] * radians[None]).astype(np.float64)
  np.testing.assert_allclose(cos, np.cos(angles), rtol=6e-8, atol=1e-12)
  np.testing.assert_allclose(sin, np.sin(angles), rtol=6e-8, atol=1e-12)


def test_a_row_alone_has_the_bits_of_the_row_among_others():
  positions = np.arange(500, 564)
  cos, sin = run(positions, 64)
  for row in (0, 7, 63):
    alone = run(positions[row : row + 1], 1)
    np.testing.assert_array_equal(alone[0][0], cos[row])
    np.testing.assert_array_equal(alone[1][0], sin[row])


def test_rows_past_the_last_one_turn_by_nothing():
  cos, sin = run(np.full(8, 9), 3)
  assert (cos[3:] == 1).all() and (sin[3:] == 0).all() and (sin[:3] != 0).all()
