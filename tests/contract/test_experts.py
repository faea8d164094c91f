"""Experts keep the contract: a row's bits depend neither on the batch nor on the devices.

Layers of a router and its experts run on drawn batches: rows in any order, at any size, with any
padding, under a gradient, and on 1, 2, 4 and 8 devices of the model axis. Each twin breaks one rule
that this relies on, and the comparison must fail.
"""

from __future__ import annotations

import collections
import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from seerjax import numerics as numerics_lib, parallel
from seerjax.backends import choice
from seerjax.ops import attention, linear, moe, norms, routing, tiles
from seerjax.ops.routing import Router, RoutingConfig

NUMERICS = numerics_lib.NumericsConfig(
  backend="tiled", row_tile=8, expert_tile=4, reduction_shards=8
)
# No width is a whole vector. The bias gives one expert every row and another none.
NUM_EXPERTS, WIDTH, INNER, NUM_ROWS, NUM_LAYERS = 24, 37, 11, 45, 2
EVERY, NONE, TIED = 5, 9, (4, 6)
RULES = {
  "biased": RoutingConfig(
    num_experts=NUM_EXPERTS, num_chosen=5, scoring="softmax_of_chosen", has_bias=True
  ),
  "renormalised": RoutingConfig(num_experts=NUM_EXPERTS, num_chosen=5, is_renormalised=True),
  "grouped": RoutingConfig(
    num_experts=NUM_EXPERTS,
    num_chosen=5,
    scoring="sigmoid",
    is_renormalised=True,
    num_groups=6,
    num_chosen_groups=3,
    scale=2.5,
    has_correction_bias=True,
  ),
}
CASES = pytest.mark.parametrize(
  ("rule", "dtype"), [(rule, dtype) for rule in RULES for dtype in ("float32", "bfloat16")]
)
SIZES = (3, 16, 45)


