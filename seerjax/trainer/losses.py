"""The policy loss of one packed micro-batch, and its metrics.

Rows are tokens. With A the advantage and w the weight of a row, the loss is a plain sum

  loss = sum_rows w * ( -objective + kl_coefficient * kl - entropy_bonus * entropy )
  objective = tis * ( bound * A  if the ratio left [1 - clip_low, 1 + clip_high] on A's side
                      ratio * A  else )
  ratio = exp(logprobs - old_logprobs)                      (all but GSPO)
  ratio = exp(mean of the same over the row's sequence)     (GSPO)

The aggregation determines the weight. Denominators count the *whole* batch and are passed as an
argument:

  "sequence_mean"    1 / (sequences * length of the row's sequence)    GRPO, GSPO
  "token_mean"       1 / tokens                                        DAPO
  "constant_length"  1 / (sequences * max_tokens)                      Dr. GRPO
  "sequence_sum"     1 / sequences                                     RLOO

The losses, gradients and metric sums of micro-batches therefore add up to those of the batch.
Lengths count generated tokens. The rows of a sequence are adjacent. All sums are float32. Nothing
here scatters, forward or backward, so no result depends on the order of atomic adds on a GPU.

Sources: Shao et al. 2024 (GRPO), https://arxiv.org/abs/2402.03300; Liu et al. 2025 (Dr. GRPO),
https://arxiv.org/abs/2503.20783; Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476; Zheng et
al. 2025 (GSPO), https://arxiv.org/abs/2507.18071; Ahmadian et al. 2024 (RLOO),
https://arxiv.org/abs/2402.14740; Schulman et al. 2017 (PPO), https://arxiv.org/abs/1707.06347.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from seerjax import fields
from seerjax.array_typing import Array, Float, TokenLogprobs
from seerjax.types import TrainBatch

ALGORITHMS = ("grpo", "dr_grpo", "dapo", "gspo", "rloo")
AGGREGATIONS = ("sequence_mean", "token_mean", "constant_length", "sequence_sum")
KL_ESTIMATORS = ("k1", "k2", "k3")
BALANCES = ("global", "per_sequence")

# Log-ratios are clipped to this before `exp` (e^20 is 5e8): a token that was impossible under the
# old policy then gives a huge ratio without gradient, instead of inf and a NaN gradient.
LOG_RATIO_LIMIT = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
  """Configuration of the objective; `grpo`, `dr_grpo`, `dapo`, `gspo` and `rloo` return presets.

  Attributes:
    algorithm: one of `ALGORITHMS`. Determines the advantage (`advantages.for_algorithm`); with
      "gspo" the ratio is also one number per sequence. All else is set by the fields below.
    clip_low: lower clip of the ratio, 1 - clip_low; 1 never clips.
    clip_high: upper clip of the ratio, 1 + clip_high; inf never clips.
    aggregation: one of `AGGREGATIONS`: how rows are weighted, see the module.
    max_tokens: constant length for "constant_length", in tokens; ignored by other aggregations.
    kl_coefficient: weight of the KL to the reference policy; 0 needs no `reference_logprobs`.
    kl_estimator: estimator of that KL. As a *loss* on the policy's own tokens, "k1" has an expected
      gradient of zero, "k2" the gradient of KL(policy || reference), "k3" that of
      KL(reference || policy). As a *metric*, "k1" and "k3" are unbiased for
      KL(policy || reference).
    entropy_bonus: weight of the entropy, in loss units per nat; 0 is off.
    tis_cap: truncated importance sampling: rows are weighted by min(exp(old_logprobs -
      behaviour_logprobs), tis_cap), without gradient, to correct for an engine with
      log-probabilities that differ from the trainer's. None is off; the tiled path needs no
      correction.
    balance_coefficient: weight of the load-balancing loss (`trainer.routes`) of each layer with
      experts, which the trainer adds; 0 is off, and changes nothing.
    balance: one of `BALANCES`: the shares of choices in that loss are those of all loss rows of a
      gradient, which takes a forward pass before it, or of each sequence; the loss is then the mean
      over sequences.
  """

  algorithm: str = "grpo"
  clip_low: float = 0.2
  clip_high: float = 0.2
  aggregation: str = "sequence_mean"
  max_tokens: int = 0
  kl_coefficient: float = 0.0
  kl_estimator: str = "k3"
  entropy_bonus: float = 0.0
  tis_cap: float | None = None
  balance_coefficient: float = 0.0
  balance: str = "global"

  def __post_init__(self):
    fields.check(
      self,
      unbounded=("clip_low", "clip_high", "tis_cap"),
      algorithm=fields.one_of(ALGORITHMS, "'grpo' is usual"),
      aggregation=fields.one_of(AGGREGATIONS, "'token_mean' is usual"),
      kl_estimator=fields.one_of(KL_ESTIMATORS, "'k3' is usual"),
      balance=fields.one_of(BALANCES, "'global' is usual"),
      balance_coefficient=fields.at_least(0, "0.01 and less are usual, 0 is off"),
      clip_low=fields.between(0, 1, "0.2 is usual, 1 never clips"),
      clip_high=fields.at_least(0, "0.2 is usual, inf never clips"),
      kl_coefficient=fields.at_least(0, "0 is off"),
      entropy_bonus=fields.at_least(0, "0 is off"),
      tis_cap=fields.Rule(
        "tis_cap > 0 or None", lambda cap: cap is None or cap > 0, "2 is usual, None is off"
      ),
    )
    if self.aggregation == "constant_length" and self.max_tokens < 1:
      raise ValueError(
        f"LossConfig.max_tokens: got {self.max_tokens}, expected max_tokens >= 1 with"
        " aggregation='constant_length'; pass SamplingParams.max_tokens."
      )
    if self.tis_cap is not None and self.algorithm == "gspo":
      raise ValueError(
        f"LossConfig.tis_cap: got {self.tis_cap}, expected None with algorithm='gspo' (its ratio"
        " belongs to a sequence, this weight to a token); set tis_cap=None or another algorithm."
      )


def grpo(*, kl_coefficient: float = 0.0, tis_cap: float | None = None) -> LossConfig:
  """Returns GRPO: symmetric clip, mean over each sequence, then over sequences.

  The paper uses kl_coefficient = 0.04 with k3, which needs a reference policy's log-probabilities.
  """
  return LossConfig(algorithm="grpo", kl_coefficient=kl_coefficient, tis_cap=tis_cap)


def dr_grpo(*, max_tokens: int, tis_cap: float | None = None) -> LossConfig:
  """Returns Dr. GRPO: no deviation in the advantage, a constant length in the denominator.

  Args:
    max_tokens: the generation budget in tokens, which replaces each sequence's length.
    tis_cap: see `LossConfig`.
  """
  return LossConfig(
    algorithm="dr_grpo", aggregation="constant_length", max_tokens=max_tokens, tis_cap=tis_cap
  )


def dapo(*, tis_cap: float | None = None) -> LossConfig:
  """Returns DAPO: a higher upper clip, mean over all tokens, no KL.

  DAPO's other two parts act on groups and rewards: dynamic sampling of groups with unequal rewards
  (otherwise every advantage is 0), and `advantages.overlong_penalty`.
  """
  return LossConfig(algorithm="dapo", clip_high=0.28, aggregation="token_mean", tis_cap=tis_cap)


def gspo() -> LossConfig:
  """Returns GSPO: one length-normalised ratio per sequence, with the paper's narrow clip."""
  return LossConfig(algorithm="gspo", clip_low=3e-4, clip_high=4e-4)


