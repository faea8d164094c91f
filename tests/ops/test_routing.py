"""Routing: values by hand, the definition at every size, and bits that depend on one row alone."""

from __future__ import annotations

import dataclasses
import functools

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refusals

from seerjax import numerics as numerics_lib
from seerjax.backends import choice
from seerjax.ops import routing
from seerjax.ops.routing import Router, RoutingConfig

NUMERICS = numerics_lib.NumericsConfig(row_tile=4, backend="tiled")
QWEN3 = RoutingConfig(num_experts=12, num_chosen=3, is_renormalised=True)
RULES = {
  "softmax": dataclasses.replace(QWEN3, is_renormalised=False),
  "qwen3": QWEN3,
  "gpt-oss": RoutingConfig(
    num_experts=12, num_chosen=3, scoring="softmax_of_chosen", has_bias=True
  ),
  "deepseek-v3": RoutingConfig(
    num_experts=12,
    num_chosen=3,
    scoring="sigmoid",
    is_renormalised=True,
    num_groups=4,
    num_chosen_groups=2,
    scale=2.5,
    has_correction_bias=True,
  ),
  "sigmoid": RoutingConfig(num_experts=12, num_chosen=3, scoring="sigmoid"),
}


def array(*shape, dtype=jnp.float32, seed=0):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def router_of(config, width, dtype=jnp.float32, seed=0):
  bias = lambda seed: array(config.num_experts, dtype=dtype, seed=seed)
  return Router(
    array(width, config.num_experts, dtype=dtype, seed=seed),
    bias(seed + 1) if config.has_bias else None,
    bias(seed + 2) if config.has_correction_bias else None,
  )


def chosen(logits, config, bias=None, correction=None):
  """Returns the choice of rows that have these logits, through a router that is the identity."""
  logits = jnp.asarray(logits, jnp.float32)
  given = [
    None if value is None else jnp.asarray(value, jnp.float32) for value in (bias, correction)
  ]
  router = Router(jnp.eye(logits.shape[1], dtype=jnp.float32), *given)
  ids, weights = routing.route_rows(logits, router, config)
  return np.asarray(ids), np.asarray(weights)


def of_four(**changes):
  return RoutingConfig(num_experts=4, num_chosen=2, **changes)


LOGS = np.log(np.asarray([[1.0, 4.0, 2.0, 1.0]]))


# By hand.


def test_a_softmax_over_all_keeps_its_sum_or_is_renormalised():
  ids, weights = chosen(LOGS, of_four())
  np.testing.assert_array_equal(ids, [[1, 2]])
  np.testing.assert_allclose(weights, [[4 / 8, 2 / 8]], rtol=1e-6)
  ids, weights = chosen(LOGS, of_four(is_renormalised=True, scale=3.0))
  np.testing.assert_array_equal(ids, [[1, 2]])
  np.testing.assert_allclose(weights, [[2, 1]], rtol=1e-6)


def test_a_softmax_of_the_chosen_sees_the_bias_in_the_logits():
  ids, weights = chosen(
    LOGS, of_four(scoring="softmax_of_chosen", has_bias=True), bias=[0, 0, 0, np.log(12)]
  )
  np.testing.assert_array_equal(ids, [[1, 3]])
  np.testing.assert_allclose(weights, [[4 / 16, 12 / 16]], rtol=1e-6)


def test_a_correction_bias_changes_the_choice_and_no_weight():
  odds = np.asarray([[1.0, 4.0, 2.0, 0.25]])  # Scores 1/2, 4/5, 2/3 and 1/5.
  rule = of_four(scoring="sigmoid", has_correction_bias=True)
  ids, weights = chosen(np.log(odds), rule, correction=[0, -0.5, 0, 1])
  np.testing.assert_array_equal(ids, [[2, 3]])
  np.testing.assert_allclose(weights, [[2 / 3, 1 / 5]], rtol=1e-6)


