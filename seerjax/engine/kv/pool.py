"""Where keys and values go when they leave a device: pinned host memory, then a store.

    device pages -> a peer's free pages -> pinned host -> store -> and back

The engine spills a request between two of its chunks and brings it back before the next one. Here
lie the requests that are off the devices, whole, each under its id. A request is dropped the moment
it ends; one that lives is never dropped to make room: when a tier is full, `has_room` says so, and
whoever wanted the room waits.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
import dataclasses
import time
from typing import Any, NamedTuple, Protocol, runtime_checkable
import zlib

from absl import logging
import jax
import numpy as np

from seerjax.array_typing import Array
from seerjax.engine.counters import TierCounters


@runtime_checkable
class Store(Protocol):
  """The last tier: bytes by key, outside of this process's memory."""

  def put(self, key: str, data: bytes) -> bool:
    """Keeps `data`; False if there is no room for it now."""
    ...

  def get(self, key: str) -> bytes | None:
    """Returns what was put; None if it is not there, or no longer."""
    ...

  def remove(self, key: str) -> None:
    """Forgets a key at once; an unknown one is no error."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVPoolConfig:
  """Sizes of the tiers. None of them changes a bit of what is sampled.

  Attributes:
    host_pages: pages of all requests together in pinned host memory.
    disk: directory of the store on a local disk; "" is none.
    mooncake: "host:port" of a Mooncake master whose cluster is the store; "" is none.
    store_bytes: of the disk that may be used, or of memory lent to the cluster.
  """

  host_pages: int = 4096
  disk: str = ""
  mooncake: str = ""
  store_bytes: int = 2**32

  def __post_init__(self):
    if self.host_pages < 0:
      raise ValueError(
        f"KVPoolConfig: got host_pages={self.host_pages}, expected at least 0; 0 leaves the peers'"
        " free pages alone."
      )
    if self.disk and self.mooncake:
      raise ValueError(
        f"KVPoolConfig: got disk={self.disk!r} and mooncake={self.mooncake!r}, expected one store"
        " at most; leave one out."
      )
    if self.store_bytes < 0:
      raise ValueError(
        f"KVPoolConfig: got store_bytes={self.store_bytes}, expected at least 0; say how much the"
        " store may hold."
      )


class _Held(NamedTuple):
  """A request in pinned host memory: what `PageMoves.take_off` gave, round by round."""

  num_pages: int
  num_bytes: int
  rounds: list[list[list[Array]]]


class _Stored(NamedTuple):
  """A request in the store: how its bytes are to be read, and their CRC-32."""

  num_pages: int
  num_bytes: int
  check: int
  shapes: list[list[list[tuple[tuple[int, ...], Any]]]]


class KVPool:
  """Requests off the devices. Pages are counted, because pages are what instances run out of."""

  def __init__(self, config: KVPoolConfig = KVPoolConfig(), store: Store | None = None):
    self.config = config
    self.host = TierCounters()
    self.store = TierCounters()
    self._store = store
    # Oldest first: that is who goes on to the store.
    self._held: collections.OrderedDict[str, _Held] = collections.OrderedDict()
    self._stored: dict[str, _Stored] = {}
    self._host_pages = 0

  def __contains__(self, request_id: str) -> bool:
    return request_id in self._held or request_id in self._stored

  @property
  def free_host_pages(self) -> int:
    """Pages that pinned host memory could still take."""
    return self.config.host_pages - self._host_pages

  @property
  def num_host_pages(self) -> int:
    """Pages in pinned host memory."""
    return self._host_pages

  def make_room(self, num_pages: int) -> bool:
    """Returns whether pinned host memory has room, after sending the oldest on to the store."""
    while self.free_host_pages < num_pages:
      if self._store is None or not self._held or not self._send_on(next(iter(self._held))):
        return False
    return True

  def put(self, request_id: str, num_pages: int, rounds: list[list[list[Array]]]) -> None:
    """Keeps a request's pages, for which `make_room` has found room."""
    assert request_id not in self and num_pages <= self.free_host_pages, request_id
    num_bytes = sum(part.nbytes for leaves in rounds for leaf in leaves for part in leaf)
    self._held[request_id] = _Held(num_pages, num_bytes, rounds)
    self._host_pages += num_pages
    self.host.bytes_in += num_bytes
    self.host.requests_in += 1

  def take(self, request_id: str) -> list[list[list[Any]]] | None:
    """Returns a request's pages, round by round, and forgets them; None if the store lost them.

    Raises:
      KeyError: if it is not here.
    """
    if request_id in self._held:
      held = self._held.pop(request_id)
      self._host_pages -= held.num_pages
      self.host.bytes_out += held.num_bytes
      self.host.requests_out += 1
      return held.rounds
    stored = self._stored.pop(request_id)
    begin = time.monotonic()
    assert self._store is not None
    data = self._asked("get", None, lambda store: store.get(request_id))
    self._asked("remove", None, lambda store: store.remove(request_id))
    self.store.seconds_stalled += time.monotonic() - begin
    if data is None or zlib.crc32(data) != stored.check:
      self.store.requests_lost += 1
      return None
    self.store.bytes_out += stored.num_bytes
    self.store.requests_out += 1
    return _unpacked(data, stored.shapes)

  def drop(self, request_id: str) -> None:
    """Forgets a request, wherever it is; one that is not here is no error."""
    if request_id in self._held:
      self._host_pages -= self._held.pop(request_id).num_pages
    elif request_id in self._stored:
      del self._stored[request_id]
      self._asked("remove", None, lambda store: store.remove(request_id))

  def clear(self) -> None:
    """Forgets every request: the weights changed."""
    for request_id in [*self._held, *self._stored]:
      self.drop(request_id)

  def _asked(self, what: str, otherwise: Any, ask: Callable[[Store], Any]) -> Any:
    """Returns what the store answers; where it fails, `otherwise`, as one that lost what it had."""
    assert self._store is not None
    try:
      return ask(self._store)
    except Exception as error:
      self.store.failures += 1
      if self.store.failures == 1:
        logging.warning(
          "KVPool.store: got %s (%s) from %s.%s, expected an answer; its keys are computed again,"
          " to the same bits: mend the store, further failures are only counted.",
          type(error).__name__, error, type(self._store).__name__, what,
        )  # fmt: skip
      return otherwise

  def _send_on(self, request_id: str) -> bool:
    """Moves a request from host memory to the store; False if that is full."""
    assert self._store is not None
    held = self._held[request_id]
    begin = time.monotonic()
    arrays = jax.tree.map(np.asarray, held.rounds)
    data = b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in jax.tree.leaves(arrays))
    is_kept = self._asked("put", False, lambda store: store.put(request_id, data))
    self.store.seconds_stalled += time.monotonic() - begin
    if not is_kept:
      return False
    del self._held[request_id]
    self._host_pages -= held.num_pages
    shapes = jax.tree.map(lambda array: (array.shape, array.dtype), arrays)
    self._stored[request_id] = _Stored(
      held.num_pages, held.num_bytes, zlib.crc32(data), shapes
    )
    self.store.bytes_in += held.num_bytes
    self.store.requests_in += 1
    return True


def _unpacked(data: bytes, shapes: list[list[list[tuple[tuple[int, ...], Any]]]]) -> Any:
  offset = 0

  def read(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    nonlocal offset
    count = int(np.prod(shape))
    array = np.frombuffer(data, dtype, count, offset).reshape(shape)
    offset += array.nbytes
    return array

  return [[[read(*part) for part in leaf] for leaf in leaves] for leaves in shapes]
