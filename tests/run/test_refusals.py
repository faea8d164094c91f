"""Settings of a run that are refused: the field's name, its value, and what to change."""

from __future__ import annotations

import math
from typing import Any

import pytest

from seerjax.cluster.config import ClusterConfig
from seerjax.engine.sizes import EngineConfig
from seerjax.numerics import NumericsConfig
from seerjax.run.config import RunConfig, TrainerConfig
from seerjax.run.evaluation import EvaluationConfig
from seerjax.run.off_policy import OffPolicyConfig
from seerjax.speculation.config import SpeculationConfig
from seerjax.speculation.draft_model import DraftModelConfig

LEARNING = SpeculationConfig(draft_model="d", draft=DraftModelConfig(learn=True))
TWO = ClusterConfig(workers=2, address="local")


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(
  ("kind", "fields", "message"),
  [
    (TrainerConfig, dict(num_mini_batches=0), "TrainerConfig.num_mini_batches: got 0, expected"),
    (TrainerConfig, dict(dynamic_sampling_rounds=0),
     "TrainerConfig.dynamic_sampling_rounds: got 0, expected at least 1"),
    (RunConfig, dict(num_steps=-1), "RunConfig.num_steps: got -1, expected at least 0"),
    (RunConfig, dict(checkpoint_every=0), "RunConfig.checkpoint_every: got 0, expected at lea"),
    (RunConfig, dict(data_parallel_size=0),
     "RunConfig.data_parallel_size: got 0, expected at least 1"),
    (RunConfig, dict(tensor_parallel_size=3),
     r"tensor_parallel_size: got 3, expected one of \(1, 2, 4, 8\); 1 is"),
    (RunConfig, dict(tensor_parallel_size=8, numerics=NumericsConfig(reduction_shards=4)),
     "RunConfig.tensor_parallel_size: got 8, expected at most NumericsConfig.reduction_shards=4"
     " .*lower"),
    (RunConfig, dict(weight_transfer_chunk_bytes=0),
     "RunConfig.weight_transfer_chunk_bytes: got 0, expected at least 1"),
    (RunConfig, dict(lora_rank=-1), "RunConfig.lora_rank: got -1, expected at least 0"),
    (RunConfig, dict(lora_alpha=0.0), "RunConfig.lora_alpha: got 0.0, expected a positive"),
    (RunConfig, dict(lora_alpha=math.inf), "RunConfig.lora_alpha: got inf, expected a finite"),
    (RunConfig, dict(trainer=TrainerConfig(num_mini_batches=33)),
     "num_mini_batches: got 33, expected at most RolloutConfig.prompts_per_step=32"),
    (RunConfig, dict(engine=EngineConfig(max_model_len=256)),  # Unset fields are not named.
     "RolloutConfig.max_tokens: got 256, expected at most 255, because prompt and answer have to"
     " fit EngineConfig.max_model_len=256; lower it, or raise that"),
    (RunConfig, dict(trainer=TrainerConfig(rows_per_micro_batch=128)),
     "got 256, expected at most 128, .*TrainerConfig.rows_per_micro_batch=128; lower it, or"),
    (RunConfig, dict(trainer=TrainerConfig(overlong_buffer=257)),
     "TrainerConfig.overlong_buffer: got 257, expected 0 to RolloutConfig.max_tokens=256; a fifth"),
    (RunConfig, dict(trainer=TrainerConfig(overlong_buffer=-1)),
     "TrainerConfig.overlong_buffer: got -1, expected 0 to"),
    # Rivals.
    (OffPolicyConfig, dict(max_policy_lag=2),
     "OffPolicyConfig: got max_policy_lag=2, oversample=1.0, expected 0 or 1, and 1 to 16"),
    (OffPolicyConfig, dict(oversample=0.5),
     "OffPolicyConfig: got max_policy_lag=0, oversample=0.5, expected 0 or 1, and 1 to 16"),
    (OffPolicyConfig, dict(max_policy_lag=1, oversample=2.0),
     "OffPolicyConfig: got max_policy_lag=1 and oversample=2.0, expected at most one"),
    (RunConfig, dict(off_policy=OffPolicyConfig(max_policy_lag=1)),
     "OffPolicyConfig.max_policy_lag: got 1 with data_parallel_size=1, expected 2 or more"),
    (RunConfig, dict(off_policy=OffPolicyConfig(oversample=2.0),
                     trainer=TrainerConfig(dynamic_sampling_rounds=2)),
     "OffPolicyConfig.oversample: got 2.0 with dynamic_sampling_rounds=2, expected at least one"
     " of"),
    # Drafts.
    (SpeculationConfig, dict(draft=DraftModelConfig(learn=True)),
     "learn: got True without a draft model, expected a draft"),
    (DraftModelConfig, dict(learning_rate=0),
     "learning_rate: got 0, expected a positive number; 1e-4"),
    (RunConfig, dict(data_parallel_size=2, off_policy=OffPolicyConfig(max_policy_lag=1),
                     speculation=LEARNING),
     "learn: got True with OffPolicyConfig.max_policy_lag=1, expected"),
    *((SpeculationConfig, dict(drafter=name), "expected 'my_module:make_drafter'")
      for name in ("", "module", "module:", ":function", "module:a-b")),
    # Workers.
    (RunConfig, dict(cluster=TWO, off_policy=OffPolicyConfig(oversample=2.0)),
     "workers: got 2 with OffPolicyConfig, expected"),
    (RunConfig, dict(cluster=TWO, speculation=LEARNING),
     "workers: got 2 with DraftModelConfig.learn, expected at most one"),
    (ClusterConfig, dict(workers=-1),
     "ClusterConfig.workers: got -1, expected at least 0"),
    (ClusterConfig, dict(patience_seconds=0.0), "patience_seconds: got 0.0, expected a positive"),
    *((ClusterConfig, dict(address=address),
       f"address: got '{address}', expected 'host:port' of a Ray cluster")
      for address in ("somewhere", "host:port")),
    # Evaluations.
    (EvaluationConfig, dict(num_problems=0),
     "EvaluationConfig.num_problems: got 0, expected at least 1; 1024 is usual"),
    (EvaluationConfig, dict(every=-1), "EvaluationConfig.every: got -1, expected at least 0; 0"),
    *((EvaluationConfig, dict(temperature=value),
       r"EvaluationConfig.temperature: got .*, expected (0|a) ")
      for value in (-1.0, 1e-5, 1e5, math.inf, math.nan)),
    (EvaluationConfig, dict(num_samples=0),
     "EvaluationConfig.num_samples: got 0, expected at least 1"),
    (EvaluationConfig, dict(num_samples=4),
     "EvaluationConfig.num_samples: got 4 with temperature=0, expected 1"),
    (EvaluationConfig, dict(pass_at=(2,)),
     "EvaluationConfig.pass_at: got k=2 with num_samples=1, expected whole"),
    (EvaluationConfig, dict(pass_at=(0,)), "EvaluationConfig.pass_at: got k=0 with num_samples=1"),
    (EvaluationConfig, dict(pass_at=(1.0,)),
     r"EvaluationConfig.pass_at: got 1.0 in \(1.0,\), expected a tuple of whole numbers"),
    (EvaluationConfig, dict(pass_at=(True,)),
     r"EvaluationConfig.pass_at: got True in \(True,\), expected a tuple of whole numbers"),
    (EvaluationConfig, dict(sets={"Hard": "math"}),
     "EvaluationConfig.sets: got 'Hard': 'math', expected a name"),
    (EvaluationConfig, dict(sets={"hard": ""}),
     "EvaluationConfig.sets: got 'hard': '', expected a name"),
    (EvaluationConfig, dict(sets={"hard": 5}),
     "EvaluationConfig.sets: got 5 in {'hard': 5}, expected a mapping from text to text"),
    (EvaluationConfig, dict(best="accuracy"),
     "EvaluationConfig.best: got 'accuracy', expected a metric of an evaluation"),
    (EvaluationConfig, dict(best="rollout/reward_mean"),
     "EvaluationConfig.best: got 'rollout/reward_mean', expected a metric"),
    (EvaluationConfig, dict(best="heldout/acuracy"),
     "EvaluationConfig.best: got 'heldout/acuracy', expected a metric .* one of rew"),
    (EvaluationConfig, dict(best="heldout/pass_at_4"),
     "EvaluationConfig.best: got 'heldout/pass_at_4', expected a metric"),
  ],
)  # fmt: skip
def test_a_setting_is_refused(kind: type, fields: dict[str, Any], message: str):
  with pytest.raises(ValueError, match=message):
    kind(**fields)
