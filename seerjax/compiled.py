"""Host loops compiled by numba, for work that is too slow in Python.

    @compiled.function
    def count(numbers): ...

Compiled code is cached on disk, next to the module or in the user's cache, so that the next process
starts at once. It includes the function's callees and the numbers that it reads: a change of
either, in any file, triggers a new compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import hashlib
import inspect
import types
from typing import Any

import numba
from numba import carray, extending  # pyright: ignore[reportPrivateImportUsage]
import numpy as np

_Compiled = type(numba.njit(lambda: None))


def function(python: Callable[..., Any]) -> Any:
  """Compiles a function on its first call; division by zero gives inf or NaN."""
  # The function itself, without wrappers that check its annotations.
  python = inspect.unwrap(python)
  # numba only checks the function's own file, and names cached code by the qualified name.
  taken = "\n".join(_taken(python, python.__code__.co_filename))
  if taken:
    python.__qualname__ += f"_{hashlib.sha256(taken.encode()).hexdigest()[:12]}"
  try:
    return numba.njit(cache=True, error_model="numpy")(python)
  except RuntimeError:  # Neither the package's folder nor the home directory is writable.
    return numba.njit(error_model="numpy")(python)


def _taken(python: Callable[..., Any], own_file: str) -> Iterator[str]:
  """Yields the numbers that a function reads, and the source of its callees in other files.

  The callees include those of callees; numba itself checks only `own_file`, the file of the first
  caller.

  Names defined further down in its own file are not known yet.
  """
  names, known = python.__code__.co_names, python.__globals__
  for name in names:
    value = known.get(name)
    is_module = isinstance(value, types.ModuleType)
    spaces = [(vars(value), other) for other in names] if is_module else [(known, name)]
    for space, other in spaces:
      found = space.get(other)
      if isinstance(found, bool | int | float | tuple | np.generic):
        yield f"{name}.{other} = {found!r}"
      elif isinstance(found, _Compiled):
        called = inspect.unwrap(found.py_func)
        if called.__code__.co_filename != own_file:
          yield inspect.getsource(called)
        yield from _taken(called, own_file)


def inlined(python: Callable[..., Any]) -> Any:
  """Compiles a function that is inlined into its callers."""
  return numba.njit(forceinline=True, error_model="numpy")(inspect.unwrap(python))


def _address_to_pointer(typing_context: Any, address: Any) -> Any:
  """Implements the conversion of an address to a pointer for numba."""

  def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.inttoptr(args[0], context.get_value_type(numba.types.voidptr))

  return numba.types.voidptr(numba.types.intp), generate


_pointer: Any = extending.intrinsic(_address_to_pointer)


@inlined
def bare(array):
  """Returns the same memory as an array without an owner, which is passed without refcounting."""
  return carray(_pointer(array.ctypes.data), array.shape, array.dtype)
