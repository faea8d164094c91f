"""Native gradients of the parts of a layer around attention.

Rows are processed in chunks of `ROWS`. One handler recomputes a chunk from the layer's inputs and
goes back through it; its results include the factors of weight gradients, x and the cotangent of
x @ W. Another handler adds x^T @ cotangent to a weight's gradient: one chain over all rows, in
batch order. If a mesh may shard the contraction of a row's gradient, it is one chain per slab, and
slabs are added in the tree; so are the slabs' parts of the gradients of the heads' norms.

Cotangents are rounded to the compute dtype where values are. An adapter's scale, cos and sin have
no gradient.
"""

from __future__ import annotations

import numpy as np

from seerjax.backends.native import ffi, norms, products, products_over_rows
from seerjax.backends.native.layer_parts import (
  BIAS,
  COS,
  DOWN,
  DOWN_A,
  DOWN_B,
  GATE_UP,
  GATE_UP_A,
  GATE_UP_B,
  KEY_NORM,
  MIXED,
  MLP_NORM,
  NO,
  NORM,
  ONE,
  OUT,
  OUT_A,
  OUT_B,
  QKV,
  QKV_A,
  QKV_B,
  QUERY_NORM,
  SCALARS,
  SCALARS_AFTER,
  SIN,
  SIZES,
  SIZES_AFTER,
  WAITING,
  ZERO,
  add_row,
  is_apart,
  low_product,
  merge,
  mlp_inputs,
  product,
  read_rows,
  scalar,
  scale_low,
  scale_row,
  scratch_of,
  slab_of,
  uses_gelu,
  waiting,
  weights_of,
)
from seerjax.backends.native.numbers import (
  exp,
  f32,
  gelu_and_slope,
  inlined,
  jit,
  read_row,
  round_row,
  write_row,
  zero_row,
)
from seerjax.backends.native.pointers import floats

# Rows that go back together and share a transposed panel of weights.
CHUNK_ROWS = 256
# Rows of a chunk of the batch, which is recomputed as a whole in memory: for every chunk, the
# gradients of all weights are read and written once.
ROWS = 2048
_ROWS = np.int64(ROWS)
# Rows of a weight's gradient in one item of work, for half of its columns: for every item in a
# column, the cotangents are read once.
_GRADIENT_ROWS = products_over_rows.COLUMNS
_SCRATCH_INPUTS, _SCRATCH_AFTER = np.int64(8), np.int64(15)


@jit
def back(arguments, operand, layer, slab, x, x_row, rows, out, out_row, is_added, panel):
  """Computes out[rows, a] (+)= x[rows, b] @ a transposed slab f[a, b] of weights f[l, r, a, b]."""
  columns, k = ffi.dimension(arguments, operand, 2), ffi.dimension(arguments, operand, 3)
  products.product_transposed(
    x, x_row, rows, slab_of(arguments, operand, layer, slab), ffi.is_bfloat16(arguments, operand),
    k, columns, k, out, out_row, is_added, panel,
  )  # fmt: skip


@jit
def back_slab(arguments, operand, b_operand, layer, slab, rows, x, x_row, sums, lows, panel):
  """Computes a slab's part of the cotangent of the input: x @ W^T, and x @ B^T of its adapter."""
  d, rank = ffi.dimension(arguments, operand, 2), ffi.dimension(arguments, b_operand, 2)
  back(arguments, operand, layer, slab, x, x_row, rows, sums, d, ZERO, panel)
  back(arguments, b_operand, ZERO, slab, x, x_row, rows, lows, rank, ZERO, panel)


@jit
def back_sum(arguments, a_operand, scale, rows, sums, lows, low, panel):
  """Computes the cotangent of the input of all slabs: their sum + scale * lows @ A^T, rounded.

  Args:
    sums (address): f32[rows, a], the slabs' sum from `back_slab`.
    lows (address): f32[rows, rank], likewise.
    low (address): f32[rows, rank], written: the cotangent of x @ A.
  """
  is_bf16 = ffi.is_bfloat16(arguments, 0)
  d, rank = ffi.dimension(arguments, 0, 1), ffi.dimension(arguments, a_operand, 3)
  back_low(lows, scale, is_bf16, rows * rank, low)
  back(arguments, a_operand, ZERO, ZERO, low, rank, rows, sums, d, ONE, panel)
  round_row(sums, is_bf16, rows * d)


