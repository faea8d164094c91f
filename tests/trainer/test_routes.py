"""Use of experts: sums by hand, and the same bits for every division of a batch."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import made_rollouts
import numpy as np
import optax
import pytest
import tiny_model
import trainers

from seerjax import parallel
from seerjax.layer_kinds import Experts
from seerjax.models import parameters
from seerjax.models.decoder import decide
from seerjax.ops.routing import RoutingConfig
from seerjax.trainer import losses, packing, routes

NUMERICS = dataclasses.replace(tiny_model.NUMERICS, reduction_shards=2, expert_tile=2)
SIGMOIDS = RoutingConfig(num_experts=6, num_chosen=2, scoring="sigmoid", has_correction_bias=True)
SOFTMAX = RoutingConfig(num_experts=4, num_chosen=1)
DENSE = tiny_model.SMALLEST.layers[0].changed(num_heads=4, num_kv_heads=2)
MODEL = dataclasses.replace(
  tiny_model.SMALLEST,
  layers=tuple(
    DENSE.changed(feed_forward=Experts(routing=rule, expert_size=3)) for rule in (SIGMOIDS, SOFTMAX)
  ),
)


# By hand.


def seen(x, ids, mask, rule, router, num_rows=None):
  """`Routes` of rows f[n, E] that are their own logits."""
  watch = routes.watch_of(jnp.asarray(mask))
  backend, count = decide(MODEL, NUMERICS).backend, len(ids) if num_rows is None else num_rows
  return watch(
    backend, rule, router, jnp.asarray(x, jnp.float32), jnp.asarray(ids, jnp.int32),
    jnp.int32(count),
  )  # fmt: skip


def test_sums_of_three_rows_by_hand():
  # Softmax gives 1/2, 1/4, 1/4, then one certain row, and a row outside the loss.
  x = np.log([[2, 1, 1], [1, 1e-30, 1e-30], [1, 1, 1]])
  found = seen(
    x, [[0, 2], [0, 1], [1, 2]], [True, True, False],
    RoutingConfig(num_experts=3, num_chosen=2), {"router": jnp.eye(3)},
  )  # fmt: skip
  assert found.counts.tolist() == [2, 1, 1]
  total = routes.added([[found], [found]])[0]
  sums = routes.value_of(total.probabilities, routes.PROBABILITY_BITS)
  np.testing.assert_allclose(sums, [3, 0.5, 0.5], rtol=0, atol=1e-6)
  entropy = routes.value_of(total.entropy, routes.ENTROPY_BITS)
  np.testing.assert_allclose(entropy, 2 * 1.5 * math.log(2), rtol=0, atol=1e-6)
  numbers = routes.summarise({5: total}, 4)
  assert numbers.pop("expert_tokens.5").tolist() == [4, 2, 2]
  expected = {
    "dead_experts": 0,
    "busiest_expert": 0.5,
    "router_entropy": 0.75 * math.log(2),
    # 3 (1/2 * 3/4 + 1/4 * 1/8 + 1/4 * 1/8)
    "load_balancing_loss": 3 * (0.375 + 0.0625),
  }
  assert numbers == pytest.approx(expected, abs=1e-6) and tuple(numbers) == routes.METRICS[:4]


def test_sigmoids_are_shares_of_their_sum():
  rule = RoutingConfig(num_experts=3, num_chosen=1, scoring="sigmoid", has_correction_bias=True)
  router = {"router": jnp.eye(3), "router_correction_bias": jnp.asarray([9.0, -9.0, 0.0])}
  odds = np.asarray([[3, 1, 1 / 3]])  # Sigmoids 3/4, 1/2, 1/4.
  found = seen(np.log(odds), [[2]], [True], rule, router)
  sums = routes.value_of(np.asarray(found.probabilities, np.int64), routes.PROBABILITY_BITS)
  np.testing.assert_allclose(sums, [1 / 2, 1 / 3, 1 / 6], rtol=0, atol=1e-6)
  assert found.counts.tolist() == [0, 0, 1]


def test_sums_of_digits_are_those_of_whole_numbers():
  rng = np.random.default_rng(0)
  values = rng.random((999, 3)).astype(np.float32) ** 4
  values[0], values[1] = 0, 1
  mask = rng.random((999, 1)) < 0.7
  found = routes.digit_sums(jnp.asarray(values), jnp.asarray(mask), 30)
  whole = np.round(np.float64(values) * 2**30).astype(np.int64)
  expected = np.sum(np.where(mask, whole, 0), axis=0) / 2**30
  np.testing.assert_array_equal(routes.value_of(np.asarray(found, np.int64), 30), expected)
  with pytest.raises(AssertionError, match=r"got 1048577 rows, expected 2\^20 at most"):
    routes.watch_of(jnp.zeros(2**20 + 1, bool))


# The load-balancing loss.


def balance_of(form, index, coefficient=2.0, num_tokens=5.0, num_sequences=2.0):
  config = losses.LossConfig(balance_coefficient=coefficient, balance=form)
  counts = losses.Denominators(jnp.float32(num_sequences), jnp.float32(num_tokens))
  return routes.Balance(config, jnp.asarray(index, jnp.int32), counts)


def balance_reference(router, x, ids, mask, index, form, rule):
  """Switch's loss in plain jnp, of a whole batch or as the mean over two sequences."""
  logits = jnp.dot(x, router, precision="highest")
  if rule.scoring == "sigmoid":
    scores = jax.nn.sigmoid(logits)
    p = scores / jnp.sum(scores, axis=-1, keepdims=True)
  else:
    p = jax.nn.softmax(logits)
  total, parts = 0.0, [mask] if form == "global" else [mask & (index == i) for i in (0, 1)]
  for part in parts:
    share = np.bincount(ids[part].reshape(-1), minlength=rule.num_experts) / ids[part].size
    mean = jnp.sum(jnp.where(part[:, None], p, 0), axis=0) / part.sum()
    total += rule.num_experts * jnp.sum(jnp.asarray(share, jnp.float32) * mean)
  return 2 * total / len(parts)


