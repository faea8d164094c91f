"""Starts of prompts whose pages stay in memory while no request holds them.

    pin -> wanted -> (its pages are in memory) held <-> (others need them) off the device
                            released by new weights: wanted again, with nothing written

A pin is a claim within a quota, not work: it holds those whole pages of its tokens that some
request has written. Whoever wants the rest lets a request write them and pins again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from seerjax.engine.kv.memory import Memory
from seerjax.engine.kv.owner import BASE, Owner
from seerjax.engine.sequence import SequenceState
from seerjax.ops import sampling
from seerjax.types import Request

# Of names in the pool, where no request has it.
NAME = "\0pin"


class Pin(NamedTuple):
  """What is pinned.

  Attributes:
    tokens: the start of prompts.
    adapter: by whose weights it is written, "" for the base.
    namespace: whose it is, "" for all that name none.
    num_held: positions whose keys are on the devices, of the instance that has most.
    num_kept: and those that are there or in the pool.
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
    # By (owner, tokens): what each instance holds of it. The last that were pinned are last.
    self._pins: dict[tuple[Owner, tuple[int, ...]], list[SequenceState]] = {}

  @property
  def sequences(self) -> Iterable[SequenceState]:
    """What holds pages for pins."""
    return [sequence for pin in self._pins.values() for sequence in pin]

  def pin(self, tokens: Sequence[int], owner: Owner = BASE) -> int:
    """Holds a start's whole pages, those that are in memory; see `Engine.pin`."""
    key = (owner, tuple(int(token) for token in tokens))
    if key not in self._pins:
      wanted = len(key[1]) // self._page_size
      others = sum(len(tokens) // self._page_size for _, tokens in self._pins)
      if not wanted:
        raise ValueError(
          f"Engine.pin: got {len(key[1])} tokens, expected at least {self._page_size}, a page; a"
          " shorter start costs less to write than to keep."
        )
      if wanted + others > self._max_pages:
        raise ValueError(
          f"Engine.pin: got {wanted} pages beside {others} that are pinned, expected at most"
          f" {self._max_pages} in all; unpin another, or raise EngineConfig.pinned_pages."
        )
      self._num_named += 1
      self._pins[key] = [
        self._made(key, instance) for instance in range(len(self._memory.pools))
      ]
    pin = self._pins[key] = self._pins.pop(key)
    for sequence in pin:
      self._fill(sequence)
    return max(len(sequence.pages) for sequence in pin) * self._page_size

  def unpin(self, tokens: Sequence[int], owner: Owner = BASE) -> None:
    """Lets a start go; its pages stay findable until they are needed.

    Raises:
      ValueError: if it is not pinned.
    """
    key = (owner, tuple(int(token) for token in tokens))
    if key not in self._pins:
      raise ValueError(
        f"Engine.unpin: got {len(key[1])} tokens that are not pinned, expected one of the"
        f" {len(self._pins)} starts that are; pass what was pinned."
      )
    for sequence in self._pins.pop(key):
      self._memory.release(sequence)

  def named(self) -> tuple[Pin, ...]:
    """Returns all pins, the last that was pinned last."""
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
    """Lets all pages go, of every pin: they are of weights that are gone. The pins stay wanted."""
    for sequence in self.sequences:
      self._memory.release(sequence)

  def take_off(self, instance: int) -> bool:
    """Takes one pin's pages off an instance, which others need; False if none holds any.

    They go to the pool, or are released where that is full.
    """
    for pin in self._pins.values():
      sequence = pin[instance]
      if sequence.pages:
        if not self._memory.spill([sequence]):
          self._memory.release(sequence)
        return True
    return False

  def bring_back(self) -> None:
    """Takes pins back from the pool, as far as there are pages: nobody needs them now."""
    for sequence in self.sequences:
      if sequence.num_written and not sequence.pages:
        self._fill(sequence)

  def _made(self, key: tuple[Owner, tuple[int, ...]], instance: int) -> SequenceState:
    owner, tokens = key
    whole = tokens[: len(tokens) // self._page_size * self._page_size]
    request = Request(
      request_id=f"{NAME} {self._num_named} {instance}",
      prompt=whole,
      adapter=owner.adapter,
      namespace=owner.namespace,
    )
    row = sampling.sampling_rows([request.sampling])
    return SequenceState(request, list(whole), instance, None, row, limit=len(whole))

  def _fill(self, sequence: SequenceState) -> None:
    """Brings a pin back that is off the device, and holds what else is found of it."""
    if sequence.num_written and not sequence.pages:
      if self._memory.begin_restore(sequence, sequence.num_written // self._page_size):
        self._memory.settle()
        self._memory.remember(sequence, sequence.tokens[: sequence.num_written])
    if sequence.num_written and not sequence.pages:
      return  # There is no room for it now.
    found = self._memory.hold_found(sequence)
    if len(found) > len(sequence.pages):
      found, sequence.pages = sequence.pages, found
      self._memory.hold(sequence, sequence.pages)
      sequence.num_written = len(sequence.pages) * self._page_size
    for page in found:
      self._memory.pools[sequence.instance].release(page)
