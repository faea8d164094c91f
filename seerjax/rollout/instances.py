"""What the instances have free, and the decision that takes some of it."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from seerjax.rollout.buffer import NOWHERE


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

  def add(self, *, num_pages: int, max_running: int) -> int:
    """Adds an instance that runs nothing; returns its number, the next one."""
    self.num_pages.append(num_pages)
    self.free_pages.append(num_pages)
    self.num_running.append(0)
    self.max_running.append(max_running)
    self.room.append(0)
    self._look(len(self.room) - 1)
    return len(self.room) - 1

  def close(self, instance: int) -> None:
    """Gives an instance no room any more, for good: it is gone. What ran there is released too."""
    self.num_pages[instance] = self.free_pages[instance] = 0
    self.num_running[instance] = self.max_running[instance] = 0
    self._look(instance)

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


def num_pages(positions: int, page_size: int) -> int:
  """Returns how many pages hold so many positions."""
  return -(-positions // page_size)
