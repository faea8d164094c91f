"""The part of a layer after attention with a mixture of experts (`models.experts`).

    parted_layers.attended   output projection, residual
    parted_layers.gated      the shared MLP, where there is one
    mixture                  norm, router, experts, residual           one handler, in stages:

        rows: norm, logits, choice | once: picks sorted by expert | expert, columns: gate, up,
        product | expert, columns: down | rows: weighted sums by slab, slabs' sums, residual

Where a thread has an expert's whole width, it goes on to the expert's down while the rows are in a
near cache. An expert's weights are read once for all of its rows. Adapters continue the chains of
gate, up and down, as in `layers`; rows may choose among them. A row's experts of a slab are one
chain in ascending id, and slabs are added in the tree, so a row's bits depend neither on the rows
that share its experts, nor on threads or devices. With a mesh axis, the handler ends with the
slabs' partial sums, which are gathered, and a second one adds them.

The gradient is in `experts_gradient`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from seerjax import numerics as numerics_lib, parallel
from seerjax.array_typing import Array
from seerjax.backends.adapters import RowAdapters
from seerjax.backends.native import (
  choices,
  experts_gradient,
  ffi,
  norms,
  parted_layers,
  products,
  threads,
  vectors,
)
from seerjax.backends.native.layer_parts import (
  NO,
  ONE,
  WAITING,
  ZERO,
  Params,
  adapter_at,
  adapter_sizes,
  adapter_slab,
  add_row,
  blocks,
  f32_of,
  gate,
  gathered_rows,
  layered,
  live_rows,
  merge,
  rank_at,
  read_rows,
  scalar,
  scale_at,
  scale_row,
  scratch,
  scratch_of,
  slab_of,
  waiting,
  write_rows,
)
from seerjax.backends.native.numbers import f32, jit, read_row, round_row, zero_row
from seerjax.backends.native.pointers import floats, integers
from seerjax.backends.protocol import MixtureStage, Stage
from seerjax.backends.tiled import EXPERT_ADAPTERS, EXPERTS, Tiled
from seerjax.layer_kinds import Experts
from seerjax.ops import routing

_numbers = lambda first, last: tuple(np.int64(number) for number in range(first, last + 1))
# Operands, after the rows.
_RESIDUAL, _SIZES, _SCALARS, _NORM, _ROUTER, _BIAS, _CORRECTION, _GATE_UP, _DOWN = _numbers(1, 9)
# Adapters: the rows' choices and scales as in `layer_parts`, and matrices f[a, experts, ...] of all
# experts of this device, with rank 0 without adapters.
_CHOICES, _SCALES, _GATE_UP_A, _GATE_UP_B, _DOWN_A, _DOWN_B = _numbers(10, 15)
# Entries of the sizes.
_LAYER, _FIRST_EXPERT, _IS_SUMMED, _SCORING = _numbers(1, 4)
_GROUPS, _CHOSEN_GROUPS, _IS_RENORMALISED, _CHOSEN = _numbers(5, 8)
# Results, after the hidden rows. `_SORTED` has the place of each expert's first pick (one more than
# experts), a cursor of each, the experts in use and their number, the picks sorted by expert, and
# the place of each pick. `_INNER` and `_OUT` have rows by place.
_PARTIALS, _IDS, _WEIGHTS, _NORMED, _INNER, _OUT, _SORTED, _SCRATCH = _numbers(1, 8)
_STAGES = tuple(np.int64(stage) for stage in range(threads.STAGES))
_NONE, _LANES = np.int64(-1), np.int64(vectors.LANES)
# Rows of one expert that are multiplied together.
_BLOCK = np.int64(64)
# Rows of a piece of a stage of rows: many share a reading of the router.
_FEW, _MANY = np.int64(4), np.int64(16)
# Wanted pieces of a stage of products, and minimum columns of one.
_PIECES, _PIECE_COLUMNS = np.int64(32), np.int64(96)
# Cost of reading a weight from memory, in multiply-adds, that is, in rows.
_READ_ROWS = 8
# The last part with a mesh axis: operands after the rows, and rows of an item.
_END_SIZES, _END_PARTIALS = _numbers(1, 2)
_END_ROWS = products.BLOCK_ROWS


@jit
def _columns_of_piece(team, columns, others):
  """Returns the columns of a piece of a stage with pieces of `others` things; all if alone."""
  if team == 0:
    return columns
  parts = max((_PIECES + others - 1) // max(others, 1), 1)
  least = max((columns + parts - 1) // parts, min(_PIECE_COLUMNS, columns))
  return min((least + _LANES - 1) // _LANES * _LANES, columns)


@jit
def _rows_of_piece(live):
  return _MANY if live > _BLOCK else _FEW


@jit
def _route(arguments, results, begin, rows, scale, logits):
  """Norms rows, and chooses their experts; `logits` is scratch f32[rows + 6, experts]."""
  d, count = ffi.dimension(arguments, 0, 1), ffi.dimension(arguments, _ROUTER, 1)
  chosen = ffi.dimension(results, _IDS, 1)
  is_bf16, eps = ffi.is_bfloat16(arguments, 0), scalar(arguments, _SCALARS, 0)
  normed = ffi.address(results, _NORMED) + 4 * begin * d
  read_rows(arguments, ZERO, begin, rows, d, normed)
  for row in range(rows):
    at = normed + 4 * row * d
    norms.norm_row(at, scale, d, eps, is_bf16, ffi.is_bfloat16(arguments, _NORM), at)
  products.product(
    normed, d, ONE, rows, ffi.address(arguments, _ROUTER), ffi.is_bfloat16(arguments, _ROUTER),
    count, count, d, logits, count, ZERO,
  )  # fmt: skip
  has_bias = ffi.dimension(arguments, _BIAS, 0) > 0
  has_correction = ffi.dimension(arguments, _CORRECTION, 0) > 0
  bias = logits + 4 * rows * count
  correction = bias + 4 * count
  if has_bias:
    read_rows(arguments, _BIAS, ZERO, ONE, count, bias)
  if has_correction:
    read_rows(arguments, _CORRECTION, ZERO, ONE, count, correction)
  for row in range(rows):
    own, place = logits + 4 * row * count, 4 * (begin + row) * chosen
    if has_bias:
      add_row(own, bias, count)
    choices.choose(
      own, correction, has_correction, ffi.integer(arguments, _SIZES, _SCORING), count, chosen,
      ffi.integer(arguments, _SIZES, _GROUPS), ffi.integer(arguments, _SIZES, _CHOSEN_GROUPS),
      ffi.integer(arguments, _SIZES, _IS_RENORMALISED) > 0, scalar(arguments, _SCALARS, 1),
      correction + 4 * count, ffi.address(results, _IDS) + place,
      ffi.address(results, _WEIGHTS) + place,
    )  # fmt: skip


@jit
def _sort(arguments, results, live):
  """Sorts the picks of this device's experts by expert, then by row."""
  n, chosen = ffi.dimension(results, _IDS, 0), ffi.dimension(results, _IDS, 1)
  count = ffi.dimension(arguments, _GATE_UP, 1) * ffi.dimension(arguments, _GATE_UP, 2)
  before = ffi.integer(arguments, _SIZES, _FIRST_EXPERT)
  ids, first = integers(ffi.address(results, _IDS)), integers(ffi.address(results, _SORTED))
  cursor = integers(ffi.address(results, _SORTED) + 4 * (count + 1))
  used = integers(ffi.address(results, _SORTED) + 4 * (2 * count + 1))
  order = integers(ffi.address(results, _SORTED) + 4 * (3 * count + 2))
  place_of = integers(ffi.address(results, _SORTED) + 4 * (3 * count + 2 + n * chosen))
  for expert in range(count + 1):
    first[expert] = np.int32(0)
  for pick in range(live * chosen):
    expert = np.int64(ids[pick]) - before
    if expert >= 0 and expert < count:
      first[expert + 1] = np.int32(first[expert + 1] + 1)
  num_used = np.int64(0)
  for expert in range(count):
    if first[expert + 1] > 0:
      used[num_used] = np.int32(expert)
      num_used += 1
    cursor[expert] = first[expert]
    first[expert + 1] = np.int32(first[expert + 1] + first[expert])
  used[count] = np.int32(num_used)
  for pick in range(live * chosen):
    expert = np.int64(ids[pick]) - before
    if expert >= 0 and expert < count:
      order[cursor[expert]] = np.int32(pick)
      place_of[pick] = cursor[expert]
      cursor[expert] = np.int32(cursor[expert] + 1)
  for pick in range(live * chosen, n * chosen):
    ids[pick] = np.int32(0)
  d = ffi.dimension(results, _NORMED, 1)
  zero_row(ffi.address(results, _NORMED) + 4 * live * d, False, (n - live) * d)


