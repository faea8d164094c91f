"""Paged attention: the definition, and bits that depend on a row's own sequence only."""

from __future__ import annotations

import dataclasses
import itertools

from attention_cases import (
  HEAD_DIM,
  HEADS,
  NUMERICS,
  attend,
  batch_of,
  pages_like,
  rows_of,
  run,
  sequence_of,
)
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seerjax.backends import choice
from seerjax.ops import attention

UNTILED = dataclasses.replace(NUMERICS, backend="untiled")

# Agreement.


@pytest.mark.thorough
@pytest.mark.few(2)
@pytest.mark.parametrize(
  ("group", "dtype", "numerics"),
  [
    (1, "float32", NUMERICS),
    (2, "bfloat16", NUMERICS),
    (4, "float32", NUMERICS),
    (2, "float32", UNTILED),
  ],
  ids=["1-f32", "2-bf16", "4-f32", "untiled"],
)
def test_packed_sequences_and_their_gradients_are_the_definitions(group, dtype, numerics):
  # 1, tile - 1, tile, tile + 1 positions, and up to three splits.
  lengths = (1, 3, 4, 5, 41)
  sequences = [sequence_of(n, group, dtype, seed=n) for n in lengths]
  pieces = [(j, 0, n) for j, n in enumerate(lengths)]
  batch = batch_of(pieces, rows=64, segments=20, width=6, page_size=8)
  q, k, v = rows_of(sequences, pieces, 64)
  pages = pages_like(1 + len(lengths) * 6, 8, dtype)
  weights = jnp.asarray(np.random.default_rng(9).standard_normal(q.shape), jnp.float32)
  live = jnp.arange(64) < batch.num_rows

  @jax.jit
  def ours(args):
    out, _, _ = run(*args, pages, pages, batch, numerics)
    out = jnp.where(live[:, None, None, None], out.astype(jnp.float32), 0.0)
    return jnp.sum(out * weights), out

  @jax.jit
  def reference(args):
    parts, first = [], 0
    for n in lengths:
      parts.append(attention.attention_reference(*(x[first : first + n] for x in args)))
      first += n
    out = jnp.concatenate([*parts, jnp.zeros((64 - first, *q.shape[1:]))])
    return jnp.sum(out * weights), out

  (_, found), gradient = jax.value_and_grad(ours, has_aux=True)((q, k, v))
  exact = tuple(x.astype(jnp.float32) for x in (q, k, v))
  (_, expected), expected_gradient = jax.value_and_grad(reference, has_aux=True)(exact)
  value, slope = (2e-6, 1e-5) if dtype == "float32" else (2e-2, 4e-2)
  atol = value * float(jnp.max(jnp.abs(expected)))
  np.testing.assert_allclose(found, expected, rtol=0, atol=atol)
  for got, want in zip(gradient, expected_gradient):
    assert got.dtype == jnp.dtype(dtype)
    atol = slope * float(jnp.max(jnp.abs(want)))
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=0, atol=atol)
  if numerics is NUMERICS:
    # The value computed under a gradient has the same bits.
    np.testing.assert_array_equal(ours((q, k, v))[1], found)


def attended(q: jax.Array, stored: int, numerics) -> np.ndarray:
  """Returns the attention of q f[n, k, g, c] over random pages of `stored` heads."""
  rng = np.random.default_rng(3)
  batch = batch_of([(0, 40, 1), (1, 3, 9)], rows=16, segments=8, width=6, page_size=8)
  shape = (2, 1, 13, 8, q.shape[3])
  keys, values = (
    jnp.broadcast_to(jnp.asarray(x, q.dtype), (stored, *x.shape[1:]))
    for x in rng.standard_normal(shape)
  )
  backend = choice.backend_of(numerics)
  if numerics.backend == "native":
    keys = jnp.swapaxes(keys, 2, 3)
  rows = attention.segment_rows(batch, numerics, 8)
  run = jax.jit(lambda q, pages: backend.attend(q, pages, batch, rows))
  return np.asarray(run(q, (keys, values)))[: int(batch.num_rows)]


