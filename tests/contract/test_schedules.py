"""No schedule changes a bit of a request's completion.

Hypothesis draws schedules: requests and their arrivals, batch mixes, chunk sizes, page sizes, KV
buckets, memory pressure, preemption, cancelling, prefix hits, further turns, stop strings,
restarts, meshes, decode steps per visit, and background requests, with or without a table of step
times. Every completion is compared, token by token and log-probability by log-probability, with the
same request alone in a plain engine. Event counts are printed, and an event with count 0 is a
failure.

A KV bucket is the width of the page table (`max_model_len`, in whole splits): with the row bucket
it determines the compiled program of a step. Engines of several widths take over from one another.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

from drawn_requests import SAMPLING, alone, make_engine, tokens
from guessing import Guesser
import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
from seen_inputs import SeesInputs
import tiny_model
import twins

from seerjax.engine import engine as engine_lib, planner as planner_lib
from seerjax.engine.engine import EngineConfig
from seerjax.engine.step_times import StepTimes
from seerjax.kv.pool import KVPool, KVPoolConfig
from seerjax.types import Completion, Request, SamplingParams

MAX_CONTEXT = 64
MAX_STEPS = 1000
SIZES = {
  "chunks of 16": EngineConfig(
    page_size=8, num_pages=26, max_num_seqs=4, max_model_len=64, batch_size_buckets=(4, 16)
  ),
  "chunks of 1 to 7": EngineConfig(
    page_size=4, num_pages=40, max_num_seqs=6, max_model_len=64, batch_size_buckets=(7,)
  ),
  "pages of a split": EngineConfig(
    page_size=16, num_pages=14, max_num_seqs=3, max_model_len=64, batch_size_buckets=(3, 9)
  ),
  "small pages": EngineConfig(
    page_size=2, num_pages=90, max_num_seqs=8, max_model_len=64, batch_size_buckets=(8, 40)
  ),
  "no reuse": EngineConfig(
    page_size=8,
    num_pages=26,
    max_num_seqs=5,
    max_model_len=64,
    batch_size_buckets=(5, 24),
    enable_prefix_caching=False,
  ),
}
MESHES = ((1, 1), (2, 1), (1, 2), (2, 2))  # (instances, model shards)
# KV buckets of 4, 5 and 9 splits.
CONTEXTS = (MAX_CONTEXT, 80, 144)

EVENTS = (
  "requests",
  "arrivals between steps",
  "mixed steps",
  "chunked prompts",
  "preempted",
  "cancelled",
  "pages withheld",
  "steps with waiting",
  "restarts",
  "continued requests",
  "drafted tokens",
  "accepted tokens",
  "side paths",
  "further turns",
  "stopped by an id",
  "stopped by a string",
  "greedy",
  "filtered",
  "biased",
)
# Events in the middle of a visit of several steps.
VISIT_EVENTS = (
  "visits of several steps",
  "ended by an id within a visit",
  "ended by its length within a visit",
  "ended its chunk within a visit",
  "continued in visits of another length",
)
# Events with background requests.
BACKGROUND_EVENTS = (
  "requests in background",
  "rows in background",
  "rows among others",
  "paused for others",
  "taken off for others",
)
# Step times: free rows, rows of equal cost, and stairs.
TABLES = (
  None,
  StepTimes(rows=(1, 4096), seconds=(1.0, 1.0)),
  StepTimes(rows=(1, 64), seconds=(1.0, 64.0)),
  StepTimes(rows=(1, 4, 5, 64), seconds=(1.0, 1.0, 2.0, 2.0), visits=((1, 8, 6.0),)),
)
VISIT_ENDS = {"stop": "by an id", "length": "by its length", "": "its chunk"}
REUSE_EVENTS = ("positions reused", "pages copied")
OTHER_BUCKET = "continued in another KV bucket"


# Schedules.


class Turn(NamedTuple):
  """A further turn after a completion, and the fields of its `SamplingParams`."""

  question: tuple[int, ...]
  sampling: dict[str, Any]


class Ask(NamedTuple):
  """The fields of a `Request`, visits since the previous one, tokens of a chunk (None: all), and
  the turn that follows the completion.

  Fields and not records: annotations are checked at random places, which must not happen while
  hypothesis draws.
  """

  request_id: str
  prompt: tuple[int, ...]
  sampling: dict[str, Any]
  seed: int
  group_id: str
  wait: int
  chunk_tokens: int | None
  then: Turn | None
  is_background: bool = False

  @property
  def request(self) -> Request:
    return Request(
      request_id=self.request_id,
      prompt=self.prompt,
      sampling=SamplingParams(**self.sampling),
      seed=self.seed,
      group_id=self.group_id,
    )


class Disturbance(NamedTuple):
  """A disturbance of the engine, `wait` visits after the previous one.

  `choice` selects the request, modulo their number; `steps` is how long pages are withheld or a
  cancelled request stays away. A restart takes the next context and the next steps per visit.
  """

  wait: int
  kind: str
  choice: int
  steps: int


class Plan(NamedTuple):
  """One schedule: everything that is drawn. `guesses` seeds a drafter, None has none; `table` is
  one of `TABLES`; `host_pages` is the pool's number of host pages."""

  context: int
  decode_steps_per_call: int
  guesses: int | None
  asks: tuple[Ask, ...]
  disturbances: tuple[Disturbance, ...]
  table: int = 0
  host_pages: int = 4096


