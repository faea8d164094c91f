"""Metrics of a step's rollouts and gaps, and the contents of summary.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import resource
import time
from typing import Any

import jax
import numpy as np

from seerjax import metrics
from seerjax.run import energy
from seerjax.trainer import step as step_lib
from seerjax.types import RolloutGroup, TokenScores, TrainBatch, Verdict


def of_rollouts(groups: Sequence[RolloutGroup]) -> dict[str, float]:
  """Returns the metrics of a step's judged groups, for metrics.jsonl."""
  rollouts = [rollout for group in groups for rollout in group.rollouts]
  lengths = np.asarray([len(rollout.completion.tokens) for rollout in rollouts])
  spread = [float(np.ptp(group.rewards)) > 0 for group in groups]
  return {
    "rollout/reward_mean": float(np.mean([r.verdict.reward for r in rollouts], dtype=np.float64)),
    "rollout/accuracy": float(np.mean([r.verdict.correct for r in rollouts])),
    "rollout/well_formed": float(np.mean([r.verdict.well_formed for r in rollouts])),
    "rollout/ended": float(np.mean([r.completion.finish_reason == "stop" for r in rollouts])),
    "rollout/informative_groups": float(np.mean(spread)),
    "rollout/length_mean": float(lengths.mean()),
    "rollout/length_p99": float(np.quantile(lengths, 0.99)),
  } | {f"rollout/{name}": mean for name, mean in part_means([r.verdict for r in rollouts]).items()}


def of_gradient(start: str, means: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the metrics of `Trainer.gradient` with names that begin with `start`.

  Scalars become floats; counts of tokens by expert stay arrays, i[n].
  """
  return {
    start + name: value if isinstance(value, np.ndarray) and value.ndim else float(value)
    for name, value in means.items()
  }


def of_gaps(scores: Sequence[TokenScores], batches: Sequence[TrainBatch]) -> dict[str, float]:
  """Returns the metrics of a step's gaps between engine and trainer.

  Each is that of `trainer.step.rollout_gap` for the mini-batch where it is farthest from zero.
  """
  gaps = [step_lib.rollout_gap(of, batch) for of, batch in zip(scores, batches, strict=True)]
  return {f"rollout_train/{name}": max((gap[name] for gap in gaps), key=abs) for name in gaps[0]}


def part_means(verdicts: Sequence[Verdict]) -> dict[str, float]:
  """Returns "part/NAME" -> unweighted mean of a part, over the verdicts that have it."""
  names = sorted({name for verdict in verdicts for name in verdict.parts})
  return {
    f"part/{name}": float(
      np.mean([one.parts[name] for one in verdicts if name in one.parts], dtype=np.float64)
    )
    for name in names
  }


def of_run(
  before: dict[str, float], after: dict[str, float], rows: Sequence[dict[str, Any]]
) -> dict[str, Any]:
  """Returns the entries of summary.json that come from evaluations and metrics."""

  def highest(name: str) -> float:
    return max((abs(metrics.decode_number(row[name])) for row in rows), default=0.0)

  def mean(name: str) -> float:
    return float(np.mean([row[name] for row in rows])) if rows else 0.0

  # Total tokens by total time: steps that a resumed run read from its journal count with almost no
  # time and no tokens.
  seconds = sum(row["rollout/seconds"] for row in rows)
  sampled = sum(row["rollout/seconds"] * row["rollout/tokens_per_second"] for row in rows)
  return dict(
    **gains(before, after),
    well_formed_before=before["well_formed"],
    well_formed_after=after["well_formed"],
    accuracy_well_formed_before=before["accuracy_well_formed"],
    accuracy_well_formed_after=after["accuracy_well_formed"],
    ended_before=before["ended"],
    ended_after=after["ended"],
    max_abs_logprob_gap=max(
      highest("rollout_train/max_abs_logprob_gap"), highest("rollout_train/max_abs_raw_logprob_gap")
    ),
    kl_max=max(highest("rollout_train/kl"), highest("rollout_train/raw_kl")),
    tokens_per_second=sampled / max(seconds, 1e-9),
    length_mean=mean("rollout/length_mean"),
    length_p99=max((row["rollout/length_p99"] for row in rows), default=0.0),
  )


def gains(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
  """Returns accuracy and mean reward before and after, and their gains with 95 % intervals."""

  def gain(name: str, error_name: str) -> tuple[float, list[float]]:
    gained = after[name] - before[name]
    # Both evaluations use the same problems; unpaired errors give the wider interval.
    error = float(np.hypot(after[error_name], before[error_name]))
    return gained, [gained - 1.96 * error, gained + 1.96 * error]

  gained, interval = gain("accuracy", "standard_error")
  found: dict[str, Any] = dict(
    accuracy_before=before["accuracy"],
    accuracy_after=after["accuracy"],
    gain=gained,
    gain_interval_95=interval,
  )
  if "reward" in before and "reward" in after:  # Runs from earlier versions have no reward.
    gained, interval = gain("reward", "reward_standard_error")
    found |= dict(
      reward_before=before["reward"],
      reward_after=after["reward"],
      reward_gain=gained,
      reward_gain_interval_95=interval,
    )
  return found


class RunClock:
  """Measures a run across restarts: seconds, XLA compilation time, peak memory, and joules.

  Each checkpoint stores the values so far (`read`), and a resumed run continues from them
  (`carry_on`). Work lost to a kill since the last checkpoint is not counted.
  """

  def __init__(self):
    self._before = dict(seconds=0.0, compile_seconds=0.0, peak_memory_gib=0.0, joules=0.0)
    self._meter = energy.Meter()
    self._started = time.monotonic()
    self._compile_seconds = 0.0
    jax.monitoring.register_event_duration_secs_listener(self._add_compile_seconds)

  def _add_compile_seconds(self, event: str, duration_secs: float, **_: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
      self._compile_seconds += duration_secs

  def carry_on(self, before: Mapping[str, float]) -> None:
    """Continues from the last values of the previous process."""
    self._before |= before  # Has no joules if they were not readable.

  @property
  def joules(self) -> float | None:
    """Joules of all processes so far; None if not readable (see `energy`)."""
    joules = self._meter.read()
    return None if joules is None else self._before["joules"] + joules

  def read(self) -> dict[str, float]:
    """Returns seconds, compile_seconds, peak_memory_gib, and joules if readable."""
    # Linux reports ru_maxrss in KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return dict(
      seconds=self._before["seconds"] + time.monotonic() - self._started,
      compile_seconds=self._before["compile_seconds"] + self._compile_seconds,
      peak_memory_gib=max(self._before["peak_memory_gib"], peak),
    ) | ({} if (joules := self.joules) is None else dict(joules=joules))
