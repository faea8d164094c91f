"""Progress lines of a run: phase, requests, tokens per second, time left, compilation by name."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numba
from numba.core import event as numba_events
import pytest

from seerjax.run import progress as progress_lib


class Clock:
  """A clock that stands until it is set."""

  def __init__(self):
    self.now = 0.0

  def __call__(self):
    return self.now


@pytest.fixture
def clock():
  return Clock()


def made(clock):
  lines = []
  return progress_lib.Progress(lines.append, clock=clock), lines


def test_nothing_is_at_nothing(clock):
  progress, lines = made(clock)
  clock.now = 100.0
  progress.tick()
  assert progress.text == "" and not lines


def test_a_phase_tells_requests_tokens_and_time_left(clock):
  progress, _ = made(clock)
  tokens = [0]
  progress.begin_step(3, 20)
  with progress.phase("sampling", total=8, num_tokens=lambda: tokens[0]) as phase:
    assert progress.text == "step 3 of 20: sampling, 0 of 8 requests"
    clock.now, tokens[0], phase.num_finished = 5.0, 10_000, 2
    assert progress.text == (
      "step 3 of 20: sampling, 2 of 8 requests, 2,000 tokens/s, 15 s left here"
    )
  assert progress.text == "step 3 of 20"


def test_the_rate_is_that_of_the_last_seconds(clock):
  progress, _ = made(clock)
  tokens = [0]
  with progress.phase("sampling", num_tokens=lambda: tokens[0]):
    rates = []
    for second in range(31):
      clock.now, tokens[0] = float(second), 100 * second if second <= 15 else 1500
      rates.append(progress.text)
  assert rates[15] == "sampling, 100 tokens/s" and rates[20] == "sampling, 50 tokens/s"
  assert rates[30] == "sampling"


def test_after_a_step_the_time_left_of_all_is_known(clock):
  progress, _ = made(clock)
  progress.begin_step(1, 4)
  clock.now = 60.0
  progress.begin_step(2, 4)
  clock.now = 80.0
  with progress.phase("learning"):
    assert progress.text == "step 2 of 4: learning, 3 min left in all"  # 40 + 2 * 60 s.
  progress.end_steps()
  with progress.phase("evaluating", total=4) as phase:
    phase.num_finished = 1
    clock.now = 90.0
    assert progress.text == "evaluating, 1 of 4 requests, 30 s left here"


def test_who_has_a_completion_is_judging_it(clock):
  progress, _ = made(clock)
  with progress.phase("sampling", total=2) as phase:
    seen = [(one, progress.text) for one in progress.judged(["a", "b"], phase)]
  assert seen == [
    ("a", "sampling, 1 of 2 requests, judging, 0 s left here"),
    ("b", "sampling, 2 of 2 requests, judging"),
  ]


def test_a_line_is_said_where_nothing_was_for_ten_seconds(clock):
  progress, lines = made(clock)
  with progress.phase("learning"):
    for clock.now in (1.0, 9.0, 10.0, 15.0, 20.0):
      progress.tick()
    assert lines == ["learning"] * 2  # After 10 and after 20 seconds.
    clock.now = 29.0
    progress.say("something else")
    clock.now = 38.0
    progress.tick()
    clock.now = 39.0
    progress.tick()
  assert lines == ["learning", "learning", "something else", "learning"]


def test_where_there_is_a_bar_the_text_stands_beside_it_and_no_line_is_said(clock):
  progress, lines = made(clock)
  shown = []
  with progress.phase("learning"), progress.shown(lambda text: bool(shown.append(text)) or True):
    for clock.now in (1.0, 2.0, 30.0):
      progress.tick()
  assert shown == ["learning"] * 3 and not lines


def test_every_ten_seconds_there_is_a_beat_whoever_says_what(clock):
  progress, _ = made(clock)
  beats = []
  with progress.phase("learning"), progress.beaten(beats.append):
    for second in range(31):
      clock.now = float(second)
      progress.has_printed()
      progress.tick()
  clock.now = 50.0
  with progress.phase("saving"):
    progress.tick()
  assert beats == ["learning"] * 3


def test_a_compilation_is_named_as_long_as_it_lasts_and_by_a_thread_of_its_own():
  lines = []

  @jax.jit
  def slow_to_trace(x):
    time.sleep(1.8)
    return x + 1

  with progress_lib.Progress(lines.append, every=0.5) as progress, progress.phase("learning"):
    slow_to_trace(jnp.zeros(3))
    after = progress.text
  assert any(line.startswith("learning; compiling slow_to_trace for ") for line in lines), lines
  assert after == "learning"
  count = len(lines)
  time.sleep(0.7)
  assert len(lines) == count  # The thread has ended.


def test_what_numba_compiles_is_named_too():
  seen = []

  @numba.njit  # Not kept on disk, where the next session would find it.
  def counted_by_numba(count):
    total = 0
    for place in range(count):
      total += place
    return total

  clock = Clock()
  progress = progress_lib.Progress(seen.append, clock=clock)

  class Watch(numba_events.Listener):
    def on_start(self, event):
      clock.now += 5.0
      seen.append(progress.text)

    def on_end(self, event):
      pass

  watch = Watch()
  with progress, numba_events.install_listener("numba:compile", watch):
    counted_by_numba(3)
    assert progress.text == ""
  assert seen[0] == "compiling counted_by_numba for 5 s"


@pytest.mark.parametrize(
  ("seconds", "text"), [(0.4, "0 s"), (99.0, "99 s"), (100.0, "2 min"), (9000.0, "2.5 h")]
)
def test_durations_are_short(seconds, text):
  assert progress_lib.duration(seconds) == text


def test_details_stand_behind_what_a_run_is_at(clock):
  progress = progress_lib.Progress(print, clock=clock)
  details = ["2 of 3 workers up"]
  with progress.phase("sampling", total=4, details=lambda: details[0]):
    assert progress.text == "sampling, 0 of 4 requests; 2 of 3 workers up"
    details[0] = ""
    assert progress.text == "sampling, 0 of 4 requests"
