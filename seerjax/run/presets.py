"""Whole runs, whose settings go together: nano's, and that of any other model."""

from __future__ import annotations

from seerjax import numerics as numerics_lib
from seerjax.engine import engine as engine_lib
from seerjax.models import loading
from seerjax.rollout import groups
from seerjax.run.config import RunConfig, TrainerConfig
from seerjax.run.evaluation import EvaluationConfig
from seerjax.trainer import losses, step as step_lib


def main_job() -> RunConfig:
  """Returns the main job: nano on word problems, two devices side by side on two cores."""
  return RunConfig(
    num_steps=20,
    num_instances=2,
    checkpoint_every=10,
    numerics=numerics_lib.NumericsConfig(
      query_tile=4, slot_tile=32, kv_split=64, reduction_shards=0
    ),
    engine=engine_lib.EngineConfig(page_size=32, max_sequences=64, max_context=512),
    rollout=groups.RolloutConfig(
      groups_per_step=48, group_size=8, temperature=1.0, max_tokens=216
    ),
    loss=losses.dapo(),
    optimizer=step_lib.OptimizerConfig(learning_rate=2e-4, warmup_steps=2),
    # Asked as it is trained: sampled, at the temperature of the rollouts.
    evaluation=EvaluationConfig(num_problems=2048, temperature=1.0),
  )


def named_model() -> RunConfig:
  """Returns what a run of a pretrained model begins with: one device, 128 answers a step.

  The learning rate follows from the model's size and from what learns (`learning_rates.usual`), the
  tiles from the platform. Nothing of it was tuned.
  """
  return RunConfig(
    num_steps=20,
    checkpoint_every=10,
    engine=engine_lib.EngineConfig(max_context=1024),
    rollout=groups.RolloutConfig(groups_per_step=16, group_size=8, max_tokens=640),
    trainer=TrainerConfig(remat="layer"),
    loss=losses.dapo(),
    optimizer=step_lib.OptimizerConfig(warmup_steps=2),
    evaluation=EvaluationConfig(num_problems=256, temperature=1.0),
  )


def of_model(name: str) -> RunConfig:
  """Returns what a run of a model by name begins with: the main job if it is in the package."""
  return main_job() if name in loading.SHIPPED else named_model()
