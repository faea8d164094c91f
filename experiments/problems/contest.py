"""Contest solutions: programs in C++ or Python, judged on generated cases as a contest judges them.

  {"language": "c++", "source": "..."} -> compiled once -> per case: input -> output -> exact value
  value = mean over the cases, if the program answers all of them; else it is worth nothing

The cases are ours, drawn as the contests' problem statements say. A program sees nothing of them
but its input. One that watches the clock answers differently from run to run: so its value is what
it got when it was first judged.

  purse seine (AHC039)      input   N, then the N wanted and the N unwanted points, x y
                            output  m, then m vertices, x y; of several answers the last one counts
  apple machines (AHC058)   input   N L T K, then A by kind, then C by level, N numbers a line
                            output  T times "i j" (buy one of level i and kind j) or "-1" (nothing)

Source: AtCoder Heuristic Contests 039 and 058; Yuksekgonul et al. 2026 (TTT-Discover),
https://arxiv.org/abs/2601.16175, whose rewards are mean / 1500 and mean / 1500 / 2000.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import re
import threading
from typing import Any, Protocol, runtime_checkable

from experiments.problems.apple_machines import rules as apple_rules
from experiments.problems.purse_seine import PurseSeine, rules as seine_rules
from seerjax.discovery import environment
from seerjax.sandbox.sandbox import Limits, Outcome, Sandbox

LANGUAGES = ("c++", "python")
MAX_SOURCE = 2**19  # Bytes, as in the contests.
COMPILE = ("g++", "-std=c++20", "-O2", "-o", "solution", "solution.cc")
# Two seconds of computing. The clock is looser: cases are run beside other work, and a program that
# waits gains nothing.
RUN_LIMITS = Limits(wall_seconds=6.0, cpu_seconds=2.0, memory_bytes=2**30, file_bytes=2**20)
COMPILE_LIMITS = Limits(
  wall_seconds=120.0, cpu_seconds=60.0, memory_bytes=2**31, file_bytes=2**26, output_bytes=2**20
)
_MAX_KEPT = 256  # Programs whose values, or whose compiler's complaints, are remembered.
_MAX_MESSAGE = 400  # Characters of what a compiler or a program printed.
_NUMBER = re.compile(r"[+-]?[0-9]{1,9}", re.ASCII)


@runtime_checkable
class Contest(Protocol):
  """What a contest's problem gives: cases, and what an output is worth."""

  @property
  def name(self) -> str:
    """For logs and files."""
    ...

  @property
  def published(self) -> tuple[environment.Published, ...]:
    """Means over the contest's own cases."""
    ...

  @property
  def reward_unit(self) -> float:
    """What the mean is divided by."""
    ...

  @property
  def rules(self) -> str:
    """The problem, its input and its output, for a model."""
    ...

  @property
  def plain_source(self) -> str:
    """A plain Python program that answers every case."""
    ...

  def case_input(self, case: int) -> bytes:
    """Returns what a program reads."""
    ...

  def value(self, case: int, output: str) -> int | str:
    """Returns what an output is worth, or the reason why it is no answer."""
    ...


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
    """The problem, its input and its output."""
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
    """A square around the best cell of a grid."""
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
    """Returns the value of the last polygon."""
    numbers = integers(output)
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
    """The problem, its input and its output."""
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
    """Buys the best machine of level 0 that can be paid for, if it earns its price in time."""
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
    """Returns the points of the turns that were printed."""
    orders = read_orders(output, apple_rules.TURNS)
    if isinstance(orders, str):
      return orders
    apples = play(apple_rules.instance(self.first_case + case), orders)
    return apples if isinstance(apples, str) else apple_rules.points(apples)


