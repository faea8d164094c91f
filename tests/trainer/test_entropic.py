"""The entropic objective: published values, gradients by enumeration, degenerate groups."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any, NamedTuple

from hypothesis import given, settings, strategies as st
import numpy as np
import pytest

from seerjax.trainer import entropic

LN2 = math.log(2)


class Tilt(NamedTuple):
  beta: float
  kl: float
  reason: str
  effective_samples: float


def only(rewards, valid=None, **options) -> tuple[np.ndarray, Tilt]:
  """Returns the advantages of one group, and its other statistics."""
  result = entropic.entropic(
    np.asarray(rewards, np.float64)[None], valid=None if valid is None else valid[None], **options
  )
  return result.advantages[0], Tilt(
    float(result.beta[0]),
    float(result.kl[0]),
    result.reason[0],
    float(result.effective_samples[0]),
  )


@pytest.mark.parametrize(
  ("num_best", "num_others", "beta", "effective", "highest", "total"),
  [(1, 63, 3.36, 9.4, 27.8, 8.5), (16, 48, 2.55, 23.9, 2.4, 1.8), (1, 3, 2.55, 1.5, 11.8, 9.5)],
)
def test_ones_and_zeros_as_tabulated(num_best, num_others, beta, effective, highest, total):
  rewards = [1.0] * num_best + [0.0] * num_others
  advantages, tilt = only(rewards)
  assert tilt.beta == pytest.approx(beta, abs=0.005)
  assert tilt.kl == pytest.approx(LN2, abs=1e-12) and tilt.reason == ""
  assert tilt.effective_samples == pytest.approx(effective, abs=0.06)
  assert advantages.max() == pytest.approx(highest, abs=0.05)
  assert advantages.sum() == pytest.approx(total, abs=0.05)
  assert np.mean(advantages > 0) == num_best / len(rewards)


@pytest.mark.parametrize(
  ("num", "beta", "effective", "highest", "total", "share"),
  [(64, 1.56, 21.3, 7.7, 2.2, 0.27), (16, 1.63, 5.4, 6.9, 2.9, 0.25)],
)
def test_normal_rewards_as_tabulated(num, beta, effective, highest, total, share):
  # The table is of one draw: it should be an ordinary one among these.
  rewards = np.random.default_rng(0).normal(size=(200, num))
  result = entropic.entropic(rewards)
  assert np.abs(result.kl - LN2).max() < 1e-12 and set(result.reason) == {""}
  per_unit = result.beta / (rewards.max(axis=1) - rewards.min(axis=1))
  advantages = result.advantages
  for values, tabulated in (
    (per_unit, beta),
    (result.effective_samples, effective),
    (advantages.max(axis=1), highest),
    (advantages.sum(axis=1), total),
    ((advantages > 0).mean(axis=1), share),
  ):
    low, high = np.quantile(values, [0.02, 0.98])
    assert low <= tabulated <= high


def test_many_normal_rewards_have_the_beta_of_theory():
  # KL of a tilted normal from itself is β^2 / 2.
  normal = statistics.NormalDist()
  rewards = np.asarray([normal.inv_cdf((i + 0.5) / 4096) for i in range(4096)])
  tilt = entropic.solve_beta(rewards)
  assert tilt.beta / tilt.spread == pytest.approx(math.sqrt(2 * LN2), rel=0.01)


def test_invalid_zeros_swallow_the_divergence_unless_left_out():
  rewards = np.zeros(64)
  rewards[32:] = 2.62 + 0.001 * np.random.default_rng(1).normal(size=32)
  advantages, tilt = only(rewards)
  assert tilt.kl == pytest.approx(LN2, abs=1e-12) and tilt.reason == ""
  assert np.all(np.abs(advantages[32:] - 1.03) < 0.05)  # All valid ones weigh alike.
  valid = rewards > 0
  advantages, tilt = only(rewards, valid=valid, valid_only=True)
  assert tilt.kl == pytest.approx(LN2, abs=1e-12) and tilt.reason == ""
  np.testing.assert_array_equal(advantages[:32], -1)
  np.testing.assert_array_equal(advantages[32:], only(rewards[32:])[0])
  assert advantages.max() > 2 and np.mean(advantages[32:] > 0) < 0.5
  alone = entropic.solve_beta(rewards, valid=valid)
  assert alone == entropic.solve_beta(rewards[32:])
  assert alone.spread == rewards[32:].max() - rewards[32:].min()


def test_best_by_a_hair_is_told_apart():
  advantages, tilt = only([1, 1, 0.9999, 0.9998, 0.9997, 0.5, 0.001, 0])
  np.testing.assert_allclose(
    advantages, [2.7406, 2.7406, 0.4712, -0.3363, -0.6840, -1, -1, -1], atol=5e-5
  )
  assert tilt.reason == "" and tilt.kl == pytest.approx(LN2, abs=1e-12)


@pytest.mark.parametrize("spread", [1e-6, 1e-8])
def test_near_a_record_every_reward_keeps_its_place(spread):
  found = 0.38087 + spread * np.random.default_rng(2).random(64)
  rewards = 1 / (1e-8 + found)
  advantages, tilt = only(rewards)
  assert tilt.kl == pytest.approx(LN2, abs=1e-12) and tilt.reason == ""
  assert len(set(advantages.tolist())) == 64
  np.testing.assert_array_equal(np.argsort(advantages), np.argsort(rewards))
  # Rounded to float32 first, as the published code works, they collapse.
  rounded, _ = only(rewards.astype(np.float32))
  assert len(set(rounded.tolist())) <= 40


@settings(max_examples=30)
@given(
  st.lists(st.floats(-1, 1), min_size=4, max_size=12),
  st.floats(1e-3, 1e3),
  st.floats(-10, 10),
  st.randoms(use_true_random=False),
)
def test_any_group_is_well_defined(rewards, scale, shift, random):
  advantages, tilt = only(rewards)
  assert advantages.dtype == np.float32 and np.isfinite(advantages).all()
  assert advantages.min() >= -1 and 0 <= tilt.kl <= LN2 + 1e-9
  assert abs(tilt.kl - LN2) <= 1e-6 or tilt.reason
  # Order: no bit of a member's advantage depends on it.
  order = random.sample(range(len(rewards)), len(rewards))
  moved, tilt_moved = only([rewards[i] for i in order])
  np.testing.assert_array_equal(moved, advantages[order])
  assert tilt_moved == tilt
  # Higher rewards have no lower advantages.
  assert np.all(np.diff(advantages[np.argsort(rewards, kind="stable")]) >= 0)
  # Scale and shift, powers of two and nothing: no bit either.
  np.testing.assert_array_equal(only([4 * r for r in rewards])[0], advantages)
  if max(rewards) - min(rewards) > 1e-2:  # Else the shift rounds the differences away.
    gaps = np.diff(np.sort(rewards))
    if np.all((gaps == 0) | (gaps > 1e-4)):
      np.testing.assert_allclose(
        only([scale * (r + shift) for r in rewards])[0], advantages, rtol=1e-3, atol=1e-3
      )


def test_order_of_groups_and_members_changes_no_bit():
  random = np.random.default_rng(3)
  rewards = random.normal(size=(5, 16))
  valid = random.random((5, 16)) < 0.7
  groups, members = random.permutation(5), random.permutation(16)
  for beta, valid_only, bound in ((None, False, None), (2.0, True, None), (None, True, 3.0)):
    options = dict[str, Any](beta=beta, valid_only=valid_only, max_advantage=bound)
    want = entropic.entropic(rewards, valid=valid, **options)
    got = entropic.entropic(rewards[groups][:, members], valid=valid[groups][:, members], **options)
    np.testing.assert_array_equal(got.advantages, want.advantages[groups][:, members])
    np.testing.assert_array_equal(got.beta, want.beta[groups])
    np.testing.assert_array_equal(got.kl, want.kl[groups])
    np.testing.assert_array_equal(got.effective_samples, want.effective_samples[groups])


def test_scale_and_shift_do_not_matter():
  rewards = np.random.default_rng(4).normal(size=(3, 32))
  want = entropic.entropic(rewards)
  for scale, shift in ((1e-6, 0.0), (1e6, 0.0), (3.7, -100.0), (1e-5, 2.6)):
    got = entropic.entropic(scale * rewards + shift)
    np.testing.assert_allclose(got.advantages, want.advantages, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got.beta, want.beta, rtol=1e-6)
  negated = entropic.entropic(-rewards)
  assert np.abs(negated.advantages - want.advantages).max() > 1


@pytest.mark.parametrize("divergence", [0.01, 0.3, 1.0, 2.0])
def test_other_divergences_are_hit_too(divergence):
  rewards = np.random.default_rng(5).normal(size=16)
  tilt = entropic.solve_beta(rewards, divergence=divergence)
  assert tilt.kl == pytest.approx(divergence, abs=1e-12) and tilt.reason == ""
  # Against the definition, in plain numpy and in reward units.
  q = np.exp(tilt.beta / tilt.spread * rewards)
  q /= q.sum()
  assert np.sum(q * np.log(16 * q)) == pytest.approx(divergence, abs=1e-9)


def test_a_small_beta_goes_the_way_of_the_mean_of_the_others():
  rewards = np.random.default_rng(6).normal(size=8)
  x = rewards / (rewards.max() - rewards.min())
  want = x - (x.sum() - x) / 7
  for beta in (1e-3, 1e-4):
    advantages, tilt = only(rewards, beta=beta)
    np.testing.assert_allclose(advantages / beta, want, atol=2 * beta)
    assert tilt.beta == beta and 0 < tilt.kl < beta**2
  np.testing.assert_array_equal(only(rewards, beta=0.0)[0], 0)


def test_a_constant_beta_is_on_rewards_over_their_range():
  advantages, tilt = only([3.0, 1.0, 1.0, 2.0], beta=2.0)
  e = np.exp([0.0, -2.0, -2.0, -1.0])
  np.testing.assert_allclose(advantages, 3 * e / (e.sum() - e) - 1, rtol=1e-6)
  q = e / e.sum()
  assert tilt.kl == pytest.approx(np.sum(q * np.log(4 * q))) and tilt.reason == ""
  assert tilt.effective_samples == pytest.approx(1 / np.sum(q * q))


# ---- Gradients. Policies are tables: π = softmax(θ), so that grad log π(a) = one_hot(a) - π. ----


def softmax(logits: np.ndarray) -> np.ndarray:
  e = np.exp(logits - logits.max())
  return e / e.sum()


def objective(logits: np.ndarray, rewards: np.ndarray, beta: float) -> float:
  return float(np.log(softmax(logits) @ np.exp(beta * rewards)))


def numeric_gradient(logits: np.ndarray, rewards: np.ndarray, beta: float) -> np.ndarray:
  """Returns the gradient of J_β by central differences."""
  steps = 1e-5 * np.eye(len(logits))
  rise = [
    objective(logits + s, rewards, beta) - objective(logits - s, rewards, beta) for s in steps
  ]
  return np.asarray(rise) / 2e-5


LOGITS = np.log([0.5, 0.3, 0.15, 0.05])
REWARDS = np.asarray([0.0, 0.25, 0.5, 1.0])


@pytest.mark.parametrize("beta", [0.5, 2.0, 5.0])
def test_weights_of_the_whole_population_give_the_gradient_exactly(beta):
  policy = softmax(LOGITS)
  weights = np.exp(beta * REWARDS) / (policy @ np.exp(beta * REWARDS))
  exact = sum(p * (w - 1) * (row - policy) for p, w, row in zip(policy, weights, np.eye(4)))
  np.testing.assert_allclose(exact, numeric_gradient(LOGITS, REWARDS, beta), atol=1e-9)


@pytest.mark.parametrize("beta", [0.5, 2.0, 5.0])
def test_a_group_like_its_policy_gives_the_gradient_up_to_one_over_n(beta):
  policy = softmax(LOGITS)
  want = numeric_gradient(LOGITS, REWARDS, beta)
  errors = []
  for num in (20, 200, 2000):  # 10, 6, 3 and 1 of 20, as the policy weights them.
    actions = np.repeat(np.arange(4), np.round(policy * num).astype(int))
    advantages, _ = only(REWARDS[actions], beta=beta)
    got = np.mean([a * (np.eye(4)[i] - policy) for a, i in zip(advantages, actions)], axis=0)
    errors.append(np.abs(got - want).max())
  assert errors[2] < 5e-3 and 7 < errors[0] / errors[1] < 60 and 7 < errors[1] / errors[2] < 15


def expected_gradient(prob: float, num: int, beta: float) -> float:
  """Returns the mean of a group's gradient on two arms, for the logit of arm 1, over all groups."""
  total = 0.0
  for arms in itertools.product((0, 1), repeat=num):
    chance = prob ** sum(arms) * (1 - prob) ** (num - sum(arms))
    advantages, _ = only([2.0 * arm - 3.0 for arm in arms], beta=beta)
    total += chance * float(np.mean(advantages.astype(np.float64) * (np.asarray(arms) - prob)))
  return total


