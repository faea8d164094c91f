"""Attention of segments over pages, in splits of fixed size merged in ascending order.

One item of work is (segment, key/value head): the `query_tile` positions x g query heads of a
segment, against every split of `kv_split` positions that it can see. One warpgroup copies pages
through the page table; one warpgroup for each 64 rows computes.

  positions   0        kv_split     2 kv_split
  splits      |---- 0 ----|---- 1 ----|--- 2 ---
               (m, l, acc)  (m, l, acc)              each with its own maximum, from zero
                    `--merge--'                      left fold, ascending

The contract, for a row of queries q and one split, whose keys are taken `key_block` at a time:

  s = q k^T                            f32, unscaled
  m = max of the split's visible s     one maximum a split, never carried into another
  p = exp2((s - m) * log2(e) / sqrt(c))    the one place that scales
  l = sum of p, acc = bf16(p) v        blocks of keys in ascending order, f32

  merge: m = max(m1, m2); x = x1 * exp2((m1 - m) * scale) + x2 * exp2((m2 - m) * scale), for l, acc

A sink is one more partial, (sink * sqrt(c), 1, 0), merged after the last split. At the end
acc * (1 / l) is rounded to bfloat16, once. Splits follow absolute positions, and one that is fully
masked merges as exactly nothing: so decoding (one live row), verification, chunked prefill and
training are one program with one set of bits, whatever else is in the batch.

Mode "sequential" folds a segment's splits in registers. Mode "parallel" makes an item of each
split, writes its partial to memory, and a second kernel folds them: the same arithmetic, for
batches with fewer (segment, head) than the GPU has multiprocessors.

Backward, deterministic, without atomics. With p = exp2(...) / l of the saved m and l, and
d = sum(do * o):

  ds = p * (do v^T - d);  dq = ds k / sqrt(c);  dk = ds^T q / sqrt(c);  dv = p^T do

dq: one block a (segment, head), pages ascending. dk and dv: one block a (page, head), the segments
that see the page ascending; so pages may be shared. p and ds are rounded to bfloat16 for products.

Shared memory of the forward: queries, p, and `stages` blocks of keys and of values.

Sources: Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867; Shah et al. 2024
(FlashAttention-3), https://arxiv.org/abs/2407.08608; He et al. 2025 (Thinking Machines) for splits
of fixed size; Xiao et al. 2023, https://arxiv.org/abs/2309.17453, for sinks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import gpu

HEAD_DIMS = (64, 128)
# Rows of queries that one warpgroup multiplies, and most warpgroups that do.
ROWS = 64
MAX_WARPGROUPS = 2
# A partial is written to memory so many rows at a time, and only rows that live.
ROW_GROUP = 8
# A masked score, and the maximum of a split without a visible key: exp2 of their difference is 0,
# so that what is masked adds exactly nothing. Scores lie far above both.
MASKED = -1e30
FLOOR = -1e29
# Of the warpgroup that copies and of those that compute, where there are three of them.
COPY_REGISTERS = 40
COMPUTE_REGISTERS = 232
# Of merges and of the backward, which have one warpgroup each.
BLOCKS_PER_MULTIPROCESSOR = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """How positions are cut and how much is in flight.

  Attributes:
    kv_split: contract. Positions of one split, aligned to absolute positions.
    key_block: contract. Keys that are multiplied at a time within a split.
    query_tile: tuning. Most positions of a segment; times the query heads of a key/value head at
      most 128 rows.
    mode: tuning. "sequential" or "parallel", see above.
    stages: tuning. Blocks of keys, and of values, in flight; at most 4.
    skip_blocks: tuning. Leave out blocks of a split of which no row of the tile sees a key. They
      would add zeros.
  """

  kv_split: int = 256
  key_block: int = 128
  query_tile: int = 16
  mode: Literal["sequential", "parallel"] = "sequential"
  stages: int = 2
  skip_blocks: bool = True

  def __post_init__(self) -> None:
    if self.key_block not in (64, 128, 256):
      raise ValueError(f"got key_block={self.key_block}; expected 64, 128 or 256.")
    if self.kv_split < 1 or self.kv_split % self.key_block:
      raise ValueError(
        f"got kv_split={self.kv_split}; expected a positive multiple of key_block={self.key_block}."
      )
    if self.mode not in ("sequential", "parallel"):
      raise ValueError(f"got mode={self.mode!r}; expected 'sequential' or 'parallel'.")
    if self.query_tile < 1:
      raise ValueError(f"got query_tile={self.query_tile}; expected at least 1.")
    if not 1 <= self.stages <= 4:
      raise ValueError(f"got stages={self.stages}; expected 1 to 4.")

  def warpgroups(self, group: int) -> int:
    """Returns how many warpgroups compute, for `group` query heads a key/value head."""
    return -(-self.query_tile * group // ROWS)

  def scratch(self, group: int, head_dim: int, page_size: int, sinks: bool) -> gpu.Scratch:
    """Returns what one block of the forward allocates."""
    compute = self.warpgroups(group)
    copies = -(-self.key_block // page_size)
    blocks = self.kv_split // self.key_block
    keys = gpu.Buffer((self.stages, self.key_block, head_dim), jnp.bfloat16, swizzled=True)
    scratch = {
      "q": gpu.Buffer((compute, ROWS, head_dim), jnp.bfloat16, swizzled=True),
      "p": gpu.Buffer((compute, blocks, ROWS, self.key_block), jnp.bfloat16, swizzled=True),
      "k": keys,
      "v": keys,
      "q_loaded": gpu.Barriers(num_arrivals=compute + sinks),
      "k_loaded": gpu.Barriers(num_arrivals=copies, num_barriers=self.stages),
      "v_loaded": gpu.Barriers(num_arrivals=copies, num_barriers=self.stages),
      "q_free": gpu.Barriers(num_arrivals=compute),
      "k_free": gpu.Barriers(num_arrivals=compute, num_barriers=self.stages),
      "v_free": gpu.Barriers(num_arrivals=compute, num_barriers=self.stages),
    }
    if self.mode == "parallel":
      scratch["partial"] = gpu.Buffer((compute, ROWS, head_dim), jnp.float32, swizzled=True)
    if sinks:
      scratch["sinks"] = gpu.Buffer((compute, ROWS), jnp.float32)
    return scratch

  def shared_memory_bytes(self, group: int, head_dim: int, page_size: int, sinks: bool) -> int:
    """Returns the most that a block of any of the kernels takes."""
    scratches = [self.scratch(group, head_dim, page_size, sinks)]
    scratches.append(_backward_scratch(head_dim, 3, 2 * ROWS))
    if self.mode == "parallel":
      scratches.append(self.merge_scratch(head_dim, sinks))
    return max(gpu.shared_memory_bytes(scratch) for scratch in scratches)

  def merge_scratch(self, head_dim: int, sinks: bool) -> gpu.Scratch:
    """Returns what one block of the merge of partials allocates."""
    scratch = {
      "partial": gpu.Buffer((self.stages, ROWS, head_dim), jnp.float32, swizzled=True),
      "stats": gpu.Buffer((self.stages, 2, ROWS), jnp.float32),
      "mean": gpu.Buffer((ROWS, head_dim), jnp.bfloat16, swizzled=True),
      "loaded": gpu.Barriers(num_barriers=self.stages * (ROWS // ROW_GROUP)),
      "stats_loaded": gpu.Barriers(num_barriers=self.stages),
    }
    if sinks:
      scratch["sinks"] = gpu.Buffer((ROWS,), jnp.float32)
      scratch["sinks_loaded"] = gpu.Barriers()
    return scratch


class Segments(NamedTuple):
  """Which rows attend to which pages.

  A segment is up to `query_tile` consecutive rows that are consecutive positions of one sequence.
  Segments lie in the order of their rows; rows and segments past the last one are padding.

  Attributes:
    positions: i32[n], absolute position of each row in its sequence.
    segment_start: i32[s], first row of the segment.
    segment_length: i32[s], valid rows of the segment.
    page_table: i32[s, p], pages of the segment's sequence by position // page_size.
    num_segments: i32[], valid segments.
  """

  positions: jax.Array
  segment_start: jax.Array
  segment_length: jax.Array
  page_table: jax.Array
  num_segments: jax.Array


class Partial(NamedTuple):
  """A softmax sum over some keys: f32[r] maximum and total, f32[r, c] weighted values."""

  maximum: jax.Array
  total: jax.Array
  weighted: jax.Array


class Work(NamedTuple):
  """Integers that say what is to be done; computed by XLA, once a call.

  Attributes:
    count: i32[1], units that there are. Each is done for every key/value head.
    segment: i32[u], of the unit.
    split: i32[u], its first split.
    num_splits: i32[u], how many splits it folds; 1 in mode "parallel".
    first_position: i32[s], of the segment.
    last_position: i32[s], of the segment.
    row_groups: i32[s], groups of 8 live rows.
    first_group: i32[u], of the unit's partial in the workspace, a key/value head.
    page_table: i32[s, p], padded to whole splits.
  """

  count: jax.Array
  segment: jax.Array
  split: jax.Array
  num_splits: jax.Array
  first_position: jax.Array
  last_position: jax.Array
  row_groups: jax.Array
  first_group: jax.Array
  page_table: jax.Array


def is_supported(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  segments: Segments,
  *,
  window: int | None = None,
  sinks: jax.Array | None = None,
  config: Config = Config(),
  interpret: bool = False,
) -> str | None:
  """Returns None if the kernels can run on these arguments here, else the reason they cannot."""
  shapes = f"q{list(q.shape)}, k_pages{list(k_pages.shape)} and v_pages{list(v_pages.shape)}"
  if q.ndim != 4 or k_pages.ndim != 4 or k_pages.shape != v_pages.shape:
    return f"got {shapes}, expected q[n, k, g, c] and pages [k, m, z, c]"
  (num_rows, num_heads, group, head_dim), page_size = q.shape, k_pages.shape[2]
  if (num_heads, head_dim) != (k_pages.shape[0], k_pages.shape[3]):
    return f"got {shapes}, expected the same k and c in q[n, k, g, c] and pages [k, m, z, c]"
  for name, x in (("q", q), ("k_pages", k_pages), ("v_pages", v_pages)):
    if x.dtype != jnp.bfloat16:
      return f"got {name} of {x.dtype}, expected bfloat16, which wgmma multiplies; cast it"
  if head_dim not in HEAD_DIMS:
    return f"got head_dim {head_dim}, expected one of {HEAD_DIMS}"
  if page_size < 8 or page_size & (page_size - 1) or config.kv_split % page_size:
    return (
      f"got pages of {page_size} positions, expected a power of two from 8 up that divides"
      f" kv_split={config.kv_split}"
    )
  rows = config.query_tile * group
  if rows > MAX_WARPGROUPS * ROWS:
    return (
      f"got query_tile={config.query_tile} times {group} query heads a key/value head, {rows} rows,"
      f" expected at most {MAX_WARPGROUPS * ROWS}; make query_tile smaller"
    )
  num_segments = segments.segment_start.shape[0] if segments.segment_start.ndim == 1 else -1
  expected = {
    "positions": (num_rows,),
    "segment_start": (num_segments,),
    "segment_length": (num_segments,),
    "page_table": (num_segments, *segments.page_table.shape[1:2]),
    "num_segments": (),
  }
  for name, shape in expected.items():
    x = getattr(segments, name)
    if x.shape != shape or x.dtype != jnp.int32:
      return (
        f"got segments.{name} {x.dtype}{list(x.shape)}, expected int32: positions[n],"
        " segment_start[s], segment_length[s], page_table[s, p], num_segments[]"
      )
  if window is not None and window < 1:
    return f"got window={window}, expected at least 1, a row's own position; None sees all"
  if sinks is not None and sinks.shape != (num_heads, group):
    return f"got sinks{list(sinks.shape)}, expected [k, g] = {[num_heads, group]}"
  needed = config.shared_memory_bytes(group, head_dim, page_size, sinks is not None)
  if needed > gpu.SHARED_MEMORY_LIMIT_BYTES:
    return (
      f"got {needed} bytes of shared memory, expected at most {gpu.SHARED_MEMORY_LIMIT_BYTES};"
      " make stages, kv_split or query_tile smaller"
    )
  return gpu.device_reason(interpret)


def reference(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  segments: Segments,
  *,
  window: int | None = None,
  sinks: jax.Array | None = None,
) -> jax.Array:
  """The definition, in float32: f32[n, k, g, c]; it reads all pages of every row's table."""
  num_heads, _, page_size, head_dim = k_pages.shape
  segment, live = _segment_of_rows(segments)
  q, k_pages, v_pages = (x.astype(jnp.float32) for x in (q, k_pages, v_pages))

  def keys_of_rows(pages: jax.Array) -> jax.Array:
    by_segment = pages[:, segments.page_table].reshape(
      num_heads, segments.page_table.shape[0], -1, head_dim
    )
    return by_segment[:, segment]

  highest = lax.Precision.HIGHEST
  scores = jnp.einsum("nkgc,knxc->nkgx", q, keys_of_rows(k_pages), precision=highest)
  scores = scores / jnp.sqrt(jnp.float32(head_dim))
  keys = jnp.arange(segments.page_table.shape[1] * page_size, dtype=jnp.int32)[None, :]
  positions = segments.positions[:, None]
  visible = keys <= positions
  if window is not None:
    visible = visible & (keys > positions - window)
  scores = jnp.where(visible[:, None, None, :], scores, -jnp.inf)
  if sinks is not None:
    more = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, :, None], (*q.shape[:3], 1))
    scores = jnp.concatenate([scores, more], axis=-1)
  weights = jax.nn.softmax(scores, axis=-1)[..., : keys.shape[1]]
  out = jnp.einsum("nkgx,knxc->nkgc", weights, keys_of_rows(v_pages), precision=highest)
  return jnp.where(live[:, None, None, None], out, jnp.float32(0))


