"""The next token of a row: a pure function of (logits, sampling parameters, seed, position).

  z     = (penalised logits + bias) / temperature, with entries outside grammar and filters dropped
  token = argmax(z + gumbel(key, seed, position))

The noise is counter-based, so it does not depend on the schedule; the argmax uses z itself, never
normalised probabilities, which would depend on one more sum. Ties go to the lowest id.

Sources: Gumbel-max: Maddison et al. 2014, https://arxiv.org/abs/1411.0030; top-p: Holtzman et al.
2019, https://arxiv.org/abs/1904.09751; min-p: Nguyen et al. 2024, https://arxiv.org/abs/2407.01082.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from seerjax import numerics as numerics_lib, parallel
from seerjax.array_typing import Array, Float, Int, PRNGKeyArray
from seerjax.ops import penalties
from seerjax.types import SamplingParams, SamplingRows

# Fixed, because the width of an array may affect how XLA lays out later sums.
MAX_LOGIT_BIAS = 16
# Represents minus infinity: finite, so that 0 * DROPPED is 0 in an entropy.
DROPPED = -1e30
# Above any id: the end of an unrestricted row's range.
NO_LIMIT = 2**31 - 1
# A mask word that allows all of its ids.
ALL_ALLOWED = 2**32 - 1


def sampling_rows(
  params: Sequence[SamplingParams], places: Sequence[int] | None = None
) -> SamplingRows:
  """Returns sampling parameters as arrays, one row each (numpy), without penalties.

  `penalties.with_penalties` adds those.

  Args:
    params: sampling parameters of each row.
    places: index of each row's token in its response, for `SamplingParams.allowed_token_ranges`;
      None applies no restriction.

  Raises:
    ValueError: if a request biases more than `MAX_LOGIT_BIAS` tokens.
  """
  count = len(params)
  bias_ids = np.full((count, MAX_LOGIT_BIAS), -1, np.int32)
  bias_values = np.zeros((count, MAX_LOGIT_BIAS), np.float32)
  for row, one in enumerate(params):
    if len(one.logit_bias) > MAX_LOGIT_BIAS:
      raise ValueError(
        f"SamplingParams.logit_bias: got {len(one.logit_bias)} entries, expected at most"
        f" {MAX_LOGIT_BIAS}; bias fewer tokens."
      )
    for column, (token, value) in enumerate(one.logit_bias):
      bias_ids[row, column], bias_values[row, column] = token, value
  low, high = np.zeros(count, np.int32), np.full(count, NO_LIMIT, np.int32)
  for row, place in enumerate(places or ()):
    if params[row].allowed_token_ranges:
      low[row], high[row] = params[row].allowed_token_ranges[place]
  # Any: the records are typed for device arrays, and this one is built on the host.
  fields: dict[str, Any] = dict(
    temperature=np.asarray([p.temperature for p in params], np.float32),
    top_k=np.asarray([p.top_k for p in params], np.int32),
    top_p=np.asarray([p.top_p for p in params], np.float32),
    min_p=np.asarray([p.min_p for p in params], np.float32),
    bias_ids=bias_ids,
    bias_values=bias_values,
    low=low,
    high=high,
  )
  return SamplingRows(**fields)


def padded(sampling: SamplingRows, count: int) -> SamplingRows:
  """Returns the rows padded to `count` rows, with every rare path off in the padding.

  Zeros would not do: a row with top_p 0 requires a sort of the vocabulary.
  """
  missing = count - sampling.temperature.shape[0]
  if not missing:
    return sampling
  off = dict(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, bias_ids=-1, bias_values=0.0, low=0,
    high=NO_LIMIT, mask=ALL_ALLOWED, penalty_ids=-1, penalty_values=0.0, repetition=1.0,
  )  # fmt: skip
  padded = {
    name: jnp.pad(
      leaf,
      ((0, missing), *((0, 0),) * (leaf.ndim - 1)),
      constant_values=np.asarray(off[name], leaf.dtype),
    )
    for name, leaf in sampling._asdict().items()
    if leaf is not None
  }
  return SamplingRows(**padded)


def is_filtered(sampling: SamplingRows) -> Array | np.ndarray:
  """Returns bool[n]: whether a row drops any entry; its scores then need whole rows of logits."""
  return (sampling.top_k > 0) | (sampling.top_p < 1.0) | (sampling.min_p > 0.0)


def is_restricted(sampling: SamplingRows) -> Array | np.ndarray:
  """Returns bool[n]: whether a grammar restricts a row's ids."""
  return sampling.high < NO_LIMIT


