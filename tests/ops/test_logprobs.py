"""Scores of tokens: the definition, values by hand, and a row's bits from that row alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seerjax import numerics as numerics_lib
from seerjax.ops import logprobs, sampling, tiles

NUMERICS = numerics_lib.NumericsConfig(row_tile=4)


def arguments(count, vocabulary=37, seed=0):
  rng = np.random.default_rng(seed)
  logits = jnp.asarray(4 * rng.standard_normal((count, vocabulary)), jnp.float32)
  return logits, jnp.asarray(rng.integers(0, vocabulary, count), jnp.int32)


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


def test_scores_by_hand():
  logits = jnp.log(jnp.asarray([[1.0, 2.0, 5.0], [4.0, 4.0, 8.0]]))
  # The second row keeps its last two tokens, at probabilities 1/3 and 2/3.
  processed = logits.at[1, 0].set(sampling.DROPPED)
  scores = logprobs.score_rows(logits, processed, jnp.asarray([1, 2], jnp.int32))
  np.testing.assert_allclose(scores.logprob, np.log([2 / 8, 2 / 3]), rtol=1e-6)
  np.testing.assert_allclose(scores.raw_logprob, np.log([2 / 8, 8 / 16]), rtol=1e-6)
  first = -(1 / 8 * np.log(1 / 8) + 2 / 8 * np.log(2 / 8) + 5 / 8 * np.log(5 / 8))
  second = -(1 / 3 * np.log(1 / 3) + 2 / 3 * np.log(2 / 3))
  np.testing.assert_allclose(scores.entropy, [first, second], rtol=1e-6)


def test_a_single_token_left_is_certain():
  logits, _ = arguments(1)
  processed = jnp.full_like(logits, sampling.DROPPED).at[0, 5].set(logits[0, 5])
  scores = logprobs.score_rows(logits, processed, jnp.asarray([5], jnp.int32))
  assert float(scores.logprob[0]) == 0.0 and float(scores.entropy[0]) == 0.0


def test_large_logits_stay_finite():
  logits = jnp.asarray([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], jnp.float32)
  tokens = jnp.asarray([0, 2], jnp.int32)
  found = logprobs.token_logprobs(logits, tokens, numerics=NUMERICS)
  np.testing.assert_allclose(found, [0.0, -np.log(3)], rtol=1e-3, atol=1e-6)


def test_entropy_and_logprob_gradients_are_those_of_softmax():
  logits, tokens = arguments(6)

  def ours(logits):
    def rows(_, inputs, __):
      return logprobs.score_rows(inputs[0], inputs[0] / 0.7, inputs[1])

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
