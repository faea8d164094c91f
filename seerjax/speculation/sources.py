"""Selects a draft source, length and width for each request, by expected tokens per second.

There are two sources. Drafts of the group's suffix tree are almost free, and good where text
repeats itself. The cost of a draft model grows with the length N of its program. Both may be merged
into one tree. For requests i, each with its own choice,

    tokens / seconds = sum (1 + gain[i]) / (T(B, B + sum rows[i]) + D_suffix + D_model(N))

  gain     chain: a[1] + ... + a[N], a[k] = P(the first k are accepted); an accepted sibling adds 1
  a[k]     pooled rates by position, times this request's record relative to them
  rows     length times width; for both sources, their sum

Lengths and width are the same for all requests (because the model runs one program); the source is
chosen per request. For given lengths, a request maximises gain - rate (price of its rows and its
draft), with rate and price from the previous plan, over a few iterations (Dinkelbach's method for
ratios); the best plan by the true table is used. Nothing is drafted if plain decoding in its best
visit is faster. Such a verdict stays valid for longer each time it is confirmed, or until a probe
is fully accepted, so that planning costs almost nothing where drafts do not help. No clock: equal
inputs, equal plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import math
from typing import Literal, NamedTuple

import numpy as np

from seerjax import fields
from seerjax.engine.step_times import DraftTimes, StepTimes
from seerjax.speculation.budget import OFF_GAIN, ON_GAIN, PROBE_COST

Source = Literal["none", "suffix", "model", "both"]
SOURCES: tuple[Source, ...] = ("none", "suffix", "model", "both")
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
WIDTHS = (1, 2, 4)
# Steps of a request after which pooled counts are halved; and number of observed tokens at which a
# request's own record has the same weight as the pool.
MEMORY, OWN = 512.0, 8.0
# Plans between choices of lengths and width, and of sources (a step may take no longer than a
# choice). In between a request keeps its source, and a new one gets the most frequent.
STEPS_PER_SHAPE, STEPS_PER_CHOICE = 64, 8
# Maximum number of plans for which a verdict against drafting is valid; initially STEPS_PER_CHOICE.
LONGEST_VERDICT = 512
# Iterations over rate and price.
ROUNDS = 2
# Draft length of a probe.
PROBE_LENGTH = 4
# The first drafts of each source are tried before any credit was accumulated, if one costs at most
# FIRST_COST steps of plain decoding: a useful source yields nothing until it is found.
FIRST_PROBES, FIRST_COST = 3, 4.0
# Indices of `SourceBudget._options` that requests choose from: either source alone, or all.
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


NOTHING = Choice()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig:
  """Limits of the plans.

  Attributes:
    max_length: maximum length of any path, 1 to 16.
    max_width: maximum children of a node, 1 to 4.
  """

  max_length: int = 8
  max_width: int = 4

  def __post_init__(self):
    fields.check(
      self,
      max_length=fields.between(1, LENGTHS[-1], "8 is usual"),
      max_width=fields.between(1, WIDTHS[-1], "4 is usual"),
    )


class _Verdict(NamedTuple):
  """A verdict that drafting does not help, for batches of about one size.

  Attributes:
    num_plans: number of plans at which it is re-evaluated.
    wait: number of plans from the verdict until then.
  """

  num_plans: int
  wait: int


class _Probes(NamedTuple):
  """Probes that one request may try while nothing is drafted.

  Attributes:
    saved: credit that one visit accumulates, as a share of a step.
    of_source: by source, its draft and the cost as a share of a step.
  """

  saved: float
  of_source: Mapping[str, tuple[Choice, float]]


@dataclasses.dataclass
class _Pool:
  """Statistics of one source's drafts, over all requests.

  Attributes:
    tried: f64[n], by position: drafts that reached it.
    held: f64[n], how many of those were accepted there, on the main path.
    siblings_tried: drafts with siblings in which the main token was rejected.
    siblings_held: how many of those had an accepted sibling.
    known: cached `rates`; None after an update.
  """

  tried: np.ndarray
  held: np.ndarray
  siblings_tried: float = 0.0
  siblings_held: float = 0.0
  known: list[float] | None = None

  def rates(self) -> np.ndarray:
    """Returns f64[n]: rates, shrunk towards the pooled rate, and that towards one half."""
    pooled = (self.held.sum() + 0.5) / (self.tried.sum() + 1)
    return (self.held + 4 * pooled) / (self.tried + 4)

  def rate_list(self) -> list[float]:
    """Returns `rates` as a list, cached until the next update."""
    found = self.known
    if found is None:
      self.known = found = self.rates().tolist()
    return found

  def sibling_rate(self) -> float:
    return (self.siblings_held + 0.25) / (self.siblings_tried + 1)

  def fade(self) -> None:
    self.known = None
    share = 2 ** (-1 / MEMORY)
    self.tried *= share
    self.held *= share
    self.siblings_tried *= share
    self.siblings_held *= share


class SourceBudget:
  """Plans the draft source of each request in each step, from past results."""

  def __init__(
    self,
    times: StepTimes,
    *,
    suffix: DraftTimes,
    model: DraftTimes,
    config: SourceConfig | None = None,
  ):
    """Creates a budget without any results.

    Args:
      times: times of steps and visits.
      suffix: times of drafting from the tree.
      model: times of the model's program.
      config: limits of the plans.
    """
    self.times, self.config = times, SourceConfig() if config is None else config
    self._costs = {"suffix": suffix, "model": model}
    self._lengths = [n for n in LENGTHS if n <= self.config.max_length]
    self._widths = [w for w in WIDTHS if w <= self.config.max_width]
    size = self.config.max_length
    self._pools = {s: _Pool(np.zeros(size), np.zeros(size)) for s in SOURCES[1:]}
    # Request -> source -> (accepted tokens, tokens that the pool expected to be accepted).
    self._own: dict[str, dict[str, tuple[float, float]]] = {}
    self._shape = (self._lengths[0], self._lengths[0], 1)
    self._chosen: dict[str, Choice] = {}
    self._usual = NOTHING
    self._num_plans = self._next_shape = self._next_choice = 0
    # Verdicts by batch size, in powers of two, while nothing is drafted.
    self._verdicts: dict[int, _Verdict] = {}
    self._probes: dict[int, _Probes] = {}  # By batch size; they depend on the tables only.
    self._credit = 1.0
    self.is_on = False

  def plan(self, request_ids: Sequence[str]) -> Sequence[Choice]:
    """Returns what a step may draft for each request; () if nothing."""
    if not request_ids:
      return ()
    if self.is_on:
      if self._num_plans >= self._next_choice:
        self._choose(request_ids)
    elif self._is_due(len(request_ids)):
      self._try_again(request_ids)
    self._num_plans += 1
    if not self.is_on:
      return self._probe_alone(len(request_ids))
    choices = [self._chosen.get(name, self._usual) for name in request_ids]
    return self._with_probe(request_ids, choices)

  def _is_due(self, batch: int) -> bool:
    """Returns whether to re-evaluate, while nothing is drafted, if drafting helps."""
    verdict = self._verdicts.get(batch.bit_length())
    return verdict is None or self._num_plans >= verdict.num_plans

  def _try_again(self, request_ids: Sequence[str]) -> None:
    """Looks for a plan that helps, and records a verdict if there is none."""
    if self._may_pay(request_ids):
      self._next_shape = self._num_plans
      self._choose(request_ids)
    if not self.is_on:
      self._set_aside(len(request_ids))

  def _set_aside(self, batch: int) -> None:
    before = self._verdicts.get(batch.bit_length())
    wait = STEPS_PER_CHOICE if before is None else min(2 * before.wait, LONGEST_VERDICT)
    self._verdicts[batch.bit_length()] = _Verdict(self._num_plans + wait, wait)

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

  def _choose(self, request_ids: Sequence[str]) -> None:
    """Chooses a source for each request, or switches drafting off."""
    batch = len(request_ids)
    if self._num_plans >= self._next_shape:
      self._shape = max(self._shapes(), key=lambda shape: self._best(request_ids, shape)[0])
      self._next_shape = self._num_plans + STEPS_PER_SHAPE
    self._next_choice = self._num_plans + STEPS_PER_CHOICE
    speed, choices = self._best(request_ids, self._shape)
    gain = 1 - batch / self.times.decode(batch) / speed
    was_on, self.is_on = self.is_on, gain > (OFF_GAIN if self.is_on else ON_GAIN)
    self._chosen, self._usual = {}, NOTHING
    if self.is_on != was_on:
      self._verdicts.clear()
    if self.is_on:
      self._chosen = dict(zip(request_ids, choices, strict=True))
      self._usual = max(self._options(self._shape), key=choices.count)
    elif was_on:
      self._set_aside(batch)

  def observe(
    self,
    request_id: str,
    source: Source,
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
      num_drafted: tokens of the main path; at most `max_length` of them count.
      num_accepted: accepted tokens.
      sibling_held: if the main path failed, whether a sibling was accepted; None without siblings.

    Raises:
      ValueError: if more were accepted than drafted, or the source drafts nothing.
    """
    if source not in self._pools or not 0 <= num_accepted <= num_drafted:
      raise ValueError(
        f"SourceBudget.observe: got {num_accepted} accepted of {num_drafted} drafted by {source!r},"
        f" expected accepted <= drafted, by one of {SOURCES[1:]}; pass the counts of the main path."
      )
    pool = self._pools[source]
    size = min(num_drafted, self.config.max_length)
    rates = pool.rates()[:size]
    num_tried = min(num_accepted + 1, size)
    own = self._own.setdefault(request_id, {})
    held, expected = own.get(source, (0.0, 0.0))
    held, expected = held + min(num_accepted, size), expected + float(rates[:num_tried].sum())
    own[source] = (held, expected)
    if num_accepted == size and not self.is_on:
      self._verdicts.clear()  # A fully accepted probe: re-evaluate now.
    pool.fade()
    pool.tried[:num_tried] += 1
    pool.held[: min(num_accepted, size)] += 1
    if sibling_held is not None and num_accepted < num_drafted:
      pool.siblings_tried += 1
      pool.siblings_held += sibling_held

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
      seen = self._pools["both"].tried[0]
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
    """Returns the seconds of a step with these drafts."""
    kinds = [*dict.fromkeys(choices)]
    return self._seconds(kinds, [choices.count(kind) for kind in kinds])

  def _seconds(self, kinds: Sequence[Choice], counts: Sequence[int]) -> float:
    batch, rows = sum(counts), sum(kind.rows * count for kind, count in zip(kinds, counts))
    if not rows:
      return self.times.decode(batch)
    seconds = self.times.step(batch, batch + rows)
    for cost, lengths in (
      (self._costs["suffix"], [kind.suffix_length for kind in kinds]),
      (self._costs["model"], [kind.model_length for kind in kinds]),
    ):
      drafting = [(n, count) for n, count in zip(lengths, counts) if n and count]
      if drafting:
        longest = max(n for n, _ in drafting)
        seconds += cost.seconds(sum(count for _, count in drafting), longest)
    return seconds

  def _gain(self, request_id: str, source: str, length: int, width: int) -> float:
    pool = self._pools[source]
    held, expected = self._own.get(request_id, {}).get(source, (0.0, 0.0))
    factor = (held + OWN) / (expected + OWN)
    # Each sibling is accepted as often as a single one, but at most the remainder.
    sibling = 1 - (1 - pool.sibling_rate()) ** math.log2(width) if width > 1 else 0.0
    gain, reached = 0.0, 1.0
    for rate in pool.rate_list()[:length]:
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
      Choice("suffix", suffix, 0, 1),
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
    marginal = self._marginal_costs(options)
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

  def _marginal_costs(self, options: Sequence[Choice]) -> np.ndarray:
    """Returns f64[o]: the additional drafting time of one more request."""
    found = []
    for option in options:
      cost = 0.0
      for source, length in (
        ("suffix", option.suffix_length), ("model", option.model_length)
      ):  # fmt: skip
        if length:
          times = self._costs[source]
          cost += times.seconds(2, length) - times.seconds(1, length)
      found.append(cost)
    return np.array(found)

  def _probe_alone(self, batch: int) -> Sequence[Choice]:
    """Returns a step in which one request drafts as a probe, if the credit suffices."""
    probes = self._probes.get(batch)
    if probes is None:
      probes = self._probes[batch] = self._probes_of(batch)
    source = min(self._costs, key=lambda name: float(self._pools[name].tried[0]))
    choice, lost = probes.of_source[source]
    # 0.5, because counts decay.
    if self._pools[source].tried[0] > FIRST_PROBES - 0.5 or lost > FIRST_COST:
      # A probe that costs more than a whole step waits for as long as it takes.
      self._credit = min(self._credit, max(1.0, lost)) + probes.saved
      if lost > self._credit:
        return ()
      self._credit -= max(lost, 0.0)
    choices = [NOTHING] * batch
    choices[self._num_plans % batch] = choice
    return choices

  def _probes_of(self, batch: int) -> _Probes:
    """Returns the possible probes for a batch, assuming that no drafted token is accepted."""
    plain = self.times.decode(batch)
    of_source: dict[str, tuple[Choice, float]] = {}
    for source in self._costs:
      kinds = [
        (choice, self._seconds([choice, NOTHING], [1, batch - 1]) / plain - 1)
        for choice in self._tries(source)
      ]
      # A probe that costs more than a step is shortened if that helps; otherwise a long one is more
      # informative.
      of_source[source] = next((kind for kind in kinds if kind[1] <= 1.0), kinds[1])
    return _Probes(PROBE_COST * self.times.decode_steps(batch), of_source)

  def _tries(self, source: str) -> list[Choice]:
    """Returns a source's possible probes, longest first."""
    found = []
    for length, width in ((PROBE_LENGTH, 2), (PROBE_LENGTH, 1), (2, 1), (1, 1)):
      length, width = min(length, self.config.max_length), min(width, self.config.max_width)
      is_model = source == "model"
      found.append(
        Choice("model", 0, length, width) if is_model else Choice("suffix", length, 0, 1)
      )
    return found

  def _with_probe(self, request_ids: Sequence[str], choices: list[Choice]) -> list[Choice]:
    """Lets one request probe the least observed source, if the credit suffices."""
    seconds = self.seconds(choices)
    self._credit = min(self._credit + PROBE_COST, 1.0 + PROBE_COST)
    used = {choice.source for choice in choices} - {"none"}
    unused = [source for source in self._costs if source not in used and "both" not in used]
    if not unused:
      return choices
    source = min(unused, key=lambda name: float(self._pools[name].tried[0]))
    place = self._num_plans % len(request_ids)
    # The probe is assumed to have no accepted token.
    tokens = len(choices) + sum(map(self.expected, request_ids, choices))
    forgone = self.expected(request_ids[place], choices[place]) / tokens
    # A probe that costs more than the maximum credit is shortened.
    for choice in self._tries(source):
      tried = list(choices)
      tried[place] = choice
      lost = self.seconds(tried) / seconds - 1 + forgone
      if lost <= self._credit:
        self._credit -= max(lost, 0.0)
        return tried
      if lost <= 1.0:
        break
    return choices

  @property
  def acceptance(self) -> Mapping[str, tuple[float, ...]]:
    """By source: a[1], a[2], ...: P(the first k tokens of its main path are all accepted)."""
    return {
      source: tuple(np.cumprod(pool.rates()).tolist()) for source, pool in self._pools.items()
    }