@pytest.mark.parametrize("form", losses.BALANCES)
@pytest.mark.standard_promotion
def test_the_loss_and_its_gradient_are_those_of_the_formula(form):
  rng = np.random.default_rng(1)
  rule = SIGMOIDS if form == "global" else dataclasses.replace(SOFTMAX, num_experts=6, num_chosen=2)
  x, router = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((8, 3), (3, 6)))
  ids = np.stack([np.sort(rng.permutation(6)[:2]) for _ in range(8)])
  index = np.asarray([0, 0, 0, 0, 1, 1, 1, -1])
  mask = np.asarray([False, True, True, True, False, True, True, False])
  watch = routes.watch_of(jnp.asarray(mask), balance_of(form, index))
  loads = jnp.asarray(6 * np.bincount(ids[mask].reshape(-1), minlength=6) / 10, jnp.float32)

  @jax.jit
  def loss(router, x):
    weights = {"router": router, "expert_loads": loads}
    backend = decide(MODEL, NUMERICS).backend
    return watch(backend, rule, weights, x, jnp.asarray(ids, jnp.int32), jnp.int32(8)).loss

  expected = lambda router, x: balance_reference(router, x, ids, mask, index, form, rule)
  np.testing.assert_allclose(loss(router, x), expected(router, x), rtol=1e-6)
  found = jax.grad(loss, (0, 1))(router, x)
  for own, other in zip(found, jax.grad(expected, (0, 1))(router, x), strict=True):
    np.testing.assert_allclose(own, other, rtol=0, atol=1e-6)
  assert not np.any(found[1][~mask])


