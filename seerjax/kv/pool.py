"""KV pool: tiers for keys and values that left a device: pinned host memory, then a store.

    device pages -> a peer's free pages -> pinned host -> store -> and back

The engine spills a request between two of its chunks and restores it before the next one. The pool
holds the requests that are off the devices, whole, each under its id. When a request ends, it is
dropped together with what this process stored of it. A live request is never dropped to make room:
when a tier is full, `make_room` returns False, and the caller waits.

In the store, values have content-derived keys (`values`), so that another process with the same
weights finds them: `claim` looks up a request that was started by another process. `export`
stores a copy while the request stays where it is, and describes it for an engine that claims it.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
import dataclasses
import functools
import time
from typing import Any, NamedTuple, Protocol, runtime_checkable

from absl import logging
import jax
import numpy as np

from seerjax import fields, parallel
from seerjax.array_typing import Array
from seerjax.kv import values
from seerjax.kv.counters import ImportCounters, TierCounters
from seerjax.kv.manifest import KVManifest, Part
from seerjax.kv.owner import BASE, Owner
from seerjax.kv.values import Identity

# Steps for which a value that this process stored stays after none of its own requests needs it, so
# that another process may read it: longer than a restart from a journal takes. It is removed
# earlier if its room is needed.
PIN_STEPS = 1024
# After MOST_FAILURES consecutive failures, the store is not called for PAUSE_STEPS steps: a failing
# call may take seconds (dead cluster master), and recomputing the stored values takes less.
MOST_FAILURES = 2
PAUSE_STEPS = 1024


@runtime_checkable
class Store(Protocol):
  """The last tier: bytes by key, outside of this process's memory, shared by processes.

  Keys are content-derived (`values.Identity.key`), so two processes that put values under one key
  put equal values. A process removes only what it has put itself.
  """

  def put(self, key: str, data: bytes) -> bool:
    """Stores `data`; returns False if there is no room for it now."""
    ...

  def has(self, key: str) -> bool:
    """Returns whether any process has put a value under `key`."""
    ...

  def get(self, key: str) -> bytes | None:
    """Returns the value that any process put; None if there is none, or no longer."""
    ...

  def remove(self, key: str) -> None:
    """Removes a value that this process put, at once; any other key is ignored."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVPoolConfig:
  """Sizes of the KV pool's tiers. None of them changes a bit of a response.

  Attributes:
    host_pages: capacity of pinned host memory in pages, over all requests.
    disk: directory of the store on a local disk, which processes may share; "" is none.
    mooncake: "host:port" of the master of a Mooncake cluster as the store; "" is none.
    store_bytes: capacity of the disk store, or memory lent to the Mooncake cluster, in bytes.
    mooncake_host: address at which the cluster's other processes reach this one.
    mooncake_replicas: number of cluster processes that store each value. One suffices for correct
      results: a lost value is computed again.
  """

  host_pages: int = 4096
  disk: str = ""
  mooncake: str = ""
  store_bytes: int = 2**32
  mooncake_host: str = "127.0.0.1"
  mooncake_replicas: int = 1

  def __post_init__(self):
    fields.check(
      self,
      host_pages=fields.at_least(0, "0 keeps no KV in host memory"),
      store_bytes=fields.at_least(0, "set it to the size that the store may reach"),
      mooncake_host=fields.Rule("an address", bool, "leave it out on one machine"),
      mooncake_replicas=fields.at_least(1, "leave it out on one machine"),
    )
    if self.disk and self.mooncake:
      raise ValueError(
        f"KVPoolConfig: got disk={self.disk!r} and mooncake={self.mooncake!r}, expected at most one"
        " store; leave one out."
      )


class _Held(NamedTuple):
  """A request in pinned host memory, as `PageMoves.take_off` returned it, by round."""

  num_pages: int
  num_bytes: int
  rounds: list[list[list[Array]]]
  tokens: tuple[int, ...]
  owner: Owner


def config_of(config: KVPoolConfig, mesh: jax.sharding.Mesh) -> KVPoolConfig:
  """Returns the usable tiers; host memory is excluded on multi-process meshes.

  Host memory of one process could not be restored to another process's devices. There, pages that
  do not fit on a device are computed again.

  Raises:
    NotImplementedError: if a store is configured on a multi-process mesh.
  """
  if not parallel.spans_processes(mesh):
    return config
  if config.disk or config.mooncake:
    raise NotImplementedError(
      f"KVPoolConfig: got disk={config.disk!r} and mooncake={config.mooncake!r} on a mesh of"
      " several processes, expected neither (a process sees only the pages of its own devices);"
      " leave them out, or run one process."
    )
  return dataclasses.replace(config, host_pages=0)


