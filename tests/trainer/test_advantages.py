"""Advantages: by hand, by property, and errors."""

from __future__ import annotations

import itertools

from hypothesis import given, settings, strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from seerjax.trainer import advantages

GROUPED = [advantages.grpo, advantages.dr_grpo, advantages.rloo]
rewards_strategy = st.tuples(st.integers(1, 5), st.integers(2, 9), st.integers(0, 2**31)).map(
  lambda shape: np.random.default_rng(shape[2]).normal(size=shape[:2]).astype(np.float32)
)


def test_hand_computed():
  rewards = np.asarray([[1, 0, 0, 1], [3, 0, 0, 0]], np.float32)
  np.testing.assert_allclose(
    advantages.grpo(rewards), [[1, -1, -1, 1], np.asarray([3, -1, -1, -1]) / 3**0.5], rtol=3e-6
  )
  np.testing.assert_array_equal(
    advantages.dr_grpo(rewards), [[0.5, -0.5, -0.5, 0.5], [2.25, -0.75, -0.75, -0.75]]
  )
  np.testing.assert_allclose(
    advantages.rloo(rewards), [[2 / 3, -2 / 3, -2 / 3, 2 / 3], [3, -1, -1, -1]], rtol=1e-6
  )
  np.testing.assert_array_equal(advantages.mean_baseline(rewards), rewards - np.float32(5 / 8))


def test_eps_lets_tiny_differences_fade():
  rewards = np.asarray([[0.0, 2e-6]], np.float32)  # Deviation 1e-6, as large as eps.
  np.testing.assert_allclose(advantages.grpo(rewards, eps=1e-6), [[-0.5, 0.5]], rtol=1e-6)


@pytest.mark.parametrize("function", [*GROUPED, advantages.mean_baseline])
def test_equal_rewards_give_exactly_zero(function):
  rewards = np.full((3, 7), 0.1, np.float32)
  np.testing.assert_array_equal(function(rewards), np.zeros((3, 7), np.float32))


@settings(max_examples=25, deadline=None)
@given(rewards_strategy, st.randoms(use_true_random=False))
def test_order_of_groups_and_members_changes_no_bit(rewards, random):
  groups = random.sample(range(rewards.shape[0]), rewards.shape[0])
  members = random.sample(range(rewards.shape[1]), rewards.shape[1])
  for function in [*GROUPED, advantages.mean_baseline]:
    want = function(rewards)
    assert want.dtype == np.float32 and want.shape == rewards.shape
    np.testing.assert_array_equal(function(rewards[groups][:, members]), want[groups][:, members])


@pytest.mark.parametrize("function", [*GROUPED, advantages.mean_baseline])
def test_sums_are_rounded_once_whatever_cancels_in_them(function):
  rewards = np.asarray([[2.0**80, 1.0, -(2.0**80), 3.0]], np.float32)
  want = function(rewards)
  for order in itertools.permutations(range(4)):
    np.testing.assert_array_equal(function(rewards[:, order]), want[:, order])


@settings(max_examples=25, deadline=None)
@given(rewards_strategy)
def test_rows_sum_to_zero_and_rloo_is_scaled_dr_grpo(rewards):
  group_size = rewards.shape[1]
  for function in GROUPED:
    np.testing.assert_allclose(function(rewards).sum(axis=1), 0.0, atol=1e-5)
  np.testing.assert_allclose(
    advantages.rloo(rewards),
    advantages.dr_grpo(rewards) * (group_size / (group_size - 1)),
    rtol=1e-5,
    atol=1e-6,
  )
  deviation = np.std(rewards.astype(np.float64), axis=1)
  wanted = (deviation / (deviation + 1e-6)) ** 2  # 1, but for `eps`.
  np.testing.assert_allclose(np.mean(advantages.grpo(rewards) ** 2, axis=1), wanted, rtol=1e-3)


def test_jax_arrays_are_read_too():
  rewards = np.asarray([[1, 0, 0]], np.float32)
  np.testing.assert_array_equal(advantages.grpo(jnp.asarray(rewards)), advantages.grpo(rewards))


def test_overlong_penalty_hand_computed():
  penalty = advantages.overlong_penalty(
    np.asarray([[0, 80, 85], [90, 100, 101]]), max_tokens=100, buffer=20
  )
  np.testing.assert_array_equal(penalty, np.asarray([[0, 0, -0.25], [-0.5, -1, -1]], np.float32))
  assert not np.signbit(penalty[0, 1])


@pytest.mark.parametrize(
  ("algorithm", "function"),
  [
    ("grpo", advantages.grpo),
    ("dapo", advantages.grpo),
    ("gspo", advantages.grpo),
    ("dr_grpo", advantages.dr_grpo),
    ("rloo", advantages.rloo),
  ],
)
def test_algorithm_chooses_its_advantage(algorithm, function):
  rewards = np.asarray([[1, 0, 0, 2]], np.float32)
  np.testing.assert_array_equal(advantages.for_algorithm(algorithm, rewards), function(rewards))


@pytest.mark.parametrize("function", GROUPED)
def test_group_of_one_is_refused(function):
  with pytest.raises(ValueError, match=r"shape \(4, 1\), expected at least 2.*group_size"):
    function(np.zeros((4, 1), np.float32))


def test_mean_baseline_takes_groups_of_one_but_not_one_reward():
  np.testing.assert_array_equal(
    advantages.mean_baseline(np.asarray([[1], [0]], np.float32)), [[0.5], [-0.5]]
  )
  with pytest.raises(ValueError, match=r"mean_baseline: got rewards of shape \(1, 1\)"):
    advantages.mean_baseline(np.zeros((1, 1), np.float32))


@pytest.mark.parametrize("function", [*GROUPED, advantages.mean_baseline])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_reward_that_is_not_finite_is_refused_by_place(function, bad):
  rewards = np.zeros((3, 4), np.float32)
  rewards[1, 2] = bad
  with pytest.raises(
    ValueError, match=f"got reward {bad} for group 1, member 2, expected a finite"
  ):
    function(rewards)


@pytest.mark.parametrize("function", [*GROUPED, advantages.mean_baseline])
def test_reward_beyond_float32_is_refused_by_its_own_value(function):
  with pytest.raises(ValueError, match=r"got reward 1e\+39 .* finite float32; .*scale its rewards"):
    function(np.asarray([[0.0, 1e39]]))
