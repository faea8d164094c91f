"""Workers of a cluster that are engines of this process, one after the other.

They take turns: the one that was sent on first runs first. What raises in one of them is that
worker's end, not the process's, as it would be in a cluster.
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
    """Takes workers; their numbers are their places.

    Args:
      workers: of this process; others may come with `add`.
      choose: of the workers that have been sent on, in that order, the one that runs next.
    """
    self._workers: dict[int, Worker] = dict(enumerate(workers))
    self._choose = choose
    self._calls: dict[int, tuple[Sequence[ChunkOrder], Sequence[Gone]]] = {}
    self._events: collections.deque[Event] = collections.deque()
    self._num_ever = len(workers)
    self._published: tuple[WeightsRef, int] | None = None

  def add(self, worker: Worker) -> int:
    """Lets a worker join; returns its number."""
    number = self._num_ever
    self._num_ever += 1
    self._workers[number] = worker
    self.join(number)
    return number

  def put(self, data: bytes) -> Piece:
    """Does `Workers.put`."""
    return Held(data)

  def load(self, weights: WeightsRef, policy_version: int) -> None:
    """Does `Workers.load`."""
    self._published = weights, policy_version

  def begin(self) -> None:
    """Does `Workers.begin`."""
    self._calls.clear()
    self._events.clear()
    for worker in list(self._workers):
      self.join(worker)

  def join(self, worker: int) -> None:
    """Does `Workers.join`."""
    try:
      if self._published is not None:
        self._workers[worker].load(*self._published)
      report = self._workers[worker].join()
    except Exception as error:
      self._fail(worker, error)
    else:
      self._events.append(Joined(worker=worker, report=report))

  def check(self, worker: int, requests: Sequence[Request]) -> str:
    """Does `Workers.check`."""
    return self._workers[worker].check(requests)

  def send(self, worker: int, orders: Sequence[ChunkOrder], forget: Sequence[Gone]) -> None:
    """Does `Workers.send`."""
    self._calls[worker] = orders, forget

  def events(self, *, blocks: bool) -> Sequence[Event]:
    """Does `Workers.events`; blocking, it has one worker run."""
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
    """Does `Workers.waits_for`."""
    return f"{len(self._workers)} of {self._num_ever} in this process are left"

  def _fail(self, worker: int, error: Exception) -> None:
    del self._workers[worker]
    self._calls.pop(worker, None)
    self._events.append(Lost(worker=worker, reason=f"{type(error).__name__}: {error}"))
