"""Programs of a model are parsed, checked before they run, sandboxed, and judged outside."""

from __future__ import annotations

from collections.abc import Iterator
import math
import time

import hypothesis
from hypothesis import strategies as st
import pytest
import tiny_problem

from seerjax.discovery import environment, programs
from seerjax.discovery.attempts import Attempt
from seerjax.discovery.environment import Artefact, Score
from seerjax.sandbox.sandbox import Limits, Sandbox

GOOD = "def improve(artefact, seconds, seed):\n  return artefact\n"
LIMITS = Limits(wall_seconds=20.0, cpu_seconds=10.0)


def fenced(source: str, mark: str = "python") -> str:
  return f"```{mark}\n{source}```\n"


class Product(tiny_problem.Row):
  """Three numbers in 0..1 with a sum of at most 1; the value is their product."""

  name = "product"

  def start(self, seed: int) -> Artefact:
    return [0.5, 0.25, 0.125]

  def describe(self, artefact: Artefact, score: Score) -> str:
    return f"Numbers with a large product: {artefact}, now {score.value}"

  def verify(self, artefact: Artefact) -> Score:
    numbers = environment.check_numbers(artefact, "artefact", least=3, most=3)
    if isinstance(numbers, str):
      return environment.invalid(numbers)
    if not all(0 < x <= 1 for x in numbers) or not sum(numbers) <= 1:
      return environment.invalid("expected numbers in 0..1 with a sum of at most 1")
    value = math.prod(numbers)
    return Score(is_valid=True, value=value, reward=1 + value)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
  with Sandbox(allow_weak=True) as box:
    yield box


def attempted(sandbox: Sandbox, source: str, limits: Limits = LIMITS) -> Attempt:
  return programs.attempt(
    sandbox, Product(), [0.5, 0.25, 0.125], fenced(source), seconds=1.5, seed=7, limits=limits
  )


@pytest.mark.parametrize(
  "text",
  [
    fenced(GOOD),
    "I think\n\n" + fenced("x = 1\n") + "no, better:\n" + fenced(GOOD) + "Done.",
    fenced(GOOD, "py"),
    fenced(GOOD, "Python"),
    fenced(GOOD, " python title=mine"),
    "````python\n" + GOOD + "````",
    "A stray\n```\nfence, and\n" + fenced(GOOD),
    fenced("x = (\n") + fenced(GOOD) + fenced("unmarked text\n", ""),
    fenced(GOOD).rstrip(),
    "```python\r\n" + GOOD + "```\r\n",
  ],
)
def test_the_last_marked_block_is_the_program(text):
  assert programs.read_program(text) == GOOD


@pytest.mark.parametrize(
  "head",
  [
    "improve(seed, artefact, seconds)",
    "improve(artefact, seconds=1.0, seed=0)",
    "improve(artefact, *, seconds, seed)",
    "improve(artefact, seconds, seed, tries=3, **more)",
  ],
)
def test_arguments_are_given_by_name(head):
  source = f"def {head}:\n  return artefact\n"
  assert programs.read_program(fenced(source)) == source


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("", "got no block that begins with ```python, expected one at the end"),
    ("def improve(artefact, seconds, seed): pass", "got no block that begins with ```python"),
    (fenced(GOOD, ""), "got no block that begins with ```python"),
    (fenced(GOOD, "cpp"), "got no block that begins with ```python"),
    ("```python\n" + GOOD, "got a block of Python that is not closed, expected ``` at its end"),
    (fenced(GOOD) + "```python\n" + GOOD, "got a block of Python that is not closed"),
    (fenced("#" * 70_000 + "\n"), "got a program of 70001 characters, expected at most 65536"),
    (fenced("x = (\n"), r"no Python \('\(' was never closed in line 1\), expected Python; fix it"),
    (fenced("x = 1\0\n"), "got a program that is no Python"),
    (fenced("x = '\ud800'\n"), "got a program that is no Python"),
    (fenced("x = " + "-" * 60_000 + "1\n"), "got a program that is no Python"),
    (fenced("x = " + "(" * 30_000 + ")" * 30_000), "got a block of Python that is not closed"),
    (fenced(GOOD.replace("improve", "better")), "got the functions better, expected def improve"),
    (fenced("if True:\n  def improve(artefact, seconds, seed): pass\n"), "got the functions none"),
    (fenced("def improve(artefact): pass\n"), r"got improve\(artefact\), expected def improve"),
    (fenced("def improve(artefact, seconds, seed, x): pass\n"), "seed, x.*; change its arguments"),
    (fenced("def improve(artefact, seconds, seed, *, x): pass\n"), "expected def improve"),
    (fenced("def improve(artefact, seconds, seed, /): pass\n"), "expected def improve"),
    (fenced(f"def improve(x={'-' * 400}1): pass\n"), r"got improve\(\.\.\.\), expected def impr"),
    (fenced("async def improve(artefact, seconds, seed): pass\n"), "got the functions none"),
  ],
)
def test_a_text_without_a_program_is_refused(text, message):
  with pytest.raises(ValueError, match=message):
    programs.read_program(text)


