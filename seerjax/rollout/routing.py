"""Routing: the instance for a request's next chunk."""

from __future__ import annotations

import dataclasses

from seerjax import fields
from seerjax.rollout.buffer import NOWHERE, Item
from seerjax.rollout.instances import Instances

# With `ByRoom`: a request stays with its KV unless that instance has fewer free pages than the
# roomiest one by more than this share of its pages. Moving KV for less costs more than it gains.
MAX_IMBALANCE = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByPrefix:
  """Routes by longest cached prefix while load is balanced, else to the least loaded instance.

  Attributes:
    max_spread: maximum difference in running requests at which load counts as balanced.
  """

  max_spread: int = 32

  def __post_init__(self):
    fields.check(self, max_spread=fields.at_least(0, "32 for example"))

  def choose(self, item: Item, pages: int, instances: Instances) -> int:
    """Returns the instance of a chunk that needs `pages`; at least one instance has them free."""
    running = instances.num_running
    if max(running) - min(running) <= self.max_spread:
      holders = item.group.prompt_instances
      if item.kv_instance != NOWHERE:
        holders = {item.kv_instance}
      holders = [i for i in holders if instances.room[i] >= pages]
      if holders:
        return min(holders, key=lambda i: (running[i], i))
    # The least loaded instance nearly always has enough pages; otherwise check the others.
    least = running.index(min(running))
    if instances.room[least] >= pages:
      return least
    roomy = (i for i, free in enumerate(instances.room) if free >= pages)
    return min(roomy, key=lambda i: (running[i], i))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByRoom:
  """Routes to the instance with most free pages, or to that of its KV if it has nearly as many.

  The variable cost of an instance's step is proportional to the KV it reads, so this balances step
  times, which equal numbers of requests do not.
  """

  def choose(self, item: Item, pages: int, instances: Instances) -> int:
    """Returns the instance of a chunk that needs `pages`; at least one instance has them free."""
    free, home = instances.room, item.kv_instance
    if home == NOWHERE and item.group.prompt_instances:
      home = max(item.group.prompt_instances, key=lambda i: (free[i], -i))
    if home != NOWHERE and free[home] >= pages:
      if free[home] + MAX_IMBALANCE * instances.num_pages[home] >= max(free):
        return home
    return free.index(max(free))
