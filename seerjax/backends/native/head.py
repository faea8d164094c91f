"""The native head: combines the handlers with the tiled program, forward and backward."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from seerjax import parallel
from seerjax.array_typing import Array
from seerjax.backends.native import head_backward, head_forward
from seerjax.backends.protocol import Backend, HeadStage
from seerjax.ops import sampling
from seerjax.types import TokenScores


def head(
  tiled: Backend, stage: HeadStage, weights: Any, rows: Any, num_rows: Array
) -> tuple[Array, TokenScores]:
  """See `protocol.Backend.head`.

  For a biased, filtered or restricted row, the token, its log-probability and its entropy come from
  `tiled`. Raw log-probabilities come from the handlers for every row: a special row is forced to
  its token there. This choice depends on a row's own parameters only.
  """
  return _head(tiled, stage, weights, rows, num_rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _head(tiled: Backend, stage: HeadStage, weights: Any, rows: Any, num_rows: Array):
  return _head_forward(tiled, stage, weights, rows, num_rows)[0]


def _head_forward(tiled: Backend, stage: HeadStage, weights: Any, rows: Any, num_rows: Array):
  hidden, forced, parameters, *others = rows
  is_special = sampling.is_special(parameters)
  none = jnp.zeros(forced.shape, jnp.float32)
  tokens, special = lax.cond(
    jnp.any(is_special),
    lambda: tiled.head(stage, weights, rows, num_rows),
    lambda: (jnp.zeros_like(forced), TokenScores(none, none, none)),
  )
  # On a mesh, this also orders the two gatherings.
  own = (hidden, jnp.where(is_special, tokens, forced), parameters, *others)
  scored = head_forward.scored_rows(stage, weights, own, num_rows)
  processed = jax.tree.map(lambda a, b: jnp.where(is_special, a, b), special, scored.scores)
  scores = processed._replace(raw_logprob=scored.scores.raw_logprob)
  return (scored.tokens, scores), (weights, rows, num_rows, scored)


def _head_backward(tiled: Backend, stage: HeadStage, residuals: Any, cotangent: Any):
  """Returns the gradient of given tokens' scores: to the final norm, the table, the hidden rows."""
  weights, rows, num_rows, scored = residuals
  _, wanted = cotangent
  is_special = sampling.is_special(rows[2])
  none = jnp.zeros_like(wanted.raw_logprob)
  common = jax.tree.map(lambda leaf: jnp.where(is_special, none, leaf), wanted)
  common = common._replace(raw_logprob=wanted.raw_logprob)

  def of_common(hidden: Array) -> Any:
    own = (hidden, *rows[1:])
    return head_backward.gradient(stage, weights, own, num_rows, scored, common)

  def of_both() -> Any:
    definition = stage.gradient_of or stage.rows
    given = functools.partial(definition, tiled, stage.shape, stage.axis)

    def scores(norm: Array, table: Array, hidden: Array) -> Any:
      these = {**weights, "final_norm": norm, "head": table}
      return tiled.map_rows(given, these, (hidden, *rows[1:]), num_rows)

    _, pull = jax.vjp(scores, weights["final_norm"], weights["head"], rows[0])
    filtered = jax.tree.map(lambda leaf: jnp.where(is_special, leaf, none), wanted)
    special = pull(filtered._replace(raw_logprob=none))
    # One after the other: the tiled program's float32 tables are freed before the second table is
    # allocated, and its collectives are complete.
    special, hidden = lax.optimization_barrier((special, rows[0]))
    hidden = hidden if stage.axis is None else parallel.after(hidden, special[2])
    return jax.tree.map(jnp.add, of_common(hidden), special)

  norm, table, hidden = lax.cond(jnp.any(is_special), of_both, lambda: of_common(rows[0]))
  return {"final_norm": norm, "head": table, "key": None}, (hidden, *[None] * 5), None


_head.defvjp(_head_forward, _head_backward)
