"""What a step's sampling took: trace, drafts and seconds; and what people are told of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import pathlib
import time

from seerjax.engine import engine as engine_lib
from seerjax.rollout import groups as groups_lib, trace as trace_lib
from seerjax.run import progress as progress_lib
from seerjax.run.drafter import RunDrafts
from seerjax.speculation import statistics
from seerjax.types import Completion, Request


class Measure:
  """Measures one step's sampling, from here to `finish`.

  Attributes:
    traces: of the step's rollouts, to be filled.
  """

  def __init__(
    self,
    engine: engine_lib.Engine,
    drafts: RunDrafts | None,
    num_tokens: Callable[[], int] | None = None,
  ):
    """Begins.

    Args:
      engine: that samples.
      drafts: of its drafter, None if it has none of a run's.
      num_tokens: that were sampled so far, where it is not the engine that samples.
    """
    self._num_tokens = num_tokens or (lambda: engine.counters.sampled_tokens)
    self._begun_at = self._num_tokens()
    self.traces: list[trace_lib.Trace] = []
    self._engine, self._drafts = engine, drafts
    self._begin = time.monotonic()
    self._counted = dataclasses.replace(engine.counters)
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
    counted, counters = self._counted, self._engine.counters
    num_tokens = self._num_tokens() - self._begun_at
    return trace_lib.summarise(self.traces) | {
      "schedule/drafted_tokens": float(counters.drafted_tokens - counted.drafted_tokens),
      "schedule/accepted_tokens": float(counters.accepted_tokens - counted.accepted_tokens),
      "rollout/seconds": seconds,
      "rollout/tokens_per_second": num_tokens / max(seconds, 1e-9),
      "rollout/old_tokens": float(num_old),
    }


def watched(
  progress: progress_lib.Progress,
  name: str,
  num_tokens: Callable[[], int],
  run: groups_lib.Generate,
  requests: Sequence[Request],
) -> Iterator[Completion]:
  """Yields what `run` does, a phase of that name; who takes one is judging it.

  `num_tokens` returns how many were sampled so far.
  """
  with progress.phase(name, total=len(requests), num_tokens=num_tokens) as phase:
    yield from progress.judged(run(requests), phase)
