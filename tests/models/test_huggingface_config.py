"""config.json: our files are read back, in old and new spellings; others are refused by field."""

from __future__ import annotations

import json
import re

import pytest
from small_configs import CONFIGS, QWEN3

from seerjax.models import huggingface_config, presets
from seerjax.ops import rotary


def written(directory, config):
  path = directory / "config.json"
  path.write_text(json.dumps(huggingface_config.to_object(config, "bfloat16", ())))
  return path


@pytest.fixture
def path(tmp_path):
  """The file of a small Qwen3."""
  return written(tmp_path, QWEN3)


def edit_config(path, **changes):
  values = json.loads(path.read_text())
  for field, value in changes.items():
    if value is ...:
      values.pop(field)
    else:
      values[field] = value
  path.write_text(json.dumps(values))


@pytest.mark.parametrize("name", CONFIGS)
def test_what_we_write_we_read(name, tmp_path):
  assert huggingface_config.read(written(tmp_path, CONFIGS[name])) == CONFIGS[name]


def test_presets_survive_their_own_config_file(tmp_path):
  for name, config in presets.CONFIGS.items():
    assert huggingface_config.read(written(tmp_path, config)) == config, name


def test_old_and_new_spellings_mean_the_same(path):
  scaling = dict(factor=4.0, original_max_position_embeddings=32)
  expected = rotary.RotaryConfig(
    head_dim=4, base=5e5, scaling="yarn", factor=4.0, original_context=32
  )
  new = dict(rope_theta=..., rope_scaling=...)
  edit_config(path, **new, rope_parameters=dict(scaling, rope_type="yarn", rope_theta=5e5))
  assert huggingface_config.read(path).layers[0].attention.rotary == expected
  for spelling in ("rope_type", "type"):
    old = dict(scaling, **{spelling: "yarn"})
    edit_config(path, rope_theta=500000, rope_scaling=old, rope_parameters=None)
    assert huggingface_config.read(path).layers[0].attention.rotary == expected


def test_a_base_may_be_given_in_either_place_or_alike_in_both(path):
  rope = dict(rope_type="default", rope_theta=7.0)
  for outer in (..., None, 7):
    edit_config(path, rope_parameters=rope)
    values = json.loads(path.read_text())
    values.pop("rope_theta", None)
    path.write_text(json.dumps(values))
    if outer is not ...:
      edit_config(path, rope_theta=outer)
    assert huggingface_config.read(path).layers[0].attention.rotary.base == 7.0


