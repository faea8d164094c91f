"""Loads a task by name: one of this library, or a user's "my_module:attribute".

A task is any object that satisfies `seerjax.types.Task`.
"""

from __future__ import annotations

from collections.abc import Mapping
import importlib
import json
import os
import sys
from typing import Any, cast

from seerjax.tasks import built_in, reasoning_gym
from seerjax.tasks.function_task import FunctionTask, Reward, function_task
from seerjax.types import Task


def load(
  name: str,
  *,
  path: str | os.PathLike[str] | None = None,
  options: Mapping[str, Any] | None = None,
  reward: Reward | None = None,
) -> Task:
  """Returns a task by name.

  Args:
    name: a task of this package (`built_in.sources`), such as 'word_problems', which generates its
      problems, or 'gsm8k', which needs `path`; 'reasoning_gym.GENERATOR', which generates problems
      with the package reasoning-gym; or 'my_module:attribute',
      imported from the Python path or the current directory (which is appended to `sys.path`). The
      attribute is a task, a task class (called with `path` if given, else without arguments), or a
      reward function reward(prompt, text) or reward(prompt, text, row) -> float, which needs
      `path`.
    path: a data file or directory; for a reward function, JSON lines with "prompt" or "messages".
    options: parameters of a generator of reasoning-gym by name; other tasks have none.
    reward: a reward function; then `name` is only a label, and `path` is required.

  Raises:
    ValueError: if something cannot be found; names it.
  """
  if name.startswith(reasoning_gym.PREFIX) and ":" not in name:
    return _drawn(name, path, reasoning_gym.load(name, options))
  if options:
    raise ValueError(
      f"{name}: got the options {dict(options)}, expected none, because only reasoning_gym"
      " generators have options; drop --config.task_options or choose another task."
    )
  if reward is not None:
    return _with_prompts(name, path, reward)
  if ":" in name:
    return _outside_task(name, path)
  sources = built_in.sources()
  if name not in sources:
    raise ValueError(
      f"tasks.load: got name {name!r}, expected {', '.join(map(repr, sources))},"
      " 'reasoning_gym.GENERATOR' or 'my_module:MyTask'; check the spelling of --config.task."
    )
  source = sources[name]
  if source.files:
    return source.make(_needed(name, path, source.files))
  return _drawn(name, path, source.make())


def load_set(text: str) -> Task:
  """Returns the task of an evaluation set.

  Args:
    text: "TASK" or "TASK=PATH"; for a generator of reasoning-gym "TASK" or "TASK=OPTIONS" with a
      JSON object, such as {"min_terms": 4}.

  Raises:
    ValueError: see `load`; also if the options are not a JSON object.
    FileNotFoundError: if a file is missing.
  """
  name, _, rest = text.partition("=")
  if not name.startswith(reasoning_gym.PREFIX) or ":" in name or not rest:
    return load(name, path=rest or None)
  try:
    options = json.loads(rest)
  except ValueError:
    options = None
  if not isinstance(options, dict):
    raise ValueError(
      f"{name}: got {rest[:80]!r} as its options, expected a JSON object; write"
      f' {name}={{"seed": 1}}.'
    )
  return load(name, options=options)


def _drawn(name: str, path: str | os.PathLike[str] | None, task: Task) -> Task:
  """Returns a task with generated problems; refuses a path."""
  if path is not None:
    raise ValueError(
      f"{name}: got path {os.fspath(path)!r}, expected none because its problems are generated;"
      " drop --config.task_path or choose another task."
    )
  return task


def _needed(
  name: str, path: str | os.PathLike[str] | None, expected: str
) -> str | os.PathLike[str]:
  """Returns the path of a task; raises ValueError if it is None."""
  if path is None:
    raise ValueError(
      f"{name}: got no path, expected {expected}; set --config.task_path to the directory of train"
      " and test files, or to one file."
    )
  return path


def _with_prompts(name: str, path: str | os.PathLike[str] | None, reward: Reward) -> FunctionTask:
  if path is None:
    raise ValueError(
      f"{name}: got a bare reward function and no path, expected a JSON-lines file with"
      ' "prompt"; set --config.task_path.'
    )
  return function_task(name, path, reward)


def imported(name: str, *, caller: str, example: str, expected: str) -> Any:
  """Returns the object that "my_module:attribute" names.

  The module is imported from the Python path or the current directory, which is appended to
  `sys.path`.

  Args:
    name: "my_module:attribute".
    caller: prefix of messages.
    example: example of a name, for messages.
    expected: description of the attribute, for messages.

  Raises:
    ValueError: if the module cannot be imported, or has no such attribute.
  """
  module_name, _, attribute = name.partition(":")
  if os.getcwd() not in sys.path and "" not in sys.path:
    sys.path.append(os.getcwd())  # At the end, so that files there do not shadow packages.
  try:
    module = importlib.import_module(module_name)
  except SyntaxError as error:
    raise ValueError(
      f"{caller}: got {name!r}, but its module has a syntax error in line {error.lineno} of"
      f" {error.filename} ({error.msg}), expected Python"
      f" {sys.version_info.major}.{sys.version_info.minor}; fix that line."
    ) from error
  except (ImportError, ValueError) as error:
    raise ValueError(
      f"{caller}: got {name!r}, but module {module_name!r} cannot be imported ({error}),"
      f" expected {example!r}; run from the folder of my_module.py or install it."
    ) from error
  except (Exception, SystemExit) as error:
    raise ValueError(
      f"{caller}: got {name!r}, but module {module_name!r} raised {type(error).__name__}"
      f" ({error}) when it was imported, expected one with only definitions; fix it, or move other"
      " code under if __name__ == '__main__'."
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
        " a task; fix it, or set --config.task_path to what it reads."
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
