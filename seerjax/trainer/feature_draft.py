"""A one-layer draft that reads its target's last hidden row (EAGLE).

    [h[t - 1]; E(x[t])] W -> one decoder layer -> g[t] -> the target's head -> x[t + 1]

h are the target's hidden rows before the final norm, E is its embedding. E, h and the head are
frozen; only W and one layer are trained. When a token is drafted, the target has not yet computed
the row of the last token x[t], so the row before it is the last one known. After the first drafted
token, g takes the place of h.

The loss is that of a draft model (`distill.losses_of`) plus the distance between g and h, both
normalised to unit scale, so that g can replace h.

The engine cannot use this draft, because its steps do not return hidden rows.

Source: EAGLE, arXiv 2401.15077.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import optax

from seerjax import numerics as numerics_lib
from seerjax.array_typing import Array, Float, Int, PRNGKeyArray
from seerjax.models import config as model_config, flax_module, parameters
from seerjax.trainer import distill

# Weight of the distance between rows, relative to the loss of tokens.
ROW_WEIGHT = 0.5


def init(key: PRNGKeyArray, target: model_config.TransformerConfig) -> parameters.Params:
  """Returns new draft weights: "merge" f32[2d, d], and "layer", a layer of the target's shape.

  Args:
    key: PRNG key from `numerics.key`; consumed.
    target: shape of the target.
  """
  one_layer = dataclasses.replace(target, num_layers=1)
  layer = parameters.init(key, one_layer, distill.numerics_for(2))["layers"][0]
  size = target.hidden_size
  with numerics_lib.pinned_randomness():
    merge = jax.random.normal(jax.random.fold_in(key, 1 << 16), (2 * size, size), jnp.float32)
  return {"merge": merge * (2 * size) ** -0.5, "layer": layer}


def rows_of(
  draft: parameters.Params,
  target: parameters.Params,
  hidden: Float[Array, "b t d"],
  tokens: Int[Array, "b t"],
  *,
  model: model_config.TransformerConfig,
) -> Float[Array, "b t d"]:
  """Returns the draft's rows g of whole sequences, f[b, t, d].

  Args:
    draft: weights of the draft.
    target: weights of the target, with one slab.
    hidden: hidden rows h of the target; row t reads only rows before t.
    tokens: tokens of the sequences.
    model: shape of the target.
  """
  before = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
  both = jnp.concatenate([_unit(before), _unit(target["embed"][tokens])], axis=2)
  read = (both @ draft["merge"]).reshape(-1, model.hidden_size)
  # The model reads an embedding table, so `read` is passed as a table with one row per position.
  places = jnp.arange(read.shape[0], dtype=jnp.int32).reshape(tokens.shape)
  shape = dataclasses.replace(model, num_layers=1, vocab_size=read.shape[0])
  found = flax_module.hidden_of(
    {"embed": read, "layers": [draft["layer"]], "final_norm": target["final_norm"]},
    places,
    config=shape,
    numerics=distill.numerics_for(tokens.shape[1]),
  )
  return found.reshape(hidden.shape)


def logits_of(
  target: parameters.Params,
  rows: Float[Array, "... d"],
  *,
  model: model_config.TransformerConfig,
) -> Float[Array, "... v"]:
  """Applies the target's head to rows g; returns f32[..., v]."""
  found = flax_module.logits_of_hidden(
    target,
    rows.reshape(-1, model.hidden_size),
    config=model,
    numerics=distill.numerics_for(2),
  )
  return found.reshape(*rows.shape[:-1], -1)


def target_rows(
  target: parameters.Params,
  tokens: Int[Array, "b t"],
  *,
  model: model_config.TransformerConfig,
) -> Float[Array, "b t d"]:
  """Returns the target's hidden rows h of whole sequences, f[b, t, d]."""
  numerics = distill.numerics_for(tokens.shape[1])
  found = flax_module.hidden_of(target, tokens, config=model, numerics=numerics)
  return found.reshape(*tokens.shape, -1)


def make_step(
  target: parameters.Params,
  model: model_config.TransformerConfig,
  optimizer: optax.GradientTransformation,
) -> distill.Step:
  """Returns the compiled `(draft, opt_state, batch) -> (draft, opt_state, metrics)`.

  Draft and optimiser state are donated. Metrics are f32[]: the loss, the distance between rows, and
  the share of completion tokens that equal the draft's most likely token.
  """

  def loss(draft: Any, batch: distill.Batch) -> tuple[Array, dict[str, Array]]:
    hidden = lax.stop_gradient(target_rows(target, batch.tokens, model=model))
    rows = rows_of(draft, target, hidden, batch.tokens, model=model)
    logits = logits_of(target, rows, model=model)
    losses = distill.losses_of(logits, batch)
    of_tokens = jnp.sum(losses * batch.weights) / jnp.sum(batch.weights)
    is_text = (batch.weights > 0).astype(jnp.float32)
    apart = optax.losses.huber_loss(_unit(rows), _unit(hidden)).mean(axis=2)
    of_rows = jnp.sum(apart * is_text) / jnp.sum(is_text)
    answers = (batch.weights == 1.0).astype(jnp.float32)
    said = jnp.pad(jnp.argmax(logits[:, :-1], axis=-1), ((0, 0), (1, 0))) == batch.tokens
    hits = jnp.sum(said * answers) / jnp.maximum(jnp.sum(answers), 1.0)
    total = of_tokens + ROW_WEIGHT * of_rows
    return total, dict(loss=total, distance=of_rows, answer_hits=hits)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(draft: Any, opt_state: Any, batch: distill.Batch) -> tuple[Any, Any, dict[str, Array]]:
    (_, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(draft, batch)
    updates, opt_state = optimizer.update(gradient, opt_state, draft)
    return optax.apply_updates(draft, updates), opt_state, metrics

  return step


def _unit(rows: Float[Array, "... d"]) -> Float[Array, "... d"]:
  return rows * lax.rsqrt(jnp.mean(jnp.square(rows), axis=-1, keepdims=True) + 1e-6)
