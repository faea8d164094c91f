"""Trains a run's draft model between steps, on the tokens sampled from the policy.

    step's groups -> one pass over prompts and completions (trainer.distill) -> new draft weights

Without this, a policy in training drifts away from its draft. The update is a function of the
draft's state and the step's tokens, so a resumed run continues with the same bits. Drafts never
affect the policy.
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

# Length of the shortest padded documents; each longer length is twice the one before.
SHORTEST = 64
# Minimum number of tokens per batch (rows times length).
TOKENS_PER_BATCH = 2048
# No weight decay and no learning-rate decay: few tokens are seen while the policy moves.
SECOND_MOMENT = 0.98


class DraftState(NamedTuple):
  """State of a draft in training, as stored in checkpoints.

  Attributes:
    params: master weights, f32, with one slab.
    opt_state: optax state.
  """

  params: Any
  opt_state: Any


class DraftLearner:
  """Trains a draft model.

  Attributes:
    drafter: the drafter that receives the new weights after each step.
    state: state after the last completed step.
  """

  def __init__(self, drafter: ModelDrafter):
    """Starts from the drafter's weights, with the learning rate of its config."""
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
    self._step = distill.make_step(program.decoder.shape, optimizer)

  def restore(self, state: DraftState) -> None:
    """Restores the state of a checkpoint and publishes its weights."""
    self.state = state
    self._publish()

  def learn(self, groups: Sequence[RolloutGroup], step: int) -> dict[str, float]:
    """Trains on a step's completions once; returns the metrics.

    Args:
      groups: the step's groups; failed or empty completions are skipped.
      step: step number, from 0; determines the order of documents.
    """
    texts = [
      (rollout.request.prompt, rollout.completion.tokens)
      for group in groups
      for rollout in group.rollouts
      if rollout.completion.tokens and rollout.completion.finish_reason != "error"
    ]
    # The target's vocabulary padding has ids that the draft cannot read.
    readable = self.drafter.program.decoder.shape.vocab_size
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
    # The step donates its inputs, which a checkpoint may still need.
    params, opt_state = jax.tree.map(jnp.copy, tuple(self.state))
    found = []
    for batch in itertools.islice(distill.batches(answers, None, config), num_batches):
      params, opt_state, metrics = self._step(params, opt_state, batch)
      found.append(metrics)
    self.state = DraftState(params, opt_state)
    self._publish()
    names = ("answer_loss", "answer_hits")
    return {
      f"draft/{name}": float(np.mean([float(metrics[name]) for metrics in found])) for name in names
    }

  def _publish(self) -> None:
    numerics = self.drafter.program.decoder.numerics
    # Copied, because float32 weights would otherwise be the masters themselves.
    params = jax.tree.map(jnp.copy, self.state.params)
    self.drafter.update_weights(parameters.compute_params(params, numerics))


@functools.cache
def _lengths_up_to(context: int) -> tuple[int, ...]:
  """Returns document lengths in ascending order; the last is at least `context`."""
  lengths = [SHORTEST]
  while lengths[-1] < context:
    lengths.append(2 * lengths[-1])
  return tuple(lengths)
