"""The tasks of this package, which its modules define in `TASKS`, by name."""

from __future__ import annotations

from collections.abc import Callable
import importlib
import pathlib
import pkgutil
from typing import NamedTuple

from seerjax.types import Task


class Source(NamedTuple):
  """A task's constructor and its files.

  Attributes:
    make: returns the task, from the path of its files if it has any.
    files: description of these files for messages; "" if the problems are generated.
  """

  make: Callable[..., Task]
  files: str = ""


def sources() -> dict[str, Source]:
  """Returns the sources of all modules by task name, in the order of the modules' names."""
  found: dict[str, Source] = {}
  for module in pkgutil.iter_modules([str(pathlib.Path(__file__).parent)]):
    found |= vars(importlib.import_module(f"{__package__}.{module.name}")).get("TASKS", {})
  return found
