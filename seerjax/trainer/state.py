"""Training state: initialisation and sharding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from seerjax import parallel
from seerjax.models import parameters
from seerjax.trainer import shards
from seerjax.types import TrainState


def first_state(
  params: Any, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh
) -> TrainState:
  """Returns the initial training state, with a copy of the f32 masters `params`.

  Its sharding equals that of states from `Trainer.update`, so one compiled program serves all.
  """
  if mesh.size == 1:
    params = jax.tree.map(jnp.copy, params)
    state = TrainState(params, optimizer.init(params), jnp.int32(0))
    return jax.device_put(state, mesh.devices.item())
  places = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(params, optimizer, mesh))
  put = lambda leaf, place: parallel.put(jnp.copy(leaf), place)
  masters = jax.tree.map(put, params, places.params)
  others = jax.jit(optimizer.init, out_shardings=places.opt_state)(masters)
  return TrainState(masters, others, parallel.put(np.int32(0), places.step))


def abstract_state(
  params: Any, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh
) -> TrainState:
  """Returns shapes, dtypes and shardings of a state with masters shaped like `params`."""

  def first(params: Any) -> TrainState:
    return TrainState(params, optimizer.init(params), jnp.int32(0))

  state = jax.eval_shape(first, params)
  if mesh.size == 1:
    place: Any = jax.sharding.SingleDeviceSharding(mesh.devices.item())
    at = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
    return jax.tree.map(at, state)

  def on_mesh(leaf: jax.ShapeDtypeStruct, spec: jax.P) -> jax.ShapeDtypeStruct:
    place = jax.sharding.NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

  return jax.tree.map(on_mesh, state, state_specs(state, optimizer, mesh))


def params_specs(
  params: Any, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh
) -> Any:
  """Returns the specs of masters (layers listed or stacked): sharded if the optimiser permits."""
  with_norm = optax.with_extra_args_support(optimizer)
  layers = jax.eval_shape(parameters.unstacked, params)
  is_shared = mesh.size == 1 or shards.is_elementwise(with_norm, layers)
  return shards.specs(params, mesh) if is_shared else shards.whole(params)


def state_specs(
  state: TrainState, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh
) -> TrainState:
  """Returns the specs of a state, or of its shapes."""
  of_params = params_specs(state.params, optimizer, mesh)
  return TrainState(of_params, shards.of_optimizer(optimizer, state.opt_state, of_params), jax.P())


def is_given_up(state: Any) -> bool:
  """Whether any array of a state, or of a tree that contains one, was donated to an update."""
  return any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(state))
