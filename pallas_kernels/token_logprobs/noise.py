"""The Gumbel noise of `jax.random`, computed from a key and an id where it is added."""

from __future__ import annotations

from typing import Any

from jax import lax
import jax.numpy as jnp


def threefry_2x32(key_0: Any, key_1: Any, high: Any, low: Any) -> tuple[Any, Any]:
  """Returns the two words of Threefry-2x32 with 20 rounds for a counter; all uint32."""
  keys = (key_0, key_1, key_0 ^ key_1 ^ jnp.uint32(0x1BD11BDA))
  x, y = high + keys[0], low + keys[1]
  for step in range(5):
    for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[step % 2]:
      x = x + y
      y = lax.shift_left(y, jnp.full_like(y, rotation)) | lax.shift_right_logical(
        y, jnp.full_like(y, 32 - rotation)
      )
      y = y ^ x
    x = x + keys[(step + 1) % 3]
    y = y + keys[(step + 2) % 3] + jnp.uint32(step + 1)
  return x, y


def random_bits(key_0: Any, key_1: Any, ids: Any) -> Any:
  """Returns `jax.random.bits` of the key at these indices; all uint32 of one shape."""
  x, y = threefry_2x32(key_0, key_1, jnp.zeros_like(ids), ids)
  return x ^ y


def gumbel(bits: Any) -> Any:
  """Returns the f32 noise of `jax.random.gumbel` in its default mode for uint32 bits."""
  mantissa = lax.shift_right_logical(bits, jnp.full_like(bits, 9)) | jnp.uint32(0x3F800000)
  uniform = lax.bitcast_convert_type(mantissa, jnp.float32) - 1.0
  uniform = jnp.maximum(uniform, jnp.finfo(jnp.float32).tiny)
  return -jnp.log(-jnp.log(uniform))
