"""Pages of key/value memory on one instance: who holds them, and what may be used again.

A page holds `page_size` consecutive positions of one token sequence, for every layer and head. Its
keys and values are a pure function of the tokens up to its end (and of the weights), so a page
whose tokens are known can serve every sequence that starts the same way:

    full page      shared, by the digest of all tokens up to its end
    partial page   copied before it is written: the longest common start of its tokens is kept

Pages nobody holds stay findable until somebody needs the space; the one unused longest goes first.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
import hashlib
from typing import NamedTuple

import numpy as np

# Candidates looked at for the partial page; more would cost time for a page's worth of prefill.
MAX_PARTIAL_CANDIDATES = 8


class PrefixHit(NamedTuple):
  """What of a prompt is in memory already.

  Attributes:
    pages: full pages to share, in order.
    copy_from: page whose start is to be copied, None if there is none.
    num_tokens: positions covered by `pages` and the copy.
  """

  pages: tuple[int, ...]
  copy_from: int | None
  num_tokens: int


def _digest(previous: bytes, tokens: Sequence[int]) -> bytes:
  return hashlib.blake2b(previous + np.asarray(tokens, np.int32).tobytes(), digest_size=16).digest()


class PagePool:
  """Pages 1 to num_pages - 1 of one instance; page 0 takes what padding writes."""

  def __init__(self, num_pages: int, page_size: int):
    if num_pages < 2:
      raise ValueError(
        f"PagePool.num_pages: got {num_pages}, expected at least 2 (page 0 is reserved); raise"
        " EngineConfig.num_pages."
      )
    self.num_pages = num_pages
    self.page_size = page_size
    self.reset()

  def reset(self) -> None:
    """Makes all pages free and forgets what they held, whoever holds them."""
    self._free = collections.deque(range(1, self.num_pages))
    self._holders = np.zeros(self.num_pages, np.int64)
    # Unheld pages that can still be found, oldest use first.
    self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()
    self._page_of: dict[bytes, int] = {}
    self._names: dict[int, list[tuple[bytes, bytes]]] = collections.defaultdict(list)
    # By the digest of everything before a page: the tokens known in pages that follow it.
    self._followers: dict[bytes, dict[int, tuple[int, ...]]] = collections.defaultdict(dict)

  @property
  def num_available(self) -> int:
    """Pages that can be taken now."""
    return len(self._free) + len(self._idle)

  def find(self, tokens: Sequence[int]) -> PrefixHit:
    """Returns the longest start of `tokens` whose keys and values are in memory. Holds nothing."""
    size, pages, previous = self.page_size, [], b""
    while (len(pages) + 1) * size <= len(tokens):
      digest = _digest(previous, tokens[len(pages) * size : (len(pages) + 1) * size])
      if digest not in self._page_of:
        break
      pages.append(self._page_of[digest])
      previous = digest
    rest = tuple(tokens[len(pages) * size : (len(pages) + 1) * size])
    best, best_length = None, 0
    candidates = list(self._followers.get(previous, {}).items())[-MAX_PARTIAL_CANDIDATES:]
    for page, known in candidates:
      length = 0
      while length < min(len(known), len(rest)) and known[length] == rest[length]:
        length += 1
      if length > best_length:
        best, best_length = page, length
    return PrefixHit(tuple(pages), best, len(pages) * size + best_length)

  def hold(self, page: int) -> None:
    """Adds a holder to a page that was found."""
    self._holders[page] += 1
    self._idle.pop(page, None)

  def take(self, count: int) -> list[int]:
    """Returns `count` pages with one holder each, forgetting idle ones as needed.

    Raises:
      ValueError: if there are fewer; ask `num_available` first.
    """
    if count > self.num_available:
      raise ValueError(
        f"PagePool.take: got {count} pages asked for, expected at most {self.num_available};"
        " wait until requests finish."
      )
    pages = []
    for _ in range(count):
      if self._free:
        page = self._free.popleft()
      else:
        page, _ = self._idle.popitem(last=False)
        self._forget(page)
      self._holders[page] = 1
      pages.append(page)
    return pages

  def release(self, page: int) -> None:
    """Removes a holder; a page without any stays findable if its tokens are known."""
    assert self._holders[page] > 0, f"page {page} has no holder"
    self._holders[page] -= 1
    if self._holders[page] == 0:
      if self._names[page]:
        self._idle[page] = None
      else:
        self._free.append(page)

  def remember(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
    """Makes a sequence's written positions findable.

    Args:
      tokens: all tokens from position 0 whose keys and values are written.
      pages: the sequence's pages.
    """
    size, previous = self.page_size, b""
    for index in range(-(-len(tokens) // size)):
      part = tuple(tokens[index * size : (index + 1) * size])
      page = pages[index]
      known = self._followers[previous].get(page, ())
      if len(part) > len(known):
        self._followers[previous][page] = part
        if not known:
          self._names[page].append((previous, b""))
      digest = _digest(previous, part)
      if len(part) == size and digest not in self._page_of:
        self._page_of[digest] = page
        self._names[page].append((previous, digest))
      previous = digest

  def forget_all(self) -> None:
    """Drops what is known of every page: the weights changed. Holders keep their pages."""
    for page in list(self._idle):
      self._forget(page)
      self._free.append(page)
    self._idle.clear()
    self._page_of.clear()
    self._names.clear()
    self._followers.clear()

  def _forget(self, page: int) -> None:
    for previous, digest in self._names.pop(page, []):
      self._followers[previous].pop(page, None)
      if not self._followers[previous]:
        del self._followers[previous]
      if digest:
        self._page_of.pop(digest, None)