class ContestSolutions:
  """Programs that solve a contest's problem; an environment whose artefacts are source text.

  An artefact is {"language": "c++" or "python", "source": text}. It is changed by models that write
  programs alone: there is no language of edits.

  Attributes:
    name: of the contest and the number of cases.
    is_maximised: True.
    published: means over the contest's own cases.
    language: None.
    helper_cpu_seconds: of compilers and programs so far, as `discovery.Helped` has it.
  """

  name: str
  is_maximised: bool
  published: tuple[environment.Published, ...]
  language: environment.EditLanguage | None
  helper_cpu_seconds: float

  def __init__(
    self,
    contest: Contest,
    *,
    sandbox: Sandbox,
    num_cases: int = 8,
    limits: Limits = RUN_LIMITS,
    compile_limits: Limits = COMPILE_LIMITS,
  ):
    """Takes a contest and where its programs run.

    Args:
      contest: `PurseSeineContest()`, `AppleMachinesContest()` or one of your own.
      sandbox: that programs are compiled and run in.
      num_cases: how many cases a program is judged on, one after the other.
      limits: of each case; the contest's are 2 seconds and 1 GiB.
      compile_limits: of a compilation.

    Raises:
      ValueError: if there are no cases.
    """
    if num_cases < 1:
      raise ValueError(
        f"ContestSolutions.num_cases: got {num_cases}, expected at least 1; the contests have 150."
      )
    self.name = f"{contest.name}_{num_cases}"
    self.is_maximised = True
    self.published = contest.published
    self.language = None
    self.helper_cpu_seconds = 0.0
    self._adding = threading.Lock()
    self._contest = contest
    self._sandbox = sandbox
    self._num_cases = num_cases
    self._limits = limits
    self._compile_limits = compile_limits
    # By the digest of the source: why it does not compile, and what a valid program was worth on
    # each case. Threads may do the same work twice; the first result stays. What g++ made is not
    # kept: one large array fills a file, and hundreds of those the memory.
    self._refused: dict[str, str] = {}
    self._values: dict[str, tuple[int, ...]] = {}

  def start(self, seed: int) -> environment.Artefact:
    """Returns a plain Python program, whatever the seed."""
    return {"language": "python", "source": self._contest.plain_source}

  def verify(self, artefact: Any) -> environment.Score:
    """Compiles and runs a program on all cases, unless it has been judged before; never raises."""
    values = self.case_values(artefact)
    if isinstance(values, str):
      return environment.invalid(values)
    total, num = sum(values), len(values)
    return environment.Score(
      is_valid=True,
      value=total / num,
      reward=(1 + total / num) / self._contest.reward_unit,
      certificate="" if total % num == 0 else f"{total}/{num}",
    )

  def case_values(self, artefact: Any) -> tuple[int, ...] | str:
    """Returns what a program is worth on each case, or the first reason why it is worth nothing."""
    reason = _malformed(artefact)
    if reason:
      return reason
    language, source = artefact["language"], artefact["source"].encode()
    digest = hashlib.sha256(language.encode() + b"\0" + source).hexdigest()
    if digest in self._values:
      return self._values[digest]
    program = self._program(language, source, digest)
    if isinstance(program, str):
      return program
    files, command = program
    values = []
    for case in range(self._num_cases):
      outcome = self._run(
        command, files=files, stdin=self._contest.case_input(case), limits=self._limits
      )
      if outcome.status != "ok":
        return f"case {case}: {_failure(outcome, self._limits)}"
      value = self._contest.value(case, outcome.stdout.decode(errors="replace"))
      if isinstance(value, str):
        return f"case {case}: {value}"
      values.append(value)
    return _keep(self._values, digest, tuple(values))

  def describe(self, artefact: environment.Artefact, score: environment.Score) -> str:
    """Returns the problem, how programs are judged, and this program, as text."""
    return f"""\
{self._contest.rules}

An answer is a dict {{"language": ..., "source": ...}}: a program in "c++" (g++, C++20, -O2) or in
"python" that reads one case from standard input and writes its answer to standard output, within
{self._limits.cpu_seconds:g} seconds of computing and {self._limits.memory_bytes >> 20} MiB. It is \
judged by its mean value over {self._num_cases} cases; if it
fails on one of them, it is worth nothing.

The present program, in {artefact["language"]}, has the mean value {score.value:.2f}:

```{artefact["language"]}
{artefact["source"]}
```

Write a Python function improve(artefact, seconds, seed) that takes such a dict and returns a better
one; to return a program that you have written is enough.
"""

  def picture(self, artefact: environment.Artefact) -> Any:
    """Returns a matplotlib Figure of the values by case.

    Raises:
      ValueError: if the program is not valid.
    """
    import matplotlib.figure

    values = self.case_values(artefact)
    if isinstance(values, str):
      raise ValueError(
        f"{self.name}.picture: got a program that is worth nothing ({values}), expected a valid"
        " one; verify it first."
      )
    figure = matplotlib.figure.Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.bar(range(len(values)), values, color="#2060a0")
    axes.axhline(sum(values) / len(values), color="black", linewidth=1, label="mean")
    axes.set_title(f"{self.name}: mean {sum(values) / len(values):,.2f} points")
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("case")
    axes.set_ylabel("points")
    axes.legend()
    return figure

  def _run(self, command: Sequence[str], **arguments: Any) -> Outcome:
    """Returns what `Sandbox.run` does, and counts its CPU seconds."""
    outcome = self._sandbox.run(command, **arguments)
    with self._adding:
      self.helper_cpu_seconds += outcome.cpu_seconds
    return outcome

  def _program(
    self, language: str, source: bytes, digest: str
  ) -> tuple[Mapping[str, bytes], Sequence[str]] | str:
    """Returns the files and the command of a program, or the reason why it cannot be compiled."""
    if language == "python":
      return {"solution.py": source}, ("python3", "solution.py")
    reason = self._refused.get(digest)
    if reason is None:
      outcome = self._run(
        COMPILE,
        files={"solution.cc": source},
        outputs=("solution",),
        limits=self._compile_limits,
      )
      if outcome.status == "ok" and "solution" in outcome.files:
        return {"solution": outcome.files["solution"]}, ("./solution",)
      reason = f"compilation: {_failure(outcome, self._compile_limits)}"
      # What ran out of time may have met a busy machine: that is not held against it for good.
      if outcome.status in ("ok", "failed"):
        _keep(self._refused, digest, reason)
    return reason


