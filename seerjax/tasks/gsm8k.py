r"""Grade-school word problems from the original JSON lines ({"question", "answer"}).

The data are not part of this package: give the path of the directory with train.jsonl and
test.jsonl, or of one file. A reference answer ends with "#### 1,234". A text's answer is read by
these rules, the first that applies; a box is \boxed{...}:

| a text has                    | its answer is                                                    |
|-------------------------------|------------------------------------------------------------------|
| something after its last #### | of the first line there: of its last box, else after its last =, |
|                               | the first number, units may follow ("15 apples", "$1,234.50")    |
|  two numbers, and nothing but | none: lists, ranges and sums are no answer                       |
|  , : / or a sign between them | ("13, 12", "10-12", "12 13", "5 + 7", "3 1/2")                   |
|  words without a number       | none, whatever came before ("nan", "the value above")        |
| something in its last box     | the only number in it, after its last = ("\boxed{x = 12}");      |
|                               | none if it holds two, or none                                    |
| neither                       | its last number                                                  |
|-------------------------------|------------------------------------------------------------------|
| a number may be               | for example                                                      |
| digits, or in groups of three | 1234, 1,234 and 1{,}234; but 12,5 and 1,00,000 cannot be read    |
| with decimals                 | 12.50, .5 and "12." at a sentence's end; 1.2.3 cannot be read    |
| a fraction                    | 3/4, \frac{3}{4}; 5/0 is 5, 1/2/3 cannot be read                 |
| with a power of ten           | 12e3 is 12000                                                    |
| negative                      | -3, -$3.50 and $-3.50, also with a minus sign or a dash; but not |
|                               | after a letter, a digit or a bracket (12-7), or a space (- 7)    |
| with a unit                   | $, euro or pound before it, anything behind: 20% is 20           |
| not                           | raised to a power or with a sign of a fraction behind it, or     |
|                               | longer than 40 digits                                            |

What looks like a number and cannot be read is an unknown number: it is never cut to what can.

Source: Cobbe et al. 2021, https://arxiv.org/abs/2110.14168; data under the MIT licence.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
import os
import pathlib
import re

from seerjax.tasks import answers, jsonl, splits
from seerjax.types import Problem, Verdict

MAX_READ = 20_000  # Characters of a text's end that are searched for an answer.

# Whatever looks like a number; `_value` says which it is.
_NUMBER = re.compile(
  r"(?P<sign>-?[$\u20ac\u00a3]\s?-?|-)?"
  r"(?P<whole>\.?[0-9](?:[0-9.,]*[0-9])?)"
  r"(?:[eE](?P<power>[+-]?[0-9]+))?"
  r"(?P<denominators>(?:\s?/\s?[0-9]+)*)",
  re.ASCII,
)
_PLAIN = re.compile(r"([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)?(?:\.([0-9]+))?", re.ASCII)
_LATEX_FRACTION = re.compile(
  r"(-?)\s*\\[dt]?frac\s*\{\s*(-?[0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}", re.ASCII
)
# Hyphens, dashes and the minus sign.
_DASHES = re.compile("[\u2010-\u2015\u2212\ufe58\ufe63\uff0d]")
# All that stands between two numbers which together are no answer.
_JOINED = re.compile(r"[\s,;:/+*^\u00d7\u00f7-]*|\s*\\(?:times|cdot|div)\s*")


def _value(match: re.Match[str]) -> Fraction | None:
  """Returns what looks like a number as one, None if it cannot be read."""
  text, parts = match.string, _PLAIN.fullmatch(match["whole"])
  is_short = len(match["power"] or "") < 5
  power = int(match["power"] or 0) if is_short else answers.MAX_NUMBER_DIGITS + 1
  denominators = [part.strip() for part in match["denominators"].split("/")[1:]]
  behind = text[match.end() : match.end() + 1]
  if parts is None or len(denominators) > 1 or abs(power) > answers.MAX_NUMBER_DIGITS:
    return None
  if behind == "^" or behind.isnumeric():
    return None
  whole, decimals = (parts[1] or "0").replace(",", ""), parts[2] or ""
  if max(map(len, (whole, decimals, *denominators))) > answers.MAX_NUMBER_DIGITS:
    return None
  value = Fraction(int(whole + decimals), 10 ** len(decimals)) * Fraction(10) ** power
  if denominators and int(denominators[0]):  # A slash may be punctuation.
    value /= int(denominators[0])
  # In "12-7" or "x-7" the sign is an operation, in "- 7" a bullet; neither is the number's own.
  before = text[max(0, match.start() - 1) : match.start()]
  is_negative = "-" in (match["sign"] or "") and not (before.isalnum() or before in tuple(")]}"))
  return -value if is_negative else value


def _plain(text: str) -> str:
  """Returns a text with one kind of dash, and without the dress of LaTeX around numbers."""
  text = _DASHES.sub("-", text).replace("\\$", "$").replace("\\%", "%")
  text = text.replace("{,}", ",").replace("\\!", "").replace("\\,", "")
  return _LATEX_FRACTION.sub(lambda m: f"{m[1]}{m[2]}/{m[3]}".replace("--", ""), text)


def _answer(text: str, *, is_boxed: bool) -> Fraction | None:
  """Returns the one number of a text that is all answer."""
  text = text.rpartition("=")[2]
  found = list(_NUMBER.finditer(text))
  if not found or (is_boxed and len(found) > 1):
    return None
  if len(found) > 1 and _JOINED.fullmatch(text, found[0].end(), found[1].start()):
    return None
  return _value(found[0])


def extract(text: str) -> Fraction | None:
  """Returns the text's answer as an exact rational, or None if it has none; see the table above."""
  head, mark, tail = _plain(text[-MAX_READ:]).rpartition(answers.ANSWER_MARK)
  line = tail.strip().partition("\n")[0]
  if mark and line:
    # Only what stands on the mark's own line is the answer; chatter may follow.
    boxed = answers.last_boxed(line)
    return _answer(line if boxed is None else boxed, is_boxed=boxed is not None)
  text = head if mark else tail
  boxed = answers.last_boxed(text)
  if boxed is not None and boxed.strip():
    return _answer(boxed, is_boxed=True)
  found = list(_NUMBER.finditer(text))
  return _value(found[-1]) if found else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gsm8k(splits.Splits):
  """The task; see `load`."""

  name: str = "gsm8k"

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Reward 1 if the text's answer equals the reference exactly; well formed if it has one."""
    value = extract(text)
    if value is None:
      return Verdict(reward=0.0, correct=False, well_formed=False)
    correct = value == Fraction(problem.answer)
    return Verdict(
      reward=float(correct), correct=correct, well_formed=True, answer=answers.number_text(value)
    )


