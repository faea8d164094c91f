"""The policy loss: by hand, by closed-form gradients, by its limits, and errors."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seerjax.trainer import losses

# Two sequences: rows 0-2 (row 0 is a prompt row) and rows 3-6 (row 3 is); row 7 is padding.
MASK = np.asarray([0, 1, 1, 0, 1, 1, 1, 0], bool)
INDEX = np.asarray([4, 4, 4, 5, 5, 5, 5, -1], np.int32)
ADVANTAGES = np.asarray([1, 1, 1, -2, -2, -2, -2, 0], np.float32)
OLD = np.asarray([0, -1, -2, 0, -0.5, -1.5, -0.25, 0], np.float32)
NEW = np.asarray([9, -0.5, -2.1, 9, -0.4, -2.5, -0.25, 9], np.float32)
ENTROPY = np.asarray([7, 0.5, 1.0, 7, 0.25, 0.5, 1.5, 7], np.float32)
ROWS = losses.LossRows(MASK, INDEX, ADVANTAGES, OLD)
PRESETS = {
  "grpo": losses.grpo(),
  "dr_grpo": losses.dr_grpo(max_tokens=10),
  "dapo": losses.dapo(),
  "gspo": losses.gspo(),
  "rloo": losses.rloo(),
}


@pytest.fixture(autouse=True)
def strict():
  with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
    yield


def loss_of(config, logprobs=NEW, rows=ROWS, entropy=ENTROPY, totals=None, **kwargs):
  totals = losses.denominators(rows) if totals is None else totals
  return losses.policy_loss(
    jnp.asarray(logprobs), jnp.asarray(entropy), rows, config, totals, **kwargs
  )


def gradient(config, logprobs=NEW, rows=ROWS, **kwargs):
  return np.asarray(
    jax.grad(lambda x: loss_of(config, x, rows, **kwargs)[0])(jnp.asarray(logprobs))
  )


def by_hand(config, weights):
  """The loss of the rows above, one scalar at a time in float64."""
  log_ratio = np.where(MASK, NEW.astype(np.float64) - OLD, 0.0)
  if config.algorithm == "gspo":
    for rows in (slice(0, 3), slice(3, 7)):
      log_ratio[rows] = log_ratio[rows].sum() / MASK[rows].sum()
  total = 0.0
  for j in np.flatnonzero(MASK):
    ratio, advantage = math.exp(log_ratio[j]), float(ADVANTAGES[j])
    clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    total -= weights[j] * min(ratio * advantage, clipped * advantage)
  return total


ROW_WEIGHTS = {
  "grpo": np.asarray([0, 1 / 4, 1 / 4, 0, 1 / 6, 1 / 6, 1 / 6, 0]),
  "gspo": np.asarray([0, 1 / 4, 1 / 4, 0, 1 / 6, 1 / 6, 1 / 6, 0]),
  "dapo": MASK / 5,
  "dr_grpo": MASK / 20,
  "rloo": MASK / 2,
}


@pytest.mark.parametrize("name", PRESETS)
def test_loss_is_hand_computed(name):
  loss, _ = loss_of(PRESETS[name])
  np.testing.assert_allclose(loss, by_hand(PRESETS[name], ROW_WEIGHTS[name]), rtol=1e-6)


def test_dapo_in_plain_numbers():
  # Ratios e^.5 (clipped to 1.28), e^-.1, e^.1, e^-1 (clipped to 0.8 as A < 0), 1; A 1 1 -2 -2 -2.
  want = -(1.28 + math.exp(-0.1) - 2 * math.exp(0.1) - 2 * 0.8 - 2) / 5
  loss, metrics = loss_of(losses.dapo())
  np.testing.assert_allclose(loss, want, rtol=1e-6)
  summary = {name: float(value) for name, value in losses.summarise(metrics).items()}
  assert summary["clipped_high"] == pytest.approx(0.2)
  assert summary["clipped_low"] == pytest.approx(0.2)
  assert summary["num_tokens"] == 5
  assert summary["entropy"] == pytest.approx((0.5 + 1 + 0.25 + 0.5 + 1.5) / 5)
  assert summary["max_ratio"] == pytest.approx(math.exp(0.5))
  ratios = [math.exp(x) for x in (0.5, -0.1, 0.1, -1.0, 0.0)]
  assert summary["ratio"] == pytest.approx(sum(ratios) / 5)


@pytest.mark.parametrize("name", PRESETS)
def test_gradient_on_policy_is_reinforce(name):
  """At ratio 1, where both terms of PPO's minimum tie, the gradient is -weight * advantage."""
  np.testing.assert_allclose(
    gradient(PRESETS[name], OLD), -ROW_WEIGHTS[name] * ADVANTAGES, rtol=1e-6, atol=0
  )


