"""Rows for requests that nobody waits for, beside those of requests that somebody does.

  T0      seconds of the step as those in front have it, by a table
  room    rows that leave the step within (1 + slack) T0; without a table, none
  alone   where nobody is in front, up to so many rows

A table is measured before the first request comes, so no clock decides. Steps of several instances
go in step, and take as long as the fullest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from seerjax.engine.sequence import ScheduledRows
from seerjax.engine.sizes import EngineConfig


@runtime_checkable
class StepTable(Protocol):
  """Seconds of steps, over all instances together; `speculation.times.StepTimes` is one."""

  def step(self, requests: float, rows: float) -> float:
    """Returns the seconds of one step of so many requests with so many rows."""
    ...

  def decode(self, requests: int) -> float:
    """Returns the seconds of a step of plain decoding, in the visit that is best for that."""
    ...


class Room:
  """What a step has left, as it is given away request by request.

  Attributes:
    has_front: whether somebody waits for a row of this step.
    is_visit: whether the step may still be one of several in a visit.
  """

  def __init__(
    self,
    front: Sequence[Sequence[ScheduledRows]],
    num_steps: int,
    *,
    config: EngineConfig,
    table: StepTable | None,
  ):
    """Begins with the rows of those in front, by instance, drafts among them.

    `num_steps` are those of the visit that they would have alone.
    """
    self.has_front = any(front)
    self.is_visit = num_steps > 1
    self._requests = [len(pieces) for pieces in front]
    self._rows = [sum(piece.num_rows for piece in pieces) for pieces in front]
    self._max_sequences = config.max_sequences
    self._most_rows = config.row_buckets[-1] if self.has_front else config.background_rows
    self._table = table
    if self.has_front and table is not None:
      share, (requests, rows) = 1 + config.background_slack, self._counts()
      self._most_seconds = share * table.step(requests, rows)
      self._most_of_visit = share * table.decode(requests) if self.is_visit else 0.0

  def _counts(self) -> tuple[int, int]:
    num_instances = len(self._rows)
    return num_instances * max(self._requests), num_instances * max(self._rows)

  def fits(self, instance: int, num_rows: int, *, keeps_visit: bool = True) -> bool:
    """Returns whether one request more may have so many rows of an instance.

    Args:
      instance: where.
      num_rows: of the request.
      keeps_visit: whether a visit of several steps may go on with it.
    """
    requests, rows = self._requests[instance] + 1, self._rows[instance] + num_rows
    if requests > self._max_sequences or rows > self._most_rows:
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
    # Single steps from then on, each of which is held to a step of the visit.
    return seconds <= self._most_of_visit

  def take(self, instance: int, wanted: int, *, keeps_visit: bool = True) -> int:
    """Returns how many of `wanted` rows one request more gets, and counts them; see `fits`."""
    fits = lambda count: self.fits(instance, count, keeps_visit=keeps_visit)
    count = wanted if fits(wanted) else 0
    if not count:
      above = wanted  # What does not fit.
      while above - count > 1:
        middle = (count + above) // 2
        count, above = (middle, above) if fits(middle) else (count, middle)
    if count:
      self._requests[instance] += 1
      self._rows[instance] += count
      self.is_visit &= keeps_visit
      if self.has_front and not self.is_visit and self._table is not None:
        # A step that is no visit's any more may take as long as one of the visit.
        self._most_seconds = min(self._most_seconds, self._most_of_visit or self._most_seconds)
    return count
