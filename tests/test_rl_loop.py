"""The loop of examples/rl_loop.py ends with the weights and moments of `rl.train`, to the bit."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
import small_run

from examples import rl_loop
from seerjax import load_model, metrics, rl
from seerjax.cluster.config import ClusterConfig
from seerjax.models import parameters
from seerjax.models.loading import Model
from seerjax.run import programs as programs_lib
from seerjax.run.config import TrainerConfig
from seerjax.run.evaluation import EvaluationConfig
from seerjax.run.off_policy import OffPolicyConfig
from seerjax.tasks.word_problems import WordProblems
from seerjax.trainer import losses

pytestmark = pytest.mark.usefixtures("programs_on_disk")
NUM_STEPS = 2
SMALL = dataclasses.replace(small_run.CONFIG, num_steps=NUM_STEPS)


def small_model() -> Model:
  policy = small_run.policy()
  params = parameters.compute_params(policy.params, small_run.NUMERICS)
  return Model(policy.model, params, small_run.NUMERICS, policy.tokenizer)


def small_loop(config=SMALL):
  lines: list[str] = []
  programs = small_run.programs_of(config)
  state = rl_loop.grpo(config, small_model(), small_run.Vowels(), programs, lines.append)
  return state, lines


def are_equal(found, expected) -> bool:
  """Whether two states agree in every bit of every weight and moment."""
  return jax.tree.all(jax.tree.map(np.array_equal, found, expected))


@pytest.mark.thorough
def test_the_loop_learns_the_weights_and_moments_of_train(tmp_path):
  # `train` samples in chunks that end within completions, and with drafts.
  assert SMALL.scheduler.chunk_tokens < SMALL.rollout.max_tokens
  expected = small_run.train(tmp_path / "run", config=SMALL)
  state, lines = small_loop()
  assert int(state.step) == expected.summary["optimizer_steps"] == NUM_STEPS
  assert not are_equal(state.params, small_run.policy().params)
  assert are_equal(state, expected.state)
  rows = [
    row for row in metrics.read(tmp_path / "run" / metrics.FILE_NAME) if "rollout_train/kl" in row
  ]
  rewards = [row["rollout/reward_mean"] for row in rows]
  for line, row, reward in zip(lines, rows, rewards, strict=True):
    assert f"reward {reward:.3f}, KL of sampler and trainer {row['rollout_train/kl']}," in line


@pytest.mark.thorough
def test_another_seed_is_seen():
  state, _ = small_loop()
  other, _ = small_loop(dataclasses.replace(SMALL, seed=1))
  assert not are_equal(state.params, other.params)


@pytest.mark.parametrize(
  "change",
  [
    dict(trainer=TrainerConfig(num_mini_batches=2)),
    dict(trainer=TrainerConfig(dynamic_sampling_rounds=2)),
    dict(trainer=TrainerConfig(overlong_buffer=2)), dict(lora_rank=2),
    dict(loss=losses.grpo(kl_coefficient=0.04)), dict(off_policy=OffPolicyConfig(oversample=2.0)),
    dict(off_policy=OffPolicyConfig(max_policy_lag=1), data_parallel_size=2),
    dict(cluster=ClusterConfig(workers=1)),
  ],
  ids=[
    "mini_batches", "rounds", "overlong", "adapters", "kl_penalty", "partial", "ahead", "workers",
  ],
)  # fmt: skip
def test_the_loop_refuses_what_it_lacks(change):
  with pytest.raises(ValueError, match=r"expected none of them; call seerjax\.train\."):
    small_loop(dataclasses.replace(SMALL, **change))


@pytest.mark.thorough
def test_the_loop_on_nano_learns_the_weights_and_moments_of_train(tmp_path):
  config = dataclasses.replace(
    rl_loop.CONFIG, num_steps=NUM_STEPS, evaluation=EvaluationConfig(num_problems=2)
  )
  model, task = load_model("nano", config.numerics), WordProblems()
  programs = programs_lib.make_programs(config.shared, model.config)
  state = rl_loop.grpo(config, model, task, programs, lambda line: None)
  expected = rl.train(
    config, model, task, tmp_path / "run", programs=programs, log=lambda line: None
  )
  assert int(state.step) == NUM_STEPS
  assert are_equal(state, expected.state)
