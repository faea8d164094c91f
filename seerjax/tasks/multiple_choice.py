r"""Multiple-choice questions: MMLU and CommonsenseQA, from a user's files.

| a file of                                         | has                                          |
|---------------------------------------------------|----------------------------------------------|
| MMLU: CSV without a header, one question per line | question, four choices, "A" to "D"           |
| CommonsenseQA: JSON lines                         | {"question": {"stem", "choices":             |
|                                                   | [{"label", "text"}, ...]}, "answerKey"}, or  |
|  in the format of Hugging Face                    | {"question", "choices": {"label": [...],     |
|                                                   | "text": [...]}, "answerKey"}                 |

Directories have the published layout. For MMLU, train is auxiliary_train/*.csv, dev/*.csv and
val/*.csv, as far as they exist, and heldout is test/*.csv. For CommonsenseQA, train is
train_rand_split.jsonl and heldout dev_rand_split.jsonl, because the answers of the test set are not
public. Of a single file every tenth question is held out. The data are not part of this package.

The answer of a text is the letter after its last "####", else in its last \boxed{...}, else after
its last "answer is" or "answer:"; a letter may stand alone, in brackets or before one: "B", "(B)",
"B)", "B. Paris". A text that consists of a letter only is also an answer.

Source: Hendrycks et al. 2021, https://arxiv.org/abs/2009.03300; Talmor et al. 2019,
https://arxiv.org/abs/1811.00937. Both data sets are under the MIT licence.
"""

from __future__ import annotations

from collections.abc import Sequence
import csv
import functools
import os
import pathlib
import re
from typing import Any

from seerjax.tasks import answers, built_in, jsonl, splits
from seerjax.tasks.file_task import FileTask
from seerjax.types import Problem, Verdict

LETTERS = "ABCDEFGHIJ"
INSTRUCTION = "End with a line that says #### and then the letter of the right choice."
MAX_READ = 20_000  # Characters at the end of a text that are searched for an answer.
MMLU_TRAIN = ("auxiliary_train", "dev", "val")  # Folders of .csv files.
MMLU_CHOICES = 4
CSQA_FILES = ("train_rand_split.jsonl", "dev_rand_split.jsonl")
_LETTER = re.compile(r"[\s*]*\(?([A-J])(?![A-Za-z0-9'])")
_PHRASE = re.compile(r"answer(?: is|:)", re.IGNORECASE)


def extract(text: str) -> str | None:
  """Returns the letter that a text gives as its answer, or None; see above."""
  text = text[-MAX_READ:]
  boxed = answers.last_boxed(text)
  phrases = list(_PHRASE.finditer(text))
  if answers.ANSWER_MARK in text:
    place = text.rpartition(answers.ANSWER_MARK)[2]
  elif boxed is not None:
    place = re.sub(r"\\(?:text|mathrm|textbf)\s*\{", "", boxed)
  else:
    place = text[phrases[-1].end() :] if phrases else text
    if not phrases and len(text.strip()) > len("(A)."):
      return None
  match = _LETTER.match(place)
  return match[1] if match else None


def verdict(problem: Problem, text: str) -> Verdict:
  """Returns reward 1 if the text's letter is correct; well formed if it gives a letter."""
  letter = extract(text)
  if letter is None:
    return answers.NO_ANSWER
  return answers.answered(letter, letter == problem.answer)


def load_mmlu(path: str | os.PathLike[str], *, instruction: str = INSTRUCTION) -> FileTask:
  """Reads MMLU as a task.

  Args:
    path: a directory in the published layout, or one CSV file.
    instruction: appended to every question on a separate line; "" for none.

  Raises:
    FileNotFoundError: if a file is missing; names it.
    ValueError: if a line is invalid; names file and line.
  """
  path = pathlib.Path(path)
  read = functools.partial(_read_mmlu, instruction=instruction)
  if not path.is_dir():
    return FileTask(name="mmlu", **splits.of_files(path, read), judge=verdict)
  found = {
    folder: [problem for file in sorted((path / folder).glob("*.csv")) for problem in read(file)]
    for folder in (*MMLU_TRAIN, "test")
  }
  train = [problem for folder in MMLU_TRAIN for problem in found[folder]]
  if not train or not found["test"]:
    raise FileNotFoundError(
      f"{path}: got {len(train)} questions of {', '.join(MMLU_TRAIN)} and {len(found['test'])} of"
      " test, expected .csv files in test/ and in at least one of the others; set"
      " --config.task_path to the folder that holds them, or to one file."
    )
  return FileTask(name="mmlu", train=tuple(train), heldout=tuple(found["test"]), judge=verdict)