@pytest.mark.parametrize("backend", ["tiled", "untiled", "native"])
def test_heads_that_share_pages_have_the_bits_of_pages_of_their_own(backend):
  numerics = dataclasses.replace(NUMERICS, backend=backend)
  for heads, group in ((4, 1), (2, 3)):
    q = np.random.default_rng(1).standard_normal((16, heads, group, 16))
    q = jnp.asarray(q, jnp.float32)
    expected = attended(q, heads, numerics)
    assert np.array_equal(attended(q, 1, numerics), expected)
    # A head alone, as on a device of its own.
    one = attended(q[:, 1:2], 1, numerics)
    assert np.array_equal(one, expected[:, 1:2]) or backend == "untiled"


@pytest.mark.thorough
@pytest.mark.parametrize("numerics", [NUMERICS, UNTILED], ids=["tiled", "untiled"])
def test_gradients_of_shared_pages_are_the_definitions(numerics):
  """Two sequences read the first two pages of a third, the only one with rows for them."""
  lengths, shared, size = (20, 17, 30), 16, 8
  starts = (0, shared, shared)
  pieces = [(j, first, n - first) for j, (n, first) in enumerate(zip(lengths, starts))]
  pages_of = lambda j: np.asarray([1, 2, *range(1 + 6 * j + 2, 7 + 6 * j)])
  batch = batch_of(pieces, rows=64, segments=20, width=6, page_size=size, pages_of=pages_of)
  q, k, v = rows_of([sequence_of(n, 2, seed=n) for n in lengths], pieces, 64)
  pages = pages_like(1 + 3 * 6, size)
  weights = jnp.asarray(np.random.default_rng(9).standard_normal(q.shape), jnp.float32)
  live = jnp.arange(64) < batch.num_rows
  assert int(batch.num_rows) == 20 + 1 + 14

  @jax.jit
  def ours(args):
    out, _, _ = run(*args, pages, pages, batch, numerics)
    return jnp.sum(jnp.where(live[:, None, None, None], out, 0.0) * weights)

  @jax.jit
  def reference(args):
    q, k, v = args
    total, row = 0.0, 0
    for _, first, count in pieces:
      rows = slice(row, row + count)
      queries = jnp.concatenate([jnp.zeros_like(q[:first]), q[rows]])
      whole = [jnp.concatenate([x[:first], x[rows]]) for x in (k, v)]
      out = attention.attention_reference(queries, *whole)[first:]
      total, row = total + jnp.sum(out * weights[rows]), row + count
    return total

  value, gradient = jax.value_and_grad(ours)((q, k, v))
  expected, expected_gradient = jax.value_and_grad(reference)((q, k, v))
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  for got, want in zip(gradient, expected_gradient):
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * float(jnp.max(jnp.abs(want))))
  # Twin: the part of the owner's keys that only the others read is not negligible.
  alone = batch._replace(num_rows=jnp.int32(20), num_segments=jnp.int32(5))

  def of_owner(args):
    out, _, _ = run(*args, pages, pages, alone, numerics)
    return jnp.sum(jnp.where((jnp.arange(64) < 20)[:, None, None, None], out, 0.0) * weights)

  _, own_k, _ = jax.grad(of_owner)((q, k, v))
  assert float(jnp.max(jnp.abs(own_k[:16] - gradient[1][:16]))) > 0.01


def test_no_rows_give_nothing():
  batch = batch_of([(0, 0, 1)], rows=8, segments=4, width=3, page_size=16)
  batch = batch._replace(
    num_rows=jnp.int32(0), num_segments=jnp.int32(0), segment_length=jnp.zeros(4, jnp.int32)
  )
  q, k, v = sequence_of(8, 2)
  out, k_pages, _ = run(q, k, v, pages_like(4, 16), pages_like(4, 16), batch, NUMERICS)
  np.testing.assert_array_equal(out, np.zeros_like(out))
  np.testing.assert_array_equal(k_pages, pages_like(4, 16))


# Splits.