def attention(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  segments: Segments,
  *,
  window: int | None = None,
  sinks: jax.Array | None = None,
  config: Config = Config(),
  interpret: bool = False,
) -> jax.Array:
  """Causal attention of every row over its own sequence's pages.

  A row's bits depend on that row, on the keys and values it sees and on the contract's fields of
  `config`: not on other rows or segments, on where pages lie, or whether a gradient is taken.

  Args:
    q: bf16[n, k, g, c], queries by key/value head; scaled by 1 / sqrt(c) within.
    k_pages: bf16[k, m, z, c], keys by head, page and offset; finite, also where nothing is written.
    v_pages: bf16[k, m, z, c].
    segments: which rows attend to which pages; no segment is longer than `config.query_tile`.
    window: a row sees its own position and the window - 1 before it; None is all before it. A
      `kv_split` near the window reads the fewest keys.
    sinks: f[k, g], one logit a query head, without a value, that every row also sees.
    config: see `Config`.
    interpret: run on a CPU; slow, for tests.

  Returns:
    bf16[n, k, g, c]; zero in rows of no segment.

  Raises:
    NotImplementedError: `is_supported` gives a reason; the message is that reason.
  """
  reason = is_supported(
    q, k_pages, v_pages, segments, window=window, sinks=sinks, config=config, interpret=interpret
  )
  if reason is not None:
    raise NotImplementedError(f"attention: {reason}.")
  if 0 in (q.size, segments.page_table.size):
    return jnp.zeros_like(q)
  return _attend(_Static(config, window, interpret), q, k_pages, v_pages, segments, sinks)


