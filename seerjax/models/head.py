"""The head: hidden rows become tokens and scores.

The engine samples with it, and the trainer passes the tokens; both run the same tile program.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from seerjax import numerics as numerics_lib, parallel
from seerjax.array_typing import Array, Float, Int, PRNGKeyArray
from seerjax.backends.protocol import HeadStage, Operations, Shape
from seerjax.backends.tiled import Tiled
from seerjax.models.decoder import Decoder
from seerjax.models.parameters import Params
from seerjax.ops import logprobs, sampling, tiles
from seerjax.types import SamplingRows, TokenScores

# Rows of logits that a gradient holds at once if a filter needs whole rows.
FILTERED_ROWS = 16


def logits_rows(
  operations: Operations,
  shape: Shape,
  axis: str | None,
  weights: Params,
  hidden: Array,
  one: Array,
) -> Float[Array, "n v"]:
  """Final norm and vocabulary product: f[n, d] -> f32[n, v]. Use it on the rows of one tile."""
  normed = _normed(operations, shape, weights, hidden)
  slabs = weights["head"]  # f[r, v / r, d]
  slab = lambda x, rows: _capped(shape, operations.dot_rows(x, rows))
  parts = operations.map_slabs(slab, normed, slabs, one, axis)
  parts = parallel.gather_slabs(parts, axis)
  return jnp.swapaxes(parts, 0, 1).reshape(hidden.shape[0], -1)


def _normed(operations: Operations, shape: Shape, weights: Params, hidden: Array) -> Array:
  scale = weights["final_norm"]
  return operations.rms_norm_rows(hidden, scale, shape.norm_eps, shape.norm_weights)


def _capped(shape: Shape, logits: Float[Array, "n v"]) -> Float[Array, "n v"]:
  """Returns f32 logits under the model's soft cap; everything after the head sees these."""
  if shape.logit_soft_cap is None:
    return logits
  cap = jnp.float32(shape.logit_soft_cap)
  return cap * jnp.tanh(logits / cap)


def sample_and_score(
  params: Params,
  hidden: Float[Array, "n d"],
  forced: Int[Array, "n"],
  sampling_rows: SamplingRows,
  seeds: Array,
  positions: Int[Array, "n"],
  num_rows: Array,
  key: PRNGKeyArray,
  *,
  decoder: Decoder,
) -> tuple[Int[Array, "n"], TokenScores]:
  """Samples the next token of each row, or takes the given one, and scores it.

  The engine and the trainer both call this, and both use all of its outputs: an output that XLA
  could remove would change the program around it, and with it the bits.

  Args:
    params: as for `forward`.
    hidden: f[n, d], rows of `forward`.
    forced: i32[n], the token to score; -1 samples one.
    sampling_rows: sampling parameters of each row.
    seeds: u32[n], each row's request seed.
    positions: i32[n], absolute position of the token that is sampled or scored.
    num_rows: i32[], valid rows.
    key: the run's sampling key; folded, never consumed.
    decoder: the model as it was decided; with `is_plain` none of the first `num_rows` rows is
      biased, filtered or restricted.

  Returns:
    (tokens i32[n], their scores). The gradient is that of the scores of forced tokens.
  """
  table = table_of(params, decoder)
  if "head" not in params:
    hidden = parallel.held(hidden)
  weights = {"final_norm": params["final_norm"], "head": table, "key": jax.random.key_data(key)}
  count = forced.shape[0]
  backend = decoder.backend
  whole = backend.whole_rows(count)
  hidden, forced, seeds, positions = tiles.padded((hidden, forced, seeds, positions), whole)
  sampling_rows = sampling.padded(sampling_rows, whole)
  is_wanted = (forced < 0) & (sampling_rows.temperature > 0)
  rows = (hidden, forced, sampling_rows, seeds, positions, is_wanted)
  stage = HeadStage(decoder.shape, decoder.axis, score_rows, given_rows, decoder.is_plain)
  out = backend.head(stage, weights, rows, num_rows)
  return jax.tree.map(lambda leaf: leaf[:count], out)


def table_of(params: Params, decoder: Decoder) -> Array:
  """Returns the slabs of the vocabulary table, f[r, v / r, d]; the embedding if it is tied.

  Under `shard_map` they are the slabs of this device, like the weights.
  """
  table = params.get("head")
  if table is not None:
    return table
  rows = decoder.shape.vocab_size // decoder.numerics.reduction_shards
  return params["embed"].reshape(-1, rows, decoder.shape.hidden_size)


def top_logprobs(
  params: Params,
  hidden: Float[Array, "n d"],
  sampling_rows: SamplingRows,
  num_rows: Array,
  count: int,
  *,
  decoder: Decoder,
) -> Int[Array, "n k"]:
  """Returns the ids of each row's top tokens under the processed distribution, k = `count`.

  On every backend they are computed by the portable tiled program. Their scores come from
  `sample_and_score` on rows that are forced to them, so requesting top tokens changes no program
  that samples.
  """
  tiled = Tiled(dataclasses.replace(decoder.numerics, backend="tiled"))
  weights = {"final_norm": params["final_norm"], "head": table_of(params, decoder)}
  size = hidden.shape[0]
  whole = tiled.whole_rows(size)

  def of_rows(weights: Params, rows: Any, one: Array) -> Array:
    hidden, parameters = rows
    logits = logits_rows(tiled, decoder.shape, decoder.axis, weights, hidden, one)
    return lax.top_k(sampling.processed_rows(logits, parameters), count)[1].astype(jnp.int32)

  rows = (tiles.padded(hidden, whole), sampling.padded(sampling_rows, whole))
  return tiled.map_rows(of_rows, weights, rows, num_rows)[:size]


