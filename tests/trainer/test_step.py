"""One optimiser step: scores have the forward's bits; devices and order change no bit."""

from __future__ import annotations

import dataclasses
import functools

from equal_trees import assert_equal_bits
import jax
import jax.numpy as jnp
import made_rollouts
import numpy as np
import pytest
import tiny_model
import trainers

from seerjax import parallel, types
from seerjax.models import flax_module, head, kv_layout, parameters, presets, transformer
from seerjax.models.decoder import decide
from seerjax.numerics import NumericsConfig
from seerjax.ops import sampling
from seerjax.trainer import (
  gathering,
  losses,
  optimizer as optimizer_lib,
  packing,
  state as state_lib,
  step,
)

NUMERICS, MODEL = tiny_model.ONE_SLAB, tiny_model.SMALLEST
SIZES = {
  "decoder": decide(MODEL, NUMERICS),
  "page_size": 4,
  "rows_per_micro_batch": 32,
  "max_num_seqs": 3,
  "max_sequence_tokens": 25,
}


@functools.cache
def trainer_of(data_parallel_size=1, remat: transformer.Remat = "none"):
  optimizer = optimizer_lib.make_optimizer(optimizer_lib.OptimizerConfig(learning_rate=0.02))
  mesh = parallel.make_mesh(data_parallel_size=data_parallel_size)
  return trainers.make(loss=losses.dapo(), optimizer=optimizer, mesh=mesh, remat=remat, **SIZES)


master_of = functools.partial(tiny_model.random_master, MODEL, NUMERICS)


def groups_of(num_groups=3, seed=0):
  """Groups of two rollouts of random tokens."""
  rng = np.random.default_rng(seed)
  groups = []
  for index in range(num_groups):
    prompt = rng.integers(0, MODEL.vocab_size, 3).tolist()
    answers = [
      rng.integers(0, MODEL.vocab_size, int(rng.integers(4, 15))).tolist() for _ in range(2)
    ]
    rollouts = [made_rollouts.rollout(prompt, answer) for answer in answers]
    groups.append(made_rollouts.group(index, *rollouts))
  return groups


def values_of(groups):
  """Plus and minus one, by group index and member."""
  return np.asarray([[1.0, -1.0] if g.group_index % 2 else [-1.0, 1.0] for g in groups], np.float32)


def packed(groups):
  batch = packing.pack(groups, values_of(groups), **SIZES)
  assert batch.targets.shape[0] > 1
  return batch


def gradient_of(batch, *, data_parallel_size=1, old_logprobs=None, params=None, remat="none"):
  params = master_of() if params is None else params
  return trainer_of(data_parallel_size, remat).gradient(
    params, batch, losses.denominators(batch), old_logprobs
  )


@jax.jit
def scores_alone(params, tokens, targets):
  """The engine's functions on one sequence, without a gradient."""
  count = tokens.shape[0]
  rows, num_pages = flax_module.sequences_batch(1, count, NUMERICS, 16)
  rows = jax.tree.map(jnp.asarray, rows)._replace(tokens=tokens)
  pages = kv_layout.empty_pages(decide(MODEL, NUMERICS), num_pages=num_pages, page_size=16)
  hidden, _ = transformer.forward(params, rows, pages, decoder=decide(MODEL, NUMERICS))
  params_rows = sampling.sampling_rows([types.SamplingParams()] * count)
  return head.sample_and_score(
    params,
    hidden,
    targets,
    jax.tree.map(jnp.asarray, params_rows),
    jnp.zeros(count, jnp.uint32),
    rows.positions + 1,
    rows.num_rows,
    jax.random.key(3),
    decoder=decide(MODEL, NUMERICS),
  )[1]


@pytest.mark.thorough
def test_scores_have_the_bits_of_a_forward_without_gradient_of_each_sequence_alone():
  batch = packed(groups_of())
  _, _, scores = gradient_of(batch)
  found = packing.unpack(scores.logprob, batch)
  rollouts = [rollout for group in groups_of() for rollout in group.rollouts]
  for got, rollout in zip(found, rollouts, strict=True):
    tokens = [*rollout.request.prompt, *rollout.completion.tokens]
    # Padding follows, where no earlier row reads.
    whole = jnp.asarray(tokens + [0] * (18 - len(tokens)), jnp.int32)
    alone = np.asarray(scores_alone(master_of(), whole[:-1], whole[1:]).logprob)
    last = len(tokens) - 1
    np.testing.assert_array_equal(got, alone[last - len(rollout.completion.tokens) : last])


