"""Compiled functions that settle circles, given as z f64[3n]: all x, all y, all r.

They add in a fixed order, without BLAS, so results are the same on every machine.
"""

from __future__ import annotations

import math

import numpy as np

from seerjax import compiled


@compiled.function
def _penalised(z, stiffness, gradient):
  """Returns -Σ r + stiffness/2 Σ overlap², and writes its gradient."""
  n = z.size // 3
  total = 0.0
  for i in range(n):
    gradient[i] = 0.0
    gradient[n + i] = 0.0
    gradient[2 * n + i] = -1.0
  for i in range(n):
    r = z[2 * n + i]
    total -= r
    if r < 0:
      total += 0.5 * stiffness * r * r
      gradient[2 * n + i] += stiffness * r
    for axis in range(2):
      place = z[axis * n + i]
      low = r - place
      if low > 0:
        total += 0.5 * stiffness * low * low
        gradient[axis * n + i] -= stiffness * low
        gradient[2 * n + i] += stiffness * low
      high = r + place - 1.0
      if high > 0:
        total += 0.5 * stiffness * high * high
        gradient[axis * n + i] += stiffness * high
        gradient[2 * n + i] += stiffness * high
    for j in range(i):
      reach = r + z[2 * n + j]
      dx = z[i] - z[j]
      dy = z[n + i] - z[n + j]
      squared = dx * dx + dy * dy
      if reach > 0 and squared < reach * reach:
        distance = math.sqrt(squared)
        press = stiffness * (reach - distance)
        total += 0.5 * press * (reach - distance)
        gradient[2 * n + i] += press
        gradient[2 * n + j] += press
        if distance > 1e-12:
          along_x = press * dx / distance
          along_y = press * dy / distance
          gradient[i] -= along_x
          gradient[j] += along_x
          gradient[n + i] -= along_y
          gradient[n + j] += along_y
  return total


@compiled.function
def _dot(a, b):
  total = 0.0
  for t in range(a.size):
    total += a[t] * b[t]
  return total


@compiled.function
def minimise(z, stiffness, num_steps, tolerance):
  """Runs up to `num_steps` of L-BFGS on z in place, until no derivative is above `tolerance`.

  The memory is 8; steps are halved until Armijo's rule holds, and no coordinate moves by more than
  0.1.

  Returns:
    the final penalised value.
  """
  memory = 8
  size = z.size
  moves = np.zeros((memory, size))
  turns = np.zeros((memory, size))
  scales = np.zeros(memory)
  shares = np.zeros(memory)
  gradient = np.empty(size)
  new_gradient = np.empty(size)
  step = np.empty(size)
  new_z = np.empty(size)
  value = _penalised(z, stiffness, gradient)
  known = 0
  for _ in range(num_steps):
    steepest = 0.0
    for t in range(size):
      steepest = max(steepest, abs(gradient[t]))
    if steepest < tolerance:
      break
    step[:] = -gradient
    for back in range(min(known, memory)):
      k = (known - 1 - back) % memory
      shares[k] = scales[k] * _dot(moves[k], step)
      for t in range(size):
        step[t] -= shares[k] * turns[k, t]
    length = 0.3 / stiffness
    if known:
      k = (known - 1) % memory
      length = 1.0 / (scales[k] * _dot(turns[k], turns[k]))
    for t in range(size):
      step[t] *= length
    for forth in range(min(known, memory)):
      k = (known - min(known, memory) + forth) % memory
      share = shares[k] - scales[k] * _dot(turns[k], step)
      for t in range(size):
        step[t] += share * moves[k, t]
    slope = _dot(gradient, step)
    if not slope < 0:
      known = 0
      for t in range(size):
        step[t] = -gradient[t] * (0.3 / stiffness)
      slope = _dot(gradient, step)
    longest = 0.0
    for t in range(size):
      longest = max(longest, abs(step[t]))
    fraction = 0.1 / longest if longest > 0.1 else 1.0
    found = False
    new_value = value
    for attempt in range(20):
      for t in range(size):
        new_z[t] = z[t] + fraction * step[t]
      new_value = _penalised(new_z, stiffness, new_gradient)
      if new_value <= value + 1e-4 * fraction * slope:
        found = True
        break
      fraction *= 0.5 if attempt < 3 else 0.2
    if not found:
      if known == 0:
        break
      known = 0
      continue
    k = known % memory
    for t in range(size):
      moves[k, t] = new_z[t] - z[t]
      turns[k, t] = new_gradient[t] - gradient[t]
      z[t] = new_z[t]
      gradient[t] = new_gradient[t]
    value = new_value
    curvature = _dot(moves[k], turns[k])
    if curvature > 1e-14:
      scales[k] = 1.0 / curvature
      known += 1
  return value


