"""Waiting requests in an order: the heaps that queues of policies are made of.

Heaps contain stale entries, which are dropped when they reach the top, so that a decision costs
O(log n + instances).
"""

from __future__ import annotations

import heapq

from seerjax.rollout.buffer import Item, State

_Entry = tuple[int, int, int, Item]  # (key, arrival, serial, item)


class Sorted:
  """Waiting requests by a changeable key, ties by arrival: a heap with lazy deletion.

  Only the entry of a request's last push is valid, while the request waits.
  """

  def __init__(self):
    self._heap: list[_Entry] = []
    self._serials: dict[int, int] = {}  # Serial number of each request's last push.
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


class InOrder:
  """Waiting requests by arrival: a heap with lazy deletion."""

  def __init__(self):
    self._heap: list[tuple[int, Item]] = []
    self._inside: set[int] = set()

  def push(self, item: Item) -> None:
    if item.index not in self._inside:
      self._inside.add(item.index)
      heapq.heappush(self._heap, (item.index, item))

  def peek(self) -> Item | None:
    while self._heap:
      index, item = self._heap[0]
      if item.state is State.WAITING:
        return item
      heapq.heappop(self._heap)
      self._inside.remove(index)
    return None


class Ranked:
  """Waiting requests by the rank of their group, lowest first; ties by arrival.

  Uses two levels of heaps: each group has a heap of its requests, and a heap of groups is ordered
  by rank and by each group's first request. Changing a group's rank thus costs one push, however
  many requests it has. Only a group's last entry is valid; it may refer to a request that no longer
  waits, but never sorts after the group's actual first request.
  """

  def __init__(self):
    self._groups: list[tuple[int, int, int]] = []  # (rank, arrival of the first, group)
    self._waiting: dict[int, InOrder] = {}  # By group.
    self._ranks: dict[int, int] = {}
    self._shown: dict[int, tuple[int, int, int]] = {}  # Last entry by group.

  def rank(self, group: int, rank: int) -> None:
    """Sets the rank of a group."""
    if self._ranks.get(group) != rank:
      self._ranks[group] = rank
      waiting = self._waiting.get(group)
      first = waiting and waiting.peek()
      if first:
        self._show(group, first)

  def push(self, item: Item) -> None:
    """Adds a request of a group that has a rank."""
    group = item.group.index
    waiting = self._waiting.setdefault(group, InOrder())
    waiting.push(item)
    if waiting.peek() is item:
      self._show(group, item)

  def peek(self) -> Item | None:
    while self._groups:
      entry = self._groups[0]
      group = entry[2]
      first = self._waiting[group].peek() if self._shown.get(group) == entry else None
      if first is not None and first.index == entry[1]:
        return first
      heapq.heappop(self._groups)
      if first is not None:
        self._show(group, first)
      elif self._shown.get(group) == entry:
        del self._shown[group]
    return None

  def _show(self, group: int, first: Item) -> None:
    """Pushes a group's entry for its current first request."""
    entry = (self._ranks[group], first.index, group)
    if self._shown.get(group) != entry:
      self._shown[group] = entry
      heapq.heappush(self._groups, entry)
