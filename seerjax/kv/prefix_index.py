"""Prefix cache index: finds the pages that hold the start of a token sequence.

A page's keys and values are a pure function of the tokens up to its end (and of the weights), so a
page with known tokens can serve every sequence with the same prefix:

    full page      shared, by the digest of all tokens up to its end
    partial page   copied before it is written; only the longest common prefix of its tokens is used

Owners are isolated: a page that was written for one owner is never found for another.

The index maps tokens to page numbers only; `PagePool` counts the holders.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
import hashlib
from typing import NamedTuple

import numpy as np

from seerjax.kv.owner import BASE, Owner

# Candidates compared for the partial page; more would take time to save one page of prefill.
MAX_PARTIAL_CANDIDATES = 8


class PrefixHit(NamedTuple):
  """The cached part of a prompt.

  Attributes:
    pages: full pages to share, in order.
    copy_from: page with further tokens to copy, None if there is none.
    num_tokens: positions covered by `pages` and the copy.
  """

  pages: tuple[int, ...]
  copy_from: int | None
  num_tokens: int


NO_HIT = PrefixHit((), None, 0)


def _digest(previous: bytes, tokens: Sequence[int]) -> bytes:
  return hashlib.blake2b(previous + np.asarray(tokens, np.int32).tobytes(), digest_size=16).digest()


class PrefixIndex:
  """Index of the cached tokens of one instance's pages."""

  def __init__(self, page_size: int):
    self._page_size = page_size
    self.clear()

  def clear(self) -> None:
    """Forgets the tokens of every page."""
    self._page_of: dict[bytes, int] = {}
    self._names: dict[int, list[tuple[bytes, bytes]]] = {}
    # By the digest of everything before a page: the known tokens of each candidate page.
    self._followers: dict[bytes, dict[int, tuple[int, ...]]] = collections.defaultdict(dict)

  def knows(self, page: int) -> bool:
    """Returns whether a page is in the index."""
    return page in self._names

  def find(self, tokens: Sequence[int], owner: Owner = BASE) -> PrefixHit:
    """Returns the longest prefix of `tokens` that is cached for `owner`."""
    size, pages, previous = self._page_size, [], owner.start
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

  def whole_pages(self, tokens: Sequence[int], owner: Owner = BASE) -> list[int]:
    """Returns the cached page of each whole page of `tokens`, 0 for those that are not cached."""
    size, pages, previous = self._page_size, [], owner.start
    for index in range(len(tokens) // size):
      previous = _digest(previous, tokens[index * size : (index + 1) * size])
      pages.append(self._page_of.get(previous, 0))
    return pages

  def remember(self, tokens: Sequence[int], pages: Sequence[int], owner: Owner = BASE) -> None:
    """Registers a sequence's computed prefix.

    Args:
      tokens: all tokens from position 0 with written keys and values.
      pages: the sequence's pages, 0 for those that were given back.
      owner: the only owner for which the prefix is found.
    """
    size, previous = self._page_size, owner.start
    for index in range(-(-len(tokens) // size)):
      part = tuple(tokens[index * size : (index + 1) * size])
      page = pages[index]
      if not page:
        previous = _digest(previous, part)
        continue
      known = self._followers[previous].get(page, ())
      if len(part) > len(known):
        self._followers[previous][page] = part
        if not known:
          self._names.setdefault(page, []).append((previous, b""))
      digest = _digest(previous, part)
      if len(part) == size and digest not in self._page_of:
        self._page_of[digest] = page
        self._names.setdefault(page, []).append((previous, digest))
      previous = digest

  def forget(self, page: int) -> None:
    """Removes one page from the index; an unknown page is no error."""
    for previous, digest in self._names.pop(page, []):
      self._followers[previous].pop(page, None)
      if not self._followers[previous]:
        del self._followers[previous]
      if digest:
        self._page_of.pop(digest, None)
