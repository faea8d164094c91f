"""Batches of pieces of sequences for tests of attention, and attention as one layer runs it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from seerjax import numerics as numerics_lib
from seerjax.backends import choice
from seerjax.ops import attention
from seerjax.types import TokenBatch

NUMERICS = numerics_lib.NumericsConfig(
  backend="tiled", row_tile=4, query_tile=4, slot_tile=2, kv_split=16
)
HEADS, HEAD_DIM = 2, 6


def batch_of(pieces, *, rows, segments, width, page_size, pages_of=None):
  """Lays pieces of sequences side by side.

  Args:
    pieces: (sequence, first position, positions) each; a piece is cut into segments from its start.
    rows: rows of the batch, with padding.
    segments: segments of the batch, with padding.
    width: pages of one page-table row.
    page_size: positions of one page.
    pages_of: sequence -> its pages; sequence j owns 1 + j * width onwards if None (the layout that
      gradients assume).
  """
  if pages_of is None:
    pages_of = lambda j: 1 + j * width + np.arange(width)
  positions, slots, table, starts, lengths = [], [], [], [], []
  for sequence, first, count in pieces:
    pages = np.asarray(pages_of(sequence))
    for offset in range(0, count, NUMERICS.query_tile):
      starts.append(len(positions) + offset)
      lengths.append(min(NUMERICS.query_tile, count - offset))
      table.append(pages)
    place = np.arange(first, first + count)
    positions.extend(place)
    slots.extend(pages[place // page_size] * page_size + place % page_size)

  def padded(values, size):
    values = np.asarray(values, np.int32)
    return jnp.asarray(np.pad(values, [(0, size - len(values))] + [(0, 0)] * (values.ndim - 1)))

  return TokenBatch(
    tokens=jnp.zeros(rows, jnp.int32),
    positions=padded(positions, rows),
    slots=padded(slots, rows),
    num_rows=jnp.int32(len(positions)),
    segment_start=padded(starts, segments),
    segment_length=padded(lengths, segments),
    page_table=padded(np.reshape(table, (len(table), width)), segments),
    num_segments=jnp.int32(len(starts)),
  )


def sequence_of(length, group, dtype=jnp.float32, seed=0):
  """Queries f[t, k, g, c], keys and values f[t, k, c]."""
  rng = np.random.default_rng(seed)
  shapes = (length, HEADS, group, HEAD_DIM), (length, HEADS, HEAD_DIM), (length, HEADS, HEAD_DIM)
  return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def rows_of(sequences, pieces, rows):
  """Queries, keys and values of a batch's rows; padding rows hold irrelevant values."""
  parts = [
    [x[first : first + count] for x in sequences[sequence]] for sequence, first, count in pieces
  ]
  joined = [jnp.concatenate(x) for x in zip(*parts)]
  missing = rows - joined[0].shape[0]
  return [jnp.concatenate([x, jnp.full((missing, *x.shape[1:]), 77, x.dtype)]) for x in joined]


@functools.partial(jax.jit, static_argnums=(6, 7))
def run(q, k, v, k_pages, v_pages, batch, numerics, rule=attention.CAUSAL, sinks=None):
  """Writes keys and values and attends, as one layer does."""
  backend = choice.backend_of(numerics)
  pages = backend.write_pages((k_pages, v_pages), (k, v), batch.slots, batch.num_rows)
  rows = attention.segment_rows(batch, numerics, k_pages.shape[2], rule.window)
  return backend.attend(q, pages, batch, rows, rule, sinks), *pages


def pages_like(num_pages, page_size, dtype=jnp.float32, fill=0.0):
  return jnp.full((HEADS, num_pages, page_size, HEAD_DIM), fill, dtype)


def attend(
  sequences,
  pieces,
  *,
  rows,
  segments,
  width=3,
  page_size=16,
  pages_of=None,
  num_pages=13,
  fill=0.0,
  numerics=NUMERICS,
  rule=attention.CAUSAL,
  sinks=None,
):
  """Rows of one batch on fresh pages, which hold `fill`; live rows only."""
  batch = batch_of(
    pieces, rows=rows, segments=segments, width=width, page_size=page_size, pages_of=pages_of
  )
  q, k, v = rows_of(sequences, pieces, rows)
  pages = pages_like(num_pages, page_size, q.dtype, fill)
  out, _, _ = run(q, k, v, pages, pages, batch, numerics, rule, sinks)
  return np.asarray(out)[: int(batch.num_rows)]
