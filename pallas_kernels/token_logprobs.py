"""Scores of given or sampled next tokens, from hidden states, without logits in memory.

  z = hidden @ table^T        t = z * (1 / temperature)  (temperature 0: 1, and no noise)
  token = target, or argmax(t + gumbel(key)) where target is -1; ties go to the lowest id
  logprob = t[token] - logsumexp(t)                 raw_logprob = z[token] - logsumexp(z)
  entropy = logsumexp(t) - sum(softmax(t) * t)

One warpgroup takes 64 rows and `vocabulary_tile` ids: it multiplies in the tensor core (bf16
products, f32 sums, blocks of `block_k` in ascending order from zero) and leaves eight numbers a
row, relative to the tile's own maximum, its sums taken 32 ids at a time in ascending order, each
in one step of a loop, so that few values are alive beside the logits:

  m = max(z)   l = sum(exp(z - m))   of t too, and s = sum(exp(t - m) * (t - m))
  the highest t + gumbel (or the target), its id, its z

The vocabulary is cut into `shards` slabs of equal length, as a mesh would cut it, and a slab into
tiles, the last of which may be shorter. A second kernel folds the tiles of a slab from left to
right, a third merges slabs as one balanced binary tree, both by

  M = max(m)   L = sum(exp(m - M) * l)   S = sum(exp(m - M) * (s + (m - M) * l))

Every product that is added to something is rounded first (`rounding.product`): tiles are read by
another program for few rows than for many, and neither may fuse what the other does not.

None of this follows the number of rows: a row's bits depend on that row alone. Up to 64 rows, a
block's two warpgroups take two tiles of the vocabulary; beyond, they take 64 rows each.

Noise is counter-based: bits of id i are Threefry-2x32 of (row's key, i), as `jax.random.gumbel`
draws them under `jax_threefry_partitionable`, so that both draw the same noise up to the rounding
of a logarithm. Where none of 64 rows samples, none is drawn; a row that is given or greedy adds
none in either case, and all of its sums are one code.

Backward: logits are computed again, `gradient_columns` ids at a time, and become

  dz = [id is token] * (dlogprob * inverse + draw_logprob) - softmax(z) * draw_logprob
       - softmax(t) * (dlogprob + dentropy * (t - logsumexp(t) + entropy)) * inverse

with inverse = 1 / temperature, rounded to bf16. Then dhidden = dz @ table, added chunk by chunk in
ascending order in f32, and dtable = dz^T @ hidden, over rows in ascending order, by `matmul`'s
kernels. A row of dhidden depends on that row alone. The token is a constant.

Rows whose distribution is filtered (top-k, top-p, min-p) or biased are not for this kernel: a
filter has to see a row whole. The caller takes another path for them.

Shared memory: stages of (64 or 128 rows + 1 or 2 tiles of ids) x block_k; backward, 64 x 32 of dz,
two for each warpgroup.

Sources: Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867; Maddison et al. 2014,
https://arxiv.org/abs/1411.0030; Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple, TypeAlias

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import gpu, matmul, rounding
from pallas_kernels.token_partials import (
  MERGED_ROWS,
  NUM_STATISTICS,
  Partial,
  fold_tiles,
  higher,
  merge_slabs,
)

# Rows of one wgmma, and of one warpgroup.
ROWS = 64
WARPGROUPS = 2
# Ids whose terms are added at once; noise takes many registers an id.
PIECE = 32
# dz leaves so many columns at a time.
STRIP = 32
# TMA copies whole tiles of 8 rows x 64 bfloat16.
ROW_MULTIPLE = 8
MULTIPLE = 64
# An id travels as f32.
MAX_VOCABULARY = 1 << 24
# The copying warpgroup gives registers to the two others: 40 + 2 * 232 of 512 a thread.
COPY_REGISTERS = 40
MULTIPLY_REGISTERS = 232
# Stands for minus infinity: finite, so that 0 * ABSENT is 0.
ABSENT = -1e30
# In place of a target: take the argmax, without or with noise.
GREEDY = -1
SAMPLED = -2
# The target is an id of another slab.
ELSEWHERE = -3


class TokenLogprobs(NamedTuple):
  """What is known of each row's token.

  Attributes:
    tokens: i32[n], the target, or the sampled one.
    logprob: f32[n], under the tempered distribution.
    raw_logprob: f32[n], at temperature 1.
    entropy: f32[n], of the tempered distribution.
  """

  tokens: jax.Array
  logprob: jax.Array
  raw_logprob: jax.Array
  entropy: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The order of all sums, and how the work is spread over the machine.

  Attributes:
    shards: contract. Slabs of the vocabulary, merged as one tree: 1, 2, 4 or 8.
    vocabulary_tile: contract. Ids of one partial.
    block_k: contract. Features that are copied, then added, at once.
    gradient_columns: contract of dhidden. Ids whose dz is in memory at once.
    gradient: its products. `shards` must be 1: a row of dz has no logical shards.
    max_stages: tuning. Depth of the ring, where shared memory allows it.
    snake_width: tuning. Tiles of the vocabulary that are walked together, so that L2 serves them.
  """

  shards: int = 8
  vocabulary_tile: int = 256
  block_k: int = 64
  gradient_columns: int = 16384
  gradient: matmul.Config = matmul.Config()
  max_stages: int = 8
  snake_width: int = 8

  def __post_init__(self) -> None:
    choices = {
      "shards": (1, 2, 4, 8),
      "vocabulary_tile": (64, 128, 256),
      "block_k": (64, 128),
    }
    for name, allowed in choices.items():
      if getattr(self, name) not in allowed:
        raise ValueError(f"got {name}={getattr(self, name)}; expected one of {allowed}.")
    for name, least in (("max_stages", 2), ("snake_width", 1)):
      if getattr(self, name) < least:
        raise ValueError(f"got {name}={getattr(self, name)}; expected at least {least}.")
    if self.gradient_columns < MULTIPLE or self.gradient_columns % MULTIPLE:
      raise ValueError(
        f"got gradient_columns={self.gradient_columns}; expected a positive multiple of {MULTIPLE}."
      )
    if self.gradient.shards != 1:
      raise ValueError(f"got gradient.shards={self.gradient.shards}; expected 1.")

  def shared_memory_bytes(self, num_rows: int) -> int:
    """Returns the most that a block takes for that many rows, forward or backward."""
    return max(
      gpu.shared_memory_bytes(tiles.scratch(tiles.stages))
      for tiles in (plan(self, num_rows), plan(self, num_rows, backward=True))
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """What one block's two warpgroups share: `row_groups` x 64 rows, `column_groups` tiles of ids."""

  row_groups: int
  column_groups: int
  vocabulary_tile: int
  block_k: int
  backward: bool
  max_stages: int

  def scratch(self, stages: int) -> gpu.Scratch:
    hidden = (stages, self.row_groups * ROWS, self.block_k)
    table = (stages, self.column_groups * self.vocabulary_tile, self.block_k)
    scratch = {
      "hidden": gpu.Buffer(hidden, jnp.bfloat16, swizzled=True),
      "table": gpu.Buffer(table, jnp.bfloat16, swizzled=True),
      "full": gpu.Barriers(1 + self.column_groups, stages),
      "empty": gpu.Barriers(WARPGROUPS, stages),
    }
    if self.backward:
      strips = (WARPGROUPS, 2, ROWS, STRIP)
      scratch["strips"] = gpu.Buffer(strips, jnp.bfloat16, swizzled=True)
    return scratch

  @property
  def stages(self) -> int:
    """The deepest ring that fits."""
    for stages in range(self.max_stages, 2, -1):
      if gpu.shared_memory_bytes(self.scratch(stages)) <= gpu.SHARED_MEMORY_LIMIT_BYTES:
        return stages
    return 2


def plan(config: Config, num_rows: int, *, backward: bool = False) -> Plan:
  """Returns what a block takes for that many rows; the order of no sum depends on it."""
  row_groups = 1 if num_rows <= ROWS else WARPGROUPS
  return Plan(
    row_groups=row_groups,
    column_groups=WARPGROUPS // row_groups,
    vocabulary_tile=config.vocabulary_tile,
    block_k=config.block_k,
    backward=backward,
    max_stages=config.max_stages,
  )


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
  """Returns None if the kernel can run on these arguments here, else the reason that it cannot.

  It cannot see whether a row is filtered or biased; such rows are the caller's to keep away.
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
  # Slabs begin at a multiple of 8 rows of the table, chunks of the gradient at one of 64.
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
  """The definition, in float32; it holds f32[n, v]."""
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
  """Returns each row's token and its scores; a row's bits depend on that row alone.

  A gradient reaches hidden and table, from logprob, raw_logprob and entropy.

  Args:
    hidden: bf16[n, d], after the final norm; n may be 0.
    table: bf16[v, d] or [r, v / r, d], the unembedding.
    targets: i32[n], the token to score, below v; -1 samples one.
    temperature: f32[n]; 0 takes the argmax, and is scored at temperature 1.
    keys: u32[n, 2], key data of each row's Threefry key; read only where a row is sampled.
    config: see `Config`.
    interpret: run on a CPU; slow, for tests.

  Raises:
    NotImplementedError: `is_supported` gives a reason; the message is that reason.
  """
  reason = is_supported(
    hidden, table, targets, temperature, keys, config=config, interpret=interpret
  )
  if reason is not None:
    raise NotImplementedError(f"token_logprobs: {reason}.")
  return _scores(hidden, table, targets, temperature, keys, config, interpret)


def threefry_2x32(key_0: Any, key_1: Any, high: Any, low: Any) -> tuple[Any, Any]:
  """Returns the two words that Threefry-2x32, 20 rounds, makes of a counter; all uint32."""
  keys = (key_0, key_1, key_0 ^ key_1 ^ jnp.uint32(0x1BD11BDA))
  x, y = high + keys[0], low + keys[1]
  for step in range(5):
    for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[step % 2]:
      x = x + y
      y = lax.shift_left(y, jnp.full_like(y, rotation)) | lax.shift_right_logical(
        y, jnp.full_like(y, 32 - rotation)
      )
      y = y ^ x
    x = x + keys[(step + 1) % 3]
    y = y + keys[(step + 2) % 3] + jnp.uint32(step + 1)
  return x, y


def random_bits(key_0: Any, key_1: Any, ids: Any) -> Any:
  """Returns `jax.random.bits` of the key at these indices: all of one shape, uint32."""
  x, y = threefry_2x32(key_0, key_1, jnp.zeros_like(ids), ids)
  return x ^ y


def gumbel(bits: Any) -> Any:
  """Returns the noise that `jax.random.gumbel` makes of uint32 bits in its default mode, f32."""
  mantissa = lax.shift_right_logical(bits, jnp.full_like(bits, 9)) | jnp.uint32(0x3F800000)
  uniform = lax.bitcast_convert_type(mantissa, jnp.float32) - 1.0
  uniform = jnp.maximum(uniform, jnp.finfo(jnp.float32).tiny)
  return -jnp.log(-jnp.log(uniform))


class Place(NamedTuple):
  """Where a warpgroup's tile of logits lies.

  Attributes:
    row: of `hidden`, the first of 64.
    first: id of the first column.
    past: id behind the slab's last one; columns from there on are not of this slab.
    index: of the tile, among those of all slabs.
  """

  row: Any
  first: Any
  past: Any
  index: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _scores(hidden, table, targets, temperature, keys, config, interpret):
  return _forward(hidden, table, targets, temperature, keys, config, interpret)[0]


def _scores_forward(hidden, table, targets, temperature, keys, config, interpret):
  scores, normalisers = _forward(hidden, table, targets, temperature, keys, config, interpret)
  return scores, (hidden, table, temperature, scores.tokens, scores.entropy, *normalisers)


def _scores_backward(config, interpret, saved, cotangents):
  hidden, table = saved[:2]
  if hidden.shape[0] == 0:
    return hidden, jnp.zeros_like(table), None, None, None
  rows = table.reshape(-1, table.shape[-1])
  dhidden, dtable = _gradients(hidden, rows, saved[2:], cotangents[1:], config, interpret)
  return dhidden, dtable.reshape(table.shape), None, None, None


_scores.defvjp(_scores_forward, _scores_backward)


# Static, so that calls of one shape share one program in whatever holds them.
@functools.partial(jax.jit, static_argnums=(5, 6))
def _forward(
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
  inverse = _inverse(temperature, padded)
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
    wide = lambda values: _columns(values, PIECE)
    pieces = [
      jnp.where(_ids(place.first + i, PIECE) < place.past, logits[:, i : i + PIECE], ABSENT)
      for i in range(0, config.vocabulary_tile, PIECE)
    ]
    raw_maximum = jnp.max(functools.reduce(jnp.maximum, pieces), axis=1)
    # A positive factor keeps the order, so no pass over t is needed, nor registers for it.
    maximum = product_of_rows(raw_maximum, inverse)
    # An id that is absent from this slab may be another slab's target.
    target = jnp.where(target < place.past, target, ELSEWHERE)

    # One step's registers at a time beside the logits: unrolled, they spill.
    def add_piece(i, sums):
      raw_total, total, weighted, *best = sums
      z = lax.switch(i, [lambda z=z: z for z in pieces])
      ids = _ids(place.first + i * PIECE, PIECE)
      raw_total = raw_total + jnp.sum(jnp.exp(z - wide(raw_maximum)), axis=1)
      t = jnp.maximum(product(z, wide(inverse)), ABSENT)
      below = t - wide(maximum)
      weights = jnp.exp(below)
      total = total + jnp.sum(weights, axis=1)
      weighted = weighted + jnp.sum(product(weights, below), axis=1)

      def with_noise(t):
        # Keys are read where they are used: kept, they would cost the sums their registers.
        key_0, key_1 = (wide(of_rows(ref)) for ref in key_refs)
        noise = gumbel(random_bits(key_0, key_1, ids.astype(jnp.uint32)))
        return jnp.where(wide(target) == SAMPLED, t + noise, t)

      # Whether a neighbour samples decides about the noise alone.
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

  partials = _over_tiles(
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


@functools.partial(jax.jit, static_argnums=(4, 5))
def _gradients(
  hidden: jax.Array,
  table: jax.Array,
  saved: tuple[jax.Array, ...],
  cotangents: tuple[jax.Array, ...],
  config: Config,
  interpret: bool,
) -> tuple[jax.Array, jax.Array]:
  """Returns dhidden and dtable; one chunk of dz is in memory at a time."""
  vocabulary = table.shape[0]
  columns = min(config.gradient_columns, vocabulary)
  product = functools.partial(matmul.matmul, config=config.gradient, interpret=interpret)

  def add_chunk(dhidden, start, width):
    dz = _logit_gradients(hidden, table, saved, cotangents, start, width, config, interpret)
    part = lax.dynamic_slice_in_dim(table, start, width)
    dhidden = product(dz, part, residual=dhidden, out_dtype=jnp.float32)
    # The weight's gradient of a product that is not read, and that is therefore not computed.
    _, pull = jax.vjp(lambda part: product(hidden, part, transposed=True), part)
    return dhidden, pull(dz)[0]

  whole, rest = divmod(vocabulary, columns)
  dhidden = jnp.zeros(hidden.shape, jnp.float32)
  starts = jnp.arange(whole, dtype=jnp.int32) * columns
  dhidden, dtable = lax.scan(lambda d, start: add_chunk(d, start, columns), dhidden, starts)
  dtable = dtable.reshape(whole * columns, -1)
  if rest:
    dhidden, last = add_chunk(dhidden, jnp.int32(whole * columns), rest)
    dtable = jnp.concatenate([dtable, last])
  return dhidden.astype(hidden.dtype), dtable


def _logit_gradients(
  hidden: jax.Array,
  table: jax.Array,
  saved: tuple[jax.Array, ...],
  cotangents: tuple[jax.Array, ...],
  start: jax.Array,
  width: int,
  config: Config,
  interpret: bool,
) -> jax.Array:
  """Returns dz of ids from `start`: bf16[n, width]."""
  num_rows = hidden.shape[0]
  padded = -(-num_rows // MERGED_ROWS) * MERGED_ROWS
  temperature, tokens, *others = (*saved, *cotangents)
  rows_of = [_inverse(temperature, padded)]
  rows_of += [jnp.pad(array, (0, padded - num_rows)) for array in (tokens, *others)]

  product = functools.partial(rounding.product, layout=rounding.TILE, interpret=interpret)
  product_of_rows = functools.partial(rounding.product, layout=rounding.ROWS, interpret=interpret)

  def write_gradient(logits, place, refs, strips):
    *row_refs, dz_ref = refs
    rows = pl.ds(place.row, ROWS)
    inverse, token, entropy, normaliser, raw_normaliser, dlogprob, draw_logprob, dentropy = (
      gpu.load(ref.at[rows], rounding.ROWS) for ref in row_refs
    )
    at_token = product_of_rows(dlogprob, inverse) + draw_logprob
    # The slope of t is slope + tilt * (t - logsumexp(t)).
    slope = product_of_rows(dlogprob + product_of_rows(dentropy, entropy), inverse)
    tilt = dentropy * inverse
    wide = lambda values: _columns(values, STRIP)
    parts = [logits[:, i : i + STRIP] for i in range(0, config.vocabulary_tile, STRIP)]

    def write_strip(i, _):
      z = lax.switch(i, [lambda z=z: z for z in parts])
      below = product(z, wide(inverse)) - wide(normaliser)
      ids = _ids(place.first + i * STRIP, STRIP)
      dz = jnp.where(ids == wide(token), wide(at_token), 0.0)
      dz = dz - product(jnp.exp(z - wide(raw_normaliser)), wide(draw_logprob))
      dz = dz - product(jnp.exp(below), wide(slope) + product(wide(tilt), below))
      strip = strips.at[lax.rem(i, 2)]
      plgpu.wait_smem_to_gmem(1, wait_read_only=True)
      strip[...] = dz.astype(jnp.bfloat16)
      plgpu.commit_smem()
      columns = pl.ds(place.index * config.vocabulary_tile + i * STRIP, STRIP)
      plgpu.copy_smem_to_gmem(strip, dz_ref.at[rows, columns])

    # An even number, so the next tile's first strip finds its slot free.
    lax.fori_loop(0, len(parts), write_strip, None)

  dz = _over_tiles(
    write_gradient,
    name="token_logprobs_backward",
    tiles=plan(config, num_rows, backward=True),
    config=config,
    hidden=hidden,
    table=table,
    inputs=tuple(rows_of),
    out_type=jax.ShapeDtypeStruct((_whole_rows(hidden).shape[0], width), jnp.bfloat16),
    start=start,
    slabs=1,
    width=width,
    interpret=interpret,
  )
  return dz[:num_rows]


def _over_tiles(
  visit: Callable[[Any, Place, Sequence[Any], Any], None],
  *,
  name: str,
  tiles: Plan,
  config: Config,
  hidden: jax.Array,
  table: jax.Array,
  inputs: tuple[jax.Array, ...],
  out_type: jax.ShapeDtypeStruct,
  start: jax.Array,
  slabs: int,
  width: int,
  interpret: bool,
) -> jax.Array:
  """The product: hands every tile of logits to `visit`, which writes what it makes of it.

  Args:
    visit: `(logits f32[64, w], place, references to inputs and output, strips)`; the warpgroup's
      two strips of shared memory are there backward only.
    name: of the kernel, in profiles.
    tiles: of one block.
    config: of the caller.
    hidden: bf16[n, d].
    table: bf16[v, d].
    inputs: more arrays for `visit`.
    out_type: of what `visit` writes.
    start: i32[], id where the first slab begins, a multiple of 64.
    slabs: how many, one behind the other.
    width: ids of a slab; its last tile may go past its end.
    interpret: run on the CPU.
  """
  hidden = _whole_rows(hidden)
  (num_rows, features), stages = hidden.shape, tiles.stages
  tiles_per_slab = -(-width // tiles.vocabulary_tile)
  blocks_per_slab = -(-tiles_per_slab // tiles.column_groups)
  block_rows = tiles.row_groups * ROWS
  grid = (-(-num_rows // block_rows), slabs * blocks_per_slab)
  num_visits = grid[0] * grid[1]
  num_blocks = min(num_visits, gpu.num_multiprocessors(interpret))
  steps = -(-features // tiles.block_k)

  def body(start_ref, hidden_ref, table_ref, *refs, full, empty, strips=None, **buffers):
    hidden_buffer, table_buffer = buffers["hidden"], buffers["table"]
    warpgroup = lax.axis_index("warpgroup")
    # As a product, so that TMA is seen to begin at a whole tile of 8 rows.
    start = start_ref[0] * MULTIPLE

    def for_each_block(visit_block: Callable[[Any, Any, Any, Any], None]) -> None:
      @plgpu.nd_loop((num_visits,), collective_axes="block")
      def _(loop: plgpu.NDLoopInfo) -> None:
        row, column = plgpu.planar_snake(loop.index[0], grid, 1, config.snake_width)
        slab = lax.div(column, blocks_per_slab)
        tile = lax.rem(column, blocks_per_slab) * tiles.column_groups
        visit_block(row * block_rows, slab, tile, loop.local_index * steps)

    @pl.when(warpgroup == WARPGROUPS)
    def _():
      plgpu.set_max_registers(COPY_REGISTERS, action="decrease")

      def copy_block(row, slab, tile, first_step):
        def copy_step(i, _):
          step = first_step + i
          slot = lax.rem(step, stages)
          pl.when(step >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
          part = pl.ds(i * tiles.block_k, tiles.block_k)
          rows = hidden_ref.at[pl.ds(row, block_rows), part]
          plgpu.copy_gmem_to_smem(rows, hidden_buffer.at[slot], full.at[slot])
          for group in range(tiles.column_groups):
            # With an odd number of tiles, the last one is copied for a group that drops it.
            first = jnp.minimum(tile + group, tiles_per_slab - 1) * tiles.vocabulary_tile
            ids = table_ref.at[pl.ds(start + slab * width + first, tiles.vocabulary_tile), part]
            place = pl.ds(group * tiles.vocabulary_tile, tiles.vocabulary_tile)
            plgpu.copy_gmem_to_smem(ids, table_buffer.at[slot, place], full.at[slot])

        lax.fori_loop(0, steps, copy_step, None)

      for_each_block(copy_block)
      # No barrier is left with an arrival that was not waited for.
      past = lax.div(num_visits - lax.axis_index("block") + num_blocks - 1, num_blocks) * steps
      drain = lambda step, _: plgpu.barrier_wait(empty.at[lax.rem(step, stages)])
      lax.fori_loop(jnp.maximum(past - stages, 0), past, drain, None)

    @pl.when(warpgroup < WARPGROUPS)
    def _():
      plgpu.set_max_registers(MULTIPLY_REGISTERS, action="increase")
      row_group = warpgroup if tiles.row_groups > 1 else 0
      column_group = warpgroup if tiles.column_groups > 1 else 0
      my_rows = pl.ds(row_group * ROWS, ROWS)
      my_ids = pl.ds(column_group * tiles.vocabulary_tile, tiles.vocabulary_tile)

      def multiply_block(row, slab, tile, first_step):
        def multiply(accumulator):
          def add_step(i, _):
            slot = lax.rem(first_step + i, stages)
            plgpu.barrier_wait(full.at[slot])
            ids = table_buffer.at[slot, my_ids].T
            plgpu.wgmma(accumulator, hidden_buffer.at[slot, my_rows], ids)
            # The previous block has been read once only this one's products are under way.
            plgpu.wgmma_wait(1)
            previous = lax.rem(first_step + i + stages - 1, stages)
            pl.when(i > 0)(lambda: plgpu.barrier_arrive(empty.at[previous]))

          lax.fori_loop(0, steps, add_step, None)
          plgpu.wgmma_wait(0)
          plgpu.barrier_arrive(empty.at[lax.rem(first_step + steps - 1, stages)])
          return plgpu.layout_cast(accumulator[...], plgpu.Layout.WGMMA)

        accumulator = plgpu.WGMMAAccumulatorRef((ROWS, tiles.vocabulary_tile), jnp.float32)
        logits = pl.run_scoped(multiply, accumulator)
        mine_of_slab = tile + column_group
        slab_start = start + slab * width
        place = Place(
          row=row + row_group * ROWS,
          first=slab_start + mine_of_slab * tiles.vocabulary_tile,
          past=slab_start + width,
          index=slab * tiles_per_slab + mine_of_slab,
        )

        @pl.when(mine_of_slab < tiles_per_slab)
        def _():
          visit(logits, place, refs, None if strips is None else strips.at[warpgroup])

      for_each_block(multiply_block)
      plgpu.wait_smem_to_gmem(0)

  return gpu.kernel(
    body,
    name=name,
    out_type=out_type,
    scratch=tiles.scratch(stages),
    num_blocks=num_blocks,
    interpret=interpret,
    num_threads=WARPGROUPS + 1,
    thread_name="warpgroup",
  )(start[None] // MULTIPLE, hidden, table, *inputs)


def _ids(first: Any, count: int) -> Any:
  """Returns i32[64, count]: ids of the columns from `first`."""
  ids = plgpu.broadcasted_iota(jnp.int32, (ROWS, count), 1, layout=plgpu.Layout.WGMMA)
  return ids + first


def _columns(values: Any, count: int) -> Any:
  """Repeats one value a row along `count` columns: [64] to [64, count]."""
  return lax.broadcast_in_dim(values, (ROWS, count), (0,))


def _inverse(temperature: jax.Array, padded: int) -> jax.Array:
  """Returns what logits are multiplied by: f32[padded]."""
  inverse = 1 / jnp.where(temperature > 0, temperature, jnp.float32(1))
  return jnp.pad(inverse, (0, padded - inverse.shape[0]), constant_values=1)


def _whole_rows(hidden: jax.Array) -> jax.Array:
  """Adds rows of zeros up to a multiple of 8."""
  return jnp.pad(hidden, ((0, -hidden.shape[0] % ROW_MULTIPLE), (0, 0)))
