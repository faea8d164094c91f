"""The kernel of all products: tiles of y, with operands copied into rings."""

from __future__ import annotations

from collections.abc import Callable
import functools
import math
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import gpu
from pallas_kernels.matmul.config import ROW_MULTIPLE
from pallas_kernels.matmul_tiles import SQUARE, WGMMA_ROWS, Groups, Plan, Tile

# After this many parts, the sum of the first half is stored in shared memory.
PARKED_PARTS = 4
# The copying warpgroup gives registers to the two others: 24 + 2 * 240 of 504 per thread.
COPY_REGISTERS = 24
MULTIPLY_REGISTERS = 240


@functools.partial(jax.jit, static_argnames=("tiles", "interpret"))
def contract(
  tiles: Plan,
  x: jax.Array,
  weights: tuple[jax.Array, ...],
  bias: jax.Array | None,
  residual: jax.Array | None,
  interpret: bool,
  groups: Groups | None = None,
) -> jax.Array:
  """Runs the kernel. x is [m, k], or [k, m] unless `x_k_last`; weights are [k, n] or [n, k].

  x, weights, or both may have a leading axis r; then y, bias and residual have it too, unless slabs
  are summed, in which case x may also be [m, r * k]. Parts that are apart have one plane of y each,
  [s, m, n] or [r, s, m, n].
  With groups of rows, each tile uses one of the weights; if the contraction is divided by groups, x
  and w are one matrix each, and y has one per item. Parts of y without an item are not written.

  Compiled separately, so that layers with equal calls share one program.
  """
  w_shape = weights[0].shape
  k, n = (w_shape[-1], w_shape[-2]) if tiles.w_k_last else w_shape[-2:]
  n = n // 2 if tiles.joined else n
  num_rows, shards = x.shape[-2], tiles.shards
  slabs = () if tiles.slabs_summed else (x.shape[:-2] or w_shape[:-2])
  if tiles.x_k_last and num_rows == 0:
    return jnp.zeros((*slabs, 0, n), tiles.out_dtype)
  x = _whole_rows(x)
  residual = None if residual is None else _whole_rows(residual)
  if not tiles.x_k_last:
    weights = tuple(_whole_rows(w) for w in weights)
  m = x.shape[-2 if tiles.x_k_last else -1]
  # A contraction over tokens includes the padding rows of zeros.
  k = k if tiles.x_k_last else x.shape[-2]
  part_size = k if tiles.slabs_summed else k // shards
  cut_rows, cut_parts = (groups, None) if tiles.x_k_last else (None, groups)
  grid = (-(-m // tiles.block_m), -(-n // tiles.block_n))
  # A remainder would need a division by a number only known on the GPU, which is done in floats.
  snake_width = math.gcd(tiles.snake_width, grid[1])
  planes = None
  if cut_rows is not None:
    grid = (cut_rows.items.shape[0], grid[1])
  elif cut_parts is not None:
    planes = cut_parts.items.shape[0]
  elif slabs or tiles.apart:
    planes = (slabs[0] if slabs else 1) * (shards if tiles.apart else 1)
  most_tiles = grid[0] * grid[1] * (1 if planes is None else planes)
  num_blocks = min(most_tiles, gpu.num_multiprocessors(interpret))
  parts_of_tile = tiles.parts_of_tile
  whole_steps = -(-part_size // tiles.block_k)
  stages = tiles.stages
  copying = tiles.warpgroups
  optional = [bias] if bias is not None else []
  if bias is not None:
    padding = grid[1] * tiles.block_n - n
    axes = [(0, 0)] * (bias.ndim - 1) + [(0, padding)]
    optional = [jnp.pad(bias.astype(jnp.float32), axes)]
  optional += [residual] if residual is not None else []
  work = [] if groups is None else [groups.items, groups.num_items]

  def body(*refs, y, full, empty, **buffers):
    work_refs, (x_ref, *refs) = refs[: len(work)], refs[len(work) :]
    x_buffer = buffers["x"]
    w_buffers = [buffers[f"w{i}"] for i in range(tiles.num_weights)]
    w_refs, (*optional_refs, y_ref) = refs[: len(weights)], refs[len(weights) :]
    # (reference, first column) of each weight.
    halves = [(w_refs[0], 0), (w_refs[0], n)] if tiles.joined else [(ref, 0) for ref in w_refs]
    bias_ref = optional_refs[0] if bias is not None else None
    residual_ref = optional_refs[-1] if residual is not None else None
    warpgroup = lax.axis_index("warpgroup")

    def tile_of(index: Any) -> Tile:
      if cut_rows is not None:
        items_ref, num_items_ref = work_refs
        shape = (num_items_ref[0], grid[1])
        item, column = plgpu.planar_snake(index, shape, 1, snake_width)
        weight, first, past = (items_ref[item, i] for i in range(3))
        row = pl.multiple_of(first, ROW_MULTIPLE)
        return Tile(row, column * tiles.block_n, whole_steps, weight=weight, past_row=past)
      plane: Any = None
      if planes == 1:
        plane = jnp.int32(0)
      elif planes is not None:
        plane_tiles = jnp.int32(grid[0] * grid[1])
        plane, index = lax.div(index, plane_tiles), lax.rem(index, plane_tiles)
      row, column = plgpu.planar_snake(index, grid, 1, snake_width)
      corner = (row * tiles.block_m, column * tiles.block_n)
      if cut_parts is None:
        matrix, shard = plane, 0
        if tiles.apart:
          matrix, shard = lax.div(plane, jnp.int32(shards)), lax.rem(plane, jnp.int32(shards))
        return Tile(*corner, whole_steps, x=matrix, weight=matrix, plane=plane, shard=shard)
      items_ref, _ = work_refs
      plane, first, past = (items_ref[plane, i] for i in range(3))
      steps = lax.div(past - first, jnp.int32(tiles.block_k))
      return Tile(*corner, steps, first_part=pl.multiple_of(first, tiles.block_k), plane=plane)

    def for_each_tile(visit: Callable[[Tile, Any], None]) -> Any:
      """Visits this block's tiles with the number of steps before each; returns the total steps."""
      num_tiles = jnp.int32(most_tiles)
      if cut_rows is not None:
        num_tiles = work_refs[1][0] * grid[1]
      block = lax.axis_index("block")

      def visit_one(i, first_step):
        tile = tile_of(block + i * num_blocks)
        visit(tile, first_step)
        return first_step + parts_of_tile * tile.steps

      num_mine = lax.div(num_tiles - block + (num_blocks - 1), jnp.int32(num_blocks))
      return lax.fori_loop(0, num_mine, visit_one, jnp.int32(0))

    @pl.when(warpgroup == copying)
    def _():
      if tiles.warpgroups > 1:
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")

      def copy_tile(tile, first_step):
        rows, columns = pl.ds(tile.row, tiles.block_m), pl.ds(tile.column, tiles.block_n)

        def copy_step(i, _):
          shard, part = tile.shard, i
          if parts_of_tile > 1:
            shard, part = lax.div(i, jnp.int32(tile.steps)), lax.rem(i, jnp.int32(tile.steps))
          # A slab that is not a separate matrix is a slice of one.
          x_first = w_first = tile.first_part
          if shards > 1 and not (tiles.slabs_summed and x.ndim == 3):
            x_first = x_first + shard * part_size
          if shards > 1 and not tiles.slabs_summed:
            w_first = w_first + shard * part_size
          x_matrix = () if x.ndim == 2 else (shard if tiles.slabs_summed else tile.x,)
          matrix = ()
          if weights[0].ndim == 3:
            matrix = (shard if tiles.slabs_summed else tile.weight,)

          step = first_step + i
          slot = lax.rem(step, stages)
          pl.when(step >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
          x_part = pl.ds(x_first + part * tiles.block_k, tiles.block_k)
          x_index = (rows, x_part) if tiles.x_k_last else (x_part, rows)
          source = x_ref.at[(*x_matrix, *x_index)]
          plgpu.copy_gmem_to_smem(source, x_buffer.at[slot], full.at[slot])
          w_part = pl.ds(w_first + part * tiles.block_k, tiles.block_k)
          for (w_ref, first_column), w_buffer in zip(halves, w_buffers):
            mine = pl.ds(tile.column + first_column, tiles.block_n) if first_column else columns
            w_index = (mine, w_part) if tiles.w_k_last else (w_part, mine)
            source = w_ref.at[(*matrix, *w_index)]
            plgpu.copy_gmem_to_smem(source, w_buffer.at[slot], full.at[slot])

        # One loop over all parts: the compiler would unroll short loops and run out of registers.
        lax.fori_loop(0, parts_of_tile * tile.steps, copy_step, None)

      past = for_each_tile(copy_tile)
      # Waits for all remaining arrivals on barriers.
      drain = lambda step, _: plgpu.barrier_wait(empty.at[lax.rem(step, stages)])
      lax.fori_loop(jnp.maximum(past - stages, 0), past, drain, None)

    @pl.when(warpgroup < copying)
    def _():
      if tiles.warpgroups > 1:
        plgpu.set_max_registers(MULTIPLY_REGISTERS, action="increase")
      mine = pl.ds(warpgroup * WGMMA_ROWS, WGMMA_ROWS)

      def multiply(accumulators, slot):
        """Adds one block of the contraction; the warpgroup's 64 rows are tokens or columns."""
        x_tile = x_buffer.at[slot] if tiles.x_k_last else x_buffer.at[slot].T
        for accumulator, w_buffer in zip(accumulators, w_buffers):
          w_tile = w_buffer.at[slot].T if tiles.w_k_last else w_buffer.at[slot]
          if not tiles.swapped:
            left = x_buffer.at[slot, mine] if tiles.x_k_last else x_buffer.at[slot, :, mine].T
            plgpu.wgmma(accumulator, left, w_tile)
          else:
            left = w_buffer.at[slot, mine] if tiles.w_k_last else w_buffer.at[slot, :, mine].T
            plgpu.wgmma(accumulator, left, x_tile.T)

      def add_shard(*accumulators, first_step, steps):
        def add_step(step, _):
          slot = lax.rem(step, stages)
          plgpu.barrier_wait(full.at[slot])
          multiply(accumulators, slot)
          # The previous block has been read when only this block's products are in flight.
          plgpu.wgmma_wait(len(accumulators))
          previous = lax.rem(step + stages - 1, stages)
          pl.when(step > first_step)(lambda: plgpu.barrier_arrive(empty.at[previous]))

        lax.fori_loop(first_step, first_step + steps, add_step, None)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(empty.at[lax.rem(first_step + steps - 1, stages)])
        # Layouts are given where inferring them would take long (minutes, on JAX 0.10).
        return tuple(
          plgpu.layout_cast(accumulator[...], plgpu.Layout.WGMMA) for accumulator in accumulators
        )

      wgmma_columns = tiles.block_m if tiles.swapped else tiles.block_n
      accumulators = [
        plgpu.WGMMAAccumulatorRef((WGMMA_ROWS, wgmma_columns), jnp.float32)
      ] * tiles.num_weights

      def add(lefts, rights):
        if lefts is None:
          # The barrier prevents an earlier read, when all registers are in use.
          plgpu.commit_smem()
          lefts = (plgpu.layout_cast(buffers["parked"].at[warpgroup][...], plgpu.Layout.WGMMA),)
        # Without the barrier the compiler would move sums after the last part and keep all parts.
        return lax.optimization_barrier(tuple(a + b for a, b in zip(lefts, rights)))

      def multiply_tile(tile, first_step):
        # Sums of 1, 2, 4, ... parts without a right neighbour yet, larger ones first.
        pending = []
        for part in range(parts_of_tile):
          total = pl.run_scoped(
            functools.partial(
              add_shard, first_step=first_step + part * tile.steps, steps=tile.steps
            ),
            *accumulators,
          )
          num_parts = part + 1
          while num_parts % 2 == 0:
            total = add(pending.pop(), total)
            num_parts //= 2
          pending.append(total)
          if tiles.parks and part + 1 == PARKED_PARTS:
            buffers["parked"].at[warpgroup][...] = pending.pop()[0]
            plgpu.commit_smem()
            pending.append(None)
        while len(pending) > 1:
          right = pending.pop()
          pending.append(add(pending.pop(), right))
        write_tile(list(pending[0]), tile)

      def leave(square, row, columns, tile):
        """Copies a square, or the rows of it that the tile may write, to y."""
        plane = () if planes is None else (tile.plane,)

        def copy(first, size):
          target = y_ref.at[(*plane, pl.ds(row + first, size), columns)]
          plgpu.copy_smem_to_gmem(square.at[pl.ds(first, size)], target)

        if cut_rows is None:
          return copy(0, tiles.square[0])
        # A group's last rows are copied in blocks of eight, so that the next group is not touched.
        is_whole = row + WGMMA_ROWS <= tile.past_row
        pl.when(is_whole)(lambda: copy(0, WGMMA_ROWS))
        for first in range(0, WGMMA_ROWS, ROW_MULTIPLE):
          is_part = jnp.logical_not(is_whole) & (row + first < tile.past_row)
          pl.when(is_part)(functools.partial(copy, first, ROW_MULTIPLE))

      def write_tile(sums, tile):
        """Writes the warpgroup's part of y, square by square."""
        row, column, first = tile.row, tile.column, warpgroup * WGMMA_ROWS
        row, column = (row, column + first) if tiles.swapped else (row + first, column)
        plane = () if planes is None else (tile.plane,)
        # With a single square of columns Mosaic drops that axis, and with it the offset of later
        # squares: data beyond n, which TMA should skip, would overwrite the first square.
        num_pieces = 1 if tiles.swapped else min(tiles.block_n, n) // SQUARE
        for piece in range(num_pieces):
          columns = pl.ds(column + piece * SQUARE, SQUARE)
          slot = piece % 2
          if tiles.swapped:
            values = sums
          else:
            values = [total[:, piece * SQUARE : (piece + 1) * SQUARE] for total in sums]
          value = values[0]
          if tiles.num_weights == 2:
            value = value * (1.0 / (1.0 + jnp.exp(-value))) * values[1]
          if bias_ref is not None:
            axis = 0 if tiles.swapped else 1
            layout = plgpu.Layout.WGMMA.reduce(1 - axis)
            added = gpu.load(bias_ref.at[(*plane, columns)], layout)
            value = value + lax.broadcast_in_dim(added, value.shape, (axis,))
          if residual_ref is not None:
            residual_buffer, residual_full = buffers["residual"], buffers["residual_full"]
            source = residual_ref.at[(*plane, pl.ds(row, tiles.square[0]), columns)]
            plgpu.copy_gmem_to_smem(
              source, residual_buffer.at[warpgroup], residual_full.at[warpgroup]
            )
            plgpu.barrier_wait(residual_full.at[warpgroup])
            if tiles.rounds_first:
              value = value.astype(tiles.out_dtype).astype(jnp.float32)
            value = value + _read(residual_buffer.at[warpgroup], tiles.swapped)
          plgpu.wait_smem_to_gmem(1, wait_read_only=True)
          _write(y.at[warpgroup, slot], value.astype(tiles.out_dtype), tiles.swapped)
          plgpu.commit_smem()
          leave(y.at[warpgroup, slot], row, columns, tile)
        if num_pieces % 2:  # The next tile's first square uses the slot of this tile's last.
          plgpu.wait_smem_to_gmem(0, wait_read_only=True)

      for_each_tile(multiply_tile)
      plgpu.wait_smem_to_gmem(0)

  out = gpu.kernel(
    body,
    name="matmul_parts" if tiles.apart else "matmul",
    out_type=jax.ShapeDtypeStruct((m, n) if planes is None else (planes, m, n), tiles.out_dtype),
    scratch=tiles.scratch(stages),
    num_blocks=num_blocks,
    interpret=interpret,
    num_threads=tiles.warpgroups + 1,
    thread_name="warpgroup",
  )(*work, x, *weights, *optional)
  if tiles.apart:
    out = out.reshape(*slabs, shards, m, n)
  return out[..., :num_rows, :] if tiles.x_k_last else out


def _whole_rows(x: jax.Array) -> jax.Array:
  """Pads rows with zeros to a multiple of 8 if there are more than 8."""
  rows = x.shape[-2]
  missing = -rows % ROW_MULTIPLE if rows > ROW_MULTIPLE else 0
  axes = [(0, 0)] * (x.ndim - 2) + [(0, missing), (0, 0)]
  return jnp.pad(x, axes) if missing else x


def _read(buffer: Any, swapped: bool) -> Any:
  """Reads a square of [tokens, columns] in the accumulator's layout, in f32."""
  if not swapped:
    return plgpu.layout_cast(buffer[...], plgpu.Layout.WGMMA).astype(jnp.float32)
  value = plgpu.layout_cast(buffer.T[...], plgpu.Layout.WGMMA_TRANSPOSED)
  return plgpu.layout_cast(value, plgpu.Layout.WGMMA).astype(jnp.float32)


def _write(buffer: Any, value: Any, swapped: bool) -> None:
  """Writes the accumulator's value as a square of [tokens, columns]."""
  if not swapped:
    buffer[...] = value
  else:
    buffer.T[...] = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
