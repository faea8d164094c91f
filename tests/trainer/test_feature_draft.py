"""A draft that reads its target's hidden rows: which rows it sees, and that it learns."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model

from seerjax import numerics as numerics_lib
from seerjax.models import flax_module, parameters
from seerjax.trainer import distill, feature_draft

MODEL = dataclasses.replace(tiny_model.SMALLEST, num_layers=1)
CONFIG = distill.DistillConfig(
  num_tokens=24 * 60, tokens_per_batch=24, lengths=(12,), learning_rate=1e-2
)


@pytest.fixture(scope="module")
def target():
  params = parameters.init(numerics_lib.key(0), MODEL, distill.numerics_for(12))
  # Like a trained model's table, with distinguishable tokens.
  return {**params, "embed": 30 * params["embed"]}


@pytest.mark.thorough
def test_a_row_reads_hidden_rows_before_it_and_tokens_up_to_it(target):
  draft = feature_draft.init(numerics_lib.key(1), MODEL)
  tokens = jnp.arange(12, dtype=jnp.int32).reshape(1, 12)
  hidden = feature_draft.target_rows(target, tokens, model=MODEL)
  rows_of = jax.jit(lambda h, t: feature_draft.rows_of(draft, target, h, t, model=MODEL))
  plain = np.asarray(rows_of(hidden, tokens))
  other_row = np.asarray(rows_of(hidden.at[0, 5].add(1.0), tokens))
  other_token = np.asarray(rows_of(hidden, tokens.at[0, 5].set(33)))
  changed = lambda found: np.flatnonzero((found != plain).any(axis=2)[0])[0]
  assert changed(other_row) == 6 and changed(other_token) == 5
  # The target's head on the target's rows gives the target's logits.
  wanted = flax_module.logits_of(target, tokens, config=MODEL, numerics=distill.numerics_for(12))
  found = feature_draft.logits_of(target, hidden, model=MODEL)
  np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
def test_it_learns_what_is_said_and_leaves_its_target_alone(target):
  texts = [([1, 2, 3], [4, 5, 6, 7, 8, 9]), ([9, 8], [7, 6, 5, 4, 3, 2])]
  batches = distill.batches(distill.answers_of(texts), None, CONFIG)
  optimizer = distill.make_optimizer(CONFIG)
  before = jax.tree.map(np.asarray, target)
  draft = feature_draft.init(numerics_lib.key(1), MODEL)
  state, step = optimizer.init(draft), feature_draft.make_step(target, MODEL, optimizer)
  found = []
  for batch in itertools.islice(batches, CONFIG.num_steps):
    draft, state, metrics = step(draft, state, batch)
    found.append({name: float(value) for name, value in metrics.items()})
  assert found[-1]["loss"] < 0.5 * found[0]["loss"] and found[-1]["answer_hits"] > 0.9
  jax.tree.map(np.testing.assert_array_equal, before, target)