def rloo(*, kl_coefficient: float = 0.0, tis_cap: float | None = None) -> LossConfig:
  """Returns RLOO: REINFORCE on whole sequences, with the leave-one-out baseline and no clip."""
  return LossConfig(
    algorithm="rloo",
    clip_low=1.0,
    clip_high=math.inf,
    aggregation="sequence_sum",
    kl_coefficient=kl_coefficient,
    tis_cap=tis_cap,
  )


class LossRows(NamedTuple):
  """The fields of `TrainBatch` that the loss reads; other training loops can fill them in.

  Attributes:
    loss_mask: bool[n], True where the policy generated the target.
    sequence_index: i32[n], equal on the rows of one sequence, which are adjacent; negative on
      padding.
    advantages: f32[n], the rollout's advantage on each of its rows.
    behaviour_logprobs: f32[n], under the policy that sampled. May be None if `old_logprobs` is
      passed and `LossConfig.tis_cap` is None, since nothing else reads it.
  """

  loss_mask: Any
  sequence_index: Any
  advantages: Any
  behaviour_logprobs: Any


class Denominators(NamedTuple):
  """Denominators of the sums of one optimiser step.

  Attributes:
    num_sequences: f32[], sequences in the whole batch.
    num_tokens: f32[], generated tokens in the whole batch.
  """

  num_sequences: Float[Array, ""]
  num_tokens: Float[Array, ""]


