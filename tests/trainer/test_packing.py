"""Packing: by hand, by property, and errors."""

from __future__ import annotations

import collections
import dataclasses

from hypothesis import given, settings, strategies as st
import jax
from made_rollouts import group, rollout
import numpy as np
import pytest
import tiny_model

from seerjax import types
from seerjax.backends import choice
from seerjax.models.decoder import decide
from seerjax.numerics import NumericsConfig
from seerjax.trainer import losses, packing

NUMERICS = NumericsConfig(
  backend="tiled", row_tile=4, query_tile=4, slot_tile=2, kv_split=8, reduction_shards=1
)
DECODER = decide(tiny_model.SMALLEST, NUMERICS)
SIZES = {"decoder": DECODER, "page_size": 2, "rows_per_micro_batch": 12}
# For the random cases: at most four groups of four rollouts, each with its own rows.
MOST_MICRO_BATCHES, MOST_ROWS = 16, 32


def random_groups(seed, num_groups, group_size, max_rows):
  """Groups of random lengths, every token of the batch a different number."""
  rng = np.random.default_rng(seed)
  groups, token = [], 1
  for index in rng.permutation(3 * num_groups)[:num_groups]:
    num_prompt = int(rng.integers(1, max_rows))
    rollouts = []
    for member in range(group_size):
      num_generated = int(rng.integers(1, max_rows + 1 - num_prompt + 1))
      ids = range(token, token + num_prompt + num_generated)
      sampling = types.SamplingParams(
        temperature=float(rng.integers(1, 5)) / 4,
        logit_bias=((member, 0.5),) * int(rng.integers(3)),
      )
      rollouts.append(
        rollout(ids[:num_prompt], ids[num_prompt:], name=f"{index}/{member}", sampling=sampling)
      )
      token = ids[-1] + 1
    groups.append(group(int(index), *rollouts))
  return groups, rng.normal(size=(num_groups, group_size)).astype(np.float32)


@st.composite
def cases(draw):
  numerics = NumericsConfig(
    row_tile=4,
    query_tile=draw(st.sampled_from([1, 4, 8])),
    slot_tile=draw(st.sampled_from([1, 4])),
    kv_split=draw(st.sampled_from([8, 16])),
    reduction_shards=1,
    backend="tiled",
  )
  rows = draw(st.sampled_from([8, 20, MOST_ROWS]))
  sizes = {
    "decoder": decide(tiny_model.SMALLEST, numerics),
    "page_size": draw(st.sampled_from([1, 4, 8])),
    "rows_per_micro_batch": rows,
    "max_num_seqs": draw(st.sampled_from([None, 1, 3, 100])),
    "max_sequence_tokens": draw(st.sampled_from([None, 9])),
  }
  max_rows = rows if sizes["max_sequence_tokens"] is None else 8
  groups, advantages = random_groups(
    draw(st.integers(0, 2**31)), draw(st.integers(1, 4)), draw(st.integers(1, 4)), max_rows
  )
  return groups, advantages, sizes


def padded(batch):
  """Adds empty micro-batches and rows, so that all cases have one shape: one compilation."""
  missing = np.subtract((MOST_MICRO_BATCHES, MOST_ROWS), batch.targets.shape)

  def pad(values, fill):
    return np.pad(values, [(0, count) for count in missing], constant_values=fill)

  return batch._replace(
    sequence_index=pad(batch.sequence_index, -1), loss_mask=pad(batch.loss_mask, False)
  )


def assert_same(left, right):
  jax.tree.map(np.testing.assert_array_equal, left, right)


