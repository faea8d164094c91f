"""The forward pass: a row's bits do not depend on the batch, a gradient or the mesh."""

from __future__ import annotations

import dataclasses
import functools

import decoder_reference
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import refusals
import tiny_model

from seerjax import parallel
from seerjax.models import (
  config as model_config,
  flax_module,
  head,
  kv_layout,
  parameters,
  presets,
  transformer,
)
from seerjax.models.decoder import decide
from seerjax.ops import norms, sampling
from seerjax.types import SamplingParams

NUMERICS, BFLOAT16 = tiny_model.NUMERICS, tiny_model.BFLOAT16
UNTILED = dataclasses.replace(NUMERICS, backend="untiled")
QWEN3 = tiny_model.ODD
QWEN2 = QWEN3.changed(has_qk_norms=False, has_qkv_biases=True, is_tied=False)
LLAMA = QWEN3.changed(has_qk_norms=False, norm_eps=1e-5, is_tied=False)
FAMILIES = dict(qwen3=QWEN3, qwen2=QWEN2, llama=LLAMA)
LENGTH = 17  # Four tiles and a row, and a split and a row.

params_of = tiny_model.random_params
tokens_of = functools.partial(tiny_model.random_tokens, QWEN3)


def logits_of(config, numerics, tokens):
  return np.asarray(tiny_model.logits_of(params_of(config, numerics), tokens, config, numerics))


# Agreement.


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_logits_and_gradients_are_the_definitions(family):
  assert_definition(FAMILIES[family])


def test_those_of_windows_sinks_caps_and_other_norms_are_too():
  assert_definition(tiny_model.RULES)


def assert_definition(config):
  params, tokens = params_of(config, NUMERICS), tokens_of(1, LENGTH)[0]
  weights = jnp.asarray(np.random.default_rng(5).standard_normal((LENGTH, 48)), jnp.float32)

  def loss(params, function):
    logits = function(params)
    return jnp.sum(jnp.tanh(logits / 10) * weights), logits

  def ours(params):
    return flax_module.logits_of(params, tokens[None], decoder=decide(config, NUMERICS))[0]

  def reference(params):
    return decoder_reference.logits(params, tokens, config)

  gradient = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
  (_, found), found_gradient = gradient(params, ours)
  (_, expected), expected_gradient = gradient(params, reference)
  scale = float(jnp.max(jnp.abs(expected)))
  np.testing.assert_allclose(found, expected, atol=1e-5 * scale, rtol=0)
  for path, leaf in jax.tree_util.tree_flatten_with_path(expected_gradient)[0]:
    got = found_gradient
    for key in path:
      got = got[key.key if hasattr(key, "key") else key.idx]
    size = float(jnp.max(jnp.abs(leaf)))
    assert size > 0
    np.testing.assert_allclose(
      got, leaf, atol=5e-5 * size, rtol=0, err_msg=jax.tree_util.keystr(path)
    )
  # The value computed under a gradient has the same bits.
  np.testing.assert_array_equal(found, logits_of(config, NUMERICS, tokens[None])[0])


@pytest.mark.thorough
@pytest.mark.few(2)
@pytest.mark.parametrize("length", [1, 3, 4, 5])
def test_any_length_agrees_with_the_definition(length):
  params = params_of(QWEN3, NUMERICS)
  tokens = tokens_of(1, LENGTH, seed=length)
  expected = np.asarray(decoder_reference.logits(params, tokens[0], QWEN3))[:length]
  found = logits_of(QWEN3, NUMERICS, tokens[:, :length])[0]
  np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
  # Causality: a longer sequence has the same bits on its prefix.
  np.testing.assert_array_equal(logits_of(QWEN3, NUMERICS, tokens)[0, :length], found)


@pytest.mark.thorough
def test_bfloat16_follows_float32():
  tokens = tokens_of(2, LENGTH)
  params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params_of(QWEN3, BFLOAT16))
  expected = np.stack([decoder_reference.logits(params, line, QWEN3) for line in tokens])
  found = logits_of(QWEN3, BFLOAT16, tokens)
  assert found.dtype == np.float32
  assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


# Bits.


