"""Sums of gradients come to the device that updates, from all instances and processes."""

from __future__ import annotations

import functools

import jax
from jax import lax
import jax.numpy as jnp

from seerjax import parallel
from seerjax.array_typing import Array


def on_first(leaf: Array, index: int) -> Array:
  """Returns the sum of instance `index` on the first device, its slabs together again.

  Where several processes share a mesh, each has it on its own first device.

  Args:
    leaf: f32[i, ...] on its mesh, of the instances' sums; f32[...] on a single device.
    index: of the instance.
  """
  first = jax.local_devices()[0]
  if leaf.sharding.num_devices == 1:
    return jax.device_put(leaf, first)
  assert isinstance(leaf.sharding, jax.sharding.NamedSharding)
  assert isinstance(leaf.sharding.mesh, jax.sharding.Mesh)  # One with devices.
  if parallel.spans_processes(leaf.sharding.mesh):
    # One leaf at a time: gatherings of several would be in flight together.
    everywhere = jax.block_until_ready(_everywhere(leaf, index, leaf.sharding))
    return jax.device_put(everywhere.addressable_data(0), first)
  own = [s for s in leaf.addressable_shards if s.index[0].indices(leaf.shape[0])[0] == index]
  # Each device of the model axis has what is no slab.
  parts = {str(shard.index): shard.data for shard in own}
  whole = [jax.device_put(part, first).reshape(part.shape[1:]) for part in parts.values()]
  if len(whole) == 1:
    return whole[0]
  return jnp.concatenate(whole, axis=leaf.sharding.spec.index(parallel.MODEL_AXIS) - 1)


@functools.partial(jax.jit, static_argnums=(2,))
def _everywhere(leaf: Array, index: Array, sharding: jax.sharding.NamedSharding) -> Array:
  """Returns f32[i, ...] of one instance, its slabs together again, on every device.

  It travels as words that are added to zeros, which keeps every bit in any order.
  """
  spec = sharding.spec

  def local(leaf: Array, index: Array) -> Array:
    words = lax.bitcast_convert_type(leaf[0], jnp.uint32)
    is_here = lax.axis_index(parallel.INSTANCE_AXIS) == index
    words = lax.psum(jnp.where(is_here, words, jnp.uint32(0)), parallel.INSTANCE_AXIS)
    if parallel.MODEL_AXIS in spec:
      axis = spec.index(parallel.MODEL_AXIS) - 1
      words = lax.all_gather(words, parallel.MODEL_AXIS, axis=axis, tiled=True)
    return lax.bitcast_convert_type(words, jnp.float32)

  spread = jax.shard_map(
    local, mesh=sharding.mesh, in_specs=(spec, jax.P()), out_specs=jax.P(), check_vma=False
  )
  return spread(leaf, index)
