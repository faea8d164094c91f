"""What a run is doing, reported at least every ten seconds.

    step 3 of 20: sampling, 212 of 384 requests, 3,412 tokens/s, 9 s left here, 4 min left in all
    step 1 of 20: learning; compiling jit(gradient) for 8 s

A thread of its own reports it, so that a long compilation is not silent. On a terminal it stands
next to the bar and changes every second; elsewhere it is a line, where nothing else was printed for
so long. It is for people: nothing that a run computes depends on it.
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

LINE_SECONDS = 10.0  # Without a line, at most.
TICK = 1.0  # Seconds.
RECENT = 10.0  # Seconds that a rate is measured over.
# JAX names what it traces, lowers and compiles, as each begins and as it ends.
COMPILING = "/jax/core/compile/"
NUMBA_COMPILES = "numba:compile"
SAYS_MUCH = 20  # A twentieth of the requests.
COMPILES_LONG = 1.0  # Seconds; what is shorter is not named.


@dataclasses.dataclass(eq=False)
class Phase:
  """What a run is at.

  Attributes:
    name: such as "sampling".
    total: requests of it, 0 if it has none.
    num_tokens: returns those sampled so far, from any beginning.
    began: seconds, by the clock of `Progress`.
    details: returns what more there is to say; "" if nothing.
    num_finished: requests.
    seen: (seconds, tokens), of the last while.
  """

  name: str
  total: int
  num_tokens: Callable[[], int] | None
  began: float
  details: Callable[[], str] = str
  num_finished: int = 0
  seen: list[tuple[float, int]] = dataclasses.field(default_factory=list)


class Progress:
  """Phases of a run and how far each is. Use as a context manager."""

  def __init__(
    self,
    say: Callable[[str], None],
    *,
    every: float = LINE_SECONDS,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Takes who says a line.

    Args:
      say: takes lines for people.
      every: seconds without a line, at most.
      clock: seconds.
    """
    self._say, self._every, self._clock = say, every, clock
    self._show: Callable[[str], bool] = lambda text: False
    self._beat: Callable[[str], None] = lambda text: None
    self._phases: list[Phase] = []
    self._compiling: list[tuple[str, float]] = []
    self._numba = _Numba(self._compiling, clock)
    self._step = self._num_steps = 0
    self._steps: list[float] = []  # Seconds of each.
    self._step_began = self._printed_at = self._beat_at = clock()
    self._beating = threading.Lock()
    self._ended = threading.Event()
    self._thread: threading.Thread | None = None

  # What a run tells.

  def say(self, line: str) -> None:
    """Says a line now."""
    self._say(line)
    self.has_printed()

  def has_printed(self) -> None:
    """Is told that another line was printed."""
    self._printed_at = self._clock()

  def begin_step(self, step: int, num_steps: int) -> None:
    """Begins a step, from 1; the one before is finished."""
    now = self._clock()
    if self._step and step > self._step:
      self._steps.append(now - self._step_began)
    self._step, self._num_steps, self._step_began = step, num_steps, now

  def end_steps(self) -> None:
    """The last step is finished."""
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
    """Within, the run is at `name`.

    Args:
      name: such as "sampling".
      total: requests of it, 0 if it has none.
      num_tokens: those sampled so far, from any beginning.
      details: returns what more there is to say; "" if nothing.
    """
    phase = Phase(name, total, num_tokens, self._clock(), details)
    self._phases.append(phase)
    try:
      yield phase
    finally:
      self._phases.remove(phase)

  def judged(self, completions: Iterable[T], phase: Phase) -> Iterator[T]:
    """Yields completions, each a finished request of `phase`; who has one is judging it."""
    for completion in completions:
      phase.num_finished += 1
      with self.phase("judging"):
        yield completion

  # What people read.

  @property
  def text(self) -> str:
    """What the run is at, in one line; "" if that is not known."""
    now = self._clock()
    head = f"step {self._step} of {self._num_steps}" if self._step else ""
    parts, left = [], []
    for phase in self._phases:
      parts.append(phase.name)
      if phase.total:
        parts.append(f"{phase.num_finished:,} of {phase.total:,} requests")
      if phase.num_tokens is not None:
        parts += self._rate(phase, phase.num_tokens(), now)
      # The first few say little of the others.
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
    compiling = self._compiling[:1]  # The outermost; another thread may end it meanwhile.
    if compiling and now - compiling[0][1] >= COMPILES_LONG:
      name, began = compiling[0]
      text += f"{'; ' if text else ''}compiling {name} for {duration(now - began)}"
    return text

  def _rate(self, phase: Phase, count: int, now: float) -> list[str]:
    """Returns tokens a second of the last seconds, [] if there were none."""
    phase.seen = [one for one in phase.seen if now - one[0] <= RECENT] + [(now, count)]
    begin, before = phase.seen[0]
    return [f"{(count - before) / (now - begin):,.0f} tokens/s"] if count > before else []

  @contextlib.contextmanager
  def shown(self, show: Callable[[str], bool]) -> Iterator[None]:
    """Within, `show` takes the text every second, and returns whether people see it there."""
    self._show = show
    try:
      yield
    finally:
      self._show = lambda text: False

  @contextlib.contextmanager
  def beaten(self, beat: Callable[[str], None]) -> Iterator[None]:
    """Within, `beat` takes the text every ten seconds, whatever else is printed."""
    self._beat = beat
    try:
      yield
    finally:
      with self._beating:  # No beat comes after this.
        self._beat = lambda text: None

  def tick(self) -> None:
    """Says what is due."""
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
  """Hears what numba compiles as it begins and ends."""

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
  """Returns one that prints nothing, for callers that have no other."""
  return Progress(lambda line: None)


def duration(seconds: float) -> str:
  """Returns "9 s", "4 min" or "2.5 h"."""
  if seconds < 100:
    return f"{seconds:.0f} s"
  return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
