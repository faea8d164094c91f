"""The two tile loops: gradients of the plain function; bits do not depend on other rows."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seerjax import numerics as numerics_lib, parallel
from seerjax.backends import choice
from seerjax.ops import linear, logprobs, norms, tiles

NUMERICS = numerics_lib.NumericsConfig(row_tile=4, reduction_shards=8, backend="tiled")
UNTILED = numerics_lib.NumericsConfig(row_tile=4, reduction_shards=8, backend="untiled")


def array(*shape, dtype=jnp.float32, seed=0):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def mixed(weights, rows, one):
  """Uses int leaves of both sides, and returns float and int leaves."""
  del one
  x, shift = rows
  y = jnp.tanh(x @ weights["w"]) + weights["table"][shift]
  return {"y": y, "picked": shift + weights["offset"], "norm": jnp.sum(x * x, axis=1)}


def mixed_arguments(num_rows, dtype=jnp.float32):
  weights = {
    "w": array(7, 5, dtype=dtype),
    "table": array(3, 5, dtype=dtype, seed=1),
    "offset": jnp.int32(2),
  }
  shift = jnp.asarray(np.random.default_rng(2).integers(0, 3, num_rows), jnp.int32)
  return weights, (array(num_rows, 7, dtype=dtype, seed=3), shift)


def loss_of(apply):
  """The sum of a function's results, and the results."""

  def loss(floats, weights, rows):
    weights = {**weights, "w": floats["w"], "table": floats["table"]}
    out = apply(weights, (floats["x"], rows[1]))
    y, norm = (out[name].astype(jnp.float32) for name in ("y", "norm"))
    return jnp.sum(jnp.sin(y)) + jnp.sum(norm**2), out

  return loss


@pytest.mark.thorough
@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 5, 11])
def test_rows_and_their_gradients_are_those_of_the_plain_function(num_rows):
  weights, rows = mixed_arguments(num_rows)
  floats = {"w": weights["w"], "table": weights["table"], "x": rows[0]}

  def tiled(weights, rows):
    return tiles.map_rows(mixed, weights, rows, jnp.int32(num_rows), NUMERICS)

  def plain(weights, rows):
    return mixed(weights, rows, jnp.int32(1))

  results = []
  for apply in (tiled, plain):
    gradient = jax.jit(jax.grad(loss_of(apply), has_aux=True))
    results.append(gradient(floats, weights, rows))
  (found_gradient, found), (expected_gradient, expected) = results
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
    found_gradient,
    expected_gradient,
  )


def test_rows_beyond_the_count_are_not_computed_and_get_no_gradient():
  weights, rows = mixed_arguments(11)

  def loss(x, num_rows):
    out = tiles.map_rows(mixed, weights, (x, rows[1]), num_rows, NUMERICS)
    return jnp.sum(out["y"]) + jnp.sum(out["norm"]), out

  run = jax.jit(jax.grad(loss, has_aux=True))
  _, whole = run(rows[0], jnp.int32(11))
  gradient, out = run(rows[0], jnp.int32(3))
  np.testing.assert_array_equal(out["y"][:3], whole["y"][:3])
  np.testing.assert_array_equal(out["y"][4:], np.zeros((7, 5), np.float32))
  assert np.all(np.isfinite(out["y"]))
  assert np.any(gradient[:3] != 0)
  np.testing.assert_array_equal(gradient[3:], np.zeros((8, 7), np.float32))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_long_backward_pass_runs_in_chunks_and_says_the_same(dtype):
  count = tiles.BACKWARD_ROWS * 2 + 3
  weights, rows = mixed_arguments(count, dtype)
  numerics = numerics_lib.NumericsConfig(row_tile=64, reduction_shards=8, backend="tiled")
  floats = {"w": weights["w"], "table": weights["table"], "x": rows[0]}

  def tiled(weights, rows):
    return tiles.map_rows(mixed, weights, rows, jnp.int32(count - 1), numerics)

  def plain(weights, rows):
    out = mixed(weights, rows, jnp.int32(1))
    return jax.tree.map(lambda leaf: leaf[: count - 1], out)

  found, _ = jax.jit(jax.grad(loss_of(tiled), has_aux=True))(floats, weights, rows)
  # Chunks are added in float32: a plain bfloat16 sum stops at 256 rows of about one.
  exact = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), floats)
  expected, _ = jax.jit(jax.grad(loss_of(plain), has_aux=True))(exact, weights, rows)
  tolerance = 1e-5 if dtype == jnp.float32 else 0.1  # In bfloat16 a chunk's own sums are coarse.
  for name, leaf in expected.items():
    assert found[name].dtype == dtype
    size = float(jnp.max(jnp.abs(leaf)))
    np.testing.assert_allclose(
      found[name].astype(jnp.float32), leaf.astype(jnp.float32), atol=tolerance * size, rtol=0
    )


def network(x, scale, w, tokens, num_rows, numerics):
  """Two layers and scored tokens, with work between the loops that XLA would like to fuse."""
  backend = choice.backend_of(numerics)
  for _ in range(2):
    norm = lambda scale, x, _: norms.rms_norm_rows(x, scale, 1e-6)
    x = backend.map_rows(norm, scale, x, num_rows)
    x = backend.map_rows(lambda w, x, _: jnp.tanh(linear.dot(x, w)) + x, w, x, num_rows)

  def score(_, rows, one):
    logits, tokens = rows
    whole = dataclasses.replace(numerics, reduction_shards=1)
    return logprobs.score_rows(logits, logits, tokens, one, whole).logprob

  return x, backend.map_rows(score, (), (x * 3, tokens), num_rows)


