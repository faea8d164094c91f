"""Packs groups of rollouts into micro-batches of fixed shape.

A rollout of prompt p0 p1 p2 and completion c0 c1 becomes one sequence of four rows; the last token
needs no row, since nothing follows it.

  row            0    1    2    3
  token          p0   p1   p2   c0
  position       0    1    2    3
  target         p1   p2   c0   c1
  loss_mask      .    .    x    x
  behaviour      0    0    l0   l1      (l0, l1: the engine's log-probabilities of c0, c1)

Sequences are taken in the order (group_index, member), independent of completion, and placed one
after the other (next-fit: a sequence that does not fit starts the next micro-batch, and earlier
ones are never revisited). The rows of the whole batch are thus in (group, member) order, and a
sequence never crosses a micro-batch. Each sequence is cut into segments of `query_tile` positions.
Sequence j of a micro-batch owns the p pages 1 + j p to (j + 1) p, used or not: the gradient of
attention reads its rows there as a dense block. Page 0 belongs to no sequence and receives the
writes of padding rows.

  rows       | a0 a1 a2 a3 a4 | b0 b1 b2 | padding |        query_tile = 4, page_size = 2, p = 8
  segments   | 0         | 1  | 2        |
  slots      | 2  3  4  5  6  | 18 19 20 | 0  0  0 |        a: pages 1 to 8, b: pages 9 to 16

Members of a group share a prompt, which is computed once: if the prompt of a sequence begins with
whole pages of an earlier sequence in its micro-batch, it reads those pages and has no rows for
them. The last prompt token always has a row, because it predicts the completion. As in the engine,
sharing does not affect any bit of a log-probability.

  prompts a0 a1 a2 and again, answers a3 a4 a5 and b3 b4:

  rows       | a0 a1 a2 a3 a4 | b2 b3 | padding |
  slots      | 2  3  4  5  6  | 20 21 | 0  0  0 |        b's page table: 1, 10, 11, ..., 16

All shapes depend on the arguments, not on the data: one program serves all batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.typing import ArrayLike
import numpy as np

from seerjax.models.decoder import Decoder
from seerjax.ops import penalties as penalties_ops, sampling as sampling_ops
from seerjax.types import Rollout, RolloutGroup, SamplingRows, TokenBatch, TrainBatch


class Layout(NamedTuple):
  """Static shapes of one micro-batch.

  Attributes:
    num_rows: n, rows of the arrays: `rows_per_micro_batch`, but at least two tiles.
    max_num_seqs: maximum number of sequences.
    max_sequence_tokens: maximum tokens of a sequence, prompt and completion.
    num_segments: s, an upper bound given the two limits above, in whole tiles.
    pages_per_sequence: p, entries of a page-table row; p * page_size is a multiple of `kv_split`.
    num_pages: scratch pages the forward must provide: 1 + max_num_seqs * p.
  """

  num_rows: int
  max_num_seqs: int
  max_sequence_tokens: int
  num_segments: int
  pages_per_sequence: int
  num_pages: int


# Minimum of the default number of rows, which is otherwise that of a whole context.
LEAST_ROWS = 2048
# Default number of sequences: as many as have their keys and values of all layers, in float32,
# within SCRATCH_BYTES, with at least 64 rows for each.
SCRATCH_BYTES, ROWS_OF_SEQUENCE = 2**30, 64


def derived_sizes(
  *, context: int, bytes_per_position: int, rows: int = 0, sequences: int = 0
) -> tuple[int, int]:
  """Returns (rows, sequences) of a micro-batch, with values of 0 replaced by defaults.

  They determine which rows a gradient sums together, and so its bits. They therefore depend only on
  the model and its context, never on free memory.

  Args:
    context: maximum positions of a sequence.
    bytes_per_position: bytes of the keys and values of all layers, in float32.
    rows: explicit value, or 0.
    sequences: explicit value, or 0.

  Returns:
    Rows: the smallest power of two that holds a context, at least 2,048. Sequences: a power of two,
    at most a 64th of the rows and what fits `SCRATCH_BYTES`, but at least the number of whole
    contexts that the rows hold.
  """
  rows = rows or max(LEAST_ROWS, 1 << (context - 1).bit_length())
  if not sequences:
    fitting = SCRATCH_BYTES // (context * bytes_per_position)
    wanted = max(1, rows // context, min(fitting, rows // ROWS_OF_SEQUENCE))
    sequences = 1 << (wanted.bit_length() - 1)
  return rows, sequences


def layout(
  *,
  decoder: Decoder,
  page_size: int,
  rows_per_micro_batch: int,
  max_num_seqs: int | None = None,
  max_sequence_tokens: int | None = None,
) -> Layout:
  """Returns the shapes of `pack` for the same arguments.

  Sequences of r_1 + ... + r_k <= n rows have at most (n + k (query_tile - 1)) / query_tile
  segments.

  Args:
    decoder: its `row_tile`, `query_tile` and `kv_split` are read, and its backend's tiles.
    page_size: positions of one page, a divisor of `kv_split`.
    rows_per_micro_batch: rows, a multiple of `row_tile`.
    max_num_seqs: maximum number of sequences in a micro-batch. Scratch pages and the gradient of
      attention always cost as much as this many sequences of maximum length. None allows twice as
      many as fit at that length.
    max_sequence_tokens: maximum tokens of one sequence; None allows what fits, which is
      rows_per_micro_batch + 1.

  Returns:
    Layout.

  Raises:
    ValueError: if a number is out of range, rows are not a multiple of `row_tile`, or pages do not
      fill a split exactly.
  """
  numerics, backend = decoder.numerics, decoder.backend
  if page_size < 1 or numerics.kv_split % page_size:
    raise ValueError(
      f"pack: got page_size={page_size}, expected a divisor of NumericsConfig.kv_split="
      f"{numerics.kv_split}; a split is read page by page, 16 is usual."
    )
  tile = numerics.row_tile
  if rows_per_micro_batch < 1 or rows_per_micro_batch % tile:
    below = rows_per_micro_batch // tile * tile
    raise ValueError(
      f"pack: got rows_per_micro_batch={rows_per_micro_batch}, expected a positive multiple of"
      f" NumericsConfig.row_tile={tile}; use {below + tile}."
    )
  if max_sequence_tokens is None:
    max_sequence_tokens = rows_per_micro_batch + 1
  if not 2 <= max_sequence_tokens <= rows_per_micro_batch + 1:
    raise ValueError(
      f"pack: got max_sequence_tokens={max_sequence_tokens}, expected between 2 and"
      f" rows_per_micro_batch + 1 = {rows_per_micro_batch + 1} (the last token needs no row); raise"
      " rows_per_micro_batch or lower max_sequence_tokens."
    )
  if max_num_seqs is None:
    max_num_seqs = max(1, 2 * rows_per_micro_batch // (max_sequence_tokens - 1))
  if max_num_seqs < 1:
    raise ValueError(
      f"pack: got max_num_seqs={max_num_seqs}, expected max_num_seqs >= 1; None derives it."
    )
  # A sequence has at least one row.
  max_num_seqs = min(max_num_seqs, rows_per_micro_batch)
  query_tile = numerics.query_tile
  segments = (rows_per_micro_batch + max_num_seqs * (query_tile - 1)) // query_tile
  segments = backend.whole_segments(segments)
  splits = -(-(max_sequence_tokens - 1) // numerics.kv_split)
  pages_per_sequence = splits * (numerics.kv_split // page_size)
  return Layout(
    num_rows=backend.whole_rows(rows_per_micro_batch),
    max_num_seqs=max_num_seqs,
    max_sequence_tokens=max_sequence_tokens,
    num_segments=segments,
    pages_per_sequence=pages_per_sequence,
    num_pages=1 + max_num_seqs * pages_per_sequence,
  )


def pack(
  groups: Sequence[RolloutGroup],
  advantages: ArrayLike,
  *,
  decoder: Decoder,
  page_size: int,
  rows_per_micro_batch: int,
  max_num_seqs: int | None = None,
  max_sequence_tokens: int | None = None,
  num_biases: int = 0,
  num_micro_batches: int | None = None,
) -> TrainBatch:
  """Packs rollouts into micro-batches, ordered by (group_index, member).

  Args:
    groups: in any order, with unique `group_index`.
    advantages: f32[b, g], row i for `groups[i]`, by member.
    decoder: see `layout`.
    page_size: see `layout`.
    rows_per_micro_batch: see `layout`.
    max_num_seqs: see `layout`.
    max_sequence_tokens: see `layout`.
    num_biases: e, entries of `SamplingRows.bias_ids`.
    num_micro_batches: m; None makes as many as needed. A larger value adds empty ones, so that m
      can stay the same from batch to batch.

  Returns:
    TrainBatch of NumPy arrays with leading m. `SamplingRows` has the request's parameters on loss
    rows and neutral ones (temperature 1, no filter, no bias, no grammar) elsewhere: a prompt token
    may lie outside its own request's filter, and its log-probability, although unused, should be
    finite.

  Raises:
    ValueError: if there are no groups; group indices repeat; advantages do not match the groups or
      are not finite; a sequence is too long or has no prompt or no completion; its
      log-probabilities are not one finite number per token; it has more logit biases than
      `num_biases`; or more micro-batches are needed than `num_micro_batches`. Also as `layout`.
  """
  shapes = layout(
    decoder=decoder,
    page_size=page_size,
    rows_per_micro_batch=rows_per_micro_batch,
    max_num_seqs=max_num_seqs,
    max_sequence_tokens=max_sequence_tokens,
  )
  ordered = _ordered(groups, advantages)
  for _, rollout, _ in ordered:
    _check_rollout(rollout, shapes, rows_per_micro_batch, num_biases)
  query_tile = decoder.numerics.query_tile
  shared_page_size = page_size if decoder.backend.traits.shares_pages_under_gradient else None
  micro_batches = _next_fit(
    [rollout for _, rollout, _ in ordered], shapes, rows_per_micro_batch, shared_page_size
  )
  num_needed = len(micro_batches)
  if num_micro_batches is not None and num_needed > num_micro_batches:
    raise ValueError(
      f"pack: got {len(ordered)} rollouts that need {num_needed} micro-batches, expected at most"
      f" num_micro_batches={num_micro_batches}; raise num_micro_batches, rows_per_micro_batch"
      f"={rows_per_micro_batch} or max_num_seqs={shapes.max_num_seqs}."
    )
  num_penalties = max((_num_penalties(rollout) for _, rollout, _ in ordered), default=0)
  batch = _empty(num_micro_batches or num_needed, shapes, num_biases, num_penalties)
  for m, members in enumerate(micro_batches):
    row, segment, width = 0, 0, shapes.pages_per_sequence
    for place, (index, owner, num_shared) in enumerate(members):
      _, rollout, advantage = ordered[index]
      first = num_shared * page_size
      positions = np.arange(first, _num_rows(rollout), dtype=np.int32)
      rows = slice(row, row + positions.size)
      _write_sequence(batch, (m, rows), rollout, first, index, advantage)

      page = 1 + place * width
      batch.tokens.positions[m, rows] = positions
      batch.tokens.slots[m, rows] = page * page_size + positions  # Consecutive pages.
      starts = np.arange(0, positions.size, query_tile, dtype=np.int32)
      segments = slice(segment, segment + starts.size)
      batch.tokens.segment_start[m, segments] = row + starts
      batch.tokens.segment_length[m, segments] = np.minimum(positions.size - starts, query_tile)
      pages = np.arange(page, page + width)
      pages[:num_shared] = 1 + owner * width + np.arange(num_shared)
      batch.tokens.page_table[m, segments] = pages
      row, segment = rows.stop, segments.stop
    batch.tokens.num_rows[m] = row
    batch.tokens.num_segments[m] = segment
    assert segment <= shapes.num_segments and len(members) <= shapes.max_num_seqs
  return batch


def unpack(values: ArrayLike, batch: TrainBatch) -> list[np.ndarray]:
  """Returns the rows of `values` for each rollout's generated tokens; the inverse of `pack`.

  `unpack(batch.targets, batch)` are the completions' tokens.

  Args:
    values: f32[m, n, ...] or another dtype, one entry per row.
    batch: result of `pack`.

  Returns:
    One array [t, ...] per rollout in (group, member) order, t its generated tokens.
  """
  values = np.asarray(values)
  mask = np.asarray(batch.loss_mask).ravel()
  index = np.asarray(batch.sequence_index).ravel()[mask]
  flat = values.reshape(mask.size, *values.shape[2:])[mask]
  order = np.argsort(index, kind="stable")
  bounds = np.searchsorted(index[order], np.arange(1, index.max(initial=0) + 1))
  return np.split(flat[order], bounds)


def _ordered(
  groups: Sequence[RolloutGroup], advantages: ArrayLike
) -> list[tuple[int, Rollout, np.float32]]:
  """Returns (group_index, rollout, advantage) by (group_index, member); raises if invalid."""
  values = np.asarray(advantages, np.float32)
  if not groups:
    raise ValueError("pack: got no groups, expected at least one; skip the step instead.")
  if values.ndim != 2 or values.shape[0] != len(groups):
    raise ValueError(
      f"pack: got advantages of shape {values.shape} for {len(groups)} groups, expected"
      " [groups, members]; compute them from the same groups."
    )
  if not values.shape[1]:
    raise ValueError(
      f"pack: got {len(groups)} group(s) without rollouts, expected at least one in each; leave"
      " them out."
    )
  indices = [group.group_index for group in groups]
  if len(set(indices)) != len(indices):
    twice = sorted({index for index in indices if indices.count(index) > 1})
    raise ValueError(
      f"pack: got group_index {twice} more than once, expected unique indices (they fix the order);"
      " number the groups of a step from 0."
    )
  ordered = []
  for i in sorted(range(len(groups)), key=lambda i: indices[i]):
    rollouts = groups[i].rollouts
    if len(rollouts) != values.shape[1]:
      raise ValueError(
        f"pack: got {len(rollouts)} rollouts in group_index {indices[i]}, expected"
        f" {values.shape[1]} as advantages of shape {values.shape} have; complete the group or"
        " leave it out."
      )
    if not np.isfinite(values[i]).all():
      member = int(np.flatnonzero(~np.isfinite(values[i]))[0])
      raise ValueError(
        f"pack: got advantage {values[i, member]} for group_index {indices[i]}, member {member},"
        " expected a finite number; check its reward."
      )
    ordered += [(indices[i], *pair) for pair in zip(rollouts, values[i], strict=True)]
  return ordered


def _check_rollout(
  rollout: Rollout, shapes: Layout, rows_per_micro_batch: int, num_biases: int
) -> None:
  """Raises if a rollout cannot be packed."""
  request, completion = rollout.request, rollout.completion
  name = f"pack: request {request.request_id!r}:"
  num_prompt, num_generated = len(request.prompt), len(completion.tokens)
  if not num_prompt or not num_generated:
    raise ValueError(
      f"{name} got {num_prompt} prompt and {num_generated} generated tokens, expected at least one"
      " of each; leave its group out."
    )
  if completion.finish_reason == "error":
    raise ValueError(
      f"{name} got a completion that ended with an error ({completion.error}), expected a regular"
      " sample; leave its group out."
    )
  if num_prompt + num_generated > shapes.max_sequence_tokens:
    raise ValueError(
      f"{name} got {num_prompt} prompt + {num_generated} generated tokens, expected at most"
      f" max_sequence_tokens={shapes.max_sequence_tokens} with rows_per_micro_batch="
      f"{rows_per_micro_batch} (a sequence never crosses a micro-batch); raise rows_per_micro_batch"
      f" (and max_sequence_tokens where set) to {num_prompt + num_generated - 1} rows or more, or"
      " lower SamplingParams.max_tokens."
    )
  for field, logprobs in (
    ("behaviour_logprobs", np.asarray(completion.behaviour_logprobs)),
    ("raw_logprobs", np.asarray(completion.raw_logprobs)),
  ):
    if logprobs.shape != (num_generated,) or not np.isfinite(logprobs).all():
      num_bad = int(np.sum(~np.isfinite(logprobs)))
      raise ValueError(
        f"{name} got {field} of shape {logprobs.shape} with {num_bad} values that are not finite,"
        f" expected {num_generated} finite numbers, one per generated token; use the values that"
        " the engine returned."
      )
  if len(request.sampling.logit_bias) > num_biases:
    raise ValueError(
      f"{name} got {len(request.sampling.logit_bias)} logit biases, expected at most"
      f" num_biases={num_biases}; raise num_biases."
    )


class _Place(NamedTuple):
  """A sequence in its micro-batch.

  Attributes:
    index: index of the rollout.
    owner: position, in the micro-batch, of the sequence that owns the shared pages.
    num_shared: number of shared pages.
  """

  index: int
  owner: int
  num_shared: int


def _next_fit(
  rollouts: Sequence[Rollout], shapes: Layout, rows_per_micro_batch: int, page_size: int | None
) -> list[list[_Place]]:
  """Returns the sequences of each micro-batch; no pages are shared if `page_size` is None."""
  micro_batches: list[list[_Place]] = [[]]
  used = owner = 0
  owned: tuple[int, ...] = ()  # Prompt of the owner.
  for index, rollout in enumerate(rollouts):
    places, prompt = micro_batches[-1], rollout.request.prompt
    num_shared = 0
    if page_size is not None and places:
      num_shared = _num_common(owned, prompt) // page_size
    rows = _num_rows(rollout) - num_shared * (page_size or 0)
    if used + rows > rows_per_micro_batch or len(places) == shapes.max_num_seqs:
      micro_batches.append(places := [])
      used, num_shared, rows = 0, 0, _num_rows(rollout)
    if not num_shared:
      owner, owned = len(places), prompt
    places.append(_Place(index, owner, num_shared))
    used += rows
  return micro_batches


def _num_common(owned: tuple[int, ...], prompt: tuple[int, ...]) -> int:
  """Returns the common prefix length of two prompts, at most all but the second's last token."""
  most = min(len(owned), len(prompt) - 1)
  if owned[:most] == prompt[:most]:
    return most
  return next(place for place in range(most) if owned[place] != prompt[place])


