"""Both signals stop a run: at once, or at the end of an atomic section."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

import pytest

from seerjax.run import stops


def send(number: int) -> None:
  os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def usual_handlers():
  """Restores the default handlers: a shell's background jobs start with SIGINT ignored."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
  assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
  signal.signal(signal.SIGINT, before)


def test_sigterm_raises_at_once_and_says_which_it_was():
  with pytest.raises(stops.Terminated) as caught, stops.handled():
    send(signal.SIGTERM)
  assert (stops.name_of(caught.value), stops.status_of(caught.value)) == ("SIGTERM", 143)


def test_ctrl_c_is_no_sigterm():
  with pytest.raises(KeyboardInterrupt) as caught, stops.handled():
    send(signal.SIGINT)
  assert not isinstance(caught.value, stops.Terminated)
  assert (stops.name_of(caught.value), stops.status_of(caught.value)) == ("Ctrl-C", 130)


@pytest.mark.parametrize("number", stops.SIGNALS)
def test_a_signal_that_comes_where_nothing_can_be_raised_comes_again(number):
  hook = sys.unraisablehook
  kind = stops.Terminated if number == signal.SIGTERM else KeyboardInterrupt
  called_by_c = ctypes.CFUNCTYPE(None)(lambda: send(number))

  def run():
    called_by_c()  # Raises nothing.
    time.sleep(30)

  with pytest.raises(kind), stops.handled():
    run()
  assert sys.unraisablehook is hook


def test_another_error_where_nothing_can_be_raised_is_reported_as_ever():
  def fails():
    raise ValueError("reported")

  before, reported = sys.unraisablehook, []
  sys.unraisablehook = lambda lost: reported.append(lost.exc_value)
  try:
    with stops.handled():
      ctypes.CFUNCTYPE(None)(fails)()
  finally:
    sys.unraisablehook = before
  assert [str(error) for error in reported] == ["reported"]


@pytest.mark.parametrize("number", stops.SIGNALS)
def test_a_signal_waits_for_the_end_of_what_has_to_be_whole(number, capfd):
  done = []

  def run(handler):
    with handler.put_off():
      with handler.put_off():
        send(number)
        done.append("inner")
      done.append("outer")
    done.append("never")

  with pytest.raises(KeyboardInterrupt), stops.handled() as handler:
    run(handler)
  assert done == ["inner", "outer"]
  assert "stopping as soon as this is whole; once more stops at once" in capfd.readouterr().err


def test_whoever_sends_it_twice_means_it():
  done = []

  def run():
    send(signal.SIGTERM)
    done.append("once")
    send(signal.SIGTERM)
    done.append("never")

  with pytest.raises(stops.Terminated), stops.handled() as handler, handler.put_off():
    run()
  assert done == ["once"]


def test_what_saves_after_a_stop_is_not_stopped_by_the_next():
  done = []
  with stops.handled() as handler:
    try:
      send(signal.SIGTERM)
    except KeyboardInterrupt:
      with handler.put_off():
        send(signal.SIGTERM)
        done.append("saved")
      done.append("and went on")
  assert done == ["saved", "and went on"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_processes_of_a_slice_stop_where_all_of_them_have_its_number(number):
  kind = stops.Terminated if number == signal.SIGTERM else KeyboardInterrupt
  with stops.handled() as handler, handler.put_off():
    handler.raise_together(0)  # No process has a signal.
    assert handler.waiting == 0
    send(number)
    assert handler.waiting == number
    with pytest.raises(kind):
      handler.raise_together(handler.waiting)
    assert handler.waiting == 0
  with stops.handled() as handler, handler.put_off(), pytest.raises(kind):
    handler.raise_together(number)  # Another process has the signal.


def test_within_another_the_inner_one_handles_it_and_the_outer_one_afterwards():
  def run():
    with pytest.raises(stops.Terminated), stops.handled():
      send(signal.SIGTERM)
    send(signal.SIGTERM)

  with pytest.raises(stops.Terminated), stops.handled():
    run()


def test_handlers_of_the_callers_own_stay():
  seen = []
  before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
  try:
    with stops.handled():
      send(signal.SIGTERM)
  finally:
    signal.signal(signal.SIGTERM, before)
  assert seen == [signal.SIGTERM]


def test_another_thread_than_the_main_one_hears_nothing_and_can_put_off_nothing():
  seen = []

  def work():
    with stops.handled() as handler, handler.put_off():
      seen.append(signal.getsignal(signal.SIGTERM))

  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  assert seen == [signal.SIG_DFL]
