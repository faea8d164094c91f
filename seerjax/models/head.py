"""The head: hidden rows become tokens and scores.

The engine lets it sample, the trainer hands it the tokens, and both run one tile program.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import token_logprobs
from seerjax import numerics as numerics_lib, parallel
from seerjax.array_typing import Array, Float, Int, PRNGKeyArray
from seerjax.models.config import TransformerConfig, numerics_for
from seerjax.models.parameters import Params
from seerjax.ops import linear, logprobs, norms, sampling, tiles
from seerjax.types import SamplingRows, TokenScores

# Rows whose logits a gradient holds at once where a filter has to see them whole.
FILTERED_ROWS = 16


def logits_rows(
  config: TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  axis: str | None,
  weights: Params,
  hidden: Array,
  one: Array,
) -> Float[Array, "n v"]:
  """Final norm and vocabulary product: f[n, d] -> f32[n, v]. For use on the rows of one tile."""
  normed = norms.rms_norm_rows(hidden, weights["final_norm"], config.norm_eps, numerics)
  slabs = weights["head"]  # f[r, v / r, d]
  slab = lambda x, rows: linear.dot_rows(x, rows, numerics)
  parts = tiles.map_slabs(slab, normed, slabs, one, axis, numerics)
  parts = parallel.gather_slabs(parts, axis)
  return jnp.swapaxes(parts, 0, 1).reshape(hidden.shape[0], -1)


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
  config: TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  axis: str | None = None,
) -> tuple[Int[Array, "n"], TokenScores]:
  """Samples the next token of each row, or takes the given one, and scores it.

  The engine and the trainer both call this, and both use all of what it returns: an output that
  XLA could remove would change the program around it, and with it the bits.

  Args:
    params: as for `forward`.
    hidden: f[n, d], rows of `forward`.
    forced: i32[n], the token to score; -1 samples one.
    sampling_rows: how each row is processed.
    seeds: u32[n], each row's request seed.
    positions: i32[n], absolute position of the token that is sampled or scored.
    num_rows: i32[], valid rows.
    key: the run's sampling key; folded, never consumed.
    config: shape of the model.
    numerics: what decides bits.
    axis: mesh axis of the slabs, None on one device.

  Returns:
    (tokens i32[n], their scores). A gradient is that of the scores of forced tokens.
  """
  numerics = numerics_for(config, numerics)
  table = params.get("head")
  if table is None:
    whole = params["embed"].reshape(numerics.reduction_shards, -1, config.hidden_size)
    table = parallel.local_part(whole, axis)
  weights = {"final_norm": params["final_norm"], "head": table, "key": jax.random.key_data(key)}
  count = forced.shape[0]
  whole = tiles.whole_rows(count, numerics)
  hidden, forced, seeds, positions = tiles.padded((hidden, forced, seeds, positions), whole)
  sampling_rows = sampling.padded(sampling_rows, whole)
  is_wanted = (forced < 0) & (sampling_rows.temperature > 0)
  rows = (hidden, forced, sampling_rows, seeds, positions, is_wanted)
  run = _kernel_head if numerics.uses_kernels else _tiled_head
  out = run(config, numerics, axis, weights, rows, num_rows)
  return jax.tree.map(lambda leaf: leaf[:count], out)


def _tiled_head(
  config: TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  axis: str | None,
  weights: Params,
  rows: Any,
  num_rows: Array,
) -> tuple[Int[Array, "n"], TokenScores]:
  """The head, tile by tile, each with its logits whole."""

  def tile(weights, rows, one):
    hidden, forced, sampling_rows, seeds, positions, is_wanted = rows
    logits = logits_rows(config, numerics, axis, weights, hidden, one)
    processed = sampling.processed_rows(logits, sampling_rows)
    key = numerics_lib.wrap_key(weights["key"])
    noise = sampling.noise_rows(key, seeds, positions, is_wanted, config.vocab_size)
    chosen = sampling.choose_rows(lax.stop_gradient(processed), noise)
    tokens = jnp.where(forced >= 0, forced, chosen)
    return tokens, logprobs.score_rows(logits, processed, tokens, one, numerics)

  def given(weights, rows, one):
    # What a gradient may reach: scores of given tokens. Drawing noise again would cost more than
    # the rest, at run time and at compile time.
    hidden, forced, sampling_rows, *_ = rows
    given_rows = (hidden, jnp.maximum(forced, 0), sampling_rows)
    return _given_scores(config, numerics, axis, weights, given_rows, one)

  return tiles.map_rows(tile, weights, rows, num_rows, numerics, gradient_of=given)


def _kernel_head(
  config: TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  axis: str | None,
  weights: Params,
  rows: Any,
  num_rows: Array,
) -> tuple[Int[Array, "n"], TokenScores]:
  """The head by one kernel, which holds no logits; a biased, filtered or restricted row is tiled.

  Which of the two a row takes follows its own parameters, never its neighbours'.
  """
  hidden, forced, parameters, seeds, positions, _ = rows
  key = numerics_lib.wrap_key(weights["key"])
  fold = lambda seed, position: jax.random.fold_in(jax.random.fold_in(key, seed), position)
  normed = norms.rms_norm_rows(hidden, weights["final_norm"], config.norm_eps, numerics)
  tokens, *scores = token_logprobs.token_logprobs(
    normed,
    # Every device of the axis scores whole rows: its slabs are the table's, its bits too.
    parallel.gather_slabs(weights["head"], axis),
    forced,
    parameters.temperature,
    jax.random.key_data(jax.vmap(fold)(seeds, positions)),
    config=token_logprobs.Config(shards=numerics.reduction_shards),
    interpret=numerics.is_interpreted,
  )
  is_special = sampling.is_filtered(parameters) | sampling.is_restricted(parameters)
  is_special |= jnp.any(parameters.bias_ids >= 0, axis=1)
  common = tokens, TokenScores(*scores)
  tiled = dataclasses.replace(numerics, implementation="tiled")
  special = lax.cond(
    jnp.any(is_special),
    lambda: _tiled_head(config, tiled, axis, weights, rows, num_rows),
    lambda: jax.tree.map(jnp.zeros_like, common),
  )
  return jax.tree.map(lambda a, b: jnp.where(is_special, a, b), special, common)


def _given_scores(
  config: TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  axis: str | None,
  weights: Params,
  rows: tuple[Array, Array, SamplingRows],
  one: Array,
) -> TokenScores:
  """Scores given tokens for a gradient: few logits are held at a time.

  Slab by slab of the vocabulary for many rows, or, where a filter has to see a row whole, few rows
  at a time.
  """

  def by_slab(rows):
    hidden, tokens, parameters = rows
    normed = norms.rms_norm_rows(hidden, weights["final_norm"], config.norm_eps, numerics)
    slabs = weights["head"]
    local, width, _ = slabs.shape
    start = 0 if axis is None else lax.axis_index(axis) * jnp.int32(local)

    def logits_of(slab, first):
      raw = linear.dot_rows(normed, slab, numerics)
      return raw, sampling.scaled_rows(raw, parameters, first)

    firsts = (start + jnp.arange(local, dtype=jnp.int32)) * jnp.int32(width)
    return logprobs.score_by_slab(logits_of, slabs, firsts, width, tokens, axis)

  def by_rows(rows):
    @jax.checkpoint
    def few(rows):
      hidden, tokens, parameters = rows
      logits = logits_rows(config, numerics, axis, weights, hidden, one)
      processed = sampling.processed_rows(logits, parameters)
      return logprobs.score_rows(logits, processed, tokens, one, numerics)

    return tiles.in_chunks(few, rows, FILTERED_ROWS)

  is_filtered = jnp.any(sampling.is_filtered(rows[2]))
  return lax.cond(is_filtered, by_rows, by_slab, rows)
