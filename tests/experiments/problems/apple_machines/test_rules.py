"""Validity of a plan, and its value in integers of any size."""

from __future__ import annotations

import decimal
import itertools
import math

import hypothesis
from hypothesis import strategies as st
import numpy as np
from plan_cases import ENVIRONMENT, LANGUAGE, PLAIN, random_plan
import pytest

from experiments.problems.apple_machines import rules


def test_four_turns_by_hand():
  turns = rules.trace(PLAIN, [(0, 0, 2), (1, 0, 3)], turns=5)
  assert turns == [
    (0, True, 1),  # 1 - 1 + 1
    (0, False, 2),  # The second (0, 0) costs 2, there is 1.
    (1, True, 1),  # 2 - 2 + 1: level 0 works before level 1 makes a second machine of it.
    (-1, False, 3),  # 1 + 2
    (-1, False, 6),  # 3 + 3
  ]
  turns = rules.trace(PLAIN, [(0, 0, 4), (2, 0, 5), (1, 0, 8)], turns=10)
  # Apples 1 2 | 1 (P = 2: 2 - 2 + 2 = 2) ... the second (0, 0) is bought in turn 2.
  assert [turn.apples for turn in turns[:4]] == [1, 2, 2, 4]
  # Turn 4: 4 - 3 + 2 = 3, B of level 1 becomes 2; turn 5: 3 - 2 + 2, B of level 0 becomes 1 + 2.
  assert [turn.apples for turn in turns[4:6]] == [3, 3]
  # Turn 6: B of level 1 is 3; 3 < 4, so it waits: 3 + 3 * 2, then B of level 0 is 3 + 3.
  assert turns[6] == (2, False, 9)


@pytest.mark.parametrize(
  ("apples", "expected"), [(1, 0), (2, 100_000), (3, 158_496), (10, 332_193), (2**70, 7_000_000)]
)
def test_points_by_hand(apples, expected):
  assert rules.points(apples) == expected


def test_points_near_a_half_are_rounded_to_the_right_side():
  # log2(n) * 1e5 nearest to half-way, by 60 decimals: the side is that of the exact number.
  with decimal.localcontext() as context:
    context.prec = 60
    for odd in (10_000_001, 11_234_567):
      middle = decimal.Decimal(2) ** (decimal.Decimal(odd) / 200_000)
      below = int(middle.to_integral_value(rounding=decimal.ROUND_FLOOR))
      assert rules.points(below) == odd // 2
      assert rules.points(below + 1) == odd // 2 + 1


def test_inputs_are_as_the_problem_draws_them():
  assert rules.instance(3) == rules.instance(3)
  seen = [rules.instance(index) for index in range(100)]
  assert len(set(seen)) == 100
  for problem in seen:
    assert problem.apples[0] == 1 and list(problem.apples) == sorted(problem.apples)
    assert max(problem.apples) <= 100
    assert problem.costs[0][0] == 1
    for level, kind in itertools.product(range(4), range(10)):
      least = problem.apples[kind] * 500**level
      assert (level, kind) == (0, 0) or least <= problem.costs[level][kind] <= 100 * least
  # The mean logarithm of the nine drawn kinds is about 1, as in the contest's own inputs; ten draws
  # with the smallest overwritten would have 1.09.
  logs = np.log10([problem.apples[1:] for problem in seen])
  assert abs(logs.mean() - 0.995) < 0.05
  # Logarithms are uniform: half of the costs are above ten times the least.
  above = [p.costs[1][5] > 5000 * p.apples[5] for p in seen]
  assert 30 < sum(above) < 70


def test_input_0_is_the_same_on_every_machine():
  assert ENVIRONMENT.problem.apples == (1, 2, 2, 3, 3, 4, 4, 11, 49, 57)
  assert ENVIRONMENT.problem.costs[3][:3] == (2352604484, 674512435, 2799857542)


