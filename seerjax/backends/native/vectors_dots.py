"""Vectors of bfloat16 dot products (AVX512-BF16), with the bits of fused multiply-adds.

`vdpbf16ps` takes 32-bit lanes of two bfloat16 and adds to each float32 lane the product of the
upper halves, then that of the lower halves, rounding to nearest after each and flushing denormals:
two steps of a chain (`have_same_bits` checks it). So a pair has step k in its upper half and k + 1
in its lower half, and one instruction is two fused multiply-adds in ascending k.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VDPBF16PS.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
import numpy as np

from seerjax.backends.native import objects, vectors
from seerjax.backends.native.pointers import intrinsic

LANES = vectors.LANES
_INT, _HALF, _WORD = ir.IntType(32), ir.IntType(16), ir.IntType(64)
_VECTOR, _PAIRS = vectors._VECTOR, ir.VectorType(_INT, LANES)
# LLVM replaces the vectors of integers by vectors of bfloat16.
DOT = "llvm.x86.avx512bf16.dpbf16ps.512"
# Adds one dot product to each of 16 floats in memory.
_CHECKED = f"""
declare <16 x float> @{DOT}(<16 x float>, <16 x i32>, <16 x i32>)
define void @add_dots(ptr %totals, ptr %x, ptr %y) {{
  %total = load <16 x float>, ptr %totals, align 4
  %left = load <16 x i32>, ptr %x, align 4
  %right = load <16 x i32>, ptr %y, align 4
  %sum = call <16 x float> @{DOT}(<16 x float> %total, <16 x i32> %left, <16 x i32> %right)
  store <16 x float> %sum, ptr %totals, align 4
  ret void
}}
"""
# Numbers of the check, in vectors, and their exponents: ordinary ones, and those of denormals.
_CHECKS, _EXPONENTS = 256, ((-8, 8), (-72, -60))


def _flushed(x: np.ndarray) -> np.ndarray:
  return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def expected(total: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
  """Returns f32[n] + pairs u32[n] . pairs u32[n]: two steps of a chain, upper halves first.

  It is exact if exponents differ by at most 28: float64 contains the sums.
  """
  for shift in (0, 16):
    a, b = (_flushed(((v << shift) & 0xFFFF0000).view(np.float32)) for v in (x, y))
    total = _flushed(total).astype(np.float64) + a.astype(np.float64) * b.astype(np.float64)
    total = _flushed(total.astype(np.float32))
  return total


def checked_numbers(exponents: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns f32[n], u32[n] and u32[n] to check a dot product with."""
  generator = np.random.default_rng(0)

  def floats(low: int, high: int) -> np.ndarray:
    scale = np.exp2(generator.integers(low, high, _CHECKS * LANES))
    sign = np.where(generator.random(_CHECKS * LANES) < 0.5, -1, 1)
    return (sign * scale * (1 + generator.random(_CHECKS * LANES))).astype(np.float32)

  def pairs() -> np.ndarray:
    first, second = (floats(*exponents).view(np.uint32) for _ in range(2))
    return (first & 0xFFFF0000) | (second >> 16)

  low, high = exponents
  return floats(2 * low, 2 * high), pairs(), pairs()


@functools.cache
def have_same_bits() -> bool:
  """Returns whether a dot product here has the bits of two fused multiply-adds.

  The processor must have dot products (`objects.has_dot_products`).
  """
  kind = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)
  add_dots = kind(objects.function_of(_CHECKED, "add_dots"))
  for exponents in _EXPONENTS:
    totals, x, y = checked_numbers(exponents)
    wanted = expected(totals, x, y)
    for place in range(0, totals.size, LANES):
      add_dots(*(part[place:].ctypes.data for part in (totals, x, y)))
    if not np.array_equal(totals.view(np.int32), wanted.view(np.int32)):
      return False
  return True


def _dot(builder, total, x, y):
  kind = ir.FunctionType(_VECTOR, [_VECTOR, _PAIRS, _PAIRS])
  function = cgutils.get_or_insert_function(builder.module, kind, DOT)
  return builder.call(function, [total, x, y])


def _load(builder, pointer, kind, size: int):
  return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=size)


