"""Families of models: one list, one file each, and directories that go back as what they came."""

from __future__ import annotations

import json

import decoder_reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refusals
import safetensors.numpy
import small_configs
import tiny_model

from seerjax import load_model, numerics as numerics_lib
from seerjax.models import (
  config_fields,
  families,
  gguf_config,
  gguf_write,
  huggingface,
  parameters,
  tokenizer as tokenizer_lib,
)
from seerjax.models.families import mistral
from seerjax.models.loading import NANO
from seerjax.ops import rotary

LLAMA, MISTRAL = small_configs.LLAMA, small_configs.MISTRAL
NUMERICS = numerics_lib.NumericsConfig(backend="tiled", reduction_shards=2)
OUTSIDE = "outside_family:FAMILY"
SIZES = {
  name: (family, size) for family in families.FAMILIES for name, size in family.sizes.items()
}


def config_of(directory):
  return json.loads((directory / "config.json").read_text())


def edited(directory, **changes):
  values = {k: v for k, v in (config_of(directory) | changes).items() if v is not ...}
  (directory / "config.json").write_text(json.dumps(values))


def assert_equal(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_every_name_is_that_of_one_family():
  for names in (
    families.names(),
    [family.architecture for family in families.FAMILIES],
    [name for family in families.FAMILIES for name in family.sizes],
  ):
    assert len(set(names)) == len(names)
  assert [families.named(name).model_type for name in families.names()] == [*families.names()]


@pytest.mark.parametrize("name", SIZES)
def test_a_published_size_is_read_as_it_is_written(name, tmp_path):
  family, size = SIZES[name]
  assert families.of(size) is family and family.describes(size)
  assert family.read(config_fields.Fields(tmp_path, family.written(size))) == size


def test_a_directory_of_mistral_goes_back_as_one(tmp_path):
  first, second = tmp_path / "1", tmp_path / "2"
  masters = tiny_model.random_master(MISTRAL, NUMERICS)
  huggingface.save(first, masters, MISTRAL, dtype="float32")
  assert config_of(first)["architectures"] == ["MistralForCausalLM"]
  assert config_of(first)["sliding_window"] is None and config_of(first)["head_dim"] == 4
  params, config = huggingface.load(first, NUMERICS)
  assert_equal(params, masters)
  assert config == MISTRAL and config.family == "mistral"
  huggingface.save(second, params, config, dtype="float32")
  for name in ("config.json", "model.safetensors"):
    assert (first / name).read_bytes() == (second / name).read_bytes()
  # The shape alone is Llama's, the first of the list that describes it.
  assert families.of(MISTRAL.changed(family="")).model_type == "llama"


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_logits_are_those_of_the_published_decoder(family, tmp_path):
  # No scaling of the rotation, which the reference does not have.
  turn = rotary.RotaryConfig(head_dim=10, base=700.0)
  config = LLAMA.changed(hidden_size=14, head_dim=10, rotary=turn, vocab_size=24, family=family)
  masters = tiny_model.random_master(config, NUMERICS)
  huggingface.save(tmp_path / "m", masters, config, dtype="float32")
  params, read = huggingface.load(tmp_path / "m", NUMERICS)
  assert read.family == family
  tokens = tiny_model.random_tokens(read, 1, 19)
  found = tiny_model.logits_of(
    parameters.compute_params(params, tiny_model.NATIVE), tokens, read,
    numerics_lib.NumericsConfig(backend="tiled", reduction_shards=2, row_tile=4),
  )  # fmt: skip
  expected = decoder_reference.logits(masters, tokens[0], config)
  assert np.abs(found[0] - expected).max() < 1e-4


def test_a_shape_that_its_family_cannot_have_is_saved_as_another():
  changed = MISTRAL.changed(has_qkv_biases=True)
  assert changed.family == "mistral" and families.of(changed).model_type == "qwen2"


def test_gguf_files_of_mistral_are_those_of_llama(tmp_path):
  masters = tiny_model.random_master(MISTRAL, NUMERICS)
  gguf_write.save(tmp_path / "m.gguf", masters, MISTRAL)
  params, config = huggingface.load(tmp_path / "m.gguf", NUMERICS)
  assert_equal(params, masters)
  assert config == MISTRAL and config.family == "llama"


@pytest.mark.parametrize("value", [4096, ...])
def test_a_window_of_mistral_is_refused_by_its_name(tmp_path, value):
  masters = tiny_model.random_master(MISTRAL, NUMERICS)
  huggingface.save(tmp_path / "m", masters, MISTRAL)
  edited(tmp_path / "m", sliding_window=value)
  got = "nothing" if value is ... else value
  with pytest.raises(ValueError, match=f"sliding_window: got {got}, expected null; this release"):
    huggingface.load_config(tmp_path / "m")


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
  """A directory of the family in tests/support, written through it."""
  fields = dict(words=512, width=16, heads=2, width_of_head=8, inner_widths=[8, 24, 12])
  family = families.named(OUTSIDE)
  directory = tmp_path_factory.mktemp("outside") / "model"
  config = family.read(config_fields.Fields(directory, fields)).changed(family=OUTSIDE)
  masters = tiny_model.random_master(config, NUMERICS)
  tokenizer = tokenizer_lib.load(NANO)
  huggingface.save(directory, masters, config, dtype="float32", tokenizer=tokenizer)
  return directory


def test_a_family_of_known_kinds_is_one_file_outside_the_library(outside, tmp_path):
  assert config_of(outside)["inner_widths"] == [8, 24, 12]
  names = safetensors.numpy.load_file(outside / "model.safetensors")
  assert all(name.startswith("tiny.model.") for name in names)
  model = load_model(outside, NUMERICS, family=OUTSIDE)
  assert [kind.feed_forward.intermediate_size for kind in model.config.layers] == [8, 24, 12]
  tokens = jnp.arange(1, 12, dtype=jnp.int32)[None]
  found = tiny_model.logits_of(model.params, tokens, model.config, model.numerics)[0]
  expected = decoder_reference.logits(model.params, tokens[0], model.config)
  assert np.abs(found - expected).max() < 1e-4
  huggingface.save(tmp_path / "again", model.params, model.config, dtype="float32")
  for name in ("config.json", "model.safetensors"):
    first, second = (config_of(at) if name == "config.json" else (at / name).read_bytes()
                     for at in (outside, tmp_path / "again"))  # fmt: skip
    if name == "config.json":
      first, second = ({**values, "eos_token_id": None} for values in (first, second))
    assert first == second


@refusals.table(
  (lambda at: huggingface.load_config(at), "config.json: architectures: got ['TinyForCausalLM']"),
  (lambda at: huggingface.load_config(at, "llama"), "model_type: got 'tiny', expected 'llama'"),
  (lambda at: families.named("gpt2"), "family: got 'gpt2', expected one of ('qwen3', 'qwen2',"),
  (lambda at: families.named("outside_family:NONE"), "family: got 'outside_family:NONE', but"),
  (lambda at: families.named("outside_family:NO_FAMILY"), "family: got str from", "a Family of"),
  (NotImplementedError,
   lambda at: gguf_config.form_of(huggingface.load_config(at, OUTSIDE)),
   "GGUF: got a model of family 'tiny', expected one of ('gemma3', 'llama',"),
  (lambda at: huggingface.load_config("m.gguf", OUTSIDE), "m.gguf: got family 'outside_family:"),
  (lambda at: huggingface.load("m.gguf", NUMERICS, family=OUTSIDE), "got family 'outside_family"),
)  # fmt: skip
def test_a_wrong_family_is_refused(row, outside):
  refusals.check(row, outside)


def test_the_module_of_a_family_is_what_the_list_has():
  assert families.named("mistral") is mistral.FAMILY
