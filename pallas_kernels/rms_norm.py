"""Root-mean-square norm of rows, alone or of a sum with the residual stream.

  y = x * rsqrt(mean(x ** 2) + eps) * scale                      rms_norm
  total = x + residual;  y = rms_norm(total)                     add_rms_norm

One warpgroup norms one row at a time, in f32, and rounds y once, at the end. The reduction is the
contract: a row is padded with zeros to a multiple of `padding` features, thread t of 128 adds its
own features in ascending order, and the 128 sums are added by one tree. `total` is rounded to x's
dtype first, so that `add_rms_norm(x, residual)` and `rms_norm(x + residual)` agree bit for bit.

Backward, with r = rsqrt(mean(x ** 2) + eps) and g = dy * scale:

  dx = r * (g - x * r ** 2 * mean(g * x))
  dscale = sum over rows of dy * x * r

A row's dx depends on that row alone. dscale is added in two stages of fixed order: rows of a chunk
of `chunk_rows` in ascending order, then chunks in ascending order.

Shared memory: each input row and each output row once, padded.

Source: Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import gpu

MAX_FEATURES = 8192
# Stage two adds columns of 128 features, one a thread, so many chunks ahead.
COLUMNS = 128
UNROLL = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """How a row is cut and how many are in flight.

  Attributes:
    padding: contract. A row is padded to a multiple of this many features.
    chunk_rows: contract of dscale. Rows that one block adds before chunks are added.
    blocks_per_multiprocessor: tuning. Rows in flight on each multiprocessor.
  """

  padding: int = 1024
  chunk_rows: int = 16
  blocks_per_multiprocessor: int = 8

  def __post_init__(self) -> None:
    if self.padding < 1024 or self.padding % 1024:
      raise ValueError(f"got padding={self.padding}; expected a positive multiple of 1024.")
    for name in ("chunk_rows", "blocks_per_multiprocessor"):
      if getattr(self, name) < 1:
        raise ValueError(f"got {name}={getattr(self, name)}; expected at least 1.")

  def scratch(self, features: int, dtype: Any, num_inputs: int, num_outputs: int) -> gpu.Scratch:
    """Returns what one block allocates for rows of `features`."""
    shape = padded_view(features, self.padding)
    names = [f"input_{i}" for i in range(num_inputs)] + [f"output_{i}" for i in range(num_outputs)]
    return {name: gpu.Buffer(shape, dtype) for name in names} | {
      "loaded": gpu.Barriers(num_arrivals=num_inputs)
    }

  def shared_memory_bytes(self, features: int, dtype: Any) -> int:
    """Returns the most that a block takes, forward or backward."""
    return max(
      gpu.shared_memory_bytes(self.scratch(features, dtype, inputs, outputs))
      for inputs, outputs in ((2, 2), (3, 1))
    )


def is_supported(
  x: jax.Array | jax.ShapeDtypeStruct,
  scale: jax.Array | jax.ShapeDtypeStruct,
  residual: jax.Array | jax.ShapeDtypeStruct | None = None,
  *,
  config: Config = Config(),
  interpret: bool = False,
) -> str | None:
  """Returns None if the kernel can run on these arguments here, else the reason that it cannot."""
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
  """The definition, in float32: f32[n, d]."""
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
  """Returns f[n, d] in x's dtype; a row's bits depend on that row and on scale alone.

  Args:
    x: bf16 or f32 [n, d].
    scale: bf16 or f32 [d].
    eps: added to the mean square.
    config: see `Config`.
    interpret: run on a CPU; slow, for tests.

  Raises:
    NotImplementedError: `is_supported` gives a reason; the message is that reason.
  """
  _refuse(is_supported(x, scale, config=config, interpret=interpret))
  return _norm(x, scale, None, eps, config, interpret)[0]


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

  Arguments and refusals are those of `rms_norm`; `residual` has x's shape and dtype.
  """
  _refuse(is_supported(x, scale, residual, config=config, interpret=interpret))
  return _norm(x, scale, residual, eps, config, interpret)


def _refuse(reason: str | None) -> None:
  if reason is not None:
    raise NotImplementedError(f"rms_norm: {reason}.")