@pytest.mark.parametrize("name", PRESETS)
def test_gradient_agrees_with_finite_differences(name):
  config = dataclasses.replace(PRESETS[name], kl_coefficient=0.3, entropy_bonus=0.01)
  reference = np.where(MASK, NEW + 0.3 * np.cos(np.arange(8)), 0.0).astype(np.float32)
  got = gradient(config, reference_logprobs=jnp.asarray(reference))
  step = 2.0**-8
  for j in range(8):
    move = np.where(np.arange(8) == j, np.float32(step), np.float32(0))
    up, _ = loss_of(config, NEW + move, reference_logprobs=jnp.asarray(reference))
    down, _ = loss_of(config, NEW - move, reference_logprobs=jnp.asarray(reference))
    np.testing.assert_allclose(got[j], (up - down) / (2 * step), rtol=2e-3, atol=1e-4)
  assert (got[~MASK] == 0).all()


def test_clipped_rows_have_no_gradient_and_clipping_is_one_sided():
  got = gradient(losses.dapo())
  assert got[1] == 0 and got[5] == 0  # Left the range on the side its advantage pulls to.
  advantages = -ADVANTAGES  # The same ratios, pulled back: never clipped.
  got = gradient(losses.dapo(), rows=ROWS._replace(advantages=advantages))
  np.testing.assert_allclose(got[MASK], (-advantages * np.exp(NEW - OLD) / 5)[MASK], rtol=1e-6)


def test_gspo_moves_every_token_of_a_sequence_alike():
  wide = dataclasses.replace(losses.gspo(), clip_low=1.0, clip_high=math.inf)
  ratio = math.exp((0.1 - 1.0 + 0.0) / 3)
  got = gradient(wide)
  np.testing.assert_allclose(got[4:7], 2 * ratio / (2 * 3), rtol=1e-6)
  _, metrics = loss_of(wide)
  np.testing.assert_allclose(metrics.sums["ratio"], 2 * math.exp(0.2) + 3 * ratio, rtol=1e-6)


@pytest.mark.parametrize("name", PRESETS)
def test_micro_batches_add_up_to_the_whole(name):
  config = dataclasses.replace(PRESETS[name], entropy_bonus=0.1)
  whole, metrics = loss_of(config)
  totals = losses.denominators(ROWS)
  parts = [
    loss_of(
      config,
      NEW[part],
      losses.LossRows(*(field[part] for field in ROWS)),
      ENTROPY[part],
      totals,
    )
    for part in (slice(0, 3), slice(3, 7), slice(7, 8))
  ]
  np.testing.assert_allclose(whole, parts[0][0] + parts[1][0] + parts[2][0], rtol=1e-6)
  assert float(parts[2][0]) == 0.0  # Padding alone.
  added = losses.add_metrics(losses.add_metrics(parts[0][1], parts[1][1]), parts[2][1])
  for name, value in losses.summarise(metrics).items():
    np.testing.assert_allclose(losses.summarise(added)[name], value, rtol=1e-6)


@pytest.mark.parametrize("name", PRESETS)
def test_other_rows_may_hold_anything(name):
  config = dataclasses.replace(PRESETS[name], kl_coefficient=0.1, entropy_bonus=0.1)

  def run(filler):
    def fill(x):
      return jnp.asarray(np.where(MASK, x, np.float32(filler)))

    rows = losses.LossRows(MASK, INDEX, fill(ADVANTAGES), fill(OLD))
    value_and_grad = jax.value_and_grad(
      lambda x: loss_of(config, x, rows, fill(ENTROPY), reference_logprobs=fill(OLD)), has_aux=True
    )
    return value_and_grad(fill(NEW))

  for clean, dirty in zip(*(jax.tree.leaves(run(filler)) for filler in (0.0, np.nan)), strict=True):
    np.testing.assert_array_equal(clean, dirty)


def test_huge_log_ratio_stays_finite():
  logprobs = np.where(MASK, OLD + 300.0, 0.0).astype(np.float32)
  loss, _ = loss_of(losses.rloo(), logprobs)
  assert np.isfinite(loss) and np.isfinite(gradient(losses.rloo(), logprobs)).all()


