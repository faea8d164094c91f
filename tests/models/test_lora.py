"""LoRA adapters: a zero adapter changes nothing, and a row's bits depend on that row alone."""

from __future__ import annotations

import dataclasses
import functools

from equal_trees import assert_equal_bits
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model

from seerjax import parallel
from seerjax.models import flax_module, kv_layout, lora, parameters, transformer
from seerjax.models.decoder import decide

NUMERICS, BFLOAT16 = tiny_model.NUMERICS, tiny_model.BFLOAT16
MODEL = tiny_model.ODD
RANK, SCALE = 3, 1.5
LENGTH = 9  # Two tiles and a row.

base_of = functools.partial(tiny_model.random_params, MODEL)
tokens_of = functools.partial(tiny_model.random_tokens, MODEL)


@functools.cache
def fresh(targets=lora.TARGETS):
  return lora.init(jax.random.key(2), MODEL, NUMERICS, RANK, targets)


@functools.cache
def adapter_of(targets=lora.TARGETS):
  """Trained adapters; B of a fresh one is zero."""
  rng = np.random.default_rng(4)
  return jax.tree.map(
    lambda x: x + (0.2 * rng.standard_normal(x.shape)).astype(np.float32), fresh(targets)
  )


def logits_of(params, numerics=NUMERICS, tokens=None):
  tokens = tokens_of(2, LENGTH) if tokens is None else tokens
  return np.asarray(tiny_model.logits_of(params, tokens, MODEL, numerics), np.float32)


@pytest.mark.thorough
@pytest.mark.few(1)
@pytest.mark.parametrize("numerics", [NUMERICS, BFLOAT16], ids=["f32", "bf16"])
def test_an_adapter_that_has_not_learnt_says_what_the_base_says(numerics):
  base = base_of(numerics)
  attached = logits_of(lora.attach(base, fresh(), SCALE), numerics)
  plain = logits_of(base, numerics)
  # Two programs: XLA may fuse them differently (JAX 0.10.2 does), so bits are not promised here.
  tolerance = 1e-5 if numerics is NUMERICS else 2e-2
  np.testing.assert_allclose(attached, plain, rtol=0, atol=tolerance * np.abs(plain).max())


@pytest.mark.thorough
@pytest.mark.few(2)
@pytest.mark.parametrize("targets", [lora.TARGETS, ("qkv", "down"), ("out", "gate_up")])
def test_attached_agrees_with_merged(targets):
  base, adapter = base_of(NUMERICS), adapter_of(targets)
  attached = logits_of(lora.attach(base, adapter, SCALE))
  scale = np.abs(attached).max()
  merged = logits_of(lora.merge(base, adapter, SCALE))
  np.testing.assert_allclose(attached, merged, rtol=0, atol=1e-4 * scale)
  # Each target alone changes the logits.
  for name in targets:
    alone = {"layers": [{name: layer[name]} for layer in adapter["layers"]]}
    changed = logits_of(lora.merge(base, alone, SCALE)) - logits_of(base)
    assert np.abs(changed).max() > 1e-3 * scale


def test_merging_by_hand():
  base, adapter = base_of(NUMERICS), adapter_of()
  merged = lora.merge(base, adapter, SCALE)["layers"][1]
  weights, pairs = base["layers"][1], adapter["layers"][1]
  for name, slab in (("qkv", 3), ("gate_up", 7)):
    found = merged[name][slab] - weights[name][slab]
    expected = SCALE * np.asarray(pairs[name]["a"]) @ np.asarray(pairs[name]["b"][slab])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
  for name, slab in (("down", 2), ("out", 0)):
    found = merged[name][slab] - weights[name][slab]
    expected = SCALE * np.asarray(pairs[name]["a"][slab]) @ np.asarray(pairs[name]["b"])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def loss_of(params, numerics):
  logits = flax_module.logits_of(params, tokens_of(2, LENGTH), decoder=decide(MODEL, numerics))
  return jnp.mean(jax.nn.logsumexp(logits * logits, axis=-1)), logits


