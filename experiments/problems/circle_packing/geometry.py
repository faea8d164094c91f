"""Distances, free room and holes of circles f64[3, n]: all x, all y, all r."""

from __future__ import annotations

import math

import numpy as np

from experiments.problems.circle_packing import rules
from seerjax import compiled

LEAST_RADIUS = 1e-6  # In a linear program, because radii must be positive.
HOLE_CELLS = 64  # Cells per side; a hole's centre is the middle of a cell.


def nearest(circles: np.ndarray, i: int, count: int) -> np.ndarray:
  """Returns the indices of circle i and the circles nearest to it, at most `count` in all."""
  dx, dy = circles[:2] - circles[:2, i, None]
  return np.argsort(dx * dx + dy * dy, kind="stable")[:count]


def into_hole(circles: np.ndarray, i: int, rank: int, share: float) -> None:
  """Puts circle i into the hole of rank `rank` (0 is the largest), with a share of its radius."""
  others = np.delete(circles, i, 1)
  ticks = (np.arange(HOLE_CELLS) + 0.5) / HOLE_CELLS
  places = np.stack([np.repeat(ticks, ticks.size), np.tile(ticks, ticks.size)])
  room = clearance(others, places)
  best = 0
  for _ in range(rank + 1):
    best = int(np.argmax(room))
    size = room[best]
    # A hole counts as filled once it is ranked: further holes lie outside of it.
    dx, dy = places - places[:, best, None]
    room = np.minimum(room, np.where(dx * dx + dy * dy > 0, np.sqrt(dx * dx + dy * dy) - size, -1))
  circles[:2, i] = places[:, best]
  circles[2, i] = share * max(size, LEAST_RADIUS)


def room(circles: np.ndarray) -> np.ndarray:
  """Returns f64[n]: the minimum of distance to the walls and half the distance to other centres."""
  first, second, distance = pairs(circles)
  room = np.minimum(circles[:2], 1.0 - circles[:2]).min(0)
  np.minimum.at(room, first, distance / 2)
  np.minimum.at(room, second, distance / 2)
  return room


def excess(circles: np.ndarray) -> float:
  """Returns approximately the largest overlap or wall crossing of circles f64[3, n].

  Returns infinity if a number is not finite or a radius is not positive.
  """
  first, second, distance = pairs(circles)
  r = circles[2]
  crossed = np.maximum(r - circles[:2], r + circles[:2] - 1.0).max()
  # 1e-15 below the exact value; the exact verifier decides.
  overlap = (r[first] + r[second] - distance).max() if first.size else crossed
  worst = float(max(crossed, overlap)) - 1e-15
  return worst if math.isfinite(worst) and r.min() > 0 else math.inf


def pairs(circles: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns i, j and the distance of centres for all pairs i < j of circles f64[3, n]."""
  first, second = rules.pair_numbers(circles.shape[1])
  dx, dy = circles[:2, first] - circles[:2, second]
  return first, second, np.sqrt(dx * dx + dy * dy)


@compiled.function
def clearance(circles, places):
  """Returns each place's distance to the nearest circle or wall, negative inside; f64[2, m]."""
  room = np.empty(places.shape[1])
  for k in range(places.shape[1]):
    x = places[0, k]
    y = places[1, k]
    least = min(min(x, 1.0 - x), min(y, 1.0 - y))
    for i in range(circles.shape[1]):
      dx = x - circles[0, i]
      dy = y - circles[1, i]
      least = min(least, math.sqrt(dx * dx + dy * dy) - circles[2, i])
    room[k] = least
  return room
