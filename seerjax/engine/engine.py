"""Prompts in, tokens out: continuous batching over pages.

    submit -> waiting -> (pages free?) -> running: rows of every step -> finished -> poll

A step takes one row from every sequence that decodes and fills what is left with chunks of prompts;
a decoding sequence and a prompt's chunk are the same thing, positions whose keys are not written
yet. When a chunk reaches the sequence's end, its last row is sampled. Nothing here can change what
is said (DESIGN: the contract), only when.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from seerjax import numerics as numerics_lib, parallel
from seerjax.array_typing import PRNGKeyArray
from seerjax.engine import pages as pages_lib, runner as runner_lib, sizes
from seerjax.engine.sizes import EngineConfig
from seerjax.models import tokenizer as tokenizer_lib, transformer
from seerjax.ops import sampling
from seerjax.types import Completion, Request, SamplingParams, SamplingRows, TokenBatch

# Beyond any logit, and far from what overflows a float32 or means `sampling.DROPPED`.
MAX_ABS_BIAS = 1e6


class Update(NamedTuple):
  """What one step said of one request: new tokens, their text, why it ended ("" if it did not)."""

  request_id: str
  tokens: tuple[int, ...]
  text: str
  finish_reason: str


@dataclasses.dataclass
class Counters:
  """What happened since the engine was made.

  Attributes:
    steps: programs run.
    rows: rows computed.
    sampled_tokens: tokens said.
    reused_tokens: positions found in memory instead of computed.
    page_copies: partial pages copied before they were written.
    preemptions: sequences that lost their pages.
    waits: steps in which somebody waited for pages.
  """

  steps: int = 0
  rows: int = 0
  sampled_tokens: int = 0
  reused_tokens: int = 0
  page_copies: int = 0
  preemptions: int = 0
  waits: int = 0


@dataclasses.dataclass(eq=False)
class _Sequence:
  """A request on its way. `tokens` is prompt and answer; `num_written` of them have their keys."""

  request: Request
  tokens: list[int]
  instance: int
  stream: tokenizer_lib.TextStream | None
  sampling: SamplingRows  # One row.
  pages: list[int] = dataclasses.field(default_factory=list)
  # i32[p], `pages` as a row of the page table.
  page_row: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
  num_written: int = 0
  logprobs: list[float] = dataclasses.field(default_factory=list)
  raw_logprobs: list[float] = dataclasses.field(default_factory=list)
  text: str = ""
  streamed: int = 0

  @property
  def num_prompt(self) -> int:
    return len(self.request.prompt)

  @property
  def is_prefilling(self) -> bool:
    return self.num_written < self.num_prompt - 1 or not self.pages


class _Work(NamedTuple):
  """`count` rows of a sequence from its first unwritten position on, at `first_row` of the step."""

  sequence: _Sequence
  count: int
  first_row: int


class Engine:
  """Continuous batching of requests over one mesh.

  Requests may be submitted at any time, also between steps. Call `step` until `num_unfinished` is
  zero and take what is done from `poll`; `generate` does just that.
  """

  def __init__(
    self,
    model: transformer.TransformerConfig,
    params: transformer.Params,
    *,
    numerics: numerics_lib.NumericsConfig,
    config: EngineConfig = EngineConfig(),
    key: PRNGKeyArray,
    tokenizer: tokenizer_lib.Tokenizer | None = None,
    mesh: jax.sharding.Mesh | None = None,
    policy_version: int = 0,
    runner: runner_lib.Runner | None = None,
  ):
    """Makes an engine.

    Args:
      model: shape of the model.
      params: weights in compute dtype (`transformer.compute_params`).
      numerics: what decides bits.
      config: sizes.
      key: sampling key of the run; only folded, so that it may be reused for equal text.
      tokenizer: needed for stop strings and text.
      mesh: `parallel.make_mesh`; one device if None.
      policy_version: of `params`.
      runner: compiled programs to share with other engines of the same model, numerics and mesh;
        its own if None.

    Raises:
      ValueError: if slabs do not divide the model, pages do not fill splits exactly, `runner` was
        made for something else, or free memory does not hold one context.
    """
    transformer.check_shards(model, numerics)
    if config.page_size < 1 or numerics.kv_split % config.page_size:
      raise ValueError(
        f"EngineConfig.page_size: got {config.page_size}, expected a divisor of"
        f" kv_split={numerics.kv_split}; a split is read page by page."
      )
    self.model = model
    self.numerics = numerics
    self.tokenizer = tokenizer
    self.counters = Counters()
    if runner is None:
      mesh = parallel.make_mesh() if mesh is None else mesh
      runner = runner_lib.Runner(model, numerics, mesh, len(config.row_buckets))
    elif (runner.config, runner.numerics) != (model, numerics) or mesh not in (None, runner.mesh):
      raise ValueError(
        f"Engine.runner: got one of {runner.numerics} for a {runner.config.family} model of"
        f" {runner.config.num_layers} layers on {runner.mesh.size} device(s), expected the engine's"
        " own model, numerics and mesh; share a Runner only between equals."
      )
    self._runner = runner
    self._params = self._runner.place_params(params)
    config = sizes.fitted(
      config, model, numerics, free_bytes=sizes.free_bytes(runner.mesh)
    )
    self.config = config
    self.policy_version = policy_version
    self._key = key
    self._pages = self._runner.empty_pages(config.num_pages, config.page_size)
    self._pools = [
      pages_lib.PagePool(config.num_pages, config.page_size)
      for _ in range(self._runner.num_instances)
    ]
    splits = -(-config.max_context // numerics.kv_split)
    self._table_width = splits * (numerics.kv_split // config.page_size)
    self._waiting: list[collections.deque[_Sequence]] = [
      collections.deque() for _ in self._pools
    ]
    self._running: list[list[_Sequence]] = [[] for _ in self._pools]
    self._copies: list[list[tuple[int, int]]] = [[] for _ in self._pools]
    # Greedy and unfiltered: a tile is spared the noise and the sort if all its rows are.
    self._unused_row = sampling.sampling_rows([SamplingParams(temperature=0.0)])
    self._live: dict[str, _Sequence] = {}
    self._group_instance: dict[str, int] = {}
    self._finished: list[Completion] = []

  @property
  def num_unfinished(self) -> int:
    """Requests submitted and not finished."""
    return len(self._live)

  def submit(self, request: Request) -> None:
    """Adds a request.

    Raises:
      ValueError: if it is empty, already here, too long for the context, can never fit in memory,
        or asks for what this engine or model does not have.
    """
    what = f"request {request.request_id!r}"
    if request.request_id in self._live:
      raise ValueError(f"{what}: got an id that is still running, expected a new one; rename it.")
    if not request.prompt:
      raise ValueError(f"{what}: got an empty prompt, expected one token or more; add a BOS token.")
    low, high = min(request.prompt), max(request.prompt)
    if low < 0 or high >= self.model.vocab_size:
      raise ValueError(
        f"{what}: got token ids from {low} to {high}, expected 0 to {self.model.vocab_size - 1};"
        " encode with this model's tokenizer."
      )
    if not 0 <= request.seed < 2**32:
      raise ValueError(f"{what}: got seed {request.seed}, expected 0 <= seed < 2**32; fold it.")
    context = min(self.config.max_context, self.model.max_context)
    if len(request.prompt) + 1 > context:
      raise ValueError(
        f"{what}: got a prompt of {len(request.prompt)} tokens, expected fewer than the context of"
        f" {context}; shorten it or raise EngineConfig.max_context (the model's is"
        f" {self.model.max_context})."
      )
    if len(request.prompt) + request.sampling.max_tokens > context:
      raise ValueError(
        f"{what}: got {len(request.prompt)} prompt tokens and max_tokens"
        f" {request.sampling.max_tokens}, expected a sum of at most the context of {context}; lower"
        " SamplingParams.max_tokens or raise EngineConfig.max_context."
      )
    needed, usable = self._pages_for(request), self.config.num_pages - 1
    if needed > usable:
      raise ValueError(
        f"{what}: got a need of {needed} pages of {self.config.page_size} positions, expected at"
        f" most {usable}; it can never fit: raise EngineConfig.num_pages or lower max_tokens."
      )
    if request.sampling.stop_strings and self.tokenizer is None:
      raise ValueError(
        f"{what}: got stop_strings without a tokenizer, expected Engine(tokenizer=...); use"
        " stop_token_ids or pass one."
      )
    for token, bias in request.sampling.logit_bias:
      if not 0 <= token < self.model.vocab_size or not abs(bias) <= MAX_ABS_BIAS:
        raise ValueError(
          f"{what}: got logit_bias ({token}, {bias}), expected a token id from 0 to"
          f" {self.model.vocab_size - 1} and a bias from -{MAX_ABS_BIAS:g} to {MAX_ABS_BIAS:g}; the"
          " lowest forbids a token."
        )
    row = sampling.sampling_rows([request.sampling])  # Refuses what cannot become a row.
    instance = self._instance_for(request)
    stream = None if self.tokenizer is None else self.tokenizer.stream()
    sequence = _Sequence(request, list(request.prompt), instance, stream, row)
    self._live[request.request_id] = sequence
    self._waiting[instance].append(sequence)

  def step(self) -> list[Update]:
    """Runs one step of every instance; returns what was said."""
    self._admit()
    work = [self._plan(instance) for instance in range(len(self._pools))]
    if not any(work):
      return []
    inputs, sampled = self._inputs(work)
    self._pages, tokens, scores = self._runner.step(self._params, self._pages, inputs, self._key)
    for chunks in work:
      for chunk in chunks:
        chunk.sequence.num_written += chunk.count
        self.counters.rows += chunk.count
    self.counters.steps += 1
    self._remember_prompts(work)
    tokens, scores = jax.device_get((tokens, scores))
    updates = []
    for instance, sequences in enumerate(sampled):
      for place, sequence in enumerate(sequences):
        updates.append(
          self._accept(
            sequence,
            int(tokens[instance, place]),
            float(scores.logprob[instance, place]),
            float(scores.raw_logprob[instance, place]),
          )
        )
    return updates

  def poll(self) -> list[Completion]:
    """Returns the requests finished since the last call, in the order they finished."""
    finished, self._finished = self._finished, []
    return finished

  def generate(
    self,
    requests: Iterable[Request],
    *,
    on_step: Callable[[list[Update]], None] | None = None,
  ) -> list[Completion]:
    """Runs requests to their ends and returns them in the order given.

    Args:
      requests: submitted at once, all or none.
      on_step: called with each step's updates, for streaming and progress. It may cancel requests;
        they are left out of what is returned.

    Raises:
      ValueError: as `submit`.
    """
    requests = list(requests)
    others = self.poll()  # Of earlier requests, which may have had the same ids.
    wanted: dict[str, Completion | None] = {}
    try:
      for request in requests:
        self.submit(request)
        wanted[request.request_id] = None
    except ValueError:
      for request_id in wanted:
        self.cancel(request_id)
      self._finished = others
      raise
    while any(request_id in self._live for request_id in wanted):
      updates = self.step()
      if on_step is not None:
        on_step(updates)
      for completion in self.poll():
        if completion.request_id in wanted:
          wanted[completion.request_id] = completion
        else:
          others.append(completion)
    self._finished.extend(others)
    return [completion for completion in wanted.values() if completion is not None]

  def set_params(self, params: transformer.Params, policy_version: int) -> None:
    """Replaces the weights and drops every page written with the old ones.

    Raises:
      ValueError: if requests are running, whose tokens would come from two policies.
    """
    if self._live:
      raise ValueError(
        f"Engine.set_params: got {len(self._live)} unfinished requests, expected none (a completion"
        " comes from one policy_version); finish or cancel them."
      )
    self._params = self._runner.place_params(params)
    self.policy_version = policy_version
    for pool in self._pools:
      pool.forget_all()

  def preempt(self, request_id: str) -> None:
    """Drops a request's pages; it waits first in line and prefills again to the same bits.

    Raises:
      ValueError: if there is no such request.
    """
    sequence = self._sequence(request_id, "preempt")
    if sequence not in self._running[sequence.instance]:
      return  # It waits already and holds nothing.
    self._running[sequence.instance].remove(sequence)
    self._drop_pages(sequence)
    self._waiting[sequence.instance].appendleft(sequence)
    self.counters.preemptions += 1

  def cancel(self, request_id: str) -> None:
    """Forgets a request.

    Raises:
      ValueError: if there is no such request.
    """
    sequence = self._sequence(request_id, "cancel")
    running, waiting = self._running[sequence.instance], self._waiting[sequence.instance]
    (running if sequence in running else waiting).remove(sequence)
    self._drop_pages(sequence)
    self._leave(request_id)

  def plan(self) -> str:
    """Returns one line that says what was allocated."""
    page_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._pages))
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._params))
    positions = (self.config.num_pages - 1) * self.config.page_size
    return (
      f"{len(self._pools)} instance(s), each {self.config.num_pages} pages of"
      f" {self.config.page_size} positions ({positions:,} tokens of context) and"
      f" {self.config.max_sequences} sequences; {page_bytes / 2**20:.1f} MiB of pages,"
      f" {weight_bytes / 2**20:.1f} MiB of weights"
    )

  # How requests become rows.

  def _sequence(self, request_id: str, what: str) -> _Sequence:
    if request_id not in self._live:
      raise ValueError(
        f"Engine.{what}: got request {request_id!r}, expected one of the {len(self._live)} that are"
        " unfinished; it may be done already (poll)."
      )
    return self._live[request_id]

  def _pages_for(self, request: Request) -> int:
    # The last token sampled is never read back, so it needs no position.
    positions = len(request.prompt) + request.sampling.max_tokens - 1
    return -(-positions // self.config.page_size)

  def _instance_for(self, request: Request) -> int:
    """Groups stay together, so that they share their prompt; else the fewest requests decide."""
    group = request.group_id
    if group in self._group_instance:
      return self._group_instance[group]
    loads = [
      len(waiting) + len(running)
      for waiting, running in zip(self._waiting, self._running, strict=True)
    ]
    instance = int(np.argmin(loads))
    if group:
      self._group_instance[group] = instance
    return instance

  def _admit(self) -> None:
    """Gives pages to waiting sequences, first come first served, all they can ever need."""
    for instance, pool in enumerate(self._pools):
      waiting, running = self._waiting[instance], self._running[instance]
      prefilling = {s.request.group_id for s in running if s.is_prefilling and s.request.group_id}
      held_back: list[_Sequence] = []
      while waiting and len(running) < self.config.max_sequences:
        sequence = waiting[0]
        if self.config.reuse_prefixes and sequence.request.group_id in prefilling:
          held_back.append(waiting.popleft())  # A sibling is writing the prompt they share.
          continue
        hit = pages_lib.PrefixHit((), None, 0)
        if self.config.reuse_prefixes:
          hit = pool.find(sequence.tokens[:-1])
        for page in hit.pages:
          pool.hold(page)
        if hit.copy_from is not None:
          pool.hold(hit.copy_from)
        needed = self._pages_for(sequence.request) - len(hit.pages)
        if needed > pool.num_available and hit.copy_from is not None:
          # The page to copy may be the very one that is missing: with nobody running, waiting for
          # another would be forever.
          pool.release(hit.copy_from)
          hit = pages_lib.PrefixHit(hit.pages, None, len(hit.pages) * self.config.page_size)
        if needed > pool.num_available:
          for page in hit.pages:
            pool.release(page)
          self.counters.waits += 1
          break
        waiting.popleft()
        fresh = pool.take(needed)
        sequence.pages = [*hit.pages, *fresh]
        sequence.page_row = np.zeros(self._table_width, np.int32)
        sequence.page_row[: len(sequence.pages)] = sequence.pages
        sequence.num_written = hit.num_tokens
        if hit.copy_from is not None:
          self._copies[instance].append((hit.copy_from, fresh[0]))
          self.counters.page_copies += 1
          # Nothing is written before this step's copies, so the source may be let go already.
          pool.release(hit.copy_from)
        self.counters.reused_tokens += hit.num_tokens
        running.append(sequence)
        if sequence.is_prefilling and sequence.request.group_id:
          prefilling.add(sequence.request.group_id)
      waiting.extendleft(reversed(held_back))

  def _plan(self, instance: int) -> list[_Work]:
    """Shares a step's rows out: one for all that decode, the rest to prompts in order."""
    running = self._running[instance]
    budget = self.config.row_buckets[-1]
    pending = [(sequence, len(sequence.tokens) - sequence.num_written) for sequence in running]
    spare = budget - sum(1 for _, count in pending if count == 1)
    work, row = [], 0
    for sequence, count in pending:
      if count > 1:
        count = min(count, spare)
        spare -= count
      if count:
        work.append(_Work(sequence, count, row))
        row += count
    return work

  def _inputs(
    self, work: Sequence[Sequence[_Work]]
  ) -> tuple[runner_lib.StepInputs, list[list[_Sequence]]]:
    """Returns the step's arrays and, by instance, the sequences that are sampled, in order."""
    num_rows = max(sum(chunk.count for chunk in chunks) for chunks in work)
    bucket = next(size for size in self.config.row_buckets if size >= num_rows)
    parts, sampled = [], []
    for instance, chunks in enumerate(work):
      part, sequences = self._instance_inputs(chunks, bucket, self._copies[instance])
      self._copies[instance] = []
      parts.append(part)
      sampled.append(sequences)
    return jax.tree.map(lambda *leaves: np.stack(leaves), *parts), sampled

  def _instance_inputs(
    self, chunks: Sequence[_Work], bucket: int, copies: Sequence[tuple[int, int]]
  ) -> tuple[runner_lib.StepInputs, list[_Sequence]]:
    tile, size, width = self.numerics.query_tile, self.config.page_size, self._table_width
    most = self.config.max_sequences
    # Any: the records are typed as device arrays, and these are filled in on the host first.
    zeros: Any = np.zeros
    int32: Any = np.int32
    tokens, positions, slots = (zeros(bucket, np.int32) for _ in range(3))
    starts, segment_lengths = zeros(bucket, np.int32), zeros(bucket, np.int32)
    table = zeros((bucket, width), np.int32)
    sample_rows, sample_positions = zeros(most, np.int32), zeros(most, np.int32)
    seeds = zeros(most, np.uint32)
    sampled: list[_Sequence] = []
    num_segments = num_rows = 0
    for sequence, count, row in chunks:
      first = sequence.num_written
      if count == 1:  # Nearly all chunks; the general case below costs ten times as much.
        tokens[row], positions[row] = sequence.tokens[first], first
        slots[row] = sequence.pages[first // size] * size + first % size
        starts[num_segments], segment_lengths[num_segments] = row, 1
        table[num_segments] = sequence.page_row
        num_segments += 1
      else:
        rows = slice(row, row + count)
        where = np.arange(first, first + count, dtype=np.int32)
        tokens[rows] = sequence.tokens[first : first + count]
        positions[rows] = where
        slots[rows] = sequence.page_row[where // size] * size + where % size
        in_chunk = np.arange(0, count, tile, dtype=np.int32)
        segments = slice(num_segments, num_segments + len(in_chunk))
        starts[segments] = row + in_chunk
        segment_lengths[segments] = np.minimum(count - in_chunk, tile)
        table[segments] = sequence.page_row[None, :]
        num_segments += len(in_chunk)
      num_rows += count
      if first + count == len(sequence.tokens):
        sample_rows[len(sampled)] = row + count - 1
        sample_positions[len(sampled)] = len(sequence.tokens)
        seeds[len(sampled)] = sequence.request.seed
        sampled.append(sequence)
    batch = TokenBatch(
      tokens=tokens,
      positions=positions,
      slots=slots,
      num_rows=int32(num_rows),
      segment_start=starts,
      segment_length=segment_lengths,
      page_table=table,
      num_segments=int32(num_segments),
    )
    copy_rows = zeros((most, 2), np.int32)
    copy_rows[: len(copies)] = np.asarray(copies, np.int32).reshape(-1, 2)
    inputs = runner_lib.StepInputs(
      batch=batch,
      sample_rows=sample_rows,
      sampling=self._sampling_rows(sampled),
      seeds=seeds,
      positions=sample_positions,
      num_samples=int32(len(sampled)),
      copies=copy_rows,
      num_copies=int32(len(copies)),
    )
    return inputs, sampled

  def _sampling_rows(self, sampled: Sequence[_Sequence]) -> SamplingRows:
    rows = [sequence.sampling for sequence in sampled]
    rows += [self._unused_row] * (self.config.max_sequences - len(rows))
    columns: Any = (np.concatenate(column) for column in zip(*rows, strict=True))
    return SamplingRows(*columns)

  def _remember_prompts(self, work: Sequence[Sequence[_Work]]) -> None:
    if not self.config.reuse_prefixes:
      return
    for instance, chunks in enumerate(work):
      for sequence, count, _ in chunks:
        # Once, in the step that wrote the prompt's last position.
        if sequence.num_written - count < sequence.num_prompt <= sequence.num_written:
          self._pools[instance].remember(sequence.request.prompt, sequence.pages)

  # What becomes of a sampled token.

  def _accept(
    self, sequence: _Sequence, token: int, logprob: float, raw_logprob: float
  ) -> Update:
    sequence.tokens.append(token)
    sequence.logprobs.append(logprob)
    sequence.raw_logprobs.append(raw_logprob)
    self.counters.sampled_tokens += 1
    params = sequence.request.sampling
    reason = ""
    if token in params.stop_token_ids:
      reason = "stop"
    elif len(sequence.tokens) - sequence.num_prompt == params.max_tokens:
      reason = "length"
    if sequence.stream is not None:
      sequence.text += sequence.stream.push(token)
      if reason:
        sequence.text += sequence.stream.finish()
      cut = _first_stop(sequence.text, params.stop_strings)
      if cut is not None:
        sequence.text, reason = sequence.text[:cut], "stop"
    text = self._new_text(sequence, reason)
    if reason:
      self._finish(sequence, reason)
    return Update(sequence.request.request_id, (token,), text, reason)

  def _new_text(self, sequence: _Sequence, reason: str) -> str:
    """Text to stream: what might still become a stop string is held back."""
    end = len(sequence.text)
    if not reason:
      end -= max((len(stop) - 1 for stop in sequence.request.sampling.stop_strings), default=0)
    text = sequence.text[sequence.streamed : max(end, sequence.streamed)]
    sequence.streamed += len(text)
    return text

  def _finish(self, sequence: _Sequence, reason: str) -> None:
    request = sequence.request
    if self.config.reuse_prefixes:
      written = sequence.tokens[: sequence.num_written]
      self._pools[sequence.instance].remember(written, sequence.pages)
    self._running[sequence.instance].remove(sequence)
    self._drop_pages(sequence)
    self._leave(request.request_id)
    self._finished.append(
      Completion(
        request_id=request.request_id,
        tokens=tuple(sequence.tokens[sequence.num_prompt :]),
        behaviour_logprobs=np.asarray(sequence.logprobs, np.float32),
        raw_logprobs=np.asarray(sequence.raw_logprobs, np.float32),
        text=sequence.text,
        finish_reason=reason,
        policy_version=self.policy_version,
      )
    )

  def _leave(self, request_id: str) -> None:
    del self._live[request_id]
    if not self._live:
      self._group_instance.clear()

  def _drop_pages(self, sequence: _Sequence) -> None:
    for page in sequence.pages:
      self._pools[sequence.instance].release(page)
    sequence.pages = []
    sequence.num_written = 0


def _first_stop(text: str, stop_strings: Sequence[str]) -> int | None:
  """Returns where the first stop string begins, None if there is none."""
  found = [place for stop in stop_strings if (place := text.find(stop)) >= 0]
  return min(found, default=None)


__all__ = ["Counters", "Engine", "EngineConfig", "Update"]