@jit
def _back_columns(
  arguments, operand, a_operand, b_operand, layer, scale, rows, x, sums, lows, low, panel
):
  """Computes the cotangent of the input of all slabs from the columns' cotangents f32[rows, r, b].

  Args:
    sums: f32[WAITING, rows, a].
    lows: f32[WAITING, rows, rank].
    low: f32[rows, rank], written: the cotangent of x @ A.
  """
  slabs, d = ffi.dimension(arguments, operand, 1), ffi.dimension(arguments, operand, 2)
  columns, rank = ffi.dimension(arguments, operand, 3), ffi.dimension(arguments, a_operand, 3)
  for slab in range(slabs):
    place = 4 * waiting(slab) * rows
    back_slab(
      arguments, operand, b_operand, layer, slab, rows, x + 4 * slab * columns, slabs * columns,
      sums + place * d, lows + place * rank, panel,
    )  # fmt: skip
    merge(sums, slab, rows * d)
    merge(lows, slab, rows * rank)
  back_sum(arguments, a_operand, scale, rows, sums, lows, low, panel)


@jit
def back_low(lows, scale, is_bf16, count, low):
  """Computes low = scale * lows after rounding lows: from B's input to x @ A."""
  round_row(lows, is_bf16, count)
  values, out = floats(lows), floats(low)
  for i in range(count):
    out[i] = values[i] * scale


@inlined
def live_of_chunk(arguments, sizes, begin, rows):
  """Returns how many of a chunk's `rows` from `begin` on are valid."""
  left = ffi.integer(arguments, sizes, 0) - ffi.integer(arguments, sizes, 2) - begin
  return min(max(left, 0), rows)


@jit
def blocks_of_chunk(arguments):
  """Returns the number of items of a call: blocks of 4 rows of a chunk of the first operand."""
  rows = min(ffi.dimension(arguments, 0, 0), _ROWS)
  return (rows + products.BLOCK_ROWS - 1) // products.BLOCK_ROWS


@jit
def _back_gate(values, other, features, is_gelu, is_bf16, inner, of_gate_up):
  """Recomputes the inner features of a row, and computes the cotangents of gate and up.

  Args:
    values: f32[2 * features], gate and up.
    other: f32[features], the cotangent of the inner features.
  """
  gate, up, given = floats(values), floats(values + 4 * features), floats(other)
  out, of_gate, of_up = floats(inner), floats(of_gate_up), floats(of_gate_up + 4 * features)
  if is_gelu:
    for i in range(features):
      value, slope = gelu_and_slope(gate[i])
      out[i] = value * up[i]
      of_up[i] = given[i] * value
      of_gate[i] = given[i] * up[i] * slope
    round_row(inner, is_bf16, features)
    return
  for i in range(features):
    below = f32(1.0) + exp(-gate[i])
    silu, sigmoid = gate[i] / below, f32(1.0) / below
    out[i] = silu * up[i]
    of_up[i] = given[i] * silu
    of_gate[i] = given[i] * up[i] * (sigmoid + silu * (f32(1.0) - sigmoid))
  round_row(inner, is_bf16, features)


@jit
def gate_up_again(arguments, slab, rows, normed, low, gate_up):
  """Recomputes a slab's gate and up, f32[rows, 2 i]."""
  layer, d = ffi.integer(arguments, SIZES_AFTER, 1), ffi.dimension(arguments, 0, 1)
  rank = ffi.dimension(arguments, GATE_UP_A, 3)
  product(arguments, GATE_UP, layer, slab, normed, d, rows, gate_up, ZERO)
  product(arguments, GATE_UP_B, ZERO, slab, low, rank, rows, gate_up, ONE)