@pytest.mark.parametrize("line", [" " * 50_000 + "x" * 50_000, "x" * 100_000, " " * 100_000])
def test_a_line_that_is_almost_a_fence_takes_no_time(line):
  begin = time.process_time()
  assert programs.read_program("```" + line + "`\n" + fenced(GOOD)) == GOOD
  assert time.process_time() - begin < 1.0


@hypothesis.given(st.text(st.sampled_from("`python \ndef\tx=1()'\\\0"), max_size=200))
def test_reading_a_program_raises_nothing_else(text):
  for each in (text, fenced(text), fenced(GOOD) + text):
    try:
      source, reason = programs.read_program(each), ""
    except ValueError as error:
      source, reason = "", str(error)
    assert source in each and bool(source) != ("expected" in reason)


def test_the_instructions_show_a_program_that_can_be_read():
  text = programs.instructions()
  assert "def improve(artefact, seconds, seed):" in programs.read_program(text)


@pytest.mark.thorough
def test_a_program_improves_an_artefact(sandbox):
  done = attempted(
    sandbox,
    """
import numpy as np
def improve(artefact, seconds, seed):
  assert (artefact, seconds, seed) == ([0.5, 0.25, 0.125], 1.5, 7)
  print("hello")
  return np.array([0.5, 0.25, 0.25])
""",
  )
  assert (done.artefact, done.status, done.message) == ([0.5, 0.25, 0.25], "ok", "hello")
  assert done.score == Product().verify([0.5, 0.25, 0.25])
  assert done.cpu_seconds > 0


@pytest.mark.thorough
def test_a_program_cannot_report_its_own_score(sandbox):
  for returned in ("{'artefact': artefact, 'value': 9.0}", "[0.9, 0.9, 0.9]", "9.0", "None"):
    done = attempted(sandbox, f"def improve(artefact, seconds, seed): return {returned}\n")
    assert (done.artefact, done.status, done.score.is_valid) == (None, "invalid", False)
    assert "expected" in done.score.reason


@pytest.mark.thorough
def test_a_program_that_fails_leaves_its_reason(sandbox):
  done = attempted(sandbox, "def improve(artefact, seconds, seed): return artefact[7]\n")
  assert (done.artefact, done.status) == (None, "failed")
  assert done.score.reason.startswith("failed after ")
  assert done.score.reason.endswith("IndexError: list index out of range")
  assert "in improve" in done.message
  done = attempted(sandbox, "def improve(artefact, seconds, seed): return float('nan')\n")
  assert (done.artefact, done.status) == (None, "failed")


