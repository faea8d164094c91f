"""The head: final norm, logits, scores, noise and sampling, by chunks of the vocabulary.

A logit is one chain over the hidden dimension, under the model's soft cap. A slab's ids are cut
into chunks of `CHUNK`, from the slab's first id on, and each row has one partial per chunk: for
softmax (`ops.logprobs`)

  m = max(z)   l = sum(exp(z - m))   s = sum(exp(z - m) * (z - m))

and for sampling the greatest z + noise, its id and its raw logit; a given token wins its chunk.
Partials are merged by one chain over all chunks, in ascending order, relative to the greatest m:

  L = sum(exp(m - M) * l)   S = sum(exp(m - M) * (s + (m - M) * l))
  logsumexp = M + log(L)    entropy = log(L) - S / L

So no whole row of logits is ever in memory, and no bit depends on the placement of slabs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from seerjax import parallel
from seerjax.array_typing import Array
from seerjax.backends.native import ffi, noise, norms, products, soft_caps, threads, vectors
from seerjax.backends.native.numbers import exp, f32, inlined, jit, log, read_row
from seerjax.backends.native.pointers import bits_of, float_of, floats, fma, integers, unsigned
from seerjax.backends.protocol import HeadStage
from seerjax.types import TokenScores

# Ids of a chunk; a slab's last chunk may have fewer. It determines bits.
CHUNK = 8 * products.PANEL
# Rows with logits of a chunk in memory together.
ROWS = 64
# Floats of a partial: raw m and l, then m, l and s, then the best value, its id's bits, raw logit.
_FIELDS = 8
# Not a literal for numba, which would compile a product anew for each literal.
_ZERO = np.int64(0)
_INFINITY = f32(np.inf)


@inlined
def divisor_of(temperature):
  """Returns the divisor of logits: the temperature, or 1 for a row at temperature 0."""
  return temperature if temperature > f32(0.0) else f32(1.0)


@inlined
def chunks_of(width):
  """Returns the number of chunks of a slab."""
  return (width + CHUNK - 1) // CHUNK


@jit
def _count_chunks(arguments):
  return ffi.dimension(arguments, 1, 0) * chunks_of(ffi.dimension(arguments, 1, 1))


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
  """Returns the first index of a value; 0 if there is none."""
  values = floats(x)
  place = np.int32(count)
  for i in range(count):
    place = min(place, np.int32(i) if values[i] == value else np.int32(count))
  return place if place < count else np.int32(0)


@jit
def _partial(z, count, first, temperature, forced, k0, k1, scratch, target):
  """Computes a row's partial of a chunk with first id `first`; `scratch` is f32[2, count]."""
  logits, out = floats(z), floats(target)
  below, weights = scratch, scratch + 4 * count
  divisor = divisor_of(temperature)
  raw_most = vectors.maximum_of(z, z, count)
  _weigh(z, f32(1.0), raw_most, below, weights, count)
  raw_total = vectors.sum_of(weights, weights, count)
  most, total = raw_most, raw_total
  if divisor != f32(1.0):
    # Division is monotone, so this is exactly the greatest quotient.
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


# Operands: 0 hidden f[n, d], 1 norm f[d], 2 seeds u32[n], 3 positions i32[n], 4 key u32[2],
# 5 sizes i32[2]: valid rows, the bits of the norm's eps. Results: normed f32[n, d], keys u32[n, 2],
# scratch.
@jit
def _prepare(arguments, results, first, last, worker):
  """Computes the final norm of rows, and the keys of their noise; items are rows."""
  d, is_bf16 = ffi.dimension(arguments, 0, 1), ffi.is_bfloat16(arguments, 0)
  size = 2 if is_bf16 else 4
  eps = float_of(integers(ffi.address(arguments, 5))[1])
  scale = ffi.address(results, 2) + 4 * worker * d
  read_row(ffi.address(arguments, 1), ffi.is_bfloat16(arguments, 1), scale, d)
  seeds, positions = unsigned(ffi.address(arguments, 2)), unsigned(ffi.address(arguments, 3))
  key, keys = unsigned(ffi.address(arguments, 4)), unsigned(ffi.address(results, 1))
  for row in range(first, min(last, ffi.integer(arguments, 5, 0))):
    normed = ffi.address(results, 0) + 4 * row * d
    read_row(ffi.address(arguments, 0) + size * row * d, is_bf16, normed, d)
    is_narrow = ffi.is_bfloat16(arguments, 1)
    norms.norm_row(normed, scale, d, eps, is_bf16, is_narrow, normed)
    k0, k1 = noise.fold_in(key[0], key[1], seeds[row])
    keys[2 * row], keys[2 * row + 1] = noise.fold_in(k0, k1, positions[row])


