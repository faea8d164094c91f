"""A layer's handlers around attention against NumPy chains and XLA, for any rows and mesh."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import native_layer_reference as layer_reference
import native_reference as reference
import numpy as np
import pytest
import tiny_model

from seerjax import numerics as numerics_lib, parallel
from seerjax.backends.native import layers, layers_few, threads
from seerjax.backends.protocol import Stage
from seerjax.backends.tiled import Tiled
from seerjax.models import attention, lora, mlp, parameters
from seerjax.ops import rotary, tiles

f32 = np.float32
# No size is a multiple of a vector's; biases and norms of heads in one, adapters in the other.
PLAIN = tiny_model.ODD.changed(intermediate_size=40, has_qkv_biases=True)
ADAPTED = tiny_model.ODD.changed(has_qk_norms=False)
CASES = ((PLAIN, 8, ()), (ADAPTED, 2, lora.TARGETS), (PLAIN, 1, ("out", "gate_up")))
DTYPES = ("float32", "bfloat16")
RANK, SCALE = 3, f32(1.5)


def numerics_of(dtype, slabs):
  return numerics_lib.NumericsConfig(compute_dtype=dtype, reduction_shards=slabs, row_tile=4)


def params_of(config, numerics, targets):
  params = tiny_model.random_params(config, numerics)
  if not targets:
    return params
  rng = np.random.default_rng(5)
  draw = lambda shape: jnp.asarray((0.2 * rng.standard_normal(shape.shape)).astype(f32))
  adapter = jax.tree.map(draw, lora.shapes(config, numerics, RANK, targets))
  return lora.attach(params, adapter, float(SCALE))


def rows_of(config, numerics, count, seed=1):
  """(rows of attention_inputs, rows of after_attention)."""
  rng = np.random.default_rng(seed)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape).astype(f32)).astype(numerics.dtype)
  x = draw(count, config.hidden_size)
  kind = config.layers[0].attention
  mixed = draw(count, kind.num_kv_heads, kind.group, kind.head_dim)
  cos, sin = rotary.table_rows(jnp.arange(count, dtype=jnp.int32), kind.rotary)
  return (x, cos, sin), (x, mixed)


def stages_of(config, axis=None):
  shape = config.layer_shape(0)
  return Stage(shape, axis, attention.input_rows), Stage(shape, axis, mlp.output_rows)


@functools.cache
def program(function, stage):
  return jax.jit(functools.partial(function, stage))


def wide(tree):
  """Returns all arrays as float32 of NumPy."""
  return jax.tree.map(lambda leaf: np.asarray(leaf).astype(f32), tree)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=("biases", "adapters", "one slab"))
def test_a_layer_is_its_chains_and_agrees_with_xla(case, dtype):
  config, slabs, targets = case
  numerics = numerics_of(dtype, slabs)
  weights = params_of(config, numerics, targets)["layers"][0]
  of_inputs, of_outputs = rows_of(config, numerics, 7)
  inputs, outputs = stages_of(config)
  count, tiled = jnp.int32(5), Tiled(numerics)
  got = (
    *program(layers.attention_inputs, inputs)(weights, of_inputs, count),
    program(layers.after_attention, outputs)(weights, of_outputs, count),
  )
  live = jax.tree.map(lambda leaf: leaf[:5], (of_inputs, of_outputs))
  plain, (first, second) = wide(weights), wide(live)
  expected = (
    *layer_reference.attention_inputs(config.layer_shape(0), dtype, plain, first),
    layer_reference.after_attention(config.layer_shape(0), dtype, plain, second),
  )
  by_xla = (
    *tiled.attention_inputs(inputs, weights, of_inputs, count),
    tiled.after_attention(outputs, weights, of_outputs, count),
  )
  close = 1e-5 if dtype == "float32" else 2e-2
  for found, chain, other in zip(wide(got), expected, wide(by_xla), strict=True):
    np.testing.assert_array_equal(found[:5].view(np.int32), chain.view(np.int32))
    np.testing.assert_allclose(found[:5], other[:5], rtol=0, atol=close * np.abs(chain).max())
    assert not np.any(found[5:])


def gradients_of(functions, config, weights, of_inputs, of_outputs, given, count):
  """Returns gradients of weights and rows, for cotangents of (queries, keys, values, hidden)."""
  stages = stages_of(config)

  def run(weights, of_inputs, of_outputs, given):
    first, pull_inputs = jax.vjp(
      lambda w, rows: functions[0](stages[0], w, rows, count), weights, of_inputs
    )
    second, pull_outputs = jax.vjp(
      lambda w, rows: functions[1](stages[1], w, rows, count), weights, of_outputs
    )
    del first, second
    return pull_inputs(given[:3]), pull_outputs(given[3])

  return jax.jit(run)(weights, of_inputs, of_outputs, given)


def leaves_of(expected, found):
  """(name, expected, found) of every weight that the reference has a gradient of."""
  for path, leaf in jax.tree_util.tree_flatten_with_path(expected)[0]:
    other = found
    for key in path:
      other = other[key.key]
    yield jax.tree_util.keystr(path), leaf, other


def equal_bits(a, b, what=""):
  np.testing.assert_array_equal(a.view(np.int32), b.view(np.int32), err_msg=what)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=("biases", "adapters", "one slab"))
def test_a_gradient_is_its_chains_and_agrees_with_xla(case, dtype):
  config, slabs, targets = case
  # Adapters in bfloat16: of two chunks of rows.
  count = tiles.BACKWARD_ROWS + 9 if (slabs, dtype) == (2, "bfloat16") else 7
  numerics = numerics_of(dtype, slabs)
  weights = params_of(config, numerics, targets)["layers"][0]
  of_inputs, of_outputs = rows_of(config, numerics, count)
  (_, _, _), (x, mixed) = rows_of(config, numerics, count, seed=2)
  given = mixed, mixed[:, :, 0], mixed[:, :, 1], x
  live, tiled = count - 2, Tiled(numerics)
  native = layers.attention_inputs, layers.after_attention
  xla = tiled.attention_inputs, tiled.after_attention
  run = lambda functions: wide(
    gradients_of(functions, config, weights, of_inputs, of_outputs, given, jnp.int32(live))
  )
  found, by_xla = run(native), run(xla)
  cut = jax.tree.map(lambda leaf: leaf[:live], (of_inputs, of_outputs, given))
  plain, (first, second, wanted) = wide(weights), wide(cut)
  of_weights, of_x = layer_reference.attention_inputs_gradient(
    config.layer_shape(0), dtype, plain, first, wanted[:3]
  )
  others, of_rows = layer_reference.after_attention_gradient(
    config.layer_shape(0), dtype, plain, second, wanted[3]
  )
  for expected, (got, _), (other, _) in zip((of_weights, others), found, by_xla, strict=True):
    for name, leaf, here in leaves_of(expected, got):
      equal_bits(reference.rounded(leaf, dtype), here, name)
    for name, leaf, there in leaves_of(expected, other):
      atol = (1e-5 if dtype == "float32" else 4e-2) * np.abs(leaf).max()
      np.testing.assert_allclose(leaf, there, rtol=0, atol=atol, err_msg=name)
  (_, ((x, *_), (hidden, mixed))) = found[0][0], (found[0][1], found[1][1])
  for here, expected in ((x, of_x), (hidden, of_rows[0]), (mixed, of_rows[1])):
    equal_bits(here[:live], expected)
    assert not np.any(here[live:])
  for here, there in ((x, by_xla[0][1][0]), (hidden, by_xla[1][1][0]), (mixed, by_xla[1][1][1])):
    atol = (1e-5 if dtype == "float32" else 4e-2) * np.abs(there).max()
    np.testing.assert_allclose(here, there, rtol=0, atol=atol)


@pytest.mark.thorough
def test_a_rows_gradient_knows_nothing_of_the_others():
  numerics = numerics_of("bfloat16", 2)
  weights = params_of(ADAPTED, numerics, lora.TARGETS)["layers"][0]
  rows = rows_of(ADAPTED, numerics, 70)
  (_, _, _), (x, mixed) = rows_of(ADAPTED, numerics, 70, seed=2)
  given = mixed, mixed[:, :, 0], mixed[:, :, 1], x
  native = layers.attention_inputs, layers.after_attention

  def run(count):
    first, second, own = jax.tree.map(lambda leaf: leaf[70 - count :], (*rows, given))
    found = gradients_of(native, ADAPTED, weights, first, second, own, jnp.int32(count))
    return jax.tree.leaves(wide((found[0][1][0], found[1][1])))

  whole = run(70)
  for count in (1, 3, 6):
    for some, every in zip(run(count), whole, strict=True):
      equal_bits(some, every[70 - count :])


@pytest.mark.thorough
def test_rows_behind_the_last_leave_no_trace_in_a_gradient():
  numerics = numerics_of("float32", 8)
  weights = params_of(PLAIN, numerics, ())["layers"][0]
  rows = rows_of(PLAIN, numerics, 6)
  (_, _, _), (x, mixed) = rows_of(PLAIN, numerics, 6, seed=2)
  native = layers.attention_inputs, layers.after_attention

  def run(rest):
    behind = lambda leaf: leaf.at[4:].set(rest)
    first, second, own = jax.tree.map(behind, (*rows, (mixed, mixed[:, :, 0], mixed[:, :, 1], x)))
    return wide(gradients_of(native, PLAIN, weights, first, second, own, jnp.int32(4)))

  jax.tree.map(equal_bits, run(np.nan), run(1.0))


@pytest.mark.thorough
@pytest.mark.parametrize("least_cost", [threads.LEAST_COST, 1], ids=("alone", "threads"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_its_bits_among_any_others(dtype, least_cost):
  """Few rows share out columns, and many are shared out themselves."""
  numerics = numerics_of(dtype, 2)
  weights = params_of(ADAPTED, numerics, lora.TARGETS)["layers"][0]
  inputs, outputs = stages_of(ADAPTED)
  most = layers_few.MOST_ROWS + 12
  rows = rows_of(ADAPTED, numerics, most)

  def run(count):
    first, second = jax.tree.map(lambda leaf: leaf[most - count :], rows)
    found = (
      program(layers.attention_inputs, inputs)(weights, first, jnp.int32(count)),
      program(layers.after_attention, outputs)(weights, second, jnp.int32(count)),
    )
    return jax.tree.leaves(wide(found))

  whole, before = run(most), threads.process[1]
  threads.process[1] = least_cost
  try:
    for count in (1, 3, 4, 7, 64, layers_few.MOST_ROWS):
      for some, every in zip(run(count), whole, strict=True):
        np.testing.assert_array_equal(some.view(np.int32), every[most - count :].view(np.int32))
  finally:
    threads.process[1] = before


@pytest.mark.thorough
@pytest.mark.parametrize("targets", [(), lora.TARGETS], ids=("plain", "adapters"))
def test_devices_of_a_mesh_change_no_bit(targets):
  numerics = numerics_of("bfloat16", 8)
  weights = params_of(PLAIN, numerics, targets)["layers"][1]
  rows = rows_of(PLAIN, numerics, 9)

  def run(axis, weights, first, second):
    inputs, outputs = stages_of(PLAIN, axis)
    return (
      layers.attention_inputs(inputs, weights, first, jnp.int32(8)),
      layers.after_attention(outputs, weights, second, jnp.int32(8)),
    )

  alone = wide(jax.jit(functools.partial(run, None))(weights, *rows))
  mesh, axis = parallel.make_mesh(tensor_parallel_size=4), parallel.MODEL_AXIS
  specs = parameters.specs_of({"layers": [weights]})["layers"][0]
  heads = jax.P(None, axis)
  sharded = jax.shard_map(
    functools.partial(run, axis),
    mesh=mesh,
    in_specs=(specs, jax.P(), (jax.P(), heads)),
    out_specs=((heads,) * 3, jax.P()),
    check_vma=False,
  )
  found = wide(jax.jit(sharded)(weights, *rows))
  for some, every in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
    np.testing.assert_array_equal(some.view(np.int32), every.view(np.int32))


@pytest.mark.thorough
def test_stacked_layers_are_read_where_they_lie():
  numerics = numerics_of("float32", 8)
  params = params_of(PLAIN, numerics, ())
  stacked = parameters.stacked(params)["layers"]
  rows = rows_of(PLAIN, numerics, 3)

  def run(index, first, second):
    weights = {
      name: tiles.LayerSlabs(leaf, index)
      if name in ("qkv", "out", "gate_up", "down")
      else leaf[index]
      for name, leaf in stacked.items()
    }
    inputs, outputs = stages_of(PLAIN)
    return (
      layers.attention_inputs(inputs, weights, first, jnp.int32(3)),
      layers.after_attention(outputs, weights, second, jnp.int32(3)),
    )

  inputs, outputs = stages_of(PLAIN)
  for index, weights in enumerate(params["layers"]):
    found = jax.tree.leaves(jax.jit(run)(jnp.int32(index), *rows))
    first = program(layers.attention_inputs, inputs)(weights, rows[0], jnp.int32(3))
    second = program(layers.after_attention, outputs)(weights, rows[1], jnp.int32(3))
    for some, every in zip(found, [*first, second], strict=True):
      np.testing.assert_array_equal(some, every)


@pytest.mark.thorough
def test_an_adapter_that_has_not_learnt_changes_no_bit():
  numerics = numerics_of("float32", 2)
  base = tiny_model.random_params(PLAIN, numerics)
  fresh = lora.init(numerics_lib.key(0), PLAIN, numerics, RANK)
  attached = lora.attach(base, fresh, 1.5)["layers"][0]
  rows = rows_of(PLAIN, numerics, 5)
  inputs, outputs = stages_of(PLAIN)
  for function, stage, own in (
    (layers.attention_inputs, inputs, rows[0]), (layers.after_attention, outputs, rows[1])
  ):  # fmt: skip
    run = lambda weights: wide(program(function, stage)(weights, own, jnp.int32(5)))  # noqa: B023
    jax.tree.map(np.testing.assert_array_equal, run(attached), run(base["layers"][0]))
