r"""Problems split into an early context and a late question, from a user's files.

| a file of                                    | has the keys                                      |
|----------------------------------------------|---------------------------------------------------|
| Stateful GSM-Symbolic P1, P2 (JSON lines)    | stateful_gsm_symbolic_context, _question; answer  |
| Stateful AIME (JSON lines)                   | stateful_aime_context, _question; answer          |
| GSM-Symbolic, GSM8K (JSON lines)             | question, answer; split before the asking part    |
| GSM-Symbolic's templates (a folder of .json) | question, answer: the instance they were made from|

Rows with equal contexts become questions about one context. The licences forbid redistributing a
split version, so the data are not part of this package. Files of the first two kinds were split at
every dot, even within decimals; `split_again` splits the row's whole `question` anew.

Source: Lin et al. 2025, https://arxiv.org/abs/2504.13171; Mirzadeh et al. 2024,
https://arxiv.org/abs/2410.05229.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import json
import os
import pathlib
import re
from typing import Any

from seerjax.tasks import answers, gsm8k, jsonl, splits, stateful
from seerjax.tasks.stateful import StatefulContext
from seerjax.types import Problem, Verdict

SPLIT = "test"  # A benchmark has no training split.
STATEFUL_KEYS = ("stateful_gsm_symbolic", "stateful_aime")
SLEEP_INSTRUCTION = (
  "Questions about this will come later. Work out now whatever may be useful for answering them:"
  " name every quantity that follows, and compute it."
)

_END = re.compile(r"[.!?][\"')\]\u2019\u201d]*(?=\s)")
_NEXT = re.compile(r"\s+[\"'(\[$\\\u2018\u201c]*[A-Z0-9]")
# Abbreviations with a dot that do not end a sentence.
_TITLES = ("mr", "mrs", "ms", "dr", "st", "vs", "prof", "approx", "e.g", "i.e")


def split_question(text: str) -> tuple[str, str]:
  """Splits a problem into (context, question), before the sentence that asks.

  This is the last sentence that ends with a question mark, with everything after it; the last
  sentence if there is none. Dots in decimals and after titles ("Mr. Lee") do not end a sentence.
  The context is "" if the first sentence asks.
  """
  text = text.strip()
  starts = [0]
  for match in _END.finditer(text):
    word = text[: match.start()].rsplit(None, 1)[-1:]
    is_title = match[0] == "." and word and word[0].lower().lstrip("(\"'") in _TITLES
    if not is_title and _NEXT.match(text, match.end()):
      starts.append(match.end())
  sentences = [text[a:b].strip() for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
  asks = [i for i, s in enumerate(sentences) if s.rstrip("\"')]\u2019\u201d").endswith("?")]
  start = starts[asks[-1] if asks else -1]
  return text[:start].strip(), text[start:].strip()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatefulFile:
  """Questions about contexts in a file, as a task; see `load`.

  Attributes:
    read: contexts with their questions, in the order of the file.
    left_out: a message for each row that was skipped because its first sentence asks.
    name: name of the task.
  """

  read: tuple[tuple[StatefulContext, tuple[Problem, ...]], ...]
  left_out: tuple[str, ...] = ()
  name: str = "stateful_file"

  def contexts(self, split: str) -> tuple[StatefulContext, ...]:
    """Returns the contexts of "test", which is the whole file.

    Raises:
      ValueError: for another split.
    """
    if split != SPLIT:
      raise splits.unknown_split(self.name, split, (SPLIT,))
    return tuple(context for context, _ in self.read)

  def questions(self, split: str, context: int) -> tuple[Problem, ...]:
    """Returns the questions about one context."""
    splits.check_index(self.name, split, context, len(self.contexts(split)))
    return self.read[context][1]

  def sleep_prompt(self, context: StatefulContext) -> str:
    """Returns the context with the instruction to prepare for questions."""
    return f"{context.text}\n{SLEEP_INSTRUCTION}"

  def facts(self, context: StatefulContext) -> str:
    """Returns "", because the facts are unknown."""
    return context.facts

  def wake_prompt(self, question: str, context: str = "", rewritten: str = "") -> str:
    """Returns known text, question and answer format."""
    prompt = stateful.joined_prompt(question, context, rewritten, joint="\n")
    return f"{prompt}\n{gsm8k.INSTRUCTION}"

  def num_problems(self, split: str) -> int:
    """Returns the number of questions."""
    return len(self._problems(split))

  def problem(self, split: str, index: int) -> Problem:
    """Returns question `index`, in the order of the contexts."""
    splits.check_index(self.name, split, index, self.num_problems(split))
    return self._problems(split)[index]

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Judges as in `gsm8k`: the number after the mark, in a box, or the last one."""
    value = gsm8k.extract(text)
    correct = value is not None and value == answers.read_number(problem.answer)
    return Verdict(
      reward=float(correct),
      correct=correct,
      well_formed=value is not None,
      answer="" if value is None else answers.number_text(value),
    )

  def _problems(self, split: str) -> tuple[Problem, ...]:
    self.contexts(split)
    return self._all_problems

  @functools.cached_property
  def _all_problems(self) -> tuple[Problem, ...]:
    return tuple(problem for _, problems in self.read for problem in problems)


