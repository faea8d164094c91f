"""A small transformer that writes edits, trained from scratch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from seerjax import layer_kinds, numerics as numerics_lib
from seerjax.discovery import (
  attempts as attempts_lib,
  edits,
  environment as environment_lib,
)
from seerjax.discovery.attempts import SampledSequence
from seerjax.discovery.config import DiscoverConfig
from seerjax.discovery.edit_policy import EditPolicy
from seerjax.discovery.environment import Environment
from seerjax.layer_kinds import Gated, Grouped, LayerConfig
from seerjax.models import config as model_config, parameters
from seerjax.ops import rotary
from seerjax.rollout import groups
from seerjax.run import policy as policy_lib, programs as programs_lib
from seerjax.run.policy import Policy, WeightsConfig
from seerjax.trainer import losses, step as step_lib
from seerjax.types import (
  Completion,
  TrainState,
)


def tiny_policy(config: DiscoverConfig, environment: Environment) -> Policy:
  """Returns a small transformer with random weights and the environment's vocabulary."""
  language, tiny = environment_lib.language_of(environment), config.tiny
  size = tiny.hidden_size // tiny.num_heads
  model = model_config.TransformerConfig(
    vocab_size=language.vocab_size,
    hidden_size=tiny.hidden_size,
    layers=layer_kinds.uniform(
      LayerConfig(
        attention=Grouped(
          num_heads=tiny.num_heads,
          num_kv_heads=tiny.num_heads,
          head_dim=size,
          has_qk_norms=True,
          rotary=rotary.RotaryConfig(head_dim=size, base=10_000.0),
        ),
        feed_forward=Gated(intermediate_size=3 * tiny.hidden_size),
      ),
      tiny.num_layers,
    ),
    max_model_len=config.engine.max_model_len,
  )
  key = numerics_lib.key(groups.request_seed(config.seed, -4))
  return Policy(model, parameters.init(key, model, config.numerics))


def warm_start(
  weights: WeightsConfig,
  config: DiscoverConfig,
  environment: Environment,
  writer: EditPolicy,
  trainer: step_lib.Trainer,
  state: TrainState,
  say: Callable[[str], None],
) -> parameters.Params:
  """Returns weights trained on random valid sentences, as a substitute for pre-training.

  Sentences are drawn uniformly from the grammar and applied to the start and to results of earlier
  sentences; those that yield a valid artefact become training data.
  """
  language = environment_lib.language_of(environment)
  random = np.random.default_rng([config.seed, 1])
  artefacts = [environment_lib.started(environment, groups.request_seed(config.seed, -3, 0))]
  examples: list[SampledSequence] = []
  num_tried = 0
  while len(examples) < config.tiny.warm_sentences and num_tried < 8 * config.tiny.warm_sentences:
    jobs = []
    for place in range(min(256, config.tiny.warm_sentences)):
      artefact = artefacts[int(random.integers(len(artefacts)))]
      request = writer.request(artefact, -1, num_tried + place, 0)
      tokens = edits.random_sentence(language, random)
      unscored = np.zeros(len(tokens), np.float32)
      completion = Completion(
        request_id=request.request_id,
        tokens=tokens,
        behaviour_logprobs=unscored,
        raw_logprobs=unscored,
        text="",
        finish_reason="stop",
        policy_version=0,
      )
      jobs.append(attempts_lib.Job(artefact, (SampledSequence(request, completion),)))
    num_tried += len(jobs)
    for job, attempt in zip(jobs, writer.attempts(jobs), strict=True):
      if attempt.score.is_valid and len(examples) < config.tiny.warm_sentences:
        artefacts.append(attempt.artefact)
        examples += job.sequences
  say(f"warm start: {len(examples)} valid sentences of {num_tried} drawn evenly")
  size = config.prompts_per_step * config.group_size
  for _ in range(config.tiny.warm_passes):
    for first in range(0, len(examples), size):
      part = examples[first : first + size]
      # With advantage 1 everywhere, the update raises the likelihood of the sentences.
      ones = np.ones((len(part), 1), np.float32)
      batch = programs_lib.pack(
        config.engine, config.trainer, trainer.decoder, attempts_lib.as_groups(part), ones
      )
      params = policy_lib.running_weights(weights, state.params, None)
      gradient, _, _ = trainer.gradient(params, batch, losses.denominators(batch), None)
      state, _ = trainer.update(state, gradient)
  return state.params
