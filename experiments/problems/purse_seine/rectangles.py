"""Applies one edit to a fence: adds or removes a rectangle, or pushes part of an edge."""

from __future__ import annotations

import numpy as np

from experiments.problems.purse_seine.rules import SIDE, Fence
from seerjax import compiled

_CORRIDOR = 60  # Width of the strip between an added rectangle and the fence.

ADD, REMOVE, PUSH, KEEP = range(4)

SIZES = tuple(round(300 * 1.36**level) for level in range(16))  # 300 to 30,200.
_PUSHES = tuple(round(60 * 2.4**level) for level in range(8))  # 60 to 27,500, inwards or outwards.


def edited(fence: Fence, verb: int, x: int, y: int, width: int, height: int) -> Fence:
  """Returns the fence after one edit; it may have no vertices, or too many.

  Args:
    fence: a fence that is legal except for its length.
    verb: ADD, REMOVE or PUSH.
    x, y: centre of the rectangle, or a point near the edge to push.
    width, height: levels of size; a push reads them as depth and span.
  """
  if verb == PUSH:
    rectangles, is_added = _push(fence, x, y, width, SIZES[height])
  else:
    is_added = verb == ADD
    half_width, half_height = SIZES[width] // 2, SIZES[height] // 2
    box = _clipped(x - half_width, y - half_height, x + half_width, y + half_height)
    rectangles = _joined(fence, box) if is_added else [box]
  return Fence(*_combine(fence.xs, fence.ys, np.array(rectangles, np.int64), is_added))


def _clipped(left: int, bottom: int, right: int, top: int) -> tuple[int, int, int, int]:
  """Returns the part of a rectangle inside the square."""
  return max(0, left), max(0, bottom), min(SIDE, right), min(SIDE, top)


def _nearest(low: int, high: int, other_low: int, other_high: int) -> tuple[int, int]:
  """Returns the nearest points of two intervals; if they overlap, a middle point of the overlap."""
  if high < other_low:
    return high, other_low
  if other_high < low:
    return low, other_high
  middle = (max(low, other_low) + min(high, other_high)) // 2
  return middle, middle


