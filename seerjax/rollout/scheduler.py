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

from collections.abc import Mapping
import dataclasses
import heapq
import math
from typing import NamedTuple

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
class ByPrefix:
  """Where the longest prefix is cached, while load is balanced; else the fewest in flight.

  Attributes:
    max_spread: load is balanced up to this difference of requests in flight.
  """

  max_spread: int = 32

  def __post_init__(self):
    if self.max_spread < 0:
      raise ValueError(f"ByPrefix: got max_spread={self.max_spread}, expected at least 0; say 32.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByRoom:
  """Where most pages are free, unless where its KV or prompt is there are nearly as many.

  What an instance's step costs beyond its fixed part follows from the KV that it reads, so this
  evens the instances' steps out, which numbers of requests do not.

  Attributes:
    max_imbalance: part of an instance's pages by which its KV's home may have fewer free.
  """

  max_imbalance: float = 0.05

  def __post_init__(self):
    if not 0 <= self.max_imbalance <= 1:
      raise ValueError(
        f"ByRoom: got max_imbalance={self.max_imbalance}, expected a part in [0, 1]; say 0.05."
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divided:
  """Chunks instead of whole requests, in order of arrival, on any instance.

  Attributes:
    chunk_tokens: most tokens of a chunk.
    routing: how an instance is chosen among those where the chunk fits.
    min_pull_tokens: more tokens than these missing on the chosen instance are pulled from the one
      that has them; fewer are computed again.
  """

  chunk_tokens: int = 8192
  routing: ByPrefix | ByRoom = ByPrefix()
  min_pull_tokens: int = 512

  def __post_init__(self):
    if self.chunk_tokens < 1 or self.min_pull_tokens < 0:
      raise ValueError(
        f"{type(self).__name__}: got chunk_tokens={self.chunk_tokens},"
        f" min_pull_tokens={self.min_pull_tokens}, expected at least 1 and 0; 8192 and 512 are the"
        " source's."
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
  """What `Divided` does, until lengths within groups are seen to be alike; then the longest first.

  Which request is long is luck where lengths within a group are not alike: any other order than
  that of arrival then loses as often as it wins. So the first chunks go as `Divided` gives them,
  routing included, and every decision stays so where likeness stays low. It is measured on what has
  finished of the first `num_compared` groups and on what their others have generated so far
  (`rank_correlation`). Once that is at least `min_correlation`, its standard error taken off, while
  much still waits and has never run, the order is from then on that of algorithm 2 with better
  estimates:

  - the first requests of all groups go first, the least generated of them before the others, so
    that every group is probed;
  - then the group of the largest estimate: the longest of its members that have finished, and never
    below what one that has not finished has generated; `max_tokens` before the first has finished.

  Attributes:
    routing: once lengths are alike, and with 16 instances or more; else it is `ByPrefix()`.
    min_correlation: see above, of whole lengths; 2 is always `Divided`.
    num_compared: groups, by arrival, whose lengths are compared.
    fair_every: once lengths are alike, each so many decisions the first that arrived goes first; 0
      never.
  """

  chunk_tokens: int = 2048
  routing: ByPrefix | ByRoom = ByRoom()
  min_correlation: float = 0.5
  num_compared: int = 64
  fair_every: int = 64

  def __post_init__(self):
    super().__post_init__()
    if not -1 <= self.min_correlation <= 2:
      raise ValueError(
        f"Ours: got min_correlation={self.min_correlation}, expected a value in [-1, 2]; 0.5 is"
        " usual, 2 is never."
      )
    if min(self.num_compared, self.fair_every) < 0:
      raise ValueError(
        f"Ours: got num_compared={self.num_compared}, fair_every={self.fair_every}, expected at"
        " least 0 of each; 64 and 64 are usual."
      )


SchedulerConfig = GroupFCFS | Divided | ContextAware | Oracle | Ours


@dataclasses.dataclass
class Instances:
  """What the instances have free, by instance. The caller keeps it true between calls of `next`.

  The lists are for reading: `admit`, `release` and `see` write them, and `room` with them, which
  each decision would otherwise have to work out for all instances.

  KV of waiting requests does not count as taken: it moves away when a running chunk needs the room.

  Attributes:
    page_size: positions of a page.
    num_pages: that an instance has.
    free_pages: those that no running chunk holds or has reserved.
    num_running: requests in flight.
    max_running: most requests in flight.
    room: pages that a chunk could have: those free, or none where no place is left.
  """

  page_size: int
  num_pages: list[int]
  free_pages: list[int]
  num_running: list[int]
  max_running: list[int]
  room: list[int] = dataclasses.field(init=False)

  def __post_init__(self):
    self.room = [0] * len(self.num_pages)
    for instance in range(len(self.num_pages)):
      self._look(instance)

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
    self._look(decision.instance)

  def release(self, instance: int, num_pages: int) -> None:
    """Gives the pages and the place of a chunk back."""
    self.free_pages[instance] += num_pages
    self.num_running[instance] -= 1
    self._look(instance)

  def see(
    self,
    instance: int,
    *,
    free_pages: int | None = None,
    num_running: int | None = None,
    max_running: int | None = None,
  ) -> None:
    """Takes notice of what an instance has now."""
    if free_pages is not None:
      self.free_pages[instance] = free_pages
    if num_running is not None:
      self.num_running[instance] = num_running
    if max_running is not None:
      self.max_running[instance] = max_running
    self._look(instance)

  def _look(self, instance: int) -> None:
    has_place = self.num_running[instance] < self.max_running[instance]
    self.room[instance] = self.free_pages[instance] if has_place else 0


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
    # Nearly every None is this one: no place is left, or no page.
    if max(instances.room) <= 0:
      return None
    decision = self._queue.decide(instances)
    self.num_decisions += decision is not None
    return decision

  def estimate(self, group: str) -> int:
    """Returns how long the policy believes a group's requests to be, in generated tokens.

    A policy without estimates believes `max_tokens`.
    """
    return self._queue.estimate(self.buffer.groups[group])


def _packed(first: int, second: int, third: int) -> int:
  """Returns one integer that sorts as (first, second, third); one compares faster than three."""
  return (first << 64) | (second << 32) | third


def num_pages(positions: int, page_size: int) -> int:
  """Returns how many pages hold so many positions."""
  return -(-positions // page_size)


_Entry = tuple[int, int, int, Item]  # (key, arrival, serial, item)


class _Sorted:
  """Waiting requests by a key that may change, ties by arrival: a heap that drops old entries late.

  A request's entry is the one of its last push; it counts while the request waits.
  """

  def __init__(self):
    self._heap: list[_Entry] = []
    self._serials: dict[int, int] = {}  # By request: that of its last push.
    self._num_pushes = 0

  def push(self, item: Item, key: int = 0) -> None:
    self._num_pushes += 1
    self._serials[item.index] = self._num_pushes
    heapq.heappush(self._heap, (key, item.index, self._num_pushes, item))

  def peek(self) -> Item | None:
    while self._heap:
      _, index, serial, item = self._heap[0]
      if item.state is State.WAITING and self._serials[index] == serial:
        return item
      heapq.heappop(self._heap)
    return None


class _InOrder:
  """Waiting requests by arrival: a heap that drops those that no longer wait late."""

  def __init__(self):
    self._heap: list[tuple[int, Item]] = []
    self._inside: set[int] = set()

  def push(self, item: Item) -> None:
    if item.index not in self._inside:
      self._inside.add(item.index)
      heapq.heappush(self._heap, (item.index, item))

  def peek(self) -> Item | None:
    while self._heap:
      index, item = self._heap[0]
      if item.state is State.WAITING:
        return item
      heapq.heappop(self._heap)
      self._inside.remove(index)
    return None


class _Ranked:
  """Waiting requests by the rank of their group, the lowest first; ties by arrival.

  Two heaps, one over the other: every group has its requests in one of its own, and stands in the
  heap of groups as its first one does. So a group gets another rank by one push, whatever waits in
  it. A group's entry is the one of its last push; it may promise more than the group still has,
  never less.
  """

  def __init__(self):
    self._groups: list[tuple[int, int, int]] = []  # (rank, arrival of the first, group)
    self._waiting: dict[int, _InOrder] = {}  # By group.
    self._ranks: dict[int, int] = {}
    self._shown: dict[int, tuple[int, int, int]] = {}  # By group: its last entry.

  def rank(self, group: int, rank: int) -> None:
    """Gives a group its rank."""
    if self._ranks.get(group) != rank:
      self._ranks[group] = rank
      waiting = self._waiting.get(group)
      first = waiting and waiting.peek()
      if first:
        self._show(group, first)

  def push(self, item: Item) -> None:
    """Takes a request of a group that has a rank."""
    group = item.group.index
    waiting = self._waiting.setdefault(group, _InOrder())
    waiting.push(item)
    if waiting.peek() is item:
      self._show(group, item)

  def peek(self) -> Item | None:
    while self._groups:
      entry = self._groups[0]
      group = entry[2]
      first = self._waiting[group].peek() if self._shown.get(group) == entry else None
      if first is not None and first.index == entry[1]:
        return first
      heapq.heappop(self._groups)
      if first is not None:
        self._show(group, first)
      elif self._shown.get(group) == entry:
        del self._shown[group]
    return None

  def _show(self, group: int, first: Item) -> None:
    """Puts a group where its first request belongs."""
    entry = (self._ranks[group], first.index, group)
    if self._shown.get(group) != entry:
      self._shown[group] = entry
      heapq.heappush(self._groups, entry)


class _GroupQueue:
  """Policy of `GroupFCFS`: one queue an instance, groups dealt out in turn."""

  def __init__(self, config: GroupFCFS):
    self._config = config
    self._new: list[Item] = []
    self._queues: list[_Sorted] = []
    self._turn = 0

  def update(self, item: Item) -> None:
    if item.state is State.WAITING:
      self._new.append(item)

  def estimate(self, group: Group) -> int:
    return group.max_tokens

  def decide(self, instances: Instances) -> Decision | None:
    count = len(instances.free_pages)
    while len(self._queues) < count:
      self._queues.append(_Sorted())
    for item in self._new:
      self._queues[item.group.index % count].push(item)
    self._new.clear()
    for place in range(self._turn, self._turn + count):
      instance = place % count
      item = self._queues[instance].peek()
      if item is None:
        continue
      left = item.max_tokens - item.generated
      positions = item.prompt_tokens + item.generated + (left - 1 if self._config.reserves else 0)
      pages = num_pages(positions, instances.page_size)
      if pages <= instances.room[instance]:
        self._turn = instance + 1
        here = item.prompt_tokens if instance in item.group.prompt_instances else 0
        prefill = kv_positions(item) - here
        return Decision(item.request_id, instance, left, pages, item.member == 0, prefill)
    return None


class _ArrivalQueue:
  """Policy of `Divided`: the first that arrived, or nothing."""

  def __init__(self, config: Divided):
    self._config = config
    self._waiting = _InOrder()

  def update(self, item: Item) -> None:
    if item.state is State.WAITING:
      self._waiting.push(item)

  def estimate(self, group: Group) -> int:
    return group.max_tokens

  def first(self) -> Item | None:
    """Returns who waits and arrived first."""
    return self._waiting.peek()

  def decide(self, instances: Instances) -> Decision | None:
    item = self._waiting.peek()
    return item and _place(item, instances, _Room(instances), self._config)


class _OracleQueue:
  """Policy of `Oracle`: the one with most tokens left, or nothing."""

  def __init__(self, config: Oracle):
    self._config = config
    self._waiting = _Sorted()

  def update(self, item: Item) -> None:
    if item.state is State.WAITING:
      self._waiting.push(item, item.generated - self._config.lengths[item.request_id])

  def estimate(self, group: Group) -> int:
    return max(self._config.lengths[item.request_id] for item in group.members)

  def decide(self, instances: Instances) -> Decision | None:
    item = self._waiting.peek()
    return item and _place(item, instances, _Room(instances), self._config)


class _ContextQueue:
  """Policy of `ContextAware`, as printed: no other is looked at while a probe waits."""

  def __init__(self, config: ContextAware):
    self._config = config
    self._probes = _Sorted()
    self._others = _Sorted()
    self._longest: dict[int, int] = {}  # By group: of its finished requests.

  def update(self, item: Item) -> None:
    group = item.group.index
    if item.state is State.FINISHED and item.generated > self._longest.get(group, 0):
      self._longest[group] = item.generated
      for member in item.group.members:
        self._push(member)
    self._push(item)

  def estimate(self, group: Group) -> int:
    return self._longest.get(group.index, 0) or group.max_tokens

  def decide(self, instances: Instances) -> Decision | None:
    item = self._probes.peek() or self._others.peek()
    return item and _place(item, instances, _Room(instances), self._config)

  def _push(self, item: Item) -> None:
    if item.state is State.WAITING:
      if item.member == 0:
        self._probes.push(item, item.generated)
      else:
        self._others.push(item, _packed(-self.estimate(item.group), item.group.index, item.member))


class _OurQueue:
  """Policy of `Ours`."""

  def __init__(self, config: Ours):
    self._config = config
    self._by_arrival = _ArrivalQueue(
      Divided(chunk_tokens=config.chunk_tokens, min_pull_tokens=config.min_pull_tokens)
    )
    self._likeness = _Likeness(config.num_compared)
    self._is_alike = False
    self._probes = _Sorted()
    self._others = _Ranked()
    self._groups: dict[int, Group] = {}
    self._longest: dict[int, int] = {}  # By group: of its finished requests.
    self._floors: dict[int, int] = {}  # By group: most that an unfinished member has generated.
    self._until_fair = config.fair_every

  def update(self, item: Item) -> None:
    group, state = item.group.index, item.state
    self._by_arrival.update(item)
    is_longer = item.generated > self._floors.get(group, -1)
    if not self._is_alike:
      self._groups[group] = item.group
      self._likeness.update(item)
    if state is State.FINISHED:
      self._longest[group] = max(self._longest.get(group, 0), item.generated)
      unfinished = [one.generated for one in item.group.members if one.state is not State.FINISHED]
      self._floors[group] = max(unfinished, default=0)
    elif is_longer:
      self._floors[group] = item.generated
    if self._is_alike:
      if is_longer or state is State.FINISHED:
        self._others.rank(group, -self.estimate(item.group))
      if state is State.WAITING:
        self._push(item)

  def estimate(self, group: Group) -> int:
    longest, floor = self._longest.get(group.index), self._floors.get(group.index, 0)
    return group.max_tokens if longest is None else max(longest, floor)

  def decide(self, instances: Instances) -> Decision | None:
    if not self._is_alike:
      is_seen = self._likeness.is_at_least(self._config.min_correlation)
      if not (is_seen and self._is_worth_it()):
        return self._decide_by_arrival(instances)
      self._is_alike = True
      for group in self._groups.values():
        self._others.rank(group.index, -self.estimate(group))
        for item in group.members:
          if item.state is State.WAITING:
            self._push(item)
    is_fair = self._config.fair_every > 0 and self._until_fair <= 0
    item = self._by_arrival.first() if is_fair else self._probes.peek() or self._others.peek()
    decision = item and _place(item, instances, _Room(instances), self._config)
    if decision is not None:
      self._until_fair = self._config.fair_every if is_fair else self._until_fair - 1
    return decision

  def _decide_by_arrival(self, instances: Instances) -> Decision | None:
    if len(instances.num_pages) < _MANY_INSTANCES:
      return self._by_arrival.decide(instances)
    item = self._by_arrival.first()
    return item and _place(item, instances, _Room(instances), self._config)

  def _is_worth_it(self) -> bool:
    """Returns whether enough waits, and has never run, that another order can matter."""
    items = [item for group in self._groups.values() for item in group.members]
    waiting = sum(item.state is State.WAITING for item in items)
    fresh = sum(item.num_chunks == 0 for item in items)
    return waiting >= _LEAST_WAITING * len(items) and fresh >= _LEAST_FRESH * len(items)

  def _push(self, item: Item) -> None:
    if item.member == 0:
      self._probes.push(item, item.generated)
    else:
      self._others.push(item)


# Equal numbers of requests do not even out what many instances hold: the fullest of 32 is far above
# the mean, and the rollout waits for it.
_MANY_INSTANCES = 16

# Of all requests: below these, what runs already decides when the rollout ends, and another order
# only disturbs it.
_LEAST_WAITING = 0.45
_LEAST_FRESH = 0.2

# Below these, likeness is not judged.
_FEWEST_FINISHED = 12
_FEWEST_GROUPS = 4
_FEWEST_KNOWN = 20  # Pairs of orders, for each member of a group.

# What finishes first is shorter than its like: two of a group that are both among the first tenth
# agree more than whole lengths do. Of normal logarithms of a share 0.6 between groups, pairs seem
# 0.75 alike when a tenth has finished, 0.59 at three tenths, 0.48 at half, 0.42 in the end.
_EARLY = 0.7


class _Likeness:
  """How alike lengths are within the groups that arrived first.

  These run by arrival until it is known, so that which of them have finished follows from their
  lengths alone, and not from an order by estimates, which would look like likeness.
  """

  def __init__(self, num_groups: int):
    self._num_groups = num_groups
    self._groups: dict[int, Group] = {}
    self._num_finished = 0
    self._next = _FEWEST_FINISHED  # Measure when so many have finished.

  def update(self, item: Item) -> None:
    if item.group.index < self._num_groups:
      self._groups[item.group.index] = item.group
      self._num_finished += item.state is State.FINISHED

  def is_at_least(self, least: float) -> bool:
    """Returns whether the correlation is surely so much; measured now and then, otherwise False."""
    if self._num_finished < self._next:
      return False
    self._next = max(self._num_finished * 115 // 100, self._num_finished + 1)
    begun = [
      g.members for g in self._groups.values() if sum(m.generated > 0 for m in g.members) > 1
    ]
    size = max(map(len, begun), default=0)
    lengths = np.zeros((len(begun), size), int)
    finished = np.zeros((len(begun), size), bool)
    for group, members in enumerate(begun):
      lengths[group, : len(members)] = [item.generated for item in members]
      finished[group, : len(members)] = [item.state is State.FINISHED for item in members]
    found = rank_correlation(lengths, finished)
    if len(begun) < _FEWEST_GROUPS or found.num_known < _FEWEST_KNOWN * size:
      return False
    running = 1 - int(finished.sum()) / int((lengths > 0).sum())
    early = _EARLY * running * running * running
    error = found.error + 1 / len(begun)  # Of a few groups the first says little.
    return found.correlation - error >= least + (1 - least) * early


class Likeness(NamedTuple):
  """How alike lengths are within groups.

  Attributes:
    correlation: Kendall's, in [-1, 1]; 0 where nothing is known.
    error: its standard error, from leaving out one group after the other.
    num_known: pairs of known orders that it is the mean of.
  """

  correlation: float
  error: float
  num_known: int


def rank_correlation(lengths: np.ndarray, finished: np.ndarray) -> Likeness:
  """Returns Kendall's correlation of lengths within groups, some of which are only bounds so far.

  Two groups and two places in them agree if the members at the one place stand in the same order as
  those at the other. Only those count whose two orders are both known: the shorter has finished, at
  less than the longer has now. The same bits on every machine: integers, and sums that are rounded
  once.

  Args:
    lengths: i64[g, n] generated tokens.
    finished: bool[g, n]; where False, the length is a lower bound, and 0 where there is no member.
  """
  is_less = (lengths[:, None] < lengths[None]) & finished[:, None]  # [one group, other, place]
  order = is_less.astype(np.int64) - is_less.swapaxes(0, 1)
  total, known = order.sum(2), np.abs(order).sum(2)
  # Of n signs with sum s, the products of all pairs sum up to (s^2 - n) / 2.
  agreed, pairs = (total**2 - known) // 2, (known**2 - known) // 2  # By one group and the other.
  all_agreed, all_pairs = int(agreed.sum()) // 2, int(pairs.sum()) // 2
  if not all_pairs:
    return Likeness(0.0, 0.0, 0)
  without = (all_agreed - agreed.sum(1)) / np.maximum(all_pairs - pairs.sum(1), 1)
  count = len(without)
  mean = math.fsum(without) / count
  variance = (count - 1) / count * math.fsum((without - mean) ** 2)
  return Likeness(all_agreed / all_pairs, math.sqrt(variance), all_pairs)


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


class _Room:
  """What a decision may use.

  Attributes:
    pages: that a chunk could have, by instance; for reading.
    most: the largest of them.
  """

  __slots__ = ("most", "pages")

  def __init__(self, instances: Instances):
    self.pages = instances.room
    self.most = max(self.pages)

  def keep(self, instance: int) -> None:
    """Keeps an instance for somebody else."""
    self.pages = list(self.pages)
    self.pages[instance] = 0
    self.most = max(self.pages)


def _place(item: Item, instances: Instances, room: _Room, config: Divided) -> Decision | None:
  """Returns the item's next chunk on the instance of its routing; None if it fits nowhere."""
  chunk = min(config.chunk_tokens, item.max_tokens - item.generated)
  pages = num_pages(item.prompt_tokens + item.generated + chunk - 1, instances.page_size)
  if pages > room.most:
    return None
  if isinstance(config.routing, ByRoom):
    chosen = _by_room(item, pages, room, instances, config.routing)
  else:
    chosen = _by_prefix(item, pages, room, instances, config.routing)
  prompts = item.group.prompt_instances
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


def _by_prefix(item: Item, pages: int, room: _Room, instances: Instances, routing: ByPrefix) -> int:
  running = instances.num_running
  if max(running) - min(running) <= routing.max_spread:
    holders = item.group.prompt_instances
    if item.kv_instance != NOWHERE:
      holders = {item.kv_instance}
    holders = [i for i in holders if room.pages[i] >= pages]
    if holders:
      return min(holders, key=lambda i: (running[i], i))
  # The least loaded is nearly always roomy enough; look at the others only if it is not.
  least = running.index(min(running))
  if room.pages[least] >= pages:
    return least
  roomy = (i for i, free in enumerate(room.pages) if free >= pages)
  return min(roomy, key=lambda i: (running[i], i))


def _by_room(item: Item, pages: int, room: _Room, instances: Instances, routing: ByRoom) -> int:
  free, home = room.pages, item.kv_instance
  if home == NOWHERE and item.group.prompt_instances:
    home = max(item.group.prompt_instances, key=lambda i: (free[i], -i))
  if home != NOWHERE and free[home] >= pages:
    if free[home] + routing.max_imbalance * instances.num_pages[home] >= room.most:
      return home
  return free.index(room.most)
