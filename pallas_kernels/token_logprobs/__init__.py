"""Scores given or sampled next tokens from hidden states, without logits in memory.

  z = hidden @ table^T        t = z * (1 / temperature)  (temperature 0: 1, and no noise)
  token = target, or argmax(t + gumbel(key)) where target is -1; ties go to the lowest id
  logprob = t[token] - logsumexp(t)                 raw_logprob = z[token] - logsumexp(z)
  entropy = logsumexp(t) - sum(softmax(t) * t)

One warpgroup processes 64 rows and `vocabulary_tile` ids: it multiplies in the tensor core (bf16
products, f32 sums, blocks of `block_k` in ascending order from zero) and writes eight numbers per
row, relative to the tile's own maximum. Sums are taken 32 ids at a time in ascending order, one
loop step each, so that few values are alive besides the logits:

  m = max(z)   l = sum(exp(z - m))   of t too, and s = sum(exp(t - m) * (t - m))
  the highest t + gumbel (or the target), its id, its z

The vocabulary is divided into `shards` slabs of equal length, as on a mesh, and a slab into tiles;
the last tile may be shorter. A second kernel folds the tiles of a slab from left to right, a third
merges slabs as one balanced binary tree, both with

  M = max(m)   L = sum(exp(m - M) * l)   S = sum(exp(m - M) * (s + (m - M) * l))

Products are rounded before they are added (`rounding.product`), because few and many rows use
different programs and neither may fuse what the other does not.

None of this depends on the number of rows: a row's bits depend only on that row. With up to 64
rows, a block's two warpgroups process two tiles of the vocabulary; with more, 64 rows each.

Noise is counter-based: the bits of id i are Threefry-2x32 of (row's key, i), as drawn by
`jax.random.gumbel` under `jax_threefry_partitionable`; the noise is equal up to the rounding of a
logarithm. If none of 64 rows samples, no noise is drawn. Rows with a target and greedy rows never
add noise, and their sums are computed by the same code in both cases.

Backward: logits are recomputed, `gradient_columns` ids at a time, and become

  dz = [id is token] * (dlogprob * inverse + draw_logprob) - softmax(z) * draw_logprob
       - softmax(t) * (dlogprob + dentropy * (t - logsumexp(t) + entropy)) * inverse

with inverse = 1 / temperature, rounded to bf16. Then dhidden = dz @ table, added chunk by chunk in
ascending order in f32, and dtable = dz^T @ hidden, over rows in ascending order, with `matmul`'s
kernels. A row of dhidden depends only on that row. The token is a constant.

Rows with filters (top-k, top-p, min-p) or biases are not supported, because a filter needs the
whole row; the caller uses another path for them.

Shared memory: stages of (64 or 128 rows + 1 or 2 tiles of ids) x block_k; backward, 64 x 32 of dz,
two per warpgroup.

`config` has the order of sums and the tiles, `noise` JAX's random numbers, `tiles` the product,
`forward` and `backward` the processing of its tiles; `token_partials` merges.

Sources: Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867; Maddison et al. 2014,
https://arxiv.org/abs/1411.0030; Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405.
"""

from __future__ import annotations

import functools
from typing import TypeAlias

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import gpu
from pallas_kernels.token_logprobs import backward, forward
from pallas_kernels.token_logprobs.config import MULTIPLE, ROW_MULTIPLE, Config, Plan, plan
from pallas_kernels.token_logprobs.forward import MAX_VOCABULARY, TokenLogprobs
from pallas_kernels.token_logprobs.noise import gumbel, random_bits, threefry_2x32

__all__ = [
  "Config",
  "Plan",
  "TokenLogprobs",
  "gumbel",
  "is_supported",
  "plan",
  "random_bits",
  "reference",
  "threefry_2x32",
  "token_logprobs",
]

Shaped: TypeAlias = jax.Array | jax.ShapeDtypeStruct


