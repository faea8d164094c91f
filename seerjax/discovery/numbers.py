"""A step's numbers of the search, and the CPU seconds that a discovery counts."""

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

# Of a step's rewards: their distribution, from the least to the most.
REWARD_PERCENTS = (0, 10, 25, 50, 75, 90, 100)

# What the progress bar shows, with how many digits: records differ in the seventh and beyond.
CONSOLE_DIGITS = {
  "search/best": 9,
  "search/gain": 9,
  "search/archive_size": 4,
  "objective/beta": 4,
  "objective/kl_to_base": 4,
  "search/tokens": 9,
}


def remark_on(writer: Writer, sampled: Sampled) -> str:
  """Returns what a user should know of a step's attempts and no number tells; "" if nothing."""
  attempts = [attempt for group in sampled.attempts for attempt in group]
  failed = [attempt for attempt in attempts if attempt.status == "failed"]
  if failed and isinstance(writer, EditPolicy):  # Programs fail, languages should not.
    return f"{len(failed)} sentences failed, the first: {failed[0].message}"
  if not any(attempt.score.is_valid for attempt in attempts):
    return f"none of {len(attempts)} attempts is valid, the first: {attempts[0].score.reason}"
  return ""


class CpuMeter:
  """Counts the CPU seconds of a discovery: this process, and those that make and judge attempts."""

  def __init__(self, environment: Environment):
    """Begins to count."""
    self._environment = environment
    helped = environment_lib.helper_seconds(environment)
    self._all, self._judged = time.process_time() + helped, helped

  def spent(self, writer: Writer) -> tuple[float, float]:
    """Returns the seconds since it was asked last: in all, and of attempts alone."""
    helped = environment_lib.helper_seconds(self._environment)
    now = time.process_time() + writer.worker_seconds + helped
    judged = writer.cpu_seconds + helped
    found = now - self._all, judged - self._judged
    self._all, self._judged = now, judged
    return found


def first_totals(archive: archive_lib.Archive) -> dict[str, float]:
  """Returns what a run counts from its first step on, as it begins."""
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
    totals: before it.
    sampled: its attempts.
    archive: after it.
    spent: of `CpuMeter`.
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
  """Returns a step's numbers of the search; `totals` are those after it."""
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
  """Returns the numbers of a run's search.

  Args:
    config: of the run.
    environment: its problem.
    best: the record of its best artefact.
    score: of that.
    totals: after the last step.
    num_steps: that were taken.
  """
  return dict(
    problem=environment.name,
    best=score.value,
    start=environment_lib.signed(environment, totals["start"]),
    certificate=score.certificate,
    attempts=num_steps * config.groups_per_step * config.group_size,
    tokens=totals["tokens"],
    cpu_seconds=totals["cpu_seconds"],
    judge_cpu_seconds=totals["judge_cpu_seconds"],
    lineage=len(best["lineage"]),
    found_in_step=best["step"],
  )