def load(path: str | os.PathLike[str], *, split_again: bool = False) -> StatefulFile:
  """Reads a JSON-lines file, or a folder of GSM-Symbolic's templates.

  Args:
    path: path of the file or folder; see the table above.
    split_again: whether to split rows anew from their `question` even if they are split already.

  Raises:
    FileNotFoundError: if the path does not exist, or the folder has no templates.
    ValueError: if a row is invalid; names file and line.
  """
  path = pathlib.Path(path)
  rows = _templates(path) if path.is_dir() else _lines(path)
  found: dict[str, list[Problem]] = {}
  left_out = []
  for where, row in rows:
    context, question = _parts(where, row, split_again)
    if not context:
      left_out.append(f"{where}: got {question[:60]!r}, which has no context before it; left out.")
      continue
    problems = found.setdefault(context, [])
    problems.append(
      Problem(
        problem_id=f"{path.stem}-{len(found) - 1}-{len(problems)}",
        prompt=f"{context} {question}",
        context=context,
        question=question,
        answer=_answer(where, row),
        solution=str(row["answer"]),
      )
    )
  if not found:
    raise ValueError(
      f"{path}: got no row with a context, expected at least one ({left_out[0]}); choose another"
      " file."
    )
  return StatefulFile(
    read=tuple(
      (StatefulContext(context_id=f"{path.stem}-{i}", text=text), tuple(problems))
      for i, (text, problems) in enumerate(found.items())
    ),
    left_out=tuple(left_out),
    name=path.stem,
  )


def _lines(path: pathlib.Path) -> list[tuple[str, Mapping[str, Any]]]:
  """Returns (location, row) of each row."""
  rows = jsonl.read_rows(path, ())
  numbers = [
    number
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1)
    if line.strip()
  ]
  return [(f"{path}, line {number}", row) for number, row in zip(numbers, rows, strict=True)]


def _templates(path: pathlib.Path) -> list[tuple[str, Mapping[str, Any]]]:
  files = sorted(path.glob("*.json"))
  if not files:
    raise FileNotFoundError(
      f"{path}: got a folder without .json files, expected GSM-Symbolic's templates; name the"
      " folder 'symbolic', 'p1' or 'p2' itself, or a file of JSON lines."
    )
  found: list[tuple[str, Mapping[str, Any]]] = []
  for file in files:
    try:
      row = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
      raise ValueError(
        f"{file}: got a file that is not JSON ({error}), expected a template; repair or remove it."
      ) from error
    if not isinstance(row, dict):
      raise ValueError(
        f"{file}: got a JSON {type(row).__name__}, expected an object with 'question' and 'answer';"
        " repair or remove it."
      )
    found.append((str(file), row))
  return found


def _parts(where: str, row: Mapping[str, Any], split_again: bool) -> tuple[str, str]:
  """Returns (context, question) of a row; the context is "" if the question asks at once."""
  prefix = next((key for key in STATEFUL_KEYS if f"{key}_context" in row), "")
  if prefix and not split_again:
    context, question = (_text(where, row, f"{prefix}_{part}") for part in ("context", "question"))
    return context, question
  return split_question(_text(where, row, "question"))


def _text(where: str, row: Mapping[str, Any], key: str) -> str:
  if key not in row:
    raise ValueError(
      f"{where}: got the keys {tuple(sorted(row))}, expected {key!r} among them; see"
      " seerjax.tasks.stateful_files for the files that can be read."
    )
  value = row[key]
  # In these data, an empty context is a single dot.
  if not isinstance(value, str) or not value.strip(" .\n\t"):
    raise ValueError(
      f"{where}: got {key}={value!r}, expected a non-empty text; repair or remove that row."
    )
  return value.strip()


def _answer(where: str, row: Mapping[str, Any]) -> str:
  written = row.get("answer")
  is_number = isinstance(written, int) and not isinstance(written, bool)
  value = gsm8k.extract(str(written)) if is_number or isinstance(written, str) else None
  if value is None:
    raise ValueError(
      f"{where}: got answer={str(written)[-80:]!r}, expected a number, alone or after '####';"
      " repair or remove that row."
    )
  return answers.number_text(value)
