"""Ctrl-C and SIGTERM: both end a run after its last whole step, and neither within one.

    with stops.heard() as heard:       SIGTERM raises Terminated, as Ctrl-C raises KeyboardInterrupt
      ...                              ... at once, wherever the main thread is
      with heard.put_off():            ... or at the end of what has to be whole
        save()

A signal is heard between two lines of Python: one that comes while XLA compiles is heard when it
has compiled. Where nothing can be raised (a function of ours that C calls, as LLVM does) it comes
again until it can. Who sends it a second time, while it is put off, means it: that one raises at
once.
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
  """SIGTERM has come."""


class Interrupted(Exception):
  """A command was stopped by Ctrl-C or SIGTERM, and its message says what it keeps.

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

  @property
  def waiting(self) -> int:
    """The signal that is put off; 0 if there is none."""
    return self._waiting or 0

  def raise_together(self, number: int) -> None:
    """Raises for a signal that some process of a slice has put off; 0 is none."""
    if number:
      self._waiting = None
      self._raise(number)

  def _raise(self, number: int) -> None:
    self._has_raised = True
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

  def send_again(self, stop: KeyboardInterrupt) -> None:
    """Sends a signal once more whose exception was raised where it could go nowhere."""
    number = signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT
    self._has_raised = False
    # Not at once: we are still where it would be lost.
    timer = threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()

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
