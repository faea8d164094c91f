"""Impossible scores are refused, and values compare according to the problem's unit."""

from __future__ import annotations

import math

import pytest
import tiny_problem

from seerjax.discovery import environment


@pytest.mark.parametrize(
  ("value", "reward"),
  [(math.nan, 1.0), (math.inf, 1.0), (-1e301, 1.0), (1.0, 0.0), (1.0, -1.0), (1.0, 1e301)],
)
def test_a_valid_score_has_a_value_and_a_positive_reward(value: float, reward: float):
  with pytest.raises(ValueError, match=r"Score: got value=.* of a valid artefact, expected"):
    environment.Score(is_valid=True, value=value, reward=reward)


@pytest.mark.parametrize(
  ("value", "reward", "reason"), [(1.0, 0.0, "no"), (math.nan, 1.0, "no"), (math.nan, 0.0, "")]
)
def test_an_invalid_score_has_nothing_but_a_reason(value: float, reward: float, reason: str):
  with pytest.raises(ValueError, match=r"of an invalid artefact, expected NaN, 0 and a reason"):
    environment.Score(is_valid=False, value=value, reward=reward, reason=reason)


@pytest.mark.parametrize(
  ("value", "than", "higher", "lower"),
  [
    (2.0, 1.0, True, False),
    (1.0, 2.0, False, True),
    (1.0, 1.0, False, False),
    (1.0, math.nan, True, True),
    (math.nan, 1.0, False, False),
    (math.nan, math.nan, False, False),
  ],
)
def test_what_is_better_by_hand(value: float, than: float, higher: bool, lower: bool):
  for is_maximised, expected in ((True, higher), (False, lower)):
    problem = tiny_problem.Row(is_maximised=is_maximised)
    assert environment.is_better(problem, value, than) == expected


@pytest.mark.parametrize(
  ("artefact", "reason"),
  [
    ("12", "heights: got str, expected a list of numbers"),
    ([1.0], "heights: got 1 numbers, expected 2"),
    ([1.0, True], "heights[1]: got bool, expected a real number"),
    ([1.0, 1j], "heights[1]: got complex, expected a real number"),
    ([math.nan, 1.0], "heights[0]: got nan, expected a finite number"),
    ([10**5000, 1], "heights[0]: got an int of 16610 bits, expected a finite number"),
  ],
)
def test_what_is_no_list_of_numbers_has_a_reason(artefact: object, reason: str):
  assert environment.check_numbers(artefact, "heights", least=2, most=2) == reason
  assert environment.check_numbers([1, 2.5], "heights", least=2, most=2) == (1.0, 2.5)