class KVPool:
  """Requests off the devices. Capacity is counted in pages, the unit that instances run out of."""

  @fields.checked
  def __init__(self, config: KVPoolConfig = KVPoolConfig(), store: Store | None = None):
    self.config = config
    self.host = TierCounters()
    self.store = TierCounters()
    self.imports = ImportCounters()
    self._store = store
    self._identity: Callable[[Owner], Identity] | None = None
    # Oldest first; the oldest is sent on to the store first.
    self._held: collections.OrderedDict[str, _Held] = collections.OrderedDict()
    self._stored: dict[str, tuple[str, Owner]] = {}  # Keys in the store and owners, by request.
    self._needed: collections.Counter[str] = collections.Counter()  # Requests, by key.
    # Keys that this process put and has not removed, and the arrays of their values.
    self._own: dict[str, tuple[Part, ...]] = {}
    self._exported: dict[str, str] = {}  # Keys, by request that was exported last under them.
    self._left: dict[str, str] = {}  # Keys of `_unneeded`, by request that may resume elsewhere.
    self._expected: dict[str, KVManifest] = {}  # By request that was claimed with a manifest.
    # Keys of `_own` that no request needs, and the step at which that began, oldest first.
    self._unneeded: collections.OrderedDict[str, int] = collections.OrderedDict()
    self._step = 0
    self._failures_in_a_row = 0
    self._asks_from = 0  # The store is not called before this step.
    self._host_pages = 0

  def __contains__(self, request_id: str) -> bool:
    return request_id in self._held or request_id in self._stored

  @property
  def last_tier(self) -> Store | None:
    """The store, None if there is none."""
    return self._store

  @property
  def free_host_pages(self) -> int:
    """Number of free pages in pinned host memory."""
    return self.config.host_pages - self._host_pages

  @property
  def num_host_pages(self) -> int:
    """Number of used pages in pinned host memory."""
    return self._host_pages

  def identify(self, identity: Callable[[Owner], Identity]) -> None:
    """Sets the weights identity under which KV blocks are stored from now on.

    Args:
      identity: maps an owner to an identity. It is called once per owner, when a request of the
        owner first reads or writes the store, because the digest of the weights takes time.
    """
    self._identity = functools.cache(identity)

  def advance(self) -> None:
    """Counts a step; removes values of this process `PIN_STEPS` after they were last needed."""
    self._step += 1
    while self._unneeded and next(iter(self._unneeded.values())) + PIN_STEPS <= self._step:
      self._remove(next(iter(self._unneeded)))
      self._left = {name: key for name, key in self._left.items() if key in self._unneeded}

  def make_room(self, num_pages: int) -> bool:
    """Returns whether host memory has room, after moving the oldest requests to the store."""
    while self.free_host_pages < num_pages:
      if self._store is None or not self._held or not self._send_on(next(iter(self._held))):
        return False
    return True

  def put(
    self,
    request_id: str,
    num_pages: int,
    rounds: list[list[list[Array]]],
    tokens: Sequence[int],
    owner: Owner = BASE,
  ) -> None:
    """Stores a request's pages, which hold `tokens`; requires room from `make_room`."""
    assert request_id not in self and num_pages <= self.free_host_pages, request_id
    num_bytes = sum(part.nbytes for leaves in rounds for leaf in leaves for part in leaf)
    self._held[request_id] = _Held(num_pages, num_bytes, rounds, tuple(tokens), owner)
    self._host_pages += num_pages
    self.host.bytes_in += num_bytes
    self.host.requests_in += 1

  def claim(
    self,
    request_id: str,
    tokens: Sequence[int],
    owner: Owner = BASE,
    manifest: KVManifest | None = None,
  ) -> bool:
    """Returns whether the store has the pages of `tokens`; the request can then `take` them.

    Args:
      request_id: request that continues here a response that began elsewhere.
      tokens: tokens of the keys and values in the pages.
      owner: owner of the request.
      manifest: manifest of the exporting engine; hits and misses are counted in `imports`.
    """
    if self._store is None or request_id in self:
      self.imports.gone += manifest is not None
      return False
    identity = self.identity_of(owner)
    key = identity.key(tokens)
    if manifest is not None and not _is_of(manifest, identity, key):
      self.imports.stale += 1
      logging.info(
        "KVPool.claim of %r: got pages of weights %s, numerics %s, key %s; expected %s, %s, %s;"
        " they are recomputed.", request_id, manifest.weights_digest, manifest.numerics_digest,
        manifest.key, identity.weights, identity.fingerprint, key,
      )  # fmt: skip
      return False
    if not self._asked("has", False, lambda store: store.has(key)):
      self._miss(manifest, "gone", request_id)
      return False
    if manifest is not None:
      self._expected[request_id] = manifest
    self._need(request_id, key, owner)
    return True

  def export(
    self,
    request_id: str,
    tokens: Sequence[int],
    rounds: list[list[list[Array]]] | None,
    owner: Owner = BASE,
  ) -> tuple[str, tuple[Part, ...]] | None:
    """Puts a copy of a request's pages into the store; the request stays where it is.

    The request's previous export is removed, unless another request needs it.

    Args:
      request_id: the request.
      tokens: tokens of the keys and values in the pages.
      rounds: as in `put`; None if the request is off the devices.
      owner: owner of the request.

    Returns:
      The store key and the value's arrays; None if there is no store, or no room in it.
    """
    if self._store is None:
      return None
    key = self.identity_of(owner).key(tokens)
    if key not in self._own:
      if rounds is None:
        held = self._held.get(request_id)
        if held is None:  # Another process put it.
          expected = self._expected.get(request_id)
          return None if expected is None else (key, expected.parts)
        rounds = held.rounds
      if not self._keep(key, rounds, owner):
        return None
    self._needed[key] += 1
    self._unneeded.pop(key, None)
    before = self._exported.pop(request_id, None)
    self._exported[request_id] = key
    if before is not None:
      self._need_less(before)
      self._left[request_id] = before
    self._remove_left(request_id)  # It was replaced: no manifest in use names it any more.
    self.imports.exported += 1
    return key, self._own[key]

  def take(self, request_id: str) -> list[list[list[Any]]] | None:
    """Removes a request and returns its pages by round; None if the store lost them.

    Raises:
      KeyError: if the request is not in the pool.
    """
    if request_id in self._held:
      held = self._held.pop(request_id)
      self._host_pages -= held.num_pages
      self.host.bytes_out += held.num_bytes
      self.host.requests_out += 1
      return held.rounds
    key, owner = self._stored[request_id]
    begin = time.monotonic()
    data = self._asked("get", None, lambda store: store.get(key))
    rounds = None if data is None else values.unpacked(data, self.identity_of(owner))
    expected = self._expected.pop(request_id, None)
    if expected is not None:
      if rounds is not None and values.parts_of(rounds) != expected.parts:
        rounds = None
      if rounds is None:
        self._miss(expected, "gone" if data is None else "damaged", request_id)
      else:
        self.imports.adopted += 1
    self._let_go(request_id)
    self.store.seconds_stalled += time.monotonic() - begin
    if data is None or rounds is None:
      self.store.requests_lost += 1
      if key in self._unneeded:  # So that the next spill writes it again.
        self._remove(key)
      return None
    self.store.bytes_out += len(data)
    self.store.requests_out += 1
    return rounds

  def drop(self, request_id: str) -> None:
    """Drops a request from any tier; an unknown request is no error."""
    if request_id in self._held:
      self._host_pages -= self._held.pop(request_id).num_pages
    elif request_id in self._stored:
      self._let_go(request_id)
    self._expected.pop(request_id, None)
    if request_id in self._exported:
      self._left[request_id] = self._exported.pop(request_id)
      self._need_less(self._left[request_id])

  def end(self, request_id: str) -> None:
    """Drops a request that ended, here or elsewhere, and removes its pages that are stored here."""
    self.drop(request_id)
    self._remove_left(request_id)

  def clear(self) -> None:
    """Drops all requests and the pages that this process stored, because the weights changed."""
    for request_id in [*self._held, *self._stored, *self._exported]:
      self.drop(request_id)
    self._left.clear()
    for key in list(self._unneeded):
      self._remove(key)

  def identity_of(self, owner: Owner = BASE) -> Identity:
    """Returns the identity of an owner's values; the first call per owner reads all the weights."""
    assert self._identity is not None, "KVPool.identify comes first"
    return self._identity(owner)

  def _need(self, request_id: str, key: str, owner: Owner) -> None:
    self._stored[request_id] = key, owner
    self._needed[key] += 1
    self._unneeded.pop(key, None)

  def _let_go(self, request_id: str) -> None:
    """Unlinks a request from its key; the value stays for a while, for other processes."""
    key, _ = self._stored.pop(request_id)
    self._need_less(key)
    self._left.setdefault(request_id, key)

  def _need_less(self, key: str) -> None:
    self._needed[key] -= 1
    if not self._needed[key]:
      del self._needed[key]
      if key in self._own:
        self._unneeded[key] = self._step

  def _remove_left(self, request_id: str) -> None:
    """Removes the remaining value of a request, unless another request needs it."""
    key = self._left.pop(request_id, None)
    if key in self._unneeded:
      self._remove(key)

  def _remove(self, key: str) -> None:
    """Removes a value of this process that no request needs."""
    del self._unneeded[key]
    self._own.pop(key, None)
    self._asked("remove", None, lambda store: store.remove(key))

  def _asked(self, what: str, otherwise: Any, ask: Callable[[Store], Any]) -> Any:
    """Returns the result of a store call; `otherwise` if it fails, like a store that lost data."""
    assert self._store is not None
    if self._step < self._asks_from:
      return otherwise
    try:
      found = ask(self._store)
      self._failures_in_a_row = 0
      return found
    except Exception as error:
      self.store.failures += 1
      self._failures_in_a_row += 1
      if self._failures_in_a_row >= MOST_FAILURES:
        self._asks_from = self._step + PAUSE_STEPS
      if self.store.failures == 1:
        logging.warning(
          "KVPool.store: got %s (%s) from %s.%s, expected a result; the KV is recomputed with the"
          " same bits: fix the store. Further failures are only counted; after several in a row,"
          " the store is skipped for a while.",
          type(error).__name__, error, type(self._store).__name__, what,
        )  # fmt: skip
      return otherwise

  def _send_on(self, request_id: str) -> bool:
    """Moves a request from host memory to the store; returns False if the store is full."""
    held = self._held[request_id]
    key = self.identity_of(held.owner).key(held.tokens)
    if key not in self._own and not self._keep(key, held.rounds, held.owner):
      return False
    self._need(request_id, key, held.owner)
    del self._held[request_id]
    self._host_pages -= held.num_pages
    self.store.requests_in += 1
    return True

  def _keep(self, key: str, rounds: list[list[list[Array]]], owner: Owner) -> bool:
    """Puts a value, evicting values that no request needs; returns False if the store is full."""
    begin = time.monotonic()
    arrays = jax.tree.map(np.asarray, rounds)
    data = values.packed(arrays, self.identity_of(owner))
    put = lambda store: store.put(key, data)
    is_there = self._asked("put", None, put)  # None on failure: evicting would not help then.
    while is_there is False and self._unneeded:
      self._remove(next(iter(self._unneeded)))
      is_there = self._asked("put", None, put)
    if is_there:
      self._own[key] = values.parts_of(arrays)
      self.store.bytes_in += len(data)
    self.store.seconds_stalled += time.monotonic() - begin
    return bool(is_there)

  def _miss(self, manifest: KVManifest | None, how: str, request_id: str) -> None:
    """Counts exported pages that could not be imported."""
    if manifest is None:
      return
    self.imports.gone += how == "gone"
    self.imports.damaged += how == "damaged"
    logging.info(
      "KVPool: got %s pages of %r (key %s), expected the exported pages; they are recomputed with"
      " the same bits.", how, request_id, manifest.key,
    )  # fmt: skip


def _is_of(manifest: KVManifest, identity: Identity, key: str) -> bool:
  """Returns whether a manifest has this identity and this key."""
  theirs = manifest.weights_digest, manifest.numerics_digest, manifest.key
  return theirs == (identity.weights, identity.fingerprint, key)


def usual(mesh: jax.sharding.Mesh) -> KVPool:
  """Returns a pool of the default tiers that are usable on a mesh."""
  return KVPool(config_of(KVPoolConfig(), mesh))
