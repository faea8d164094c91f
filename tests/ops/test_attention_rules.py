"""Windows, soft caps, scales and sinks: the definition, and bits that depend on a row alone."""

from __future__ import annotations

import dataclasses

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

from seerjax.ops import attention
from seerjax.ops.attention import AttentionRule

UNTILED = dataclasses.replace(NUMERICS, backend="untiled")
LENGTH = 41  # Two whole splits and part of a third.
# Windows of one position, inside a split, of a split, over one, of more than there is.
WINDOWS = (1, 5, 16, 23, 64)
ALL = AttentionRule(window=21, soft_cap=1.5, scale=0.7)


def sinks_of(group, dtype=jnp.float32):
  return jnp.asarray(np.random.default_rng(5).standard_normal((HEADS, group)), dtype)


def both(rule, group, dtype, **others):
  """Attention of one sequence, alone in its batch, and by the definition."""
  sequence, sinks = sequence_of(LENGTH, group, dtype), sinks_of(group, dtype)
  sinks = sinks if others.pop("has_sinks", True) else None
  found = attend(
    [sequence], [(0, 0, LENGTH)], rows=48, segments=12, rule=rule, sinks=sinks, **others
  )
  return found, attention.attention_reference(*sequence, rule=rule, sinks=sinks)


# By hand.


def test_a_row_sees_its_window_with_itself():
  keys, rows = jnp.arange(6)[None, :], jnp.arange(6)[:, None]
  visible = AttentionRule(window=2).is_visible(keys, rows)
  wanted = [[p - 1 <= key <= p for key in range(6)] for p in range(6)]
  np.testing.assert_array_equal(visible, wanted)


def test_a_window_of_one_gives_each_row_its_own_value():
  q, k, v = sequence_of(LENGTH, 2)
  found = attend([(q, k, v)], [(0, 0, LENGTH)], rows=48, segments=12, rule=AttentionRule(window=1))
  np.testing.assert_array_equal(found, jnp.broadcast_to(v[:, :, None], found.shape))


def test_a_sink_takes_its_share_of_the_weights():
  q, k, v = sequence_of(3, 1)
  k = jnp.zeros_like(k)  # All scores are 0, and the sink's is log 2: weights 1 / (count + 2).
  sinks = jnp.full((HEADS, 1), np.log(2.0), jnp.float32)
  found = attend([(q, k, v)], [(0, 0, 3)], rows=8, segments=2, sinks=sinks)
  wanted = jnp.stack([jnp.sum(v[: p + 1], axis=0) / (p + 3) for p in range(3)])
  np.testing.assert_allclose(found[:, :, 0], wanted, rtol=1e-5, atol=1e-6)


def test_scale_and_soft_cap_by_hand():
  rule = AttentionRule(soft_cap=2.0, scale=0.25)
  assert rule.factor(64) == 0.25 and attention.CAUSAL.factor(64) == 0.125
  scores = jnp.asarray([-100.0, 0.0, 1.0, 100.0])
  np.testing.assert_allclose(rule.capped(scores), [-2.0, 0.0, 2 * np.tanh(0.5), 2.0], rtol=1e-6)
  assert attention.CAUSAL.capped(scores) is scores


def test_items_under_a_window_by_hand():
  # Rows 30 to 33 see keys from 25 on, row 34 from 29: splits 1 and 2. Position 0 sees itself.
  batch = batch_of([(0, 30, 5), (1, 0, 1)], rows=8, segments=4, width=3, page_size=16)
  rows = attention.segment_rows(batch, NUMERICS, 16, window=6)
  np.testing.assert_array_equal(rows.num_splits, [[2, 2], [1, 0]])
  np.testing.assert_array_equal(rows.first_item, [[0, 2], [0, 1]])
  np.testing.assert_array_equal(rows.segment_of[0], [0, 0, 1, 1])
  np.testing.assert_array_equal(rows.split_of[0], [1, 2, 1, 2])
  assert rows.segment_of[1, 0] == 2 and rows.split_of[1, 0] == 0
  # With window 18, the first row's first key is 13, in split 0; the other segment's is 17.
  rows = attention.segment_rows(batch, NUMERICS, 16, window=18)
  np.testing.assert_array_equal(rows.num_splits, [[3, 2], [1, 0]])
  np.testing.assert_array_equal(rows.split_of[0, :5], [0, 1, 2, 1, 2])


