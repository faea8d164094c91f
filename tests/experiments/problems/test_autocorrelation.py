"""Autocorrelation: constants are exact fractions, and no tool ever worsens a function."""

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
from seerjax.discovery import environment as environment_lib

FIRST = autocorrelation.FirstAutocorrelation(num_steps=24)
SECOND = autocorrelation.SecondAutocorrelation(num_steps=20)
ENVIRONMENTS = (FIRST, SECOND)
ALLOWED = step_functions.allowed()
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


def sentence(*triples, stop=False):
  tokens = [id for verb, amount, place in triples for id in (1 + verb, 16 + amount, 32 + place)]
  return [*tokens, step_functions.STOP_TOKEN] if stop else tokens


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
  assert autocorrelation.first_constant(heights) == first
  assert autocorrelation.second_constant(heights) == second
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
  assert autocorrelation.second_constant(padded) == autocorrelation.second_constant(heights)
  longer = Fraction(len(padded), len(heights))
  assert autocorrelation.first_constant(padded) == longer * autocorrelation.first_constant(heights)


@pytest.mark.parametrize("spread", [0, 300])
def test_large_functions_are_judged_and_bounds_are_within_a_rounding_of_exact_values(spread):
  rng = np.random.default_rng(spread)
  heights = (rng.random(2000) * 10.0 ** -rng.uniform(0, spread + 1e-9, 2000)).tolist()
  for constant, round_, toward in (
    (autocorrelation.first_constant, step_functions.at_least, math.inf),
    (autocorrelation.second_constant, step_functions.at_most, -math.inf),
  ):
    exact, bound = constant(heights), constant(heights, most_digits=0)
    assert (exact <= bound) if toward > 0 else (exact >= bound)
    assert (exact == bound) == (spread == 0)
    assert round_(bound) in (round_(exact), math.nextafter(round_(exact), toward))


@pytest.mark.parametrize("num_steps", [1319, 50_000])
def test_functions_of_published_sizes_are_judged(num_steps):
  # A triangle; of n steps its constants are near those of the function.
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


@pytest.mark.parametrize(
  "environment", [*ENVIRONMENTS, autocorrelation.FirstAutocorrelation()], ids=lambda e: e.name
)
def test_the_contract_of_an_environment_holds(environment):
  assert isinstance(environment, environment_lib.Environment)
  assert isinstance(environment, environment_lib.Baselines)
  language = environment.language
  assert isinstance(language, environment_lib.EditLanguage)
  assert language.vocab_size % 8 == 0 and language.vocab_size <= 128
  assert language.stop_token == 0
  for low, high in language.allowed:
    assert 0 <= low < high <= language.vocab_size
  start = environment.start(3)
  assert start == environment.start(3) != environment.start(4)
  score = environment.verify(start)
  assert score.is_valid
  ids = language.prompt(start)
  assert len(ids) == 34 and all(0 <= id < language.vocab_size for id in ids)
  text = environment.describe(start, score)
  for said in ("improve(artefact, seconds, seed)", f"{score.value:.10f}", f"{start[0]:.6g}"):
    assert said in text
  axes = environment.picture(start).axes
  assert len(axes) == 2 and f"{score.value:.8f}" in axes[1].get_title()
  values = [published.value for published in environment.published]
  assert values == sorted(values, reverse=environment.is_maximised)


def test_what_a_policy_sees_does_not_change_with_what_is_published():
  assert FIRST.language.target == 1.5028628
  assert SECOND.language.target == 0.961206 < SECOND.published[0].value == 0.96258


@st.composite
def sentences(draw):
  tokens = []
  for low, high in ALLOWED:
    tokens.append(draw(st.integers(low, high - 1)))
    if tokens[-1] == step_functions.STOP_TOKEN:
      break
  return tokens


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda e: e.name)
@hypothesis.settings(max_examples=hypothesis.settings().max_examples // 2)
@hypothesis.given(sentences(), st.integers(0, 5))
def test_every_allowed_sentence_makes_a_valid_function_or_says_why_not(environment, tokens, seed):
  start = environment.start(seed)
  kept = list(start)
  try:
    after = environment.language.apply(start, tokens, seed)
  except ValueError:
    with pytest.raises(ValueError, match="leave some of the function"):
      environment.language.apply(start, tokens, seed)
    return
  assert start == kept
  assert environment.verify(after).is_valid
  assert all(0 <= id < 80 for id in environment.language.prompt(after))
  assert environment.language.apply(start, tokens, seed) == after


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda e: e.name)
@hypothesis.settings(max_examples=hypothesis.settings().max_examples // 2)
@hypothesis.given(st.integers(0, 50), st.integers(0, 15), st.integers(0, 15))
def test_tools_never_worsen(environment, seed, amount, place):
  start = environment.start(seed)
  for verb in (step_functions.POLISH, step_functions.LAST):
    after = environment.language.apply(start, sentence((verb, amount, place)), seed)
    value, before = environment.verify(after).value, environment.verify(start).value
    block = environment.language.block(autocorrelation.BLOCKS[place % 4])
    if verb == step_functions.POLISH or block == 1:  # Blocks forget what was finer, at first.
      # Scaling the start to mean 1 may move its value by a rounding.
      is_worse = environment_lib.is_better(environment, before, value)
      assert not is_worse or abs(value - before) < 1e-13
    again = environment.language.apply(after, sentence((verb, amount, place)), seed)
    assert abs(environment.verify(again).value - value) < 1e-13 or environment_lib.is_better(
      environment, environment.verify(again).value, value
    )


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda e: e.name)
def test_both_tools_improve_a_plain_start(environment):
  start = environment.start(0)
  value = environment.verify(start).value
  annealed = environment.language.apply(start, sentence((step_functions.LAST, 10, 6)), 0)
  after_annealing = environment.verify(annealed).value
  assert environment_lib.is_better(environment, after_annealing, value)
  polished = environment.language.apply(annealed, sentence((step_functions.POLISH, 5, 0)), 0)
  assert environment_lib.is_better(environment, environment.verify(polished).value, after_annealing)


