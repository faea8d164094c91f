"""Fences and their legality, and the generator of points."""

from __future__ import annotations

import functools
import hashlib
import math
from typing import Any, NamedTuple

import numpy as np

from experiments.problems import atcoder
from seerjax import compiled
from seerjax.discovery import environment

SIDE = 100_000  # Coordinates are 0..SIDE.
MAX_VERTICES = 1000
MAX_PERIMETER = 400_000
REWARD_UNIT = 1500.0  # The paper divides the mean value by it.

PUBLISHED = atcoder.published(
  (567_062, "TTT-Discover (gpt-oss-120b, C++)", 2026),
  (566_997, "the contest's best human", 2024),
  (558_026, "ShinkaEvolve", 2025),
  (554_171, "best of 25,600 (gpt-oss-120b, C++)", 2026),
  (550_647, "ALE-Agent", 2025),
)


class Points(NamedTuple):
  """An instance.

  Attributes:
    wanted: i64[n, 2], integer coordinates.
    unwanted: i64[k, 2], the same; all points are distinct.
  """

  wanted: np.ndarray
  unwanted: np.ndarray


class Fence(NamedTuple):
  """A polygon in normal form: counter-clockwise, with a turn at each vertex.

  Attributes:
    xs: i64[m].
    ys: i64[m].
  """

  xs: np.ndarray
  ys: np.ndarray