def test_denominators_count_sequences_and_tokens_over_leading_axes():
  stacked = losses.LossRows(
    np.stack([MASK, np.zeros_like(MASK), MASK]),
    np.stack([INDEX, np.full_like(INDEX, -1), np.where(INDEX < 0, -1, INDEX + 2)]),
    None,
    None,
  )
  totals = losses.denominators(stacked)
  assert totals == (4.0, 10.0)
  assert totals.num_tokens.dtype == jnp.float32
  assert jax.jit(losses.denominators)(stacked) == totals


def test_bits_under_jit_and_grad_are_repeatable():
  run = jax.jit(jax.value_and_grad(lambda x: loss_of(losses.gspo(), x)[0]))
  for first, second in zip(run(jnp.asarray(NEW)), run(jnp.asarray(NEW)), strict=True):
    np.testing.assert_array_equal(first, second)


def testsequence_sums_and_their_transpose_agree_with_a_matrix():
  rng = np.random.default_rng(0)
  index = np.repeat([3, 7, 9, 2, -1], [1, 5, 16, 8, 3]).astype(np.int32)
  values, cotangent = rng.normal(size=(2, index.size)).astype(np.float32)
  matrix = (index[:, None] == index[None, :]).astype(np.float32)
  out, pull = jax.vjp(lambda x: losses.sequence_sums(x, jnp.asarray(index)), jnp.asarray(values))
  np.testing.assert_allclose(out, matrix @ values, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(
    pull(jnp.asarray(cotangent))[0], matrix @ cotangent, rtol=1e-5, atol=1e-5
  )


def test_entropy_bonus_is_weighed_like_the_objective():
  plain, _ = loss_of(losses.dapo())
  with_bonus, _ = loss_of(dataclasses.replace(losses.dapo(), entropy_bonus=0.5))
  np.testing.assert_allclose(with_bonus, plain - 0.5 * ENTROPY[MASK].mean(), rtol=1e-6)


@pytest.mark.parametrize("estimator", losses.KL_ESTIMATORS)
def test_reference_kl_is_added_and_reported(estimator):
  reference = np.where(MASK, OLD - 0.3, 0.0).astype(np.float32)
  config = dataclasses.replace(losses.dapo(), kl_coefficient=0.5, kl_estimator=estimator)
  plain, _ = loss_of(losses.dapo(), OLD)
  loss, metrics = loss_of(config, OLD, reference_logprobs=jnp.asarray(reference))
  kl = {"k1": 0.3, "k2": 0.045, "k3": math.exp(-0.3) - 1 + 0.3}[estimator]
  np.testing.assert_allclose(loss, plain + 0.5 * kl, rtol=1e-5)
  np.testing.assert_allclose(losses.summarise(metrics)["kl_reference"], kl, rtol=1e-5)


def test_truncated_importance_weights_are_capped_constants():
  # The engine's log-probabilities are off by these; the trainer's own stand in for old ones.
  gaps = np.asarray([0, 0.1, 3.0, 0, -0.2, 0, 0.5, 0], np.float32)
  rows = ROWS._replace(behaviour_logprobs=OLD - gaps)
  config = losses.dapo(tis_cap=2.0)
  weights = np.minimum(np.exp(gaps), 2.0)
  loss, metrics = loss_of(config, OLD, rows)
  np.testing.assert_allclose(loss, -(weights * ADVANTAGES)[MASK].sum() / 5, rtol=1e-6)
  np.testing.assert_allclose(
    gradient(config, OLD, rows), np.where(MASK, -weights * ADVANTAGES / 5, 0.0), rtol=1e-6
  )
  summary = losses.summarise(metrics)
  np.testing.assert_allclose(summary["tis_capped"], 0.2, rtol=1e-6)
  np.testing.assert_allclose(summary["tis_weight"], weights[MASK].mean(), rtol=1e-6)
  # A later mini-batch: the ratio is to old_logprobs, the weight is between those and the engine's.
  loss, _ = loss_of(config, NEW, rows, old_logprobs=jnp.asarray(OLD))
  clipped = np.where(ADVANTAGES > 0, np.minimum(np.exp(NEW - OLD), 1.28), np.exp(NEW - OLD))
  clipped = np.where(ADVANTAGES < 0, np.maximum(clipped, 0.8), clipped)
  np.testing.assert_allclose(loss, -(weights * clipped * ADVANTAGES)[MASK].sum() / 5, rtol=1e-6)


def test_tis_is_neutral_where_engine_and_trainer_agree():
  np.testing.assert_array_equal(
    loss_of(losses.dapo(tis_cap=2.0), OLD)[0], loss_of(losses.dapo(), OLD)[0]
  )


def test_old_logprobs_free_the_loss_of_behaviour_logprobs():
  rows = ROWS._replace(behaviour_logprobs=None)
  got, _ = loss_of(losses.grpo(), rows=rows, old_logprobs=jnp.asarray(OLD))
  np.testing.assert_array_equal(got, loss_of(losses.grpo())[0])


def test_on_policy_metrics_are_exactly_one_and_zero():
  _, metrics = loss_of(losses.gspo(), OLD)
  summary = losses.summarise(metrics)
  assert float(summary["ratio"]) == 1.0 and float(summary["max_ratio"]) == 1.0
  assert float(summary["kl_old"]) == 0.0


def test_kl_estimators_against_an_exact_kl():
  rng = np.random.default_rng(0)
  p, q = np.exp(rng.normal(size=(2, 6)) * 0.4)
  p, q = p / p.sum(), q / q.sum()
  log_p, log_q = jnp.asarray(np.log(p), jnp.float32), jnp.asarray(np.log(q), jnp.float32)
  exact = float(np.sum(p * np.log(p / q)))
  # The expectation over tokens is a sum over the six of them: no sampling noise.
  expected = {
    name: float(np.sum(p * np.asarray(losses.kl_estimate(name, log_p, log_q))))
    for name in losses.KL_ESTIMATORS
  }
  assert expected["k1"] == pytest.approx(exact, rel=1e-4)
  assert expected["k3"] == pytest.approx(exact, rel=1e-4)
  assert expected["k2"] == pytest.approx(0.5 * np.sum(p * np.log(p / q) ** 2), rel=1e-4)
  assert np.sum(p * np.asarray(losses.kl_k3(log_p, log_q)) ** 2) < np.sum(
    p * np.asarray(losses.kl_k1(log_p, log_q)) ** 2
  )


def test_k2_and_k3_are_never_negative_and_all_vanish_at_equality():
  logprobs = -jnp.exp(jnp.linspace(-8.0, 3.0, 400))
  for scale in (1e-3, 0.1, 1.0, 30.0):
    other = logprobs + scale * jnp.sin(jnp.arange(400.0))
    assert (losses.kl_k2(logprobs, other) >= 0).all()
    assert (losses.kl_k3(logprobs, other) >= 0).all()
    assert np.isfinite(losses.kl_k3(logprobs, other)).all()
  for estimator in losses.KL_ESTIMATORS:
    assert (losses.kl_estimate(estimator, logprobs, logprobs) == 0).all()


def test_expected_gradients_of_the_estimators_are_as_documented():
  logits = jnp.asarray([0.3, -0.5, 0.9, 0.0])
  log_q = jax.nn.log_softmax(jnp.asarray([0.0, 0.7, -0.2, 0.1]))
  p = jax.lax.stop_gradient(jax.nn.softmax(logits))

  def expected(estimator):
    return jax.grad(
      lambda x: jnp.sum(p * losses.kl_estimate(estimator, jax.nn.log_softmax(x), log_q))
    )(logits)

  def reverse(x):
    log_p = jax.nn.log_softmax(x)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q))

  def forward(x):
    return jnp.sum(jnp.exp(log_q) * (log_q - jax.nn.log_softmax(x)))

  np.testing.assert_allclose(expected("k1"), np.zeros(4), atol=1e-6)
  np.testing.assert_allclose(expected("k2"), jax.grad(reverse)(logits), atol=1e-6)
  np.testing.assert_allclose(expected("k3"), jax.grad(forward)(logits), atol=1e-6)


def test_kl_without_reference_is_refused():
  with pytest.raises(ValueError, match=r"kl_coefficient=0.04 and no reference_logprobs"):
    loss_of(losses.grpo(kl_coefficient=0.04))


@pytest.mark.parametrize(
  ("config", "old"), [(losses.grpo(), None), (losses.grpo(tis_cap=2.0), jnp.asarray(OLD))]
)
def test_missing_behaviour_logprobs_are_refused(config, old):
  with pytest.raises(ValueError, match=r"got rows.behaviour_logprobs=None"):
    loss_of(config, rows=ROWS._replace(behaviour_logprobs=None), old_logprobs=old)
