"""Sampling a row's next token: the definition, filters by hand, counter-based noise."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seerjax import types
from seerjax.ops import penalties, sampling
from seerjax.types import SamplingParams

VOCABULARY = 23
KEY = jax.random.key(11)
PLAIN = SamplingParams()
# The probabilities 0.4, 0.3, 0.2, 0.1 of four tokens, out of order.
BY_HAND = np.log(np.asarray([0.2, 0.4, 0.1, 0.3], np.float32))


@jax.jit
def process(logits, rows):
  return sampling.processed_rows(logits, rows)


@jax.jit
def sample(logits, rows, noise):
  return sampling.choose_rows(sampling.processed_rows(logits, rows), noise)


@jax.jit
def noise_of(seeds, positions, is_wanted):
  return sampling.noise_rows(KEY, seeds, positions, is_wanted, VOCABULARY)


def logits_of(count, seed=0):
  rng = np.random.default_rng(seed)
  return jnp.asarray(2 * rng.standard_normal((count, VOCABULARY)), jnp.float32)


def kept(logits, params):
  """Ids that the filters leave of one row."""
  z = process(jnp.asarray(logits)[None], sampling.sampling_rows([params], [0]))
  return np.flatnonzero(np.asarray(z[0]) > sampling.DROPPED).tolist()


@pytest.mark.parametrize("temperature", [types.MIN_TEMPERATURE, types.MAX_TEMPERATURE])
def test_at_the_ends_of_the_range_a_bias_forbids_and_a_grammar_holds(temperature):
  # Ids 4 to 9 are allowed, and the strongest biases leave only 7.
  for bias in (-1e6, 1e6):
    entries = ((7, bias),) if bias > 0 else tuple((i, bias) for i in (4, 5, 6, 8, 9))
    params = SamplingParams(
      temperature=temperature,
      logit_bias=(*entries, (2, 1e6)),
      allowed_token_ranges=((4, 10),),
      max_tokens=1,
    )
    count = 64
    rows = sampling.sampling_rows([params] * count, [0] * count)
    logits = 20 * logits_of(count)
    seeds = jnp.arange(count, dtype=jnp.uint32)
    noise = noise_of(seeds, seeds.astype(jnp.int32), jnp.ones(count, bool))
    assert set(sample(logits, rows, noise).tolist()) == {7}
    assert np.isfinite(process(logits, rows)).all()


def test_padding_rows_ask_for_nothing_that_costs():
  rows = sampling.sampling_rows([SamplingParams(top_k=3, logit_bias=((4, 1.5),))] * 3)
  padded = sampling.padded(rows, 8)
  for leaf, before in zip(*map(jax.tree.leaves, (padded, rows)), strict=True):
    assert leaf.shape[0] == 8 and leaf.dtype == before.dtype
    np.testing.assert_array_equal(leaf[:3], before)
  # Zeros would be filtered (top_p 0), restricted (below id 0) and biased (id 0).
  for rare in (
    sampling.is_filtered(padded), sampling.is_restricted(padded), padded.bias_ids.max(1) >= 0
  ):  # fmt: skip
    assert not rare[3:].any()
  np.testing.assert_array_equal(padded.temperature[3:], 0)  # Greedy: no noise is drawn.


params_strategy = strategies.builds(
  SamplingParams,
  temperature=strategies.sampled_from([0.0, 0.3, 1.0, 2.5]),
  top_k=strategies.sampled_from([0, 1, 2, 7, VOCABULARY, 999]),
  top_p=strategies.sampled_from([0.05, 0.41, 0.83, 1.0]),
  min_p=strategies.sampled_from([0.0, 0.07, 0.6, 1.0]),
  logit_bias=strategies.lists(
    strategies.tuples(strategies.integers(0, VOCABULARY - 1), strategies.sampled_from([-3.0, 1.7])),
    max_size=3,
  ).map(tuple),
  allowed_token_ranges=strategies.sampled_from([(), ((0, VOCABULARY),), ((4, 5),), ((3, 17),)]),
  max_tokens=strategies.just(1),
)


@hypothesis.given(
  strategies.lists(params_strategy, min_size=8, max_size=8), strategies.integers(0, 999)
)
def test_tokens_are_the_definitions(params, seed):
  logits = logits_of(8, seed)
  noise = np.random.default_rng(seed + 1).gumbel(size=(8, VOCABULARY)).astype(np.float32)
  noise[[one.temperature == 0 for one in params]] = 0
  found = sample(logits, sampling.sampling_rows(params, [0] * 8), jnp.asarray(noise))
  expected = [
    sampling.sample_reference(np.asarray(logits[row]), params[row], noise[row]) for row in range(8)
  ]
  assert np.asarray(found).tolist() == expected


# Filters by hand.


@pytest.mark.parametrize(
  ("params", "expected"),
  [
    (PLAIN, [0, 1, 2, 3]),
    (SamplingParams(top_k=1), [1]),
    (SamplingParams(top_k=3), [0, 1, 3]),
    (SamplingParams(top_k=9), [0, 1, 2, 3]),
    (SamplingParams(top_p=0.39), [1]),
    (SamplingParams(top_p=0.41), [1, 3]),  # 0.4 does not reach it; 0.7 does.
    (SamplingParams(top_p=0.71), [0, 1, 3]),
    (SamplingParams(top_p=0.95), [0, 1, 2, 3]),
    (SamplingParams(min_p=0.26), [0, 1, 3]),  # 0.26 * 0.4 = 0.104.
    (SamplingParams(min_p=1.0), [1]),
    # Among the two that top-k leaves, the first holds 4/7.
    (SamplingParams(top_k=2, top_p=0.57), [1]),
    (SamplingParams(top_k=2, top_p=0.58), [1, 3]),
    # At temperature 2 probabilities are as their roots: 0.325, 0.282, 0.230, 0.163.
    (SamplingParams(temperature=2.0, top_p=0.41), [1, 3]),
    (SamplingParams(temperature=2.0, top_p=0.32), [1]),
    (SamplingParams(temperature=2.0, min_p=0.6), [0, 1, 3]),
    (SamplingParams(logit_bias=((2, 9.0),), top_k=2), [1, 2]),
    # A grammar comes first: 0.4 of what it leaves is 0.57.
    (SamplingParams(max_tokens=1, allowed_token_ranges=((1, 3),)), [1, 2]),
    (SamplingParams(max_tokens=1, allowed_token_ranges=((2, 4),), top_k=1), [3]),
    (SamplingParams(max_tokens=1, allowed_token_ranges=((1, 4),), top_p=0.51), [1, 3]),
  ],
)
def test_filters_by_hand(params, expected):
  assert kept(BY_HAND, params) == expected


def test_a_grammar_goes_by_the_place_in_the_answer_and_by_slab():
  params = SamplingParams(max_tokens=2, allowed_token_ranges=((1, 3), (5, 23)))
  rows = jax.tree.map(jnp.asarray, sampling.sampling_rows([params, params, PLAIN], [0, 1, 1]))
  logits = logits_of(3)
  whole = np.asarray(sampling.scaled_rows(logits, rows, jnp.int32(0)))
  ids = np.arange(VOCABULARY)
  assert [ids[row > sampling.DROPPED].tolist() for row in whole] == [
    [1, 2], list(range(5, 23)), ids.tolist()
  ]  # fmt: skip
  slab = sampling.scaled_rows(logits[:, 4:9], rows, jnp.int32(4))
  assert np.array_equal(slab, whole[:, 4:9])


def test_ties_at_the_border_are_kept():
  assert kept(np.asarray([1.0, 0.0, 1.0, 1.0], np.float32), SamplingParams(top_k=2)) == [0, 2, 3]


def test_a_kept_logit_is_biased_and_tempered_and_a_dropped_one_is_defined():
  params = SamplingParams(temperature=0.5, top_k=2, logit_bias=((1, 1.0), (3, -0.5)))
  z = process(jnp.asarray(BY_HAND)[None], sampling.sampling_rows([params]))[0]
  assert float(z[1]) == float((np.float32(BY_HAND[1]) + np.float32(1)) / np.float32(0.5))
  assert float(z[2]) == np.float32(sampling.DROPPED)


def test_a_slab_is_biased_and_tempered_as_its_part_of_the_row():
  logits = logits_of(2)
  rows = sampling.sampling_rows(
    [SamplingParams(temperature=0.5, logit_bias=((0, 2.0), (9, -1.0), (12, 1.0))), PLAIN]
  )
  rows = jax.tree.map(jnp.asarray, rows)
  whole = sampling.scaled_rows(logits, rows, jnp.int32(0))
  np.testing.assert_array_equal(whole, process(logits, rows))
  for first, last in ((0, 9), (9, 13), (13, VOCABULARY)):
    part = sampling.scaled_rows(logits[:, first:last], rows, jnp.int32(first))
    np.testing.assert_array_equal(part, whole[:, first:last])


def test_greedy_takes_the_highest_biased_logit():
  logits = logits_of(5)
  plain = sampling.sampling_rows([SamplingParams(temperature=0)] * 5)
  zeros = jnp.zeros_like(logits)
  np.testing.assert_array_equal(sample(logits, plain, zeros), np.argmax(logits, axis=1))
  biased = sampling.sampling_rows([SamplingParams(temperature=0, logit_bias=((4, 99.0),))] * 5)
  np.testing.assert_array_equal(sample(logits, biased, zeros), np.full(5, 4))
  # Left at temperature 1: its log-probability is that of the softmax.
  np.testing.assert_array_equal(process(logits, plain), logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ties_go_to_the_lowest_id(temperature):
  logits = jnp.zeros((1, VOCABULARY)).at[0, jnp.asarray([6, 3, 19])].set(1.0)
  rows = sampling.sampling_rows([SamplingParams(temperature=temperature)])
  assert int(sample(logits, rows, jnp.zeros_like(logits))[0]) == 3


# Rows and their neighbours.


def test_neighbours_with_filters_change_no_bit_of_a_row_without():
  logits = logits_of(4)
  wild = SamplingParams(temperature=0.7, top_k=4, top_p=0.8, min_p=0.01, logit_bias=((2, 1.5),))
  quiet = SamplingParams(temperature=0.9)
  alone = process(logits, sampling.sampling_rows([quiet] * 4))
  for place in range(4):
    params = [quiet] * 4
    params[place] = wild
    found = process(logits, sampling.sampling_rows(params))
    others = [row for row in range(4) if row != place]
    np.testing.assert_array_equal(found[jnp.asarray(others)], alone[jnp.asarray(others)])
    # The filtered row equals itself among other filtered rows.
    together = process(logits, sampling.sampling_rows([wild] * 4))
    np.testing.assert_array_equal(found[place], together[place])


def test_noise_follows_key_seed_and_position_alone():
  seeds = jnp.asarray([5, 5, 2**32 - 1, 7], jnp.uint32)
  positions = jnp.asarray([3, 4, 3, 0], jnp.int32)
  everyone = jnp.ones(4, bool)
  noise = np.asarray(noise_of(seeds, positions, everyone))
  for row in range(4):
    folded = jax.random.fold_in(jax.random.fold_in(KEY, seeds[row]), positions[row])
    np.testing.assert_array_equal(noise[row], jax.random.gumbel(folded, (VOCABULARY,)))
  assert len({tuple(line) for line in noise}) == 4
  order = np.asarray([2, 0, 3, 1])
  np.testing.assert_array_equal(noise_of(seeds[order], positions[order], everyone), noise[order])
  # Rows that need no noise get zeros, and change nothing for the rest.
  some = jnp.asarray([True, False, True, False])
  found = np.asarray(noise_of(seeds, positions, some))
  np.testing.assert_array_equal(found[[0, 2]], noise[[0, 2]])
  np.testing.assert_array_equal(found[[1, 3]], np.zeros((2, VOCABULARY), np.float32))
  np.testing.assert_array_equal(
    noise_of(seeds, positions, ~everyone), np.zeros((4, VOCABULARY), np.float32)
  )


def test_frequencies_are_the_probabilities():
  count = 4000
  logits = jnp.broadcast_to(jnp.asarray(BY_HAND), (count, 4))
  noise = sampling.noise_rows(
    KEY, jnp.arange(count, dtype=jnp.uint32), jnp.zeros(count, jnp.int32), jnp.ones(count, bool), 4
  )
  found = sample(logits, sampling.sampling_rows([PLAIN] * count), noise)
  frequencies = np.bincount(np.asarray(found), minlength=4) / count
  # Four standard deviations of a frequency, at most 0.008 each.
  np.testing.assert_allclose(frequencies, np.exp(BY_HAND), atol=0.032)


# Errors.


def test_rows_of_every_kind_are_padded_with_rows_that_do_nothing():
  rows = sampling.sampling_rows([SamplingParams(temperature=0.5, top_k=3)])
  mask = np.full((1, 2), 5, np.uint32)
  fields = penalties.empty((1,), 4)
  found = sampling.padded(rows._replace(mask=mask, **fields), 3)
  assert all(leaf.shape[0] == 3 for leaf in found)
  assert np.asarray(found.mask).tolist() == [[5, 5], *[[sampling.ALL_ALLOWED] * 2] * 2]
  assert np.asarray(sampling.is_special(found)).tolist() == [True, False, False]
  assert np.asarray(found.repetition).tolist() == [1, 1, 1]
