"""Meshes, the fixed reduction tree, and where parameters live.

The mesh has two axes. `instance` replicates the weights and splits the requests: each instance has
its own pages. `model` splits every slab dimension (`NumericsConfig.reduction_shards` logical slabs
over 1, 2, 4 or 8 devices); partial sums are gathered and added locally in one order, so the number
of devices changes no bit.
"""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from seerjax.array_typing import Array, Shaped

MAX_INSTANCES = 1024  # As many devices of a CPU take a second to make; the time grows squared.
INSTANCE_AXIS = "instance"
MODEL_AXIS = "model"


def make_mesh(
  *, num_instances: int = 1, model_shards: int = 1, first: int = 0
) -> jax.sharding.Mesh:
  """Returns the mesh of `num_instances * model_shards` devices from `first` on.

  Instances are outermost.

  Raises:
    ValueError: if there are fewer devices, or less than one is asked for.
  """
  if num_instances < 1 or model_shards < 1 or first < 0:
    raise ValueError(
      f"make_mesh: got num_instances={num_instances}, model_shards={model_shards}, first={first},"
      " expected at least 1, 1 and 0; one device is num_instances=1, model_shards=1."
    )
  needed = num_instances * model_shards
  devices = jax.devices()[first:]
  if needed > len(devices):
    raise ValueError(
      f"make_mesh: got num_instances={num_instances} x model_shards={model_shards} = {needed}"
      f" devices, expected at most the {len(devices)} there are; lower either, or on CPU start with"
      " jax.config.update('jax_num_cpu_devices', n)."
    )
  grid = np.asarray(devices[:needed]).reshape(num_instances, model_shards)
  return jax.sharding.Mesh(grid, (INSTANCE_AXIS, MODEL_AXIS))


def local_slabs(reduction_shards: int, model_shards: int) -> int:
  """Returns how many logical slabs one device of the model axis holds.

  Raises:
    ValueError: if the slabs cannot be shared out evenly.
  """
  if reduction_shards % model_shards:
    raise ValueError(
      f"model axis: got {model_shards} devices, expected a divisor of"
      f" reduction_shards={reduction_shards}; use fewer devices on the model axis."
    )
  return reduction_shards // model_shards


def gather_slabs(slabs: Shaped[Array, "r ..."], axis: str | None) -> Shaped[Array, "R ..."]:
  """Returns all slabs in order, `[r, ...]` to `[r * devices, ...]`; the identity on one device."""
  if axis is None:
    return slabs
  return lax.all_gather(slabs, axis, axis=0, tiled=True)


def tree_sum(slabs: Shaped[Array, "r ..."]) -> Shaped[Array, "..."]:
  """Adds a power of two of slabs as one balanced binary tree: ((0+1)+(2+3))+((4+5)+(6+7))."""
  while slabs.shape[0] > 1:
    slabs = slabs[0::2] + slabs[1::2]
  return slabs[0]


def tree_sum_list(values: list[Array]) -> Array:
  """`tree_sum` of any number of arrays of one shape: an odd one out waits for the next round."""
  while len(values) > 1:
    paired = [a + b for a, b in zip(values[0::2], values[1::2], strict=False)]
    values = paired + values[len(paired) * 2 :]
  return values[0]


def local_part(whole: Shaped[Array, "R ..."], axis: str | None) -> Shaped[Array, "r ..."]:
  """Returns this device's slabs of a replicated array."""
  if axis is None:
    return whole
  size = whole.shape[0] // lax.axis_size(axis)
  return lax.dynamic_slice_in_dim(whole, lax.axis_index(axis) * jnp.int32(size), size, 0)
