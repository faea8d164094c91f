"""What cannot work is refused before anything is sampled or written."""

from __future__ import annotations

import dataclasses

import pytest
from small_run import CONFIG, MODEL, NUMERICS, Vowels, policy, programs_of, train

from seerjax import rl
from seerjax.run import off_policy
from seerjax.run.config import TrainerConfig
from seerjax.trainer import losses, step as step_lib

pytestmark = pytest.mark.usefixtures("programs_on_disk")


@pytest.mark.parametrize(
  "changes",
  [
    dict(loss=losses.grpo()),
    dict(lora_rank=2),
    dict(num_instances=2),
    dict(numerics=dataclasses.replace(NUMERICS, kv_split=8)),
    dict(optimizer=step_lib.OptimizerConfig(learning_rate=0.02)),
    dict(engine=dataclasses.replace(CONFIG.engine, row_buckets=(8, 16))),
    dict(engine=dataclasses.replace(CONFIG.engine, page_size=4)),
    dict(engine=dataclasses.replace(CONFIG.engine, num_pages=65)),
    dict(engine=dataclasses.replace(CONFIG.engine, max_context=40)),
    dict(engine=dataclasses.replace(CONFIG.engine, max_sequences=3)),
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
  """Has nothing to measure on."""

  def num_problems(self, split: str) -> int:
    return 0 if split == "heldout" else 7


@pytest.mark.parametrize(
  ("task", "changes", "message"),
  [
    (Empty(), {}, r"vowels: got 0 problems in split 'heldout', expected at least 1"),
    (
      Vowels(),
      dict(engine=dataclasses.replace(CONFIG.engine, page_size=3)),
      r"got page_size=3, expected a divisor of NumericsConfig.kv_split=16",
    ),
    (Vowels(), dict(num_instances=99), r"make_mesh: got num_instances=99 x model_shards=1 = 99"),
    (
      Vowels(),
      # Refused by the engine, the last that could.
      dict(numerics=dataclasses.replace(NUMERICS, reduction_shards=2)),
      r"NumericsConfig.reduction_shards: got 2, expected a divisor of num_kv_heads=1",
    ),
    (Vowels(), dict(lora_rank=17), r"lora rank: got 17, expected 1 <= rank <= 16"),
  ],
)
def test_what_cannot_work_is_refused_before_the_journal_begins(tmp_path, task, changes, message):
  with pytest.raises(ValueError, match=message):
    rl.train(dataclasses.replace(CONFIG, **changes), policy(), task, tmp_path / "run")
  assert task.num_verdicts == 0 and not (tmp_path / "run").exists()


def test_a_rival_is_not_resumed(stopped_copy):
  with pytest.raises(ValueError, match=r"RunConfig.stale: got .* and a run to resume, expected"):
    train(stopped_copy, resume=True, stale=off_policy.StaleConfig(begun=2.0))
