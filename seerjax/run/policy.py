"""The trained policy, and the weights that engine and trainer run.

Policy -- initial_state --> masters (TrainState.params) -- running_weights --> engine, trainer
   |                                                            ^
   +----- frozen_weights: the base under adapters, or the KL reference -------+
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
  """Settings of the trained weights, and the numerics in which they run.

  Attributes:
    numerics: numerics of engine and trainer.
    lora_rank: rank of the trained adapters; 0 trains all weights.
    lora_alpha: adapters are scaled by alpha / rank.
    seed: seed of new adapters.
    weight_transfer_chunk_bytes: upper bound on bytes in flight while publishing; see `RunConfig`.
  """

  numerics: numerics_lib.NumericsConfig
  lora_rank: int = 0
  lora_alpha: float = 16.0
  seed: int = 0
  weight_transfer_chunk_bytes: int = parallel.PIECE_BYTES

  def __post_init__(self):
    fields.check(self)

  @property
  def scale(self) -> float:
    """Scale of the adapters."""
    return self.lora_alpha / self.lora_rank


@dataclasses.dataclass(frozen=True)
class Policy:
  """A policy to train: the model's shape, initial f32 master weights, and tokenizer.

  Attributes:
    model: shape of the model.
    params: initial f32 master weights.
    tokenizer: None for a policy that produces no text: edits have their own vocabulary.
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
        "Policy.tokenizer: got None, expected the model's tokenizer, because prompts and answers"
        " are text; pass models.tokenizer.load(directory)."
      )
    return self.tokenizer

  def with_chat(self, config: chat_template.ChatConfig) -> Policy:
    """Returns the policy with its tokenizer changed by `chatting`."""
    return dataclasses.replace(self, tokenizer=chatting(self.require_tokenizer(), config))


def chatting(
  tokenizer: tokenizer_lib.Tokenizer, config: chat_template.ChatConfig
) -> tokenizer_lib.Tokenizer:
  """Returns the tokenizer with the run's chat settings applied and its `chat_config` resolved.

  If the chat template reads the clock, the time is `config.now`, else the time at which the
  tokenizer was loaded; of several processes, the first one's clock is used.

  Raises:
    ValueError: if the tokenizer already has other chat settings, which the journal would not
      record; or if `config.now` is set but the template does not read the clock.
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
  """Returns the initial training state, of all weights or of new adapters."""
  return state_lib.first_state(first_params(weights, policy), optimizer, mesh)


def abstract_state(
  weights: WeightsConfig,
  policy: Policy,
  optimizer: optax.GradientTransformation,
  mesh: jax.sharding.Mesh,
) -> TrainState:
  """Returns shapes, dtypes and shardings of `initial_state` without computing anything."""
  params = jax.eval_shape(lambda: first_params(weights, policy))
  return state_lib.abstract_state(params, optimizer, mesh)


def first_params(weights: WeightsConfig, policy: Policy) -> Any:
  """Returns the initial trained weights: the policy's weights, or new adapters."""
  if not weights.lora_rank:
    return policy.params
  key = numerics_lib.key(groups_lib.request_seed(weights.seed, -2))
  return lora.init(key, policy.model, weights.numerics, weights.lora_rank)


def frozen_weights(
  policy: Policy, numerics: numerics_lib.NumericsConfig, mesh: jax.sharding.Mesh
) -> parameters.Params:
  """Returns the policy's initial weights in compute dtype, on the training mesh.

  They are the base under adapters and the reference of a KL penalty; other runs do not need them.
  """
  # Placed on the whole mesh now, so that no step has to copy them there.
  return parameters.placed(parameters.compute_params(policy.params, numerics), mesh)


def running_weights(
  weights: WeightsConfig, params: Any, base: parameters.Params | None
) -> parameters.Params:
  """Returns the weights that both engine and trainer run.

  Args:
    weights: which weights are trained.
    params: f32 masters of the trained weights (`TrainState.params`).
    base: result of `frozen_weights`; required for adapters only.
  """
  if not weights.lora_rank:
    found = parameters.compute_params(params, weights.numerics)
  else:
    assert base is not None
    found = lora.attach(base, params, weights.scale)
  # Rounded where the masters are, across all devices; then each instance gets a copy.
  first = jax.tree.leaves(params)[0]
  place = first.sharding if isinstance(first, jax.Array) else None
  if not isinstance(place, jax.sharding.NamedSharding) or place.num_devices == 1:
    return found
  assert isinstance(place.mesh, jax.sharding.Mesh)  # One with devices.
  return parameters.placed(found, place.mesh, weights.weight_transfer_chunk_bytes)


def published_weights(
  weights: WeightsConfig, params: Any, base: parameters.Params | None, *, is_copied: bool = False
) -> parameters.Params:
  """Returns `running_weights` for the engine.

  With `is_copied`, the engine may sample while an update donates `params`. Otherwise float32
  weights are the masters themselves, which the update overwrites before the engine runs again.
  """
  found = running_weights(weights, params, base)
  return jax.tree.map(jnp.copy, found) if is_copied else found


def running_shapes(
  weights: WeightsConfig, model: model_config.TransformerConfig
) -> parameters.Params:
  """Returns shapes and dtypes of `running_weights` without computing anything."""
  numerics = weights.numerics
  masters = parameters.shapes(model, model_config.slabs_for(model, numerics))
  found = parameters.rounded_shapes(masters, numerics.dtype)
  if not weights.lora_rank:
    return found
  adapter = lora.shapes(model, numerics, weights.lora_rank)
  return jax.eval_shape(lambda base, adapter: lora.attach(base, adapter, 1.0), found, adapter)


def reference_weights(
  weights: WeightsConfig, params: Any, base: parameters.Params
) -> parameters.Params:
  """Returns the initial policy, in the form of `running_weights`."""
  if not weights.lora_rank:
    return base
  # Zero adapters rather than no adapters: the reference is scored by the same program as the
  # policy, so that its KL to new adapters is exactly zero.
  return running_weights(weights, jax.tree.map(jnp.zeros_like, params), base)


def exported_weights(weights: WeightsConfig, policy: Policy, params: Any) -> parameters.Params:
  """Returns the trained weights as plain f32, adapters merged, for export.

  If several processes share the weights, all must call this together.
  """
  if jax.process_count() > 1:
    params = parallel.on_host(params)
  if not weights.lora_rank:
    return params
  return lora.merge(policy.params, params, weights.scale)


def load_policy(name: str, numerics: numerics_lib.NumericsConfig) -> Policy:
  """Loads a policy by name: "nano", a Hugging Face directory, a GGUF file, or a Hub id."""
  path = loading.path_of(name)
  params, decoder = loading.load_masters(path, numerics)
  return Policy(decoder.shape, params, tokenizer_lib.load(path))


def policy_of(model: loading.Model) -> Policy:
  """Returns a loaded model as a policy: f32 weights, layers as a list."""
  params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), parameters.unstacked(model.params))
  return Policy(model.config, params, model.tokenizer)


def ignored_settings(tokenizer: tokenizer_lib.Tokenizer) -> str:
  """Returns one line on the settings in generation_config.json that are ignored."""
  return (
    f"generation_config.json: {', '.join(tokenizer.ignored_generation)} are ignored; only flags set"
    " sampling parameters"
  )