def test_the_loss_of_two_rows_by_hand():
  watch = routes.watch_of(jnp.ones(2, bool), balance_of("per_sequence", [0, 0], 0.5, 2.0, 1.0))
  rule, x = RoutingConfig(num_experts=2, num_chosen=1), jnp.log(jnp.asarray([[3.0, 1], [1, 1]]))
  backend, ids = decide(MODEL, NUMERICS).backend, jnp.zeros((2, 1), jnp.int32)
  found = watch(backend, rule, {"router": jnp.eye(2)}, x, ids, jnp.int32(2)).loss
  # 0.5 * 2 * (1 * (3/4 + 1/2) / 2 + 0)
  np.testing.assert_allclose(found, 0.625, rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("form", losses.BALANCES)
def test_a_gradient_of_the_loss_is_its_change(form):
  layout = layout_of()
  batch = packing.pack(groups(), np.zeros((5, 2), np.float32), **layout)  # No other gradient.
  config = losses.LossConfig(balance_coefficient=0.5, balance=form)
  trainer = trainers.make(loss=config, optimizer=optax.sgd(1.0), **layout)
  counts = losses.denominators(batch)
  gradient, numbers, _ = trainer.gradient(params(), batch, counts, None)
  assert 0.9 < numbers["loss"] < 4 and not np.any(gradient["layers"][0]["router_correction_bias"])
  if form == "global":  # The metric is the mean of two layers.
    np.testing.assert_allclose(numbers["loss"], numbers["load_balancing_loss"], rtol=1e-6)
  squares = sum(float(np.sum(np.square(leaf))) for leaf in jax.tree.leaves(gradient))
  rate = 1e-4 / squares**0.5
  moved = [
    jax.tree.map(lambda leaf, own, sign=sign: leaf + sign * rate * own, params(), gradient)
    for sign in (1, -1)
  ]
  up, down = (trainer.gradient(one, batch, counts, None)[1] for one in moved)
  for layer in (0, 1):  # Else the loss has a jump in between.
    name = f"expert_tokens.{layer}"
    assert np.array_equal(up[name], down[name])
  change = (float(up["loss"]) - float(down["loss"])) / (2 * rate)
  np.testing.assert_allclose(change, squares, rtol=0.05)


# Divisions of a batch.


def layout_of(rows=32):
  sizes = dict(page_size=4, max_num_seqs=3, max_sequence_tokens=17)
  return dict(decoder=decide(MODEL, NUMERICS), rows_per_micro_batch=rows, **sizes)


@functools.cache
def groups():
  rng = np.random.default_rng(2)
  draw = lambda most: rng.integers(0, MODEL.vocab_size, int(rng.integers(2, most))).tolist()
  prompts = [draw(9) for _ in range(5)]
  return [
    made_rollouts.group(i, *[made_rollouts.rollout(prompt, draw(8)) for _ in range(2)])
    for i, prompt in enumerate(prompts)
  ]


@functools.cache
def master():
  return tiny_model.random_master(MODEL, NUMERICS)


@functools.cache
def divided(rows=32, data=1, model=1):
  """A trainer on a mesh, and a batch in micro-batches of `rows`."""
  layout = layout_of(rows)
  mesh = parallel.make_mesh(data_parallel_size=data, tensor_parallel_size=model)
  batch = packing.pack(groups(), np.ones((5, 2), np.float32), **layout)
  return trainers.make(optimizer=optax.sgd(1.0), mesh=mesh, **layout), batch


def params():
  return parameters.compute_params(master(), NUMERICS)


@functools.cache
def learnt(**division):
  """Metrics of experts from one gradient."""
  trainer, batch = divided(**division)
  numbers = trainer.gradient(params(), batch, losses.denominators(batch), None)[1]
  return {name: numbers[name] for name in numbers if name.startswith(routes.METRICS)}


def assert_same(found, expected):
  bits = lambda tree: [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
  assert bits(found) == bits(expected)


def test_no_order_of_micro_batches_changes_a_sum():
  trainer, batch = divided()
  found = trainer.routes(params(), batch)
  alone = [packing.pack([group], np.ones((1, 2), np.float32), **layout_of()) for group in groups()]
  assert 1 < batch.targets.shape[0] < sum(one.targets.shape[0] for one in alone)
  parts = [tuple(trainer.routes(params(), one).values()) for one in alone]
  assert_same(routes.added(parts), tuple(found.values()))
  num_tokens = int(np.sum(batch.loss_mask))
  assert [found[layer].counts.sum() for layer in (0, 1)] == [2 * num_tokens, num_tokens]
  numbers = routes.summarise(found, num_tokens)
  assert 0 < numbers["router_entropy"] < math.log(6) and numbers["busiest_expert"] < 1


@pytest.mark.thorough
@pytest.mark.few(1)
@pytest.mark.parametrize(
  "division", [dict(rows=48), dict(data=2), dict(data=8), dict(model=2), dict(data=4, model=2)]
)
def test_no_division_of_a_batch_changes_a_metric(division):
  expected = learnt()
  trainer, batch = divided()
  sums = trainer.routes(params(), batch)
  assert_same(routes.summarise(sums, int(np.sum(batch.loss_mask))), expected)
  assert_same(learnt(**division), expected)


@functools.cache
def gradient_on(data=1, model=1):
  trainer, batch = divided(data=data, model=model)
  return jax.device_get(trainer.gradient(params(), batch, losses.denominators(batch), None)[0])


@pytest.mark.thorough
@pytest.mark.few(1)
@pytest.mark.parametrize("mesh", [dict(data=2), dict(data=8), dict(model=2), dict(data=4, model=2)])
def test_no_mesh_changes_a_bit_of_a_gradient(mesh):
  assert_same(gradient_on(**mesh), gradient_on())
  # A twin: other routers give another gradient.
  trainer, batch = divided(**mesh)
  layers = [{**layer, "router": 1.01 * layer["router"]} for layer in params()["layers"]]
  other = trainer.gradient({**params(), "layers": layers}, batch, losses.denominators(batch), None)
  pairs = zip(jax.tree.leaves(other[0]), jax.tree.leaves(gradient_on()), strict=True)
  assert any(np.any(np.asarray(one) != two) for one, two in pairs)
