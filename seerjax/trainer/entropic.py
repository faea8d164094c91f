"""Advantages of the entropic objective, which favours the best members of a group.

  J_β = log E[exp(β r)]          β -> 0: the mean reward (over β);  β -> inf: the best one
  gradient = E[w grad log π],  w = exp(β r) / E[exp(β r)]

Within a group of N, the expectation in w is over the *other* members, a baseline of 1 is
subtracted, and β is chosen so that the tilted group q(n) ~ exp(β r_n) has a KL divergence of
`divergence` nats (ln 2) from the uniform one:

  e_n = exp(β (r_n - max)),  A_n = e_n / mean of the others' e - 1
  KL(q || even) = sum q_n log(N q_n) = ln 2,  monotone in β: found by bisection

A is thus the same for r and a r + b (a > 0): the scale of rewards does not matter. Rewards of
near-record results differ in the seventh digit and beyond, where float32 has only ties. Hence
everything is computed in float64 on the host, on rewards divided by their range: x = (r - max) /
(max - min) in [-1, 0], with β in units of 1 / range. Sums use `math.fsum`, which rounds once and so
does not depend on order; exponentials are computed one at a time. As in `advantages`, the order of
groups and members does not affect any bit. The result is cast to float32.

Expected value, for a β that is fixed per unit of reward: e_n and the others are independent, so the
expected gradient is exactly k times that of J_β, k = E[exp(β r)] E[1 / mean of the others'
exp(β r)] >= 1, and k - 1 decreases as 1 / N. The direction is unbiased, and the step slightly too
long. With a β that depends on the group (solved for, or per range) this holds only approximately.
The advantages of a group sum to more than 0.

Source: Yuksekgonul et al. 2026 (TTT-Discover), https://arxiv.org/abs/2601.16175.
"""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import NamedTuple

from jax.typing import ArrayLike
import numpy as np

from seerjax.array_typing import Float, GroupRewards

MIN_GROUP = 4  # In smaller groups the advantage of a single member becomes excessive.
KL_TOLERANCE = 1e-6  # Nats; a larger deviation is explained in `reason`.
# Upper bound on β, per range: differences below 1e-12 of the range remain ties.
MAX_BETA = 1e12
# If ties at the best limit the KL, β stops this many nats below the limit, which would require
# infinite β.
CEILING_GAP = 1e-9
# A range below 64 ulp of the rewards themselves is rounding, not a real difference.
ROUNDING = 2.0**-46
MIN_NORMALISER = 1e-12  # Lower bound on the others' mean e, in case all others are near 0.


class Beta(NamedTuple):
  """The tilt of one group.

  Attributes:
    beta: β on rewards divided by their range; 0 if there is nothing to learn.
    kl: KL(q || even) at that β, nats.
    reason: why `kl` differs from the requested divergence; "" if it does not.
    spread: the range, in reward units; beta / spread is β per unit of reward.
  """

  beta: float
  kl: float
  reason: str
  spread: float


class Entropic(NamedTuple):
  """Advantages and statistics of their groups.

  Attributes:
    advantages: f32[b, g], at least -1.
    beta: f64[b], on rewards divided by their group's range.
    kl: f64[b], nats.
    effective_samples: f64[b], 1 / sum q^2: between 1 and the number of counted members.
    reason: for each group, why its KL differs from the divergence; "" if it does not, or if β was
      given.
  """

  advantages: GroupRewards
  beta: Float[np.ndarray, "b"]
  kl: Float[np.ndarray, "b"]
  effective_samples: Float[np.ndarray, "b"]
  reason: tuple[str, ...]


