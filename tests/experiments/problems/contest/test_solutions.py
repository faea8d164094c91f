"""Programs are compiled, run and judged, and every failure is reported."""

from __future__ import annotations

import dataclasses
import math

import matplotlib.figure
import pytest

from experiments.problems import contest
from experiments.problems.contest import solutions
from experiments.problems.purse_seine import rules as seine_rules
from seerjax.discovery import environment as environment_lib
from seerjax.sandbox.sandbox import Limits, Outcome, Sandbox

SEINE, MACHINES = contest.PurseSeineContest(), contest.AppleMachinesContest()

SQUARE = "4\n40000 40000\n60000 40000\n60000 60000\n40000 60000\n"
# The square around the middle of the plane; of both answers the last one counts.
C_PLUS_PLUS = """
#include <iostream>
int main() {
  int n, x, y;
  std::cin >> n;
  for (int i = 0; i < 2 * n; ++i) std::cin >> x >> y;
  if (!std::cin) return 3;
  std::cout << "4\\n0 0\\n1 0\\n1 1\\n0 1\\n";
  std::cout << "4\\n40000 40000\\n60000 40000\\n60000 60000\\n40000 60000\\n";
}
"""


def python(source: str) -> dict[str, str]:
  return {"language": "python", "source": source}


def seine(sandbox: Sandbox, **options) -> contest.ContestSolutions:
  return contest.ContestSolutions(SEINE, sandbox=sandbox, **{"num_cases": 2, **options})


def square_values() -> list[int]:
  values = []
  for case in range(2):
    counts = [
      int(((kind >= 40_000) & (kind <= 60_000)).all(axis=1).sum())
      for kind in seine_rules.points_of(case)
    ]
    values.append(max(0, counts[0] - counts[1] + 1))
  return values


def test_a_program_in_c_plus_plus_is_compiled_once_and_scored(sandbox: Sandbox):
  environment = seine(sandbox)
  artefact = {"language": "c++", "source": C_PLUS_PLUS}
  score, values = environment.verify(artefact), square_values()
  assert score.is_valid, score.reason
  assert environment.case_values(artefact) == tuple(values)
  assert score.value == sum(values) / 2 and score.reward == (1 + sum(values) / 2) / 1500
  assert score.certificate == (f"{sum(values)}/2" if sum(values) % 2 else "")
  # Compiled binaries are not kept: 256 programs with a large array each would fill the memory.
  assert environment._refused == {}
  # Seconds of compiler and program count; a cached result costs none.
  assert isinstance(environment, environment_lib.Helped)
  seconds = environment_lib.helper_seconds(environment)
  assert seconds > 0.1
  assert environment.verify(artefact) == score
  assert environment_lib.helper_seconds(environment) == seconds


def test_plain_programs_answer_every_case(sandbox: Sandbox):
  for which, unit in ((SEINE, 1500), (MACHINES, 3e6)):
    environment = contest.ContestSolutions(which, sandbox=sandbox, num_cases=2)
    assert isinstance(environment, environment_lib.Environment) and environment.language is None
    start = environment.start(0)
    score = environment.verify(start)
    assert score.is_valid, score.reason
    assert score.value > 100 and score.reward == (1 + score.value) / unit
    text = environment.describe(start, score)
    assert start["source"] in text and "improve(artefact, seconds, seed)" in text
    assert "within\n2 seconds of computing and 1024 MiB" in text
    figure = environment.picture(start)
    assert isinstance(figure, matplotlib.figure.Figure)
    (axes,) = figure.axes
    assert axes.get_title() == f"{which.name}_2: mean {score.value:,.2f} points"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("case", "points")
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    assert environment.name == f"{which.name}_2"
    assert environment.published[0].value > 3000


def test_what_cannot_be_compiled_is_refused(sandbox: Sandbox):
  environment = seine(sandbox)
  artefact = {"language": "c++", "source": "int main() { return missing; }"}
  reason = environment.verify(artefact).reason
  assert "compilation: got exit code 1, expected 0" in reason and "missing" in reason
  # It is not compiled once more.
  seconds = environment_lib.helper_seconds(environment)
  assert environment.verify(artefact).reason == reason
  assert environment_lib.helper_seconds(environment) == seconds
  short = dataclasses.replace(solutions.COMPILE_LIMITS, cpu_seconds=0.01)
  hasty = seine(sandbox, compile_limits=short)
  assert "compilation: got more than 0.01 seconds" in hasty.verify(artefact).reason
  with pytest.raises(ValueError, match=r"got a program that is worth nothing \(compilation: "):
    environment.picture(artefact)


