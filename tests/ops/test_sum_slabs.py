"""Sums over the slabs of all devices have the bits of one tree, in one piece and in shares."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from seerjax import parallel

AXIS = parallel.MODEL_AXIS
SLABS = 8
# Places of a sum: a few, as many as devices cannot share, and what they add in shares.
SHAPES = ((3, 5), (parallel.SHARED_OUT_BYTES // 4 + 1,), (8, parallel.SHARED_OUT_BYTES // 32))
SUMMED = lambda slabs: parallel.sum_slabs(slabs, AXIS)


def drawn(shape: tuple[int, ...], seed: int) -> jax.Array:
  """Returns f32[r, ...] of many magnitudes, with a sum that depends on the order."""
  rng = np.random.default_rng((seed, *shape))
  scale = 10.0 ** rng.integers(-6, 7, (SLABS, *shape))
  return jnp.asarray(rng.standard_normal((SLABS, *shape)) * scale, jnp.float32)


def on_devices(function: Callable, slabs: jax.Array, count: int) -> np.ndarray:
  """Runs a function of this device's slabs; every device has the result."""
  mesh = parallel.make_mesh(tensor_parallel_size=count)
  spread = jax.shard_map(
    function, mesh=mesh, in_specs=jax.P(AXIS), out_specs=jax.P(), check_vma=False
  )
  return np.asarray(jax.jit(spread)(slabs))


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=["few", "odd", "shares"])
def test_any_number_of_devices_adds_to_the_bits_of_one_tree(shape, count, seed):
  slabs = drawn(shape, seed)
  expected = np.asarray(parallel.tree_sum(slabs))
  assert on_devices(SUMMED, slabs, count).tobytes() == expected.tobytes()


def test_twin_psum_has_other_bits_than_the_tree(seed):
  slabs = drawn(SHAPES[-1], seed)
  by_psum = lambda own: lax.psum(jnp.sum(own, axis=0), AXIS)
  expected = np.asarray(parallel.tree_sum(slabs))
  assert on_devices(by_psum, slabs, 4).tobytes() != expected.tobytes()


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("shape", SHAPES[::2], ids=["few", "shares"])
def test_every_slab_gets_the_cotangent_of_the_sum(shape, count, seed):
  slabs, weights = drawn(shape, seed), drawn(shape, seed + 1)[0]

  def gradient(own: jax.Array) -> jax.Array:
    found = jax.grad(lambda own: jnp.sum(weights * SUMMED(own)))(own)
    return parallel.gather_slabs(found, AXIS)

  found = on_devices(gradient, slabs, count)
  assert found.tobytes() == np.broadcast_to(np.asarray(weights), slabs.shape).tobytes()


def test_several_arrays_go_together_and_no_array_is_none(seed):
  one, two = drawn((3, 5), seed), drawn((7,), seed)
  mesh = parallel.make_mesh(tensor_parallel_size=4)
  summed = jax.shard_map(
    SUMMED, mesh=mesh, in_specs=(jax.P(AXIS),), out_specs=jax.P(), check_vma=False
  )
  found = jax.jit(summed)({"one": one, "two": two})
  for name, slabs in (("one", one), ("two", two)):
    assert np.asarray(found[name]).tobytes() == np.asarray(parallel.tree_sum(slabs)).tobytes()
  assert parallel.sum_slabs((), None) == ()