@pytest.mark.thorough
@pytest.mark.few(1)
@pytest.mark.parametrize("numerics", [NUMERICS, BFLOAT16], ids=["f32", "bf16"])
def test_rows_are_equal_alone_in_a_batch_and_permuted(numerics):
  tokens = tokens_of(4, LENGTH)
  whole = logits_of(QWEN3, numerics, tokens)
  order = np.array([2, 0, 3, 1])
  np.testing.assert_array_equal(logits_of(QWEN3, numerics, tokens[order]), whole[order])
  np.testing.assert_array_equal(logits_of(QWEN3, numerics, tokens[:1]), whole[:1])
  np.testing.assert_array_equal(logits_of(QWEN3, numerics, tokens[2:]), whole[2:])


def stacked_rows(params, tokens, num_rows):
  """Hidden rows of sequences of one position each: as many rows as tokens."""
  page_size = NUMERICS.kv_split
  batch, num_pages = flax_module.sequences_batch(tokens.shape[0], 1, NUMERICS, page_size)
  batch = jax.tree.map(jnp.asarray, batch)
  batch = batch._replace(tokens=tokens, num_rows=num_rows, num_segments=num_rows)
  pages = kv_layout.empty_pages(decide(QWEN3, NUMERICS), num_pages=num_pages, page_size=page_size)
  return transformer.forward(params, batch, pages, decoder=decide(QWEN3, NUMERICS))[0]


stacked = jax.jit(stacked_rows)


@pytest.mark.thorough
@pytest.mark.few(1)
@pytest.mark.parametrize("num_tiles", [1, 2, 3])
def test_a_stacked_network_has_equal_rows_in_any_number_of_tiles(num_tiles):
  params, tokens = params_of(QWEN3, NUMERICS), tokens_of(1, 12)[0]
  whole = np.asarray(stacked(params, tokens, jnp.int32(12)))
  count = num_tiles * NUMERICS.row_tile
  for live in (count, count - 1, count - 3):
    # Fewer live rows of one program, and a program of as many rows.
    found = np.asarray(stacked(params, tokens, jnp.int32(live)))
    np.testing.assert_array_equal(found[:live], whole[:live])
  np.testing.assert_array_equal(stacked(params, tokens[:count], jnp.int32(count)), whole[:count])

  def loss(params):
    hidden = stacked_rows(params, tokens[:count], jnp.int32(count))
    return jnp.sum(hidden * hidden), hidden

  (_, under_gradient), _ = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
  np.testing.assert_array_equal(under_gradient, whole[:count])


@pytest.mark.thorough
def test_no_rows_at_all_write_nothing():
  params, tokens = params_of(QWEN3, NUMERICS), tokens_of(1, 12)[0]
  found = stacked(params, tokens, jnp.int32(0))
  np.testing.assert_array_equal(found, np.zeros_like(found))


@pytest.mark.thorough
def test_the_untiled_path_agrees_but_its_bits_follow_the_batch():
  # Twin that must differ; otherwise the tests above would show nothing.
  tokens = tokens_of(4, LENGTH)
  whole = logits_of(QWEN3, UNTILED, tokens)
  tiled = logits_of(QWEN3, NUMERICS, tokens)
  np.testing.assert_allclose(whole, tiled, atol=1e-5 * np.abs(tiled).max(), rtol=0)
  pieces = [logits_of(QWEN3, UNTILED, tokens[:n]) for n in (1, 2)]
  short = logits_of(QWEN3, UNTILED, tokens[:, :1])
  assert (
    any((piece != whole[: len(piece)]).any() for piece in pieces) or (short != whole[:, :1]).any()
  )


# Meshes.

SAMPLING = [
  SamplingParams(temperature=0),
  SamplingParams(temperature=0.7, top_k=9),
  SamplingParams(logit_bias=((3, 2.0),)),
  SamplingParams(top_p=0.8, min_p=0.01),
]


