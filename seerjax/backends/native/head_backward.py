"""The gradient of the scores of given tokens.

With p and q the processed and raw softmax, H the entropy, t the divisor of logits, and a, b, c the
cotangents of logprob, raw_logprob and entropy, a logit's cotangent is

  -p * (a + c * (log p + H)) / t - b * q        plus (a / t + b) at the token

The table's gradient is one chain over rows, in their order; that of a normed row is one chain per
slab, over its ids, and slabs are added in the tree. Logits are recomputed, a span of ids at a time:
their cotangents are in memory between the computation of the table's gradient, with ids as items,
and of the rows' gradients, with rows as items. Rows with zero cotangents would add zeros, and are
skipped.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from seerjax import parallel
from seerjax.array_typing import Array
from seerjax.backends.native import (
  ffi,
  norms,
  products,
  products_over_rows,
  soft_caps,
  threads,
  vectors,
)
from seerjax.backends.native.head_forward import (
  ROWS,
  Scored,
  cap_bits,
  divisor_of,
  eps_bits,
  final_norm,
  first_slab,
  floats_shape,
  prepared_rows,
  sizes_of,
)
from seerjax.backends.native.numbers import (
  exp,
  f32,
  inlined,
  jit,
  read_row,
  round_row,
  write_row,
  zero_row,
)
from seerjax.backends.native.pointers import float_of, floats, fma, integers
from seerjax.backends.protocol import HeadStage
from seerjax.ops import tiles
from seerjax.types import TokenScores

# Columns of a tensor f32[n, 6]: cotangents, then results of the forward pass.
_LOGPROB, _RAW, _ENTROPY, _NORMALISER, _RAW_NORMALISER, _OWN_ENTROPY = range(6)
_COLUMNS = 6
# Ids of a slab with cotangents in memory together.
_SPAN = np.int64(32 * products.PANEL)
# Minimum run of rows without a loss (such as prompts) that is skipped: shorter runs do not pay off.
_GAP = 32
# Not literals for numba, which would compile a product anew for each literal.
_ZERO, _ONE = np.int64(0), np.int64(1)


@jit
def _cotangents(z, count, place, divisor, row, cap, slopes):
  """Turns a row's logits of a chunk into cotangents in place; `place` may be outside the chunk.

  `slopes` is scratch f32[count] for a soft cap.
  """
  values, given = floats(z), floats(row)
  if cap > f32(0.0):
    soft_caps.cap_row_for_gradient(z, cap, count, slopes)
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
  if cap > f32(0.0):
    soft_caps.scale_row_by(z, slopes, count)


@inlined
def _is_wanted(given, row):
  """Returns whether a row's scores have a nonzero cotangent."""
  own = floats(given + 4 * _COLUMNS * row)
  return own[_LOGPROB] != f32(0.0) or own[_RAW] != f32(0.0) or own[_ENTROPY] != f32(0.0)


@jit
def _first_wanted(given, row, last):
  """Returns the first wanted row from `row` on; `last` if there is none before it."""
  while row < last and not _is_wanted(given, row):
    row += 1
  return row


@jit
def _end_of_run(given, row, last):
  """Returns the end of a run of rows with fewer than `_GAP` successive unwanted ones."""
  end = row + 1
  while row < last and row - end < _GAP:
    if _is_wanted(given, row):
      end = row + 1
    row += 1
  return end


@inlined
def _span_of(arguments, place):
  """Returns how many ids of each slab a call processes, from the first id in its sizes on."""
  begin = ffi.integer(arguments, place, 2)
  return min(_SPAN, ffi.dimension(arguments, 1, 1) - begin)


@jit
def _count_panels(arguments):
  panels = (_span_of(arguments, 5) + products.PANEL - 1) // products.PANEL
  return ffi.dimension(arguments, 1, 0) * panels


