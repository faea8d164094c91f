"""A drafter that runs a small model on the target's tokens.

    queries -> slots -> one compiled program (`draft_program`) -> paths -> the target verifies them

The draft samples each token like the target, with the target's noise, so its tokens are correct
wherever the two distributions are close. A draft with a distribution far from the target's is
more often accepted at a lower temperature. Of `TEMPERATURES` (factors on the request's own), the
one with most accepted tokens recently is used; the others are tried occasionally.

Drafts depend only on the queries and on the results of earlier drafts, never on a clock: every
process drafts the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

from absl import logging
import numpy as np

from seerjax import fields, numerics as numerics_lib
from seerjax.array_typing import PRNGKeyArray
from seerjax.engine.drafting import DraftQuery
from seerjax.models import parameters
from seerjax.models.loading import Model
from seerjax.ops import sampling
from seerjax.speculation import statistics
from seerjax.speculation.draft_program import (
  MAX_STEPS,
  MAX_WIDTH,
  DraftInputs,
  DraftProgram,
  decoder_of,
)
from seerjax.speculation.draft_slots import Slots
from seerjax.types import SamplingParams, SamplingRows, TokenBatch

Paths = list[tuple[int, ...]]

# Factors on the request's temperature for drafting; 0 is greedy.
TEMPERATURES = (1.0, 0.5, 0.0)
# One draft in this many uses another temperature than the best one.
DRAFTS_PER_TRIAL = 16
# Number of drafts at a temperature after which its statistics are halved.
HALF_LIFE = 256
# Optimistic initial acceptance of each temperature, so that each is tried.
HOPED = 4.0
MAX_SLOTS = 4096
# Greedy and unfiltered: noise and sort are skipped for a tile if all its rows are like this.
_UNUSED = SamplingParams(temperature=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModelConfig:
  """Configuration of a draft model. It never affects results.

  Attributes:
    length: tokens of the main path, N.
    width: ids per position: the most likely one continues the main path, the others end side paths.
    num_slots: number of requests with a cache slot; each slot has a whole context of positions.
    batch_size_buckets: maximum rows of a call, ascending; one compiled program each. If more rows
      must be read, separate calls read them; the last bucket has at least one row per slot.
    learn: whether a run trains the draft between steps, on the policy's completions.
    learning_rate: rate of that training; at ten times the default, nano's draft got worse.
  """

  length: int = 4
  width: int = 1
  num_slots: int = 64
  batch_size_buckets: tuple[int, ...] = (8, 64, 256)
  learn: bool = False
  learning_rate: float = 1e-4

  def __post_init__(self):
    fields.check(
      self,
      length=fields.between(1, MAX_STEPS, "4 is usual"),
      width=fields.between(1, MAX_WIDTH, "1 drafts a chain"),
      num_slots=fields.between(1, MAX_SLOTS, "the number of concurrent requests is usual"),
      learning_rate=fields.positive("1e-4 is usual"),
    )
    buckets = self.batch_size_buckets
    if (
      list(buckets) != sorted(set(buckets))
      or not buckets
      or buckets[0] < 1
      or (buckets[-1] < self.num_slots)
    ):
      raise ValueError(
        f"DraftModelConfig.batch_size_buckets: got {buckets}, expected ascending numbers of rows,"
        " the last"
        f" at least num_slots={self.num_slots}; {DraftModelConfig.batch_size_buckets} is usual."
      )


@dataclasses.dataclass
class DraftCounters:
  """Counters of a draft model.

  Attributes:
    calls: calls of the compiled program.
    rows_read: rows of request tokens that were read.
    steps: sequential drafting steps of all calls; the requests of a call share them.
    drafts: requests with a draft, summed over visits.
    side_paths: siblings, each the end of a side path.
    without_slot: requests without a slot because others took all of them, summed over visits.
    unreadable: requests with a token outside the draft's embedding, summed over visits.
    not_finite: drafts cut because the draft's logits were not finite.
  """

  calls: int = 0
  rows_read: int = 0
  steps: int = 0
  drafts: int = 0
  side_paths: int = 0
  without_slot: int = 0
  unreadable: int = 0
  not_finite: int = 0


class _Piece(NamedTuple):
  """Rows of one request in a call.

  Attributes:
    query: query of the request.
    slot: slot of the request.
    first: position of the first row.
    count: number of rows.
  """

  query: DraftQuery
  slot: int
  first: int
  count: int


class _Temperatures:
  """Selects the drafting temperature by accepted tokens."""

  def __init__(self):
    # Decayed numbers of drafts and accepted tokens, by temperature.
    self._drafts = [1.0] * len(TEMPERATURES)
    self._accepted = [HOPED] * len(TEMPERATURES)
    self._num_chosen = 0

  def choose(self) -> int:
    """Returns the index of the next draft's temperature."""
    self._num_chosen += 1
    trial, is_trial = divmod(self._num_chosen, DRAFTS_PER_TRIAL)
    if not is_trial:
      return trial % len(TEMPERATURES)
    means = [a / n for a, n in zip(self._accepted, self._drafts)]
    return means.index(max(means))  # Ties: the highest temperature, which is the target's.

  def observe(self, index: int, num_accepted: int) -> None:
    """Records the accepted tokens of a draft at a temperature."""
    keep = 0.5 ** (1 / HALF_LIFE)
    self._drafts[index] = keep * self._drafts[index] + 1
    self._accepted[index] = keep * self._accepted[index] + num_accepted