@pytest.mark.parametrize("count", range(1, 10))
def test_values_one_by_one_are_added_as_a_list_of_them(count):
  rng = np.random.default_rng(count)
  values = [
    {"w": jnp.asarray(rng.standard_normal(7) * 10.0 ** rng.integers(-3, 4), jnp.float32)}
    for _ in range(count)
  ]
  expected = parallel.tree_sum_list([value["w"] for value in values])
  total = gathering.TreeSum()
  for value in values:
    total.add(value)
  np.testing.assert_array_equal(total.total()["w"], expected)


@pytest.mark.parametrize(
  ("count", "lengths"),
  [
    (1, [1]),
    (2, [1, 1]),
    (3, [2, 1]),
    (16, [8, 8]),
    (17, [5, 4, 4, 4]),
    (33, [5, *[4] * 7]),
    (65, [9, *[8] * 7]),
  ],
)
def test_runs_by_hand(count, lengths):
  found = step.runs(count)
  assert [len(run) for run in found] == lengths
  assert [index for run in found for index in run] == list(range(count))


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 31, 64, 65, 139])
def test_runs_are_of_eight_or_eight_longer_ones_and_instances_share_them_evenly(count):
  found = step.runs(count)
  assert max(map(len, found)) <= step.RUN_LENGTH or len(found) == step.MOST_RUNS
  assert max(map(len, found)) - min(map(len, found)) < 2
  assert (len(found) in (1, 2, 4, 8, 16, 32) and len(found) * 4 < count) or len(found) <= 2


def test_an_update_takes_the_place_of_its_state_and_of_nothing_else():
  trainer, params = trainer_of(), jax.tree.map(jnp.copy, master_of())
  first = trainer.init(params)
  gradient, _, _ = gradient_of(packed(groups_of()), params=params)
  assert not state_lib.is_given_up(first)
  second, _ = trainer.update(first, gradient)
  assert state_lib.is_given_up(first) and not state_lib.is_given_up(second)
  assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, gradient)))


def test_one_program_serves_the_first_update_and_those_after_it():
  trainer, state = trainer_of(), trainer_of().init(master_of())
  gradient, _, _ = gradient_of(packed(groups_of()))
  for _ in range(2):
    state, _ = trainer.update(state, gradient)
  assert trainer._update._cache_size() == 1


def test_few_sums_are_alive_at_once():
  before = {id(one) for one in jax.live_arrays()}
  total, most = gathering.TreeSum(), 0
  for _ in range(16):
    total.add({"w": jnp.ones(3) + 1})
    most = max(most, sum(one.shape == (3,) and id(one) not in before for one in jax.live_arrays()))
  assert most <= 5 and float(total.total()["w"][0]) == 32.0


def test_layers_inputs_go_where_the_device_has_a_place_for_them():
  memories = {"device", "unpinned_host"}
  step.check_remat("layer", memories)
  step.check_remat("layer_offloaded", memories | {"pinned_host"})
  expected = (
    r"Trainer.remat: got 'layer_offloaded' on a cpu device with the memories \['device',"
    r" 'unpinned_host'\], expected 'pinned_host' among them"
  )
  with pytest.raises(NotImplementedError, match=expected):
    step.check_remat("layer_offloaded", memories)


@pytest.mark.thorough
@pytest.mark.parametrize("remat", ["layer", "layer_offloaded"])
def test_layers_that_are_computed_again_score_with_the_same_bits(remat):
  batch = packed(groups_of())
  kept, _, kept_scores = gradient_of(batch)
  again, _, again_scores = gradient_of(batch, remat=remat)
  assert_equal_bits(again_scores, kept_scores)
  # Gradients of unrolled layers do not differ either.
  assert_equal_bits(again, kept)


def computed_once_and_again(model, numerics, **changes):
  """(gradient, scores) with layers kept, rematerialised, and with offloaded inputs."""
  sizes = SIZES | {"decoder": decide(model, numerics), **changes}
  groups = groups_of()
  batch = packing.pack(groups, values_of(groups), **sizes)
  master = tiny_model.random_master(model, numerics)
  found = []
  for remat in transformer.REMATS:
    trainer = trainers.make(loss=losses.dapo(), remat=remat, **sizes)
    params = parameters.compute_params(master, numerics)
    gradient, _, scores = trainer.gradient(params, batch, losses.denominators(batch), None)
    found.append((gradient, scores))
  return found


BFLOAT16 = dataclasses.replace(NUMERICS, compute_dtype="bfloat16")


