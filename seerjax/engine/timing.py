"""Measures the seconds of steps before the first request comes, all of them or within a budget."""

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

# Of a machine that does nothing else.
WALL = time.monotonic


def step_seconds(
  engine: Engine,
  sizes: Iterable[tuple[int, int]],
  *,
  num_steps: int = 1,
  repeats: int = 6,
  clock: Callable[[], float] = WALL,
) -> dict[tuple[int, int], float]:
  """Returns the seconds of a step of (requests, rows), over all instances together.

  The rows of one request lie in one path, as of a draft, and all are sampled. The host's making of
  the arrays is part of a step, and so is reading what was sampled. Each time is the least of
  `repeats`, between which all others are measured, so that a slow second spoils none. Process 0
  measures for all.

  Args:
    engine: without unfinished requests.
    sizes: pairs (requests, rows) of all instances; more than the last row bucket holds are as many
      as that holds.
    num_steps: of a visit, whose seconds these then are; more than one only where each request has
      one row.
    repeats: steps of each size.
    clock: in seconds; `time.process_time` where others use the machine, too.

  Raises:
    ValueError: if requests are unfinished, whose pages a step would change, or a number is none.
  """
  checks.whole("step_seconds: repeats", repeats, 1, None, "6 are usual")
  sizes = sorted(set(sizes))
  for requests, rows in sizes:
    checks.whole("step_seconds: requests", requests, 1, None, "a step has one at least")
    checks.whole("step_seconds: rows", rows, requests, None, "each request has a row at least")
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
  """Returns the seconds of the first calls of a list, as many as a budget allows.

  The calls that matter most stand first. The first one is always measured. Another one is measured
  if it fits what is left of the budget, by its work and the seconds that the others took for
  theirs; then all that were measured are measured again, in turns, while that fits. Process 0
  measures and decides for all processes.

  Args:
    ready: as of `least_seconds`.
    work: of each call, in any unit: a call of more work takes longer, at most in proportion.
    seconds: that all calls together may take, those that compile not counted.
    repeats: turns at most.
    clock: in seconds.

  Returns:
    The least seconds of each call; infinity for those that were not measured.
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
    # A call that compiles is run as well, so that it counts twice.
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
  """Returns the seconds of several calls, the least of `repeats` each, in turns.

  The first turn, which compiles, does not count. Process 0 measures for all.

  Args:
    ready: each makes a call ready, which is not timed, and returns it; it ends when its results are
      there.
    repeats: turns.
    clock: in seconds.
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
