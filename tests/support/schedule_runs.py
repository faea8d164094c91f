"""Runs schedules, and compares every completion with that of the request alone."""

from __future__ import annotations

import collections
from collections.abc import Callable
import dataclasses

from drawn_requests import alone, make_engine
from guessing import Guesser
import hypothesis
import schedule_plans
import tiny_model

from seerjax.engine import engine as engine_lib
from seerjax.kv.pool import KVPool, KVPoolConfig
from seerjax.types import Completion, Request, SamplingParams


class Schedule:
  """Runs one plan over several engines in turn; `run` checks every completion.

  `make(context, decode_steps_per_call, drafter=...)` returns an engine of that KV bucket; restarts
  take `contexts` and `steps` in turn.
  """

  def __init__(
    self,
    plan: schedule_plans.Plan,
    make: Callable[..., engine_lib.Engine],
    contexts: tuple[int, ...],
    steps: tuple[int, ...],
    numerics,
    events: collections.Counter[str],
  ):
    self.make, self.contexts, self.steps = make, contexts, steps
    self.numerics, self.events = numerics, events
    self.answers: dict[str, tuple[int, ...]] = {}
    self.guesser = None if plan.guesses is None else Guesser(self.answers, plan.guesses, silent=0.4)
    self.context, self.decode_steps_per_call = plan.context, plan.decode_steps_per_call
    self.table, self.pool_config = (
      schedule_plans.TABLES[plan.table],
      KVPoolConfig(host_pages=plan.host_pages),
    )
    self.sleepers = {ask.request_id for ask in plan.asks if ask.is_background}
    self.engine = self._made()
    self.step = 0
    # By the step of arrival.
    self.todo: list[tuple[int, Request]] = []
    self.turns: dict[str, schedule_plans.Turn] = {}
    self.chunks: dict[str, int | None] = {}
    self.disturbances: list[tuple[int, schedule_plans.Disturbance]] = []
    # By request id: the request, its streamed tokens and its streamed text.
    self.live: dict[str, Request] = {}
    self.sampled: dict[str, list[int]] = {}
    self.streamed: dict[str, str] = {}
    # Withheld pages of a pool, with the step of their release.
    self.withheld: list[tuple[int, int, list[int]]] = []
    due = 0
    for ask in plan.asks:
      due += ask.wait
      self.todo.append((due, ask.request))
      self.chunks[ask.request_id] = ask.chunk_tokens
      if ask.then is not None:
        self.turns[ask.request_id] = ask.then
    due = 0
    for disturbance in plan.disturbances:
      due += disturbance.wait
      self.disturbances.append((due, disturbance))

  def _made(self) -> engine_lib.Engine:
    return self.make(
      self.context,
      self.decode_steps_per_call,
      drafter=self.guesser,
      step_times=self.table,
      kv_pool=KVPool(self.pool_config),
    )

  def run(self) -> None:
    self._count_engine()
    while self.todo or self.live:
      self._arrive()
      self._release()
      while self.disturbances and self.disturbances[0][0] <= self.step:
        self._disturb(self.disturbances.pop(0)[1])
      self._step()
      self.step += 1
      assert self.step < schedule_plans.MAX_STEPS, "the schedule does not end"
    self._count()
    assert self.engine.num_unfinished == 0 and not self.engine.poll()

  def _submit(self, request: Request, partial: Completion | None = None) -> None:
    if self.guesser is not None:
      self.answers[request.request_id] = self._expected(request).tokens
    chunk_tokens = self.chunks.get(request.request_id)
    is_background = request.request_id in self.sleepers
    self.engine.add_request(
      request, resume_from=partial, chunk_tokens=chunk_tokens, is_background=is_background
    )
    self.live[request.request_id] = request
    if partial is None:
      self.sampled[request.request_id], self.streamed[request.request_id] = [], ""

  def _expected(self, request: Request) -> Completion:
    return alone(self.numerics, request.prompt, request.sampling, request.seed)

  def _arrive(self) -> None:
    arrivals = [request for due, request in self.todo if due <= self.step]
    self.todo = [(due, request) for due, request in self.todo if due > self.step]
    for request in arrivals:
      self._submit(request)
      self.events["requests"] += 1
      self.events["requests in background"] += request.request_id in self.sleepers
      self.events["arrivals between steps"] += self.step > 0
      sampling = request.sampling
      self.events["greedy"] += sampling.temperature == 0
      self.events["filtered"] += bool(sampling.top_k) or sampling.top_p < 1 or sampling.min_p > 0
      self.events["biased"] += bool(sampling.logit_bias)
      is_long = len(request.prompt) > self.engine.config.batch_size_buckets[-1]
      self.events["chunked prompts"] += is_long

  def _release(self) -> None:
    for until, pool, pages in self.withheld:
      if until <= self.step:
        for page in pages:
          self.engine.memory.pools[pool].release(page)
    self.withheld = [entry for entry in self.withheld if entry[0] > self.step]

  def _disturb(self, disturbance: schedule_plans.Disturbance) -> None:
    ids = sorted(self.live)
    if disturbance.kind == "withhold":
      for pool in range(len(self.engine.memory.pools)):
        count = self.engine.memory.pools[pool].num_available
        pages = self.engine.memory.pools[pool].take(count)
        self.withheld.append((self.step + disturbance.steps, pool, pages))
        self.events["pages withheld"] += count
    elif disturbance.kind == "restart":
      self._restart()
    elif ids and disturbance.kind == "preempt":
      before = self.engine.counters.preemptions
      self.engine.chunks.preempt(ids[disturbance.choice % len(ids)])
      self.events["preempted"] += self.engine.counters.preemptions - before
    elif ids and disturbance.kind == "cancel":
      request_id = ids[disturbance.choice % len(ids)]
      self.engine.abort_request(request_id)
      self.todo.append((self.step + disturbance.steps, self.live.pop(request_id)))
      self.events["cancelled"] += 1

  def _restart(self) -> None:
    """Only streamed tokens survive: each request resumes from them in a new engine."""
    self._count()
    self.events["restarts"] += 1
    previous, before, steps_before = self.engine, self.context, self.decode_steps_per_call
    self.context = context = _after(before, self.contexts)
    self.decode_steps_per_call = _after(steps_before, self.steps)
    self.engine = self._made()
    self.withheld = []
    self._count_engine()
    for request_id in sorted(self.live):
      partial = previous.progress(request_id)
      if not partial.tokens:
        self._submit(self.live[request_id])
        continue
      self.events["continued requests"] += 1
      self.events[schedule_plans.OTHER_BUCKET] += context != before
      is_other = self.decode_steps_per_call != steps_before
      self.events["continued in visits of another length"] += is_other
      stops = self.live[request_id].sampling.stop
      starts = {stop[:length] for stop in stops for length in range(1, len(stop))}
      self.events["continued within a stop string"] += partial.text.endswith(tuple(starts))
      self._submit(self.live[request_id], partial)

  def _step(self) -> None:
    prefilling = any(
      sequence.is_prefilling for running in self.engine._requests.running for sequence in running
    )
    steps_before, rows_before = self.engine.counters.steps, self.engine.counters.background_rows
    updates = self.engine.step()
    num_steps = self.engine.counters.steps - steps_before
    paused = self.engine.chunks.poll_paused()
    self.events["mixed steps"] += prefilling and bool(updates)
    self.events["visits of several steps"] += num_steps > 1
    for update in updates:
      if len(update.tokens) < num_steps:  # It left before the visit's end.
        is_left = update.request_id in self.sleepers and not update.finish_reason
        if is_left and update.request_id not in paused:
          self.events["left off by a visit"] += 1
        elif update.finish_reason or update.request_id in paused:
          why = schedule_plans.VISIT_ENDS[update.finish_reason]
          self.events[f"ended {why} within a visit"] += 1
        else:  # Older requests hold the pages for its next token.
          sequence = self.engine._requests.live[update.request_id]
          assert sequence.end == len(sequence.tokens) < sequence.limit
          self.events["out of pages within a visit"] += 1
      self.sampled[update.request_id].extend(update.tokens)
      self.streamed[update.request_id] += update.text
    for update in updates:
      if update.request_id not in self.sleepers:
        rows = self.engine.counters.background_rows - rows_before
        self.events["rows among others"] += rows
        break
    for completion in self.engine.poll():
      request_id = completion.request_id
      request = self.live.pop(request_id)
      expected = self._expected(request)
      assert tiny_model.same(completion, expected, 0), (
        f"request {request}: got {completion}, expected {expected}"
      )
      assert tuple(self.sampled[request_id]) == expected.tokens
      assert self.streamed[request_id] == expected.text
      if completion.finish_reason == "stop":
        by_id = completion.tokens[-1] in request.sampling.stop_token_ids
        self.events["stopped by an id" if by_id else "stopped by a string"] += 1
      if request_id in self.turns:
        self._next_turn(request, expected.tokens, self.turns.pop(request_id))

    for request_id in self.engine.chunks.poll_paused():
      self.engine.chunks.resume(request_id, chunk_tokens=self.chunks[request_id])
    if not num_steps and self.live and not self.withheld:
      # All requests wait for pages that paused ones hold.
      held = [name for name in sorted(self.live) if self.engine.chunks.held_pages(name)]
      if held:
        self.engine.chunks.preempt(held[-1])

  def _next_turn(
    self, request: Request, answer: tuple[int, ...], turn: schedule_plans.Turn
  ) -> None:
    prompt = request.prompt + answer + turn.question
    sampling = SamplingParams(**turn.sampling)
    if len(prompt) + sampling.max_tokens <= schedule_plans.MAX_CONTEXT:
      following = Request(
        request_id=f"{request.request_id}, then",
        prompt=prompt,
        sampling=sampling,
        seed=request.seed,
      )
      self.todo.append((self.step + 1, following))
      self.events["further turns"] += 1

  def _count_engine(self) -> None:
    self.events[f"engines of context {self.context}"] += 1

  def _count(self) -> None:
    """Adds the engine's counters; called once per engine, when it is abandoned."""
    counters = dataclasses.asdict(self.engine.counters)
    for event, field in (
      ("visits", "visits"),
      ("steps with waiting", "waits"),
      ("positions reused", "reused_tokens"),
      ("pages copied", "page_copies"),
      ("steps", "steps"),
      ("tokens", "sampled_tokens"),
      ("drafted tokens", "drafted_tokens"),
      ("accepted tokens", "accepted_tokens"),
      ("side paths", "side_paths"),
      ("rows in background", "background_rows"),
      ("paused for others", "background_paused"),
      ("taken off for others", "background_spilled"),
      ("taken off for others", "background_preempted"),
    ):
      self.events[event] += counters[field]


