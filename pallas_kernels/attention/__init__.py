"""Attention of segments over pages, in splits of fixed size that are merged in ascending order.

One work item is (segment, key/value head): the `query_tile` positions x g query heads of a segment,
with every split of `kv_split` positions that it can see. One warpgroup copies pages through the
page table; one warpgroup per 64 rows computes.

  positions   0        kv_split     2 kv_split
  splits      |---- 0 ----|---- 1 ----|--- 2 ---
               (m, l, acc)  (m, l, acc)              each with its own maximum, from zero
                    `--merge--'                      left fold, ascending

The contract for a query row q and one split, with keys processed `key_block` at a time:

  s = q k^T                            f32, unscaled
  m = max of the split's visible s     one maximum per split, never carried into another
  p = exp2((s - m) * log2(e) / sqrt(c))    the only scaling
  l = sum of p, acc = bf16(p) v        blocks of keys in ascending order, f32

  merge: m = max(m1, m2); x = x1 * exp2((m1 - m) * scale) + x2 * exp2((m2 - m) * scale), for l, acc,
         each product rounded to f32 before it is added (`rounding.product`)

A sink is one more partial, (sink * sqrt(c), 1, nothing), merged after the last split. At the end
acc * (1 / l) is rounded to bfloat16, once. Splits follow absolute positions, and a fully masked
split contributes exactly nothing. Decoding (one live row), verification, chunked prefill and
training are therefore one program with one set of bits, whatever else is in the batch.

Mode "sequential" folds a segment's splits in registers. Mode "parallel" makes an item of each
split, writes its partial to memory, and a second kernel folds them: the same arithmetic, for
batches with few (segment, head) pairs compared with the GPU's multiprocessors. Mode "auto", the
default, chooses between them (`layout.mode_of`).

exp2 is the GPU's instruction, which gives zero below 2^-126: scores that far below a maximum are in
effect masked. If every row of the tile sees every key of a split, the split has no mask; a row's
bits are the same with a mask that passes everything, so they do not depend on this choice.

Registers: a thread's scores of a split (128, of 256 keys) and weighted values (64, of c = 128) do
not fit in registers together with wgmma's needs. While a thread has scores, its weighted values are
therefore stored in p's buffer, as two halves of their bits (`softmax.park`). Nothing spills to
local memory.

Backward, deterministic, without atomics. With p = exp2(...) / l of the saved m and l, and
d = sum(do * o):

  ds = p * (do v^T - d);  dq = ds k / sqrt(c);  dk = ds^T q / sqrt(c);  dv = p^T do

dq: one block per (segment, head), pages ascending. dk and dv: one block per (page, head), with the
segments that see the page ascending, so pages may be shared. p and ds are rounded to bfloat16 for
products.

Shared memory of the forward: queries, p, and `stages` blocks of keys and of values.

`config` has block sizes, `layout` rows, pages and work lists, `softmax` the sums and their merge,
`forward` and `backward` the kernels.

Sources: Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867; Shah et al. 2024
(FlashAttention-3), https://arxiv.org/abs/2407.08608; He et al. 2025 (Thinking Machines) for splits
of fixed size; Xiao et al. 2023, https://arxiv.org/abs/2309.17453, for sinks.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TypeAlias

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import gpu
from pallas_kernels.attention import backward, forward, layout
from pallas_kernels.attention.config import HEAD_DIMS, MAX_WARPGROUPS, ROWS, Config, Static
from pallas_kernels.attention.layout import Segments

__all__ = ["Config", "Segments", "attention", "is_supported", "reference"]

Shaped: TypeAlias = jax.Array | jax.ShapeDtypeStruct


def is_supported(
  q: Shaped,
  k_pages: Shaped,
  v_pages: Shaped,
  segments: Segments,
  *,
  window: int | None = None,
  sinks: Shaped | None = None,
  config: Config = Config(),
  interpret: bool = False,
) -> str | None:
  """Returns None if the kernels can run on these arguments here, else the reason."""
  shapes = f"q{list(q.shape)}, k_pages{list(k_pages.shape)} and v_pages{list(v_pages.shape)}"
  if q.ndim != 4 or k_pages.ndim != 4 or k_pages.shape != v_pages.shape:
    return f"got {shapes}, expected q[n, k, g, c] and pages [k, m, z, c]"
  (num_rows, num_heads, group, head_dim), page_size = q.shape, k_pages.shape[2]
  if num_heads % max(k_pages.shape[0], 1) or head_dim != k_pages.shape[3]:
    return (
      f"got {shapes}, expected the same c in q[n, k, g, c] and pages [k, m, z, c], and the pages' k"
      " or a multiple of it in q"
    )
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
      f"got query_tile={config.query_tile} times {group} query heads per key/value head, {rows}"
      f" rows, expected at most {MAX_WARPGROUPS * ROWS}; make query_tile smaller"
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
    return f"got window={window}, expected at least 1, a row's own position; None attends to all"
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
  """Computes the definition in float32, f32[n, k, g, c]; reads all pages of every row's table."""
  num_stored, _, page_size, head_dim = k_pages.shape
  num_heads = q.shape[1]
  segment, live = layout.segment_of_rows(segments)
  q, k_pages, v_pages = (x.astype(jnp.float32) for x in (q, k_pages, v_pages))

  def keys_of_rows(pages: jax.Array) -> jax.Array:
    pages = jnp.repeat(pages, num_heads // num_stored, axis=0)
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
  """Returns causal attention of every row over its sequence's pages.

  A row's bits depend on that row, on the keys and values it sees and on the contract fields of
  `config`, not on other rows or segments, on page indices, or on whether a gradient is taken.

  Args:
    q: bf16[n, k, g, c], queries by key/value head; scaled here by 1 / sqrt(c).
    k_pages: bf16[k, m, z, c], keys by head, page and offset; must be finite, also where unwritten.
      With fewer heads than q has, each is the head of equally many consecutive heads of q, and
      there is no gradient.
    v_pages: bf16[k, m, z, c].
    segments: which rows attend to which pages; no segment is longer than `config.query_tile`.
    window: a row sees its own position and the window - 1 before it; None is all before it. A
      `kv_split` close to the window reads the fewest keys.
    sinks: f[k, g], one logit per query head without a value, which every row also sees.
    config: see `Config`.
    interpret: run on a CPU; slow, for tests.

  Returns:
    bf16[n, k, g, c]; zero in rows without a segment.

  Raises:
    NotImplementedError: with the reason given by `is_supported`.
  """
  reason = is_supported(
    q, k_pages, v_pages, segments, window=window, sinks=sinks, config=config, interpret=interpret
  )
  gpu.refuse("attention", reason)
  if 0 in (q.size, segments.page_table.size):
    return jnp.zeros_like(q)
  mode = layout.mode_of(
    config,
    window,
    q.shape,
    segments.page_table.shape,
    k_pages.shape[2],
    sinks is not None,
    gpu.num_multiprocessors(interpret),
  )
  static = Static(dataclasses.replace(config, mode=mode), window, interpret)
  return _attend_once(static, q, k_pages, v_pages, segments, sinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
  static: Static,
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  segments: Segments,
  sinks: jax.Array | None,
) -> jax.Array:
  return forward.attend_tiles(static, q, k_pages, v_pages, segments, sinks)[0]


def _attend_forward(static, q, k_pages, v_pages, segments, sinks):
  out, stats = forward.attend_tiles(static, q, k_pages, v_pages, segments, sinks)
  return out, (q, k_pages, v_pages, segments, sinks, out, stats)


_attend.defvjp(_attend_forward, backward.gradients)
# Jitted, so that layers of equal shapes share one program, which is lowered once.
_attend_once = jax.jit(_attend, static_argnums=0)
