"""Log-probabilities of given tokens and the entropy of the distribution they came from.

  logprob = z[token] - logsumexp(z)        entropy = logsumexp(z) - sum(softmax(z) * z)

One row's sums run over the vocabulary in one fixed order. The engine and the trainer reach this
through the same tile program (`models.transformer.head`), so both see the same bits.
"""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp

from seerjax import numerics as numerics_lib
from seerjax.array_typing import Array, Float, Int
from seerjax.ops import tiles
from seerjax.types import TokenScores


def log_normaliser_rows(logits: Float[Array, "n v"]) -> tuple[Array, Array]:
  """Returns (logsumexp f32[n], softmax f32[n, v]) of each row."""
  maximum = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
  weights = jnp.exp(logits - maximum)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  return (jnp.log(total) + maximum)[:, 0], weights / total


def take_rows(logits: Float[Array, "n v"], tokens: Int[Array, "n"]) -> Float[Array, "n"]:
  """Returns each row's entry at its token."""
  picked = jnp.take_along_axis(logits, tokens[:, None], axis=1, mode="promise_in_bounds")
  return picked[:, 0]


def score_rows(
  logits: Float[Array, "n v"], processed: Float[Array, "n v"], tokens: Int[Array, "n"]
) -> TokenScores:
  """Scores tokens under both distributions. For use on the rows of one tile.

  Args:
    logits: f32[n, v], raw.
    processed: f32[n, v], after bias, temperature and filters; dropped entries are far below.
    tokens: i32[n].
  """
  raw_normaliser, _ = log_normaliser_rows(logits)
  normaliser, probabilities = log_normaliser_rows(processed)
  return TokenScores(
    logprob=take_rows(processed, tokens) - normaliser,
    raw_logprob=take_rows(logits, tokens) - raw_normaliser,
    entropy=normaliser - jnp.sum(probabilities * processed, axis=-1),
  )


def token_logprobs(
  logits: Float[Array, "n v"],
  tokens: Int[Array, "n"],
  *,
  numerics: numerics_lib.NumericsConfig,
) -> Float[Array, "n"]:
  """Returns f32[n], log softmax(logits)[token]; a row's bits depend on that row alone."""

  def rows(_, inputs, __):
    logits, tokens = inputs
    return take_rows(logits, tokens) - log_normaliser_rows(logits)[0]

  return tiles.map_rows(rows, (), (logits, tokens), jnp.int32(tokens.shape[0]), numerics)


def token_logprobs_reference(
  logits: Float[Array, "n v"], tokens: Int[Array, "n"]
) -> Float[Array, "n"]:
  """The definition, in float32."""
  logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
  return jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]
