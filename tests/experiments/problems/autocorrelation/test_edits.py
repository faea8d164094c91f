"""No tool worsens a function, and sentences make functions or give an error."""

from __future__ import annotations

from autocorrelation_cases import ENVIRONMENTS, FIRST, SECOND
import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from experiments.problems import autocorrelation, step_functions
from experiments.problems.autocorrelation import edits
from seerjax.discovery import environment as environment_lib

ALLOWED = step_functions.allowed()


def sentence(*triples, stop=False):
  tokens = [id for verb, amount, place in triples for id in (1 + verb, 16 + amount, 32 + place)]
  return [*tokens, step_functions.STOP_TOKEN] if stop else tokens


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
    block = environment.language.block(edits.BLOCKS[place % 4])
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


def test_blocks_divide_the_steps_and_leave_two_of_them():
  def block(num_steps: int, most: int) -> int:
    return autocorrelation.FirstAutocorrelation(num_steps=num_steps).language.block(most)

  assert [block(300, most) for most in edits.BLOCKS] == [1, 2, 3, 6]
  assert [block(100, most) for most in edits.BLOCKS] == [1, 2, 2, 5]
  assert (block(7, 6), block(6, 6), block(2, 6)) == (1, 3, 1)


def test_annealing_in_blocks_forgets_what_is_finer():
  language = autocorrelation.FirstAutocorrelation(num_steps=12).language
  fine = language.anneal(language.settle(np.arange(1.0, 13.0)), 2000, 0.1, 0.01)
  coarse = language.anneal(fine, 200, 0.02, 0.001, block=3)
  assert (coarse.reshape(4, 3) == coarse[::3, None]).all()
  # Even where that is worse; then each step may move alone again.
  assert language.value(coarse) > language.value(fine)
  assert language.value(language.anneal(coarse, 2000, 0.1, 0.01)) < language.value(coarse)
