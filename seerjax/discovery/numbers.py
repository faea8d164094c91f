"""Metrics of the search, and CPU seconds of a discovery."""

from __future__ import annotations

from collections.abc import Mapping
import time
from typing import Any

import numpy as np

from seerjax.discovery import (
  archive as archive_lib,
  attempts as attempts_lib,
  environment as environment_lib,
)
from seerjax.discovery.attempts import Sampled, Writer
from seerjax.discovery.config import DiscoverConfig
from seerjax.discovery.edit_policy import EditPolicy
from seerjax.discovery.environment import Environment

# Percentiles logged of a step's rewards.
REWARD_PERCENTS = (0, 10, 25, 50, 75, 90, 100)

# Metrics on the progress bar, with digits: records differ in the seventh digit and beyond.
CONSOLE_DIGITS = {
  "search/best": 9,
  "search/gain": 9,
  "search/archive_size": 4,
  "objective/beta": 4,
  "objective/kl_to_base": 4,
  "search/tokens": 9,
}


def remark_on(writer: Writer, sampled: Sampled) -> str:
  """Returns a message about a step's attempts that the metrics do not show; "" if there is none."""
  attempts = [attempt for group in sampled.attempts for attempt in group]
  failed = [attempt for attempt in attempts if attempt.status == "failed"]
  if failed and isinstance(writer, EditPolicy):  # Programs may fail; a language should not.
    return f"{len(failed)} sentences failed, the first: {failed[0].message}"
  if not any(attempt.score.is_valid for attempt in attempts):
    return f"none of {len(attempts)} attempts is valid, the first: {attempts[0].score.reason}"
  return ""


class CpuMeter:
  """Counts CPU seconds of this process and of those that make and judge attempts."""

  def __init__(self, environment: Environment):
    """Starts counting."""
    self._environment = environment
    helped = environment_lib.helper_seconds(environment)
    self._all, self._judged = time.process_time() + helped, helped

  def spent(self, writer: Writer) -> tuple[float, float]:
    """Returns the seconds since the last call: (total, of attempts)."""
    helped = environment_lib.helper_seconds(self._environment)
    now = time.process_time() + writer.worker_seconds + helped
    judged = writer.cpu_seconds + helped
    found = now - self._all, judged - self._judged
    self._all, self._judged = now, judged
    return found


def first_totals(archive: archive_lib.Archive) -> dict[str, float]:
  """Returns the totals of a new run."""
  start = archive_lib.best(archive).value
  return dict(tokens=0, cpu_seconds=0.0, judge_cpu_seconds=0.0, start=start, best=start)


def totals_after(
  totals: dict[str, float],
  sampled: Sampled,
  archive: archive_lib.Archive,
  spent: tuple[float, float],
) -> dict[str, float]:
  """Returns a run's totals after a step.

  Args:
    totals: totals before the step.
    sampled: attempts of the step.
    archive: archive after the step.
    spent: result of `CpuMeter.spent`.
  """
  tokens = sum(len(sequence.completion.tokens) for sequence in attempts_lib.sequences(sampled))
  return dict(
    tokens=totals["tokens"] + tokens,
    cpu_seconds=totals["cpu_seconds"] + spent[0],
    judge_cpu_seconds=totals["judge_cpu_seconds"] + spent[1],
    start=totals["start"],
    best=max(totals["best"], archive_lib.best(archive).value),
  )


def of_search(
  environment: Environment,
  before: archive_lib.Archive,
  after: archive_lib.Archive,
  sampled: Sampled,
  totals: dict[str, float],
) -> dict[str, float]:
  """Returns the metrics of a step's search; `totals` are those after the step."""
  scores = [a.score for group in sampled.attempts for a in group]
  rewards = [score.reward for score in scores]
  values = [score.value for score in scores if score.is_valid]
  numbers = {
    "search/best": environment_lib.signed(environment, totals["best"]),
    "search/gain": totals["best"] - totals["start"],
    "search/archive_size": float(len(after.states)),
    "search/seed_trees_alive": float(archive_lib.num_seed_trees_alive(after)),
    "search/valid_rate": len(values) / len(scores),
    "search/reward_mean": float(np.mean(rewards)),
    "search/replanted": float(len({*after.roots} - {*before.roots})),
    "search/tokens": float(totals["tokens"]),
    "search/cpu_seconds": totals["cpu_seconds"],
  }
  for percent, reward in zip(REWARD_PERCENTS, np.percentile(rewards, REWARD_PERCENTS)):
    numbers[f"search/reward_p{percent}"] = float(reward)
  if values:
    quantiles = np.quantile(values, (0.1, 0.5, 0.9))
    numbers |= {
      f"search/value_{name}": float(value)
      for name, value in zip(("p10", "median", "p90"), quantiles)
    }
  return numbers


def of_run(
  config: DiscoverConfig,
  environment: Environment,
  best: Mapping[str, Any],
  score: environment_lib.Score,
  totals: dict[str, float],
  num_steps: int,
) -> dict[str, Any]:
  """Returns the summary of a run's search."""
  return dict(
    problem=environment.name,
    best=score.value,
    start=environment_lib.signed(environment, totals["start"]),
    certificate=score.certificate,
    attempts=num_steps * config.prompts_per_step * config.group_size,
    tokens=totals["tokens"],
    cpu_seconds=totals["cpu_seconds"],
    judge_cpu_seconds=totals["judge_cpu_seconds"],
    lineage=len(best["lineage"]),
    found_in_step=best["step"],
  )
