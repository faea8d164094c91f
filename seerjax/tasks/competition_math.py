r"""MATH: competition mathematics with answers in \boxed{...}, from a user's files.

  {"problem": ..., "solution": "... \\boxed{\\frac{1}{2}}", "level": ..., "type": ...}

A directory has the published layout, train/<subject>/<number>.json and the same for test, or
train.jsonl and test.jsonl ("heldout"); of a single JSON-lines file every tenth problem is held out.
The reference is a row's "answer" if it has one, else the last box of its solution; rows with
neither are skipped and logged. The data are not part of this package.

The answer of a text is its last box: \boxed{9}, \fbox{9}, or \boxed 9 up to the end of the formula.
It is correct if it has the same normal form or the same value as the reference:

| ignored                               | for example                                              |
|---------------------------------------|----------------------------------------------------------|
| white space, \left, \right, \!, $, ~  | "(0, 1)" is "(0,1)" and "\left(0,1\right)"               |
| kind of fraction, missing braces      | \dfrac, \tfrac, \frac12 are \frac{1}{2}; \sqrt3 \sqrt{3} |
| units, degrees, per cent              | 5\text{ cm}, 90^\circ, 50\%                              |
| the name of the result                | "x = 3" is 3                                             |
| a dot at the end                      | "3." is 3                                                |
|---------------------------------------|----------------------------------------------------------|
| compared by exact value               | 1,234; 0.5; 1/2; \frac{1}{2}; -\frac{1}{2}; .5           |
| compared as lists                     | (a, b), [a, b), \{a, b\}: by member; "a, b" and sets     |
|                                       | in any order                                             |

Nothing is computed or simplified: 1+x is not x+1, 2^3 not 8, a mixed number not its fraction.

Source: Hendrycks et al. 2021, https://arxiv.org/abs/2103.03874; data under the MIT licence.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
import json
import os
import pathlib
import re
from typing import Any

from absl import logging

from seerjax.tasks import answers, built_in, jsonl, splits
from seerjax.tasks.file_task import FileTask
from seerjax.types import Problem, Verdict

FOLDERS = ("train", "test")
INSTRUCTION = "Think step by step, and put the final answer into \\boxed{}."
MAX_READ = 20_000  # Characters at the end of a text that are searched for an answer.
MAX_ANSWER = 1_000  # Characters of an answer; longer ones are wrong.
MAX_NAMED = 5  # Rows without an answer that are named in the log.
_DROPPED = re.compile(
  r"\\(?:left|right|displaystyle)(?![a-zA-Z])|(?<!\\)\\[!,;: ]|\\?\$|~|\s+|\^\{?\\circ\}?|\\?%"
)
_FRACTIONS = re.compile(r"\\[dtc]?frac(?![a-zA-Z])")
_UNIT = re.compile(r"(?<=[0-9}])\\(?:text|mbox|mathrm)\{[^{}]*\}(?:\^\{?[0-9]\}?)?$")
_WORDS = re.compile(r"\\(?:text|mbox|mathrm|textbf)\{([^{}]*)\}")
_CALLED = re.compile(r"^[a-zA-Z](?:\([a-zA-Z]\))?=")
_GROUPED = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?", re.ASCII)
_FRACTION = re.compile(r"(-?)\\frac\{(-?[0-9.]+)\}\{(-?[0-9.]+)\}", re.ASCII)
_OPENING, _CLOSING = "([{", ")]}"


def normal_form(answer: str) -> str:
  """Returns the normal form of an answer; see the table above."""
  # Strip units and words before white space, because "\\text{ cm}" starts with it.
  text = _UNIT.sub("", answer.strip().rstrip(".").strip())
  text = _WORDS.sub(r"\1", text)
  text = text.replace("{,}", ",").replace("\\{", "\\lbrace ").replace("\\}", "\\rbrace ")
  text = _DROPPED.sub("", text.replace("\\lbrace ", "\\{").replace("\\rbrace ", "\\}"))
  text = text.replace("\u2212", "-")
  text = _braced(_FRACTIONS.sub(r"\\frac", text), "\\frac", 2)
  text = _braced(text, "\\sqrt", 1)
  return _CALLED.sub("", text)


def _braced(text: str, command: str, count: int) -> str:
  """Adds braces to arguments of a command that are a single character."""
  head, *rest = text.split(command)
  for part in rest:
    found, left = "", part
    for _ in range(count):
      if left[:1].isalnum():
        found, left = f"{found}{{{left[0]}}}", left[1:]
      elif left[:1] == "{" and (end := _group_end(left)):
        found, left = found + left[:end], left[end:]
      else:
        break
    head += command + found + left
  return head


def _group_end(text: str) -> int:
  """Returns the end of the brace group at the start of a text; 0 if it is unclosed."""
  depth = 0
  for place, sign in enumerate(text):
    depth += {"{": 1, "}": -1}.get(sign, 0)
    if depth == 0:
      return place + 1
  return 0


def exact(text: str) -> Fraction | None:
  """Returns the exact value of a normal form that is a single number, else None."""
  if _GROUPED.fullmatch(text):
    text = text.replace(",", "")
  sign = -1 if text.startswith("-") else 1
  text = text.removeprefix("-")
  match = _FRACTION.fullmatch(text)
  if match is None:
    value = answers.read_number(f"0{text}" if text.startswith(".") else text)
    return None if value is None or text.startswith(("-", "+")) else sign * value
  above, below = answers.read_number(match[2]), answers.read_number(match[3])
  if above is None or below is None or below == 0:
    return None
  return sign * (-1 if match[1] else 1) * above / below


def _members(text: str) -> tuple[str, str, list[str]] | None:
  """Returns (opening bracket, closing bracket, members) of a list; None if it is not a list."""
  opening = closing = ""
  for left, right in (("\\{", "\\}"), ("(", ")"), ("(", "]"), ("[", ")"), ("[", "]")):
    inner = text[len(left) : len(text) - len(right)]
    if text.startswith(left) and text.endswith(right) and _lowest(inner) >= 0:
      opening, closing, text = left, right, inner
      break
  members, depth, start = [], 0, 0
  for place, sign in enumerate(text):
    depth += (sign in _OPENING) - (sign in _CLOSING)
    if sign == "," and depth == 0:
      members.append(text[start:place])
      start = place + 1
  members.append(text[start:])
  return (opening, closing, members) if len(members) > 1 or opening == "\\{" else None


def _lowest(text: str) -> int:
  """Returns the lowest bracket depth in a text; negative if it closes a bracket from outside."""
  depth = lowest = 0
  for sign in text:
    depth += (sign in _OPENING) - (sign in _CLOSING)
    lowest = min(lowest, depth)
  return lowest


def are_equal(one: str, other: str) -> bool:
  """Returns whether two answers are equal; see the table above."""
  if max(len(one), len(other)) > MAX_ANSWER:
    return False
  return _are_equal(normal_form(one), normal_form(other))


def _are_equal(one: str, other: str) -> bool:
  """Compares two normal forms."""
  if one == other:
    return bool(one)
  values = exact(one), exact(other)
  if None not in values:
    return values[0] == values[1]
  first, second = _members(one), _members(other)
  if first is None or second is None or first[:2] != second[:2]:
    return False
  opening, ours, theirs = first[0], first[2], second[2]
  if len(ours) != len(theirs):
    return False
  if opening in ("", "\\{"):  # In any order: match each member once.
    left = list(theirs)
    for member in ours:
      place = next((i for i, found in enumerate(left) if _are_equal(member, found)), None)
      if place is None:
        return False
      del left[place]
    return True
  return all(map(_are_equal, ours, theirs))


def verdict(problem: Problem, text: str) -> Verdict:
  """Returns reward 1 if the text's last box equals the reference; well formed if it has a box."""
  boxed = answers.last_boxed(text[-MAX_READ:])
  if boxed is None or not boxed.strip():
    return answers.NO_ANSWER
  return answers.answered(boxed.strip(), are_equal(boxed, problem.answer))