@pytest.mark.thorough
@pytest.mark.few(2)
@pytest.mark.parametrize("is_filtered", [False, True])
@pytest.mark.parametrize("count", [5, 35])
def test_gradients_of_scores_are_the_definitions(count, is_filtered):
  """Tests given tokens with biases, at several temperatures, and with filters on some rows."""
  params = params_of(QWEN3, NUMERICS)
  rng = np.random.default_rng(count)
  hidden = jnp.asarray(rng.standard_normal((count, QWEN3.hidden_size)), jnp.float32)
  requests = [
    SamplingParams(
      temperature=(1.0, 0.7, 0.0)[row % 3],
      top_k=3 if is_filtered and row % 2 else 0,
      logit_bias=((row, 1.5),) if row % 4 == 1 else (),
    )
    for row in range(count)
  ]
  rows = jax.tree.map(jnp.asarray, sampling.sampling_rows(requests))
  table = params["head"] if "head" in params else params["embed"]

  def logits_of(hidden, table):
    normed = norms.rms_norm_reference(hidden, params["final_norm"], eps=QWEN3.norm_eps)
    return jnp.matmul(normed, table.reshape(-1, QWEN3.hidden_size).T, precision="highest")

  def definition(hidden, table):
    logits = logits_of(hidden, table)
    processed = sampling.processed_rows(logits, rows)
    logp, raw = jax.nn.log_softmax(processed), jax.nn.log_softmax(logits)
    picked = jnp.arange(count), tokens
    entropy = -jnp.sum(jnp.exp(logp) * jnp.where(processed > sampling.DROPPED, logp, 0.0), axis=1)
    return logp[picked], raw[picked], entropy

  # Tokens that no filter drops.
  tokens = jnp.argmax(sampling.processed_rows(logits_of(hidden, table), rows), axis=1)
  tokens = tokens.astype(jnp.int32)
  seeds, positions = jnp.zeros(count, jnp.uint32), jnp.arange(count, dtype=jnp.int32)

  def ours(hidden, table):
    name = "head" if "head" in params else "embed"
    _, scores = head.sample_and_score(
      {**params, name: table},
      hidden,
      tokens,
      rows,
      seeds,
      positions,
      jnp.int32(count),
      jax.random.key(0),
      decoder=decide(QWEN3, NUMERICS),
    )
    return scores.logprob, scores.raw_logprob, scores.entropy

  def total(hidden, table, function):
    parts = function(hidden, table)
    return sum(weight * jnp.sum(part) for weight, part in zip((1, 2, 3), parts, strict=True))

  gradient = jax.jit(jax.value_and_grad(total, argnums=(0, 1)), static_argnums=2)
  found, slopes = gradient(hidden, table, ours)
  expected, expected_slopes = gradient(hidden, table, definition)
  np.testing.assert_allclose(found, expected, rtol=1e-4)
  for one, other in zip(slopes, expected_slopes, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def test_a_cap_comes_before_biases_temperature_and_raw_scores():
  """Raw log-probabilities are those of capped logits; so are gradients, slab by slab."""
  config, count = tiny_model.RULES, 6
  params = params_of(config, NUMERICS)
  rng = np.random.default_rng(0)
  hidden = jnp.asarray(3 * rng.standard_normal((count, config.hidden_size)), jnp.float32)
  tokens = jnp.asarray(rng.integers(0, config.vocab_size, count), jnp.int32)
  requests = [SamplingParams(temperature=0.5, logit_bias=((3, 2.0),))] * count
  rows = jax.tree.map(jnp.asarray, sampling.sampling_rows(requests))
  positions = jnp.arange(count, dtype=jnp.int32)

  def ours(hidden):
    arguments = tokens, rows, jnp.zeros(count, jnp.uint32), positions, jnp.int32(count)
    decoder = decide(config, NUMERICS)
    key = jax.random.key(0)
    scores = head.sample_and_score(params, hidden, *arguments, key, decoder=decoder)[1]
    return jnp.sum(scores.logprob + 2 * scores.raw_logprob), scores

  def definition(hidden):
    normed = norms.rms_norm_reference(hidden, 1 + params["final_norm"], eps=config.norm_eps)
    logits = jnp.matmul(normed, params["embed"].T, precision="highest")
    logits = 4.0 * jnp.tanh(logits / 4.0)
    processed = (logits.at[:, 3].add(2.0)) / 0.5
    picked = jnp.arange(count), tokens
    logp, raw = jax.nn.log_softmax(processed)[picked], jax.nn.log_softmax(logits)[picked]
    return jnp.sum(logp + 2 * raw), (logp, raw)

  (_, scores), slope = jax.jit(jax.value_and_grad(ours, has_aux=True))(hidden)
  (_, (logp, raw)), expected = jax.value_and_grad(definition, has_aux=True)(hidden)
  np.testing.assert_allclose(scores.logprob, logp, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(scores.raw_logprob, raw, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(slope, expected, rtol=1e-3, atol=1e-4)


def scored_forward(params, pages, batch, rows, *, config, numerics, axis=None):
  """Hidden rows and pages of the forward, tokens and scores of the head."""
  hidden, pages = transformer.forward(
    params, batch, pages, decoder=decide(config, numerics, axis=axis)
  )
  count = hidden.shape[0]
  seeds = jnp.arange(count, dtype=jnp.uint32)
  forced = jnp.where(jnp.arange(count, dtype=jnp.int32) % 3 == 0, batch.tokens, -1)
  scored = head.sample_and_score(
    params,
    hidden,
    forced,
    rows,
    seeds,
    batch.positions,
    batch.num_rows,
    jax.random.key(8),
    decoder=decide(config, numerics, axis=axis),
  )
  return (hidden, scored), pages


@pytest.mark.thorough
@pytest.mark.parametrize(
  ("config", "numerics", "sizes"),
  [
    # Slabs, rounding and biases are the same in every layer, so one layer suffices.
    pytest.param(presets.nano().changed(num_layers=1), NUMERICS, (8,), id="nano-f32"),
    pytest.param(presets.nano(), NUMERICS, (1, 2, 8), id="whole-nano-f32", marks=pytest.mark.long),
    pytest.param(
      QWEN2.changed(num_layers=1),
      BFLOAT16,
      (2, 8),
      id="qwen2-bf16",
      marks=pytest.mark.long,
    ),
  ],
)
def test_a_mesh_changes_no_bit(config, numerics, sizes):
  params, length = params_of(config, numerics), 6
  batch, num_pages = flax_module.sequences_batch(2, length, numerics, 8)
  batch = jax.tree.map(jnp.asarray, batch)._replace(tokens=tokens_of(2, length).reshape(-1))
  pages = kv_layout.empty_pages(decide(config, numerics), num_pages=num_pages, page_size=8)
  rows = jax.tree.map(jnp.asarray, sampling.sampling_rows(SAMPLING * 3))
  run = functools.partial(scored_forward, config=config, numerics=numerics)
  specs = parameters.partition_specs(config, 8)
  expected = jax.jit(run)(params, pages, batch, rows)
  for tensor_parallel_size in sizes:
    sharded = jax.shard_map(
      functools.partial(run, axis="model"),
      mesh=parallel.make_mesh(tensor_parallel_size=tensor_parallel_size),
      in_specs=(specs, jax.P("model"), jax.P(), jax.P()),
      out_specs=(jax.P(), jax.P("model")),
      check_vma=False,
    )
    found = jax.jit(sharded)(params, pages, batch, rows)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_specs_have_the_tree_of_the_parameters():
  for config in FAMILIES.values():
    specs, shapes = parameters.partition_specs(config, 8), parameters.shapes(config, 8)
    by_leaf = jax.tree.map(
      lambda spec, shape: (spec, shape.shape),
      specs,
      shapes,
      is_leaf=lambda leaf: isinstance(leaf, jax.P),
    )
    assert by_leaf.pop("embed") == (jax.P("model"), (config.vocab_size, config.hidden_size))
    for spec, shape in jax.tree.leaves(by_leaf, is_leaf=lambda leaf: isinstance(leaf, tuple)):
      if spec == jax.P("model"):
        assert shape[0] == 8


# Parameters and the module.


@pytest.mark.thorough
def test_init_has_the_layout_and_is_a_function_of_its_key():
  numerics = dataclasses.replace(NUMERICS, reduction_shards=4)
  first = parameters.init(jax.random.key(0), QWEN2, numerics)
  again = parameters.init(jax.random.key(0), QWEN2, numerics)
  other = parameters.init(jax.random.key(1), QWEN2, numerics)
  layout = parameters.shapes(QWEN2, 4)
  assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), first) == jax.tree.map(
    lambda leaf: (leaf.shape, leaf.dtype), layout
  )
  jax.tree.map(np.testing.assert_array_equal, first, again)
  assert (first["embed"] != other["embed"]).any()
  assert (first["final_norm"] == 1).all() and (first["layers"][0]["qkv_bias"] == 0).all()
  assert 0.015 < float(jnp.std(first["layers"][1]["gate_up"])) < 0.025


@pytest.mark.thorough
def test_the_module_says_what_the_function_says():
  module = flax_module.Transformer(QWEN3, NUMERICS, rngs=nnx.Rngs(params=5))
  tokens = tokens_of(1, 5)
  params = module.pure_params()
  jax.tree.map(np.testing.assert_array_equal, params, jax.tree.map(jnp.asarray, params))
  compute = parameters.compute_params(params, NUMERICS)
  expected = tiny_model.logits_of(compute, tokens, QWEN3, NUMERICS)
  found = nnx.jit(lambda module, tokens: module(tokens))(module, tokens)
  np.testing.assert_array_equal(found, expected)


@pytest.mark.thorough
def test_weights_go_into_a_module_and_come_out_of_it():
  params = parameters.init(jax.random.key(1), QWEN3, NUMERICS)
  other = parameters.init(jax.random.key(2), QWEN3, NUMERICS)
  module = flax_module.Transformer(QWEN3, NUMERICS, params=params)
  jax.tree.map(np.testing.assert_array_equal, module.pure_params(), params)
  tokens = tokens_of(1, 5)
  forward = nnx.jit(lambda module, tokens: module(tokens))
  for weights in (params, other):
    module.update_weights(weights)
    compute = parameters.compute_params(weights, NUMERICS)
    expected = tiny_model.logits_of(compute, tokens, QWEN3, NUMERICS)
    np.testing.assert_array_equal(forward(module, tokens), expected)
  jax.tree.map(np.testing.assert_array_equal, module.pure_params(), other)


@pytest.mark.thorough
def test_a_module_learns_as_its_weights_do_under_nnx():
  config = QWEN3.changed(num_layers=1)  # Compiled twice.
  params = parameters.init(jax.random.key(1), config, NUMERICS)
  module = flax_module.Transformer(config, NUMERICS, params=params)
  optimizer = nnx.Optimizer(module, optax.sgd(0.5), wrt=nnx.Param)
  tokens = tokens_of(1, 5)

  def loss_of(logits):
    scores = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))

  @nnx.jit
  def step(module, optimizer):
    loss, gradient = nnx.value_and_grad(lambda module: loss_of(module(tokens)))(module)
    optimizer.update(module, gradient)
    return loss

  @jax.jit
  def plain(params):
    def loss(params):
      compute = parameters.compute_params(params, NUMERICS)
      return loss_of(flax_module.logits_of(compute, tokens, decoder=decide(config, NUMERICS)))

    value, gradient = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda leaf, slope: leaf - 0.5 * slope, params, gradient)

  first, second = step(module, optimizer), step(module, optimizer)
  expected, moved = plain(params)
  np.testing.assert_array_equal(first, expected)
  assert second < first
  module.update_weights(moved)
  third = step(module, optimizer)
  np.testing.assert_allclose(third, second, rtol=1e-5)


