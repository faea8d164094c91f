"""Which request's past lies in which slot of a draft's cache: least-recently-used, on the host.

A slot remembers the tokens whose keys and values it holds. What a request has in common with them
is not read again, whatever happened to the request in between: a draft that was rejected, a
preemption, a cancellation, a name that is used again are all the same question, how far the tokens
go together.
"""

from __future__ import annotations

from collections.abc import Sequence


class Slots:
  """Slots of a cache, by request.

  Attributes:
    num_evicted: requests whose slot was given to another before they were over.
    num_read_again: times that a request's tokens did not continue what its slot had been told.
  """

  def __init__(self, count: int):
    self._held: list[list[int]] = [[] for _ in range(count)]  # By slot: what is written.
    self._num_told = [0] * count  # By slot: how many of these were the request's own, no drafts.
    self._slot_of: dict[str, int] = {}  # The one that was used last is last.
    self._free = list(range(count - 1, -1, -1))
    self.num_evicted = self.num_read_again = 0

  def __len__(self) -> int:
    return len(self._held)

  def with_slots(self, names: Sequence[str]) -> list[int]:
    """Returns the places of those that may have a slot now, ascending.

    Where there are more than slots, those that have one keep it, so that no two take turns.
    """
    if len(names) <= len(self):
      return list(range(len(names)))
    order = sorted(range(len(names)), key=lambda place: (names[place] not in self._slot_of, place))
    return sorted(order[: len(self)])

  def take(self, names: Sequence[str]) -> list[int]:
    """Returns a slot for each of some requests, no more than there are slots."""
    for name in names:  # First, so that none of them loses its own to another of them.
      if (slot := self._slot_of.pop(name, None)) is not None:
        self._slot_of[name] = slot
    for name in names:
      if name in self._slot_of:
        continue
      if self._free:
        slot = self._free.pop()
      else:
        slot = self._slot_of.pop(next(iter(self._slot_of)))
        self.num_evicted += 1
      self._held[slot].clear()
      self._num_told[slot] = 0
      self._slot_of[name] = slot
    return [self._slot_of[name] for name in names]

  def num_known(self, slot: int, tokens: Sequence[int]) -> int:
    """Returns how many of a request's first tokens need not be read: never the last one."""
    held, told = self._held[slot], self._num_told[slot]
    most = min(len(held), len(tokens) - 1)
    if held[:most] == tokens[:most]:
      known = most
    else:
      begin = told if held[:told] == tokens[:told] else 0
      known = next(place for place in range(begin, most) if held[place] != tokens[place])
    self.num_read_again += known < min(told, len(tokens) - 1) or len(tokens) < told
    return known

  def tell(self, slot: int, tokens: Sequence[int], num_known: int, drafted: Sequence[int]) -> None:
    """Says that a request's tokens, and behind them `drafted` ones, are written now."""
    held = self._held[slot]
    del held[num_known:]
    held += tokens[num_known:]
    self._num_told[slot] = len(held)
    held += drafted

  def free(self, name: str) -> None:
    """Gives back the slot of a request that is over, if it has one."""
    if (slot := self._slot_of.pop(name, None)) is not None:
      self._free.append(slot)

  def forget_all(self) -> None:
    """Forgets what is written, as after new weights; requests keep their slots."""
    for slot, held in enumerate(self._held):
      held.clear()
      self._num_told[slot] = 0
