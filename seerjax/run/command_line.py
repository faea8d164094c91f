"""What every command shares: the meaning of a word, stray words, and a refusal in one line."""

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
  """Returns what a command line's text means: True and False in any case, a number, else text."""
  if text.lower() in ("true", "false"):
    return text.lower() == "true"
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text


def keep_programs() -> None:
  """Has JAX keep compiled programs in the user's cache, where no other folder is set.

  The next process of the same command then starts in seconds. JAX_COMPILATION_CACHE_DIR sets
  another folder, or none where it is empty. To be called before anything is compiled.
  """
  if jax.config.jax_compilation_cache_dir is not None:
    return
  cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(cache) / "seerjax" / "compiled"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def check_arguments(argv: Sequence[str]) -> None:
  """Refuses words on a command line that belong to no flag.

  Raises:
    ValueError: naming them.
  """
  if argv[1:]:
    raise ValueError(
      f"{pathlib.Path(argv[0]).stem}: got {list(argv[1:])}, expected flags alone; write"
      " --name=value."
    )


@contextlib.contextmanager
def refusals() -> Iterator[None]:
  """Ends the program with a refusal's message alone on stderr and status 2.

  What a command refuses is the caller's to mend (a flag, a path, a full disk, a package that is
  missing): the message says how, and a traceback would bury it. Ctrl-C and SIGTERM are no mistakes,
  and get one line as well, with the status that a shell expects: 130 and 143.

  It is where every command begins, so that XLA's flags of a GPU are set here (`xla_flags.pin`).
  """
  try:
    with stops.heard():
      xla_flags.pin(print)
      yield
  except (ValueError, OSError, ImportError, NotImplementedError) as error:
    print(error, file=sys.stderr)
    sys.exit(2)
  except stops.Interrupted as stopped:
    print(stopped)
    sys.exit(stopped.status)
  except KeyboardInterrupt as stop:
    # What a command keeps it says itself (`stops.Interrupted`); most keep nothing on the way.
    print(f"stopped by {stops.name_of(stop)} before the end", file=sys.stderr)
    sys.exit(stops.status_of(stop))
