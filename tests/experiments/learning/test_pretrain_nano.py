"""Pretraining at a size of seconds, and errors before it starts."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest
import tiny_model

from experiments.learning import pretrain_nano
from seerjax.models import huggingface, tokenizer

MODEL = tiny_model.CONFIG.changed(vocab_size=512, hidden_size=16, num_heads=2, num_kv_heads=2)
# One batch of the least size.
CONFIG = pretrain_nano.PretrainConfig(num_tokens=384, tokens_per_batch=384)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(num_tokens=3071), "got num_tokens=3071, tokens_per_batch=3072, expected at least one ba"),
    (dict(tokens_per_batch=383), "tokens_per_batch=383, expected at least one batch, of at least"),
    (dict(learning_rate=0.0), "PretrainConfig.learning_rate: got 0.0, expected a positive number"),
    (dict(prompt_weight=-0.1), "PretrainConfig.prompt_weight: got -0.1, expected a share between"),
    (dict(brief_rate=1.5), "PretrainConfig.brief_rate: got 1.5, expected a share between 0 and 1"),
    (dict(large_rate=float("nan")), "PretrainConfig.large_rate: got nan, expected a share"),
  ],
)
def test_a_config_that_cannot_be_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    pretrain_nano.PretrainConfig(**changes)


@pytest.mark.thorough
def test_the_tokens_vectors_stay_where_they_are_kept(tmp_path):
  documents = iter([("How many?", "#### 1")] * 100)
  config = dataclasses.replace(CONFIG, keeps_embeddings=True)
  pretrain_nano.pretrain(CONFIG, MODEL, "", tmp_path / "first")
  start = str(tmp_path / "first" / "model")
  found = {}
  for name, one in (("kept", config), ("learnt", CONFIG)):
    pretrain_nano.pretrain(one, MODEL, start, tmp_path / name, documents)
    found[name], _ = huggingface.load(tmp_path / name / "model", pretrain_nano.numerics_for(64))
  first, _ = huggingface.load(start, pretrain_nano.numerics_for(64))
  assert (found["kept"]["embed"] == first["embed"]).all()
  assert (found["learnt"]["embed"] != first["embed"]).any()
  assert (found["kept"]["layers"][0]["out"] != first["layers"][0]["out"]).any()


@pytest.mark.thorough
def test_the_vector_of_a_token_that_no_batch_has_stays_where_it_is(tmp_path):
  config = dataclasses.replace(CONFIG, keeps_unseen=True, prompt_weight=0.0)
  words = tokenizer.load(pathlib.Path(huggingface.__file__).parent / "nano")
  (seen,), (unseen,) = words.encode(" pens"), words.encode(" keys")
  pretrain_nano.pretrain(CONFIG, MODEL, "", tmp_path / "first")
  start = str(tmp_path / "first" / "model")
  found = {}
  for name, one in (("kept", config), ("learnt", dataclasses.replace(config, keeps_unseen=False))):
    documents = iter([("How many pens?", "#### 1")] * 100)
    pretrain_nano.pretrain(one, MODEL, start, tmp_path / name, documents)
    found[name], _ = huggingface.load(tmp_path / name / "model", pretrain_nano.numerics_for(64))
  first, _ = huggingface.load(start, pretrain_nano.numerics_for(64))
  assert (found["kept"]["embed"][unseen] == first["embed"][unseen]).all()
  assert (found["kept"]["embed"][seen] != first["embed"][seen]).any()
  # Twin: without it, a token's probability falls because no response has it.
  assert (found["learnt"]["embed"][unseen] != first["embed"][unseen]).any()


def test_a_model_is_written_and_not_made_twice(tmp_path):
  pretrain_nano.pretrain(CONFIG, MODEL, "", tmp_path)
  _, model = huggingface.load(tmp_path / "model", pretrain_nano.numerics_for(64))
  assert model == MODEL
  with pytest.raises(ValueError, match=r"--workdir: got .*, which holds a finished model"):
    pretrain_nano.pretrain(CONFIG, MODEL, "", tmp_path)


def test_a_start_of_its_own_and_a_smaller_model_exclude_each_other(tmp_path):
  with pytest.raises(ValueError, match=r"--grow_from: got nano and --start=here, expected one of"):
    pretrain_nano.pretrain(CONFIG, MODEL, "here", tmp_path, grow_from="nano")


def test_a_smaller_model_that_does_not_grow_to_the_shape_is_refused(tmp_path):
  with pytest.raises(ValueError, match="growth.hidden_size: got 16 for a model of 128, expected"):
    pretrain_nano.pretrain(CONFIG, MODEL, "", tmp_path, grow_from="nano")


@pytest.mark.thorough
def test_a_grown_model_carries_on_where_the_small_one_stood(tmp_path):
  pretrain_nano.pretrain(CONFIG, MODEL, "", tmp_path / "small")
  large = MODEL.changed(hidden_size=32, num_layers=3)
  config = dataclasses.replace(CONFIG, learning_rate=1e-12)  # Stays where it starts.
  small = str(tmp_path / "small" / "model")
  pretrain_nano.pretrain(config, large, "", tmp_path / "large", grow_from=small)
  numerics = pretrain_nano.numerics_for(64)
  expected, _ = huggingface.load(small, numerics)
  found, model = huggingface.load(tmp_path / "large" / "model", numerics)
  assert model == large
  assert (found["embed"][:, :16] == expected["embed"]).all()
  assert (found["embed"][:, 16:] == expected["embed"]).all()
  assert abs(found["layers"][2]["down"]).max() < 1e-9 < abs(found["layers"][1]["down"]).max()
