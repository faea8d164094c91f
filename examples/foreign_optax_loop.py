"""SeerJAX's advantages and policy loss in a separate optax loop.

The policy is a table of logits, one row per position of a short text; the reward counts letters
that agree with a secret word. SeerJAX's engine, models and trainer are not used: groups are sampled
in plain JAX, `advantages` computes advantages from rewards, `losses` computes the loss from
log-probabilities, and optax updates the table. Each batch gets four optimiser steps, so in the
later ones the ratios differ from 1.

  python examples/foreign_optax_loop.py

Takes a few seconds on a CPU. The last line reads `seerjax`.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from seerjax.trainer import advantages, losses

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
WORD = "seerjax"
NUM_PROMPTS, GROUP_SIZE = 8, 8
NUM_BATCHES, STEPS_PER_BATCH = 40, 4
CONFIG = losses.dapo()
OPTIMIZER = optax.adam(0.1)


@jax.jit
def sample(logits: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns letters i32[b, g, t] and their log-probabilities f32[b, g, t]."""
  shape = (NUM_PROMPTS, GROUP_SIZE, len(WORD))
  letters = jax.random.categorical(key, logits, shape=shape)
  return letters, score(logits, letters)


def score(logits: jax.Array, letters: jax.Array) -> jax.Array:
  """Returns log-probabilities of letters i32[..., t] under the table f32[t, v]."""
  logprobs = jax.nn.log_softmax(logits)
  return logprobs[jnp.arange(len(WORD)), letters]


def flatten(letters: jax.Array, behaviour_logprobs: jax.Array, values: np.ndarray):
  """Returns `LossRows` with a row per letter and a sequence per text, no prompt and no padding."""
  num_sequences = NUM_PROMPTS * GROUP_SIZE
  return losses.LossRows(
    loss_mask=jnp.ones(letters.size, bool),
    sequence_index=jnp.repeat(jnp.arange(num_sequences), len(WORD)),
    advantages=jnp.repeat(jnp.asarray(values).ravel(), len(WORD)),
    behaviour_logprobs=behaviour_logprobs.ravel(),
  )


@jax.jit
def update(logits, opt_state, letters, rows):
  """Returns the updated logits and optimiser state, and the loss metrics."""

  def loss(logits):
    log_probabilities = jax.nn.log_softmax(logits)
    entropy = -jnp.sum(jnp.exp(log_probabilities) * log_probabilities, axis=-1)
    return losses.policy_loss(
      score(logits, letters).ravel(),
      jnp.broadcast_to(entropy, letters.shape).ravel(),
      rows,
      CONFIG,
      losses.denominators(rows),
    )

  gradient, metrics = jax.grad(loss, has_aux=True)(logits)
  updates, opt_state = OPTIMIZER.update(gradient, opt_state)
  return optax.apply_updates(logits, updates), opt_state, losses.summarise(metrics)


def main() -> str:
  """Trains, prints progress, and returns the most likely text."""
  secret = np.asarray([ALPHABET.index(letter) for letter in WORD])
  logits = jnp.zeros((len(WORD), len(ALPHABET)))
  opt_state = OPTIMIZER.init(logits)
  key = jax.random.key(0)
  for batch in range(NUM_BATCHES):
    letters, behaviour_logprobs = sample(logits, jax.random.fold_in(key, batch))
    rewards = np.mean(np.asarray(letters) == secret, axis=-1)
    rows = flatten(letters, behaviour_logprobs, advantages.for_algorithm(CONFIG.algorithm, rewards))
    for _ in range(STEPS_PER_BATCH):
      logits, opt_state, summary = update(logits, opt_state, letters, rows)
    if batch % 10 == 9:
      print(
        f"batch {batch + 1:3d}  reward {rewards.mean():.3f}  entropy {summary['entropy']:.3f}"
        f"  clipped {summary['clipped_low'] + summary['clipped_high']:.3f}"
      )
  return "".join(ALPHABET[i] for i in np.asarray(jnp.argmax(logits, axis=-1)))


if __name__ == "__main__":
  text = main()
  print(text)
  sys.exit(text != WORD)
