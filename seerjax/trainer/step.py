"""One optimiser step on a packed batch.

    micro-batches --gradient, added in order--> one sum a run --fixed tree--> sum --optax--> params

The gradient program is never handed the engine's log-probabilities: what it computes under
`value_and_grad` is compared with them afterwards (`rollout_gap`), and on the tiled path the
difference is exactly zero.

Micro-batches are cut into runs of eight or so (`runs`). A run stays on one instance of the mesh,
whose program adds each gradient to the sum in place; the runs' sums are added as one binary tree.
Which runs there are follows from the number of micro-batches alone, so the number of devices
changes no bit, and of a large model only a few gradients are alive at once. What is no longer
needed is given up: an optimiser step takes the place of the state that it began from.

Of masters, moments and sums each device of the mesh has a part (`trainer.shards`), and updates it.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Sequence
import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from seerjax import agreement, fields, numerics as numerics_lib, parallel
from seerjax.array_typing import Array
from seerjax.backends import choice
from seerjax.backends.protocol import Backend
from seerjax.models import (
  config as model_config,
  head,
  kv_layout,
  lora,
  parameters,
  transformer,
  weights,
)
from seerjax.ops import sampling
from seerjax.trainer import (
  gathering,
  losses,
  packing,
  plan as plan_lib,
  shards as shards_lib,
  state as state_lib,
)
from seerjax.types import TokenScores, TrainBatch, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
  """Adam with a warm-up and a clipped global norm.

  Attributes:
    learning_rate: after the warm-up; 0 lets a run take the usual one for its model's size and for
      what of it learns (`run.learning_rates.usual`).
    warmup_steps: in n of them the rate rises by n equal parts; the first step has the first part,
      the n-th all of it. 0 and 1 are none.
    b1: decay of the mean.
    b2: decay of the mean square.
    weight_decay: decoupled, per step, times the learning rate.
    max_gradient_norm: global norm above which the gradient is scaled down.
  """

  learning_rate: float = 0.0
  warmup_steps: int = 0
  b1: float = 0.9
  b2: float = 0.95
  weight_decay: float = 0.0
  max_gradient_norm: float = 1.0

  def __post_init__(self):
    fields.check(self, unbounded=("max_gradient_norm",))
    if not 0 <= self.learning_rate < math.inf:
      raise ValueError(
        f"OptimizerConfig.learning_rate: got {self.learning_rate}, expected a positive number, or"
        " 0, which lets a run's model decide; 1e-6 is usual for all weights of a large one."
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
  """Returns the optax chain: clip, Adam, decay, learning rate.

  Raises:
    ValueError: if the learning rate is left to a run's model, which is not known here.
  """
  if not config.learning_rate:
    raise ValueError(
      "OptimizerConfig.learning_rate: got 0, which a run replaces by the usual one for its model,"
      " expected a positive number; set it, to 1e-4 for a small model."
    )

  def warming(count: jax.typing.ArrayLike) -> Array:
    # Optax counts from 0. From zero, the first batch would teach nothing.
    return config.learning_rate * jnp.minimum((jnp.asarray(count) + 1) / config.warmup_steps, 1.0)

  learning_rate = warming if config.warmup_steps else config.learning_rate
  return optax.chain(
    clip_by_norm(config.max_gradient_norm),
    optax.adamw(learning_rate, config.b1, config.b2, weight_decay=config.weight_decay),
  )


def clip_by_norm(most: float) -> optax.GradientTransformationExtraArgs:
  """Returns what scales a gradient down to a norm of at most `most`.

  An update is told the norm as `gradient_norm`, for a device has a part of the gradient alone; else
  the gradient is whole.
  """

  def update(
    updates: Any, state: Any, params: Any = None, *, gradient_norm: Any = None, **others: Any
  ) -> tuple[Any, Any]:
    del params, others
    found = shards_lib.norm(updates) if gradient_norm is None else gradient_norm
    scaled = lambda leaf: jnp.where(found < most, leaf, leaf / found.astype(leaf.dtype) * most)
    return jax.tree.map(scaled, updates), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


BY_INSTANCE = jax.P(parallel.INSTANCE_AXIS)
# Micro-batches whose gradients are added one after the other, on one instance; more where that
# would make more runs than these, of which 1 + log2 sums are alive at once.
RUN_LENGTH, MOST_RUNS = 8, 8


def runs(num_micro_batches: int) -> list[range]:
  """Cuts micro-batches into runs of at most `RUN_LENGTH`, or `MOST_RUNS` longer ones.

  Their number is the least power of two that does, and two where there are two micro-batches: two,
  four or eight instances share them evenly, and their sums are a balanced tree. The first are the
  longest.
  """
  count = min(2, num_micro_batches)
  while count * RUN_LENGTH < num_micro_batches and count < MOST_RUNS:
    count *= 2
  length, longer = divmod(num_micro_batches, count)
  starts = [index * length + min(index, longer) for index in range(count + 1)]
  return [range(start, end) for start, end in itertools.pairwise(starts)]


def _traced_once(function: Any) -> Any:
  """A trainer has one layout: a second trace means that an input changed its shape or type.

  Batches with penalties are programs of their own, one for each length of their lists.
  """
  num_traces = collections.Counter()

  def counted(*args: Any) -> Any:
    leaves = jax.tree_util.tree_leaves_with_path(args)
    named = ((jax.tree_util.keystr(path), leaf) for path, leaf in leaves)
    kind = next((leaf.shape[-1] for name, leaf in named if name.endswith(".penalty_ids")), 0)
    num_traces[kind] += 1
    count = num_traces[kind]
    assert count == 1, f"trainer: got trace {count}, expected one for each program"
    return function(*args)

  return counted


class MicroBatch(NamedTuple):
  """What the gradient program sees of a `TrainBatch`: everything but the engine's numbers.

  Attributes:
    batch: its behaviour_logprobs and raw_logprobs are None.
    old_logprobs: f32[n], of the weights that sampled; read unless `is_first`.
    is_first: bool[], the weights are those that sampled.
    reference_logprobs: f32[n], of the reference policy; None without one.
  """

  batch: TrainBatch
  old_logprobs: Any
  is_first: Any
  reference_logprobs: Any = None


# What `losses.policy_loss` is: a micro-batch's share of the loss, and its metrics.
PolicyLoss = Callable[..., tuple[Array, losses.LossMetrics]]


def check_remat(remat: transformer.Remat, memories: Collection[str]) -> None:
  """Refuses to keep layers' inputs in a kind of memory that is not among those of a device.

  Raises:
    NotImplementedError: naming the kinds.
  """
  if remat == "layer_offloaded" and transformer.HOST_MEMORY not in memories:
    raise NotImplementedError(
      f"Trainer.remat: got 'layer_offloaded' on a {jax.default_backend()} device whose memories"
      f" are {sorted(memories)}, expected {transformer.HOST_MEMORY!r} among them; set 'layer'."
    )


@dataclasses.dataclass(frozen=True)
class Trainer:
  """Gradient and update programs of one model.

  Attributes:
    model: shape of the model.
    numerics: what decides bits; the engine's.
    loss: the objective.
    optimizer: an optax chain. One that does not work element by element has masters and moments
      whole on every device (`shards.is_elementwise`).
    mesh: micro-batches are spread over its instances, and slabs of each over its model axis.
    num_pages: scratch pages of one micro-batch (`packing.Layout.num_pages`).
    page_size: positions of one page.
    remat: what a gradient keeps of the forward pass ("none" computes nothing again), see
      `transformer.forward`.
    policy_loss: of one micro-batch, as `losses.policy_loss`.
    backend: what runs the stages of the forward; None is the one that the numerics name.
  """

  model: model_config.TransformerConfig
  numerics: numerics_lib.NumericsConfig
  loss: losses.LossConfig
  optimizer: optax.GradientTransformation
  mesh: jax.sharding.Mesh
  num_pages: int
  page_size: int
  remat: transformer.Remat = "none"
  policy_loss: PolicyLoss = losses.policy_loss
  backend: Backend | None = None

  def __post_init__(self):
    # With what they leave open decided, so that two of them compare.
    fields.check(self)
    decided = model_config.numerics_for(self.model, self.numerics)
    object.__setattr__(self, "numerics", decided)
    check_remat(
      self.remat, {memory.kind for memory in self.mesh.devices.flat[0].addressable_memories()}
    )
    shards = self.mesh.shape[parallel.MODEL_AXIS]
    parallel.local_slabs(decided.reduction_shards, shards)
    if shards > 1 and decided.uses_kernels:
      raise NotImplementedError(
        f"Trainer.mesh: got model_shards={shards} with implementation={decided.implementation!r},"
        " expected 1 (the kernels' gradients add up the slabs of one device); learn on instances"
        " alone, or set implementation='tiled'."
      )

  @functools.cached_property
  def stages(self) -> Backend:
    """What runs the stages: `backend`, or the one that the numerics name."""
    return self.backend or choice.backend_of(self.numerics)

  def init(self, params: parameters.Params) -> TrainState:
    """Returns the state of a run that has not learnt yet.

    `params` are the f32 masters of what learns: all weights, or an adapter of `models.lora`. They
    are copied, for `update` gives up the state that it is handed.
    """
    if "embed" in params:
      what = "Trainer.init: params"
      weights.check(params, self.model, self.numerics, dtype=jnp.float32, what=what)
    numerics_lib.require_finite(
      params, what="Trainer.init: params", remedy="begin from weights that are whole"
    )
    return state_lib.first_state(params, self.optimizer, self.mesh)

  def _placed(self, params: parameters.Params, what: str) -> parameters.Params:
    """Returns weights on the whole mesh; refuses others than the fingerprint names."""
    weights.check(params, self.model, self.numerics, dtype=self.numerics.dtype, what=what)
    return parameters.placed(params, self.mesh)

  @property
  def _axis(self) -> str | None:
    return parallel.MODEL_AXIS if self.mesh.shape[parallel.MODEL_AXIS] > 1 else None

  @functools.cached_property
  def _gradient(self):
    return self._gradient_program(is_plain=False)

  @functools.cached_property
  def _plain_gradient(self):
    return self._gradient_program(is_plain=True)

  def _is_plain(self, batch: TrainBatch) -> bool:
    """Whether no row is special, where the backend has a use for knowing it beforehand."""
    return self.stages.waits_for_predicates and not np.any(sampling.is_special(batch.sampling))

  def _gradient_program(self, *, is_plain: bool):
    """(params, MicroBatch [i, ...], denominators, sums [i, ...]) -> sums, ([i, ...] of the rest).

    On one instance nothing has the axis i. The sums are given up for the new ones.
    """

    def loss(trained, frozen, micro: MicroBatch, denominators):
      tokens, scores = score(
        lora.combine(trained, frozen),
        micro.batch,
        model=self.model,
        numerics=self.numerics,
        num_pages=self.num_pages,
        page_size=self.page_size,
        axis=self._axis,
        remat=self.remat,
        backend=self.stages,
        is_plain=is_plain,
      )
      if not parallel.BARRIERS_HOLD:
        scores = parallel.rounded(scores)  # Else the loss is fused with what a mesh makes them of.
      current = jax.lax.stop_gradient(scores.logprob)
      old = jnp.where(micro.is_first, current, micro.old_logprobs)
      value, metrics = self.policy_loss(
        scores.logprob,
        scores.entropy,
        micro.batch,
        self.loss,
        denominators,
        old_logprobs=old,
        reference_logprobs=micro.reference_logprobs,
      )
      return value, (value, metrics, tokens, scores)

    def one(params, micro, denominators, sums):
      trained, frozen = lora.partition(params)
      gradient, aux = jax.grad(loss, has_aux=True)(trained, frozen, micro, denominators)
      is_live = micro.batch.tokens.num_rows > 0  # An instance may have nothing to do.

      def add(total: Array, part: Array) -> Array:
        # Held apart: fused with the addition, a gradient might be rounded in another place.
        part = parallel.rounded(part.astype(jnp.float32))
        return total + jnp.where(is_live, part, 0.0)

      return jax.tree.map(add, sums, gradient), aux

    function = _traced_once(one)
    if self.mesh.size == 1:
      return jax.jit(function, donate_argnums=(3,), out_shardings=(self._whole, None))

    def results(sums, aux):
      return sums, parallel.to_all_processes(aux, self.mesh)

    def spread(params, micro, denominators, sums):
      specs = self._sum_specs(params)
      in_specs = (parameters.specs_of(params), BY_INSTANCE, jax.P(), specs)
      out_specs = (specs, parallel.spec_of_results(self.mesh))
      return self._spread(function, results, in_specs, out_specs)(
        params, micro, denominators, sums
      )

    return jax.jit(spread, donate_argnums=(3,))

  @functools.cached_property
  def _score(self):
    return self._score_program(is_plain=False)

  @functools.cached_property
  def _plain_score(self):
    return self._score_program(is_plain=True)

  def _score_program(self, *, is_plain: bool):
    """(params, TrainBatch [i, ...]) -> tokens, scores [i, ...]; no gradient."""

    def one(params, batch):
      return score(
        params,
        batch,
        model=self.model,
        numerics=self.numerics,
        num_pages=self.num_pages,
        page_size=self.page_size,
        axis=self._axis,
        backend=self.stages,
        is_plain=is_plain,
      )

    function = _traced_once(one)
    if self.mesh.size == 1:
      return jax.jit(function)

    def results(*found):
      return parallel.to_all_processes(found, self.mesh)

    def spread(params, batch):
      in_specs = (parameters.specs_of(params), BY_INSTANCE)
      out_specs = parallel.spec_of_results(self.mesh)
      return self._spread(function, results, in_specs, out_specs)(params, batch)

    return jax.jit(spread)

  def _spread(self, function: Any, results: Any, in_specs: Any, out_specs: Any) -> Any:
    """Returns a function of one instance as one of the whole mesh.

    Of arguments that every instance has its own of, the leading axis is the instance's; so it is
    of all that comes out, which `results` takes as [1, ...].
    """
    leaves_of = functools.partial(jax.tree.leaves, is_leaf=shards_lib.is_spec)
    is_own = [
      any(parallel.INSTANCE_AXIS in spec for spec in leaves_of(specs)) for specs in in_specs
    ]

    def local(*args: Any) -> Any:
      own = [
        jax.tree.map(lambda leaf: leaf[0], arg) if is_its_own else arg
        for arg, is_its_own in zip(args, is_own, strict=True)
      ]
      return results(*jax.tree.map(lambda leaf: leaf[None], function(*own)))

    # Replication over `model` is ours to keep: gathered slabs are added in one order on all.
    return jax.shard_map(
      local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )

  @property
  def _whole(self) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(self.mesh, jax.P())

  def _sum_specs(self, params: parameters.Params) -> Any:
    """Returns where the sums of gradients lie: each instance's own, slabs over the model axis."""
    trained, _ = lora.partition(parameters.specs_of(params))
    by_instance = lambda spec: jax.P(parallel.INSTANCE_AXIS, *spec)
    return jax.tree.map(by_instance, trained, is_leaf=shards_lib.is_spec)

  def _zeros(self, params: parameters.Params) -> Any:
    """Returns f32 sums of nothing, shaped as the gradient."""
    trained, _ = lora.partition(params)
    if self.mesh.size == 1:
      of = lambda leaf: jnp.zeros(leaf.shape, jnp.float32, device=self._whole)
      return jax.tree.map(of, trained)
    count = self.mesh.shape[parallel.INSTANCE_AXIS]

    def zeros(leaf: Any, spec: jax.P) -> Array:
      place = jax.sharding.NamedSharding(self.mesh, spec)
      return jnp.zeros((count, *leaf.shape), jnp.float32, device=place)

    return jax.tree.map(zeros, trained, self._sum_specs(params))

  def _taken(self, tree: Any, indices: Sequence[int]) -> Any:
    """Returns micro-batches of `[m, ...]`, one an instance; one device has no axis of instances.

    Instances that have none get zeros: an empty micro-batch computes no row.
    """
    if self.mesh.size == 1:
      return jax.tree.map(lambda leaf: leaf[indices[0]], tree)
    missing = self.mesh.shape[parallel.INSTANCE_AXIS] - len(indices)

    def part(leaf: Any) -> np.ndarray:
      zeros = np.zeros((missing, *leaf.shape[1:]), leaf.dtype)
      return np.concatenate([leaf[np.asarray(indices)], zeros])

    return jax.tree.map(part, tree)

  def _of_instance(self, tree: Any, index: int) -> Any:
    """Returns what a program gave of one of the micro-batches that `_taken` took."""
    return tree if self.mesh.size == 1 else jax.tree.map(lambda leaf: leaf[index], tree)

  @functools.cached_property
  def _update(self):
    optimizer = optax.with_extra_args_support(self.optimizer)

    def update(state: TrainState, gradient: Any, of_params: Any = None):
      mesh = None if of_params is None else self.mesh
      gradient = parameters.unstacked(gradient)
      norm = shards_lib.norm(gradient, of_params, mesh)

      def applied(gradient: Any, state: TrainState, norm: Array) -> Any:
        updates, opt_state = optimizer.update(
          gradient, state.opt_state, state.params, gradient_norm=norm
        )
        return updates, opt_state, optax.apply_updates(state.params, updates)

      updates, opt_state, params = shards_lib.rounded_apart(applied)(gradient, state, norm)
      of_update = shards_lib.norm(updates, of_params, mesh, behind=norm)
      return TrainState(params, opt_state, state.step + 1), dict(
        grad_norm=norm, update_norm=of_update
      )

    if self.mesh.size == 1:
      return jax.jit(update, donate_argnums=(0,))

    def spread(state: TrainState, gradient: Any):
      specs = state_lib.state_specs(state, self.optimizer, self.mesh)
      of_gradient = self._gradient_specs(gradient)
      parts = jax.shard_map(
        lambda state, gradient: update(state, gradient, specs.params),
        mesh=self.mesh,
        in_specs=(specs, of_gradient),
        out_specs=(specs, jax.P()),
        check_vma=False,
      )
      return parts(state, gradient)

    return jax.jit(spread, donate_argnums=(0,))

  def _gradient_specs(self, gradient: Any) -> Any:
    """Returns where the gradient of what learns lies: as its masters, stacked or not."""
    return state_lib.params_specs(gradient, self.optimizer, self.mesh)

  def gradient(
    self,
    params: parameters.Params,
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
      (f32 gradient of what learns, stacked where `params` are, {"loss": ...} and summarised loss
      metrics, scores f32[m, n]).

    Raises:
      ValueError: if the loss needs `reference_logprobs` and they are None, or weights are not the
        model's in the numerics' layout and dtype.
    """
    if parallel.spans_processes(self.mesh):
      leaves = jax.tree_util.tree_leaves_with_path((batch, denominators))
      agreement.compare(
        "micro-batches of a gradient",
        {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves},
      )
    params = self._placed(params, "Trainer.gradient: params")
    num_micro, num_rows = batch.targets.shape
    width = self.mesh.shape[parallel.INSTANCE_AXIS]
    zeros = np.zeros((num_micro, num_rows), np.float32)
    micro = MicroBatch(
      batch._replace(behaviour_logprobs=None, raw_logprobs=None),
      zeros if old_logprobs is None else old_logprobs,
      np.full(num_micro, old_logprobs is None),
      reference_logprobs,
    )
    total, mismatches, of_gradient = gathering.TreeSum(), 0, None
    values: list[Any] = [None] * num_micro
    metrics, scores = list(values), list(values)
    all_runs = runs(num_micro)
    program = self._plain_gradient if self._is_plain(batch) else self._gradient
    for first in range(0, len(all_runs), width):
      wave = all_runs[first : first + width]
      sums = self._zeros(params)
      for place in range(len(wave[0])):
        indices = [run[place] for run in wave if place < len(run)]
        part = self._taken(micro, indices)
        sums, out = program(params, part, denominators, sums)
        out = jax.device_get(out)
        for row, index in enumerate(indices):
          values[index], metrics[index], tokens, scores[index] = self._of_instance(out, row)
          mismatches += int(np.sum(tokens != batch.targets[index]))
      if of_gradient is None:
        of_gradient = self._gradient_specs(lora.partition(params)[0])
      leaves, structure = jax.tree.flatten(sums)
      del sums
      places = jax.tree.leaves(of_gradient, is_leaf=shards_lib.is_spec)
      for index, place in enumerate(places):
        leaves[index] = gathering.shared_out(leaves[index], place, len(wave))
      for parts in zip(*leaves, strict=True):
        total.add(structure.unflatten(parts))
      del leaves
    assert mismatches == 0, f"head: {mismatches} forced tokens came out as others"
    loss_metrics = functools.reduce(losses.add_metrics, metrics)
    summary = {name: jnp.asarray(value) for name, value in losses.summarise(loss_metrics).items()}
    summary["loss"] = parallel.tree_sum_list([jnp.asarray(value) for value in values])
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *scores)
    return total.total(), summary, stacked

  def plan(
    self, params: parameters.Params, layout: packing.Layout, num_micro_batches: int
  ) -> plan_lib.Plan:
    """Returns what learning takes of a device of the mesh, before anything is computed.

    Args:
      params: what `gradient` is handed, or its shapes.
      layout: of a micro-batch.
      num_micro_batches: most of one optimiser step.
    """
    trained, frozen = lora.partition(params)
    masters = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), trained)
    mesh, of_params = self.mesh, state_lib.params_specs(masters, self.optimizer, self.mesh)
    moments = jax.eval_shape(self.optimizer.init, masters)
    of_moments = shards_lib.of_optimizer(self.optimizer, moments, of_params)
    of_masters = shards_lib.bytes_of(masters, of_params, mesh)
    # An instance's own sum, before it is shared out, lies as the weights do.
    of_sum, _ = lora.partition(parameters.specs_of(params))
    of_others = plan_lib.num_sums(len(runs(num_micro_batches))) - 1
    is_deep = self.model.num_layers > parameters.UNROLLED_LAYERS
    is_apart = is_deep or self.numerics.dtype != jnp.float32 or mesh.size > 1
    sizes = (self.model, self.numerics, layout, self.page_size, self.remat)
    shards = mesh.shape[parallel.MODEL_AXIS]
    weights = shards_lib.bytes_of(params, parameters.specs_of(params), mesh)
    return plan_lib.Plan(
      masters=of_masters,
      moments=shards_lib.bytes_of(moments, of_moments, mesh),
      # Weights in float32 that learn are the masters themselves, unless they are stacked or masters
      # are shared out.
      weights=weights if is_apart or frozen is not None else 0,
      sums=shards_lib.bytes_of(masters, of_sum, mesh) + of_others * of_masters,
      activations=plan_lib.activation_bytes(*sizes, shards),
      scratch=plan_lib.scratch_bytes(*sizes, shards),
      update=int(plan_lib.UPDATE_COPIES * of_masters),
    )

  def scores(self, params: parameters.Params, batch: TrainBatch) -> TokenScores:
    """Scores a whole batch without a gradient, by the program that `gradient` differentiates.

    Args:
      params: in compute dtype.
      batch: from `packing.pack`, m micro-batches.

    Returns:
      f32[m, n]; bit for bit what `gradient` gives for the same weights.
    """
    params = self._placed(params, "Trainer.scores: params")
    num_micro = batch.targets.shape[0]
    width = self.mesh.shape[parallel.INSTANCE_AXIS]
    seen = batch._replace(behaviour_logprobs=None, raw_logprobs=None)
    program = self._plain_score if self._is_plain(batch) else self._score
    parts = []
    for first in range(0, num_micro, width):
      indices = range(first, min(first + width, num_micro))
      _, scores = jax.device_get(program(params, self._taken(seen, indices)))
      parts += [self._of_instance(scores, row) for row in range(len(indices))]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *parts)

  def update(self, state: TrainState, gradient: Any) -> tuple[TrainState, dict[str, Array]]:
    """Applies one gradient; returns the new state and the norms of gradient and update.

    `state` is given up: its arrays are gone afterwards.

    Raises:
      ValueError: if the new weights are not finite, so that they are never published or saved.
    """
    state, norms = self._update(state, gradient)
    checked: Any = state.params
    if parallel.spans_processes(self.mesh):
      numbers = {name: float(value) for name, value in norms.items()}
      agreement.compare(f"optimiser step {int(state.step)}", numbers)
      checked = (norms, state.params)  # A process has a part of the weights; norms are of all.
    numerics_lib.require_finite(
      checked,
      what=f"Trainer.update: weights after a gradient of norm {float(norms['grad_norm']):g}",
      remedy="go on from the last checkpoint with a lower OptimizerConfig.learning_rate or"
      " max_gradient_norm",
    )
    return state, norms


def score(
  params: parameters.Params,
  batch: TrainBatch,
  *,
  model: model_config.TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  num_pages: int,
  page_size: int,
  axis: str | None = None,
  remat: transformer.Remat = "none",
  backend: Backend | None = None,
  is_plain: bool = False,
) -> tuple[Array, TokenScores]:
  """Scores the targets of one micro-batch (no leading axis): (tokens i32[n], scores f32[n]).

  The tokens are the targets again; they are returned so that this is the engine's head, output for
  output. `axis` is that of the slabs, `remat` what a gradient keeps, `backend` what runs it: see
  `transformer.forward`; and
  `head.sample_and_score` for `is_plain`.
  """
  rows = batch.tokens
  pages = kv_layout.ScratchPages(num_pages, page_size)
  hidden, _ = transformer.forward(
    params, rows, pages, config=model, numerics=numerics, axis=axis, remat=remat, backend=backend
  )
  return head.sample_and_score(
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
    axis=axis,
    backend=backend,
    is_plain=is_plain,
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