DISTURBANCES = st.lists(
  st.builds(
    Disturbance,
    wait=st.integers(0, 5),
    # Cancelling ends what the others disturb, so it is rarer.
    kind=st.sampled_from(
      ["preempt", "withhold", "restart", "preempt", "withhold", "restart", "cancel"]
    ),
    choice=st.integers(0, 11),
    steps=st.integers(1, 8),
  ),
  min_size=6,
  max_size=20,
).map(tuple)


@st.composite
def plans(draw, contexts: tuple[int, ...], steps: tuple[int, ...]) -> Plan:
  """Groups of one to four; half of the prompts share a prefix with another. Where visits may have
  several steps, every other schedule has no row that limits a visit to one."""
  is_free = draw(st.booleans()) and len(steps) > 1
  asked_nothing = dict(stop=(), allowed_token_ranges=()) if is_free else {}
  sampling_of = SAMPLING.map(lambda fields: fields | asked_nothing)
  starts = [draw(tokens(3, 30)) for _ in range(2)]
  waits = st.integers(0, draw(st.sampled_from([0, 1, 4])))
  asleep = st.booleans() if draw(st.booleans()) else st.just(False)
  asks = []
  for group in range(draw(st.integers(2, 4))):
    start = draw(st.sampled_from([(), *starts]))
    prompt, sampling = start + draw(tokens(1, 12)), draw(sampling_of)
    members = draw(st.integers(1, 4))
    asks += [
      Ask(
        request_id=f"{group}-{member}",
        prompt=prompt,
        sampling=sampling,
        seed=draw(st.integers(0, 2**32 - 1)),
        group_id=f"group {group}" if members > 1 else "",
        wait=draw(waits),
        chunk_tokens=draw(st.none() | st.integers(1, 12)),
        then=draw(st.none() | st.builds(Turn, tokens(1, 4), sampling_of)),
        is_background=draw(asleep),
      )
      for member in range(members)
    ]
  return Plan(
    context=draw(st.sampled_from(contexts)),
    decode_steps_per_call=draw(st.sampled_from(steps)),
    guesses=draw(st.none() | st.integers(0, 2**32 - 1)),
    asks=tuple(draw(st.permutations(asks))),
    disturbances=draw(DISTURBANCES),
    table=draw(st.integers(0, len(TABLES) - 1)),
    host_pages=draw(st.sampled_from([4096, 0])),
  )


