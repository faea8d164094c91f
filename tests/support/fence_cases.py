"""Fences and reference counts that several tests of the purse-seine problem use."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np

from experiments.problems import purse_seine
from experiments.problems.purse_seine import edits, rectangles, rules

WHOLE = purse_seine.PurseSeine(0)
PLAIN = purse_seine.PurseSeine(0, with_polish=False)
SQUARE = [[10, 10], [20, 10], [20, 20], [10, 20]]
# A cross of five squares, and a spiral with arms one unit apart.
CROSS = [
  [10, 0], [20, 0], [20, 10], [30, 10], [30, 20], [20, 20], [20, 30], [10, 30], [10, 20], [0, 20],
  [0, 10], [10, 10],
]  # fmt: skip
SPIRAL = [
  [0, 0], [9, 0], [9, 8], [3, 8], [3, 4], [6, 4], [6, 5], [4, 5], [4, 7], [8, 7], [8, 1], [1, 1],
  [1, 9], [0, 9],
]  # fmt: skip


def small(wanted, unwanted=()) -> purse_seine.PurseSeine:
  points = (np.array(kind, np.int64).reshape(-1, 2) for kind in (wanted, unwanted))
  return purse_seine.PurseSeine(points=rules.Points(*points))


def is_held(x: int, y: int, fence) -> bool:
  """Returns whether a point is inside or on the border, edge by edge."""
  is_inside = False
  for (ax, ay), (bx, by) in itertools.pairwise([*fence, fence[0]]):
    if min(ax, bx) <= x <= max(ax, bx) and min(ay, by) <= y <= max(ay, by):
      return True
    if ax == bx and x > ax and min(ay, by) <= y < max(ay, by):
      is_inside = not is_inside
  return is_inside


def by_hand(points: rules.Points, fence) -> int:
  held = [sum(is_held(x, y, fence) for x, y in kind.tolist()) for kind in points]
  return max(0, held[0] - held[1] + 1)


def sentences(environment: purse_seine.PurseSeine, seed: int):
  draws = np.random.default_rng([seed, 7])
  low, high = np.array(environment.language.allowed).T
  while True:
    yield tuple(int(token) for token in draws.integers(low, high))


def after_sentences(environment: purse_seine.PurseSeine, seed: int, count: int):
  """Returns a fence of many corners."""
  artefact, drawn = environment.start(seed), sentences(environment, seed)
  for number in range(count):
    with contextlib.suppress(ValueError):
      artefact = environment.language.apply(artefact, next(drawn), number)
  return artefact


def by_sum(points: rules.Points, artefact) -> int:
  """Returns held wanted points minus held unwanted points, one edge at a time over all points."""
  totals = []
  for kind in points:
    x, y = kind.T
    is_inside, is_on = np.zeros(len(kind), bool), np.zeros(len(kind), bool)
    for (ax, ay), (bx, by) in itertools.pairwise([*artefact, artefact[0]]):
      is_on |= (min(ax, bx) <= x) & (x <= max(ax, bx)) & (min(ay, by) <= y) & (y <= max(ay, by))
      if ax == bx:
        is_inside ^= (x > ax) & (min(ay, by) <= y) & (y < max(ay, by))
    totals.append(int((is_inside | is_on).sum()))
  return totals[0] - totals[1]


def sentence(*given: tuple[int, int, int, int, int], polish: int = 0) -> tuple[int, ...]:
  filled = [*given, *[(rectangles.KEEP, 0, 0, 0, 0)] * (edits.NUM_EDITS - len(given))]
  lows = [low for low, _ in WHOLE.language.allowed]
  levels = [*itertools.chain(*filled), polish]
  return tuple(low + level for low, level in zip(lows, levels))


def notched(num: int, width: int, height: int):
  """Returns a rectangle with `num` small notches in its upper side."""
  notch = ((3, 0), (3, 1), (1, 1), (1, 0))
  upper = [[4 * i + x, height - y] for i in reversed(range(num)) for x, y in notch]
  return [[0, 0], [width, 0], [width, height], *upper, [0, height]]
