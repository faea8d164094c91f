"""Timing comparisons are fair: cheats are caught, and outputs are compared with a tolerance."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from schedule_cases import TINY, drawn

from experiments.problems.kernel_speed import rules, trimul


def test_laps_have_fresh_inputs_and_the_contestants_take_turns():
  called: list[tuple[str, float]] = []

  def note(name: str):
    def function(inputs):
      called.append((name, float(inputs.x[0, 0, 0]) + float(inputs.projections[0, 0, 0])))
      return inputs.x

    return function

  found = rules.race(
    note("ours"), note("plain"), lambda seed, lap: drawn(seed), laps=3, tolerance=0.0
  )
  assert not found.reason and len(called) == 2 * (3 + len(rules.KINDS))
  pairs = list(zip(called[::2], called[1::2]))
  assert len({value for _, value in called}) == len(pairs)
  assert all(one[1] == two[1] for one, two in pairs)
  assert {one[0] for one, _ in pairs} == {"ours", "plain"}
  assert all(one[0] != two[0] for one, two in pairs)


class Cached:
  """A cheat: computes the first calls, and then returns what it has."""

  def __init__(self, num_honest: int):
    self._left = num_honest
    self._kept = None

  def __call__(self, inputs):
    if self._left:
      self._left -= 1
      self._kept = jax.jit(trimul.reference)(inputs)
    return self._kept


def unmasked(inputs):
  return trimul.reference(inputs._replace(mask=jnp.ones_like(inputs.mask)))


def incoming(inputs):
  """Sums over k of a[k, i] b[k, j], the other triangle."""
  turned = inputs._replace(x=inputs.x.swapaxes(0, 1), mask=inputs.mask.T)
  return trimul.reference(turned)


# Each is the honest function but for one thing.
CHEATS = {
  "zeros": lambda inputs: jnp.zeros_like(inputs.x),
  "not finite": lambda inputs: trimul.reference(inputs) * jnp.nan,
  "mask left out": unmasked,
  "other triangle": incoming,
  "one entry": lambda inputs: trimul.reference(inputs).at[3, 4, 5].add(0.5),
  "scaled": lambda inputs: 1.1 * trimul.reference(inputs),
  "keeps its first answer": Cached(1),
  "keeps once it is timed": Cached(len(rules.KINDS)),
}


@pytest.mark.parametrize("name", list(CHEATS))
def test_a_wrong_implementation_is_out(name: str):
  found = TINY.race(CHEATS[name], laps=3)
  assert "answer: got" in found.reason and "expected" in found.reason
  assert not found.ratios
  assert ("in a timed call" in found.reason) == (name == "keeps once it is timed")


def test_the_twin_of_the_wrong_ones_is_let_in():
  assert not TINY.race(Cached(1000), laps=3).reason


def test_a_program_that_breaks_is_out_and_a_broken_reference_is_an_error():
  def broken(inputs):
    raise RuntimeError("out of registers\nat line 3")

  found = TINY.race(broken, laps=3)
  assert found.reason == "program: got RuntimeError: out of registers, expected an answer"
  with pytest.raises(RuntimeError, match="out of registers"):
    rules.race(trimul.reference, broken, lambda seed, lap: drawn(seed), laps=3, tolerance=0.0)


def test_float32_is_held_to_its_own_tolerance():
  def rough(inputs):
    return trimul.reference(inputs) * 1.01

  assert not TINY.race(rough, laps=3).reason
  found = TINY.race(rough, laps=3, tolerance=rules.FLOAT32_TOLERANCE)
  assert "within 0.0001 absolute and relative" in found.reason


@pytest.mark.parametrize(
  ("got", "reason"),
  [
    ((), "answer: got 0 arrays, expected 1"),
    (jnp.ones((2, 3)), r"answer: got [2, 3], expected [2, 2]"),
    (np.ones((2, 2), np.float32), "answer: got ndarray, expected [2, 2]"),
    (jnp.ones((2, 2), jnp.bfloat16), "answer: got bfloat16, expected float32"),
    (jnp.full((2, 2), 1.5), "answer: got 1.5 at (0, 0), expected 1 within 0.02 absolute and"),
  ],
)
def test_answers_of_another_form_are_wrong(got, reason: str):
  assert reason in rules.differs(got, jnp.ones((2, 2)), 0.02)[0]


def test_the_tolerance_is_absolute_and_relative():
  truth = jnp.array([0.0, 100.0])
  assert rules.differs(jnp.array([0.019, 102.0]), truth, 0.02) == ("", pytest.approx(2.0))
  assert rules.differs(jnp.array([0.021, 100.0]), truth, 0.02)[0]
  assert rules.differs(jnp.array([0.0, 102.1]), truth, 0.02)[0]


def test_infinity_is_borne_only_where_it_should_be():
  truth = jnp.array([jnp.inf, -jnp.inf])
  assert rules.differs(truth, truth, 0.02) == ("", 0.0)
  for wrong in ([2.0, -jnp.inf], [-jnp.inf, -jnp.inf], [jnp.nan, -jnp.inf]):
    assert rules.differs(jnp.array(wrong), truth, 0.02)[0]
