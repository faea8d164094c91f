"""Loading a model by name: the contents of the result, and errors."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib

import numpy as np
import pytest

from seerjax import NumericsConfig
from seerjax.models import (
  config as model_config,
  families,
  huggingface,
  loading,
  parameters,
  presets,
)


def test_nano_is_loaded_by_name_with_the_slabs_that_it_asks_for():
  model = loading.load_model()
  assert model.numerics.reduction_shards == model_config.largest_shards(model.config)
  assert model.tokenizer is not None
  assert model.tokenizer.vocab_size == model.config.vocab_size


def test_a_directory_and_numerics_of_ones_own_are_taken():
  numerics = NumericsConfig(
    backend="tiled",
    row_tile=16,
    query_tile=4,
    kv_split=64,
    reduction_shards=8,
    compute_dtype="bfloat16",
  )
  model = loading.load_model(loading.NANO, numerics)
  masters, config = huggingface.load(loading.NANO, numerics)
  assert (model.config, model.numerics) == (config, numerics)
  expected = parameters.compute_params(masters, numerics)["embed"]
  assert model.params["embed"].dtype == "bfloat16"
  assert np.array_equal(np.asarray(model.params["embed"]), np.asarray(expected))


def test_what_is_no_model_is_refused(tmp_path: pathlib.Path):
  with pytest.raises(FileNotFoundError, match="which is not a directory, expected a model"):
    loading.load_model(tmp_path / "nothing")


def test_a_shape_without_weights_names_their_recipe():
  with pytest.raises(FileNotFoundError, match=r"got 'nano-10m', .*pretrain_nano --preset=nano-10m"):
    loading.load_model("nano-10m")


def test_the_model_with_experts_is_loaded_by_name_and_is_what_its_card_says():
  directory = loading.path_of("nano-moe")
  weights = (directory / "model.safetensors").read_bytes()
  assert len(weights) <= 8_000_000
  assert f"SHA-256 `{hashlib.sha256(weights).hexdigest()}`" in (directory / "README.md").read_text()
  shape = dataclasses.replace(presets.get("nano-moe"), family="qwen3_moe")
  assert huggingface.load_config(directory) == shape
  assert families.of(shape).model_type == "qwen3_moe"


def test_the_sleeper_is_loaded_by_name_and_is_what_its_card_says():
  directory = loading.path_of("nano-sleep")
  weights = (directory / "model.safetensors").read_bytes()
  assert len(weights) <= 2_500_000
  assert f"SHA-256 `{hashlib.sha256(weights).hexdigest()}`" in (directory / "README.md").read_text()
  model = loading.load_model("nano-sleep")
  nano = loading.load_model("nano")
  assert model.config == nano.config and model.tokenizer is not None
  assert model.tokenizer.encode("Ana has 19 pens.") == nano.tokenizer.encode("Ana has 19 pens.")
  # It is another model, not a copy; vectors of tokens that its documents lack stay as they are.
  for part in ("embed", "final_norm"):
    assert (np.asarray(model.params[part]) != np.asarray(nano.params[part])).mean() > 0.25
