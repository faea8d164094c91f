"""Training on any mesh (instance, model) gives the bits of one device.

Scores, gradient and updated weights of drawn models are compared as bytes. The twins at the end add
in another order, or too often, and the same comparison must fail.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import subprocess
import sys

import jax
from jax import lax
import jax.numpy as jnp
from kernel_arrays import needs_interpreter
import mesh_cases
import numpy as np
import pytest
import tiny_model

from seerjax import layer_kinds, parallel
from seerjax.layer_kinds import Gated, Grouped, LayerConfig
from seerjax.models import config as model_config
from seerjax.ops import rotary, tiles

AXIS = parallel.MODEL_AXIS
BACKENDS = pytest.mark.parametrize("backend", ["tiled", "native"])
# The smallest decoder of eight slabs, and the same sizes in one slab.
SMALLEST = model_config.TransformerConfig(
  vocab_size=40,
  hidden_size=9,
  layers=layer_kinds.uniform(
    LayerConfig(
      attention=Grouped(
        num_heads=16,
        num_kv_heads=8,
        head_dim=8,
        has_qk_norms=True,
        has_qkv_biases=True,
        rotary=rotary.RotaryConfig(head_dim=8),
      ),
      feed_forward=Gated(intermediate_size=24),
    ),
    1,
  ),
  max_model_len=64,
)


def smallest(backend: str, *, is_tied: bool = True) -> mesh_cases.Case:
  numerics = dataclasses.replace(tiny_model.NUMERICS, backend=backend)
  return mesh_cases.Case(dataclasses.replace(SMALLEST, is_tied=is_tied), numerics)


# Two whole trainers are compiled.
@pytest.mark.thorough
@BACKENDS
def test_the_model_axis_learns_the_bits_of_one_device(backend, seed, tell_events):
  events = collections.Counter()
  case = smallest(backend, is_tied=bool(seed % 2))
  meshes = mesh_cases.meshes_of(case)
  mesh_cases.compare(case, [mesh for mesh in meshes if mesh[1] > 1][seed % 5], events)
  tell_events(f"smallest, {backend}", events, ("comparisons",))


@pytest.mark.thorough
@BACKENDS
def test_every_mesh_learns_the_bits_of_one_device(backend, tell_events):
  events = collections.Counter()
  case = smallest(backend)
  for mesh in mesh_cases.meshes_of(case):
    mesh_cases.compare(case, mesh, events)
  tell_events(f"meshes, {backend}", events, ("several instances", "one slab a device"))


@pytest.mark.thorough
@BACKENDS
@pytest.mark.parametrize("rank", [0, 2])
def test_heads_that_slabs_share_learn_the_bits_of_one_device(rank, backend, seed, tell_events):
  events = collections.Counter()
  case = smallest(backend, is_tied=bool(seed % 2))
  config = case.config.changed(num_heads=8, num_kv_heads=1 + seed % 2)
  case = dataclasses.replace(case, config=config, rank=rank)
  meshes = [mesh for mesh in mesh_cases.meshes_of(case) if mesh[1] > 1]
  for mesh in (meshes[seed % len(meshes)], (1, 8)):
    mesh_cases.compare(case, mesh, events)
  expected = ("key heads shared by slabs", "key heads shared by devices")
  tell_events(f"shared heads, rank {rank}, {backend}", events, expected)


@pytest.mark.thorough
@pytest.mark.skipif(not parallel.BARRIERS_HOLD, reason="every device adds the whole tree here")
def test_sums_whose_devices_add_a_share_each_learn_the_bits_of_one_device(seed, tell_events):
  events = collections.Counter()
  case = smallest("tiled")
  # Wide enough that the sum of a tile of rows is divided between devices.
  config = dataclasses.replace(case.config, hidden_size=1024)
  numerics = dataclasses.replace(case.numerics, row_tile=64)
  assert numerics.row_tile * config.hidden_size * 4 >= parallel.SHARED_OUT_BYTES
  case = dataclasses.replace(case, config=config, numerics=numerics, rows=64)
  meshes = [mesh for mesh in mesh_cases.meshes_of(case) if mesh[1] > 1]
  mesh_cases.compare(case, meshes[seed % len(meshes)], events)
  tell_events("sums in shares", events, ("comparisons",))


@pytest.mark.long
@BACKENDS
@pytest.mark.parametrize("block", range(5))
def test_drawn_models_learn_the_bits_of_one_device_on_every_mesh(block, backend, seed, tell_events):
  rng = np.random.default_rng((seed, block))
  events = collections.Counter()
  for index in range(6):
    case = mesh_cases.draw(rng, backend)
    while index == 5 and not mesh_cases.shares_heads(case):
      case = mesh_cases.draw(rng, backend)
    for mesh in mesh_cases.meshes_of(case):
      mesh_cases.compare(case, mesh, events)
    events["models"] += 1
  expected = ("comparisons", "several instances", "one slab a device", "model axis of 2", "models")
  expected += ("key heads shared by slabs", "key heads shared by devices")
  tell_events(f"block {block}, {backend}", events, expected)


@contextlib.contextmanager
def busy_loops(count: int):
  """Processes that compete with this one for the CPU."""
  loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
  yield
  for loop in loops:
    loop.kill()
    loop.wait()


@pytest.mark.long
@BACKENDS
@pytest.mark.parametrize("tensor_parallel_size", [2, 4, 8])
def test_a_thousand_steps_under_load_have_one_digest(tensor_parallel_size, backend, tell_events):
  case = smallest(backend)
  expected = mesh_cases.learn(case, updates=False).digest
  events = collections.Counter()
  with busy_loops(2):
    for _ in range(1000):
      found = mesh_cases.learn(case, (1, tensor_parallel_size), updates=False).digest
      assert found == expected, f"step {events['steps']}: got {found}, expected {expected}"
      events["steps"] += 1
  tell_events(f"model axis of {tensor_parallel_size}, {backend}", events, ("steps",))


# Parts in which twins differ by one line.

ROWS, WIDTH, FEATURES, SLABS = 5, 33, 7, 8


def on_devices(function, *arguments, count: int):
  """Runs a function of slabbed arguments on `num_devices` devices of the model axis."""
  mesh = parallel.make_mesh(tensor_parallel_size=count)
  run = jax.shard_map(
    function, mesh=mesh, in_specs=(jax.P(AXIS),) * len(arguments), out_specs=jax.P(),
    check_vma=False,
  )  # fmt: skip
  return np.asarray(jax.jit(run)(*arguments))


@functools.cache
def operands() -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns shared values f32[n, d], slabs f32[r, d, e], cotangents f32[r, n, e]."""
  rng = np.random.default_rng(7)
  shapes = (ROWS, WIDTH), (SLABS, WIDTH, FEATURES), (SLABS, ROWS, FEATURES)
  x, w, g = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
  return x, w, g


