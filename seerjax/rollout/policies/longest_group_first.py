"""Longest group first, once lengths within groups prove similar; the default."""

from __future__ import annotations

import dataclasses

from seerjax import fields
from seerjax.rollout.buffer import Group, Item, State
from seerjax.rollout.instances import Decision, Instances
from seerjax.rollout.likeness import GroupLikeness
from seerjax.rollout.policies import waiting
from seerjax.rollout.policies.divided import ArrivalQueue, Divided
from seerjax.rollout.routing import ByPrefix, ByRoom

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongestGroupFirst(Divided):
  """Works like `Divided` until lengths within groups prove similar; then the longest group first.

  If lengths within groups are not similar, which request is long is chance, and any order other
  than arrival loses as often as it wins. So requests are scheduled as in `Divided`, routing
  included, as long as the measured similarity is low. It is measured on the groups that arrived
  first, from their finished requests and the current lengths of the others (`rollout.likeness`).
  Once it is at least `min_correlation` (after subtracting its standard error), while many requests
  still wait and have never run, the order switches to that of algorithm 2 with better estimates:

  - the first requests of all groups go first, shortest first, so that every group is probed;
  - then the group with the largest estimate: its longest finished member, but at least the current
    length of every unfinished one; `max_tokens` if none has finished.

  Occasionally the oldest request goes first (`FAIR_EVERY`), to prevent starvation.

  Attributes:
    routing: used after the switch, and always with 16 instances or more; otherwise `ByPrefix()`.
    min_correlation: threshold on the similarity of whole lengths; 2 never switches.
  """

  chunk_tokens: int = 2048
  routing: ByPrefix | ByRoom = ByRoom()
  min_correlation: float = 0.5

  def __post_init__(self):
    super().__post_init__()
    fields.check(self, min_correlation=fields.between(-1, 2, "0.5 is usual, 2 disables it"))

  def queue(self) -> LongestGroupQueue:
    return LongestGroupQueue(self)


class LongestGroupQueue:
  """Queue of `LongestGroupFirst`."""

  def __init__(self, policy: LongestGroupFirst):
    self._policy = policy
    self._by_arrival = ArrivalQueue(
      Divided(chunk_tokens=policy.chunk_tokens, min_pull_tokens=policy.min_pull_tokens)
    )
    self._likeness = GroupLikeness()
    self._is_alike = False
    self._probes = waiting.Sorted()
    self._others = waiting.Ranked()
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
      is_seen = self._likeness.is_at_least(self._policy.min_correlation)
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
    decision = item and self._policy.place(item, instances)
    if decision is not None:
      self._until_fair = FAIR_EVERY if is_fair else self._until_fair - 1
    return decision

  def _decide_by_arrival(self, instances: Instances) -> Decision | None:
    if len(instances.num_pages) < _MANY_INSTANCES:
      return self._by_arrival.decide(instances)
    item = self._by_arrival.first()
    return item and self._policy.place(item, instances)

  def _is_worth_it(self) -> bool:
    """Returns whether enough requests wait, and have never run, for another order to matter."""
    items = [item for group in self._groups.values() for item in group.members]
    num_waiting = sum(item.state is State.WAITING for item in items)
    fresh = sum(item.num_chunks == 0 for item in items)
    return num_waiting >= _LEAST_WAITING * len(items) and fresh >= _LEAST_FRESH * len(items)

  def _push(self, item: Item) -> None:
    if item.member == 0:
      self._probes.push(item, item.generated)
    else:
      self._others.push(item)
