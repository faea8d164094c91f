"""The state of a context's sleep, for people: what its sleepers did, and why nothing goes on.

    queued --planner--> running --> done, or truncated      skipped: the planner says no, so far
"""

from __future__ import annotations

import math
from typing import NamedTuple

from seerjax.sleep.planner import Decision

QUEUED, RUNNING, SKIPPED, TRUNCATED, DONE = "queued", "running", "skipped", "truncated", "done"
STATES: tuple[str, ...] = (QUEUED, RUNNING, SKIPPED, TRUNCATED, DONE)


class Jobs(NamedTuple):
  """What became of jobs since a runner began.

  Attributes:
    begun: also those that were begun again.
    kept: rewrites.
    empty: sleepers that left nothing.
    failed: that got no answer.
    stale: whose context was gone when they were done.
    stopped: cut short, by `stop` or because their context was gone.
    tokens: of sleep.
    anticipated: answers to questions that did not come yet.
    scored: questions whose predictability is known.
  """

  begun: int = 0
  kept: int = 0
  empty: int = 0
  failed: int = 0
  stale: int = 0
  stopped: int = 0
  tokens: int = 0
  anticipated: int = 0
  scored: int = 0


class Progress(NamedTuple):
  """What became of one version of a context.

  Attributes:
    num_jobs: sleepers that it gets.
    num_running: sleepers in work.
    num_read: rewrites that questions are asked with.
    num_quarantined: rewrites that state a false equation, and are never read.
    num_empty: sleepers that ended without a rewrite.
    num_truncated: sleepers whose last call was cut at its limit of tokens.
    decision: of the planner, None before it was asked.
  """

  num_jobs: int
  num_running: int
  num_read: int
  num_quarantined: int
  num_empty: int
  num_truncated: int
  decision: Decision | None

  @property
  def num_over(self) -> int:
    """Sleepers that ended."""
    return self.num_read + self.num_quarantined + self.num_empty

  @property
  def state(self) -> str:
    """One of `STATES`."""
    if self.num_running:
      return RUNNING
    if self.num_over >= self.num_jobs:
      return TRUNCATED if self.num_truncated else DONE
    is_skipped = self.decision is not None and not self.decision.should_sleep
    return SKIPPED if is_skipped else QUEUED

  @property
  def reason(self) -> str:
    """A sentence about the state."""
    if self.state == SKIPPED:
      assert self.decision is not None
      return _why_not(self.decision)
    ended = f"{self.num_over} of {self.num_jobs} sleepers ended"
    if self.state == QUEUED:
      return f"{ended}; the others wait for room beside other contexts and requests"
    counts = (
      (self.num_running, "in work"),
      (self.num_read, "with a rewrite that is read"),
      (self.num_quarantined, "with a false equation, which is not read"),
      (self.num_empty, "without a rewrite"),
      (self.num_truncated, "cut at their limit of tokens (--sleep_tokens)"),
    )
    return "; ".join([ended, *(f"{count} {what}" for count, what in counts if count)])


def _why_not(decision: Decision) -> str:
  """Returns why the planner skips a context."""
  if decision.expected is None:
    return (
      "not worth it: questions are first answered without a rewrite, to see what these answers take"
    )
  to_come = f"{decision.expected_questions:.1f} questions are expected"
  if decision.break_even == math.inf:
    return f"not worth it: answers from rewrites take no fewer tokens ({to_come})"
  return f"not worth it: {to_come}, and sleep pays from {decision.break_even:.1f} on"
