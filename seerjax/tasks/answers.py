"""Reads the number that a text gives as its answer, and judges it exactly."""

from __future__ import annotations

from fractions import Fraction
import re

from seerjax.types import Problem, Verdict

ANSWER_MARK = "####"  # GSM8K's mark of the final answer; ours too.
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])[^\S\n]*")
_FORMULA_END = re.compile(r"\$|\\[)\]]|\n")
MAX_NUMBER_DIGITS = 40  # Longer runs of digits are no answer; Python refuses past 4,300 anyway.
_NUMBER = re.compile(r"([+-]?)([0-9]+)(?:\.([0-9]+)|/([0-9]+))?", re.ASCII)


def read_number(text: str) -> Fraction | None:
  """Returns the number that `text` is, or None: "12", "-3", "+4", "7/2", "0.25" in ASCII digits.

  Anything else, a zero denominator, and more than `MAX_NUMBER_DIGITS` digits in a part are None.
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
  """Returns "19" or "7/2": the shortest exact form, which `read_number` reads back."""
  value = Fraction(value)
  if value.denominator == 1:
    return str(value.numerator)
  return f"{value.numerator}/{value.denominator}"


def marked_answer(text: str) -> str | None:
  """Returns what follows the one answer mark, or None if there is no mark or more than one."""
  if text.count(ANSWER_MARK) != 1:
    return None
  return text.partition(ANSWER_MARK)[2].strip()


def last_boxed(text: str) -> str | None:
  r"""Returns what the last \boxed or \fbox of a text holds; None without one.

  It holds a group, braces balanced, or without one what follows up to the end of the formula or of
  the line, as published graders read "$\boxed 9$".
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
  """Judges a text that must end with exactly one "#### <number>"; never raises.

  Reward 1 if that number equals `problem.answer` as an exact rational, else 0.
  """
  answer = marked_answer(text)
  value = None if answer is None else read_number(answer)
  if value is None:
    return Verdict(reward=0.0, correct=False, well_formed=False)
  correct = value == read_number(problem.answer)
  return Verdict(
    reward=float(correct), correct=correct, well_formed=True, answer=number_text(value)
  )
