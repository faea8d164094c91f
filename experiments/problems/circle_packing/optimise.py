"""The polish tool: settles circles f64[3, n] in place, then maximises the sum of radii.

It has three stages, each starting from the previous result:

  settle    L-BFGS on  -Σ r + stiffness/2 Σ overlap²,  five times stiffer each time  (1 ms at n=32)
  touching  Newton's method on "overlap = 0" for overlapping pairs and walls (0.2 ms)
  linear    if that is not applicable: linear programs in moves and radii, by HiGHS (5 ms each).
            A distance is a convex function of the moves, so its tangent is a lower bound: each
            program's optimum is again a packing, and not worse.

Finally all radii are reduced by about 1e-15 to 1e-12, until the exact verifier accepts.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import sparse

from experiments.problems import linear_programs
from experiments.problems.circle_packing import descent, geometry, rules
from seerjax.discovery.environment import Artefact

STIFF = 6250.0  # Stiffness of the last stage of settling; overlaps are then about 1e-4.
FIRM = 250.0  # Keeps a packing's neighbourhoods.
SOFT = 10.0  # Lets circles pass through each other: for random starts.

TRUST = 0.02  # Maximum move of a coordinate in one linear program.
MAX_LINEAR_PROGRAMS = 12


def settle(circles: np.ndarray, stiffness: float, num_steps: int) -> float:
  """Pushes circles apart and grows them with increasing stiffness; returns an estimate of the sum.

  Args:
    circles: f64[3, n], changed in place; overlaps of about 1e-4 remain.
    stiffness: initial stiffness, in (0, STIFF); a soft start changes neighbours.
    num_steps: maximum steps of L-BFGS at each stiffness.
  """
  before, previous = 0.0, 0.0
  while True:
    at_least = min(stiffness, STIFF)
    value = -descent.minimise(circles.reshape(-1), at_least, num_steps, 1e-4)
    if stiffness >= STIFF:
      # The excess of the penalised optimum is proportional to 1 / stiffness.
      return value - (before - value) * previous / (STIFF - previous) if previous else value
    before, previous = value, stiffness
    stiffness *= 5.0


def finish(circles: np.ndarray) -> Artefact:
  """Returns a valid artefact near settled circles f64[3, n], at a maximum of the sum of radii."""
  least = 0.02 / math.sqrt(circles.shape[1])
  for _ in range(3):  # A circle inside another cannot leave it by descent.
    lost = int(np.argmin(circles[2]))
    if circles[2, lost] > least:
      break
    geometry.into_hole(circles, lost, 0, 1.0)
    settle(circles, FIRM, 200)
  np.clip(circles[:2], geometry.LEAST_RADIUS, 1 - geometry.LEAST_RADIUS, out=circles[:2])
  vertex = touching(circles)
  if vertex is None:  # The contacts are not settled yet.
    settle(circles, FIRM, 600)
    vertex = touching(circles)
  return accepted(_linear(circles) if vertex is None else vertex)


def touching(circles: np.ndarray) -> np.ndarray | None:
  """Returns circles f64[3, n] that touch exactly where settled ones overlap; None if impossible."""
  vertex = circles.copy()
  touches = descent.newton(vertex.reshape(-1), 8) and geometry.excess(vertex) < 1e-12
  return vertex if touches else None


def _linear(circles: np.ndarray) -> np.ndarray:
  """Returns circles f64[3, n] after linear programs in moves and radii, until there is no gain."""
  value = -math.inf
  for _ in range(MAX_LINEAR_PROGRAMS):
    solved = _linear_program(circles, TRUST)
    if solved is None or math.fsum(solved[2]) < value + 1e-13:
      break
    circles, value = solved, math.fsum(solved[2])
  return circles


def _linear_program(circles: np.ndarray, trust: float) -> np.ndarray | None:
  """Returns the best circles with centres within `trust`, using tangents of distances.

  maximise Σ r'_i   over moves m and radii r', where   r'_i + r'_j <= d_ij + u_ij·(m_i - m_j)

  Args:
    circles: f64[3, n]; radii only determine which pairs are close enough to matter.
    trust: maximum move of a coordinate.

  Returns:
    f64[3, n], feasible up to the solver's tolerance; None if two centres coincide.
  """
  n = circles.shape[1]
  x, y, r = circles
  first, second, distance = geometry.pairs(circles)
  if first.size and distance.min() <= 2 * geometry.LEAST_RADIUS:
    return None
  near = distance < r[first] + r[second] + 4 * trust + 0.04
  while True:
    i, j, apart = first[near], second[near], distance[near]
    ux, uy = (x[i] - x[j]) / apart, (y[i] - y[j]) / apart
    pair, ones, each = np.arange(i.size), np.ones(i.size), np.arange(n)
    rows = [np.tile(pair, 6), *(i.size + wall * n + np.tile(each, 2) for wall in range(4))]
    columns = [2 * n + i, 2 * n + j, i, j, n + i, n + j]
    values = [ones, ones, -ux, ux, -uy, uy]
    for axis in (0, 1):
      for sign in (-1.0, 1.0):
        columns += [2 * n + each, axis * n + each]
        values += [np.ones(n), np.full(n, sign)]
    matrix = sparse.csr_array(
      (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))),
      shape=(i.size + 4 * n, 3 * n),
    )
    most = np.concatenate([apart, x, 1.0 - x, y, 1.0 - y])
    solution = linear_programs.solve(
      np.concatenate([np.zeros(2 * n), -np.ones(n)]),
      matrix,
      (np.full(most.size, -np.inf), most),
      (
        np.concatenate([np.full(2 * n, -trust), np.full(n, geometry.LEAST_RADIUS)]),
        np.concatenate([np.full(2 * n, trust), np.full(n, 0.5)]),
      ),
    )
    if solution is None:
      return None
    moved = solution.reshape(3, n).copy()
    moved[:2] += circles[:2]
    if near.all() or geometry.excess(moved) < 1e-9:
      return moved
    near[:] = True


def accepted(circles: np.ndarray) -> Artefact:
  """Returns circles f64[3, n] as an artefact, shrunk minimally so that the verifier accepts it."""
  shrink = 2.0**-52
  while shrink < 1e-8:
    tried = circles.copy()
    tried[2] *= 1.0 - shrink
    if geometry.excess(tried) <= 0 and not rules.wall_crossed(tried) and not rules.overlap(tried):
      return tried.T.tolist()
    shrink *= 4
  # The circles overlap substantially: uses radii that certainly fit these centres.
  room = geometry.room(circles)
  if not room.min() > 0:
    circles = _spread(circles)
    room = geometry.room(circles)
  return accepted(np.concatenate([circles[:2], 0.5 * room[None]]))


def _spread(circles: np.ndarray) -> np.ndarray:
  """Returns circles with centres moved off each other and off the walls."""
  circles = circles.copy()
  circles[2] = np.maximum(np.minimum(circles[2], geometry.room(circles)), 0)
  for i in np.flatnonzero(circles[2] <= 0):
    geometry.into_hole(circles, int(i), 0, 1.0)
  return circles
