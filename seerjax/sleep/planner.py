"""Decides whether sleep-time compute pays for a context, from a cost model and observed counts.

  price of N questions   without sleep   t * B * N
                         with sleep      t * b * N + S
  break-even             N = S / (t * (B - b))

S is the number of sleep tokens, b and B the tokens of an answer with and without sleep, t the price
of a token generated while a user waits. A context with fewer expected questions than break-even is
left alone; where B <= b sleep never pays, and nothing is divided.

S, b and B are means over contexts of similar length and predictability; over all contexts while
those are few. Records are immutable and no clock is read: equal observations give equal decisions.

Source: the cost model of Lin et al. 2025, section 5.3, https://arxiv.org/abs/2504.13171.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import NamedTuple

import numpy as np

from seerjax import fields

MAX_SIGHTS = 1024  # Contexts with a remembered number of questions.
# Bin edges of predictability, in nats a token; a question of -1 is likelier than one of -3.
PREDICTABILITY_EDGES = (-3.0, -2.0, -1.5, -1.0)


def break_even(
  *, sleep_tokens: float, full_tokens: float, short_tokens: float, latency_price: float
) -> float:
  """Returns the number of questions from which on sleep pays; infinity if it never does.

  Args:
    sleep_tokens: S, for one context.
    full_tokens: B, of an answer without sleep.
    short_tokens: b, of an answer with sleep.
    latency_price: t, the price of a token generated while a user waits, in tokens of sleep.

  Raises:
    ValueError: if the price is not positive, or a count is negative.
  """
  if not 0 < latency_price < math.inf:
    raise ValueError(
      f"break_even: got latency_price={latency_price}, expected more than 0 and finite; 10 is the"
      " published price of a token while a user waits, 1 that of any other token."
    )
  if not min(sleep_tokens, full_tokens, short_tokens) >= 0:
    raise ValueError(
      f"break_even: got sleep_tokens={sleep_tokens}, full_tokens={full_tokens} and"
      f" short_tokens={short_tokens}, expected counts of at least 0; pass tokens."
    )
  if full_tokens <= short_tokens:
    return math.inf
  return sleep_tokens / (latency_price * (full_tokens - short_tokens))


def predictability(logprobs: np.ndarray) -> float:
  """Returns the mean log-probability of a question after its context, in nats a token.

  Args:
    logprobs: f32[t], of the question's tokens, as the engine scores them under forced generation.

  Raises:
    ValueError: for no tokens, or a value above 0.
  """
  values = [float(value) for value in logprobs]
  if not values or not all(value <= 0 for value in values):
    raise ValueError(
      f"predictability: got {len(values)} log-probabilities up to {max(values, default=math.nan)},"
      " expected at least one, all of at most 0 nats; pass the engine's scores of the question."
    )
  return math.fsum(values) / len(values)


class Kind(NamedTuple):
  """Properties by which contexts are grouped for statistics.

  Attributes:
    length: bit length of the number of tokens: 6 means 32 to 63.
    bin: bin of predictability, 0 the lowest; -1 if unknown.
  """

  length: int
  bin: int = -1


def kind_of(num_tokens: int, predicted: float | None = None) -> Kind:
  """Returns the kind of a context.

  Args:
    num_tokens: tokens of the context.
    predicted: predictability of its questions in nats a token; None if unknown.

  Raises:
    ValueError: if `num_tokens` is below 1.
  """
  if num_tokens < 1:
    raise ValueError(
      f"kind_of: got num_tokens={num_tokens}, expected at least 1; an empty context has no sleep."
    )
  place = -1 if predicted is None else sum(predicted >= edge for edge in PREDICTABILITY_EDGES)
  return Kind(int(num_tokens).bit_length(), place)


class Mean(NamedTuple):
  """An exact mean of counts.

  Attributes:
    count: number of values.
    total: their sum.
  """

  count: int = 0
  total: int = 0

  def plus(self, value: int) -> Mean:
    """Returns the mean with one more value."""
    return Mean(self.count + 1, self.total + int(value))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
  """Statistics so far; extended by `saw_sleep`, `saw_answer` and `saw_end`.

  Attributes:
    sleep: S by kind.
    short: b by kind.
    full: B by kind.
    questions: question counts of the most recent closed contexts, oldest first.
  """

  sleep: Mapping[Kind, Mean] = dataclasses.field(default_factory=dict)
  short: Mapping[Kind, Mean] = dataclasses.field(default_factory=dict)
  full: Mapping[Kind, Mean] = dataclasses.field(default_factory=dict)
  questions: tuple[int, ...] = ()


def _plus(means: Mapping[Kind, Mean], kind: Kind, values: Sequence[int]) -> dict[Kind, Mean]:
  mean = means.get(kind, Mean())
  for value in values:
    mean = mean.plus(value)
  return {**means, kind: mean} if values else dict(means)


def saw_sleep(seen: Seen, kind: Kind, num_tokens: int) -> Seen:
  """Returns the statistics with one more sleep, given its total tokens."""
  return dataclasses.replace(seen, sleep=_plus(seen.sleep, kind, [num_tokens]))


def saw_answer(seen: Seen, kind: Kind, num_tokens: int, *, has_slept: bool) -> Seen:
  """Returns the statistics with one more answer, with or without sleep."""
  if has_slept:
    return dataclasses.replace(seen, short=_plus(seen.short, kind, [num_tokens]))
  return dataclasses.replace(seen, full=_plus(seen.full, kind, [num_tokens]))


def saw_end(seen: Seen, num_questions: int) -> Seen:
  """Returns the statistics with one more closed context and its number of questions."""
  return dataclasses.replace(seen, questions=(*seen.questions, int(num_questions))[-MAX_SIGHTS:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannerConfig:
  """Parameters of the cost model.

  Attributes:
    latency_price: t, the price of a token generated while a user waits.
    num_trials: number of observations of S, b and B, each, before a kind of context has its own
      estimate. The estimate for all kinds together needs as many; until then some contexts are
      processed and others are not, to collect observations.
    prior_questions: questions expected for a context without any observations.
    prior_weight: number of observed contexts that the prior counts as.
  """

  latency_price: float = 10.0
  num_trials: int = 8
  prior_questions: float = 1.0
  prior_weight: float = 4.0

  def __post_init__(self):
    price = "10 is the published price of a token while a user waits"
    fields.check(
      self,
      latency_price=fields.positive(price),
      num_trials=fields.at_least(1, "8 is usual"),
      prior_questions=fields.at_least(0),
      prior_weight=fields.positive("raise it"),
    )


class Estimate(NamedTuple):
  """Expected tokens for a context.

  Attributes:
    sleep_tokens: S, tokens of processing the context ahead.
    short_tokens: b, tokens of an answer from the rewrites.
    full_tokens: B, tokens of an answer from the context itself.
  """

  sleep_tokens: float
  short_tokens: float
  full_tokens: float


def _mean(means: Mapping[Kind, Mean], kind: Kind, num_trials: int) -> float | None:
  """Returns the mean of a kind, of its length, or of all: the first with enough observations."""
  candidates = (
    [mean for other, mean in means.items() if other == kind],
    [mean for other, mean in means.items() if other.length == kind.length],
    list(means.values()),
  )
  for found in candidates:
    count = sum(mean.count for mean in found)
    if count >= num_trials:
      return sum(mean.total for mean in found) / count
  return None


def estimate(seen: Seen, kind: Kind, config: PlannerConfig) -> Estimate | None:
  """Returns the estimate for a kind; None while there are too few observations."""
  trials = config.num_trials
  found = [_mean(means, kind, trials) for means in (seen.sleep, seen.short, seen.full)]
  if any(value is None for value in found):
    return None
  return Estimate(*(float(value) for value in found if value is not None))


def expected_questions(seen: Seen, num_asked: int, config: PlannerConfig) -> float:
  """Returns how many more questions to expect for a context that got `num_asked` so far.

  It is the mean, with the prior, of further questions over contexts that got at least as many.

  Raises:
    ValueError: if the count is negative.
  """
  if num_asked < 0:
    raise ValueError(
      f"expected_questions: got num_asked={num_asked}, expected at least 0; pass a count."
    )
  beyond = [count - num_asked for count in seen.questions if count >= num_asked]
  total = sum(beyond) + config.prior_questions * config.prior_weight
  return total / (len(beyond) + config.prior_weight)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
  """Decision about one context.

  Attributes:
    should_sleep: whether to sleep on it.
    why: "pays", "below break-even", "never pays", "to see S and b" or "to see B".
    break_even: questions from which on sleep pays; infinity if it never does, NaN if unknown.
    expected_questions: further questions expected.
    expected: expected tokens; None if unknown.
  """

  should_sleep: bool
  why: str
  break_even: float
  expected_questions: float
  expected: Estimate | None


def decide(seen: Seen, kind: Kind, num_asked: int, config: PlannerConfig) -> Decision:
  """Returns whether to process a context ahead of its questions."""
  to_come = expected_questions(seen, num_asked, config)
  expected = estimate(seen, kind, config)
  if expected is None:
    # Explore the option, sleep or no sleep, that has fewer observations.
    num_slept, num_full = (
      sum(mean.count for mean in means.values()) for means in (seen.short, seen.full)
    )
    num_sleeps = sum(mean.count for mean in seen.sleep.values())
    lacks_sleep = num_sleeps < config.num_trials or num_slept < config.num_trials
    should_sleep = lacks_sleep and (num_full >= config.num_trials or num_slept <= num_full)
    return Decision(
      should_sleep=should_sleep,
      why="to see S and b" if should_sleep else "to see B",
      break_even=math.nan,
      expected_questions=to_come,
      expected=None,
    )
  needed = break_even(
    sleep_tokens=expected.sleep_tokens,
    full_tokens=expected.full_tokens,
    short_tokens=expected.short_tokens,
    latency_price=config.latency_price,
  )
  pays = to_come > needed
  why = "pays" if pays else "below break-even" if needed < math.inf else "never pays"
  return Decision(
    should_sleep=pays, why=why, break_even=needed, expected_questions=to_come, expected=expected
  )


class Realised(NamedTuple):
  """Actual cost of a context, and its predicted break-even.

  Attributes:
    num_questions: number of questions.
    cost: total cost in tokens of sleep.
    predicted_break_even: break-even of the decision.
    break_even: break-even with the actual S and b, and the mean B of its kind; NaN without sleep.
  """

  num_questions: int
  cost: float
  predicted_break_even: float
  break_even: float


def realised(
  decision: Decision,
  *,
  sleep_tokens: int,
  answer_tokens: Sequence[int],
  full_tokens: float,
  config: PlannerConfig,
) -> Realised:
  """Returns the actual cost of a context, for the log.

  Args:
    decision: the decision for the context.
    sleep_tokens: tokens spent on sleep.
    answer_tokens: tokens of each answer.
    full_tokens: B, mean tokens of an answer of its kind without sleep.
    config: the price.
  """
  count = len(answer_tokens)
  found = math.nan
  if decision.should_sleep and count:
    found = break_even(
      sleep_tokens=sleep_tokens,
      full_tokens=full_tokens,
      short_tokens=sum(answer_tokens) / count,
      latency_price=config.latency_price,
    )
  return Realised(
    num_questions=count,
    cost=config.latency_price * sum(answer_tokens) + sleep_tokens,
    predicted_break_even=decision.break_even,
    break_even=found,
  )