def excess(prob: float, num: int, beta: float) -> float:
  """Returns E[exp(β r)] E[1 / mean of num - 1 others' exp(β r)] - 1, from binomial counts."""
  others = num - 1
  inverse = sum(
    math.comb(others, k)
    * prob**k
    * (1 - prob) ** (others - k)
    * others
    / (k * math.exp(beta) + others - k)
    for k in range(num)
  )
  return (prob * math.exp(beta) + 1 - prob) * inverse - 1


@pytest.mark.parametrize("prob", [0.1, 0.5])
@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_on_two_arms_the_expected_gradient_is_longer_by_a_known_factor(prob, beta):
  logits = np.log([1 - prob, prob])
  exact = numeric_gradient(logits, np.asarray([0.0, 1.0]), beta)[1]
  for num in (4, 6, 8):
    got = expected_gradient(prob, num, beta)
    assert got / exact == pytest.approx(1 + excess(prob, num, beta), rel=1e-6)
    assert got > exact > 0


@pytest.mark.parametrize("num", [4, 5])
def test_on_many_arms_the_expected_gradient_has_the_exact_direction(num):
  policy, beta = softmax(LOGITS), 2.0
  tilted = np.exp(beta * REWARDS)
  total, inverse = np.zeros(4), 0.0
  for arms in itertools.product(range(4), repeat=num):
    rewards, chance = REWARDS[list(arms)], policy[list(arms)]
    # `beta` is on rewards over their range: this one is the same per unit in every group.
    advantages, _ = only(rewards, beta=beta * np.ptp(rewards))
    scores = np.eye(4)[list(arms)] - policy
    total += chance.prod() * (advantages.astype(np.float64) @ scores) / num
    inverse += chance.prod() / tilted[list(arms[1:])].mean()
  exact = numeric_gradient(LOGITS, REWARDS, beta)
  np.testing.assert_allclose(total, policy @ tilted * inverse * exact, rtol=1e-6, atol=1e-8)


