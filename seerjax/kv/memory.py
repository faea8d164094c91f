"""KV pages of all instances: allocation, migration between instances, spilling and restoring.

    pages of an instance <-migrate-> of another <-spill, restore-> `KVPool` (pinned host, store)

Requests are moved whole, and only while they have no rows in a step. Everything is dispatched in
program order: a page may be reused as soon as the copy that reads it has been dispatched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from seerjax.kv import page_moves, pages as pages_lib, prefix_index, values
from seerjax.kv.counters import PageCounters
from seerjax.kv.holding import Holding
from seerjax.kv.manifest import KVManifest
from seerjax.kv.owner import BASE, Owner
from seerjax.kv.pool import KVPool
from seerjax.kv.windows import PageKind, Windows


class KVSizes(NamedTuple):
  """Sizes of the pages of one instance.

  Attributes:
    kinds: kinds of pages.
    page_size: positions per page.
    split: positions that attention reads together.
    table_width: width of a row of the page table, in pages.
    enable_prefix_caching: whether pages are cached for sequences with the same prefix.
  """

  kinds: tuple[PageKind, ...]
  page_size: int
  split: int
  table_width: int
  enable_prefix_caching: bool

  @property
  def num_pages(self) -> int | tuple[int, ...]:
    """Number of pages, the reserved one included; by kind if there are several."""
    counts = tuple(kind.num_pages for kind in self.kinds)
    return counts if counts[1:] else counts[0]


class _Part(NamedTuple):
  """Pages of one kind that one program moves."""

  kind: int
  pages: list[int]


class Memory:
  """The KV pages, their allocators, and the programs that move pages.

  Attributes:
    pools: allocators of the first kind of pages, by instance.
    table_width: width of a row of the page table, in pages.
    windows: pages of layers with windows.
  """

  def __init__(
    self,
    make_pages: Callable[[], Any],
    moves: page_moves.PageMoves,
    *,
    sizes: KVSizes,
    kv_pool: KVPool,
    counters: PageCounters,
    fingerprint: Callable[[Any], str],
  ):
    """Allocates the pages with `make_pages`: a pytree of f[i, k, m, ...] with page axis m.

    `fingerprint` returns the digest that identifies such pages in a shared store.
    """
    self.pages: Any = make_pages()
    pages = self.pages
    self._make_pages = make_pages
    num_pages, num_instances = sizes.kinds[0].num_pages, len(moves.mesh.devices)
    self.pools = [pages_lib.PagePool(num_pages, sizes.page_size) for _ in range(num_instances)]
    self.windows = Windows(
      sizes.kinds, page_size=sizes.page_size, split=sizes.split, table_width=sizes.table_width,
      num_instances=num_instances,
    )  # fmt: skip
    self.kv_pool = kv_pool
    self.counters = counters
    self._fingerprint = fingerprint(pages)
    self._moves = moves
    self._page_size = sizes.page_size
    self.table_width = sizes.table_width
    self._reuse_prefixes = sizes.enable_prefix_caching
    leaves = jax.tree.leaves(pages)
    shards = [leaf.sharding.shard_shape(leaf.shape) for leaf in leaves]
    # Like `KVManifest.layout` of values that are extracted from these pages.
    self.layout = {
      (leaf.dtype.name, (1, *shard[1:2]), tuple(shard[3:]))
      for leaf, shard in zip(leaves, shards, strict=True)
    }
    # By kind: bytes of one page.
    self._page_bytes = [
      sum(math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in jax.tree.leaves(own))
      // kind.num_pages
      for kind, own in zip(sizes.kinds, map(self._of_kind, range(len(sizes.kinds))), strict=True)
    ]
    # By instance and round: kind, target pages (0 where the page is already cached) and arrays.
    self._arriving: list[list[tuple[int, list[int], Any]]] = [[] for _ in self.pools]

  def hold(self, sequence: Holding, pages: list[int]) -> None:
    """Replaces a sequence's pages by `pages`."""
    sequence.hold(pages, self.table_width, self._page_size)

  def num_available(self, instance: int) -> int:
    """Returns the number of pages of every kind that can be taken."""
    pools = (self.pools[instance], *self.windows.pools[instance])
    return min(pool.num_available for pool in pools)

  def find(self, sequence: Holding, tokens: Sequence[int]) -> prefix_index.PrefixHit:
    """Returns the part of `tokens` that the sequence's instance has cached, if caching is on."""
    return self._find(sequence.instance, tokens, sequence.owner)

  def remember(
    self,
    sequence: Holding,
    tokens: Sequence[int],
    pages: Sequence[int] | None = None,
    windows: Sequence[np.ndarray] = (),
  ) -> None:
    """Registers `tokens`, the sequence's computed prefix, in the prefix cache of its instance.

    `pages` are the pages that hold `tokens`, and `windows` rows of the tables of further kinds;
    None means the sequence's own.
    """
    if self._reuse_prefixes:
      held = sequence.pages if pages is None else pages
      self.pools[sequence.instance].remember(tokens, held, sequence.owner)
      own = [window.row for window in sequence.windows] if pages is None else windows
      self.windows.remember(sequence, tokens, own)

  def release(self, sequence: Holding) -> None:
    """Frees a sequence's pages, wherever they are; they will have to be computed again."""
    self._release_pages(sequence)
    sequence.num_written = 0
    self.kv_pool.drop(sequence.name)

  def release_passed(self, sequence: Holding) -> None:
    """Releases a sequence's pages that no later row reads, because its layers have windows."""
    if sequence.pages:
      pool = self.pools[sequence.instance]
      self.counters.passed_pages += self.windows.release_passed(sequence, pool)

  def publish(
    self, params: Any, policy_version: int, adapters: Mapping[str, Any] | None = None
  ) -> None:
    """Sets the weights, on their mesh, that write keys and values from now on.

    `adapters` has the arrays of each adapter, by name.
    """

    base = functools.cache(lambda: values.weights_digest(params))

    of_adapter = functools.cache(lambda adapter: values.weights_digest((adapters or {})[adapter]))

    def identity(owner: Owner) -> values.Identity:
      weights = f"{base()}+{of_adapter(owner.adapter)}" if owner.adapter else base()
      space = values.name_digest(owner.namespace)
      return values.Identity(self._fingerprint, weights, policy_version, space)

    self.kv_pool.identify(identity)

  def forget_all(self) -> None:
    """Drops the KV pool and the prefix caches because the weights changed; held pages stay."""
    self.kv_pool.clear()
    for pool in self.pools:
      pool.forget_all()
    self.windows.forget_all()

  def give_back(self) -> None:
    """Frees the devices' page memory; no page may be held, and the contents are lost."""
    self.forget_all()
    for leaf in jax.tree.leaves(self.pages):
      leaf.delete()
    self.pages = None

  def take_again(self) -> None:
    """Allocates the devices' page memory again, if it was freed."""
    if self.pages is None:
      self.pages = self._make_pages()

  def start_over(self, sequences: Iterable[Holding]) -> None:
    """Frees every page after a step failed midway.

    Args:
      sequences: all live sequences; those that are off the devices stay there.
    """
    for pool in self.pools:
      pool.reset()
    self.windows.reset()
    self._arriving = [[] for _ in self.pools]
    for sequence in sequences:
      sequence.pages, sequence.windows = [], []
      if sequence.name not in self.kv_pool:
        sequence.num_written = 0
    self.pages = None  # The step has donated the pages, or left an error in them.
    self.pages = self._make_pages()

  def migrate(self, sequence: Holding, instance: int) -> bool:
    """Moves a sequence to another instance; returns False, with no change, if it has no room."""
    source, pool = sequence.instance, self.pools[instance]
    if source == instance or not sequence.pages:
      sequence.instance = instance
      return True
    shared = self._hold_start(pool, sequence)
    old = self.windows.written(sequence, 0)[len(shared) :]
    if len(old) > pool.num_available or not self.windows.has_room(sequence, instance):
      for page in shared:
        pool.release(page)
      return False
    first, fresh = self.windows.first(0, sequence.num_written), pool.take(len(old))
    windows = self.windows.take(sequence, instance)
    self._carry(0, source, old, instance, fresh)
    self.counters.migrated_pages += len(fresh)
    for kind, window in enumerate(windows, 1):
      self._carry(kind, source, self.windows.written(sequence, kind), instance, window.pages)
      self.counters.migrated_pages += len(window.pages)
    self._release_pages(sequence)
    sequence.instance, sequence.windows = instance, windows
    self.hold(sequence, [*[0] * first, *shared, *fresh])
    return True

  def _release_pages(self, sequence: Holding) -> None:
    for page in sequence.pages:
      self.pools[sequence.instance].release(page)
    self.windows.release(sequence)
    sequence.pages = []

  def pull_prefix(
    self, tokens: Sequence[int], source: int, target: int, owner: Owner = BASE
  ) -> int:
    """Copies whole pages of a prefix between instances; returns how many positions were copied.

    Pages of layers with windows are not copied: those of a prefix's end alone would serve no other
    prefix.
    """
    if self.windows.is_needed:
      return 0
    pool = self.pools[target]
    shared = self._hold_prefix(pool, tokens, owner)
    found = self._hold_prefix(self.pools[source], tokens, owner)
    wanted = found[len(shared) :]
    fresh = pool.take(min(len(wanted), pool.num_available))
    self._carry(0, source, wanted[: len(fresh)], target, fresh)
    self.counters.pulled_pages += len(fresh)
    held = [*shared, *fresh]
    pool.remember(tokens[: len(held) * self._page_size], held, owner)
    for page in held:
      pool.release(page)
    for page in found:
      self.pools[source].release(page)
    return len(fresh) * self._page_size

  def spill(self, sequences: Iterable[Holding]) -> list[Holding]:
    """Spills sequences in order, as long as the KV pool has room.

    Returns:
      The spilled sequences.
    """
    left: list[Holding] = []
    leaving: list[tuple[Holding, list[_Part], int]] = []
    for sequence in sequences:
      if not sequence.num_written:  # Paused before its first step: nothing to spill.
        self.release(sequence)
        left.append(sequence)
        continue
      parts = self._parts(sequence)
      count = self._num_host_pages(parts)
      if not self.kv_pool.make_room(count + sum(entry[2] for entry in leaving)):
        self._take_off(leaving)  # These may then be moved on to the store.
        leaving = []
        if not self.kv_pool.make_room(count):
          break
      leaving.append((sequence, parts, count))
      left.append(sequence)
    self._take_off(leaving)
    return left

  def _parts(self, sequence: Holding) -> list[_Part]:
    """Returns the pages of a sequence that move with it, kind by kind, in rounds."""
    return [
      _Part(kind, part)
      for kind in range(len(self.windows.kinds))
      for part in page_moves.rounds(self.windows.written(sequence, kind))
    ]

  def _num_host_pages(self, parts: list[_Part]) -> int:
    """Returns how many pages of all kinds together the padded rounds take."""
    count = sum(page_moves.bucket_for(len(pages)) * self._page_bytes[kind] for kind, pages in parts)
    return -(-count // sum(self._page_bytes))

  def _take_off(self, leaving: list[tuple[Holding, list[_Part], int]]) -> None:
    """Copies sequences to the pool, several instances in one program, and frees their pages."""
    rounds = self._copied([(sequence, parts) for sequence, parts, _ in leaving])
    for sequence, parts, count in leaving:
      self.counters.spilled_pages += sum(len(part.pages) for part in parts)
      self._release_pages(sequence)  # `num_written` stays: that many positions will be restored.
      written = sequence.tokens[: sequence.num_written]
      self.kv_pool.put(sequence.name, count, rounds[sequence], written, sequence.owner)

  def _copied(self, sequences: Sequence[tuple[Holding, list[_Part]]]) -> dict[Holding, list[Any]]:
    """Returns copies of sequences' pages off the devices, by round."""
    queues: list[list[tuple[Holding, _Part]]] = [[] for _ in self.pools]
    rounds: dict[Holding, list[Any]] = {}
    for sequence, parts in sequences:
      queues[sequence.instance] += [(sequence, part) for part in parts]
      rounds[sequence] = []
    while any(queues):
      turn = _equal_heads(
        queues, lambda entry: (entry[1].kind, page_moves.bucket_for(len(entry[1].pages)))
      )
      ids = self._page_ids({instance: part.pages for instance, (_, part) in turn.items()})
      kind = next(part.kind for _, part in turn.values())
      extracted = self._moves.extract(self._of_kind(kind), ids)
      for instance, (sequence, _) in turn.items():
        rounds[sequence].append(self._moves.take_off(extracted, instance))
    return rounds

  def export(self, sequence: Holding) -> KVManifest | None:
    """Stores a copy of a sequence's pages, which stay in place; None without room or a store."""
    if not sequence.num_written or self.kv_pool.last_tier is None:
      return None
    written = sequence.tokens[: sequence.num_written]
    rounds = None
    if sequence.pages:
      rounds = self._copied([(sequence, self._parts(sequence))])[sequence]
    found = self.kv_pool.export(sequence.name, written, rounds, sequence.owner)
    if found is None:
      return None
    identity = self.kv_pool.identity_of(sequence.owner)
    return KVManifest(
      key=found[0],
      policy_version=identity.policy_version,
      numerics_digest=identity.fingerprint,
      weights_digest=identity.weights,
      num_written=sequence.num_written,
      page_size=self._page_size,
      parts=found[1],
    )

  def begin_restore(self, sequence: Holding, num_pages: int, left: int = 0) -> bool:
    """Gives a spilled sequence `num_pages` pages and queues the restore of its keys and values.

    `restore` writes them. Returns False, with no change, if there is no room for `num_pages` and
    `left` more pages. If the store has lost the values, it also returns False, and the sequence is
    reset as if it had never run: its keys are computed again, to the same bits.
    """
    pool = self.pools[sequence.instance]
    shared = self._hold_start(pool, sequence)
    first = self.windows.first(0, sequence.num_written)
    needed = num_pages - first - len(shared)
    has_room = self.windows.has_room(sequence, sequence.instance)
    if needed + left > pool.num_available or not has_room:
      for page in shared:
        pool.release(page)
      return False
    self.hold(sequence, [*[0] * first, *shared, *pool.take(needed)])
    sequence.windows = self.windows.take(sequence, sequence.instance)
    rounds = self.kv_pool.take(sequence.name)
    if rounds is None:
      self.release(sequence)
      return False
    targets = self._parts(sequence)
    left_out = len(shared)
    for place, (kind, pages) in enumerate(targets):
      if not kind:  # Pages that are cached are not written.
        count = min(left_out, len(pages))
        targets[place] = _Part(kind, [0] * count + pages[count:])
        left_out -= count
    self._arriving[sequence.instance] += [
      (kind, pages, arrays) for (kind, pages), arrays in zip(targets, rounds, strict=True)
    ]
    return True

  def claim(self, sequence: Holding, manifest: KVManifest | None = None) -> None:
    """Marks a new sequence that continues a response as restorable, if the store has its pages.

    One process decides this alone, so on several processes the keys are computed again.

    Args:
      sequence: a sequence without pages.
      manifest: another engine's export of it; None looks up all tokens except the last.
    """
    written = sequence.tokens[:-1]
    if manifest is not None:
      if manifest.num_written > len(written):
        self.kv_pool.imports.stale += 1
        return
      written = written[: manifest.num_written]
    if jax.process_count() == 1 and self.kv_pool.claim(
      sequence.name, written, sequence.owner, manifest
    ):
      sequence.num_written = len(written)

  def restore(self) -> None:
    """Writes the queued restores before a step reads them, and counts the step."""
    self.kv_pool.advance()
    self.settle()

  def hold_found(self, sequence: Holding) -> list[int]:
    """Returns the cached whole pages of a sequence's tokens, with one more holder each."""
    pages = list(self.find(sequence, sequence.tokens).pages)
    for page in pages:
      self.pools[sequence.instance].hold(page)
    return pages

  def settle(self) -> None:
    """Writes the queued restores."""
    while any(self._arriving):
      turn = _equal_heads(self._arriving, lambda entry: (entry[0], entry[2][0][0].shape[2]))
      kind = next(kind for kind, _, _ in turn.values())
      own = self._of_kind(kind)
      arrived = self._moves.put_on(own, {i: arrays for i, (_, _, arrays) in turn.items()})
      ids = self._page_ids({instance: part for instance, (_, part, _) in turn.items()})
      self._set_kind(kind, self._moves.insert(own, ids, arrived))
      self.counters.restored_pages += int(np.count_nonzero(ids))

  def copy(self, copies: Sequence[Sequence[tuple[int, int]]], kind: int = 0) -> None:
    """Copies pages (from, to) of a kind within each instance, in order."""
    counts = np.asarray([len(own) for own in copies], np.int32)
    table = np.zeros((len(copies), counts.max(), 2), np.int32)
    for instance, own in enumerate(copies):
      table[instance, : len(own)] = np.asarray(own, np.int32).reshape(-1, 2)
    for part in page_moves.copy_rounds(table, counts):
      self._set_kind(kind, self._moves.copy(self._of_kind(kind), part))

  def _of_kind(self, kind: int) -> Any:
    """Returns the pages of one kind."""
    kinds = self.windows.kinds
    return self.pages if len(kinds) == 1 else tuple(self.pages[i] for i in kinds[kind].entries)

  def _set_kind(self, kind: int, pages: Any) -> None:
    """Replaces the pages of one kind."""
    kinds = self.windows.kinds
    if len(kinds) == 1:
      self.pages = pages
      return
    new = dict(zip(kinds[kind].entries, pages, strict=True))
    self.pages = tuple(new.get(index, own) for index, own in enumerate(self.pages))

  def _find(self, instance: int, tokens: Sequence[int], owner: Owner) -> prefix_index.PrefixHit:
    """Returns the part of `tokens` that an instance has cached, if caching is on."""
    if not self._reuse_prefixes:
      return prefix_index.NO_HIT
    if self.windows.is_needed:
      return self.windows.find(self.pools[instance], instance, tokens, owner)
    return self.pools[instance].find(tokens, owner)

  def _hold_start(self, pool: pages_lib.PagePool, sequence: Holding) -> list[int]:
    """Holds and returns the whole pages of a sequence's written tokens that a pool has cached.

    None if the sequence has given pages back.
    """
    if self.windows.first(0, sequence.num_written):
      return []
    written = sequence.tokens[: sequence.num_written]
    return self._hold_prefix(pool, written, sequence.owner)

  def _hold_prefix(
    self, pool: pages_lib.PagePool, tokens: Sequence[int], owner: Owner
  ) -> list[int]:
    """Holds and returns the whole pages of a prefix that a pool has cached."""
    pages = list(pool.find(tokens, owner).pages) if self._reuse_prefixes else []
    for page in pages:
      pool.hold(page)
    return pages

  def _carry(self, kind: int, source: int, old: list[int], target: int, new: list[int]) -> None:
    """Copies pages of a kind from instance to instance."""
    for olds, news in zip(page_moves.rounds(old), page_moves.rounds(new), strict=True):
      moves = np.zeros((4, page_moves.bucket_for(len(olds))), np.int32)
      moves[0], moves[2] = source, target
      moves[1, : len(olds)], moves[3, : len(news)] = olds, news
      self._set_kind(kind, self._moves.move(self._of_kind(kind), moves))
    self.counters.peer_bytes += len(new) * self._page_bytes[kind]

  def _page_ids(self, by_instance: dict[int, list[int]]) -> np.ndarray:
    """Returns page ids i32[i, n], padded with page 0."""
    bucket = page_moves.bucket_for(max(len(part) for part in by_instance.values()))
    ids = np.zeros((len(self.pools), bucket), np.int32)
    for instance, part in by_instance.items():
      ids[instance, : len(part)] = part
    return ids


def _equal_heads(queues: list[list[Any]], size: Callable[[Any], Any]) -> dict[int, Any]:
  """Pops the heads of the queues that have the first head's kind and size, by index."""
  wanted = next(size(queue[0]) for queue in queues if queue)
  return {i: queue.pop(0) for i, queue in enumerate(queues) if queue and size(queue[0]) == wanted}
