"""Matmul of tokens with a weight or its slabs, and a SwiGLU pair; one reduction order whatever the
batch.

  y[m, n] = sum over k of x[m, k] * w[k, n]  (+ bias[n]) (+ residual[m, n])         matmul
  y[m, n] = silu(x @ gate) * (x @ up)                                               swiglu
  y[m, n] = (stream[m, n] +) sum over slabs r of x[r] @ w[r]                        contract_slabs

A weight may come as slabs [r, k, n]: of `matmul` and `swiglu` they are slabs of columns, and y is
[r, m, n]; of `contract_slabs` they are slabs of the contraction. All are one launch.

The reduction is the contract, and follows the weight's (n, k) alone, never m. The contraction has
parts: slabs, or `shards` of equal length that K is cut into. A part starts from zero and adds
blocks of `block_k` in ascending order: bf16 products, f32 sums in the tensor core, which itself
takes 16 at a time. Parts are added as one balanced binary tree in f32. Bias, then residual, are
added in f32; then y is rounded, once. A stream is added to the rounded sum, and rounded once more:
these are the bits of two operations, and those of a mesh whose devices hold some slabs each, gather
their f32 sums and add them by `matmul_parts.add_partials`: a balanced tree of balanced trees.

Two programs share that tree. `sequential`: one tile of y goes through all parts and adds two sums
as soon as both exist, so that of eight parts four sums are alive at most; one of them waits in
shared memory. `parallel`, for products whose tiles would leave most multiprocessors without one:
each part of a tile is a tile by itself and leaves its f32 sum in memory, and `matmul_parts` adds
them. Instructions and their order are the same for each part, and sums are single IEEE additions
with no product beside them, so that nothing can be fused into them. Of Qwen3-8B in eight slabs, up
to 128 rows have 48 tiles for queries, keys and values, 96 for gate and up, and 256 for each of the
two contractions, which would be 32 if they were sequential; an H200 has 132 multiprocessors.

Two orientations share this order; by default all take the tall one. It lays tokens on wgmma's
64-row axis; the swapped one, for few tokens, lays the weight's columns there and tokens on the axis
that may be as short as 8:

            tall   tokens x columns, block_m x block_n, for more than `swapped_rows` tokens
         swapped   columns x tokens, written back transposed

One warpgroup of a block copies tiles by TMA into a ring of `stages`; the others multiply, and write
a tile of y while the next one's operands already arrive. Blocks stay on their multiprocessor and
walk over tiles. Tiles over the edge of m, n or k read zeros and write nothing. More than 8 tokens
that are no multiple of 8 cost a copy of x and y: TMA moves 8 rows at a time.

Backward: dx = dy @ w^T by the same kernel (so a row of dx depends on that row alone) and
dw = x^T @ dy, whose sum over tokens is in ascending order; dy is rounded to bf16 first.

Shared memory: (stages of x and weights) + 64 x 64 of y (and residual), two for each warpgroup (+
64 x columns of f32 for each warpgroup, where eight parts are added).

Source: Osama et al. 2023, https://arxiv.org/abs/2301.03598, for persistent tiles; Zhang et al.
2025, https://arxiv.org/abs/2511.17826, for one tree over the contraction.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any, Literal, TypeAlias

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import gpu
from pallas_kernels.matmul_parts import MAX_PARTS, add_parts, add_tree
from pallas_kernels.matmul_tiles import SQUARE, WGMMA_ROWS, Groups, Plan, Tile

# Shared memory is laid out in tiles of 8 rows x 64 bfloat16, and TMA copies whole ones: n and k are
# multiples of 64; of more than 8 tokens, up to 7 rows of zeros are added.
MULTIPLE = 64
ROW_MULTIPLE = 8
# A weight of at most so many columns has narrow tiles, so that its slabs fill more of the machine.
NARROW_COLUMNS = 1024
# Of so many parts, the first half's sum waits in shared memory for the second's.
PARKED_PARTS = 4
# Parts lie apart where fewer than one multiprocessor in so many would have a tile.
IDLE_SHARE = 3
# The copying warpgroup gives registers to the two others: 24 + 2 * 240 of 504 a thread.
COPY_REGISTERS = 24
MULTIPLY_REGISTERS = 240

Arrays: TypeAlias = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The reduction, and how it is spread over the machine.

  Attributes:
    block_k: contract. Elements of the contraction that are copied, then added, at once.
    shards: contract. Equal parts of the contraction, added as one tree: 1, 2, 4 or 8.
    swapped_rows: contract, and tuning once a GPU has shown that both orientations, and every width
      of the swapped one, give the same bits. Up to so many tokens take the swapped one; 0, the
      default, for never: then no instruction follows m.
    block_m: tuning. Tokens of a tall tile: 64 for each of its warpgroups.
    block_n: tuning. Columns of a tall tile; halved for a pair and where parts are added, at most
      128 for a weight (or a slab) of at most 1,024 columns. It follows no number of rows.
    swapped_block_n: tuning. Columns of a swapped tile: 64 for each of its warpgroups.
    max_stages: tuning. Depth of the ring, where shared memory allows it.
    snake_width: tuning. Tiles along n that are walked together, so that L2 serves them; of these
      the largest divisor that it shares with their number.
    mode: tuning. "sequential", "parallel", or "auto": parallel where a product of several parts has
      tiles for fewer than a third of the multiprocessors (and no bias). Both give the same bits.
  """

  block_k: int = 64
  shards: int = 1
  swapped_rows: int = 0
  block_m: int = 128
  block_n: int = 256
  swapped_block_n: int = 64
  max_stages: int = 8
  snake_width: int = 8
  mode: str = "auto"

  def __post_init__(self) -> None:
    choices = {
      "block_k": (64, 128),
      "shards": (1, 2, 4, 8),
      "swapped_rows": (0, 8, 16, 32, 64),
      "block_m": (64, 128),
      "block_n": (128, 256),
      "swapped_block_n": (64, 128),
      "mode": ("auto", "sequential", "parallel"),
    }
    for name, allowed in choices.items():
      if getattr(self, name) not in allowed:
        raise ValueError(f"got {name}={getattr(self, name)}; expected one of {allowed}.")
    for name, least in (("max_stages", 2), ("snake_width", 1)):
      if getattr(self, name) < least:
        raise ValueError(f"got {name}={getattr(self, name)}; expected at least {least}.")

  def shared_memory_bytes(
    self, num_rows: int, *, pair: bool = False, residual: bool = False
  ) -> int:
    """Returns what a block takes for that many tokens."""
    return plan(
      self, num_rows, pair=pair, residual_dtype=jnp.bfloat16 if residual else None
    ).shared_memory_bytes


