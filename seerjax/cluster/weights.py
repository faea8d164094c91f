"""Weights on their way from the trainer to the workers: tensor by tensor, each with its SHA-256.

    compute_params -> pieces of publish_bytes -> where they lie -> a worker's tensor -> its engine
          SHA-256 of each tensor ---------------- compared with ----^ what lies on its devices

A piece is read by whichever process has its description: one that is `Held` goes along with it, one
`InStore` lies in the store of pages, and Ray's are `ray_workers.InRay`. Trainer and worker have one
piece in memory beside the weights, and where devices have memory of their own, a tensor.
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
from seerjax.engine.kv.pool import Store
from seerjax.models import parameters


@dataclasses.dataclass(frozen=True)
class Held:
  """A piece that is sent along with its description."""

  data: bytes

  def read(self, store: Store | None) -> bytes:
    """Does `Piece.read`."""
    return self.data


@dataclasses.dataclass(frozen=True)
class InStore:
  """A piece that lies in the store of pages, under the key of its content."""

  key: str

  def read(self, store: Store | None) -> bytes:
    """Does `Piece.read`."""
    found = None if store is None else store.get(self.key)
    if found is None:
      where = "no store" if store is None else f"nothing of the key {self.key!r} in its store"
      raise ConnectionError(
        f"Worker.load: got {where}, expected the trainer's weights there; give all workers the"
        " trainer's store (KVPoolConfig), and keep weights there until all have loaded them."
      )
    return found


class StoreDoor:
  """Puts pieces into a store, and takes out those of weights that were replaced."""

  def __init__(self, store: Store):
    self._store = store
    self._keys: set[str] = set()

  def put(self, data: bytes) -> InStore:
    """Keeps a piece.

    Raises:
      ConnectionError: if the store has no room for it.
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
    """Removes all pieces but those of `weights`, which all workers have loaded."""
    pieces = itertools.chain(*(tensor.pieces for tensor in weights.tensors))
    kept = {piece.key for piece in pieces if isinstance(piece, InStore)}
    for key in self._keys - kept:
      self._store.remove(key)
    self._keys &= kept


def publish(
  params: parameters.Params,
  put: Callable[[bytes], Piece],
  *,
  publish_bytes: int = parallel.PIECE_BYTES,
) -> WeightsRef:
  """Puts weights where workers can read them.

  Args:
    params: `parameters.compute_params`, of this process's devices.
    put: keeps a piece, `Workers.put` or `StoreDoor.put`.
    publish_bytes: of a piece.

  Raises:
    ValueError: if a piece is to have no byte.
  """
  if publish_bytes < 1:
    raise ValueError(
      f"weights.publish: got publish_bytes={publish_bytes}, expected at least 1; 2**26 are usual."
    )
  tensors = []
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    data = _bytes_of(leaf)
    starts = range(0, len(data), publish_bytes)
    pieces = [put(data[start : start + publish_bytes].tobytes()) for start in starts]
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
  """Returns published weights on a mesh, as `Engine.set_params` takes them.

  Args:
    weights: of `publish`.
    mesh: of the engine.
    store: of this process, for pieces that lie in one.

  Raises:
    ConnectionError: if a piece cannot be read.
    ValueError: if a tensor's bytes on the devices are not those that the trainer published.
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
  """Returns a tensor in host memory; bytes that are missing stay zero, which its digest tells."""
  whole = np.zeros(tensor.shape, jnp.dtype(tensor.dtype))
  target, start = whole.reshape(-1).view(np.uint8), 0
  for piece in tensor.pieces:
    data = np.frombuffer(piece.read(store), np.uint8)[: len(target) - start]
    target[start : start + len(data)] = data
    start += len(data)
  return whole


def _bytes_of(leaf: Any) -> np.ndarray:
  """Returns an array's bytes, u8[n], in its order; those of a CPU's array are not copied."""
  return np.ascontiguousarray(jax.device_get(leaf)).reshape(-1).view(np.uint8)


def _path(path: Any) -> Path:
  return tuple(
    key.key if isinstance(key, jax.tree_util.DictKey) else key.idx for key in path
  )


def _tree(leaves: dict[Path, Any]) -> Any:
  """Returns the tree of leaves by their paths: dicts where these have names, lists for numbers."""
  if () in leaves:
    return leaves[()]
  children: dict[str | int, dict[Path, Any]] = {}
  for path, leaf in leaves.items():
    children.setdefault(path[0], {})[path[1:]] = leaf
  trees = {key: _tree(child) for key, child in children.items()}
  if all(isinstance(key, int) for key in trees):
    return [trees[index] for index in range(len(trees))]
  return trees
