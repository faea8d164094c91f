"""The virtual clock: the cost of sleep to foreground requests, whose completions are unchanged."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from word_engine import SIZES, make_engine

from experiments import sleep_foreground
from seerjax.speculation.times import StepTimes

TIMES = StepTimes(rows=(1, 4, 5, 16), seconds=(1.0, 1.03, 1.6, 2.0))


@pytest.mark.parametrize("num_clients", [0, 2])
def test_steps_stay_within_the_slack_and_nobody_waits_for_pages_longer(num_clients):
  sizes = dataclasses.replace(SIZES, num_pages=60, reuse_prefixes=False)
  engine = make_engine(sizes, kind=sleep_foreground.WatchedEngine)
  coming = sleep_foreground.arrivals(
    2, num_requests=12, step=1.0, reading=1.0, vocab_size=500, prompt=10, answer=10, seed=0
  )
  without, beside = (
    sleep_foreground.serve(engine, TIMES, coming, num_sleepers=count, num_clients=num_clients)
    for count in (0, 6)
  )
  assert beside.tokens == without.tokens and beside.waits == without.waits == 0
  assert beside.sleep_tokens > 0 == without.sleep_tokens
  for share in sleep_foreground.SHARES:
    alone, both = (np.percentile(one.steps, share) for one in (without, beside))
    assert both <= 1.05 * alone + 1e-9
  assert len(beside.ratios) == len(beside.steps) and np.all(without.ratios == 1)
  assert 1 < np.max(beside.ratios) <= 1.05 + 1e-9
  line = sleep_foreground.line(2, without, beside)
  assert line.startswith("| 2 | ") and line.endswith("| 0 → 0 |")


def test_a_real_run_compares_pairs_of_turns(capsys):
  sizes = dataclasses.replace(SIZES, num_pages=60, reuse_prefixes=False)
  engine = make_engine(sizes, kind=sleep_foreground.WatchedEngine)
  engine.step_times = TIMES
  sleep_foreground.real_run(
    engine, 3, crowds=(2,), num_sleepers=4, prompt=5, answer=6, clock="cpu", seed=0
  )
  cells = capsys.readouterr().out.splitlines()[-1].strip("| ").split(" | ")
  assert cells[:2] == ["2", "3"] and cells[-2:] == ["0 → 0", "0 → 0"]
  ratio, bound, rate = (float(cell) for cell in cells[3:6])
  assert 0 < ratio <= bound and rate > 0 and engine.num_unfinished == 0


def test_one_turn_is_refused():
  with pytest.raises(ValueError, match="num_turns: got 1, expected 0 or at least 2; an interval n"):
    sleep_foreground.real_run(make_engine(kind=sleep_foreground.WatchedEngine), 1)


def test_an_upper_bound_is_that_of_the_mean():
  assert np.isclose(sleep_foreground.upper_bound([1.0, 1.2, 1.1, 1.1]), 1.1 + 1.96 * 0.0408248)


@pytest.mark.parametrize("values", [[], ["0"], ["1", "x"]])
def test_crowds_that_are_none_are_refused(values):
  with pytest.raises(ValueError, match="--crowds: got '.*', expected numbers of at least 1; write"):
    sleep_foreground.crowds_of(values)
