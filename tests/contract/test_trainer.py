"""The trainer's own program gives the engine's log-probabilities, bit for bit.

Requests of every kind are sampled in a crowded engine, packed next to others in several orders, and
scored under `value_and_grad`, by a program that never reads the engine's values. The twins at the
end break one thing each, and the same comparison must fail.
"""

from __future__ import annotations

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import made_rollouts
import numpy as np
import pytest
import tiny_model
import trainers

from seerjax import parallel
from seerjax.engine.engine import EngineConfig
from seerjax.models.decoder import decide
from seerjax.ops import sampling as sampling_lib
from seerjax.trainer import losses, packing, step
from seerjax.types import Request, SamplingParams

SIZES = EngineConfig(
  page_size=8, num_pages=40, max_num_seqs=6, max_model_len=64, batch_size_buckets=(6, 24)
)
LAYOUT = {
  "page_size": 8,
  "rows_per_micro_batch": 96,
  "max_num_seqs": 5,
  "max_sequence_tokens": 64,
}
# One dtype per backend, the same in all tests, because compiling a gradient is expensive.
ONE_TILED, ONE_NATIVE = pytest.mark.few(1, of="tiled"), pytest.mark.few(1, of="native")
NUMERICS = [
  pytest.param(tiny_model.NUMERICS, id="f32", marks=ONE_TILED),
  pytest.param(tiny_model.BFLOAT16, id="bf16", marks=[ONE_TILED, pytest.mark.thorough]),
  pytest.param(tiny_model.NATIVE, id="native f32", marks=ONE_NATIVE),
  pytest.param(
    tiny_model.NATIVE_BFLOAT16, id="native bf16", marks=[ONE_NATIVE, pytest.mark.thorough]
  ),
]
BOTH = pytest.mark.parametrize("numerics", NUMERICS)
# Dtypes of the long tests.
OF_BACKENDS = {
  "tiled": (tiny_model.NUMERICS, tiny_model.BFLOAT16),
  "native": (tiny_model.NATIVE, tiny_model.NATIVE_BFLOAT16),
}
# Twins that break splits and tiles; the native backend has neither: test_native breaks its chains.
TILED = pytest.mark.parametrize("numerics", NUMERICS[:2])
SAMPLING = (
  SamplingParams(max_tokens=20),
  SamplingParams(max_tokens=20, temperature=0.0),
  SamplingParams(max_tokens=9, temperature=0.7, top_k=9),
  SamplingParams(max_tokens=20, top_p=0.8, stop_token_ids=(3, 4)),
  SamplingParams(
    max_tokens=12, temperature=1.2, allowed_token_ranges=((3, 9), (40, 41), (0, 64)) * 4
  ),
  SamplingParams(max_tokens=16, temperature=1.5, min_p=0.05, logit_bias=((7, 2.5), (9, -4.0))),
  SamplingParams(
    max_tokens=14, presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.3
  ),
)


def draw(numerics, rng, config=SIZES, events=None) -> list[list[tuple[Request, object]]]:
  """Returns two members of each kind of group, from one crowded engine that sometimes preempts."""
  groups = [
    [
      Request(
        request_id=f"{group}-{member}",
        prompt=tuple(prompt),
        sampling=sampling,
        seed=int(rng.integers(2**32)),
        group_id=str(group),
      )
      for member in range(2)
    ]
    for group, sampling in enumerate(SAMPLING)
    for prompt in [rng.integers(0, 64, int(rng.integers(2, 40))).tolist()]
  ]
  engine = tiny_model.make_engine(config, numerics)
  for request in (request for group in groups for request in group):
    engine.add_request(request)
  completions, live = {}, {request.request_id for group in groups for request in group}
  while engine.num_unfinished:
    engine.step()
    for completion in engine.poll():
      completions[completion.request_id] = completion
      live.discard(completion.request_id)
    if live and rng.random() < 0.1:
      engine.chunks.preempt(sorted(live)[int(rng.integers(len(live)))])
      if events is not None:
        events["preempted"] += 1
  return [[(request, completions[request.request_id]) for request in group] for group in groups]


