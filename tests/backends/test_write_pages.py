"""Rows and copies of rows are written to their slots, and no other part of the pages changes."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model

from seerjax.backends import choice
from seerjax.backends.mosaic_gpu import MosaicGpu
from seerjax.models import kv_layout, transformer
from seerjax.models.decoder import decide
from seerjax.types import KeyCopies, TokenBatch

HEADS, PAGES, SIZE, WIDTH = 3, 5, 4, 6
BACKENDS = {
  "tiled f32": choice.backend_of(tiny_model.NUMERICS),
  "tiled bf16": choice.backend_of(tiny_model.BFLOAT16),
  "native f32": choice.backend_of(tiny_model.NATIVE),
  "native bf16": choice.backend_of(tiny_model.NATIVE_BFLOAT16),
  # XLA performs its writes, so that they run here.
  "kernels bf16": MosaicGpu(tiny_model.BFLOAT16),
}


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_rows_and_their_copies_are_written_and_nothing_else(backend, seed):
  rng = np.random.default_rng(seed)
  dtype = backend.numerics.dtype
  shapes = [[dict(z=SIZE, c=WIDTH)[axis] for axis in axes] for axes in backend.traits.page_axes]
  before = [rng.standard_normal((HEADS, PAGES, *shape)).astype(dtype) for shape in shapes]
  new = [rng.standard_normal((8, HEADS, WIDTH)).astype(dtype) for _ in "kv"]
  write = jax.jit(backend.write_pages)
  for num_rows, num_copies in ((3, 4), (3, 0), (0, 0), (8, 5)):
    where = SIZE + rng.permutation((PAGES - 1) * SIZE)  # Not the dump page.
    slots, copied = where[:8].astype(np.int32), where[8:].astype(np.int32)[:6]
    rows = rng.integers(0, max(num_rows, 1), 6).astype(np.int32)
    # Padding may hold anything of the right range.
    copies = KeyCopies(jnp.asarray(rows), jnp.asarray(copied), jnp.int32(num_copies))
    arrays = tuple(map(jnp.asarray, before)), tuple(map(jnp.asarray, new)), jnp.asarray(slots)
    found = write(*arrays, jnp.int32(num_rows), copies)
    plain = write(*arrays, jnp.int32(num_rows))
    pairs = [(slot, row) for row, slot in enumerate(slots[:num_rows])]
    copied_pairs = list(zip(copied[:num_copies], rows))
    for axes, old, rows_of, got, alone in zip(
      backend.traits.page_axes, before, new, found, plain, strict=True
    ):
      for result, several in ((got, pairs + copied_pairs), (alone, pairs)):
        wanted = np.moveaxis(old.copy(), 2 + axes.index("z"), 2)  # A view: f[k, m, z, c].
        for slot, row in several:
          wanted[:, slot // SIZE, slot % SIZE] = rows_of[row]
        wanted = np.moveaxis(wanted, 2, 2 + axes.index("z"))
        np.testing.assert_array_equal(np.asarray(result), wanted)


@pytest.mark.parametrize("name", ["native f32", "native bf16"])
def test_a_row_whose_slot_no_page_has_is_written_nowhere(name):
  """Otherwise the write would change arrays that others hold in this process."""
  backend = BACKENDS[name]
  shapes = [[dict(z=SIZE, c=WIDTH)[axis] for axis in axes] for axes in backend.traits.page_axes]
  dtype = backend.numerics.dtype
  pages = tuple(jnp.ones((HEADS, PAGES, *shape), dtype) for shape in shapes)
  rows = tuple(jnp.full((3, HEADS, WIDTH), 2, dtype) for _ in "kv")
  slots = jnp.asarray([-1, PAGES * SIZE, PAGES * SIZE + 1], jnp.int32)
  copies = KeyCopies(jnp.zeros(2, jnp.int32), slots[1:], jnp.int32(2))
  for page in jax.jit(backend.write_pages)(pages, rows, slots, jnp.int32(3), copies):
    np.testing.assert_array_equal(np.asarray(page), 1)


def _forward(x, pages, numerics=tiny_model.NATIVE):
  i32 = functools.partial(jnp.asarray, dtype=jnp.int32)
  batch = TokenBatch(
    i32([1, 2]), i32([0, 1]), i32([16, 17]), i32(2), i32([0]), i32([2]), i32([[1]]), i32(1)
  )
  params = tiny_model.params(numerics)
  embed = params["embed"] + x
  copies = KeyCopies(i32([0]), i32([32]), i32(1))
  return transformer.forward(
    params | {"embed": embed},
    batch,
    pages,
    key_copies=copies,
    decoder=decide(tiny_model.CONFIG, numerics),
  )[0].sum()


def test_copies_are_refused_where_nothing_could_read_them():
  message = "forward: got 1 key copies with ScratchPages, expected pages that store keys"
  with pytest.raises(ValueError, match=re.escape(message)):
    _forward(jnp.float32(0), kv_layout.ScratchPages(2, 16))


def test_no_gradient_goes_through_copies():
  numerics = tiny_model.NATIVE
  pages = kv_layout.empty_pages(decide(tiny_model.CONFIG, numerics), num_pages=3, page_size=16)
  message = "through key copies, expected one of a forward without them; pass no key_copies."
  with pytest.raises(NotImplementedError, match=re.escape(message)):
    jax.grad(_forward)(jnp.float32(0), pages)