def entropic(
  rewards: ArrayLike,
  *,
  divergence: float = math.log(2),
  beta: float | None = None,
  valid: ArrayLike | None = None,
  valid_only: bool = False,
  max_advantage: float | None = None,
) -> Entropic:
  """Returns the advantages of the entropic objective.

  A group without differences has advantages of exactly 0. If k of N rewards tie at the best and
  ln(N / k) is below the divergence, β goes to its bound and `reason` says so: the advantages are
  then nearly (N - 1) / (k - 1) - 1 for the best and -1 for the others.

  Invalid attempts have reward 0, usually far below valid ones, and then use up the whole
  divergence: with half a group invalid, all valid ones get equal weight. Against this, `valid_only`
  is a DEVIATION from the paper: β, q and the normaliser are computed from valid members only, and
  invalid ones get -1. With fewer than `MIN_GROUP` valid members, these get 0; with none, the whole
  group gets 0.

  Args:
    rewards: f64[b, g], one row per group, higher is better; the scale does not matter. If they
      differ by little, do not round them to float32 first.
    divergence: nats.
    beta: a constant β instead, on rewards divided by their group's range; at least 0.
    valid: bool[b, g]; only read with `valid_only`.
    valid_only: see above.
    max_advantage: upper bound of the advantages; None for none.

  Raises:
    ValueError: if `g < 4`, a reward is not finite, `valid` is missing or has another shape, or a
      number is out of range.
  """
  array = _checked(rewards, "entropic")
  _check_divergence(divergence, "entropic")
  if beta is not None and not 0 <= beta < math.inf:
    raise ValueError(
      f"entropic: got beta={beta}, expected 0 <= beta < inf, on rewards divided by their range; 2"
      " is the paper's constant (on its own rewards), None solves for one."
    )
  if max_advantage is not None and not 0 < max_advantage < math.inf:
    raise ValueError(
      f"entropic: got max_advantage={max_advantage}, expected a positive number; None leaves"
      " advantages as they are, half the group size is a mild bound."
    )
  counts = np.ones(array.shape, np.bool_)
  if valid_only:
    if valid is None:
      raise ValueError(
        "entropic: got valid_only=True without valid, expected bool[b, g]; pass Score.is_valid of"
        " each attempt."
      )
    counts = _mask(valid, array.shape, "entropic")
  advantages = np.empty(array.shape, np.float64)
  betas: list[Beta] = []
  effective: list[float] = []
  for group, (row, counting) in enumerate(zip(array, counts)):
    members = row[counting].tolist()
    tilt = _even(members, len(row)) or (
      _solve(members, divergence) if beta is None else _constant(members, beta)
    )
    weights = _weights(_normalised(members, tilt.spread), tilt.beta)
    total = math.fsum(weights)
    advantages[group] = -1.0 if members else 0.0
    advantages[group, counting] = _leave_one_out(weights) if tilt.beta else 0.0
    effective.append(total**2 / math.fsum(e * e for e in weights) if weights else 0.0)
    betas.append(tilt)
  if max_advantage is not None:
    advantages = np.minimum(advantages, max_advantage)
  return Entropic(
    advantages=advantages.astype(np.float32),
    beta=np.asarray([tilt.beta for tilt in betas], np.float64),
    kl=np.asarray([tilt.kl for tilt in betas], np.float64),
    effective_samples=np.asarray(effective, np.float64),
    reason=tuple(tilt.reason for tilt in betas),
  )


def solve_beta(
  rewards: ArrayLike, *, divergence: float = math.log(2), valid: ArrayLike | None = None
) -> Beta:
  """Returns the β at which a group's KL from the uniform distribution is `divergence`.

  Args:
    rewards: f64[g], higher is better.
    divergence: nats.
    valid: bool[g], members to count; all by default.

  Raises:
    ValueError: as `entropic`.
  """
  vector = np.asarray(rewards, np.float64)
  if vector.ndim != 1:
    raise ValueError(
      f"solve_beta: got rewards of shape {vector.shape}, expected [g], one group; use entropic for"
      " several."
    )
  row = _checked(vector[None], "solve_beta")[0]
  _check_divergence(divergence, "solve_beta")
  counts = _mask(np.ones(row.shape, np.bool_) if valid is None else valid, row.shape, "solve_beta")
  members = row[counts].tolist()
  return _even(members, len(row)) or _solve(members, divergence)


