"""Invalid pipelines are refused with the reason."""

from __future__ import annotations

import math

import hypothesis
from hypothesis import strategies as st
from pipeline_cases import ENVIRONMENT, EVERY_STEP
import pytest

from experiments.problems.denoising import operations


def test_every_operation_has_a_test():
  assert list(EVERY_STEP) == [operation.name for operation in operations.OPERATIONS]


def step(op: str, **knobs):
  return {"steps": [{"op": op, **knobs}]}


@pytest.mark.parametrize(
  ("artefact", "reason"),
  [
    (None, 'artefact: got None, expected {"steps": [...]}'),
    ([], "artefact: got []"),
    ({"steps": [], "matrix": []}, "artefact: got {'steps': [], 'matrix': []}"),
    ({"steps": []}, "steps: got 0 steps, expected a list of 1 to 8"),
    ({"steps": "log"}, "steps: got str, expected a list"),
    ({"steps": [{"op": "log"}] * 9}, "steps: got 9 steps"),
    ({"steps": ["log"]}, 'steps[0]: got log, expected a dict whose "op" is one of normalise'),
    ({"steps": [{"op": ["log"]}]}, "steps[0]: got {'op': ['log']}"),
    (step("magic"), "steps[0]: got {'op': 'magic'}"),
    (step("svd"), "steps[0]: got the fields op, expected op, rank"),
    (step("log", rank=3), "steps[0]: got the fields op, rank, expected op"),
    (step("svd", rank=0), "steps[0].rank: got 0, expected an integer from 1 to 48"),
    (step("svd", rank=10**5000), "steps[0].rank: got int, expected an integer from 1 to 48"),
    (step("svd", rank=True), "steps[0].rank: got True, expected an integer"),
    (step("svd", rank=2.0), "steps[0].rank: got 2.0, expected an integer"),
    (step("svd", rank="2"), "steps[0].rank: got 2, expected an integer"),
    (step("power", exponent=math.nan), "steps[0].exponent: got nan, expected a number from 0.6"),
    (step("power", exponent=1j), "steps[0].exponent: got 1j, expected a number"),
    (step("blend", source="test", weight=0.5), "steps[0].source: got test, expected one of raw"),
    (step("blend", source=[], weight=0.5), "steps[0].source: got [], expected one of raw"),
    (step("blend", source="saved", weight=0.5), "steps[0]: got a blend with what is saved"),
    (step("invert"), "steps[0]: got invert, expected a sqrt or log before it"),
    (step("normalise"), "pipeline: got a Poisson number of"),
    (step("shrink", strength=20.0), "nats, expected at most"),
  ],
)
def test_what_is_no_answer_is_refused_with_the_reason(artefact, reason: str):
  score = ENVIRONMENT.verify(artefact)
  assert not score.is_valid and reason in score.reason


@hypothesis.given(st.recursive(
  st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
  lambda inner: st.lists(inner, max_size=3)
  | st.dictionaries(st.sampled_from(["steps", "op", "rank"]), inner, max_size=3),
  max_leaves=8,
))  # fmt: skip
def test_nothing_makes_the_verifier_raise(artefact):
  assert not ENVIRONMENT.verify(artefact).is_valid
  assert not ENVIRONMENT.verify({"steps": [artefact]}).is_valid
