"""What learns, and what engine and trainer run of it.

    Policy -- initial_state --> masters (TrainState.params) -- running_weights --> engine, trainer
       |                                                            ^
       +----- frozen_weights: the base under adapters, the reference of a pull ----+
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from seerjax import agreement, fields, numerics as numerics_lib, parallel
from seerjax.models import (
  chat_template,
  config as model_config,
  huggingface,
  loading,
  lora,
  parameters,
  tokenizer as tokenizer_lib,
)
from seerjax.rollout import groups as groups_lib
from seerjax.trainer import state as state_lib
from seerjax.types import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsConfig:
  """Which weights learn, and the numbers in which they run.

  Attributes:
    numerics: of engine and trainer.
    lora_rank: columns of the adapters that learn; 0 where all weights learn.
    lora_alpha: adapters count alpha / rank times.
    seed: of fresh adapters.
    publish_bytes: of weights on their way to where they run; see `RunConfig`.
  """

  numerics: numerics_lib.NumericsConfig
  lora_rank: int = 0
  lora_alpha: float = 16.0
  seed: int = 0
  publish_bytes: int = parallel.PIECE_BYTES

  def __post_init__(self):
    fields.check(self)

  @property
  def scale(self) -> float:
    """How many times adapters count."""
    return self.lora_alpha / self.lora_rank


@dataclasses.dataclass(frozen=True)
class Policy:
  """What learns: a model's shape, its first f32 master weights, and how its text reads.

  Attributes:
    model: its shape.
    params: f32 master weights, as a run begins with them.
    tokenizer: None of a policy that says no text: edits have a vocabulary of their own.
  """

  model: model_config.TransformerConfig
  params: parameters.Params
  tokenizer: tokenizer_lib.Tokenizer | None = None

  def require_tokenizer(self) -> tokenizer_lib.Tokenizer:
    """Returns the tokenizer.

    Raises:
      ValueError: if there is none.
    """
    if self.tokenizer is None:
      raise ValueError(
        "Policy.tokenizer: got None, expected the model's own, for prompts and answers are text;"
        " pass models.tokenizer.load(directory)."
      )
    return self.tokenizer

  def with_chat(self, config: chat_template.ChatConfig) -> Policy:
    """Returns the policy with the tokenizer of `chatting`."""
    return dataclasses.replace(self, tokenizer=chatting(self.require_tokenizer(), config))


def chatting(
  tokenizer: tokenizer_lib.Tokenizer, config: chat_template.ChatConfig
) -> tokenizer_lib.Tokenizer:
  """Returns the tokenizer with a run's chat settings; its `chat_config` is what they come to.

  If the chat template reads the clock, the moment is that of `config`, else that at which the
  tokenizer was loaded, by the first process's clock where several share a run.

  Raises:
    ValueError: if the tokenizer has other settings of its own, which no journal would know of; or
      if `config` sets a moment that the template does not read.
  """
  own = tokenizer.chat_config
  if dataclasses.replace(own, now=config.now) not in (
    config, chat_template.ChatConfig(now=config.now)
  ):  # fmt: skip
    raise ValueError(
      f"RunConfig.chat: got {config} and a tokenizer with {own}, expected one of them to be empty;"
      " set --config.chat alone."
    )
  if not chat_template.reads_clock(tokenizer.chat_template):
    if config.now:
      raise ValueError(
        f"ChatConfig.now: got {config.now!r} and a chat template that does not read the clock"
        f" ({chat_template.CLOCK}), expected none; leave it out."
      )
    return dataclasses.replace(tokenizer, chat_config=config)
  now = config.now or agreement.from_first(lambda: own.now or chat_template.current_moment())
  return dataclasses.replace(tokenizer, chat_config=dataclasses.replace(config, now=now))


def initial_state(
  weights: WeightsConfig,
  policy: Policy,
  optimizer: optax.GradientTransformation,
  mesh: jax.sharding.Mesh,
) -> TrainState:
  """Returns the state of a run that has not learnt: of all weights, or of fresh adapters."""
  return state_lib.first_state(first_params(weights, policy), optimizer, mesh)


def abstract_state(
  weights: WeightsConfig,
  policy: Policy,
  optimizer: optax.GradientTransformation,
  mesh: jax.sharding.Mesh,
) -> TrainState:
  """Returns shapes, dtypes and places of `initial_state`; nothing is computed."""
  params = jax.eval_shape(lambda: first_params(weights, policy))
  return state_lib.abstract_state(params, optimizer, mesh)


def first_params(weights: WeightsConfig, policy: Policy) -> Any:
  """Returns what learns, as it begins: the policy's weights themselves, or fresh adapters."""
  if not weights.lora_rank:
    return policy.params
  key = numerics_lib.key(groups_lib.request_seed(weights.seed, -2))
  return lora.init(key, policy.model, weights.numerics, weights.lora_rank)


