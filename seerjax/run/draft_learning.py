"""A run's draft model learns between steps, from what the policy said in each step.

    step's groups -> one pass over prompts and answers (trainer.distill) -> the draft's new weights

A policy that learns moves away from a draft that does not. What the draft learns is a function of
its state and of the step's tokens, so that a resumed run goes on to the same bits; and no draft
moves a bit of the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from seerjax.models import parameters
from seerjax.speculation.draft_model import ModelDrafter
from seerjax.trainer import distill
from seerjax.types import RolloutGroup

# The shortest documents' length, padding included; each further one is twice as long.
SHORTEST = 64
# Rows of a batch times their length, at least.
TOKENS_PER_BATCH = 2048
# The optimiser has seen so few tokens of a policy that moves: no weight decay, no cooling down.
SECOND_MOMENT = 0.98


class DraftState(NamedTuple):
  """A draft that learns, as a checkpoint holds it.

  Attributes:
    params: master weights, f32, of one slab.
    opt_state: optax state.
  """

  params: Any
  opt_state: Any


class DraftLearner:
  """Teaches a draft model.

  Attributes:
    drafter: whose weights are replaced after each step.
    state: as of the last whole step.
  """

  def __init__(self, drafter: ModelDrafter):
    """Begins with the drafter's weights, at the rate of its config."""
    program = drafter.program
    self.drafter = drafter
    masters = jax.tree.map(
      lambda leaf: jnp.array(leaf, jnp.float32), parameters.unstacked(drafter.params)
    )
    self._lengths = _lengths_up_to(program.context)
    optimizer = optax.chain(
      optax.clip_by_global_norm(1.0),
      optax.adam(drafter.config.learning_rate, b2=SECOND_MOMENT),
    )
    self.state = DraftState(masters, optimizer.init(masters))
    self._step = distill.make_step(program.config, optimizer)

  def restore(self, state: DraftState) -> None:
    """Goes on from a checkpoint's state."""
    self.state = state
    self._publish()

  def learn(self, groups: Sequence[RolloutGroup], step: int) -> dict[str, float]:
    """Learns a step's answers once; returns the step's numbers.

    Args:
      groups: with their answers; what broke off, or has no token, teaches nothing.
      step: from 0; orders them.
    """
    texts = [
      (rollout.request.prompt, rollout.completion.tokens)
      for group in groups
      for rollout in group.rollouts
      if rollout.completion.tokens and rollout.completion.finish_reason != "error"
    ]
    # A target's padding has ids that no draft can read.
    readable = self.drafter.program.config.vocab_size
    texts = [text for text in texts if max(map(max, text)) < readable]
    if not texts:
      return {}
    answers = distill.answers_of(texts)
    tokens_per_batch = max(TOKENS_PER_BATCH, self._lengths[-1])
    config = distill.DistillConfig(
      num_tokens=tokens_per_batch,
      tokens_per_batch=tokens_per_batch,
      lengths=self._lengths,
      prompt_weight=0.0,
      seed=step,
    )
    counts = np.diff(answers.starts)
    padded = np.asarray(self._lengths)[np.searchsorted(self._lengths, counts)]
    num_batches = max(1, round(int(padded.sum()) / tokens_per_batch))
    # The step takes the place of what it is given, and a checkpoint may still need that.
    params, opt_state = jax.tree.map(jnp.copy, tuple(self.state))
    found = []
    for batch in itertools.islice(distill.batches(answers, None, config), num_batches):
      params, opt_state, metrics = self._step(params, opt_state, batch)
      found.append(metrics)
    self.state = DraftState(params, opt_state)
    self._publish()
    names = ("answer_loss", "answer_hits")
    return {
      f"draft/{name}": float(np.mean([float(metrics[name]) for metrics in found]))
      for name in names
    }

  def _publish(self) -> None:
    numerics = self.drafter.program.numerics
    # Copies: float32 weights are otherwise the masters themselves.
    params = jax.tree.map(jnp.copy, self.state.params)
    self.drafter.set_params(parameters.compute_params(params, numerics))


@functools.cache
def _lengths_up_to(context: int) -> tuple[int, ...]:
  """Returns lengths of documents, ascending, the last of which holds any."""
  lengths = [SHORTEST]
  while lengths[-1] < context:
    lengths.append(2 * lengths[-1])
  return tuple(lengths)
