"""Background requests: the rows that they get, and that they never displace foreground requests."""

from __future__ import annotations

import dataclasses

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
from seen_inputs import SeesInputs
from word_engine import SIZES, make_engine, request, run, same, tokens_from

from seerjax.engine.background import Room
from seerjax.engine.engine import Engine
from seerjax.engine.sequence import ScheduledRows, SequenceState
from seerjax.engine.step_times import StepTimes
from seerjax.kv.pool import KVPool, KVPoolConfig
from seerjax.ops import sampling

# A step of eight rows hardly takes longer than one of one, and a visit is worth half.
TIMES = StepTimes(
  rows=(1, 4, 5, 8, 9, 16),
  seconds=(1.0, 1.0, 1.02, 1.04, 1.5, 2.0),
  visits=((1, 8, 4.0), (16, 8, 8.0)),
)
STEEP = StepTimes(rows=(1, 16), seconds=(1.0, 16.0))


def asked(count: int, *, front: int = 1, **others) -> list:
  """Returns requests, the first of them in front, of prompts of several pieces."""
  return [
    request(str(index), tokens_from(index, 20), seed=index, **others) for index in range(count)
  ]


def submit(engine: Engine, requests, *, num_front: int = 0, **others) -> None:
  for place, one in enumerate(requests):
    engine.add_request(one, is_background=place >= num_front, **others)


def front_of(*rows: int) -> list[ScheduledRows]:
  """Returns pieces of sequences in front, by their numbers of rows."""
  pieces, first = [], 0
  for place, count in enumerate(rows):
    one = request(str(place), tokens_from(place, count))
    row = sampling.sampling_rows([one.sampling])
    sequence = SequenceState(
      request=one, tokens=list(one.prompt), instance=0, sampling=row, limit=60
    )
    pieces.append(ScheduledRows(sequence, count, first))
    first += count
  return pieces


def room_of(*rows: int, table: StepTimes | None = TIMES, num_steps=1, **sizes) -> Room:
  config = dataclasses.replace(
    SIZES, **{"background_rows": 4, "max_num_seqs": 12, "batch_size_buckets": (12, 16), **sizes}
  )
  return Room([front_of(*rows)], num_steps, config=config, table=table)


# Spare rows of a step.


def test_rows_are_given_as_far_as_the_table_leaves_the_step_within_the_slack():
  assert room_of(1).take(0, 100) == 7 and room_of(1).take(0, 3) == 3
  assert room_of(1, background_slack=0.01).take(0, 100) == 3
  assert room_of(1, background_slack=0.0).take(0, 100) == 3
  assert room_of(9).take(0, 100) == 1  # 1.5 s of 9 rows, 1.57 of 10, 1.64 of 11.
  room = room_of(1)
  assert [room.take(0, count) for count in (1, 4, 9, 1)] == [1, 4, 2, 0]


def test_without_a_table_nothing_runs_beside_others_and_alone_all_that_may():
  assert room_of(1, table=None).take(0, 1) == 0
  room = room_of(table=None)
  assert [room.take(0, count) for count in (1, 100, 1)] == [1, 3, 0]


def test_places_of_others_are_not_theirs():
  room = room_of(1, 1, 1, max_num_seqs=4)
  assert [room.take(0, 1) for _ in range(3)] == [1, 0, 0]


def test_a_visit_is_kept_short_and_a_piece_of_a_prompt_is_held_to_a_step_of_it():
  kept = room_of(1, num_steps=8)
  assert kept.take(0, 1) and kept.is_visit
  assert room_of(1, num_steps=8).take(0, 4, keeps_visit=False) == 0  # 1 s instead of half.
  # Where visits are worth nothing, a prompt may break them.
  plain = dataclasses.replace(TIMES, visits=())
  room = room_of(1, num_steps=8, table=plain)
  assert room.take(0, 4, keeps_visit=False) == 4 and not room.is_visit
  assert room.take(0, 1) == 1


def test_instances_go_in_step():
  config = dataclasses.replace(SIZES, max_num_seqs=12, batch_size_buckets=(12, 16))
  # The second is idle, but must not lengthen the common step beyond the slack.
  room = Room([front_of(9), []], 1, config=config, table=TIMES)
  assert [room.take(1, 100), room.take(0, 1)] == [9, 0]


