"""The forward kernel, and the kernel that merges the partials of mode "parallel"."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import gpu
from pallas_kernels.attention import layout, softmax
from pallas_kernels.attention.config import (
  BLOCKS_PER_MULTIPROCESSOR,
  COMPUTE_REGISTERS,
  COPY_REGISTERS,
  ROW_GROUP,
  ROWS,
  Static,
)
from pallas_kernels.attention.layout import Segments, Work
from pallas_kernels.attention.softmax import FLOOR, MASKED, Partial


def _forward_kernel(
  static: Static,
  group: int,
  most_groups: int,
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  sinks: jax.Array | None,
  work: Work,
) -> Any:
  """Returns f[s, k, r, c], and f32[s, k, w, 2, 64] with the maximum and total of each row.

  In mode "parallel" it returns partials: f32[groups, 8, c], weighted values by unit, head and group
  of live rows, and f32[u * k, w, 2, 64].
  """
  config = static.config
  num_segments, num_heads, _, head_dim = q.shape
  num_stored, _, page_size = k_pages.shape[:3]
  sharers = num_heads // num_stored
  compute = config.warpgroups(group)
  blocks, key_block, stages = config.kv_split // config.key_block, config.key_block, config.stages
  # Positions per copy: a page, or a block's part of it.
  piece = min(page_size, key_block)
  pieces_per_page = page_size // piece
  num_units = work.segment.shape[0]
  num_blocks = min(gpu.num_multiprocessors(static.interpret), num_units * num_heads)
  parallel = config.mode == "parallel"
  scale = softmax.scale_of(head_dim)
  parks = config.parks(head_dim)

  def body(*refs, q, p, k, v, q_loaded, k_loaded, v_loaded, q_free, k_free, v_free, **more):
    inputs, outputs = refs[:-2], refs[-2:]
    q_ref, k_ref, v_ref, *work_refs = inputs[: 3 + len(work)]
    units = Work(*work_refs)
    warpgroup = lax.axis_index("warpgroup")
    num_items = layout.items(units.count[0], num_heads, num_blocks)

    def item_of(index):
      item = lax.axis_index("block") + index * num_blocks
      unit = lax.div(item, num_heads)
      return unit, units.segment[unit], lax.rem(item, num_heads)

    def blocks_of(segment, split):
      """Returns (first, count) of the split's blocks that the segment sees, i32[] each."""
      if not config.skip_blocks:
        return jnp.int32(0), jnp.int32(blocks)
      start = split * config.kv_split
      past = lax.div(units.last_position[segment] - start, key_block) + 1
      first = jnp.int32(0)
      if static.window is not None:
        least = units.first_position[segment] - (static.window - 1)
        first = lax.div(jnp.maximum(least - start, 0), key_block)
      return first, jnp.minimum(past, blocks) - first

    def copy():
      def copy_block(ref, buffer, loaded, free, segment, head, step, block):
        slot = lax.rem(step, stages)
        stored = head if sharers == 1 else lax.div(head, sharers)

        @pl.when(step >= stages)
        def _():
          plgpu.barrier_wait(free.at[slot])

        for i in range(key_block // piece):
          index = block * (key_block // piece) + i
          page = units.page_table[segment, lax.div(index, pieces_per_page)]
          plgpu.copy_gmem_to_smem(
            ref.at[stored, page * pieces_per_page + lax.rem(index, pieces_per_page)],
            buffer.at[slot, pl.ds(i * piece, piece)],
            loaded.at[slot],
          )

      def copy_item(index, step):
        unit, segment, head = item_of(index)

        @pl.when(index > 0)
        def _():
          plgpu.barrier_wait(q_free)

        for w in range(compute):
          plgpu.copy_gmem_to_smem(q_ref.at[segment, head, pl.ds(w * ROWS, ROWS)], q.at[w], q_loaded)
        if sinks is not None:
          plgpu.copy_gmem_to_smem(inputs[-1].at[head], more["sinks"], q_loaded)
        split = units.split[unit]

        def copy_split(j, step):
          first, count = blocks_of(segment, split + j)
          first = (split + j) * blocks + first

          def copy_keys(b, _):
            copy_block(k_ref, k, k_loaded, k_free, segment, head, step + b, first + b)
            return ()

          def copy_values(b, _):
            copy_block(v_ref, v, v_loaded, v_free, segment, head, step + b, first + b)
            return ()

          lax.fori_loop(0, count, copy_keys, ())
          lax.fori_loop(0, count, copy_values, ())
          return step + count

        return lax.fori_loop(0, units.num_splits[unit], copy_split, step)

      step = lax.fori_loop(0, num_items, copy_item, jnp.int32(0))

      # Waits until all buffers are free before the block ends.
      @pl.when(num_items > 0)
      def _():
        plgpu.barrier_wait(q_free)

      for i in range(1, stages + 1):

        @pl.when(step >= i)
        def _(i=i):
          plgpu.barrier_wait(k_free.at[lax.rem(step - i, stages)])
          plgpu.barrier_wait(v_free.at[lax.rem(step - i, stages)])

    def blocks_partial(count, is_masked, step, row, key):
      """Returns the softmax sum of `count` blocks, and the values parked in `p`."""
      # The warpgroup index, hidden from the compiler. If it knew that the index is the same for
      # every split, it would keep the addresses of all of wgmma's operands in registers.
      here = warpgroup + lax.shift_right_logical(step, jnp.int32(30))
      scores = []
      for b in range(count):
        slot = lax.rem(step + b, stages)
        plgpu.barrier_wait(k_loaded.at[slot])
        found = softmax.multiply(q.at[here], k.at[slot].transpose((1, 0)), key_block)
        plgpu.barrier_arrive(k_free.at[slot])
        if is_masked:
          seen = softmax.visible(row, key + b * key_block, group, static.window, found.shape)
          found = jnp.where(seen, found, jnp.float32(MASKED))
        scores.append(found)
      maximum = jnp.full((ROWS,), FLOOR, jnp.float32)
      for s in scores:
        maximum = jnp.maximum(maximum, jnp.max(s, axis=1))
      total = jnp.zeros((ROWS,), jnp.float32)
      weights = []
      for s in scores:
        weight = softmax.power((s - softmax.rows(maximum, s.shape)) * scale, static.interpret)
        total = total + jnp.sum(weight, axis=1)
        weights.append(weight.astype(jnp.bfloat16))
      earlier = softmax.unpark(p.at[here], head_dim) if parks else ()
      for b, weight in enumerate(weights):
        p[here, b] = weight
      plgpu.commit_smem()

      def multiply_values(accumulator):
        for b in range(count):
          slot = lax.rem(step + b, stages)
          plgpu.barrier_wait(v_loaded.at[slot])
          plgpu.wgmma(accumulator, p.at[here, b], v.at[slot])
          if b + stages < count:
            # A later block of this split needs this block's buffer.
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(v_free.at[slot])
        return accumulator[...]

      weighted = pl.run_scoped(
        multiply_values, plgpu.WGMMAAccumulatorRef((ROWS, head_dim), jnp.float32)
      )
      for b in range(max(count - stages, 0), count):
        plgpu.barrier_arrive(v_free.at[lax.rem(step + b, stages)])
      return Partial(maximum, total, weighted), earlier

    def is_seen_by_all(segment, split):
      """Returns whether every row of the tile sees every key of the split, bool[]."""
      start = split * config.kv_split
      seen = start + config.kv_split <= units.first_position[segment] + 1
      if static.window is not None:
        # Rows after the segment's end may see fewer keys; they are not read.
        seen = seen & (start > units.last_position[segment] - static.window)
      return seen

    def split_partial(step, segment, split):
      """Returns the softmax sum of one split, the parked values, and the next step."""
      first, count = blocks_of(segment, split)
      # Position of the first key, relative to the segment's first position.
      key = split * config.kv_split + first * key_block - units.first_position[segment]
      row = warpgroup * ROWS
      if config.skip_blocks:
        # A mask does not change bits of rows that see all keys; it is skipped if all rows do.
        sums = [functools.partial(blocks_partial, n, True) for n in range(1, blocks + 1)]
        sums.append(functools.partial(blocks_partial, blocks, False))
        chosen = jnp.where(is_seen_by_all(segment, split), blocks, count - 1)
        part, earlier = lax.switch(chosen, sums, step, row, key)
      else:
        part, earlier = blocks_partial(blocks, True, step, row, key)
      return part, earlier, step + count

    def write_mean(total, segment, head):
      out_ref, stats_ref = outputs
      rows = pl.ds(warpgroup * ROWS, ROWS)
      row_sinks = None if sinks is None else more["sinks"][warpgroup]
      total, mean = softmax.finish(total, row_sinks, static.interpret)
      stats_ref[segment, head, warpgroup, 0] = total.maximum
      stats_ref[segment, head, warpgroup, 1] = total.total
      # The queries have been read, so their buffer is reused for the output.
      q[warpgroup] = mean.astype(jnp.bfloat16)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(q.at[warpgroup], out_ref.at[segment, head, rows])

    def write_partial(part, unit, segment, head):
      weighted_ref, stats_ref = outputs
      item = unit * num_heads + head
      partial = more["partial"]
      stats_ref[item, warpgroup, 0] = part.maximum
      stats_ref[item, warpgroup, 1] = part.total
      partial[warpgroup] = part.weighted
      plgpu.commit_smem()
      live = units.row_groups[segment]
      first = units.first_group[unit] * num_heads + head * live
      for i in range(ROWS // ROW_GROUP):
        row_group = warpgroup * (ROWS // ROW_GROUP) + i

        @pl.when(row_group < live)
        def _(i=i, row_group=row_group):
          plgpu.copy_smem_to_gmem(
            partial.at[warpgroup, pl.ds(i * ROW_GROUP, ROW_GROUP)],
            weighted_ref.at[first + row_group],
          )

    def attend():
      def attend_item(index, step):
        unit, segment, head = item_of(index)
        plgpu.barrier_wait(q_loaded)
        split = units.split[unit]
        if parallel:
          part, _, step = split_partial(step, segment, split)
          write_partial(part, unit, segment, head)
        else:

          def parked(total):
            """Stores the weighted values in `p`, if they are kept there."""
            if not parks:
              return total
            softmax.park(total.weighted, p.at[warpgroup])
            return total._replace(weighted=())

          def attend_split(j, carry):
            total, step = carry
            part, earlier, step = split_partial(step, segment, split + j)
            if parks:
              total = total._replace(weighted=earlier)
            return parked(softmax.merge(total, part, static.interpret)), step

          total, step = lax.fori_loop(
            0, units.num_splits[unit], attend_split, (parked(softmax.nothing(head_dim)), step)
          )
          if parks:
            total = total._replace(weighted=softmax.unpark(p.at[warpgroup], head_dim))
          write_mean(total, segment, head)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(q_free)
        return step

      lax.fori_loop(0, num_items, attend_item, jnp.int32(0))
      plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == compute)
    def _():
      if compute > 1:
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
      copy()

    @pl.when(warpgroup < compute)
    def _():
      if compute > 1:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
      attend()

  if parallel:
    out_type = [
      jax.ShapeDtypeStruct((most_groups * num_heads, ROW_GROUP, head_dim), jnp.float32),
      jax.ShapeDtypeStruct((num_units * num_heads, compute, 2, ROWS), jnp.float32),
    ]
  else:
    out_type = [
      jax.ShapeDtypeStruct(q.shape, q.dtype),
      jax.ShapeDtypeStruct((num_segments, num_heads, compute, 2, ROWS), jnp.float32),
    ]
  return gpu.kernel(
    body,
    name="attention",
    out_type=out_type,
    scratch=config.scratch(group, head_dim, page_size, sinks is not None),
    num_blocks=num_blocks,
    interpret=static.interpret,
    approximate=True,
    num_threads=compute + 1,
    thread_name="warpgroup",
  )(q, *(layout.pieces(x, piece) for x in (k_pages, v_pages)), *work, *layout.listed(sinks))


def _merge_kernel(
  static: Static,
  group: int,
  weighted: jax.Array,
  stats: jax.Array,
  sinks: jax.Array | None,
  work: Work,
  shape: tuple[int, ...],
) -> Any:
  """Merges partials of mode "parallel" into the result of `_forward_kernel` in mode "sequential".

  The units of `work` are segments here, each with its first unit and first group in the partials.
  """
  config = static.config
  num_segments, num_heads, _, head_dim = shape
  num_blocks = min(
    gpu.num_multiprocessors(static.interpret) * BLOCKS_PER_MULTIPROCESSOR, num_segments * num_heads
  )
  compute, groups = config.warpgroups(group), ROWS // ROW_GROUP

  def body(*refs, partial, stats, mean, loaded, stats_loaded, **more):
    (weighted_ref, partial_stats_ref, *inputs), (out_ref, stats_ref) = refs[:-2], refs[-2:]
    units = Work(*inputs[: len(work)])
    num_items = layout.items(units.count[0], num_heads * compute, num_blocks)

    def merge_item(index, first_step):
      item = lax.axis_index("block") + index * num_blocks
      warpgroup, head = lax.rem(item, compute), lax.rem(lax.div(item, compute), num_heads)
      unit = lax.div(item, compute * num_heads)
      segment, num_splits = units.segment[unit], units.num_splits[unit]
      live = units.row_groups[segment]
      if sinks is not None:
        plgpu.copy_gmem_to_smem(inputs[-1].at[head, warpgroup], more["sinks"], more["sinks_loaded"])

      def for_live_groups(step, do):
        slot = lax.rem(step, config.stages)
        for i in range(groups):
          row_group = warpgroup * groups + i

          @pl.when(row_group < live)
          def _(i=i, row_group=row_group):
            do(slot, i, row_group)

      def load(j):
        first = (units.first_group[unit] + j * live) * num_heads + head * live

        def copy(slot, i, row_group):
          plgpu.copy_gmem_to_smem(
            weighted_ref.at[first + row_group],
            partial.at[slot, pl.ds(i * ROW_GROUP, ROW_GROUP)],
            loaded.at[slot * groups + i],
          )

        for_live_groups(first_step + j, copy)
        slot = lax.rem(first_step + j, config.stages)
        plgpu.copy_gmem_to_smem(
          partial_stats_ref.at[(units.split[unit] + j) * num_heads + head, warpgroup],
          stats.at[slot],
          stats_loaded.at[slot],
        )

      for j in range(config.stages - 1):

        @pl.when(j < num_splits)
        def _(j=j):
          load(j)

      def merge_split(j, total):
        # Every thread has read the buffer before the next copy overwrites it.
        plgpu.commit_smem()

        @pl.when(j + (config.stages - 1) < num_splits)
        def _():
          load(j + (config.stages - 1))

        slot = lax.rem(first_step + j, config.stages)
        for_live_groups(
          first_step + j, lambda slot, i, _: plgpu.barrier_wait(loaded.at[slot * groups + i])
        )
        plgpu.barrier_wait(stats_loaded.at[slot])
        part = Partial(stats[slot, 0], stats[slot, 1], partial[slot])
        return softmax.merge(total, part, static.interpret)

      total = lax.fori_loop(0, num_splits, merge_split, softmax.nothing(head_dim))
      row_sinks = None
      if sinks is not None:
        plgpu.barrier_wait(more["sinks_loaded"])
        row_sinks = more["sinks"][...]
      total, value = softmax.finish(total, row_sinks, static.interpret)
      stats_ref[segment, head, warpgroup, 0] = total.maximum
      stats_ref[segment, head, warpgroup, 1] = total.total
      mean[...] = value.astype(jnp.bfloat16)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(mean, out_ref.at[segment, head, pl.ds(warpgroup * ROWS, ROWS)])
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      return first_step + num_splits

    lax.fori_loop(0, num_items, merge_item, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)

  return gpu.kernel(
    body,
    name="attention_merge",
    out_type=[
      jax.ShapeDtypeStruct(shape, jnp.bfloat16),
      jax.ShapeDtypeStruct((num_segments, num_heads, compute, 2, ROWS), jnp.float32),
    ],
    scratch=config.merge_scratch(head_dim, sinks is not None),
    num_blocks=num_blocks,
    interpret=static.interpret,
    approximate=True,
  )(weighted, stats, *work, *layout.listed(sinks))


def attend_tiles(
  static: Static,
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  segments: Segments,
  sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """Returns (f[n, k, g, c], f32[s, k, w, 2, 64] with the maximum and total of every row)."""
  group, head_dim = q.shape[2:]
  tiles = layout.tiles(static, group, q, segments)
  rows = None if sinks is None else layout.sink_rows(static, sinks, head_dim)
  work, merges, most_groups = layout.plan(static, group, segments, k_pages.shape[2])
  if static.config.mode == "parallel":
    parts, stats = _forward_kernel(static, group, most_groups, tiles, k_pages, v_pages, None, work)
    out, stats = _merge_kernel(static, group, parts, stats, rows, merges, tiles.shape)
  else:
    out, stats = _forward_kernel(static, group, 0, tiles, k_pages, v_pages, rows, work)
  return layout.from_tiles(static, group, out, segments), stats
