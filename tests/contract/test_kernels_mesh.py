"""Interpreted kernels on a mesh: the number of devices that share the slabs changes no bit.

Model axes of 1, 2, 4 and 8 devices, with as many slabs or more, with and without a gradient. The
interpreter supports a single device, so a mesh is `vmap` over an axis of its name, in which kernels
run one after the other.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gpu, matmul
from seerjax import layer_kinds, numerics as numerics_lib, parallel
from seerjax.backends import mosaic_gpu
from seerjax.layer_kinds import Gated, Grouped, LayerConfig
from seerjax.models import config as model_config, flax_module, kv_layout, parameters, transformer
from seerjax.models.decoder import decide
from seerjax.ops import rotary

REASON = gpu.device_reason(interpret=True)
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

PAGE_SIZE, ROWS = 32, 8
AXIS = parallel.MODEL_AXIS


def numerics_of(slabs):
  return numerics_lib.NumericsConfig(
    backend="pallas_interpreted", compute_dtype="bfloat16", row_tile=4, query_tile=4,
    slot_tile=2, kv_split=64, reduction_shards=slabs,
  )  # fmt: skip


def config_of(slabs):
  """Returns the smallest accepted config: slabs of 64-wide tiles, two slab sums in every row."""
  return model_config.TransformerConfig(
    vocab_size=128 * slabs,
    hidden_size=64,
    layers=layer_kinds.uniform(
      LayerConfig(
        attention=Grouped(
          num_heads=slabs,
          num_kv_heads=slabs,
          head_dim=64,
          has_qk_norms=True,
          has_qkv_biases=True,
          rotary=rotary.RotaryConfig(head_dim=64),
        ),
        feed_forward=Gated(intermediate_size=64 * slabs),
      ),
      1,
    ),
    is_tied=True,
  )


def weights_of(slabs):
  """Returns weights with which sums of four or more slabs depend on their order in bfloat16.

  The second and the third slab have equal large values, and cancel each other in contractions.
  """
  rng = np.random.default_rng(slabs)

  def leaf(path, shape):
    noise = 0.3 * rng.standard_normal(shape.shape, np.float32)
    return jnp.asarray(noise + np.float32("norm" in path[-1].key), jnp.bfloat16)

  params = jax.tree_util.tree_map_with_path(leaf, parameters.shapes(config_of(slabs), slabs))
  if slabs < 4:
    return params
  (layer,) = params["layers"]
  for name in ("qkv", "qkv_bias", "gate_up"):
    layer[name] = layer[name].at[2].set(layer[name][1])
  for name in ("out", "down"):
    large = 512 * layer[name][1]
    layer[name] = layer[name].at[1].set(large).at[2].set(-large)
  return params


def batch_of(slabs):
  batch, num_pages = flax_module.sequences_batch(1, ROWS, numerics_of(slabs), PAGE_SIZE)
  tokens = np.random.default_rng(7).integers(0, 128 * slabs, ROWS).astype(np.int32)
  return jax.tree.map(jnp.asarray, batch)._replace(tokens=jnp.asarray(tokens)), num_pages


def hidden_rows(params, batch, *, slabs, num_pages, axis=None, kind=mosaic_gpu.MosaicGpu):
  numerics = numerics_of(slabs)
  return transformer.forward(
    params,
    batch,
    kv_layout.ScratchPages(num_pages, PAGE_SIZE),
    decoder=decide(config_of(slabs), numerics, axis=axis, backend=kind(numerics)),
  )[0]


def under_gradient(params, batch, **about):
  """Runs `hidden_rows` in a program that also has the gradient of this device's slabs."""

  def loss(layer):
    hidden = hidden_rows(params | {"layers": [layer]}, batch, **about)
    return jnp.sum(hidden.astype(jnp.float32) ** 2), hidden

  gradient, hidden = jax.grad(loss, has_aux=True)(params["layers"][0])
  # Unused results would be removed from the program together with their kernels.
  is_finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(gradient)]
  return jnp.where(jnp.all(jnp.stack(is_finite)), hidden, jnp.nan)


def of_mesh(function, slabs, tensor_parallel_size, **about):
  """Runs `function` on every device of a mesh that shares the slabs; returns f[i, n, d]."""
  params = weights_of(slabs)
  batch, num_pages = batch_of(slabs)
  run = functools.partial(function, slabs=slabs, num_pages=num_pages, **about)
  if tensor_parallel_size == 1:
    return np.asarray(jax.jit(run)(params, batch), np.float32)[None]
  specs = parameters.partition_specs(config_of(slabs), slabs)
  axes = jax.tree.map(lambda spec: 0 if AXIS in spec else None, specs)

  def split(leaf, axis):
    return leaf if axis is None else leaf.reshape(tensor_parallel_size, -1, *leaf.shape[1:])

  parts = jax.tree.map(split, params, axes)
  on_devices = jax.vmap(functools.partial(run, axis=AXIS), (axes, None), axis_name=AXIS)
  return np.asarray(jax.jit(on_devices)(parts, batch), np.float32)


@functools.cache
def on_one_device(slabs):
  return of_mesh(hidden_rows, slabs, 1)


MESHES = [
  pytest.param(4, 2, marks=pytest.mark.thorough),
  *(
    pytest.param(slabs, devices, marks=pytest.mark.long)
    for slabs in (2, 4, 8)
    for devices in (2, 4, 8)
    if devices <= slabs and (slabs, devices) != (4, 2)
  ),
]


@pytest.mark.few(1)
@pytest.mark.thorough
@pytest.mark.parametrize(("slabs", "tensor_parallel_size"), MESHES)
def test_a_mesh_changes_no_bit(slabs, tensor_parallel_size):
  found = of_mesh(hidden_rows, slabs, tensor_parallel_size)
  assert len(found) == tensor_parallel_size
  np.testing.assert_array_equal(found, np.broadcast_to(on_one_device(slabs), found.shape))
  assert np.isfinite(found).all() and len(np.unique(found)) > ROWS


@pytest.mark.long
@pytest.mark.parametrize(
  ("slabs", "tensor_parallel_size"), [(1, 1), (2, 1), (4, 1), (8, 1), (4, 2), (8, 8)]
)
def test_a_gradient_changes_no_bit_of_a_mesh(slabs, tensor_parallel_size):
  found = of_mesh(under_gradient, slabs, tensor_parallel_size)
  np.testing.assert_array_equal(found, np.broadcast_to(on_one_device(slabs), found.shape))


@dataclasses.dataclass(frozen=True)
class AddsInOrder(mosaic_gpu.MosaicGpu):
  """Twin: adds the values of a mesh's devices in sequence."""

  def add_contraction(self, stream, x, slabs, axis):
    own = matmul.contract_slabs(x, slabs, out_dtype=jnp.float32, interpret=True)
    total = functools.reduce(jnp.add, list(parallel.gather_slabs(own[None], axis)))
    return stream + total.astype(stream.dtype)


@pytest.mark.thorough
def test_sums_in_another_order_do():
  """With the twin, ((0 + 1) + 2) + 3 differs from (0 + 1) + (2 + 3)."""
  found = of_mesh(hidden_rows, 4, 4, kind=AddsInOrder)
  np.testing.assert_array_equal(found, np.broadcast_to(found[0], found.shape))
  assert not np.array_equal(found[0], on_one_device(4)[0])
