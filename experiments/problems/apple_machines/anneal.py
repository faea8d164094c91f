"""The annealer of plans, and the polish at the end of a sentence."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from experiments.problems import xorshift
from experiments.problems.apple_machines import changes, plans
from experiments.problems.apple_machines.changes import (
  CHANGE,
  DELETE,
  EDITS,
  INSERT,
  LENGTHS,
  MOVE,
  PAINT,
  REKIND,
  SHAPES,
  SHIFTS,
  SLIDE,
  SWAP,
  VERBS,
)
from experiments.problems.apple_machines.plans import MAX_RUNS, Tables
from experiments.problems.apple_machines.rules import KINDS, MACHINES, TURNS
from seerjax import compiled

_MASK = 2**64 - 1

# Temperatures of a search, in bits of apples.
TEMPERATURES = (
  0.0, 0.0, 0.002, 0.004, 0.008, 0.015, 0.03, 0.05, 0.08, 0.12, 0.18, 0.25, 0.35, 0.5, 0.7, 1.0,
)  # fmt: skip


class Polish(NamedTuple):
  """The polish at the end of a sentence: searches around the plan, each at a temperature.

  The first search keeps the best plan that it finds. Each further one starts with up to four random
  edits of the annealer, at a random temperature, and is kept only if it ends no worse.

  Attributes:
    steps: simulations per search.
    rounds: searches after the first.
  """

  steps: int
  rounds: int = 0


def polished(
  tables: Tables,
  machines: np.ndarray,
  ends: np.ndarray,
  num_runs: int,
  temperature: float,
  polish: Polish,
  state: np.ndarray,
  max_runs: int,
) -> tuple[np.ndarray, np.ndarray, int]:
  """Polishes a plan, overwriting it; returns its machines, ends and number of runs."""
  _, found, _, machines, ends = anneal(
    tables.apples, tables.costs, machines, ends, num_runs, polish.steps, temperature, temperature,
    state, max_runs,
  )  # fmt: skip
  if polish.rounds:
    found, _ = iterate(
      tables.apples, tables.costs, machines, ends, found, polish.rounds, polish.steps, state
    )
  return machines, ends, found


def seeded(*numbers: int) -> np.ndarray:
  """Returns the state of a kernel's generator, u64[1], from the numbers by Steele's SplitMix64."""
  state = 0
  for number in numbers:
    state = ((state ^ number) + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ state >> 27) * 0x94D049BB133111EB) & _MASK
    state ^= state >> 31
  return np.array([state | 1], np.uint64)


@compiled.function
def below(state: np.ndarray, bound: int) -> int:
  """Returns an integer in [0, bound), for a bound far below 2**32."""
  high = xorshift.bits(state) >> np.uint64(33)
  return int(np.int64((high * np.uint64(bound)) >> np.uint64(31)))


@compiled.function
def _uniform(state: np.ndarray) -> float:
  """Returns a number in (0, 1)."""
  return (below(state, 1 << 30) + 0.5) / (1 << 30)


@compiled.function
def _propose(machines: np.ndarray, ends: np.ndarray, num_runs: int, state: np.ndarray) -> int:
  """Applies one random edit of the annealer to a plan in place; returns its number of runs."""
  draw = below(state, 32)
  run, shape, machine = below(state, max(num_runs, 1)), below(state, 16), below(state, MACHINES)
  amount = int(math.exp(3.0 * _uniform(state)))
  if below(state, 2) == 0:
    amount = -amount
  if num_runs == 0 or draw < 6:
    verb = INSERT if draw == 0 else PAINT
    run, amount = below(state, num_runs + 1), 1 + int(math.exp(4.0 * _uniform(state)))
    # Half of them use a kind of the plan, half start at the beginning of a run.
    if num_runs > 0 and below(state, 2) == 0:
      machine = machine // KINDS * KINDS + machines[max(run - 1, 0)] % KINDS
    if below(state, 2) == 0:
      shape = 0
  elif draw < 9:
    verb = DELETE
  elif draw < 12:
    verb = CHANGE
  elif draw < 15:
    verb = SWAP
  elif draw == 15:
    verb = REKIND
  elif draw < 26:
    verb = MOVE
  else:
    verb, shape = SLIDE, shape // 2
  return changes.edit(machines, ends, num_runs, verb, run, shape, machine, amount)


@compiled.function
def anneal(
  apples_of: np.ndarray,
  costs: np.ndarray,
  machines: np.ndarray,
  ends: np.ndarray,
  num_runs: int,
  steps: int,
  hot: float,
  cold: float,
  state: np.ndarray,
  max_runs: int,
) -> tuple[int, int, float, np.ndarray, np.ndarray]:
  """Anneals a plan in place, from temperature `hot` to `cold` in bits; 0 is hill climbing.

  Returns:
    The plan's number of runs; and number of runs, log2(apples), machines and ends of the best plan
    found, the start included.
  """
  nothing = np.zeros(0, np.int64)
  bits = plans.play(apples_of, costs, machines, ends, num_runs, nothing)
  best, best_runs = bits, num_runs
  best_machines, best_ends = machines.copy(), ends.copy()
  new_machines, new_ends = machines.copy(), ends.copy()
  ratio = math.log(cold / hot) if hot > 0.0 else 0.0
  for step in range(steps):
    new_machines[:num_runs], new_ends[:num_runs] = machines[:num_runs], ends[:num_runs]
    new_runs = _propose(new_machines, new_ends, num_runs, state)
    # Sometimes several edits at once, to cross barriers that no single edit crosses.
    while new_runs <= max_runs and below(state, 4) == 0:
      new_runs = _propose(new_machines, new_ends, new_runs, state)
    if new_runs > max_runs and new_runs > num_runs:
      continue
    new_bits = plans.play(apples_of, costs, new_machines, new_ends, new_runs, nothing)
    temperature = hot * math.exp(ratio * step / steps)
    # A step may lose -log(u) temperatures.
    if new_bits >= bits or (
      temperature > 0.0 and bits - new_bits < -math.log(_uniform(state)) * temperature
    ):
      num_runs, bits = new_runs, new_bits
      machines[:num_runs], ends[:num_runs] = new_machines[:num_runs], new_ends[:num_runs]
      if bits > best:
        best, best_runs = bits, num_runs
        best_machines[:num_runs], best_ends[:num_runs] = machines[:num_runs], ends[:num_runs]
  return num_runs, best_runs, best, best_machines, best_ends


@compiled.function
def iterate(
  apples_of: np.ndarray,
  costs: np.ndarray,
  machines: np.ndarray,
  ends: np.ndarray,
  num_runs: int,
  rounds: int,
  steps: int,
  state: np.ndarray,
) -> tuple[int, float]:
  """Improves a plan in place: random edits, a short annealing, kept if not worse.

  Returns:
    The plan's number of runs, and its log2(apples).
  """
  bits = plans.play(apples_of, costs, machines, ends, num_runs, np.zeros(0, np.int64))
  new_machines, new_ends = machines.copy(), ends.copy()
  for _ in range(rounds):
    new_machines[:num_runs], new_ends[:num_runs] = machines[:num_runs], ends[:num_runs]
    new_runs = num_runs
    for _ in range(below(state, EDITS + 1)):
      verb, amount = PAINT + below(state, len(VERBS) - PAINT), below(state, len(LENGTHS))
      turns = SHIFTS[amount] if verb in (MOVE, SLIDE) else LENGTHS[amount]
      new_runs = changes.edit(
        new_machines, new_ends, new_runs, verb, below(state, MAX_RUNS), below(state, SHAPES),
        below(state, MACHINES), turns,
      )  # fmt: skip
    if new_runs > MAX_RUNS:
      continue
    temperature = TEMPERATURES[below(state, len(TEMPERATURES))]
    _, new_runs, new_bits, found_machines, found_ends = anneal(
      apples_of, costs, new_machines, new_ends, new_runs, steps, temperature, temperature, state,
      MAX_RUNS,
    )  # fmt: skip
    if new_bits >= bits:
      num_runs, bits = new_runs, new_bits
      machines[:num_runs], ends[:num_runs] = found_machines[:num_runs], found_ends[:num_runs]
  return num_runs, bits


@compiled.function
def random_plan(machines: np.ndarray, ends: np.ndarray, state: np.ndarray) -> int:
  """Writes a plan of up to eight runs of random machines and lengths; returns their number."""
  num_runs = 1 + below(state, 8)
  end = 0
  for run in range(num_runs):
    end += 1 + below(state, 2 * TURNS // num_runs)
    machines[run], ends[run] = below(state, MACHINES), end
  return changes.clean(machines, ends, num_runs)
