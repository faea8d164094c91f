"""Draft budgets: by hand, against all possible splits, as properties, over time, and errors."""

from __future__ import annotations

import dataclasses
import itertools

import hypothesis
from hypothesis import given, strategies as st
import pytest

from seerjax.engine.step_times import StepTimes
from seerjax.speculation import budget, draft_lengths
from seerjax.speculation.budget import Budget, BudgetConfig, suffix_choice

# Sixteen rows cost little more than one, as where weights must be read anyway; then they add up.
SATURATING = StepTimes(rows=(1, 16, 32, 64), seconds=(1.0, 1.1, 2.0, 4.0))
FLAT = StepTimes(rows=(1, 1024), seconds=(1.0, 1.0))
LINEAR = StepTimes(rows=(1, 1024), seconds=(1.0, 1024.0))
GEOMETRIC = tuple(0.8**k for k in range(1, 9))


@st.composite
def situations(draw):
  rates = draw(st.lists(st.floats(0, 1), min_size=8, max_size=8))
  rows = sorted(draw(st.sets(st.integers(1, 600), min_size=1, max_size=6)))
  seconds = sorted(draw(st.lists(st.floats(0.1, 9), min_size=len(rows), max_size=len(rows))))
  times = tuple(rows), tuple(seconds), draw(st.floats(0, 0.1)), draw(st.floats(0, 1))
  num_speculative_tokens = draw(st.integers(1, 8))
  acceptance = tuple(itertools.accumulate(rates, lambda a, b: a * b))
  return (
    draw(st.integers(0, 12)),
    draw(st.integers(0, 40)),
    acceptance,
    times,
    num_speculative_tokens,
  )


def times_of(table):
  return StepTimes(**dict(zip(("rows", "seconds", "draft_seconds", "drafting_seconds"), table)))


def test_a_step_that_drafts_costs_once_and_for_each():
  times = dataclasses.replace(FLAT, draft_seconds=0.25, drafting_seconds=1.0)
  # Four tokens for one second, or eight for three.
  assert draft_lengths.best_length(4, (1.0,), times) == 0
  assert draft_lengths.seconds_per_token((1, 3), (0, 1), (1.0,), times) == (1.75 + 1) / 7
  assert draft_lengths.seconds_per_token((1, 3), (0, 0), (1.0,), times) == 1 / 4
  assert draft_lengths.mba_paper(1, 3, GEOMETRIC, times) == (0, 0)


def test_the_best_length_by_hand():
  # Two tokens a step at a = 1: free rows double the speed, rows that cost themselves do nothing.
  assert draft_lengths.best_length(4, (1.0,), FLAT) == 1
  assert draft_lengths.best_length(4, (1.0,), LINEAR) == 0
  assert draft_lengths.best_length(4, (0.0,), FLAT) == 0
  assert draft_lengths.best_length(0, (1.0,), FLAT) == 0
  # A draft that is seldom there costs seldom.
  assert draft_lengths.best_length(1, (0.5,), LINEAR, reach=(0.5,)) == 0
  assert draft_lengths.best_length(1, (0.5,), LINEAR, reach=(0.4,)) == 1


def test_the_paper_s_algorithm_by_hand():
  # gamma* = 8 where rows are free: a budget for all.
  acceptance = GEOMETRIC
  assert draft_lengths.mba_paper(1, 4, acceptance, FLAT) == (8, 8)
  assert draft_lengths.mba_paper(8, 1, acceptance, FLAT) == (8, 8)
  # gamma* = 2 for 5 requests: 10 tokens. One for the high request, twice four for the low class
  # (4 x .2 and 4 x .16 against .16); four do not fit any more, and one token is left unused.
  times = StepTimes(rows=(15, 16, 99), seconds=(1.0, 2.0, 20.0))
  assert draft_lengths.mba_paper(1, 4, acceptance, times) == (1, 2)
  assert draft_lengths.mba(1, 4, acceptance, times) == (6, 1)
  # Too little for one token of each high request.
  assert draft_lengths.mba_paper(4, 1, acceptance, LINEAR) == (0, 0)
  assert draft_lengths.mba_paper(0, 0, acceptance, FLAT) == (0, 0)
  assert draft_lengths.mba_paper(0, 4, acceptance, FLAT) == (0, 8)


def test_ours_serves_the_high_class_first():
  # 2 + 6 requests, 8 rows free: gamma* = 1, so 8 tokens.
  times = StepTimes(rows=(8, 16, 17, 64), seconds=(1.0, 1.0, 2.0, 9.0))
  assert draft_lengths.best_length(8, GEOMETRIC, times) == 1
  assert draft_lengths.mba(2, 6, GEOMETRIC, times, priority=1.0) == (1, 1)
  assert draft_lengths.mba(2, 6, (0.9, 0.8, 0.7, 0.6, 0.1, 0, 0, 0), times) == (4, 0)
  assert draft_lengths.mba_paper(2, 6, GEOMETRIC, times) == (1, 1)


