"""Loops on the host that Python is too slow for, compiled by numba.

    @compiled.function
    def count(numbers): ...

What is compiled is kept on disk, beside the module or in the user's cache, so that the next process
starts at once.
"""

from __future__ import annotations

from collections.abc import Callable
import inspect
from typing import Any

import numba


def function(python: Callable[..., Any]) -> Any:
  """Compiles a function when it is first called; division by zero gives inf or NaN."""
  # The function itself, not what may check its annotations.
  python = inspect.unwrap(python)
  try:
    return numba.njit(cache=True, error_model="numpy")(python)
  except RuntimeError:  # Neither the package's folder nor the home can be written.
    return numba.njit(error_model="numpy")(python)


def inlined(python: Callable[..., Any]) -> Any:
  """Compiles a function into each of those that call it."""
  return numba.njit(forceinline=True, error_model="numpy")(inspect.unwrap(python))
