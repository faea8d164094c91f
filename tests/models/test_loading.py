"""A model by name: what it holds, and what it refuses."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from seerjax import NumericsConfig
from seerjax.models import config as model_config, huggingface, loading, parameters


def test_nano_is_loaded_by_name_with_the_slabs_that_it_asks_for():
  model = loading.load_model()
  assert model.numerics.reduction_shards == model_config.largest_shards(model.config)
  assert model.tokenizer is not None
  assert model.tokenizer.vocab_size == model.config.vocab_size


def test_a_directory_and_numerics_of_ones_own_are_taken():
  numerics = NumericsConfig(
    implementation="tiled", row_tile=16, query_tile=4, kv_split=64, compute_dtype="bfloat16"
  )
  model = loading.load_model(loading.NANO, numerics)
  masters, config = huggingface.load(loading.NANO, numerics)
  assert (model.config, model.numerics) == (config, numerics)
  expected = parameters.compute_params(masters, numerics)["embed"]
  assert model.params["embed"].dtype == "bfloat16"
  assert np.array_equal(np.asarray(model.params["embed"]), np.asarray(expected))


def test_what_is_no_model_is_refused(tmp_path: pathlib.Path):
  with pytest.raises(FileNotFoundError, match="which is no directory, expected a model directory"):
    loading.load_model(tmp_path / "nothing")


def test_a_shape_without_weights_names_their_recipe():
  with pytest.raises(FileNotFoundError, match=r"got 'nano-10m', .*pretrain_nano --preset=nano-10m"):
    loading.load_model("nano-10m")
