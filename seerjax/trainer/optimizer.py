"""The optimiser: Adam with warm-up, weight decay and clipping by the norm, as an optax chain."""

from __future__ import annotations

from collections.abc import Collection
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from seerjax import fields
from seerjax.array_typing import Array
from seerjax.models import parameters
from seerjax.trainer import shards as shards_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
  """Configuration of Adam with warm-up and global-norm clipping.

  Attributes:
    learning_rate: rate after the warm-up; 0 lets a run choose the default for model size and LoRA
      (`run.learning_rates.usual`).
    warmup_steps: number n of warm-up steps: the rate rises linearly from 1/n in the first step to
      the full rate in step n. 0 and 1 disable the warm-up.
    b1: decay of the mean.
    b2: decay of the mean square.
    weight_decay: decoupled decay per step, multiplied by the learning rate.
    max_gradient_norm: global norm above which the gradient is scaled down.
    freezes_routers: whether the routers of a model with experts keep their weights. Their gradient
      still counts in the norm.
    router_bias_speed: how far each update moves the correction bias of a router: down for experts
      with more tokens than the mean, up for those with fewer (DeepSeek-V3). 0 keeps the biases.
  """

  learning_rate: float = 0.0
  warmup_steps: int = 0
  b1: float = 0.9
  b2: float = 0.95
  weight_decay: float = 0.0
  max_gradient_norm: float = 1.0
  freezes_routers: bool = False
  router_bias_speed: float = 0.0

  def __post_init__(self):
    fields.check(
      self,
      unbounded=("max_gradient_norm",),
      learning_rate=fields.Rule(
        "a positive number, or 0, which derives it from the run's model",
        lambda rate: rate >= 0,
        "1e-6 is usual for all weights of a large model",
      ),
      warmup_steps=fields.at_least(0, "0 is none"),
      b1=fields.Rule("0 <= b1 < 1", lambda value: 0 <= value < 1, "0.9 is usual"),
      b2=fields.Rule("0 <= b2 < 1", lambda value: 0 <= value < 1, "0.95 is usual"),
      weight_decay=fields.at_least(0, "0 is off"),
      max_gradient_norm=fields.positive("1.0 is usual, inf never clips"),
      router_bias_speed=fields.at_least(0, "0.001 is usual, 0 is off"),
    )
    if self.freezes_routers and self.router_bias_speed:
      raise ValueError(
        f"OptimizerConfig.router_bias_speed: got {self.router_bias_speed:g} with"
        " freezes_routers=True, expected 0, as a frozen router keeps its bias; set one of them."
      )


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
  """Returns the optax chain: clipping, Adam, weight decay, learning rate.

  A router's correction bias has no gradient, and decay would move it: it stays as it is, or with
  `router_bias_speed` moves against its entry in the gradient, which `Trainer.moves_router_biases`
  makes -1, 0 or 1.

  Raises:
    ValueError: if the learning rate is 0, which only a run can replace.
  """
  if not config.learning_rate:
    raise ValueError(
      "OptimizerConfig.learning_rate: got 0, which only a run replaces by a default for its model,"
      " expected a positive number; set it, for example to 1e-4 for a small model."
    )

  def warming(count: jax.typing.ArrayLike) -> Array:
    # Optax counts from 0; with a rate of zero, the first batch would have no effect.
    return config.learning_rate * jnp.minimum((jnp.asarray(count) + 1) / config.warmup_steps, 1.0)

  learning_rate = warming if config.warmup_steps else config.learning_rate
  return keeping(
    optax.chain(
      clip_by_norm(config.max_gradient_norm),
      optax.adamw(learning_rate, config.b1, config.b2, weight_decay=config.weight_decay),
    ),
    parameters.ROUTERS if config.freezes_routers else parameters.FLOAT32,
    config.router_bias_speed,
  )


def keeping(
  optimizer: optax.GradientTransformation, names: Collection[str], bias_speed: float = 0.0
) -> optax.GradientTransformationExtraArgs:
  """Returns the optimiser, except that weights with one of the names keep their bits.

  With `bias_speed`, correction biases move by the negative of it times their gradient. The state is
  that of `optimizer`, so checkpoints of both have the same leaves.
  """
  optimizer = optax.with_extra_args_support(optimizer)

  def update(
    updates: Any, state: Any, params: Any = None, **others: Any
  ) -> tuple[Any, optax.OptState]:
    given, is_kept = updates, parameters.are_named(updates, names)
    is_moved = parameters.are_named(updates, parameters.FLOAT32 if bias_speed else ())
    updates, state = optimizer.update(without(given, is_moved), state, params, **others)

    def chosen(leaf: Any, own: Any, is_kept: bool, is_moved: bool) -> Array:
      if is_moved:
        return -bias_speed * own
      # Adding -0 keeps the bits of every number, where 0 would turn -0 into 0.
      return jnp.full_like(leaf, -0.0) if is_kept else leaf

    return jax.tree.map(chosen, updates, given, is_kept, is_moved), state

  return optax.GradientTransformationExtraArgs(optimizer.init, update)


def without(gradient: Any, is_left_out: Any) -> Any:
  """Returns the gradient with zeros where a tree of bools says so."""
  zero = lambda leaf, is_out: jnp.zeros_like(leaf) if is_out else leaf
  return jax.tree.map(zero, gradient, is_left_out)


def clip_by_norm(most: float) -> optax.GradientTransformationExtraArgs:
  """Returns a transformation that scales a gradient down to a norm of at most `most`.

  The update takes the norm as `gradient_norm`, because a device has only a part of the gradient;
  without it, the gradient must be complete.
  """

  def update(
    updates: Any, state: Any, params: Any = None, *, gradient_norm: Any = None, **others: Any
  ) -> tuple[Any, Any]:
    del params, others
    found = shards_lib.norm(updates) if gradient_norm is None else gradient_norm
    scaled = lambda leaf: jnp.where(found < most, leaf, leaf / found.astype(leaf.dtype) * most)
    return jax.tree.map(scaled, updates), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
