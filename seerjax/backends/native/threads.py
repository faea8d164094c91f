"""Work sharing among threads of one call, on XLA's own thread pool.

Items are independent of each other, so the assignment of items to threads changes no bit. The
thread that XLA calls is always one of the workers; the others are tasks of the program's pool
(`XLA_FFI_ThreadPool_Schedule`). XLA does not promise a thread for each task: a task that starts
late finds the call closed and leaves, so a call waits only for tasks that have started. Their
shared state therefore outlives the call: the last thread that releases it frees it.

A call may also go through stages; each waits for the previous one. A stage's pieces are claimed
by number, and a late thread finds them claimed and goes on to the current stage.

Several programs may run at once, one per virtual device. Busy threads are counted over the whole
process, and a call uses no more threads than there are idle processors.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
import numpy as np

from seerjax.backends.native import header
from seerjax.backends.native.numbers import jit
from seerjax.backends.native.pointers import intrinsic, is_x86, words

# Number of threads of a call, at least 1; by default one per processor.
VARIABLE = "SEERJAX_NATIVE_THREADS"
# Maximum number of threads: each has its own scratch memory.
_MOST = 8
# Multiply-adds of a piece that pay off: about 50 us. Two pieces of half this size took 90 us with
# two threads and 74 with one; two of this size took 89 and 130.
LEAST_COST = 1 << 21
# Pieces per thread: a late thread leaves its pieces to the others.
_PIECES = np.int64(4)

# Words of the shared state of a call; written ones have a cache line each.
_NEXT, _JOINED, _FINISHED, _HELD, _RECORD = map(np.int64, (0, 8, 16, 24, 32))
_ARGUMENTS, _RESULTS, _TOTAL, _PIECE, _PROCESS = map(np.int64, (40, 41, 42, 43, 44))
# For each stage, the number of claimed pieces and of finished ones, each in a cache line.
_STAGES, _STAGE_SIZE, STAGES = np.int64(48), np.int64(8), 5
_SIZE = _STAGES + STAGES * _STAGE_SIZE
# Added to the number of joined threads when no other thread may join.
_CLOSED = np.int64(1 << 32)
# Words of XLA's table of functions.
_DESTROY_ERROR, _SCHEDULE = np.int64(8), np.int64(17)
# Polls of a word before the thread yields its processor.
_LOOKS = np.int64(2000)

# State shared by all calls of this process: number of busy threads, minimum cost of a piece (which
# a test may change), and number of helper threads so far.
process = (ctypes.c_int64 * 3)(0, LEAST_COST, 0)
_LEAST, _HELPED = np.int64(1), np.int64(2)


def number() -> int:
  """Returns the maximum number of threads of a call, for programs that are traced now.

  Raises:
    ValueError: if `VARIABLE` is set to anything but a whole number from 1 on.
  """
  given = os.environ.get(VARIABLE)
  if given is None:
    return min(len(os.sched_getaffinity(0)), _MOST) if _has_pool() else 1
  if not given.isdecimal() or int(given) < 1:
    raise ValueError(
      f"{VARIABLE}: got {given!r}, expected a whole number of at least 1; unset it for one thread"
      " per processor."
    )
  return min(int(given), _MOST) if _has_pool() else 1


@functools.cache
def _has_pool() -> bool:
  """Returns whether XLA's thread pool functions have the known layout."""
  return header.differing_record(header.text(), header.POOL) is None


def _memory(builder, address) -> Any:
  return builder.inttoptr(address, ir.IntType(64).as_pointer())


@intrinsic
def _add(typing_context, address, value):
  """Adds to a word atomically (sequentially consistent); returns the old value."""

  def codegen(context, builder, signature, arguments):
    return builder.atomic_rmw("add", _memory(builder, arguments[0]), arguments[1], "seq_cst")

  return types.int64(types.int64, types.int64), codegen


@intrinsic
def _look(typing_context, address):
  """Loads a word with acquire semantics."""

  def codegen(context, builder, signature, arguments):
    return builder.load_atomic(_memory(builder, arguments[0]), "acquire", 8)

  return types.int64(types.int64), codegen


@intrinsic
def _pause(typing_context):
  """Emits the processor's hint for a spin loop."""

  def codegen(context, builder, signature, arguments):
    module, nothing = builder.module, ir.VoidType()
    if is_x86(builder):
      kind = ir.FunctionType(nothing, [])
      builder.call(cgutils.get_or_insert_function(module, kind, "llvm.x86.sse2.pause"), [])
    else:
      number = ir.IntType(32)
      kind = ir.FunctionType(nothing, [number])
      hint = cgutils.get_or_insert_function(module, kind, "llvm.aarch64.hint")
      builder.call(hint, [ir.Constant(number, 1)])
    return context.get_dummy_value()

  return types.void(), codegen


def _of_libc(name: str, returns: Any, takes: list[Any]) -> Any:
  """Returns an intrinsic for a C function of 64-bit words."""
  word = ir.IntType(64)

  @intrinsic
  def call(typing_context, argument):
    def codegen(context, builder, signature, arguments):
      kind = ir.FunctionType(returns, takes)
      function = cgutils.get_or_insert_function(builder.module, kind, name)
      out = builder.call(function, arguments[: len(takes)])
      return out if returns == word else builder.zext(out, word)

    return types.int64(types.int64), codegen

  return call


