"""Builds the arrays of a step: rows, segments and samples of one instance (numpy, no device).

A draft path is a segment of its own (DESIGN: attention segments): its row of the page table has the
sequence's pages and, for the draft, the path's own pages. So its keys are at their absolute
positions, and the arithmetic is that of any other segment. Tokens shared with an earlier path are
rows of that path, and their keys are also written to this path's pages (`KeyCopies`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from seerjax import fields
from seerjax.engine import runner as runner_lib
from seerjax.engine.sequence import ScheduledRows, SequenceState
from seerjax.ops import penalties, sampling
from seerjax.types import KeyCopies, PageRows, SamplingParams, SamplingRows, TokenBatch

# Greedy and unfiltered: a tile skips the noise and the sort if all its rows are.
_UNUSED = sampling.sampling_rows([SamplingParams(temperature=0.0)])
_PLAIN = sampling.sampling_rows([SamplingParams()])  # For prompts, which are scored as they are.
# Any: the records are typed for device arrays, and these are filled on the host first.
_ZEROS: Any = np.zeros
# The fields before this index are fixed per request; the others depend on the response so far.
_OF_REQUEST = SamplingRows._fields.index("mask")
_INT32: Any = np.int32


def instance_inputs(
  work: Sequence[ScheduledRows],
  copies: Sequence[tuple[int, int]],
  *,
  num_rows: int,
  num_segments: int,
  max_copies: int,
  max_key_copies: int,
  query_tile: int,
  page_size: int,
  table_width: int,
  masked_ids: int = 0,
  num_penalties: int = 0,
  has_adapters: bool = False,
  num_top: int | None = None,
  num_windows: int = 0,
) -> runner_lib.StepInputs:
  """Returns one instance's inputs (no instance axis).

  Samples are ordered like `work`, `ScheduledRows.num_samples` each, in the order of rows; those of
  scored prompts come first.

  Args:
    work: scheduled rows, in ascending order.
    copies: (from, to) pages.
    num_rows: allocated rows of the bucket; as many rows may be sampled.
    num_segments: allocated segments, at least one per row.
    max_copies: rows of the table of page copies.
    max_key_copies: rows of the table of key copies.
    query_tile: maximum positions of a segment.
    page_size: positions of a page.
    table_width: pages of a row of the page table.
    masked_ids: vocabulary size of masks; 0 if no sample has a mask.
    num_penalties: penalty entries per sample; 0 if no sample has penalties.
    has_adapters: whether rows have an adapter index.
    num_top: number of top tokens of the step; None if it returns none and scores no prompt.
    num_windows: number of further kinds of pages.
  """
  rows = _Rows(
    num_rows, num_segments, max_key_copies, table_width, query_tile, page_size, masked_ids,
    num_penalties, num_windows,
  )  # fmt: skip
  tops: list[int] = []
  for one in work:
    sequence, end = one.sequence, len(one.sequence.tokens)
    assert rows.row == one.first_row, f"work: got row {one.first_row}, expected {rows.row}"
    first = sequence.num_written
    settled: Sequence[int] = sequence.tokens[first : first + one.count]
    main = one.paths[0].tokens if one.paths else ()
    begin = rows.row
    windows = [window.row for window in sequence.windows]
    rows.put([*settled, *main] if main else settled, first, sequence.page_row, windows)
    before = rows.num_samples
    if one.num_scored:
      rows.score(one.num_scored, begin - first, sequence)
    if sequence.prompt_top:
      tops += range(before, rows.num_samples)
    before = rows.num_samples
    if one.is_sampled:
      rows.sample(1 + len(main), end, sequence, main)
    last = one.first_row + one.count - 1
    for path in one.paths[1:]:
      own, first = path.tokens[path.num_shared :], end + path.num_shared
      rows.put(own, first, path.page_row, path.window_rows)
      rows.sample(len(own), first + 1, sequence, path.tokens)
      rows.copy(last + np.asarray(path.copied, np.int32), first, path.page_row, path.window_rows)
    if sequence.num_top or sequence.reading is not None:
      tops += range(before, rows.num_samples)
    rows.adapters[begin : rows.row] = sequence.adapter

  batch = TokenBatch(
    tokens=rows.tokens,
    positions=rows.positions,
    slots=rows.slots,
    num_rows=_INT32(rows.row),
    segment_start=rows.starts,
    segment_length=rows.lengths,
    page_table=rows.table,
    num_segments=_INT32(rows.num_segments),
  )
  scores = None
  if num_top is not None:
    top_rows: Any = np.full(num_rows, num_rows, np.int32)
    top_rows[: len(tops)] = tops
    scores = runner_lib.ScoreInputs(rows.forced, top_rows, _INT32(num_top))
  copy_rows = _ZEROS((max_copies, 2), np.int32)
  copy_rows[: len(copies)] = np.asarray(copies, np.int32).reshape(-1, 2)
  return runner_lib.StepInputs(
    batch=batch,
    sample_rows=rows.sample_rows,
    sampling=_sampling_rows(work, num_rows)._replace(
      low=rows.low, high=rows.high, mask=rows.masks, **rows.penalties
    ),
    seeds=rows.seeds,
    positions=rows.sample_positions,
    num_samples=_INT32(rows.num_samples),
    copies=copy_rows,
    num_copies=_INT32(len(copies)),
    key_copies=KeyCopies(rows.copied, rows.copy_slots, _INT32(rows.num_copies)),
    adapters=rows.adapters if has_adapters else None,
    scores=scores,
    kinds=tuple(rows.windows),
  )


class _Rows:
  """Rows, segments and samples of an instance while they are filled in."""

  def __init__(
    self,
    num_rows: int,
    num_segments: int,
    max_key_copies: int,
    table_width: int,
    query_tile: int,
    page_size: int,
    masked_ids: int,
    num_penalties: int,
    num_windows: int,
  ):
    self.query_tile, self.page_size = query_tile, page_size
    self.tokens, self.positions, self.slots, self.adapters = (
      _ZEROS(num_rows, np.int32) for _ in range(4)
    )
    self.starts, self.lengths = _ZEROS(num_segments, np.int32), _ZEROS(num_segments, np.int32)
    self.table = _ZEROS((num_segments, table_width), np.int32)
    self.sample_rows = _ZEROS(num_rows, np.int32)
    self.sample_positions = _ZEROS(num_rows, np.int32)
    self.seeds = _ZEROS(num_rows, np.uint32)
    self.forced: Any = np.full(num_rows, -1, np.int32)
    self.low, self.high = _ZEROS(num_rows, np.int32), np.full(num_rows, sampling.NO_LIMIT, np.int32)
    self.masks: Any = None
    self.masked_ids = masked_ids
    if masked_ids:
      words = -(-masked_ids // 32)
      self.masks = np.full((num_rows, words), sampling.ALL_ALLOWED, np.uint32)
    self.penalties = penalties.empty((num_rows,), num_penalties) if num_penalties else {}
    self.copied, self.copy_slots = (_ZEROS(max_key_copies, np.int32) for _ in range(2))
    self.windows = [
      PageRows(
        _ZEROS(num_rows, np.int32),
        _ZEROS((num_segments, table_width), np.int32),
        _ZEROS(max_key_copies, np.int32),
      )
      for _ in range(num_windows)
    ]
    self.row = self.num_segments = self.num_samples = self.num_copies = 0

  def put(
    self,
    tokens: Sequence[int],
    first: int,
    page_row: np.ndarray,
    windows: Sequence[np.ndarray] = (),
  ) -> None:
    """Adds consecutive positions of one page-table row; `windows` are those of further kinds."""
    row, segment, size = self.row, self.num_segments, self.page_size
    count = len(tokens)
    if count == 1:  # The common case; the general case below costs ten times as much.
      self.tokens[row], self.positions[row] = tokens[0], first
      self.slots[row] = page_row[first // size] * size + first % size
      self.starts[segment], self.lengths[segment] = row, 1
      self.table[segment] = page_row
      self.num_segments += 1
    else:
      where = np.arange(first, first + count, dtype=np.int32)
      self.tokens[row : row + count] = tokens
      self.positions[row : row + count] = where
      self.slots[row : row + count] = self._slots(where, page_row)
      in_rows = np.arange(0, count, self.query_tile, dtype=np.int32)
      segments = slice(segment, segment + len(in_rows))
      self.starts[segments] = row + in_rows
      self.lengths[segments] = np.minimum(count - in_rows, self.query_tile)
      self.table[segments] = page_row[None, :]
      self.num_segments += len(in_rows)
    for kind, own in zip(
      self.windows, windows, strict=False
    ):  # A dummy row of no request has none.
      where = np.arange(first, first + count, dtype=np.int32)
      kind.slots[row : row + count] = self._slots(where, own)
      kind.page_table[segment : self.num_segments] = own[None, :]
    self.row += count

  def copy(
    self, rows: np.ndarray, end: int, page_row: np.ndarray, windows: Sequence[np.ndarray] = ()
  ) -> None:
    """Copies the keys of rows, at the consecutive positions before `end`, to other pages."""
    places = slice(self.num_copies, self.num_copies + len(rows))
    self.copied[places] = rows
    positions = np.arange(end - len(rows), end)
    self.copy_slots[places] = self._slots(positions, page_row)
    for kind, own in zip(self.windows, windows, strict=True):
      kind.copy_slots[places] = self._slots(positions, own)
    self.num_copies += len(rows)

  def _slots(self, positions: np.ndarray, page_row: np.ndarray) -> np.ndarray:
    size = self.page_size
    return page_row[positions // size] * size + positions % size

  def score(self, count: int, shift: int, sequence: SequenceState) -> None:
    """Scores the next `count` tokens of a prompt; position p is row p + `shift`."""
    places = slice(self.num_samples, self.num_samples + count)
    first = len(sequence.prompt_scores)
    where = np.arange(first, first + count, dtype=np.int32)
    self.sample_rows[places] = where + np.int32(shift)
    self.sample_positions[places] = where + np.int32(1)
    self.seeds[places] = sequence.request.seed
    self.forced[places] = sequence.tokens[first + 1 : first + count + 1]
    self.num_samples += count

  def sample(
    self, count: int, position: int, sequence: SequenceState, drafted: Sequence[int]
  ) -> None:
    """Samples the last `count` rows; the first sample is for `position`, and `drafted` are the
    draft tokens after the sequence."""
    places = slice(self.num_samples, self.num_samples + count)
    self.sample_rows[places] = np.arange(self.row - count, self.row, dtype=np.int32)
    self.sample_positions[places] = np.arange(position, position + count, dtype=np.int32)
    self.seeds[places] = sequence.request.seed
    allowed = sequence.request.sampling.allowed_token_ranges
    if allowed:
      first = position - sequence.num_prompt
      self.low[places], self.high[places] = np.asarray(allowed[first : first + count]).T
    params = sequence.request.sampling
    if params.has_penalties:
      prompt, answer = sequence.prompt_ids, sequence.tokens[sequence.num_prompt :]
      known = position - len(sequence.tokens)
      for row in range(count):
        so_far = [*answer, *drafted[: known + row]]
        found = penalties.entries(params, prompt, so_far)
        penalties.write(self.penalties, (self.num_samples + row,), params, found)
    if sequence.mask is not None:
      assert count == 1, (
        f"got {count} samples for a request with a mask, expected 1; such a request is not drafted"
      )
      mask = sequence.mask(sequence.tokens[sequence.num_prompt :])
      low, high = int(self.low[places.start]), int(self.high[places.start])
      self.masks[places] = _allowing(mask, self.masked_ids, low, high)
      # A row counts as restricted if its upper limit is below NO_LIMIT.
      self.high[places] = np.minimum(self.high[places], sampling.NO_LIMIT - 1)
    self.num_samples += count


def _allowing(mask: Any, vocab_size: int, low: int, high: int) -> np.ndarray:
  """Returns the mask after checking that it allows at least one id in [low, high).

  Raises:
    ValueError: if it is not u32[w], or allows no id there, so that nothing could be sampled.
  """
  num_words = -(-vocab_size // 32)
  if not isinstance(mask, np.ndarray) or mask.dtype != np.uint32 or mask.shape != (num_words,):
    is_array = isinstance(mask, np.ndarray)
    got = f"{mask.dtype}{list(mask.shape)}" if is_array else fields.shown(mask)
    raise ValueError(
      f"mask: got {got}, expected uint32[{num_words}], one bit for each of {vocab_size} ids; return"
      " np.packbits(allowed, bitorder='little').view(np.uint32) of whole words."
    )
  high = min(high, vocab_size)
  # Little-endian bytes, so that bits are in the order of ids on every machine.
  bits = np.unpackbits(mask.astype("<u4", copy=False).view(np.uint8), bitorder="little")
  if not bits[low:high].any():
    is_whole = (low, high) == (0, vocab_size)
    among = (
      ""
      if is_whole
      else f" from {low} to {high - 1}, the range of SamplingParams.allowed_token_ranges"
    )
    raise ValueError(
      f"mask: got a mask that allows no id{among}, expected at least one allowed id at every"
      " position of the response; end the response earlier, with a stop id that the mask allows."
    )
  return mask


def _sampling_rows(work: Sequence[ScheduledRows], size: int) -> SamplingRows:
  """Returns the sampling parameters by sample, padded with unused rows up to `size`."""
  counts, rows = [], []
  for one in work:
    if scored := one.num_scored:
      counts.append(scored)
      rows.append(_PLAIN[:_OF_REQUEST])
    counts.append(one.num_samples - scored)
    rows.append(one.sequence.sampling[:_OF_REQUEST])
  counts.append(size - sum(counts))
  rows.append(_UNUSED[:_OF_REQUEST])
  columns: Any = (
    np.repeat(np.concatenate(column), counts, axis=0) for column in zip(*rows, strict=True)
  )
  return SamplingRows(*columns)
