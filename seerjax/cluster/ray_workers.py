"""Cluster workers as Ray actors, each in its own process on any node of a Ray cluster.

    RayWorkers(make_worker, count=2)               Ray on this machine, started and ended with it
    RayWorkers(make_worker, count=8, address="auto")     an existing cluster (`ray start`)

Ray places the actors, transfers records and reports deaths; `driver.ClusterRollout` handles the
consequences. A lost worker is replaced by a new actor, which joins once its engine is ready. A
worker that does not reply within the timeout counts as lost; if it replies later, it joins again.
If actors are lost one after another and no chunk ends in between, the cause is probably the work or
the place, and no more are started (`Losses`).

Requires the extra `seerjax[cluster]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import importlib
import importlib.util
import math
import os
import socket
import time
from typing import Any

from absl import logging
import numpy as np

from seerjax.cluster.records import (
  Answered,
  ChunkOrder,
  ChunkResult,
  Event,
  Gone,
  Joined,
  Lost,
  Piece,
  WeightsRef,
  WorkerReport,
)
from seerjax.cluster.worker import Worker
from seerjax.kv.pool import Store
from seerjax.types import Request

# Timeout in seconds for a connection to a Ray cluster's address and for its first reply.
PATIENCE = 5.0
# The start of an HTTP/2 connection (RFC 9113, 3.4), with empty settings. Ray's control service uses
# gRPC, and so replies with its own settings, a frame of this type.
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
SETTINGS = 4


class _Actor:
  """The actor in the worker's process."""

  def __init__(self, make_worker: Callable[[int], Worker], number: int):
    self._worker = make_worker(number)

  def join(self, published: tuple[WeightsRef, int] | None) -> WorkerReport:
    if published is not None:
      self._worker.load(*published)
    return self._worker.join()

  def check(self, requests: Sequence[Request]) -> str:
    return self._worker.check(requests)

  def run(self, orders: Sequence[ChunkOrder], forget: Sequence[Gone]) -> Sequence[ChunkResult]:
    return self._worker.run(orders, forget)

  def process_id(self) -> int:
    return os.getpid()


@dataclasses.dataclass(frozen=True)
class InRay:
  """A piece of weights in Ray's object store, kept there while any process refers to it."""

  reference: Any

  def read(self, store: Store | None) -> Any:
    """Implements `Piece.read`.

    Raises:
      ConnectionError: if Ray has lost it.
    """
    ray = _library()
    try:
      return ray.get(self.reference)
    except ray.exceptions.RayError as error:
      raise ConnectionError(
        f"Worker.load: got {error} from Ray, expected a piece of the trainer's weights; check that"
        " the trainer's process is running, and publish the weights again."
      ) from error


class Losses:
  """Distinguishes occasional losses in a long run from a run in which every worker dies.

  Attributes:
    in_a_row: losses since the last chunk ended.
  """

  def __init__(self, max_failures: int):
    """Starts at zero.

    Args:
      max_failures: number of losses in a row up to which a lost worker is replaced.
    """
    self._max_failures = max_failures
    self.in_a_row = 0

  def ended(self) -> None:
    """Records that a chunk has ended, so workers do more than join."""
    self.in_a_row = 0

  def lost(self) -> bool:
    """Records a lost worker; returns whether to start a replacement."""
    self.in_a_row += 1
    return self.in_a_row <= self._max_failures


@dataclasses.dataclass
class _Call:
  """A pending call.

  Attributes:
    worker: number of the actor.
    joins: whether it is a call of `join`, else of `run`.
    deadline: by `time.monotonic`; infinity once it was reported as overdue.
  """

  worker: int
  joins: bool
  deadline: float


