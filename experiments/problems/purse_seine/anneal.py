"""The annealer: moves edges and parts of edges in and out while the fence stays simple."""

from __future__ import annotations

import math

import numpy as np

from experiments.problems import xorshift
from experiments.problems.purse_seine import counting
from experiments.problems.purse_seine.counting import Counter
from experiments.problems.purse_seine.rules import MAX_PERIMETER, MAX_VERTICES, SIDE, Fence
from seerjax import compiled
from seerjax.tasks.draws import Draws

_ROOM = MAX_VERTICES + 8

# Constants of the annealer. Length costs `_PRICE` points per unit and each vertex `_VERTEX_PRICE`,
# so that neither grows without gain; `_PRESSURE` drives a fence that is too long below the limit.
_PRICE, _VERTEX_PRICE, _PRESSURE = 0.001, 0.2, 0.02
# Final values of a polish: temperature in points, longest and shortest moves.
_COLD, _NEAR, _FINE = 0.4, 1500.0, 10.0

# Levels of polish: steps, initial temperature in points (0 is hill climbing), and initial shortest
# move.
POLISHES = (
  (1000, 0.0, 100.0), (4000, 0.0, 100.0), (12_000, 0.0, 100.0), (30_000, 0.0, 100.0),
  (4000, 1.0, 200.0), (12_000, 1.0, 200.0), (30_000, 1.0, 200.0), (30_000, 4.0, 1000.0),
)  # fmt: skip


def anneal(
  counter: Counter,
  fence: Fence,
  *,
  num_steps: int,
  temperatures: tuple[float, float],
  reaches: tuple[float, float],
  grains: tuple[float, float] = (1.0, 1.0),
  seed: int,
) -> tuple[Fence, Fence | None]:
  """Moves edges and parts of edges by simulated annealing.

  Args:
    counter: counter of the points.
    fence: initial fence; if it is too long, it is pressed below the limit.
    num_steps: number of proposals, about 0.7 microseconds each.
    temperatures: first and last temperature in points, geometric; 0 is hill climbing.
    reaches: maximum move of an edge in one step, first and last, geometric.
    grains: minimum move of an edge and minimum length of a part (a neighbour may vanish sooner),
      first and last, geometric.
    seed: seed of all draws.

  Returns:
    The final fence, and the best legal fence found (None if there was none).
  """
  xs, ys = np.zeros(_ROOM, np.int64), np.zeros(_ROOM, np.int64)
  num = len(fence.xs)
  xs[:num], ys[:num] = fence
  best_xs, best_ys = xs.copy(), ys.copy()
  num, num_best = _anneal(
    counter, xs, ys, num, best_xs, best_ys, num_steps, temperatures, reaches,
    grains, _PRICE, _VERTEX_PRICE, _PRESSURE,
    np.array([seeded("anneal", seed)], np.uint64),
  )  # fmt: skip
  best = Fence(best_xs[:num_best].copy(), best_ys[:num_best].copy()) if num_best else None
  return Fence(xs[:num].copy(), ys[:num].copy()), best


def seeded(*names: object) -> int:
  """Returns a number in 1..2**63 - 1, a function of the names."""
  return 1 + Draws("purse_seine", *names).below(2**63 - 1)


def polished(counter: Counter, fence: Fence, level: int, seed: int) -> Fence | None:
  """Returns the best legal fence that a polish of a level finds, or None."""
  steps, hot, coarse = POLISHES[level]
  _, best = anneal(
    counter,
    fence,
    num_steps=steps,
    temperatures=(hot, min(hot, _COLD)),
    reaches=(2 * _NEAR, _NEAR),
    grains=(coarse, _FINE),
    seed=seeded("polish", seed),
  )
  return best


@compiled.function
def _uniform(state: np.ndarray) -> float:
  """Returns a number in [0, 1)."""
  return np.float64(xorshift.bits(state) >> np.uint64(11)) * 2.0**-53