@compiled.function
def newton(z, num_steps):
  """Moves z so that overlapping circles just touch; returns whether that succeeded.

  In a settled packing an overlap is a Lagrange multiplier divided by the stiffness: overlaps are
  the constraints that are tight at the optimum, and 3n or more of them determine the optimum.
  """
  n = z.size // 3
  size = 3 * n
  # Constraints (i, j): a pair if j >= 0, else wall -1 - j of circle i.
  tight = np.empty((n * (n - 1) // 2 + 4 * n, 2), np.int64)
  count = 0
  for i in range(n):
    r = z[2 * n + i]
    for axis in range(2):
      place = z[axis * n + i]
      if r - place > 0:
        tight[count, 0] = i
        tight[count, 1] = -1 - 2 * axis
        count += 1
      if r + place - 1.0 > 0:
        tight[count, 0] = i
        tight[count, 1] = -2 - 2 * axis
        count += 1
    for j in range(i):
      dx = z[i] - z[j]
      dy = z[n + i] - z[n + j]
      reach = r + z[2 * n + j]
      if dx * dx + dy * dy < reach * reach:
        tight[count, 0] = i
        tight[count, 1] = j
        count += 1
  if count < size:
    return False
  matrix = np.empty((size, size))
  right = np.empty(size)
  places = np.empty(6, np.int64)
  slopes = np.empty(6)
  for _ in range(num_steps):
    matrix[:] = 0.0
    right[:] = 0.0
    worst = 0.0
    for row in range(count):
      i, j = tight[row]
      if j >= 0:
        dx = z[i] - z[j]
        dy = z[n + i] - z[n + j]
        distance = math.sqrt(dx * dx + dy * dy)
        if distance < 1e-9:
          return False
        excess = z[2 * n + i] + z[2 * n + j] - distance
        places[:] = (2 * n + i, 2 * n + j, i, j, n + i, n + j)
        slopes[:] = (1.0, 1.0, -dx / distance, dx / distance, -dy / distance, dy / distance)
        used = 6
      else:
        wall = -1 - j
        place = (wall // 2) * n + i
        sign = 1.0 if wall % 2 else -1.0
        excess = z[2 * n + i] + sign * z[place] - (1.0 if wall % 2 else 0.0)
        places[0] = 2 * n + i
        places[1] = place
        slopes[0] = 1.0
        slopes[1] = sign
        used = 2
      worst = max(worst, abs(excess))
      for a in range(used):
        right[places[a]] -= slopes[a] * excess
        for b in range(used):
          matrix[places[a], places[b]] += slopes[a] * slopes[b]
    if worst < 2e-16:
      return True
    # Cholesky, in the lower triangle.
    for a in range(size):
      for b in range(a + 1):
        total = matrix[a, b]
        for k in range(b):
          total -= matrix[a, k] * matrix[b, k]
        if a > b:
          matrix[a, b] = total / matrix[b, b]
        elif total > 1e-9:
          matrix[a, a] = math.sqrt(total)
        else:
          return False
    for a in range(size):
      for k in range(a):
        right[a] -= matrix[a, k] * right[k]
      right[a] /= matrix[a, a]
    for a in range(size - 1, -1, -1):
      for k in range(a + 1, size):
        right[a] -= matrix[k, a] * right[k]
      right[a] /= matrix[a, a]
    longest = 0.0
    for a in range(size):
      longest = max(longest, abs(right[a]))
    if not longest < 0.02:
      return False
    for a in range(size):
      z[a] += right[a]
    if longest < 1e-16:
      break
  return True