class LossMetrics(NamedTuple):
  """Scalars of one micro-batch that combine over micro-batches (`add_metrics`).

  Attributes:
    sums: f32[] each, over rows of the loss; "num_tokens" counts the rows.
    maxima: f32[] each, over rows of the loss; 0 if there are none.
  """

  sums: dict[str, Array]
  maxima: dict[str, Array]


def denominators(batch: TrainBatch | LossRows) -> Denominators:
  """Counts the sequences and generated tokens of a whole batch.

  Counts are integers, so the result does not depend on the order of summation or on the division
  into micro-batches. Call it on everything in one optimiser step.

  Args:
    batch: any number of leading axes before n; the rows of a sequence are adjacent, as in
      `packing.pack`.

  Returns:
    Denominators; f32, exact up to 2^24 tokens.
  """
  index = jnp.asarray(batch.sequence_index)
  before = jnp.concatenate([jnp.full_like(index[..., :1], -1), index[..., :-1]], axis=-1)
  is_first = (index >= 0) & (index != before)
  return Denominators(
    num_sequences=jnp.sum(is_first, dtype=jnp.int32).astype(jnp.float32),
    num_tokens=jnp.sum(jnp.asarray(batch.loss_mask), dtype=jnp.int32).astype(jnp.float32),
  )


