"""A grown model computes the small model's function; unsupported growth is refused."""

from __future__ import annotations

import dataclasses

import decoder_reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model

from seerjax import numerics as numerics_lib
from seerjax.layer_kinds import Experts
from seerjax.models import growth, parameters
from seerjax.ops import rotary
from seerjax.ops.routing import RoutingConfig

# Odd wherever a size may be: 3 features of a value, no power of two, heads that share keys.
SMALL = tiny_model.SMALLEST.changed(
  vocab_size=33,
  hidden_size=14,
  intermediate_size=10,
  head_dim=6,
  rotary=rotary.RotaryConfig(head_dim=6),
)
# Three copies of a hidden feature, two of a head, five of a head's feature; of the 10 units of the
# MLP three are copied three times, the others twice.
LARGE = SMALL.changed(
  hidden_size=42,
  intermediate_size=23,
  num_layers=4,
  num_heads=4,
  num_kv_heads=2,
  head_dim=30,
  rotary=rotary.RotaryConfig(head_dim=30),
)
NUMERICS = numerics_lib.NumericsConfig(backend="untiled", reduction_shards=1)
# Families of models: Qwen3, Qwen2.5, Llama with a head of its own.
FAMILIES = (
  dict(has_qk_norms=True),
  dict(has_qk_norms=False, has_qkv_biases=True),
  dict(has_qk_norms=False, is_tied=False),
)


def of_family(family):
  return (shape.changed(**family) for shape in (SMALL, LARGE))


def weights(config, seed=3, numerics=NUMERICS):
  """Weights far from those of `init`: no norm is one, no bias zero, products are large."""
  draw = np.random.default_rng(seed)

  def far(path, leaf):
    scale, spread = (1.0, 0.1) if path[-1].key.endswith("norm") else (8.0, 0.05)
    return jnp.asarray(leaf * scale + draw.normal(size=leaf.shape) * spread, jnp.float32)

  params = parameters.init(numerics_lib.key(seed), config, numerics)
  return jax.tree_util.tree_map_with_path(far, params)


def logits(params, config):
  tokens = np.random.default_rng(1).integers(config.vocab_size, size=12, dtype=np.int32)
  return np.asarray(decoder_reference.logits(params, jnp.asarray(tokens), config))


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_the_grown_model_has_the_small_ones_logits(family):
  small, large = of_family(family)
  params = weights(small)
  expected = logits(params, small)
  grown = growth.grow(params, small, large, noise=0.0)
  shapes = jax.tree.map(lambda leaf: leaf.shape, parameters.shapes(large, 1))
  assert jax.tree.map(lambda leaf: leaf.shape, grown) == shapes
  assert expected.std() > 0.3  # Large enough that a tolerance of 1e-4 is meaningful.
  np.testing.assert_allclose(logits(grown, large), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES[:1])
def test_each_part_of_the_growth_is_needed(family):
  """Twins: an omitted part is detected."""
  small, large = of_family(family)
  params = weights(small)
  expected = logits(params, small)
  grown = growth.grow(params, small, large, noise=0.0)
  layer = grown["layers"][0]
  for name, wrong in (
    ("qkv", layer["qkv"].at[:, 0].multiply(3.0)),
    ("out", layer["out"] * 2.0),
    ("down", layer["down"].at[:, 0].multiply(3.0)),
    (
      "query_norm",
      layer["query_norm"] * large.layers[0].attention.head_dim / small.layers[0].attention.head_dim,
    ),
  ):
    changed = {**grown, "layers": [{**layer, name: wrong}, *grown["layers"][1:]]}
    assert np.abs(logits(changed, large) - expected).max() > 1e-3, name


def test_noise_divides_unevenly_and_changes_no_logit_where_heads_stay_as_wide():
  small = SMALL
  large = LARGE.changed(
    head_dim=small.layers[0].attention.head_dim, rotary=small.layers[0].attention.rotary
  )
  params = weights(small)
  grown = growth.grow(params, small, large, noise=0.25)
  np.testing.assert_allclose(logits(grown, large), logits(params, small), rtol=0, atol=1e-4)
  first, second, third = np.split(np.asarray(grown["layers"][0]["qkv"]), 3, axis=1)
  assert (first != second).mean() > 0.99 and (second != third).mean() > 0.99
  other = growth.grow(params, small, large, noise=0.25, seed=1)
  assert (np.asarray(other["layers"][0]["qkv"])[:, :14] != first).mean() > 0.99


def test_noise_in_new_features_of_heads_changes_logits_a_little():
  params = weights(SMALL)
  expected = logits(params, SMALL)
  errors = [
    np.abs(logits(growth.grow(params, SMALL, LARGE, noise=noise), LARGE) - expected).max()
    for noise in (0.01, 0.1)
  ]
  assert 1e-4 < errors[0] < errors[1] < expected.std()


