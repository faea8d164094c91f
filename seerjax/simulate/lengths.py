"""How long requests turn out: generated with a chosen likeness within groups, or read from traces.

    ln L = mu + sigma * (sqrt(rho) * Z_group + sqrt(1 - rho) * E_request),  1 <= L <= max_tokens

`rho` is the share of the variance of ln L that lies between groups. Measured on public traces: 0.05
to 0.1 for base models and short answers, 0.7 to 0.9 for long reasoning.

Source: PolyTrace (arXiv 2509.25279) and TailSieve for the measured shares.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import statistics

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthsConfig:
  """A population of lengths.

  Attributes:
    num_groups: prompts.
    group_size: requests of a prompt.
    mean_tokens: of the clipped lengths; what `mu` follows from.
    max_tokens: cap.
    sigma: standard deviation of ln L before clipping.
    rho: share of its variance between groups.
  """

  num_groups: int
  group_size: int
  mean_tokens: float
  max_tokens: int
  sigma: float
  rho: float

  def __post_init__(self):
    if self.num_groups < 1 or self.group_size < 1 or self.sigma <= 0 or not 0 <= self.rho <= 1:
      raise ValueError(
        f"LengthsConfig: got num_groups={self.num_groups}, group_size={self.group_size},"
        f" sigma={self.sigma}, rho={self.rho}, expected at least 1 and 1, sigma > 0 and rho in"
        " [0, 1]; sigma 0.8 and rho 0.8 are usual."
      )
    if not 1 < self.mean_tokens < self.max_tokens:
      raise ValueError(
        f"LengthsConfig: got mean_tokens={self.mean_tokens} and max_tokens={self.max_tokens},"
        " expected a mean between 1 and the cap; raise max_tokens."
      )


def generate(config: LengthsConfig, seed: int) -> np.ndarray:
  """Returns i64[num_groups, group_size] lengths.

  The groups' normals are the quantiles of their law in random order, so that two seeds differ in
  who is long, and hardly in how many are.
  """
  rng = np.random.default_rng(seed)
  normal = statistics.NormalDist()
  count = config.num_groups
  quantiles = np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
  between = rng.permutation(quantiles)[:, None]
  within = rng.standard_normal((count, config.group_size))
  spread = math.sqrt(config.rho) * between + math.sqrt(1 - config.rho) * within
  lengths = np.exp(log_mean(config) + config.sigma * spread)
  return np.clip(np.rint(lengths), 1, config.max_tokens).astype(np.int64)


def log_mean(config: LengthsConfig) -> float:
  """Returns the mu at which clipped lengths have the mean that is asked for."""
  low, high = 0.0, math.log(config.max_tokens) + 10 * config.sigma
  for _ in range(100):
    middle = (low + high) / 2
    if _clipped_mean(middle, config.sigma, config.max_tokens) < config.mean_tokens:
      low = middle
    else:
      high = middle
  return (low + high) / 2


def within_share(lengths: np.ndarray) -> float:
  """Returns the intraclass correlation of ln L of i64[g, n] lengths: what `rho` was, if generated.

  Raises:
    ValueError: if there are fewer than two groups, or groups of one.
  """
  groups, size = lengths.shape
  if groups < 2 or size < 2:
    raise ValueError(
      f"within_share: got {groups} groups of {size}, expected at least 2 of at least 2; one length"
      " a prompt says nothing about likeness."
    )
  logs = np.log(lengths)
  means = logs.mean(1)
  between = size * ((means - logs.mean()) ** 2).sum() / (groups - 1)
  within = ((logs - means[:, None]) ** 2).sum() / (groups * (size - 1))
  total = between + (size - 1) * within
  return float((between - within) / total) if total > 0 else 1.0


def read_trace(path: str | os.PathLike[str]) -> np.ndarray:
  """Returns i64[g, n] lengths of a public per-prompt trace: JSON lines with a list `output` each.

  Other fields (`step`, `ranks`, `local_index`, `input`, `n_sampling`) are not read.

  Raises:
    ValueError: naming the line that is not a prompt's list of positive lengths, or differs in
      their number from the first.
  """
  path = pathlib.Path(path)
  rows: list[list[int]] = []
  for number, line in enumerate(path.read_text().splitlines(), start=1):
    if not line.strip():
      continue
    row = _outputs(line)
    if not row or len(row) != len(rows[0] if rows else row):
      raise ValueError(
        f"{path}: got {line[:60]!r} in line {number}, expected JSON with a list 'output' of"
        f" {len(rows[0]) if rows else 'some'} positive lengths; mend or drop that line."
      )
    rows.append(row)
  if not rows:
    raise ValueError(f"{path}: got no line, expected one a prompt; is this the right file?")
  return np.array(rows, np.int64)


def _outputs(line: str) -> list[int]:
  """Returns the lengths of a line of a trace, none if it is not one."""
  try:
    lengths = json.loads(line)["output"]
  except (ValueError, KeyError, TypeError):
    return []
  is_list = isinstance(lengths, list) and all(type(n) is int and n > 0 for n in lengths)
  return lengths if is_list else []


def _clipped_mean(mu: float, sigma: float, cap: int) -> float:
  cdf = statistics.NormalDist().cdf
  border = (math.log(cap) - mu) / sigma
  return math.exp(mu + sigma * sigma / 2) * cdf(border - sigma) + cap * (1 - cdf(border))
