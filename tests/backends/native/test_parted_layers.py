"""Norms, gates and caps of Gemma's kind: agreement with tiles, bits under a gradient, twins."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import native_reference as reference
import numpy as np
import pytest
import tiny_model

from seerjax import numerics as numerics_lib
from seerjax.backends.native import head_forward
from seerjax.backends.protocol import HeadStage
from seerjax.layer_kinds import Experts
from seerjax.models import flax_module, head, kv_layout, transformer
from seerjax.models.decoder import decide
from seerjax.ops import sampling
from seerjax.ops.routing import RoutingConfig
from seerjax.types import SamplingParams

ODD, PAGE_SIZE, LENGTH = tiny_model.ODD, 8, 21
MIXED = Experts(
  routing=RoutingConfig(num_experts=16, num_chosen=3, is_renormalised=True),
  expert_size=5,
  shared_size=8,
)
CONFIGS = {
  "gelu": ODD.changed(activation="gelu_tanh"),
  "1 + w": dataclasses.replace(ODD, norm_weights="1 + w"),
  "post norms": ODD.changed(norm_placement="pre_and_post"),
  "cap": dataclasses.replace(ODD, logit_soft_cap=4.0),
  "scale": dataclasses.replace(ODD, embedding_scale=3.0),
  "all": tiny_model.RULES,
  "experts": dataclasses.replace(
    tiny_model.RULES,
    layers=tuple(
      dataclasses.replace(layer, feed_forward=MIXED) for layer in tiny_model.RULES.layers
    ),
  ),
}
NUMERICS = {"float32": tiny_model.NATIVE, "bfloat16": tiny_model.NATIVE_BFLOAT16}
CASES = pytest.mark.parametrize(
  ("name", "dtype"), [(name, dtype) for name in CONFIGS for dtype in NUMERICS]
)


def scores_of(config, numerics, params):
  """Scores of the next tokens of two sequences, f32[3, n]."""
  decoder = decide(config, numerics)
  tokens = tiny_model.random_tokens(config, 2, LENGTH)
  batch, num_pages = flax_module.sequences_batch(2, LENGTH, numerics, PAGE_SIZE)
  batch = jax.tree.map(jnp.asarray, batch)._replace(tokens=tokens.reshape(-1))
  pages = kv_layout.ScratchPages(num_pages, PAGE_SIZE)
  hidden, _ = transformer.forward(params, batch, pages, decoder=decoder)
  count = hidden.shape[0]
  forced = jnp.roll(batch.tokens, -1)
  rows = jax.tree.map(
    jnp.asarray, sampling.sampling_rows([SamplingParams(temperature=0.7)] * count)
  )
  _, scores = head.sample_and_score(
    params, hidden, forced, rows, jnp.zeros(count, jnp.uint32), batch.positions,
    batch.num_rows, numerics_lib.key(0), decoder=decoder,
  )  # fmt: skip
  return jnp.stack(scores)


@functools.partial(jax.jit, static_argnums=(0, 1))
def gradient_of(config, numerics, params):
  def loss(params):
    scores = scores_of(config, numerics, params)
    factors = np.random.default_rng(5).standard_normal(scores.shape).astype(np.float32)
    return jnp.sum(scores * factors), scores

  return jax.value_and_grad(loss, has_aux=True)(params)


@pytest.mark.thorough
@pytest.mark.few(2)
@CASES
def test_scores_and_gradients_are_those_of_the_tiled_backend(name, dtype):
  config, numerics = CONFIGS[name], NUMERICS[dtype]
  params = tiny_model.random_params(config, numerics)
  tiled = dataclasses.replace(numerics, backend="tiled")
  (_, scores), gradient = gradient_of(config, numerics, params)
  (_, wanted), expected = gradient_of(config, tiled, params)
  alone = jax.jit(scores_of, static_argnums=(0, 1))(config, numerics, params)
  np.testing.assert_array_equal(scores, alone)
  close, share = (3e-5, 1.0) if dtype == "float32" else (0.15, 0.8)
  leaves = jax.tree_util.tree_leaves_with_path((scores, gradient))
  for (path, got), want in zip(leaves, jax.tree.leaves((wanted, expected)), strict=True):
    assert got.dtype == want.dtype, path
    got, want = (np.asarray(x).astype(np.float32) for x in (got, want))
    assert np.any(want) or "expert" in str(path), path
    # In bfloat16, a close choice of experts may move.
    error = np.quantile(np.abs(got - want), share)
    assert error <= close * np.abs(want).max() + 1e-6, (path, error, np.abs(want).max())


def test_a_factor_of_1_plus_w_is_rounded_once():
  """The twin rounds the normed row before it is scaled, as for norms of another kind."""
  config, generator = CONFIGS["1 + w"], np.random.default_rng(7)
  draw = lambda *shape: jnp.asarray(generator.standard_normal(shape), jnp.bfloat16)
  hidden, scale = draw(9, 24), draw(24)
  stage = HeadStage(config, None, head.score_rows)
  zeros = jnp.zeros(9, jnp.uint32)
  rows = hidden, None, None, zeros, zeros.astype(jnp.int32), None
  weights = {"final_norm": scale, "key": jax.random.key_data(numerics_lib.key(0))}
  found, _ = jax.jit(functools.partial(head_forward.prepared_rows, stage))(
    weights, rows, jnp.int32(9)
  )
  x, factor = (np.asarray(leaf).astype(np.float32) for leaf in (hidden, scale))
  mean = reference.dot(x, x) / np.float32(24) + np.float32(config.norm_eps)
  normed, factor = x * (np.float32(1) / np.sqrt(mean))[:, None], factor + np.float32(1)
  np.testing.assert_array_equal(found, reference.rounded(normed * factor, "bfloat16"))
  twice = reference.rounded(reference.rounded(normed, "bfloat16") * factor, "bfloat16")
  np.testing.assert_allclose(twice, found, rtol=0.01)
  assert np.any(twice != np.asarray(found))