def test_experts_come_from_the_groups_with_the_best_two():
  # The second group has the best single expert, and the first and third the best pairs.
  logits = [[3.0, 3.0, 5.0, -4.0, 2.0, 3.5, 0.0, 0.0]]
  rule = RoutingConfig(num_experts=8, num_chosen=3, scoring="softmax_of_chosen")
  assert chosen(logits, rule)[0].tolist() == [[0, 2, 5]]
  grouped = dataclasses.replace(rule, num_groups=4, num_chosen_groups=2)
  assert chosen(logits, grouped)[0].tolist() == [[0, 1, 5]]


@pytest.mark.parametrize("scoring", ["softmax", "softmax_of_chosen", "sigmoid"])
def test_of_equal_scores_the_lower_id_is_chosen(scoring):
  rule = RoutingConfig(num_experts=6, num_chosen=3, scoring=scoring)
  ids, weights = chosen([[0.0] * 6, [1, 2, 1, 2, 1, 2], [-1, 0, -0.0, 0, 1, 1]], rule)
  np.testing.assert_array_equal(ids, [[0, 1, 2], [1, 3, 5], [1, 4, 5]])
  assert len(set(weights[0])) == 1
  grouped = dataclasses.replace(rule, num_groups=3, num_chosen_groups=2)
  assert chosen([[1, 0, 1, 0, 1, 0]], grouped)[0].tolist() == [[0, 1, 2]]


def test_logits_are_float32_however_the_rows_are_rounded():
  # 256 + 1 and 256 are one number in bfloat16.
  x = jnp.ones((2, 257), jnp.bfloat16)
  weight = jnp.ones((257, 2), jnp.bfloat16).at[0, 0].set(0)
  rule = RoutingConfig(num_experts=2, num_chosen=1)
  ids, weights = routing.route_rows(x, Router(weight), rule)
  np.testing.assert_array_equal(ids, [[1], [1]])
  np.testing.assert_allclose(weights, np.full((2, 1), 1 / (1 + np.exp(-1))), rtol=1e-6)


# The definition.


def route(x, router, rule, numerics=NUMERICS):
  return routing.route(x, router, rule, jnp.int32(x.shape[0]), numerics)


def dense(ids, weights, num_experts):
  found = jnp.zeros((ids.shape[0], num_experts), jnp.float32)
  return found.at[jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None], ids].set(weights)


@pytest.mark.few(2)
@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 5, 11])
@pytest.mark.parametrize("rule", RULES)
def test_weights_and_gradients_are_the_definitions(rule, num_rows):
  rule = RULES[rule]
  x, router = array(num_rows, 7, seed=5), router_of(rule, 7)
  factors = array(num_rows, rule.num_experts, seed=6)

  def loss(given, function):
    found = function(*given)
    return jnp.sum(found * factors), found

  gradient = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
  own = lambda x, router: dense(*route(x, router, rule), rule.num_experts)
  reference = lambda x, router: routing.route_reference(x, router, rule)
  (_, found), slopes = gradient((x, router), own)
  (_, expected), wanted = gradient((x, router), reference)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
  for got, want in zip(jax.tree.leaves(slopes), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
  if rule.has_correction_bias:
    assert not np.any(slopes[1].correction_bias)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(st.data())
def test_a_choice_is_distinct_ascending_and_holds_the_largest_scores(data):
  num_experts = data.draw(st.integers(1, 9))
  rule = RoutingConfig(
    num_experts=num_experts,
    num_chosen=data.draw(st.integers(1, num_experts)),
    scoring="softmax_of_chosen",
  )
  few = st.sampled_from([-1.0, -0.0, 0.0, 0.5, 1.0])  # Few values: ties are common.
  row = data.draw(st.lists(few, min_size=num_experts, max_size=num_experts))
  ids, weights = chosen([row], rule)
  in_order = sorted(range(num_experts), key=lambda index: (-row[index], index))
  assert ids[0].tolist() == sorted(in_order[: rule.num_chosen])
  np.testing.assert_allclose(np.sum(weights), 1, rtol=1e-6)


# Bits.


@functools.partial(jax.jit, static_argnums=(2, 3))
def in_a_network(x, router, rule, numerics):
  """Rows that are normed before the router, and a sum with their weights after it."""
  backend = choice.backend_of(numerics)
  count = jnp.int32(x.shape[0])
  x = backend.map_rows(lambda _, x, __: jnp.tanh(x * 1.3), (), x, count)
  ids, weights = backend.map_rows(
    lambda router, x, _: routing.route_rows(x, router, rule), router, x, count
  )
  return ids, weights


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("rule", RULES)
def test_a_row_has_its_bits_in_any_batch_and_under_a_gradient(rule, dtype):
  rule = RULES[rule]
  x, router = array(11, 65, dtype=dtype), router_of(rule, 65, dtype)
  whole = jax.tree.map(np.asarray, in_a_network(x, router, rule, NUMERICS))
  for count in (1, 4, 5, 9):
    found = in_a_network(x[:count], router, rule, NUMERICS)
    jax.tree.map(np.testing.assert_array_equal, found, tuple(leaf[:count] for leaf in whole))
  order = np.random.default_rng(4).permutation(11)
  found = in_a_network(x[order], router, rule, NUMERICS)
  jax.tree.map(np.testing.assert_array_equal, found, tuple(leaf[order] for leaf in whole))

  def loss(x, router):
    found = in_a_network(x, router, rule, NUMERICS)
    return jnp.sum(found[1]), found

  (_, found), _ = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, router)
  jax.tree.map(np.testing.assert_array_equal, found, whole)


