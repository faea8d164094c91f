"""What a step's sampling took: trace, drafts and seconds; and what people are told of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import pathlib
import time
from typing import NamedTuple

from seerjax.engine import engine as engine_lib
from seerjax.rollout import groups as groups_lib, trace as trace_lib
from seerjax.run import progress as progress_lib
from seerjax.run.drafter import RunDrafts
from seerjax.speculation import statistics
from seerjax.types import Completion, Request


class Counted(NamedTuple):
  """Tokens so far, of whatever samples.

  Attributes:
    sampled_tokens: all of them.
    drafted_tokens: that drafts proposed and that were verified.
    accepted_tokens: of those.
  """

  sampled_tokens: int
  drafted_tokens: int
  accepted_tokens: int


def counted_by(engine: engine_lib.Engine) -> Counted:
  """Returns what an engine has counted."""
  counters = engine.counters
  return Counted(counters.sampled_tokens, counters.drafted_tokens, counters.accepted_tokens)


class Measure:
  """Measures one step's sampling, from here to `finish`.

  Attributes:
    traces: of the step's rollouts, to be filled.
  """

  def __init__(
    self,
    engine: engine_lib.Engine,
    drafts: RunDrafts | None,
    counted: Callable[[], Counted] | None = None,
  ):
    """Begins.

    Args:
      engine: that samples.
      drafts: of its drafter, None if it has none of a run's.
      counted: so far, where it is not the engine that samples.
    """
    self._counted = counted or (lambda: counted_by(engine))
    self._begun_at = self._counted()
    self.traces: list[trace_lib.Trace] = []
    self._drafts = drafts
    self._begin = time.monotonic()
    if drafts is not None:
      drafts.take()  # Those of evaluations are not the step's.

  def finish(self, directory: pathlib.Path, step: int, *, num_old: int) -> dict[str, float]:
    """Appends the step's trace to its file in a directory, and returns the step's numbers.

    Args:
      directory: of the run.
      step: from 0.
      num_old: tokens of the step's groups that older weights sampled.
    """
    drafts = statistics.Acceptance() if self._drafts is None else self._drafts.take()
    done = trace_lib.StepTrace(self.traces, drafts)
    trace_lib.append(directory / trace_lib.FILE_NAME, step, done)
    seconds = time.monotonic() - self._begin
    sampled, drafted, accepted = (
      now - was for now, was in zip(self._counted(), self._begun_at, strict=True)
    )
    return trace_lib.summarise(self.traces) | {
      "schedule/drafted_tokens": float(drafted),
      "schedule/accepted_tokens": float(accepted),
      "rollout/seconds": seconds,
      "rollout/tokens_per_second": sampled / max(seconds, 1e-9),
      "rollout/old_tokens": float(num_old),
    }


def watched(
  progress: progress_lib.Progress,
  name: str,
  num_tokens: Callable[[], int],
  run: groups_lib.Generate,
  requests: Sequence[Request],
  details: Callable[[], str] = str,
) -> Iterator[Completion]:
  """Yields what `run` does, a phase of that name; who takes one is judging it.

  `num_tokens` returns how many were sampled so far, `details` what more a line has to say.
  """
  count = len(requests)
  with progress.phase(name, total=count, num_tokens=num_tokens, details=details) as phase:
    yield from progress.judged(run(requests), phase)