def within_visits(numerics, context: int, steps: int) -> Plan:
  """Returns a schedule that always runs: rows leave in the middle of visits, one by an id, one by
  its length, and one at the end of each chunk; then other engines continue."""
  first, seed = (5, 6, 7), 3
  answer = alone(numerics, first, SamplingParams(max_tokens=20), seed).tokens
  stop = next(place for place in range(4, 20) if answer[place] not in answer[:place])
  fields = dict(max_tokens=20, stop_token_ids=(answer[stop],))
  asks = [
    Ask("by an id", first, fields, seed, "", 0, None, None),
    Ask("by its length", first, dict(max_tokens=6), 4, "", 0, None, None),
    Ask("by chunks", (8, 9), dict(max_tokens=20), 5, "", 0, 7, None),
    Ask("to the end", (10,), dict(max_tokens=20), 6, "", 0, None, None),
  ]
  restart = Disturbance(wait=3, kind="restart", choice=0, steps=1)
  return Plan(context, steps, None, tuple(asks), (restart,))


def beside_sleepers(context: int, *, host_pages: int) -> Plan:
  """Returns a schedule that always runs: background requests fill the memory and the rows that a
  table permits, until foreground requests arrive."""
  asks = [
    Ask(f"sleeper {place}", (7, place), dict(max_tokens=40), place, "", 0, None, None, True)
    for place in range(8)
  ]
  asks += [
    Ask(f"front {place}", (9, place), dict(max_tokens=40), place, "", 4 - place, None, None)
    for place in range(3)
  ]
  return Plan(context, 1, None, tuple(asks), (), 1, host_pages)


# Running schedules.


class Schedule:
  """Runs one plan over several engines in turn; `run` checks every completion.

  `make(context, decode_steps_per_call, drafter=...)` returns an engine of that KV bucket; restarts
  take `contexts` and `steps` in turn.
  """

  def __init__(
    self,
    plan: Plan,
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
    self.table, self.pool_config = TABLES[plan.table], KVPoolConfig(host_pages=plan.host_pages)
    self.sleepers = {ask.request_id for ask in plan.asks if ask.is_background}
    self.engine = self._made()
    self.step = 0
    # By the step of arrival.
    self.todo: list[tuple[int, Request]] = []
    self.turns: dict[str, Turn] = {}
    self.chunks: dict[str, int | None] = {}
    self.disturbances: list[tuple[int, Disturbance]] = []
    # By request id: the request, its streamed tokens and its streamed text.
    self.live: dict[str, Request] = {}
    self.said: dict[str, list[int]] = {}
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
      assert self.step < MAX_STEPS, "the schedule does not end"
    self._count()
    assert self.engine.num_unfinished == 0 and not self.engine.poll()

  def _submit(self, request: Request, said: Completion | None = None) -> None:
    if self.guesser is not None:
      self.answers[request.request_id] = self._expected(request).tokens
    chunk_tokens = self.chunks.get(request.request_id)
    is_background = request.request_id in self.sleepers
    self.engine.add_request(
      request, resume_from=said, chunk_tokens=chunk_tokens, is_background=is_background
    )
    self.live[request.request_id] = request
    if said is None:
      self.said[request.request_id], self.streamed[request.request_id] = [], ""

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

  def _disturb(self, disturbance: Disturbance) -> None:
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
      said = previous.progress(request_id)
      if not said.tokens:
        self._submit(self.live[request_id])
        continue
      self.events["continued requests"] += 1
      self.events[OTHER_BUCKET] += context != before
      is_other = self.decode_steps_per_call != steps_before
      self.events["continued in visits of another length"] += is_other
      stops = self.live[request_id].sampling.stop
      starts = {stop[:length] for stop in stops for length in range(1, len(stop))}
      self.events["continued within a stop string"] += said.text.endswith(tuple(starts))
      self._submit(self.live[request_id], said)

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
          why = VISIT_ENDS[update.finish_reason]
          self.events[f"ended {why} within a visit"] += 1
        else:  # Older requests hold the pages for its next token.
          sequence = self.engine._requests.live[update.request_id]
          assert sequence.end == len(sequence.tokens) < sequence.limit
          self.events["out of pages within a visit"] += 1
      self.said[update.request_id].extend(update.tokens)
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
      assert tuple(self.said[request_id]) == expected.tokens
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

  def _next_turn(self, request: Request, answer: tuple[int, ...], turn: Turn) -> None:
    prompt = request.prompt + answer + turn.question
    sampling = SamplingParams(**turn.sampling)
    if len(prompt) + sampling.max_tokens <= MAX_CONTEXT:
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
      SIZES[size], max_model_len=context, decode_steps_per_call=decode_steps_per_call
    )
    return make_engine(config, numerics, mesh, kind, **others)

  @hypothesis.seed(seed)
  @settings
  @hypothesis.given(plan=plans(contexts, steps))
  def check(plan: Plan) -> None:
    try:
      Schedule(plan, make, contexts, steps, numerics, events).run()
    except AssertionError as error:
      error.add_note(f"schedule: size {size!r}, mesh {mesh}, contexts {contexts}, seed {seed}")
      raise
    events["schedules"] += 1
    events[f"pages of {SIZES[size].page_size}"] += 1
    events[f"instances {data_parallel_size}, model shards {tensor_parallel_size}"] += 1

  for host_pages in (4096, 0):
    check = hypothesis.example(plan=beside_sleepers(contexts[0], host_pages=host_pages))(check)
  if len(steps) > 1:
    check = hypothesis.example(plan=within_visits(numerics, contexts[0], max(steps)))(check)
  check()


