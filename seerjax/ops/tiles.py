"""Row tiles and slabs: the two loops that make a row's bits independent of everything around it.

    map_rows   one compiled program of `row_tile` rows, run ceil(num_rows / row_tile) times
    map_slabs  one program of one slab of a sharded dimension, run once per local slab

Both trip counts are traced even where they are static: XLA inlines a loop of one trip and fuses its
body with the neighbours, which changes bits. Both are `custom_vjp`s with the loop as forward pass;
the backward pass is the gradient of chunks of rows, and slab by slab. So a value under `grad` has
the value's bits, and a gradient has the same bits on any number of devices that share the slabs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from seerjax import numerics as numerics_lib, parallel
from seerjax.array_typing import Array

# Rows per chunk of a backward pass; it bounds the memory.
BACKWARD_ROWS = 512

RowFunction = Callable[[Any, Any, Array], Any]
SlabFunction = Callable[[Any, Any], Any]


def traced_one(anchor: Any) -> Array:
  """Returns i32[] 1 as a value unknown to XLA: `anchor` (i32[]) is never negative.

  Loop bounds are multiplied by it, so that XLA never knows that a loop runs once.
  """
  return jnp.where(anchor >= 0, jnp.int32(1), jnp.int32(0))


def whole(count: int, tile: int) -> int:
  """Returns `count` rounded up to whole tiles, at least two: the rows to allocate.

  XLA sees that slicing the only tile is the identity, moves the reading ops out of the loop and
  fuses them with the neighbours, which changes bits. Slicing rows to an odd count between two loops
  changed some bits too; nothing is sliced off whole tiles.
  """
  return max(2, -(-count // tile)) * tile


def tile_rows(numerics: numerics_lib.NumericsConfig) -> int:
  """Returns the rows of a tile, at least two: `row_tile`, or the platform's default.

  XLA turns a product of one row into a sum and fuses it with its surroundings, which made an
  adapter's bits depend on the number of devices.
  """
  return max(2, numerics_lib.with_row_tile(numerics).row_tile)


def padded(tree: Any, count: int) -> Any:
  """Returns every leaf `[n, ...]` padded with zeros to `count` rows."""
  return jax.tree.map(lambda leaf: _with_zero_rows(leaf, count - leaf.shape[0]), tree)


def late_zeros(shape: tuple[int, ...], dtype: Any, anchor: Array) -> Array:
  """Returns zeros that are not materialised before `anchor` (floats of any shape).

  XLA materialises constants at the start of a program, with a copy for every loop that starts from
  one. In a gradient of many layers, those copies would take most of its memory.
  """
  if not anchor.size:
    return jnp.zeros(shape, dtype)
  first = lax.slice(anchor, (0,) * anchor.ndim, (1,) * anchor.ndim).reshape(())
  bits = lax.bitcast_convert_type(first.astype(jnp.float32), jnp.int32)
  # Never negative, which XLA does not know: 0 for any value, NaN included.
  zero = jnp.minimum(bits & jnp.int32(0x7FFFFFFF), 0)
  return jnp.broadcast_to(zero.astype(dtype), shape)


def _is_float(leaf: Any) -> bool:
  return jnp.issubdtype(leaf.dtype, jnp.floating)


def _split_floats(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
  """Returns the float leaves, and a function that puts new ones back among the others."""
  leaves, structure = jax.tree.flatten(tree)
  floats = [leaf for leaf in leaves if _is_float(leaf)]

  def rebuild(new_floats: list[Any]) -> Any:
    source = iter(new_floats)
    return structure.unflatten([next(source) if _is_float(leaf) else leaf for leaf in leaves])

  return floats, rebuild


def _with_zero_rows(leaf: Array, count: int) -> Array:
  if count == 0:
    return leaf
  return jnp.concatenate([leaf, jnp.zeros((count, *leaf.shape[1:]), leaf.dtype)])


def _tiled(function: RowFunction, row_tile: int, weights: Any, rows: Any, num_rows: Array) -> Any:
  """The loop itself. Output rows beyond the last tile are zero."""
  count = jax.tree.leaves(rows)[0].shape[0]
  padding = whole(count, row_tile) - count
  rows = jax.tree.map(lambda leaf: _with_zero_rows(leaf, padding), rows)
  one = traced_one(num_rows)
  empty = _empty_of(function, row_tile, weights, rows, one)
  num_tiles = (num_rows + (row_tile - 1)) // row_tile
  out = _tile_loop(function, row_tile, weights, rows, (jnp.int32(0), num_tiles), one, empty)
  return jax.tree.map(lambda leaf: leaf[:count], out)


def _tile_of(rows: Any, start: Array, row_tile: int) -> Any:
  return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, row_tile, 0), rows)


def _empty_of(function: RowFunction, row_tile: int, weights: Any, rows: Any, one: Array) -> Any:
  """Returns zeros for the outputs of all rows, which are whole tiles."""
  tile = lambda: function(weights, _tile_of(rows, jnp.int32(0), row_tile), one)
  anchor = next((leaf for leaf in jax.tree.leaves(rows) if _is_float(leaf)), None)
  count = jax.tree.leaves(rows)[0].shape[0]

  def empty(shape: jax.ShapeDtypeStruct) -> Array:
    whole = (count, *shape.shape[1:])
    return (
      jnp.zeros(whole, shape.dtype) if anchor is None else late_zeros(whole, shape.dtype, anchor)
    )

  return jax.tree.map(empty, jax.eval_shape(tile))


def _tile_loop(
  function: RowFunction,
  row_tile: int,
  weights: Any,
  rows: Any,
  bounds: tuple[Array, Array],
  one: Array,
  out: Any,
) -> Any:
  """Returns `out` with the outputs of the tiles in [bounds[0], bounds[1])."""

  def body(index: Array, out: Any) -> Any:
    start = index * row_tile
    update = function(weights, _tile_of(rows, start, row_tile), one)
    return jax.tree.map(
      lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, start, 0), out, update
    )

  return lax.fori_loop(*bounds, body, out)


def in_chunks(function: Callable[[Any], Any], rows: Any, size: int) -> Any:
  """Applies a row-wise function to `size` rows at a time, to bound memory; bits may change.

  Args:
    function: `rows -> outputs`, every leaf with rows leading.
    rows: pytree of `[n, ...]`.
    size: rows per chunk.
  """
  count = jax.tree.leaves(rows)[0].shape[0]
  num_chunks = -(-count // size)
  padded = jax.tree.map(lambda leaf: _with_zero_rows(leaf, num_chunks * size - count), rows)
  chunks = jax.tree.map(lambda leaf: leaf.reshape(num_chunks, size, *leaf.shape[1:]), padded)
  out = lax.map(function, chunks)
  return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:count], out)


def map_rows(
  function: RowFunction,
  weights: Any,
  rows: Any,
  num_rows: Array,
  numerics: numerics_lib.NumericsConfig,
  *,
  gradient_of: RowFunction | None = None,
) -> Any:
  """Applies a row-wise function to every row, in tiles of `numerics.row_tile` rows.

  Args:
    function: `(weights, rows, one) -> outputs`, where every leaf of `rows` and of the outputs has
      rows leading, and output row i depends on input row i alone. `one` is `traced_one`.
    weights: pytree shared by all rows.
    rows: pytree of `[n, ...]`.
    num_rows: i32[], rows that are computed; the rest of the output is zero from the next multiple
      of `row_tile` on, and unspecified (but finite) before it.
    numerics: its `row_tile` is used.
    gradient_of: function that the backward pass differentiates instead, if a part of `function` is
      expensive and has no gradient. Its float outputs are those of `function`, in the same order.

  Returns:
    Pytree of `[n, ...]`. Gradients reach the float leaves of `weights` and `rows` from the first
    `num_rows` rows only.
  """
  # A static count would give a static trip count.
  num_rows = lax.optimization_barrier(num_rows)
  functions = (function, function if gradient_of is None else gradient_of)
  return _map_rows(functions, tile_rows(numerics), weights, rows, num_rows)


def all_rows(
  function: RowFunction,
  weights: Any,
  rows: Any,
  num_rows: Array,
  *,
  gradient_of: RowFunction | None = None,
) -> Any:
  """Works like `map_rows`, but applies `function` to all rows in one call.

  This is for functions made of kernels, which do not fuse with other ops and have sums that do not
  depend on the number of rows.
  """
  num_rows = lax.optimization_barrier(num_rows)
  functions = (function, function if gradient_of is None else gradient_of)
  return _map_rows(functions, None, weights, rows, num_rows)


class Shares(NamedTuple):
  """Rows in an order in which every tile has rows of a single choice of weights.

  Attributes:
    order: i32[m], row at each place; row 0 for unused places.
    place: i32[n], place of each row; past all tiles for rows that are not computed.
    first_tile: i32[c], first tile of each choice.
    num_tiles: i32[c], number of tiles of each choice.
  """

  order: Array
  place: Array
  first_tile: Array
  num_tiles: Array


def shared_out(choices: Array, count: int, num_rows: Array, row_tile: int) -> Shares:
  """Returns the rows grouped by choice.

  Args:
    choices: i32[n], choice of each row, in [0, count).
    count: number of choices.
    num_rows: i32[], rows that are computed.
    row_tile: rows of a tile.
  """
  size = choices.shape[0]
  rows = jnp.arange(size, dtype=jnp.int32)
  is_live = rows < num_rows
  is_of = (choices[:, None] == jnp.arange(count, dtype=jnp.int32)[None, :]) & is_live[:, None]
  members = is_of.astype(jnp.int32)
  num_tiles = (jnp.sum(members, axis=0, dtype=jnp.int32) + (row_tile - 1)) // row_tile
  first_tile = jnp.cumsum(num_tiles, dtype=jnp.int32) - num_tiles
  before = jnp.cumsum(members, axis=0, dtype=jnp.int32) - members
  within = jnp.sum(before * members, axis=1, dtype=jnp.int32)
  # One tile more than can be needed; rows that are not computed are placed there.
  places = (-(-size // row_tile) + min(count, size) + 1) * row_tile
  place = jnp.where(is_live, first_tile[choices] * row_tile + within, places - 1)
  order = jnp.zeros(places, jnp.int32).at[place].set(jnp.where(is_live, rows, 0))
  return Shares(order, place, first_tile, num_tiles)


class Choices(NamedTuple):
  """Weights of one shape from which rows choose.

  Attributes:
    count: number of choices.
    at: `i32[] -> weights`: the weights of one choice, which are added to the shared weights.
  """

  count: int
  at: Callable[[Array], dict[str, Any]]


def map_chosen_rows(
  function: RowFunction,
  weights: dict[str, Any],
  choices: Sequence[Choices],
  rows: Any,
  shares: Shares,
  num_rows: Array,
  numerics: numerics_lib.NumericsConfig,
) -> Any:
  """Works like `map_rows`, with each row's chosen weights besides the shared ones; no gradient.

  A choice's tiles run the same program as if it were the only choice: its weights are sliced out
  before the loop over its tiles, so the loop's body does not depend on other choices.

  Args:
    function: as in `map_rows`.
    weights: shared weights, and the only ones of rows with choice 0.
    choices: choices from 1 on, grouped by shape.
    rows: pytree of `[n, ...]`.
    shares: `shared_out` of the rows' choices.
    num_rows: i32[], rows that are computed.
    numerics: its `row_tile` is used.

  Returns:
    Pytree of `[n, ...]`, as `map_rows`.
  """
  num_rows = lax.optimization_barrier(num_rows)
  row_tile, one = tile_rows(numerics), traced_one(num_rows)
  rows = jax.tree.map(lambda leaf: leaf[shares.order], rows)
  ends = shares.first_tile + shares.num_tiles

  def run(choice: Array | int, own: dict[str, Any], out: Any) -> Any:
    bounds = shares.first_tile[choice], ends[choice]
    return _tile_loop(function, row_tile, {**weights, **own}, rows, bounds, one, out)

  out = run(0, {}, _empty_of(function, row_tile, weights, rows, one))
  first = 1
  for some in choices:
    is_used = shares.num_tiles[first : first + some.count] > 0
    used = jnp.argsort(~is_used, stable=True).astype(jnp.int32)

    def choice(index: Array, out: Any, some=some, used=used, first=first) -> Any:
      return run(first + used[index], some.at(used[index]), out)

    num_used = jnp.sum(is_used, dtype=jnp.int32)
    out = lax.fori_loop(jnp.int32(0), num_used, choice, out)
    first += some.count
  return jax.tree.map(lambda leaf: leaf[shares.place], out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _map_rows(
  functions: tuple[RowFunction, RowFunction],
  row_tile: int | None,
  weights: Any,
  rows: Any,
  num_rows: Array,
):
  function, _ = functions
  if row_tile is None:
    return function(weights, rows, traced_one(num_rows))
  return _tiled(function, row_tile, weights, rows, num_rows)


def _map_rows_forward(functions, row_tile, weights, rows, num_rows):
  return _map_rows(functions, row_tile, weights, rows, num_rows), (weights, rows, num_rows)


def _map_rows_backward(functions, row_tile, residuals, cotangent):
  del row_tile
  _, function = functions
  weights, rows, num_rows = residuals
  count = jax.tree.leaves(rows)[0].shape[0]
  weight_floats, rebuild_weights = _split_floats(weights)

  def chunk_gradient(rows_chunk: Any, cotangent_chunk: Any, first: Array):
    # Loops over slabs start once the cotangent is available, and so do the gathers of their
    # results.
    one = traced_one(num_rows + late_zeros((), jnp.int32, cotangent_chunk[0]))
    row_floats, rebuild_rows = _split_floats(rows_chunk)

    def floats_only(weight_floats, row_floats):
      out = function(rebuild_weights(weight_floats), rebuild_rows(row_floats), one)
      return [leaf for leaf in jax.tree.leaves(out) if _is_float(leaf)]

    outputs, pull = jax.vjp(floats_only, weight_floats, row_floats)
    live = first + jnp.arange(outputs[0].shape[0], dtype=jnp.int32) < num_rows

    def masked(leaf: Array) -> Array:
      shape = (live.shape[0],) + (1,) * (leaf.ndim - 1)
      return jnp.where(live.reshape(shape), leaf, jnp.zeros((), leaf.dtype))

    return pull([masked(leaf) for leaf in cotangent_chunk])

  cotangents = [leaf for leaf in jax.tree.leaves(cotangent) if leaf.dtype != jax.dtypes.float0]
  if count <= BACKWARD_ROWS:
    weight_gradient, row_gradient = chunk_gradient(rows, cotangents, jnp.int32(0))
  else:
    num_chunks = -(-count // BACKWARD_ROWS)
    padding = num_chunks * BACKWARD_ROWS - count
    padded = jax.tree.map(lambda leaf: _with_zero_rows(leaf, padding), rows)
    float_cotangents = [_with_zero_rows(leaf, padding) for leaf in cotangents]

    def body(index: Array, totals: tuple[list[Array], list[Array]]):
      weight_total, row_total = totals
      first = index * BACKWARD_ROWS
      chunk = jax.tree.map(
        lambda leaf: lax.dynamic_slice_in_dim(leaf, first, BACKWARD_ROWS, 0),
        (padded, float_cotangents),
      )
      rows_chunk, cotangent_chunk = chunk
      weight_part, row_part = chunk_gradient(rows_chunk, cotangent_chunk, first)
      return (
        [a + part.astype(a.dtype) for a, part in zip(weight_total, weight_part, strict=True)],
        [
          lax.dynamic_update_slice_in_dim(a, part, first, 0)
          for a, part in zip(row_total, row_part, strict=True)
        ],
      )

    anchor = float_cotangents[0]
    row_floats = _split_floats(padded)[0]
    zeros = (
      [late_zeros(leaf.shape, jnp.float32, anchor) for leaf in weight_floats],
      [late_zeros(leaf.shape, leaf.dtype, anchor) for leaf in row_floats],
    )
    weight_gradient, row_gradient = lax.fori_loop(jnp.int32(0), jnp.int32(num_chunks), body, zeros)
    weight_gradient = [
      part.astype(leaf.dtype) for part, leaf in zip(weight_gradient, weight_floats, strict=True)
    ]
    row_gradient = [leaf[:count] for leaf in row_gradient]
  return _place(weights, weight_gradient), _place(rows, row_gradient), None


def _place(tree: Any, float_gradients: list[Any]) -> Any:
  """Returns `tree`'s structure with gradients at its float leaves and None (zero) elsewhere."""
  leaves, structure = jax.tree.flatten(tree)
  source = iter(float_gradients)
  return structure.unflatten([next(source) if _is_float(leaf) else None for leaf in leaves])


