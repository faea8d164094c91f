"""What may be done to requests between their chunks, and to the pages that they hold then.

    running -> (end of chunk, `pause`) paused: holds its pages -> `resume` -> waiting -> running
                                          |        ^
                        `migrate`, `spill`, `preempt`: its pages go elsewhere, or are given up

None of it changes a bit of an answer. What the caller decides by, `held_pages` and `free_pages`,
counts pages of one instance.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

from seerjax.engine import checks, sizes
from seerjax.engine.counters import Counters
from seerjax.engine.kv.manifest import KVManifest
from seerjax.engine.kv.memory import Memory
from seerjax.engine.kv.owner import BASE, Owner
from seerjax.engine.kv.pins import Pins
from seerjax.engine.requests import Requests
from seerjax.engine.sizes import EngineConfig


class Chunks:
  """What a scheduler of chunks decides by and calls, of one engine; `Engine` has each as a door."""

  def __init__(
    self,
    requests: Requests,
    memory: Memory,
    counters: Counters,
    pins: Pins,
    *,
    config: EngineConfig,
  ):
    self._config = config
    self._counters = counters
    self._memory = memory
    self._requests = requests
    self._pins = pins

  def pause(self, request_id: str) -> None:
    """Ends a request's chunk now; it keeps its pages.

    Raises:
      ValueError: if there is no such request.
    """
    sequence = self._requests.find(request_id, "pause")
    if request_id not in self._requests.paused:
      self._requests.pause(sequence)

  def resume(
    self, request_id: str, *, chunk_tokens: int | None = None, instance: int | None = None
  ) -> None:
    """Lets a paused request continue for another chunk, once its memory is there.

    Args:
      request_id: of a paused request.
      chunk_tokens: as for `submit`.
      instance: where; None stays. A request that still has pages elsewhere loses them and computes
        them again (`migrate` takes them along); one that was spilled comes back there.

    Raises:
      ValueError: if there is no such request or instance, or it is not paused.
    """
    sequence = self._requests.find_paused(request_id, "resume")
    checks.chunk(f"Engine.resume of {request_id!r}", chunk_tokens)
    if instance is not None:
      self._requests.check_instance(f"Engine.resume of {request_id!r}", instance)
      if instance != sequence.instance:
        if sequence.pages:
          self._memory.release(sequence)
        sequence.instance = instance
    sequence.extend(chunk_tokens, self._config.reserved_tokens)
    self._requests.resume(sequence)

  def migrate(self, request_id: str, instance: int) -> bool:
    """Takes a paused request's pages to another instance; False if it has no room for them.

    Raises:
      ValueError: if there is no such request or instance, or it is not paused.
    """
    sequence = self._requests.find_paused(request_id, "migrate")
    self._requests.check_instance(f"Engine.migrate of {request_id!r}", instance)
    return self._memory.migrate(sequence, instance)

  def pull_prefix(
    self, tokens: Sequence[int], source: int, target: int, owner: Owner = BASE
  ) -> int:
    """Copies the whole pages of a token sequence's start from one instance to another.

    Returns:
      Positions that were copied: those that `source` has, `target` lacks and has room for.

    Raises:
      ValueError: if there is no such instance.
    """
    for name, instance in (("source", source), ("target", target)):
      self._requests.check_instance(f"Engine.pull_prefix: {name}", instance)
    return self._memory.pull_prefix(tokens, source, target, owner)

  def spill(self, request_ids: Iterable[str]) -> list[str]:
    """Takes paused requests' pages off the devices, in order, until the pool is full.

    Returns:
      Those that left. They come back when they are resumed, on any instance.

    Raises:
      ValueError: if there is no such request, or it is not paused.
    """
    # A name that comes twice is one request.
    sequences = [self._requests.find_paused(name, "spill") for name in dict.fromkeys(request_ids)]
    left = self._memory.spill([sequence for sequence in sequences if sequence.pages])
    return [sequence.request.request_id for sequence in left]

  def export_kv(self, request_id: str, policy_version: int) -> KVManifest | None:
    """Puts a copy of a paused request's pages into the store, for an engine that continues it.

    The request stays here, as it is; cancel it once it continues elsewhere. What was exported of it
    before is removed. Another policy's pages are removed when the weights change.

    Returns:
      What `Engine.submit` takes there; None if nothing is written, there is no store, or no room
      in it: the keys are computed again then.

    Raises:
      ValueError: if there is no such request, or it is not paused.
    """
    sequence = self._requests.find_paused(request_id, "export_kv")
    return self._memory.export(sequence, policy_version)

  def held_pages(self, request_id: str) -> int:
    """Returns the pages of its instance that a request holds; 0 if it is spilled or waits.

    Raises:
      ValueError: if there is no such request.
    """
    return len(self._requests.find(request_id, "held_pages").pages)

  def free_pages(self, instance: int) -> int:
    """Returns how many pages could be given out now; ValueError if there is no such instance."""
    self._requests.check_instance("Engine.free_pages", instance)
    return self._memory.pools[instance].num_available

  def yielding_pages(self, instance: int) -> int:
    """Returns how many pages are held by pins and by requests that nobody waits for alone.

    They are given up as soon as a request in front needs them.

    Raises:
      ValueError: if there is no such instance.
    """
    self._requests.check_instance("Engine.yielding_pages", instance)
    pins = (sequence for sequence in self._pins.sequences if sequence.instance == instance)
    holders = (*self._requests.holders_in_background(instance), *pins)
    held = collections.Counter(page for sequence in holders for page in sequence.pages)
    pool = self._memory.pools[instance]
    return sum(pool.num_holders(page) == count for page, count in held.items())

  def awaited_pages(self, instance: int) -> int:
    """Returns how many pages the requests of an instance are expected to take, as admission counts.

    Those that wait or run without chunks have `EngineConfig.reserved_tokens` ahead of them.

    Raises:
      ValueError: if there is no such instance.
    """
    self._requests.check_instance("Engine.awaited_pages", instance)
    sequences = (*self._requests.waiting[instance], *self._requests.running[instance])
    return sum(max(0, one.expected_pages(self._config) - len(one.pages)) for one in sequences)

  def expected_pages(self, num_prompt: int, max_tokens: int) -> int:
    """Returns the pages that admission counts for a new request without chunks.

    Raises:
      ValueError: if there is no token.
    """
    limit = num_prompt + max_tokens
    return self.pages_for(sizes.expected_tokens(self._config, num_prompt, limit))

  def pages_for(self, num_tokens: int) -> int:
    """Returns the pages that tokens of prompt and answer need.

    Raises:
      ValueError: if there is no token.
    """
    if num_tokens < 1:
      raise ValueError(
        f"Engine.pages_for: got {num_tokens} tokens, expected at least 1; a prompt has one."
      )
    return sizes.pages_for(num_tokens, self._config.page_size)

  def preempt(self, request_id: str) -> None:
    """Drops a request's pages; it prefills again to the same bits.

    One that was running waits first in line; one that is paused stays so.

    Raises:
      ValueError: if there is no such request.
    """
    sequence = self._requests.find(request_id, "preempt")
    is_running = self._requests.is_running(sequence)
    self._counters.preemptions += is_running or sequence.num_written > 0
    self._memory.release(sequence)
    if is_running:
      self._requests.preempt(sequence)
