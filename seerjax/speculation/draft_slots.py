"""Assigns cache slots of a draft model to requests: least recently used, on the host.

A slot records the tokens of the keys and values that it holds. The common prefix of these and a
request's tokens need not be read again. Rejected drafts, preemptions, cancellations and reused
names are all handled by comparing tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class Slots:
  """Cache slots by request.

  Attributes:
    num_evicted: unfinished requests that lost their slot to another.
    num_read_again: how often a request's tokens did not continue the confirmed tokens of its slot.
  """

  def __init__(self, count: int):
    self._held: list[list[int]] = [[] for _ in range(count)]  # Tokens written in each slot.
    self._num_confirmed = [0] * count  # How many of these are confirmed tokens rather than drafts.
    self._slot_of: dict[str, int] = {}  # Most recently used last.
    self._free = list(range(count - 1, -1, -1))
    self.num_evicted = self.num_read_again = 0

  def __len__(self) -> int:
    return len(self._held)

  def with_slots(self, names: Sequence[str]) -> list[int]:
    """Returns the indices of the requests that can get a slot now, ascending.

    If there are too many requests, those that have a slot keep it, to avoid alternation.
    """
    if len(names) <= len(self):
      return list(range(len(names)))
    order = sorted(range(len(names)), key=lambda place: (names[place] not in self._slot_of, place))
    return sorted(order[: len(self)])

  def take(self, names: Sequence[str]) -> list[int]:
    """Returns a slot for each request; there must be enough slots."""
    for name in names:  # Mark as recently used first, so that they do not evict each other.
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
      self._num_confirmed[slot] = 0
      self._slot_of[name] = slot
    return [self._slot_of[name] for name in names]

  def num_known(self, slot: int, tokens: Sequence[int]) -> int:
    """Returns the number of leading tokens that need not be read again; excludes the last one."""
    held, confirmed = self._held[slot], self._num_confirmed[slot]
    most = min(len(held), len(tokens) - 1)
    if held[:most] == tokens[:most]:
      known = most
    else:
      begin = confirmed if held[:confirmed] == tokens[:confirmed] else 0
      known = next(place for place in range(begin, most) if held[place] != tokens[place])
    self.num_read_again += known < min(confirmed, len(tokens) - 1) or len(tokens) < confirmed
    return known

  def tell(self, slot: int, tokens: Sequence[int], num_known: int, drafted: Sequence[int]) -> None:
    """Records that a request's tokens, followed by the `drafted` ones, are now written."""
    held = self._held[slot]
    del held[num_known:]
    held += tokens[num_known:]
    self._num_confirmed[slot] = len(held)
    held += drafted

  def free(self, name: str) -> None:
    """Frees the slot of a finished request, if it has one."""
    if (slot := self._slot_of.pop(name, None)) is not None:
      self._free.append(slot)

  def forget_all(self) -> None:
    """Invalidates the contents of all slots, as after new weights; requests keep their slots."""
    for slot, held in enumerate(self._held):
      held.clear()
      self._num_confirmed[slot] = 0
