"""Prompts in, tokens out: continuous batching over pages.

    submit -> waiting -> (pages free?) -> running: rows of every step -> finished -> poll
                 ^                            |
                 +---- resume <- paused <-----+  at the end of a chunk of the answer

A step takes one row from every sequence that decodes and fills what is left with pieces of prompts;
a decoding sequence and a piece of a prompt are the same thing, positions whose keys are not written
yet. When a piece reaches the sequence's end, its last row is sampled; behind it may stand drafted
tokens, which are sampled in the same step and kept as far as they are what was sampled. Nothing
here can change the tokens of an answer (DESIGN: the contract), only when they come.

Who waits and runs is in `requests`, what a step computes in `planner`, what becomes of its samples
in `output`, what a scheduler may do between chunks in `chunks`, and where keys and values lie in
`kv/memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from absl import logging
import jax

from seerjax import numerics as numerics_lib, parallel
from seerjax.array_typing import PRNGKeyArray
from seerjax.engine import checks, drafting, output, runner as runner_lib, sizes, texts
from seerjax.engine.chunks import Chunks
from seerjax.engine.counters import Counters
from seerjax.engine.drafting import Drafter
from seerjax.engine.kv.memory import Memory
from seerjax.engine.kv.pool import KVPool
from seerjax.engine.kv.values import fingerprint_digest
from seerjax.engine.planner import Planner
from seerjax.engine.requests import Requests
from seerjax.engine.sequence import ScheduledRows, SequenceState, StepOutput
from seerjax.engine.sizes import EngineConfig
from seerjax.models import config as model_config, parameters, weights
from seerjax.models.loading import Model
from seerjax.ops import sampling
from seerjax.types import Completion, Request, SamplingParams


class Engine(Chunks):
  """Continuous batching of requests over one mesh.

  Requests may be submitted at any time, also between steps. Call `step` until `num_unfinished` is
  zero and take what is done from `poll`; `generate` does just that.
  """

  def __init__(
    self,
    model: Model,
    *,
    config: EngineConfig = EngineConfig(),
    key: PRNGKeyArray | None = None,
    mesh: jax.sharding.Mesh | None = None,
    policy_version: int = 0,
    runner: runner_lib.Runner | None = None,
    drafter: Drafter | None = None,
    kv_pool: KVPool | None = None,
  ):
    """Makes an engine.

    Args:
      model: shape, weights, numerics and tokenizer (`load_model`).
      config: sizes; those that it leaves open follow from the model and from free memory.
      key: sampling key of the run (`numerics.key`), that of seed 0 if None; only folded, so that it
        may be reused for equal text.
      mesh: `parallel.make_mesh`; one device if None.
      policy_version: of the weights.
      runner: compiled programs to share with other engines of the same model, numerics and mesh;
        its own if None.
      drafter: guesses tokens that are then verified together; None verifies nothing.
      kv_pool: where paused requests' keys go when their pages are needed; a default one if None.

    Raises:
      ValueError: if slabs do not divide the model, weights are not laid out for it in the compute
        dtype or not finite, the key is not of `numerics.key`'s kind, pages do not fill splits
        exactly, `runner` was made for something else, or free memory does not hold one context.
    """
    shape, numerics = model.config, model_config.numerics_for(model.config, model.numerics)
    key = numerics_lib.key(0) if key is None else key
    numerics_lib.require_key(key, what="Engine.key")
    sizes.require_whole_splits(config, numerics)
    config = sizes.with_buckets(config, shape, numerics)
    if runner is None:
      mesh = parallel.make_mesh() if mesh is None else mesh
      runner = runner_lib.Runner(shape, numerics, mesh, len(config.row_buckets))
    runner.require_is_of(shape, numerics, mesh)
    self.model = shape
    self.numerics = numerics
    self.tokenizer = model.tokenizer
    self.drafter = drafter
    self.policy_version = policy_version
    self._runner = runner
    self._key = key
    self._params = self._placed(model.params, "Engine.params")
    config = sizes.fitted(config, shape, runner.stages, free_bytes=sizes.free_bytes(runner.mesh))
    # Positions of one sequence at most: beyond its model's, none is ever asked for.
    self._context = min(config.max_context, shape.max_context)
    table_width = sizes.table_width(config, context=self._context, kv_split=numerics.kv_split)
    kv_pool = KVPool() if kv_pool is None else kv_pool
    counters = Counters(host=kv_pool.host, store=kv_pool.store)
    pages = runner.empty_pages(config.num_pages, config.page_size)
    memory = Memory(
      pages,
      runner.page_moves,
      num_pages=config.num_pages,
      page_size=config.page_size,
      table_width=table_width,
      reuse_prefixes=config.reuse_prefixes,
      kv_pool=kv_pool,
      counters=counters,
      fingerprint=fingerprint_digest(shape, numerics, pages),
    )
    memory.publish(self._params, policy_version)
    requests = Requests(runner.num_instances)
    super().__init__(requests, memory, counters, config=config)
    self._planner = planner = Planner(
      requests, memory, counters, config=config, backend=runner.stages, table_width=table_width
    )
    self._outputs = output.Outputs(
      requests, memory, planner, counters, accept=self._accept, ask_drafter=self._ask_drafter
    )

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
        continues behind it, and its keys come from the store or are computed again.
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
    if request.request_id in self._requests.live:
      raise ValueError(f"{what}: got an id that is still running, expected a new one; rename it.")
    checks.chunk(what, chunk_tokens)
    if instance is not None:
      self._requests.check_instance(what, instance)
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
      instance = self._requests.instance_for(request)
    stream = None if self.tokenizer is None else self.tokenizer.stream()
    sequence = SequenceState(request, list(request.prompt), instance, stream, row, limit=0)
    if resume_from is not None:
      output.continue_from(sequence, resume_from)
      self.memory.claim(sequence)
    sequence.extend(chunk_tokens)
    self._take_pages()
    self._requests.add(sequence)

  def check(self, request: Request) -> None:
    """Refuses what this engine could never answer.

    Raises:
      ValueError: as `submit`, of the request itself.
    """
    checks.request(
      request,
      context=self._context,
      model_context=self.model.max_context,
      vocab_size=self.model.vocab_size,
      needed_pages=sizes.pages_for(
        len(request.prompt) + request.sampling.max_tokens, self.config.page_size
      ),
      num_pages=self.config.num_pages,
      page_size=self.config.page_size,
      has_tokenizer=self.tokenizer is not None,
    )

  def step(self) -> list[StepOutput]:
    """Runs one step of every instance; returns what it added to the requests.

    What a request meets in it ends that request, with finish_reason "error" and the reason, and the
    others continue. What belongs to no request (a device that fails, Ctrl-C) is raised; then all
    pages are taken back, and the next step continues every answer, to the same bits. A drafter that
    raises or drafts what are no tokens is not asked again, and a warning says so: drafts change no
    bit.
    """
    self._requests.busy = None
    try:
      self._step()
    except BaseException as error:
      busy = self._requests.take_busy()
      self._start_over(busy)
      if busy is None or not isinstance(error, Exception):
        raise
      sequence, num_tokens = busy
      if sequence.request.request_id not in self._requests.live:
        raise
      self._outputs.fail(sequence, num_tokens, error, policy_version=self.policy_version)
    return self._outputs.take_updates()

  def _step(self) -> None:
    self._planner.admit()
    scheduled = self._planner.schedule()
    if not any(scheduled):
      return
    if self.drafter is not None:
      scheduled = self._with_drafts(scheduled)
    self.memory.restore()
    try:
      inputs = self._inputs(scheduled)
    except Exception:
      self._requests.busy = self._planner.culprit(scheduled)
      raise
    self.memory.pages, tokens, scores = self._runner.step(
      self._params, self.memory.pages, inputs, self._key
    )
    self.counters.steps += 1
    self._planner.remember_prompts(scheduled)  # On the host, while the device computes.
    sampled = jax.device_get((tokens, scores.logprob, scores.raw_logprob))
    columns = [part.tolist() for part in sampled]
    for instance, pieces in enumerate(scheduled):
      place = 0
      for piece in pieces:
        self.counters.rows += piece.num_rows
        num_samples = piece.num_samples
        piece.sequence.num_written += piece.count
        if num_samples:
          mine = slice(place, place + num_samples)
          place += num_samples
          drawn, logprobs, raw = (column[instance][mine] for column in columns)
          self._outputs.add(piece, drawn, logprobs, raw, policy_version=self.policy_version)
    self._requests.busy = None

  def _inputs(self, scheduled: list[list[ScheduledRows]]) -> runner_lib.StepInputs:
    return self._planner.inputs(scheduled)

  _accept = staticmethod(output.accept)

  def _with_drafts(self, scheduled: list[list[ScheduledRows]]) -> list[list[ScheduledRows]]:
    queries, places = self._planner.draft_queries(scheduled)
    if not queries:
      return scheduled
    drafts = self._ask_drafter(
      lambda drafter: drafting.checked(drafter.draft(queries), queries, self.model.vocab_size)
    )
    if not drafts or not any(drafts):
      return scheduled
    return self._planner.with_drafts(scheduled, dict(zip(places, drafts, strict=True)))

  def _ask_drafter(self, ask: Callable[[Drafter], Any]) -> Any:
    """Returns the drafter's answer; None without a drafter. One that fails is not asked again."""
    if self.drafter is None:
      return None
    try:
      return ask(self.drafter)
    except Exception as error:
      logging.warning(
        "Engine.drafter: got %s (%s) from %s, expected token ids for each request; it is not asked"
        " again, and all answers stay the same: mend it, and set Engine.drafter anew.",
        type(error).__name__, error, type(self.drafter).__name__, exc_info=error,
      )  # fmt: skip
      self.drafter = None
      return None

  def _start_over(self, busy: tuple[SequenceState, int] | None) -> None:
    """Takes all pages back after a step that broke off: keys are computed again, to the same bits.

    Args:
      busy: the request that the step was working on and how many tokens it had before, if any.
    """
    self.counters.new_starts += 1
    if busy is not None and len(busy[0].tokens) > busy[1]:
      output.take_back(*busy, self.tokenizer)
    self._requests.wait_again()
    self._planner.start_over()
    self.memory.start_over(self._requests.live.values(), self._empty_pages)

  def poll(self) -> list[Completion]:
    """Returns the requests finished since the last call, in the order they finished."""
    return self._outputs.take_finished()

  def generate(
    self,
    requests: str | Iterable[Request | str],
    *,
    sampling: SamplingParams | None = None,
    on_step: Callable[[list[StepOutput]], None] | None = None,
  ) -> list[Completion]:
    """Runs requests to their ends and returns them in the order given.

    Args:
      requests: submitted at once, all or none; a text is one user's turn, and may stand alone.
      sampling: of texts (`texts.as_requests` says what None is); requests have their own.
      on_step: called with each step's updates, for streaming and progress. It may cancel requests;
        they are left out of what is returned.

    Raises:
      ValueError: as `submit`; for a text without a tokenizer, or one that says nothing.
    """
    if isinstance(requests, Request):
      raise ValueError(
        "Engine.generate: got one Request, expected several of them; write generate([request])."
      )
    requests = texts.as_requests(requests, sampling, self.tokenizer, self._context)
    others = self.poll()  # Of earlier requests, which may have had the same ids.
    wanted: dict[str, Completion | None] = {}
    try:
      for request in requests:
        self.submit(request)
        wanted[request.request_id] = None
      while any(request_id in self._requests.live for request_id in wanted):
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
        if request_id in self._requests.live:
          self.cancel(request_id)
      others += [one for one in self.poll() if one.request_id not in wanted]
      raise
    finally:
      self._outputs.finished.extend(others)
    return [completion for completion in wanted.values() if completion is not None]

  def set_params(self, params: parameters.Params, policy_version: int) -> None:
    """Replaces the weights and drops every page written with the old ones.

    Raises:
      ValueError: if requests are running, whose tokens would come from two policies, or if weights
        are not the model's in the numerics' layout and dtype, or not finite; the old ones stay.
    """
    checks.whole("Engine.set_params: policy_version", policy_version, 0, None, "count updates")
    if self.num_unfinished:
      raise ValueError(
        f"Engine.set_params: got {self.num_unfinished} unfinished requests, expected none (a"
        " completion comes from one policy_version); finish or cancel them."
      )
    self._params = self._placed(params, "Engine.set_params: params")
    self.memory.forget_all()
    self.policy_version = policy_version
    self.memory.publish(self._params, policy_version)

  def _placed(self, params: parameters.Params, what: str) -> parameters.Params:
    """Returns weights on the mesh; refuses others than the fingerprint names."""
    weights.check(params, self.model, self.numerics, dtype=self.numerics.dtype, what=what)
    numerics_lib.require_finite(
      params, what=what, remedy="nothing may be sampled from them: go back to an earlier checkpoint"
    )
    return self._runner.place_params(params)

  def progress(self, request_id: str) -> Completion:
    """Returns a request's answer so far; ValueError if there is no such request."""
    return self._requests.find(request_id, "progress").completion("", self.policy_version)

  def cancel(self, request_id: str) -> None:
    """Forgets a request; ValueError if there is no such request."""
    sequence = self._requests.find(request_id, "cancel")
    self.memory.release(sequence)
    self._requests.remove(sequence)
    self._outputs.drop(request_id)

  def idle_step(self, num_rows: int) -> Callable[[], None]:
    """Returns a function that runs a step of rows that belong to no request, to its end.

    For measuring. Rows stand at a quarter of the context and write page 0, as padding does.

    Args:
      num_rows: of each instance.

    Raises:
      ValueError: if requests are unfinished, whose pages a step would change.
    """
    self._require_idle("idle_step", "measure before they come")
    last = self.config.row_buckets[-1]
    checks.whole("Engine.idle_step: num_rows", num_rows, 1, last, "the last row bucket is the most")
    self._take_pages()
    inputs = self._planner.idle_inputs(num_rows, self._context // 4)

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
    self._require_idle("give_back_pages", "finish or cancel them")
    self.memory.forget_all()
    for leaf in jax.tree.leaves(self.memory.pages):
      leaf.delete()
    self.memory.pages = None

  def plan(self) -> str:
    """Returns one line that says what was allocated."""
    return sizes.described(
      self.config,
      self._runner.stages,
      num_instances=self.num_instances,
      pages_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(self.memory.pages)),
      weights_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(self._params)),
    )

  def _require_idle(self, what: str, fix: str) -> None:
    if self.num_unfinished:
      raise ValueError(
        f"Engine.{what}: got {self.num_unfinished} unfinished requests, expected none; {fix}."
      )

  def _empty_pages(self) -> Any:
    return self._runner.empty_pages(self.config.num_pages, self.config.page_size)

  def _take_pages(self) -> None:
    """Takes the memory of all pages again, if it was given back."""
    if self.memory.pages is None:
      self.memory.pages = self._empty_pages()


__all__ = ["Counters", "Engine", "EngineConfig", "StepOutput"]
