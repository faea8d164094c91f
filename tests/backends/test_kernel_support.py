"""Models that the GPU kernels support: the choice of "auto", and errors for an explicit name.

`gpu.h200()` stands in for the device on a machine without a GPU.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import gpu
from seerjax import numerics as numerics_lib
from seerjax.backends import choice, kernel_support
from seerjax.engine import runner
from seerjax.layer_kinds import Gated
from seerjax.models import config as model_config, kv_layout, parameters, presets
from seerjax.models.decoder import decide
from seerjax.numerics import NumericsConfig
from seerjax.types import SamplingRows, TokenBatch

BFLOAT16 = NumericsConfig(compute_dtype="bfloat16", row_tile=16, reduction_shards=8)
PALLAS = dataclasses.replace(BFLOAT16, backend="pallas")
QWEN3 = presets.get("qwen3-8b")
CPU = "got the platform 'cpu', expected an NVIDIA GPU of compute capability 9.0 (Hopper)"


SIXTEEN_HEADS = QWEN3.changed(num_heads=32, num_kv_heads=16)


def of(model: model_config.TransformerConfig, numerics: NumericsConfig) -> NumericsConfig:
  """Returns the numerics with the model's slabs."""
  return dataclasses.replace(numerics, reduction_shards=model_config.largest_shards(model))


def test_on_hopper_in_bfloat16_the_kernels_are_taken():
  with gpu.h200():
    assert choice.chosen_on_gpu(BFLOAT16, QWEN3) == ("pallas", "")
    assert choice.chosen_on_gpu(BFLOAT16, None) == ("pallas", "")
    by_name = decide(QWEN3, PALLAS).numerics
  assert by_name == PALLAS


@pytest.mark.parametrize(
  "name",
  [
    name
    for name, config in presets.CONFIGS.items()
    if name.startswith(("qwen3", "llama", "nano-gpu"))
    and isinstance(config.layers[0].feed_forward, Gated)
  ],
)
def test_models_of_usual_sizes_are_taken(name):
  model = presets.get(name)
  with gpu.h200():
    assert kernel_support.reason_against(of(model, PALLAS), model) is None


# The choice of "auto", and the errors of a name.
REASONS = [
  pytest.param(
    presets.nano(),
    {},
    "attention: got head_dim 16, expected one of (64, 128)",
    id="a head that no kernel takes",
  ),
  pytest.param(
    dataclasses.replace(QWEN3, vocab_size=151_940),
    {},
    "token_logprobs: got a vocabulary of 151940, expected a positive multiple of 64 below",
    id="a vocabulary",
  ),
  pytest.param(
    SIXTEEN_HEADS,
    dict(reduction_shards=16),
    "contract_slabs: got w[16, 256, 4096], expected 1, 2, 4 or 8 slabs",
    id="more slabs than a contraction has",
  ),
  pytest.param(
    QWEN3,
    dict(query_tile=64),
    "attention: got query_tile=64 times 4 query heads per key/value head, 256 rows, expected at"
    " most",
    id="a query tile",
  ),
  pytest.param(
    QWEN3,
    dict(kv_split=1024, query_tile=32),
    "attention: got 429056 bytes of shared memory, expected at most 232448; make stages, kv_split",
    id="too little shared memory",
  ),
  pytest.param(
    QWEN3,
    dict(kv_split=32),
    "attention: got key_block=32; expected 64, 128 or 256",
    id="a short split",
  ),
]


@pytest.mark.parametrize(("model", "changes", "message"), REASONS)
def test_what_a_kernel_does_not_take_is_its_own_sentence(model, changes, message):
  numerics = dataclasses.replace(of(model, BFLOAT16), **changes)
  with gpu.h200():
    chosen, reason = choice.chosen_on_gpu(numerics, model)
    assert chosen == "tiled"
    assert reason.startswith(message)
    by_name = dataclasses.replace(numerics, backend="pallas")
    with pytest.raises(ValueError) as refused:
      decide(model, by_name)
  error = str(refused.value)
  assert error.startswith(f"NumericsConfig.backend: got 'pallas', but {message}")
  assert error.endswith("use 'auto', which falls back to another backend.")


def test_float32_stays_tiled_on_a_gpu_and_says_so():
  with gpu.h200():
    chosen = choice.chosen_on_gpu(NumericsConfig(), QWEN3)
  assert chosen == ("tiled", "the kernels multiply bfloat16, and compute_dtype is float32")


def test_a_machine_without_hopper_stays_tiled_and_a_name_is_refused():
  chosen, reason = choice.chosen_on_gpu(BFLOAT16, QWEN3)
  assert chosen == "tiled" and reason.startswith(CPU)
  with pytest.raises(ValueError, match=r"got 'pallas', but got the platform 'cpu', expected an NV"):
    decide(QWEN3, PALLAS)
  device = jax.sharding.AbstractDevice(device_kind="NVIDIA B200", num_cores=148, platform="gpu")
  with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
    _, reason = choice.chosen_on_gpu(BFLOAT16, None)
  assert reason.startswith("got the abstract device 'NVIDIA B200', expected an NVIDIA GPU of comp")


def step_of(model: model_config.TransformerConfig, numerics: NumericsConfig) -> None:
  """Traces the engine's step of a model's first layer and head."""
  model = model.changed(num_layers=1)
  i32 = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.int32)
  f32 = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
  rows, page = 16, 64
  batch = TokenBatch(
    *(i32(rows) for _ in range(3)), i32(), i32(rows), i32(rows), i32(rows, 4), i32()
  )
  sampled = SamplingRows(
    f32(rows), i32(rows), f32(rows), f32(rows), i32(rows, 4), f32(rows, 4), i32(rows), i32(rows)
  )
  inputs = runner.StepInputs(
    batch, i32(rows), sampled, jax.ShapeDtypeStruct((rows,), jnp.uint32), i32(rows), i32(),
    i32(rows, 2), i32(),
  )  # fmt: skip
  params = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16),
    parameters.shapes(model, numerics.reduction_shards),
  )
  pages = jax.eval_shape(
    lambda: kv_layout.empty_pages(decide(model, numerics), num_pages=9, page_size=page)
  )
  step = functools.partial(runner.instance_step, decoder=decide(model, numerics))
  jax.eval_shape(step, params, pages, inputs, jax.eval_shape(lambda: numerics_lib.key(0)))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen2.5-0.5b", "llama-3.2-1b"])
def test_what_is_taken_is_what_the_engine_step_asks_for(name):
  model = presets.get(name)
  numerics = of(model, PALLAS)
  with gpu.h200():
    assert kernel_support.reason_against(numerics, model) is None
    step_of(model, numerics)