@pytest.mark.parametrize(
  ("source", "reason"),
  [
    ("print('4 0 0 10 0 10 10 0 9')", "case 0: edge 2: got [10, 10] to [0, 9], expected"),
    ("print('4 0 0 10 0 12 10 0 10')", "case 0: edge 1: got [10, 0] to [12, 10], expected an edge"),
    ("print('4 0 0 10 0 10 10')", "case 0: output: got 6 coordinates, expected 8 for 4 vertices"),
    ("print('3 0 0 10 0 10 10')", "case 0: output: got 3 vertices, expected 4 to 1000"),
    ("print('1e9')", "case 0: output: got '1e9' as word 0, expected an integer"),
    ("pass", "case 0: output: got nothing, expected the number of vertices"),
    ("raise KeyError('why')", "case 0: got exit code 1, expected 0: Traceback"),
    ("import sys\nsys.exit(5)", "case 0: got exit code 5, expected 0"),
    ("import os\nos.kill(os.getpid(), 9)", "case 0: got a killed program, expected 0"),
    ("print('9' * 2000)", "case 0: got more than 1000 bytes of output, expected no more"),
    ("while True: pass", "case 0: got more than 0.5 seconds of computing, expected an answer"),
    ("import time\ntime.sleep(60)", "case 0: got no end within 1 seconds of the clock"),
    ("x = bytearray(2**29)", "MemoryError"),
  ],
)
def test_programs_that_fail_are_worth_nothing(sandbox: Sandbox, source: str, reason: str):
  limits = Limits(
    wall_seconds=1.0 if "sleep" in source else 60.0,
    cpu_seconds=0.5,
    memory_bytes=2**28,
    file_bytes=2**20,
    output_bytes=1000,
  )
  score = seine(sandbox, limits=limits).verify(python(source))
  assert not score.is_valid and math.isnan(score.value) and reason in score.reason


@pytest.mark.parametrize(
  ("status", "words"),
  [
    ("memory", "got more than 1024 MiB of memory, expected no more"),
    ("ok", "got no file, expected a program"),
    ("killed", "got a killed program, expected 0: its message"),
  ],
)
def test_every_way_to_fail_has_its_words(status: str, words: str):
  outcome = Outcome(status, None, b"", b"its message\n", {}, 0.0, 0.0)
  assert solutions._failure(outcome, solutions.RUN_LIMITS) == words


def test_a_program_that_fails_on_the_second_case_is_worth_nothing(sandbox: Sandbox):
  second = seine_rules.points_of(1).wanted[0].tolist()
  source = f"""
numbers = open(0).read().split()
print({SQUARE!r} if numbers[1:3] != {[str(number) for number in second]} else 'no')
"""
  score = seine(sandbox).verify(python(source))
  assert score.reason == (
    "case 1: output: got 'no' as word 0, expected an integer of at most 9 digits"
  )


@pytest.mark.parametrize(
  ("artefact", "reason"),
  [
    (None, "program: got NoneType, expected a dict of 'language' and 'source'"),
    ({"source": "1"}, "program: got ['source'], expected a dict"),
    ({"language": "rust", "source": "1"}, "language: got 'rust', expected one of ('c++', 'py"),
    ({"language": ["c++"], "source": "1"}, "language: got \"['c++']\", expected one of"),
    ({10**5000: 1}, "program: got ['int'], expected a dict"),
    ({"language": 10**5000, "source": "1"}, "language: got 'int', expected one of"),
    (python(""), "source: got 0 bytes, expected 1 to 524288"),
    (python("1" * 600_000), "source: got 600000 bytes, expected 1 to 524288"),
    ({"language": "python", "source": b"1"}, "source: got bytes, expected text"),
    (python("\ud800"), "source: got text that UTF-8 cannot hold"),
  ],
)
def test_what_is_no_program_is_refused(sandbox: Sandbox, artefact: object, reason: str):
  score = seine(sandbox).verify(artefact)
  assert not score.is_valid and reason in score.reason


def test_impossible_settings_are_refused(sandbox: Sandbox):
  with pytest.raises(ValueError, match="num_cases: got 0, expected at least 1"):
    seine(sandbox, num_cases=0)
  with pytest.raises(ValueError, match="PurseSeineContest.first_case: got -1, expected 0 or more"):
    contest.PurseSeineContest(first_case=-1)
  with pytest.raises(ValueError, match="AppleMachinesContest.first_case: got -1, expected 0 or"):
    contest.AppleMachinesContest(first_case=-1)
