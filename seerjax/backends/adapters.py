"""Low-rank adapters by row, as the stages of a backend receive them.

A row has the adapter that it names, or none, and the same bits as in a batch in which all rows have
that adapter: no term of another adapter is added to it, not even a zero. `models.adapters` lays out
the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from seerjax.array_typing import Array
from seerjax.ops import tiles


class Form(NamedTuple):
  """Adapters of one shape: equal targets, and equal ranks unless the backend pads them.

  Attributes:
    layers: `{"qkv_lora": {"a", "b"}, ...}`, of one layer f[e, ...], of all layers f[l, e, ...], or
      a list of single layers; e is the adapter.
    scales: f32[e], scale of each adapter.
    ranks: i32[e] by name, if ranks differ and smaller ones are padded with zeros; 0 means that the
      adapter does not have that name.
  """

  layers: Any
  scales: Array
  ranks: dict[str, Array]

  @property
  def count(self) -> int:
    """Number of adapters."""
    return self.scales.shape[0]


class RowAdapters(NamedTuple):
  """The adapters of one layer, and the adapter index of each row.

  Attributes:
    forms: adapters of this layer, or of all layers if `layer` is set.
    layer: i32[], index of the layer; None if the forms belong to one layer.
    rows: i32[n], adapter index of each row: 0 for none, then in the order of the forms.
    shares: the rows by adapter, if the backend runs tiles of one adapter; else None.
  """

  forms: tuple[Form, ...]
  layer: Array | None
  rows: Array
  shares: tiles.Shares | None

  @property
  def count(self) -> int:
    """Number of adapters, plus one for none."""
    return 1 + sum(form.count for form in self.forms)

  def have(self, names: Collection[str]) -> bool:
    """Returns whether an adapter has one of the names."""
    return any(name in form.layers for form in self.forms for name in names)

  def without(self, names: Collection[str]) -> RowAdapters:
    """Returns the adapters without some of their names."""
    left = lambda whole: {name: leaf for name, leaf in whole.items() if name not in names}
    forms = (form._replace(layers=left(form.layers), ranks=left(form.ranks)) for form in self.forms)
    return self._replace(forms=tuple(forms))

  def in_place(self, form: Form, index: Array | int) -> dict[str, Any]:
    """Works like `at`, but slices no array."""
    place = jnp.int32(index) if self.layer is None else self.layer * form.count + index

    def whole(leaf: Array) -> tiles.LayerSlabs:
      layers = leaf if self.layer is None else leaf.reshape(-1, *leaf.shape[2:])
      return tiles.LayerSlabs(layers, place)

    scale = lax.dynamic_index_in_dim(form.scales, index, 0, keepdims=False)
    layers = form.layers.items()
    return {name: {**jax.tree.map(whole, pair), "scale": scale} for name, pair in layers}

  def at(self, form: Form, index: Array | int) -> dict[str, Any]:
    """Returns one adapter of a form, as `lora.attach` puts it into a layer's weights."""

    def cut(leaf: Array) -> Array:
      if self.layer is None:
        return lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False)
      shape = leaf.shape[2:]
      start = (self.layer, index, *(jnp.int32(0) for _ in shape))
      return lax.dynamic_slice(leaf, start, (1, 1, *shape)).reshape(shape)

    scale = lax.dynamic_index_in_dim(form.scales, index, 0, keepdims=False)
    return {name: {**jax.tree.map(cut, pair), "scale": scale} for name, pair in form.layers.items()}


def by_tile(
  function: tiles.RowFunction,
  weights: Any,
  adapters: RowAdapters,
  rows: Any,
  num_rows: Array,
  numerics: Any,
) -> Any:
  """Runs a definition in tiles of rows that have the same adapter."""
  assert adapters.shares is not None
  choices = [
    tiles.Choices(form.count, lambda index, form=form: adapters.at(form, index))
    for form in adapters.forms
  ]
  return tiles.map_chosen_rows(
    function, weights, choices, rows, adapters.shares, num_rows, numerics
  )


def by_selection(run: Callable[[Any], Any], weights: Any, adapters: RowAdapters) -> Any:
  """Runs all rows with each adapter and selects each row's result: for whole-batch programs.

  Args:
    run: `weights -> outputs [n, ...]`.
    weights: base weights.
    adapters: adapters of the rows.
  """
  out = run(weights)
  index = 0
  for form in adapters.forms:
    for place in range(form.count):
      index += 1
      own = run({**weights, **adapters.at(form, place)})
      is_own = adapters.rows == index
      select = lambda old, new, is_own=is_own: jnp.where(
        is_own.reshape(-1, *(1,) * (new.ndim - 1)), new, old
      )
      out = jax.tree.map(select, out, own)
  return out
