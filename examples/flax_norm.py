"""Our RMS norm inside another project's Flax NNX model.

A small network of `nnx.Linear` layers learns a function of its inputs, with `seerjax.ops.norms`
where `nnx.RMSNorm` might stand. The norm agrees with Flax's to rounding, learns under `nnx.grad`,
and gives a row the same bits in a batch of any size, with and without a gradient. That holds for
the norm; the Linear layers are Flax's own and promise nothing of the kind.

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
NUM_ROWS = 100  # Not a multiple of a tile: the last one is filled up.
NUM_STEPS = 200


class RMSNorm(nnx.Module):
  """As `nnx.RMSNorm`, with rows whose bits follow from themselves alone; f[n, d] -> f[n, d]."""

  def __init__(self, features: int):
    self.scale = nnx.Param(jnp.ones(features))

  def __call__(self, x: jax.Array) -> jax.Array:
    return norms.rms_norm(x, self.scale[...], eps=1e-6, numerics=NUMERICS)


class Network(nnx.Module):
  """f32[n, 2] -> f32[n]."""

  def __init__(self, *, rngs: nnx.Rngs):
    self.first = nnx.Linear(2, FEATURES, rngs=rngs)
    self.norm = RMSNorm(FEATURES)
    self.last = nnx.Linear(FEATURES, 1, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.last(jnp.tanh(self.norm(self.first(x))))[:, 0]


@nnx.jit
def train_step(network: Network, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
  """Takes one step on the squared error and returns it."""

  def loss(network: Network) -> jax.Array:
    return jnp.mean((network(x) - y) ** 2)

  value, gradient = nnx.value_and_grad(loss)(network)
  optimizer.update(network, gradient)
  return value


def has_equal_bits(norm: RMSNorm, x: jax.Array) -> bool:
  """Returns whether rows f32[n, d] come out equal in any company, and under a gradient."""
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
  """Trains, prints what is compared, and returns whether every bit was equal."""
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
