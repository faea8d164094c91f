"""The head: final norm, logits, scores, noise and choice, by chunks of the vocabulary.

A logit is one chain over the hidden dimension. A slab's ids are cut into chunks of `CHUNK`, from
the slab's first, and a chunk gives each row one partial: of softmax (`ops.logprobs`)

  m = max(z)   l = sum(exp(z - m))   s = sum(exp(z - m) * (z - m))

and of the choice the greatest z + noise, its id and its raw logit; a given token wins its chunk.
Partials are merged by one chain over all chunks, in ascending order, relative to the greatest m:

  L = sum(exp(m - M) * l)   S = sum(exp(m - M) * (s + (m - M) * l))
  logsumexp = M + log(L)    entropy = log(L) - S / L

So no row's logits are ever whole, nor does a bit know where a slab lives.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from seerjax import parallel
from seerjax.array_typing import Array
from seerjax.backends.native import ffi, noise, norms, products, vectors
from seerjax.backends.native.numbers import exp, f32, jit, log, read_row
from seerjax.backends.native.pointers import bits_of, float_of, floats, fma, integers, unsigned
from seerjax.backends.protocol import Backend, Stage
from seerjax.ops import sampling
from seerjax.types import TokenScores

# Ids of a chunk, of which a slab's last may have fewer: it decides bits.
CHUNK = 8 * products.PANEL
# Rows whose logits of a chunk are held together.
ROWS = 64
# Floats of a partial: raw m and l, then m, l and s, then the best, its id's bits, its raw logit.
_FIELDS = 8
_INFINITY = f32(np.inf)


@jit
def divisor_of(temperature):
  """What logits are divided by: a row at temperature 0 is left at 1."""
  return temperature if temperature > f32(0.0) else f32(1.0)


@jit
def _chunks(width):
  return (width + CHUNK - 1) // CHUNK


@jit
def _count_chunks(arguments):
  return ffi.dimension(arguments, 2, 0) * _chunks(ffi.dimension(arguments, 2, 1))


@jit
def _weigh(z, divisor, most, below, weights, count):
  """Writes z / divisor - most, and its exp."""
  values, under, out = floats(z), floats(below), floats(weights)
  for i in range(count):
    under[i] = values[i] / divisor - most
  for i in range(count):
    out[i] = exp(under[i])


@jit
def _place_of(x, value, count):
  """The first place that holds a value; 0 if none does."""
  values = floats(x)
  place = np.int32(count)
  for i in range(count):
    place = min(place, np.int32(i) if values[i] == value else np.int32(count))
  return place if place < count else np.int32(0)


@jit
def _partial(z, count, first, temperature, forced, k0, k1, scratch, target):
  """One row's partial of a chunk whose first id is `first`; `scratch` is f32[2, count]."""
  logits, out = floats(z), floats(target)
  below, weights = scratch, scratch + 4 * count
  divisor = divisor_of(temperature)
  raw_most = vectors.maximum_of(z, z, count)
  _weigh(z, f32(1.0), raw_most, below, weights, count)
  raw_total = vectors.sum_of(weights, weights, count)
  most, total = raw_most, raw_total
  if divisor != f32(1.0):
    # Division is monotone, so that this is the greatest quotient, exactly.
    most = raw_most / divisor
    _weigh(z, divisor, most, below, weights, count)
    total = vectors.sum_of(weights, weights, count)
  out[0], out[1], out[2], out[3] = raw_most, raw_total, most, total
  out[4] = vectors.dot_of(weights, below, count)
  if forced >= 0:
    place = forced - first
    is_here = place >= 0 and place < count
    out[5] = _INFINITY if is_here else -_INFINITY
    out[6] = float_of(np.int32(forced))
    out[7] = logits[place] if is_here else f32(0.0)
    return
  if temperature > f32(0.0):
    noise.noisy_row(z, divisor, k0, k1, first, weights, count)
    best = vectors.maximum_of(weights, weights, count)
    place = _place_of(weights, best, count)
  else:
    best = most
    place = _place_of(z, raw_most, count)
  out[5], out[6], out[7] = best, float_of(np.int32(first + place)), logits[place]


@jit
def _normed(arguments, row, rows, scale, eps, target):
  """The final norm of rows from `row` on: f32[rows, d]; `scale` is scratch, f32[d]."""
  d = ffi.dimension(arguments, 0, 1)
  is_bf16 = ffi.is_bfloat16(arguments, 0)
  size = 2 if is_bf16 else 4
  read_row(ffi.address(arguments, 1), ffi.is_bfloat16(arguments, 1), scale, d)
  for i in range(rows):
    to = target + 4 * i * d
    read_row(ffi.address(arguments, 0) + size * (row + i) * d, is_bf16, to, d)
    norms.norm_row(to, scale, d, eps, is_bf16, to)


