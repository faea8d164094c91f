"""Models with experts keep the contract: schedules, loops over layers, meshes, and the trainer.

A model of drawn kinds mixes layers with experts, with and without a shared MLP, and layers without.
Its rows route themselves in every batch, so a schedule that changed a route would change a text.
"""

from __future__ import annotations

import dataclasses
import logging

import decoder_reference
import jax
import jax.numpy as jnp
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
from seerjax.models import flax_module, gguf_config, growth, lora, parameters
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


def engine_of(config, params, numerics, runner, buckets=(8,), **others) -> engine_lib.Engine:
  return engine_lib.Engine(
    Model(config, params, numerics),
    config=engine_lib.EngineConfig(
      page_size=PAGE_SIZE, num_pages=40, max_num_seqs=3, max_model_len=CONTEXT,
      batch_size_buckets=buckets,
    ),
    key=jax.random.key(7),
    runner=runner,
    **others,
  )  # fmt: skip


def answers(config, params, numerics, *, buckets=(8,), together=True, chunk=None, mesh=None):
  """Completions of three requests, together or one at a time, whole or in spilled chunks."""
  mesh = mesh or parallel.make_mesh()
  runner = runner_lib.Runner(decide(config, numerics), mesh, max_programs=4)
  engine = engine_of(config, params, numerics, runner, buckets)
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


def adapter_of(config, numerics, targets=None, seed=1, rank=2):
  adapter = lora.init(jax.random.key(seed), config, numerics, rank=rank, targets=targets)
  rng = np.random.default_rng(seed)
  noise = lambda leaf: leaf + (0.2 * rng.standard_normal(leaf.shape)).astype(np.float32)
  return jax.tree.map(noise, adapter)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NUMERICS)
def test_adapters_of_experts_keep_the_contract(name):
  numerics = NUMERICS[name]
  base = tiny_model.random_params(MIXED, numerics)
  params = lora.attach(base, adapter_of(MIXED, numerics), 0.5)
  expected = answers(MIXED, params, numerics)
  assert_same(answers(MIXED, params, numerics, together=False, buckets=(16,), chunk=3), expected)
  assert gap_to_the_trainer(MIXED, expected, params, numerics) == 0.0
  # The twin: adapters without those of the experts are noticed.
  rest = lora.attach(base, adapter_of(MIXED, numerics, lora.TARGETS), 0.5)
  assert not all(map(tiny_model.same, answers(MIXED, rest, numerics), expected))


@pytest.mark.thorough
@pytest.mark.few(1)
@pytest.mark.parametrize("name", NUMERICS)
def test_a_mesh_changes_no_bit_of_adapters_of_experts(name):
  numerics = NUMERICS[name]
  base = tiny_model.random_params(MIXED, numerics)
  params = lora.attach(base, adapter_of(MIXED, numerics), 0.5)
  mesh = parallel.make_mesh(tensor_parallel_size=2)
  assert_same(answers(MIXED, params, numerics, mesh=mesh), answers(MIXED, params, numerics))


@pytest.mark.thorough
@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["tiled", "native"])
def test_logits_and_gradients_of_adapters_are_those_of_merged_weights(backend):
  numerics, rank = NUMERICS[f"f32 {backend}"], 2
  base, adapter = tiny_model.random_params(MIXED, numerics), adapter_of(MIXED, numerics, rank=rank)
  tokens = tiny_model.random_tokens(MIXED, 1, 13)

  def loss(adapter, put):
    params = put(base, adapter, 0.5)
    logits = flax_module.logits_of(params, tokens, decoder=decide(MIXED, numerics))
    return jnp.mean(jax.nn.logsumexp(logits * logits, axis=-1)), logits

  gradient = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
  (_, found), slopes = gradient(adapter, lora.attach)
  (_, expected), wanted = gradient(adapter, lora.merge)
  np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)
  assert {"expert_gate_up", "expert_down", "gate_up"} <= set(slopes["layers"][2])
  for got, want in zip(jax.tree.leaves(slopes), jax.tree.leaves(wanted), strict=True):
    assert np.any(want)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-3 * np.abs(want).max())