def policy_loss(
  logprobs: TokenLogprobs,
  entropy: TokenLogprobs,
  rows: TrainBatch | LossRows,
  config: LossConfig,
  denominators: Denominators,
  *,
  old_logprobs: TokenLogprobs | None = None,
  reference_logprobs: TokenLogprobs | None = None,
) -> tuple[Float[Array, ""], LossMetrics]:
  """Returns one micro-batch's share of the loss, and its metrics.

  Rows outside `rows.loss_mask` may hold anything, NaN included; they get a gradient of exactly 0.

  Args:
    logprobs: f32[n], log-probabilities of the targets under the current policy, nats.
    entropy: f32[n], entropy of the policy at each row, nats.
    rows: one micro-batch: `TrainBatch` without its leading axis, or `LossRows`.
    config: the objective.
    denominators: counts of the whole batch of this optimiser step.
    old_logprobs: f32[n], log-probabilities of the targets in the denominator of the ratio. None
      uses `rows.behaviour_logprobs`, which is right for the first step on a batch; with `tis_cap`
      it uses `logprobs` without gradient (the first step's ratio is then 1, and `tis_cap` alone
      corrects for the engine). Later mini-batches pass the trainer's log-probabilities under the
      weights that sampled.
    reference_logprobs: f32[n], log-probabilities of the targets under the reference policy.

  Returns:
    f32[], to be summed over micro-batches; and `LossMetrics` with the sums "num_tokens", "ratio",
    "clipped_low", "clipped_high", "entropy", "kl_old" (k3 of old to new), with a reference
    "kl_reference", with `tis_cap` "tis_weight" and "tis_capped"; and the maximum "ratio".

  Raises:
    ValueError: if `kl_coefficient > 0` without `reference_logprobs`, or `behaviour_logprobs` is
      needed but None.
  """
  if config.kl_coefficient > 0.0 and reference_logprobs is None:
    raise ValueError(
      f"policy_loss: got kl_coefficient={config.kl_coefficient} and no reference_logprobs, expected"
      " f32[n] of the reference policy; pass them or set LossConfig.kl_coefficient=0."
    )
  needs_behaviour = config.tis_cap is not None or old_logprobs is None
  if needs_behaviour and rows.behaviour_logprobs is None:
    raise ValueError(
      f"policy_loss: got rows.behaviour_logprobs=None with tis_cap={config.tis_cap} and"
      f" old_logprobs {'absent' if old_logprobs is None else 'given'}, expected f32[n]; pass"
      " old_logprobs and set LossConfig.tis_cap=None, or pass the engine's log-probabilities."
    )
  mask = jnp.asarray(rows.loss_mask)
  sequence_index = jnp.asarray(rows.sequence_index)
  advantages = jnp.where(mask, rows.advantages, 0.0)
  # Masked before any arithmetic: values of other rows must not reach a gradient, not even as
  # 0 * inf.
  logprobs = jnp.where(mask, logprobs, 0.0)
  entropy = jnp.where(mask, entropy, 0.0)
  if old_logprobs is not None:
    old = jnp.where(mask, old_logprobs, 0.0)
  elif config.tis_cap is not None:
    old = logprobs
  else:
    old = jnp.where(mask, rows.behaviour_logprobs, 0.0)
  old = lax.stop_gradient(old)

  lengths = sequence_lengths(mask, sequence_index)

  log_ratio = logprobs - old
  if config.algorithm == "gspo":
    log_ratio = sequence_sums(log_ratio, sequence_index) / lengths
  ratio = jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
  low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
  is_low = mask & (advantages < 0.0) & (ratio < low)
  is_high = mask & (advantages > 0.0) & (ratio > high)
  # A selection, not min(ratio * A, clip(ratio) * A): the value is equal, but at ratio == 1 and at
  # the bounds the gradient is that of the formula, where `min` and `clip` would split it at ties.
  kept = jnp.where(is_low, low, jnp.where(is_high, high, ratio))
  objective = kept * advantages

  sums = {}
  if config.tis_cap is not None:
    gap = old - jnp.where(mask, rows.behaviour_logprobs, 0.0)
    raw_weight = jnp.exp(jnp.clip(gap, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    weight = lax.stop_gradient(jnp.minimum(raw_weight, config.tis_cap))
    objective = objective * weight
    sums["tis_weight"] = _masked_sum(weight, mask)
    sums["tis_capped"] = _masked_sum(raw_weight > config.tis_cap, mask)

  per_row = -objective - config.entropy_bonus * entropy
  if reference_logprobs is not None:
    kl = kl_estimate(config.kl_estimator, logprobs, jnp.where(mask, reference_logprobs, 0.0))
    per_row = per_row + config.kl_coefficient * kl
    sums["kl_reference"] = _masked_sum(kl, mask)
  weights = _row_weights(config, denominators, lengths)
  loss = jnp.sum(jnp.where(mask, per_row * weights, 0.0))

  sums |= {
    "num_tokens": _masked_sum(mask, mask),
    "ratio": _masked_sum(ratio, mask),
    "clipped_low": _masked_sum(is_low, mask),
    "clipped_high": _masked_sum(is_high, mask),
    "entropy": _masked_sum(entropy, mask),
    "kl_old": _masked_sum(kl_k3(old, logprobs), mask),
  }
  maxima = {"ratio": jnp.max(jnp.where(mask, ratio, 0.0))}
  return loss, jax.tree.map(lax.stop_gradient, LossMetrics(sums=sums, maxima=maxima))


def add_metrics(left: LossMetrics, right: LossMetrics) -> LossMetrics:
  """Combines the metrics of two micro-batches."""
  return LossMetrics(
    sums=jax.tree.map(jnp.add, left.sums, right.sums),
    maxima=jax.tree.map(jnp.maximum, left.maxima, right.maxima),
  )


def summarise(metrics: LossMetrics) -> dict[str, Array]:
  """Returns one flat dict: sums as means over tokens, maxima as `max_...`, and `num_tokens`.

  Fractions such as "clipped_high" are per token. Without any token, all values are 0.
  """
  count = metrics.sums["num_tokens"]
  summary = {
    name: value / jnp.maximum(count, 1.0)
    for name, value in metrics.sums.items()
    if name != "num_tokens"
  }
  summary |= {f"max_{name}": value for name, value in metrics.maxima.items()}
  return summary | {"num_tokens": count}


def kl_k1(logprobs: Array, other_logprobs: Array) -> Array:
  """Estimates KL(p || q) per token by log p - log q: unbiased, of either sign, high variance.

  Args:
    logprobs: f32[...], of tokens sampled from p, under p, nats.
    other_logprobs: f32[...], of the same tokens under q, nats.

  Returns:
    f32[...], nats; exactly 0 where the two are equal.

  Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.
  """
  return logprobs - other_logprobs


def kl_k2(logprobs: Array, other_logprobs: Array) -> Array:
  """Estimates KL(p || q) per token by (log p - log q)^2 / 2: never negative, biased, low variance.

  Arguments, result and source as `kl_k1`.
  """
  difference = logprobs - other_logprobs
  return 0.5 * difference * difference


def kl_k3(logprobs: Array, other_logprobs: Array) -> Array:
  """Estimates KL(p || q) per token by q/p - 1 - log(q/p): unbiased and never negative.

  Arguments, result and source as `kl_k1`. The log-ratio is clipped to `LOG_RATIO_LIMIT`.
  """
  log_ratio = jnp.clip(other_logprobs - logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
  # expm1(x) - x instead of exp(x) - 1 - x: accurate for small x, where the result is x^2 / 2.
  return jnp.expm1(log_ratio) - log_ratio


def kl_estimate(estimator: str, logprobs: Array, other_logprobs: Array) -> Array:
  """Returns the estimator `kl_k1`, `kl_k2` or `kl_k3` of the arguments.

  Raises:
    ValueError: for an unknown estimator.
  """
  match estimator:
    case "k1":
      return kl_k1(logprobs, other_logprobs)
    case "k2":
      return kl_k2(logprobs, other_logprobs)
    case "k3":
      return kl_k3(logprobs, other_logprobs)
    case _:
      raise ValueError(
        f"kl_estimate: got {estimator!r}, expected one of {KL_ESTIMATORS}; 'k3' is usual."
      )


def _row_weights(config: LossConfig, denominators: Denominators, lengths: Array) -> Array:
  """Returns f32[n] or f32[], the weight of a row in the loss (see the module)."""
  match config.aggregation:
    case "sequence_mean":
      return 1.0 / (jnp.maximum(denominators.num_sequences, 1.0) * lengths)
    case "token_mean":
      return 1.0 / jnp.maximum(denominators.num_tokens, 1.0)
    case "constant_length":
      return 1.0 / (jnp.maximum(denominators.num_sequences, 1.0) * config.max_tokens)
    case _:  # "sequence_sum": LossConfig admits no other.
      return 1.0 / jnp.maximum(denominators.num_sequences, 1.0)


@jax.custom_vjp
def sequence_sums(values: Array, sequence_index: Array) -> Array:
  """Returns, at each row, the sum of `values` over the rows of its sequence: f32[n].

  Computes a segmented running sum by a tree of fixed shape; every row then reads the entry at its
  sequence's last row. (A one-hot matmul also has a fixed order, but XLA:CPU stores its n^2 mask:
  1 GiB at n = 16384.)
  """
  is_new = sequence_index[1:] != sequence_index[:-1]
  edge = jnp.ones((1,), jnp.bool_)

  def combine(left, right):
    (left_sum, left_is_new), (right_sum, right_is_new) = left, right
    total = jnp.where(right_is_new, right_sum, left_sum + right_sum)
    return total, left_is_new | right_is_new

  running, _ = lax.associative_scan(combine, (values, jnp.concatenate([edge, is_new])))
  rows = jnp.arange(values.shape[0], dtype=jnp.int32)
  is_last = jnp.concatenate([is_new, edge])
  last_row = lax.cummin(jnp.where(is_last, rows, values.shape[0] - 1), reverse=True)
  return running[last_row]


def _sums_forward(values: Array, sequence_index: Array) -> tuple[Array, Array]:
  return sequence_sums(values, sequence_index), sequence_index


def _sums_backward(sequence_index: Array, cotangent: Array) -> tuple[Array, None]:
  # "Of one sequence" is symmetric, so the map is its own transpose; written by hand, because
  # autodiff of the gather would scatter.
  return sequence_sums(cotangent, sequence_index), None


sequence_sums.defvjp(_sums_forward, _sums_backward)


def sequence_lengths(mask: Array, sequence_index: Array) -> Array:
  """Returns, at each row, the number of loss rows in its sequence, at least 1: f32[n]."""
  return jnp.maximum(sequence_sums(mask.astype(jnp.float32), sequence_index), 1.0)


def _masked_sum(values: Array, mask: Array) -> Array:
  """Returns the sum over loss rows: f32[]."""
  return jnp.sum(jnp.where(mask, values.astype(jnp.float32), 0.0))
