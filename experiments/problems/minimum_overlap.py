"""Erdős' minimum overlap problem: two halves of an interval with little overlap at any shift.

h: [0, 2] -> [0, 1] with integral 1 has n equal steps with heights that sum to n / 2. Minimise

  C5 = (2 / n) max_k sum_i h_i (1 - h_(i+k)),   1 - h being 0 outside of [0, 2],

over all shifts k. Between whole shifts the overlap is linear, so every h gives an upper bound. The
verifier makes any heights admissible, in integers: h_i = min(1, s H_i), where s is chosen so that
they sum to n / 2. With k heights at 1, R the sum of the others and U = 2R, the numerators over U
are G_i = min((n - 2k) H_i, U), and

  C5 = (2 / n) max_k sum_i G_i (U - G_(i+k)) / U^2.

1/2 for n = 1, 4/9 for n = 2 and 2/5 for n = 3 are closed forms.

Sources: Haugland, http://www.neutreeko.net/mop.htm (the problem, and records by n); Yuksekgonul et
al. 2026 (TTT-Discover), https://arxiv.org/abs/2601.16175 (as an environment).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
from fractions import Fraction
import math
from typing import Any

import numpy as np

from experiments.problems import linear_programs, step_functions
from experiments.problems.step_functions import LAST, MIRROR, POLISH, SIZES
from seerjax.discovery import environment
from seerjax.discovery.environment import Artefact, Published, Score

_TOOL_STEPS = 600  # Maximum steps of a function for the linear programs.
_MAX_RADIUS = 0.5
# Work limit of a sentence's linear programs, in units of a symmetric one at n = 51 (0.6 CPU ms).
_MAX_WORK = 200.0
# The polish appended to a sentence that does not end with one.
_CLOSING_PROGRAMS, _CLOSING_RADIUS = 64, 0.02

_TTT = "https://arxiv.org/abs/2601.16175"
_HAUGLAND = "http://www.neutreeko.net/mop.htm"
PUBLISHED = (
  Published(0.380868, "SimpleTES", 2026, "https://arxiv.org/abs/2604.19341"),
  Published(
    0.380871, "Together, EinsteinArena", 2026,
    "https://github.com/togethercomputer/EinsteinArena-new-SOTA",
  ),
  Published(0.3808753, "TTT-Discover, gpt-oss-120b, 600 steps", 2026, _TTT),
  Published(0.380906, "best of 25,600, in TTT-Discover", 2026, _TTT),
  Published(
    0.380916, "Reef, Qwen3-8B", 2026, "https://github.com/Human-Agent-Society/reef"
  ),
  Published(0.38092304, "AlphaEvolve, 95 steps", 2025, "https://arxiv.org/abs/2506.13131"),
  Published(0.38092685, "Haugland, 51 steps (human)", 2016, _HAUGLAND),
  Published(0.380932, "TTT-Discover, Qwen3-8B", 2026, _TTT),
  Published(0.380965, "OpenEvolve, in TTT-Discover", 2026, _TTT),
  Published(0.382002, "Haugland, 21 steps (human)", 1996, _HAUGLAND),
)  # fmt: skip
# The value to which a policy sees its distance: fixed, so that new records do not change runs.
GOAL = 0.380871


def admissible(numbers: Sequence[int]) -> tuple[list[int], int] | None:
  """Returns the numerators and the denominator of min(1, s H), with s such that the sum is n / 2.

  Args:
    numbers: H, non-negative integers, not all 0.

  Returns:
    None if fewer than n / 2 are positive: at most 1 each, they cannot sum to n / 2.
  """
  n, rest = len(numbers), sum(numbers)
  ordered = sorted(numbers, reverse=True)
  if 2 * sum(number > 0 for number in numbers) < n:
    return None
  num_whole = 0
  # Ends before the last positive height, because at least half of them are positive.
  while (n - 2 * num_whole) * ordered[num_whole] > 2 * rest:
    rest -= ordered[num_whole]
    num_whole += 1
  return [min((n - 2 * num_whole) * number, 2 * rest) for number in numbers], 2 * rest


def overlap_constant(
  heights: Sequence[float], most_digits: int = step_functions.MAX_EXACT_DIGITS
) -> Fraction | None:
  """Returns C5 of the admissible heights exactly, or an upper bound if that would take too long.

  Args:
    heights: non-negative, not all 0.
    most_digits: digit limit of the convolution (`step_functions.rounded`).

  Returns:
    None if fewer than half of the heights are positive.
  """
  found = admissible(step_functions.dyadic(heights))
  if found is None:
    return None
  numbers, whole = found
  first = step_functions.rounded(numbers[::-1], most_digits)
  second = step_functions.rounded([whole - number for number in numbers], most_digits)
  largest = max(step_functions.convolve(first.high, second.high)) * first.unit * second.unit
  return Fraction(2 * largest, len(numbers) * whole * whole)


def overlaps(heights: np.ndarray) -> np.ndarray:
  """Returns the overlap at the shifts -(n-1) to n-1, f64[2n-1], of heights that sum to n / 2."""
  return 2 / heights.size * np.convolve(heights[::-1], 1 - heights)


def settle(heights: np.ndarray) -> np.ndarray:
  """Returns the nearest heights in [0, 1] that sum to n / 2, as the verifier requires.

  All heights are shifted by one number and then clipped (the Euclidean projection); symmetric
  heights stay symmetric, bit for bit. The sum is rounded above n / 2 rather than below, because the
  verifier's scaling must not raise a height of 1.
  """
  half = heights.size / 2
  is_within = float(heights.min()) >= 0 and float(heights.max()) <= 1
  if is_within and 0 <= math.fsum([-half, *heights.tolist()]) < 1e-12:
    return heights
  low, high = -float(heights.max()), 1 - float(heights.min())
  for _ in range(60):
    middle = (low + high) / 2
    if np.clip(heights + middle, 0.0, 1.0).sum() < half:
      low = middle
    else:
      high = middle
  settled = np.clip(heights + high, 0.0, 1.0)
  while (lack := math.fsum([half, *(-settled).tolist()])) > 0:
    below = settled < 1
    more = np.minimum(settled + 2 * lack / below.sum() + 1e-16, 1.0)
    settled = np.where(below, more, settled)
  return settled


def is_symmetric(heights: np.ndarray) -> bool:
  """Returns whether the heights are exactly symmetric."""
  return bool((heights == heights[::-1]).all())


def mirrored(half: np.ndarray, num_steps: int) -> np.ndarray:
  """Returns the symmetric heights; the first ceil(n / 2) are given."""
  return np.concatenate([half, half[: num_steps - half.size][::-1]])


def polish(heights: np.ndarray, num_iterations: int, radius: float) -> np.ndarray:
  """Improves heights with a sequence of linear programs; never returns worse ones.

  Each program minimises t with overlap_k + gradient_k . d <= t for the shifts k that can matter
  within |d| <= radius, sum d = 0, heights in [0, 1]; the radius adapts to the accuracy of the
  program. Symmetric heights stay symmetric, and need half the variables and half the shifts.

  Args:
    heights: f64[n], from `settle`.
    num_iterations: maximum number of linear programs; none above 600 steps.
    radius: initial radius of the trust region, in heights.
  """
  n = heights.size
  if n > _TOOL_STEPS:
    return heights
  folds = is_symmetric(heights)
  num_free = (n + 1) // 2 if folds else n
  times = np.full(num_free, 2.0 if folds else 1.0)
  if folds and n % 2:
    times[-1] = 1.0

  def whole(free: np.ndarray) -> np.ndarray:
    return mirrored(free, n) if folds else free

  free = heights[:num_free].copy()
  values = overlaps(heights)
  best = float(values.max())
  slopes: np.ndarray | None = None
  steepest = np.zeros(0)
  for _ in range(num_iterations):
    if slopes is None:
      slopes = _gradient(whole(free))
      if folds:
        # Shifts k and -k have equal overlaps; a column and its mirror image move together.
        slopes, values = slopes[n - 1 :], values[n - 1 :]
        slopes = (slopes[:, :num_free] + slopes[:, ::-1][:, :num_free]) * (times / 2)
      steepest = np.abs(slopes).sum(axis=1)
    # Leaves out shifts with a maximum overlap below another's minimum.
    rows = values + steepest * radius >= (values - steepest * radius).max()
    most = best - values[rows]
    answer = linear_programs.solve(
      np.append(np.zeros(num_free), 1.0),
      np.vstack(
        [
          np.hstack([slopes[rows], np.full((most.size, 1), -1.0)]),
          np.append(times, 0.0),
        ]
      ),
      (
        np.append(np.full(most.size, -np.inf), n / 2 - float(times @ free)),
        np.append(most, n / 2 - float(times @ free)),
      ),
      (
        np.append(np.maximum(-free, -radius), -1.0),
        np.append(np.minimum(1 - free, radius), 1.0),
      ),
    )
    if answer is None:
      radius /= 4
      continue
    promised = -float(answer[-1])
    if promised < 1e-12:
      break
    moved = np.clip(free + answer[:-1], 0.0, 1.0)
    new_values = overlaps(whole(moved))
    gained = best - float(new_values.max())
    if gained > 0:
      free, values, best, slopes = moved, new_values, best - gained, None
    if gained > 0.5 * promised:
      radius = min(2 * radius, _MAX_RADIUS)
    elif gained < 0.1 * promised:
      radius /= 4
  return better(settle(whole(free)), heights)


def better(new: np.ndarray, old: np.ndarray) -> np.ndarray:
  """Returns the better of two, both from `settle`, compared exactly."""
  new_value, old_value = overlap_constant(new.tolist()), overlap_constant(old.tolist())
  if old_value is None or (new_value is not None and new_value < old_value):
    return new
  return old


def _gradient(heights: np.ndarray) -> np.ndarray:
  # f64[2n-1, n]: derivative of the overlap at each shift by each height.
  n = heights.size
  others, own = np.zeros(3 * n), np.zeros(3 * n)
  others[n : 2 * n] = 1 - heights
  own[n : 2 * n] = heights
  # At shift k and height i: others[n + i + k] - own[n + i - k].
  windows = np.lib.stride_tricks.sliding_window_view
  return 2 / n * (windows(others, n)[1 : 2 * n] - windows(own, n)[1 : 2 * n][::-1])


def _cost(num_steps: int) -> float:
  # Cost of a linear program of symmetric heights; at least the cost of a solver call.
  return max((num_steps / 51) ** 2.4, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinimumOverlapEdits(step_functions.StepEdits):
  """The edits of this problem.

    noise, remelt, set, shift, smooth, stretch   change a region (`step_functions.reshape`)
    mirror   mean of the heights and their mirror image
    polish   4 to 64 linear programs (by place), with trust radius `SIZES[amount]` / 2
    skew     noise on the whole function, which breaks its symmetry

  On symmetric heights the first six act on the left half, and the right half follows. Sentences
  that do not end with a polish are polished, because perturbed heights are never better.
  """

  def prompt(self, artefact: Artefact) -> tuple[int, ...]:
    """Returns tokens for the value, the shift of the largest overlap, and the coarse heights."""
    heights = self._read(artefact)
    values = overlaps(heights)
    gap = float(values.max()) - GOAL
    return step_functions.view(heights, 1.0, gap, float(values.argmax()) / values.size)

  def apply(self, artefact: Artefact, tokens: Sequence[int], seed: int) -> Artefact:
    """Returns the artefact after the edits, in order; all polishes share one work limit.

    Raises:
      ValueError: if the sentence cannot be parsed.
    """
    edits = step_functions.parse(tokens)
    rng = np.random.default_rng([seed, 0x0E2D])
    n = self.num_steps
    heights = self._read(artefact)
    work = _MAX_WORK

    def polished(count: int, radius: float) -> np.ndarray:
      nonlocal work
      cost = _cost(n) * (1.0 if is_symmetric(heights) else 4.0)
      count = min(count, int(work / cost))
      work -= count * cost
      return polish(heights, count, radius)

    for edit in edits:
      if edit.verb == POLISH:
        heights = polished(4 * (edit.place + 1), SIZES[edit.amount] / 2)
      elif edit.verb == LAST:
        part = step_functions.region(edit.place, n)
        skewed = heights.copy()
        skewed[part] += SIZES[edit.amount] / 2 * rng.standard_normal(skewed[part].size)
        heights = settle(skewed)
      elif edit.verb == MIRROR:
        heights = settle((heights + heights[::-1]) / 2)
      elif is_symmetric(heights):
        half = step_functions.reshape(heights[: (n + 1) // 2], edit, rng, 1.0)
        heights = settle(mirrored(half, n))
      else:
        heights = settle(step_functions.reshape(heights, edit, rng, 1.0))
    if edits[-1].verb != POLISH:
      heights = polished(_CLOSING_PROGRAMS, _CLOSING_RADIUS)
    return heights.tolist()

  def _read(self, artefact: Artefact) -> np.ndarray:
    heights = np.array(artefact, np.float64)
    scale = self.num_steps / 2 / math.fsum(heights.tolist())
    # Heights from `settle` are kept to the last bit.
    return settle(heights if abs(scale - 1) < 1e-12 else heights * scale)


@dataclasses.dataclass(frozen=True)
class MinimumOverlap:
  """The problem for step functions of one size.

  Attributes:
    num_steps: n; 51 is the size of the human record. Above 463 (260 without symmetry) a sentence's
      work limit allows no linear program: use programs for such sizes.
  """

  num_steps: int = 51

  def __post_init__(self):
    if not 1 <= self.num_steps <= step_functions.MAX_STEPS:
      raise ValueError(
        f"MinimumOverlap.num_steps: got {self.num_steps}, expected 1 to"
        f" {step_functions.MAX_STEPS}; 51 is the size of the human record."
      )

  @property
  def name(self) -> str:
    return f"minimum_overlap_{self.num_steps}"

  @property
  def is_maximised(self) -> bool:
    return False

  @property
  def published(self) -> tuple[Published, ...]:
    return PUBLISHED

  @property
  def language(self) -> MinimumOverlapEdits:
    return MinimumOverlapEdits(num_steps=self.num_steps)

  def start(self, seed: int) -> Artefact:
    """Returns symmetric random heights around 1/2: 0.5 +- 0.4, centred."""
    return self._random(np.random.default_rng([seed, 0xE2D05])).tolist()

  def verify(self, artefact: Artefact) -> Score:
    """Returns C5 of the admissible heights, rounded up; the certificate is the fraction."""
    heights = step_functions.check_heights(artefact, self.num_steps)
    if isinstance(heights, str):
      return environment.invalid(heights)
    exact = overlap_constant(heights)
    if exact is None:
      num_positive = sum(height > 0 for height in heights)
      return environment.invalid(
        f"heights: got {num_positive} above 0, expected at least n / 2 = {self.num_steps / 2},"
        " since each is at most 1 and they sum to n / 2"
      )
    value = step_functions.at_least(exact)
    return Score(
      is_valid=True,
      value=value,
      reward=1 / (1e-8 + value),
      certificate=step_functions.certificate(exact, value),
    )

  def describe(self, artefact: Artefact, score: Score) -> str:
    """Returns the problem's description for a model that writes programs."""
    n = self.num_steps
    return (
      "Erdős' minimum overlap problem. For h: [0, 2] -> [0, 1] with integral 1, constant on"
      f" n = {n} equal steps of heights h[0..n-1], make\n"
      "  C5 = 2 / n * max(numpy.correlate(h, 1 - h, mode='full'))\n"
      "as small as possible: each value is an upper bound of Erdős' constant.\n"
      f"The verifier scales the heights, cut at 1, to sum n / 2 = {n / 2}. They are at most"
      f" {step_functions.MAX_HEIGHT:g}, and sum to {step_functions.MIN_SUM:g} at least.\n"
      + step_functions.program_rules(n)
      + f"Now: C5 = {score.value:.10f}. Best known, with more steps: {PUBLISHED[0].value}; with 51"
      " steps 0.38092685."
      f"\nartefact = {step_functions.heights_text(artefact)}\n"
    )

  def picture(self, artefact: Artefact) -> Any:
    """Returns a Figure of the function and of its overlap by shift, with the maximum marked."""
    found = admissible(step_functions.dyadic(artefact))
    assert found is not None  # Only accepted artefacts are drawn.
    heights = np.array([number / found[1] for number in found[0]])
    values = np.concatenate([[0.0], overlaps(heights), [0.0]])
    return step_functions.picture(
      heights,
      (0.0, 2.0),
      values,
      (-2.0, 2.0),
      left=dict(xlabel="x", ylabel="h(x)", ylim=(0, 1.02), title=f"{self.num_steps} steps"),
      right=dict(xlabel="shift", ylabel="overlap", title=f"C5 = {values.max():.8f}"),
    )

  def polished_starts(self, seed: int) -> Iterator[Artefact]:
    """Yields starts, each polished once with a sentence's work limit."""
    count = max(int(_MAX_WORK / _cost(self.num_steps)), 1)
    index = 0
    while True:
      heights = np.array(self.start(seed * 1_000_003 + index))
      yield polish(heights, count, 0.02).tolist()
      index += 1

  def classical(self, seed: int) -> Iterator[Artefact]:
    """Runs symmetric sequential linear programs with restarts and perturbations.

    Each round polishes 8 new starts, then perturbs the best of them until 40 attempts in a row have
    gained nothing. Yields the result of each attempt.
    """
    rng = np.random.default_rng([seed, 0xC1A551C])
    n = self.num_steps
    iterations = max(int(_MAX_WORK / _cost(n)), 1)
    while True:
      best: np.ndarray | None = None
      for _ in range(8):
        heights = polish(self._random(rng), iterations, 0.02)
        best = heights if best is None else better(heights, best)
        yield heights.tolist()
      assert best is not None
      num_failed = 0
      while num_failed < 40:
        half = best[: (n + 1) // 2].copy()
        size = 10 ** rng.uniform(-2.5, -0.5)
        # Perturbing regions matters: with scattered heights only, no round at n = 51 reached the
        # optimum.
        match rng.integers(3):
          case 0:
            is_moved = rng.random(half.size) < rng.choice((0.2, 0.5, 1.0))
            half += size * rng.standard_normal(half.size) * is_moved
          case 1:
            width = int(rng.integers(1, half.size + 1))
            first = int(rng.integers(half.size - width + 1))
            half[first : first + width] += size * rng.standard_normal(width)
          case _:
            half += size * step_functions.smooth_noise(half.size, rng)
        heights = polish(settle(mirrored(half, n)), iterations, size)
        chosen = better(heights, best)
        num_failed = num_failed + 1 if chosen is best else 0
        best = chosen
        yield heights.tolist()

  def _random(self, rng: np.random.Generator) -> np.ndarray:
    half = 0.5 + 0.4 * rng.uniform(-1, 1, (self.num_steps + 1) // 2)
    return settle(mirrored(half, self.num_steps))