def shared_gradient(axis, w, g):
  """Returns the cotangent of a layer's norm from the slabs that read it."""
  x = operands()[0]
  dot = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)

  def loss(x):
    out = tiles.map_slabs(lambda x, w: dot(x, w), x, w, tiles.traced_one(jnp.int32(5)), axis)
    return jnp.sum(parallel.tree_sum(parallel.gather_slabs(jnp.sum(out * g, axis=(1, 2)), axis)))

  return jax.grad(loss)(x)


def test_what_all_slabs_share_gets_one_partial_a_slab_on_any_number_of_devices():
  _, w, g = operands()
  expected = np.asarray(jax.jit(functools.partial(shared_gradient, None))(w, g))
  reference = np.einsum("rne,rde->nd", *(np.asarray(a, np.float64) for a in (g, w)))
  np.testing.assert_allclose(expected, reference, rtol=2e-5, atol=1e-5)
  for count in (2, 4, 8):
    found = on_devices(functools.partial(shared_gradient, AXIS), w, g, count=count)
    assert found.tobytes() == expected.tobytes()


def test_twin_psum_in_the_place_of_the_tree_follows_the_number_of_devices():
  _, w, g = operands()

  def summed(w, g):
    partials = jnp.einsum("rne,rde->rnd", g, w, precision=lax.Precision.HIGHEST)
    own = functools.reduce(jnp.add, list(partials))
    return lax.psum(own, AXIS)

  found = {on_devices(summed, w, g, count=count).tobytes() for count in (1, 2, 4, 8)}
  assert len(found) > 1


