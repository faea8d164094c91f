"""Grade-school word problems from the original JSON lines ({"question", "answer"}).

The data are not part of this package: give the path of the directory with train.jsonl and
test.jsonl, or of one file. A reference answer ends with "#### 1,234". A text's answer is read from,
in this order, its last "####", its last \\boxed{...}, and its last number.

Source: Cobbe et al. 2021, https://arxiv.org/abs/2110.14168; data under the MIT licence.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
import os
import pathlib
import re

from seerjax.tasks import base
from seerjax.types import Problem, Verdict

MAX_READ = 20_000  # Characters of a text's end that are searched for an answer.

# Digits in groups of three or in one run, decimals (also without a leading zero), or a fraction.
_NUMBER = re.compile(
  r"(?P<sign>-?[$€£]\s?-?|-)?"
  r"(?:(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.(?P<decimals>[0-9]+))?"
  r"|\.(?P<bare>[0-9]+))"
  r"(?:\s?/\s?(?P<denominator>[0-9]+))?",
  re.ASCII,
)
_LATEX_FRACTION = re.compile(
  r"(-?)\s*\\[dt]?frac\s*\{\s*(-?[0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}", re.ASCII
)
_BOXED = "\\boxed{"


def _numbers(text: str) -> list[Fraction]:
  """Returns every number in the text, in order; percent signs and units are passed over."""
  text = text[-MAX_READ:].replace("\u2212", "-").replace("\\$", "$").replace("\\%", "%")
  text = text.replace("{,}", ",").replace("\\!", "").replace("\\,", "")
  text = _LATEX_FRACTION.sub(lambda m: f"{m[1]}{m[2]}/{m[3]}".replace("--", ""), text)
  found = []
  for match in _NUMBER.finditer(text):
    # In "12-7" or "x-7" the sign is an operation, in "- 7" a bullet; neither is the number's own.
    before = text[max(0, match.start() - 1) : match.start()]
    is_negative = "-" in (match["sign"] or "") and not (before.isalnum() or before in tuple(")]}"))
    whole = (match["whole"] or "0").replace(",", "")
    decimals = match["decimals"] or match["bare"] or ""
    denominator = match["denominator"] or "1"
    if max(map(len, (whole, decimals, denominator))) > base.MAX_NUMBER_DIGITS:
      continue
    value = Fraction(int(whole + decimals), 10 ** len(decimals))
    if int(denominator):  # "5/0" is read as 5: a slash may be punctuation.
      value /= int(denominator)
    found.append(-value if is_negative else value)
  return found


def _last_boxed(text: str) -> str | None:
  """Returns what the last \\boxed{...} holds, braces balanced; None without one."""
  start = text.rfind(_BOXED)
  if start < 0:
    return None
  start += len(_BOXED)
  depth = 1
  for end in range(start, len(text)):
    depth += {"{": 1, "}": -1}.get(text[end], 0)
    if depth == 0:
      return text[start:end]
  return None


def extract(text: str) -> Fraction | None:
  """Returns the text's answer as an exact rational, or None if it holds no number.

  For example "so \\boxed{1{,}234}" is 1234, "#### -$3.50" is -7/2, "about 12.5% of it" is 25/2
  (a percent sign is a unit here, as it is in the reference answers).
  """
  text = text[-MAX_READ:]
  head, mark, tail = text.rpartition(base.ANSWER_MARK)
  if mark:
    # Only what stands on the mark's own line is the answer; chatter may follow.
    line = tail.strip().partition("\n")[0]
    boxed = _last_boxed(line)
    numbers = _numbers(line.rpartition("=")[2] if boxed is None else boxed)
    if numbers:
      return numbers[0]
    text = head
  boxed = _last_boxed(text)
  if boxed is not None:
    numbers = _numbers(boxed)
    if numbers:
      return numbers[-1]
  numbers = _numbers(text)
  return numbers[-1] if numbers else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gsm8k:
  """The task; see `load`.

  Attributes:
    train, heldout: problems in the order of their file.
  """

  train: tuple[Problem, ...]
  heldout: tuple[Problem, ...]
  name: str = "gsm8k"

  def _problems(self, split: str) -> tuple[Problem, ...]:
    if split == "train":
      return self.train
    if split == "heldout":
      return self.heldout
    raise base.unknown_split(self.name, split, ("train", "heldout"))

  def num_problems(self, split: str) -> int:
    """Returns how many problems the split has."""
    return len(self._problems(split))

  def problem(self, split: str, index: int) -> Problem:
    """Returns problem `index`, in the order of the file."""
    problems = self._problems(split)
    base.check_index(self.name, split, index, len(problems))
    return problems[index]

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Reward 1 if the text's answer equals the reference exactly; well formed if it has one."""
    value = extract(text)
    if value is None:
      return Verdict(reward=0.0, correct=False, well_formed=False)
    correct = value == Fraction(problem.answer)
    return Verdict(
      reward=float(correct), correct=correct, well_formed=True, answer=base.number_text(value)
    )


INSTRUCTION = (
  "Think step by step, and end with a line that says #### and then the answer as a number."
)


def _read(path: pathlib.Path, instruction: str) -> list[Problem]:
  problems = []
  for index, row in enumerate(base.read_rows(path, ("question", "answer"))):
    value = extract(row["answer"])
    if base.ANSWER_MARK not in row["answer"] or value is None:
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
        answer=base.number_text(value),
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
    instruction: said after every question, on a line of its own; "" for none.

  Raises:
    FileNotFoundError: naming the file that is missing.
    ValueError: naming the file and the line that cannot be used.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    train = _read(path / "train.jsonl", instruction)
    heldout = _read(path / "test.jsonl", instruction)
  else:
    train, heldout = base.split_rows(_read(path, instruction))
  return Gsm8k(train=tuple(train), heldout=tuple(heldout))