def frozen_weights(
  policy: Policy, numerics: numerics_lib.NumericsConfig, mesh: jax.sharding.Mesh
) -> parameters.Params:
  """Returns the policy's first weights in compute dtype, on the mesh that learns.

  They are the base under adapters, and the reference of a pull to the first policy; a run without
  either has no need of them.
  """
  # On the whole mesh at once, so that no step has to copy them there.
  return parameters.placed(parameters.compute_params(policy.params, numerics), mesh)


def running_weights(
  weights: WeightsConfig, params: Any, base: parameters.Params | None
) -> parameters.Params:
  """Returns what engine and trainer both run.

  Args:
    weights: which of them learn.
    params: f32 masters of what learns (`TrainState.params`).
    base: of `frozen_weights`; needed under adapters alone.
  """
  if not weights.lora_rank:
    found = parameters.compute_params(params, weights.numerics)
  else:
    assert base is not None
    found = lora.attach(base, params, weights.scale)
  # Rounded where the masters lie, on all devices; then each instance gets its copy.
  first = jax.tree.leaves(params)[0]
  place = first.sharding if isinstance(first, jax.Array) else None
  if not isinstance(place, jax.sharding.NamedSharding) or place.num_devices == 1:
    return found
  assert isinstance(place.mesh, jax.sharding.Mesh)  # One with devices.
  return parameters.placed(found, place.mesh, weights.publish_bytes)


def published_weights(
  weights: WeightsConfig, params: Any, base: parameters.Params | None, *, is_copied: bool = False
) -> parameters.Params:
  """Returns `running_weights` for the engine.

  With `is_copied` it may sample while an update takes `params`: float32 weights are otherwise the
  masters themselves, whose place the next masters take before the engine runs again.
  """
  found = running_weights(weights, params, base)
  return jax.tree.map(jnp.copy, found) if is_copied else found


def running_shapes(
  weights: WeightsConfig, model: model_config.TransformerConfig
) -> parameters.Params:
  """Returns shapes and dtypes of `running_weights`; nothing is computed."""
  numerics = weights.numerics
  masters = parameters.shapes(model, numerics.reduction_shards)
  found = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, numerics.dtype), masters)
  if not weights.lora_rank:
    return found
  adapter = lora.shapes(model, numerics, weights.lora_rank)
  return jax.eval_shape(lambda base, adapter: lora.attach(base, adapter, 1.0), found, adapter)


def reference_weights(
  weights: WeightsConfig, params: Any, base: parameters.Params
) -> parameters.Params:
  """Returns the policy before it learnt, as `running_weights` has it now."""
  if not weights.lora_rank:
    return base
  # Adapters that say nothing: scored by the program that scores those that learn, so that a fresh
  # one is at a distance of exactly zero.
  return running_weights(weights, jax.tree.map(jnp.zeros_like, params), base)


def exported_weights(weights: WeightsConfig, policy: Policy, params: Any) -> parameters.Params:
  """Returns plain f32 weights of what was learnt, adapters merged; for other programs to load.

  Where several processes share them, all ask for them together.
  """
  if jax.process_count() > 1:
    params = parallel.on_host(params)
  if not weights.lora_rank:
    return params
  return lora.merge(policy.params, params, weights.scale)


def load_policy(name: str, numerics: numerics_lib.NumericsConfig) -> Policy:
  """Returns a model by name: "nano", a Hugging Face directory, a GGUF file, or a Hub id."""
  path = loading.path_of(name)
  params, model = huggingface.load(path, numerics)
  return Policy(model, params, tokenizer_lib.load(path))


def policy_of(model: loading.Model) -> Policy:
  """Returns a loaded model as what learns: its weights in f32, with a list of layers."""
  params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), parameters.unstacked(model.params))
  return Policy(model.config, params, model.tokenizer)


def ignored_settings(tokenizer: tokenizer_lib.Tokenizer) -> str:
  """Returns one line on what a model's directory asks for in vain."""
  return (
    f"generation_config.json: {', '.join(tokenizer.ignored_generation)} are not taken; how is"
    " sampled is decided by flags alone"
  )