def partial_of(seed, visible):
  rng = np.random.default_rng(seed)
  q, k, v = (jnp.asarray(rng.standard_normal((2, n, HEAD_DIM)), jnp.float32) for n in (3, 8, 8))
  return attention.split_partial(q, k, v, jnp.broadcast_to(visible, (2, 3, 8)))


def test_a_fully_masked_split_contributes_nothing_bit_for_bit():
  some = partial_of(0, jnp.arange(8) < 5)
  nothing = partial_of(1, jnp.zeros(8, bool))
  for merged in (attention.merge(some, nothing), attention.merge(nothing, some)):
    for found, wanted in zip(merged, some):
      np.testing.assert_array_equal(found, wanted)
  empty = attention.merge(nothing, nothing)
  np.testing.assert_array_equal(empty.total, jnp.zeros((2, 3)))
  np.testing.assert_array_equal(empty.weighted, jnp.zeros((2, 3, HEAD_DIM)))


def test_merging_by_hand():
  def one(maximum, total, value):
    return attention.Partial(
      jnp.float32([maximum]), jnp.float32([total]), jnp.float32([[total * value]])
    )

  # exp(0) of value 2 and three of exp(-log 2) of value 10: (1 * 2 + 1.5 * 10) / 2.5.
  merged = attention.merge(one(0.0, 1.0, 2.0), one(-np.log(2.0), 3.0, 10.0))
  np.testing.assert_allclose(merged.total, [2.5], rtol=1e-6)
  np.testing.assert_allclose(merged.weighted[0] / merged.total, [17 / 2.5], rtol=1e-6)


# Bits.

LENGTH = 41  # Two whole splits and part of a third.


@pytest.mark.thorough
@pytest.mark.few(1)
@pytest.mark.parametrize(
  ("group", "dtype"), [(1, "float32"), (2, "bfloat16"), (4, "float32")], ids=str
)
def test_bits_follow_no_neighbour_placement_page_size_or_cut(group, dtype):
  mine = sequence_of(LENGTH, group, dtype)
  others = [sequence_of(n, group, dtype, seed=n) for n in (7, 48, 16)]
  sequences = [mine, *others]
  alone = attend(sequences, [(0, 0, LENGTH)], rows=48, segments=12)

  neighbours = [(1, 0, 7), (0, 0, LENGTH), (2, 0, 48), (3, 0, 16)]
  among = attend(sequences, neighbours, rows=112, segments=30)
  np.testing.assert_array_equal(among[7 : 7 + LENGTH], alone)
  # Another slot of the slot tile.
  moved = attend(sequences, [(1, 0, 1), (0, 0, LENGTH)], rows=48, segments=12)
  np.testing.assert_array_equal(moved[1:], alone)
  # Other pages, in any order.
  scattered = attend(
    sequences, [(0, 0, LENGTH)], rows=48, segments=12, pages_of=lambda _: [9, 2, 6]
  )
  np.testing.assert_array_equal(scattered, alone)
  # Smaller pages.
  small = attend(
    sequences, [(0, 0, LENGTH)], rows=48, segments=12, width=12, page_size=4, num_pages=40
  )
  np.testing.assert_array_equal(small, alone)
  # A wider page table; and no wider than needed, where a single split is all there is.
  wide = attend(
    sequences,
    [(0, 0, LENGTH)],
    rows=48,
    segments=12,
    width=6,
    pages_of=lambda _: [1, 2, 3, 0, 0, 0],
  )
  np.testing.assert_array_equal(wide, alone)
  short = attend(sequences, [(0, 0, 9)], rows=12, segments=3, width=1)
  np.testing.assert_array_equal(short, alone[:9])
  single = attend(sequences, [(0, 0, 3)], rows=4, segments=1, width=1)
  np.testing.assert_array_equal(single, alone[:3])