def test_defaults_of_missing_fields(path):
  missing = ("head_dim", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings")
  edit_config(path, **dict.fromkeys(missing, ...), rope_parameters=..., rope_theta=...)
  config = huggingface_config.read(path)
  assert (
    config.layers[0].attention.head_dim,
    config.layers[0].attention.num_kv_heads,
    config.norm_eps,
  ) == (128, 4, 1e-6)
  assert config.is_tied is False and config.layers[0].attention.rotary.base == 10_000.0
  edit_config(path, model_type="llama", architectures=..., hidden_size=24)
  assert huggingface_config.read(path).layers[0].attention.head_dim == 6
  edit_config(path, model_type=..., architectures=["Qwen2ForCausalLM"])
  assert huggingface_config.read(path).family == "qwen2"


def test_a_shape_of_no_family_is_refused():
  both = QWEN3.changed(has_qkv_biases=True)
  message = "got has_qk_norms=True and has_qkv_biases=True, expected the combination of .*'qwen3'"
  with pytest.raises(ValueError, match=message):
    huggingface_config.to_object(both, "bfloat16", ())


def test_a_sliding_window_that_is_never_reached_is_fine(path):
  edit_config(path, use_sliding_window=True, sliding_window=8, max_window_layers=2)
  assert huggingface_config.read(path) == QWEN3
  edit_config(path, use_sliding_window=False, sliding_window=8, max_window_layers=1)
  assert huggingface_config.read(path) == QWEN3


YARN_ROPE = dict(rope_type="yarn", factor=4.0)
LLAMA3_ROPE = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(model_type="gpt2", architectures=...), "model_type: got 'gpt2', expected one of"),
    (dict(model_type=..., architectures=...), "model_type: got nothing, expected one of"),
    (dict(architectures=["Qwen3ForSequenceClassification"]), "architectures: got ['Qwen3ForS"),
    (dict(architectures=["LlamaForCausalLM"]), "expected ['Qwen3ForCausalLM'] for model_type"),
    (dict(hidden_act="gelu"), "hidden_act: got 'gelu', expected 'silu'"),
    (dict(quantization_config={"quant_method": "fp8"}), "quantization_config: got {'quant_method"),
    (dict(attention_bias=True), "attention_bias: got True, expected false"),
    (dict(mlp_bias=True), "mlp_bias: got True, expected false"),
    (dict(mlp_bias="no"), "mlp_bias: got 'no', expected true or false"),
    (dict(dual_chunk_attention_config={}), "dual_chunk_attention_config: got {}, expected none"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor: got 0.5, expected 1"),
    (dict(use_sliding_window=True, sliding_window=8, max_window_layers=1),
     "use_sliding_window: got True, expected false"),
    (dict(layer_types=["sliding_attention", "full_attention"]), "layer_types: got ['sliding"),
    (dict(hidden_size=...), "hidden_size: got nothing, expected a whole number of at least 1"),
    (dict(vocab_size=0), "vocab_size: got 0, expected a whole number"),
    (dict(num_hidden_layers=2.0), "num_hidden_layers: got 2.0, expected a whole number"),
    (dict(num_attention_heads=True), "num_attention_heads: got True, expected a whole number"),
    (dict(rms_norm_eps="1e-6"), "rms_norm_eps: got '1e-6', expected a positive number"),
    (dict(max_position_embeddings=...), "max_position_embeddings: got nothing"),
    (dict(rope_scaling="yarn"), "rope_scaling: got 'yarn', expected an object"),
    (dict(rope_parameters={"rope_type": "dynamic"}), "rope_parameters.rope_type: got 'dynamic'"),
    (dict(rope_parameters={"rope_type": ["yarn"]}), "rope_parameters.rope_type: got ['yarn']"),
    (dict(rope_scaling={"type": "longrope"}), "rope_scaling.type: got 'longrope', expected one of"),
    (dict(rope_scaling={"mrope_section": [1]}), "rope_scaling.mrope_section: got [1], expected"),
    (dict(rope_parameters={"full_attention": {}}),
     "rope_parameters.full_attention: got {}, expected only"),
    (dict(rope_parameters=YARN_ROPE | {"truncate": False}),
     "rope_parameters.truncate: got False, expected True"),
    (dict(rope_parameters=YARN_ROPE | {"mscale": 0.7}),
     "rope_parameters.mscale: got 0.7, expected None"),
    (dict(rope_parameters={"partial_rotary_factor": 0.25}),
     "rope_parameters.partial_rotary_factor: got 0.25, expected 1"),
    (dict(rope_parameters={"rope_type": "yarn"}), "rope_parameters.factor: got nothing"),
    (dict(rope_parameters=YARN_ROPE | {"factor": -1}), "rope_parameters.factor: got -1"),
    (dict(rope_parameters=LLAMA3_ROPE | {"high_freq_factor": 1.0}),
     "rope_parameters.high_freq_factor: got 1.0, expected more than low_freq_factor=1.0"),
    (dict(rope_parameters={"rope_theta": 7.0}),
     "rope_parameters.rope_theta: got 7.0, expected the 1000.0 of rope_theta"),
    (dict(rope_scaling=YARN_ROPE),
     "rope_scaling: got {'rope_type': 'yarn', 'factor': 4.0}, expected the value in rope_parame"),
  ],
)  # fmt: skip
def test_what_we_do_not_compute_is_refused_by_field(path, changes, message):
  edit_config(path, **changes)
  with pytest.raises(ValueError, match=re.escape(message)):
    huggingface_config.read(path)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    (b"{", "got text that is not JSON"),
    (b"[" * 100_000, "got text that is not JSON"),
  ],
)
def test_a_config_that_is_no_object_is_refused(path, text, message):
  path.write_bytes(text)
  with pytest.raises(ValueError, match=rf"config.json: {message}"):
    huggingface_config.read(path)
