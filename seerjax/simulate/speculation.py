"""Models the tokens per step of speculative decoding, by draft length and finished siblings.

    tokens(gamma) = 1 + p + p^2 + ... + p^gamma = (1 - p^(gamma + 1)) / (1 - p)

`p`, the probability that one more draft token is accepted, grows with the number of finished
siblings, since the group's suffix tree then contains more. The number of draft tokens minimises the
time per token at the current batch; it may be 0, so the model never predicts a slowdown.

A draft model costs one step of its own per drafted token. With c its share of the target's step,
and a step time that does not depend on the number of verified rows,

    speed-up = tokens(N) / (N c + 1)                     (Leviathan)
    "alpha"  = (1 + p (N - 1)) / (1 + (1 - p) N)         (an article on "SpecInfer", no source)

The second ignores the bonus token, charges (1 - p) N steps for tokens that are verified in a single
step, and charges nothing for drafting. `table` compares both with a roofline of a model pair:

    python -m seerjax.simulate.speculation

Sources: arXiv 2511.14617v3, section 3.4 and table 2 (linear drafts, num_speculative_tokens 8);
arXiv 2211.17192, theorem 3.8; Qwen3's published shapes; the vendor's figures for an H200 (141 GB,
4.8 TB/s, 989 TFLOP/s in bf16).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses

import numpy as np

from seerjax import fields
from seerjax.simulate.costs import CostModel

# Tokens per step, including the own one, by number of references of the group, at 8 draft tokens.
PUBLISHED = ((0, 1.70), (1, 2.04), (5, 2.32), (15, 2.53))
PUBLISHED_DRAFT_TOKENS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
  """Configuration of grouped drafts.

  Attributes:
    max_draft_tokens: maximum draft tokens per request and step.
    published: pairs (finished siblings, tokens per step at 8 draft tokens), ascending.
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
          f" {PUBLISHED_DRAFT_TOKENS + 1} (below); the bonus token counts."
        )


def acceptance(config: SpeculationConfig, most_siblings: int) -> np.ndarray:
  """Returns f64[most_siblings + 1]: the acceptance probability by number of finished siblings."""
  counts = [count for count, _ in config.published]
  chances = [_chance(tokens) for _, tokens in config.published]
  return np.interp(np.arange(most_siblings + 1), counts, chances)


def tokens_per_step(chance: np.ndarray, draft_tokens: int) -> np.ndarray:
  """Returns tokens per step f64[n] for acceptance probabilities f64[n] < 1."""
  return (1 - chance ** (draft_tokens + 1)) / (1 - chance)


def leviathan(chance: float, length: int, cost: float) -> float:
  """Returns the speed-up of drafts of `length` tokens, by the complete model.

  Args:
    chance: probability that a drafted token is accepted if those before it are; 0 to 1.
    length: drafted tokens.
    cost: time of a draft step, relative to a step of the target.

  Raises:
    ValueError: for an invalid probability, or a negative length or cost.
  """
  _check(chance, length, cost)
  tokens = sum(chance**k for k in range(length + 1))
  return tokens / (length * cost + 1)


def article(chance: float, length: int) -> float:
  """Returns the "alpha" that an article calls the speed-up; it corresponds to no valid model.

  Raises:
    ValueError: for an invalid probability, or a negative length.
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
  """Returns the speed-up of a model pair, with the costs of verified rows and of draft steps.

  Args:
    target: cost model of the target.
    draft: cost model of the draft, with one step per token, on the same devices.
    chance: as in `leviathan`.
    length: drafted tokens.
    batch: number of requests.
    context: positions of each request.

  Raises:
    ValueError: as `leviathan`.
  """
  plain = target.step_seconds(batch, batch * context)
  cost = draft.step_seconds(batch, batch * context) / plain
  verified = target.step_seconds(batch, batch * context, length) / plain
  tokens = leviathan(chance, length, 0.0)
  return tokens / (length * cost + verified)


def qwen3_pair(fixed_seconds: float = 0.0) -> tuple[CostModel, CostModel]:
  """Returns the cost models of Qwen3-32B and Qwen3-0.6B in bf16 on one H200.

  Args:
    fixed_seconds: fixed time of each step of either model.
  """
  shapes = ((32.8e9, 64, 64), (0.596e9, 28, 16))  # Parameters, layers, query heads; 8 KV heads.
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
  """Returns a Markdown table of speed-ups of Qwen3-32B with a 0.6B draft.

  Shows them without and with a fixed 1 ms per step, and for comparison Leviathan's (with the c at
  batch 1) and the article's.
  """
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
  """Returns the number of draft tokens with the least time per token (ties: the smaller).

  Args:
    chance: f64[n], acceptance probabilities of the requests in the batch.
    max_draft_tokens: maximum per request.
    step_seconds: seconds of a step at this batch, by draft tokens.
    draft_seconds: seconds of drafting, by draft tokens; negligible for a suffix tree.
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