def is_special(sampling: SamplingRows) -> Array | np.ndarray:
  """Returns bool[n]: whether a row is filtered, restricted, biased or penalised."""
  is_special = is_filtered(sampling) | is_restricted(sampling)
  if sampling.penalty_ids is not None:
    is_special |= (sampling.penalty_ids >= 0).any(axis=-1)
  return is_special | (sampling.bias_ids >= 0).any(axis=-1)


def _allowed_rows(scaled: Array, sampling: SamplingRows, first: Array) -> Array:
  ids = first + jnp.arange(scaled.shape[1], dtype=jnp.int32)[None, :]
  is_allowed = (ids >= sampling.low[:, None]) & (ids < sampling.high[:, None])
  if sampling.mask is not None:
    words = jnp.take_along_axis(sampling.mask, ids >> 5, axis=1, mode="clip")
    is_allowed &= (words >> (ids & 31).astype(jnp.uint32)) & jnp.uint32(1) > 0
  return jnp.where(is_allowed, scaled, jnp.float32(DROPPED))


def _biased_rows(logits: Array, sampling: SamplingRows, first: Array) -> Array:
  rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
  ids = sampling.bias_ids - first
  # The index of an unused entry, or one of another slab, is past the end, where a scatter drops it.
  ids = jnp.where((sampling.bias_ids >= 0) & (ids >= 0), ids, logits.shape[1])
  return logits.at[rows, ids].add(sampling.bias_values, mode="drop")


def _kept_rows(scaled: Array, sampling: SamplingRows) -> Array:
  """Returns bool[n, v]: entries inside top-k, top-p and min-p; True for all of unfiltered rows."""
  vocabulary = scaled.shape[1]
  ordered = -jnp.sort(-scaled, axis=-1)
  k = jnp.where(sampling.top_k > 0, sampling.top_k, vocabulary)
  last = jnp.clip(k - 1, 0, vocabulary - 1)
  in_top_k = jnp.arange(vocabulary, dtype=jnp.int32)[None, :] <= last[:, None]
  lowest_k = jnp.take_along_axis(ordered, last[:, None], axis=1)
  weights = jnp.where(in_top_k, jnp.exp(ordered - ordered[:, :1]), jnp.float32(0))
  probabilities = weights / jnp.sum(weights, axis=-1, keepdims=True)
  before = jnp.cumsum(probabilities, axis=-1) - probabilities
  count = jnp.sum((before < sampling.top_p[:, None]) & in_top_k, axis=-1, dtype=jnp.int32)
  lowest_p = jnp.take_along_axis(ordered, jnp.maximum(count - 1, 0)[:, None], axis=1)
  lowest_min_p = ordered[:, :1] + jnp.log(sampling.min_p)[:, None]  # log 0 keeps all.
  lowest = jnp.maximum(jnp.maximum(lowest_k, lowest_p), lowest_min_p)
  return (scaled >= lowest) | ~is_filtered(sampling)[:, None]


def scaled_rows(
  logits: Float[Array, "n v"], sampling: SamplingRows, first: Array
) -> Float[Array, "n v"]:
  """Returns penalised, biased and tempered logits of whole rows, or of a slab that starts at id
  `first`; ids outside a row's grammar are `DROPPED`.

  Rows at temperature 0 use temperature 1 here: their token is the argmax, and their
  log-probability is that of the biased softmax.
  """
  if sampling.penalty_ids is not None:
    logits = lax.cond(
      jnp.any(sampling.penalty_ids >= 0),
      penalties.penalised_rows,
      lambda logits, *_: logits,
      logits, sampling, first,
    )  # fmt: skip
  biased = lax.cond(
    jnp.any(sampling.bias_ids >= 0),
    _biased_rows,
    lambda logits, *_: logits,
    logits, sampling, first,
  )  # fmt: skip
  temperature = jnp.where(sampling.temperature > 0, sampling.temperature, jnp.float32(1))
  return lax.cond(
    jnp.any(is_restricted(sampling)),
    _allowed_rows,
    lambda scaled, *_: scaled,
    _tempered(biased, temperature), sampling, first,
  )  # fmt: skip


