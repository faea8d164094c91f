"""Use of the experts of each layer by a batch: exact sums, and metrics from them.

Only rows of the loss count. Every sum is one of integers, so neither the division into
micro-batches nor the number of devices changes a bit of a metric. Probabilities and entropies are
rounded to multiples of 2^-30 and 2^-27, and summed as three digits of ten bits each:

    p = 2^-30 (a + 2^10 b + 2^20 c)      sums of a, of b and of c are below 2^31 for 2^20 rows

With f_e the share of choices that expert e got, and P_e its mean probability, the load-balancing
loss of a layer with E experts is E sum_e f_e P_e: 1 if all are used alike, at most E.

Sources: Fedus et al. 2021 (Switch Transformers), https://arxiv.org/abs/2101.03961; Wang et al. 2024
(moving the biases), https://arxiv.org/abs/2408.15664.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from seerjax import parallel
from seerjax.array_typing import Array
from seerjax.backends.protocol import Backend
from seerjax.models import experts
from seerjax.models.parameters import Params
from seerjax.ops import routing, tiles
from seerjax.trainer import losses

DIGIT_BITS, NUM_DIGITS = 10, 3
# Bits behind the point: probabilities are at most 1, and entropies below 8 nats (2,980 experts).
PROBABILITY_BITS, ENTROPY_BITS = 30, 27
MOST_ROWS = 2**20
BIAS = "router_correction_bias"
# Metrics of `summarise`, or how their names begin.
METRICS = (
  "dead_experts",
  "busiest_expert",
  "router_entropy",
  "load_balancing_loss",
  "expert_tokens",
)


class Routes(NamedTuple):
  """Sums over the loss rows of one layer.

  Attributes:
    counts: i32[E], rows that chose each expert.
    probabilities: i32[3, E], digits of the sums of the router's probabilities.
    entropy: i32[3], digits of the sum of the router's entropies.
    loss: f32[], share of the load-balancing loss, with its gradient; () without `Balance`.
  """

  counts: Any
  probabilities: Any
  entropy: Any
  loss: Any = ()


class Balance(NamedTuple):
  """The load-balancing loss of a micro-batch.

  Attributes:
    config: its coefficient and form.
    sequence_index: i32[n], as in `LossRows`.
    denominators: counts of the whole batch.
  """

  config: losses.LossConfig
  sequence_index: Array
  denominators: losses.Denominators

  def of_rows(
    self, weights: Params, is_chosen: Array, mask: Array, rule: routing.RoutingConfig
  ) -> tuple[Array, Array]:
    """Returns loads f32[n, E], E times the shares of choices that concern a row, and f32[n].

    The loss is the sum over loss rows of the second times the mean load under a row's
    probabilities.
    """
    count = mask.shape[0]
    if self.config.balance == "global":
      each = self.config.balance_coefficient / jnp.maximum(self.denominators.num_tokens, 1.0)
      loads = jnp.broadcast_to(weights[experts.LOADS], (count, rule.num_experts))
      return loads, jnp.broadcast_to(each, (count,))
    index = tiles.padded(self.sequence_index, count)
    lengths = losses.sequence_lengths(mask, index)
    # Sums of ones, which have no rounding.
    of_all = jax.vmap(losses.sequence_sums, in_axes=(1, None), out_axes=1)
    counts = of_all(is_chosen.astype(jnp.float32), index)
    loads = counts * (rule.num_experts / rule.num_chosen) / lengths[:, None]
    each = self.config.balance_coefficient / jnp.maximum(self.denominators.num_sequences, 1.0)
    return loads, each / lengths


def watch_of(loss_mask: Array, balance: Balance | None = None) -> experts.Watch:
  """Returns what sees the rows of a micro-batch with a loss mask bool[n], and keeps `Routes`.

  With `balance`, these have the load-balancing loss; if that is global, the weights of each layer
  have loads (`with_loads`).
  """
  assert loss_mask.shape[0] <= MOST_ROWS, f"got {loss_mask.shape[0]} rows, expected 2^20 at most"

  def watch(
    backend: Backend,
    rule: routing.RoutingConfig,
    weights: Params,
    normed: Array,
    ids: Array,
    num_rows: Array,
  ) -> Routes:
    mask, router = tiles.padded(loss_mask, ids.shape[0]), routing.router_of(weights)
    is_chosen = chosen(ids, rule.num_experts) & mask[:, None]
    loss: Any = ()
    if balance is None:
      rows = lambda router, x, _: routing.probabilities_rows(x, router, rule)
      given = lax.stop_gradient((router, normed))
      probabilities, entropy = backend.map_rows(rows, *given, num_rows)
    else:
      loads, each = lax.stop_gradient(balance.of_rows(weights, is_chosen, mask, rule))

      def balanced_rows(router: routing.Router, own: tuple[Array, Array], _: Array) -> Any:
        found, entropy = routing.probabilities_rows(own[0], router, rule)
        return lax.stop_gradient(found), entropy, jnp.sum(found * own[1], axis=-1)

      probabilities, entropy, means = backend.map_rows(
        balanced_rows, router, (normed, loads), num_rows
      )
      loss = jnp.sum(jnp.where(mask, means * each, 0.0))
    return Routes(
      counts=jnp.sum(is_chosen, axis=0, dtype=jnp.int32),
      probabilities=digit_sums(probabilities, mask[:, None], PROBABILITY_BITS),
      entropy=digit_sums(entropy, mask, ENTROPY_BITS),
      loss=loss,
    )

  return watch


def chosen(ids: Array, num_experts: int) -> Array:
  """Returns bool[n, E]: the experts that each row chose, by ids i32[n, e]."""
  every = jnp.arange(num_experts, dtype=jnp.int32)
  return jnp.any(ids[:, :, None] == every[None, None, :], axis=1)


def digit_sums(values: Array, mask: Array, bits: int) -> Array:
  """Returns i32[3, ...], the digits' sums over rows of f32[n, ...] >= 0, below 2^(30 - bits)."""
  whole = jnp.round(jnp.where(mask, values, 0.0) * jnp.float32(2**bits)).astype(jnp.int32)
  digits = [
    whole & (2**DIGIT_BITS - 1),
    (whole >> DIGIT_BITS) & (2**DIGIT_BITS - 1),
    whole >> (2 * DIGIT_BITS),
  ]
  return jnp.stack([jnp.sum(digit, axis=0, dtype=jnp.int32) for digit in digits])


