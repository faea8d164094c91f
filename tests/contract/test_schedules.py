"""No schedule changes a bit of a request's completion.

Hypothesis draws schedules: requests and their arrivals, batch mixes, chunk sizes, page sizes, KV
buckets, memory pressure, preemption, cancelling, prefix hits, further turns, stop strings,
restarts, meshes, decode steps per visit, and background requests, with or without a table of step
times. Every completion is compared, token by token and log-probability by log-probability, with the
same request alone in a plain engine. Event counts are printed, and an event with count 0 is a
failure.

A KV bucket is the width of the page table (`max_model_len`, in whole splits): with the row bucket
it determines the compiled program of a step. Engines of several widths take over from one another.
"""

from __future__ import annotations

import collections

import hypothesis
import pytest
import schedule_plans
import schedule_runs


def expected_events(
  contexts: tuple[int, ...], *, reuse: bool, has_room: bool = True
) -> tuple[str, ...]:
  buckets = tuple(f"engines of context {context}" for context in contexts)
  # A second path needs more rows than the smallest steps have.
  common = tuple(event for event in schedule_plans.EVENTS if has_room or event != "side paths")
  reused = schedule_plans.REUSE_EVENTS if reuse else ()
  return (
    common
    + schedule_plans.VISIT_EVENTS
    + schedule_plans.BACKGROUND_EVENTS
    + reused
    + buckets
    + (schedule_plans.OTHER_BUCKET,)
  )


ONE_TILED, ONE_NATIVE = pytest.mark.few(1, of="tiled"), pytest.mark.few(1, of="native")


# Everyday runs use a CPU's default; CI also uses the portable path.
@pytest.mark.parametrize(
  "dtype",
  [
    pytest.param("f32", marks=[ONE_TILED, pytest.mark.thorough]),
    pytest.param("bf16", marks=[ONE_TILED, pytest.mark.thorough]),
    pytest.param("native f32", marks=ONE_NATIVE),
    pytest.param("native bf16", marks=[ONE_NATIVE, pytest.mark.thorough]),
  ],
)
def test_no_schedule_changes_a_bit(dtype, seed, tell_events):
  events = collections.Counter()
  for place, (size, mesh, contexts, steps) in enumerate(schedule_plans.QUICK[dtype]):
    # More examples where requests move between KV buckets, which only some of them do.
    settings = hypothesis.settings(max_examples=9 if len(contexts) > 1 else 5)
    schedule_runs.run_schedules(
      schedule_plans.NUMERICS[dtype],
      size,
      mesh,
      contexts,
      seed=100 * seed + place,
      settings=settings,
      events=events,
      steps=steps,
    )
  tell_events(dtype, events, expected_events((64, 144), reuse=True))


@pytest.mark.long
@pytest.mark.parametrize("backend", ["", "native "], ids=["tiled", "native"])
@pytest.mark.parametrize("block", range(20))
def test_no_schedule_of_five_hundred_changes_a_bit(block, backend, seed, tell_events):
  # Every (dtype, mesh) with at least two of the five sizes; each block is its own test, so that an
  # interrupted run resumes at the block.
  dtype, mesh = backend + ("f32", "bf16")[block % 2], schedule_plans.MESHES[block // 2 % 4]
  size = list(schedule_plans.SIZES)[(block + block // 8) % 5]
  events = collections.Counter()
  # The first of 26 is the minimal schedule, with which hypothesis starts.
  schedule_runs.run_schedules(
    schedule_plans.NUMERICS[dtype],
    size,
    mesh,
    schedule_plans.CONTEXTS,
    seed=100 * seed + 10 + block,
    settings=hypothesis.settings(max_examples=26),
    events=events,
    steps=schedule_plans.STEPS,
  )
  assert events["schedules"] >= 26
  expected = expected_events(
    schedule_plans.CONTEXTS,
    reuse=schedule_plans.SIZES[size].enable_prefix_caching,
    has_room=schedule_plans.SIZES[size].batch_size_buckets[-1] > 9,
  )
  tell_events(f"block {block}, {dtype}, {size}, {mesh}", events, expected)
