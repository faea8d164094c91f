"""Routing: each row chooses some of a layer's experts, and the weight of each.

    logits = x @ router (+ bias)                                               f32[n, E]
    softmax              weights are softmax(logits) of the chosen             Qwen3, OLMoE
    softmax_of_chosen    weights are softmax(the chosen logits)                gpt-oss
    sigmoid              weights are sigmoid(logits) of the chosen; a correction bias is added to
                         the scores for the choice alone                       DeepSeek-V3

The experts with the largest scores are chosen; of equal scores, the expert with the lower id. The
choice may be restricted to the best groups of experts: a group's score is the sum of its two best.

Everything here runs on the rows of one tile. Outside a tile, the softmax, the choice and the sum of
the weights each gave a row other bits with another number of rows.

Sources: Qwen3, https://arxiv.org/abs/2505.09388; DeepSeek-V3, https://arxiv.org/abs/2412.19437.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from seerjax import fields, numerics as numerics_lib, parallel
from seerjax.array_typing import Array, Float, Int
from seerjax.ops import linear, tiles

Scoring = Literal["softmax", "softmax_of_chosen", "sigmoid"]
# Added to a sum of weights before the division, as DeepSeek-V3 does for its sigmoids.
SMALLEST_SUM = 1e-20


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingConfig:
  """The rule by which rows choose experts.

  Attributes:
    num_experts: E, number of experts of a layer.
    num_chosen: experts of each row.
    scoring: scores from which the weights come, and for "softmax" and "sigmoid" the choice.
    is_renormalised: whether the weights of a row are divided by their sum; "softmax_of_chosen" has
      a sum of one already.
    num_groups: number of equal groups of consecutive experts; 1 restricts nothing.
    num_chosen_groups: groups in which a row's experts are.
    scale: factor of all weights.
    has_bias: a bias that is added to the logits (gpt-oss).
    has_correction_bias: a bias that is added to the scores for the choice alone (DeepSeek-V3).
  """

  num_experts: int
  num_chosen: int
  scoring: Scoring = "softmax"
  is_renormalised: bool = False
  num_groups: int = 1
  num_chosen_groups: int = 1
  scale: float = 1.0
  has_bias: bool = False
  has_correction_bias: bool = False

  def __post_init__(self):
    size = fields.at_least(1, "check config.json")
    fields.check(
      self, num_experts=size, num_chosen=size, num_groups=size, num_chosen_groups=size,
      scale=fields.positive("1.0 is usual"),
    )  # fmt: skip
    if self.num_chosen > self.num_experts:
      raise ValueError(
        f"RoutingConfig.num_chosen: got {self.num_chosen}, expected at most"
        f" num_experts={self.num_experts}; lower it."
      )
    if self.num_experts % self.num_groups:
      raise ValueError(
        f"RoutingConfig.num_groups: got {self.num_groups}, expected a divisor of"
        f" num_experts={self.num_experts}; 1 restricts no choice."
      )
    group = self.num_experts // self.num_groups
    least = -(-self.num_chosen // group)
    if not least <= self.num_chosen_groups <= self.num_groups:
      raise ValueError(
        f"RoutingConfig.num_chosen_groups: got {self.num_chosen_groups}, expected {least} to"
        f" num_groups={self.num_groups}, as a group has {group} experts and"
        f" num_chosen={self.num_chosen}; check config.json."
      )
    if self.num_groups > 1 and group < 2:
      raise ValueError(
        f"RoutingConfig.num_groups: got {self.num_groups} for num_experts={self.num_experts},"
        " expected groups of at least two experts, as the two best make a group's score; lower it."
      )
    if self.scoring == "softmax_of_chosen" and self.is_renormalised:
      raise ValueError(
        "RoutingConfig.is_renormalised: got True with scoring='softmax_of_chosen', expected False,"
        " as those weights have a sum of one; leave it out."
      )
    if self.scoring != "sigmoid" and self.has_correction_bias:
      raise ValueError(
        f"RoutingConfig.has_correction_bias: got True with scoring={self.scoring!r}, expected"
        " scoring='sigmoid'; use has_bias for a bias of the logits."
      )


class Router(NamedTuple):
  """The weights of a router.

  Attributes:
    weight: f[d, E].
    bias: f[E], of the logits, or None.
    correction_bias: f[E], of the scores for the choice, or None; it gets no gradient.
  """

  weight: Array
  bias: Array | None = None
  correction_bias: Array | None = None


def router_of(weights: dict[str, Any]) -> Router:
  """Returns the router among a layer's weights."""
  biases = (weights.get(name) for name in ("router_bias", "router_correction_bias"))
  return Router(weights["router"], *biases)


