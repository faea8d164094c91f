"""Complete run configurations: one for nano, and one for any other model."""

from __future__ import annotations

from seerjax import numerics as numerics_lib
from seerjax.engine import engine as engine_lib
from seerjax.models import loading
from seerjax.rollout import groups
from seerjax.run.config import RunConfig, TrainerConfig
from seerjax.run.evaluation import EvaluationConfig
from seerjax.trainer import losses, optimizer as optimizer_lib


def main_job() -> RunConfig:
  """Returns the main job: nano on word problems, on two data-parallel devices (two cores)."""
  return RunConfig(
    num_steps=20,
    data_parallel_size=2,
    checkpoint_every=10,
    numerics=numerics_lib.NumericsConfig(query_tile=4, slot_tile=32, kv_split=64),
    engine=engine_lib.EngineConfig(page_size=32, max_num_seqs=64, max_model_len=512),
    rollout=groups.RolloutConfig(
      prompts_per_step=48, group_size=8, temperature=1.0, max_tokens=216
    ),
    loss=losses.dapo(),
    optimizer=optimizer_lib.OptimizerConfig(learning_rate=2e-4, warmup_steps=2),
    # Evaluates as in training: sampled, at the rollout temperature.
    evaluation=EvaluationConfig(num_problems=2048, temperature=1.0),
  )


def named_model() -> RunConfig:
  """Returns the default configuration for a pretrained model: one device, 128 completions a step.

  The learning rate depends on model size and on LoRA (`learning_rates.usual`), the tiles on the
  platform. None of these settings was tuned.
  """
  return RunConfig(
    num_steps=20,
    checkpoint_every=10,
    engine=engine_lib.EngineConfig(max_model_len=1024),
    rollout=groups.RolloutConfig(prompts_per_step=16, group_size=8, max_tokens=640),
    trainer=TrainerConfig(remat="layer"),
    loss=losses.dapo(),
    optimizer=optimizer_lib.OptimizerConfig(warmup_steps=2),
    evaluation=EvaluationConfig(num_problems=256, temperature=1.0),
  )


def of_model(name: str) -> RunConfig:
  """Returns the default configuration for a model name; the main job for shipped models."""
  return main_job() if name in loading.SHIPPED else named_model()