class RayWorkers:
  """Ray actors as the workers of `driver.ClusterRollout`.

  Attributes:
    replaced: number of actors started as replacements.
  """

  def __init__(
    self,
    make_worker: Callable[[int], Worker],
    *,
    count: int,
    address: str = "",
    patience: float = 600.0,
    max_failures: int = 16,
  ):
    """Starts the actors, which join once their engines are ready.

    Args:
      make_worker: called with a number in each actor's process; pickled by name, so its module must
        be importable there.
      count: number of actors.
      address: address of a Ray cluster, "auto" for the one on this machine; "" starts one for this
        process.
      patience: timeout of a worker's reply in seconds; a first chunk includes compilation.
      max_failures: number of lost actors in a row, without an ended chunk, that are replaced.

    Raises:
      ImportError: if Ray is not installed.
      ValueError: if `count`, `patience` or `max_failures` is out of range.
      ConnectionError: if there is no Ray cluster at the address.
    """
    if count < 1 or not patience > 0:
      raise ValueError(
        f"RayWorkers: got count={count}, patience={patience}, expected at least 1 worker and more"
        " than 0 s; for example count=2."
      )
    if max_failures < 0:
      raise ValueError(
        f"RayWorkers.max_failures: got {max_failures}, expected the number of consecutive lost"
        " actors to replace; for example 16, or 0 to replace none."
      )
    self._ray = _library()
    self._owns = not address and not self._ray.is_initialized()
    _connect(self._ray, address, count)
    self._make_worker, self._patience = make_worker, patience
    self._losses = Losses(max_failures)
    self.replaced = 0
    self._actors: dict[int, Any] = {}
    self._calls: dict[Any, _Call] = {}  # By Ray's reference of the result.
    self._joins: set[int] = set()  # Workers with a pending join.
    self._num_ever = 0
    self._published: tuple[WeightsRef, int] | None = None
    for _ in range(count):
      self._start()

  def process_ids(self) -> list[int]:
    """Returns the ids of the actors' processes, on any host; waits for their engines."""
    return self._ray.get([actor.process_id.remote() for actor in self._actors.values()])

  def put(self, data: bytes) -> Piece:
    """Implements `Workers.put`: stores in Ray's object store until no weights refer to it."""
    return InRay(self._ray.put(np.frombuffer(data, np.uint8)))

  def load(self, weights: WeightsRef, policy_version: int) -> None:
    """Implements `Workers.load`: all load at once; replies of the previous rollout are dropped."""
    self._published = weights, policy_version
    self._calls.clear()
    self._joins.clear()
    for worker in self._actors:
      self.join(worker)

  def begin(self) -> None:
    """Implements `Workers.begin`; results of the previous rollout's calls are dropped."""
    self._calls = {ref: call for ref, call in self._calls.items() if call.joins}
    for worker in self._actors:
      if worker not in self._joins:
        self.join(worker)

  def join(self, worker: int) -> None:
    """Implements `Workers.join`."""
    if worker in self._actors:
      self._joins.add(worker)
      reference = self._actors[worker].join.remote(self._published)
      self._await(worker, reference, joins=True)

  def check(self, worker: int, requests: Sequence[Request]) -> str:
    """Implements `Workers.check`."""
    return self._ray.get(self._actors[worker].check.remote(list(requests)))

  def send(self, worker: int, orders: Sequence[ChunkOrder], forget: Sequence[Gone]) -> None:
    """Implements `Workers.send`."""
    self._await(worker, self._actors[worker].run.remote(list(orders), list(forget)), joins=False)

  def events(self, *, blocks: bool) -> Sequence[Event]:
    """Implements `Workers.events`."""
    found = self._arrived(0.0)
    is_last = False
    while blocks and not found and self._calls and not is_last:
      deadline = min(call.deadline for call in self._calls.values())
      # If only overdue calls are left, wait for them once more, since they may still return.
      is_last = deadline == math.inf
      found = self._arrived(self._patience if is_last else max(0.0, deadline - time.monotonic()))
      found = found or self._overdue()
    return found

  def waits_for(self) -> str:
    """Implements `Workers.waits_for`."""
    return (
      f"{len(self._actors)} of {self._num_ever} actors are left, and none has answered in"
      f" {self._patience:g} s; {self._losses.in_a_row} were lost since the last finished chunk"
    )

  def close(self) -> None:
    """Ends the actors, and Ray if this process started it."""
    for actor in self._actors.values():
      self._ray.kill(actor)
    self._actors.clear()
    self._calls.clear()
    if self._owns:
      self._ray.shutdown()

  def _start(self) -> None:
    number = self._num_ever
    self._num_ever += 1
    # Ray hides all GPUs from an actor that requests none.
    num_gpus = min(1.0, self._ray.cluster_resources().get("GPU", 0.0))
    remote = self._ray.remote(num_cpus=1, num_gpus=num_gpus, max_restarts=0)(_Actor)
    self._actors[number] = remote.remote(self._make_worker, number)
    self.join(number)

  def _await(self, worker: int, reference: Any, *, joins: bool) -> None:
    self._calls[reference] = _Call(worker, joins, time.monotonic() + self._patience)

  def _arrived(self, seconds: float) -> list[Event]:
    if not self._calls:
      return []
    ready, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=seconds)
    if ready and len(self._calls) > 1:  # Also take other results that are ready.
      ready, _ = self._ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
    return [event for reference in ready for event in self._event(reference)]

  def _event(self, reference: Any) -> list[Event]:
    call = self._calls.pop(reference, None)
    if call is None:
      return []  # From a lost actor.
    worker = call.worker
    try:
      found = self._ray.get(reference)
    except self._ray.exceptions.RayError as error:
      return self._fail(worker, error)
    if call.joins:
      self._joins.discard(worker)
      return [Joined(worker=worker, report=found)]
    if found:
      self._losses.ended()
    return [Answered(worker=worker, results=tuple(found))]

  def _fail(self, worker: int, error: Exception) -> list[Event]:
    actor = self._actors.pop(worker, None)
    self._calls = {ref: call for ref, call in self._calls.items() if call.worker != worker}
    self._joins.discard(worker)
    if actor is not None:
      self._ray.kill(actor)  # An actor that raised is still alive and occupies resources.
      if self._losses.lost():
        self.replaced += 1
        self._start()
    reason = str(error).strip().splitlines() or [""]
    logging.info("RayWorkers: worker %d: %s", worker, error)
    return [Lost(worker=worker, reason=f"{type(error).__name__}: {reason[-1].strip()}")]

  def _overdue(self) -> list[Event]:
    now = time.monotonic()
    found: list[Event] = []
    for call in self._calls.values():
      if call.deadline <= now:
        call.deadline = math.inf
        found.append(Lost(worker=call.worker, reason=f"no answer in {self._patience:g} s"))
    return found


