"""Draft chains along completions by hand, and a layer's first guesses against its rows."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model

from experiments import draft_kinds
from experiments.draft_kinds import LENGTH, PADDED
from seerjax import numerics as numerics_lib
from seerjax.models import parameters
from seerjax.trainer import distill, feature_draft

VOCAB = tiny_model.SMALLEST.vocab_size
MODEL = dataclasses.replace(tiny_model.SMALLEST, num_layers=1)
ANSWERS = distill.answers_of(
  [([1, 2, 3], [*range(10, 30)]), ([4], [5]), ([7, 8], [*range(30, 41)])]
)


def right(tokens, last, noise):
  places = np.minimum(np.asarray(last)[:, None] + 1 + np.arange(LENGTH), PADDED - 1)
  return np.take_along_axis(np.asarray(tokens), places, axis=1)


def right_twice(tokens, last, noise):
  found = right(tokens, last, noise).copy()
  found[:, 2:] = -1
  return found


def wrong(tokens, last, noise):
  return np.full((tokens.shape[0], LENGTH), -1)


@pytest.mark.parametrize(
  "drafts, steps, held",
  # Completions of 20, 1 and 11 tokens: 9 per step and 2 at the end of the first; 3 per step and 2
  # at the end of the first and the last.
  [(right, 3 + 1 + 2, 5), (right_twice, 7 + 1 + 4, 11), (wrong, 32, 0)],
)
def test_a_chain_says_what_holds_and_one_more(drafts, steps, held):
  found = draft_kinds.chains(drafts, ANSWERS, VOCAB)
  assert (found.steps, found.said) == (steps, 32)
  assert found.held[0] == held and (found.held <= found.reached).all()


def test_a_layer_goes_on_with_its_own_rows_behind_its_first_guess():
  target = parameters.init(numerics_lib.key(0), MODEL, distill.numerics_for(PADDED))
  draft = feature_draft.init(numerics_lib.key(1), MODEL)
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, PADDED)), jnp.int32)
  last, noise = jnp.asarray([5, 60]), draft_kinds.noise_of(jnp.asarray([3, 4]), VOCAB)
  found = np.asarray(draft_kinds.of_layer(draft, target, MODEL)(tokens, last, noise))
  assert found.shape == (2, LENGTH)
  hidden = feature_draft.target_rows(target, tokens, model=MODEL)
  for ahead in range(3):
    rows = feature_draft.rows_of(draft, target, hidden, tokens, model=MODEL)
    logits = feature_draft.logits_of(target, rows, model=MODEL)
    for row in range(2):
      place = int(last[row]) + ahead
      assert int(jnp.argmax(logits[row, place] + noise[row, place + 1])) == found[row, ahead]
      hidden = hidden.at[row, place].set(rows[row, place])
