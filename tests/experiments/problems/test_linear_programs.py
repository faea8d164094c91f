"""Linear programs by hand and against scipy; a solution does not depend on earlier ones."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies
import numpy as np
import pytest
from scipy import optimize, sparse

from experiments.problems import linear_programs

INF = np.inf


def program(seed: int):
  """Returns a random program with a bounded optimum: (costs, matrix, row_bounds, bounds)."""
  rng = np.random.default_rng(seed)
  rows, columns = int(rng.integers(1, 12)), int(rng.integers(1, 15))
  matrix = rng.standard_normal((rows, columns))
  inside = rng.uniform(-1, 1, columns)
  most = matrix @ inside + rng.uniform(0, 1, rows)
  least = np.where(rng.random(rows) < 0.5, -INF, matrix @ inside - rng.uniform(0, 1, rows))
  return rng.standard_normal(columns), matrix, (least, most), (inside - 1, inside + 1)


def test_a_program_by_hand():
  # The largest x + 2y with x + y <= 3 and x - y = 1 within [0, 10]: (2, 1).
  found = linear_programs.solve(
    np.array([-1.0, -2.0]),
    np.array([[1.0, 1.0], [1.0, -1.0]]),
    (np.array([-INF, 1.0]), np.array([3.0, 1.0])),
    (np.zeros(2), np.full(2, 10.0)),
  )
  np.testing.assert_array_equal(found, [2.0, 1.0])


@hypothesis.given(strategies.integers(0, 2**32))
def test_the_optimum_is_scipys(seed: int):
  costs, matrix, (least, most), bounds = program(seed)
  found = linear_programs.solve(costs, matrix, (least, most), bounds)
  expected = optimize.milp(
    costs, bounds=optimize.Bounds(*bounds),
    constraints=optimize.LinearConstraint(matrix, least, most),
  )  # fmt: skip
  assert found is not None
  np.testing.assert_allclose(costs @ found, expected.fun, rtol=1e-8, atol=1e-8)
  assert (matrix @ found <= most + 1e-9).all() and (matrix @ found >= least - 1e-9).all()
  by_rows = sparse.csr_array(matrix)
  np.testing.assert_array_equal(linear_programs.solve(costs, by_rows, (least, most), bounds), found)


@hypothesis.given(strategies.integers(0, 2**32), strategies.integers(0, 2**32))
def test_what_was_solved_before_changes_no_bit(seed: int, other: int):
  first = linear_programs.solve(*program(seed))
  linear_programs.solve(*program(other))
  linear_programs.solve(*program(other), max_pivots=1)
  again = linear_programs.solve(*program(seed))
  assert first is not None and again is not None and first.tobytes() == again.tobytes()


def test_no_answer_and_no_more_pivots_are_none():
  costs, box = np.ones(1), (np.zeros(1), np.ones(1))
  beyond = np.full(1, 2.0), np.full(1, 3.0)
  assert linear_programs.solve(costs, np.ones((1, 1)), beyond, box) is None
  many = program(3)
  assert linear_programs.solve(*many) is not None
  assert linear_programs.solve(*many, max_pivots=0) is None


@pytest.mark.parametrize("cost, coefficient", [(np.nan, 1.0), (1.0, np.inf)])
def test_a_program_of_no_numbers_is_refused(cost: float, coefficient: float):
  unit = np.zeros(1), np.ones(1)
  with pytest.raises(ValueError, match="costs or coefficients of 1 rows and 1 columns that are"):
    linear_programs.solve(np.array([cost]), np.array([[coefficient]]), unit, unit)
