"""A step's numbers of the search, and the CPU seconds that a discovery counts."""

from __future__ import annotations

import time

import numpy as np

from seerjax.discovery import (
  archive as archive_lib,
  environment as environment_lib,
)
from seerjax.discovery.attempts import Sampled, Writer
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


def of_search(
  environment: Environment,
  after: archive_lib.Archive,
  sampled: Sampled,
  totals: dict[str, float],
) -> dict[str, float]:
  """Returns a step's numbers of the search; `totals` has the first and the best value so far."""
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


def cpu_seconds(environment: Environment, writer: Writer) -> float:
  """Returns the CPU seconds of this process, and of those that make and judge its attempts."""
  return time.process_time() + writer.worker_seconds + environment_lib.helper_seconds(environment)


def judge_cpu_seconds(environment: Environment, writer: Writer) -> float:
  """Returns the CPU seconds of attempts, in whatever process."""
  return writer.cpu_seconds + environment_lib.helper_seconds(environment)
