"""The gradient of a head that several slabs share: the tree's sum, at every copy, on any mesh."""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_model
import trainers

from seerjax import parallel
from seerjax.models import parameters, shared_heads
from seerjax.models.decoder import decide
from seerjax.trainer import head_gradients, shards

SLABS, C = 8, 8
# One key/value head in eight slabs, and two heads in four slabs each.
CONFIGS = {
  count: tiny_model.CONFIG.changed(
    num_heads=8, num_kv_heads=count, has_qk_norms=False, has_qkv_biases=True, num_layers=2
  )
  for count in (1, 2)
}
MESHES = [(1, 2), (1, 4), (1, 8), (2, 4), (8, 1)]


def gradient_of(config, seed: int = 0):
  """Returns an f32 gradient with parts of many sizes, so that the order of a sum shows."""
  rng = np.random.default_rng(seed)
  drawn = lambda shape: rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 3, shape)
  shapes = parameters.shapes(config, SLABS)
  return jax.tree.map(lambda leaf: np.asarray(drawn(leaf.shape), np.float32), shapes)


def by_hand(leaf: np.ndarray, heads: int) -> np.ndarray:
  """Returns the leaf with ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)) of each head's copies."""
  keys = leaf[..., -2 * C :].reshape(heads, SLABS // heads, *leaf.shape[1:-1], 2 * C)
  while keys.shape[1] > 1:
    keys = keys[:, 0::2] + keys[:, 1::2]
  keys = np.repeat(keys[:, 0], SLABS // heads, axis=0)
  return np.concatenate([leaf[..., : -2 * C], keys], axis=-1)


def summed_on(mesh, gradient, config, *, is_stacked: bool = False, is_whole: bool = False):
  """Returns the result of `summed` for a gradient that is sharded as masters are."""
  gradient = parameters.stacked(gradient) if is_stacked else gradient
  specs = shards.whole(gradient) if is_whole else shards.specs(gradient, mesh)
  if mesh.size == 1:
    specs = shards.whole(gradient)
  put = lambda leaf, spec: jax.device_put(leaf, jax.sharding.NamedSharding(mesh, spec))
  placed = jax.tree.map(put, gradient, specs)
  places = jax.tree.leaves(specs, is_leaf=shards.is_spec)
  decoder = decide(config, tiny_model.NUMERICS)
  found = head_gradients.summed(placed, decoder, places, mesh)
  return parameters.unstacked(jax.device_get(found))


def mesh_of(sizes: tuple[int, int]) -> jax.sharding.Mesh:
  return parallel.make_mesh(data_parallel_size=sizes[0], tensor_parallel_size=sizes[1])


def same(found, expected) -> bool:
  pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
  return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


@pytest.mark.parametrize("heads", CONFIGS)
def test_every_copy_gets_the_sum_in_the_order_of_the_tree(heads):
  gradient = gradient_of(CONFIGS[heads])
  found = summed_on(mesh_of((1, 1)), gradient, CONFIGS[heads])
  shared_heads.check(found, CONFIGS[heads], SLABS, what="")
  for own, before in zip(found["layers"], gradient["layers"], strict=True):
    for name in own:
      wanted = by_hand(before[name], heads) if name in ("qkv", "qkv_bias") else before[name]
      np.testing.assert_array_equal(own[name], wanted)


@pytest.mark.few(1)
@pytest.mark.parametrize("heads", CONFIGS)
@pytest.mark.parametrize("is_stacked", [False, True])
def test_no_mesh_changes_a_bit_of_the_sum(heads, is_stacked):
  config = CONFIGS[heads]
  expected = summed_on(mesh_of((1, 1)), gradient_of(config), config)
  for sizes in MESHES:
    for is_whole in (False, True):
      found = summed_on(
        mesh_of(sizes), gradient_of(config), config, is_stacked=is_stacked, is_whole=is_whole
      )
      assert same(found, expected), (sizes, is_whole)


def test_stacked_layers_may_share_unlike_numbers_of_heads():
  layers = (
    CONFIGS[1].layers[0],
    CONFIGS[2].layers[0],
    CONFIGS[1].layers[0].changed(num_kv_heads=8),
  )
  config = dataclasses.replace(CONFIGS[1], layers=layers)
  gradient = gradient_of(config)
  for sizes in ((1, 1), (1, 4)):
    found = summed_on(mesh_of(sizes), gradient_of(config), config, is_stacked=True)
    for index, heads in enumerate((1, 2, 8)):
      before = gradient["layers"][index]["qkv"]
      np.testing.assert_array_equal(found["layers"][index]["qkv"], by_hand(before, heads))


def test_a_norm_counts_a_head_once():
  config = CONFIGS[2]
  decoder = decide(config, tiny_model.NUMERICS)
  gradient = jax.tree.map(jnp.asarray, gradient_of(config))
  once = head_gradients.counted(gradient, decoder)
  expected = float(jax.jit(shards.norm)(once))
  squares = sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(gradient))
  for layer in gradient["layers"]:
    for name in ("qkv", "qkv_bias"):
      later = [slab for slab in range(SLABS) if slab % 4]
      squares -= np.sum(np.square(np.asarray(layer[name])[later, ..., -2 * C :], dtype=np.float64))
  np.testing.assert_allclose(expected, squares**0.5, rtol=1e-6)
  for sizes in MESHES:
    mesh = mesh_of(sizes)
    specs = shards.specs(gradient, mesh)

    def norm(tree, mesh=mesh, specs=specs):
      return shards.norm(head_gradients.counted(tree, decoder, specs, mesh), specs, mesh)

    run = jax.shard_map(norm, mesh=mesh, in_specs=(specs,), out_specs=jax.P(), check_vma=False)
    assert float(jax.jit(run)(gradient)) == expected, sizes


# Twins.


def test_twin_a_copy_that_is_left_out_is_noticed():
  gradient, config = gradient_of(CONFIGS[1]), CONFIGS[1]
  expected = summed_on(mesh_of((1, 1)), gradient_of(config), config)
  for layer in gradient["layers"]:
    layer["qkv"][3, :, -2 * C :] = 0
  assert not same(summed_on(mesh_of((1, 1)), gradient, config), expected)


def test_twin_sums_over_devices_follow_their_number():
  keys = gradient_of(CONFIGS[1])["layers"][0]["qkv"][..., -2 * C :]

  def by_psum(own):
    return lax.psum(functools.reduce(jnp.add, list(own)), parallel.MODEL_AXIS)

  def in_device_order(own):
    parts = lax.all_gather(functools.reduce(jnp.add, list(own)), parallel.MODEL_AXIS)
    return functools.reduce(jnp.add, list(parts))

  for twin in (by_psum, in_device_order):
    found = set()
    for count in (1, 2, 4, 8):
      mesh = mesh_of((1, count))
      run = jax.shard_map(
        twin, mesh=mesh, in_specs=(jax.P(parallel.MODEL_AXIS),), out_specs=jax.P(), check_vma=False
      )
      found.add(np.asarray(jax.jit(run)(keys)).tobytes())
    assert len(found) > 1, twin


def test_an_optimizer_that_is_not_elementwise_keeps_copies_equal():
  config = CONFIGS[2]

  def turned(updates, state, params=None):
    # A slab moves by another slab's gradient, so copies of a head would part.
    del params
    return jax.tree.map(lambda leaf: jnp.roll(leaf, 1, 0), updates), state

  optimizer = optax.GradientTransformation(lambda params: optax.EmptyState(), turned)
  params = jax.tree.map(np.zeros_like, gradient_of(config))
  layout = dict(
    decoder=decide(config, tiny_model.NUMERICS), page_size=4, rows_per_micro_batch=32,
    max_num_seqs=3, max_sequence_tokens=25,
  )  # fmt: skip
  gradient = summed_on(mesh_of((1, 1)), gradient_of(config), config)
  states = []
  for sizes in ((1, 1), (1, 4)):
    trainer = trainers.make(mesh=mesh_of(sizes), optimizer=optimizer, **layout)
    state, norms = trainer.update(trainer.init(params), gradient)
    shared_heads.check(jax.device_get(state.params), config, SLABS, what="")
    states.append(jax.device_get((state.params, norms)))
  assert same(*states)
  assert np.any(np.asarray(states[0][0]["layers"][0]["qkv"]))
