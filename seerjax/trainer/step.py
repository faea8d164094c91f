"""One optimiser step on a packed batch.

    micro-batches --gradient, added in order--> one sum a run --fixed tree--> sum --optax--> params

The gradient program never receives the engine's log-probabilities. Its own, computed under
`value_and_grad`, are compared with them afterwards (`rollout_gap`); on the tiled path the
difference is exactly zero.

Micro-batches are divided into runs of about eight (`runs`). A run stays on one instance of the
mesh, and its program adds each gradient to the sum in place; the sums of runs are added as one
binary tree. The division depends only on the number of micro-batches, so the number of devices does
not affect the result, and only a few gradients of a large model exist at a time. An optimiser step
donates the state that it starts from.

Each device of the mesh holds and updates a part of masters, moments and sums (`trainer.shards`).
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Sequence
import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from seerjax import agreement, fields, numerics as numerics_lib, parallel
from seerjax.array_typing import Array
from seerjax.models import (
  experts,
  head,
  kv_layout,
  lora,
  parameters,
  shared_heads,
  transformer,
  weights,
)
from seerjax.models.decoder import Decoder
from seerjax.ops import sampling
from seerjax.trainer import (
  gathering,
  head_gradients,
  losses,
  optimizer as optimizer_lib,
  packing,
  plan as plan_lib,
  routes as routes_lib,
  shards as shards_lib,
  state as state_lib,
)
from seerjax.types import TokenScores, TrainBatch, TrainState

BY_INSTANCE = jax.P(parallel.INSTANCE_AXIS)
# Number of micro-batches in a run: their gradients are added sequentially on one instance. Runs are
# longer if there would otherwise be more than MOST_RUNS; 1 + log2(runs) sums exist at the same
# time.
RUN_LENGTH, MOST_RUNS = 8, 8


def runs(num_micro_batches: int) -> list[range]:
  """Divides micro-batches into runs of at most `RUN_LENGTH`, or into `MOST_RUNS` longer ones.

  The number of runs is the smallest sufficient power of two, and at least two if there are two
  micro-batches. Two, four or eight instances thus get equal shares, and the sums form a balanced
  tree. Longer runs come first.
  """
  count = min(2, num_micro_batches)
  while count * RUN_LENGTH < num_micro_batches and count < MOST_RUNS:
    count *= 2
  length, longer = divmod(num_micro_batches, count)
  starts = [index * length + min(index, longer) for index in range(count + 1)]
  return [range(start, end) for start, end in itertools.pairwise(starts)]


def _traced_once(function: Any) -> Any:
  """Asserts that a program is traced only once.

  A trainer has one layout, so a second trace means that an input changed its shape or type. Batches
  with penalties are separate programs, one per length of the penalty lists.
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
  """Input of the gradient program: a `TrainBatch` without the engine's log-probabilities.

  Attributes:
    batch: the batch; behaviour_logprobs and raw_logprobs are None.
    old_logprobs: f32[n], under the weights that sampled; ignored if `is_first`.
    is_first: bool[], whether the current weights are those that sampled.
    reference_logprobs: f32[n], under the reference policy; None without one.
  """

  batch: TrainBatch
  old_logprobs: Any
  is_first: Any
  reference_logprobs: Any = None


class BatchTotals(NamedTuple):
  """Sums over a whole batch that the gradient of each of its micro-batches reads.

  Attributes:
    denominators: of the loss.
    loads: f32[E] of each layer with experts, E times the share of choices that each expert got; ()
      if the loss reads none.
  """

  denominators: losses.Denominators
  loads: Any = ()


# Type of `losses.policy_loss`: returns a micro-batch's share of the loss, and its metrics.
PolicyLoss = Callable[..., tuple[Array, losses.LossMetrics]]


def check_remat(remat: transformer.Remat, memories: Collection[str]) -> None:
  """Raises if `remat` offloads layer inputs to a memory that the device does not have.

  Raises:
    NotImplementedError: naming the available memories.
  """
  if remat == "layer_offloaded" and transformer.HOST_MEMORY not in memories:
    raise NotImplementedError(
      f"Trainer.remat: got 'layer_offloaded' on a {jax.default_backend()} device with the memories"
      f" {sorted(memories)}, expected {transformer.HOST_MEMORY!r} among them; set 'layer'."
    )


