"""Transpositions with vectors of 8 floats, for processors with few or short registers (AVX2, NEON).

8 rows of 8 are transposed by 24 shuffles, each one AVX2 instruction, and stay in registers; 16 of
16 (`vectors`) would not. The products compute the same chains from them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from seerjax.backends.native import vectors
from seerjax.backends.native.pointers import intrinsic

LANES = 8
_FLOAT, _HALF, _INT, _WORD = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VECTOR, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)
_ZERO = ir.Constant(_VECTOR, [0.0] * LANES)
# Stages of a transposition: how two vectors are shuffled, in the two halves of a register.
_SINGLES = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
_PAIRS = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
_HALVES = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]


def _shuffled(builder, a, b, orders) -> list[Any]:
  return [builder.shuffle_vector(a, b, ir.Constant(_INTS, order)) for order in orders]


def _transposed(builder, rows: list[Any]) -> list[Any]:
  """Returns the columns of 8 vectors of 8."""
  t = [x for i in range(0, 8, 2) for x in _shuffled(builder, rows[i], rows[i + 1], _SINGLES)]
  s = [
    x for i in (0, 1, 4, 5) for x in _shuffled(builder, t[i], t[i + 2], _PAIRS)
  ]  # Columns 0 to 3 of the first four rows, then of the last four; columns 4 to 7 follow.
  parts = [_shuffled(builder, s[i], s[i + 4], _HALVES) for i in range(4)]
  return [low for low, _ in parts] + [high for _, high in parts]


def _word(value: int):
  return ir.Constant(_WORD, value)


def _at(builder, pointer, offset):
  return builder.gep(pointer, [offset])


def _load(builder, pointer, kind, size: int):
  return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=size)


def _splat(builder, scalar):
  first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(_INT, 0))
  return builder.shuffle_vector(first, first, ir.Constant(_INTS, [0] * LANES))


def _fma(builder, x, y, z):
  kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
  function = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v8f32")
  return builder.call(function, [x, y, z])


def _columns_of(builder, places: list[Any], is_bf16: bool) -> list[Any]:
  """Returns the columns of 8 rows: 8 of float32, or 16 of bfloat16, transposed in pairs."""
  if not is_bf16:
    return _transposed(builder, [_load(builder, place, _VECTOR, 4) for place in places])
  columns = []
  for pairs in _transposed(builder, [_load(builder, place, _INTS, 2) for place in places]):
    first = builder.shl(pairs, ir.Constant(_INTS, [16] * LANES))
    second = builder.and_(pairs, ir.Constant(_INTS, [0xFFFF0000] * LANES))
    columns += [builder.bitcast(half, _VECTOR) for half in (first, second)]
  return columns


def _row_starts(builder, base, stride, count: int) -> list[Any]:
  return [_at(builder, base, builder.mul(stride, _word(row))) for row in range(count)]


def transposed_block(num_rows: int, num_groups: int, is_bf16: bool) -> Any:
  """Returns an intrinsic: c[rows, 8 * groups] = a[rows, k] @ w[8 * groups, k]^T.

  Its arguments are those of `vectors.transposed_block`.
  """
  element, step_size = (_HALF, 32) if is_bf16 else (_FLOAT, 16)

  @intrinsic
  def block(typing_context, a, a_row, rows, w, w_row, k, c, c_row):
    def codegen(context, builder, signature, arguments):
      a, a_row, rows, w, w_row, k, c, c_row = arguments
      a, c = (builder.inttoptr(pointer, _FLOAT.as_pointer()) for pointer in (a, c))
      w = builder.inttoptr(w, element.as_pointer())
      starts = vectors._row_starts(builder, num_rows, rows, (a, a_row), (c, c_row))
      a_rows, c_rows = starts
      w_rows = _row_starts(builder, w, w_row, LANES * num_groups)
      before, body, after = vectors._loop(builder, "transposed")
      step = builder.phi(_WORD)
      cells = [(row, group) for row in range(num_rows) for group in range(num_groups)]
      sums = {cell: builder.phi(_VECTOR) for cell in cells}
      new = dict(sums)
      ahead = builder.mul(w_row, _word(LANES * num_groups))
      for row in w_rows:  # Prefetches the same steps of the next rows.
        vectors._prefetch(builder, _at(builder, _at(builder, row, step), ahead))
      for part in range(0, step_size, step_size // 2):
        here = builder.add(step, _word(part))
        for group in range(num_groups):
          rows_of = w_rows[LANES * group : LANES * (group + 1)]
          columns = _columns_of(builder, [_at(builder, row, here) for row in rows_of], is_bf16)
          for place, column in enumerate(columns):
            for row in range(num_rows):
              at = _at(builder, a_rows[row], builder.add(here, _word(place)))
              scalar = _splat(builder, builder.load(at))
              new[row, group] = _fma(builder, scalar, column, new[row, group])
      following = builder.add(step, _word(step_size))
      step.add_incoming(_word(0), before)
      step.add_incoming(following, body)
      for cell in cells:
        sums[cell].add_incoming(_ZERO, before)
        sums[cell].add_incoming(new[cell], body)
      builder.cbranch(builder.icmp_signed("<", following, k), body, after)
      builder.position_at_end(after)
      for row, group in cells:
        vectors._store(builder, new[row, group], _at(builder, c_rows[row], _word(LANES * group)))
      return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen

  return block


def transposition(is_bf16: bool) -> Any:
  """Returns an intrinsic: target f32[16, 16] = source f[16, 16]^T.

  Its arguments are int64s: `source`, the elements between its rows, `target`, the floats between
  its rows.
  """
  element, width = (_HALF, 16) if is_bf16 else (_FLOAT, 8)

  @intrinsic
  def transpose(typing_context, source, source_row, target, target_row):
    def codegen(context, builder, signature, arguments):
      source, source_row, target, target_row = arguments
      source = builder.inttoptr(source, element.as_pointer())
      target = builder.inttoptr(target, _FLOAT.as_pointer())
      rows = _row_starts(builder, source, source_row, 16)
      to = _row_starts(builder, target, target_row, 16)
      for group in range(2):
        for part in range(0, 16, width):
          places = [_at(builder, row, _word(part)) for row in rows[8 * group : 8 * group + 8]]
          for place, column in enumerate(_columns_of(builder, places, is_bf16)):
            vectors._store(builder, column, _at(builder, to[part + place], _word(8 * group)))
      return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen

  return transpose
