"""Whole runs by name, whose settings were tried together."""

from __future__ import annotations

from seerjax import numerics as numerics_lib
from seerjax.engine import engine as engine_lib
from seerjax.rollout import groups
from seerjax.run.config import RunConfig
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
