"""Plans the next step by a list of passes; each pass adds to the plan.

    pages -> a row of every decoding sequence, the rest to prefills -> pins, if nothing runs
          -> drafts -> steps of the visit -> background requests

Nothing here reads a clock or changes a bit of a response.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import functools
import itertools
from typing import Any, NamedTuple

import jax
import numpy as np

from seerjax.backends.protocol import Backend
from seerjax.engine import batching, checks, sizes
from seerjax.engine.allocation import Allocation
from seerjax.engine.background import BackgroundRows
from seerjax.engine.counters import Counters
from seerjax.engine.draft_rows import DraftRows, Place
from seerjax.engine.drafting import Drafting
from seerjax.engine.requests import Requests
from seerjax.engine.runner import MAX_STOP_IDS, StepInputs, VisitInputs
from seerjax.engine.sequence import DraftPath, ScheduledRows, SequenceState
from seerjax.engine.sizes import EngineConfig
from seerjax.engine.step_times import StepTimes
from seerjax.engine.weights import Weights
from seerjax.kv.memory import Memory
from seerjax.kv.pins import Pins
from seerjax.ops import penalties, sampling
from seerjax.types import Request

Rows = list[list[ScheduledRows]]


class Plan(NamedTuple):
  """Work of one visit.

  Attributes:
    rows: scheduled rows by instance; if the visit has several steps, all of them decode.
    num_steps: maximum steps of the visit.
  """

  rows: Rows
  num_steps: int = 1


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


def _num_top(scheduled: Iterable[ScheduledRows]) -> int | None:
  """Returns the number of top tokens of a step; None if it returns none and scores no prompt."""
  counts = (piece.num_top for piece in scheduled)
  return max((count for count in counts if count is not None), default=None)


class Planner:
  """Plans the steps of one engine.

  Attributes:
    allocation: allocates the pages of requests.
    drafts: fits drafts into the rows of a step.
  """

  def __init__(
    self,
    requests: Requests,
    memory: Memory,
    counters: Counters,
    *,
    pins: Pins,
    config: EngineConfig,
    backend: Backend,
    drafting: Drafting,
    weights: Weights,
    vocab_size: int,
  ):
    self._requests = requests
    self._memory = memory
    self._counters = counters
    self._pins = pins
    self._config = config
    self._backend = backend
    self._drafting = drafting
    self._vocab_size = vocab_size
    self._weights = weights
    self.allocation = Allocation(requests, memory, counters, pins, config)
    self.drafts = DraftRows(requests, memory, counters, self.allocation, config)
    self._background = BackgroundRows(
      requests, memory, counters, self.allocation, pins=pins, config=config, backend=backend
    )

  def plan(self, table: StepTimes | None) -> Plan:
    """Returns the plan of the next visit.

    Args:
      table: measured step times; without one, background requests run only while no
        foreground request does.
    """
    passes: tuple[Callable[[Plan], Plan], ...] = (
      self.with_pages,
      self.with_rows,
      self.with_pins,
      self.with_drafts,
      self.with_steps,
      functools.partial(self.with_background, table=table),
    )
    plan = Plan([])
    for one in passes:
      plan = one(plan)
    return plan

  # Passes.

  def with_pages(self, plan: Plan) -> Plan:
    """Allocates the pages of running requests, then admits waiting ones."""
    self.allocation.grow()
    self.allocation.admit()
    self.allocation.fill()
    return plan

  def with_rows(self, plan: Plan) -> Plan:
    """Distributes a step's rows by instance: one per decoding sequence, the rest to prefills."""
    return plan._replace(rows=[self._rows_of(running) for running in self._requests.running])

  def with_pins(self, plan: Plan) -> Plan:
    """Restores spilled pins if there is no foreground request."""
    if not any(plan.rows) and not any(self._requests.waiting):
      self._pins.bring_back()
    return plan

  def with_drafts(self, plan: Plan) -> Plan:
    """Appends the drafts of sampled sequences, as far as there is room."""
    found = self._read_drafts(plan.rows)
    if self._drafting.drafter is not None and any(plan.rows):
      queries, places = self.drafts.queries(plan.rows)
      drafts = self._drafting.paths(queries, self._vocab_size)
      if any(drafts):
        found |= zip(places, drafts, strict=True)
    return plan._replace(rows=self.drafts.added(plan.rows, found)) if found else plan

  def with_steps(self, plan: Plan) -> Plan:
    """Sets the maximum steps of the visit.

    There may be several if all rows decode, without drafts and without host work between tokens.
    """
    most = 0
    for piece in itertools.chain(*plan.rows):
      sequence = piece.sequence
      if piece.num_rows > 1 or not piece.is_sampled or sequence.needs_host:
        return plan._replace(num_steps=1)
      most = max(most, sequence.end - len(sequence.tokens))
    return plan._replace(num_steps=min(most, self._config.decode_steps_per_call))

  def with_background(self, plan: Plan, table: StepTimes | None) -> Plan:
    """Appends rows of background requests, with drafts if there is no foreground request."""
    # Step times do not cover steps that return top tokens.
    if not self._requests.num_background or _num_top(itertools.chain(*plan.rows)) is not None:
      return plan
    rows = self._background.added(plan.rows, plan.num_steps, table)
    if any(plan.rows):
      several = self.with_steps(plan._replace(rows=rows))
      return several._replace(num_steps=min(plan.num_steps, several.num_steps))
    return self.with_steps(self.with_drafts(plan._replace(rows=rows)))

  def _rows_of(self, running: Sequence[SequenceState]) -> list[ScheduledRows]:
    pending = []
    for sequence in running:
      unwritten = self._requests.num_unwritten(sequence)
      count = min(unwritten, sequence.num_in_windows - sequence.num_written)
      if sequence.reach > len(sequence.tokens) and (count or not unwritten):
        pending.append((sequence, count))
      else:
        self._counters.waits += 1  # Older sequences hold the pages of its next token.
    spare = self._config.batch_size_buckets[-1] - sum(1 for _, count in pending if count == 1)
    scheduled, row = [], 0
    for sequence, count in pending:
      if count > 1:
        count = min(count, spare)
        spare -= count
      if count:
        scheduled.append(ScheduledRows(sequence, count, row))
        row += count
    return scheduled

  def _read_drafts(self, scheduled: Rows) -> dict[Place, list[tuple[int, ...]]]:
    """Returns the drafts of the prefill-only requests that this step completes."""
    found = {}
    for instance, pieces in enumerate(scheduled):
      for index, piece in enumerate(pieces):
        reading = piece.sequence.reading
        if reading is not None and reading.drafts and piece.is_sampled:
          found[instance, index] = [*reading.drafts]
    return found

  # After a step.

  def remember_prompts(self, scheduled: Rows) -> None:
    """Registers the prompts that this step completes in the prefix cache, up to their last token.

    A held request does not write the last position; other requests of the prompt do not need it.
    """
    for piece in itertools.chain(*scheduled):
      sequence = piece.sequence
      written = sequence.num_written + piece.count
      if sequence.num_written < sequence.num_prompt <= written + 1:
        self._memory.remember(sequence, sequence.request.prompt[:written])

  def release_passed(self, scheduled: Rows) -> None:
    """Gives back the pages that no later row of these sequences reads."""
    if self._memory.windows.is_needed:
      for piece in itertools.chain(*scheduled):
        self._memory.release_passed(piece.sequence)

  def leave(self, piece: ScheduledRows) -> None:
    """Removes a completed prefill-only request; its keys, and those of its drafts, are cached."""
    sequence = piece.sequence
    size = self._config.page_size
    self._memory.remember(sequence, sequence.tokens)
    # The likeliest path is registered last: the index compares only the most recent candidates.
    for path in reversed(piece.paths):
      tokens = [*sequence.tokens, *path.tokens]
      held = path.page_row[: -(-len(tokens) // size)].tolist()
      self._memory.remember(sequence, tokens, held, path.window_rows)
      self.drafts.release(path, sequence.instance)
    self._memory.release(sequence)
    self._requests.remove(sequence)

  # Arrays.

  def inputs(self, scheduled: Rows) -> StepInputs:
    """Returns the step's arrays with a leading instance axis."""
    bucket = max(map(self._bucket, scheduled))
    is_masked = any(
      piece.is_sampled and piece.sequence.mask is not None for piece in itertools.chain(*scheduled)
    )
    masked_ids = self._vocab_size if is_masked else 0
    width = _num_penalties(itertools.chain(*scheduled))
    num_top = _num_top(itertools.chain(*scheduled))
    parts = [
      self._instance_inputs(pieces, copies, bucket, masked_ids, width, num_top)
      for pieces, copies in zip(scheduled, self.allocation.copies, strict=True)
    ]
    self.allocation.forget_copies()
    return jax.tree.map(lambda *leaves: np.stack(leaves), *parts)

  def visit_inputs(self, scheduled: Rows, inputs: StepInputs, num_steps: int) -> VisitInputs:
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

  def culprit(self, scheduled: Rows) -> tuple[SequenceState, int] | None:
    """Returns the first request that fails even alone, if any, and its number of tokens."""
    for piece in itertools.chain(*scheduled):
      try:
        alone = [piece._replace(first_row=0)]
        width = _num_penalties(alone)
        shape = self._bucket(alone), self._vocab_size, width, _num_top(alone)
        self._instance_inputs(alone, [], *shape)
      except Exception:
        return piece.sequence, len(piece.sequence.tokens)
    return None

  def idle_rows(self, num_requests: int, num_rows: int, num_steps: int, context: int) -> Rows:
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
    what, last = "Engine.idle_step: num", self._config.batch_size_buckets[-1]
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
      sequence.hold([0], self._memory.table_width, limit)  # Page 0 is the target of padded writes.
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
    return next(b for b in self._config.batch_size_buckets if b >= rows and of_row * b >= copies)

  def _instance_inputs(
    self,
    scheduled: list[ScheduledRows],
    copies: list[tuple[int, int]],
    bucket: int,
    masked_ids: int,
    num_penalties: int,
    num_top: int | None,
  ) -> StepInputs:
    return batching.instance_inputs(
      scheduled,
      copies,
      num_rows=self._backend.whole_rows(bucket),
      num_segments=self._backend.whole_segments(bucket),
      # For each starting sequence, one copy for itself and one for a draft path.
      max_copies=2 * self._config.batch_size_buckets[-1],
      max_key_copies=sizes.KEY_COPIES_PER_ROW * bucket,
      query_tile=self._backend.numerics.query_tile,
      page_size=self._config.page_size,
      table_width=self._memory.table_width,
      masked_ids=masked_ids,
      num_penalties=num_penalties,
      has_adapters=bool(self._weights.adapters),
      num_top=num_top,
      num_windows=len(self._memory.windows.kinds) - 1,
    )
