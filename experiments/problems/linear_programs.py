"""Solves linear programs of dozens to hundreds of variables with HiGHS's simplex method.

scipy's `linprog` uses the same solver, but its checks cost more than a program of fifty variables
(2.3 ms, here 0.4), and polish tools spend their time on sequences of such programs.
"""

from __future__ import annotations

import threading

import highspy
import numpy as np
from scipy import sparse

# The tightest tolerance of HiGHS: steps in a sequence become smaller than its default 1e-7.
_TOLERANCE = 1e-10
_OPTIONS = {
  "output_flag": False,
  # The programs here are dense and of order one: presolve and scaling cost more than they save.
  "presolve": "off",
  "simplex_scale_strategy": 0,
  "parallel": "off",
  "threads": 1,
  "primal_feasibility_tolerance": _TOLERANCE,
  "dual_feasibility_tolerance": _TOLERANCE,
}

_solvers = threading.local()


def solve(
  costs: np.ndarray,
  matrix: np.ndarray | sparse.csr_array,
  row_bounds: tuple[np.ndarray, np.ndarray],
  bounds: tuple[np.ndarray, np.ndarray],
  max_pivots: int | None = None,
) -> np.ndarray | None:
  """Returns the x that minimises costs . x with matrix x and x within bounds; None if not found.

  The result does not depend on programs solved before.

  Args:
    costs: f64[n].
    matrix: f64[m, n].
    row_bounds: lower and upper bounds of matrix x, f64[m] each; infinite for none.
    bounds: lower and upper bounds of x, f64[n] each.
    max_pivots: limit of simplex pivots, after which the program is given up; None is no limit.

  Raises:
    ValueError: if a cost or a coefficient is not finite.
  """
  num_rows, num_columns = row_bounds[0].size, costs.size
  values = matrix.ravel() if isinstance(matrix, np.ndarray) else matrix.data
  if not (np.isfinite(costs).all() and np.isfinite(values).all()):
    raise ValueError(
      f"linear_programs.solve: got costs or coefficients of {num_rows} rows and {num_columns}"
      " columns that are not finite, expected numbers; only bounds may be infinite."
    )
  if isinstance(matrix, np.ndarray):
    starts = np.arange(0, matrix.size, num_columns, dtype=np.int32)
    columns = np.arange(num_columns, dtype=np.int32)
    indices = np.broadcast_to(columns, (num_rows, num_columns)).ravel()
  else:
    starts, indices = matrix.indptr[:-1].astype(np.int32), matrix.indices.astype(np.int32)
  solver = _solver()
  solver.clearModel()
  solver.setOptionValue(
    "simplex_iteration_limit", highspy.kHighsIInf if max_pivots is None else max_pivots
  )
  solver.passModel(
    num_columns, num_rows, values.size,
    int(highspy.MatrixFormat.kRowwise), int(highspy.ObjSense.kMinimize), 0.0,
    _floats(costs), _floats(bounds[0]), _floats(bounds[1]),
    _floats(row_bounds[0]), _floats(row_bounds[1]),
    starts, indices, _floats(values), np.zeros(num_columns, np.int32),
  )  # fmt: skip
  solver.run()
  if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
    return None
  return np.array(solver.getSolution().col_value)


def _solver() -> highspy.Highs:
  # One solver per thread: creating one takes a third of the time of a small program.
  if not hasattr(_solvers, "solver"):
    _solvers.solver = highspy.Highs()
    for name, value in _OPTIONS.items():
      _solvers.solver.setOptionValue(name, value)
  return _solvers.solver


def _floats(values: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(values, np.float64)
