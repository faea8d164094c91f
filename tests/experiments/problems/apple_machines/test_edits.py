"""Most sentences change the plan; and the prompt of a policy."""

from __future__ import annotations

import json

import numpy as np
from plan_cases import (
  ENVIRONMENT,
  LANGUAGE,
  POLISH_LANGUAGE,
  THREE,
  polished,
  random_plan,
  random_sentence,
  sentence,
)
import pytest

from experiments.problems.apple_machines import anneal, edits, plans, rules


@pytest.mark.parametrize("language", [LANGUAGE, POLISH_LANGUAGE])
def test_uniform_sentences_are_nearly_all_valid_and_leave_the_given_plan_alone(
  language, good_plan, record_property
):
  draws, num_valid, num_all = np.random.default_rng(5), 0, 600
  for attempt in range(num_all):
    plan = (
      good_plan, ENVIRONMENT.start(0), random_plan(draws, 32), random_plan(draws, 60),
    )[attempt % 4]  # fmt: skip
    before, tokens = json.dumps(plan), random_sentence(language, draws)
    try:
      made = language.apply(plan, tokens, attempt)
    except ValueError:
      assert json.dumps(plan) == before
      continue
    assert json.dumps(plan) == before
    num_valid += ENVIRONMENT.verify(made).is_valid
    assert made == language.apply(json.loads(before), tuple(tokens), attempt)
    assert len(made) <= max(plans.MAX_RUNS, len(plan))
  record_property("valid", num_valid / num_all)
  assert num_valid >= 0.8 * num_all


def test_ranges_of_ids_meet_and_end_with_the_vocabulary():
  assert LANGUAGE.allowed == ((0, 9), (16, 48), (48, 64), (64, 104), (104, 120)) * 4
  edit = LANGUAGE.allowed[:5]
  assert POLISH_LANGUAGE.allowed == ((104, 120), *edit * 3)


def test_prompts_show_every_run_by_hand():
  assert LANGUAGE.prompt([]) == (9,)
  runs = rules.parse(THREE)
  assert not isinstance(runs, str)
  turns = rules.trace(ENVIRONMENT.problem, runs)
  bought = [sum(turn.is_bought for turn in turns if turn.run == run) for run in range(3)]
  # The id increases at 1, 2, 3, 4, 5, 7, 10, 14 and 19 purchases.
  assert bought == [16, 8, 2]
  levels = [8, 6, 2]
  assert LANGUAGE.prompt(THREE) == (
    9, 64, 17, 104 + levels[0], 65, 19, 104 + levels[1], 74, 23, 104 + levels[2],
  )  # fmt: skip


def test_prompts_are_never_long():
  draws = np.random.default_rng(2)
  for num_runs in (1, 31, 32, 33, 500):
    prompt = LANGUAGE.prompt(random_plan(draws, num_runs))
    assert len(prompt) == 1 + 3 * min(num_runs, 32)
    assert all(type(token) is int and 0 <= token < LANGUAGE.vocab_size for token in prompt)


@pytest.mark.parametrize(
  ("tokens", "message"),
  [
    ([], "got 0 tokens without a stop token, expected 20; let it end with 0"),
    ([1, 16, 48, 64, 104], "got 5 tokens without a stop token, expected 20"),
    ([9, 16, 48, 64, 104, 0], "got id 9 in place 0, expected 0 to 8"),
    ([1, 15, 48, 64, 104, 0], "got id 15 in place 1, expected 16 to 47"),
    ([1, 16, 48, 64, 120, 0], "got id 120 in place 4, expected 104 to 119"),
    ([0, 0], "got tokens after the stop token in place 0, expected none"),
    ([1, 16, 48, 64, 104] * 5, "got 25 tokens, expected at most 20"),
    ([0], "got a sentence that leaves the plan as it was; expected an edit that changes it"),
    (sentence(("swap", 2, 0, 0, 0)), "got a sentence that leaves the plan as it was"),
  ],
)
def test_sentences_that_are_none_are_refused(tokens, message):
  with pytest.raises(ValueError, match=message):
    LANGUAGE.apply(THREE, tokens, 0)


def test_a_polish_starts_from_what_the_edits_made():
  ruined = sentence(("paint", 0, 0, 39, 15))
  assert ENVIRONMENT.verify(LANGUAGE.apply(THREE, ruined, 0)).value < 1e5
  one_step = edits.PlanEdits(ENVIRONMENT.problem, anneal.Polish(1))
  assert ENVIRONMENT.verify(one_step.apply(THREE, polished(0, ruined), 0)).value < 1e6
  # Three edits are the most.
  three = sentence(*[("paint", 0, 0, 5, 3)] * 3)[:-1]
  assert POLISH_LANGUAGE.apply(THREE, polished(0, three), 0)
  with pytest.raises(ValueError, match="got 21 tokens, expected at most 16"):
    POLISH_LANGUAGE.apply(THREE, polished(0, three + three[:5]), 0)
  with pytest.raises(ValueError, match="got id 0 in place 0, expected 104 to 119"):
    POLISH_LANGUAGE.apply(THREE, [0], 0)


def test_edits_are_deterministic_without_a_seed(good_plan):
  two = sentence(("paint", 2, 4, 31, 3), ("rekind", 1, 0, 4, 0))
  assert LANGUAGE.apply(good_plan, two, 1) == LANGUAGE.apply(good_plan, two, -2)