@jit
def of_mlp_slab(arguments, slab, rows, gate_up, dy, of_down, of_gate_up, inner, to, given, panel):
  """Recomputes a slab's inner features and its part of inner @ A; computes gate-up cotangents.

  Args:
    gate_up (address): f32[rows, 2 i].
    given (address): scratch, f32[rows, i].
  """
  is_bf16, layer = ffi.is_bfloat16(arguments, 0), ffi.integer(arguments, SIZES_AFTER, 1)
  d, down_rank = ffi.dimension(arguments, 0, 1), ffi.dimension(arguments, DOWN_A, 3)
  slabs, features = ffi.dimension(arguments, DOWN, 1), ffi.dimension(arguments, DOWN, 2)
  width = slabs * features
  back(arguments, DOWN, layer, slab, dy, d, rows, given, features, ZERO, panel)
  back(arguments, DOWN_A, ZERO, slab, of_down, down_rank, rows, given, features, ONE, panel)
  round_row(given, is_bf16, rows * features)
  for row in range(rows):
    at = row * width + slab * features
    _back_gate(
      gate_up + 8 * row * features, given + 4 * row * features, features, uses_gelu(arguments),
      is_bf16, inner + 4 * at, of_gate_up + 8 * at,
    )  # fmt: skip
  product(arguments, DOWN_A, ZERO, slab, inner + 4 * slab * features, width, rows, to, ZERO)


@jit
def _of_mixed(arguments, results, begin, rows, dx, of_out, scratch, panel):
  """Writes the gradient of the attention output, slab by slab of its columns."""
  is_bf16, layer = ffi.is_bfloat16(arguments, 0), ffi.integer(arguments, SIZES_AFTER, 1)
  d, rank = ffi.dimension(arguments, 0, 1), ffi.dimension(arguments, OUT_A, 3)
  slabs, columns = ffi.dimension(arguments, OUT, 1), ffi.dimension(arguments, OUT, 2)
  width = 2 if is_bf16 else 4
  for slab in range(slabs):
    back(arguments, OUT, layer, slab, dx, d, rows, scratch, columns, ZERO, panel)
    back(arguments, OUT_A, ZERO, slab, of_out, rank, rows, scratch, columns, ONE, panel)
    for row in range(rows):
      place = ((begin + row) * slabs + slab) * columns
      target = ffi.address(results, 1) + width * place
      write_row(scratch + 4 * row * columns, target, is_bf16, columns)


@jit
def back_to_attended(
  arguments, results, begin, rows, x, scale, sums, dy, dx, of_scale, lows, of_out, mixed, panel
):
  """Goes from the MLP's norm back to hidden rows and attention output, and writes both gradients.

  Args:
    x (address): f32[rows, d], hidden rows after attention.
    scale (address): f32[d], scale of the norm.
    sums (address): cotangent of the norm of the rows.
    dy (address): cotangent of the layer's result.
    dx (address): written, the cotangent of the projection.
    of_scale (address): written, the cotangent of scale.
    lows (address): scratch.
    of_out (address): written, the cotangent of x @ A.
    mixed (address): scratch.
  """
  is_bf16, d = ffi.is_bfloat16(arguments, 0), ffi.dimension(arguments, 0, 1)
  out_rank, eps = ffi.dimension(arguments, OUT_A, 3), scalar(arguments, SCALARS_AFTER, 0)
  width, out_scale = 2 if is_bf16 else 4, scalar(arguments, SCALARS_AFTER, 1)
  for row in range(rows):
    at = 4 * row * d
    norms.norm_row_gradient(
      x + at, scale, d, eps, is_bf16, ffi.is_bfloat16(arguments, MLP_NORM), sums + at, dx + at,
      of_scale + at,
    )  # fmt: skip
  if not is_apart(arguments):
    add_row(dx, dy, rows * d)
  round_row(dx, is_bf16, rows * d)
  write_row(dx, ffi.address(results, 0) + width * begin * d, is_bf16, rows * d)
  back(arguments, OUT_B, ZERO, ZERO, dx, d, rows, lows, out_rank, ZERO, panel)
  back_low(lows, out_scale, is_bf16, rows * out_rank, of_out)
  _of_mixed(arguments, results, begin, rows, dx, of_out, mixed, panel)


