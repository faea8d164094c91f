"""Compiles programs, runs them on cases and judges them; every failure has a reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import hashlib
import threading
from typing import Any, Protocol, runtime_checkable

from seerjax.discovery import environment
from seerjax.sandbox.sandbox import Limits, Outcome, Sandbox

LANGUAGES = ("c++", "python")
MAX_SOURCE = 2**19  # Bytes, as in the contests.
COMPILE = ("g++", "-std=c++20", "-O2", "-o", "solution", "solution.cc")
# Two CPU seconds. The wall-clock limit is looser, because other work runs at the same time and a
# program that waits gains nothing.
RUN_LIMITS = Limits(wall_seconds=6.0, cpu_seconds=2.0, memory_bytes=2**30, file_bytes=2**20)
COMPILE_LIMITS = Limits(
  wall_seconds=120.0, cpu_seconds=60.0, memory_bytes=2**31, file_bytes=2**26, output_bytes=2**20
)
_MAX_KEPT = 256  # Programs with cached values or compiler errors.
_MAX_MESSAGE = 400  # Characters of the output of a compiler or program.


@runtime_checkable
class Contest(Protocol):
  """A contest's problem: its cases, and the values of outputs."""

  @property
  def name(self) -> str:
    """Name for logs and files."""
    ...

  @property
  def published(self) -> tuple[environment.Published, ...]:
    """Published means over the contest's own cases."""
    ...

  @property
  def reward_unit(self) -> float:
    """Divisor of the mean in the reward."""
    ...

  @property
  def rules(self) -> str:
    """The problem, its input and its output, as text for a model."""
    ...

  @property
  def plain_source(self) -> str:
    """A simple Python program that solves every case."""
    ...

  def case_input(self, case: int) -> bytes:
    """Returns the input of a case."""
    ...

  def value(self, case: int, output: str) -> int | str:
    """Returns the value of an output, or the reason why it is invalid."""
    ...


class ContestSolutions:
  """An environment with programs for a contest's problem as artefacts.

  An artefact is {"language": "c++" or "python", "source": text}. Only models that write programs
  can change it: there is no language of edits.

  Attributes:
    name: name of the contest and number of cases.
    is_maximised: True.
    published: published means over the contest's own cases.
    language: None.
    helper_cpu_seconds: CPU seconds of compilers and programs so far, as in `discovery.Helped`.
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
    """Takes a contest and a sandbox for its programs.

    Args:
      contest: `PurseSeineContest()`, `AppleMachinesContest()` or your own.
      sandbox: sandbox in which programs are compiled and run.
      num_cases: number of cases per program, run one after the other.
      limits: limits per case; the contest's are 2 seconds and 1 GiB.
      compile_limits: limits of a compilation.

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
    # By digest of the source: compiler errors, and values of valid programs by case. Threads may do
    # the same work twice; the first result is kept. Binaries are not kept: one large array can fill
    # a file, and hundreds of these the memory.
    self._refused: dict[str, str] = {}
    self._values: dict[str, tuple[int, ...]] = {}

  def start(self, seed: int) -> environment.Artefact:
    """Returns the same simple Python program for every seed."""
    return {"language": "python", "source": self._contest.plain_source}

  def verify(self, artefact: Any) -> environment.Score:
    """Compiles a program and runs it on all cases, unless its value is cached; never raises."""
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
    """Returns a program's values by case, or the first reason why it is invalid."""
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
    """Returns the problem, the rules of judging, and this program, as text."""
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
    """Calls `Sandbox.run` and counts its CPU seconds."""
    outcome = self._sandbox.run(command, **arguments)
    with self._adding:
      self.helper_cpu_seconds += outcome.cpu_seconds
    return outcome

  def _program(
    self, language: str, source: bytes, digest: str
  ) -> tuple[Mapping[str, bytes], Sequence[str]] | str:
    """Returns the files and the command of a program, or the reason why it does not compile."""
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
      # A timeout may be due to a busy machine, so it is not cached.
      if outcome.status in ("ok", "failed"):
        _keep(self._refused, digest, reason)
    return reason


def _malformed(artefact: Any) -> str:
  """Returns why an artefact is not a program, or ""."""
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
  """Returns how a run failed, with part of its output."""
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
  # A compiler prints the error first, a traceback prints it last.
  head = printed[:_MAX_MESSAGE]
  part = head if "error:" in head else printed[-_MAX_MESSAGE:]
  return f"got {how}, expected 0" + (f": {part}" if part else "")


def _keep(kept: dict[str, Any], digest: str, value: Any) -> Any:
  """Caches a value under a digest, unless there is one; returns the cached value."""
  while len(kept) >= _MAX_KEPT:
    kept.pop(next(iter(kept)), None)
  return kept.setdefault(digest, value)
