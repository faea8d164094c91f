"""Queues of waiting requests, one class per policy.

Heaps contain stale entries, which are dropped when they reach the top, so that a decision costs
O(log n + instances).
"""

from __future__ import annotations

import heapq

from seerjax.rollout import routing
from seerjax.rollout.buffer import Group, Item, State, kv_positions
from seerjax.rollout.instances import Decision, Instances, num_pages
from seerjax.rollout.likeness import GroupLikeness
from seerjax.rollout.policies import (
  ContextAware,
  Divided,
  GroupFCFS,
  LongestGroupFirst,
  Oracle,
  SchedulerConfig,
)

# Once lengths are found similar, one decision in this many takes the oldest request: rarely enough
# to cost nothing, often enough to prevent starvation while groups keep arriving.
FAIR_EVERY = 64

# From this many instances on, equal numbers of requests do not balance the load: the fullest of 32
# is far above the mean, and the rollout waits for it.
_MANY_INSTANCES = 16

# Minimum shares of waiting and of never-run requests. Below them the running requests already
# determine the end of the rollout, and a new order would only cause disruption.
_LEAST_WAITING = 0.45
_LEAST_FRESH = 0.2

_Entry = tuple[int, int, int, Item]  # (key, arrival, serial, item)


def _packed(first: int, second: int, third: int) -> int:
  """Packs three keys into one integer with the same order, which compares faster than a tuple."""
  return (first << 64) | (second << 32) | third


class Sorted:
  """Waiting requests by a changeable key, ties by arrival: a heap with lazy deletion.

  Only the entry of a request's last push is valid, while the request waits.
  """

  def __init__(self):
    self._heap: list[_Entry] = []
    self._serials: dict[int, int] = {}  # Serial number of each request's last push.
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


class InOrder:
  """Waiting requests by arrival: a heap with lazy deletion."""

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


class Ranked:
  """Waiting requests by the rank of their group, lowest first; ties by arrival.

  Uses two levels of heaps: each group has a heap of its requests, and a heap of groups is ordered
  by rank and by each group's first request. Changing a group's rank thus costs one push, however
  many requests it has. Only a group's last entry is valid; it may refer to a request that no longer
  waits, but never sorts after the group's actual first request.
  """

  def __init__(self):
    self._groups: list[tuple[int, int, int]] = []  # (rank, arrival of the first, group)
    self._waiting: dict[int, InOrder] = {}  # By group.
    self._ranks: dict[int, int] = {}
    self._shown: dict[int, tuple[int, int, int]] = {}  # Last entry by group.

  def rank(self, group: int, rank: int) -> None:
    """Sets the rank of a group."""
    if self._ranks.get(group) != rank:
      self._ranks[group] = rank
      waiting = self._waiting.get(group)
      first = waiting and waiting.peek()
      if first:
        self._show(group, first)

  def push(self, item: Item) -> None:
    """Adds a request of a group that has a rank."""
    group = item.group.index
    waiting = self._waiting.setdefault(group, InOrder())
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
    """Pushes a group's entry for its current first request."""
    entry = (self._ranks[group], first.index, group)
    if self._shown.get(group) != entry:
      self._shown[group] = entry
      heapq.heappush(self._groups, entry)


class GroupQueue:
  """Queue of `GroupFCFS`: one per instance, groups assigned round robin."""

  def __init__(self, config: GroupFCFS):
    self._config = config
    self._new: list[Item] = []
    self._queues: list[Sorted] = []
    self._turn = 0

  def update(self, item: Item) -> None:
    if item.state is State.WAITING:
      self._new.append(item)

  def estimate(self, group: Group) -> int:
    return group.max_tokens

  def decide(self, instances: Instances) -> Decision | None:
    count = len(instances.free_pages)
    while len(self._queues) < count:
      self._queues.append(Sorted())
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


