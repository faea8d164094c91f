"""Sums of gradients: resharded from instances to the devices that update, and added."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from seerjax import parallel
from seerjax.array_typing import Array
from seerjax.parallel import INSTANCE_AXIS as INSTANCE, MODEL_AXIS as MODEL


def shared_out(leaf: Array, target: jax.P, count: int) -> list[Array]:
  """Returns the sums of the first `count` instances, each resharded over all devices.

  Args:
    leaf: f32[i, ...] on its mesh, the instances' sums, donated; f32[...] on a single device.
    target: sharding of each sum, from `shards.specs`.
    count: number of sums.
  """
  if leaf.sharding.num_devices == 1:
    return [jax.device_put(leaf, *leaf.sharding.device_set)]
  assert isinstance(leaf.sharding, jax.sharding.NamedSharding)
  # One array at a time, so that no two collectives are in flight together.
  found = _shared_out(leaf, leaf.sharding.spec, target, leaf.sharding.mesh, count)
  leaf.delete()
  return jax.block_until_ready(found)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _shared_out(
  leaf: Array, source: jax.P, target: jax.P, mesh: jax.sharding.Mesh, count: int
) -> list[Array]:
  """Implements `shared_out` for one array on a mesh; each element moves between two devices."""

  def local(own: Array) -> list[Array]:
    own = own[0]
    before = [parallel.names_of(entry) for entry in source[1:]]
    before += [()] * (own.ndim - len(before))
    split = None
    for axis, entry in enumerate((*target, *(None,) * (own.ndim - len(target)))):
      names = parallel.names_of(entry)
      if MODEL in names and MODEL not in before[axis]:
        size = own.shape[axis] // mesh.shape[MODEL]
        start = lax.axis_index(MODEL) * jnp.int32(size)
        own = lax.dynamic_slice_in_dim(own, start, size, axis)
      elif MODEL in before[axis] and MODEL not in names:
        own = lax.all_gather(own, MODEL, axis=axis, tiled=True)
      if INSTANCE in names:
        split = axis
    if mesh.shape[INSTANCE] == 1:
      sums = own[None]
    elif split is None:
      sums = lax.all_gather(own, INSTANCE)
    else:
      sums = lax.all_to_all(own[None], INSTANCE, split + 1, 0, tiled=True)
    return [sums[index] for index in range(count)]

  spread = jax.shard_map(
    local, mesh=mesh, in_specs=(source,), out_specs=[target] * count, check_vma=False
  )
  return spread(leaf)


# Both operands are consumed: the left one is donated to the sum, `TreeSum` deletes the right one.
_add = jax.jit(lambda left, right: jax.tree.map(jnp.add, left, right), donate_argnums=(0,))


class TreeSum:
  """Adds pytrees one by one, in the order of `parallel.tree_sum_list`.

  Works like a binary counter: two blocks of equal size are merged at once, so at most
  log2(count) + 1 partial sums exist. Added values are donated.
  """

  def __init__(self):
    self._blocks: list[tuple[int, Any]] = []  # (number of values, sum), sizes descending.

  def add(self, value: Any) -> None:
    """Adds the next value."""
    size = 1
    while self._blocks and self._blocks[-1][0] == size:
      value, size = self._joined(value), 2 * size
    self._blocks.append((size, value))

  def total(self) -> Any:
    """Returns the sum of all values (at least one) and resets the sum."""
    _, value = self._blocks.pop()
    while self._blocks:
      value = self._joined(value)
    return value

  def _joined(self, right: Any) -> Any:
    _, left = self._blocks.pop()
    total = _add(left, right)
    for leaf in jax.tree.leaves(right):
      leaf.delete()  # Takes effect after the addition has read it.
    return total