@functools.cache
def sample(numerics) -> list[list[tuple[Request, object]]]:
  """The same rollouts for every test."""
  return draw(numerics, np.random.default_rng(1))


def pack(sampled, order, numerics):
  """Packs the groups in an order."""
  groups = [made_rollouts.of_pairs(sampled[index], place) for place, index in enumerate(order)]
  advantages = np.tile(np.asarray([-1.0, 1.0], np.float32), (len(groups), 1))
  return packing.pack(
    groups,
    advantages,
    decoder=decide(tiny_model.CONFIG, numerics),
    num_biases=sampling_lib.MAX_LOGIT_BIAS,
    **LAYOUT,
  )


@functools.cache
def trainer(numerics, data_parallel_size: int = 1) -> step.Trainer:
  mesh = parallel.make_mesh(data_parallel_size=data_parallel_size)
  return trainers.make(mesh=mesh, decoder=decide(tiny_model.CONFIG, numerics), **LAYOUT)


@pytest.mark.few(1)
@BOTH
def test_scores_under_grad_are_the_engines_in_every_packing(numerics, seed):
  sampled = sample(numerics)
  rng = np.random.default_rng(seed)
  orders = [np.arange(len(sampled)), *(rng.permutation(len(sampled)) for _ in range(3))]
  packings = set()
  for order in orders:
    batch = pack(sampled, order, numerics)
    packings.add(np.asarray(batch.tokens.tokens).tobytes())
    gradient, _, scores = trainer(numerics).gradient(
      tiny_model.params(numerics), batch, losses.denominators(batch), None
    )
    assert step.rollout_gap(scores, batch) == {
      "kl": 0.0,
      "raw_kl": 0.0,
      "max_abs_logprob_gap": 0.0,
      "max_abs_raw_logprob_gap": 0.0,
    }, f"order {order}"
    mask = np.asarray(batch.loss_mask)
    assert mask.sum() == sum(len(c.tokens) for group in sampled for _, c in group)
    for ours, engines in (
      (scores.logprob, batch.behaviour_logprobs),
      (scores.raw_logprob, batch.raw_logprobs),
    ):
      # 0.0 == -0.0, so the gap alone would not distinguish these two.
      assert tiny_model.bits(ours[mask]) == tiny_model.bits(engines[mask])
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(gradient))
    assert any(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(gradient))
  assert len(packings) > 1


@pytest.mark.long
@pytest.mark.parametrize("backend", OF_BACKENDS)
@pytest.mark.parametrize("block", range(10))
def test_no_batch_of_five_hundred_opens_a_gap(block, backend, seed, tell_events):
  numerics = OF_BACKENDS[backend][block % 2]
  data_parallel_size = 1 + block // 2 % 2
  rng = np.random.default_rng((seed, 2000 + block))
  events = collections.Counter()
  for draws in range(10):
    # The engine's KV bucket equals the trainer's, or is wider.
    context = (64, 112)[draws % 2]
    events[f"engines of context {context}"] += 1
    sampled = draw(numerics, rng, dataclasses.replace(SIZES, max_model_len=context), events)
    for _ in range(5):
      order = rng.permutation(len(sampled))[: int(rng.integers(1, len(sampled) + 1))]
      batch = pack(sampled, order, numerics)
      _, _, scores = trainer(numerics, data_parallel_size).gradient(
        tiny_model.params(numerics), batch, losses.denominators(batch), None
      )
      gaps = step.rollout_gap(scores, batch)
      assert set(gaps.values()) == {0.0}, f"got {gaps} with order {order}"
      events["batches"] += 1
      events["groups left out"] += len(sampled) - len(order)
      events["several micro-batches"] += batch.loss_mask.shape[0] > 1
      events["tokens"] += int(np.asarray(batch.loss_mask).sum())
  name = f"block {block}, {backend} {numerics.compute_dtype}, {data_parallel_size} instance(s)"
  tell_events(name, events, ("batches", "groups left out", "several micro-batches", "preempted"))


