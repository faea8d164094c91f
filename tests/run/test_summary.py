"""A run's summary metrics, of one step's rollouts and of the whole run, by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import made_rollouts
import numpy as np

from seerjax.run import summary
from seerjax.types import Verdict


def rollout(length, reward, *, correct=False, well_formed=True, finish_reason="stop"):
  verdict = Verdict(reward=reward, correct=correct, well_formed=well_formed)
  return made_rollouts.rollout([1], [2] * length, verdict=verdict, finish_reason=finish_reason)


def test_the_numbers_of_a_step_by_hand():
  groups = [
    made_rollouts.group(0, rollout(1, 1.0, correct=True), rollout(3, 0.0)),
    made_rollouts.group(
      1, rollout(3, 0.5, well_formed=False), rollout(5, 0.5, finish_reason="length")
    ),
  ]
  numbers = summary.of_rollouts(groups)
  np.testing.assert_allclose(numbers.pop("rollout/length_p99"), 3 + 0.97 * 2)
  assert numbers == {
    "rollout/reward_mean": 0.5,
    "rollout/accuracy": 0.25,
    "rollout/well_formed": 0.75,
    "rollout/ended": 0.75,
    "rollout/informative_groups": 0.5,
    "rollout/length_mean": 3.0,
  }


def test_a_summary_by_hand():
  before = dict(
    accuracy=0.5, standard_error=0.03, well_formed=0.9, accuracy_well_formed=0.55, ended=1.0
  )
  after = dict(
    accuracy=0.7, standard_error=0.04, well_formed=1.0, accuracy_well_formed=0.7, ended=0.9
  )
  row = {
    "rollout_train/kl": 0.0, "rollout_train/raw_kl": 0.0, "rollout_train/max_abs_logprob_gap": 0.0,
    "rollout_train/max_abs_raw_logprob_gap": 0.0, "rollout/tokens_per_second": 100.0,
    "rollout/seconds": 3.0, "rollout/length_mean": 8.0, "rollout/length_p99": 20.0,
  }  # fmt: skip
  other = row | {
    "rollout_train/kl": -0.25, "rollout_train/max_abs_raw_logprob_gap": 0.5,
    "rollout/tokens_per_second": 300.0, "rollout/seconds": 1.0, "rollout/length_p99": 10.0,
  }  # fmt: skip
  numbers = summary.of_run(before, after, [row, other])
  np.testing.assert_allclose(numbers["gain"], 0.2)
  np.testing.assert_allclose(numbers["gain_interval_95"], [0.2 - 1.96 * 0.05, 0.2 + 1.96 * 0.05])
  assert numbers["kl_max"] == 0.25 and numbers["max_abs_logprob_gap"] == 0.5
  # 300 tokens in 3 s and 300 in 1 s.
  assert numbers["tokens_per_second"] == 150.0 and numbers["length_p99"] == 20.0
  # A step read from the journal: nothing was sampled.
  read_back = row | {"rollout/tokens_per_second": 0.0, "rollout/seconds": 1e-6}
  again = summary.of_run(before, after, [read_back, row, other])
  np.testing.assert_allclose(again["tokens_per_second"], 150.0, rtol=1e-6)
  nothing = summary.of_run(before, after, [])
  assert nothing["kl_max"] == nothing["tokens_per_second"] == 0.0


def test_the_clock_counts_seconds_compilation_and_memory():
  clock = summary.RunClock()
  assert clock.read()["compile_seconds"] == 0.0
  jax.jit(lambda x: jnp.sin(x) + 17)(jnp.float32(1))
  read = clock.read()
  assert 0 < read["compile_seconds"] < read["seconds"]
  assert 0.01 < read["peak_memory_gib"] < 1024


def test_the_clock_of_a_resumed_run_counts_all_its_processes():
  clock = summary.RunClock()
  clock.carry_on(dict(seconds=100.0, compile_seconds=30.0, peak_memory_gib=2000.0))
  jax.jit(lambda x: jnp.cos(x) + 17)(jnp.float32(1))
  read = clock.read()
  assert 0 < read["compile_seconds"] - 30.0 < read["seconds"] - 100.0
  assert read["peak_memory_gib"] == 2000.0  # The highest, for they never ran at once.
  # Without a readable counter, others' counts are not reused.
  clock.carry_on(read | dict(joules=70.0))
  again = clock.read()
  assert "joules" not in again or again["joules"] >= 70.0
  assert (clock.joules is None) == ("joules" not in again)
  small = read | dict(peak_memory_gib=0.0)
  clock.carry_on(small)
  assert 0.01 < clock.read()["peak_memory_gib"] < 1024
