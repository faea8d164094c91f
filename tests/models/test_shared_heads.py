"""Key/value heads that several slabs share: copies in memory, one head in files."""

from __future__ import annotations

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model

from seerjax.engine import sizes
from seerjax.models import (
  flax_module,
  gguf_write,
  growth,
  huggingface,
  huggingface_layout,
  lora,
  parameters,
  peft,
  shared_heads,
)
from seerjax.models.decoder import decide
from seerjax.ops import rotary

# Eight query heads of two key/value heads, so 2 of 8 slabs share each of the former's groups.
CONFIG = tiny_model.CONFIG.changed(
  num_heads=8, num_kv_heads=2, has_qk_norms=False, has_qkv_biases=True, num_layers=2
)
SLABS = (1, 2, 4, 8)


def numerics_of(slabs: int):
  return dataclasses.replace(tiny_model.NUMERICS, reduction_shards=slabs)


def params_of(slabs: int, config=CONFIG, seed: int = 3):
  """Returns random weights with equal copies; norms are around one."""
  rng = np.random.default_rng(seed)

  def leaf(path, shape):
    noise = 0.2 * rng.standard_normal(shape.shape)
    return jnp.asarray(noise + ("norm" in path[-1].key), jnp.float32)

  shapes = parameters.shapes(config, slabs)
  drawn = jax.tree_util.tree_map_with_path(leaf, shapes)
  return shared_heads.filled(drawn, config, slabs)


def relaid(params, slabs: int, config=CONFIG):
  """Returns the weights in another number of slabs, by their tensors in files."""
  plan = huggingface_layout.plan(config)
  tensors = dict(huggingface_layout.tensors(params, plan, np.dtype(np.float32)))
  found = parameters.shapes(config, slabs)
  for path, leaf in plan:
    *owners, last = path
    owner = functools.reduce(lambda at, key: at[key], owners, found)
    read = lambda name, shape: tensors[name].reshape(shape)
    owner[last] = huggingface_layout.assembled(leaf, read, owner[last].shape, np.float32)
  return jax.tree.map(jnp.asarray, found)