def test_the_factor_fades_as_one_over_n():
  # One in ten is better, β = 2: a step is a third too long in groups of 4, 2 % in groups of 64.
  factors = [excess(0.1, num, 2.0) for num in (4, 8, 16, 64, 256)]
  np.testing.assert_allclose(factors, [0.3306, 0.1856, 0.0930, 0.0220, 0.0054], atol=5e-4)
  assert 3.5 < factors[3] / factors[4] < 4.5


# ---- Degenerate groups ----


@pytest.mark.parametrize("value", [0.0, 0.1, -7.0, 1e300])
@pytest.mark.parametrize("options", [dict(), dict(beta=2.0), dict(max_advantage=1.0)])
def test_equal_rewards_give_exactly_zero(value, options):
  result = entropic.entropic(np.full((1, 7), value), **options)
  np.testing.assert_array_equal(result.advantages, 0)
  assert (result.beta[0], result.kl[0], result.effective_samples[0]) == (0, 0, 7)
  assert result.reason == ("all 7 rewards are equal",)


def test_rewards_that_differ_by_rounding_count_as_equal():
  advantages, tilt = only([2.6, 2.6, math.nextafter(2.6, 3), 2.6])
  np.testing.assert_array_equal(advantages, 0)
  assert tilt.beta == 0 and tilt.reason == "all 4 rewards are equal but for rounding (4.44e-16)"
  assert only([2.6, 2.6, 2.6 + 1e-12, 2.6])[0].max() > 1


