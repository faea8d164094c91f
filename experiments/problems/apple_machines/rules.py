"""The game: inputs, plans, an exact simulator with integers of any size, and points."""

from __future__ import annotations

from collections.abc import Sequence
import decimal
import math
from typing import Any, NamedTuple

import numpy as np

from experiments.problems import atcoder
from seerjax.discovery import environment

KINDS, LEVELS, TURNS = 10, 4, 500
MACHINES = LEVELS * KINDS

FIRST_APPLES = 1

PUBLISHED = atcoder.published(
  (848_414_228, "TTT-Discover (gpt-oss-120b, C++)", 2026),
  (848_373_282, "ALE-Agent", 2025),
  (847_674_723, "the contest's best human", 2025),
  (772_429_752, "best of 25,600 (gpt-oss-120b, C++)", 2026),
)

Run = tuple[int, int, int]


class Instance(NamedTuple):
  """One input of the problem.

  Attributes:
    apples: A by kind.
    costs: C by level and kind.
  """

  apples: tuple[int, ...]
  costs: tuple[tuple[int, ...], ...]


def instance(index: int) -> Instance:
  """Returns input `index`, drawn as in the contest.

  A is 1 and nine draws of round(10^U(0,2)), sorted; C = round(A 500^level 10^U(0,2)), the first 1.
  """
  draws = np.random.Generator(np.random.PCG64([58, index]))
  others = np.sort(np.rint(10.0 ** draws.uniform(0.0, 2.0, KINDS - 1)))
  apples = np.concatenate([[1.0], others])
  levels = 500.0 ** np.arange(LEVELS)[:, None]
  costs = np.rint(apples[None, :] * levels * 10.0 ** draws.uniform(0.0, 2.0, (LEVELS, KINDS)))
  costs[0, 0] = 1.0
  return Instance(
    apples=tuple(int(a) for a in apples),
    costs=tuple(tuple(int(c) for c in row) for row in costs),
  )


class Turn(NamedTuple):
  """Result of one turn.

  Attributes:
    run: index of the run of this turn; -1 after the last run.
    is_bought: whether the run's machine was bought.
    apples: apples at the end of the turn.
  """

  run: int
  is_bought: bool
  apples: int


def trace(problem: Instance, runs: Sequence[Run], turns: int = TURNS) -> list[Turn]:
  """Returns a plan's turns, in integers of any size; the reference of the fast simulators."""
  counts = [[1] * KINDS for _ in range(LEVELS)]
  powers = [[0] * KINDS for _ in range(LEVELS)]
  apples, run, done = FIRST_APPLES, 0, []
  for turn in range(turns):
    while run < len(runs) and turn >= runs[run][2]:
      run += 1
    is_bought = False
    if run < len(runs):
      level, kind, _ = runs[run]
      price = problem.costs[level][kind] * (powers[level][kind] + 1)
      if apples >= price:
        apples -= price
        powers[level][kind] += 1
        is_bought = True
    for kind in range(KINDS):
      apples += problem.apples[kind] * counts[0][kind] * powers[0][kind]
      for level in range(1, LEVELS):
        counts[level - 1][kind] += counts[level][kind] * powers[level][kind]
    done.append(Turn(run if run < len(runs) else -1, is_bought, apples))
  return done


def points(apples: int) -> int:
  """Returns round(1e5 * log2(apples)), exactly.

  If the float is too close to a half, 60 decimals decide. An exact half cannot occur: no power of 2
  with an odd exponent over 2e5 is an integer, and 1 has 0 points.
  """
  near = 1e5 * math.log2(apples)
  if abs(near - math.floor(near) - 0.5) > 1e-6:
    return round(near)
  with decimal.localcontext() as context:
    context.prec = 60
    fine = 100_000 * decimal.Decimal(apples).ln() / decimal.Decimal(2).ln()
    return int(fine.to_integral_value(rounding=decimal.ROUND_HALF_UP))


def parse(artefact: Any) -> tuple[Run, ...] | str:
  """Returns the runs of a plan, or the reason why the artefact is not a plan."""
  if not isinstance(artefact, list | tuple):
    return f"plan: got {type(artefact).__name__}, expected a list of runs [level, kind, end]"
  if len(artefact) > TURNS:
    return f"plan: got {len(artefact)} runs, expected at most {TURNS}, one a turn"
  runs, before = [], 0
  for place, run in enumerate(artefact):
    if not isinstance(run, list | tuple):
      return f"plan[{place}]: got {type(run).__name__}, expected [level, kind, end]"
    if len(run) != 3:
      return f"plan[{place}]: got {len(run)} entries, expected [level, kind, end]"
    level, kind, end = run
    # Excludes bool, which is a subclass of int.
    if not (type(level) is int and type(kind) is int and type(end) is int):
      types = ", ".join(type(entry).__name__ for entry in run)
      return f"plan[{place}]: got [{types}], expected three integers [level, kind, end]"
    if not 0 <= level < LEVELS:
      return f"plan[{place}]: got level {environment.shown(level)}, expected 0 to {LEVELS - 1}"
    if not 0 <= kind < KINDS:
      return f"plan[{place}]: got kind {environment.shown(kind)}, expected 0 to {KINDS - 1}"
    if not before < end <= TURNS:
      return f"plan[{place}]: got end {environment.shown(end)}, expected {before + 1} to {TURNS}"
    runs.append((level, kind, end))
    before = end
  return tuple(runs)
