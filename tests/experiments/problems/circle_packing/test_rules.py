"""Packings are validated without tolerance, and every cheat is reported."""

from __future__ import annotations

from fractions import Fraction
import math

import numpy as np
from packing_cases import QUARTERS, is_packing, random_sentence
import pytest

from experiments.problems import circle_packing


def test_published_values_stand_best_first_with_their_source():
  for num_circles in (26, 32):
    published = circle_packing.CirclePacking(num_circles=num_circles).published
    values = [entry.value for entry in published]
    assert values == sorted(values, reverse=True)
    assert all(entry.who and entry.source.startswith("http") for entry in published)
  assert circle_packing.CirclePacking(num_circles=5).published == ()


def test_touching_dyadic_circles_are_a_packing_and_their_sum_is_exact():
  score = circle_packing.CirclePacking(num_circles=4).verify(QUARTERS)
  assert score.is_valid and score.value == score.reward == 1.0
  assert score.certificate == "sum of radii = 1/1; value is rounded down"
  # A right triangle of sides 3, 4 and 5 sixteenths: touching off the axes.
  touching = [[0.25, 0.25, 2 / 16], [0.25 + 3 / 16, 0.5, 3 / 16]]
  assert circle_packing.CirclePacking(num_circles=2).verify(touching).value == 5 / 16


@pytest.mark.parametrize("entry", range(12))
def test_one_unit_in_the_last_place_too_far_is_refused(entry):
  circle, place = divmod(entry, 3)
  environment = circle_packing.CirclePacking(num_circles=4)
  moved = [list(row) for row in QUARTERS]
  moved[circle][place] = math.nextafter(moved[circle][place], math.inf)
  score = environment.verify(moved)
  assert not score.is_valid
  assert "overlap" in score.reason or "crosses" in score.reason


def test_an_overlap_is_named_with_its_pair_and_its_depth():
  environment = circle_packing.CirclePacking(num_circles=3)
  far = [0.875, 0.875, 0.125]
  score = environment.verify([[0.25, 0.5, 0.125], far, [0.5, 0.5, 0.125 + 2.0**-50]])
  assert score.reason == "circles 0 and 2 overlap by 8.88e-16, expected none; shrink the radii"
  score = environment.verify([[0.25, 0.5, 0.25], far, [0.5, 0.5, 0.25]])
  assert score.reason == "circles 0 and 2 overlap by 0.25, expected none; shrink the radii"


def test_the_value_is_the_exact_sum_rounded_down():
  environment = circle_packing.CirclePacking(num_circles=2)
  score = environment.verify([[0.25, 0.25, 0.125], [0.75, 0.75, 2.0**-57]])
  assert score.value == 0.125
  assert Fraction(score.certificate.split()[4].rstrip(";")) == Fraction(0.125) + Fraction(2.0**-57)
  score = environment.verify([[0.25, 0.25, 0.125], [0.75, 0.75, 2.0**-56 + 2.0**-57]])
  assert score.value == 0.125  # To the nearest would be one unit more.


@pytest.mark.parametrize(
  "artefact, reason",
  [
    (None, "artefact: got NoneType, expected a list of 2 [x, y, r]"),
    ("[[0.5, 0.5, 0.5]]", "artefact: got str, expected a list"),
    ({"circles": []}, "artefact: got dict, expected a list"),
    (np.full((2, 3), 0.1), "artefact: got ndarray, expected a list"),
    ([], "artefact: got 0 circles, expected 2"),
    ([[0.5, 0.5, 0.1]] * 3, "artefact: got 3 circles, expected 2"),
    ([0.5, 0.5], "circle 0: got float, expected a list [x, y, r]"),
    ([[0.5, 0.5, 0.1], "abc"], "circle 1: got str, expected a list [x, y, r]"),
    ([[0.5, 0.5]] * 2, "circle 0: got 2 entries, expected 3"),
    ([[[0.5], 0.5, 0.1]] * 2, "circle 0: got x of type list, expected a real number"),
    ([[0.5, True, 0.1]] * 2, "circle 0: got y of type bool, expected a real number"),
    ([[0.5, 0.5, 0.1j]] * 2, "circle 0: got r of type complex, expected a real number"),
    ([["0.5", 0.5, 0.1]] * 2, "circle 0: got x of type str, expected a real number"),
    ([[0.5, 0.5, None]] * 2, "circle 0: got r of type NoneType, expected a real number"),
    ([[0.5, 0.5, math.nan]] * 2, "circle 0: got r = nan, expected 0 <= r <= 1"),
    ([[math.nan, 0.5, 0.1]] * 2, "circle 0: got x = nan, expected 0 <= x <= 1"),
    ([[0.5, math.inf, 0.1]] * 2, "circle 0: got y = inf, expected 0 <= y <= 1"),
    ([[0.5, 0.5, 1e300]] * 2, "circle 0: got r = 1e+300, expected 0 <= r <= 1"),
    ([[0.5, 0.5, 10**5000]] * 2, "circle 0: got r = a whole number, expected 0 <= r <= 1"),
    ([[0.5, 0.5, -0.1]] * 2, "circle 0: got r = -0.1, expected 0 <= r <= 1"),
    ([[0.5, 0.5, 0]] * 2, "circle 0: got r = 0, expected r > 0"),
    ([[0.5, 0.5, -0.0]] * 2, "circle 0: got r = 0, expected r > 0"),
    ([[0.1, 0.5, 0.2]] * 2, "circle 0: got x = 0.1 with r = 0.2, which crosses the left wall by"),
    ([[0.5, 0.9, 0.2]] * 2, "circle 0: got y = 0.9 with r = 0.2, which crosses the upper wall by"),
    ([[0.5, 0.5, 0.1]] * 2, "circles 0 and 1 overlap by 0.2"),
    ([[0.5, 0.5, 5e-324]] * 2, "circles 0 and 1 overlap by less than 1e-300"),
  ],
)
def test_every_cheat_is_refused_with_its_reason(artefact, reason):
  score = circle_packing.CirclePacking(num_circles=2).verify(artefact)
  assert not score.is_valid and math.isnan(score.value) and score.reward == 0
  assert reason in score.reason


