"""Mixtures of experts: values by hand, the definition at every size, gradients, and refusals."""

from __future__ import annotations

import functools

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refusals

from seerjax import numerics as numerics_lib
from seerjax.ops import linear, moe, tiles

NUMERICS = numerics_lib.NumericsConfig(row_tile=4, expert_tile=4, backend="tiled")


def array(*shape, dtype=jnp.float32, seed=0):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def slabs_of(num_slabs, per_slab, width, inner, dtype=jnp.float32, seed=0):
  return {
    "gate_up": array(num_slabs, per_slab, width, 2 * inner, dtype=dtype, seed=seed),
    "down": array(num_slabs, per_slab, inner, width, dtype=dtype, seed=seed + 1),
  }


def adapted(slabs, rank, seed=8):
  """Returns the slabs with an adapter on each weight."""
  found = dict(slabs)
  for name, leaf in slabs.items():
    *lead, rows, columns = leaf.shape
    found[f"{name}_lora"] = {
      "a": array(*lead, rows, rank, dtype=leaf.dtype, seed=seed),
      "b": array(*lead, rank, columns, dtype=leaf.dtype, seed=seed + 1),
      "scale": jnp.full(lead, 0.5 + seed / 16, jnp.float32),
    }
  return found


def picks_of(num_rows, num_experts, num_chosen, seed=0):
  rng = np.random.default_rng(seed)
  ids = [np.sort(rng.permutation(num_experts)[:num_chosen]) for _ in range(num_rows)]
  ids = np.asarray(ids, np.int32).reshape(num_rows, num_chosen)
  weights = rng.uniform(0.1, 1, (num_rows, num_chosen))
  return jnp.asarray(ids), jnp.asarray(weights, jnp.float32)


@functools.partial(jax.jit, static_argnames=("expert", "tile"))
def run(x, ids, weights, slabs, num_rows=None, expert=moe.gated_rows, tile=4):
  num_rows = jnp.int32(x.shape[0]) if num_rows is None else num_rows
  numerics = numerics_lib.NumericsConfig(expert_tile=tile, backend="tiled")
  return moe.experts(x, ids, weights, slabs, num_rows, None, numerics, expert=expert)


# By hand.


def scaled(weights, x):
  """An expert that multiplies by one number."""
  return x.astype(jnp.float32) * weights[None, None]


def test_a_row_is_the_weighted_sum_of_its_experts_by_hand():
  # Eight experts in four slabs; expert e multiplies by 10^e.
  slabs = jnp.asarray(10.0 ** np.arange(8), jnp.float32).reshape(4, 2)
  ids = jnp.asarray([[0, 1, 7], [2, 5, 7], [0, 1, 2]], jnp.int32)
  weights = jnp.asarray([[1, 2, 3], [4, 5, 6], [7, 8, 9]], jnp.float32)
  x = jnp.asarray([[1, 2], [1, 1], [3, 0]], jnp.float32)
  found = run(x, ids, weights, slabs, expert=scaled)
  expected = [[30000021, 60000042], [60500400, 60500400], [2961, 0]]
  np.testing.assert_array_equal(found, np.asarray(expected, np.float32))


def test_experts_of_a_slab_are_added_in_ascending_order_and_slabs_as_a_tree_by_hand():
  # In float32, 1 is lost next to 2^24, and 1 + 1 is not.
  big = 2.0**24
  ids = jnp.asarray([[0, 1, 2, 3]], jnp.int32)
  one = jnp.ones((1, 1), jnp.float32)
  weights = jnp.ones((1, 4), jnp.float32)
  values = lambda *numbers: jnp.asarray(numbers, jnp.float32)
  of = lambda slabs: float(run(one, ids, weights, slabs, expert=scaled)[0, 0])
  # One slab, a chain: ((1 + 1) + big) + 2, and ((big + 1) + 1) + 1.
  assert of(values(1, 1, big, 2).reshape(1, 4)) == big + 4
  assert of(values(big, 1, 1, 1).reshape(1, 4)) == big
  # Two slabs: (big + 1) + (1 + 1). Four: the same tree.
  assert of(values(big, 1, 1, 1).reshape(2, 2)) == big + 2
  assert of(values(big, 1, 1, 1).reshape(4, 1)) == big + 2


def test_a_gated_expert_by_hand():
  weights = {"gate_up": jnp.asarray([[1.0, 3.0], [0.0, 5.0]]), "down": jnp.asarray([[2.0, -1.0]])}
  x = jnp.asarray([[2.0, 1.0]])
  gate, up = 2.0, 11.0
  inner = gate / (1 + np.exp(-gate)) * up
  np.testing.assert_allclose(moe.gated_rows(weights, x), [[2 * inner, -inner]], rtol=1e-6)


