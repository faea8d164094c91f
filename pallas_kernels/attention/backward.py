"""The two kernels of the backward pass, and the gradients."""

from __future__ import annotations

import dataclasses

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import gpu
from pallas_kernels.attention import layout, softmax
from pallas_kernels.attention.config import (
  BLOCKS_PER_MULTIPROCESSOR,
  ROWS,
  Static,
  backward_scratch,
)
from pallas_kernels.attention.layout import Work
from pallas_kernels.attention.softmax import MASKED


def _query_gradient_kernel(
  static: Static,
  group: int,
  q: jax.Array,
  do: jax.Array,
  rows: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  work: Work,
  first: jax.Array,
  count: jax.Array,
) -> jax.Array:
  """Returns the gradient of the queries, bf16[s, k, r, c].

  Args:
    static: compile-time parameters.
    group: query heads of a key/value head.
    q: bf16[s, k, r, c].
    do: bf16[s, k, r, c], gradient of the output.
    rows: f32[s, k, w, 3, 64], maximum, 1 / total and sum(do * o) of each row.
    k_pages: bf16[k, m, z, c].
    v_pages: bf16[k, m, z, c].
    work: work list of mode "sequential".
    first: i32[s], first block of 64 keys that the segment sees.
    count: i32[s], number of blocks that it sees.
  """
  num_segments, num_heads, num_rows, head_dim = q.shape
  page_size = k_pages.shape[2]
  compute = num_rows // ROWS
  piece = min(page_size, ROWS)
  pieces, pieces_per_page = ROWS // piece, page_size // piece
  num_items = num_segments * num_heads * compute
  num_blocks = min(gpu.num_multiprocessors(static.interpret) * BLOCKS_PER_MULTIPROCESSOR, num_items)
  scale = softmax.scale_of(head_dim)
  shape = (ROWS, ROWS)

  def body(*refs, held, passing, weights, rows, held_loaded, loaded):
    q_ref, do_ref, rows_ref, k_ref, v_ref, first_ref, count_ref, *work_refs, dq_ref = refs
    units = Work(*work_refs)

    def item_body(index, step):
      item = lax.axis_index("block") + index * num_blocks
      block, head = lax.rem(item, compute), lax.rem(lax.div(item, compute), num_heads)
      segment = units.segment[lax.div(item, compute * num_heads)]
      first_block, num_keys = first_ref[segment], count_ref[segment]
      place = (segment, head, pl.ds(block * ROWS, ROWS))
      plgpu.copy_gmem_to_smem(q_ref.at[place], held.at[0], held_loaded)
      plgpu.copy_gmem_to_smem(do_ref.at[place], held.at[1], held_loaded)
      plgpu.copy_gmem_to_smem(rows_ref.at[segment, head, block], rows.at[0], held_loaded)

      def load(j):
        slot = lax.rem(step + j, 2)
        for i in range(pieces):
          index = (first_block + j) * pieces + i
          page = units.page_table[segment, lax.div(index, pieces_per_page)]
          source = (head, page * pieces_per_page + lax.rem(index, pieces_per_page))
          for ref, buffer in ((k_ref, passing.at[slot, 0]), (v_ref, passing.at[slot, 1])):
            plgpu.copy_gmem_to_smem(
              ref.at[source], buffer.at[pl.ds(i * piece, piece)], loaded.at[slot]
            )

      load(0)
      plgpu.barrier_wait(held_loaded)
      maximum, inverse, delta = (rows[0, i] for i in range(3))
      key = first_block * ROWS - units.first_position[segment]

      def scope(accumulator):
        def key_body(j, _):
          @pl.when(j + 1 < num_keys)
          def _():
            load(j + 1)

          slot = lax.rem(step + j, 2)
          k, v = passing.at[slot, 0], passing.at[slot, 1]
          plgpu.barrier_wait(loaded.at[slot])
          scores = softmax.multiply(held.at[0], k.transpose((1, 0)), ROWS)
          dp = softmax.multiply(held.at[1], v.transpose((1, 0)), ROWS)
          seen = softmax.visible(block * ROWS, key + j * ROWS, group, static.window, shape)
          scores = jnp.where(seen, scores, jnp.float32(MASKED))
          p = softmax.power((scores - softmax.rows(maximum, shape)) * scale, static.interpret)
          p = p * softmax.rows(inverse, shape)
          weights[0] = (p * (dp - softmax.rows(delta, shape))).astype(jnp.bfloat16)
          plgpu.commit_smem()
          plgpu.wgmma(accumulator, weights.at[0], k)
          plgpu.wgmma_wait(0)
          # Every thread has waited before a copy overwrites the operands.
          plgpu.commit_smem()
          return ()

        lax.fori_loop(0, num_keys, key_body, ())
        return accumulator[...]

      dq = pl.run_scoped(scope, plgpu.WGMMAAccumulatorRef((ROWS, head_dim), jnp.float32))
      held[0] = (dq * (head_dim**-0.5)).astype(jnp.bfloat16)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(held.at[0], dq_ref.at[place])
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      return step + num_keys

    num_done = layout.items(units.count[0], num_heads * compute, num_blocks)
    lax.fori_loop(0, num_done, item_body, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)

  return gpu.kernel(
    body,
    name="attention_dq",
    out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
    scratch=backward_scratch(head_dim, 3, 2 * pieces),
    num_blocks=num_blocks,
    interpret=static.interpret,
    approximate=True,
  )(q, do, rows, *(layout.pieces(x, piece) for x in (k_pages, v_pages)), first, count, *work)


