"""Handles Ctrl-C and SIGTERM: either one stops a run after the current step completes.

    with stops.handled() as handler:   SIGTERM raises Terminated, as Ctrl-C raises KeyboardInterrupt
      ...                              ... immediately, in the main thread
      with handler.put_off():          ... or at the end of a block that must complete
        save()

Python handles signals between bytecodes, so a signal that arrives during an XLA compilation is
handled after it. If an exception cannot propagate (in a Python callback of C code, as in LLVM), the
signal is sent again until it can. A second signal during a deferral raises immediately.
Source: https://docs.python.org/3/library/signal.html, "Note on Signal Handlers and Exceptions".
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os
import signal
import sys
import threading
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AGAIN_SECONDS = 0.05


class Terminated(KeyboardInterrupt):
  """Raised on SIGTERM."""


class Interrupted(Exception):
  """Raised when Ctrl-C or SIGTERM stopped a command; the message says what was saved.

  Attributes:
    status: exit status for the program, by shell convention: 130 or 143.
  """

  def __init__(self, message: str, status: int):
    super().__init__(message)
    self.status = status


def status_of(stop: KeyboardInterrupt) -> int:
  """Returns the exit status for a stop: 128 plus the signal number."""
  return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


def name_of(stop: KeyboardInterrupt) -> str:
  """Returns the name of the stop for display."""
  return "SIGTERM" if isinstance(stop, Terminated) else "Ctrl-C"


class Stops:
  """Handler of both signals; see `handled`."""

  def __init__(self):
    self._depth = 0
    self._waiting: int | None = None
    self._has_raised = False

  def __call__(self, number: int, frame: Any) -> None:
    """Raises or defers; Python calls this in the main thread."""
    del frame
    if self._depth and self._waiting is None:
      self._waiting = number
      # Not `print`, because the signal may have interrupted one.
      os.write(2, b"\nstopping as soon as this is whole; once more stops at once\n")
      return
    self._raise(number)

  @property
  def waiting(self) -> int:
    """The deferred signal; 0 if there is none."""
    return self._waiting or 0

  def raise_together(self, number: int) -> None:
    """Raises for a signal that any process of a slice has deferred; 0 is none."""
    if number:
      self._waiting = None
      self._raise(number)

  def _raise(self, number: int) -> None:
    self._has_raised = True
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

  def send_again(self, stop: KeyboardInterrupt) -> None:
    """Sends a signal again after its exception was raised where it could not propagate."""
    number = signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT
    self._has_raised = False
    # With a delay, because the caller is still where exceptions are lost.
    timer = threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()

  @contextlib.contextmanager
  def put_off(self) -> Iterator[None]:
    """Defers signals to the end of the block; drops them if one was already raised."""
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
def handled() -> Iterator[Stops]:
  """Routes both signals to the yielded `Stops` within the block.

  Handlers that the caller installed remain, as do ignored signals (Ctrl-C in a shell's background
  jobs). Outside the main thread no handler is installed.
  """
  stops, before, usual_hook = Stops(), {}, sys.unraisablehook
  if threading.current_thread() is threading.main_thread():
    for number in SIGNALS:
      handler = signal.getsignal(number)
      usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
      if handler is usual or isinstance(handler, Stops):
        before[number] = handler
        signal.signal(number, stops)

  def hook(lost: Any) -> None:
    if isinstance(lost.exc_value, KeyboardInterrupt):
      stops.send_again(lost.exc_value)
    else:
      usual_hook(lost)

  if before:
    sys.unraisablehook = hook
  try:
    yield stops
  finally:
    if sys.unraisablehook is hook:
      sys.unraisablehook = usual_hook
    for number, handler in before.items():
      signal.signal(number, handler)