def plan(
  config: Config,
  num_rows: int,
  *,
  columns: int | None = None,
  pair: bool = False,
  joined: bool = False,
  slabs: int | None = None,
  x_k_last: bool = True,
  w_k_last: bool = False,
  out_dtype: Any = jnp.bfloat16,
  residual_dtype: Any = None,
) -> Plan:
  """Returns the tiles for that many tokens; the order of no sum depends on them.

  Args:
    config: see `Config`.
    num_rows: m.
    columns: n, where it may make tiles narrow.
    pair, joined: of `swiglu`, whose weights may be one array.
    slabs: those that are added; None where they are not, and K is cut into the config's shards.
    x_k_last, w_k_last, out_dtype, residual_dtype: see `Plan`.
  """
  shards = config.shards if slabs is None else slabs
  # Tokens that are contracted (dw) have no short side: they stay tall.
  swapped = x_k_last and num_rows <= config.swapped_rows
  if swapped:
    block_m = next(size for size in (8, 16, 32, 64) if num_rows <= size)
    block_n = config.swapped_block_n
  else:
    block_m = config.block_m
    block_n = config.block_n // 2 if pair or shards > 1 else config.block_n
    if columns is not None and columns <= NARROW_COLUMNS:
      block_n = min(block_n, 128)
  return Plan(
    block_m=block_m,
    block_n=block_n,
    block_k=config.block_k,
    swapped=swapped,
    num_weights=2 if pair else 1,
    joined=joined,
    x_k_last=x_k_last,
    w_k_last=w_k_last,
    shards=shards,
    slabs_summed=slabs is not None,
    rounds_first=slabs is not None,
    out_dtype=jnp.dtype(out_dtype),
    residual_dtype=residual_dtype,
    max_stages=config.max_stages,
    snake_width=config.snake_width,
  )


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
  """Returns None if the kernel can run on these arguments here, else the reason that it cannot.

  Args:
    x, w, up: the operands; `up` alone makes it a swiglu, and a swiglu without it is of a joined w.
    kind: the function that is asked about.
    transposed, bias, out_dtype, config, interpret: that function's.
    residual: that function's, or `contract_slabs`'s stream.
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
      return f"got x{list(x.shape)} and w{list(w.shape)}, expected as many slabs of both"
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
      f"got k={k} of a slab beside the next one's, expected a multiple of block_k ="
      f" {config.block_k}; take a smaller block_k, or x[r, m, k]"
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
  """The definition of `matmul`, in float32: f32[m, n] or f32[r, m, n]."""
  w32 = w.astype(jnp.float32)
  w32 = w32.swapaxes(-1, -2) if transposed else w32
  y = jnp.matmul(x.astype(jnp.float32), w32, precision=lax.Precision.HIGHEST)
  if bias is not None:
    y = y + bias.astype(jnp.float32)[..., None, :]
  return y if residual is None else y + residual.astype(jnp.float32)


def swiglu_reference(
  x: jax.Array, gate: jax.Array, up: jax.Array | None = None, *, transposed: bool = False
) -> jax.Array:
  """The definition of `swiglu`, in float32: f32[m, n] or f32[r, m, n]."""
  if up is None:
    gate, up = jnp.split(gate, 2, axis=-2 if transposed else -1)
  return jax.nn.silu(reference(x, gate, transposed=transposed)) * reference(
    x, up, transposed=transposed
  )


def contract_slabs_reference(
  x: jax.Array, w: jax.Array, *, transposed: bool = False, stream: jax.Array | None = None
) -> jax.Array:
  """The definition of `contract_slabs`, in float32 (the sum is not rounded): f32[m, n]."""
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
  """Returns x @ w (+ bias) (+ residual): f[m, n], rounded once; a row's bits depend on it alone.

  Args:
    x: bf16[m, k]; m may be 0.
    w: bf16[k, n], or bf16[n, k] where `transposed`. Or r slabs of columns, bf16[r, k, n]: y is then
      f[r, m, n] by one launch, with the bits of a call for each slab.
    transposed: w is stored with the contraction last, as an embedding table is.
    bias: bf16 or f32 [n], or [r, n].
    residual: bf16 or f32 [m, n], or [r, m, n].
    out_dtype: bfloat16 or float32; x's where None.
    config: see `Config`.
    interpret: run on a CPU; slow, for tests.

  Raises:
    NotImplementedError: `is_supported` gives a reason; the message is that reason.
  """
  reason = is_supported(
    x,
    w,
    transposed=transposed,
    bias=bias,
    residual=residual,
    out_dtype=out_dtype,
    config=config,
    interpret=interpret,
  )
  if reason is not None:
    raise NotImplementedError(f"matmul: {reason}.")
  dtype = jnp.dtype(out_dtype or x.dtype).name
  return _matmul(x, w, bias, residual, transposed, dtype, config, interpret)


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

  Arguments and refusals are those of `matmul`, slabs too; `up` has gate's shape. Without it `gate`
  holds both, bf16[k, 2 n]: the columns of gate, and then those of up (of each slab, where there
  are slabs). Neither is copied.
  """
  reason = is_supported(
    x, gate, up, kind="swiglu", transposed=transposed, config=config, interpret=interpret
  )
  if reason is not None:
    raise NotImplementedError(f"swiglu: {reason}.")
  return _swiglu(x, gate, up, transposed, config, interpret)


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
  """Returns the sum over slabs of x[r] @ w[r], as one tree, rounded; or stream + that: f[m, n].

  With a stream it is rounded twice, as `stream + contract_slabs(x, w)` is. A device that holds some
  of a mesh's slabs asks for float32 of its own; its sum is one part of `add_partials`.

  Args:
    x: bf16[r, m, k], or bf16[m, r * k] with the slabs side by side; m may be 0.
    w: bf16[r, k, n], or bf16[r, n, k] where `transposed`; r is 1, 2, 4 or 8.
    transposed: w is stored with the contraction last.
    stream: bf16 or f32 [m, n].
    out_dtype: bfloat16 or float32; x's where None.
    config: see `Config`; its `shards` is 1.
    interpret: run on a CPU; slow, for tests.

  Raises:
    NotImplementedError: `is_supported` gives a reason; the message is that reason.
  """
  reason = is_supported(
    x,
    w,
    kind="contract_slabs",
    transposed=transposed,
    residual=stream,
    out_dtype=out_dtype,
    config=config,
    interpret=interpret,
  )
  if reason is not None:
    raise NotImplementedError(f"contract_slabs: {reason}.")
  dtype = jnp.dtype(out_dtype or x.dtype).name
  return _contract_slabs(x, w, stream, transposed, dtype, config, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def _matmul(x, w, bias, residual, transposed, out_dtype, config, interpret):
  tiles = plan(
    config,
    x.shape[0],
    columns=w.shape[-2 if transposed else -1],
    w_k_last=transposed,
    out_dtype=jnp.dtype(out_dtype),
    residual_dtype=None if residual is None else residual.dtype,
  )
  return _product(tiles, x, (w,), bias, residual, config, interpret)


def _matmul_forward(x, w, bias, residual, transposed, out_dtype, config, interpret):
  y = _matmul(x, w, bias, residual, transposed, out_dtype, config, interpret)
  return y, (x, w, bias, residual)


def _matmul_backward(transposed, out_dtype, config, interpret, saved, dy):
  x, w, bias, residual = saved
  rounded = dy.astype(x.dtype)
  dx = _input_gradient(rounded, w, transposed, x.dtype, config, interpret)
  dw = _weight_gradient(x, rounded, transposed, w.dtype, config, interpret)
  dbias = None
  if bias is not None:
    # Rows of ones add up dy, in the order of dw.
    ones = jnp.ones((x.shape[0], MULTIPLE), x.dtype)
    dbias = _weight_gradient(ones, rounded, False, bias.dtype, config, interpret)[..., 0, :]
  return dx, dw, dbias, None if residual is None else dy.astype(residual.dtype)


_matmul.defvjp(_matmul_forward, _matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _swiglu(x, gate, up, transposed, config, interpret):
  n = gate.shape[-2 if transposed else -1] // (2 if up is None else 1)
  tiles = plan(config, x.shape[0], columns=n, pair=True, joined=up is None, w_k_last=transposed)
  return contract(tiles, x, (gate,) if up is None else (gate, up), None, None, interpret)


def _swiglu_forward(x, gate, up, transposed, config, interpret):
  return _swiglu(x, gate, up, transposed, config, interpret), (x, gate, up)


def _swiglu_backward(transposed, config, interpret, saved, dy):
  x, gate, up = saved
  # The two sums are made again, in the forward's order, instead of stored.
  again = lambda w: _matmul(x, w, None, None, transposed, "float32", config, interpret)
  gated, raised = jnp.split(again(gate), 2, axis=-1) if up is None else (again(gate), again(up))
  activated, pull = jax.vjp(jax.nn.silu, gated)
  dy32 = dy.astype(jnp.float32)
  dgated = pull(dy32 * raised)[0].astype(x.dtype)
  draised = (dy32 * activated).astype(x.dtype)
  weight_gradient = functools.partial(
    _weight_gradient, x, transposed=transposed, dtype=gate.dtype, config=config, interpret=interpret
  )
  input_gradient = functools.partial(
    _input_gradient, transposed=transposed, config=config, interpret=interpret
  )
  if up is None:
    both = jnp.concatenate([dgated, draised], axis=-1)
    return input_gradient(both, gate, dtype=x.dtype), weight_gradient(both), None
  dx = input_gradient(dgated, gate, dtype=jnp.float32)
  dx = dx + input_gradient(draised, up, dtype=jnp.float32)
  return dx.astype(x.dtype), weight_gradient(dgated), weight_gradient(draised)


_swiglu.defvjp(_swiglu_forward, _swiglu_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _contract_slabs(x, w, stream, transposed, out_dtype, config, interpret):
  tiles = plan(
    config,
    x.shape[-2],
    columns=w.shape[-2 if transposed else -1],
    slabs=w.shape[0],
    w_k_last=transposed,
    out_dtype=jnp.dtype(out_dtype),
    residual_dtype=None if stream is None else stream.dtype,
  )
  return _product(tiles, x, (w,), None, stream, config, interpret)


def _contract_slabs_forward(x, w, stream, transposed, out_dtype, config, interpret):
  y = _contract_slabs(x, w, stream, transposed, out_dtype, config, interpret)
  return y, (x, w, None if stream is None else stream[:0])


def _contract_slabs_backward(transposed, out_dtype, config, interpret, saved, dy):
  del out_dtype
  x, w, stream = saved
  slabs, rows = w.shape[0], x.shape[-2]
  rounded = dy.astype(x.dtype)
  dx = _slab_gradients(rounded, w, transposed, x.dtype, config, interpret)
  dw = _weight_gradient(x, rounded, transposed, w.dtype, config, interpret)
  if x.ndim == 2:  # Slabs lie side by side.
    dx = jnp.swapaxes(dx, 0, 1).reshape(rows, -1)
    if transposed:
      dw = jnp.swapaxes(dw.reshape(dw.shape[0], slabs, -1), 0, 1)
    else:
      dw = dw.reshape(w.shape)
  return dx, dw, None if stream is None else dy.astype(stream.dtype)


_contract_slabs.defvjp(_contract_slabs_forward, _contract_slabs_backward)


def _input_gradient(
  dy: jax.Array, w: jax.Array, transposed: bool, dtype: Any, config: Config, interpret: bool
) -> jax.Array:
  """Returns dy @ w^T, [m, k]: a forward matmul of the weight stored the other way round.

  Slabs, [r, m, n] and w's, are parts of one contraction, rounded once; of more than eight, eights
  are added in ascending order.
  """
  if w.ndim == 2:
    return _slab_gradients(dy, w, transposed, dtype, config, interpret)
  whole = dataclasses.replace(config, shards=1)

  def of(first: int, size: int, out_dtype: Any) -> jax.Array:
    tiles = plan(
      whole,
      dy.shape[-2],
      columns=w.shape[-1 if transposed else -2],
      slabs=size,
      w_k_last=not transposed,
      out_dtype=out_dtype,
    )
    some = slice(first, first + size)
    return _product(tiles, dy[some], (w[some],), None, None, whole, interpret)

  slabs = w.shape[0]
  if slabs <= MAX_PARTS:
    return of(0, slabs, dtype)
  eights = range(0, slabs, MAX_PARTS)
  sums = [of(first, min(MAX_PARTS, slabs - first), jnp.float32) for first in eights]
  return functools.reduce(jnp.add, sums).astype(dtype)


def _slab_gradients(
  dy: jax.Array, w: jax.Array, transposed: bool, dtype: Any, config: Config, interpret: bool
) -> jax.Array:
  """Returns dy @ w^T, [m, k], or that of each slab, [r, m, k]."""
  whole = dataclasses.replace(config, shards=1)
  columns = w.shape[-1 if transposed else -2]
  tiles = plan(whole, dy.shape[-2], columns=columns, w_k_last=not transposed, out_dtype=dtype)
  return contract(tiles, dy, (w,), None, None, interpret)


def _weight_gradient(
  x: jax.Array, dy: jax.Array, transposed: bool, dtype: Any, config: Config, interpret: bool
) -> jax.Array:
  """Returns the sum over tokens of x^T dy, [k, n] or, where transposed, [n, k]; for each slab."""
  if x.shape[-2] == 0:
    n, k = dy.shape[-1], x.shape[-1]
    slabs = dy.shape[:-2] or x.shape[:-2]
    return jnp.zeros((*slabs, *((n, k) if transposed else (k, n))), dtype)
  whole = dataclasses.replace(config, shards=1)
  left, right = (dy, x) if transposed else (x, dy)
  tiles = plan(whole, left.shape[-1], x_k_last=False, out_dtype=dtype)
  return contract(tiles, left, (right,), None, None, interpret)


def _product(
  tiles: Plan,
  x: jax.Array,
  weights: Arrays,
  bias: jax.Array | None,
  residual: jax.Array | None,
  config: Config,
  interpret: bool,
) -> jax.Array:
  """Returns y, in the mode that fills the machine; both modes give one set of bits."""
  if not _is_parallel(tiles, x, weights[0], bias, config, interpret):
    return contract(tiles, x, weights, bias, residual, interpret)
  each = dataclasses.replace(
    tiles, apart=True, rounds_first=False, out_dtype=jnp.dtype(jnp.float32), residual_dtype=None
  )
  partials = contract(each, x, weights, None, None, interpret)
  several = partials.ndim == 4
  y = add_parts(
    partials if several else partials[None],
    residual if several or residual is None else residual[None],
    tiles.rounds_first,
    tiles.out_dtype,
    interpret,
  )
  return y if several else y[0]


def _is_parallel(
  tiles: Plan,
  x: jax.Array,
  w: jax.Array,
  bias: jax.Array | None,
  config: Config,
  interpret: bool,
) -> bool:
  """Whether parts are tiles of their own. It never decides a bit."""
  m, n = x.shape[-2], w.shape[-2 if tiles.w_k_last else -1]
  if tiles.shards == 1 or bias is not None or config.mode == "sequential" or m == 0:
    return False
  planes = 1 if w.ndim == 2 or tiles.slabs_summed else w.shape[0]
  num_tiles = planes * -(-m // tiles.block_m) * -(-n // tiles.block_n)
  is_idle = num_tiles * IDLE_SHARE < gpu.num_multiprocessors(interpret)
  return config.mode == "parallel" or is_idle


@functools.partial(jax.jit, static_argnames=("tiles", "interpret"))
def contract(
  tiles: Plan,
  x: jax.Array,
  weights: Arrays,
  bias: jax.Array | None,
  residual: jax.Array | None,
  interpret: bool,
  groups: Groups | None = None,
) -> jax.Array:
  """The kernel. x is [m, k], or [k, m] unless `x_k_last`; weights are [k, n], or [n, k].

  Of x, of weights, or of both there may be r, [r, ...]: of y, bias and residual there are r then,
  unless those slabs are summed, where x may also be [m, r * k]. Of parts that lie apart y has one
  plane each, [s, m, n] or [r, s, m, n].
  With groups whose rows are cut, each tile takes one of the weights; where the contraction is cut,
  x and w are one matrix each, and y one for each item. What no item covers is not written.

  Compiled by itself: a layer that calls it as another does adds nothing to a program's text.
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
  # A contraction of tokens has the rows of zeros too.
  k = k if tiles.x_k_last else x.shape[-2]
  part_size = k if tiles.slabs_summed else k // shards
  cut_rows, cut_parts = (groups, None) if tiles.x_k_last else (None, groups)
  grid = (-(-m // tiles.block_m), -(-n // tiles.block_n))
  # A remainder would cost a division by what is known on the GPU alone, which is made of floats.
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
    # (reference, first column) of each.
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
      """Visits this block's tiles, each with the number of steps before it; returns all steps."""
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
          # Where a slab is not a matrix of its own, it is cut from one.
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

        # One loop over all parts: the compiler would unroll short ones into registers it lacks.
        lax.fori_loop(0, parts_of_tile * tile.steps, copy_step, None)

      past = for_each_tile(copy_tile)
      # No barrier is left with an arrival that was not waited for.
      drain = lambda step, _: plgpu.barrier_wait(empty.at[lax.rem(step, stages)])
      lax.fori_loop(jnp.maximum(past - stages, 0), past, drain, None)

    @pl.when(warpgroup < copying)
    def _():
      if tiles.warpgroups > 1:
        plgpu.set_max_registers(MULTIPLY_REGISTERS, action="increase")
      mine = pl.ds(warpgroup * WGMMA_ROWS, WGMMA_ROWS)

      def multiply(accumulators, slot):
        """Adds one block of the contraction; the warpgroup's 64 rows are tokens, or columns."""
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
          # The previous block has been read once only this one's products are under way.
          plgpu.wgmma_wait(len(accumulators))
          previous = lax.rem(step + stages - 1, stages)
          pl.when(step > first_step)(lambda: plgpu.barrier_arrive(empty.at[previous]))

        lax.fori_loop(first_step, first_step + steps, add_step, None)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(empty.at[lax.rem(first_step + steps - 1, stages)])
        # Layouts are named wherever the search for them would be long (minutes, on JAX 0.10).
        return tuple(
          plgpu.layout_cast(accumulator[...], plgpu.Layout.WGMMA) for accumulator in accumulators
        )

      wgmma_columns = tiles.block_m if tiles.swapped else tiles.block_n
      accumulators = [
        plgpu.WGMMAAccumulatorRef((WGMMA_ROWS, wgmma_columns), jnp.float32)
      ] * tiles.num_weights

      def add(lefts, rights):
        if lefts is None:
          # Not before: the barrier keeps it from being read where all registers are taken.
          plgpu.commit_smem()
          lefts = (plgpu.layout_cast(buffers["parked"].at[warpgroup][...], plgpu.Layout.WGMMA),)
        # The compiler would move sums behind the last part, and keep every part until then.
        return lax.optimization_barrier(tuple(a + b for a, b in zip(lefts, rights)))

      def multiply_tile(tile, first_step):
        # Sums of 1, 2, 4, ... parts that wait for their right neighbour, the larger first.
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
        """Copies a square to y, or those of its rows that the tile may write."""
        plane = () if planes is None else (tile.plane,)

        def copy(first, size):
          target = y_ref.at[(*plane, pl.ds(row + first, size), columns)]
          plgpu.copy_smem_to_gmem(square.at[pl.ds(first, size)], target)

        if cut_rows is None:
          return copy(0, tiles.square[0])
        # A group's last rows leave by eights: the next group's rows are not touched.
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
        num_pieces = 1 if tiles.swapped else tiles.block_n // SQUARE
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
        if num_pieces % 2:  # The next tile's first square goes into the slot of this one's last.
          plgpu.wait_smem_to_gmem(0, wait_read_only=True)

      for_each_tile(multiply_tile)
      plgpu.wait_smem_to_gmem(0)

  out = gpu.kernel(
    body,
    name="matmul_parts" if tiles.apart else "matmul",
    out_type=jax.ShapeDtypeStruct(
      (m, n) if planes is None else (planes, m, n), tiles.out_dtype
    ),
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
  """Adds rows of zeros up to a multiple of 8, where there are more than 8."""
  rows = x.shape[-2]
  missing = -rows % ROW_MULTIPLE if rows > ROW_MULTIPLE else 0
  axes = [(0, 0)] * (x.ndim - 2) + [(0, missing), (0, 0)]
  return jnp.pad(x, axes) if missing else x


def _read(buffer: Any, swapped: bool) -> Any:
  """Reads a square of [tokens, columns] as the accumulator lies, in f32."""
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
