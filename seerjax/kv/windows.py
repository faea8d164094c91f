"""Pages of layers with a sliding window, which are given back when every later row is past them.

Layers with equal windows are one kind of pages. Each kind has its own arrays, page table, and
`PagePool` on each instance; a page of any kind holds `page_size` positions.

    kind 0     layers without a window, or else those of the largest one: `Holding.pages`, for which
               admission, growth and preemption account as for a model with one kind
    further    one for each smaller window w: `Holding.windows`, allocated for the rows of a step

A sequence with n written positions has no later row that reads a position before n - w + 1, and
attention reads whole splits of s positions, so a kind keeps the pages from index `first` on:

    positions   0       s       2 s      3 s      n
    w           .       .        .   |---- w ----|         first = (n - w + 1) // s * s // page_size
    pages       given back      | held ----------|

So n - first * page_size < w + s. Drafts are not written positions until they are accepted. A cached
prefix can be used up to a page before which every kind has the pages of its window. Requests move
with the pages from `first` on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from seerjax.kv.holding import Holding, WindowPages
from seerjax.kv.owner import Owner
from seerjax.kv.pages import PagePool
from seerjax.kv.prefix_index import PrefixHit


class PageKind(NamedTuple):
  """A kind of pages.

  Attributes:
    window: positions that a row of its layers sees, its own included; None for all before it.
    num_pages: number of pages of one instance, the reserved page included.
    entries: indices of its layers' arrays in the pages of all kinds.
  """

  window: int | None
  num_pages: int
  entries: tuple[int, ...] = (0,)


class Windows:
  """The pages of an engine's layers with windows, of all instances.

  Attributes:
    kinds: all kinds of pages.
    pools: allocators by instance and further kind.
  """

  def __init__(
    self,
    kinds: Sequence[PageKind],
    *,
    page_size: int,
    split: int,
    table_width: int,
    num_instances: int,
  ):
    self.kinds = kinds
    self._page_size, self._split, self._table_width = page_size, split, table_width
    self.pools = [
      [PagePool(kind.num_pages, page_size) for kind in kinds[1:]] for _ in range(num_instances)
    ]

  @property
  def is_needed(self) -> bool:
    """Whether any layer has a window."""
    return any(kind.window is not None for kind in self.kinds)

  def first(self, kind: int, num_written: int) -> int:
    """Returns the index of the first page of a kind that is read after `num_written` positions."""
    window = self.kinds[kind].window
    if window is None:
      return 0
    first_split = max(0, num_written - window + 1) // self._split
    return first_split * self._split // self._page_size

  def find(self, pool: PagePool, instance: int, tokens: Sequence[int], owner: Owner) -> PrefixHit:
    """Returns the longest prefix, in whole pages, for which all kinds have cached what rows read.

    Args:
      pool: allocator of kind 0 on the instance; no page gets a holder.
      instance: the instance.
      tokens: tokens from position 0.
      owner: owner of the pages.
    """
    size, has_all = self._page_size, self.kinds[0].window is None
    own = list(pool.find(tokens, owner).pages) if has_all else pool.whole_pages(tokens, owner)
    whole = tokens[: len(own) * size]
    cached = [own, *(other.whole_pages(whole, owner) for other in self.pools[instance])]
    runs = [_runs(pages) for pages in cached]
    for count in range(len(own), 0, -1):
      firsts = [self.first(kind, count * size) for kind in range(len(cached))]
      if all(run[count - 1] >= count - at for run, at in zip(runs, firsts, strict=True)):
        at = firsts[0]
        return PrefixHit((*[0] * at, *own[at:count]), None, count * size)
    return PrefixHit((), None, 0)

  def hold_cached(self, sequence: Holding) -> None:
    """Replaces a sequence's pages of further kinds by the cached ones of its written positions.

    They are whole pages that `find` has found.
    """
    written = sequence.tokens[: sequence.num_written]
    found = []
    for kind, pool in enumerate(self.pools[sequence.instance], 1):
      first = self.first(kind, sequence.num_written)
      pages = pool.whole_pages(written, sequence.owner)[first:]
      for page in pages:
        pool.hold(page)
      found.append(self._holding(first, pages))
    self.release(sequence)
    sequence.windows = found

  def has_room(self, sequence: Holding, instance: int) -> bool:
    """Returns whether `take` has enough pages on an instance."""
    return all(
      self.num_written_pages(sequence, kind) <= pool.num_available
      for kind, pool in enumerate(self.pools[instance], 1)
    )

  def take(self, sequence: Holding, instance: int) -> list[WindowPages]:
    """Returns new pages of further kinds for a sequence's written positions."""
    return [
      self._holding(
        self.first(kind, sequence.num_written), pool.take(self.num_written_pages(sequence, kind))
      )
      for kind, pool in enumerate(self.pools[instance], 1)
    ]

  def written(self, sequence: Holding, kind: int) -> list[int]:
    """Returns a sequence's pages of a kind with written positions that later rows read."""
    first, end = self.first(kind, sequence.num_written), self._num_pages(sequence.num_written)
    if not kind:
      return sequence.pages[first:end]
    if not sequence.windows:
      return []
    window = sequence.windows[kind - 1]
    return window.pages[first - window.first : end - window.first]

  def num_written_pages(self, sequence: Holding, kind: int) -> int:
    """Returns the length of `written`."""
    return self._num_pages(sequence.num_written) - self.first(kind, sequence.num_written)

  def fill(self, sequence: Holding, least: int, most: int) -> bool:
    """Takes pages of further kinds for the positions before `most`, as many as are available.

    Returns False, and takes none, if they are too few for the positions before `least`.
    """
    pools = self.pools[sequence.instance]
    if not sequence.windows:
      count = sequence.num_written
      sequence.windows = [
        self._holding(self.first(k, count), []) for k in range(1, len(self.kinds))
      ]
    ends = [window.first + len(window.pages) for window in sequence.windows]
    missing = [
      (self._num_pages(least) - end, self._num_pages(most) - end, pool)
      for end, pool in zip(ends, pools, strict=True)
    ]
    if any(needed > pool.num_available for needed, _, pool in missing):
      return False
    for window, (_, wanted, pool) in zip(sequence.windows, missing, strict=True):
      window.add(pool.take(min(max(wanted, 0), pool.num_available)))
    return True

  def release_passed(self, sequence: Holding, pool: PagePool) -> int:
    """Releases the pages of all kinds that no later row reads; returns their number.

    `pool` is the allocator of kind 0 on the sequence's instance.
    """
    count = 0
    index = self.first(0, sequence.num_written) - 1
    while index >= 0 and sequence.pages[index]:
      pool.release(sequence.pages[index])
      sequence.pages[index] = sequence.page_row[index] = 0
      index, count = index - 1, count + 1
    for kind, window in enumerate(sequence.windows, 1):
      past = self.first(kind, sequence.num_written) - window.first
      if past > 0:
        for page in window.drop(past):
          self.pools[sequence.instance][kind - 1].release(page)
        count += past
    return count

  def release(self, sequence: Holding) -> None:
    """Releases a sequence's pages of further kinds."""
    for pool, window in zip(self.pools[sequence.instance], sequence.windows, strict=False):
      for page in window.pages:
        pool.release(page)
    sequence.windows = []

  def remember(self, sequence: Holding, tokens: Sequence[int], rows: Sequence[np.ndarray]) -> None:
    """Registers the pages of further kinds that hold `tokens`, rows of tables, as cached."""
    for pool, row in zip(self.pools[sequence.instance], rows, strict=False):
      pool.remember(tokens, row[: self._num_pages(len(tokens))].tolist(), sequence.owner)

  def replace(self, sequence: Holding, first: int, pages: Sequence[Sequence[int]]) -> None:
    """Replaces a sequence's pages from index `first` on by the given ones of each further kind."""
    for pool, window, new in zip(
      self.pools[sequence.instance], sequence.windows, pages, strict=True
    ):
      at = slice(first - window.first, first - window.first + len(new))
      for page in window.pages[at]:
        pool.release(page)
      window.pages[at] = new
      window.row[first : first + len(new)] = new

  def release_pages(self, instance: int, pages: Sequence[Sequence[int]]) -> None:
    """Releases pages of each further kind."""
    for pool, own in zip(self.pools[instance], pages, strict=False):
      for page in own:
        pool.release(page)

  def forget_all(self) -> None:
    """Clears the prefix caches; holders keep their pages."""
    for pools in self.pools:
      for pool in pools:
        pool.forget_all()

  def reset(self) -> None:
    """Frees all pages, also those that have holders."""
    for pools in self.pools:
      for pool in pools:
        pool.reset()

  def _holding(self, first: int, pages: list[int]) -> WindowPages:
    window = WindowPages(first, [], np.zeros(self._table_width, np.int32), self._page_size)
    window.add(pages)
    return window

  def _num_pages(self, positions: int) -> int:
    return -(-positions // self._page_size)


def _runs(pages: Sequence[int]) -> list[int]:
  """Returns for each page the number of consecutive cached pages that end with it."""
  found, run = [], 0
  for page in pages:
    run = run + 1 if page else 0
    found.append(run)
  return found
