"""Gradients of token scores: recomputes logits chunk by chunk, with two products per chunk."""

from __future__ import annotations

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import gpu, matmul, rounding
from pallas_kernels.token_logprobs.config import ROWS, STRIP, Config, plan
from pallas_kernels.token_logprobs.tiles import (
  along_columns,
  ids_of,
  inverse_of,
  over_tiles,
  whole_rows,
)
from pallas_kernels.token_partials import MERGED_ROWS


@functools.partial(jax.jit, static_argnums=(4, 5))
def gradients(
  hidden: jax.Array,
  table: jax.Array,
  saved: tuple[jax.Array, ...],
  cotangents: tuple[jax.Array, ...],
  config: Config,
  interpret: bool,
) -> tuple[jax.Array, jax.Array]:
  """Returns dhidden and dtable; one chunk of dz is in memory at a time."""
  vocabulary = table.shape[0]
  columns = min(config.gradient_columns, vocabulary)
  product = functools.partial(matmul.matmul, config=config.gradient, interpret=interpret)

  def add_chunk(dhidden, start, width):
    dz = _logit_gradients(hidden, table, saved, cotangents, start, width, config, interpret)
    part = lax.dynamic_slice_in_dim(table, start, width)
    dhidden = product(dz, part, residual=dhidden, out_dtype=jnp.float32)
    # The weight gradient of a product; the product itself is unused and therefore not computed.
    _, pull = jax.vjp(lambda part: product(hidden, part, transposed=True), part)
    return dhidden, pull(dz)[0]

  whole, rest = divmod(vocabulary, columns)
  dhidden = jnp.zeros(hidden.shape, jnp.float32)
  starts = jnp.arange(whole, dtype=jnp.int32) * columns
  dhidden, dtable = lax.scan(lambda d, start: add_chunk(d, start, columns), dhidden, starts)
  dtable = dtable.reshape(whole * columns, -1)
  if rest:
    dhidden, last = add_chunk(dhidden, jnp.int32(whole * columns), rest)
    dtable = jnp.concatenate([dtable, last])
  return dhidden.astype(hidden.dtype), dtable


def _logit_gradients(
  hidden: jax.Array,
  table: jax.Array,
  saved: tuple[jax.Array, ...],
  cotangents: tuple[jax.Array, ...],
  start: jax.Array,
  width: int,
  config: Config,
  interpret: bool,
) -> jax.Array:
  """Returns dz of the ids from `start`, bf16[n, width]."""
  num_rows = hidden.shape[0]
  padded = -(-num_rows // MERGED_ROWS) * MERGED_ROWS
  temperature, tokens, *others = (*saved, *cotangents)
  rows_of = [inverse_of(temperature, padded)]
  rows_of += [jnp.pad(array, (0, padded - num_rows)) for array in (tokens, *others)]

  product = functools.partial(rounding.product, layout=rounding.TILE, interpret=interpret)
  product_of_rows = functools.partial(rounding.product, layout=rounding.ROWS, interpret=interpret)

  def write_gradient(logits, place, refs, strips):
    *row_refs, dz_ref = refs
    rows = pl.ds(place.row, ROWS)
    inverse, token, entropy, normaliser, raw_normaliser, dlogprob, draw_logprob, dentropy = (
      gpu.load(ref.at[rows], rounding.ROWS) for ref in row_refs
    )
    at_token = product_of_rows(dlogprob, inverse) + draw_logprob
    # The slope of t is slope + tilt * (t - logsumexp(t)).
    slope = product_of_rows(dlogprob + product_of_rows(dentropy, entropy), inverse)
    tilt = dentropy * inverse
    wide = lambda values: along_columns(values, STRIP)
    parts = [logits[:, i : i + STRIP] for i in range(0, config.vocabulary_tile, STRIP)]

    def write_strip(i, _):
      z = lax.switch(i, [lambda z=z: z for z in parts])
      below = product(z, wide(inverse)) - wide(normaliser)
      ids = ids_of(place.first + i * STRIP, STRIP)
      dz = jnp.where(ids == wide(token), wide(at_token), 0.0)
      dz = dz - product(jnp.exp(z - wide(raw_normaliser)), wide(draw_logprob))
      dz = dz - product(jnp.exp(below), wide(slope) + product(wide(tilt), below))
      strip = strips.at[lax.rem(i, 2)]
      plgpu.wait_smem_to_gmem(1, wait_read_only=True)
      strip[...] = dz.astype(jnp.bfloat16)
      plgpu.commit_smem()
      columns = pl.ds(place.index * config.vocabulary_tile + i * STRIP, STRIP)
      plgpu.copy_smem_to_gmem(strip, dz_ref.at[rows, columns])

    # An even number of strips, so the next tile's first strip finds its slot free.
    lax.fori_loop(0, len(parts), write_strip, None)

  dz = over_tiles(
    write_gradient,
    name="token_logprobs_backward",
    tiles=plan(config, num_rows, backward=True),
    config=config,
    hidden=hidden,
    table=table,
    inputs=tuple(rows_of),
    out_type=jax.ShapeDtypeStruct((whole_rows(hidden).shape[0], width), jnp.bfloat16),
    start=start,
    slabs=1,
    width=width,
    interpret=interpret,
  )
  return dz[:num_rows]