def test_hand_computed():
  """The example of the module: a has five rows, b one after a's page; c does not fit with them."""
  a = rollout([10, 11, 12], [13, 14, 15], name="a")
  b = rollout([10, 11, 12], [20], name="b")
  c = rollout([30, 31], [32, 33, 34, 35], name="c", sampling=types.SamplingParams(temperature=0.5))
  d = rollout([30, 31], [40], name="d")
  batch = packing.pack(
    [group(7, c, d), group(3, a, b)],
    np.asarray([[-1, -2], [0.5, 0.25]], np.float32),
    **SIZES,
    max_num_seqs=2,
    num_micro_batches=3,
  )
  tokens = batch.tokens
  pad = [0] * 6
  np.testing.assert_array_equal(tokens.tokens[0], [10, 11, 12, 13, 14, 12, *pad])
  np.testing.assert_array_equal(batch.targets[0], [11, 12, 13, 14, 15, 20, *pad])
  np.testing.assert_array_equal(tokens.positions[0], [0, 1, 2, 3, 4, 2, *pad])
  np.testing.assert_array_equal(tokens.slots[0], [2, 3, 4, 5, 6, 20, *pad])
  np.testing.assert_array_equal(batch.loss_mask[0], [0, 0, 1, 1, 1, 1, *pad])
  np.testing.assert_array_equal(batch.sequence_index[0], [0] * 5 + [1] + [-1] * 6)
  np.testing.assert_array_equal(batch.advantages[0], [0.5] * 5 + [0.25] + pad)
  np.testing.assert_array_equal(batch.behaviour_logprobs[0] * -16, [0, 0, 13, 14, 15, 20, *pad])
  np.testing.assert_array_equal(batch.raw_logprobs[0] * -8, [0, 0, 13, 14, 15, 20, *pad])
  np.testing.assert_array_equal(tokens.num_rows, [6, 7, 0])
  np.testing.assert_array_equal(tokens.num_segments, [3, 3, 0])
  np.testing.assert_array_equal(tokens.segment_start[0], [0, 4, 5, 0])
  np.testing.assert_array_equal(tokens.segment_length[0], [4, 1, 1, 0])
  of_a, of_b = range(1, 9), (1, *range(10, 17))
  np.testing.assert_array_equal(tokens.page_table[0], [of_a, of_a, of_b, [0] * 8])
  np.testing.assert_array_equal(tokens.tokens[1], [30, 31, 32, 33, 34, 30, 31, *[0] * 5])
  np.testing.assert_array_equal(batch.sampling.temperature[1], [1, 0.5, 0.5, 0.5, 0.5] + [1] * 7)
  assert not batch.loss_mask[2].any() and (batch.sequence_index[2] == -1).all()


def test_layout_hand_computed():
  # At most 2 sequences in 12 rows: floor((12 + 2 * 3) / 4) segments.
  assert packing.layout(**SIZES, max_num_seqs=2) == packing.Layout(
    num_rows=12,
    max_num_seqs=2,
    max_sequence_tokens=13,
    num_segments=4,
    pages_per_sequence=8,  # 6 pages hold 12 positions; a split of 8 positions has 4.
    num_pages=17,
  )


def test_default_number_of_sequences_follows_the_longest():
  assert packing.layout(**SIZES).max_num_seqs == 2
  assert packing.layout(**SIZES, max_sequence_tokens=4).max_num_seqs == 8


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_generated_token_is_a_target_once_with_its_logprobs(case):
  groups, advantages, sizes = case
  batch = packing.pack(groups, advantages, **sizes, num_biases=2)
  order = np.argsort([g.group_index for g in groups])
  rollouts = [r for i in order for r in groups[i].rollouts]
  unpacked = [
    packing.unpack(values, batch)
    for values in (
      batch.targets, batch.behaviour_logprobs, batch.raw_logprobs, batch.advantages,
      batch.sampling.temperature, batch.sampling.bias_values,
    )
  ]  # fmt: skip
  assert [len(values) for values in unpacked] == [len(rollouts)] * len(unpacked)
  for r, advantage, targets, behaviour, raw, advantage_rows, temperature, bias in zip(
    rollouts, advantages[order].ravel(), *unpacked, strict=True
  ):
    np.testing.assert_array_equal(targets, r.completion.tokens)
    np.testing.assert_array_equal(behaviour, r.completion.behaviour_logprobs)
    np.testing.assert_array_equal(raw, r.completion.raw_logprobs)
    assert (advantage_rows == advantage).all()
    assert (temperature == r.request.sampling.temperature).all()
    assert ((bias != 0).sum(axis=1) == len(r.request.sampling.logit_bias)).all()
  assert not batch.behaviour_logprobs[~batch.loss_mask].any()
  assert (batch.sampling.temperature[~batch.loss_mask] == 1).all()
  assert (batch.sampling.bias_ids[~batch.loss_mask] == -1).all()
  assert losses.denominators(padded(batch)) == (
    len(rollouts), sum(len(r.completion.tokens) for r in rollouts)
  )  # fmt: skip