# Operands: those of `after_attention`, with the chunk's first row as the last size; the cotangent
# f[n, d]; the values kept by `layers_kept`, hidden rows after attention f32[n, d] and gate and up
# f32[r, n, 2 i]; the arrays that results 0 and 1 overwrite. Results: gradients f[n, d] and
# f[n, k, g, c]; for the chunk's rows, as f32, the attention output, the projection's low rank and
# its cotangent, the cotangent of the projection, the norm's scale; the norm, its low rank and
# cotangent, the cotangent of gate and up; the inner features, their low rank and cotangent, the
# given cotangent.
@jit
def _after_attention(arguments, results, first, last, worker):
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  is_bf16, layer = ffi.is_bfloat16(arguments, 0), ffi.integer(arguments, SIZES_AFTER, 1)
  slabs, inputs = ffi.dimension(arguments, OUT, 1), ffi.dimension(arguments, OUT, 2)
  features, base = ffi.dimension(arguments, DOWN, 2), ffi.integer(arguments, SIZES_AFTER, 2)
  out_rank, rank = ffi.dimension(arguments, OUT_A, 3), ffi.dimension(arguments, GATE_UP_A, 3)
  down_rank, gate_up_scale = (
    ffi.dimension(arguments, DOWN_A, 3), scalar(arguments, SCALARS_AFTER, 2)
  )  # fmt: skip
  down_scale, size = scalar(arguments, SCALARS_AFTER, 3), min(n, CHUNK_ROWS)
  scale = scratch_of(results, _SCRATCH_AFTER, worker)
  mixed_back = scale + 4 * d
  sums = mixed_back + 4 * size * max(features, inputs)
  lows = sums + 4 * WAITING * size * d
  panel = lows + 4 * WAITING * size * max(out_rank, rank, down_rank)
  width = 2 if is_bf16 else 4
  read_rows(arguments, MLP_NORM, ZERO, ONE, d, scale)
  end = products.BLOCK_ROWS * last
  for begin in range(products.BLOCK_ROWS * first, end, CHUNK_ROWS):
    rows = live_of_chunk(arguments, SIZES_AFTER, begin, min(CHUNK_ROWS, end - begin))
    if rows == 0:
      continue
    mixed = ffi.address(results, 2) + 4 * begin * slabs * inputs
    out_low, of_out = (
      ffi.address(results, 3) + 4 * begin * out_rank, ffi.address(results, 4) + 4 * begin * out_rank
    )  # fmt: skip
    dx, of_scale = ffi.address(results, 5) + 4 * begin * d, ffi.address(results, 6) + 4 * begin * d
    normed, low = (
      ffi.address(results, 7) + 4 * begin * d,
      ffi.address(results, 8) + 4 * begin * rank,
    )
    of_low = ffi.address(results, 9) + 4 * begin * rank
    of_gate_up = ffi.address(results, 10) + 8 * begin * slabs * features
    inner = ffi.address(results, 11) + 4 * begin * slabs * features
    down_low = ffi.address(results, 12) + 4 * begin * down_rank
    of_down = ffi.address(results, 13) + 4 * begin * down_rank
    dy = ffi.address(results, 14) + 4 * begin * d
    x = ffi.address(arguments, 15) + 4 * (base + begin) * d
    read_rows(arguments, MIXED, base + begin, rows, slabs * inputs, mixed)
    read_row(ffi.address(arguments, 14) + width * (base + begin) * d, is_bf16, dy, rows * d)
    for slab in range(slabs):
      low_product(
        arguments, SIZES_AFTER, OUT_A, slab, ZERO, mixed + 4 * slab * inputs, slabs * inputs, rows,
        lows + 4 * waiting(slab) * rows * out_rank,
      )  # fmt: skip
      merge(lows, slab, rows * out_rank)
    scale_low(arguments, SIZES_AFTER, SCALARS_AFTER, ZERO, ZERO, out_rank, rows, lows)
    read_row(lows, NO, out_low, rows * out_rank)
    mlp_inputs(arguments, ZERO, rows, x, scale, normed, low)
    back(arguments, DOWN_B, ZERO, ZERO, dy, d, rows, lows, down_rank, ZERO, panel)
    back_low(lows, down_scale, is_bf16, rows * down_rank, of_down)
    for slab in range(slabs):
      gate_up = ffi.address(arguments, 16) + 8 * (slab * n + base + begin) * features
      of_mlp_slab(
        arguments, slab, rows, gate_up, dy, of_down, of_gate_up, inner,
        lows + 4 * waiting(slab) * rows * down_rank, mixed_back, panel,
      )  # fmt: skip
      merge(lows, slab, rows * down_rank)
    scale_row(lows, down_scale, is_bf16, rows * down_rank)
    read_row(lows, NO, down_low, rows * down_rank)
    _back_columns(
      arguments, GATE_UP, GATE_UP_A, GATE_UP_B, layer, gate_up_scale, rows, of_gate_up, sums, lows,
      of_low, panel,
    )  # fmt: skip
    back_to_attended(
      arguments, results, base + begin, rows, x, scale, sums, dy, dx, of_scale, lows, of_out,
      mixed_back, panel,
    )  # fmt: skip


