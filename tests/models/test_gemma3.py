"""Gemma 3's config.json: layers, rotary bases and scales as published; refusals by field."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
import tiny_model

from seerjax.models import families, huggingface, huggingface_config, huggingface_layout
from seerjax.models.families import gemma3
from seerjax.ops import rotary

FULL = gemma3.FULL
# Sizes of the published 270M, with 8 of its layers; 4B and larger ones also scale positions.
VALUES = {
  "architectures": ["Gemma3ForCausalLM"],
  "model_type": "gemma3_text",
  "attn_logit_softcapping": None,
  "final_logit_softcapping": None,
  "head_dim": 256,
  "hidden_activation": "gelu_pytorch_tanh",
  "hidden_size": 640,
  "intermediate_size": 2048,
  "max_position_embeddings": 32768,
  "num_attention_heads": 4,
  "num_hidden_layers": 8,
  "num_key_value_heads": 1,
  "query_pre_attn_scalar": 256,
  "rms_norm_eps": 1e-6,
  "rope_local_base_freq": 10000.0,
  "rope_scaling": None,
  "rope_theta": 1000000.0,
  "sliding_window": 512,
  "vocab_size": 262144,
}


def read(tmp_path, **changes):
  values = {name: value for name, value in (VALUES | changes).items() if value is not ...}
  path = tmp_path / "config.json"
  path.write_text(json.dumps(values))
  return huggingface_config.read(path)


def test_layers_are_those_of_the_published_model(tmp_path):
  config = read(tmp_path)
  assert [layer.attention.window for layer in config.layers] == [512] * 5 + [None] + [512] * 2
  windowed, full = config.layers[0].attention, config.layers[5].attention
  assert windowed.rotary == rotary.RotaryConfig(head_dim=256, base=1e4)
  assert full.rotary == rotary.RotaryConfig(head_dim=256, base=1e6)
  assert (full.num_heads, full.num_kv_heads, full.scale, full.has_qk_norms) == (4, 1, None, True)
  assert {layer.norm_placement for layer in config.layers} == {"pre_and_post"}
  assert config.layers[0].feed_forward.activation == "gelu_tanh"
  assert (config.norm_weights, config.embedding_scale) == ("1 + w", 640**0.5)
  assert config.is_tied and config.logit_soft_cap is None


def test_a_pattern_a_scalar_a_cap_and_scaled_positions_are_read(tmp_path):
  config = read(
    tmp_path,
    sliding_window_pattern=2,
    query_pre_attn_scalar=168,
    final_logit_softcapping=30.0,
    rope_scaling={"rope_type": "linear", "factor": 8.0},
    tie_word_embeddings=False,
  )
  assert [layer.attention.window for layer in config.layers] == [512, None] * 4
  windowed, full = config.layers[0].attention, config.layers[1].attention
  assert windowed.rotary == rotary.RotaryConfig(head_dim=256, base=1e4)
  assert full.rotary == rotary.RotaryConfig(head_dim=256, base=1e6, scaling="linear", factor=8.0)
  assert full.scale == windowed.scale == 168**-0.5
  assert config.logit_soft_cap == 30.0 and not config.is_tied


def test_old_and_new_spellings_mean_the_same(tmp_path):
  scaling = {"rope_type": "linear", "factor": 8.0}
  old = read(tmp_path, rope_scaling=scaling, sliding_window_pattern=6)
  new = read(
    tmp_path,
    rope_scaling=...,
    rope_theta=...,
    rope_local_base_freq=...,
    layer_types=["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 2,
    rope_parameters={
      "full_attention": scaling | {"rope_theta": 1e6},
      "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
  )
  assert old == new


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"query_pre_attn_scalar": 168, "final_logit_softcapping": 30.0},
    {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    {"num_hidden_layers": 5},  # Windows alone.
    {"layer_types": ["full_attention"] * 8},
  ],
  ids=["270m", "scalar", "scaled", "windows", "full"],
)
def test_what_we_write_we_read(tmp_path, changes):
  config = read(tmp_path, **changes)
  path = tmp_path / "config.json"
  path.write_text(json.dumps(huggingface_config.to_object(config, "bfloat16", (1, 106))))
  assert huggingface_config.read(path) == config
  assert families.of(config) is gemma3.FAMILY


def test_tensors_have_their_names_with_four_norms_a_layer(tmp_path):
  config = read(tmp_path, num_hidden_layers=1)
  plan = dict(huggingface_layout.plan(config))
  names = {path[-1]: [name for name, _ in leaf.tensors] for path, leaf in plan.items()}
  layer = "model.layers.0."
  assert names["attention_norm"] == [layer + "input_layernorm.weight"]
  assert names["attention_out_norm"] == [layer + "post_attention_layernorm.weight"]
  assert names["mlp_norm"] == [layer + "pre_feedforward_layernorm.weight"]
  assert names["mlp_out_norm"] == [layer + "post_feedforward_layernorm.weight"]
  assert names["query_norm"] == [layer + "self_attn.q_norm.weight"]


def test_other_models_are_not_taken_for_it():
  assert not gemma3.describes(tiny_model.CONFIG)
  assert not gemma3.describes(tiny_model.RULES)
  with pytest.raises(ValueError, match="the model has norm_weights='1 . w', expected one of"):
    families.of(tiny_model.RULES)


def test_layers_of_two_windows_are_not_of_the_family(tmp_path):
  config = read(tmp_path)
  first, *rest = config.layers
  assert not gemma3.describes(dataclasses.replace(config, layers=(first.changed(window=7), *rest)))


@pytest.mark.parametrize("scale", [0.3, 256**-0.5])
def test_a_scale_of_no_whole_number_is_not_of_the_family(tmp_path, scale):
  config = read(tmp_path)
  assert gemma3.describes(config.changed(scale=168**-0.5))
  assert not gemma3.describes(config.changed(scale=scale))


def test_a_directory_goes_back_with_equal_bytes(tmp_path):
  small = dict(hidden_size=12, intermediate_size=10, vocab_size=40, head_dim=4, num_hidden_layers=7)
  config = read(tmp_path, **small)
  first, second = tmp_path / "1", tmp_path / "2"
  masters = tiny_model.random_master(config, tiny_model.ONE_SLAB)
  huggingface.save(first, masters, config, dtype="float32")
  params, found = huggingface.load(first, tiny_model.ONE_SLAB)
  assert found == config and found.family == "gemma3_text"
  jax.tree.map(np.testing.assert_array_equal, params, masters)
  huggingface.save(second, params, found, dtype="float32")
  for name in ("config.json", "model.safetensors"):
    assert (first / name).read_bytes() == (second / name).read_bytes()


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"hidden_activation": "silu"}, "hidden_activation: got 'silu', expected 'gelu_pytorch_tanh'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5, expected 1"),
    ({"attention_bias": True}, "attention_bias: got True, expected false"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention: got True, expected fal"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: got 50.0, expected none"),
    ({"quantization_config": {}}, "quantization_config: got {}, expected none"),
    ({"layer_types": ["full_attention"]}, "layer_types: got ['full_attention'], expected 8 of"),
    ({"layer_types": ["chunked"] * 8}, "layer_types: got ['chunked', "),
    ({"sliding_window": None}, "sliding_window: got None, expected a whole number of at least 1"),
    ({"rope_parameters": {"rope_theta": 1.0}}, "rope_parameters: got {'rope_theta': 1.0}, expect"),
    ({"rope_parameters": {FULL: 1.0}}, "rope_parameters.full_attention: got 1.0, expected an obj"),
    ({"rope_scaling": "linear"}, "rope_scaling: got 'linear', expected an object"),
    ({"rope_scaling": {"rope_type": "odd"}}, "rope_scaling.rope_type: got 'odd', expected one of"),
    ({"architectures": ["LlamaForCausalLM"]}, "architectures: got ['LlamaForCausalLM'], expected"),
  ],
  ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_computed_is_refused_by_field(tmp_path, changes, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    read(tmp_path, **changes)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"rope_theta": 5e5},
      "rope_theta: got 500000.0, expected the 1000000.0 of rope_parameters for full_attention",
    ),
    (
      {"rope_local_base_freq": 2e4},
      "rope_local_base_freq: got 20000.0, expected the 10000.0 of rope_parameters for sliding_att",
    ),
    (
      {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
      "rope_scaling: got {'rope_type': 'linear', 'factor': 4.0}, expected the value in"
      " rope_parameters, RotaryConfig(head_dim=256, base=1000000.0, scaling='linear', factor=8.0",
    ),
    (
      {"rope_parameters": None, "rope_scaling": {"rope_theta": 5.0}},
      "rope_theta: got 1000000.0, expected the 5.0 of rope_scaling for full_attention",
    ),
  ],
  ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_two_spellings_that_contradict_each_other_are_refused(tmp_path, changes, message):
  scaled = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
  both = {"rope_parameters": {FULL: scaled, "sliding_attention": {"rope_theta": 1e4}}}
  read(tmp_path, **both)
  with pytest.raises(ValueError, match=re.escape(f"config.json: {message}")):
    read(tmp_path, **(both | changes))