@pytest.mark.parametrize(
  "query_tile, group, dtype",
  [
    (4, 7, "float32"),  # Here it was seen.
    *(
      pytest.param(*shape, dtype, marks=pytest.mark.long)
      for shape in ((2, 3), (2, 5), (2, 6), (4, 3), (4, 5), (8, 7))
      for dtype in ("float32", "bfloat16")
    ),
  ],
)
def test_bits_follow_no_place_in_a_segment_whatever_the_group(query_tile, group, dtype):
  # A product takes its rows 4 or 8 at a time, and those left over in another way.
  numerics = dataclasses.replace(NUMERICS, query_tile=query_tile)
  sequence, length = [sequence_of(48, group, dtype)], 48
  found = []
  for first in range(query_tile):
    starts = [0, *range(first or query_tile, length, query_tile)]
    pieces = [(0, start, end - start) for start, end in itertools.pairwise([*starts, length])]
    found.append(attend(sequence, pieces, rows=48, segments=25, numerics=numerics))
  for other in found[1:]:
    np.testing.assert_array_equal(other, found[0])


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_verification_and_chunks_are_prefill(dtype):
  mine, other = sequence_of(LENGTH, 2, dtype), sequence_of(LENGTH, 2, dtype, seed=1)
  whole = attend([mine], [(0, 0, LENGTH)], rows=48, segments=12)
  for step in (1, 4, 7):  # Decode, verification of a segment, chunks cut at odd places.
    k_pages = v_pages = pages_like(13, 16, dtype)
    outs = []
    for first in range(0, LENGTH, step):
      count = min(step, LENGTH - first)
      pieces = [(1, first, count), (0, first, count)]
      batch = batch_of(pieces, rows=16, segments=4, width=3, page_size=16)
      q, k, v = rows_of([mine, other], pieces, 16)
      out, k_pages, v_pages = run(q, k, v, k_pages, v_pages, batch, NUMERICS)
      outs.append(np.asarray(out)[count : 2 * count])
    np.testing.assert_array_equal(np.concatenate(outs), whole, err_msg=f"{step} rows a step")


@pytest.mark.parametrize("fill", [1e4, -3e37])
def test_what_invisible_pages_hold_changes_nothing(fill):
  mine = sequence_of(LENGTH, 2)
  clean = attend([mine], [(0, 0, LENGTH)], rows=48, segments=12)
  np.testing.assert_array_equal(
    attend([mine], [(0, 0, LENGTH)], rows=48, segments=12, fill=fill), clean
  )


def test_a_bit_of_a_visible_key_changes_the_rows_that_see_it():
  # Twin that must differ; otherwise the tests above would show nothing.
  q, k, v = sequence_of(LENGTH, 2)
  clean = attend([(q, k, v)], [(0, 0, LENGTH)], rows=48, segments=12)
  flipped = jax.lax.bitcast_convert_type(
    jax.lax.bitcast_convert_type(v, jnp.int32)
    .at[20]
    .set(jax.lax.bitcast_convert_type(v[20], jnp.int32) ^ 1),
    jnp.float32,
  )
  found = attend([(q, k, flipped)], [(0, 0, LENGTH)], rows=48, segments=12)
  np.testing.assert_array_equal(found[:20], clean[:20])
  assert np.any(found[20:] != clean[20:])


def test_a_split_that_follows_the_length_changes_bits():
  # Another twin: splits of 16 against splits of 8.
  mine = sequence_of(LENGTH, 2)
  clean = attend([mine], [(0, 0, LENGTH)], rows=48, segments=12)
  other = dataclasses.replace(NUMERICS, kv_split=8)
  found = attend(
    [mine],
    [(0, 0, LENGTH)],
    rows=48,
    segments=12,
    page_size=8,
    width=6,
    num_pages=40,
    numerics=other,
  )
  np.testing.assert_allclose(found, clean, rtol=1e-5, atol=1e-6)
  assert np.any(found != clean)


