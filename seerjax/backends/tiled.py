"""The portable XLA backend: one compiled program for one tile of rows (`ops`)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax.numpy as jnp

from seerjax import numerics as numerics_lib
from seerjax.array_typing import Array
from seerjax.backends import adapters as adapters_lib
from seerjax.backends.adapters import RowAdapters
from seerjax.backends.protocol import AnyStage, HeadStage, MixtureStage, Stage
from seerjax.backends.traits import Traits
from seerjax.ops import attention, linear, moe, norms, rotary, tiles
from seerjax.types import KeyCopies, TokenBatch, TokenScores

# Weights that only a row's experts have, by their names in `ops.moe`; the second ones are adapters.
EXPERTS = {"expert_gate_up": "gate_up", "expert_down": "down"}
EXPERT_ADAPTERS = {f"{name}_lora": f"{short}_lora" for name, short in EXPERTS.items()}


def slabs_of(weights: Any) -> dict[str, Any]:
  """Returns the slabs of a layer's experts and of their adapters, as `ops.moe` reads them."""
  slabs = {short: weights[name] for name, short in EXPERTS.items()}
  adapters = {short: weights[name] for name, short in EXPERT_ADAPTERS.items() if name in weights}
  return slabs | {short: _by_expert(adapter) for short, adapter in adapters.items()}


def _by_expert(adapter: dict[str, Any]) -> dict[str, Any]:
  """Returns an adapter with its scale repeated for every expert."""
  return adapter | {"scale": jnp.broadcast_to(adapter["scale"], tiles.leading(adapter["a"], 2))}