@jax.custom_vjp
def _tempered(logits: Float[Array, "n v"], temperature: Float[Array, "n"]) -> Array:
  """Returns `logits / temperature`; temperatures have no gradient.

  In a gradient, XLA computes some quotients as products with a reciprocal, depending on the
  surrounding ops (seen on meshes with filtered rows): here it is that product everywhere.
  """
  return logits / temperature[:, None]


def _tempered_backward(temperature: Array, cotangent: Array) -> tuple[Array, Array]:
  reciprocal = jnp.float32(1) / temperature
  found = parallel.rounded(cotangent * reciprocal[:, None])
  return found, jnp.zeros_like(temperature)


_tempered.defvjp(
  lambda logits, temperature: (_tempered(logits, temperature), temperature), _tempered_backward
)


def processed_rows(logits: Float[Array, "n v"], sampling: SamplingRows) -> Float[Array, "n v"]:
  """Returns z: penalised, biased, tempered, `DROPPED` outside grammar and filters.

  Use it on the rows of one tile. The rare paths are behind `cond`s, so a row's common path is one
  program, independent of the other rows of its tile.
  """
  scaled = scaled_rows(logits, sampling, jnp.int32(0))
  kept = lax.cond(
    jnp.any(is_filtered(sampling)),
    _kept_rows,
    lambda scaled, _: jnp.ones(scaled.shape, bool),
    lax.stop_gradient(scaled),
    sampling,
  )
  return jnp.where(kept, scaled, jnp.float32(DROPPED))


def noise_rows(
  key: PRNGKeyArray, seeds: Array, positions: Int[Array, "n"], is_wanted: Array, vocabulary: int
) -> Float[Array, "n v"]:
  """Returns Gumbel noise f32[n, v] from `fold_in(fold_in(key, seed), position)`; 0 if unwanted.

  Args:
    key: the engine's key (`numerics.key`); not consumed, only folded.
    seeds: u32[n], request seed of each row.
    positions: i32[n], position of the token to be sampled, counted from the sequence's start.
    is_wanted: bool[n], whether a row needs noise.
    vocabulary: size of the vocabulary, v.
  """

  def draw(seed, position):
    folded = jax.random.fold_in(jax.random.fold_in(key, seed), position)
    with numerics_lib.pinned_randomness():
      return jax.random.gumbel(folded, (vocabulary,), jnp.float32)

  noise = lax.cond(
    jnp.any(is_wanted),
    lambda: jax.vmap(draw)(seeds, positions),
    lambda: jnp.zeros((seeds.shape[0], vocabulary), jnp.float32),
  )
  return jnp.where(is_wanted[:, None], noise, jnp.float32(0))


def choose_rows(processed: Float[Array, "n v"], noise: Float[Array, "n v"]) -> Int[Array, "n"]:
  """Returns i32[n], the argmax of `processed + noise`; ties go to the lowest id."""
  noisy = jnp.where(processed > DROPPED, processed + noise, jnp.float32(DROPPED))
  return jnp.argmax(noisy, axis=-1).astype(jnp.int32)


def sample_reference(
  logits: np.ndarray, params: SamplingParams, noise: np.ndarray, place: int = 0
) -> int:
  """Reference implementation for one row, in numpy float64: f[v] logits and noise to a token id.

  `place` is the index of the token in its response.
  """
  z = np.asarray(logits, np.float64).copy()
  for token, value in params.logit_bias:
    z[token] += value
  if params.allowed_token_ranges:
    low, high = params.allowed_token_ranges[place]
    z[:low] = z[high:] = -np.inf
  if params.temperature == 0:
    return int(np.argmax(z))
  z = z / params.temperature
  order = np.argsort(-z, kind="stable")
  kept = np.ones(z.shape, bool)
  if params.top_k:
    kept &= z >= z[order[min(params.top_k, len(z)) - 1]]
  if params.top_p < 1:
    ranked = order[: params.top_k or None]
    p = np.exp(z[ranked] - z.max())
    p /= p.sum()
    count = max(int(np.sum(np.cumsum(p) - p < params.top_p)), 1)
    kept &= z >= z[ranked[count - 1]]
  if params.min_p > 0:
    kept &= z >= z.max() + np.log(params.min_p)
  return int(np.argmax(np.where(kept, z + np.asarray(noise, np.float64), -np.inf)))
