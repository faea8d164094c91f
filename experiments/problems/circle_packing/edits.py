"""The language: short sentences that move, swap, turn or refill circles and end with a polish."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math

import numpy as np

from experiments.problems.circle_packing import geometry, optimise, rules
from seerjax.discovery.environment import Artefact

NUM_LEVELS = 32  # Cells per side, levels of radii, and values of edit arguments.
NUM_VALUES = 16  # Levels of the value in a prompt.
NUM_KNOBS = 8  # Settings of each knob of the final polish.
NUM_HOLES = 8  # Number of largest holes that an edit can choose from.
X_IDS = 0  # Arguments and knobs as well: ids 0 to 31.
Y_IDS = X_IDS + NUM_LEVELS
RADIUS_IDS = Y_IDS + NUM_LEVELS
VERB_IDS = RADIUS_IDS + NUM_LEVELS
VALUE_IDS = VERB_IDS + 16
VOCAB_SIZE = VALUE_IDS + NUM_VALUES
# By id from VERB_IDS on; documented in `CircleLanguage`.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class CircleLanguage:
  """Sentences of `num_edits` edits [verb, a, b, c], then [stiffness, effort] of the polish.

  Circles are numbered in the order of the prompt: by rows of the square from below, within a row
  from the left. Arguments are levels 0 to 31; a circle's number is taken modulo n, a place is the
  middle of a cell, s(c) = ((c + 1) / 32)² / 4 is a length.

    keep                 changes nothing
    move      i, x, y    circle i goes to cell (x, y)
    swap      i, j       circles i and j change places
    refill    k, h, s    the k-th smallest circle goes into the h-th largest hole (h modulo 8), with
                         radius (s + 1) / 16 of the hole's
    relocate  i, h, s    the same for circle i
    resize    i, s       the radius of circle i times (s + 1) / 16
    jitter    i, m, c    circle i and the m circles nearest to it move at random, up to s(c)
    shake     c          all circles move at random, up to s(c)
    turn      i, m, t    circle i and the m nearest rotate about circle i, by -90 to 90 degrees
    flip      x, y, c    circles in a window around cell (x, y) are mirrored at its middle; the half
                         side is (c // 2 + 1) / 32; even c mirrors left-right, odd c up-down
    slide     i, j, c    circle i goes c / 31 of the way to circle j

  Circles may overlap after an edit; `optimise.settle` pushes them apart, starting with stiffness
  10 * 2^stiffness, with up to 25 * (effort + 1) steps at each of its stiffnesses.

  Attributes:
    num_circles: n, in [1, 200].
    num_edits: edits per sentence.
  """

  num_circles: int
  num_edits: int = 3

  def __post_init__(self):
    for field, got, most in (
      ("num_circles", self.num_circles, rules.MAX_CIRCLES),
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
    """By position in the sentence, the range of allowed ids (start, end)."""
    verb = (VERB_IDS, VERB_IDS + len(VERBS))
    argument = (X_IDS, X_IDS + NUM_LEVELS)
    knob = (X_IDS, X_IDS + NUM_KNOBS)
    return (verb, argument, argument, argument) * self.num_edits + (knob, knob)

  @property
  def stop_token(self) -> int | None:
    """None: all sentences have full length; "keep" is the no-op."""
    return None

  def prompt(self, artefact: Artefact) -> tuple[int, ...]:
    """Returns a level of the value, then x, y and r of each circle as levels: 3n + 1 ids."""
    circles = self._listed(artefact)
    n = self.num_circles
    # Σr <= sqrt(n/π), because the areas sum to at most 1; good packings reach 0.9 of it or more.
    quality = math.fsum(circles[2]) / math.sqrt(n / math.pi)
    ids = [VALUE_IDS + min(max(int((quality - 0.86) / 0.004), 0), NUM_VALUES - 1)]
    for x, y, r in circles.T:
      for base, level in ((X_IDS, x), (Y_IDS, y), (RADIUS_IDS, r * math.sqrt(n))):
        ids.append(base + min(max(int(level * NUM_LEVELS), 0), NUM_LEVELS - 1))
    return tuple(ids)

  def apply(self, artefact: Artefact, tokens: Sequence[int], seed: int) -> Artefact:
    """Returns the packing after a sentence; does not modify the given one.

    Args:
      artefact: a valid packing.
      tokens: a sentence.
      seed: seed of jitter and shake.

    Raises:
      ValueError: if the sentence has the wrong length, or an id that is not allowed there.
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
    optimise.settle(circles, optimise.SOFT * 2**stiffness, 25 * (effort + 1))
    return optimise.finish(circles)

  def _listed(self, artefact: Artefact) -> np.ndarray:
    """Returns a valid artefact's circles f64[3, n] in the order of the prompt."""
    num_rows = max(round(math.sqrt(self.num_circles)), 1)
    rows = sorted(artefact, key=lambda row: (math.floor(num_rows * row[1]), *row))
    return np.array(rows, np.float64).T.copy()


def _edit(circles: np.ndarray, verb: str, a: int, b: int, c: int, rng: np.random.Generator) -> None:
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
      geometry.into_hole(circles, smallest, b % NUM_HOLES, (c + 1) / 16)
    case "relocate":
      geometry.into_hole(circles, i, b % NUM_HOLES, (c + 1) / 16)
    case "resize":
      circles[2, i] *= (b + 1) / 16
    case "jitter":
      near = geometry.nearest(circles, i, b + 1)
      circles[:2, near] += length * (2 * rng.random((2, near.size)) - 1)
    case "shake":
      length = ((a + 1) / NUM_LEVELS) ** 2 / 4
      circles[:2] += length * (2 * rng.random((2, n)) - 1)
    case "turn":
      # (1 - t², 2t) / (1 + t²) is on the unit circle; sine is not portable to the last bit.
      t = (2 * c + 1 - NUM_LEVELS) / (NUM_LEVELS - 1)
      cos, sin = (1 - t * t) / (1 + t * t), 2 * t / (1 + t * t)
      near = geometry.nearest(circles, i, b + 1)
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
