"""Simulates off-policy baselines: one step off, and partial rollouts.

    synchronous     rollout of step k, then training on it, on all devices
    one step off    rollout of step k + 1 on some devices, during training on step k on the others
    partial         more groups are started than needed; once enough are complete, the others keep
                    their tokens and continue in the next step under its new weights

Source: arXiv 2511.14617v3, section 4.4 (partial rollout as in APRIL, 2x); TailSieve and others for
one step off.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import numpy as np

from seerjax.rollout import policies
from seerjax.simulate import cluster, workloads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
  """Cost of one training step, and age of its data.

  Attributes:
    seconds: rollout and training together.
    stale_share: share of the trained tokens that were sampled from older weights.
    mean_tokens: mean length of the trained responses.
  """

  seconds: float
  stale_share: float
  mean_tokens: float


def training_seconds(workload: workloads.Workload) -> float:
  """Returns the time outside the rollout in the baseline's iteration, on all devices."""
  share = workload.rollout_share
  return workload.published.baseline_seconds * (1 - share) / share


def synchronous(workload: workloads.Workload, policy: policies.Policy, seed: int) -> Step:
  """Returns a step of the synchronous loop."""
  lengths = workload.lengths(seed)
  result = cluster.Simulation(
    workload.cluster(), policy, lengths, max_tokens=workload.max_tokens
  ).run()
  return Step(
    seconds=result.total_seconds + training_seconds(workload),
    stale_share=0.0,
    mean_tokens=float(lengths.mean()),
  )


def one_step_off(
  workload: workloads.Workload,
  policy: policies.Policy,
  seed: int,
  shares: Sequence[float] = (0.5, 0.625, 0.75, 0.875),
) -> Step:
  """Returns a step with the best of several shares of the instances for the rollout.

  Training on a part of the devices takes proportionally longer; every token is one step old.
  """
  lengths = workload.lengths(seed)
  best = np.inf
  for share in shares:
    count = max(1, min(round(workload.data_parallel_size * share), workload.data_parallel_size - 1))
    machines = dataclasses.replace(workload.cluster(), data_parallel_size=count)
    result = cluster.Simulation(machines, policy, lengths, max_tokens=workload.max_tokens).run()
    left = (workload.data_parallel_size - count) / workload.data_parallel_size
    best = min(best, max(result.total_seconds, training_seconds(workload) / left))
  return Step(seconds=float(best), stale_share=1.0, mean_tokens=float(lengths.mean()))


def partial(
  workload: workloads.Workload,
  policy: policies.Policy,
  seeds: Sequence[int],
  oversample: float = 2.0,
) -> list[Step]:
  """Returns one step per seed, in sequence; unfinished groups continue in the next step.

  Args:
    workload: a step needs `num_groups` complete groups.
    policy: scheduling policy.
    seeds: seeds of the lengths of new groups.
    oversample: number of groups started, relative to those needed; at least 1.

  Raises:
    ValueError: if `oversample` is below 1.
  """
  if oversample < 1:
    raise ValueError(f"partial: got oversample={oversample}, expected at least 1; APRIL uses 2.")
  needed = workload.num_groups
  lengths = np.zeros((0, workload.group_size), np.int64)
  generated = np.zeros_like(lengths)
  steps = []
  for seed in seeds:
    wide = dataclasses.replace(workload, num_groups=round(oversample * needed))
    fresh = wide.lengths(seed)[: wide.num_groups - len(lengths)]
    lengths = np.concatenate([lengths, fresh])
    old = np.concatenate([generated, np.zeros_like(fresh)])
    result = cluster.Simulation(
      workload.cluster(),
      policy,
      lengths,
      max_tokens=workload.max_tokens,
      generated=old,
      stop_after_groups=needed,
    ).run()
    generated = old.copy()
    for request_id, tokens in result.generated.items():
      group, member = map(int, request_id.split("/"))
      generated[group, member] = tokens
    is_whole = (generated >= lengths).all(1)
    steps.append(
      Step(
        seconds=result.total_seconds + training_seconds(workload),
        stale_share=float(old[is_whole].sum() / lengths[is_whole].sum()),
        mean_tokens=float(lengths[is_whole].mean()),
      )
    )
    lengths, generated = lengths[~is_whole], generated[~is_whole]
  return steps
