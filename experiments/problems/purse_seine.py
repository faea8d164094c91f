"""Purse seine: one fence around the wanted points of a plane that leaves the unwanted ones out.

  value = max(0, a - b + 1)    a, b: wanted and unwanted points inside the fence or on it

The fence is a simple polygon of at most 1000 integer vertices whose edges are parallel to the axes
and at most 400,000 long in all. Closed as it is, it holds the lattice points of a set of unit
pixels: therefore everything here counts with half-open edges, where the sum over the corners

  a - b = sum over corners of (+1 or -1, alternating) * F(x, y),   F: points below x and below y

is exact in integers. The generator draws 10 to 25 Gaussian clusters of each kind, as the contest's
does, from numbers of our own; so an instance is none of the contest's, only alike.

Source: AtCoder Heuristic Contest 039 (2024), https://atcoder.jp/contests/ahc039/tasks/ahc039_a;
Yuksekgonul et al. 2026 (TTT-Discover), https://arxiv.org/abs/2601.16175, section 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import functools
import hashlib
import inspect
import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from seerjax import compiled
from seerjax.discovery import environment
from seerjax.tasks.draws import Draws

SIDE = 100_000  # Coordinates are 0..SIDE.
MAX_VERTICES = 1000
MAX_PERIMETER = 400_000
REWARD_UNIT = 1500.0  # The reference divides the mean value by it.

_SHIFT = 7  # Counting strips are 128 wide: a dozen points each, and a table that fits a cache.
_NUM_STRIPS = (SIDE >> _SHIFT) + 1
_ROOM = MAX_VERTICES + 8

_START_CELL = 5000  # Side of the square that a search starts from.
_CORRIDOR = 60  # Width of the strip that joins an added rectangle to the fence.

# Numbers of the annealer. A longer fence costs `_PRICE` points for each unit and `_VERTEX_PRICE`
# for each vertex, so that neither is spent on what gains nothing; `_PRESSURE` drives a fence that
# is too long back below the limit.
_PRICE, _VERTEX_PRICE, _PRESSURE = 0.001, 0.2, 0.02
# What a polish ends with: temperature in points, longest and shortest moves.
_COLD, _NEAR, _FINE = 0.4, 1500.0, 10.0
# Of the classical search: how much worse a fence may become at first, in points on average; kicks
# of its first round; kicks an item.
_TOLERANCE = 20.0
_ROUND_KICKS = 500
_SLICE_KICKS = 100


PUBLISHED = tuple(
  environment.Published(
    value=total / 150,
    who=who,
    year=year,
    source="arXiv 2601.16175; mean over the contest's 150 inputs, which are not ours",
    is_comparable=False,
  )
  for total, who, year in (
    (567_062, "TTT-Discover (gpt-oss-120b, C++)", 2026),
    (566_997, "the contest's best human", 2024),
    (558_026, "ShinkaEvolve", 2025),
    (554_171, "best of 25,600 (gpt-oss-120b, C++)", 2026),
    (550_647, "ALE-Agent", 2025),
  )
)


class Points(NamedTuple):
  """An instance.

  Attributes:
    wanted: i64[n, 2], integer coordinates.
    unwanted: i64[k, 2], the same; no point is given twice.
  """

  wanted: np.ndarray
  unwanted: np.ndarray


class Counter(NamedTuple):
  """Points, sorted so that `F(x, y)` reads one entry of a table and two strips.

  Attributes:
    table: i16[s + 1, s + 1], sum of weights in the strips below (column, row).
    column_start: i64[s + 1], where a column's points begin.
    column_points: i64[n, 3], x, y and weight (+1 wanted, -1 unwanted) by column.
    row_start: i64[s + 1], where a row's points begin.
    row_points: i64[n, 3], the same points by row.
  """

  table: np.ndarray
  column_start: np.ndarray
  column_points: np.ndarray
  row_start: np.ndarray
  row_points: np.ndarray


class Fence(NamedTuple):
  """A polygon in the form that everything here works on: counter-clockwise, a turn at each vertex.

  Attributes:
    xs: i64[m].
    ys: i64[m].
  """

  xs: np.ndarray
  ys: np.ndarray


def generate(instance: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
  """Returns the wanted and the unwanted points, 5000 each, all different.

  Of each kind there are 10 to 25 clusters: weight in [0, 1), centre in 20000..80000, standard
  deviation in 1000..5000. A point takes a cluster by weight and is drawn again if it falls outside
  of 0..100000 or on another point. Needs hashlib and math alone, so that a program may run it.
  """
  count = 0

  def uniform() -> float:
    nonlocal count
    digest = hashlib.sha256(f"purse_seine/{instance}/{count}".encode()).digest()
    count += 1
    return (int.from_bytes(digest[:8], "big") >> 11) * 2.0**-53

  def between(low: int, high: int) -> int:
    return low + int(uniform() * (high - low + 1))

  taken, kinds = set(), []
  for _ in range(2):
    clusters = [
      (uniform(), between(20_000, 80_000), between(20_000, 80_000), between(1000, 5000))
      for _ in range(between(10, 25))
    ]
    total = sum(cluster[0] for cluster in clusters)
    points = []
    while len(points) < 5000:
      left = uniform() * total
      for cluster in clusters:
        left -= cluster[0]
        if left < 0:
          break
      _, x, y, deviation = cluster
      radius = deviation * math.sqrt(-2 * math.log(1 - uniform()))
      angle = 2 * math.pi * uniform()
      point = (round(x + radius * math.cos(angle)), round(y + radius * math.sin(angle)))
      if min(point) >= 0 and max(point) <= 100_000 and point not in taken:
        taken.add(point)
        points.append(point)
    kinds.append(points)
  return kinds[0], kinds[1]


@functools.lru_cache(maxsize=256)  # The 150 cases of a contest, 160 kB each.
def points_of(instance: int) -> Points:
  """Returns the points of a generated instance."""
  wanted, unwanted = generate(instance)
  return Points(np.array(wanted, np.int64), np.array(unwanted, np.int64))


def counter_of(points: Points) -> Counter:
  """Sorts points for counting."""
  both = np.concatenate((points.wanted, points.unwanted)).astype(np.int64).reshape(-1, 2)
  weights = np.repeat([1, -1], [len(points.wanted), len(points.unwanted)])
  rows = np.column_stack((both, weights)).astype(np.int64)
  table = np.zeros((_NUM_STRIPS + 1, _NUM_STRIPS + 1), np.int64)
  np.add.at(table, (1 + (both[:, 0] >> _SHIFT), 1 + (both[:, 1] >> _SHIFT)), weights)
  table = table.cumsum(axis=0).cumsum(axis=1)
  strips = np.arange(_NUM_STRIPS + 1)
  by_column = rows[np.argsort(both[:, 0], kind="stable")]
  by_row = rows[np.argsort(both[:, 1], kind="stable")]
  return Counter(
    table=table.astype(np.int16 if len(rows) < 2**15 else np.int64),
    column_start=np.searchsorted(by_column[:, 0] >> _SHIFT, strips).astype(np.int64),
    column_points=by_column,
    row_start=np.searchsorted(by_row[:, 1] >> _SHIFT, strips).astype(np.int64),
    row_points=by_row,
  )


def fence_of(artefact: environment.Artefact) -> Fence:
  """Returns a legal artefact counter-clockwise and without vertices on a straight line."""
  points = np.array(artefact, np.int64)
  before, after = np.roll(points, 1, axis=0), np.roll(points, -1, axis=0)
  points = points[~((before == points) & (points == after)).any(axis=1)]
  xs, ys = points[:, 0], points[:, 1]
  if np.sum(xs * np.roll(ys, -1) - np.roll(xs, -1) * ys) < 0:
    xs, ys = xs[::-1], ys[::-1]
  return Fence(np.ascontiguousarray(xs), np.ascontiguousarray(ys))


def artefact_of(fence: Fence) -> environment.Artefact:
  """Returns the fence as plain data, from its lower left vertex on: equal fences, equal data."""
  first = np.lexsort(fence[::-1])[0]
  xs, ys = (np.roll(along, -first).tolist() for along in fence)
  return [[x, y] for x, y in zip(xs, ys)]


def perimeter_of(fence: Fence) -> int:
  """Returns the length of the fence."""
  xs, ys = fence
  return int(np.abs(xs - np.roll(xs, 1)).sum() + np.abs(ys - np.roll(ys, 1)).sum())


def count(counter: Counter, fence: Fence) -> int:
  """Returns wanted minus unwanted points inside the fence or on it, exactly."""
  return int(_fence_count(counter, fence.xs, fence.ys))


def illegality(artefact: Any) -> str:
  """Returns why something is no fence, or "" if it is one."""
  if not isinstance(artefact, list | tuple):
    return f"fence: got {type(artefact).__name__}, expected a list of [x, y]"
  num = len(artefact)
  if not 4 <= num <= MAX_VERTICES:
    return f"fence: got {num} vertices, expected 4 to {MAX_VERTICES}"
  for place, vertex in enumerate(artefact):
    if not isinstance(vertex, list | tuple) or len(vertex) != 2:
      return f"vertex {place}: got {environment.shown(vertex)}, expected [x, y]"
    for number in vertex:
      # A bool is an int to Python, and a float is not exact.
      if isinstance(number, bool) or not isinstance(number, int):
        kind = type(number).__name__
        return f"vertex {place}: got {kind} {environment.shown(number)}, expected integers"
      if not 0 <= number <= SIDE:
        got = environment.shown(number)
        return f"vertex {place}: got {got}, expected a coordinate in 0..{SIDE}"
  seen: dict[tuple[int, int], int] = {}
  for place, (x, y) in enumerate(artefact):
    first = seen.setdefault((x, y), place)
    if first != place:
      return f"vertices {first} and {place}: got [{x}, {y}] twice, expected different vertices"
  points = np.array(artefact, np.int64)
  steps = np.roll(points, -1, axis=0) - points
  slanted = np.flatnonzero((steps != 0).all(axis=1))
  if slanted.size:
    place = int(slanted[0])
    return (
      f"edge {place}: got {list(artefact[place])} to {list(artefact[(place + 1) % num])}, expected"
      " an edge parallel to an axis"
    )
  perimeter = int(np.abs(steps).sum())
  if perimeter > MAX_PERIMETER:
    return f"perimeter: got {perimeter}, expected at most {MAX_PERIMETER}"
  first, second = _first_touch(points[:, 0].copy(), points[:, 1].copy())
  if first >= 0:
    return (
      f"edges {first} and {second}: got a common point, expected none but the vertex between"
      " neighbours (a simple polygon)"
    )
  return ""


class PurseSeine:
  """One instance.

  Attributes:
    name: "purse_seine_" and the instance's number, or "purse_seine" for points of one's own.
    is_maximised: True.
    published: means over the contest's 150 inputs, for instances that are drawn alike; else none.
    points: the instance.
    language: edits by rectangles, by default with the annealer of edges as their tool.
  """

  name: str
  is_maximised: bool
  published: tuple[environment.Published, ...]
  language: environment.EditLanguage | None

  def __init__(
    self, instance: int = 0, *, points: Points | None = None, with_polish: bool = True
  ):
    """Takes an instance by its number, or points of one's own.

    Args:
      instance: which one, from 0 on.
      points: one's own, in place of an instance's.
      with_polish: every sentence ends with a polish; see `FenceEdits`.

    Raises:
      ValueError: if the number is negative, or the points are no different integers in 0..SIDE.
    """
    if instance < 0:
      raise ValueError(
        f"PurseSeine: got instance={instance}, expected a number from 0 on; 0 is the first."
      )
    self.name = f"purse_seine_{instance}" if points is None else "purse_seine"
    self.is_maximised = True
    self.published = PUBLISHED if points is None else ()
    self.points = points_of(instance) if points is None else _checked(points)
    self._instance = instance if points is None else None
    self._counter = counter_of(self.points)
    self.language = FenceEdits(self._counter, with_polish=with_polish)

  def start(self, seed: int) -> environment.Artefact:
    """Returns a square around one of the ten densest cells."""
    corners = range(0, SIDE, _START_CELL)
    counts = [
      (-int(_box_count(self._counter, x, x + _START_CELL, y, y + _START_CELL)), x, y)
      for x in corners
      for y in corners
    ]
    _, x, y = sorted(counts)[Draws("purse_seine start", seed).below(10)]
    high_x, high_y = x + _START_CELL, y + _START_CELL
    return [[x, y], [high_x, y], [high_x, high_y], [x, high_y]]

  def verify(self, artefact: Any) -> environment.Score:
    """Judges anything whatever, exactly; never raises."""
    reason = illegality(artefact)
    if reason:
      return environment.invalid(reason)
    value = max(0, count(self._counter, fence_of(artefact)) + 1)
    return environment.Score(is_valid=True, value=float(value), reward=(value + 1) / REWARD_UNIT)

  def classical(self, seed: int) -> Iterator[environment.Artefact]:
    """Yields the best fence of an iterated local search after every hundred kicks.

    A kick is one random rectangle, or two, added, removed or pushed; then the edges climb, or now
    and then are annealed for a while. What is somewhat worse is kept as well, ever less so in the
    course of a round. Rounds begin with a start of their own and with the best fence by turns, and
    get longer, so that no length has to be known beforehand. (Long annealing of edges alone settles
    early on which clusters are in, and ends lower.)
    """
    draws = Draws("purse_seine classical", seed)
    best = fence_of(self.start(seed))
    best_value = count(self._counter, best)
    kicks = 0
    for number in itertools.count():
      again = number % 2 == 1
      current = best if again else fence_of(self.start(draws.below(2**62)))
      current_value = count(self._counter, current)
      tolerance = _TOLERANCE / 4 if again else _TOLERANCE
      num_kicks = _ROUND_KICKS * 2 ** (number // 2)
      for place in range(num_kicks):
        kicked = current
        for _ in range(1 + draws.below(2)):
          verb, x, y = draws.below(3), draws.below(SIDE + 1), draws.below(SIDE + 1)
          changed = _edited(kicked, verb, x, y, *(draws.below(len(_SIZES)) for _ in range(2)))
          kicked = changed if 4 <= len(changed.xs) <= MAX_VERTICES else kicked
        level = _WARM if draws.below(8) == 0 else _CLIMB
        found = _polished(self._counter, kicked, level, draws.below(2**62))
        left = -math.log(1 - draws.below(2**32) / 2**32) * (1 - place / num_kicks)
        if found is not None:
          value = count(self._counter, found)
          if value >= current_value - tolerance * left:
            current, current_value = found, value
          if value > best_value:
            best, best_value = found, value
        kicks += 1
        if kicks % _SLICE_KICKS == 0:
          yield artefact_of(best)

  def polished_starts(self, seed: int) -> Iterator[environment.Artefact]:
    """Yields starts, each polished by the longest tool that edits have."""
    for number in itertools.count():
      drawn = _seed("polished start", seed, number)
      best = _polished(self._counter, fence_of(self.start(drawn)), len(_POLISHES) - 1, drawn)
      assert best is not None, "a run that starts legal stays so"
      yield artefact_of(best)

  def describe(self, artefact: environment.Artefact, score: environment.Score) -> str:
    """Returns the problem, its rules, where the points come from, and this fence, as text."""
    if self._instance is None:
      data = f"wanted = {self.points.wanted.tolist()}\nunwanted = {self.points.unwanted.tolist()}"
    else:
      source = inspect.getsource(inspect.unwrap(generate))
      call = f"wanted, unwanted = generate({self._instance})"
      data = f"import hashlib\nimport math\n\n{source}\n{call}"
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
    fence = fence_of(artefact)
    axes.set_title(
      f"{self.name}: value {max(0, count(self._counter, fence) + 1)}, {len(artefact)} vertices,"
      f" length {perimeter_of(fence)}"
    )
    axes.set_xlim(0, SIDE)
    axes.set_ylim(0, SIDE)
    axes.set_xlabel("x")
    axes.set_ylabel("y")
    axes.set_aspect("equal")
    axes.legend(loc="upper right", markerscale=4)
    return figure


# The language. A sentence is `NUM_EDITS` times (verb, x, y, width, height), then a polish, if any.

ADD, REMOVE, PUSH, KEEP = range(4)
NUM_EDITS = 4
_PLACES = 32  # Along each axis; where in its place a rectangle's centre lies is drawn.
_SIZES = tuple(round(300 * 1.36**level) for level in range(16))  # 300 to 30,200.
_PUSHES = tuple(round(60 * 2.4**level) for level in range(8))  # 60 to 27,500, inwards or outwards.
# Steps of the annealer, the temperature in points that it begins with (0 only climbs), and its
# shortest move at first.
_POLISHES = (
  (1000, 0.0, 100.0), (4000, 0.0, 100.0), (12_000, 0.0, 100.0), (30_000, 0.0, 100.0),
  (4000, 1.0, 200.0), (12_000, 1.0, 200.0), (30_000, 1.0, 200.0), (30_000, 4.0, 1000.0),
)  # fmt: skip
_CLIMB, _WARM = 1, 5  # Levels of polish that the classical search takes.
_VIEW = 9  # Cells of the prompt along each axis.
_LEVELS = (-20, -4, 4, 20)  # Wanted minus unwanted points of a cell: what parts its five levels.

_FIRST_X = 4
_FIRST_Y = _FIRST_X + _PLACES
_FIRST_WIDTH = _FIRST_Y + _PLACES
_FIRST_HEIGHT = _FIRST_WIDTH + len(_SIZES)
_FIRST_POLISH = _FIRST_HEIGHT + len(_SIZES)
_FIRST_CELL = _FIRST_POLISH + len(_POLISHES)
_VOCAB_SIZE = 128
_FIELDS = (
  (0, 4),
  (_FIRST_X, _FIRST_Y),
  (_FIRST_Y, _FIRST_WIDTH),
  (_FIRST_WIDTH, _FIRST_HEIGHT),
  (_FIRST_HEIGHT, _FIRST_POLISH),
)


class FenceEdits:
  """Four rectangles and, unless it is left out, a polish.

    add x y width height       the fence takes the rectangle in; a strip joins it if it lies apart
    remove x y width height    the fence leaves the rectangle out; the larger part stays
    push x y depth span        the edge nearest to (x, y) moves out or in along `span` of its length
    keep . . . .               nothing
    polish                     bounded annealing of edges; shortens a fence that is too long

  Holes are filled. What is too long at the end, has too many vertices or has nothing left is
  refused; and so is what changes nothing, or the policy could be paid for what it was given.
  """

  def __init__(self, counter: Counter, *, with_polish: bool = True):
    """Takes the points that its tool counts, and whether there is that tool."""
    self._counter = counter
    last = ((_FIRST_POLISH, _FIRST_CELL),) if with_polish else ()
    self._allowed = _FIELDS * NUM_EDITS + last
    self._with_polish = with_polish
    cells = np.linspace(0, SIDE + 1, _VIEW + 1).astype(int)
    levels = np.zeros((_VIEW, _VIEW), np.int64)
    for i, j in np.ndindex(_VIEW, _VIEW):
      levels[i, j] = np.searchsorted(
        _LEVELS, _box_count(counter, cells[i], cells[i + 1] - 1, cells[j], cells[j + 1] - 1)
      )
    self._levels = levels

  @property
  def vocab_size(self) -> int:
    """Ids of verbs, places, sizes, polishes and of the prompt's cells."""
    return _VOCAB_SIZE

  @property
  def allowed(self) -> tuple[tuple[int, int], ...]:
    """By place in the sentence, first id and the one behind the last."""
    return self._allowed

  @property
  def stop_token(self) -> int | None:
    """None: all sentences have full length; `keep` does nothing."""
    return None

  def prompt(self, artefact: environment.Artefact) -> tuple[int, ...]:
    """Returns value, length and vertices by levels, then 9 x 9 cells: their points, what is inside.

    A cell's id is 3 times its level of (wanted - unwanted), plus how many of its four quarter
    points are inside (0, some, all).
    """
    fence = fence_of(artefact)
    places = (np.arange(2 * _VIEW) * 2 + 1) * SIDE // (4 * _VIEW)
    inside = _inside(fence.xs, fence.ys, places)
    quarters = inside.reshape(_VIEW, 2, _VIEW, 2).sum(axis=(1, 3))
    covers = (quarters > 0).astype(np.int64) + (quarters == 4)
    cells = _FIRST_CELL + 3 * self._levels + covers
    value = min(_PLACES - 1, max(0, count(self._counter, fence)) * _PLACES // 5000)
    length = min(_PLACES - 1, perimeter_of(fence) * _PLACES // MAX_PERIMETER)
    vertices = min(len(_SIZES) - 1, int(math.log2(len(fence.xs)) * 1.5))
    return (
      _FIRST_X + value,
      _FIRST_Y + length,
      _FIRST_WIDTH + vertices,
      *(int(cell) for cell in cells.ravel()),
    )

  def apply(
    self, artefact: environment.Artefact, tokens: Sequence[int], seed: int
  ) -> environment.Artefact:
    """Returns the fence that a sentence makes of one.

    Raises:
      ValueError: if the sentence is none, or its fence is no legal one, with the reason.
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
    fence = fence_of(artefact)
    for first in range(0, NUM_EDITS * len(_FIELDS), len(_FIELDS)):
      verb, x, y, width, height = (
        token - low for token, (low, _) in zip(tokens[first:], _FIELDS)
      )
      centre_x, centre_y = (
        (place * 1024 + draws.below(1024)) * SIDE // (1024 * _PLACES) for place in (x, y)
      )
      if verb == KEEP:
        continue
      fence = _edited(fence, verb, centre_x, centre_y, width, height)
      num = len(fence.xs)
      if not 4 <= num <= MAX_VERTICES:
        what = "nothing" if num < 4 else f"{num} vertices"
        raise ValueError(
          f"purse_seine edit: got {what} left, expected a fence of 4 to {MAX_VERTICES} vertices;"
          " use a smaller rectangle, or another one."
        )
    if self._with_polish:
      level = tokens[-1] - _FIRST_POLISH
      best = _polished(self._counter, fence, level, seed)
      if best is None:
        raise ValueError(
          f"purse_seine edit: got a fence {perimeter_of(fence)} long that {_POLISHES[level][0]}"
          f" steps could not shorten, expected at most {MAX_PERIMETER}; add less."
        )
      fence = best
    elif perimeter_of(fence) > MAX_PERIMETER:
      raise ValueError(
        f"purse_seine edit: got a fence {perimeter_of(fence)} long, expected at most"
        f" {MAX_PERIMETER}; add less."
      )
    changed = artefact_of(fence)
    if changed == artefact_of(fence_of(artefact)):
      raise ValueError(
        "purse_seine edit: got the fence back as it was, expected a change; edit where the fence"
        f" is{', or polish for longer' if self._with_polish else ''}."
      )
    return changed


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
  """Moves edges, and pushes parts of edges out and in, by simulated annealing.

  Args:
    counter: of the points.
    fence: to begin with; it may be too long, then it is pressed below the limit.
    num_steps: proposals, about 0.7 microseconds each.
    temperatures: the first and the last, in points, falling geometrically; 0 only climbs.
    reaches: how far an edge may go in one step, first and last, falling geometrically.
    grains: how far an edge, and how long a part of one, must be moved at least (a neighbour may
      vanish sooner), first and last, falling geometrically.
    seed: of all draws.

  Returns:
    Where it ended, and the best legal fence on the way (None if there was none).
  """
  xs, ys = np.zeros(_ROOM, np.int64), np.zeros(_ROOM, np.int64)
  num = len(fence.xs)
  xs[:num], ys[:num] = fence
  best_xs, best_ys = xs.copy(), ys.copy()
  num, num_best = _anneal(
    counter, xs, ys, num, best_xs, best_ys, num_steps, temperatures, reaches,
    grains, _PRICE, _VERTEX_PRICE, _PRESSURE,
    np.array([_seed("anneal", seed)], np.uint64),
  )  # fmt: skip
  best = Fence(best_xs[:num_best].copy(), best_ys[:num_best].copy()) if num_best else None
  return Fence(xs[:num].copy(), ys[:num].copy()), best


def _seed(*names: object) -> int:
  """Returns a number in 1..2**63 - 1 that follows from the names."""
  return 1 + Draws("purse_seine", *names).below(2**63 - 1)


def _edited(fence: Fence, verb: int, x: int, y: int, width: int, height: int) -> Fence:
  """Returns what one edit makes of a fence; it may have no vertices, or too many.

  Args:
    fence: legal but for its length.
    verb: ADD, REMOVE or PUSH.
    x, y: centre of the rectangle, or what the edge to push is near to.
    width, height: levels of size; a push reads them as depth and span.
  """
  if verb == PUSH:
    rectangles, is_added = _push(fence, x, y, width, _SIZES[height])
  else:
    is_added = verb == ADD
    half_width, half_height = _SIZES[width] // 2, _SIZES[height] // 2
    box = _clipped(x - half_width, y - half_height, x + half_width, y + half_height)
    rectangles = _joined(fence, box) if is_added else [box]
  return Fence(*_combine(fence.xs, fence.ys, np.array(rectangles, np.int64), is_added))


def _polished(counter: Counter, fence: Fence, level: int, seed: int) -> Fence | None:
  """Returns the best legal fence that a polish of the language finds, or None."""
  steps, hot, coarse = _POLISHES[level]
  _, best = anneal(
    counter,
    fence,
    num_steps=steps,
    temperatures=(hot, min(hot, _COLD)),
    reaches=(2 * _NEAR, _NEAR),
    grains=(coarse, _FINE),
    seed=_seed("polish", seed),
  )
  return best


def _checked(points: Points) -> Points:
  """Returns points of one's own as int64, or refuses them."""
  kinds = []
  for name, given in zip(Points._fields, points):
    array = np.asarray(given)
    if array.size == 0:
      array = np.zeros((0, 2), np.int64)
    if array.ndim != 2 or array.shape[1] != 2 or array.dtype.kind not in "iu":
      raise ValueError(
        f"PurseSeine: got {name} of shape {array.shape} and type {array.dtype}, expected integers"
        " of shape [n, 2]; give x and y of each point."
      )
    if array.size and not (array.min() >= 0 and array.max() <= SIDE):
      raise ValueError(
        f"PurseSeine: got {name} in {array.min()}..{array.max()}, expected coordinates in"
        f" 0..{SIDE}; scale them."
      )
    kinds.append(array.astype(np.int64))
  both = np.concatenate(kinds)
  if len(np.unique(both, axis=0)) != len(both):
    raise ValueError(
      f"PurseSeine: got {len(both) - len(np.unique(both, axis=0))} points twice, expected different"
      " points; drop them."
    )
  return Points(*kinds)


def _clipped(left: int, bottom: int, right: int, top: int) -> tuple[int, int, int, int]:
  """Returns the part of a rectangle that lies in the square."""
  return max(0, left), max(0, bottom), min(SIDE, right), min(SIDE, top)


def _nearest(low: int, high: int, other_low: int, other_high: int) -> tuple[int, int]:
  """Returns the points of two intervals that are nearest to each other (a middle one if equal)."""
  if high < other_low:
    return high, other_low
  if other_high < low:
    return low, other_high
  middle = (max(low, other_low) + min(high, other_high)) // 2
  return middle, middle


def _joined(
  fence: Fence, rectangle: tuple[int, int, int, int]
) -> list[tuple[int, int, int, int]]:
  """Returns a rectangle, and what joins it to the nearest edge, if no edge touches it."""
  left, bottom, right, top = rectangle
  edge, gap = _nearest_edge(fence.xs, fence.ys, left, bottom, right, top)
  if gap == 0 or _has_point(fence.xs, fence.ys, left, bottom):
    return [rectangle]
  after = (edge + 1) % len(fence.xs)
  edge_xs = sorted((int(fence.xs[edge]), int(fence.xs[after])))
  edge_ys = sorted((int(fence.ys[edge]), int(fence.ys[after])))
  from_x, to_x = _nearest(left, right, *edge_xs)
  from_y, to_y = _nearest(bottom, top, *edge_ys)
  half = _CORRIDOR // 2
  return [
    rectangle,
    _clipped(min(from_x, to_x) - half, from_y - half, max(from_x, to_x) + half, from_y + half),
    _clipped(to_x - half, min(from_y, to_y) - half, to_x + half, max(from_y, to_y) + half),
  ]


def _push(
  fence: Fence, x: int, y: int, depth_level: int, span: int
) -> tuple[list[tuple[int, int, int, int]], bool]:
  """Returns what the nearest edge sweeps when a part of it is pushed, and whether outwards."""
  edge, _ = _nearest_edge(fence.xs, fence.ys, x, y, x, y)
  after = (edge + 1) % len(fence.xs)
  start_x, start_y = int(fence.xs[edge]), int(fence.ys[edge])
  end_x, end_y = int(fence.xs[after]), int(fence.ys[after])
  is_out = depth_level < len(_PUSHES)
  depth = _PUSHES[depth_level % len(_PUSHES)]
  # Outside is to the right of a counter-clockwise edge.
  if start_y == end_y:
    goes_down = (end_x > start_x) == is_out
    low, high = _span(min(start_x, end_x), max(start_x, end_x), x, span)
    ends = (start_y - depth, start_y) if goes_down else (start_y, start_y + depth)
    return [_clipped(low, ends[0], high, ends[1])], is_out
  goes_right = (end_y > start_y) == is_out
  low, high = _span(min(start_y, end_y), max(start_y, end_y), y, span)
  ends = (start_x, start_x + depth) if goes_right else (start_x - depth, start_x)
  return [_clipped(ends[0], low, ends[1], high)], is_out


def _span(low: int, high: int, middle: int, span: int) -> tuple[int, int]:
  """Returns `span` of an edge around a place on it; all of it if the edge is hardly longer."""
  if high - low <= span * 3 // 2:
    return low, high
  first = min(max(low, middle - span // 2), high - span)
  return first, first + span


# Compiled functions. Fences are counter-clockwise with a turn at each vertex.


@compiled.function
def _below(counter: Counter, x: int, y: int) -> int:
  """F: the sum of weights of points whose x and y are both smaller."""
  column, row = x >> _SHIFT, y >> _SHIFT
  total = int(counter.table[column, row])
  points = counter.column_points
  for i in range(counter.column_start[column], counter.column_start[column + 1]):
    if points[i, 0] >= x:
      break
    if points[i, 1] < y:
      total += points[i, 2]
  points = counter.row_points
  edge = column << _SHIFT
  for i in range(counter.row_start[row], counter.row_start[row + 1]):
    if points[i, 1] >= y:
      break
    if points[i, 0] < edge:
      total += points[i, 2]
  return total


@compiled.function
def _box_count(counter: Counter, left: int, right: int, bottom: int, top: int) -> int:
  """Returns the sum of weights in a closed box of lattice points."""
  return (
    _below(counter, right + 1, top + 1)
    - _below(counter, left, top + 1)
    - _below(counter, right + 1, bottom)
    + _below(counter, left, bottom)
  )


@compiled.function
def _fence_count(counter: Counter, xs: np.ndarray, ys: np.ndarray) -> int:
  """Returns the sum of weights inside or on a fence: F at its corners, signs alternating."""
  num, total = len(xs), 0
  for i in range(num):
    before, after = (i - 1) % num, (i + 1) % num
    is_level = ys[i] == ys[after]
    # The edge to the right and the one above belong to the inside: their pixels end one further.
    if is_level:
      x = xs[i] + (1 if ys[i] > ys[before] else 0)
      y = ys[i] + (1 if xs[after] < xs[i] else 0)
      total += _below(counter, x, y)
    else:
      x = xs[i] + (1 if ys[after] > ys[i] else 0)
      y = ys[i] + (1 if xs[i] < xs[before] else 0)
      total -= _below(counter, x, y)
  return total


@compiled.function
def _first_touch(xs: np.ndarray, ys: np.ndarray) -> tuple[int, int]:
  """Returns the first two edges with a point in common that they must not have, or (-1, -1)."""
  num = len(xs)
  for i in range(num):
    after = (i + 1) % num
    left, right = min(xs[i], xs[after]), max(xs[i], xs[after])
    bottom, top = min(ys[i], ys[after]), max(ys[i], ys[after])
    for j in range(i + 1, num):
      end = (j + 1) % num
      if max(xs[j], xs[end]) < left or min(xs[j], xs[end]) > right:
        continue
      if max(ys[j], ys[end]) < bottom or min(ys[j], ys[end]) > top:
        continue
      if j == after or end == i:
        # Neighbours meet at one vertex; they may go straight on, but not back.
        first, second = (i, j) if j == after else (j, i)
        middle, last = (first + 1) % num, (second + 1) % num
        along = (xs[middle] - xs[first]) * (xs[last] - xs[middle])
        along += (ys[middle] - ys[first]) * (ys[last] - ys[middle])
        if along >= 0:
          continue
      return i, j
  return -1, -1


@compiled.function
def _inside(xs: np.ndarray, ys: np.ndarray, places: np.ndarray) -> np.ndarray:
  """Returns bool[n, n], whether (places[i], places[j]) is inside, the border on either side."""
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


@compiled.function
def _has_point(xs: np.ndarray, ys: np.ndarray, x: int, y: int) -> bool:
  """Returns whether a point that is on no edge is inside."""
  num, is_inside = len(xs), False
  for k in range(num):
    after = (k + 1) % num
    if xs[k] == xs[after] and x > xs[k]:
      if min(ys[k], ys[after]) <= y < max(ys[k], ys[after]):
        is_inside = not is_inside
  return is_inside


@compiled.function
def _nearest_edge(
  xs: np.ndarray, ys: np.ndarray, left: int, bottom: int, right: int, top: int
) -> tuple[int, int]:
  """Returns the edge nearest to a rectangle, and the way to it along the axes."""
  num, nearest, least = len(xs), 0, 4 * SIDE
  for k in range(num):
    after = (k + 1) % num
    gap = max(0, min(xs[k], xs[after]) - right, left - max(xs[k], xs[after]))
    gap += max(0, min(ys[k], ys[after]) - top, bottom - max(ys[k], ys[after]))
    if gap < least:
      nearest, least = k, gap
  return nearest, least


@compiled.function
def _combine(
  xs: np.ndarray, ys: np.ndarray, rectangles: np.ndarray, is_added: bool
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the outline of a fence with rectangles added or removed.

  The plane is cut at all coordinates into cells. Of what is left the largest part stays, and its
  holes are filled: then no two of its cells meet at a corner alone, and the outline is simple.

  Args:
    xs: i64[m].
    ys: i64[m].
    rectangles: i64[n, 4], left, bottom, right, top.
    is_added: else they are removed.

  Returns:
    The outline's xs and ys; empty if nothing is left.
  """
  cuts_x = np.unique(np.concatenate((xs, rectangles[:, 0], rectangles[:, 2])))
  cuts_y = np.unique(np.concatenate((ys, rectangles[:, 1], rectangles[:, 3])))
  # One ring of cells around; cell (i, j) ends at cuts_x[i], cuts_y[j].
  width, height = len(cuts_x) + 1, len(cuts_y) + 1
  cells = np.zeros((width, height), np.int64)
  num = len(xs)
  for k in range(num):
    after = (k + 1) % num
    if xs[k] == xs[after]:
      column = np.searchsorted(cuts_x, xs[k]) + 1
      low = np.searchsorted(cuts_y, min(ys[k], ys[after])) + 1
      high = np.searchsorted(cuts_y, max(ys[k], ys[after])) + 1
      for j in range(low, high):
        cells[column, j] ^= 1
  for i in range(1, width):
    for j in range(height):
      cells[i, j] ^= cells[i - 1, j]
  for r in range(len(rectangles)):
    first = np.searchsorted(cuts_x, rectangles[r, 0]) + 1
    last = np.searchsorted(cuts_x, rectangles[r, 2]) + 1
    low = np.searchsorted(cuts_y, rectangles[r, 1]) + 1
    high = np.searchsorted(cuts_y, rectangles[r, 3]) + 1
    cells[first:last, low:high] = 1 if is_added else 0
  # Parts get the numbers from 2 on.
  stack = np.empty((width * height, 2), np.int64)
  number, largest, most = 1, 0, 0
  for i in range(1, width - 1):
    for j in range(1, height - 1):
      if cells[i, j] == 1:
        number += 1
        area = 0
        cells[i, j] = number
        stack[0, 0], stack[0, 1], depth = i, j, 1
        while depth:
          depth -= 1
          p, q = stack[depth, 0], stack[depth, 1]
          area += (cuts_x[p] - cuts_x[p - 1]) * (cuts_y[q] - cuts_y[q - 1])
          for a, b in ((p - 1, q), (p + 1, q), (p, q - 1), (p, q + 1)):
            if cells[a, b] == 1:
              cells[a, b] = number
              stack[depth, 0], stack[depth, 1] = a, b
              depth += 1
        if area > most:
          largest, most = number, area
  if largest == 0:
    return np.empty(0, np.int64), np.empty(0, np.int64)
  # What can be reached from the ring is outside (-1).
  cells[0, 0] = -1
  stack[0, 0], stack[0, 1], depth = 0, 0, 1
  while depth:
    depth -= 1
    p, q = stack[depth, 0], stack[depth, 1]
    for a, b in ((p - 1, q), (p + 1, q), (p, q - 1), (p, q + 1)):
      if 0 <= a < width and 0 <= b < height and cells[a, b] != largest and cells[a, b] != -1:
        cells[a, b] = -1
        stack[depth, 0], stack[depth, 1] = a, b
        depth += 1
  out_x, out_y = np.empty(2 * width * height, np.int64), np.empty(2 * width * height, np.int64)
  start_i, start_j = 0, 0
  for i in range(1, width - 1):
    for j in range(1, height - 1):
      if cells[i, j] != -1 and start_i == 0:
        start_i, start_j = i, j
  # Walk with the inside to the left; corner (i, j) is the lower left one of cell (i, j).
  i, j, step_x, step_y, count = start_i, start_j, 1, 0, 1
  out_x[0], out_y[0] = cuts_x[i - 1], cuts_y[j - 1]
  while True:
    i, j = i + step_x, j + step_y
    if i == start_i and j == start_j:
      break
    left_i, left_j = i + (step_x - step_y - 1) // 2, j + (step_x + step_y - 1) // 2
    right_i, right_j = i + (step_x + step_y - 1) // 2, j + (step_y - step_x - 1) // 2
    if cells[right_i, right_j] != -1:
      turn = -1
    elif cells[left_i, left_j] != -1:
      continue
    else:
      turn = 1
    step_x, step_y = -turn * step_y, turn * step_x
    out_x[count], out_y[count] = cuts_x[i - 1], cuts_y[j - 1]
    count += 1
  return out_x[:count].copy(), out_y[:count].copy()


_A, _B, _C, _D = np.uint64(12), np.uint64(25), np.uint64(27), np.uint64(11)
_FACTOR = np.uint64(0x2545F4914F6CDD1D)


@compiled.function
def _uniform(state: np.ndarray) -> float:
  """Returns a number in [0, 1); xorshift64*, whose state is u64[1]."""
  x = state[0]
  x ^= x >> _A
  x ^= x << _B
  x ^= x >> _C
  state[0] = x
  return np.float64((x * _FACTOR) >> _D) * 2.0**-53


@compiled.function
def _is_free(
  xs: np.ndarray, ys: np.ndarray, num: int, box: tuple[int, int, int, int],
  skipped: tuple[int, int, int, int, int],
) -> bool:  # fmt: skip
  """Returns whether a closed box (left, right, bottom, top) touches no edge but those skipped."""
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
  """Anneals a fence where it lies; returns its vertices and those of the best (0: none was legal).

  A step takes an edge, or a part of it that may touch one of its ends, and moves it out or in. The
  axis u lies along the edge, w across it. At an end that is a vertex the neighbour grows or
  shrinks, and vanishes if nothing is left of it; elsewhere two vertices are made. What the part
  sweeps must touch no other edge: so the fence stays simple.
  """
  new_xs, new_ys = np.empty_like(xs), np.empty_like(ys)
  value = _fence_count(counter, xs[:num], ys[:num])
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
    # 0.4 the whole edge, 0.2 a part at its start, 0.2 one at its end, 0.2 one in between.
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
    # A convex vertex's line moves with the edge, a reflex one's stays inside in any case; the walls
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
        gain = _box_count(counter, low_u, high_u, low_w, high_w)
      else:
        gain = _box_count(counter, low_w, high_w, low_u, high_u)
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
    # A neighbour may vanish only if the edge behind it goes on, and not back.
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
      # All vertices but the edge's two (and those that vanish), then the edge's new ones.
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
