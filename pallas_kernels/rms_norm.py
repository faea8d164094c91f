"""Root-mean-square norm of rows, of sums with the residual stream, and of several arrays at once.

  y = x * rsqrt(mean(x ** 2) + eps) * scale                      rms_norm
  total = x + residual;  y = rms_norm(total)                     add_rms_norm
  y_i = rms_norm(x_i, scale_i)                                   rms_norm_each

Computed in f32; y is rounded once, at the end. The reduction is the contract and depends only on
the number of features:
- Wide rows: one warpgroup normalises one row at a time. A row is padded with zeros to a multiple of
  `padding` features, thread t of 128 adds its features in ascending order, and the 128 sums are
  added as one tree.
- Narrow rows, as of heads (64, 128, 192 or 256 features): one warpgroup normalises 64 rows at a
  time, and the four threads of a row add their features, then each other's sums. Arrays of rows
  are processed one after the other, so queries and keys with their two scales are one launch.

Products are rounded before they are added (`rounding.product`), so that a row's bits are the same
in every program that normalises it: alone or in a sum, for few rows or many.

`total` is rounded to x's dtype first, so that `add_rms_norm(x, residual)` and
`rms_norm(x + residual)` agree bit for bit; so do `rms_norm_each` and `rms_norm` of each array.

Backward, with r = rsqrt(mean(x ** 2) + eps) and g = dy * scale:

  dx = r * (g - x * r ** 2 * mean(g * x))
  dscale = sum over rows of dy * x * r

A row's dx depends only on that row; it is computed as for wide rows, for any number of features.
dscale is added in two stages of fixed order: rows of a chunk of `chunk_rows` in ascending order,
then chunks in ascending order.

Shared memory: each input row and each output row once, padded; 64 narrow rows once.

Source: Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import gpu, rounding

MAX_FEATURES = 8192
# Rows of up to this many features, in multiples of NARROW_MULTIPLE, are processed NARROW_ROWS at a
# time.
NARROW_FEATURES = 256
NARROW_MULTIPLE = 64
NARROW_ROWS = 64
# TMA copies whole tiles of this many rows into the layout of shared memory.
ROW_MULTIPLE = 8
# Stage two adds columns of 128 features, one per thread, and prefetches UNROLL chunks.
COLUMNS = 128
UNROLL = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Division of rows, and number of rows in flight.

  Attributes:
    padding: contract. A row is padded to a multiple of this many features.
    chunk_rows: contract of dscale. Rows that one block adds before chunks are added.
    blocks_per_multiprocessor: tuning. Rows, or tiles of narrow rows, in flight per multiprocessor.
  """

  padding: int = 1024
  chunk_rows: int = 16
  blocks_per_multiprocessor: int = 8

  def __post_init__(self) -> None:
    if self.padding < 1024 or self.padding % 1024:
      raise ValueError(f"got padding={self.padding}; expected a positive multiple of 1024.")
    gpu.check_config(self, {}, {"chunk_rows": 1, "blocks_per_multiprocessor": 1})

  def scratch(self, features: int, dtype: Any, num_inputs: int, num_outputs: int) -> gpu.Scratch:
    """Returns the scratch of one block for rows of `features`."""
    shape = padded_view(features, self.padding)
    names = [f"input_{i}" for i in range(num_inputs)] + [f"output_{i}" for i in range(num_outputs)]
    return {name: gpu.Buffer(shape, dtype) for name in names} | {
      "loaded": gpu.Barriers(num_arrivals=num_inputs)
    }

  def shared_memory_bytes(self, features: int, dtype: Any) -> int:
    """Returns the maximum shared memory of a block, forward or backward."""
    return max(
      gpu.shared_memory_bytes(self.scratch(features, dtype, inputs, outputs))
      for inputs, outputs in ((2, 2), (3, 1))
    )


def is_narrow(features: int) -> bool:
  """Returns whether rows of `features` are processed 64 at a time; part of the contract."""
  return features <= NARROW_FEATURES and features % NARROW_MULTIPLE == 0