@dataclasses.dataclass(frozen=True)
class Trainer:
  """Gradient and update programs of one model.

  Attributes:
    decoder: the model as it was decided, as in the engine; its slabs are spread over the mesh's
      model axis.
    loss: the objective.
    optimizer: an optax chain. If it is not elementwise, masters and moments are replicated on every
      device (`shards.is_elementwise`).
    mesh: micro-batches are distributed over its instances, slabs over its model axis.
    num_pages: scratch pages of one micro-batch (`packing.Layout.num_pages`).
    page_size: positions of one page.
    remat: activations kept for the backward pass ("none" recomputes nothing); see
      `transformer.forward`.
    policy_loss: loss of one micro-batch, like `losses.policy_loss`.
    moves_router_biases: whether the gradient has, at the correction bias of each expert, 1 if the
      batch gave it more tokens than the mean, and -1 if fewer, for an optimiser with
      `OptimizerConfig.router_bias_speed`. The norm leaves these numbers out.
  """

  decoder: Decoder
  loss: losses.LossConfig
  optimizer: optax.GradientTransformation
  mesh: jax.sharding.Mesh
  num_pages: int
  page_size: int
  remat: transformer.Remat = "none"
  policy_loss: PolicyLoss = losses.policy_loss
  moves_router_biases: bool = False

  def __post_init__(self):
    fields.check(self)
    object.__setattr__(self, "decoder", self.decoder.on(self.mesh))
    numerics = self.decoder.numerics
    if self.loss.balance_coefficient and not self.decoder.shape.routings:
      raise ValueError(
        f"LossConfig.balance_coefficient: got {self.loss.balance_coefficient:g} for a model without"
        " experts, expected 0; leave it out, or take a model with experts."
      )
    check_remat(
      self.remat, {memory.kind for memory in self.mesh.devices.flat[0].addressable_memories()}
    )
    shards = self.mesh.shape[parallel.MODEL_AXIS]
    parallel.local_slabs(numerics.reduction_shards, shards)
    if shards > 1 and not self.decoder.backend.traits.trains_on_slabs:
      raise NotImplementedError(
        f"Trainer.mesh: got tensor_parallel_size={shards} with backend={numerics.backend!r},"
        " expected 1 (the kernels' gradients add up the slabs of one device); train with instances"
        " only, or set backend='tiled'."
      )

  def init(self, params: parameters.Params) -> TrainState:
    """Returns the initial training state.

    `params` are the f32 masters of the trained weights: all weights, or an adapter of
    `models.lora`. They are copied, because `update` donates the state.
    """
    if "embed" in params:
      what = "Trainer.init: params"
      weights.check(params, self.decoder, dtype=jnp.float32, what=what)
    numerics_lib.require_finite(
      params, what="Trainer.init: params", remedy="start from finite weights"
    )
    slabs = self.decoder.numerics.reduction_shards
    shared_heads.check(params, self.decoder.shape, slabs, what="Trainer.init: params")
    return state_lib.first_state(params, self.optimizer, self.mesh)

  def _placed(self, params: parameters.Params, what: str) -> parameters.Params:
    """Returns weights on the whole mesh; raises if they do not match the fingerprint."""
    weights.check(params, self.decoder, dtype=self.decoder.numerics.dtype, what=what)
    return parameters.placed(params, self.mesh)

  @functools.cached_property
  def _gradient(self):
    return self._gradient_program(is_plain=False)

  @functools.cached_property
  def _plain_gradient(self):
    return self._gradient_program(is_plain=True)

  def _is_plain(self, batch: TrainBatch) -> bool:
    """Whether no row needs special sampling, if the backend benefits from knowing it in advance."""
    is_special = np.any(sampling.is_special(batch.sampling))
    return bool(self.decoder.backend.traits.waits_for_predicates and not is_special)

  def _gradient_program(self, *, is_plain: bool):
    """(params, MicroBatch [i, ...], BatchTotals, sums [i, ...]) -> sums, ([i, ...] of the rest).

    On one instance there is no axis i. `sums` is donated.
    """

    has_experts = bool(self.decoder.shape.routings)

    def loss(trained, frozen, micro: MicroBatch, totals: BatchTotals):
      denominators, loads = totals
      params, balance = lora.combine(trained, frozen), None
      if self.loss.balance_coefficient:
        balance = routes_lib.Balance(self.loss, micro.batch.sequence_index, denominators)
        params = routes_lib.with_loads(params, loads) if loads else params
      tokens, scores, routes = watched_score(
        params,
        micro.batch,
        decoder=self.decoder.for_rows(is_plain=is_plain),
        num_pages=self.num_pages,
        page_size=self.page_size,
        remat=self.remat,
        watch=routes_lib.watch_of(micro.batch.loss_mask, balance) if has_experts else None,
      )
      if not parallel.BARRIERS_HOLD:
        scores = parallel.rounded(scores)  # Prevents fusion with mesh-dependent operations.
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
      if balance is not None:
        value = value + sum(own.loss for own in routes)
        routes = tuple(own._replace(loss=()) for own in routes)
      return value, (value, metrics, tokens, scores, routes)

    def one(params, micro, totals, sums):
      trained, frozen = lora.partition(params)
      gradient, aux = jax.grad(loss, has_aux=True)(trained, frozen, micro, totals)
      is_live = micro.batch.tokens.num_rows > 0  # An instance may have no micro-batch.

      def add(total: Array, part: Array) -> Array:
        # Kept separate: fused with the addition, a gradient could be rounded differently.
        part = parallel.rounded(part.astype(jnp.float32))
        return total + jnp.where(is_live, part, 0.0)

      return jax.tree.map(add, sums, gradient), aux

    function = _traced_once(one)
    if self.mesh.size == 1:
      return jax.jit(function, donate_argnums=(3,), out_shardings=(self._whole, None))

    def results(sums, aux):
      return sums, parallel.to_all_processes(aux, self.mesh)

    def spread(params, micro, totals, sums):
      specs = self._sum_specs(params)
      in_specs = (parameters.specs_of(params), BY_INSTANCE, jax.P(), specs)
      out_specs = (specs, parallel.spec_of_results(self.mesh))
      return self._spread(function, results, in_specs, out_specs)(params, micro, totals, sums)

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
        decoder=self.decoder.for_rows(is_plain=is_plain),
        num_pages=self.num_pages,
        page_size=self.page_size,
      )

    return self._forward_program(one)

  @functools.cached_property
  def _route(self):
    """(params, TrainBatch [i, ...]) -> `Routes` of each layer with experts; no head."""

    def one(params, batch):
      pages = kv_layout.ScratchPages(self.num_pages, self.page_size)
      watch = routes_lib.watch_of(batch.loss_mask)
      decoder = self.decoder
      return transformer.watched(params, batch.tokens, pages, decoder=decoder, watch=watch)[2]

    return self._forward_program(one)

  def _forward_program(self, one: Callable[..., Any]):
    """Returns a function of (params, TrainBatch [i, ...]), compiled for the mesh."""
    function = _traced_once(one)
    if self.mesh.size == 1:
      return jax.jit(function)

    def results(found):
      return parallel.to_all_processes(found, self.mesh)

    def spread(params, batch):
      in_specs = (parameters.specs_of(params), BY_INSTANCE)
      out_specs = parallel.spec_of_results(self.mesh)
      return self._spread(function, results, in_specs, out_specs)(params, batch)

    return jax.jit(spread)

  def _spread(self, function: Any, results: Any, in_specs: Any, out_specs: Any) -> Any:
    """Returns a single-instance function as a function on the whole mesh.

    Arguments that differ between instances have a leading instance axis. So do all outputs, which
    `results` receives as [1, ...].
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

    # We guarantee replication over `model`: gathered slabs are added in the same order everywhere.
    return jax.shard_map(
      local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )

  @property
  def _whole(self) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(self.mesh, jax.P())

  def _sum_specs(self, params: parameters.Params) -> Any:
    """Returns the specs of gradient sums: one per instance, slabs over the model axis."""
    trained, _ = lora.partition(parameters.specs_of(params))
    by_instance = lambda spec: jax.P(parallel.INSTANCE_AXIS, *spec)
    return jax.tree.map(by_instance, trained, is_leaf=shards_lib.is_spec)

  def _zeros(self, params: parameters.Params) -> Any:
    """Returns zero f32 sums in the shape of the gradient."""
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
    """Returns the micro-batches at `indices` of `[m, ...]`, one per instance.

    A single device has no instance axis. Instances without a micro-batch get zeros: an empty
    micro-batch computes no rows.
    """
    if self.mesh.size == 1:
      return jax.tree.map(lambda leaf: leaf[indices[0]], tree)
    missing = self.mesh.shape[parallel.INSTANCE_AXIS] - len(indices)

    def part(leaf: Any) -> np.ndarray:
      zeros = np.zeros((missing, *leaf.shape[1:]), leaf.dtype)
      return np.concatenate([leaf[np.asarray(indices)], zeros])

    return jax.tree.map(part, tree)

  def _of_instance(self, tree: Any, index: int) -> Any:
    """Returns the output for one of the micro-batches that `_taken` selected."""
    return tree if self.mesh.size == 1 else jax.tree.map(lambda leaf: leaf[index], tree)

  @functools.cached_property
  def _update(self):
    optimizer = optax.with_extra_args_support(self.optimizer)
    slabs = self.decoder.numerics.reduction_shards
    has_copies = any(kind.attention.copies(slabs) > 1 for kind in self.decoder.shape.layers)

    def update(state: TrainState, gradient: Any, of_params: Any = None):
      mesh = None if of_params is None else self.mesh
      gradient = parameters.unstacked(gradient)
      is_direction = parameters.are_named(
        gradient, parameters.FLOAT32 if self.moves_router_biases else ()
      )
      once = functools.partial(
        head_gradients.counted, decoder=self.decoder, of_tree=of_params, mesh=mesh
      )
      norm = shards_lib.norm(once(optimizer_lib.without(gradient, is_direction)), of_params, mesh)

      def applied(gradient: Any, state: TrainState, norm: Array) -> Any:
        updates, opt_state = optimizer.update(
          gradient, state.opt_state, state.params, gradient_norm=norm
        )
        return updates, opt_state, optax.apply_updates(state.params, updates)

      updates, opt_state, params = shards_lib.rounded_apart(applied)(gradient, state, norm)
      of_update = shards_lib.norm(once(updates), of_params, mesh, behind=norm)
      if has_copies and not shards_lib.is_elementwise(optimizer, state.params):
        # Copies with equal gradients may move apart. Masters are whole on every device here.
        params = shared_heads.filled(params, self.decoder.shape, slabs)
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
    """Returns the specs of the gradient: those of the masters, stacked or not."""
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
      params: weights in compute dtype; with adapters (`models.lora`), only these are trained.
      batch: result of `packing.pack`, m micro-batches.
      denominators: counts over everything in this optimiser step.
      old_logprobs: f32[m, n], under the weights that sampled; None if `params` are these weights.
      reference_logprobs: f32[m, n], under the reference policy (`scores` with its weights);
        required if `LossConfig.kl_coefficient` is not 0.

    Returns:
      (f32 gradient of the trained weights, stacked if `params` are, {"loss": ...} with summarised
      loss metrics and, for a model with experts, those of `routes.summarise`, scores f32[m, n]).

    Raises:
      ValueError: if the loss needs `reference_logprobs` and they are None, or weights do not match
        the model, or the numerics' layout and dtype.
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
    metrics, scores, routes = list(values), list(values), list(values)
    loads, before = (), None
    if self.loss.balance_coefficient and self.loss.balance == "global":
      before = self._by_layer(self._of_micro_batches(self._route, params, batch))
      loads = {index: routes_lib.loads_of(one) for index, one in before.items()}
    all_runs = runs(num_micro)
    program = self._plain_gradient if self._is_plain(batch) else self._gradient
    for first in range(0, len(all_runs), width):
      wave = all_runs[first : first + width]
      sums = self._zeros(params)
      for place in range(len(wave[0])):
        indices = [run[place] for run in wave if place < len(run)]
        part = self._taken(micro, indices)
        sums, out = program(params, part, BatchTotals(denominators, loads), sums)
        out = jax.device_get(out)
        for row, index in enumerate(indices):
          (values[index], metrics[index], tokens, scores[index], routes[index]) = self._of_instance(
            out, row
          )
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
    assert mismatches == 0, f"head: {mismatches} forced tokens were sampled differently"
    loss_metrics = functools.reduce(losses.add_metrics, metrics)
    summary = {name: jnp.asarray(value) for name, value in losses.summarise(loss_metrics).items()}
    summary["loss"] = parallel.tree_sum_list([jnp.asarray(value) for value in values])
    assert of_gradient is not None
    places = jax.tree.leaves(of_gradient, is_leaf=shards_lib.is_spec)
    gradient = head_gradients.summed(total.total(), self.decoder, places, self.mesh)
    if self.decoder.shape.routings:
      of_layers = self._by_layer(routes)
      for index, one in (before or {}).items():
        is_same = np.array_equal(one.counts, of_layers[index].counts)
        assert is_same, f"layer {index}: the gradient's rows chose other experts"
      summary |= routes_lib.summarise(of_layers, int(np.sum(batch.loss_mask)))
      if self.moves_router_biases:
        gradient = routes_lib.with_directions(gradient, of_layers)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *scores)
    return gradient, summary, stacked

  def plan(
    self, params: parameters.Params, layout: packing.Layout, num_micro_batches: int
  ) -> plan_lib.Plan:
    """Estimates the training memory of one device of the mesh, before anything is computed.

    Args:
      params: the weights for `gradient`, or their shapes.
      layout: layout of a micro-batch.
      num_micro_batches: maximum number of micro-batches per optimiser step.
    """
    trained, frozen = lora.partition(params)
    masters = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), trained)
    mesh, of_params = self.mesh, state_lib.params_specs(masters, self.optimizer, self.mesh)
    moments = jax.eval_shape(self.optimizer.init, masters)
    of_moments = shards_lib.of_optimizer(self.optimizer, moments, of_params)
    of_masters = shards_lib.bytes_of(masters, of_params, mesh)
    # An instance's own sum, before resharding, is sharded like the weights.
    of_sum, _ = lora.partition(parameters.specs_of(params))
    of_others = plan_lib.num_sums(len(runs(num_micro_batches))) - 1
    is_deep = self.decoder.shape.num_layers > parameters.UNROLLED_LAYERS
    is_apart = is_deep or self.decoder.numerics.dtype != jnp.float32 or mesh.size > 1
    sizes = (self.decoder, layout, self.page_size, self.remat)
    shards = mesh.shape[parallel.MODEL_AXIS]
    weights = shards_lib.bytes_of(params, parameters.specs_of(params), mesh)
    return plan_lib.Plan(
      masters=of_masters,
      moments=shards_lib.bytes_of(moments, of_moments, mesh),
      # Trained float32 weights are the masters themselves, unless they are stacked or the masters
      # are sharded.
      weights=weights if is_apart or frozen is not None else 0,
      sums=shards_lib.bytes_of(masters, of_sum, mesh) + of_others * of_masters,
      activations=plan_lib.activation_bytes(*sizes, shards),
      scratch=plan_lib.scratch_bytes(*sizes, shards),
      update=int(plan_lib.UPDATE_COPIES * of_masters),
    )

  def scores(self, params: parameters.Params, batch: TrainBatch) -> TokenScores:
    """Scores a whole batch without a gradient, by the program that `gradient` differentiates.

    Args:
      params: weights in compute dtype.
      batch: result of `packing.pack`, m micro-batches.

    Returns:
      f32[m, n]; bit for bit the scores that `gradient` returns for the same weights.
    """
    params = self._placed(params, "Trainer.scores: params")
    program = self._plain_score if self._is_plain(batch) else self._score
    parts = [scores for _, scores in self._of_micro_batches(program, params, batch)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *parts)

  def routes(self, params: parameters.Params, batch: TrainBatch) -> dict[int, routes_lib.Routes]:
    """Returns how the loss rows of a whole batch use the experts, by a forward pass alone.

    Args:
      params: weights in compute dtype.
      batch: result of `packing.pack`, m micro-batches.

    Returns:
      i64 sums by the index of each layer with experts; their metrics are those of `gradient`.
    """
    params = self._placed(params, "Trainer.routes: params")
    return self._by_layer(self._of_micro_batches(self._route, params, batch))

  def _by_layer(self, parts: Sequence[Any]) -> dict[int, routes_lib.Routes]:
    """Returns the sums of all micro-batches by the layer's index."""
    return dict(zip(self.decoder.shape.routings, routes_lib.added(parts), strict=True))

  def _of_micro_batches(self, program: Any, params: parameters.Params, batch: TrainBatch) -> Any:
    """Returns the results of a `_forward_program` for each micro-batch, on the host."""
    num_micro = batch.targets.shape[0]
    width = self.mesh.shape[parallel.INSTANCE_AXIS]
    seen = batch._replace(behaviour_logprobs=None, raw_logprobs=None)
    parts = []
    for first in range(0, num_micro, width):
      indices = range(first, min(first + width, num_micro))
      found = jax.device_get(program(params, self._taken(seen, indices)))
      parts += [self._of_instance(found, row) for row in range(len(indices))]
    return parts

  def update(self, state: TrainState, gradient: Any) -> tuple[TrainState, dict[str, Array]]:
    """Applies one gradient; returns the new state and the norms of gradient and update.

    `state` is donated and unusable afterwards.

    Raises:
      ValueError: if the new weights are not finite, so that they are never published or saved.
    """
    state, norms = self._update(state, gradient)
    checked: Any = state.params
    if parallel.spans_processes(self.mesh):
      numbers = {name: float(value) for name, value in norms.items()}
      agreement.compare(f"optimiser step {int(state.step)}", numbers)
      checked = (norms, state.params)  # A process sees only its weights; norms cover all.
    numerics_lib.require_finite(
      checked,
      what=f"Trainer.update: weights after a gradient of norm {float(norms['grad_norm']):g}",
      remedy="continue from the last checkpoint with a lower OptimizerConfig.learning_rate or"
      " max_gradient_norm",
    )
    return state, norms


