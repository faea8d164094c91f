"""Weights of routers in training: which are rounded, decayed and updated."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import refusals
import tiny_model
import trainers

from seerjax.layer_kinds import Experts
from seerjax.models import parameters, weights
from seerjax.models.decoder import decide
from seerjax.ops.routing import RoutingConfig
from seerjax.run import config as run_config
from seerjax.trainer import losses, optimizer as optimizer_lib, routes, shards

NUMERICS = dataclasses.replace(tiny_model.BFLOAT16, reduction_shards=1, expert_tile=2)
ROUTING = RoutingConfig(num_experts=5, num_chosen=2, scoring="sigmoid", has_correction_bias=True)
DENSE = tiny_model.SMALLEST.layers[0]
MODEL = dataclasses.replace(
  tiny_model.SMALLEST,
  layers=(DENSE, DENSE.changed(feed_forward=Experts(routing=ROUTING, expert_size=3))),
)
BIAS = "router_correction_bias"


def master(bias=None):
  """f32 masters with a correction bias that bfloat16 cannot express."""
  params = tiny_model.random_master(MODEL, NUMERICS)
  own = 1 + 1e-4 * np.arange(5) if bias is None else bias
  layer = {**params["layers"][1], BIAS: jnp.asarray(own, jnp.float32)}
  return {**params, "layers": [params["layers"][0], layer]}


def named(tree, names):
  """Pairs of (whether a leaf has one of the names, its bits)."""
  flags, leaves = jax.tree.leaves(parameters.are_named(tree, names)), jax.tree.leaves(tree)
  return [(is_one, np.asarray(leaf).tobytes()) for is_one, leaf in zip(flags, leaves, strict=True)]


def test_a_correction_bias_is_not_rounded_and_all_else_is():
  masters = master()
  params = parameters.compute_params(masters, NUMERICS)
  found, expected = (tree["layers"][1][BIAS] for tree in (params, masters))
  assert found.dtype == jnp.float32 and found.tobytes() == expected.tobytes()
  dtypes = [leaf.dtype.name for leaf in jax.tree.leaves(params)]
  assert sorted(set(dtypes)) == ["bfloat16", "float32"] and dtypes.count("float32") == 1
  decoder = decide(MODEL, NUMERICS)
  weights.check(params, decoder, dtype=jnp.bfloat16, what="params")
  rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
  with pytest.raises(ValueError, match=rf"{BIAS}.*got bfloat16\[5\], expected float32\[5\]"):
    weights.check(rounded, decoder, dtype=jnp.bfloat16, what="params")


def updated(optimizer, params, count=2):
  """Weights after some updates by a gradient of everything, and the optimiser's state."""
  gradient = jax.tree.map(lambda leaf: np.sin(7 * np.asarray(leaf) + 1), params)

  @jax.jit
  def update(params, state):
    # The optimiser gets the norm from the trainer.
    updates, state = optimizer.update(gradient, state, params, gradient_norm=jnp.float32(3))
    return optax.apply_updates(params, updates), state

  state = optimizer.init(params)
  for _ in range(count):
    params, state = update(params, state)
  return params, state


@pytest.mark.standard_promotion
def test_updates_are_adamws_and_a_correction_bias_keeps_its_bits():
  config = optimizer_lib.OptimizerConfig(learning_rate=0.02, weight_decay=0.3)
  usual = optax.chain(
    optimizer_lib.clip_by_norm(config.max_gradient_norm),
    optax.adamw(0.02, config.b1, config.b2, weight_decay=0.3),
  )
  first = master([0.25, -0.0, 0.0, 3e-39, -7.0])
  own = optimizer_lib.make_optimizer(config)
  (found, state), (expected, usual_state) = (updated(one, first) for one in (own, usual))
  # A checkpoint of one is a checkpoint of the other.
  assert jax.tree.structure(state) == jax.tree.structure(usual_state)
  for (is_bias, bits), (_, decayed), (_, before) in zip(
    *(named(tree, (BIAS,)) for tree in (found, expected, first)), strict=True
  ):
    assert bits == (before if is_bias else decayed) and decayed != before
  # Devices still share masters and moments.
  shapes = parameters.shapes(MODEL, 1)
  assert shards.is_elementwise(optax.with_extra_args_support(own), shapes)


