"""Tiny random models agree with `transformers`, and directories are exchanged both ways."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seerjax import numerics as numerics_lib
from seerjax.models import flax_module, huggingface, loading
from seerjax.models.decoder import decide
from seerjax.run import parity

torch = pytest.importorskip("torch", reason="parity needs the optional torch (CPU)")
transformers = pytest.importorskip("transformers", reason="parity needs the optional transformers")

NUMERICS = numerics_lib.NumericsConfig(
  row_tile=8, query_tile=4, slot_tile=2, kv_split=32, reduction_shards=1
)
LLAMA3 = dict(
  rope_type="llama3",
  rope_theta=500.0,
  factor=8.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=32,
)
YARN = dict(rope_type="yarn", rope_theta=1000.0, factor=4.0, original_max_position_embeddings=24)
PLAIN = dict(rope_type="default", rope_theta=700.0)
SIZES = dict(
  vocab_size=94,
  intermediate_size=70,
  num_hidden_layers=2,
  max_position_embeddings=128,
  hidden_act="silu",
)

# More experts than slabs, in every layer or every second one; torch wants multiples of 4 as sizes.
EXPERTS = dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=12)
# Heads 6 over 2 with features 10 and a hidden size that is not their product, among others.
CASES = {
  "qwen3-tied": (
    "Qwen3",
    1,
    dict(
      hidden_size=34,
      num_attention_heads=6,
      num_key_value_heads=2,
      head_dim=10,
      tie_word_embeddings=True,
      rope_parameters=PLAIN,
    ),
  ),
  "qwen3-yarn": (
    "Qwen3",
    2,
    dict(
      hidden_size=24,
      num_attention_heads=4,
      num_key_value_heads=4,
      head_dim=14,
      tie_word_embeddings=False,
      rope_parameters=YARN,
    ),
  ),
  "qwen2-tied": (
    "Qwen2",
    2,
    dict(
      hidden_size=60,
      num_attention_heads=6,
      num_key_value_heads=2,
      tie_word_embeddings=True,
      rope_parameters=PLAIN,
    ),
  ),
  "llama-llama3": (
    "Llama",
    2,
    dict(
      hidden_size=48,
      num_attention_heads=6,
      num_key_value_heads=2,
      head_dim=10,
      tie_word_embeddings=False,
      rope_parameters=LLAMA3,
      rms_norm_eps=1e-5,
    ),
  ),
  "mistral": (
    "Mistral",
    2,
    dict(
      hidden_size=36,
      num_attention_heads=6,
      num_key_value_heads=2,
      head_dim=10,
      tie_word_embeddings=False,
      rope_parameters=PLAIN,
      sliding_window=None,
      rms_norm_eps=1e-5,
    ),
  ),
  "qwen3_moe": (
    "Qwen3Moe",
    2,
    dict(
      hidden_size=36,
      num_attention_heads=6,
      num_key_value_heads=2,
      head_dim=10,
      tie_word_embeddings=True,
      rope_parameters=PLAIN,
      norm_topk_prob=True,
      **EXPERTS,
    ),
  ),
  "qwen3_moe-dense": (
    "Qwen3Moe",
    1,
    dict(
      hidden_size=24,
      num_attention_heads=4,
      num_key_value_heads=2,
      head_dim=8,
      tie_word_embeddings=False,
      rope_parameters=PLAIN,
      decoder_sparse_step=2,
      **EXPERTS,
    ),
  ),
  "llama-tied": (
    "Llama",
    1,
    dict(
      hidden_size=35,
      num_attention_heads=5,
      num_key_value_heads=1,
      head_dim=6,
      tie_word_embeddings=True,
      rope_parameters=dict(rope_type="linear", rope_theta=900.0, factor=2.0),
    ),
  ),
  "qwen2-untied": (
    "Qwen2",
    1,
    dict(
      hidden_size=42,
      num_attention_heads=3,
      num_key_value_heads=1,
      tie_word_embeddings=False,
      rope_parameters=YARN,
    ),
  ),
  "mistral-tied": (
    "Mistral",
    1,
    dict(
      hidden_size=25,
      num_attention_heads=5,
      num_key_value_heads=5,
      head_dim=6,
      tie_word_embeddings=True,
      rope_parameters=YARN,
      sliding_window=None,
    ),
  ),
  "gemma3-one-head": (
    "Gemma3",
    1,
    dict(
      hidden_size=21,
      num_attention_heads=3,
      num_key_value_heads=1,
      head_dim=14,
      hidden_activation="gelu_pytorch_tanh",
      tie_word_embeddings=True,
      sliding_window=40,
      layer_types=["full_attention", "sliding_attention"],
      query_pre_attn_scalar=14,
      rope_parameters=dict(sliding_attention=PLAIN, full_attention=PLAIN),
    ),
  ),
  # A window within a split of 32 positions, and a scale that is not that of the heads.
  "gemma3-tied": (
    "Gemma3",
    1,
    dict(
      hidden_size=36,
      num_hidden_layers=3,
      num_attention_heads=6,
      num_key_value_heads=2,
      head_dim=10,
      hidden_activation="gelu_pytorch_tanh",
      tie_word_embeddings=True,
      sliding_window=23,
      layer_types=["sliding_attention", "full_attention", "sliding_attention"],
      query_pre_attn_scalar=17,
      final_logit_softcapping=5.0,
      rope_parameters=dict(
        sliding_attention=PLAIN,
        full_attention=dict(rope_type="linear", rope_theta=9000.0, factor=8.0),
      ),
    ),
  ),
}
LENGTH = 72


@functools.cache
def theirs(name):
  """Returns a transformers model with weights large enough that every part matters."""
  family, _, sizes = CASES[name]
  fields = SIZES | sizes | {"rope_parameters": dict(sizes["rope_parameters"])}
  config_of = {"Gemma3": "Gemma3TextConfig"}.get(family, f"{family}Config")
  config = getattr(transformers, config_of)(**fields)
  torch.manual_seed(0)
  model = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
  with torch.no_grad():
    for parameter_name, parameter in model.named_parameters():
      if "norm" in parameter_name:
        parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
      else:
        parameter.copy_(0.15 * torch.randn_like(parameter))
  return model


@pytest.fixture(params=CASES)
def case(request):
  return request.param


@pytest.fixture
def saved(case, tmp_path):
  theirs(case).save_pretrained(tmp_path / "theirs")
  return tmp_path / "theirs"


def ours(directory, case):
  numerics = numerics_lib.NumericsConfig(**(vars(NUMERICS) | {"reduction_shards": CASES[case][1]}))
  params, config = huggingface.load(directory, numerics)
  logits = jax.jit(
    lambda params, tokens: flax_module.logits_of(params, tokens, decoder=decide(config, numerics))
  )
  return params, config, logits


def test_logits_and_greedy_tokens_are_theirs(case, saved):
  params, _, logits = ours(saved, case)
  tokens = np.random.default_rng(1).integers(0, SIZES["vocab_size"], (2, LENGTH))
  with torch.no_grad():
    expected = theirs(case)(torch.asarray(tokens)).logits.numpy()
  found = np.asarray(logits(params, jnp.asarray(tokens, jnp.int32)))
  error = np.abs(found - expected).max() / np.abs(expected).max()
  assert error < 2e-5, error

  # 64 greedy tokens behind 8 given ones; one shape, so one compilation.
  with torch.no_grad():
    expected = (
      theirs(case)
      .generate(
        torch.asarray(tokens[:, :8]),
        max_new_tokens=64,
        min_new_tokens=64,
        do_sample=False,
        attention_mask=torch.ones((2, 8), dtype=torch.long),
        eos_token_id=None,
        pad_token_id=0,
      )
      .numpy()
    )
  line = np.zeros((2, LENGTH), np.int32)
  line[:, :8] = tokens[:, :8]
  for position in range(8, LENGTH):
    rows = np.asarray(logits(params, jnp.asarray(line)))[:, position - 1]
    line[:, position] = rows.argmax(axis=-1)
  np.testing.assert_array_equal(line, expected)


def test_directories_travel_there_and_back_with_equal_bytes(case, saved, tmp_path):
  params, config, _ = ours(saved, case)
  for dtype in ("float32", "bfloat16"):
    first, between, again = (tmp_path / f"{dtype}-{step}" for step in ("1", "2", "3"))
    huggingface.save(first, params, config, dtype=dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(first)
    assert str(model.dtype) == f"torch.{dtype}"
    model.save_pretrained(between)
    returned, returned_config, _ = ours(between, case)
    assert returned_config == config
    huggingface.save(again, returned, returned_config, dtype=dtype)
    for name in ("config.json", "model.safetensors"):
      assert (first / name).read_bytes() == (again / name).read_bytes(), name
    # Our file equals the transformers file, tensor for tensor and byte for byte.
    assert (first / "model.safetensors").read_bytes() == (
      between / "model.safetensors"
    ).read_bytes()


def test_a_directory_of_ours_says_the_same_there(case, saved, tmp_path):
  params, config, _ = ours(saved, case)
  huggingface.save(tmp_path / "ours", params, config, dtype="float32", max_shard_bytes=20_000)
  assert (tmp_path / "ours" / huggingface.INDEX_FILE).is_file()
  model, info = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / "ours", output_loading_info=True
  )
  assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
  tokens = torch.arange(1, 41)[None]
  with torch.no_grad():
    assert torch.equal(model(tokens).logits, theirs(case)(tokens).logits)


def test_the_old_spelling_reads_there_as_the_new_one(case, saved, tmp_path):
  # transformers 4 reads rope_theta and rope_scaling; 5 reads rope_parameters.
  params, config, _ = ours(saved, case)
  huggingface.save(tmp_path / "ours", params, config)
  path = tmp_path / "ours" / "config.json"
  values = json.loads(path.read_text())
  new = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
  del values["rope_parameters"]
  path.write_text(json.dumps(values))
  old = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
  assert old.rope_parameters == new.rope_parameters
  assert huggingface.load_config(tmp_path / "ours") == config


def test_gradients_of_one_step_are_theirs(case, saved, tmp_path):
  params, config, _ = ours(saved, case)
  numerics = numerics_lib.NumericsConfig(**(vars(NUMERICS) | {"reduction_shards": CASES[case][1]}))
  tokens = np.random.default_rng(2).integers(0, SIZES["vocab_size"], (2, 41))
  # A directory of the gradients, which is read as weights are.
  model = copy.deepcopy(theirs(case))
  logits = model(torch.asarray(tokens)).logits[:, :-1]
  targets = torch.asarray(tokens[:, 1:]).reshape(-1)
  loss = torch.nn.functional.cross_entropy(logits.reshape(len(targets), -1), targets)
  loss.backward()
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.copy_(parameter.grad)
  model.save_pretrained(tmp_path / "gradients")
  expected, _ = huggingface.load(tmp_path / "gradients", numerics)

  def loss_of(params):
    logits = flax_module.logits_of(
      params, jnp.asarray(tokens, jnp.int32), decoder=decide(config, numerics)
    )
    every = jax.nn.log_softmax(logits[:, :-1], axis=-1)
    return -jnp.mean(jnp.take_along_axis(every, tokens[:, 1:, None], axis=-1))

  value, found = jax.jit(jax.value_and_grad(loss_of))(params)
  np.testing.assert_allclose(value, loss.item(), rtol=1e-5)
  leaves = jax.tree_util.tree_leaves_with_path(expected)
  for (path, want), got in zip(leaves, jax.tree.leaves(found), strict=True):
    scale = np.abs(want).max()
    assert scale > 0, path
    assert np.abs(got - want).max() <= 1e-4 * scale, path


def test_sets_of_experts_are_theirs(tmp_path):
  total, num_rows = np.zeros(3, int), 0
  for case in (name for name in CASES if name.startswith("qwen3_moe")):
    theirs(case).save_pretrained(tmp_path / case)
    params, config, _ = ours(tmp_path / case, case)
    numerics = dataclasses.replace(NUMERICS, reduction_shards=CASES[case][1])
    rng = np.random.default_rng(3)
    prompts = {str(place): rng.integers(0, SIZES["vocab_size"], LENGTH) for place in range(40)}
    routers = {}
    for name, ids in prompts.items():
      with torch.no_grad():
        out = theirs(case)(torch.asarray(ids)[None], output_router_logits=True)
      found = [leaf.reshape(LENGTH, -1).numpy() for leaf in out.router_logits]
      routers[f"{name}.routers"] = np.stack(found)
    model = loading.Model(config, params, decide(config, numerics).numerics)
    total += parity.compare_routes(model, prompts, routers)
    num_rows += 40 * LENGTH * len(config.routings)
  found = parity.Routes(*total.tolist())
  print(found)
  assert found.num_equal == found.num_compared
  assert found.num_compared + found.num_close == num_rows
  assert found.num_close <= 0.001 * num_rows
