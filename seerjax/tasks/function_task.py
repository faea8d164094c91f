"""A task from a file of prompts and a reward function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import inspect
import json
import math
import os
from typing import Any

from seerjax import types
from seerjax.tasks import jsonl, splits
from seerjax.types import Problem, Verdict

# One number, or named parts of the reward.
Judged = float | Mapping[str, float]
# (prompt, text), or (prompt, text, row) with the prompt's whole row in the file.
Reward = Callable[[str, str], Judged] | Callable[[str, str, Mapping[str, Any]], Judged]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FunctionTask(splits.Splits):
  """Prompts from a file with a reward function: the shortest way to define a task.

  Attributes:
    name, train, heldout: see `Splits`.
    reward: (prompt, text) or (prompt, text, row) -> finite float, or a mapping of part names to
      finite floats. A completion is correct if the reward is at least 1.0; with parts, if "correct"
      is, or all parts are if there is none of that name. It is well formed unless a part "format"
      is below 1.0. The row is a copy, which the function may modify.
    rows: whole row of the file, by problem id; used if the reward takes three arguments.
  """

  reward: Reward
  rows: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Judges with the reward function.

    Raises:
      ValueError: if the function does not return finite numbers; names the prompt. Exceptions of
        the function itself propagate.
    """
    # Copied, so that a modified row does not affect the next verdict.
    row = (types.copied(self.rows[problem.problem_id]),) if takes_row(self.reward) else ()
    reward = self.reward(problem.prompt, text, *row)
    parts = reward if isinstance(reward, Mapping) else {"": reward}
    values = {name: _finite(value) for name, value in parts.items()}
    if not values or None in values.values():
      raise ValueError(
        f"{self.name}: got reward {reward!r} ({type(reward).__name__}) for the prompt"
        f" {problem.prompt[:200]!r}, expected a finite float, or a mapping of names to finite"
        " floats; return 0.0 for a text that cannot be scored."
      )
    found = {name: value for name, value in values.items() if value is not None}
    if not isinstance(reward, Mapping):
      return Verdict(reward=found[""], correct=found[""] >= 1.0, well_formed=True)
    is_correct = min([found["correct"]] if "correct" in found else found.values()) >= 1.0
    return Verdict.of_parts(found, correct=is_correct, well_formed=found.get("format", 1.0) >= 1.0)


def _finite(value: Any) -> float | None:
  """Returns a number as a float, or None if it is not a finite number."""
  try:
    number = math.nan if isinstance(value, (str, bytes)) else float(value)
  except (TypeError, ValueError, OverflowError):
    return None
  return number if math.isfinite(number) else None


def takes_row(reward: Reward) -> bool:
  """Returns whether a reward function requires a third argument, the row."""
  try:
    parameters = inspect.signature(reward).parameters.values()
  except ValueError:  # C functions may have no signature; assume two arguments.
    return False
  needed = [
    parameter
    for parameter in parameters
    if parameter.default is parameter.empty
    and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
  ]
  return len(needed) >= 3


def function_task(name: str, path: str | os.PathLike[str], reward: Reward) -> FunctionTask:
  """Makes a task from a file of prompts and a reward function.

  Args:
    name: name for logs and messages.
    path: JSON lines with "prompt" or "messages" (a conversation, [{"role", "content"}, ...]) and,
      optionally, "answer".
    reward: (prompt, text) -> finite float, or named parts; for a conversation, `prompt` is the last
      user message. A third argument receives the whole row, with all columns.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if a row has neither key, or a conversation without user text; names the row.
  """
  problems, rows = [], {}
  for index, row in enumerate(jsonl.read_rows(path, ())):
    rows[f"{name}-{index}"] = dict(row)
    messages = row.get("messages", ())
    if messages or "prompt" not in row:
      row["prompt"] = _last_question(path, index, row)
    elif not isinstance(row["prompt"], str) or not row["prompt"].strip():
      raise ValueError(
        f"{path}, row {index + 1}: got prompt={row['prompt']!r}, expected a non-empty string;"
        " repair or remove that row."
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
  train, heldout = splits.split_rows(problems)
  return FunctionTask(
    name=name, train=tuple(train), heldout=tuple(heldout), reward=reward, rows=rows
  )


def _last_question(path: str | os.PathLike[str], index: int, row: dict[str, Any]) -> str:
  """Returns the last user message in a row's conversation."""
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
      f"{path}, row {index + 1}: got messages that do not end with a user message, expected one;"
      " repair or remove that row."
    )
  return asked[-1]
