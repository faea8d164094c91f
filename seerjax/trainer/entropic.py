"""Rewards of groups in, advantages of the entropic objective out: the best of a group counts most.

  J_β = log E[exp(β r)]          β -> 0: the mean reward (over β);  β -> inf: the best one
  gradient = E[w grad log π],  w = exp(β r) / E[exp(β r)]

Within a group of N the expectation in w is that of the *others*, a baseline of 1 is taken off, and
β makes the tilted group q(n) ~ exp(β r_n) stand `divergence` nats (ln 2) off the even one:

  e_n = exp(β (r_n - max)),  A_n = e_n / mean of the others' e - 1
  KL(q || even) = sum q_n log(N q_n) = ln 2,  monotone in β: found by bisection

So A is the same for r and a r + b (a > 0): the scale of rewards never matters, their shape does.
The rewards of near-record results differ in the seventh digit and beyond, where float32 has only
ties. Hence all of this is float64 on the host, on rewards divided by their range: x = (r - max) /
(max - min) in [-1, 0], and β is in units of 1 / range. Sums are taken with `math.fsum`, which
rounds once and so knows no order, exponentials one at a time; as in `advantages`, the order of
groups and of members changes no bit. The result is cast to float32 at the end.

What holds on average, with a β that is fixed per unit of reward: e_n and the others are
independent, so the expected gradient is exactly k times that of J_β, k = E[exp(β r)] E[1 / mean of
the others' exp(β r)] >= 1, and k - 1 fades as 1 / N: an unbiased direction, a step a little too
long. A β that looks at the group, be it solved for or per range, is only nearly so. Advantages of a
group sum to more than 0.

Source: Yuksekgonul et al. 2026 (TTT-Discover), https://arxiv.org/abs/2601.16175.
"""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import NamedTuple

from jax.typing import ArrayLike
import numpy as np

from seerjax.array_typing import Float, GroupRewards

MIN_GROUP = 4  # One of two or three outweighs the others so far that its advantage explodes.
KL_TOLERANCE = 1e-6  # Nats: further off, the reason is told.
# Largest β, per range: differences below a 1e-12th of the range are left alone as ties.
MAX_BETA = 1e12
# Where ties at the best bound the KL, β stops so many nats short of the bound, which it would reach
# at infinity.
CEILING_GAP = 1e-9
# A range below 64 ulp of the rewards themselves is rounding, not a difference to learn from.
ROUNDING = 2.0**-46
MIN_NORMALISER = 1e-12  # Of the others' mean e, where all others are hopeless.


class Beta(NamedTuple):
  """How strongly one group is tilted.

  Attributes:
    beta: on rewards divided by their range; 0 if nothing is to be learnt.
    kl: KL(q || even) at that β, nats.
    reason: why `kl` is not the divergence asked for; "" if it is.
    spread: the range, reward units; beta / spread is β per unit of reward.
  """

  beta: float
  kl: float
  reason: str
  spread: float


