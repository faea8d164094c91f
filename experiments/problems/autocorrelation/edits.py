"""The language of both problems, and its two tools: annealing and linear programs."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import numpy as np

from experiments.problems import linear_programs, step_functions
from experiments.problems.autocorrelation import anneal
from experiments.problems.autocorrelation.rules import first_constant, second_constant
from experiments.problems.step_functions import LAST, NUM_AMOUNTS, POLISH, SIZES
from seerjax.discovery.environment import Artefact

# An annealing verb reads a learning rate and a block size (steps of the function that share a
# height) from its place, and a temperature from its amount. All values are useful, because an
# untrained policy draws sentences uniformly. Blocks of three find a basin with a ninth of the work.
LEARNING_RATES = (0.2, 0.1, 0.04, 0.02)
BLOCKS = (1, 2, 3, 6)
ANNEALING_STEPS = 6000
START_TEMPERATURES = tuple(float(t) for t in np.geomspace(1e-3, 0.03, NUM_AMOUNTS))
_END_TEMPERATURE = 5e-5
# Limits of a sentence: products of annealing (0.7 CPU seconds), and linear programs with their
# pivots (0.1 to 0.25 seconds each at n = 300, where one near a good function takes 600 to 1300;
# from a poor one it may take many more, and gains no more than annealing).
MAX_PRODUCTS = 10_000 * 300**2
_MAX_PROGRAMS = 3
_MAX_PIVOTS = 1500
POLISH_PROGRAMS = 2  # Linear programs of one edit.


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutocorrelationEdits(step_functions.StepEdits):
  """The edits of both problems.

    noise, remelt, set, shift, smooth, stretch, mirror   change a region (`step_functions.reshape`)
    polish   linear programs over a region's heights, with trust radius `SIZES[amount]`
    anneal   Adam, cooled from `START_TEMPERATURES[amount]`; rate and blocks from the place

  Heights are scaled to mean 1 after each edit. The work of a sentence's last two verbs is limited;
  beyond the limit they do nothing.

  Attributes:
    num_steps: steps of the function.
    is_second: whether it is the second inequality rather than the first.
    target: the value to which the view measures the distance.
  """

  is_second: bool
  target: float

  def prompt(self, artefact: Artefact) -> tuple[int, ...]:
    """Returns tokens for the value, the position of the maximum of f*f, and the coarse heights."""
    heights = np.array(artefact, np.float64)
    nodes = np.convolve(heights, heights)
    gap = abs(self.value(heights) - self.target)
    top = float(heights.max())
    return step_functions.view(heights, top, gap, float(nodes.argmax()) / nodes.size)

  def apply(self, artefact: Artefact, tokens: Sequence[int], seed: int) -> Artefact:
    """Returns the artefact after the edits, in order.

    Raises:
      ValueError: if the sentence cannot be parsed, or the result is zero everywhere.
    """
    edits = step_functions.parse(tokens)
    rng = np.random.default_rng([seed, 0x57E9])
    heights = self.settle(np.array(artefact, np.float64))
    programs_left, products_left = _MAX_PROGRAMS, MAX_PRODUCTS
    for edit in edits:
      if edit.verb == POLISH:
        is_free = np.zeros(self.num_steps, bool)
        is_free[step_functions.region(edit.place, self.num_steps)] = True
        programs = min(POLISH_PROGRAMS, programs_left)
        programs_left -= programs
        heights = self.polish(heights, programs, SIZES[edit.amount], is_free)
      elif edit.verb == LAST:
        rate, block = LEARNING_RATES[edit.place // 4], self.block(BLOCKS[edit.place % 4])
        products = (self.num_steps // block) ** 2
        steps = min(ANNEALING_STEPS, products_left // products)
        products_left -= steps * products
        heights = self.anneal(heights, steps, rate, START_TEMPERATURES[edit.amount], block)
      else:
        heights = self.settle(step_functions.reshape(heights, edit, rng, float(heights.max())))
    return heights.tolist()

  def settle(self, heights: np.ndarray) -> np.ndarray:
    """Returns the heights with negative ones set to 0, scaled to mean 1.

    Raises:
      ValueError: if none is positive.
    """
    heights = np.maximum(heights, 0.0)
    mean = float(heights.mean())
    if not mean > 1e-9:
      raise ValueError(
        f"edit: got heights of mean {mean:g}, expected some above 0; leave some of the function."
      )
    return heights / mean

  def value(self, heights: np.ndarray) -> float:
    """Returns C1 or C2 in float arithmetic, for tools with many comparisons."""
    nodes = np.convolve(heights, heights)
    total, largest = float(nodes.sum()), float(nodes.max())
    if self.is_second:
      squares = 2 * float(nodes @ nodes) + float(nodes[:-1] @ nodes[1:])
      return squares / (3 * total * largest)
    return 2 * heights.size * largest / total

  def better(self, new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Returns the better of two, compared exactly, so that a tool never worsens a function."""
    if self.is_second:
      return new if second_constant(new.tolist()) > second_constant(old.tolist()) else old
    return new if first_constant(new.tolist()) < first_constant(old.tolist()) else old

  def block(self, most: int) -> int:
    """Returns the largest divisor of the number of steps up to `most` with at least two blocks."""
    n = self.num_steps
    return max(d for d in range(1, most + 1) if n % d == 0 and (d == 1 or n >= 2 * d))

  def anneal(
    self,
    heights: np.ndarray,
    num_steps: int,
    learning_rate: float,
    temperature: float,
    block: int = 1,
  ) -> np.ndarray:
    """Returns the best heights of one annealed run of Adam, the start included.

    Args:
      heights: f64[n], with mean 1.
      num_steps: steps of Adam.
      learning_rate: rate for the square roots of the heights; falls to 0 along a cosine.
      temperature: initial temperature of the log-sum-exp, relative to the maximum.
      block: number of neighbours that share a height, from `self.block`. Finer structure is lost,
        even if the result is worse.
    """
    if num_steps < 1:
      return heights
    last = min(_END_TEMPERATURE, temperature)
    start = heights.reshape(-1, block).mean(axis=1)
    found = anneal.best_heights(start, self.is_second, num_steps, learning_rate, temperature, last)
    before = heights if block == 1 else self.settle(np.repeat(start, block))
    return self.better(self.settle(np.repeat(found, block)), before)

  def polish(
    self, heights: np.ndarray, num_programs: int, radius: float, is_free: np.ndarray
  ) -> np.ndarray:
    """Improves heights with a sequence of linear programs; never returns worse ones.

    Above `step_functions.TOOL_STEPS` steps it returns them unchanged.

    Each program linearises around the heights and minimises t (minus the gain of C2's numerator)
    with c_k + 2 sum_i a_(k-i) d_i <= t at the nodes near the maximum, sum d = 0, |d| <= radius.

    Args:
      heights: f64[n], with mean 1.
      num_programs: number of linear programs.
      radius: radius of the trust region, in mean heights; a failed program divides it by four.
      is_free: bool[n], the heights that may change.
    """
    if self.num_steps > step_functions.TOOL_STEPS:
      return heights
    max_pivots = min(_MAX_PIVOTS * 300**2 // self.num_steps**2, 10_000)
    start, sign = heights, -1.0 if self.is_second else 1.0
    value = self.value(heights)
    free = np.flatnonzero(is_free)
    for _ in range(num_programs):
      nodes = np.convolve(heights, heights)
      largest = float(nodes.max())
      rows = np.flatnonzero(nodes > largest * (1 - min(0.03 + radius, 0.3)))
      padded = np.zeros(3 * heights.size)
      padded[heights.size : 2 * heights.size] = heights
      slopes = 2 * padded[np.clip(heights.size + rows[:, None] - free[None], 0, padded.size - 1)]
      costs = np.zeros(free.size)
      if self.is_second:
        squares = 2 * float(nodes @ nodes) + float(nodes[:-1] @ nodes[1:])
        gains = 4 * nodes
        gains[1:] += nodes[:-1]
        gains[:-1] += nodes[1:]
        costs = -2 * np.convolve(gains, heights[::-1], mode="valid")[free] * largest / squares
      least = np.maximum(-heights[free], -radius)
      most = (largest - nodes[rows]) / largest
      answer = linear_programs.solve(
        np.append(costs, 1.0),
        np.vstack(
          [
            np.hstack([slopes / largest, np.full((rows.size, 1), -1 / largest)]),
            np.append(np.ones(free.size), 0.0),
          ]
        ),
        (np.append(np.full(rows.size, -np.inf), 0.0), np.append(most, 0.0)),
        (np.append(least, -largest), np.append(np.full(free.size, radius), largest)),
        max_pivots,
      )
      if answer is not None:
        moved = heights.copy()
        moved[free] += answer[:-1]
        moved = self.settle(moved)
        new_value = self.value(moved)
        if sign * new_value < sign * value:
          heights, value = moved, new_value
          continue
      radius /= 4
    return self.better(heights, start)
