"""Constants are exact fractions, and invalid functions are refused."""

from __future__ import annotations

from fractions import Fraction
import itertools
import math
import re

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from experiments.problems import autocorrelation, step_functions
from experiments.problems.autocorrelation import rules
from seerjax.discovery import environment as environment_lib

HEIGHTS = st.floats(0, 1000, allow_subnormal=True)
FUNCTIONS = st.lists(HEIGHTS, min_size=2, max_size=12).filter(lambda a: math.fsum(a) >= 0.02)


def naive_nodes(heights):
  nodes = [Fraction(0)] * (2 * len(heights) - 1)
  for i, first in enumerate(heights):
    for j, second in enumerate(heights):
      nodes[i + j] += Fraction(first) * Fraction(second)
  return nodes


def naive_first(heights):
  total = sum(map(Fraction, heights))
  return 2 * len(heights) * max(naive_nodes(heights)) / total**2


def naive_second(heights):
  nodes = [Fraction(0), *naive_nodes(heights), Fraction(0)]
  thirds = sum(y * y + y * z + z * z for y, z in itertools.pairwise(nodes))
  return thirds / 3 / (sum(nodes) * max(nodes))


def first_of(heights):
  return autocorrelation.FirstAutocorrelation(num_steps=len(heights)).verify(heights)


def second_of(heights):
  return autocorrelation.SecondAutocorrelation(num_steps=len(heights)).verify(heights)


def test_closed_forms():
  for n in (2, 3, 10, 300):
    assert first_of([0.1] * n).value == 2.0
    assert second_of([7.3] * n).certificate == "2/3"
  # (1, 0): f*f is one triangle of height 1; (2, 1): nodes 4, 4, 1.
  assert first_of([1, 0]).certificate == "4/1"
  assert second_of([1, 0]).certificate == "2/3"
  assert first_of([2, 1]).certificate == "16/9"
  assert Fraction(second_of([2, 1]).certificate) == Fraction(2 * 33 + 20, 3 * 9 * 4)


def test_rewards_are_positive_and_rise_with_what_is_better():
  assert first_of([2, 1]).reward > first_of([1, 1]).reward == 0.5
  assert second_of([2, 1]).reward > second_of([1, 1]).reward == second_of([1, 1]).value


@hypothesis.given(FUNCTIONS)
def test_values_agree_exactly_with_a_naive_reference(heights):
  first, second = naive_first(heights), naive_second(heights)
  assert rules.first_constant(heights) == first
  assert rules.second_constant(heights) == second
  for score, exact, toward in (
    (first_of(heights), first, -math.inf),
    (second_of(heights), second, math.inf),
  ):
    # Rounded against the claim, and by less than one float.
    upper, lower = sorted([score.value, math.nextafter(score.value, toward)], reverse=True)
    assert lower <= exact <= upper
  assert first_of(heights).value >= first and second_of(heights).value <= second


@hypothesis.given(FUNCTIONS, st.integers(-3, 0))
def test_scale_and_direction_change_nothing(heights, power):
  hypothesis.assume(all(a == 0 or a > 1e-300 for a in heights))
  hypothesis.assume(math.fsum(heights) * 2.0**power >= 0.01)
  scaled = [a * 2.0**power for a in heights]
  for constant in (first_of, second_of):
    assert constant(heights) == constant(scaled) == constant(heights[::-1])


@hypothesis.given(FUNCTIONS, st.integers(2, 4))
def test_cutting_each_step_into_equal_ones_changes_nothing(heights, parts):
  finer = [a for a in heights for _ in range(parts)]
  assert first_of(finer).value == first_of(heights).value
  assert second_of(finer).value == second_of(heights).value


@hypothesis.given(
  st.lists(HEIGHTS, min_size=2, max_size=8).filter(any), st.integers(0, 4), st.integers(0, 4)
)
def test_where_a_function_stands_changes_nothing_and_a_longer_interval_the_first(
  heights, before, after
):
  padded = [0.0] * before + heights + [0.0] * after
  assert rules.second_constant(padded) == rules.second_constant(heights)
  longer = Fraction(len(padded), len(heights))
  assert rules.first_constant(padded) == longer * rules.first_constant(heights)


