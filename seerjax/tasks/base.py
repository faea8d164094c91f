"""What every task shares: reproducible draws, reading an answer, and finding a task by name.

A task is anything that satisfies `seerjax.types.Task`. Problems are a pure function of
(task, split, index): they are drawn with `Draws`, integers from SHA-256 alone, because neither
numpy nor `random` promises the same numbers from one version to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from fractions import Fraction
import hashlib
import importlib
import json
import math
import os
import pathlib
import re
import sys
from typing import Any, TypeVar, cast

from seerjax.types import Problem, Task, Verdict

T = TypeVar("T")
Reward = Callable[[str, str], float]

ANSWER_MARK = "####"  # GSM8K's mark of the final answer; ours too.
MAX_NUMBER_DIGITS = 40  # Longer runs of digits are no answer; Python refuses past 4,300 anyway.
HELDOUT_EVERY = 10  # In a single file, every tenth row is held out.
_NUMBER = re.compile(r"([+-]?)([0-9]+)(?:\.([0-9]+)|/([0-9]+))?", re.ASCII)


class Draws:
  """A stream of integers fixed by the names it was made with, on every machine and version.

  Draw number i is the first 8 bytes of SHA-256("name/name/.../i"). For example
  `Draws("word_problems", "train", 7).below(10)` is the same digit everywhere.
  """

  def __init__(self, *names: object):
    self._prefix = "/".join(str(name) for name in names).encode() + b"/"
    self._count = 0

  def below(self, limit: int) -> int:
    """Returns an integer in [0, limit); the bias of the scaling is below limit / 2**64."""
    if limit < 1:
      raise ValueError(f"Draws.below: got limit={limit}, expected at least 1; raise the limit.")
    digest = hashlib.sha256(self._prefix + str(self._count).encode()).digest()
    self._count += 1
    return (int.from_bytes(digest[:8], "big") * limit) >> 64

  def between(self, low: int, high: int) -> int:
    """Returns an integer in [low, high], both ends included."""
    return low + self.below(high - low + 1)

  def chance(self, probability: float) -> bool:
    """Returns True with this probability, to one part in a million."""
    return self.below(1_000_000) < round(probability * 1_000_000)

  def choice(self, items: Sequence[T]) -> T:
    """Returns one of `items`."""
    return items[self.below(len(items))]

  def sample(self, items: Sequence[T], count: int) -> list[T]:
    """Returns `count` different ones of `items`, in drawn order."""
    pool = list(items)
    return [pool.pop(self.below(len(pool))) for _ in range(count)]


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


def check_index(task: str, split: str, index: int, num_problems: int) -> None:
  """Refuses an index outside of the split."""
  if not 0 <= index < num_problems:
    raise ValueError(
      f"{task}: got problem index {index} of split {split!r}, expected 0 <= index <"
      f" {num_problems}; take the index modulo num_problems({split!r})."
    )


def unknown_split(task: str, split: str, splits: Sequence[str]) -> ValueError:
  """Returns the refusal of a split that a task does not have."""
  return ValueError(
    f"{task}: got split {split!r}, expected one of {tuple(splits)}; 'train' is usual."
  )


def read_rows(path: str | os.PathLike[str], required: Sequence[str]) -> list[dict[str, Any]]:
  """Reads a JSON-lines file of objects; blank lines are skipped.

  Args:
    path: of the file, UTF-8.
    required: keys that every row must hold with a string of at least one character.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: naming the line that is not JSON, no object, or lacks a key; or an empty file.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise FileNotFoundError(
      f"{path}: got no such file, expected JSON lines with the keys {tuple(required)};"
      " set --config.task_path to the file."
    )
  rows = []
  try:
    lines = path.read_text(encoding="utf-8").split("\n")
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{path}: got bytes that are no UTF-8 at offset {error.start}, expected UTF-8 JSON lines;"
      " re-encode the file."
    ) from error
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    try:
      row = json.loads(line)
    except (ValueError, RecursionError) as error:
      raise ValueError(
        f"{path}, line {number}: got text that is not JSON ({error}), expected one JSON object a"
        " line; repair or remove that line."
      ) from error
    if not isinstance(row, dict):
      raise ValueError(
        f"{path}, line {number}: got a JSON {type(row).__name__}, expected an object with the keys"
        f" {tuple(required)}; repair or remove that line."
      )
    for key in required:
      if key not in row:
        raise ValueError(
          f"{path}, line {number}: got the keys {tuple(sorted(row))}, expected {key!r} among them;"
          " add it or rename the column."
        )
      if not isinstance(row[key], str) or not row[key].strip():
        raise ValueError(
          f"{path}, line {number}: got {key}={row[key]!r}, expected a string that is not empty;"
          " repair or remove that line."
        )
    rows.append(row)
  if not rows:
    raise ValueError(f"{path}: got an empty file, expected at least one row; check the export.")
  return rows


