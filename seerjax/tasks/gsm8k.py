r"""GSM8K: grade-school word problems, from the original JSON lines ({"question", "answer"}).

The data are not part of this package: pass the directory with train.jsonl and test.jsonl, or one
file. A reference answer ends with "#### 1,234". The answer of a text is given by the first rule
that applies; a box is \boxed{...}:

| a text has                    | its answer is                                                    |
|-------------------------------|------------------------------------------------------------------|
| something after its last #### | on the first line there: in its last box, else after its last =, |
|                               | the first number; a unit may follow ("15 apples", "$1,234.50")   |
|  two numbers, and between     | none: lists, ranges and sums are not answers                     |
|  them only , : / or a sign    | ("13, 12", "10-12", "12 13", "5 + 7", "3 1/2")                   |
|  words without a number       | none, whatever came before ("nan", "the value above")            |
| something in its last box     | the only number in it, after its last = ("\boxed{x = 12}");      |
|                               | none if it has no number, or two                                 |
| neither                       | its last number                                                  |
|-------------------------------|------------------------------------------------------------------|
| a number may be               | for example                                                      |
| digits, or in groups of three | 1234, 1,234 and 1{,}234; but 12,5 and 1,00,000 are invalid       |
| with decimals                 | 12.50, .5 and "12." at the end of a sentence; 1.2.3 is invalid   |
| a fraction                    | 3/4, \frac{3}{4}; 5/0 and 1/2/3 are invalid                      |
| with a power of ten           | 12e3 is 12000                                                    |
| negative                      | -3, -$3.50 and $-3.50, also with a minus sign or a dash; but not |
|                               | after a letter, a digit or a bracket (12-7), or a space (- 7)    |
| with a unit                   | $, euro or pound or USD before it, a word or a unit after it:    |
|                               | 20%, 12 apples, 12eggs, 12cm, a 12-year-old                      |
| not                           | longer than 40 digits                                            |
|  part of another number       | 12^2, 12!, \sqrt{12}, 12\pi, 12x, x12, 12k, 12 million,          |
|                               | 12 dozen, 12th, 12_8, 12'000, 12-, twice 12, minus 12            |
|  a bound, approximate, negated| >12, at least 12, 12+, ~12, about 12, \approx 12, not 12, 12?    |
|  one of several               | 12 or 13, 12 and 13, 12 to 13, 12 minutes and 30 seconds         |

Text that looks like a number but is invalid counts as an unknown number; it is never truncated to a
valid part. Published graders look at digits only: the data set's own (equal text after "#### ",
commas aside) and the last number of a text (lm-evaluation-harness, "flexible-extract", which scores
12k and "not 12" as 12). Numbers that are plain to them are valid here: $1,234.00, "12." and units.

Source: Cobbe et al. 2021, https://arxiv.org/abs/2110.14168; data under the MIT licence.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
import os
import pathlib
import re

from seerjax.tasks import answers, built_in, jsonl, splits
from seerjax.types import Problem, Verdict

MAX_READ = 20_000  # Characters at the end of a text that are searched for an answer.

# Anything that looks like a number; `_value` parses it.
_NUMBER = re.compile(
  r"(?P<sign>-?[$\u20ac\u00a3]\s?-?|-)?"
  r"(?P<whole>\.?[0-9](?:[0-9.,]*[0-9])?)"
  r"(?:[eE](?P<power>[+-]?[0-9]+))?"
  r"(?P<denominators>(?:\s?/\s?[0-9]+)*)",
  re.ASCII,
)
_PLAIN = re.compile(r"([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)?(?:\.([0-9]+))?", re.ASCII)
_LATEX_FRACTION = re.compile(
  r"(-\s*)?\\[dt]?frac\s*\{\s*(-?[0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}", re.ASCII
)
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\u00b0")
# Hyphens, dashes and the minus sign.
_DASHES = re.compile("[\u2010-\u2015\u2212\ufe58\ufe63\uff0d]")
# Text between two numbers that makes them a list, range or sum, which is not an answer.
_JOINED = re.compile(
  r"[\s,;:/+*^&|\u00d7\u00f7\u2026-]*|\s*\\(?:times|cdot|div)\s*"
  r"|\s*(?:to|x|times|over|mod|through|divided\s+by|multiplied\s+by|vs\.?)\s+"
  r"|\s*(?:[a-z]+\s+)?(?:or|and|plus|minus)\s+",
  re.IGNORECASE,
)
_HEDGED = re.compile(r"\s*(?:[a-z]+\s+)?or\s+", re.IGNORECASE)
# Text before a number that is negated, approximate, bounded, or part of another number.
_BEFORE = re.compile(
  r"(?:[~\u2248\u2243\u2245\u00b1<\u2264\u2265\u2260^\u221a\u221b]|!(?==)|(?<![-=])>|(?<=[a-z}])_"
  r"|\\(?:approx|sim|pm|mp|neq?|not|geq?|leq?|gt|lt|sqrt|log|ln)(?![a-z])"
  r"|(?:\b(?:not|never|no|neither|nor|except|about|approximately|approx\.?|around|roughly"
  r"|nearly|almost|at\s+least|at\s+most|(?:more|less|fewer|greater|smaller)\s+than|over|under"
  r"|above|below|up\s+to|negative|minus|half|twice|double|triple|square\s+root|sqrt|log|ln)"
  r"|n['\u2019]t)(?:\s+(?:equal|equals|to|exactly|of|than|the|a|an|just|simply))*)[\s=$*({\[]*$",
  re.IGNORECASE,
)
# Text after such a number.
_BEHIND = re.compile(
  r"[!?^]|_(?=[0-9{])|[\s-]?(?:st|nd|rd|th)(?![a-z])|[-+](?![a-z-])|\s*[-+]\s*$|['\u2019][0-9]"
  r"|\s*(?:\\pi(?![a-z])|\\sqrt|\u03c0|\u221a|\u221b)"
  r"|\s*(?:k|thousand|hundred|mn|mio|mln|million|bn|billion|trillion|dozens?|score|squared|cubed"
  r"|factorial|pi|and\s+a\s+(?:half|third|quarter)|thirds|fifths|sixths|eighths|tenths|hundredths)"
  r"(?![a-z])",
  re.IGNORECASE,
)
_TAG = re.compile(r"<[^<>]{1,40}>")
# Letters directly before a number are a variable's name, unless they are a currency code. Letters
# directly after it must be a unit: a word, or one of these; 12k, 12x and 12th have none.
_CURRENCY = re.compile(r"(?<![a-zA-Z])(?:[A-Z]{2,3}|Rs)$")
_LETTERS = re.compile(r"[a-zA-Z]+")
_UNITS = frozenset(
  (
    "m", "cm", "mm", "km", "in", "ft", "yd", "mi", "g", "kg", "mg", "lb", "oz", "l", "L", "ml",
    "mL", "cl", "s", "h", "hr", "am", "pm", "c", "C", "F", "W", "kW", "V", "A", "J", "N", "Pa",
  )
)  # fmt: skip


def _value(match: re.Match[str]) -> Fraction | None:
  """Returns the value of a match; None if it is invalid."""
  text, parts = match.string, _PLAIN.fullmatch(match["whole"])
  is_short = len(match["power"] or "") < 5
  power = int(match["power"] or 0) if is_short else answers.MAX_NUMBER_DIGITS + 1
  denominators = [part.strip() for part in match["denominators"].split("/")[1:]]
  behind = text[match.end() : match.end() + 1]
  if parts is None or len(denominators) > 1 or abs(power) > answers.MAX_NUMBER_DIGITS:
    return None
  if behind.isnumeric() or _is_altered(match):
    return None
  whole, decimals = (parts[1] or "0").replace(",", ""), parts[2] or ""
  if max(map(len, (whole, decimals, *denominators))) > answers.MAX_NUMBER_DIGITS:
    return None
  value = Fraction(int(whole + decimals), 10 ** len(decimals)) * Fraction(10) ** power
  if denominators:
    if not int(denominators[0]):
      return None
    value /= int(denominators[0])
  # In "12-7" or "x-7" the sign is an operator, in "- 7" a bullet; it does not belong to the number.
  before = text[max(0, match.start() - 1) : match.start()]
  is_negative = "-" in (match["sign"] or "") and not (before.isalnum() or before in tuple(")]}"))
  return -value if is_negative else value


def _is_altered(match: re.Match[str]) -> bool:
  """Returns whether the surrounding text bounds or negates a number, or makes it another one."""
  text, has_currency = match.string, (match["sign"] or "-") != "-"
  before = _TAG.sub(" ", text[max(0, match.start() - 60) : match.start()]).rpartition("\n")[2]
  behind = text[match.end() : match.end() + 40].partition("\n")[0]
  if _BEFORE.search(before) or _BEHIND.match(behind):
    return True
  if before[-1:].isalpha() and not has_currency and not _CURRENCY.search(before):
    return True
  letters = _LETTERS.match(behind)
  return letters is not None and len(letters[0]) < 3 and (letters[0] not in _UNITS or has_currency)


def _plain(text: str) -> str:
  """Returns a text with uniform dashes, and without LaTeX markup around numbers."""
  text = _DASHES.sub("-", text).replace("\\$", "$").replace("\\%", "%")
  text = _DEGREES.sub("", text).replace("{,}", ",").replace("\\!", "").replace("\\,", "")
  return _LATEX_FRACTION.sub(
    lambda m: f"{(m[1] or '').strip()}{m[2]}/{m[3]}".replace("--", ""), text
  )


def _answer(text: str, *, is_boxed: bool) -> Fraction | None:
  """Returns the number in a text that consists of an answer."""
  head, mark, text = text.rpartition("=")
  if head.endswith(("<", ">", "!", "~")):  # Operators such as >= and !=.
    return None
  text = text.removeprefix(">") if mark else text  # The rest of an arrow, =>.
  found = list(_NUMBER.finditer(text))
  if not found or (is_boxed and len(found) > 1):
    return None
  if len(found) > 1 and _JOINED.fullmatch(text, found[0].end(), found[1].start()):
    return None
  return _value(found[0])


def extract(text: str) -> Fraction | None:
  """Returns the text's answer as an exact rational; None without one. See the table above."""
  head, mark, tail = _plain(text[-MAX_READ:]).rpartition(answers.ANSWER_MARK)
  line = tail.strip().partition("\n")[0]
  if mark and line:
    # Only the line of the mark is the answer; other text may follow.
    boxed = answers.last_boxed(line)
    return _answer(line if boxed is None else boxed, is_boxed=boxed is not None)
  text = head if mark else tail
  boxed = answers.last_boxed(text)
  if boxed is not None and boxed.strip():
    return _answer(boxed, is_boxed=True)
  found = list(_NUMBER.finditer(text))
  if len(found) > 1 and _HEDGED.fullmatch(text, found[-2].end(), found[-1].start()):
    return None
  return _value(found[-1]) if found else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gsm8k(splits.Splits):
  """Grade-school word problems as a task; see `load`."""

  name: str = "gsm8k"

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Returns reward 1 if the answer equals the reference exactly; well formed with any answer."""
    value = extract(text)
    if value is None:
      return answers.NO_ANSWER
    return answers.answered(answers.number_text(value), value == Fraction(problem.answer))


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
        prompt=splits.with_instruction(question, instruction),
        question=question,
        answer=answers.number_text(value),
        # The reference has a line per step, and a line with the answer.
        num_steps=len([line for line in row["answer"].split("\n") if line.strip()]) - 1,
        solution=row["answer"],
      )
    )
  return problems


def load(path: str | os.PathLike[str], *, instruction: str = INSTRUCTION) -> Gsm8k:
  """Reads the task.

  Args:
    path: directory with train.jsonl and test.jsonl ("heldout"), or one file; every tenth
      problem of it is held out.
    instruction: appended to every question on a separate line; "" for none.

  Raises:
    FileNotFoundError: if a file is missing; names it.
    ValueError: if a line is invalid; names file and line.
  """
  return Gsm8k(**splits.of_files(path, lambda file: _read(file, instruction)))


TASKS = {"gsm8k": built_in.Source(load, "the original JSON lines")}
