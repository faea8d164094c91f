"""A step's work as arrays: rows, segments and samples of one instance (numpy, no device).

A draft's path is a segment of its own (DESIGN: attention segments): its row of the page table has
the sequence's pages and, past the sequence's end, the path's own, so its keys stand at their
absolute positions and nothing of the arithmetic knows that it is a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from seerjax.engine import runner as runner_lib
from seerjax.engine.sequence import Work
from seerjax.ops import sampling
from seerjax.types import SamplingParams, SamplingRows, TokenBatch

# Greedy and unfiltered: a tile is spared the noise and the sort if all its rows are.
_UNUSED = sampling.sampling_rows([SamplingParams(temperature=0.0)])


def instance_inputs(
  work: Sequence[Work],
  copies: Sequence[tuple[int, int]],
  *,
  num_rows: int,
  max_copies: int,
  query_tile: int,
  page_size: int,
  table_width: int,
) -> runner_lib.StepInputs:
  """Returns one instance's inputs (no instance axis).

  Samples stand in the order of `work`, `Work.num_samples` each, path by path.

  Args:
    work: in order, rows ascending.
    copies: (from, to) pages.
    num_rows: of the row bucket; as many rows may be sampled.
    max_copies: rows of the copy table.
    query_tile: most positions of a segment.
    page_size: positions of a page.
    table_width: pages of a row of the page table.
  """
  # Any: the records are typed as device arrays, and these are filled in on the host first.
  zeros: Any = np.zeros
  int32: Any = np.int32
  tokens, positions, slots = (zeros(num_rows, np.int32) for _ in range(3))
  starts, lengths = zeros(num_rows, np.int32), zeros(num_rows, np.int32)
  table = zeros((num_rows, table_width), np.int32)
  sample_rows, sample_positions = zeros(num_rows, np.int32), zeros(num_rows, np.int32)
  seeds = zeros(num_rows, np.uint32)
  num_segments = num_samples = row = 0

  def put(said: Sequence[int], first: int, page_row: np.ndarray) -> None:
    """Adds consecutive positions of one page-table row."""
    nonlocal num_segments, row
    count = len(said)
    if count == 1:  # Nearly all; the general case below costs ten times as much.
      tokens[row], positions[row] = said[0], first
      slots[row] = page_row[first // page_size] * page_size + first % page_size
      starts[num_segments], lengths[num_segments] = row, 1
      table[num_segments] = page_row
      num_segments += 1
    else:
      where = np.arange(first, first + count, dtype=np.int32)
      tokens[row : row + count] = said
      positions[row : row + count] = where
      slots[row : row + count] = page_row[where // page_size] * page_size + where % page_size
      in_rows = np.arange(0, count, query_tile, dtype=np.int32)
      segments = slice(num_segments, num_segments + len(in_rows))
      starts[segments] = row + in_rows
      lengths[segments] = np.minimum(count - in_rows, query_tile)
      table[segments] = page_row[None, :]
      num_segments += len(in_rows)
    row += count

  def sample(count: int, position: int, seed: int) -> None:
    """Samples the last `count` rows; the first of these tokens will stand at `position`."""
    nonlocal num_samples
    places = slice(num_samples, num_samples + count)
    sample_rows[places] = np.arange(row - count, row, dtype=np.int32)
    sample_positions[places] = np.arange(position, position + count, dtype=np.int32)
    seeds[places] = seed
    num_samples += count

  for one in work:
    sequence, end = one.sequence, len(one.sequence.tokens)
    assert row == one.first_row, f"work: got row {one.first_row}, expected {row}"
    first = sequence.num_written
    said: Sequence[int] = sequence.tokens[first : first + one.count]
    main = one.paths[0].tokens if one.paths else ()
    put([*said, *main] if main else said, first, sequence.page_row)
    if one.is_sampled:
      sample(1 + len(main), end, sequence.request.seed)
    for path in one.paths[1:]:
      put([sequence.tokens[-1], *path.tokens], end - 1, path.page_row)
      sample(1 + len(path.tokens), end, sequence.request.seed)

  batch = TokenBatch(
    tokens=tokens,
    positions=positions,
    slots=slots,
    num_rows=int32(row),
    segment_start=starts,
    segment_length=lengths,
    page_table=table,
    num_segments=int32(num_segments),
  )
  copy_rows = zeros((max_copies, 2), np.int32)
  copy_rows[: len(copies)] = np.asarray(copies, np.int32).reshape(-1, 2)
  return runner_lib.StepInputs(
    batch=batch,
    sample_rows=sample_rows,
    sampling=_sampling_rows(work, num_rows),
    seeds=seeds,
    positions=sample_positions,
    num_samples=int32(num_samples),
    copies=copy_rows,
    num_copies=int32(len(copies)),
  )


def _sampling_rows(work: Sequence[Work], size: int) -> SamplingRows:
  """Returns every sample's parameters, and unused rows up to `size`."""
  counts = [one.num_samples for one in work]
  rows = [*(one.sequence.sampling for one in work), _UNUSED]
  counts.append(size - sum(counts))
  columns: Any = (
    np.repeat(np.concatenate(column), counts, axis=0) for column in zip(*rows, strict=True)
  )
  return SamplingRows(*columns)