@jit
def _count_hidden(arguments):
  return ffi.dimension(arguments, 0, 0)


_ROWS = ffi.Handler("seerjax_head_rows", _count_hidden, _prepare)


@jit
def chunk_logits(normed, rows, d, source, is_bf16, columns, is_packed, is_whole, panels, to, step):
  """Computes logits f32[rows, columns] of a chunk of the table, in rows of `step` floats.

  `panels` is scratch memory. A chunk's panels stay there for other rows, unless these rows are all
  rows (`is_whole`).
  """
  size = 2 if is_bf16 else 4
  done = 0
  if is_whole and rows <= products.FEW_ROWS:
    done = products.few_transposed(normed, d, rows, source, is_bf16, d, columns, d, to, step)
  for column in range(done, columns, products.PANEL):
    wide = min(products.PANEL, columns - column)
    panel = panels if is_whole else panels + 4 * column * d
    if not is_packed:
      products.pack_transposed(source + size * column * d, is_bf16, d, wide, d, panel)
    products.product_of_panel(
      normed, d, rows, panel, is_bf16, wide, d, to + 4 * column, step, _ZERO
    )


@jit
def floats_of_panels(n, d, chunk):
  """Returns the floats of scratch memory of `chunk_logits` for n rows in all."""
  if n <= ROWS:  # Then a panel is used up before the next is packed.
    return products.PANEL * d
  return (chunk + products.PANEL - 1) // products.PANEL * products.PANEL * d


# Operands: 0 normed f32[n, d], 1 table f[r, w, d], 2 temperature f32[n], 3 forced i32[n], 4 keys
# u32[n, 2], 5 sizes i32[3]: valid rows, the table's first slab, the bits of the logits' soft cap.
# Results: partials f32[chunks, n, 8], scratch.
@jit
def _score(arguments, results, first, last, worker):
  """Computes partials; items are chunks, and each chunk is packed once for all rows."""
  num_rows, cap = ffi.integer(arguments, 5, 0), float_of(integers(ffi.address(arguments, 5))[2])
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  width = ffi.dimension(arguments, 1, 1)
  is_bf16, table = ffi.is_bfloat16(arguments, 1), ffi.address(arguments, 1)
  size = 2 if is_bf16 else 4
  temperature = floats(ffi.address(arguments, 2))
  forced, keys = integers(ffi.address(arguments, 3)), unsigned(ffi.address(arguments, 4))
  chunk = min(CHUNK, width)
  panels = ffi.address(results, 1) + 4 * worker * ffi.dimension(results, 1, 1)
  logits = panels + 4 * floats_of_panels(n, d, chunk)
  scratch = logits + 4 * min(n, ROWS) * chunk
  for item in range(first, last):
    slab, begin = item // chunks_of(width), item % chunks_of(width) * CHUNK
    columns = min(CHUNK, width - begin)
    first_id = (ffi.integer(arguments, 5, 1) + slab) * width + begin
    for row in range(0, num_rows, ROWS):
      rows = min(ROWS, num_rows - row)
      chunk_logits(
        ffi.address(arguments, 0) + 4 * row * d, rows, d,
        table + size * (slab * width + begin) * d, is_bf16, columns, row > 0, n <= ROWS, panels,
        logits, chunk,
      )  # fmt: skip
      if cap > f32(0.0):
        for i in range(rows):
          soft_caps.cap_row(logits + 4 * i * chunk, cap, columns)
      for i in range(row, row + rows):
        _partial(
          logits + 4 * (i - row) * chunk, columns, first_id, temperature[i], forced[i],
          keys[2 * i], keys[2 * i + 1], scratch,
          ffi.address(results, 0) + 4 * _FIELDS * (item * n + i),
        )  # fmt: skip


@jit
def _cost_of_scores(arguments):
  """The product, and the cost of a logit's exponentials and noise."""
  rows, d = ffi.integer(arguments, 5, 0), ffi.dimension(arguments, 0, 1)
  ids = ffi.dimension(arguments, 1, 0) * ffi.dimension(arguments, 1, 1)
  return rows * ids * (d + 128)


