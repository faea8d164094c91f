"""Measures the drafting times of a draft model, for budgets."""

from __future__ import annotations

from collections.abc import Callable
import functools
import math

from seerjax.engine import timing
from seerjax.engine.drafting import DraftQuery
from seerjax.engine.engine import Engine
from seerjax.engine.step_times import DRAFT_SECONDS, DRAFTING_SECONDS, DraftTimes
from seerjax.speculation.draft_model import ModelDrafter

SUFFIX_TIMES = DraftTimes(once=DRAFTING_SECONDS, request=DRAFT_SECONDS)
# For a draft model's program: tokens of a request when it is measured, the shortest draft, and the
# maximum number of requests that draft at once.
NUM_TOKENS, SHORTEST, MOST_REQUESTS = 16, 1, 16


def measure_model(drafter: ModelDrafter, engine: Engine, longest: int) -> DraftTimes:
  """Returns the times of a draft model's program, from few and many requests and tokens.

  Calls are repeated within `timing.SECONDS`, so a large draft model is measured only once.

  Each call reads one new token per request, as during decoding. The host's work on verified tokens
  is added, as for suffix-tree drafts. The drafter is left as it was.

  Args:
    drafter: a drafter that has not drafted yet.
    engine: its target engine.
    longest: maximum draft length.
  """
  room = drafter.program.context - NUM_TOKENS - longest - 1
  most = min(
    engine.config.max_num_seqs * engine.data_parallel_size, len(drafter.slots), MOST_REQUESTS
  )
  tokens = {f"\0measured {place}": [0] * NUM_TOKENS for place in range(most)}

  def ready(num_requests: int, length: int) -> Callable[[], object]:
    queries = []
    for name, sequence in [*tokens.items()][:num_requests]:
      sequence.append(0)
      if len(sequence) > NUM_TOKENS + max(room, 1):
        del sequence[NUM_TOKENS:]
      queries.append(DraftQuery(name, "", sequence, 1, length))
    lengths, widths = [length] * num_requests, [drafter.config.width] * num_requests
    return functools.partial(drafter.draft_up_to, queries, lengths, widths)

  corners = [(n, length) for n in (1, most) for length in (SHORTEST, longest)]
  found = timing.seconds_within(
    [functools.partial(ready, *corner) for corner in corners],
    [float(n * length) for n, length in corners],
    timing.SECONDS,
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
