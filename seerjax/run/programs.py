"""A run's compiled programs, their meshes, and the shapes of training state and batches.

Runs of equal shapes in one process may share the result of one `make_programs` call.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import numpy as np
import optax

from seerjax import parallel
from seerjax.engine import engine as engine_lib, runner as runner_lib
from seerjax.models import config as model_config, parameters
from seerjax.models.decoder import Decoder
from seerjax.run import policy as policy_lib
from seerjax.run.config import SharedConfig, TrainerConfig, for_model
from seerjax.run.policy import Policy
from seerjax.trainer import losses, optimizer as optimizer_lib, packing, step as step_lib
from seerjax.types import RolloutGroup


@dataclasses.dataclass(frozen=True)
class Programs:
  """Compiled programs of a run. Runs of equal shapes in one process may share them.

  Attributes:
    config: settings of the run that they were made for, with nothing left open.
    decoder: the decisions for the model.
    made_for: everything that determines them; equal for runs that may share them.
    trainer: gradient and update.
    runner: steps of the engine.
  """

  config: SharedConfig
  decoder: Decoder
  made_for: tuple[Any, ...]
  trainer: step_lib.Trainer
  runner: runner_lib.Runner


def make_programs(
  config: SharedConfig,
  model: model_config.TransformerConfig,
  *,
  loss: step_lib.PolicyLoss = losses.policy_loss,
  optimizer: optax.GradientTransformation | None = None,
) -> Programs:
  """Decides what a run leaves open, and returns its programs; each is compiled on first use.

  Args:
    config: configuration of the run.
    model: shape of the model.
    loss: loss of one micro-batch, like `losses.policy_loss`.
    optimizer: optax chain; replaces the config's.

  Raises:
    ValueError: if the model has fewer slabs than `RunConfig.tensor_parallel_size`, or there are too
      few devices.
    NotImplementedError: if kernels would have to train on several devices of the model axis.
  """
  config, decoder = for_model(config, model)
  parallel.local_slabs(config.numerics.reduction_shards, config.tensor_parallel_size)
  sampling, learning = meshes(config)
  shapes = layout(config.engine, config.trainer, decoder)
  trainer = step_lib.Trainer(
    decoder,
    config.loss,
    optimizer_lib.make_optimizer(config.optimizer) if optimizer is None else optimizer,
    learning,
    shapes.num_pages,
    config.engine.page_size,
    config.trainer.remat,
    loss,
    moves_router_biases=optimizer is None and config.optimizer.router_bias_speed > 0,
  )
  runner = runner_lib.Runner(decoder, sampling, len(config.engine.batch_size_buckets))
  made_for = (
    decoder, config.data_parallel_size, config.tensor_parallel_size, config.max_policy_lag,
    config.lora_rank, config.engine, shapes, config.trainer.remat, config.loss, config.optimizer,
    loss, optimizer,
  )  # fmt: skip
  return Programs(config, decoder, made_for, trainer, runner)


def meshes(config: SharedConfig) -> tuple[jax.sharding.Mesh, jax.sharding.Mesh]:
  """Returns the (sampling, training) meshes: the same one, unless both run at the same time."""
  shards = config.tensor_parallel_size
  if not config.max_policy_lag:
    mesh = parallel.make_mesh(
      data_parallel_size=config.data_parallel_size, tensor_parallel_size=shards
    )
    return mesh, mesh
  half = config.data_parallel_size // 2
  rest = config.data_parallel_size - half
  return (
    parallel.make_mesh(data_parallel_size=half, tensor_parallel_size=shards),
    parallel.make_mesh(data_parallel_size=rest, tensor_parallel_size=shards, first=half * shards),
  )


def base_weights(config: SharedConfig, policy: Policy) -> parameters.Params | None:
  """Returns `policy.frozen_weights` on the training mesh; None if the run does not need them."""
  if not config.keeps_base:
    return None
  return policy_lib.frozen_weights(policy, config.numerics, meshes(config)[1])


def _packing_arguments(
  engine: engine_lib.EngineConfig, trainer: TrainerConfig, decoder: Decoder
) -> dict[str, Any]:
  rows = trainer.rows_per_micro_batch
  return dict(
    decoder=decoder,
    page_size=engine.page_size,
    rows_per_micro_batch=rows,
    max_sequence_tokens=min(engine.max_model_len, rows + 1),
    max_num_seqs=trainer.sequences_per_micro_batch,
  )


def layout(
  engine: engine_lib.EngineConfig, trainer: TrainerConfig, decoder: Decoder
) -> packing.Layout:
  """Returns the layout of micro-batches of decided sizes."""
  return packing.layout(**_packing_arguments(engine, trainer, decoder))


def mini_batches(
  engine: engine_lib.EngineConfig,
  trainer: TrainerConfig,
  decoder: Decoder,
  groups: Sequence[RolloutGroup],
  values: np.ndarray,
) -> list[Any]:
  """Packs the groups of a step, in order, into a `TrainBatch` for each of its optimiser steps."""
  parts = np.array_split(np.arange(len(groups)), trainer.num_mini_batches)
  return [
    pack(engine, trainer, decoder, [groups[i] for i in part.tolist()], values[part])
    for part in parts
  ]


def pack(
  engine: engine_lib.EngineConfig,
  trainer: TrainerConfig,
  decoder: Decoder,
  groups: Sequence[RolloutGroup],
  values: np.ndarray,
) -> Any:
  """Packs groups into one `TrainBatch` with the fixed shapes of decided sizes."""
  return packing.pack(groups, values, **_packing_arguments(engine, trainer, decoder))