INSTRUCTION = (
  "Think step by step, and end with a line that says #### and then the answer as a number."
)


def _read(path: pathlib.Path, instruction: str) -> list[Problem]:
  problems = []
  for index, row in enumerate(jsonl.read_rows(path, ("question", "answer"))):
    value = extract(row["answer"])
    if answers.ANSWER_MARK not in row["answer"] or value is None:
      raise ValueError(
        f"{path}, row {index + 1}: got the answer {row['answer'][-80:]!r}, expected it to end with"
        " '#### <number>'; use the original files, or repair that row."
      )
    question = row["question"].strip()
    problems.append(
      Problem(
        problem_id=f"gsm8k-{path.stem}-{index}",
        prompt=f"{question}\n{instruction}" if instruction else question,
        question=question,
        answer=answers.number_text(value),
        # The reference has one step a line, and the answer's line.
        num_steps=len([line for line in row["answer"].split("\n") if line.strip()]) - 1,
        solution=row["answer"],
      )
    )
  return problems


def load(path: str | os.PathLike[str], *, instruction: str = INSTRUCTION) -> Gsm8k:
  """Reads the task.

  Args:
    path: a directory with train.jsonl and test.jsonl (which is "heldout"), or one file, of which
      every tenth problem is held out.
    instruction: added after every question, on a line of its own; "" for none.

  Raises:
    FileNotFoundError: naming the file that is missing.
    ValueError: naming the file and the line that cannot be used.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    train = _read(path / "train.jsonl", instruction)
    heldout = _read(path / "test.jsonl", instruction)
  else:
    train, heldout = splits.split_rows(_read(path, instruction))
  return Gsm8k(train=tuple(train), heldout=tuple(heldout))