def test_twin_a_gathering_without_a_gradient_of_its_own_counts_each_device():
  _, w, g = operands()

  def gradient(gather, w, g):
    loss = lambda w: jnp.sum(gather(w) * gather(g))
    return lax.all_gather(jax.grad(loss)(w), AXIS, axis=0, tiled=True)

  theirs = lambda slabs: lax.all_gather(slabs, AXIS, axis=0, tiled=True)
  ours = lambda slabs: parallel.gather_slabs(slabs, AXIS)
  g = jnp.broadcast_to(g[:, :, :1], (SLABS, ROWS, 1))
  w = w[:, :ROWS, :1]
  for count in (2, 8):
    right = on_devices(functools.partial(gradient, ours), w, g, count=count)
    wrong = on_devices(functools.partial(gradient, theirs), w, g, count=count)
    np.testing.assert_array_equal(right, g)
    np.testing.assert_allclose(wrong, count * np.asarray(g), rtol=1e-6)


def test_twin_what_all_slabs_share_added_once_a_device_follows_their_number():
  _, w, g = operands()

  def added(w, g):
    # Each device has the whole gradient of a shared value; a sum over devices counts it again.
    return lax.psum(shared_gradient(AXIS, w, g), AXIS)

  one = on_devices(added, w, g, count=1)
  for count in (2, 4, 8):
    found = on_devices(added, w, g, count=count)
    np.testing.assert_allclose(found, count * one, rtol=1e-6)
    assert found.tobytes() != one.tobytes()


def test_twin_a_norm_over_devices_follows_their_number():
  _, w, _ = operands()

  def over_devices(w):
    return jnp.sqrt(lax.psum(jnp.sum(jnp.square(w)), AXIS))

  def over_slabs(w):
    squares = jnp.sum(jnp.square(w), axis=(1, 2))
    return jnp.sqrt(parallel.tree_sum(parallel.gather_slabs(squares, AXIS)))

  w = w * jnp.asarray(10.0 ** np.arange(SLABS), jnp.float32)[:, None, None] ** 0.5
  norms = {float(on_devices(over_devices, w, count=count)) for count in (1, 2, 4, 8)}
  assert len(norms) > 1
  assert len({float(on_devices(over_slabs, w, count=count)) for count in (1, 2, 4, 8)}) == 1


@pytest.mark.thorough
def test_twin_one_bit_of_one_slabs_gradient_is_noticed():
  case = smallest("native")
  found = mesh_cases.learn(case, updates=False)
  other = mesh_cases.Learnt(found)
  name = next(name for name in other if "down" in name)
  bits = bytearray(other[name])
  bits[0] ^= 1
  other[name] = bytes(bits)
  assert found.differing(other) == [name] and found.digest != other.digest


def test_gather_slabs_takes_leaves_of_unlike_dtypes_in_one_collective_and_gives_them_back():
  rng = np.random.default_rng(1)
  tree = {
    "a": jnp.asarray(rng.standard_normal((8, 3)), jnp.float32),
    "b": jnp.asarray(rng.standard_normal((8, 2, 2)), jnp.bfloat16),
    "c": jnp.arange(8, dtype=jnp.int32),
    "d": jnp.zeros((8, 0), jnp.float32),
  }
  mesh = parallel.make_mesh(tensor_parallel_size=4)
  run = jax.jit(
    jax.shard_map(
      lambda tree: parallel.gather_slabs(tree, AXIS),
      mesh=mesh,
      in_specs=(jax.P(AXIS),),
      out_specs=jax.P(),
      check_vma=False,
    )
  )
  found = run(tree)
  assert run.lower(tree).as_text().count("stablehlo.all_gather") == 1
  for name, leaf in tree.items():
    assert found[name].dtype == leaf.dtype
    assert np.asarray(found[name]).tobytes() == np.asarray(leaf).tobytes()


# Errors.


@needs_interpreter
def test_kernels_do_not_learn_on_several_devices_of_the_model_axis():
  numerics = dataclasses.replace(
    tiny_model.BFLOAT16, backend="pallas_interpreted", kv_split=64, reduction_shards=2
  )
  config = tiny_model.CONFIG.changed(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_heads=2,
    num_kv_heads=2,
    head_dim=64,
    rotary=rotary.RotaryConfig(head_dim=64),
  )
  case = mesh_cases.Case(config, numerics)
  with pytest.raises(NotImplementedError, match="got tensor_parallel_size=2 .* expected 1"):
    mesh_cases.trainer_of(case, (1, 2))
