"""RMS norm: the definition, its gradient, bits of a row from that row alone, errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from kernel_arrays import as_float64, long, needs_interpreter
import numpy as np
import pytest

from pallas_kernels import gpu, rms_norm

# Chunks of two rows: sizes of one chunk, one less, one more, and more than eight chunks.
CONFIG = rms_norm.Config(chunk_rows=2, blocks_per_multiprocessor=1)


def rows(num_rows: int, features: int = 40, dtype=jnp.bfloat16, seed: int = 0) -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).standard_normal((num_rows, features)) * 3, dtype)


def scale_of(features: int = 40, dtype=jnp.float32) -> jax.Array:
  return jnp.asarray(1 + np.random.default_rng(9).standard_normal(features), dtype)


@jax.jit
def norm(x, scale, residual=None):
  """Runs the kernel in the interpreter with outputs that start as NaN; returns (normed, total)."""
  if residual is None:
    return rms_norm.rms_norm(x, scale, config=CONFIG, interpret=True), x
  return rms_norm.add_rms_norm(x, residual, scale, config=CONFIG, interpret=True)


@pytest.mark.thorough
@needs_interpreter
@pytest.mark.parametrize(
  "num_rows, features, dtype",
  [
    (0, 40, jnp.bfloat16),
    (1, 8, jnp.float32),
    (3, 1032, jnp.bfloat16),
    (5, 40, jnp.float32),
    long(1, 8, jnp.bfloat16),
    long(3, 1032, jnp.float32),
    long(5, 40, jnp.bfloat16),
  ],
)
def test_values_are_the_definitions(num_rows, features, dtype):
  tolerance = 2e-6 if dtype == jnp.float32 else 2**-8
  x, residual = rows(num_rows, features, dtype), rows(num_rows, features, dtype, seed=1)
  scale = scale_of(features)
  normed, total = norm(x, scale, residual)
  assert normed.dtype == total.dtype == dtype
  expected = as_float64(rms_norm.reference(x, scale, residual))
  np.testing.assert_allclose(as_float64(normed), expected, rtol=tolerance, atol=tolerance)
  np.testing.assert_array_equal(as_float64(total), as_float64(x + residual))
  # Fused or not, the same bits.
  np.testing.assert_array_equal(as_float64(normed), as_float64(norm(x + residual, scale)[0]))


@pytest.mark.few(2)
@needs_interpreter
@pytest.mark.parametrize("num_rows", [0, 1, long(3), 19])
def test_gradients_are_the_definitions(num_rows):
  x, residual = rows(num_rows, dtype=jnp.float32), rows(num_rows, dtype=jnp.float32, seed=1)
  scale = scale_of()
  weights, more = rows(num_rows, dtype=jnp.float32, seed=2), rows(num_rows, dtype=jnp.float32)

  def loss(outputs):
    return jnp.sum(outputs[0] * weights) + jnp.sum(outputs[1] * more)

  gradient = jax.jit(jax.grad(lambda x, r, s: loss(norm(x, s, r)), argnums=(0, 1, 2)))
  found = gradient(x, residual, scale)
  expected = jax.grad(
    lambda x, r, scale: loss((rms_norm.reference(x, scale, r), x + r)), argnums=(0, 1, 2)
  )(x, residual, scale)
  for got, want in zip(found, expected):
    np.testing.assert_allclose(as_float64(got), as_float64(want), rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
@needs_interpreter
def test_a_rows_bits_depend_on_that_row_alone(seed):
  rng = np.random.default_rng(seed)
  x, dy = rows(13, seed=seed), rows(13, seed=seed + 1)
  scale = scale_of(dtype=jnp.bfloat16)

  @jax.jit
  def both(x, dy):
    normed, pull = jax.vjp(lambda x: norm(x, scale)[0], x)
    return normed, pull(dy)[0]

  whole = both(x, dy)
  np.testing.assert_array_equal(as_float64(whole[0]), as_float64(norm(x, scale)[0]))
  for size in (1, 13, 1):  # Alone, and in another order.
    chosen = rng.permutation(13)[:size]
    for part, all_rows in zip(both(x[chosen], dy[chosen]), whole):
      np.testing.assert_array_equal(as_float64(part), as_float64(all_rows[chosen]))


def norm_each(arrays, scales):
  return rms_norm.rms_norm_each(arrays, scales, config=CONFIG, interpret=True)


def heads(shape, dtype=jnp.bfloat16, seed: int = 0) -> jax.Array:
  """Returns f[shape] of a spread that differs from head to head."""
  rng = np.random.default_rng(seed)
  x = rng.standard_normal(shape) * np.exp(rng.standard_normal((*shape[:-1], 1)))
  return jnp.asarray(x, dtype)


@pytest.mark.thorough
@needs_interpreter
@pytest.mark.parametrize(
  "num_rows, features, dtype",
  [
    (3, 64, jnp.bfloat16),
    (17, 128, jnp.float32),
    (0, 128, jnp.bfloat16),
    long(9, 256, jnp.float32),
  ],
)
def test_heads_of_all_slabs_are_normed_as_each_array_alone(num_rows, features, dtype):
  # Tiles of 64 rows that end within an array, and more of them than blocks.
  tolerance = 2e-6 if dtype == jnp.float32 else 2**-8
  q, k = heads((2, num_rows, 4, features), dtype), heads((2, num_rows, 1, features), dtype, 1)
  scales = scale_of(features, jnp.bfloat16), 2 * scale_of(features, jnp.bfloat16)
  found = jax.jit(norm_each)((q, k), scales)
  for x, scale, got in zip((q, k), scales, found):
    assert (got.shape, got.dtype) == (x.shape, x.dtype)
    flat = x.reshape(-1, features)
    want = as_float64(rms_norm.reference(flat, scale)).reshape(x.shape)
    np.testing.assert_allclose(as_float64(got), want, rtol=tolerance, atol=tolerance)
    alone = as_float64(norm(flat, scale)[0]).reshape(x.shape)
    np.testing.assert_array_equal(as_float64(got), alone)
    fused, total = norm(flat, scale, flat)
    np.testing.assert_array_equal(as_float64(total), as_float64(flat + flat))
    np.testing.assert_array_equal(as_float64(fused), as_float64(norm(flat + flat, scale)[0]))


@needs_interpreter
def test_a_scale_of_another_array_is_noticed():
  # The twin: the same comparison, with the scales the wrong way round.
  q, k = heads((2, 3, 4, 64)), heads((2, 3, 1, 64), seed=1)
  scales = scale_of(64), 2 * scale_of(64)
  right, wrong = norm_each((q, k), scales), norm_each((q, k), scales[::-1])
  assert all((as_float64(a) != as_float64(b)).any() for a, b in zip(right, wrong))


@needs_interpreter
def test_wide_rows_are_normed_each_by_itself():
  arrays = rows(2, 320), rows(3, 320, seed=1)
  scales = scale_of(320), 2 * scale_of(320)
  for x, scale, got in zip(arrays, scales, norm_each(arrays, scales)):
    np.testing.assert_array_equal(as_float64(got), as_float64(norm(x, scale)[0]))
  assert norm_each((), ()) == ()


@pytest.mark.few(1)
@needs_interpreter
def test_gradients_of_heads_are_the_definitions():
  arrays = heads((2, 3, 4, 64), jnp.float32), heads((2, 3, 1, 64), jnp.float32, 1)
  scales = scale_of(64), 2 * scale_of(64)
  weights = heads((2, 3, 4, 64), jnp.float32, 2), heads((2, 3, 1, 64), jnp.float32, 3)

  def reference(arrays, scales):
    each = [rms_norm.reference(x.reshape(-1, 64), s) for x, s in zip(arrays, scales)]
    return tuple(y.reshape(x.shape) for x, y in zip(arrays, each))

  def gradient(norm_each):
    loss = lambda *args: sum(jnp.sum(y * w) for y, w in zip(norm_each(*args), weights))
    return jax.jit(jax.grad(loss, argnums=(0, 1)))(arrays, scales)

  found, expected = jax.tree.leaves(gradient(norm_each)), jax.tree.leaves(gradient(reference))
  for got, want in zip(found, expected, strict=True):
    np.testing.assert_allclose(as_float64(got), as_float64(want), rtol=1e-5, atol=1e-5)


@needs_interpreter
def test_a_narrow_rows_bits_depend_on_that_row_alone(seed):
  rng = np.random.default_rng(seed)
  x, scale = heads((70, 64), seed=seed), scale_of(64)
  run = jax.jit(lambda x: norm_each((x,), (scale,))[0])
  whole = run(x)
  for size in (1, 70):  # Alone, and in another order.
    chosen = rng.permutation(70)[:size]
    np.testing.assert_array_equal(as_float64(run(x[chosen])), as_float64(whole[chosen]))


@pytest.mark.parametrize("num_rows", [1, 64, long(1024)])
@pytest.mark.parametrize("features", [64, 128, long(256)])
def test_heads_of_all_slabs_are_one_launch(num_rows, features):
  q = jax.ShapeDtypeStruct((8, num_rows, 4, features), jnp.bfloat16)
  k = jax.ShapeDtypeStruct((8, num_rows, 1, features), jnp.bfloat16)
  scale = jax.ShapeDtypeStruct((features,), jnp.bfloat16)
  module = gpu.lower_for_cuda(rms_norm.rms_norm_each, (q, k), (scale, scale))
  assert module.count("custom_call @mosaic_gpu") == 1
  # Rows come in whole tiles of eight: nothing is padded, copied or cut around the launch.
  assert "stablehlo.pad" not in module and "stablehlo.slice" not in module


@pytest.mark.parametrize("features", [64, 1024])
def test_ptx_rounds_the_products_of_every_sum(features):
  x = jax.ShapeDtypeStruct((8, features), jnp.bfloat16)
  scale = jax.ShapeDtypeStruct((features,), jnp.bfloat16)

  def gradient(x, scale):
    y, pull = jax.vjp(rms_norm.rms_norm, x, scale)
    return pull(y)

  for call in (rms_norm.rms_norm, gradient):
    assert "mul.rn.f32" in gpu.lower_for_cuda(call, x, scale)


def test_layers_share_their_programs():
  x = jax.ShapeDtypeStruct((8, 1024), jnp.bfloat16)
  scale = jax.ShapeDtypeStruct((1024,), jnp.bfloat16)

  def layers(num: int, config_of=lambda i: rms_norm.Config()) -> int:
    def loss(x, scale):
      for i in range(num):
        x, total = rms_norm.add_rms_norm(x, x, scale, config=config_of(i))
        x = rms_norm.rms_norm(x + total, scale, config=config_of(i))
      return jnp.sum(x.astype(jnp.float32))

    module = gpu.lower_for_cuda(jax.value_and_grad(loss, argnums=(0, 1)), x, scale)
    return module.count("custom_call @mosaic_gpu")

  assert layers(2) == layers(4) < 9
  # The twin: programs that differ are not shared.
  assert layers(4, lambda i: rms_norm.Config(chunk_rows=1 + i)) > 12


@pytest.mark.parametrize("features", [2048, 2880, 4096])
@pytest.mark.parametrize("num_rows", [8, long(64), 4096])
def test_benchmark_shapes_lower_for_a_gpu(num_rows, features):
  x = jax.ShapeDtypeStruct((num_rows, features), jnp.bfloat16)
  scale = jax.ShapeDtypeStruct((features,), jnp.bfloat16)

  def forward_and_gradient(x, residual, scale):
    outputs, pull = jax.vjp(rms_norm.add_rms_norm, x, residual, scale)
    return outputs, pull(outputs)

  module = gpu.lower_for_cuda(forward_and_gradient, x, x, scale)
  assert module.count("mosaic_gpu") >= 3
  assert "mosaic_gpu" in gpu.lower_for_cuda(rms_norm.rms_norm, x, scale)


def test_shared_memory_of_the_widest_row_fits():
  assert rms_norm.Config().shared_memory_bytes(8192, jnp.float32) <= gpu.SHARED_MEMORY_LIMIT_BYTES
  x = jax.ShapeDtypeStruct((3, 8192), jnp.float32)
  scale = jax.ShapeDtypeStruct((8192,), jnp.float32)
  with gpu.h200():
    assert rms_norm.is_supported(x, scale) is None
    assert rms_norm.is_supported(x, scale, config=rms_norm.Config(padding=16384)) == (
      "got 265216 bytes of shared memory, expected at most 232448; make padding smaller"
    )
