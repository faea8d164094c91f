"""The sleep states of contexts, and their descriptions."""

from __future__ import annotations

import math

import pytest

from seerjax.sleep import states
from seerjax.sleep.planner import Decision, Estimate
from seerjax.sleep.states import Progress

ESTIMATE = Estimate(sleep_tokens=100.0, short_tokens=5.0, full_tokens=20.0)


def decision(should_sleep: bool, expected: Estimate | None = ESTIMATE, needed: float = 6.5):
  return Decision(
    should_sleep=should_sleep, why="", break_even=needed, expected_questions=2.0,
    expected=expected,
  )  # fmt: skip


def progress(**fields) -> Progress:
  usual = dict(num_running=0, num_read=0, num_quarantined=0, num_empty=0, num_truncated=0)
  return Progress(**{"num_jobs": 2, "decision": decision(True), **usual, **fields})


@pytest.mark.parametrize(
  "fields, state, reason",
  [
    ({"decision": None}, "queued", "0 of 2 rewrites finished; the others are queued"),
    ({}, "queued", "0 of 2 rewrites finished; the others are queued"),
    ({"num_read": 1}, "queued", "1 of 2 rewrites finished"),
    ({"num_running": 2}, "running", "0 of 2 rewrites finished; 2 running"),
    # A started job stays in progress, whatever the planner would decide now.
    ({"num_running": 1, "num_read": 1, "decision": decision(False)}, "running", "1 running; 1"),
    ({"decision": decision(False, None, math.nan)}, "skipped",
     "not worth it: the first questions are answered without a rewrite"),
    ({"decision": decision(False)}, "skipped",
     "not worth it: 2.0 questions are expected, and sleep pays off from 6.5"),
    ({"decision": decision(False, needed=math.inf)}, "skipped", "take as many tokens"),
    ({"num_read": 2}, "done", "2 of 2 rewrites finished; 2 in use"),
    ({"num_read": 1, "num_quarantined": 1}, "done", "1 not used because of a false equation"),
    ({"num_empty": 2}, "done", "2 of 2 rewrites finished; 2 empty"),
    ({"num_read": 1, "num_empty": 1, "num_truncated": 1}, "truncated",
     "1 empty; 1 cut off at the token limit (--sleep_tokens)"),
    ({"num_read": 2, "num_truncated": 2, "decision": None}, "truncated", "2 cut off at the"),
  ],
)  # fmt: skip
def test_a_state_says_what_sleepers_did_and_why_nothing_goes_on(fields, state, reason):
  found = progress(**fields)
  assert found.state == state and found.state in states.STATES
  assert reason in found.reason
