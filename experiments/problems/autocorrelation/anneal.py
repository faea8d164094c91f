"""A compiled, annealed run of Adam over the heights of a function."""

from __future__ import annotations

import math

import numpy as np

from seerjax import compiled


@compiled.function
def best_heights(start, is_second, num_steps, learning_rate, first_temperature, last_temperature):
  """Returns the best heights found, f64[n], the start included.

  Runs Adam on x with a = x^2, over log C with the maximum replaced by a log-sum-exp of
  geometrically decreasing temperature. Sums are written so that they vectorise without reordering.
  """
  n = start.size
  num_nodes = 2 * n - 1
  x = np.sqrt(start)
  best = start.copy()
  best_value = np.inf
  first_moment = np.zeros(n)
  second_moment = np.zeros(n)
  a = np.zeros(n)
  slope = np.zeros(n)
  nodes = np.zeros(num_nodes)
  weights = np.zeros(num_nodes)
  for step in range(num_steps + 1):
    total = 0.0
    for i in range(n):
      a[i] = x[i] * x[i]
      total += a[i]
    if not total > 0.0:
      break
    nodes[:] = 0.0
    for i in range(n):
      factor = a[i]
      if factor > 0.0:
        for j in range(n):
          nodes[i + j] += factor * a[j]
    largest = 0.0
    for k in range(num_nodes):
      largest = max(largest, nodes[k])
    squares = 0.0
    if is_second:
      for k in range(num_nodes):
        squares += 2.0 * nodes[k] * nodes[k]
      for k in range(num_nodes - 1):
        squares += nodes[k] * nodes[k + 1]
      value = -squares / (3.0 * total * total * largest)
    else:
      value = largest / (total * total)
    if value < best_value:
      best_value = value
      best[:] = a
    if step == num_steps:
      break
    progress = step / num_steps
    temperature = first_temperature * (last_temperature / first_temperature) ** progress
    normaliser = 0.0
    for k in range(num_nodes):
      weights[k] = math.exp((nodes[k] / largest - 1.0) / temperature)
      normaliser += weights[k]
    for k in range(num_nodes):
      weights[k] /= normaliser * largest
    if is_second:
      for k in range(num_nodes):
        change = 4.0 * nodes[k]
        if k > 0:
          change += nodes[k - 1]
        if k + 1 < num_nodes:
          change += nodes[k + 1]
        weights[k] -= change / squares
    slope[:] = 0.0
    for j in range(n):
      factor = 2.0 * a[j]
      for i in range(n):
        slope[i] += weights[i + j] * factor
    of_total = 2.0 / total if is_second else -2.0 / total
    rate = learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
    first_bias = 1.0 - 0.9 ** (step + 1)
    second_bias = 1.0 - 0.999 ** (step + 1)
    for i in range(n):
      gradient = (slope[i] + of_total) * 2.0 * x[i]
      first_moment[i] = 0.9 * first_moment[i] + 0.1 * gradient
      second_moment[i] = 0.999 * second_moment[i] + 0.001 * gradient * gradient
      x[i] -= (
        rate * (first_moment[i] / first_bias) / (math.sqrt(second_moment[i] / second_bias) + 1e-12)
      )
  return best