def kl_shaped(
  advantages: ArrayLike,
  logprobs: ArrayLike,
  base_logprobs: ArrayLike,
  mask: ArrayLike,
  coefficient: float,
) -> Float[np.ndarray, "m n"]:
  """Returns per-token advantages with a KL penalty towards the base, and 0 outside the mask.

    A_t + coefficient (mean of d - d_t),  d = logprobs - base_logprobs

  The mean is over the mask of the whole batch, so the penalty is centred: it moves probability
  between tokens without a net push. Forced tokens, which the policy did not choose, are outside the
  mask and get no gradient; their values are not read.

  Args:
    advantages: f32[m, n], advantage of each token's attempt.
    logprobs: f32[m, n], under the policy that sampled, nats.
    base_logprobs: f32[m, n], under the initial weights.
    mask: bool[m, n], True on tokens that the policy chose.
    coefficient: advantage per nat; 0.1 and 0.01 are published.

  Raises:
    ValueError: if shapes differ, a number on the mask is not finite, or the coefficient is negative
      or not finite.

  Source: Yuksekgonul et al. 2026 (TTT-Discover): per token, as in the published code.
  """
  if not 0 <= coefficient < math.inf:
    raise ValueError(
      f"kl_shaped: got coefficient={coefficient}, expected 0 <= coefficient < inf; 0.1 is the"
      " published value."
    )
  gaps, chosen = _gaps(logprobs, base_logprobs, mask, "kl_shaped")
  given = np.asarray(advantages, np.float64)
  if given.shape != gaps.shape or gaps.ndim != 2:
    raise ValueError(
      f"kl_shaped: got advantages of shape {given.shape} and log-probabilities of shape"
      f" {gaps.shape}, expected both [m, n]; copy an attempt's advantage to its tokens"
      " (packing.pack)."
    )
  _refuse_unless_finite(given, chosen, "kl_shaped", "advantage")
  pull = coefficient * (_mean(gaps, chosen) - gaps)
  return np.where(chosen, given + pull, 0.0).astype(np.float32)


def kl_to_base(logprobs: ArrayLike, base_logprobs: ArrayLike, mask: ArrayLike) -> float:
  """Returns the mean of logprobs - base_logprobs on the mask: KL(policy || base), nats per token.

  Args:
    logprobs: f32[m, n], under the policy that sampled, nats.
    base_logprobs: f32[m, n], under the base.
    mask: bool[m, n]; all False gives 0.

  Raises:
    ValueError: if shapes differ or a number on the mask is not finite.
  """
  return _mean(*_gaps(logprobs, base_logprobs, mask, "kl_to_base"))


def _solve(members: Sequence[float], divergence: float) -> Beta:
  """Returns β for rewards that are not all equal."""
  spread = max(members) - min(members)
  x = _normalised(members, spread)
  num, num_best = len(x), x.count(0.0)
  target = min(divergence, math.log(num / num_best) - CEILING_GAP)
  low, high = 0.0, 1.0
  while _kl(x, high) < target and high < MAX_BETA:
    low, high = high, min(2 * high, MAX_BETA)
  if _kl(x, high) >= target:
    # Bisects to neighbouring floats: about 53 halvings of [high / 2, high], more below 1.
    while low < (middle := low + (high - low) / 2) < high:
      if _kl(x, middle) < target:
        low = middle
      else:
        high = middle
  kl = _kl(x, high)
  reason = ""
  if abs(kl - divergence) > KL_TOLERANCE:
    reason = f"KL is {kl:.6g} nats, not {divergence:.6g}: "
    if kl < target:
      reason += f"the best differ by less than their range / {MAX_BETA:g}, and beta is at its limit"
    else:
      reason += f"{num_best} of {num} rewards tie for the best, so it is below ln({num}/{num_best})"
  return Beta(high, kl, reason, spread)


def _constant(members: Sequence[float], beta: float) -> Beta:
  """Returns a given β with its KL."""
  spread = max(members) - min(members)
  return Beta(float(beta), _kl(_normalised(members, spread), beta), "", spread)


def _even(members: Sequence[float], group_size: int) -> Beta | None:
  """Returns β = 0 with the reason if the group cannot be tilted, else None."""
  if not members:
    return Beta(0.0, 0.0, "no member of the group is valid", 0.0)
  spread = max(members) - min(members)
  if len(members) < MIN_GROUP:
    few = f"{len(members)} valid of {group_size} are too few for a beta, which needs {MIN_GROUP}"
    return Beta(0.0, 0.0, few, spread)
  if spread <= ROUNDING * max(abs(reward) for reward in members):
    what = "are equal" if spread == 0 else f"are equal but for rounding ({spread:.3g})"
    return Beta(0.0, 0.0, f"all {len(members)} rewards {what}", spread)
  return None


def _normalised(members: Sequence[float], spread: float) -> list[float]:
  """Returns rewards as (r - max) / range, in [-1, 0]; all 0 if the range is 0."""
  highest = max(members, default=0.0)
  return [(reward - highest) / spread if spread else 0.0 for reward in members]


