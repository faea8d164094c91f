"""Loops on the host that Python is too slow for, compiled by numba.

    @compiled.function
    def count(numbers): ...

What is compiled is kept on disk, beside the module or in the user's cache, so that the next process
starts at once. It holds what the function calls, and the numbers that it reads, too: a change of
either, in whatever file, has it compiled anew.
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
  """Compiles a function when it is first called; division by zero gives inf or NaN."""
  # The function itself, not what may check its annotations.
  python = inspect.unwrap(python)
  # numba looks at the function's own file alone, and names what it keeps by the qualified name.
  taken = "\n".join(_taken(python))
  if taken:
    python.__qualname__ += f"_{hashlib.sha256(taken.encode()).hexdigest()[:12]}"
  try:
    return numba.njit(cache=True, error_model="numpy")(python)
  except RuntimeError:  # Neither the package's folder nor the home can be written.
    return numba.njit(error_model="numpy")(python)


def _taken(python: Callable[..., Any]) -> Iterator[str]:
  """Yields the numbers that a function reads, and the source of what it calls in other files.

  What stands further down in its own file is not known yet.
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
        if called.__code__.co_filename != python.__code__.co_filename:
          yield inspect.getsource(called)
        yield from _taken(called)


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
