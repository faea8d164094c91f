"""Chunks of requests in order of arrival."""

from __future__ import annotations

import dataclasses

from seerjax import fields
from seerjax.rollout.buffer import NOWHERE, Group, Item, State, kv_positions
from seerjax.rollout.instances import Decision, Instances, num_pages
from seerjax.rollout.policies import base, waiting
from seerjax.rollout.routing import ByPrefix, ByRoom


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divided(base.Policy):
  """Chunks instead of whole requests, in order of arrival, on any instance.

  Attributes:
    chunk_tokens: maximum tokens of a chunk.
    routing: how to choose among the instances on which the chunk fits.
    min_pull_tokens: if more tokens than this are missing on the chosen instance, their KV is pulled
      from another instance; fewer are recomputed.
  """

  chunk_tokens: int = 8192
  routing: ByPrefix | ByRoom = ByPrefix()
  min_pull_tokens: int = 512

  def __post_init__(self):
    fields.check(
      self,
      chunk_tokens=fields.at_least(1, "the source uses 8192"),
      min_pull_tokens=fields.at_least(0, "the source uses 512"),
    )

  def queue(self) -> ArrivalQueue:
    return ArrivalQueue(self)

  def place(self, item: Item, instances: Instances) -> Decision | None:
    """Returns a request's next chunk on the instance of `routing`; None if it fits nowhere."""
    chunk = min(self.chunk_tokens, item.max_tokens - item.generated)
    pages = num_pages(item.prompt_tokens + item.generated + chunk - 1, instances.page_size)
    if pages > max(instances.room):
      return None
    chosen = self.routing.choose(item, pages, instances)
    prompts = item.group.prompt_instances
    best, source = item.kv_tokens, item.kv_instance
    if source == NOWHERE and prompts:
      best, source = item.prompt_tokens, min(prompts)
    here = item.prompt_tokens if chosen in prompts else 0
    if chosen == item.kv_instance:
      here = item.kv_tokens
    pull = best - here if best - here > self.min_pull_tokens else 0
    prefill = kv_positions(item) - here - pull
    is_probe = item.member == 0
    if pull:
      return Decision(item.request_id, chosen, chunk, pages, is_probe, prefill, pull, source)
    return Decision(item.request_id, chosen, chunk, pages, is_probe, prefill)


class ArrivalQueue:
  """Queue of `Divided`: only the oldest request is considered."""

  def __init__(self, policy: Divided):
    self._policy = policy
    self._waiting = waiting.InOrder()

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
    return item and self._policy.place(item, instances)
