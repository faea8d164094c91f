"""GPU backend: kernels (`pallas_kernels`) on all rows at once; their sums are batch invariant.

A layer takes few launches, regardless of the number of slabs. The slabs of columns are one product,
and so are those of a contraction, which a kernel adds as one tree, followed by the residual stream:

  norm | q, k, v = x @ slabs | norms of heads | rotate, write pages | attend
  x + mixed @ slabs | norm | silu(x @ gate) * (x @ up) | x + inner @ slabs

On a mesh, a device adds its own slabs in float32; the sums are gathered and added in the same tree.
Layers with adapters run the definitions of `models`, product by product and slab by slab; if rows
choose among adapters, all rows run with each adapter, and each row selects its own result.

Nothing within a step depends on a number that the host would have to read back: the host knows the
sampling parameters, and passes whether any row is special.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import (
  attention as attention_kernel,
  matmul,
  matmul_parts,
  rms_norm,
  token_logprobs,
)
from seerjax import numerics as numerics_lib, parallel
from seerjax.array_typing import Array
from seerjax.backends import adapters as adapters_lib
from seerjax.backends.adapters import RowAdapters
from seerjax.backends.protocol import Definition, HeadStage, LayerShape, Stage
from seerjax.backends.tiled import Tiled
from seerjax.backends.traits import Traits
from seerjax.ops import attention, norms, rotary, sampling, tiles
from seerjax.types import KeyCopies, TokenBatch, TokenScores

# Keys that the kernel multiplies at a time, at most a split.
KEY_BLOCK = 128


@dataclasses.dataclass(frozen=True)
class MosaicGpu(Tiled):
  """Implements `protocol.Backend`."""

  traits: ClassVar[Traits] = Traits(
    smallest_width=matmul.MULTIPLE,
    holds_logits=False,
    waits_for_predicates=True,
    shares_pages_under_gradient=False,
    trains_on_slabs=False,
    shares_out_rows=False,
  )

  def whole_rows(self, count: int) -> int:
    return count

  def whole_segments(self, count: int) -> int:
    return count

  def map_rows(
    self,
    function: tiles.RowFunction,
    weights: Any,
    rows: Any,
    num_rows: Array,
    *,
    gradient_of: tiles.RowFunction | None = None,
  ) -> Any:
    return tiles.all_rows(function, weights, rows, num_rows, gradient_of=gradient_of)

  def map_slabs(
    self, function: tiles.SlabFunction, shared: Any, slabs: Any, one: Array, axis: str | None
  ) -> Any:
    del one, axis
    return tiles.each_slab(function, shared, slabs)

  def dot(self, x: Array, w: Array) -> Array:
    columns = w.shape[1]
    x, w = _padded(x, 1), _padded(_padded(w, 0), 1)
    out = matmul.matmul(x, w, out_dtype=jnp.float32, interpret=self.numerics.is_interpreted)
    return out[:, :columns]

  def dot_rows(self, x: Array, table: Array) -> Array:
    return matmul.matmul(
      x, table, transposed=True, out_dtype=jnp.float32, interpret=self.numerics.is_interpreted
    )

  def contract(self, x: Array, w: Any, one: Array, axis: str | None) -> Array:
    partials = self.map_slabs(lambda _, slab: self.dot(*slab), (), (x, w), one, axis)
    return parallel.sum_slabs(partials, axis).astype(x.dtype)

  def rms_norm_rows(
    self, x: Array, scale: Array, eps: float, weights: norms.Weights = "w"
  ) -> Array:
    """Works like the tiled one, but rounds only once, at the end."""
    assert weights == "w", f"got {weights!r}; `backends.choice` refuses it"
    flat = x.reshape(-1, x.shape[-1])
    normed = rms_norm.rms_norm(flat, scale, eps=eps, interpret=self.numerics.is_interpreted)
    return normed.reshape(x.shape)

  def add_contraction(self, stream: Array, x: Array, slabs: Array, axis: str | None) -> Array:
    """Returns bf16[n, d] + the rounded sum over all slabs of x bf16[r, n, e] @ bf16[r, e, d].

    x may also have the slabs side by side: bf16[n, r * e].
    """
    interpret = self.numerics.is_interpreted
    if axis is None:
      return matmul.contract_slabs(x, slabs, stream=stream, interpret=interpret)
    own = matmul.contract_slabs(x, slabs, out_dtype=jnp.float32, interpret=interpret)
    sums = parallel.gather_slabs(own[None], axis)
    return matmul_parts.add_partials(
      sums, stream=stream, out_dtype=stream.dtype, interpret=interpret
    )

  def attention_inputs(
    self,
    stage: Stage,
    weights: Any,
    rows: Any,
    num_rows: Array,
    adapters: RowAdapters | None = None,
  ) -> Any:
    return self._in_few(stage, weights, rows, num_rows, adapters, _input_rows)

  def after_attention(
    self,
    stage: Stage,
    weights: Any,
    rows: Any,
    num_rows: Array,
    adapters: RowAdapters | None = None,
  ) -> Array:
    return self._in_few(stage, weights, rows, num_rows, adapters, _output_rows)

  def _in_few(
    self,
    stage: Stage,
    weights: Any,
    rows: Any,
    num_rows: Array,
    adapters: RowAdapters | None,
    definition: Definition,
  ) -> Any:
    """Runs a stage by `definition` where the kernels support it, with each row's adapter."""

    def run(weights: Any) -> Any:
      in_few = _in_few_launches(stage, weights, definition)
      return self.defined(in_few, weights, rows, num_rows)

    return run(weights) if adapters is None else adapters_lib.by_selection(run, weights, adapters)

  def write_pages(
    self,
    pages: tuple[Array, ...],
    values: tuple[Array, ...],
    slots: Array,
    num_rows: Array,
    copies: KeyCopies | None = None,
  ) -> tuple[Array, ...]:
    """Writes all rows at once; nothing is summed, as valid slots differ and padding is dropped.

    The scatter declares its indices unique, which also holds for dropped ones. Otherwise, XLA
    would order them with six more launches to be deterministic. Copies are further rows of the same
    scatter, dropped if they are padding, so that no number is read back.
    """
    is_valid = jnp.arange(slots.shape[0], dtype=jnp.int32) < num_rows
    if copies is not None:
      is_copy = jnp.arange(copies.slots.shape[0], dtype=jnp.int32) < copies.count
      slots = jnp.concatenate([slots, copies.slots])
      is_valid = jnp.concatenate([is_valid, is_copy])

    def write(whole: Array, new: Array) -> Array:
      num_pages, page_size = whole.shape[1:3]
      row = jnp.arange(slots.shape[0], dtype=jnp.int32)
      page = jnp.where(is_valid, slots // page_size, num_pages + row)
      if copies is not None:
        new = jnp.concatenate([new, new[copies.rows]])
      update = jnp.swapaxes(new, 0, 1).astype(whole.dtype)
      place = whole.at[:, page, slots % page_size]
      return place.set(update, mode="drop", unique_indices=True)

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
    assert rule == attention.CAUSAL and sinks is None, f"got {rule}; `backends.choice` refuses it"
    del rows
    keys, values = pages
    config = attention_kernel.Config(
      kv_split=self.numerics.kv_split,
      key_block=min(self.numerics.kv_split, KEY_BLOCK),
      query_tile=self.numerics.query_tile,
    )
    segments = attention_kernel.Segments(
      batch.positions,
      batch.segment_start,
      batch.segment_length,
      batch.page_table,
      batch.num_segments,
    )
    return attention_kernel.attention(
      q, keys, values, segments, config=config, interpret=self.numerics.is_interpreted
    )

  def head(
    self, stage: HeadStage, weights: Any, rows: Any, num_rows: Array
  ) -> tuple[Array, TokenScores]:
    """Computes the head in one kernel, which holds no logits.

    For a biased, filtered or restricted row, the token, its log-probability and its entropy come
    from the tiled program. Raw log-probabilities come from the kernel for every row: a special row
    is forced to its token there. This choice depends on a row's own parameters only.
    """
    hidden, forced, parameters, *_ = rows
    if stage.is_plain:
      return self._kernel_scores(stage, weights, rows)
    is_special = sampling.is_special(parameters)
    tiled = Tiled(dataclasses.replace(self.numerics, backend="tiled"))
    none = jnp.zeros(forced.shape, jnp.float32)
    tokens, special = lax.cond(
      jnp.any(is_special),
      lambda: tiled.head(stage, weights, rows, num_rows),
      lambda: (jnp.zeros_like(forced), TokenScores(none, none, none)),
    )
    own = (hidden, jnp.where(is_special, tokens, forced), *rows[2:])
    tokens, scores = self._kernel_scores(stage, weights, own)
    processed = jax.tree.map(lambda a, b: jnp.where(is_special, a, b), special, scores)
    return tokens, processed._replace(raw_logprob=scores.raw_logprob)

  def _kernel_scores(self, stage: HeadStage, weights: Any, rows: Any) -> tuple[Array, TokenScores]:
    """Returns the kernel's tokens and scores for all rows."""
    hidden, forced, parameters, seeds, positions, _ = rows
    key = numerics_lib.wrap_key(weights["key"])
    fold = lambda seed, position: jax.random.fold_in(jax.random.fold_in(key, seed), position)
    normed = self.rms_norm_rows(hidden, weights["final_norm"], stage.shape.norm_eps)
    tokens, *scores = token_logprobs.token_logprobs(
      normed,
      # Every device of the axis scores whole rows, with the slabs and so the bits of the full
      # table.
      parallel.gather_slabs(weights["head"], stage.axis),
      forced,
      parameters.temperature,
      jax.random.key_data(jax.vmap(fold)(seeds, positions)),
      config=token_logprobs.Config(shards=self.numerics.reduction_shards),
      interpret=self.numerics.is_interpreted,
    )
    return tokens, TokenScores(*scores)


def _in_few_launches(stage: Stage, weights: Any, rows: Definition) -> Stage:
  """Returns the stage with our definition, if the kernels support its slabs without padding."""
  has_adapters = any(name.endswith("_lora") for name in weights)
  widths = [tiles.slab_shape(weights[name]) for name in ("qkv", "out", "gate_up", "down")]
  is_whole = not any(size % matmul.MULTIPLE for shape in widths for size in shape)
  return stage._replace(rows=rows) if is_whole and not has_adapters else stage


def _input_rows(
  kernels: MosaicGpu,
  shape: LayerShape,
  axis: str | None,
  weights: Any,
  rows: Any,
  one: Array,
) -> tuple[Array, Array, Array]:
  """Works like `models.attention.input_rows`, with all slabs and all heads at once."""
  del axis, one
  x, cos, sin = rows
  kind = shape.kind.attention
  num_rows, group, c = x.shape[0], kind.group, kind.head_dim
  normed = kernels.rms_norm_rows(x, weights["attention_norm"], shape.norm_eps)
  interpret = kernels.numerics.is_interpreted
  slabs, bias = tiles.whole_slabs(weights["qkv"]), weights.get("qkv_bias")
  qkv = matmul.matmul(normed, slabs, bias=bias, interpret=interpret)
  # bf16[r, n, e] -> [n, r, heads of a slab, c].
  heads = jnp.swapaxes(qkv.reshape(qkv.shape[0], num_rows, -1, c), 0, 1)
  count = heads.shape[2] // (group + 2)
  parts = jnp.split(heads, [count * group, count * (group + 1)], axis=2)
  q, k, v = (part.reshape(num_rows, -1, c) for part in parts)
  if "query_norm" in weights:
    scales = weights["query_norm"], weights["key_norm"]
    q, k = rms_norm.rms_norm_each((q, k), scales, eps=shape.norm_eps, interpret=interpret)
  q, k = rotary.rotate_rows(q, cos, sin), rotary.rotate_rows(k, cos, sin)
  return q.reshape(num_rows, -1, group, c), k, v


def _output_rows(
  kernels: MosaicGpu,
  shape: LayerShape,
  axis: str | None,
  weights: Any,
  rows: Any,
  one: Array,
) -> Array:
  """Works like `models.mlp.output_rows`, with all slabs at once."""
  del one
  x, mixed = rows
  out, gate_up, down = (tiles.whole_slabs(weights[name]) for name in ("out", "gate_up", "down"))
  x = kernels.add_contraction(x, mixed.reshape(x.shape[0], -1), out, axis)
  normed = kernels.rms_norm_rows(x, weights["mlp_norm"], shape.norm_eps)
  inner = matmul.swiglu(normed, gate_up, interpret=kernels.numerics.is_interpreted)
  return kernels.add_contraction(x, inner, down, axis)


def _padded(x: Array, axis: int) -> Array:
  """Pads with zeros to the kernel's multiple, which does not change a sum; adapters need it."""
  missing = -x.shape[axis] % matmul.MULTIPLE
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, missing)
  return jnp.pad(x, widths) if missing else x
