"""Models with experts keep the contract: schedules, loops over layers, meshes, and the trainer.

A model of drawn kinds mixes layers with experts, with and without a shared MLP, and layers without.
Its rows route themselves in every batch, so a schedule that changed a route would change a text.
"""

from __future__ import annotations

import dataclasses
import logging

import decoder_reference
import jax
import made_rollouts
import numpy as np
import optax
import pytest
import refusals
import tiny_model
import trainers

from seerjax import parallel
from seerjax.engine import engine as engine_lib, runner as runner_lib
from seerjax.layer_kinds import Experts
from seerjax.models import gguf_config, growth, lora, parameters
from seerjax.models.config import TransformerConfig
from seerjax.models.decoder import decide
from seerjax.models.loading import Model
from seerjax.ops.routing import RoutingConfig
from seerjax.trainer import losses, packing, step as step_lib
from seerjax.types import Request, SamplingParams

PAGE_SIZE, CONTEXT = 8, 48
NUMERICS = {
  f"{name} {backend}": dataclasses.replace(
    numerics, reduction_shards=2, expert_tile=2, backend=backend
  )
  for name, numerics in (("f32", tiny_model.NUMERICS), ("bf16", tiny_model.BFLOAT16))
  for backend in ("tiled", "native")
}
F32 = NUMERICS["f32 tiled"]
QWEN3 = Experts(
  routing=RoutingConfig(num_experts=6, num_chosen=2, is_renormalised=True), expert_size=9
)
DEEPSEEK = Experts(
  routing=RoutingConfig(
    num_experts=8,
    num_chosen=3,
    scoring="sigmoid",
    is_renormalised=True,
    num_groups=4,
    num_chosen_groups=2,
    scale=1.5,
    has_correction_bias=True,
  ),
  expert_size=7,
  shared_size=10,
)
DENSE = tiny_model.SMALLEST.layers[0].changed(num_heads=4, num_kv_heads=2)


def model_of(*parts) -> TransformerConfig:
  layers = tuple(DENSE if part is None else DENSE.changed(feed_forward=part) for part in parts)
  return dataclasses.replace(tiny_model.SMALLEST, layers=layers, max_model_len=CONTEXT)


MIXED = model_of(QWEN3, None, DEEPSEEK)
# One layer more than is unrolled: weights in a loop, and one pool of pages.
DEEP = model_of(*(parameters.UNROLLED_LAYERS + 1) * [QWEN3])


def request_of(index: int) -> Request:
  return Request(
    request_id=str(index),
    prompt=tuple(range(1, 4 + 5 * index)),
    sampling=SamplingParams(max_tokens=7),
    seed=index,
  )


def answers(config, params, numerics, *, buckets=(8,), together=True, chunk=None, mesh=None):
  """Completions of three requests, together or one at a time, whole or in spilled chunks."""
  mesh = mesh or parallel.make_mesh()
  engine = engine_lib.Engine(
    Model(config, params, numerics),
    config=engine_lib.EngineConfig(
      page_size=PAGE_SIZE, num_pages=40, max_num_seqs=3, max_model_len=CONTEXT,
      batch_size_buckets=buckets,
    ),
    key=jax.random.key(7),
    runner=runner_lib.Runner(decide(config, numerics), mesh, max_programs=4),
  )  # fmt: skip
  done = {}
  for group in [range(3)] if together else [[index] for index in (2, 1, 0)]:
    for index in group:
      engine.add_request(request_of(index), instance=0, chunk_tokens=chunk)
    while engine.num_unfinished:
      engine.step()
      done |= {one.request_id: one for one in engine.poll()}
      for name in engine.chunks.poll_paused():
        engine.chunks.spill([name])
        engine.chunks.resume(name, chunk_tokens=chunk)
  return [done[str(index)] for index in range(3)]


def gap_to_the_trainer(config, completions, params, numerics, remat="none") -> float:
  """The largest difference from the scores of the gradient's program; every part gets one."""
  layout = dict(
    decoder=decide(config, numerics),
    page_size=PAGE_SIZE,
    rows_per_micro_batch=128,
    max_num_seqs=8,
    max_sequence_tokens=CONTEXT,
  )
  groups = [made_rollouts.of_pairs([(request_of(i), one)], i) for i, one in enumerate(completions)]
  batch = packing.pack(groups, np.ones((3, 1), np.float32), **layout)
  trainer = trainers.make(loss=losses.LossConfig(), optimizer=optax.sgd(1.0), remat=remat, **layout)
  gradient, _, scores = trainer.gradient(params, batch, losses.denominators(batch), None)
  for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
    assert np.all(np.isfinite(leaf))
    assert np.any(leaf) or "correction" in jax.tree_util.keystr(path), path
  return step_lib.rollout_gap(scores, batch)["max_abs_raw_logprob_gap"]


def assert_same(found, expected):
  assert all(map(tiny_model.same, found, expected))