@hypothesis.settings(max_examples=60)
@hypothesis.given(data=st.data())
def test_no_step_takes_longer_than_the_slack_says(data):
  rises = data.draw(st.lists(st.floats(0, 0.5), min_size=16, max_size=16))
  seconds = tuple((0.1 + np.cumsum(rises)).tolist())
  times = StepTimes(
    rows=tuple(range(1, 17)),
    seconds=seconds,
    visits=((1, 8, data.draw(st.floats(0.1, 8.0)) * seconds[0]), (12, 8, 8 * seconds[11])),
  )
  slack = data.draw(st.sampled_from([0.0, 0.05, 0.3]))
  rows = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
  is_visit = max(rows) == 1 and data.draw(st.booleans())
  room = room_of(*rows, table=times, background_slack=slack, num_steps=8 if is_visit else 1)
  alone = times.decode(len(rows)) if is_visit else times.step(len(rows), sum(rows))
  requests, total = len(rows), sum(rows)
  for wanted in data.draw(st.lists(st.integers(1, 20), max_size=8)):
    count = room.take(0, wanted, keeps_visit=wanted == 1)
    requests, total = requests + (count > 0), total + count
  together = times.decode(requests) if room.is_visit else times.step(requests, total)
  hypothesis.event(f"{requests - len(rows)} more")
  assert together <= (1 + slack) * alone and total <= 16


# Background requests in an engine.


@pytest.mark.parametrize(
  "times",
  [None, TIMES, pytest.param(STEEP, marks=pytest.mark.thorough)],
  ids=["no table", "flat", "steep"],
)
def test_all_say_what_they_say_alone(times):
  requests = asked(6)
  expected = {one.request_id: make_engine().generate([one])[0] for one in requests}
  engine = make_engine(dataclasses.replace(SIZES, max_num_seqs=3, num_pages=14))
  engine.step_times = times
  submit(engine, requests, num_front=2)
  found = run(engine)
  assert all(same(found[name], expected[name]) for name in expected)
  assert engine.counters.background_rows > 0
  assert engine.chunks.free_pages(0) == 13


class Blind(Engine):
  """Twin: an engine that treats all requests as foreground."""

  def add_request(self, request, *, is_background=False, **others):
    super().add_request(request, **others)


def first_rows(kind: type[Engine], times, sizes, *, visits: int) -> tuple[int, int]:
  """Returns (steps from its submission to its first row, waits) of a request that comes while as
  many sleep as there is room for."""
  engine = make_engine(sizes, kind=kind)
  engine.step_times = times
  submit(engine, asked(8, max_tokens=30))
  for _ in range(visits):
    engine.step()
  engine.add_request(request("front", tokens_from(50, 20), seed=50, max_tokens=30))
  before = engine.counters.waits
  for step in range(40):
    engine.step()
    if engine._requests.live["front"].num_written:
      return step, engine.counters.waits - before
  return 40, engine.counters.waits - before


CROWDED = {
  "places": dataclasses.replace(SIZES, max_num_seqs=2, num_pages=60),
  "pages": SIZES,
  "visits": dataclasses.replace(SIZES, max_num_seqs=4, decode_steps_per_call=8),
}


@pytest.mark.thorough
@pytest.mark.parametrize("what", CROWDED)
@pytest.mark.parametrize(
  "times", [pytest.param(None, marks=pytest.mark.thorough), TIMES], ids=["no table", "table"]
)
@pytest.mark.parametrize(
  "visits",
  [pytest.param(1, marks=pytest.mark.thorough), 4, pytest.param(7, marks=pytest.mark.thorough)],
)
def test_the_first_row_of_who_is_waited_for_is_in_the_very_next_step(what, times, visits):
  assert first_rows(Engine, times, CROWDED[what], visits=visits) == (0, 0)


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["places", "pages"])
def test_an_engine_that_lets_them_keep_what_they_have_is_found_out(what):
  steps, _ = first_rows(Blind, None, CROWDED[what], visits=4)
  assert steps > 0