def split_rows(rows: Sequence[T]) -> tuple[list[T], list[T]]:
  """Returns (train, heldout) of one file: every tenth row is held out.

  Fewer than ten rows are too few to part; then both splits are the whole file.
  """
  if len(rows) < HELDOUT_EVERY:
    return list(rows), list(rows)
  is_heldout = [index % HELDOUT_EVERY == HELDOUT_EVERY - 1 for index in range(len(rows))]
  train = [row for row, held in zip(rows, is_heldout, strict=True) if not held]
  heldout = [row for row, held in zip(rows, is_heldout, strict=True) if held]
  return train, heldout


@dataclasses.dataclass(frozen=True, kw_only=True)
class FunctionTask:
  """Prompts from a file and a bare reward function: the shortest way to a task of one's own.

  Attributes:
    name: for logs.
    train: problems to learn from.
    heldout: problems to measure on.
    reward: (prompt, text) -> finite float; a completion counts as correct from 1.0 on.
  """

  name: str
  train: tuple[Problem, ...]
  heldout: tuple[Problem, ...]
  reward: Reward

  def _problems(self, split: str) -> tuple[Problem, ...]:
    if split == "train":
      return self.train
    if split == "heldout":
      return self.heldout
    raise unknown_split(self.name, split, ("train", "heldout"))

  def num_problems(self, split: str) -> int:
    """Returns the number of prompts in the split."""
    return len(self._problems(split))

  def problem(self, split: str, index: int) -> Problem:
    """Returns prompt `index` of the split, in the order of the file."""
    problems = self._problems(split)
    check_index(self.name, split, index, len(problems))
    return problems[index]

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Judges by the reward function.

    Raises:
      ValueError: if the function returns anything but a finite number, naming the prompt. What the
        function itself raises is passed on: it is the caller's own error.
    """
    reward = self.reward(problem.prompt, text)
    try:
      value = math.nan if isinstance(reward, (str, bytes)) else float(reward)
    except (TypeError, ValueError, OverflowError):
      value = math.nan
    if not math.isfinite(value):
      raise ValueError(
        f"{self.name}: got reward {reward!r} ({type(reward).__name__}) for the prompt"
        f" {problem.prompt[:200]!r}, expected a finite float; return 0.0 for a text that cannot be"
        " judged."
      )
    return Verdict(reward=value, correct=value >= 1.0, well_formed=True)


def function_task(name: str, path: str | os.PathLike[str], reward: Reward) -> FunctionTask:
  """Makes a task of a prompts file and a reward function.

  Args:
    name: for logs and messages.
    path: JSON lines with "prompt" or "messages" (a conversation, [{"role", "content"}, ...]) and,
      optionally, "answer".
    reward: (prompt, text) -> finite float; of a conversation, the prompt is the last message of a
      user.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: naming the row that has neither, or a conversation without a user's text.
  """
  problems = []
  for index, row in enumerate(read_rows(path, ())):
    messages = row.get("messages", ())
    if messages or "prompt" not in row:
      row["prompt"] = _last_question(path, index, row)
    elif not isinstance(row["prompt"], str) or not row["prompt"].strip():
      raise ValueError(
        f"{path}, row {index + 1}: got prompt={row['prompt']!r}, expected a string that is not"
        " empty; repair or remove that row."
      )
    answer = row.get("answer", "")
    problems.append(
      Problem(
        problem_id=f"{name}-{index}",
        prompt=row["prompt"],
        question=row["prompt"],
        answer=answer if isinstance(answer, str) else json.dumps(answer),
        messages=tuple(messages),
      )
    )
  train, heldout = split_rows(problems)
  return FunctionTask(name=name, train=tuple(train), heldout=tuple(heldout), reward=reward)


def _last_question(path: str | os.PathLike[str], index: int, row: dict[str, Any]) -> str:
  """Returns what a user said last in a row's conversation."""
  messages = row.get("messages")
  if not isinstance(messages, list) or not all(
    isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
  ):
    raise ValueError(
      f"{path}, row {index + 1}: got the keys {tuple(sorted(row))} and messages={messages!r},"
      ' expected "prompt", or "messages" as a list of {"role": ..., "content": ...}; repair or'
      " remove that row."
    )
  asked = [message.get("content") for message in messages if message["role"] == "user"]
  if not asked or not isinstance(asked[-1], str) or not asked[-1].strip():
    raise ValueError(
      f"{path}, row {index + 1}: got messages without a user's last text, expected one; repair or"
      " remove that row."
    )
  return asked[-1]


