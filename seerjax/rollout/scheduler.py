"""The policy core: which request runs its next chunk, on which instance.

    buffer (what waits) + instances (what is free) --next--> Decision, again and again until None

No JAX, no clock, no randomness: equal calls give equal decisions on every process, and the
simulator runs these very lines. A queue orders the waiting requests, one queue a policy; routing is
shared. Heaps hold stale entries, which are dropped when they surface, so that a decision costs
O(log n + instances).

Source: arXiv 2511.14617v3, sections 3.2 and 3.3, algorithm 2; OSDI '26 for cache-aware routing.
What goes beyond it: `Ours`.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
import dataclasses
import heapq
from typing import Any, NamedTuple

import numpy as np

from seerjax.rollout.buffer import NOWHERE, Buffer, Group, Item, State, kv_positions


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupFCFS:
  """The baseline that others ship: whole groups, whole requests, first come first served.

  A group goes to one instance, by arrival, round robin. A request is admitted as soon as its
  *present* KV fits, and runs to its end: when pages run out, the caller preempts the request that
  was admitted last there (`Buffer.lost_kv`), which then starts again before later ones.

  Attributes:
    reserves: admit only where the KV of all `max_tokens` fits, so that nothing is ever preempted.
  """

  reserves: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divided:
  """Chunks instead of whole requests, in order of arrival, on any instance.

  Attributes:
    chunk_tokens: most tokens of a chunk.
    max_spread: beyond this difference of requests in flight between the most and the least loaded
      instance, load decides the instance, else the longest cached prefix does.
    min_pull_tokens: more tokens than these missing on the chosen instance are pulled from the one
      that has them; fewer are computed again.
  """

  chunk_tokens: int = 8192
  max_spread: int = 32
  min_pull_tokens: int = 512

  def __post_init__(self):
    if self.chunk_tokens < 1 or self.max_spread < 0 or self.min_pull_tokens < 0:
      raise ValueError(
        f"{type(self).__name__}: got chunk_tokens={self.chunk_tokens},"
        f" max_spread={self.max_spread}, min_pull_tokens={self.min_pull_tokens}, expected at least"
        " 1, 0 and 0; 8192, 32 and 512 are the source's."
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextAware(Divided):
  """Algorithm 2: probes first, fewest generated first; then the largest group estimate.

  The estimate of a group is the longest of its finished requests, `max_tokens` before the first.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Oracle(Divided):
  """Longest first by true lengths: what perfect estimates would give. Simulation only.

  Attributes:
    lengths: generated tokens by request id.
  """

  lengths: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ours(Divided):
  """Algorithm 2 with what it leaves open, settled.

  Attributes:
    quantile: of a group's finished lengths, its estimate; never below what a live member has.
    lookahead: waiting requests that may pass a first one that fits nowhere; the instance where it
      will fit soonest is kept for it meanwhile.
    fair_every: each so many decisions the request that arrived first goes first; 0 never.
    min_correlation: below this rank correlation of probes with their siblings, estimates are noise,
      and the order is that of `Divided`.
    min_groups: groups with a finished probe and sibling before the correlation is believed.
  """

  quantile: float = 0.75
  lookahead: int = 8
  fair_every: int = 64
  min_correlation: float = 0.3
  min_groups: int = 32

  def __post_init__(self):
    super().__post_init__()
    if not 0 <= self.quantile <= 1 or not -1 <= self.min_correlation <= 1:
      raise ValueError(
        f"Ours: got quantile={self.quantile}, min_correlation={self.min_correlation}, expected"
        " values in [0, 1] and [-1, 1]; 0.75 and 0.3 are usual."
      )
    if self.lookahead < 0 or self.fair_every < 0 or self.min_groups < 2:
      raise ValueError(
        f"Ours: got lookahead={self.lookahead}, fair_every={self.fair_every},"
        f" min_groups={self.min_groups}, expected at least 0, 0 and 2; 8, 64 and 32 are usual."
      )


SchedulerConfig = GroupFCFS | Divided | ContextAware | Oracle | Ours


