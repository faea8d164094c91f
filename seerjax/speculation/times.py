"""Seconds of steps and of drafting, as tables: what budgets reckon with. They ask no clock.

  T(n, n)  n requests with a row each: measured closely, since it rises in stairs
  T(B, n)  n rows in the paths of B requests: T(n, n) times the share that was measured near there
  V(B, k)  k steps of B rows that decode, in one visit: k T(B, B) times such a share

A share is interpolated between what was measured: along rows a request, and along the logarithm of
the requests; beyond the last it stays.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math

from seerjax import fields

# Of an interpolated line: ascending places, and a value at each.
_Line = tuple[tuple[float, ...], tuple[float, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftTimes:
  """Seconds of drafting in one step.

  Attributes:
    once: of a step that drafts at all.
    request: for each request.
    position: for each position of the longest draft: a step of a draft model.
    token: for each position of each request.
  """

  once: float = 0.0
  request: float = 0.0
  position: float = 0.0
  token: float = 0.0

  def __post_init__(self):
    fields.check(self)
    values = dataclasses.astuple(self)
    if min(values) < 0 or not all(map(math.isfinite, values)):
      raise ValueError(
        f"DraftTimes: got once={self.once}, request={self.request}, position={self.position},"
        f" token={self.token}, expected no negative seconds; measure again."
      )

  def seconds(self, num_requests: int, length: int) -> float:
    """Returns the seconds of drafting `length` tokens for so many requests in one step."""
    if not num_requests or not length:
      return 0.0
    once = self.once + length * self.position
    return once + num_requests * (self.request + length * self.token)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
  """Seconds of a step by requests and rows, of a visit by its steps, and of drafting.

  Attributes:
    rows: ascending row counts.
    seconds: of a step of so many requests with a row each; between two it is interpolated, beyond
      the last it grows in proportion to the rows.
    paths: (requests, rows, seconds) of steps whose rows lie in as many paths as there are requests.
    visits: (requests, steps, seconds) of visits of several steps, in which every request decodes.
    draft_seconds: of drafting, for each request.
    drafting_seconds: of a step that drafts at all, besides these.
    position_seconds: for each position of the longest draft: a step of a draft model.
    token_seconds: for each position of each request.
  """

  rows: tuple[int, ...]
  seconds: tuple[float, ...]
  paths: tuple[tuple[int, int, float], ...] = ()
  visits: tuple[tuple[int, int, float], ...] = ()
  draft_seconds: float = 0.0
  drafting_seconds: float = 0.0
  position_seconds: float = 0.0
  token_seconds: float = 0.0

  def __post_init__(self):
    fields.check(self)
    is_ascending = all(a < b for a, b in zip(self.rows, self.rows[1:]))
    if not self.rows or len(self.rows) != len(self.seconds) or not is_ascending or self.rows[0] < 1:
      raise ValueError(
        f"StepTimes: got rows={self.rows} for {len(self.seconds)} times, expected ascending counts"
        " from 1 on, one for each time; measure each bucket once."
      )
    of_drafts = (
      self.draft_seconds, self.drafting_seconds, self.position_seconds, self.token_seconds
    )  # fmt: skip
    tabled = [*self.seconds, *(entry[2] for entry in (*self.paths, *self.visits))]
    if min(tabled) <= 0 or min(of_drafts) < 0 or not all(map(math.isfinite, (*tabled, *of_drafts))):
      raise ValueError(
        f"StepTimes: got seconds={self.seconds}, paths={self.paths}, visits={self.visits},"
        f" draft_seconds={self.draft_seconds}, drafting_seconds={self.drafting_seconds},"
        f" position_seconds={self.position_seconds}, token_seconds={self.token_seconds}, expected"
        " positive times; measure again."
      )
    for requests, rows, _ in self.paths:
      if not 1 <= requests <= rows:
        raise ValueError(
          f"StepTimes.paths: got {requests} requests with {rows} rows, expected 1 request or more,"
          " each with a row at least; count the row that decodes, too."
        )
    for requests, steps, _ in self.visits:
      if requests < 1 or steps < 1:
        raise ValueError(
          f"StepTimes.visits: got {requests} requests and {steps} steps, expected at least 1 of"
          " each; leave out what was not measured."
        )

  def draft(self, num_requests: int, length: int) -> float:
    """Returns the seconds of drafting `length` tokens for so many requests in one step."""
    return self.drafts.seconds(num_requests, length)

  @property
  def drafts(self) -> DraftTimes:
    """What drafting costs, as a record of its own."""
    return DraftTimes(
      once=self.drafting_seconds,
      request=self.draft_seconds,
      position=self.position_seconds,
      token=self.token_seconds,
    )

  def step(self, requests: float, rows: float) -> float:
    """Returns the seconds of one step of so many requests with so many rows, all together."""
    seconds = self._of_rows(rows)
    if rows <= requests or not self._shares_of_paths:
      return seconds
    return seconds * _between(self._shares_of_paths, requests, rows / requests)

  def decode(self, requests: int) -> float:
    """Returns the seconds of a step of plain decoding, in the visit that is best for that."""
    return self._of_rows(requests) * self._best_visit(requests)[1]

  def decode_steps(self, requests: int) -> int:
    """Returns how many steps that visit has."""
    return self._best_visit(requests)[0]

  def _best_visit(self, requests: int) -> tuple[int, float]:
    """Returns the steps of the visit of least seconds a step, and their share of single steps'."""
    best = (1, 1.0)
    for steps, line in self._shares_of_visits.items():
      share = _at(line, math.log(requests))
      if share < best[1]:
        best = (steps, share)
    return best

  def _of_rows(self, rows: float) -> float:
    if rows >= self.rows[-1]:
      return self.seconds[-1] * rows / self.rows[-1]
    return _at((self.rows, self.seconds), rows)

  @functools.cached_property
  def _shares_of_paths(self) -> Sequence[tuple[float, _Line]]:
    """By the logarithm of the requests, ascending: shares by rows a request."""
    lines: dict[int, dict[float, float]] = {}
    for requests, rows, seconds in self.paths:
      # A row each is the table itself.
      line = lines.setdefault(requests, {1.0: 1.0})
      line[rows / requests] = seconds / self._of_rows(rows) if rows > requests else 1.0
    return [(math.log(requests), _line(line)) for requests, line in sorted(lines.items())]

  @functools.cached_property
  def _shares_of_visits(self) -> Mapping[int, _Line]:
    """By steps: shares by the logarithm of the requests."""
    lines: dict[int, dict[float, float]] = {}
    for requests, steps, seconds in self.visits:
      share = seconds / (steps * self._of_rows(requests))
      lines.setdefault(steps, {})[math.log(requests)] = share
    return {steps: _line(line) for steps, line in sorted(lines.items())}