@dataclasses.dataclass(frozen=True)
class Tiled:
  """Implements `protocol.Backend`.

  Attributes:
    numerics: the numerics configuration.
  """

  traits: ClassVar[Traits] = Traits()

  numerics: numerics_lib.NumericsConfig

  def whole_rows(self, count: int) -> int:
    return tiles.whole(count, tiles.tile_rows(self.numerics))

  def whole_segments(self, count: int) -> int:
    return tiles.whole(count, self.numerics.slot_tile)

  def map_rows(
    self,
    function: tiles.RowFunction,
    weights: Any,
    rows: Any,
    num_rows: Array,
    *,
    gradient_of: tiles.RowFunction | None = None,
  ) -> Any:
    return tiles.map_rows(function, weights, rows, num_rows, self.numerics, gradient_of=gradient_of)

  def map_slabs(
    self, function: tiles.SlabFunction, shared: Any, slabs: Any, one: Array, axis: str | None
  ) -> Any:
    return tiles.map_slabs(function, shared, slabs, one, axis)

  def dot(self, x: Array, w: Array) -> Array:
    return linear.dot(x, w)

  def dot_rows(self, x: Array, table: Array) -> Array:
    return linear.dot_rows(x, table)

  def contract(self, x: Array, w: Any, one: Array, axis: str | None) -> Array:
    return linear.contract(x, w, one, axis)

  def rms_norm_rows(
    self, x: Array, scale: Array, eps: float, weights: norms.Weights = "w"
  ) -> Array:
    return norms.rms_norm_rows(x, scale, eps, weights)

  def turns(
    self, config: rotary.RotaryConfig, positions: Array, num_rows: Array
  ) -> tuple[Array, Array]:
    rows = lambda _, positions, __: rotary.table_rows(positions, config)
    return self.map_rows(rows, (), positions, num_rows)

  def attention_inputs(
    self,
    stage: Stage,
    weights: Any,
    rows: Any,
    num_rows: Array,
    adapters: RowAdapters | None = None,
  ) -> Any:
    return self._adapted(stage, weights, rows, num_rows, adapters)

  def write_pages(
    self,
    pages: tuple[Array, ...],
    values: tuple[Array, ...],
    slots: Array,
    num_rows: Array,
    copies: KeyCopies | None = None,
  ) -> tuple[Array, ...]:
    def write(whole: Array, new: Array) -> Array:
      whole = attention.write_pages(whole, new, slots, num_rows)
      return whole if copies is None else attention.write_copies(whole, new, copies)

    return tuple(write(whole, new) for whole, new in zip(pages, values, strict=True))

  def attend(
    self,
    q: Array,
    pages: tuple[Array, ...],
    batch: TokenBatch,
    rows: attention.SegmentRows,
    rule: attention.AttentionRule = attention.CAUSAL,
    sinks: Array | None = None,
  ) -> Array:
    keys, values = pages
    numerics = self.numerics
    return attention.attend(q, keys, values, batch, rows, numerics, rule=rule, sinks=sinks)

  def attend_own(
    self,
    q: Array,
    pages: tuple[Array, ...],
    values: tuple[Array, ...],
    batch: TokenBatch,
    rows: attention.SegmentRows,
    rule: attention.AttentionRule = attention.CAUSAL,
    sinks: Array | None = None,
  ) -> Array:
    pages = self.write_pages(pages, values, batch.slots, batch.num_rows)
    return self.attend(q, pages, batch, rows, rule, sinks)

  def after_attention(
    self,
    stage: Stage,
    weights: Any,
    rows: Any,
    num_rows: Array,
    adapters: RowAdapters | None = None,
  ) -> Any:
    return self._adapted(stage, weights, rows, num_rows, adapters)

  def mixture(
    self,
    stage: MixtureStage,
    weights: Any,
    rows: Any,
    num_rows: Array,
    adapters: RowAdapters | None = None,
  ) -> tuple[Array, Array, Array]:
    of_experts = {*EXPERTS, *EXPERT_ADAPTERS}
    of_rows = {name: leaf for name, leaf in weights.items() if name not in of_experts}
    own = None if adapters is None else adapters.without(of_experts)
    routed = Stage(stage.shape, stage.axis, stage.routed)
    x, normed, ids, chosen, *others = self._adapted(routed, of_rows, rows, num_rows, own)
    given, rest = (normed, ids, chosen, slabs_of(weights)), (num_rows, stage.axis, self.numerics)
    if adapters is None or not adapters.have(of_experts):
      mixed = moe.experts(*given, *rest)
    else:
      mixed = moe.chosen_experts(*given, _choices(adapters), adapters.rows, *rest)
    scales = {name: weights[name] for name in ("mlp_out_norm",) if name in weights}
    added = Stage(stage.shape, stage.axis, stage.added)
    return self.defined(added, scales, (x, mixed, *others), num_rows), normed, ids

  def head(
    self, stage: HeadStage, weights: Any, rows: Any, num_rows: Array
  ) -> tuple[Array, TokenScores]:
    return self.defined(stage, weights, rows, num_rows)

  def defined(self, stage: AnyStage, weights: Any, rows: Any, num_rows: Array) -> Any:
    """Runs a stage's definition, tile by tile."""
    bind = lambda definition: functools.partial(definition, self, stage.shape, stage.axis)
    given = stage.gradient_of if isinstance(stage, HeadStage) else None
    gradient_of = None if given is None else bind(given)
    return self.map_rows(bind(stage.rows), weights, rows, num_rows, gradient_of=gradient_of)

  def _adapted(
    self, stage: AnyStage, weights: Any, rows: Any, num_rows: Array, adapters: RowAdapters | None
  ) -> Any:
    """Works like `defined`, with each row's adapter."""
    if adapters is None:
      return self.defined(stage, weights, rows, num_rows)
    definition = functools.partial(stage.rows, self, stage.shape, stage.axis)
    return adapters_lib.by_tile(definition, weights, adapters, rows, num_rows, self.numerics)


def _choices(adapters: RowAdapters) -> list[tiles.Choices]:
  """Returns the adapters of experts among which rows choose."""

  def at(form: adapters_lib.Form, index: Any) -> dict[str, Any]:
    found = adapters.in_place(form, index)
    names = [name for name in EXPERT_ADAPTERS if name in found]
    return {EXPERT_ADAPTERS[name]: _by_expert(found[name]) for name in names}

  return [tiles.Choices(form.count, functools.partial(at, form)) for form in adapters.forms]
