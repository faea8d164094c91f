"""Step-time tables: by hand, interpolated, invalid ones, and an engine's own measurement."""

from __future__ import annotations

import dataclasses
import math

from moving_requests import make_engine
import pytest

from seerjax.engine import timing
from seerjax.engine.step_times import StepTimes

SATURATING = StepTimes(rows=(1, 16, 32, 64), seconds=(1.0, 1.1, 2.0, 4.0))
FLAT = StepTimes(rows=(1, 1024), seconds=(1.0, 1.0))


def test_times_are_interpolated_and_go_on_in_proportion():
  assert SATURATING.step(1, 1) == SATURATING.step(0.5, 0.5) == 1.0
  assert SATURATING.step(24, 24) == pytest.approx(1.55)
  assert SATURATING.step(128, 128) == 8.0
  # Without a table of paths, a path's rows cost what as many requests cost.
  assert SATURATING.step(3, 24) == SATURATING.step(24, 24)


def test_rows_of_few_paths_by_hand():
  times = dataclasses.replace(
    SATURATING, paths=((1, 16, 0.55), (1, 32, 0.5), (4, 16, 0.88), (4, 64, 1.0))
  )
  # Measured values are returned unchanged.
  for requests, rows, seconds in times.paths:
    assert times.step(requests, rows) == pytest.approx(seconds)
  assert times.step(4, 4) == SATURATING.step(4, 4)
  # Shares: 1 at a row a request, 1/2 at sixteen; a quarter from 32 on.
  assert times.step(1, 8.5) == pytest.approx(0.75 * SATURATING.step(8.5, 8.5))
  assert times.step(1, 64) == pytest.approx(0.25 * 4.0)
  # 2 requests are half-way between 1 and 4: at 4 rows each, 0.9 and 0.8.
  assert times.step(2, 8) == pytest.approx(0.85 * SATURATING.step(8, 8))
  # Beyond 4 requests, the shares of 4.
  assert times.step(16, 64) == pytest.approx(0.8 * 4.0)


def test_visits_by_hand():
  times = dataclasses.replace(SATURATING, visits=((1, 8, 4.0), (16, 8, 8.8)))
  assert times.decode(1) == 0.5 and times.decode_steps(1) == 8
  assert times.decode(16) == pytest.approx(1.1)
  assert times.decode(4) == pytest.approx(0.75 * SATURATING.step(4, 4))
  # Off where single steps are no slower; and without visits they are all there is.
  assert times.decode(64) == 4.0 and times.decode_steps(64) == 1
  assert SATURATING.decode(16) == 1.1 and SATURATING.decode_steps(16) == 1


def test_drafting_costs_once_and_for_each_request_and_position():
  times = dataclasses.replace(
    FLAT, draft_seconds=0.25, drafting_seconds=1.0, position_seconds=0.5, token_seconds=0.125
  )
  assert [times.draft(count, 0) for count in (0, 1)] == [0.0, 0.0]
  assert times.draft(0, 4) == 0.0
  assert times.draft(1, 1) == 1.0 + 0.5 + 0.25 + 0.125
  assert times.draft(4, 8) == 1.0 + 4.0 + 1.0 + 4.0


def test_a_table_of_little_time_is_whole():
  # One step is measured; the others cost in proportion to their rows.
  times = timing.measure(make_engine((1, 1)), seconds=0.0)
  assert times.rows == (1,) and not times.paths and not times.visits
  assert times.step(2, 8) == pytest.approx(8 * times.step(1, 1)) == pytest.approx(times.decode(8))


@pytest.mark.thorough
def test_an_engine_s_table():
  engine = make_engine((1, 1))
  few, times = timing.measure(engine), timing.measure(engine, seconds=math.inf)
  assert set(few.rows) <= set(times.rows) and times.rows == (1, 2, 4, 8, 12, 16)
  assert times.rows[0] == 1 and list(times.seconds) == sorted(times.seconds)
  assert times.paths and all(rows > requests for requests, rows, _ in times.paths)
  for requests, rows, seconds in times.paths:
    assert 0 < seconds <= times.step(rows, rows) * 1.0001
    assert times.step(requests, rows) == pytest.approx(seconds)
  for requests, steps, seconds in times.visits:
    assert steps > 1 and seconds <= steps * times.step(requests, requests) * 1.0001
