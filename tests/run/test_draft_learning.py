"""Draft training changes no bit of the policy, and a resumed run trains the draft identically."""

from __future__ import annotations

import dataclasses
import re
import shutil

import numpy as np
import pytest
import small_run
from small_run import CONFIG, NUMERICS, assert_equal_bits, rows_of, train
import tiny_model

from seerjax import checkpoint, numerics as numerics_lib
from seerjax.models import huggingface, parameters
from seerjax.models.loading import Model
from seerjax.run import draft_learning
from seerjax.run.draft_learning import DraftLearner, DraftState
from seerjax.run.drafter import PART, RunDrafts
from seerjax.speculation.config import SpeculationConfig
from seerjax.speculation.draft_model import DraftModelConfig, ModelDrafter
from seerjax.speculation.draft_program import decoder_of

SHAPE = tiny_model.SMALLEST.changed(vocab_size=512, num_layers=1)
DRAFT = DraftModelConfig(num_slots=4, batch_size_buckets=(16,))


def drafter(**changes) -> ModelDrafter:
  one = dataclasses.replace(NUMERICS, reduction_shards=1)
  params = parameters.init(numerics_lib.key(5), SHAPE, one)
  draft = Model(SHAPE, parameters.compute_params(params, one), decoder_of(one, SHAPE, 48).numerics)
  return ModelDrafter(draft, context=48, config=dataclasses.replace(DRAFT, **changes))


@pytest.mark.thorough
@pytest.mark.usefixtures("programs_on_disk")
def test_a_step_teaches_its_answers_and_follows_from_them_alone():
  groups, learner = small_run.groups_of(), DraftLearner(drafter(learning_rate=1e-3))
  first, program = learner.state, learner.drafter.program
  losses = [learner.learn(groups, step)["draft/answer_loss"] for step in range(4)]
  assert losses[-1] < losses[0]
  last = learner.state
  assert_equal_bits(
    learner.drafter.params, parameters.compute_params(last.params, program.decoder.numerics)
  )
  # Neither buffers of a checkpoint nor of the drafter were donated, so the run continues equally.
  learner.restore(first)
  assert_equal_bits(
    learner.drafter.params, parameters.compute_params(first.params, program.decoder.numerics)
  )
  assert [learner.learn(groups, step)["draft/answer_loss"] for step in range(4)] == losses
  assert_equal_bits(learner.state, last)


@pytest.mark.thorough
def test_what_broke_off_or_cannot_be_read_teaches_nothing():
  def changed(**changes):
    return [
      dataclasses.replace(
        group,
        rollouts=tuple(
          dataclasses.replace(one, completion=dataclasses.replace(one.completion, **changes))
          for one in group.rollouts
        ),
      )
      for group in small_run.groups_of()
    ]

  learner = DraftLearner(drafter())
  before = learner.state
  one, none = np.zeros(1, np.float32), np.zeros(0, np.float32)
  for changes in (
    dict(finish_reason="error", error="a device"),
    dict(tokens=(), behaviour_logprobs=none, raw_logprobs=none),
    dict(tokens=(512,), behaviour_logprobs=one, raw_logprobs=one),
  ):
    assert learner.learn(changed(**changes), 0) == {} and learner.state is before


def test_lengths_hold_any_document():
  assert draft_learning._lengths_up_to(48) == (64,)
  assert draft_learning._lengths_up_to(512) == (64, 128, 256, 512)


def speculation(directory, **changes) -> SpeculationConfig:
  return SpeculationConfig(
    drafter="seerjax.speculation.draft_loading:of_run",
    draft_model=str(directory),
    draft=dataclasses.replace(DRAFT, **changes),
  )


@pytest.mark.thorough
def test_a_learning_draft_moves_no_bit_and_goes_on_after_a_stop(tmp_path, whole):
  one = dataclasses.replace(NUMERICS, reduction_shards=1)
  params = parameters.init(numerics_lib.key(5), SHAPE, one)
  tokenizer = small_run.policy().require_tokenizer()
  huggingface.save(tmp_path / "draft", params, SHAPE, tokenizer=tokenizer)
  learning = speculation(tmp_path / "draft", learn=True)
  frozen = speculation(tmp_path / "draft")
  without = whole[1].state
  for name, config in (("learning", learning), ("frozen", frozen)):
    assert_equal_bits(train(tmp_path / name, speculation=config).state, without)
  rows = rows_of(tmp_path / "learning")[1:-1]
  assert len(rows) == 4 and all(row["draft/answer_loss"] > 0 for row in rows)
  assert not any("draft/answer_loss" in row for row in rows_of(tmp_path / "frozen"))

  def draft_of(name: str):
    like = DraftLearner(drafter(learn=True)).state
    return checkpoint.restore_part(tmp_path / name / "checkpoints", PART, like, step=4)

  def resumed(name: str, source: str, config: SpeculationConfig) -> list[str]:
    """Takes the last two steps again, of a copy."""
    lines: list[str] = []
    shutil.copytree(tmp_path / source, tmp_path / name)
    shutil.rmtree(tmp_path / name / "checkpoints" / "step_00000004")
    found = train(tmp_path / name, speculation=config, resume=True, say=lines.append)
    assert_equal_bits(found.state, without)
    return lines

  printed = resumed("again", "learning", learning)
  assert any("continues from its trained weights" in line for line in printed)
  assert isinstance(draft_of("learning"), DraftState)
  assert_equal_bits(draft_of("again"), draft_of("learning"))
  # Draft training may start and stop on a resume.
  assert any("is trained from here on" in line for line in resumed("later", "frozen", learning))
  assert draft_of("later") is not None
  resumed("never", "learning", frozen)
  assert draft_of("never") is draft_of("frozen") is None


def test_refusals(tmp_path):
  texts_only = dataclasses.replace(
    speculation("d", learn=True), drafter="seerjax.speculation.suffix_drafter:of_run"
  )
  message = "learn: got True for SuffixDrafter, expected a drafter with a draft model; use"
  with pytest.raises(ValueError, match=re.escape(message)):
    RunDrafts(texts_only).begin(small_run.engine())
  other = DraftState({"w": np.zeros(3, np.float32)}, ())
  state = {"a": np.zeros(1)}
  checkpoint.save(tmp_path, 0, state, host_state={}, fingerprint={}, parts={PART: other})
  with pytest.raises(ValueError, match="got other leaves than those of this run"):
    checkpoint.restore_part(tmp_path, PART, DraftLearner(drafter()).state)
  assert CONFIG.speculation == SpeculationConfig()
