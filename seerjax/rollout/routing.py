"""Routing: the instance for a request's next chunk, and the KV to pull or prefill there."""

from __future__ import annotations

from seerjax.rollout.buffer import NOWHERE, Item, kv_positions
from seerjax.rollout.instances import Decision, Instances, num_pages
from seerjax.rollout.policies import ByPrefix, ByRoom, Divided

# With `ByRoom`: a request stays with its KV unless that instance has fewer free pages than the
# roomiest one by more than this share of its pages. Moving KV for less costs more than it gains.
MAX_IMBALANCE = 0.05


class Room:
  """Free pages that a decision may use.

  Attributes:
    pages: available pages by instance; read-only.
    most: maximum of `pages`.
  """

  __slots__ = ("most", "pages")

  def __init__(self, instances: Instances):
    self.pages = instances.room
    self.most = max(self.pages)

  def keep(self, instance: int) -> None:
    """Reserves an instance for other requests."""
    self.pages = list(self.pages)
    self.pages[instance] = 0
    self.most = max(self.pages)


def place(item: Item, instances: Instances, room: Room, config: Divided) -> Decision | None:
  """Returns the item's next chunk on the instance that routing selects; None if it fits nowhere."""
  chunk = min(config.chunk_tokens, item.max_tokens - item.generated)
  pages = num_pages(item.prompt_tokens + item.generated + chunk - 1, instances.page_size)
  if pages > room.most:
    return None
  if isinstance(config.routing, ByRoom):
    chosen = _by_room(item, pages, room, instances)
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


def _by_prefix(item: Item, pages: int, room: Room, instances: Instances, routing: ByPrefix) -> int:
  running = instances.num_running
  if max(running) - min(running) <= routing.max_spread:
    holders = item.group.prompt_instances
    if item.kv_instance != NOWHERE:
      holders = {item.kv_instance}
    holders = [i for i in holders if room.pages[i] >= pages]
    if holders:
      return min(holders, key=lambda i: (running[i], i))
  # The least loaded instance nearly always has enough pages; otherwise check the others.
  least = running.index(min(running))
  if room.pages[least] >= pages:
    return least
  roomy = (i for i, free in enumerate(room.pages) if free >= pages)
  return min(roomy, key=lambda i: (running[i], i))


def _by_room(item: Item, pages: int, room: Room, instances: Instances) -> int:
  free, home = room.pages, item.kv_instance
  if home == NOWHERE and item.group.prompt_instances:
    home = max(item.group.prompt_instances, key=lambda i: (free[i], -i))
  if home != NOWHERE and free[home] >= pages:
    if free[home] + MAX_IMBALANCE * instances.num_pages[home] >= room.most:
      return home
  return free.index(room.most)
