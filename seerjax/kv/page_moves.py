"""Programs that copy pages: between instances, out to separate arrays, and back in.

Each program handles a fixed number of pages, padded with page 0, the target of padded writes; a
request's pages go in rounds. All are SPMD: every process calls them in the same order with the same
numbers. Values are only copied, so a restored page equals the spilled one bit for bit (a sum over
instances would turn -0.0 into 0.0).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from seerjax import parallel
from seerjax.array_typing import Array
from seerjax.models.kv_layout import PAGE_AXIS

# Pages per program; a request takes as many rounds as it needs.
BUCKETS = (4, 32)

_PAGES = jax.P(parallel.INSTANCE_AXIS, parallel.MODEL_AXIS)
_BY_INSTANCE = jax.P(parallel.INSTANCE_AXIS)


def bucket_for(count: int) -> int:
  """Returns the smallest bucket that holds `count` pages."""
  return next(size for size in BUCKETS if size >= count)


def rounds(pages: list[int]) -> list[list[int]]:
  """Cuts a list of pages into rounds of one program each; less than half is padding."""
  small, large = BUCKETS
  pieces, first = [], 0
  while first < len(pages):
    size = large if len(pages) - first > large // 2 else small
    pieces.append(pages[first : first + size])
    first += size
  return pieces


def copy_rounds(copies: Any, num_copies: Any) -> list[np.ndarray]:
  """Cuts a step's copies into rounds i32[i, n, 2]; a round may read all pages before it writes any.

  Args:
    copies: i32[i, c, 2] (numpy), (from, to) pages by instance, to be made in order.
    num_copies: i32[i] (numpy), number of valid copies of each instance.

  Returns:
    Rounds of a bucket's size, padded with copies of page 0 to itself; none if there are no copies.
  """
  by_instance = []
  for own, count in zip(copies, num_copies, strict=True):
    pieces: list[list[tuple[int, int]]] = []
    written: set[int] = set()
    for source, target in own[:count].tolist():
      if not pieces or len(pieces[-1]) == BUCKETS[-1] or written & {source, target}:
        pieces.append([])
        written = set()
      pieces[-1].append((source, target))
      written.add(target)
    by_instance.append(pieces)
  found = []
  for index in range(max(map(len, by_instance))):
    pieces = [pieces[index] if index < len(pieces) else [] for pieces in by_instance]
    whole = np.zeros((len(pieces), bucket_for(max(map(len, pieces))), 2), np.int32)
    for instance, piece in enumerate(pieces):
      whole[instance, : len(piece)] = np.asarray(piece, np.int32).reshape(-1, 2)
    found.append(whole)
  return found


@dataclasses.dataclass(frozen=True)
class PageMoves:
  """The programs of one mesh, compiled on first use. Pages are pytrees of f[i, k, m, z, c].

  Attributes:
    mesh: `parallel.make_mesh`.
  """

  mesh: jax.sharding.Mesh

  @property
  def _sharding(self) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(self.mesh, _PAGES)

  def _program(self, function: Any, in_specs: Any, donate: tuple[int, ...]):
    spread = jax.shard_map(
      function, mesh=self.mesh, in_specs=in_specs, out_specs=_PAGES, check_vma=False
    )
    return jax.jit(spread, donate_argnums=donate, out_shardings=self._sharding)

  @functools.cached_property
  def _extract(self):
    def extract(pages: Any, ids: Array) -> Any:
      return jax.tree.map(lambda whole: jnp.take(whole, ids[0], axis=1 + PAGE_AXIS), pages)

    return self._program(extract, (_PAGES, _BY_INSTANCE), ())

  @functools.cached_property
  def _insert(self):
    def insert(pages: Any, ids: Array, values: Any) -> Any:
      put = lambda whole, new: whole.at[:, :, ids[0]].set(new)
      return jax.tree.map(put, pages, values)

    return self._program(insert, (_PAGES, _BY_INSTANCE, _PAGES), (0,))

  @functools.cached_property
  def _copy(self):
    def copy(pages: Any, copies: Array) -> Any:
      source, target = copies[0, :, 0], copies[0, :, 1]

      def of(whole: Array) -> Array:
        # The barrier prevents one fusion that reads and writes the pages, which would copy them.
        read = lax.optimization_barrier(jnp.take(whole, source, axis=1 + PAGE_AXIS))
        return whole.at[:, :, target].set(read)

      return jax.tree.map(of, pages)

    return self._program(copy, (_PAGES, _BY_INSTANCE), (0,))

  @functools.cached_property
  def _move(self):
    def move(pages: Any, moves: Array) -> Any:
      source, source_page, target, target_page = moves
      here = lax.axis_index(parallel.INSTANCE_AXIS)
      send = jnp.where(source == here, source_page, 0)
      receive = jnp.where(target == here, target_page, 0)
      rows = jnp.arange(source.shape[0], dtype=jnp.int32)

      def carry(whole: Array) -> Array:
        buffers = lax.all_gather(jnp.take(whole[0], send, axis=PAGE_AXIS), parallel.INSTANCE_AXIS)
        arrived = buffers[source, :, rows]  # f[n, k, z, c]
        return whole.at[0, :, receive].set(arrived)

      return jax.tree.map(carry, pages)

    return self._program(move, (_PAGES, jax.P()), (0,))

  def extract(self, pages: Any, ids: np.ndarray) -> Any:
    """Returns copies f[i, k, n, z, c] of the pages i32[i, n]; `pages` is not donated."""
    return self._extract(pages, ids)

  def insert(self, pages: Any, ids: np.ndarray, values: Any) -> Any:
    """Returns `pages`, which is donated, with f[i, k, n, z, c] written to the pages i32[i, n]."""
    return self._insert(pages, ids, values)

  def copy(self, pages: Any, copies: np.ndarray) -> Any:
    """Returns `pages`, which is donated, after one of `copy_rounds`: i32[i, n, 2], (from, to)."""
    return self._copy(pages, copies)

  def move(self, pages: Any, moves: np.ndarray) -> Any:
    """Returns `pages`, which is donated, after moves i32[4, n].

    Rows: from instance, from page, to instance, to page. All pages are read before any is written.
    """
    return self._move(pages, moves)

  # Transfers of one request's part of an extracted array.

  def take_off(self, values: Any, instance: int) -> list[list[Array]]:
    """Returns an instance's part in pinned host memory: by leaf, by model shard, f[1, k, n, z, c].

    The copies are only dispatched here; the call does not block.
    """
    devices = self.mesh.devices[instance].tolist()
    found = []
    for leaf in jax.tree.leaves(values):
      by_device = {shard.device: shard.data for shard in leaf.addressable_shards}
      found.append([jax.device_put(by_device[device], _pinned(device)) for device in devices])
    return found

  def put_on(self, like: Any, parts: dict[int, list[list[Any]]]) -> Any:
    """Returns values for `insert` from the results of `take_off`, by target instance.

    Args:
      like: pages with the structure of the result.
      parts: by instance; other instances get zeros.
    """
    leaves, structure = jax.tree.flatten(like)
    some = next(iter(parts.values()))
    out = []
    for index, leaf in enumerate(leaves):
      local = some[index][0].shape
      shards = []
      for instance, devices in enumerate(self.mesh.devices):
        for place, device in enumerate(devices):
          if device.process_index != jax.process_index():
            continue
          if instance in parts:
            shard = jax.device_put(parts[instance][index][place], _on_device(device))
          else:
            shard = jnp.zeros(local, leaf.dtype, device=device)
          shards.append(shard)
      shape = (self.mesh.devices.shape[0], leaf.shape[1], *local[2:])
      out.append(jax.make_array_from_single_device_arrays(shape, self._sharding, shards))
    return structure.unflatten(out)


def _on_device(device: Any) -> jax.sharding.Sharding:
  # The memory kind must be named, or arrays in host memory stay there.
  return jax.sharding.SingleDeviceSharding(device, memory_kind=device.default_memory().kind)


def _pinned(device: Any) -> jax.sharding.Sharding:
  # Never unpinned_host: bfloat16 was seen to come back with a wrong stride from there.
  return jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
