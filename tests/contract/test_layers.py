"""Scanned layers give the bits of unrolled layers: rows, keys, tokens, scores, with gradients.

Up to `UNROLLED_LAYERS` layers are unrolled. Tests scan fewer layers by stacking their weights, and
unroll more by passing weights that are not stacked.
"""

from __future__ import annotations

import dataclasses
import functools

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
from seerjax.models import flax_module, kv_layout, lora, parameters, transformer, weights
from seerjax.models.decoder import decide
from seerjax.models.loading import Model
from seerjax.ops import rotary
from seerjax.trainer import losses, packing, step as step_lib
from seerjax.types import Request, SamplingParams

PAGE_SIZE = 8
# Widths that no tile divides; 8 slabs, 1 and 2.
ODD = tiny_model.ODD
QWEN2 = ODD.changed(
  has_qk_norms=False,
  has_qkv_biases=True,
  vocab_size=46,
  hidden_size=88,
  intermediate_size=21,
  num_layers=3,
  num_heads=3,
  num_kv_heads=1,
  head_dim=10,
  rotary=rotary.RotaryConfig(head_dim=10),
)
LLAMA = QWEN2.changed(
  has_qkv_biases=False,
  num_layers=4,
  intermediate_size=70,
  num_heads=6,
  num_kv_heads=2,
  is_tied=False,
)
GEMMA = dataclasses.replace(
  ODD.changed(window=7, activation="gelu_tanh", norm_placement="pre_and_post"),
  norm_weights="1 + w",
)
CASES = {"qwen3": (ODD, 8), "qwen2": (QWEN2, 1), "llama": (LLAMA, 2), "gemma": (GEMMA, 8)}

# One layer more than is unrolled, with two slabs.
DEEP = tiny_model.SMALLEST.changed(
  num_layers=parameters.UNROLLED_LAYERS + 1, num_heads=4, num_kv_heads=2, max_model_len=48
)
NUMERICS = {
  "f32": tiny_model.NUMERICS,
  "bf16": tiny_model.BFLOAT16,
  "native f32": tiny_model.NATIVE,
  "native bf16": tiny_model.NATIVE_BFLOAT16,
}
DEEP_NUMERICS = dataclasses.replace(tiny_model.NUMERICS, reduction_shards=2)


def pool_of(config, numerics, num_pages):
  """Stacks the pages of all layers in one pool, for any number of layers."""
  pages = kv_layout.empty_pages(decide(config, numerics), num_pages=num_pages, page_size=PAGE_SIZE)
  return (tuple(jnp.stack(leaves, axis=2) for leaves in zip(*pages, strict=True)),)


def by_layer(pages):
  """Splits a pool's pages into single layers."""
  keys, values = map(np.asarray, pages[0])
  return [(keys[:, :, index], values[:, :, index]) for index in range(keys.shape[2])]


def sequences(config, numerics, length):
  tokens = tiny_model.random_tokens(config, 2, length)
  batch, num_pages = flax_module.sequences_batch(2, length, numerics, PAGE_SIZE)
  return jax.tree.map(jnp.asarray, batch)._replace(tokens=tokens.reshape(-1)), tokens, num_pages


