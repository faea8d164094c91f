"""Measures an engine's step times within about a second, as a table for budgets.

    most informative steps first -> measured within a time limit -> the rest estimated by rows

The cost of a step that is not measured is interpolated by rows between measured steps, and grows in
proportion beyond the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Container
import dataclasses
import functools
import math

import numpy as np

from seerjax.engine import timing
from seerjax.engine.drafting import DraftQuery
from seerjax.engine.engine import Engine
from seerjax.engine.step_times import DraftTimes, StepTimes
from seerjax.speculation.draft_model import ModelDrafter

# Host seconds per drafted request and per step that drafts at all. Measured: 0.35 ms for two
# requests and 0.57 ms for twelve. A third of it is appending the siblings' new tokens to trees, and
# 0.02 ms per request is building the step's arrays and reading its samples.
DRAFT_SECONDS, DRAFTING_SECONDS = 4e-5, 3.5e-4
SUFFIX_TIMES = DraftTimes(once=DRAFTING_SECONDS, request=DRAFT_SECONDS)
# For a draft model's program: tokens of a request when it is measured, the shortest draft, and the
# maximum number of requests that draft at once.
SAID, SHORTEST, MOST_REQUESTS = 16, 1, 16


# Draft lengths for the rows of paths.
PATH_LENGTHS = (1, 2, 4, 8, 16)
# Time limit for measuring, before a run or a server starts.
SECONDS = 1.0


def measure(
  engine: Engine, *, seconds: float = SECONDS, clock: Callable[[], float] = timing.WALL
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
  buckets, instances = engine.config.row_buckets, engine.num_instances
  powers = [2**power for power in range(buckets[-1].bit_length())]
  of_instance = {*powers, *range(4, 129, 4), *buckets, *(bucket + 1 for bucket in buckets)}
  rows = sorted(instances * n for n in of_instance if n <= buckets[-1])
  most_requests = min(engine.config.max_sequences, buckets[-1])
  requests = sorted({n for n in powers if n <= most_requests} | {most_requests})
  most_rows, longest = buckets[-1], engine.config.max_context // 2
  paths = [
    (instances * count, instances * count * (1 + length))
    for count in requests
    for length in PATH_LENGTHS
    if count * (1 + length) <= most_rows and length < longest
  ]
  steps = min(engine.config.steps_per_visit, longest)
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

  found = timing.seconds_within(
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


def measure_model(drafter: ModelDrafter, engine: Engine, longest: int) -> DraftTimes:
  """Returns the times of a draft model's program, from few and many requests and tokens.

  Calls are repeated within `SECONDS`, so a large draft model is measured only once.

  Each call reads one new token per request, as during decoding. The host's work on verified tokens
  is added, as for suffix-tree drafts. The drafter is left as it was.

  Args:
    drafter: a drafter that has not drafted yet.
    engine: its target engine.
    longest: maximum draft length.
  """
  room = drafter.program.context - SAID - longest - 1
  most = min(engine.config.max_sequences * engine.num_instances, len(drafter.slots), MOST_REQUESTS)
  tokens = {f"\0measured {place}": [0] * SAID for place in range(most)}

  def ready(num_requests: int, length: int) -> Callable[[], object]:
    queries = []
    for name, said in [*tokens.items()][:num_requests]:
      said.append(0)
      if len(said) > SAID + max(room, 1):
        del said[SAID:]
      queries.append(DraftQuery(name, "", said, 1, length))
    lengths, widths = [length] * num_requests, [drafter.config.width] * num_requests
    return functools.partial(drafter.draft_up_to, queries, lengths, widths)

  corners = [(n, length) for n in (1, most) for length in (SHORTEST, longest)]
  found = timing.seconds_within(
    [functools.partial(ready, *corner) for corner in corners],
    [float(n * length) for n, length in corners],
    SECONDS,
  )
  drafter.begin_anew()
  # A corner that was too expensive to measure is estimated in proportion to its work.
  (first, *_), least = corners, found[0]
  found = [
    least * n * length / math.prod(first) if took == math.inf else took
    for (n, length), took in zip(corners, found, strict=True)
  ]
  one_short, one_long, all_short, all_long = found
  more, further = max(most - 1, 1), max(longest - SHORTEST, 1)
  # Fits t(n, l) = once + n request + l position + n l token through the four corners; all
  # coefficients are at least 0, whatever the noise.
  token = max((all_long - all_short - one_long + one_short) / (more * further), 0.0)
  position = max((one_long - one_short) / further - token, 0.0)
  request = max((all_short - one_short) / more - SHORTEST * token, 0.0)
  once = max(one_short - request - SHORTEST * (position + token), 0.0)
  host = SUFFIX_TIMES
  return DraftTimes(
    once=once + host.once, request=request + host.request, position=position, token=token
  )
