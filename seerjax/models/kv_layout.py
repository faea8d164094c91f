"""Layout of keys and values in pages. Other files see pages as a pytree with a page axis.

    up to `UNROLLED_LAYERS` layers    a pair f[k, m, z, c] for each, also if k or c differ
    more                              one pair f[k, m, l, z, c] for each kind of pages, a page's
                                      layers side by side

Layers with equal windows are of one kind of pages, and so are those without a window. Each kind has
its own number of pages m, so that pages of layers with a window can be given back alone.

The backend, which writes and reads the pages, defines the layout of one page of one head
(`page_axes`): keys may be f[k, m, c, z], with the positions of a feature side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from seerjax import numerics as numerics_lib
from seerjax.array_typing import Array
from seerjax.models.decoder import Decoder

# Keys and values of a layer, each f[k, m, z, c] unless the backend has other page axes.
LayerPages = tuple[Array, ...]
# One entry per layer, or one for all layers of a kind of pages, f[k, m, l, z, c].
Pages = tuple[LayerPages, ...]

# The page axis m of every leaf; other files know no other axis of pages.
PAGE_AXIS = 1


def empty_pages(
  decoder: Decoder,
  *,
  num_pages: int | Sequence[int],
  page_size: int,
  tensor_parallel_size: int = 1,
) -> Pages:
  """Returns zeroed pages of one instance; page 0 is the dump page for padding.

  One pair per layer, f[k, m, z, c], up to `UNROLLED_LAYERS` or if k or c differ between layers;
  otherwise one pair f[k, m, l, z, c] for each kind of pages.

  Args:
    decoder: the model that computes the keys and values.
    num_pages: m, page 0 included; several numbers are those of `PageLayout.windows`.
    page_size: z, positions of one page; a divisor of `kv_split`.
    tensor_parallel_size: devices that share the heads; if there are fewer heads, neighbouring
      devices store the same head, and k counts it once for each of them.

  Raises:
    ValueError: if pages do not fill splits exactly.
  """
  check_page_size(page_size, decoder.numerics)
  places, dtype = places_of(decoder), decoder.numerics.dtype
  num_kinds = len(decoder.pages.windows)
  counts = [num_pages] * num_kinds if isinstance(num_pages, int) else list(num_pages)

  def of_layer(index: int, layers: tuple[int, ...]) -> LayerPages:
    heads, count = decoder.shape.layers[index].attention.num_kv_heads, counts[places[index].kind]
    heads = max(heads, tensor_parallel_size)
    shapes = _page_shapes(decoder, page_size, index)
    return tuple(jnp.zeros((heads, count, *layers, *page), dtype) for page in shapes)

  if not decoder.pages.num_pooled:
    return tuple(of_layer(index, ()) for index in range(decoder.shape.num_layers))
  kinds = [place.kind for place in places]
  return tuple(of_layer(kinds.index(k), (kinds.count(k),)) for k in range(num_kinds))


class Place(NamedTuple):
  """Place of a layer's keys.

  Attributes:
    kind: its kind of pages, an index into `PageLayout.windows`.
    index: number of earlier layers of this kind.
  """

  kind: int
  index: int


def places_of(decoder: Decoder) -> list[Place]:
  """Returns the place of each layer's keys."""
  windows = decoder.pages.windows
  kinds = [windows.index(layer.attention.window) for layer in decoder.shape.layers]
  return [Place(kind, kinds[:index].count(kind)) for index, kind in enumerate(kinds)]


def entries_of(decoder: Decoder) -> tuple[tuple[int, ...], ...]:
  """Returns which entries of `Pages` are those of each kind of pages."""
  kinds = range(len(decoder.pages.windows))
  if decoder.pages.num_pooled:
    return tuple((kind,) for kind in kinds)
  own = [place.kind for place in places_of(decoder)]
  return tuple(tuple(i for i, other in enumerate(own) if other == kind) for kind in kinds)


class ScratchPages(NamedTuple):
  """Sizes of pages that live for one step only: each layer allocates its own.

  Attributes:
    num_pages: number of pages, the dump page 0 included.
    page_size: positions of one page.
  """

  num_pages: int
  page_size: int


def check_page_size(page_size: int, numerics: numerics_lib.NumericsConfig) -> None:
  """Refuses pages that do not fill splits exactly.

  Raises:
    ValueError: with both numbers.
  """
  if numerics.kv_split % page_size:
    raise ValueError(
      f"page_size: got {page_size}, expected a divisor of kv_split={numerics.kv_split}; a split is"
      " read page by page."
    )


def _page_shapes(decoder: Decoder, page_size: int, index: int) -> tuple[tuple[int, ...], ...]:
  """Returns the shape of one page of one head, for each of a layer's arrays."""
  sizes = dict(z=page_size, c=decoder.shape.layers[index].attention.head_dim)
  return tuple(tuple(sizes[axis] for axis in axes) for axes in decoder.pages.axes)


def page_size_of(pages: Pages | ScratchPages, decoder: Decoder) -> int:
  """Returns the number of positions of one page."""
  if isinstance(pages, ScratchPages):
    return pages.page_size
  axes = decoder.pages.axes[0]
  return pages[0][0].shape[axes.index("z") - len(axes)]


def is_pool(pages: Pages | ScratchPages, decoder: Decoder) -> bool:
  """Returns whether the pages of all layers of a kind are in one pool."""
  if isinstance(pages, ScratchPages):
    return False
  # In addition to the axes of a page, a pool has axes of heads, pages and layers.
  return pages[0][0].ndim == 3 + len(decoder.pages.axes[0])


def scratch_of_layer(
  decoder: Decoder, pages: ScratchPages, tensor_parallel_size: int, index: int
) -> tuple[tuple[int, ...], ...]:
  """Returns the shapes of layer `index`'s arrays on one of `tensor_parallel_size` devices.

  A head that several slabs share is there for each of them, as its gradients are.
  """
  kind = decoder.shape.layers[index].attention.in_slabs(decoder.numerics.reduction_shards)
  num_heads = kind.num_kv_heads // tensor_parallel_size
  return tuple(
    (num_heads, pages.num_pages, *page) for page in _page_shapes(decoder, pages.page_size, index)
  )


def flat_pool(pool: LayerPages) -> LayerPages:
  """Reshapes f[k, m, l, ...] to f[k, m * l, ...]; `page_in_pool` indexes the result."""
  return tuple(
    leaf.reshape(leaf.shape[0], leaf.shape[1] * leaf.shape[2], *leaf.shape[3:]) for leaf in pool
  )


def page_in_pool(page: Array, index: Array | int, num_layers: int) -> Array:
  """Returns the index of a layer's page in the flat pool."""
  return page * num_layers + index


def copy_pages(pages: Pages, copies: Array, num_copies: Array) -> Pages:
  """Copies whole pages inside one instance, in order: copies i32[b, 2] are (from, to).

  If b is 0, no loop is traced.
  """
  if not copies.shape[0]:
    return pages

  def body(index: Array, pages: Pages) -> Pages:
    source, target = copies[index, 0], copies[index, 1]

    def copy(whole: Array) -> Array:
      part = lax.dynamic_index_in_dim(whole, source, PAGE_AXIS)
      return lax.dynamic_update_slice_in_dim(whole, part, target, PAGE_AXIS)

    return jax.tree.map(copy, pages)

  return lax.fori_loop(jnp.int32(0), num_copies, body, pages)