def added(micro_batches: Sequence[Sequence[Routes]]) -> list[Routes]:
  """Returns the i64 sums of each layer over all micro-batches."""
  add = lambda *leaves: np.sum(np.stack(leaves), axis=0, dtype=np.int64)
  return [jax.tree.map(add, *of_layer) for of_layer in zip(*micro_batches, strict=True)]


def loads_of(routes: Routes) -> np.ndarray:
  """Returns f32[E], E times the share of choices that each expert got."""
  counts = routes.counts
  return (len(counts) * counts / max(np.sum(counts), 1)).astype(np.float32)


def with_loads(params: Params, loads: dict[int, Array]) -> Params:
  """Returns weights with loads f32[E] in each layer with experts, listed or stacked."""
  layers = params["layers"]
  if isinstance(layers, dict):
    return {**params, "layers": {**layers, experts.LOADS: jnp.stack(list(loads.values()))}}
  changed = [
    {**layer, experts.LOADS: loads[index]} if index in loads else layer
    for index, layer in enumerate(layers)
  ]
  return {**params, "layers": changed}


def value_of(digits: np.ndarray, bits: int) -> np.ndarray:
  """Returns the f64 sums from those of their digits, i64[3, ...]."""
  whole = sum(digits[place] << (DIGIT_BITS * place) for place in range(NUM_DIGITS))
  return np.asarray(np.asarray(whole, np.float64) / 2**bits)


def balance_loss(routes: Routes, num_tokens: int) -> float:
  """Returns the load-balancing loss of one layer; see the module."""
  shares = routes.counts / np.maximum(np.sum(routes.counts), 1)
  means = value_of(routes.probabilities, PROBABILITY_BITS) / max(num_tokens, 1)
  return float(len(shares) * np.dot(shares, means))


def directions(counts: np.ndarray) -> np.ndarray:
  """Returns f32[E]: 1 for experts with more tokens than the mean, -1 with fewer, else 0."""
  return np.sign(len(counts) * counts - np.sum(counts)).astype(np.float32)


def with_directions(gradient: Any, of_layers: dict[int, Routes]) -> Any:
  """Returns a gradient with `directions` at the correction biases, layers listed or stacked."""

  def put(leaf: Array, own: np.ndarray) -> Array:
    place = leaf.sharding
    is_spread = isinstance(place, jax.sharding.NamedSharding)
    return parallel.put(own, place) if is_spread else jax.device_put(own, place)

  layers = gradient["layers"]
  if isinstance(layers, dict):
    own = np.stack([directions(one.counts) for one in of_layers.values()])
    return {**gradient, "layers": {**layers, BIAS: put(layers[BIAS], own)}}
  changed = [
    {**layer, BIAS: put(layer[BIAS], directions(of_layers[index].counts))}
    if BIAS in layer
    else layer
    for index, layer in enumerate(layers)
  ]
  return {**gradient, "layers": changed}


def summarise(of_layers: dict[int, Routes], num_tokens: int) -> dict[str, Any]:
  """Returns the metrics of a batch, by name.

  Args:
    of_layers: sums over the batch, by the layer's index.
    num_tokens: rows of the loss.

  Returns:
    "dead_experts", experts of all layers that no row chose; "busiest_expert", the largest share of
    a layer's choices that went to one expert; "router_entropy" in nats and "load_balancing_loss",
    means over layers; and "expert_tokens.LAYER", i64[E], rows that chose each expert.
  """
  layers = list(of_layers.values())
  counts = [one.counts for one in layers]
  entropies = [value_of(one.entropy, ENTROPY_BITS) / max(num_tokens, 1) for one in layers]
  return {
    "dead_experts": float(sum(np.sum(own == 0) for own in counts)),
    "busiest_expert": float(max(np.max(own) / max(np.sum(own), 1) for own in counts)),
    "router_entropy": float(np.mean(entropies)),
    "load_balancing_loss": float(np.mean([balance_loss(one, num_tokens) for one in layers])),
  } | {f"expert_tokens.{index}": one.counts for index, one in of_layers.items()}
