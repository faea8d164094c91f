"""Token scores: the definition, its gradient, JAX's noise, bits of a row from that row alone."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from kernel_arrays import as_float64, long, needs_interpreter
import numpy as np
import pytest
import refusals

from pallas_kernels import gpu, matmul, token_logprobs

# Slabs of one tile and a half; two multiprocessors walk over them.
CONFIG = token_logprobs.Config(
  shards=2,
  vocabulary_tile=64,
  gradient_columns=128,
  gradient=matmul.Config(block_m=64, block_n=128, max_stages=2),
  max_stages=2,
  snake_width=2,
)
FEATURES, VOCABULARY = 128, 192
# (d, v) of Qwen3-8B, Qwen3-30B-A3B and gpt-oss-120b.
BENCHMARK = ((4096, 151936), (2048, 151936), (2880, 201088))


def inputs(num_rows: int, seed: int = 0, vocabulary: int = VOCABULARY) -> tuple[jax.Array, ...]:
  """Returns hidden, table, targets, temperature, keys: rows given, greedy and sampled, mixed."""
  rng = np.random.default_rng(seed)
  hidden = rng.standard_normal((num_rows, FEATURES))
  table = rng.standard_normal((vocabulary, FEATURES)) * 0.2
  targets = np.where(rng.random(num_rows) < 0.3, rng.integers(0, vocabulary, num_rows), -1)
  temperature = np.where(rng.random(num_rows) < 0.3, 0, rng.uniform(0.3, 2, num_rows))
  keys = rng.integers(0, 2**32, (num_rows, 2), dtype=np.uint32)
  return (
    jnp.asarray(hidden, jnp.bfloat16),
    jnp.asarray(table, jnp.bfloat16),
    jnp.asarray(targets, jnp.int32),
    jnp.asarray(temperature, jnp.float32),
    jnp.asarray(keys),
  )


def structs(num_rows: int, features: int, vocabulary: int) -> tuple[jax.ShapeDtypeStruct, ...]:
  return (
    jax.ShapeDtypeStruct((num_rows, features), jnp.bfloat16),
    jax.ShapeDtypeStruct((vocabulary, features), jnp.bfloat16),
    jax.ShapeDtypeStruct((num_rows,), jnp.int32),
    jax.ShapeDtypeStruct((num_rows,), jnp.float32),
    jax.ShapeDtypeStruct((num_rows, 2), jnp.uint32),
  )


def with_gradient(score, hidden, table, targets, temperature, keys, cotangents):
  """Returns (scores, dhidden, dtable)."""

  def floats(hidden, table):
    scores = score(hidden, table, targets, temperature, keys)
    return scores[1:], scores

  _, pull, scores = jax.vjp(floats, hidden, table, has_aux=True)
  return scores, *pull(cotangents)


def interpreted(*arguments, config=CONFIG):
  return token_logprobs.token_logprobs(*arguments, config=config, interpret=True)


@pytest.mark.thorough
@pytest.mark.few(2)
# The interpreter's outputs start as NaN, so that a row that is never written is detected.
@needs_interpreter
@pytest.mark.parametrize("num_rows", [0, 1, long(63), 64, 65, long(131)])
def test_values_are_the_definitions(num_rows):
  hidden, table, *rows = inputs(num_rows)
  expected = token_logprobs.reference(hidden, table, *rows)
  if num_rows % 2:  # The memory is the same with and without slabs.
    table = table.reshape(CONFIG.shards, -1, FEATURES)
  found = interpreted(hidden, table, *rows)
  assert found.tokens.dtype == jnp.int32
  # Sampled ones too: the argmax of logits / temperature + jax.random.gumbel.
  np.testing.assert_array_equal(found.tokens, expected.tokens)
  for got, want in zip(found[1:], expected[1:]):
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_inputs_mix_given_greedy_and_sampled_rows():
  _, _, targets, temperature, _ = inputs(131)
  kinds = np.where(targets >= 0, 0, np.where(temperature == 0, 1, 2))
  assert (np.bincount(kinds) > 10).all()


@pytest.mark.thorough
@pytest.mark.few(1)
# (shards, tile, ids): many tiles of one slab, the tree of eight slabs, two warpgroups' odd tiles.
@needs_interpreter
@pytest.mark.parametrize(
  "shards, tile, vocabulary", [(1, 64, 704), (8, 64, 512), long(2, 128, 640)]
)
def test_every_cut_of_the_vocabulary_is_the_definition(shards, tile, vocabulary):
  config = dataclasses.replace(CONFIG, shards=shards, vocabulary_tile=tile)
  arguments = inputs(9, vocabulary=vocabulary)
  found = interpreted(*arguments, config=config)
  expected = token_logprobs.reference(*arguments)
  np.testing.assert_array_equal(found.tokens, expected.tokens)
  for got, want in zip(found[1:], expected[1:]):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
@needs_interpreter
def test_the_lowest_id_wins_a_tie():
  # Equal logits stand in two pieces of a tile, two tiles of a slab, and two slabs.
  hidden, table, targets, temperature, keys = inputs(4)
  best = jnp.ones((FEATURES,), jnp.bfloat16)
  hidden = jnp.broadcast_to(best, hidden.shape)
  table = jnp.concatenate([table[:5] * 0, jnp.stack([best] * 150), table[155:] * 0])
  apart = jnp.arange(VOCABULARY) % 33 == 5
  table = jnp.where(apart[:, None], table, table * jnp.bfloat16(0.5))
  found = interpreted(hidden, table, targets * 0 - 1, temperature * 0, keys)
  np.testing.assert_array_equal(found.tokens, np.full(4, 5))


@pytest.mark.parametrize("vocabulary", [1, 192, 201_088])
def test_noise_is_jaxs(vocabulary, seed):
  assert jax.config.jax_threefry_partitionable
  key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 7), 1 << 30)
  ids = jnp.arange(vocabulary, dtype=jnp.uint32)
  words = (jnp.full_like(ids, word) for word in jax.random.key_data(key))
  bits = token_logprobs.random_bits(*words, ids)
  np.testing.assert_array_equal(bits, jax.random.bits(key, (vocabulary,), jnp.uint32))
  noise = jax.random.gumbel(key, (vocabulary,), jnp.float32)
  np.testing.assert_array_max_ulp(
    np.asarray(token_logprobs.gumbel(bits)), np.asarray(noise), maxulp=2
  )


def test_noise_is_finite_at_both_ends():
  noise = token_logprobs.gumbel(jnp.asarray([0, 511, 2**32 - 1], jnp.uint32))
  tiny, below_one = np.finfo(np.float32).tiny, np.float32(1 - 2**-23)
  expected = [-np.log(-np.log(np.float64(u))) for u in (tiny, tiny, below_one)]
  np.testing.assert_allclose(noise, expected, rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.few(1)
@needs_interpreter
@pytest.mark.parametrize("num_rows, tile", [(0, 64), long(5, 64), (65, 128)])
def test_gradients_are_the_definitions(num_rows, tile):
  # With 128 ids at a time: one whole chunk and half of another.
  config = dataclasses.replace(CONFIG, vocabulary_tile=tile)
  hidden, table, targets, temperature, keys = inputs(num_rows)
  weights = np.random.default_rng(1).standard_normal((3, num_rows)) * 0.5
  cotangents = tuple(jnp.asarray(weights, jnp.float32))
  score = functools.partial(interpreted, config=config)
  run = jax.jit(functools.partial(with_gradient, score))
  scores, *found = run(hidden, table, targets, temperature, keys, cotangents)
  # The token is a constant.
  hidden, table = hidden.astype(jnp.float32), table.astype(jnp.float32)
  _, *expected = with_gradient(
    token_logprobs.reference, hidden, table, scores.tokens, temperature, keys, cotangents
  )
  for got, want in zip(found, expected):
    assert got.dtype == jnp.bfloat16
    scale = max(np.abs(want).max(initial=0), 1)
    np.testing.assert_allclose(as_float64(got), want, rtol=2**-6, atol=2**-8 * scale)


@pytest.mark.thorough
@needs_interpreter
@pytest.mark.parametrize("sizes", [(1,), long((1, 70, 1, 33, 64, 65, 33))])
def test_a_rows_bits_depend_on_that_row_alone(sizes, seed):
  rng = np.random.default_rng(seed)
  hidden, table, *rows = inputs(70, seed)
  cotangents = jnp.asarray(rng.standard_normal((70, 3)), jnp.float32)
  config = dataclasses.replace(CONFIG, gradient_columns=VOCABULARY)
  score = functools.partial(interpreted, config=config)

  @jax.jit
  def both(hidden, rows, cotangents):
    columns = tuple(cotangents[:, i] for i in range(3))
    scores, dhidden, _ = with_gradient(score, hidden, table, *rows, columns)
    return *scores, dhidden

  whole = both(hidden, rows, cotangents)
  for part, all_rows in zip(interpreted(hidden, table, *rows), whole):
    np.testing.assert_array_equal(part, all_rows)
  for size in sizes:  # Both plans, and in another order.
    chosen = rng.permutation(70)[:size]
    parts = both(hidden[chosen], [array[chosen] for array in rows], cotangents[chosen])
    for part, all_rows in zip(parts, whole):
      np.testing.assert_array_equal(as_float64(part), as_float64(all_rows[chosen]))


@needs_interpreter
def test_a_neighbour_that_samples_changes_nothing():
  hidden, table, targets, temperature, keys = inputs(3)
  run = jax.jit(interpreted)
  quiet = run(hidden, table, targets.at[:].set(7), temperature, keys)
  noisy = run(hidden, table, targets.at[:].set(7).at[1].set(-1), jnp.ones(3), keys)
  same_temperature = run(hidden, table, targets.at[:].set(7), jnp.ones(3), keys)
  assert (np.asarray(quiet.raw_logprob) == np.asarray(same_temperature.raw_logprob)).all()
  for got, want in zip(noisy, same_temperature):
    np.testing.assert_array_equal(got[jnp.asarray([0, 2])], want[jnp.asarray([0, 2])])


@needs_interpreter
@pytest.mark.parametrize("num_rows", [3, long(70)])
def test_sampled_neighbours_leave_given_and_greedy_rows_their_bits(num_rows):
  # With noise drawn for the 64 surrounding rows, and without.
  hidden, table, targets, temperature, keys = inputs(num_rows)
  targets = jnp.where(jnp.arange(num_rows) % 2 == 0, 7, -1).astype(jnp.int32)
  run = jax.jit(interpreted)
  quiet = run(hidden, table, targets, temperature * 0, keys)
  noisy = run(hidden, table, targets.at[1].set(-1), (temperature * 0).at[1].set(1.5), keys)
  others = np.arange(num_rows) != 1
  for got, want in zip(noisy, quiet):
    np.testing.assert_array_equal(got[others], want[others])
  # The twin: the row that samples has other scores.
  assert noisy.logprob[1] != quiet.logprob[1]


def test_ptx_rounds_the_products_of_every_sum():
  module = gpu.lower_for_cuda(token_logprobs.token_logprobs, *structs(64, 128, 512))
  assert "mul.rn.f32" in module


def test_the_sums_ignore_the_number_of_rows():
  config = token_logprobs.Config()
  for backward in (False, True):
    plans = [token_logprobs.plan(config, n, backward=backward) for n in (1, 64, 65, 4096)]
    assert {(plan.vocabulary_tile, plan.block_k) for plan in plans} == {(256, 64)}
    assert [(plan.row_groups, plan.column_groups) for plan in plans] == [(1, 2)] * 2 + [(2, 1)] * 2


@pytest.mark.thorough
@pytest.mark.few(2)
@pytest.mark.parametrize("features, vocabulary", BENCHMARK)
@pytest.mark.parametrize("num_rows", [1, long(64), 4096])
def test_benchmark_shapes_lower_for_a_gpu(num_rows, features, vocabulary):
  column = jax.ShapeDtypeStruct((num_rows,), jnp.float32)
  module = gpu.lower_for_cuda(
    functools.partial(with_gradient, token_logprobs.token_logprobs),
    *structs(num_rows, features, vocabulary),
    (column,) * 3,
  )
  # Forward, fold, merge; dz and its two products, of whole chunks and of the rest.
  assert module.count("custom_call @mosaic_gpu") == 9
  # Neither logits nor noise: no array of rows x vocabulary is in the module.
  assert f"tensor<{num_rows}x{vocabulary}x" not in module


@pytest.mark.parametrize("num_rows", [1, 64, 4096])
@pytest.mark.parametrize("backward", [False, True])
def test_the_ring_is_as_deep_as_shared_memory_allows(num_rows, backward):
  config = token_logprobs.Config(max_stages=32)
  tiles = token_logprobs.plan(config, num_rows, backward=backward)
  taken = gpu.shared_memory_bytes(tiles.scratch(tiles.stages))
  assert taken <= config.shared_memory_bytes(num_rows) <= gpu.SHARED_MEMORY_LIMIT_BYTES
  deeper = gpu.shared_memory_bytes(tiles.scratch(tiles.stages + 1))
  assert deeper > gpu.SHARED_MEMORY_LIMIT_BYTES


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(hidden=(jnp.bfloat16, 3, 64)),
     "token_logprobs: got hidden[3, 64] and table[192, 128], expected hidden[n, d] and"
     " table[v, d] or [r, v / r, d]."),
    (dict(hidden=(jnp.float32, 3, 128)), "got hidden of float32, expected bfloat16; cast it"),
    (dict(table=(jnp.float32, 192, 128)), "got table of float32, expected bfloat16; cast it"),
    (dict(targets=(jnp.int32, 2)), "got targets int32[2], expected int32[3]"),
    (dict(temperature=(jnp.bfloat16, 3)), "got temperature bfloat16[3], expected float32[3]"),
    (dict(keys=(jnp.int32, 3, 2)), "got keys int32[3, 2], expected uint32[3, 2]"),
    (dict(hidden=(jnp.bfloat16, 3, 72), table=(jnp.bfloat16, 192, 72)),
     "got d=72, expected a positive multiple of 64: pad hidden and table"),
    (dict(table=(jnp.bfloat16, 2, 96, 128)), "got a table of 2 slabs, expected Config.shards=8"),
    (dict(table=(jnp.bfloat16, 100, 128)),
     "got a vocabulary of 100, expected a positive multiple of 64 below 16777216; pad the table"
     " to 128 rows whose logits are below all others"),
    (dict(table=(jnp.bfloat16, 0, 128)), "got a vocabulary of 0, expected a positive multiple"),
  ],
)  # fmt: skip
def test_what_cannot_run_is_refused(changes, message):
  names = ("hidden", "table", "targets", "temperature", "keys")
  other = {name: jnp.zeros(shape, dtype) for name, (dtype, *shape) in changes.items()}
  arguments = [other.get(name, array) for name, array in zip(names, inputs(3))]
  with gpu.h200():
    call = lambda: token_logprobs.token_logprobs(*arguments)
    refusals.check((NotImplementedError, call, message))


def test_shared_memory_and_platform_are_refused():
  call = functools.partial(token_logprobs.token_logprobs, *inputs(3))
  with gpu.h200():
    message = "bytes of shared memory, expected at most 232448; make vocabulary_tile or block_k"
    config = token_logprobs.Config(block_k=128)
    refusals.check((NotImplementedError, lambda: call(config=config), message, " smaller"))
  message = "token_logprobs: got the platform 'cpu', expected"
  refusals.check((NotImplementedError, call, message))


def test_a_vocabulary_whose_ids_f32_cannot_tell_apart_is_refused():
  arguments = structs(3, 64, 1 << 24)
  with gpu.h200():
    reason = token_logprobs.is_supported(*arguments)
  assert reason is not None and "expected a positive multiple of 64 below 16777216" in reason
