"""Plans as arrays, played by compiled functions: fast for search, exactly for the verdict.

A plan is `machines` (level * 10 + kind) and `ends` (turns), both i64, and its number of runs.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
import math
from typing import NamedTuple

import numpy as np

from experiments.problems.apple_machines import rules
from experiments.problems.apple_machines.rules import KINDS, LEVELS, TURNS, Instance, Run
from seerjax import compiled
from seerjax.discovery import environment

# Maximum runs of a plan: those that the language can address. Sentences and annealer keep to it.
MAX_RUNS = 32

# Limit of the integer kernel, far enough from 2**63 for a sum and its rounding.
_SAFE = 2.0**61
_TOO_MANY = -1


def final_apples(problem: Instance, runs: Sequence[Run]) -> int:
  """Returns the exact number of apples at the end; takes microseconds where int64 suffices."""
  tables = tables_of(problem)
  machines, ends = arrays(runs)
  apples = _exact(tables.whole_apples, tables.whole_costs, machines, ends, len(runs))
  return rules.trace(problem, runs)[-1].apples if apples == _TOO_MANY else int(apples)


class Tables(NamedTuple):
  """An input as arrays: f64 for search, i64 for verdicts. Costs are [level, kind]."""

  apples: np.ndarray
  costs: np.ndarray
  whole_apples: np.ndarray
  whole_costs: np.ndarray


@functools.lru_cache(maxsize=256)
def tables_of(problem: Instance) -> Tables:
  """Returns an input's arrays; they must not be modified."""
  apples, costs = np.array(problem.apples, np.int64), np.array(problem.costs, np.int64)
  return Tables(apples.astype(np.float64), costs.astype(np.float64), apples, costs)


def plan(artefact: environment.Artefact) -> tuple[Run, ...]:
  """Returns the runs of a plan; raises ValueError if the artefact is not a plan."""
  runs = rules.parse(artefact)
  if isinstance(runs, str):
    raise ValueError(f"apple_machines: got no plan ({runs}); verify it first.")
  return runs


def arrays(runs: Sequence[Run]) -> tuple[np.ndarray, np.ndarray]:
  """Returns machines (level * 10 + kind) and ends, i64, with room for edits."""
  machines, ends = np.zeros(TURNS + 4, np.int64), np.zeros(TURNS + 4, np.int64)
  if runs:
    table = np.array(runs, np.int64)
    machines[: len(runs)] = table[:, 0] * KINDS + table[:, 1]
    ends[: len(runs)] = table[:, 2]
  return machines, ends


def artefact(machines: np.ndarray, ends: np.ndarray, num_runs: int) -> list[list[int]]:
  return [
    [machine // KINDS, machine % KINDS, end]
    for machine, end in zip(machines[:num_runs].tolist(), ends[:num_runs].tolist())
  ]


@compiled.function
def play(
  apples_of: np.ndarray,
  costs: np.ndarray,
  machines: np.ndarray,
  ends: np.ndarray,
  num_runs: int,
  bought: np.ndarray,
) -> float:
  """Returns log2(apples) of a plan in float64; counts purchases by run in `bought` if it has room.

  Only kinds with a bought machine are simulated. Apples beyond 2**53 are rounded, which suffices
  for search; `_exact` computes the value.
  """
  powers, counts = np.zeros((KINDS, LEVELS)), np.ones((KINDS, LEVELS))
  active, is_active, num_active = np.zeros(KINDS, np.int64), np.zeros(KINDS, np.int64), 0
  apples, run = 1.0, 0
  for turn in range(TURNS):
    while run < num_runs and turn >= ends[run]:
      run += 1
    if run < num_runs:
      level, kind = machines[run] // KINDS, machines[run] % KINDS
      price = costs[level, kind] * (powers[kind, level] + 1.0)
      if apples >= price:
        apples -= price
        powers[kind, level] += 1.0
        if len(bought) > 0:
          bought[run] += 1
        if is_active[kind] == 0:
          is_active[kind] = 1
          active[num_active] = kind
          num_active += 1
    for place in range(num_active):
      kind = active[place]
      apples += apples_of[kind] * counts[kind, 0] * powers[kind, 0]
      counts[kind, 0] += counts[kind, 1] * powers[kind, 1]
      counts[kind, 1] += counts[kind, 2] * powers[kind, 2]
      counts[kind, 2] += counts[kind, 3] * powers[kind, 3]
  return math.log2(apples)


@compiled.function
def _exact(
  apples_of: np.ndarray, costs: np.ndarray, machines: np.ndarray, ends: np.ndarray, num_runs: int
) -> int:
  """Returns the exact apples of a plan in int64, or _TOO_MANY if a number might overflow.

  Every product is first computed in float64, and in integers only if that is below 2**61: the float
  has a relative error below 2**-51 (at most three roundings), so the product is below 2**62. Every
  sum is of two such numbers, below 2**63, and is checked to be below 2**61 before it is used again.
  Prices are below 2**50.
  """
  powers, counts = (
    np.zeros((KINDS, LEVELS), np.int64),
    np.ones((KINDS, LEVELS), np.int64),
  )
  apples, run = np.int64(1), 0
  for turn in range(TURNS):
    while run < num_runs and turn >= ends[run]:
      run += 1
    if run < num_runs:
      level, kind = machines[run] // KINDS, machines[run] % KINDS
      price = costs[level, kind] * (powers[kind, level] + 1)
      if apples >= price:
        apples -= price
        powers[kind, level] += 1
    for kind in range(KINDS):
      if powers[kind, 0] > 0:
        factor = apples_of[kind] * powers[kind, 0]
        if float(factor) * float(counts[kind, 0]) >= _SAFE:
          return _TOO_MANY
        apples += factor * counts[kind, 0]
        if float(apples) >= _SAFE:
          return _TOO_MANY
      for level in range(1, LEVELS):
        if powers[kind, level] > 0:
          if float(counts[kind, level]) * float(powers[kind, level]) >= _SAFE:
            return _TOO_MANY
          counts[kind, level - 1] += counts[kind, level] * powers[kind, level]
          if float(counts[kind, level - 1]) >= _SAFE:
            return _TOO_MANY
  return int(apples)
