"""The handler of experts against XLA and the definition, for any rows, threads and mesh."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model

from seerjax import numerics as numerics_lib, parallel
from seerjax.backends.native import experts, threads
from seerjax.backends.numba_cpu import NumbaCpu
from seerjax.backends.protocol import MixtureStage
from seerjax.backends.tiled import Tiled
from seerjax.layer_kinds import Experts
from seerjax.models import experts as model_experts, parameters
from seerjax.ops import moe, routing, tiles
from seerjax.ops.routing import RoutingConfig

# No width is a whole vector. A bias gives one expert every row and another none.
NUM_EXPERTS, SLABS, NUM_ROWS = 24, 8, 77
EVERY, NONE, TIED = 5, 9, (4, 6)
rule = functools.partial(RoutingConfig, num_experts=NUM_EXPERTS, num_chosen=5)
RULES = {
  "biased": Experts(routing=rule(scoring="softmax_of_chosen", has_bias=True), expert_size=11),
  "renormalised": Experts(routing=rule(is_renormalised=True), expert_size=19),
  "grouped": Experts(
    routing=rule(
      scoring="sigmoid",
      is_renormalised=True,
      num_groups=6,
      num_chosen_groups=3,
      scale=2.5,
      has_correction_bias=True,
    ),
    expert_size=9,
    shared_size=40,
  ),
}
CASES = pytest.mark.parametrize(
  ("name", "dtype"), [(name, dtype) for name in RULES for dtype in ("float32", "bfloat16")]
)


def config_of(name):
  layers = (tiny_model.ODD.layers[0].changed(feed_forward=RULES[name]),)
  return dataclasses.replace(tiny_model.ODD, layers=layers)


def numerics_of(dtype):
  return numerics_lib.NumericsConfig(
    compute_dtype=dtype, reduction_shards=SLABS, row_tile=4, expert_tile=4, backend="native"
  )


@functools.cache
def weights_of(name, dtype):
  weights = dict(tiny_model.random_params(config_of(name), numerics_of(dtype))["layers"][0])
  rng = np.random.default_rng(3)
  array = lambda *shape: jnp.asarray(0.4 * rng.standard_normal(shape), dtype)
  router = array(tiny_model.ODD.hidden_size, NUM_EXPERTS)
  # Two experts with equal scores: the lower id comes first.
  weights["router"] = router.at[:, TIED[1]].set(router[:, TIED[0]])
  for bias in ("router_bias", "router_correction_bias"):
    if bias in weights:
      own = array(NUM_EXPERTS).at[EVERY].set(8).at[NONE].set(-20)
      weights[bias] = own.at[jnp.asarray(TIED)].set(0.5)
  # Weights large enough that a sum in another order has other bits.
  for leaf in ("expert_gate_up", "expert_down"):
    weights[leaf] = array(*weights[leaf].shape)
  return weights


def stage_of(name, axis=None):
  return MixtureStage(
    config_of(name).layer_shape(0), axis, model_experts.routed_rows, model_experts.added_rows
  )


@functools.cache
def rows_of(dtype, count=NUM_ROWS):
  kind, rng = tiny_model.ODD.layers[0].attention, np.random.default_rng(4)
  array = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
  mixed = array(count, kind.num_kv_heads, kind.group, kind.head_dim)
  return array(count, tiny_model.ODD.hidden_size), mixed


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def run(backend, name, axis, weights, rows, num_rows):
  return backend.mixture(stage_of(name, axis), weights, rows, num_rows)[0]


def wide(tree):
  return jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float32), tree)


def assert_same(some, other):
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), wide(some), wide(other))


def backends_of(dtype):
  numerics = numerics_of(dtype)
  return NumbaCpu(numerics), Tiled(dataclasses.replace(numerics, backend="tiled"))


# The definition.


@pytest.mark.few(1)
@CASES
def test_rows_choose_by_the_rule_and_are_the_weighted_sums(name, dtype):
  """In float32, the experts and the sums are those of the definition."""
  weights, (x, _) = weights_of(name, dtype), rows_of(dtype)
  stage, count = stage_of(name), jnp.int32(NUM_ROWS - 3)
  zeros = jnp.zeros_like(x)
  own = {leaf: weights[leaf] for leaf in weights if "expert" in leaf or "router" in leaf}
  own["mlp_norm"] = weights["mlp_norm"]
  found, _, ids, _ = jax.jit(functools.partial(experts.routed, stage))(own, x, zeros, count)
  normed = Tiled(numerics_of(dtype)).rms_norm_rows(x, own["mlp_norm"], stage.shape.norm_eps)
  router, kind = routing.router_of(own), stage.shape.kind.feed_forward.routing
  wanted = routing.route_rows(normed, router, kind)
  found, ids = wide(found), np.asarray(ids)
  live = slice(0, NUM_ROWS - 3)
  # A rounding to bfloat16 may move a close choice.
  same = np.all(ids[live] == np.asarray(wanted[0])[live], axis=1)
  assert np.all(same) if dtype == "float32" else np.mean(same) > 0.9
  assert np.all(np.diff(ids[live], axis=1) > 0) and not np.any(ids[NUM_ROWS - 3 :])
  has = [np.any(ids[live] == index, axis=1) for index in TIED]
  assert np.any(has[0] & has[1]) and not np.any(has[1] & ~has[0])
  if "router_bias" in own:
    counts = np.bincount(ids[live].reshape(-1), minlength=NUM_EXPERTS)
    assert counts[EVERY] == NUM_ROWS - 3 and counts[NONE] == 0
  slabs = {"gate_up": own["expert_gate_up"], "down": own["expert_down"]}
  expected = wide(moe.experts_reference(normed, *wanted, slabs))[live][same]
  close = 1e-5 if dtype == "float32" else 2e-2
  assert np.abs(found[live][same] - expected).max() <= close * np.abs(expected).max()
  assert not np.any(found[NUM_ROWS - 3 :])


@pytest.mark.thorough
@pytest.mark.few(2)
@pytest.mark.parametrize("count", [1, 7, NUM_ROWS])
@CASES
def test_values_and_gradients_agree_with_xla(name, dtype, count):
  weights, rows = weights_of(name, dtype), rows_of(dtype, count)
  factors = jnp.asarray(np.random.default_rng(5).standard_normal(rows[0].shape), jnp.float32)

  def loss(weights, rows, backend):
    out = backend.mixture(stage_of(name), weights, rows, jnp.int32(count))[0]
    return jnp.sum(jnp.sin(out.astype(jnp.float32)) * factors), out

  gradient = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2)
  native, tiled = backends_of(dtype)
  ((_, out), slopes), ((_, other), wanted) = (
    wide(gradient(weights, rows, backend)) for backend in (native, tiled)
  )
  # A gradient's forward has the bits of the forward alone.
  assert_same(out, run(native, name, None, weights, rows, jnp.int32(count)))
  close = 1e-4 if dtype == "float32" else 0.15
  for found, expected in zip(jax.tree.leaves((out, slopes)), jax.tree.leaves((other, wanted))):
    # In bfloat16, a close choice may move, and its row with it.
    error = np.quantile(np.abs(found - expected), 1.0 if dtype == "float32" else 0.8)
    assert error <= close * np.abs(expected).max() + 1e-6


# The order of sums, and who computes them.


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [1, 3], ids=("alone", "threads"))
@CASES
def test_a_row_has_its_bits_in_every_batch(name, dtype, number, seed):
  """Rows come in any order, with any rows behind the last one."""
  rng, weights, (x, mixed) = np.random.default_rng(seed), weights_of(name, dtype), rows_of(dtype)
  native = backends_of(dtype)[0]
  whole = np.asarray(run(native, name, None, weights, (x, mixed), jnp.int32(NUM_ROWS)))
  before = threads.process[1]
  threads.process[1] = 1 if number > 1 else before
  try:
    for size in (1, 2, 16, 66, NUM_ROWS):
      live = int(rng.integers(1, size + 1))
      rows = rng.permutation(NUM_ROWS)[:size]
      behind = lambda leaf, rows=rows, live=live: leaf[rows].at[live:].set(np.nan)
      batch = behind(x), behind(mixed)
      found = np.asarray(run(native, name, None, weights, batch, jnp.int32(live)))
      np.testing.assert_array_equal(found[:live], whole[rows[:live]])
      assert not np.any(found[live:])
  finally:
    threads.process[1] = before


@pytest.mark.thorough
@pytest.mark.few(1)
@CASES
def test_devices_and_a_gradient_change_no_bit(name, dtype):
  weights, rows = weights_of(name, dtype), rows_of(dtype)
  native, count, axis = backends_of(dtype)[0], jnp.int32(NUM_ROWS - 2), parallel.MODEL_AXIS
  factors = jnp.asarray(np.random.default_rng(5).standard_normal(rows[0].shape), jnp.float32)

  def loss(weights, rows, axis):
    out = native.mixture(stage_of(name, axis), weights, rows, count)[0]
    return jnp.sum(jnp.sin(out.astype(jnp.float32)) * factors), out

  gradient = jax.value_and_grad(loss, (0, 1), has_aux=True)
  alone = jax.jit(gradient, static_argnums=2)(weights, rows, None)
  assert np.any(np.asarray(alone[1][0]["expert_down"]))
  specs = parameters.specs_of({"layers": [weights]})["layers"][0]
  of_rows = jax.P(), jax.P(None, axis)
  for devices in (1, 2, 4, 8):
    spread = jax.shard_map(
      functools.partial(gradient, axis=axis),
      mesh=parallel.make_mesh(tensor_parallel_size=devices),
      in_specs=(specs, of_rows),
      out_specs=((jax.P(), jax.P()), (specs, of_rows)),
      check_vma=False,
    )
    assert_same(jax.jit(spread)(weights, rows), alone)


def test_twin_one_chain_over_all_experts_is_noticed():
  name, dtype = "renormalised", "float32"
  weights, rows = weights_of(name, dtype), rows_of(dtype)
  native, count = backends_of(dtype)[0], jnp.int32(NUM_ROWS)
  one_slab = lambda leaf: leaf.reshape(1, NUM_EXPERTS, *leaf.shape[2:])
  chain = weights | {leaf: one_slab(weights[leaf]) for leaf in ("expert_gate_up", "expert_down")}
  found = [np.asarray(run(native, name, None, own, rows, count)) for own in (weights, chain)]
  np.testing.assert_allclose(*found, rtol=0, atol=1e-4)
  assert np.any(found[0] != found[1])


@pytest.mark.thorough
def test_stacked_layers_are_read_where_they_lie():
  name, dtype = "grouped", "float32"
  weights, rows = weights_of(name, dtype), rows_of(dtype)
  native, count = backends_of(dtype)[0], jnp.int32(NUM_ROWS)
  expected = run(native, name, None, weights, rows, count)
  layered = ("out", "gate_up", "down", "expert_gate_up", "expert_down")
  stacked = lambda leaf: tiles.LayerSlabs(jnp.stack([jnp.full_like(leaf, 7), leaf]), jnp.int32(1))
  own = {leaf: stacked(weights[leaf]) if leaf in layered else weights[leaf] for leaf in weights}
  assert_same(run(native, name, None, own, rows, count), expected)
