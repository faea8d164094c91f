"""XLA's foreign function interface: handlers compiled by numba, and their calls from a program.

A handler is `XLA_FFI_Error* handler(XLA_FFI_CallFrame*)`. The frame is read as 64-bit words with
the offsets of `xla/ffi/api/c_api.h` (which ships with jaxlib; a test compares them):

    frame    1 extensions   2 functions of XLA   3 context   9 arguments   14 results
    buffer   2 element type   3 address   5 dimensions

A handler cannot raise: all checks happen while the program is traced. Results are not zeroed, and a
result may serve as scratch memory.
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
from numba import types

from seerjax.array_typing import Array
from seerjax.backends.native import front, objects, threads
from seerjax.backends.native.front import inlined, jit
from seerjax.backends.native.pointers import (
  address_of,
  flush_denormals,
  integers,
  restore_denormals,
  words,
)

# XLA's code of bfloat16; all other operands have 32 bits.
_BFLOAT16 = 16
# The API version that handlers report: the oldest supported JAX refuses a later one.
_MAJOR, _MINOR = 0, 1


@inlined
def address(buffers, index):
  """Returns the address of a buffer's first element."""
  return words(buffers[index])[3]


@inlined
def dimension(buffers, index, axis):
  """Returns the size of one of a buffer's axes."""
  return words(words(buffers[index])[5])[axis]


@inlined
def is_bfloat16(buffers, index):
  """Returns whether a buffer's elements are bfloat16."""
  return integers(buffers[index] + 16)[0] == _BFLOAT16


@inlined
def integer(buffers, index, place):
  """Returns an element of an i32 buffer, as int64."""
  return types.int64(integers(words(buffers[index])[3])[place])


@dataclasses.dataclass(frozen=True)
class Handler:
  """One kind of call, compiled and registered with XLA when a program first calls it.

  Attributes:
    name: name of the target, unique in this process.
    count: jitted, `count(arguments)`: number of items of work of a call. Items are independent, so
      threads may share them; a row's bits do not depend on other rows.
    work: jitted, `work(arguments, results, first, last, worker)`: processes items in [first, last).
      Scratch memory is the last result, f32[w, ...]; `worker` is this thread's row of it.
    cost: jitted, `cost(arguments)`: approximate multiply-adds of all items, for a call with up to
      `w` threads (`threads.number`); None for one thread.
    is_staged: if true, `work` is `work(arguments, results, team, worker)`, which every thread calls
      once and which goes through stages (`threads.claim`). `count` is not called.
  """

  name: str
  count: Callable[[Any], Any]
  work: Any
  cost: Callable[[Any], Any] | None = None
  is_staged: bool = False

  def __call__(
    self,
    results: Sequence[jax.ShapeDtypeStruct],
    *operands: Array,
    aliases: dict[int, int] | None = None,
  ) -> tuple[Array, ...]:
    """Calls the handler in a traced program.

    Args:
      results: shapes, scratch memory included.
      operands: as the handler reads them; unused ones have no elements.
      aliases: maps an operand to the result that is written in its place.
    """
    _register(self)
    call = jax.ffi.ffi_call(self.name, tuple(results), input_output_aliases=aliases)
    return tuple(call(*operands))


@functools.cache
def _register(handler: Handler) -> None:
  source = pathlib.Path(inspect.getfile(handler.work.py_func)).read_text()
  compiled = functools.partial(_compiled, handler)
  where = objects.address(handler.name, source, compiled, ctypes.addressof(threads.process))
  capsule = jax.ffi.pycapsule(ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(where))
  jax.ffi.register_ffi_target(handler.name, capsule, platform="cpu")


@jit
def _is_question(frame):
  """Answers the metadata query that XLA makes when a handler is registered."""
  if frame[1] == 0:
    return False
  extension = words(frame[1])
  if (extension[1] & 0xFFFFFFFF) != 1:
    return False
  metadata = integers(extension[3])
  metadata[6], metadata[7], metadata[8] = _MAJOR, _MINOR, 0
  return True


def _compiled(handler: Handler) -> Any:
  """Returns the compiled module of a handler, for `objects`."""
  cost = handler.cost
  if cost is None:
    python = _alone(handler)
  else:
    python = _staged(handler, cost) if handler.is_staged else _shared(handler, cost)
  word = types.int64
  return front.module_of(front.jit(python), word(types.CPointer(word), word, word))


def _alone(handler: Handler) -> Callable[..., Any]:
  """Returns the entry function of a handler that runs on the calling thread only."""
  count, work = handler.count, handler.work

  def handler_entry(frame, task, process):
    if _is_question(frame):
      return 0
    before = flush_denormals()
    arguments, results = words(frame[9]), words(frame[14])
    first, worker = types.int64(0), types.int64(0)
    work(arguments, results, first, count(arguments), worker)
    restore_denormals(before)
    return 0

  return handler_entry


def _shared(handler: Handler, cost: Callable[[Any], Any]) -> Callable[..., Any]:
  """Returns the entry function of a handler with shared items; helper threads pass task 0."""
  count, work = handler.count, handler.work

  def handler_entry(data, task, process):
    first, worker = types.int64(0), types.int64(0)
    if task != 0:
      if _is_question(data):
        return 0
      arguments, results = words(data[9]), words(data[14])
      last, threads_at_most = count(arguments), dimension(results, data[12] - 1, 0)
      team = threads.ask(data, task, threads_at_most, last, cost(arguments), process)
    else:
      team = address_of(data)
      worker = threads.join(team)
      if worker == 0:
        return 0
      arguments, results = threads.arguments_of(team), threads.results_of(team)
      last = threads.last_of(team)
    before = flush_denormals()
    if team != 0:
      first = threads.take(team)
    while first < last:
      end = last if team == 0 else threads.end_of(team, first)
      work(arguments, results, first, end, worker)
      first = last if team == 0 else threads.take(team)
    restore_denormals(before)
    if task != 0:
      threads.finish(team, process)
    else:
      threads.leave(team)
    return 0

  return handler_entry


def _staged(handler: Handler, cost: Callable[[Any], Any]) -> Callable[..., Any]:
  """Returns the entry function of a staged handler; helper threads pass task 0."""
  work = handler.work

  def handler_entry(data, task, process):
    worker = types.int64(0)
    if task != 0:
      if _is_question(data):
        return 0
      arguments, results = words(data[9]), words(data[14])
      threads_at_most = dimension(results, data[12] - 1, 0)
      most = types.int64(1) << 62  # The cost alone limits the number of pieces.
      team = threads.ask(data, task, threads_at_most, most, cost(arguments), process)
    else:
      team = address_of(data)
      worker = threads.join(team)
      if worker == 0:
        return 0
      arguments, results = threads.arguments_of(team), threads.results_of(team)
    before = flush_denormals()
    work(arguments, results, team, worker)
    restore_denormals(before)
    if task != 0:
      threads.finish(team, process)
    else:
      threads.leave(team)
    return 0

  return handler_entry
