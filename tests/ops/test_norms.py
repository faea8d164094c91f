"""RMS norm: the definition at every size; a row's bits depend on that row only."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seerjax import numerics as numerics_lib
from seerjax.ops import norms

NUMERICS = numerics_lib.NumericsConfig(row_tile=4, backend="tiled")
SIZES = (0, 1, 3, 4, 5, 11)


def inputs(num_rows, features=13, dtype=jnp.float32, seed=0):
  rng = np.random.default_rng(seed)
  x = jnp.asarray(rng.standard_normal((num_rows, features)) * 3, dtype)
  return x, jnp.asarray(1 + rng.standard_normal(features), dtype)


@functools.partial(jax.jit, static_argnames="numerics")
def norm(x, scale, numerics=NUMERICS):
  return norms.rms_norm(x, scale, eps=1e-3, numerics=numerics)


def test_a_row_by_hand():
  x = jnp.asarray([[3.0, 4.0, 0.0, 0.0]])  # Mean square 25 / 4.
  found = norms.rms_norm(x, jnp.asarray([1.0, 2.0, 3.0, 4.0]), eps=0.0, numerics=NUMERICS)
  np.testing.assert_allclose(found, [[1.2, 3.2, 0.0, 0.0]], rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("num_rows", SIZES)
def test_values_and_gradients_are_the_definitions(num_rows):
  x, scale = inputs(num_rows)
  weights, _ = inputs(num_rows, seed=1)

  def loss(function, x, scale):
    return jnp.sum(function(x, scale) * weights)

  reference = functools.partial(norms.rms_norm_reference, eps=1e-3)
  found = norm(x, scale)
  np.testing.assert_allclose(found, reference(x, scale), rtol=2e-6, atol=1e-6)
  gradient = jax.grad(loss, argnums=(1, 2))
  for got, expected in zip(gradient(norm, x, scale), gradient(reference, x, scale)):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("of_x, of_scale", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_rows_keep_their_dtype_beside_a_scale_of_another(of_x, of_scale):
  (x, _), (_, scale) = inputs(5, dtype=of_x), inputs(5, dtype=of_scale)
  found = norm(x, scale)
  assert found.dtype == of_x
  unit = norms.rms_norm_reference(x, jnp.ones(13), eps=1e-3).astype(of_x).astype(jnp.float32)
  expected = unit * scale.astype(jnp.float32)[None]
  tolerance = 2**-7 if of_x == "bfloat16" else 1e-6
  np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=tolerance)
  of_sum = jax.grad(lambda *both: norm(*both).astype(jnp.float32).sum(), argnums=(0, 1))
  assert [one.dtype for one in of_sum(x, scale)] == [of_x, of_scale]


def test_bfloat16_rounds_before_the_scale():
  x, scale = inputs(5, dtype=jnp.bfloat16)
  found = norm(x, scale)
  assert found.dtype == jnp.bfloat16
  unit = norms.rms_norm_reference(x, jnp.ones(13), eps=1e-3).astype(jnp.bfloat16)
  expected = (unit * scale[None]).astype(jnp.float32)
  np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=2**-7)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_has_its_bits_alone_in_a_batch_permuted_and_under_a_gradient(dtype):
  x, scale = inputs(11, features=200, dtype=dtype)
  whole = np.asarray(norm(x, scale))
  order = np.random.default_rng(2).permutation(11)
  np.testing.assert_array_equal(norm(x[order], scale), whole[order])
  for count in (1, 4, 5):
    np.testing.assert_array_equal(norm(x[:count], scale), whole[:count])

  def loss(x):
    y = norm(x, scale)
    return jnp.sum(y.astype(jnp.float32)), y

  (_, under_gradient), _ = jax.jit(jax.value_and_grad(loss, has_aux=True))(x)
  np.testing.assert_array_equal(under_gradient, whole)


def test_a_row_of_zeros_stays_zero_with_a_finite_gradient():
  gradient = jax.grad(lambda x: jnp.sum(norm(x, jnp.ones(13))))(jnp.zeros((2, 13)))
  assert bool(jnp.isfinite(gradient).all())
  np.testing.assert_array_equal(norm(jnp.zeros((2, 13)), jnp.ones(13)), np.zeros((2, 13)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_added_to_one_scale_in_float32(dtype):
  x, scale = inputs(5, dtype=dtype)
  found = norms.rms_norm_rows(x, scale - 1, 1e-3, "1 + w")
  assert found.dtype == dtype
  exact = 1 + (scale - 1).astype(jnp.float32)
  expected = norms.rms_norm_reference(x.astype(jnp.float32), exact, eps=1e-3)
  # One rounding alone.
  tolerance = 2**-8 if dtype == "bfloat16" else 1e-6
  np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=tolerance, atol=1e-6)


def test_a_weight_of_zero_may_keep_a_row():
  x = jnp.asarray([[3.0, 4.0]])
  found = norms.rms_norm_rows(x, jnp.zeros(2), 0.0, "1 + w")
  np.testing.assert_allclose(found, [[3 / 12.5**0.5, 4 / 12.5**0.5]], rtol=1e-6)
  assert not norms.rms_norm_rows(x, jnp.zeros(2), 0.0).any()
