"""The gradient of given tokens' scores, by the chunks of `head_forward`.

With p and q the processed and raw softmax, H the entropy, t what logits are divided by, and a, b, c
the cotangents of logprob, raw_logprob and entropy, a logit's is

  -p * (a + c * (log p + H)) / t - b * q        at the token (a / t + b) is added

The table's gradient is one chain over rows, in their order; a normed row's one chain a slab, over
its ids, and slabs are added in the tree. Logits are computed again, chunk by chunk.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seerjax import parallel
from seerjax.array_typing import Array
from seerjax.backends.native import ffi, norms, products, threads, vectors
from seerjax.backends.native.head_forward import (
  CHUNK,
  ROWS,
  Scored,
  chunk_logits,
  divisor_of,
  eps_bits,
  first_slab,
  floats_of_panels,
  floats_shape,
  panels_size,
  prepared_rows,
  sizes_of,
)
from seerjax.backends.native.numbers import (
  exp,
  f32,
  jit,
  read_row,
  round_row,
  write_row,
  zero_row,
)
from seerjax.backends.native.pointers import float_of, floats, fma, integers
from seerjax.backends.protocol import Stage
from seerjax.types import TokenScores

# Columns of a tensor f32[n, 6]: cotangents, then what the forward found.
_LOGPROB, _RAW, _ENTROPY, _NORMALISER, _RAW_NORMALISER, _OWN_ENTROPY = range(6)
_COLUMNS = 6
# Numbers that numba does not take for literals, for which it would compile a product anew.
_ONE, _NARROW = np.int64(1), np.bool_(False)


@jit
def _cotangents(z, count, place, divisor, row):
  """Turns a row's logits of a chunk into their cotangents; the token's `place` may be elsewhere."""
  values, given = floats(z), floats(row)
  logprob, raw, entropy = given[_LOGPROB], given[_RAW], given[_ENTROPY]
  normaliser, own_entropy = given[_NORMALISER], given[_OWN_ENTROPY]
  raw_normaliser = given[_RAW_NORMALISER]
  if raw == f32(0.0):
    for i in range(count):
      below = values[i] / divisor - normaliser
      values[i] = -exp(below) * (logprob + entropy * (below + own_entropy)) / divisor
  else:
    for i in range(count):
      below = values[i] / divisor - normaliser
      processed = -exp(below) * (logprob + entropy * (below + own_entropy)) / divisor
      values[i] = processed - raw * exp(values[i] - raw_normaliser)
  if place >= 0 and place < count:
    values[place] = values[place] + (logprob / divisor + raw)


@jit
def _count_slabs(arguments):
  return ffi.dimension(arguments, 1, 0)


# Operands: 0 normed f32[n, d], 1 table f[r, w, d], 2 temperature f32[n], 3 tokens i32[n], 4 what is
# given f32[n, 6], 5 sizes i32[2]: valid rows, the table's first slab. Results: the normed rows' by
# slab f32[r, n, d], the table's f[r, w, d], scratch.
@jit
def _differentiate(arguments, results, first, last, worker):
  """Items are slabs."""
  num_rows = ffi.integer(arguments, 5, 0)
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  width = ffi.dimension(arguments, 1, 1)
  is_bf16 = ffi.is_bfloat16(arguments, 1)
  size = 2 if is_bf16 else 4
  temperature, tokens = floats(ffi.address(arguments, 2)), integers(ffi.address(arguments, 3))
  chunk = min(CHUNK, width)
  panels = ffi.address(results, 2) + 4 * worker * ffi.dimension(results, 2, 1)
  logits = panels + 4 * floats_of_panels(n, d, chunk)
  sums = logits + 4 * min(n, ROWS) * chunk
  for slab in range(first, last):
    for begin in range(0, width, CHUNK):
      columns = min(CHUNK, width - begin)
      offset = size * (slab * width + begin) * d
      source, target = ffi.address(arguments, 1) + offset, ffi.address(results, 1) + offset
      first_id = (ffi.integer(arguments, 5, 1) + slab) * width + begin
      total = sums if is_bf16 else target
      if num_rows <= 0:
        zero_row(total, False, columns * d)
      for row in range(0, num_rows, ROWS):
        rows = min(ROWS, num_rows - row)
        normed = ffi.address(arguments, 0) + 4 * row * d
        chunk_logits(
          normed, rows, d, source, is_bf16, columns, row > 0, n <= ROWS, panels, logits, chunk
        )  # fmt: skip
        for i in range(row, row + rows):
          _cotangents(
            logits + 4 * (i - row) * chunk, columns, tokens[i] - first_id,
            divisor_of(temperature[i]), ffi.address(arguments, 4) + 4 * _COLUMNS * i,
          )  # fmt: skip
        goes_on = 1 if row > 0 else 0
        products.product(
          logits, _ONE, chunk, columns, normed, _NARROW, d, d, rows, total, d, goes_on
        )  # fmt: skip
        goes_on = 1 if begin > 0 else 0
        products.product(
          logits, chunk, _ONE, rows, source, is_bf16, d, d, columns,
          ffi.address(results, 0) + 4 * (slab * n + row) * d, d, goes_on,
        )  # fmt: skip
      if is_bf16:
        write_row(sums, target, True, columns * d)


@jit
def _cost(arguments):
  """Three products of every row with the table."""
  ids = ffi.dimension(arguments, 1, 0) * ffi.dimension(arguments, 1, 1)
  return 3 * ffi.integer(arguments, 5, 0) * ids * ffi.dimension(arguments, 0, 1)


_GRADIENT = ffi.Handler("seerjax_head_gradient", _count_slabs, _differentiate, _cost)


@jit
def _one(arguments):
  return 1


@jit
def _add_slabs(parts, slabs, step, count, target):
  """Adds f32[slabs, count], `step` floats between two, as `parallel.tree_sum`, in place."""
  apart = 1
  while apart < slabs:
    for slab in range(0, slabs, 2 * apart):
      left, right = floats(parts + 4 * slab * step), floats(parts + 4 * (slab + apart) * step)
      for i in range(count):
        left[i] = left[i] + right[i]
    apart = 2 * apart
  whole, out = floats(parts), floats(target)
  for i in range(count):
    out[i] = whole[i]


# Operands: 0 hidden f[n, d], 1 norm f[d], 2 normed rows' cotangents by slab f32[r, n, d], 3 sizes
# i32[2]: valid rows, the bits of the norm's eps. Results: hidden's f[n, d], the norm's f[d],
# scratch.
@jit
def _through_norm(arguments, results, first, last, worker):
  """One item: the norm's scale is one chain over rows."""
  num_rows, eps = ffi.integer(arguments, 3, 0), float_of(integers(ffi.address(arguments, 3))[1])
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  slabs = ffi.dimension(arguments, 2, 0)
  is_bf16 = ffi.is_bfloat16(arguments, 0)
  size = 2 if is_bf16 else 4
  total = ffi.address(results, 2)
  scale, x, cotangent, parts = total + 4 * d, total + 8 * d, total + 12 * d, total + 16 * d
  zero_row(total, False, d)
  read_row(ffi.address(arguments, 1), ffi.is_bfloat16(arguments, 1), scale, d)
  sums, scales, row_x, row_g = floats(total), floats(scale), floats(x), floats(cotangent)
  rounded = floats(parts)
  for row in range(num_rows):
    for slab in range(slabs):
      source = ffi.address(arguments, 2) + 4 * (slab * n + row) * d
      read_row(source, False, parts + 4 * slab * d, d)
    _add_slabs(parts, slabs, d, d, cotangent)
    read_row(ffi.address(arguments, 0) + size * row * d, is_bf16, x, d)
    inverse = norms.inverse_root(x, d, eps)
    for i in range(d):
      row_x[i] = row_x[i] * inverse
      rounded[i] = row_x[i]
    round_row(parts, is_bf16, d)
    for i in range(d):
      sums[i] = fma(row_g[i], rounded[i], sums[i])
      row_g[i] = row_g[i] * scales[i]
    mean = vectors.dot_of(cotangent, x, d) / f32(d)
    for i in range(d):
      row_g[i] = inverse * (row_g[i] - row_x[i] * mean)
    write_row(cotangent, ffi.address(results, 0) + size * row * d, is_bf16, d)
  zero_row(
    ffi.address(results, 0) + size * max(num_rows, 0) * d, is_bf16, (n - max(num_rows, 0)) * d
  )  # fmt: skip
  write_row(total, ffi.address(results, 1), ffi.is_bfloat16(arguments, 1), d)


