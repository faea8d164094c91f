"""Log-probabilities of given tokens, and the entropy of their distribution.

  logprob = z[token] - logsumexp(z)        entropy = logsumexp(z) - sum(softmax(z) * z)

The vocabulary is summed in slabs, like every dimension that a mesh may shard. A slab's partial is
(m, l, s), relative to the slab's own maximum; partials are merged in the fixed tree:

  m = max(z)   l = sum(exp(z - m))   s = sum(exp(z - m) * (z - m))
  M = max(m)   L = sum(exp(m - M) * l)   S = sum(exp(m - M) * (s + (m - M) * l))
  logsumexp = M + log(L)   entropy = log(L) - S / L

The engine and the trainer call this in the same tile program (`models.head`), so both get the same
bits. A gradient uses `score_by_slab`, which holds one slab of logits at a time.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from seerjax import numerics as numerics_lib, parallel
from seerjax.array_typing import Array, Float, Int
from seerjax.ops import tiles
from seerjax.types import TokenScores


class Partial(NamedTuple):
  """Partial sums of a row's softmax over one slab of the vocabulary.

  Attributes:
    maximum: m, f32[n].
    total: l, f32[n].
    weighted: s, f32[n].
  """

  maximum: Array
  total: Array
  weighted: Array


def partial_rows(logits: Float[Array, "n v"]) -> Partial:
  """Returns the partial of one slab's logits f32[n, v / r]."""
  maximum = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
  below = logits - maximum
  weights = jnp.exp(below)
  return Partial(maximum[:, 0], jnp.sum(weights, axis=-1), jnp.sum(weights * below, axis=-1))


def merge(partials: Partial) -> tuple[Float[Array, "n"], Float[Array, "n"]]:
  """Merges the partials of all slabs, f32[r, n] each: (logsumexp f32[n], entropy f32[n])."""
  maximum = jnp.max(partials.maximum, axis=0)
  # A slab with all entries dropped is so far below the maximum that it has weight zero.
  below = partials.maximum - maximum[None]
  factors = jnp.exp(below)
  total = parallel.tree_sum(factors * partials.total)
  weighted = parallel.tree_sum(factors * (partials.weighted + below * partials.total))
  return jnp.log(total) + maximum, jnp.log(total) - weighted / total