# Of the first 10,000 inputs, those with costs nearest to a half, in ulps of the product.
@pytest.mark.parametrize("index", [3079, 5101, 5607, 6809, 9451])
def test_inputs_that_a_last_bit_could_change_are_rounded_to_the_right_side(index):
  draws = np.random.Generator(np.random.PCG64([58, index]))
  draws.uniform(0.0, 2.0, 9)  # Of the apples but the first.
  exponents = draws.uniform(0.0, 2.0, (4, 10)).tolist()
  problem, from_a_half = rules.instance(index), []
  with decimal.localcontext() as context:
    context.prec = 50
    for level, kind in itertools.product(range(1, 4), range(10)):
      least = problem.apples[kind] * 500**level
      exact = least * decimal.Decimal(10) ** decimal.Decimal(exponents[level][kind])
      assert problem.costs[level][kind] == round(exact)
      from_a_half.append(abs(exact % 1 - decimal.Decimal("0.5")))
  assert min(from_a_half) < 1e-3


def test_nothing_bought_leaves_one_apple():
  score = ENVIRONMENT.verify([])
  assert score.is_valid and (score.value, score.reward) == (0.0, 1.0)


def test_the_plain_start_buys_the_first_machine():
  start = ENVIRONMENT.start(7)
  assert start == [[0, 0, 500]]
  start.append("spoilt")
  score = ENVIRONMENT.verify(ENVIRONMENT.start(7))
  apples = rules.trace(ENVIRONMENT.problem, [(0, 0, 500)])[-1].apples
  assert score.value == rules.points(apples)
  assert score.reward == 1 + math.log2(apples)


@pytest.mark.parametrize(
  ("artefact", "reason"),
  [
    (None, "plan: got NoneType, expected a list of runs"),
    ("plan", "plan: got str, expected a list of runs"),
    ([[0, 0, 1]] * 501, "plan: got 501 runs, expected at most 500"),
    ([3], "plan[0]: got int, expected [level, kind, end]"),
    ([[0, 0]], "plan[0]: got 2 entries, expected [level, kind, end]"),
    ([[0, 0, 2.0]], "plan[0]: got [int, int, float], expected three integers"),
    ([[0, False, 2]], "plan[0]: got [int, bool, int], expected three integers"),
    ([[0, 0, math.nan]], "plan[0]: got [int, int, float], expected three integers"),
    ([[4, 0, 2]], "plan[0]: got level 4, expected 0 to 3"),
    ([[-1, 0, 2]], "plan[0]: got level -1, expected 0 to 3"),
    ([[0, 10, 2]], "plan[0]: got kind 10, expected 0 to 9"),
    ([[0, 0, 2], [0, 1, 2]], "plan[1]: got end 2, expected 3 to 500"),
    ([[0, 0, 501]], "plan[0]: got end 501, expected 1 to 500"),
    ([[0, 0, 10**9999]], "plan[0]: got end int, expected 1 to 500"),
  ],
)
def test_what_is_no_plan_is_refused_with_the_reason(artefact, reason):
  score = ENVIRONMENT.verify(artefact)
  assert not score.is_valid and reason in score.reason
  with pytest.raises(ValueError, match="got no plan"):
    LANGUAGE.prompt(artefact)
  with pytest.raises(ValueError, match="apple_machines_0000.picture: got no plan"):
    ENVIRONMENT.picture(artefact)


JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
  lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner),
)


@hypothesis.given(JSON)
def test_anything_whatever_is_judged(artefact):
  score = ENVIRONMENT.verify(artefact)
  assert score.is_valid or score.reason


@hypothesis.given(st.integers(0, 2**32))
def test_wanting_what_can_never_be_paid_for_changes_nothing(seed):
  plan = [[0, 0, 30], *[run for run in random_plan(np.random.default_rng(seed), 4) if run[2] > 30]]
  plan = [run for run in plan if run[0] == 0 and run[2] <= 400]
  problem, level = ENVIRONMENT.problem, 3
  kind = max(range(10), key=lambda k: problem.costs[3][k])
  score = ENVIRONMENT.verify(plan)
  hypothesis.assume(2.0 ** (score.value / 1e5 + 1) < problem.costs[level][kind])
  assert ENVIRONMENT.verify([*plan, [level, kind, 500]]) == score


@hypothesis.given(st.integers(0, 2**32))
def test_cutting_a_run_in_two_changes_nothing(seed):
  draws = np.random.default_rng(seed)
  plan = random_plan(draws, 6)
  level, kind, end = plan[0]
  hypothesis.assume(end > 1)
  cut = [[level, kind, int(draws.integers(1, end))], *plan]
  assert ENVIRONMENT.verify(cut) == ENVIRONMENT.verify(plan)
