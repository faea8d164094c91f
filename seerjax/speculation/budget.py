"""Plans each step's drafts: the source, length and width for each request, from past results.

Sources are the group's suffix tree and, if there is one, a draft model; both may be merged into one
tree. Their acceptance and reach are measured online, by position:

  a[k]  P(the first k drafted tokens are all accepted)
  r[k]  P(a draft has k tokens, if allowed)

With the suffix tree alone, requests of two priority classes share a step's drafts
(`draft_lengths`). With a model, each request has its own choice, and no class has priority; these
choices maximise

    tokens / seconds = sum (1 + gain[i]) / (T(B, B + sum rows[i]) + D_suffix + D_model(N))

  gain  chain: a[1] + ... + a[N], times this request's record; an accepted sibling adds 1
  rows  length times width; for both sources, their sum

Lengths and width are the same for all requests (because the model runs one program). For given
lengths, a request maximises gain - rate (price of its rows and its draft), with rate and price from
the previous plan, over a few iterations (Dinkelbach's method for ratios); the best plan by the true
table is used.

Drafting is off unless it reduces the expected seconds per token, by a margin that is wider for
switching on than for staying on. A verdict against drafting stays valid for longer each time it is
confirmed, or until a draft is fully accepted, so that planning costs almost nothing where drafts do
not help. Sources that are not in use are probed, so rarely that all steps together lose no more
than `PROBE_COST`. No clock: equal inputs, equal plans.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import functools
import itertools
import math
from typing import Literal, NamedTuple

import numpy as np

from seerjax import fields
from seerjax.engine.step_times import DraftTimes, StepTimes
from seerjax.speculation import draft_lengths

Source = Literal["none", "suffix", "model", "both"]
POLICIES = ("mba", "mba_paper")
# With a model: possible lengths, and widths.
LENGTHS, WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16), (1, 2, 4)
# Drafting switches on if it saves more than the first share of seconds per token, and off if less
# than the second. The margin absorbs noise; each switch costs a few slow steps.
ON_GAIN, OFF_GAIN = 0.1, 0.05
# Steps of a request after which pooled counts are halved (long enough to average out single drafts,
# short enough to follow changing weights and texts that become similar); and number of observed
# tokens at which a request's own record has the same weight as the pool.
MEMORY, OWN = 512.0, 8.0
# With a model: plans between choices of lengths and width, and of sources (a step may take no
# longer than a choice). In between a request keeps its source; a new one gets the most frequent.
STEPS_PER_SHAPE, STEPS_PER_CHOICE = 64, 8
# Plans for which the first verdict against drafting is valid, and the maximum.
FIRST_VERDICT, LONGEST_VERDICT = 8, 512
# Iterations over rate and price.
ROUNDS = 2
# Share of step time that probing may cost; less than the noise of steps.
PROBE_COST = 0.0025
# Draft length of a probe, and requests per probe of the suffix tree: two are more informative than
# one for hardly more rows.
PROBE_LENGTH, PROBE_REQUESTS = 4, 2
# Credit, as a share of a step, that the longest probe may wait for, if it is not there already: if
# possible the first, so that probes are frequent.
PROBE_WAITS = (0.25, 1.0 + PROBE_COST)
# With a model, the first drafts of both sources are tried before any credit was accumulated, if
# one costs at most FIRST_COST steps of plain decoding: a useful source yields nothing until found.
FIRST_PROBES, FIRST_COST = 3, 4.0
# Indices of `Budget._options` that requests choose from: either source alone, or all.
_ALLOWED = (np.array([0, 1]), np.array([0, 2]), np.array([0, 1, 2, 3]))


class Choice(NamedTuple):
  """Draft of a step for one request: its source and size.

  Attributes:
    source: source of the draft; "none" drafts nothing.
    suffix_length: maximum tokens of the suffix tree's path.
    model_length: maximum tokens of the model's main path.
    width: children of each node of that path, including the main one.
  """

  source: Source = "none"
  suffix_length: int = 0
  model_length: int = 0
  width: int = 1

  @property
  def rows(self) -> int:
    """Maximum number of drafted tokens, over all paths."""
    return self.suffix_length + self.model_length * self.width

  def length_of(self, source: str) -> int:
    """Returns the maximum length of a source's path."""
    return self.suffix_length if source == "suffix" else self.model_length