def test_items_do_not_grow_with_the_sequence_under_a_window():
  batch = batch_of([(0, 700, 4)], rows=8, segments=4, width=50, page_size=16)
  rows = attention.segment_rows(batch, NUMERICS, 16, window=16)
  assert rows.segment_of.shape == (2, 3 * NUMERICS.slot_tile)
  # Rows 700 to 703 see keys 685 to 703: splits 42 and 43.
  np.testing.assert_array_equal(rows.split_of[0, :2], [42, 43])
  assert attention.segment_rows(batch, NUMERICS, 16).segment_of.shape == (2, 50 * 2)


def test_no_window_touches_more_splits_than_there_are_items():
  for window in range(1, 40):
    for first in range(64):
      last = first + NUMERICS.query_tile - 1
      touched = last // 16 - max(first - window + 1, 0) // 16 + 1
      assert touched <= attention.touched_splits(window + NUMERICS.query_tile - 1, 16)


# Agreement.


@pytest.mark.parametrize("window", WINDOWS)
def test_windows_are_the_definitions(window):
  found, wanted = both(AttentionRule(window=window), 2, "float32", has_sinks=False)
  np.testing.assert_allclose(found, wanted, rtol=0, atol=5e-6)


@pytest.mark.thorough
@pytest.mark.few(2)
@pytest.mark.parametrize(
  ("rule", "group", "dtype", "numerics"),
  [
    (ALL, 3, "float32", NUMERICS),
    (ALL, 2, "bfloat16", NUMERICS),
    (ALL, 2, "float32", UNTILED),
    (AttentionRule(), 2, "float32", NUMERICS),
    (AttentionRule(soft_cap=0.5), 1, "float32", NUMERICS),
  ],
  ids=["all", "all-bf16", "all-untiled", "sinks", "cap"],
)
def test_packed_sequences_and_their_gradients_are_the_definitions(rule, group, dtype, numerics):
  # 1, tile - 1, tile, tile + 1 positions, and up to three splits.
  lengths = (1, 3, 4, 5, LENGTH)
  sequences = [sequence_of(n, group, dtype, seed=n) for n in lengths]
  pieces = [(j, 0, n) for j, n in enumerate(lengths)]
  batch = batch_of(pieces, rows=64, segments=20, width=6, page_size=8)
  arguments = *rows_of(sequences, pieces, 64), sinks_of(group, dtype)
  pages = pages_like(1 + len(lengths) * 6, 8, dtype)
  weights = jnp.asarray(np.random.default_rng(9).standard_normal(arguments[0].shape), jnp.float32)
  live = jnp.arange(64) < batch.num_rows

  @jax.jit
  def ours(args):
    q, k, v, sinks = args
    out, _, _ = run(q, k, v, pages, pages, batch, numerics, rule, sinks)
    out = jnp.where(live[:, None, None, None], out.astype(jnp.float32), 0.0)
    return jnp.sum(out * weights), out

  @jax.jit
  def reference(args):
    *whole, sinks = args
    parts, first = [], 0
    for n in lengths:
      part = [x[first : first + n] for x in whole]
      parts.append(attention.attention_reference(*part, rule=rule, sinks=sinks))
      first += n
    out = jnp.concatenate([*parts, jnp.zeros((64 - first, *whole[0].shape[1:]))])
    return jnp.sum(out * weights), out

  (_, found), gradient = jax.value_and_grad(ours, has_aux=True)(arguments)
  exact = tuple(x.astype(jnp.float32) for x in arguments)
  (_, expected), expected_gradient = jax.value_and_grad(reference, has_aux=True)(exact)
  value, slope = (2e-6, 1e-5) if dtype == "float32" else (2e-2, 4e-2)
  atol = value * float(jnp.max(jnp.abs(expected)))
  np.testing.assert_allclose(found, expected, rtol=0, atol=atol)
  for got, want in zip(gradient, expected_gradient, strict=True):
    assert got.dtype == jnp.dtype(dtype)
    atol = slope * float(jnp.max(jnp.abs(want)))
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=0, atol=atol)
  if numerics is NUMERICS:
    # The value computed under a gradient has the same bits.
    np.testing.assert_array_equal(ours(arguments)[1], found)


