"""Training objective of a discovery: advantages of a step's attempts."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from seerjax import fields
from seerjax.discovery.attempts import Sampled
from seerjax.trainer import advantages, entropic

OBJECTIVES = ("adaptive", "constant", "mean", "grpo")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
  """Settings of the training objective.

  Attributes:
    kind: "adaptive" solves for beta in each group; "constant" uses `beta`; "mean" is reward minus
      the group's mean; "grpo" divides that by the standard deviation.
    divergence: KL divergence in nats between the tilted and the uniform group, for "adaptive".
    beta: for "constant", applied to rewards divided by their group's range.
    gains_only: labelled deviation from the paper: the reward is the improvement over the start, and
      0 without one. Otherwise a policy that writes edits is rewarded for leaving good artefacts
      unchanged.
    valid_only: labelled deviation from the paper; see `entropic.entropic`.
    max_advantage: upper bound on advantages; 0 for none.
    kl_coefficient: weight of the KL penalty to the first weights, inside the advantage; 0.1 and
      0.01 are published.
  """

  kind: str = "adaptive"
  divergence: float = math.log(2)
  beta: float = 2.0
  gains_only: bool = False
  valid_only: bool = False
  max_advantage: float = 0.0
  kl_coefficient: float = 0.1

  def __post_init__(self):
    fields.check(
      self,
      kind=fields.one_of(OBJECTIVES),
      kl_coefficient=fields.at_least(0, "0 is off"),
      max_advantage=fields.at_least(0, "0 is off"),
      divergence=fields.positive("ln 2 nats is published"),
      beta=fields.at_least(0, "2 is published"),
    )
    if self.kind in ("mean", "grpo") and (self.valid_only or self.max_advantage):
      raise ValueError(
        f"ObjectiveConfig: got kind={self.kind!r} with valid_only={self.valid_only}, max_advantage="
        f"{self.max_advantage}, expected neither: they belong to 'adaptive' and 'constant'."
      )


def objective_of(config: ObjectiveConfig, sampled: Sampled) -> tuple[np.ndarray, dict[str, float]]:
  """Returns the advantages f32[b, g] of a step's attempts, and metrics about them."""
  rewards = np.asarray([[a.score.reward for a in group] for group in sampled.attempts], np.float64)
  valid = np.asarray([[a.score.is_valid for a in group] for group in sampled.attempts])
  if config.gains_only:
    rewards = np.maximum(rewards - np.asarray(sampled.start_rewards)[:, None], 0.0)
  # "mean" and "grpo" do not tilt: beta is 0, and the whole group counts.
  beta = {"adaptive": None, "constant": config.beta}.get(config.kind, 0.0)
  found = entropic.entropic(
    rewards,
    divergence=config.divergence,
    beta=beta,
    valid=valid,
    valid_only=config.valid_only,
    max_advantage=config.max_advantage or None,
  )
  values = found.advantages
  if config.kind in ("mean", "grpo"):
    values = (advantages.dr_grpo if config.kind == "mean" else advantages.grpo)(rewards)
  return values, {
    "objective/beta": float(np.mean(found.beta)),
    "objective/divergence": float(np.mean(found.kl)),
    "objective/effective_samples": float(np.mean(found.effective_samples)),
    "objective/degenerate_groups": float(sum(map(bool, found.reason))),
  }