def test_whole_numbers_and_the_smallest_circles_are_judged_too():
  environment = circle_packing.CirclePacking(num_circles=2)
  assert not environment.verify([[1, 1, 1], [0, 0, 1]]).is_valid
  assert environment.verify([[0.25, 0.25, 5e-324], [0.75, 0.75, 5e-324]]).value == 1e-323


def test_symmetries_and_order_change_neither_validity_nor_value():
  environment = circle_packing.CirclePacking(num_circles=4)
  dyadic = [[0.25, 0.25, 0.25], [0.75, 0.5, 0.125], [0.5625, 0.8125, 0.1875], [0.875, 0.125, 0.125]]
  score = environment.verify(dyadic)
  assert score.is_valid
  for changed in (
    [[1 - x, y, r] for x, y, r in dyadic],
    [[x, 1 - y, r] for x, y, r in dyadic],
    [[y, x, r] for x, y, r in dyadic],
    dyadic[::-1],
  ):
    assert environment.verify(changed) == score
    assert environment.language is not None
  assert environment.language.prompt(dyadic[::-1]) == environment.language.prompt(dyadic)
  sentence = random_sentence(environment.language, np.random.default_rng(0))
  applied = [environment.language.apply(order, sentence, 5) for order in (dyadic, dyadic[::-1])]
  assert applied[0] == applied[1]


def test_a_packing_made_smaller_and_moved_is_one_of_its_share(seed):
  rng = np.random.default_rng(seed)
  environment = circle_packing.CirclePacking(num_circles=4)
  overlapping = [QUARTERS[0], [0.75, 0.25, math.nextafter(0.25, 1)], *QUARTERS[2:]]
  for _ in range(50):
    # Powers of two, and moves that no sum rounds: exact.
    scale = 2.0 ** -float(rng.integers(1, 6))
    right, up = (rng.integers(1, 2**8, 2) / 2.0**9).tolist()
    changed = [[right + x * scale, up + y * scale, r * scale] for x, y, r in QUARTERS]
    assert environment.verify(changed).value == scale
    changed = [[right + x * scale, up + y * scale, r * scale] for x, y, r in overlapping]
    assert "overlap" in environment.verify(changed).reason


def test_the_fast_verifier_agrees_with_fractions_where_circles_nearly_touch(seed):
  rng = np.random.default_rng(seed)
  environment = circle_packing.CirclePacking(num_circles=3)
  counts = {True: 0, False: 0}
  for _ in range(400):
    x, y, r = rng.uniform(0.2, 0.4), rng.uniform(0.2, 0.4), rng.uniform(0.05, 0.2)
    angle, other = rng.uniform(0, math.pi / 2), rng.uniform(0.05, 0.2)
    second = [x + (r + other) * math.cos(angle), y + (r + other) * math.sin(angle), other]
    wall = rng.uniform(0.02, 0.06)
    artefact = [[x, y, r], second, [1 - wall, float(rng.choice([wall, 1 - wall])), wall]]
    for _ in range(int(rng.integers(4))):
      i, k = rng.integers(3, size=2)
      artefact[i][k] = math.nextafter(artefact[i][k], float(rng.choice([0.0, 1.0])))
    expected = is_packing(artefact)
    assert environment.verify(artefact).is_valid == expected
    counts[expected] += 1
  assert min(counts.values()) > 20
