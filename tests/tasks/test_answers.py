"""Numbers in texts, and their verdicts."""

from __future__ import annotations

from fractions import Fraction

import hypothesis
from hypothesis import strategies as st
import pytest

from seerjax.tasks import answers
from seerjax.types import Problem


@pytest.mark.parametrize(
  ("text", "value"),
  [
    ("12", Fraction(12)),
    (" -3 ", Fraction(-3)),
    ("+4", Fraction(4)),
    ("7/2", Fraction(7, 2)),
    ("14/4", Fraction(7, 2)),
    ("0.25", Fraction(1, 4)),
    ("007", Fraction(7)),
    ("7/0", None),
    ("1e5", None),
    ("1_000", None),
    ("١٢", None),
    ("", None),
    ("- 3", None),
    ("9" * 41, None),
    ("9" * 10_000, None),
    ("1/" + "9" * 10_000, None),
  ],
)
def test_reads_numbers(text, value):
  assert answers.read_number(text) == value


@hypothesis.given(st.fractions())
def test_number_text_reads_back(value):
  hypothesis.assume(len(str(abs(value.numerator))) <= 40 and len(str(value.denominator)) <= 40)
  assert answers.read_number(answers.number_text(value)) == value


@pytest.mark.parametrize(
  ("text", "reward", "well_formed"),
  [
    ("12+7=19\n#### 19", 1.0, True),
    ("#### 19 \n", 1.0, True),
    ("#### 38/2", 1.0, True),
    ("#### 19.0", 1.0, True),
    ("#### 20", 0.0, True),
    ("19", 0.0, False),
    ("", 0.0, False),
    ("####", 0.0, False),
    ("#### 19\n#### 19", 0.0, False),
    ("#### 19 and more", 0.0, False),
    ("##### 19", 0.0, False),
    ("#### 1\x009", 0.0, False),
    ("#### １９", 0.0, False),
  ],
)
def test_number_verdict_by_hand(text, reward, well_formed):
  verdict = answers.number_verdict(Problem(problem_id="p", prompt="?", answer="19"), text)
  assert (verdict.reward, verdict.well_formed) == (reward, well_formed)
  assert verdict.correct == (reward == 1.0)


@hypothesis.given(st.text(max_size=200), st.text("0123456789-/.# \n\x00", max_size=300))
def test_number_verdict_never_raises(words, digits):
  problem = Problem(problem_id="p", prompt="?", answer="19")
  for text in (words, digits, f"{words}#### {digits}", "#### " + digits * 40):
    verdict = answers.number_verdict(problem, text)
    assert verdict.reward in (0.0, 1.0)
    assert verdict.well_formed or not verdict.correct