@dataclasses.dataclass
class Instances:
  """What the instances have free, by instance. The caller keeps it true between calls of `next`.

  KV of waiting requests does not count as taken: it moves away when a running chunk needs the room.

  Attributes:
    page_size: positions of a page.
    num_pages: that an instance has.
    free_pages: those that no running chunk holds or has reserved.
    num_running: requests in flight.
    max_running: most requests in flight.
  """

  page_size: int
  num_pages: list[int]
  free_pages: list[int]
  num_running: list[int]
  max_running: list[int]

  @classmethod
  def empty(
    cls, num_instances: int, *, page_size: int, num_pages: int, max_running: int
  ) -> Instances:
    """Returns equal instances that run nothing."""
    if min(num_instances, page_size, num_pages, max_running) < 1:
      raise ValueError(
        f"Instances: got num_instances={num_instances}, page_size={page_size},"
        f" num_pages={num_pages}, max_running={max_running}, expected at least 1 of each."
      )
    pages = [num_pages] * num_instances
    return cls(page_size, pages, list(pages), [0] * num_instances, [max_running] * num_instances)

  def admit(self, decision: Decision) -> None:
    """Takes a decision's pages and place."""
    self.free_pages[decision.instance] -= decision.num_pages
    self.num_running[decision.instance] += 1

  def release(self, instance: int, num_pages: int) -> None:
    """Gives the pages and the place of a chunk back."""
    self.free_pages[instance] += num_pages
    self.num_running[instance] -= 1


class Decision(NamedTuple):
  """Run this request's next chunk there.

  Attributes:
    request_id: of a waiting request.
    instance: that runs it.
    max_chunk_tokens: generate at most so many tokens.
    num_pages: that the chunk holds: those of its last position, or with `GroupFCFS` the present.
    is_probe: its group's first request.
    prefill_tokens: positions to compute first: their KV is not there and is not pulled.
    pull_tokens: positions of KV to fetch from `pull_from` first.
    pull_from: instance, or -1.
  """

  request_id: str
  instance: int
  max_chunk_tokens: int
  num_pages: int
  is_probe: bool
  prefill_tokens: int
  pull_tokens: int = 0
  pull_from: int = NOWHERE


class Scheduler:
  """Says what runs next; reads a buffer, changes nothing in it.

      while (decision := scheduler.next(instances)) is not None:
        buffer.begin_chunk(decision.request_id, decision.instance, decision.max_chunk_tokens)
        instances.admit(decision)
  """

  def __init__(self, config: SchedulerConfig, buffer: Buffer):
    self.config = config
    self.buffer = buffer
    self.num_decisions = 0
    self._queue = _queue_of(config)

  def next(self, instances: Instances) -> Decision | None:
    """Returns what to run next, or None until something ends or arrives.

    Apply a decision before asking again.

    Raises:
      ValueError: if a request can never fit.
    """
    for item in self.buffer.take_changes():
      if item.num_chunks == 0:
        _require_fits(item, instances)
      self._queue.update(item)
    decision = self._queue.decide(instances)
    self.num_decisions += decision is not None
    return decision

  def estimate(self, group: str) -> int:
    """Returns how long the policy believes a group's requests to be, in generated tokens.

    A policy without estimates believes `max_tokens`.
    """
    return self._queue.estimate(self.buffer.groups[group])