def purse_seine_programs(
  num_cases: int = 8, *, allow_weak_sandbox: bool = False
) -> ContestSolutions:
  """Returns AHC039 for programs, which run in a sandbox of its own."""
  box = Sandbox(allow_weak=allow_weak_sandbox)
  return ContestSolutions(PurseSeineContest(), sandbox=box, num_cases=num_cases)


def apple_machines_programs(
  num_cases: int = 8, *, allow_weak_sandbox: bool = False
) -> ContestSolutions:
  """Returns AHC058 for programs, which run in a sandbox of its own."""
  box = Sandbox(allow_weak=allow_weak_sandbox)
  return ContestSolutions(AppleMachinesContest(), sandbox=box, num_cases=num_cases)


def integers(text: str, first: int = 0) -> list[int] | str:
  """Returns the integers that a text consists of, or the reason why it does not.

  Args:
    text: words between white space.
    first: number of the text's first word, for the reason.
  """
  words = text.split()
  for place, word in enumerate(words, first):
    if not _NUMBER.fullmatch(word):
      return f"output: got {word[:40]!r} as word {place}, expected an integer of at most 9 digits"
  return [int(word) for word in words]


def machines_input(problem: apple_rules.Instance) -> str:
  """Returns an input of AHC058 as a program reads it."""
  rows = [
    (len(problem.apples), len(problem.costs), apple_rules.TURNS, 1),
    problem.apples,
    *problem.costs,
  ]
  return "".join(" ".join(map(str, row)) + "\n" for row in rows)


def read_orders(output: str, turns: int) -> list[tuple[int, int] | None] | str:
  """Returns what is bought in each turn (None: nothing), or the reason why that is not known.

  As the contest's own tester reads it: a line that begins with # is a comment, numbers may have a
  plus sign, and what follows the last turn is not read.

  Args:
    output: of a program.
    turns: how many orders there must be.
  """
  lines = (line.strip() for line in output.splitlines())
  words = " ".join(line for line in lines if not line.startswith("#")).split()
  orders: list[tuple[int, int] | None] = []
  place = 0
  while len(orders) < turns and place < len(words):
    order = integers(" ".join(words[place : place + 2]), place)
    if isinstance(order, str) and not _NUMBER.fullmatch(words[place]):
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


def play(
  problem: apple_rules.Instance, orders: Sequence[tuple[int, int] | None]
) -> int | str:
  """Returns the apples after the turns, in integers of any size, or why an order is impossible.

  Args:
    problem: A and C.
    orders: (level, kind) of what is bought in each turn, or None.
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


def _malformed(artefact: Any) -> str:
  """Returns why something is no program's text, or ""."""
  if not isinstance(artefact, dict) or set(artefact) != {"language", "source"}:
    got = type(artefact).__name__
    if isinstance(artefact, dict):
      got = sorted(map(environment.shown, artefact))[:4]
    return f"program: got {got}, expected a dict of 'language' and 'source'"
  language = artefact["language"]
  if not isinstance(language, str) or language not in LANGUAGES:
    return f"language: got {environment.shown(language)!r}, expected one of {LANGUAGES}"
  source = artefact["source"]
  if not isinstance(source, str):
    return f"source: got {type(source).__name__}, expected text"
  try:
    size = len(source.encode())
  except UnicodeEncodeError:
    return "source: got text that UTF-8 cannot hold, expected Unicode without lone surrogates"
  if not 0 < size <= MAX_SOURCE:
    return f"source: got {size} bytes, expected 1 to {MAX_SOURCE}"
  return ""


def _failure(outcome: Outcome, limits: Limits) -> str:
  """Returns how a run failed, with the end of what it printed."""
  printed = outcome.stderr.decode(errors="replace").strip()
  match outcome.status:
    case "timeout":
      return f"got no end within {limits.wall_seconds:g} seconds of the clock, expected an answer"
    case "cpu":
      return f"got more than {limits.cpu_seconds:g} seconds of computing, expected an answer"
    case "memory":
      return f"got more than {limits.memory_bytes >> 20} MiB of memory, expected no more"
    case "output":
      return f"got more than {limits.output_bytes} bytes of output, expected no more"
    case "ok":
      return "got no file, expected a program"
  how = f"exit code {outcome.exit_code}" if outcome.status == "failed" else "a killed program"
  # A compiler says first what is wrong, a program's traceback last.
  head = printed[:_MAX_MESSAGE]
  part = head if "error:" in head else printed[-_MAX_MESSAGE:]
  return f"got {how}, expected 0" + (f": {part}" if part else "")


def _keep(kept: dict[str, Any], digest: str, value: Any) -> Any:
  """Keeps a value under its digest, unless there is one; returns what is kept."""
  while len(kept) >= _MAX_KEPT:
    kept.pop(next(iter(kept)), None)
  return kept.setdefault(digest, value)