class Entropic(NamedTuple):
  """Advantages, and what the groups they are from look like.

  Attributes:
    advantages: f32[b, g], at least -1.
    beta: f64[b], on rewards divided by their group's range.
    kl: f64[b], nats.
    effective_samples: f64[b], 1 / sum q^2: between 1 and the number of members that count.
    reason: for each group, why its KL is not the divergence; "" if it is, or if β was given.
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

  A group in which nothing differs has advantages of exactly 0. Where k of N rewards tie at the best
  and ln(N / k) is below the divergence, β goes to the bound and `reason` says so: the advantages
  are then nearly (N - 1) / (k - 1) - 1 of the best and -1 of the others.

  Invalid attempts have reward 0, usually far below the valid ones, and then take up the whole
  divergence: with half a group invalid, valid ones weigh alike. `valid_only` is a DEVIATION from
  the paper against this: β, q and the normaliser are those of the valid members alone, the invalid
  ones get -1. Fewer than `MIN_GROUP` valid ones get 0; without any, the whole group is 0.

  Args:
    rewards: f64[b, g], one row per group, higher is better; their scale does not matter. Where they
      differ by little, do not round them to float32 first.
    divergence: nats.
    beta: a constant β instead, on rewards divided by their group's range; at least 0.
    valid: bool[b, g]; read with `valid_only` alone.
    valid_only: see above.
    max_advantage: advantages are cut off above it, where given.

  Raises:
    ValueError: if `g < 4`, a reward is not finite, `valid` is missing or has another shape, or a
      number is out of its range.
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
  """Returns the β at which a group stands `divergence` nats off the even one.

  Args:
    rewards: f64[g], higher is better.
    divergence: nats.
    valid: bool[g], the members that count; all, if left out.

  Raises:
    ValueError: as `entropic`.
  """
  vector = np.asarray(rewards, np.float64)
  if vector.ndim != 1:
    raise ValueError(
      f"solve_beta: got rewards of shape {vector.shape}, expected [g], one group; entropic takes"
      " many."
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
  """Returns advantages of tokens that also pull the policy back to its base, and 0 off the mask.

    A_t + coefficient (mean of d - d_t),  d = logprobs - base_logprobs

  The mean is over the mask of the whole batch, so the pull is centred: it moves probability between
  tokens, and pushes none up or down on the whole. Forced tokens, which the policy did not choose,
  stay outside the mask and get no gradient; what stands there is not read.

  Args:
    advantages: f32[m, n], of each token's attempt.
    logprobs: f32[m, n], of the policy that sampled, nats.
    base_logprobs: f32[m, n], of the weights before the first step.
    mask: bool[m, n], true on tokens that the policy chose.
    coefficient: advantage per nat; 0.1 and 0.01 are published.

  Raises:
    ValueError: if shapes differ, a number on the mask is not finite, or the coefficient is not a
      number of at least 0.

  Source: Yuksekgonul et al. 2026 (TTT-Discover): per token, as its published code has it.
  """
  if not 0 <= coefficient < math.inf:
    raise ValueError(
      f"kl_shaped: got coefficient={coefficient}, expected 0 <= coefficient < inf; 0.1 is"
      " published."
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
  """Returns the mean of log-probability minus base's on the mask: KL(policy || base), nats a token.

  Args:
    logprobs: f32[m, n], of the policy that sampled, nats.
    base_logprobs: f32[m, n].
    mask: bool[m, n]; all False gives 0.

  Raises:
    ValueError: if shapes differ or a number on the mask is not finite.
  """
  return _mean(*_gaps(logprobs, base_logprobs, mask, "kl_to_base"))


def _solve(members: Sequence[float], divergence: float) -> Beta:
  """Returns β for the rewards that count, which differ."""
  spread = max(members) - min(members)
  x = _normalised(members, spread)
  num, num_best = len(x), x.count(0.0)
  target = min(divergence, math.log(num / num_best) - CEILING_GAP)
  low, high = 0.0, 1.0
  while _kl(x, high) < target and high < MAX_BETA:
    low, high = high, min(2 * high, MAX_BETA)
  if _kl(x, high) >= target:
    # Down to neighbouring floats: about 53 halvings of [high / 2, high], more below 1.
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
      reason += f"the best differ by less than their range / {MAX_BETA:g}, and beta ends there"
    else:
      reason += f"{num_best} of {num} rewards tie at the best, so it is below ln({num}/{num_best})"
  return Beta(high, kl, reason, spread)


def _constant(members: Sequence[float], beta: float) -> Beta:
  """Returns a given β with the KL that it makes."""
  spread = max(members) - min(members)
  return Beta(float(beta), _kl(_normalised(members, spread), beta), "", spread)


def _even(members: Sequence[float], group_size: int) -> Beta | None:
  """Returns a β of 0 and the reason, where there is nothing to tilt by."""
  if not members:
    return Beta(0.0, 0.0, "none of the group is valid", 0.0)
  spread = max(members) - min(members)
  if len(members) < MIN_GROUP:
    few = f"{len(members)} valid of {group_size} are too few for a beta, which needs {MIN_GROUP}"
    return Beta(0.0, 0.0, few, spread)
  if spread <= ROUNDING * max(abs(reward) for reward in members):
    what = "are equal" if spread == 0 else f"are equal but for rounding ({spread:.3g})"
    return Beta(0.0, 0.0, f"all {len(members)} rewards {what}", spread)
  return None


def _normalised(members: Sequence[float], spread: float) -> list[float]:
  """Returns rewards as (r - max) / range, in [-1, 0]; all 0 where there is no range."""
  highest = max(members, default=0.0)
  return [(reward - highest) / spread if spread else 0.0 for reward in members]


def _weights(x: Sequence[float], beta: float) -> list[float]:
  # math.exp, not np.exp: vector code may round an element by where it stands.
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
  # fsum rounds the exact sum, so that taking e_n off again leaves exactly the others.
  others = [math.fsum([*weights, -e]) / num_others for e in weights]
  return [e / max(other, MIN_NORMALISER) - 1 for e, other in zip(weights, others)]


def _checked(rewards: ArrayLike, name: str) -> np.ndarray:
  """Returns rewards as f64[b, g], or refuses them."""
  array = np.asarray(rewards, np.float64)
  if array.ndim != 2:
    raise ValueError(
      f"{name}: got rewards of shape {array.shape}, expected [b, g], one row per group; stack"
      " RolloutGroup.rewards."
    )
  if array.shape[1] < MIN_GROUP:
    raise ValueError(
      f"{name}: got groups of {array.shape[1]} rewards, expected at least {MIN_GROUP}: the"
      " advantage of one among two or three explodes; set RolloutConfig.group_size to 8 or more."
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
        f"{name}: got rewards from {min(row)} to {max(row)} in group {group}, expected a range that"
        " is finite; scale them down, their scale does not matter."
      )
  return array


def _check_divergence(divergence: float, name: str) -> None:
  if not 0 < divergence < math.inf:
    raise ValueError(
      f"{name}: got divergence={divergence}, expected 0 < divergence < inf, nats; ln 2 is"
      " published."
    )


def _mask(mask: ArrayLike, shape: tuple[int, ...], name: str) -> np.ndarray:
  """Returns a mask as bool of the shape that it should have."""
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
  """Returns (log-probability minus base's as f64, 0 off the mask; the mask as bool)."""
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
      " mask out what the policy did not choose."
    )


def _mean(values: np.ndarray, chosen: np.ndarray) -> float:
  """Returns the mean over the mask, its sum rounded once; 0 of nothing."""
  num = int(chosen.sum())
  return math.fsum(values[chosen].tolist()) / num if num else 0.0
