"""Layers of different kinds keep the contract: engine, trainer, schedules, loops over periods.

Models are drawn with other heads, widths, MLPs and rotations in each layer. Deep models with
layers of equal shapes run in a loop over periods of kinds, the others in a row.
"""

from __future__ import annotations

import dataclasses
import functools

import decoder_reference
import jax
import jax.numpy as jnp
import made_rollouts
import numpy as np
import optax
import pytest
import tiny_model
import trainers

from seerjax import parallel
from seerjax.engine import engine as engine_lib, runner as runner_lib
from seerjax.layer_kinds import Gated, Grouped, LayerConfig
from seerjax.models import flax_module, kv_layout, lora, parameters
from seerjax.models.config import TransformerConfig
from seerjax.models.decoder import decide
from seerjax.models.loading import Model
from seerjax.ops import rotary
from seerjax.trainer import losses, packing, step as step_lib
from seerjax.types import Request, SamplingParams

PAGE_SIZE, CONTEXT = 8, 48
BACKENDS = {
  name: dataclasses.replace(numerics, reduction_shards=2)
  for name, numerics in tiny_model.BACKENDS.items()
}


def drawn_kind(rng) -> LayerConfig:
  """A layer in two slabs; head widths that a page of another layer would not hold."""
  heads, c = 2 * int(rng.integers(1, 3)), 2 * int(rng.integers(4, 9))
  return LayerConfig(
    attention=Grouped(
      num_heads=heads * int(rng.integers(1, 4)),
      num_kv_heads=heads,
      head_dim=c,
      has_qk_norms=bool(rng.integers(2)),
      has_qkv_biases=bool(rng.integers(2)),
      rotary=rotary.RotaryConfig(head_dim=c, base=float(rng.choice([100.0, 10_000.0, 1e6]))),
    ),
    feed_forward=Gated(intermediate_size=2 * int(rng.integers(3, 20))),
  )


def model_of(layers) -> TransformerConfig:
  return dataclasses.replace(tiny_model.SMALLEST, layers=tuple(layers), max_model_len=CONTEXT)


def drawn(seed: int, count: int) -> TransformerConfig:
  rng = np.random.default_rng(seed)
  return model_of(drawn_kind(rng) for _ in range(count))


def turned(config: TransformerConfig, bases) -> TransformerConfig:
  """The model with the given rotation bases, layer by layer: equal shapes, different kinds."""
  kind = config.layers[0]
  return model_of(
    kind.changed(rotary=dataclasses.replace(kind.attention.rotary, base=base)) for base in bases
  )


MIXED = drawn(0, 3)
# One layer more than is unrolled: periods of two and of five kinds, and no period.
PERIODS = {
  2: turned(MIXED, [100.0, 1e6] * 5),
  5: turned(MIXED, [100.0, 200.0, 300.0, 400.0, 500.0] * 2),
  9: turned(MIXED, [100.0] * 8 + [1e6]),
}


def request_of(index: int) -> Request:
  return Request(
    request_id=str(index),
    prompt=tuple(range(1, 4 + 5 * index)),
    sampling=SamplingParams(max_tokens=9),
    seed=index,
  )


@functools.cache
def runner_of(config, numerics, mesh):
  return runner_lib.Runner(decide(config, numerics), mesh, max_programs=8)


def answers(config, params, numerics, *, buckets=(8,), together=True, chunk=None, mesh=None):
  """Completions of four requests, together or one at a time, whole or in spilled chunks."""
  engine = engine_lib.Engine(
    Model(config, params, numerics),
    config=engine_lib.EngineConfig(
      page_size=PAGE_SIZE, num_pages=40, max_num_seqs=3, max_model_len=CONTEXT,
      batch_size_buckets=buckets,
    ),
    key=jax.random.key(7),
    runner=runner_of(config, numerics, mesh or parallel.make_mesh()),
  )  # fmt: skip
  done, turn = {}, 0
  for group in [range(4)] if together else [[index] for index in (3, 1, 0, 2)]:
    for index in group:
      engine.add_request(request_of(index), instance=0, chunk_tokens=chunk)
    while engine.num_unfinished:
      engine.step()
      done |= {one.request_id: one for one in engine.poll()}
      for name in engine.chunks.poll_paused():
        turn += 1
        if turn % 2:
          engine.chunks.spill([name])
        elif engine.data_parallel_size > 1:
          assert engine.chunks.migrate(name, 1)
        engine.chunks.resume(name, chunk_tokens=chunk)
  return [done[str(index)] for index in range(4)]


