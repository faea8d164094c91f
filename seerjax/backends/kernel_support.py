"""Checks whether the GPU kernels support a model, with `is_supported` at the shapes of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from pallas_kernels import attention, gpu, matmul, rms_norm, token_logprobs
from seerjax import numerics as numerics_lib
from seerjax.backends.mosaic_gpu import KEY_BLOCK
from seerjax.backends.protocol import FullShape
from seerjax.layer_kinds import Experts, LayerConfig

# A kernel's name, and a function that returns the reason against it, or None.
Question: TypeAlias = tuple[str, Callable[[], str | None]]

# Rows of the checked step; the results do not depend on it.
ROWS = 64
# Positions of the checked pages, at most a split; other page sizes are refused when a step is
# traced.
PAGE = 64


def reason_against(numerics: numerics_lib.NumericsConfig, shape: FullShape | None) -> str | None:
  """Returns None if the kernels can run this model here, otherwise a sentence with the reason.

  Args:
    numerics: numerics of a backend that uses kernels.
    shape: shape of the model; None checks the device alone.
  """
  if (reason := gpu.device_reason(numerics.is_interpreted)) is not None or shape is None:
    return reason
  for name, ask in _questions(numerics, shape):
    try:
      reason = ask()
    except ValueError as error:  # A Config that is invalid for these numerics.
      reason = str(error).rstrip(".")
    if reason is not None:
      return f"{name}: {reason}"
  return None


def _questions(numerics: numerics_lib.NumericsConfig, shape: FullShape) -> Iterator[Question]:
  """Yields the checks for the kernels of a step."""
  for kind in dict.fromkeys(shape.layers):
    yield from _questions_of_layer(numerics, shape.hidden_size, kind)
  interpret, shards = numerics.is_interpreted, numerics.reduction_shards
  i32: Any = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.int32)
  yield (
    "token_logprobs",
    lambda: token_logprobs.is_supported(
      _bf16(ROWS, shape.hidden_size),
      _bf16(shards, shape.vocab_size // shards, shape.hidden_size),
      i32(ROWS),
      jax.ShapeDtypeStruct((ROWS,), jnp.float32),
      jax.ShapeDtypeStruct((ROWS, 2), jnp.uint32),
      config=token_logprobs.Config(shards=shards),
      interpret=interpret,
    ),
  )


def _questions_of_layer(
  numerics: numerics_lib.NumericsConfig, hidden: int, kind: LayerConfig
) -> Iterator[Question]:
  """Yields the checks for the kernels of one kind of layer."""
  interpret, own = numerics.is_interpreted, kind.attention.in_slabs(numerics.reduction_shards)
  c, norms = own.head_dim, [(ROWS, hidden)]
  if own.has_qk_norms:
    norms += [(ROWS * heads, c) for heads in (own.num_heads, own.num_kv_heads)]
  for rows, features in norms:
    x, scale = _bf16(rows, features), _bf16(features)
    yield "rms_norm", functools.partial(rms_norm.is_supported, x, scale, interpret=interpret)
  if isinstance(kind.feed_forward, Experts):
    yield "experts", lambda: "there is no kernel of them yet"
    return
  yield from _products(numerics, hidden, kind)
  pages = _bf16(kind.attention.num_kv_heads, 2, min(PAGE, numerics.kv_split), c)
  q = _bf16(ROWS, own.num_kv_heads, own.group, c)
  # Any: shapes instead of arrays, here and in the segments.
  i32: Any = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.int32)
  segments = attention.Segments(i32(ROWS), i32(ROWS), i32(ROWS), i32(ROWS, 2), i32())
  yield (
    "attention",
    lambda: attention.is_supported(
      q,
      pages,
      pages,
      segments,
      config=attention.Config(
        kv_split=numerics.kv_split,
        key_block=min(numerics.kv_split, KEY_BLOCK),
        query_tile=numerics.query_tile,
      ),
      interpret=interpret,
    ),
  )


def _products(
  numerics: numerics_lib.NumericsConfig, hidden: int, kind: LayerConfig
) -> Iterator[Question]:
  """Yields the checks for the products of a layer: for all slabs at once, or slab by slab."""

  def ask(*operands: jax.ShapeDtypeStruct, **fields: Any) -> Callable[[], str | None]:
    interpret = numerics.is_interpreted
    return functools.partial(matmul.is_supported, *operands, interpret=interpret, **fields)

  r, d, c = numerics.reduction_shards, hidden, kind.attention.head_dim
  inner, queries = kind.gated("kernels").intermediate_size // r, kind.attention.num_heads * c // r
  qkv = queries + 2 * kind.attention.in_slabs(r).num_kv_heads * c // r
  x, stream = _bf16(ROWS, d), _bf16(ROWS, d)
  if any(size % matmul.MULTIPLE for size in (d, qkv, queries, inner)):
    for k, n in ((d, qkv), (queries, d), (d, 2 * inner), (inner, d)):
      # Operands are padded before these products.
      slab = _bf16(ROWS, _whole(k)), _bf16(_whole(k), _whole(n))
      yield "matmul", ask(*slab, out_dtype=jnp.float32)
    return
  yield "matmul", ask(x, _bf16(r, d, qkv))
  yield "swiglu", ask(x, _bf16(r, d, 2 * inner), kind="swiglu")
  for rows, k in ((_bf16(ROWS, r * queries), queries), (_bf16(r, ROWS, inner), inner)):
    yield "contract_slabs", ask(rows, _bf16(r, k, d), kind="contract_slabs", residual=stream)


def _bf16(*sizes: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


def _whole(size: int) -> int:
  return -(-size // matmul.MULTIPLE) * matmul.MULTIPLE