def num_pages(positions: int, page_size: int) -> int:
  """Returns how many pages hold so many positions."""
  return -(-positions // page_size)


class _Arrivals:
  """Waiting requests by arrival."""

  def __init__(self):
    self._heap: list[tuple[int, int, Item]] = []

  def push(self, item: Item) -> None:
    heapq.heappush(self._heap, (item.index, item.version, item))

  def peek(self) -> Item | None:
    return _peek(self._heap)

  def pop(self) -> None:
    heapq.heappop(self._heap)


class _GroupQueue:
  """Policy of `GroupFCFS`: one queue an instance, groups dealt out in turn."""

  def __init__(self, config: GroupFCFS):
    self._config = config
    self._new: list[Item] = []
    self._queues: list[_Arrivals] = []
    self._turn = 0

  def update(self, item: Item) -> None:
    if item.state is State.WAITING:
      self._new.append(item)

  def estimate(self, group: Group) -> int:
    return _upper_bound(group)

  def decide(self, instances: Instances) -> Decision | None:
    count = len(instances.free_pages)
    while len(self._queues) < count:
      self._queues.append(_Arrivals())
    for item in self._new:
      self._queues[item.group.index % count].push(item)
    self._new.clear()
    for place in range(self._turn, self._turn + count):
      instance = place % count
      item = self._queues[instance].peek()
      if item is None or instances.num_running[instance] >= instances.max_running[instance]:
        continue
      left = item.max_tokens - item.generated
      positions = item.prompt_tokens + item.generated + (left - 1 if self._config.reserves else 0)
      pages = num_pages(positions, instances.page_size)
      if pages <= instances.free_pages[instance]:
        self._turn = instance + 1
        here = item.prompt_tokens if instance in item.group.prompt_instances else 0
        prefill = kv_positions(item) - here
        return Decision(item.request_id, instance, left, pages, item.member == 0, prefill)
    return None


class _ArrivalQueue:
  """Policy of `Divided`: the first that arrived, or nothing."""

  def __init__(self, config: Divided):
    self._config = config
    self._waiting = _Arrivals()

  def update(self, item: Item) -> None:
    if item.state is State.WAITING:
      self._waiting.push(item)

  def estimate(self, group: Group) -> int:
    return _upper_bound(group)

  def decide(self, instances: Instances) -> Decision | None:
    item = self._waiting.peek()
    return item and _place(item, instances, self._config)


class _OracleQueue:
  """Policy of `Oracle`: the one with most tokens left, or nothing."""

  def __init__(self, config: Oracle):
    self._config = config
    self._heap: list[tuple[int, int, int, Item]] = []

  def update(self, item: Item) -> None:
    if item.state is State.WAITING:
      left = self._config.lengths[item.request_id] - item.generated
      heapq.heappush(self._heap, (-left, item.index, item.version, item))

  def estimate(self, group: Group) -> int:
    return max(self._config.lengths[item.request_id] for item in group.members)

  def decide(self, instances: Instances) -> Decision | None:
    item = _peek(self._heap)
    return item and _place(item, instances, self._config)


class _Context:
  """Waiting probes by what they have generated; other waiting requests by their group's estimate.

  A group's entry in the heap of groups is stale once its estimate has changed (`versions`), and is
  taken out when it surfaces without a waiting member (`queued`).
  """

  def __init__(self):
    self._probes: list[tuple[int, int, int, Item]] = []
    self._groups: list[tuple[int, int, int]] = []  # (-estimate, group, version)
    self._members: list[list[tuple[int, int, Item]]] = []  # By group: (member, version, item).
    self._estimates: list[int] = []
    self._versions: list[int] = []
    self._queued: list[bool] = []

  def add_group(self, group: Group) -> None:
    while len(self._members) <= group.index:
      self._members.append([])
      self._estimates.append(0)
      self._versions.append(0)
      self._queued.append(False)

  def push(self, item: Item) -> None:
    if item.member == 0:
      heapq.heappush(self._probes, (item.generated, item.index, item.version, item))
      return
    group = item.group.index
    heapq.heappush(self._members[group], (item.member, item.version, item))
    if not self._queued[group]:
      self._push_group(group)

  def set_estimate(self, group: int, estimate: int) -> None:
    if estimate != self._estimates[group]:
      self._estimates[group] = estimate
      if self._queued[group]:
        self._push_group(group)

  def estimate(self, group: int) -> int:
    return self._estimates[group]

  def peek(self) -> Item | None:
    probe = _peek(self._probes)
    if probe is not None:
      return probe
    while self._groups:
      _, group, version = self._groups[0]
      if version == self._versions[group]:
        item = _peek(self._members[group])
        if item is not None:
          return item
        self._queued[group] = False
      heapq.heappop(self._groups)
    return None

  def pop(self) -> None:
    heap: list[Any] = self._probes or self._members[self._groups[0][1]]
    heapq.heappop(heap)

  def _push_group(self, group: int) -> None:
    self._queued[group] = True
    self._versions[group] += 1
    heapq.heappush(self._groups, (-self._estimates[group], group, self._versions[group]))


class _ContextQueue:
  """Policy of `ContextAware`, as printed."""

  def __init__(self, config: ContextAware):
    self._config = config
    self._context = _Context()
    self._longest: dict[int, int] = {}  # By group: of its finished requests.

  def update(self, item: Item) -> None:
    group = item.group.index
    self._context.add_group(item.group)
    if item.state is State.FINISHED:
      self._longest[group] = max(self._longest.get(group, 0), item.generated)
    if item.state is not State.RUNNING:
      self._context.set_estimate(group, self.estimate(item.group))
    if item.state is State.WAITING:
      self._context.push(item)

  def estimate(self, group: Group) -> int:
    return self._longest.get(group.index, 0) or _upper_bound(group)

  def decide(self, instances: Instances) -> Decision | None:
    item = self._context.peek()
    return item and _place(item, instances, self._config)


class _OurQueue:
  """Policy of `Ours`."""

  def __init__(self, config: Ours):
    self._config = config
    self._arrivals = _Arrivals()
    self._context = _Context()
    self._finished: list[list[int]] = []  # By group: lengths, ascending.
    self._floors: list[int] = []  # By group: most that a member has generated.
    self._correlation = _Correlation(config.min_groups)
    self._until_fair = config.fair_every
    self._held: tuple[Item, int] | None = None  # A request that fits nowhere; the place kept.

  @property
  def follows_estimates(self) -> bool:
    """Returns whether lengths within a group are alike, or not yet known not to be."""
    correlation = self._correlation.value
    return correlation is None or correlation >= self._config.min_correlation

  def update(self, item: Item) -> None:
    group = item.group.index
    self._context.add_group(item.group)
    while len(self._finished) <= group:
      self._finished.append([])
      self._floors.append(0)
    if item.generated > self._floors[group]:
      self._floors[group] = item.generated
    if item.state is State.FINISHED:
      bisect.insort(self._finished[group], item.generated)
      self._correlation.add(item)
    self._context.set_estimate(group, self.estimate(item.group))
    if item.state is State.WAITING:
      self._arrivals.push(item)
      self._context.push(item)

  def estimate(self, group: Group) -> int:
    lengths = self._finished[group.index]
    if not lengths:
      return _upper_bound(group)
    rank = int(self._config.quantile * (len(lengths) - 1) + 0.5)
    return max(lengths[rank], self._floors[group.index])

  def decide(self, instances: Instances) -> Decision | None:
    is_fair = self._config.fair_every > 0 and self._until_fair == 0
    source = self._context if self.follows_estimates and not is_fair else self._arrivals
    decision = self._decide_from(source, instances)
    if decision is not None:
      self._until_fair = self._config.fair_every if is_fair else max(self._until_fair - 1, 0)
    return decision

  def _decide_from(self, source: _Context | _Arrivals, instances: Instances) -> Decision | None:
    if self._held is not None:
      item = self._held[0]
      if item.state is not State.WAITING:
        self._held = None
      else:
        decision = _place(item, instances, self._config)
        if decision is not None:
          return decision
    passed: list[Item] = []
    decision = None
    while len(passed) <= self._config.lookahead:
      item = source.peek()
      if item is None:
        break
      keep = NOWHERE if self._held is None else self._held[1]
      decision = _place(item, instances, self._config, keep=keep)
      if decision is not None:
        break
      if self._held is None:
        self._held = (item, _roomiest(instances))
      source.pop()
      passed.append(item)
    for item in passed:
      source.push(item)
    return decision


class _Correlation:
  """Spearman's rank correlation of each probe's length with the mean of its finished siblings'.

  Read again after every twentieth more finished requests, since ranks cost a sort.
  """

  def __init__(self, min_groups: int):
    self._min_groups = min_groups
    self._probes: dict[int, int] = {}
    self._siblings: dict[int, tuple[int, int]] = {}  # By group: count, sum.
    self._num_added = 0
    self._next_reading = min_groups
    self.value: float | None = None

  def add(self, item: Item) -> None:
    group = item.group.index
    if item.member == 0:
      self._probes[group] = item.generated
    else:
      count, total = self._siblings.get(group, (0, 0))
      self._siblings[group] = (count + 1, total + item.generated)
    self._num_added += 1
    if self._num_added >= self._next_reading:
      self._next_reading = self._num_added + max(self._num_added // 20, 8)
      self._read()

  def _read(self) -> None:
    groups = [group for group in self._probes if group in self._siblings]
    if len(groups) >= self._min_groups:
      probes = np.array([self._probes[group] for group in groups], float)
      means = np.array([self._siblings[group][1] / self._siblings[group][0] for group in groups])
      self.value = rank_correlation(probes, means)


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
  """Returns Spearman's correlation of f64[n] and f64[n]; ties share a rank, a constant gives 0."""
  ranks = [_ranks(values) for values in (a, b)]
  deviations = [rank - rank.mean() for rank in ranks]
  scale = np.sqrt((deviations[0] ** 2).sum() * (deviations[1] ** 2).sum())
  return float((deviations[0] * deviations[1]).sum() / scale) if scale > 0 else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
  _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
  ends = np.cumsum(counts)
  return (ends - (counts - 1) / 2)[inverse]


_Queue = _GroupQueue | _ArrivalQueue | _OracleQueue | _ContextQueue | _OurQueue


def _queue_of(config: SchedulerConfig) -> _Queue:
  # The subclasses first.
  match config:
    case GroupFCFS():
      return _GroupQueue(config)
    case Ours():
      return _OurQueue(config)
    case Oracle():
      return _OracleQueue(config)
    case ContextAware():
      return _ContextQueue(config)
    case Divided():
      return _ArrivalQueue(config)


def _peek(heap: list[Any]) -> Item | None:
  """Returns the first item that is not stale; an entry ends with (version, item)."""
  while heap:
    entry = heap[0]
    if entry[-2] == entry[-1].version:
      return entry[-1]
    heapq.heappop(heap)
  return None


def _upper_bound(group: Group) -> int:
  return max(item.max_tokens for item in group.members)


def _require_fits(item: Item, instances: Instances) -> None:
  needed = num_pages(item.prompt_tokens + item.max_tokens - 1, instances.page_size)
  if needed > max(instances.num_pages):
    raise ValueError(
      f"scheduler: got request {item.request_id!r} of {item.prompt_tokens} + {item.max_tokens}"
      f" tokens, which needs {needed} pages, expected at most {max(instances.num_pages)}, all that"
      " an instance has; give instances more pages, or lower max_tokens."
    )


def _roomiest(instances: Instances) -> int:
  free = instances.free_pages
  return max(range(len(free)), key=lambda i: (free[i], -instances.num_running[i], -i))


def _place(
  item: Item, instances: Instances, config: Divided, keep: int = NOWHERE
) -> Decision | None:
  """Returns the item's next chunk where it fits best, or None; never on the instance `keep`.

  Balanced load: where its KV is, else the least loaded that holds the group's prompt. Else, and
  where that does not fit: the least loaded of all, then the roomiest.
  """
  chunk = min(config.chunk_tokens, item.max_tokens - item.generated)
  pages = num_pages(item.prompt_tokens + item.generated + chunk - 1, instances.page_size)
  free, running, most = instances.free_pages, instances.num_running, instances.max_running
  if pages > max(free):
    return None
  prompts = item.group.prompt_instances
  chosen = NOWHERE
  if max(running) - min(running) <= config.max_spread:
    home = (item.kv_instance,) if item.kv_instance != NOWHERE else prompts
    chosen = min(
      (i for i in home if free[i] >= pages and running[i] < most[i] and i != keep),
      key=lambda i: (running[i], i),
      default=NOWHERE,
    )
  if chosen == NOWHERE:
    # The least loaded is nearly always roomy enough; look at the others only if it is not.
    chosen = running.index(min(running))
    if free[chosen] < pages or running[chosen] >= most[chosen] or chosen == keep:
      chosen = min(
        (i for i in range(len(free)) if free[i] >= pages and running[i] < most[i] and i != keep),
        key=lambda i: (running[i], -free[i], i),
        default=NOWHERE,
      )
    if chosen == NOWHERE:
      return None
  best, source = item.kv_tokens, item.kv_instance
  if source == NOWHERE and prompts:
    best, source = item.prompt_tokens, min(prompts)
  here = item.prompt_tokens if chosen in prompts else 0
  if chosen == item.kv_instance:
    here = item.kv_tokens
  pull = best - here if best - here > config.min_pull_tokens else 0
  prefill = kv_positions(item) - here - pull
  is_probe = item.member == 0
  if pull:
    return Decision(item.request_id, chosen, chunk, pages, is_probe, prefill, pull, source)
  return Decision(item.request_id, chosen, chunk, pages, is_probe, prefill)
