"""Draft distillation: losses by hand, batches of completions, and that the draft learns."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refusals
import tiny_model

from seerjax import numerics as numerics_lib
from seerjax.models import flax_module, parameters
from seerjax.trainer import distill

SHAPE = tiny_model.SMALLEST.changed(num_layers=1)
CONFIG = distill.DistillConfig(num_tokens=96, tokens_per_batch=24, lengths=(6, 12))


def answers() -> distill.Answers:
  return distill.answers_of(
    [
      ([1, 2, 3], [4, 5]),
      ([1, 2], []),
      ([7, 8], [9, 10, 11, 12, 13, 14]),
      ([1] * 8, [2] * 8),
    ]
  )


def test_answers_lie_behind_their_prompts_and_one_that_says_nothing_is_left_out():
  found = answers()
  assert found.tokens[:5].tolist() == [1, 2, 3, 4, 5]
  assert found.starts.tolist() == [0, 5, 13, 29]
  assert found.prompt_lengths.tolist() == [3, 2, 8]


def test_batches_hold_whole_documents_of_one_length_and_weigh_answers():
  seen = set()
  for batch in itertools.islice(distill.batches(answers(), None, CONFIG), 6):
    assert batch.tokens.shape in ((4, 6), (2, 12)) and batch.ids.shape == (*batch.tokens.shape, 0)
    first = batch.tokens[0, 0]
    seen.add(int(first))
    count = 5 if first == 1 else 8
    prompt = 3 if first == 1 else 2
    expected = [0.0] + [np.float32(0.1)] * (prompt - 1) + [1.0] * (count - prompt)
    assert batch.weights[0, :count].tolist() == expected
    assert not batch.weights[:, count:].any() and not batch.tokens[:, count:].any()
  assert seen == {1, 7}  # The one of 16 tokens is too long.


def test_losses_are_cross_entropy_and_kl_by_hand():
  logits = jnp.log(jnp.asarray([[[0.5, 0.25, 0.25], [0.1, 0.6, 0.3], [1.0, 1.0, 1.0]]]))
  tokens = jnp.asarray([[0, 2, 1]], jnp.int32)
  empty = jnp.zeros((1, 3, 0))
  sampled = distill.Batch(tokens, jnp.ones((1, 3)), empty.astype(jnp.int32), empty)
  wanted = [[0.0, -np.log(0.25), -np.log(0.6)]]
  np.testing.assert_allclose(distill.losses_of(logits, sampled), wanted, rtol=1e-6)
  # Two ids of the target are known, 0.7 and 0.2, which leaves 0.1 for the third.
  ids = jnp.asarray([[[0, 1], [1, 0], [0, 1]]], jnp.int32)
  logprobs = jnp.log(jnp.asarray([[[0.7, 0.2], [0.6, 0.1], [0.5, 0.5]]]))
  likely = distill.Batch(tokens, jnp.ones((1, 3)), ids, logprobs)
  first = 0.7 * np.log(0.7 / 0.5) + 0.2 * np.log(0.2 / 0.25) + 0.1 * np.log(0.1 / 0.25)
  found = distill.losses_of(logits, likely)
  np.testing.assert_allclose(found, [[0.0, first, 0.0]], atol=1e-6)


@refusals.table(
  (lambda: distill.answers_of([([1], [])]), "got no answers, expected at least one with a token"),
  (lambda: next(distill.batches(distill.answers_of([([1] * 9, [1] * 9)]), None, CONFIG)),
   "got no answers, expected at least one"),
  (lambda: distill.DistillConfig(num_tokens=10), "got num_tokens=10, tokens_per_batch=3072"),
  (lambda: distill.DistillConfig(lengths=(8, 4)), "lengths: got (8, 4), expected ascending"),
  (lambda: distill.DistillConfig(learning_rate=0.0), "learning_rate: got 0.0, expected a pos"),
  (lambda: distill.DistillConfig(prompt_weight=2.0), "prompt_weight: got 2.0, expected 0 to 1"),
)  # fmt: skip
def test_refusals(row):
  refusals.check(row)


@pytest.mark.thorough
@pytest.mark.parametrize("is_soft", [False, True])
def test_a_draft_comes_near_its_target(is_soft):
  numerics = distill.numerics_for(CONFIG.lengths[0])
  target = parameters.init(numerics_lib.key(1), SHAPE, numerics)
  target = jax.tree.map(lambda leaf: leaf * 5, target)
  config = dataclasses.replace(CONFIG, num_tokens=200 * 24, learning_rate=1e-2)
  rng = np.random.default_rng(0)
  draw = lambda: rng.integers(0, 32, 3).tolist()
  sampled = distill.answers_of([(draw(), draw()) for _ in range(8)])
  likely = None
  if is_soft:
    decoder = distill.decoder_for(SHAPE, config.lengths[0])
    rows = jnp.asarray(sampled.tokens.reshape(8, 6))
    logits = flax_module.logits_of(target, rows, decoder=decoder)
    logprobs, ids = jax.lax.top_k(jax.nn.log_softmax(logits.reshape(48, -1)), 31)
    likely = distill.Likely(np.asarray(ids, np.int32), np.asarray(logprobs))
    assert np.allclose(np.exp(likely.logprobs).sum(axis=1), 1, atol=0.1)
  optimizer = distill.make_optimizer(config)
  params = parameters.init(numerics_lib.key(0), SHAPE, numerics)
  state, step, losses = optimizer.init(params), distill.make_step(SHAPE, optimizer), []
  for batch in itertools.islice(distill.batches(sampled, likely, config), config.num_steps):
    params, state, metrics = step(params, state, batch)
    losses.append(float(metrics["answer_loss"]))
  assert np.mean(losses[-10:]) < 0.3 * np.mean(losses[:10])
