"""Shared parts of all commands: parsing of values, argument checks, and one-line errors."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
import contextlib
import os
import pathlib
import sys
from typing import Any

import jax

from seerjax import xla_flags
from seerjax.run import stops


def literal(text: str) -> Any:
  """Parses a command-line value: true/false in any case, a Python literal, else the text itself."""
  if text.lower() in ("true", "false"):
    return text.lower() == "true"
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text


def keep_programs() -> None:
  """Enables JAX's persistent compilation cache in the user's cache directory, unless it is set.

  Later processes of the same command then start in seconds. JAX_COMPILATION_CACHE_DIR overrides the
  directory; an empty value disables the cache. Call this before anything is compiled.
  """
  if jax.config.jax_compilation_cache_dir is not None:
    return
  cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(cache) / "seerjax" / "compiled"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def check_arguments(argv: Sequence[str]) -> None:
  """Raises if positional arguments are present.

  Raises:
    ValueError: naming the arguments.
  """
  if argv[1:]:
    raise ValueError(
      f"{pathlib.Path(argv[0]).stem}: got {list(argv[1:])}, expected flags alone; write"
      " --name=value."
    )


@contextlib.contextmanager
def refusals() -> Iterator[None]:
  """Turns expected errors into a one-line message on stderr and exit status 2.

  Such errors are for the user to fix (a flag, a path, a full disk, a missing package); the message
  says how, and a traceback would hide it. Ctrl-C and SIGTERM also produce one line, with the exit
  status that shells expect: 130 and 143.

  Every command starts here, so this also sets the XLA flags for GPUs (`xla_flags.pin`).
  """
  try:
    with stops.handled():
      xla_flags.pin(print)
      yield
  except (ValueError, OSError, ImportError, NotImplementedError) as error:
    print(error, file=sys.stderr)
    sys.exit(2)
  except stops.Interrupted as stopped:
    print(stopped)
    sys.exit(stopped.status)
  except KeyboardInterrupt as stop:
    # Commands that save partial results report that themselves (`stops.Interrupted`).
    print(f"stopped by {stops.name_of(stop)} before the end", file=sys.stderr)
    sys.exit(stops.status_of(stop))