def _after(value: int, values: tuple[int, ...]) -> int:
  return values[(values.index(value) + 1) % len(values)]


def run_schedules(
  numerics,
  size: str,
  mesh: tuple[int, int],
  contexts: tuple[int, ...],
  *,
  seed: int,
  settings: hypothesis.settings,
  events: collections.Counter[str],
  steps: tuple[int, ...] = (1,),
  kind: Callable[..., engine_lib.Engine] = engine_lib.Engine,
) -> None:
  """Runs as many schedules as the settings specify; they share compiled programs, not pages."""
  data_parallel_size, tensor_parallel_size = mesh

  def make(context: int, decode_steps_per_call: int, **others) -> engine_lib.Engine:
    config = dataclasses.replace(
      schedule_plans.SIZES[size], max_model_len=context, decode_steps_per_call=decode_steps_per_call
    )
    return make_engine(config, numerics, mesh, kind, **others)

  @hypothesis.seed(seed)
  @settings
  @hypothesis.given(plan=schedule_plans.plans(contexts, steps))
  def check(plan: schedule_plans.Plan) -> None:
    try:
      Schedule(plan, make, contexts, steps, numerics, events).run()
    except AssertionError as error:
      error.add_note(f"schedule: size {size!r}, mesh {mesh}, contexts {contexts}, seed {seed}")
      raise
    events["schedules"] += 1
    events[f"pages of {schedule_plans.SIZES[size].page_size}"] += 1
    events[f"instances {data_parallel_size}, model shards {tensor_parallel_size}"] += 1

  for host_pages in (4096, 0):
    check = hypothesis.example(
      plan=schedule_plans.beside_sleepers(contexts[0], host_pages=host_pages)
    )(check)
  if len(steps) > 1:
    check = hypothesis.example(
      plan=schedule_plans.within_visits(numerics, contexts[0], max(steps))
    )(check)
  check()
