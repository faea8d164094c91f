"""Packings that several tests use."""

from __future__ import annotations

from fractions import Fraction
import itertools

from experiments.problems import circle_packing

QUARTERS = [[x, y, 0.25] for x in (0.25, 0.75) for y in (0.25, 0.75)]
SMALL = circle_packing.CirclePacking(num_circles=7)


def is_packing(artefact) -> bool:
  """Returns whether a packing is valid: an independent check that uses fractions only."""
  circles = [[Fraction(number) for number in circle] for circle in artefact]
  inside = all(r > 0 and r <= x <= 1 - r and r <= y <= 1 - r for x, y, r in circles)
  return inside and all(
    (a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2 >= (a[2] + b[2]) ** 2
    for a, b in itertools.combinations(circles, 2)
  )


def random_sentence(language, rng) -> tuple[int, ...]:
  return tuple(int(rng.integers(low, high)) for low, high in language.allowed)