class ArrivalQueue:
  """Queue of `Divided`: only the oldest request is considered."""

  def __init__(self, config: Divided):
    self._config = config
    self._waiting = InOrder()

  def update(self, item: Item) -> None:
    if item.state is State.WAITING:
      self._waiting.push(item)

  def estimate(self, group: Group) -> int:
    return group.max_tokens

  def first(self) -> Item | None:
    """Returns the oldest waiting request."""
    return self._waiting.peek()

  def decide(self, instances: Instances) -> Decision | None:
    item = self._waiting.peek()
    return item and routing.place(item, instances, routing.Room(instances), self._config)


class OracleQueue:
  """Queue of `Oracle`: only the request with most remaining tokens is considered."""

  def __init__(self, config: Oracle):
    self._config = config
    self._waiting = Sorted()

  def update(self, item: Item) -> None:
    if item.state is State.WAITING:
      self._waiting.push(item, item.generated - self._config.lengths[item.request_id])

  def estimate(self, group: Group) -> int:
    return max(self._config.lengths[item.request_id] for item in group.members)

  def decide(self, instances: Instances) -> Decision | None:
    item = self._waiting.peek()
    return item and routing.place(item, instances, routing.Room(instances), self._config)


class ContextQueue:
  """Queue of `ContextAware`, as published: while a probe waits, no other is considered."""

  def __init__(self, config: ContextAware):
    self._config = config
    self._probes = Sorted()
    self._others = Sorted()
    self._longest: dict[int, int] = {}  # Longest finished request by group.

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
    return item and routing.place(item, instances, routing.Room(instances), self._config)

  def _push(self, item: Item) -> None:
    if item.state is State.WAITING:
      if item.member == 0:
        self._probes.push(item, item.generated)
      else:
        self._others.push(item, _packed(-self.estimate(item.group), item.group.index, item.member))


class LongestGroupQueue:
  """Queue of `LongestGroupFirst`."""

  def __init__(self, config: LongestGroupFirst):
    self._config = config
    self._by_arrival = ArrivalQueue(
      Divided(chunk_tokens=config.chunk_tokens, min_pull_tokens=config.min_pull_tokens)
    )
    self._likeness = GroupLikeness()
    self._is_alike = False
    self._probes = Sorted()
    self._others = Ranked()
    self._groups: dict[int, Group] = {}
    self._longest: dict[int, int] = {}  # Longest finished request by group.
    self._floors: dict[int, int] = {}  # Longest unfinished request so far, by group.
    self._until_fair = FAIR_EVERY

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
    is_fair = self._until_fair <= 0
    item = self._by_arrival.first() if is_fair else self._probes.peek() or self._others.peek()
    decision = item and routing.place(item, instances, routing.Room(instances), self._config)
    if decision is not None:
      self._until_fair = FAIR_EVERY if is_fair else self._until_fair - 1
    return decision

  def _decide_by_arrival(self, instances: Instances) -> Decision | None:
    if len(instances.num_pages) < _MANY_INSTANCES:
      return self._by_arrival.decide(instances)
    item = self._by_arrival.first()
    return item and routing.place(item, instances, routing.Room(instances), self._config)

  def _is_worth_it(self) -> bool:
    """Returns whether enough requests wait, and have never run, for another order to matter."""
    items = [item for group in self._groups.values() for item in group.members]
    waiting = sum(item.state is State.WAITING for item in items)
    fresh = sum(item.num_chunks == 0 for item in items)
    return waiting >= _LEAST_WAITING * len(items) and fresh >= _LEAST_FRESH * len(items)

  def _push(self, item: Item) -> None:
    if item.member == 0:
      self._probes.push(item, item.generated)
    else:
      self._others.push(item)


Queue = GroupQueue | ArrivalQueue | OracleQueue | ContextQueue | LongestGroupQueue


def queue_of(config: SchedulerConfig) -> Queue:
  # Subclasses first.
  match config:
    case GroupFCFS():
      return GroupQueue(config)
    case LongestGroupFirst():
      return LongestGroupQueue(config)
    case Oracle():
      return OracleQueue(config)
    case ContextAware():
      return ContextQueue(config)
    case Divided():
      return ArrivalQueue(config)
