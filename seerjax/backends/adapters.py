"""Low-rank adapters that the rows of one batch choose among, as the stages get them.

A row has the adapter that it names, or none, and the bits that it would have in a batch where all
rows have that adapter: no term of another's is added to it, not even a zero. How the weights are
laid out is `models.adapters`' affair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from seerjax.array_typing import Array
from seerjax.ops import tiles


class Form(NamedTuple):
  """Adapters of one shape: equal targets, and equal ranks but where rows are told apart natively.

  Attributes:
    layers: `{"qkv_lora": {"a", "b"}, ...}`, of one layer f[e, ...], of all layers f[l, e, ...], or
      a list of single ones; e is the adapter.
    scales: f32[e].
    ranks: i32[e] by name, where ranks differ and the weights have zeros behind the smaller ones;
      0 is no adapter of that name.
  """

  layers: Any
  scales: Array
  ranks: dict[str, Array]

  @property
  def count(self) -> int:
    """How many adapters."""
    return self.scales.shape[0]


class RowAdapters(NamedTuple):
  """The adapters of one layer, and which of them each row has.

  Attributes:
    forms: of this layer, or of all layers where `layer` says which.
    layer: i32[]; None where the forms are those of one layer.
    rows: i32[n], 0 for none, then in the order of the forms.
    shares: the rows by adapter, where a backend runs tiles of one adapter; else None.
  """

  forms: tuple[Form, ...]
  layer: Array | None
  rows: Array
  shares: tiles.Shares | None

  @property
  def count(self) -> int:
    """How many adapters, and one for none."""
    return 1 + sum(form.count for form in self.forms)

  def at(self, form: Form, index: Array | int) -> dict[str, Any]:
    """Returns one adapter of a form as `lora.attach` puts it among a layer's weights."""

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
  """Runs a definition in tiles, each of rows of one adapter."""
  assert adapters.shares is not None
  choices = [
    tiles.Choices(form.count, lambda index, form=form: adapters.at(form, index))
    for form in adapters.forms
  ]
  return tiles.map_chosen_rows(
    function, weights, choices, rows, adapters.shares, num_rows, numerics
  )


def by_selection(run: Callable[[Any], Any], weights: Any, adapters: RowAdapters) -> Any:
  """Runs all rows with each adapter, and takes of each what has it: for programs of whole batches.

  Args:
    run: `weights -> outputs [n, ...]`.
    weights: of the base.
    adapters: of the rows.
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
