"""Plans how many tokens to draft: as many as is worthwhile, and more for high-priority requests.

Acceptance and reach are measured online; `draft_lengths` derives lengths from them. Drafting is off
unless it reduces the expected seconds per token, by a margin that is wider for
switching on than for staying on. While it is off, a few requests draft occasionally, so rarely that
all steps together lose no more than `PROBE_COST`. No clock: equal inputs, equal plans.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import itertools
import operator
from typing import NamedTuple

from seerjax import fields
from seerjax.engine.step_times import StepTimes
from seerjax.speculation import draft_lengths

POLICIES = ("mba", "mba_paper")
# Drafting switches on if it saves more than the first share of seconds per token, and off if less
# than the second. The margin absorbs noise; each switch costs a few slow steps.
ON_GAIN, OFF_GAIN = 0.1, 0.05
# Share of step time that probing may cost while drafting is off; less than the noise of steps.
PROBE_COST = 0.0025
# Requests per probe: two are more informative than one for hardly more rows.
PROBE_REQUESTS = 2
# Steps of a request after which an observation's weight is halved: long enough to average out
# single drafts, short enough to follow changing weights and texts that become similar.
MEMORY = 512.0


class Plan(NamedTuple):
  """Limits on the drafts of a step.

  Attributes:
    high: maximum tokens per request of the high class.
    low: maximum tokens per request of the low class.
    num_requests: only the first `num_requests` requests may draft.
  """

  high: int
  low: int
  num_requests: int


OFF = Plan(0, 0, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetConfig:
  """Configuration of budgets.

  Attributes:
    policy: "mba" or "mba_paper".
    num_speculative_tokens: maximum draft length.
    priority: weight of a token of the high class; lambda in Seer.
  """

  policy: str = "mba"
  num_speculative_tokens: int = 8
  priority: float = 2.0

  def __post_init__(self):
    fields.check(
      self,
      policy=fields.one_of(POLICIES),
      num_speculative_tokens=fields.at_least(1, "8 is usual"),
      priority=fields.at_least(1, "2 is usual"),
    )


class Budget:
  """Plans each step's drafts from past results."""

  def __init__(self, times: StepTimes, config: BudgetConfig | None = None):
    self.times = times
    self.config = BudgetConfig() if config is None else config
    self.is_on = False
    # Best lengths by class sizes, until the next observation.
    self._best: dict[tuple[int, int], tuple[int, int, float]] = {}
    # By position: how often a token was allowed and drafted; and, if all before it were accepted,
    # how often it was tried and accepted. Counts halve in `MEMORY` steps: instead, the weight of
    # new ones grows.
    self._allowed, self._drafted, self._tried, self._held = (
      [0.0] * self.config.num_speculative_tokens for _ in range(4)
    )
    self._weight = 1.0
    # Share of a step that probes may still spend. The first step may be a probe.
    self._credit = 1.0

  @property
  def acceptance(self) -> tuple[float, ...]:
    """a[1], a[2], ...: P(the first k are all accepted); shrunk towards the pooled rate."""
    held = self._chances(self._held, self._tried, 0.5)
    # An accepted token was drafted; estimates from few counts may contradict that.
    return tuple(min(pair) for pair in zip(held, self.reach))

  @property
  def reach(self) -> tuple[float, ...]:
    """Probabilities r[1], r[2], ... that a draft has k tokens, if allowed."""
    return self._chances(self._drafted, [self._allowed[0], *self._drafted[:-1]], 1.0)

  def plan(self, num_high: int, num_low: int) -> Plan:
    """Returns what a step may draft, by the number of requests in each class."""
    batch = num_high + num_low
    if batch == 0:
      return OFF
    classes = (num_high, num_low)
    if classes not in self._best:
      self._best[classes] = self._best_lengths(*classes)
    high, low, gain = self._best[classes]
    is_known = self._allowed[0] > 0
    self.is_on = is_known and gain > (OFF_GAIN if self.is_on else ON_GAIN)
    if self.is_on:
      return Plan(high, low, batch)
    return self._probe(batch)

  def observe(self, num_allowed: int, num_drafted: int, num_accepted: int) -> None:
    """Records the result of one request's draft.

    Args:
      num_allowed: tokens that it was allowed to draft; 0 is ignored.
      num_drafted: tokens that it drafted.
      num_accepted: tokens that were accepted.

    Raises:
      ValueError: if they are not in descending order.
    """
    if not 0 <= num_accepted <= num_drafted <= num_allowed:
      raise ValueError(
        f"Budget.observe: got {num_accepted} accepted of {num_drafted} drafted of {num_allowed}"
        " allowed, expected accepted <= drafted <= allowed; pass the counts of the main path."
      )
    if num_allowed == 0:
      return
    self._best.clear()
    self._weight *= 2 ** (1 / MEMORY)
    if self._weight > 1e30:
      for counts in (self._allowed, self._drafted, self._tried, self._held):
        counts[:] = [count / self._weight for count in counts]
      self._weight = 1.0
    for place in range(min(num_allowed, self.config.num_speculative_tokens)):
      self._allowed[place] += self._weight
      self._drafted[place] += self._weight * (place < num_drafted)
      self._tried[place] += self._weight * (place <= num_accepted)
      self._held[place] += self._weight * (place < num_accepted)

  def _best_lengths(self, num_high: int, num_low: int) -> tuple[int, int, float]:
    """Returns the draft lengths (high, low), and the relative reduction of seconds per token."""
    config, batch = self.config, num_high + num_low
    acceptance, reach = self.acceptance, self.reach
    share = functools.partial(
      draft_lengths.mba_paper
      if config.policy == "mba_paper"
      else functools.partial(draft_lengths.mba, reach=reach),
      num_speculative_tokens=config.num_speculative_tokens,
      priority=config.priority,
    )
    lengths = share(num_high, num_low, acceptance, self.times)
    seconds = draft_lengths.seconds_per_token(
      (num_high, num_low), lengths, acceptance, self.times, reach
    )
    return (*lengths, 1 - batch * seconds / self.times.decode(batch))

  def _chances(
    self, hits: Sequence[float], tries: Sequence[float], unseen: float
  ) -> tuple[float, ...]:
    """Returns cumulative products of rates by position, shrunk towards the pooled rate."""
    one = self._weight
    pooled = (sum(hits) + unseen * one) / (sum(tries) + one)
    rates = ((hit + 4 * one * pooled) / (tried + 4 * one) for hit, tried in zip(hits, tries))
    return tuple(itertools.accumulate(rates, operator.mul))

  def _probe(self, batch: int) -> Plan:
    """Returns the largest probe that the credit covers, or `OFF`."""
    plain, saved = self.times.decode(batch), PROBE_COST * self.times.decode_steps(batch)
    self._credit = min(self._credit + saved, 1.0 + saved)
    for num, length in ((PROBE_REQUESTS, 4), (1, 4), (1, 2), (1, 1)):
      num, length = min(num, batch), min(length, self.config.num_speculative_tokens)
      seconds = self.times.step(batch, batch + num * length) + self.times.draft(num, length)
      if seconds / plain - 1 <= self._credit:
        self._credit -= seconds / plain - 1
        return Plan(length, length, num)
    return OFF
