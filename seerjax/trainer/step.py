"""One optimiser step on a packed batch.

    micro-batches --gradient--> one pytree each --fixed tree--> sum --optax--> params

The gradient program is never handed the engine's log-probabilities: what it computes under
`value_and_grad` is compared with them afterwards (`rollout_gap`), and on the tiled path the
difference is exactly zero. Micro-batches are spread over the instances of the mesh; their gradients
are added as one binary tree over the micro-batch index, so the number of devices changes no bit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from seerjax import numerics as numerics_lib, parallel
from seerjax.array_typing import Array
from seerjax.models import lora, transformer
from seerjax.trainer import losses
from seerjax.types import TokenScores, TrainBatch, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
  """Adam with a warm-up and a clipped global norm.

  Attributes:
    learning_rate: after the warm-up.
    warmup_steps: in n of them the rate rises by n equal parts; the first step has the first part,
      the n-th all of it. 0 and 1 are none.
    b1: decay of the mean.
    b2: decay of the mean square.
    weight_decay: decoupled, per step, times the learning rate.
    max_gradient_norm: global norm above which the gradient is scaled down.
  """

  learning_rate: float = 1e-4
  warmup_steps: int = 0
  b1: float = 0.9
  b2: float = 0.95
  weight_decay: float = 0.0
  max_gradient_norm: float = 1.0

  def __post_init__(self):
    if not 0 < self.learning_rate < math.inf:
      raise ValueError(
        f"OptimizerConfig.learning_rate: got {self.learning_rate}, expected a positive number;"
        " 1e-4 is usual for small models."
      )
    if self.warmup_steps < 0:
      raise ValueError(
        f"OptimizerConfig.warmup_steps: got {self.warmup_steps}, expected at least 0; 0 is none."
      )
    for field in ("b1", "b2"):
      value = vars(self)[field]
      if not 0 <= value < 1:
        raise ValueError(
          f"OptimizerConfig.{field}: got {value}, expected 0 <= {field} < 1; 0.9 and 0.95 are"
          " usual."
        )
    if not 0 <= self.weight_decay < math.inf:
      raise ValueError(
        f"OptimizerConfig.weight_decay: got {self.weight_decay}, expected 0 <= weight_decay < inf;"
        " 0 is off."
      )
    if not self.max_gradient_norm > 0:
      raise ValueError(
        f"OptimizerConfig.max_gradient_norm: got {self.max_gradient_norm}, expected a positive"
        " number; 1.0 is usual, inf never clips."
      )


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
  """Returns the optax chain: clip, Adam, decay, learning rate."""

  def warming(count: Array) -> Array:
    # Optax counts from 0. From zero, the first batch would teach nothing.
    return config.learning_rate * jnp.minimum((count + 1) / config.warmup_steps, 1.0)

  learning_rate = warming if config.warmup_steps else config.learning_rate
  return optax.chain(
    optax.clip_by_global_norm(config.max_gradient_norm),
    optax.adamw(learning_rate, config.b1, config.b2, weight_decay=config.weight_decay),
  )


BY_INSTANCE = jax.P(parallel.INSTANCE_AXIS)


def _traced_once(function: Any) -> Any:
  """A trainer has one layout: a second trace means that an input changed its shape or type."""
  num_traces = 0

  def counted(*args: Any) -> Any:
    nonlocal num_traces
    num_traces += 1
    assert num_traces == 1, f"trainer: got trace {num_traces}, expected one for each program"
    return function(*args)

  return counted


class MicroBatch(NamedTuple):
  """What the gradient program sees of a `TrainBatch`: everything but the engine's numbers."""

  batch: TrainBatch  # Its behaviour_logprobs and raw_logprobs are None.
  old_logprobs: Any  # f32[n], of the weights that sampled; read unless is_first.
  is_first: Any  # bool[], the weights are those that sampled.
  reference_logprobs: Any = None  # f32[n], of the reference policy; None without one.


