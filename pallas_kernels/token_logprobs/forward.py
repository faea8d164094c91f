"""Scores of tokens: the partial results of a tile of logits, and their kernel."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels import gpu, rounding
from pallas_kernels.token_logprobs.config import ROWS, Config, plan
from pallas_kernels.token_logprobs.noise import gumbel, random_bits
from pallas_kernels.token_logprobs.tiles import along_columns, ids_of, inverse_of, over_tiles
from pallas_kernels.token_partials import (
  MERGED_ROWS,
  NUM_STATISTICS,
  Partial,
  fold_tiles,
  higher,
  merge_slabs,
)

# Ids with terms added at a time; noise takes many registers per id.
PIECE = 32
# Ids are stored as f32.
MAX_VOCABULARY = 1 << 24
# Replaces minus infinity: finite, so that 0 * ABSENT is 0.
ABSENT = -1e30
# Replace a target: take the argmax, without or with noise.
GREEDY = -1
SAMPLED = -2
# The target is an id of another slab.
ELSEWHERE = -3


class TokenLogprobs(NamedTuple):
  """Each row's token and scores.

  Attributes:
    tokens: i32[n], the target or the sampled token.
    logprob: f32[n], log-probability under the tempered distribution.
    raw_logprob: f32[n], log-probability at temperature 1.
    entropy: f32[n], entropy of the tempered distribution.
  """

  tokens: jax.Array
  logprob: jax.Array
  raw_logprob: jax.Array
  entropy: jax.Array


# Jitted with static arguments, so that calls of one shape share one program.
@functools.partial(jax.jit, static_argnums=(5, 6))
def scores_of(
  hidden: jax.Array,
  table: jax.Array,
  targets: jax.Array,
  temperature: jax.Array,
  keys: jax.Array,
  config: Config,
  interpret: bool,
) -> tuple[TokenLogprobs, tuple[jax.Array, jax.Array]]:
  """Returns the scores, and the logsumexp of t and of z."""
  num_rows = hidden.shape[0]
  if num_rows == 0:
    none = jnp.zeros((0,), jnp.float32)
    return TokenLogprobs(targets, none, none, none), (none, none)
  shards, table = config.shards, table.reshape(-1, table.shape[-1])
  padded = -(-num_rows // MERGED_ROWS) * MERGED_ROWS
  is_sampled = (targets < 0) & (temperature > 0)
  targets = jnp.where(targets < 0, jnp.where(is_sampled, SAMPLED, GREEDY), targets)
  targets = jnp.pad(targets, (0, padded - num_rows))
  inverse = inverse_of(temperature, padded)
  keys = jnp.pad(keys, ((0, padded - num_rows), (0, 0)))
  has_noise = jnp.any((targets == SAMPLED).reshape(-1, ROWS), axis=1).astype(jnp.int32)
  width = table.shape[0] // shards
  num_tiles = -(-width // config.vocabulary_tile)
  tiles = plan(config, num_rows)
  product = functools.partial(rounding.product, layout=rounding.TILE, interpret=interpret)
  product_of_rows = functools.partial(rounding.product, layout=rounding.ROWS, interpret=interpret)

  def write_partial(logits, place, refs, _):
    has_noise_ref, target_ref, inverse_ref, *key_refs, partials_ref = refs
    rows = pl.ds(place.row, ROWS)
    of_rows = lambda ref: gpu.load(ref.at[rows], rounding.ROWS)
    target, inverse = of_rows(target_ref), of_rows(inverse_ref)
    is_noisy = has_noise_ref[lax.div(place.row, ROWS)] > 0
    wide = lambda values: along_columns(values, PIECE)
    pieces = [
      jnp.where(ids_of(place.first + i, PIECE) < place.past, logits[:, i : i + PIECE], ABSENT)
      for i in range(0, config.vocabulary_tile, PIECE)
    ]
    raw_maximum = jnp.max(functools.reduce(jnp.maximum, pieces), axis=1)
    # A positive factor keeps the order, so this needs neither a pass over t nor registers for it.
    maximum = product_of_rows(raw_maximum, inverse)
    # An id that is absent from this slab may be another slab's target.
    target = jnp.where(target < place.past, target, ELSEWHERE)

    # A loop keeps one step's registers at a time besides the logits; unrolled, they would spill.
    def add_piece(i, sums):
      raw_total, total, weighted, *best = sums
      z = lax.switch(i, [lambda z=z: z for z in pieces])
      ids = ids_of(place.first + i * PIECE, PIECE)
      raw_total = raw_total + jnp.sum(jnp.exp(z - wide(raw_maximum)), axis=1)
      t = jnp.maximum(product(z, wide(inverse)), ABSENT)
      below = t - wide(maximum)
      weights = jnp.exp(below)
      total = total + jnp.sum(weights, axis=1)
      weighted = weighted + jnp.sum(product(weights, below), axis=1)

      def with_noise(t):
        # Keys are read where they are used; keeping them would take registers from the sums.
        key_0, key_1 = (wide(of_rows(ref)) for ref in key_refs)
        noise = gumbel(random_bits(key_0, key_1, ids.astype(jnp.uint32)))
        return jnp.where(wide(target) == SAMPLED, t + noise, t)

      # Whether a neighbouring row samples only affects the noise.
      scores = lax.cond(is_noisy, with_noise, lambda t: t, t)
      is_target = jnp.where(ids == wide(target), -ABSENT, ABSENT)
      scores = jnp.where((wide(target) == SAMPLED) | (wide(target) == GREEDY), scores, is_target)
      score = jnp.max(scores, axis=1)
      token = jnp.min(jnp.where(scores == wide(score), ids, MAX_VOCABULARY), axis=1)
      logit = jnp.sum(jnp.where(ids == wide(token), z, 0.0), axis=1)
      return raw_total, total, weighted, *higher(best, (score, token, logit))

    zero = jnp.zeros((ROWS,), jnp.float32)
    nothing = (zero + 2 * ABSENT, jnp.zeros((ROWS,), jnp.int32), zero)
    raw_total, total, weighted, score, token, logit = lax.fori_loop(
      0, len(pieces), add_piece, (zero, zero, zero, *nothing)
    )
    partial = Partial(
      raw_maximum, raw_total, maximum, total, weighted, score, token.astype(jnp.float32), logit
    )
    for i, value in enumerate(partial):
      partials_ref[place.index, i, rows] = value

  partials = over_tiles(
    write_partial,
    name="token_logprobs",
    tiles=tiles,
    config=config,
    hidden=hidden,
    table=table,
    inputs=(has_noise, targets, inverse, keys[:, 0], keys[:, 1]),
    out_type=jax.ShapeDtypeStruct((shards * num_tiles, NUM_STATISTICS, padded), jnp.float32),
    start=jnp.int32(0),
    slabs=shards,
    width=width,
    interpret=interpret,
  )
  merged = merge_slabs(fold_tiles(partials, shards, interpret), inverse, interpret)
  token, logprob, raw_logprob, entropy, normaliser, raw_normaliser = merged[:, :num_rows]
  scores = TokenLogprobs(token.astype(jnp.int32), logprob, raw_logprob, entropy)
  return scores, (normaliser, raw_normaliser)