@functools.cache
def learnt(numerics):
  """The gradient of the trained part of attached weights, and the logits computed with it."""

  @jax.jit
  def gradient_of(params):
    trained, frozen = lora.partition(params)
    return jax.grad(lambda trained: loss_of(lora.combine(trained, frozen), numerics), has_aux=True)(
      trained
    )

  return gradient_of(lora.attach(base_of(numerics), adapter_of(), SCALE))


@pytest.mark.thorough
@pytest.mark.few(1)
@pytest.mark.parametrize("numerics", [NUMERICS, BFLOAT16], ids=["f32", "bf16"])
def test_bits_are_equal_in_any_batch_and_under_a_gradient_that_reaches_the_adapter_alone(numerics):
  params, tokens = lora.attach(base_of(numerics), adapter_of(), SCALE), tokens_of(2, LENGTH)
  whole = logits_of(params, numerics)
  np.testing.assert_array_equal(logits_of(params, numerics, tokens[:1]), whole[:1])
  np.testing.assert_array_equal(logits_of(params, numerics, tokens[1:, :4]), whole[1:, :4])
  gradient, found = learnt(numerics)
  np.testing.assert_array_equal(found, whole)
  master = adapter_of()
  assert jax.tree.structure(gradient) == jax.tree.structure(master)
  for leaf, like in zip(jax.tree.leaves(gradient), jax.tree.leaves(master)):
    assert leaf.shape == like.shape and leaf.dtype == numerics.dtype
    assert np.any(np.asarray(leaf) != 0)


@pytest.mark.thorough
def test_the_gradient_is_that_through_merged_weights():
  @jax.jit
  def through_merged(adapter):
    return jax.grad(
      lambda adapter: loss_of(lora.merge(base_of(NUMERICS), adapter, SCALE), NUMERICS)[0]
    )(adapter)

  expected = through_merged(adapter_of())
  for got, want in zip(jax.tree.leaves(learnt(NUMERICS)[0]), jax.tree.leaves(expected)):
    size = np.abs(want).max()
    assert size > 0
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-3 * size)


def test_without_adapters_everything_learns():
  base = base_of(NUMERICS)
  trained, frozen = lora.partition(base)
  assert trained is base and frozen is None
  assert lora.combine(trained, frozen) is base
  params = lora.attach(base, adapter_of(), SCALE)
  assert_equal_bits(lora.combine(*lora.partition(params)), params)


def hidden_rows(params, pages, batch, axis=None):
  return transformer.forward(params, batch, pages, decoder=decide(MODEL, NUMERICS, axis=axis))[0]


# One program for all meshes to compare with.
on_one_device = jax.jit(hidden_rows)


@pytest.mark.thorough
@pytest.mark.few(1)
@pytest.mark.parametrize("tensor_parallel_size", [2, 8])
def test_devices_change_no_bit(tensor_parallel_size):
  params = lora.attach(base_of(NUMERICS), adapter_of(), SCALE)
  batch, num_pages = flax_module.sequences_batch(2, 5, NUMERICS, 16)
  batch = jax.tree.map(jnp.asarray, batch)._replace(tokens=tokens_of(2, 5).reshape(-1))
  pages = kv_layout.empty_pages(decide(MODEL, NUMERICS), num_pages=num_pages, page_size=16)
  sharded = jax.shard_map(
    functools.partial(hidden_rows, axis="model"),
    mesh=parallel.make_mesh(tensor_parallel_size=tensor_parallel_size),
    in_specs=(parameters.specs_of(params), jax.P("model"), jax.P()),
    out_specs=jax.P(),
    check_vma=False,
  )
  found = jax.jit(sharded)(params, pages, batch)
  np.testing.assert_array_equal(found, on_one_device(params, pages, batch))


# Errors.


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
  base, adapter = base_of(NUMERICS), adapter_of()
  with pytest.raises(ValueError, match="lora adapter: got 1 layers, expected the base's 2; it was"):
    use(base, {"layers": adapter["layers"][:1]}, SCALE)
  other = dataclasses.replace(NUMERICS, reduction_shards=4)
  wrong = lora.init(jax.random.key(0), MODEL, other, RANK)
  with pytest.raises(ValueError, match=r"got layers\[0\]\['down'\] with a \(4, 8, 3\) and b"):
    use(base, wrong, SCALE)
