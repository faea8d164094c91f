"""Measures what an engine's steps take, for budgets."""

from __future__ import annotations

import numpy as np

from seerjax.engine import timing
from seerjax.engine.engine import Engine
from seerjax.speculation.budget import StepTimes

# Host seconds of a request's draft, and of a step that drafts at all: 0.35 to 0.6 ms were measured
# for a single request, most of them to append to its tree what the siblings wrote since.
DRAFT_SECONDS, DRAFTING_SECONDS = 2e-5, 4e-4


def measure(engine: Engine) -> StepTimes:
  """Returns the seconds of an engine's steps by their rows."""
  # Times rise in stairs, one a tile of rows and one a bucket: a draft of a few rows is cheap on one
  # of them and dear on its edge, so that the first hundred rows are measured closely.
  buckets = engine.config.row_buckets
  powers = [2**power for power in range(buckets[-1].bit_length())]
  of_instance = {*powers, *range(4, 129, 4), *buckets, *(bucket + 1 for bucket in buckets)}
  rows = sorted(engine.num_instances * n for n in of_instance if n <= buckets[-1])
  seconds = timing.step_seconds(engine, rows)
  # A smaller step never takes longer, and noise only adds: no more than the fastest of the larger.
  least = np.minimum.accumulate([seconds[count] for count in reversed(rows)])[::-1].tolist()
  return StepTimes(
    rows=tuple(rows),
    seconds=tuple(least),
    draft_seconds=DRAFT_SECONDS,
    drafting_seconds=DRAFTING_SECONDS,
  )