def _joined(fence: Fence, rectangle: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
  """Returns a rectangle and, if no edge touches it, the strip that joins it to the nearest edge."""
  left, bottom, right, top = rectangle
  edge, gap = _nearest_edge(fence.xs, fence.ys, left, bottom, right, top)
  if gap == 0 or _has_point(fence.xs, fence.ys, left, bottom):
    return [rectangle]
  after = (edge + 1) % len(fence.xs)
  edge_xs = sorted((int(fence.xs[edge]), int(fence.xs[after])))
  edge_ys = sorted((int(fence.ys[edge]), int(fence.ys[after])))
  from_x, to_x = _nearest(left, right, *edge_xs)
  from_y, to_y = _nearest(bottom, top, *edge_ys)
  half = _CORRIDOR // 2
  return [
    rectangle,
    _clipped(min(from_x, to_x) - half, from_y - half, max(from_x, to_x) + half, from_y + half),
    _clipped(to_x - half, min(from_y, to_y) - half, to_x + half, max(from_y, to_y) + half),
  ]


def _push(
  fence: Fence, x: int, y: int, depth_level: int, span: int
) -> tuple[list[tuple[int, int, int, int]], bool]:
  """Returns the rectangles swept when part of the nearest edge is pushed, and whether outwards."""
  edge, _ = _nearest_edge(fence.xs, fence.ys, x, y, x, y)
  after = (edge + 1) % len(fence.xs)
  start_x, start_y = int(fence.xs[edge]), int(fence.ys[edge])
  end_x, end_y = int(fence.xs[after]), int(fence.ys[after])
  is_out = depth_level < len(_PUSHES)
  depth = _PUSHES[depth_level % len(_PUSHES)]
  # The outside is to the right of a counter-clockwise edge.
  if start_y == end_y:
    goes_down = (end_x > start_x) == is_out
    low, high = _span(min(start_x, end_x), max(start_x, end_x), x, span)
    ends = (start_y - depth, start_y) if goes_down else (start_y, start_y + depth)
    return [_clipped(low, ends[0], high, ends[1])], is_out
  goes_right = (end_y > start_y) == is_out
  low, high = _span(min(start_y, end_y), max(start_y, end_y), y, span)
  ends = (start_x, start_x + depth) if goes_right else (start_x - depth, start_x)
  return [_clipped(ends[0], low, ends[1], high)], is_out


def _span(low: int, high: int, middle: int, span: int) -> tuple[int, int]:
  """Returns a part of length `span` of an edge around a place; the whole edge if barely longer."""
  if high - low <= span * 3 // 2:
    return low, high
  first = min(max(low, middle - span // 2), high - span)
  return first, first + span


@compiled.function
def _has_point(xs: np.ndarray, ys: np.ndarray, x: int, y: int) -> bool:
  """Returns whether a point that is not on an edge is inside."""
  num, is_inside = len(xs), False
  for k in range(num):
    after = (k + 1) % num
    if xs[k] == xs[after] and x > xs[k]:
      if min(ys[k], ys[after]) <= y < max(ys[k], ys[after]):
        is_inside = not is_inside
  return is_inside


@compiled.function
def _nearest_edge(
  xs: np.ndarray, ys: np.ndarray, left: int, bottom: int, right: int, top: int
) -> tuple[int, int]:
  """Returns the edge nearest to a rectangle, and its distance along the axes."""
  num, nearest, least = len(xs), 0, 4 * SIDE
  for k in range(num):
    after = (k + 1) % num
    gap = max(0, min(xs[k], xs[after]) - right, left - max(xs[k], xs[after]))
    gap += max(0, min(ys[k], ys[after]) - top, bottom - max(ys[k], ys[after]))
    if gap < least:
      nearest, least = k, gap
  return nearest, least


@compiled.function
def _combine(
  xs: np.ndarray, ys: np.ndarray, rectangles: np.ndarray, is_added: bool
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the outline of a fence with rectangles added or removed.

  The plane is divided into cells at all coordinates. Only the largest part is kept, with its holes
  filled: then no two of its cells touch only at a corner, and the outline is simple.

  Args:
    xs: i64[m].
    ys: i64[m].
    rectangles: i64[n, 4], left, bottom, right, top.
    is_added: whether rectangles are added rather than removed.

  Returns:
    The outline's xs and ys; empty if nothing is left.
  """
  cuts_x = np.unique(np.concatenate((xs, rectangles[:, 0], rectangles[:, 2])))
  cuts_y = np.unique(np.concatenate((ys, rectangles[:, 1], rectangles[:, 3])))
  # With a ring of cells around; cell (i, j) ends at cuts_x[i], cuts_y[j].
  width, height = len(cuts_x) + 1, len(cuts_y) + 1
  cells = np.zeros((width, height), np.int64)
  num = len(xs)
  for k in range(num):
    after = (k + 1) % num
    if xs[k] == xs[after]:
      column = np.searchsorted(cuts_x, xs[k]) + 1
      low = np.searchsorted(cuts_y, min(ys[k], ys[after])) + 1
      high = np.searchsorted(cuts_y, max(ys[k], ys[after])) + 1
      for j in range(low, high):
        cells[column, j] ^= 1
  for i in range(1, width):
    for j in range(height):
      cells[i, j] ^= cells[i - 1, j]
  for r in range(len(rectangles)):
    first = np.searchsorted(cuts_x, rectangles[r, 0]) + 1
    last = np.searchsorted(cuts_x, rectangles[r, 2]) + 1
    low = np.searchsorted(cuts_y, rectangles[r, 1]) + 1
    high = np.searchsorted(cuts_y, rectangles[r, 3]) + 1
    cells[first:last, low:high] = 1 if is_added else 0
  # Parts are numbered from 2 on.
  stack = np.empty((width * height, 2), np.int64)
  number, largest, most = 1, 0, 0
  for i in range(1, width - 1):
    for j in range(1, height - 1):
      if cells[i, j] == 1:
        number += 1
        area = 0
        cells[i, j] = number
        stack[0, 0], stack[0, 1], depth = i, j, 1
        while depth:
          depth -= 1
          p, q = stack[depth, 0], stack[depth, 1]
          area += (cuts_x[p] - cuts_x[p - 1]) * (cuts_y[q] - cuts_y[q - 1])
          for a, b in ((p - 1, q), (p + 1, q), (p, q - 1), (p, q + 1)):
            if cells[a, b] == 1:
              cells[a, b] = number
              stack[depth, 0], stack[depth, 1] = a, b
              depth += 1
        if area > most:
          largest, most = number, area
  if largest == 0:
    return np.empty(0, np.int64), np.empty(0, np.int64)
  # Cells reachable from the ring are outside (-1).
  cells[0, 0] = -1
  stack[0, 0], stack[0, 1], depth = 0, 0, 1
  while depth:
    depth -= 1
    p, q = stack[depth, 0], stack[depth, 1]
    for a, b in ((p - 1, q), (p + 1, q), (p, q - 1), (p, q + 1)):
      if 0 <= a < width and 0 <= b < height and cells[a, b] != largest and cells[a, b] != -1:
        cells[a, b] = -1
        stack[depth, 0], stack[depth, 1] = a, b
        depth += 1
  out_x, out_y = np.empty(2 * width * height, np.int64), np.empty(2 * width * height, np.int64)
  start_i, start_j = 0, 0
  for i in range(1, width - 1):
    for j in range(1, height - 1):
      if cells[i, j] != -1 and start_i == 0:
        start_i, start_j = i, j
  # Walks with the inside to the left; corner (i, j) is the lower left one of cell (i, j).
  i, j, step_x, step_y, count = start_i, start_j, 1, 0, 1
  out_x[0], out_y[0] = cuts_x[i - 1], cuts_y[j - 1]
  while True:
    i, j = i + step_x, j + step_y
    if i == start_i and j == start_j:
      break
    left_i, left_j = i + (step_x - step_y - 1) // 2, j + (step_x + step_y - 1) // 2
    right_i, right_j = i + (step_x + step_y - 1) // 2, j + (step_y - step_x - 1) // 2
    if cells[right_i, right_j] != -1:
      turn = -1
    elif cells[left_i, left_j] != -1:
      continue
    else:
      turn = 1
    step_x, step_y = -turn * step_y, turn * step_x
    out_x[count], out_y[count] = cuts_x[i - 1], cuts_y[j - 1]
    count += 1
  return out_x[:count].copy(), out_y[:count].copy()