def is_installed() -> bool:
  """Whether the extra `seerjax[cluster]` is installed."""
  return importlib.util.find_spec("ray") is not None


def _library() -> Any:
  try:
    return importlib.import_module("ray")
  except ImportError as error:
    raise ImportError(
      f"RayWorkers: got {error}, expected Ray; install seerjax[cluster], or run in one process with"
      " LocalWorkers."
    ) from error


def _check_answers(host: str, port: int) -> None:
  """Raises if the service at an address does not behave like Ray.

  Raises:
    OSError: with what was received.
  """
  with socket.create_connection((host, port), timeout=PATIENCE) as connection:
    if os.environ.get("RAY_USE_TLS", "0") != "0":
      return  # The reply would be encrypted.
    try:
      connection.sendall(HTTP2_PREFACE)
      found = connection.recv(9)  # The frame header: length, then type.
    except TimeoutError:
      raise OSError(f"no answer in {PATIENCE:g} s") from None
  if len(found) < 4 or found[3] != SETTINGS:
    raise OSError(f"an answer that begins with {found!r}")


def _connect(ray: Any, address: str, count: int) -> None:
  if ray.is_initialized():
    return
  quiet = dict(log_to_driver=False, logging_level="ERROR")
  host, _, port = address.rpartition(":")
  try:
    if host and port.isdigit():  # Otherwise Ray itself retries for minutes.
      _check_answers(host, int(port))
    if address:
      ray.init(address=address, **quiet)
    else:
      ray.init(num_cpus=count, include_dashboard=False, **quiet)
  except Exception as error:  # Ray raises various exceptions if it does not start in time.
    raise ConnectionError(
      f"RayWorkers.address: got {error} from {address or 'a new cluster'}, expected Ray; start it"
      " with `ray start --head`, or leave the address out to use this machine alone."
    ) from error
