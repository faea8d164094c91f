"""AHC058 for programs: the input is N L T K, A and C; the output is one order per turn."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

from experiments.problems.apple_machines import rules as apple_rules
from experiments.problems.contest import outputs
from experiments.problems.contest.solutions import ContestSolutions
from seerjax.discovery import environment
from seerjax.sandbox.sandbox import Sandbox


@dataclasses.dataclass(frozen=True, kw_only=True)
class AppleMachinesContest:
  """AHC058; case i is the input `first_case + i` of `apple_machines`.

  Attributes:
    first_case: number of the first input.
  """

  first_case: int = 0
  name: str = "apple_machines_programs"
  published: tuple[environment.Published, ...] = apple_rules.PUBLISHED
  reward_unit: float = 1500.0 * 2000.0

  def __post_init__(self):
    if self.first_case < 0:
      raise ValueError(
        f"AppleMachinesContest.first_case: got {self.first_case}, expected 0 or more; 0 is usual."
      )

  @property
  def rules(self) -> str:
    """The problem, its input and its output, as text."""
    return f"""\
There are N = {apple_rules.KINDS} kinds of machine (j) on L = {apple_rules.LEVELS} levels (i)
and T = {apple_rules.TURNS} turns. At first there are
K = 1 apples; every machine has count B[i][j] = 1 and power P[i][j] = 0. In each turn at most one
machine (i, j) is bought: it costs C[i][j] * (P[i][j] + 1) apples, which must be there, and raises
P[i][j] by 1. Then, for i = 0, 1, ..., L-1 in this order and every j:
  i = 0:  apples += A[j] * B[0][j] * P[0][j]
  i > 0:  B[i-1][j] += B[i][j] * P[i][j]
A[0] = 1, the other A[j] = round(10^U(0,2)), sorted; C[0][0] = 1, the other
C[i][j] = round(A[j] * 500^i * 10^U(0,2)).

Input: "N L T K"; then A[0] ... A[N-1]; then L lines C[i][0] ... C[i][N-1].
Output: T lines, each "i j" (level and kind of what is bought) or "-1" (nothing is bought). Lines
that begin with "#" are comments.
The value is round(1e5 * log2(apples at the end)); higher is better."""

  @property
  def plain_source(self) -> str:
    """A program that buys the best affordable machine of level 0 that still earns its price."""
    return """\
import sys

numbers = iter(map(int, sys.stdin.read().split()))
n, levels, turns, apples = (next(numbers) for _ in range(4))
earns = [next(numbers) for _ in range(n)]
costs = [next(numbers) for _ in range(n)]
powers = [0] * n
for turn in range(turns):
  best = -1
  for j in range(n):
    price = costs[j] * (powers[j] + 1)
    if price <= apples and price < earns[j] * (turns - turn):
      if best < 0 or earns[j] > earns[best]:
        best = j
  if best >= 0:
    powers[best] += 1
    apples -= costs[best] * powers[best]
    print(0, best)
  else:
    print(-1)
  apples += sum(e * p for e, p in zip(earns, powers))
"""

  def case_input(self, case: int) -> bytes:
    """Returns N L T K, A and C."""
    return machines_input(apple_rules.instance(self.first_case + case)).encode()

  def value(self, case: int, output: str) -> int | str:
    """Returns the points of the printed turns, or the reason why they are invalid."""
    orders = read_orders(output, apple_rules.TURNS)
    if isinstance(orders, str):
      return orders
    apples = play(apple_rules.instance(self.first_case + case), orders)
    return apples if isinstance(apples, str) else apple_rules.points(apples)


def apple_machines_programs(
  num_cases: int = 8, *, allow_weak_sandbox: bool = False
) -> ContestSolutions:
  """Returns AHC058 for programs, with its own sandbox."""
  box = Sandbox(allow_weak=allow_weak_sandbox)
  return ContestSolutions(AppleMachinesContest(), sandbox=box, num_cases=num_cases)


def machines_input(problem: apple_rules.Instance) -> str:
  """Returns an input of AHC058 in the contest's format."""
  rows = [
    (len(problem.apples), len(problem.costs), apple_rules.TURNS, 1),
    problem.apples,
    *problem.costs,
  ]
  return "".join(" ".join(map(str, row)) + "\n" for row in rows)


def read_orders(output: str, turns: int) -> list[tuple[int, int] | None] | str:
  """Parses the order of each turn (None buys nothing), or returns the reason why it is invalid.

  Follows the contest's tester: a line that starts with # is a comment, numbers may have a plus
  sign, and text after the last turn is ignored.

  Args:
    output: output of a program.
    turns: required number of orders.
  """
  lines = (line.strip() for line in output.splitlines())
  words = " ".join(line for line in lines if not line.startswith("#")).split()
  orders: list[tuple[int, int] | None] = []
  place = 0
  while len(orders) < turns and place < len(words):
    order = outputs.integers(" ".join(words[place : place + 2]), place)
    if isinstance(order, str) and not outputs.NUMBER.fullmatch(words[place]):
      return order
    if int(words[place]) == -1:
      orders.append(None)
      place += 1
      continue
    if isinstance(order, str):
      return order
    if len(order) == 1:
      return f"turn {len(orders)}: got level {order[0]} alone, expected level and kind, or -1"
    level, kind = order
    if not (0 <= level < apple_rules.LEVELS and 0 <= kind < apple_rules.KINDS):
      return (
        f"turn {len(orders)}: got level {level} and kind {kind}, expected 0 to"
        f" {apple_rules.LEVELS - 1} and 0 to {apple_rules.KINDS - 1}"
      )
    orders.append((level, kind))
    place += 2
  if len(orders) < turns:
    return f"output: got {len(orders)} turns, expected {turns}"
  return orders


def play(problem: apple_rules.Instance, orders: Sequence[tuple[int, int] | None]) -> int | str:
  """Returns the apples after all turns, exactly, or the reason why an order is impossible.

  Args:
    problem: A and C.
    orders: by turn, (level, kind) of the machine to buy, or None.
  """
  num_levels, num_kinds = len(problem.costs), len(problem.apples)
  counts = [[1] * num_kinds for _ in range(num_levels)]
  powers = [[0] * num_kinds for _ in range(num_levels)]
  apples = 1
  for turn, order in enumerate(orders):
    if order is not None:
      level, kind = order
      price = problem.costs[level][kind] * (powers[level][kind] + 1)
      if price > apples:
        return (
          f"turn {turn}: got an order of level {level} and kind {kind} for {price} apples, expected"
          f" at most the {apples} that are there"
        )
      apples -= price
      powers[level][kind] += 1
    for kind in range(num_kinds):
      apples += problem.apples[kind] * counts[0][kind] * powers[0][kind]
      for level in range(1, num_levels):
        counts[level - 1][kind] += counts[level][kind] * powers[level][kind]
  return apples
