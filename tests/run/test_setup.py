"""Impossible settings are refused before anything is sampled or written."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from small_run import CONFIG, MODEL, NUMERICS, Vowels, policy, programs_of, train

from seerjax import load_model, numerics as numerics_lib, rl
from seerjax.models import parameters
from seerjax.run import off_policy, setup
from seerjax.run.config import RunConfig, TrainerConfig
from seerjax.trainer import losses, optimizer as optimizer_lib
from seerjax.types import Problem

MODEL_OF_NANO = object()  # Stands for what `load_model("nano")` returns.
pytestmark = pytest.mark.usefixtures("programs_on_disk")


@pytest.mark.parametrize(
  "changes",
  [
    dict(loss=losses.grpo()),
    dict(lora_rank=2),
    dict(data_parallel_size=2),
    dict(numerics=dataclasses.replace(NUMERICS, kv_split=8)),
    dict(optimizer=optimizer_lib.OptimizerConfig(learning_rate=0.02)),
    dict(engine=dataclasses.replace(CONFIG.engine, batch_size_buckets=(8, 16))),
    dict(engine=dataclasses.replace(CONFIG.engine, page_size=4)),
    dict(engine=dataclasses.replace(CONFIG.engine, num_pages=65)),
    dict(engine=dataclasses.replace(CONFIG.engine, max_model_len=40)),
    dict(engine=dataclasses.replace(CONFIG.engine, max_num_seqs=3)),
    dict(trainer=TrainerConfig(rows_per_micro_batch=72, sequences_per_micro_batch=4)),
    dict(trainer=TrainerConfig(rows_per_micro_batch=64, sequences_per_micro_batch=5)),
  ],
)
def test_programs_of_another_config_are_refused(tmp_path, changes):
  config = dataclasses.replace(CONFIG, **changes)
  with pytest.raises(ValueError, match=r"train.programs: got programs of another config or model"):
    rl.train(config, policy(), Vowels(), tmp_path, programs=programs_of(CONFIG))
  assert not list(tmp_path.iterdir())


def test_programs_of_another_model_are_refused(tmp_path):
  other = dataclasses.replace(policy(), model=dataclasses.replace(MODEL, norm_eps=1e-5))
  with pytest.raises(ValueError, match=r"train.programs: got programs of another config or model"):
    rl.train(CONFIG, other, Vowels(), tmp_path, programs=programs_of(CONFIG))


class Empty(Vowels):
  """A task without held-out problems."""

  def num_problems(self, split: str) -> int:
    return 0 if split == "heldout" else 7


class Wordy(Vowels):
  """A task with prompts that exceed the context."""

  name = "wordy"

  def problem(self, split, index):
    return Problem(problem_id=f"{split}-{index}", prompt="1 " * 60)


@pytest.mark.parametrize(
  ("task", "sets", "changes", "message"),
  [
    (Empty(), {}, {}, r"vowels: got 0 problems in split 'heldout', expected at least 1"),
    (Vowels(), {}, dict(engine=dataclasses.replace(CONFIG.engine, page_size=3)),
     r"got page_size=3, expected a divisor of NumericsConfig.kv_split=16"),
    (Vowels(), {}, dict(data_parallel_size=99),
     r"make_mesh: got data_parallel_size=99 x tensor_parallel_size=1 = 99"),
    # Refused by the engine, the last check.
    (Vowels(), {}, dict(numerics=dataclasses.replace(NUMERICS, reduction_shards=4)),
     r"NumericsConfig.reduction_shards: got 4, expected a divisor of num_heads=2"),
    (Vowels(), {}, dict(lora_rank=17), r"lora rank: got 17, expected 1 <= rank <= 16"),
    (Vowels(), {"long": Wordy()}, {},
     r"wordy: got a prompt of \d+ tokens .* and max_tokens 6, expected a sum of at most 48"),
  ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_the_journal_begins(
  tmp_path, task, sets, changes, message
):
  config = dataclasses.replace(CONFIG, **changes)
  with pytest.raises(ValueError, match=message):
    rl.train(config, policy(), task, tmp_path / "run", evaluation_sets=sets)
  assert task.num_verdicts == 0 and not (tmp_path / "run").exists()


def test_a_rival_is_not_resumed(stopped_copy):
  with pytest.raises(
    ValueError, match=r"RunConfig.off_policy: got .* and a run to resume, expected"
  ):
    train(stopped_copy, resume=True, off_policy=off_policy.OffPolicyConfig(oversample=2.0))


def test_a_loaded_model_is_what_learns_and_names_the_run():
  (config, by_name), (same, loaded) = (
    setup.opened(RunConfig(), one) for one in ("nano", load_model("nano"))
  )
  assert config.model == same.model == "nano"
  assert jax.tree.all(jax.tree.map(np.array_equal, by_name.params, loaded.params))
  assert by_name.model == loaded.model and loaded.tokenizer is not None
  # Settings that the config leaves open come from the loaded model.
  numerics = numerics_lib.NumericsConfig(compute_dtype="bfloat16")
  rounded = load_model("nano", numerics)
  config, policy = setup.opened(RunConfig(), rounded)
  assert config.numerics == rounded.numerics
  leaves = jax.tree.leaves(policy.params)
  assert {leaf.dtype for leaf in leaves} == {np.dtype(np.float32)}
  again = parameters.compute_params(policy.params, rounded.numerics)
  assert jax.tree.all(jax.tree.map(np.array_equal, again, rounded.params))
  # Equal explicit settings are accepted, too.
  assert setup.opened(RunConfig(numerics=numerics), rounded)[0].numerics == numerics


@pytest.mark.parametrize(
  ("config", "model", "message"),
  [
    (RunConfig(model="a/b"), "nano", r"RunConfig.model: got 'a/b' and the model 'nano', exp"),
    (RunConfig(model="a/b"), MODEL_OF_NANO, r"RunConfig.model: got 'a/b' and the model 'nano'"),
    (
      RunConfig(numerics=numerics_lib.NumericsConfig(compute_dtype="bfloat16")),
      MODEL_OF_NANO,
      r"RunConfig.numerics: got compute_dtype='bfloat16' \(the model: 'float32'\), expected the",
    ),
    (
      RunConfig(numerics=numerics_lib.NumericsConfig(kv_split=64, reduction_shards=4)),
      MODEL_OF_NANO,
      r"numerics: got kv_split=64 \(the model: 256\), reduction_shards=4 \(the model: 8\), expect",
    ),
    (RunConfig(), None, r"train.model: got NoneType, expected the result of seerjax.load_mo"),
    (RunConfig(), 5, r"train.model: got int, expected the result"),
    (RunConfig(), MODEL, r"train.model: got TransformerConfig, expected the"),
    (RunConfig(), {}, r"train.model: got dict, expected the result"),
  ],
)
def test_what_is_no_model_or_contradicts_the_config_is_refused(
  config, model, message, unchecked_annotations
):
  model = load_model("nano") if model is MODEL_OF_NANO else model
  with pytest.raises(ValueError, match=message):
    setup.opened(config, model)
