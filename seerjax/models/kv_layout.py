"""How keys and values lie in pages. Outside of this file pages are a pytree with an axis of pages.

    up to `UNROLLED_LAYERS` layers    a pair f[k, m, z, c] for each
    more                              one pair f[k, m, l, z, c], a page's layers side by side
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from seerjax import numerics as numerics_lib
from seerjax.array_typing import Array
from seerjax.models.config import TransformerConfig
from seerjax.models.parameters import UNROLLED_LAYERS

# Keys and values: a pair f[k, m, z, c] a layer, or one pair f[k, m, l, z, c] of all layers.
Pages = tuple[tuple[Array, Array], ...]

# The axis of every leaf that counts pages, m: all that the rest of the library knows of them.
PAGE_AXIS = 1


def empty_pages(
  config: TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  *,
  num_pages: int,
  page_size: int,
) -> Pages:
  """Returns zeroed pages of one instance; page 0 is the dump page of padding.

  A pair a layer, f[k, m, z, c], up to `UNROLLED_LAYERS`; beyond, one pair f[k, m, l, z, c].

  Raises:
    ValueError: if pages do not fill splits exactly.
  """
  check_page_size(page_size, numerics)
  shape = (config.num_kv_heads, num_pages, page_size, config.head_dim)
  count = config.num_layers
  if count > UNROLLED_LAYERS:
    shape, count = (*shape[:2], count, *shape[2:]), 1
  return tuple(
    (jnp.zeros(shape, numerics.dtype), jnp.zeros(shape, numerics.dtype)) for _ in range(count)
  )


class ScratchPages(NamedTuple):
  """Pages that hold nothing before a step and that are not read after it: a layer makes its own.

  Attributes:
    num_pages: the dump page 0 among them.
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
