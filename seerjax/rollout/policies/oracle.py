"""Longest request first, by true lengths."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

from seerjax.rollout.buffer import Group, Item, State
from seerjax.rollout.instances import Decision, Instances
from seerjax.rollout.policies import waiting
from seerjax.rollout.policies.divided import Divided


@dataclasses.dataclass(frozen=True, kw_only=True)
class Oracle(Divided):
  """Longest request first by true lengths: the result of perfect estimates. Simulation only.

  Attributes:
    lengths: generated tokens by request id.
  """

  lengths: Mapping[str, int] = dataclasses.field(default_factory=dict)

  def queue(self) -> OracleQueue:
    return OracleQueue(self)

  def knowing(self, lengths: Mapping[str, int]) -> Oracle:
    return dataclasses.replace(self, lengths=lengths)


class OracleQueue:
  """Queue of `Oracle`: only the request with most remaining tokens is considered."""

  def __init__(self, policy: Oracle):
    self._policy = policy
    self._waiting = waiting.Sorted()

  def update(self, item: Item) -> None:
    if item.state is State.WAITING:
      self._waiting.push(item, item.generated - self._policy.lengths[item.request_id])

  def estimate(self, group: Group) -> int:
    return max(self._policy.lengths[item.request_id] for item in group.members)

  def decide(self, instances: Instances) -> Decision | None:
    item = self._waiting.peek()
    return item and self._policy.place(item, instances)
