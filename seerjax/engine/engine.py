"""The inference engine: continuous batching of requests over paged KV memory.

    add_request -> waiting -> (pages free?) -> running: rows of every step -> finished -> poll
                      ^                            |
                      +---- resume <- paused <-----+  at the end of a chunk of the response

A step takes one row from every decoding sequence and fills the remaining rows with prefill chunks.
A decoding sequence and a prefill chunk are the same thing: positions with keys that are not yet
written. When a chunk reaches the sequence's end, its last row is sampled. Drafted tokens may follow
that row; they are sampled in the same step and accepted as long as they equal the samples. Nothing
here can change the tokens of a response, only when they are produced. `visits` runs the steps that
`planner` plans, and `chunks` has the operations of a scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Unpack

import jax

from seerjax import fields, numerics as numerics_lib, parallel
from seerjax.array_typing import PRNGKeyArray
from seerjax.engine import checks, generation, output, reading, runner as runner_lib, sizes, texts
from seerjax.engine.chunks import Chunks
from seerjax.engine.counters import Counters
from seerjax.engine.drafting import Drafter, Drafting
from seerjax.engine.planner import Planner
from seerjax.engine.requests import Requests
from seerjax.engine.sequence import Mask, StepOutput, TopLogprobs
from seerjax.engine.sizes import EngineConfig
from seerjax.engine.step_times import StepTimes
from seerjax.engine.visits import Visits
from seerjax.engine.weights import Weights
from seerjax.kv import pool as pool_lib
from seerjax.kv.manifest import KVManifest
from seerjax.kv.memory import Memory
from seerjax.kv.pins import Pins
from seerjax.kv.values import fingerprint_digest
from seerjax.models import parameters
from seerjax.models.loading import Model
from seerjax.types import Completion, Request, SamplingParams


@fields.checked_methods
class Engine:
  """Continuous batching of requests over one mesh.

  Requests may be submitted at any time, also between steps. Call `step` until `num_unfinished` is
  zero and collect completions with `poll`; `generate` does just that.

  Attributes:
    config: sizes, all of them resolved.
    key: sampling key of the run: key, request seed and position determine a token's noise.
    mesh: the mesh of the engine.
    data_parallel_size: number of instances of the mesh.
    counters: statistics of the engine.
    memory: pages of all instances.
    chunks: the operations of a scheduler on requests and their pages between chunks.
    step_times: measured step times (`timing.measure`); they limit how many rows background
      requests get in a step with foreground requests. None gives them none. May be set at any time.
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
    step_times: StepTimes | None = None,
    planner: Callable[..., Planner] = Planner,
    accept: output.Accept = output.accept,
  ):
    """Creates an engine.

    Args:
      model: shape, weights, numerics and tokenizer (`load_model`).
      config: sizes; zeros and empty values are derived from the model and free memory.
      key: sampling key of the run (`numerics.key`), that of seed 0 if None.
      mesh: `parallel.make_mesh`; one device if None.
      policy_version: version of the weights.
      runner: compiled programs to share with other engines of the same model, numerics and mesh;
        a new runner if None.
      drafter: drafter for speculative decoding; None disables it.
      kv_pool: pool to which paused requests' pages are spilled; a default one if None.
      adapters: adapters that requests may name; see `set_adapters`.
      step_times: the attribute.
      planner: makes the planner; a test passes a subclass of `Planner` that errs.
      accept: appends a sampled token to a response, and decides whether it ends.

    Raises:
      ValueError: if slabs do not divide the model; if weights have the wrong layout, a dtype other
        than the compute dtype, or values that are not finite; if the key is not of `numerics.key`'s
        kind; if pages do not fill splits exactly; if `runner` was made for another configuration;
        if free memory does not hold one page; for adapters, as `set_adapters`.
    """
    decoder = model.decoder
    shape, numerics = decoder.shape, decoder.numerics
    checks.whole("Engine.policy_version", policy_version, 0, None, "count updates")
    key = numerics_lib.key(0) if key is None else key
    numerics_lib.require_key(key, what="Engine.key")
    sizes.require_whole_splits(config, numerics)
    config = sizes.with_buckets(config, decoder)
    if runner is None:
      mesh = parallel.make_mesh() if mesh is None else mesh
      runner = runner_lib.Runner(decoder, mesh, len(config.batch_size_buckets))
    runner.require_is_of(decoder, mesh)
    decoder = runner.decoder
    self.model, self.numerics, self.tokenizer = shape, numerics, model.tokenizer
    self._runner, self.key, self.policy_version = runner, key, policy_version
    self.mesh, self.data_parallel_size = runner.mesh, runner.data_parallel_size
    self._weights = Weights(runner, model.params, {} if adapters is None else adapters)
    asked, free = config, sizes.free_bytes(runner.mesh)
    config = sizes.fitted(asked, decoder, free_bytes=free)
    self._context = sizes.context_of(config, shape, asked=asked)
    kv_pool = pool_lib.usual(runner.mesh) if kv_pool is None else kv_pool
    counters = Counters(host=kv_pool.host, store=kv_pool.store, imports=kv_pool.imports)
    kv_sizes = sizes.of_pages(config, self._context, decoder)
    memory = Memory(
      lambda: runner.empty_pages(kv_sizes.num_pages, config.page_size),
      runner.page_moves,
      sizes=kv_sizes,
      kv_pool=kv_pool,
      counters=counters,
      fingerprint=lambda pages: fingerprint_digest(shape, numerics, pages),
    )
    requests = self._requests = Requests(runner.data_parallel_size)
    self.config, self.counters, self.memory, self.step_times = config, counters, memory, step_times
    self._weights.publish(memory, policy_version)
    self._pins = Pins(memory, page_size=config.page_size, max_pages=config.pinned_pages)
    self.chunks = Chunks(
      requests, memory, counters, self._pins,
      config=config, weights=self._weights, vocab_size=shape.vocab_size,
    )  # fmt: skip
    self._drafting = Drafting(drafter)
    planned = planner(
      requests, memory, counters,
      pins=self._pins, config=config, backend=decoder.backend,
      drafting=self._drafting, weights=self._weights, vocab_size=shape.vocab_size,
    )  # fmt: skip
    self._outputs = output.Outputs(
      requests, memory, planned, counters, accept=accept, ask_drafter=self._drafting.ask
    )
    self._visits = Visits(
      planned, self._outputs, requests, memory, counters,
      pins=self._pins, runner=runner, weights=self._weights, key=key, tokenizer=model.tokenizer,
    )  # fmt: skip

  @property
  def drafter(self) -> Drafter | None:
    """The drafter; set to None after it fails. May be set at any time."""
    return self._drafting.drafter

  @drafter.setter
  def drafter(self, drafter: Drafter | None) -> None:
    self._drafting.drafter = drafter

  @property
  def adapters(self) -> tuple[str, ...]:
    """Names that are valid as a request's `adapter`, in addition to "" for the base weights."""
    return tuple(self._weights.adapters)

  @property
  def num_unfinished(self) -> int:
    """Number of submitted requests that have not finished."""
    return len(self._requests.live)

  @property
  def num_background(self) -> int:
    """Number of unfinished background requests."""
    return self._requests.num_background

  def add_request(
    self,
    request: Request,
    *,
    resume_from: Completion | None = None,
    instance: int | None = None,
    chunk_tokens: int | None = None,
    mask: Mask | None = None,
    is_background: bool = False,
    kv: KVManifest | None = None,
    num_top: int = 0,
    prompt_top: int | None = None,
  ) -> None:
    """Adds a request.

    Args:
      request: the request.
      resume_from: partial response of the same request by the same weights. Generation continues
        after it; its keys come from the store or are computed again.
      instance: instance to run on; None keeps groups together, else takes the least loaded one.
      chunk_tokens: pause after this many tokens; memory is reserved for all of them. None
        generates to the end, and pages are allocated as the response grows
        (`EngineConfig.reserved_tokens`).
      mask: maps the response so far to a bitmask u32[w] of the allowed next ids, one bit per id of
        the vocabulary. It must be a pure function, and is a part of the request like its sampling
        parameters; it is applied together with `SamplingParams.allowed_token_ranges`.
      is_background: low priority. The request gets rows that lengthen a step by at most
        `EngineConfig.background_slack`, or up to `background_rows` if there is no foreground
        request; it is preempted when a foreground request needs pages or a place in the batch. The
        response has the same bits either way.
      kv: another engine's export of the request (`Chunks.export_kv`). If the store has lost or
        changed the pages, or they belong to other weights, numerics or tokens, the keys are
        computed again, to the same bits (`Counters.imports`).
      num_top: number of top tokens returned at each position (`StepOutput.tops`), at most 16. All
        requests have the same bits with and without top tokens.
      prompt_top: number of top tokens at each position of the prompt, returned with the scores of
        its tokens (`StepOutput.prompt`); its keys are computed even if they are cached. None
        scores no prompt.

    Raises:
      ValueError: if the prompt is empty; if the id is in use; if the request is too long for the
        context or for all pages, or needs a feature that this engine or model lacks; if
        `resume_from` has another policy or is already finished; if `kv` has another policy, model
        or page size.
    """
    what = f"request {request.request_id!r}"
    self.check(request)
    self._requests.require_new(what, request.request_id)
    checks.chunk(what, chunk_tokens)
    reading.check_counts(what, num_top, prompt_top)
    if instance is not None:
      self._requests.check_instance(what, instance)
    if resume_from is not None:
      checks.resume_from(
        request, resume_from, policy_version=self.policy_version,
        vocab_size=self.model.vocab_size, tokenizer=self.tokenizer,
      )  # fmt: skip
    if kv is not None:
      checks.manifest(request, kv, self.policy_version, self.config.page_size, self.memory.layout)
    if instance is None:
      instance = self._requests.instance_for(request, is_background=is_background)
    sequence = output.begun(
      request, instance, self.tokenizer, resume_from,
      adapter=self._weights.index_of[request.adapter], mask=mask, is_background=is_background,
      num_top=num_top, prompt_top=prompt_top,
    )  # fmt: skip
    if (resume_from is not None or kv is not None) and prompt_top is None:
      self.memory.claim(sequence, kv)
    sequence.extend(chunk_tokens, self.config.reserved_tokens)
    self.memory.take_again()
    self._requests.add(sequence)

  def check(self, request: Request) -> None:
    """Refuses a request that this engine could never complete.

    Raises:
      ValueError: as `add_request`, for the request itself.
    """
    checks.weights(self._weights.params, f"request {request.request_id!r}")
    checks.request(
      request, context=self._context, vocab_size=self.model.vocab_size,
      has_tokenizer=self.tokenizer is not None, adapters=self._weights.adapters,
    )  # fmt: skip

  def step(self) -> list[StepOutput]:
    """Runs one visit on every instance; returns the new tokens of each request.

    A visit is one step, or several if all rows decode (`EngineConfig.decode_steps_per_call`); a
    request appears once, with all its tokens. An error that belongs to one request ends that
    request with finish_reason "error" and the reason; the others continue. An error that belongs to
    no request (device failure, Ctrl-C) is raised; all pages are freed then, and the next visit
    continues every response, to the same bits. A drafter that raises or returns invalid tokens is
    disabled with a warning; drafts change no bit.
    """
    return self._visits.run(self.policy_version, self.step_times)

  def hold(self, request_ids: Iterable[str]) -> None:
    """Replaces the set of held requests; their responses do not grow. It changes no bit.

    Held requests still prefill their prompts.
    """
    self._requests.held = frozenset(request_ids)

  def poll(self) -> list[Completion]:
    """Returns the requests that finished since the last call, in the order they finished."""
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
    """Runs requests to completion and returns their completions in the order given.

    Args:
      requests: submitted at once, all or none; a text is one user turn, and may stand alone.
      sampling: sampling parameters of texts (`texts.as_requests` has the defaults for None);
        requests have their own.
      seed: seed of texts, 0 if None: the n-th in the list gets `texts.seed_at(seed, n)`.
      on_step: called with each visit's updates. It may cancel requests; these are not returned.
      **fields: fields of `SamplingParams`, such as temperature=0.0; replace `sampling`.

    Raises:
      ValueError: as `add_request`, and as `texts.as_requests`.
    """
    context = self._context.positions
    requests = texts.as_requests(requests, sampling, self.tokenizer, context, seed, fields)
    return generation.to_ends(
      self, requests, live=self._requests.live, keep=self._outputs.put_back, on_step=on_step
    )

  def top_logprobs(
    self,
    request: Request,
    answers: Sequence[Sequence[int]],
    count: int,
    *,
    drafts: Sequence[Sequence[Sequence[int]]] = (),
    instance: int = 0,
    on_step: Callable[[list[StepOutput]], None] | None = None,
  ) -> list[dict[tuple[int, ...], TopLogprobs]]:
    """Returns the top-k next tokens after given responses to a request; nothing is sampled.

    All are computed in one step if rows and memory allow: one row for each response and one for
    each drafted token. Pages are shared with everything that is cached. Other requests of the
    engine continue in the same steps, with the same bits.

    Args:
      request: its prompt, adapter and max_tokens are used; its sampling parameters are not.
      answers: partial responses, () for an empty one.
      count: number of top tokens at each position, 1 to 16, at most the vocabulary size.
      drafts: for each response, paths of token ids after it that are evaluated too, as far as there
        is room; the likeliest path first.
      instance: instance to run on, with its cached pages.
      on_step: called with each visit's updates of other requests.

    Returns:
      For each response, a dict from the path after it, () for none, to pairs (token id,
      log-probability under softmax(logits)): the likeliest first, ties by the lowest id. The ids
      are those of `head.top_logprobs`.

    Raises:
      ValueError: as `add_request`, for the request; if the count or the instance is out of range,
        a response has max_tokens or more, or the number of drafts is not that of the responses.
      RuntimeError: with the error of a step that failed one of them.
    """
    self.check(request)
    self._requests.check_instance(f"Engine.top_logprobs of {request.request_id!r}", instance)
    live = self._requests.live
    sequences = reading.begun(
      request, answers, count, drafts,
      instance=instance, adapter=self._weights.index_of[request.adapter],
      vocab_size=self.model.vocab_size, live=live,
    )  # fmt: skip
    self.memory.take_again()
    for sequence in sequences:
      self._requests.add(sequence)
    return reading.to_ends(self, sequences, live=live, keep=self._outputs.put_back, on_step=on_step)

  def update_weights(self, params: parameters.Params, policy_version: int) -> None:
    """Replaces the weights and drops every page written with the old ones.

    Raises:
      ValueError: if requests are unfinished (their tokens would come from two policies), or if the
        weights have the wrong model, layout or dtype, or are not finite. The old weights stay.
    """
    checks.whole("Engine.update_weights: policy_version", policy_version, 0, None, "count updates")
    fix = "finish or cancel them (a completion comes from one policy_version)"
    self._requests.require_none("update_weights", fix)
    self._weights.replace(params, what="Engine.update_weights: params")
    self.policy_version = policy_version
    self._forget_pages()

  def release_weights(self) -> None:
    """Frees the weights and drops every page; requests are refused until `update_weights`.

    Raises:
      ValueError: if requests are unfinished.
    """
    self._requests.require_none("release_weights", "finish or cancel them")
    self._weights.drop()
    self._forget_pages()

  def set_adapters(self, adapters: Mapping[str, Any]) -> None:
    """Replaces the adapters that requests may name, and drops every page.

    A request with an adapter gets the same bits as in an engine with the weights
    `lora.attach(params, adapter, scale)`; a request for the base weights gets those of an engine
    without adapters; the other requests of a step do not matter. Adapters with the shapes of the
    previous ones need no new program. Weights and policy_version stay; `update_weights` keeps the
    adapters.

    Args:
      adapters: by name, f32 masters and the scale of their low-rank term, as `peft.load` returns
        them; empty for the base weights alone.

    Raises:
      ValueError: if requests are unfinished, the weights have an adapter already (`lora.attach`),
        or an adapter does not fit the weights or is not finite. The old adapters stay.
    """
    checks.weights(self._weights.params, "Engine.set_adapters")
    self._requests.require_none("set_adapters", "finish or cancel them")
    self._weights.set_adapters(adapters, what="Engine.set_adapters")
    self._forget_pages()

  def _forget_pages(self) -> None:
    """Releases all KV pages. Pins first, because a pinned page cannot be freed."""
    self._pins.release()
    self.memory.forget_all()
    self._weights.publish(self.memory, self.policy_version)

  def progress(self, request_id: str) -> Completion:
    """Returns a request's partial response; raises ValueError for an unknown request."""
    return self._requests.find(request_id, "Engine.progress").completion("", self.policy_version)

  def abort_request(self, request_id: str) -> None:
    """Cancels a request; raises ValueError for one that is unknown or has finished."""
    sequence = self._requests.find(request_id, "Engine.abort_request")
    self.memory.release(sequence)
    self._requests.remove(sequence)
    self._outputs.drop(request_id)

  def idle_step(self, num_requests: int, num_rows: int, num_steps: int = 1) -> Callable[[], None]:
    """Returns a function that runs a step of dummy rows, for timing; see `Planner.idle_rows`."""
    checks.weights(self._weights.params, "Engine.idle_step")
    self._requests.require_none("idle_step", "measure before adding requests")
    self.memory.take_again()
    return self._visits.idle(num_requests, num_rows, num_steps, self._context.positions)

  def release_kv_cache(self) -> None:
    """Frees the memory of all pages until the next request; their content is lost.

    Raises:
      ValueError: if requests are unfinished.
    """
    self._requests.require_none("release_kv_cache", "finish or cancel them")
    self._pins.release()
    self.memory.give_back()

  def memory_plan(self) -> str:
    """Returns a one-line summary of the allocated memory, per device if there are several."""
    return sizes.described(
      self.config, self._runner.decoder, data_parallel_size=self.data_parallel_size,
      allocated=(self.memory.pages, self._weights.params), context=self._context,
    )  # fmt: skip


__all__ = ["Counters", "Engine", "EngineConfig", "StepOutput"]
