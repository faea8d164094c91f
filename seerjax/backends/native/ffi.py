"""XLA's foreign function interface: handlers that numba compiles, and how a program calls them.

A handler is `XLA_FFI_Error* handler(XLA_FFI_CallFrame*)`. The frame is read as 64-bit words, whose
offsets are those of `xla/ffi/api/c_api.h` (it ships with jaxlib, and a test compares them):

    frame    1 extensions   2 functions of XLA   3 context   9 arguments   14 results
    buffer   2 element type   3 address   5 dimensions

A handler cannot raise: whatever could be wrong is checked while the program is traced. Results are
not zeroed, and a result may serve as scratch memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import ctypes
import dataclasses
import functools
import inspect
import pathlib
from typing import Any

import jax
import numba
from numba import types

from seerjax.array_typing import Array
from seerjax.backends.native import objects
from seerjax.backends.native.numbers import jit
from seerjax.backends.native.pointers import flush_denormals, integers, restore_denormals, words

# XLA's code of bfloat16; every other operand of ours has 32 bits.
_BFLOAT16 = 16
# The version that we answer with: the oldest JAX that is supported refuses a later one.
_MAJOR, _MINOR = 0, 1


@jit
def address(buffers, index):
  """Where a buffer's elements begin."""
  return words(buffers[index])[3]


@jit
def dimension(buffers, index, axis):
  """The size of one of a buffer's axes."""
  return words(words(buffers[index])[5])[axis]


@jit
def is_bfloat16(buffers, index):
  """Whether a buffer's elements are bfloat16."""
  return integers(buffers[index] + 16)[0] == _BFLOAT16


@jit
def integer(buffers, index, place):
  """An element of an i32 buffer, as int64."""
  return types.int64(integers(words(buffers[index])[3])[place])


@dataclasses.dataclass(frozen=True)
class Handler:
  """One kind of call. It is compiled and made known to XLA when a program first calls it.

  Attributes:
    name: of the target, new in this process.
    count: jitted, `count(arguments)`: how many items of work a call has. Items are independent, so
      that they may be shared out among threads; a row's bits know nothing of the others.
    work: jitted, `work(arguments, results, first, last, worker)`: does the items from `first` to
      before `last`. Scratch memory is the last result, f32[w, ...]; `worker` is the row of it that
      is this call's own.
  """

  name: str
  count: Callable[[Any], Any]
  work: Any

  def __call__(
    self,
    results: Sequence[jax.ShapeDtypeStruct],
    *operands: Array,
    aliases: dict[int, int] | None = None,
  ) -> tuple[Array, ...]:
    """Calls it in a traced program.

    Args:
      results: shapes, scratch memory among them.
      operands: as the handler reads them; those that are not used have no elements.
      aliases: operand to the result that is written in its place.
    """
    _register(self)
    call = jax.ffi.ffi_call(self.name, tuple(results), input_output_aliases=aliases)
    return tuple(call(*operands))


@functools.cache
def _register(handler: Handler) -> None:
  source = pathlib.Path(inspect.getfile(handler.work.py_func)).read_text()
  where = objects.address(handler.name, source, functools.partial(_compiled, handler))
  capsule = jax.ffi.pycapsule(ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(where))
  jax.ffi.register_ffi_target(handler.name, capsule, platform="cpu")


def _compiled(handler: Handler) -> str:
  """Returns the module of a handler in LLVM's language; its entry is named `objects.ENTRY`."""
  count, work = handler.count, handler.work

  def handler_entry(frame):  # The name is `objects.ENTRY`.
    if frame[1] != 0:
      extension = words(frame[1])
      if (extension[1] & 0xFFFFFFFF) == 1:  # What handlers are asked once, when registered.
        metadata = integers(extension[3])
        metadata[6], metadata[7], metadata[8] = _MAJOR, _MINOR, 0
        return 0
    before = flush_denormals()
    arguments, results = words(frame[9]), words(frame[14])
    first, worker = types.int64(0), types.int64(0)
    work(arguments, results, first, count(arguments), worker)
    restore_denormals(before)
    return 0

  signature = types.int64(types.CPointer(types.int64))
  options: dict[str, Any] = dict(no_cpython_wrapper=True, no_cfunc_wrapper=True)
  compiled: Any = numba.njit(signature, error_model="numpy", **options)(
    inspect.unwrap(handler_entry)
  )
  (module,) = compiled.inspect_llvm().values()
  return module
