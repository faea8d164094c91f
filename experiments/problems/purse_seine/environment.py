"""The discovery environment: starts, verification, prompts, pictures and classical baselines."""

from __future__ import annotations

from collections.abc import Iterator
import itertools
import math
import pathlib
from typing import Any

import numpy as np

from experiments.problems.purse_seine import anneal, counting, rectangles, rules
from experiments.problems.purse_seine.edits import FenceEdits
from experiments.problems.purse_seine.rules import MAX_PERIMETER, MAX_VERTICES, SIDE, Points
from seerjax.discovery import environment
from seerjax.tasks.draws import Draws

# `rules.generate` as prompts show it, in a file of its own: prompts, and so the runs, do not change
# when a comment of ours does.
GENERATOR = pathlib.Path(__file__).with_name("generator.txt")

_START_CELL = 5000  # Side of the start square.

# Of the classical search: initial mean tolerance for worse fences, in points; kicks of the first
# round; kicks per yielded fence.
_TOLERANCE = 20.0
_ROUND_KICKS = 500
_SLICE_KICKS = 100


class PurseSeine:
  """One instance.

  Attributes:
    name: "purse_seine_" and the instance's number, or "purse_seine" for your own points.
    is_maximised: True.
    published: means over the contest's 150 inputs, for generated instances; else none.
    points: the instance.
    language: edits by rectangles, by default with a polish by annealing of edges.
  """

  name: str
  is_maximised: bool
  published: tuple[environment.Published, ...]
  language: environment.EditLanguage | None

  def __init__(self, instance: int = 0, *, points: Points | None = None, with_polish: bool = True):
    """Takes an instance by number, or your own points.

    Args:
      instance: number of the instance, from 0 on.
      points: your own points, instead of a generated instance.
      with_polish: whether every sentence ends with a polish; see `FenceEdits`.

    Raises:
      ValueError: if the number is negative, or the points are not distinct integers in 0..SIDE.
    """
    if instance < 0:
      raise ValueError(
        f"PurseSeine: got instance={instance}, expected a number from 0 on; 0 is the first."
      )
    self.name = f"purse_seine_{instance}" if points is None else "purse_seine"
    self.is_maximised = True
    self.published = rules.PUBLISHED if points is None else ()
    self.points = rules.points_of(instance) if points is None else rules.checked(points)
    self._instance = instance if points is None else None
    self._counter = counting.counter_of(self.points)
    self.language = FenceEdits(self._counter, with_polish=with_polish)

  def start(self, seed: int) -> environment.Artefact:
    """Returns a square around one of the ten densest cells."""
    corners = range(0, SIDE, _START_CELL)
    counts = [
      (-int(counting.box_count(self._counter, x, x + _START_CELL, y, y + _START_CELL)), x, y)
      for x in corners
      for y in corners
    ]
    _, x, y = sorted(counts)[Draws("purse_seine start", seed).below(10)]
    high_x, high_y = x + _START_CELL, y + _START_CELL
    return [[x, y], [high_x, y], [high_x, high_y], [x, high_y]]

  def verify(self, artefact: Any) -> environment.Score:
    """Verifies any object, exactly; never raises."""
    reason = rules.illegality(artefact)
    if reason:
      return environment.invalid(reason)
    value = max(0, counting.count(self._counter, rules.fence_of(artefact)) + 1)
    reward = (value + 1) / rules.REWARD_UNIT
    return environment.Score(is_valid=True, value=float(value), reward=reward)

  def classical(self, seed: int) -> Iterator[environment.Artefact]:
    """Yields the best fence of an iterated local search after every hundred kicks.

    A kick adds, removes or pushes one or two random rectangles, followed by hill climbing of edges
    or sometimes a short annealing. Slightly worse fences are accepted, with a tolerance that falls
    during a round. Rounds start from a new start or from the best fence, in turn, and get longer,
    so that no length has to be chosen. (Long annealing of edges alone fixes early which clusters
    are inside, and ends lower.)
    """
    draws = Draws("purse_seine classical", seed)
    best = rules.fence_of(self.start(seed))
    best_value = counting.count(self._counter, best)
    kicks = 0
    for number in itertools.count():
      again = number % 2 == 1
      current = best if again else rules.fence_of(self.start(draws.below(2**62)))
      current_value = counting.count(self._counter, current)
      tolerance = _TOLERANCE / 4 if again else _TOLERANCE
      num_kicks = _ROUND_KICKS * 2 ** (number // 2)
      for place in range(num_kicks):
        kicked = current
        for _ in range(1 + draws.below(2)):
          verb, x, y = draws.below(3), draws.below(SIDE + 1), draws.below(SIDE + 1)
          sizes = (draws.below(len(rectangles.SIZES)) for _ in range(2))
          changed = rectangles.edited(kicked, verb, x, y, *sizes)
          kicked = changed if 4 <= len(changed.xs) <= MAX_VERTICES else kicked
        level = _WARM if draws.below(8) == 0 else _CLIMB
        found = anneal.polished(self._counter, kicked, level, draws.below(2**62))
        left = -math.log(1 - draws.below(2**32) / 2**32) * (1 - place / num_kicks)
        if found is not None:
          value = counting.count(self._counter, found)
          if value >= current_value - tolerance * left:
            current, current_value = found, value
          if value > best_value:
            best, best_value = found, value
        kicks += 1
        if kicks % _SLICE_KICKS == 0:
          yield rules.artefact_of(best)

  def polished_starts(self, seed: int) -> Iterator[environment.Artefact]:
    """Yields starts, each polished with the longest polish of the language."""
    for number in itertools.count():
      drawn = anneal.seeded("polished start", seed, number)
      fence = rules.fence_of(self.start(drawn))
      best = anneal.polished(self._counter, fence, len(anneal.POLISHES) - 1, drawn)
      assert best is not None, "a run that starts legal stays so"
      yield rules.artefact_of(best)

  def describe(self, artefact: environment.Artefact, score: environment.Score) -> str:
    """Returns the problem, its rules, the generator of the points, and this fence, as text."""
    if self._instance is None:
      data = f"wanted = {self.points.wanted.tolist()}\nunwanted = {self.points.unwanted.tolist()}"
    else:
      call = f"wanted, unwanted = generate({self._instance})"
      data = f"import hashlib\nimport math\n\n{GENERATOR.read_text()}\n{call}"
    return f"""\
The plane holds {len(self.points.wanted)} wanted and {len(self.points.unwanted)} unwanted points \
with integer coordinates. Fence in as many wanted points as you can, and as few unwanted ones.

An answer is a list of [x, y], the vertices of one polygon in order:
- 4 to {MAX_VERTICES} vertices, all different, integer coordinates in 0..{SIDE};
- every edge is parallel to the x axis or to the y axis;
- all edges together are at most {MAX_PERIMETER} long;
- edges have no point in common but the vertex between two neighbours.
Points on the fence count as inside. The value is
max(0, wanted inside - unwanted inside + 1); higher is better.

The points are made by this program:

```python
{data}
```

The present answer has {len(artefact)} vertices and the value {score.value:.0f}:
{[list(vertex) for vertex in artefact]}

Write a Python function improve(artefact, seconds, seed) that takes such a list and returns a better
one, within so many seconds.
"""

  def picture(self, artefact: environment.Artefact) -> Any:
    """Returns a matplotlib Figure of the points and the fence."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(7, 7), layout="constrained")
    axes = figure.add_subplot()
    outline = np.array([*artefact, artefact[0]])
    axes.fill(outline[:, 0], outline[:, 1], color="#f3e3b3", zorder=0)
    for points, colour, label in (
      (self.points.unwanted, "#c04040", "unwanted"),
      (self.points.wanted, "#2060a0", "wanted"),
    ):
      axes.scatter(points[:, 0], points[:, 1], s=2, color=colour, label=label, linewidths=0)
    axes.plot(outline[:, 0], outline[:, 1], color="black", linewidth=1.2)
    fence = rules.fence_of(artefact)
    value = max(0, counting.count(self._counter, fence) + 1)
    axes.set_title(
      f"{self.name}: value {value}, {len(artefact)} vertices, length {rules.perimeter_of(fence)}"
    )
    axes.set_xlim(0, SIDE)
    axes.set_ylim(0, SIDE)
    axes.set_xlabel("x")
    axes.set_ylabel("y")
    axes.set_aspect("equal")
    axes.legend(loc="upper right", markerscale=4)
    return figure


_CLIMB, _WARM = 1, 5  # Levels of polish in the classical search.
