"""Counts are exact: by hand, along edges, and for every notation of a fence."""

from __future__ import annotations

import itertools

from fence_cases import CROSS, SPIRAL, SQUARE, WHOLE, after_sentences, by_hand, small
import numpy as np
import pytest

from experiments.problems import purse_seine
from experiments.problems.purse_seine import rules


@pytest.mark.parametrize(
  ("point", "value"),
  [
    ((15, 15), 2), ((10, 10), 2), ((20, 20), 2), ((10, 20), 2), ((20, 10), 2), ((15, 10), 2),
    ((15, 20), 2), ((10, 15), 2), ((20, 15), 2), ((9, 15), 1), ((21, 15), 1), ((15, 9), 1),
    ((15, 21), 1), ((9, 9), 1), ((21, 21), 1),
  ],
)  # fmt: skip
def test_points_on_edges_and_vertices_count_as_inside(point, value):
  assert small([point]).verify(SQUARE).value == value
  assert small([], [point]).verify(SQUARE).value == (0 if value == 2 else 1)


@pytest.mark.parametrize("fence", [SQUARE, CROSS, SPIRAL], ids=["square", "cross", "spiral"])
def test_every_lattice_point_counts_as_by_hand(fence):
  lattice = list(itertools.product(range(32), repeat=2))
  environment = small(lattice)
  assert environment.verify(fence).value == by_hand(environment.points, fence)
  for turned in (fence[::-1], fence[3:] + fence[:3]):
    assert environment.verify(turned) == environment.verify(fence)


def test_counts_of_found_fences_agree_with_counting_by_hand():
  for seed in range(2):
    artefact = after_sentences(WHOLE, seed, 12)
    assert len(artefact) > 8
    assert WHOLE.verify(artefact).value == by_hand(WHOLE.points, artefact)


def test_counts_are_exact_along_the_edges_of_the_plane():
  corners = [(0, 0), (0, 100_000), (100_000, 0), (100_000, 100_000), (127, 128), (128, 127)]
  whole = [[0, 0], [100_000, 0], [100_000, 100_000], [0, 100_000]]
  score = small(corners).verify(whole)
  assert score.value == 7 and score.reward == 8 / 1500
  assert small(corners).verify([[127, 127], [128, 127], [128, 128], [127, 128]]).value == 3


def test_vertices_on_a_straight_line_change_nothing():
  straight = [[10, 10], [15, 10], [20, 10], [20, 20], [13, 20], [10, 20]]
  environment = small([(10, 12), (17, 20), (3, 3)])
  assert environment.verify(straight) == environment.verify(SQUARE)
  assert environment.verify(SQUARE).value == 3


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("mirror", [False, True])
def test_transposing_and_mirroring_leave_the_value(swap: bool, mirror: bool):
  artefact = after_sentences(WHOLE, 3, 6)

  def image(points):
    points = np.array(points)
    points = points[:, ::-1] if swap else points
    return np.column_stack((100_000 - points[:, 0], points[:, 1])) if mirror else points

  other = purse_seine.PurseSeine(points=rules.Points(*map(image, WHOLE.points)))
  assert other.verify(image(artefact).tolist()) == WHOLE.verify(artefact)
