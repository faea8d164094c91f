"""The planner sleeps when it pays: the formula by hand, and costs below always and never."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from seerjax.sleep import planner
from seerjax.sleep.planner import Kind, PlannerConfig, Seen

CONFIG = PlannerConfig(latency_price=10.0)


def test_the_formula_by_hand():
  numbers = dict(sleep_tokens=41, full_tokens=31.7, short_tokens=11.7)
  assert planner.break_even(**numbers, latency_price=10) == pytest.approx(0.205)
  assert planner.break_even(**numbers, latency_price=1) == pytest.approx(2.05)
  # At break-even the costs are equal; on either side the right choice is cheaper.
  needed = planner.break_even(**numbers, latency_price=1)
  for questions in (needed - 0.5, needed, needed + 0.5):
    without, slept = 31.7 * questions, 11.7 * questions + 41
    assert np.sign(round(without - slept, 9)) == np.sign(round(questions - needed, 9))


@pytest.mark.parametrize("full, short", [(10, 10), (10, 11), (0, 0)])
def test_sleep_that_saves_nothing_never_pays(full: float, short: float):
  needed = planner.break_even(
    sleep_tokens=0, full_tokens=full, short_tokens=short, latency_price=10
  )
  assert needed == math.inf
  seen = Seen(questions=(1000,) * 50)
  for _ in range(8):
    seen = planner.saw_sleep(seen, Kind(6), 5)
    seen = planner.saw_answer(seen, Kind(6), short, has_slept=True)
    seen = planner.saw_answer(seen, Kind(6), full, has_slept=False)
  decision = planner.decide(seen, Kind(6), 0, CONFIG)
  assert not decision.should_sleep and decision.why == "never pays"


def test_predictability_is_the_mean_score_and_kinds_bin_it():
  assert planner.predictability(np.array([-1.0, -2.0, -3.0], np.float32)) == -2.0
  assert planner.kind_of(63) == Kind(6) and planner.kind_of(64) == Kind(7)
  bins = [planner.kind_of(40, value).bin for value in (-9.0, -3.0, -1.7, -1.0, 0.0)]
  assert bins == [0, 1, 2, 4, 4]


NOTHING = Seen()


def seen_of(kind: Kind, sleep: int, short: int, full: int, times: int, seen=NOTHING) -> Seen:
  for _ in range(times):
    seen = planner.saw_sleep(seen, kind, sleep)
    seen = planner.saw_answer(seen, kind, short, has_slept=True)
    seen = planner.saw_answer(seen, kind, full, has_slept=False)
  return seen


def test_a_kind_is_judged_by_itself_once_enough_was_seen():
  seen = seen_of(Kind(6, 2), 40, 10, 30, 8)
  assert planner.estimate(seen, Kind(6, 2), CONFIG) == (40, 10, 30)
  assert planner.estimate(seen, Kind(9, 0), CONFIG) == (40, 10, 30)  # By all.
  more = seen_of(Kind(6, 4), 20, 6, 30, 7, seen)
  assert planner.estimate(more, Kind(6, 4), CONFIG) == (
    (8 * 40 + 7 * 20) / 15, (8 * 10 + 7 * 6) / 15, 30,
  )  # fmt: skip
  more = seen_of(Kind(6, 4), 20, 6, 30, 1, more)
  assert planner.estimate(more, Kind(6, 4), CONFIG) == (20, 6, 30)
  assert planner.estimate(Seen(), Kind(6), CONFIG) is None
  assert seen != more  # Records stay as they were.


def test_questions_to_come_follow_what_like_contexts_got():
  config = PlannerConfig(prior_questions=1.0, prior_weight=4.0)
  assert planner.expected_questions(Seen(), 0, config) == 1.0
  seen = Seen()
  for count in (0, 0, 0, 10, 10, 12):
    seen = planner.saw_end(seen, count)
  assert planner.expected_questions(seen, 0, config) == (32 + 4) / 10
  # A context with one question is more likely a busy one.
  assert planner.expected_questions(seen, 1, config) == (9 + 9 + 11 + 4) / 7
  assert planner.expected_questions(seen, 13, config) == 1.0
  for _ in range(planner.MAX_SIGHTS + 5):
    seen = planner.saw_end(seen, 2)
  assert set(seen.questions) == {2} and len(seen.questions) == planner.MAX_SIGHTS


def simulate(
  rng: np.random.Generator, config: PlannerConfig, mean: float, saving: int, num: int, rate: float
) -> tuple[dict[str, float], list[planner.Realised]]:
  """Returns the expected prices of always, never and the planner's choices, and its log.

  Contexts get a drawn number of questions; `rate` of them get ten times as many. A choice is priced
  by its expectation, because realised prices of so few contexts would mostly show luck.
  """
  t, num_expected = config.latency_price, mean * (1 - rate + 10 * rate)
  price = {False: t * 31.5 * num_expected, True: t * (31.5 - saving) * num_expected + 39.5}
  seen, costs, log = Seen(), dict.fromkeys(("always", "never", "planned"), 0.0), []
  for _ in range(num):
    kind = Kind(int(rng.integers(5, 8)))
    count = int(rng.poisson(mean * (10 if rng.random() < rate else 1)))
    sleep = int(rng.integers(30, 50))
    full = [int(v) for v in rng.integers(28, 36, count)]
    short = [max(1, value - saving) for value in full]
    decision = planner.decide(seen, kind, 0, config)
    if decision.expected is not None:  # Earlier trials are the price of learning.
      costs["always"] += price[True]
      costs["never"] += price[False]
      costs["planned"] += price[decision.should_sleep]
    if decision.should_sleep:
      seen = planner.saw_sleep(seen, kind, sleep)
    answers = short if decision.should_sleep else full
    for value in answers:
      seen = planner.saw_answer(seen, kind, value, has_slept=decision.should_sleep)
    seen = planner.saw_end(seen, count)
    spent = sleep if decision.should_sleep else 0
    one = planner.realised(
      decision, sleep_tokens=spent, answer_tokens=answers, full_tokens=31.5, config=config
    )
    log.append(one)
  return costs, log


@pytest.mark.thorough
def test_the_planner_is_hardly_dearer_than_the_better_of_always_and_never(seed: int):
  rng = np.random.default_rng(seed)
  chosen = {"always": 0, "never": 0}
  for price in (0.5, 1.0, 10.0):
    for mean in (0.3, 2.0, 8.0):
      for saving in (-3, 2, 20):
        config = PlannerConfig(latency_price=price)
        costs, log = simulate(rng, config, mean, saving, 500, 0.1)
        best = min(("always", "never"), key=lambda name: costs[name])
        chosen[best] += 1
        assert costs["planned"] <= 1.05 * costs[best], (price, mean, saving, costs)
        slept = [one for one in log if one.break_even == one.break_even][20:]
        if saving == 20 and len(slept) > 100:
          predicted = [one.predicted_break_even for one in slept]
          found = [one.break_even for one in slept]
          assert np.mean(predicted) == pytest.approx(np.mean(found), rel=0.1)
  print(f"the better was {chosen}")
  assert min(chosen.values()) >= 3


def test_what_was_decided_is_said():
  seen = seen_of(Kind(6), 40, 10, 30, 8)
  left = planner.decide(seen, Kind(6), 0, PlannerConfig(latency_price=1.0))
  assert (left.should_sleep, left.why, left.break_even) == (False, "below break-even", 2.0)
  busy = planner.decide(
    planner.saw_end(planner.saw_end(seen, 40), 30), Kind(6), 0, PlannerConfig(latency_price=1.0)
  )
  assert (busy.should_sleep, busy.why) == (True, "pays")
  assert math.isnan(planner.decide(Seen(), Kind(6), 0, CONFIG).break_even)
  one = planner.realised(
    left, sleep_tokens=0, answer_tokens=[30, 32], full_tokens=31, config=CONFIG
  )
  assert one[:3] == (2, 620.0, 2.0) and math.isnan(one.break_even)


def refusals():
  numbers = dict(sleep_tokens=1.0, full_tokens=2.0, short_tokens=1.0, latency_price=1.0)
  for price in (0, -1.0, math.nan, math.inf):
    yield (
      lambda price=price: planner.break_even(**(numbers | {"latency_price": price})),
      f"break_even: got latency_price={price}, expected more than 0 and finite; 10 is the publish",
    )
  yield (
    lambda: planner.break_even(**(numbers | {"short_tokens": -1.0})),
    "break_even: got sleep_tokens=1.0, full_tokens=2.0 and short_tokens=-1.0, expected counts of",
  )
  yield (
    lambda: planner.predictability(np.zeros(0, np.float32)),
    "predictability: got 0 log-probabilities up to nan, expected at least one, all of at most 0",
  )
  yield (
    lambda: planner.predictability(np.array([0.5], np.float32)),
    "predictability: got 1 log-probabilities up to 0.5, expected at least one",
  )
  yield lambda: planner.kind_of(0), "kind_of: got num_tokens=0, expected at least 1; an empty cont"
  yield (
    lambda: planner.expected_questions(Seen(), -1, CONFIG),
    "expected_questions: got num_asked=-1, expected at least 0; pass a count.",
  )
  bad = lambda **fields: lambda: PlannerConfig(**fields)
  yield (
    bad(latency_price=0.0),
    "PlannerConfig.latency_price: got 0.0, expected a positive number;",
  )
  yield bad(num_trials=0), "PlannerConfig.num_trials: got 0, expected at least 1; 8 is usual."
  yield bad(prior_weight=0.0), "PlannerConfig.prior_weight: got 0.0, expected a positive number"


@pytest.mark.parametrize("act, message", list(refusals()))
def test_bad_input_is_refused(act, message: str):
  with pytest.raises(ValueError, match=re.escape(message)):
    act()