# Operands: 0 normed f32[n, d], 1 table f[r, w, d], 2 temperature f32[n], 3 tokens i32[n],
# 4 cotangents and results f32[n, 6], 5 sizes i32[4]: valid rows, the table's first slab, the first
# id of each slab, the bits of the logits' soft cap, 6 the array that result 1 overwrites. Results:
# the logits' cotangents f32[r, n, s], the table's gradient f[r, w, d], scratch.
@jit
def _differentiate(arguments, results, first, last, worker):
  """Computes logits' cotangents and the table's gradient; items are panels of ids of a span."""
  num_rows, span_begin = ffi.integer(arguments, 5, 0), ffi.integer(arguments, 5, 2)
  cap = float_of(integers(ffi.address(arguments, 5))[3])
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  width, step = ffi.dimension(arguments, 1, 1), ffi.dimension(results, 0, 2)
  is_bf16 = ffi.is_bfloat16(arguments, 1)
  size = 2 if is_bf16 else 4
  temperature, tokens = floats(ffi.address(arguments, 2)), integers(ffi.address(arguments, 3))
  given, span = ffi.address(arguments, 4), _span_of(arguments, 5)
  panels = (span + products.PANEL - 1) // products.PANEL
  panel = ffi.address(results, 2) + 4 * worker * ffi.dimension(results, 2, 1)
  turned = panel + 4 * products.PANEL * d
  slopes = turned + 4 * products.PANEL * products_over_rows.TURNED
  sums = slopes + 4 * products.PANEL
  for item in range(first, last):
    slab, column = item // panels, item % panels * products.PANEL
    columns, place = min(products.PANEL, span - column), slab * width + span_begin + column
    source, target = (
      ffi.address(arguments, 1) + size * place * d, ffi.address(results, 1) + size * place * d
    )  # fmt: skip
    first_id = ffi.integer(arguments, 5, 1) * width + place
    total = sums if is_bf16 else target
    products.pack_transposed(source, is_bf16, d, columns, d, panel)
    goes_on, begin = 0, _first_wanted(given, _ZERO, num_rows)
    if begin >= num_rows:
      zero_row(total, False, columns * d)
    while begin < num_rows:
      end = _end_of_run(given, begin, num_rows)
      for row in range(begin, end, products_over_rows.TURNED):
        rows = min(products_over_rows.TURNED, end - row)
        normed = ffi.address(arguments, 0) + 4 * row * d
        logits = ffi.address(results, 0) + 4 * ((slab * n + row) * step + column)
        products.product_of_panel(normed, d, rows, panel, is_bf16, columns, d, logits, step, _ZERO)
        for i in range(row, row + rows):
          _cotangents(
            logits + 4 * (i - row) * step, columns, tokens[i] - first_id,
            divisor_of(temperature[i]), given + 4 * _COLUMNS * i, cap, slopes,
          )  # fmt: skip
        products_over_rows.add_product(
          logits, step, rows, columns, normed, d, d, total, d, goes_on, turned
        )
        goes_on = 1
      begin = _first_wanted(given, end, num_rows)
    if is_bf16:
      write_row(sums, target, True, columns * d)


@jit
def _cost(arguments):
  """Two products of every row with the span."""
  ids = ffi.dimension(arguments, 1, 0) * _span_of(arguments, 5)
  return 2 * ffi.integer(arguments, 5, 0) * ids * ffi.dimension(arguments, 0, 1)


_GRADIENT = ffi.Handler("seerjax_head_gradient", _count_panels, _differentiate, _cost)


