"""Matmul: the definition, its gradient, bits of a row from that row alone, errors."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from kernel_arrays import array, as_float64, long, needs_interpreter
import numpy as np
import pytest

from pallas_kernels import gpu, matmul, matmul_parts

# Small tiles, so that few tokens fill several; two multiprocessors walk over them.
CONFIG = matmul.Config(block_m=64, block_n=128, max_stages=3, swapped_rows=8, snake_width=2)
N, K = 192, 128
# (k, n, shards, transposed) of Qwen3-8B, Qwen3-30B-A3B and gpt-oss-120b.
BENCHMARK = (
  (4096, 6144, 1, False),
  (4096, 4096, 8, False),
  (12288, 4096, 8, False),
  (4096, 151936, 1, True),
  (2048, 5120, 1, False),
  (4096, 2048, 8, False),
  (768, 2048, 1, False),
  (2048, 151936, 1, True),
  (2880, 5120, 1, False),
  (4096, 2880, 8, False),
  (2880, 201088, 1, True),
)
GATES = ((4096, 12288), (2048, 768), (2880, 2880))


def struct(*shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


# Compiled once for each shape: most of an interpreted kernel's time is its compilation.
interpreted = jax.jit(
  functools.partial(matmul.matmul, interpret=True),
  static_argnames=("transposed", "out_dtype", "config"),
)
interpreted_contraction = jax.jit(
  functools.partial(matmul.contract_slabs, interpret=True),
  static_argnames=("transposed", "out_dtype", "config"),
)
interpreted_swiglu = jax.jit(
  functools.partial(matmul.swiglu, config=CONFIG, interpret=True), static_argnames="transposed"
)


# The interpreter's outputs start as NaN, so that a tile that is never written is detected.
@pytest.mark.thorough
@needs_interpreter
@pytest.mark.parametrize("num_rows", [0, 1, long(7), 8, long(9), 63, long(64), 65])
def test_values_are_the_definitions(num_rows):
  x, w = array(num_rows, K), array(K, N, seed=1)
  found = interpreted(x, w, out_dtype=jnp.float32, config=CONFIG)
  np.testing.assert_allclose(found, matmul.reference(x, w), rtol=1e-5, atol=1e-4)


@needs_interpreter
@pytest.mark.parametrize("num_rows, transposed", [long(3, True), (70, False)])
def test_the_epilogue_adds_bias_and_residual_and_rounds_once(num_rows, transposed):
  x, w = array(num_rows, K), array(*((N, K) if transposed else (K, N)), seed=1)
  more = dict(bias=array(N, seed=2), residual=array(num_rows, N, seed=3), transposed=transposed)
  found = interpreted(x, w, config=CONFIG, **more)
  single = interpreted(x, w, out_dtype=jnp.float32, config=CONFIG, **more)
  np.testing.assert_allclose(single, matmul.reference(x, w, **more), rtol=1e-5, atol=1e-4)
  assert found.dtype == jnp.bfloat16
  np.testing.assert_array_equal(as_float64(found), as_float64(single.astype(jnp.bfloat16)))


@needs_interpreter
@pytest.mark.parametrize("num_rows", [3, long(70)])
def test_shards_are_added_as_one_tree(num_rows):
  x, w = array(num_rows, 256), array(256, 64, seed=1)
  config = dataclasses.replace(CONFIG, shards=4)
  found = interpreted(x, w, out_dtype=jnp.float32, config=config)
  part = functools.partial(interpreted, out_dtype=jnp.float32, config=CONFIG)
  parts = [part(x[:, i : i + 64], w[i : i + 64]) for i in range(0, 256, 64)]
  tree = (parts[0] + parts[1]) + (parts[2] + parts[3])
  np.testing.assert_array_equal(found, tree)
  fold = ((parts[0] + parts[1]) + parts[2]) + parts[3]
  assert (np.asarray(found) != np.asarray(fold)).any()


@needs_interpreter
@pytest.mark.parametrize("num_rows, transposed", [(3, True), long(70, False)])
def test_swiglu_is_its_definition(num_rows, transposed):
  shape = (N, K) if transposed else (K, N)
  x, gate, up = array(num_rows, K), array(*shape, seed=1), array(*shape, seed=2)
  found = interpreted_swiglu(x, gate, up, transposed=transposed)
  expected = matmul.swiglu_reference(x, gate, up, transposed=transposed)
  np.testing.assert_allclose(as_float64(found), expected, rtol=2**-8, atol=1e-3)


def gradients(function, weights, *inputs):
  loss = lambda *inputs: jnp.sum(function(*inputs).astype(jnp.float32) * weights)
  return jax.jit(jax.grad(loss, argnums=tuple(range(len(inputs)))))(*inputs)


@pytest.mark.few(2)
@needs_interpreter
@pytest.mark.parametrize("num_rows, transposed", [(0, True), (5, True), (70, False)])
def test_gradients_are_the_definitions(num_rows, transposed):
  x, w = array(num_rows, K), array(*((N, K) if transposed else (K, N)), seed=1)
  bias, residual = array(N, seed=2), array(num_rows, N, seed=3)
  # Exact in bfloat16, as dy must be.
  weights = array(num_rows, N, seed=4).astype(jnp.float32)

  def call(function, x, w, bias, residual):
    return function(x, w, bias=bias, residual=residual, transposed=transposed)

  inputs = (x, w, bias, residual)
  kernel = functools.partial(interpreted, out_dtype=jnp.float32, config=CONFIG)
  found = gradients(functools.partial(call, kernel), weights, *inputs)
  expected = gradients(functools.partial(call, matmul.reference), weights, *inputs)
  for got, want in zip(found, expected):
    assert got.dtype == want.dtype
    np.testing.assert_allclose(as_float64(got), as_float64(want), rtol=2**-7, atol=1e-2)


@pytest.mark.thorough
@needs_interpreter
def test_swiglus_gradients_are_the_definitions():
  x, gate, up = array(9, K) * 0.1, array(K, 64, seed=1), array(K, 64, seed=2)
  weights = array(9, 64, seed=4).astype(jnp.float32)
  found = gradients(interpreted_swiglu, weights, x, gate, up)
  expected = gradients(matmul.swiglu_reference, weights, x, gate, up)
  for got, want in zip(found, expected):
    np.testing.assert_allclose(as_float64(got), as_float64(want), rtol=2**-5, atol=0.1)


@pytest.mark.thorough
@needs_interpreter
@pytest.mark.parametrize("transposed", [False, long(True)])
def test_slabs_of_columns_are_as_many_calls(transposed):
  x, w = array(9, K), array(2, *((64, K) if transposed else (K, 64)), seed=1)
  more = dict(bias=array(2, 64, seed=2), residual=array(2, 9, 64, seed=3))
  weights = array(2, 9, 64, seed=4).astype(jnp.float32)
  kernel = functools.partial(
    interpreted, transposed=transposed, out_dtype=jnp.float32, config=CONFIG
  )
  found = kernel(x, w, **more)
  alone = [kernel(x, w[i], **{name: a[i] for name, a in more.items()}) for i in range(2)]
  np.testing.assert_array_equal(found, jnp.stack(alone))

  def call(function, x, w, bias, residual):
    return function(x, w, bias=bias, residual=residual)

  inputs = (x, w, *more.values())
  definition = functools.partial(matmul.reference, transposed=transposed)
  np.testing.assert_allclose(found, definition(x, w, **more), rtol=1e-5, atol=1e-4)
  found = gradients(functools.partial(call, kernel), weights, *inputs)
  expected = gradients(functools.partial(call, definition), weights, *inputs)
  for got, want in zip(found, expected):
    assert got.dtype == want.dtype
    np.testing.assert_allclose(as_float64(got), as_float64(want), rtol=2**-7, atol=2e-2)


@needs_interpreter
@pytest.mark.parametrize("transposed", [False, long(True)])
def test_slabs_of_gate_and_up_in_one_are_as_many_pairs(transposed):
  x, joined = array(9, K), array(2, *((256, K) if transposed else (K, 256)), seed=1)
  gate, up = jnp.split(joined, 2, axis=1 if transposed else 2)
  found = interpreted_swiglu(x, joined, transposed=transposed)
  alone = [interpreted_swiglu(x, gate[i], up[i], transposed=transposed) for i in range(2)]
  np.testing.assert_array_equal(as_float64(found), as_float64(jnp.stack(alone)))
  swapped = [interpreted_swiglu(x, up[i], gate[i], transposed=transposed) for i in range(2)]
  assert (as_float64(found) != as_float64(jnp.stack(swapped))).any()


@pytest.mark.thorough
@needs_interpreter
def test_gradients_of_gate_and_up_in_one_are_the_definitions():
  x, joined = array(9, K) * 0.1, array(2, K, 128, seed=1)
  weights = array(2, 9, 64, seed=4).astype(jnp.float32)
  found = gradients(interpreted_swiglu, weights, x, joined)
  expected = gradients(matmul.swiglu_reference, weights, x, joined)
  for got, want in zip(found, expected):
    assert got.dtype == want.dtype
    np.testing.assert_allclose(as_float64(got), as_float64(want), rtol=2**-5, atol=0.1)


@needs_interpreter
@pytest.mark.parametrize("slabs, num_rows", [(4, 9), long(8, 9), long(8, 70), long(1, 3)])
def test_slabs_of_a_contraction_are_added_as_one_tree(slabs, num_rows):
  x, w = array(slabs, num_rows, 64), array(slabs, 64, 192, seed=1)
  config = dataclasses.replace(CONFIG, mode="sequential")
  call = functools.partial(interpreted_contraction, out_dtype=jnp.float32)
  found = call(x, w, config=config)
  parts = [interpreted(x[i], w[i], out_dtype=jnp.float32, config=CONFIG) for i in range(slabs)]
  np.testing.assert_array_equal(found, matmul.add_tree(parts))
  np.testing.assert_allclose(found, matmul.contract_slabs_reference(x, w), rtol=1e-5, atol=1e-4)
  if slabs > 2:
    assert (np.asarray(found) != np.asarray(functools.reduce(jnp.add, parts))).any()
  # Separate parts, adjacent slabs, and slabs of several devices.
  apart = dataclasses.replace(CONFIG, mode="parallel")
  np.testing.assert_array_equal(call(x, w, config=apart), found)
  flat = jnp.swapaxes(x, 0, 1).reshape(num_rows, -1)
  np.testing.assert_array_equal(call(flat, w, config=config), found)
  for local in (2, 4):
    if local < slabs:
      devices = [
        call(x[i : i + local], w[i : i + local], config=config) for i in range(0, slabs, local)
      ]
      whole = matmul_parts.add_partials(jnp.stack(devices), interpret=True)
      np.testing.assert_array_equal(whole, found)


@pytest.mark.thorough
@needs_interpreter
@pytest.mark.parametrize("mode", [long("sequential"), "parallel"])
@pytest.mark.parametrize("transposed", [False, long(True)])
def test_a_stream_is_added_to_the_rounded_sum(mode, transposed):
  x, w = array(2, 9, 64), array(2, *((192, 64) if transposed else (64, 192)), seed=1)
  stream = array(9, 192, seed=2)
  call = functools.partial(
    interpreted_contraction, transposed=transposed, config=dataclasses.replace(CONFIG, mode=mode)
  )
  found = call(x, w, stream=stream)
  np.testing.assert_array_equal(as_float64(found), as_float64(stream + call(x, w)))
  once = (stream.astype(jnp.float32) + call(x, w, out_dtype=jnp.float32)).astype(jnp.bfloat16)
  assert (as_float64(found) != as_float64(once)).any()


@pytest.mark.thorough
@needs_interpreter
@pytest.mark.parametrize(
  "num_rows, side_by_side, transposed",
  [(5, True, False), long(9, False, True), long(0, False, False), long(70, True, True)],
)
def test_gradients_of_a_contraction_of_slabs_are_the_definitions(
  num_rows, side_by_side, transposed
):
  shape = (num_rows, 4 * 64) if side_by_side else (4, num_rows, 64)
  x, w = array(*shape), array(4, *((192, 64) if transposed else (64, 192)), seed=1)
  stream = array(num_rows, 192, seed=3)
  weights = array(num_rows, 192, seed=4).astype(jnp.float32)

  def call(function, x, w, stream):
    return function(x, w, stream=stream, transposed=transposed)

  kernel = functools.partial(interpreted_contraction, out_dtype=jnp.float32, config=CONFIG)
  inputs = (x, w, stream)
  found = gradients(functools.partial(call, kernel), weights, *inputs)
  expected = gradients(functools.partial(call, matmul.contract_slabs_reference), weights, *inputs)
  for got, want in zip(found, expected):
    assert got.dtype == want.dtype
    np.testing.assert_allclose(as_float64(got), as_float64(want), rtol=2**-7, atol=1e-2)


@pytest.mark.thorough
@needs_interpreter
def test_shards_have_the_same_bits_in_either_mode():
  x, w = array(9, 256), array(2, 256, 64, seed=1)
  more = dict(residual=array(2, 9, 64, seed=2))
  config = dataclasses.replace(CONFIG, shards=4, mode="sequential")
  apart = dataclasses.replace(config, mode="parallel")
  found = interpreted(x, w, config=config, **more)
  np.testing.assert_array_equal(
    as_float64(found), as_float64(interpreted(x, w, config=apart, **more))
  )
  whole = dataclasses.replace(config, shards=1)
  single = functools.partial(interpreted, x, w, out_dtype=jnp.float32)
  assert (as_float64(single(config=apart)) != as_float64(single(config=whole))).any()


@pytest.mark.thorough
@needs_interpreter
@pytest.mark.parametrize("mode", ["sequential", long("parallel")])
def test_a_row_of_a_contraction_of_slabs_is_that_rows_alone(mode, seed):
  rng = np.random.default_rng(seed)
  x, stream = array(8, 70, 64, seed=seed), array(70, 64, seed=seed + 1)
  w = array(8, 64, 64, seed=seed + 2)
  call = functools.partial(interpreted_contraction, config=dataclasses.replace(CONFIG, mode=mode))
  whole = call(x, w, stream=stream)
  for size in (70, 1):
    chosen = rng.permutation(70)[:size]
    part = call(x[:, chosen], w, stream=stream[chosen])
    np.testing.assert_array_equal(as_float64(part), as_float64(whole[chosen]))


@needs_interpreter
def test_slabs_of_no_rows_are_empty():
  x, w = array(0, K), array(2, K, 64)
  y, pull = jax.vjp(functools.partial(interpreted, config=CONFIG), x, w)
  dx, dw = pull(y)
  assert y.shape == (2, 0, 64) and dx.shape == x.shape
  assert dw.shape == w.shape and not as_float64(dw).any()
  y = interpreted_contraction(array(2, 0, K), w)
  assert y.shape == (0, 64) and y.dtype == jnp.bfloat16
  assert interpreted_swiglu(x, array(2, K, 256)).shape == (2, 0, 128)


@pytest.mark.thorough
@pytest.mark.few(1)
# The interpreter multiplies tiles with NumPy, and NumPy's bits depend on a tile's shape: each
# orientation is compared with itself. Equal bits of the tensor core must be tested on a GPU.
@needs_interpreter
@pytest.mark.parametrize(
  "shards, swapped_rows, most, sizes",
  [
    (2, 64, 64, (33,)),
    (1, 0, 70, (1,)),
    long(1, 64, 64, (40, 63, 47) * 2),
    long(2, 0, 130, (9, 64, 65, 129) * 2),
  ],
)
def test_a_rows_bits_depend_on_that_row_alone(shards, swapped_rows, most, sizes, seed):
  rng = np.random.default_rng(seed)
  x, dy = array(most, K, seed=seed), array(most, 64, seed=seed + 1)
  w = array(K, 64, seed=seed + 2)
  config = dataclasses.replace(CONFIG, shards=shards, swapped_rows=swapped_rows)
  forward = functools.partial(interpreted, out_dtype=jnp.float32, config=config)

  @jax.jit
  def both(x, dy):
    y, pull = jax.vjp(lambda x: forward(x, w), x)
    return y, pull(dy.astype(jnp.float32))[0]

  whole = both(x, dy)
  np.testing.assert_array_equal(forward(x, w), whole[0])
  for size in (most, *sizes):  # In another order, and among fewer.
    chosen = rng.permutation(most)[:size]
    for part, all_rows in zip(both(x[chosen], dy[chosen]), whole):
      np.testing.assert_array_equal(as_float64(part), as_float64(all_rows[chosen]))


@needs_interpreter
def test_both_orientations_add_the_same_products(seed):
  # Small integers: every sum is exact, so only a wrong element could differ.
  rng = np.random.default_rng(seed)
  x, w = (jnp.asarray(rng.integers(-3, 4, s), jnp.bfloat16) for s in ((8, 256), (256, N)))
  tall = dataclasses.replace(CONFIG, swapped_rows=0)
  np.testing.assert_array_equal(
    as_float64(interpreted(x, w, config=CONFIG)), as_float64(interpreted(x, w, config=tall))
  )


@pytest.mark.parametrize("pair", [False, True])
def test_few_tokens_are_swapped_on_a_gpu_alone(pair):
  def plans(interpret, **fields):
    return {
      matmul.plan(
        matmul.Config(**fields),
        num_rows,
        columns=4096,
        pair=pair,
        slabs=None if pair else 8,
        interpret=interpret,
      )
      for num_rows in (1, 9, 64, 65, 4096)
    }

  assert len(plans(True)) == 1 and plans(True) == plans(False, swapped_rows=0)
  assert {tiles.block_m for tiles in plans(False)} == {8, 16, 64, 128}
  assert plans(False) == plans(True, swapped_rows=64)


@pytest.mark.few(4)
@pytest.mark.parametrize("k, n, shards, transposed", BENCHMARK)
@pytest.mark.parametrize(
  "num_rows, swapped_rows",
  [
    (8, 64),
    (4096, 0),
    long(1, 64),
    long(64, 64),
    long(8, 0),
  ],
)
def test_benchmark_shapes_lower_for_a_gpu(num_rows, swapped_rows, k, n, shards, transposed):
  call = functools.partial(
    matmul.matmul,
    transposed=transposed,
    config=matmul.Config(shards=shards, swapped_rows=swapped_rows),
  )
  weight = struct(n, k) if transposed else struct(k, n)
  assert "mosaic_gpu" in gpu.lower_for_cuda(call, struct(num_rows, k), weight)


@pytest.mark.thorough
@pytest.mark.parametrize("k, n, shards, transposed", BENCHMARK[1::3])
@pytest.mark.parametrize("num_rows", [long(8), 4096])
def test_benchmark_epilogues_and_gradients_lower_for_a_gpu(num_rows, k, n, shards, transposed):
  def forward_and_gradient(x, w, bias, residual):
    call = functools.partial(
      matmul.matmul,
      transposed=transposed,
      config=matmul.Config(shards=shards, swapped_rows=64),
    )
    y, pull = jax.vjp(lambda x, w, b, r: call(x, w, bias=b, residual=r), x, w, bias, residual)
    return y, pull(y)

  weight = struct(n, k) if transposed else struct(k, n)
  inputs = (struct(num_rows, k), weight, struct(n), struct(num_rows, n))
  assert gpu.lower_for_cuda(forward_and_gradient, *inputs).count("mosaic_gpu") >= 3


@pytest.mark.parametrize("num_rows", [8, 4096])
def test_slabs_lower_for_a_gpu(num_rows):
  # Qwen3-8B's queries, keys and values on eight devices' weights.
  def forward_and_gradient(x, w, bias, residual):
    call = functools.partial(matmul.matmul, config=matmul.Config(swapped_rows=64))
    y, pull = jax.vjp(lambda x, w, b, r: call(x, w, bias=b, residual=r), x, w, bias, residual)
    return y, pull(y)

  inputs = (struct(num_rows, 4096), struct(8, 4096, 768), struct(8, 768), struct(8, num_rows, 768))
  assert gpu.lower_for_cuda(forward_and_gradient, *inputs).count("mosaic_gpu") >= 3


@pytest.mark.parametrize("mode", ["sequential", "parallel"])
@pytest.mark.parametrize("k, n", [(512, 4096), long(1536, 4096), long(64, 64)])
def test_contractions_of_slabs_lower_for_a_gpu(k, n, mode):
  def forward_and_gradient(x, w, stream):
    config = matmul.Config(mode=mode)
    call = functools.partial(matmul.contract_slabs, config=config)
    y, pull = jax.vjp(lambda x, w, s: call(x, w, stream=s), x, w, stream)
    return y, pull(y)

  inputs = (struct(64, 8 * k), struct(8, k, n), struct(64, n))
  module = gpu.lower_for_cuda(forward_and_gradient, *inputs)
  assert ("add_parts" in module) == (mode == "parallel")


def test_few_rows_of_a_contraction_lie_apart():
  def names(num_rows, **fields):
    config = matmul.Config(**fields)
    module = gpu.lower_for_cuda(
      functools.partial(matmul.contract_slabs, config=config),
      struct(num_rows, 4096),
      struct(8, 512, 4096),
    )
    return "add_parts" in module

  # 32 tall tiles at up to 128 rows, of 132 multiprocessors; 64 at more, and 64 swapped ones.
  assert [names(rows) for rows in (1, 64, 65, 128, 129)] == [False, False, True, True, False]
  assert names(1, swapped_rows=0) and not names(65, mode="sequential")


def test_layers_share_one_kernel():
  def layers(count):
    def run(x, *weights):
      for w in weights:
        x = matmul.matmul(x, w)
      return x

    return gpu.lower_for_cuda(run, struct(64, 512), *[struct(512, 512)] * count)

  assert layers(2).count("mosaic_gpu_v2") == layers(5).count("mosaic_gpu_v2")
  assert len(layers(5)) < 1.2 * len(layers(2))


@pytest.mark.parametrize("k, n", GATES)
@pytest.mark.parametrize("num_rows", [long(8), long(64), 4096])
def test_benchmark_gates_lower_for_a_gpu(num_rows, k, n):
  def forward_and_gradient(x, gate, up):
    call = functools.partial(matmul.swiglu, config=matmul.Config(swapped_rows=64))
    y, pull = jax.vjp(call, x, gate, up)
    return y, pull(y)

  inputs = (struct(num_rows, k), struct(k, n), struct(k, n))
  assert gpu.lower_for_cuda(forward_and_gradient, *inputs).count("mosaic_gpu") >= 5


@pytest.mark.parametrize("num_rows", [1, 64, 4096])
@pytest.mark.parametrize("pair", [False, True])
def test_the_ring_is_as_deep_as_shared_memory_allows(num_rows, pair):
  config = matmul.Config(max_stages=32, swapped_rows=64)
  tiles = matmul.plan(config, num_rows, pair=pair)
  deeper = gpu.shared_memory_bytes(tiles.scratch(tiles.stages + 1))
  assert tiles.shared_memory_bytes <= gpu.SHARED_MEMORY_LIMIT_BYTES
  assert tiles.stages == 32 or deeper > gpu.SHARED_MEMORY_LIMIT_BYTES
  assert config.shared_memory_bytes(num_rows, pair=pair) == tiles.shared_memory_bytes
