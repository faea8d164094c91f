"""Engine step and train step lower for TPU and CUDA on this host, for nano and an 8B model.

Only shapes are used: no weight of these models is allocated. Exporting does not run the programs;
running them needs a test on such a machine.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seerjax import parallel
from seerjax.engine import runner
from seerjax.models import kv_layout, parameters, presets, transformer
from seerjax.models.decoder import decide
from seerjax.numerics import NumericsConfig
from seerjax.trainer import losses, optimizer as optimizer_lib, packing, state as state_lib, step
from seerjax.types import KeyCopies, SamplingRows, TokenBatch, TrainBatch, TrainState

PLATFORMS = ("tpu", "cuda")
PAGE_SIZE = 64
BIASES = 16
NUMERICS = NumericsConfig(
  row_tile=64, reduction_shards=8, compute_dtype="bfloat16", backend="tiled"
)


def models(name, num_layers):
  """Returns nano, and a preset with fewer layers; the whole of it is a long test."""
  whole = presets.get(name)
  few = whole.changed(num_layers=num_layers)
  return [
    pytest.param(presets.nano(), id="nano"),
    pytest.param(few, id=f"{name}-of-{num_layers}-layers"),
    pytest.param(whole, id=name, marks=pytest.mark.long),
  ]


def i32(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.int32)


def f32(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def token_batch(*lead, rows, segments, width):
  return TokenBatch(
    tokens=i32(*lead, rows),
    positions=i32(*lead, rows),
    slots=i32(*lead, rows),
    num_rows=i32(*lead),
    segment_start=i32(*lead, segments),
    segment_length=i32(*lead, segments),
    page_table=i32(*lead, segments, width),
    num_segments=i32(*lead),
  )


def sampling_rows(*lead):
  return SamplingRows(
    f32(*lead), i32(*lead), f32(*lead), f32(*lead), i32(*lead, BIASES), f32(*lead, BIASES),
    i32(*lead), i32(*lead),
  )  # fmt: skip


def params_like(model, dtype):
  layout = parameters.shapes(model, NUMERICS.reduction_shards)
  return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), layout)


def export(function, platform, *args):
  # A custom call states the page layout on a TPU (`ops.attention`). JAX may rename the call one
  # day, but exports are not stored here.
  checks = [jax.export.DisabledSafetyCheck.custom_call("LayoutConstraint")]
  if not isinstance(function, jax.stages.Wrapped):
    function = jax.jit(function)
  exported = jax.export.export(function, platforms=[platform], disabled_checks=checks)(*args)
  assert exported.platforms == (platform,)
  assert len(exported.mlir_module_serialized) > 10_000
  return exported


def step_inputs(*lead, samples=128):
  return runner.StepInputs(
    batch=token_batch(*lead, rows=512, segments=256, width=64),
    sample_rows=i32(*lead, samples),
    sampling=sampling_rows(*lead, samples),
    seeds=jax.ShapeDtypeStruct((*lead, samples), jnp.uint32),
    positions=i32(*lead, samples),
    num_samples=i32(*lead),
    copies=i32(*lead, samples, 2),
    num_copies=i32(*lead),
    key_copies=KeyCopies(i32(*lead, 4 * samples), i32(*lead, 4 * samples), i32(*lead)),
  )


@pytest.mark.thorough
@pytest.mark.parametrize("model", models("qwen3-8b", 4))
def test_the_engine_step_exports(model):
  samples = 128
  inputs = step_inputs(samples=samples)
  pages = jax.eval_shape(
    lambda: kv_layout.empty_pages(decide(model, NUMERICS), num_pages=1024, page_size=PAGE_SIZE)
  )
  key = jax.eval_shape(lambda: jax.random.key(0))
  function = functools.partial(runner.instance_step, decoder=decide(model, NUMERICS))
  for platform in PLATFORMS:
    exported = export(function, platform, params_like(model, NUMERICS.dtype), pages, inputs, key)
    assert exported.out_avals[-1].shape == (samples,)


def train_step(model, mesh):
  """Returns a trainer on a mesh, and shapes of one micro-batch of an instance and of its state."""
  layout = packing.layout(
    decoder=decide(model, NUMERICS),
    page_size=PAGE_SIZE,
    rows_per_micro_batch=1024,
    max_sequence_tokens=513,
  )
  trainer = step.Trainer(
    decide(model, NUMERICS),
    losses.dapo(),
    optimizer_lib.make_optimizer(optimizer_lib.OptimizerConfig(learning_rate=1e-4, warmup_steps=2)),
    mesh,
    layout.num_pages,
    PAGE_SIZE,
  )
  lead, rows = (1,) * (mesh.size > 1), layout.num_rows
  micro = step.MicroBatch(
    batch=TrainBatch(
      tokens=token_batch(
        *lead, rows=rows, segments=layout.num_segments, width=layout.pages_per_sequence
      ),
      targets=i32(*lead, rows),
      loss_mask=jax.ShapeDtypeStruct((*lead, rows), jnp.bool),
      sequence_index=i32(*lead, rows),
      advantages=f32(*lead, rows),
      behaviour_logprobs=None,
      raw_logprobs=None,
      sampling=sampling_rows(*lead, rows),
    ),
    old_logprobs=f32(*lead, rows),
    is_first=jax.ShapeDtypeStruct(lead, jnp.bool),
  )
  master = params_like(model, jnp.float32)
  return trainer, micro, state_lib.abstract_state(master, trainer.optimizer, mesh)


@pytest.mark.thorough
@pytest.mark.parametrize("model", models("qwen3-8b", 4))
def test_the_train_step_exports(model):
  trainer, micro, state = train_step(model, parallel.make_mesh())
  totals = step.BatchTotals(losses.Denominators(f32(), f32()))
  master = params_like(model, jnp.float32)
  assert isinstance(state, TrainState)
  for platform in PLATFORMS:
    export(trainer._gradient, platform, params_like(model, NUMERICS.dtype), micro, totals, master)
    export(trainer._update, platform, state, master)


@pytest.mark.thorough
@pytest.mark.parametrize("model", models("qwen3-32b", 2))
def test_the_train_step_exports_for_eight_devices_of_the_model_axis(model):
  trainer, micro, state = train_step(model, parallel.make_mesh(tensor_parallel_size=8))
  totals = step.BatchTotals(losses.Denominators(f32(), f32()))
  params = params_like(model, trainer.decoder.numerics.dtype)
  sums = jax.eval_shape(lambda: trainer._zeros(params))
  for platform in PLATFORMS:
    exported = export(trainer._gradient, platform, params, micro, totals, sums)
    assert exported.nr_devices == 8
    assert [leaf.shape for leaf in exported.out_avals[: len(jax.tree.leaves(sums))]] == [
      leaf.shape for leaf in jax.tree.leaves(sums)
    ]
    exported = export(trainer._update, platform, state, state.params)
    assert exported.nr_devices == 8


@pytest.mark.thorough
@pytest.mark.parametrize("model", models("qwen3-32b", 2))
def test_the_engine_step_exports_for_eight_devices_of_the_model_axis(model):
  run = runner.Runner(decide(model, NUMERICS), parallel.make_mesh(tensor_parallel_size=8), 1)
  inputs = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), step_inputs(1))
  words, layout = runner.pack(inputs)
  pages = jax.eval_shape(lambda: run.empty_pages(1024, PAGE_SIZE))
  key = jax.eval_shape(lambda: jax.random.key(0))
  params = params_like(model, run.decoder.numerics.dtype)
  for platform in PLATFORMS:
    exported = export(run._step_program, platform, params, pages, words, key, layout, False)
    assert exported.nr_devices == 8
    assert exported.out_avals[-1].shape == (1, 128)


# A preset of each kind of layer, cut to one or two layers, and every preset as a whole.
KINDS = {
  "grouped": presets.get("qwen3-8b").changed(num_layers=1),
  "window and sinks": presets.get("qwen3-8b").changed(num_layers=1, window=128, has_sinks=True),
  "experts": presets.get("qwen3-30b-a3b").changed(num_layers=1),
  "pre and post norms": presets.get("gemma-3-270m").changed(num_layers=1),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
  "model",
  [
    *(pytest.param(model, id=name) for name, model in KINDS.items()),
    *(pytest.param(presets.get(name), id=name, marks=pytest.mark.long) for name in presets.CONFIGS),
  ],
)
def test_each_kind_of_layer_exports_its_forward_and_its_gradient(model):
  decoder = decide(model, dataclasses.replace(NUMERICS, reduction_shards=0))
  masters = parameters.shapes(model, decoder.numerics.reduction_shards)
  params = jax.eval_shape(lambda: parameters.compute_params(masters_of(masters), decoder.numerics))
  layout = packing.layout(
    decoder=decoder, page_size=PAGE_SIZE, rows_per_micro_batch=256, max_sequence_tokens=257
  )
  batch = token_batch(
    rows=layout.num_rows, segments=layout.num_segments, width=layout.pages_per_sequence
  )
  make = lambda: kv_layout.empty_pages(decoder, num_pages=layout.num_pages, page_size=PAGE_SIZE)
  scratch = kv_layout.ScratchPages(layout.num_pages, PAGE_SIZE)

  def loss(params, batch):
    hidden, _ = transformer.forward(params, batch, scratch, decoder=decoder, remat="layer")
    return jnp.sum(jnp.square(hidden.astype(jnp.float32)))

  forward = functools.partial(transformer.forward, decoder=decoder)
  for platform in PLATFORMS:
    exported = export(forward, platform, params, batch, jax.eval_shape(make))
    assert exported.out_avals[0].shape == (layout.num_rows, model.hidden_size)
    exported = export(jax.grad(loss), platform, params, batch)
    leaves = [leaf.shape for leaf in jax.tree.leaves(params)]
    assert [leaf.shape for leaf in exported.out_avals] == leaves


def masters_of(layout):
  return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), layout)
