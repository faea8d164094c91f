"""Plans played as arrays yield the same apples as in integers of any size."""

from __future__ import annotations

import math

import numpy as np
from plan_cases import ENVIRONMENT, PLAIN, RICH, random_plan
import pytest

from experiments.problems.apple_machines import plans, rules


def test_the_kernels_agree_with_integers_of_any_size():
  draws = np.random.default_rng(11)
  largest = 0
  for case in range(60):
    problem = (ENVIRONMENT.problem, PLAIN, rules.instance(case))[case % 3]
    plan = [[0, 0, 6], *random_plan(draws, int(draws.integers(1, 40)))]
    runs = rules.parse([run for run in plan if run[2] > 6 or run == plan[0]])
    assert not isinstance(runs, str)
    apples = rules.trace(problem, runs)[-1].apples
    assert plans.final_apples(problem, runs) == apples
    tables = plans.tables_of(problem)
    bits = plans.play(
      tables.apples, tables.costs, *plans.arrays(runs), len(runs), np.zeros(0, np.int64)
    )
    assert bits == pytest.approx(math.log2(apples), abs=1e-9)
    largest = max(largest, apples)
  assert largest > 2**30


def test_good_plans_agree_with_integers_of_any_size(good_plan):
  runs = rules.parse(good_plan)
  assert not isinstance(runs, str)
  apples = rules.trace(ENVIRONMENT.problem, runs)[-1].apples
  assert apples > 2**40
  assert plans.final_apples(ENVIRONMENT.problem, runs) == apples
  assert ENVIRONMENT.verify(good_plan).value == round(1e5 * math.log2(apples))


def test_what_outgrows_an_int64_is_still_exact():
  runs = ((0, 0, 9), (1, 0, 100), (2, 0, 200), (3, 0, 300), (1, 0, 400), (0, 0, 500))
  apples = rules.trace(RICH, runs)[-1].apples
  assert apples > 2**64
  tables, arrays = plans.tables_of(RICH), plans.arrays(runs)
  assert plans._exact(tables.whole_apples, tables.whole_costs, *arrays, len(runs)) == -1
  assert plans.final_apples(RICH, runs) == apples
