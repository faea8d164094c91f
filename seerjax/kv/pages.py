"""Allocator of the KV pages of one instance: holder counts, free pages and eviction.

A page holds `page_size` consecutive positions of one token sequence, for every head and for every
layer of one kind (`windows`). Pages without a holder stay in the prefix cache (`PrefixIndex`) until
their space is needed; the least recently used one is evicted first.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from seerjax.kv.owner import BASE, Owner
from seerjax.kv.prefix_index import PrefixHit, PrefixIndex


class PagePool:
  """Pages 1 to num_pages - 1 of one instance.

  Page 0 is the target of padded writes, and stands for a page that was given back; it has no
  holder.
  """

  def __init__(self, num_pages: int, page_size: int):
    if num_pages < 2:
      raise ValueError(
        f"PagePool.num_pages: got {num_pages}, expected at least 2 (page 0 is reserved); raise"
        " EngineConfig.num_pages."
      )
    self.num_pages = num_pages
    self.page_size = page_size
    self._index = PrefixIndex(page_size)
    self.reset()

  def reset(self) -> None:
    """Frees all pages, also those that have holders, and clears the prefix cache."""
    self._free = collections.deque(range(1, self.num_pages))
    self._holders = np.zeros(self.num_pages, np.int64)
    # Pages without a holder that are still in the prefix cache, least recently used first.
    self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()
    self._index.clear()

  @property
  def num_available(self) -> int:
    """Number of pages that `take` can return: free ones and cached ones without a holder."""
    return len(self._free) + len(self._idle)

  def find(self, tokens: Sequence[int], owner: Owner = BASE) -> PrefixHit:
    """Returns the longest prefix of `tokens` that is cached for `owner`.

    No page gets a holder from this call.
    """
    return self._index.find(tokens, owner)

  def whole_pages(self, tokens: Sequence[int], owner: Owner = BASE) -> list[int]:
    """Returns the cached page of each whole page of `tokens`, 0 for those that are not cached."""
    return self._index.whole_pages(tokens, owner)

  def num_holders(self, page: int) -> int:
    """Returns the number of holders of a page."""
    return int(self._holders[page])

  def hold(self, page: int) -> None:
    """Adds a holder to a page that `find` returned."""
    if not page:
      return
    self._holders[page] += 1
    self._idle.pop(page, None)

  def take(self, count: int) -> list[int]:
    """Returns `count` pages with one holder each, evicting cached pages as needed.

    Raises:
      ValueError: if fewer than `count` pages are available; check `num_available` first.
    """
    if count > self.num_available:
      raise ValueError(
        f"PagePool.take: got a request for {count} pages, expected at most {self.num_available};"
        " wait until requests finish."
      )
    pages = []
    for _ in range(count):
      if self._free:
        page = self._free.popleft()
      else:
        page, _ = self._idle.popitem(last=False)
        self._index.forget(page)
      self._holders[page] = 1
      pages.append(page)
    return pages

  def release(self, page: int) -> None:
    """Removes a holder; a page without holders stays cached if its tokens are known."""
    if not page:
      return
    assert self._holders[page] > 0, f"page {page} has no holder"
    self._holders[page] -= 1
    if self._holders[page] == 0:
      if self._index.knows(page):
        self._idle[page] = None
      else:
        self._free.append(page)

  def remember(self, tokens: Sequence[int], pages: Sequence[int], owner: Owner = BASE) -> None:
    """Registers a sequence's computed prefix in the prefix cache.

    Args:
      tokens: all tokens from position 0 with written keys and values.
      pages: the sequence's pages.
      owner: the only owner for which the prefix is found.
    """
    self._index.remember(tokens, pages, owner)

  def forget_all(self) -> None:
    """Clears the prefix cache because the weights changed. Holders keep their pages."""
    self._free.extend(self._idle)
    self._idle.clear()
    self._index.clear()
