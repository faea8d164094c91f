"""Finds the equations in a text, and checks each by exact arithmetic.

  "Ana has 12+7=19 pens, 19 * 2 = 40 in all."   12+7=19 is true, 19 * 2 = 40 is false

An equation has numbers on both sides of "=", and at least one operation on the left. Numbers may
have decimals, thousands separators ("1,200") and a dollar sign; * / + - and their typographic forms
have the usual precedence. Results must be exact: 1/3=0.33 is false.
"""

from __future__ import annotations

from fractions import Fraction
import re
from typing import NamedTuple

from seerjax.tasks import answers

MAX_TERMS = 16  # On one side; of a longer side only the last terms are read.

_NUMBER = r"\$?[0-9]{1,40}(?:,[0-9]{3})*(?:\.[0-9]{1,40})?"
_SIGN = r"[-+*/\u00d7\u00f7\u2212]"
_EQUATION = re.compile(
  rf"(?<![\w.,$])({_NUMBER}(?:[ ]?{_SIGN}[ ]?{_NUMBER}){{1,{MAX_TERMS}}})[ ]?=[ ]?"
  rf"([-\u2212]?{_NUMBER}(?:{_SIGN}{_NUMBER}){{0,{MAX_TERMS}}})(?![\w%])",
  re.ASCII,
)
_PARTS = re.compile(rf"{_NUMBER}|{_SIGN}", re.ASCII)
_PLAIN = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-", "$": None, ",": None})


class Equation(NamedTuple):
  """An equation in a text.

  Attributes:
    text: the equation as written.
    is_true: whether both sides are equal; false if a side divides by zero.
  """

  text: str
  is_true: bool


def stated(text: str) -> tuple[Equation, ...]:
  """Returns the equations in a text, in order; never raises."""
  found = []
  for match in _EQUATION.finditer(text):
    left, right = (_value(side.translate(_PLAIN)) for side in match.groups())
    found.append(Equation(match[0], left is not None and left == right))
  return tuple(found)


def false_ones(text: str) -> tuple[str, ...]:
  """Returns the false equations of a text."""
  return tuple(equation.text for equation in stated(text) if not equation.is_true)


def _value(side: str) -> Fraction | None:
  """Returns the value of a side; None if it divides by zero or a number is too long."""
  terms, sign = [Fraction(0)], "+"
  if side.startswith("-"):
    side, sign = side[1:], "-"
  for part in _PARTS.findall(side):
    if part in "+-*/":
      sign = part
      continue
    number = answers.read_number(part)
    if number is None or (sign == "/" and number == 0):
      return None
    if sign == "*":
      terms[-1] *= number
    elif sign == "/":
      terms[-1] /= number
    else:
      terms.append(number if sign == "+" else -number)
  return sum(terms, Fraction(0))
