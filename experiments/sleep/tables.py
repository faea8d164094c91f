"""Statistics over the rows of sleep-time compute: intervals over contexts, curves, and prices.

Claim: none; used by `experiments/sleep/nano.py`.

Questions of one context are not independent, so every interval is over contexts: for means from the
standard error, otherwise from a bootstrap that draws whole contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import math
from typing import NamedTuple

import numpy as np

from experiments import measure
from experiments.measure import Interval
from seerjax.sleep import planner
from seerjax.sleep.planner import PlannerConfig, Seen
from seerjax.sleep.protocol import Row

NUM_DRAWS = 1000  # Draws of a bootstrap.
PRICES = (1.0, 2.0, 10.0)  # t, the price of a token for which a user waits.
MAX_QUESTIONS = 10
STEP_EDGES = (1, 2, 3, 5, 7, 10)  # Minimum steps of each bin.
WHOLE = 3  # The verbosity of a whole answer, the last of a trained model's four lengths.


class About(NamedTuple):
  """Properties of a question.

  Attributes:
    part: name of the part of the run.
    problem_id, context_id: ids of the question and its context.
    seed: seed of the part.
    num_steps: reasoning steps of its solution.
    context_steps: reasoning steps for all facts of its context.
    context_tokens: tokens of its context.
    logprob: mean log-probability of its tokens after the context, nats; NaN if not scored.
  """

  part: str
  problem_id: str
  context_id: str
  seed: int
  num_steps: int
  context_steps: int
  context_tokens: int
  logprob: float


class Arm(NamedTuple):
  """An arm with its budget."""

  arm: str
  verbosity: int = WHOLE
  num_parallel: int = 0
  cut: int = 0  # Token limit of the answer; 0 is the largest limit.


WAKE, TEST = Arm("wake", num_parallel=1), Arm("test")


class Cells:
  """Rows of one model as arrays over questions, grouped by context.

  Attributes:
    about: properties of each question, grouped by context.
    starts: i64[contexts], index of each context's first question.
  """

  def __init__(self, rows: Iterable[Row], about: Sequence[About]):
    """Sorts rows by question.

    Raises:
      ValueError: if an arm lacks one of the questions.
    """
    self.about = tuple(sorted(about, key=lambda one: (one.seed, one.context_id, one.problem_id)))
    names = [one.context_id for one in self.about]
    self.starts = np.array([i for i, name in enumerate(names) if i == 0 or name != names[i - 1]])
    self._rows: dict[Arm, dict[str, Row]] = {}
    longest = 0
    rows = list(rows)
    for row in rows:
      longest = max(longest, row.max_tokens)
    wanted = {one.problem_id for one in about}
    for row in rows:
      if row.problem_id not in wanted:
        continue
      cut = 0 if row.max_tokens == longest else row.max_tokens
      arm = Arm(row.arm, row.verbosity, row.num_parallel, cut)
      self._rows.setdefault(arm, {})[row.problem_id] = row
    for arm, found in self._rows.items():
      if len(found) != len(self.about):
        raise ValueError(
          f"Cells: got {len(found)} rows of {arm}, expected one of each of {len(self.about)}"
          " questions; let the run go on to its end."
        )

  def some(self, is_chosen: Callable[[About], bool]) -> Cells:
    """Returns the rows of the chosen questions; contexts are chosen as a whole."""
    rows = [row for found in self._rows.values() for row in found.values()]
    return Cells(rows, [one for one in self.about if is_chosen(one)])

  @property
  def arms(self) -> tuple[Arm, ...]:
    """The arms that have rows."""
    return tuple(self._rows)

  def of(self, arm: Arm, value: Callable[[Row], float]) -> np.ndarray:
    """Returns a value of each row of an arm, f64[questions]."""
    rows = self._rows[arm]
    return np.array([value(rows[one.problem_id]) for one in self.about], np.float64)

  def right(self, arm: Arm) -> np.ndarray:
    """Returns the rewards, f64[questions]."""
    return self.of(arm, lambda row: row.reward)

  def tokens(self, arm: Arm) -> np.ndarray:
    """Returns the tokens generated after the question, f64[questions]."""
    return self.of(arm, lambda row: row.num_tokens)

  def sleep(self, arm: Arm) -> np.ndarray:
    """Returns the sleep tokens of each question's context, f64[questions]."""
    return self.of(arm, lambda row: row.num_sleep_tokens)

  def sums(self, values: np.ndarray) -> np.ndarray:
    """Returns the sums over each context, f64[contexts]."""
    return np.add.reduceat(values, self.starts)


def mean(cells: Cells, values: np.ndarray) -> Interval:
  """Returns the mean over questions, with an interval from the standard error of context means."""
  counts = np.diff([*cells.starts, len(values)])
  of_contexts = measure.mean(cells.sums(values) / counts)
  value, half = float(values.mean()), of_contexts.high - of_contexts.value
  return Interval(value, value - half, value + half)