def take_rows(logits: Float[Array, "n v"], tokens: Int[Array, "n"]) -> Float[Array, "n"]:
  """Returns each row's entry at its token."""
  picked = jnp.take_along_axis(logits, tokens[:, None], axis=1, mode="promise_in_bounds")
  return picked[:, 0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _partials_of(num_slabs: int, logits: Any, one: Array) -> Any:
  """Maps `partial_rows` over slabs of whole rows: f32[n, v] leaves to partials f32[r, n]."""
  width = jax.tree.leaves(logits)[0].shape[1] // num_slabs

  def slab(logits: Any, index: Array) -> Any:
    cut = lambda z: lax.dynamic_slice_in_dim(z, index * width, width, 1)
    return jax.tree.map(lambda z: partial_rows(cut(z)), logits)

  indices = jnp.arange(num_slabs, dtype=jnp.int32)
  return tiles.map_slabs(slab, logits, indices, one, None)


def _partials_forward(num_slabs: int, logits: Any, one: Array) -> Any:
  return _partials_of(num_slabs, logits, one), (logits, one)


def _partials_backward(num_slabs: int, residuals: Any, cotangent: Any) -> tuple[Any, None]:
  """Computes the gradient slab by slab; each has its own columns, so nothing is added up."""
  logits, one = residuals
  # All sizes are explicit, since with zero rows a size cannot be inferred from the others.
  split = lambda z: z.reshape(z.shape[0], num_slabs, z.shape[1] // num_slabs)
  by_slab = lambda z: jnp.swapaxes(split(z), 0, 1)
  joined = lambda z: jnp.swapaxes(z, 0, 1).reshape(z.shape[1], z.shape[0] * z.shape[2])

  def slab(_, given: Any) -> Any:
    logits, wanted = given
    of_leaves = lambda logits: jax.tree.map(partial_rows, logits)
    return jax.vjp(of_leaves, logits)[1](wanted)[0]

  slabs = jax.tree.map(by_slab, logits), cotangent
  found = tiles.looped_slabs(slab, (), slabs, one, jax.tree.leaves(cotangent)[0])
  return jax.tree.map(joined, found), None


_partials_of.defvjp(_partials_forward, _partials_backward)


def score_rows(
  logits: Float[Array, "n v"],
  processed: Float[Array, "n v"],
  tokens: Int[Array, "n"],
  one: Array,
  numerics: numerics_lib.NumericsConfig,
) -> TokenScores:
  """Scores tokens under both distributions. Use it on the rows of one tile.

  Args:
    logits: f32[n, v], raw.
    processed: f32[n, v], after bias, temperature and filters; dropped entries are far below.
    tokens: i32[n].
    one: `tiles.traced_one`.
    numerics: its `reduction_shards` divides v.
  """
  raw_partials, partials = _partials_of(numerics.reduction_shards, (logits, processed), one)
  normaliser, entropy = merge(partials)
  return TokenScores(
    logprob=take_rows(processed, tokens) - normaliser,
    raw_logprob=take_rows(logits, tokens) - merge(raw_partials)[0],
    entropy=entropy,
  )


def score_by_slab(
  logits_of: Callable[[Any, Any, Array], tuple[Array, Array]],
  shared: Any,
  slabs: Any,
  firsts: Int[Array, "r"],
  width: int,
  tokens: Int[Array, "n"],
  one: Array,
  axis: str | None,
) -> TokenScores:
  """Scores tokens without ever holding a whole row of logits, neither forward nor backward.

  Its values equal those of `score_rows` up to rounding. It is used for gradients, which recompute
  one slab's logits at a time.

  Args:
    logits_of: `(shared, slab, first) -> (raw, processed)`, f32[n, v / r] each, differentiable.
    shared: pytree that is passed whole for every slab.
    slabs: pytree of `[r, ...]`, the local slabs.
    firsts: i32[r], first token id of each slab.
    width: v / r.
    tokens: i32[n].
    one: `tiles.traced_one`.
    axis: mesh axis of the slabs, None on one device.
  """

  def slab(shared, inputs):
    (shared, tokens), (_, first) = shared, inputs
    raw, processed = logits_of(shared, *inputs)
    column = tokens - first
    is_here = (column >= 0) & (column < width)
    column = jnp.clip(column, 0, width - 1)
    picked = [jnp.where(is_here, take_rows(z, column), jnp.float32(0)) for z in (raw, processed)]
    return partial_rows(raw), partial_rows(processed), *picked

  found = tiles.map_slabs(slab, (shared, tokens), (slabs, firsts), one, axis)
  raw, processed, raw_picked, picked = parallel.gather_slabs(found, axis)
  normaliser, entropy = merge(processed)
  return TokenScores(
    logprob=parallel.tree_sum(picked) - normaliser,
    raw_logprob=parallel.tree_sum(raw_picked) - merge(raw)[0],
    entropy=entropy,
  )


def token_logprobs(
  logits: Float[Array, "n v"],
  tokens: Int[Array, "n"],
  *,
  numerics: numerics_lib.NumericsConfig,
) -> Float[Array, "n"]:
  """Returns f32[n], log softmax(logits)[token]; a row's bits depend on that row alone.

  If `numerics.reduction_shards` is 0, the vocabulary decides.

  Raises:
    ValueError: if `numerics.reduction_shards` does not divide the vocabulary.
  """
  num_slabs = numerics.reduction_shards or numerics_lib.largest_shards([logits.shape[1]])
  if logits.shape[1] % num_slabs:
    raise ValueError(
      f"token_logprobs: got a vocabulary of {logits.shape[1]}, expected a multiple of"
      f" NumericsConfig.reduction_shards={num_slabs}; pad the logits with -1e30 or lower it."
    )

  def rows(_, inputs, one):
    logits, tokens = inputs
    return take_rows(logits, tokens) - merge(_partials_of(num_slabs, logits, one))[0]

  return tiles.map_rows(rows, (), (logits, tokens), jnp.int32(tokens.shape[0]), numerics)


def token_logprobs_reference(
  logits: Float[Array, "n v"], tokens: Int[Array, "n"]
) -> Float[Array, "n"]:
  """Reference implementation in float32."""
  logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
  return jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]
