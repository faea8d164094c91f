"""The native backend's paged attention has the bits of the same chains in NumPy."""

import functools

import jax
import jax.numpy as jnp
import native_reference as reference
import native_threads
import numpy as np
import pytest

from seerjax import numerics as numerics_lib
from seerjax.backends import tiled
from seerjax.backends.native import attention, attention_few, pages as native_pages
from seerjax.ops import attention as tiled_attention
from seerjax.ops.attention import CAUSAL, AttentionRule
from seerjax.types import TokenBatch

# (heads, group, head_dim, page_size): pages and features that vectors divide, and others.
SHAPES = (
  (2, 1, 16, 32), (1, 2, 32, 16), (1, 3, 6, 8), (2, 2, 80, 64), (1, 5, 21, 2), (1, 1, 24, 3)
)  # fmt: skip
# (sequence, first position, rows): a decoding step of many lengths; prompts and chunks.
DECODE = ((0, 0, 1), (1, 3, 1), (2, 15, 1), (3, 16, 1), (4, 90, 1), (5, 64, 1))
CHUNKS = ((0, 0, 9), (1, 0, 4), (2, 61, 19), (3, 30, 3))
CONTEXT = 96
# Windows of one position, inside a page, of pages, over one, of more than there is; by name.
RULES = {
  "causal": CAUSAL,
  "window 1": AttentionRule(window=1),
  "window 5": AttentionRule(window=5, scale=0.7),
  "window 32": AttentionRule(window=32),
  "all": AttentionRule(window=39, soft_cap=1.5, scale=0.2),
  "window 500": AttentionRule(window=500, soft_cap=20.0),
}
SINKS = (False, True)


def batch_of(pieces, *, page_size, query_tile, rows, order=None, context=CONTEXT):
  """Sequences own their pages in a shuffled order; segments of `query_tile` positions."""
  width = -(-context // page_size)
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


def sinks_of(shape, dtype="float32"):
  """Sinks of each head, near the scores."""
  return jnp.asarray(1 + np.random.default_rng(2).standard_normal(shape[:2]), dtype)


def layer(q, pages, new, batch, rule=CAUSAL, sinks=None):
  """Writes keys and values and attends, as one layer does."""
  pages = native_pages.write_pages(pages, new, batch.slots, batch.num_rows)
  return attention.attend(q, pages, batch, rule, sinks), pages


run = jax.jit(layer, static_argnums=4)


def expected_rows(q, pages, batch, tables, pieces, dtype, rule=CAUSAL, sinks=None):
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
          q[row, head, one], own_keys[head, : position + 1], own_values[head, : position + 1],
          dtype, rule, None if sinks is None else np.float32(sinks[head, one]),
        )  # fmt: skip
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


@pytest.mark.thorough
@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_sinks", SINKS)
@pytest.mark.parametrize("rule", [name for name in RULES if name != "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_is_chains_of_the_keys_that_its_rule_shows(shape, rule, has_sinks, dtype):
  pieces = DECODE if shape[0] * shape[1] > 2 else CHUNKS
  batch, tables, num_pages = batch_of(pieces, page_size=shape[3], query_tile=7, rows=40)
  q, pages, new = arrays_of(shape, num_pages, 40, dtype)
  own = RULES[rule], sinks_of(shape, dtype) if has_sinks else None
  found, pages = run(q, pages, new, batch, *own)
  same_bits(found, expected_rows(q, pages, batch, tables, pieces, dtype, *own))


def gradients(attend, q, pages, weights, batch, *sinks):
  """Returns gradients of the weighted sum of the live rows' attention."""
  batch = jax.tree.map(jnp.asarray, batch)
  live = jnp.arange(q.shape[0]) < batch.num_rows

  def loss(q, pages, *sinks):
    out = attend(q, pages, batch, *sinks).astype(jnp.float32)
    return jnp.sum(jnp.where(live[:, None, None, None], out * weights, 0.0))

  return jax.jit(jax.grad(loss, tuple(range(2 + len(sinks)))))(q, pages, *sinks)


# Sequences; the last one reads the first two pages of the first one.
SHARING = ((0, 0, 40), (1, 0, 5), (2, 32, 11))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(2, 2, 16, 16), (1, 3, 6, 8), (1, 1, 21, 2)], ids=str)
def test_a_gradient_is_chains_over_the_rows_of_the_batch(shape, dtype):
  check_gradient(shape, dtype, CAUSAL, has_sinks=False)


@pytest.mark.thorough
@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_sinks", SINKS)
@pytest.mark.parametrize("rule", [name for name in RULES if name != "causal"])
@pytest.mark.parametrize("shape", [(2, 2, 16, 16), (1, 3, 6, 8), (1, 1, 21, 2)], ids=str)
def test_a_gradient_is_chains_over_the_rows_that_see_a_key(shape, rule, has_sinks, dtype):
  check_gradient(shape, dtype, RULES[rule], has_sinks=has_sinks)


