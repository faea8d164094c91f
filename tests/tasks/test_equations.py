"""Equations found in a text, against results by hand."""

from __future__ import annotations

from fractions import Fraction

import hypothesis
from hypothesis import strategies as st
import pytest

from seerjax.tasks import answers, equations


@pytest.mark.parametrize(
  "text, expected",
  [
    ("12+7=19", [True]),
    ("12 + 7 = 19, so 19*2=39.", [True, False]),
    ("2+3*4=14", [True]),
    ("7/2=7/2 and 7/2=3.5", [True, True]),
    ("1/3=0.33", [False]),
    ("3+4=7+5=12", [False]),  # The first "=" decides.
    ("$5 \u00d7 1,200 = $6,000", [True]),
    ("5\u22127=-2", [True]),
    ("8/0=0", [False]),
    ("0.1+0.2=0.3", [True]),
    ("x2+3=5", []),
    ("2+3=5%", []),
    ("Ana has 19 pens.", []),
    ("a=b, 3=3", []),
    ("10-4=6 - that is all", [True]),
  ],
)
def test_what_is_stated_is_computed_again(text: str, expected: list[bool]):
  assert [equation.is_true for equation in equations.stated(text)] == expected


def test_false_ones_are_quoted():
  assert equations.false_ones("12+7=19\n19+1=21\n3*3=9") == ("19+1=21",)


@hypothesis.given(
  st.lists(st.integers(0, 10**6), min_size=2, max_size=6), st.data(), st.integers(-2, 2)
)
def test_sides_have_the_usual_order_of_signs(numbers: list[int], data, error: int):
  signs = data.draw(st.lists(st.sampled_from("+-*/"), min_size=5, max_size=5))
  side = str(numbers[0]) + "".join(f"{s}{n}" for s, n in zip(signs, numbers[1:], strict=False))
  exact = "".join(f"Fraction({part})" if part.isdigit() else part for part in _parts(side))
  try:
    value = eval(exact, {"Fraction": Fraction}) + error
  except ZeroDivisionError:
    assert [e.is_true for e in equations.stated(f"{side}=0")] == [False]
    return
  (equation,) = equations.stated(f"so {side}={answers.number_text(value)}.")
  assert equation.is_true == (error == 0)


def _parts(side: str) -> list[str]:
  spaced = "".join(c if c.isdigit() else f" {c} " for c in side)
  return spaced.split()


def test_a_long_text_takes_no_long_time():
  text = "1+" * 20_000 + "1"
  assert equations.stated(text) == ()
  (equation,) = equations.stated(text + "=3")  # Of its last terms only.
  assert not equation.is_true
