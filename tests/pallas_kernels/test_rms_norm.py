"""RMS norm: the definition, its gradient, bits of a row from that row alone, what is refused."""

from __future__ import annotations

import functools

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gpu, rms_norm

needs_interpreter = pytest.mark.skipif(
  not hasattr(plgpu, "InterpretGPUParams"),
  reason="the GPU interpreter is public from JAX 0.11.1 on",
)
# Chunks of two rows: sizes of one chunk, one less, one more, and more than eight chunks.
CONFIG = rms_norm.Config(chunk_rows=2, blocks_per_multiprocessor=1)

long = functools.partial(pytest.param, marks=pytest.mark.long)


def rows(num_rows: int, features: int = 40, dtype=jnp.bfloat16, seed: int = 0) -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).standard_normal((num_rows, features)) * 3, dtype)


def scale_of(features: int = 40, dtype=jnp.float32) -> jax.Array:
  return jnp.asarray(1 + np.random.default_rng(9).standard_normal(features), dtype)


@jax.jit
def norm(x, scale, residual=None):
  """The kernel in the interpreter, whose outputs start as NaN: (normed, total)."""
  if residual is None:
    return rms_norm.rms_norm(x, scale, config=CONFIG, interpret=True), x
  return rms_norm.add_rms_norm(x, residual, scale, config=CONFIG, interpret=True)


def as_float64(x) -> np.ndarray:
  return np.asarray(x, np.float64)


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


@pytest.mark.parametrize(
  "x, scale, residual, message",
  [
    ((3,), (3,), None, "got x[3] and scale[3], expected x[n, d] and scale[d]"),
    ((3, 8), (16,), None, "got x[3, 8] and scale[16], expected"),
    ((3, 8), (8,), (2, 8), "got residual bfloat16[2, 8], expected x's bfloat16[3, 8]"),
    ((3, 12), (12,), None, "got 12 features, expected a multiple of 8 from 8 to 8192"),
    ((3, 8200), (8200,), None, "got 8200 features, expected a multiple of 8"),
    ((3, 0), (0,), None, "got 0 features"),
    ((3, 4104), (4104,), None, "TMA would copy as 513 runs of 8; expected at most 256 runs"),
  ],
)
def test_shapes_that_cannot_run_are_refused(x, scale, residual, message):
  arrays = [jnp.zeros(shape, jnp.bfloat16) for shape in (x, scale)]
  with gpu.h200():
    if residual is None:
      call = lambda: rms_norm.rms_norm(*arrays)
    else:
      call = lambda: rms_norm.add_rms_norm(arrays[0], jnp.zeros(residual, jnp.bfloat16), arrays[1])
    with pytest.raises(NotImplementedError) as refusal:
      call()
  assert message in str(refusal.value)


def test_dtypes_that_cannot_run_are_refused():
  half, single = jnp.zeros((3, 8), jnp.float16), jnp.zeros((3, 8))
  with pytest.raises(NotImplementedError, match="got x of float16, expected bfloat16 or float32"):
    rms_norm.rms_norm(half, jnp.zeros(8))
  with pytest.raises(NotImplementedError, match="got scale of int32, expected bfloat16"):
    rms_norm.rms_norm(single, jnp.zeros(8, jnp.int32))


def test_a_cpu_is_refused():
  with pytest.raises(NotImplementedError, match="rms_norm: got the platform 'cpu', expected"):
    rms_norm.rms_norm(rows(3), scale_of())


@pytest.mark.parametrize(
  "field, value, message",
  [
    ("padding", 512, "got padding=512; expected a positive multiple of 1024."),
    ("chunk_rows", 0, "got chunk_rows=0; expected at least 1."),
    ("blocks_per_multiprocessor", 0, "got blocks_per_multiprocessor=0"),
  ],
)
def test_a_config_that_cannot_work_is_refused(field, value, message):
  with pytest.raises(ValueError) as refusal:
    rms_norm.Config(**{field: value})
  assert message in str(refusal.value)
