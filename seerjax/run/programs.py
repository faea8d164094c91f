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
from seerjax.engine import runner as runner_lib
from seerjax.models import config as model_config, parameters
from seerjax.models.decoder import Decoder
from seerjax.run import policy as policy_lib
from seerjax.run.config import DecidedRun, RunConfig, for_model
from seerjax.run.policy import Policy
from seerjax.trainer import losses, packing, step as step_lib
from seerjax.types import RolloutGroup, TrainState


@dataclasses.dataclass(frozen=True)
class Programs:
  """Compiled programs of a run. Runs of equal shapes in one process may share them.

  Attributes:
    decided: decisions for the run that they were made for.
    made_for: everything that determines them; equal for runs that may share them.
    trainer: gradient and update.
    runner: steps of the engine.
  """

  decided: DecidedRun
  made_for: tuple[Any, ...]
  trainer: step_lib.Trainer
  runner: runner_lib.Runner


def make_programs(
  config: RunConfig,
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
  decided = for_model(config, model)
  config, decoder = decided.config, decided.decoder
  parallel.local_slabs(config.numerics.reduction_shards, config.tensor_parallel_size)
  sampling, learning = meshes(config)
  trainer = step_lib.Trainer(
    decoder,
    config.loss,
    step_lib.make_optimizer(config.optimizer) if optimizer is None else optimizer,
    learning,
    layout(config, decoder).num_pages,
    config.engine.page_size,
    config.trainer.remat,
    loss,
  )
  runner = runner_lib.Runner(decoder, sampling, len(config.engine.batch_size_buckets))
  return Programs(decided, _key_of(decided, loss, optimizer), trainer, runner)


def meshes(config: RunConfig) -> tuple[jax.sharding.Mesh, jax.sharding.Mesh]:
  """Returns the (sampling, training) meshes: the same one, unless both run at the same time."""
  shards = config.tensor_parallel_size
  if not config.off_policy.max_policy_lag:
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


def first_state(
  config: RunConfig, policy: Policy, optimizer: optax.GradientTransformation | None = None
) -> TrainState:
  """Returns the initial training state; `optimizer` replaces the config's."""
  optimizer = step_lib.make_optimizer(config.optimizer) if optimizer is None else optimizer
  return policy_lib.initial_state(config.weights, policy, optimizer, meshes(config)[1])


def abstract_state(
  config: RunConfig,
  policy: Policy,
  optimizer: optax.GradientTransformation | None = None,
  *,
  mesh: jax.sharding.Mesh | None = None,
) -> TrainState:
  """Returns shapes, dtypes and shardings of `first_state` without computing anything.

  Args:
    config: configuration of the run.
    policy: the policy to train.
    optimizer: replaces the config's.
    mesh: mesh to shard over; None is the training mesh.
  """
  optimizer = step_lib.make_optimizer(config.optimizer) if optimizer is None else optimizer
  mesh = meshes(config)[1] if mesh is None else mesh
  return policy_lib.abstract_state(config.weights, policy, optimizer, mesh)


def base_weights(config: RunConfig, policy: Policy) -> parameters.Params | None:
  """Returns `policy.frozen_weights` on the training mesh; None if the run does not need them."""
  if not config.keeps_base:
    return None
  return policy_lib.frozen_weights(policy, config.numerics, meshes(config)[1])


def _key_of(
  decided: DecidedRun,
  loss: step_lib.PolicyLoss,
  optimizer: optax.GradientTransformation | None,
) -> tuple[Any, ...]:
  """Returns a key of everything that determines a run's programs (`Programs.made_for`)."""
  config, decoder = decided.config, decided.decoder
  return (
    decoder, config.data_parallel_size, config.tensor_parallel_size,
    config.off_policy.max_policy_lag, config.lora_rank,
    config.engine, layout(config, decoder), config.trainer.remat, config.loss, config.optimizer,
    loss, optimizer,
  )  # fmt: skip


def _packing_arguments(config: RunConfig, decoder: Decoder) -> dict[str, Any]:
  rows = config.trainer.rows_per_micro_batch
  longest = min(config.engine.max_model_len, rows + 1)
  return dict(
    decoder=decoder,
    page_size=config.engine.page_size,
    rows_per_micro_batch=rows,
    max_sequence_tokens=longest,
    max_num_seqs=config.trainer.sequences_per_micro_batch,
  )


def layout(config: RunConfig, decoder: Decoder) -> packing.Layout:
  """Returns the layout of a decided run's micro-batches."""
  return packing.layout(**_packing_arguments(config, decoder))


def pack(
  config: RunConfig, decoder: Decoder, groups: Sequence[RolloutGroup], values: np.ndarray
) -> Any:
  """Packs groups into one `TrainBatch` with the decided run's fixed shapes."""
  return packing.pack(groups, values, **_packing_arguments(config, decoder))
