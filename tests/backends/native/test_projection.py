"""The output projection alone has the bits of a layer in which the MLP adds zero."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model

from seerjax.backends.native import layers, projection, threads
from seerjax.backends.protocol import Stage
from seerjax.models import mlp

CONFIG, SLABS = tiny_model.ODD, 4
STAGE = Stage(CONFIG.layer_shape(0), None, mlp.output_rows)
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
# Widths of a slab that are no whole vector; columns of several items.
WIDTH, INPUTS = 201, 19


def weights_of(dtype):
  rng = np.random.default_rng(3)
  return {
    "out": jnp.asarray(rng.standard_normal((SLABS, INPUTS, WIDTH)), dtype),
    "mlp_norm": jnp.ones((WIDTH,), dtype),
    "gate_up": jnp.zeros((SLABS, WIDTH, 2), dtype),
    "down": jnp.zeros((SLABS, 1, WIDTH), dtype),
  }


def rows_of(dtype, count):
  rng = np.random.default_rng(4)
  array = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
  return array(count, WIDTH), array(count, SLABS, 1, INPUTS)


alone = jax.jit(functools.partial(projection.projected, STAGE))
whole = jax.jit(functools.partial(layers.after_attention, STAGE))


def bits(tree):
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("number", [1, 3], ids=("alone", "threads"))
@DTYPES
def test_rows_have_the_bits_of_a_layer_with_an_empty_mlp(dtype, number):
  weights, before = weights_of(dtype), threads.process[1]
  threads.process[1] = 1 if number > 1 else before
  try:
    for count, live in ((1, 1), (7, 4), (64, 64), (65, 65), (150, 131), (150, 0)):
      rows = rows_of(dtype, count)
      found = alone(weights, rows, jnp.int32(live))
      assert bits(found) == bits(whole(weights, rows, jnp.int32(live)))
      assert np.any(found) == (live > 0) and not np.any(found[live:])
  finally:
    threads.process[1] = before


@DTYPES
def test_a_negative_zero_becomes_zero(dtype):
  """A product that is flushed to -0.0 leaves a -0.0 among the rows; the empty MLP adds 0.0."""
  weights = weights_of(dtype)
  weights["out"] = jnp.full_like(weights["out"], 1e-30)
  x, mixed = jnp.full((2, WIDTH), -0.0, dtype), jnp.full((2, SLABS, 1, INPUTS), -1e-30, dtype)
  for run in (alone, whole):
    found = np.asarray(run(weights, (x, mixed), jnp.int32(2))).astype(np.float32)
    assert not np.any(found) and not np.any(np.signbit(found))


@DTYPES
def test_a_gradient_is_that_of_the_whole_layer(dtype):
  weights, rows, count = weights_of(dtype), rows_of(dtype, 9), jnp.int32(7)

  def loss(weights, rows, run):
    out = run(weights, rows, count)
    return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

  gradient = jax.jit(jax.grad(loss, (0, 1), has_aux=True), static_argnums=2)
  found = gradient(weights, rows, functools.partial(projection.projected, STAGE))
  expected = gradient(weights, rows, functools.partial(layers.after_attention, STAGE))
  assert np.any(found[0][0]["out"]) and np.any(found[0][1][1])
  assert bits(found) == bits(expected)
