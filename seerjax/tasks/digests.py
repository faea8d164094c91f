"""Digests of inputs that a run's settings do not determine: problems in files, and user code.

  data     problems of both splits, with everything that a prompt or a verdict uses; for a generator
           from a package, its version and its first problems
  source   the file of a user's reward, judge or task

Reordered problems could make a resumed run repeat problems, or train on held-out ones, so different
data are refused. Changed source may be intended, so it is only reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import functools
import hashlib
import inspect
import json
import os
import pathlib
import sys
from typing import Any

from seerjax.tasks import reasoning_gym, splits
from seerjax.tasks.file_task import FileTask
from seerjax.tasks.function_task import FunctionTask, takes_row
from seerjax.types import Problem, Task

SOURCE = "source"
ACCEPT = "--accept_new_data"


def of_task(task: Task, path: str | os.PathLike[str] | None = None) -> dict[str, str]:
  """Returns the digests of a task by name: of its splits or the files at `path`, and its source.

  A task with generated problems has no digest of data, because its settings determine them, unless
  another package generates them.

  Args:
    task: the task.
    path: path of its file or directory, for tasks that are not `splits.Splits`; None without files.
  """
  one: Any = task
  code: Any = type(one)
  rows: Mapping[str, Any] = {}
  if isinstance(one, FunctionTask):
    code = one.reward
    rows = one.rows if takes_row(one.reward) else {}
  elif isinstance(one, FileTask):
    code = one.judge
  found: dict[str, str] = {}
  if isinstance(one, splits.Splits):
    found = {split: _of_problems(one.problems(split), rows) for split in ("train", "heldout")}
  elif isinstance(one, reasoning_gym.ReasoningGym):
    shown = [one.problem(split, index) for split in reasoning_gym.SIZES for index in range(2)]
    found = {"package": one.package, "problems": _of_problems(shown, rows)}
  elif path:
    found = {"task_path": of_files(pathlib.Path(path))}
  return found | of_source(code)


def of_set(name: str, task: Task, path: str | os.PathLike[str] | None = None) -> dict[str, str]:
  """Returns the digests of an evaluation set, with names of the form SET.PART."""
  found = of_task(task, path)
  return {f"{name}.{part}": digest for part, digest in found.items() if part != "train"}


def of_source(code: Any) -> dict[str, str]:
  """Returns the digest of the file that defines a function or class.

  Empty for code of this library, and for code without a file.
  """
  while isinstance(code, functools.partial):
    code = code.func
  if not (inspect.isclass(code) or inspect.isroutine(code)):
    code = type(code)
  code = inspect.unwrap(code)
  if str(code.__module__).partition(".")[0] == __name__.partition(".")[0]:
    return {}
  file = vars(sys.modules.get(code.__module__, sys)).get("__file__")
  if not file or not pathlib.Path(file).is_file():
    return {}
  return {SOURCE: f"{code.__module__} {_short(pathlib.Path(file).read_bytes())}"}


def of_files(path: pathlib.Path) -> str:
  """Returns the digest of a file, or of all files in a directory with their names."""
  if path.is_file():
    return _short(path.read_bytes())
  total = hashlib.sha256()
  for file in sorted(one for one in path.rglob("*") if one.is_file()):
    total.update(f"{file.relative_to(path)} {_short(file.read_bytes())}\n".encode())
  return total.hexdigest()[:16]


def data_of(digests: Mapping[str, str]) -> dict[str, str]:
  """Returns the digests except those of sources."""
  return {name: digest for name, digest in digests.items() if name.rpartition(".")[2] != SOURCE}


def differences(stored: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
  """Returns a message for each digest that differs or is missing on one side."""
  return [
    f"{name} was {stored.get(name)!r} and is {current.get(name)!r}"
    for name in sorted({*stored, *current})
    if stored.get(name) != current.get(name)
  ]


def require_same(stored: Mapping[str, str], current: Mapping[str, str], *, what: str) -> None:
  """Checks that data have not changed.

  Raises:
    ValueError: if a digest differs; names both values.
  """
  if found := differences(data_of(stored), data_of(current)):
    raise ValueError(
      f"{what}: got data that differ from the run's ({'; '.join(found)}), expected the same"
      " problems in the same order (otherwise training may use held-out problems, and results are"
      f" not comparable); restore the file, or pass {ACCEPT}, which continues and records both."
    )


def _of_problems(problems: Sequence[Problem], rows: Mapping[str, Any]) -> str:
  return _of_values([*vars(problem).values(), rows.get(problem.problem_id)] for problem in problems)


def _of_values(values: Iterable[Any]) -> str:
  total = hashlib.sha256()
  for value in values:
    # Other objects have no representation that is stable across processes.
    line = json.dumps(value, default=lambda other: type(other).__name__)
    total.update(line.encode() + b"\n")
  return total.hexdigest()[:16]


def _short(data: bytes) -> str:
  return hashlib.sha256(data).hexdigest()[:16]