@jit
def _folded(arguments, row, rows, target):
  """The keys of rows from `row` on: u32[rows, 2]."""
  key = unsigned(ffi.address(arguments, 7))
  seeds, positions = unsigned(ffi.address(arguments, 5)), unsigned(ffi.address(arguments, 6))
  out = unsigned(target)
  for i in range(rows):
    k0, k1 = noise.fold_in(key[0], key[1], seeds[row + i])
    out[2 * i], out[2 * i + 1] = noise.fold_in(k0, k1, positions[row + i])


# Operands: 0 hidden f[n, d], 1 norm f[d], 2 table f[r, w, d], 3 temperature f32[n], 4 forced
# i32[n], 5 seeds u32[n], 6 positions i32[n], 7 key u32[2], 8 sizes i32[3]: valid rows, the table's
# first slab, the bits of the norm's eps. Results: f32[chunks, n, 8], and scratch.
@jit
def _score(arguments, results, first, last, worker):
  """Items are chunks: each is packed once for all rows."""
  num_rows, eps = ffi.integer(arguments, 8, 0), float_of(integers(ffi.address(arguments, 8))[2])
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  width = ffi.dimension(arguments, 2, 1)
  is_bf16, table = ffi.is_bfloat16(arguments, 2), ffi.address(arguments, 2)
  size = 2 if is_bf16 else 4
  temperature = floats(ffi.address(arguments, 3))
  forced = integers(ffi.address(arguments, 4))
  chunk = min(CHUNK, width)
  is_whole = n <= ROWS  # Then a panel is used up before the next is packed.
  num_panels = 1 if is_whole else (chunk + products.PANEL - 1) // products.PANEL
  panels = ffi.address(results, 1) + 4 * worker * ffi.dimension(results, 1, 1)
  normed = panels + 4 * num_panels * products.PANEL * d
  logits = normed + 4 * min(n, ROWS) * d
  scratch = logits + 4 * min(n, ROWS) * chunk
  scale = scratch + 8 * chunk
  keys = scale + 4 * d
  for item in range(first, last):
    slab, begin = item // _chunks(width), item % _chunks(width) * CHUNK
    columns = min(CHUNK, width - begin)
    source = table + size * (slab * width + begin) * d
    first_id = (ffi.integer(arguments, 8, 1) + slab) * width + begin
    for row in range(0, num_rows, ROWS):
      rows = min(ROWS, num_rows - row)
      if item == first or not is_whole:
        _normed(arguments, row, rows, scale, eps, normed)
        _folded(arguments, row, rows, keys)
      for column in range(0, columns, products.PANEL):
        wide = min(products.PANEL, columns - column)
        panel = panels if is_whole else panels + 4 * column * d
        if row == 0:
          at = source + size * column * d
          products.pack_transposed(at, is_bf16, d, wide, d, panel)
        products.product(
          normed, d, 1, rows, panel, False, products.PANEL, wide, d, logits + 4 * column, chunk, 0
        )  # fmt: skip
      key = unsigned(keys)
      for i in range(rows):
        _partial(
          logits + 4 * i * chunk, columns, first_id, temperature[row + i], forced[row + i],
          key[2 * i], key[2 * i + 1], scratch,
          ffi.address(results, 0) + 4 * _FIELDS * (item * n + row + i),
        )  # fmt: skip


_PARTIALS = ffi.Handler("seerjax_head_partials", _count_chunks, _score)


@jit
def _count_rows(arguments):
  return ffi.dimension(arguments, 0, 1)


# Operands: 0 partials f32[chunks, n, 8] of all slabs, 1 temperature f32[n], 2 sizes i32[1]: valid
# rows. Results, [n] each: tokens i32, logprob, raw_logprob, entropy, and both logsumexps, raw last.
@jit
def _merge(arguments, results, first, last, worker):
  """Items are rows; what is behind the valid ones is zero."""
  chunks, n = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  temperature = floats(ffi.address(arguments, 1))
  tokens = integers(ffi.address(results, 0))
  logprob, raw_logprob = floats(ffi.address(results, 1)), floats(ffi.address(results, 2))
  entropy = floats(ffi.address(results, 3))
  normaliser, raw_normaliser = floats(ffi.address(results, 4)), floats(ffi.address(results, 5))
  valid = ffi.integer(arguments, 2, 0)
  for row in range(first, last):
    if row >= valid:
      tokens[row] = 0
      logprob[row] = raw_logprob[row] = entropy[row] = f32(0.0)
      normaliser[row] = raw_normaliser[row] = f32(0.0)
      continue
    found = floats(ffi.address(arguments, 0) + 4 * _FIELDS * row)
    step = _FIELDS * n
    raw_most, most, chosen = found[0], found[2], 0
    for chunk in range(1, chunks):
      raw_most = max(raw_most, found[chunk * step])
      most = max(most, found[chunk * step + 2])
      # A tie stays with the lower id.
      if found[chunk * step + 5] > found[chosen * step + 5]:
        chosen = chunk
    raw_total = total = weighted = f32(0.0)
    for chunk in range(chunks):
      place = chunk * step
      raw_total = fma(exp(found[place] - raw_most), found[place + 1], raw_total)
      below = found[place + 2] - most
      factor = exp(below)
      total = fma(factor, found[place + 3], total)
      weighted = fma(factor, fma(below, found[place + 3], found[place + 4]), weighted)
    raw_normaliser[row] = raw_most + log(raw_total)
    normaliser[row] = most + log(total)
    tokens[row] = bits_of(found[chosen * step + 6])
    raw = found[chosen * step + 7]
    logprob[row] = raw / divisor_of(temperature[row]) - normaliser[row]
    raw_logprob[row] = raw - raw_normaliser[row]
    entropy[row] = log(total) - weighted / total


