"""Advantages from the rewards of groups.

Everything here runs on the host. Rewards are read as float32; sums use `math.fsum`, which rounds
the exact sum once and so does not depend on the order of its terms; the rest is float64, and the
result is cast to float32. Hence the advantages of a batch are equal, bit for bit, for any order in
which rollouts complete, groups are listed, or members are numbered; and a group of equal rewards
has advantages of exactly 0.

  grpo            (r - mean of its group) / (standard deviation of its group + eps)
  dr_grpo          r - mean of its group
  rloo             r - mean of the others in its group
  mean_baseline    r - mean of the whole batch

The entropic objective is in `entropic`: it reads rewards as float64, so it also distinguishes
rewards that are ties here (relative differences below about 1e-7).
"""

from __future__ import annotations

import math

from jax.typing import ArrayLike
import numpy as np

from seerjax.array_typing import GroupRewards


def for_algorithm(algorithm: str, rewards: ArrayLike) -> GroupRewards:
  """Returns the advantages for an algorithm of `losses.LossConfig.algorithm`.

  Args:
    algorithm: "grpo", "dapo" and "gspo" use `grpo`; "dr_grpo" and "rloo" their own function.
    rewards: f32[b, g].

  Returns:
    f32[b, g].

  Raises:
    ValueError: if the algorithm is unknown, or as the chosen function.
  """
  match algorithm:
    case "grpo" | "dapo" | "gspo":
      return grpo(rewards)
    case "dr_grpo":
      return dr_grpo(rewards)
    case "rloo":
      return rloo(rewards)
    case _:
      raise ValueError(
        f"advantages.for_algorithm: got {algorithm!r}, expected 'grpo', 'dr_grpo', 'dapo', 'gspo'"
        " or 'rloo'; set LossConfig.algorithm to one of them, or call an advantage function"
        " directly."
      )


def grpo(rewards: ArrayLike, *, eps: float = 1e-6) -> GroupRewards:
  """Returns each reward, standardised within its group.

    (r - mean) / (std + eps),  std = sqrt(mean of (r - mean)^2)

  Uses the population deviation (divides by g, not by g - 1), so that without `eps` the mean square
  of a group's advantages is 1.

  Args:
    rewards: f32[b, g], one row per prompt, in reward units (higher is better).
    eps: in reward units, added to the deviation. It limits the advantage if rewards differ little:
      differences far below `eps` fade out instead of being scaled up to 1.

  Returns:
    f32[b, g]; a row of equal rewards is exactly 0.

  Raises:
    ValueError: if `g < 2`, a reward is not finite, or `eps` is not a positive number.

  Source: Shao et al. 2024 (GRPO), https://arxiv.org/abs/2402.03300, section 4.1.
  """
  if not 0.0 < eps < math.inf:
    raise ValueError(
      f"grpo: got eps={eps}, expected 0 < eps < inf (a group of equal rewards divides by it);"
      " 1e-6 is usual."
    )
  checked = _checked(rewards, "grpo")
  centred = checked - _group_means(checked)
  deviation = np.sqrt(_group_means(centred * centred))
  return (centred / (deviation + eps)).astype(np.float32)


def dr_grpo(rewards: ArrayLike) -> GroupRewards:
  """Returns each reward minus the mean of its group, its own reward included.

  Without the division by the deviation, nearly solved or nearly unsolvable groups get no extra
  weight.

  Args:
    rewards: f32[b, g], one row per prompt, in reward units (higher is better).

  Returns:
    f32[b, g]; every row sums to zero up to rounding.

  Raises:
    ValueError: if `g < 2` or a reward is not finite.

  Source: Liu et al. 2025 (Dr. GRPO), https://arxiv.org/abs/2503.20783, section 3.2.
  """
  checked = _checked(rewards, "dr_grpo")
  return (checked - _group_means(checked)).astype(np.float32)