def test_ours_leaves_no_unit_that_fits():
  # Seven tokens for 2 + 5: the printed loop gives the low class one each and stops.
  times = StepTimes(rows=(7, 14, 15, 64), seconds=(1.0, 1.0, 2.0, 9.0))
  acceptance = (0.9, 0.05, 0, 0, 0, 0, 0, 0)
  assert draft_lengths.mba(2, 5, acceptance, times) == (1, 1)
  assert draft_lengths.mba(7, 0, acceptance, times) == (1, 0)
  assert draft_lengths.mba(0, 7, acceptance, times) == (0, 1)


def test_rows_of_one_path_and_visits_count():
  # A draft's rows are free, but only in a path; many steps a visit make plain decoding cheaper.
  times = dataclasses.replace(LINEAR, paths=((1, 2, 1.0), (1, 9, 1.0)))
  assert draft_lengths.best_length(1, (0.5,), times) == 1
  visits = dataclasses.replace(times, visits=((1, 8, 4.0),))
  assert draft_lengths.seconds_per_token((1,), (0,), (0.5,), visits) == 0.5
  # Two tokens a second in a visit; one and a half in a step with a draft.
  assert draft_lengths.best_length(1, (0.5,), visits) == 0
  assert draft_lengths.mba(0, 1, (0.5,), times, num_speculative_tokens=1) == (0, 1)
  assert draft_lengths.mba(0, 1, (0.5,), visits, num_speculative_tokens=1) == (0, 0)
  assert draft_lengths.mba_paper(0, 1, (0.5,), visits, num_speculative_tokens=1) == (0, 0)


def test_a_model_that_costs_by_length_is_asked_for_less():
  free = dataclasses.replace(FLAT, drafting_seconds=0.1)
  assert draft_lengths.best_length(1, GEOMETRIC, free) == 8
  dear = dataclasses.replace(free, position_seconds=0.1)
  lengths = [draft_lengths.best_length(1, GEOMETRIC, dataclasses.replace(dear, token_seconds=cost))
             for cost in (0.0, 0.1, 0.3)]  # fmt: skip
  assert 8 > lengths[0] > lengths[1] > lengths[2] > 0


@pytest.mark.thorough
def test_probes_are_as_frequent_in_visits_as_in_steps():
  visits = dataclasses.replace(LINEAR, visits=tuple((n, 8, 7.99 * n) for n in (1, 64)))
  made = {}
  for times in (LINEAR, visits):
    plans = drive(Budget(times), 0, 64, 1600, lambda step: 0)
    made[times] = sum(map(bool, plans))
  assert made[visits] >= 4 * made[LINEAR]


@given(situations(), st.floats(1, 4))
@hypothesis.settings(max_examples=200)
def test_ours_is_the_best_of_all_splits(situation, priority):
  num_high, num_low, acceptance, table, num_speculative_tokens = situation
  times = times_of(table)
  high, low = draft_lengths.mba(
    num_high,
    num_low,
    acceptance,
    times,
    num_speculative_tokens=num_speculative_tokens,
    priority=priority,
  )
  batch = num_high + num_low
  tokens = draft_lengths.best_length(batch, acceptance[:num_speculative_tokens], times) * batch

  def gain(high, low):
    return priority * num_high * sum(acceptance[:high]) + num_low * sum(acceptance[:low])

  assert 0 <= high <= num_speculative_tokens and 0 <= low <= num_speculative_tokens
  assert high * num_high + low * num_low <= tokens
  for split in itertools.product(range(num_speculative_tokens + 1), repeat=2):
    if split[0] * num_high + split[1] * num_low <= tokens:
      assert gain(*split) <= gain(high, low) + 1e-9


@given(situations())
@hypothesis.settings(max_examples=200)
def test_the_paper_s_never_exceeds_its_budget(situation):
  num_high, num_low, acceptance, table, num_speculative_tokens = situation
  times = times_of(table)
  high, low = draft_lengths.mba_paper(
    num_high, num_low, acceptance, times, num_speculative_tokens=num_speculative_tokens
  )
  assert 0 <= high <= num_speculative_tokens and 0 <= low <= num_speculative_tokens
  assert high * num_high + low * num_low <= num_speculative_tokens * (num_high + num_low)


@given(situations())
def test_the_best_length_has_the_fewest_seconds_a_token(situation):
  num_high, _, acceptance, table, _ = situation
  times = times_of(table)
  batch = num_high + 1
  best = draft_lengths.best_length(batch, acceptance, times)
  costs = [
    draft_lengths.seconds_per_token((batch,), (length,), acceptance, times) for length in range(9)
  ]
  # Both add up what a draft gives, in another order: equals may differ by a rounding.
  assert costs[best] == pytest.approx(min(costs), rel=1e-12, abs=0)
  assert min(costs) <= times.decode(batch) / batch