def is_supported(
  x: jax.Array | jax.ShapeDtypeStruct,
  scale: jax.Array | jax.ShapeDtypeStruct,
  residual: jax.Array | jax.ShapeDtypeStruct | None = None,
  *,
  config: Config = Config(),
  interpret: bool = False,
) -> str | None:
  """Returns None if the kernel can run on these arguments here, else the reason."""
  if x.ndim != 2 or scale.shape != x.shape[1:]:
    return f"got x{list(x.shape)} and scale{list(scale.shape)}, expected x[n, d] and scale[d]"
  if x.dtype not in (jnp.bfloat16, jnp.float32):
    return f"got x of {x.dtype}, expected bfloat16 or float32; cast it"
  if scale.dtype not in (jnp.bfloat16, jnp.float32):
    return f"got scale of {scale.dtype}, expected bfloat16 or float32; cast it"
  if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
    return (
      f"got residual {residual.dtype}{list(residual.shape)}, expected x's {x.dtype}{list(x.shape)}"
    )
  features = x.shape[1]
  if features % 8 or not 8 <= features <= MAX_FEATURES:
    return f"got {features} features, expected a multiple of 8 from 8 to {MAX_FEATURES}"
  if features // math.gcd(features, gpu.TMA_LIMIT) > gpu.TMA_LIMIT:
    factor = math.gcd(features, gpu.TMA_LIMIT)
    return (
      f"got {features} features, which TMA would copy as {features // factor} runs of {factor};"
      f" expected at most {gpu.TMA_LIMIT} runs: pad the features to a multiple of 32"
    )
  return gpu.shared_memory_reason(
    config.scratch(features, x.dtype, 3, 1), "padding"
  ) or gpu.device_reason(interpret)


def reference(
  x: jax.Array, scale: jax.Array, residual: jax.Array | None = None, *, eps: float = 1e-6
) -> jax.Array:
  """Computes the definition in float32, f32[n, d]."""
  x32 = x.astype(jnp.float32)
  if residual is not None:
    x32 = (x32 + residual.astype(jnp.float32)).astype(x.dtype).astype(jnp.float32)
  mean = jnp.mean(x32 * x32, axis=-1, keepdims=True)
  return x32 / jnp.sqrt(mean + jnp.float32(eps)) * scale.astype(jnp.float32)[None, :]


def rms_norm(
  x: jax.Array,
  scale: jax.Array,
  *,
  eps: float = 1e-6,
  config: Config = Config(),
  interpret: bool = False,
) -> jax.Array:
  """Returns f[n, d] in x's dtype; a row's bits depend only on that row and on scale.

  Args:
    x: bf16 or f32 [n, d].
    scale: bf16 or f32 [d].
    eps: added to the mean square.
    config: see `Config`.
    interpret: run on a CPU; slow, for tests.

  Raises:
    NotImplementedError: with the reason given by `is_supported`.
  """
  gpu.refuse("rms_norm", is_supported(x, scale, config=config, interpret=interpret))
  if is_narrow(x.shape[1]):
    return _norm_each((x,), (scale,), eps, config, interpret)[0]
  return _norm(x, scale, None, eps, config, interpret)[0]


def rms_norm_each(
  arrays: Sequence[jax.Array],
  scales: Sequence[jax.Array],
  *,
  eps: float = 1e-6,
  config: Config = Config(),
  interpret: bool = False,
) -> tuple[jax.Array, ...]:
  """Returns each array's `rms_norm` with its own scale, bit for bit; narrow rows in one launch.

  Used for queries f[r, n, h, c] and keys f[r, n, h', c] of all slabs, with their two scales f[c].

  Args:
    arrays: bf16 or f32 [..., d], with one d and one dtype; leading axes may differ.
    scales: bf16 or f32 [d], one per array.
    eps: added to the mean square.
    config: see `Config`.
    interpret: run on a CPU; slow, for tests.

  Raises:
    NotImplementedError: if the arrays differ in features or dtype, or with the reason given by
      `is_supported` for one of them.
    ValueError: if there are not as many scales as arrays.
  """
  if len(arrays) != len(scales):
    raise ValueError(
      f"got {len(arrays)} arrays and {len(scales)} scales; expected one scale per array."
    )
  kinds = sorted({f"{x.dtype}[..., {x.shape[-1]}]" for x in arrays})
  if len(kinds) > 1:
    reason = f"got arrays {' and '.join(kinds)}, expected one dtype and one number of features"
    gpu.refuse("rms_norm", reason)
  rows = tuple(x.reshape(-1, x.shape[-1]) for x in arrays)
  for x, scale in zip(rows, scales):
    gpu.refuse("rms_norm", is_supported(x, scale, config=config, interpret=interpret))
  if rows and is_narrow(rows[0].shape[1]):
    normed = _norm_each(rows, tuple(scales), eps, config, interpret)
  else:
    normed = tuple(_norm(x, s, None, eps, config, interpret)[0] for x, s in zip(rows, scales))
  return tuple(y.reshape(x.shape) for x, y in zip(arrays, normed))