def test_largest_shards_by_hand():
  assert model_config.largest_shards(QWEN3) == 8
  assert model_config.largest_shards(dataclasses.replace(QWEN3, vocab_size=44)) == 4
  assert model_config.largest_shards(QWEN3.changed(intermediate_size=6)) == 2
  assert model_config.largest_shards(QWEN3.changed(num_kv_heads=1)) == 8
  assert model_config.largest_shards(QWEN3.changed(num_heads=4, num_kv_heads=1)) == 4
  # Seven heads for each key/value head: a slab of an eighth would have parts of two heads' groups.
  assert model_config.largest_shards(QWEN3.changed(num_heads=28, num_kv_heads=4)) == 4
  # Three slabs of eight, or one of eight, do not fit six key/value heads.
  assert model_config.largest_shards(QWEN3.changed(num_heads=24, num_kv_heads=6)) == 2


@pytest.mark.thorough
@pytest.mark.parametrize(("heads", "slabs"), [((2, 2), 2), ((4, 1), 4), ((8, 2), 8), ((8, 8), 8)])
def test_a_model_chooses_its_slabs_where_that_is_left_to_it(heads, slabs):
  config = QWEN2.changed(num_heads=heads[0], num_kv_heads=heads[1])
  left = dataclasses.replace(NUMERICS, reduction_shards=0)
  chosen = dataclasses.replace(NUMERICS, reduction_shards=slabs)
  assert decide(config, left).numerics == chosen
  assert decide(config, chosen).numerics is chosen
  params = parameters.init(jax.random.key(0), config, left)
  assert params["layers"][0]["down"].shape[0] == slabs
  tokens = tiny_model.random_tokens(config, 1, 5)
  logits = functools.partial(flax_module.logits_of, decoder=decide(config, left))
  assert jax.eval_shape(logits, params, tokens).shape == (1, 5, config.vocab_size)