def bootstrap(
  cells: Cells,
  columns: Mapping[str, np.ndarray],
  statistic: Callable[[dict[str, float]], float],
  *,
  seed: int = 0,
) -> Interval:
  """Returns a statistic of column means, with a bootstrap interval over contexts.

  Args:
    cells: the questions and their contexts.
    columns: f64[questions] each.
    statistic: function of the columns' means.
    seed: seed of the draws.
  """
  counts = np.diff([*cells.starts, len(cells.about)]).astype(np.float64)
  sums = {name: cells.sums(values) for name, values in columns.items()}
  value = statistic({name: float(one.sum() / counts.sum()) for name, one in sums.items()})
  rng = np.random.default_rng(seed)
  found = []
  for _ in range(NUM_DRAWS):
    drawn = rng.integers(0, len(counts), len(counts))
    total = counts[drawn].sum()
    found.append(statistic({name: float(one[drawn].sum() / total) for name, one in sums.items()}))
  low, high = np.nanquantile(found, (0.025, 0.975))
  return Interval(value, float(low), float(high))


# Equal test tokens.


def gain_at_equal_tokens(cells: Cells, base: Cells, wake: Arm, tests: Sequence[Arm]) -> Interval:
  """Returns the accuracy gain of "wake" over "test" at equal test tokens.

  The baseline is interpolated between budgets and made non-decreasing in tokens; both favour it.

  Args:
    cells: rows of the arm with sleep.
    base: rows of the arms without sleep, which may be another model's.
    wake: the arm with sleep.
    tests: arms without sleep, at several budgets.
  """
  columns = {"right": cells.right(wake), "tokens": cells.tokens(wake)}
  for i, arm in enumerate(tests):
    columns |= {f"right{i}": base.right(arm), f"tokens{i}": base.tokens(arm)}

  def gain(means: dict[str, float]) -> float:
    points = sorted((means[f"tokens{i}"], means[f"right{i}"]) for i in range(len(tests)))
    heights = np.maximum.accumulate([right for _, right in points])
    return means["right"] - float(np.interp(means["tokens"], [x for x, _ in points], heights))

  return bootstrap(cells, columns, gain)


# By the number of steps.


class Steps(NamedTuple):
  """Results of the questions in a bin of step counts.

  Attributes:
    name: name of the bin.
    count: number of questions.
    test, wake: accuracy of each arm.
    test_tokens, wake_tokens: mean test tokens of each arm.
  """

  name: str
  count: int
  test: float
  wake: float
  test_tokens: float
  wake_tokens: float

  @property
  def ratio(self) -> float:
    """Returns the ratio of test tokens without sleep to those with sleep."""
    return self.test_tokens / self.wake_tokens


def by_steps(test_cells: Cells, cells: Cells, steps: Callable[[About], int]) -> list[Steps]:
  """Returns the non-empty bins; the baseline may be another model's."""
  counts = np.array([steps(one) for one in cells.about])
  found = []
  for least, after in zip(STEP_EDGES, (*STEP_EDGES[1:], 10**9), strict=True):
    name = f"{least}" if after == least + 1 else f"{least}-{after - 1}" if after < 99 else (
      f"{least} or more"
    )  # fmt: skip
    found.append(_steps(test_cells, cells, name, (counts >= least) & (counts < after)))
  return [one for one in found if one.count]


def where_test_is_long(test_cells: Cells, cells: Cells, least: int) -> Steps:
  """Returns the results of questions answered in `least` tokens or more without sleep."""
  chosen = test_cells.tokens(TEST) >= least
  return _steps(test_cells, cells, f"T_B takes {least} tokens or more", chosen)


def _steps(test_cells: Cells, cells: Cells, name: str, chosen: np.ndarray) -> Steps:
  def of(values: np.ndarray) -> float:
    return float(values[chosen].mean()) if chosen.any() else math.nan

  return Steps(
    name=name,
    count=int(chosen.sum()),
    test=of(test_cells.right(TEST)),
    wake=of(cells.right(WAKE)),
    test_tokens=of(test_cells.tokens(TEST)),
    wake_tokens=of(cells.tokens(WAKE)),
  )


# Prices.


def price(cells: Cells, arm: Arm, latency_price: float, num_questions: int) -> float:
  """Returns the mean price of a question in sleep tokens, with `num_questions` per context."""
  tokens, sleep = cells.tokens(arm).mean(), cells.sleep(arm).mean()
  return latency_price * float(tokens) + float(sleep) / num_questions


def crossing(base: Cells, cells: Cells, test: Arm, wake: Arm, latency_price: float) -> float:
  """Returns the observed break-even number of questions per context; infinity if sleep never pays.

  It compares the prices of the first one, two, ... questions of each context, with linear
  interpolation between the numbers of questions, from 0 for none.
  """
  counts = np.diff([*cells.starts, len(cells.about)])
  most = int(counts.min())
  places = cells.starts[:, None] + np.arange(most)
  saved = latency_price * np.cumsum((base.tokens(test) - cells.tokens(wake))[places].mean(0))
  sleep = float(cells.sleep(wake)[cells.starts].mean())
  saved = np.concatenate([[0.0], saved])
  for count in range(1, most + 1):
    if saved[count] >= sleep:
      return count - 1 + float((sleep - saved[count - 1]) / (saved[count] - saved[count - 1]))
  return math.inf


