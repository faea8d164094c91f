"""Records between the driver of a cluster and its workers: frozen, without JAX arrays.

    driver --ChunkOrder--> worker --ChunkResult--> driver        WorkerReport when a worker joins

All are picklable. Late or duplicate records are harmless: each order has a unique chunk number,
which its result repeats.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import hashlib
from typing import Any, NamedTuple, Protocol, runtime_checkable

from seerjax.kv.manifest import KVManifest
from seerjax.kv.pool import Store
from seerjax.types import Completion, Request

# Path of a tensor in the tree of weights: keys of dicts, indices of lists.
Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextDelta:
  """New tokens of a request that runs on another worker.

  Attributes:
    request_id: the request; its group and prompt are those of the order that contains this record.
    start: number of completion tokens before these.
    tokens: tokens from there on.
  """

  request_id: str
  start: int
  tokens: tuple[int, ...]


class Gone(NamedTuple):
  """A request that a worker no longer needs.

  Attributes:
    request_id: the request.
    is_over: whether it is finished; otherwise another worker runs it, and may read its pages from
      the store.
  """

  request_id: str
  is_over: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkOrder:
  """Order to run a chunk.

  Attributes:
    chunk: number of the chunk, unique within its rollout.
    request: request of the chunk.
    resume_from: completion so far; None before the first chunk.
    max_tokens: maximum tokens of the chunk.
    instance: index of the worker's instance to run it.
    kv: pages that the previous worker exported; None if it exported nothing or is the same worker.
    texts: completions of siblings on other workers, for drafts.
    exports: whether to export the pages at the chunk's end for other workers; False if there are
      none.
  """

  chunk: int
  request: Request
  resume_from: Completion | None
  max_tokens: int
  instance: int = 0
  kv: KVManifest | None = None
  texts: tuple[TextDelta, ...] = ()
  exports: bool = True

  @property
  def start(self) -> int:
    """Number of completion tokens before the chunk."""
    return 0 if self.resume_from is None else len(self.resume_from.tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkResult:
  """Result of an order.

  Attributes:
    chunk: number of the order.
    completion: the whole completion so far; finished if it has a finish_reason.
    busy_seconds: time since the worker received the order.
    kv: location of the pages in the shared store; None without a store and for a finished
      completion.
    drafted_tokens: draft tokens verified by the worker since its last result, for any request.
    accepted_tokens: how many of these were accepted.
  """

  chunk: int
  completion: Completion
  busy_seconds: float
  kv: KVManifest | None = None
  drafted_tokens: int = 0
  accepted_tokens: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerReport:
  """Description and state of a worker.

  Attributes:
    name: name for display; need not be unique.
    fingerprint: numerics fingerprint, `numerics.fingerprint`.
    identity: digest of numerics, model and page layout (`kv.values.Identity.fingerprint`).
    weights: digest of the current weights.
    policy_version: version of the current weights.
    key: sampling key, as hexadecimal digits.
    page_size: positions of a page.
    num_pages: usable pages of each instance.
    max_running: maximum simultaneous chunks of each instance.
    data_parallel_size: instances of its mesh.
    free_pages: free pages by instance.
    counters: counters of its engine by name; those of a tier as "tier.name".
  """

  name: str
  fingerprint: Mapping[str, str]
  identity: str
  weights: str
  policy_version: int
  key: str
  page_size: int
  num_pages: int
  max_running: int
  data_parallel_size: int
  free_pages: tuple[int, ...]
  counters: Mapping[str, float]


# Weights.


@runtime_checkable
class Piece(Protocol):
  """Bytes stored somewhere until a worker reads them; picklable."""

  def read(self, store: Store | None) -> Any:
    """Returns the bytes, as an object that supports the buffer protocol.

    Args:
      store: KV store of the reading process.

    Raises:
      ConnectionError: if the bytes are missing.
    """
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorRef:
  """Location of a tensor of published weights.

  Attributes:
    path: path in the tree of weights.
    shape: shape.
    dtype: name of the dtype.
    sha256: SHA-256 of its bytes, as hexadecimal digits.
    pieces: pieces of its bytes, in order.
  """

  path: Path
  shape: tuple[int, ...]
  dtype: str
  sha256: str
  pieces: tuple[Piece, ...]

  @property
  def name(self) -> str:
    """The path as text, for display."""
    return "/".join(map(str, self.path))


@dataclasses.dataclass(frozen=True)
class WeightsRef:
  """Locations and digests of all tensors of published weights.

  Attributes:
    tensors: ordered by path.
  """

  tensors: tuple[TensorRef, ...]

  @functools.cached_property
  def digest(self) -> str:
    """SHA-256 of every tensor's path, shape, dtype and SHA-256."""
    parts = [(one.path, one.shape, one.dtype, one.sha256) for one in self.tensors]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


# Fields that must be equal for all workers of a rollout, and the remedy for a difference.
SHARED = {
  "fingerprint": "run it with the numerics, JAX version and device kind of the other workers",
  "policy_version": "load the weights of the other workers (Engine.update_weights)",
  "weights": "load the weights of the other workers (Engine.update_weights)",
  "key": "create its engine with the run's key",
  "page_size": "set EngineConfig.page_size as in the other workers",
  "identity": "use the model and the model axis of the other workers",
}


def difference(expected: WorkerReport, found: WorkerReport) -> str:
  """Returns a message on the first field of `SHARED` that differs; "" if none does."""
  for field, fix in SHARED.items():
    was, now = getattr(expected, field), getattr(found, field)
    if field == "fingerprint":  # Show only the entries that differ, without the digest.
      names = {name for name in {*was, *now} - {"digest"} if was.get(name) != now.get(name)}
      was, now = ({name: one.get(name) for name in sorted(names)} for one in (was, now))
    if was != now:
      return f"{field}: got {now!r}, expected {was!r}; {fix}."
  return ""


# Events for the driver.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Joined:
  """A worker is ready and has no requests.

  Attributes:
    worker: number of the worker.
    report: its description.
  """

  worker: int
  report: WorkerReport


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answered:
  """A worker has returned from `Worker.run`.

  Attributes:
    worker: number of the worker.
    results: results of the ended chunks.
  """

  worker: int
  results: tuple[ChunkResult, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lost:
  """A worker died, failed, or timed out.

  Attributes:
    worker: number of the worker.
    reason: reason for display.
  """

  worker: int
  reason: str


Event = Joined | Answered | Lost
