"""Plans the next step: allocates pages, distributes rows, and fits drafts into the batch.

A step takes one row from every decoding sequence and fills the remaining rows with prefill chunks,
then with drafts, then with background requests (`background`). Nothing here reads a clock or
changes a bit of a response.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import itertools
from typing import Any

import jax
import numpy as np

from seerjax.backends.protocol import Backend
from seerjax.engine import batching, checks, drafting, sizes, token_tree
from seerjax.engine.background import Room, StepTable
from seerjax.engine.counters import Counters
from seerjax.engine.drafting import DraftQuery
from seerjax.engine.requests import Requests
from seerjax.engine.runner import MAX_STOP_IDS, StepInputs, VisitInputs
from seerjax.engine.sequence import DraftPath, ScheduledRows, SequenceState
from seerjax.engine.sizes import EngineConfig, pages_for
from seerjax.kv import pages as pages_lib, prefix_index
from seerjax.kv.memory import Memory
from seerjax.kv.owner import Owner
from seerjax.kv.pins import Pins
from seerjax.ops import penalties, sampling
from seerjax.types import Request

Place = tuple[int, int]  # (instance, index among the instance's scheduled rows).


def _sharing(sequence: SequenceState) -> tuple[str, Owner]:
  """Returns a key that is equal for siblings that share a prompt's keys and values."""
  return sequence.request.group_id, sequence.owner


def _is_asked_between(sequence: SequenceState) -> bool:
  """Returns whether the host has work to do between two tokens of a response."""
  sampling = sequence.request.sampling
  is_held = sequence.mask is not None or sequence.reading is not None
  return bool(is_held or sampling.stop_strings or sampling.allowed or sampling.has_penalties)


def _num_penalties(scheduled: Iterable[ScheduledRows]) -> int:
  """Returns the number of penalty entries per sample of a step; 0 if no sample has penalties."""
  most = 0
  for piece in scheduled:
    if piece.is_sampled and piece.sequence.request.sampling.has_penalties:
      sequence = piece.sequence
      drafted = max((len(path.tokens) for path in piece.paths), default=0)
      count = penalties.most_entries(
        sequence.request.sampling, sequence.num_prompt, sequence.num_generated + drafted
      )
      most = max(most, penalties.width_for(count))
  return most


def _keeps_visit(sequence: SequenceState) -> bool:
  """Returns whether a visit may have several steps if it contains the sequence's next rows."""
  return len(sequence.tokens) - sequence.num_written == 1 and not _is_asked_between(sequence)


