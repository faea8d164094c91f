"""The discovery environment: verification, prompts, pictures and classical baselines."""

from __future__ import annotations

from collections.abc import Iterator
import itertools
import math
from typing import Any

from experiments.problems.apple_machines import anneal, plans, rules
from experiments.problems.apple_machines.anneal import Polish
from experiments.problems.apple_machines.edits import PlanEdits
from experiments.problems.apple_machines.plans import MAX_RUNS
from experiments.problems.apple_machines.rules import FIRST_APPLES, KINDS, LEVELS, TURNS, Instance
from seerjax.discovery import environment

# Of the annealer: temperatures in bits of apples; simulations per slice (about half a CPU second).
_HOT, _COLD = 1.0, 0.003
_SLICE = 64_000
_START_SLICES, _BURST = 16, 400


class AppleMachines:
  """One input of the problem; the plain start only buys the machine (0, 0).

  Attributes:
    name: "apple_machines_0007" for input 7.
    is_maximised: true.
    published: means over the contest's 150 inputs, in points per input; our inputs are different.
    language: the language of edits.
    problem: the input.
  """

  name: str
  is_maximised: bool
  published: tuple[environment.Published, ...]
  language: environment.EditLanguage | None
  problem: Instance

  def __init__(
    self,
    instance: int = 0,
    *,
    with_polish: bool = False,
    polish_steps: int = 400,
    polish_rounds: int = 0,
  ):
    """Draws the input.

    Args:
      instance: index of the input, 0 to 9999.
      with_polish: whether every sentence ends with a polish; see `PlanEdits`.
      polish_steps: simulations per search, about 7 microseconds each.
      polish_rounds: searches after the first one.

    Raises:
      ValueError: if an argument is out of range.
    """
    if not 0 <= instance < 10_000:
      raise ValueError(
        f"AppleMachines.instance: got {instance}, expected 0 to 9999; 0 to 149 are usual."
      )
    if not 1 <= polish_steps <= 1_000_000:
      raise ValueError(
        f"AppleMachines.polish_steps: got {polish_steps}, expected 1 to 1000000; 400 is usual."
      )
    if not 0 <= polish_rounds <= 1_000:
      raise ValueError(
        f"AppleMachines.polish_rounds: got {polish_rounds}, expected 0 to 1000; 4 is usual."
      )
    self.name = f"apple_machines_{instance:04d}"
    self.is_maximised = True
    self.published = rules.PUBLISHED
    self.problem = rules.instance(instance)
    self._tables = plans.tables_of(self.problem)
    self._polish = Polish(polish_steps, polish_rounds)
    self.language = PlanEdits(self.problem, self._polish if with_polish else None)

  def start(self, seed: int) -> environment.Artefact:
    """Returns the plain plan for any seed: the first machine, whenever it is affordable.

    With the empty plan, half of all random sentences would change nothing.
    """
    return [[0, 0, TURNS]]

  def verify(self, artefact: environment.Artefact) -> environment.Score:
    """Plays a plan in integers. Value: the contest's points; reward: 1 + log2(apples)."""
    runs = rules.parse(artefact)
    if isinstance(runs, str):
      return environment.invalid(runs)
    apples = plans.final_apples(self.problem, runs)
    return environment.Score(
      is_valid=True, value=float(rules.points(apples)), reward=1.0 + math.log2(apples)
    )

  def describe(self, artefact: environment.Artefact, score: environment.Score) -> str:
    """Returns the rules, the input and the plan as text."""
    rows = "\n".join(
      f"  level {level}: {', '.join(map(str, row))}" for level, row in enumerate(self.problem.costs)
    )
    return f"""Apple machines (AtCoder Heuristic Contest 058), input {self.name}.

There are {KINDS} kinds of machine (j = 0..{KINDS - 1}) on {LEVELS} levels (i = 0..{LEVELS - 1})\
 and {TURNS} turns.
At first there is {FIRST_APPLES} apple; every machine has count B[i][j] = 1 and power P[i][j] = 0.
In each turn at most one machine (i, j) is bought: it costs C[i][j] * (P[i][j] + 1) apples, which
must be there, and raises P[i][j] by 1. Then, for i = 0, 1, 2, 3 in this order and every j:
  i = 0:  apples += A[j] * B[0][j] * P[0][j]
  i > 0:  B[i-1][j] += B[i][j] * P[i][j]
The score is round(1e5 * log2(apples at the end)); more is better.

A[j]: {", ".join(map(str, self.problem.apples))}
C[i][j], by level:
{rows}

A plan is a list of runs [level, kind, end] with 0 < end of the first < end of the second < ... <=\
 {TURNS}.
In the turns before `end` that no earlier run has, that machine is bought whenever there are apples
enough; otherwise the turn waits. After the last run nothing is bought.

This plan has {score.value:.0f} points:
{artefact}

Define improve(artefact, seconds, seed), which returns a better plan of the same form within that\
 many seconds.
"""

  def picture(self, artefact: environment.Artefact) -> Any:
    """Returns a Figure of the plan and its purchases, by level over turns, above the apples."""
    from matplotlib import figure  # Slow to import, and only needed here.

    runs = rules.parse(artefact)
    if isinstance(runs, str):
      raise ValueError(f"{self.name}.picture: got no plan ({runs}); verify it first.")
    turns = rules.trace(self.problem, runs)
    picture = figure.Figure(figsize=(10, 6), layout="constrained")
    plan, amount = picture.subplots(2, 1, sharex=True)
    colours = [f"C{kind}" for kind in range(KINDS)]
    before = 0
    for level, kind, end in runs:
      plan.broken_barh(
        [(before, end - before)], (level - 0.4, 0.8), facecolors=colours[kind], alpha=0.3
      )
      before = end
    for turn, (run, is_bought, _) in enumerate(turns):
      if is_bought:
        level, kind, _ = runs[run]
        plan.plot([turn + 0.5] * 2, [level - 0.4, level + 0.4], color=colours[kind], linewidth=1)
    for kind in sorted({kind for _, kind, _ in runs}):
      plan.plot([], [], color=colours[kind], label=f"kind {kind}")
    if runs:
      plan.legend(loc="upper left", fontsize="small")
    plan.set_yticks(range(LEVELS), [f"level {level}" for level in range(LEVELS)])
    plan.set_ylim(-0.6, LEVELS - 0.4)
    plan.set_title(f"{self.name}: {rules.points(turns[-1].apples):,} points (lines are purchases)")
    # Plots apples at the ends of turns, which are at least 1; after a purchase there may be none.
    amount.semilogy(range(1, TURNS + 1), [float(turn.apples) for turn in turns], color="black")
    amount.set_xlim(0, TURNS)
    amount.set_xlabel("turn")
    amount.set_ylabel("apples")
    return picture

  def classical(self, seed: int) -> Iterator[environment.Artefact]:
    """Yields the best plan so far, after each slice of about half a CPU second.

    Each start anneals the empty plan for two slices, from 1 to 0.003 bits. Then come slices of
    iterated annealing: a few random edits and a short annealing, kept if not worse. The lengths of
    starts follow Luby's sequence (1 1 2 1 1 2 4 ..., in units of 16 slices), which costs at most a
    logarithmic factor over the best length, so that no length has to be chosen.
    """
    tables = self._tables
    best, best_bits = [], -1.0
    for number in itertools.count():
      state = anneal.seeded(seed, 1, number)
      machines, ends = plans.arrays(())
      num_runs, middle = 0, math.sqrt(_HOT * _COLD)
      for hot, cold in ((_HOT, middle), (middle, _COLD)):
        num_runs, found, bits, found_machines, found_ends = anneal.anneal(
          tables.apples, tables.costs, machines, ends, num_runs, _SLICE, hot, cold, state, MAX_RUNS
        )
        if bits > best_bits:
          best, best_bits = plans.artefact(found_machines, found_ends, found), bits
        yield best
      machines, ends, num_runs = found_machines, found_ends, found
      for _ in range(_START_SLICES * _luby(number + 1)):
        num_runs, bits = anneal.iterate(
          tables.apples, tables.costs, machines, ends, num_runs, _SLICE // _BURST, _BURST, state
        )
        if bits > best_bits:
          best, best_bits = plans.artefact(machines, ends, num_runs), bits
        yield best

  def polished_starts(self, seed: int) -> Iterator[environment.Artefact]:
    """Yields random plans of up to eight runs, each polished at a random temperature."""
    for number in itertools.count():
      state = anneal.seeded(seed, 2, number)
      machines, ends = plans.arrays(())
      num_runs = anneal.random_plan(machines, ends, state)
      temperature = anneal.TEMPERATURES[anneal.below(state, len(anneal.TEMPERATURES))]
      yield plans.artefact(
        *anneal.polished(
          self._tables, machines, ends, num_runs, temperature, self._polish, state, MAX_RUNS
        )
      )


def _luby(number: int) -> int:
  """Returns a term of Luby's sequence 1 1 2 1 1 2 4 1 1 2 1 1 2 4 8 ..., counted from 1."""
  bits = number.bit_length()
  return 1 << bits - 1 if number == (1 << bits) - 1 else _luby(number - (1 << bits - 1) + 1)
