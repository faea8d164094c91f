"""Allocates the KV pages of waiting and running requests.

    waiting --admit: pages that it is expected to need--> running --grow: as its response grows-->
       ^                                                    |
       +------ the youngest is preempted for an older one --+

Nothing here reads a clock or changes a bit of a response.
"""

from __future__ import annotations

import itertools

from seerjax.engine import sizes
from seerjax.engine.counters import Counters
from seerjax.engine.requests import Requests
from seerjax.engine.sequence import SequenceState
from seerjax.engine.sizes import EngineConfig, pages_for
from seerjax.kv import pages as pages_lib, prefix_index
from seerjax.kv.memory import Memory
from seerjax.kv.owner import Owner
from seerjax.kv.pins import Pins


def _sharing(sequence: SequenceState) -> tuple[str, Owner]:
  """Returns a key that is equal for siblings that share a prompt's keys and values."""
  return sequence.request.group_id, sequence.owner


class Allocation:
  """Allocates the pages of one engine's requests.

  Attributes:
    copies: by instance, pages (from, to) that the next step copies before it writes.
    window_copies: likewise, by further kind of pages and instance.
  """

  def __init__(
    self, requests: Requests, memory: Memory, counters: Counters, pins: Pins, config: EngineConfig
  ):
    self._requests = requests
    self._memory = memory
    self._counters = counters
    self._pins = pins
    self._config = config
    self.start_over()

  def start_over(self) -> None:
    """Discards the pending copies of a failed step."""
    self.copies: list[list[tuple[int, int]]] = [[] for _ in self._memory.pools]
    self.window_copies: list[list[list[tuple[int, int]]]] = [
      [[] for _ in self.copies] for _ in self._memory.windows.kinds[1:]
    ]
    # By instance: the source pages that are held until they are copied.
    self._sources: list[list[int]] = [[] for _ in self._memory.pools]

  def grow(self) -> None:
    """Allocates the pages of running sequences' next tokens, oldest sequence first.

    If no page is left, the youngest sequence is preempted and waits again. So the oldest one always
    gets what it needs, and since its whole response fits into memory, it finishes. Pages that are
    still free then are allocated ahead for drafts, which end at the sequence's last page.
    """
    for instance, pool in enumerate(self._memory.pools):
      running = self._requests.running[instance]
      # Preemption shortens the list at its end.
      for place in itertools.count():
        if place >= len(running):
          break
        sequence = running[place]
        count = len(sequence.tokens)
        steps = 1 if sequence.needs_host else self._config.decode_steps_per_call
        if sequence.reach >= min(sequence.limit, count + steps):
          continue
        least = pages_for(count + 1, self._config.page_size) - len(sequence.pages)
        while pool.num_available < least:
          victim = self._requests.youngest_holder(sequence)
          if not self.make_way(instance) and not self._displace(victim):
            break
        self._lengthen(sequence, pool, max(least, 1))
      for sequence in running:
        self._lengthen(sequence, pool, 1)

  def fill(self) -> None:
    """Allocates the pages of running sequences' next rows in layers with windows, oldest first.

    If too few are left for one row of a sequence, others are preempted, as in `grow`; if none can
    be, the sequence waits.
    """
    windows = self._memory.windows
    if not windows.kinds[1:]:
      return
    for instance in range(len(self._memory.pools)):
      running = self._requests.running[instance]
      rows_left = self._config.batch_size_buckets[-1]
      for place in itertools.count():
        if place >= len(running):
          break
        sequence = running[place]
        rows = min(self._requests.num_unwritten(sequence), max(rows_left, 1))
        rows_left -= rows
        if not rows:
          continue
        least = min(sequence.num_written + 1, len(sequence.tokens))
        while not windows.fill(sequence, least, self._next_position(sequence, rows)):
          victim = self._requests.youngest_holder(sequence)
          self._memory.settle()  # A victim's pages may still have to be restored.
          if not self.make_way(instance) and not self._displace(victim):
            break

  def fill_in_background(self, sequence: SequenceState, *, is_first: bool) -> int:
    """Works like `fill`, for a background sequence; returns the next rows that have pages.

    Args:
      sequence: a background sequence that holds pages.
      is_first: whether the step has no rows yet, so other background sequences may be preempted.
    """
    windows, rows = self._memory.windows, self._requests.num_unwritten(sequence)
    if not windows.kinds[1:] or not rows:
      return rows
    rows = min(rows, self._config.batch_size_buckets[-1])
    least = min(sequence.num_written + 1, len(sequence.tokens))
    while not windows.fill(sequence, least, self._next_position(sequence, rows)):
      others = self._requests.holders_in_background(sequence.instance)
      victim = next((other for other in others if other is not sequence), None)
      self._memory.settle()
      if not is_first or (victim is None and not self._pins.take_off(sequence.instance)):
        break
      if victim is not None:
        self._preempt_background(victim)
    return min(rows, sequence.num_in_windows - sequence.num_written)

  def _next_position(self, sequence: SequenceState, rows: int) -> int:
    """Returns the position up to which a sequence is to have pages in layers with windows."""
    written, end = sequence.num_written + rows, len(sequence.tokens)
    if written < end:
      return written
    ahead = sizes.next_tokens(self._config, end, min(sequence.limit, sequence.reach))
    return max(written, ahead - 1)  # The last token is never read back.

  def _lengthen(self, sequence: SequenceState, pool: pages_lib.PagePool, least: int) -> None:
    """Gives a running sequence its next pages, as many as are free, if there are `least`."""
    missing = sequence.wanted_pages(self._config) - len(sequence.pages)
    missing = min(missing, pool.num_available)
    if missing >= least:
      self._memory.hold(sequence, [*sequence.pages, *pool.take(missing)])

  def _displace(self, victim: SequenceState | None) -> bool:
    """Preempts a sequence for an older one; returns False if `victim` is None.

    Its pages are spilled, or dropped and computed again if the pool is full too. No sequence has
    rows of the step yet.
    """
    if victim is None:
      return False
    self._counters.displaced += 1
    if not self._take_off(victim):
      self._counters.preemptions += 1
    if self._requests.is_running(victim):
      self._requests.preempt(victim)
    return True

  def _take_off(self, victim: SequenceState) -> bool:
    """Spills a sequence's pages; drops them and returns False if the pool is full."""
    if self._memory.spill([victim]):
      return True
    self._memory.release(victim)
    return False

  def promised_pages(self, instance: int) -> int:
    """Returns the pages that running sequences of an instance are expected to take soon."""
    return sum(
      max(0, sequence.expected_pages(self._config) - len(sequence.pages))
      for sequence in self._requests.running[instance]
    )

  def admit(self) -> None:
    """Admits waiting sequences, first come first served, if the pages they are expected to need are
    available in addition to those that running sequences need for `EngineConfig.reserved_tokens`
    more tokens.

    Background requests are preempted to make room.
    """
    for instance, pool in enumerate(self._memory.pools):
      waiting, running = self._requests.waiting[instance], self._requests.running[instance]
      prefilling = {_sharing(s) for s in running if s.is_prefilling and s.request.group_id}
      held_back: list[SequenceState] = []
      promised = self.promised_pages(instance) if waiting else 0
      while waiting and len(running) < self._config.max_num_seqs:
        sequence = waiting[0]
        self._requests.busy = (sequence, len(sequence.tokens))
        is_fresh = not (sequence.pages or sequence.num_written)
        group = sequence.request.group_id
        if is_fresh and self._config.enable_prefix_caching and _sharing(sequence) in prefilling:
          held_back.append(waiting.popleft())  # A sibling is prefilling the shared prompt.
          continue
        # If nothing runs, one request always starts: its whole response fits, page by page if need
        # be.
        most = promised if running else None
        has_pages = self.give_pages(sequence, pool, most)
        while not has_pages and (
          self.make_way(instance)
          or (not running and self._displace(self._requests.paused_holder(instance)))
        ):
          has_pages = self.give_pages(sequence, pool, most)
        if not has_pages:
          self._counters.waits += 1
          break
        waiting.popleft()
        running.append(sequence)
        promised += max(0, sequence.expected_pages(self._config) - len(sequence.pages))
        if sequence.is_prefilling and group:
          prefilling.add(_sharing(sequence))
      waiting.extendleft(reversed(held_back))
    self._requests.busy = None

  def give_pages(
    self, sequence: SequenceState, pool: pages_lib.PagePool, promised: int | None = None
  ) -> bool:
    """Gives a waiting sequence the pages it needs to run; returns False if there are too few.

    Args:
      sequence: a waiting sequence.
      pool: allocator of its instance.
      promised: pages that other sequences are expected to take; None also ignores the further pages
        that this sequence is expected to take.
    """
    # Pages that must stay free after this allocation, the sequence's own next pages included.
    left = 0
    if promised is not None:
      more = sequence.expected_pages(self._config) - sequence.wanted_pages(self._config)
      left = promised + more
    if sequence.pages:
      return self._extend(sequence, pool, left)
    if sequence.num_written:  # Spilled: it is restored before the step.
      return self._memory.begin_restore(sequence, sequence.wanted_pages(self._config), left)
    return self._begin(sequence, pool, left)

  def make_way(self, instance: int) -> bool:
    """Preempts one background sequence or pin of an instance; returns False if none holds pages.

    Its pages are spilled, or dropped if the pool is full too. None of these sequences has rows of
    the step yet, nor pages that are still to be copied.
    """
    for sequence in self._requests.holders_in_background(instance):
      self._preempt_background(sequence)
      return True
    return self._pins.take_off(instance)

  def _preempt_background(self, sequence: SequenceState) -> None:
    if self._take_off(sequence):
      self._counters.background_spilled += 1
    else:
      self._counters.background_preempted += 1
    if self._requests.is_running(sequence):
      self._requests.preempt(sequence)

  def _extend(self, sequence: SequenceState, pool: pages_lib.PagePool, left: int) -> bool:
    """Gives a sequence that holds pages those of its next chunk; returns False if that would leave
    fewer than `left` free."""
    needed = sequence.wanted_pages(self._config) - len(sequence.pages)
    if needed + left > pool.num_available:
      return False
    self._memory.hold(sequence, [*sequence.pages, *pool.take(max(needed, 0))])
    return True

  def _begin(self, sequence: SequenceState, pool: pages_lib.PagePool, left: int) -> bool:
    """Gives a sequence its first pages, cached ones included; returns False if that would leave
    fewer than `left` free."""
    hit = self._memory.find(sequence, sequence.reusable)
    for page in hit.pages:
      pool.hold(page)
    if hit.copy_from is not None:
      pool.hold(hit.copy_from)
    needed = sequence.wanted_pages(self._config) - len(hit.pages)
    if needed + left > pool.num_available and hit.copy_from is not None:
      # The page to copy may be the only one that is missing: if nothing runs, no other page would
      # ever become free.
      pool.release(hit.copy_from)
      hit = prefix_index.PrefixHit(hit.pages, None, len(hit.pages) * self._config.page_size)
    if needed + left > pool.num_available:
      for page in hit.pages:
        pool.release(page)
      return False
    fresh = pool.take(needed)
    self._memory.hold(sequence, [*hit.pages, *fresh])
    sequence.num_written = hit.num_tokens
    self._memory.windows.hold_cached(sequence)
    if hit.copy_from is not None:
      self.copies[sequence.instance].append((hit.copy_from, fresh[0]))
      self._counters.page_copies += 1
      # Held until the copy is made: a restored page is written before the copies of the step.
      self._sources[sequence.instance].append(hit.copy_from)
    self._counters.reused_tokens += hit.num_tokens
    return True

  def settle(self) -> None:
    """Performs the pending restores and copies when a step has no rows.

    A held request may have been given such pages. Between two steps it can be cancelled or
    migrated, so the pages must be written by then.
    """
    self._memory.settle()
    self._memory.copy(self.copies)
    for kind, copies in enumerate(self.window_copies, 1):
      self._memory.copy(copies, kind)
    self.forget_copies()

  def forget_copies(self) -> None:
    """Clears the copies, which the step performs, and releases their source pages."""
    self.copies = [[] for _ in self._memory.pools]
    for copies in self.window_copies:
      for own in copies:
        own.clear()
    for pool, sources in zip(self._memory.pools, self._sources, strict=True):
      while sources:
        pool.release(sources.pop())