def _page_gradient_kernel(
  static: Static,
  group: int,
  q: jax.Array,
  do: jax.Array,
  rows: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  first_position: jax.Array,
  segment: jax.Array,
  index: jax.Array,
  start: jax.Array,
) -> tuple[jax.Array, ...]:
  """Returns the gradients of the key and value pages, bf16[k, m, z, c] each.

  Args:
    static: compile-time parameters.
    group: query heads of a key/value head.
    q: bf16[s, k, r, c].
    do: bf16[s, k, r, c], gradient of the output.
    rows: f32[s, k, w, 3, 64], maximum, 1 / total and sum(do * o) of each row.
    k_pages: bf16[k, m, z, c].
    v_pages: bf16[k, m, z, c].
    first_position: i32[s], first position of each segment.
    segment: i32[x], the segments that see each page, page by page, ascending.
    index: i32[x], index of the page in the segment's table.
    start: i32[m + 1], start of each page's segments.
  """
  _, num_heads, num_rows, head_dim = q.shape
  num_pages, page_size = k_pages.shape[1:3]
  compute = num_rows // ROWS
  piece = min(page_size, ROWS)
  pieces_per_page = page_size // piece
  num_items = num_heads * num_pages * pieces_per_page
  num_blocks = min(gpu.num_multiprocessors(static.interpret) * BLOCKS_PER_MULTIPROCESSOR, num_items)
  scale = softmax.scale_of(head_dim)
  shape = (ROWS, ROWS)

  def columns(x):
    """Broadcasts one value per query row; rows are along the second axis here."""
    return lax.broadcast_in_dim(x, shape, (1,))

  def body(*refs, held, passing, weights, rows, held_loaded, loaded):
    q_ref, do_ref, rows_ref, k_ref, v_ref, position_ref, *pair_refs, dk_ref, dv_ref = refs
    segment_ref, index_ref, start_ref = pair_refs

    def item_body(item_index, step):
      item = lax.axis_index("block") + item_index * num_blocks
      head, place = lax.rem(item, num_heads), lax.div(item, num_heads)
      page = lax.div(place, pieces_per_page)
      first_pair = start_ref[page]
      num_steps = (start_ref[page + 1] - first_pair) * compute
      source = (head, place)
      used = pl.ds(0, piece)
      plgpu.copy_gmem_to_smem(k_ref.at[source], held.at[0, used], held_loaded)
      plgpu.copy_gmem_to_smem(v_ref.at[source], held.at[1, used], held_loaded)

      def load(j):
        slot, block = lax.rem(step + j, 2), lax.rem(j, compute)
        segment = segment_ref[first_pair + lax.div(j, compute)]
        tile = (segment, head, pl.ds(block * ROWS, ROWS))
        plgpu.copy_gmem_to_smem(q_ref.at[tile], passing.at[slot, 0], loaded.at[slot])
        plgpu.copy_gmem_to_smem(do_ref.at[tile], passing.at[slot, 1], loaded.at[slot])
        plgpu.copy_gmem_to_smem(rows_ref.at[segment, head, block], rows.at[slot], loaded.at[slot])

      @pl.when(num_steps > 0)
      def _():
        load(0)

      plgpu.barrier_wait(held_loaded)

      def scope(dk, dv):
        def row_body(j, _):
          @pl.when(j + 1 < num_steps)
          def _():
            load(j + 1)

          slot, pair = lax.rem(step + j, 2), first_pair + lax.div(j, compute)
          segment = segment_ref[pair]
          # Position of the first key, relative to the segment's first position.
          key = index_ref[pair] * page_size + lax.rem(place, pieces_per_page) * piece
          key = key - position_ref[segment]
          q, do = passing.at[slot, 0], passing.at[slot, 1]
          plgpu.barrier_wait(loaded.at[slot])
          maximum, inverse, delta = (rows[slot, i] for i in range(3))
          scores = softmax.multiply(held.at[0], q.transpose((1, 0)), ROWS)
          dp = softmax.multiply(held.at[1], do.transpose((1, 0)), ROWS)
          row = lax.rem(j, compute) * ROWS
          seen = softmax.visible(row, key, group, static.window, shape, rows_axis=1)
          scores = jnp.where(seen, scores, jnp.float32(MASKED))
          p = softmax.power((scores - columns(maximum)) * scale, static.interpret)
          p = p * columns(inverse)
          weights[0] = (p * (dp - columns(delta))).astype(jnp.bfloat16)
          weights[1] = p.astype(jnp.bfloat16)
          plgpu.commit_smem()
          plgpu.wgmma(dk, weights.at[0], q)
          plgpu.wgmma(dv, weights.at[1], do)
          plgpu.wgmma_wait(0)
          # Every thread has waited before a copy overwrites the operands.
          plgpu.commit_smem()
          return ()

        lax.fori_loop(0, num_steps, row_body, ())
        return dk[...], dv[...]

      accumulator = plgpu.WGMMAAccumulatorRef((ROWS, head_dim), jnp.float32)
      dk, dv = pl.run_scoped(scope, accumulator, accumulator)
      held[0] = (dk * (head_dim**-0.5)).astype(jnp.bfloat16)
      held[1] = dv.astype(jnp.bfloat16)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(held.at[0, used], dk_ref.at[source])
      plgpu.copy_smem_to_gmem(held.at[1, used], dv_ref.at[source])
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      return step + num_steps

    lax.fori_loop(0, layout.items(num_items, 1, num_blocks), item_body, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)

  pieces = [layout.pieces(x, piece) for x in (k_pages, v_pages)]
  gradients = gpu.kernel(
    body,
    name="attention_dk_dv",
    out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pieces],
    scratch=backward_scratch(head_dim, 2, 3),
    num_blocks=num_blocks,
    interpret=static.interpret,
    approximate=True,
  )(q, do, rows, *pieces, first_position, segment, index, start)
  return tuple(x.reshape(k_pages.shape) for x in gradients)