_THROUGH_NORM = ffi.Handler("seerjax_head_norm_gradient", _one, _through_norm)


def gradient(
  stage: Stage, weights: Any, rows: Any, num_rows: Array, scored: Scored, cotangent: TokenScores
) -> tuple[Array, Array, Array]:
  """The gradient of the tokens' scores.

  Args:
    stage: of the model.
    weights: as for `Backend.head`.
    rows: as for `Backend.head`.
    num_rows: i32[]; rows from there on have none.
    scored: what `head_forward.scored_rows` said of them.
    cotangent: of its scores.

  Returns:
    (of the final norm f[d], of the local table f[r, w, d], of the hidden rows f[n, d]).
  """
  hidden, _, parameters, *_ = rows
  table, norm = weights["head"], weights["final_norm"]
  slabs, width, d = table.shape
  count, chunk = hidden.shape[0], min(CHUNK, width)
  normed, _ = prepared_rows(stage, weights, rows, num_rows)
  found = (scored.normaliser, scored.raw_normaliser, scored.scores.entropy)
  scratch = panels_size(count, d, chunk) + min(count, ROWS) * chunk + chunk * d
  by_slab, table_gradient, _ = _GRADIENT(
    [
      floats_shape(slabs, count, d),
      jax.ShapeDtypeStruct(table.shape, table.dtype),
      floats_shape(threads.number(), scratch),
    ],
    normed,
    table,
    parameters.temperature,
    scored.tokens,
    jnp.stack([*cotangent, *found], axis=1),
    sizes_of(num_rows, first_slab(stage, table)),
  )
  by_slab = parallel.gather_slabs(by_slab, stage.axis)
  hidden_gradient, norm_gradient, _ = _THROUGH_NORM(
    [
      jax.ShapeDtypeStruct(hidden.shape, hidden.dtype),
      jax.ShapeDtypeStruct(norm.shape, norm.dtype),
      floats_shape(1, (4 + by_slab.shape[0]) * d),
    ],
    hidden,
    norm,
    by_slab,
    sizes_of(num_rows, eps_bits(stage)),
  )
  return norm_gradient, table_gradient, hidden_gradient