_map_rows.defvjp(_map_rows_forward, _map_rows_backward)


class LayerSlabs(NamedTuple):
  """The slabs of one layer within the weights of all layers; `map_slabs` reads each slab in place.

  Attributes:
    layers: f[l, r, ...], slabs of all layers.
    index: i32[], index of the layer.
  """

  layers: Array
  index: Array


def _is_layered(leaf: Any) -> bool:
  return isinstance(leaf, LayerSlabs)


def num_slabs(leaf: Array | LayerSlabs) -> int:
  """Returns r, the number of slabs."""
  return leaf.layers.shape[1] if isinstance(leaf, LayerSlabs) else leaf.shape[0]


def leading(leaf: Array | LayerSlabs, count: int) -> tuple[int, ...]:
  """Returns the first sizes of a layer's slabs f[r, ...]."""
  return leaf.layers.shape[1 : 1 + count] if isinstance(leaf, LayerSlabs) else leaf.shape[:count]


def slab_shape(leaf: Array | LayerSlabs) -> tuple[int, ...]:
  """Returns the shape of one slab."""
  return leaf.layers.shape[2:] if isinstance(leaf, LayerSlabs) else leaf.shape[1:]


def whole_slabs(leaf: Array | LayerSlabs) -> Array:
  """Returns f[r, ...], a layer's slabs, sliced out of those of all layers if necessary."""
  return _without_layers(leaf)