@compiled.function
def _is_free(
  xs: np.ndarray, ys: np.ndarray, num: int, box: tuple[int, int, int, int],
  skipped: tuple[int, int, int, int, int],
) -> bool:  # fmt: skip
  """Returns whether a closed box (left, right, bottom, top) touches no edge except skipped ones."""
  left, right, bottom, top = box
  x, y = xs[num - 1], ys[num - 1]
  for j in range(num):
    end_x, end_y = xs[j], ys[j]
    if min(x, end_x) <= right and max(x, end_x) >= left:
      if min(y, end_y) <= top and max(y, end_y) >= bottom:
        edge = j - 1 if j else num - 1
        is_skipped = False
        for other in skipped:
          is_skipped = is_skipped or edge == other
        if not is_skipped:
          return False
    x, y = end_x, end_y
  return True


@compiled.function
def _anneal(
  counter: Counter, xs: np.ndarray, ys: np.ndarray, num: int, best_xs: np.ndarray,
  best_ys: np.ndarray, num_steps: int, temperatures: tuple[float, float],
  reaches: tuple[float, float], grains: tuple[float, float], price: float,
  vertex_price: float, pressure: float, state: np.ndarray,
) -> tuple[int, int]:  # fmt: skip
  """Anneals a fence in place; returns the vertex counts of it and of the best (0: none was legal).

  A step takes an edge, or a part of it that may include one end, and moves it out or in. Axis u is
  along the edge, w across it. At an end that is a vertex the neighbour grows or shrinks, and
  vanishes if its length becomes zero; elsewhere two vertices are added. The swept area must not
  touch any other edge, so the fence stays simple.
  """
  new_xs, new_ys = np.empty_like(xs), np.empty_like(ys)
  value = counting.fence_count(counter, xs[:num], ys[:num])
  perimeter = 0
  for k in range(num):
    perimeter += abs(xs[k] - xs[k - 1 if k else num - 1])
    perimeter += abs(ys[k] - ys[k - 1 if k else num - 1])
  best, num_best = -(10**9), 0
  if perimeter <= MAX_PERIMETER:
    best, num_best = value, num
    best_xs[:num], best_ys[:num] = xs[:num], ys[:num]
  temperature, log_reach = temperatures[0], math.log(reaches[0])
  log_grain = math.log(grains[0])
  cooling, nearing, refining = 1.0, 0.0, 0.0
  if num_steps and temperature > 0.0:
    cooling = (temperatures[1] / temperature) ** (1.0 / num_steps)
  if num_steps:
    nearing = (math.log(reaches[1]) - log_reach) / num_steps
    refining = (math.log(grains[1]) - log_grain) / num_steps
  for _ in range(num_steps):
    temperature *= cooling
    log_reach += nearing
    log_grain += refining
    k = int(_uniform(state) * num)
    after, before = (k + 1) % num, (k - 1) % num
    second, last = (k + 2) % num, (k - 2) % num
    is_level = ys[k] == ys[after]
    if is_level:
      start, end, w = xs[k], xs[after], ys[k]
      before_w, after_w, last_u, second_u = ys[before], ys[second], xs[last], xs[(k + 3) % num]
    else:
      start, end, w = ys[k], ys[after], xs[k]
      before_w, after_w, last_u, second_u = xs[before], xs[second], ys[last], ys[(k + 3) % num]
    way = 1 if end > start else -1
    length = abs(end - start)
    outwards = -way if is_level else way
    draw = _uniform(state)
    grows = draw < 0.5
    across = outwards if grows else -outwards
    draw = 2.0 * draw if grows else 2.0 * draw - 1.0
    # Probability 0.4: the whole edge; 0.2 each: a part at its start, at its end, in between.
    cuts_start, cuts_end = draw >= 0.6, (0.4 <= draw < 0.6) or draw >= 0.8
    from_u, to_u = start, end
    if cuts_start or cuts_end:
      log_span = math.log(length - 1.0) - log_grain
      if length < 3 or log_span < 0.0:
        continue
      part = int(math.exp(log_grain + _uniform(state) * log_span))
      if cuts_start and cuts_end:
        part = min(part, length - 2)
        from_u = start + way * (1 + int(_uniform(state) * (length - 1 - part)))
        to_u = from_u + way * part
      elif cuts_end:
        to_u = start + way * part
      else:
        from_u = end - way * part
    depth = int(math.exp(log_grain + _uniform(state) * (log_reach - log_grain)))
    toward_before = 1 if before_w > w else -1
    toward_after = 1 if after_w > w else -1
    start_shrinks = not cuts_start and across == toward_before
    end_shrinks = not cuts_end and across == toward_after
    if start_shrinks:
      depth = min(depth, abs(before_w - w))
    if end_shrinks:
      depth = min(depth, abs(after_w - w))
    new_w = w + across * depth
    if new_w < 0 or new_w > SIDE:
      continue
    longer = (-depth if start_shrinks else depth) + (-depth if end_shrinks else depth)
    new_perimeter = perimeter + longer
    if new_perimeter > MAX_PERIMETER and longer > 0:
      continue
    # The line of a convex vertex moves with the edge, that of a reflex one stays inside; the walls
    # of a new part are inside if it grows and stay inside if it shrinks.
    takes_start = grows if cuts_start else toward_before == -outwards
    takes_end = grows if cuts_end else toward_after == -outwards
    first_u = from_u if takes_start else from_u + way
    last_in_u = to_u if takes_end else to_u - way
    first_w = w + across if grows else w
    last_w = new_w if grows else new_w - across
    gain = 0
    if (last_in_u - first_u) * way >= 0:
      low_u, high_u = min(first_u, last_in_u), max(first_u, last_in_u)
      low_w, high_w = min(first_w, last_w), max(first_w, last_w)
      if is_level:
        gain = counting.box_count(counter, low_u, high_u, low_w, high_w)
      else:
        gain = counting.box_count(counter, low_w, high_w, low_u, high_u)
      if not grows:
        gain = -gain
    start_merges = start_shrinks and depth == abs(before_w - w)
    end_merges = end_shrinks and depth == abs(after_w - w)
    made = 2 * cuts_start + 2 * cuts_end - 2 * start_merges - 2 * end_merges
    excess = max(0, new_perimeter - MAX_PERIMETER) - max(0, perimeter - MAX_PERIMETER)
    change = gain - price * longer - vertex_price * made - pressure * excess
    if change < 0.0:
      if temperature == 0.0 or change < temperature * math.log(1.0 - _uniform(state)):
        continue
    # A neighbour may vanish only if the edge beyond it continues and does not turn back.
    if start_merges and (start - last_u) * way <= 0:
      continue
    if end_merges and (second_u - end) * way <= 0:
      continue
    if num + made > MAX_VERTICES:
      continue
    low_u, high_u = min(from_u, to_u), max(from_u, to_u)
    low_w, high_w = min(w + across, new_w), max(w + across, new_w)
    box = (low_u, high_u, low_w, high_w) if is_level else (low_w, high_w, low_u, high_u)
    skipped = (
      k,
      before if start_shrinks else k,
      last if start_merges else k,
      after if end_shrinks else k,
      second if end_merges else k,
    )
    if not _is_free(xs, ys, num, box, skipped):
      continue
    if made == 0 and not (cuts_start or cuts_end):
      if is_level:
        ys[k] = ys[after] = new_w
      else:
        xs[k] = xs[after] = new_w
    else:
      # All vertices except the edge's two and vanished ones, then the edge's new ones.
      count = 0
      for place in range(2 + end_merges, num - start_merges):
        new_xs[count], new_ys[count] = xs[(k + place) % num], ys[(k + place) % num]
        count += 1
      for which in range(6):
        if which == 0 and cuts_start:
          u, v = start, w
        elif which == 1 and cuts_start:
          u, v = from_u, w
        elif which == 2 and not start_merges:
          u, v = from_u, new_w
        elif which == 3 and not end_merges:
          u, v = to_u, new_w
        elif which == 4 and cuts_end:
          u, v = to_u, w
        elif which == 5 and cuts_end:
          u, v = end, w
        else:
          continue
        new_xs[count], new_ys[count] = (u, v) if is_level else (v, u)
        count += 1
      num = count
      xs[:num], ys[:num] = new_xs[:num], new_ys[:num]
    perimeter = new_perimeter
    value += gain
    if value > best and perimeter <= MAX_PERIMETER:
      best, num_best = value, num
      best_xs[:num], best_ys[:num] = xs[:num], ys[:num]
  return num, num_best