def _weights(x: Sequence[float], beta: float) -> list[float]:
  # math.exp, not np.exp: vectorised code may round an element depending on its position.
  return [math.exp(beta * value) for value in x]


def _kl(x: Sequence[float], beta: float) -> float:
  """Returns KL(q || even) in nats, q ~ exp(beta x)."""
  weights = _weights(x, beta)
  total = math.fsum(weights)
  tilt = beta * math.fsum(value * e for value, e in zip(x, weights)) / total
  return max(0.0, tilt - math.log(total) + math.log(len(x)))


def _leave_one_out(weights: Sequence[float]) -> list[float]:
  """Returns e_n / mean of the others' e - 1."""
  num_others = len(weights) - 1
  # fsum rounds the exact sum, so subtracting e_n leaves exactly the others.
  others = [math.fsum([*weights, -e]) / num_others for e in weights]
  return [e / max(other, MIN_NORMALISER) - 1 for e, other in zip(weights, others)]


def _checked(rewards: ArrayLike, name: str) -> np.ndarray:
  """Returns rewards as f64[b, g]; raises if they are invalid."""
  array = np.asarray(rewards, np.float64)
  if array.ndim != 2:
    raise ValueError(
      f"{name}: got rewards of shape {array.shape}, expected [b, g], one row per group; stack"
      " RolloutGroup.rewards."
    )
  if array.shape[1] < MIN_GROUP:
    raise ValueError(
      f"{name}: got groups of {array.shape[1]} rewards, expected at least {MIN_GROUP}, because"
      " advantages explode in groups of two or three; set RolloutConfig.group_size to 8 or more."
    )
  if not np.isfinite(array).all():
    group, member = np.argwhere(~np.isfinite(array))[0]
    raise ValueError(
      f"{name}: got reward {array[group, member]} for group {group}, member {member}, expected a"
      " finite number; an invalid attempt has reward 0."
    )
  for group, row in enumerate(array.tolist()):
    if math.isinf(max(row) - min(row)):
      raise ValueError(
        f"{name}: got rewards from {min(row)} to {max(row)} in group {group}, expected a finite"
        " range; scale them down, because their scale does not matter."
      )
  return array


def _check_divergence(divergence: float, name: str) -> None:
  if not 0 < divergence < math.inf:
    raise ValueError(
      f"{name}: got divergence={divergence}, expected 0 < divergence < inf, nats; ln 2 is"
      " published."
    )


def _mask(mask: ArrayLike, shape: tuple[int, ...], name: str) -> np.ndarray:
  """Returns a mask as a bool array; raises if its shape or dtype is wrong."""
  array = np.asarray(mask)
  if array.shape != shape or array.dtype != np.bool_:
    raise ValueError(
      f"{name}: got a mask of {array.dtype}{list(array.shape)}, expected bool{list(shape)}; compare"
      " with 0 for booleans."
    )
  return array


def _gaps(
  logprobs: ArrayLike, base_logprobs: ArrayLike, mask: ArrayLike, name: str
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (logprobs - base_logprobs as f64, 0 outside the mask; the mask as bool)."""
  ours, base = np.asarray(logprobs, np.float64), np.asarray(base_logprobs, np.float64)
  if ours.shape != base.shape:
    raise ValueError(
      f"{name}: got logprobs of shape {ours.shape} and base_logprobs of shape {base.shape},"
      " expected the same; score the same TrainBatch with both weights."
    )
  chosen = _mask(mask, ours.shape, name)
  _refuse_unless_finite(ours, chosen, name, "log-probability")
  _refuse_unless_finite(base, chosen, name, "base's log-probability")
  return np.where(chosen, ours, 0.0) - np.where(chosen, base, 0.0), chosen


def _refuse_unless_finite(values: np.ndarray, chosen: np.ndarray, name: str, what: str) -> None:
  bad = np.argwhere(chosen & ~np.isfinite(values))
  if bad.size:
    place = tuple(bad[0].tolist())
    raise ValueError(
      f"{name}: got {what} {values[place]} at {list(place)}, expected a finite number on the mask;"
      " mask out tokens that the policy did not sample."
    )


def _mean(values: np.ndarray, chosen: np.ndarray) -> float:
  """Returns the mean over the mask, its sum rounded once; 0 for an empty mask."""
  num = int(chosen.sum())
  return math.fsum(values[chosen].tolist()) / num if num else 0.0