def score(
  params: parameters.Params,
  batch: TrainBatch,
  *,
  decoder: Decoder,
  num_pages: int,
  page_size: int,
  remat: transformer.Remat = "none",
) -> tuple[Array, TokenScores]:
  """Scores the targets of one micro-batch (no leading axis): (tokens i32[n], scores f32[n]).

  The tokens are the targets again; they are returned so that the head has the same outputs as in
  the engine. For `remat` see `transformer.forward`.
  """
  tokens, scores, _ = watched_score(
    params, batch, decoder=decoder, num_pages=num_pages, page_size=page_size, remat=remat
  )
  return tokens, scores


def watched_score(
  params: parameters.Params,
  batch: TrainBatch,
  *,
  decoder: Decoder,
  num_pages: int,
  page_size: int,
  remat: transformer.Remat = "none",
  watch: experts.Watch | None = None,
) -> tuple[Array, TokenScores, tuple[Any, ...]]:
  """Works like `score`, and also returns what `watch` keeps of each layer with experts."""
  rows = batch.tokens
  pages = kv_layout.ScratchPages(num_pages, page_size)
  hidden, _, kept = transformer.watched(
    params, rows, pages, decoder=decoder, remat=remat, watch=watch
  )
  tokens, scores = head.sample_and_score(
    params,
    hidden,
    batch.targets,
    batch.sampling,
    jnp.zeros(batch.targets.shape, jnp.uint32),
    rows.positions + 1,
    rows.num_rows,
    numerics_lib.key(0),  # Nothing is sampled here.
    decoder=decoder,
  )
  return tokens, scores, kept


def rollout_gap(scores: TokenScores, batch: TrainBatch) -> dict[str, float]:
  """Returns the gap between the log-probabilities of engine and trainer over a whole batch.

  Keys: kl, raw_kl (k1 over sampled tokens), max_abs_logprob_gap, max_abs_raw_logprob_gap. On the
  tiled path each is exactly 0.0.
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
