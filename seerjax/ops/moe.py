"""Mixture of experts: the weighted sum of each row's experts, without dropping any.

    y[i] = sum over the experts e of row i: weight[i, e] * expert_e(x[i])

Slabs are whole experts: of E experts, slab s has those from s * E / r on. In a slab, rows are
sorted by expert, and run in tiles of `expert_tile` rows of one expert; both numbers of trips are
traced:

    expert    3        3        4        7           one program, with one expert's weights
    rows      0 2 5 6  9 . . .  1 4 . .  0 6 9 .     ascending; dots are places without a row

A row's experts of a slab are added in ascending order of their ids, in float32, and the slabs are
added as every contraction is (`parallel.sum_slabs`). So a row's bits depend neither on which rows
share its experts, nor on the number of devices that share the slabs. A row's gradient goes through
the same tiles; an expert's is added up tile by tile, over its rows in ascending order.

Source: Shazeer et al. 2017, https://arxiv.org/abs/1701.06538; dropless as Gale et al. 2022,
https://arxiv.org/abs/2211.15841.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from seerjax import numerics as numerics_lib, parallel
from seerjax.array_typing import Array, Float, Int
from seerjax.ops import linear, tiles

# `(weights of one expert, rows f[t, d]) -> f32[t, d]`, row by row.
Expert = Callable[[Any, Array], Array]


class Picks(NamedTuple):
  """The picks of a batch, sorted by expert; pick i * e + j is row i's expert number j.

  Attributes:
    order: i32[m], picks of expert 0 in ascending order, then those of expert 1, and so on.
    first: i32[E + 1], place of each expert's first pick in `order`; last, the number of all picks.
    per_row: e, number of picks of a row.
  """

  order: Array
  first: Array
  per_row: int


class Tile(NamedTuple):
  """One tile of rows of one expert.

  Attributes:
    rows: i32[t], row to read; 0 for a place without one.
    places: i32[t], row to write; past all rows for a place without one.
    picks: i32[t], pick to read; any valid one for a place without one.
    pick_places: i32[t], pick to write; past all picks for a place without one.
    is_live: bool[t], whether a place has a row.
  """

  rows: Array
  places: Array
  picks: Array
  pick_places: Array
  is_live: Array


def gated_rows(weights: dict[str, Any], x: Float[Array, "n d"]) -> Float[Array, "n d"]:
  """Returns silu(x @ gate) * (x @ up) @ down, f32[n, d], of one expert.

  Args:
    weights: "gate_up" f[d, 2 e], columns of gate, then up; "down" f[e, d]. An adapter of one is
      `{"a", "b", "scale"}` under "gate_up_lora" or "down_lora" (`models.lora`).
    x: f[n, d], rows of one tile.
  """
  gate, up = jnp.split(_product(weights, "gate_up", x), 2, axis=-1)
  return _product(weights, "down", (jax.nn.silu(gate) * up).astype(x.dtype))


def _product(weights: dict[str, Any], name: str, x: Array) -> Array:
  """Returns x @ W, plus scale * (x @ A) @ B if the weight has an adapter."""
  whole, adapter = linear.dot(x, weights[name]), weights.get(f"{name}_lora")
  if adapter is None:
    return whole
  low = (linear.dot(x, adapter["a"]) * adapter["scale"]).astype(x.dtype)
  return whole + linear.dot(low, adapter["b"])


def experts_per_slab(num_experts: int, reduction_shards: int) -> int:
  """Returns the number of experts of a slab.

  Raises:
    ValueError: if the slabs do not divide the experts.
  """
  if num_experts % reduction_shards:
    fitting = numerics_lib.largest_shards([num_experts])
    raise ValueError(
      f"NumericsConfig.reduction_shards: got {reduction_shards}, expected a divisor of"
      f" num_experts={num_experts}, as a slab has whole experts; use"
      f" reduction_shards={fitting}, or 0, which finds it."
    )
  return num_experts // reduction_shards


def experts(
  x: Float[Array, "n d"],
  ids: Int[Array, "n e"],
  weights: Float[Array, "n e"],
  slabs: Any,
  num_rows: Array,
  axis: str | None,
  numerics: numerics_lib.NumericsConfig,
  *,
  expert: Expert = gated_rows,
) -> Float[Array, "n d"]:
  """Returns the weighted sum of each row's experts, f32[n, d].

  Args:
    x: f[n, d], normed hidden rows.
    ids: i32[n, e], experts of each row, ascending and distinct (`routing.route`).
    weights: f32[n, e], weight of each.
    slabs: pytree of f[r, E / r, ...], the local slabs; `tiles.LayerSlabs` of f[l, r, E / r, ...]
      for those of one of many layers, which have no gradient.
    num_rows: i32[], rows that are computed; the rest of the output is zero.
    axis: mesh axis of the slabs, None on one device.
    numerics: its `expert_tile` is used.
    expert: function of one expert.

  Returns:
    f32[n, d]. Gradients reach x, the weights and the slabs from the first `num_rows` rows.
  """
  num_rows = lax.optimization_barrier(num_rows)
  count, tile = x.shape[0], _tile_of(numerics)
  x, ids, weights = tiles.padded((x, ids, weights), tiles.whole(count, tile))
  return _experts(expert, tile, axis, x, ids, weights, slabs, num_rows)[:count]


def chosen_experts(
  x: Float[Array, "n d"],
  ids: Int[Array, "n e"],
  weights: Float[Array, "n e"],
  slabs: dict[str, Any],
  choices: Sequence[tiles.Choices],
  rows: Int[Array, "n"],
  num_rows: Array,
  axis: str | None,
  numerics: numerics_lib.NumericsConfig,
) -> Float[Array, "n d"]:
  """Works like `experts` for rows that choose further weights, such as adapters; has no gradient.

  A tile has rows of one expert and one choice, so a row has the bits of `experts` with the weights
  that it chooses.

  Args:
    x: f[n, d], normed hidden rows.
    ids: i32[n, e], experts of each row.
    weights: f32[n, e], weight of each.
    slabs: the local slabs, for all rows.
    choices: further weights of the local slabs, by index; the arrays are `tiles.LayerSlabs` or
      f[r, E / r, ...].
    rows: i32[n], choice of each row: 0 for none, then in the order of `choices`.
    num_rows: i32[], rows that are computed.
    axis: mesh axis of the slabs, None on one device.
    numerics: its `expert_tile` is used.
  """
  num_rows = lax.optimization_barrier(num_rows)
  size, tile, num_experts = x.shape[0], _tile_of(numerics), _num_experts(slabs, axis)
  whole = tiles.padded((x, ids, weights, rows), tiles.whole(size, tile))
  x, ids, weights, rows = whole
  count = 1 + sum(choice.count for choice in choices)
  of_choices = ids + num_experts * rows[:, None]
  picks = _sorted_picks(of_choices, num_rows, num_experts * count, tile)
  one = tiles.traced_one(num_rows)

  def slab(shared: Any, own: Any) -> Array:
    (x, weights, picks), (index, first) = shared, own
    total = tiles.late_zeros((x.shape[0] + tile, x.shape[1]), jnp.float32, x)
    run = functools.partial(_slab_sum, gated_rows, tile, x, weights, picks, index)
    total, before = run(slabs, first, total), 1
    for choice in choices:

      def turn(place: Array, total: Array, choice=choice, before=before) -> Array:
        begin = (before + place) * num_experts + first
        return run(slabs | choice.at(place), begin, total)

      total = lax.fori_loop(jnp.int32(0), jnp.int32(choice.count) * one, turn, total)
      before += choice.count
    return total[: x.shape[0]]

  firsts = _first_experts(slabs, axis)
  partials = tiles.looped_slabs(slab, (x, weights, picks), firsts, one, x)
  return parallel.sum_slabs(partials, axis)[:size]


def gradient(
  x: Float[Array, "n d"],
  ids: Int[Array, "n e"],
  weights: Float[Array, "n e"],
  slabs: Any,
  num_rows: Array,
  axis: str | None,
  numerics: numerics_lib.NumericsConfig,
  cotangent: Float[Array, "n d"],
) -> tuple[Float[Array, "n d"], Float[Array, "n e"], Any]:
  """Returns the gradients of `experts` to x, the weights and the slabs, for a forward elsewhere."""
  num_rows = lax.optimization_barrier(num_rows)
  count, tile = x.shape[0], _tile_of(numerics)
  whole = tiles.padded((x, ids, weights, cotangent), tiles.whole(count, tile))
  *rows, cotangent = whole
  found = _backward(gated_rows, tile, axis, (*rows, slabs, num_rows), cotangent)
  of_x, _, of_weights, of_slabs, _ = found
  return of_x[:count], of_weights[:count], of_slabs


def _tile_of(numerics: numerics_lib.NumericsConfig) -> int:
  return max(2, numerics_lib.with_expert_tile(numerics).expert_tile)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _experts(
  expert: Expert,
  tile: int,
  axis: str | None,
  x: Array,
  ids: Array,
  weights: Array,
  slabs: Any,
  num_rows: Array,
) -> Array:
  firsts = _first_experts(slabs, axis)
  picks = _sorted_picks(ids, num_rows, _num_experts(slabs, axis), tile)

  def slab(shared: Any, own: Any) -> Array:
    (x, weights, picks), (index, first) = shared, own
    empty = tiles.late_zeros((x.shape[0] + tile, x.shape[1]), jnp.float32, x)
    total = _slab_sum(expert, tile, x, weights, picks, index, slabs, first, empty)
    return total[: x.shape[0]]

  one = tiles.traced_one(num_rows)
  partials = tiles.looped_slabs(slab, (x, weights, picks), firsts, one, x)
  return parallel.sum_slabs(partials, axis)


def _slab_sum(
  expert: Expert,
  tile: int,
  x: Array,
  weights: Array,
  picks: Picks,
  index: Array,
  slabs: Any,
  first: Array,
  total: Array,
) -> Array:
  """Adds the weighted experts of one slab to the rows of `total`, f32[n + tile, d]."""
  weighted = _weighted(expert)

  def of_tile(own: Any, at: Tile, total: Array) -> Array:
    part = weighted(own, _take(x, at.rows), _weights_of(weights, at))
    # A product that is fused with the sum would be rounded once, in some programs.
    return _added(total, at.places, parallel.rounded(part))

  def of_expert(local: Array, bounds: tuple[Array, Array], total: Array) -> Array:
    run = functools.partial(of_tile, _expert_at(slabs, index, local))
    return _each_tile(run, picks, bounds, tile, x.shape[0], total)

  return _each_expert(of_expert, picks, first, _per_slab(slabs), total)


def _forward(expert, tile, axis, x, ids, weights, slabs, num_rows):
  out = _experts(expert, tile, axis, x, ids, weights, slabs, num_rows)
  return out, (x, ids, weights, slabs, num_rows)


def _backward(expert, tile, axis, residuals, cotangent):
  """Computes the gradient slab by slab: one program for any number of local slabs."""
  x, ids, weights, slabs, num_rows = residuals
  cotangent = lax.optimization_barrier(cotangent)
  firsts = _first_experts(slabs, axis)
  picks = _sorted_picks(ids, num_rows, _num_experts(slabs, axis), tile)
  weighted = _weighted(expert)

  def slab(shared: Any, own: Any) -> Any:
    (x, weights, cotangent, picks), (index, first) = shared, own
    size, anchor = x.shape[0], cotangent
    zeros = lambda shape: tiles.late_zeros(shape, jnp.float32, anchor)

    def of_tile(own: Any, at: Tile, carry: Any) -> Any:
      of_x, of_weights, of_own = carry
      wanted = jnp.where(at.is_live[:, None], _take(cotangent, at.rows), jnp.float32(0))
      _, pull = jax.vjp(weighted, own, _take(x, at.rows), _weights_of(weights, at))
      own_part, x_part, weight_part = parallel.rounded(pull(wanted))
      of_x = _added(of_x, at.places, x_part.astype(jnp.float32))
      of_weights = _put(of_weights, at.pick_places, weight_part)
      add = lambda total, part: total + part.astype(jnp.float32)
      return of_x, of_weights, jax.tree.map(add, of_own, own_part)

    def of_expert(local: Array, bounds: tuple[Array, Array], carry: Any) -> Any:
      of_x, of_weights, of_slab = carry
      own = _expert_at(slabs, index, local)
      start = of_x, of_weights, jax.tree.map(lambda leaf: zeros(leaf.shape), own)
      run = functools.partial(of_tile, own)
      of_x, of_weights, of_own = _each_tile(run, picks, bounds, tile, size, start)
      put = lambda whole, part: lax.dynamic_update_index_in_dim(
        whole, part.astype(whole.dtype), local, 0
      )
      return of_x, of_weights, jax.tree.map(put, of_slab, of_own)

    empty = (
      zeros((size + tile, x.shape[1])),
      zeros((weights.size + tile,)),
      jax.tree.map(lambda leaf: tiles.late_zeros(leaf.shape[1:], leaf.dtype, anchor), slabs),
    )
    of_x, of_weights, of_slab = _each_expert(of_expert, picks, first, _per_slab(slabs), empty)
    return of_x[:size], of_weights[: weights.size].reshape(weights.shape), of_slab

  one = tiles.traced_one(num_rows + tiles.late_zeros((), jnp.int32, cotangent))
  shared = (x, weights, cotangent, picks)
  *partials, of_slabs = tiles.looped_slabs(slab, shared, firsts, one, cotangent)
  # The barrier keeps XLA from fusing the gathering of a sum with the ops that read it.
  of_x, of_weights = parallel.sum_slabs(tuple(lax.optimization_barrier(partials)), axis)
  of_x, of_weights = lax.optimization_barrier((of_x.astype(x.dtype), of_weights))
  return of_x, None, of_weights, of_slabs, None


_experts.defvjp(_forward, _backward)


def _weighted(expert: Expert) -> Callable[[Any, Array, Array], Array]:
  """Returns the function of (an expert's weights, rows f[t, d], weights f32[t]) to f32[t, d]."""
  return lambda own, x, weights: expert(own, x) * weights[:, None]


def _weights_of(weights: Array, at: Tile) -> Array:
  """Returns f32[t], the weight of each place, zero without a row."""
  picked = _take(weights.reshape(-1), at.picks)
  return jnp.where(at.is_live, picked, jnp.float32(0))


def _added(total: Array, places: Array, part: Array) -> Array:
  """Returns the totals with a tile's rows added at their places, each place once."""
  return _put(total, places, _take(total, places) + part)


def _take(source: Array, places: Array) -> Array:
  # Indices come from our own sort; a clamped gather would cost a pass.
  return source.at[places].get(mode="promise_in_bounds")


def _put(whole: Array, places: Array, part: Array) -> Array:
  return whole.at[places].set(part, mode="promise_in_bounds", unique_indices=True)


def _leaf_shape(slabs: Any) -> tuple[int, ...]:
  """Returns (r, E / r, ...), the shape of the local slabs of one layer."""
  is_layered = lambda leaf: isinstance(leaf, tiles.LayerSlabs)
  first = jax.tree.leaves(slabs, is_leaf=is_layered)[0]
  return first.layers.shape[1:] if is_layered(first) else first.shape


def _per_slab(slabs: Any) -> int:
  return _leaf_shape(slabs)[1]


def _num_experts(slabs: Any, axis: str | None) -> int:
  count, per_slab = _leaf_shape(slabs)[:2]
  return count * per_slab * (1 if axis is None else lax.axis_size(axis))


def _first_experts(slabs: Any, axis: str | None) -> tuple[Array, Array]:
  """Returns i32[r] and i32[r], the index of each local slab and the id of its first expert."""
  count, per_slab = _leaf_shape(slabs)[:2]
  index = jnp.arange(count, dtype=jnp.int32)
  device = jnp.int32(0) if axis is None else lax.axis_index(axis).astype(jnp.int32)
  return index, (device * count + index) * per_slab


def _expert_at(slabs: Any, index: Array, local: Array) -> Any:
  """Returns the weights of one expert of a slab, read in place."""

  def cut(leaf: Array | tiles.LayerSlabs) -> Array:
    is_layered = isinstance(leaf, tiles.LayerSlabs)
    whole, before = (leaf.layers, (leaf.index,)) if is_layered else (leaf, ())
    shape = whole.shape[len(before) + 2 :]
    start = (*before, index, local, *(jnp.int32(0) for _ in shape))
    ones = (1,) * (len(before) + 2)
    return lax.dynamic_slice(whole, start, (*ones, *shape)).reshape(shape)

  return jax.tree.map(cut, slabs, is_leaf=lambda leaf: isinstance(leaf, tiles.LayerSlabs))


def _sorted_picks(ids: Array, num_rows: Array, num_experts: int, tile: int) -> Picks:
  """Returns the picks of the first `num_rows` rows, sorted by expert, then by row."""
  size, per_row = ids.shape
  is_live = jnp.arange(size, dtype=jnp.int32) < num_rows
  # Rows that are not computed pick an expert past the last.
  of_picks = jnp.where(is_live[:, None], ids, num_experts).reshape(-1)
  order = jnp.argsort(of_picks, stable=True).astype(jnp.int32)
  bounds = jnp.arange(num_experts + 1, dtype=jnp.int32)
  first = jnp.searchsorted(of_picks[order], bounds, side="left").astype(jnp.int32)
  # A tile is read whole, also from the last place on.
  return Picks(jnp.pad(order, (0, tile)), first, per_row)


def _each_expert(
  function: Callable[[Array, tuple[Array, Array], Any], Any],
  picks: Picks,
  first: Array,
  count: int,
  carry: Any,
) -> Any:
  """Folds `function` over the experts of a slab that have rows, in ascending order.

  Args:
    function: `(index within the slab, places of its first pick and of the next expert's, carry)`.
    picks: all picks.
    first: i32[], id of the slab's first expert.
    count: number of experts of the slab.
    carry: start of the fold.
  """
  bounds = lax.dynamic_slice_in_dim(picks.first, first, count + 1)
  is_used = bounds[1:] > bounds[:-1]
  used = jnp.argsort(~is_used, stable=True).astype(jnp.int32)

  def body(turn: Array, carry: Any) -> Any:
    local = used[turn]
    return function(local, (bounds[local], bounds[local + 1]), carry)

  return lax.fori_loop(jnp.int32(0), jnp.sum(is_used, dtype=jnp.int32), body, carry)


def _each_tile(
  function: Callable[[Tile, Any], Any],
  picks: Picks,
  bounds: tuple[Array, Array],
  tile: int,
  num_rows: int,
  carry: Any,
) -> Any:
  """Folds `function` over the tiles of one expert, with its rows in ascending order."""
  begin, end = bounds
  offsets = jnp.arange(tile, dtype=jnp.int32)

  def body(index: Array, carry: Any) -> Any:
    start = begin + index * tile
    own = lax.dynamic_slice_in_dim(picks.order, start, tile)
    is_live = start + offsets < end
    rows = own // picks.per_row
    at = Tile(
      rows=jnp.where(is_live, rows, 0),
      places=jnp.where(is_live, rows, num_rows + offsets),
      picks=own,
      pick_places=jnp.where(is_live, own, num_rows * picks.per_row + offsets),
      is_live=is_live,
    )
    return function(at, carry)

  return lax.fori_loop(jnp.int32(0), (end - begin + (tile - 1)) // tile, body, carry)


def experts_reference(
  x: Float[Array, "n d"],
  ids: Int[Array, "n e"],
  weights: Float[Array, "n e"],
  slabs: Any,
  *,
  expert: Expert = gated_rows,
) -> Float[Array, "n d"]:
  """Reference implementation in float32: every expert on every row."""
  flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]).astype(jnp.float32), slabs)
  num_experts = jax.tree.leaves(flat)[0].shape[0]
  total = jnp.zeros(x.shape, jnp.float32)
  for index in range(num_experts):
    own = jax.tree.map(lambda leaf, index=index: leaf[index], flat)
    weight = jnp.sum(jnp.where(ids == index, weights, jnp.float32(0)), axis=1)
    total = total + weight[:, None] * expert(own, x.astype(jnp.float32))
  return total
