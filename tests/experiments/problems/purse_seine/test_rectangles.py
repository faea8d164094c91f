"""Adding, removing, joining and pushing rectangles, by hand."""

from __future__ import annotations

from fence_cases import is_held
import numpy as np

from experiments.problems.purse_seine import rectangles, rules


def rectangle(left: int, bottom: int, right: int, top: int):
  return rules.Fence(np.array([left, right, right, left]), np.array([bottom, bottom, top, top]))


def combined(fence, boxes, is_added: bool):
  xs, ys = rectangles._combine(fence.xs, fence.ys, np.array(boxes), is_added)
  return rules.artefact_of(rules.Fence(xs, ys)) if len(xs) else []


def test_rectangles_are_added_and_removed_by_hand():
  square = rectangle(10, 10, 20, 20)
  assert combined(square, [(20, 10, 30, 20)], True) == [[10, 10], [30, 10], [30, 20], [10, 20]]
  assert combined(square, [(15, 15, 30, 25)], True) == [
    [10, 10], [20, 10], [20, 15], [30, 15], [30, 25], [15, 25], [15, 20], [10, 20],
  ]  # fmt: skip
  assert combined(square, [(15, 0, 40, 40)], False) == [[10, 10], [15, 10], [15, 20], [10, 20]]
  # A hole is filled, a detached part is dropped, and a shared corner does not join.
  assert combined(square, [(12, 12, 14, 14)], False) == rules.artefact_of(square)
  assert combined(square, [(12, 0, 13, 40)], False) == [[13, 10], [20, 10], [20, 20], [13, 20]]
  assert combined(square, [(20, 20, 25, 25)], True) == rules.artefact_of(square)
  assert combined(square, [(0, 0, 40, 40)], False) == []


def test_a_ring_is_filled_and_two_corners_that_meet_leave_a_simple_fence():
  frame = combined(rectangle(0, 0, 30, 5), [(0, 0, 5, 30), (0, 25, 30, 30), (25, 0, 30, 30)], True)
  assert frame == [[0, 0], [30, 0], [30, 30], [0, 30]]
  # The pocket between both squares is closed where they meet, at (20, 20) alone.
  arms = [(20, 20, 30, 30), (10, 10, 40, 12), (38, 10, 40, 30), (28, 28, 40, 30)]
  bent = combined(rectangle(10, 10, 20, 20), arms, True)
  assert rules.illegality(bent) == ""


def test_what_lies_apart_is_joined_by_a_strip():
  square = rectangle(1000, 1000, 2000, 2000)
  for box in ((5000, 1200, 6000, 1800), (5000, 5000, 6000, 6000), (1200, 0, 1800, 100)):
    boxes = rectangles._joined(square, box)
    assert len(boxes) == 3
    fence = combined(square, boxes, True)
    assert rules.illegality(fence) == ""
    assert is_held((box[0] + box[2]) // 2, (box[1] + box[3]) // 2, fence)
    assert is_held(1500, 1500, fence)
  assert rectangles._joined(square, (1500, 1500, 3000, 3000)) == [(1500, 1500, 3000, 3000)]
  assert rectangles._joined(square, (1400, 1400, 1500, 1500)) == [(1400, 1400, 1500, 1500)]


def test_pushes_move_the_nearest_edge_out_and_in():
  low, high = 10_000, 20_000
  square = rectangle(low, low, high, high)
  depth = rectangles._PUSHES[3]
  for x, y, out, into in (
    (15_000, 9000, (low, low - depth, high, low), (low, low, high, low + depth)),
    (15_000, 21_000, (low, high, high, high + depth), (low, high - depth, high, high)),
    (9000, 15_000, (low - depth, low, low, high), (low, low, low + depth, high)),
    (21_000, 15_000, (high, low, high + depth, high), (high - depth, low, high, high)),
  ):
    assert rectangles._push(square, x, y, 3, 30_000) == ([out], True)
    assert rectangles._push(square, x, y, 3 + 8, 30_000) == ([into], False)
  boxes, is_out = rectangles._push(square, 12_000, 9000, 3, 1000)
  assert is_out and boxes == [(11_500, 10_000 - depth, 12_500, 10_000)]