def check(config: RoutingConfig, router: Router) -> None:
  """Refuses router weights that do not fit the rule, or are not finite.

  Raises:
    ValueError: naming the array.
  """
  for name, array, is_wanted in (
    ("weight", router.weight, True),
    ("bias", router.bias, config.has_bias),
    ("correction_bias", router.correction_bias, config.has_correction_bias),
  ):
    if (array is not None) != is_wanted:
      got, expected = ("None", "an array") if is_wanted else ("an array", "None")
      raise ValueError(
        f"Router.{name}: got {got}, expected {expected}; RoutingConfig.has_{name} decides it."
      )
    if array is not None and array.shape[-1] != config.num_experts:
      raise ValueError(
        f"Router.{name}: got shape {array.shape}, expected num_experts={config.num_experts} on the"
        " last axis; use the weights and the config of one model."
      )
  remedy = "load the router's weights again, or train with a lower learning rate"
  numerics_lib.require_finite(router._asdict(), what="Router", remedy=remedy)


def route_rows(
  x: Float[Array, "n d"], router: Router, config: RoutingConfig
) -> tuple[Int[Array, "n e"], Float[Array, "n e"]]:
  """Returns ids i32[n, e], ascending, and weights f32[n, e]. Use it on the rows of one tile."""
  # The gradient of x has a part from the experts, too: neither may be fused with their sum.
  logits = parallel.rounded(_logits(parallel.rounded(x), router))
  ids = _choice(lax.stop_gradient(_scores(logits, config)), router.correction_bias, config)
  return ids, _weights(config, logits, ids)


def _scores(logits: Array, config: RoutingConfig) -> Array:
  of_all = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}
  return of_all[config.scoring](logits) if config.scoring in of_all else logits


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weights(config: RoutingConfig, logits: Array, ids: Array) -> Array:
  """Returns f32[n, e], the weights of the chosen experts.

  Its gradient is written out, since XLA fuses a product with the sum that reads it in some programs
  and not in others.
  """
  weights = _of_chosen(config, logits, ids)
  if config.is_renormalised:
    weights = weights / _sum(weights)
  return weights * jnp.float32(config.scale)


def _of_chosen(config: RoutingConfig, logits: Array, ids: Array) -> Array:
  """Returns f32[n, e], weights of the chosen experts, neither renormalised nor scaled."""
  chosen = jnp.take_along_axis(_scores(logits, config), ids, axis=1, mode="promise_in_bounds")
  return jax.nn.softmax(chosen, axis=-1) if config.scoring == "softmax_of_chosen" else chosen


def _sum(weights: Array) -> Array:
  return jnp.sum(weights, axis=-1, keepdims=True) + jnp.float32(SMALLEST_SUM)


def _weights_forward(config: RoutingConfig, logits: Array, ids: Array) -> Any:
  return _weights(config, logits, ids), (logits, ids)


def _weights_backward(config: RoutingConfig, residuals: Any, cotangent: Array) -> Any:
  logits, ids = residuals
  apart = parallel.rounded
  weights = apart(_of_chosen(config, logits, ids))
  along = lambda parts: apart(jnp.sum(apart(parts * weights), axis=-1, keepdims=True))
  parts = apart(cotangent * jnp.float32(config.scale))
  if config.is_renormalised:
    total = apart(_sum(weights))
    parts = apart(parts / total) - apart(along(parts) / (total * total))
  rows = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
  if config.scoring == "sigmoid":
    others = jnp.zeros_like(logits)
    chosen = parts * apart(weights * (1 - weights))
  else:
    mean = along(parts)
    chosen = weights * apart(parts - mean)
    others = jnp.zeros_like(logits)
    if config.scoring == "softmax":  # It has every expert in its sum.
      others = -_scores(logits, config) * mean
  put = others.at[rows, ids].set(chosen, mode="promise_in_bounds", unique_indices=True)
  return apart(put), None


_weights.defvjp(_weights_forward, _weights_backward)


def probabilities_rows(
  x: Float[Array, "n d"], router: Router, config: RoutingConfig
) -> tuple[Float[Array, "n E"], Float[Array, "n"]]:
  """Returns each row's distribution over all experts, and its entropy in nats, without gradient.

  Sigmoids are divided by their sum, as DeepSeek-V3 does. Use it on the rows of one tile.
  """
  logits = _logits(x, router)
  if config.scoring == "sigmoid":
    scores = jax.nn.sigmoid(logits)
    found = scores / (jnp.sum(scores, axis=-1, keepdims=True) + jnp.float32(SMALLEST_SUM))
  else:
    found = jax.nn.softmax(logits, axis=-1)
  return found, jnp.sum(jax.scipy.special.entr(lax.stop_gradient(found)), axis=-1)


