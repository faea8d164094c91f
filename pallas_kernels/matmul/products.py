"""The three products with their gradients, each in the mode that fills the machine."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import gpu
from pallas_kernels.matmul.config import MULTIPLE, Config, plan
from pallas_kernels.matmul.kernel import contract
from pallas_kernels.matmul_parts import MAX_PARTS, add_parts
from pallas_kernels.matmul_tiles import Plan

# Parts are computed apart if fewer than 1 / IDLE_SHARE of the multiprocessors would have a tile.
IDLE_SHARE = 3


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def matmul(x, w, bias, residual, transposed, out_dtype, config, interpret):
  tiles = plan(
    config,
    x.shape[0],
    columns=w.shape[-2 if transposed else -1],
    w_k_last=transposed,
    out_dtype=jnp.dtype(out_dtype),
    residual_dtype=None if residual is None else residual.dtype,
    interpret=interpret,
  )
  return _product(tiles, x, (w,), bias, residual, config, interpret)


def _matmul_forward(x, w, bias, residual, transposed, out_dtype, config, interpret):
  y = matmul(x, w, bias, residual, transposed, out_dtype, config, interpret)
  return y, (x, w, bias, residual)


def _matmul_backward(transposed, out_dtype, config, interpret, saved, dy):
  x, w, bias, residual = saved
  rounded = dy.astype(x.dtype)
  dx = _input_gradient(rounded, w, transposed, x.dtype, config, interpret)
  dw = _weight_gradient(x, rounded, transposed, w.dtype, config, interpret)
  dbias = None
  if bias is not None:
    # A product with ones adds up dy, in the order of dw.
    ones = jnp.ones((x.shape[0], MULTIPLE), x.dtype)
    dbias = _weight_gradient(ones, rounded, False, bias.dtype, config, interpret)[..., 0, :]
  return dx, dw, dbias, None if residual is None else dy.astype(residual.dtype)


matmul.defvjp(_matmul_forward, _matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def swiglu(x, gate, up, transposed, config, interpret):
  n = gate.shape[-2 if transposed else -1] // (2 if up is None else 1)
  tiles = plan(
    config,
    x.shape[0],
    columns=n,
    pair=True,
    joined=up is None,
    w_k_last=transposed,
    interpret=interpret,
  )
  return contract(tiles, x, (gate,) if up is None else (gate, up), None, None, interpret)


def _swiglu_forward(x, gate, up, transposed, config, interpret):
  return swiglu(x, gate, up, transposed, config, interpret), (x, gate, up)


def _swiglu_backward(transposed, config, interpret, saved, dy):
  x, gate, up = saved
  # The two sums are recomputed in the forward's order instead of stored.
  again = lambda w: matmul(x, w, None, None, transposed, "float32", config, interpret)
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


swiglu.defvjp(_swiglu_forward, _swiglu_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def contract_slabs(x, w, stream, transposed, out_dtype, config, interpret):
  tiles = plan(
    config,
    x.shape[-2],
    columns=w.shape[-2 if transposed else -1],
    slabs=w.shape[0],
    w_k_last=transposed,
    out_dtype=jnp.dtype(out_dtype),
    residual_dtype=None if stream is None else stream.dtype,
    interpret=interpret,
  )
  return _product(tiles, x, (w,), None, stream, config, interpret)


def _contract_slabs_forward(x, w, stream, transposed, out_dtype, config, interpret):
  y = contract_slabs(x, w, stream, transposed, out_dtype, config, interpret)
  return y, (x, w, None if stream is None else stream[:0])


def _contract_slabs_backward(transposed, out_dtype, config, interpret, saved, dy):
  del out_dtype
  x, w, stream = saved
  slabs, rows = w.shape[0], x.shape[-2]
  rounded = dy.astype(x.dtype)
  dx = _slab_gradients(rounded, w, transposed, x.dtype, config, interpret)
  dw = _weight_gradient(x, rounded, transposed, w.dtype, config, interpret)
  if x.ndim == 2:  # Slabs are side by side.
    dx = jnp.swapaxes(dx, 0, 1).reshape(rows, -1)
    if transposed:
      dw = jnp.swapaxes(dw.reshape(dw.shape[0], slabs, -1), 0, 1)
    else:
      dw = dw.reshape(w.shape)
  return dx, dw, None if stream is None else dy.astype(stream.dtype)


contract_slabs.defvjp(_contract_slabs_forward, _contract_slabs_backward)


def _input_gradient(
  dy: jax.Array, w: jax.Array, transposed: bool, dtype: Any, config: Config, interpret: bool
) -> jax.Array:
  """Returns dy @ w^T, [m, k]: a forward matmul with the transposed weight.

  Slabs, dy's [r, m, n] and w's, are parts of one contraction, rounded once; if there are more than
  eight, groups of eight are added in ascending order.
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
      interpret=interpret,
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
  """Returns dy @ w^T, [m, k], or per slab, [r, m, k]."""
  whole = dataclasses.replace(config, shards=1)
  columns = w.shape[-1 if transposed else -2]
  tiles = plan(
    whole,
    dy.shape[-2],
    columns=columns,
    w_k_last=not transposed,
    out_dtype=dtype,
    interpret=interpret,
  )
  return contract(tiles, dy, (w,), None, None, interpret)


def _weight_gradient(
  x: jax.Array, dy: jax.Array, transposed: bool, dtype: Any, config: Config, interpret: bool
) -> jax.Array:
  """Returns the sum over tokens of x^T dy, [k, n] or, if transposed, [n, k], for each slab."""
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
  weights: tuple[jax.Array, ...],
  bias: jax.Array | None,
  residual: jax.Array | None,
  config: Config,
  interpret: bool,
) -> jax.Array:
  """Returns y, computed in the mode that fills the machine; both modes give the same bits."""
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
  """Returns whether parts are separate tiles. It never affects bits."""
  m, n = x.shape[-2], w.shape[-2 if tiles.w_k_last else -1]
  if tiles.shards == 1 or bias is not None or config.mode == "sequential" or m == 0:
    return False
  planes = 1 if w.ndim == 2 or tiles.slabs_summed else w.shape[0]
  num_tiles = planes * -(-m // tiles.block_m) * -(-n // tiles.block_n)
  is_idle = num_tiles * IDLE_SHARE < gpu.num_multiprocessors(interpret)
  return config.mode == "parallel" or is_idle
