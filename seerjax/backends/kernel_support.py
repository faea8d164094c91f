"""Whether the GPU kernels take a model: each one's `is_supported` at the shapes of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import attention, gpu, matmul, rms_norm, token_logprobs
from seerjax import numerics as numerics_lib
from seerjax.backends.mosaic_gpu import KEY_BLOCK
from seerjax.backends.protocol import Decoder

# Rows of a step; no answer follows them.
ROWS = 64
# Positions of a page, where a split has as many; other pages are refused when a step is traced.
PAGE = 64


def reason_against(
  numerics: numerics_lib.NumericsConfig, shape: Decoder | None
) -> str | None:
  """Returns None if the kernels can run this model here, else the sentence that says why not.

  Args:
    numerics: of an implementation that uses kernels.
    shape: of the model; None asks about the device alone.
  """
  interpret = numerics.is_interpreted
  if (reason := gpu.device_reason(interpret)) is not None or shape is None:
    return reason
  try:
    found = [f"{name}: {reason}" for name, reason in _answers(numerics, shape) if reason]
  except ValueError as error:  # A Config that these numerics cannot have.
    return f"attention: {error}".rstrip(".")
  return found[0] if found else None


def _answers(
  numerics: numerics_lib.NumericsConfig, shape: Decoder
) -> Iterator[tuple[str, str | None]]:
  """Yields what each kernel of a step says of the model."""
  interpret = numerics.is_interpreted
  shards, hidden, c = numerics.reduction_shards, shape.hidden_size, shape.head_dim
  norms = [(ROWS, hidden)]
  if shape.has_qk_norms:
    norms += [(ROWS * heads // shards, c) for heads in (shape.num_heads, shape.num_kv_heads)]
  for rows, features in norms:
    answer = rms_norm.is_supported(
      _bf16(rows, features), _bf16(features), interpret=interpret
    )
    yield "rms_norm", answer
  inner = shape.intermediate_size // shards
  columns = (shape.num_heads + 2 * shape.num_kv_heads) * c // shards
  products = (
    (hidden, columns), (shape.num_heads * c // shards, hidden), (hidden, 2 * inner), (inner, hidden)
  )  # fmt: skip
  for k, n in products:
    # Padded where they are multiplied, as adapters need it.
    x, w = _bf16(ROWS, _whole(k)), _bf16(_whole(k), _whole(n))
    yield "matmul", matmul.is_supported(x, w, out_dtype=jnp.float32, interpret=interpret)
  page = min(PAGE, numerics.kv_split)
  pages = _bf16(shape.num_kv_heads, 2, page, c)
  config = attention.Config(
    kv_split=numerics.kv_split,
    key_block=min(numerics.kv_split, KEY_BLOCK),
    query_tile=numerics.query_tile,
  )
  # Any: shapes in the place of arrays, here and in the segments.
  i32: Any = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.int32)
  segments = attention.Segments(i32(ROWS), i32(ROWS), i32(ROWS), i32(ROWS, 2), i32())
  q = _bf16(ROWS, shape.num_kv_heads, shape.group, c)
  yield "attention", attention.is_supported(
    q, pages, pages, segments, config=config, interpret=interpret
  )
  yield "token_logprobs", token_logprobs.is_supported(
    _bf16(ROWS, hidden),
    _bf16(shards, shape.vocab_size // shards, hidden),
    i32(ROWS),
    jax.ShapeDtypeStruct((ROWS,), jnp.float32),
    jax.ShapeDtypeStruct((ROWS, 2), jnp.uint32),
    config=token_logprobs.Config(shards=shards),
    interpret=interpret,
  )


def _bf16(*sizes: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


def _whole(size: int) -> int:
  return -(-size // matmul.MULTIPLE) * matmul.MULTIPLE