def test_a_product_is_rounded_before_it_is_added_by_hand():
  # -1 + (1 + 2^-12)^2 is 2^-11 + 2^-24; the product is rounded to 1 + 2^-11 first.
  slabs = jnp.asarray([[-1, 1 + 2**-12]], jnp.float32)
  ids = jnp.asarray([[0, 1]], jnp.int32)
  weights = jnp.asarray([[1, 1 + 2**-12]], jnp.float32)
  found = run(jnp.ones((1, 1), jnp.float32), ids, weights, slabs, expert=scaled)
  assert float(found[0, 0]) == 2.0**-11


# The definition.


@pytest.mark.few(1)
@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 5, 11])
@pytest.mark.parametrize(("num_slabs", "per_slab"), [(1, 1), (1, 5), (2, 3), (8, 1), (8, 2)])
def test_values_and_gradients_are_the_definitions(num_slabs, per_slab, num_rows):
  num_experts = num_slabs * per_slab
  ids, weights = picks_of(num_rows, num_experts, min(3, num_experts))
  x, slabs = array(num_rows, 7, seed=5), slabs_of(num_slabs, per_slab, 7, 3)
  factors = array(num_rows, 7, seed=6)

  def loss(given, function):
    x, weights, slabs = given
    found = function(x, ids, weights, slabs)
    return jnp.sum(found * factors), found

  gradient = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
  (_, found), slopes = gradient((x, weights, slabs), run)
  (_, expected), wanted = gradient((x, weights, slabs), moe.experts_reference)
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
  for got, want in zip(jax.tree.leaves(slopes), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("num_slabs", "per_slab"), [(1, 5), (4, 2)])
def test_values_and_gradients_of_adapters_are_the_definitions(num_slabs, per_slab):
  ids, weights = picks_of(11, num_slabs * per_slab, 3)
  x, slabs = array(11, 7, seed=5), adapted(slabs_of(num_slabs, per_slab, 7, 5), rank=2)

  def merged(slabs):
    whole = lambda name, one: slabs[name] + one["scale"][..., None, None] * (one["a"] @ one["b"])
    return {name: whole(name, slabs[f"{name}_lora"]) for name in ("gate_up", "down")}

  def loss(given, function, of):
    x, weights, slabs = given
    found = function(x, ids, weights, of(slabs))
    return jnp.sum(jnp.sin(found)), found

  gradient = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=(1, 2))
  (_, found), slopes = gradient((x, weights, slabs), run, dict)
  reference = moe.experts_reference
  for function, of in ((reference, dict), (reference, merged)):
    (_, expected), wanted = gradient((x, weights, slabs), function, of)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    for got, want in zip(jax.tree.leaves(slopes), jax.tree.leaves(wanted), strict=True):
      np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * np.abs(want).max())


def test_rows_that_choose_have_the_bits_of_rows_that_all_chose_it():
  ids, weights = picks_of(21, 8, 3)
  x, slabs = array(21, 7, seed=5), slabs_of(4, 2, 7, 5)
  of_each = [adapted(slabs, rank=2), adapted(slabs, rank=2, seed=20), adapted(slabs, 1, seed=30)]
  names = [name for name in of_each[0] if name.endswith("_lora")]
  both = [{name: one[name] for name in names} for one in of_each]
  stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *both[:2])
  choices = [
    tiles.Choices(2, lambda at: jax.tree.map(lambda leaf: leaf[at], stacked)),
    tiles.Choices(1, lambda at: both[2]),
  ]
  rows = jnp.asarray(np.random.default_rng(3).integers(0, 4, 21), jnp.int32)
  program = jax.jit(
    lambda num_rows: moe.chosen_experts(
      x, ids, weights, slabs, choices, rows, num_rows, None, NUMERICS
    )
  )
  alone = np.stack([run(x, ids, weights, one) for one in (slabs, *of_each)])
  expected = alone[np.asarray(rows), np.arange(21)]
  np.testing.assert_array_equal(program(jnp.int32(21)), expected)
  found = program(jnp.int32(13))
  np.testing.assert_array_equal(found[:13], expected[:13])
  assert not np.any(found[13:])


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(st.data())
def test_any_picks_give_the_definition(data):
  """All rows may have one expert, and an expert may have no row, in any order of the rows."""
  ids = data.draw(
    st.lists(st.sets(st.integers(0, 5), min_size=2, max_size=2).map(sorted), min_size=9, max_size=9)
  )
  ids = jnp.asarray(ids, jnp.int32)
  x, slabs = array(9, 5, seed=7), slabs_of(2, 3, 5, 4)
  weights = picks_of(9, 6, 2)[1]
  found = run(x, ids, weights, slabs)
  expected = moe.experts_reference(x, ids, weights, slabs)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_bfloat16_rows_have_float32_sums():
  ids, weights = picks_of(11, 8, 3)
  x, slabs = array(11, 65, dtype=jnp.bfloat16), slabs_of(4, 2, 65, 24, jnp.bfloat16)

  def loss(x, weights, slabs):
    found = run(x, ids, weights, slabs)
    return jnp.sum(jnp.sin(found)), found

  (_, found), slopes = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(x, weights, slabs)
  expected = moe.experts_reference(x, ids, weights, slabs)
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, expected, rtol=0.1, atol=0.02 * float(jnp.abs(expected).max()))
  of_x, of_weights, of_slabs = slopes
  assert of_x.dtype == jnp.bfloat16 and of_weights.dtype == jnp.float32
  assert {leaf.dtype for leaf in of_slabs.values()} == {jnp.dtype(jnp.bfloat16)}