@given(situations())
def test_better_drafts_are_never_drafted_less_where_rows_cost_the_same(situation):
  _, num_low, acceptance, _, _ = situation
  better = tuple(min(1.0, 0.1 + a) for a in acceptance)
  assert draft_lengths.best_length(num_low, acceptance, FLAT) <= draft_lengths.best_length(
    num_low, better, FLAT
  )


def drive(plans, num_high, num_low, num_steps, accept):
  """Runs steps with full drafts and accepts `accept(step)` tokens of each; returns their lengths.

  The high class comes first; () is a step without drafts.
  """
  names = [f"r{place}" for place in range(num_high + num_low)]
  made = []
  for step in range(num_steps):
    choices = plans.plan(names, {*names[:num_high]})
    made.append(tuple(choice.suffix_length for choice in choices))
    for name, choice in zip(names, choices):
      allowed = choice.suffix_length
      assert choice == suffix_choice(allowed)
      plans.observe(name, "suffix", allowed, allowed, min(allowed, accept(step)))
  return made


def num_drafting(lengths):
  return sum(length > 0 for length in lengths)


def test_it_switches_on_where_drafts_hold_and_stays_off_where_rows_cost():
  made = drive(Budget(SATURATING), 0, 2, 20, lambda step: 8)
  assert made[0] == (4, 4)  # A probe.
  assert all(lengths == (8, 8) for lengths in made[5:])
  made = drive(Budget(LINEAR), 0, 2, 500, lambda step: 1)
  assert all(num_drafting(lengths) < 2 for lengths in made[1:])


def test_it_switches_off_where_drafts_fail_and_on_again():
  plans = Budget(SATURATING)
  made = drive(plans, 0, 8, 2000, lambda step: 8 if step < 100 or step >= 1000 else 0)
  assert made[99][-1] > 0 and not any(num_drafting(lengths) > 2 for lengths in made[300:1000])
  assert any(made[300:1000])
  assert num_drafting(made[1999]) == 8


@pytest.mark.thorough
def test_probes_cost_no_more_than_they_may():
  for times, batch in itertools.product((FLAT, SATURATING, LINEAR), (1, 3, 64)):
    plans = Budget(times)
    spent = 0.0
    for lengths in drive(plans, 0, batch, 1000, lambda step: 0):
      spent += times.step(batch, batch + sum(lengths)) / times.decode(batch) - 1
    assert 0 < plans.acceptance["suffix"][0] < 0.2
    assert spent <= budget.PROBE_COST * 1000 + 1.1


def test_a_wavering_gain_does_not_switch_at_every_step():
  plans = Budget(SATURATING, BudgetConfig())
  made = drive(plans, 0, 4, 400, lambda step: step % 2)
  switches = sum(
    (num_drafting(a) > 2) != (num_drafting(b) > 2) for a, b in itertools.pairwise(made)
  )
  assert switches <= 20


def test_chances_by_hand():
  plans = Budget(FLAT, BudgetConfig(num_speculative_tokens=2))
  for _ in range(4000):
    plans.observe("r", "suffix", 2, 2, 1)
    plans.observe("r", "suffix", 2, 1, 0)
  # Half hold at first; where they do, the next never does. Half have a second token.
  assert plans.acceptance["suffix"] == pytest.approx((0.5, 0.0), abs=0.01)
  assert plans.reach["suffix"] == pytest.approx((1.0, 0.5), abs=0.01)


def test_old_observations_fade_and_counts_stay_finite():
  plans = Budget(FLAT)
  for _ in range(1000):
    plans.observe("r", "suffix", 8, 8, 8)
  assert plans.acceptance["suffix"][0] > 0.8
  for _ in range(2 * int(budget.MEMORY)):
    plans.observe("r", "suffix", 8, 8, 0)
  assert plans.acceptance["suffix"][0] < 0.5


def test_equal_histories_make_equal_plans():
  one, two = Budget(SATURATING), Budget(SATURATING)
  history = drive(one, 1, 3, 300, lambda step: step % 5)
  assert history == drive(two, 1, 3, 300, lambda step: step % 5)
  assert one.plan([]) == ()


def test_the_paper_s_policy_can_be_chosen():
  plans = Budget(FLAT, BudgetConfig(policy="mba_paper"))
  assert num_drafting(drive(plans, 1, 4, 20, lambda step: 8)[-1]) == 5


def test_more_accepted_than_drafted_is_refused():
  with pytest.raises(ValueError, match="got 1 accepted of 2 drafted of 1 allowed"):
    Budget(FLAT).observe("r", "suffix", 1, 2, 1)