class _Static(NamedTuple):
  """What a kernel is compiled for."""

  config: Config
  window: int | None
  interpret: bool


def _scale(head_dim: int) -> float:
  """Returns log2(e) / sqrt(c): exp(x / sqrt(c)) = exp2(x * scale)."""
  return math.log2(math.e) / math.sqrt(head_dim)


def _rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """One value a row, for every column."""
  return lax.broadcast_in_dim(x, shape, (0,))


def _sum_of(x: jax.Array, y: jax.Array) -> jax.Array:
  """Returns x + y for two products that are rounded first: a fused multiply-add would round once,
  and whether the compiler fuses depends on the program around."""
  x, y = lax.optimization_barrier((x, y))
  return x + y


def _nothing(head_dim: int) -> Partial:
  return Partial(
    jnp.full((ROWS,), FLOOR, jnp.float32),
    jnp.zeros((ROWS,), jnp.float32),
    jnp.zeros((ROWS, head_dim), jnp.float32),
  )


def _merge(left: Partial, right: Partial) -> Partial:
  """Returns the sum over both key sets; one without a visible key leaves the other's bits."""
  shape = left.weighted.shape
  scale = _scale(shape[1])
  maximum = jnp.maximum(left.maximum, right.maximum)
  left_scale = jnp.exp2((left.maximum - maximum) * scale)
  right_scale = jnp.exp2((right.maximum - maximum) * scale)
  return Partial(
    maximum,
    _sum_of(left.total * left_scale, right.total * right_scale),
    _sum_of(left.weighted * _rows(left_scale, shape), right.weighted * _rows(right_scale, shape)),
  )