@pytest.mark.parametrize(
  ("tokens", "message"),
  [
    ([], "got 0 tokens, expected 1 to 4 triples"),
    ([0], "got 1 tokens, expected 1 to 4 triples"),
    ([1, 16], "got 2 tokens, expected 1 to 4 triples"),
    ([1, 16, 32] * 5, "got 15 tokens, expected 1 to 4 triples"),
    ([10, 16, 32], "got id 10 at place 0, expected 1 to 9"),
    ([1, 32, 32], "got id 32 at place 1, expected 16 to 31"),
    ([1, 16, 48], "got id 48 at place 2, expected 32 to 47"),
    ([1, 16, 32, 0, 16, 32], "got id 0 at place 3, expected 1 to 9"),
    ([1, 16, 32, -1, 16, 32], "got id -1 at place 3, expected 1 to 9"),
  ],
)
def test_what_is_no_sentence_is_refused(tokens, message):
  with pytest.raises(ValueError, match=message):
    FIRST.language.apply(FIRST.start(0), tokens, 0)


def test_a_stop_token_ends_a_sentence():
  edit = (step_functions.SMOOTH, 9, 0)
  start = SECOND.start(0)
  assert SECOND.language.apply(start, sentence(edit, stop=True), 0) == SECOND.language.apply(
    start, sentence(edit), 0
  )


def test_a_sentence_that_leaves_nothing_is_refused():
  with pytest.raises(ValueError, match="got heights of mean 0, expected some above 0"):
    FIRST.language.apply(FIRST.start(0), sentence((step_functions.SET, 0, 0)), 0)


@pytest.mark.parametrize("kind", [type(FIRST), type(SECOND)])
def test_impossible_sizes_are_refused(kind):
  for num_steps in (1, 1_000_001):
    with pytest.raises(ValueError, match=f"num_steps: got {num_steps}, expected 2 to 1000000"):
      kind(num_steps=num_steps)


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda e: e.name)
@pytest.mark.parametrize("baseline", ["classical", "polished_starts"])
def test_baselines_yield_valid_functions_that_beat_a_start(environment, baseline):
  def items():
    return environment.classical(1) if baseline == "classical" else environment.polished_starts(1)

  endless = items()
  first, second = next(endless), next(endless)
  assert first == next(items()) and first != second
  before = environment.verify(environment.start(0)).value
  for item in (first, second):
    assert environment_lib.is_better(environment, environment.verify(item).value, before)


@pytest.mark.long
def test_the_classical_method_passes_alphaevolve_of_2025_on_the_second():
  items = autocorrelation.SecondAutocorrelation().classical(0)
  environment = autocorrelation.SecondAutocorrelation()
  best = max(environment.verify(next(items)).value for _ in range(12))
  assert best > 0.8962


def test_blocks_divide_the_steps_and_leave_two_of_them():
  def block(num_steps: int, most: int) -> int:
    return autocorrelation.FirstAutocorrelation(num_steps=num_steps).language.block(most)

  assert [block(300, most) for most in autocorrelation.BLOCKS] == [1, 2, 3, 6]
  assert [block(100, most) for most in autocorrelation.BLOCKS] == [1, 2, 2, 5]
  assert (block(7, 6), block(6, 6), block(2, 6)) == (1, 3, 1)


def test_annealing_in_blocks_forgets_what_is_finer():
  language = autocorrelation.FirstAutocorrelation(num_steps=12).language
  fine = language.anneal(language.settle(np.arange(1.0, 13.0)), 2000, 0.1, 0.01)
  coarse = language.anneal(fine, 200, 0.02, 0.001, block=3)
  assert (coarse.reshape(4, 3) == coarse[::3, None]).all()
  # Even where that is worse; then each step may move alone again.
  assert language.value(coarse) > language.value(fine)
  assert language.value(language.anneal(coarse, 2000, 0.1, 0.01)) < language.value(coarse)
