"""Matmul of tokens with a weight, its slabs or a SwiGLU pair, in one order for every batch.

  y[m, n] = sum over k of x[m, k] * w[k, n]  (+ bias[n]) (+ residual[m, n])         matmul
  y[m, n] = silu(x @ gate) * (x @ up)                                               swiglu
  y[m, n] = (stream[m, n] +) sum over slabs r of x[r] @ w[r]                        contract_slabs

A weight may consist of slabs [r, k, n]: slabs of columns in `matmul` and `swiglu`, where y is
[r, m, n], and slabs of the contraction in `contract_slabs`. Each call is one launch.

The reduction is the contract, and depends only on the weight's (n, k), never on m. The contraction
has parts: slabs, or `shards` of equal length into which K is divided. A part starts from zero and
adds blocks of `block_k` in ascending order: bf16 products, f32 sums in the tensor core, which
itself processes 16 at a time. Parts are added as one balanced binary tree in f32. Bias, then
residual, are added in f32; then y is rounded, once. A stream is added to the rounded sum, and the
result is rounded again: these are the bits of two operations. They are also the bits of a mesh with
some slabs per device that gathers the devices' f32 sums and adds them with
`matmul_parts.add_partials`: a balanced tree of balanced trees.

Two programs compute this tree. `sequential`: one tile of y processes all parts and adds two sums as
soon as both exist, so that with eight parts at most four sums are alive; one of them is kept in
shared memory. `parallel`, for products with too few tiles for the multiprocessors: each part of a
tile is a separate tile and writes its f32 sum to memory, and `matmul_parts` adds them. Instructions
and their order are the same for each part, and sums are single IEEE additions without an adjacent
product, so nothing can be fused. For Qwen3-8B in eight slabs, 65 to 128 rows have 48 tiles for
queries, keys and values, 96 for gate and up, and 256 for each of the two contractions (32 if they
were sequential); an H200 has 132 multiprocessors. Up to 64 rows, swapped, have 64 sequential tiles,
which were faster on an H100 than separate parts.

Two orientations share this order. The tall one puts tokens on wgmma's 64-row axis; the swapped one,
for few tokens, puts the weight's columns there and tokens on the axis that may be as short as 8.
Both gave the same bits on an H100 (docs/results/gpu.md), where few tokens are swapped by default.
In the interpreter they would not, and nothing is swapped:

            tall   tokens x columns, block_m x block_n, for more than `swapped_rows` tokens
         swapped   columns x tokens, written back transposed

One warpgroup of a block copies tiles by TMA into a ring of `stages`; the others multiply, and write
a tile of y while the operands of the next one arrive. Blocks stay on their multiprocessor and
process several tiles. Tiles beyond the edge of m, n or k read zeros and write nothing. A number of
tokens above 8 that is not a multiple of 8 costs a copy of x and y, because TMA moves 8 rows at a
time.

Backward: dx = dy @ w^T with the same kernel (so a row of dx depends only on that row) and
dw = x^T @ dy, with the sum over tokens in ascending order; dy is rounded to bf16 first.

Shared memory: (stages of x and weights) + 64 x 64 of y (and residual), two per warpgroup (+
64 x columns of f32 per warpgroup, if eight parts are added).

`config` has the caller's choices and the resulting tiles, `products` the three functions with their
gradients, `kernel` their common program.

Source: Osama et al. 2023, https://arxiv.org/abs/2301.03598, for persistent tiles; Zhang et al.
2025, https://arxiv.org/abs/2511.17826, for one tree over the contraction.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import gpu
from pallas_kernels.matmul import products
from pallas_kernels.matmul.config import MULTIPLE, ROW_MULTIPLE, Config, plan
from pallas_kernels.matmul.kernel import contract
from pallas_kernels.matmul_parts import MAX_PARTS, add_tree

__all__ = [
  "MULTIPLE",
  "ROW_MULTIPLE",
  "Config",
  "Shaped",
  "contract",
  "contract_slabs",
  "contract_slabs_reference",
  "is_supported",
  "matmul",
  "plan",
  "reference",
  "swiglu",
  "swiglu_reference",
]

Shaped: TypeAlias = jax.Array | jax.ShapeDtypeStruct


def is_supported(
  x: Shaped,
  w: Shaped,
  up: Shaped | None = None,
  *,
  kind: Literal["matmul", "swiglu", "contract_slabs"] = "matmul",
  transposed: bool = False,
  bias: Shaped | None = None,
  residual: Shaped | None = None,
  out_dtype: Any = None,
  config: Config = Config(),
  interpret: bool = False,
) -> str | None:
  """Returns None if the kernel can run on these arguments here, else the reason.

  Args:
    x: the argument x of the function.
    w: its weights; for a swiglu without `up`, the joined weights.
    up: the second weights of a swiglu.
    kind: the function.
    transposed: whether w is w[n, k].
    bias: added to each row.
    residual: the function's residual, or the stream of `contract_slabs`.
    out_dtype: dtype of the result.
    config: see `Config`.
    interpret: for a CPU.
  """
  pair = kind == "swiglu" or up is not None
  summed = kind == "contract_slabs"
  weight = "w[n, k]" if transposed else "w[k, n]"
  if summed:
    if w.ndim != 3 or w.shape[0] not in (1, 2, 4, MAX_PARTS):
      return f"got w{list(w.shape)}, expected 1, 2, 4 or {MAX_PARTS} slabs, w[r, ...]"
    k = w.shape[2 if transposed else 1]
    if x.ndim not in (2, 3) or x.shape[-1] != (k if x.ndim == 3 else w.shape[0] * k):
      return f"got x{list(x.shape)} and w{list(w.shape)}, expected x[r, m, k] or x[m, r * k]"
    if x.ndim == 3 and x.shape[0] != w.shape[0]:
      return f"got x{list(x.shape)} and w{list(w.shape)}, expected the same number of slabs"
  elif x.ndim != 2 or w.ndim not in (2, 3) or x.shape[1] != w.shape[-1 if transposed else -2]:
    return f"got x{list(x.shape)} and w{list(w.shape)}, expected x[m, k] and {weight}"
  for name, array in (("x", x), ("w", w), ("up", up)):
    if array is not None and array.dtype != jnp.bfloat16:
      return f"got {name} of {array.dtype}, expected bfloat16; cast it"
  if up is not None and up.shape != w.shape:
    return f"got up{list(up.shape)}, expected gate's shape {list(w.shape)}"
  if pair and config.shards != 1:
    return f"got shards={config.shards} for swiglu, expected 1: silu is applied to whole sums"
  if summed and config.shards != 1:
    return f"got shards={config.shards} for contract_slabs, expected 1: its slabs are the parts"
  num_rows, k = x.shape[-2], w.shape[-1 if transposed else -2]
  n, slabs = w.shape[-2 if transposed else -1], w.shape[:-2]
  joined = pair and up is None
  if joined and n % (2 * MULTIPLE):
    return f"got n={n} for gate and up in one, expected a multiple of {2 * MULTIPLE}: pad each"
  n = n // 2 if joined else n
  for name, size in (("k", k), ("n", n)):
    if size < MULTIPLE or size % MULTIPLE:
      return f"got {name}={size}, expected a positive multiple of {MULTIPLE}: pad it"
  if config.shards > 1 and k % (config.shards * config.block_k):
    return (
      f"got k={k} in {config.shards} shards, expected a multiple of shards * block_k ="
      f" {config.shards * config.block_k}; take fewer shards"
    )
  if summed and x.ndim == 2 and k % config.block_k:
    return (
      f"got k={k} for adjacent slabs, expected a multiple of block_k = {config.block_k}; take a"
      " smaller block_k, or x[r, m, k]"
    )
  if 0 in slabs:
    return f"got w{list(w.shape)}, expected at least one slab"
  floats = (jnp.bfloat16, jnp.float32)
  added = "stream" if summed else "residual"
  planes = () if summed else slabs
  for name, array, shape in (("bias", bias, (n,)), (added, residual, (num_rows, n))):
    expected = (*planes, *shape)
    if array is not None and (array.shape != expected or array.dtype not in floats):
      return (
        f"got {name} {array.dtype}{list(array.shape)}, expected bfloat16 or float32"
        f" {list(expected)}"
      )
  if out_dtype is not None and jnp.dtype(out_dtype) not in floats:
    return f"got out_dtype={jnp.dtype(out_dtype)}, expected bfloat16 or float32"
  tiles = plan(
    config,
    num_rows,
    columns=n,
    pair=pair,
    slabs=w.shape[0] if summed else None,
    w_k_last=transposed,
    out_dtype=out_dtype or x.dtype,
    residual_dtype=None if residual is None else residual.dtype,
    interpret=interpret,
  )
  return gpu.shared_memory_reason(
    tiles.scratch(tiles.stages), "block_m, block_n or block_k"
  ) or gpu.device_reason(interpret)


def reference(
  x: jax.Array,
  w: jax.Array,
  *,
  transposed: bool = False,
  bias: jax.Array | None = None,
  residual: jax.Array | None = None,
) -> jax.Array:
  """Computes the definition of `matmul` in float32: f32[m, n] or f32[r, m, n]."""
  w32 = w.astype(jnp.float32)
  w32 = w32.swapaxes(-1, -2) if transposed else w32
  y = jnp.matmul(x.astype(jnp.float32), w32, precision=lax.Precision.HIGHEST)
  if bias is not None:
    y = y + bias.astype(jnp.float32)[..., None, :]
  return y if residual is None else y + residual.astype(jnp.float32)


def swiglu_reference(
  x: jax.Array, gate: jax.Array, up: jax.Array | None = None, *, transposed: bool = False
) -> jax.Array:
  """Computes the definition of `swiglu` in float32: f32[m, n] or f32[r, m, n]."""
  if up is None:
    gate, up = jnp.split(gate, 2, axis=-2 if transposed else -1)
  return jax.nn.silu(reference(x, gate, transposed=transposed)) * reference(
    x, up, transposed=transposed
  )


def contract_slabs_reference(
  x: jax.Array, w: jax.Array, *, transposed: bool = False, stream: jax.Array | None = None
) -> jax.Array:
  """Computes the definition of `contract_slabs` in float32, without rounding: f32[m, n]."""
  if x.ndim == 2:
    x = jnp.swapaxes(x.reshape(x.shape[0], w.shape[0], -1), 0, 1)
  partials = reference(x, w, transposed=transposed)
  y = add_tree(list(partials))
  return y if stream is None else y + stream.astype(jnp.float32)


def matmul(
  x: jax.Array,
  w: jax.Array,
  *,
  transposed: bool = False,
  bias: jax.Array | None = None,
  residual: jax.Array | None = None,
  out_dtype: Any = None,
  config: Config = Config(),
  interpret: bool = False,
) -> jax.Array:
  """Returns x @ w (+ bias) (+ residual): f[m, n], rounded once; a row's bits depend only on it.

  Args:
    x: bf16[m, k]; m may be 0.
    w: bf16[k, n], or bf16[n, k] if `transposed`. Or r slabs of columns, bf16[r, k, n]: y is then
      f[r, m, n] from one launch, with the bits of one call per slab.
    transposed: whether w is stored with the contraction last, like an embedding table.
    bias: bf16 or f32 [n], or [r, n].
    residual: bf16 or f32 [m, n], or [r, m, n].
    out_dtype: bfloat16 or float32; None is x's dtype.
    config: see `Config`.
    interpret: run on a CPU; slow, for tests.

  Raises:
    NotImplementedError: with the reason given by `is_supported`.
  """
  reason = is_supported(
    x, w, transposed=transposed, bias=bias, residual=residual, out_dtype=out_dtype, config=config,
    interpret=interpret,
  )  # fmt: skip
  gpu.refuse("matmul", reason)
  dtype = jnp.dtype(out_dtype or x.dtype).name
  return products.matmul(x, w, bias, residual, transposed, dtype, config, interpret)


def swiglu(
  x: jax.Array,
  gate: jax.Array,
  up: jax.Array | None = None,
  *,
  transposed: bool = False,
  config: Config = Config(),
  interpret: bool = False,
) -> jax.Array:
  """Returns silu(x @ gate) * (x @ up): bf16[m, n], rounded once, after the product.

  Arguments and errors are those of `matmul`, slabs included; `up` has gate's shape. Without it
  `gate` contains both, bf16[k, 2 n]: the columns of gate, then those of up (per slab, if there are
  slabs). Neither is copied.
  """
  reason = is_supported(
    x, gate, up, kind="swiglu", transposed=transposed, config=config, interpret=interpret
  )
  gpu.refuse("swiglu", reason)
  return products.swiglu(x, gate, up, transposed, config, interpret)


def contract_slabs(
  x: jax.Array,
  w: jax.Array,
  *,
  transposed: bool = False,
  stream: jax.Array | None = None,
  out_dtype: Any = None,
  config: Config = Config(),
  interpret: bool = False,
) -> jax.Array:
  """Returns the rounded sum over slabs of x[r] @ w[r] as one tree, or stream + sum: f[m, n].

  With a stream it is rounded twice, like `stream + contract_slabs(x, w)`. A device with some of a
  mesh's slabs requests float32; its sum is one part for `add_partials`.

  Args:
    x: bf16[r, m, k], or bf16[m, r * k] with the slabs side by side; m may be 0.
    w: bf16[r, k, n], or bf16[r, n, k] if `transposed`; r is 1, 2, 4 or 8.
    transposed: whether w is stored with the contraction last.
    stream: bf16 or f32 [m, n].
    out_dtype: bfloat16 or float32; None is x's dtype.
    config: see `Config`; its `shards` is 1.
    interpret: run on a CPU; slow, for tests.

  Raises:
    NotImplementedError: with the reason given by `is_supported`.
  """
  reason = is_supported(
    x, w, kind="contract_slabs", transposed=transposed, residual=stream, out_dtype=out_dtype,
    config=config, interpret=interpret,
  )  # fmt: skip
  gpu.refuse("contract_slabs", reason)
  dtype = jnp.dtype(out_dtype or x.dtype).name
  return products.contract_slabs(x, w, stream, transposed, dtype, config, interpret)
