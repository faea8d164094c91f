"""Fits drafts into the rows, pages and key copies that a step has left.

A draft tree becomes paths from the root to its leaves. The first path is written to the sequence's
own pages; each further one gets scratch pages from the sequence's last page on, and copies of the
keys before its own first node. Leaves for which there is no room are cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import dataclasses
import itertools

import numpy as np

from seerjax.engine import drafting, sizes, token_tree
from seerjax.engine.allocation import Allocation
from seerjax.engine.counters import Counters
from seerjax.engine.drafting import DraftQuery
from seerjax.engine.requests import Requests
from seerjax.engine.sequence import DraftPath, ScheduledRows, SequenceState
from seerjax.engine.sizes import EngineConfig
from seerjax.kv.memory import Memory

Place = tuple[int, int]  # (instance, index among the instance's scheduled rows).


@dataclasses.dataclass(frozen=True, eq=False)
class DraftRows:
  """The rows of drafts in the steps of one engine."""

  requests: Requests
  memory: Memory
  counters: Counters
  allocation: Allocation
  config: EngineConfig

  def queries(self, scheduled: list[list[ScheduledRows]]) -> tuple[list[DraftQuery], list[Place]]:
    """Returns a query for each sampled sequence that may have draft rows, and its place."""
    queries, places = [], []
    for instance, spare in enumerate(self._spare_rows(scheduled)):
      for index, piece in enumerate(scheduled[instance]):
        sequence = piece.sequence
        # The token sampled after the last draft is part of the response too.
        most = min(sequence.end - len(sequence.tokens) - 1, spare)
        is_answered = sequence.mask is None and sequence.reading is None
        if piece.is_sampled and most > 0 and is_answered:
          request = sequence.request
          queries.append(
            DraftQuery(
              request.request_id,
              drafting.group_name(request),
              sequence.tokens,
              sequence.num_prompt,
              most,
              request.seed,
              request.sampling,
            )
          )
          places.append((instance, index))
    return queries, places

  def added(
    self,
    scheduled: list[list[ScheduledRows]],
    drafts: dict[Place, list[tuple[int, ...]]],
  ) -> list[list[ScheduledRows]]:
    """Returns the rows with drafts appended to sampled sequences, as far as rows are left."""
    drafted = []
    for instance, rows_left in enumerate(self._spare_rows(scheduled)):
      row, planned = 0, []
      copies_left = sizes.KEY_COPIES_PER_ROW * self.config.batch_size_buckets[-1]
      for index, piece in enumerate(scheduled[instance]):
        paths = self._paths(piece, drafts.get((instance, index), ()), rows_left, copies_left)
        piece = piece._replace(first_row=row, paths=paths)
        row += piece.num_rows
        rows_left -= piece.num_drafted
        copies_left -= piece.num_copies
        planned.append(piece)
      drafted.append(planned)
    return drafted

  def _spare_rows(self, scheduled: list[list[ScheduledRows]]) -> list[int]:
    is_front = not self.requests.num_background or any(
      not piece.sequence.is_background for piece in itertools.chain(*scheduled)
    )
    most = self.config.batch_size_buckets[-1] if is_front else self.config.background_rows
    return [most - sum(piece.count for piece in pieces) for pieces in scheduled]

  def _paths(
    self,
    piece: ScheduledRows,
    drafts: Iterable[tuple[int, ...]],
    rows_left: int,
    copies_left: int,
  ) -> tuple[DraftPath, ...]:
    """Returns the draft tree as paths, without the leaves that there is no room for."""
    sequence, pool = piece.sequence, self.memory.pools[piece.sequence.instance]
    size, end = self.config.page_size, len(sequence.tokens)
    nodes = token_tree.merge(drafts, sequence.end - end - 1)
    if not nodes:
      return ()
    nodes = nodes[: self._num_fitting(piece, nodes, rows_left, copies_left)]
    first = (end - 1) // size
    settled = range(1 - self._num_settled(piece), 1)
    paths: list[DraftPath] = []
    for branch in token_tree.branches(nodes):
      path = DraftPath(branch.tokens, sequence.page_row, branch.rows)
      if paths:
        last = (end - 1 + len(branch.tokens)) // size
        scratch = pool.take(last - first + 1)
        page_row = sequence.page_row.copy()
        page_row[first : last + 1] = scratch
        copies = self.allocation.copies[sequence.instance]
        if first * size < sequence.num_written:
          copies.append((sequence.pages[first], scratch[0]))
        window_rows, window_scratch = self._window_scratch(sequence, first, last)
        path = path._replace(
          page_row=page_row,
          num_shared=branch.num_shared,
          copied=(*settled, *branch.rows[: branch.num_shared]),
          scratch=tuple(scratch),
          window_rows=window_rows,
          window_scratch=window_scratch,
        )
      paths.append(path)
    return tuple(paths)

  def _window_scratch(
    self, sequence: SequenceState, first: int, last: int
  ) -> tuple[tuple[np.ndarray, ...], tuple[tuple[int, ...], ...]]:
    """Takes a path's pages of further kinds; returns rows of page tables, and the pages."""
    rows, taken = [], []
    pools = self.memory.windows.pools[sequence.instance]
    for kind, (window, pool) in enumerate(zip(sequence.windows, pools, strict=True)):
      scratch, row = pool.take(last - first + 1), window.row.copy()
      if first * self.config.page_size < sequence.num_written:
        copy = int(row[first]), scratch[0]
        self.allocation.window_copies[kind][sequence.instance].append(copy)
      row[first : last + 1] = scratch
      rows.append(row)
      taken.append(tuple(scratch))
    return tuple(rows), tuple(taken)

  def _num_settled(self, piece: ScheduledRows) -> int:
    """Returns how many non-draft rows are in the last page; further paths have to copy them."""
    end = len(piece.sequence.tokens)
    page_begin = (end - 1) // self.config.page_size * self.config.page_size
    return end - max(page_begin, end - piece.count)

  def _num_fitting(
    self,
    piece: ScheduledRows,
    nodes: Sequence[token_tree.Node],
    rows_left: int,
    copies_left: int,
  ) -> int:
    """Returns how many leading nodes of a tree fit into the rows, pages and copy table.

    A node of the first path takes a row. A further path also takes pages from the sequence's last
    page on, and a copy of every key in them before its own first node.
    """
    size, root = self.config.page_size, len(piece.sequence.tokens) - 1
    instance = piece.sequence.instance
    num_pages = 0
    num_settled = self._num_settled(piece)
    for index, node in enumerate(nodes):
      pages = copies = 0
      if not node.is_first:
        pages = (root + node.depth) // size - root // size + 1
        copies = num_settled + node.depth - 1
      elif node.branch:
        pages = int((root + node.depth) % size == 0)
      rows_left, num_pages, copies_left = rows_left - 1, num_pages + pages, copies_left - copies
      available = self.memory.num_available(instance)
      while pages and num_pages > available and not piece.sequence.is_background:
        if not self.allocation.make_way(instance):
          break
        available = self.memory.num_available(instance)
      pages_left = available - num_pages
      if min(rows_left, pages_left, copies_left) < 0:
        self.counters.cut_for_rows += rows_left < 0
        self.counters.cut_for_pages += pages_left < 0
        self.counters.cut_for_copies += copies_left < 0
        return index
    return len(nodes)

  def adopt(self, piece: ScheduledRows, chosen: DraftPath) -> None:
    """Makes the chosen path's scratch pages the sequence's own, and frees those of other paths."""
    sequence = piece.sequence
    pool, pages = self.memory.pools[sequence.instance], sequence.pages
    if chosen.scratch:
      first = (len(sequence.tokens) - 1) // self.config.page_size
      replaced = pages[first : first + len(chosen.scratch)]
      pages = [*pages[:first], *chosen.scratch, *pages[first + len(chosen.scratch) :]]
      for page in replaced:
        pool.release(page)
      self.memory.hold(sequence, pages)
      self.memory.windows.replace(sequence, first, chosen.window_scratch)
    for path in piece.paths:
      if path is not chosen:
        self.release(path, sequence.instance)

  def release(self, path: DraftPath, instance: int) -> None:
    """Frees the pages that only a path uses."""
    for page in path.scratch:
      self.memory.pools[instance].release(page)
    self.memory.windows.release_pages(instance, path.window_scratch)