def load(path: str | os.PathLike[str], *, instruction: str = INSTRUCTION) -> FileTask:
  """Reads the task.

  Args:
    path: a directory, or one JSON-lines file; see above.
    instruction: appended to every problem on a separate line; "" for none.

  Raises:
    FileNotFoundError: if a file or folder is missing; names it.
    ValueError: if a line is invalid; names file and line.
  """
  found = splits.of_files(path, lambda part: _read(part, instruction), FOLDERS)
  return FileTask(name="math", **found, judge=verdict)


def _read(folder: pathlib.Path, instruction: str) -> list[Problem]:
  """Reads a folder with a folder per subject, else the JSON-lines file of that name."""
  if not folder.is_dir():
    lines = folder.with_suffix(".jsonl") if folder.name in FOLDERS else folder
    return _read_lines(lines, instruction)
  files = sorted(folder.glob("*/*.json"), key=lambda file: (file.parent.name, len(file.stem), file))
  if not files:
    raise FileNotFoundError(
      f"{folder}: got no <subject>/<number>.json, expected the published folders; set"
      " --config.task_path to the folder that holds train/ and test/."
    )
  return _with_answers(
    folder,
    {f"{file.parent.name}/{file.name}": _single(file, instruction) for file in files},
  )


def _with_answers(path: pathlib.Path, found: Mapping[str, Problem | None]) -> list[Problem]:
  """Returns the problems, and logs the names of rows without an answer.

  Raises:
    ValueError: if no row has an answer.
  """
  problems = [problem for problem in found.values() if problem is not None]
  missing = [name for name, problem in found.items() if problem is None]
  if missing:
    more = f" and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
    line = (
      f"{path}: got {len(missing)} of {len(found)} rows without an answer ('answer', or a solution"
      f" with \\boxed{{...}}): {', '.join(missing[:MAX_NAMED])}{more}"
    )
    if not problems:
      raise ValueError(f"{line}, expected at least one; use the original files.")
    logging.warning("%s. They are left out.", line)
  return problems


