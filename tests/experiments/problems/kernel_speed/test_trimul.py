"""Every schedule computes the same function."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from schedule_cases import DIM, FEATURES, PLAIN, SIZE, drawn

from experiments.problems.kernel_speed import rules, schedules, trimul


def by_definition(inputs: trimul.Inputs) -> np.ndarray:
  """The formula in float64 numpy, entry by entry where that is simplest."""
  x, mask, scale, bias, w, scale2, bias2, last = (np.asarray(v, np.float64) for v in inputs)

  def norm(v: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    deviation = np.sqrt(v.var(axis=-1, keepdims=True) + trimul.NORM_EPSILON)
    return (v - v.mean(axis=-1, keepdims=True)) / deviation * scale + bias

  def sigmoid(v: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-v))

  y = norm(x, scale, bias)
  a = mask[:, :, None] * (y @ w[0]) * sigmoid(y @ w[2])
  b = mask[:, :, None] * (y @ w[1]) * sigmoid(y @ w[3])
  summed = np.zeros(a.shape)
  for i in range(len(x)):
    for j in range(len(x)):
      summed[i, j] = (a[i] * b[j]).sum(axis=0)
  return (norm(summed, scale2, bias2) * sigmoid(y @ w[4])) @ last


@pytest.mark.parametrize("kind", rules.KINDS)
def test_the_reference_is_the_definition(kind: str):
  inputs = drawn(1, kind)
  np.testing.assert_allclose(trimul.reference(inputs), by_definition(inputs), atol=2e-5, rtol=2e-5)


def test_inputs_are_what_they_are_said_to_be():
  normal, masked, cauchy = (drawn(2, kind) for kind in rules.KINDS)
  assert np.asarray(normal.mask).all()
  assert 0 < np.asarray(masked.mask).mean() < 1
  assert np.abs(np.asarray(cauchy.x)).max() > 50 > np.abs(np.asarray(normal.x)).max()
  assert (np.asarray(drawn(3).x) != np.asarray(masked.x)).any()
  assert (np.asarray(drawn(3).projections) != np.asarray(masked.projections)).any()


@functools.cache
def expected(kind: str) -> np.ndarray:
  return np.asarray(trimul.reference(drawn(5, kind)))


def check(schedule: schedules.Schedule) -> None:
  tolerance = rules.FLOAT32_TOLERANCE if schedule.is_float32 else 2 * rules.TOLERANCE
  program = jax.jit(functools.partial(trimul.trimul, schedule))
  for kind in rules.KINDS:
    got = program(drawn(5, kind))
    assert got.shape == (SIZE, SIZE, DIM) and got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected(kind), atol=tolerance, rtol=tolerance)


@pytest.mark.few(1)
@pytest.mark.parametrize("place", range(5))
def test_every_choice_gives_the_references_result(place: int):
  # Five schedules, among which every choice of every field is found.
  chosen = {f.name: f.choices[place % len(f.choices)] for f in schedules.FIELDS}
  check(schedules.Schedule(**{**chosen, "projection_dtype": "float32"}))


@pytest.mark.long
@pytest.mark.parametrize("start", [PLAIN, FEATURES], ids=["rows", "features"])
@pytest.mark.parametrize(
  ("name", "choice"),
  [(field.name, choice) for field in schedules.FIELDS for choice in field.choices],
)
def test_every_single_choice_gives_the_references_result(start, name: str, choice):
  check(schedules.Schedule(**{**start, name: choice}))


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", ["rows", "features"])
@pytest.mark.parametrize("projections", schedules.FIELDS[0].choices)
def test_folded_norms_agree_with_all_groups(projections: str, layout: str):
  check(schedules.Schedule(projections=projections, layout=layout, input_norm="folded"))


def to_ten_bits(x: jax.Array) -> jax.Array:
  """Returns float32 with as many bits as TF32 has."""
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  return jax.lax.bitcast_convert_type((bits + 0x1000) & ~0x1FFF, jnp.float32)


def test_two_programs_of_rounded_operands_are_further_apart_than_that():
  x, scale, w = np.random.default_rng(0).normal(size=(3, 64, 64)).astype(np.float32)
  # A norm's scale on one side of the matmul or the other, as with input_norm="folded".
  one = to_ten_bits(x * scale[0]) @ to_ten_bits(w)
  two = to_ten_bits(x) @ to_ten_bits(scale[0][:, None] * w)
  assert rules.differs(one, two, rules.FLOAT32_TOLERANCE)[0]
  assert not rules.differs(one, two, rules.TOLERANCE)[0]