class Planner:
  """Plans the steps of one engine."""

  def __init__(
    self,
    requests: Requests,
    memory: Memory,
    counters: Counters,
    *,
    pins: Pins,
    config: EngineConfig,
    backend: Backend,
    table_width: int,
    masked_ids: int = 0,
    has_adapters: Callable[[], bool] = lambda: False,
  ):
    self._requests = requests
    self._memory = memory
    self._counters = counters
    self._pins = pins
    self._config = config
    self._backend = backend
    self._table_width = table_width
    self._masked_ids = masked_ids
    self._has_adapters = has_adapters
    self.start_over()

  def start_over(self) -> None:
    """Discards the pending copies of a failed step."""
    # By instance: (from, to) pages, and the source pages that are held until they are copied.
    self._copies: list[list[tuple[int, int]]] = [[] for _ in self._memory.pools]
    self._sources: list[list[int]] = [[] for _ in self._memory.pools]

  # Pages.

  def grow(self) -> None:
    """Allocates the pages of running sequences' next tokens, oldest sequence first.

    If no page is left, the youngest sequence is preempted and waits again. So the oldest one always
    gets what it needs, and since its whole response fits into memory, it finishes. Pages that are
    still free then are allocated ahead for drafts, which end at the sequence's last page.
    """
    for instance, pool in enumerate(self._memory.pools):
      running = self._requests.running[instance]
      # Preemption shortens the list at its end.
      for place in itertools.count():
        if place >= len(running):
          break
        sequence = running[place]
        count = len(sequence.tokens)
        steps = 1 if _is_asked_between(sequence) else self._config.steps_per_visit
        if sequence.reach >= min(sequence.limit, count + steps):
          continue
        least = pages_for(count + 1, self._config.page_size) - len(sequence.pages)
        while pool.num_available < least:
          victim = self._requests.youngest_holder(sequence)
          if not self._make_way(instance) and not self._displace(victim):
            break
        self._lengthen(sequence, pool, max(least, 1))
      for sequence in running:
        self._lengthen(sequence, pool, 1)

  def _lengthen(self, sequence: SequenceState, pool: pages_lib.PagePool, least: int) -> None:
    """Gives a running sequence its next pages, as many as are free, if there are `least`."""
    missing = sequence.wanted_pages(self._config) - len(sequence.pages)
    missing = min(missing, pool.num_available)
    if missing >= least:
      self._memory.hold(sequence, [*sequence.pages, *pool.take(missing)])

  def _displace(self, victim: SequenceState | None) -> bool:
    """Preempts a sequence for an older one; returns False if `victim` is None.

    Its pages are spilled, or dropped and computed again if the pool is full too. No sequence has
    rows of the step yet.
    """
    if victim is None:
      return False
    self._counters.displaced += 1
    if not self._take_off(victim):
      self._counters.preemptions += 1
    if self._requests.is_running(victim):
      self._requests.preempt(victim)
    return True

  def _take_off(self, victim: SequenceState) -> bool:
    """Spills a sequence's pages; drops them and returns False if the pool is full."""
    if self._memory.spill([victim]):
      return True
    self._memory.release(victim)
    return False

  def promised_pages(self, instance: int) -> int:
    """Returns the pages that running sequences of an instance are expected to take soon."""
    return sum(
      max(0, sequence.expected_pages(self._config) - len(sequence.pages))
      for sequence in self._requests.running[instance]
    )

  def admit(self) -> None:
    """Admits waiting sequences, first come first served, if the pages they are expected to need are
    available in addition to those that running sequences need for `EngineConfig.reserved_tokens`
    more tokens.

    Background requests are preempted to make room.
    """
    for instance, pool in enumerate(self._memory.pools):
      waiting, running = self._requests.waiting[instance], self._requests.running[instance]
      prefilling = {_sharing(s) for s in running if s.is_prefilling and s.request.group_id}
      held_back: list[SequenceState] = []
      promised = self.promised_pages(instance) if waiting else 0
      while waiting and len(running) < self._config.max_sequences:
        sequence = waiting[0]
        self._requests.busy = (sequence, len(sequence.tokens))
        is_fresh = not (sequence.pages or sequence.num_written)
        group = sequence.request.group_id
        if is_fresh and self._config.reuse_prefixes and _sharing(sequence) in prefilling:
          held_back.append(waiting.popleft())  # A sibling is prefilling the shared prompt.
          continue
        # If nothing runs, one request always starts: its whole response fits, page by page if need
        # be.
        most = promised if running else None
        has_pages = self._give_pages(sequence, pool, most)
        while not has_pages and (
          self._make_way(instance)
          or (not running and self._displace(self._requests.paused_holder(instance)))
        ):
          has_pages = self._give_pages(sequence, pool, most)
        if not has_pages:
          self._counters.waits += 1
          break
        waiting.popleft()
        running.append(sequence)
        promised += max(0, sequence.expected_pages(self._config) - len(sequence.pages))
        if sequence.is_prefilling and group:
          prefilling.add(_sharing(sequence))
      waiting.extendleft(reversed(held_back))
    self._requests.busy = None

  def _give_pages(
    self, sequence: SequenceState, pool: pages_lib.PagePool, promised: int | None = None
  ) -> bool:
    """Gives a waiting sequence the pages it needs to run; returns False if there are too few.

    Args:
      sequence: a waiting sequence.
      pool: allocator of its instance.
      promised: pages that other sequences are expected to take; None also ignores the further pages
        that this sequence is expected to take.
    """
    # Pages that must stay free after this allocation, the sequence's own next pages included.
    left = 0
    if promised is not None:
      more = sequence.expected_pages(self._config) - sequence.wanted_pages(self._config)
      left = promised + more
    if sequence.pages:
      return self._extend(sequence, pool, left)
    if sequence.num_written:  # Spilled: it is restored before the step.
      return self._memory.begin_restore(sequence, sequence.wanted_pages(self._config), left)
    return self._begin(sequence, pool, left)

  def _make_way(self, instance: int) -> bool:
    """Preempts one background sequence or pin of an instance; returns False if none holds pages.

    Its pages are spilled, or dropped if the pool is full too. None of these sequences has rows of
    the step yet, nor pages that are still to be copied.
    """
    for sequence in self._requests.holders_in_background(instance):
      if self._take_off(sequence):
        self._counters.background_spilled += 1
      else:
        self._counters.background_preempted += 1
      if self._requests.is_running(sequence):
        self._requests.preempt(sequence)
      return True
    return self._pins.take_off(instance)

  def _extend(self, sequence: SequenceState, pool: pages_lib.PagePool, left: int) -> bool:
    """Gives a sequence that holds pages those of its next chunk; returns False if that would leave
    fewer than `left` free."""
    needed = sequence.wanted_pages(self._config) - len(sequence.pages)
    if needed + left > pool.num_available:
      return False
    self._memory.hold(sequence, [*sequence.pages, *pool.take(max(needed, 0))])
    return True

  def _begin(self, sequence: SequenceState, pool: pages_lib.PagePool, left: int) -> bool:
    """Gives a sequence its first pages, cached ones included; returns False if that would leave
    fewer than `left` free."""
    hit = self._memory.find(sequence, sequence.tokens[:-1])
    for page in hit.pages:
      pool.hold(page)
    if hit.copy_from is not None:
      pool.hold(hit.copy_from)
    needed = sequence.wanted_pages(self._config) - len(hit.pages)
    if needed + left > pool.num_available and hit.copy_from is not None:
      # The page to copy may be the only one that is missing: if nothing runs, no other page would
      # ever become free.
      pool.release(hit.copy_from)
      hit = prefix_index.PrefixHit(hit.pages, None, len(hit.pages) * self._config.page_size)
    if needed + left > pool.num_available:
      for page in hit.pages:
        pool.release(page)
      return False
    fresh = pool.take(needed)
    self._memory.hold(sequence, [*hit.pages, *fresh])
    sequence.num_written = hit.num_tokens
    if hit.copy_from is not None:
      self._copies[sequence.instance].append((hit.copy_from, fresh[0]))
      self._counters.page_copies += 1
      # Held until the copy is made: a restored page is written before the copies of the step.
      self._sources[sequence.instance].append(hit.copy_from)
    self._counters.reused_tokens += hit.num_tokens
    return True

  # Rows.

  def schedule(self) -> list[list[ScheduledRows]]:
    """Distributes a step's rows by instance: one per decoding sequence, the rest to prefills."""
    return [self._schedule(running) for running in self._requests.running]

  def _schedule(self, running: Sequence[SequenceState]) -> list[ScheduledRows]:
    pending = []
    for sequence in running:
      if sequence.reach > len(sequence.tokens):
        pending.append((sequence, self._num_unwritten(sequence)))
      else:
        self._counters.waits += 1  # Older sequences hold the pages of its next token.
    spare = self._config.row_buckets[-1] - sum(1 for _, count in pending if count == 1)
    scheduled, row = [], 0
    for sequence, count in pending:
      if count > 1:
        count = min(count, spare)
        spare -= count
      if count:
        scheduled.append(ScheduledRows(sequence, count, row))
        row += count
    return scheduled

  def _num_unwritten(self, sequence: SequenceState) -> int:
    """Returns the rows up to a sequence's end; without the last row while it is held."""
    is_held = sequence.request.request_id in self._requests.held
    return len(sequence.tokens) - sequence.num_written - is_held

  def with_background(
    self, scheduled: list[list[ScheduledRows]], num_steps: int, table: StepTable | None
  ) -> list[list[ScheduledRows]]:
    """Appends rows of background requests, if there is room; returns all rows.

    A background request gets pages only if no foreground request waits for pages and rows are left.

    Args:
      scheduled: rows of foreground requests, drafts included.
      num_steps: steps of the visit without background requests.
      table: measured step times.
    """
    if not self._requests.num_background:
      return scheduled
    room = Room(scheduled, num_steps, config=self._config, table=table)
    found = []
    for instance, pieces in enumerate(scheduled):
      row, planned = sum(piece.num_rows for piece in pieces), list(pieces)
      for sequence in self._background(instance, room):
        count = 0
        if not room.has_front or self._may_join(sequence):
          wanted = self._num_unwritten(sequence)
          count = room.take(instance, wanted, keeps_visit=_keeps_visit(sequence))
        if count:
          planned.append(ScheduledRows(sequence, count, row))
          row += count
        self._counters.background_paused += not count
      found.append(planned)
    return found

  def _background(self, instance: int, room: Room) -> Iterator[SequenceState]:
    """Yields background sequences with pages, then admits and yields waiting ones."""
    requests = self._requests
    running, waiting = requests.background[instance], requests.background_waiting[instance]
    yield from tuple(running)
    while waiting and not requests.waiting[instance]:
      sequence = waiting[0]
      may_join = not room.has_front or self._may_join(sequence)
      if not may_join or not room.fits(instance, 1, keeps_visit=_keeps_visit(sequence)):
        break
      requests.busy = (sequence, len(sequence.tokens))
      has_pages = self._give_pages(sequence, self._memory.pools[instance])
      while not (has_pages or running or requests.running[instance]):
        # Nothing runs that could free pages later, so pins are preempted too.
        if not self._pins.take_off(instance):
          break
        has_pages = self._give_pages(sequence, self._memory.pools[instance])
      if not has_pages:
        break
      waiting.popleft()
      running.append(sequence)
      yield sequence
    requests.busy = None

  def _may_join(self, sequence: SequenceState) -> bool:
    """Returns whether the other rows can use the same compiled program with this sequence's row."""
    if sequence.mask is not None or sequence.request.sampling.has_penalties:
      return False
    waits = self._backend.traits.waits_for_predicates
    return not (waits and np.any(sampling.is_special(sequence.sampling)))

  def num_steps(self, scheduled: list[list[ScheduledRows]]) -> int:
    """Returns the maximum steps of a visit with these rows: several if all rows decode, without
    drafts and without host work between tokens; otherwise 1."""
    most = 0
    for piece in itertools.chain(*scheduled):
      sequence = piece.sequence
      if piece.num_rows > 1 or not piece.is_sampled or _is_asked_between(sequence):
        return 1
      most = max(most, sequence.end - len(sequence.tokens))
    return min(most, self._config.steps_per_visit)

  def remember_prompts(self, scheduled: list[list[ScheduledRows]]) -> None:
    """Registers the prompts that this step completes in the prefix cache, up to their last token.

    A held request does not write the last position; other requests of the prompt do not need it.
    """
    for piece in itertools.chain(*scheduled):
      sequence = piece.sequence
      written = sequence.num_written + piece.count
      if sequence.num_written < sequence.num_prompt <= written + 1:
        self._memory.remember(sequence, sequence.request.prompt[:written])

  # Prefill-only requests.

  def num_top(self, scheduled: list[list[ScheduledRows]]) -> int:
    """Returns the number of top tokens that the step must return, 0 without prefill-only requests.

    It is rounded up to a power of two, so that few values need a program of their own.
    """
    readings = [one.sequence.reading for one in itertools.chain(*scheduled) if one.is_sampled]
    most = max((reading.num_top for reading in readings if reading is not None), default=0)
    return 1 << (most - 1).bit_length() if most else 0

  def read_drafts(self, scheduled: list[list[ScheduledRows]]) -> dict[Place, list[tuple[int, ...]]]:
    """Returns the drafts of the prefill-only requests that this step completes."""
    found = {}
    for instance, pieces in enumerate(scheduled):
      for index, piece in enumerate(pieces):
        reading = piece.sequence.reading
        if piece.is_sampled and reading is not None and reading.drafts:
          found[instance, index] = [*reading.drafts]
    return found

  def leave(self, piece: ScheduledRows) -> None:
    """Removes a completed prefill-only request; its keys, and those of its drafts, are cached."""
    sequence = piece.sequence
    pool, size = self._memory.pools[sequence.instance], self._config.page_size
    self._memory.remember(sequence, sequence.tokens)
    # The likeliest path is registered last: the index compares only the most recent candidates.
    for path in reversed(piece.paths):
      tokens = [*sequence.tokens, *path.tokens]
      held = path.page_row[: -(-len(tokens) // size)].tolist()
      self._memory.remember(sequence, tokens, held)
      for page in path.scratch:
        pool.release(page)
    self._memory.release(sequence)
    self._requests.remove(sequence)

  # Rows of drafts.

  def draft_queries(
    self, scheduled: list[list[ScheduledRows]]
  ) -> tuple[list[DraftQuery], list[Place]]:
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

  def with_drafts(
    self,
    scheduled: list[list[ScheduledRows]],
    drafts: dict[Place, list[tuple[int, ...]]],
  ) -> list[list[ScheduledRows]]:
    """Returns the rows with drafts appended to sampled sequences, as far as rows are left."""
    drafted = []
    for instance, rows_left in enumerate(self._spare_rows(scheduled)):
      row, planned = 0, []
      copies_left = sizes.KEY_COPIES_PER_ROW * self._config.row_buckets[-1]
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
    is_front = not self._requests.num_background or any(
      not piece.sequence.is_background for piece in itertools.chain(*scheduled)
    )
    most = self._config.row_buckets[-1] if is_front else self._config.background_rows
    return [most - sum(piece.count for piece in pieces) for pieces in scheduled]

  def _paths(
    self,
    piece: ScheduledRows,
    drafts: Iterable[tuple[int, ...]],
    rows_left: int,
    copies_left: int,
  ) -> tuple[DraftPath, ...]:
    """Returns the draft tree as paths, without the leaves that there is no room for."""
    sequence, pool = piece.sequence, self._memory.pools[piece.sequence.instance]
    size, end = self._config.page_size, len(sequence.tokens)
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
        if first * size < sequence.num_written:
          self._copies[sequence.instance].append((sequence.pages[first], scratch[0]))
        path = path._replace(
          page_row=page_row,
          num_shared=branch.num_shared,
          copied=(*settled, *branch.rows[: branch.num_shared]),
          scratch=tuple(scratch),
        )
      paths.append(path)
    return tuple(paths)

  def _num_settled(self, piece: ScheduledRows) -> int:
    """Returns how many non-draft rows are in the last page; further paths have to copy them."""
    end = len(piece.sequence.tokens)
    page_begin = (end - 1) // self._config.page_size * self._config.page_size
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
    size, root = self._config.page_size, len(piece.sequence.tokens) - 1
    instance = piece.sequence.instance
    pool, num_pages = self._memory.pools[instance], 0
    num_settled = self._num_settled(piece)
    for index, node in enumerate(nodes):
      pages = copies = 0
      if not node.is_first:
        pages = (root + node.depth) // size - root // size + 1
        copies = num_settled + node.depth - 1
      elif node.branch:
        pages = int((root + node.depth) % size == 0)
      rows_left, num_pages, copies_left = rows_left - 1, num_pages + pages, copies_left - copies
      while pages and num_pages > pool.num_available and not piece.sequence.is_background:
        if not self._make_way(instance):
          break
      pages_left = pool.num_available - num_pages
      if min(rows_left, pages_left, copies_left) < 0:
        self._counters.cut_for_rows += rows_left < 0
        self._counters.cut_for_pages += pages_left < 0
        self._counters.cut_for_copies += copies_left < 0
        return index
    return len(nodes)

  def adopt(self, piece: ScheduledRows, chosen: DraftPath) -> None:
    """Makes the chosen path's scratch pages the sequence's own, and frees those of other paths."""
    sequence = piece.sequence
    pool, pages = self._memory.pools[sequence.instance], sequence.pages
    if chosen.scratch:
      first = (len(sequence.tokens) - 1) // self._config.page_size
      replaced = pages[first : first + len(chosen.scratch)]
      pages = [*pages[:first], *chosen.scratch, *pages[first + len(chosen.scratch) :]]
      for page in replaced:
        pool.release(page)
      self._memory.hold(sequence, pages)
    for path in piece.paths:
      if path is not chosen:
        for page in path.scratch:
          pool.release(page)

  # Arrays.

  def inputs(self, scheduled: list[list[ScheduledRows]]) -> StepInputs:
    """Returns the step's arrays with a leading instance axis."""
    bucket = max(map(self._bucket, scheduled))
    is_masked = any(
      piece.is_sampled and piece.sequence.mask is not None for piece in itertools.chain(*scheduled)
    )
    masked_ids = self._masked_ids if is_masked else 0
    width = _num_penalties(itertools.chain(*scheduled))
    parts = [
      self._instance_inputs(pieces, copies, bucket, masked_ids, width)
      for pieces, copies in zip(scheduled, self._copies, strict=True)
    ]
    self._forget_copies()
    return jax.tree.map(lambda *leaves: np.stack(leaves), *parts)

  def settle(self) -> None:
    """Performs the pending restores and copies when a step has no rows.

    A held request may have been given such pages. Between two steps it can be cancelled or
    migrated, so the pages must be written by then.
    """
    self._memory.settle()
    self._memory.copy(self._copies)
    self._forget_copies()

  def _forget_copies(self) -> None:
    self._copies = [[] for _ in self._memory.pools]
    for pool, sources in zip(self._memory.pools, self._sources, strict=True):
      while sources:
        pool.release(sources.pop())

  def visit_inputs(
    self, scheduled: list[list[ScheduledRows]], inputs: StepInputs, num_steps: int
  ) -> VisitInputs:
    """Returns the arrays of a visit that starts with these rows, which all decode."""
    shape = inputs.sample_rows.shape
    remaining = np.zeros(shape, np.int32)
    stops = np.full((*shape, MAX_STOP_IDS), -1, np.int32)
    leads = np.ones(shape, np.int32)
    steps = np.full(shape[:1], num_steps, np.int32)
    is_front = lambda piece: not piece.sequence.is_background
    has_front = any(map(is_front, itertools.chain(*scheduled)))
    for instance, pieces in enumerate(scheduled):
      # A visit ends with its foreground rows. An instance without foreground rows cannot know when
      # the others end, so it runs one step, which is sure to be in time.
      if has_front and any(map(is_front, pieces)):
        leads[instance, : len(pieces)] = [is_front(piece) for piece in pieces]
      elif has_front:
        steps[instance] = 1
      for row, piece in enumerate(pieces):
        sequence = piece.sequence
        remaining[instance, row] = sequence.end - len(sequence.tokens)
        ids = sequence.request.sampling.stop_token_ids[:MAX_STOP_IDS]
        stops[instance, row, : len(ids)] = ids
    # Any: the record is typed for device arrays, and this one is built on the host.
    inputs = inputs._replace(key_copies=None)  # A visit has no drafts.
    fields: dict[str, Any] = dict(remaining=remaining, stops=stops, num_steps=steps, leads=leads)
    return VisitInputs(step=inputs, **fields)

  def culprit(self, scheduled: list[list[ScheduledRows]]) -> tuple[SequenceState, int] | None:
    """Returns the first request that fails even alone, if any, and its number of tokens."""
    for piece in itertools.chain(*scheduled):
      try:
        alone = [piece._replace(first_row=0)]
        width = _num_penalties(alone)
        self._instance_inputs(alone, [], self._bucket(alone), self._masked_ids, width)
      except Exception:
        return piece.sequence, len(piece.sequence.tokens)
    return None

  def idle_rows(
    self, num_requests: int, num_rows: int, num_steps: int, context: int
  ) -> list[list[ScheduledRows]]:
    """Returns dummy rows of no request for each instance, for measuring step times.

    The rows are distributed evenly over requests, those of one request in one path. They start at a
    quarter of the context, if there is room, and write page 0, like padding.

    Args:
      num_requests: requests of each instance.
      num_rows: rows of each instance; at least one per request.
      num_steps: steps of a visit; more than one only if each request has one row.
      context: positions of a sequence.

    Raises:
      ValueError: if a number is out of range, or the rows of one request do not fit into the
        context.
    """
    what, last = "Engine.idle_step: num", self._config.row_buckets[-1]
    most = sizes.MAX_STEPS_PER_VISIT if num_requests == num_rows else 1
    checks.whole(f"{what}_rows", num_rows, 1, last, "the last row bucket is the maximum")
    checks.whole(f"{what}_requests", num_requests, 1, num_rows, "each request has at least one row")
    checks.whole(f"{what}_steps", num_steps, 1, most, "draft rows are verified in one step")
    shares = [len(share) for share in np.array_split(np.arange(num_rows), num_requests)]
    needed = max(shares[0], num_steps)
    if needed > context:
      raise ValueError(
        f"Engine.idle_step: got {needed} positions for one request, expected at most {context}, the"
        " context; measure fewer rows per request."
      )
    position = min(context // 4, context - needed)
    request = Request(request_id="idle", prompt=(0,) * (position + 1))
    row = sampling.sampling_rows([request.sampling])
    scheduled, first = [], 0
    for count in shares:
      limit = position + 1 + needed
      sequence = SequenceState(
        request=request, tokens=list(request.prompt), instance=0, sampling=row, limit=limit
      )
      sequence.hold([0], self._table_width, limit)  # Page 0 is the target of padded writes.
      sequence.num_written = position
      path = DraftPath((0,) * (count - 1), sequence.page_row, tuple(range(1, count)))
      paths = (path,) if count > 1 else ()
      scheduled.append(ScheduledRows(sequence, 1, first, paths))
      first += count
    return [scheduled for _ in self._memory.pools]

  def _bucket(self, scheduled: Sequence[ScheduledRows]) -> int:
    """Returns the smallest row bucket that holds an instance's rows and key copies."""
    rows = sum(piece.num_rows for piece in scheduled)
    copies = sum(piece.num_copies for piece in scheduled if piece.paths)
    of_row = sizes.KEY_COPIES_PER_ROW
    return next(b for b in self._config.row_buckets if b >= rows and of_row * b >= copies)

  def _instance_inputs(
    self,
    scheduled: list[ScheduledRows],
    copies: list[tuple[int, int]],
    bucket: int,
    masked_ids: int,
    num_penalties: int,
  ) -> StepInputs:
    return batching.instance_inputs(
      scheduled,
      copies,
      num_rows=self._backend.whole_rows(bucket),
      num_segments=self._backend.whole_segments(bucket),
      # For each starting sequence, one copy for itself and one for a draft path.
      max_copies=2 * self._config.row_buckets[-1],
      max_key_copies=sizes.KEY_COPIES_PER_ROW * bucket,
      query_tile=self._backend.numerics.query_tile,
      page_size=self._config.page_size,
      table_width=self._table_width,
      masked_ids=masked_ids,
      num_penalties=num_penalties,
      has_adapters=self._has_adapters(),
    )
