"""A token sequence and the pages that hold its keys and values."""

from __future__ import annotations

import dataclasses

import numpy as np

from seerjax.kv.owner import Owner


@dataclasses.dataclass(eq=False, kw_only=True)
class Holding:
  """A token sequence and the pages that it holds: of a request, or of a pin.

  Attributes:
    name: its name in the KV pool, unique among the holdings of an engine.
    owner: owner of its keys and values.
    tokens: the tokens; the keys of the first `num_written` are in pages.
    instance: instance that holds its pages, or will.
    pages: in order of position; empty while it waits for memory.
    reach: maximum tokens that fit into `pages`.
    page_row: i32[p], `pages` as a row of the page table.
    num_written: positions with written keys.
  """

  name: str
  owner: Owner
  tokens: list[int]
  instance: int
  pages: list[int] = dataclasses.field(default_factory=list)
  page_row: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
  reach: int = 0
  num_written: int = 0

  def hold(self, pages: list[int], table_width: int, page_size: int) -> None:
    """Sets its memory to `pages` (all of them, in order)."""
    self.pages = pages
    # The last token is never read back, so it needs no position.
    self.reach = len(pages) * page_size + 1
    self.page_row = np.zeros(table_width, np.int32)
    self.page_row[: len(pages)] = pages
