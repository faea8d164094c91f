"""A task of prompts from a file and a bare reward function: the shortest way to one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import inspect
import json
import math
import os
from typing import Any

from seerjax.tasks import jsonl, splits
from seerjax.types import Problem, Verdict

# (prompt, text), or (prompt, text, row) with the prompt's whole row of the file.
Reward = Callable[[str, str], float] | Callable[[str, str, Mapping[str, Any]], float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FunctionTask(splits.Splits):
  """Prompts from a file and a bare reward function: the shortest way to a task of one's own.

  Attributes:
    name, train, heldout: see `Splits`.
    reward: (prompt, text) or (prompt, text, row) -> finite float; a completion counts as correct
      from 1.0 on.
    rows: the whole row of the file, by problem id; read if the reward takes three arguments.
  """

  reward: Reward
  rows: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Judges by the reward function.

    Raises:
      ValueError: if the function returns anything but a finite number, naming the prompt. What the
        function itself raises is passed on: it is the caller's own error.
    """
    row = (self.rows[problem.problem_id],) if takes_row(self.reward) else ()
    reward = self.reward(problem.prompt, text, *row)
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


def takes_row(reward: Reward) -> bool:
  """Returns whether a reward function has to be given a third argument, the prompt's whole row."""
  try:
    parameters = inspect.signature(reward).parameters.values()
  except ValueError:  # One written in C tells no names: two arguments are usual.
    return False
  needed = [
    parameter
    for parameter in parameters
    if parameter.default is parameter.empty
    and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
  ]
  return len(needed) >= 3


def function_task(name: str, path: str | os.PathLike[str], reward: Reward) -> FunctionTask:
  """Makes a task of a prompts file and a reward function.

  Args:
    name: for logs and messages.
    path: JSON lines with "prompt" or "messages" (a conversation, [{"role", "content"}, ...]) and,
      optionally, "answer".
    reward: (prompt, text) -> finite float; of a conversation, the prompt is the last message of a
      user. With a third argument it is given the whole row, other columns included.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: naming the row that has neither, or a conversation without a user's text.
  """
  problems, rows = [], {}
  for index, row in enumerate(jsonl.read_rows(path, ())):
    rows[f"{name}-{index}"] = dict(row)
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
  train, heldout = splits.split_rows(problems)
  return FunctionTask(
    name=name, train=tuple(train), heldout=tuple(heldout), reward=reward, rows=rows
  )


def _last_question(path: str | os.PathLike[str], index: int, row: dict[str, Any]) -> str:
  """Returns the last message of a user in a row's conversation."""
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
