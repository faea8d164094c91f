"""Measures an engine's step times before the first request, as a table (`step_times`).

    most informative steps first -> measured within a time limit -> the rest estimated by rows

The cost of a step that is not measured is interpolated by rows between measured steps, and grows in
proportion beyond the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
import dataclasses
import functools
import math
import time

import jax
from jax.experimental import multihost_utils
import numpy as np

from seerjax import agreement
from seerjax.engine import checks
from seerjax.engine.engine import Engine
from seerjax.engine.step_times import DRAFT_SECONDS, DRAFTING_SECONDS, StepTimes

# For a machine without other load.
WALL = time.monotonic
# Draft lengths for the rows of paths.
PATH_LENGTHS = (1, 2, 4, 8, 16)
# Time limit for measuring, before a run or a server starts.
SECONDS = 1.0


def measure(
  engine: Engine, *, seconds: float = SECONDS, clock: Callable[[], float] = WALL
) -> StepTimes:
  """Returns an engine's step times by requests and rows, and its visit times.

  Args:
    engine: an engine without unfinished requests.
    seconds: time limit for all steps, excluding compilation; at least one step is measured.
      `math.inf` measures all.
    clock: returns seconds; use `time.process_time` on a machine that others use.
  """
  # Times rise in stairs, per row tile and per bucket: a draft of a few rows is cheap within a tile
  # and expensive at its edge. Hence up to 128 rows are measured finely.
  buckets, instances = engine.config.batch_size_buckets, engine.data_parallel_size
  powers = [2**power for power in range(buckets[-1].bit_length())]
  of_instance = {*powers, *range(4, 129, 4), *buckets, *(bucket + 1 for bucket in buckets)}
  rows = sorted(instances * n for n in of_instance if n <= buckets[-1])
  most_requests = min(engine.config.max_num_seqs, buckets[-1])
  requests = sorted({n for n in powers if n <= most_requests} | {most_requests})
  most_rows, longest = buckets[-1], engine.config.max_model_len // 2
  paths = [
    (instances * count, instances * count * (1 + length))
    for count in requests
    for length in PATH_LENGTHS
    if count * (1 + length) <= most_rows and length < longest
  ]
  steps = min(engine.config.decode_steps_per_call, longest)
  sizes = [*((n, n, 1) for n in rows), *((n, size, 1) for n, size in paths)]
  if steps > 1:
    sizes += [(instances * count, instances * count, steps) for count in requests]
  # Single rows at powers of four and the buckets are the most informative; then visits, short
  # paths, and the values in between.
  coarse = {instances * n for n in (*powers[::2], *buckets)}
  sizes.sort(key=lambda size: _rank(size, coarse))

  def ready(size: tuple[int, int, int]) -> Callable[[], object]:
    num_requests, num_rows, num_steps = size
    return engine.idle_step(num_requests // instances, num_rows // instances, num_steps)

  found = seconds_within(
    [functools.partial(ready, size) for size in sizes],
    [float(num_rows * num_steps) for _, num_rows, num_steps in sizes],
    seconds,
    clock=clock,
  )
  known = {size: took for size, took in zip(sizes, found, strict=True) if took < math.inf}
  of_rows = {num_rows: took for (n, num_rows, k), took in known.items() if k == 1 and n == num_rows}
  rows = sorted(of_rows)
  # A smaller step never takes longer, and noise only adds: take the minimum over larger steps.
  least = np.minimum.accumulate([of_rows[n] for n in reversed(rows)])[::-1].tolist()
  times = StepTimes(
    rows=tuple(rows),
    seconds=tuple(least),
    draft_seconds=DRAFT_SECONDS,
    drafting_seconds=DRAFTING_SECONDS,
  )
  # Likewise a visit takes no longer than separate steps, and few paths no longer than many.
  visits = [
    (n, k, min(took, k * times.step(n, n))) for (n, _, k), took in sorted(known.items()) if k > 1
  ]
  of_paths = [
    (n, size, min(took, times.step(size, size)))
    for (n, size, k), took in sorted(known.items())
    if k == 1 and n < size
  ]
  return dataclasses.replace(times, paths=tuple(of_paths), visits=tuple(visits))


def _rank(size: tuple[int, int, int], coarse: Container[int]) -> tuple[int, int]:
  """Returns a sort key of steps (requests, rows, steps of a visit), most informative first."""
  num_requests, num_rows, num_steps = size
  if num_requests < num_rows:
    return (2 if num_rows <= 5 * num_requests else 4), num_rows
  if num_steps > 1:
    return 1 if num_requests in coarse else 3, num_rows * num_steps
  return 0 if num_rows in coarse else 3, num_rows


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
  most = engine.config.batch_size_buckets[-1]

  def ready(size: tuple[int, int]) -> Callable[[], object]:
    requests, rows = (min(-(-count // engine.data_parallel_size), most) for count in size)
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