def _logits(x: Array, router: Router) -> Array:
  logits = linear.dot(x.astype(router.weight.dtype), router.weight)
  return logits if router.bias is None else logits + router.bias.astype(jnp.float32)[None, :]


def _choice(scores: Array, correction_bias: Array | None, config: RoutingConfig) -> Array:
  """Returns the ids of the experts with the largest scores f32[n, E], ascending."""
  if correction_bias is not None:
    scores = scores + correction_bias.astype(jnp.float32)[None, :]
  if config.num_groups > 1:
    by_group = scores.reshape(scores.shape[0], config.num_groups, -1)
    best = jnp.sum(lax.top_k(by_group, 2)[0], axis=-1)
    chosen = _largest(best, config.num_chosen_groups)
    groups = jnp.arange(config.num_groups, dtype=jnp.int32)
    is_chosen = jnp.any(chosen[:, :, None] == groups[None, None, :], axis=1)
    by_group = jnp.where(is_chosen[:, :, None], by_group, -jnp.inf)
    scores = by_group.reshape(scores.shape)
  return jnp.sort(_largest(scores, config.num_chosen), axis=-1)


def _largest(values: Array, count: int) -> Array:
  """Returns i32[n, count], indices of the largest values of each row, of equals the lower ones."""
  # Some platforms order -0 before 0.
  values = jnp.where(values == 0, jnp.zeros((), values.dtype), values)
  return lax.top_k(values, count)[1].astype(jnp.int32)


def route(
  x: Float[Array, "n d"],
  router: Router,
  config: RoutingConfig,
  num_rows: Array,
  numerics: numerics_lib.NumericsConfig,
) -> tuple[Int[Array, "n e"], Float[Array, "n e"]]:
  """Returns the experts of every row and their weights; a row's bits depend on that row alone.

  Args:
    x: f[n, d], normed hidden rows.
    router: weights of the router.
    config: rule of the choice.
    num_rows: i32[], rows that are computed; the others' results are unspecified.
    numerics: its `row_tile` is used.

  Returns:
    (ids i32[n, e], ascending in each row; weights f32[n, e], in the order of the ids).
  """
  rows = lambda router, x, _: route_rows(x, router, config)
  return tiles.map_rows(rows, router, x, num_rows, numerics)


def route_reference(
  x: Float[Array, "n d"], router: Router, config: RoutingConfig
) -> Float[Array, "n e"]:
  """Reference implementation in float32: the weight of every expert, zero if it is not chosen."""
  logits = linear.linear_reference(x, router.weight)
  if router.bias is not None:
    logits = logits + router.bias.astype(jnp.float32)[None, :]
  of_all = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}
  scores = of_all[config.scoring](logits) if config.scoring in of_all else logits
  for_choice = lax.stop_gradient(scores)
  if router.correction_bias is not None:
    for_choice = for_choice + router.correction_bias.astype(jnp.float32)[None, :]
  group = config.num_experts // config.num_groups
  if config.num_groups > 1:
    by_group = jnp.sort(for_choice.reshape(x.shape[0], -1, group), axis=-1)
    best = by_group[..., -1] + by_group[..., -2]
    allowed = _is_among_largest(best, config.num_chosen_groups)
    for_choice = jnp.where(jnp.repeat(allowed, group, axis=1), for_choice, -jnp.inf)
  is_chosen = _is_among_largest(for_choice, config.num_chosen)
  if config.scoring == "softmax_of_chosen":
    scores = jax.nn.softmax(jnp.where(is_chosen, logits, -jnp.inf), axis=-1)
  weights = jnp.where(is_chosen, scores, jnp.float32(0))
  if config.is_renormalised:
    weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.float32(SMALLEST_SUM))
  return weights * jnp.float32(config.scale)


def _is_among_largest(values: Any, count: int) -> Array:
  """Returns whether fewer than `count` values of the row come before each value."""
  index = jnp.arange(values.shape[1], dtype=jnp.int32)
  larger = values[:, None, :] > values[:, :, None]
  equal = (values[:, None, :] == values[:, :, None]) & (index[None, :] < index[:, None])[None]
  return jnp.sum(larger | equal, axis=-1) < count
