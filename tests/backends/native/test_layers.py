"""A layer's handlers around attention: chains in NumPy, what XLA says, any rows, any mesh."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import native_reference as reference
import numpy as np
import pytest
import tiny_model

from seerjax import numerics as numerics_lib, parallel
from seerjax.backends.native import layers
from seerjax.backends.protocol import Stage
from seerjax.backends.tiled import Tiled
from seerjax.models import attention, lora, mlp, parameters
from seerjax.ops import rotary, tiles

f32 = np.float32
# No size is a multiple of a vector's; biases and norms of heads in one, adapters in the other.
PLAIN = dataclasses.replace(tiny_model.ODD, intermediate_size=40, has_qkv_biases=True)
ADAPTED = dataclasses.replace(tiny_model.ODD, has_qk_norms=False)
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
  mixed = draw(count, config.num_kv_heads, config.group, config.head_dim)
  cos, sin = rotary.table_rows(jnp.arange(count, dtype=jnp.int32), config.rotary)
  return (x, cos, sin), (x, mixed)


def stages_of(config, axis=None):
  return Stage(config, axis, attention.input_rows), Stage(config, axis, mlp.output_rows)


@functools.cache
def program(function, stage):
  return jax.jit(functools.partial(function, stage))


def wide(tree):
  """Everything as float32 of NumPy."""
  return jax.tree.map(lambda leaf: np.asarray(leaf).astype(f32), tree)


def normed_of(x, scale, eps, dtype):
  mean = reference.dot(x, x) / f32(x.shape[-1])
  inverse = f32(1) / np.sqrt(mean + f32(eps))
  return reference.rounded(reference.rounded(x * inverse[..., None], dtype) * scale, dtype)


def low_of(product, adapter, dtype):
  return reference.rounded(product * adapter["scale"], dtype)


def expected_inputs(config, dtype, weights, rows):
  """Queries, keys and values in NumPy."""
  x, cos, sin = rows
  n, c, group = x.shape[0], config.head_dim, config.group
  normed = normed_of(x, weights["attention_norm"], config.norm_eps, dtype)
  low = None
  if "qkv_lora" in weights:
    own = weights["qkv_lora"]
    low = low_of(reference.product(normed, own["a"]), own, dtype)
  outputs = []
  for slab, w in enumerate(weights["qkv"]):
    qkv = reference.product(normed, w)
    if low is not None:
      qkv = reference.product(low, weights["qkv_lora"]["b"][slab], qkv)
    qkv = reference.rounded(qkv, dtype)
    if "qkv_bias" in weights:
      qkv = reference.rounded(qkv + weights["qkv_bias"][slab], dtype)
    heads = qkv.reshape(n, -1, c)
    own = heads.shape[1] // (group + 2)
    q, k, v = np.split(heads, (own * group, own * (group + 1)), axis=1)
    turned = []
    for part, name in ((q, "query_norm"), (k, "key_norm")):
      if name in weights:
        part = normed_of(part, weights[name], config.norm_eps, dtype)
      a, b = np.split(part, 2, axis=-1)
      cosine, sine = cos[:, None], sin[:, None]
      part = np.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)
      turned.append(reference.rounded(part, dtype))
    outputs.append((turned[0].reshape(n, own, group, c), turned[1], v))
  return tuple(np.concatenate(parts, axis=1) for parts in zip(*outputs, strict=True))


def summed(dtype, weights, name, inputs):
  """The tree over slabs of inputs [r][n, e] @ W, and the adapter's term."""
  total = reference.tree_sum(
    np.stack([reference.product(x, w) for x, w in zip(inputs, weights[name], strict=True)])
  )
  if f"{name}_lora" in weights:
    own = weights[f"{name}_lora"]
    low = [reference.product(x, a) for x, a in zip(inputs, own["a"], strict=True)]
    low = low_of(reference.tree_sum(np.stack(low)), own, dtype)
    total = reference.product(low, own["b"], total)
  return reference.rounded(total, dtype)


def expected_outputs(config, dtype, weights, rows):
  """Hidden rows after the MLP in NumPy."""
  x, mixed = rows
  parts = np.split(mixed.reshape(x.shape[0], -1), weights["out"].shape[0], axis=1)
  x = reference.rounded(x + summed(dtype, weights, "out", parts), dtype)
  normed = normed_of(x, weights["mlp_norm"], config.norm_eps, dtype)
  inner = []
  for slab, w in enumerate(weights["gate_up"]):
    gate_up = reference.product(normed, w)
    if "gate_up_lora" in weights:
      own = weights["gate_up_lora"]
      low = low_of(reference.product(normed, own["a"]), own, dtype)
      gate_up = reference.product(low, own["b"][slab], gate_up)
    gate, up = np.split(gate_up, 2, axis=1)
    inner.append(reference.rounded(gate / (f32(1) + reference.exp(-gate)) * up, dtype))
  return reference.rounded(x + summed(dtype, weights, "down", inner), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=("biases", "adapters", "one slab"))
def test_a_layer_is_its_chains_and_agrees_with_xla(case, dtype):
  config, slabs, targets = case
  numerics = numerics_of(dtype, slabs)
  weights = params_of(config, numerics, targets)["layers"][0]
  of_inputs, of_outputs = rows_of(config, numerics, 7)
  inputs, outputs = stages_of(config)
  count, tiled = jnp.int32(5), Tiled(numerics)
  got = *program(layers.attention_inputs, inputs)(weights, of_inputs, count), program(
    layers.after_attention, outputs
  )(weights, of_outputs, count)
  live = jax.tree.map(lambda leaf: leaf[:5], (of_inputs, of_outputs))
  plain, (first, second) = wide(weights), wide(live)
  expected = *expected_inputs(config, dtype, plain, first), expected_outputs(
    config, dtype, plain, second
  )
  by_xla = *tiled.attention_inputs(inputs, weights, of_inputs, count), tiled.after_attention(
    outputs, weights, of_outputs, count
  )
  close = 1e-5 if dtype == "float32" else 2e-2
  for found, chain, other in zip(wide(got), expected, wide(by_xla), strict=True):
    np.testing.assert_array_equal(found[:5].view(np.int32), chain.view(np.int32))
    np.testing.assert_allclose(found[:5], other[:5], rtol=0, atol=close * np.abs(chain).max())
    assert not np.any(found[5:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_its_bits_among_any_others(dtype):
  numerics = numerics_of(dtype, 2)
  weights = params_of(ADAPTED, numerics, lora.TARGETS)["layers"][0]
  inputs, outputs = stages_of(ADAPTED)
  rows = rows_of(ADAPTED, numerics, 70)

  def run(count):
    first, second = jax.tree.map(lambda leaf: leaf[70 - count :], rows)
    found = (
      program(layers.attention_inputs, inputs)(weights, first, jnp.int32(count)),
      program(layers.after_attention, outputs)(weights, second, jnp.int32(count)),
    )
    return jax.tree.leaves(wide(found))

  whole = run(70)
  for count in (1, 3, 4, 7, 64):
    for some, every in zip(run(count), whole, strict=True):
      np.testing.assert_array_equal(some.view(np.int32), every[70 - count :].view(np.int32))


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
  mesh, axis = parallel.make_mesh(model_shards=4), parallel.MODEL_AXIS
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