# Bits.


@pytest.mark.thorough
@pytest.mark.few(2)
@pytest.mark.parametrize(
  ("rule", "group", "dtype"),
  [
    (ALL, 3, "float32"),
    (dataclasses.replace(ALL, window=5), 2, "bfloat16"),
    (dataclasses.replace(ALL, window=16), 1, "float32"),
  ],
  ids=["21-f32", "5-bf16", "16-f32"],
)
def test_bits_follow_no_neighbour_placement_page_size_or_cut(rule, group, dtype):
  mine = sequence_of(LENGTH, group, dtype)
  others = [sequence_of(n, group, dtype, seed=n) for n in (7, 48, 16)]
  sequences, own = [mine, *others], dict(rule=rule, sinks=sinks_of(group, dtype))
  one = dict(rows=48, segments=12, **own)
  alone = attend(sequences, [(0, 0, LENGTH)], **one)
  neighbours = [(1, 0, 7), (0, 0, LENGTH), (2, 0, 48), (3, 0, 16)]
  among = attend(sequences, neighbours, rows=112, segments=30, **own)
  np.testing.assert_array_equal(among[7 : 7 + LENGTH], alone)
  # Another slot of the slot tile, other pages, smaller pages, a wider page table.
  moved = attend(sequences, [(1, 0, 1), (0, 0, LENGTH)], **one)
  np.testing.assert_array_equal(moved[1:], alone)
  scattered = attend(sequences, [(0, 0, LENGTH)], pages_of=lambda _: [9, 2, 6], **one)
  np.testing.assert_array_equal(scattered, alone)
  small = attend(sequences, [(0, 0, LENGTH)], width=12, page_size=4, num_pages=40, **one)
  np.testing.assert_array_equal(small, alone)
  wide = attend(sequences, [(0, 0, LENGTH)], width=6, pages_of=lambda _: [1, 2, 3, 0, 0, 0], **one)
  np.testing.assert_array_equal(wide, alone)
  short = attend(sequences, [(0, 0, 9)], rows=12, segments=3, width=1, **own)
  np.testing.assert_array_equal(short, alone[:9])
  # What the pages hold where no row sees them.
  filled = attend(sequences, [(0, 0, LENGTH)], fill=1e4, **one)
  np.testing.assert_array_equal(filled, alone)


@pytest.mark.parametrize(
  ("window", "dtype"),
  [
    (21, "float32"),
    pytest.param(5, "bfloat16", marks=pytest.mark.thorough),
    *(pytest.param(w, "float32", marks=pytest.mark.thorough) for w in (1, 16, 17)),
  ],
)
def test_decode_verification_and_chunks_are_prefill(window, dtype):
  rule, sinks = dataclasses.replace(ALL, window=window), sinks_of(2, dtype)
  mine, other = sequence_of(LENGTH, 2, dtype), sequence_of(LENGTH, 2, dtype, seed=1)
  whole = attend([mine], [(0, 0, LENGTH)], rows=48, segments=12, rule=rule, sinks=sinks)
  for step in (1, 3, 7):  # Segments of chunks begin at other places of a window.
    k_pages = v_pages = pages_like(13, 16, dtype)
    outs = []
    for first in range(0, LENGTH, step):
      count = min(step, LENGTH - first)
      pieces = [(1, first, count), (0, first, count)]
      batch = batch_of(pieces, rows=16, segments=4, width=3, page_size=16)
      q, k, v = rows_of([mine, other], pieces, 16)
      out, k_pages, v_pages = run(q, k, v, k_pages, v_pages, batch, NUMERICS, rule, sinks)
      outs.append(np.asarray(out)[count : 2 * count])
    np.testing.assert_array_equal(np.concatenate(outs), whole, err_msg=f"{step} rows a step")