def _finish(total: Partial, sinks: jax.Array | None) -> tuple[Partial, jax.Array]:
  """Returns the sum with the sinks, and its mean f32[r, c]."""
  if sinks is not None:
    one, zero = jnp.full((ROWS,), 1, jnp.float32), jnp.zeros(total.weighted.shape, jnp.float32)
    total = _merge(total, Partial(sinks, one, zero))
  inverse = 1 / jnp.where(total.total > 0, total.total, jnp.float32(1))
  return total, total.weighted * _rows(inverse, total.weighted.shape)


def _visible(
  row: Any, key: Any, group: int, window: int | None, shape: tuple[int, ...], rows_axis: int = 0
) -> Any:
  """Returns bool[shape]: which keys the rows of a tile see.

  Args:
    row: i32[], the first row, counted from the tile's first position; `group` rows a position.
    key: i32[], the first key, counted from the tile's first position.
    group: query heads of a key/value head.
    window: a row sees its own position and window - 1 before it; None is all before it.
    shape: rows along `rows_axis`, keys along the other.
    rows_axis: 0 or 1.
  """
  # Key x is seen by row r if x <= r // group, that is x * group <= r.
  rows = lax.broadcasted_iota(jnp.int32, shape, rows_axis)
  keys = lax.broadcasted_iota(jnp.int32, shape, 1 - rows_axis)
  difference = rows - keys * group
  least = key * group - row
  visible = difference >= least
  if window is not None:
    visible = visible & (difference < least + window * group)
  return visible


def _multiply(left: Any, right: Any, columns: int) -> jax.Array:
  """Returns f32[64, columns], left @ right of two references."""

  def body(accumulator):
    plgpu.wgmma(accumulator, left, right)
    return accumulator[...]

  return pl.run_scoped(body, plgpu.WGMMAAccumulatorRef((ROWS, columns), jnp.float32))


def _items(count: Any, num_heads: int, num_blocks: int) -> Any:
  """Returns how many items, of count * num_heads, this block of a persistent grid does."""
  block = lax.axis_index("block")
  return lax.div(count * num_heads - block + (num_blocks - 1), num_blocks)


