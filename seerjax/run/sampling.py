"""The source of a run's samples, and a step's measures (trace, drafts, seconds) and progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import functools
import pathlib
import time
from typing import NamedTuple

from seerjax.cluster.driver import ClusterRollout
from seerjax.engine import engine as engine_lib
from seerjax.rollout import (
  divided,
  groups as groups_lib,
  journal as journal_lib,
  policies,
  policy_loading,
  trace as trace_lib,
)
from seerjax.rollout.divided import DividedRollout
from seerjax.run import progress as progress_lib
from seerjax.run.drafter import RunDrafts
from seerjax.speculation import statistics
from seerjax.types import Completion, Problem, Request, Rollout, RolloutGroup

Keep = Callable[[int, int, Problem, Rollout], None]


class Counted(NamedTuple):
  """Token counts of a sampler since its start.

  Attributes:
    sampled_tokens: all sampled tokens.
    drafted_tokens: draft tokens that were verified.
    accepted_tokens: draft tokens that were accepted.
  """

  sampled_tokens: int
  drafted_tokens: int
  accepted_tokens: int


def counted_by(engine: engine_lib.Engine) -> Counted:
  """Returns the token counts of an engine."""
  counters = engine.counters
  return Counted(counters.sampled_tokens, counters.drafted_tokens, counters.accepted_tokens)


class Source(NamedTuple):
  """A source of samples for a run's steps: its own engine (`own_engine`), or workers.

  Attributes:
    rollout: returns a rollout for requests, which continues from the journal.
    counted: returns the token counts so far.
    text: returns further text for the progress line.
  """

  rollout: Callable[[Sequence[Request]], DividedRollout | ClusterRollout]
  counted: Callable[[], Counted]
  text: Callable[[], str] = str


def own_engine(
  engine: engine_lib.Engine, policy: policies.Policy | str, journal: journal_lib.Journal
) -> Source:
  """Returns the source that samples on a run's own engine, under a scheduling policy."""

  def rollout(requests: Sequence[Request]) -> DividedRollout:
    return divided.resumed(engine, policy_loading.load(policy), journal, requests)

  return Source(rollout, functools.partial(counted_by, engine))


def journalled(journal: journal_lib.Journal, step: int) -> tuple[groups_lib.Known, Keep]:
  """Returns the functions of `rounds.step_groups` that read and write a step's rollouts."""

  def known(group: int, member: int, problem: Problem) -> Rollout | None:
    entry = journal.lookup(step, group, member, problem_id=problem.problem_id)
    return None if entry is None else entry.rollout

  def keep(group: int, member: int, problem: Problem, rollout: Rollout) -> None:
    journal.append(
      step, group, member, rollout, problem_id=problem.problem_id, prompt_text=problem.prompt
    )

  return known, keep


class Measure:
  """Measures one step's sampling, from construction to `finish`.

  Attributes:
    traces: traces of the step's rollouts; filled by the caller.
  """

  def __init__(self, counted: Callable[[], Counted], drafts: RunDrafts | None):
    """Starts measuring.

    Args:
      counted: returns current token counts.
      drafts: the run's drafter state, or None.
    """
    self._counted = counted
    self._begun_at = self._counted()
    self.traces: list[trace_lib.Trace] = []
    self._drafts = drafts
    self._begin = time.monotonic()
    if drafts is not None:
      drafts.take()  # Discards the counts of evaluations.

  def finish(self, directory: pathlib.Path, step: int, *, num_old: int) -> dict[str, float]:
    """Appends the step's trace to the trace file and returns the step's sampling metrics.

    Args:
      directory: the run's directory.
      step: step number, from 0.
      num_old: tokens of the step's groups that were sampled from older weights.
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


def num_old_tokens(groups: Sequence[RolloutGroup], policy_version: int) -> int:
  """Returns the number of tokens of the completions that began under older weights."""
  completions = [rollout.completion for group in groups for rollout in group.rollouts]
  return sum(len(one.tokens) for one in completions if one.policy_version < policy_version)


def watched(
  progress: progress_lib.Progress,
  name: str,
  num_tokens: Callable[[], int],
  run: groups_lib.Generate,
  requests: Sequence[Request],
  details: Callable[[], str] = str,
) -> Iterator[Completion]:
  """Yields the completions of `run` within a progress phase `name`.

  The time until the next completion is requested counts as judging. `num_tokens` returns the tokens
  sampled so far; `details` returns further text for the progress line.
  """
  count = len(requests)
  with progress.phase(name, total=count, num_tokens=num_tokens, details=details) as phase:
    yield from progress.judged(run(requests), phase)