@jit
def _heads_again(arguments, slab, rows, normed, low, bias, heads):
  """Recomputes a slab's queries and keys before their norms: f32[rows, columns]."""
  is_bf16, d = ffi.is_bfloat16(arguments, 0), ffi.dimension(arguments, 0, 1)
  layer, rank = ffi.integer(arguments, SIZES, 1), ffi.dimension(arguments, QKV_A, 3)
  columns = ffi.dimension(arguments, QKV, 3)
  product(arguments, QKV, layer, slab, normed, d, rows, heads, ZERO)
  product(arguments, QKV_B, ZERO, slab, low, rank, rows, heads, ONE)
  round_row(heads, is_bf16, rows * columns)
  if ffi.dimension(arguments, BIAS, 1) > 0:
    read_rows(arguments, BIAS, slab, ONE, columns, bias)
    for row in range(rows):
      add_row(heads + 4 * row * columns, bias, columns)
    round_row(heads, is_bf16, rows * columns)


@jit
def _rotate_back(head, cos, sin, features):
  """Computes the gradient of a rotation, in place."""
  half = features // 2
  x, c, s = floats(head), floats(cos), floats(sin)
  for i in range(half):
    first, second = x[i], x[i + half]
    x[i] = first * c[i] + second * s[i]
    x[i + half] = second * c[i] - first * s[i]


@jit
def input_scales(arguments, scales):
  """Reads the scales of the norm, and of the heads' norms: f32[d], f32[c], f32[c]."""
  d, c = ffi.dimension(arguments, 0, 1), ffi.dimension(arguments, 12, 3)
  read_rows(arguments, NORM, ZERO, ONE, d, scales)
  if ffi.dimension(arguments, QUERY_NORM, 0) > 0:
    read_rows(arguments, QUERY_NORM, ZERO, ONE, c, scales + 4 * d)
    read_rows(arguments, KEY_NORM, ZERO, ONE, c, scales + 4 * (d + c))