NOTHING = Choice()


def suffix_choice(length: int) -> Choice:
  """Returns the choice of at most `length` tokens of the suffix tree."""
  return Choice("suffix", length) if length else NOTHING


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetConfig:
  """Configuration of budgets.

  Attributes:
    policy: "mba" or "mba_paper": how two priority classes share the drafts of the suffix tree.
    num_speculative_tokens: maximum draft length; with a model, 16 at most.
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


class _Verdict(NamedTuple):
  """A verdict that drafting does not help, for batches of about one size.

  Attributes:
    num_plans: number of plans at which it is re-evaluated.
    wait: number of plans from the verdict until then.
  """

  num_plans: int
  wait: int


class _Probe(NamedTuple):
  """A step in which a few requests draft from one source.

  Attributes:
    choice: their draft.
    num_requests: how many draft.
    lost: its cost as a share of a step, assuming that no drafted token is accepted.
  """

  choice: Choice
  num_requests: int
  lost: float


class _Pool:
  """Statistics of one source's drafts, over all requests; counts fade.

  Attributes:
    counts: f64[4, n], by position of the main path: how often a token was allowed and drafted; and,
      if all before it were accepted, how often it was tried and accepted.
    siblings: f64[2]: drafts with siblings in which the main token was rejected, and how many of
      those had an accepted sibling.
  """

  def __init__(self, size: int):
    self.counts, self.siblings = np.zeros((4, size)), np.zeros(2)
    self._first = np.tri(size + 1, size, -1)  # Row n: the first n positions.
    self._rates: list[float] = []  # Cached `rates`; empty after an update.

  @property
  def num_tried(self) -> float:
    """Faded number of drafts."""
    return float(self.counts[2, 0])

  def rates(self) -> list[float]:
    """Returns the acceptance rate at each position, if all before were accepted."""
    self._rates = self._rates or _shrunk(self.counts[3], self.counts[2], 0.5).tolist()
    return self._rates

  def reach(self) -> np.ndarray:
    """Returns f64[n]: r[1], r[2], ..."""
    allowed, drafted = self.counts[:2]
    return _shrunk(drafted, np.append(allowed[:1], drafted[:-1]), 1.0).cumprod()

  def acceptance(self) -> np.ndarray:
    """Returns f64[n]: a[1], a[2], ..."""
    # An accepted token was drafted; estimates from few counts may contradict that.
    return np.minimum(np.cumprod(self.rates()), self.reach())

  def sibling_rate(self) -> float:
    tried, held = self.siblings.tolist()
    return (held + 0.25) / (tried + 1)

  def add(self, allowed: int, drafted: int, accepted: int, sibling_held: bool | None) -> None:
    self._rates = []
    share = 2 ** (-1 / MEMORY)
    self.counts *= share
    self.siblings *= share
    self.counts += self._first[[allowed, drafted, min(accepted + 1, allowed), accepted]]
    if sibling_held is not None:
      self.siblings += 1, sibling_held


def _shrunk(hits: np.ndarray, tries: np.ndarray, unseen: float) -> np.ndarray:
  """Returns f64[n]: rates, shrunk towards the pooled rate, and that towards `unseen`."""
  pooled = (hits.sum() + unseen) / (tries.sum() + 1)
  return (hits + 4 * pooled) / (tries + 4)


class Budget:
  """Plans each step's drafts from past results."""

  def __init__(
    self,
    times: StepTimes,
    config: BudgetConfig | None = None,
    *,
    model: DraftTimes | None = None,
    max_width: int = WIDTHS[-1],
  ):
    """Creates a budget without any results.

    Args:
      times: times of steps and visits, and of drafting from the suffix tree.
      config: limits of the plans.
      model: times of the draft model's program; None: the suffix tree is the only source.
      max_width: maximum children of a node of the model's path, 1 to 4.

    Raises:
      ValueError: if `max_width` is not in range.
    """
    if not 1 <= max_width <= WIDTHS[-1]:
      raise ValueError(
        f"Budget.max_width: got {max_width}, expected 1 to {WIDTHS[-1]}; 4 is usual."
      )
    self.times, self.config = times, BudgetConfig() if config is None else config
    self.model, self.max_width = model, max_width
    self.is_on = False
    self._costs, sources = {"suffix": times.drafts}, ["suffix"]
    self._length = self.config.num_speculative_tokens
    if model is not None:
      self._costs["model"], sources = model, ["suffix", "model", "both"]
      self._length = min(self._length, LENGTHS[-1])
    self._pools = {source: _Pool(self._length) for source in sources}
    self._lengths = [n for n in LENGTHS if n <= self._length]
    self._widths = [w for w in WIDTHS if w <= max_width]
    # Request -> source -> (accepted tokens, tokens that the pool expected to be accepted).
    self._own: dict[str, dict[str, tuple[float, float]]] = {}
    self._shape = (self._lengths[0], self._lengths[0], 1)
    self._chosen: dict[str, Choice] = {}
    self._usual = NOTHING
    self._num_plans = self._next_shape = self._next_choice = 0
    # Verdicts by batch size, in powers of two, while nothing is drafted.
    self._verdicts: dict[int, _Verdict] = {}
    # By batch size and source: probes while nothing is drafted; they depend on the tables only.
    self._probes: dict[tuple[int, str], Sequence[_Probe]] = {}
    self._credit = 1.0  # Share of a step that probes may still spend.

  @property
  def acceptance(self) -> Mapping[str, tuple[float, ...]]:
    """By source: a[1], a[2], ...: P(the first k tokens of its main path are all accepted)."""
    return {source: tuple(pool.acceptance().tolist()) for source, pool in self._pools.items()}

  @property
  def reach(self) -> Mapping[str, tuple[float, ...]]:
    """By source: probabilities r[1], r[2], ... that a draft has k tokens, if allowed."""
    return {source: tuple(pool.reach().tolist()) for source, pool in self._pools.items()}

  def plan(self, request_ids: Sequence[str], high: Collection[str] = ()) -> Sequence[Choice]:
    """Returns what a step may draft for each request; () if nothing.

    Args:
      request_ids: requests of the step.
      high: which of them are in the high-priority class.
    """
    if not request_ids:
      return ()
    batch = len(request_ids)
    if self._num_plans >= self._next_choice if self.is_on else self._is_due(batch):
      self._choose(request_ids, high)
    self._num_plans += 1
    if not self.is_on:
      return self._probe_alone(batch)
    choices = [self._chosen.get(name, self._usual) for name in request_ids]
    return self._with_probe(request_ids, choices)

  def observe(
    self,
    request_id: str,
    source: Source,
    num_allowed: int,
    num_drafted: int,
    num_accepted: int,
    *,
    sibling_held: bool | None = None,
  ) -> None:
    """Records the result of one request's draft.

    For a merged draft, call it for each source and for "both".

    Args:
      request_id: the request.
      source: source of the draft; for "both", pass the result of the best path.
      num_allowed: tokens that the main path was allowed to have; 0 is ignored.
      num_drafted: tokens that it had.
      num_accepted: tokens of it that were accepted.
      sibling_held: if the main path failed, whether a sibling was accepted; None without siblings.

    Raises:
      ValueError: if they are not in descending order, or the source drafts nothing.
    """
    if source not in self._pools or not 0 <= num_accepted <= num_drafted <= num_allowed:
      raise ValueError(
        f"Budget.observe: got {num_accepted} accepted of {num_drafted} drafted of {num_allowed}"
        f" allowed by {source!r}, expected accepted <= drafted <= allowed, by one of"
        f" {[*self._pools]}; pass the counts of the main path."
      )
    if not num_allowed:
      return
    counts = [min(n, self._length) for n in (num_allowed, num_drafted, num_accepted)]
    pool, (allowed, drafted, accepted) = self._pools[source], counts
    if self.model is not None:
      own = self._own.setdefault(request_id, {})
      held, expected = own.get(source, (0.0, 0.0))
      expected += sum(pool.rates()[: min(accepted + 1, allowed)])
      own[source] = (held + accepted, expected)
    if accepted == drafted > 0 and not self.is_on:
      self._verdicts.clear()  # A fully accepted probe: re-evaluate now.
    pool.add(allowed, drafted, accepted, sibling_held if num_accepted < num_allowed else None)

  def finish(self, request_id: str) -> None:
    """Drops the record of a finished request."""
    self._own.pop(request_id, None)

  def expected(self, request_id: str, choice: Choice) -> float:
    """Returns the expected number of tokens that a draft adds to a request's step."""
    if choice.source == "none":
      return 0.0
    if choice.source == "both":
      parts = [
        self._gain(request_id, "suffix", choice.suffix_length, 1),
        self._gain(request_id, "model", choice.model_length, choice.width),
      ]
      seen = self._pools["both"].num_tried
      length = max(choice.suffix_length, choice.model_length)
      merged = self._gain(request_id, "both", length, 1)
      # Until merged drafts were observed, assume only the better one of the two.
      return (seen * merged + OWN * max(parts)) / (seen + OWN)
    length = choice.suffix_length or choice.model_length
    return self._gain(request_id, choice.source, length, choice.width)

  def speed(self, request_ids: Sequence[str], choices: Sequence[Choice]) -> float:
    """Returns the expected tokens per second of a step with these drafts."""
    tokens = len(choices) + sum(map(self.expected, request_ids, choices))
    return tokens / self.seconds(choices)

  def seconds(self, choices: Sequence[Choice]) -> float:
    """Returns the seconds of a step with these drafts, if all are as long as allowed."""
    kinds = [*dict.fromkeys(choices)]
    return self._seconds(kinds, [choices.count(kind) for kind in kinds])

  def _is_due(self, batch: int) -> bool:
    """Returns whether to evaluate, while nothing is drafted, if drafting helps."""
    if self.model is None and not self._pools["suffix"].num_tried:
      return False  # With one source, the first drafts are a probe.
    verdict = self._verdicts.get(batch.bit_length())
    return verdict is None or self._num_plans >= verdict.num_plans

  def _choose(self, request_ids: Sequence[str], high: Collection[str]) -> None:
    """Chooses a draft for each request, or records a verdict that none helps."""
    batch, was_on = len(request_ids), self.is_on
    if self.model is None:
      speed, choices = self._by_class(request_ids, high)
    else:
      speed, choices = self._by_request(request_ids)
    gain = 1 - batch / self.times.decode(batch) / speed
    self.is_on = gain > (OFF_GAIN if was_on else ON_GAIN)
    self._next_choice = self._num_plans + (1 if self.model is None else STEPS_PER_CHOICE)
    if self.is_on:
      self._chosen = dict(zip(request_ids, choices, strict=True))
      self._usual = max(dict.fromkeys(choices), key=choices.count)
    if self.is_on != was_on:
      self._verdicts.clear()
    if not self.is_on:
      before = self._verdicts.get(batch.bit_length())
      wait = FIRST_VERDICT if before is None else min(2 * before.wait, LONGEST_VERDICT)
      self._verdicts[batch.bit_length()] = _Verdict(self._num_plans + wait, wait)

  def _by_class(
    self, request_ids: Sequence[str], high: Collection[str]
  ) -> tuple[float, list[Choice]]:
    """Returns the tokens per second of the config's policy, and each request's choice."""
    config, pool = self.config, self._pools["suffix"]
    num_high = sum(name in high for name in request_ids)
    classes = (num_high, len(request_ids) - num_high)
    acceptance, reach = pool.acceptance().tolist(), pool.reach().tolist()
    share = functools.partial(draft_lengths.mba, reach=reach)
    if config.policy == "mba_paper":
      share = draft_lengths.mba_paper
    lengths = share(
      *classes,
      acceptance,
      self.times,
      num_speculative_tokens=self._length,
      priority=config.priority,
    )
    seconds = draft_lengths.seconds_per_token(classes, lengths, acceptance, self.times, reach)
    of_class = [*map(suffix_choice, lengths)]
    return 1 / seconds, [of_class[name not in high] for name in request_ids]

  def _by_request(self, request_ids: Sequence[str]) -> tuple[float, list[Choice]]:
    """Returns the best tokens per second, of a new shape if it is due, and the choices."""
    if not self.is_on or self._num_plans >= self._next_shape:
      if not self.is_on and not self._may_pay(request_ids):
        return len(request_ids) / self.times.decode(len(request_ids)), []
      self._shape = max(self._shapes(), key=lambda shape: self._best(request_ids, shape)[0])
      self._next_shape = self._num_plans + STEPS_PER_SHAPE
    return self._best(request_ids, self._shape)

  def _may_pay(self, request_ids: Sequence[str]) -> bool:
    """Returns False if drafting cannot help even under ideal conditions.

    These are the longest drafts of all requests in the time of the shortest draft of one.
    """
    batch = len(request_ids)
    options = self._options((self._lengths[-1], self._lengths[-1], self._widths[-1]))
    tokens = batch + float(self._gains(request_ids, options).max(axis=1).sum())
    least = min(cost.seconds(1, 1) for cost in self._costs.values())
    seconds = self.times.step(batch, batch + 1) + least
    return tokens / seconds * (1 - ON_GAIN) > batch / self.times.decode(batch)

  def _seconds(self, kinds: Sequence[Choice], counts: Sequence[int]) -> float:
    batch, total = sum(counts), sum(kind.rows * count for kind, count in zip(kinds, counts))
    if not total:
      return self.times.decode(batch)
    seconds = self.times.step(batch, batch + total)
    for source, cost in self._costs.items():
      lengths = [kind.length_of(source) if count else 0 for kind, count in zip(kinds, counts)]
      drafting = sum(count for length, count in zip(lengths, counts) if length)
      seconds += cost.seconds(drafting, max(lengths))
    return seconds

  def _gain(self, request_id: str, source: str, length: int, width: int) -> float:
    pool = self._pools[source]
    held, expected = self._own.get(request_id, {}).get(source, (0.0, 0.0))
    factor = (held + OWN) / (expected + OWN)
    # Each sibling is accepted as often as a single one, but at most the remainder.
    sibling = 1 - (1 - pool.sibling_rate()) ** math.log2(width) if width > 1 else 0.0
    gain, reached = 0.0, 1.0
    for rate in pool.rates()[:length]:
      held_here = min(rate * factor, 1.0)
      gain += reached * (held_here + (1 - held_here) * sibling)
      reached *= held_here
    return gain

  def _shapes(self) -> list[tuple[int, int, int]]:
    """Returns candidate shapes (tree length, model length, width).

    These are all with equal lengths, and the neighbours of the current shape.
    """
    near = []
    for values, now in zip((self._lengths, self._lengths, self._widths), self._shape):
      place = values.index(now)
      near.append(values[max(place - 1, 0) : place + 2])
    equal = [(n, n, width) for n in self._lengths for width in self._widths]
    return [*itertools.product(*near), *equal]

  def _options(self, shape: tuple[int, int, int]) -> list[Choice]:
    suffix, model, width = shape
    return [
      NOTHING,
      suffix_choice(suffix),
      Choice("model", 0, model, width),
      Choice("both", suffix, model, width),
    ]

  def _best(
    self, request_ids: Sequence[str], shape: tuple[int, int, int]
  ) -> tuple[float, list[Choice]]:
    """Returns the best tokens per second with these lengths, and each request's choice."""
    batch, options = len(request_ids), self._options(shape)
    gains = self._gains(request_ids, options)
    rows = np.array([option.rows for option in options], np.float64)
    # The additional drafting time of one more request.
    marginal = np.array(
      [
        sum(
          cost.seconds(2, option.length_of(source)) - cost.seconds(1, option.length_of(source))
          for source, cost in self._costs.items()
        )
        for option in options
      ]
    )
    plain = batch / self.times.decode(batch)
    step = self.times.step(batch, batch)
    everyone = np.arange(batch)
    best, best_picks = plain, np.zeros(batch, np.int64)
    for columns in _ALLOWED:
      rate, picks = plain, np.full(batch, columns[-1])
      for _ in range(ROUNDS):
        total = max(float(rows[picks].sum()), 1.0)
        price = (self.times.step(batch, batch + total) - step) / total
        worth = gains - rate * (rows * price + marginal)
        picks = columns[worth[:, columns].argmax(axis=1)]
        counts = np.bincount(picks, minlength=len(options)).tolist()
        rate = (batch + gains[everyone, picks].sum()) / self._seconds(options, counts)
        if rate > best:
          best, best_picks = rate, picks
    return float(best), [options[pick] for pick in best_picks]

  def _gains(self, request_ids: Sequence[str], options: Sequence[Choice]) -> np.ndarray:
    """Returns f64[b, o]; requests without an own record share the same row."""
    usual = [self.expected("", option) for option in options]
    return np.array(
      [
        [self.expected(name, option) for option in options] if name in self._own else usual
        for name in request_ids
      ]
    )

  def _probe_alone(self, batch: int) -> Sequence[Choice]:
    """Returns a step in which only a probe is drafted, if the credit suffices; otherwise ()."""
    source = min(self._costs, key=lambda name: self._pools[name].num_tried)
    if (batch, source) not in self._probes:
      self._probes[batch, source] = self._probes_of(batch, source)
    *_, probe = probes = self._probes[batch, source]
    # 0.5, because counts decay.
    is_first = self._pools[source].num_tried < FIRST_PROBES - 0.5 and probe.lost <= FIRST_COST
    if self.model is None or not is_first:
      # A probe that costs more than a whole step waits for as long as it takes.
      saved = PROBE_COST * self.times.decode_steps(batch)
      self._credit = min(self._credit, max(1.0, probe.lost)) + saved
      probe = next((probe for probe in probes if probe.lost <= self._credit), None)
      if probe is None:
        return ()
      self._credit -= max(probe.lost, 0.0)
    choices = [NOTHING] * batch
    for place in range(probe.num_requests):
      choices[(self._num_plans + place) % batch] = probe.choice
    return choices

  def _probes_of(self, batch: int, source: str) -> Sequence[_Probe]:
    """Returns a source's probes for a batch, largest first; the last is worth waiting for."""
    plain = self.times.decode(batch)
    probes = []
    for choice, num_requests in self._tries(source):
      num_requests = min(num_requests, batch)
      choices = [choice] * num_requests + [NOTHING] * (batch - num_requests)
      probes.append(_Probe(choice, num_requests, self.seconds(choices) / plain - 1))
    for most in PROBE_WAITS:
      for place, probe in enumerate(probes):
        if probe.lost <= most:
          return probes[: place + 1]
    return probes[:2]  # All cost more than a step: a long one is more informative.

  def _tries(self, source: str) -> list[tuple[Choice, int]]:
    """Returns a source's possible probes and their numbers of requests, largest first."""
    lengths = [min(n, self._length) for n in (PROBE_LENGTH, PROBE_LENGTH, 2, 1)]
    if source == "suffix":
      return [*zip(map(suffix_choice, lengths), (PROBE_REQUESTS, 1, 1, 1))]
    widths = (min(2, self.max_width), 1, 1, 1)
    return [(Choice("model", 0, length, width), 1) for length, width in zip(lengths, widths)]

  def _with_probe(self, request_ids: Sequence[str], choices: list[Choice]) -> list[Choice]:
    """Lets one request probe the least observed source, if the credit suffices."""
    self._credit = min(self._credit + PROBE_COST, 1.0 + PROBE_COST)
    used = {choice.source for choice in choices} - {"none"}
    unused = [source for source in self._costs if source not in used and "both" not in used]
    if not unused:
      return choices
    source = min(unused, key=lambda name: self._pools[name].num_tried)
    place, seconds = self._num_plans % len(request_ids), self.seconds(choices)
    # The probe is assumed to have no accepted token.
    tokens = len(choices) + sum(map(self.expected, request_ids, choices))
    forgone = self.expected(request_ids[place], choices[place]) / tokens
    # A probe that costs more than the maximum credit is shortened.
    for choice, _ in self._tries(source):
      tried = list(choices)
      tried[place] = choice
      lost = self.seconds(tried) / seconds - 1 + forgone
      if lost <= self._credit:
        self._credit -= max(lost, 0.0)
        return tried
      if lost <= 1.0:
        break
    return choices
