"""Loads a problem: a class in a module, or a Python file with four functions.

"my_module:MyProblem"      the class, called without arguments
"my_module:MyProblem:26"   the class, called with the number
"path/to/my_problem.py"    see `problem_file`
"""

from __future__ import annotations

from typing import Any

from seerjax.discovery import problem_file
from seerjax.discovery.environment import Environment
from seerjax.tasks import loading as tasks_loading

MEMBERS = (
  "name", "is_maximised", "published", "language", "start", "describe", "verify", "picture"
)  # fmt: skip


def load(name: str, **arguments: Any) -> Environment:
  """Returns a problem.

  Args:
    name: "my_module:MyProblem", or "my_module:MyProblem:NUMBER" for a class or function that takes
      a number first, imported from the Python path or the current directory (which is appended to
      `sys.path`); or the path of a Python file (`problem_file.load`).
    **arguments: further arguments of the class.

  Raises:
    ValueError: if something cannot be found; names it. A `ValueError`, `OSError` or `ImportError`
      of the class itself propagates.
  """
  check_name(name)
  if name.endswith(".py"):
    return problem_file.load(name)
  module, attribute, *numbers = name.split(":")
  found = tasks_loading.imported(
    f"{module}:{attribute}", caller="problem", example="my_module:MyProblem", expected="a problem"
  )
  if isinstance(found, type) or (callable(found) and not isinstance(found, Environment)):
    try:
      found = found(*map(int, numbers), **arguments)
    except (ValueError, OSError, ImportError):
      raise
    except (Exception, SystemExit) as error:
      raise ValueError(
        f"problem: got {problem_file.named(error)} from {attribute}({', '.join(numbers)}), expected"
        " a problem; fix it, or correct --config.problem."
      ) from error
  if not isinstance(found, Environment):
    missing = [member for member in MEMBERS if not hasattr(found, member)]
    raise ValueError(
      f"problem: got {name!r} without {missing}, expected a problem with {', '.join(MEMBERS)}; see"
      " seerjax.discovery.environment.Environment."
    )
  return found


def check_name(name: str) -> None:
  """Checks that `load` can parse a name.

  Raises:
    ValueError: if it cannot.
  """
  if name.endswith(".py"):
    return
  parts = name.split(":")
  if len(parts) not in (2, 3) or not parts[0] or not parts[1].isidentifier():
    raise ValueError(
      f"problem: got {name!r}, expected 'my_module:MyProblem', with a number as in"
      " 'my_module:MyProblem:26', or the path of a Python file that ends with '.py'; correct"
      " --config.problem."
    )
  if len(parts) == 3 and not (parts[2].isascii() and parts[2].isdecimal()):
    raise ValueError(
      f"problem: got {name!r}, expected a number after the second colon; leave it out, or write"
      f" {parts[0]}:{parts[1]}:26."
    )