def _write_sequence(
  batch: TrainBatch,
  rows: tuple[int, slice],
  rollout: Rollout,
  first: int,
  index: int,
  advantage: np.float32,
) -> None:
  """Fills in the per-row fields of one sequence.

  `rows` is (micro-batch, rows of the sequence); the first row has position `first`.
  """
  m, span = rows
  request, completion = rollout.request, rollout.completion
  tokens = np.asarray((*request.prompt, *completion.tokens), np.int32)
  batch.tokens.tokens[rows] = tokens[first:-1]
  batch.targets[rows] = tokens[first + 1 :]
  batch.sequence_index[rows] = index
  batch.advantages[rows] = advantage

  generated = (m, slice(span.start + len(request.prompt) - 1 - first, span.stop))
  batch.loss_mask[generated] = True
  batch.behaviour_logprobs[generated] = completion.behaviour_logprobs
  batch.raw_logprobs[generated] = completion.raw_logprobs
  sampling = request.sampling
  batch.sampling.temperature[generated] = sampling.temperature
  batch.sampling.top_k[generated] = sampling.top_k
  batch.sampling.top_p[generated] = sampling.top_p
  batch.sampling.min_p[generated] = sampling.min_p
  if sampling.allowed_token_ranges:
    ranges = np.asarray(sampling.allowed_token_ranges[: len(completion.tokens)], np.int32)
    batch.sampling.low[generated], batch.sampling.high[generated] = ranges.T
  if sampling.has_penalties:
    fields = batch.sampling._asdict()
    along = penalties_ops.entries_along(sampling, request.prompt, completion.tokens)
    for row, found in enumerate(along, generated[1].start):
      penalties_ops.write(fields, (m, row), sampling, found)
  for e, (token, bias) in enumerate(sampling.logit_bias):
    batch.sampling.bias_ids[*generated, e] = token
    batch.sampling.bias_values[*generated, e] = bias