@pytest.mark.standard_promotion
def test_frozen_routers_keep_their_bits_and_all_others_move_as_before():
  config = optimizer_lib.OptimizerConfig(learning_rate=0.02, weight_decay=0.1)
  frozen = optimizer_lib.make_optimizer(dataclasses.replace(config, freezes_routers=True))
  found, free = (
    updated(one, master())[0] for one in (frozen, optimizer_lib.make_optimizer(config))
  )
  count = 0
  for (is_router, bits), (_, moved), (_, before) in zip(
    *(named(tree, parameters.ROUTERS) for tree in (found, free, master())), strict=True
  ):
    assert bits == (before if is_router else moved)
    count += is_router
  assert count == 2


def test_directions_are_those_of_counts_from_their_mean():
  found = routes.directions(np.asarray([5, 3, 3, 1]))
  assert found.tolist() == [1, 0, 0, -1] and found.dtype == np.float32
  assert routes.directions(np.asarray([2**40, 2**40 + 1])).tolist() == [-1, 1]


@pytest.mark.standard_promotion
def test_a_correction_bias_moves_against_the_tokens_of_its_experts():
  config = optimizer_lib.OptimizerConfig(
    learning_rate=0.02, weight_decay=0.1, router_bias_speed=0.125
  )
  trainer = dataclasses.replace(
    trainers.make(
      optimizer=optimizer_lib.make_optimizer(config),
      decoder=decide(MODEL, NUMERICS),
      page_size=8,
      rows_per_micro_batch=16,
    ),
    moves_router_biases=True,
  )
  first = master(5 * [0.5])
  counts = routes.Routes(np.asarray([4, 0, 2, 2, 2]), None, None)
  gradient = jax.tree.map(lambda leaf: jnp.full_like(leaf, 0.25), first)
  gradient = routes.with_directions(gradient, {1: counts})
  state, norms = trainer.update(trainer.init(first), gradient)
  assert state.params["layers"][1][BIAS].tolist() == [0.375, 0.625, 0.5, 0.5, 0.5]
  # Neither the norm nor the moments see the directions.
  others = sum(leaf.size for leaf in jax.tree.leaves(first)) - 5
  np.testing.assert_allclose(norms["grad_norm"], 0.25 * others**0.5, rtol=1e-5)
  mean = state.opt_state[1][0].mu["layers"][1]
  assert not np.any(mean[BIAS]) and np.all(mean["router"])


def decided(model, lora_rank=0, **changes):
  optimizer = optimizer_lib.OptimizerConfig(**changes)
  config = run_config.RunConfig(optimizer=optimizer, lora_rank=lora_rank).shared
  return lambda: run_config.for_model(dataclasses.replace(config, max_tokens=8), model)


@refusals.table(
  (decided(tiny_model.SMALLEST, freezes_routers=True),
   "OptimizerConfig.freezes_routers: got True for a model without experts, expected False; leave"),
  (decided(tiny_model.SMALLEST, router_bias_speed=0.001),
   "OptimizerConfig.router_bias_speed: got 0.001 and a model without correction biases, expected",
   "leave it out"),
  (decided(MODEL, lora_rank=2, router_bias_speed=0.001),
   "router_bias_speed: got 0.001 and lora_rank=2, expected 0, as no correction bias is trained"),
  (lambda: trainers.make(
     loss=losses.LossConfig(balance_coefficient=0.01), page_size=8, rows_per_micro_batch=16,
     decoder=decide(tiny_model.SMALLEST, tiny_model.ONE_SLAB)),
   "LossConfig.balance_coefficient: got 0.01 for a model without experts, expected 0; leave it"),
  (lambda: losses.LossConfig(balance="local"), "LossConfig.balance: got 'local', expected "),
  (lambda: optimizer_lib.OptimizerConfig(freezes_routers=True, router_bias_speed=0.001),
   "OptimizerConfig.router_bias_speed: got 0.001 with freezes_routers=True, expected 0, as a"),
  (lambda: trainers.make(
     decoder=decide(MODEL, NUMERICS), page_size=8, rows_per_micro_batch=16
   ).init(master([0, 0, np.nan, 0, 0])),
   "Trainer.init: params", "['layers'][1]['router_correction_bias']"),
)  # fmt: skip
def test_refusals(row):
  refusals.check(row)
