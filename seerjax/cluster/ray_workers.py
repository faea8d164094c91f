"""Workers of a cluster in processes of their own, anywhere that Ray reaches: one actor each.

    RayWorkers(make_worker, count=2)               Ray on this machine, started and ended with it
    RayWorkers(make_worker, count=8, address="auto")     a cluster that `ray start` has begun

Ray places the actors, carries records and says when one has died; what that means for a rollout is
`driver.ClusterRollout`'s. A worker that is lost is replaced by a new actor, which joins when its
engine stands. One that has not answered within the patience counts as lost; should it answer later,
it joins again. Where actors are lost one after another and no chunk ends between them, what kills
them is what they are asked for, or where they are, and no more are started (`Losses`).

Needs the extra `seerjax[cluster]`.
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
from seerjax.engine.kv.pool import Store
from seerjax.types import Request

# Seconds within which something has to listen at a Ray cluster's address, and answer as Ray does.
PATIENCE = 5.0
# What a client of HTTP/2 says first (RFC 9113, 3.4), with settings of its own, which are none.
# Ray's control service speaks gRPC, and so answers with settings of its own, a frame of this type.
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
SETTINGS = 4


class _Actor:
  """What lives in the other process."""

  def __init__(self, make_worker: Callable[[int], Worker], number: int):
    self._worker = make_worker(number)

  def join(self, published: tuple[WeightsRef, int] | None) -> WorkerReport:
    if published is not None:
      self._worker.load(*published)
    return self._worker.join()

  def check(self, requests: Sequence[Request]) -> str:
    return self._worker.check(requests)

  def run(
    self, orders: Sequence[ChunkOrder], forget: Sequence[Gone]
  ) -> Sequence[ChunkResult]:
    return self._worker.run(orders, forget)

  def process_id(self) -> int:
    return os.getpid()


@dataclasses.dataclass(frozen=True)
class InRay:
  """A piece of weights in Ray's object store, which lies there as long as a process names it."""

  reference: Any

  def read(self, store: Store | None) -> Any:
    """Does `Piece.read`.

    Raises:
      ConnectionError: if Ray has lost it.
    """
    ray = _library()
    try:
      return ray.get(self.reference)
    except ray.exceptions.RayError as error:
      raise ConnectionError(
        f"Worker.load: got {error} from Ray, expected a piece of the trainer's weights; is the"
        " trainer's process still there? Publish the weights again."
      ) from error


class Losses:
  """Tells a long run, which loses a worker now and then, from one in which every worker dies.

  Attributes:
    in_a_row: losses since a chunk ended last.
  """

  def __init__(self, max_failures: int):
    """Counts from nothing.

    Args:
      max_failures: losses in a row after which a lost worker is still replaced.
    """
    self._max_failures = max_failures
    self.in_a_row = 0

  def ended(self) -> None:
    """A chunk has ended: workers do not only join, they work."""
    self.in_a_row = 0

  def lost(self) -> bool:
    """A worker is lost; returns whether another one is to be started for it."""
    self.in_a_row += 1
    return self.in_a_row <= self._max_failures


@dataclasses.dataclass
class _Call:
  """A call that has not come back.

  Attributes:
    worker: number of the actor.
    joins: whether it is `join`, else `run`.
    deadline: by `time.monotonic`; infinity once the driver was told that it is overdue.
  """

  worker: int
  joins: bool
  deadline: float