def _num_penalties(rollout: Rollout) -> int:
  """Returns the number of penalty entries per row of a rollout; 0 if it has no penalties."""
  request = rollout.request
  if not request.sampling.has_penalties:
    return 0
  count = penalties_ops.most_entries(
    request.sampling, len(request.prompt), len(rollout.completion.tokens)
  )
  return penalties_ops.width_for(count)


def _empty(m: int, shapes: Layout, num_biases: int, num_penalties: int) -> TrainBatch:
  """Returns m micro-batches of padding."""
  n, s, p = shapes.num_rows, shapes.num_segments, shapes.pages_per_sequence

  # Any: the records are typed as device arrays, but are filled in on the host first.
  def full(value: int, *shape: int, dtype: type = np.int32) -> Any:
    return np.full((m, *shape), value, dtype)

  return TrainBatch(
    tokens=TokenBatch(
      tokens=full(0, n),
      positions=full(0, n),
      slots=full(0, n),
      num_rows=full(0),
      segment_start=full(0, s),
      segment_length=full(0, s),
      page_table=full(0, s, p),
      num_segments=full(0),
    ),
    targets=full(0, n),
    loss_mask=full(False, n, dtype=np.bool_),
    sequence_index=full(-1, n),
    advantages=full(0, n, dtype=np.float32),
    behaviour_logprobs=full(0, n, dtype=np.float32),
    raw_logprobs=full(0, n, dtype=np.float32),
    sampling=SamplingRows(
      temperature=full(1, n, dtype=np.float32),
      top_k=full(0, n),
      top_p=full(1, n, dtype=np.float32),
      min_p=full(0, n, dtype=np.float32),
      bias_ids=full(-1, n, num_biases),
      bias_values=full(0, n, num_biases, dtype=np.float32),
      low=full(0, n),
      high=full(sampling_ops.NO_LIMIT, n),
      **(penalties_ops.empty((m, n), num_penalties) if num_penalties else {}),
    ),
  )


def _num_rows(rollout: Rollout) -> int:
  """Returns the rows of a sequence: one for every token but the last."""
  return len(rollout.request.prompt) + len(rollout.completion.tokens) - 1
