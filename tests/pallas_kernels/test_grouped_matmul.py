"""Grouped matmul: the definition, its gradient, a row's bits in any group, errors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from kernel_arrays import array, as_float64, needs_interpreter
import numpy as np
import pytest

from pallas_kernels import gpu, grouped_matmul, matmul

# One warpgroup a tile; two multiprocessors walk over tiles.
CONFIG = grouped_matmul.Config(block_m=64, block_n=128, max_stages=3, snake_width=2)
EXPERTS, K, N = 4, 128, 192
# Of 75 rows: none, one, a tile less one, a tile, a tile and one, all in one group; unassigned rows.
SIZES = ((0, 1, 63, 11), (64, 0, 0, 3), (65, 9, 1, 0), (0, 0, 75, 0), (0, 0, 0, 0), (8, 16, 7, 44))
# (m, e, k, n) of Qwen3-30B-A3B, 8 of 128 experts, and gpt-oss-120b, 4 of 128: 64 and 4096 tokens.
BENCHMARK = tuple(
  (tokens * chosen, 128, k, n)
  for chosen, shapes in ((8, ((2048, 1536), (768, 2048))), (4, ((2880, 5760), (2880, 2880))))
  for k, n in shapes
  for tokens in (64, 4096)
)


def sizes_of(*sizes: int) -> jax.Array:
  return jnp.asarray(sizes, jnp.int32)


# Compiled once for each shape, whatever the groups.
interpreted = jax.jit(
  functools.partial(grouped_matmul.grouped_matmul, interpret=True),
  static_argnames=("transposed", "out_dtype", "config"),
)


@functools.partial(jax.jit, static_argnames=("kernel", "transposed", "out_dtype", "config"))
def with_gradients(kernel, x, group_sizes, w, dy, **options):
  y, pull = jax.vjp(lambda x, w: kernel(x, group_sizes, w, **options), x, w)
  return y, *pull(dy)


@pytest.mark.thorough
@pytest.mark.few(2)
# The interpreter's outputs start as NaN, so that a row that is never written is detected.
@needs_interpreter
@pytest.mark.parametrize("sizes", SIZES)
def test_values_and_gradients_are_the_definitions(sizes):
  x, w = array(75, K), array(EXPERTS, K, N, seed=1)
  # Exact in bfloat16, as dy must be.
  dy = array(75, N, seed=2).astype(jnp.float32)
  groups = sizes_of(*sizes)
  found = with_gradients(interpreted, x, groups, w, dy, out_dtype=jnp.float32, config=CONFIG)
  expected = with_gradients(grouped_matmul.reference, x, groups, w, dy)
  np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-4)
  assert not as_float64(found[0][sum(sizes) :]).any()
  for got, want in zip(found[1:], expected[1:]):
    assert got.dtype == want.dtype
    np.testing.assert_allclose(as_float64(got), as_float64(want), rtol=2**-7, atol=1e-2)
  empty = np.asarray(sizes) == 0
  assert not as_float64(found[2])[empty].any()


@pytest.mark.thorough
@needs_interpreter
def test_transposed_weights_give_the_definition():
  x, w = array(13, K), array(3, N, K, seed=1)
  dy, groups = array(13, N, seed=2), sizes_of(2, 0, 9)
  found = with_gradients(interpreted, x, groups, w, dy, transposed=True, config=CONFIG)
  assert found[0].dtype == jnp.bfloat16
  dy = dy.astype(jnp.float32)
  expected = with_gradients(grouped_matmul.reference, x, groups, w, dy, transposed=True)
  for got, want in zip(found, expected):
    np.testing.assert_allclose(as_float64(got), as_float64(want), rtol=2**-7, atol=1e-2)


@pytest.mark.thorough
@needs_interpreter
@pytest.mark.parametrize("num_rows", [0, 1])
def test_few_rows_give_the_definition(num_rows):
  x, w = array(num_rows, K), array(2, K, 64, seed=1)
  dy, groups = array(num_rows, 64, seed=2).astype(jnp.float32), sizes_of(0, num_rows)
  found = with_gradients(interpreted, x, groups, w, dy, out_dtype=jnp.float32, config=CONFIG)
  expected = with_gradients(grouped_matmul.reference, x, groups, w, dy)
  for got, want in zip(found, expected):
    np.testing.assert_allclose(as_float64(got), as_float64(want), rtol=2**-7, atol=1e-2)


def check_that_groups_do_not_matter(sizes, seed):
  """Compares rows with the same rows in groups of other sizes, in another order."""
  rng = np.random.default_rng(seed)
  rows, expert = sum(sizes), np.repeat(np.arange(len(sizes)), sizes)
  w = array(len(sizes), K, 64, seed=seed)
  x, dy = array(rows, K, seed=seed + 1), array(rows, 64, seed=seed + 2).astype(jnp.float32)
  options = dict(out_dtype=jnp.float32, config=CONFIG)
  y, dx, _ = with_gradients(interpreted, x, sizes_of(*sizes), w, dy, **options)
  # Some rows of each expert, then zeros: arrays keep their shapes.
  mine = [rng.permutation(np.flatnonzero(expert == e)) for e in range(len(sizes))]
  chosen = np.concatenate([rows[: rng.integers(0, len(rows) + 1)] for rows in mine])
  kept = np.bincount(expert[chosen], minlength=len(sizes))
  filled = ((0, rows - len(chosen)), (0, 0))
  part = with_gradients(
    interpreted,
    jnp.pad(x[chosen], filled),
    sizes_of(*kept),
    w,
    jnp.pad(dy[chosen], filled),
    **options,
  )
  for found, whole in zip(part, (y, dx)):
    np.testing.assert_array_equal(as_float64(found[: len(chosen)]), as_float64(whole[chosen]))
  return x, w, y


@pytest.mark.thorough
@needs_interpreter
def test_a_rows_bits_depend_on_that_row_and_its_expert_alone(seed):
  x, w, y = check_that_groups_do_not_matter((7, 65, 3), seed)
  # Nor do they depend on a tile's height, or on there being groups: matmul adds in the same order.
  tall = grouped_matmul.Config(block_m=128, block_n=128, max_stages=3)
  assert (tall.for_rows(65, 1).block_m, CONFIG.for_rows(65, 1).block_m) == (128, 64)
  options = dict(out_dtype=jnp.float32, config=tall)
  np.testing.assert_array_equal(interpreted(x[7:72], sizes_of(65), w[1:2], **options), y[7:72])
  alone = functools.partial(
    matmul.matmul, out_dtype=jnp.float32, config=CONFIG.for_rows(65, 1), interpret=True
  )
  np.testing.assert_array_equal(jax.jit(alone)(x[7:72], w[1]), y[7:72])


@needs_interpreter
@pytest.mark.long
@pytest.mark.parametrize("sizes", [(0, 130, 1, 9), (64, 63, 65), (1, 1, 1, 1, 1)])
def test_bits_of_rows_of_many_groups(sizes, seed):
  for attempt in range(3):
    check_that_groups_do_not_matter(sizes, seed + attempt)


@pytest.mark.thorough
@needs_interpreter
def test_a_weights_gradient_adds_rows_in_ascending_order():
  # A group of 130 rows is three parts of 64; numpy adds the same products one after the other, as
  # the interpreter does.
  groups = sizes_of(9, 130)
  x, dy, w = array(139, 64), array(139, 64, seed=1), array(2, 64, 64, seed=2)
  found = with_gradients(interpreted, x, groups, w, dy, config=CONFIG)[2]
  total = np.zeros((64, 64), np.float32)
  left, right = (np.asarray(jnp.pad(a[9:], ((0, 62), (0, 0))), np.float32) for a in (x, dy))
  for part in range(0, 192, 64):
    total = total + left[part : part + 64].T @ right[part : part + 64]
  np.testing.assert_allclose(as_float64(found[1]), total, rtol=2**-8, atol=1e-5)
  # Rows of the other group do not reach it.
  other = with_gradients(interpreted, x.at[:9].mul(3), groups, w, dy, config=CONFIG)[2]
  np.testing.assert_array_equal(as_float64(found[1]), as_float64(other[1]))
  assert (found[0] != other[0]).any()


@pytest.mark.parametrize("sizes", [*SIZES, (1, 1, 1, 72), (19, 19, 19, 18)])
@pytest.mark.parametrize("block_m", [64, 128])
def test_every_row_is_in_one_tile_of_its_expert(sizes, block_m):
  rows = 75
  padded = grouped_matmul.padded_groups(sizes_of(*sizes), rows, 8)
  work = grouped_matmul.row_tiles(padded, rows, block_m)
  num_tiles = int(work.num_items[0])
  assert num_tiles == sum(-(-size // block_m) for size in sizes) <= work.items.shape[0]
  found = {}
  for expert, first, past in np.asarray(work.items)[:num_tiles]:
    assert first % 8 == 0 and past % 8 == 0 and first < past <= padded.num_rows
    for row in range(first, min(first + block_m, past)):
      assert row not in found
      found[row] = int(expert)
  place = np.asarray(padded.place)[: sum(sizes)]
  assert [found[row] for row in place] == list(np.repeat(np.arange(EXPERTS), sizes))
  assert (np.asarray(padded.place)[sum(sizes) :] >= padded.num_rows).all()


@pytest.mark.few(2)
@pytest.mark.parametrize("m, e, k, n", BENCHMARK)
def test_benchmark_shapes_lower_for_a_gpu(m, e, k, n):
  def forward_and_gradient(x, group_sizes, w):
    y, pull = jax.vjp(lambda x, w: grouped_matmul.grouped_matmul(x, group_sizes, w), x, w)
    return y, pull(y)

  module = gpu.lower_for_cuda(
    forward_and_gradient,
    jax.ShapeDtypeStruct((m, k), jnp.bfloat16),
    jax.ShapeDtypeStruct((e,), jnp.int32),
    jax.ShapeDtypeStruct((e, k, n), jnp.bfloat16),
  )
  assert module.count("mosaic_gpu") >= 3


def test_few_rows_for_each_expert_take_short_tiles():
  config = grouped_matmul.Config()
  assert config.for_rows(64 * 8, 128).block_m == 64
  assert config.for_rows(4096 * 8, 128).block_m == 128
  # Short tiles leave room for a deeper ring.
  for num_rows in (64, 4096 * 8):
    assert 0 < config.shared_memory_bytes(num_rows, 128) <= gpu.SHARED_MEMORY_LIMIT_BYTES
