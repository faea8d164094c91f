"""Trained weights are sharded over all devices, and their norm has one device's bits."""

from __future__ import annotations

import collections
import functools

import jax
import jax.numpy as jnp
import mesh_cases
import numpy as np
import optax
import pytest
import tiny_model

from seerjax import checkpoint, numerics as numerics_lib, parallel
from seerjax.models import lora, parameters, presets
from seerjax.models.decoder import decide
from seerjax.run import policy as policy_lib
from seerjax.trainer import losses, optimizer as optimizer_lib, shards, state as state_lib, step

MESHES = ((8, 1), (4, 2), (2, 4), (1, 8), (3, 2), (7, 1), (2, 1))
WARMED_UP = optimizer_lib.OptimizerConfig(learning_rate=1e-4, warmup_steps=3, weight_decay=0.1)


def mesh_of(instances: int, model: int) -> jax.sharding.Mesh:
  return parallel.make_mesh(data_parallel_size=instances, tensor_parallel_size=model)


def f32(*shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize(
  ("name", "shape", "mesh", "expected"),
  [
    # Slabs over `model`, then the larger of the others over `instance`.
    ("qkv", (8, 6, 4), (2, 4), jax.P("model", "instance", None)),
    ("down", (8, 4, 6), (2, 4), jax.P("model", None, "instance")),
    ("qkv_bias", (8, 6), (3, 2), jax.P("model", "instance")),
    # An indivisible axis stays whole.
    ("qkv", (8, 6, 4), (4, 2), jax.P("model", None, None)),
    # Without slabs: over all devices, `model` first, or over one axis, or none.
    ("embed", (16, 6), (2, 4), jax.P(("model", "instance"), None)),
    ("embed", (12, 6), (2, 4), jax.P("model", None)),
    ("embed", (10, 6), (2, 4), jax.P("instance", None)),
    ("embed", (6, 16), (2, 4), jax.P(None, ("model", "instance"))),
    ("final_norm", (9,), (2, 4), jax.P(None)),
  ],
)
def test_places_by_hand(name, shape, mesh, expected):
  assert shards.specs({name: f32(*shape)}, mesh_of(*mesh)) == {name: expected}


def test_stacked_layers_and_adapters_lie_as_single_layers_do():
  mesh, numerics = mesh_of(2, 4), tiny_model.NUMERICS
  for layers in (
    parameters.shapes(tiny_model.CONFIG, 8), lora.shapes(tiny_model.CONFIG, numerics, 2)
  ):  # fmt: skip
    one = shards.specs(layers, mesh)["layers"][0]
    stacked = jax.eval_shape(parameters.stacked, layers)
    found = shards.specs(stacked, mesh)["layers"]
    behind = jax.tree.map(lambda spec: jax.P(None, *spec), one, is_leaf=shards.is_spec)
    assert found == behind


def test_a_norm_is_that_of_all_elements():
  rng = np.random.default_rng(1)
  shapes = jax.tree.leaves(parameters.shapes(tiny_model.SMALLEST, 1))
  values = [np.asarray(rng.standard_normal(s.shape), np.float32) for s in shapes]
  tree = parameters.shapes(tiny_model.SMALLEST, 1)
  tree = jax.tree.unflatten(jax.tree.structure(tree), values)
  expected = np.sqrt(sum(np.sum(np.square(one.astype(np.float64))) for one in values))
  np.testing.assert_allclose(jax.jit(shards.norm)(tree), expected, rtol=3e-7)
  assert float(shards.norm({"w": jnp.asarray([3.0, 0.0, 4.0])})) == 5.0
  assert np.isnan(float(shards.norm({"w": jnp.asarray([3.0, np.nan])})))


@pytest.mark.parametrize(
  ("make", "expected"),
  [
    (lambda: optimizer_lib.make_optimizer(WARMED_UP), True),
    (lambda: optax.sgd(0.1, momentum=0.9), True),
    (lambda: optax.lion(0.1), True),
    # A norm of its own, over what it is handed; factored moments.
    (lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), False),
    (lambda: optax.adafactor(0.1, min_dim_size_to_factor=1), False),
    (lambda: optax.lamb(0.1), False),
    # It depends on the shape, which differs for a part.
    (lambda: optax.stateless(lambda g, _: jax.tree.map(lambda x: x / x.shape[0], g)), False),
  ],
)
def test_what_may_work_on_parts(make, expected):
  optimizer = optax.with_extra_args_support(make())
  assert shards.is_elementwise(optimizer, {"w": f32(4, 3), "v": f32(2)}) == expected