# Errors.


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      dict(num_heads=4, num_kv_heads=4),
      "got 8, expected a divisor of num_heads=4; .*shards=4 .* or 0",
    ),
    (
      dict(num_heads=24, num_kv_heads=6),
      "got 8, expected a divisor or a multiple of num_kv_heads=6; .*shards=2 .* or 0",
    ),
    (dict(intermediate_size=36), "expected a divisor of intermediate_size=36"),
    (dict(vocab_size=50), "expected a divisor of vocab_size=50; use reduction_shards=2"),
  ],
)
def test_slabs_that_do_not_divide_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    parameters.init(jax.random.key(0), QWEN3.changed(**changes), NUMERICS)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda p: p | {"embed": p["embed"][:3]}, r"params\['embed'\]: got float32\[3, .*, expected"),
    (lambda p: p | {"embed": p["embed"].astype(jnp.bfloat16)}, r".*: got bfloat16\[.*float32"),
    (lambda p: p | {"layers": p["layers"][:1]}, r"params\['layers'\]\[1\].*: got nothing,"),
    (lambda p: p | {"more": p["embed"]}, r"params\['more'\]: got .*expected nothing; pass"),
  ],
)
def test_a_module_refuses_weights_of_another_model(change, message):
  params = parameters.init(jax.random.key(1), QWEN3, NUMERICS)
  with pytest.raises(ValueError, match=f"Transformer.{message}"):
    flax_module.Transformer(QWEN3, NUMERICS, params=change(params))
  module = flax_module.Transformer(QWEN3, NUMERICS, params=params)
  with pytest.raises(ValueError, match=f"Transformer.{message}"):
    module.update_weights(change(params))
  jax.tree.map(np.testing.assert_array_equal, module.pure_params(), params)


