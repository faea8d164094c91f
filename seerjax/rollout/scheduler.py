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
import collections
from collections.abc import Mapping
import dataclasses
import heapq
import math
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
  """The longest groups first, the least generated first among groups about as long.

  A request's estimate is its group's quantile of finished lengths, and never below what the longest
  member that is not finished has generated so far; before the first has finished it is
  `unknown_factor` times that. Estimates within `same_factor` of each other count as equal, and
  among equals the request that has generated least goes first: so every group is probed, by its
  first members and then by all, and a request that outgrows its group stands out while there is
  time.

  Where lengths within a group are not alike, or not yet known to be, the least generated goes first
  regardless of groups: then the long ones are those that are left.

  Attributes:
    quantile: of a group's finished lengths.
    unknown_factor: see above.
    same_factor: see above; more than 1.
    lookahead: waiting requests that may pass a first one that fits nowhere; the instance where it
      will fit soonest is kept for it meanwhile.
    fair_every: each so many decisions the request that has waited longest goes first; 0 never.
    min_correlation: below this rank correlation of lengths within groups, estimates are noise.
    pilot_every: each so many groups, by arrival, one is a pilot: its first two members go before
      all others, and show the correlation.
    num_pilots: most pilots.
  """

  chunk_tokens: int = 2048
  routing: ByPrefix | ByRoom = ByRoom()
  quantile: float = 0.75
  unknown_factor: float = 4.0
  same_factor: float = 1.5
  lookahead: int = 8
  fair_every: int = 64
  min_correlation: float = 0.2
  pilot_every: int = 8
  num_pilots: int = 64

  def __post_init__(self):
    super().__post_init__()
    if not 0 <= self.quantile <= 1 or not -1 <= self.min_correlation <= 1:
      raise ValueError(
        f"Ours: got quantile={self.quantile}, min_correlation={self.min_correlation}, expected"
        " values in [0, 1] and [-1, 1]; 0.75 and 0.2 are usual."
      )
    if not 1 <= self.unknown_factor < math.inf or not 1 < self.same_factor < math.inf:
      raise ValueError(
        f"Ours: got unknown_factor={self.unknown_factor}, same_factor={self.same_factor}, expected"
        " at least 1 and more than 1; 4 and 1.5 are usual."
      )
    if min(self.lookahead, self.fair_every, self.num_pilots) < 0 or self.pilot_every < 1:
      raise ValueError(
        f"Ours: got lookahead={self.lookahead}, fair_every={self.fair_every},"
        f" num_pilots={self.num_pilots}, pilot_every={self.pilot_every}, expected at least 0, 0, 0"
        " and 1; 8, 64, 64 and 8 are usual."
      )


_MOST_LEVELS = 1 << 20  # Far more than levels of estimates.

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

  def pop(self) -> _Entry:
    """Takes out what `peek` returned."""
    return heapq.heappop(self._heap)

  def restore(self, entry: _Entry) -> None:
    """Puts back what was taken out, if nothing was pushed since."""
    heapq.heappush(self._heap, entry)