@pytest.mark.thorough
@pytest.mark.few(1)
@pytest.mark.parametrize("name", NUMERICS)
def test_adapters_of_a_deep_model_with_experts_keep_the_contract(name):
  numerics = NUMERICS[name]
  base = tiny_model.random_params(DEEP, numerics)
  params = lora.attach(base, adapter_of(DEEP, numerics), 0.5)
  expected = answers(DEEP, params, numerics)
  row = parameters.unstacked(params)
  assert_same(answers(DEEP, row, numerics, buckets=(16,), chunk=3), expected)
  assert gap_to_the_trainer(DEEP, expected, params, numerics) == 0.0
  assert gap_to_the_trainer(DEEP, expected, row, numerics, "layer") == 0.0


@pytest.mark.thorough
@pytest.mark.few(1)
@pytest.mark.parametrize("config", [MIXED, DEEP], ids=["mixed", "deep"])
@pytest.mark.parametrize("name", NUMERICS)
def test_rows_with_adapters_of_experts_have_the_bits_of_each_alone(name, config):
  numerics = NUMERICS[name]
  params = tiny_model.random_params(config, numerics)
  targets = {"poet": None, "judge": ("expert_gate_up", "qkv"), "clerk": ("expert_down",)}
  named = {
    one: (adapter_of(config, numerics, names, seed=place, rank=1 + place % 2), 0.5 + place)
    for place, (one, names) in enumerate(targets.items())
  }
  asked = [
    dataclasses.replace(request_of(place % 3), request_id=str(place), adapter=one)
    for place, one in enumerate(["", *named] * 2)
  ]
  runner = runner_lib.Runner(decide(config, numerics), parallel.make_mesh(), max_programs=4)
  weights = {one: lora.attach(params, *named[one]) if one else params for one in ("", *named)}
  alone = {one: engine_of(config, own, numerics, runner) for one, own in weights.items()}
  expected = [
    alone[one.adapter].generate([dataclasses.replace(one, adapter="")])[0] for one in asked
  ]
  assert len({float(one.raw_logprobs[0]) for one in expected[:4]}) == 4
  for shards in (1, 2):
    mesh = parallel.make_mesh(tensor_parallel_size=shards)
    runner = runner_lib.Runner(decide(config, numerics), mesh, max_programs=1)
    engine = engine_of(config, params, numerics, runner, adapters=named)
    assert_same(engine.generate(asked), expected)


@pytest.mark.thorough
@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["tiled", "native"])
def test_adapters_of_attention_train_beside_experts(backend):
  numerics = NUMERICS[f"f32 {backend}"]
  params = tiny_model.random_params(MIXED, numerics)
  weights = lora.attach(params, adapter_of(MIXED, numerics, ("qkv", "out")), 0.5)
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
     MIXED, dataclasses.replace(NUMERICS["bf16 tiled"], backend="pallas_interpreted")),
   "layer 0 has num_experts=6, which the kernels do not compute"),
  (lambda: lora.shapes(DEEP, F32, 2, ("qkv", "gate_up")), "lora targets: got ('qkv', 'gate_up')",
   "expected at least one of ('qkv', 'out', 'expert_gate_up', 'expert_down'), each once"),
  (lambda: lora.shapes(MIXED, F32, 8), "lora rank: got 8, expected 1 <= rank <= 7, the smallest"),
  (NotImplementedError, lambda: growth.check(DEEP, DEEP), "growth: layer 0 has num_experts=6"),
  (NotImplementedError, lambda: gguf_config.metadata(DEEP),
   "GGUF: got a model of family 'qwen3_moe'", "save a Hugging Face directory instead"),
)  # fmt: skip
def test_refusals(row):
  refusals.check(row)
