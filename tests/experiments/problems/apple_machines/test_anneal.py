"""A polish never makes a plan worse."""

from __future__ import annotations

from plan_cases import ENVIRONMENT, POLISH_LANGUAGE, THREE, polished

from experiments.problems.apple_machines import anneal, edits


def test_a_polish_never_makes_a_plan_worse_and_follows_its_seed():
  for temperature in (0, 9):
    edits = polished(temperature, [0])
    made = POLISH_LANGUAGE.apply(THREE, edits, 1)
    assert ENVIRONMENT.verify(made).reward > ENVIRONMENT.verify(THREE).reward
    assert made == POLISH_LANGUAGE.apply(THREE, edits, 1)
    assert made != POLISH_LANGUAGE.apply(THREE, edits, 2)


def test_more_rounds_never_make_a_plan_worse(good_plan):
  values = []
  for rounds in (2, 4, 16):
    polish = anneal.Polish(400, rounds)
    language = edits.PlanEdits(ENVIRONMENT.problem, polish)
    made = language.apply(good_plan, polished(9, [0]), 1)
    assert made == language.apply(good_plan, polished(9, [0]), 1)
    values.append(ENVIRONMENT.verify(made).value)
  assert ENVIRONMENT.verify(good_plan).value <= values[0] <= values[1] < values[2], values