def _interleaved(builder, first, second, count: int) -> list[Any]:
  """Returns vectors of 16 pairs from `count` bfloat16, 16 or 32, of two steps of k."""
  order = [place for i in range(count) for place in (count + i, i)]  # The later one is lower.
  parts = [order[begin : begin + 2 * LANES] for begin in range(0, 2 * count, 2 * LANES)]
  return [builder.bitcast(vectors._shuffle(builder, first, second, o), _PAIRS) for o in parts]


def _pairs_of_rows(builder, first, second, num_vectors: int) -> list[Any]:
  """Loads 16 * `num_vectors` columns of two rows of bfloat16 as pairs."""
  pairs = []
  for vector in range(0, num_vectors, 2):
    count = LANES * min(2, num_vectors - vector)
    kind = ir.VectorType(_HALF, count)
    low, high = (
      _load(builder, vectors._at(builder, row, vectors._word(vector * LANES)), kind, 2)
      for row in (first, second)
    )
    pairs += _interleaved(builder, low, high, count)
  return pairs


def pack_block(num_vectors: int) -> Any:
  """Returns an intrinsic: panel pairs[pairs, 16 * vectors] = w[2 * pairs, 16 * vectors].

  Its arguments are int64s: `w, w_step` (address of bfloat16, elements between two steps of k),
  `pairs` (at least 1), `panel` (an address), `ahead` (elements to prefetch, as in
  `vectors.product_block`).
  """

  @intrinsic
  def pack(typing_context, w, w_step, pairs, panel, ahead):
    def codegen(context, builder, signature, arguments):
      w, w_step, pairs, panel, ahead = arguments
      w = builder.inttoptr(w, _HALF.as_pointer())
      panel = builder.inttoptr(panel, _INT.as_pointer())
      before, body, after = vectors._loop(builder, "pack")
      step = builder.phi(_WORD)
      step.add_incoming(vectors._word(0), before)
      first = vectors._at(builder, w, builder.mul(step, builder.shl(w_step, vectors._word(1))))
      second = vectors._at(builder, first, w_step)
      for row in (first, second):
        later = vectors._at(builder, row, ahead)
        for vector in range(0, num_vectors, 2):
          vectors._prefetch(builder, vectors._at(builder, later, vectors._word(vector * LANES)))
      to = vectors._at(builder, panel, builder.mul(step, vectors._word(num_vectors * LANES)))
      for vector, value in enumerate(_pairs_of_rows(builder, first, second, num_vectors)):
        vectors._store(builder, value, vectors._at(builder, to, vectors._word(vector * LANES)))
      following = builder.add(step, vectors._word(1))
      step.add_incoming(following, body)
      builder.cbranch(builder.icmp_signed("<", following, pairs), body, after)
      builder.position_at_end(after)
      return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen

  return pack


def _turned(builder, pairs):
  """Swaps the halves of pairs that were read from memory, where the first step is lower."""
  half = ir.Constant(_PAIRS, [16] * LANES)
  return builder.or_(builder.shl(pairs, half), builder.lshr(pairs, half))