def _read_mmlu(path: pathlib.Path, instruction: str) -> list[Problem]:
  """Reads one CSV file."""
  if not path.is_file():
    raise FileNotFoundError(
      f"{path}: got no such file, expected CSV lines of a question, {MMLU_CHOICES} choices and a"
      " letter; set --config.task_path to the file, or to the folder of dev/, val/ and test/."
    )
  problems = []
  with path.open(encoding="utf-8", newline="") as file:
    reader = csv.reader(file, strict=True)
    begin = 1
    try:
      for row in reader:
        if row:
          texts = [cell.strip() for cell in row]
          where = f"{path}, line {begin}"
          if len(row) != 2 + MMLU_CHOICES or not texts[0]:
            raise ValueError(
              f"{where}: got {len(row)} columns, the first {texts[0][:40]!r}, expected a question,"
              f" {MMLU_CHOICES} choices and a letter; repair or remove that line."
            )
          name = f"mmlu-{path.parent.name}-{path.stem}-{len(problems)}"
          problems.append(_problem(where, name, texts[0], texts[1:-1], texts[-1], instruction))
        begin = reader.line_num + 1
    except csv.Error as error:
      raise ValueError(
        f"{path}, line {begin}: got text that is not CSV ({error}), expected quoted columns; repair"
        " or remove that line."
      ) from error
    except UnicodeDecodeError as error:
      raise ValueError(
        f"{path}: got bytes that are not UTF-8 at offset {error.start}, expected UTF-8 CSV;"
        " re-encode the file."
      ) from error
  if not problems:
    raise ValueError(f"{path}: got an empty file, expected at least one row; check the export.")
  return problems


def load_commonsense_qa(
  path: str | os.PathLike[str], *, instruction: str = INSTRUCTION
) -> FileTask:
  """Reads CommonsenseQA as a task.

  Args:
    path: a directory in the published layout, or one JSON-lines file.
    instruction: appended to every question on a separate line; "" for none.

  Raises:
    FileNotFoundError: if a file is missing; names it.
    ValueError: if a line is invalid; names file and line.
  """
  read = functools.partial(_read_commonsense_qa, instruction=instruction)
  return FileTask(name="commonsense_qa", **splits.of_files(path, read, CSQA_FILES), judge=verdict)


def _read_commonsense_qa(path: pathlib.Path, instruction: str) -> list[Problem]:
  """Reads one JSON-lines file."""
  problems = []
  for number, row in jsonl.numbered_rows(path, ("answerKey",)):
    where = f"{path}, line {number}"
    question, choices = row.get("question"), row.get("choices")
    if isinstance(question, dict):
      question, choices = question.get("stem"), question.get("choices")
    if isinstance(choices, dict) and all(
      isinstance(choices.get(key), list) for key in ("label", "text")
    ):
      pairs: list[Any] = list(zip(choices["label"], choices["text"]))
    elif isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices):
      pairs = [(choice.get("label"), choice.get("text")) for choice in choices]
    else:
      pairs = []
    is_text = all(isinstance(part, str) and part.strip() for part in (question, *sum(pairs, ())))
    if not pairs or not is_text or [label for label, _ in pairs] != [*LETTERS[: len(pairs)]]:
      raise ValueError(
        f"{where}: got the question {question!r} and choices={choices!r}, expected a text and"
        " choices lettered from 'A'; use the original files, or repair that line."
      )
    assert isinstance(question, str)
    texts = [text.strip() for _, text in pairs]
    name = f"commonsense_qa-{path.stem}-{len(problems)}"
    key = row["answerKey"].strip()
    problems.append(_problem(where, name, question.strip(), texts, key, instruction))
  return problems


def _problem(
  where: str, name: str, question: str, choices: Sequence[str], answer: str, instruction: str
) -> Problem:
  """Returns a problem from a question and its choices; rejects an answer that is not a choice."""
  letters = LETTERS[: len(choices)]
  if answer not in tuple(letters):
    raise ValueError(
      f"{where}: got the answer {answer[:40]!r}, expected one letter of {letters}; repair or remove"
      " that line."
    )
  lines = [f"{letter}) {choice}" for letter, choice in zip(letters, choices)]
  asked = "\n".join((question, *lines))
  return Problem(
    problem_id=name,
    prompt=splits.with_instruction(asked, instruction),
    question=asked,
    answer=answer,
    solution=f"{answers.ANSWER_MARK} {answer}",
  )


TASKS = {
  "mmlu": built_in.Source(load_mmlu, "the published folders of CSV"),
  "commonsense_qa": built_in.Source(load_commonsense_qa, "the published JSON lines"),
}
