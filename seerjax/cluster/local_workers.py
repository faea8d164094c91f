"""Cluster workers that are engines of this process and run one after the other.

They run in the order in which they were sent work. An exception in a worker ends that worker and
not the process, as in a real cluster.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

from seerjax.cluster.records import (
  Answered,
  ChunkOrder,
  Event,
  Gone,
  Joined,
  Lost,
  Piece,
  WeightsRef,
)
from seerjax.cluster.weights import Held
from seerjax.cluster.worker import Worker
from seerjax.types import Request


class LocalWorkers:
  """Engines of one process as the workers of `driver.ClusterRollout`."""

  def __init__(
    self,
    workers: Sequence[Worker],
    *,
    choose: Callable[[Sequence[int]], int] = lambda waiting: waiting[0],
  ):
    """Wraps the workers; the index of a worker is its number.

    Args:
      workers: workers of this process; more can be added with `add`.
      choose: selects the next worker to run from those that were sent work, in that order.
    """
    self._workers: dict[int, Worker] = dict(enumerate(workers))
    self._choose = choose
    self._calls: dict[int, tuple[Sequence[ChunkOrder], Sequence[Gone]]] = {}
    self._events: collections.deque[Event] = collections.deque()
    self._num_ever = len(workers)
    self._published: tuple[WeightsRef, int] | None = None

  def add(self, worker: Worker) -> int:
    """Adds a worker; returns its number."""
    number = self._num_ever
    self._num_ever += 1
    self._workers[number] = worker
    self.join(number)
    return number

  def put(self, data: bytes) -> Piece:
    """Implements `Workers.put`."""
    return Held(data)

  def load(self, weights: WeightsRef, policy_version: int) -> None:
    """Implements `Workers.load`."""
    self._published = weights, policy_version

  def begin(self) -> None:
    """Implements `Workers.begin`."""
    self._calls.clear()
    self._events.clear()
    for worker in list(self._workers):
      self.join(worker)

  def join(self, worker: int) -> None:
    """Implements `Workers.join`."""
    try:
      if self._published is not None:
        self._workers[worker].load(*self._published)
      report = self._workers[worker].join()
    except Exception as error:
      self._fail(worker, error)
    else:
      self._events.append(Joined(worker=worker, report=report))

  def check(self, worker: int, requests: Sequence[Request]) -> str:
    """Implements `Workers.check`."""
    return self._workers[worker].check(requests)

  def send(self, worker: int, orders: Sequence[ChunkOrder], forget: Sequence[Gone]) -> None:
    """Implements `Workers.send`."""
    self._calls[worker] = orders, forget

  def events(self, *, blocks: bool) -> Sequence[Event]:
    """Implements `Workers.events`; if blocking, runs one worker."""
    if blocks and not self._events and self._calls:
      worker = self._choose(list(self._calls))
      orders, forget = self._calls.pop(worker)
      try:
        results = tuple(self._workers[worker].run(orders, forget))
      except Exception as error:
        self._fail(worker, error)
      else:
        self._events.append(Answered(worker=worker, results=results))
    found = tuple(self._events)
    self._events.clear()
    return found

  def waits_for(self) -> str:
    """Implements `Workers.waits_for`."""
    return f"{len(self._workers)} of {self._num_ever} in this process are left"

  def _fail(self, worker: int, error: Exception) -> None:
    del self._workers[worker]
    self._calls.pop(worker, None)
    self._events.append(Lost(worker=worker, reason=f"{type(error).__name__}: {error}"))
