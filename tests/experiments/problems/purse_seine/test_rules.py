"""Illegal fences are refused with the reason, and points are equal on every machine."""

from __future__ import annotations

import hashlib
import json
import math

from fence_cases import SQUARE, WHOLE, notched, small
import numpy as np
import pytest

from experiments.problems import purse_seine
from experiments.problems.purse_seine import environment, rules


@pytest.mark.parametrize(
  ("artefact", "reason"),
  [
    (None, "got NoneType, expected a list of [x, y]"),
    ({"0": [1, 2]}, "got dict, expected a list of [x, y]"),
    (SQUARE[:3], "got 3 vertices, expected 4 to 1000"),
    ([[x, 0] for x in range(1001)], "got 1001 vertices, expected 4 to 1000"),
    ([*SQUARE[:3], 7], "vertex 3: got 7, expected [x, y]"),
    ([*SQUARE[:3], [10, 20, 30]], "vertex 3: got [10, 20, 30], expected [x, y]"),
    ([*SQUARE[:3], "10"], "vertex 3: got 10, expected [x, y]"),
    ([*SQUARE[:3], [10**5000]], "vertex 3: got list, expected [x, y]"),
    ([*SQUARE[:3], [10**5000, 20]], "vertex 3: got int, expected a coordinate in 0..100000"),
    ([*SQUARE[:3], [10.0, 20]], "vertex 3: got float 10.0, expected integers"),
    ([*SQUARE[:3], [True, 20]], "vertex 3: got bool True, expected integers"),
    ([*SQUARE[:3], [math.nan, 20]], "vertex 3: got float nan, expected integers"),
    ([*SQUARE[:3], [10j, 20]], "vertex 3: got complex"),
    ([*SQUARE[:3], [-1, 20]], "vertex 3: got -1, expected a coordinate in 0..100000"),
    ([*SQUARE[:3], [10, 100_001]], "vertex 3: got 100001, expected a coordinate in 0..100000"),
    ([*SQUARE[:3], [10**30, 20]], "vertex 3: got 1000000000000000000000000000000, expected"),
    ([*SQUARE, [10, 10]], "vertices 0 and 4: got [10, 10] twice"),
    ([[10, 10], [20, 10], [21, 20], [10, 20]], "edge 1: got [20, 10] to [21, 20], expected"),
    ([[10, 10], [20, 10], [20, 20], [11, 20]], "edge 3: got [11, 20] to [10, 10], expected"),
    # Edges 1 and 4 cross; 0 and 4 touch in a point; 0 and 4 overlap.
    (
      [[0, 0], [20, 0], [20, 20], [10, 20], [10, 10], [30, 10], [30, 30], [0, 30]],
      "edges 1 and 4: got a common point",
    ),
    (
      [[0, 0], [20, 0], [20, 20], [10, 20], [10, 0], [5, 0], [5, 10], [0, 10]],
      "edges 0 and 3: got a common point",
    ),
    (
      [[0, 0], [20, 0], [20, 20], [12, 20], [12, 10], [20, 10], [20, 9], [0, 9]],
      "edges 1 and 4: got a common point",
    ),
    # Straight back on itself, also across the end of the list.
    ([[0, 0], [20, 0], [10, 0], [10, 20], [0, 20]], "edges 0 and 1: got a common point"),
    ([[20, 0], [10, 0], [10, 20], [0, 20], [0, 0]], "edges 0 and 4: got a common point"),
    ([[0, 0], [10, 0], [20, 0], [30, 0]], "got a common point"),
  ],
)
def test_illegal_fences_are_refused(artefact, reason):
  score = WHOLE.verify(artefact)
  assert not score.is_valid and score.reward == 0 and reason in score.reason


def test_a_fence_may_be_400000_long_and_no_longer():
  whole = [[0, 0], [100_000, 0], [100_000, 100_000], [0, 100_000]]
  assert rules.perimeter_of(rules.fence_of(whole)) == 400_000
  assert WHOLE.verify(whole).is_valid
  longer = [[0, 0], [100_000, 0], [100_000, 100_000], [50_000, 100_000], [50_000, 99_999],
            [40_000, 99_999], [40_000, 100_000], [0, 100_000]]  # fmt: skip
  assert "perimeter: got 400002, expected at most 400000" in WHOLE.verify(longer).reason


def test_1000_vertices_are_legal():
  fence = notched(249, 1000, 20)
  assert len(fence) == 1000
  assert small([(4, 20), (2, 20)]).verify(fence).value == 2


def test_generated_points_are_the_same_on_every_machine():
  points = rules.points_of(0)
  assert [len(kind) for kind in points] == [5000, 5000]
  both = np.concatenate(points)
  assert both.min() >= 0 and both.max() <= 100_000 and len(np.unique(both, axis=0)) == 10_000
  digest = hashlib.sha256(json.dumps(both.tolist()).encode()).hexdigest()
  assert digest[:16] == "2de97b8f5486340f"
  assert not np.array_equal(points.wanted, rules.points_of(1).wanted)


def test_the_generator_of_the_prompts_draws_the_same_points():
  scope = {"hashlib": hashlib, "math": math}
  exec("from __future__ import annotations\n" + environment.GENERATOR.read_text(), scope)
  for shown, ours in zip(scope["generate"](0), rules.points_of(0), strict=True):
    np.testing.assert_array_equal(shown, ours)


def test_the_points_of_a_whole_contest_are_drawn_once():
  assert rules.points_of.cache_parameters()["maxsize"] >= 150


def test_published_values_are_the_best_first():
  values = [published.value for published in WHOLE.published]
  assert values == sorted(values, reverse=True) and round(150 * values[0]) == 567_062
  # These are means over other inputs, so a high value for this one is not comparable.
  assert not any(published.is_comparable for published in WHOLE.published)


def test_impossible_instances_are_refused():
  def points(wanted, unwanted=((1, 1),)):
    return rules.Points(np.array(wanted), np.array(unwanted))

  for given, message in (
    (dict(instance=-1), "got instance=-1, expected a number from 0 on"),
    (dict(points=points([[0.5, 1.0]])), "got wanted of shape (1, 2) and type float64"),
    (dict(points=points([1, 2])), "got wanted of shape (2,)"),
    (dict(points=points([[0, 100_001]])), "got wanted in 0..100001, expected coordinates in"),
    (dict(points=points([[5, 5]], [[-1, 5]])), "got unwanted in -1..5"),
    (dict(points=points([[1, 1]])), "got 1 points twice, expected different points"),
  ):
    with pytest.raises(ValueError) as refused:
      purse_seine.PurseSeine(**given)
    assert message in str(refused.value)


def test_points_of_ones_own_have_no_published_values():
  environment = small([(15, 15)])
  assert environment.published == () and environment.name == "purse_seine"
  assert WHOLE.published[0].value == 567_062 / 150 and WHOLE.name == "purse_seine_0"
  assert "wanted = [[15, 15]]" in environment.describe(SQUARE, environment.verify(SQUARE))