def updated(case: mesh_cases.Case, mesh, optimizer, master, gradients):
  """Returns (state after the gradients, on the host; norms; arrays of devices that have parts)."""
  mesh = mesh_of(*mesh)
  trainer = step.Trainer(decide(case.config, case.numerics), losses.dapo(), optimizer, mesh, 1, 4)
  state, norms = trainer.init(jax.tree.map(jnp.asarray, master)), []
  specs = state_lib.params_specs(master, optimizer, mesh)
  place = lambda leaf, spec: jax.device_put(leaf, jax.sharding.NamedSharding(mesh, spec))
  num_shared = sum(not leaf.is_fully_replicated for leaf in jax.tree.leaves(state.params))
  for gradient in gradients:
    placed = jax.tree.map(place, gradient, specs)
    state, found = trainer.update(state, placed)
    norms.append({name: float(value) for name, value in found.items()})
  return jax.device_get(state), norms, num_shared


def bits(tree) -> list[bytes]:
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def drawn(rng: np.random.Generator, case: mesh_cases.Case):
  """Returns masters and two gradients of all sizes."""
  shapes = parameters.shapes(case.config, case.numerics.reduction_shards)
  if case.rank:
    shapes = lora.shapes(case.config, case.numerics, case.rank)
  draw = lambda s: np.asarray(
    rng.standard_normal(s.shape) * 10.0 ** rng.integers(-3, 3), np.float32
  )
  return jax.tree.map(draw, shapes), [jax.tree.map(draw, shapes) for _ in range(2)]


def compare(rng, case, meshes, events):
  """Asserts that updates on meshes have the bits of one device."""
  master, gradients = drawn(rng, case)
  optimizer = optimizer_lib.make_optimizer(mesh_cases.OPTIMIZER)
  expected, norms, _ = updated(case, (1, 1), optimizer, master, gradients)
  assert all(one["grad_norm"] > mesh_cases.OPTIMIZER.max_gradient_norm for one in norms)
  for mesh in meshes:
    if case.numerics.reduction_shards % mesh[1]:
      continue
    found, theirs, num_shared = updated(case, mesh, optimizer, master, gradients)
    assert theirs == norms, f"mesh {mesh}; {case}"
    assert bits(found) == bits(expected), f"mesh {mesh}; {case}"
    events["updates"] += len(gradients)
    events["arrays in parts"] += num_shared
    events["arrays whole"] += len(jax.tree.leaves(master)) - num_shared
    events["adapters"] += case.rank > 0


@pytest.mark.thorough
def test_an_update_on_parts_has_the_bits_of_one_device(seed, tell_events):
  rng, events = np.random.default_rng(seed), collections.Counter()
  compare(rng, mesh_cases.draw(rng, "tiled", max_layers=1), [(4, 2)], events)
  tell_events("one", events, ("updates", "arrays in parts"))


@pytest.mark.long
@pytest.mark.parametrize("block", range(4))
def test_drawn_updates_on_parts_have_the_bits_of_one_device(block, seed, tell_events):
  rng, events = np.random.default_rng((seed, block)), collections.Counter()
  for _ in range(3):
    compare(rng, mesh_cases.draw(rng, "tiled"), MESHES, events)
  tell_events(f"block {block}", events, ("updates", "arrays in parts", "arrays whole"))


@pytest.mark.thorough
def test_an_optimiser_with_a_norm_of_its_own_has_the_bits_of_one_device_too(seed):
  rng = np.random.default_rng(seed)
  case = mesh_cases.Case(tiny_model.SMALLEST, tiny_model.ONE_SLAB)
  master, gradients = drawn(rng, case)
  optimizer = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(0.1))
  expected, norms, _ = updated(case, (1, 1), optimizer, master, gradients[:1])
  found, theirs, num_shared = updated(case, (2, 1), optimizer, master, gradients[:1])
  assert not num_shared and theirs == norms and bits(found) == bits(expected)


