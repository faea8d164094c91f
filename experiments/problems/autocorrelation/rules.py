"""Exact computation of both constants, and the best published values."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
import itertools

from experiments.problems import step_functions
from seerjax.discovery.environment import Published


def first_constant(
  heights: Sequence[float], most_digits: int = step_functions.MAX_EXACT_DIGITS
) -> Fraction:
  """Returns C1 exactly, or an upper bound if the convolution would be too long.

  Args:
    heights: non-negative, not all 0.
    most_digits: digit limit of the convolution (`step_functions.rounded`).
  """
  numbers = step_functions.dyadic(heights)
  parts = step_functions.rounded(numbers, most_digits)
  largest = max(step_functions.convolve(parts.high, parts.high)) * parts.unit**2
  return Fraction(2 * len(numbers) * largest, sum(numbers) ** 2)


def second_constant(
  heights: Sequence[float], most_digits: int = step_functions.MAX_EXACT_DIGITS
) -> Fraction:
  """Returns C2 exactly, or a lower bound if the convolution would be too long.

  Args:
    heights: non-negative, not all 0.
    most_digits: digit limit of the convolution (`step_functions.rounded`).
  """
  numbers = step_functions.dyadic(heights)
  parts = step_functions.rounded(numbers, most_digits)
  nodes = step_functions.convolve(parts.low, parts.low)
  largest = max(nodes if parts.unit == 1 else step_functions.convolve(parts.high, parts.high))
  squares = 2 * sum(c * c for c in nodes)
  squares += sum(c * d for c, d in itertools.pairwise(nodes))
  return Fraction(squares * parts.unit**2, 3 * sum(numbers) ** 2 * largest)


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
# The values to which a policy sees its distance: fixed, so that new records do not change runs.
FIRST_GOAL, SECOND_GOAL = 1.5028628, 0.961206