def _slab_at(leaf: Array | LayerSlabs, index: Array) -> Array:
  if not isinstance(leaf, LayerSlabs):
    return lax.dynamic_index_in_dim(leaf, index, 0, False)
  shape = leaf.layers.shape[2:]
  start = (leaf.index, index, *(jnp.int32(0) for _ in shape))
  return lax.dynamic_slice(leaf.layers, start, (1, 1, *shape)).reshape(shape)


def _without_layers(slabs: Any) -> Any:
  """Returns the pytree with each `LayerSlabs` sliced out."""

  def cut(leaf: Any) -> Array:
    if not isinstance(leaf, LayerSlabs):
      return leaf
    return lax.dynamic_index_in_dim(leaf.layers, leaf.index, 0, False)

  return jax.tree.map(cut, slabs, is_leaf=_is_layered)


def map_slabs(
  function: SlabFunction,
  shared: Any,
  slabs: Any,
  one: Array,
  axis: str | None,
) -> Any:
  """Applies a function to every local slab of a sharded dimension, each at one fixed shape.

  Args:
    function: `(shared, slab) -> outputs`.
    shared: pytree that is passed whole for every slab.
    slabs: pytree of `[r, ...]`, the local slabs; `LayerSlabs` for those of one of many layers,
      which have no gradient.
    one: `traced_one`.
    axis: mesh axis of the slabs, None on one device.

  Returns:
    Pytree of `[r, ...]`, with the same bits for any number of local slabs. The single slab of a
    model that no mesh may shard is not looped.
  """
  count = num_slabs(jax.tree.leaves(slabs, is_leaf=_is_layered)[0])
  if count == 1:
    slabs = _without_layers(slabs)
  if axis is None and count == 1:
    out = function(shared, jax.tree.map(lambda leaf: leaf[0], slabs))
    return jax.tree.map(lambda leaf: leaf[None], out)
  return _map_slabs(function, axis, shared, slabs, one)