_MERGED = ffi.Handler("seerjax_head_merged", _count_rows, _merge)


def scored_rows(
  stage: Stage, weights: Any, rows: Any, num_rows: Array
) -> tuple[Array, TokenScores, tuple[Array, Array]]:
  """The head of rows without a bias, a filter or a grammar.

  Returns:
    (tokens i32[n], their scores, the logsumexps f32[n] of processed and of raw logits); zeros
    behind `num_rows`.
  """
  hidden, forced, parameters, seeds, positions, _ = rows
  table = weights["head"]
  count, d = hidden.shape
  local, width, _ = table.shape
  slab = 0 if stage.axis is None else lax.axis_index(stage.axis) * local
  eps = np.float32(stage.shape.norm_eps).view(np.int32)
  sizes = jnp.stack([jnp.asarray(value, jnp.int32) for value in (num_rows, slab, eps)])
  chunk = min(CHUNK, width)
  num_panels = 1 if count <= ROWS else -(-chunk // products.PANEL)
  held = min(count, ROWS)
  scratch = num_panels * products.PANEL * d + held * (d + chunk + 2) + 2 * chunk + d
  float_of_shape = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  partials, _ = _PARTIALS(
    [float_of_shape(local * -(-width // CHUNK), count, _FIELDS), float_of_shape(1, scratch)],
    hidden,
    weights["final_norm"],
    table,
    parameters.temperature,
    forced,
    seeds,
    positions,
    weights["key"],
    sizes,
  )
  tokens, *scores, normaliser, raw_normaliser = _MERGED(
    [jax.ShapeDtypeStruct((count,), jnp.int32), *([float_of_shape(count)] * 5)],
    parallel.gather_slabs(partials, stage.axis),
    parameters.temperature,
    sizes,
  )
  return tokens, TokenScores(*scores), (normaliser, raw_normaliser)


def head(
  tiled: Backend, stage: Stage, weights: Any, rows: Any, num_rows: Array
) -> tuple[Array, TokenScores]:
  """See `protocol.Backend.head`; a biased, filtered or restricted row is `tiled`'s.

  Which of the two a row takes follows its own parameters, never its neighbours'.
  """
  return _head(tiled, stage, weights, rows, num_rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _head(tiled: Backend, stage: Stage, weights: Any, rows: Any, num_rows: Array):
  parameters = rows[2]
  tokens, scores, _ = scored_rows(stage, weights, rows, num_rows)
  common = tokens, scores
  is_special = _is_special(parameters)
  special = lax.cond(
    jnp.any(is_special),
    lambda: tiled.head(stage, weights, rows, num_rows),
    lambda: jax.tree.map(jnp.zeros_like, common),
  )
  return jax.tree.map(lambda a, b: jnp.where(is_special, a, b), special, common)


def _is_special(parameters: Any) -> Array:
  is_special = sampling.is_filtered(parameters) | sampling.is_restricted(parameters)
  return is_special | jnp.any(parameters.bias_ids >= 0, axis=1)


def _head_forward(tiled, stage, weights, rows, num_rows):
  return _head(tiled, stage, weights, rows, num_rows), (weights, rows, num_rows)


def _head_backward(tiled, stage, residuals, cotangent):
  weights, rows, num_rows = residuals
  given = functools.partial(stage.gradient_of or stage.rows, tiled, stage.shape, stage.axis)

  def scores(floats: Any) -> Any:
    hidden, norm, table = floats
    these = {**weights, "final_norm": norm, "head": table}
    return tiled.map_rows(given, these, (hidden, *rows[1:]), num_rows)

  _, pull = jax.vjp(scores, (rows[0], weights["final_norm"], weights["head"]))
  ((hidden, norm, table),) = pull(cotangent[1])
  return {"final_norm": norm, "head": table, "key": None}, (hidden, *[None] * 5), None


_head.defvjp(_head_forward, _head_backward)
