"""The memory plan of training: by hand, and against XLA's numbers for compiled programs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import tiny_model
import trainers

from seerjax import numerics as numerics_lib
from seerjax.models import lora, parameters, presets
from seerjax.models.decoder import decide
from seerjax.trainer import optimizer as optimizer_lib, packing, plan

NUMERICS = numerics_lib.NumericsConfig(
  backend="tiled", query_tile=4, slot_tile=32, kv_split=64, reduction_shards=8
)
QWEN3 = presets.get("qwen3-0.6b")


def layout_of(rows=2048, sequences=4, context=1024):
  return packing.layout(
    decoder=decide(QWEN3, NUMERICS),
    page_size=32,
    rows_per_micro_batch=rows,
    max_num_seqs=sequences,
    max_sequence_tokens=context,
  )


# MiB of temporaries by `memory_analysis`, of Qwen3 forms of head dimension 128 in slabs of eight.
@pytest.mark.parametrize(
  ("changes", "dtype", "remat", "measured"),
  [
    (dict(num_layers=1, vocab_size=4096), "bfloat16", "layer", 312),
    (dict(num_layers=3, vocab_size=4096), "bfloat16", "layer", 336),
    (dict(num_layers=3, vocab_size=4096), "float32", "layer", 334),
    (dict(num_layers=3, vocab_size=4096), "bfloat16", "none", 586),
    (
      dict(num_layers=2, vocab_size=4096, hidden_size=2048, intermediate_size=6144),
      "bfloat16", "layer", 782,
    ),
    (dict(num_layers=1), "bfloat16", "layer", 1913),
    (dict(num_layers=10), "bfloat16", "layer", 2245),
    (dict(num_layers=12), "bfloat16", "layer", 2358),
  ],
)  # fmt: skip
def test_activations_are_about_what_xla_says(changes, dtype, remat, measured):
  model = QWEN3.changed(**changes)
  numerics = dataclasses.replace(NUMERICS, compute_dtype=dtype)
  sizes = (decide(model, numerics), layout_of(), 32, remat)
  found = (plan.activation_bytes(*sizes) + plan.scratch_bytes(*sizes)) / plan.MIB
  assert 0.9 * measured < found < 1.15 * measured


# MiB beyond the weights at the peak of a process, as measured for docs/results/real/gradient.md.
@pytest.mark.parametrize(
  ("dtype", "remat", "measured"),
  [
    ("float32", "layer", 1330),
    ("float32", "none", 2542),
    ("bfloat16", "layer", 1200),
    ("bfloat16", "none", 2044),
  ],
)
def test_a_native_plan_covers_the_measured_peak_of_a_real_model(dtype, remat, measured):
  model = presets.get("llama-3.2-1b").changed(
    vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
    num_kv_heads=3,
  )  # fmt: skip
  numerics = numerics_lib.NumericsConfig(backend="native", compute_dtype=dtype)
  decoder = decide(model, numerics)
  layout = packing.layout(
    decoder=decoder, page_size=32, rows_per_micro_batch=2048, max_num_seqs=8,
    max_sequence_tokens=256,
  )  # fmt: skip
  sizes = (decoder, layout, 32, remat)
  sums = plan.tree_bytes(parameters.shapes(model, 1))
  found = (sums + plan.activation_bytes(*sizes) + plan.scratch_bytes(*sizes)) / plan.MIB
  assert measured < found < 1.15 * measured


def test_sums_alive_by_hand():
  # One run has its own sum. When the last of eight starts, there are its own and those of 4, 2, 1.
  assert [plan.num_sums(count) for count in (1, 2, 4, 8)] == [1, 2, 3, 4]


def test_a_plan_counts_what_learns_and_what_runs():
  model, numerics = tiny_model.CONFIG, tiny_model.BFLOAT16
  sizes = dict(decoder=decide(model, numerics), page_size=8, rows_per_micro_batch=64)
  layout, optimizer = packing.layout(**sizes), optimizer_lib.OptimizerConfig(learning_rate=1e-4)
  trainer = trainers.make(optimizer=optimizer_lib.make_optimizer(optimizer), **sizes)
  shapes = parameters.shapes(model, 8)
  count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
  weights = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), shapes)
  found = trainer.plan(weights, layout, 20)
  assert (found.masters, found.weights, found.sums) == (4 * count, 2 * count, 3 * 4 * count)
  assert 8 * count <= found.moments < 8 * count + 64
  assert found.kept == found.masters + found.moments + found.weights
  assert (
    found.scratch
    == 2
    * 2
    * layout.num_pages
    * 8
    * model.layers[0].attention.num_kv_heads
    * model.layers[0].attention.head_dim
    * 2
  )
  again = dataclasses.replace(trainer, remat="layer").plan(weights, layout, 20)
  assert again.activations < found.activations and again.scratch * 2 == found.scratch
  away = dataclasses.replace(trainer, remat="layer_offloaded").plan(weights, layout, 20)
  kept = layout.num_rows * plan.KEPT_BYTES * model.hidden_size
  assert again.activations - away.activations == (model.num_layers - 1) * kept
  assert away.scratch == again.scratch
  plain = dataclasses.replace(trainer, decoder=decide(model, tiny_model.NUMERICS))
  float32 = plain.plan(shapes, layout, 20)
  assert float32.weights == 0  # They are the masters.
  adapters = lora.shapes(model, numerics, 2)
  both = jax.eval_shape(lambda base, pair: lora.attach(base, pair, 1.0), weights, adapters)
  adapted = trainer.plan(both, layout, 1)
  size = sum(leaf.size for leaf in jax.tree.leaves(adapters))
  assert adapted.masters == adapted.sums == 4 * size and adapted.weights > found.weights
  assert found._replace(masters=3 * plan.MIB).describe().startswith("3 masters, 0 moments, 0 weig")