def check_gradient(shape, dtype, rule, *, has_sinks):
  """Compares the gradient with the chains in NumPy, next to slots that hold NaN."""
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
  sinks = [sinks_of(shape)] if has_sinks else []
  attend = lambda q, pages, batch, *sinks: attention.attend(q, pages, batch, rule, *sinks)
  grad_q, (grad_keys, grad_values), *grad_sinks = gradients(
    attend, q, pages, weights, batch, *sinks
  )

  slots = lambda x: np.asarray(x).astype(np.float32).reshape(heads, -1, head_dim)
  keys, values = slots(jnp.swapaxes(pages[0], 2, 3)), slots(pages[1])
  back = reference.rounded(np.asarray(weights), dtype)
  expected_q = np.zeros(q.shape, np.float32)
  expected_keys, expected_values = np.zeros_like(keys), np.zeros_like(values)
  expected_sinks, row = np.zeros((heads, group), np.float32), 0
  for sequence, first, count in SHARING:
    for position in range(first, first + count):
      place = np.arange(position + 1)
      own = tables[sequence][place // page_size] * page_size + place % page_size
      for head, one in np.ndindex(heads, group):
        found = reference.attention_gradients(
          np.asarray(q).astype(np.float32)[row, head, one], keys[head, own], values[head, own],
          back[row, head, one], dtype, expected_keys[head, own], expected_values[head, own],
          rule, np.float32(sinks[0][head, one]) if sinks else None,
        )  # fmt: skip
        expected_q[row, head, one], expected_keys[head, own], expected_values[head, own] = found[:3]
        expected_sinks[head, one] = reference.flush(expected_sinks[head, one] - found[3])
      row += 1
  same_bits(grad_q, expected_q)
  same_bits(slots(jnp.swapaxes(grad_keys, 2, 3)), reference.rounded(expected_keys, dtype))
  same_bits(slots(grad_values), reference.rounded(expected_values, dtype))
  if sinks:
    same_bits(grad_sinks[0], expected_sinks)


def test_a_sinks_gradient_is_a_chain_over_each_half_of_the_sequences():
  shape, rule = (2, 2, 16, 16), RULES["all"]
  attend = lambda q, pages, batch, sinks: attention.attend(q, pages, batch, rule, sinks)
  pieces, found = ((0, 0, 19), (1, 0, 23)), []
  for own in (pieces, pieces[:1], pieces[1:]):
    batch, _, _ = batch_of(
      own, page_size=16, query_tile=7, rows=48, order=np.arange(1, 1 + 6 * (1 + own[-1][0]))
    )
    q, pages, _ = arrays_of(shape, 13, 48, "float32")
    weights = arrays_of(shape, 13, 48, "float32", seed=1)[0]
    first = 19 if own == pieces[1:] else 0
    q, weights = (jnp.roll(x, -first, axis=0) for x in (q, weights))
    found.append(gradients(attend, q, pages, weights, batch, sinks_of(shape))[2])
  same_bits(found[0], found[1] + found[2])


@pytest.mark.parametrize("rule", ["causal", "all"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_are_all_there_is_need_no_pages_and_have_the_same_bits(dtype, rule):
  """Two of three pages belong to no segment, and the others have slots that are not written."""
  sinks = None if rule == "causal" else sinks_of((2, 2, 16, 16))
  pieces = ((0, 0, 40), (1, 0, 5), (2, 0, 11), (2, 11, 3))
  order = np.arange(1, 55, 3)
  batch, _, _ = batch_of(pieces, page_size=16, query_tile=7, rows=64, order=order)
  q, pages, new = arrays_of((2, 2, 16, 16), 60, 64, dtype)
  weights = arrays_of((2, 2, 16, 16), 60, 64, "float32", seed=1)[0]
  live = jnp.arange(64) < batch.num_rows

  def written(q, new, batch, *others):
    empty = tuple(jnp.zeros_like(page) for page in pages)
    return attention.attend(
      q, native_pages.write_pages(empty, new, batch.slots, batch.num_rows), batch, *others
    )

  def own(q, new, batch, *others):
    shapes = tuple(jax.ShapeDtypeStruct(page.shape, page.dtype) for page in pages)
    return attention.attend_own(q, new, shapes, batch, *others)

  def gradient(attend):
    def loss(q, new, sinks):
      out = attend(q, new, jax.tree.map(jnp.asarray, batch), RULES[rule], sinks)
      return jnp.sum(jnp.where(live[:, None, None, None], out * weights, 0.0)), out

    # Twice: freed memory holds the first call's values.
    return [jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, new, sinks) for _ in range(2)][1]

  for got, want in zip(jax.tree.leaves(gradient(own)), jax.tree.leaves(gradient(written))):
    assert got.dtype == want.dtype
    same_bits(got, want)


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_sinks", SINKS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("shape", [(2, 2, 16, 16), (1, 1, 6, 8), (1, 3, 16, 16)], ids=str)
def test_a_gradient_is_that_of_the_tiled_backend(shape, rule, has_sinks, dtype):
  page_size, sinks = shape[3], [sinks_of(shape, dtype)] if has_sinks else []
  batch, _, num_pages = batch_of(
    ((0, 0, 9), (1, 0, 40)), page_size=page_size, query_tile=8, rows=56,
    order=np.arange(1, 1 + 2 * -(-CONTEXT // page_size)),
  )  # fmt: skip
  numerics = tiled_numerics(dtype)
  q, pages, _ = arrays_of(shape, num_pages, 56, dtype)
  weights = arrays_of(shape, num_pages, 56, "float32", seed=1)[0]

  def ours(q, pages, batch, *sinks):
    return attention.attend(q, pages, batch, rule, *sinks)

  def other(q, pages, batch, *sinks):
    rows = tiled_attention.segment_rows(batch, numerics, page_size, rule.window)
    keys, values = jnp.swapaxes(pages[0], 2, 3), pages[1]
    sinks = dict(zip(("sinks",), sinks))
    return tiled_attention.attend(q, keys, values, batch, rows, numerics, rule=rule, **sinks)

  found = gradients(ours, q, pages, weights, batch, *sinks)
  expected = gradients(other, q, pages, weights, batch, *sinks)
  for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    assert got.dtype == want.dtype
    got, want = (np.asarray(x).astype(np.float32) for x in (got, want))
    scale = np.max(np.abs(want)) * (1e-5 if dtype == "float32" else 4e-2)
    np.testing.assert_allclose(got, want, rtol=0, atol=scale)


def tiled_numerics(dtype):
  return numerics_lib.NumericsConfig(
    row_tile=8, query_tile=8, slot_tile=2, kv_split=32, compute_dtype=dtype
  )


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_sinks", SINKS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("shape", [(2, 2, 16, 16), (1, 1, 6, 8), (1, 3, 16, 16)], ids=str)
def test_attention_is_that_of_the_tiled_backend(shape, rule, has_sinks, dtype):
  page_size, sinks = shape[3], sinks_of(shape, dtype) if has_sinks else None
  batch, _, num_pages = batch_of(CHUNKS, page_size=page_size, query_tile=8, rows=40)
  q, pages, new = arrays_of(shape, num_pages, 40, dtype)
  found, (keys, values) = run(q, pages, new, batch, rule, sinks)

  @jax.jit
  def other(q, pages, new, batch):
    backend = tiled.Tiled(tiled_numerics(dtype))
    pages = jnp.swapaxes(pages[0], 2, 3), pages[1]
    pages = backend.write_pages(pages, new, batch.slots, batch.num_rows)
    rows = tiled_attention.segment_rows(batch, backend.numerics, page_size, rule.window)
    return backend.attend(q, pages, batch, rows, rule, sinks), pages

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
@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_rows_bits_are_the_same_in_any_segment_and_batch(rule, dtype):
  """The last rows of a sequence run alone, or cut differently, next to others, on other pages."""
  shape, length = (2, 2, 32, 16), 64
  sinks = None if rule == CAUSAL else sinks_of(shape, dtype)
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
    found, _ = run(queries, pages, new, batch, rule, sinks)
    return np.asarray(found)[own]

  straight, reverse = np.arange(1, 13), np.arange(12, 0, -1)
  whole = rows_from(0, 8, straight)
  for first, query_tile, order in ((63, 8, reverse), (61, 4, straight), (60, 1, reverse),
                                   (57, 7, straight), (0, 64, reverse)):  # fmt: skip
    same_bits(rows_from(first, query_tile, order), whole[first:])


# A decoding step and a segment of several rows, of contexts that are divided into parts and short.
FEW = {
  "one row": (((0, 700, 1),), (1, 3, 64, 32)),
  "two blocks of a segment": (((0, 640, 2),), (2, 4, 32, 16)),
  "segments of several lengths": (((0, 522, 2), (1, 2, 1)), (1, 3, 80, 16)),
  "seven heads of a group": (((0, 300, 1),), (2, 7, 24, 8)),
  "pages that vectors do not divide": (((0, 410, 1), (1, 0, 1)), (1, 2, 21, 3)),
}


FEW_RULES = {name: RULES[name] for name in ("causal", "all")} | {
  "long window": AttentionRule(window=400)
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", FEW_RULES.values(), ids=FEW_RULES)
@pytest.mark.parametrize(("pieces", "shape"), FEW.values(), ids=FEW)
def test_few_rows_have_their_bits_when_threads_share_their_positions(pieces, shape, rule, dtype):
  batch, tables, num_pages = batch_of(pieces, page_size=shape[3], query_tile=4, rows=4, context=720)
  q, pages, new = arrays_of(shape, num_pages, 4, dtype)
  sinks = sinks_of(shape, dtype) if rule == RULES["all"] else None

  def attended(number):
    """Few rows are divided by position only if there are more threads than items for them."""
    with native_threads.threaded(number):
      assert attention_few.suits(4, *shape[:2]) == (number > 1)
      return jax.jit(lambda *operands: layer(*operands, rule, sinks))(q, pages, new, batch)

  found, pages = attended(8)
  same_bits(found, attended(1)[0])
  same_bits(found, expected_rows(q, pages, batch, tables, pieces, dtype, rule, sinks))


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


@pytest.mark.parametrize("page_size", [16, 3])
def test_pages_that_a_window_has_passed_are_never_read(page_size):
  batch, tables, num_pages = batch_of(
    ((0, 70, 4), (1, 0, 9)), page_size=page_size, query_tile=4, rows=16
  )
  q, pages, new = arrays_of((1, 3, 16, page_size), num_pages, 16, "float32")
  rule = AttentionRule(window=21)
  expected, _ = run(q, pages, new, batch, rule)
  passed = tables[0][: (70 - 20) // page_size]
  stale = tuple(x.at[:, passed].set(jnp.nan) for x in pages)
  # The pages may have other owners by then.
  table = np.where(np.isin(batch.page_table, passed), 0, batch.page_table)
  found, _ = run(q, stale, new, batch._replace(page_table=table), rule)
  same_bits(found, expected)


# By hand.


def test_a_window_of_one_gives_each_row_its_own_value():
  batch, _, num_pages = batch_of(CHUNKS, page_size=16, query_tile=8, rows=40)
  q, pages, new = arrays_of((2, 2, 16, 16), num_pages, 40, "float32")
  found, _ = run(q, pages, new, batch, RULES["window 1"])
  live = int(batch.num_rows)
  wanted = jnp.broadcast_to(new[1][:, :, None], found.shape)
  np.testing.assert_array_equal(found[:live], wanted[:live])


@pytest.mark.parametrize("window", [None, 3])
def test_a_sink_takes_its_share_of_the_weights_that_a_window_shows(window):
  # All scores are 0, and the sink's is log 2: each weight is 1 / (keys + 2).
  batch, _, num_pages = batch_of(((0, 0, 6),), page_size=16, query_tile=8, rows=8)
  q, pages, (_, values) = arrays_of((1, 2, 16, 16), num_pages, 8, "float32")
  sinks = jnp.full((1, 2), np.log(2.0), jnp.float32)
  rule = AttentionRule(window=window)
  found, _ = run(q, pages, (jnp.zeros_like(values), values), batch, rule, sinks)
  for p in range(6):
    seen = values[max(0, p - (window or 6) + 1) : p + 1, 0]
    wanted = jnp.sum(seen, axis=0) / (len(seen) + 2)
    np.testing.assert_allclose(found[p, 0], jnp.stack([wanted] * 2), rtol=1e-6, atol=1e-7)


# Twins.


def test_a_sink_that_is_added_first_has_other_bits():
  generator = np.random.default_rng(3)
  draw = lambda *shape: generator.standard_normal(shape).astype(np.float32)
  weights, sink = reference.exp(draw(100, 40)), reference.exp(draw(100))
  last = reference.total(weights) + sink
  first = reference.total(np.concatenate([sink[:, None], weights], axis=1))
  np.testing.assert_allclose(first, last, rtol=1e-6)
  assert np.any(first != last)


def test_a_sink_outside_of_the_maximum_has_other_bits():
  generator = np.random.default_rng(3)
  draw = lambda *shape: generator.standard_normal(shape).astype(np.float32)
  q, keys, values, sink = draw(16), draw(23, 16), draw(23, 16), np.float32(3.0)
  exact = reference.attention(q, keys, values, "float32", sink=sink)
  maximum = np.max(reference.product(keys, reference.scaled_queries(q, "float32")[:, None]))
  _, total, *_ = reference.softmax(reference.scaled_queries(q, "float32"), keys)
  share = total / (total + reference.exp(sink - maximum))
  late = reference.attention(q, keys, values, "float32") * share
  np.testing.assert_allclose(late, exact, rtol=1e-5, atol=1e-6)
  assert np.any(late != exact)


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