def gap_to_the_trainer(config, completions, params, numerics, remat="none") -> float:
  """The largest difference from the scores of the gradient's program."""
  layout = dict(
    decoder=decide(config, numerics),
    page_size=PAGE_SIZE,
    rows_per_micro_batch=128,
    max_num_seqs=8,
    max_sequence_tokens=CONTEXT,
  )
  groups = [made_rollouts.of_pairs([(request_of(i), one)], i) for i, one in enumerate(completions)]
  batch = packing.pack(groups, np.ones((4, 1), np.float32), **layout)
  trainer = trainers.make(loss=losses.LossConfig(), optimizer=optax.sgd(1.0), remat=remat, **layout)
  gradient, _, scores = trainer.gradient(params, batch, losses.denominators(batch), None)
  leaves = jax.tree.leaves(gradient)
  assert all(np.isfinite(leaf).all() for leaf in leaves)
  return step_lib.rollout_gap(scores, batch)["max_abs_raw_logprob_gap"]


def assert_same(found, expected):
  assert all(map(tiny_model.same, found, expected))


def reference_gap(config, numerics, of=None) -> float:
  params = tiny_model.random_params(config, numerics)
  tokens = tiny_model.random_tokens(config, 1, 21)
  expected = decoder_reference.logits(parameters.unstacked(params), tokens[0], of or config)
  return float(np.abs(tiny_model.logits_of(params, tokens, config, numerics)[0] - expected).max())


@pytest.mark.parametrize("name", [pytest.param("f32", marks=pytest.mark.thorough), "native f32"])
def test_mixed_layers_compute_the_published_decoder(name):
  assert len(set(MIXED.layers)) == 3
  assert reference_gap(MIXED, BACKENDS[name]) < 1e-4
  # The twin: one layer that rotates otherwise is noticed.
  base = MIXED.layers[1].attention.rotary.base
  other = MIXED.layers[1].changed(
    rotary=dataclasses.replace(MIXED.layers[1].attention.rotary, base=base * 10)
  )
  wrong = model_of([MIXED.layers[0], other, MIXED.layers[2]])
  assert reference_gap(MIXED, BACKENDS[name], wrong) > 1e-3


def test_no_schedule_changes_a_bit_of_mixed_layers():
  numerics = BACKENDS["native f32"]
  params = tiny_model.random_params(MIXED, numerics)
  expected = answers(MIXED, params, numerics)
  assert_same(answers(MIXED, params, numerics, together=False), expected)
  assert_same(answers(MIXED, params, numerics, chunk=3), expected)
  assert gap_to_the_trainer(MIXED, expected, params, numerics) == 0.0


@pytest.mark.thorough
@pytest.mark.few(1)
@pytest.mark.parametrize("name", BACKENDS)
def test_no_schedule_changes_a_bit_of_drawn_layers(name, seed):
  numerics, config = BACKENDS[name], drawn(seed, 2)
  params = tiny_model.random_params(config, numerics)
  expected = answers(config, params, numerics)
  assert_same(answers(config, params, numerics, together=False), expected)
  assert_same(answers(config, params, numerics, buckets=(32,), chunk=3), expected)
  assert gap_to_the_trainer(config, expected, params, numerics) == 0.0
  other = tiny_model.random_params(drawn(seed + 1, 2), numerics)
  assert not all(map(tiny_model.same, answers(drawn(seed + 1, 2), other, numerics), expected))