def each_slab(function: SlabFunction, shared: Any, slabs: Any) -> Any:
  """Works like `map_slabs`, but unrolled: for kernels, with which nothing fuses."""
  leaves, structure = jax.tree.flatten(_without_layers(slabs))
  parts = [function(shared, structure.unflatten(slab)) for slab in zip(*leaves, strict=True)]
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)


def looped_slabs(
  function: SlabFunction, shared: Any, slabs: Any, one: Array, anchor: Array | None = None
) -> Any:
  """Works like `map_slabs`, but always looped; no gradient, and no buffer before `anchor`."""
  count = num_slabs(jax.tree.leaves(slabs, is_leaf=_is_layered)[0])
  # Input and output shapes always have two slabs: reading or writing the only slab is reading or
  # writing the whole, so XLA takes the body out of the loop or fuses it differently (seen with JAX
  # 0.10.2, and with AVX2). The second slab is never computed.
  padding = max(2 - count, 0)
  if padding:
    slabs = jax.tree.map(lambda leaf: _with_zero_rows(leaf, padding), slabs)

  def slab(index: Array) -> Any:
    return jax.tree.map(lambda leaf: _slab_at(leaf, index), slabs, is_leaf=_is_layered)

  shapes = jax.eval_shape(lambda: function(shared, slab(jnp.int32(0))))

  def zeros(shape: jax.ShapeDtypeStruct) -> Array:
    whole = (count + padding, *shape.shape)
    if anchor is None:
      return jnp.zeros(whole, shape.dtype)
    return late_zeros(whole, shape.dtype, anchor)

  empty = jax.tree.map(zeros, shapes)

  def body(index: Array, out: Any) -> Any:
    update = function(shared, slab(index))
    return jax.tree.map(
      lambda whole, part: lax.dynamic_update_index_in_dim(whole, part, index, 0), out, update
    )

  out = lax.fori_loop(jnp.int32(0), jnp.int32(count) * one, body, empty)
  return jax.tree.map(lambda leaf: leaf[:count], out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _map_slabs(
  function: SlabFunction, axis: str | None, shared: Any, slabs: Any, one: Array
) -> Any:
  return looped_slabs(function, shared, slabs, one)


def _map_slabs_forward(function, axis, shared, slabs, one):
  return looped_slabs(function, shared, slabs, one), (shared, slabs, one)


def _map_slabs_backward(function, axis, residuals, cotangent):
  """Computes the gradient slab by slab in a loop: one program for any number of local slabs.

  Shared inputs get one partial gradient per slab, on whichever device, and the tree's sum of them.
  """
  shared, slabs, one = residuals

  def gradient(shared: Any, given: Any) -> tuple[list[Array], list[Array]]:
    slab, wanted = given
    shared_floats, rebuild_shared = _split_floats(shared)
    slab_floats, rebuild_slab = _split_floats(slab)

    def floats_only(shared_floats, slab_floats):
      out = function(rebuild_shared(shared_floats), rebuild_slab(slab_floats))
      return [leaf for leaf in jax.tree.leaves(out) if _is_float(leaf)]

    _, pull = jax.vjp(floats_only, shared_floats, slab_floats)
    return pull(wanted)

  wanted = [leaf for leaf in jax.tree.leaves(cotangent) if leaf.dtype != jax.dtypes.float0]
  partials, slab_gradient = looped_slabs(gradient, shared, (slabs, wanted), one, wanted[0])
  # The barrier keeps XLA from fusing the gathering of a sum with the ops that read it.
  partials = lax.optimization_barrier(partials)
  sums = parallel.sum_slabs(partials, axis)
  shared_gradient = lax.optimization_barrier(
    [total.astype(part.dtype) for total, part in zip(sums, partials, strict=True)]
  )
  return _place(shared, shared_gradient), _place(slabs, slab_gradient), None


_map_slabs.defvjp(_map_slabs_forward, _map_slabs_backward)