@pytest.mark.parametrize("spread", [0, 300])
def test_large_functions_are_judged_and_bounds_are_within_a_rounding_of_exact_values(spread):
  rng = np.random.default_rng(spread)
  heights = (rng.random(2000) * 10.0 ** -rng.uniform(0, spread + 1e-9, 2000)).tolist()
  for constant, round_, toward in (
    (rules.first_constant, step_functions.at_least, math.inf),
    (rules.second_constant, step_functions.at_most, -math.inf),
  ):
    exact, bound = constant(heights), constant(heights, most_digits=0)
    assert (exact <= bound) if toward > 0 else (exact >= bound)
    assert (exact == bound) == (spread == 0)
    assert round_(bound) in (round_(exact), math.nextafter(round_(exact), toward))


@pytest.mark.parametrize("num_steps", [1319, 50_000])
def test_functions_of_published_sizes_are_judged(num_steps):
  # A triangle: with n steps its constants are near those of the continuous function.
  ramp = np.minimum(np.arange(num_steps) + 0.5, num_steps - np.arange(num_steps) - 0.5)
  heights = (ramp / ramp.max()).tolist()
  first = autocorrelation.FirstAutocorrelation(num_steps=num_steps)
  second = autocorrelation.SecondAutocorrelation(num_steps=num_steps)
  # f*f of a triangle is a cubic B-spline: of integral 1, largest 2/3, of its square 151/315.
  assert first.verify(heights).value == pytest.approx(8 / 3, abs=1e-3)
  assert second.verify(heights).value == pytest.approx(151 / 315 / (2 / 3), abs=1e-3)
  assert first.language.anneal(np.array(heights), 0, 0.1, 0.01).tolist() == heights
  polished = second.language.polish(np.array(heights), 1, 0.1, np.ones(num_steps, bool))
  assert polished.tolist() == heights


def test_a_fraction_too_long_to_print_is_certified_by_the_float():
  heights = [1.0, 5e-324]
  score = first_of(heights)
  assert float.fromhex(score.certificate) == score.value >= naive_first(heights)


BAD = (
  (None, "got NoneType, expected a list of numbers"),
  ({"heights": [1, 2]}, "got dict, expected a list of numbers"),
  ("1, 2", "got str, expected a list of numbers"),
  (np.ones(2), "got ndarray, expected a list of numbers"),
  ([], "got 0 numbers, expected 2"),
  ([1.0], "got 1 numbers, expected 2"),
  ([1.0] * 100_000, "got 100000 numbers, expected 2"),
  ([1.0, math.nan], r"heights\[1\]: got nan, expected a finite number"),
  ([math.inf, 1.0], r"heights\[0\]: got inf, expected a finite number"),
  ([1.0, -math.inf], r"heights\[1\]: got -inf, expected a finite number"),
  ([1.0, -1e-9], r"heights\[1\]: got -1e-09, expected 0 to 1000"),
  ([1.0, 1000.1], r"heights\[1\]: got 1000.1, expected 0 to 1000"),
  ([1.0, 10**400], r"heights\[1\]: got an int of 1329 bits, expected a finite"),
  ([10**5000, 1.0], r"heights\[0\]: got an int of 16610 bits, expected a finite number"),
  ([True, 1.0], r"heights\[0\]: got bool, expected a real number"),
  ([1.0, 1j], r"heights\[1\]: got complex, expected a real number"),
  ([1.0, "1"], r"heights\[1\]: got str, expected a real number"),
  ([[1.0], 1.0], r"heights\[0\]: got list, expected a real number"),
  ([1.0, None], r"heights\[1\]: got NoneType, expected a real number"),
  ([0.0, 0.0], "got a sum of 0.0, expected at least 0.01"),
  ([1e-161, 1e-161], "got a sum of 2e-161, expected at least 0.01"),
)


@pytest.mark.parametrize(("artefact", "reason"), BAD)
def test_what_is_no_function_is_refused_with_its_reason(artefact, reason):
  for environment in (
    autocorrelation.FirstAutocorrelation(num_steps=2),
    autocorrelation.SecondAutocorrelation(num_steps=2),
  ):
    score = environment.verify(artefact)
    assert not score.is_valid and score.reward == 0 and math.isnan(score.value)
    assert re.search(reason, score.reason), score.reason


JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
  lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
  max_leaves=8,
)


@hypothesis.given(JSON)
def test_verify_never_raises(artefact):
  for environment in (
    autocorrelation.FirstAutocorrelation(num_steps=2),
    autocorrelation.SecondAutocorrelation(num_steps=3),
  ):
    assert isinstance(environment.verify(artefact), environment_lib.Score)
