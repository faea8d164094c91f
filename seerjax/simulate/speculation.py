"""How many tokens a step of speculative decoding yields: by draft length, and by finished siblings.

    tokens(gamma) = 1 + p + p^2 + ... + p^gamma = (1 - p^(gamma + 1)) / (1 - p)

`p`, the chance that one more draft token is accepted, grows with the siblings that have finished,
since the group's suffix tree then knows more. The number of draft tokens is that of least time a
token at the present batch; 0, so never slower than plain decoding by this model.

A draft model costs a step of its own for each drafted token. With c its share of the target's step,
and a step as long however many rows are verified,

    speed-up = tokens(N) / (N c + 1)                     (Leviathan)
    "alpha"  = (1 + p (N - 1)) / (1 + (1 - p) N)         (an article on "SpecInfer", no source)

The second counts no bonus token, charges (1 - p) N steps for tokens that were verified in the same
step, and no draft. `table` sets a roofline of a pair beside both:

    python -m seerjax.simulate.speculation

Sources: arXiv 2511.14617v3, section 3.4 and table 2 (linear drafts, gamma_max 8); arXiv 2211.17192,
theorem 3.8; Qwen3's published shapes; the makers' figures of an H200 (141 GB, 4.8 TB/s, 989 TFLOP/s
in bf16).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses

import numpy as np

from seerjax import fields
from seerjax.simulate.costs import CostModel

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
    fields.check(self)
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


def leviathan(chance: float, length: int, cost: float) -> float:
  """Returns the speed-up of drafts of so many tokens, by the model that counts all there is.

  Args:
    chance: that a drafted token holds, if those before it do; 0 to 1.
    length: drafted tokens.
    cost: of a step of the draft, in steps of the target.

  Raises:
    ValueError: for what is no chance, a negative length or cost.
  """
  _check(chance, length, cost)
  tokens = sum(chance**k for k in range(length + 1))
  return tokens / (length * cost + 1)


def article(chance: float, length: int) -> float:
  """Returns the "alpha" that an article calls the speed-up; it is a model of nothing.

  Raises:
    ValueError: for what is no chance, or a negative length.
  """
  _check(chance, length, 0.0)
  return (1 + chance * (length - 1)) / (1 + (1 - chance) * length)


def _check(chance: float, length: int, cost: float) -> None:
  if not 0 <= chance <= 1 or length < 0 or not cost >= 0:
    raise ValueError(
      f"speculation: got chance={chance}, length={length}, cost={cost}, expected a chance of 0 to 1"
      " and no negative length or cost; a share of 80 % is 0.8."
    )


def speed_up(
  target: CostModel, draft: CostModel, *, chance: float, length: int, batch: int, context: int
) -> float:
  """Returns the speed-up of a pair by its costs: the rows are paid for, and the draft's steps.

  Args:
    target: what verifies.
    draft: what drafts, a step for each token, on the same devices.
    chance: as in `leviathan`.
    length: drafted tokens.
    batch: requests.
    context: positions of each.

  Raises:
    ValueError: as `leviathan`.
  """
  plain = target.step_seconds(batch, batch * context)
  cost = draft.step_seconds(batch, batch * context) / plain
  verified = target.step_seconds(batch, batch * context, length) / plain
  tokens = leviathan(chance, length, 0.0)
  return tokens / (length * cost + verified)


def qwen3_pair(fixed_seconds: float = 0.0) -> tuple[CostModel, CostModel]:
  """Returns the costs of Qwen3-32B and Qwen3-0.6B in bf16 on one H200.

  Args:
    fixed_seconds: of each step of either, whatever is in it.
  """
  shapes = ((32.8e9, 64, 64), (0.596e9, 28, 16))  # Parameters, layers, query heads; 8 of keys.
  target, draft = (
    CostModel(
      num_devices=1,
      device_bytes=141e9,
      device_bandwidth=4.8e12,
      device_speed=989e12,
      weight_bytes=2 * parameters,
      resident_bytes=2 * parameters,
      active_bytes=2 * parameters,
      active_parameters=parameters,
      kv_bytes=2 * 2 * 8 * 128 * layers,
      attention_operations=4 * heads * 128 * layers,
      draft_overhead=0.0,
      fixed_seconds=fixed_seconds,
      memory_share=0.9,
      host_bandwidth=5e10,
      peer_bandwidth=4.5e11,
    )
    for parameters, layers, heads in shapes
  )
  return target, draft


def table(
  chances: Sequence[float] = (0.6, 0.8, 0.9, 0.95, 0.98),
  lengths: Sequence[int] = (1, 2, 4, 6, 8, 12, 16, 30),
  batches: Sequence[int] = (1, 8, 32, 128),
  context: int = 1024,
) -> str:
  """Returns speed-ups of Qwen3-32B with a draft of 0.6B as Markdown: by bytes alone, and with 1 ms
  fixed in each step; beside Leviathan's (of the c at batch 1) and the article's."""
  pairs = [qwen3_pair(seconds) for seconds in (0.0, 1e-3)]
  target, draft = pairs[0]
  cost = draft.step_seconds(1, context) / target.step_seconds(1, context)
  batch_names = " | ".join(f"batch {batch}" for batch in batches)
  lines = [
    f"Qwen3-32B + 0.6B on one H200, context {context}; c = {cost:.3f}; without | with 1 ms a step.",
    "",
    f"| a | N | {batch_names} | E / (Nc + 1) | the article's alpha |",
    "|---" * (len(batches) + 4) + "|",
  ]
  for chance in chances:
    for length in lengths:
      found = [
        " / ".join(
          f"{speed_up(*pair, chance=chance, length=length, batch=batch, context=context):.2f}"
          for pair in pairs
        )
        for batch in batches
      ]
      model = f"{leviathan(chance, length, cost):.2f} | {article(chance, length):.2f}"
      lines.append(f"| {chance:g} | {length} | {' | '.join(found)} | {model} |")
  return "\n".join(lines)


def draft_tokens(
  chance: np.ndarray,
  max_draft_tokens: int,
  step_seconds: Callable[[int], float],
  draft_seconds: Callable[[int], float] = lambda gamma: 0.0,
) -> int:
  """Returns the number of draft tokens, 0 to the most, of least time a token; the smaller of two.

  Args:
    chance: f64[n] of the requests of the batch.
    max_draft_tokens: most of a request.
    step_seconds: of a step at this batch, by draft tokens.
    draft_seconds: of drafting so many; a suffix tree's are nothing beside a step.
  """
  mean = float(chance.mean())
  costs = [
    (step_seconds(gamma) + draft_seconds(gamma)) * (1 - mean) / (1 - mean ** (gamma + 1))
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


if __name__ == "__main__":
  print(table())