@pytest.mark.parametrize("config", [MIXED, DEEP], ids=["mixed", "deep"])
@pytest.mark.parametrize("backend", ["tiled", "native"])
def test_layers_with_experts_compute_the_published_decoder(config, backend):
  numerics = NUMERICS[f"f32 {backend}"]
  params = tiny_model.random_params(config, numerics)
  assert parameters.is_stacked(params) == (config is DEEP)
  tokens = tiny_model.random_tokens(config, 1, 21)
  expected = decoder_reference.logits(parameters.unstacked(params), tokens[0], config)
  found = tiny_model.logits_of(params, tokens, config, numerics)[0]
  np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NUMERICS)
def test_no_schedule_changes_a_bit_of_a_model_with_experts(name):
  numerics = NUMERICS[name]
  params = tiny_model.random_params(MIXED, numerics)
  expected = answers(MIXED, params, numerics)
  assert_same(answers(MIXED, params, numerics, together=False, buckets=(16,), chunk=3), expected)
  assert gap_to_the_trainer(MIXED, expected, params, numerics) == 0.0
  # The twin: one expert's weights are noticed.
  layer = params["layers"][0]
  changed = {**layer, "expert_down": layer["expert_down"].at[1, 2].mul(2)}
  other = {**params, "layers": [changed, *params["layers"][1:]]}
  assert not all(map(tiny_model.same, answers(MIXED, other, numerics), expected))


@pytest.mark.thorough
@pytest.mark.few(1)
@pytest.mark.parametrize("name", NUMERICS)
def test_a_deep_model_with_experts_keeps_the_contract(name):
  numerics = NUMERICS[name]
  loop = tiny_model.random_params(DEEP, numerics)
  row = parameters.unstacked(loop)
  expected = answers(DEEP, loop, numerics)
  assert_same(answers(DEEP, row, numerics, buckets=(16,), chunk=3), expected)
  assert gap_to_the_trainer(DEEP, expected, loop, numerics) == 0.0
  assert gap_to_the_trainer(DEEP, expected, row, numerics, "layer") == 0.0


@pytest.mark.thorough
@pytest.mark.few(1)
@pytest.mark.parametrize("name", NUMERICS)
def test_a_mesh_changes_no_bit_of_a_model_with_experts(name):
  numerics = NUMERICS[name]
  params = tiny_model.random_params(MIXED, numerics)
  mesh = parallel.make_mesh(tensor_parallel_size=2)
  assert_same(answers(MIXED, params, numerics, mesh=mesh), answers(MIXED, params, numerics))


@pytest.mark.thorough
@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["tiled", "native"])
def test_adapters_of_attention_train_beside_experts(backend):
  numerics = NUMERICS[f"f32 {backend}"]
  params = tiny_model.random_params(MIXED, numerics)
  adapter = lora.init(jax.random.key(1), MIXED, numerics, rank=2, targets=("qkv", "out"))
  adapter = jax.tree.map(lambda leaf: leaf + 0.05, adapter)
  weights = lora.attach(params, adapter, 0.5)
  expected = answers(MIXED, weights, numerics)
  assert_same(answers(MIXED, weights, numerics, together=False, buckets=(16,)), expected)
  assert gap_to_the_trainer(MIXED, expected, weights, numerics) == 0.0


# Decisions and errors.


def test_slabs_and_tiles_of_experts_are_decided():
  decided = decide(MIXED, dataclasses.replace(F32, reduction_shards=0, expert_tile=0))
  assert decided.numerics.reduction_shards == 2 and decided.numerics.expert_tile == 8
  assert "expert_tile" in decided.fingerprint()
  dense = decide(model_of(None), F32.__class__(reduction_shards=2))
  assert "expert_tile" not in dense.fingerprint()


def test_auto_is_native_without_a_reason_against(caplog):
  asked = dataclasses.replace(F32, backend="auto")
  with caplog.at_level(logging.WARNING):
    assert decide(MIXED, asked).numerics.backend == "native"
  assert not caplog.records


def asked(**changes):
  return lambda: decide(MIXED, dataclasses.replace(F32, **changes))


@refusals.table(
  (asked(reduction_shards=4), "NumericsConfig.reduction_shards: got 4, expected a divisor of", "=",
   "use reduction_shards=2 for this model"),
  (lambda: decide(
     model_of(dataclasses.replace(QWEN3, routing=RoutingConfig(num_experts=5, num_chosen=2))),
     F32),
   "reduction_shards: got 2, expected a divisor of num_experts=5", "use reduction_shards=1"),
  (lambda: decide(
     MIXED.changed(norm_placement="pre_and_post"), dataclasses.replace(F32, backend="native")),
   "got 'native', but layer 0 has norm_placement='pre_and_post', which only 'tiled' computes"),
  (lambda: decide(
     MIXED, dataclasses.replace(NUMERICS["bf16 tiled"], backend="pallas_interpreted")),
   "layer 0 has num_experts=6, which the kernels do not compute"),
  (NotImplementedError, lambda: lora.shapes(MIXED, F32, 2),
   "lora targets 'gate_up': got a layer of num_experts=6, expected a gated MLP in every layer"),
  (NotImplementedError, lambda: growth.check(DEEP, DEEP), "growth: layer 0 has num_experts=6"),
  (NotImplementedError, lambda: gguf_config.metadata(DEEP),
   "GGUF: got a model of family 'qwen3_moe'", "save a Hugging Face directory instead"),
)  # fmt: skip
def test_refusals(row):
  refusals.check(row)
