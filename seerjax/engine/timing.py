"""Measures step times before the first request, for all sizes or within a time budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import functools
import math
import time

import jax
from jax.experimental import multihost_utils
import numpy as np

from seerjax import agreement
from seerjax.engine import checks
from seerjax.engine.engine import Engine

# For a machine without other load.
WALL = time.monotonic


def step_seconds(
  engine: Engine,
  sizes: Iterable[tuple[int, int]],
  *,
  num_steps: int = 1,
  repeats: int = 6,
  clock: Callable[[], float] = WALL,
) -> dict[tuple[int, int], float]:
  """Returns the seconds of a step by (requests, rows), over all instances together.

  The rows of one request form one path, like a draft, and all are sampled. A step includes building
  the arrays on the host and fetching the samples. Each time is the minimum of `repeats`, which are
  interleaved with all other sizes, so that a slow second does not spoil one size. Process 0
  measures for all processes.

  Args:
    engine: an engine without unfinished requests.
    sizes: pairs (requests, rows) over all instances; clipped to the last row bucket.
    num_steps: steps of a visit; times are per visit. More than one only if each request has one
      row.
    repeats: measurements per size.
    clock: clock in seconds; `time.process_time` if others use the machine too.

  Raises:
    ValueError: if requests are unfinished (a step would change their pages), or a number is
      invalid.
  """
  checks.whole("step_seconds: repeats", repeats, 1, None, "6 is usual")
  sizes = sorted(set(sizes))
  for requests, rows in sizes:
    checks.whole("step_seconds: requests", requests, 1, None, "a step has at least one")
    checks.whole("step_seconds: rows", rows, requests, None, "each request has at least one row")
  most = engine.config.row_buckets[-1]

  def ready(size: tuple[int, int]) -> Callable[[], object]:
    requests, rows = (min(-(-count // engine.num_instances), most) for count in size)
    return engine.idle_step(requests, rows, num_steps)

  calls = [functools.partial(ready, size) for size in sizes]
  return dict(zip(sizes, least_seconds(calls, repeats=repeats, clock=clock), strict=True))


def seconds_within(
  ready: Sequence[Callable[[], Callable[[], object]]],
  work: Sequence[float],
  seconds: float,
  *,
  repeats: int = 6,
  clock: Callable[[], float] = WALL,
) -> list[float]:
  """Returns the seconds of the calls of a list that can be measured within a budget.

  Put the most important calls first. The first one is always measured. Another one is measured if
  its expected time, scaled by `work` from the measured calls, fits the remaining budget. Then all
  measured calls are measured again, in turns, as long as they fit. Process 0 measures and decides
  for all processes.

  Args:
    ready: as in `least_seconds`.
    work: work of each call, in any unit: time grows with work, at most in proportion.
    seconds: budget for all calls together, compilation not included.
    repeats: maximum measurements per call.
    clock: clock in seconds.

  Returns:
    The minimum seconds of each call; infinity for those that were not measured.
  """
  found, spent = [math.inf] * len(ready), 0.0

  def measure(place: int) -> None:
    nonlocal spent
    run = ready[place]()
    if found[place] == math.inf:
      run()  # It may compile.
    begin = clock()
    run()
    took = agreement.from_first(lambda: clock() - begin)
    # The first measurement runs the call twice, so its time counts twice.
    spent += took * (1 + (found[place] == math.inf))
    found[place] = min(found[place], took)

  def expected(place: int) -> float:
    if found[place] < math.inf:
      return found[place]
    known = [(work[at], took) for at, took in enumerate(found) if took < math.inf]
    return 2 * max(took * max(1.0, work[place] / done) for done, took in known)

  if ready:
    measure(0)
  for place in range(1, len(ready)):
    if spent + expected(place) <= seconds:
      measure(place)
  for _ in range(repeats - 1):
    for place, took in enumerate(found):
      if took < math.inf and spent + took <= seconds:
        measure(place)
  return found


def least_seconds(
  ready: Sequence[Callable[[], Callable[[], object]]],
  *,
  repeats: int = 6,
  clock: Callable[[], float] = WALL,
) -> list[float]:
  """Returns the minimum seconds of several calls over `repeats` interleaved measurements.

  The first turn, which compiles, does not count. Process 0 measures for all processes.

  Args:
    ready: each prepares a call, untimed, and returns it; the call ends when its results are
      available.
    repeats: number of timed turns.
    clock: clock in seconds.
  """
  found = [math.inf] * len(ready)
  for repeat in range(repeats + 1):
    for place, make_ready in enumerate(ready):
      run = make_ready()
      begin = clock()
      run()
      if repeat:
        found[place] = min(found[place], clock() - begin)
  if jax.process_count() > 1:
    values = multihost_utils.broadcast_one_to_all(np.asarray(found, np.float64))
    found = values.tolist()
  return found