NUMERICS = tiny_model.BACKENDS
STEPS = (3, 8, 1)  # Maximum steps of a visit.
# A second KV bucket where it costs one program, and visits of several steps where they cost one.
QUICK = {
  "f32": (
    ("chunks of 16", (1, 1), (64,), STEPS),
    ("chunks of 1 to 7", (2, 1), (64, 144), (1,)),
  ),
  "bf16": (
    ("chunks of 16", (2, 2), (64,), STEPS),
    ("chunks of 1 to 7", (1, 1), (64, 144), (1,)),
  ),
  "native f32": (
    ("small pages", (2, 2), (64,), STEPS),
    ("chunks of 1 to 7", (1, 1), (64, 144), (1,)),
  ),
  "native bf16": (
    ("chunks of 16", (1, 2), (64,), STEPS),
    ("chunks of 1 to 7", (2, 1), (64, 144), (1,)),
  ),
}


def expected_events(
  contexts: tuple[int, ...], *, reuse: bool, has_room: bool = True
) -> tuple[str, ...]:
  buckets = tuple(f"engines of context {context}" for context in contexts)
  # A second path needs more rows than the smallest steps have.
  common = tuple(event for event in EVENTS if has_room or event != "side paths")
  reused = REUSE_EVENTS if reuse else ()
  return common + VISIT_EVENTS + BACKGROUND_EVENTS + reused + buckets + (OTHER_BUCKET,)


ONE_TILED, ONE_NATIVE = pytest.mark.few(1, of="tiled"), pytest.mark.few(1, of="native")


# Everyday runs use a CPU's default; CI also uses the portable path.
@pytest.mark.parametrize(
  "dtype",
  [
    pytest.param("f32", marks=[ONE_TILED, pytest.mark.thorough]),
    pytest.param("bf16", marks=[ONE_TILED, pytest.mark.thorough]),
    pytest.param("native f32", marks=ONE_NATIVE),
    pytest.param("native bf16", marks=[ONE_NATIVE, pytest.mark.thorough]),
  ],
)
def test_no_schedule_changes_a_bit(dtype, seed, tell_events):
  events = collections.Counter()
  for place, (size, mesh, contexts, steps) in enumerate(QUICK[dtype]):
    # More examples where requests move between KV buckets, which only some of them do.
    settings = hypothesis.settings(max_examples=9 if len(contexts) > 1 else 5)
    run_schedules(
      NUMERICS[dtype],
      size,
      mesh,
      contexts,
      seed=100 * seed + place,
      settings=settings,
      events=events,
      steps=steps,
    )
  tell_events(dtype, events, expected_events((64, 144), reuse=True))