@pytest.mark.long
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("number", range(6))
def test_drawn_models_of_mixed_layers_keep_the_contract(name, number, seed):
  numerics, config = BACKENDS[name], drawn(seed + number, 2 + number % 3)
  params = tiny_model.random_params(config, numerics)
  adapter = lora.init(jax.random.key(1), config, numerics, rank=2)
  adapter = jax.tree.map(lambda leaf: leaf + 0.05, adapter)
  for weights in (params, lora.attach(params, adapter, 0.5)):
    expected = answers(config, weights, numerics)
    assert_same(answers(config, weights, numerics, together=False, buckets=(4, 16)), expected)
    for sizes in (dict(tensor_parallel_size=2), dict(data_parallel_size=2)):
      mesh = parallel.make_mesh(**sizes)
      assert_same(answers(config, weights, numerics, chunk=3, mesh=mesh), expected)
    for remat in ("none", "layer"):
      assert gap_to_the_trainer(config, expected, weights, numerics, remat) == 0.0


@pytest.mark.thorough
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["f32", "native f32"])
@pytest.mark.parametrize("period", PERIODS)
def test_a_loop_over_periods_says_what_layers_in_a_row_say(period, name):
  numerics, config = BACKENDS[name], PERIODS[period]
  loop = tiny_model.random_params(config, numerics)
  assert parameters.is_stacked(loop) and config.period == period
  assert decide(config, numerics).pages.num_pooled == config.num_layers
  row = parameters.unstacked(loop)
  expected = answers(config, row, numerics)
  assert_same(answers(config, loop, numerics, chunk=3), expected)
  assert gap_to_the_trainer(config, expected, loop, numerics) == 0.0
  assert gap_to_the_trainer(config, expected, row, numerics) == 0.0
  assert reference_gap(config, numerics) < 1e-3
  # The twin: equal layers of the first kind; their weights have the same shapes.
  equal = model_of([config.layers[0]] * config.num_layers)
  assert not all(map(tiny_model.same, answers(equal, loop, numerics), expected))


@pytest.mark.thorough
def test_equal_shapes_of_weights_with_other_heads_have_pages_of_their_own():
  # 4 and 2 key/value heads of 8 and 16 features, one query each: all weights have equal shapes.
  numerics = BACKENDS["f32"]
  kinds = [
    tiny_model.SMALLEST.layers[0].changed(
      num_heads=heads, num_kv_heads=heads, head_dim=c, has_qk_norms=False,
      rotary=rotary.RotaryConfig(head_dim=c),
    )
    for heads, c in ((4, 8), (2, 16))
  ]  # fmt: skip
  config = model_of(kinds * 5)
  params = tiny_model.random_params(config, numerics)
  assert parameters.is_stacked(params)
  decoder = decide(config, numerics)
  pages = kv_layout.empty_pages(decoder, num_pages=3, page_size=PAGE_SIZE)
  assert [own[0].shape for own in pages] == [(4, 3, 8, 8), (2, 3, 8, 16)] * 5
  expected = answers(config, params, numerics, together=False)
  assert_same(answers(config, params, numerics, chunk=3), expected)
  assert gap_to_the_trainer(config, expected, params, numerics) == 0.0
  assert reference_gap(config, numerics) < 1e-3


def test_the_program_of_a_deep_model_grows_with_its_period_alone():
  numerics, sizes = BACKENDS["f32"], []
  for repeats in (5, 12):
    config = turned(MIXED, [100.0, 1e6] * repeats)
    layout = parameters.shapes(config, numerics.reduction_shards)
    params = jax.eval_shape(functools.partial(parameters.compute_params, numerics=numerics), layout)
    tokens = jax.ShapeDtypeStruct((1, 5), jnp.int32)
    run = functools.partial(flax_module.logits_of, decoder=decide(config, numerics))
    sizes.append(len(jax.jit(run).lower(params, tokens).as_text()))
  assert sizes[1] < 1.02 * sizes[0]