@jit
def _expert_at(arguments, operand, expert):
  """Returns the address of one of this device's experts in f[l, r, own, a, b]."""
  layers, slabs = ffi.dimension(arguments, operand, 0), ffi.dimension(arguments, operand, 1)
  size = ffi.dimension(arguments, operand, 3) * ffi.dimension(arguments, operand, 4)
  layer = min(ffi.integer(arguments, _SIZES, _LAYER), layers - 1)
  width = 2 if ffi.is_bfloat16(arguments, operand) else 4
  index = layer * slabs * ffi.dimension(arguments, operand, 2) + expert
  return ffi.address(arguments, operand) + width * index * size


@jit
def _adapter_of(arguments, results, place):
  """Returns the adapter of the row of a sorted pick, -1 for none."""
  count = ffi.dimension(arguments, _GATE_UP, 1) * ffi.dimension(arguments, _GATE_UP, 2)
  order = integers(ffi.address(results, _SORTED) + 4 * (3 * count + 2))
  row = np.int64(order[place]) // ffi.dimension(results, _IDS, 1)
  return adapter_at(arguments, _CHOICES, row)


@jit
def _add_adapted(
  arguments,
  results,
  a,
  b,
  target,
  expert,
  begin,
  rows,
  x,
  x_row,
  column,
  columns,
  out,
  out_row,
  low,
):
  """Continues out[rows, columns] with scale * (x @ A) @ B, each row with its own adapter.

  `x` has the rows of `rows` sorted picks, from `begin` on; `low` is scratch f32[rows, rank].
  """
  rank, is_bf16 = ffi.dimension(arguments, b, 2), ffi.is_bfloat16(arguments, 0)
  narrow, inputs = ffi.is_bfloat16(arguments, a), ffi.dimension(arguments, a, 2)
  width = ffi.dimension(arguments, b, 3)
  row = ZERO
  while row < rows:
    own, end = _adapter_of(arguments, results, begin + row), row + 1
    while end < rows and _adapter_of(arguments, results, begin + end) == own:
      end += 1
    k = rank_at(arguments, _CHOICES, b, target, own) if own >= 0 else ZERO
    if k > 0:
      at = adapter_slab(arguments, _CHOICES, own)
      products.product(
        x + 4 * row * x_row, x_row, ONE, end - row, slab_of(arguments, a, at, expert), narrow, rank,
        k, inputs, low, rank, ZERO,
      )  # fmt: skip
      scale = scale_at(arguments, _CHOICES, _SCALES, target, own)
      for line in range(end - row):
        scale_row(low + 4 * line * rank, scale, is_bf16, k)
      weights = slab_of(arguments, b, at, expert) + (2 if narrow else 4) * column
      products.product(
        low, rank, ONE, end - row, weights, narrow, width, columns, k, out + 4 * row * out_row,
        out_row, ONE,
      )  # fmt: skip
    row = end