def generate(instance: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
  """Returns the wanted and the unwanted points, 5000 each, all different.

  Of each kind there are 10 to 25 clusters: weight in [0, 1), centre in 20000..80000, standard
  deviation in 1000..5000. A point takes a cluster by weight and is drawn again if it falls outside
  of 0..100000 or on another point. Needs hashlib and math alone, so that a program may run it.
  """
  count = 0

  def uniform() -> float:
    nonlocal count
    digest = hashlib.sha256(f"purse_seine/{instance}/{count}".encode()).digest()
    count += 1
    return (int.from_bytes(digest[:8], "big") >> 11) * 2.0**-53

  def between(low: int, high: int) -> int:
    return low + int(uniform() * (high - low + 1))

  taken, kinds = set(), []
  for _ in range(2):
    clusters = [
      (uniform(), between(20_000, 80_000), between(20_000, 80_000), between(1000, 5000))
      for _ in range(between(10, 25))
    ]
    total = sum(cluster[0] for cluster in clusters)
    points = []
    while len(points) < 5000:
      left = uniform() * total
      for cluster in clusters:
        left -= cluster[0]
        if left < 0:
          break
      _, x, y, deviation = cluster
      radius = deviation * math.sqrt(-2 * math.log(1 - uniform()))
      angle = 2 * math.pi * uniform()
      point = (round(x + radius * math.cos(angle)), round(y + radius * math.sin(angle)))
      if min(point) >= 0 and max(point) <= 100_000 and point not in taken:
        taken.add(point)
        points.append(point)
    kinds.append(points)
  return kinds[0], kinds[1]


@functools.lru_cache(maxsize=256)  # Enough for a contest's 150 cases, 160 kB each.
def points_of(instance: int) -> Points:
  """Returns the points of a generated instance."""
  wanted, unwanted = generate(instance)
  return Points(np.array(wanted, np.int64), np.array(unwanted, np.int64))


def fence_of(artefact: environment.Artefact) -> Fence:
  """Returns a legal artefact in normal form: counter-clockwise, without straight vertices."""
  points = np.array(artefact, np.int64)
  before, after = np.roll(points, 1, axis=0), np.roll(points, -1, axis=0)
  points = points[~((before == points) & (points == after)).any(axis=1)]
  xs, ys = points[:, 0], points[:, 1]
  if np.sum(xs * np.roll(ys, -1) - np.roll(xs, -1) * ys) < 0:
    xs, ys = xs[::-1], ys[::-1]
  return Fence(np.ascontiguousarray(xs), np.ascontiguousarray(ys))


def artefact_of(fence: Fence) -> environment.Artefact:
  """Returns the fence as plain data, starting at its lower left vertex, so that data is unique."""
  first = np.lexsort(fence[::-1])[0]
  xs, ys = (np.roll(along, -first).tolist() for along in fence)
  return [[x, y] for x, y in zip(xs, ys)]


def perimeter_of(fence: Fence) -> int:
  """Returns the length of the fence."""
  xs, ys = fence
  return int(np.abs(xs - np.roll(xs, 1)).sum() + np.abs(ys - np.roll(ys, 1)).sum())


def illegality(artefact: Any) -> str:
  """Returns why an object is not a legal fence, or "" if it is one."""
  if not isinstance(artefact, list | tuple):
    return f"fence: got {type(artefact).__name__}, expected a list of [x, y]"
  num = len(artefact)
  if not 4 <= num <= MAX_VERTICES:
    return f"fence: got {num} vertices, expected 4 to {MAX_VERTICES}"
  for place, vertex in enumerate(artefact):
    if not isinstance(vertex, list | tuple) or len(vertex) != 2:
      return f"vertex {place}: got {environment.shown(vertex)}, expected [x, y]"
    for number in vertex:
      # Excludes bool, which is a subclass of int, and float, which is not exact.
      if isinstance(number, bool) or not isinstance(number, int):
        kind = type(number).__name__
        return f"vertex {place}: got {kind} {environment.shown(number)}, expected integers"
      if not 0 <= number <= SIDE:
        got = environment.shown(number)
        return f"vertex {place}: got {got}, expected a coordinate in 0..{SIDE}"
  seen: dict[tuple[int, int], int] = {}
  for place, (x, y) in enumerate(artefact):
    first = seen.setdefault((x, y), place)
    if first != place:
      return f"vertices {first} and {place}: got [{x}, {y}] twice, expected different vertices"
  points = np.array(artefact, np.int64)
  steps = np.roll(points, -1, axis=0) - points
  slanted = np.flatnonzero((steps != 0).all(axis=1))
  if slanted.size:
    place = int(slanted[0])
    return (
      f"edge {place}: got {list(artefact[place])} to {list(artefact[(place + 1) % num])}, expected"
      " an edge parallel to an axis"
    )
  perimeter = int(np.abs(steps).sum())
  if perimeter > MAX_PERIMETER:
    return f"perimeter: got {perimeter}, expected at most {MAX_PERIMETER}"
  first, second = _first_touch(points[:, 0].copy(), points[:, 1].copy())
  if first >= 0:
    return (
      f"edges {first} and {second}: got a common point, expected none but the vertex between"
      " neighbours (a simple polygon)"
    )
  return ""


def checked(points: Points) -> Points:
  """Returns your own points as int64; raises ValueError if they are invalid."""
  kinds = []
  for name, given in zip(Points._fields, points):
    array = np.asarray(given)
    if array.size == 0:
      array = np.zeros((0, 2), np.int64)
    if array.ndim != 2 or array.shape[1] != 2 or array.dtype.kind not in "iu":
      raise ValueError(
        f"PurseSeine: got {name} of shape {array.shape} and type {array.dtype}, expected integers"
        " of shape [n, 2]; give x and y of each point."
      )
    if array.size and not (array.min() >= 0 and array.max() <= SIDE):
      raise ValueError(
        f"PurseSeine: got {name} in {array.min()}..{array.max()}, expected coordinates in"
        f" 0..{SIDE}; scale them."
      )
    kinds.append(array.astype(np.int64))
  both = np.concatenate(kinds)
  if len(np.unique(both, axis=0)) != len(both):
    raise ValueError(
      f"PurseSeine: got {len(both) - len(np.unique(both, axis=0))} points twice, expected different"
      " points; drop them."
    )
  return Points(*kinds)


@compiled.function
def _first_touch(xs: np.ndarray, ys: np.ndarray) -> tuple[int, int]:
  """Returns the first two edges that touch although they must not, or (-1, -1)."""
  num = len(xs)
  for i in range(num):
    after = (i + 1) % num
    left, right = min(xs[i], xs[after]), max(xs[i], xs[after])
    bottom, top = min(ys[i], ys[after]), max(ys[i], ys[after])
    for j in range(i + 1, num):
      end = (j + 1) % num
      if max(xs[j], xs[end]) < left or min(xs[j], xs[end]) > right:
        continue
      if max(ys[j], ys[end]) < bottom or min(ys[j], ys[end]) > top:
        continue
      if j == after or end == i:
        # Neighbours meet at one vertex; they may continue straight, but not turn back.
        first, second = (i, j) if j == after else (j, i)
        middle, last = (first + 1) % num, (second + 1) % num
        along = (xs[middle] - xs[first]) * (xs[last] - xs[middle])
        along += (ys[middle] - ys[first]) * (ys[last] - ys[middle])
        if along >= 0:
          continue
      return i, j
  return -1, -1
