"""SeerJAX's RMS norm inside a Flax NNX model.

A small network of `nnx.Linear` layers learns a function of its inputs, with `seerjax.ops.norms` in
place of `nnx.RMSNorm`. The norm agrees with Flax's up to rounding, trains under `nnx.grad`, and
gives a row the same bits in a batch of any size, with and without a gradient. This holds for the
norm only; Flax's Linear layers do not guarantee it.

  python examples/flax_norm.py

Takes about ten seconds on two CPU cores. The last line reads `equal bits: True`.
"""

from __future__ import annotations

import sys

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from seerjax import NumericsConfig
from seerjax.ops import norms

NUMERICS = NumericsConfig(row_tile=16)
FEATURES = 64
NUM_ROWS = 100  # Not a multiple of the tile, so the last tile is padded.
NUM_STEPS = 200


class RMSNorm(nnx.Module):
  """Like `nnx.RMSNorm`, with batch-invariant rows; f[n, d] -> f[n, d]."""

  def __init__(self, features: int):
    self.scale = nnx.Param(jnp.ones(features))

  def __call__(self, x: jax.Array) -> jax.Array:
    return norms.rms_norm(x, self.scale[...], eps=1e-6, numerics=NUMERICS)


class Network(nnx.Module):
  """Maps f32[n, 2] to f32[n]."""

  def __init__(self, *, rngs: nnx.Rngs):
    self.first = nnx.Linear(2, FEATURES, rngs=rngs)
    self.norm = RMSNorm(FEATURES)
    self.last = nnx.Linear(FEATURES, 1, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.last(jnp.tanh(self.norm(self.first(x))))[:, 0]


@nnx.jit
def train_step(network: Network, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
  """Takes one step on the squared error, and returns the error."""

  def loss(network: Network) -> jax.Array:
    return jnp.mean((network(x) - y) ** 2)

  value, gradient = nnx.value_and_grad(loss)(network)
  optimizer.update(network, gradient)
  return value


def has_equal_bits(norm: RMSNorm, x: jax.Array) -> bool:
  """Returns whether rows f32[n, d] have equal bits in any batch, and under a gradient."""
  whole = np.asarray(norm(x))
  alone = [np.asarray(norm(x[:count])) for count in (1, 2, 15, 16, 17, 33)]

  def rows_and_sum(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows = norm(x)
    return jnp.sum(rows**2), rows

  (_, rows), _ = jax.value_and_grad(rows_and_sum, has_aux=True)(x)
  return np.array_equal(rows, whole) and all(
    np.array_equal(part, whole[: len(part)]) for part in alone
  )


def main() -> bool:
  """Trains, prints comparisons, and returns whether all bits were equal."""
  network = Network(rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(network, optax.adam(1e-2), wrt=nnx.Param)
  x = jax.random.uniform(jax.random.key(1), (NUM_ROWS, 2), minval=-1.0)
  y = x[:, 0] * x[:, 1]
  errors = [float(train_step(network, optimizer, x, y)) for _ in range(NUM_STEPS)]
  print(f"squared error {errors[0]:.4f} -> {errors[-1]:.6f} in {NUM_STEPS} steps")

  features = network.first(x)
  ours, theirs = RMSNorm(FEATURES), nnx.RMSNorm(FEATURES, epsilon=1e-6, rngs=nnx.Rngs(0))
  gap = float(jnp.max(jnp.abs(ours(features) - theirs(features))))
  print(f"largest difference to nnx.RMSNorm: {gap:.1e}")
  assert errors[-1] < errors[0] / 10 and gap < 1e-5
  return has_equal_bits(network.norm, features)


if __name__ == "__main__":
  is_equal = main()
  print("equal bits:", is_equal)
  sys.exit(not is_equal)
