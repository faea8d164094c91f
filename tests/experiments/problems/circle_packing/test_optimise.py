"""The optimiser ends at a maximum, and its stages agree."""

from __future__ import annotations

import numpy as np
from packing_cases import SMALL

from experiments.problems import circle_packing
from experiments.problems.circle_packing import optimise


def best_radii(centres: np.ndarray) -> np.ndarray:
  """Radii f64[n] of the greatest sum for centres f64[2, n] that may not move."""
  circles = np.concatenate([centres, np.full((1, centres.shape[1]), 0.5)])
  solved = optimise._linear_program(circles, 0.0)
  assert solved is not None
  return solved[2]


def test_the_polish_ends_at_a_maximum():
  environment = circle_packing.CirclePacking(num_circles=12)
  for seed in range(5):
    circles = np.array(environment.start(seed)).T.copy()
    optimise.settle(circles, optimise.FIRM, 200)
    artefact = optimise.finish(circles)
    value = environment.verify(artefact).value
    assert value > environment.verify(environment.start(seed)).value
    # Radii for these centres, and moves by a linear program, gain nothing more.
    circles = np.array(artefact).T
    assert abs(best_radii(circles[:2]).sum() - value) < 1e-9
    assert abs(optimise._linear(circles)[2].sum() - value) < 1e-9


def test_newton_and_linear_programs_agree():
  agreed = 0
  for seed in range(10):
    circles = np.array(circle_packing.CirclePacking(num_circles=12).start(seed)).T.copy()
    optimise.settle(circles, optimise.SOFT, 400)
    vertex = optimise.touching(circles)
    if vertex is not None:
      assert abs(vertex[2].sum() - optimise._linear(circles)[2].sum()) < 1e-6
      agreed += 1
  assert agreed >= 6


def test_a_linear_program_without_moves_solves_two_circles_by_hand():
  # Two centres 0.3 apart in the middle: the sum is their distance, whatever the shares.
  assert abs(best_radii(np.array([[0.35, 0.65], [0.5, 0.5]])).sum() - 0.3) < 1e-12
  # A corner keeps one small; the other has its wall.
  radii = best_radii(np.array([[0.1, 0.6], [0.1, 0.5]]))
  np.testing.assert_allclose(radii, [0.1, 0.4], atol=1e-12)


def test_circles_in_one_place_are_still_made_a_packing():
  circles = np.full((3, 7), 0.3)
  artefact = optimise.finish(circles)
  assert SMALL.verify(artefact).is_valid
  circles = np.concatenate([np.full((2, 7), 0.5), np.full((1, 7), 0.1)])
  assert SMALL.verify(optimise.accepted(circles)).is_valid
