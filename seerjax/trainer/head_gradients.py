"""Gradients of key/value heads that several slabs share (`models.shared_heads`).

    each slab's gradient of its copy --added in the fixed tree--> the head's, for every copy

The sum is taken once for an optimiser step, after the gradients of all micro-batches are added, and
before anything reads it. Equal gradients move equal copies to equal values, so copies stay equal;
a norm counts the first one alone (`counted`). Copies on several devices are gathered and added on
each, in the order of one device.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from seerjax import parallel
from seerjax.array_typing import Array
from seerjax.models import shared_heads
from seerjax.models.decoder import Decoder
from seerjax.models.shared_heads import Shared
from seerjax.parallel import MODEL_AXIS as MODEL


def summed(
  gradient: Any, decoder: Decoder, places: Sequence[jax.P], mesh: jax.sharding.Mesh
) -> Any:
  """Returns the gradient with the sum of its copies' gradients at every copy of a head.

  Args:
    gradient: f32 gradient of weights or adapters, layers stacked or listed; shared heads' leaves
      are donated.
    decoder: the model.
    places: sharding of each leaf on the mesh.
    mesh: mesh of the leaves.
  """
  leaves, structure = jax.tree.flatten(gradient)
  slabs = decoder.numerics.reduction_shards
  for index, own in enumerate(shared_heads.of_leaves(gradient, decoder.shape, slabs)):
    if own is not None:
      # One array at a time, so that no two collectives are in flight together.
      leaves[index] = jax.block_until_ready(_summed(leaves[index], own, places[index], mesh))
  return structure.unflatten(leaves)


@functools.partial(jax.jit, static_argnums=(1, 2, 3), donate_argnums=(0,))
def _summed(leaf: Array, shared: Shared, place: jax.P, mesh: jax.sharding.Mesh) -> Array:
  if mesh.size == 1:
    return _with_sums(leaf, shared, [()] * leaf.ndim, None)
  run = functools.partial(_with_sums, shared=shared, names=_names(place, leaf.ndim), mesh=mesh)
  return jax.shard_map(run, mesh=mesh, in_specs=(place,), out_specs=place, check_vma=False)(leaf)


def _with_sums(
  own: Array, shared: Shared, names: list[tuple[str, ...]], mesh: jax.sharding.Mesh | None
) -> Array:
  """Returns this device's part of a gradient with the sums over the copies of each head."""
  slabs = jnp.moveaxis(own, shared.axis, 0)
  devices = mesh.shape[MODEL] if mesh is not None and MODEL in names[shared.axis] else 1
  found = slabs
  for count in sorted(set(shared.copies) - {1}):
    of_head = _sums(slabs, count, devices)
    if set(shared.copies) == {count}:
      found = of_head
    else:
      layers = jnp.asarray([copies == count for copies in shared.copies])
      found = jnp.where(layers.reshape(1, -1, *(1,) * (slabs.ndim - 2)), of_head, found)
  found = jnp.moveaxis(found, 0, shared.axis)
  return jnp.where(_are_keys(own, shared, names, mesh), found, own)


def _sums(slabs: Array, count: int, devices: int) -> Array:
  """Returns for each slab f[r, ...] the tree's sum over the `count` slabs that share its head."""
  local = slabs.shape[0]
  within = min(count, local)
  sums = slabs.reshape(local // within, within, *slabs.shape[1:])
  while sums.shape[1] > 1:
    sums = sums[:, 0::2] + sums[:, 1::2]
  sums = sums[:, 0]
  if count > local:
    assert devices * local >= count, f"got {devices} devices of {local} slabs for {count} copies"
    sharers = count // local
    of_devices = lax.all_gather(sums, MODEL, axis=0, tiled=True)
    first = lax.axis_index(MODEL) // sharers * sharers
    sums = parallel.tree_sum(lax.dynamic_slice_in_dim(of_devices, first, sharers, 0))[None]
  return jnp.repeat(sums, within, axis=0)


def counted(
  tree: Any, decoder: Decoder, of_tree: Any = None, mesh: jax.sharding.Mesh | None = None
) -> Any:
  """Returns arrays shaped like masters with zeros for all copies of a head but the first.

  Args:
    tree: the arrays, layers listed; with a mesh, this device's parts of them.
    decoder: the model.
    of_tree: the spec of each, `shards.specs`; None if they are whole.
    mesh: mesh of the specs.
  """
  leaves, structure = jax.tree.flatten(tree)
  is_spec = lambda value: isinstance(value, jax.P)
  places = [jax.P()] * len(leaves)
  if of_tree is not None:
    places = jax.tree.leaves(of_tree, is_leaf=is_spec)
  slabs = decoder.numerics.reduction_shards
  for index, shared in enumerate(shared_heads.of_leaves(tree, decoder.shape, slabs)):
    if shared is None:
      continue
    own, (count,) = leaves[index], shared.copies
    names = _names(places[index], own.ndim)
    is_later = _indices(own, shared.axis, names, mesh) % count > 0
    is_left_out = _are_keys(own, shared, names, mesh) & is_later
    leaves[index] = jnp.where(is_left_out, jnp.zeros((), own.dtype), own)
  return structure.unflatten(leaves)


def _names(place: jax.P, ndim: int) -> list[tuple[str, ...]]:
  """Returns the mesh axes over which each dimension is sharded."""
  return [parallel.names_of(entry) for entry in (*place, *(None,) * (ndim - len(place)))]


def _are_keys(own: Array, shared: Shared, names: Any, mesh: jax.sharding.Mesh | None) -> Array:
  """Returns bool[..., columns], whether columns of this device are those of keys and values."""
  last, whole = own.ndim - 1, own.shape[-1]
  for name in names[last]:
    assert mesh is not None
    whole *= mesh.shape[name]
  return _indices(own, last, names, mesh) >= whole - shared.columns


def _indices(own: Array, axis: int, names: Any, mesh: jax.sharding.Mesh | None) -> Array:
  """Returns the indices of this device's part of a dimension, for broadcasting with `own`."""
  size, place = own.shape[axis], jnp.int32(0)
  for name in names[axis]:
    assert mesh is not None
    place = place * mesh.shape[name] + lax.axis_index(name)
  found = place * size + jnp.arange(size, dtype=jnp.int32)
  return found.reshape(tuple(size if i == axis else 1 for i in range(own.ndim)))