def assert_equal(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.thorough
@pytest.mark.few(1)
@pytest.mark.parametrize("length", [3, 21])
@pytest.mark.parametrize("numerics", NUMERICS.values(), ids=NUMERICS)
@pytest.mark.parametrize("case", CASES)
def test_rows_and_keys_are_those_of_layers_in_a_row(case, numerics, length):
  config, shards = CASES[case]
  numerics = dataclasses.replace(numerics, reduction_shards=shards)
  row = tiny_model.random_params(config, numerics)
  loop = parameters.stacked(row)
  assert_equal(parameters.unstacked(loop), row)
  batch, tokens, num_pages = sequences(config, numerics, length)
  forward = jax.jit(functools.partial(transformer.forward, decoder=decide(config, numerics)))
  pages = kv_layout.empty_pages(decide(config, numerics), num_pages=num_pages, page_size=PAGE_SIZE)
  pool = pool_of(config, numerics, num_pages)
  expected, expected_pages = forward(row, batch, pages)
  found, found_pages = forward(loop, batch, pool)
  assert_equal(found, expected)
  assert_equal(by_layer(found_pages), [tuple(map(np.asarray, own)) for own in expected_pages])
  # The twin: layers in another order are noticed.
  turned, _ = forward(parameters.stacked({**row, "layers": row["layers"][::-1]}), batch, pool)
  assert not np.array_equal(turned, expected)

  def loss(params):
    logits = flax_module.logits_of(params, tokens, decoder=decide(config, numerics))
    return jnp.mean(jnp.square(logits)), logits

  (_, found), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(loop)
  assert_equal(found, tiny_model.logits_of(row, tokens, config, numerics))
  assert all(np.any(leaf[-1] != 0) for leaf in jax.tree.leaves(gradient["layers"]))


@pytest.mark.long
@pytest.mark.parametrize("numerics", NUMERICS.values(), ids=NUMERICS)
@pytest.mark.parametrize("tensor_parallel_size", [2, 8])
def test_a_mesh_changes_no_bit_of_layers_in_a_loop(tensor_parallel_size, numerics):
  adapter = jax.tree.map(
    lambda leaf: leaf + 0.05, lora.init(jax.random.key(1), ODD, numerics, rank=3)
  )
  row = lora.attach(tiny_model.random_params(ODD, numerics), adapter, 0.5)
  loop = lora.attach(parameters.stacked(tiny_model.random_params(ODD, numerics)), adapter, 0.5)
  batch, _, num_pages = sequences(ODD, numerics, 5)
  pages = kv_layout.empty_pages(decide(ODD, numerics), num_pages=num_pages, page_size=PAGE_SIZE)
  decoder, mesh = (
    decide(ODD, numerics),
    parallel.make_mesh(tensor_parallel_size=tensor_parallel_size),
  )
  run = functools.partial(transformer.forward, decoder=decoder)
  expected, expected_pages = jax.jit(run)(row, batch, pages)
  sharded = jax.shard_map(
    functools.partial(transformer.forward, decoder=decoder.on(mesh)),
    mesh=mesh,
    in_specs=(parameters.specs_of(loop), jax.P(), jax.P("model")),
    out_specs=(jax.P(), jax.P("model")),
    check_vma=False,
  )
  found, found_pages = jax.jit(sharded)(loop, batch, pool_of(ODD, numerics, num_pages))
  assert_equal(found, expected)
  assert_equal(by_layer(found_pages), [tuple(map(np.asarray, own)) for own in expected_pages])


# Engine and trainer of a deep model.


@functools.cache
def deep_params(numerics, has_adapters=False):
  params = parameters.compute_params(tiny_model.random_master(DEEP, numerics), numerics)
  assert parameters.is_stacked(params)
  if has_adapters:
    adapter = lora.init(jax.random.key(1), DEEP, numerics, rank=2)
    params = lora.attach(params, jax.tree.map(lambda leaf: leaf + 0.05, adapter), 0.5)
  return params


def request_of(index: int) -> Request:
  return Request(
    request_id=str(index),
    prompt=tuple(range(1, 4 + 3 * index)),
    sampling=SamplingParams(max_tokens=9),
    seed=index,
  )


def answers(params, numerics, mesh, *, is_moved: bool) -> list:
  """Returns six completions of one engine; `is_moved` spills and migrates their pages midway."""
  engine = engine_lib.Engine(
    Model(DEEP, params, numerics),
    config=engine_lib.EngineConfig(
      page_size=PAGE_SIZE, num_pages=40, max_num_seqs=3, max_model_len=48, batch_size_buckets=(8,)
    ),
    key=jax.random.key(7),
    runner=runner_lib.Runner(decide(DEEP, numerics), mesh, max_programs=2),
  )
  for index in range(6):
    engine.add_request(request_of(index), instance=0, chunk_tokens=3 if is_moved else None)
  done, turn = {}, 0
  while engine.num_unfinished:
    engine.step()
    done |= {one.request_id: one for one in engine.poll()}
    for name in engine.chunks.poll_paused():
      turn += 1
      if turn % 2:
        engine.chunks.spill([name])
      elif engine.data_parallel_size > 1:
        assert engine.chunks.migrate(name, 1)
      engine.chunks.resume(name, chunk_tokens=3)
  return [done[str(index)] for index in range(6)]


def gap_to_the_trainer(completions, params, numerics) -> float:
  """Returns the largest difference from the scores of the gradient's program."""
  layout = dict(
    decoder=decide(DEEP, numerics),
    page_size=PAGE_SIZE,
    rows_per_micro_batch=128,
    max_num_seqs=8,
    max_sequence_tokens=48,
  )
  groups = [
    made_rollouts.of_pairs([(request_of(index), one)], index)
    for index, one in enumerate(completions)
  ]
  batch = packing.pack(groups, np.ones((6, 1), np.float32), **layout)
  trainer = trainers.make(loss=losses.LossConfig(), optimizer=optax.sgd(1.0), **layout)
  gradient, _, scores = trainer.gradient(params, batch, losses.denominators(batch), None)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
  master = tiny_model.random_master(DEEP, numerics)
  if parameters.is_stacked(params) and not any("lora" in name for name in params["layers"]):
    state, _ = trainer.update(trainer.init(master), gradient)
    assert jax.tree.structure(state.params) == jax.tree.structure(master)
    assert not np.array_equal(state.params["layers"][8]["qkv"], master["layers"][8]["qkv"])
  return step_lib.rollout_gap(scores, batch)["max_abs_raw_logprob_gap"]


@pytest.mark.thorough
def test_a_deep_model_learns_from_the_bits_that_it_sampled_though_its_pages_left():
  params = deep_params(DEEP_NUMERICS)
  sampled = answers(params, DEEP_NUMERICS, parallel.make_mesh(), is_moved=True)
  assert gap_to_the_trainer(sampled, params, DEEP_NUMERICS) == 0.0


@pytest.mark.long
@pytest.mark.parametrize("has_adapters", [False, True])
@pytest.mark.parametrize("numerics", NUMERICS.values(), ids=NUMERICS)
def test_a_deep_model_says_the_same_in_a_loop_and_in_a_row(numerics, has_adapters):
  numerics = dataclasses.replace(numerics, reduction_shards=DEEP_NUMERICS.reduction_shards)
  loop = deep_params(numerics, has_adapters)
  row = parameters.unstacked(loop)
  expected = answers(row, numerics, parallel.make_mesh(), is_moved=False)
  for mesh in (
    parallel.make_mesh(),
    parallel.make_mesh(tensor_parallel_size=2),
    parallel.make_mesh(data_parallel_size=2),
  ):  # fmt: skip
    found = answers(loop, numerics, mesh, is_moved=True)
    assert all(map(tiny_model.same, found, expected))
  assert gap_to_the_trainer(expected, loop, numerics) == 0.0
  assert gap_to_the_trainer(expected, row, numerics) == 0.0


def test_the_program_of_a_deep_model_does_not_grow_with_its_depth():
  sizes = []
  for num_layers in (parameters.UNROLLED_LAYERS + 1, 3 * parameters.UNROLLED_LAYERS):
    config = DEEP.changed(num_layers=num_layers)
    layout = parameters.shapes(config, 2)
    params = jax.eval_shape(
      functools.partial(parameters.compute_params, numerics=DEEP_NUMERICS), layout
    )
    batch, _, num_pages = sequences(config, DEEP_NUMERICS, 5)
    pages = jax.eval_shape(
      lambda config=config, num_pages=num_pages: kv_layout.empty_pages(
        decide(config, DEEP_NUMERICS), num_pages=num_pages, page_size=PAGE_SIZE
      )
    )
    run = functools.partial(transformer.forward, decoder=decide(config, DEEP_NUMERICS))
    sizes.append(len(jax.jit(run).lower(params, batch, pages).as_text()))
  assert sizes[1] < 1.02 * sizes[0]


# Errors.


def test_a_gradient_through_pages_that_layers_share_is_refused():
  params = parameters.stacked(tiny_model.random_params(ODD, tiny_model.NUMERICS))
  batch, _, num_pages = sequences(ODD, tiny_model.NUMERICS, 3)
  pool = pool_of(ODD, tiny_model.NUMERICS, num_pages)

  def loss(params):
    run = functools.partial(transformer.forward, decoder=decide(ODD, tiny_model.NUMERICS))
    return jnp.sum(run(params, batch, pool)[0])

  with pytest.raises(NotImplementedError, match="got a gradient .* expected one through Scratch"):
    jax.eval_shape(jax.grad(loss), params)


def test_a_loop_needs_pages_in_one_pool():
  params = parameters.stacked(tiny_model.random_params(ODD, tiny_model.NUMERICS))
  batch, _, num_pages = sequences(ODD, tiny_model.NUMERICS, 3)
  run = functools.partial(transformer.forward, decoder=decide(ODD, tiny_model.NUMERICS))
  pages = kv_layout.empty_pages(
    decide(ODD, tiny_model.NUMERICS), num_pages=num_pages, page_size=PAGE_SIZE
  )
  with pytest.raises(ValueError, match="got stacked layers and a pair of pages for each of 2"):
    jax.eval_shape(run, params, batch, pages)
  with pytest.raises(ValueError, match="page_size: got 12, expected a divisor of kv_split=16"):
    run(params, batch, kv_layout.ScratchPages(num_pages, 12))


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda leaf: leaf[:-1], r"params.*'layers'.*\[8\].*got nothing, expected float32"),
    (lambda leaf: leaf.astype(jnp.bfloat16), r"'layers'.*\[0\].*got bfloat16.*expected float32"),
  ],
)
def test_weights_in_a_loop_are_refused_by_the_path_of_a_layer(change, message):
  params = deep_params(DEEP_NUMERICS)
  check = functools.partial(weights.check, decoder=decide(DEEP, DEEP_NUMERICS), dtype=jnp.float32)
  check(params, what="params")
  changed = {**params, "layers": jax.tree.map(change, params["layers"])}
  with pytest.raises(ValueError, match=message):
    check(changed, what="params")