@jit
def input_cotangents(
  arguments, begin, rows, scales, x, again, normed, low, of_qkv, of_query, of_key
):
  """Recomputes norms and low rank of some rows, and computes the cotangents of all slabs' columns.

  Args:
    begin (int): the first row in the batch.
    scales (address): result of `input_scales`, followed by scratch f32[c], f32[columns].
    x (address): written, f32[rows, d]: the hidden rows.
    again (address): scratch, f32[rows, columns].
    normed (address): written, like the four that follow, for these rows.
    low (address): x @ A.
    of_qkv (address): the cotangents of the columns.
    of_query (address): the cotangent of the scale of the queries' norm.
    of_key (address): the cotangent of the scale of the keys' norm.
  """
  d, is_bf16 = ffi.dimension(arguments, 0, 1), ffi.is_bfloat16(arguments, 0)
  is_narrow = ffi.is_bfloat16(arguments, NORM)
  slabs, columns = ffi.dimension(arguments, QKV, 1), ffi.dimension(arguments, QKV, 3)
  heads, group = ffi.dimension(arguments, 12, 1), ffi.dimension(arguments, 12, 2)
  c, rank = ffi.dimension(arguments, 12, 3), ffi.dimension(arguments, QKV_A, 3)
  eps, lora_scale = scalar(arguments, SCALARS, 0), scalar(arguments, SCALARS, 1)
  has_norms = ffi.dimension(arguments, QUERY_NORM, 0) > 0
  width, own = 2 if is_bf16 else 4, heads // slabs
  query_scale = scales + 4 * d
  key_scale = query_scale + 4 * c
  part = key_scale + 4 * c
  bias = part + 4 * c
  read_rows(arguments, ZERO, begin, rows, d, x)
  for row in range(rows):
    at = 4 * row * d
    norms.norm_row(x + at, scales, d, eps, is_bf16, is_narrow, normed + at)
  product(arguments, QKV_A, ZERO, ZERO, normed, d, rows, low, ZERO)
  scale_row(low, lora_scale, is_bf16, rows * rank)
  if has_norms:
    zero_row(of_query, NO, rows * slabs * c)
    zero_row(of_key, NO, rows * slabs * c)
  for slab in range(slabs):
    if has_norms:
      _heads_again(arguments, slab, rows, normed, low, bias, again)
    for row in range(rows):
      place = begin + row
      cos = ffi.address(arguments, COS) + 4 * place * (c // 2)
      sin = ffi.address(arguments, SIN) + 4 * place * (c // 2)
      for head in range(own * (group + 2)):
        to = of_qkv + 4 * ((row * slabs + slab) * columns + head * c)
        is_query, is_key = head < own * group, head < own * (group + 1)
        index = place * heads + slab * own
        if is_query:
          source = ffi.address(arguments, 12) + width * (index * group + head) * c
        elif is_key:
          source = ffi.address(arguments, 13) + width * (index + head - own * group) * c
        else:
          source = ffi.address(arguments, 14) + width * (index + head - own * (group + 1)) * c
        read_row(source, is_bf16, to, c)
        if is_key:
          _rotate_back(to, cos, sin, c)
          round_row(to, is_bf16, c)
        if is_key and has_norms:
          norms.norm_row_gradient(
            again + 4 * (row * columns + head * c), query_scale if is_query else key_scale, c,
            eps, is_bf16, is_narrow, to, to, part,
          )  # fmt: skip
          total = of_query if is_query else of_key
          add_row(total + 4 * (row * slabs + slab) * c, part, c)


@jit
def back_through_norm(arguments, results, begin, rows, x, scale, sums, of_scale):
  """Writes the gradient of hidden rows x, which only the first norm reads."""
  d, is_bf16 = ffi.dimension(arguments, 0, 1), ffi.is_bfloat16(arguments, 0)
  width, eps = 2 if is_bf16 else 4, scalar(arguments, SCALARS, 0)
  for row in range(rows):
    at = 4 * row * d
    norms.norm_row_gradient(
      x + at, scale, d, eps, is_bf16, ffi.is_bfloat16(arguments, NORM), sums + at, sums + at,
      of_scale + at,
    )  # fmt: skip
  write_row(sums, ffi.address(results, 0) + width * begin * d, is_bf16, rows * d)


# Operands: those of `attention_inputs`, with the chunk's first row as the last size; cotangents
# f[n, k, g, c], f[n, k, c] and f[n, k, c]; the array that result 0 overwrites. Results: gradient
# f[n, d]; for the chunk's rows, as f32, the norm, its low rank and cotangent, the cotangent of qkv,
# the norm's scale, the norms' scales of each slab's queries and keys.
@jit
def _attention_inputs(arguments, results, first, last, worker):
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  layer, c = ffi.integer(arguments, SIZES, 1), ffi.dimension(arguments, 12, 3)
  slabs, columns = ffi.dimension(arguments, QKV, 1), ffi.dimension(arguments, QKV, 3)
  rank, base = ffi.dimension(arguments, QKV_A, 3), ffi.integer(arguments, SIZES, 2)
  lora_scale, size = scalar(arguments, SCALARS, 1), min(n, CHUNK_ROWS)
  scales = scratch_of(results, _SCRATCH_INPUTS, worker)
  x = scales + 4 * (d + 3 * c + columns)
  again = x + 4 * size * d
  sums = again + 4 * size * columns
  lows = sums + 4 * WAITING * size * d
  panel = lows + 4 * WAITING * size * rank
  input_scales(arguments, scales)
  end = products.BLOCK_ROWS * last
  for begin in range(products.BLOCK_ROWS * first, end, CHUNK_ROWS):
    rows = live_of_chunk(arguments, SIZES, begin, min(CHUNK_ROWS, end - begin))
    if rows == 0:
      continue
    normed, low = (
      ffi.address(results, 1) + 4 * begin * d,
      ffi.address(results, 2) + 4 * begin * rank,
    )
    of_low = ffi.address(results, 3) + 4 * begin * rank
    of_qkv = ffi.address(results, 4) + 4 * begin * slabs * columns
    of_scale = ffi.address(results, 5) + 4 * begin * d
    of_query = ffi.address(results, 6) + 4 * begin * slabs * c
    of_key = ffi.address(results, 7) + 4 * begin * slabs * c
    input_cotangents(
      arguments, base + begin, rows, scales, x, again, normed, low, of_qkv, of_query, of_key
    )
    _back_columns(
      arguments, QKV, QKV_A, QKV_B, layer, lora_scale, rows, of_qkv, sums, lows, of_low, panel
    )
    back_through_norm(arguments, results, base + begin, rows, x, scales, sums, of_scale)


@inlined
def _slabs_of_gradient(arguments):
  return max(ffi.dimension(arguments, 1, 1), ffi.dimension(arguments, 2, 1))


@jit
def _count_gradient(arguments):
  rows = (ffi.dimension(arguments, 1, 2) + _GRADIENT_ROWS - 1) // _GRADIENT_ROWS
  return 2 * _slabs_of_gradient(arguments) * rows


# Operands: sizes; x f32[m, 1 or r, a]; cotangents f32[m, 1 or r, b]; after the first chunk of rows,
# f32[r, a, b], which the result overwrites: each slab's x^T @ cotangents is added to it. Scratch:
# the transpose of x.
@jit
def _add_gradient(arguments, results, first, last, worker):
  a, b = ffi.dimension(arguments, 1, 2), ffi.dimension(arguments, 2, 2)
  x_slabs, slabs = ffi.dimension(arguments, 1, 1), ffi.dimension(arguments, 2, 1)
  goes_on = 1 if ffi.integer(arguments, ZERO, 2) > 0 else 0
  rows = live_of_chunk(arguments, ZERO, ZERO, ffi.dimension(arguments, 1, 0))
  groups = (a + _GRADIENT_ROWS - 1) // _GRADIENT_ROWS
  half = (b // 2 + products.PANEL - 1) // products.PANEL * products.PANEL
  for item in range(first, last):
    slab, row = item // (2 * groups), item // 2 % groups * _GRADIENT_ROWS
    column = item % 2 * half
    columns = b - column if column > 0 else min(half, b)
    if columns <= 0:
      continue
    x = ffi.address(arguments, 1) + 4 * (min(slab, x_slabs - 1) * a + row)
    given = ffi.address(arguments, 2) + 4 * (min(slab, slabs - 1) * b + column)
    to = ffi.address(results, 0) + 4 * ((slab * a + row) * b + column)
    products_over_rows.add_product(
      x, x_slabs * a, rows, min(_GRADIENT_ROWS, a - row), given, slabs * b, columns, to, b, goes_on,
      scratch_of(results, ONE, worker),
    )  # fmt: skip


@jit
def _cost_after(arguments):
  """A chunk's products, recomputed and backward."""
  weights = weights_of(arguments, OUT) + weights_of(arguments, GATE_UP)
  weights += weights_of(arguments, DOWN)
  return 2 * live_of_chunk(arguments, SIZES_AFTER, ZERO, _ROWS) * weights


@jit
def _cost_of_inputs(arguments):
  """Like `_cost_after`."""
  return 2 * live_of_chunk(arguments, SIZES, ZERO, _ROWS) * weights_of(arguments, QKV)


@jit
def _cost_of_gradient(arguments):
  a, b = ffi.dimension(arguments, 1, 2), ffi.dimension(arguments, 2, 2)
  rows = live_of_chunk(arguments, ZERO, ZERO, ffi.dimension(arguments, 1, 0))
  return rows * _slabs_of_gradient(arguments) * a * b


AFTER = ffi.Handler(
  "seerjax_after_attention_gradient", blocks_of_chunk, _after_attention, _cost_after
)
INPUTS = ffi.Handler(
  "seerjax_attention_inputs_gradient", blocks_of_chunk, _attention_inputs, _cost_of_inputs
)
ADD_GRADIENT = ffi.Handler(
  "seerjax_weight_gradient", _count_gradient, _add_gradient, _cost_of_gradient
)