@dataclasses.dataclass(frozen=True)
class Trainer:
  """Gradient and update programs of one model.

  Attributes:
    model: shape of the model.
    numerics: what decides bits; the engine's.
    loss: the objective.
    optimizer: an optax chain.
    mesh: micro-batches are spread over its instances.
    num_pages: scratch pages of one micro-batch (`packing.Layout.num_pages`).
    page_size: positions of one page.
  """

  model: transformer.TransformerConfig
  numerics: numerics_lib.NumericsConfig
  loss: losses.LossConfig
  optimizer: optax.GradientTransformation
  mesh: jax.sharding.Mesh
  num_pages: int
  page_size: int

  def init(self, params: transformer.Params) -> TrainState:
    """Returns the state of a run that has not learnt yet.

    `params` are the f32 masters of what learns: all weights, or an adapter of `models.lora`.
    """
    return TrainState(params, self.optimizer.init(params), jnp.int32(0))

  @functools.cached_property
  def _gradient(self):
    """(params, MicroBatch [i, ...], denominators) -> gradients, metrics, tokens, scores."""

    def loss(trained, frozen, micro: MicroBatch, denominators):
      tokens, scores = score(
        lora.combine(trained, frozen),
        micro.batch,
        model=self.model,
        numerics=self.numerics,
        num_pages=self.num_pages,
        page_size=self.page_size,
      )
      current = jax.lax.stop_gradient(scores.logprob)
      old = jnp.where(micro.is_first, current, micro.old_logprobs)
      value, metrics = losses.policy_loss(
        scores.logprob,
        scores.entropy,
        micro.batch,
        self.loss,
        denominators,
        old_logprobs=old,
        reference_logprobs=micro.reference_logprobs,
      )
      return value, (value, metrics, tokens, scores)

    def one(params, micro, denominators):
      micro = jax.tree.map(lambda leaf: leaf[0], micro)
      trained, frozen = lora.partition(params)
      gradient, aux = jax.grad(loss, has_aux=True)(trained, frozen, micro, denominators)
      gradient = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradient)
      return jax.tree.map(lambda leaf: leaf[None], (gradient, *aux))

    return jax.jit(self._spread(_traced_once(one), jax.P(), BY_INSTANCE, jax.P()))

  @functools.cached_property
  def _score(self):
    """(params, TrainBatch [i, ...]) -> tokens, scores [i, ...]; no gradient."""

    def one(params, batch):
      out = score(
        params,
        jax.tree.map(lambda leaf: leaf[0], batch),
        model=self.model,
        numerics=self.numerics,
        num_pages=self.num_pages,
        page_size=self.page_size,
      )
      return jax.tree.map(lambda leaf: leaf[None], out)

    return jax.jit(self._spread(_traced_once(one), jax.P(), BY_INSTANCE))

  def _spread(self, function: Any, *in_specs: jax.P) -> Any:
    """Returns a function of one instance as one of the whole mesh."""
    if self.mesh.size == 1:
      return function
    return jax.shard_map(
      function, mesh=self.mesh, in_specs=in_specs, out_specs=BY_INSTANCE, check_vma=False
    )

  @functools.cached_property
  def _update(self):
    def update(state: TrainState, gradient):
      updates, opt_state = self.optimizer.update(gradient, state.opt_state, state.params)
      params = optax.apply_updates(state.params, updates)
      norms = dict(grad_norm=optax.tree.norm(gradient), update_norm=optax.tree.norm(updates))
      return TrainState(params, opt_state, state.step + 1), norms

    return jax.jit(update)

  def gradient(
    self,
    params: transformer.Params,
    batch: TrainBatch,
    denominators: losses.Denominators,
    old_logprobs: np.ndarray | None,
    reference_logprobs: np.ndarray | None = None,
  ) -> tuple[Any, dict[str, Array], TokenScores]:
    """Returns the gradient of a whole batch, its metrics and its scores.

    Args:
      params: in compute dtype; with adapters beside them (`models.lora`) these alone learn.
      batch: from `packing.pack`, m micro-batches.
      denominators: of everything that this optimiser step sees.
      old_logprobs: f32[m, n], of the weights that sampled; None if these are they.
      reference_logprobs: f32[m, n], of the reference policy (`scores` with its weights); needed
        if `LossConfig.kl_coefficient` is not 0.

    Returns:
      (f32 gradient of what learns, {"loss": ...} and summarised loss metrics, scores f32[m, n]).

    Raises:
      ValueError: if the loss needs `reference_logprobs` and they are None.
    """
    num_micro, num_rows = batch.targets.shape
    params = jax.device_put(params, jax.sharding.NamedSharding(self.mesh, jax.P()))
    width = self.mesh.shape[parallel.INSTANCE_AXIS]
    zeros = np.zeros((num_micro, num_rows), np.float32)
    micro = MicroBatch(
      batch._replace(behaviour_logprobs=None, raw_logprobs=None),
      zeros if old_logprobs is None else old_logprobs,
      np.full(num_micro, old_logprobs is None),
      reference_logprobs,
    )
    total, values, metrics, scores = TreeSum(), [], [], []
    mismatches = 0
    for first in range(0, num_micro, width):
      part = jax.tree.map(
        lambda leaf, first=first: _padded(leaf[first : first + width], width), micro
      )
      out = self._gradient(params, part, denominators)
      live = min(width, num_micro - first)
      gradient, value, metric, tokens, part_scores = out
      tokens, part_scores, value, metric = jax.device_get((tokens, part_scores, value, metric))
      mismatches += int(np.sum(tokens[:live] != batch.targets[first : first + live]))
      for index in range(live):
        total.add(jax.tree.map(lambda leaf, index=index: _on_first(leaf, index), gradient))
        values.append(value[index])
        metrics.append(jax.tree.map(lambda leaf, index=index: leaf[index], metric))
        scores.append(jax.tree.map(lambda leaf, index=index: leaf[index], part_scores))
    assert mismatches == 0, f"head: {mismatches} forced tokens came out as others"
    loss_metrics = functools.reduce(losses.add_metrics, metrics)
    summary = {name: jnp.asarray(value) for name, value in losses.summarise(loss_metrics).items()}
    summary["loss"] = parallel.tree_sum_list([jnp.asarray(value) for value in values])
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *scores)
    return total.total(), summary, stacked

  def scores(self, params: transformer.Params, batch: TrainBatch) -> TokenScores:
    """Scores a whole batch without a gradient, by the program that `gradient` differentiates.

    Args:
      params: in compute dtype.
      batch: from `packing.pack`, m micro-batches.

    Returns:
      f32[m, n]; bit for bit what `gradient` gives for the same weights.
    """
    num_micro = batch.targets.shape[0]
    params = jax.device_put(params, jax.sharding.NamedSharding(self.mesh, jax.P()))
    width = self.mesh.shape[parallel.INSTANCE_AXIS]
    seen = batch._replace(behaviour_logprobs=None, raw_logprobs=None)
    parts = []
    for first in range(0, num_micro, width):
      part = jax.tree.map(
        lambda leaf, first=first: _padded(leaf[first : first + width], width), seen
      )
      live = min(width, num_micro - first)
      _, scores = jax.device_get(self._score(params, part))
      parts.append(jax.tree.map(lambda leaf, live=live: leaf[:live], scores))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)

  def update(self, state: TrainState, gradient: Any) -> tuple[TrainState, dict[str, Array]]:
    """Applies one gradient; returns the new state and the norms of gradient and update."""
    return self._update(state, gradient)