@pytest.mark.parametrize("host_pages, event", [(4096, "spilled"), (0, "preempted")])
def test_pages_that_another_needs_are_taken_and_come_back(host_pages, event):
  requests = asked(4, max_tokens=30)
  expected = {one.request_id: make_engine().generate([one])[0] for one in requests}
  # The foreground request reserves the pages of its whole completion at once.
  config = dataclasses.replace(SIZES, reserved_tokens=0)
  engine = make_engine(config, kv_pool=KVPool(KVPoolConfig(host_pages=host_pages)))
  submit(engine, requests[1:])
  for _ in range(5):
    engine.step()
  held = [engine.chunks.held_pages(one.request_id) for one in requests[1:]]
  engine.add_request(requests[0])
  engine.step()
  assert engine.chunks.held_pages("0") == 7 and sum(held) > 1  # Of eight.
  found = run(engine)
  assert all(same(found[name], expected[name]) for name in expected)
  counters = dataclasses.asdict(engine.counters)
  assert counters[f"background_{event}"] > 0 == engine.counters.waits
  assert counters["background_paused"] == 0  # Those without pages do not count.


def test_one_that_was_paused_by_its_caller_gives_its_pages_up_and_stays_paused():
  expected = make_engine().generate([request("b", tokens_from(3, 20))])[0]
  engine = make_engine()
  engine.add_request(request("b", tokens_from(3, 20)), is_background=True, chunk_tokens=2)
  for _ in range(7):  # Five for the prompt.
    engine.step()
  assert engine.chunks.poll_paused() == ["b"] and engine.chunks.held_pages("b")
  engine.add_request(request("a", tokens_from(9, 40), max_tokens=24))
  engine.step()
  assert engine.chunks.poll_paused() == ["b"] and not engine.chunks.held_pages("b")
  engine.chunks.resume("b")
  assert same(run(engine)["b"], expected)


def test_waits_in_front_are_those_that_would_be_there_without_sleep():
  counts = []
  for sleeping in (0, 6):
    engine = make_engine()
    engine.step_times = TIMES
    submit(engine, [request(f"s{i}", tokens_from(i, 20), seed=i) for i in range(sleeping)])
    for place in range(7):
      engine.add_request(
        request(str(place), tokens_from(90 + place, 20), seed=place, max_tokens=13)
      )
      engine.step()
    run(engine)
    counts.append(engine.counters.waits)
  assert counts[0] == counts[1] > 0


@pytest.mark.thorough
def test_a_visit_ends_with_those_in_front():
  free = make_engine().generate([request("a", max_tokens=12)])[0]
  place = next(place for place in range(2, 7) if free.tokens[place] not in free.tokens[:place])
  front = request("a", max_tokens=12, stop_token_ids=(free.tokens[place],))
  behind = request("b", (7, 8), seed=3, max_tokens=30)
  expected = make_engine().generate([behind])[0]
  engine = make_engine(dataclasses.replace(SIZES, decode_steps_per_call=8))
  engine.step_times = TIMES
  engine.add_request(behind, is_background=True)
  engine.step()
  engine.add_request(front)
  engine.step()  # The prompt.
  before = engine.counters.steps
  updates = {update.request_id: update for update in engine.step()}
  assert updates["a"].finish_reason == "stop" and len(updates["a"].tokens) == place
  assert len(updates["b"].tokens) == place == engine.counters.steps - before
  assert same(run(engine)["b"], expected)


def test_a_step_that_breaks_off_lets_each_go_on_in_its_own_queue():
  requests = asked(3)
  expected = {one.request_id: make_engine().generate([one])[0] for one in requests}

  class Breaking(SeesInputs):
    breaks = True

    def _inputs(self, scheduled):
      if self.breaks and self.counters.visits == 2:
        self.breaks = False
        raise KeyboardInterrupt
      return super()._inputs(scheduled)

  engine = make_engine(kind=Breaking)
  engine.step_times = TIMES
  submit(engine, requests, num_front=1)
  with pytest.raises(KeyboardInterrupt):
    run(engine)
  assert [s.request.request_id for s in engine._requests.waiting[0]] == ["0"]
  found = run(engine)
  assert all(same(found[name], expected[name]) for name in expected)


def test_a_mask_is_no_reason_to_compile_while_others_wait():
  engine = make_engine()
  engine.step_times = TIMES
  everything = np.full(16, 2**32 - 1, np.uint32)
  engine.add_request(request("m", max_tokens=2), mask=lambda tokens: everything, is_background=True)
  engine.add_request(request("a", max_tokens=2))
  engine.step()
  assert engine._requests.live["m"].num_written == 0