def test_rows_beyond_the_count_are_not_computed_and_get_no_gradient():
  ids, weights = picks_of(11, 6, 2)
  x, slabs = array(11, 7), slabs_of(2, 3, 7, 3)
  # Rows that are not computed may hold anything.
  scribbled = x.at[3:].set(jnp.nan)

  def loss(x, weights, slabs, num_rows):
    found = run(x, ids, weights, slabs, num_rows)
    return jnp.sum(found), found

  gradient = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
  slopes, found = gradient(scribbled, weights, slabs, jnp.int32(3))
  np.testing.assert_array_equal(found[:3], run(x, ids, weights, slabs)[:3])
  np.testing.assert_array_equal(found[3:], np.zeros((8, 7), np.float32))
  few = jax.grad(
    lambda *given: jnp.sum(moe.experts_reference(given[0], ids[:3], given[1], given[2])), (0, 1, 2)
  )(x[:3], weights[:3], slabs)
  for got, want in zip(jax.tree.leaves(slopes), jax.tree.leaves(few), strict=True):
    got = got if got.shape == want.shape else got[:3]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
  assert not np.any(slopes[0][3:]) and not np.any(slopes[1][3:])


def test_slabs_are_read_in_place_from_all_layers():
  ids, weights = picks_of(5, 6, 2)
  x, layers = array(5, 7), [slabs_of(2, 3, 7, 3, seed=seed) for seed in (0, 2, 4)]
  stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
  for index, slabs in enumerate(layers):
    layered = jax.tree.map(
      lambda leaf, index=index: tiles.LayerSlabs(leaf, jnp.int32(index)), stacked
    )
    np.testing.assert_array_equal(run(x, ids, weights, layered), run(x, ids, weights, slabs))


def test_any_function_of_a_row_is_an_expert():
  def biased(weights, x):
    return linear.dot(x, weights["w"]) + weights["bias"][None, :]

  ids, weights = picks_of(9, 4, 2)
  slabs = {"w": array(2, 2, 5, 5), "bias": array(2, 2, 5, seed=1)}
  x = array(9, 5, seed=2)
  loss = lambda function: (
    lambda slabs: jnp.sum(jnp.sin(function(x, ids, weights, slabs, expert=biased)))
  )
  found, expected = (
    jax.value_and_grad(loss(function))(slabs) for function in (run, moe.experts_reference)
  )
  for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


# Errors.


@refusals.table(
  (lambda: moe.experts_per_slab(12, 8),
   "NumericsConfig.reduction_shards: got 8, expected a divisor of num_experts=12",
   "use reduction_shards=4, or 0"),
  (lambda: moe.experts_per_slab(3, 2), "got 2, expected a divisor of num_experts=3",
   "use reduction_shards=1, or 0"),
  (lambda: numerics_lib.NumericsConfig(expert_tile=6),
   "NumericsConfig.expert_tile: got 6, expected a power of two", "expert_tile=0 (chosen for"),
)  # fmt: skip
def test_refusals(row):
  refusals.check(row)


def test_a_slab_has_whole_experts():
  assert [moe.experts_per_slab(16, slabs) for slabs in (1, 2, 4, 8)] == [16, 8, 4, 2]