class _Ranked:
  """Waiting requests by the rank of their class, what they generated, and their member number.

  Two heaps, one over the other: every class has its requests in one of its own, and stands in the
  heap of classes as its first one does. So a class gets another rank by one push, whatever waits in
  it. A class's entry is the one of its last push; it may promise more than the class still has,
  never less.
  """

  def __init__(self):
    # (rank and request, arrival, serial, class)
    self._classes: list[tuple[int, int, int, int]] = []
    self._waiting: dict[int, list[_Entry]] = {}  # By class.
    self._ranks: dict[int, int] = {}
    self._last: dict[int, int] = {}  # By class: serial of its last entry.
    self._serials: dict[int, int] = {}  # By request: that of its last push.
    self._num_pushes = 0

  def rank(self, of_class: int, rank: int) -> None:
    """Gives a class its rank, the lowest first."""
    if self._ranks.get(of_class) != rank:
      self._ranks[of_class] = rank
      if self._waiting.get(of_class):
        self._show(of_class)

  def push(self, item: Item, of_class: int) -> None:
    """Takes a request into a class that has a rank."""
    self._num_pushes += 1
    self._serials[item.index] = self._num_pushes
    entry = (_packed(0, item.generated, item.member), item.index, self._num_pushes, item)
    waiting = self._waiting.setdefault(of_class, [])
    heapq.heappush(waiting, entry)
    if waiting[0] is entry:
      self._show(of_class)

  def peek(self) -> Item | None:
    while self._classes:
      key, index, serial, of_class = self._classes[0]
      first = self._first(of_class) if self._last[of_class] == serial else None
      if first is None:
        heapq.heappop(self._classes)
      elif first[1] == index and self._key(of_class, first) == key:
        return first[3]
      else:
        heapq.heappop(self._classes)
        self._show(of_class)
    return None

  def pop(self) -> tuple[int, _Entry]:
    """Takes out what `peek` returned."""
    of_class = self._classes[0][3]
    return of_class, heapq.heappop(self._waiting[of_class])

  def restore(self, taken: tuple[int, _Entry]) -> None:
    """Puts back what was taken out, if nothing was pushed since."""
    of_class, entry = taken
    heapq.heappush(self._waiting[of_class], entry)
    self._show(of_class)

  def _first(self, of_class: int) -> _Entry | None:
    waiting = self._waiting[of_class]
    while waiting:
      _, index, serial, item = waiting[0]
      if item.state is State.WAITING and self._serials[index] == serial:
        return waiting[0]
      heapq.heappop(waiting)
    return None

  def _key(self, of_class: int, entry: _Entry) -> int:
    return (self._ranks[of_class] << 64) | entry[0]

  def _show(self, of_class: int) -> None:
    """Puts a class where its first request belongs."""
    first = self._waiting[of_class][0]
    self._num_pushes += 1
    self._last[of_class] = self._num_pushes
    heapq.heappush(
      self._classes, (self._key(of_class, first), first[1], self._num_pushes, of_class)
    )


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
    self._waiting = _Sorted()

  def update(self, item: Item) -> None:
    if item.state is State.WAITING:
      self._waiting.push(item)

  def estimate(self, group: Group) -> int:
    return group.max_tokens

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
    self._by_patience: collections.deque[tuple[int, Item]] = collections.deque()
    self._by_age = _Sorted()
    self._by_estimate = _Ranked()
    self._not_by_age: dict[int, Item] = {}  # By request: waits, and `_by_age` has not heard of it.
    self._finished: dict[int, list[int]] = {}  # By group: lengths, ascending.
    self._floors: dict[int, int] = {}  # By group: most that an unfinished member has generated.
    self._pilots = _Pilots(config.num_pilots, config.pilot_every)
    self._levels_per_nat = 1 / math.log(config.same_factor)
    self._until_fair = config.fair_every
    self._held: tuple[Item, int] | None = None  # What fits nowhere, and the place kept for it.

  @property
  def correlation(self) -> float | None:
    """Returns the rank correlation of lengths within groups, None while too little is known."""
    return self._pilots.correlation

  def update(self, item: Item) -> None:
    group, state = item.group.index, item.state
    floor = self._floors.get(group, -1)
    is_longer = item.generated > floor
    if state is State.RUNNING and not is_longer:
      return  # A chunk began: nothing new is known, and its entries are dropped when they surface.
    if state is State.FINISHED:
      bisect.insort(self._finished.setdefault(group, []), item.generated)
      unfinished = [one.generated for one in item.group.members if one.state is not State.FINISHED]
      self._floors[group] = max(unfinished, default=0)
    elif is_longer:
      self._floors[group] = item.generated
    is_pilot = self._pilots.has(item)
    if is_pilot:
      self._pilots.update(item)
    if is_longer or state is State.FINISHED:
      level = int(math.log(max(self.estimate(item.group), 1)) * self._levels_per_nat)
      # A group's pilots are a class of their own.
      self._by_estimate.rank(2 * group, -level)
      self._by_estimate.rank(2 * group + 1, _MOST_LEVELS - level)
    if state is State.WAITING:
      self._by_patience.append((item.num_chunks, item))
      self._not_by_age[item.index] = item
      self._by_estimate.push(item, 2 * group + (not is_pilot))

  def estimate(self, group: Group) -> int:
    floor = self._floors.get(group.index, 0)
    lengths = self._finished.get(group.index)
    if lengths is None:
      return min(int(self._config.unknown_factor * floor), group.max_tokens)
    return max(lengths[int(self._config.quantile * (len(lengths) - 1) + 0.5)], floor)

  def decide(self, instances: Instances) -> Decision | None:
    room = _Room(instances)
    if self._held is not None:
      item = self._held[0]
      if item.state is State.WAITING:
        decision = _place(item, instances, room, self._config)
        if decision is not None:
          return decision
      else:
        self._held = None
    if self._config.fair_every > 0 and self._until_fair <= 0 and self._held is None:
      self._until_fair = self._config.fair_every
      item = self._longest_waiting()
      decision = item and _place(item, instances, room, self._config)
      if decision is not None:
        return decision
      if item is not None:
        self._held = (item, _roomiest(instances))
    correlation = self.correlation
    is_alike = correlation is not None and correlation >= self._config.min_correlation
    decision = self._decide_from(
      self._by_estimate if is_alike else self._all_by_age(), instances, room
    )
    self._until_fair -= decision is not None
    return decision

  def _longest_waiting(self) -> Item | None:
    while self._by_patience:
      num_chunks, item = self._by_patience[0]
      if item.state is State.WAITING and item.num_chunks == num_chunks:
        return item
      self._by_patience.popleft()
    return None

  def _all_by_age(self) -> _Sorted:
    """Returns those that wait by what they generated; it hears of them when it is asked."""
    for item in self._not_by_age.values():
      if item.state is State.WAITING:
        is_other = not self._pilots.has(item)
        self._by_age.push(item, _packed(is_other, item.generated, item.member))
    self._not_by_age.clear()
    return self._by_age

  def _decide_from(
    self, waiting: _Sorted | _Ranked, instances: Instances, room: _Room
  ) -> Decision | None:
    passed: list[Any] = []  # As its `pop` gives them.
    decision = None
    if self._held is not None:
      room.keep(self._held[1])
    while len(passed) <= self._config.lookahead and (item := waiting.peek()) is not None:
      decision = _place(item, instances, room, self._config)
      if decision is not None:
        break
      if self._held is None:
        self._held = (item, _roomiest(instances))
        room.keep(self._held[1])
      passed.append(waiting.pop())
    for entry in passed:
      waiting.restore(entry)
    return decision


