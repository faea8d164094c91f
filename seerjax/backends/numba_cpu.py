"""The native CPU backend: handlers compiled by numba, batch invariant by construction.

A product's output is one chain of fused multiply-adds in ascending k, a sum is 16 partial sums and
a tree, exp and log are polynomials of IEEE operations (`native`): a row's bits do not depend on
tiles, batches, buckets or threads. A contraction that a mesh may shard has one chain per slab.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax

from seerjax.array_typing import Array
from seerjax.backends.adapters import RowAdapters
from seerjax.backends.native import (
  attention as native_attention,
  experts,
  head,
  layers,
  norms,
  pages as native_pages,
  parted_layers,
  rotation,
)
from seerjax.backends.protocol import HeadStage, MixtureStage, Stage
from seerjax.backends.tiled import Tiled
from seerjax.backends.traits import Traits
from seerjax.ops import attention, rotary
from seerjax.types import KeyCopies, TokenBatch, TokenScores


@dataclasses.dataclass(frozen=True)
class NumbaCpu(Tiled):
  """Implements `protocol.Backend`."""

  traits: ClassVar[Traits] = Traits(
    holds_logits=False,
    # Host work is a large part of a short step: 1, 2, 4, 8 and 16 gave 4.7, 5.6, 6.8, 7.2 and
    # 7.8 thousand tokens per CPU second of nano.
    decode_steps_per_call=8,
    page_axes=("cz", "zc"),
    keeps_pages=False,
    keeps_gate_up=True,
    pads_adapters=True,
    shares_out_rows=False,
    reads_layers=True,
  )

  def turns(
    self, config: rotary.RotaryConfig, positions: Array, num_rows: Array
  ) -> tuple[Array, Array]:
    cos, sin = rotation.table_rows(config, positions, num_rows)
    return cos, sin

  def attention_inputs(
    self,
    stage: Stage,
    weights: Any,
    rows: Any,
    num_rows: Array,
    adapters: RowAdapters | None = None,
  ) -> Any:
    weights = norms.factors(stage.shape.norm_weights, weights, norms.OF_LAYER)
    if adapters is None:
      return layers.attention_inputs(stage, weights, rows, num_rows)
    return layers.adapted_attention_inputs(stage, weights, rows, num_rows, adapters)

  def write_pages(
    self,
    pages: tuple[Array, ...],
    values: tuple[Array, ...],
    slots: Array,
    num_rows: Array,
    copies: KeyCopies | None = None,
  ) -> tuple[Array, ...]:
    key_pages, value_pages = pages
    keys, own_values = values
    return native_pages.write_pages(
      (key_pages, value_pages), (keys, own_values), slots, num_rows, copies
    )

  def attend(
    self,
    q: Array,
    pages: tuple[Array, ...],
    batch: TokenBatch,
    rows: attention.SegmentRows,
    rule: attention.AttentionRule = attention.CAUSAL,
    sinks: Array | None = None,
  ) -> Array:
    del rows
    keys, values = pages
    return native_attention.attend(q, (keys, values), batch, rule, sinks)

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
    del rows
    key_pages, value_pages = (jax.ShapeDtypeStruct(page.shape, page.dtype) for page in pages)
    keys, own_values = values
    return native_attention.attend_own(
      q, (keys, own_values), (key_pages, value_pages), batch, rule, sinks
    )

  def after_attention(
    self,
    stage: Stage,
    weights: Any,
    rows: Any,
    num_rows: Array,
    adapters: RowAdapters | None = None,
  ) -> Array:
    if parted_layers.has_post_norms(stage.shape):
      return parted_layers.after_attention(self._tiled, stage, weights, rows, num_rows, adapters)
    weights = norms.factors(stage.shape.norm_weights, weights, norms.OF_LAYER)
    if adapters is None:
      return layers.after_attention(stage, weights, rows, num_rows)
    return layers.adapted_after_attention(stage, weights, rows, num_rows, adapters)

  def mixture(
    self,
    stage: MixtureStage,
    weights: Any,
    rows: Any,
    num_rows: Array,
    adapters: RowAdapters | None = None,
  ) -> tuple[Array, Array, Array]:
    return experts.after_attention(self._tiled, stage, weights, rows, num_rows, adapters)

  def head(
    self, stage: HeadStage, weights: Any, rows: Any, num_rows: Array
  ) -> tuple[Array, TokenScores]:
    return head.head(self._tiled, stage, weights, rows, num_rows)

  @property
  def _tiled(self) -> Tiled:
    """The backend for stages without a native handler."""
    return Tiled(dataclasses.replace(self.numerics, backend="tiled"))
