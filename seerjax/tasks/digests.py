"""Digests of what a run reads and its settings do not name: problems of files, and users' code.

  data     the problems of both splits, with all that a prompt or a verdict reads of them; of a
           generator from a package its version and its first problems
  source   the file of a reward, a judge or a task of one's own

Problems that were reordered under a run would be learnt again, or held-out ones be learnt: that is
refused. A source that was changed may well be meant: it is said.
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
  """Returns the digests of a task by name: of its splits, or of what `path` holds, and its source.

  A task of generated problems has none of data, because its settings decide them, unless another
  package generates them.

  Args:
    task: any.
    path: of its file or directory, where the task is not one of `splits.Splits`; None if it reads
      nothing.
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


def of_set(
  name: str, task: Task, path: str | os.PathLike[str] | None = None
) -> dict[str, str]:
  """Returns the digests of what an evaluation set asks, each by the set's name and its own."""
  found = of_task(task, path)
  return {f"{name}.{part}": digest for part, digest in found.items() if part != "train"}


def of_source(code: Any) -> dict[str, str]:
  """Returns the digest of the file in which a function or a class is written.

  Empty for one of this library, and for one without a file.
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
  """Returns the digest of a file, or of all files of a directory with their names."""
  if path.is_file():
    return _short(path.read_bytes())
  total = hashlib.sha256()
  for file in sorted(one for one in path.rglob("*") if one.is_file()):
    total.update(f"{file.relative_to(path)} {_short(file.read_bytes())}\n".encode())
  return total.hexdigest()[:16]


def data_of(digests: Mapping[str, str]) -> dict[str, str]:
  """Returns the digests without those of sources."""
  return {
    name: digest for name, digest in digests.items() if name.rpartition(".")[2] != SOURCE
  }


def differences(stored: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
  """Returns a sentence for each digest that is another one, or that one side lacks."""
  return [
    f"{name} was {stored.get(name)!r} and is {current.get(name)!r}"
    for name in sorted({*stored, *current})
    if stored.get(name) != current.get(name)
  ]


def require_same(stored: Mapping[str, str], current: Mapping[str, str], *, what: str) -> None:
  """Refuses to go on with other data.

  Args:
    stored: digests of the data that a run began with.
    current: of those of now.
    what: is resumed, for the message.

  Raises:
    ValueError: naming each digest that differs with both values.
  """
  if found := differences(data_of(stored), data_of(current)):
    raise ValueError(
      f"{what}: got other data than the run's ({'; '.join(found)}), expected equal problems in"
      " their order (else held-out ones may be learnt, and unlike sets be compared); restore the"
      f" file, or pass {ACCEPT}, which goes on and records both."
    )


def _of_problems(problems: Sequence[Problem], rows: Mapping[str, Any]) -> str:
  return _of_values(
    [*vars(problem).values(), rows.get(problem.problem_id)] for problem in problems
  )


def _of_values(values: Iterable[Any]) -> str:
  total = hashlib.sha256()
  for value in values:
    # What is no JSON has no text that is the same in another process.
    line = json.dumps(value, default=lambda other: type(other).__name__)
    total.update(line.encode() + b"\n")
  return total.hexdigest()[:16]


def _short(data: bytes) -> str:
  return hashlib.sha256(data).hexdigest()[:16]