@pytest.mark.parametrize(
  ("arguments", "given"), [({}, "neither"), (dict(rngs=1, params=1), "both")]
)
def test_a_module_has_weights_of_one_kind(arguments, given, unchecked_annotations):
  with pytest.raises(ValueError, match=f"Transformer: got {given} of rngs and params, expected"):
    flax_module.Transformer(QWEN3, NUMERICS, **arguments)


@refusals.table(
  (lambda: QWEN3.changed(num_heads=12),
   "Grouped.num_heads: got 12 query heads for 8 key/value heads"),
  (lambda: QWEN3.changed(head_dim=8),
   "Grouped.rotary.head_dim: got 6, expected head_dim=8"),
  (lambda: kv_layout.empty_pages(decide(QWEN3, NUMERICS), num_pages=2, page_size=12),
   "page_size: got 12, expected a divisor of kv_split=16"),
)  # fmt: skip
def test_refusals(row):
  refusals.check(row)


def test_kernels_without_a_gpu_are_refused():
  numerics = dataclasses.replace(BFLOAT16, backend="pallas")
  message = "got 'pallas', but got the platform 'cpu', expected an NVIDIA GPU of compute capability"
  with pytest.raises(ValueError, match=message):
    flax_module.logits_of(
      params_of(QWEN3, BFLOAT16), tokens_of(1, 2), decoder=decide(QWEN3, numerics)
    )


def test_meshes_that_cannot_be_are_refused():
  with pytest.raises(
    ValueError, match="data_parallel_size=3 x tensor_parallel_size=4 = 12 devices, expected"
  ):
    parallel.make_mesh(data_parallel_size=3, tensor_parallel_size=4)
  with pytest.raises(ValueError, match="got 3 devices, expected a divisor of reduction_shards=8"):
    parallel.local_slabs(8, 3)
  assert parallel.local_slabs(8, 2) == 4
