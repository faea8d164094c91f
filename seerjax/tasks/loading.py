"""Finds a task by name: one of this library, or "my_module:attribute" of one's own.

A task is anything that satisfies `seerjax.types.Task`.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, cast

from seerjax.tasks import countdown, gsm8k, word_problems
from seerjax.tasks.function_task import FunctionTask, Reward, function_task
from seerjax.types import Task


def load(
  name: str, *, path: str | os.PathLike[str] | None = None, reward: Reward | None = None
) -> Task:
  """Returns a task by name.

  Args:
    name: 'word_problems', 'countdown', 'gsm8k' (needs `path`), or 'my_module:attribute', imported
      from the Python path and then from the current directory (which is appended to `sys.path`).
      The attribute is a task, a class of tasks (called with `path` if one is given, else with
      nothing), or a bare function reward(prompt, text) or reward(prompt, text, row) -> float, which
      needs `path`.
    path: a data file or directory; for a bare reward, JSON lines with "prompt" or "messages".
    reward: a reward function given directly; then `name` is only a label and `path` is needed.

  Raises:
    ValueError: naming what could not be found and what was expected.
  """
  if reward is not None:
    return _with_prompts(name, path, reward)
  if ":" in name:
    return _outside_task(name, path)
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