_word = ir.IntType(64)
_malloc = _of_libc("malloc", _word, [_word])
_sched_yield = _of_libc("sched_yield", ir.IntType(32), [])


@intrinsic
def _free(typing_context, address):
  def codegen(context, builder, signature, arguments):
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, "free"), arguments)
    return context.get_dummy_value()

  return types.void(types.int64), codegen


@intrinsic
def _call(typing_context, function, record):
  """Calls one of XLA's functions with a record; returns the result word."""

  def codegen(context, builder, signature, arguments):
    kind = ir.FunctionType(ir.IntType(64), [ir.IntType(64)])
    return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

  return types.int64(types.int64, types.int64), codegen


@jit
def _let_go(team):
  if _add(team + 8 * _HELD, np.int64(-1)) == 1:
    _free(team)


@jit
def ask(frame, task, limit, total, cost, process):
  """Schedules helper threads if they pay off; counts this thread as busy until `finish`.

  Args:
    frame (address): the call frame.
    task (address): the function that a pool thread runs.
    limit (int): maximum threads of this call.
    total (int): number of items.
    cost (int): multiply-adds of all items.
    process (address): address of `process`.

  Returns:
    address: the shared state, 0 if this thread is alone.
  """
  at_work = _add(process, np.int64(1)) + 1
  pieces = min(min(total, cost // words(process)[_LEAST]), _PIECES * limit)
  helpers = min(limit - at_work, pieces - 1)
  if helpers <= 0:
    return np.int64(0)
  team = _malloc(8 * _SIZE)
  shared = words(team)
  shared[_NEXT], shared[_JOINED], shared[_FINISHED], shared[_HELD] = 0, 0, 0, 1 + helpers
  shared[_ARGUMENTS], shared[_RESULTS] = frame[9], frame[14]
  for place in range(_STAGES, _SIZE):
    shared[place] = 0
  shared[_TOTAL], shared[_PIECE] = total, (total + pieces - 1) // pieces
  shared[_PROCESS] = process
  functions, record = words(frame[2]), words(team + 8 * _RECORD)
  for _ in range(helpers):
    record[0], record[1], record[2], record[3], record[4] = 40, 0, frame[3], task, team
    error = _call(functions[_SCHEDULE], team + 8 * _RECORD)
    if error != 0:  # The task will not run.
      record[0], record[2] = 24, error
      _call(functions[_DESTROY_ERROR], team + 8 * _RECORD)
      _let_go(team)
  return team


@jit
def join(team):
  """Starts a task: returns its thread number from 1 on, 0 if it came too late."""
  shared = words(team)
  joined = _add(team + 8 * _JOINED, np.int64(1))
  if joined >= _CLOSED:
    _let_go(team)
    return np.int64(0)
  _add(shared[_PROCESS], np.int64(1))
  _add(shared[_PROCESS] + 8 * _HELPED, np.int64(1))
  return joined + 1


@jit
def take(team):
  """Takes the next piece; returns its first item, or one past the last item if there is none."""
  return _add(team + 8 * _NEXT, words(team)[_PIECE])


@jit
def end_of(team, first):
  """Returns the end of the piece that begins with an item."""
  return min(first + words(team)[_PIECE], words(team)[_TOTAL])


@jit
def last_of(team):
  """Returns the number of items."""
  return words(team)[_TOTAL]


@jit
def claim(team, stage, before):
  """Returns the number of a stage's next piece; `before` is this thread's last piece, or -1."""
  if team == 0:
    return before + 1
  return _add(team + 8 * (_STAGES + stage * _STAGE_SIZE), np.int64(1))


@jit
def settle(team, stage):
  """Marks a claimed piece as done; its writes are visible then."""
  if team != 0:
    _add(team + 8 * (_STAGES + stage * _STAGE_SIZE + 1), np.int64(1))


@jit
def wait(team, stage, pieces):
  """Waits until all pieces of a stage, which are claimed already, are done."""
  if team == 0:
    return
  looks = np.int64(0)
  while _look(team + 8 * (_STAGES + stage * _STAGE_SIZE + 1)) < pieces:
    looks += 1
    _pause()
    if looks > _LOOKS:  # The other thread may need this processor.
      _sched_yield(looks)


@jit
def arguments_of(team):
  """Returns the arguments of the call."""
  return words(words(team)[_ARGUMENTS])


@jit
def results_of(team):
  """Returns the results of the call."""
  return words(words(team)[_RESULTS])


@jit
def leave(team):
  """Ends a task."""
  _add(words(team)[_PROCESS], np.int64(-1))
  _add(team + 8 * _FINISHED, np.int64(1))
  _let_go(team)


@jit
def finish(team, process):
  """Waits for the helper threads that have started, which work on the last pieces."""
  _add(process, np.int64(-1))
  if team == 0:
    return
  joined = _add(team + 8 * _JOINED, _CLOSED)
  looks = np.int64(0)
  while _look(team + 8 * _FINISHED) < joined:
    looks += 1
    _pause()
    if looks > _LOOKS:  # The other thread may need this processor.
      _sched_yield(looks)
  _let_go(team)
