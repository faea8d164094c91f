"""Prompts in, tokens out: continuous batching over pages.

    submit -> waiting -> (pages free?) -> running: rows of every step -> finished -> poll
                 ^                            |
                 +---- resume <- paused <-----+  at the end of a chunk of the answer

A step takes one row from every sequence that decodes and fills what is left with pieces of prompts;
a decoding sequence and a piece of a prompt are the same thing, positions whose keys are not written
yet. When a piece reaches the sequence's end, its last row is sampled; behind it may stand drafted
tokens, which are sampled in the same step and kept as far as they are what was sampled. Nothing
here can change what is said (DESIGN: the contract), only when.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
import itertools

from absl import logging
import jax
import numpy as np

from seerjax import numerics as numerics_lib, parallel
from seerjax.array_typing import PRNGKeyArray
from seerjax.engine import batching, checks, drafting, runner as runner_lib, sizes
from seerjax.engine.counters import Counters
from seerjax.engine.drafting import Drafter, DraftQuery, verify
from seerjax.engine.kv import prefix_index
from seerjax.engine.kv.memory import Memory
from seerjax.engine.kv.pool import KVPool
from seerjax.engine.sequence import DraftPath, ScheduledRows, SequenceState, StepOutput
from seerjax.engine.sizes import EngineConfig
from seerjax.models import tokenizer as tokenizer_lib, transformer, weights
from seerjax.ops import sampling, tiles
from seerjax.types import Completion, Request

# Beyond any logit, and far from what overflows a float32 or means `sampling.DROPPED`.
MAX_ABS_BIAS = 1e6


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
    drafter: Drafter | None = None,
    kv_pool: KVPool | None = None,
  ):
    """Makes an engine.

    Args:
      model: shape of the model.
      params: weights in compute dtype (`transformer.compute_params`).
      numerics: what decides bits.
      config: sizes.
      key: sampling key of the run (`numerics.key`); only folded, so that it may be reused for equal
        text.
      tokenizer: needed for stop strings and text.
      mesh: `parallel.make_mesh`; one device if None.
      policy_version: of `params`.
      runner: compiled programs to share with other engines of the same model, numerics and mesh;
        its own if None.
      drafter: guesses tokens that are then verified together; None verifies nothing.
      kv_pool: where paused requests' keys go when their pages are needed; a default one if None.

    Raises:
      ValueError: if slabs do not divide the model, weights are not laid out for it in the compute
        dtype or not finite, the key is not of `numerics.key`'s kind, pages do not fill splits
        exactly, `runner` was made for something else, or free memory does not hold one context.
    """
    numerics = transformer.numerics_for(model, numerics)
    numerics_lib.require_key(key, what="Engine.key")
    if config.page_size < 1 or numerics.kv_split % config.page_size:
      raise ValueError(
        f"EngineConfig.page_size: got {config.page_size}, expected a divisor of"
        f" kv_split={numerics.kv_split}; a split is read page by page."
      )
    config = sizes.with_buckets(config, model, numerics)
    self.model = model
    self.numerics = numerics
    self.tokenizer = tokenizer
    self.drafter = drafter
    kv_pool = KVPool() if kv_pool is None else kv_pool
    self.counters = Counters(host=kv_pool.host, store=kv_pool.store)
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
    self._params = self._placed(params, "Engine.params")
    config = sizes.fitted(
      config, model, numerics, free_bytes=sizes.free_bytes(runner.mesh)
    )
    self.config = config
    # Positions of one sequence at most: beyond its model's, none is ever asked for.
    self._context = min(config.max_context, model.max_context)
    self.policy_version = policy_version
    self._key = key
    splits = -(-self._context // numerics.kv_split)
    self._table_width = splits * (numerics.kv_split // config.page_size)
    self.memory = Memory(
      self._runner.empty_pages(config.num_pages, config.page_size),
      self._runner.page_moves,
      num_pages=config.num_pages,
      page_size=config.page_size,
      table_width=self._table_width,
      reuse_prefixes=config.reuse_prefixes,
      kv_pool=kv_pool,
      counters=self.counters,
    )
    self._pools = self.memory.pools
    self._waiting: list[collections.deque[SequenceState]] = [
      collections.deque() for _ in self._pools
    ]
    self._running: list[list[SequenceState]] = [[] for _ in self._pools]
    self._copies: list[list[tuple[int, int]]] = [[] for _ in self._pools]
    self._sources: list[list[int]] = [[] for _ in self._pools]  # Of those copies, held.
    self._paused: dict[str, None] = {}  # In the order they paused.
    self._live: dict[str, SequenceState] = {}
    self._group_instance: dict[str, int] = {}
    self._finished: list[Completion] = []
    self._updates: list[StepOutput] = []  # Of a step that is not over.
    # Whom a step is busy with, and how many tokens it had before.
    self._at: tuple[SequenceState, int] | None = None

  @property
  def num_unfinished(self) -> int:
    """Requests submitted and not finished."""
    return len(self._live)

  @property
  def num_instances(self) -> int:
    """Instances of the mesh."""
    return len(self._pools)

  def submit(
    self,
    request: Request,
    *,
    resume_from: Completion | None = None,
    instance: int | None = None,
    chunk_tokens: int | None = None,
  ) -> None:
    """Adds a request.

    Args:
      request: to be answered.
      resume_from: the beginning of its answer, of the same request by the same weights; the answer
        continues behind it, and its keys are computed again.
      instance: where it runs; None keeps groups together, else takes the emptiest.
      chunk_tokens: pause after this many tokens, which is all that memory is reserved for; None
        answers to the end.

    Raises:
      ValueError: if it is empty, already here, too long for the context, can never fit in memory,
        or asks for what this engine or model does not have; if `resume_from` is of another
        policy, or over already.
    """
    what = f"request {request.request_id!r}"
    self.check(request)
    if request.request_id in self._live:
      raise ValueError(f"{what}: got an id that is still running, expected a new one; rename it.")
    self._check_chunk(what, chunk_tokens)
    if instance is not None:
      self._check_instance(what, instance)
    if resume_from is not None:
      checks.resume_from(
        request,
        resume_from,
        policy_version=self.policy_version,
        vocab_size=self.model.vocab_size,
        tokenizer=self.tokenizer,
      )
    row = sampling.sampling_rows([request.sampling])
    if instance is None:
      instance = self._instance_for(request)
    stream = None if self.tokenizer is None else self.tokenizer.stream()
    sequence = SequenceState(request, list(request.prompt), instance, stream, row, limit=0)
    if resume_from is not None:
      self._continue_from(sequence, resume_from)
    sequence.extend(chunk_tokens)
    self._take_pages()
    self._live[request.request_id] = sequence
    self._waiting[instance].append(sequence)

  def check(self, request: Request) -> None:
    """Refuses what this engine could never answer.

    Raises:
      ValueError: as `submit`, of the request itself.
    """
    what = f"request {request.request_id!r}"
    if not request.prompt:
      raise ValueError(f"{what}: got an empty prompt, expected one token or more; add a BOS token.")
    checks.tokens_of(what, request.prompt, self.model.vocab_size)
    checks.tokens_of(
      f"{what}, stop_token_ids", request.sampling.stop_token_ids, self.model.vocab_size
    )
    if not 0 <= request.seed < 2**32:
      raise ValueError(f"{what}: got seed {request.seed}, expected 0 <= seed < 2**32; fold it.")
    context = self._context
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
    needed = self.pages_for(len(request.prompt) + request.sampling.max_tokens)
    usable = self.config.num_pages - 1
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
    highest = max((high for _, high in request.sampling.allowed), default=0)
    if highest > self.model.vocab_size:
      raise ValueError(
        f"{what}: got a grammar that allows ids up to {highest - 1}, expected at most"
        f" {self.model.vocab_size - 1}; write SamplingParams.allowed for this model's vocabulary."
      )
    for token, bias in request.sampling.logit_bias:
      if not 0 <= token < self.model.vocab_size or not abs(bias) <= MAX_ABS_BIAS:
        raise ValueError(
          f"{what}: got logit_bias ({token}, {bias}), expected a token id from 0 to"
          f" {self.model.vocab_size - 1} and a bias from -{MAX_ABS_BIAS:g} to {MAX_ABS_BIAS:g}; the"
          " lowest forbids a token."
        )
    sampling.sampling_rows([request.sampling])  # Refuses what cannot become a row.

  def step(self) -> list[StepOutput]:
    """Runs one step of every instance; returns what was said.

    What a request meets in it ends that request, with finish_reason "error" and the reason, and the
    others go on. What is nobody's (a device that fails, Ctrl-C) is raised; then all pages are taken
    back, and the next step goes on from what was said, to the same bits. A drafter that raises or
    drafts what are no tokens is not asked again, and a warning says so: drafts change no bit.
    """
    self._at = None
    try:
      self._step()
    except BaseException as error:
      at, self._at = self._at, None
      self._start_over(at)
      is_nobodys = at is None or at[0].request.request_id not in self._live
      if at is None or is_nobodys or not isinstance(error, Exception):
        raise
      self._fail(at[0], at[1], error)
    updates, self._updates = self._updates, []
    return updates

  def _step(self) -> None:
    self._admit()
    work = [self._plan(instance) for instance in range(len(self._pools))]
    if not any(work):
      return
    work = self._drafted(work)
    self.memory.restore()
    try:
      inputs = self._inputs(work)
    except Exception:
      self._at = self._culprit(work)
      raise
    self.memory.pages, tokens, scores = self._runner.step(
      self._params, self.memory.pages, inputs, self._key
    )
    self.counters.steps += 1
    self._remember_prompts(work)  # On the host, while the device computes.
    sampled = jax.device_get((tokens, scores.logprob, scores.raw_logprob))
    columns = [part.tolist() for part in sampled]
    for instance, pieces in enumerate(work):
      place = 0
      for piece in pieces:
        self.counters.rows += piece.num_rows
        num_samples = piece.num_samples
        sequence = piece.sequence
        sequence.num_written += piece.count
        if num_samples:
          mine = slice(place, place + num_samples)
          place += num_samples
          self._at = before = (sequence, len(sequence.tokens))
          try:
            update = self._take(piece, *(column[instance][mine] for column in columns))
          except Exception as error:
            self._fail(*before, error)
          else:
            self._updates.append(update)
    self._at = None

  def poll(self) -> list[Completion]:
    """Returns the requests finished since the last call, in the order they finished."""
    finished, self._finished = self._finished, []
    return finished

  def generate(
    self,
    requests: Iterable[Request],
    *,
    on_step: Callable[[list[StepOutput]], None] | None = None,
  ) -> list[Completion]:
    """Runs requests to their ends and returns them in the order given.

    Args:
      requests: submitted at once, all or none.
      on_step: called with each step's updates, for streaming and progress. It may cancel requests;
        they are left out of what is returned.

    Raises:
      ValueError: as `submit`.
    """
    if isinstance(requests, Request):
      raise ValueError(
        "Engine.generate: got one Request, expected several of them; write generate([request])."
      )
    requests = list(requests)
    others = self.poll()  # Of earlier requests, which may have had the same ids.
    wanted: dict[str, Completion | None] = {}
    try:
      for request in requests:
        self.submit(request)
        wanted[request.request_id] = None
      while any(request_id in self._live for request_id in wanted):
        updates = self.step()
        if on_step is not None:
          on_step(updates)
        for completion in self.poll():
          if completion.request_id in wanted:
            wanted[completion.request_id] = completion
          else:
            others.append(completion)
    except BaseException:  # Also what `on_step` raises, and Ctrl-C: nothing is left behind.
      for request_id in wanted:
        if request_id in self._live:
          self.cancel(request_id)
      others += [one for one in self._finished if one.request_id not in wanted]
      self._finished = []
      raise
    finally:
      self._finished.extend(others)
    return [completion for completion in wanted.values() if completion is not None]

  def set_params(self, params: transformer.Params, policy_version: int) -> None:
    """Replaces the weights and drops every page written with the old ones.

    Raises:
      ValueError: if requests are running, whose tokens would come from two policies, or if weights
        are not the model's in the numerics' layout and dtype, or not finite; the old ones stay.
    """
    checks.whole("Engine.set_params: policy_version", policy_version, 0, None, "count updates")
    if self._live:
      raise ValueError(
        f"Engine.set_params: got {len(self._live)} unfinished requests, expected none (a completion"
        " comes from one policy_version); finish or cancel them."
      )
    self._params = self._placed(params, "Engine.set_params: params")
    self.policy_version = policy_version
    self.memory.forget_all()

  def _placed(self, params: transformer.Params, what: str) -> transformer.Params:
    """Returns weights on the mesh; refuses others than the fingerprint names."""
    weights.check(params, self.model, self.numerics, dtype=self.numerics.dtype, what=what)
    numerics_lib.require_finite(
      params, what=what, remedy="nothing may be sampled from them: go back to an earlier checkpoint"
    )
    return self._runner.place_params(params)

  def poll_paused(self) -> list[str]:
    """Returns the requests whose chunk has ended, in that order; they hold their pages."""
    return list(self._paused)

  def pause(self, request_id: str) -> None:
    """Ends a request's chunk now; it keeps its pages.

    Raises:
      ValueError: if there is no such request.
    """
    sequence = self._sequence(request_id, "pause")
    if request_id in self._paused:
      return
    running = self._running[sequence.instance]
    (running if sequence in running else self._waiting[sequence.instance]).remove(sequence)
    self._paused[request_id] = None

  def resume(
    self, request_id: str, *, chunk_tokens: int | None = None, instance: int | None = None
  ) -> None:
    """Lets a paused request go on for another chunk, once its memory is there.

    Args:
      request_id: of a paused request.
      chunk_tokens: as for `submit`.
      instance: where; None stays. A request that still has pages elsewhere loses them and computes
        them again (`migrate` takes them along); one that was spilled comes back there.

    Raises:
      ValueError: if there is no such request or instance, or it is not paused.
    """
    sequence = self._paused_sequence(request_id, "resume")
    self._check_chunk(f"Engine.resume of {request_id!r}", chunk_tokens)
    if instance is not None:
      self._check_instance(f"Engine.resume of {request_id!r}", instance)
    if instance is not None and instance != sequence.instance:
      if sequence.pages:
        self.memory.release(sequence)
      sequence.instance = instance
    del self._paused[request_id]
    sequence.extend(chunk_tokens)
    waiting = self._waiting[sequence.instance]
    # Whoever holds memory goes first: behind one that waits for it, both would wait forever.
    (waiting.appendleft if sequence.pages else waiting.append)(sequence)

  def migrate(self, request_id: str, instance: int) -> bool:
    """Takes a paused request's pages to another instance; False if it has no room for them.

    Raises:
      ValueError: if there is no such request or instance, or it is not paused.
    """
    sequence = self._paused_sequence(request_id, "migrate")
    self._check_instance(f"Engine.migrate of {request_id!r}", instance)
    return self.memory.migrate(sequence, instance)

  def pull_prefix(self, tokens: Sequence[int], source: int, target: int) -> int:
    """Copies the whole pages of a token sequence's start from one instance to another.

    Args:
      tokens: of a prompt, from position 0.
      source: the instance that has them, as far as it has.
      target: where requests that start so are going to run.

    Returns:
      Positions that were copied: those that `source` has, `target` lacks and has room for.

    Raises:
      ValueError: if there is no such instance.
    """
    for name, instance in (("source", source), ("target", target)):
      self._check_instance(f"Engine.pull_prefix: {name}", instance)
    return self.memory.pull_prefix(tokens, source, target)

  def spill(self, request_ids: Iterable[str]) -> list[str]:
    """Takes paused requests' pages off the devices, in order, until the pool is full.

    Returns:
      Those that left. They come back when they are resumed, on any instance.

    Raises:
      ValueError: if there is no such request, or it is not paused.
    """
    if isinstance(request_ids, str):
      raise ValueError(
        f"Engine.spill: got the text {request_ids!r}, expected several ids; write spill([...])."
      )
    # A name that comes twice is one request.
    sequences = [self._paused_sequence(name, "spill") for name in dict.fromkeys(request_ids)]
    left = self.memory.spill([sequence for sequence in sequences if sequence.pages])
    return [sequence.request.request_id for sequence in left]

  def instance_of(self, request_id: str) -> int:
    """Returns where a request runs, waits or lies.

    Raises:
      ValueError: if there is no such request.
    """
    return self._sequence(request_id, "instance_of").instance

  def held_pages(self, request_id: str) -> int:
    """Returns how many pages of its instance a request holds; 0 if it is spilled or waits.

    Raises:
      ValueError: if there is no such request.
    """
    return len(self._sequence(request_id, "held_pages").pages)

  def progress(self, request_id: str) -> Completion:
    """Returns what a request has said so far.

    Raises:
      ValueError: if there is no such request.
    """
    return self._sequence(request_id, "progress").completion("", self.policy_version)

  def free_pages(self, instance: int) -> int:
    """Returns how many pages of an instance could be given out now.

    Raises:
      ValueError: if there is no such instance.
    """
    self._check_instance("Engine.free_pages", instance)
    return self._pools[instance].num_available

  def awaited_pages(self, instance: int) -> int:
    """Returns how many pages the requests that wait on an instance are going to take at most.

    Raises:
      ValueError: if there is no such instance.
    """
    self._check_instance("Engine.awaited_pages", instance)
    return sum(
      self.pages_for(sequence.limit) - len(sequence.pages) for sequence in self._waiting[instance]
    )

  def pages_for(self, num_tokens: int) -> int:
    """Returns the pages that `num_tokens` of prompt and answer need.

    Raises:
      ValueError: if there is no token.
    """
    if num_tokens < 1:
      raise ValueError(
        f"Engine.pages_for: got {num_tokens} tokens, expected at least 1; a prompt has one."
      )
    # The last token sampled is never read back, so it needs no position.
    return -(-(num_tokens - 1) // self.config.page_size)

  def preempt(self, request_id: str) -> None:
    """Drops a request's pages; it prefills again to the same bits.

    One that was running waits first in line; one that is paused stays so.

    Raises:
      ValueError: if there is no such request.
    """
    sequence = self._sequence(request_id, "preempt")
    if sequence not in self._running[sequence.instance]:
      self.counters.preemptions += sequence.num_written > 0
      self.memory.release(sequence)
      return
    self._running[sequence.instance].remove(sequence)
    self.memory.release(sequence)
    self._waiting[sequence.instance].appendleft(sequence)
    self.counters.preemptions += 1

  def cancel(self, request_id: str) -> None:
    """Forgets a request.

    Raises:
      ValueError: if there is no such request.
    """
    sequence = self._sequence(request_id, "cancel")
    running, waiting = self._running[sequence.instance], self._waiting[sequence.instance]
    if request_id in self._paused:
      del self._paused[request_id]
    else:
      (running if sequence in running else waiting).remove(sequence)
    self.memory.release(sequence)
    self._leave(request_id)
    self._updates = [update for update in self._updates if update.request_id != request_id]

  def idle_step(self, num_rows: int) -> Callable[[], None]:
    """Returns a function that runs a step of rows that belong to no request, to its end.

    For measuring. Rows stand at a quarter of the context and write page 0, as padding does.

    Args:
      num_rows: of each instance.

    Raises:
      ValueError: if requests are unfinished, whose pages a step would change.
    """
    if self._live:
      raise ValueError(
        f"Engine.idle_step: got {len(self._live)} unfinished requests, expected none; measure"
        " before they come."
      )
    last = self.config.row_buckets[-1]
    checks.whole("Engine.idle_step: num_rows", num_rows, 1, last, "the last row bucket is the most")
    self._take_pages()
    inputs = self._idle_inputs(num_rows)

    def run() -> None:
      self.memory.pages, *out = self._runner.step(
        self._params, self.memory.pages, inputs, self._key
      )
      jax.block_until_ready(out)

    return run

  def give_back_pages(self) -> None:
    """Frees the memory of all pages until the next request; nothing that was written is kept.

    Raises:
      ValueError: if requests are unfinished, whose keys these are.
    """
    if self._live:
      raise ValueError(
        f"Engine.give_back_pages: got {len(self._live)} unfinished requests, expected none; finish"
        " or cancel them."
      )
    self.memory.forget_all()
    for leaf in jax.tree.leaves(self.memory.pages):
      leaf.delete()
    self.memory.pages = None

  def _take_pages(self) -> None:
    """Takes the memory of all pages again, if it was given back."""
    if self.memory.pages is None:
      self.memory.pages = self._runner.empty_pages(self.config.num_pages, self.config.page_size)

  def plan(self) -> str:
    """Returns one line that says what was allocated."""
    page_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.memory.pages))
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._params))
    positions = (self.config.num_pages - 1) * self.config.page_size
    buckets = ", ".join(str(rows) for rows in self.config.row_buckets)
    arrays = ", ".join(
      str(tiles.whole_rows(rows, self.numerics)) for rows in self.config.row_buckets
    )
    return (
      f"{len(self._pools)} instance(s), each {self.config.num_pages} pages of"
      f" {self.config.page_size} positions ({positions:,} tokens of context) and"
      f" {self.config.max_sequences} sequences; steps of {buckets} rows in arrays of {arrays};"
      f" {page_bytes / 2**20:.1f} MiB of pages, {weight_bytes / 2**20:.1f} MiB of weights"
    )

  # How requests become rows.

  def _sequence(self, request_id: str, what: str) -> SequenceState:
    if request_id not in self._live:
      raise ValueError(
        f"Engine.{what}: got request {request_id!r}, expected one of the {len(self._live)} that are"
        " unfinished; it may be done already (poll)."
      )
    return self._live[request_id]

  def _paused_sequence(self, request_id: str, what: str) -> SequenceState:
    sequence = self._sequence(request_id, what)
    if request_id not in self._paused:
      raise ValueError(
        f"Engine.{what}: got request {request_id!r}, which is not paused, expected one of the"
        f" {len(self._paused)} that are (poll_paused); its chunk is still running."
      )
    return sequence

  def _check_instance(self, what: str, instance: int) -> None:
    checks.whole(f"{what}: instance", instance, 0, len(self._pools) - 1, "the mesh has no more")

  def _check_chunk(self, what: str, chunk_tokens: int | None) -> None:
    if chunk_tokens is not None:
      checks.whole(f"{what}: chunk_tokens", chunk_tokens, 1, None, "None answers to the end")

  def _continue_from(self, sequence: SequenceState, said: Completion) -> None:
    """Puts a sequence where it was when it had said `said`, half of a stop string included."""
    sequence.tokens.extend(said.tokens)
    sequence.logprobs.extend(np.asarray(said.behaviour_logprobs, np.float32).tolist())
    sequence.raw_logprobs.extend(np.asarray(said.raw_logprobs, np.float32).tolist())
    if sequence.stream is not None:
      sequence.text = "".join(sequence.stream.push(token) for token in said.tokens)
    self._new_text(sequence, "")  # Streamed once already.

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
      held_back: list[SequenceState] = []
      while waiting and len(running) < self.config.max_sequences:
        sequence = waiting[0]
        self._at = (sequence, len(sequence.tokens))
        if sequence.pages:  # Paused before: it has its past, and lacks what the next chunk needs.
          needed = self.pages_for(sequence.limit) - len(sequence.pages)
          if needed > pool.num_available:
            self.counters.waits += 1
            break
          waiting.popleft()
          self.memory.hold(sequence, [*sequence.pages, *pool.take(max(needed, 0))])
          running.append(sequence)
          continue
        if sequence.num_written:  # Spilled: it comes back before the step.
          if not self.memory.begin_restore(sequence, self.pages_for(sequence.limit)):
            self.counters.waits += 1
            break
          waiting.popleft()
          running.append(sequence)
          continue
        if self.config.reuse_prefixes and sequence.request.group_id in prefilling:
          held_back.append(waiting.popleft())  # A sibling is writing the prompt they share.
          continue
        hit = prefix_index.NO_HIT
        if self.config.reuse_prefixes:
          hit = pool.find(sequence.tokens[:-1])
        for page in hit.pages:
          pool.hold(page)
        if hit.copy_from is not None:
          pool.hold(hit.copy_from)
        needed = self.pages_for(sequence.limit) - len(hit.pages)
        if needed > pool.num_available and hit.copy_from is not None:
          # The page to copy may be the very one that is missing: with nobody running, waiting for
          # another would be forever.
          pool.release(hit.copy_from)
          hit = prefix_index.PrefixHit(hit.pages, None, len(hit.pages) * self.config.page_size)
        if needed > pool.num_available:
          for page in hit.pages:
            pool.release(page)
          self.counters.waits += 1
          break
        waiting.popleft()
        fresh = pool.take(needed)
        self.memory.hold(sequence, [*hit.pages, *fresh])
        sequence.num_written = hit.num_tokens
        if hit.copy_from is not None:
          self._copies[instance].append((hit.copy_from, fresh[0]))
          self.counters.page_copies += 1
          # Held until the copy is made: a page that comes back from the pool is written before it.
          self._sources[instance].append(hit.copy_from)
        self.counters.reused_tokens += hit.num_tokens
        running.append(sequence)
        if sequence.is_prefilling and sequence.request.group_id:
          prefilling.add(sequence.request.group_id)
      waiting.extendleft(reversed(held_back))
    self._at = None

  def _plan(self, instance: int) -> list[ScheduledRows]:
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
        work.append(ScheduledRows(sequence, count, row))
        row += count
    return work

  def _drafted(self, work: list[list[ScheduledRows]]) -> list[list[ScheduledRows]]:
    """Returns the work with drafts behind those that decode, as far as rows are left."""
    if self.drafter is None:
      return work
    budget = self.config.row_buckets[-1]
    spare = [budget - sum(piece.count for piece in pieces) for pieces in work]
    queries, places = [], []
    for instance, pieces in enumerate(work):
      for index, piece in enumerate(pieces):
        sequence = piece.sequence
        # The token sampled after the last draft is said too.
        most = min(sequence.limit - len(sequence.tokens) - 1, spare[instance])
        if piece.is_sampled and most > 0:
          request = sequence.request
          queries.append(
            DraftQuery(
              request.request_id, request.group_id, sequence.tokens, sequence.num_prompt, most
            )
          )
          places.append((instance, index))
    if not queries:
      return work
    try:
      drafts = drafting.checked(
        self.drafter.draft(queries), queries, self.model.vocab_size
      )
    except Exception as error:
      self._dismiss_drafter(error)
      return work
    if not any(drafts):
      return work
    paths_of = dict(zip(places, drafts, strict=True))
    drafted = []
    for instance, pieces in enumerate(work):
      row, rows_left, planned = 0, spare[instance], []
      for index, piece in enumerate(pieces):
        paths = self._paths(piece, paths_of.get((instance, index), ()), rows_left)
        piece = piece._replace(first_row=row, paths=paths)
        row += piece.num_rows
        rows_left -= piece.num_rows - piece.count
        planned.append(piece)
      drafted.append(planned)
    return drafted

  def _paths(
    self, piece: ScheduledRows, drafts: Iterable[tuple[int, ...]], rows_left: int
  ) -> tuple[DraftPath, ...]:
    """Returns what of a drafter's paths there are rows, pages and a vocabulary for."""
    sequence, pool = piece.sequence, self._pools[piece.sequence.instance]
    size, end = self.config.page_size, len(sequence.tokens)
    paths: list[DraftPath] = []
    for draft in drafts:
      most = min(sequence.limit - end - 1, rows_left - bool(paths))
      tokens = draft[: max(most, 0)]
      if not tokens or any(path.tokens[: len(tokens)] == tokens for path in paths):
        continue
      if not paths:
        paths.append(DraftPath(tokens, sequence.page_row))
        rows_left -= len(tokens)
        continue
      first, last = (end - 1) // size, (end - 1 + len(tokens)) // size
      if piece.count > 1 or pool.num_available < last - first + 1:
        break
      scratch = pool.take(last - first + 1)
      page_row = sequence.page_row.copy()
      page_row[first : last + 1] = scratch
      if (end - 1) % size:
        self._copies[sequence.instance].append((sequence.pages[first], scratch[0]))
      paths.append(DraftPath(tokens, page_row, tuple(scratch)))
      rows_left -= len(tokens) + 1
    return tuple(paths)

  def _inputs(self, work: list[list[ScheduledRows]]) -> runner_lib.StepInputs:
    """Returns the step's arrays, instances in front."""
    rows = max(sum(piece.num_rows for piece in pieces) for pieces in work)
    parts = [
      self._instance_inputs(pieces, copies, rows)
      for pieces, copies in zip(work, self._copies, strict=True)
    ]
    self._copies = [[] for _ in self._pools]
    for pool, sources in zip(self._pools, self._sources, strict=True):
      while sources:
        pool.release(sources.pop())
    return jax.tree.map(lambda *leaves: np.stack(leaves), *parts)

  def _instance_inputs(
    self, work: list[ScheduledRows], copies: list[tuple[int, int]], rows: int
  ) -> runner_lib.StepInputs:
    bucket = next(size for size in self.config.row_buckets if size >= rows)
    return batching.instance_inputs(
      work,
      copies,
      num_rows=tiles.whole_rows(bucket, self.numerics),
      num_segments=tiles.whole_segments(bucket, self.numerics),
      # One for each sequence that begins, and one for a path of it.
      max_copies=2 * self.config.row_buckets[-1],
      query_tile=self.numerics.query_tile,
      page_size=self.config.page_size,
      table_width=self._table_width,
    )

  def _culprit(self, work: list[list[ScheduledRows]]) -> tuple[SequenceState, int] | None:
    """Returns the first request that cannot even alone become rows of a step, if any."""
    for piece in itertools.chain(*work):
      try:
        self._instance_inputs([piece._replace(first_row=0)], [], piece.num_rows)
      except Exception:
        return piece.sequence, len(piece.sequence.tokens)
    return None

  def _idle_inputs(self, num_rows: int) -> runner_lib.StepInputs:
    """Returns a step of rows that belong to no request and write where padding does."""
    position = self._context // 4
    request = Request(request_id="idle", prompt=(0,) * (position + 1))
    row = sampling.sampling_rows([request.sampling])
    work = []
    for index in range(num_rows):
      sequence = SequenceState(request, list(request.prompt), 0, None, row, limit=position + 1)
      sequence.hold([0], self._table_width)
      sequence.num_written = position
      work.append(ScheduledRows(sequence, 1, index))
    return self._inputs([work for _ in self._pools])

  def _remember_prompts(self, work: list[list[ScheduledRows]]) -> None:
    """Makes the prompts findable whose last position is written in this step."""
    if not self.config.reuse_prefixes:
      return
    for instance, pieces in enumerate(work):
      for piece in pieces:
        sequence = piece.sequence
        if sequence.num_written < sequence.num_prompt <= sequence.num_written + piece.count:
          self._pools[instance].remember(sequence.request.prompt, sequence.pages)

  # What becomes of sampled tokens.

  def _take(
    self, piece: ScheduledRows, tokens: list[int], logprobs: list[float], raw_logprobs: list[float]
  ) -> StepOutput:
    """Says what was sampled, along the path that agrees with it longest."""
    sequence = piece.sequence
    first = num_drafted = num_accepted = 0
    if piece.paths:
      ends = list(itertools.accumulate((len(path.tokens) + 1 for path in piece.paths), initial=0))
      verified = verify(
        [path.tokens for path in piece.paths],
        [tokens[start:end] for start, end in itertools.pairwise(ends)],
      )
      chosen, first = piece.paths[verified.path], ends[verified.path]
      num_drafted, num_accepted = len(chosen.tokens), verified.num_accepted
      self._adopt(sequence, chosen, piece.paths)
      self.counters.drafted_tokens += sum(len(path.tokens) for path in piece.paths)
      self.counters.side_paths += bool(chosen.scratch)
    said: list[int] = []
    text = reason = ""
    for index in range(first, first + num_accepted + 1):
      update = self._accept(sequence, tokens[index], logprobs[index], raw_logprobs[index])
      said += update.tokens
      text, reason = text + update.text, update.finish_reason
      if reason:
        break
      # The next token of the answer was drafted, so the keys up to it are written.
      sequence.num_written = len(sequence.tokens) - 1
    request = sequence.request
    self.counters.accepted_tokens += len(said) - 1
    if self.drafter is not None and piece.paths:
      try:
        self.drafter.observe(request.request_id, request.group_id, num_drafted, len(said) - 1)
      except Exception as error:
        self._dismiss_drafter(error)
    if reason:
      self._tell_end(sequence)
      self._finish(sequence, reason)
    elif len(sequence.tokens) == sequence.limit:
      self._running[sequence.instance].remove(sequence)
      self._paused[request.request_id] = None
    return StepOutput(request.request_id, tuple(said), text, reason)

  def _adopt(
    self, sequence: SequenceState, chosen: DraftPath, paths: tuple[DraftPath, ...]
  ) -> None:
    """Makes the chosen path's own pages the sequence's, and gives back the others'."""
    pool = self._pools[sequence.instance]
    pages = sequence.pages
    if chosen.scratch:
      first = (len(sequence.tokens) - 1) // self.config.page_size
      replaced = pages[first : first + len(chosen.scratch)]
      pages = [*pages[:first], *chosen.scratch, *pages[first + len(chosen.scratch) :]]
      for page in replaced:
        pool.release(page)
      self.memory.hold(sequence, pages)
    for path in paths:
      if path is not chosen:
        for page in path.scratch:
          pool.release(page)

  def _accept(
    self, sequence: SequenceState, token: int, logprob: float, raw_logprob: float
  ) -> StepOutput:
    sequence.tokens.append(token)
    sequence.logprobs.append(logprob)
    sequence.raw_logprobs.append(raw_logprob)
    self.counters.sampled_tokens += 1
    params = sequence.request.sampling
    reason = ""
    if token in params.stop_token_ids:
      reason = "stop"
    elif sequence.num_generated == params.max_tokens:
      reason = "length"
    if sequence.stream is not None:
      sequence.text += sequence.stream.push(token)
      if reason:
        sequence.text += sequence.stream.finish()
      cut = _first_stop(sequence.text, params.stop_strings)
      if cut is not None:
        sequence.text, reason = sequence.text[:cut], "stop"
    text = self._new_text(sequence, reason)
    return StepOutput(sequence.request.request_id, (token,), text, reason)

  def _new_text(self, sequence: SequenceState, reason: str) -> str:
    """Text to stream: what might still become a stop string is held back."""
    end = len(sequence.text)
    if not reason:
      end -= max((len(stop) - 1 for stop in sequence.request.sampling.stop_strings), default=0)
    text = sequence.text[sequence.streamed : max(end, sequence.streamed)]
    sequence.streamed += len(text)
    return text

  def _finish(self, sequence: SequenceState, reason: str) -> None:
    request = sequence.request
    if self.config.reuse_prefixes:
      written = sequence.tokens[: sequence.num_written]
      self._pools[sequence.instance].remember(written, sequence.pages)
    self._running[sequence.instance].remove(sequence)
    self.memory.release(sequence)
    self._leave(request.request_id)
    self._finished.append(sequence.completion(reason, self.policy_version))

  def _tell_end(self, sequence: SequenceState) -> None:
    """Tells the drafter, if there is one, that a request is over."""
    if self.drafter is None:
      return
    request = sequence.request
    try:
      self.drafter.finish(
        request.request_id, request.group_id, sequence.tokens, sequence.num_prompt
      )
    except Exception as error:
      self._dismiss_drafter(error)

  def _dismiss_drafter(self, error: Exception) -> None:
    logging.warning(
      "Engine.drafter: got %s (%s) from %s, expected token ids for each request; it is not asked"
      " again, and what is said stays the same: mend it, and set Engine.drafter anew.",
      type(error).__name__,
      error,
      type(self.drafter).__name__,
      exc_info=error,
    )
    self.drafter = None

  def _fail(self, sequence: SequenceState, num_tokens: int, error: Exception) -> None:
    """Ends a request by what it met; of a step that broke off nothing was said."""
    sequence.truncate(num_tokens)
    sequence.text = sequence.text[: sequence.streamed]
    request_id = sequence.request.request_id
    reason = (
      f"request {request_id!r}: got {type(error).__name__} ({error}) in a step after"
      f" {sequence.num_generated} tokens, expected none; mend what raised it, and ask again."
    )
    logging.warning("%s", reason, exc_info=error)
    self.counters.errors += 1
    self._tell_end(sequence)
    for queue in (self._running[sequence.instance], self._waiting[sequence.instance]):
      if sequence in queue:
        queue.remove(sequence)
    self.memory.release(sequence)
    self._leave(request_id)
    self._finished.append(sequence.completion("error", self.policy_version, reason))
    self._updates.append(StepOutput(request_id, (), "", "error", reason))

  def _start_over(self, at: tuple[SequenceState, int] | None) -> None:
    """Takes all pages back after a step that broke off: keys are computed again, to the same bits.

    Args:
      at: the request whose tokens it was saying and how many it had before, if any.
    """
    self.counters.new_starts += 1
    if at is not None and len(at[0].tokens) > at[1]:
      self._take_back(*at)
    order = [*itertools.chain(*self._running), *itertools.chain(*self._waiting)]
    order = dict.fromkeys([*order, *self._live.values()])  # One may have been between the two.
    for queue in (*self._running, *self._waiting):
      queue.clear()
    for sequence in order:
      name = sequence.request.request_id
      if name in self._live and name not in self._paused:
        self._waiting[sequence.instance].append(sequence)
    self._copies = [[] for _ in self._pools]
    self._sources = [[] for _ in self._pools]
    self.memory.start_over(
      self._live.values(),
      lambda: self._runner.empty_pages(self.config.num_pages, self.config.page_size),
    )

  def _take_back(self, sequence: SequenceState, num_tokens: int) -> None:
    sequence.truncate(num_tokens)
    sequence.streamed, sequence.text = 0, ""
    if self.tokenizer is not None:
      sequence.stream = self.tokenizer.stream()
      said = sequence.tokens[sequence.num_prompt :]
      sequence.text = "".join(sequence.stream.push(token) for token in said)
    self._new_text(sequence, "")  # Streamed once already.

  def _leave(self, request_id: str) -> None:
    del self._live[request_id]
    if not self._live:
      self._group_instance.clear()


def _first_stop(text: str, stop_strings: tuple[str, ...]) -> int | None:
  """Returns where the first stop string begins, None if there is none."""
  found = [place for stop in stop_strings if (place := text.find(stop)) >= 0]
  return min(found, default=None)


__all__ = ["Counters", "Engine", "EngineConfig", "StepOutput"]