def load(
  name: str, *, path: str | os.PathLike[str] | None = None, reward: Reward | None = None
) -> Task:
  """Returns a task by name.

  Args:
    name: 'word_problems', 'countdown', 'gsm8k' (needs `path`), or 'my_module:attribute', imported
      from the Python path and then from the current directory (which is appended to `sys.path`).
      The attribute is a task, a class of tasks (called with `path` if one is given, else with
      nothing), or a bare function reward(prompt, text) -> float, which needs `path`.
    path: a data file or directory; for a bare reward, JSON lines with "prompt" or "messages".
    reward: a reward function given directly; then `name` is only a label and `path` is needed.

  Raises:
    ValueError: naming what could not be found and what was expected.
  """
  if reward is not None:
    return _with_prompts(name, path, reward)
  if ":" in name:
    return _outside_task(name, path)
  # Imported here because the tasks themselves stand on this module.
  from seerjax.tasks import countdown, gsm8k, word_problems

  if name == "word_problems":
    _refuse_path(name, path)
    return word_problems.WordProblems()
  if name == "countdown":
    _refuse_path(name, path)
    return countdown.Countdown()
  if name == "gsm8k":
    if path is None:
      raise ValueError(
        "gsm8k: got no path, expected the original JSON lines; set --config.task_path to the"
        " directory of train.jsonl and test.jsonl, or to one file."
      )
    return gsm8k.load(path)
  raise ValueError(
    f"tasks.load: got name {name!r}, expected 'word_problems', 'countdown', 'gsm8k' or"
    " 'my_module:MyTask'; check the spelling of --config.task."
  )


def _refuse_path(name: str, path: str | os.PathLike[str] | None) -> None:
  if path is not None:
    raise ValueError(
      f"{name}: got path {os.fspath(path)!r}, expected none because its problems are generated;"
      " drop --config.task_path or choose another task."
    )


def _with_prompts(name: str, path: str | os.PathLike[str] | None, reward: Reward) -> FunctionTask:
  if path is None:
    raise ValueError(
      f"{name}: got a bare reward function and no path, expected a JSON-lines file with"
      ' "prompt"; set --config.task_path.'
    )
  return function_task(name, path, reward)


def imported(name: str, *, caller: str, example: str, expected: str) -> Any:
  """Returns what "my_module:attribute" names.

  The module is imported from the Python path and then from the current directory, which is appended
  to `sys.path`.

  Args:
    name: as above.
    caller: with which messages begin.
    example: of a name, for messages.
    expected: of the attribute, for messages.

  Raises:
    ValueError: if the module cannot be imported, or has no such attribute.
  """
  module_name, _, attribute = name.partition(":")
  if os.getcwd() not in sys.path and "" not in sys.path:
    sys.path.append(os.getcwd())  # Last, so that no file there hides an installed package.
  try:
    module = importlib.import_module(module_name)
  except SyntaxError as error:
    raise ValueError(
      f"{caller}: got {name!r}, whose module has a syntax error in line {error.lineno} of"
      f" {error.filename} ({error.msg}), expected Python"
      f" {sys.version_info.major}.{sys.version_info.minor}; mend that line."
    ) from error
  except (ImportError, ValueError) as error:
    raise ValueError(
      f"{caller}: got {name!r}, whose module {module_name!r} cannot be imported ({error}),"
      f" expected {example!r}; run from the folder of my_module.py or install it."
    ) from error
  except (Exception, SystemExit) as error:
    raise ValueError(
      f"{caller}: got {name!r}, whose module {module_name!r} raised {type(error).__name__}"
      f" ({error}) when it was imported, expected one that only defines; mend it, or put what runs"
      " under if __name__ == '__main__'."
    ) from error
  if attribute not in vars(module):
    raise ValueError(
      f"{caller}: got {name!r}, but {module_name!r} has no {attribute!r}, expected {expected};"
      f" it has {sorted(k for k in vars(module) if k[:1] != '_')}."
    )
  return vars(module)[attribute]


def _outside_task(name: str, path: str | os.PathLike[str] | None) -> Task:
  found = imported(
    name,
    caller="tasks.load",
    example="my_module:MyTask",
    expected="a task class, a task or a reward function",
  )
  attribute = name.partition(":")[2]
  if isinstance(found, type):
    arguments = "" if path is None else repr(os.fspath(path))
    try:
      found = found() if path is None else found(path)
    except (Exception, SystemExit) as error:
      raise ValueError(
        f"tasks.load: got {type(error).__name__} ({error}) from {attribute}({arguments}), expected"
        " a task; mend it, or set --config.task_path to what it reads."
      ) from error
  elif callable(found) and not hasattr(found, "problem"):
    return _with_prompts(name, path, cast(Reward, found))
  if not isinstance(found, Task):
    missing = [m for m in ("name", "num_problems", "problem", "verdict") if not hasattr(found, m)]
    raise ValueError(
      f"tasks.load: got {name!r} without {missing}, expected a task with name, num_problems,"
      " problem and verdict; see seerjax.types.Task."
    )
  return found
