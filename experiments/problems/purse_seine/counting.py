"""Counts wanted minus unwanted points inside a fence, exactly and fast.

A closed fence contains the lattice points of a set of unit pixels. Everything here therefore counts
with half-open edges, where the sum over the corners

  a - b = sum over corners of (+1 or -1, alternating) * F(x, y),   F: points below x and below y

is exact in integers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from experiments.problems.purse_seine.rules import SIDE, Fence, Points
from seerjax import compiled

_SHIFT = 7  # Strips are 128 wide: about a dozen points each, and a table that fits in a cache.
_NUM_STRIPS = (SIDE >> _SHIFT) + 1


class Counter(NamedTuple):
  """Points, sorted so that `F(x, y)` reads one entry of a table and two strips.

  Attributes:
    table: i16[s + 1, s + 1], sum of weights in the strips below (column, row).
    column_start: i64[s + 1], start of each column's points.
    column_points: i64[n, 3], x, y and weight (+1 wanted, -1 unwanted) by column.
    row_start: i64[s + 1], start of each row's points.
    row_points: i64[n, 3], the same points by row.
  """

  table: np.ndarray
  column_start: np.ndarray
  column_points: np.ndarray
  row_start: np.ndarray
  row_points: np.ndarray


def counter_of(points: Points) -> Counter:
  """Sorts points for counting."""
  both = np.concatenate((points.wanted, points.unwanted)).astype(np.int64).reshape(-1, 2)
  weights = np.repeat([1, -1], [len(points.wanted), len(points.unwanted)])
  rows = np.column_stack((both, weights)).astype(np.int64)
  table = np.zeros((_NUM_STRIPS + 1, _NUM_STRIPS + 1), np.int64)
  np.add.at(table, (1 + (both[:, 0] >> _SHIFT), 1 + (both[:, 1] >> _SHIFT)), weights)
  table = table.cumsum(axis=0).cumsum(axis=1)
  strips = np.arange(_NUM_STRIPS + 1)
  by_column = rows[np.argsort(both[:, 0], kind="stable")]
  by_row = rows[np.argsort(both[:, 1], kind="stable")]
  return Counter(
    table=table.astype(np.int16 if len(rows) < 2**15 else np.int64),
    column_start=np.searchsorted(by_column[:, 0] >> _SHIFT, strips).astype(np.int64),
    column_points=by_column,
    row_start=np.searchsorted(by_row[:, 1] >> _SHIFT, strips).astype(np.int64),
    row_points=by_row,
  )


def count(counter: Counter, fence: Fence) -> int:
  """Returns wanted minus unwanted points inside the fence or on it, exactly."""
  return int(fence_count(counter, fence.xs, fence.ys))


@compiled.function
def _below(counter: Counter, x: int, y: int) -> int:
  """Returns F: the sum of weights of points with smaller x and smaller y."""
  column, row = x >> _SHIFT, y >> _SHIFT
  total = int(counter.table[column, row])
  points = counter.column_points
  for i in range(counter.column_start[column], counter.column_start[column + 1]):
    if points[i, 0] >= x:
      break
    if points[i, 1] < y:
      total += points[i, 2]
  points = counter.row_points
  edge = column << _SHIFT
  for i in range(counter.row_start[row], counter.row_start[row + 1]):
    if points[i, 1] >= y:
      break
    if points[i, 0] < edge:
      total += points[i, 2]
  return total


@compiled.function
def box_count(counter: Counter, left: int, right: int, bottom: int, top: int) -> int:
  """Returns the sum of weights in a closed box of lattice points."""
  return (
    _below(counter, right + 1, top + 1)
    - _below(counter, left, top + 1)
    - _below(counter, right + 1, bottom)
    + _below(counter, left, bottom)
  )


@compiled.function
def fence_count(counter: Counter, xs: np.ndarray, ys: np.ndarray) -> int:
  """Returns the sum of weights inside or on a fence: F at its corners, with alternating signs."""
  num, total = len(xs), 0
  for i in range(num):
    before, after = (i - 1) % num, (i + 1) % num
    is_level = ys[i] == ys[after]
    # Right and upper edges belong to the inside: their pixels end one further.
    if is_level:
      x = xs[i] + (1 if ys[i] > ys[before] else 0)
      y = ys[i] + (1 if xs[after] < xs[i] else 0)
      total += _below(counter, x, y)
    else:
      x = xs[i] + (1 if ys[after] > ys[i] else 0)
      y = ys[i] + (1 if xs[i] < xs[before] else 0)
      total -= _below(counter, x, y)
  return total