def rloo(rewards: ArrayLike) -> GroupRewards:
  """Returns each reward minus the mean of the other rewards in its group.

  Equal to `dr_grpo` times g / (g - 1).

  Args:
    rewards: f32[b, g], one row per prompt, in reward units (higher is better).

  Returns:
    f32[b, g]; every row sums to zero up to rounding.

  Raises:
    ValueError: if `g < 2`, where "the other rewards" is an empty set, or a reward is not finite.

  Source: Ahmadian et al. 2024 (RLOO), https://arxiv.org/abs/2402.14740.
  """
  checked = _checked(rewards, "rloo")
  group_size = checked.shape[1]
  total = _group_means(checked) * group_size
  return (checked - (total - checked) / (group_size - 1)).astype(np.float32)


def mean_baseline(rewards: ArrayLike) -> GroupRewards:
  """Returns each reward minus the mean of all rewards of the batch.

  The only baseline that needs no group: a prompt may have a single rollout.

  Args:
    rewards: f32[b, g], in reward units (higher is better), at least two in all.

  Returns:
    f32[b, g]; sums to zero over the batch, up to rounding.

  Raises:
    ValueError: if there are fewer than two rewards, or one is not finite.

  Source: Williams 1992 (REINFORCE), https://doi.org/10.1007/BF00992696.
  """
  checked = _checked(rewards, "mean_baseline", min_group_size=1)
  if checked.size < 2:
    raise ValueError(
      f"mean_baseline: got rewards of shape {checked.shape}, expected at least 2 in all (one reward"
      " is its own mean); raise the number of prompts or RolloutConfig.group_size."
    )
  return (checked - math.fsum(checked.ravel()) / checked.size).astype(np.float32)


def overlong_penalty(lengths: ArrayLike, *, max_tokens: int, buffer: int) -> np.ndarray:
  """Returns DAPO's penalty, which is added to the reward of a long completion.

    0                                    length <= max_tokens - buffer
    (max_tokens - buffer - length) / buffer      between
    -1                                   length > max_tokens

  Args:
    lengths: i32[...], numbers of generated tokens.
    max_tokens: length at which the penalty reaches -1.
    buffer: tokens before `max_tokens` over which the penalty grows.

  Returns:
    f32[...], in [-1, 0], in reward units: `rewards + overlong_penalty(...)`.

  Raises:
    ValueError: if not `1 <= buffer <= max_tokens`.

  Source: Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476, equation 13.
  """
  if not 1 <= buffer <= max_tokens:
    raise ValueError(
      f"overlong_penalty: got buffer={buffer} with max_tokens={max_tokens}, expected"
      " 1 <= buffer <= max_tokens; a fifth of max_tokens is usual."
    )
  left = (max_tokens - buffer) - np.asarray(lengths, np.float64)
  return np.clip(left / buffer, -1.0, 0.0).astype(np.float32)


def _checked(rewards: ArrayLike, name: str, *, min_group_size: int = 2) -> np.ndarray:
  """Returns rewards as float64[b, g], each exactly a float32; raises if they are invalid."""
  given = np.asarray(rewards)
  with np.errstate(over="ignore"):  # Rejected below, with the original value.
    array = given.astype(np.float32)
  if array.ndim != 2:
    raise ValueError(
      f"{name}: got rewards of shape {array.shape}, expected [b, g], one row per prompt; stack"
      " RolloutGroup.rewards."
    )
  if array.shape[1] < min_group_size:
    raise ValueError(
      f"{name}: got rewards of shape {array.shape}, expected at least {min_group_size} rollouts on"
      " the last axis; set RolloutConfig.group_size >= 2, or use mean_baseline."
    )
  if not np.isfinite(array).all():
    group, member = np.argwhere(~np.isfinite(array))[0]
    raise ValueError(
      f"{name}: got reward {given[group, member]} for group {group}, member {member}, expected a"
      " finite float32; fix the task's verdict for that text, or scale its rewards down."
    )
  return array.astype(np.float64)


def _group_means(values: np.ndarray) -> np.ndarray:
  """Returns the mean of each row as float64[b, 1], with its sum rounded once."""
  means = [math.fsum(row) / values.shape[1] for row in values]
  return np.asarray(means, np.float64).reshape(-1, 1)