def padded_view(features: int, padding: int) -> tuple[int, int]:
  """Returns (runs, width) of a padded row: a TMA copy has at most 256 elements along an axis."""
  width = math.gcd(features, gpu.TMA_LIMIT)
  return -(-features // padding) * padding // width, width


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _norm(
  x: jax.Array,
  scale: jax.Array,
  residual: jax.Array | None,
  eps: float,
  config: Config,
  interpret: bool,
) -> tuple[jax.Array, jax.Array]:
  """Returns (normed, total); without a residual, total is x."""
  num_rows, features = x.shape
  if num_rows == 0:
    return x, x
  runs, width = padded_view(features, config.padding)
  full_runs = features // width
  view = (num_rows, full_runs, width)
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
      inverse = lax.rsqrt(jnp.sum(total * total) / features + eps)
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


def _norm_forward(x, scale, residual, eps, config, interpret):
  normed, total = _norm(x, scale, residual, eps, config, interpret)
  return (normed, total), (total, scale, residual is None)


def _norm_backward(eps, config, interpret, saved, cotangents):
  total, scale, alone = saved
  dnormed, dtotal = cotangents
  dx, dscale = _gradients(total, scale, dnormed, dtotal, eps, config, interpret)
  return dx, dscale, None if alone else dx


_norm.defvjp(_norm_forward, _norm_backward)


def _gradients(
  x: jax.Array,
  scale: jax.Array,
  dy: jax.Array,
  dtotal: jax.Array,
  eps: float,
  config: Config,
  interpret: bool,
) -> tuple[jax.Array, jax.Array]:
  """Returns (dx + dtotal, rounded once, and dscale)."""
  num_rows, features = x.shape
  if num_rows == 0:
    return x, jnp.zeros_like(scale)
  runs, width = padded_view(features, config.padding)
  full_runs = features // width
  num_chunks = -(-num_rows // config.chunk_rows)
  num_partials = -(-num_chunks // UNROLL) * UNROLL
  view = (num_rows, full_runs, width)

  def body(x_ref, dy_ref, dtotal_ref, scale_ref, dx_ref, partial_ref, *, loaded, **buffers):
    ins, (out,) = _sorted_buffers(buffers)
    _clear(ins)
    scale_row = scale_ref[...].astype(jnp.float32)

    # Chunks past the last row write the zeros that stage two reads.
    @plgpu.nd_loop((num_partials,), collective_axes="block")
    def _(loop: plgpu.NDLoopInfo) -> None:
      (chunk,) = loop.index
      first = chunk * config.chunk_rows

      def add_row(row, dscale):
        _load_rows((x_ref, dy_ref, dtotal_ref), ins, row, full_runs, loaded)
        x_row, dy_row, dtotal_row = (ref[...].astype(jnp.float32) for ref in ins)
        inverse = lax.rsqrt(jnp.sum(x_row * x_row) / features + eps)
        g = dy_row * scale_row
        slope = jnp.sum(g * x_row) / features * (inverse * inverse)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out[...] = (inverse * (g - x_row * slope) + dtotal_row).astype(x.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out.at[pl.ds(0, full_runs)], dx_ref.at[row])
        return dscale + dy_row * (x_row * inverse)

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
    scratch=config.scratch(features, x.dtype, 3, 1),
    num_blocks=_num_blocks(num_partials, config, interpret),
    interpret=interpret,
  )(x.reshape(view), dy.reshape(view), dtotal.reshape(view), _padded(scale, runs, width))

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


def _num_blocks(num_items: int, config: Config, interpret: bool) -> int:
  most = gpu.num_multiprocessors(interpret) * config.blocks_per_multiprocessor
  return min(num_items, most)


def _padded(scale: jax.Array, runs: int, width: int) -> jax.Array:
  return jnp.pad(scale, (0, runs * width - scale.shape[0])).reshape(runs, width)


def _sorted_buffers(buffers: dict[str, Any]) -> tuple[list[Any], list[Any]]:
  """Returns the references to input rows and to output rows, each in order."""
  inputs = [buffers[name] for name in sorted(buffers) if name.startswith("input")]
  return inputs, [buffers[name] for name in sorted(buffers) if name.startswith("output")]


def _clear(buffers: list[Any]) -> None:
  """Zeros the padding of input rows; no copy writes there."""
  for buffer in buffers:
    buffer[...] = jnp.zeros(buffer.shape, buffer.dtype)
  plgpu.commit_smem()


def _load_rows(sources: Any, buffers: Any, row: Any, full_runs: int, loaded: Any) -> None:
  for source, buffer in zip(sources, buffers):
    plgpu.copy_gmem_to_smem(source.at[row], buffer.at[pl.ds(0, full_runs)], loaded)
  plgpu.barrier_wait(loaded)
