"""Measures what an engine's steps take, for budgets."""

from __future__ import annotations

import dataclasses

import numpy as np

from seerjax.engine import timing
from seerjax.engine.engine import Engine
from seerjax.speculation.times import StepTimes

# Host seconds of a request's draft, and of a step that drafts at all: 0.35 ms were measured for two
# requests and 0.57 for twelve, a third of it to append to trees what the siblings wrote since, and
# 0.02 for each request in the making of the step's arrays and the reading of its samples.
DRAFT_SECONDS, DRAFTING_SECONDS = 4e-5, 3.5e-4


# Requests and rows of paths: drafts of so many tokens, in steps of so many rows at most.
PATH_LENGTHS, MOST_PATH_ROWS = (1, 2, 4, 8, 16), 256


def measure(engine: Engine) -> StepTimes:
  """Returns the seconds of an engine's steps by their requests and rows, and of its visits."""
  # Times rise in stairs, one a tile of rows and one a bucket: a draft of a few rows is cheap on one
  # of them and dear on its edge, so that the first hundred rows are measured closely.
  buckets, instances = engine.config.row_buckets, engine.num_instances
  powers = [2**power for power in range(buckets[-1].bit_length())]
  of_instance = {*powers, *range(4, 129, 4), *buckets, *(bucket + 1 for bucket in buckets)}
  rows = sorted(instances * n for n in of_instance if n <= buckets[-1])
  most_requests = min(engine.config.max_sequences, buckets[-1])
  requests = sorted({n for n in powers if n <= most_requests} | {most_requests})
  most_rows, longest = min(MOST_PATH_ROWS, buckets[-1]), engine.config.max_context // 2
  paths = [
    (instances * count, instances * count * (1 + length))
    for count in requests
    for length in PATH_LENGTHS
    if count * (1 + length) <= most_rows and length < longest
  ]
  seconds = timing.step_seconds(engine, [*((count, count) for count in rows), *paths])
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
    of_visit = timing.step_seconds(engine, sizes, num_steps=steps)
    # Nor does a visit take longer than its steps alone, or rows in few paths than in many.
    visits = [(n, steps, min(of_visit[n, n], steps * times.step(n, n))) for n, _ in sizes]
  of_paths = [(n, size, min(seconds[n, size], times.step(size, size))) for n, size in paths]
  return dataclasses.replace(times, paths=tuple(of_paths), visits=tuple(visits))