def score(
  params: transformer.Params,
  batch: TrainBatch,
  *,
  model: transformer.TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  num_pages: int,
  page_size: int,
) -> tuple[Array, TokenScores]:
  """Scores the targets of one micro-batch (no leading axis): (tokens i32[n], scores f32[n]).

  The tokens are the targets again; they are returned so that this is the engine's head, output for
  output.
  """
  rows = batch.tokens
  pages = transformer.empty_pages(model, numerics, num_pages=num_pages, page_size=page_size)
  hidden, _ = transformer.forward(params, rows, pages, config=model, numerics=numerics)
  return transformer.head(
    params,
    hidden,
    batch.targets,
    batch.sampling,
    jnp.zeros(batch.targets.shape, jnp.uint32),
    rows.positions + 1,
    rows.num_rows,
    numerics_lib.key(0),  # Nothing is sampled here.
    config=model,
    numerics=numerics,
  )


def rollout_gap(scores: TokenScores, batch: TrainBatch) -> dict[str, float]:
  """Returns how far the trainer's log-probabilities are from the engine's, over a whole batch.

  Keys: kl, raw_kl (k1 over sampled tokens), max_abs_logprob_gap, max_abs_raw_logprob_gap. On the
  tiled path every one is exactly 0.0.
  """
  mask = np.asarray(batch.loss_mask)
  gap = (np.asarray(batch.behaviour_logprobs) - scores.logprob)[mask]
  raw_gap = (np.asarray(batch.raw_logprobs) - scores.raw_logprob)[mask]
  return dict(
    kl=float(np.mean(gap, dtype=np.float64)),
    raw_kl=float(np.mean(raw_gap, dtype=np.float64)),
    max_abs_logprob_gap=float(np.max(np.abs(gap))),
    max_abs_raw_logprob_gap=float(np.max(np.abs(raw_gap))),
  )


def _padded(leaf: Any, width: int) -> Any:
  """Adds empty micro-batches up to the number of instances; an empty one computes no row."""
  missing = width - leaf.shape[0]
  if not missing:
    return leaf
  return np.concatenate([leaf, np.zeros((missing, *leaf.shape[1:]), leaf.dtype)])


def _on_first(leaf: Array, index: int) -> Array:
  """Returns entry `index` of an array that is spread over instances, on the first of them."""
  part = leaf.addressable_shards[index].data if leaf.sharding.num_devices > 1 else leaf
  return jax.device_put(part.reshape(leaf.shape[1:]), jax.devices()[0])


_add = jax.jit(lambda left, right: jax.tree.map(jnp.add, left, right))


class TreeSum:
  """Adds pytrees that arrive one by one as `parallel.tree_sum_list` adds a list.

  Works like a binary counter: two blocks of equal size become one at once, so that at most
  log2(count) + 1 partial sums are alive.
  """

  def __init__(self):
    self._blocks: list[tuple[int, Any]] = []  # (number of values, sum), sizes descending.

  def add(self, value: Any) -> None:
    """Adds the next value."""
    size = 1
    while self._blocks and self._blocks[-1][0] == size:
      _, left = self._blocks.pop()
      value, size = _add(left, value), 2 * size
    self._blocks.append((size, value))

  def total(self) -> Any:
    """Returns the sum of all values; there is at least one."""
    value = self._blocks[-1][1]
    for _, left in reversed(self._blocks[:-1]):
      value = _add(left, value)
    return value