# Where nothing was measured: a step costs as much as eight rows, whatever it holds, and each of its
# rows costs a millisecond. On a CPU a model of 0.1 B reads its weights in about the time of ten
# rows; on a GPU many more rows are free, so that less is drafted than would pay.
PRIOR = StepTimes(
  rows=(1, 1024), seconds=(9e-3, 1.032), draft_seconds=4e-5, drafting_seconds=3.5e-4
)


def _line(points: Mapping[float, float]) -> _Line:
  places = sorted(points)
  return tuple(places), tuple(points[place] for place in places)


def _at(line: tuple[Sequence[float], Sequence[float]], place: float) -> float:
  """Returns a line's value at a place, that of its nearest end outside it."""
  places, values = line
  above = bisect.bisect_right(places, place)
  if above == 0 or above == len(places):
    return values[max(above - 1, 0)]
  low, high = places[above - 1], places[above]
  share = (place - low) / (high - low)
  return values[above - 1] * (1 - share) + values[above] * share


def _between(lines: Sequence[tuple[float, _Line]], requests: float, place: float) -> float:
  """Returns what two neighbouring lines have at a place, by the logarithm of the requests."""
  where = math.log(requests)
  above = bisect.bisect_right(lines, where, key=lambda entry: entry[0])
  if above == 0 or above == len(lines):
    return _at(lines[max(above - 1, 0)][1], place)
  (low, below), (high, beyond) = lines[above - 1], lines[above]
  share = (where - low) / (high - low)
  return _at(below, place) * (1 - share) + _at(beyond, place) * share
