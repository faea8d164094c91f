"""The native backend's paged attention has the bits of the same chains in NumPy."""

import functools

import jax
import jax.numpy as jnp
import native_reference as reference
import numpy as np
import pytest

from seerjax import numerics as numerics_lib
from seerjax.backends import tiled
from seerjax.backends.native import attention, pages as native_pages
from seerjax.ops import attention as tiled_attention
from seerjax.types import TokenBatch

# (heads, group, head_dim, page_size): pages and features that vectors divide, and others.
SHAPES = (
  (2, 1, 16, 32), (1, 2, 32, 16), (1, 3, 6, 8), (2, 2, 80, 64), (1, 5, 21, 2), (1, 1, 24, 3)
)  # fmt: skip
# (sequence, first position, rows): a decoding step of many lengths; prompts and chunks.
DECODE = ((0, 0, 1), (1, 3, 1), (2, 15, 1), (3, 16, 1), (4, 90, 1), (5, 64, 1))
CHUNKS = ((0, 0, 9), (1, 0, 4), (2, 61, 19), (3, 30, 3))
CONTEXT = 96


def batch_of(pieces, *, page_size, query_tile, rows, order=None):
  """Sequences own their pages in a shuffled order; segments of `query_tile` positions."""
  width = -(-CONTEXT // page_size)
  num_pages = 1 + width * (1 + max(sequence for sequence, _, _ in pieces))
  order = np.random.default_rng(5).permutation(num_pages - 1) + 1 if order is None else order
  tables = order.reshape(-1, width)
  positions, slots, starts, lengths, table = [], [], [], [], []
  for sequence, first, count in pieces:
    for offset in range(0, count, query_tile):
      starts.append(len(positions) + offset)
      lengths.append(min(query_tile, count - offset))
      table.append(tables[sequence])
    place = np.arange(first, first + count)
    positions.extend(place)
    slots.extend(tables[sequence][place // page_size] * page_size + place % page_size)
  pad = lambda x, size: np.pad(np.asarray(x, np.int32), (0, size - len(x)))
  batch = TokenBatch(
    tokens=np.zeros(rows, np.int32),
    positions=pad(positions, rows),
    slots=pad(slots, rows),
    num_rows=np.int32(len(positions)),
    segment_start=pad(starts, rows),
    segment_length=pad(lengths, rows),
    page_table=np.concatenate([table, np.zeros((rows - len(table), width))]).astype(np.int32),
    num_segments=np.int32(len(starts)),
  )
  return batch, tables, num_pages


def arrays_of(shape, num_pages, rows, dtype, seed=0):
  """Queries, a layer's pages and the rows' own keys and values."""
  heads, group, head_dim, page_size = shape
  generator = np.random.default_rng(seed)
  draw = lambda *size: jnp.asarray(generator.standard_normal(size), dtype)
  return (
    2 * draw(rows, heads, group, head_dim),
    (draw(heads, num_pages, head_dim, page_size), draw(heads, num_pages, page_size, head_dim)),
    (draw(rows, heads, head_dim), draw(rows, heads, head_dim)),
  )


@jax.jit
def run(q, pages, new, batch):
  """Writes keys and values and attends, as one layer does."""
  pages = native_pages.write_pages(pages, new, batch.slots, batch.num_rows)
  return attention.attend(q, pages, batch), pages


def expected_rows(q, pages, batch, tables, pieces, dtype):
  """The definition, row by row."""
  keys, values = (np.asarray(x).astype(np.float32) for x in pages)
  q = np.asarray(q).astype(np.float32)
  out, row = np.zeros(q.shape, np.float32), 0
  for sequence, first, count in pieces:
    own_keys = np.concatenate([keys[:, page].swapaxes(1, 2) for page in tables[sequence]], axis=1)
    own_values = np.concatenate([values[:, page] for page in tables[sequence]], axis=1)
    for position in range(first, first + count):
      for head, one in np.ndindex(q.shape[1:3]):
        out[row, head, one] = reference.attention(
          q[row, head, one], own_keys[head, : position + 1], own_values[head, : position + 1], dtype
        )
      row += 1
  return out


def same_bits(got, expected):
  got, expected = (np.asarray(x).astype(np.float32).view(np.int32) for x in (got, expected))
  np.testing.assert_array_equal(got, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_is_chains_by_position_whatever_its_pages_and_block(shape, dtype):
  pieces = DECODE if shape[0] * shape[1] > 2 else CHUNKS
  batch, tables, num_pages = batch_of(pieces, page_size=shape[3], query_tile=7, rows=40)
  q, pages, new = arrays_of(shape, num_pages, 40, dtype)
  found, pages = run(q, pages, new, batch)
  same_bits(found, expected_rows(q, pages, batch, tables, pieces, dtype))


def gradients(attend, q, pages, weights, batch):
  """Returns gradients of the weighted sum of the live rows' attention."""
  batch = jax.tree.map(jnp.asarray, batch)
  live = jnp.arange(q.shape[0]) < batch.num_rows

  def loss(q, pages):
    out = attend(q, pages, batch).astype(jnp.float32)
    return jnp.sum(jnp.where(live[:, None, None, None], out * weights, 0.0))

  return jax.jit(jax.grad(loss, (0, 1)))(q, pages)


# Sequences; the last one reads the first two pages of the first one.
SHARING = ((0, 0, 40), (1, 0, 5), (2, 32, 11))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(2, 2, 16, 16), (1, 3, 6, 8), (1, 1, 21, 2)], ids=str)
def test_a_gradient_is_chains_over_the_rows_of_the_batch(shape, dtype):
  heads, group, head_dim, page_size = shape
  order = np.arange(1, 1 + 3 * (-(-CONTEXT // page_size)))
  order[-CONTEXT // page_size :][: 32 // page_size] = order[: 32 // page_size]
  batch, tables, num_pages = batch_of(
    SHARING, page_size=page_size, query_tile=7, rows=64, order=order
  )
  q, pages, _ = arrays_of(shape, num_pages, 64, dtype)
  weights = arrays_of(shape, num_pages, 64, "float32", seed=1)[0]
  seen = np.zeros(num_pages * page_size, bool)
  for sequence, first, count in SHARING:
    place = np.arange(first + count)
    seen[tables[sequence][place // page_size] * page_size + place % page_size] = True
  seen = seen.reshape(num_pages, page_size)
  pages = (
    jnp.where(seen[None, :, None, :], pages[0], jnp.nan),
    jnp.where(seen[None, :, :, None], pages[1], jnp.nan),
  )
  grad_q, (grad_keys, grad_values) = gradients(attention.attend, q, pages, weights, batch)

  slots = lambda x: np.asarray(x).astype(np.float32).reshape(heads, -1, head_dim)
  keys, values = slots(jnp.swapaxes(pages[0], 2, 3)), slots(pages[1])
  back = reference.rounded(np.asarray(weights), dtype)
  expected_q = np.zeros(q.shape, np.float32)
  expected_keys, expected_values = np.zeros_like(keys), np.zeros_like(values)
  row = 0
  for sequence, first, count in SHARING:
    for position in range(first, first + count):
      place = np.arange(position + 1)
      own = tables[sequence][place // page_size] * page_size + place % page_size
      for head, one in np.ndindex(heads, group):
        found = reference.attention_gradients(
          np.asarray(q).astype(np.float32)[row, head, one], keys[head, own], values[head, own],
          back[row, head, one], dtype, expected_keys[head, own], expected_values[head, own],
        )  # fmt: skip
        expected_q[row, head, one], expected_keys[head, own], expected_values[head, own] = found
      row += 1
  same_bits(grad_q, expected_q)
  same_bits(slots(jnp.swapaxes(grad_keys, 2, 3)), reference.rounded(expected_keys, dtype))
  same_bits(slots(grad_values), reference.rounded(expected_values, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_are_all_there_is_need_no_pages_and_have_the_same_bits(dtype):
  """Two of three pages belong to no segment, and the others have slots that are not written."""
  pieces = ((0, 0, 40), (1, 0, 5), (2, 0, 11), (2, 11, 3))
  order = np.arange(1, 55, 3)
  batch, _, _ = batch_of(pieces, page_size=16, query_tile=7, rows=64, order=order)
  q, pages, new = arrays_of((2, 2, 16, 16), 60, 64, dtype)
  weights = arrays_of((2, 2, 16, 16), 60, 64, "float32", seed=1)[0]
  live = jnp.arange(64) < batch.num_rows

  def written(q, new, batch):
    empty = tuple(jnp.zeros_like(page) for page in pages)
    return attention.attend(
      q, native_pages.write_pages(empty, new, batch.slots, batch.num_rows), batch
    )

  def own(q, new, batch):
    shapes = tuple(jax.ShapeDtypeStruct(page.shape, page.dtype) for page in pages)
    return attention.attend_own(q, new, shapes, batch)

  def gradient(attend):
    def loss(q, new):
      out = attend(q, new, jax.tree.map(jnp.asarray, batch))
      return jnp.sum(jnp.where(live[:, None, None, None], out * weights, 0.0)), out

    # Twice: freed memory holds the first call's values.
    return [jax.jit(jax.grad(loss, (0, 1), has_aux=True))(q, new) for _ in range(2)][1]

  for got, want in zip(jax.tree.leaves(gradient(own)), jax.tree.leaves(gradient(written))):
    assert got.dtype == want.dtype
    same_bits(got, want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_is_that_of_the_tiled_backend(dtype):
  numerics = numerics_lib.NumericsConfig(
    row_tile=8, query_tile=8, slot_tile=2, kv_split=32, compute_dtype=dtype
  )
  batch, _, num_pages = batch_of(
    ((0, 0, 9), (1, 0, 40)), page_size=16, query_tile=8, rows=56, order=np.arange(1, 13)
  )
  q, pages, _ = arrays_of((2, 2, 16, 16), num_pages, 56, dtype)
  weights = arrays_of((2, 2, 16, 16), num_pages, 56, "float32", seed=1)[0]

  def other(q, pages, batch):
    rows = tiled_attention.segment_rows(batch, numerics, 16)
    keys, values = pages
    return tiled_attention.attend(q, jnp.swapaxes(keys, 2, 3), values, batch, rows, numerics)

  found = gradients(attention.attend, q, pages, weights, batch)
  expected = gradients(other, q, pages, weights, batch)
  for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
    assert got.dtype == want.dtype
    got, want = (np.asarray(x).astype(np.float32) for x in (got, want))
    scale = np.max(np.abs(want)) * (1e-5 if dtype == "float32" else 4e-2)
    np.testing.assert_allclose(got, want, rtol=0, atol=scale)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_is_that_of_the_tiled_backend(dtype):
  numerics = numerics_lib.NumericsConfig(
    row_tile=8, query_tile=8, slot_tile=2, kv_split=32, compute_dtype=dtype
  )
  batch, _, num_pages = batch_of(CHUNKS, page_size=16, query_tile=8, rows=40)
  q, pages, new = arrays_of((2, 2, 16, 16), num_pages, 40, dtype)
  found, (keys, values) = run(q, pages, new, batch)

  @jax.jit
  def other(q, pages, new, batch):
    backend = tiled.Tiled(numerics)
    pages = jnp.swapaxes(pages[0], 2, 3), pages[1]
    pages = backend.write_pages(pages, new, batch.slots, batch.num_rows)
    rows = tiled_attention.segment_rows(batch, numerics, 16)
    return backend.attend(q, pages, batch, rows), pages

  expected, (tiled_keys, tiled_values) = other(q, pages, new, batch)
  same_bits(keys, jnp.swapaxes(tiled_keys, 2, 3))
  same_bits(values, tiled_values)
  live = int(batch.num_rows)
  np.testing.assert_allclose(
    np.asarray(found[:live], np.float32),
    np.asarray(expected[:live], np.float32),
    rtol=0,
    atol=2e-6 if dtype == "float32" else 2e-2,
  )


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rows_bits_are_the_same_in_any_segment_and_batch(dtype):
  """The last rows of a sequence run alone, or cut differently, next to others, on other pages."""
  shape, length = (2, 2, 32, 16), 64
  q, _, (keys, values) = arrays_of(shape, 1, length, dtype)

  def rows_from(first, query_tile, order):
    batch, tables, num_pages = batch_of(
      [(0, 0, 1), (1, first, length - first)], page_size=16, query_tile=query_tile, rows=80,
      order=order,
    )  # fmt: skip
    _, pages, new = arrays_of(shape, num_pages, 80, dtype, seed=1)
    before = tables[1][np.arange(first) // 16] * 16 + np.arange(first) % 16
    pages = native_pages.write_pages(
      pages, (keys[:first], values[:first]), jnp.asarray(before, jnp.int32), jnp.int32(first)
    )
    own = slice(1, 1 + length - first)
    queries = jnp.zeros((80, *q.shape[1:]), dtype).at[own].set(q[first:])
    new = tuple(x.at[own].set(y[first:]) for x, y in zip(new, (keys, values)))
    found, _ = run(queries, pages, new, batch)
    return np.asarray(found)[own]

  straight, reverse = np.arange(1, 13), np.arange(12, 0, -1)
  whole = rows_from(0, 8, straight)
  for first, query_tile, order in ((63, 8, reverse), (61, 4, straight), (60, 1, reverse),
                                   (57, 7, straight), (0, 64, reverse)):  # fmt: skip
    same_bits(rows_from(first, query_tile, order), whole[first:])


def test_what_invisible_slots_hold_is_never_read():
  """Stale pages may hold any values, even those of the sequence itself."""
  batch, tables, num_pages = batch_of(CHUNKS, page_size=16, query_tile=4, rows=40)
  q, pages, new = arrays_of((2, 2, 32, 16), num_pages, 40, "float32")
  seen = np.zeros(num_pages * 16, bool)
  for sequence, first, count in CHUNKS:
    place = np.arange(first + count)
    seen[tables[sequence][place // 16] * 16 + place % 16] = True
  seen = seen.reshape(num_pages, 16)
  keys, values = pages
  stale = (
    jnp.where(seen[None, :, None, :], keys, jnp.nan),
    jnp.where(seen[None, :, :, None], values, jnp.nan),
  )
  expected, _ = run(q, pages, new, batch)
  found, (keys, _) = run(q, stale, new, batch)
  same_bits(found, expected)
  assert np.isnan(keys).any()
  live = int(batch.num_rows)
  assert live < 40 and not np.any(np.asarray(found)[live:])


def test_a_chain_that_begins_at_a_rows_length_has_other_bits():
  """The twin: chains by distance from the row, as a ring of keys would have them."""
  generator = np.random.default_rng(3)
  draw = lambda *shape: generator.standard_normal(shape).astype(np.float32)
  q, keys, values = draw(16), draw(23, 16), draw(23, 16)
  by_position = reference.attention(q, keys, values, "float32")
  assert np.any(reference.attention(q, keys[::-1], values[::-1], "float32") != by_position)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [0, 3, 5])
def test_rows_are_written_to_their_slots_and_nowhere_else(count, dtype):
  _, pages, new = arrays_of((2, 1, 6, 8), 5, 5, dtype)
  slots = jnp.asarray([9, 4, 31, 8, 17], jnp.int32)
  keys, values = jax.jit(native_pages.write_pages)(pages, new, slots, jnp.int32(count))
  expected = [np.array(x) for x in pages]
  for row in range(count):
    page, slot = divmod(int(slots[row]), 8)
    expected[0][:, page, :, slot] = new[0][row]
    expected[1][:, page, slot] = new[1][row]
  same_bits(keys, expected[0])
  same_bits(values, expected[1])


@pytest.mark.thorough
@pytest.mark.parametrize("count", [0, 3, 5])
def test_the_gradient_of_written_pages_goes_to_what_they_hold(count):
  _, pages, new = arrays_of((2, 1, 6, 8), 5, 5, "float32")
  weights = arrays_of((2, 1, 6, 8), 5, 5, "float32", seed=1)[1]
  slots = jnp.asarray([9, 4, 31, 8, 17], jnp.int32)

  def loss(write, pages, new):
    written = write(pages, new, slots, jnp.int32(count))
    return sum(jnp.sum(x * y) for x, y in zip(written, weights))

  def by_slot(pages, new, slots, count):
    keys, values = pages
    page, slot = slots // 8, slots % 8
    live = np.arange(5) < count
    keys = keys.at[:, jnp.where(live, page, 99), :, slot].set(new[0], mode="drop")
    return keys, values.at[:, jnp.where(live, page, 99), slot].set(
      jnp.swapaxes(new[1], 0, 1), mode="drop"
    )

  found = jax.jit(jax.grad(functools.partial(loss, native_pages.write_pages), (0, 1)))(pages, new)
  expected = jax.grad(functools.partial(loss, by_slot), (0, 1))(pages, new)
  for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
    same_bits(got, want)
