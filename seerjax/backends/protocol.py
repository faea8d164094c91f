"""What an implementation of the forward is: five stages, and what their definitions are written in.

    attention_inputs -> write_pages -> attend -> after_attention        layer by layer
    head                                                                once

A stage of rows comes with its definition (`models.attention`, `models.mlp`, `models.head`), which
is written in the `Operations` of what runs it. XLA's implementations run the definition; one
that has a program of its own for a stage runs that, and keeps the contract: a row's bits depend on
that row alone, and are the same under a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from seerjax import numerics as numerics_lib
from seerjax.array_typing import Array
from seerjax.backends.adapters import RowAdapters
from seerjax.ops import attention, rotary, tiles
from seerjax.types import KeyCopies, TokenBatch, TokenScores

# `(operations, shape, axis, weights, rows, one) -> outputs`, of the rows of one tile.
Definition = Callable[..., Any]


@runtime_checkable
class Shape(Protocol):
  """What a stage knows of the model; `models.config.TransformerConfig` has it."""

  @property
  def vocab_size(self) -> int: ...
  @property
  def head_dim(self) -> int: ...
  @property
  def group(self) -> int: ...
  @property
  def norm_eps(self) -> float: ...


@runtime_checkable
class Decoder(Shape, Protocol):
  """What decides whether an implementation can run a model; `TransformerConfig` has it too."""

  @property
  def hidden_size(self) -> int: ...
  @property
  def intermediate_size(self) -> int: ...
  @property
  def num_heads(self) -> int: ...
  @property
  def num_kv_heads(self) -> int: ...
  @property
  def has_qk_norms(self) -> bool: ...


class Stage(NamedTuple):
  """A stage of one model.

  Attributes:
    shape: of the model.
    axis: mesh axis of the slabs, None on one device.
    rows: its definition.
    gradient_of: what the backward pass differentiates in its place; None is `rows` itself.
    is_plain: of a head: the caller knows that no row is biased, filtered or restricted.
  """

  shape: Shape
  axis: str | None
  rows: Definition
  gradient_of: Definition | None = None
  is_plain: bool = False


@runtime_checkable
class Operations(Protocol):
  """What definitions of rows are written in. All but `map_rows` are for use on its rows."""

  @property
  def numerics(self) -> numerics_lib.NumericsConfig:
    """What decides bits."""
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
    """f[n, a] @ f[a, e] -> f32[n, e], with float32 sums."""
    ...

  def dot_rows(self, x: Array, table: Array) -> Array:
    """f[n, d] @ f[v, d]^T -> f32[n, v], with float32 sums."""
    ...

  def contract(self, x: Array, w: Any, one: Array, axis: str | None) -> Array:
    """f[r, n, e] @ f[r, e, d], the local slabs, added in the fixed tree: f[n, d] in x's dtype."""
    ...

  def rms_norm_rows(self, x: Array, scale: Array, eps: float) -> Array:
    """Norms the last axis: f[..., d] -> f[..., d]."""
    ...


@runtime_checkable
class Backend(Operations, Protocol):
  """One implementation, for one record of numerics. Frozen: programs are traced with it."""

  @property
  def smallest_width(self) -> int:
    """Features of a head, at least."""
    ...

  @property
  def holds_logits(self) -> bool:
    """Whether `head` has a row's logits in memory, so that they can be had."""
    ...

  @property
  def waits_for_predicates(self) -> bool:
    """Whether the host waits where a loop or a branch follows a number that a device computed.

    A step is then to have none: its page copies are a program of their own, run where there are
    any, and the host, which has seen the sampling parameters, says where a head is plain.
    """
    ...

  @property
  def steps_per_visit(self) -> int:
    """Decode steps that an engine's visit has at most, where its config does not say."""
    ...

  @property
  def page_axes(self) -> tuple[str, ...]:
    """Axes of one page of one head in each of a layer's arrays f[k, m, ...]: z position, c feature.

    ("zc", "zc") keeps keys and values f[k, m, z, c]; of ("cz", "zc") the keys are f[k, m, c, z].
    All that reads or makes pages outside of a backend follows this (`models.kv_layout`).
    """
    ...

  @property
  def shares_pages_under_gradient(self) -> bool:
    """Whether the gradient of `attend` reaches pages of another sequence of the batch."""
    ...

  @property
  def pads_adapters(self) -> bool:
    """Whether adapters of unlike ranks lie in one array, with zeros behind the smaller ones.

    Then `RowAdapters` has one form. Elsewhere each has its own products: zeros more may change
    what XLA makes of one.
    """
    ...

  @property
  def shares_out_rows(self) -> bool:
    """Whether `RowAdapters.shares` is read."""
    ...

  @property
  def reads_layers(self) -> bool:
    """Whether a layer's weights are read where they lie among those of all layers.

    Elsewhere a layer's single slab is cut out before it is multiplied: a copy of the weights.
    """
    ...

  def whole_rows(self, count: int) -> int:
    """Returns the rows that arrays of `count` rows are allocated for."""
    ...

  def whole_segments(self, count: int) -> int:
    """As `whole_rows`, of segments."""
    ...

  def turns(
    self, config: rotary.RotaryConfig, positions: Array, num_rows: Array
  ) -> tuple[Array, Array]:
    """Positions i32[n] -> cos and sin, f32[n, c / 2], of every layer's rotation."""
    ...

  def attention_inputs(
    self,
    stage: Stage,
    weights: Any,
    rows: Any,
    num_rows: Array,
    adapters: RowAdapters | None = None,
  ) -> Any:
    """Hidden rows f[n, d], cos and sin -> (queries f[n, k, g, c], what a layer's pages take).

    With `adapters` each row has the bits that it has where all rows have its adapter.
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

    Those of `copies` stand at further slots too; with copies it needs no gradient.
    """
    ...

  def attend(
    self,
    q: Array,
    pages: tuple[Array, ...],
    batch: TokenBatch,
    rows: attention.SegmentRows,
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
  ) -> Array:
    """`write_pages` and `attend`, of rows that see one another alone.

    `pages` are zeros that nothing else reads, neither then nor afterwards.
    """
    ...

  def after_attention(
    self,
    stage: Stage,
    weights: Any,
    rows: Any,
    num_rows: Array,
    adapters: RowAdapters | None = None,
  ) -> Array:
    """Hidden rows f[n, d] and what they attended f[n, k, g, c] -> hidden rows f[n, d].

    `adapters` as of `attention_inputs`.
    """
    ...

  def head(
    self, stage: Stage, weights: Any, rows: Any, num_rows: Array
  ) -> tuple[Array, TokenScores]:
    """Tokens i32[n], sampled or given, and their scores; `models.head`."""
    ...