def dot_block(num_rows: int, num_vectors: int, is_packed: bool) -> Any:
  """Returns an intrinsic: c[rows, 16 * vectors] (+)= a[rows, k] @ w[k, 16 * vectors].

  Its arguments are int64s: `a, a_row` (address of pairs, pairs between two rows), `rows` (1 to
  `num_rows`; the block repeats the last one to its full height), `w, w_step` (if `is_packed`,
  the address of pairs and pairs between two of them in k; otherwise of bfloat16, and elements
  between two steps of k), `pairs` (at least 1), `c, c_row`, `is_added` (as in
  `vectors.product_block`).
  """

  @intrinsic
  def block(typing_context, a, a_row, rows, w, w_step, pairs, c, c_row, is_added):
    def codegen(context, builder, signature, arguments):
      a, a_row, rows, w, w_step, pairs, c, c_row, is_added = arguments
      a = builder.inttoptr(a, _INT.as_pointer())
      c = builder.inttoptr(c, ir.FloatType().as_pointer())
      w = builder.inttoptr(w, (_INT if is_packed else _HALF).as_pointer())
      a_rows, c_rows = vectors._row_starts(builder, num_rows, rows, (a, a_row), (c, c_row))
      cells = [(row, vector) for row in range(num_rows) for vector in range(num_vectors)]
      place = {
        cell: vectors._at(builder, c_rows[cell[0]], vectors._word(cell[1] * LANES))
        for cell in cells
      }
      keep = builder.icmp_signed("!=", is_added, vectors._word(0))
      start = {
        cell: builder.select(keep, vectors._load(builder, place[cell]), vectors._ZERO)
        for cell in cells
      }
      before, body, after = vectors._loop(builder, "dots")
      step = builder.phi(_WORD)
      step.add_incoming(vectors._word(0), before)
      sums = {cell: builder.phi(_VECTOR) for cell in cells}
      if is_packed:
        w_row = vectors._at(builder, w, builder.mul(step, w_step))
        columns = [
          _load(builder, vectors._at(builder, w_row, vectors._word(vector * LANES)), _PAIRS, 4)
          for vector in range(num_vectors)
        ]
      else:
        w_row = vectors._at(builder, w, builder.mul(step, builder.shl(w_step, vectors._word(1))))
        second = vectors._at(builder, w_row, w_step)
        columns = _pairs_of_rows(builder, w_row, second, num_vectors)
      new = {}
      for row in range(num_rows):
        pair = vectors._splat(builder, builder.load(vectors._at(builder, a_rows[row], step)))
        for vector in range(num_vectors):
          cell = row, vector
          sums[cell].add_incoming(start[cell], before)
          new[cell] = _dot(builder, sums[cell], pair, columns[vector])
          sums[cell].add_incoming(new[cell], body)
      following = builder.add(step, vectors._word(1))
      step.add_incoming(following, body)
      builder.cbranch(builder.icmp_signed("<", following, pairs), body, after)
      builder.position_at_end(after)
      for cell in cells:
        vectors._store(builder, new[cell], place[cell])
      return context.get_dummy_value()

    return types.void(*[types.int64] * 9), codegen

  return block


def widened_block(num_rows: int, num_vectors: int, is_partial: bool = False) -> Any:
  """Returns an intrinsic: c[rows, 16 * vectors] (+)= a[rows, k] @ w[k, 16 * vectors], by FMAs.

  For rows that are no bfloat16 and a panel of pairs. Its arguments are int64s: `a, a_row` (floats),
  `rows`, `w` (pairs), `w_step, pairs, c, c_row, is_added` as in `dot_block` with packed weights,
  and `columns` (valid lanes of the last vector if `is_partial`).
  """

  @intrinsic
  def block(typing_context, a, a_row, rows, w, w_step, pairs, c, c_row, is_added, columns):
    def codegen(context, builder, signature, arguments):
      a, a_row, rows, w, w_step, pairs, c, c_row, is_added, columns = arguments
      a, c = (builder.inttoptr(pointer, ir.FloatType().as_pointer()) for pointer in (a, c))
      w = builder.inttoptr(w, _INT.as_pointer())
      mask = vectors._mask(builder, columns) if is_partial else None
      a_rows, c_rows = vectors._row_starts(builder, num_rows, rows, (a, a_row), (c, c_row))
      cells = [(row, vector) for row in range(num_rows) for vector in range(num_vectors)]
      place = {
        cell: vectors._at(builder, c_rows[cell[0]], vectors._word(cell[1] * LANES))
        for cell in cells
      }

      def read(pointer):
        if mask is None:
          return vectors._load(builder, pointer)
        return vectors._load_first(builder, pointer, mask)

      keep = builder.icmp_signed("!=", is_added, vectors._word(0))
      start = {cell: builder.select(keep, read(place[cell]), vectors._ZERO) for cell in cells}
      before, body, after = vectors._loop(builder, "widened")
      step = builder.phi(_WORD)
      step.add_incoming(vectors._word(0), before)
      sums = {cell: builder.phi(_VECTOR) for cell in cells}
      for cell in cells:
        sums[cell].add_incoming(start[cell], before)
      w_row = vectors._at(builder, w, builder.mul(step, w_step))
      halves = []
      for vector in range(num_vectors):
        at = vectors._at(builder, w_row, vectors._word(vector * LANES))
        second, first = vectors._halves_of(builder, _load(builder, at, _PAIRS, 4))
        halves.append((first, second))
      new = dict(sums)
      first_step = builder.shl(step, vectors._word(1))
      for part in range(2):
        here = builder.add(first_step, vectors._word(part))
        for row in range(num_rows):
          scalar = vectors._splat(builder, builder.load(vectors._at(builder, a_rows[row], here)))
          for vector in range(num_vectors):
            cell = row, vector
            new[cell] = vectors._fma(builder, scalar, halves[vector][part], new[cell])
      for cell in cells:
        sums[cell].add_incoming(new[cell], body)
      following = builder.add(step, vectors._word(1))
      step.add_incoming(following, body)
      builder.cbranch(builder.icmp_signed("<", following, pairs), body, after)
      builder.position_at_end(after)
      for cell in cells:
        if mask is None:
          vectors._store(builder, new[cell], place[cell])
        else:
          vectors._store_first(builder, new[cell], place[cell], mask)
      return context.get_dummy_value()

    return types.void(*[types.int64] * 10), codegen

  return block


