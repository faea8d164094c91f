"""Lengths of requests: generated with a given similarity within groups, or read from traces.

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

from seerjax import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthsConfig:
  """A distribution of lengths.

  Attributes:
    num_groups: number of prompts.
    group_size: requests per prompt.
    mean_tokens: mean of the clipped lengths; determines `mu`.
    max_tokens: maximum length.
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
    fields.check(
      self,
      num_groups=fields.at_least(1),
      group_size=fields.at_least(1),
      sigma=fields.positive("0.8 is usual"),
      rho=fields.between(0, 1, "0.8 is usual"),
    )
    if not 1 < self.mean_tokens < self.max_tokens:
      raise ValueError(
        f"LengthsConfig: got mean_tokens={self.mean_tokens} and max_tokens={self.max_tokens},"
        " expected a mean between 1 and the cap; raise max_tokens."
      )


def generate(config: LengthsConfig, seed: int) -> np.ndarray:
  """Returns lengths i64[num_groups, group_size].

  The groups' normals are the quantiles of the distribution in random order, so that seeds differ in
  which groups are long, and hardly in how many are.
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
  """Returns the mu at which clipped lengths have the configured mean."""
  low, high = 0.0, math.log(config.max_tokens) + 10 * config.sigma
  for _ in range(100):
    middle = (low + high) / 2
    if _clipped_mean(middle, config.sigma, config.max_tokens) < config.mean_tokens:
      low = middle
    else:
      high = middle
  return (low + high) / 2


def within_share(lengths: np.ndarray) -> float:
  """Returns the intraclass correlation of ln L for lengths i64[g, n]: an estimate of `rho`.

  Raises:
    ValueError: if there are fewer than two groups, or groups of one.
  """
  groups, size = lengths.shape
  if groups < 2 or size < 2:
    raise ValueError(
      f"within_share: got {groups} groups of {size}, expected at least 2 of at least 2; one length"
      " per prompt does not show similarity."
    )
  logs = np.log(lengths)
  means = logs.mean(1)
  between = size * ((means - logs.mean()) ** 2).sum() / (groups - 1)
  within = ((logs - means[:, None]) ** 2).sum() / (groups * (size - 1))
  total = between + (size - 1) * within
  return float((between - within) / total) if total > 0 else 1.0


def read_trace(path: str | os.PathLike[str]) -> np.ndarray:
  """Reads lengths i64[g, n] from a public trace: JSON lines in either of PolyTrace's formats.

  One line per prompt (`packed_lengths_step_*.jsonl`): a list `output` of its requests' lengths.
  Other fields (`step`, `ranks`, `local_index`, `input`, `n_sampling`) are not read.

  One line per multi-turn request (`multiturn_workload_step_*.jsonl`): its length is the sum of
  `completion_tokens` over its `turns`; requests with equal `step` and `prompt_group_id` form a
  group, ordered by first line. Validation requests are skipped. Tokens added by tools, cached
  tokens and times are not read: a request counts as one generation.

  Raises:
    ValueError: if a line has neither format or not that of the first line, or a group has another
      number of lengths than the first (the message names the line); or if there is no line.
  """
  path = pathlib.Path(path)
  groups: dict[object, list[int]] = {}
  first_lines: dict[object, int] = {}
  has_turns = False
  for number, line in enumerate(path.read_text().splitlines(), start=1):
    if not line.strip():
      continue
    if not groups:
      has_turns = _request(line) is not None
    found = _request(line) if has_turns else _prompt(line, number)
    if found is None:
      raise ValueError(
        f"{path}: got {line[:60]!r} in line {number}, expected JSON with a list 'output' of"
        " positive lengths, or with 'step', 'prompt_group_id', 'validate' and a list 'turns' of"
        " 'completion_tokens', all lines in the same form; fix or remove that line."
      )
    group, lengths = found
    if lengths:
      groups.setdefault(group, []).extend(lengths)
      first_lines.setdefault(group, number)
  if not groups:
    raise ValueError(
      f"{path}: got no line, expected one per prompt; check that this is the right file."
    )
  rows = list(groups.values())
  for group, row in groups.items():
    if len(row) != len(rows[0]):
      raise ValueError(
        f"{path}: got {len(row)} lengths for the prompt that starts in line {first_lines[group]},"
        f" expected {len(rows[0])} as for the first; incomplete files are not read, so remove the"
        " incomplete prompts."
      )
  return np.array(rows, np.int64)


_Found = tuple[object, list[int]] | None  # Key and lengths of a group.


def _prompt(line: str, number: int) -> _Found:
  """Returns all lengths of a prompt from its line; None if the line has another format."""
  try:
    lengths = json.loads(line)["output"]
  except (ValueError, KeyError, TypeError):
    return None
  is_list = isinstance(lengths, list) and all(type(n) is int and n > 0 for n in lengths)
  return (number, lengths) if is_list and lengths else None


def _request(line: str) -> _Found:
  """Returns the length of a multi-turn request from its line; None if it has another format.

  The list of lengths is empty for a validation request.
  """
  try:
    fields = json.loads(line)
    turns = [turn["completion_tokens"] for turn in fields["turns"]]
    group, is_validation = (fields["step"], fields["prompt_group_id"]), fields["validate"]
  except (ValueError, KeyError, TypeError):
    return None
  if any(type(n) is not int or n < 0 for n in (*turns, *group)) or sum(turns) < 1:
    return None
  return group, [] if is_validation else [sum(turns)]


def _clipped_mean(mu: float, sigma: float, cap: int) -> float:
  cdf = statistics.NormalDist().cdf
  border = (math.log(cap) - mu) / sigma
  return math.exp(mu + sigma * sigma / 2) * cdf(border - sigma) + cap * (1 - cdf(border))
