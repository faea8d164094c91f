"""The product of token scores: computes tiles of logits and passes each to a callback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import gpu
from pallas_kernels.token_logprobs.config import (
  MULTIPLE,
  ROW_MULTIPLE,
  ROWS,
  WARPGROUPS,
  Config,
  Plan,
)

# The copying warpgroup gives registers to the two others: 40 + 2 * 232 of 512 per thread.
COPY_REGISTERS = 40
MULTIPLY_REGISTERS = 232


class Place(NamedTuple):
  """Position of a warpgroup's tile of logits.

  Attributes:
    row: the first of 64 rows of `hidden`.
    first: id of the first column.
    past: end of the slab's ids; columns from there on do not belong to the slab.
    index: index of the tile among those of all slabs.
  """

  row: Any
  first: Any
  past: Any
  index: Any


def over_tiles(
  visit: Callable[[Any, Place, Sequence[Any], Any], None],
  *,
  name: str,
  tiles: Plan,
  config: Config,
  hidden: jax.Array,
  table: jax.Array,
  inputs: tuple[jax.Array, ...],
  out_type: jax.ShapeDtypeStruct,
  start: jax.Array,
  slabs: int,
  width: int,
  interpret: bool,
) -> jax.Array:
  """Computes the product and passes every tile of logits to `visit`, which writes its result.

  Args:
    visit: `(logits f32[64, w], place, references to inputs and output, strips)`; the warpgroup's
      two strips of shared memory only exist in the backward pass.
    name: name of the kernel in profiles.
    tiles: plan of one block.
    config: configuration of the caller.
    hidden: bf16[n, d].
    table: bf16[v, d].
    inputs: further arrays for `visit`.
    out_type: type of the output of `visit`.
    start: i32[], first id of the first slab, a multiple of 64.
    slabs: number of consecutive slabs.
    width: ids of a slab; its last tile may extend past its end.
    interpret: run on the CPU.
  """
  hidden = whole_rows(hidden)
  (num_rows, features), stages = hidden.shape, tiles.stages
  tiles_per_slab = -(-width // tiles.vocabulary_tile)
  blocks_per_slab = -(-tiles_per_slab // tiles.column_groups)
  block_rows = tiles.row_groups * ROWS
  grid = (-(-num_rows // block_rows), slabs * blocks_per_slab)
  num_visits = grid[0] * grid[1]
  num_blocks = min(num_visits, gpu.num_multiprocessors(interpret))
  steps = -(-features // tiles.block_k)

  def body(start_ref, hidden_ref, table_ref, *refs, full, empty, strips=None, **buffers):
    hidden_buffer, table_buffer = buffers["hidden"], buffers["table"]
    warpgroup = lax.axis_index("warpgroup")
    # As a product, so that the compiler sees that TMA starts at a whole tile of 8 rows.
    start = start_ref[0] * MULTIPLE

    def for_each_block(visit_block: Callable[[Any, Any, Any, Any], None]) -> None:
      @plgpu.nd_loop((num_visits,), collective_axes="block")
      def _(loop: plgpu.NDLoopInfo) -> None:
        row, column = plgpu.planar_snake(loop.index[0], grid, 1, config.snake_width)
        slab = lax.div(column, blocks_per_slab)
        tile = lax.rem(column, blocks_per_slab) * tiles.column_groups
        visit_block(row * block_rows, slab, tile, loop.local_index * steps)

    @pl.when(warpgroup == WARPGROUPS)
    def _():
      plgpu.set_max_registers(COPY_REGISTERS, action="decrease")

      def copy_block(row, slab, tile, first_step):
        def copy_step(i, _):
          step = first_step + i
          slot = lax.rem(step, stages)
          pl.when(step >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
          part = pl.ds(i * tiles.block_k, tiles.block_k)
          rows = hidden_ref.at[pl.ds(row, block_rows), part]
          plgpu.copy_gmem_to_smem(rows, hidden_buffer.at[slot], full.at[slot])
          for group in range(tiles.column_groups):
            # With an odd number of tiles, the last one is copied again for a group that drops it.
            first = jnp.minimum(tile + group, tiles_per_slab - 1) * tiles.vocabulary_tile
            ids = table_ref.at[pl.ds(start + slab * width + first, tiles.vocabulary_tile), part]
            place = pl.ds(group * tiles.vocabulary_tile, tiles.vocabulary_tile)
            plgpu.copy_gmem_to_smem(ids, table_buffer.at[slot, place], full.at[slot])

        lax.fori_loop(0, steps, copy_step, None)

      for_each_block(copy_block)
      # Waits for all remaining arrivals on barriers.
      past = lax.div(num_visits - lax.axis_index("block") + num_blocks - 1, num_blocks) * steps
      drain = lambda step, _: plgpu.barrier_wait(empty.at[lax.rem(step, stages)])
      lax.fori_loop(jnp.maximum(past - stages, 0), past, drain, None)

    @pl.when(warpgroup < WARPGROUPS)
    def _():
      plgpu.set_max_registers(MULTIPLY_REGISTERS, action="increase")
      row_group = warpgroup if tiles.row_groups > 1 else 0
      column_group = warpgroup if tiles.column_groups > 1 else 0
      my_rows = pl.ds(row_group * ROWS, ROWS)
      my_ids = pl.ds(column_group * tiles.vocabulary_tile, tiles.vocabulary_tile)

      def multiply_block(row, slab, tile, first_step):
        def multiply(accumulator):
          def add_step(i, _):
            slot = lax.rem(first_step + i, stages)
            plgpu.barrier_wait(full.at[slot])
            ids = table_buffer.at[slot, my_ids].T
            plgpu.wgmma(accumulator, hidden_buffer.at[slot, my_rows], ids)
            # The previous block has been read when only this block's products are in flight.
            plgpu.wgmma_wait(1)
            previous = lax.rem(first_step + i + stages - 1, stages)
            pl.when(i > 0)(lambda: plgpu.barrier_arrive(empty.at[previous]))

          lax.fori_loop(0, steps, add_step, None)
          plgpu.wgmma_wait(0)
          plgpu.barrier_arrive(empty.at[lax.rem(first_step + steps - 1, stages)])
          return plgpu.layout_cast(accumulator[...], plgpu.Layout.WGMMA)

        accumulator = plgpu.WGMMAAccumulatorRef((ROWS, tiles.vocabulary_tile), jnp.float32)
        logits = pl.run_scoped(multiply, accumulator)
        mine_of_slab = tile + column_group
        slab_start = start + slab * width
        place = Place(
          row=row + row_group * ROWS,
          first=slab_start + mine_of_slab * tiles.vocabulary_tile,
          past=slab_start + width,
          index=slab * tiles_per_slab + mine_of_slab,
        )

        @pl.when(mine_of_slab < tiles_per_slab)
        def _():
          visit(logits, place, refs, None if strips is None else strips.at[warpgroup])

      for_each_block(multiply_block)
      plgpu.wait_smem_to_gmem(0)

  return gpu.kernel(
    body,
    name=name,
    out_type=out_type,
    scratch=tiles.scratch(stages),
    num_blocks=num_blocks,
    interpret=interpret,
    num_threads=WARPGROUPS + 1,
    thread_name="warpgroup",
  )(start[None] // MULTIPLE, hidden, table, *inputs)


def ids_of(first: Any, count: int) -> Any:
  """Returns the ids of the columns from `first`, i32[64, count]."""
  ids = plgpu.broadcasted_iota(jnp.int32, (ROWS, count), 1, layout=plgpu.Layout.WGMMA)
  return ids + first


def along_columns(values: Any, count: int) -> Any:
  """Repeats one value per row along `count` columns: [64] to [64, count]."""
  return lax.broadcast_in_dim(values, (ROWS, count), (0,))


def inverse_of(temperature: jax.Array, padded: int) -> jax.Array:
  """Returns the factors of the logits, f32[padded]."""
  inverse = 1 / jnp.where(temperature > 0, temperature, jnp.float32(1))
  return jnp.pad(inverse, (0, padded - inverse.shape[0]), constant_values=1)


def whole_rows(hidden: jax.Array) -> jax.Array:
  """Pads rows with zeros to a multiple of 8."""
  return jnp.pad(hidden, ((0, -hidden.shape[0] % ROW_MULTIPLE), (0, 0)))
