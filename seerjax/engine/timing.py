"""How long a step of so many rows takes, measured before the first request comes."""

from __future__ import annotations

from collections.abc import Iterable
import math
import time

import jax
from jax.experimental import multihost_utils
import numpy as np

from seerjax.engine import checks
from seerjax.engine.engine import Engine


def step_seconds(engine: Engine, rows: Iterable[int], *, repeats: int = 6) -> dict[int, float]:
  """Returns the seconds of a step that samples so many rows, over all instances together.

  Each time is the least of `repeats`, between which all others are measured, so that a slow second
  spoils none. Process 0 measures for all.

  Args:
    engine: without unfinished requests.
    rows: of all instances; more than the last row buckets hold are as many as those hold.
    repeats: steps of each number of rows.

  Raises:
    ValueError: if requests are unfinished, whose pages a step would change, or a number is none.
  """
  rows = sorted(set(rows))
  checks.whole("step_seconds: repeats", repeats, 1, None, "6 are usual")
  for count in rows:
    checks.whole("step_seconds: rows", count, 1, None, "a step has a row at least")
  found: dict[int, float] = dict.fromkeys(rows, math.inf)
  for repeat in range(repeats + 1):  # The first compiles.
    for count in found:
      of_instance = min(-(-count // engine.num_instances), engine.config.row_buckets[-1])
      run = engine.idle_step(of_instance)
      begin = time.monotonic()
      run()
      if repeat:
        found[count] = min(found[count], time.monotonic() - begin)
  if jax.process_count() > 1:
    values = np.asarray(list(found.values()), np.float64)
    values = multihost_utils.broadcast_one_to_all(values)
    found = dict(zip(found, values.tolist(), strict=True))
  return found