def test_each_place_has_the_penalties_of_what_stands_before_it():
  how = types.SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
  penalised = rollout([10, 11, 12], [13, 13, 11], name="a", sampling=how)
  plain = rollout([10, 11, 12], [20], name="b")
  batch = packing.pack([group(0, penalised, plain)], np.zeros((1, 2), np.float32), **SIZES)
  found = []
  for row in range(6):
    is_used = batch.sampling.penalty_ids[0, row] >= 0
    ids, values = batch.sampling.penalty_ids[0, row], batch.sampling.penalty_values[0, row]
    found.append(dict(zip(ids[is_used].tolist(), values[is_used].tolist(), strict=True)))
  prompt = {10: 0.0, 11: 0.0, 12: 0.0}
  # Two rows of the prompt have no loss; the last row is that of the other answer.
  assert found == [{}, {}, prompt, {**prompt, 13: 0.75}, {**prompt, 13: 1.0}, {}]
  np.testing.assert_array_equal(batch.sampling.repetition[0, :6], [1, 1, 2, 2, 2, 1])
  without = packing.pack([group(0, plain)], np.zeros((1, 1), np.float32), **SIZES)
  assert without.sampling.penalty_ids is None


@settings(max_examples=60, deadline=None)
@given(cases())
def test_sequences_segments_and_pages_are_laid_out_as_promised(case):
  groups, advantages, sizes = case
  batch = packing.pack(groups, advantages, **sizes, num_biases=2)
  shapes = packing.layout(**sizes)
  by_index = sorted(groups, key=lambda g: g.group_index)
  rollouts = [r for g in by_index for r in g.rollouts]
  seen = []
  for m in range(batch.targets.shape[0]):
    tokens = types.TokenBatch(*(field[m] for field in batch.tokens))
    valid = np.arange(shapes.num_rows) < tokens.num_rows
    index = batch.sequence_index[m]
    assert (index[valid] >= 0).all() and (index[~valid] == -1).all()
    for field in (tokens.tokens, tokens.positions, tokens.slots, batch.targets[m]):
      assert not field[~valid].any()
    sequences = list(dict.fromkeys(index[valid].tolist()))
    assert len(sequences) <= shapes.max_num_seqs
    seen += sequences

    for j, sequence in enumerate(sequences):
      rows = np.flatnonzero(index == sequence)
      request, completion = rollouts[sequence].request, rollouts[sequence].completion
      whole = np.asarray((*request.prompt, *completion.tokens))
      assert (np.diff(rows) == 1).all()
      np.testing.assert_array_equal(tokens.tokens[rows], whole[:-1])
      np.testing.assert_array_equal(batch.targets[m, rows], whole[1:])
      np.testing.assert_array_equal(tokens.positions[rows], np.arange(rows.size))
      width = shapes.pages_per_sequence
      for page in set(tokens.slots[rows] // sizes["page_size"]):
        assert 1 + j * width <= page < 1 + (j + 1) * width <= shapes.num_pages
    assert len(set(tokens.slots[valid])) == tokens.num_rows

    covered = []
    query_tile = sizes["decoder"].numerics.query_tile
    assert tokens.segment_start.shape == (shapes.num_segments,)
    assert not tokens.segment_length[tokens.num_segments :].any()
    assert not tokens.page_table[tokens.num_segments :].any()
    for s in range(tokens.num_segments):
      start, length = int(tokens.segment_start[s]), int(tokens.segment_length[s])
      rows = np.arange(start, start + length)
      covered += rows.tolist()
      assert 1 <= length <= query_tile and tokens.positions[start] % query_tile == 0
      assert len(set(index[rows])) == 1
      # A segment reaches every earlier position of its sequence through its own page-table row.
      earlier = np.arange(tokens.positions[rows[-1]] + 1)
      pages = tokens.page_table[s, earlier // sizes["page_size"]]
      first = np.flatnonzero(index == index[start])[0]
      np.testing.assert_array_equal(
        pages * sizes["page_size"] + earlier % sizes["page_size"], tokens.slots[first + earlier]
      )
    assert covered == list(range(tokens.num_rows))
  assert seen == list(range(len(rollouts)))  # Each in one micro-batch, in (group, member) order.
  positions = shapes.pages_per_sequence * sizes["page_size"]
  assert positions % sizes["decoder"].numerics.kv_split == 0
  assert positions >= shapes.max_sequence_tokens - 1


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(0, 2**31))
def test_every_row_reads_its_own_sequence_whoever_wrote_it(case, seed):
  """Prompts that begin alike: each row's pages hold its sequence, and rows are saved."""
  groups, advantages, sizes = case
  rng = np.random.default_rng(seed)
  groups = [
    group(one.group_index, *(with_prompt(each, rng.integers(0, 3)) for each in one.rollouts))
    for one in groups
  ]
  batch, page_size = packing.pack(groups, advantages, **sizes, num_biases=2), sizes["page_size"]
  rollouts = [each for one in sorted(groups, key=lambda g: g.group_index) for each in one.rollouts]
  tokens = [(*each.request.prompt, *each.completion.tokens) for each in rollouts]
  seen = collections.Counter()
  for m, of in enumerate(zip(*batch.tokens)):
    of = types.TokenBatch(*of)
    rows = range(of.num_rows)
    assert len({int(of.slots[row]) for row in rows}) == len(rows)
    memory = {int(of.slots[row]): int(of.tokens[row]) for row in rows}
    for segment in range(of.num_segments):
      for row in of.segment_start[segment] + np.arange(of.segment_length[segment]):
        index, position = int(batch.sequence_index[m, row]), int(of.positions[row])
        places = np.arange(position + 1)
        slots = of.page_table[segment][places // page_size] * page_size + places % page_size
        assert [memory[int(slot)] for slot in slots] == list(tokens[index][: position + 1])
        assert batch.targets[m, row] == tokens[index][position + 1]
        seen[index] += 1
  least = [len(each.completion.tokens) for each in rollouts]
  assert all(least[i] <= seen[i] <= len(tokens[i]) - 1 for i in range(len(rollouts)))
  unpacked = packing.unpack(batch.targets, batch)
  assert [tuple(one) for one in unpacked] == [each.completion.tokens for each in rollouts]


def with_prompt(one, kind):
  """Returns a rollout with one of three prompts that share a prefix."""
  length = len(one.request.prompt)
  prompt = [10_000 + min(place, length // 2 if kind else length) for place in range(length)]
  prompt = [token + 7 * int(kind == 2 and place > 2) for place, token in enumerate(prompt)]
  return dataclasses.replace(one, request=dataclasses.replace(one.request, prompt=tuple(prompt)))


def test_a_group_of_one_prompt_has_rows_for_it_once():
  prompt = list(range(10, 19))
  members = [rollout(prompt, [20 + i, 30 + i], name=f"r{i}") for i in range(3)]
  sizes = SIZES | {"rows_per_micro_batch": 24, "max_num_seqs": 3}
  batch = packing.pack([group(0, *members)], np.zeros((1, 3), np.float32), **sizes)
  # Nine tokens, eight of them in whole pages: 10 rows, then the ninth and the response's first.
  assert batch.tokens.num_rows.tolist() == [14]
  kernels = dataclasses.replace(NUMERICS, backend="pallas", compute_dtype="bfloat16")
  decoder = dataclasses.replace(DECODER, numerics=kernels, backend=choice.backend_of(kernels))
  batch = packing.pack(
    [group(0, *members)], np.zeros((1, 3), np.float32), **sizes | {"decoder": decoder}
  )
  assert batch.tokens.num_rows.tolist() == [20, 10]  # Kernels' gradients: not shown to share.


@settings(max_examples=25, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_order_of_arrival_changes_nothing(case, random):
  groups, advantages, sizes = case
  order = random.sample(range(len(groups)), len(groups))
  shuffled = packing.pack([groups[i] for i in order], advantages[order], **sizes, num_biases=2)
  assert_same(shuffled, packing.pack(groups, advantages, **sizes, num_biases=2))


def test_member_order_does_change_the_batch():
  """Twin: the batch depends on the order of members."""
  groups, advantages = random_groups(0, 1, 3, 6)
  turned = dataclasses.replace(groups[0], rollouts=groups[0].rollouts[::-1])
  left = packing.pack(groups, advantages, **SIZES, num_biases=2)
  right = packing.pack([turned], advantages, **SIZES, num_biases=2)
  assert not np.array_equal(left.tokens.tokens, right.tokens.tokens)


def test_bound_of_segments_is_reached_by_the_worst_case():
  """Sequences one row longer than a segment waste the most."""
  sizes = SIZES | {"rows_per_micro_batch": 20, "page_size": 4}
  groups = [group(0, *[rollout([i] * 5, [2]) for i in range(4)])]  # 4 x 5 rows.
  batch = packing.pack(groups, np.zeros((1, 4)), **sizes, max_num_seqs=4)
  assert batch.tokens.num_segments[0] == batch.tokens.segment_start.shape[1] == 8


def test_longest_sequence_fits_exactly():
  batch = packing.pack([group(0, rollout([1], range(12)))], np.zeros((1, 1)), **SIZES)
  assert batch.tokens.num_rows.tolist() == [12]


def test_shapes_do_not_depend_on_the_data():
  shapes = set()
  for seed in range(3):
    groups, advantages = random_groups(seed, 3, 2, 9)
    batch = packing.pack(groups, advantages, **SIZES, num_biases=2, num_micro_batches=9)
    shapes.add(tuple(leaf.shape for leaf in jax.tree.leaves(batch)))
  assert len(shapes) == 1


def test_dtypes_are_those_of_the_records():
  batch = packing.pack([group(0, rollout([1], [2]))], np.zeros((1, 1)), **SIZES, num_biases=1)
  assert {leaf.dtype.name for leaf in batch.tokens} == {"int32"}
  assert batch.loss_mask.dtype == np.bool_ and batch.targets.dtype == np.int32
  for field in (batch.advantages, batch.behaviour_logprobs, batch.raw_logprobs):
    assert field.dtype == np.float32
  assert [leaf.dtype.name for leaf in jax.tree.leaves(batch.sampling)] == [
    "float32", "int32", "float32", "float32", "int32", "float32", "int32", "int32"
  ]  # fmt: skip


def test_unpack_keeps_trailing_axes():
  groups, advantages = random_groups(1, 2, 2, 6)
  batch = packing.pack(groups, advantages, **SIZES, num_biases=2)
  pairs = np.stack([batch.targets, batch.targets + 1], axis=-1)
  for pair, targets in zip(
    packing.unpack(pairs, batch), packing.unpack(batch.targets, batch), strict=True
  ):
    np.testing.assert_array_equal(pair, np.stack([targets, targets + 1], axis=-1))


@pytest.mark.parametrize(
  ("context", "per_position", "named", "expected"),
  [
    (512, 2 * 5 * 8 * 16 * 4, (0, 0), (2048, 32)),  # nano
    (1024, 2 * 28 * 8 * 128 * 4, (0, 0), (2048, 4)),  # Qwen3-0.6B
    (128, 2 * 28 * 8 * 128 * 4, (0, 0), (2048, 32)),
    (32_768, 2 * 36 * 8 * 128 * 4, (0, 0), (32_768, 1)),  # Qwen3-8B
    (40_000, 2 * 36 * 8 * 128 * 4, (0, 0), (65_536, 1)),
    (1024, 2 * 28 * 8 * 128 * 4, (8192, 0), (8192, 8)),  # As many contexts as the rows hold.
    (1024, 2 * 28 * 8 * 128 * 4, (512, 7), (512, 7)),
  ],
)
def test_sizes_follow_from_model_and_context(context, per_position, named, expected):
  rows, sequences = named
  found = packing.derived_sizes(
    context=context, bytes_per_position=per_position, rows=rows, sequences=sequences
  )
  assert found == expected