def foreseen(base: Cells, cells: Cells, test: Arm, wake: Arm, others: Cells) -> planner.Estimate:
  """Returns the mean of the planner's estimates for other contexts; it knows their lengths.

  Args:
    base: rows without sleep from which the planner learns, which may be another model's.
    cells: rows with sleep of the same contexts.
    test: the arm without sleep.
    wake: the arm with sleep.
    others: the other contexts; only their lengths are read.
  """
  full, short, sleep = base.tokens(test), cells.tokens(wake), cells.sleep(wake)
  seen = Seen()
  for start, end in zip(cells.starts, [*cells.starts[1:], len(full)], strict=True):
    kind = planner.kind_of(cells.about[start].context_tokens)
    seen = planner.saw_sleep(seen, kind, int(sleep[start]))
    for place in range(start, end):
      seen = planner.saw_answer(seen, kind, int(full[place]), has_slept=False)
      seen = planner.saw_answer(seen, kind, int(short[place]), has_slept=True)
  # At most the number of contexts seen, so that there is always an estimate.
  config = PlannerConfig(num_trials=min(PlannerConfig.num_trials, len(cells.starts)))
  kinds = [planner.kind_of(others.about[start].context_tokens) for start in others.starts]
  found = [planner.estimate(seen, kind, config) for kind in kinds]
  known = np.array([one for one in found if one is not None])
  return planner.Estimate(*map(float, known.mean(0)))


class Planned(NamedTuple):
  """Total cost of all contexts in sleep tokens, under three policies.

  Attributes:
    planner: cost with the decisions of `sleep.planner`, which learns from earlier contexts.
    always, never: cost of always or never sleeping.
    num_slept: contexts for which the planner chose sleep.
  """

  planner: float
  always: float
  never: float
  num_slept: int

  @property
  def excess(self) -> float:
    """Returns the relative extra cost of the planner over the better of always and never."""
    return self.planner / min(self.always, self.never) - 1


def planned(
  base: Cells,
  cells: Cells,
  test: Arm,
  wake: Arm,
  latency_price: float,
  mean_questions: float,
  *,
  seed: int = 0,
) -> Planned:
  """Simulates the planner's decisions, context by context in order.

  The number of questions per context is drawn from a geometric distribution, truncated at the
  context's number of questions.

  Args:
    base: rows without sleep, which may be another model's.
    cells: rows with sleep.
    test: the arm without sleep.
    wake: the arm with sleep.
    latency_price: t, the price of a token for which a user waits.
    mean_questions: mean of the distribution before truncation.
    seed: seed of the draws.
  """
  config = PlannerConfig(latency_price=latency_price)
  rng = np.random.default_rng(seed)
  full, short, sleep = base.tokens(test), cells.tokens(wake), cells.sleep(wake)
  ends = np.append(cells.starts[1:], len(full))
  seen, total, always, never, num_slept = Seen(), 0.0, 0.0, 0.0, 0
  for start, end in zip(cells.starts, ends, strict=True):
    count = min(int(rng.geometric(1 / mean_questions)), int(end - start))
    with_sleep = latency_price * float(short[start : start + count].sum()) + float(sleep[start])
    without = latency_price * float(full[start : start + count].sum())
    always, never = always + with_sleep, never + without
    kind = planner.kind_of(cells.about[start].context_tokens)
    decision = planner.decide(seen, kind, 0, config)
    if decision.should_sleep:
      seen = planner.saw_sleep(seen, kind, int(sleep[start]))
      num_slept += 1
    total += with_sleep if decision.should_sleep else without
    tokens = short if decision.should_sleep else full
    for number in tokens[start : start + count]:
      seen = planner.saw_answer(seen, kind, int(number), has_slept=decision.should_sleep)
    seen = planner.saw_end(seen, count)
  return Planned(total, always, never, num_slept)


# Predictability.


class Predicted(NamedTuple):
  """Dependence of the gain on a question's predictability.

  Attributes:
    edges: f64[6], quintile edges of log p(q|c) in nats per token, ascending.
    gains: gain in each quintile.
    slope: slope of the gain per nat per token.
  """

  edges: tuple[float, ...]
  gains: tuple[float, ...]
  slope: Interval


def by_predictability(cells: Cells, test: Arm, wake: Arm) -> Predicted:
  """Returns the gains by quintile of log p(q|c), and their slope over questions."""
  x = np.array([one.logprob for one in cells.about])
  gain = cells.right(wake) - cells.right(test)
  edges = np.quantile(x, np.linspace(0, 1, 6))
  bins = np.clip(np.searchsorted(edges[1:-1], x, side="right"), 0, 4)

  def slope(means: dict[str, float]) -> float:
    variance = means["xx"] - means["x"] ** 2
    return (means["xy"] - means["x"] * means["y"]) / variance if variance > 0 else math.nan

  found = bootstrap(cells, {"x": x, "y": gain, "xx": x * x, "xy": x * gain}, slope)
  gains = tuple(float(gain[bins == b].mean()) if (bins == b).any() else math.nan for b in range(5))
  return Predicted(tuple(float(edge) for edge in edges), gains, found)
