"""Applies one edit to a plan in place: a verb, a run, a shape, a machine and an amount.

`edits.PlanEdits` documents the verbs.
"""

from __future__ import annotations

import numpy as np

from experiments.problems.apple_machines.rules import KINDS, TURNS
from seerjax import compiled

# Verbs. Their ids are their tokens; STOP ends a sentence.
STOP, PAINT, INSERT, DELETE, MOVE, SLIDE, CHANGE, SWAP, REKIND = range(9)
VERBS = ("stop", "paint", "insert", "delete", "move", "slide", "change", "swap", "rekind")
# Thresholds of `shape` where it selects a variant of a verb instead of a position.
SHAPES, _FIRST_CUT, _SECOND_CUT = 16, 6, 11
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 25, 32, 40, 64, 100)  # Turns.
SHIFTS = (-30, -16, -10, -6, -4, -3, -2, -1, 1, 2, 3, 4, 6, 10, 16, 30)  # Turns.

EDIT_TOKENS, EDITS = 5, 4


@compiled.function
def clean(machines: np.ndarray, ends: np.ndarray, num_runs: int) -> int:
  """Clips ends, drops empty runs and joins equal neighbours; returns the number of runs."""
  kept, before = 0, 0
  for run in range(num_runs):
    end = min(ends[run], TURNS)
    if end <= before:
      continue
    if kept > 0 and machines[kept - 1] == machines[run]:
      ends[kept - 1] = end
    else:
      machines[kept], ends[kept] = machines[run], end
      kept += 1
    before = end
  return kept


@compiled.function
def _write(
  machines: np.ndarray,
  ends: np.ndarray,
  num_runs: int,
  start: int,
  length: int,
  machine: int,
  is_later: bool,
) -> int:
  """Writes a run at turn `start`, over the plan or, with `is_later`, delaying the rest of it.

  The plan is at least `start` turns long. Returns the number of runs.
  """
  old_machines, old_ends = machines[:num_runs].copy(), ends[:num_runs].copy()
  made, before, stop = 0, 0, min(start + length, TURNS)
  for run in range(num_runs):
    if before < start:
      machines[made], ends[made] = old_machines[run], min(old_ends[run], start)
      made += 1
    before = old_ends[run]
  machines[made], ends[made] = machine, stop
  made += 1
  shift = stop - start if is_later else 0
  passed = start if is_later else stop
  for run in range(num_runs):
    if old_ends[run] > passed:
      machines[made], ends[made] = old_machines[run], old_ends[run] + shift
      made += 1
  return clean(machines, ends, made)


@compiled.function
def edit(
  machines: np.ndarray,
  ends: np.ndarray,
  num_runs: int,
  verb: int,
  run: int,
  shape: int,
  machine: int,
  amount: int,
) -> int:
  """Changes a plan in place by one edit; returns its number of runs.

  Args:
    machines, ends: the plan, with room for two more runs.
    num_runs: number of runs of the plan.
    verb, run, shape, machine: as in the language; any run from 0 on.
    amount: turns; may be negative for move and slide.
  """
  if verb in (PAINT, INSERT):
    has_end = num_runs == 0 or ends[num_runs - 1] < TURNS
    run %= num_runs + 1 if has_end else num_runs
    start = ends[run - 1] if run > 0 else 0
    if run < num_runs:
      start += (ends[run] - start) * shape // SHAPES
    return _write(machines, ends, num_runs, start, amount, machine, verb == INSERT)
  if num_runs == 0:
    return 0
  run %= num_runs
  if verb == DELETE:
    start, end = ends[run - 1] if run > 0 else 0, ends[run]
    if shape < _FIRST_CUT and run > 0:
      ends[run - 1] = end
    elif shape >= _SECOND_CUT:
      for later in range(run + 1, num_runs):
        ends[later] -= end - start
    # Otherwise the next run starts earlier.
    for later in range(run, num_runs - 1):
      machines[later], ends[later] = machines[later + 1], ends[later + 1]
    return clean(machines, ends, num_runs - 1)
  if verb == MOVE:
    least = ends[run - 1] if run > 0 else 0
    most = ends[run + 1] if run + 1 < num_runs else TURNS
    ends[run] = min(max(ends[run] + amount, least), most)
  elif verb == SLIDE:
    for later in range(run, min(run + 1 + shape, num_runs)):
      ends[later] = min(max(ends[later] + amount, 0), TURNS)
    # Runs before and after are clipped.
    for later in range(1, num_runs):
      if later <= run:
        ends[later - 1] = min(ends[later - 1], ends[run])
      else:
        ends[later] = max(ends[later], ends[later - 1])
  elif verb == CHANGE:
    level, kind = machines[run] // KINDS, machines[run] % KINDS
    if shape < _FIRST_CUT or shape >= _SECOND_CUT:
      level = machine // KINDS
    if shape >= _FIRST_CUT:
      kind = machine % KINDS
    machines[run] = level * KINDS + kind
  elif verb == SWAP and run + 1 < num_runs:
    start = ends[run - 1] if run > 0 else 0
    machines[run], machines[run + 1] = machines[run + 1], machines[run]
    ends[run] = start + ends[run + 1] - ends[run]
  elif verb == REKIND:
    kind = machines[run] % KINDS
    for other in range(run if 2 * shape >= SHAPES else 0, num_runs):
      if machines[other] % KINDS == kind:
        machines[other] += machine % KINDS - kind
  return clean(machines, ends, num_runs)