# Pages.


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_rows_are_written_to_their_slots_and_nowhere_else(count):
  values = sequence_of(5, 1)[1]
  slots = jnp.asarray([9, 4, 31, 8, 17], jnp.int32)
  pages = pages_like(5, 8, fill=-1.0)
  write = attention.write_pages
  written = jax.jit(write)(pages, values, slots, jnp.int32(count))
  expected = np.array(pages).reshape(HEADS, 40, HEAD_DIM)
  for row in range(count):
    expected[:, int(slots[row])] = values[row]
  np.testing.assert_array_equal(written, expected.reshape(pages.shape))


@pytest.mark.parametrize("count", [0, 3, 5])
def test_the_gradient_of_written_pages_goes_to_what_they_hold(count):
  values = sequence_of(5, 1)[1]
  slots = jnp.asarray([9, 4, 31, 8, 17], jnp.int32)
  pages = pages_like(5, 8)
  weights = jnp.asarray(np.random.default_rng(3).standard_normal(pages.shape), jnp.float32)

  def loss(pages, values):
    written = attention.write_pages(pages, values, slots, jnp.int32(count))
    return jnp.sum(written * weights)

  def reference(pages, values):
    flat = pages.reshape(HEADS, 40, HEAD_DIM)
    flat = flat.at[:, slots[:count]].set(jnp.swapaxes(values[:count], 0, 1))
    return jnp.sum(flat.reshape(pages.shape) * weights)

  found = jax.jit(jax.grad(loss, (0, 1)))(pages, values)
  expected = jax.jit(jax.grad(reference, (0, 1)))(pages, values)
  for got, want in zip(found, expected):
    np.testing.assert_array_equal(got, want)


def test_places_of_rows_and_segments_by_hand():
  batch = batch_of([(0, 2, 5), (1, 0, 1)], rows=8, segments=4, width=3, page_size=16)
  rows = attention.segment_rows(batch, NUMERICS, 16)
  np.testing.assert_array_equal(
    rows.position_of, [[2, 3, 4, 5], [6, -1, -1, -1], [0, -1, -1, -1], [-1, -1, -1, -1]]
  )
  np.testing.assert_array_equal(rows.row_of[:3], [[0, 1, 2, 3], [4, 0, 0, 0], [5, 0, 0, 0]])
  np.testing.assert_array_equal(rows.place_of[:6], [0, 1, 2, 3, 4, 8])


def test_items_of_work_by_hand():
  # Positions up to 33 and 34 reach into three splits of 16, position 0 into one.
  batch = batch_of([(0, 30, 5), (1, 0, 1)], rows=8, segments=4, width=3, page_size=16)
  rows = attention.segment_rows(batch, NUMERICS, 16)
  np.testing.assert_array_equal(rows.num_splits, [[3, 3], [1, 0]])
  np.testing.assert_array_equal(rows.first_item, [[0, 3], [0, 1]])
  np.testing.assert_array_equal(rows.segment_of[0], [0, 0, 0, 1, 1, 1])
  np.testing.assert_array_equal(rows.split_of[0], [0, 1, 2, 0, 1, 2])
  assert rows.segment_of[1, 0] == 2 and rows.split_of[1, 0] == 0


def test_an_only_block_or_tile_never_stands_alone():
  # XLA would unroll a loop with a single iteration.
  batch = batch_of([(0, 0, 1)], rows=1, segments=1, width=1, page_size=16)
  rows = attention.segment_rows(batch, NUMERICS, 16)
  assert rows.num_splits.shape == (2, NUMERICS.slot_tile)
  assert rows.segment_of.shape == (2, 2 * NUMERICS.slot_tile)


def test_pages_keep_the_order_of_their_axes_on_a_tpu_and_say_nothing_elsewhere():
  pages, values = jnp.zeros((HEADS, 3, 4, HEAD_DIM)), jnp.ones((5, HEADS, HEAD_DIM))
  arguments = pages, values, jnp.arange(5, dtype=jnp.int32), jnp.int32(5)
  traced = jax.jit(attention.write_pages).trace(*arguments)
  texts = {p: traced.lower(lowering_platforms=(p,)).as_text() for p in ("tpu", "cpu", "cuda")}
  assert [name for name, text in texts.items() if "LayoutConstraint" in text] == ["tpu"]
