"""A run's drafts: of the group's own texts, as many as this engine's step times make pay."""

from __future__ import annotations

import numpy as np

from seerjax.engine import engine as engine_lib, timing
from seerjax.rollout import groups as groups_lib
from seerjax.run.config import RunConfig
from seerjax.speculation import budget as budget_lib, statistics, suffix_drafter

# Host seconds of a request's draft, and of a step that drafts for anybody: 0.35 to 0.6 ms were
# measured for a single request, most of them to show its tree what the siblings said since.
DRAFT_SECONDS, DRAFTING_SECONDS = 2e-5, 4e-4


def drafter_for(config: RunConfig, engine: engine_lib.Engine) -> suffix_drafter.SuffixDrafter:
  """Returns a drafter of the groups' own texts, with a budget for this engine's step times."""
  # Times rise in stairs, one a tile of rows and one a bucket: a draft of a few rows is cheap on one
  # of them and dear on its edge, so that the first hundred rows are measured closely.
  buckets = engine.config.row_buckets
  powers = [2**power for power in range(buckets[-1].bit_length())]
  of_instance = {*powers, *range(4, 129, 4), *buckets, *(bucket + 1 for bucket in buckets)}
  rows = sorted(engine.num_instances * n for n in of_instance if n <= buckets[-1])
  seconds = timing.step_seconds(engine, rows)
  # A smaller step never takes longer, and noise only adds: no more than the fastest of the larger.
  least = np.minimum.accumulate([seconds[count] for count in reversed(rows)])[::-1].tolist()
  times = budget_lib.StepTimes(
    rows=tuple(rows),
    seconds=tuple(least),
    draft_seconds=DRAFT_SECONDS,
    drafting_seconds=DRAFTING_SECONDS,
  )
  return suffix_drafter.SuffixDrafter(
    budget=budget_lib.Budget(times, config.budget),
    is_probe=lambda request_id: groups_lib.place_of(request_id)[2] == 0,
  )


def take_drafts(engine: engine_lib.Engine) -> statistics.Acceptance:
  """Returns what came of the engine's drafts since this was asked last."""
  drafter = engine.drafter
  if not isinstance(drafter, suffix_drafter.SuffixDrafter):
    return statistics.Acceptance()
  found, drafter.acceptance = drafter.acceptance, statistics.Acceptance()
  return found
