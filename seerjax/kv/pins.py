"""Pinned prompt prefixes: their pages stay cached while no request holds them.

    pin -> wanted -> (pages are cached) held <-> (pages are needed) off the device
                            released by new weights: wanted again, with nothing written

A pin is a claim within a quota and computes nothing: it holds those whole pages of its tokens that
some request has written. To pin the rest, submit a request that writes it, then pin again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from seerjax.kv.holding import Holding
from seerjax.kv.memory import Memory
from seerjax.kv.owner import BASE, Owner

# Prefix of names of pins in the KV pool, which no user's request has.
NAME = "\0pin"


class Pin(NamedTuple):
  """State of one pin.

  Attributes:
    tokens: the pinned prefix.
    adapter: name of the adapter that writes it, "" for the base weights.
    namespace: namespace of the pin, "" for the shared default.
    num_held: positions with keys on the devices, of the instance that has most.
    num_kept: positions with keys on the devices or in the KV pool.
  """

  tokens: tuple[int, ...]
  adapter: str
  namespace: str
  num_held: int
  num_kept: int


class Pins:
  """The pins of one engine, each on all of its instances."""

  def __init__(self, memory: Memory, *, page_size: int, max_pages: int):
    self._memory = memory
    self._page_size = page_size
    self._max_pages = max_pages
    self._num_named = 0
    # By (owner, tokens): one sequence per instance. The most recently pinned are last.
    self._pins: dict[tuple[Owner, tuple[int, ...]], list[Holding]] = {}

  @property
  def sequences(self) -> Iterable[Holding]:
    """The sequences that hold pages for pins."""
    return [sequence for pin in self._pins.values() for sequence in pin]

  def pin(self, tokens: Sequence[int], owner: Owner = BASE) -> int:
    """Holds the cached whole pages of a prefix; see `Chunks.pin`."""
    key = (owner, tuple(int(token) for token in tokens))
    if key not in self._pins:
      wanted = len(key[1]) // self._page_size
      others = sum(len(tokens) // self._page_size for _, tokens in self._pins)
      if not wanted:
        raise ValueError(
          f"Chunks.pin: got {len(key[1])} tokens, expected at least {self._page_size}, one page;"
          " shorter prefixes cost less to compute than to keep."
        )
      if wanted + others > self._max_pages:
        raise ValueError(
          f"Chunks.pin: got {wanted} pages in addition to {others} pinned ones, expected at most"
          f" {self._max_pages} in all; unpin another, or raise EngineConfig.pinned_pages."
        )
      self._num_named += 1
      self._pins[key] = [self._made(key, instance) for instance in range(len(self._memory.pools))]
    pin = self._pins[key] = self._pins.pop(key)
    for sequence in pin:
      self._fill(sequence)
    return max(len(sequence.pages) for sequence in pin) * self._page_size

  def unpin(self, tokens: Sequence[int], owner: Owner = BASE) -> None:
    """Removes a pin; its pages stay in the prefix cache until they are evicted.

    Raises:
      ValueError: if `tokens` are not pinned.
    """
    key = (owner, tuple(int(token) for token in tokens))
    if key not in self._pins:
      raise ValueError(
        f"Chunks.unpin: got {len(key[1])} tokens that are not pinned, expected one of the"
        f" {len(self._pins)} pinned prefixes; pass one of them."
      )
    for sequence in self._pins.pop(key):
      self._memory.release(sequence)

  def named(self) -> tuple[Pin, ...]:
    """Returns all pins, the most recently pinned last."""
    return tuple(
      Pin(
        tokens=tokens,
        adapter=owner.adapter,
        namespace=owner.namespace,
        num_held=max(len(sequence.pages) for sequence in pin) * self._page_size,
        num_kept=max(sequence.num_written for sequence in pin),
      )
      for (owner, tokens), pin in self._pins.items()
    )

  def release(self) -> None:
    """Releases the pages of all pins because the weights changed. The pins stay wanted."""
    for sequence in self.sequences:
      self._memory.release(sequence)

  def take_off(self, instance: int) -> bool:
    """Frees one pin's pages on an instance; returns False if no pin holds pages there.

    The pages are spilled to the KV pool, or released if the pool is full.
    """
    for pin in self._pins.values():
      sequence = pin[instance]
      if sequence.pages:
        if not self._memory.spill([sequence]):
          self._memory.release(sequence)
        return True
    return False

  def bring_back(self) -> None:
    """Restores spilled pins from the pool into pages that are free now."""
    for sequence in self.sequences:
      if sequence.num_written and not sequence.pages:
        self._fill(sequence)

  def _made(self, key: tuple[Owner, tuple[int, ...]], instance: int) -> Holding:
    owner, tokens = key
    whole = tokens[: len(tokens) // self._page_size * self._page_size]
    name = f"{NAME} {self._num_named} {instance}"
    return Holding(name=name, owner=owner, tokens=list(whole), instance=instance)

  def _fill(self, sequence: Holding) -> None:
    """Restores a spilled pin, and holds further pages of its tokens that are cached."""
    if sequence.num_written and not sequence.pages:
      if self._memory.begin_restore(sequence, sequence.num_written // self._page_size):
        self._memory.settle()
        self._memory.remember(sequence, sequence.tokens[: sequence.num_written])
    if sequence.num_written and not sequence.pages:
      return  # No free pages for it.
    found = self._memory.hold_found(sequence)
    if len(found) > len(sequence.pages):
      found, sequence.pages = sequence.pages, found
      self._memory.hold(sequence, sequence.pages)
      sequence.num_written = len(sequence.pages) * self._page_size
      self._memory.windows.hold_cached(sequence)
    for page in found:
      self._memory.pools[sequence.instance].release(page)
