"""Ctrl-C and SIGTERM: both end a run after its last whole step, and neither within one.

    with stops.heard() as heard:       SIGTERM raises Terminated, as Ctrl-C raises KeyboardInterrupt
      ...                              ... at once, wherever the main thread is
      with heard.put_off():            ... or at the end of what has to be whole
        save()

A signal is heard between two lines of Python: one that comes while XLA compiles is heard when it
has compiled. Who sends it a second time, while it is put off, means it: that one raises at once.
Source: https://docs.python.org/3/library/signal.html, "Note on Signal Handlers and Exceptions".
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os
import signal
import threading
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
  """SIGTERM has come."""


class Interrupted(Exception):
  """A run was stopped by Ctrl-C or SIGTERM after its last whole step was saved.

  Attributes:
    status: that the program should end with: 130 or 143, as a shell says it.
  """

  def __init__(self, message: str, status: int):
    super().__init__(message)
    self.status = status


def status_of(stop: KeyboardInterrupt) -> int:
  """Returns the status of a program that was stopped so: 128 and the signal's number."""
  return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


def name_of(stop: KeyboardInterrupt) -> str:
  """Returns what people call it."""
  return "SIGTERM" if isinstance(stop, Terminated) else "Ctrl-C"


class Stops:
  """A handler of both signals; see `heard`."""

  def __init__(self):
    self._depth = 0
    self._waiting: int | None = None
    self._has_raised = False

  def __call__(self, number: int, frame: Any) -> None:
    """Raises, or remembers; Python calls it in the main thread."""
    del frame
    if self._depth and self._waiting is None:
      self._waiting = number
      # Not by `print`: the signal may have come in the middle of one.
      os.write(2, b"\nstopping as soon as this is whole; once more stops at once\n")
      return
    self._raise(number)

  def _raise(self, number: int) -> None:
    self._has_raised = True
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

  @contextlib.contextmanager
  def put_off(self) -> Iterator[None]:
    """Within, a signal waits until the end; after one was raised already, the next is forgotten."""
    self._depth += 1
    try:
      yield
    finally:
      self._depth -= 1
    if not self._depth and self._waiting is not None:
      number, self._waiting = self._waiting, None
      if not self._has_raised:
        self._raise(number)


@contextlib.contextmanager
def heard() -> Iterator[Stops]:
  """Within, both signals are heard by the `Stops` that it yields.

  Handlers of the caller's own stay, and so does what is ignored (Ctrl-C, in a shell's background);
  in another thread than the main one nothing is heard.
  """
  stops, before = Stops(), {}
  if threading.current_thread() is threading.main_thread():
    for number in SIGNALS:
      handler = signal.getsignal(number)
      usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
      if handler is usual or isinstance(handler, Stops):
        before[number] = handler
        signal.signal(number, stops)
  try:
    yield stops
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
