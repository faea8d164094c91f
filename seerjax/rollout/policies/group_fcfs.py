"""Whole groups, whole requests, first come first served: the common baseline."""

from __future__ import annotations

import dataclasses

from seerjax.rollout.buffer import Group, Item, State, kv_positions
from seerjax.rollout.instances import Decision, Instances, num_pages
from seerjax.rollout.policies import base, waiting


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupFCFS(base.Policy):
  """The common baseline: whole groups, whole requests, first come first served.

  Groups are assigned to instances round robin, in order of arrival. A request is admitted as soon
  as its *current* KV fits, and runs to its end. When pages run out, the caller preempts the request
  that was admitted last on that instance (`Buffer.lost_kv`), which then restarts before later ones.

  Attributes:
    reserves: admit only if the KV of all `max_tokens` fits, so that nothing is ever preempted.
  """

  reserves: bool = False

  @property
  def in_chunks(self) -> bool:
    return False

  @property
  def grows(self) -> bool:
    return not self.reserves

  def queue(self) -> GroupQueue:
    return GroupQueue(self)


class GroupQueue:
  """Queue of `GroupFCFS`: one per instance, groups assigned round robin."""

  def __init__(self, policy: GroupFCFS):
    self._policy = policy
    self._new: list[Item] = []
    self._queues: list[waiting.Sorted] = []
    self._turn = 0

  def update(self, item: Item) -> None:
    if item.state is State.WAITING:
      self._new.append(item)

  def estimate(self, group: Group) -> int:
    return group.max_tokens

  def decide(self, instances: Instances) -> Decision | None:
    count = len(instances.free_pages)
    while len(self._queues) < count:
      self._queues.append(waiting.Sorted())
    for item in self._new:
      self._queues[item.group.index % count].push(item)
    self._new.clear()
    for place in range(self._turn, self._turn + count):
      instance = place % count
      item = self._queues[instance].peek()
      if item is None:
        continue
      left = item.max_tokens - item.generated
      positions = item.prompt_tokens + item.generated + (left - 1 if self._policy.reserves else 0)
      pages = num_pages(positions, instances.page_size)
      if pages <= instances.room[instance]:
        self._turn = instance + 1
        here = item.prompt_tokens if instance in item.group.prompt_instances else 0
        prefill = kv_positions(item) - here
        return Decision(item.request_id, instance, left, pages, item.member == 0, prefill)
    return None
