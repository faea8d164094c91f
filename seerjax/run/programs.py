"""A run's compiled programs, the devices that they run on, and the shapes of what they learn from.

Runs of one shape in one process may share them: `make_programs`, once.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import numpy as np
import optax

from seerjax import parallel
from seerjax.backends import choice
from seerjax.engine import runner as runner_lib
from seerjax.models import config as model_config, parameters
from seerjax.run import policy as policy_lib
from seerjax.run.config import RunConfig, for_model
from seerjax.run.policy import Policy
from seerjax.trainer import losses, packing, step as step_lib
from seerjax.types import RolloutGroup, TrainState


@dataclasses.dataclass(frozen=True)
class Programs:
  """A run's compiled programs. Runs of one shape in one process may share them."""

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
  """Returns what a run compiles; nothing is compiled before it is first used.

  Args:
    config: the run.
    model: its shape.
    loss: of one micro-batch, as `losses.policy_loss`.
    optimizer: an optax chain in the place of the config's.

  Raises:
    ValueError: if the model has fewer slabs than `RunConfig.model_shards`, or there are fewer
      devices than the config asks for.
    NotImplementedError: if kernels would learn on several devices of the model axis.
  """
  config = for_model(config, model)
  parallel.local_slabs(config.numerics.reduction_shards, config.model_shards)
  sampling, learning = meshes(config)
  backend = choice.backend_of(config.numerics)
  trainer = step_lib.Trainer(
    model,
    config.numerics,
    config.loss,
    step_lib.make_optimizer(config.optimizer) if optimizer is None else optimizer,
    learning,
    layout(config).num_pages,
    config.engine.page_size,
    config.trainer.remat,
    loss,
    backend,
  )
  runner = runner_lib.Runner(
    model, config.numerics, sampling, len(config.engine.row_buckets), backend
  )
  return Programs(key_of(config, model, loss, optimizer), trainer, runner)


def meshes(config: RunConfig) -> tuple[jax.sharding.Mesh, jax.sharding.Mesh]:
  """Returns where it samples and where it learns: everywhere, unless both go on at once."""
  shards = config.model_shards
  if not config.stale.steps_ahead:
    mesh = parallel.make_mesh(num_instances=config.num_instances, model_shards=shards)
    return mesh, mesh
  half = config.num_instances // 2
  rest = config.num_instances - half
  return (
    parallel.make_mesh(num_instances=half, model_shards=shards),
    parallel.make_mesh(num_instances=rest, model_shards=shards, first=half * shards),
  )


def first_state(
  config: RunConfig, policy: Policy, optimizer: optax.GradientTransformation | None = None
) -> TrainState:
  """Returns the state of a run that has not learnt; `optimizer` in the place of the config's."""
  optimizer = step_lib.make_optimizer(config.optimizer) if optimizer is None else optimizer
  return policy_lib.initial_state(config.weights, policy, optimizer, meshes(config)[1])


def abstract_state(
  config: RunConfig,
  policy: Policy,
  optimizer: optax.GradientTransformation | None = None,
  *,
  mesh: jax.sharding.Mesh | None = None,
) -> TrainState:
  """Returns shapes, dtypes and places of `first_state`; nothing is computed.

  Args:
    config: the run.
    policy: what learns.
    optimizer: in the place of the config's.
    mesh: whose devices share it; None is where the run learns.
  """
  optimizer = step_lib.make_optimizer(config.optimizer) if optimizer is None else optimizer
  mesh = meshes(config)[1] if mesh is None else mesh
  return policy_lib.abstract_state(config.weights, policy, optimizer, mesh)


def base_weights(config: RunConfig, policy: Policy) -> parameters.Params | None:
  """Returns `policy.frozen_weights` where the run learns, None if it does not need them."""
  if not config.keeps_base:
    return None
  return policy_lib.frozen_weights(policy, config.numerics, meshes(config)[1])


def key_of(
  config: RunConfig,
  model: model_config.TransformerConfig,
  loss: step_lib.PolicyLoss = losses.policy_loss,
  optimizer: optax.GradientTransformation | None = None,
) -> tuple[Any, ...]:
  """Returns all that decides a run's programs (`Programs.made_for`)."""
  return (
    model, config.num_instances, config.model_shards, config.stale.steps_ahead, config.lora_rank,
    config.numerics,
    config.engine, layout(config), config.trainer.remat, config.loss, config.optimizer,
    loss, optimizer,
  )  # fmt: skip


def _packing_arguments(config: RunConfig) -> dict[str, Any]:
  rows = config.trainer.rows_per_micro_batch
  longest = min(config.engine.max_context, rows + 1)
  return dict(
    numerics=config.numerics,
    page_size=config.engine.page_size,
    rows_per_micro_batch=rows,
    max_sequence_tokens=longest,
    max_sequences=config.trainer.sequences_per_micro_batch,
  )


def layout(config: RunConfig) -> packing.Layout:
  return packing.layout(**_packing_arguments(config))


def pack(config: RunConfig, groups: Sequence[RolloutGroup], values: np.ndarray) -> Any:
  """Returns the groups as one `TrainBatch` of the run's fixed shapes."""
  return packing.pack(groups, values, **_packing_arguments(config))