class RayWorkers:
  """Actors as the workers of `driver.ClusterRollout`.

  Attributes:
    replaced: actors that were started in the place of lost ones.
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
    """Starts the actors, which join when their engines stand.

    Args:
      make_worker: called with a number in each actor's process; pickled by name, so of a module
        that is found there.
      count: of actors.
      address: of a Ray cluster, "auto" for the one of this machine; "" starts one for this process.
      patience: seconds within which a worker has to answer; a first chunk compiles its programs.
      max_failures: lost actors in a row, no chunk having ended between them, that are replaced.

    Raises:
      ImportError: if Ray is not installed.
      ValueError: if there is to be no worker, or no patience, or a negative number of failures.
      ConnectionError: if there is no Ray cluster at the address.
    """
    if count < 1 or not patience > 0:
      raise ValueError(
        f"RayWorkers: got count={count}, patience={patience}, expected one worker at least and some"
        " seconds; say count=2."
      )
    if max_failures < 0:
      raise ValueError(
        f"RayWorkers.max_failures: got {max_failures}, expected how many lost actors in a row are"
        " replaced; say max_failures=16, or 0 to replace none."
      )
    self._ray = _library()
    self._owns = not address and not self._ray.is_initialized()
    _connect(self._ray, address, count)
    self._make_worker, self._patience = make_worker, patience
    self._losses = Losses(max_failures)
    self.replaced = 0
    self._actors: dict[int, Any] = {}
    self._calls: dict[Any, _Call] = {}  # By Ray's reference of the result.
    self._joins: set[int] = set()  # Workers that have been asked to join.
    self._num_ever = 0
    self._published: tuple[WeightsRef, int] | None = None
    for _ in range(count):
      self._start()

  def process_ids(self) -> list[int]:
    """Returns the ids of the actors' processes, on whichever hosts; waits for their engines."""
    return self._ray.get([actor.process_id.remote() for actor in self._actors.values()])

  def put(self, data: bytes) -> Piece:
    """Does `Workers.put`: in Ray's object store, until no weights name it any more."""
    return InRay(self._ray.put(np.frombuffer(data, np.uint8)))

  def load(self, weights: WeightsRef, policy_version: int) -> None:
    """Does `Workers.load`: all begin at once, and answers of the rollout before are dropped."""
    self._published = weights, policy_version
    self._calls.clear()
    self._joins.clear()
    for worker in self._actors:
      self.join(worker)

  def begin(self) -> None:
    """Does `Workers.begin`; what a call of the rollout before brings is dropped."""
    self._calls = {ref: call for ref, call in self._calls.items() if call.joins}
    for worker in self._actors:
      if worker not in self._joins:
        self.join(worker)

  def join(self, worker: int) -> None:
    """Does `Workers.join`."""
    if worker in self._actors:
      self._joins.add(worker)
      reference = self._actors[worker].join.remote(self._published)
      self._await(worker, reference, joins=True)

  def check(self, worker: int, requests: Sequence[Request]) -> str:
    """Does `Workers.check`."""
    return self._ray.get(self._actors[worker].check.remote(list(requests)))

  def send(self, worker: int, orders: Sequence[ChunkOrder], forget: Sequence[Gone]) -> None:
    """Does `Workers.send`."""
    self._await(worker, self._actors[worker].run.remote(list(orders), list(forget)), joins=False)

  def events(self, *, blocks: bool) -> Sequence[Event]:
    """Does `Workers.events`."""
    found = self._arrived(0.0)
    is_last = False
    while blocks and not found and self._calls and not is_last:
      deadline = min(call.deadline for call in self._calls.values())
      # Those that are overdue alone are waited for once more, for they may come back.
      is_last = deadline == math.inf
      found = self._arrived(self._patience if is_last else max(0.0, deadline - time.monotonic()))
      found = found or self._overdue()
    return found

  def waits_for(self) -> str:
    """Does `Workers.waits_for`."""
    return (
      f"{len(self._actors)} of {self._num_ever} actors are left, of which none has answered in"
      f" {self._patience:g} s; {self._losses.in_a_row} were lost since a chunk ended last"
    )

  def close(self) -> None:
    """Ends the actors, and Ray where this process has started it."""
    for actor in self._actors.values():
      self._ray.kill(actor)
    self._actors.clear()
    self._calls.clear()
    if self._owns:
      self._ray.shutdown()

  def _start(self) -> None:
    number = self._num_ever
    self._num_ever += 1
    # To an actor that asks for no GPU, Ray shows none.
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
    if ready and len(self._calls) > 1:  # And what has come with it.
      ready, _ = self._ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
    return [event for reference in ready for event in self._event(reference)]

  def _event(self, reference: Any) -> list[Event]:
    call = self._calls.pop(reference, None)
    if call is None:
      return []  # Of an actor that is gone.
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
      self._ray.kill(actor)  # One that raised lives on, and has a place that the next one needs.
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
  """Whether the extra `seerjax[cluster]` is there."""
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
  """Refuses what listens somewhere and does not speak as Ray does.

  Raises:
    OSError: saying what came.
  """
  with socket.create_connection((host, port), timeout=PATIENCE) as connection:
    if os.environ.get("RAY_USE_TLS", "0") != "0":
      return  # It says nothing that we could read.
    try:
      connection.sendall(HTTP2_PREFACE)
      found = connection.recv(9)  # The head of a frame: its length, then its type.
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
    if host and port.isdigit():  # Else Ray itself tries for minutes.
      _check_answers(host, int(port))
    if address:
      ray.init(address=address, **quiet)
    else:
      ray.init(num_cpus=count, include_dashboard=False, **quiet)
  except Exception as error:  # What Ray raises where it does not come up in time is of no kind.
    raise ConnectionError(
      f"RayWorkers.address: got {error} from {address or 'a cluster of its own'}, expected Ray;"
      " start it with `ray start --head`, or leave the address out to use this machine alone."
    ) from error
