"""The outputs of a run, and that interruptions and reshaping change no bit of it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import optax
import pytest
import small_run
from small_run import (
  CONFIG,
  MODEL,
  NUMERICS,
  PER_STEP,
  SHOWN,
  Vowels,
  assert_equal_bits,
  first_state,
  groups_of,
  learn,
  policy,
  programs_of,
  rows_of,
  train,
)

from seerjax import checkpoint, rl
from seerjax.models import lora
from seerjax.rollout import journal as journal_lib
from seerjax.run import policy as policy_lib
from seerjax.trainer import losses
from seerjax.types import Verdict

pytestmark = pytest.mark.usefixtures("programs_on_disk")


@pytest.fixture(scope="module")
def whole(programs_on_disk):
  """An uninterrupted run: (directory, result, task)."""
  return small_run.whole_run()


def test_a_run_writes_its_files_and_keeps_its_promise(whole):
  directory, result, task = whole
  assert {path.name for path in directory.iterdir()} == {
    "best_checkpoint.json", "checkpoints", "config.json", "journal.jsonl", "metrics.jsonl",
    "status.json", "summary.json", "tensorboard", "traces.jsonl",
  }  # fmt: skip
  assert checkpoint.latest_step(directory / "checkpoints") == 4
  rows = rows_of(directory)
  # An evaluation, four steps, an evaluation.
  assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 4]
  for row in rows[1:-1]:
    for name in ("kl", "raw_kl", "max_abs_logprob_gap", "max_abs_raw_logprob_gap"):
      assert row[f"rollout_train/{name}"] == 0.0
    assert row["train/ratio"] == 1.0
  assert any(row["train/update_norm"] > 0 for row in rows[1:-1])
  assert task.num_verdicts == 6 * PER_STEP + SHOWN
  summary = json.loads((directory / "summary.json").read_text())
  assert summary["max_abs_logprob_gap"] == summary["kl_max"] == 0.0
  assert summary["optimizer_steps"] == int(result.state.step) == 4
  assert {
    "accuracy_before", "accuracy_after", "tokens_per_second", "length_mean", "length_p99",
    "seconds", "compile_seconds", "peak_memory_gib", "numerics",
  } <= set(summary)  # fmt: skip
  header, entries = journal_lib.read(directory / "journal.jsonl")
  assert len(list(entries)) == 4 * PER_STEP
  assert header.settings["seed"] == 0
  config = json.loads((directory / "config.json").read_text())
  assert config["rollout"]["max_tokens"] == 6 and config["fingerprint"] == summary["numerics"]


def test_the_first_row_is_what_the_task_said_of_the_held_out_answers(whole):
  directory, _, task = whole
  first = rows_of(directory)[0]
  verdicts = task.verdicts[:PER_STEP]
  np.testing.assert_allclose(
    first["heldout/accuracy"], np.mean([verdict.correct for verdict in verdicts])
  )
  assert 0 < first["heldout/length"] <= 6


def test_the_last_row_is_the_last_evaluation(whole):
  directory, result, _ = whole
  last = rows_of(directory)[-1]
  assert last["step"] == 4 and last["heldout/accuracy"] == result.summary["accuracy_after"]


@pytest.mark.thorough
def test_two_instances_change_no_bit(whole, tmp_path):
  directory, expected, _ = whole
  result = train(tmp_path / "run", data_parallel_size=2)
  assert_equal_bits(result.state, expected.state)
  assert rows_of(tmp_path / "run") == rows_of(directory)


def test_the_order_of_completion_changes_no_bit_of_the_weights():
  state, numbers = learn(groups_of())
  shuffled, shuffled_numbers = learn(groups_of(is_shuffled=True))
  assert_equal_bits(shuffled, state)
  assert shuffled_numbers == numbers
  assert numbers["train/update_norm"] > 0


def test_later_mini_batches_log_their_ratio_under_another_name():
  config = dataclasses.replace(
    CONFIG, trainer=dataclasses.replace(CONFIG.trainer, num_mini_batches=2)
  )
  state, numbers = learn(groups_of(), config)
  assert int(state.step) == 2
  assert numbers["rollout_train/kl"] == numbers["rollout_train/max_abs_logprob_gap"] == 0.0
  assert numbers["train/ratio"] == 1.0 and numbers["train/kl_old"] == 0.0
  assert numbers["train/later_ratio"] != 1.0 and numbers["train/later_kl_old"] > 0.0


def short(rollout):
  completion = rollout.completion
  cut = dataclasses.replace(
    completion,
    tokens=completion.tokens[:2],
    behaviour_logprobs=completion.behaviour_logprobs[:2],
    raw_logprobs=completion.raw_logprobs[:2],
  )
  return dataclasses.replace(rollout, completion=cut)


def test_answers_near_the_limit_lose_reward():
  nothing = Verdict(reward=0.0, correct=False, well_formed=False)
  groups = [
    dataclasses.replace(
      group,
      rollouts=tuple(
        dataclasses.replace(rollout, verdict=nothing)
        for rollout in (group.rollouts[0], short(group.rollouts[1]))
      ),
    )
    for group in groups_of()
  ]
  _, numbers = learn(groups)
  assert numbers["train/update_norm"] == 0.0
  config = dataclasses.replace(
    CONFIG, trainer=dataclasses.replace(CONFIG.trainer, overlong_buffer=4)
  )
  _, numbers = learn(groups, config)
  assert numbers["train/update_norm"] > 0.0


@pytest.mark.thorough
def test_the_reference_is_the_policy_of_the_start_also_after_a_resume(tmp_path):
  loss = losses.grpo(kl_coefficient=0.5)
  expected = train(tmp_path / "whole", loss=loss, num_steps=2)
  rows = rows_of(tmp_path / "whole")[1:-1]
  assert rows[0]["train/kl_reference"] == 0.0 < rows[1]["train/kl_reference"]
  train(tmp_path / "parts", loss=loss, num_steps=1)
  result = train(tmp_path / "parts", loss=loss, num_steps=2, resume=True)
  assert_equal_bits(result.state, expected.state)
  free, _ = learn(groups_of(), dataclasses.replace(CONFIG, loss=loss))
  held, numbers = rl.learn(
    dataclasses.replace(CONFIG, loss=loss),
    programs_of(dataclasses.replace(CONFIG, loss=loss)).trainer,
    first_state(),
    groups_of(),
    rl.judge(CONFIG, groups_of()),
    jax.tree.map(lambda leaf: leaf * np.float32(1.1), policy().params),
  )
  assert numbers["train/kl_reference"] > 0.0
  with pytest.raises(AssertionError):
    assert_equal_bits(held.params, free.params)


@pytest.mark.long  # The command of tests/commands/test_train.py learns adapters, too.
def test_adapters_learn_beside_frozen_weights(tmp_path):
  loss = losses.grpo(kl_coefficient=0.1)
  changes: dict[str, Any] = dict(lora_rank=2, loss=loss, checkpoint_every=1)
  expected = train(tmp_path / "whole", num_steps=3, **changes)
  rows = rows_of(tmp_path / "whole")[1:-1]
  for row in rows:
    assert row["rollout_train/kl"] == row["rollout_train/raw_kl"] == 0.0
    assert (
      row["rollout_train/max_abs_logprob_gap"]
      == row["rollout_train/max_abs_raw_logprob_gap"]
      == 0.0
    )
  # A fresh adapter leaves the reference's probabilities unchanged.
  assert rows[0]["train/kl_reference"] == 0.0 < rows[2]["train/kl_reference"]
  start = first_state(dataclasses.replace(CONFIG, **changes))
  assert jax.tree.structure(expected.state.params) == jax.tree.structure(
    lora.shapes(MODEL, NUMERICS, 2)
  )
  pair, first = (state.params["layers"][0]["qkv"] for state in (expected.state, start))
  assert np.any(np.asarray(pair["b"])) and not np.any(np.asarray(first["b"]))
  assert np.any(np.asarray(pair["a"]) != np.asarray(first["a"]))
  # Resumed, and on two instances: the same bits.
  train(tmp_path / "parts", num_steps=1, **changes)
  result = train(tmp_path / "parts", num_steps=3, resume=True, data_parallel_size=2, **changes)
  assert_equal_bits(result.state, expected.state)
  config = dataclasses.replace(CONFIG, **changes)
  merged = policy_lib.exported_weights(config.weights, policy(), expected.state.params)
  assert jax.tree.structure(merged) == jax.tree.structure(policy().params)
  by_hand = 8.0 * (np.asarray(pair["a"])[None] @ np.asarray(pair["b"]))
  np.testing.assert_allclose(
    merged["layers"][0]["qkv"] - policy().params["layers"][0]["qkv"], by_hand, atol=1e-6
  )


@pytest.mark.thorough
def test_callables_stand_in_for_loss_advantages_and_optimizer(tmp_path):
  seen, shapes = [], []

  def loss(*args, **kwargs):
    value, numbers = losses.policy_loss(*args, **kwargs)
    return 2 * value, numbers

  def advantages(rewards):
    shapes.append(rewards.shape)
    return rewards - rewards.mean(1, keepdims=True)

  result = rl.train(
    dataclasses.replace(CONFIG, num_steps=2), policy(), Vowels(), tmp_path, log=lambda line: None,
    loss=loss, advantages=advantages, optimizer=optax.sgd(0.5),
    on_step=lambda step, state, numbers: seen.append((step, int(state.step), numbers)),
  )  # fmt: skip
  assert [row[:2] for row in seen] == [(1, 1), (2, 2)] and shapes == [(2, 2)] * 2
  assert all(row[2]["rollout_train/kl"] == 0.0 for row in seen)
  assert seen[0][2]["train/update_norm"] == pytest.approx(0.5 * seen[0][2]["train/grad_norm"])
  assert int(result.state.step) == 2
