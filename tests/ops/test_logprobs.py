"""Token scores: the definition, values by hand; a row's bits depend on that row only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seerjax import numerics as numerics_lib
from seerjax.ops import logprobs, sampling, tiles

NUMERICS = numerics_lib.NumericsConfig(row_tile=4, reduction_shards=4, backend="tiled")
ONE = jnp.int32(1)


def slabs(count):
  return numerics_lib.NumericsConfig(reduction_shards=count, backend="tiled")


def arguments(count, vocabulary=44, seed=0):
  rng = np.random.default_rng(seed)
  logits = jnp.asarray(4 * rng.standard_normal((count, vocabulary)), jnp.float32)
  return logits, jnp.asarray(rng.integers(0, vocabulary, count), jnp.int32)


@pytest.mark.few(2)
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 11])
def test_logprobs_and_gradients_are_the_definitions(count):
  logits, tokens = arguments(count)
  weights = jnp.arange(count, dtype=jnp.float32)

  def loss(logits, function):
    found = function(logits)
    return jnp.sum(found * weights), found

  gradient = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
  (_, found), slope = gradient(
    logits, lambda x: logprobs.token_logprobs(x, tokens, numerics=NUMERICS)
  )
  (_, expected), expected_slope = gradient(
    logits, lambda x: logprobs.token_logprobs_reference(x, tokens)
  )
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(slope, expected_slope, rtol=1e-5, atol=1e-5)
  # Alone and without a gradient: the same bits.
  whole = jax.jit(lambda x, t: logprobs.token_logprobs(x, t, numerics=NUMERICS))
  np.testing.assert_array_equal(whole(logits, tokens), found)
  for row in range(min(count, 3)):
    np.testing.assert_array_equal(whole(logits[row : row + 1], tokens[row : row + 1]), found[row])


@pytest.mark.parametrize(("vocabulary", "slabs_of_it"), [(44, 4), (64, 8), (7, 1), (6, 2)])
def test_slabs_that_are_left_open_are_the_vocabularys(vocabulary, slabs_of_it):
  given = arguments(3, vocabulary)
  found, wanted = (logprobs.token_logprobs(*given, numerics=slabs(n)) for n in (0, slabs_of_it))
  np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("num_slabs", [1, 2, 4])
def test_scores_by_hand(num_slabs):
  logits = jnp.log(jnp.asarray([[1.0, 2.0, 4.0, 1.0], [4.0, 4.0, 7.0, 1.0]]))
  # The second row keeps its second half, at probabilities 7/8 and 1/8: a slab is dropped whole.
  processed = logits.at[1, :2].set(sampling.DROPPED)
  tokens = jnp.asarray([1, 2], jnp.int32)
  scores = logprobs.score_rows(logits, processed, tokens, ONE, slabs(num_slabs))
  np.testing.assert_allclose(scores.logprob, np.log([2 / 8, 7 / 8]), rtol=1e-6)
  np.testing.assert_allclose(scores.raw_logprob, np.log([2 / 8, 7 / 16]), rtol=1e-6)
  first = -(2 / 8 * np.log(1 / 8) + 2 / 8 * np.log(2 / 8) + 4 / 8 * np.log(4 / 8))
  second = -(7 / 8 * np.log(7 / 8) + 1 / 8 * np.log(1 / 8))
  np.testing.assert_allclose(scores.entropy, [first, second], rtol=1e-6)


def test_a_partial_is_relative_to_its_own_slab():
  logits = jnp.log(jnp.asarray([[1.0, 2.0, 4.0, 1.0]]))
  left, right = logprobs.partial_rows(logits[:, :2]), logprobs.partial_rows(logits[:, 2:])
  np.testing.assert_allclose(left, np.array([[np.log(2)], [1.5], [-np.log(2) / 2]]), rtol=1e-6)
  np.testing.assert_allclose(right, np.array([[np.log(4)], [1.25], [-np.log(4) / 4]]), rtol=1e-6)


@pytest.mark.parametrize("num_slabs", [1, 4])
def test_a_single_token_left_is_certain(num_slabs):
  logits, _ = arguments(1)
  processed = jnp.full_like(logits, sampling.DROPPED).at[0, 5].set(logits[0, 5])
  tokens = jnp.asarray([5], jnp.int32)
  scores = logprobs.score_rows(logits, processed, tokens, ONE, slabs(num_slabs))
  assert float(scores.logprob[0]) == 0.0 and float(scores.entropy[0]) == 0.0


@pytest.mark.thorough
@pytest.mark.few(1)
@pytest.mark.parametrize("num_slabs", [1, 4])
def test_scores_by_slab_are_the_scores_and_so_are_their_gradients(num_slabs):
  rng = np.random.default_rng(2)
  hidden = jnp.asarray(rng.standard_normal((7, 6)), jnp.float32)
  table = jnp.asarray(rng.standard_normal((num_slabs, 44 // num_slabs, 6)), jnp.float32)
  tokens = jnp.asarray(rng.integers(0, 44, 7), jnp.int32)

  def by_slab(hidden, table):
    def logits_of(hidden, slab, first):
      del first
      raw = hidden @ slab.T
      return raw, raw / 0.7

    width = 44 // num_slabs
    firsts = jnp.arange(num_slabs, dtype=jnp.int32) * width
    return logprobs.score_by_slab(logits_of, hidden, table, firsts, width, tokens, ONE, None)

  def by_rows(hidden, table):
    logits = hidden @ table.reshape(44, 6).T
    return logprobs.score_rows(logits, logits / 0.7, tokens, ONE, slabs(num_slabs))

  def total(hidden, table, function):
    scores = function(hidden, table)
    return jnp.sum(scores.logprob + 2 * scores.raw_logprob + 3 * scores.entropy)

  for found, expected in zip(by_slab(hidden, table), by_rows(hidden, table), strict=True):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
  found, expected = (
    jax.grad(total, argnums=(0, 1))(hidden, table, function) for function in (by_slab, by_rows)
  )
  for one, other in zip(found, expected, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_no_gradient_holds_a_row_of_logits():
  """Bytes that a compiled gradient works in: less than one array of rows by vocabulary."""
  count, vocabulary, width = 64, 8192, 1024
  hidden, table = jnp.zeros((count, 8)), jnp.zeros((vocabulary // width, width, 8))
  tokens = jnp.zeros(count, jnp.int32)

  def loss(hidden, table):
    def logits_of(hidden, slab, first):
      del first
      raw = hidden @ slab.T
      return raw, raw / 0.7

    firsts = jnp.arange(vocabulary // width, dtype=jnp.int32) * width
    scores = logprobs.score_by_slab(logits_of, hidden, table, firsts, width, tokens, ONE, None)
    return jnp.sum(scores.logprob + scores.entropy)

  compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, table).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < count * vocabulary * 4


def test_large_logits_stay_finite():
  logits = jnp.asarray([[1e4, -1e4, 0.0, -1e9], [-1e4, -1e4, -1e4, -1e9]], jnp.float32)
  tokens = jnp.asarray([0, 2], jnp.int32)
  found = logprobs.token_logprobs(logits, tokens, numerics=NUMERICS)
  np.testing.assert_allclose(found, [0.0, -np.log(3)], rtol=1e-3, atol=1e-6)


@pytest.mark.thorough
def test_entropy_and_logprob_gradients_are_those_of_softmax():
  logits, tokens = arguments(6)

  def ours(logits):
    def rows(_, inputs, one):
      return logprobs.score_rows(inputs[0], inputs[0] / 0.7, inputs[1], one, NUMERICS)

    scores = tiles.map_rows(rows, (), (logits, tokens), jnp.int32(6), NUMERICS)
    return jnp.sum(scores.entropy) + 2 * jnp.sum(scores.logprob) + 3 * jnp.sum(scores.raw_logprob)

  def reference(logits):
    logp = jax.nn.log_softmax(logits / 0.7)
    raw = jax.nn.log_softmax(logits)
    picked = jnp.arange(6), tokens
    return -jnp.sum(jnp.exp(logp) * logp) + 2 * jnp.sum(logp[picked]) + 3 * jnp.sum(raw[picked])

  np.testing.assert_allclose(ours(logits), reference(logits), rtol=1e-5)
  np.testing.assert_allclose(
    jax.grad(ours)(logits), jax.grad(reference)(logits), rtol=1e-4, atol=1e-5
  )


def test_a_vocabulary_that_slabs_do_not_divide_is_refused():
  logits, tokens = arguments(3, vocabulary=43)
  with pytest.raises(ValueError, match="got a vocabulary of 43, expected a multiple of .*=4; pad"):
    logprobs.token_logprobs(logits, tokens, numerics=NUMERICS)