def assert_equal(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_slab_has_its_query_heads_and_a_copy_of_their_key_and_value_head():
  c, one, eight = 8, params_of(1), relaid(params_of(1), 8)
  layer, whole = eight["layers"][1], one["layers"][1]
  assert layer["qkv"].shape == (8, 32, 3 * c) and whole["qkv"].shape == (1, 32, 12 * c)
  for name in ("qkv", "qkv_bias"):
    heads = np.split(np.asarray(whole[name])[0], 12, axis=-1)
    for slab, own in enumerate(np.asarray(layer[name])):
      parts = heads[slab], heads[8 + slab // 4], heads[10 + slab // 4]
      np.testing.assert_array_equal(own, np.concatenate(parts, axis=-1))
  shared_heads.check(eight, CONFIG, 8, what="")
  assert_equal(relaid(eight, 1), one)


@pytest.mark.parametrize("slabs", SLABS)
def test_files_have_a_head_once(slabs, tmp_path):
  written = []
  for params, name in ((params_of(1), "one"), (relaid(params_of(1), slabs), "own")):
    huggingface.save(tmp_path / name, params, CONFIG, dtype="float32")
    written.append((tmp_path / name / "model.safetensors").read_bytes())
  assert written[0] == written[1]
  found, config = huggingface.load(tmp_path / "one", numerics_of(slabs))
  assert config == CONFIG
  assert_equal(found, relaid(params_of(1), slabs))


def test_a_gguf_file_has_a_head_once(tmp_path):
  pytest.importorskip("gguf")
  config, files = CONFIG.changed(has_qkv_biases=False, has_qk_norms=True), []
  for slabs in (8, 8, 2):
    params = params_of(8, config)
    if slabs == 2:  # The same tensors in the layout without copies.
      huggingface.save(tmp_path / "model", params, config, dtype="float32")
      params, _ = huggingface.load(tmp_path / "model", numerics_of(2))
    files.append(tmp_path / f"{len(files)}.gguf")
    gguf_write.save(files[-1], params, config)
  assert files[0].read_bytes() == files[2].read_bytes()
  found, _ = huggingface.load(files[0], numerics_of(8))
  shared_heads.check(found, config, 8, what="")


@pytest.mark.parametrize("slabs", SLABS)
def test_an_adapter_has_a_head_once_in_its_file_and_merges_into_every_copy(slabs, tmp_path):
  rng = np.random.default_rng(1)
  draw = lambda shape: jnp.asarray(0.1 * rng.standard_normal(shape.shape), jnp.float32)
  adapter = jax.tree.map(draw, lora.shapes(CONFIG, numerics_of(1), 3))
  peft.save(tmp_path / "one", adapter, CONFIG, scale=2.0)
  own, scale = peft.load(tmp_path / "one", CONFIG, numerics_of(slabs))
  shared_heads.check(own, CONFIG, slabs, what="")
  peft.save(tmp_path / "own", own, CONFIG, scale=scale)
  one, other = (tmp_path / name / "adapter_model.safetensors" for name in ("one", "own"))
  assert one.read_bytes() == other.read_bytes()
  merged = lora.merge(relaid(params_of(1), slabs), own, scale)
  shared_heads.check(merged, CONFIG, slabs, what="")
  expected = lora.merge(params_of(1), adapter, scale)
  np.testing.assert_allclose(
    relaid(merged, 1)["layers"][0]["qkv"], expected["layers"][0]["qkv"], rtol=1e-5, atol=1e-6
  )


def test_new_weights_have_equal_copies():
  params = parameters.init(jax.random.key(0), CONFIG, numerics_of(8))
  shared_heads.check(params, CONFIG, 8, what="")
  assert len({slab.tobytes() for slab in np.asarray(params["layers"][0]["qkv"])}) == 8


def test_copies_that_differ_are_refused():
  params = params_of(8)
  layer = params["layers"][1]
  layer["qkv"] = layer["qkv"].at[5, 0, -1].add(1.0)
  message = r"mine\['layers'\]\[1\]\['qkv'\]: got different copies of .* that 4 slabs share, expect"
  with pytest.raises(ValueError, match=message):
    shared_heads.check(params, CONFIG, 8, what="mine")


def test_a_model_of_shared_heads_is_grown_from_fewer_slabs():
  config = CONFIG.changed(num_heads=4, num_kv_heads=1)
  large = config.changed(num_heads=8, num_kv_heads=2)
  with pytest.raises(ValueError, match="growth.num_kv_heads: got weights in 4 slabs for 1 key/"):
    growth.grow(params_of(4, config), config, large)
  assert growth.grow(params_of(1, config), config, large)["layers"][0]["qkv"].shape[0] == 1


def test_stacked_layers_name_the_copies_of_each():
  one = CONFIG.layers[0]
  config = dataclasses.replace(CONFIG, layers=(one, one.changed(num_kv_heads=8)) * 5)
  listed = parameters.shapes(config, 8)
  stacked = jax.eval_shape(parameters.stacked, listed)
  found = [one for one in shared_heads.of_leaves(stacked, config, 8) if one is not None]
  assert found == [shared_heads.Shared((4, 1) * 5, 16, 1)] * 2
  own = shared_heads.of_leaves(listed, config, 8)
  assert sum(one is not None for one in own) == 2 * 5


@pytest.mark.parametrize("size", SLABS)
def test_devices_store_a_head_once_each(size):
  decoder = decide(CONFIG, numerics_of(8))
  of_one = sizes.page_bytes(decoder, page_size=16)
  found = sizes.page_bytes(decoder, page_size=16, tensor_parallel_size=size)
  assert of_one == 16 * 4 * CONFIG.kv_features
  assert found // size == of_one // min(size, 2)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["tiled", "native"])
def test_logits_and_gradient_are_those_of_one_slab_within_rounding(backend):
  tokens = tiny_model.random_tokens(CONFIG, 2, 9)

  def loss(slabs: int, params):
    numerics = dataclasses.replace(numerics_of(slabs), backend=backend)
    logits = flax_module.logits_of(params, tokens, decoder=decide(CONFIG, numerics))
    return jnp.sum(jnp.sin(logits)), logits

  of = lambda slabs: jax.value_and_grad(functools.partial(loss, slabs), has_aux=True)
  (_, expected), wanted = of(1)(params_of(1))
  (_, found), gradient = of(8)(relaid(params_of(1), 8))
  np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
  wanted = relaid(wanted, 8)["layers"]
  for own, whole in zip(gradient["layers"], wanted, strict=True):
    for name in own:
      mine, theirs = np.asarray(own[name]), np.asarray(whole[name])
      if name in ("qkv", "qkv_bias"):  # Four copies of a head have a part of its gradient each.
        sums = mine[..., 8:].reshape(2, 4, *mine.shape[1:-1], 16).sum(axis=1)
        mine = np.concatenate([mine[..., :8], np.repeat(sums, 4, axis=0)], axis=-1)
      np.testing.assert_allclose(mine, theirs, rtol=2e-3, atol=2e-3, err_msg=name)


def test_native_slabs_of_heads_that_are_no_whole_vectors_have_the_logits_of_one():
  config = CONFIG.changed(
    num_heads=2, num_kv_heads=1, head_dim=10, rotary=rotary.RotaryConfig(head_dim=10)
  )
  tokens, params = tiny_model.random_tokens(config, 2, 9), params_of(1, config)
  found = []
  for slabs in (1, 2):
    own = relaid(params, slabs, config)
    numerics = dataclasses.replace(numerics_of(slabs), backend="native")
    found.append(flax_module.logits_of(own, tokens, decoder=decide(config, numerics)))
  np.testing.assert_allclose(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.thorough
def test_a_module_gives_the_gradient_of_a_head_to_the_copy_that_counts():
  config = CONFIG.changed(
    head_dim=4, rotary=rotary.RotaryConfig(head_dim=4), num_layers=1, has_qkv_biases=False
  )
  module = flax_module.Transformer(config, numerics_of(4), rngs=nnx.Rngs(0))
  tokens = tiny_model.random_tokens(config, 1, 5)
  gradient = nnx.grad(lambda module: jnp.sum(jnp.sin(module(tokens))))(module)
  qkv = np.asarray(jax.tree.leaves(nnx.to_pure_dict(gradient)["params"]["layers"][0]["qkv"])[0])
  assert not qkv[1::2, :, -8:].any() and qkv[::2, :, -8:].any()
