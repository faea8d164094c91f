"""A draft model must have its target's vocabulary and context; anything else is refused."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model
import tokenizers
import word_engine

from seerjax import numerics as numerics_lib
from seerjax.models import huggingface, loading, parameters
from seerjax.models.loading import Model
from seerjax.ops import sampling
from seerjax.speculation import draft_loading
from seerjax.speculation.config import DraftedRun, SpeculationConfig, make_drafter
from seerjax.speculation.statistics import Acceptance

SHAPE = dataclasses.replace(tiny_model.SMALLEST, vocab_size=512)
ONE = dataclasses.replace(word_engine.NUMERICS, reduction_shards=1)


def written(directory, shape=SHAPE, *, dtype="float32", tokenizer=word_engine.TOKENIZER):
  params = parameters.init(numerics_lib.key(0), shape, ONE)
  huggingface.save(directory, params, shape, dtype=dtype, tokenizer=tokenizer)
  return params


@pytest.fixture(scope="module")
def engine():
  return word_engine.make_engine()


def test_int8_is_within_half_a_step_of_each_output_channel(tmp_path, engine):
  params = written(tmp_path / "draft", dtype="int8")
  assert (tmp_path / "draft" / "model.safetensors").stat().st_size < 20_000  # f32: 43 kB.
  draft = draft_loading.load_draft(tmp_path / "draft", engine)
  for (path, got), wanted in zip(
    jax.tree_util.tree_leaves_with_path(draft.params), jax.tree.leaves(params), strict=True
  ):
    if got.ndim == 1:
      assert np.array_equal(got, wanted)
      continue
    # Scales are per output channel; for the embedding table per row, since it is the head.
    axis = -1 if path[0].key == "embed" else -2
    step = np.abs(wanted).max(axis=axis, keepdims=True) / 127
    assert np.all(np.abs(got - wanted) <= step * 0.501) and not np.array_equal(got, wanted)
  with pytest.raises(ValueError, match="got INT8 weights, expected one of"):
    huggingface.load(tmp_path / "draft", ONE)  # INT8 is refused for a target.


def test_embedding_rows_beyond_the_tokenizer_are_cut_off(tmp_path, engine):
  wide = dataclasses.replace(SHAPE, vocab_size=640, is_tied=False)
  params = written(tmp_path / "draft", wide)
  draft = draft_loading.load_draft(tmp_path / "draft", engine)
  assert draft.config.vocab_size == 512
  assert np.array_equal(draft.params["embed"], params["embed"][:512])
  assert np.array_equal(draft.params["head"], params["head"][:, :512])


def test_an_ids_noise_does_not_depend_on_how_many_ids_there_are():
  key, seeds, places = numerics_lib.key(0), jnp.arange(3, dtype=jnp.uint32), jnp.arange(3)
  wide, narrow = (
    sampling.noise_rows(key, seeds, places, jnp.ones(3, bool), size) for size in (640, 511)
  )
  assert np.array_equal(wide[:, :511], narrow)


def test_other_words_are_refused_by_the_first_id_that_differs(tmp_path, engine):
  described = json.loads(word_engine.TOKENIZER.backend.to_str())
  words = described["model"]["vocab"]
  of_id = {index: word for word, index in words.items()}
  words[of_id[300]], words[of_id[400]] = 400, 300
  described["model"]["merges"] = []
  other = dataclasses.replace(
    word_engine.TOKENIZER,
    backend=tokenizers.Tokenizer.from_str(json.dumps(described)),
    files={**word_engine.TOKENIZER.files, "tokenizer.json": json.dumps(described).encode()},
  )
  written(tmp_path / "draft", tokenizer=other)
  with pytest.raises(ValueError, match="whose id 300 is .*, expected .*use one of the same fam"):
    draft_loading.load_draft(tmp_path / "draft", engine)


@pytest.mark.parametrize(
  "change, message",
  [
    (
      dict(max_model_len=32),
      "of 32 positions for an engine of 64, expected at least as many; lower",
    ),
    (
      dict(vocab_size=256),
      "a draft model of 256 ids and an engine of 512, without both tokenizers to com",
    ),
  ],
)
def test_a_shape_that_does_not_fit_is_refused(engine, change, message):
  shape = SHAPE.changed(**change)
  with pytest.raises(ValueError, match=re.escape(message)):
    draft_loading.fitted(Model(shape, {}, ONE), engine)


def test_a_directory_that_is_no_draft_is_refused(tmp_path, engine):
  with pytest.raises(FileNotFoundError, match="config.json"):
    draft_loading.load_draft(tmp_path, engine)
  with pytest.raises(FileNotFoundError, match="got 'no-draft', which is not a dir"):
    draft_loading.load_draft("no-draft", engine)


def test_a_drafter_has_the_engines_key_context_and_backend(tmp_path, engine):
  written(tmp_path / "draft")
  drafter = draft_loading.drafter_for(engine, tmp_path / "draft")
  assert drafter.program.context == 64 and drafter.program.decoder.numerics.backend == "tiled"
  assert np.array_equal(jax.random.key_data(drafter._key), jax.random.key_data(jax.random.key(3)))


def test_a_run_names_its_draft(tmp_path, engine):
  written(tmp_path / "draft")
  drafter = "seerjax.speculation.draft_loading:of_run"
  taken = Acceptance()
  run = DraftedRun(engine=engine, is_probe=lambda _: False, acceptance=taken)
  config = SpeculationConfig(drafter=drafter, draft_model=str(tmp_path / "draft"))
  assert make_drafter(config, run).acceptance is taken
  with pytest.raises(ValueError, match="draft_model: got '', expected a draft model"):
    make_drafter(SpeculationConfig(drafter=drafter), run)


@pytest.mark.thorough
def test_the_shipped_draft_is_small_drafts_and_moves_no_bit(engine):
  assert (loading.NANO_DRAFT / "model.safetensors").stat().st_size <= 400_000
  requests = [word_engine.request(name, (5, 6, 7), seed=place) for place, name in enumerate("ab")]
  alone = engine.generate(requests)
  drafter = draft_loading.drafter_for(engine, "nano-draft")
  with_drafts = word_engine.make_engine(drafter=drafter).generate(requests)
  assert all(map(word_engine.same, with_drafts, alone))
  assert drafter.counters.drafts > 0 == drafter.counters.not_finite