@functools.cache
def weights_of(rule: str, dtype: str) -> list:
  rng = np.random.default_rng(3)
  config = RULES[rule]
  array = lambda *shape: jnp.asarray(0.4 * rng.standard_normal(shape), dtype)

  def layer() -> dict:
    bias = array(NUM_EXPERTS).at[EVERY].set(20).at[NONE].set(-20)
    # Two experts with equal scores: the lower id comes first.
    weight = array(WIDTH, NUM_EXPERTS)
    weight = weight.at[:, TIED[1]].set(weight[:, TIED[0]])
    bias = bias.at[TIED[1]].set(bias[TIED[0]])
    return {
      "norm": 1 + array(WIDTH),
      "router": Router(
        weight, bias if config.has_bias else None, bias if config.has_correction_bias else None
      ),
      "slabs": {
        "gate_up": array(8, NUM_EXPERTS // 8, WIDTH, 2 * INNER),
        "down": array(8, NUM_EXPERTS // 8, INNER, WIDTH),
      },
    }

  return [layer() for _ in range(NUM_LAYERS)]


@functools.cache
def rows_of(dtype: str) -> jax.Array:
  return jnp.asarray(np.random.default_rng(4).standard_normal((NUM_ROWS, WIDTH)), dtype)


def network(weights, x, num_rows, rule, numerics, axis=None):
  """Two layers of norm, router, experts and residual: rows f[n, d], ids i32[l, n, e]."""
  config, backend, ids_of_layers = RULES[rule], choice.backend_of(numerics), []

  def routed(weights, x, _):
    norm, router = weights
    normed = norms.rms_norm_rows(x, norm, 1e-6)
    return normed, *routing.route_rows(normed, router, config)

  for own in weights:
    normed, ids, chosen = backend.map_rows(routed, (own["norm"], own["router"]), x, num_rows)
    mixed = moe.experts(normed, ids, chosen, own["slabs"], num_rows, axis, NUMERICS)
    add = lambda _, rows, __: rows[0] + rows[1].astype(rows[0].dtype)
    x = backend.map_rows(add, (), (x, mixed), num_rows)
    ids_of_layers.append(ids)
  return x, jnp.stack(ids_of_layers)


run = jax.jit(network, static_argnums=(3, 4))


def batch_of(dtype: str, rows: np.ndarray, size: int, rng: np.random.Generator) -> jax.Array:
  """Returns these rows in a batch of `size`, and numbers in the rest that must not matter."""
  padding = 100 * rng.standard_normal((size - len(rows), WIDTH))
  return jnp.concatenate([rows_of(dtype)[rows], jnp.asarray(padding, dtype)])


def bits(*arrays) -> list[bytes]:
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(arrays)]


@pytest.mark.few(1)
@CASES
def test_a_row_has_its_bits_in_every_batch(rule, dtype, seed, tell_events):
  rng = np.random.default_rng(seed)
  weights = weights_of(rule, dtype)
  whole, routes = map(np.asarray, run(weights, rows_of(dtype), jnp.int32(45), rule, NUMERICS))
  assert np.all(np.isfinite(whole.astype(np.float32)))
  events = collections.Counter()
  for turn in range(30):
    size = SIZES[turn % len(SIZES)]
    rows = rng.permutation(NUM_ROWS)[: rng.integers(1, size + 1)]
    batch = batch_of(dtype, rows, size, rng)
    found, ids = map(np.asarray, run(weights, batch, jnp.int32(len(rows)), rule, NUMERICS))
    np.testing.assert_array_equal(ids[:, : len(rows)], routes[:, rows])
    np.testing.assert_array_equal(found[: len(rows)], whole[rows])
    for layer in ids[:, : len(rows)]:
      counts = np.bincount(layer.reshape(-1), minlength=NUM_EXPERTS)
      events["experts without a row"] += np.sum(counts == 0)
      events["experts of one row"] += np.sum(counts == 1)
      events["experts of all rows"] += np.sum(counts == len(rows)) * (len(rows) > 4)
      events["experts of several tiles"] += np.sum(counts > NUMERICS.expert_tile)
      has = [np.any(layer == index, axis=1) for index in TIED]
      events["ties, both chosen"] += np.sum(has[0] & has[1])
      events["ties, the lower chosen"] += np.sum(has[0] & ~has[1])
      assert not np.any(has[1] & ~has[0])
    events["padded batches"] += len(rows) < size
    events["full batches"] += len(rows) == size
  always = ["experts without a row", "experts of one row", "experts of several tiles"]
  expected = [*always, "ties, both chosen", "padded batches"]
  if rule == "biased":
    expected += ["experts of all rows"]
  tell_events(f"experts {rule} {dtype}", events, expected)


def loss(weights, x, num_rows, factors, rule, axis=None):
  out, ids = network(weights, x, num_rows, rule, NUMERICS, axis)
  return jnp.sum(jnp.sin(out.astype(jnp.float32)) * factors), (out, ids)


GRADIENT = jax.value_and_grad(loss, (0, 1), has_aux=True)


def factors_of() -> jax.Array:
  return jnp.asarray(np.random.default_rng(5).standard_normal((NUM_ROWS, WIDTH)), jnp.float32)


@pytest.mark.few(1)
@pytest.mark.parametrize("devices", [(1, 8), (2, 4)], ids=["1 and 8", "2 and 4"])
@CASES
def test_devices_and_a_gradient_change_no_bit(rule, dtype, devices):
  weights, given = weights_of(rule, dtype), (rows_of(dtype), jnp.int32(NUM_ROWS - 2), factors_of())
  alone = run(weights, *given[:2], rule, NUMERICS)
  (_, beneath), slopes = jax.jit(GRADIENT, static_argnums=4)(weights, *given, rule)
  assert bits(beneath) == bits(alone)
  assert all(np.any(leaf) for leaf in jax.tree.leaves([own["slabs"] for own in slopes[0]]))
  assert not np.any(slopes[1][-2:])
  spec = [{name: jax.P("model" if name == "slabs" else None) for name in own} for own in weights]
  for count in devices:
    spread = jax.shard_map(
      functools.partial(GRADIENT, rule=rule, axis="model"),
      mesh=parallel.make_mesh(tensor_parallel_size=count),
      in_specs=(spec, jax.P(), jax.P(), jax.P()),
      out_specs=((jax.P(), (jax.P(), jax.P())), (spec, jax.P())),
      check_vma=False,
    )
    (_, found), found_slopes = jax.jit(spread)(weights, *given)
    assert bits(found) == bits(alone), count
    assert bits(found_slopes) == bits(slopes), count


# The order of sums.


NUM_SLABS = 4


def mixture():
  """Returns one layer's (rows, ids, weights, slabs), with enough experts a slab to reorder."""
  own, x = weights_of("renormalised", "float32")[0], rows_of("float32")
  count = jnp.int32(NUM_ROWS)
  ids, weights = routing.route(x, own["router"], RULES["renormalised"], count, NUMERICS)
  cut = lambda leaf: leaf.reshape(NUM_SLABS, -1, *leaf.shape[2:])
  return x, ids, weights, jax.tree.map(cut, own["slabs"])


@jax.jit
def experts(x, ids, weights, slabs):
  return moe.experts(x, ids, weights, slabs, jnp.int32(x.shape[0]), None, NUMERICS)


def terms(x, ids, weights, slabs) -> np.ndarray:
  """Returns f32[n, e, d], the term of each pick, computed with no other in its row."""
  picks = [experts(x, ids[:, j : j + 1], weights[:, j : j + 1], slabs) for j in range(ids.shape[1])]
  return np.stack(picks, axis=1)


def by_slab(parts: np.ndarray, ids: np.ndarray, order: np.ndarray) -> np.ndarray:
  """Returns f32[r, n, d], each slab's terms added in the given order of a row's picks i[n, e]."""
  slabs = np.zeros((NUM_SLABS, parts.shape[0], WIDTH), np.float32)
  for row, picks in enumerate(order):
    for pick in picks:
      slabs[ids[row, pick] // (NUM_EXPERTS // NUM_SLABS), row] += parts[row, pick]
  return slabs


def test_terms_are_added_by_id_in_a_slab_and_slabs_as_a_tree():
  x, ids, weights, slabs = mixture()
  found, parts = np.asarray(experts(x, ids, weights, slabs)), terms(x, ids, weights, slabs)
  ids, weights = np.asarray(ids), np.asarray(weights)
  partials = by_slab(parts, ids, np.argsort(ids, axis=1))
  np.testing.assert_array_equal(parallel.tree_sum(jnp.asarray(partials)), found)


def by_weight() -> int:
  """Twin: a slab's experts are added in the order of their weights."""
  x, ids, weights, slabs = mixture()
  parts = terms(x, ids, weights, slabs)
  partials = by_slab(parts, np.asarray(ids), np.argsort(-np.asarray(weights), axis=1))
  found = parallel.tree_sum(jnp.asarray(partials))
  return int(np.sum(np.asarray(found) != np.asarray(experts(x, ids, weights, slabs))))


def one_chain() -> int:
  """Twin: a row's experts are one chain over all slabs."""
  x, ids, weights, slabs = mixture()
  expected, parts = np.asarray(experts(x, ids, weights, slabs)), terms(x, ids, weights, slabs)
  chain = np.zeros_like(expected)
  for pick in range(ids.shape[1]):
    chain += parts[:, pick]
  return int(np.sum(chain != expected))


def by_psum() -> int:
  """Twin: the experts of slabs are added by `psum`."""
  x, ids, weights, slabs = mixture()
  parts, ids_of = terms(x, ids, weights, slabs), np.asarray(ids)
  partials = by_slab(parts, ids_of, np.argsort(ids_of, axis=1))
  spread = jax.shard_map(
    lambda own: lax.psum(own[0], "model"),
    mesh=parallel.make_mesh(tensor_parallel_size=NUM_SLABS),
    in_specs=jax.P("model"),
    out_specs=jax.P(),
  )
  found = np.asarray(jax.jit(spread)(jnp.asarray(partials)))
  return int(np.sum(found != np.asarray(experts(x, ids, weights, slabs))))


def test_a_rows_gradient_is_that_of_the_row_alone():
  x, ids, weights, slabs = mixture()
  factors = factors_of()

  def gradient(rows):
    loss = lambda x, weights: jnp.sum(experts(x, ids[rows], weights, slabs) * factors[rows])
    return jax.jit(jax.grad(loss, (0, 1)))(x[rows], weights[rows])

  whole = gradient(np.arange(NUM_ROWS))
  for rows in (np.arange(7), np.random.default_rng(6).permutation(NUM_ROWS)[:16]):
    assert bits(gradient(rows)) == bits([leaf[rows] for leaf in whole])


# Twins that follow the batch, at sizes at which XLA's products do.

WIDE = RoutingConfig(num_experts=128, num_chosen=8, is_renormalised=True)


@functools.cache
def wide_mixture():
  """Returns (rows f[n, d], ids, weights, slabs) of eight experts, one in each slab."""
  rng = np.random.default_rng(7)
  array = lambda *shape: jnp.asarray(0.2 * rng.standard_normal(shape), jnp.float32)
  ids = np.stack([np.sort(rng.permutation(8)[:2]) for _ in range(NUM_ROWS)])
  slabs = {"gate_up": array(8, 1, 128, 128), "down": array(8, 1, 64, 128)}
  return (
    array(NUM_ROWS, 128),
    jnp.asarray(ids, jnp.int32),
    jnp.abs(array(NUM_ROWS, 2)),
    slabs,
  )


def num_differing(function, *rows_and_rest) -> int:
  """Returns how many numbers of a batch's first rows differ in smaller batches of them."""
  *rows, rest = rows_and_rest
  whole = np.asarray(function(*rows, rest))
  found = 0
  for count in (1, 3, 16):
    part = np.asarray(function(*[leaf[:count] for leaf in rows], rest))
    found += int(np.sum(part != whole[:count]))
  return found


@jax.jit
def ragged(x, ids, weights, slabs):
  """Sorts all picks by expert and multiplies them with `lax.ragged_dot`."""
  flat = {name: leaf.reshape(-1, *leaf.shape[2:]) for name, leaf in slabs.items()}
  picks = ids.reshape(-1)
  order = jnp.argsort(picks, stable=True)
  rows = order // ids.shape[1]
  sizes = jnp.bincount(picks, length=8).astype(jnp.int32)
  precise = dict(precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
  gate, up = jnp.split(lax.ragged_dot(x[rows], flat["gate_up"], sizes, **precise), 2, axis=-1)
  down = lax.ragged_dot(jax.nn.silu(gate) * up, flat["down"], sizes, **precise)
  weighted = down * weights.reshape(-1)[order][:, None]
  return jnp.zeros(x.shape, jnp.float32).at[rows].add(weighted)


@jax.jit
def dropping(x, ids, weights, slabs):
  """Drops the rows of an expert past its capacity, the mean."""
  is_of = ids.reshape(-1)[:, None] == jnp.arange(8, dtype=jnp.int32)[None, :]
  picked = is_of.astype(jnp.int32)
  place = jnp.sum((jnp.cumsum(picked, axis=0) - picked) * picked, axis=1).reshape(ids.shape)
  kept = jnp.where(place < -(-ids.size // 8), weights, jnp.float32(0))
  return experts(x, ids, kept, slabs)


def router_outside_the_tile() -> int:
  """Twin: softmax and choice see all rows of the batch at once."""
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.standard_normal((48, 256)), jnp.float32)
  router = Router(jnp.asarray(0.1 * rng.standard_normal((256, 128)), jnp.float32))

  @jax.jit
  def inside(x, router):
    return routing.route(x, router, WIDE, jnp.int32(x.shape[0]), NUMERICS)[1]

  @jax.jit
  def outside(x, router):
    rows = lambda router, x, _: linear.dot(x, router.weight)
    logits = tiles.map_rows(rows, router, x, jnp.int32(x.shape[0]), NUMERICS)
    weights, _ = lax.top_k(jax.nn.softmax(logits, axis=-1), WIDE.num_chosen)
    return weights / jnp.sum(weights, axis=-1, keepdims=True)

  assert num_differing(inside, x, router) == 0
  return num_differing(outside, x, router)


def ragged_dot() -> int:
  """Twin: `lax.ragged_dot` multiplies the sorted rows."""
  assert num_differing(experts, *wide_mixture()) == 0
  return num_differing(ragged, *wide_mixture())


def a_capacity() -> int:
  """Twin: an expert drops the rows past its capacity. Returns how many rows lose an expert."""
  x, ids, weights, slabs = wide_mixture()
  assert num_differing(dropping, x, ids, weights, slabs) > 0
  differs = np.asarray(dropping(x, ids, weights, slabs) != experts(x, ids, weights, slabs))
  return int(np.sum(np.any(differs, axis=1)))


def a_sink_before_the_last_merge() -> int:
  """Twin: the sink is merged with the first split of keys, and the other splits behind it."""
  rng = np.random.default_rng(1)
  shape = 3, NUM_ROWS, 4
  splits = [
    attention.Partial(
      jnp.asarray(3 * rng.standard_normal(shape[1:]), jnp.float32),
      jnp.asarray(rng.uniform(1, 16, shape[1:]), jnp.float32),
      jnp.asarray(rng.standard_normal((*shape[1:], WIDTH)), jnp.float32),
    )
    for _ in range(shape[0])
  ]
  sinks = jnp.asarray(rng.standard_normal(4), jnp.float32)

  def divided(total):
    return np.asarray(total.weighted / total.total[..., None])

  @jax.jit
  def last(splits):
    return attention.with_sinks(functools.reduce(attention.merge, splits), sinks)

  @jax.jit
  def first(splits):
    one, *others = splits
    return functools.reduce(attention.merge, others, attention.with_sinks(one, sinks))

  np.testing.assert_allclose(divided(first(splits)), divided(last(splits)), rtol=1e-4, atol=1e-6)
  return int(np.sum(divided(first(splits)) != divided(last(splits))))


@pytest.mark.parametrize(
  "twin",
  [
    router_outside_the_tile,
    pytest.param(ragged_dot, marks=pytest.mark.thorough),
    by_weight,
    by_psum,
    one_chain,
    pytest.param(a_capacity, marks=pytest.mark.thorough),
    a_sink_before_the_last_merge,
  ],
  ids=lambda twin: twin.__name__,
)
def test_each_twin_is_noticed(twin):
  assert twin() > 0
