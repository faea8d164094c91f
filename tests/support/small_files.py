"""A bound on the size of files, under which writes fail as on a full disk."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import resource
import signal


@contextlib.contextmanager
def bounded(num_bytes: int) -> Iterator[None]:
  """Lets no file of this process grow beyond `num_bytes`."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, ignored)
