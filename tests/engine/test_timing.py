"""Step times are measured before requests arrive, and change no completion."""

from __future__ import annotations

import functools
import math

from moving_requests import asked, make_engine
import pytest
import tiny_model

from seerjax.engine import timing


@pytest.mark.thorough
def test_step_times_disturb_nothing():
  one = asked()[3]
  [plain] = make_engine((1, 1)).generate([one])
  engine = make_engine((1, 1))
  sizes = [(1, 1), (1, 4), (4, 4), (3, 16)]
  seconds = timing.step_seconds(engine, sizes)
  assert sorted(seconds) == sorted(sizes) and min(seconds.values()) > 0
  visit = timing.step_seconds(engine, [(2, 2)], num_steps=3)
  assert list(visit) == [(2, 2)] and visit[2, 2] > 0
  assert tiny_model.same(engine.generate([one])[0], plain)
  engine.add_request(one)
  with pytest.raises(ValueError, match=r"Engine.idle_step: got 1 unfinished requests, expected"):
    timing.step_seconds(engine, [(1, 1)])


@pytest.mark.parametrize(
  ("budget", "num_runs"),
  [
    # The first is measured in any case, twice: it may compile.
    (0.0, (2, 0, 0)),
    # The second is expected to take 2 s twice; the third, of twice its work, 4 s twice.
    (6.0, (2, 2, 0)),
    (14.0, (2, 2, 2)),
    # The remaining budget goes to full rounds of all programs.
    (22.0, (4, 3, 3)),
    (1e9, (4, 4, 4)),
  ],
)
def test_a_budget_is_kept_by_what_is_measured(budget, num_runs):
  now, runs = 0.0, [0, 0, 0]

  def ready(place: int):
    def run() -> None:
      nonlocal now
      runs[place] += 1
      now += 2.0**place

    return run

  calls = [functools.partial(ready, place) for place in range(3)]
  found = timing.seconds_within(calls, [1, 2, 4], budget, repeats=3, clock=lambda: now)
  assert tuple(runs) == num_runs
  assert found == [2.0**n if count else math.inf for n, count in enumerate(num_runs)]
  assert now <= max(budget, 2.0)


def test_times_are_those_of_the_clock():
  # Each call takes the given time; the first round does not count, and the minimum of the others
  # does.
  now, took = 0.0, iter([9.0, 9.0, 3.0, 8.0, 5.0, 4.0])

  def run() -> None:
    nonlocal now
    now += next(took)

  found = timing.least_seconds([lambda: run, lambda: run], repeats=2, clock=lambda: now)
  assert found == [3.0, 4.0]
