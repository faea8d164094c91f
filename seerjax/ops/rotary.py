"""Rotary positions: pairs (j, j + c/2) of a head's features rotate by position * frequency[j].

  y[j]       = x[j] * cos - x[j + c/2] * sin
  y[j + c/2] = x[j + c/2] * cos + x[j] * sin

Sources: Su et al. 2021, https://arxiv.org/abs/2104.09864; YaRN: Peng et al. 2023,
https://arxiv.org/abs/2309.00071; the Llama 3.1 model card for its piecewise scaling.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
import numpy as np

from seerjax import fields
from seerjax.array_typing import Array, Float, Int

Scaling = Literal["none", "linear", "llama3", "yarn"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryConfig:
  """Frequencies of the rotation.

  Attributes:
    head_dim: features of one head, even.
    base: wavelength base, `rope_theta` in published configurations.
    scaling: method that extends the context beyond `original_context`.
    factor: context extension factor of `scaling`.
    original_context: positions seen before the extension.
    low_frequency_factor: llama3: wavelengths above original_context / this are divided by `factor`.
    high_frequency_factor: llama3: wavelengths below original_context / this are kept.
    beta_fast: yarn: rotations over the original context above which frequencies are kept.
    beta_slow: yarn: rotations below which frequencies are divided by `factor`.
    attention_factor: yarn: multiplies cos and sin; None is the paper's 0.1 ln(factor) + 1.
  """

  head_dim: int
  base: float = 10_000.0
  scaling: Scaling = "none"
  factor: float = 1.0
  original_context: int = 8192
  low_frequency_factor: float = 1.0
  high_frequency_factor: float = 4.0
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float | None = None

  def __post_init__(self):
    scale = fields.positive("check rope_theta and rope_scaling in config.json")
    fields.check(self, base=scale, factor=scale, original_context=scale)
    if self.head_dim < 2 or self.head_dim % 2:
      raise ValueError(
        f"RotaryConfig.head_dim: got {self.head_dim}, expected an even number (features turn in"
        " pairs); check head_dim in config.json."
      )


def frequencies(config: RotaryConfig) -> tuple[np.ndarray, float]:
  """Returns (f32[c / 2] radians per position, factor on cos and sin), computed in float64."""
  half = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
  plain = 1.0 / config.base**half
  if config.scaling == "none":
    return plain.astype(np.float32), 1.0
  if config.scaling == "linear":
    return (plain / config.factor).astype(np.float32), 1.0
  if config.scaling == "llama3":
    wavelength = 2 * math.pi / plain
    turns = config.original_context / wavelength
    low, high = config.low_frequency_factor, config.high_frequency_factor
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return ((1 - smooth) * plain / config.factor + smooth * plain).astype(np.float32), 1.0

  def dimension_of(rotations: float) -> float:
    """Returns the feature pair that rotates `rotations` times over the original context."""
    span = config.original_context / (rotations * 2 * math.pi)
    return config.head_dim * math.log(span) / (2 * math.log(config.base))

  first = max(math.floor(dimension_of(config.beta_fast)), 0)
  last = min(math.ceil(dimension_of(config.beta_slow)), config.head_dim - 1)
  width = max(last - first, 0.001)  # The published ramp's guard against a zero width.
  ramp = np.clip((np.arange(config.head_dim // 2) - first) / width, 0.0, 1.0)
  mixed = plain / config.factor * ramp + plain * (1 - ramp)
  factor = config.attention_factor
  if factor is None:
    factor = 0.1 * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0
  return mixed.astype(np.float32), factor


def table_rows(
  positions: Int[Array, "n"], config: RotaryConfig
) -> tuple[Float[Array, "n e"], Float[Array, "n e"]]:
  """Returns cos and sin, f32[n, c / 2], for every layer. Use it on the rows of one tile."""
  radians_per_position, factor = frequencies(config)
  angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(radians_per_position)[None, :]
  return jnp.cos(angles) * jnp.float32(factor), jnp.sin(angles) * jnp.float32(factor)


def rotate_rows(
  x: Float[Array, "n h c"], cos: Float[Array, "n e"], sin: Float[Array, "n e"]
) -> Float[Array, "n h c"]:
  """Rotates every head of every row, in float32, and rounds once to x's dtype."""
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos[:, None, :], sin[:, None, :]
  turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return turned.astype(x.dtype)
