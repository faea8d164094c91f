"""Embedding lookup in a table that may be sharded over the devices of the model axis.

    table f[v, d]   device i of m has rows i v / m to (i + 1) v / m

A device looks up its own tokens, and one collective sums the rows as integer words. For each token,
all devices but one contribute zeros, so every bit is kept, including -0.0 and NaN, which a sum of
floats would not keep. The gradient needs no collective: a device adds up the cotangents of its own
tokens, in the order of the rows.
"""

from __future__ import annotations

import functools

import jax
from jax import lax
import jax.numpy as jnp

from seerjax.array_typing import Array, Float, Int
from seerjax.backends.protocol import Backend


def rows_of(
  table: Float[Array, "v d"], tokens: Int[Array, "n"], axis: str | None
) -> Float[Array, "n d"]:
  """Returns f[n, d], the row of each token; the bits do not depend on the number of devices.

  Args:
    table: f[v, d]; under `shard_map` the rows of this device.
    tokens: i32[n], ids below v.
    axis: mesh axis of the table's rows, None on one device.
  """
  return table[tokens] if axis is None else _looked_up(axis, table.shape[0], table, tokens)


def scaled(
  x: Float[Array, "n d"], scale: float, num_rows: Array, backend: Backend
) -> Float[Array, "n d"]:
  """Returns the rows times `scale`, which is rounded to their dtype first, as Gemma does."""
  times = lambda _, x, __: x * jnp.asarray(scale, x.dtype)
  return backend.map_rows(times, (), x, num_rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _looked_up(axis: str, count: int, table: Array, tokens: Array) -> Array:
  return _of_all(axis, table, own_places(tokens, lax.axis_index(axis), count))


def own_places(tokens: Int[Array, "n"], device: Array, count: int) -> Int[Array, "n"]:
  """Returns i32[n], the row of each token in a device's table; `count` if it is not there."""
  places = tokens - device * jnp.int32(count)
  return jnp.where((places >= 0) & (places < count), places, jnp.int32(count))


def _of_all(axis: str, table: Array, places: Array) -> Array:
  """Returns the rows over all devices; a place past the table's end belongs to another device."""
  word = jnp.uint16 if table.dtype.itemsize == 2 else jnp.uint32
  own = lax.bitcast_convert_type(table.at[places].get(mode="fill", fill_value=0), word)
  words = lax.psum(own.astype(jnp.uint32), axis)
  return lax.bitcast_convert_type(words.astype(word), table.dtype)


def _forward(axis: str, count: int, table: Array, tokens: Array) -> tuple[Array, Array]:
  places = own_places(tokens, lax.axis_index(axis), count)
  return _of_all(axis, table, places), places


def _backward(axis: str, count: int, places: Array, cotangent: Array) -> tuple[Array, None]:
  zeros = jnp.zeros((count, cotangent.shape[1]), cotangent.dtype)
  return zeros.at[places].add(cotangent, mode="drop"), None


_looked_up.defvjp(_forward, _backward)
