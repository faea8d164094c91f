"""Machine code of the handlers: numba's optimisations are limited, and files are reused."""

import concurrent.futures
import ctypes
import re
import threading

import jax
from numba import types
import pytest

from seerjax.backends.native import front, objects

SIGNATURE = types.int64(types.CPointer(types.int64), types.int64, types.int64)


@front.inlined
def twice(x):
  """A one-line function."""
  return x + x


@front.jit
def far(x, y):
  """A function that is not inlined."""
  return twice(x) - y


@front.jit
def far_again(frame, task, process):
  """A function that calls another one."""
  x, y = frame[0], frame[1]
  return far(x, y) + far(y, x)


@pytest.fixture
def folder(tmp_path):
  """Returns a new, empty folder for compiled files."""
  before = jax.config.jax_compilation_cache_dir
  jax.config.update("jax_compilation_cache_dir", str(tmp_path))
  yield tmp_path / "native"
  jax.config.update("jax_compilation_cache_dir", before)


def module():
  return front.module_of(far_again, SIGNATURE)


def called(address, *arguments):
  frame = (ctypes.c_int64 * 2)(*arguments)
  return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(address)(frame)


def unexpected():
  raise AssertionError("compiled again")


def calls(made):
  """Returns the names that a module's functions call."""
  return re.findall(r"call.*?@\"?([\w.]+)", str(made))


def test_a_module_has_one_symbol():
  assert "far_again" in front.entry_of(module()).name


def test_a_function_stays_one_copy_and_a_line_goes_into_what_calls_it():
  made = module()
  # As lowered, before any optimisation by numba.
  assert any("twice" in name for name in calls(made))
  objects.optimise(made)
  assert sum("far" in name for name in calls(made)) >= 2
  assert not any("twice" in name for name in calls(made))


def test_a_file_is_compiled_once(folder):
  assert called(objects.address("twice_made", "text", module, 0), 7, 4) == 11
  (path,) = folder.iterdir()
  written = path.stat().st_mtime_ns
  assert called(objects.address("twice_made", "text", unexpected, 0), 7, 4) == 11
  assert path.stat().st_mtime_ns == written


@pytest.mark.parametrize(
  "damage", [lambda code: code[:-9], lambda code: b"", lambda code: b"x" * 99]
)
def test_a_damaged_file_is_made_again(folder, damage):
  objects.address("damaged", "text", module, 0)
  (path,) = folder.iterdir()
  whole = path.read_bytes()
  path.write_bytes(damage(whole))
  assert called(objects.address("damaged", "text", module, 0), 1, 2) == 3
  assert path.read_bytes() == whole


def test_several_may_write_one_file_at_once(folder):
  count, everyone = 4, threading.Barrier(4)

  def compiled():
    everyone.wait()  # No process has found a file.
    return module()

  with concurrent.futures.ThreadPoolExecutor(count) as pool:
    waiting = [pool.submit(objects.address, "same", "text", compiled, 0) for _ in range(count)]
    assert [called(one.result(), 5, 6) for one in waiting] == [11] * count
  assert len(list(folder.iterdir())) == 1


def test_another_source_has_a_file_of_its_own(folder):
  objects.address("source", "text", module, 0)
  with pytest.raises(AssertionError, match="compiled again"):
    objects.address("source", "another text", unexpected, 0)
