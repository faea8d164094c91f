"""Threads of one call: each free thread takes pieces of its items, on XLA's own pool.

Items are independent of each other, so who computes one, and when, moves no bit. The thread that
XLA calls is always one of the workers, and the others are tasks of the pool of the program
(`XLA_FFI_ThreadPool_Schedule`). XLA promises no task a thread of its own: one that begins late
finds the call closed and leaves, so that a call waits only for those that have begun. What they
share therefore outlives the call: the last thread that lets go of it gives it back.

A call may also go through stages, each of which waits for the one before it: its pieces are claimed
by number, and a thread that comes late finds them claimed and goes on to the present stage.

Several programs may run at once, one a virtual device. Threads at work are counted over the whole
process, and a call asks for no more than the processors that are left.
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

# The number of threads of a call, at least 1; without it one for each processor.
VARIABLE = "SEERJAX_NATIVE_THREADS"
# Each thread has scratch memory of its own: many processors would hold much of it.
_MOST = 8
# Multiply-adds that are worth a piece: about 50 us. Two pieces of half as many took 90 us with two
# threads and 74 with one, two of as many 89 and 130.
LEAST_COST = 1 << 21
# Pieces a thread: one that is late leaves its pieces to the others.
_PIECES = np.int64(4)

# Words of what the threads of a call share; those that are written have a cache line each.
_NEXT, _JOINED, _FINISHED, _HELD, _RECORD = map(np.int64, (0, 8, 16, 24, 32))
_ARGUMENTS, _RESULTS, _TOTAL, _PIECE, _PROCESS = map(np.int64, (40, 41, 42, 43, 44))
# Of each stage the pieces that are claimed and those that are done, in a cache line.
_STAGES, _STAGE_SIZE, STAGES = np.int64(48), np.int64(8), 5
_SIZE = _STAGES + STAGES * _STAGE_SIZE
# Added to the number of those that joined once no other thread may.
_CLOSED = np.int64(1 << 32)
# Words of XLA's list of functions.
_DESTROY_ERROR, _SCHEDULE = np.int64(8), np.int64(17)
# Looks at a word before the processor is left to others.
_LOOKS = np.int64(2000)

# What all calls of this process share: how many threads are at work, what is worth a piece (which a
# test may change), and how many threads have come to help so far.
process = (ctypes.c_int64 * 3)(0, LEAST_COST, 0)
_LEAST, _HELPED = np.int64(1), np.int64(2)


def number() -> int:
  """Returns how many threads a call may have, as programs that are traced now have it.

  Raises:
    ValueError: if `VARIABLE` is set to anything but a whole number from 1 on.
  """
  given = os.environ.get(VARIABLE)
  if given is None:
    return min(len(os.sched_getaffinity(0)), _MOST) if _has_pool() else 1
  if not given.isdecimal() or int(given) < 1:
    raise ValueError(
      f"{VARIABLE}: got {given!r}, expected a whole number from 1 on; unset it for one thread a"
      " processor."
    )
  return min(int(given), _MOST) if _has_pool() else 1


@functools.cache
def _has_pool() -> bool:
  """Whether XLA's functions of its pool are those that are known."""
  return header.differing_record(header.text(), header.POOL) is None


def _memory(builder, address) -> Any:
  return builder.inttoptr(address, ir.IntType(64).as_pointer())


@intrinsic
def _add(typing_context, address, value):
  """Adds to a word as one step, seen by all threads; returns what it was."""

  def codegen(context, builder, signature, arguments):
    return builder.atomic_rmw("add", _memory(builder, arguments[0]), arguments[1], "seq_cst")

  return types.int64(types.int64, types.int64), codegen


@intrinsic
def _look(typing_context, address):
  """A word, as the other threads left it, and all that they wrote before."""

  def codegen(context, builder, signature, arguments):
    return builder.load_atomic(_memory(builder, arguments[0]), "acquire", 8)

  return types.int64(types.int64), codegen


@intrinsic
def _pause(typing_context):
  """Tells the processor that this is a loop which waits."""

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
  """A function of C of 64-bit words."""
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
  """Calls one of XLA's functions, which takes a record; returns its word."""

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
  """Asks for other threads if they pay; this one is counted as at work until `finish`.

  Args:
    frame (address): of the call.
    task (address): of what a thread of the pool is to run.
    limit (int): threads of this call at most.
    total (int): items.
    cost (int): multiply-adds of all of them.
    process (address): of `process`.

  Returns:
    address: what they share, 0 if this thread is alone.
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
  """What a task begins with: its number among the threads from 1 on, 0 if it came too late."""
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
  """The first item of the next piece; behind the last item if there is none."""
  return _add(team + 8 * _NEXT, words(team)[_PIECE])


@jit
def end_of(team, first):
  """The end of the piece that begins with an item."""
  return min(first + words(team)[_PIECE], words(team)[_TOTAL])


@jit
def last_of(team):
  """The number of items."""
  return words(team)[_TOTAL]


@jit
def claim(team, stage, before):
  """The number of a stage's next piece; `before` is what this thread claimed last, or -1."""
  if team == 0:
    return before + 1
  return _add(team + 8 * (_STAGES + stage * _STAGE_SIZE), np.int64(1))


@jit
def settle(team, stage):
  """Says that a claimed piece is done, and what it wrote is there."""
  if team != 0:
    _add(team + 8 * (_STAGES + stage * _STAGE_SIZE + 1), np.int64(1))


@jit
def wait(team, stage, pieces):
  """Returns when all pieces of a stage are done; they are claimed already."""
  if team == 0:
    return
  looks = np.int64(0)
  while _look(team + 8 * (_STAGES + stage * _STAGE_SIZE + 1)) < pieces:
    looks += 1
    _pause()
    if looks > _LOOKS:  # The other may be waiting for this processor.
      _sched_yield(looks)


@jit
def arguments_of(team):
  """The arguments of the call."""
  return words(words(team)[_ARGUMENTS])


@jit
def results_of(team):
  """The results of the call."""
  return words(words(team)[_RESULTS])


@jit
def leave(team):
  """What a task ends with."""
  _add(words(team)[_PROCESS], np.int64(-1))
  _add(team + 8 * _FINISHED, np.int64(1))
  _let_go(team)


@jit
def finish(team, process):
  """Waits for the threads that have begun, whose pieces are the last ones."""
  _add(process, np.int64(-1))
  if team == 0:
    return
  joined = _add(team + 8 * _JOINED, _CLOSED)
  looks = np.int64(0)
  while _look(team + 8 * _FINISHED) < joined:
    looks += 1
    _pause()
    if looks > _LOOKS:  # The other may be waiting for this processor.
      _sched_yield(looks)
  _let_go(team)
