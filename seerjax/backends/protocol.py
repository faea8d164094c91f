"""Protocol of the backends: five stages of the forward, and operations for their definitions.

    attention_inputs -> write_pages -> attend -> after_attention or mixture     layer by layer
    head                                                                        once

A stage of rows has a definition (`models.attention`, `models.mlp`, `models.experts` and
`models.head`), written in terms of the backend's `Operations`. XLA's backends run the definition; a
backend with a program of its own for a stage runs that, and keeps the contract: a row's bits depend
on that row alone, and are the same under a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, runtime_checkable

from seerjax import numerics as numerics_lib
from seerjax.array_typing import Array
from seerjax.backends.adapters import RowAdapters
from seerjax.backends.traits import Traits
from seerjax.layer_kinds import LayerConfig
from seerjax.ops import attention, norms, rotary, tiles
from seerjax.types import KeyCopies, TokenBatch, TokenScores

# `(operations, shape, axis, weights, rows, one) -> outputs`, for the rows of one tile.
Definition = Callable[..., Any]


@runtime_checkable
class Shape(Protocol):
  """Properties of the model that the head uses; `models.config.TransformerConfig` has them."""

  @property
  def vocab_size(self) -> int: ...
  @property
  def norm_eps(self) -> float: ...
  @property
  def norm_weights(self) -> norms.Weights: ...
  @property
  def logit_soft_cap(self) -> float | None: ...


@runtime_checkable
class FullShape(Shape, Protocol):
  """Properties that decide whether a backend supports a model; `TransformerConfig` has them too."""

  @property
  def hidden_size(self) -> int: ...
  @property
  def layers(self) -> tuple[LayerConfig, ...]: ...
  @property
  def embedding_scale(self) -> float | None: ...


class LayerShape(NamedTuple):
  """Properties of a layer that its stages use.

  Attributes:
    kind: kind of the layer, as its slabs compute it (`LayerConfig.in_slabs`).
    norm_eps: epsilon of its norms.
    norm_weights: what they multiply by.
  """

  kind: LayerConfig
  norm_eps: float
  norm_weights: norms.Weights


class Stage(NamedTuple):
  """A stage of one layer.

  Attributes:
    shape: shape of the layer.
    axis: mesh axis of the slabs, None on one device.
    rows: definition of the stage.
  """

  shape: LayerShape
  axis: str | None
  rows: Definition


class MixtureStage(NamedTuple):
  """The part after attention of a layer with experts, in two definitions around `ops.moe`.

  Attributes:
    shape: shape of the layer.
    axis: mesh axis of the slabs, None on one device.
    routed: definition: (hidden rows, attention outputs) to (hidden rows, normed rows, ids, weights,
      and the shared MLP's output, if there is one).
    added: definition: (hidden rows, the experts' sum f32[n, d], the shared MLP's output) to hidden
      rows.
  """

  shape: LayerShape
  axis: str | None
  routed: Definition
  added: Definition


class HeadStage(NamedTuple):
  """The head of one model.

  Attributes:
    shape: shape of the model.
    axis: mesh axis of the slabs, None on one device.
    rows: definition of the stage.
    gradient_of: function that the backward pass differentiates instead; None is `rows` itself.
    is_plain: the caller knows that no row is biased, filtered or restricted.
  """

  shape: Shape
  axis: str | None
  rows: Definition
  gradient_of: Definition | None = None
  is_plain: bool = False


AnyStage: TypeAlias = Stage | HeadStage


@runtime_checkable
class Operations(Protocol):
  """The operations of row definitions. All but `map_rows` are for use inside a definition."""

  @property
  def numerics(self) -> numerics_lib.NumericsConfig:
    """The numerics configuration."""
    ...

  def map_rows(
    self,
    function: tiles.RowFunction,
    weights: Any,
    rows: Any,
    num_rows: Array,
    *,
    gradient_of: tiles.RowFunction | None = None,
  ) -> Any:
    """Applies a row-wise function to every row; see `tiles.map_rows`."""
    ...

  def map_slabs(
    self, function: tiles.SlabFunction, shared: Any, slabs: Any, one: Array, axis: str | None
  ) -> Any:
    """Applies a function to every local slab; see `tiles.map_slabs`."""
    ...

  def dot(self, x: Array, w: Array) -> Array:
    """Returns f[n, a] @ f[a, e] -> f32[n, e], with float32 sums."""
    ...

  def dot_rows(self, x: Array, table: Array) -> Array:
    """Returns f[n, d] @ f[v, d]^T -> f32[n, v], with float32 sums."""
    ...

  def contract(self, x: Array, w: Any, one: Array, axis: str | None) -> Array:
    """Returns f[r, n, e] @ f[r, e, d] (local slabs), added in the fixed tree, f[n, d] like x."""
    ...

  def rms_norm_rows(
    self, x: Array, scale: Array, eps: float, weights: norms.Weights = "w"
  ) -> Array:
    """Normalises the last axis: f[..., d] -> f[..., d]; the factor is `scale`, or 1 + `scale`."""
    ...


@runtime_checkable
class Backend(Operations, Protocol):
  """An implementation of the stages for one numerics config; frozen, as programs trace it."""

  # What differs from other backends besides the programs.
  traits: ClassVar[Traits]

  def whole_rows(self, count: int) -> int:
    """Returns the number of rows for which arrays of `count` rows are allocated."""
    ...

  def whole_segments(self, count: int) -> int:
    """Works like `whole_rows`, for segments."""
    ...

  def turns(
    self, config: rotary.RotaryConfig, positions: Array, num_rows: Array
  ) -> tuple[Array, Array]:
    """Returns cos and sin, f32[n, c / 2], of every layer's rotation at positions i32[n]."""
    ...

  def attention_inputs(
    self,
    stage: Stage,
    weights: Any,
    rows: Any,
    num_rows: Array,
    adapters: RowAdapters | None = None,
  ) -> Any:
    """Maps hidden rows f[n, d], cos and sin to (queries f[n, k, g, c], keys and values for pages).

    With `adapters`, each row has the same bits as if all rows had its adapter.
    """
    ...

  def write_pages(
    self,
    pages: tuple[Array, ...],
    values: tuple[Array, ...],
    slots: Array,
    num_rows: Array,
    copies: KeyCopies | None = None,
  ) -> tuple[Array, ...]:
    """Returns a layer's pages with the first `num_rows` rows' values f[n, k, c] at their slots.

    The values of `copies` are also written to further slots; with copies, no gradient is needed.
    """
    ...

  def attend(
    self,
    q: Array,
    pages: tuple[Array, ...],
    batch: TokenBatch,
    rows: attention.SegmentRows,
    rule: attention.AttentionRule = attention.CAUSAL,
    sinks: Array | None = None,
  ) -> Array:
    """Attention of every row over its own sequence's pages: f[n, k, g, c]; `ops.attention`."""
    ...

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
    """Combines `write_pages` and `attend` for rows that attend only to each other.

    `pages` are zeros that nothing else reads, neither during the call nor afterwards.
    """
    ...

  def after_attention(
    self,
    stage: Stage,
    weights: Any,
    rows: Any,
    num_rows: Array,
    adapters: RowAdapters | None = None,
  ) -> Any:
    """Maps hidden rows f[n, d] and attention outputs f[n, k, g, c] to hidden rows f[n, d].

    `adapters` as in `attention_inputs`.
    """
    ...

  def mixture(
    self,
    stage: MixtureStage,
    weights: Any,
    rows: Any,
    num_rows: Array,
    adapters: RowAdapters | None = None,
  ) -> tuple[Array, Array, Array]:
    """Does what `after_attention` does, for a layer with experts (`models.experts`).

    Also returns the normed rows f[n, d] and their experts i32[n, e]; a gradient reaches the former.
    """
    ...

  def head(
    self, stage: HeadStage, weights: Any, rows: Any, num_rows: Array
  ) -> tuple[Array, TokenScores]:
    """Returns tokens i32[n], sampled or given, and their scores; `models.head`."""
    ...
