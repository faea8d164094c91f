"""The flag `--problems` selects the function that loads a discovery problem by name.

The package contains no problems; `launch/local.sh` names the loader of `experiments.problems`.
"""

from __future__ import annotations

from collections.abc import Callable
import functools

from absl import flags

from seerjax.discovery import loading
from seerjax.discovery.environment import Environment
from seerjax.tasks import loading as tasks_loading


def define_flag() -> None:
  """Defines `--problems`."""
  flags.DEFINE_string(
    "problems",
    "seerjax.commands.problems:load",
    "Function that loads a problem by its name, as module:function.",
  )


def load(name: str, *, allow_weak_sandbox: bool = False) -> Environment:
  """Loads a problem file or class (`loading.load`); the default of `--problems`.

  Args:
    name: see `loading.load`.
    allow_weak_sandbox: for loaders of problems that run programs; has no effect here.
  """
  del allow_weak_sandbox
  return loading.load(name)


def factory_of(
  loader: str, name: str, *, allow_weak_sandbox: bool = False
) -> Callable[[], Environment]:
  """Returns a function that makes a problem, also in another process.

  Args:
    loader: value of `--problems`.
    name: name of the problem.
    allow_weak_sandbox: handed to the loader.

  Raises:
    ValueError: if there is no such loader.
  """
  found = tasks_loading.imported(
    loader, caller="--problems", example="my_module:load", expected="a function of a problem's name"
  )
  return functools.partial(found, name, allow_weak_sandbox=allow_weak_sandbox)
