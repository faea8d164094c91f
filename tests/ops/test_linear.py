"""Products over slabs: the definition at every size; a row's bits depend on that row only."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seerjax import numerics as numerics_lib, parallel
from seerjax.backends import choice
from seerjax.ops import linear

NUMERICS = numerics_lib.NumericsConfig(row_tile=4, backend="tiled")
UNTILED = numerics_lib.NumericsConfig(row_tile=4, backend="untiled")
SIZES = (0, 1, 3, 4, 5, 11)


def array(*shape, dtype=jnp.float32, seed=0):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def network(x, up, down, numerics):
  """Columns, a nonlinearity, a contraction: f[n, d], f[r, d, e], f[r, e, d] -> f[n, d]."""

  def rows(weights, x, one):
    up, down = weights
    inner = jnp.tanh(linear.columns(x, up, one, None))
    return linear.contract(inner, down, one, None)

  return choice.backend_of(numerics).map_rows(rows, (up, down), x, jnp.int32(x.shape[0]))


def network_reference(x, up, down):
  wide = jnp.swapaxes(up, 0, 1).reshape(x.shape[1], -1)
  inner = jnp.tanh(linear.linear_reference(x, wide))
  return linear.linear_reference(inner, down.reshape(-1, down.shape[2]))


run = jax.jit(network, static_argnums=3)


@pytest.mark.few(4)
@pytest.mark.parametrize("num_slabs", [1, 2, 8])
@pytest.mark.parametrize("num_rows", SIZES)
def test_values_and_gradients_are_the_definitions(num_rows, num_slabs):
  args = array(num_rows, 13), array(num_slabs, 13, 3, seed=1), array(num_slabs, 3, 13, seed=2)
  weights = array(num_rows, 13, seed=3)
  np.testing.assert_allclose(run(*args, NUMERICS), network_reference(*args), rtol=1e-5, atol=1e-5)
  found = jax.grad(lambda args: jnp.sum(run(*args, NUMERICS) * weights))(args)
  expected = jax.grad(lambda args: jnp.sum(network_reference(*args) * weights))(args)
  for got, want in zip(found, expected):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_has_its_bits_alone_in_a_batch_permuted_and_under_a_gradient(dtype):
  x = array(11, 65, dtype=dtype)
  up, down = array(8, 65, 24, dtype=dtype, seed=1), array(8, 24, 65, dtype=dtype, seed=2)
  whole = np.asarray(run(x, up, down, NUMERICS))
  assert whole.dtype == dtype
  order = np.random.default_rng(4).permutation(11)
  np.testing.assert_array_equal(run(x[order], up, down, NUMERICS), whole[order])
  for count in (1, 2, 4, 5, 8, 9):  # 1, 2 and 3 tiles.
    np.testing.assert_array_equal(run(x[:count], up, down, NUMERICS), whole[:count])

  def loss(args):
    y = run(*args, NUMERICS)
    return jnp.sum(y.astype(jnp.float32)), y

  (_, under_gradient), _ = jax.jit(jax.value_and_grad(loss, has_aux=True))((x, up, down))
  np.testing.assert_array_equal(under_gradient, whole)


def test_untiled_rows_follow_the_batch():
  # Twin that must differ; otherwise the test above would show nothing.
  x, up, down = array(64, 65), array(8, 65, 24, seed=1), array(8, 24, 65, seed=2)
  whole = np.asarray(run(x, up, down, UNTILED))
  parts = [np.asarray(run(x[:count], up, down, UNTILED)) for count in (1, 2, 3, 5, 16)]
  assert any((part != whole[: len(part)]).any() for part in parts)


@pytest.mark.parametrize("tensor_parallel_size", [1, 2, 8])
def test_devices_change_no_bit(tensor_parallel_size):
  x, up, down = array(5, 33), array(8, 33, 6, seed=1), array(8, 6, 33, seed=2)
  one = jnp.int32(1)

  def both(x, up, down, one, axis=None):
    inner = linear.columns(x, up, one, axis)
    return linear.contract(inner, down, one, axis)

  expected = jax.jit(both)(x, up, down, one)
  sharded = jax.shard_map(
    functools.partial(both, axis="model"),
    mesh=parallel.make_mesh(tensor_parallel_size=tensor_parallel_size),
    in_specs=(jax.P(), jax.P("model"), jax.P("model"), jax.P()),
    out_specs=jax.P(),
    check_vma=False,
  )
  np.testing.assert_array_equal(jax.jit(sharded)(x, up, down, one), expected)


def test_slabs_are_added_as_a_balanced_tree_by_hand():
  # In f32, 1 is lost next to 2 ** 24, but 1 + 1 is not: only the tree's order keeps it.
  slabs = jnp.asarray([2.0**24, 0, 1, 1], jnp.float32)
  assert float(parallel.tree_sum(slabs)) == 2.0**24 + 2
  assert float(((slabs[0] + slabs[1]) + slabs[2]) + slabs[3]) == 2.0**24
  values = [jnp.float32(v) for v in (2.0**24, 0, 1, 1, 2)]
  assert float(parallel.tree_sum_list(values)) == 2.0**24 + 4


def test_sums_are_float32_and_rounded_once():
  x = jnp.full((1, 257), 1, jnp.bfloat16)
  w = jnp.full((257, 1), 1, jnp.bfloat16)
  assert float(linear.dot(x, w)[0, 0]) == 257  # 256 in bfloat16.
  # Two slabs of 257: 514 is no bfloat16, and rounds to 512 or 516 once, at the end.
  one = jnp.int32(1)
  found = linear.contract(x[None].repeat(2, 0), w[None].repeat(2, 0), one, None)
  assert found.dtype == jnp.bfloat16
  assert float(found[0, 0]) == float(jnp.bfloat16(514))


def test_a_contraction_of_one_term_stays_a_product_by_hand():
  # (1 + 2^-12)^2 - 1 is 2^-11 + 2^-24. The product is rounded to 1 + 2^-11 before the sum; one
  # fused multiply-add would keep the last term.
  value = jnp.full((2, 1), 1 + 2**-12, jnp.float32)
  found = jax.jit(lambda x, w, y: y + linear.dot(x, w))(value, value.T, jnp.full((2, 2), -1.0))
  np.testing.assert_array_equal(found, np.full((2, 2), 2.0**-11, np.float32))