def add_rms_norm(
  x: jax.Array,
  residual: jax.Array,
  scale: jax.Array,
  *,
  eps: float = 1e-6,
  config: Config = Config(),
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Returns (rms_norm(total), total), where total = x + residual; both f[n, d] in x's dtype.

  Arguments and errors are those of `rms_norm`; `residual` has x's shape and dtype.
  """
  gpu.refuse("rms_norm", is_supported(x, scale, residual, config=config, interpret=interpret))
  if is_narrow(x.shape[1]):
    total = x + residual
    return _norm_each((total,), (scale,), eps, config, interpret)[0], total
  return _norm(x, scale, residual, eps, config, interpret)


def padded_view(features: int, padding: int) -> tuple[int, int]:
  """Returns a padded row's shape (runs, width) for TMA, which has at most 256 elements per axis."""
  width = math.gcd(features, gpu.TMA_LIMIT)
  return -(-features // padding) * padding // width, width


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _norm(x, scale, residual, eps, config, interpret):
  return _wide(x, scale, residual, eps, config, interpret)


def _norm_forward(x, scale, residual, eps, config, interpret):
  normed, total = _wide(x, scale, residual, eps, config, interpret)
  return (normed, total), (total, scale, residual is None)


def _norm_backward(eps, config, interpret, saved, cotangents):
  total, scale, alone = saved
  dnormed, dtotal = cotangents
  # If alone, total is the caller's x and its cotangent is not used here.
  dtotal = None if alone else dtotal
  dx, dscale = _gradients(total, scale, dnormed, dtotal, eps, config, interpret)
  return dx, dscale, None if alone else dx


_norm.defvjp(_norm_forward, _norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _norm_each(arrays, scales, eps, config, interpret):
  return _narrow(arrays, scales, eps, config, interpret)


def _norm_each_forward(arrays, scales, eps, config, interpret):
  return _narrow(arrays, scales, eps, config, interpret), (arrays, scales)


def _norm_each_backward(eps, config, interpret, saved, cotangents):
  each = [
    _gradients(x, scale, dy, None, eps, config, interpret)
    for x, scale, dy in zip(*saved, cotangents)
  ]
  return tuple(dx for dx, _ in each), tuple(dscale for _, dscale in each)


_norm_each.defvjp(_norm_each_forward, _norm_each_backward)


# Jitted with static arguments, so that a model's layers share one program and lower it once.
@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _wide(
  x: jax.Array,
  scale: jax.Array,
  residual: jax.Array | None,
  eps: float,
  config: Config,
  interpret: bool,
) -> tuple[jax.Array, jax.Array]:
  """Returns (normed, total), one row at a time; without a residual, total is x."""
  num_rows, features = x.shape
  if num_rows == 0:
    return x, x
  runs, width = padded_view(features, config.padding)
  full_runs = features // width
  view = (num_rows, full_runs, width)
  product = functools.partial(
    rounding.product, layout=_row_layout(runs, width, x.dtype), interpret=interpret
  )
  inputs = [x.reshape(view)] + ([] if residual is None else [residual.reshape(view)])
  outputs = [jax.ShapeDtypeStruct(view, x.dtype)] * len(inputs)

  def body(*refs: Any, loaded: Any, **buffers: Any) -> None:
    input_refs, scale_ref, output_refs = (
      refs[: len(inputs)],
      refs[len(inputs)],
      refs[len(inputs) + 1 :],
    )
    ins, outs = _sorted_buffers(buffers)
    _clear(ins)
    scale_row = scale_ref[...].astype(jnp.float32)

    @plgpu.nd_loop((num_rows,), collective_axes="block")
    def _(loop: plgpu.NDLoopInfo) -> None:
      (row,) = loop.index
      _load_rows(input_refs, ins, row, full_runs, loaded)
      total = ins[0][...].astype(jnp.float32)
      if residual is not None:
        rounded = (total + ins[1][...].astype(jnp.float32)).astype(x.dtype)
        total = rounded.astype(jnp.float32)
      inverse = lax.rsqrt(jnp.sum(product(total, total)) / features + eps)
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      outs[0][...] = (total * inverse * scale_row).astype(x.dtype)
      if residual is not None:
        outs[1][...] = rounded
      plgpu.commit_smem()
      for out, ref in zip(outs, output_refs):
        plgpu.copy_smem_to_gmem(out.at[pl.ds(0, full_runs)], ref.at[row])

    plgpu.wait_smem_to_gmem(0)

  results = gpu.kernel(
    body,
    name="rms_norm",
    out_type=outputs,
    scratch=config.scratch(features, x.dtype, len(inputs), len(outputs)),
    num_blocks=_num_blocks(num_rows, config, interpret),
    interpret=interpret,
  )(*inputs, _padded(scale, runs, width))
  normed = results[0].reshape(x.shape)
  return normed, x if residual is None else results[1].reshape(x.shape)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _narrow(
  arrays: tuple[jax.Array, ...],
  scales: tuple[jax.Array, ...],
  eps: float,
  config: Config,
  interpret: bool,
) -> tuple[jax.Array, ...]:
  """Returns each normalised f[n, d], 64 rows at a time, with the tiles of all arrays in a row."""
  inputs = [_whole_tiles(x) for x in arrays if x.shape[0]]
  if not inputs:
    return arrays
  kept = [scale for x, scale in zip(arrays, scales) if x.shape[0]]
  dtype, features = inputs[0].dtype, inputs[0].shape[1]
  starts = [0, *itertools.accumulate(-(-x.shape[0] // NARROW_ROWS) for x in inputs)]

  def body(*refs: Any, rows: Any, loaded: Any) -> None:
    num = len(inputs)
    input_refs, scale_refs, output_refs = refs[:num], refs[num : 2 * num], refs[2 * num :]

    def for_its_array(tile: Any, visit: Any) -> None:
      for i in range(num):
        place = pl.ds((tile - starts[i]) * NARROW_ROWS, NARROW_ROWS)
        is_mine = (tile >= starts[i]) & (tile < starts[i + 1])
        pl.when(is_mine)(functools.partial(visit, i, place))

    @plgpu.nd_loop((starts[-1],), collective_axes="block")
    def _(loop: plgpu.NDLoopInfo) -> None:
      (tile,) = loop.index
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      for_its_array(
        tile, lambda i, place: plgpu.copy_gmem_to_smem(input_refs[i].at[place], rows, loaded)
      )
      plgpu.barrier_wait(loaded)
      x = gpu.load(rows, rounding.TILE).astype(jnp.float32)
      squares = rounding.product(x, x, layout=rounding.TILE, interpret=interpret)
      inverse = lax.rsqrt(jnp.sum(squares, axis=1) / features + eps)
      scale = _columns_of(scale_refs[0])
      for start, ref in zip(starts[1:], scale_refs[1:]):
        scale = lax.cond(tile >= start, lambda _, ref=ref: _columns_of(ref), lambda old: old, scale)
      y = x * lax.broadcast_in_dim(inverse, x.shape, (0,))
      y = y * lax.broadcast_in_dim(scale, x.shape, (1,))
      rows[...] = y.astype(dtype)
      plgpu.commit_smem()
      for_its_array(tile, lambda i, place: plgpu.copy_smem_to_gmem(rows, output_refs[i].at[place]))

    plgpu.wait_smem_to_gmem(0)

  outputs = iter(
    gpu.kernel(
      body,
      name="rms_norm_each",
      out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs],
      scratch={
        "rows": gpu.Buffer((NARROW_ROWS, features), dtype, swizzled=True),
        "loaded": gpu.Barriers(),
      },
      num_blocks=_num_blocks(starts[-1], config, interpret),
      interpret=interpret,
    )(*inputs, *kept)
  )

  def rows_of(x: jax.Array) -> jax.Array:
    if x.shape[0] == 0:
      return x
    normed = next(outputs)
    return normed if normed.shape == x.shape else normed[: x.shape[0]]

  return tuple(rows_of(x) for x in arrays)


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def _gradients(
  x: jax.Array,
  scale: jax.Array,
  dy: jax.Array,
  dtotal: jax.Array | None,
  eps: float,
  config: Config,
  interpret: bool,
) -> tuple[jax.Array, jax.Array]:
  """Returns (dx + dtotal, rounded once; dscale)."""
  num_rows, features = x.shape
  if num_rows == 0:
    return x, jnp.zeros_like(scale)
  runs, width = padded_view(features, config.padding)
  full_runs = features // width
  num_chunks = -(-num_rows // config.chunk_rows)
  num_partials = -(-num_chunks // UNROLL) * UNROLL
  view = (num_rows, full_runs, width)
  product = functools.partial(
    rounding.product, layout=_row_layout(runs, width, x.dtype), interpret=interpret
  )
  inputs = [array.reshape(view) for array in (x, dy, dtotal) if array is not None]

  def body(*refs: Any, loaded: Any, **buffers: Any) -> None:
    *input_refs, scale_ref, dx_ref, partial_ref = refs
    ins, (out,) = _sorted_buffers(buffers)
    _clear(ins)
    scale_row = scale_ref[...].astype(jnp.float32)

    # Chunks after the last row write zeros, which stage two reads.
    @plgpu.nd_loop((num_partials,), collective_axes="block")
    def _(loop: plgpu.NDLoopInfo) -> None:
      (chunk,) = loop.index
      first = chunk * config.chunk_rows

      def add_row(row, dscale):
        _load_rows(input_refs, ins, row, full_runs, loaded)
        x_row, dy_row, *totals = (ref[...].astype(jnp.float32) for ref in ins)
        inverse = lax.rsqrt(jnp.sum(product(x_row, x_row)) / features + eps)
        g = product(dy_row, scale_row)
        slope = jnp.sum(product(g, x_row)) / features * (inverse * inverse)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        layout = _row_layout(runs, width, x.dtype)
        wide = lambda value: plgpu.layout_cast(jnp.full((runs, width), value), layout)
        dx_row = product(wide(inverse), g - product(x_row, wide(slope)))
        for dtotal_row in totals:
          dx_row = dx_row + dtotal_row
        out[...] = dx_row.astype(x.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out.at[pl.ds(0, full_runs)], dx_ref.at[row])
        return dscale + product(dy_row, x_row * inverse)

      past = jnp.minimum(first + config.chunk_rows, num_rows)
      zero = jnp.zeros((runs, width), jnp.float32)
      partial_ref[chunk] = lax.fori_loop(first, past, add_row, zero)

    plgpu.wait_smem_to_gmem(0)

  padded = runs * width
  dx, partials = gpu.kernel(
    body,
    name="rms_norm_backward",
    out_type=[
      jax.ShapeDtypeStruct(view, x.dtype),
      jax.ShapeDtypeStruct((num_partials, runs, width), jnp.float32),
    ],
    scratch=config.scratch(features, x.dtype, len(inputs), 1),
    num_blocks=_num_blocks(num_partials, config, interpret),
    interpret=interpret,
  )(*inputs, _padded(scale, runs, width))

  def add_chunks(partial_ref, dscale_ref):
    columns = pl.ds(lax.axis_index("block") * COLUMNS, COLUMNS)

    def add(step, total):
      for i in range(UNROLL):
        total = total + partial_ref[step * UNROLL + i, columns]
      return total

    zero = jnp.zeros((COLUMNS,), jnp.float32)
    dscale_ref[columns] = lax.fori_loop(0, num_partials // UNROLL, add, zero)

  dscale = gpu.kernel(
    add_chunks,
    name="rms_norm_dscale",
    out_type=jax.ShapeDtypeStruct((padded,), jnp.float32),
    scratch={},
    num_blocks=padded // COLUMNS,
    interpret=interpret,
  )(partials.reshape(num_partials, padded))
  return dx.reshape(x.shape), dscale[:features].astype(scale.dtype)


def _row_layout(runs: int, width: int, dtype: Any) -> Any:
  """Returns the register layout of a padded row of `dtype`, and of its f32 values."""
  return plgpu.Layout.WG_STRIDED((runs, width), vec_size=8 // jnp.dtype(dtype).itemsize)


def _num_blocks(num_items: int, config: Config, interpret: bool) -> int:
  most = gpu.num_multiprocessors(interpret) * config.blocks_per_multiprocessor
  return min(num_items, most)


def _whole_tiles(x: jax.Array) -> jax.Array:
  """Pads rows with zeros to a multiple of 8, which costs a copy if any are added."""
  missing = -x.shape[0] % ROW_MULTIPLE
  return jnp.pad(x, ((0, missing), (0, 0))) if missing else x


def _padded(scale: jax.Array, runs: int, width: int) -> jax.Array:
  return jnp.pad(scale, (0, runs * width - scale.shape[0])).reshape(runs, width)


def _columns_of(scale_ref: Any) -> Any:
  """Reads a scale f32[d] in the column layout of 64 rows."""
  return gpu.load(scale_ref, plgpu.Layout.WGMMA.reduce(0)).astype(jnp.float32)


def _sorted_buffers(buffers: dict[str, Any]) -> tuple[list[Any], list[Any]]:
  """Returns the references to input rows and to output rows, each in order."""
  inputs = [buffers[name] for name in sorted(buffers) if name.startswith("input")]
  return inputs, [buffers[name] for name in sorted(buffers) if name.startswith("output")]


def _clear(buffers: list[Any]) -> None:
  """Zeros the padding of input rows, which no copy writes."""
  for buffer in buffers:
    buffer[...] = jnp.zeros(buffer.shape, buffer.dtype)
  plgpu.commit_smem()


def _load_rows(sources: Any, buffers: Any, row: Any, full_runs: int, loaded: Any) -> None:
  for source, buffer in zip(sources, buffers):
    plgpu.copy_gmem_to_smem(source.at[row], buffer.at[pl.ds(0, full_runs)], loaded)
  plgpu.barrier_wait(loaded)