class FollowsTheBatch(SeesInputs):
  """Twin: the noise changes when a step samples more than one request."""

  def _inputs(self, work):
    inputs = super()._inputs(work)
    crowded = (inputs.num_samples > 1).astype(np.uint32)
    return inputs._replace(seeds=inputs.seeds + crowded[:, None])


@pytest.mark.thorough
def test_a_sleeper_that_takes_the_slot_of_one_in_front_is_found_out():
  def make(context: int, decode_steps_per_call: int, **others) -> engine_lib.Engine:
    config = dataclasses.replace(
      SIZES["chunks of 16"], max_model_len=context, decode_steps_per_call=decode_steps_per_call
    )
    return make_engine(config, NUMERICS["native f32"], planner=twins.TakesASlot, **others)

  plan, events = beside_sleepers(64, host_pages=0), collections.Counter()
  with pytest.raises(AssertionError, match="got Completion"):
    Schedule(plan, make, (64,), (1,), NUMERICS["native f32"], events).run()
  assert events["rows among others"] > 0


class BeginsLate(planner_lib.Planner):
  """Twin: visits of several steps start one position late."""

  def visit_inputs(self, scheduled, inputs, num_steps):
    visit = super().visit_inputs(scheduled, inputs, num_steps)
    batch = visit.step.batch
    late = batch._replace(positions=batch.positions + 1)
    return visit._replace(step=visit.step._replace(batch=late))


LATE = functools.partial(engine_lib.Engine, planner=BeginsLate)


@pytest.mark.thorough
@pytest.mark.parametrize(
  "kind, dtype, place, num, steps",
  [(FollowsTheBatch, "bf16", 1, 6, (1,)), (LATE, "f32", 0, 2, (8, 3))],
)
def test_an_engine_that_breaks_the_contract_is_found_out(kind, dtype, place, num, steps, seed):
  # The twin must fail, so nothing is saved to the database and nothing is shrunk.
  explicit = [hypothesis.Phase.explicit] if kind is LATE else []
  settings = hypothesis.settings(
    max_examples=num,
    phases=[*explicit, hypothesis.Phase.generate],
    database=None,
    report_multiple_bugs=False,
  )
  size, mesh, contexts, _ = QUICK[dtype][place]
  given = dict(seed=seed, settings=settings, events=collections.Counter(), steps=steps, kind=kind)
  with pytest.raises(AssertionError, match="got Completion"):
    run_schedules(NUMERICS[dtype], size, mesh, contexts, **given)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["", "native "], ids=["tiled", "native"])
@pytest.mark.parametrize("block", range(20))
def test_no_schedule_of_five_hundred_changes_a_bit(block, backend, seed, tell_events):
  # Every (dtype, mesh) with at least two of the five sizes; each block is its own test, so that an
  # interrupted run resumes at the block.
  dtype, mesh = backend + ("f32", "bf16")[block % 2], MESHES[block // 2 % 4]
  size = list(SIZES)[(block + block // 8) % 5]
  events = collections.Counter()
  # The first of 26 is the minimal schedule, with which hypothesis starts.
  run_schedules(
    NUMERICS[dtype],
    size,
    mesh,
    CONTEXTS,
    seed=100 * seed + 10 + block,
    settings=hypothesis.settings(max_examples=26),
    events=events,
    steps=STEPS,
  )
  assert events["schedules"] >= 26
  expected = expected_events(
    CONTEXTS,
    reuse=SIZES[size].enable_prefix_caching,
    has_room=SIZES[size].batch_size_buckets[-1] > 9,
  )
  tell_events(f"block {block}, {dtype}, {size}, {mesh}", events, expected)
