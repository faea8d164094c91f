"""Off-policy baselines: overlapping steps, and groups carried over to the next step."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
from small_run import PER_STEP, SHOWN, Vowels, assert_equal_bits, rows_of, train
import word_engine

from seerjax.rollout import groups as groups_lib, journal as journal_lib
from seerjax.rollout.divided import DividedRollout
from seerjax.rollout.policies import Divided, LongestGroupFirst
from seerjax.run import off_policy

CONFIG = groups_lib.RolloutConfig(prompts_per_step=2, group_size=2, max_tokens=20)


class Counts(Vowels):
  """Poses numbers and rewards odd lengths."""

  name = "counts"

  def reward(self, text: str) -> float:
    return float(len(text) % 2)


def test_the_next_step_is_sampled_while_this_one_learns_and_weights_wait_for_it():
  started, may_end, published = threading.Event(), threading.Event(), []

  def sample(step: int) -> int:
    if step == 1:
      started.set()
      assert may_end.wait(30)
    return 10 * step

  def publish(weights, version: int) -> None:
    assert may_end.is_set()  # Not while a step is being sampled.
    published.append((weights, version))

  ahead = off_policy.OneStepOff(sample, publish, num_steps=2)
  assert ahead.sample(0) == 0
  assert started.wait(30)  # Sampling runs while this thread continues.
  assert published == []
  may_end.set()
  ahead.publish({"down": np.float32(3)}, 1)
  assert [version for _, version in published] == [1] and published[0][0]["down"] == 3
  assert ahead.sample(1) == 10  # The last step: no sampling starts after it.
  ahead.publish({}, 2)
  ahead.close()


def test_what_sampling_raises_is_raised_where_it_is_waited_for():
  def sample(step: int) -> int:
    if step == 1:
      raise ValueError(f"step {step} fails")
    return step

  ahead = off_policy.OneStepOff(sample, lambda *_: None, num_steps=2)
  assert ahead.sample(0) == 0
  with pytest.raises(ValueError, match="step 1 fails"):
    ahead.publish({}, 1)
  with pytest.raises(ValueError, match="step 1 fails"):
    ahead.sample(1)
  ahead.close()


def sample(
  carried: off_policy.Carried, rollout_of, *, step: int = 0, num_in_progress: int = 2, kept=None
):
  """Samples one step of `Counts`; keeps the ids of whole rollouts in `kept`."""
  kept = [] if kept is None else kept
  return off_policy.sample_partial(
    carried,
    CONFIG,
    num_in_progress=num_in_progress,
    step=step,
    pose=lambda position: Counts().problem("train", position),
    task=Counts(),
    tokenizer=word_engine.TOKENIZER,
    seed=0,
    rollout_of=rollout_of,
    on_rollout=lambda problem, rollout: kept.append(rollout.request.request_id),
  )


@pytest.mark.thorough
def test_groups_that_are_not_whole_are_carried_on_with_their_tokens():
  engine = word_engine.make_engine()
  carried = off_policy.Carried()
  learnt, kept, num_old = [], [], []
  for step in range(4):
    beginnings = dict(carried.beginnings)
    before = {id(group): set(group.rollouts) for group in carried.groups}

    def rollout_of(beginnings, step=step):
      renewed = {
        name: dataclasses.replace(one, policy_version=step) for name, one in beginnings.items()
      }
      return DividedRollout(engine, Divided(chunk_tokens=6), resume_from=renewed)

    engine.update_weights(word_engine.params(step), policy_version=step)
    groups, old = sample(carried, rollout_of, step=step, num_in_progress=4, kept=kept)
    assert engine.num_unfinished == 0 and engine.chunks.free_pages(0) == 8
    assert [group.group_index for group in groups] == [0, 1] and len(carried.groups) == 2
    expected_old = 0
    for group in groups:
      for rollout in group.rollouts:
        name, tokens = rollout.request.request_id, rollout.completion.tokens
        prefix = beginnings[name].tokens if name in beginnings else ()
        assert tokens[: len(prefix)] == prefix
        # Old tokens are a whole completion, or its part before this step; training sees both.
        is_old = rollout.completion.policy_version < step
        was_whole = is_old and name not in beginnings
        expected_old += len(tokens) if was_whole else len(prefix)
        assert is_old == (was_whole or len(prefix) > 0)
    assert old == expected_old
    num_old.append(old)
    learnt += [group.problem.problem_id for group in groups]
    assert len(before) <= 2
  assert num_old[0] == 0 and sum(num_old) > 0
  assert len(set(learnt)) == len(learnt) == 8 and len(set(kept)) == len(kept)
  assert carried.num_posed == 10 and carried.beginnings


@pytest.mark.thorough
def test_rewards_stand_with_their_texts():
  carried = off_policy.Carried()
  rollout_of = lambda old: DividedRollout(word_engine.make_engine(), Divided(), resume_from=old)
  groups, _ = sample(carried, rollout_of)
  for group in groups:
    texts = [rollout.completion.text for rollout in group.rollouts]
    np.testing.assert_array_equal(group.rewards, [len(text) % 2 for text in texts])
  assert not carried.groups and not carried.beginnings


@pytest.mark.thorough
def test_one_step_off_learns_from_the_weights_before(tmp_path):
  task = Vowels()
  result = train(
    tmp_path, task, data_parallel_size=2, off_policy=off_policy.OffPolicyConfig(max_policy_lag=1)
  )
  rows = rows_of(tmp_path)[1:-1]
  assert [row["rollout/old_tokens"] > 0 for row in rows] == [False, True, True, True]
  # Bitwise on-policy in the first step only; then the gap is one step.
  assert rows[0]["rollout_train/max_abs_logprob_gap"] == 0.0
  assert all(row["rollout_train/max_abs_logprob_gap"] > 0 for row in rows[1:])
  assert rows[0]["train/ratio"] == 1.0 != rows[1]["train/ratio"]
  assert task.num_verdicts == 6 * PER_STEP + SHOWN and int(result.state.step) == 4
  again = train(
    tmp_path / "again",
    data_parallel_size=2,
    off_policy=off_policy.OffPolicyConfig(max_policy_lag=1),
  )
  assert_equal_bits(again.state, result.state)


@pytest.mark.thorough
def test_partial_rollouts_learn_from_those_that_were_whole_first(tmp_path):
  task = Vowels()
  # Longer chunks of answers this short would all end in one visit of several steps.
  scheduler = LongestGroupFirst(chunk_tokens=1)
  result = train(
    tmp_path, task, scheduler=scheduler, off_policy=off_policy.OffPolicyConfig(oversample=2.0)
  )
  rows = rows_of(tmp_path)[1:-1]
  assert rows[0]["rollout/old_tokens"] == 0 == rows[0]["rollout_train/max_abs_logprob_gap"]
  assert any(row["rollout/old_tokens"] > 0 for row in rows[1:])
  for row in rows:
    assert (row["rollout_train/max_abs_logprob_gap"] > 0) == (row["rollout/old_tokens"] > 0)
  assert int(result.state.step) == 4
  _, entries = journal_lib.read(tmp_path / "journal.jsonl")
  assert len(list(entries)) == task.num_verdicts - 2 * PER_STEP - SHOWN >= 4 * PER_STEP