def _forward_kernel(
  static: _Static,
  group: int,
  most_groups: int,
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  sinks: jax.Array | None,
  work: Work,
) -> Any:
  """Returns f[s, k, r, c] and f32[s, k, w, 2, 64], the maximum and total of each row.

  In mode "parallel" it returns partials: f32[groups, 8, c], weighted values by unit, head and group
  of live rows, and f32[u * k, w, 2, 64].
  """
  config = static.config
  num_segments, num_heads, _, head_dim = q.shape
  page_size = k_pages.shape[2]
  compute = config.warpgroups(group)
  blocks, key_block, stages = config.kv_split // config.key_block, config.key_block, config.stages
  # What one copy moves: a page, or a block's part of it.
  piece = min(page_size, key_block)
  pieces_per_page = page_size // piece
  num_units = work.segment.shape[0]
  num_blocks = min(gpu.num_multiprocessors(static.interpret), num_units * num_heads)
  parallel = config.mode == "parallel"
  scale = _scale(head_dim)

  def body(*refs, q, p, k, v, q_loaded, k_loaded, v_loaded, q_free, k_free, v_free, **more):
    inputs, outputs = refs[:-2], refs[-2:]
    q_ref, k_ref, v_ref, *work_refs = inputs[: 3 + len(work)]
    units = Work(*work_refs)
    warpgroup = lax.axis_index("warpgroup")
    num_items = _items(units.count[0], num_heads, num_blocks)

    def item_of(index):
      item = lax.axis_index("block") + index * num_blocks
      unit = lax.div(item, num_heads)
      return unit, units.segment[unit], lax.rem(item, num_heads)

    def blocks_of(segment, split):
      """Returns i32[] twice: the split's first block that the segment sees, and how many."""
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

        @pl.when(step >= stages)
        def _():
          plgpu.barrier_wait(free.at[slot])

        for i in range(key_block // piece):
          index = block * (key_block // piece) + i
          page = units.page_table[segment, lax.div(index, pieces_per_page)]
          plgpu.copy_gmem_to_smem(
            ref.at[head, page * pieces_per_page + lax.rem(index, pieces_per_page)],
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

      # Every place that was lent comes back before the block ends.
      @pl.when(num_items > 0)
      def _():
        plgpu.barrier_wait(q_free)

      for i in range(1, stages + 1):

        @pl.when(step >= i)
        def _(i=i):
          plgpu.barrier_wait(k_free.at[lax.rem(step - i, stages)])
          plgpu.barrier_wait(v_free.at[lax.rem(step - i, stages)])

    def blocks_partial(count, step, row, key):
      """The softmax sum of `count` blocks, with their own maximum."""
      scores = []
      for b in range(count):
        slot = lax.rem(step + b, stages)
        plgpu.barrier_wait(k_loaded.at[slot])
        found = _multiply(q.at[warpgroup], k.at[slot].transpose((1, 0)), key_block)
        plgpu.barrier_arrive(k_free.at[slot])
        seen = _visible(row, key + b * key_block, group, static.window, found.shape)
        scores.append(jnp.where(seen, found, jnp.float32(MASKED)))
      maximum = jnp.full((ROWS,), FLOOR, jnp.float32)
      for s in scores:
        maximum = jnp.maximum(maximum, jnp.max(s, axis=1))
      total = jnp.zeros((ROWS,), jnp.float32)
      for b, s in enumerate(scores):
        weights = jnp.exp2((s - _rows(maximum, s.shape)) * scale)
        total = total + jnp.sum(weights, axis=1)
        p[warpgroup, b] = weights.astype(jnp.bfloat16)
      plgpu.commit_smem()

      def multiply_values(accumulator):
        for b in range(count):
          slot = lax.rem(step + b, stages)
          plgpu.barrier_wait(v_loaded.at[slot])
          plgpu.wgmma(accumulator, p.at[warpgroup, b], v.at[slot])
          if b + stages < count:
            # A later block of this split needs the place of this one.
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(v_free.at[slot])
        return accumulator[...]

      weighted = pl.run_scoped(
        multiply_values, plgpu.WGMMAAccumulatorRef((ROWS, head_dim), jnp.float32)
      )
      for b in range(max(count - stages, 0), count):
        plgpu.barrier_arrive(v_free.at[lax.rem(step + b, stages)])
      return Partial(maximum, total, weighted)

    def split_partial(step, segment, split):
      """Returns the softmax sum of one split, with its own maximum, and the next step."""
      first, count = blocks_of(segment, split)
      # Of the first key, counted from the segment's first position.
      key = split * config.kv_split + first * key_block - units.first_position[segment]
      row = warpgroup * ROWS
      if config.skip_blocks and blocks > 1:
        sums = [functools.partial(blocks_partial, n) for n in range(1, blocks + 1)]
        part = lax.switch(count - 1, sums, step, row, key)
      else:
        part = blocks_partial(blocks, step, row, key)
      return part, step + count

    def write_mean(total, segment, head):
      out_ref, stats_ref = outputs
      rows = pl.ds(warpgroup * ROWS, ROWS)
      total, mean = _finish(total, None if sinks is None else more["sinks"][warpgroup])
      stats_ref[segment, head, warpgroup, 0] = total.maximum
      stats_ref[segment, head, warpgroup, 1] = total.total
      # The queries have been read: their place takes the output.
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
          part, step = split_partial(step, segment, split)
          write_partial(part, unit, segment, head)
        else:

          def attend_split(j, carry):
            total, step = carry
            part, step = split_partial(step, segment, split + j)
            return _merge(total, part), step

          total, step = lax.fori_loop(
            0, units.num_splits[unit], attend_split, (_nothing(head_dim), step)
          )
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
    num_threads=compute + 1,
    thread_name="warpgroup",
  )(q, *(_pieces(x, piece) for x in (k_pages, v_pages)), *work, *_listed(sinks))


def _pieces(pages: jax.Array, piece: int) -> jax.Array:
  """Returns f[k, m * z / piece, piece, c]: a copy starts at a whole index."""
  return pages.reshape(pages.shape[0], -1, piece, pages.shape[-1])


def _listed(x: jax.Array | None) -> list[jax.Array]:
  return [] if x is None else [x]


def _merge_kernel(
  static: _Static,
  group: int,
  weighted: jax.Array,
  stats: jax.Array,
  sinks: jax.Array | None,
  work: Work,
  shape: tuple[int, ...],
) -> Any:
  """Returns what `_forward_kernel` returns in mode "sequential", from its partials in "parallel".

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
    num_items = _items(units.count[0], num_heads * compute, num_blocks)

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
        # Every thread has read what the next copy writes over.
        plgpu.commit_smem()

        @pl.when(j + (config.stages - 1) < num_splits)
        def _():
          load(j + (config.stages - 1))

        slot = lax.rem(first_step + j, config.stages)
        for_live_groups(
          first_step + j, lambda slot, i, _: plgpu.barrier_wait(loaded.at[slot * groups + i])
        )
        plgpu.barrier_wait(stats_loaded.at[slot])
        return _merge(total, Partial(stats[slot, 0], stats[slot, 1], partial[slot]))

      total = lax.fori_loop(0, num_splits, merge_split, _nothing(head_dim))
      row_sinks = None
      if sinks is not None:
        plgpu.barrier_wait(more["sinks_loaded"])
        row_sinks = more["sinks"][...]
      total, value = _finish(total, row_sinks)
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
  )(weighted, stats, *work, *_listed(sinks))


def _split_range(static: _Static, segments: Segments) -> tuple[jax.Array, jax.Array]:
  """Returns i32[s] twice: the first split that each segment sees and how many; none if padding."""
  used = _used(segments)
  first_position = segments.positions[segments.segment_start]
  split = jnp.int32(static.config.kv_split)
  first = jnp.zeros_like(first_position)
  if static.window is not None:
    first = jnp.maximum(first_position - jnp.int32(static.window - 1), 0) // split
  last = (first_position + segments.segment_length - 1) // split
  return jnp.where(used, first, 0), jnp.where(used, last - first + 1, 0)


def _plan(
  static: _Static, group: int, segments: Segments, page_size: int
) -> tuple[Work, Work, int]:
  """Returns (work of the forward kernel, work of the merge kernel, most groups); integers only."""
  config = static.config
  num_segments, num_pages = segments.page_table.shape
  pages_per_split = max(config.kv_split // page_size, 1)
  page_table = jnp.pad(segments.page_table, ((0, 0), (0, -num_pages % pages_per_split)))
  most_splits = page_table.shape[1] // pages_per_split
  if static.window is not None:
    most_splits = min(most_splits, (static.window + config.query_tile - 2) // config.kv_split + 2)
  first, num_splits = _split_range(static, segments)
  live = (segments.segment_length * group + (ROW_GROUP - 1)) // ROW_GROUP
  first_position = segments.positions[segments.segment_start]
  common = dict(
    first_position=first_position,
    last_position=first_position + segments.segment_length - 1,
    row_groups=live.astype(jnp.int32),
    page_table=page_table,
  )
  # Long segments begin first, so that the last ones to end are short.
  order = jnp.argsort(-num_splits, stable=True).astype(jnp.int32)
  count = jnp.sum(num_splits > 0, dtype=jnp.int32)[None]
  nothing = jnp.zeros_like(order)
  whole = Work(
    count=count,
    segment=order,
    split=first[order],
    num_splits=num_splits[order],
    first_group=nothing,
    **common,
  )
  if config.mode == "sequential":
    return whole, whole, 0
  num_rows = config.warpgroups(group) * ROWS
  most_live = min(
    num_segments * num_rows // ROW_GROUP,
    num_segments + segments.positions.shape[0] * group // ROW_GROUP,
  )
  ends = jnp.cumsum(num_splits, dtype=jnp.int32)
  first_unit = ends - num_splits
  groups = num_splits * live
  first_group = jnp.cumsum(groups, dtype=jnp.int32) - groups
  units = jnp.arange(num_segments * most_splits, dtype=jnp.int32)
  segment = jnp.searchsorted(ends, units, side="right").astype(jnp.int32)
  segment = jnp.minimum(segment, num_segments - 1)
  offset = units - first_unit[segment]
  parts = Work(
    count=ends[-1:],
    segment=segment,
    split=first[segment] + offset,
    num_splits=jnp.ones_like(segment),
    first_group=first_group[segment] + offset * live[segment],
    **common,
  )
  merges = whole._replace(split=first_unit[order], first_group=first_group[order])
  return parts, merges, most_live * most_splits


def _used(segments: Segments) -> jax.Array:
  """Returns bool[s]: the segments that are no padding."""
  numbers = jnp.arange(segments.segment_start.shape[0], dtype=jnp.int32)
  return (numbers < segments.num_segments) & (segments.segment_length > 0)


def _segment_of_rows(segments: Segments) -> tuple[jax.Array, jax.Array]:
  """Returns (i32[n], bool[n]): each row's segment, and whether it has one."""
  rows = jnp.arange(segments.positions.shape[0], dtype=jnp.int32)
  # Padding segments start past every row, so that the search never finds them.
  start = jnp.where(_used(segments), segments.segment_start, rows.shape[0])
  segment = jnp.searchsorted(start, rows, side="right").astype(jnp.int32) - 1
  segment = jnp.maximum(segment, 0)
  offset = rows - segments.segment_start[segment]
  live = (offset >= 0) & (offset < segments.segment_length[segment])
  return segment, live & _used(segments)[segment]


def _tiles(static: _Static, group: int, x: jax.Array, segments: Segments) -> jax.Array:
  """Returns f[s, k, r, c] of f[n, k, g, c]: rows by segment, position and query head; else zero."""
  num_rows, num_heads, _, head_dim = x.shape
  offsets = jnp.arange(static.config.query_tile, dtype=jnp.int32)
  row = jnp.minimum(segments.segment_start[:, None] + offsets[None, :], num_rows - 1)
  live = offsets[None, :] < segments.segment_length[:, None]
  tiles = jnp.where(live[:, :, None, None, None], x[row], jnp.zeros((), x.dtype))
  tiles = jnp.swapaxes(tiles, 1, 2).reshape(row.shape[0], num_heads, -1, head_dim)
  padding = static.config.warpgroups(group) * ROWS - tiles.shape[2]
  return jnp.pad(tiles, ((0, 0), (0, 0), (0, padding), (0, 0)))


def _from_tiles(static: _Static, group: int, tiles: jax.Array, segments: Segments) -> jax.Array:
  """Returns f[n, k, g, c] of f[s, k, r, c]; zero where no segment has the row."""
  num_segments, num_heads, _, head_dim = tiles.shape
  query_tile = static.config.query_tile
  segment, live = _segment_of_rows(segments)
  rows = jnp.arange(segment.shape[0], dtype=jnp.int32)
  offset = jnp.clip(rows - segments.segment_start[segment], 0, query_tile - 1)
  tiles = tiles[:, :, : query_tile * group]
  tiles = tiles.reshape(num_segments, num_heads, query_tile, group, head_dim)
  return jnp.where(live[:, None, None, None], tiles[segment, :, offset], jnp.zeros((), tiles.dtype))


def _sink_rows(static: _Static, sinks: jax.Array, head_dim: int) -> jax.Array:
  """Returns f32[k, w, 64] of f[k, g]: each row's sink as an unscaled score."""
  rows = static.config.warpgroups(sinks.shape[1]) * ROWS
  group = sinks.shape[1]
  scores = sinks.astype(jnp.float32) * jnp.float32(math.sqrt(head_dim))
  scores = jnp.tile(scores, (1, static.config.query_tile))
  scores = jnp.pad(scores, ((0, 0), (0, rows - static.config.query_tile * group)))
  return scores.reshape(scores.shape[0], -1, ROWS)


def _attend_tiles(
  static: _Static,
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  segments: Segments,
  sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """Returns (f[n, k, g, c], f32[s, k, w, 2, 64] maximum and total of every row)."""
  group, head_dim = q.shape[2:]
  tiles = _tiles(static, group, q, segments)
  rows = None if sinks is None else _sink_rows(static, sinks, head_dim)
  work, merges, most_groups = _plan(static, group, segments, k_pages.shape[2])
  if static.config.mode == "parallel":
    parts, stats = _forward_kernel(static, group, most_groups, tiles, k_pages, v_pages, None, work)
    out, stats = _merge_kernel(static, group, parts, stats, rows, merges, tiles.shape)
  else:
    out, stats = _forward_kernel(static, group, 0, tiles, k_pages, v_pages, rows, work)
  return _from_tiles(static, group, out, segments), stats


def _backward_scratch(head_dim: int, num_copies: int, passing_copies: int) -> gpu.Scratch:
  """Returns what one block of the backward allocates, for queries or for keys and values.

  Args:
    head_dim: c.
    num_copies: that fill what is `held` for a whole item: q and do, or k and v.
    passing_copies: that fill one of two places of the others, `passing` by.
  """
  return {
    "held": gpu.Buffer((2, ROWS, head_dim), jnp.bfloat16, swizzled=True),
    "passing": gpu.Buffer((2, 2, ROWS, head_dim), jnp.bfloat16, swizzled=True),
    "weights": gpu.Buffer((2, ROWS, ROWS), jnp.bfloat16, swizzled=True),
    "rows": gpu.Buffer((2, 3, ROWS), jnp.float32),
    "held_loaded": gpu.Barriers(num_arrivals=num_copies),
    "loaded": gpu.Barriers(num_arrivals=passing_copies, num_barriers=2),
  }


def _query_gradient_kernel(
  static: _Static,
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
  """Returns bf16[s, k, r, c], the gradient of the queries.

  Args:
    static: what to compile for.
    group: query heads of a key/value head.
    q: bf16[s, k, r, c].
    do: bf16[s, k, r, c], gradient of the output.
    rows: f32[s, k, w, 3, 64], maximum, 1 / total and sum(do * o) of each row.
    k_pages: bf16[k, m, z, c].
    v_pages: bf16[k, m, z, c].
    work: of mode "sequential".
    first: i32[s], first block of 64 keys that the segment sees.
    count: i32[s], how many it sees.
  """
  num_segments, num_heads, num_rows, head_dim = q.shape
  page_size = k_pages.shape[2]
  compute = num_rows // ROWS
  piece = min(page_size, ROWS)
  pieces, pieces_per_page = ROWS // piece, page_size // piece
  num_items = num_segments * num_heads * compute
  num_blocks = min(gpu.num_multiprocessors(static.interpret) * BLOCKS_PER_MULTIPROCESSOR, num_items)
  scale = _scale(head_dim)
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
          scores = _multiply(held.at[0], k.transpose((1, 0)), ROWS)
          dp = _multiply(held.at[1], v.transpose((1, 0)), ROWS)
          seen = _visible(block * ROWS, key + j * ROWS, group, static.window, shape)
          scores = jnp.where(seen, scores, jnp.float32(MASKED))
          p = jnp.exp2((scores - _rows(maximum, shape)) * scale) * _rows(inverse, shape)
          weights[0] = (p * (dp - _rows(delta, shape))).astype(jnp.bfloat16)
          plgpu.commit_smem()
          plgpu.wgmma(accumulator, weights.at[0], k)
          plgpu.wgmma_wait(0)
          # Every thread has waited before a copy writes over what was read.
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

    num_done = _items(units.count[0], num_heads * compute, num_blocks)
    lax.fori_loop(0, num_done, item_body, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)

  return gpu.kernel(
    body,
    name="attention_dq",
    out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
    scratch=_backward_scratch(head_dim, 3, 2 * pieces),
    num_blocks=num_blocks,
    interpret=static.interpret,
  )(q, do, rows, *(_pieces(x, piece) for x in (k_pages, v_pages)), first, count, *work)


def _page_gradient_kernel(
  static: _Static,
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
  """Returns bf16[k, m, z, c] twice, the gradients of the pages.

  Args:
    static: what to compile for.
    group: query heads of a key/value head.
    q: bf16[s, k, r, c].
    do: bf16[s, k, r, c], gradient of the output.
    rows: f32[s, k, w, 3, 64], maximum, 1 / total and sum(do * o) of each row.
    k_pages: bf16[k, m, z, c].
    v_pages: bf16[k, m, z, c].
    first_position: i32[s], of each segment.
    segment: i32[x], segments that see a page: page by page, ascending.
    index: i32[x], which of the segment's pages it is.
    start: i32[m + 1], where a page's segments begin.
  """
  _, num_heads, num_rows, head_dim = q.shape
  num_pages, page_size = k_pages.shape[1:3]
  compute = num_rows // ROWS
  piece = min(page_size, ROWS)
  pieces_per_page = page_size // piece
  num_items = num_heads * num_pages * pieces_per_page
  num_blocks = min(gpu.num_multiprocessors(static.interpret) * BLOCKS_PER_MULTIPROCESSOR, num_items)
  scale = _scale(head_dim)
  shape = (ROWS, ROWS)

  def columns(x):
    """One value a query row; rows lie along the second axis here."""
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
          # Of the first key, counted from the segment's first position.
          key = index_ref[pair] * page_size + lax.rem(place, pieces_per_page) * piece
          key = key - position_ref[segment]
          q, do = passing.at[slot, 0], passing.at[slot, 1]
          plgpu.barrier_wait(loaded.at[slot])
          maximum, inverse, delta = (rows[slot, i] for i in range(3))
          scores = _multiply(held.at[0], q.transpose((1, 0)), ROWS)
          dp = _multiply(held.at[1], do.transpose((1, 0)), ROWS)
          row = lax.rem(j, compute) * ROWS
          seen = _visible(row, key, group, static.window, shape, rows_axis=1)
          scores = jnp.where(seen, scores, jnp.float32(MASKED))
          p = jnp.exp2((scores - columns(maximum)) * scale) * columns(inverse)
          weights[0] = (p * (dp - columns(delta))).astype(jnp.bfloat16)
          weights[1] = p.astype(jnp.bfloat16)
          plgpu.commit_smem()
          plgpu.wgmma(dk, weights.at[0], q)
          plgpu.wgmma(dv, weights.at[1], do)
          plgpu.wgmma_wait(0)
          # Every thread has waited before a copy writes over what was read.
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

    lax.fori_loop(0, _items(num_items, 1, num_blocks), item_body, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)

  pieces = [_pieces(x, piece) for x in (k_pages, v_pages)]
  gradients = gpu.kernel(
    body,
    name="attention_dk_dv",
    out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pieces],
    scratch=_backward_scratch(head_dim, 2, 3),
    num_blocks=num_blocks,
    interpret=static.interpret,
  )(q, do, rows, *pieces, first_position, segment, index, start)
  return tuple(x.reshape(k_pages.shape) for x in gradients)


def _readers(
  static: _Static, segments: Segments, page_size: int, num_pages: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns (segment i32[x], index i32[x], start i32[m + 1]): who sees each page, ascending."""
  width = segments.page_table.shape[1]
  first_position = segments.positions[segments.segment_start]
  last = jnp.where(_used(segments), first_position + segments.segment_length - 1, -1)
  begin = jnp.arange(width, dtype=jnp.int32) * page_size
  seen = begin[None, :] <= last[:, None]
  if static.window is not None:
    seen = seen & (begin[None, :] + page_size > first_position[:, None] - (static.window - 1))
  pages = jnp.where(seen, segments.page_table, num_pages).reshape(-1)
  order = jnp.argsort(pages, stable=True).astype(jnp.int32)
  start = jnp.searchsorted(pages[order], jnp.arange(num_pages + 1, dtype=jnp.int32))
  return order // width, order % width, start.astype(jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
  static: _Static,
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  segments: Segments,
  sinks: jax.Array | None,
) -> jax.Array:
  return _attend_tiles(static, q, k_pages, v_pages, segments, sinks)[0]


def _attend_forward(static, q, k_pages, v_pages, segments, sinks):
  out, stats = _attend_tiles(static, q, k_pages, v_pages, segments, sinks)
  return out, (q, k_pages, v_pages, segments, sinks, out, stats)


def _attend_backward(static, saved, do):
  q, k_pages, v_pages, segments, sinks, out, stats = saved
  group, head_dim = q.shape[2:]
  num_pages, page_size = k_pages.shape[1:3]
  delta = jnp.sum(do.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
  delta_rows = _tiles(static, group, delta, segments).reshape(*stats.shape[:3], ROWS)
  # Rows past a segment's end have queries of zero; a weight of zero keeps them out of every sum.
  numbers = jnp.arange(stats.shape[2] * ROWS, dtype=jnp.int32).reshape(1, 1, -1, ROWS)
  live = jnp.where(_used(segments), segments.segment_length * group, 0)
  live = numbers < live[:, None, None, None]
  maximum = jnp.where(live, stats[:, :, :, 0], jnp.float32(0))
  inverse = jnp.where(live, 1 / stats[:, :, :, 1], jnp.float32(0))
  rows = jnp.stack([maximum, inverse, delta_rows], axis=3)
  tiles, do_tiles = (_tiles(static, group, x, segments) for x in (q, do.astype(q.dtype)))
  sequential = dataclasses.replace(static.config, mode="sequential")
  work, _, _ = _plan(static._replace(config=sequential), group, segments, page_size)
  first = jnp.zeros_like(work.first_position)
  if static.window is not None:
    first = jnp.maximum(work.first_position - jnp.int32(static.window - 1), 0) // ROWS
  last = (work.first_position + segments.segment_length - 1) // ROWS
  dq = _query_gradient_kernel(
    static, group, tiles, do_tiles, rows, k_pages, v_pages, work, first, last - first + 1
  )
  readers = _readers(static, segments, page_size, num_pages)
  dk, dv = _page_gradient_kernel(
    static, group, tiles, do_tiles, rows, k_pages, v_pages, work.first_position, *readers
  )
  dsinks = None
  if sinks is not None:
    sink_rows = _sink_rows(static, sinks, head_dim)
    weight = jnp.exp2((sink_rows[None] - maximum) * _scale(head_dim)) * inverse
    parts = jnp.where(live, weight * delta_rows, jnp.float32(0))
    parts = -jnp.sum(parts, axis=0).reshape(q.shape[1], -1)[:, : static.config.query_tile * group]
    dsinks = jnp.sum(parts.reshape(q.shape[1], -1, group), axis=1).astype(sinks.dtype)
  return _from_tiles(static, group, dq, segments), dk, dv, None, dsinks


_attend.defvjp(_attend_forward, _attend_backward)
