"""Rotary positions: by hand, against the definition in complex numbers, and bit by bit."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seerjax import numerics as numerics_lib
from seerjax.ops import rotary, tiles

NUMERICS = numerics_lib.NumericsConfig(row_tile=4, backend="tiled")
PLAIN = rotary.RotaryConfig(head_dim=10, base=500.0)
LLAMA3 = rotary.RotaryConfig(
  head_dim=64, base=500_000.0, scaling="llama3", factor=8.0, original_context=8192
)
YARN = rotary.RotaryConfig(
  head_dim=128, base=1_000_000.0, scaling="yarn", factor=4.0, original_context=32_768
)
CONFIGS = {
  "none": PLAIN,
  "linear": rotary.RotaryConfig(head_dim=10, base=500.0, scaling="linear", factor=4.0),
  "llama3": LLAMA3,
  "yarn": YARN,
}
SIZES = (0, 1, 3, 4, 5, 11)


def table(positions, config):
  return table_of(jnp.asarray(positions, jnp.int32), len(positions), config)


def table_of(positions, count, config):
  rows = lambda _, positions, __: rotary.table_rows(positions, config)
  return tiles.map_rows(rows, (), positions, jnp.int32(count), NUMERICS)


def rotate_reference(x, positions, config):
  """The pairs as complex numbers, in float64."""
  radians, factor = rotary.frequencies(config)
  first, second = np.split(np.asarray(x, np.float64), 2, axis=-1)
  angles = np.asarray(positions, np.float64)[:, None] * np.asarray(radians, np.float64)
  turned = (first + 1j * second) * (factor * np.exp(1j * angles))[:, None, :]
  return np.concatenate([turned.real, turned.imag], axis=-1)


def rotate(x, positions, config):
  return rotary.rotate_rows(x, *table(positions, config))


# Frequencies.


def test_plain_and_linear_frequencies_by_hand():
  config = rotary.RotaryConfig(head_dim=4, base=100.0)
  np.testing.assert_allclose(rotary.frequencies(config)[0], [1, 0.1], rtol=1e-7)
  config = rotary.RotaryConfig(head_dim=4, base=100.0, scaling="linear", factor=4.0)
  np.testing.assert_allclose(rotary.frequencies(config)[0], [0.25, 0.025], rtol=1e-7)
  assert rotary.frequencies(config)[1] == 1.0


def test_llama3_keeps_short_wavelengths_divides_long_ones_and_mixes_between():
  plain = 1 / 500_000.0 ** (np.arange(0, 64, 2) / 64)
  found, factor = rotary.frequencies(LLAMA3)
  turns = 8192 * plain / (2 * math.pi)
  np.testing.assert_allclose(found[turns > 4], plain[turns > 4], rtol=1e-6)
  np.testing.assert_allclose(found[turns < 1], plain[turns < 1] / 8, rtol=1e-6)
  between = (turns > 1) & (turns < 4)
  assert between.any() and factor == 1.0
  smooth = (turns[between] - 1) / 3
  expected = plain[between] * (smooth + (1 - smooth) / 8)
  np.testing.assert_allclose(found[between], expected, rtol=1e-6)


def test_yarn_keeps_fast_pairs_divides_slow_ones_and_scales_attention():
  plain = 1 / 1_000_000.0 ** (np.arange(0, 128, 2) / 128)
  found, factor = rotary.frequencies(YARN)
  # 32 turns over 32768 positions at pair 23.6, 1 turn at pair 39.7.
  np.testing.assert_allclose(found[:24], plain[:24], rtol=1e-6)
  np.testing.assert_allclose(found[40:], plain[40:] / 4, rtol=1e-6)
  ramp = (np.arange(24, 40) - 23) / (40 - 23)
  np.testing.assert_allclose(found[24:40], plain[24:40] * (1 - ramp * 0.75), rtol=1e-6)
  assert factor == pytest.approx(0.1 * math.log(4) + 1)
  fixed = rotary.RotaryConfig(head_dim=8, scaling="yarn", factor=4.0, attention_factor=0.7)
  assert rotary.frequencies(fixed)[1] == 0.7
  one = rotary.RotaryConfig(head_dim=8, scaling="yarn", factor=1.0)
  np.testing.assert_allclose(
    rotary.frequencies(one)[0], rotary.frequencies(rotary.RotaryConfig(head_dim=8))[0]
  )
  assert rotary.frequencies(one)[1] == 1.0


# Rotation.


def test_a_quarter_turn_by_hand():
  x = jnp.asarray([[[1.0, 2.0]]])
  cos, sin = jnp.zeros((1, 1)), jnp.ones((1, 1))
  np.testing.assert_array_equal(rotary.rotate_rows(x, cos, sin), [[[-2.0, 1.0]]])


@pytest.mark.few(1)
@pytest.mark.parametrize("num_rows", SIZES)
@pytest.mark.parametrize("scaling", CONFIGS)
def test_values_and_gradients_are_the_definitions(scaling, num_rows):
  config = CONFIGS[scaling]
  rng = np.random.default_rng(0)
  positions = rng.integers(0, 1000, num_rows)
  x = jnp.asarray(rng.standard_normal((num_rows, 3, config.head_dim)), jnp.float32)
  weights = jnp.asarray(rng.standard_normal(x.shape), jnp.float32)
  cos, sin = table(positions, config)
  found, pull = jax.vjp(lambda x: rotary.rotate_rows(x, cos, sin), x)
  # Angles up to 1000 radians carry 1e-4 of rounding in float32.
  np.testing.assert_allclose(found, rotate_reference(x, positions, config), atol=1e-3)
  # A rotation's gradient is the rotation back: the definition at negative positions.
  expected = rotate_reference(weights, -positions, config)
  np.testing.assert_allclose(pull(weights)[0], expected, atol=1e-3)


def test_scores_depend_on_distances_alone():
  rng = np.random.default_rng(1)
  q, k = (jnp.asarray(rng.standard_normal((1, 1, 10)), jnp.float32) for _ in range(2))
  scores = [
    float(jnp.sum(rotate(q, [first + 7], PLAIN) * rotate(k, [first], PLAIN)))
    for first in (0, 5, 90)
  ]
  np.testing.assert_allclose(scores, scores[0], rtol=1e-4)


def test_position_zero_turns_nothing():
  x = jnp.asarray(np.random.default_rng(2).standard_normal((2, 3, 10)), jnp.float32)
  np.testing.assert_array_equal(rotate(x, [0, 0], PLAIN), x)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_has_its_bits_alone_in_a_batch_permuted_and_under_a_gradient(dtype):
  rng = np.random.default_rng(3)
  positions = rng.integers(0, 4000, 11)
  x = jnp.asarray(rng.standard_normal((11, 2, 64)), dtype)
  whole = np.asarray(rotate(x, positions, LLAMA3))
  assert whole.dtype == dtype
  order = rng.permutation(11)
  np.testing.assert_array_equal(rotate(x[order], positions[order], LLAMA3), whole[order])
  for count in (1, 4, 5):
    np.testing.assert_array_equal(rotate(x[:count], positions[:count], LLAMA3), whole[:count])

  def loss(x):
    y = rotate(x, positions, LLAMA3)
    return jnp.sum(y.astype(jnp.float32)), y

  (_, under_gradient), _ = jax.value_and_grad(loss, has_aux=True)(x)
  np.testing.assert_array_equal(under_gradient, whole)


def test_rows_beyond_the_live_ones_are_zero():
  cos, sin = table_of(jnp.arange(12, dtype=jnp.int32), 3, PLAIN)
  np.testing.assert_array_equal(cos[4:], np.zeros((8, 5)))
  np.testing.assert_array_equal(sin[4:], np.zeros((8, 5)))


# Errors.
