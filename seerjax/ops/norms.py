"""Root-mean-square norm.

  y = x / sqrt(mean(x ** 2) + eps) * scale            scale = w, or 1 + w (Gemma)

Source: Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467.
"""

from __future__ import annotations

from typing import Literal

from jax import lax
import jax.numpy as jnp

from seerjax import numerics as numerics_lib
from seerjax.array_typing import Array, Float
from seerjax.ops import tiles

# What a norm multiplies by, in terms of its weights w.
Weights = Literal["w", "1 + w"]


def rms_norm_rows(
  x: Float[Array, "... d"], scale: Float[Array, "d"], eps: float, weights: Weights = "w"
) -> Float[Array, "... d"]:
  """Normalises the last axis: float32 statistics, rounded to x's dtype before scaling.

  Published Llama and Qwen checkpoints round there too; with "1 + w", the product is in float32 and
  rounded once, as Gemma's is. Use it on the rows of one tile.
  """
  x32 = x.astype(jnp.float32)
  variance = jnp.mean(x32 * x32, axis=-1, keepdims=True)
  if weights == "1 + w":
    factor = (1 + scale.astype(jnp.float32)).reshape((1,) * (x.ndim - 1) + scale.shape)
    return (x32 * lax.rsqrt(variance + jnp.float32(eps)) * factor).astype(x.dtype)
  normed = (x32 * lax.rsqrt(variance + jnp.float32(eps))).astype(x.dtype)
  # x and scale have one dtype in every model here; otherwise, the product is rounded to x's dtype.
  wider = x.dtype if x.dtype == scale.dtype else jnp.float32
  scale = scale.astype(wider).reshape((1,) * (x.ndim - 1) + scale.shape)
  return (normed.astype(wider) * scale).astype(x.dtype)


def rms_norm(
  x: Float[Array, "n d"],
  scale: Float[Array, "d"],
  *,
  eps: float = 1e-6,
  numerics: numerics_lib.NumericsConfig,
) -> Float[Array, "n d"]:
  """Returns f[n, d] in x's dtype; a row's bits depend on that row alone, also under `grad`."""
  return tiles.map_rows(
    lambda scale, x, _: rms_norm_rows(x, scale, eps),
    scale,
    x,
    jnp.int32(x.shape[0]),
    numerics,
  )


def rms_norm_reference(
  x: Float[Array, "n d"], scale: Float[Array, "d"], *, eps: float = 1e-6
) -> Float[Array, "n d"]:
  """Reference implementation in float32."""
  x32 = x.astype(jnp.float32)
  variance = jnp.mean(x32 * x32, axis=-1, keepdims=True)
  return x32 / jnp.sqrt(variance + jnp.float32(eps)) * scale.astype(jnp.float32)[None, :]