class _Pilots:
  """The first two members of some groups, and how alike their lengths are.

  They go before all others: which of them have finished then follows from their lengths alone, and
  not from the order that the estimates made, which would look like likeness.
  """

  def __init__(self, num_groups: int, every: int):
    self._num_groups = num_groups
    self._every = every
    self._pairs: list[list[Item]] = [[] for _ in range(num_groups)]
    self._num_unread = 0
    self.correlation: float | None = None

  def has(self, item: Item) -> bool:
    place, rest = divmod(item.group.index, self._every)
    return item.member < 2 and rest == 0 and place < self._num_groups

  def update(self, item: Item) -> None:
    pair = self._pairs[item.group.index // self._every]
    if len(pair) == item.member:
      pair.append(item)
    self._num_unread += item.generated > 0
    if self._num_unread > self._num_groups // 4:
      self._num_unread = 0
      pairs = [pair for pair in self._pairs if len(pair) == 2]
      lengths = np.array([[item.generated for item in pair] for pair in pairs], int)
      finished = np.array([[item.state is State.FINISHED for item in pair] for pair in pairs], bool)
      self.correlation = rank_correlation(lengths.reshape(-1, 2), finished.reshape(-1, 2))


def rank_correlation(lengths: np.ndarray, finished: np.ndarray) -> float | None:
  """Returns Kendall's correlation of pairs of lengths, some of which are only bounds so far.

  Two groups agree if their first members stand in the same order as their second ones. Only those
  count whose orders are both known: the shorter has finished, at less than the longer has now.

  Args:
    lengths: i64[n, 2] generated tokens.
    finished: bool[n, 2]; where False, the length is a lower bound.

  Returns:
    A value in [-1, 1]; None if fewer than n of the n (n - 1) / 2 orders are known.
  """
  is_less = (lengths[:, None] < lengths[None]) & finished[:, None]  # [i, j, member]
  order = is_less.astype(int) - is_less.swapaxes(0, 1)
  agreement = (order[..., 0] * order[..., 1])[np.triu_indices(len(lengths), 1)]
  known = int(np.abs(agreement).sum())
  return float(agreement.sum() / known) if known >= max(len(lengths), 1) else None


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
