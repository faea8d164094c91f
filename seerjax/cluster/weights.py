"""Transfers weights from the trainer to the workers: tensor by tensor, each with its SHA-256.

    compute_params -> pieces (`weight_transfer_chunk_bytes`) -> storage -> a tensor -> its engine
          SHA-256 of each tensor ---------------- compared with ----^ the bytes on its devices

Any process with the description of a piece can read it: `Held` contains the bytes, `InStore` refers
to the KV store, and `ray_workers.InRay` to Ray's object store. In addition to the weights, trainer
and worker hold one piece in memory, and one tensor if devices have separate memory.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import hashlib
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seerjax import parallel
from seerjax.cluster.records import Path, Piece, TensorRef, WeightsRef
from seerjax.kv.pool import Store
from seerjax.models import parameters


@dataclasses.dataclass(frozen=True)
class Held:
  """A piece that is sent together with its description."""

  data: bytes

  def read(self, store: Store | None) -> bytes:
    """Implements `Piece.read`."""
    return self.data


@dataclasses.dataclass(frozen=True)
class InStore:
  """A piece in the KV store, under a key derived from its contents."""

  key: str

  def read(self, store: Store | None) -> bytes:
    """Implements `Piece.read`."""
    found = None if store is None else store.get(self.key)
    if found is None:
      where = "no store" if store is None else f"no value for the key {self.key!r} in its store"
      raise ConnectionError(
        f"Worker.load: got {where}, expected the trainer's weights; use the trainer's store"
        " (KVPoolConfig) in all workers, and keep the weights there until all have loaded them."
      )
    return found


class StoreDoor:
  """Puts pieces into a store, and removes those of replaced weights."""

  def __init__(self, store: Store):
    self._store = store
    self._keys: set[str] = set()

  def put(self, data: bytes) -> InStore:
    """Stores a piece.

    Raises:
      ConnectionError: if the store is full.
    """
    key = f"weights/{hashlib.sha256(data).hexdigest()}"
    if key not in self._keys and not self._store.put(key, data):
      raise ConnectionError(
        f"StoreDoor.put: got a full store, expected room for {len(data)} bytes of weights; raise"
        " KVPoolConfig.store_bytes."
      )
    self._keys.add(key)
    return InStore(key)

  def keep_only(self, weights: WeightsRef) -> None:
    """Removes all pieces except those of `weights`, which all workers must have loaded."""
    pieces = itertools.chain(*(tensor.pieces for tensor in weights.tensors))
    kept = {piece.key for piece in pieces if isinstance(piece, InStore)}
    for key in self._keys - kept:
      self._store.remove(key)
    self._keys &= kept


def publish(
  params: parameters.Params,
  put: Callable[[bytes], Piece],
  *,
  weight_transfer_chunk_bytes: int = parallel.PIECE_BYTES,
) -> WeightsRef:
  """Stores weights where workers can read them.

  Args:
    params: result of `parameters.compute_params`, on this process's devices.
    put: stores a piece: `Workers.put` or `StoreDoor.put`.
    weight_transfer_chunk_bytes: size of a piece.

  Raises:
    ValueError: if `weight_transfer_chunk_bytes` is below 1.
  """
  if weight_transfer_chunk_bytes < 1:
    raise ValueError(
      f"weights.publish: got weight_transfer_chunk_bytes={weight_transfer_chunk_bytes}, expected"
      " at least 1; 2**26 is usual."
    )
  tensors = []
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    data = _bytes_of(leaf)
    starts = range(0, len(data), weight_transfer_chunk_bytes)
    pieces = [put(data[start : start + weight_transfer_chunk_bytes].tobytes()) for start in starts]
    tensors.append(
      TensorRef(
        path=_path(path),
        shape=tuple(leaf.shape),
        dtype=leaf.dtype.name,
        sha256=hashlib.sha256(data.data).hexdigest(),
        pieces=tuple(pieces),
      )
    )
  return WeightsRef(tensors=tuple(tensors))


def received(
  weights: WeightsRef, mesh: jax.sharding.Mesh, store: Store | None = None
) -> parameters.Params:
  """Returns published weights on a mesh, in the form for `Engine.update_weights`.

  Args:
    weights: result of `publish`.
    mesh: mesh of the engine.
    store: KV store of this process, for pieces in one.

  Raises:
    ConnectionError: if a piece cannot be read.
    ValueError: if a tensor's bytes on the devices differ from those that were published.
  """
  layout = _tree(
    {
      tensor.path: jax.ShapeDtypeStruct(tensor.shape, jnp.dtype(tensor.dtype))
      for tensor in weights.tensors
    }
  )
  specs = {
    _path(path): spec
    for path, spec in jax.tree_util.tree_leaves_with_path(
      parameters.specs_of(layout), is_leaf=lambda node: isinstance(node, jax.P)
    )
  }
  found = {}
  for tensor in weights.tensors:
    sharding = jax.sharding.NamedSharding(mesh, specs[tensor.path])
    leaf = jax.device_put(_read(tensor, store), sharding)
    digest = hashlib.sha256(_bytes_of(leaf).data).hexdigest()
    if digest != tensor.sha256:
      raise ValueError(
        f"Worker.load: got SHA-256 {digest} of {tensor.name}, expected"
        f" {tensor.sha256}, the trainer's; publish the weights again."
      )
    found[tensor.path] = leaf
  return _tree(found)


def _read(tensor: TensorRef, store: Store | None) -> np.ndarray:
  """Reads a tensor into host memory; missing bytes stay zero, which its digest will reveal."""
  whole = np.zeros(tensor.shape, jnp.dtype(tensor.dtype))
  target, start = whole.reshape(-1).view(np.uint8), 0
  for piece in tensor.pieces:
    data = np.frombuffer(piece.read(store), np.uint8)[: len(target) - start]
    target[start : start + len(data)] = data
    start += len(data)
  return whole


def _bytes_of(leaf: Any) -> np.ndarray:
  """Returns an array's bytes, u8[n], in order; without a copy for a CPU array."""
  return np.ascontiguousarray(jax.device_get(leaf)).reshape(-1).view(np.uint8)


def _path(path: Any) -> Path:
  return tuple(key.key if isinstance(key, jax.tree_util.DictKey) else key.idx for key in path)


def _tree(leaves: dict[Path, Any]) -> Any:
  """Builds a tree from leaves by path: dicts for names, lists for indices."""
  if () in leaves:
    return leaves[()]
  children: dict[str | int, dict[Path, Any]] = {}
  for path, leaf in leaves.items():
    children.setdefault(path[0], {})[path[1:]] = leaf
  trees = {key: _tree(child) for key, child in children.items()}
  if all(isinstance(key, int) for key in trees):
    return [trees[index] for index in range(len(trees))]
  return trees
