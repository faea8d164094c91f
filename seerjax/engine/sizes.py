"""Sizes of the engine: explicit settings, else derived from the model and free memory."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import jax

from seerjax import agreement, fields, host_memory, numerics as numerics_lib, parallel
from seerjax.engine import checks
from seerjax.kv.memory import KVSizes
from seerjax.kv.windows import PageKind
from seerjax.models import kv_layout
from seerjax.models.config import TransformerConfig
from seerjax.models.decoder import Decoder

# Share of the free memory at the engine's creation; the rest is for steps and for training.
PAGES_SHARE = 0.4
# Memory of one step's arrays, if the row buckets are derived from the model.
STEP_BYTES = 2**30
# Maximum rows of decode-only steps, and of steps that also prefill, if derived from the model.
DECODE_ROWS, PREFILL_ROWS = 64, 512
# Counted: number of f32 arrays of a step's rows, by features of the MLP and of the hidden rows.
MLP_ARRAYS, HIDDEN_ARRAYS = 3, 4
# Measured (docs/results/memory.md): number of f32 arrays of a step's rows by vocabulary size, if
# rows are not tiled.
LOGITS_ARRAYS = 8
# Steps for which a visit's results are allocated.
MAX_STEPS_PER_VISIT = 32
# Entries of a step's table of key copies per row of its bucket: a main path of 8 tokens with 3
# siblings each has 33 rows and 108 copies.
KEY_COPIES_PER_ROW = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
  """Sizes of the engine. None of them changes a bit of a response.

  Attributes:
    page_size: positions per page; divides `NumericsConfig.kv_split`.
    num_pages: pages of one instance, the reserved page included; 0 allocates enough for
      `max_num_seqs` full contexts, within a share of the free memory. Layers with a window have
      pages of their own (`page_counts`): as many, or fewer if the windows of twice `max_num_seqs`
      sequences need fewer; they take part in admission only where they are short.
    max_num_seqs: maximum running sequences of one instance; 0 takes the first row bucket, or fewer
      if the pages do not suffice (counted in full contexts if `reserved_tokens` is 0).
    max_model_len: maximum positions of one sequence, prompt and response; reduced if the pages hold
      less.
    reserved_tokens: response tokens, beyond the current ones, for which admission counts the memory
      of each request without chunks. Small values let more requests run at once. If responses grow
      longer and memory runs short, the newest requests are preempted and continue later, to the
      same bits; the oldest one always continues. 0 reserves up to `max_tokens`, so that no request
      is preempted.
    batch_size_buckets: maximum rows of one step, per instance; each bucket is one compiled program.
      () derives them from model and context (`derived_buckets`), never from free memory. A
      decode-only step uses the smallest bucket that fits. Arrays are whole tiles, at least two, of
      `NumericsConfig.row_tile` rows (`Engine.memory_plan` prints them); the bucket's rows are used,
      the others are padding.
    decode_steps_per_call: maximum decode steps, up to 32, on the devices before control returns to
      the host; 0 lets the backend decide, 1 returns after each step. A visit has one step while a
      prompt is prefilled, a draft verified, or a row has stop strings or a grammar. Larger values
      save host work; submission, admission, streaming and drafting are delayed by as much.
    enable_prefix_caching: whether pages are cached for requests with the same prefix.
    background_slack: share by which background requests (`Engine.add_request(is_background=True)`)
      may lengthen a step, by the table `Engine.step_times`; without a table, they get no row in
      steps with foreground requests.
    background_rows: maximum rows of background requests in one step, per instance, if there is no
      foreground request; 0 takes the first row bucket.
    pinned_pages: maximum pages held by `Chunks.pin`, per instance; 0 takes a quarter of the pages.
    release_kv_while_training: whether the pages' memory is freed during training and allocated
      again for the next rollouts.
  """

  page_size: int = 32
  num_pages: int = 0
  max_num_seqs: int = 0
  max_model_len: int = 1024
  reserved_tokens: int = 32
  batch_size_buckets: tuple[int, ...] = ()
  decode_steps_per_call: int = 0
  enable_prefix_caching: bool = True
  background_slack: float = 0.05
  background_rows: int = 0
  pinned_pages: int = 0
  release_kv_while_training: bool = False

  def __post_init__(self):
    slack = fields.at_least(0, "0.05 lets a step take 5 % longer for background requests")
    fields.check(self, background_slack=slack)
    for field, least, fix in (
      ("page_size", 1, "32 is usual"),
      ("num_pages", 0, "0 derives it from the free memory"),
      ("max_num_seqs", 0, "0 derives it from the free memory"),
      ("max_model_len", 2, "prompt and response need at least a token each; 1024 is usual"),
      ("reserved_tokens", 0, "32 is usual, 0 reserves whole responses"),
      ("background_rows", 0, "0 takes the first row bucket"),
      ("pinned_pages", 0, "0 takes a quarter of the pages"),
    ):
      checks.whole(f"EngineConfig.{field}", vars(self)[field], least, checks.MAX_INT32, fix)
    checks.whole(
      "EngineConfig.decode_steps_per_call",
      self.decode_steps_per_call,
      0,
      MAX_STEPS_PER_VISIT,
      "0 lets the backend decide, 1 returns after every step",
    )
    buckets = self.batch_size_buckets
    if list(buckets) != sorted(set(buckets)) or (
      buckets and not 0 < buckets[0] <= buckets[-1] < checks.MAX_INT32
    ):
      raise ValueError(
        f"EngineConfig.batch_size_buckets: got {buckets}, expected ascending positive row counts;"
        " (64,"
        " 512) is usual, () derives them from the model."
      )
    if buckets and buckets[-1] < self.max_num_seqs:
      raise ValueError(
        f"EngineConfig.batch_size_buckets: got at most {buckets[-1]} rows, expected at least"
        f" max_num_seqs={self.max_num_seqs} (each decodes one row per step); raise the last"
        " bucket."
      )


def require_whole_splits(config: EngineConfig, numerics: numerics_lib.NumericsConfig) -> None:
  """Refuses pages that do not fill splits exactly.

  Raises:
    ValueError: with both sizes.
  """
  if numerics.kv_split % config.page_size:
    raise ValueError(
      f"EngineConfig.page_size: got {config.page_size}, expected a divisor of"
      f" kv_split={numerics.kv_split}; a split is read page by page."
    )


def pages_for(num_tokens: int, page_size: int) -> int:
  """Returns the number of pages for `num_tokens` (at least 1) of prompt and response."""
  # The last sampled token is never read back, so it needs no position.
  return -(-(num_tokens - 1) // page_size)


def most_tokens(num_pages: int, page_size: int) -> int:
  """Returns the longest prompt and response, in tokens, for `num_pages`, one of them reserved."""
  return max(2, (num_pages - 1) * page_size + 1)


def held_by_pages(config: EngineConfig) -> str:
  """Returns the advice for an error if pages limit the context below its configured size."""
  return (
    f"raise EngineConfig.num_pages or free memory, as {config.num_pages - 1} pages of"
    f" {config.page_size} positions hold no more tokens"
  )


def context_of(
  config: EngineConfig, model: TransformerConfig, *, asked: EngineConfig
) -> checks.Context:
  """Returns the limit on one sequence, of sizes that were fitted to memory from those asked for."""
  positions, wanted = (min(one.max_model_len, model.max_model_len) for one in (config, asked))
  held = held_by_pages(config) if positions < wanted else ""
  return checks.Context(positions, model.max_model_len, held)


def next_tokens(config: EngineConfig, num_tokens: int, limit: int) -> int:
  """Returns the tokens, prompt included, up to which a request of `num_tokens` allocates pages.

  They suffice for at least one visit. `limit` is the maximum for the request.
  """
  return min(limit, num_tokens + max(config.decode_steps_per_call, config.page_size))


def expected_tokens(config: EngineConfig, num_tokens: int, limit: int) -> int:
  """Returns the tokens, prompt included, that admission counts for a request of `num_tokens`."""
  if not config.reserved_tokens:
    return limit
  ahead = min(limit, num_tokens + config.reserved_tokens)
  return max(next_tokens(config, num_tokens, limit), ahead)


def of_pages(config: EngineConfig, context: checks.Context, decoder: Decoder) -> KVSizes:
  """Returns the sizes of the pages; a row of their table is whole splits that hold one context."""
  split = decoder.numerics.kv_split
  width = -(-context.positions // split) * (split // config.page_size)
  kinds = map(
    PageKind,
    decoder.pages.windows,
    page_counts(config, decoder, num_pages=config.num_pages, max_num_seqs=config.max_num_seqs),
    kv_layout.entries_of(decoder),
  )
  reuses = config.enable_prefix_caching
  return KVSizes(tuple(kinds), config.page_size, split, width, reuses)


def page_counts(
  config: EngineConfig, decoder: Decoder, *, num_pages: int, max_num_seqs: int
) -> tuple[int, ...]:
  """Returns the number of pages of each kind (`PageLayout.windows`), the reserved ones included.

  The first kind has `num_pages`. A further kind has as many, unless the windows of twice
  `max_num_seqs` sequences and the rows of a step need fewer: requests that are paused, and cached
  prefixes, also hold such pages.
  """
  size, counts = config.page_size, [num_pages]
  for window in decoder.pages.windows[1:]:
    assert window is not None
    ahead = max(config.decode_steps_per_call, size)
    positions = window + decoder.numerics.kv_split + ahead
    of_step = -(-config.batch_size_buckets[-1] // size)
    needed = 1 + 2 * max_num_seqs * (-(-positions // size) + 1) + of_step
    counts.append(min(num_pages, needed))
  return tuple(counts)


def free_bytes(mesh: jax.sharding.Mesh) -> float:
  """Returns the free memory of one instance in bytes; infinite if it is unknown.

  CPU devices share the memory of the machine or of the control group (`host_memory`); other devices
  have their own. Processes that share the mesh use the minimum over all of them.
  """
  host_memory.give_back()  # Else what loading the weights left would count as used.
  device = next(one for one in mesh.devices.flat if one.process_index == jax.process_index())
  if device.platform == "cpu":
    return agreement.least(host_memory.free_bytes() / mesh.devices.size)
  stats = device.memory_stats() or {}
  if "bytes_limit" not in stats:
    return agreement.least(float("inf"))
  return agreement.least(float(stats["bytes_limit"] - stats.get("bytes_in_use", 0)))


def pages_that_fit(
  decoder: Decoder, *, page_size: int, memory_bytes: float, most: Sequence[float] = ()
) -> int:
  """Returns how many pages of all layers fit into `memory_bytes` (finite).

  `most` are the numbers of pages after which a kind of pages takes no more; () is no limit.
  """
  bytes_of = kind_bytes(decoder, page_size=page_size)
  growing = sorted(zip(most or [math.inf] * len(bytes_of), bytes_of, strict=True))
  left, count = memory_bytes, 0
  while True:
    of_all = sum(size for _, size in growing)
    limit, found = growing[0][0], count + int(left // of_all)
    if found < limit or len(growing) == 1:
      return found
    left, count = left - (limit - count) * of_all, int(limit)
    growing.pop(0)


def page_bytes(decoder: Decoder, *, page_size: int, tensor_parallel_size: int = 1) -> int:
  """Returns the bytes of one page of all layers, on all devices of an instance.

  Raises:
    ValueError: if pages do not fill splits exactly.
  """
  return sum(kind_bytes(decoder, page_size=page_size, tensor_parallel_size=tensor_parallel_size))


def pages_bytes(config: EngineConfig, decoder: Decoder, *, tensor_parallel_size: int = 1) -> int:
  """Returns the bytes of the pages of one instance, for sizes with all values filled in."""
  counts = page_counts(
    config, decoder, num_pages=config.num_pages, max_num_seqs=config.max_num_seqs
  )
  of_page = kind_bytes(
    decoder, page_size=config.page_size, tensor_parallel_size=tensor_parallel_size
  )
  return sum(count * size for count, size in zip(counts, of_page, strict=True))


def kind_bytes(
  decoder: Decoder, *, page_size: int, tensor_parallel_size: int = 1
) -> tuple[int, ...]:
  """Works like `page_bytes`, for the layers of each kind of pages."""
  make = functools.partial(
    kv_layout.empty_pages,
    decoder,
    num_pages=1,
    page_size=page_size,
    tensor_parallel_size=tensor_parallel_size,
  )
  page = jax.eval_shape(make)
  return tuple(
    sum(leaf.size * leaf.dtype.itemsize for i in entries for leaf in page[i])
    for entries in kv_layout.entries_of(decoder)
  )


def derived_buckets(
  decoder: Decoder,
  *,
  context: int,
  max_num_seqs: int = 0,
) -> tuple[int, ...]:
  """Returns the row buckets derived from a model and its context; they change no bit.

  Args:
    decoder: its shape, and whether its backend holds a step's logits all at once.
    context: maximum positions of a sequence.
    max_num_seqs: maximum running sequences, 0 if undecided.

  Returns:
    `DECODE_ROWS` and `PREFILL_ROWS`, or less: powers of two with arrays within `STEP_BYTES`, and no
    more than `max_num_seqs` full contexts can fill; the last one has a row for each sequence.
  """
  model = decoder.shape
  inner = max(kind.feed_forward.row_features for kind in model.layers)
  features = MLP_ARRAYS * inner + HIDDEN_ARRAYS * model.hidden_size
  if decoder.backend.traits.holds_all_logits:
    features += LOGITS_ARRAYS * model.vocab_size
  fitting = 1 << max(1, STEP_BYTES // (4 * features)).bit_length() - 1
  few = min(DECODE_ROWS, fitting)
  usable = 1 << ((max_num_seqs or few) * context - 1).bit_length()
  last = min(PREFILL_ROWS, fitting, usable)
  if max_num_seqs > last:
    last = 1 << (max_num_seqs - 1).bit_length()
  return (few, last) if few < last else (last,)


def with_buckets(config: EngineConfig, decoder: Decoder) -> EngineConfig:
  """Returns the config with its own row buckets, or with `derived_buckets` if it has none."""
  if config.batch_size_buckets:
    return config
  buckets = derived_buckets(
    decoder,
    context=min(config.max_model_len, decoder.shape.max_model_len),
    max_num_seqs=config.max_num_seqs,
  )
  return dataclasses.replace(config, batch_size_buckets=buckets)


def fitted(
  config: EngineConfig,
  decoder: Decoder,
  *,
  free_bytes: float,
) -> EngineConfig:
  """Returns the config with all derived values filled in.

  Args:
    config: sizes; explicit values are kept if memory can hold them.
    decoder: the model of the pages and steps.
    free_bytes: free memory of one instance.

  Raises:
    ValueError: if no page fits, or memory does not hold the explicit pages or rows.
  """
  config = with_buckets(config, decoder)
  steps = config.decode_steps_per_call or decoder.backend.traits.decode_steps_per_call
  config = dataclasses.replace(config, decode_steps_per_call=steps)
  per_context = -(-config.max_model_len // config.page_size)
  # Lower bound for a row: two arrays of hidden features, and its row of the page table.
  row_bytes = 4 * (2 * decoder.shape.hidden_size + per_context)
  if config.batch_size_buckets[-1] * row_bytes > free_bytes:
    raise ValueError(
      f"EngineConfig.batch_size_buckets: got {config.batch_size_buckets[-1]} rows of at least"
      f" {row_bytes} bytes,"
      f" expected no more than the free memory of {free_bytes / 2**20:.0f} MiB holds; lower the"
      " last bucket or EngineConfig.max_model_len."
    )
  most = config.max_num_seqs or config.batch_size_buckets[0]
  fitting_in = functools.partial(
    pages_that_fit,
    decoder,
    page_size=config.page_size,
    most=page_counts(config, decoder, num_pages=checks.MAX_INT32, max_num_seqs=most),
  )
  most_pages = checks.MAX_INT32
  if free_bytes < float("inf"):
    most_pages = fitting_in(memory_bytes=free_bytes)
  if config.num_pages > most_pages:
    raise ValueError(
      f"EngineConfig.num_pages: got {config.num_pages} pages of {config.page_size} positions,"
      f" expected at most {most_pages}, which the free memory of {free_bytes / 2**20:.0f} MiB"
      " holds; lower it, or set 0 to use what fits."
    )
  num_pages = config.num_pages
  if not num_pages:
    num_pages = most * per_context + 1
    if free_bytes < float("inf"):
      num_pages = min(num_pages, fitting_in(memory_bytes=PAGES_SHARE * free_bytes))
    if num_pages < 2:
      free = f"{free_bytes / 2**20:.0f} MiB"
      raise ValueError(
        f"EngineConfig.num_pages: got {free} of free memory, where {PAGES_SHARE:.0%} hold"
        f" {num_pages} pages, expected at least 2 pages of {config.page_size} positions; free"
        " memory, lower EngineConfig.page_size, or set EngineConfig.num_pages."
      )
  fitting = (num_pages - 1) // (1 if config.reserved_tokens else per_context)
  max_num_seqs = config.max_num_seqs or max(1, min(most, fitting))
  background_rows = config.background_rows or config.batch_size_buckets[0]
  if background_rows > config.batch_size_buckets[-1]:
    raise ValueError(
      f"EngineConfig.background_rows: got {background_rows}, expected at most"
      f" {config.batch_size_buckets[-1]}, the rows of the largest step; lower it, or raise the"
      " last entry"
      " of EngineConfig.batch_size_buckets."
    )
  return dataclasses.replace(
    config,
    num_pages=num_pages,
    max_num_seqs=max_num_seqs,
    max_model_len=min(config.max_model_len, most_tokens(num_pages, config.page_size)),
    background_rows=background_rows,
    pinned_pages=config.pinned_pages or num_pages // 4,
  )


def windows_described(config: EngineConfig, decoder: Decoder) -> str:
  """Returns the pages of layers with smaller windows as a part of a line; "" if there are none."""
  size = config.page_size
  counts = page_counts(
    config, decoder, num_pages=config.num_pages, max_num_seqs=config.max_num_seqs
  )
  of_page = kind_bytes(decoder, page_size=size)
  kinds = zip(decoder.pages.windows, counts, of_page, strict=True)
  return "".join(
    f", {count} pages for layers with a window of {window} ({num_bytes // size:,} of"
    f" {sum(of_page) // size:,} bytes a token)"
    for window, count, num_bytes in list(kinds)[1:]
  )


def described(
  config: EngineConfig,
  decoder: Decoder,
  *,
  data_parallel_size: int,
  allocated: tuple[Any, Any],
  context: checks.Context,
) -> str:
  """Returns a one-line summary of the allocated memory.

  Args:
    config: sizes.
    decoder: the model.
    data_parallel_size: number of instances of the engine.
    allocated: pages and weights, pytrees of arrays; the total counts replicas once.
    context: limit on one sequence, which is named if pages are the limit.
  """
  of_all = [sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in allocated]
  of_device = [parallel.bytes_a_device(tree) for tree in allocated]
  of_each = ""
  if of_all != of_device:
    mib = [f"{count / 2**20:.1f}" for count in of_device]
    of_each = f"; on each device {mib[0]} and {mib[1]} MiB"
  positions = (config.num_pages - 1) * config.page_size
  buckets = ", ".join(str(rows) for rows in config.batch_size_buckets)
  arrays = ", ".join(str(decoder.backend.whole_rows(rows)) for rows in config.batch_size_buckets)
  windows = windows_described(config, decoder)
  limit = ""
  if context.held_by_pages:
    limit = f"; requests of at most {context.positions:,} tokens; for more, {context.held_by_pages}"
  return (
    f"{data_parallel_size} instance(s), each with {config.num_pages} pages of {config.page_size}"
    f" positions ({positions:,} tokens of context){windows} and {config.max_num_seqs} sequences;"
    f" steps of {buckets} rows in arrays of {arrays}; {of_all[0] / 2**20:.1f} MiB of pages,"
    f" {of_all[1] / 2**20:.1f} MiB of weights{of_each}{limit}"
  )
