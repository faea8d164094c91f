"""Operations of a scheduler on requests between their chunks, and on KV pages.

    running -> (end of chunk, `pause`) paused: holds its pages -> `resume` -> waiting -> running
                                          |        ^
                        `migrate`, `spill`, `preempt`: its pages move, or are dropped

None of them changes a bit of a response. `held_pages` and `free_pages`, which guide the caller's
decisions, count pages of one instance.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

from seerjax import fields
from seerjax.engine import checks, sizes
from seerjax.engine.counters import Counters
from seerjax.engine.requests import Requests
from seerjax.engine.sizes import EngineConfig
from seerjax.engine.weights import Weights
from seerjax.kv.manifest import KVManifest
from seerjax.kv.memory import Memory
from seerjax.kv.owner import Owner
from seerjax.kv.pins import Pin, Pins


@fields.checked_methods
class Chunks:
  """Interface of one engine for a scheduler of chunks (`Engine.chunks`)."""

  def __init__(
    self,
    requests: Requests,
    memory: Memory,
    counters: Counters,
    pins: Pins,
    *,
    config: EngineConfig,
    weights: Weights,
    vocab_size: int,
  ):
    self._config = config
    self._counters = counters
    self._memory = memory
    self._requests = requests
    self._pins = pins
    self._weights = weights
    self._vocab_size = vocab_size

  def poll_paused(self) -> list[str]:
    """Returns the paused requests, in the order in which their chunks ended; they hold pages."""
    return list(self._requests.paused)

  def instance_of(self, request_id: str) -> int:
    """Returns the instance of a request; raises ValueError for an unknown request."""
    return self._requests.find(request_id, "Chunks.instance_of").instance

  def pause(self, request_id: str) -> None:
    """Ends a request's chunk now; it keeps its pages.

    Raises:
      ValueError: if there is no such request.
    """
    sequence = self._requests.find(request_id, "Chunks.pause")
    if request_id not in self._requests.paused:
      self._requests.pause(sequence)

  def resume(
    self, request_id: str, *, chunk_tokens: int | None = None, instance: int | None = None
  ) -> None:
    """Resumes a paused request for another chunk, once its memory is available.

    Args:
      request_id: id of a paused request.
      chunk_tokens: as for `Engine.add_request`.
      instance: instance to run on; None keeps it. A request that has pages on another instance
        loses them and computes them again (`migrate` moves them); a spilled one is restored on the
        new instance.

    Raises:
      ValueError: if there is no such request or instance, or the request is not paused.
    """
    sequence = self._requests.find_paused(request_id, "Chunks.resume")
    checks.chunk(f"Chunks.resume of {request_id!r}", chunk_tokens)
    if instance is not None:
      self._requests.check_instance(f"Chunks.resume of {request_id!r}", instance)
      if instance != sequence.instance:
        if sequence.pages:
          self._memory.release(sequence)
        sequence.instance = instance
    sequence.extend(chunk_tokens, self._config.reserved_tokens)
    self._requests.resume(sequence)

  def migrate(self, request_id: str, instance: int) -> bool:
    """Moves a paused request's pages to another instance; returns False if it has no room for them.

    Raises:
      ValueError: if there is no such request or instance, or the request is not paused.
    """
    sequence = self._requests.find_paused(request_id, "Chunks.migrate")
    self._requests.check_instance(f"Chunks.migrate of {request_id!r}", instance)
    return self._memory.migrate(sequence, instance)

  def pull_prefix(
    self, tokens: Sequence[int], source: int, target: int, adapter: str = "", namespace: str = ""
  ) -> int:
    """Copies the whole pages of a prefix from one instance to another.

    Args:
      tokens: the prefix.
      source: instance that has cached it.
      target: instance that receives it.
      adapter: name of the adapter that wrote it, "" for the base weights.
      namespace: `Request.namespace` of the requests that may use it.

    Returns:
      Number of positions copied: those that `source` has cached and `target` has not, within the
      room of `target`.

    Raises:
      ValueError: if there is no such instance.
    """
    for name, instance in (("source", source), ("target", target)):
      self._requests.check_instance(f"Chunks.pull_prefix: {name}", instance)
    return self._memory.pull_prefix(tokens, source, target, Owner(adapter, namespace))

  def spill(self, request_ids: Iterable[str]) -> list[str]:
    """Spills paused requests' pages off the devices, in order, until the pool is full.

    Returns:
      The ids of the spilled requests. They are restored when they are resumed, on any instance.

    Raises:
      ValueError: if there is no such request, or it is not paused.
    """
    # Duplicate ids are one request.
    sequences = [
      self._requests.find_paused(name, "Chunks.spill") for name in dict.fromkeys(request_ids)
    ]
    left = self._memory.spill([sequence for sequence in sequences if sequence.pages])
    return [sequence.name for sequence in left]

  def export_kv(self, request_id: str) -> KVManifest | None:
    """Puts a copy of a paused request's pages into the store, for an engine that continues it.

    The request is unchanged; cancel it once it continues elsewhere. Its previous export is removed.
    Exports are also removed when the weights change.

    Returns:
      The manifest to pass to `Engine.add_request` there; None if nothing is written, there is no
      store, or no room in it: the keys are computed again then.

    Raises:
      ValueError: if there is no such request, or it is not paused.
    """
    sequence = self._requests.find_paused(request_id, "Chunks.export_kv")
    return self._memory.export(sequence)

  def forget_kv(self, request_id: str) -> None:
    """Removes the export of a request that ended elsewhere; any other request is ignored."""
    if request_id not in self._requests.live:
      self._memory.kv_pool.end(request_id)

  def held_pages(self, request_id: str) -> int:
    """Returns how many pages of its instance a request holds; 0 if it is spilled or waits.

    Raises:
      ValueError: if there is no such request.
    """
    return len(self._requests.find(request_id, "Chunks.held_pages").pages)

  def free_pages(self, instance: int) -> int:
    """Returns the number of available pages; raises ValueError for an unknown instance."""
    self._requests.check_instance("Chunks.free_pages", instance)
    return self._memory.pools[instance].num_available

  def yielding_pages(self, instance: int) -> int:
    """Returns how many pages are held only by pins and background requests.

    They are reclaimed as soon as a foreground request needs them.

    Raises:
      ValueError: if there is no such instance.
    """
    self._requests.check_instance("Chunks.yielding_pages", instance)
    pins = (sequence for sequence in self._pins.sequences if sequence.instance == instance)
    holders = (*self._requests.holders_in_background(instance), *pins)
    held = collections.Counter(page for sequence in holders for page in sequence.pages)
    pool = self._memory.pools[instance]
    return sum(pool.num_holders(page) == count for page, count in held.items())

  def awaited_pages(self, instance: int) -> int:
    """Returns how many further pages admission expects the requests of an instance to take.

    Requests without chunks count with `EngineConfig.reserved_tokens` more tokens.

    Raises:
      ValueError: if there is no such instance.
    """
    self._requests.check_instance("Chunks.awaited_pages", instance)
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
    """Returns the pages that a prompt and response of `num_tokens` need.

    Raises:
      ValueError: if there is no token.
    """
    if num_tokens < 1:
      raise ValueError(
        f"Chunks.pages_for: got {num_tokens} tokens, expected at least 1; a prompt has at least one"
        " token."
      )
    return sizes.pages_for(num_tokens, self._config.page_size)

  def preempt(self, request_id: str) -> None:
    """Drops a request's pages; it prefills again to the same bits.

    A running request moves to the front of the waiting queue; a paused one stays paused.

    Raises:
      ValueError: if there is no such request.
    """
    sequence = self._requests.find(request_id, "Chunks.preempt")
    is_running = self._requests.is_running(sequence)
    self._counters.preemptions += is_running or sequence.num_written > 0
    self._memory.release(sequence)
    if is_running:
      self._requests.preempt(sequence)

  def pin(self, tokens: Sequence[int], *, adapter: str = "", namespace: str = "") -> int:
    """Pins a prefix: its cached pages stay in memory for requests that begin with it.

    Whole pages that are cached are pinned; call again after a request has written more to pin
    more. Pinned pages are spilled before a foreground request has to wait for pages, and restored
    when there is no foreground request. New weights release the pages; the pin stays, and another
    request has to fill it.

    Args:
      tokens: the prefix, at least a page.
      adapter: name of the adapter that writes it, "" for the base weights.
      namespace: `Request.namespace` of the requests that may use it.

    Returns:
      Number of positions that are now on the devices, of the instance that has most.

    Raises:
      ValueError: for less than a page, more than `EngineConfig.pinned_pages` in all, an unknown
        adapter, or an engine without prefix caching.
    """
    reuses = self._config.enable_prefix_caching
    checks.pin(tokens, reuses, adapter, self._weights.index_of, self._vocab_size)
    self._memory.take_again()
    return self._pins.pin(tokens, Owner(adapter, namespace))

  def unpin(self, tokens: Sequence[int], *, adapter: str = "", namespace: str = "") -> None:
    """Removes a pin; raises ValueError if `tokens` are not pinned."""
    self._pins.unpin(tokens, Owner(adapter, namespace))

  @property
  def pins(self) -> tuple[Pin, ...]:
    """All pins and how much of each is in memory, the most recently pinned last."""
    return self._pins.named()
