"""Tracks the free resources of the instances, for scheduling decisions."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from seerjax.rollout.buffer import NOWHERE


class Decision(NamedTuple):
  """A decision to run a request's next chunk on an instance.

  Attributes:
    request_id: id of a waiting request.
    instance: instance to run it.
    max_chunk_tokens: maximum number of tokens to generate.
    num_pages: pages of the chunk: up to its last position; with `GroupFCFS` for its current length.
    is_probe: whether it is the group's first request.
    prefill_tokens: positions to compute first, because their KV is missing and is not pulled.
    pull_tokens: positions of KV to fetch from `pull_from` first.
    pull_from: source instance, or -1.
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
  """Free resources by instance. The caller keeps them current between calls of `next`.

  The lists are read-only for others: `admit`, `release` and `see` update them, and also `room`,
  which each decision would otherwise have to compute for all instances.

  KV of waiting requests does not count as used: it is moved away when a chunk needs the pages.

  Attributes:
    page_size: positions of a page.
    num_pages: total pages.
    free_pages: pages not held or reserved by a running chunk.
    num_running: running requests.
    max_running: maximum number of running requests.
    room: pages available to a new chunk: the free ones, or 0 if `max_running` is reached.
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
    cls, data_parallel_size: int, *, page_size: int, num_pages: int, max_running: int
  ) -> Instances:
    """Returns equal instances without running requests."""
    if min(data_parallel_size, page_size, num_pages, max_running) < 1:
      raise ValueError(
        f"Instances: got data_parallel_size={data_parallel_size}, page_size={page_size},"
        f" num_pages={num_pages}, max_running={max_running}, expected at least 1 of each."
      )
    pages = [num_pages] * data_parallel_size
    return cls(
      page_size, pages, list(pages), [0] * data_parallel_size, [max_running] * data_parallel_size
    )

  def add(self, *, num_pages: int, max_running: int) -> int:
    """Adds an instance without running requests; returns its index, the next one."""
    self.num_pages.append(num_pages)
    self.free_pages.append(num_pages)
    self.num_running.append(0)
    self.max_running.append(max_running)
    self.room.append(0)
    self._look(len(self.room) - 1)
    return len(self.room) - 1

  def close(self, instance: int) -> None:
    """Removes a lost instance for good by setting its room to 0; also releases its requests."""
    self.num_pages[instance] = self.free_pages[instance] = 0
    self.num_running[instance] = self.max_running[instance] = 0
    self._look(instance)

  def admit(self, decision: Decision) -> None:
    """Reserves the pages and the slot of a decision."""
    self.free_pages[decision.instance] -= decision.num_pages
    self.num_running[decision.instance] += 1
    self._look(decision.instance)

  def release(self, instance: int, num_pages: int) -> None:
    """Releases the pages and the slot of a chunk."""
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
    """Updates the state of an instance."""
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
  """Returns the number of pages for a number of positions."""
  return -(-positions // page_size)