# Errors.


def rule(**changes):
  return lambda: RoutingConfig(**{"num_experts": 8, "num_chosen": 2} | changes)


BIASED = RoutingConfig(num_experts=2, num_chosen=1, has_bias=True)


@refusals.table(
  (rule(num_experts=0), "RoutingConfig.num_experts: got 0, expected at least 1"),
  (rule(num_chosen=9), "RoutingConfig.num_chosen: got 9, expected at most num_experts=8; lower"),
  (rule(scale=0.0), "RoutingConfig.scale: got 0.0, expected a positive number"),
  (rule(num_groups=3), "RoutingConfig.num_groups: got 3, expected a divisor of num_experts=8"),
  (rule(num_groups=8, num_chosen_groups=2),
   "RoutingConfig.num_groups: got 8 for num_experts=8, expected groups of at least two"),
  (rule(num_groups=4, num_chosen_groups=5),
   "RoutingConfig.num_chosen_groups: got 5, expected 1 to num_groups=4"),
  (rule(num_groups=4, num_chosen=3),
   "RoutingConfig.num_chosen_groups: got 1, expected 2 to num_groups=4, as a group has 2"),
  (rule(scoring="softmax_of_chosen", is_renormalised=True),
   "RoutingConfig.is_renormalised: got True with scoring='softmax_of_chosen', expected False"),
  (rule(has_correction_bias=True),
   "RoutingConfig.has_correction_bias: got True with scoring='softmax', expected scoring='sigm"),
  (lambda: routing.check(BIASED, Router(jnp.ones((3, 2)))),
   "Router.bias: got None, expected an array; RoutingConfig.has_bias decides it"),
  (lambda: routing.check(BIASED, Router(jnp.ones((3, 2)), jnp.ones(2), jnp.ones(2))),
   "Router.correction_bias: got an array, expected None"),
  (lambda: routing.check(BIASED, Router(jnp.ones((3, 2)), jnp.ones(3))),
   "Router.bias: got shape (3,), expected num_experts=2 on the last axis"),
  (lambda: routing.check(BIASED, Router(jnp.ones((3, 2)), jnp.asarray([0, np.nan]))),
   "Router: got values that are not finite in ['bias'], expected finite numbers", "load the"),
)  # fmt: skip
def test_refusals(row):
  refusals.check(row)


@pytest.mark.usefixtures("unchecked_annotations")
def test_another_scoring_is_refused():
  refusals.check((rule(scoring="relu"), "RoutingConfig.scoring: got 'relu', expected one of"))


def test_a_router_that_fits_is_accepted():
  for rule in RULES.values():
    routing.check(rule, router_of(rule, 5))