def gradients(static, saved, do):
  """Returns the gradients of q, k_pages, v_pages and sinks, from the forward's residuals."""
  q, k_pages, v_pages, segments, sinks, out, stats = saved
  num_heads, group, head_dim = q.shape[1:]
  num_stored, num_pages, page_size = k_pages.shape[:3]
  if num_stored != num_heads:
    raise NotImplementedError(
      f"attention: got a gradient of {num_heads} heads with pages of {num_stored}, expected pages"
      " of a head for each head of q; repeat the pages."
    )
  delta = jnp.sum(do.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
  delta_rows = layout.tiles(static, group, delta, segments).reshape(*stats.shape[:3], ROWS)
  # Rows after a segment's end have zero queries; a zero weight keeps them out of every sum.
  numbers = jnp.arange(stats.shape[2] * ROWS, dtype=jnp.int32).reshape(1, 1, -1, ROWS)
  live = jnp.where(layout.is_used(segments), segments.segment_length * group, 0)
  live = numbers < live[:, None, None, None]
  maximum = jnp.where(live, stats[:, :, :, 0], jnp.float32(0))
  inverse = jnp.where(live, 1 / stats[:, :, :, 1], jnp.float32(0))
  rows = jnp.stack([maximum, inverse, delta_rows], axis=3)
  tiles, do_tiles = (layout.tiles(static, group, x, segments) for x in (q, do.astype(q.dtype)))
  sequential = dataclasses.replace(static.config, mode="sequential")
  work, _, _ = layout.plan(static._replace(config=sequential), group, segments, page_size)
  first = jnp.zeros_like(work.first_position)
  if static.window is not None:
    first = jnp.maximum(work.first_position - jnp.int32(static.window - 1), 0) // ROWS
  last = (work.first_position + segments.segment_length - 1) // ROWS
  dq = _query_gradient_kernel(
    static, group, tiles, do_tiles, rows, k_pages, v_pages, work, first, last - first + 1
  )
  readers = layout.readers(static, segments, page_size, num_pages)
  dk, dv = _page_gradient_kernel(
    static, group, tiles, do_tiles, rows, k_pages, v_pages, work.first_position, *readers
  )
  dsinks = None
  if sinks is not None:
    sink_rows = layout.sink_rows(static, sinks, head_dim)
    weight = jnp.exp2((sink_rows[None] - maximum) * softmax.scale_of(head_dim)) * inverse
    parts = jnp.where(live, weight * delta_rows, jnp.float32(0))
    parts = -jnp.sum(parts, axis=0).reshape(q.shape[1], -1)[:, : static.config.query_tile * group]
    dsinks = jnp.sum(parts.reshape(q.shape[1], -1, group), axis=1).astype(sinks.dtype)
  return layout.from_tiles(static, group, dq, segments), dk, dv, None, dsinks
