"""The exact verifier of packings, in integers, and the best published values."""

from __future__ import annotations

from fractions import Fraction
import functools
import math
from typing import Any

import numpy as np

from seerjax.discovery.environment import Published

MAX_CIRCLES = 200

# Error bound of (distance)² - (sum of radii)² in float64, both below 2: twelve roundings of 2e-16.
GAP_ERROR = 1e-14

_PACKOMANIA = "http://www.packomania.com, as quoted by https://arxiv.org/abs/2601.16175"
_TTT = "https://arxiv.org/abs/2601.16175, section 4.1"
_ALPHAEVOLVE_2 = "https://arxiv.org/abs/2511.02864"
_ALPHAEVOLVE = "https://arxiv.org/abs/2506.13131, appendix B.12"
PUBLISHED = {
  26: (
    Published(2.635983084919, "Packomania", 2025, _PACKOMANIA),
    Published(2.635983, "TTT-Discover (Qwen3-8B)", 2026, _TTT),
    Published(2.635983, "AlphaEvolve V2", 2025, _ALPHAEVOLVE_2),
    Published(
      2.635982,
      "ShinkaEvolve (as printed some overlap; holds with radii smaller by 1e-9)",
      2025,
      "https://arxiv.org/abs/2509.19349",
    ),
    Published(2.635862, "AlphaEvolve", 2025, _ALPHAEVOLVE),
    Published(2.634, "OpenEvolve", 2025, "https://github.com/codelion/openevolve"),
  ),
  32: (
    Published(2.939572771205, "Packomania", 2025, _PACKOMANIA),
    Published(2.939572, "TTT-Discover (Qwen3-8B)", 2026, _TTT),
    Published(2.939572, "AlphaEvolve V2", 2025, _ALPHAEVOLVE_2),
    Published(2.937944, "AlphaEvolve", 2025, _ALPHAEVOLVE),
  ),
}


def rows(artefact: Any, num_circles: int) -> list[tuple[float, float, float]] | str:
  """Returns n tuples (x, y, r) of floats, or the reason why the artefact is invalid."""
  if type(artefact) not in (list, tuple):
    return f"artefact: got {type(artefact).__name__}, expected a list of {num_circles} [x, y, r]"
  if len(artefact) != num_circles:
    return f"artefact: got {len(artefact)} circles, expected {num_circles}"
  rows = []
  for i, circle in enumerate(artefact):
    if type(circle) not in (list, tuple):
      return f"circle {i}: got {type(circle).__name__}, expected a list [x, y, r]"
    if len(circle) != 3:
      return f"circle {i}: got {len(circle)} entries, expected 3: [x, y, r]"
    for letter, number in zip("xyr", circle):
      if type(number) not in (int, float):
        return f"circle {i}: got {letter} of type {type(number).__name__}, expected a real number"
      # Written so that NaN fails. Very large ints cannot be printed, so ints are not shown.
      if not 0 <= number <= 1:
        shown = repr(number) if type(number) is float else "a whole number"
        return f"circle {i}: got {letter} = {shown}, expected 0 <= {letter} <= 1"
    if not circle[2] > 0:
      return f"circle {i}: got r = 0, expected r > 0"
    x, y, r = circle
    rows.append((float(x), float(y), float(r)))
  return rows


def wall_crossed(circles: np.ndarray) -> str:
  """Returns which of the circles f64[3, n] leaves the square, or ""; exact."""
  r = circles[2]
  for axis, (low, high) in enumerate((("left", "right"), ("lower", "upper"))):
    place = circles[axis]
    # 1 - x is exact for x >= 1/2 (Sterbenz); for x < 1/2, r <= x suffices.
    for wall, inside in ((low, r <= place), (high, (place < 0.5) | (r <= 1.0 - place))):
      if not inside.all():
        i = int(np.argmin(inside))
        beyond = Fraction(r[i]) + (-Fraction(place[i]) if wall == low else Fraction(place[i]) - 1)
        return (
          f"circle {i}: got {'xy'[axis]} = {float(place[i])!r} with r = {float(r[i])!r}, which"
          f" crosses the {wall} wall by {_rounded(beyond)}; expected it inside the unit square"
        )
  return ""


def overlap(circles: np.ndarray) -> str:
  """Returns which two circles f64[3, n] overlap, or ""; exact, using floats only if they decide."""
  first, second = pair_numbers(circles.shape[1])
  dx, dy = circles[:2, first] - circles[:2, second]
  reach = circles[2, first] + circles[2, second]
  gap = dx * dx + dy * dy - reach * reach
  close = np.flatnonzero(~(gap > GAP_ERROR))
  if not close.size:
    return ""
  (x, y, r), unit = whole(circles)
  for i, j in zip(first[close].tolist(), second[close].tolist()):
    squared_distance = (x[i] - x[j]) ** 2 + (y[i] - y[j]) ** 2
    squared_reach = (r[i] + r[j]) ** 2
    if not squared_distance >= squared_reach:
      # a - b = (a² - b²) / (a + b); the integer root is exact enough for a message.
      depth = Fraction(
        squared_reach - squared_distance, (r[i] + r[j] + math.isqrt(squared_distance)) * unit
      )
      return f"circles {i} and {j} overlap by {_rounded(depth)}, expected none; shrink the radii"
  return ""


def whole(circles: np.ndarray) -> tuple[list[list[int]], int]:
  """Returns circles f64[3, n] as integer multiples of 1 / unit, and the unit, a power of two."""
  ratios = [[number.as_integer_ratio() for number in row] for row in circles.tolist()]
  unit = max(below for row in ratios for _, below in row)
  return [[above * (unit // below) for above, below in row] for row in ratios], unit


def _rounded(fraction: Fraction) -> str:
  """Returns a positive number of any size with a few digits."""
  return f"{float(fraction):.3g}" if fraction > Fraction(1, 10**300) else "less than 1e-300"


@functools.lru_cache(maxsize=8)
def pair_numbers(n: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns i and j of all pairs i < j < n; cached, so they must not be modified."""
  first, second = np.triu_indices(n, 1)
  first.flags.writeable = second.flags.writeable = False
  return first, second
