"""Tables of step and drafting times, for budgets. Nothing here reads a clock.

  T(n, n)  n requests with one row each: measured finely, since it rises in stairs
  T(B, n)  n rows in the paths of B requests: T(n, n) times a ratio measured nearby
  V(B, k)  k decoding steps of B rows in one visit: k T(B, B) times such a ratio

Ratios are interpolated between measurements, along rows per request and along the logarithm of the
number of requests; they are constant beyond the last measurement.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math

from seerjax import fields

# Host seconds per drafted request and per step that drafts at all. Measured: 0.35 ms for two
# requests and 0.57 ms for twelve. A third of it is appending the siblings' new tokens to trees, and
# 0.02 ms per request is building the step's arrays and reading its samples.
DRAFT_SECONDS, DRAFTING_SECONDS = 4e-5, 3.5e-4
# An interpolated line: ascending positions, and the value at each.
_Line = tuple[tuple[float, ...], tuple[float, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftTimes:
  """Drafting time of one step, in seconds.

  Attributes:
    once: per step that drafts at all.
    request: per request.
    position: per position of the longest draft: one step of a draft model.
    token: per position of each request.
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
        f" token={self.token}, expected at least 0 seconds; measure again."
      )

  def seconds(self, num_requests: int, length: int) -> float:
    """Returns the seconds to draft `length` tokens for `num_requests` requests in one step."""
    if not num_requests or not length:
      return 0.0
    once = self.once + length * self.position
    return once + num_requests * (self.request + length * self.token)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
  """Seconds of a step by requests and rows, of a visit by its steps, and of drafting.

  Attributes:
    rows: ascending row counts.
    seconds: times of steps with that many requests and one row each; interpolated in between, and
      proportional to the rows beyond the last.
    paths: (requests, rows, seconds) of steps with as many paths as requests.
    visits: (requests, steps, seconds) of visits with several steps, in which every request decodes.
    draft_seconds: drafting time per request.
    drafting_seconds: additional time of a step that drafts at all.
    position_seconds: time per position of the longest draft: one step of a draft model.
    token_seconds: time per position of each request.
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
        " of at least 1, one for each time; measure each bucket once."
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
          f"StepTimes.paths: got {requests} requests with {rows} rows, expected at least 1 request,"
          " each with at least one row; count the decode row, too."
        )
    for requests, steps, _ in self.visits:
      if requests < 1 or steps < 1:
        raise ValueError(
          f"StepTimes.visits: got {requests} requests and {steps} steps, expected at least 1 of"
          " each; leave out visits that were not measured."
        )

  def draft(self, num_requests: int, length: int) -> float:
    """Returns the seconds to draft `length` tokens for `num_requests` requests in one step."""
    return self.drafts.seconds(num_requests, length)

  @property
  def drafts(self) -> DraftTimes:
    """The drafting times as a `DraftTimes`."""
    return DraftTimes(
      once=self.drafting_seconds,
      request=self.draft_seconds,
      position=self.position_seconds,
      token=self.token_seconds,
    )

  def step(self, requests: float, rows: float) -> float:
    """Returns the seconds of one step with the given total requests and rows."""
    seconds = self._of_rows(rows)
    if rows <= requests or not self._shares_of_paths:
      return seconds
    return seconds * _between(self._shares_of_paths, requests, rows / requests)

  def decode(self, requests: int) -> float:
    """Returns the seconds per step of plain decoding, in visits of the best length."""
    return self._of_rows(requests) * self._best_visit(requests)[1]

  def decode_steps(self, requests: int) -> int:
    """Returns the number of steps of that visit."""
    return self._best_visit(requests)[0]

  def _best_visit(self, requests: int) -> tuple[int, float]:
    """Returns the visit length with the fastest steps, and the ratio to single steps."""
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
    """By ascending logarithm of the requests: ratios by rows per request."""
    lines: dict[int, dict[float, float]] = {}
    for requests, rows, seconds in self.paths:
      # With one row per request, the ratio is 1 by definition.
      line = lines.setdefault(requests, {1.0: 1.0})
      line[rows / requests] = seconds / self._of_rows(rows) if rows > requests else 1.0
    return [(math.log(requests), _line(line)) for requests, line in sorted(lines.items())]

  @functools.cached_property
  def _shares_of_visits(self) -> Mapping[int, _Line]:
    """By steps: ratios by logarithm of the requests."""
    lines: dict[int, dict[float, float]] = {}
    for requests, steps, seconds in self.visits:
      share = seconds / (steps * self._of_rows(requests))
      lines.setdefault(steps, {})[math.log(requests)] = share
    return {steps: _line(line) for steps, line in sorted(lines.items())}


# Used if nothing was measured: a step costs as much as eight rows plus 1 ms per row. On a CPU, a
# 0.1 B model reads its weights in about the time of ten rows. On a GPU many more rows are free, so
# this drafts less than would be worthwhile.
PRIOR = StepTimes(
  rows=(1, 1024), seconds=(9e-3, 1.032), draft_seconds=4e-5, drafting_seconds=3.5e-4
)


def _line(points: Mapping[float, float]) -> _Line:
  places = sorted(points)
  return tuple(places), tuple(points[place] for place in places)


def _at(line: tuple[Sequence[float], Sequence[float]], place: float) -> float:
  """Interpolates a line at a position; constant beyond its ends."""
  places, values = line
  above = bisect.bisect_right(places, place)
  if above == 0 or above == len(places):
    return values[max(above - 1, 0)]
  low, high = places[above - 1], places[above]
  share = (place - low) / (high - low)
  return values[above - 1] * (1 - share) + values[above] * share


def _between(lines: Sequence[tuple[float, _Line]], requests: float, place: float) -> float:
  """Interpolates between two neighbouring lines, by the logarithm of the requests."""
  where = math.log(requests)
  above = bisect.bisect_right(lines, where, key=lambda entry: entry[0])
  if above == 0 or above == len(lines):
    return _at(lines[max(above - 1, 0)][1], place)
  (low, below), (high, beyond) = lines[above - 1], lines[above]
  share = (where - low) / (high - low)
  return _at(below, place) * (1 - share) + _at(beyond, place) * share
