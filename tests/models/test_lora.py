"""Adapters beside frozen weights: zero says what the base says, and bits follow a row alone."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seerjax import parallel
from seerjax.models import lora, transformer
from seerjax.numerics import NumericsConfig
from seerjax.ops import rotary

NUMERICS = NumericsConfig(row_tile=4, query_tile=4, slot_tile=2, kv_split=16)
BFLOAT16 = dataclasses.replace(NUMERICS, compute_dtype="bfloat16")
MODEL = transformer.TransformerConfig(
  family="qwen3",
  vocab_size=48,
  hidden_size=24,
  intermediate_size=32,
  num_layers=2,
  num_heads=16,
  num_kv_heads=8,
  head_dim=6,
  rotary=rotary.RotaryConfig(head_dim=6),
)
RANK, SCALE = 3, 1.5


def master_of():
  """Weights large enough that every part matters."""
  return jax.tree.map(lambda x: 5 * x, transformer.init(jax.random.key(1), MODEL, NUMERICS))


def adapter_of(targets=lora.TARGETS, is_zero=False):
  adapter = lora.init(jax.random.key(2), MODEL, NUMERICS, RANK, targets)
  if is_zero:
    return adapter
  rng = np.random.default_rng(4)
  return jax.tree.map(
    lambda x: x + jnp.asarray(0.2 * rng.standard_normal(x.shape), jnp.float32), adapter
  )


def tokens_of(batch_size, length):
  return jnp.asarray(np.random.default_rng(0).integers(0, 48, (batch_size, length)), jnp.int32)


@functools.partial(jax.jit, static_argnums=2)
def logits_of(params, tokens, numerics):
  return transformer.logits_of(params, tokens, config=MODEL, numerics=numerics)


@pytest.mark.parametrize("numerics", [NUMERICS, BFLOAT16], ids=["f32", "bf16"])
def test_an_adapter_that_has_not_learnt_says_what_the_base_says(numerics):
  base = transformer.compute_params(master_of(), numerics)
  params = lora.attach(base, adapter_of(is_zero=True), SCALE)
  attached = np.asarray(logits_of(params, tokens_of(2, 9), numerics), np.float32)
  plain = np.asarray(logits_of(base, tokens_of(2, 9), numerics), np.float32)
  # Two programs: XLA may fuse them differently (JAX 0.10.2 does), so bits are not promised here.
  tolerance = 1e-5 if numerics is NUMERICS else 2e-2
  np.testing.assert_allclose(attached, plain, rtol=0, atol=tolerance * np.abs(plain).max())


@pytest.mark.parametrize("targets", [lora.TARGETS, ("qkv",), ("out",), ("gate_up",), ("down",)])
def test_attached_agrees_with_merged(targets):
  base = transformer.compute_params(master_of(), NUMERICS)
  adapter = adapter_of(targets)
  attached = logits_of(lora.attach(base, adapter, SCALE), tokens_of(2, 9), NUMERICS)
  merged = logits_of(lora.merge(base, adapter, SCALE), tokens_of(2, 9), NUMERICS)
  scale = float(jnp.max(jnp.abs(merged)))
  np.testing.assert_allclose(attached, merged, rtol=0, atol=1e-4 * scale)
  plain = logits_of(base, tokens_of(2, 9), NUMERICS)
  assert float(jnp.max(jnp.abs(attached - plain))) > 1e-3 * scale


def test_merging_by_hand():
  base, adapter = master_of(), adapter_of()
  merged = lora.merge(base, adapter, SCALE)["layers"][1]
  weights, pairs = base["layers"][1], adapter["layers"][1]
  found = merged["qkv"][3] - weights["qkv"][3]
  expected = SCALE * np.asarray(pairs["qkv"]["a"]) @ np.asarray(pairs["qkv"]["b"][3])
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
  found = merged["down"][2] - weights["down"][2]
  expected = SCALE * np.asarray(pairs["down"]["a"][2]) @ np.asarray(pairs["down"]["b"])
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("numerics", [NUMERICS, BFLOAT16], ids=["f32", "bf16"])
def test_bits_are_equal_in_any_batch_and_under_a_gradient_that_reaches_the_adapter_alone(numerics):
  base = transformer.compute_params(master_of(), numerics)
  params = lora.attach(base, adapter_of(), SCALE)
  tokens = tokens_of(3, 9)
  whole = np.asarray(logits_of(params, tokens, numerics))
  np.testing.assert_array_equal(logits_of(params, tokens[:1], numerics), whole[:1])
  np.testing.assert_array_equal(logits_of(params, tokens[1:, :4], numerics), whole[1:, :4])

  @jax.jit
  def gradient_of(params):
    trained, frozen = lora.partition(params)

    def loss(trained):
      params = lora.combine(trained, frozen)
      logits = transformer.logits_of(params, tokens, config=MODEL, numerics=numerics)
      return jnp.mean(jax.nn.logsumexp(logits * logits, axis=-1)), logits

    return jax.grad(loss, has_aux=True)(trained)

  gradient, found = gradient_of(params)
  np.testing.assert_array_equal(found, whole)
  master = adapter_of()
  assert jax.tree.structure(gradient) == jax.tree.structure(master)
  for leaf, like in zip(jax.tree.leaves(gradient), jax.tree.leaves(master)):
    assert leaf.shape == like.shape and leaf.dtype == numerics.dtype
    assert bool(jnp.any(leaf != 0))


def test_the_gradient_is_that_through_merged_weights():
  base = transformer.compute_params(master_of(), NUMERICS)
  adapter, tokens = adapter_of(), tokens_of(1, 5)

  def loss(adapter, use):
    return jnp.mean(jnp.sin(logits_of(use(base, adapter, SCALE), tokens, NUMERICS)))

  found, expected = (jax.grad(loss)(adapter, use) for use in (lora.attach, lora.merge))
  for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
    size = float(jnp.max(jnp.abs(want)))
    assert size > 0
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-3 * size)


def test_without_adapters_everything_learns():
  base = master_of()
  trained, frozen = lora.partition(base)
  assert trained is base and frozen is None
  assert lora.combine(trained, frozen) is base
  params = lora.attach(base, adapter_of(), SCALE)
  jax.tree.map(np.testing.assert_array_equal, lora.combine(*lora.partition(params)), params)


@pytest.mark.parametrize("model_shards", [2, 8])
def test_devices_change_no_bit(model_shards):
  params = lora.attach(
    transformer.compute_params(master_of(), NUMERICS), adapter_of(), SCALE
  )
  batch, num_pages = transformer.sequences_batch(2, 5, NUMERICS, 16)
  batch = jax.tree.map(jnp.asarray, batch)._replace(tokens=tokens_of(2, 5).reshape(-1))
  pages = transformer.empty_pages(MODEL, NUMERICS, num_pages=num_pages, page_size=16)

  def hidden_rows(params, pages, batch, axis=None):
    return transformer.forward(
      params, batch, pages, config=MODEL, numerics=NUMERICS, axis=axis
    )[0]

  expected = jax.jit(hidden_rows)(params, pages, batch)
  sharded = jax.shard_map(
    functools.partial(hidden_rows, axis="model"),
    mesh=parallel.make_mesh(model_shards=model_shards),
    in_specs=(transformer.specs_of(params), jax.P("model"), jax.P()),
    out_specs=jax.P(),
    check_vma=False,
  )
  np.testing.assert_array_equal(jax.jit(sharded)(params, pages, batch), expected)


# Refusals.


@pytest.mark.parametrize(
  ("rank", "targets", "message"),
  [
    (0, lora.TARGETS, "lora rank: got 0, expected 1 <= rank <= 24, the smallest dimension"),
    (25, lora.TARGETS, "lora rank: got 25, expected 1 <= rank <= 24"),
    (3, ("qkv", "head"), r"lora targets: got \('qkv', 'head'\), expected at least one of"),
    (3, (), r"lora targets: got \(\), expected at least one of"),
    (3, ("out", "out"), r"got \('out', 'out'\), expected at least one of .*, each once"),
  ],
)
def test_adapters_that_cannot_be_are_refused(rank, targets, message):
  with pytest.raises(ValueError, match=message):
    lora.init(jax.random.key(0), MODEL, NUMERICS, rank, targets)


@pytest.mark.parametrize("use", [lora.attach, lora.merge])
def test_adapters_of_another_model_are_refused(use):
  base, adapter = master_of(), adapter_of()
  with pytest.raises(ValueError, match="lora adapter: got 1 layers, expected the base's 2; it was"):
    use(base, {"layers": adapter["layers"][:1]}, SCALE)
  other = dataclasses.replace(NUMERICS, reduction_shards=4)
  wrong = lora.init(jax.random.key(0), MODEL, other, RANK)
  with pytest.raises(ValueError, match=r"got layers\[0\]\['down'\] with a \(4, 8, 3\) and b"):
    use(base, wrong, SCALE)