@jit
def _count_row_blocks(arguments):
  n = ffi.dimension(arguments, 0, 1)
  return ffi.dimension(arguments, 1, 0) * ((n + ROWS - 1) // ROWS)


# Operands: 0 the logits' cotangents f32[r, n, s], 1 table f[r, w, d], 2 sizes as in
# `_differentiate`, 3 the array that the result overwrites, 4 cotangents and results f32[n, 6].
# Results: the normed rows' cotangents by slab f32[r, n, d], scratch.
@jit
def _differentiate_rows(arguments, results, first, last, worker):
  """Computes the normed rows' cotangents by slab; items are blocks of rows of a slab."""
  num_rows, begin = ffi.integer(arguments, 2, 0), ffi.integer(arguments, 2, 2)
  n, step = ffi.dimension(arguments, 0, 1), ffi.dimension(arguments, 0, 2)
  width, d = ffi.dimension(arguments, 1, 1), ffi.dimension(arguments, 1, 2)
  is_bf16, given = ffi.is_bfloat16(arguments, 1), ffi.address(arguments, 4)
  size, blocks = 2 if is_bf16 else 4, (n + ROWS - 1) // ROWS
  goes_on, item = 1 if begin > 0 else 0, first
  while item < last:
    slab, done = item // blocks, item % blocks * ROWS
    item = min(last, (slab + 1) * blocks)
    end = min((item - slab * blocks) * ROWS, num_rows)
    to = ffi.address(results, 0) + 4 * slab * n * d
    while done < end:
      row = _first_wanted(given, done, end)
      if begin == 0:
        zero_row(to + 4 * done * d, False, (row - done) * d)
      done = row
      if row < end:
        done = _end_of_run(given, row, end)
        products.product(
          ffi.address(arguments, 0) + 4 * (slab * n + row) * step, step, _ONE, done - row,
          ffi.address(arguments, 1) + size * (slab * width + begin) * d, is_bf16, d, d,
          _span_of(arguments, 2), to + 4 * row * d, d, goes_on,
        )  # fmt: skip


@jit
def _cost_of_rows(arguments):
  ids = ffi.dimension(arguments, 1, 0) * _span_of(arguments, 2)
  return ffi.integer(arguments, 2, 0) * ids * ffi.dimension(arguments, 1, 2)


_ROWS_GRADIENT = ffi.Handler(
  "seerjax_head_rows_gradient", _count_row_blocks, _differentiate_rows, _cost_of_rows
)


@jit
def _one(arguments):
  return 1


@jit
def _add_slabs(parts, slabs, step, count, target):
  """Adds f32[slabs, count], `step` floats apart, like `parallel.tree_sum`, in place."""
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
# i32[2]: valid rows, the bits of the norm's eps. Results: gradients of hidden f[n, d] and of the
# norm f[d], scratch.
@jit
def _through_norm(arguments, results, first, last, worker):
  """Goes back through the norm, in one item: the gradient of its scale is one chain over rows."""
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
    round_row(parts, ffi.is_bfloat16(arguments, 1), d)
    for i in range(d):
      sums[i] = fma(row_g[i], rounded[i], sums[i])
      row_g[i] = row_g[i] * scales[i]
    mean = vectors.dot_of(cotangent, x, d) / f32(d)
    for i in range(d):
      row_g[i] = inverse * (row_g[i] - row_x[i] * mean)
    write_row(cotangent, ffi.address(results, 0) + size * row * d, is_bf16, d)
  zero_row(
    ffi.address(results, 0) + size * max(num_rows, 0) * d, is_bf16, (n - max(num_rows, 0)) * d
  )
  write_row(total, ffi.address(results, 1), ffi.is_bfloat16(arguments, 1), d)


_THROUGH_NORM = ffi.Handler("seerjax_head_norm_gradient", _one, _through_norm)


def gradient(
  stage: HeadStage,
  weights: Any,
  rows: Any,
  num_rows: Array,
  scored: Scored,
  cotangent: TokenScores,
) -> tuple[Array, Array, Array]:
  """Returns the gradient of the tokens' scores.

  Args:
    stage: stage of the model.
    weights: as for `Backend.head`.
    rows: as for `Backend.head`.
    num_rows: i32[]; rows from there on have no gradient.
    scored: result of `head_forward.scored_rows`.
    cotangent: cotangent of the scores.

  Returns:
    Gradients of the final norm f[d], of the local table f[r, w, d], of the hidden rows f[n, d].
  """
  hidden, _, parameters, *_ = rows
  table, norm = weights["head"], final_norm(stage, weights)
  slabs, width, d = table.shape
  count, span = hidden.shape[0], min(width, int(_SPAN))
  normed, _ = prepared_rows(stage, weights, rows, num_rows)
  found = (scored.normaliser, scored.raw_normaliser, scored.scores.entropy)
  given = jnp.stack([*cotangent, *found], axis=1)
  own = floats_shape(threads.number(), products.PANEL * (2 * d + products_over_rows.TURNED + 1))

  def body(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
    by_slab, table_gradient = carry
    sizes = sizes_of(num_rows, first_slab(stage, table), index * span, cap_bits(stage))
    cotangents, table_gradient, _ = _GRADIENT(
      [floats_shape(slabs, count, span), jax.ShapeDtypeStruct(table.shape, table.dtype), own],
      normed,
      table,
      parameters.temperature,
      scored.tokens,
      given,
      sizes,
      table_gradient,
      aliases={6: 1},
    )
    by_slab, _ = _ROWS_GRADIENT(
      [floats_shape(slabs, count, d), floats_shape(threads.number(), 0)],
      cotangents,
      table,
      sizes,
      by_slab,
      given,
      aliases={3: 0},
    )
    return by_slab, table_gradient

  carry = (
    tiles.late_zeros((slabs, count, d), jnp.float32, given),
    tiles.late_zeros(table.shape, table.dtype, given),
  )
  spans = -(-width // span)
  if spans > 1:
    by_slab, table_gradient = lax.fori_loop(jnp.int32(0), jnp.int32(spans), body, carry)
  else:
    by_slab, table_gradient = body(jnp.int32(0), carry)
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
  return norm_gradient.astype(weights["final_norm"].dtype), table_gradient, hidden_gradient
