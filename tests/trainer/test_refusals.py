"""Every `raise` of the room, with its message."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from made_rollouts import group, rollout
import numpy as np
import pytest
import refusals
import tiny_model

from seerjax import types
from seerjax.models.decoder import decide
from seerjax.numerics import NumericsConfig
from seerjax.trainer import advantages, entropic, losses, packing

pytestmark = pytest.mark.usefixtures("unchecked_annotations")

SIZES = dict(
  decoder=decide(
    tiny_model.CONFIG,
    NumericsConfig(row_tile=4, query_tile=4, slot_tile=2, kv_split=8, reduction_shards=1),
  ),
  page_size=2,
  rows_per_micro_batch=12,
)
ONE = [group(0, rollout([1, 2], [3]))]
FOUR, ZEROS, ALL = np.zeros((1, 4)), np.zeros((2, 3)), np.ones((2, 3), bool)
UNLIKELY = np.asarray([[0, 0, 0], [0, 0, -np.inf]])


def pack(groups=ONE, values=((0.0,),), **changes):
  return packing.pack(groups, np.asarray(values, np.float32), **(SIZES | changes))


def changed(**changes):
  """One group of one rollout; its completion has these changes."""
  one = rollout([1], [2, 3], name="x")
  completion = dataclasses.replace(one.completion, **changes)
  return [group(0, dataclasses.replace(one, completion=completion))]


def biased():
  return rollout([1], [2], sampling=types.SamplingParams(logit_bias=((0, 1.0),)))


def kl_shaped(values=ZEROS, logprobs=ZEROS, base=ZEROS, mask=ALL):
  return entropic.kl_shaped(values, logprobs, base, mask, 0.1)


@refusals.table(
  # Advantages.
  (lambda: advantages.for_algorithm("ppo", np.zeros((1, 2), np.float32)),
   "got 'ppo', expected 'grpo'"),
  (lambda: advantages.grpo(np.zeros(4, np.float32)), "shape (4,), expected [b, g]"),
  (lambda: advantages.overlong_penalty(np.zeros(2), max_tokens=100, buffer=0),
   "got buffer=0 with max_tokens=100"),
  (lambda: advantages.overlong_penalty(np.zeros(2), max_tokens=100, buffer=101),
   "got buffer=101 with max_tokens=100"),
  # Entropic advantages.
  (lambda: entropic.entropic(np.zeros(4)), "entropic: got rewards of shape (4,), expected [b, g]"),
  (lambda: entropic.solve_beta(FOUR), "solve_beta: got rewards of shape (1, 4), expected"),
  (lambda: entropic.entropic(FOUR, valid=np.ones(4, bool), valid_only=True),
   "got a mask of bool[4], expected bool[1, 4]"),
  (lambda: entropic.solve_beta(np.zeros(4), valid=np.ones(4)),
   "solve_beta: got a mask of float64[4], expected bool"),
  (lambda: entropic.entropic(np.asarray([[0, 1, 2, 3], [1e308, -1e308, 0, 0]])),
   "from -1e+308 to 1e+308 in group 1, expected a finite"),
  (lambda: entropic.entropic(FOUR, valid_only=True),
   "got valid_only=True without valid, expected bool"),
  (lambda: kl_shaped(base=ZEROS[:1]), "logprobs of shape (2, 3) and base_logprobs of shape"),
  (lambda: kl_shaped(ZEROS[:1]), "kl_shaped: got advantages of shape (1, 3)"),
  (lambda: kl_shaped(mask=ALL[:1]), "got a mask of bool[1, 3], expected bool[2, 3]"),
  (lambda: kl_shaped(ZEROS[0], ZEROS[0], ZEROS[0], ALL[0]),
   "advantages of shape (3,)", "expected both [m, n]"),
  (lambda: kl_shaped(UNLIKELY), "got advantage -inf at [1, 2], expected a finite"),
  (lambda: kl_shaped(logprobs=UNLIKELY), "got log-probability -inf at [1, 2], expected a finite"),
  (lambda: kl_shaped(base=UNLIKELY),
   "got base's log-probability -inf at [1, 2], expected a finite"),
  (lambda: entropic.kl_to_base(UNLIKELY, ZEROS, ALL), "kl_to_base: got log-probability -inf"),
  # Losses.
  (lambda: losses.kl_estimate("k4", jnp.zeros(1), jnp.zeros(1)),
   "kl_estimate: got 'k4', expected one of"),
  # Packing.
  (lambda: pack(page_size=0), "got page_size=0, expected a divisor of NumericsConfig.kv_split=8"),
  (lambda: pack(page_size=3), "got page_size=3, expected a divisor of NumericsConfig.kv_split=8"),
  (lambda: pack(rows_per_micro_batch=10),
   "rows_per_micro_batch=10, expected a pos", "row_tile=4; use 12"),
  (lambda: pack(rows_per_micro_batch=0), "rows_per_micro_batch=0, expected a positive multiple"),
  (lambda: pack(max_num_seqs=0), "got max_num_seqs=0, expected max_num_seqs >= 1"),
  (lambda: pack(max_sequence_tokens=14),
   "got max_sequence_tokens=14, expected between 2 and ", " = 13"),
  (lambda: pack(max_sequence_tokens=1), "got max_sequence_tokens=1, expected between 2"),
  (lambda: pack(max_sequence_tokens=2), "expected at most max_sequence_tokens=2"),
  (lambda: pack([], np.zeros((0, 1))), "got no groups, expected at least one"),
  (lambda: pack(values=np.zeros((2, 1))), "advantages of shape (2, 1) for 1 groups"),
  (lambda: pack(values=np.zeros(1)),
   "advantages of shape (1,) for 1 groups, expected [groups, mem"),
  (lambda: pack(ONE * 2, np.zeros((2, 1))),
   "got group_index [0] more than once, expected unique"),
  (lambda: pack(values=np.zeros((1, 3))), "got 1 rollouts in group_index 0, expected 3"),
  (lambda: pack(values=((np.nan,),)),
   "advantage nan for group_index 0, member 0, expected a f"),
  (lambda: pack([group(0, rollout([1] * 10, [2] * 4, name="long"))]),
   "request 'long': got 10 prompt + 4 generated tokens, expected at most max_sequence_tokens=13"
   " with rows_per_micro_batch=12", "raise rows_per_micro_batch ", " to 13 "),
  (lambda: pack([group(0, rollout([1], []))]), "got 1 prompt and 0 generated tokens"),
  (lambda: pack([group(0, rollout([], [1]))]), "got 0 prompt and 1 generated tokens"),
  (lambda: pack([group(0, biased())]),
   "got 1 logit biases, expected at most num_biases=0; raise num_biases"),
  (lambda: pack([group(0, *[rollout([1], [2] * 8)] * 3)], np.zeros((1, 3)), num_micro_batches=2),
   "got 3 rollouts that need 3 micro-batches, expected at most num_micro_batches=2"),
  (lambda: pack(changed(behaviour_logprobs=np.asarray([-1.0, np.nan], np.float32))),
   "request 'x': got behaviour_logprobs of shape ", "expected 2 finite"),
  (lambda: pack(changed(raw_logprobs=np.asarray([-1.0, np.nan], np.float32))),
   "request 'x': got raw_logprobs of shape ", "expected 2 finite"),
  (lambda: pack(changed(finish_reason="error", error="it broke")),
   "request 'x': got a completion that ended with an error"),
)  # fmt: skip
def test_refusals(row):
  refusals.check(row)


@pytest.mark.parametrize("num", [1, 2, 3])
def test_groups_of_fewer_than_four_are_refused(num):
  message = f"got groups of {num} rewards"
  refusals.check((lambda: entropic.entropic(np.zeros((2, num))), message, "expected at least 4"))
  refusals.check((lambda: entropic.solve_beta(np.arange(float(num))), "solve_beta: ", message))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_numbers_out_of_range_are_refused(bad):
  for row in (
    (lambda: entropic.entropic(FOUR, divergence=bad),
     "entropic: got divergence=", ", expected 0 < divergence"),
    (lambda: entropic.solve_beta(FOUR[0], divergence=bad),
     "solve_beta: got divergence=", ", expected 0 < divergence"),
    (lambda: entropic.entropic(FOUR, max_advantage=bad),
     "got max_advantage=", ", expected a positive number"),
    (lambda: entropic.entropic(FOUR, beta=bad or -2.0),
     "entropic: got beta=", ", expected 0 <= beta < inf"),
    (lambda: entropic.kl_shaped(FOUR, FOUR, FOUR, FOUR == 0, bad or -2.0),
     "kl_shaped: got coefficient=", ", expected 0 <= coeff"),
    (lambda: advantages.grpo(np.zeros((1, 2), np.float32), eps=bad),
     "got eps=", ", expected 0 < eps < inf"),
  ):  # fmt: skip
    refusals.check(row)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("options", [dict(), dict(valid_only=True, valid=np.zeros((3, 5), bool))])
def test_reward_that_is_not_finite_is_refused_by_place(bad, options):
  rewards = np.zeros((3, 5))
  rewards[1, 2] = bad
  with pytest.raises(
    ValueError, match=f"entropic: got reward {bad} for group 1, member 2, expected a finite"
  ):
    entropic.entropic(rewards, **options)
  with pytest.raises(ValueError, match=f"solve_beta: got reward {bad} for group 0, member 2"):
    entropic.solve_beta(rewards[1])