@pytest.mark.long
@pytest.mark.parametrize("backend", OF_BACKENDS)
def test_two_instances_and_another_row_tile_in_turn(backend):
  # The engine uses the same changed numerics each time, because both share the tile.
  float32, bfloat16 = OF_BACKENDS[backend]
  for numerics, data_parallel_size in (
    (float32, 2),
    (dataclasses.replace(float32, row_tile=16, query_tile=8, kv_split=32), 1),
    (dataclasses.replace(bfloat16, reduction_shards=1), 2),
  ):
    sampled = sample(numerics)
    batch = pack(sampled, range(len(sampled)), numerics)
    _, _, scores = trainer(numerics, data_parallel_size).gradient(
      tiny_model.params(numerics), batch, losses.denominators(batch), None
    )
    gap = step.rollout_gap(scores, batch)
    assert gap["max_abs_logprob_gap"] == gap["max_abs_raw_logprob_gap"] == 0.0


# Twins.


def whole_batch(numerics):
  """Every group that was sampled, in order."""
  sampled = sample(numerics)
  return pack(sampled, range(len(sampled)), numerics)


def scores_of(numerics, params, batch):
  """Returns the scores of the intact trainer."""
  return trainer(numerics).gradient(params, batch, losses.denominators(batch), None)[2]


@pytest.mark.few(1)
@BOTH
def test_one_flipped_mantissa_bit_of_one_weight_opens_the_gap(numerics):
  # The embedding is also the head, so every logit of one token changes.
  params, batch = tiny_model.params(numerics), whole_batch(numerics)
  assert set(step.rollout_gap(scores_of(numerics, params, batch), batch).values()) == {0.0}
  weights = np.array(params["embed"])
  whole = np.dtype(f"uint{8 * weights.dtype.itemsize}")
  weights.view(whole)[0, 0] ^= whole.type(1)
  flipped = {**params, "embed": jnp.asarray(weights)}
  gap = step.rollout_gap(scores_of(numerics, flipped, batch), batch)
  assert gap["max_abs_logprob_gap"] > 0.0 and gap["max_abs_raw_logprob_gap"] > 0.0


@pytest.mark.thorough
@BOTH
def test_a_temperature_one_bit_off_opens_the_gap(numerics):
  batch = whole_batch(numerics)
  temperature = np.asarray(batch.sampling.temperature)
  warmer = np.where(temperature > 0, np.nextafter(temperature, np.float32(2)), temperature)
  other = batch._replace(sampling=batch.sampling._replace(temperature=warmer))
  gap = step.rollout_gap(scores_of(numerics, tiny_model.params(numerics), other), batch)
  # The raw log-probabilities do not depend on the temperature.
  assert gap["max_abs_logprob_gap"] > 0.0 and gap["max_abs_raw_logprob_gap"] == 0.0


@pytest.mark.thorough
@pytest.mark.few(1)
@TILED
def test_a_split_that_follows_the_length_opens_the_gap(numerics):
  # Sequences of more than 32 rows are split at 8 positions instead of 16.
  params, batch = tiny_model.params(numerics), whole_batch(numerics)
  usual = scores_of(numerics, params, batch)
  finer = trainer(dataclasses.replace(numerics, kv_split=8)).scores(params, batch)
  index = np.asarray(batch.sequence_index)
  is_long = (np.bincount(index[index >= 0])[index] > 32) & (index >= 0)
  assert is_long.any() and not is_long[index >= 0].all()
  mixed = jax.tree.map(lambda long, short: np.where(is_long, long, short), finer, usual)
  assert step.rollout_gap(mixed, batch)["max_abs_logprob_gap"] > 0.0


@pytest.mark.thorough
@TILED
def test_the_untiled_trainer_opens_the_gap(numerics):
  params, batch = tiny_model.params(numerics), whole_batch(numerics)
  untiled = trainer(dataclasses.replace(numerics, backend="untiled"))
  gap = step.rollout_gap(untiled.scores(params, batch), batch)
  assert gap["max_abs_logprob_gap"] > 0.0


@pytest.mark.few(1)
@TILED
def test_other_weights_open_the_gap(numerics):
  batch = whole_batch(numerics)
  other = jax.tree.map(lambda leaf: leaf * leaf.dtype.type(1.01), tiny_model.params(numerics))
  assert step.rollout_gap(scores_of(numerics, other, batch), batch)["max_abs_logprob_gap"] > 0.0
