"""Circle packing: put n circles into the unit square so that the sum of their radii is greatest.

  maximise  Σ r_i     subject to   r_i > 0,   r_i <= x_i, y_i <= 1 - r_i,
                                   (x_i - x_j)² + (y_i - y_j)² >= (r_i + r_j)²   for i < j

An artefact is a list of n lists [x, y, r]. Floats are fractions, so that the rules are decided by
whole numbers, with no tolerance at all: one unit in the last place of overlap is an overlap.

The tool ("polish") has three stages, each from where the one before stopped:

  settle   L-BFGS on  -Σ r + stiffness/2 Σ overlap²,  five times stiffer at a time  (1 ms at n=32)
  vertex   Newton's method on "overlap = 0" for the pairs and walls that still press (0.2 ms)
  linear   where that does not apply: linear programs in moves and radii, by HiGHS (5 ms each).
           A distance is a convex function of the moves, so its tangent is a lower bound: each
           program's optimum is a packing again, and no worse.

then all radii shrink by some 1e-15 to 1e-12, until the exact verifier accepts.

Source: Yuksekgonul et al. 2026 (TTT-Discover), https://arxiv.org/abs/2601.16175, section 4.1;
Novikov et al. 2025 (AlphaEvolve), https://arxiv.org/abs/2506.13131, appendix B.12.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
from fractions import Fraction
import functools
import math
from typing import Any

import numpy as np
from scipy import sparse

from experiments.problems import linear_programs
from seerjax import compiled
from seerjax.discovery import environment
from seerjax.discovery.environment import Artefact, EditLanguage, Published, Score

MAX_CIRCLES = 200
STIFF = 6250.0  # Of the last stage of settling; overlaps are then about 1e-4.
FIRM = 250.0  # Keeps a packing's neighbourhoods as they are.
SOFT = 10.0  # Lets circles pass through each other: for random starts.
LEAST_RADIUS = 1e-6  # In a linear program; a circle of radius 0 would be none.
TRUST = 0.02  # Largest move of a coordinate in one linear program.
MAX_LINEAR_PROGRAMS = 12
# Of (distance)² - (sum of radii)² in float64, both below 2: twelve roundings are below 2e-15.
GAP_ERROR = 1e-14

NUM_LEVELS = 32  # Cells of a side, radii, and whatever an edit's argument counts.
NUM_VALUES = 16  # Levels of the value in a prompt.
NUM_KNOBS = 8  # Settings of each knob of the polish that ends a sentence.
NUM_HOLES = 8  # How far down the list of holes an edit may go.
X_IDS = 0  # Arguments and knobs as well: ids 0 to 31.
Y_IDS = X_IDS + NUM_LEVELS
RADIUS_IDS = Y_IDS + NUM_LEVELS
VERB_IDS = RADIUS_IDS + NUM_LEVELS
VALUE_IDS = VERB_IDS + 16
VOCAB_SIZE = VALUE_IDS + NUM_VALUES
# By id from VERB_IDS on; `CircleLanguage` says what each does.
VERBS = (
  "keep",
  "move",
  "swap",
  "refill",
  "relocate",
  "resize",
  "jitter",
  "shake",
  "turn",
  "flip",
  "slide",
)

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


class CirclePacking:
  """The problem for one number of circles; an `Environment` with `Baselines`.

  Args:
    num_circles: n, in [1, 200].
    num_edits: of a sentence of the language.

  Raises:
    ValueError: if either is out of range.
  """

  name: str
  is_maximised: bool
  published: tuple[Published, ...]
  language: EditLanguage | None

  def __init__(self, num_circles: int = 26, *, num_edits: int = 3):
    self.language = CircleLanguage(num_circles=num_circles, num_edits=num_edits)
    self.num_circles = num_circles
    self.name = f"circle_packing_{num_circles}"
    self.is_maximised = True
    self.published = PUBLISHED.get(num_circles, ())

  def start(self, seed: int) -> Artefact:
    """Returns circles about random centres, alike at first, then each grown as far as it can."""
    rng = np.random.default_rng([seed, self.num_circles])
    while True:
      circles = np.zeros((3, self.num_circles))
      circles[:2] = rng.random((2, self.num_circles))
      room = _room(circles)
      # Two centres in one place, or one on a wall, leave no room: drawn again.
      if room.min() > LEAST_RADIUS:
        break
    circles[2] = 0.5 * room.min()
    for i in range(self.num_circles):
      clearance = _clearance(np.delete(circles, i, 1), circles[:2, i, None])[0]
      circles[2, i] = max(circles[2, i], clearance)
    return _accepted(circles)

  def describe(self, artefact: Artefact, score: Score) -> str:
    """Returns the problem, its rules and this artefact as text for a model that writes programs."""
    n = self.num_circles
    worth = f"sum of radii = {score.value!r}" if score.is_valid else f"invalid: {score.reason}"
    best = self.published[0] if self.published else None
    target = f"Best known: {best.value!r} ({best.who}, {best.year}).\n" if best else ""
    return (
      f"Pack {n} circles into the unit square [0, 1] x [0, 1] so that the sum of their radii is as"
      " large as possible; radii may differ.\n\n"
      f"A packing is a list of exactly {n} lists [x, y, r] of floats, the centre and the radius.\n"
      "It is valid if every r > 0, every circle lies in the square (r <= x <= 1 - r and the same"
      " for y), and no two circles overlap: (x_i - x_j)^2 + (y_i - y_j)^2 >= (r_i + r_j)^2. This"
      " is checked in exact rational arithmetic, with no tolerance: multiply all radii by"
      " (1 - 1e-12) before you return them. NaN, infinities and booleans are refused.\n"
      "Touching circles are allowed. The value is recomputed from the list; nothing reported"
      " counts.\n\n"
      f"{target}"
      f"The packing to improve ({worth}):\n"
      f"artefact = {_text(artefact)}\n\n"
      "Write a Python program that defines\n\n"
      "def improve(artefact, seconds, seed):\n"
      '  """Returns a better packing, as a list of lists [x, y, r], within `seconds`."""\n\n'
      "numpy and scipy may be imported. Equal arguments should give equal packings: draw random"
      " numbers from `seed` only. Return the best packing found before the time is over; one that"
      " is not valid earns nothing.\n"
    )

  def verify(self, artefact: Artefact) -> Score:
    """Judges anything whatever, exactly; never raises.

    The value is the sum of the radii, rounded down; the certificate holds the exact fraction.
    """
    rows = _rows(artefact, self.num_circles)
    if isinstance(rows, str):
      return environment.invalid(rows)
    circles = np.array(rows).T
    reason = _wall_crossed(circles) or _overlap(circles)
    if reason:
      return environment.invalid(reason)
    (_, _, radii), unit = _whole(circles)
    total = Fraction(sum(radii), unit)
    value = float(total)
    if Fraction(value) > total:
      value = math.nextafter(value, -math.inf)
    certificate = f"sum of radii = {total.numerator}/{total.denominator}; value is rounded down"
    return Score(is_valid=True, value=value, reward=value, certificate=certificate)

  def picture(self, artefact: Artefact) -> Any:
    """Returns a matplotlib Figure: circles shaded by radius, with a line for each contact."""
    from matplotlib import figure, patches  # Slow to import, and only a picture needs it.

    circles = np.array(artefact, np.float64).T
    drawn = figure.Figure(figsize=(5, 5), layout="constrained")
    axes = drawn.add_subplot(aspect="equal", xlim=(0, 1), ylim=(0, 1), xticks=[], yticks=[])
    for x, y, r in circles.T:
      shade = 0.92 - 0.4 * r / circles[2].max()
      axes.add_patch(patches.Circle((x, y), r, facecolor=(shade, shade, 0.95), edgecolor="0.25"))
    first, second, distance = _pairs(circles)
    gap = distance - circles[2, first] - circles[2, second]
    for i, j in zip(first[gap < 1e-8], second[gap < 1e-8]):
      axes.plot(circles[0, [i, j]], circles[1, [i, j]], color="tab:red", linewidth=0.8)
    for x, y, r in circles.T:
      for wall in ((0.0, y), (1.0, y), (x, 0.0), (x, 1.0)):
        if abs(wall[0] - x) + abs(wall[1] - y) - r < 1e-8:
          axes.plot((x, wall[0]), (y, wall[1]), color="tab:red", linewidth=0.8)
    axes.set_title(f"{circles.shape[1]} circles, sum of radii {math.fsum(circles[2]):.9f}")
    return drawn

  def classical(self, seed: int) -> Iterator[Artefact]:
    """Yields what monotone basin hopping finds: settle, change a little, settle, keep the better.

    A run ends after 8n changes in vain; it starts at random, or, every other one, with the best of
    the runs before. Each run, and each piece of a long one, yields its packing, polished.

    Source: Wales and Doye 1997 (basin hopping), https://arxiv.org/abs/cond-mat/9803344; Grosso et
    al. 2010 (for circles), https://doi.org/10.1007/s10898-009-9458-3.
    """
    n = self.num_circles
    rng = np.random.default_rng([seed, n, 1])
    hops_per_item = max(10, 300_000 // (n * n + 50))
    best, best_value, from_best = np.empty((3, n)), -math.inf, False
    while True:
      circles = np.concatenate([rng.random((2, n)), np.full((1, n), 0.02)])
      _settle(circles, SOFT, 200)
      value = -math.inf
      if from_best:
        circles, value = best.copy(), best_value
      failed = hops = 0
      while failed < 8 * n:
        changed = circles.copy()
        _hop(changed, rng)
        # Soft, or the stiffest: optima 1e-5 apart may be one while overlaps are still large.
        found = _settle(changed, FIRM * 5.0 ** float(rng.integers(-1, 3)), 200)
        failed += 1
        if found > value - 1e-4:  # Near enough to be worth the exact sum; no other is compared.
          vertex = _vertex(changed)
          if vertex is not None and math.fsum(vertex[2]) > value + 1e-10:
            circles, value, failed = vertex, math.fsum(vertex[2]), 0
        hops += 1
        if hops % hops_per_item == 0:
          yield _accepted(circles) if value > 0 else _finish(circles.copy())
      # Settled once more, a vertex could end in a poorer one beside it.
      yield _accepted(circles) if value > 0 else _finish(circles.copy())
      if value > best_value:
        best, best_value = circles, value
      from_best = not from_best

  def polished_starts(self, seed: int) -> Iterator[Artefact]:
    """Yields fresh starts, each settled from soft on and polished: what the tool does alone."""
    rng = np.random.default_rng([seed, self.num_circles, 2])
    while True:
      circles = np.array(self.start(int(rng.integers(2**31)))).T.copy()
      _settle(circles, SOFT, 200)
      yield _finish(circles)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CircleLanguage:
  """Sentences of `num_edits` edits [verb, a, b, c], then [stiffness, effort] of the polish.

  Circles are numbered as the prompt lists them: by rows of the square from below, in a row from
  the left. Arguments are levels 0 to 31; a circle's number is taken modulo n, a place is the middle
  of a cell, s(c) = ((c + 1) / 32)² / 4 is a length.

    keep                 changes nothing
    move      i, x, y    circle i goes to cell (x, y)
    swap      i, j       circles i and j change places
    refill    k, h, s    the k-th smallest circle goes into the h-th largest hole (h modulo 8), its
                         radius (s + 1) / 16 of the hole's
    relocate  i, h, s    the same for circle i
    resize    i, s       the radius of circle i times (s + 1) / 16
    jitter    i, m, c    circle i and the m circles nearest to it move at random, up to s(c)
    shake     c          all circles move at random, up to s(c)
    turn      i, m, t    circle i and the m nearest turn about circle i, from -90 to 90 degrees
    flip      x, y, c    circles in a window about cell (x, y) are mirrored in its middle: its half
                         side is (c // 2 + 1) / 32, left and right for even c, else up and down
    slide     i, j, c    circle i goes c / 31 of the way to circle j

  Circles may overlap after an edit; `_settle` pushes them apart, the harder the stiffer it begins:
  10 * 2^stiffness. Its effort is 25 * (effort + 1) steps at each of its stiffnesses.

  Attributes:
    num_circles: n, in [1, 200].
    num_edits: edits of a sentence.
  """

  num_circles: int
  num_edits: int = 3

  def __post_init__(self):
    for field, got, most in (
      ("num_circles", self.num_circles, MAX_CIRCLES),
      ("num_edits", self.num_edits, 16),
    ):
      if not 1 <= got <= most:
        raise ValueError(
          f"CircleLanguage.{field}: got {got}, expected 1 <= {field} <= {most}; 26 circles and 3"
          " edits are usual."
        )

  @property
  def vocab_size(self) -> int:
    """Ids are 0 <= id < vocab_size."""
    return VOCAB_SIZE

  @property
  def allowed(self) -> tuple[tuple[int, int], ...]:
    """By place in the sentence, ids from the first number up to, not including, the second."""
    verb = (VERB_IDS, VERB_IDS + len(VERBS))
    argument = (X_IDS, X_IDS + NUM_LEVELS)
    knob = (X_IDS, X_IDS + NUM_KNOBS)
    return (verb, argument, argument, argument) * self.num_edits + (knob, knob)

  @property
  def stop_token(self) -> int | None:
    """None: all sentences have full length, and "keep" fills one that says less."""
    return None

  def prompt(self, artefact: Artefact) -> tuple[int, ...]:
    """Returns a level of the value, then x, y and r of each circle as levels: 3n + 1 ids."""
    circles = self._listed(artefact)
    n = self.num_circles
    # Σr <= sqrt(n/π) because areas add up to at most 1; good packings have 0.9 of it or more.
    quality = math.fsum(circles[2]) / math.sqrt(n / math.pi)
    ids = [VALUE_IDS + min(max(int((quality - 0.86) / 0.004), 0), NUM_VALUES - 1)]
    for x, y, r in circles.T:
      for base, level in ((X_IDS, x), (Y_IDS, y), (RADIUS_IDS, r * math.sqrt(n))):
        ids.append(base + min(max(int(level * NUM_LEVELS), 0), NUM_LEVELS - 1))
    return tuple(ids)

  def apply(self, artefact: Artefact, tokens: Sequence[int], seed: int) -> Artefact:
    """Returns the packing that a sentence makes of one; the given one is left as it is.

    Args:
      artefact: valid.
      tokens: a sentence.
      seed: of the noise of jitter and shake.

    Raises:
      ValueError: if the sentence has the wrong length, or an id that may not stand in its place.
    """
    if len(tokens) != len(self.allowed):
      raise ValueError(
        f"CircleLanguage.apply: got {len(tokens)} tokens, expected {len(self.allowed)}; sample one"
        " for each entry of `allowed`."
      )
    for place, (token, (low, high)) in enumerate(zip(tokens, self.allowed)):
      if not low <= token < high:
        raise ValueError(
          f"CircleLanguage.apply: got token {token} in place {place}, expected"
          f" {low} <= token < {high}; mask what is sampled by `allowed`."
        )
    circles = self._listed(artefact)
    rng = np.random.default_rng([seed, 3])
    for begin in range(0, 4 * self.num_edits, 4):
      verb, a, b, c = (int(token) for token in tokens[begin : begin + 4])
      _edit(circles, VERBS[verb - VERB_IDS], a, b, c, rng)
    stiffness, effort = (int(token) for token in tokens[-2:])
    _settle(circles, SOFT * 2**stiffness, 25 * (effort + 1))
    return _finish(circles)

  def _listed(self, artefact: Artefact) -> np.ndarray:
    """Returns a valid artefact's circles f64[3, n] in the order of the prompt."""
    num_rows = max(round(math.sqrt(self.num_circles)), 1)
    rows = sorted(artefact, key=lambda row: (math.floor(num_rows * row[1]), *row))
    return np.array(rows, np.float64).T.copy()


# What the verifier does.


def _rows(artefact: Any, num_circles: int) -> list[tuple[float, float, float]] | str:
  """Returns n (x, y, r) as floats, or the reason why there are none."""
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
      # Written so that NaN fails. A large int cannot even be printed: so its value is left out.
      if not 0 <= number <= 1:
        shown = repr(number) if type(number) is float else "a whole number"
        return f"circle {i}: got {letter} = {shown}, expected 0 <= {letter} <= 1"
    if not circle[2] > 0:
      return f"circle {i}: got r = 0, expected r > 0"
    x, y, r = circle
    rows.append((float(x), float(y), float(r)))
  return rows


def _wall_crossed(circles: np.ndarray) -> str:
  """Returns which circle f64[3, n] leaves the square, or ""; exact."""
  r = circles[2]
  for axis, (low, high) in enumerate((("left", "right"), ("lower", "upper"))):
    place = circles[axis]
    # 1 - x is exact for x >= 1/2 (Sterbenz); below, r <= x < 1/2 settles it.
    for wall, inside in ((low, r <= place), (high, (place < 0.5) | (r <= 1.0 - place))):
      if not inside.all():
        i = int(np.argmin(inside))
        beyond = Fraction(r[i]) + (-Fraction(place[i]) if wall == low else Fraction(place[i]) - 1)
        return (
          f"circle {i}: got {'xy'[axis]} = {float(place[i])!r} with r = {float(r[i])!r}, which"
          f" crosses the {wall} wall by {_rounded(beyond)}; expected it inside the unit square"
        )
  return ""


def _overlap(circles: np.ndarray) -> str:
  """Returns which two circles f64[3, n] overlap, or ""; exact: floats only where they decide."""
  first, second = _pair_numbers(circles.shape[1])
  dx, dy = circles[:2, first] - circles[:2, second]
  reach = circles[2, first] + circles[2, second]
  gap = dx * dx + dy * dy - reach * reach
  close = np.flatnonzero(~(gap > GAP_ERROR))
  if not close.size:
    return ""
  (x, y, r), unit = _whole(circles)
  for i, j in zip(first[close].tolist(), second[close].tolist()):
    squared_distance = (x[i] - x[j]) ** 2 + (y[i] - y[j]) ** 2
    squared_reach = (r[i] + r[j]) ** 2
    if not squared_distance >= squared_reach:
      # a - b = (a² - b²) / (a + b); the whole root is exact enough for a message.
      depth = Fraction(
        squared_reach - squared_distance, (r[i] + r[j] + math.isqrt(squared_distance)) * unit
      )
      return f"circles {i} and {j} overlap by {_rounded(depth)}, expected none; shrink the radii"
  return ""


def _whole(circles: np.ndarray) -> tuple[list[list[int]], int]:
  """Returns circles f64[3, n] as whole multiples of 1 / unit, and that unit: a power of two."""
  ratios = [[number.as_integer_ratio() for number in row] for row in circles.tolist()]
  unit = max(below for row in ratios for _, below in row)
  return [[above * (unit // below) for above, below in row] for row in ratios], unit


def _rounded(fraction: Fraction) -> str:
  """Returns a positive number in a few digits, however small."""
  return f"{float(fraction):.3g}" if fraction > Fraction(1, 10**300) else "less than 1e-300"


# What an edit does to circles f64[3, n], in place.


def _edit(
  circles: np.ndarray, verb: str, a: int, b: int, c: int, rng: np.random.Generator
) -> None:
  n = circles.shape[1]
  i, j = a % n, b % n
  length = ((c + 1) / NUM_LEVELS) ** 2 / 4
  match verb:
    case "keep":
      pass
    case "move":
      circles[:2, i] = (b + 0.5) / NUM_LEVELS, (c + 0.5) / NUM_LEVELS
    case "swap":
      circles[2, [i, j]] = circles[2, [j, i]]
    case "refill":
      smallest = int(np.argsort(circles[2], kind="stable")[i])
      _into_hole(circles, smallest, b % NUM_HOLES, (c + 1) / 16)
    case "relocate":
      _into_hole(circles, i, b % NUM_HOLES, (c + 1) / 16)
    case "resize":
      circles[2, i] *= (b + 1) / 16
    case "jitter":
      near = _nearest(circles, i, b + 1)
      circles[:2, near] += length * (2 * rng.random((2, near.size)) - 1)
    case "shake":
      length = ((a + 1) / NUM_LEVELS) ** 2 / 4
      circles[:2] += length * (2 * rng.random((2, n)) - 1)
    case "turn":
      # (1 - t², 2t) / (1 + t²) is a point of the unit circle: no sine, whose last bit varies.
      t = (2 * c + 1 - NUM_LEVELS) / (NUM_LEVELS - 1)
      cos, sin = (1 - t * t) / (1 + t * t), 2 * t / (1 + t * t)
      near = _nearest(circles, i, b + 1)
      x, y = circles[:2, near] - circles[:2, i, None]
      circles[0, near], circles[1, near] = (
        circles[0, i] + (cos * x - sin * y),
        circles[1, i] + (sin * x + cos * y),
      )
    case "flip":
      middle = np.array([(a + 0.5) / NUM_LEVELS, (b + 0.5) / NUM_LEVELS])
      within = (np.abs(circles[:2] - middle[:, None]) <= (c // 2 + 1) / NUM_LEVELS).all(0)
      circles[c % 2, within] = 2 * middle[c % 2] - circles[c % 2, within]
    case "slide":
      circles[:2, i] += (circles[:2, j] - circles[:2, i]) * (c / (NUM_LEVELS - 1))
    case _:
      raise AssertionError(verb)
  np.clip(circles[:2], 1 / 128, 127 / 128, out=circles[:2])


def _hop(circles: np.ndarray, rng: np.random.Generator) -> None:
  """Changes a packing at random: one circle, all a little, the radii of two, or a region."""
  n = circles.shape[1]
  x, y, r = circles
  length = 0.1 * rng.random() ** 3 + 0.0005
  match int(rng.integers(5)):
    case 0:
      i, j = rng.integers(n, size=2)
      circles[:2, i] += (circles[:2, j] - circles[:2, i]) * rng.random()
    case 1:
      order = np.argsort(r, kind="stable")
      i = int(order[int(n * rng.random() ** 2)])  # Small circles more often.
      x[i], y[i] = rng.random(2)
      r[i] *= rng.random()
    case 2:
      circles[:2] += length * (2 * rng.random((2, n)) - 1)
    case 3:
      i, j = rng.integers(n, size=2)
      r[[i, j]] = r[[j, i]]
    case _:
      near = _nearest(circles, int(rng.integers(n)), int(rng.integers(1, n // 2 + 2)))
      circles[:2, near] += 2 * length * (2 * rng.random((2, near.size)) - 1)
  np.clip(circles[:2], 1 / 128, 127 / 128, out=circles[:2])


def _nearest(circles: np.ndarray, i: int, count: int) -> np.ndarray:
  """Returns the numbers of circle i and the others nearest to it, `count` in all if there are."""
  dx, dy = circles[:2] - circles[:2, i, None]
  return np.argsort(dx * dx + dy * dy, kind="stable")[:count]


def _into_hole(circles: np.ndarray, i: int, rank: int, share: float) -> None:
  """Puts circle i into the hole of this rank, the largest being 0, with a share of its radius."""
  others = np.delete(circles, i, 1)
  ticks = (np.arange(2 * NUM_LEVELS) + 0.5) / (2 * NUM_LEVELS)
  places = np.stack([np.repeat(ticks, ticks.size), np.tile(ticks, ticks.size)])
  room = _clearance(others, places)
  best = 0
  for _ in range(rank + 1):
    best = int(np.argmax(room))
    size = room[best]
    # A hole is taken when it has been named: what is left of the others is outside of it.
    dx, dy = places - places[:, best, None]
    room = np.minimum(room, np.where(dx * dx + dy * dy > 0, np.sqrt(dx * dx + dy * dy) - size, -1))
  circles[:2, i] = places[:, best]
  circles[2, i] = share * max(size, LEAST_RADIUS)


# The tool: circles f64[3, n] are moved in place.


def _settle(circles: np.ndarray, stiffness: float, num_steps: int) -> float:
  """Pushes circles apart and grows them, ever stiffer, and returns about the sum they will have.

  Args:
    circles: f64[3, n], changed in place; overlaps of about 1e-4 are left.
    stiffness: to begin with, in (0, STIFF); a soft beginning changes neighbours.
    num_steps: of L-BFGS at each stiffness, at most.
  """
  before, previous = 0.0, 0.0
  while True:
    at_least = min(stiffness, STIFF)
    value = -_minimise(circles.reshape(-1), at_least, num_steps, 1e-4)
    if stiffness >= STIFF:
      # The excess of the penalised optimum falls as 1 / stiffness.
      return value - (before - value) * previous / (STIFF - previous) if previous else value
    before, previous = value, stiffness
    stiffness *= 5.0


def _finish(circles: np.ndarray) -> Artefact:
  """Returns a valid artefact near settled circles f64[3, n], at a maximum of the sum of radii."""
  least = 0.02 / math.sqrt(circles.shape[1])
  for _ in range(3):  # A circle inside another has no way out of its own.
    lost = int(np.argmin(circles[2]))
    if circles[2, lost] > least:
      break
    _into_hole(circles, lost, 0, 1.0)
    _settle(circles, FIRM, 200)
  np.clip(circles[:2], LEAST_RADIUS, 1 - LEAST_RADIUS, out=circles[:2])
  vertex = _vertex(circles)
  if vertex is None:  # The contacts have not settled yet.
    _settle(circles, FIRM, 600)
    vertex = _vertex(circles)
  return _accepted(_linear(circles) if vertex is None else vertex)


def _vertex(circles: np.ndarray) -> np.ndarray | None:
  """Returns circles f64[3, n] that just touch where settled ones press; None if there are none."""
  vertex = circles.copy()
  touches = _newton(vertex.reshape(-1), 8) and _excess(vertex) < 1e-12
  return vertex if touches else None


def _linear(circles: np.ndarray) -> np.ndarray:
  """Returns circles f64[3, n] after linear programs in moves and radii, until they gain nothing."""
  value = -math.inf
  for _ in range(MAX_LINEAR_PROGRAMS):
    solved = _linear_program(circles, TRUST)
    if solved is None or math.fsum(solved[2]) < value + 1e-13:
      break
    circles, value = solved, math.fsum(solved[2])
  return circles


def _linear_program(circles: np.ndarray, trust: float) -> np.ndarray | None:
  """Returns the best circles whose centres are within `trust`, by tangents of their distances.

  maximise Σ r'_i   over moves m and radii r', where   r'_i + r'_j <= d_ij + u_ij·(m_i - m_j)

  Args:
    circles: f64[3, n]; of the radii nothing depends but which pairs are near enough to matter.
    trust: largest move of a coordinate.

  Returns:
    f64[3, n], feasible up to the solver's tolerance; None if two centres are in one place.
  """
  n = circles.shape[1]
  x, y, r = circles
  first, second, distance = _pairs(circles)
  if first.size and distance.min() <= 2 * LEAST_RADIUS:
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
        np.concatenate([np.full(2 * n, -trust), np.full(n, LEAST_RADIUS)]),
        np.concatenate([np.full(2 * n, trust), np.full(n, 0.5)]),
      ),
    )
    if solution is None:
      return None
    moved = solution.reshape(3, n).copy()
    moved[:2] += circles[:2]
    if near.all() or _excess(moved) < 1e-9:
      return moved
    near[:] = True


def _accepted(circles: np.ndarray) -> Artefact:
  """Returns circles f64[3, n], shrunk as little as the exact verifier wants, as an artefact."""
  shrink = 2.0**-52
  while shrink < 1e-8:
    tried = circles.copy()
    tried[2] *= 1.0 - shrink
    if _excess(tried) <= 0 and not _wall_crossed(tried) and not _overlap(tried):
      return tried.T.tolist()
    shrink *= 4
  # The circles overlap in earnest: with these centres, radii that surely fit.
  room = _room(circles)
  if not room.min() > 0:
    circles = _spread(circles)
    room = _room(circles)
  return _accepted(np.concatenate([circles[:2], 0.5 * room[None]]))


def _spread(circles: np.ndarray) -> np.ndarray:
  """Returns circles of which no centre lies on another or on a wall; those that did are moved."""
  circles = circles.copy()
  circles[2] = np.maximum(np.minimum(circles[2], _room(circles)), 0)
  for i in np.flatnonzero(circles[2] <= 0):
    _into_hole(circles, int(i), 0, 1.0)
  return circles


def _room(circles: np.ndarray) -> np.ndarray:
  """Returns f64[n]: how far a centre is from the walls, or half of that to the nearest other."""
  first, second, distance = _pairs(circles)
  room = np.minimum(circles[:2], 1.0 - circles[:2]).min(0)
  np.minimum.at(room, first, distance / 2)
  np.minimum.at(room, second, distance / 2)
  return room


def _excess(circles: np.ndarray) -> float:
  """Returns the largest overlap of circles f64[3, n] or crossing of a wall, about; NaN is worst."""
  first, second, distance = _pairs(circles)
  r = circles[2]
  crossed = np.maximum(r - circles[:2], r + circles[:2] - 1.0).max()
  # 1e-15 below what is exact: the exact verifier decides.
  overlap = (r[first] + r[second] - distance).max() if first.size else crossed
  worst = float(max(crossed, overlap)) - 1e-15
  return worst if math.isfinite(worst) and r.min() > 0 else math.inf


def _pairs(circles: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns i, j and the distance of the centres for all pairs i < j of circles f64[3, n]."""
  first, second = _pair_numbers(circles.shape[1])
  dx, dy = circles[:2, first] - circles[:2, second]
  return first, second, np.sqrt(dx * dx + dy * dy)


@functools.lru_cache(maxsize=8)
def _pair_numbers(n: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns i and j of all pairs i < j < n; shared, so not to be written to."""
  first, second = np.triu_indices(n, 1)
  first.flags.writeable = second.flags.writeable = False
  return first, second


def _text(artefact: Artefact) -> str:
  return "[" + ",\n  ".join(repr(list(row)) for row in artefact) + "]"


# Compiled functions of z f64[3n]: all x, all y, all r. They add in a fixed order, without BLAS, so
# that equal circles settle equally on every machine.


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
def _clearance(circles, places):
  """Returns how far each place f64[2, m] is from the nearest circle or wall; below 0 inside one."""
  room = np.empty(places.shape[1])
  for k in range(places.shape[1]):
    x = places[0, k]
    y = places[1, k]
    least = min(min(x, 1.0 - x), min(y, 1.0 - y))
    for i in range(circles.shape[1]):
      dx = x - circles[0, i]
      dy = y - circles[1, i]
      least = min(least, math.sqrt(dx * dx + dy * dy) - circles[2, i])
    room[k] = least
  return room


@compiled.function
def _dot(a, b):
  total = 0.0
  for t in range(a.size):
    total += a[t] * b[t]
  return total


@compiled.function
def _minimise(z, stiffness, num_steps, tolerance):
  """Takes at most `num_steps` of L-BFGS, until no derivative is above `tolerance`; moves z.

  Memory of 8; steps are halved until Armijo's rule holds, and no coordinate moves by more than 0.1.

  Returns:
    the penalised value that is reached.
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
def _newton(z, num_steps):
  """Moves z so that whatever overlaps now just touches; returns whether that succeeded.

  At a settled packing an overlap is a multiplier over the stiffness: what overlaps is what is tight
  at the optimum, and if that is 3n constraints or more, it determines the optimum.
  """
  n = z.size // 3
  size = 3 * n
  # Constraints as (i, j): a pair for j >= 0, else wall -1 - j of circle i.
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
