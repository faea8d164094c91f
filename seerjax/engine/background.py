"""Schedules background requests in rows that foreground requests leave free.

  T0      seconds of the step with foreground rows only, from a table
  room    rows that keep the step within (1 + slack) T0; none without a table
  alone   without foreground requests, up to a fixed number of rows

The table is measured before the first request comes, so no clock affects a decision. All instances
step together, and a step takes as long as the fullest instance needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses

import numpy as np

from seerjax.backends.protocol import Backend
from seerjax.engine.allocation import Allocation
from seerjax.engine.counters import Counters
from seerjax.engine.requests import Requests
from seerjax.engine.sequence import ScheduledRows, SequenceState
from seerjax.engine.sizes import EngineConfig
from seerjax.engine.step_times import StepTimes
from seerjax.kv.memory import Memory
from seerjax.kv.pins import Pins
from seerjax.ops import sampling


class Room:
  """The remaining capacity of a step while background requests are added to it.

  Attributes:
    has_front: whether a foreground request has rows in this step.
    is_visit: whether the step may still be one of several in a visit.
  """

  def __init__(
    self,
    front: Sequence[Sequence[ScheduledRows]],
    num_steps: int,
    *,
    config: EngineConfig,
    table: StepTimes | None,
  ):
    """Starts with the foreground rows by instance, drafts included.

    `num_steps` is the number of steps of the visit without background requests.
    """
    self.has_front = any(front)
    self.is_visit = num_steps > 1
    self._requests = [len(pieces) for pieces in front]
    self._rows = [sum(piece.num_rows for piece in pieces) for pieces in front]
    self._max_num_seqs = config.max_num_seqs
    self._most_rows = config.batch_size_buckets[-1] if self.has_front else config.background_rows
    self._table = table
    if self.has_front and table is not None:
      share, (requests, rows) = 1 + config.background_slack, self._counts()
      self._most_seconds = share * table.step(requests, rows)
      self._most_of_visit = share * table.decode(requests) if self.is_visit else 0.0

  def _counts(self) -> tuple[int, int]:
    data_parallel_size = len(self._rows)
    return data_parallel_size * max(self._requests), data_parallel_size * max(self._rows)

  def fits(self, instance: int, num_rows: int, *, keeps_visit: bool = True) -> bool:
    """Returns whether one more request may have `num_rows` rows of an instance.

    Args:
      instance: the instance.
      num_rows: rows of the request.
      keeps_visit: whether a visit of several steps is possible with the request.
    """
    requests, rows = self._requests[instance] + 1, self._rows[instance] + num_rows
    if requests > self._max_num_seqs or rows > self._most_rows:
      return False
    if not self.has_front:
      return True
    if self._table is None:
      return False
    before = self._requests[instance], self._rows[instance]
    self._requests[instance], self._rows[instance] = requests, rows
    requests, rows = self._counts()
    self._requests[instance], self._rows[instance] = before
    seconds = self._table.step(requests, rows)
    if not self.is_visit:
      return seconds <= self._most_seconds
    if keeps_visit:
      is_short = self._table.decode(requests) <= self._most_of_visit
      return is_short and seconds <= self._most_seconds
    # The request makes the visit single steps, each limited to the time of a step of the visit.
    return seconds <= self._most_of_visit

  def take(self, instance: int, wanted: int, *, keeps_visit: bool = True) -> int:
    """Returns how many of `wanted` rows one more request gets, and counts them; see `fits`."""
    fits = lambda count: self.fits(instance, count, keeps_visit=keeps_visit)
    count = wanted if fits(wanted) else 0
    if not count:
      above = wanted  # The smallest count known not to fit.
      while above - count > 1:
        middle = (count + above) // 2
        count, above = (middle, above) if fits(middle) else (count, middle)
    if count:
      self._requests[instance] += 1
      self._rows[instance] += count
      self.is_visit &= keeps_visit
      if self.has_front and not self.is_visit and self._table is not None:
        # A step outside a visit may take no longer than a step of the visit.
        self._most_seconds = min(self._most_seconds, self._most_of_visit or self._most_seconds)
    return count


def _keeps_visit(sequence: SequenceState) -> bool:
  """Returns whether a visit may have several steps if it contains the sequence's next rows."""
  return len(sequence.tokens) - sequence.num_written == 1 and not sequence.needs_host


@dataclasses.dataclass(frozen=True, eq=False)
class BackgroundRows:
  """The rows of background requests in the steps of one engine."""

  requests: Requests
  memory: Memory
  counters: Counters
  allocation: Allocation
  pins: Pins
  config: EngineConfig
  backend: Backend

  def added(
    self, scheduled: list[list[ScheduledRows]], num_steps: int, table: StepTimes | None
  ) -> list[list[ScheduledRows]]:
    """Appends rows of background requests, if there is room; returns all rows.

    A background request gets pages only if no foreground request waits for pages and rows are left.

    Args:
      scheduled: rows of foreground requests, drafts included.
      num_steps: steps of the visit without background requests.
      table: measured step times.
    """
    if not self.requests.num_background:
      return scheduled
    room = Room(scheduled, num_steps, config=self.config, table=table)
    found = []
    for instance, pieces in enumerate(scheduled):
      row, planned = sum(piece.num_rows for piece in pieces), list(pieces)
      for sequence in self._background(instance, room):
        count = 0
        if not sequence.pages:  # An earlier one took its place.
          continue
        if not room.has_front or self._may_join(sequence):
          wanted = self.allocation.fill_in_background(
            sequence, is_first=not (room.has_front or planned)
          )
          count = room.take(instance, wanted, keeps_visit=_keeps_visit(sequence))
        if count:
          planned.append(ScheduledRows(sequence, count, row))
          row += count
        self.counters.background_paused += not count
      found.append(planned)
    return found

  def _background(self, instance: int, room: Room) -> Iterator[SequenceState]:
    """Yields background sequences with pages, then admits and yields waiting ones."""
    requests = self.requests
    running, waiting = requests.background[instance], requests.background_waiting[instance]
    yield from tuple(running)
    while waiting and not requests.waiting[instance]:
      sequence = waiting[0]
      may_join = not room.has_front or self._may_join(sequence)
      if not may_join or not room.fits(instance, 1, keeps_visit=_keeps_visit(sequence)):
        break
      requests.busy = (sequence, len(sequence.tokens))
      has_pages = self.allocation.give_pages(sequence, self.memory.pools[instance])
      while not (has_pages or running or requests.running[instance]):
        # Nothing runs that could free pages later, so pins are preempted too.
        if not self.pins.take_off(instance):
          break
        has_pages = self.allocation.give_pages(sequence, self.memory.pools[instance])
      if not has_pages:
        break
      waiting.popleft()
      running.append(sequence)
      yield sequence
    requests.busy = None

  def _may_join(self, sequence: SequenceState) -> bool:
    """Returns whether the other rows can use the same compiled program with this sequence's row."""
    if sequence.mask is not None or sequence.request.sampling.has_penalties:
      return False
    waits = self.backend.traits.waits_for_predicates
    return not (waits and np.any(sampling.is_special(sequence.sampling)))
