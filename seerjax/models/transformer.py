"""Forward pass of the decoder: layers of the kinds in its shape.

    embed -> [ attention inputs -> write pages -> attend -> after attention ] x layers -> head

`forward` serves prefill chunks, decoding, verification and training: it takes flat token rows, a
segment table and pages, and returns hidden rows and pages. `head` turns hidden rows into tokens.

Up to `UNROLLED_LAYERS` layers are unrolled in the program. The weights of a deeper model are
stacked, and one layer's program is looped over them (`stacked`), to the same bits; if layers of
equal shapes have different kinds, a turn of the loop runs the layers of one period
(`TransformerConfig.period`). Then the keys of all layers of a kind are in one pool, a page's layers
side by side, and a page index includes the layer's index: the loop carry is updated in place, and
no layer's pages are ever sliced out. Layers of different shapes are always unrolled.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
from typing import Any, Literal

import jax
from jax import ad_checkpoint, lax
import jax.numpy as jnp

from seerjax.array_typing import Array, Float, Int
from seerjax.backends.protocol import Backend, Stage
from seerjax.layer_kinds import Experts
from seerjax.models import (
  adapters as adapters_lib,
  attention as model_attention,
  embedding,
  experts,
  kv_layout,
  mlp,
  parameters,
)
from seerjax.models.decoder import Decoder
from seerjax.models.parameters import Params
from seerjax.ops import attention, tiles
from seerjax.types import KeyCopies, PageRows, TokenBatch

# What a gradient keeps of the forward pass.
Remat = Literal["none", "layer", "layer_offloaded"]
REMATS = ("none", "layer", "layer_offloaded")
# Memory kind for each layer's input under "layer_offloaded", and its checkpoint name.
HOST_MEMORY, LAYER_INPUT = "pinned_host", "layer_input"

# A layer's products over slabs, which hold most of its weights.
SLABS = ("qkv", "out", "gate_up", "down")
# Of a layer's experts, only those that a row has chosen are read.
EXPERTS = ("expert_gate_up", "expert_down")


def forward(
  params: Params,
  batch: TokenBatch,
  pages: kv_layout.Pages | kv_layout.ScratchPages,
  *,
  decoder: Decoder,
  remat: Remat = "none",
  key_copies: KeyCopies | None = None,
  adapters: Int[Array, "n"] | None = None,
  kinds: Sequence[PageRows] = (),
) -> tuple[Float[Array, "n d"], kv_layout.Pages]:
  """Runs every row through every layer.

  Args:
    params: `compute_params` of the master weights; under `shard_map` the slabs of this device.
      Stacked layers run as a loop over one program. `params["adapters"]` gets no gradient.
    batch: rows and segments.
    pages: keys and values of all sequences (`empty_pages`); the keys and values of the batch's rows
      are written before they are read. `ScratchPages` if the batch needs no other rows; a gradient
      requires them where `empty_pages` has one pool for all layers, or slabs share heads.
    decoder: the model as it was decided (`models.decoder.decide`).
    remat: rematerialisation for a gradient: "none" recomputes nothing, "layer" keeps only each
      layer's input and recomputes the layer in the backward pass, "layer_offloaded" keeps that
      input in host memory. The bits do not depend on it.
    key_copies: rows with keys and values that every layer also writes to further slots, before
      attention, so that a token tree computes shared tokens once. It changes no row's bits.
    adapters: i32[n], index into `params["adapters"]` of each row, 0 for none (`models.adapters`);
      None if the weights have no adapters by row.
    kinds: slots and page tables of the second and further kinds of pages; () if those of `batch`
      are valid for all kinds.

  Returns:
    (hidden rows f[n, d] before the final norm, pages with the rows' keys and values; () for scratch
    pages).

  Raises:
    NotImplementedError: from a gradient through pages that all layers share, heads that several
      slabs share, or key copies.
    ValueError: for stacked layers with pages of single ones, or key copies with scratch pages,
      which nothing reads afterwards.
  """
  x, pages, _ = _run(params, batch, pages, decoder, remat, key_copies, adapters, kinds=kinds)
  return x, pages


def watched(
  params: Params,
  batch: TokenBatch,
  pages: kv_layout.Pages | kv_layout.ScratchPages,
  *,
  decoder: Decoder,
  remat: Remat = "none",
  watch: experts.Watch | None = None,
) -> tuple[Float[Array, "n d"], kv_layout.Pages, tuple[Any, ...]]:
  """Works like `forward`, and lets `watch` see the choices of experts.

  Returns:
    (hidden rows and pages as `forward`, what `watch` keeps of each layer with experts).
  """
  return _run(params, batch, pages, decoder, remat, watch=watch)


def _run(
  params: Params,
  batch: TokenBatch,
  pages: kv_layout.Pages | kv_layout.ScratchPages,
  decoder: Decoder,
  remat: Remat,
  key_copies: KeyCopies | None = None,
  adapters: Array | None = None,
  watch: experts.Watch | None = None,
  kinds: Sequence[PageRows] = (),
) -> tuple[Array, kv_layout.Pages, tuple[Any, ...]]:
  """Implements `forward` and `watched`."""
  config, numerics, backend = decoder.shape, decoder.numerics, decoder.backend
  num_rows = batch.tokens.shape[0]
  of_kinds = [batch._replace(slots=one.slots, page_table=one.page_table) for one in kinds]
  batch, *of_kinds = (_whole_tiles(one, backend) for one in (batch, *of_kinds))
  is_pool = kv_layout.is_pool(pages, decoder)
  is_scratch = isinstance(pages, kv_layout.ScratchPages)
  if is_scratch and key_copies is not None:
    raise ValueError(
      f"forward: got {key_copies.rows.shape[0]} key copies with ScratchPages, expected pages that"
      " store keys for other segments; pass empty_pages, or no key_copies."
    )
  rotaries = dict.fromkeys(kind.attention.rotary for kind in config.layers)
  turns = {own: backend.turns(own, batch.positions, batch.num_rows) for own in rotaries}
  page_size = kv_layout.page_size_of(pages, decoder)
  windows, places = decoder.pages.windows, kv_layout.places_of(decoder)
  batches = [batch, *of_kinds] if of_kinds else [batch] * len(windows)
  segment_rows = [
    attention.segment_rows(own, numerics, page_size, window)
    for own, window in zip(batches, windows, strict=True)
  ]
  chosen = None
  if "adapters" in params:
    assert adapters is not None and not is_scratch, "adapters by row are for batches of engines"
    of_rows = tiles.padded(adapters, batch.tokens.shape[0])
    chosen = adapters_lib.of_rows(params, of_rows, batch.num_rows, backend)

  def layer(x: Array, weights: Params, own: kv_layout.LayerPages, index: Array | int, place: int):
    """Runs layer `index` with its pages f[k, m, ...]; in a pool, m counts pages of all layers.

    Layer `place` has the same kind; it is known while tracing.
    """
    shape = config.layer_shape(place, numerics.reduction_shards)
    cos, sin = turns[shape.kind.attention.rotary]
    inputs = Stage(shape, decoder.axis, model_attention.input_rows)
    outputs = Stage(shape, decoder.axis, mlp.output_rows)
    own_kind, pages_kind = shape.kind.attention, places[place].kind
    rows, own_batch, copies = segment_rows[pages_kind], batches[pages_kind], key_copies
    if kinds and pages_kind and copies is not None:
      copies = copies._replace(slots=kinds[pages_kind - 1].copy_slots)
    if is_pool:
      own_index, count = _in_pool(decoder, places, index, place)
      own_page = lambda page: kv_layout.page_in_pool(page, own_index, count)
      own_slots = lambda slots: own_page(slots // page_size) * page_size + slots % page_size
      own_batch = own_batch._replace(
        slots=own_slots(own_batch.slots), page_table=own_page(own_batch.page_table)
      )
      rows = rows._replace(page_table=own_page(rows.page_table))
      if copies is not None:
        copies = copies._replace(slots=own_slots(copies.slots))
    own_adapters = None if chosen is None else chosen.of_layer(index)
    q, *new = backend.attention_inputs(inputs, weights, (x, cos, sin), batch.num_rows, own_adapters)
    if copies is not None:
      why = "key copies, expected one of a forward without them; pass no key_copies"
      new = [_without_gradient(values, why) for values in new]
    # Sinks f[r, k g / r] of local slabs, by local head.
    sinks = weights["sinks"].reshape(q.shape[1:3]) if own_kind.has_sinks else None
    if is_scratch:
      mixed = backend.attend_own(q, own, tuple(new), batch, rows, own_kind.rule, sinks)
    else:
      new = [_stored_heads(values, own[0].shape[0]) for values in new]
      own = backend.write_pages(own, tuple(new), own_batch.slots, batch.num_rows, copies)
      mixed = backend.attend(q, own, own_batch, rows, own_kind.rule, sinks)
    rest = (x, mixed), batch.num_rows, own_adapters
    if isinstance(shape.kind.feed_forward, Experts):
      x, kept = experts.after_attention(backend, shape, decoder.axis, weights, *rest, watch)
      return x, own, kept
    return backend.after_attention(outputs, weights, *rest), own, ()

  def again(x: Array, weights: Params, own: kv_layout.LayerPages, index: int, place: int):
    # A gradient's pages are all zero; they are materialised only when the layer runs.
    zero = tiles.late_zeros((), own[0].dtype, lax.stop_gradient(x))
    run = _computed_again(functools.partial(layer, index=index, place=place), remat)
    return run(x, weights, tuple(leaf + zero for leaf in own))

  x = embedding.rows_of(params["embed"], batch.tokens, decoder.axis)
  if config.embedding_scale is not None:
    x = embedding.scaled(x, config.embedding_scale, batch.num_rows, backend)
  if not (is_scratch or config.shares_kv_shape):
    params = parameters.unstacked(params)  # Each layer has pages of its own shape.
  if is_scratch:
    (x, kept), pages = _with_scratch(decoder, remat, pages, layer, x, params), ()
  elif is_pool:
    x, pages, kept = _with_pools(decoder, layer, x, params, pages)
  elif parameters.is_stacked(params):
    raise ValueError(
      f"forward: got stacked layers and a pair of pages for each of {len(pages)}, expected one pool"
      " for all layers; use empty_pages of the same model, or unstacked weights."
    )
  else:
    run_layer = layer if remat == "none" else again
    new_pages, kept = [], []
    for index, (weights, own) in enumerate(zip(params["layers"], pages, strict=True)):
      x, own, seen = run_layer(x, weights, own, index, index)
      new_pages.append(own)
      kept.append(seen)
    pages = tuple(new_pages)
  return x[:num_rows], pages, tuple(own for own in kept if jax.tree.leaves(own))


def _stored_heads(values: Array, count: int) -> Array:
  """Returns the values f[n, k, c] of the heads that pages store: of equal heads, the first."""
  computed = values.shape[1]
  if computed == count:
    return values
  why = "pages of heads that slabs share, expected one through ScratchPages; pass ScratchPages"
  return _without_gradient(values, why)[:, :: computed // count]


def _computed_again(layer: Any, remat: Remat) -> Any:
  """Returns a layer (input, ...) with a gradient that keeps only the input, on device or host."""
  if remat == "layer":
    return jax.checkpoint(layer)

  def named(x: Array, *rest: Any) -> Any:
    return layer(ad_checkpoint.checkpoint_name(x, LAYER_INPUT), *rest)

  policy = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[LAYER_INPUT],
    offload_src="device",
    offload_dst=HOST_MEMORY,
  )
  return jax.checkpoint(named, policy=policy)


def _whole_tiles(batch: TokenBatch, backend: Backend) -> TokenBatch:
  """Returns the batch padded to whole tiles of rows and segments, as in engine and trainer."""
  rows = backend.whole_rows(batch.tokens.shape[0])
  segments = backend.whole_segments(batch.segment_start.shape[0])
  return batch._replace(
    tokens=tiles.padded(batch.tokens, rows),
    positions=tiles.padded(batch.positions, rows),
    slots=tiles.padded(batch.slots, rows),
    segment_start=tiles.padded(batch.segment_start, segments),
    segment_length=tiles.padded(batch.segment_length, segments),
    page_table=tiles.padded(batch.page_table, segments),
  )


def _with_scratch(
  decoder: Decoder,
  remat: Remat,
  pages: kv_layout.ScratchPages,
  layer: Any,
  x: Array,
  params: Params,
) -> tuple[Array, Sequence[Any]]:
  """Runs `layer` once per layer, each time on fresh pages; also returns what each layer keeps."""
  kv_layout.check_page_size(pages.page_size, decoder.numerics)
  tensor_parallel_size = 1 if decoder.axis is None else lax.axis_size(decoder.axis)
  dtype, period = decoder.numerics.dtype, decoder.shape.period

  def zeros(shape: tuple[int, ...], x: Array) -> Array:
    if remat != "none":
      return tiles.late_zeros(shape, dtype, lax.stop_gradient(x))
    return jnp.zeros(shape, dtype)

  def run(x: Array, weights: Params, place: int) -> tuple[Array, Any]:
    shapes = kv_layout.scratch_of_layer(decoder, pages, tensor_parallel_size, place)

    def body(x: Array, weights: Params) -> tuple[Array, Any]:
      fresh = {shape: zeros(shape, x) for shape in shapes}  # Arrays of one shape share zeros.
      x, _, kept = layer(x, weights, tuple(fresh[shape] for shape in shapes), 0, place)
      return x, kept

    return (body if remat == "none" else _computed_again(body, remat))(x, weights)

  if parameters.is_stacked(params):

    def turn(x: Array, weights: Params) -> tuple[Array, list[Any]]:
      kept = []
      for place in range(period):
        x, own = run(x, _of_place(weights, place, period), place)
        kept.append(own)
      return x, kept

    x, kept = lax.scan(turn, x, _by_period(params["layers"], period))
    return x, _by_layer(kept, decoder.shape.num_layers // period)
  kept = []
  for place, weights in enumerate(params["layers"]):
    x, own = run(x, weights, place)
    kept.append(own)
  return x, kept


def _by_layer(kept: list[Any], num_turns: int) -> list[Any]:
  """Returns what each layer keeps, from what the turns of a loop stacked for each place."""
  turns = [jax.tree.map(lambda leaf, i=i: leaf[i], kept) for i in range(num_turns)]
  return [own for turn in turns for own in turn]


def _by_period(stacked: Params, period: int) -> Params:
  """Returns stacked layers f[l, ...] as f[l / p, p, ...], for a loop; as they are if p is 1."""
  if period == 1:
    return stacked
  return jax.tree.map(lambda leaf: leaf.reshape(-1, period, *leaf.shape[1:]), stacked)


def _of_place(weights: Params, place: int, period: int) -> Params:
  """Returns the weights of one layer of a turn over `_by_period`."""
  return weights if period == 1 else jax.tree.map(lambda leaf: leaf[place], weights)


def _in_pool(
  decoder: Decoder, places: Sequence[kv_layout.Place], index: Array | int, place: int
) -> tuple[Array | int, int]:
  """Returns the place of layer `index`, of the kind of layer `place`, in the pool of its kind.

  Returns:
    (number of earlier layers in the pool, number of all its layers).
  """
  if len(decoder.pages.windows) == 1:
    return index, decoder.shape.num_layers
  period = decoder.shape.period
  kinds, own = [one.kind for one in places], places[place].kind
  in_period, before = kinds[:period].count(own), kinds[: place % period].count(own)
  return index // period * in_period + before, kinds.count(own)


def _with_pools(
  decoder: Decoder,
  layer: Any,
  x: Array,
  params: Params,
  pools: kv_layout.Pages,
) -> tuple[Array, kv_layout.Pages, Sequence[Any]]:
  """Runs `layer` once per layer on pools of pages f[k, m, l, ...], updated in place.

  Also returns what each layer keeps.
  """
  kinds = [one.kind for one in kv_layout.places_of(decoder)]
  num_layers, period = decoder.shape.num_layers, decoder.shape.period
  counts = [pool[0].shape[2] for pool in pools]
  expected = [kinds.count(kind) for kind in range(len(decoder.pages.windows))]
  assert counts == expected, f"got pages of {counts} layers, expected {expected}"
  shapes = jax.tree.map(lambda leaf: leaf.shape, pools)
  flat = tuple(map(kv_layout.flat_pool, pools))

  def run(x: Array, weights: Params, flat: Any, index: Array | int, place: int) -> Any:
    kind = kinds[place]
    x, own, seen = layer(x, weights, flat[kind], index, place)
    return x, (*flat[:kind], own, *flat[kind + 1 :]), seen

  if parameters.is_stacked(params):
    # Slabs are read one by one where they are multiplied; slicing out a layer would copy it.
    layers = params["layers"]
    is_read = lambda leaf: decoder.backend.traits.reads_layers or leaf.shape[1] > 1
    names = [name for name in SLABS if name in layers and is_read(layers[name])]
    names += [name for name in EXPERTS if name in layers]
    rest = {name: leaf for name, leaf in layers.items() if name not in names}

    def body(carry: Any, turn: Any) -> tuple[Any, list[Any]]:
      (weights, number), kept = turn, []
      for place in range(period):
        index = number if period == 1 else number * period + place
        slabs = {name: tiles.LayerSlabs(layers[name], index) for name in names}
        own_weights = _of_place(weights, place, period) | slabs
        *carry, seen = run(carry[0], own_weights, carry[1], index, place)
        kept.append(seen)
      return tuple(carry), kept

    numbers = jnp.arange(num_layers // period, dtype=jnp.int32)
    (x, flat), kept = lax.scan(body, (x, flat), (_by_period(rest, period), numbers))
    kept = _by_layer(kept, num_layers // period)
  else:
    kept = []
    for index, weights in enumerate(params["layers"]):
      x, flat, seen = run(x, weights, flat, index, index)
      kept.append(seen)
  pools = jax.tree.map(lambda leaf, shape: leaf.reshape(shape), flat, shapes)
  x = _without_gradient(
    x,
    "pages that all layers share, expected one through ScratchPages (each layer would have kept all"
    " pages); pass ScratchPages",
  )
  return x, pools, kept


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _without_gradient(x: Array, through: str) -> Array:
  return x


def _refuse_gradient(x, through):
  raise NotImplementedError(f"forward: got a gradient f{list(x.shape)} through {through}.")


_without_gradient.defvjp(_refuse_gradient, lambda through, _, cotangent: (cotangent,))
