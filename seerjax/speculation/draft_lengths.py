"""Plans draft lengths: as many tokens as are worthwhile, more for high-priority requests.

  a[k]        P(the first k drafted tokens are all accepted)
  r[k]        P(a draft has k tokens, if allowed)
  T(B, rows)  seconds of a step of B requests                  a table, measured elsewhere
  V(B)        seconds of a step of plain decoding              the same, in the best visit length
  D(B, g)     seconds of drafting g for B requests             a model's cost grows with both

  seconds per token of B requests: V(B) / B without drafts; if they may draft g > 0,

    (D(B, g) + T(B, B + B sum r[1..g])) / (B (1 + sum a[1..g]))

The best g gives a step's budget of g B drafted tokens, which two classes share: high (a group's
first request, on which the schedule of the others depends) and low. Two ways to share:

- `mba_paper`: Algorithm 1 as printed in Seer, with beta[0] = 1. Its gain is the *decrease* of
  acceptance, its factor applies to the low class, and it stops once the low class does not fit.
- `mba`: the marginal gain is B_c a[g_c + 1], the high class has weight `priority`, and the budget
  is used as far as possible. With nine lengths per class, the best split is found by search.

Source: Seer (arXiv 2511.14617v3), section 3.4 and Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
import itertools

from seerjax.engine.step_times import StepTimes


def best_length(
  batch: int, acceptance: Sequence[float], times: StepTimes, reach: Sequence[float] | None = None
) -> int:
  """Returns the draft length with the fewest seconds per token (ties: the shortest).

  Args:
    batch: number of requests, all with the same length.
    acceptance: acceptance[k - 1] = a[k], up to the maximum length.
    times: times of steps and drafts.
    reach: reach[k - 1] = r[k]; all 1 if None.
  """
  if batch < 1:
    return 0
  best, least = 0, times.decode(batch)
  rows = tokens = 1.0
  for place, chance in enumerate(acceptance):
    rows += 1 if reach is None else reach[place]
    tokens += chance
    cost = (times.draft(batch, place + 1) + times.step(batch, batch * rows)) / tokens
    if cost < least:
      best, least = place + 1, cost
  return best


def seconds_per_token(
  batches: Sequence[int],
  lengths: Sequence[int],
  acceptance: Sequence[float],
  times: StepTimes,
  reach: Sequence[float] | None = None,
) -> float:
  """Returns the expected seconds per sampled token, for classes with one draft length each."""
  rows = tokens = 0.0
  num_drafting = 0
  for batch, length in zip(batches, lengths):
    rows += batch * (1 + (length if reach is None else sum(reach[:length])))
    tokens += batch * (1 + sum(acceptance[:length]))
    num_drafting += batch * (length > 0)
  if not num_drafting:
    return times.decode(sum(batches)) / tokens
  return (times.draft(num_drafting, max(lengths)) + times.step(sum(batches), rows)) / tokens


def mba_paper(
  num_high: int,
  num_low: int,
  acceptance: Sequence[float],
  times: StepTimes,
  *,
  num_speculative_tokens: int = 8,
  priority: float = 2.0,
) -> tuple[int, int]:
  """Returns draft lengths (high, low) by Algorithm 1 as printed.

  Args:
    num_high: requests of the high class, B_h in Seer.
    num_low: requests of the low class, B_l.
    acceptance: beta[1], beta[2], ...; at least `num_speculative_tokens` of them.
    times: T(B, gamma) is a step of B (1 + gamma) rows, or of plain decoding if gamma is 0.
    num_speculative_tokens: maximum draft length.
    priority: lambda.
  """
  batch = num_high + num_low
  if batch == 0:
    return 0, 0
  # Tokens beyond num_speculative_tokens have no gain.
  beta = [1.0, *acceptance[:num_speculative_tokens], acceptance[num_speculative_tokens - 1]]
  alpha = min(sum(beta[1:-1]) / num_speculative_tokens, 1 - 1e-9)
  costs = [times.decode(batch)] + [
    (times.draft(batch, gamma) + times.step(batch, batch * (1 + gamma)))
    * (1 - alpha)
    / (1 - alpha ** (gamma + 1))
    for gamma in range(1, num_speculative_tokens + 1)
  ]
  budget = costs.index(min(costs)) * batch
  if budget < num_high or budget == 0:
    return 0, 0
  high, low = 1, 0
  left = budget - num_high
  while left > 0:
    high_gain = num_high * (beta[high] - beta[high + 1])
    low_gain = num_low * (beta[low] - beta[low + 1])
    if high_gain > priority * low_gain and high < num_speculative_tokens and left >= num_high:
      high += 1
      left -= num_high
    elif num_low > 0 and low < num_speculative_tokens and left >= num_low:
      low += 1
      left -= num_low
    else:
      break
  return (high if num_high else 0), low


def mba(
  num_high: int,
  num_low: int,
  acceptance: Sequence[float],
  times: StepTimes,
  *,
  num_speculative_tokens: int = 8,
  priority: float = 2.0,
  reach: Sequence[float] | None = None,
) -> tuple[int, int]:
  """Returns the draft lengths (high, low) within the budget that have the largest gain.

  Args:
    num_high: requests of the high class.
    num_low: requests of the low class.
    acceptance: acceptance[k - 1] = a[k]; at least `num_speculative_tokens` of them, decreasing.
    times: times of steps and drafts.
    num_speculative_tokens: maximum draft length.
    priority: weight of a token of the high class.
    reach: reach[k - 1] = r[k]; all 1 if None.
  """
  acceptance = acceptance[:num_speculative_tokens]
  gains = [0.0, *itertools.accumulate(acceptance)]
  batch = num_high + num_low
  budget = best_length(batch, acceptance, times, reach) * batch
  best, most = (0, 0), 0.0
  for high in range(num_speculative_tokens + 1 if num_high else 1):
    left = budget - high * num_high
    if left < 0:
      break
    low = min(num_speculative_tokens, left // num_low) if num_low else 0
    gain = priority * num_high * gains[high] + num_low * gains[low]
    if gain >= most and gain > 0:  # Ties: the split that gives the high class more.
      best, most = (high, low), gain
  return best