def network_arguments():
  tokens = jnp.asarray(np.random.default_rng(4).integers(0, 65, 48), jnp.int32)
  return array(48, 65), jnp.full(65, 1.3), array(65, 65, seed=1), tokens


@functools.partial(jax.jit, static_argnums=(5, 6))
def run_network(x, scale, w, tokens, num_rows, is_known, numerics):
  count = jnp.int32(x.shape[0]) if is_known else num_rows
  return network(x, scale, w, tokens, count, numerics)


@pytest.mark.thorough
@pytest.mark.parametrize("is_known", [False, True], ids=["traced", "known"])
@pytest.mark.parametrize("num_rows", [5, 16, 17])
def test_a_row_has_its_bits_in_any_number_of_tiles(num_rows, is_known):
  # 16 rows are one whole tile: nothing is padded, and slicing the tile is the identity. A known
  # count is a known trip count, unless it is hidden.
  numerics = numerics_lib.NumericsConfig(row_tile=16, reduction_shards=8, backend="tiled")
  x, scale, w, tokens = network_arguments()
  whole = run_network(x, scale, w, tokens, jnp.int32(48), False, numerics)
  count = jnp.int32(num_rows)
  found = run_network(x[:num_rows], scale, w, tokens[:num_rows], count, is_known, numerics)
  for part, wanted in zip(found, whole):
    np.testing.assert_array_equal(part, wanted[:num_rows])


def test_a_tile_has_two_rows_at_least():
  # A product of one row is fused with adjacent operations: an adapter's bits then depended on the
  # mesh.
  shapes = set()

  def function(weights, rows, one):
    del weights, one
    shapes.add(rows.shape)
    return rows

  alone = dataclasses.replace(NUMERICS, row_tile=1)
  rows = array(3, 5)
  out = tiles.map_rows(function, (), rows, jnp.int32(3), alone)
  np.testing.assert_array_equal(out, rows)
  assert shapes == {(2, 5)} and tiles.whole(3, tiles.tile_rows(alone)) == 4


def test_values_under_a_gradient_have_the_same_bits():
  numerics = numerics_lib.NumericsConfig(row_tile=16, reduction_shards=8, backend="tiled")
  x, scale, w, tokens = network_arguments()
  whole = run_network(x, scale, w, tokens, jnp.int32(48), False, numerics)

  def loss(x, w):
    out = network(x, scale, w, tokens[:16], jnp.int32(16), numerics)
    return jnp.sum(out[1]), out

  (_, found), _ = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x[:16], w)
  for part, wanted in zip(found, whole):
    np.testing.assert_array_equal(part, wanted[:16])


def test_untiled_rows_follow_the_batch():
  # Twin that must differ; otherwise the tests above would show nothing.
  x, scale, w = array(48, 192), jnp.full(192, 1.3), array(192, 192)
  tokens = jnp.zeros(48, jnp.int32)
  whole = run_network(x, scale, w, tokens, jnp.int32(48), False, UNTILED)
  differing = 0
  for count in (1, 16):
    found = run_network(x[:count], scale, w, tokens[:count], jnp.int32(count), False, UNTILED)
    differing += sum(int(np.sum(np.asarray(a) != b[:count])) for a, b in zip(found, whole))
  assert differing > 0


# Slabs.


def slab_function(shared, slab):
  x, index = shared
  w, table = slab
  return {"y": jnp.tanh(x @ w), "row": table[index]}


@pytest.mark.thorough
@pytest.mark.parametrize("axis", [None, "model"])
@pytest.mark.parametrize("num_slabs", [1, 2, 8])
def test_slabs_and_their_gradients_are_those_of_the_plain_function(num_slabs, axis):
  x, w = array(5, 7), array(num_slabs, 7, 3, seed=1)
  table, index = jnp.arange(num_slabs * 4, dtype=jnp.int32).reshape(num_slabs, 4), jnp.int32(2)

  def looped(x, w, one):
    out = tiles.map_slabs(slab_function, (x, index), (w, table), one, axis)
    return jnp.sum(jnp.sin(out["y"])), out

  def plain(x, w):
    parts = [slab_function((x, index), (w[i], table[i])) for i in range(num_slabs)]
    out = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    return jnp.sum(jnp.sin(out["y"])), out

  def on_mesh(function):
    if axis is None:
      return jax.jit(function)
    everywhere = dict(mesh=parallel.make_mesh(), in_specs=jax.P(), out_specs=jax.P())
    return jax.jit(jax.shard_map(function, check_vma=False, **everywhere))

  (_, found), gradient = on_mesh(jax.value_and_grad(looped, (0, 1), has_aux=True))(
    x, w, jnp.int32(1)
  )
  (_, expected), expected_gradient = jax.value_and_grad(plain, (0, 1), has_aux=True)(x, w)
  np.testing.assert_allclose(found["y"], expected["y"], rtol=1e-6, atol=1e-6)
  np.testing.assert_array_equal(found["row"], table[:, 2])
  for got, want in zip(gradient, expected_gradient):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
  # The value computed under a gradient has the same bits.
  _, alone = on_mesh(looped)(x, w, jnp.int32(1))
  np.testing.assert_array_equal(found["y"], alone["y"])


def test_the_hidden_one_is_one():
  for anchor in (0, 1, 17):
    assert int(jax.jit(tiles.traced_one)(jnp.int32(anchor))) == 1
