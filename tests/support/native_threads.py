"""Number of threads of the native backend's calls."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os

from seerjax.backends.native import threads


@contextlib.contextmanager
def threaded(number: int) -> Iterator[None]:
  """Programs traced inside use `number` threads per call, for any amount of work."""
  before = os.environ.pop(threads.VARIABLE, None)
  os.environ[threads.VARIABLE] = str(number)
  threads.process[1] = 1
  try:
    yield
  finally:
    threads.process[1] = threads.LEAST_COST
    os.environ.pop(threads.VARIABLE)
    if before is not None:
      os.environ[threads.VARIABLE] = before
