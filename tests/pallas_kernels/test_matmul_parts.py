"""The sum of a contraction's parts: one tree, its roundings, its gradient, errors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from kernel_arrays import long, needs_interpreter
import numpy as np
import pytest

from pallas_kernels import gpu, matmul_parts

interpreted = jax.jit(
  functools.partial(matmul_parts.add_partials, interpret=True), static_argnames="out_dtype"
)


def array(*shape: int, seed: int = 0, dtype=jnp.float32) -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@needs_interpreter
@pytest.mark.parametrize("parts, rows", [(8, 17), long(1, 1), long(4, 16), long(2, 0), long(2, 33)])
def test_parts_are_added_as_one_tree_and_rounded_before_the_stream(parts, rows):
  partials, stream = array(parts, rows, 192), array(rows, 192, seed=1, dtype=jnp.bfloat16)
  single = interpreted(partials)
  np.testing.assert_array_equal(single, matmul_parts.reference(partials))
  found = interpreted(partials, stream=stream, out_dtype=jnp.bfloat16)
  expected = matmul_parts.reference(partials, stream, out_dtype=jnp.bfloat16)
  assert found.dtype == jnp.bfloat16
  np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))
  if parts == 8:
    fold = functools.reduce(jnp.add, list(partials))
    assert (np.asarray(single) != np.asarray(fold)).any()
    once = (single + stream.astype(jnp.float32)).astype(jnp.bfloat16)
    assert (found != once).any()


@needs_interpreter
def test_every_part_and_the_stream_get_the_sums_gradient():
  partials, stream = array(2, 3, 64), array(3, 64, seed=1, dtype=jnp.bfloat16)
  call = functools.partial(interpreted, out_dtype=jnp.bfloat16)
  y, pull = jax.vjp(lambda p, s: call(p, stream=s), partials, stream)
  dpartials, dstream = pull(y)
  np.testing.assert_array_equal(dpartials, jnp.stack([y, y]).astype(jnp.float32))
  assert dstream.dtype == jnp.bfloat16 and (dstream == y).all()


def test_an_odd_part_waits_for_the_next_round():
  values = [1.0, 2.0**-24, 2.0**-24]
  singles = [np.float32(value) for value in values]
  assert matmul_parts.add_tree(singles) == np.float32(1)
  assert matmul_parts.add_tree([np.float32(2.0**-24)] * 2 + [np.float32(1)]) > 1


def test_it_lowers_for_a_gpu():
  struct = jax.ShapeDtypeStruct
  call = functools.partial(matmul_parts.add_partials, out_dtype=jnp.bfloat16)
  for rows in (1, 1000):
    shapes = struct((8, rows, 4096), jnp.float32), struct((rows, 4096), jnp.bfloat16)
    assert "mosaic_gpu" in gpu.lower_for_cuda(lambda p, s: call(p, stream=s), *shapes)
