"""Queues of the unfinished requests of an engine: waiting, running and paused.

    waiting -> running -> (end of a chunk) paused -> waiting again, or (end of the response) gone
                  |
                  +-> (preempted) waiting again

Background requests have their own queues, so they never block foreground requests.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
import itertools

import numpy as np

from seerjax.engine import checks
from seerjax.engine.sequence import SequenceState
from seerjax.types import Request


class Requests:
  """Queues by instance.

  Attributes:
    live: every unfinished request, by its id.
    waiting: foreground requests that wait for memory, in order.
    running: foreground requests that have rows in every step.
    background_waiting: background requests that wait for memory.
    background: background requests that hold pages; they get spare rows of a step, or none.
    num_background: number of background requests in `live`.
    paused: ids, in the order in which their chunks ended.
    held: ids of requests that may not generate tokens for now.
    busy: the request that a step is working on, and its number of tokens before the step; None
      while the work belongs to no single request.
  """

  def __init__(self, data_parallel_size: int):
    self.live: dict[str, SequenceState] = {}
    self.waiting: list[collections.deque[SequenceState]] = [
      collections.deque() for _ in range(data_parallel_size)
    ]
    self.running: list[list[SequenceState]] = [[] for _ in range(data_parallel_size)]
    self.background_waiting: list[collections.deque[SequenceState]] = [
      collections.deque() for _ in range(data_parallel_size)
    ]
    self.background: list[list[SequenceState]] = [[] for _ in range(data_parallel_size)]
    self.num_background = 0
    self.paused: dict[str, None] = {}
    self.held: frozenset[str] = frozenset()
    self.busy: tuple[SequenceState, int] | None = None
    # For each group with unfinished requests: its instance, and the number of these requests.
    self._group_instance: dict[str, int] = {}
    self._group_size: collections.Counter[str] = collections.Counter()

  def take_busy(self) -> tuple[SequenceState, int] | None:
    """Returns `busy` and resets it to None."""
    busy, self.busy = self.busy, None
    return busy

  def find(self, request_id: str, what: str) -> SequenceState:
    """Returns an unfinished request.

    Raises:
      ValueError: if the id is unknown; `what` is the name of the called method.
    """
    if request_id not in self.live:
      raise ValueError(
        f"{what}: got request {request_id!r}, expected one of the {len(self.live)} that are"
        " unfinished; it may have finished (see poll)."
      )
    return self.live[request_id]

  def find_paused(self, request_id: str, what: str) -> SequenceState:
    """Returns a paused request.

    Raises:
      ValueError: as `find`, and if it is not paused.
    """
    sequence = self.find(request_id, what)
    if request_id not in self.paused:
      raise ValueError(
        f"{what}: got request {request_id!r}, which is not paused, expected one of the"
        f" {len(self.paused)} paused requests (see poll_paused); its chunk is still running."
      )
    return sequence

  def require_new(self, what: str, request_id: str) -> None:
    """Refuses the id of an unfinished request.

    Raises:
      ValueError: with `what` as its prefix.
    """
    if request_id in self.live:
      raise ValueError(f"{what}: got the id of a running request, expected a new id; rename it.")

  def require_none(self, what: str, fix: str) -> None:
    """Refuses an operation that needs an engine without unfinished requests.

    Raises:
      ValueError: with the number of requests; `what` is the name of the engine's method.
    """
    if self.live:
      raise ValueError(
        f"Engine.{what}: got {len(self.live)} unfinished requests, expected none; {fix}."
      )

  def check_instance(self, what: str, instance: int) -> None:
    """Refuses an instance that the mesh does not have.

    Raises:
      ValueError: with `what` as its prefix.
    """
    most = len(self.running) - 1
    checks.whole(f"{what}: instance", instance, 0, most, "the mesh has no other instances")

  def instance_for(self, request: Request, *, is_background: bool = False) -> int:
    """Returns the instance for a request: its group's, to share the prompt, or the least loaded.

    Background and foreground loads are counted separately.
    """
    group = request.group_id
    if group in self._group_instance:
      return self._group_instance[group]
    loads = [
      len(waiting) + len(running)
      for waiting, running in zip(*self._queues(is_background), strict=True)
    ]
    instance = int(np.argmin(loads))
    if group:
      self._group_instance[group] = instance
    return instance

  def add(self, sequence: SequenceState) -> None:
    """Adds a request that waits for memory."""
    self.live[sequence.request.request_id] = sequence
    self.num_background += sequence.is_background
    self._group_size[sequence.request.group_id] += 1
    self._waiting(sequence).append(sequence)

  def pause(self, sequence: SequenceState) -> None:
    """Ends the chunk of a running or waiting request."""
    self._leave_queue(sequence)
    self.paused[sequence.request.request_id] = None

  def resume(self, sequence: SequenceState) -> None:
    """Moves a paused request to the waiting queue for another chunk."""
    del self.paused[sequence.request.request_id]
    waiting = self._waiting(sequence)
    # Requests that hold pages go first: behind one that waits for pages, both would wait forever.
    (waiting.appendleft if sequence.pages else waiting.append)(sequence)

  def preempt(self, sequence: SequenceState) -> None:
    """Moves a running request to the front of the waiting queue."""
    self._running(sequence).remove(sequence)
    self._waiting(sequence).appendleft(sequence)

  def is_running(self, sequence: SequenceState) -> bool:
    """Returns whether a request is in a running queue."""
    return sequence in self._running(sequence)

  def youngest_holder(self, sequence: SequenceState) -> SequenceState | None:
    """Returns the foreground request to preempt in favour of an older one, None if there is none.

    That is the most recently admitted one after `sequence`. If `sequence` is the oldest of all,
    waiting requests that still hold pages are preempted before running ones, and paused requests
    last (`paused_holder`).
    """
    running = self.running[sequence.instance]
    if running[0] is sequence:
      for waiting in reversed(self.waiting[sequence.instance]):
        if waiting.pages:
          return waiting
    if running[-1] is not sequence:
      return running[-1]
    return self.paused_holder(sequence.instance) if running[0] is sequence else None

  def paused_holder(self, instance: int) -> SequenceState | None:
    """Returns the most recently paused foreground request that holds pages of an instance, if any.

    Paused requests are the scheduler's business; they are preempted only if an instance could
    compute nothing at all otherwise.
    """
    for name in reversed(self.paused):
      sequence = self.live[name]
      if sequence.instance == instance and sequence.pages and not sequence.is_background:
        return sequence
    return None

  def holders_in_background(self, instance: int) -> list[SequenceState]:
    """Returns the background requests that hold pages of an instance, in eviction order.

    Paused ones come first, then waiting ones, then running ones, newest first.
    """
    if self.num_background == 0:
      return []
    paused = (self.live[name] for name in self.paused)
    idle = [s for s in paused if s.is_background and s.instance == instance]
    running = reversed(self.background[instance])
    return [s for s in (*idle, *self.background_waiting[instance], *running) if s.pages]

  def num_unwritten(self, sequence: SequenceState) -> int:
    """Returns the rows up to a sequence's end; without the last row while it is held."""
    is_held = sequence.request.request_id in self.held
    return len(sequence.tokens) - sequence.num_written - is_held

  def remove(self, sequence: SequenceState) -> None:
    """Removes a request from all queues."""
    request_id = sequence.request.request_id
    if request_id in self.paused:
      del self.paused[request_id]
    else:
      self._leave_queue(sequence)
    del self.live[request_id]
    self.num_background -= sequence.is_background
    group = sequence.request.group_id
    self._group_size[group] -= 1
    if not self._group_size[group]:  # Otherwise an engine that is never idle would leak groups.
      del self._group_size[group]
      self._group_instance.pop(group, None)

  def wait_again(self) -> None:
    """Moves all requests that are not paused to the waiting queues, running ones first."""
    # A request may have been between two queues when a step failed.
    queues = (*self.running, *self.waiting, *self.background, *self.background_waiting)
    order = [*itertools.chain(*queues)]
    order = dict.fromkeys([*order, *self.live.values()])
    for queue in queues:
      queue.clear()
    for sequence in order:
      request_id = sequence.request.request_id
      if request_id in self.live and request_id not in self.paused:
        self._waiting(sequence).append(sequence)

  def _queues(
    self, is_background: bool
  ) -> tuple[Sequence[collections.deque[SequenceState]], Sequence[list[SequenceState]]]:
    if is_background:
      return self.background_waiting, self.background
    return self.waiting, self.running

  def _waiting(self, sequence: SequenceState) -> collections.deque[SequenceState]:
    return self._queues(sequence.is_background)[0][sequence.instance]

  def _running(self, sequence: SequenceState) -> list[SequenceState]:
    return self._queues(sequence.is_background)[1][sequence.instance]

  def _leave_queue(self, sequence: SequenceState) -> None:
    for queue in (self._running(sequence), self._waiting(sequence)):
      if sequence in queue:
        queue.remove(sequence)
