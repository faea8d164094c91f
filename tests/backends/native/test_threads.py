"""Threads of a native call: their number, their start, and the state that they leave alone."""

import contextlib
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seerjax.backends.native import ffi, header, numbers, pointers, threads

HEADER = header.text()


@contextlib.contextmanager
def variable(value):
  before = os.environ.pop(threads.VARIABLE, None)
  os.environ[threads.VARIABLE] = value
  try:
    yield
  finally:
    os.environ.pop(threads.VARIABLE)
    if before is not None:
      os.environ[threads.VARIABLE] = before


@numbers.jit
def _count(arguments):
  return ffi.dimension(arguments, 0, 0)


@numbers.jit
def _cost(arguments):
  return ffi.integer(arguments, 1, 0)


@numbers.jit
def _work(arguments, results, first, last, worker):
  """Computes a long chain per item, and records the worker that ran it."""
  x, out = pointers.floats(ffi.address(arguments, 0)), pointers.floats(ffi.address(results, 0))
  who, turns = pointers.integers(ffi.address(results, 1)), ffi.integer(arguments, 1, 1)
  for item in range(first, last):
    total = x[item]
    for _ in range(turns):
      total = pointers.fma(total, x[item], x[item])
    out[item] = total
    who[item] = worker


_CHAINS = ffi.Handler("seerjax_test_chains", _count, _work, _cost)


def chains(x, num_threads, cost, turns):
  shapes = [
    jax.ShapeDtypeStruct(x.shape, jnp.float32),
    jax.ShapeDtypeStruct(x.shape, jnp.int32),
    jax.ShapeDtypeStruct((num_threads, 0), jnp.float32),
  ]
  run = jax.jit(lambda *operands: _CHAINS(shapes, *operands)[:2])
  return [np.asarray(part) for part in run(x, np.array([cost, turns], np.int32))]


def test_work_that_pays_is_shared_and_the_rest_stays_with_the_thread_that_is_called():
  x = np.linspace(0.1, 0.9, 64, dtype=np.float32)
  _, who = chains(x, 4, threads.LEAST_COST, 1000)
  assert not who.any()
  assert not chains(x, 1, 100 * threads.LEAST_COST, 1000)[1].any()
  before = threads.process[2]
  for _ in range(100):  # On a busy machine the other threads start late.
    shared, who = chains(x, 4, 100 * threads.LEAST_COST, 100_000)
    np.testing.assert_array_equal(shared, chains(x, 1, 0, 100_000)[0])
    assert who.max() < 4
    if who.any():
      break
  assert who.any()
  assert threads.process[2] > before
  assert threads.process[0] == 0


@numbers.jit
def _work_in_stages(arguments, results, team, worker):
  """Each item of a stage is the sum of all items of the stage before, and a chain."""
  items, turns = ffi.dimension(arguments, 0, 0), ffi.integer(arguments, 1, 1)
  before, who = ffi.address(arguments, 0), pointers.integers(ffi.address(results, 1))
  for stage in range(threads.STAGES):
    given = pointers.floats(before)
    before = ffi.address(results, 0) + 4 * stage * items
    out = pointers.floats(before)
    item = threads.claim(team, stage, np.int64(-1))
    while item < items:
      total = numbers.f32(item)
      for place in range(items):
        total += given[place]
      for _ in range(turns):
        total = pointers.fma(total, numbers.f32(0.5), numbers.f32(1.0))
      out[item] = total
      who[stage * items + item] = worker
      threads.settle(team, stage)
      item = threads.claim(team, stage, item)
    threads.wait(team, stage, items)


_STAGES = ffi.Handler("seerjax_test_stages", _count, _work_in_stages, _cost, is_staged=True)


def stages(x, num_threads, cost, turns):
  shapes = [
    jax.ShapeDtypeStruct((threads.STAGES, *x.shape), jnp.float32),
    jax.ShapeDtypeStruct((threads.STAGES, *x.shape), jnp.int32),
    jax.ShapeDtypeStruct((num_threads, 0), jnp.float32),
  ]
  run = jax.jit(lambda *operands: _STAGES(shapes, *operands)[:2])
  return [np.asarray(part) for part in run(x, np.array([cost, turns], np.int32))]


def test_a_stage_reads_what_all_threads_wrote_in_the_one_before():
  x = np.linspace(0.1, 0.9, 64, dtype=np.float32)
  alone, who = stages(x, 1, 0, 10)
  assert not who.any()
  shared = 0
  for turns in [10] * 50 + [100_000] * 20:  # On a busy machine the other threads start late.
    found, who = stages(x, 4, 100 * threads.LEAST_COST, turns)
    np.testing.assert_array_equal(found, alone if turns == 10 else found)
    shared += who.any()
    if turns > 10 and who.any():
      np.testing.assert_array_equal(found, stages(x, 1, 0, turns)[0])
      break
  assert shared
  assert threads.process[0] == 0


def test_a_call_leaves_processors_to_others_at_work():
  x = np.linspace(0.1, 0.9, 64, dtype=np.float32)
  threads.process[0] += 3
  before = threads.process[2]
  try:
    chains(x, 4, 100 * threads.LEAST_COST, 1000)
  finally:
    threads.process[0] -= 3
  assert threads.process[2] == before


def test_the_number_of_threads_is_the_processors_unless_it_is_set():
  before = os.environ.pop(threads.VARIABLE, None)
  try:
    assert threads.number() == min(len(os.sched_getaffinity(0)), 8)
  finally:
    if before is not None:
      os.environ[threads.VARIABLE] = before
  with variable("3"):
    assert threads.number() == 3


@pytest.mark.parametrize("value", ["0", "two", "-1", ""])
def test_a_number_of_threads_that_is_none_is_refused(value):
  with (
    variable(value),
    pytest.raises(ValueError, match=f"SEERJAX_NATIVE_THREADS: got '{value}', expected a whole"),
  ):
    threads.number()


@pytest.mark.parametrize(
  ("old", "new", "name"),
  [
    ("FIELD(XLA_FFI_Stream_Get);\n", "FIELD(XLA_FFI_X);\n  _XLA_FFI_API_STRUCT_FIELD(XLA_FFI_Y);\n",
     "XLA_FFI_Api"),
    ("  XLA_FFI_Task* task;\n", "", "XLA_FFI_ThreadPool_Schedule_Args"),
  ],
)  # fmt: skip
def test_functions_of_the_pool_in_other_places_are_noticed(old, new, name):
  assert header.differing_record(HEADER, header.POOL) is None
  assert old in HEADER
  assert header.differing_record(HEADER.replace(old, new, 1), header.POOL) == name


def test_the_pool_of_the_oldest_supported_version_is_known():
  renamed = HEADER.replace("XLA_FFI_InvokeContext_Get)", "XLA_FFI_ExecutionContext_Get)")
  renamed = renamed.replace("XLA_FFI_Error_GetDetails)", "XLA_FFI_Error_GetMessage)")
  assert header.differing_record(renamed, header.POOL) is None