@jit
def _gate_up(arguments, results, expert, column, columns, gathered, parts, low):
  """Computes `columns` of silu(x @ gate) * (x @ up) of an expert's rows."""
  d, features = ffi.dimension(arguments, _GATE_UP, 3), ffi.dimension(arguments, _DOWN, 3)
  count = ffi.dimension(arguments, _GATE_UP, 1) * ffi.dimension(arguments, _GATE_UP, 2)
  chosen, is_bf16 = ffi.dimension(results, _IDS, 1), ffi.is_bfloat16(arguments, 0)
  narrow = ffi.is_bfloat16(arguments, _GATE_UP)
  weights = _expert_at(arguments, _GATE_UP, expert) + (2 if narrow else 4) * column
  first = integers(ffi.address(results, _SORTED))
  order = integers(ffi.address(results, _SORTED) + 4 * (3 * count + 2))
  end = np.int64(first[expert + 1])
  # All columns of gate and up lie side by side.
  times, width = (1, 2 * columns) if columns == features else (2, columns)
  for begin in range(np.int64(first[expert]), end, _BLOCK):
    rows = min(_BLOCK, end - begin)
    for row in range(rows):
      source = ffi.address(results, _NORMED) + 4 * (np.int64(order[begin + row]) // chosen) * d
      read_row(source, False, gathered + 4 * row * d, d)
    for part in range(times):
      products.product(
        gathered, d, ONE, rows, weights + (2 if narrow else 4) * part * features, narrow,
        2 * features, width, d, parts + 4 * part * columns, 2 * columns, ZERO,
      )  # fmt: skip
      if ffi.dimension(arguments, _GATE_UP_B, 2) > 0:
        _add_adapted(
          arguments, results, _GATE_UP_A, _GATE_UP_B, ZERO, expert, begin, rows, gathered, d,
          part * features + column, width, parts + 4 * part * columns, 2 * columns, low,
        )  # fmt: skip
    for row in range(rows):
      at = parts + 8 * row * columns
      to = ffi.address(results, _INNER) + 4 * ((begin + row) * features + column)
      gate(at, at + 4 * columns, NO, is_bf16, columns, to)


@jit
def _down(arguments, results, expert, column, columns, low):
  """Computes `columns` of inner @ down of an expert's rows."""
  d, features = ffi.dimension(arguments, 0, 1), ffi.dimension(arguments, _DOWN, 3)
  narrow = ffi.is_bfloat16(arguments, _DOWN)
  weights = _expert_at(arguments, _DOWN, expert) + (2 if narrow else 4) * column
  first = integers(ffi.address(results, _SORTED))
  end = np.int64(first[expert + 1])
  for begin in range(np.int64(first[expert]), end, _BLOCK):
    rows = min(_BLOCK, end - begin)
    inner = ffi.address(results, _INNER) + 4 * begin * features
    out = ffi.address(results, _OUT) + 4 * (begin * d + column)
    products.product(
      inner, features, ONE, rows, weights, narrow, d, columns, features, out, d, ZERO
    )
    if ffi.dimension(arguments, _DOWN_B, 2) > 0:
      _add_adapted(
        arguments, results, _DOWN_A, _DOWN_B, ONE, expert, begin, rows, inner, features, column,
        columns, out, d, low,
      )  # fmt: skip


@jit
def _partials(arguments, results, begin, rows, slab, picks, target):
  """Computes a slab's partial sums of rows: each row's experts, in ascending order.

  `picks` has the place of each row's next pick among its picks, and is moved past the slab's.
  """
  d, own = ffi.dimension(arguments, 0, 1), ffi.dimension(arguments, _DOWN, 2)
  n, chosen = ffi.dimension(results, _IDS, 0), ffi.dimension(results, _IDS, 1)
  count = ffi.dimension(arguments, _DOWN, 1) * own
  place_of = integers(ffi.address(results, _SORTED) + 4 * (3 * count + 2 + n * chosen))
  ids, scales = integers(ffi.address(results, _IDS)), floats(ffi.address(results, _WEIGHTS))
  out, following = ffi.address(results, _OUT), integers(picks)
  end = ffi.integer(arguments, _SIZES, _FIRST_EXPERT) + (slab + 1) * own
  for row in range(rows):
    first = (begin + row) * chosen
    at, pick, last = target + 4 * row * d, first + following[row], first + chosen
    if pick == last or ids[pick] >= end:
      zero_row(at, NO, d)
      continue
    _weighted(out + 4 * np.int64(place_of[pick]) * d, scales[pick], d, at)
    pick += 1
    while pick < last and ids[pick] < end:
      _add_weighted(at, out + 4 * np.int64(place_of[pick]) * d, scales[pick], d)
      pick += 1
    following[row] = np.int32(pick - first)


@jit
def _weighted(source, weight, count, target):
  """Writes floats times a weight, added to zero."""
  x, y = floats(target), floats(source)
  for i in range(count):
    x[i] = f32(0.0) + y[i] * weight


@jit
def _add_weighted(target, other, weight, count):
  """Adds floats times a weight; a product is rounded before it is added."""
  x, y = floats(target), floats(other)
  for i in range(count):
    x[i] = x[i] + y[i] * weight


@jit
def _end(arguments, results, begin, rows, picks, sums):
  """Adds the experts' sums to the residual stream; with a mesh axis, writes partial sums."""
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  chosen, before = ffi.dimension(results, _IDS, 1), ffi.integer(arguments, _SIZES, _FIRST_EXPERT)
  slabs, is_bf16 = ffi.dimension(arguments, _DOWN, 1), ffi.is_bfloat16(arguments, 0)
  ids, following = integers(ffi.address(results, _IDS)), integers(picks)
  for row in range(rows):
    pick = np.int64(0)
    while pick < chosen and ids[(begin + row) * chosen + pick] < before:
      pick += 1
    following[row] = np.int32(pick)
  is_summed = ffi.integer(arguments, _SIZES, _IS_SUMMED) > 0
  for slab in range(slabs):
    if is_summed:
      to = sums + 4 * waiting(slab) * rows * d
    else:
      to = ffi.address(results, _PARTIALS) + 4 * (slab * n + begin) * d
    _partials(arguments, results, begin, rows, slab, picks, to)
    if is_summed:
      merge(sums, slab, rows * d)
  if is_summed:
    x = sums + 4 * WAITING * rows * d
    round_row(sums, is_bf16, rows * d)
    read_rows(arguments, _RESIDUAL, begin, rows, d, x)
    add_row(x, sums, rows * d)
    write_rows(x, rows, d, results, ZERO, begin, rows)


@jit
def _mixture(arguments, results, team, worker):
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  slabs, features = ffi.dimension(arguments, _DOWN, 1), ffi.dimension(arguments, _DOWN, 3)
  count, live = slabs * ffi.dimension(arguments, _DOWN, 2), live_rows(arguments, _SIZES)
  size = min(n, _BLOCK)
  gathered = scratch_of(results, _SCRATCH, worker)
  parts = gathered + 4 * size * d
  low = parts + 8 * size * features
  rank = max(ffi.dimension(arguments, _GATE_UP_B, 2), ffi.dimension(arguments, _DOWN_B, 2))
  scale = low + 4 * size * rank
  others = scale + 4 * d  # Logits and more of rows, or their next picks and sums.
  some = _rows_of_piece(live)
  row_pieces = (live + some - 1) // some

  read_rows(arguments, _NORM, ZERO, ONE, d, scale)
  piece = threads.claim(team, _STAGES[0], _NONE)
  while piece < row_pieces:
    begin = some * piece
    _route(arguments, results, begin, min(some, live - begin), scale, others)
    threads.settle(team, _STAGES[0])
    piece = threads.claim(team, _STAGES[0], piece)
  threads.wait(team, _STAGES[0], row_pieces)

  if threads.claim(team, _STAGES[1], _NONE) == 0:
    _sort(arguments, results, live)
    threads.settle(team, _STAGES[1])
  threads.wait(team, _STAGES[1], ONE)

  used = integers(ffi.address(results, _SORTED) + 4 * (2 * count + 1))
  num_used = np.int64(used[count])
  columns = _columns_of_piece(team, features, num_used)
  of_expert = (features + columns - 1) // columns
  pieces = num_used * of_expert
  piece = threads.claim(team, _STAGES[2], _NONE)
  while piece < pieces:
    expert, column = np.int64(used[piece // of_expert]), piece % of_expert * columns
    width = min(columns, features - column)
    _gate_up(arguments, results, expert, column, width, gathered, parts, low)
    if of_expert == 1:
      _down(arguments, results, expert, ZERO, d, low)
    threads.settle(team, _STAGES[2])
    piece = threads.claim(team, _STAGES[2], piece)
  threads.wait(team, _STAGES[2], pieces)

  if of_expert > 1:
    columns = _columns_of_piece(team, d, num_used)
    of_expert = (d + columns - 1) // columns
    pieces = num_used * of_expert
    piece = threads.claim(team, _STAGES[3], _NONE)
    while piece < pieces:
      expert, column = np.int64(used[piece // of_expert]), piece % of_expert * columns
      _down(arguments, results, expert, column, min(columns, d - column), low)
      threads.settle(team, _STAGES[3])
      piece = threads.claim(team, _STAGES[3], piece)
    threads.wait(team, _STAGES[3], pieces)

  piece = threads.claim(team, _STAGES[4], _NONE)
  while piece < row_pieces:
    begin = some * piece
    _end(arguments, results, begin, min(some, live - begin), others, others + 4 * some)
    piece = threads.claim(team, _STAGES[4], piece)
  if worker == 0 and ffi.integer(arguments, _SIZES, _IS_SUMMED) > 0:
    is_bf16 = ffi.is_bfloat16(arguments, 0)
    dead = ffi.address(results, 0) + (2 if is_bf16 else 4) * live * d
    zero_row(dead, is_bf16, (n - live) * d)


@jit
def _cost(arguments):
  """Counts every expert's rows, or what it costs to read it; on a mesh, those of all devices."""
  live, d = live_rows(arguments, _SIZES), ffi.dimension(arguments, 0, 1)
  experts = ffi.dimension(arguments, _DOWN, 1) * ffi.dimension(arguments, _DOWN, 2)
  picks = live * ffi.integer(arguments, _SIZES, _CHOSEN)
  rows = max(picks, _READ_ROWS * min(picks, experts))
  return rows * 3 * d * ffi.dimension(arguments, _DOWN, 3)


@jit
def _add_slabs(arguments, results, first, last, worker):
  """Computes the last part with a mesh axis: hidden rows f[n, d]."""
  n, d = ffi.dimension(arguments, 0, 0), ffi.dimension(arguments, 0, 1)
  live, is_bf16 = live_rows(arguments, _END_SIZES), ffi.is_bfloat16(arguments, 0)
  sums = scratch_of(results, ONE, worker)
  x = sums + 4 * WAITING * _END_ROWS * d
  for item in range(first, last):
    begin = _END_ROWS * item
    rows = min(_END_ROWS, n - begin)
    alive = min(max(live - begin, 0), rows)
    gathered_rows(arguments, _END_PARTIALS, begin, alive, sums)
    round_row(sums, is_bf16, alive * d)
    read_rows(arguments, ZERO, begin, alive, d, x)
    add_row(x, sums, alive * d)
    write_rows(x, rows, d, results, ZERO, begin, alive)


_MIXTURE = ffi.Handler("seerjax_mixture", blocks, _mixture, _cost, is_staged=True)
_ADD_SLABS = ffi.Handler("seerjax_mixture_end", blocks, _add_slabs)


def after_attention(
  tiled: Tiled,
  stage: MixtureStage,
  weights: Params,
  rows: Any,
  num_rows: Array,
  chosen: RowAdapters | None,
) -> tuple[Array, Array, Array]:
  """Maps hidden rows f[n, d] and attention outputs f[n, k, g, c] to hidden rows f[n, d].

  Also returns the normed rows f[n, d] and their experts i32[n, e].

  Args:
    tiled: backend of definitions; the tiles of its numerics are those of the gradient.
    stage: stage of the model.
    weights: weights of one layer, or of stacked ones (`tiles.LayerSlabs`); the local slabs.
    rows: x, mixed.
    num_rows: i32[]; rows from there on are zero.
    chosen: the rows' adapters; without a gradient.
  """
  kind, shape = stage.shape.kind.feed_forward, stage.shape
  assert isinstance(kind, Experts)
  plain = Stage(shape, stage.axis, stage.routed)
  x = parted_layers.attended(tiled, plain, weights, rows, num_rows, chosen)
  residual = jnp.zeros_like(x) if parted_layers.has_post_norms(shape) else x
  if kind.shared_size:
    residual = parted_layers.gated(plain, weights, x, num_rows, chosen)
  names = ("mlp_norm", "router", "router_bias", "router_correction_bias", *EXPERTS)
  own = {name: weights[name] for name in (*names, *EXPERT_ADAPTERS) if name in weights}
  own = norms.factors(shape.norm_weights, own, norms.OF_LAYER)
  if chosen is None:
    out, normed, ids = mixture(stage, tiled.numerics, own, x, residual, num_rows)
  else:
    out, normed, ids, _ = routed(stage, own, x, residual, num_rows, chosen)
    normed = normed.astype(x.dtype)
  if parted_layers.has_post_norms(shape):
    out = parted_layers.added(tiled, plain, weights["mlp_out_norm"], x, out, num_rows)
  return out, normed, ids


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def mixture(
  stage: MixtureStage,
  numerics: numerics_lib.NumericsConfig,
  weights: Params,
  x: Array,
  residual: Array,
  num_rows: Array,
) -> tuple[Array, Array, Array]:
  """Adds the weighted sum of each row's experts to the residual stream: f[n, d].

  Also returns the normed rows f[n, d] and their experts i32[n, e].

  Args:
    stage: stage of the model.
    numerics: its tiles are those of the gradient.
    weights: norm, router, experts and their adapters of one layer; the experts also of stacked
      ones.
    x: f[n, d], rows that are normed and routed.
    residual: f[n, d], rows to which the sum is added.
    num_rows: i32[]; rows from there on are zero.
  """
  del numerics
  out, normed, ids, _ = routed(stage, weights, x, residual, num_rows)
  return out, normed.astype(x.dtype), ids


def routed(
  stage: MixtureStage,
  weights: Params,
  x: Array,
  residual: Array,
  num_rows: Array,
  row_adapters: RowAdapters | None = None,
) -> tuple[Array, Array, Array, Array]:
  """Returns hidden rows f[n, d], normed rows f32[n, d], experts i32[n, e] and weights f32[n, e]."""
  kind, axis = stage.shape.kind.feed_forward, stage.axis
  assert isinstance(kind, Experts)
  rule = kind.routing
  router, (n, d) = routing.router_of(weights), x.shape
  gate_up, layer = layered(weights["expert_gate_up"])
  down = layered(weights["expert_down"]).slabs
  _, slabs, own, features, _ = down.shape
  device = jnp.int32(0) if axis is None else lax.axis_index(axis).astype(jnp.int32)
  sizes = [num_rows, layer, device * (slabs * own), int(axis is None)]
  sizes += [choices.SCORINGS[rule.scoring], rule.num_groups, rule.num_chosen_groups]
  sizes += [int(rule.is_renormalised), rule.num_chosen]
  none = jnp.zeros((0,), jnp.float32)
  operands = [
    x,
    residual,
    jnp.stack([jnp.asarray(size, jnp.int32) for size in sizes]),
    jnp.asarray([stage.shape.norm_eps, rule.scale], jnp.float32),
    weights["mlp_norm"],
    router.weight,
    none if router.bias is None else router.bias,
    none if router.correction_bias is None else router.correction_bias,
    gate_up,
    down,
    *_adapter_operands(weights, num_rows, layer, row_adapters),
  ]
  hidden, picks, count = jax.ShapeDtypeStruct(x.shape, x.dtype), n * rule.num_chosen, slabs * own
  i32_of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  block, rows = min(n, int(_BLOCK)), int(_MANY)
  rank = max(operands[_GATE_UP_B].shape[2], operands[_DOWN_B].shape[2])
  logits, sums = (rows + 6) * rule.num_experts, rows + (WAITING + 1) * rows * d
  results = (
    hidden,
    f32_of(slabs, n if axis else 0, d),
    i32_of(n, rule.num_chosen),
    f32_of(n, rule.num_chosen),
    f32_of(n, d),
    f32_of(picks, features),
    f32_of(picks, d),
    i32_of(3 * count + 2 + 2 * picks),
    scratch((block, d + 2 * features + rank), (d + max(logits, sums),)),
  )
  out, partials, ids, chosen, normed, *_ = _MIXTURE(results, *operands)
  if axis is None:
    return out, normed, ids, chosen
  partials = parallel.gather_slabs(partials, axis)
  own_scratch = scratch(((WAITING + 1) * _END_ROWS, d))
  out, _ = _ADD_SLABS((hidden, own_scratch), residual, operands[_SIZES], partials)
  return out, normed, ids, chosen


def _adapter_operands(
  weights: Params, num_rows: Array, layer: Array, chosen: RowAdapters | None
) -> list[Array]:
  """Returns the operands of adapters; those of all layers are concatenated, unsliced."""
  scales, matrices = [], []
  for name in EXPERTS:
    leaf, own = layered(weights[name]).slabs, f"{name}_lora"
    _, slabs, per_slab, rows, columns = leaf.shape
    count = 1 if chosen is None else chosen.forms[0].count
    a, b = (
      jnp.zeros((1, slabs, per_slab, *size), leaf.dtype) for size in ((rows, 0), (0, columns))
    )
    scale = jnp.ones((count,), jnp.float32)
    if chosen is not None and own in chosen.forms[0].layers:
      pair, scale = chosen.forms[0].layers[own], chosen.forms[0].scales
      a, b = (part.reshape(-1, *part.shape[-4:]) for part in (pair["a"], pair["b"]))
    elif own in weights:
      pair = weights[own]
      a, b, scale = pair["a"][None], pair["b"][None], pair["scale"][None]
    scales.append(scale)
    matrices += [part.reshape(part.shape[0], slabs * per_slab, *part.shape[3:]) for part in (a, b)]
  choices = adapter_sizes(num_rows, layer, tuple(EXPERTS), chosen)
  return [choices, jnp.concatenate([jnp.ones((1,), jnp.float32), *scales]), *matrices]


def _forward(stage, numerics, weights, x, residual, num_rows):
  del numerics
  out, *kept = routed(stage, weights, x, residual, num_rows)
  normed, ids, _ = kept
  return (out, normed.astype(x.dtype), ids), (weights, x, tuple(kept), num_rows)


def _backward(stage, numerics, residuals, cotangent):
  gradient = experts_gradient.mixture_gradient(stage, numerics, *residuals, *cotangent[:2])
  return *gradient, None


mixture.defvjp(_forward, _backward)