@pytest.mark.long
@pytest.mark.parametrize("numerics", [NUMERICS, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("config", [MODEL, tiny_model.CONFIG], ids=["smallest", "tiny"])
def test_layers_in_a_row_that_are_computed_again_have_the_same_gradients(config, numerics):
  (kept, kept_scores), *others = computed_once_and_again(config, numerics)
  for again, again_scores in others:
    assert_equal_bits(again_scores, kept_scores)
    assert_equal_bits(again, kept)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_in_a_loop_that_are_computed_again_score_with_the_same_bits(dtype):
  deep = presets.get("nano").changed(num_layers=parameters.UNROLLED_LAYERS + 1)
  numerics = NumericsConfig(
    query_tile=4, slot_tile=32, kv_split=64, reduction_shards=8, compute_dtype=dtype
  )
  (kept, kept_scores), (again, again_scores), (away, away_scores) = computed_once_and_again(
    deep, numerics, page_size=8, rows_per_micro_batch=64
  )
  assert_equal_bits(again_scores, kept_scores)
  assert_equal_bits(away_scores, kept_scores)
  assert_equal_bits(away, again)
  # Gradients are rounded elsewhere (docs/results/memory.md): why the fingerprint names it.
  for one, other in zip(jax.tree.leaves(kept), jax.tree.leaves(again), strict=True):
    one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
    near = 1e-4 if dtype == "float32" else 0.05
    assert np.max(np.abs(one - other)) <= near * np.max(np.abs(one))


@pytest.mark.thorough
def test_the_number_of_instances_changes_no_bit():
  batch = packed(groups_of())
  one, one_numbers, one_scores = gradient_of(batch)
  two, two_numbers, two_scores = gradient_of(batch, data_parallel_size=2)
  assert any(bool(jnp.any(leaf != 0)) for leaf in jax.tree.leaves(one))
  assert_equal_bits(two, one)
  assert_equal_bits(two_scores, one_scores)
  assert_equal_bits(two_numbers, one_numbers)


def test_the_order_of_completion_changes_no_bit_of_the_weights():
  groups = groups_of()
  states = []
  for order in ([0, 1, 2], [2, 0, 1]):
    trainer = trainer_of()
    gradient, _, _ = gradient_of(packed([groups[i] for i in order]))
    state, norms = trainer.update(trainer.init(master_of()), gradient)
    states.append(state)
    assert int(state.step) == 1
    assert all(float(value) > 0 for value in norms.values())
  assert_equal_bits(states[1], states[0])
  changed = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), states[0].params, master_of())
  assert all(jax.tree.leaves(changed))


def test_a_few_steps_make_good_tokens_likelier():
  groups = groups_of(4, seed=2)
  trainer, state = trainer_of(), trainer_of().init(master_of())
  batch = packed(groups)
  values = packing.unpack(batch.advantages, batch)
  liked = []
  for _ in range(4):
    gradient, _, scores = gradient_of(batch, params=state.params)
    rows = packing.unpack(scores.logprob, batch)
    liked.append(sum(float(np.sum(a * b)) for a, b in zip(values, rows, strict=True)))
    state, _ = trainer.update(state, gradient)
  assert liked == sorted(liked) and liked[-1] > liked[0] + 1.0


def test_later_mini_batches_take_their_ratio_to_the_old_logprobs():
  batch = packed(groups_of())
  first, first_numbers, scores = gradient_of(batch)
  again, again_numbers, _ = gradient_of(batch, old_logprobs=scores.logprob)
  assert float(first_numbers["ratio"]) == float(again_numbers["ratio"]) == 1.0
  assert_equal_bits(again, first)
  # Tokens that were half as likely before: a ratio of two, clipped where it may not grow further.
  _, numbers, _ = gradient_of(batch, old_logprobs=scores.logprob - np.float32(np.log(2)))
  np.testing.assert_allclose(float(numbers["ratio"]), 2.0, rtol=1e-5)
  assert float(numbers["clipped_high"]) > 0


def test_the_gap_to_the_engine_is_zero_where_bits_are_equal_and_seen_where_one_is_not():
  batch = packed(groups_of())
  _, _, scores = gradient_of(batch)
  mask = np.asarray(batch.loss_mask)
  same = batch._replace(
    behaviour_logprobs=np.where(mask, scores.logprob, 0),
    raw_logprobs=np.where(mask, scores.raw_logprob, 0),
  )
  assert set(step.rollout_gap(scores, same).values()) == {0.0}
  place = tuple(np.argwhere(mask)[3])
  other = same.behaviour_logprobs.copy()
  other[place] = np.nextafter(other[place], np.float32(0))
  gap = step.rollout_gap(scores, same._replace(behaviour_logprobs=other))
  assert gap["max_abs_logprob_gap"] > 0 and gap["kl"] != 0
  assert gap["max_abs_logprob_gap"] == abs(float(other[place]) - float(scores.logprob[place]))
  assert gap["max_abs_raw_logprob_gap"] == 0 and gap["raw_kl"] == 0
  other[place] = np.nan
  gap = step.rollout_gap(scores, same._replace(behaviour_logprobs=other))
  assert np.isnan(gap["max_abs_logprob_gap"]) and np.isnan(gap["kl"])  # NaN is not hidden.