@pytest.mark.parametrize(("num", "num_best"), [(4, 3), (8, 5), (8, 7), (64, 33)])
def test_ties_at_the_best_bound_the_divergence_and_the_reason_says_so(num, num_best):
  rewards = [1.0] * num_best + list(np.linspace(0, 0.9, num - num_best))
  advantages, tilt = only(rewards)
  bound = math.log(num / num_best)
  assert tilt.kl == pytest.approx(bound, abs=2e-9) and tilt.kl < bound < LN2
  assert tilt.reason == (
    f"KL is {bound:.6g} nats, not 0.693147: {num_best} of {num} rewards tie for the best, so it is"
    f" below ln({num}/{num_best})"
  )
  np.testing.assert_allclose(
    advantages[:num_best], (num - 1) / (num_best - 1) - 1, rtol=1e-6, atol=1e-6
  )
  np.testing.assert_allclose(advantages[num_best:], -1, atol=1e-6)
  assert 1 < tilt.beta < 1e4


@pytest.mark.parametrize("num", [4, 8, 64])
def test_half_at_the_best_reaches_the_divergence_to_a_billionth(num):
  advantages, tilt = only([1.0] * (num // 2) + [0.0] * (num // 2))
  assert LN2 - 2e-9 < tilt.kl < LN2 and tilt.reason == "" and tilt.beta < 40
  np.testing.assert_allclose(advantages[: num // 2], (num - 1) / (num // 2 - 1) - 1, rtol=1e-6)


def test_differences_below_the_resolution_of_beta_are_told():
  _, tilt = only([1.0, 1 - 1e-14, 1 - 2e-14, 1 - 3e-14, 0.0])
  assert tilt.beta == entropic.MAX_BETA
  assert "the best differ by less than their range / 1e+12, and beta is at its limit" in tilt.reason
  _, tilt = only([1.0, 1.0, 1.0, 1 - 1e-13, 0.0, 0.0])  # 3 of 6 tie, but that is not why.
  assert tilt.reason.endswith("and beta is at its limit")


@pytest.mark.parametrize("num_valid", [1, 2, 3])
def test_too_few_valid_ones_are_not_tilted(num_valid):
  rewards = np.zeros(8)
  rewards[:num_valid] = np.arange(1.0, num_valid + 1)
  for options in (dict(), dict(beta=2.0)):
    advantages, tilt = only(rewards, valid=rewards > 0, valid_only=True, **options)
    np.testing.assert_array_equal(advantages, np.where(rewards > 0, 0, -1))
    assert (tilt.beta, tilt.kl, tilt.effective_samples) == (0, 0, num_valid)
    assert tilt.reason == f"{num_valid} valid of 8 are too few for a beta, which needs 4"
  # Without the deviation, one valid attempt is simply the best of all.
  advantages, tilt = only(rewards)
  assert advantages.argmax() == num_valid - 1 and tilt.reason == ""


def test_valid_ones_that_are_equal_only_push_the_invalid_down():
  rewards = np.asarray([0, 2.0, 0, 2.0, 2.0, 2.0])
  advantages, tilt = only(rewards, valid=rewards > 0, valid_only=True)
  np.testing.assert_array_equal(advantages, [-1, 0, -1, 0, 0, 0])
  assert tilt.reason == "all 4 rewards are equal"


def test_a_group_without_any_valid_one_teaches_nothing():
  result = entropic.entropic(np.zeros((1, 5)), valid=np.zeros((1, 5), bool), valid_only=True)
  np.testing.assert_array_equal(result.advantages, 0)
  assert result.reason == ("no member of the group is valid",)
  assert (result.beta[0], result.kl[0], result.effective_samples[0]) == (0, 0, 0)


def test_validity_is_not_read_unless_asked_for():
  rewards = np.random.default_rng(7).normal(size=(2, 8))
  want = entropic.entropic(rewards)
  got = entropic.entropic(rewards, valid=np.zeros((2, 8), bool))
  np.testing.assert_array_equal(got.advantages, want.advantages)


def test_advantages_are_cut_off_above():
  rewards = [1.0] + [0.0] * 63
  assert only(rewards)[0].max() == pytest.approx(27.8, abs=0.05)
  advantages, _ = only(rewards, max_advantage=5.0)
  assert advantages[0] == 5
  np.testing.assert_array_equal(advantages[1:], only(rewards)[0][1:])


def test_hopeless_others_give_a_huge_but_finite_advantage():
  advantages, tilt = only([1.0, 0.0, 0.0, 0.0], beta=1e4)
  np.testing.assert_allclose(advantages, [1e12, -1, -1, -1], rtol=1e-6)
  assert tilt.kl == pytest.approx(math.log(4))
  # As long as the others are not quite hopeless, their values matter to every digit.
  advantages, _ = only([1.0, 0.0, 0.0, 0.0], beta=25.0)
  np.testing.assert_allclose(advantages[0], math.exp(25) - 1, rtol=1e-7)


# ---- The pull to the base ----


def test_the_pull_to_the_base_by_hand():
  advantages = np.asarray([[1, 1, 1], [-1, -1, -1]], np.float32)
  logprobs = np.asarray([[-1, -2, np.nan], [-3, -1, -5]], np.float32)
  base = np.asarray([[-2, -2, -1], [-1, -4, -np.inf]], np.float32)
  mask = np.asarray([[True, True, False], [True, True, False]])
  # d = 1, 0, -2, 3: its mean is 0.5.
  got = entropic.kl_shaped(advantages, logprobs, base, mask, 0.1)
  assert got.dtype == np.float32
  np.testing.assert_allclose(got, [[0.95, 1.05, 0], [-0.75, -1.25, 0]], rtol=1e-6)
  assert entropic.kl_to_base(logprobs, base, mask) == 0.5
  off = entropic.kl_shaped(advantages, logprobs, base, mask, 0.0)
  np.testing.assert_array_equal(off, advantages * mask)


def test_the_pull_to_the_base_is_centred_and_knows_no_order():
  random = np.random.default_rng(8)
  advantages, logprobs, base = random.normal(size=(3, 4, 6)).astype(np.float32)
  mask = random.random((4, 6)) < 0.6
  got = entropic.kl_shaped(advantages, logprobs, base, mask, 0.3)
  assert got[mask].sum() == pytest.approx(advantages[mask].sum(), abs=1e-5)
  np.testing.assert_array_equal(got[~mask], 0)
  rows, places = random.permutation(4), random.permutation(6)
  moved = [a[rows][:, places] for a in (advantages, logprobs, base, mask)]
  np.testing.assert_array_equal(
    entropic.kl_shaped(moved[0], moved[1], moved[2], moved[3], 0.3), got[rows][:, places]
  )


def test_the_pull_of_the_base_on_itself_is_nothing():
  logprobs = np.random.default_rng(9).normal(size=(2, 3)).astype(np.float32)
  mask = np.ones((2, 3), bool)
  got = entropic.kl_shaped(np.ones((2, 3)), logprobs, logprobs, mask, 0.5)
  np.testing.assert_array_equal(got, 1)
  assert entropic.kl_to_base(logprobs, logprobs, mask) == 0


def test_nothing_chosen_gives_nothing():
  zeros = np.zeros((2, 3))
  none = np.zeros((2, 3), bool)
  np.testing.assert_array_equal(entropic.kl_shaped(zeros + 1, zeros, zeros, none, 0.1), zeros)
  assert entropic.kl_to_base(zeros, zeros, none) == 0


# ---- Errors ----


@pytest.mark.parametrize("num", [4, 7, 8])
def test_groups_of_four_and_more_pass_without_a_warning(num, recwarn):
  entropic.entropic(np.random.default_rng(10).normal(size=(2, num)))
  assert not recwarn.list