@pytest.mark.thorough
def test_slabs_are_grown_one_by_one():
  numerics = dataclasses.replace(NUMERICS, reduction_shards=2)
  small = SMALL.changed(vocab_size=34, num_heads=4, num_kv_heads=2)
  large = LARGE.changed(vocab_size=34, num_heads=8, num_kv_heads=4, intermediate_size=26)
  params = weights(small, numerics=numerics)
  grown = growth.grow(params, small, large, noise=0.0)
  expected = logits(params, small)
  np.testing.assert_allclose(logits(grown, large), expected, rtol=0, atol=1e-4)
  odd = large.changed(intermediate_size=27)
  with pytest.raises(ValueError, match="intermediate_size: got 27 for weights in 2 slabs, expecte"):
    growth.grow(params, small, odd)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(vocab_size=34), "growth.vocab_size: got 34 for a model of 33, expected the same"),
    (dict(is_tied=False), "growth.is_tied: got False for a model of True, expected the same"),
    (dict(has_qk_norms=False), "growth.has_qk_norms: got False for a model of True, expected"),
    (dict(has_qkv_biases=True), "growth.has_qkv_biases: got True for a model of False, expected"),
    (dict(norm_eps=1e-5), "growth.norm_eps: got 1e-05 for a model of 1e-06, expected the same"),
    (dict(hidden_size=43), "growth.hidden_size: got 43 for a model of 14, .*use 42"),
    (dict(num_heads=3, num_kv_heads=1), "growth.num_heads: got 3 for a model of 2, .*use 2"),
    (dict(num_kv_heads=1), "got 4 queries for each key/value head for a model of 2, expected the"),
    (
      dict(head_dim=32, rotary=rotary.RotaryConfig(head_dim=32)),
      "growth.head_dim: got 32 for a model of 6, .*use 30",
    ),
    (dict(intermediate_size=9), "growth.intermediate_size: got 9 for a model of 10, expected at"),
    (dict(num_layers=1), "growth.num_layers: got 1 for a model of 2, expected at least as many"),
    (
      dict(rotary=rotary.RotaryConfig(head_dim=30, base=500.0)),
      "growth.rotary: got .*base=500.0.*expected every frequency of the small model",
    ),
  ],
)
def test_shapes_between_which_there_is_no_growth_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    growth.check(SMALL, LARGE.changed(**changes))


@pytest.mark.parametrize("noise", [-0.1, 1.0, float("nan")])
def test_noise_out_of_range_is_refused(noise):
  with pytest.raises(ValueError, match=r"growth.noise: got .*, expected 0 <= noise < 1"):
    growth.grow({}, SMALL, LARGE, noise=noise)


def test_a_model_that_only_tiles_compute_does_not_grow():
  small = SMALL.changed(window=7)
  with pytest.raises(
    NotImplementedError, match="growth: layer 0 has window=7, expected a model wi"
  ):
    growth.check(small, small)


def with_experts(num_experts: int, expert_size: int, num_chosen: int):
  """Returns SMALL with experts in place of its MLP of 10 units."""
  routing = RoutingConfig(num_experts=num_experts, num_chosen=num_chosen, is_renormalised=True)
  return SMALL.changed(feed_forward=Experts(routing=routing, expert_size=expert_size))


@pytest.mark.parametrize(("num_experts", "size"), [(5, 2), (4, 5)])
def test_experts_that_are_all_chosen_alike_compute_the_dense_mlp(num_experts, size):
  """Two copies of two halves, or five parts: with equal weights the sum is the dense output."""
  large = with_experts(num_experts, size, num_experts)
  params = weights(SMALL)
  grown = growth.upcycle(params, SMALL, large)
  assert jax.tree.map(jnp.shape, grown) == jax.tree.map(
    lambda leaf: leaf.shape, parameters.shapes(large, 1)
  )
  alike = [{**layer, "router": jnp.zeros_like(layer["router"])} for layer in grown["layers"]]
  expected = logits(params, SMALL)
  np.testing.assert_allclose(logits({**grown, "layers": alike}, large), expected, atol=1e-4)
  # The drawn routers do not weigh experts alike.
  assert np.abs(logits(grown, large) - expected).max() > 1e-3


@pytest.mark.parametrize(
  ("large", "message"),
  [
    (with_experts(4, 3, 2), r"got 4 experts of 3 units and a shared MLP of 0, expected"),
    (with_experts(3, 5, 2), r"got 3 experts of 5 units"),
    (with_experts(2, 5, 2).changed(num_heads=4), "expected the shape .* with experts"),
    (LARGE, "in every layer; change its feed_forward alone"),
  ],
)  # fmt: skip
def test_parts_that_do_not_cover_the_mlp_are_refused(large, message):
  with pytest.raises(ValueError, match=message):
    growth.upcycle(weights(SMALL), SMALL, large)
