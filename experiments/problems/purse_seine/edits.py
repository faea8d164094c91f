"""The language: sentences of rectangles and a polish, and the policy's view of a fence.

A sentence is `NUM_EDITS` times (verb, x, y, width, height), then a polish, if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
import math

import numpy as np

from experiments.problems.purse_seine import anneal, counting, rectangles, rules
from experiments.problems.purse_seine.counting import Counter
from experiments.problems.purse_seine.rectangles import KEEP
from experiments.problems.purse_seine.rules import MAX_PERIMETER, MAX_VERTICES, SIDE
from seerjax import compiled
from seerjax.discovery import environment
from seerjax.tasks.draws import Draws

NUM_EDITS = 4
_PLACES = 32  # Along each axis; a rectangle's centre is drawn at random within its place.

_VIEW = 9  # Cells of the prompt along each axis.
_LEVELS = (-20, -4, 4, 20)  # Thresholds of a cell's five levels of wanted minus unwanted points.

_FIRST_X = 4
_FIRST_Y = _FIRST_X + _PLACES
_FIRST_WIDTH = _FIRST_Y + _PLACES
_FIRST_HEIGHT = _FIRST_WIDTH + len(rectangles.SIZES)
_FIRST_POLISH = _FIRST_HEIGHT + len(rectangles.SIZES)
_FIRST_CELL = _FIRST_POLISH + len(anneal.POLISHES)
_VOCAB_SIZE = 128
_FIELDS = (
  (0, 4),
  (_FIRST_X, _FIRST_Y),
  (_FIRST_Y, _FIRST_WIDTH),
  (_FIRST_WIDTH, _FIRST_HEIGHT),
  (_FIRST_HEIGHT, _FIRST_POLISH),
)


class FenceEdits:
  """Four rectangles and, optionally, a polish.

    add x y width height       adds the rectangle, joined by a strip if it is separate
    remove x y width height    removes the rectangle; the largest part stays
    push x y depth span        moves part of the edge nearest to (x, y), of length `span`, out or in
    keep . . . .               no-op
    polish                     bounded annealing of edges; shortens a fence that is too long

  Holes are filled. The result is rejected if it is too long, has too many vertices or is empty; it
  is also rejected if nothing changes, because the policy would be rewarded for the given fence.
  """

  def __init__(self, counter: Counter, *, with_polish: bool = True):
    """Takes the counter of the points, and whether sentences end with a polish."""
    self._counter = counter
    last = ((_FIRST_POLISH, _FIRST_CELL),) if with_polish else ()
    self._allowed = _FIELDS * NUM_EDITS + last
    self._with_polish = with_polish
    cells = np.linspace(0, SIDE + 1, _VIEW + 1).astype(int)
    levels = np.zeros((_VIEW, _VIEW), np.int64)
    for i, j in np.ndindex(_VIEW, _VIEW):
      levels[i, j] = np.searchsorted(
        _LEVELS, counting.box_count(counter, cells[i], cells[i + 1] - 1, cells[j], cells[j + 1] - 1)
      )
    self._levels = levels

  @property
  def vocab_size(self) -> int:
    """Number of ids: of verbs, places, sizes, polishes and the prompt's cells."""
    return _VOCAB_SIZE

  @property
  def allowed(self) -> tuple[tuple[int, int], ...]:
    """By position in the sentence, the range of allowed ids (start, end)."""
    return self._allowed

  @property
  def stop_token(self) -> int | None:
    """None: all sentences have full length; `keep` is the no-op."""
    return None

  def prompt(self, artefact: environment.Artefact) -> tuple[int, ...]:
    """Returns levels of value, length and vertices, then the points and coverage of 9 x 9 cells.

    A cell's id is 3 times its level of (wanted - unwanted), plus 0, 1 or 2 if none, some or all of
    its four quarter points are inside.
    """
    fence = rules.fence_of(artefact)
    places = (np.arange(2 * _VIEW) * 2 + 1) * SIDE // (4 * _VIEW)
    inside = _inside(fence.xs, fence.ys, places)
    quarters = inside.reshape(_VIEW, 2, _VIEW, 2).sum(axis=(1, 3))
    covers = (quarters > 0).astype(np.int64) + (quarters == 4)
    cells = _FIRST_CELL + 3 * self._levels + covers
    value = min(_PLACES - 1, max(0, counting.count(self._counter, fence)) * _PLACES // 5000)
    length = min(_PLACES - 1, rules.perimeter_of(fence) * _PLACES // MAX_PERIMETER)
    vertices = min(len(rectangles.SIZES) - 1, int(math.log2(len(fence.xs)) * 1.5))
    return (
      _FIRST_X + value,
      _FIRST_Y + length,
      _FIRST_WIDTH + vertices,
      *(int(cell) for cell in cells.ravel()),
    )

  def apply(
    self, artefact: environment.Artefact, tokens: Sequence[int], seed: int
  ) -> environment.Artefact:
    """Returns the fence after a sentence.

    Raises:
      ValueError: if the sentence or the resulting fence is invalid, with the reason.
    """
    if len(tokens) != len(self._allowed):
      raise ValueError(
        f"purse_seine sentence: got {len(tokens)} tokens, expected {len(self._allowed)}; write"
        f" {NUM_EDITS} edits of {len(_FIELDS)}{' and a polish' if self._with_polish else ''}."
      )
    for place, (token, (low, high)) in enumerate(zip(tokens, self._allowed)):
      if not low <= token < high:
        raise ValueError(
          f"purse_seine sentence: got {token} at {place}, expected {low} <= id < {high}; see"
          " `allowed`."
        )
    draws = Draws("purse_seine edits", seed)
    fence = rules.fence_of(artefact)
    for first in range(0, NUM_EDITS * len(_FIELDS), len(_FIELDS)):
      verb, x, y, width, height = (token - low for token, (low, _) in zip(tokens[first:], _FIELDS))
      centre_x, centre_y = (
        (place * 1024 + draws.below(1024)) * SIDE // (1024 * _PLACES) for place in (x, y)
      )
      if verb == KEEP:
        continue
      fence = rectangles.edited(fence, verb, centre_x, centre_y, width, height)
      num = len(fence.xs)
      if not 4 <= num <= MAX_VERTICES:
        what = "nothing" if num < 4 else f"{num} vertices"
        raise ValueError(
          f"purse_seine edit: got {what} left, expected a fence of 4 to {MAX_VERTICES} vertices;"
          " use a smaller rectangle, or another one."
        )
    if self._with_polish:
      level = tokens[-1] - _FIRST_POLISH
      best = anneal.polished(self._counter, fence, level, seed)
      if best is None:
        raise ValueError(
          f"purse_seine edit: got a fence {rules.perimeter_of(fence)} long that"
          f" {anneal.POLISHES[level][0]} steps could not shorten, expected at most {MAX_PERIMETER};"
          " add less."
        )
      fence = best
    elif rules.perimeter_of(fence) > MAX_PERIMETER:
      raise ValueError(
        f"purse_seine edit: got a fence {rules.perimeter_of(fence)} long, expected at most"
        f" {MAX_PERIMETER}; add less."
      )
    changed = rules.artefact_of(fence)
    if changed == rules.artefact_of(rules.fence_of(artefact)):
      raise ValueError(
        "purse_seine edit: got the fence back as it was, expected a change; edit where the fence"
        f" is{', or polish for longer' if self._with_polish else ''}."
      )
    return changed


@compiled.function
def _inside(xs: np.ndarray, ys: np.ndarray, places: np.ndarray) -> np.ndarray:
  """Returns bool[n, n]: whether (places[i], places[j]) is inside; border points may be either."""
  num, size = len(xs), len(places)
  found = np.zeros((size, size), np.bool_)
  for k in range(num):
    after = (k + 1) % num
    if xs[k] != xs[after]:
      continue
    low, high = min(ys[k], ys[after]), max(ys[k], ys[after])
    for j in range(size):
      if low <= places[j] < high:
        for i in range(size):
          if places[i] > xs[k]:
            found[i, j] = not found[i, j]
  return found
