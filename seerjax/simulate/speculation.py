"""How many tokens a step of speculative decoding yields: by draft length, and by finished siblings.

    tokens(gamma) = 1 + p + p^2 + ... + p^gamma = (1 - p^(gamma + 1)) / (1 - p)

`p`, the chance that one more draft token is accepted, grows with the siblings that have finished,
since the group's suffix tree then knows more. The number of draft tokens is that of least time a
token at the present batch; 0, so never slower than plain decoding by this model.

Source: arXiv 2511.14617v3, section 3.4 and table 2 (linear drafts, gamma_max 8).
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses

import numpy as np

# Tokens a step, the own one included, by number of references of the group, at 8 draft tokens.
PUBLISHED = ((0, 1.70), (1, 2.04), (5, 2.32), (15, 2.53))
PUBLISHED_DRAFT_TOKENS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
  """Grouped drafting.

  Attributes:
    max_draft_tokens: most draft tokens of a request in a step.
    published: pairs (finished siblings, tokens a step at 8 draft tokens), ascending.
  """

  max_draft_tokens: int = 8
  published: tuple[tuple[int, float], ...] = PUBLISHED

  def __post_init__(self):
    counts = [count for count, _ in self.published]
    if self.max_draft_tokens < 1 or not counts or counts != sorted(set(counts)):
      raise ValueError(
        f"SpeculationConfig: got max_draft_tokens={self.max_draft_tokens} and references {counts},"
        " expected at least 1 and ascending counts; use the published table."
      )
    for _, tokens in self.published:
      if not 1 <= tokens < PUBLISHED_DRAFT_TOKENS + 1:
        raise ValueError(
          f"SpeculationConfig: got {tokens} tokens a step, expected 1 to"
          f" {PUBLISHED_DRAFT_TOKENS + 1} (below); the own token counts."
        )


def acceptance(config: SpeculationConfig, most_siblings: int) -> np.ndarray:
  """Returns f64[most_siblings + 1]: the chance of one more accepted token, by finished siblings."""
  counts = [count for count, _ in config.published]
  chances = [_chance(tokens) for _, tokens in config.published]
  return np.interp(np.arange(most_siblings + 1), counts, chances)


def tokens_per_step(chance: np.ndarray, draft_tokens: int) -> np.ndarray:
  """Returns f64[n] tokens a step of requests with these chances f64[n] < 1."""
  return (1 - chance ** (draft_tokens + 1)) / (1 - chance)


def draft_tokens(
  chance: np.ndarray, max_draft_tokens: int, step_seconds: Callable[[int], float]
) -> int:
  """Returns the number of draft tokens, 0 to the most, of least time a token; the smaller of two.

  Args:
    chance: f64[n] of the requests of the batch.
    max_draft_tokens: most of a request.
    step_seconds: of a step at this batch, by draft tokens.
  """
  mean = float(chance.mean())
  costs = [
    step_seconds(gamma) * (1 - mean) / (1 - mean ** (gamma + 1))
    for gamma in range(max_draft_tokens + 1)
  ]
  return costs.index(min(costs))


def _chance(tokens: float) -> float:
  low, high = 0.0, 1.0 - 1e-9
  for _ in range(60):
    middle = (low + high) / 2
    if (1 - middle ** (PUBLISHED_DRAFT_TOKENS + 1)) / (1 - middle) < tokens:
      low = middle
    else:
      high = middle
  return low
