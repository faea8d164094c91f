"""What learns, and what engine and trainer run of it.

    Policy -- initial_state --> masters (TrainState.params) -- running_weights --> engine, trainer
       |                                                            ^
       +----- frozen_weights: the base under adapters, the reference of a pull ----+
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from seerjax import numerics as numerics_lib
from seerjax.models import lora, tokenizer as tokenizer_lib, transformer
from seerjax.rollout import groups as groups_lib
from seerjax.run import programs as programs_lib
from seerjax.run.config import RunConfig
from seerjax.trainer import step as step_lib
from seerjax.types import TrainState


@runtime_checkable
class Learner(Protocol):
  """Of whatever policy, what learns: a model's shape and its f32 master weights."""

  @property
  def model(self) -> transformer.TransformerConfig: ...

  @property
  def params(self) -> transformer.Params: ...


@dataclasses.dataclass(frozen=True)
class Policy:
  """What learns: a model's shape, its tokenizer and its f32 master weights."""

  model: transformer.TransformerConfig
  tokenizer: tokenizer_lib.Tokenizer
  params: transformer.Params


def chatting(
  tokenizer: tokenizer_lib.Tokenizer, config: tokenizer_lib.ChatConfig
) -> tokenizer_lib.Tokenizer:
  """Returns a tokenizer whose every chat says what a run's config has it say.

  Raises:
    ValueError: if the tokenizer says other things of its own, which no journal would know of.
  """
  if tokenizer.chat_config not in (config, tokenizer_lib.ChatConfig()):
    raise ValueError(
      f"RunConfig.chat: got {config} and a tokenizer with {tokenizer.chat_config}, expected one of"
      " them to be empty; set --config.chat alone."
    )
  return dataclasses.replace(tokenizer, chat_config=config)


def initial_state(config: RunConfig, policy: Learner) -> TrainState:
  """Returns the state of a run that has not learnt: of all weights, or of fresh adapters."""
  optimizer = step_lib.make_optimizer(config.optimizer)
  return step_lib.first_state(first_params(config, policy), optimizer)


def first_params(config: RunConfig, policy: Learner) -> Any:
  """Returns what learns, as it begins: the policy's weights themselves, or fresh adapters."""
  if not config.lora_rank:
    return policy.params
  key = numerics_lib.key(groups_lib.request_seed(config.seed, -2))
  return lora.init(key, policy.model, config.numerics, config.lora_rank)


def frozen_weights(config: RunConfig, policy: Learner) -> transformer.Params | None:
  """Returns the policy's first weights in compute dtype, None if the run does not need them.

  They are the base under adapters, and the reference policy of `LossConfig.kl_coefficient`.
  """
  if not config.lora_rank and not config.loss.kl_coefficient:
    return None
  # On the whole mesh at once, so that no step has to copy them there.
  whole = jax.sharding.NamedSharding(programs_lib.meshes(config)[1], jax.P())
  return jax.device_put(transformer.compute_params(policy.params, config.numerics), whole)


def running_weights(
  config: RunConfig, params: Any, base: transformer.Params | None
) -> transformer.Params:
  """Returns what engine and trainer both run.

  Args:
    config: the run.
    params: f32 masters of what learns (`TrainState.params`).
    base: of `frozen_weights`.
  """
  if not config.lora_rank:
    return transformer.compute_params(params, config.numerics)
  assert base is not None
  return lora.attach(base, params, config.lora_alpha / config.lora_rank)


def published_weights(
  config: RunConfig, params: Any, base: transformer.Params | None
) -> transformer.Params:
  """Returns `running_weights` for the engine, which may sample while an update takes `params`.

  They are copies only where it does (`StaleConfig.steps_ahead`): float32 weights are otherwise the
  masters themselves, whose place the next masters take before the engine runs again.
  """
  weights = running_weights(config, params, base)
  return jax.tree.map(jnp.copy, weights) if config.stale.steps_ahead else weights


def reference_weights(
  config: RunConfig, state: TrainState, base: transformer.Params
) -> transformer.Params:
  """Returns the policy before it learnt, as `running_weights` has it now."""
  if not config.lora_rank:
    return base
  # Adapters that say nothing: scored by the program that scores those that learn, so that a fresh
  # one is at a distance of exactly zero.
  return running_weights(config, jax.tree.map(jnp.zeros_like, state.params), base)


def exported_weights(config: RunConfig, policy: Policy, state: TrainState) -> transformer.Params:
  """Returns plain f32 weights of what was learnt, adapters merged; for other programs to load."""
  if not config.lora_rank:
    return state.params
  return lora.merge(policy.params, state.params, config.lora_alpha / config.lora_rank)
