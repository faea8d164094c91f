"""Prompts in, tokens out: continuous batching over pages.

    submit -> waiting -> (pages free?) -> running: rows of every step -> finished -> poll
                 ^                            |
                 +---- resume <- paused <-----+  at the end of a chunk of the answer

A step takes one row from every sequence that decodes and fills what is left with pieces of prompts;
a decoding sequence and a piece of a prompt are the same thing, positions whose keys are not written
yet. When a piece reaches the sequence's end, its last row is sampled; behind it may stand drafted
tokens, which are sampled in the same step and kept as far as they are what was sampled. Nothing
here can change the tokens of an answer (DESIGN: the contract), only when they come.

`Engine.step` is one *visit*: a step, or, where every row decodes and nothing has to be asked in
between, up to `EngineConfig.steps_per_visit` of them, which run on the devices before the host
looks again. What waits, is submitted, paused or drafted is so between visits.

Who waits and runs is in `requests`, what a step computes in `planner`, what becomes of its samples
in `output`, what a scheduler may do between chunks in `chunks`, and where keys and values lie in
`kv/memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Unpack

import jax

from seerjax import fields, numerics as numerics_lib, parallel
from seerjax.array_typing import PRNGKeyArray
from seerjax.engine import (
  checks,
  drafting,
  generation,
  output,
  reading,
  runner as runner_lib,
  sizes,
  texts,
)
from seerjax.engine.background import StepTable
from seerjax.engine.chunks import Chunks
from seerjax.engine.counters import Counters
from seerjax.engine.drafting import Drafter
from seerjax.engine.kv import pool as pool_lib
from seerjax.engine.kv.manifest import KVManifest
from seerjax.engine.kv.memory import Memory
from seerjax.engine.kv.owner import Owner
from seerjax.engine.kv.pins import Pin, Pins
from seerjax.engine.kv.values import fingerprint_digest
from seerjax.engine.planner import Planner
from seerjax.engine.requests import Requests
from seerjax.engine.sequence import Likeliest, Mask, ScheduledRows, SequenceState, StepOutput
from seerjax.engine.sizes import EngineConfig
from seerjax.models import adapters as adapters_lib, config as model_config, parameters
from seerjax.models.loading import Model
from seerjax.ops import sampling
from seerjax.types import Completion, Request, SamplingParams


@fields.checked_methods
class Engine:
  """Continuous batching of requests over one mesh.

  Requests may be submitted at any time, also between steps. Call `step` until `num_unfinished` is
  zero and take what is done from `poll`; `generate` does just that.

  Attributes:
    config: sizes, all of them filled in.
    counters: of all that the engine does.
    memory: pages of all instances.
    step_times: seconds of steps (`speculation.step_times.measure`), by which requests that nobody
      waits for get rows beside others; None gives them none. It may be set at any time.
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
    kv_pool: pool_lib.KVPool | None = None,
    adapters: Mapping[str, Any] | None = None,
    step_times: StepTable | None = None,
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
      adapters: that requests may name; see `set_adapters`.
      step_times: the attribute.

    Raises:
      ValueError: if slabs do not divide the model, weights are not laid out for it in the compute
        dtype or not finite, the key is not of `numerics.key`'s kind, pages do not fill splits
        exactly, `runner` was made for something else, or free memory does not hold one page; for
        adapters, as `set_adapters`.
    """
    shape, numerics = model.config, model_config.numerics_for(model.config, model.numerics)
    checks.whole("Engine.policy_version", policy_version, 0, None, "count updates")
    key = numerics_lib.key(0) if key is None else key
    numerics_lib.require_key(key, what="Engine.key")
    sizes.require_whole_splits(config, numerics)
    config = sizes.with_buckets(config, shape, numerics)
    if runner is None:
      mesh = parallel.make_mesh() if mesh is None else mesh
      runner = runner_lib.Runner(shape, numerics, mesh, len(config.row_buckets))
    runner.require_is_of(shape, numerics, mesh)
    self.model, self.numerics, self.tokenizer = shape, numerics, model.tokenizer
    self.policy_version = policy_version
    self._runner, self._key = runner, key
    self._params = runner.place_params(model.params, what="Engine.params")
    self._set_adapters({} if adapters is None else adapters, "Engine.adapters")
    asked = min(config.max_context, shape.max_context)
    config = sizes.fitted(config, shape, runner.stages, free_bytes=sizes.free_bytes(runner.mesh))
    # Positions of one sequence at most: beyond its model's, none is ever asked for.
    self._context = min(config.max_context, shape.max_context)
    self._held_by_pages = sizes.held_by_pages(config) if self._context < asked else ""
    table_width = sizes.table_width(config, context=self._context, kv_split=numerics.kv_split)
    kv_pool = pool_lib.usual(runner.mesh) if kv_pool is None else kv_pool
    counters = Counters(host=kv_pool.host, store=kv_pool.store, imports=kv_pool.imports)
    memory = Memory(
      lambda: runner.empty_pages(config.num_pages, config.page_size),
      runner.page_moves,
      config=config,
      table_width=table_width,
      kv_pool=kv_pool,
      counters=counters,
      fingerprint=lambda pages: fingerprint_digest(shape, numerics, pages),
    )
    requests = Requests(runner.num_instances)
    self.config, self.counters, self.memory = config, counters, memory
    self._publish()
    self._requests = requests
    self.step_times = step_times
    self._pins = Pins(memory, page_size=config.page_size, max_pages=config.pinned_pages)
    self._chunks = Chunks(requests, memory, counters, self._pins, config=config)
    self._drafting = drafting.Drafting(drafter)
    self._planner = planner = Planner(
      requests,
      memory,
      counters,
      pins=self._pins,
      config=config,
      backend=runner.stages,
      table_width=table_width,
      masked_ids=shape.vocab_size,
      has_adapters=lambda: bool(self._adapters),
    )
    self._outputs = output.Outputs(
      requests, memory, planner, counters, accept=self._accept, ask_drafter=self._drafting.ask
    )

  @property
  def drafter(self) -> Drafter | None:
    """What guesses tokens; one that failed is None from then on. It may be set at any time."""
    return self._drafting.drafter

  @drafter.setter
  def drafter(self, drafter: Drafter | None) -> None:
    self._drafting.drafter = drafter

  @property
  def adapters(self) -> tuple[str, ...]:
    """Names that a request may have as its `adapter`, beside "" for the base."""
    return tuple(self._adapters)

  @property
  def key(self) -> PRNGKeyArray:
    """The run's sampling key: with a seed and a position it decides a token's noise."""
    return self._key

  @property
  def num_unfinished(self) -> int:
    """Requests submitted and not finished."""
    return len(self._requests.live)

  @property
  def num_background(self) -> int:
    """Those of them that nobody waits for."""
    return self._requests.num_background

  @property
  def mesh(self) -> jax.sharding.Mesh:
    """Its devices."""
    return self._runner.mesh

  @property
  def num_instances(self) -> int:
    """Instances of the mesh."""
    return self._runner.num_instances

  def submit(
    self,
    request: Request,
    *,
    resume_from: Completion | None = None,
    instance: int | None = None,
    chunk_tokens: int | None = None,
    mask: Mask | None = None,
    is_background: bool = False,
    kv: KVManifest | None = None,
  ) -> None:
    """Adds a request.

    Args:
      request: to be answered.
      resume_from: the beginning of its answer, of the same request by the same weights; the answer
        continues behind it, and its keys come from the store or are computed again.
      instance: where it runs; None keeps groups together, else takes the emptiest.
      chunk_tokens: pause after this many tokens, for all of which memory is reserved; None answers
        to the end, and memory is taken as the answer grows (`EngineConfig.reserved_tokens`).
      mask: of the answer so far, which ids may follow it, u32[w] with a bit for each id of the
        vocabulary; a pure function, and a part of the question like its sampling parameters: it is
        applied where `SamplingParams.allowed` is.
      is_background: whether nobody waits for it. It gets what others leave: rows by which a step
        takes at most `EngineConfig.background_slack` longer, up to `background_rows` where there
        are no others, and pages and places that it gives back as soon as another needs them. Its
        answer has the bits that it has otherwise.
      kv: what another engine has exported of it (`export_kv`). Where the store has lost or changed
        it, or it is of other weights, numerics or tokens, its keys are computed again, to the same
        bits (`Counters.imports`).

    Raises:
      ValueError: if it is empty, already here, too long for the context or for all pages, or asks
        for what this engine or model does not have; if `resume_from` is of another
        policy, or over already; if `kv` is of another policy, model or page size.
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
    if kv is not None:
      checks.manifest(request, kv, self.policy_version, self.config.page_size, self.memory.layout)
    row = sampling.sampling_rows([request.sampling])
    if instance is None:
      instance = self._requests.instance_for(request, is_background=is_background)
    sequence = output.begun(request, instance, row, self.tokenizer, resume_from)
    if resume_from is not None or kv is not None:
      self.memory.claim(sequence, kv)
    sequence.mask, sequence.is_background = mask, is_background
    sequence.adapter = self._index_of[request.adapter]
    sequence.extend(chunk_tokens, self.config.reserved_tokens)
    self.memory.take_again()
    self._requests.add(sequence)

  def check(self, request: Request) -> None:
    """Refuses what this engine could never answer.

    Raises:
      ValueError: as `submit`, of the request itself.
    """
    checks.weights(self._params, f"request {request.request_id!r}")
    checks.request(
      request,
      context=self._context,
      model_context=self.model.max_context,
      vocab_size=self.model.vocab_size,
      held_by_pages=self._held_by_pages,
      has_tokenizer=self.tokenizer is not None,
      adapters=self._adapters,
    )

  def step(self) -> list[StepOutput]:
    """Runs one visit of every instance; returns what it added to the requests.

    That is one step, or several where all rows decode (`EngineConfig.steps_per_visit`); a request
    is named once, with all its tokens. What a request meets in it ends that request, with
    finish_reason "error" and the reason, and the others continue. What belongs to no request (a
    device that fails, Ctrl-C) is raised; then all pages are taken back, and the next visit
    continues every answer, to the same bits. A drafter that raises or drafts what are no tokens is
    not asked again, and a warning says so: drafts change no bit.
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
    self._planner.grow()
    self._planner.admit()
    scheduled = self._planner.schedule()
    if not any(scheduled) and not any(self._requests.waiting):
      self._pins.bring_back()
    num_top = self._planner.num_top(scheduled)
    if num_top or (self.drafter is not None and any(scheduled)):
      scheduled = self._with_drafts(scheduled)
    num_steps = self._planner.num_steps(scheduled)
    # A step that tells of likeliest tokens is in no table.
    if self._requests.num_background and not num_top:
      scheduled, num_steps = self._with_background(scheduled, num_steps)
    if not any(scheduled):
      self._planner.settle()
      return
    self.memory.restore()
    try:
      inputs = self._inputs(scheduled)
    except Exception:
      self._requests.busy = self._planner.culprit(scheduled)
      raise
    found, top = self._dispatch(scheduled, inputs, num_steps, num_top)
    self._planner.remember_prompts(scheduled)  # On the host, while the device computes.
    (tokens, scores), top = jax.device_get((found, top))
    columns = [
      (part[:, :num_steps] if num_steps > 1 else part[:, None]).tolist()
      for part in (tokens, scores.logprob, scores.raw_logprob)
    ]
    self.counters.visits += 1
    self._outputs.take(
      scheduled,
      columns,
      num_steps,
      policy_version=self.policy_version,
      top=None if top is None else (top[0].tolist(), top[1].tolist()),
    )
    self._requests.busy = None

  def _dispatch(
    self,
    scheduled: list[list[ScheduledRows]],
    inputs: runner_lib.StepInputs,
    num_steps: int,
    num_top: int = 0,
  ) -> tuple[list[Any], Any]:
    """Begins a visit; returns what it samples, and the likeliest tokens where it tells of them."""
    top, before = None, (self._params, self.memory.pages)
    if num_steps > 1:
      visit = self._visit_inputs(scheduled, inputs, num_steps)
      self.memory.pages, *found = self._runner.visit(*before, visit, self._key)
    elif num_top:
      pages, sampled, told = self._runner.read(*before, inputs, self._key, num_top)
      self.memory.pages = pages
      found, top = [sampled, told.scores], (told.ids, told.top.raw_logprob)
    else:
      self.memory.pages, *found = self._runner.step(*before, inputs, self._key)
    return found, top

  def _with_background(
    self, scheduled: list[list[ScheduledRows]], num_steps: int
  ) -> tuple[list[list[ScheduledRows]], int]:
    """Adds rows of requests that nobody waits for; returns them all, and the visit's steps."""
    has_front = any(scheduled)
    scheduled = self._planner.with_background(scheduled, num_steps, self.step_times)
    if has_front:
      return scheduled, min(num_steps, self._planner.num_steps(scheduled))
    if self.drafter is not None:
      scheduled = self._with_drafts(scheduled)
    return scheduled, self._planner.num_steps(scheduled)

  def _inputs(self, scheduled: list[list[ScheduledRows]]) -> runner_lib.StepInputs:
    return self._planner.inputs(scheduled)

  def _visit_inputs(
    self, scheduled: list[list[ScheduledRows]], inputs: runner_lib.StepInputs, num_steps: int
  ) -> runner_lib.VisitInputs:
    return self._planner.visit_inputs(scheduled, inputs, num_steps)

  _accept = staticmethod(output.accept)

  def _with_drafts(self, scheduled: list[list[ScheduledRows]]) -> list[list[ScheduledRows]]:
    found = self._planner.read_drafts(scheduled)
    if self.drafter is not None:
      queries, places = self._planner.draft_queries(scheduled)
      drafts = self._drafting.paths(queries, self.model.vocab_size)
      if any(drafts):
        found |= zip(places, drafts, strict=True)
    return self._planner.with_drafts(scheduled, found) if found else scheduled

  def _start_over(self, busy: tuple[SequenceState, int] | None) -> None:
    """Takes all pages back after a step that broke off: keys are computed again, to the same bits.

    `busy` is the request that it was working on and how many tokens that had before, if any.
    """
    self.counters.new_starts += 1
    if busy is not None:
      output.take_back(*busy, self.tokenizer)
    self._requests.wait_again()
    self._planner.start_over()
    self.memory.start_over([*self._requests.live.values(), *self._pins.sequences])

  def hold(self, request_ids: Iterable[str]) -> None:
    """Names the requests whose answers do not grow until this is called again; no bit depends on
    it. Their prompts are read meanwhile."""
    self._requests.held = frozenset(request_ids)

  def poll(self) -> list[Completion]:
    """Returns the requests finished since the last call, in the order they finished."""
    return self._outputs.take_finished()

  def generate(
    self,
    requests: str | Iterable[Request | str],
    *,
    sampling: SamplingParams | None = None,
    seed: int | None = None,
    on_step: Callable[[list[StepOutput]], None] | None = None,
    **fields: Unpack[texts.SamplingFields],
  ) -> list[Completion]:
    """Runs requests to their ends and returns them in the order given.

    Args:
      requests: submitted at once, all or none; a text is one user's turn, and may stand alone.
      sampling: of texts (`texts.as_requests` says what None is); requests have their own.
      seed: of texts, 0 if None: the n-th in the list gets `texts.seed_at(seed, n)`.
      on_step: called with each visit's updates. It may cancel requests; these are not returned.
      **fields: of `SamplingParams`, such as temperature=0.0; in the place of `sampling`.

    Raises:
      ValueError: as `submit`, and as `texts.as_requests`.
    """
    requests = texts.as_requests(requests, sampling, self.tokenizer, self._context, seed, fields)
    return generation.to_ends(
      self, requests, live=self._requests.live, keep=self._outputs.put_back, on_step=on_step
    )

  def likeliest(
    self,
    request: Request,
    answers: Sequence[Sequence[int]],
    count: int,
    *,
    drafts: Sequence[Sequence[Sequence[int]]] = (),
    instance: int = 0,
    on_step: Callable[[list[StepOutput]], None] | None = None,
  ) -> list[dict[tuple[int, ...], Likeliest]]:
    """Reads beginnings of a request's answer: which tokens are likeliest to come next.

    All are read in one step, where rows and memory allow, each in one row and one more for each
    drafted token; pages are shared with all that was read or written before. Nothing is sampled.
    What else is in the engine goes on in the same steps, with the same bits.

    Args:
      request: whose prompt, adapter and max_tokens count; how it is sampled does not.
      answers: the beginnings, () for none yet.
      count: tokens of each place, 1 to 16, and no more than the vocabulary has.
      drafts: for each answer, paths of token ids behind it that are read, too, as far as there is
        room; the first is the likeliest.
      instance: whose pages they share.
      on_step: called with each visit's updates of other requests.

    Returns:
      For each answer, by the path behind it, () for none: (token id, log-probability under
      softmax(logits)), the likeliest first, of equals the lowest id. The ids are `head.likeliest`.

    Raises:
      ValueError: as `submit`, of the request; if the count or the instance is out of its range, an
        answer is as long as it may be, or drafts are those of another number of answers.
      RuntimeError: with what one of them met, if a step failed it.
    """
    self.check(request)
    self._requests.check_instance(f"Engine.likeliest of {request.request_id!r}", instance)
    live = self._requests.live
    sequences = reading.begun(
      request, answers, count, drafts, vocab_size=self.model.vocab_size, live=live
    )
    self.memory.take_again()
    for sequence in sequences:
      sequence.instance = instance
      sequence.adapter = self._index_of[request.adapter]
      self._requests.add(sequence)
    return reading.to_ends(
      self, sequences, live=live, keep=self._outputs.put_back, on_step=on_step
    )

  # Between chunks.

  def poll_paused(self) -> list[str]:
    """Returns the requests whose chunk has ended, in that order; they hold their pages."""
    return list(self._requests.paused)

  def pause(self, request_id: str) -> None:
    """Ends a request's chunk now; it keeps its pages. ValueError if there is no such request."""
    self._chunks.pause(request_id)

  def resume(
    self, request_id: str, *, chunk_tokens: int | None = None, instance: int | None = None
  ) -> None:
    """Lets a paused request continue for another chunk; see `Chunks.resume`."""
    self._chunks.resume(request_id, chunk_tokens=chunk_tokens, instance=instance)

  def migrate(self, request_id: str, instance: int) -> bool:
    """Takes a paused request's pages to another instance; see `Chunks.migrate`."""
    return self._chunks.migrate(request_id, instance)

  def pull_prefix(
    self, tokens: Sequence[int], source: int, target: int, adapter: str = "", namespace: str = ""
  ) -> int:
    """Copies the whole pages of a start to another instance; see `Chunks.pull_prefix`."""
    return self._chunks.pull_prefix(tokens, source, target, Owner(adapter, namespace))

  def spill(self, request_ids: Iterable[str]) -> list[str]:
    """Takes paused requests' pages off the devices; see `Chunks.spill`."""
    return self._chunks.spill(request_ids)

  def preempt(self, request_id: str) -> None:
    """Drops a request's pages; it prefills again to the same bits; see `Chunks.preempt`."""
    self._chunks.preempt(request_id)

  def export_kv(self, request_id: str) -> KVManifest | None:
    """Puts a copy of a paused request's pages into the store; see `Chunks.export_kv`."""
    return self._chunks.export_kv(request_id, self.policy_version)

  def instance_of(self, request_id: str) -> int:
    """Returns where a request runs, waits or lies; ValueError if there is no such request."""
    return self._requests.find(request_id, "instance_of").instance

  def forget_kv(self, request_id: str) -> None:
    """Removes what was exported of a request that has ended elsewhere; any other is no error."""
    if request_id not in self._requests.live:
      self.memory.kv_pool.end(request_id)

  def held_pages(self, request_id: str) -> int:
    """Returns the pages of its instance that a request holds; see `Chunks.held_pages`."""
    return self._chunks.held_pages(request_id)

  def free_pages(self, instance: int) -> int:
    """Returns how many pages could be given out now; ValueError if there is no such instance."""
    return self._chunks.free_pages(instance)

  def yielding_pages(self, instance: int) -> int:
    """Returns how many more pages one in front would be given; see `Chunks.yielding_pages`."""
    return self._chunks.yielding_pages(instance)

  def awaited_pages(self, instance: int) -> int:
    """Returns how many more pages its requests are expected to take; see `Chunks.awaited_pages`."""
    return self._chunks.awaited_pages(instance)

  def expected_pages(self, num_prompt: int, max_tokens: int) -> int:
    """Returns the pages that admission counts for a request; see `Chunks.expected_pages`."""
    return self._chunks.expected_pages(num_prompt, max_tokens)

  def pages_for(self, num_tokens: int) -> int:
    """Returns the pages that tokens of prompt and answer need; see `Chunks.pages_for`."""
    return self._chunks.pages_for(num_tokens)

  def pin(self, tokens: Sequence[int], *, adapter: str = "", namespace: str = "") -> int:
    """Keeps the pages of a start of prompts, so that requests which begin with it find them.

    Whole pages are kept, of those that are in memory; again after a request has written more, it
    keeps more. They leave the device before a request in front waits for pages, and come back when
    nobody is in front. New weights release them; the pin stays, to be filled by another request.

    Args:
      tokens: the start, a page at least.
      adapter: by whose weights it is written, "" for the base.
      namespace: whose it is: `Request.namespace` of the requests that find it.

    Returns:
      Positions that are kept on the devices now, of the instance that has most.

    Raises:
      ValueError: for less than a page, more than `EngineConfig.pinned_pages` in all, an adapter
        that the engine does not have, or an engine that reuses no prefixes.
    """
    reuses, vocab_size = self.config.reuse_prefixes, self.model.vocab_size
    checks.pin(tokens, reuses, adapter, self._index_of, vocab_size)
    self.memory.take_again()
    return self._pins.pin(tokens, Owner(adapter, namespace))

  def unpin(self, tokens: Sequence[int], *, adapter: str = "", namespace: str = "") -> None:
    """Lets a start go that was pinned; ValueError if it was not."""
    self._pins.unpin(tokens, Owner(adapter, namespace))

  @property
  def pins(self) -> tuple[Pin, ...]:
    """What is pinned, and how much of it is there; the last that was pinned is last."""
    return self._pins.named()

  def set_params(self, params: parameters.Params, policy_version: int) -> None:
    """Replaces the weights and drops every page written with the old ones.

    Raises:
      ValueError: if requests are running, whose tokens would come from two policies, or if weights
        are not the model's in the numerics' layout and dtype, or not finite; the old ones stay.
    """
    checks.whole("Engine.set_params: policy_version", policy_version, 0, None, "count updates")
    fix = "finish or cancel them (a completion comes from one policy_version)"
    self._requests.require_none("set_params", fix)
    what = "Engine.set_params: params"
    placed = self._runner.place_params(params, what=what)
    if self._adapters:
      adapters_lib.check(placed, {}, what=what)
      placed["adapters"] = self._params["adapters"]
    self._params = placed
    self._forget_pages()
    self.policy_version = policy_version
    self._publish()

  def drop_params(self) -> None:
    """Frees the weights, and drops every page; nothing can be asked until `set_params`.

    Raises:
      ValueError: if requests are unfinished, which these weights were to answer.
    """
    self._requests.require_none("drop_params", "finish or cancel them")
    self._params = {name: part for name, part in self._params.items() if name == "adapters"}
    self._forget_pages()
    self._publish()

  def set_adapters(self, adapters: Mapping[str, Any]) -> None:
    """Replaces the adapters that requests may name, and drops every page.

    A request of an adapter has the bits that it has in an engine whose weights are
    `lora.attach(params, adapter, scale)`, and one of the base those of an engine without adapters,
    whatever runs in the same step. Adapters of the shapes of those before need no new program. The
    weights and policy_version stay; `set_params` leaves the adapters.

    Args:
      adapters: by name, each f32 masters and the scale of their low-rank term, as `peft.load`
        returns them; none at all are the base alone.

    Raises:
      ValueError: if requests are running, weights have an adapter already (`lora.attach`), or an
        adapter is not of these weights, or not finite; the old ones stay.
    """
    checks.weights(self._params, "Engine.set_adapters")
    self._requests.require_none("set_adapters", "finish or cancel them")
    self._set_adapters(adapters, "Engine.set_adapters")
    self._forget_pages()
    self._publish()

  def _set_adapters(self, adapters: Mapping[str, Any], what: str) -> None:
    base = {name: part for name, part in self._params.items() if name != "adapters"}
    chosen = adapters_lib.NONE
    if adapters:
      chosen = self._runner.place_adapters(base, adapters, what=what)
      base["adapters"] = chosen.forms
    self._params, self._adapters, self._index_of = base, dict(adapters), chosen.index_of

  def _forget_pages(self) -> None:
    """Drops every page, those of pins first: what is held would be neither found nor free."""
    self._pins.release()
    self.memory.forget_all()

  def _publish(self) -> None:
    """Says of which weights keys and values are written from now on."""
    base = {name: part for name, part in self._params.items() if name != "adapters"}
    parts = {name: adapters_lib.parts(scaled) for name, scaled in self._adapters.items()}
    self.memory.publish(base, self.policy_version, parts)

  def progress(self, request_id: str) -> Completion:
    """Returns a request's answer so far; ValueError if there is no such request."""
    return self._requests.find(request_id, "progress").completion("", self.policy_version)

  def cancel(self, request_id: str) -> None:
    """Forgets a request; ValueError if there is no such request."""
    sequence = self._requests.find(request_id, "cancel")
    self.memory.release(sequence)
    self._requests.remove(sequence)
    self._outputs.drop(request_id)

  def idle_step(
    self, num_requests: int, num_rows: int, num_steps: int = 1
  ) -> Callable[[], None]:
    """Returns a function that runs a step of rows of no request; see `Planner.idle_rows`."""
    checks.weights(self._params, "Engine.idle_step")
    self._requests.require_none("idle_step", "measure before they come")
    self.memory.take_again()
    scheduled = self._planner.idle_rows(num_requests, num_rows, num_steps, self._context)

    def run() -> None:
      jax.device_get(self._dispatch(scheduled, self._inputs(scheduled), num_steps))

    return run

  def give_back_pages(self) -> None:
    """Frees the memory of all pages until the next request; nothing that was written is kept.

    Raises:
      ValueError: if requests are unfinished, whose keys these are.
    """
    self._requests.require_none("give_back_pages", "finish or cancel them")
    self._pins.release()
    self.memory.give_back()

  def plan(self) -> str:
    """Returns one line that says what was allocated, of several devices also on each."""
    line = sizes.described(
      self.config, self._runner.stages, num_instances=self.num_instances,
      allocated=(self.memory.pages, self._params),
    )  # fmt: skip
    if not self._held_by_pages:
      return line
    return f"{line}; requests of at most {self._context:,} tokens: {self._held_by_pages} for more"


__all__ = ["Counters", "Engine", "EngineConfig", "StepOutput"]