def transposed_block(num_rows: int) -> Any:
  """Returns an intrinsic: c[rows, 16] = a[rows, k] @ w[16, k]^T, transposed in registers.

  Its arguments are int64s: `a, a_row` (pairs, as in `dot_block`), `rows`, `w, w_row` (bfloat16),
  `k` (a multiple of 32), `c, c_row`.
  """

  @intrinsic
  def block(typing_context, a, a_row, rows, w, w_row, k, c, c_row):
    def codegen(context, builder, signature, arguments):
      a, a_row, rows, w, w_row, k, c, c_row = arguments
      a = builder.inttoptr(a, _INT.as_pointer())
      c = builder.inttoptr(c, ir.FloatType().as_pointer())
      w = builder.inttoptr(w, _HALF.as_pointer())
      a_rows, c_rows = vectors._row_starts(builder, num_rows, rows, (a, a_row), (c, c_row))
      w_rows = [
        vectors._at(builder, w, builder.mul(w_row, vectors._word(row))) for row in range(LANES)
      ]
      before, body, after = vectors._loop(builder, "transposed")
      step = builder.phi(_WORD)
      step.add_incoming(vectors._word(0), before)
      sums = [builder.phi(_VECTOR) for _ in range(num_rows)]
      places = [vectors._at(builder, row, step) for row in w_rows]
      for at in places:  # Prefetches the same steps of the next 16 rows.
        later = vectors._at(builder, at, builder.mul(w_row, vectors._word(LANES)))
        vectors._prefetch(builder, later)
      rows_of = [_turned(builder, vectors._load_pairs(builder, at)) for at in places]
      new = list(sums)
      first = builder.lshr(step, vectors._word(1))
      for place, column in enumerate(vectors._transposed(builder, rows_of)):
        here = builder.add(first, vectors._word(place))
        for row in range(num_rows):
          pair = vectors._splat(builder, builder.load(vectors._at(builder, a_rows[row], here)))
          new[row] = _dot(builder, new[row], pair, column)
      following = builder.add(step, vectors._word(2 * LANES))
      step.add_incoming(following, body)
      for total, value in zip(sums, new, strict=True):
        total.add_incoming(vectors._ZERO, before)
        total.add_incoming(value, body)
      builder.cbranch(builder.icmp_signed("<", following, k), body, after)
      builder.position_at_end(after)
      for row in range(num_rows):
        vectors._store(builder, new[row], c_rows[row])
      return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen

  return block


@intrinsic
def transpose_pairs(typing_context, source, source_row, target, target_row):
  """Transposes bfloat16 [16, 32], rows `source_row` apart, to pairs [16, 16]."""

  def codegen(context, builder, signature, arguments):
    source, source_row, target, target_row = arguments
    source = builder.inttoptr(source, _HALF.as_pointer())
    target = builder.inttoptr(target, _INT.as_pointer())
    rows = [
      vectors._at(builder, source, builder.mul(source_row, vectors._word(row)))
      for row in range(LANES)
    ]
    pairs = [_turned(builder, vectors._load_pairs(builder, row)) for row in rows]
    for row, vector in enumerate(vectors._transposed(builder, pairs)):
      to = vectors._at(builder, target, builder.mul(target_row, vectors._word(row)))
      vectors._store(builder, vector, to)
    return context.get_dummy_value()

  return types.void(*[types.int64] * 4), codegen