_PARTIALS = ffi.Handler("seerjax_head_partials", _count_chunks, _score, _cost_of_scores)


@jit
def _count_rows(arguments):
  return ffi.dimension(arguments, 0, 1)


# Operands: 0 partials f32[chunks, n, 8] of all slabs, 1 temperature f32[n], 2 sizes i32[1]: valid
# rows. Results, [n] each: tokens i32, logprob, raw_logprob, entropy, and both logsumexps, raw last.
@jit
def _merge(arguments, results, first, last, worker):
  """Merges partials; items are rows, and rows after the valid ones are zeroed."""
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


class Scored(NamedTuple):
  """Results of the handlers for rows, [n] each; zero after the valid ones.

  Attributes:
    tokens: i32, sampled or given.
    scores: scores of the tokens.
    normaliser: f32, logsumexp of the processed logits.
    raw_normaliser: f32, logsumexp of the raw logits.
  """

  tokens: Array
  scores: TokenScores
  normaliser: Array
  raw_normaliser: Array


def sizes_of(num_rows: Array, *others: Any) -> Array:
  """Returns i32[...]: the number of valid rows and other numbers, as handlers read them."""
  return jnp.stack([jnp.asarray(value, jnp.int32) for value in (num_rows, *others)])


def first_slab(stage: HeadStage, table: Array) -> Any:
  """Returns the index of this device's first slab."""
  return 0 if stage.axis is None else lax.axis_index(stage.axis) * table.shape[0]


def eps_bits(stage: HeadStage) -> np.int32:
  """Returns the bits of the final norm's eps, as handlers read it."""
  return np.float32(stage.shape.norm_eps).view(np.int32)


def cap_bits(stage: HeadStage) -> np.int32:
  """Returns the bits of the logits' soft cap, 0 for none, as handlers read it."""
  return np.float32(stage.shape.logit_soft_cap or 0.0).view(np.int32)


def final_norm(stage: HeadStage, weights: Any) -> Array:
  """Returns what the final norm multiplies by, as handlers read it."""
  name = "final_norm"
  return norms.factors(stage.shape.norm_weights, {name: weights[name]}, (name,))[name]


def floats_shape(*shape: int) -> jax.ShapeDtypeStruct:
  """Returns f32[shape], as a handler's result."""
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def panels_size(count: int, d: int, chunk: int) -> int:
  """Returns `floats_of_panels`, for use while a program is traced."""
  return (products.PANEL if count <= ROWS else -(-chunk // products.PANEL) * products.PANEL) * d


def prepared_rows(
  stage: HeadStage, weights: Any, rows: Any, num_rows: Array
) -> tuple[Array, Array]:
  """Returns the final norm f32[n, d] of the valid rows, and the keys u32[n, 2] of their noise."""
  hidden, _, _, seeds, positions, _ = rows
  count, d = hidden.shape
  normed, keys, _ = _ROWS(
    [floats_shape(count, d), jax.ShapeDtypeStruct((count, 2), jnp.uint32), floats_shape(1, d)],
    hidden,
    final_norm(stage, weights),
    seeds,
    positions,
    weights["key"],
    sizes_of(num_rows, eps_bits(stage)),
  )
  return normed, keys


def scored_rows(stage: HeadStage, weights: Any, rows: Any, num_rows: Array) -> Scored:
  """Runs the head on rows without a bias, a filter or a grammar."""
  _, forced, parameters, *_ = rows
  table = weights["head"]
  local, width, d = table.shape
  count, chunk = forced.shape[0], min(CHUNK, width)
  normed, keys = prepared_rows(stage, weights, rows, num_rows)
  sizes = sizes_of(num_rows, first_slab(stage, table), cap_bits(stage))
  scratch = panels_size(count, d, chunk) + (min(count, ROWS) + 2) * chunk
  own = floats_shape(threads.number(), scratch)
  partials, _ = _PARTIALS(
    [floats_shape(local * -(-width // CHUNK), count, _FIELDS), own],
    normed,
    table,
    parameters.temperature,
    forced,
    keys,
    sizes,
  )
  tokens, *scores, normaliser, raw_normaliser = _MERGED(
    [jax.ShapeDtypeStruct((count,), jnp.int32), *([floats_shape(count)] * 5)],
    parallel.gather_slabs(partials, stage.axis),
    parameters.temperature,
    sizes,
  )
  return Scored(tokens, TokenScores(*scores), normaliser, raw_normaliser)