@pytest.mark.thorough
def test_a_checkpoint_goes_on_on_another_mesh_to_the_same_bits(tmp_path, seed):
  rng = np.random.default_rng(seed)
  case = mesh_cases.Case(tiny_model.CONFIG.changed(num_layers=1), tiny_model.NUMERICS)
  master, gradients = drawn(rng, case)
  optimizer = optimizer_lib.make_optimizer(mesh_cases.OPTIMIZER)
  expected, *_ = updated(case, (1, 1), optimizer, master, gradients)

  def trainer_on(mesh):
    decoder = decide(case.config, case.numerics)
    return step.Trainer(decoder, losses.dapo(), optimizer, mesh_of(*mesh), 1, 4)

  def placed(trainer, gradient):
    specs = state_lib.params_specs(gradient, optimizer, trainer.mesh)
    place = lambda leaf, spec: jax.device_put(leaf, jax.sharding.NamedSharding(trainer.mesh, spec))
    return jax.tree.map(place, gradient, specs)

  before = trainer_on((2, 1))
  state, _ = before.update(before.init(master), placed(before, gradients[0]))
  checkpoint.save(tmp_path, 1, state, host_state={}, fingerprint={"a": "b"})
  for mesh in ((1, 2), (4, 1)):
    trainer = trainer_on(mesh)
    like = state_lib.abstract_state(master, optimizer, trainer.mesh)
    restored = checkpoint.restore(tmp_path, like, fingerprint={"a": "b"}).state
    places = jax.tree.map(lambda leaf: leaf.sharding, (like, restored))
    assert jax.tree.leaves(places[0]) == jax.tree.leaves(places[1])
    assert bits(restored) == bits(state)
    found, _ = trainer.update(restored, placed(trainer, gradients[1]))
    assert bits(found) == bits(expected)


def test_twin_a_norm_over_devices_follows_their_number():
  rng = np.random.default_rng(3)
  tree = {"qkv": np.asarray(rng.standard_normal((8, 33, 7)) * 100, np.float32)}

  def over_devices(mesh):
    def local(tree):
      squares = sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree))
      return jnp.sqrt(jax.lax.psum(squares, mesh.axis_names))

    return local

  def found(mesh, norm):
    specs = shards.specs(tree, mesh)
    run = jax.shard_map(norm, mesh=mesh, in_specs=(specs,), out_specs=jax.P(), check_vma=False)
    return float(jax.jit(run)(tree))

  meshes = [mesh_of(*one) for one in ((1, 1), (1, 2), (3, 2), (1, 8), (3, 1))]
  ours = {found(m, functools.partial(shards.norm, of_tree=shards.specs(tree, m), mesh=m))
          for m in meshes}  # fmt: skip
  assert ours == {float(jax.jit(shards.norm)(tree))}
  assert len({found(mesh, over_devices(mesh)) for mesh in meshes}) > 1


# One device's share of a large model, from shapes alone.


def of_device(name: str, mesh: shards.Mesh) -> tuple[float, float, float]:
  """Returns bytes a device of (masters and moments, running weights, 14 bytes a parameter)."""
  model, numerics = presets.get(name), numerics_lib.NumericsConfig(compute_dtype="bfloat16")
  masters = parameters.shapes(model, 8)
  optimizer = optimizer_lib.make_optimizer(optimizer_lib.OptimizerConfig(learning_rate=1e-4))
  specs = shards.specs(masters, mesh)
  moments = jax.eval_shape(optimizer.init, masters)
  of_moments = shards.of_optimizer(optimizer, moments, specs)
  weights = policy_lib.running_shapes(policy_lib.WeightsConfig(numerics=numerics), model)
  running = shards.bytes_of(weights, parameters.specs_of(weights), mesh)
  kept = shards.bytes_of(masters, specs, mesh) + shards.bytes_of(moments, of_moments, mesh)
  return kept, running, 14 * sum(leaf.size for leaf in jax.tree.leaves(masters)) / mesh.size


# The second number, compared with 14 bytes a parameter over all devices, is from
# docs/results/cluster.md.
@pytest.mark.parametrize(
  ("name", "mesh", "of_share"),
  [("qwen3-8b", (1, 8), 1.0), ("qwen3-8b", (8, 1), 2.0), ("qwen3-32b", (4, 8), 1.429)],
)
def test_masters_and_moments_of_large_models_are_shared_out_evenly(name, mesh, of_share):
  mesh = jax.sharding.AbstractMesh(mesh, (parallel.INSTANCE_AXIS, parallel.MODEL_AXIS))
  kept, running, share = of_device(name, mesh)
  assert kept <= 1.001 * share * 12 / 14
  assert round((kept + running) / share, 3) == of_share
