"""Measures an engine's steps within a second, as the table that budgets reckon with.

    most informative steps first -> measured, while the budget lasts -> the rest by the rows

A step that is not measured is taken to cost what the measured ones say of its rows: between two of
them by a line, beyond the largest in proportion.
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
from seerjax.speculation.draft_model import ModelDrafter
from seerjax.speculation.times import DraftTimes, StepTimes

# Host seconds of a request's draft, and of a step that drafts at all: 0.35 ms were measured for two
# requests and 0.57 for twelve, a third of it to append to trees what the siblings wrote since, and
# 0.02 for each request in the making of the step's arrays and the reading of its samples.
DRAFT_SECONDS, DRAFTING_SECONDS = 4e-5, 3.5e-4
SUFFIX_TIMES = DraftTimes(once=DRAFTING_SECONDS, request=DRAFT_SECONDS)
# Of a draft model's program: tokens that a request has said when it is measured, the least length,
# and how many requests draft at once, at most.
SAID, SHORTEST, MOST_REQUESTS = 16, 1, 16


# Rows of paths: drafts of so many tokens.
PATH_LENGTHS = (1, 2, 4, 8, 16)
# Of measuring before a run or a server begins.
SECONDS = 1.0


def measure(
  engine: Engine, *, seconds: float = SECONDS, clock: Callable[[], float] = timing.WALL
) -> StepTimes:
  """Returns the seconds of an engine's steps by their requests and rows, and of its visits.

  Args:
    engine: without unfinished requests.
    seconds: that the steps may take together, compilation not counted; one step is always
      measured. With `math.inf` all are.
    clock: in seconds; `time.process_time` where others use the machine, too.
  """
  # Times rise in stairs, one a tile of rows and one a bucket: a draft of a few rows is cheap on one
  # of them and dear on its edge, so that the first hundred rows are measured closely.
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
  # Powers of four of single rows and the buckets tell most of a machine; then visits, short paths,
  # and what lies between.
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
  # A smaller step never takes longer, and noise only adds: no more than the fastest of the larger.
  least = np.minimum.accumulate([of_rows[n] for n in reversed(rows)])[::-1].tolist()
  times = StepTimes(
    rows=tuple(rows),
    seconds=tuple(least),
    draft_seconds=DRAFT_SECONDS,
    drafting_seconds=DRAFTING_SECONDS,
  )
  # Nor does a visit take longer than its steps alone, or rows in few paths than in many.
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
  """Returns what sorts steps (requests, rows, steps of a visit) by how much they tell."""
  num_requests, num_rows, num_steps = size
  if num_requests < num_rows:
    return (2 if num_rows <= 5 * num_requests else 4), num_rows
  if num_steps > 1:
    return 1 if num_requests in coarse else 3, num_rows * num_steps
  return 0 if num_rows in coarse else 3, num_rows


def measure_model(drafter: ModelDrafter, engine: Engine, longest: int) -> DraftTimes:
  """Returns the seconds of a draft model's program, from few and many requests and tokens.

  Calls are measured again while `SECONDS` last, so that a large draft model is measured once.

  Each call reads a token of each request behind those that it has read before, as while requests
  decode. The host's work on what is verified is added, as for a suffix tree's drafts. The drafter
  is left as it was found: nothing is drafted yet.

  Args:
    drafter: that has not drafted yet.
    engine: that it drafts for.
    longest: tokens of a draft at most.
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
  # A corner that was too dear to measure costs what its work says.
  (first, *_), least = corners, found[0]
  found = [
    least * n * length / math.prod(first) if took == math.inf else took
    for (n, length), took in zip(corners, found, strict=True)
  ]
  one_short, one_long, all_short, all_long = found
  more, further = max(most - 1, 1), max(longest - SHORTEST, 1)
  # t(n, l) = once + n request + l position + n l token, through the four corners; no part is less
  # than nothing, whatever the noise.
  token = max((all_long - all_short - one_long + one_short) / (more * further), 0.0)
  position = max((one_long - one_short) / further - token, 0.0)
  request = max((all_short - one_short) / more - SHORTEST * token, 0.0)
  once = max(one_short - request - SHORTEST * (position + token), 0.0)
  host = SUFFIX_TIMES
  return DraftTimes(
    once=once + host.once, request=request + host.request, position=position, token=token
  )
