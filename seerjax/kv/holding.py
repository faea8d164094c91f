"""A token sequence and the pages that hold its keys and values."""

from __future__ import annotations

import dataclasses

import numpy as np

from seerjax.kv.owner import Owner


@dataclasses.dataclass(eq=False)
class WindowPages:
  """Pages of a sequence in layers with a window; those that no later row reads are given back.

  Attributes:
    first: number of leading pages that were given back, or never held.
    pages: the other pages, in order of position.
    row: i32[p], all of them as a row of the page table, 0 for those that were given back.
    page_size: positions of a page.
  """

  first: int
  pages: list[int]
  row: np.ndarray
  page_size: int

  @property
  def reach(self) -> int:
    """Maximum tokens that fit into the pages; the last one needs no position."""
    return (self.first + len(self.pages)) * self.page_size + 1

  def add(self, pages: list[int]) -> None:
    """Adds pages at the end."""
    end = self.first + len(self.pages)
    self.row[end : end + len(pages)] = pages
    self.pages += pages

  def drop(self, count: int) -> list[int]:
    """Removes and returns the first pages."""
    dropped, self.pages = self.pages[:count], self.pages[count:]
    self.row[self.first : self.first + count] = 0
    self.first += count
    return dropped


@dataclasses.dataclass(eq=False, kw_only=True)
class Holding:
  """A token sequence and the pages that it holds: of a request, or of a pin.

  Attributes:
    name: its name in the KV pool, unique among the holdings of an engine.
    owner: owner of its keys and values.
    tokens: the tokens; the keys of the first `num_written` are in pages.
    instance: instance that holds its pages, or will.
    pages: in order of position; empty while it waits for memory. 0 for a page that was given back,
      if all layers have windows.
    reach: maximum tokens that fit into `pages`.
    page_row: i32[p], `pages` as a row of the page table.
    num_written: positions with written keys.
    windows: its pages of the further kinds (`windows.Windows`), if it holds any.
  """

  name: str
  owner: Owner
  tokens: list[int]
  instance: int
  pages: list[int] = dataclasses.field(default_factory=list)
  page_row: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
  reach: int = 0
  num_written: int = 0
  windows: list[WindowPages] = dataclasses.field(default_factory=list)

  @property
  def num_in_windows(self) -> int:
    """Positions for which it has pages of every further kind, up to `reach` if there is none."""
    return min((window.reach for window in self.windows), default=self.reach) - 1

  def hold(self, pages: list[int], table_width: int, page_size: int) -> None:
    """Sets its memory to `pages` (all of them, in order)."""
    self.pages = pages
    # The last token is never read back, so it needs no position.
    self.reach = len(pages) * page_size + 1
    self.page_row = np.zeros(table_width, np.int32)
    self.page_row[: len(pages)] = pages
