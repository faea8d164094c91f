"""What goes between the driver of a cluster and its workers: frozen, and without a JAX array.

    driver --ChunkOrder--> worker --ChunkResult--> driver        WorkerReport when a worker joins

Any of them may be pickled and sent to another process. One that comes late or twice does no harm:
an order names its chunk by a number that no other order has, and its result names it again.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import hashlib
from typing import Any, NamedTuple, Protocol, runtime_checkable

from seerjax.engine.kv.manifest import KVManifest
from seerjax.engine.kv.pool import Store
from seerjax.types import Completion, Request

# Of a tensor in the tree of weights: names in dicts, places in lists.
Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextDelta:
  """What a worker lacks of the answer of a request that runs elsewhere.

  Attributes:
    request_id: of the request, whose group and prompt are those of the order that brings this.
    start: tokens of the answer before these.
    tokens: from there on.
  """

  request_id: str
  start: int
  tokens: tuple[int, ...]


class Gone(NamedTuple):
  """A request that a worker has known and need not any more.

  Attributes:
    request_id: of it.
    is_over: whether its answer is whole; else another worker runs it, and may ask the store for its
      pages.
  """

  request_id: str
  is_over: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkOrder:
  """Run this chunk.

  Attributes:
    chunk: number of the chunk, unlike that of any other order of its rollout.
    request: whose chunk it is.
    resume_from: the answer so far, None before the first chunk.
    max_tokens: most tokens of the chunk.
    instance: of the worker's own, that runs it.
    kv: what the worker before it has exported of the request's pages, None if it exported nothing
      or is the same.
    texts: what its siblings have answered elsewhere, for drafts.
    exports: whether its pages are put at the chunk's end where another worker finds them; not where
      there is no other.
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
    """Tokens of the answer before the chunk."""
    return 0 if self.resume_from is None else len(self.resume_from.tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkResult:
  """What came of an order.

  Attributes:
    chunk: number of the order.
    completion: the whole answer so far; it is over if it has a finish_reason.
    busy_seconds: of the worker, from the moment it took the order.
    kv: where its pages lie in the store that workers share; None without one, and of an answer that
      is over.
    drafted_tokens: that the worker has had verified since the result before, of any request.
    accepted_tokens: of those.
  """

  chunk: int
  completion: Completion
  busy_seconds: float
  kv: KVManifest | None = None
  drafted_tokens: int = 0
  accepted_tokens: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerReport:
  """What a worker is, and what it has done.

  Attributes:
    name: for people; workers may share one.
    fingerprint: of its numerics, `numerics.fingerprint`.
    identity: digest of numerics, model and layout of pages (`kv.values.Identity.fingerprint`).
    weights: digest of the weights that it runs.
    policy_version: of those.
    key: of its sampling, as hexadecimal digits.
    page_size: positions of a page.
    num_pages: that one of its instances can give out.
    max_running: most chunks at once of one instance.
    num_instances: of its mesh.
    free_pages: by instance, those that nothing holds now.
    counters: of its engine, by name; those of a tier as "tier.name".
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
  num_instances: int
  free_pages: tuple[int, ...]
  counters: Mapping[str, float]


# Weights.


@runtime_checkable
class Piece(Protocol):
  """Bytes that lie somewhere until a worker reads them; it may be pickled."""

  def read(self, store: Store | None) -> Any:
    """Returns the bytes, as something that has a buffer of them.

    Args:
      store: of the process that reads.

    Raises:
      ConnectionError: if they are not there.
    """
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorRef:
  """Where a tensor of published weights lies.

  Attributes:
    path: in the tree of weights.
    shape: of it.
    dtype: of it, by name.
    sha256: of its bytes, as hexadecimal digits.
    pieces: of its bytes, in order.
  """

  path: Path
  shape: tuple[int, ...]
  dtype: str
  sha256: str
  pieces: tuple[Piece, ...]

  @property
  def name(self) -> str:
    """The path, for people."""
    return "/".join(map(str, self.path))


@dataclasses.dataclass(frozen=True)
class WeightsRef:
  """Where all tensors of published weights lie, and what they are.

  Attributes:
    tensors: in the order of their paths.
  """

  tensors: tuple[TensorRef, ...]

  @functools.cached_property
  def digest(self) -> str:
    """SHA-256 of every tensor's path, shape, dtype and SHA-256."""
    parts = [(one.path, one.shape, one.dtype, one.sha256) for one in self.tensors]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


# What all workers of a rollout must have in common, and what to do about one that has not.
SHARED = {
  "fingerprint": "run it with the others' numerics, version of JAX and kind of device",
  "policy_version": "give its engine the weights of the others (Engine.set_params)",
  "weights": "give its engine the weights of the others (Engine.set_params)",
  "key": "make its engine with the run's key",
  "page_size": "set EngineConfig.page_size as the others have it",
  "identity": "give it the model and the mesh's model axis of the others",
}


def difference(expected: WorkerReport, found: WorkerReport) -> str:
  """Returns the first thing in which a worker may not differ from others and does; "" if none."""
  for field, fix in SHARED.items():
    was, now = getattr(expected, field), getattr(found, field)
    if field == "fingerprint":  # What differs in it alone, and no digest of it.
      names = {name for name in {*was, *now} - {"digest"} if was.get(name) != now.get(name)}
      was, now = ({name: one.get(name) for name in sorted(names)} for one in (was, now))
    if was != now:
      return f"{field}: got {now!r}, expected {was!r}; {fix}."
  return ""


# What a driver hears of its workers.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Joined:
  """A worker is there, and holds no request.

  Attributes:
    worker: number of it.
    report: what it is.
  """

  worker: int
  report: WorkerReport


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answered:
  """A worker has come back from `Worker.run`.

  Attributes:
    worker: number of it.
    results: of the chunks that ended.
  """

  worker: int
  results: tuple[ChunkResult, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lost:
  """A worker died, failed, or has not answered in time.

  Attributes:
    worker: number of it.
    reason: for people.
  """

  worker: int
  reason: str


Event = Joined | Answered | Lost