def is_supported(
  hidden: Shaped,
  table: Shaped,
  targets: Shaped,
  temperature: Shaped,
  keys: Shaped,
  *,
  config: Config = Config(),
  interpret: bool = False,
) -> str | None:
  """Returns None if the kernel can run on these arguments here, else the reason.

  It cannot detect filtered or biased rows; the caller has to exclude them.
  """
  if hidden.ndim != 2 or table.ndim not in (2, 3) or table.shape[-1] != hidden.shape[1]:
    return (
      f"got hidden{list(hidden.shape)} and table{list(table.shape)}, expected hidden[n, d] and"
      " table[v, d] or [r, v / r, d]"
    )
  for name, array in (("hidden", hidden), ("table", table)):
    if array.dtype != jnp.bfloat16:
      return f"got {name} of {array.dtype}, expected bfloat16; cast it"
  num_rows, features = hidden.shape
  expected = {
    "targets": (targets, (num_rows,), jnp.int32),
    "temperature": (temperature, (num_rows,), jnp.float32),
    "keys": (keys, (num_rows, 2), jnp.uint32),
  }
  for name, (array, shape, dtype) in expected.items():
    if (array.shape, array.dtype) != (shape, dtype):
      return (
        f"got {name} {array.dtype}{list(array.shape)}, expected {jnp.dtype(dtype)}{list(shape)}"
      )
  if features < MULTIPLE or features % MULTIPLE:
    return f"got d={features}, expected a positive multiple of {MULTIPLE}: pad hidden and table"
  if table.ndim == 3 and table.shape[0] != config.shards:
    return f"got a table of {table.shape[0]} slabs, expected Config.shards={config.shards}"
  vocabulary = table.size // features
  # Slabs start at a multiple of 8 rows of the table, chunks of the gradient at a multiple of 64.
  multiple = max(MULTIPLE, config.shards * ROW_MULTIPLE)
  if vocabulary == 0 or vocabulary % multiple or vocabulary >= MAX_VOCABULARY:
    return (
      f"got a vocabulary of {vocabulary}, expected a positive multiple of {multiple} below"
      f" {MAX_VOCABULARY}; pad the table to {max(-(-vocabulary // multiple), 1) * multiple} rows"
      " whose logits are below all others"
    )
  for tiles in (plan(config, num_rows), plan(config, num_rows, backward=True)):
    reason = gpu.shared_memory_reason(tiles.scratch(tiles.stages), "vocabulary_tile or block_k")
    if reason is not None:
      return reason
  return gpu.device_reason(interpret)


def reference(
  hidden: jax.Array,
  table: jax.Array,
  targets: jax.Array,
  temperature: jax.Array,
  keys: jax.Array,
) -> TokenLogprobs:
  """Computes the definition in float32, with f32[n, v] in memory."""
  rows = table.reshape(-1, table.shape[-1]).astype(jnp.float32)
  z = jnp.dot(hidden.astype(jnp.float32), rows.T, precision=lax.Precision.HIGHEST)
  t = z * (1 / jnp.where(temperature > 0, temperature, 1.0))[:, None]
  wrap = functools.partial(jax.random.wrap_key_data, impl="threefry2x32")
  draw = lambda key: jax.random.gumbel(wrap(key), z.shape[1:], jnp.float32)
  with jax.threefry_partitionable(True):
    noise = jnp.where(temperature[:, None] > 0, jax.vmap(draw)(keys), 0.0)
  tokens = jnp.where(targets >= 0, targets, jnp.argmax(t + noise, axis=1)).astype(jnp.int32)
  raw, tempered = jax.nn.log_softmax(z), jax.nn.log_softmax(t)
  take = lambda rows: jnp.take_along_axis(rows, tokens[:, None], axis=1)[:, 0]
  entropy = -jnp.sum(jnp.exp(tempered) * tempered, axis=1)
  return TokenLogprobs(tokens, take(tempered), take(raw), entropy)


def token_logprobs(
  hidden: jax.Array,
  table: jax.Array,
  targets: jax.Array,
  temperature: jax.Array,
  keys: jax.Array,
  *,
  config: Config = Config(),
  interpret: bool = False,
) -> TokenLogprobs:
  """Returns each row's token and its scores; a row's bits depend only on that row.

  Differentiable w.r.t. hidden and table, through logprob, raw_logprob and entropy.

  Args:
    hidden: bf16[n, d], after the final norm; n may be 0.
    table: bf16[v, d] or [r, v / r, d], the unembedding.
    targets: i32[n], the token to score, below v; -1 samples one.
    temperature: f32[n]; 0 takes the argmax, and is scored at temperature 1.
    keys: u32[n, 2], key data of each row's Threefry key; only read if a row is sampled.
    config: see `Config`.
    interpret: run on a CPU; slow, for tests.

  Raises:
    NotImplementedError: with the reason given by `is_supported`.
  """
  reason = is_supported(
    hidden, table, targets, temperature, keys, config=config, interpret=interpret
  )
  gpu.refuse("token_logprobs", reason)
  return _scores(hidden, table, targets, temperature, keys, config, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _scores(hidden, table, targets, temperature, keys, config, interpret):
  return forward.scores_of(hidden, table, targets, temperature, keys, config, interpret)[0]


def _scores_forward(hidden, table, targets, temperature, keys, config, interpret):
  arguments = (hidden, table, targets, temperature, keys, config, interpret)
  scores, normalisers = forward.scores_of(*arguments)
  return scores, (hidden, table, temperature, scores.tokens, scores.entropy, *normalisers)


def _scores_backward(config, interpret, saved, cotangents):
  hidden, table = saved[:2]
  if hidden.shape[0] == 0:
    return hidden, jnp.zeros_like(table), None, None, None
  rows = table.reshape(-1, table.shape[-1])
  dhidden, dtable = backward.gradients(hidden, rows, saved[2:], cotangents[1:], config, interpret)
  return dhidden, dtable.reshape(table.shape), None, None, None


_scores.defvjp(_scores_forward, _scores_backward)