class ModelDrafter:
  """Drafts with a model: a chain, or a comb of width `width`; see `engine.drafting.Drafter`.

  Attributes:
    config: configuration of the draft model.
    length: tokens of the main path; may be set between visits, from 0 (no drafts) to 16.
    acceptance: acceptance statistics.
    counters: counters.
  """

  def __init__(
    self,
    draft: Model,
    *,
    context: int,
    key: PRNGKeyArray | None = None,
    config: DraftModelConfig = DraftModelConfig(),
    acceptance: statistics.Acceptance | None = None,
    program: DraftProgram | None = None,
  ):
    """Creates a drafter.

    Args:
      draft: shape, weights and numerics, as returned by `draft_loading.load_draft`.
      context: maximum positions of a sequence.
      key: the target's sampling key; None is that of seed 0, an engine's default.
      config: configuration of the draft model.
      acceptance: collects statistics; a new record if None.
      program: compiled program, shared between drafters of equal sizes; a new one if None.

    Raises:
      ValueError: if the draft has too few positions or several slabs, or `program` has other sizes.
    """
    if draft.config.max_model_len < context:
      raise ValueError(
        f"ModelDrafter: got a draft of {draft.config.max_model_len} positions for sequences of"
        f" {context}, expected at least as many; lower EngineConfig.max_model_len, or take another"
        " draft."
      )
    key = numerics_lib.key(0) if key is None else key
    numerics_lib.require_key(key, what="ModelDrafter.key")
    self.config, self.length = config, config.length
    self.acceptance = statistics.Acceptance() if acceptance is None else acceptance
    if draft.numerics.reduction_shards != 1:
      raise ValueError(
        f"ModelDrafter: got a draft with {draft.numerics.reduction_shards} slabs, expected 1,"
        " because it runs on one device; load it with draft_loading.load_draft."
      )
    own = DraftProgram(
      decoder=decoder_of(draft.numerics, draft.config, context),
      context=context,
      num_slots=config.num_slots,
      width=config.width,
      batch_size_buckets=config.batch_size_buckets,
    )
    self.program = own if program is None else program
    if self.program != own:
      raise ValueError(
        f"ModelDrafter.program: got a program for {self.program}, expected one for {own}; share a"
        " program only between drafters of the same sizes."
      )
    self._params, self._key = draft.params, key
    self._pages = self.program.empty_cache()
    self._has_said = False
    self.begin_anew()

  @property
  def params(self) -> parameters.Params:
    """The draft's weights."""
    return self._params

  def begin_anew(self) -> None:
    """Discards all drafting state, as after measuring; keeps `acceptance`."""
    self.counters, self.slots = DraftCounters(), Slots(self.config.num_slots)
    self._temperatures = _Temperatures()
    # Temperature index of each request's last draft; None for greedy requests.
    self._drawn: dict[str, int | None] = {}

  def update_weights(self, params: parameters.Params) -> None:
    """Replaces the draft's weights; all tokens are read again."""
    self._params = params
    self.slots.forget_all()

  # Called by the engine.

  def draft(self, queries: Sequence[DraftQuery]) -> Sequence[Paths]:
    """Returns the paths of each query, the main one first; () if nothing is drafted."""
    lengths, widths = [self.length] * len(queries), [self.config.width] * len(queries)
    return self.draft_up_to(queries, lengths, widths)

  def draft_up_to(
    self, queries: Sequence[DraftQuery], lengths: Sequence[int], widths: Sequence[int]
  ) -> Sequence[Paths]:
    """Returns drafts with a length and a width for each query, overriding `length` and `config`.

    Args:
      queries: queries of the requests.
      lengths: tokens of each main path, at most 16; requests with 0 are not read.
      widths: ids per position, at most `config.width`.
    """
    self._drawn.clear()
    asked = [place for place, length in enumerate(lengths) if length > 0]
    if not asked:
      return ()
    places, pieces = self._with_slots([queries[place] for place in asked])
    places = [asked[place] for place in places]
    if not places:
      return ()
    pieces = self._read_ahead(pieces)
    most = [min(lengths[place], queries[place].max_draft) for place in places]
    temperatures = [self._temperature(piece.query) for piece in pieces]
    ids = self._run(self._inputs(pieces, most, temperatures))
    self.counters.steps += max(most)
    paths: list[Paths] = [[] for _ in queries]
    for row, (place, piece, count) in enumerate(zip(places, pieces, most)):
      main, siblings = _main_and_siblings(ids[:count, row, : widths[place]].tolist())
      paths[place] = _comb(main, siblings, piece.query.max_draft)
      # The last drafted token was not read.
      self.slots.tell(piece.slot, piece.query.tokens, piece.first, main[: count - 1])
      self.counters.drafts += bool(main)
      self.counters.side_paths += max(len(paths[place]) - 1, 0)
      if len(main) < count:
        self._say_not_finite()
    return paths

  def observe(self, request_id: str, group_id: str, num_drafted: int, num_accepted: int) -> None:
    """Records the result of the path with the most accepted tokens."""
    self.acceptance.add(num_drafted, num_accepted)
    index = self._drawn.pop(request_id, None)
    if index is not None:
      self._temperatures.observe(index, num_accepted)

  def finish(self, request_id: str, group_id: str, tokens: Sequence[int], num_prompt: int) -> None:
    """Frees the slot of a finished request."""
    self.slots.free(request_id)

  # Internals.

  def _with_slots(self, queries: Sequence[DraftQuery]) -> tuple[list[int], list[_Piece]]:
    """Returns the indices of the queries that can be drafted for, and the rows to read for each."""
    places = self.slots.with_slots([query.request_id for query in queries])
    self.counters.without_slot += len(queries) - len(places)
    slots = self.slots.take([queries[place].request_id for place in places])
    found = []
    for place, slot in zip(places, slots):
      query = queries[place]
      first = self.slots.num_known(slot, query.tokens)
      # Ids beyond the draft's table are the target's padding, which is sampled very rarely.
      if max(query.tokens[first:]) < self.program.decoder.shape.vocab_size:
        found.append((place, _Piece(query, slot, first, len(query.tokens) - first)))
    self.counters.unreadable += len(places) - len(found)
    return [place for place, _ in found], [piece for _, piece in found]

  def _temperature(self, query: DraftQuery) -> float:
    """Chooses and returns the temperature of the request's draft."""
    own = query.sampling.temperature
    self._drawn[query.request_id] = index = self._temperatures.choose() if own > 0 else None
    return 0.0 if index is None else own * TEMPERATURES[index]

  def _read_ahead(self, pieces: list[_Piece]) -> list[_Piece]:
    """Reads rows that exceed one call; returns the remaining rows, at least one per request."""
    while sum(piece.count for piece in pieces) > self.config.batch_size_buckets[-1]:
      room, now, left = self.config.batch_size_buckets[-1], [], []
      for piece in pieces:
        count = min(piece.count - 1, room)
        first, room = piece.first + count, room - count
        if count:
          now.append(piece._replace(count=count))
          self.slots.tell(piece.slot, piece.query.tokens[:first], piece.first, ())
        left.append(piece._replace(first=first, count=piece.count - count))
      self._run(self._inputs(now, [0] * len(now), [0.0] * len(now)))
      pieces = left
    return pieces

  def _run(self, inputs: DraftInputs) -> np.ndarray:
    """Runs the program; returns i32[t, n, w]."""
    self.counters.calls += 1
    self.counters.rows_read += int(inputs.batch.num_rows)
    self._pages, ids = self.program.draft(self._params, self._pages, inputs, self._key)
    return np.asarray(ids)

  def _inputs(
    self, pieces: Sequence[_Piece], most: Sequence[int], temperatures: Sequence[float]
  ) -> DraftInputs:
    """Returns the arrays of a call that drafts up to `most` tokens each, at `temperatures`."""
    program, backend = self.program, self.program.decoder.backend
    size, query_tile = program.page_size, program.decoder.numerics.query_tile
    total = sum(piece.count for piece in pieces)
    bucket = next(bucket for bucket in program.batch_size_buckets if bucket >= total)
    num_rows, num_segments = backend.whole_rows(bucket), backend.whole_segments(bucket)
    # Any: the records are typed as device arrays, but are filled in on the host first.
    zeros: Any = np.zeros
    tokens, positions, slots, last_rows, first = (zeros(num_rows, np.int32) for _ in range(5))
    lengths, starts = zeros(num_segments, np.int32), zeros(num_segments, np.int32)
    seeds, limits = zeros(num_rows, np.uint32), zeros(num_rows, np.int32)
    segment_tables = zeros((num_segments, program.table_width), np.int32)
    tables = zeros((num_rows, program.table_width), np.int32)
    row = segment = 0
    for index, (query, slot, begin, count) in enumerate(pieces):
      rows, where = slice(row, row + count), np.arange(begin, begin + count, dtype=np.int32)
      pages = np.asarray(program.pages_of(slot), np.int32)
      tokens[rows], positions[rows] = query.tokens[begin : begin + count], where
      slots[rows] = pages[where // size] * size + where % size
      in_rows = np.arange(0, count, query_tile, dtype=np.int32)
      own = slice(segment, segment + len(in_rows))
      starts[own], lengths[own] = row + in_rows, np.minimum(count - in_rows, query_tile)
      segment_tables[own] = tables[index] = pages
      row, segment = row + count, segment + len(in_rows)
      last_rows[index], first[index] = row - 1, begin + count
      seeds[index], limits[index] = query.seed, most[index]
    batch: dict[str, Any] = dict(
      tokens=tokens,
      positions=positions,
      slots=slots,
      num_rows=np.int32(row),
      segment_start=starts,
      segment_length=lengths,
      page_table=segment_tables,
      num_segments=np.int32(segment),
    )
    queries = [piece.query for piece in pieces]
    low, high = _ranges(queries, most, num_rows)
    fields: dict[str, Any] = dict(
      last_rows=last_rows,
      tables=tables,
      sampling=_sampling_rows(queries, temperatures, num_rows)._replace(
        low=low.max(axis=0), high=high.min(axis=0)
      ),
      low=low,
      high=high,
      seeds=seeds,
      positions=first,
      most=limits,
      num_requests=np.int32(len(pieces)),
      num_steps=np.int32(max(most, default=0)),
    )
    return DraftInputs(batch=TokenBatch(**batch), **fields)

  def _say_not_finite(self) -> None:
    self.counters.not_finite += 1
    if not self._has_said:
      self._has_said = True
      logging.warning(
        "ModelDrafter: got logits that are not finite from the draft model, expected finite ones;"
        " nothing is drafted there, and responses do not change: load other weights, or use another"
        " draft."
      )


def _main_and_siblings(found: list[list[int]]) -> tuple[tuple[int, ...], list[list[int]]]:
  """Returns the main path, and siblings by position; it ends where nothing was drafted."""
  count = next((place for place, ids in enumerate(found) if ids[0] < 0), len(found))
  main = tuple(ids[0] for ids in found[:count])
  return main, [[sibling for sibling in ids[1:] if sibling >= 0] for ids in found[:count]]


def _comb(main: tuple[int, ...], siblings: list[list[int]], most: int) -> Paths:
  """Returns the main path plus one path per sibling; with at most `most` new tokens."""
  if not main:
    return []
  teeth = [(*main[:place], one) for place, ones in enumerate(siblings) for one in ones]
  return [main, *teeth[: most - len(main)]]


# Cached, because the same requests need the same columns in consecutive steps.
@functools.lru_cache(maxsize=64)
def _sampling_columns(params: tuple[SamplingParams, ...], size: int) -> SamplingRows:
  """Returns sampling parameters padded to `size` rows (numpy); read-only."""
  return sampling.sampling_rows([*params, *[_UNUSED] * (size - len(params))])


def _sampling_rows(
  queries: Sequence[DraftQuery], temperatures: Sequence[float], size: int
) -> SamplingRows:
  """Returns sampling parameters with the given temperatures, padded to `size` rows."""
  found = _sampling_columns(tuple(query.sampling for query in queries), size)
  drawn: Any = np.zeros(size, np.float32)
  drawn[: len(temperatures)] = temperatures
  return found._replace(temperature=drawn)


@functools.lru_cache(maxsize=64)
def _whole_vocabulary(size: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns `_ranges` without a grammar; read-only."""
  low = np.zeros((MAX_STEPS, size), np.int32)
  return low, np.full((MAX_STEPS, size), sampling.NO_LIMIT, np.int32)


def _ranges(
  queries: Sequence[DraftQuery], most: Sequence[int], size: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the id ranges that grammars allow at each drafted position: (low, high), i32[t, n]."""
  low, high = _whole_vocabulary(size)
  if not any(query.sampling.allowed_token_ranges for query in queries):
    return low, high
  low, high = low.copy(), high.copy()
  for row, (query, count) in enumerate(zip(queries, most)):
    if query.sampling.allowed_token_ranges and count:
      place = len(query.tokens) - query.num_prompt
      own = np.asarray(query.sampling.allowed_token_ranges[place : place + count], np.int32)
      low[: len(own), row], high[: len(own), row] = own.T
  return low, high