def likeliest_scores(
  params: Params,
  hidden: Float[Array, "n d"],
  sampling_rows: SamplingRows,
  num_rows: Array,
  count: int,
  num_top: Array,
  *,
  decoder: Decoder,
) -> tuple[Int[Array, "n k"], TokenScores]:
  """Returns `top_logprobs` ids and scores f32[n, k], from rows that are forced to these ids.

  Only the scores of each row's first `num_top` ids, i32[], are computed; the others are undefined.
  """
  size = hidden.shape[0]
  ids = top_logprobs(params, hidden, sampling_rows, num_rows, count, decoder=decoder)
  # Forced row `place` is the id number place // num_rows of row place % num_rows, so that those
  # which are computed come first.
  per_id = jnp.maximum(num_rows, 1)
  places = jnp.arange(size * count, dtype=jnp.int32)
  rows = places % per_id
  forced = ids[rows, jnp.minimum(places // per_id, count - 1)]
  hidden, sampling_rows = jax.tree.map(lambda leaf: leaf[rows], (hidden, sampling_rows))
  nothing = jnp.zeros(size * count, jnp.int32)
  _, scores = sample_and_score(
    params,
    hidden,
    forced,
    sampling_rows,
    nothing.astype(jnp.uint32),
    nothing,
    num_rows * num_top,
    numerics_lib.key(0),  # Nothing is sampled here.
    decoder=decoder,
  )
  place_of = jnp.arange(count, dtype=jnp.int32)[None] * per_id
  place_of = jnp.minimum(place_of + jnp.arange(size, dtype=jnp.int32)[:, None], size * count - 1)
  return ids, jax.tree.map(lambda leaf: leaf[place_of], scores)


def score_rows(
  operations: Operations,
  shape: Shape,
  axis: str | None,
  weights: Params,
  rows: Any,
  one: Array,
) -> tuple[Int[Array, "n"], TokenScores]:
  """Runs the head on the rows of one tile, with whole rows of logits."""
  hidden, forced, sampling_rows, seeds, positions, is_wanted = rows
  logits = logits_rows(operations, shape, axis, weights, hidden, one)
  processed = sampling.processed_rows(logits, sampling_rows)
  key = numerics_lib.wrap_key(weights["key"])
  noise = sampling.noise_rows(key, seeds, positions, is_wanted, shape.vocab_size)
  chosen = sampling.choose_rows(lax.stop_gradient(processed), noise)
  tokens = jnp.where(forced >= 0, forced, chosen)
  return tokens, logprobs.score_rows(logits, processed, tokens, one, operations.numerics)


def given_rows(
  operations: Operations,
  shape: Shape,
  axis: str | None,
  weights: Params,
  rows: Any,
  one: Array,
) -> TokenScores:
  """Returns scores of given tokens: the differentiable part of `score_rows`.

  Drawing the noise again would cost more than the rest, at run time and at compile time.
  """
  hidden, forced, sampling_rows, *_ = rows
  given = (hidden, jnp.maximum(forced, 0), sampling_rows)
  return _given_scores(operations, shape, axis, weights, given, one)


def _given_scores(
  operations: Operations,
  shape: Shape,
  axis: str | None,
  weights: Params,
  rows: tuple[Array, Array, SamplingRows],
  one: Array,
) -> TokenScores:
  """Scores given tokens for a gradient while holding few logits at a time.

  Many rows are processed slab by slab of the vocabulary; if a filter needs whole rows, a few rows
  are processed at a time.
  """

  def by_slab(rows):
    hidden, tokens, parameters = rows
    normed = _normed(operations, shape, weights, hidden)
    slabs = weights["head"]
    local, width, _ = slabs.shape
    start = 0 if axis is None else lax.axis_index(axis) * jnp.int32(local)
    # As integers, the sampling parameters have no gradient that a mesh would gather.
    words = jax.tree.map(lambda leaf: lax.bitcast_convert_type(leaf, jnp.int32), parameters)

    def logits_of(shared, slab, first):
      normed, words = shared
      restored = lambda word, leaf: lax.bitcast_convert_type(word, leaf.dtype)
      raw = _capped(shape, operations.dot_rows(normed, slab))
      return raw, sampling.scaled_rows(raw, jax.tree.map(restored, words, parameters), first)

    firsts = (start + jnp.arange(local, dtype=jnp.int32)) * jnp.int32(width)
    shared = (normed, words)
    return logprobs.score_by_slab(logits_of, shared, slabs, firsts, width, tokens, one, axis)

  def by_rows(rows):
    @jax.checkpoint
    def few(rows):
      hidden, tokens, parameters = rows
      # The barrier keeps XLA from fusing the gathering of logits with the ops that read them.
      logits = lax.optimization_barrier(logits_rows(operations, shape, axis, weights, hidden, one))
      processed = sampling.processed_rows(logits, parameters)
      return logprobs.score_rows(logits, processed, tokens, one, operations.numerics)

    return tiles.in_chunks(few, rows, FILTERED_ROWS)

  is_filtered = jnp.any(sampling.is_filtered(rows[2]))
  return lax.cond(is_filtered, by_rows, by_slab, rows)
