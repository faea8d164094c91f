"""Measures what an engine's steps take, for budgets."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools

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


def measure(engine: Engine, *, clock: Callable[[], float] = timing.WALL) -> StepTimes:
  """Returns the seconds of an engine's steps by their requests and rows, and of its visits.

  Args:
    engine: without unfinished requests.
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
  seconds = timing.step_seconds(engine, [*((count, count) for count in rows), *paths], clock=clock)
  # A smaller step never takes longer, and noise only adds: no more than the fastest of the larger.
  least = np.minimum.accumulate([seconds[n, n] for n in reversed(rows)])[::-1].tolist()
  times = StepTimes(
    rows=tuple(rows),
    seconds=tuple(least),
    draft_seconds=DRAFT_SECONDS,
    drafting_seconds=DRAFTING_SECONDS,
  )
  steps, visits = min(engine.config.steps_per_visit, longest), []
  if steps > 1:
    sizes = [(instances * count, instances * count) for count in requests]
    of_visit = timing.step_seconds(engine, sizes, num_steps=steps, clock=clock)
    # Nor does a visit take longer than its steps alone, or rows in few paths than in many.
    visits = [(n, steps, min(of_visit[n, n], steps * times.step(n, n))) for n, _ in sizes]
  of_paths = [(n, size, min(seconds[n, size], times.step(size, size))) for n, size in paths]
  return dataclasses.replace(times, paths=tuple(of_paths), visits=tuple(visits))


def measure_model(drafter: ModelDrafter, engine: Engine, longest: int) -> DraftTimes:
  """Returns the seconds of a draft model's program, from few and many requests and tokens.

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
  found = timing.least_seconds([functools.partial(ready, *corner) for corner in corners])
  drafter.begin_anew()
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
