"""Fits a workload's free parameters to the published results of the baseline only.

Newton's method on logarithms: parameters and targets are positive, and errors relative.

    Workload.free: two or three of fixed_seconds, sigma, memory_share
      -> total seconds, tail share [, preemptions per request, where published]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses

import numpy as np

from seerjax.rollout import policies
from seerjax.simulate import cluster
from seerjax.simulate.workloads import Workload

_DIFFERENCE = 0.04  # Step of a logarithm for slopes; large, since preemptions are discontinuous.
_MOST_CHANGE = 0.3  # Maximum change of a logarithm per iteration.


def baseline_columns(workload: Workload, seeds: Sequence[int]) -> dict[str, float]:
  """Returns the baseline's seconds, tail share and preemptions per request; mean over seeds."""
  results = []
  for seed in seeds:
    sampled = workload.lengths(seed)
    result = cluster.Simulation(
      workload.cluster(), policies.GroupFCFS(), sampled, max_tokens=workload.max_tokens
    ).run()
    tail = result.tail_seconds / result.total_seconds
    results.append((result.total_seconds, tail, result.num_preemptions / sampled.size))
  seconds, tail, preemptions = np.mean(results, axis=0).tolist()
  return {"seconds": seconds, "tail_share": tail, "preemptions": preemptions}


def targets(workload: Workload) -> dict[str, float]:
  """Returns the published results of the baseline, with the names of `baseline_columns`."""
  published = workload.published
  found = {"seconds": published.baseline_seconds, "tail_share": published.tail_share}
  if published.preemptions is not None:
    found["preemptions"] = published.preemptions
  return found


def fit(
  workload: Workload,
  seeds: Sequence[int],
  *,
  num_steps: int = 6,
  on_step: Callable[[Workload, dict[str, float]], None] = lambda workload, columns: None,
) -> Workload:
  """Returns the workload with the best parameters that Newton's method found.

  Raises:
    ValueError: if the numbers of free parameters and of published results differ.
  """
  aims = targets(workload)
  names = workload.free
  if len(names) != len(aims):
    raise ValueError(
      f"calibration: got the free parameters {names} of {workload.name}, expected {len(aims)}, one"
      f" for each of {', '.join(aims)}; fix or free some in Workload.free."
    )
  values = np.log([_value(workload, name) for name in names])
  best, best_error = workload, np.inf
  for _ in range(num_steps):
    current = _with(workload, names, values)
    columns = baseline_columns(current, seeds)
    on_step(current, columns)
    errors = _errors(columns, aims)
    if np.abs(errors).max() < best_error:
      best, best_error = current, np.abs(errors).max()
    slopes = np.zeros((len(aims), len(names)))
    for i in range(len(names)):
      moved = values.copy()
      # Downwards, because memory_share must not exceed 1.
      moved[i] -= _DIFFERENCE
      slopes[:, i] = errors - _errors(baseline_columns(_with(workload, names, moved), seeds), aims)
    change = np.linalg.lstsq(slopes / _DIFFERENCE, -errors, rcond=None)[0]
    values = values + np.clip(change, -_MOST_CHANGE, _MOST_CHANGE)
    values = np.minimum(values, [np.inf if name != "memory_share" else 0.0 for name in names])
  return best


def _value(workload: Workload, name: str) -> float:
  return dataclasses.asdict(workload.fitted)[name]


def _with(workload: Workload, names: Sequence[str], logs: np.ndarray) -> Workload:
  changed = dict(zip(names, np.exp(logs).tolist()))
  return dataclasses.replace(workload, fitted=dataclasses.replace(workload.fitted, **changed))


def _errors(columns: dict[str, float], aims: dict[str, float]) -> np.ndarray:
  return np.log([max(columns[name], 1e-3) / aims[name] for name in aims])
