"""The discovery environment: starts, verification, prompts, pictures and classical baselines."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
import math
from typing import Any

import numpy as np

from experiments.problems.circle_packing import geometry, optimise, rules
from experiments.problems.circle_packing.edits import CircleLanguage
from seerjax.discovery import environment
from seerjax.discovery.environment import Artefact, EditLanguage, Published, Score


class CirclePacking:
  """The problem for one number of circles; an `Environment` with `Baselines`.

  Args:
    num_circles: n, in [1, 200].
    num_edits: edits per sentence of the language.

  Raises:
    ValueError: if either is out of range.
  """

  name: str
  is_maximised: bool
  published: tuple[Published, ...]
  language: EditLanguage | None

  def __init__(self, num_circles: int = 26, *, num_edits: int = 3):
    self.language = CircleLanguage(num_circles=num_circles, num_edits=num_edits)
    self.num_circles = num_circles
    self.name = f"circle_packing_{num_circles}"
    self.is_maximised = True
    self.published = rules.PUBLISHED.get(num_circles, ())

  def start(self, seed: int) -> Artefact:
    """Returns circles around random centres, first of equal radius, then each grown maximally."""
    rng = np.random.default_rng([seed, self.num_circles])
    while True:
      circles = np.zeros((3, self.num_circles))
      circles[:2] = rng.random((2, self.num_circles))
      room = geometry.room(circles)
      # Drawn again if two centres coincide or one is on a wall, which leaves no room.
      if room.min() > geometry.LEAST_RADIUS:
        break
    circles[2] = 0.5 * room.min()
    for i in range(self.num_circles):
      clearance = geometry.clearance(np.delete(circles, i, 1), circles[:2, i, None])[0]
      circles[2, i] = max(circles[2, i], clearance)
    return optimise.accepted(circles)

  def describe(self, artefact: Artefact, score: Score) -> str:
    """Returns the problem, its rules and this artefact, as text for program-writing models."""
    n = self.num_circles
    worth = f"sum of radii = {score.value!r}" if score.is_valid else f"invalid: {score.reason}"
    best = self.published[0] if self.published else None
    target = f"Best known: {best.value!r} ({best.who}, {best.year}).\n" if best else ""
    return (
      f"Pack {n} circles into the unit square [0, 1] x [0, 1] so that the sum of their radii is as"
      " large as possible; radii may differ.\n\n"
      f"A packing is a list of exactly {n} lists [x, y, r] of floats, the centre and the radius.\n"
      "It is valid if every r > 0, every circle lies in the square (r <= x <= 1 - r and the same"
      " for y), and no two circles overlap: (x_i - x_j)^2 + (y_i - y_j)^2 >= (r_i + r_j)^2. This"
      " is checked in exact rational arithmetic, with no tolerance: multiply all radii by"
      " (1 - 1e-12) before you return them. NaN, infinities and booleans are refused.\n"
      "Touching circles are allowed. The value is recomputed from the list; nothing reported"
      " counts.\n\n"
      f"{target}"
      f"The packing to improve ({worth}):\n"
      f"artefact = {_text(artefact)}\n\n"
      "Write a Python program that defines\n\n"
      "def improve(artefact, seconds, seed):\n"
      '  """Returns a better packing, as a list of lists [x, y, r], within `seconds`."""\n\n'
      "numpy and scipy may be imported. Equal arguments should give equal packings: draw random"
      " numbers from `seed` only. Return the best packing found before the time is over; one that"
      " is not valid earns nothing.\n"
    )

  def verify(self, artefact: Artefact) -> Score:
    """Verifies any object, exactly; never raises.

    The value is the sum of the radii, rounded down; the certificate has the exact fraction.
    """
    rows = rules.rows(artefact, self.num_circles)
    if isinstance(rows, str):
      return environment.invalid(rows)
    circles = np.array(rows).T
    reason = rules.wall_crossed(circles) or rules.overlap(circles)
    if reason:
      return environment.invalid(reason)
    (_, _, radii), unit = rules.whole(circles)
    total = Fraction(sum(radii), unit)
    value = float(total)
    if Fraction(value) > total:
      value = math.nextafter(value, -math.inf)
    certificate = f"sum of radii = {total.numerator}/{total.denominator}; value is rounded down"
    return Score(is_valid=True, value=value, reward=value, certificate=certificate)

  def picture(self, artefact: Artefact) -> Any:
    """Returns a matplotlib Figure: circles shaded by radius, with a line for each contact."""
    from matplotlib import figure, patches  # Slow to import, and only needed here.

    circles = np.array(artefact, np.float64).T
    drawn = figure.Figure(figsize=(5, 5), layout="constrained")
    axes = drawn.add_subplot(aspect="equal", xlim=(0, 1), ylim=(0, 1), xticks=[], yticks=[])
    for x, y, r in circles.T:
      shade = 0.92 - 0.4 * r / circles[2].max()
      axes.add_patch(patches.Circle((x, y), r, facecolor=(shade, shade, 0.95), edgecolor="0.25"))
    first, second, distance = geometry.pairs(circles)
    gap = distance - circles[2, first] - circles[2, second]
    for i, j in zip(first[gap < 1e-8], second[gap < 1e-8]):
      axes.plot(circles[0, [i, j]], circles[1, [i, j]], color="tab:red", linewidth=0.8)
    for x, y, r in circles.T:
      for wall in ((0.0, y), (1.0, y), (x, 0.0), (x, 1.0)):
        if abs(wall[0] - x) + abs(wall[1] - y) - r < 1e-8:
          axes.plot((x, wall[0]), (y, wall[1]), color="tab:red", linewidth=0.8)
    axes.set_title(f"{circles.shape[1]} circles, sum of radii {math.fsum(circles[2]):.9f}")
    return drawn

  def classical(self, seed: int) -> Iterator[Artefact]:
    """Runs monotone basin hopping: settle, perturb, settle, keep the better; yields packings.

    A run ends after 8n perturbations without gain. It starts at random or, every other time, from
    the best packing of earlier runs. Each run, and each part of a long one, yields its polished
    packing.

    Source: Wales and Doye 1997 (basin hopping), https://arxiv.org/abs/cond-mat/9803344; Grosso et
    al. 2010 (for circles), https://doi.org/10.1007/s10898-009-9458-3.
    """
    n = self.num_circles
    rng = np.random.default_rng([seed, n, 1])
    hops_per_item = max(10, 300_000 // (n * n + 50))
    best, best_value, from_best = np.empty((3, n)), -math.inf, False
    while True:
      circles = np.concatenate([rng.random((2, n)), np.full((1, n), 0.02)])
      optimise.settle(circles, optimise.SOFT, 200)
      value = -math.inf
      if from_best:
        circles, value = best.copy(), best_value
      failed = hops = 0
      while failed < 8 * n:
        changed = circles.copy()
        _hop(changed, rng)
        # Random stiffness, because optima 1e-5 apart may merge while overlaps are still large.
        found = optimise.settle(changed, optimise.FIRM * 5.0 ** float(rng.integers(-1, 3)), 200)
        failed += 1
        if found > value - 1e-4:  # Close enough to compute the exact sum.
          vertex = optimise.touching(changed)
          if vertex is not None and math.fsum(vertex[2]) > value + 1e-10:
            circles, value, failed = vertex, math.fsum(vertex[2]), 0
        hops += 1
        if hops % hops_per_item == 0:
          yield optimise.accepted(circles) if value > 0 else optimise.finish(circles.copy())
      # Not settled again, because a vertex could move to a worse neighbour.
      yield optimise.accepted(circles) if value > 0 else optimise.finish(circles.copy())
      if value > best_value:
        best, best_value = circles, value
      from_best = not from_best

  def polished_starts(self, seed: int) -> Iterator[Artefact]:
    """Yields new starts, each settled (starting soft) and polished: the tool without a policy."""
    rng = np.random.default_rng([seed, self.num_circles, 2])
    while True:
      circles = np.array(self.start(int(rng.integers(2**31)))).T.copy()
      optimise.settle(circles, optimise.SOFT, 200)
      yield optimise.finish(circles)


def _hop(circles: np.ndarray, rng: np.random.Generator) -> None:
  """Perturbs a packing at random: one circle, all slightly, the radii of two, or a region."""
  n = circles.shape[1]
  x, y, r = circles
  length = 0.1 * rng.random() ** 3 + 0.0005
  match int(rng.integers(5)):
    case 0:
      i, j = rng.integers(n, size=2)
      circles[:2, i] += (circles[:2, j] - circles[:2, i]) * rng.random()
    case 1:
      order = np.argsort(r, kind="stable")
      i = int(order[int(n * rng.random() ** 2)])  # Small circles more often.
      x[i], y[i] = rng.random(2)
      r[i] *= rng.random()
    case 2:
      circles[:2] += length * (2 * rng.random((2, n)) - 1)
    case 3:
      i, j = rng.integers(n, size=2)
      r[[i, j]] = r[[j, i]]
    case _:
      near = geometry.nearest(circles, int(rng.integers(n)), int(rng.integers(1, n // 2 + 2)))
      circles[:2, near] += 2 * length * (2 * rng.random((2, near.size)) - 1)
  np.clip(circles[:2], 1 / 128, 127 / 128, out=circles[:2])


def _text(artefact: Artefact) -> str:
  return "[" + ",\n  ".join(repr(list(row)) for row in artefact) + "]"
