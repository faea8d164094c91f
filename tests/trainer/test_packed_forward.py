"""A packed micro-batch: no sequence depends on its neighbours, forward or backward."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import made_rollouts
import numpy as np
import pytest
import tiny_model

from seerjax.models import kv_layout, parameters, transformer
from seerjax.models.decoder import decide
from seerjax.trainer import packing

NUMERICS, CONFIG = tiny_model.ONE_SLAB, tiny_model.SMALLEST
SIZES = {
  "decoder": decide(CONFIG, NUMERICS),
  "page_size": 4,
  "rows_per_micro_batch": 48,
  "max_num_seqs": 3,
  "max_sequence_tokens": 25,
}


def random_group(index, lengths, rng):
  """One rollout for each (prompt, generated) pair of lengths."""
  rollouts = []
  for num_prompt, num_generated in lengths:
    tokens = rng.integers(0, CONFIG.vocab_size, num_prompt + num_generated).tolist()
    rollouts.append(made_rollouts.rollout(tokens[:num_prompt], tokens[num_prompt:]))
  return made_rollouts.group(index, *rollouts)


@functools.partial(jax.jit, static_argnums=2)
def hidden_and_gradient(master, rows, num_pages):
  """Hidden rows under grad, and the gradient of a sum over loss rows."""

  def loss(master):
    params = parameters.compute_params(master, NUMERICS)
    pages = kv_layout.empty_pages(
      decide(CONFIG, NUMERICS), num_pages=num_pages, page_size=SIZES["page_size"]
    )
    hidden, _ = transformer.forward(params, rows.tokens, pages, decoder=decide(CONFIG, NUMERICS))
    wanted = jnp.where(rows.loss_mask[:, None], jnp.sin(3.0 * hidden), 0.0)
    return jnp.sum(wanted), hidden

  (_, hidden), gradient = jax.value_and_grad(loss, has_aux=True)(master)
  return hidden, gradient


@pytest.mark.thorough
def test_packed_sequences_are_those_packed_alone():
  rng = np.random.default_rng(0)
  lengths = [(3, 5), (1, 20), (9, 8)]  # 7, 20 and 16 rows, packed into one micro-batch.
  groups = [random_group(index, [pair], rng) for index, pair in enumerate(lengths)]
  master = tiny_model.random_master(CONFIG, NUMERICS)
  num_pages = packing.layout(**SIZES).num_pages

  def run(groups):
    batch = packing.pack(groups, np.zeros((len(groups), 1)), **SIZES)
    assert batch.targets.shape[0] == 1
    rows = jax.tree.map(lambda x: jnp.asarray(x[0]), batch)
    hidden, gradient = hidden_and_gradient(master, rows, num_pages)
    return packing.unpack(np.asarray(hidden)[None], batch), gradient

  together, gradient = run(groups)
  alone = [run([group]) for group in groups]
  for got, (want, _) in zip(together, alone, strict=True):
    np.testing.assert_array_equal(got, want[0])  # Equal bits.
  summed = jax.tree.map(lambda *x: sum(x[1:], x[0]), *(part for _, part in alone))
  assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(gradient["layers"]))
  for got, want in zip(jax.tree.leaves(gradient), jax.tree.leaves(summed), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * float(jnp.abs(want).max()))
