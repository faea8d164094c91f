"""Seer's order: probes first, then the group with the largest estimate (algorithm 2)."""

from __future__ import annotations

import dataclasses

from seerjax.rollout.buffer import Group, Item, State
from seerjax.rollout.instances import Decision, Instances
from seerjax.rollout.policies import waiting
from seerjax.rollout.policies.divided import Divided


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextAware(Divided):
  """Algorithm 2: probes first, shortest first; then by largest group estimate.

  The estimate of a group is its longest finished request, or `max_tokens` if none has finished.
  """

  def queue(self) -> ContextQueue:
    return ContextQueue(self)


class ContextQueue:
  """Queue of `ContextAware`, as published: while a probe waits, no other is considered."""

  def __init__(self, policy: ContextAware):
    self._policy = policy
    self._probes = waiting.Sorted()
    self._others = waiting.Sorted()
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
    return item and self._policy.place(item, instances)

  def _push(self, item: Item) -> None:
    if item.state is State.WAITING:
      if item.member == 0:
        self._probes.push(item, item.generated)
      else:
        self._others.push(item, _packed(-self.estimate(item.group), item.group.index, item.member))


def _packed(first: int, second: int, third: int) -> int:
  """Packs three keys into one integer with the same order, which compares faster than a tuple."""
  return (first << 64) | (second << 32) | third
