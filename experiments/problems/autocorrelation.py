"""The first and second autocorrelation inequality: functions whose self-convolution is flat.

f >= 0 on [-1/4, 1/4] has n equal steps of heights a, and c = a * a (2n - 1 numbers) is their full
convolution; f*f is linear between its nodes, so that both constants are rational in the heights:

  AC1, minimise   C1 = 2n max(c) / (sum a)^2                        of max f*f / (integral of f)^2
  AC2, maximise   C2 = (2 sum c_k^2 + sum c_k c_(k+1)) / 3 / (sum c max(c))
                                                            of |f*f|_2^2 / (|f*f|_1 |f*f|_inf)

Neither depends on the scale of a, and neither changes if each step is cut into k equal ones. A
constant has C1 = 2 and C2 = 2/3. Sums are exact (of very many, very unlike heights certified
bounds), and the language is that of `step_functions`, whose tools work on up to 1,000 steps.

Sources: Matolcsi & Vinuesa 2010, https://arxiv.org/abs/0907.1379 (both problems, and linear
programs for the first); Yuksekgonul et al. 2026 (TTT-Discover), https://arxiv.org/abs/2601.16175.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
from fractions import Fraction
import itertools
import math
from typing import Any

import numpy as np

from experiments.problems import linear_programs, step_functions
from experiments.problems.step_functions import (
  LAST,
  MAX_HEIGHT,
  MIN_SUM,
  NUM_AMOUNTS,
  POLISH,
  SIZES,
)
from seerjax import compiled
from seerjax.discovery import environment
from seerjax.discovery.environment import Artefact, Published, Score

# What a verb of annealing reads from its place: a learning rate, and how many steps of the function
# go together; and from its amount. All are of use: sentences are drawn evenly until a policy knows
# better. In blocks of three a ninth of the work finds a basin as well.
LEARNING_RATES = (0.2, 0.1, 0.04, 0.02)
BLOCKS = (1, 2, 3, 6)
ANNEALING_STEPS = 6000
START_TEMPERATURES = tuple(float(t) for t in np.geomspace(1e-3, 0.03, NUM_AMOUNTS))
_END_TEMPERATURE = 5e-5
# What one sentence may spend: products of annealing (0.7 CPU seconds), and linear programs with
# their pivots (0.1 to 0.25 seconds each at n = 300, where one near a good function takes 600 to
# 1300; from a poor one it may take many more, and gains nothing that annealing does not).
_MAX_PRODUCTS = 10_000 * 300**2
_MAX_PROGRAMS = 3
_MAX_PIVOTS = 1500
_POLISH_PROGRAMS = 2  # Of one edit.


def first_constant(
  heights: Sequence[float], most_digits: int = step_functions.MAX_EXACT_DIGITS
) -> Fraction:
  """Returns C1 exactly, or an upper bound where the convolution would be too long.

  Args:
    heights: non-negative, not all 0.
    most_digits: of the convolution (`step_functions.rounded`).
  """
  numbers = step_functions.dyadic(heights)
  parts = step_functions.rounded(numbers, most_digits)
  largest = max(step_functions.convolve(parts.high, parts.high)) * parts.unit**2
  return Fraction(2 * len(numbers) * largest, sum(numbers) ** 2)


def second_constant(
  heights: Sequence[float], most_digits: int = step_functions.MAX_EXACT_DIGITS
) -> Fraction:
  """Returns C2 exactly, or a lower bound where the convolution would be too long.

  Args:
    heights: non-negative, not all 0.
    most_digits: of the convolution (`step_functions.rounded`).
  """
  numbers = step_functions.dyadic(heights)
  parts = step_functions.rounded(numbers, most_digits)
  nodes = step_functions.convolve(parts.low, parts.low)
  largest = max(nodes if parts.unit == 1 else step_functions.convolve(parts.high, parts.high))
  squares = 2 * sum(c * c for c in nodes)
  squares += sum(c * d for c, d in itertools.pairwise(nodes))
  return Fraction(squares * parts.unit**2, 3 * sum(numbers) ** 2 * largest)


@compiled.function
def _anneal(start, is_second, num_steps, learning_rate, first_temperature, last_temperature):
  # Adam on x with a = x^2, over log C with its maximum replaced by a log-sum-exp whose temperature
  # falls geometrically. Sums are written so that they vectorise without being reordered.
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
      x[i] -= rate * (first_moment[i] / first_bias) / (
        math.sqrt(second_moment[i] / second_bias) + 1e-12
      )
  return best


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutocorrelationEdits(step_functions.StepEdits):
  """The edits of both problems.

    noise, remelt, set, shift, smooth, stretch, mirror   a region (`step_functions.reshape`)
    polish   linear programs over a region's heights, `SIZES[amount]` the trust region's radius
    anneal   Adam, cooled from `START_TEMPERATURES[amount]`; rate and blocks from the place

  Heights are scaled to mean 1 after each. What a sentence may spend on the last two is limited;
  beyond it they do nothing.

  Attributes:
    num_steps: of the function.
    is_second: of the second inequality; else of the first.
    target: the value that the view measures the distance to.
  """

  is_second: bool
  target: float

  def prompt(self, artefact: Artefact) -> tuple[int, ...]:
    """Returns the value's bucket, where f*f is largest, and the heights, coarsely."""
    heights = np.array(artefact, np.float64)
    nodes = np.convolve(heights, heights)
    gap = abs(self.value(heights) - self.target)
    top = float(heights.max())
    return step_functions.view(heights, top, gap, float(nodes.argmax()) / nodes.size)

  def apply(self, artefact: Artefact, tokens: Sequence[int], seed: int) -> Artefact:
    """Returns the artefact after the edits, in order.

    Raises:
      ValueError: if the sentence cannot be parsed, or leaves nothing of the function.
    """
    edits = step_functions.parse(tokens)
    rng = np.random.default_rng([seed, 0x57E9])
    heights = self.settle(np.array(artefact, np.float64))
    programs_left, products_left = _MAX_PROGRAMS, _MAX_PRODUCTS
    for edit in edits:
      if edit.verb == POLISH:
        is_free = np.zeros(self.num_steps, bool)
        is_free[step_functions.region(edit.place, self.num_steps)] = True
        programs = min(_POLISH_PROGRAMS, programs_left)
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
    """Returns the heights without negative ones, scaled to mean 1.

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
    """Returns C1 or C2 in float arithmetic, for tools that compare often."""
    nodes = np.convolve(heights, heights)
    total, largest = float(nodes.sum()), float(nodes.max())
    if self.is_second:
      squares = 2 * float(nodes @ nodes) + float(nodes[:-1] @ nodes[1:])
      return squares / (3 * total * largest)
    return 2 * heights.size * largest / total

  def better(self, new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Returns the better of two, compared exactly: a tool never worsens."""
    if self.is_second:
      return new if second_constant(new.tolist()) > second_constant(old.tolist()) else old
    return new if first_constant(new.tolist()) < first_constant(old.tolist()) else old

  def block(self, most: int) -> int:
    """Returns the largest divisor of the number of steps up to `most` that leaves two blocks."""
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
    """Returns the best heights of one annealed run of Adam, itself included.

    Args:
      heights: f64[n], of mean 1.
      num_steps: of Adam.
      learning_rate: of the square roots of the heights; falls to 0 along a cosine.
      temperature: of the log-sum-exp to start with, in parts of the maximum.
      block: how many neighbours share a height, from `block`. What was finer is forgotten, even
        where that is worse.
    """
    if num_steps < 1:
      return heights
    last = min(_END_TEMPERATURE, temperature)
    start = heights.reshape(-1, block).mean(axis=1)
    found = _anneal(start, self.is_second, num_steps, learning_rate, temperature, last)
    before = heights if block == 1 else self.settle(np.repeat(start, block))
    return self.better(self.settle(np.repeat(found, block)), before)

  def polish(
    self, heights: np.ndarray, num_programs: int, radius: float, is_free: np.ndarray
  ) -> np.ndarray:
    """Returns heights that a sequence of linear programs improved, or the same.

    Above `step_functions.TOOL_STEPS` steps they are returned as they are.

    Each program linearises around the heights: least t (less what the numerator of C2 gains) with
    c_k + 2 sum_i a_(k-i) d_i <= t at the nodes near the maximum, sum d = 0, |d| <= radius.

    Args:
      heights: f64[n], of mean 1.
      num_programs: to solve.
      radius: of the trust region, in mean heights; a failed program quarters it.
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


@dataclasses.dataclass(frozen=True)
class _Autocorrelation:
  """What both problems share."""

  num_steps: int

  def __post_init__(self):
    if not 2 <= self.num_steps <= step_functions.MAX_STEPS:
      raise ValueError(
        f"{type(self).__name__}.num_steps: got {self.num_steps}, expected 2 to"
        f" {step_functions.MAX_STEPS}; edits do best with some hundreds, programs take any."
      )

  @property
  def language(self) -> AutocorrelationEdits:
    raise NotImplementedError

  def start(self, seed: int) -> Artefact:
    """Returns one random constant with a little noise: the paper starts from the constant."""
    rng = np.random.default_rng([seed, 0xAC])
    heights = rng.uniform(0.5, 1.5) * (1 + 0.4 * rng.uniform(-1, 1, self.num_steps))
    return heights.tolist()

  def polished_starts(self, seed: int) -> Iterator[Artefact]:
    """Yields starts, each annealed once and then polished as an edit does both."""
    edits = self.language
    everywhere = np.ones(self.num_steps, bool)
    steps = max(min(ANNEALING_STEPS, _MAX_PRODUCTS // self.num_steps**2), 1)
    index = 0
    while True:
      heights = edits.settle(np.array(self.start(seed * 1_000_003 + index)))
      heights = edits.anneal(heights, steps, 0.1, 0.01)
      yield edits.polish(heights, _POLISH_PROGRAMS, SIZES[6], everywhere).tolist()
      index += 1

  def classical(self, seed: int) -> Iterator[Artefact]:
    """Yields annealed functions, large ones in blocks of two or three steps at first.

    A round anneals 24 absolute values of smooth noise, where the steps of a block share a height
    (uniform starts all fall into one poor basin), and then changes of the best of them until 40 in
    a row have gained nothing. Then every step has its own height, until 8 changes have gained
    nothing, and linear programs end the round.
    """
    edits = self.language
    rng = np.random.default_rng([seed, 0xC1A551C])
    n = self.num_steps
    block = edits.block(min(max(n // 100, 1), 3))  # A hundred heights are few enough as they are.
    steps = {
      size: max(min(ANNEALING_STEPS, _MAX_PRODUCTS * size**2 // n**2), 1) for size in (1, block)
    }

    def smooth(size: int) -> np.ndarray:
      width = max(int(size * rng.choice((0.1, 0.2, 0.3))), 1)
      draws = rng.standard_normal(size + width - 1)
      return np.convolve(draws, np.full(width, width**-0.5), "valid")

    def changed(heights: np.ndarray) -> np.ndarray:
      new, size = heights.copy(), 10 ** rng.uniform(-1.5, 0.0)
      match rng.integers(3):
        case 0:
          new *= np.exp(size * smooth(n))
        case 1:
          width = max(int(n * rng.uniform(0.05, 0.5)), 1)
          first = int(rng.integers(n - width + 1))
          part = slice(first, first + width)
          new[part] = (1 - size) * new[part] + size * 1.25 * np.abs(smooth(width))
        case _:
          new *= np.exp(0.05 * rng.standard_normal(n))
      return edits.settle(new)

    while True:
      best: np.ndarray | None = None
      for _ in range(24):
        start = edits.settle(np.repeat(np.abs(smooth(n // block)), block))
        found = edits.anneal(start, steps[block], 0.2, 0.02, block)
        best = found if best is None else edits.better(found, best)
        yield found.tolist()
      assert best is not None
      for size, patience, rates, temperatures in (
        (block, 40, (-1.7, -0.8), (-2.7, -1.7)),
        (1, 8, (-1.9, -1.2), (-2.7, -1.9)),
      ):
        num_failed = 0
        while num_failed < patience:
          rate, temperature = 10 ** rng.uniform(*rates), 10 ** rng.uniform(*temperatures)
          found = edits.anneal(changed(best), steps[size], rate, temperature, size)
          chosen = edits.better(found, best)
          num_failed = num_failed + 1 if chosen is best else 0
          best = chosen
          yield found.tolist()
      yield edits.polish(best, _POLISH_PROGRAMS, 0.02, np.ones(n, bool)).tolist()

  def picture(self, artefact: Artefact) -> Any:
    """Returns a Figure of the function, and of f*f with its maximum marked."""
    heights = self.language.settle(np.array(artefact, np.float64))
    nodes = np.concatenate([[0.0], np.convolve(heights, heights), [0.0]])
    nodes = nodes / (2 * self.num_steps)  # f*f of the function with mean height 1 on a width 1/2.
    name = "C2" if self.language.is_second else "C1"
    value = self.language.value(heights)
    return step_functions.picture(
      heights,
      (-0.25, 0.25),
      nodes,
      (-0.5, 0.5),
      left=dict(xlabel="x", ylabel="f(x)", title=f"{self.num_steps} steps, mean 1"),
      right=dict(xlabel="x", ylabel="(f*f)(x)", title=f"{name} = {value:.8f}"),
    )


_TTT = "https://arxiv.org/abs/2601.16175"
_MATOLCSI = "https://arxiv.org/abs/0907.1379"
_ALPHAEVOLVE = "https://arxiv.org/abs/2506.13131"
_REPOSITORY = "https://github.com/google-deepmind/alphaevolve_repository_of_problems"
_TOGETHER = "https://github.com/togethercomputer/EinsteinArena-new-SOTA"
_THETAEVOLVE = "https://arxiv.org/abs/2511.23473"
_SIMPLETES = "https://arxiv.org/abs/2604.19341"
_IMPROVEVOLVE = "https://arxiv.org/abs/2602.10233"

FIRST_PUBLISHED = (
  Published(1.5028628, "Together, EinsteinArena", 2026, _TOGETHER),
  Published(1.5028629, "TTT-Discover, gpt-oss-120b, 30,000 steps", 2026, _TTT),
  Published(1.503133, "ThetaEvolve, from AlphaEvolve's", 2025, _THETAEVOLVE),
  Published(1.503164, "AlphaEvolve V2, 1319 steps", 2025, _REPOSITORY),
  Published(1.503871, "SimpleTES", 2026, _SIMPLETES),
  Published(1.50525, "TTT-Discover, Qwen3-8B", 2026, _TTT),
  Published(1.50529, "AlphaEvolve", 2025, _ALPHAEVOLVE),
  Published(1.50681, "ThetaEvolve, from scratch", 2025, _THETAEVOLVE),
  Published(1.50719, "OpenEvolve, in TTT-Discover", 2026, _TTT),
  Published(1.50992, "Matolcsi and Vinuesa (human)", 2010, _MATOLCSI),
  Published(1.51004, "best of 25,600, in TTT-Discover", 2026, _TTT),
)
SECOND_PUBLISHED = (
  Published(0.96258, "ImprovEvolve (function not released)", 2026, _IMPROVEVOLVE),
  Published(0.961206, "Together, EinsteinArena", 2026, _TOGETHER),
  Published(0.9610, "AlphaEvolve V2, 50,000 steps", 2025, _REPOSITORY),
  Published(0.9591, "TTT-Discover, gpt-oss-120b, 50,000 steps", 2026, _TTT),
  Published(0.9472, "TTT-Discover, Qwen3-8B", 2026, _TTT),
  Published(0.9468, "ThetaEvolve", 2025, _THETAEVOLVE),
  Published(0.9449, "OpenEvolve, in TTT-Discover", 2026, _TTT),
  Published(0.9344, "best of 25,600, in TTT-Discover", 2026, _TTT),
  Published(0.901564, "Boyer and Li, 575 steps", 2025, "https://arxiv.org/abs/2506.16750"),
  Published(0.8962, "AlphaEvolve, 50 steps", 2025, _ALPHAEVOLVE),
  Published(0.88922, "Matolcsi and Vinuesa (human)", 2010, _MATOLCSI),
)
# What a policy sees its distance to: not the best published, so that records change no run.
FIRST_GOAL, SECOND_GOAL = 1.5028628, 0.961206


@dataclasses.dataclass(frozen=True)
class FirstAutocorrelation(_Autocorrelation):
  """The first inequality: a function whose self-convolution has a small maximum.

  Attributes:
    num_steps: n; at 300, one annealing run takes a quarter of a CPU second.
  """

  num_steps: int = 300

  @property
  def name(self) -> str:
    return f"first_autocorrelation_{self.num_steps}"

  @property
  def is_maximised(self) -> bool:
    return False

  @property
  def published(self) -> tuple[Published, ...]:
    return FIRST_PUBLISHED

  @property
  def language(self) -> AutocorrelationEdits:
    return AutocorrelationEdits(num_steps=self.num_steps, is_second=False, target=FIRST_GOAL)

  def verify(self, artefact: Artefact) -> Score:
    """Returns C1, rounded up; the certificate is the fraction."""
    heights = step_functions.check_heights(artefact, self.num_steps)
    if isinstance(heights, str):
      return environment.invalid(heights)
    exact = first_constant(heights)
    value = step_functions.at_least(exact)
    proof = step_functions.certificate(exact, value)
    return Score(is_valid=True, value=value, reward=1 / value, certificate=proof)

  def describe(self, artefact: Artefact, score: Score) -> str:
    """Returns the problem for a model that writes programs."""
    return (
      "First autocorrelation inequality. For f >= 0 on [-1/4, 1/4], constant on"
      f" n = {self.num_steps} equal steps of heights a[0..n-1], make\n"
      "  C1 = 2 n max_k c[k] / (sum a)^2,  c = numpy.convolve(a, a),\n"
      "as small as possible: each value is an upper bound of the constant C1 with"
      " max (f*f) >= C1 (integral of f)^2.\n"
      f"Heights are 0 to {MAX_HEIGHT:g}, their sum at least {MIN_SUM:g}; scale does not matter.\n"
      + step_functions.program_rules(self.num_steps)
      + f"Now: C1 = {score.value:.10f}. Best known, with more steps: {self.published[0].value}."
      f" People reached 1.50992 in 2010.\nartefact = {step_functions.heights_text(artefact)}\n"
    )


@dataclasses.dataclass(frozen=True)
class SecondAutocorrelation(_Autocorrelation):
  """The second inequality: a function whose self-convolution is as flat as it can be.

  Attributes:
    num_steps: n; the records of 2026 have tens of thousands.
  """

  num_steps: int = 100

  @property
  def name(self) -> str:
    return f"second_autocorrelation_{self.num_steps}"

  @property
  def is_maximised(self) -> bool:
    return True

  @property
  def published(self) -> tuple[Published, ...]:
    return SECOND_PUBLISHED

  @property
  def language(self) -> AutocorrelationEdits:
    return AutocorrelationEdits(num_steps=self.num_steps, is_second=True, target=SECOND_GOAL)

  def verify(self, artefact: Artefact) -> Score:
    """Returns C2, rounded down; the certificate is the fraction."""
    heights = step_functions.check_heights(artefact, self.num_steps)
    if isinstance(heights, str):
      return environment.invalid(heights)
    exact = second_constant(heights)
    value = step_functions.at_most(exact)
    proof = step_functions.certificate(exact, value)
    return Score(is_valid=True, value=value, reward=value, certificate=proof)

  def describe(self, artefact: Artefact, score: Score) -> str:
    """Returns the problem for a model that writes programs."""
    return (
      "Second autocorrelation inequality. For f >= 0, constant on"
      f" n = {self.num_steps} equal steps of heights a[0..n-1], make\n"
      "  C2 = (2 sum c[k]^2 + sum c[k] c[k+1]) / 3 / (sum c * max c),  c = numpy.convolve(a, a),\n"
      "as large as possible: each value is a lower bound of the constant C2 with"
      " |f*f|_2^2 <= C2 |f*f|_1 |f*f|_inf, which is at most 1.\n"
      f"Heights are 0 to {MAX_HEIGHT:g}, their sum at least {MIN_SUM:g}; scale does not matter.\n"
      + step_functions.program_rules(self.num_steps)
      + f"Now: C2 = {score.value:.10f}. Best known, with more steps: {self.published[0].value}."
      f" People reached 0.88922 in 2010.\nartefact = {step_functions.heights_text(artefact)}\n"
    )
