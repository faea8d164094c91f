"""A draft model's compiled program: reads new tokens, then drafts up to 16 tokens.

    unread rows -> forward -> head -> token -> forward -> head -> token ...          one while loop

Keys and values are in one contiguous cache, f[slots, ..., positions] in the layout of the backend's
pages: the pages of a slot are consecutive. The first iteration of the loop reads all tokens of the
requests that the draft has not seen; every other iteration reads the last drafted token. Row counts
and the number of iterations are traced, so there is one program per row bucket.

Tokens are sampled as by the target (`ops.sampling`): with the same noise, by seed and position, and
the same bias, filters and grammar. The draft is therefore correct wherever its distribution is
close enough to the target's, also at temperature 1.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from seerjax import numerics as numerics_lib
from seerjax.array_typing import Array, Float, Int, PRNGKeyArray
from seerjax.backends.tiled import Tiled
from seerjax.engine import runner as runner_lib
from seerjax.models import (
  config as model_config,
  decoder as decoder_lib,
  head,
  kv_layout,
  parameters,
  transformer,
)
from seerjax.models.decoder import Decoder
from seerjax.ops import sampling, tiles
from seerjax.types import SamplingRows, TokenBatch

MAX_STEPS = 16  # Maximum tokens of one draft.
MAX_WIDTH = 8  # Maximum ids per position.
# Positions of one cache page for backends that compute whole splits, valid or not.
SPLIT = 64


class DraftInputs(NamedTuple):
  """Inputs of one call (numpy, before the call). Row j of every request array is request j.

  Attributes:
    batch: unread rows, grouped by request; the last row of each is its last token.
    last_rows: i32[n], last row of each request.
    tables: i32[n, p], pages of each request's slot.
    sampling: parameters by request, without a mask; `low` and `high` are given below.
    low: i32[t, n], lowest allowed id, by position of the draft.
    high: i32[t, n], end (exclusive) of the allowed ids.
    seeds: u32[n], seeds of the requests.
    positions: i32[n], position of the first drafted token.
    most: i32[n], tokens to draft; 0 for padding.
    num_requests: i32[].
    num_steps: i32[], maximum of `most`; 0 only reads rows.
  """

  batch: TokenBatch
  last_rows: Int[Array, "n"]
  tables: Int[Array, "n p"]
  sampling: SamplingRows
  low: Int[Array, "t n"]
  high: Int[Array, "t n"]
  seeds: Array
  positions: Int[Array, "n"]
  most: Int[Array, "n"]
  num_requests: Int[Array, ""]
  num_steps: Int[Array, ""]


class _Drafting(NamedTuple):
  """State of the loop.

  Attributes:
    count: i32[], completed iterations.
    pages: pages of all slots.
    batch: rows of the next iteration.
    last_rows: i32[n], row to sample from for each request.
    ids: i32[t, n, w], drafted so far, most likely first; -1 for none.
  """

  count: Array
  pages: kv_layout.Pages
  batch: TokenBatch
  last_rows: Int[Array, "n"]
  ids: Array


def noisy_top_k(
  params: parameters.Params,
  hidden: Float[Array, "n d"],
  sampling_rows: SamplingRows,
  seeds: Array,
  positions: Int[Array, "n"],
  num_rows: Array,
  key: PRNGKeyArray,
  width: int,
  *,
  decoder: Decoder,
) -> Int[Array, "n w"]:
  """Returns the `width` ids with the largest processed logit plus noise, largest first.

  -1 marks ids that the grammar or a filter drops, and all ids of a row with non-finite logits.
  The first id is the one that `head.sample_and_score` samples. Uses the portable program on every
  backend.
  """
  tiled = Tiled(dataclasses.replace(decoder.numerics, backend="tiled"))
  weights = {
    "final_norm": params["final_norm"],
    "head": head.table_of(params, decoder),
    "key": jax.random.key_data(key),
  }

  def of_rows(weights: parameters.Params, rows: Any, one: Array) -> Array:
    hidden, sampling_rows, seeds, positions = rows
    logits = head.logits_rows(tiled, decoder.shape, None, weights, hidden, one)
    processed = sampling.processed_rows(logits, sampling_rows)
    noise = sampling.noise_rows(
      numerics_lib.wrap_key(weights["key"]),
      seeds,
      positions,
      sampling_rows.temperature > 0,
      decoder.shape.vocab_size,
    )
    noisy = jnp.where(processed > sampling.DROPPED, processed + noise, sampling.DROPPED)
    values, ids = lax.top_k(noisy, width)
    is_finite = jnp.all(jnp.isfinite(logits), axis=-1)[:, None]
    return jnp.where(is_finite & (values > sampling.DROPPED), ids, -1).astype(jnp.int32)

  whole = tiled.whole_rows(hidden.shape[0])
  rows = tiles.padded((hidden, seeds, positions), whole)
  rows = (rows[0], sampling.padded(sampling_rows, whole), *rows[1:])
  return tiled.map_rows(of_rows, weights, rows, num_rows)[: hidden.shape[0]]


@dataclasses.dataclass(frozen=True)
class DraftProgram:
  """The compiled programs of one draft model.

  Attributes:
    decoder: the draft as it was decided (`decoder_of`).
    context: positions of a slot.
    num_slots: slots of the cache.
    width: ids drafted per position; only the first is continued.
    batch_size_buckets: maximum rows of a call, ascending; one program each.
  """

  decoder: Decoder
  context: int
  num_slots: int
  width: int
  batch_size_buckets: tuple[int, ...]

  @property
  def page_size(self) -> int:
    """Positions of a page."""
    return self.decoder.numerics.kv_split

  @property
  def table_width(self) -> int:
    """Pages of a slot."""
    return -(-self.context // self.page_size)

  def pages_of(self, slot: int) -> range:
    """Returns the pages of a slot; page 0 receives the writes of padding."""
    first = 1 + slot * self.table_width
    return range(first, first + self.table_width)

  def empty_cache(self) -> kv_layout.Pages:
    """Returns a zeroed cache of all slots."""
    return kv_layout.empty_pages(
      self.decoder,
      num_pages=1 + self.num_slots * self.table_width,
      page_size=self.page_size,
    )

  def draft(
    self,
    params: parameters.Params,
    pages: kv_layout.Pages,
    inputs: DraftInputs,
    key: PRNGKeyArray,
  ) -> tuple[kv_layout.Pages, Array]:
    """Reads rows and drafts after them. `pages` is donated.

    Returns:
      (pages, ids i32[t, n, w]) on the device; -1 means no draft.
    """
    is_special = bool(sampling.is_special(inputs.sampling)[: int(inputs.num_requests)].any())
    is_plain = self.decoder.backend.traits.waits_for_predicates and not is_special
    words, layout = runner_lib.pack(jax.tree.map(lambda leaf: leaf[None], inputs))
    return self._program(params, pages, words[0], key, layout, is_plain)

  @functools.cached_property
  def _program(self) -> Any:
    num_traces = collections.Counter()

    def run(params, pages, words, key, layout, is_plain):
      num_traces[is_plain] += 1
      most = len(self.batch_size_buckets) + self.decoder.numerics.is_interpreted
      count = num_traces[is_plain]
      assert count <= most, (
        f"draft program: got trace {count}, expected one for each of {most} row buckets; an input"
        " changed its shape or type"
      )
      return self._drafted(params, pages, runner_lib.unpack(words, layout), key, is_plain)

    return jax.jit(run, static_argnums=(4, 5), donate_argnums=(1,))

  def _drafted(
    self,
    params: parameters.Params,
    pages: kv_layout.Pages,
    inputs: DraftInputs,
    key: PRNGKeyArray,
    is_plain: bool,
  ) -> tuple[kv_layout.Pages, Array]:
    batch, size = inputs.batch, self.page_size
    num_rows, num_segments = batch.tokens.shape[0], batch.segment_start.shape[0]
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    # For iterations after the first: segment j is row j, which is request j.
    segments = jnp.arange(num_segments, dtype=jnp.int32)
    of_segment = jnp.minimum(segments, num_rows - 1)

    def again(now: _Drafting) -> Array:
      # Rows are read even if nothing is drafted.
      return now.count < jnp.maximum(inputs.num_steps, 1)

    def turn(now: _Drafting) -> _Drafting:
      hidden, pages = transformer.forward(params, now.batch, now.pages, decoder=self.decoder)
      low = lax.dynamic_index_in_dim(inputs.low, now.count, keepdims=False)
      high = lax.dynamic_index_in_dim(inputs.high, now.count, keepdims=False)
      ids = self._sampled(
        params,
        hidden[now.last_rows],
        inputs.sampling._replace(low=low, high=high),
        inputs.seeds,
        inputs.positions + now.count,
        jnp.where(inputs.num_steps > 0, inputs.num_requests, 0),
        key,
        is_plain,
      )
      is_wanted = now.count < inputs.most
      ids = jnp.where(is_wanted[:, None], ids, -1)
      # The next token to read is at the position where it was drafted. Finished rows write page 0.
      is_read = (ids[:, 0] >= 0) & (now.count + 1 < inputs.most)
      positions = inputs.positions + now.count
      page = jnp.take_along_axis(inputs.tables, (positions // size)[:, None], 1, mode="clip")[:, 0]
      next_batch = TokenBatch(
        tokens=jnp.where(is_read, ids[:, 0], 0),
        positions=jnp.where(is_read, positions, 0),
        slots=jnp.where(is_read, page * size + positions % size, 0),
        num_rows=inputs.num_requests,
        segment_start=segments,
        segment_length=(is_read[of_segment] & (segments < inputs.num_requests)).astype(jnp.int32),
        page_table=inputs.tables[of_segment],
        num_segments=inputs.num_requests,
      )
      kept = lax.dynamic_update_index_in_dim(now.ids, ids, now.count, 0)
      return _Drafting(now.count + 1, pages, next_batch, rows, kept)

    nothing = jnp.full((MAX_STEPS, num_rows, self.width), -1, jnp.int32)
    begin = _Drafting(jnp.int32(0), pages, batch, inputs.last_rows, nothing)
    end = lax.while_loop(again, turn, begin)
    return end.pages, end.ids

  def _sampled(
    self,
    params: parameters.Params,
    hidden: Float[Array, "n d"],
    sampling_rows: SamplingRows,
    seeds: Array,
    positions: Int[Array, "n"],
    num_rows: Array,
    key: PRNGKeyArray,
    is_plain: bool,
  ) -> Int[Array, "n w"]:
    """Returns each row's ids; -1 if its logits are not finite."""
    if self.width > 1:
      return noisy_top_k(
        params, hidden, sampling_rows, seeds, positions, num_rows, key, self.width,
        decoder=self.decoder,
      )  # fmt: skip
    tokens, scores = head.sample_and_score(
      params,
      hidden,
      jnp.full(seeds.shape, -1, jnp.int32),
      sampling_rows,
      seeds,
      positions,
      num_rows,
      key,
      decoder=self.decoder.for_rows(is_plain=is_plain),
    )
    is_finite = jnp.isfinite(scores.raw_logprob) & jnp.isfinite(scores.entropy)
    return jnp.where(is_finite, tokens, -1)[:, None]


def decoder_of(
  target: numerics_lib.NumericsConfig, config: model_config.TransformerConfig, context: int
) -> Decoder:
  """Returns a draft as decided: the target's backend and dtype, one slab.

  Shapes that kernels do not support run on the portable path. On the native backend a slot is one
  page, since its handlers read only valid positions. Backends that compute whole splits get short
  ones.
  """
  numerics = dataclasses.replace(target, reduction_shards=1)
  if numerics.backend == "native":
    whole = 1 << (context - 1).bit_length()
    numerics = dataclasses.replace(numerics, row_tile=2, kv_split=whole)
  elif not numerics.uses_kernels:
    numerics = dataclasses.replace(numerics, row_tile=4, query_tile=2, slot_tile=4, kv_split=SPLIT)
  try:
    return decoder_lib.decide(config, numerics)
  except ValueError:
    plain = dataclasses.replace(numerics, backend="tiled", kv_split=SPLIT)
    return decoder_lib.decide(config, plain)
