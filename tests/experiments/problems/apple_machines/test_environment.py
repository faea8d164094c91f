"""The apple-machines problem as a whole: contract, baselines, texts and pictures."""

from __future__ import annotations

import itertools
import json

from matplotlib import figure
from plan_cases import ENVIRONMENT, LANGUAGE, POLISHING, THREE
import pytest

from experiments.problems import apple_machines
from experiments.problems.apple_machines import environment as problem_lib
from seerjax.discovery import environment as environment_lib


def test_the_contract_is_kept():
  for environment in (ENVIRONMENT, POLISHING):
    assert isinstance(environment, environment_lib.Environment)
    assert isinstance(environment, environment_lib.Baselines)
    assert isinstance(environment.language, environment_lib.EditLanguage)
  assert ENVIRONMENT.name == "apple_machines_0000"
  values = [published.value for published in ENVIRONMENT.published]
  assert values == sorted(values, reverse=True)
  assert round(values[0]) == 5_656_095
  # These are means over other inputs, so a high value for this one is not comparable.
  assert not any(published.is_comparable for published in ENVIRONMENT.published)
  assert LANGUAGE.vocab_size == 120 and LANGUAGE.stop_token == 0


def test_annealing_yields_ever_better_plans_and_follows_its_seed():
  problem = apple_machines.AppleMachines(1)
  rewards = []
  for artefact, _ in zip(problem.classical(0), range(2)):
    rewards.append(problem.verify(artefact).reward)
    assert json.loads(json.dumps(artefact)) == artefact
  assert 40 < rewards[0] <= rewards[1]
  first = next(problem.classical(0))
  assert problem.verify(first).reward == rewards[0]
  assert first != next(problem.classical(1))


def test_starts_are_as_long_as_luby_says():
  lengths = [problem_lib._luby(number) for number in range(1, 16)]
  assert lengths == [1, 1, 2, 1, 1, 2, 4, 1, 1, 2, 1, 1, 2, 4, 8]


def test_polished_starts_differ():
  starts = list(itertools.islice(ENVIRONMENT.polished_starts(0), 3))
  assert all(ENVIRONMENT.verify(start).is_valid for start in starts)
  assert starts[0] != starts[1] != starts[2]
  assert starts == list(itertools.islice(ENVIRONMENT.polished_starts(0), 3))


def test_pictures_and_descriptions_show_the_plan(good_plan):
  for plan in ([], THREE, good_plan):
    picture = ENVIRONMENT.picture(plan)
    assert isinstance(picture, figure.Figure) and len(picture.axes) == 2
    text = ENVIRONMENT.describe(plan, ENVIRONMENT.verify(plan))
    assert str(plan) in text and "improve(artefact, seconds, seed)" in text
    assert str(ENVIRONMENT.problem.costs[3][9]) in text


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (dict(instance=-1), "AppleMachines.instance: got -1, expected 0 to 9999"),
    (dict(instance=10_000), "AppleMachines.instance: got 10000, expected 0 to 9999"),
    (dict(polish_steps=0), "AppleMachines.polish_steps: got 0, expected 1 to 1000000"),
    (dict(polish_rounds=-1), "AppleMachines.polish_rounds: got -1, expected 0 to 1000"),
  ],
)
def test_impossible_arguments_are_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    apple_machines.AppleMachines(**arguments)
