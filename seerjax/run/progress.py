"""Reports a run's current activity at least every ten seconds.

    step 3 of 20: sampling, 212 of 384 requests, 3,412 tokens/s, 9 s left here, 4 min left in all
    step 1 of 20: learning; compiling jit(gradient) for 8 s

A separate thread reports, so that long compilations are not silent. On a terminal the text is shown
next to the progress bar and updated every second. Elsewhere it is printed as a line if nothing else
was printed for that long. No result of a run depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
import contextlib
import dataclasses
import threading
import time
from typing import Any, TypeVar

import jax
from numba.core import event as numba_events

T = TypeVar("T")

LINE_SECONDS = 10.0  # Longest time without a line.
TICK = 1.0  # Seconds.
RECENT = 10.0  # Window of the token rate, in seconds.
# Prefix of JAX's events at the start and end of tracing, lowering and compiling.
COMPILING = "/jax/core/compile/"
NUMBA_COMPILES = "numba:compile"
SAYS_MUCH = 20  # Time left is estimated once 1/20 of the requests are finished.
COMPILES_LONG = 1.0  # Seconds; shorter compilations are not reported.


@dataclasses.dataclass(eq=False)
class Phase:
  """One activity of a run.

  Attributes:
    name: for example "sampling".
    total: number of requests, 0 if it has none.
    num_tokens: returns the tokens sampled so far, from any starting count.
    began: start time in seconds, by the clock of `Progress`.
    details: returns further text; "" if there is none.
    num_finished: finished requests.
    seen: recent (seconds, tokens) pairs.
  """

  name: str
  total: int
  num_tokens: Callable[[], int] | None
  began: float
  details: Callable[[], str] = str
  num_finished: int = 0
  seen: list[tuple[float, int]] = dataclasses.field(default_factory=list)


class Progress:
  """Tracks and reports the phases of a run. Use as a context manager."""

  def __init__(
    self,
    say: Callable[[str], None],
    *,
    every: float = LINE_SECONDS,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Configures the output.

    Args:
      say: receives lines for display.
      every: longest time without a line, in seconds.
      clock: returns seconds.
    """
    self._say, self._every, self._clock = say, every, clock
    self._show: Callable[[str], bool] = lambda text: False
    self._beat: Callable[[str], None] = lambda text: None
    self._phases: list[Phase] = []
    self._compiling: list[tuple[str, float]] = []
    self._numba = _Numba(self._compiling, clock)
    self._step = self._num_steps = 0
    self._steps: list[float] = []  # Duration of each step, in seconds.
    self._step_began = self._printed_at = self._beat_at = clock()
    self._beating = threading.Lock()
    self._ended = threading.Event()
    self._thread: threading.Thread | None = None

  # Called by the run.

  def say(self, line: str) -> None:
    """Prints a line now."""
    self._say(line)
    self.has_printed()

  def has_printed(self) -> None:
    """Records that another line was printed."""
    self._printed_at = self._clock()

  def begin_step(self, step: int, num_steps: int) -> None:
    """Starts a step (counted from 1) and ends the previous one."""
    now = self._clock()
    if self._step and step > self._step:
      self._steps.append(now - self._step_began)
    self._step, self._num_steps, self._step_began = step, num_steps, now

  def end_steps(self) -> None:
    """Ends the last step."""
    self._step = 0

  @contextlib.contextmanager
  def phase(
    self,
    name: str,
    *,
    total: int = 0,
    num_tokens: Callable[[], int] | None = None,
    details: Callable[[], str] = str,
  ) -> Iterator[Phase]:
    """Marks the block as a phase of the run.

    Args:
      name: for example "sampling".
      total: number of requests, 0 if it has none.
      num_tokens: returns the tokens sampled so far, from any starting count.
      details: returns further text; "" if there is none.
    """
    phase = Phase(name, total, num_tokens, self._clock(), details)
    self._phases.append(phase)
    try:
      yield phase
    finally:
      self._phases.remove(phase)

  def judged(self, completions: Iterable[T], phase: Phase) -> Iterator[T]:
    """Yields completions, counting each as finished; the consumer's time counts as judging."""
    for completion in completions:
      phase.num_finished += 1
      with self.phase("judging"):
        yield completion

  # Output.

  @property
  def text(self) -> str:
    """The current activity in one line; "" if unknown."""
    now = self._clock()
    head = f"step {self._step} of {self._num_steps}" if self._step else ""
    parts, left = [], []
    for phase in self._phases:
      parts.append(phase.name)
      if phase.total:
        parts.append(f"{phase.num_finished:,} of {phase.total:,} requests")
      if phase.num_tokens is not None:
        parts += self._rate(phase, phase.num_tokens(), now)
      # The first few requests do not predict the others.
      if phase.total <= SAYS_MUCH * phase.num_finished < SAYS_MUCH * phase.total:
        rest = (now - phase.began) * (phase.total - phase.num_finished) / phase.num_finished
        left = [f"{duration(rest)} left here"]
    if self._step and self._steps:
      mean = sum(self._steps) / len(self._steps)
      rest = (self._num_steps - self._step) * mean + max(0.0, mean - (now - self._step_began))
      left.append(f"{duration(rest)} left in all")
    text = ": ".join(part for part in (head, ", ".join(parts + left)) if part)
    for details in filter(None, (phase.details() for phase in [*self._phases])):
      text += f"; {details}"
    compiling = self._compiling[:1]  # The outermost; another thread may remove it concurrently.
    if compiling and now - compiling[0][1] >= COMPILES_LONG:
      name, began = compiling[0]
      text += f"{'; ' if text else ''}compiling {name} for {duration(now - began)}"
    return text

  def _rate(self, phase: Phase, count: int, now: float) -> list[str]:
    """Returns the recent token rate as text; [] if no tokens were sampled."""
    phase.seen = [one for one in phase.seen if now - one[0] <= RECENT] + [(now, count)]
    begin, before = phase.seen[0]
    return [f"{(count - before) / (now - begin):,.0f} tokens/s"] if count > before else []

  @contextlib.contextmanager
  def shown(self, show: Callable[[str], bool]) -> Iterator[None]:
    """Within the block, `show` receives the text every second; it returns whether it is visible."""
    self._show = show
    try:
      yield
    finally:
      self._show = lambda text: False

  @contextlib.contextmanager
  def beaten(self, beat: Callable[[str], None]) -> Iterator[None]:
    """Within the block, `beat` receives the text every ten seconds, whatever else is printed."""
    self._beat = beat
    try:
      yield
    finally:
      with self._beating:  # No call starts after this.
        self._beat = lambda text: None

  def tick(self) -> None:
    """Reports whatever is due."""
    now, text = self._clock(), self.text
    if not text:
      return
    if self._show(text):
      self._printed_at = now
    elif now - self._printed_at >= self._every:
      self.say(text)
    if now - self._beat_at >= self._every:
      self._beat_at = now
      with self._beating:
        self._beat(text)

  def __enter__(self) -> Progress:
    numba_events.register(NUMBA_COMPILES, self._numba)
    jax.monitoring.register_scalar_listener(self._compile_begins)
    jax.monitoring.register_event_duration_secs_listener(self._compile_ends)
    self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
    self._thread.start()
    return self

  def __exit__(self, *_: object) -> None:
    self._ended.set()
    assert self._thread is not None
    self._thread.join()
    numba_events.unregister(NUMBA_COMPILES, self._numba)
    jax.monitoring.unregister_scalar_listener(self._compile_begins)
    jax.monitoring.unregister_event_duration_listener(self._compile_ends)

  def _run(self) -> None:
    while not self._ended.wait(min(TICK, self._every)):
      self.tick()

  def _compile_begins(self, event: str, value: float | int, **about: Any) -> None:
    del value
    if event.startswith(COMPILING):
      self._compiling.append((str(about["fun_name"]), self._clock()))

  def _compile_ends(self, event: str, duration_secs: float, **about: Any) -> None:
    del duration_secs, about
    if event.startswith(COMPILING) and self._compiling:
      self._compiling.pop()


class _Numba(numba_events.Listener):
  """Records the start and end of numba compilations."""

  def __init__(self, compiling: list[tuple[str, float]], clock: Callable[[], float]):
    self._compiling, self._clock = compiling, clock

  def on_start(self, event: numba_events.Event) -> None:
    assert event.data is not None
    self._compiling.append((event.data["dispatcher"].py_func.__name__, self._clock()))

  def on_end(self, event: numba_events.Event) -> None:
    del event
    if self._compiling:
      self._compiling.pop()


def silent() -> Progress:
  """Returns a `Progress` that prints nothing."""
  return Progress(lambda line: None)


def duration(seconds: float) -> str:
  """Formats seconds as "9 s", "4 min" or "2.5 h"."""
  if seconds < 100:
    return f"{seconds:.0f} s"
  return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