def test_branches_of_a_tree_are_sequences_of_their_own():
  """Two chains share two pages, and have a last page each; each is computed from position 32."""
  stem, left, right = (sequence_of(LENGTH, 2, seed=seed) for seed in range(3))
  chains = [
    tuple(jnp.concatenate([a[:32], b[32:]]) for a, b in zip(stem, own)) for own in (left, right)
  ]
  own = dict(rule=ALL, sinks=sinks_of(2))
  alone = [attend([x], [(0, 0, LENGTH)], rows=48, segments=12, **own) for x in chains]
  pieces = [(0, 0, 32), (0, 32, 9), (1, 32, 9)]
  pages_of = lambda j: [1, 2, 3 + j]
  together = attend(chains, pieces, rows=64, segments=16, pages_of=pages_of, **own)
  np.testing.assert_array_equal(together[:LENGTH], alone[0])
  np.testing.assert_array_equal(together[LENGTH:], alone[1][32:])


def test_keys_behind_a_window_change_nothing_and_those_inside_do():
  q, k, v = sequence_of(LENGTH, 2)
  own = dict(rows=48, segments=12, rule=AttentionRule(window=6))
  clean = attend([(q, k, v)], [(0, 0, LENGTH)], **own)
  found = attend([(q, k, v.at[20].add(1.0))], [(0, 0, LENGTH)], **own)
  changed = np.any(found != clean, axis=(1, 2, 3))
  np.testing.assert_array_equal(np.flatnonzero(changed), np.arange(20, 26))


def test_a_window_as_long_as_the_sequence_is_none():
  sequence = sequence_of(LENGTH, 2)
  one = dict(rows=48, segments=12)
  found = attend([sequence], [(0, 0, LENGTH)], rule=AttentionRule(window=LENGTH), **one)
  np.testing.assert_array_equal(found, attend([sequence], [(0, 0, LENGTH)], **one))


# Twins that must differ; otherwise the tests above would show nothing.


def test_a_window_by_splits_that_follow_the_row_changes_bits():
  # The last row's keys as a sequence of their own: splits then begin at its first key.
  window, (q, k, v) = 21, sequence_of(LENGTH, 2)
  first, rule = LENGTH - window, AttentionRule(window=window)
  clean = attend([(q, k, v)], [(0, 0, LENGTH)], rows=48, segments=12, rule=rule)[-1]
  moved = [tuple(x[first:] for x in (q, k, v))]
  found = attend(moved, [(0, 0, window)], rows=48, segments=12, rule=rule)[-1]
  np.testing.assert_allclose(found, clean, rtol=1e-5, atol=1e-6)
  assert np.any(found != clean)


def test_a_sink_before_the_last_merge_changes_bits():
  rng = np.random.default_rng(0)
  parts = []
  for _ in range(2):
    q, k, v = (jnp.asarray(rng.standard_normal((2, n, HEAD_DIM)), jnp.float32) for n in (4, 16, 16))
    parts.append(attention.split_partial(q, k, v, jnp.ones((2, 4, 16), bool)))
  sinks = jnp.asarray(rng.standard_normal((1, 4)), jnp.float32)
  last = attention.with_sinks(attention.merge(*parts), sinks)
  early = attention.merge(attention.with_sinks(parts[0], sinks), parts[1])
  for one, other in zip(last, early):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
  assert np.any(last.total != early.total) or np.any(last.weighted != early.weighted)


# Refusals.


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    ("window", 0, "got 0, expected at least 1, or None; write None for a layer without a window"),
    ("window", -4, "got -4, expected at least 1, or None"),
    ("window", 2.5, "got 2.5, expected a whole number or None"),
    ("soft_cap", float("inf"), "got inf, expected a finite number or None"),
    ("soft_cap", 0.0, "got 0.0, expected a positive number, or None; write None for scores"),
    ("scale", float("nan"), "got nan, expected a finite number or None"),
    ("scale", -1.0, "got -1.0, expected a positive number, or None"),
  ],
)
def test_rules_are_refused(field, value, message):
  with pytest.raises(ValueError, match=f"AttentionRule.{field}: {message}"):
    AttentionRule(**{field: value})