def test_a_program_that_overruns_is_ended(sandbox):
  limits = Limits(wall_seconds=1.6, cpu_seconds=10.0)
  source = "import time\ndef improve(artefact, seconds, seed): time.sleep(60)\n"
  done = attempted(sandbox, source, limits)
  assert (done.artefact, done.status) == (None, "timeout")
  assert done.score.reason.endswith(" s: it printed nothing")


def test_a_long_message_keeps_its_end(sandbox):
  source = "def improve(artefact, seconds, seed): print('x' * 9000); raise ValueError('the end')\n"
  done = attempted(sandbox, source)
  assert len(done.message) == programs.MAX_MESSAGE
  assert done.message.endswith("ValueError: the end")


def test_a_text_without_a_program_is_an_attempt_too(sandbox):
  done = programs.attempt(
    sandbox, Product(), [0.5, 0.25, 0.125], "I give up.", seconds=1.0, seed=0, limits=LIMITS
  )
  assert (done.artefact, done.status, done.cpu_seconds) == (None, "malformed", 0.0)
  assert done.score.reason.startswith("malformed: got no block that begins with ```python")


@pytest.mark.parametrize("seconds", [0.0, -1.0, 20.0, math.nan, math.inf])
def test_seconds_beyond_the_limit_are_refused(sandbox, seconds):
  with pytest.raises(ValueError, match="expected 0 < seconds < limits.wall_seconds = 20.0"):
    programs.attempt(
      sandbox, Product(), [0.5], fenced(GOOD), seconds=seconds, seed=0, limits=LIMITS
    )


@pytest.mark.parametrize(
  ("artefact", "is_valid", "status"),
  [([1.0], False, "failed"), (None, True, "ok"), ([1.0], True, "failed"), (None, False, "ok")],
)
def test_an_attempt_that_contradicts_itself_is_refused(artefact, is_valid, status):
  valid = Score(is_valid=True, value=1.0, reward=1.0)
  score = valid if is_valid else environment.invalid("no")
  with pytest.raises(ValueError, match=f"Attempt: got status='{status}', is_valid={is_valid} and"):
    Attempt(artefact=artefact, score=score, status=status)


THINK = "Let me see.\n```python\nx = 1\n```\nNo.\n"
CLOSE = "</think>"


@pytest.mark.parametrize(
  ("tokens_used", "text", "marker", "needed", "is_notice", "ends_with"),
  [
    # The response stopped by itself, whatever its text.
    (99, "I give up.", "", False, True, ")\n\n"),
    (99, THINK, CLOSE, False, True, CLOSE),
    # It ran out of tokens.
    (100, "Let me see", "", True, True, ")\n\n"),
    (100, "Let me see", CLOSE, True, True, CLOSE),
    (100, fenced(GOOD), "", False, True, ")\n\n"),
    # A block within separate thinking is not an answer.
    (100, THINK, CLOSE, True, True, CLOSE),
    (100, THINK + CLOSE + fenced(GOOD), CLOSE, False, False, ""),
    # The answer has started, so it is continued.
    (100, THINK + CLOSE + "So:\n```python\ndef imp", CLOSE, True, False, ""),
    (100, THINK + CLOSE, CLOSE, True, False, ""),
    (100, "So:\n```python\ndef imp", "", True, False, ""),
    # Not within the thinking.
    (100, "So:\n```python\ndef imp", CLOSE, True, True, CLOSE),
  ],
)
def test_an_answer_is_forced_by_hand(tokens_used, text, marker, needed, is_notice, ends_with):
  assert programs.needs_answer(tokens_used, 100, text, answer_marker=marker) == needed
  forced = programs.forced_answer_text(text, answer_marker=marker)
  assert ("No tokens are left to think with" in forced) == is_notice
  assert forced.endswith(ends_with) and bool(forced) == is_notice


def test_the_budget_of_the_answer_by_hand():
  assert programs.answer_budget(1000, 700) == 250
  assert programs.answer_budget(1000, 949) == 1
  assert programs.answer_budget(1000, 1200) == 0
