"""The native head has the bits of its NumPy reference, and agrees with the tiled head."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import ml_dtypes
import native_head_reference as reference
import native_reference
import numpy as np
import pytest

from seerjax import numerics as numerics_lib, parallel
from seerjax.backends.native import head, head_backward, head_forward
from seerjax.backends.protocol import HeadStage
from seerjax.backends.tiled import Tiled
from seerjax.models import head as definition
from seerjax.ops import norms, sampling
from seerjax.types import SamplingParams, TokenScores

NUMPY = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
# (rows, d, slabs, ids of a slab): chunks with a rest, slabs of one chunk, more rows than are held
# together, ids and features that no vector or panel divides.
SHAPES = ((5, 33, 1, 1637), (7, 64, 8, 53), (70, 20, 2, 800))
# More ids than a gradient's cotangents are in memory of.
WIDE = (5, 6, 1, 3100)
KEY = numerics_lib.key(11)


class Shape(NamedTuple):
  """The model sizes that a head reads."""

  vocab_size: int
  norm_eps: float = 1e-6
  norm_weights: norms.Weights = "w"
  logit_soft_cap: float | None = None


def problem(shape, dtype):
  """Weights and rows: greedy, sampled at temperature 1 and at others, and given tokens."""
  n, d, slabs, width = shape
  generator = np.random.default_rng(n)
  draw = lambda *sizes: generator.standard_normal(sizes).astype(np.float32)
  weights = {
    "final_norm": (1 + 0.1 * draw(d)).astype(NUMPY[dtype]),
    "head": draw(slabs, width, d).astype(NUMPY[dtype]),
    "key": np.asarray(jax.random.key_data(KEY)),
  }
  kinds = [SamplingParams(temperature=t) for t in (1.0, 0.0, 0.7, 1.0, 1.6)]
  parameters = sampling.sampling_rows([kinds[row % 5] for row in range(n)])
  forced = np.where(np.arange(n) % 5 >= 3, generator.integers(0, slabs * width, n), -1)
  rows = (
    draw(n, d).astype(NUMPY[dtype]),
    forced.astype(np.int32),
    parameters,
    generator.integers(0, 2**32, n, np.uint32),
    generator.integers(0, 9999, n, np.int32),
    (forced < 0) & (parameters.temperature > 0),
  )
  return weights, rows


def stage_of(weights, axis=None):
  slabs, width, _ = weights["head"].shape
  return HeadStage(Shape(slabs * width), axis, definition.score_rows, definition.given_rows)


def tiled_of(weights, dtype="float32"):
  slabs = weights["head"].shape[0]
  return Tiled(numerics_lib.NumericsConfig(reduction_shards=slabs, compute_dtype=dtype))


@functools.partial(jax.jit, static_argnums=0)
def scored(stage, weights, rows, num_rows):
  return head_forward.scored_rows(stage, weights, rows, num_rows)


@functools.partial(jax.jit, static_argnums=(0, 1))
def native(tiled, stage, weights, rows, num_rows):
  return head.head(tiled, stage, weights, rows, num_rows)


def expected_of(weights, rows, dtype):
  hidden, forced, parameters, seeds, positions, _ = rows
  floats = lambda x: np.asarray(x).astype(np.float32)
  normed = reference.norm(floats(hidden), floats(weights["final_norm"]), 1e-6, dtype)
  table = floats(weights["head"])
  return reference.score(
    normed, table, parameters.temperature, forced, seeds, positions, weights["key"]
  )


def part(tree, low, high):
  return jax.tree.map(lambda leaf: leaf[low:high], tree)


def assert_equal(got, expected):
  for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    one, other = np.asarray(one), np.asarray(other)
    np.testing.assert_array_equal(one.view(np.int32), other.view(np.int32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_head_is_its_chains_in_numpy(shape, dtype):
  weights, rows = problem(shape, dtype)
  got = scored(stage_of(weights), weights, rows, jnp.int32(shape[0]))
  assert_equal(got, expected_of(weights, rows, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_knows_nothing_of_the_rows_around_it(dtype):
  weights, rows = problem((70, 32, 2, 100), dtype)
  whole = scored(stage_of(weights), weights, rows, jnp.int32(70))
  for count in (1, 3, 4, 7, 64):
    some = part(rows, 3, 3 + count)
    got = scored(stage_of(weights), weights, some, jnp.int32(count))
    assert_equal(got, part(whole, 3, 3 + count))


def test_rows_behind_the_valid_ones_are_zero_whatever_they_hold():
  weights, rows = problem((7, 16, 1, 40), "float32")
  hidden = np.where(np.arange(7)[:, None] < 5, rows[0], np.float32(np.nan))
  whole = scored(stage_of(weights), weights, rows, jnp.int32(7))
  got = scored(stage_of(weights), weights, (hidden, *rows[1:]), jnp.int32(5))
  assert_equal(part(got, 0, 5), part(whole, 0, 5))
  assert not any(np.any(leaf[5:]) for leaf in jax.tree.leaves(got))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.thorough)])
def test_the_head_says_what_the_tiled_one_says(dtype):
  weights, rows = problem((12, 64, 4, 57), dtype)
  # Cases that the tiled head computes: a bias, a filter and a grammar, greedy and sampled.
  special = [
    SamplingParams(temperature=1.0, logit_bias=((3, 2.0), (9, -1.0))),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=1.0, top_k=7),
    SamplingParams(temperature=0.0, logit_bias=((3, 20.0),)),
    SamplingParams(temperature=1.0, allowed_token_ranges=((5, 50),), max_tokens=1),
  ]
  mixed = sampling.sampling_rows([*special, *([SamplingParams(temperature=1.0)] * 7)], [0] * 12)
  stage, tiled = stage_of(weights), tiled_of(weights, dtype)
  expected = jax.jit(functools.partial(tiled.head, stage))
  for parameters in (rows[2], mixed):
    those = (*rows[:2], parameters, *rows[3:])
    tokens, scores = native(tiled, stage, weights, those, jnp.int32(12))
    other, wanted = expected(weights, those, jnp.int32(12))
    np.testing.assert_array_equal(tokens, other)
    for one, two in zip(scores, wanted, strict=True):
      np.testing.assert_allclose(one, two, atol=3e-5, rtol=1e-5)
  # A row's path depends on its own parameters only: the last rows are plain ones.
  alone = part(those, 5, 12)
  got = native(tiled, stage, weights, alone, jnp.int32(7))
  assert_equal(got, part((tokens, scores), 5, 12))


def test_the_noise_is_that_of_jax():
  for seed, position in ((0, 0), (2**32 - 1, 7), (123456789, 2**31 - 1)):
    folded = jax.random.fold_in(jax.random.fold_in(KEY, np.uint32(seed)), position)
    with numerics_lib.pinned_randomness():
      wanted = jax.random.gumbel(folded, (1000,), jnp.float32)
    got = reference.gumbel(np.asarray(jax.random.key_data(KEY)), seed, position, 1000)
    np.testing.assert_allclose(got, wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [2, 4])
def test_a_model_on_several_devices_has_equal_bits(devices):
  weights, rows = problem((7, 32, 4, 50), "float32")
  tiled = tiled_of(weights)
  expected = native(tiled, stage_of(weights), weights, rows, jnp.int32(7))
  mesh = parallel.make_mesh(tensor_parallel_size=devices)
  axis = parallel.MODEL_AXIS
  stage = stage_of(weights, axis)
  places = {"final_norm": P(), "head": P(axis), "key": P()}
  sharded = jax.jit(
    jax.shard_map(
      lambda weights, rows: head.head(tiled, stage, weights, rows, jnp.int32(7)),
      mesh=mesh, in_specs=(places, P()), out_specs=P(), check_vma=False,
    )
  )  # fmt: skip
  assert_equal(sharded(weights, rows), expected)


def test_noise_of_a_rows_place_in_the_batch_would_give_it_away():
  weights, rows = problem((6, 16, 1, 200), "float32")
  by_place = (*rows[:4], np.arange(6, dtype=np.int32), rows[5])
  moved = part(rows, 1, 6)
  moved_by_place = (*moved[:4], np.arange(5, dtype=np.int32), moved[5])
  run = lambda rows, n: np.asarray(scored(stage_of(weights), weights, rows, jnp.int32(n)).tokens)
  np.testing.assert_array_equal(run(rows, 6)[1:], run(moved, 5))
  assert np.any(run(by_place, 6)[1:] != run(moved_by_place, 5))


def test_a_chain_that_begins_at_a_slab_has_other_bits():
  weights, rows = problem((5, 33, 4, 57), "float32")
  got = scored(stage_of(weights), weights, rows, jnp.int32(5)).scores
  whole = {**weights, "head": weights["head"].reshape(1, -1, 33)}
  other = scored(stage_of(whole), whole, rows, jnp.int32(5)).scores
  got, other = np.stack(got), np.stack(other)
  np.testing.assert_allclose(got, other, rtol=1e-5)
  assert np.any(got != other)


@functools.partial(jax.jit, static_argnums=0)
def pulled(stage, weights, rows, num_rows, scored, cotangent):
  return head_backward.gradient(stage, weights, rows, num_rows, scored, cotangent)


def cotangent_of(rows):
  """f32[3, n], like a loss's: some rows (a prompt's too) have none, few have all three."""
  row = np.arange(rows[1].shape[0])
  found = np.random.default_rng(1).standard_normal((3, len(row))).astype(np.float32)
  found[1] *= row % 2 == 0
  return found * (row % 4 != 1) * ((row < 15) | (row >= 55))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [*SHAPES, WIDE], ids=str)
def test_the_gradient_is_its_chains_in_numpy(shape, dtype):
  weights, rows = problem(shape, dtype)
  stage, num_rows, cotangent = stage_of(weights), jnp.int32(shape[0]), cotangent_of(rows)
  found = scored(stage, weights, rows, num_rows)
  got = pulled(stage, weights, rows, num_rows, found, TokenScores(*cotangent))
  floats = lambda x: np.asarray(x).astype(np.float32)
  expected = reference.gradient(
    floats(rows[0]), floats(weights["final_norm"]), floats(weights["head"]), rows[2].temperature,
    expected_of(weights, rows, dtype), cotangent, 1e-6, dtype,
  )  # fmt: skip
  wanted = jax.tree.map(lambda x: native_reference.rounded(x, dtype), tuple(expected))
  assert_equal(jax.tree.map(floats, got), wanted)


def test_a_gradient_on_several_devices_has_equal_bits():
  weights, rows = problem((7, 32, 4, 50), "float32")
  cotangent = TokenScores(*cotangent_of(rows))
  stage, axis = stage_of(weights, parallel.MODEL_AXIS), parallel.MODEL_AXIS

  def run(stage, weights, rows):
    found = head_forward.scored_rows(stage, weights, rows, jnp.int32(7))
    return head_backward.gradient(stage, weights, rows, jnp.int32(7), found, cotangent)

  expected = jax.jit(functools.partial(run, stage_of(weights)))(weights, rows)
  sharded = jax.jit(
    jax.shard_map(
      functools.partial(run, stage), mesh=parallel.make_mesh(tensor_parallel_size=2),
      in_specs=({"final_norm": P(), "head": P(axis), "key": P()}, P()),
      out_specs=(P(), P(axis), P()), check_vma=False,
    )
  )  # fmt: skip
  assert_equal(sharded(weights, rows), expected)
  # A chain over the ids of all slabs would depend on the number of slabs.
  whole = {**weights, "head": weights["head"].reshape(1, -1, 32)}
  _, _, hidden = jax.jit(functools.partial(run, stage_of(whole)))(whole, rows)
  assert np.any(np.asarray(hidden) != np.asarray(expected[2]))


def test_a_gradient_knows_nothing_of_rows_behind_the_valid_ones():
  weights, rows = problem((70, 20, 2, 90), "float32")
  cotangent = TokenScores(*cotangent_of(rows))
  stage = stage_of(weights)
  run = lambda rows, count, cotangent: pulled(
    stage, weights, rows, count, scored(stage, weights, rows, count), cotangent
  )
  hidden = np.where(np.arange(70)[:, None] < 66, rows[0], np.float32(np.nan))
  norm, table, got = run((hidden, *rows[1:]), jnp.int32(66), cotangent)
  expected = run(part(rows, 0, 66), jnp.int32(66), part(cotangent, 0, 66))
  assert_equal((norm, table, got[:66]), expected)
  assert not np.any(got[66:])
  assert not any(np.any(leaf) for leaf in run(rows, jnp.int32(0), cotangent))


def gradient(run, stage, weights, rows):
  """Returns gradients of the first rows' weighted scores: (final_norm, table, hidden)."""
  count = rows[1].shape[0]
  factors = np.random.default_rng(1).standard_normal((3, count)).astype(np.float32)
  factors *= (rows[1] >= 0) & (np.arange(count) < count - 2)

  def loss(floats):
    norm, table, hidden = floats
    these = {**weights, "final_norm": norm, "head": table}
    scores = run(stage, these, (hidden, *rows[1:]), jnp.int32(count - 2))[1]
    return sum(jnp.sum(w * score) for w, score in zip(factors, scores, strict=True))

  weights, rows = jax.tree.map(jnp.asarray, (weights, rows))
  return jax.jit(jax.grad(loss))((weights["final_norm"], weights["head"], rows[0]))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.thorough)])
def test_the_gradient_is_the_tiled_ones(dtype):
  weights, rows = problem((20, 48, 2, 60), dtype)
  parameters = [SamplingParams(temperature=t) for t in (1.0, 0.0, 0.7, 1.0)] * 5
  filtered = [SamplingParams(temperature=0.9, top_k=9), SamplingParams(temperature=0.0)] * 10
  stage, tiled = stage_of(weights), tiled_of(weights, dtype)
  tolerance = 1e-4 if dtype == "float32" else 3e-2
  for these in (parameters, filtered):
    those = (*rows[:2], sampling.sampling_rows(these), *rows[3:])
    got = gradient(functools.partial(head.head, tiled), stage, weights, those)
    wanted = gradient(tiled.head, stage, weights, those)
    for one, other in zip(got, wanted, strict=True):
      assert one.dtype == other.dtype
      one, other = (np.asarray(x).astype(np.float32) for x in (one, other))
      np.testing.assert_allclose(one, other, atol=tolerance * np.abs(other).max(), rtol=tolerance)