def _single(path: pathlib.Path, instruction: str) -> Problem | None:
  """Reads a file with a single JSON object, which may span several lines."""
  try:
    row = json.loads(path.read_bytes())
  except (ValueError, RecursionError) as error:
    raise ValueError(
      f"{path}: got text that is not JSON ({error}), expected one JSON object; repair or remove"
      " that file."
    ) from error
  if not isinstance(row, dict):
    raise ValueError(
      f"{path}: got a JSON {type(row).__name__}, expected an object with 'problem' and 'solution';"
      " repair or remove that file."
    )
  return _problem(str(path), f"math-{path.parent.name}-{path.stem}", row, instruction)


def _read_lines(path: pathlib.Path, instruction: str) -> list[Problem]:
  """Reads a JSON-lines file."""
  return _with_answers(
    path,
    {
      f"line {number}": _problem(
        f"{path}, line {number}", f"math-{path.stem}-{number}", row, instruction
      )
      for number, row in jsonl.numbered_rows(path, ("problem",))
    },
  )


def _problem(where: str, name: str, row: dict[str, Any], instruction: str) -> Problem | None:
  """Returns the problem of a row, or None if it has no answer; rejects values that are not text."""
  asked, solution, answer = (row.get(key, "") for key in ("problem", "solution", "answer"))
  if isinstance(answer, int) and not isinstance(answer, bool):
    answer = str(answer)  # The AIME data have integers.
  is_text = all(isinstance(value, str) for value in (asked, solution, answer))
  if not is_text or not asked.strip():
    raise ValueError(
      f"{where}: got problem={str(asked)[:40]!r}, the answer {str(answer)[:40]!r} and a solution"
      f" that ends with {str(solution)[-40:]!r}, expected a text and an answer, or a solution with"
      " \\boxed{...}; use the original files, or repair that row."
    )
  reference = str(answer).strip() or (answers.last_boxed(solution) or "").strip()
  if not reference:
    return None
  question = asked.strip()
  return Problem(
    problem_id=name,
    prompt=splits.with_instruction(question, instruction),
    question=question,
    answer=reference,
    solution=solution,
  )


TASKS = {"math": built_in.Source(load, "the published folders or JSON lines")}
