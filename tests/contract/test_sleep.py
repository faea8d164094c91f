"""Sleep-time compute changes no bit of a completion, and no schedule changes a rewrite.

Hypothesis draws schedules of an engine with contexts: no, some or full load of foreground requests,
and edits, times to live, deletions, questions, pauses, preemptions, spills, pins, weight updates,
restarts from the registry, and rewrites with changed files. Every completion, with or without
drafts from rewrites, is compared with the same request alone in a plain engine, and every rewrite
with that of a sleeper that has such an engine to itself, call by call. Deleted content must not be
served, and no namespace may find another's pages, pins or drafts. Event counts are printed, and an
event with count 0 is a failure.
"""

from __future__ import annotations

import collections

import pytest
import sleep_plans
import sleep_references
import sleep_runs

MESHES = ((1, 1), (2, 1), (1, 2), (2, 2))  # (instances, model shards)


@pytest.mark.parametrize(
  "dtype, num", [("f32", 1), pytest.param("native bf16", 1, marks=pytest.mark.thorough)]
)
def test_no_sleep_changes_a_bit(dtype, num, seed, tell_events):
  events = collections.Counter()
  sleep_runs.run_schedules(sleep_references.NUMERICS[dtype], (1, 1), events, seed=seed, num=num)
  assert events["schedules"] >= len(sleep_plans.ALWAYS) + num
  always = ("rewrites", "questions from rewrites", "rows among others", "restored pins")
  tell_events(dtype, events, (*always, "other weights", "restarts", "damaged", "stale refused"))


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("dtype", sleep_references.NUMERICS)
def test_no_sleep_of_three_hundred_changes_a_bit(dtype, mesh, seed, tell_events):
  # One test per block, so that an interrupted run resumes at the block.
  events = collections.Counter()
  sleep_runs.run_schedules(
    sleep_references.NUMERICS[dtype], mesh, events, seed=100 * seed + 7, num=18
  )
  assert events["schedules"] >= 20
  tell_events(f"{dtype}, {mesh}", events, sleep_plans.EVENTS)
