"""Parses the number that a text gives as its answer, and compares it exactly."""

from __future__ import annotations

from fractions import Fraction
import re

from seerjax.types import Problem, Verdict

ANSWER_MARK = "####"  # Precedes the final answer, as in GSM8K.
NO_ANSWER = Verdict(reward=0.0, correct=False, well_formed=False)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])[^\S\n]*")
_FORMULA_END = re.compile(r"\$|\\[)\]]|\n")
MAX_NUMBER_DIGITS = 40  # Longer numbers are invalid; Python itself refuses more than 4,300 digits.
_NUMBER = re.compile(r"([+-]?)([0-9]+)(?:\.([0-9]+)|/([0-9]+))?", re.ASCII)


def read_number(text: str) -> Fraction | None:
  """Parses a text that is a number: "12", "-3", "+4", "7/2", "0.25" in ASCII digits.

  Returns None for anything else, a zero denominator, and parts of more than `MAX_NUMBER_DIGITS`
  digits.
  """
  match = _NUMBER.fullmatch(text.strip())
  if match is None:
    return None
  sign, whole, decimals, denominator = match.groups()
  if any(len(part or "") > MAX_NUMBER_DIGITS for part in (whole, decimals, denominator)):
    return None
  value = Fraction(int(whole))
  if decimals is not None:
    value += Fraction(int(decimals), 10 ** len(decimals))
  if denominator is not None:
    if int(denominator) == 0:
      return None
    value /= int(denominator)
  return -value if sign == "-" else value


def number_text(value: Fraction | int) -> str:
  """Returns "19" or "7/2": the shortest exact form, which `read_number` parses back."""
  value = Fraction(value)
  if value.denominator == 1:
    return str(value.numerator)
  return f"{value.numerator}/{value.denominator}"


def marked_answer(text: str) -> str | None:
  """Returns the text after the answer mark; None if there is not exactly one mark."""
  if text.count(ANSWER_MARK) != 1:
    return None
  return text.partition(ANSWER_MARK)[2].strip()


def last_boxed(text: str) -> str | None:
  r"""Returns the content of the last \boxed or \fbox of a text; None if there is none.

  The content is a brace group or, without braces, everything up to the end of the formula or line,
  as published graders parse "$\boxed 9$".
  """
  boxes = list(_BOX.finditer(text))
  if not boxes:
    return None
  start = boxes[-1].end()
  if text[start : start + 1] != "{":
    end = _FORMULA_END.search(text, start)
    return text[start : end.start() if end else len(text)].strip().rstrip(".,;")
  depth = 0
  for end in range(start, len(text)):
    depth += {"{": 1, "}": -1}.get(text[end], 0)
    if depth == 0:
      return text[start + 1 : end]
  return None


def number_verdict(problem: Problem, text: str) -> Verdict:
  """Judges a text that must have exactly one "#### <number>"; never raises.

  The reward is 1 if the number equals `problem.answer` as an exact rational, else 0.
  """
  answer = marked_answer(text)
  value = None if answer is None else read_number(answer)
  if value is None:
    return NO_ANSWER
  return answered(number_text(value), value == read_number(problem.answer))


def answered(answer: str, correct: bool) -> Verdict:
  """Returns the verdict of a well-formed answer: reward 1 if it is correct, else 0."""
  return Verdict(reward=float(correct), correct=correct, well_formed=True, answer=answer)
