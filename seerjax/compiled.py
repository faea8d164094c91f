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
from numba import carray, extending  # pyright: ignore[reportPrivateImportUsage]


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


def _address_to_pointer(typing_context: Any, address: Any) -> Any:
  """Tells numba how an address becomes a pointer."""

  def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.inttoptr(args[0], context.get_value_type(numba.types.voidptr))

  return numba.types.voidptr(numba.types.intp), generate


_pointer: Any = extending.intrinsic(_address_to_pointer)


@inlined
def bare(array):
  """Returns the same memory as an array without an owner: nothing is counted when it is passed."""
  return carray(_pointer(array.ctypes.data), array.shape, array.dtype)
