"""AHC039 for programs: the input is N and the wanted and unwanted points, the output polygons."""

from __future__ import annotations

import dataclasses

from experiments.problems.contest import outputs
from experiments.problems.contest.solutions import ContestSolutions
from experiments.problems.purse_seine import PurseSeine, rules as seine_rules
from seerjax.discovery import environment
from seerjax.sandbox.sandbox import Sandbox


@dataclasses.dataclass(frozen=True, kw_only=True)
class PurseSeineContest:
  """AHC039; case i is the instance `first_case + i` of `purse_seine`.

  Attributes:
    first_case: number of the first instance.
  """

  first_case: int = 0
  name: str = "purse_seine_programs"
  published: tuple[environment.Published, ...] = seine_rules.PUBLISHED
  reward_unit: float = seine_rules.REWARD_UNIT

  def __post_init__(self):
    if self.first_case < 0:
      raise ValueError(
        f"PurseSeineContest.first_case: got {self.first_case}, expected 0 or more; 0 is usual."
      )

  @property
  def rules(self) -> str:
    """The problem, its input and its output, as text."""
    return f"""\
The plane holds N = 5000 wanted and 5000 unwanted points with integer coordinates in
0..{seine_rules.SIDE}, all different, in 10 to 25 Gaussian clusters of each kind (centres in
20000..80000, standard deviations in 1000..5000). Fence in many wanted points and few unwanted ones.

Input: N; then N lines "x y" of wanted points; then N lines of unwanted points.
Output: m; then m lines "x y", the vertices of one polygon in order.
- 4 <= m <= {seine_rules.MAX_VERTICES}; vertices are different, with integer coordinates in
  0..{seine_rules.SIDE};
- every edge is parallel to an axis; all edges together are at most
  {seine_rules.MAX_PERIMETER} long;
- edges have no point in common but the vertex between two neighbours.
Of several answers the last one counts. Points on the fence count as inside. The value is
max(0, wanted inside - unwanted inside + 1); higher is better."""

  @property
  def plain_source(self) -> str:
    """A program that draws a square around the best cell of a grid."""
    return """\
import sys

numbers = list(map(int, sys.stdin.read().split()))
n, side = numbers[0], 5000
cells = {}
for i in range(2 * n):
  cell = numbers[1 + 2 * i] // side, numbers[2 + 2 * i] // side
  cells[cell] = cells.get(cell, 0) + (1 if i < n else -1)
x, y = max(cells, key=cells.get)
x, y = min(x * side, 100000 - side), min(y * side, 100000 - side)
print(4)
for a, b in ((x, y), (x + side, y), (x + side, y + side), (x, y + side)):
  print(a, b)
"""

  def case_input(self, case: int) -> bytes:
    """Returns N and the points."""
    points = seine_rules.points_of(self.first_case + case)
    lines = [str(len(points.wanted))]
    lines += [f"{x} {y}" for kind in points for x, y in kind.tolist()]
    return ("\n".join(lines) + "\n").encode()

  def value(self, case: int, output: str) -> int | str:
    """Returns the value of the last polygon, or the reason why it is invalid."""
    numbers = outputs.integers(output)
    if isinstance(numbers, str):
      return numbers
    if not numbers:
      return "output: got nothing, expected the number of vertices"
    place, num = 0, 0
    while place < len(numbers):
      num = numbers[place]
      if not 4 <= num <= seine_rules.MAX_VERTICES:
        return f"output: got {num} vertices, expected 4 to {seine_rules.MAX_VERTICES}"
      place += 1 + 2 * num
    if place > len(numbers):
      given = len(numbers) - (place - 2 * num)
      return f"output: got {given} coordinates, expected {2 * num} for {num} vertices"
    last = numbers[-2 * num :]
    vertices = [list(vertex) for vertex in zip(last[::2], last[1::2])]
    score = PurseSeine(self.first_case + case).verify(vertices)
    return int(score.value) if score.is_valid else score.reason


def purse_seine_programs(
  num_cases: int = 8, *, allow_weak_sandbox: bool = False
) -> ContestSolutions:
  """Returns AHC039 for programs, with its own sandbox."""
  box = Sandbox(allow_weak=allow_weak_sandbox)
  return ContestSolutions(PurseSeineContest(), sandbox=box, num_cases=num_cases)
