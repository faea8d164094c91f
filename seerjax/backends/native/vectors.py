"""Vectors of 16 floats: blocks of products and attention, sums in a fixed order, transpositions.

Vectors affect speed only. A product's output is one chain of fused multiply-adds in ascending k,
in whatever block it is computed; a sum of n numbers is 16 partial sums, over the numbers with equal
index mod 16, added as a binary tree. Weights may be float32 or bfloat16, which is widened when it
is read; everything else is float32.

LLVM splits a vector of 16 if the processor's vectors are shorter. No operation has a flag that lets
LLVM reorder or fuse.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from seerjax.backends.native.pointers import intrinsic

# Floats of a vector, and bytes of a cache line.
LANES, LINE = 16, 64

_FLOAT, _HALF, _INT, _WORD = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VECTOR, _HALVES = ir.VectorType(_FLOAT, LANES), ir.VectorType(_HALF, LANES)
_INTS, _MASK = ir.VectorType(_INT, LANES), ir.VectorType(ir.IntType(1), LANES)
_ZERO = ir.Constant(_VECTOR, [0.0] * LANES)
_IOTA = ir.Constant(ir.VectorType(_WORD, LANES), list(range(LANES)))


def _word(value: int):
  return ir.Constant(_WORD, value)


def _splat(builder, scalar):
  undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
  first = builder.insert_element(undefined, scalar, ir.Constant(_INT, 0))
  return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))


def _shuffle(builder, a, b, order: list[int]):
  indices = ir.Constant(ir.VectorType(_INT, len(order)), order)
  return builder.shuffle_vector(a, b, indices)


def _widened(builder, halves):
  """Converts bfloat16 to float32: its bits become the upper half."""
  bits = builder.shl(builder.zext(halves, _INTS), ir.Constant(_INTS, [16] * LANES))
  return builder.bitcast(bits, _VECTOR)


def _element(is_bf16: bool):
  return _HALF if is_bf16 else _FLOAT


def _load(builder, pointer, is_bf16: bool = False):
  """Loads 16 elements at a pointer to the first, as floats."""
  vector = _HALVES if is_bf16 else _VECTOR
  size = 2 if is_bf16 else 4
  loaded = builder.load(builder.bitcast(pointer, vector.as_pointer()), align=size)
  return _widened(builder, loaded) if is_bf16 else loaded


def _load_first(builder, pointer, mask, is_bf16: bool = False):
  """Like `_load`, for the lanes in the mask; other lanes are zero."""
  vector = _HALVES if is_bf16 else _VECTOR
  name = "llvm.masked.load.v16i16.p0" if is_bf16 else "llvm.masked.load.v16f32.p0"
  kind = ir.FunctionType(vector, [vector.as_pointer(), _INT, _MASK, vector])
  function = cgutils.get_or_insert_function(builder.module, kind, name)
  zero = ir.Constant(vector, [0] * LANES) if is_bf16 else _ZERO
  size = ir.Constant(_INT, 2 if is_bf16 else 4)
  loaded = builder.call(function, [builder.bitcast(pointer, vector.as_pointer()), size, mask, zero])
  return _widened(builder, loaded) if is_bf16 else loaded


def _store(builder, value, pointer) -> None:
  builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=4)


def _store_first(builder, value, pointer, mask) -> None:
  kind = ir.FunctionType(ir.VoidType(), [_VECTOR, _VECTOR.as_pointer(), _INT, _MASK])
  function = cgutils.get_or_insert_function(builder.module, kind, "llvm.masked.store.v16f32.p0")
  pointer = builder.bitcast(pointer, _VECTOR.as_pointer())
  builder.call(function, [value, pointer, ir.Constant(_INT, 4), mask])


def _mask(builder, count):
  """Returns the mask of the first `count` lanes."""
  return builder.icmp_signed("<", _IOTA, _splat(builder, count))


def _prefetch(builder, pointer) -> None:
  """Prefetches a cache line for reading; an invalid address does no harm."""
  byte = ir.IntType(8).as_pointer()
  kind = ir.FunctionType(ir.VoidType(), [byte, _INT, _INT, _INT])
  function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
  # For reading, into the second-level cache, as data.
  numbers = [ir.Constant(_INT, number) for number in (0, 2, 1)]
  builder.call(function, [builder.bitcast(pointer, byte), *numbers])


def _fma(builder, x, y, z):
  kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
  function = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32")
  return builder.call(function, [x, y, z])


def _at(builder, pointer, offset):
  return builder.gep(pointer, [offset])


def _loop(builder, name: str):
  """Opens a loop; returns (block before, body, block after)."""
  before, body = builder.block, builder.append_basic_block(name)
  after = builder.append_basic_block(f"{name}_end")
  builder.branch(body)
  builder.position_at_end(body)
  return before, body, after


def _row_starts(builder, num_rows: int, rows, *arrays):
  """Returns the start of each row, by array of (base, stride); rows past the last repeat it."""
  last = builder.sub(rows, _word(1))
  numbers = [
    builder.select(builder.icmp_signed("<", _word(row), last), _word(row), last)
    for row in range(num_rows)
  ]
  return [
    [_at(builder, base, builder.mul(stride, number)) for number in numbers]
    for base, stride in arrays
  ]


def product_block(num_rows: int, num_vectors: int, is_bf16: bool, is_partial: bool = False) -> Any:
  """Returns an intrinsic: c[rows, 16 * vectors] (+)= a[rows, k] @ w[k, 16 * vectors].

  Its arguments are int64s: `a, a_row, a_step` (address, and strides of a row and of a step of k in
  elements), `rows` (1 to `num_rows`; the block repeats the last one to its full height), `w,
  w_step, k` (at least 1), `c, c_row`, `is_added` (whether chains start at the values in c instead
  of zero), `columns` (valid lanes of the last vector if `is_partial`), and `ahead`: if it is not 0,
  the elements at this distance after a row of w are prefetched while the row is read.
  """

  @intrinsic
  def block(
    typing_context, a, a_row, a_step, rows, w, w_step, k, c, c_row, is_added, columns, ahead
  ):
    def codegen(context, builder, signature, arguments):
      a, a_row, a_step, rows, w, w_step, k, c, c_row, is_added, columns, ahead = arguments
      a, c = (builder.inttoptr(pointer, _FLOAT.as_pointer()) for pointer in (a, c))
      w = builder.inttoptr(w, _element(is_bf16).as_pointer())
      mask = _mask(builder, columns) if is_partial else None
      a_rows, c_rows = _row_starts(builder, num_rows, rows, (a, a_row), (c, c_row))
      cells = [(row, vector) for row in range(num_rows) for vector in range(num_vectors)]
      place = {cell: _at(builder, c_rows[cell[0]], _word(cell[1] * LANES)) for cell in cells}
      keep = builder.icmp_signed("!=", is_added, _word(0))

      def read(pointer, is_bf16=False):
        if mask is None:
          return _load(builder, pointer, is_bf16)
        return _load_first(builder, pointer, mask, is_bf16)

      start = {cell: builder.select(keep, read(place[cell]), _ZERO) for cell in cells}
      before, body, after = _loop(builder, "product")
      step = builder.phi(_WORD)
      step.add_incoming(_word(0), before)
      sums = {cell: builder.phi(_VECTOR) for cell in cells}
      w_row = _at(builder, w, builder.mul(step, w_step))
      columns_of = [
        read(_at(builder, w_row, _word(vector * LANES)), is_bf16) for vector in range(num_vectors)
      ]
      with builder.if_then(builder.icmp_signed("!=", ahead, _word(0))):
        later = _at(builder, w_row, ahead)
        for vector in range(0, num_vectors, LINE // (LANES * (2 if is_bf16 else 4))):
          _prefetch(builder, _at(builder, later, _word(vector * LANES)))
      body_end = builder.block
      a_offset = builder.mul(step, a_step)
      new = {}
      for row in range(num_rows):
        scalar = _splat(builder, builder.load(_at(builder, a_rows[row], a_offset)))
        for vector in range(num_vectors):
          cell = row, vector
          sums[cell].add_incoming(start[cell], before)
          new[cell] = _fma(builder, scalar, columns_of[vector], sums[cell])
          sums[cell].add_incoming(new[cell], body_end)
      following = builder.add(step, _word(1))
      step.add_incoming(following, body_end)
      builder.cbranch(builder.icmp_signed("<", following, k), body, after)
      builder.position_at_end(after)
      for cell in cells:
        if mask is None:
          _store(builder, new[cell], place[cell])
        else:
          _store_first(builder, new[cell], place[cell], mask)
      return context.get_dummy_value()

    return types.void(*[types.int64] * 12), codegen

  return block


def pack_block(num_vectors: int, is_bf16: bool) -> Any:
  """Returns an intrinsic: panel f32[vectors, k, 16] = w[k, 16 * vectors].

  Its arguments are int64s: `w, w_step, k` as in `product_block`, and `panel`, an address.
  """

  @intrinsic
  def pack(typing_context, w, w_step, k, panel):
    def codegen(context, builder, signature, arguments):
      w, w_step, k, panel = arguments
      w = builder.inttoptr(w, _element(is_bf16).as_pointer())
      panel = builder.inttoptr(panel, _FLOAT.as_pointer())
      before, body, after = _loop(builder, "pack")
      step = builder.phi(_WORD)
      step.add_incoming(_word(0), before)
      row = _at(builder, w, builder.mul(step, w_step))
      for vector in range(num_vectors):
        value = _load(builder, _at(builder, row, _word(vector * LANES)), is_bf16)
        place = builder.add(builder.mul(k, _word(vector)), step)
        _store(builder, value, _at(builder, panel, builder.mul(place, _word(LANES))))
      following = builder.add(step, _word(1))
      step.add_incoming(following, body)
      builder.cbranch(builder.icmp_signed("<", following, k), body, after)
      builder.position_at_end(after)
      return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen

  return pack


def score_block(num_rows: int, num_vectors: int, is_bf16: bool) -> Any:
  """Returns an intrinsic: scores[rows, 16 * vectors] = q[rows, c] @ keys, 16 slots per vector.

  Its arguments are int64s: `q, q_row, rows` as in `product_block`; the addresses of four vectors of
  slots, at their first feature (those past `num_vectors` are not read); those of the vectors that
  are read next, which are prefetched; `k_step, k`, the slots between two features and the number of
  features, at least 1; `scores, scores_row`.
  """

  @intrinsic
  def block(
    typing_context, q, q_row, rows, k0, k1, k2, k3, n0, n1, n2, n3, k_step, k, scores, scores_row
  ):  # fmt: skip
    def codegen(context, builder, signature, arguments):
      q, q_row, rows = arguments[:3]
      k_step, k, scores, scores_row = arguments[11:]
      q, scores = (builder.inttoptr(pointer, _FLOAT.as_pointer()) for pointer in (q, scores))
      element = _element(is_bf16).as_pointer()
      keys = [builder.inttoptr(pointer, element) for pointer in arguments[3 : 3 + num_vectors]]
      later = [builder.inttoptr(pointer, element) for pointer in arguments[7 : 7 + num_vectors]]
      starts = _row_starts(builder, num_rows, rows, (q, q_row), (scores, scores_row))
      q_rows, score_rows = starts
      cells = [(row, vector) for row in range(num_rows) for vector in range(num_vectors)]
      before, body, after = _loop(builder, "scores")
      step = builder.phi(_WORD)
      step.add_incoming(_word(0), before)
      sums = {cell: builder.phi(_VECTOR) for cell in cells}
      offset = builder.mul(step, k_step)
      slots = [_load(builder, _at(builder, pointer, offset), is_bf16) for pointer in keys]
      for pointer in later:
        _prefetch(builder, _at(builder, pointer, offset))
      new = {}
      for row in range(num_rows):
        scalar = _splat(builder, builder.load(_at(builder, q_rows[row], step)))
        for vector in range(num_vectors):
          cell = row, vector
          sums[cell].add_incoming(_ZERO, before)
          new[cell] = _fma(builder, scalar, slots[vector], sums[cell])
          sums[cell].add_incoming(new[cell], body)
      next_step = builder.add(step, _word(1))
      step.add_incoming(next_step, body)
      builder.cbranch(builder.icmp_signed("<", next_step, k), body, after)
      builder.position_at_end(after)
      for row, vector in cells:
        place = _at(builder, score_rows[row], _word(vector * LANES))
        _store(builder, new[row, vector], place)
      return context.get_dummy_value()

    return types.void(*[types.int64] * 15), codegen

  return block


# Chains of a weighted sum of values, by position mod 4.
CHAINS = 4


def value_block(num_rows: int, num_vectors: int, is_bf16: bool, num_chains: int) -> Any:
  """Returns an intrinsic: chains[rows, 4, 16 * vectors] += weights[rows, x] @ values, x by mod 4.

  A call continues `num_chains` of the four chains from their values in `chains`, from `first_chain`
  on, and reads only their positions.

  Its arguments are int64s: `weights, weights_row, rows` as in `product_block`; `values, value_row`,
  the address of the columns in page 0 and the features of a slot; `table`, the address of the page
  indices, i32; `page_size`, a multiple of 4; `count`, the number of positions, a multiple of 4 and
  at least 4; `first_chain`; `chains, chains_row, chain`, the target and the floats between its rows
  and chains. Pages are `page_size` slots apart; the next one is prefetched.
  """

  @intrinsic
  def block(
    typing_context, weights, weights_row, rows, values, value_row, table, page_size, count,
    first_chain, chains, chains_row, chain,
  ):  # fmt: skip
    def codegen(context, builder, signature, arguments):
      weights, weights_row, rows, values, value_row, table, page_size, count = arguments[:8]
      first_chain, chains, chains_row, chain = arguments[8:]
      weights, chains = (
        builder.inttoptr(pointer, _FLOAT.as_pointer()) for pointer in (weights, chains)
      )
      values = builder.inttoptr(values, _element(is_bf16).as_pointer())
      table = builder.inttoptr(table, _INT.as_pointer())
      starts = _row_starts(builder, num_rows, rows, (weights, weights_row), (chains, chains_row))
      weight_rows, chain_rows = starts
      page_elements = builder.mul(page_size, value_row)
      parts = [builder.add(first_chain, _word(part)) for part in range(num_chains)]
      cells = [
        (row, part, vector)
        for row in range(num_rows)
        for part in range(num_chains)
        for vector in range(num_vectors)
      ]
      target = {
        (row, part, vector): _at(
          builder,
          chain_rows[row],
          builder.add(builder.mul(chain, parts[part]), _word(vector * LANES)),
        )
        for row, part, vector in cells
      }
      begun = {cell: _load(builder, target[cell]) for cell in cells}
      before, each_page, after = _loop(builder, "pages")
      page = builder.phi(_WORD)
      page.add_incoming(_word(0), before)
      held = {cell: builder.phi(_VECTOR) for cell in cells}
      next_page = builder.add(page, _word(1))
      first = builder.mul(page, page_size)
      left = builder.sub(count, first)
      more = builder.icmp_signed(">", left, page_size)
      slots = builder.select(more, page_size, left)

      def start_of(page):
        number = builder.sext(builder.load(_at(builder, table, page)), _WORD)
        return _at(builder, values, builder.mul(number, page_elements))

      start, later = start_of(page), start_of(builder.select(more, next_page, page))
      _, body, page_end = _loop(builder, "slots")
      slot = builder.phi(_WORD)
      slot.add_incoming(_word(0), each_page)
      sums = {cell: builder.phi(_VECTOR) for cell in cells}
      new = {}
      for part in range(num_chains):
        place = builder.add(slot, parts[part])
        offset = builder.mul(place, value_row)
        columns = []
        for vector in range(num_vectors):
          at = builder.add(offset, _word(vector * LANES))
          columns.append(_load(builder, _at(builder, start, at), is_bf16))
          _prefetch(builder, _at(builder, later, at))
        position = builder.add(first, place)
        for row in range(num_rows):
          scalar = _splat(builder, builder.load(_at(builder, weight_rows[row], position)))
          for vector in range(num_vectors):
            cell = row, part, vector
            new[cell] = _fma(builder, scalar, columns[vector], sums[cell])
      for cell in cells:
        held[cell].add_incoming(begun[cell], before)
        held[cell].add_incoming(new[cell], page_end)
        sums[cell].add_incoming(held[cell], each_page)
        sums[cell].add_incoming(new[cell], body)
      next_slot = builder.add(slot, _word(CHAINS))
      slot.add_incoming(next_slot, body)
      builder.cbranch(builder.icmp_signed("<", next_slot, slots), body, page_end)
      builder.position_at_end(page_end)
      page.add_incoming(next_page, page_end)
      builder.cbranch(more, each_page, after)
      builder.position_at_end(after)
      for cell in cells:
        _store(builder, new[cell], target[cell])
      return context.get_dummy_value()

    return types.void(*[types.int64] * 12), codegen

  return block


def _tree(builder, vector, combine):
  """Reduces 16 lanes to one, combining halves four times."""
  for count in (8, 4, 2, 1):
    low = _shuffle(builder, vector, vector, list(range(count)))
    high = _shuffle(builder, vector, vector, list(range(count, 2 * count)))
    vector = combine(low, high)
  return builder.extract_element(vector, ir.Constant(_INT, 0))


def _reduction(kind: str) -> Any:
  @intrinsic
  def reduction(typing_context, x, y, count):
    def codegen(context, builder, signature, arguments):
      x, y, count = arguments
      x, y = (builder.inttoptr(pointer, _FLOAT.as_pointer()) for pointer in (x, y))
      first = ir.Constant(_VECTOR, [-math.inf if kind == "maximum" else 0.0] * LANES)

      def larger(a, b):
        return builder.select(builder.fcmp_ordered(">", b, a), b, a)

      def combined(total, here, other):
        if kind == "sum":
          return builder.fadd(total, here)
        if kind == "dot":
          return _fma(builder, here, other(), total)
        return larger(total, here)

      whole = builder.and_(count, _word(-LANES))
      before_body = builder.append_basic_block("whole")
      body, after = builder.append_basic_block("vectors"), builder.append_basic_block("rest")
      some, done = builder.append_basic_block("partial"), builder.append_basic_block("done")
      builder.branch(before_body)
      builder.position_at_end(before_body)
      builder.cbranch(builder.icmp_signed(">", whole, _word(0)), body, after)
      builder.position_at_end(body)
      index, total = builder.phi(_WORD), builder.phi(_VECTOR)
      index.add_incoming(_word(0), before_body)
      total.add_incoming(first, before_body)
      here = _load(builder, _at(builder, x, index))
      new = combined(total, here, lambda: _load(builder, _at(builder, y, index)))
      following = builder.add(index, _word(LANES))
      index.add_incoming(following, body)
      total.add_incoming(new, body)
      builder.cbranch(builder.icmp_signed("<", following, whole), body, after)
      builder.position_at_end(after)
      total = builder.phi(_VECTOR)
      total.add_incoming(first, before_body)
      total.add_incoming(new, body)
      builder.cbranch(builder.icmp_signed("<", whole, count), some, done)
      builder.position_at_end(some)
      mask = _mask(builder, builder.sub(count, whole))
      here = _load_first(builder, _at(builder, x, whole), mask)
      if kind == "maximum":
        here = builder.select(mask, here, first)
      rest = combined(total, here, lambda: _load_first(builder, _at(builder, y, whole), mask))
      builder.branch(done)
      builder.position_at_end(done)
      vector = builder.phi(_VECTOR)
      vector.add_incoming(total, after)
      vector.add_incoming(rest, some)
      return _tree(builder, vector, larger if kind == "maximum" else builder.fadd)

    return types.float32(types.int64, types.int64, types.int64), codegen

  return reduction


# (address, the same or another address, count) -> float: lane l has the partial sum of the numbers
# l, l + 16, ..., and the lanes are added as a tree. The maximum of no numbers is minus infinity.
sum_of = _reduction("sum")
dot_of = _reduction("dot")
maximum_of = _reduction("maximum")


def _transposed(builder, rows):
  """Transposes 16 rows of 16: interleaves row i with row i + 8, four times."""
  low = [i // 2 + LANES * (i % 2) for i in range(LANES)]
  high = [LANES // 2 + place for place in low]
  for _ in range(4):
    pairs = list(zip(rows[: LANES // 2], rows[LANES // 2 :], strict=True))
    rows = [_shuffle(builder, a, b, order) for a, b in pairs for order in (low, high)]
  return rows


def _transposition(is_bf16: bool) -> Any:
  @intrinsic
  def transpose(typing_context, source, source_row, target, target_row):
    def codegen(context, builder, signature, arguments):
      source, source_row, target, target_row = arguments
      source = builder.inttoptr(source, _element(is_bf16).as_pointer())
      target = builder.inttoptr(target, _FLOAT.as_pointer())
      rows = [
        _load(builder, _at(builder, source, builder.mul(source_row, _word(row))), is_bf16)
        for row in range(LANES)
      ]
      for row, vector in enumerate(_transposed(builder, rows)):
        _store(builder, vector, _at(builder, target, builder.mul(target_row, _word(row))))
      return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen

  return transpose


# (source, elements between its rows, target, floats between its rows): transposes 16 rows of 16.
transpose_f32 = _transposition(False)
transpose_bf16 = _transposition(True)


def _load_pairs(builder, pointer):
  """Loads 32 bfloat16 at a pointer to the first, as 16 pairs."""
  return builder.load(builder.bitcast(pointer, _INTS.as_pointer()), align=2)


def _halves_of(builder, pairs):
  """Converts pairs of bfloat16 to the floats of the first, and of the second."""
  first = builder.shl(pairs, ir.Constant(_INTS, [16] * LANES))
  second = builder.and_(pairs, ir.Constant(_INTS, [0xFFFF0000] * LANES))
  return builder.bitcast(first, _VECTOR), builder.bitcast(second, _VECTOR)


def transposed_block(num_rows: int, is_bf16: bool) -> Any:
  """Returns an intrinsic: c[rows, 16] = a[rows, k] @ w[16, k]^T, transposed in registers.

  Its arguments are int64s: `a, a_row, rows` (1 to `num_rows`), `w, w_row, k` (a multiple of 16 for
  float32, of 32 for bfloat16, which is transposed in pairs) and `c, c_row`.
  """

  @intrinsic
  def block(typing_context, a, a_row, rows, w, w_row, k, c, c_row):
    def codegen(context, builder, signature, arguments):
      a, a_row, rows, w, w_row, k, c, c_row = arguments
      a, c = (builder.inttoptr(pointer, _FLOAT.as_pointer()) for pointer in (a, c))
      w = builder.inttoptr(w, _element(is_bf16).as_pointer())
      last = builder.sub(rows, _word(1))

      def row_start(base, stride, row: int):
        inside = builder.icmp_signed("<", _word(row), last)
        return _at(builder, base, builder.mul(stride, builder.select(inside, _word(row), last)))

      a_rows = [row_start(a, a_row, row) for row in range(num_rows)]
      w_rows = [_at(builder, w, builder.mul(w_row, _word(row))) for row in range(LANES)]
      before, body, after = _loop(builder, "transposed")
      step = builder.phi(_WORD)
      sums = [builder.phi(_VECTOR) for _ in range(num_rows)]
      places = [_at(builder, row, step) for row in w_rows]
      for place in places:  # Prefetches the same steps of the next 16 rows.
        _prefetch(builder, _at(builder, place, builder.mul(w_row, _word(LANES))))
      if is_bf16:
        pairs = _transposed(builder, [_load_pairs(builder, place) for place in places])
        steps = [half for pair in pairs for half in _halves_of(builder, pair)]
      else:
        steps = _transposed(builder, [_load(builder, place) for place in places])
      new = list(sums)
      for place, column in enumerate(steps):
        for row in range(num_rows):
          at = _at(builder, a_rows[row], builder.add(step, _word(place)))
          new[row] = _fma(builder, _splat(builder, builder.load(at)), column, new[row])
      following = builder.add(step, _word(len(steps)))
      step.add_incoming(_word(0), before)
      step.add_incoming(following, body)
      for total, value in zip(sums, new, strict=True):
        total.add_incoming(_ZERO, before)
        total.add_incoming(value, body)
      builder.cbranch(builder.icmp_signed("<", following, k), body, after)
      builder.position_at_end(after)
      for row in range(num_rows):
        _store(builder, new[row], row_start(c, c_row, row))
      return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen

  return block
