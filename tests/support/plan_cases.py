"""Plans of the apple-machines problem, and sentences about them, that several tests use."""

from __future__ import annotations

import numpy as np

from experiments.problems import apple_machines
from experiments.problems.apple_machines import anneal, changes, edits, rules

ENVIRONMENT = apple_machines.AppleMachines(0)
POLISHING = apple_machines.AppleMachines(0, with_polish=True, polish_steps=100)
LANGUAGE = edits.PlanEdits(ENVIRONMENT.problem)
POLISH_LANGUAGE = edits.PlanEdits(ENVIRONMENT.problem, anneal.Polish(100))
PLAIN = rules.Instance(
  apples=(1, 5, *[100] * 8),
  costs=((1, 3, *[9] * 8), (2, 4, *[9] * 8), (3, 9, *[9] * 8), (5, 9, *[9] * 8)),
)
# A plan with numbers that overflow int64, which the contest's costs hardly allow.
RICH = rules.Instance(apples=(10**9,) * 10, costs=((1,) * 10, *[(2,) * 10] * 3))
# Simple enough to check by hand: 20 turns of (0, 0), 40 of (0, 1), 60 of (1, 0).
THREE = [[0, 0, 20], [0, 1, 60], [1, 0, 120]]


def random_plan(draws: np.random.Generator, num_runs: int) -> list[list[int]]:
  """Returns a plan of random machines, mostly of low levels, so that it buys much."""
  ends = np.sort(draws.choice(np.arange(1, 501), num_runs, replace=False))
  levels = np.minimum(draws.geometric(0.5, num_runs) - 1, 3)
  kinds = draws.integers(0, 10, num_runs)
  return [[int(i), int(j), int(e)] for i, j, e in zip(levels, kinds, ends)]


def random_sentence(language: edits.PlanEdits, draws: np.random.Generator) -> list[int]:
  """Returns ids drawn uniformly from those allowed, up to a stop token."""
  tokens = [int(draws.integers(least, end)) for least, end in language.allowed]
  return tokens[: tokens.index(0) + 1] if 0 in tokens else tokens


def polished(temperature: int, edits: list[int]) -> list[int]:
  """Returns a sentence that ends with a polish; the place is an index of the temperatures."""
  return [104 + temperature, *edits]


def sentence(*edits: tuple[str, int, int, int, int]) -> list[int]:
  """Returns the tokens of edits (verb, run, shape, level * 10 + kind, index of the amount)."""
  tokens = []
  for verb, *fields in edits:
    ranges = LANGUAGE.allowed[1:5]
    tokens += [changes.VERBS.index(verb), *(r[0] + f for r, f in zip(ranges, fields))]
  return tokens if len(edits) == 4 else [*tokens, 0]
