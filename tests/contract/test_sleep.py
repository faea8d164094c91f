"""Sleep-time compute changes no bit of a completion, and no schedule changes a rewrite.

Hypothesis draws schedules of an engine with contexts: no, some or full load of foreground requests,
and edits, times to live, deletions, questions, pauses, preemptions, spills, pins, weight updates,
restarts from the registry, and rewrites with changed files. Every completion, with or without
drafts from rewrites, is compared with the same request alone in a plain engine, and every rewrite
with that of a sleeper that has such an engine to itself, call by call. Deleted content must not be
served, and no namespace may find another's pages, pins or drafts. Event counts are printed, and an
event with count 0 is a failure.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
import dataclasses
import functools
import pathlib
import tempfile
from typing import Any, NamedTuple

import hypothesis
from hypothesis import strategies as st
import jax
import pytest
import sleep_prompts
import tiny_model
import twins
import word_engine

from seerjax import numerics as numerics_lib, parallel
from seerjax.engine import runner as runner_lib
from seerjax.engine.engine import Engine, EngineConfig
from seerjax.engine.step_times import StepTimes
from seerjax.kv.owner import BASE, Owner
from seerjax.kv.pool import KVPool, KVPoolConfig
from seerjax.kv.prefix_index import PrefixIndex
from seerjax.models import parameters
from seerjax.models.decoder import decide
from seerjax.models.loading import Model
from seerjax.sleep import contexts as contexts_lib, planner, runner as sleep_lib
from seerjax.sleep.contexts import Contexts, Identity, Rewrite
from seerjax.sleep.engine_thinker import EngineThinker
from seerjax.sleep.planner import Mean, PlannerConfig, Seen
from seerjax.sleep.runner import Runner, RunnerConfig
from seerjax.sleep.thinkers import Call
from seerjax.speculation.suffix_drafter import SuffixDrafter
from seerjax.types import Completion, Request, SamplingParams

NANO = Identity(weights="w", tokenizer="t", template="c")
SPACES, NAMES = ("ours", "theirs"), ("a", "b")
TEXTS = ("Ana has 2.", "Bo has 19 and 5.", "Cy has 7.")
# Sleeps for every context: the seen statistics outweigh later ones and make sleep worthwhile.
EAGER = PlannerConfig(num_trials=10**6)
SEEN = Seen(
  sleep={planner.kind_of(1): Mean(10**6, 0)},
  short={planner.kind_of(1): Mean(10**6, 0)},
  full={planner.kind_of(1): Mean(10**6, 10**9)},
)
SIZES = dataclasses.replace(word_engine.SIZES, pinned_pages=4)
SMALL = EngineConfig(
  page_size=4,
  num_pages=20,
  max_num_seqs=3,
  max_model_len=64,
  batch_size_buckets=(4, 16),
  pinned_pages=6,
)
TABLES = (
  None,
  StepTimes(rows=(1, 64), seconds=(1.0, 1.0)),
  StepTimes(rows=(1, 64), seconds=(1.0, 64.0)),
)
MAX_VISITS = 1500
LOADS = (0, 7, 1)  # Visits between two foreground requests: never, now and then, always.
EVENTS = (
  "contexts", "edits", "expired", "forgotten", "rewrites", "quarantined", "questions from rewrites",
  "questions from text", "scored questions", "requests in front", "rows among others",
  "paused", "preempted sleep", "spilled sleep", "taken off for others", "cut short", "pins held",
  "pins taken off", "restored pins", "other weights", "restarts", "stale refused", "damaged",
  "drafted tokens", "accepted tokens", "positions reused",
)  # fmt: skip


def read(reply: str, notes: str) -> tuple[str, bool]:
  """Finishes with the second reply; some texts, selected by content, get a false equation."""
  text = f"{notes}{reply[:9]}"
  is_false = bool(notes) and sum(map(ord, text)) % 4 == 0
  return text + "\n1+1=3" * is_false, bool(notes)


PROMPTS = dataclasses.replace(sleep_prompts.PROMPTS, read=read, anticipated=lambda notes: ("Who?",))
QUESTIONS = ("Who?", "Ana?", "How many has Bo?")


class Disturbance(NamedTuple):
  """An event `wait` visits after the previous one; `choice` selects its target."""

  wait: int
  kind: str
  choice: int
  number: int


class Plan(NamedTuple):
  """One schedule. `load` and `table` are indices into `LOADS` and `TABLES`."""

  load: int
  table: int
  host_pages: int
  num_jobs: int
  has_drafts: bool
  is_small: bool
  disturbances: tuple[Disturbance, ...]


KINDS = (
  "register", "register", "register", "ask", "ask", "ask", "pause", "preempt", "spill", "pin",
  "unpin", "forget", "weights", "restart", "late", "damage",
)  # fmt: skip
PLANS = st.builds(
  Plan,
  load=st.integers(0, len(LOADS) - 1),
  table=st.integers(0, len(TABLES) - 1),
  host_pages=st.sampled_from([4096, 0]),
  num_jobs=st.integers(1, 2),
  has_drafts=st.booleans(),
  is_small=st.booleans(),
  disturbances=st.lists(
    st.builds(
      Disturbance,
      wait=st.integers(0, 12),
      kind=st.sampled_from(KINDS),
      choice=st.integers(0, 11),
      number=st.integers(0, 11),
    ),
    min_size=8,
    max_size=24,
  ).map(tuple),
)


def plan_of(*disturbances: tuple[int, str, int, int], **fields: Any) -> Plan:
  """Returns a hand-written schedule."""
  usual = dict(load=0, table=1, host_pages=0, num_jobs=1, has_drafts=True, is_small=False)
  return Plan(**{**usual, **fields}, disturbances=tuple(Disturbance(*one) for one in disturbances))


# Schedules that always run: pins that leave for foreground requests and come back; all ways in
# which a context is removed; and weight updates during much sleep.
ALWAYS = (
  plan_of(
    (0, "register", 0, 1), (0, "register", 1, 2), (60, "ask", 0, 0), (2, "crowd", 0, 0),
    (99, "ask", 0, 1), (30, "spill", 0, 0), host_pages=4096,
  ),
  plan_of(
    (0, "register", 0, 0), (0, "register", 3, 1), (9, "spill", 0, 3), (40, "late", 0, 0),
    (9, "damage", 0, 0), (0, "ask", 3, 2), (30, "register", 0, 4), (0, "late", 0, 0),
    (50, "forget", 0, 0), (0, "ask", 3, 0), (9, "restart", 0, 0), (9, "ask", 3, 0),
    (5, "register", 1, 2), (2, "preempt", 0, 0), (60, "ask", 1, 1), (9, "crowd", 0, 0),
    num_jobs=2, load=1,
  ),
  plan_of(
    (0, "register", 0, 0), (0, "register", 2, 3), (7, "weights", 0, 0), (50, "ask", 0, 0),
    (9, "weights", 0, 0), (0, "ask", 0, 1), (12, "pause", 0, 6), (3, "ask", 2, 0),
    (1, "register", 2, 1), (9, "restart", 0, 0), load=2, host_pages=4096,
  ),
)  # fmt: skip


# Two namespaces register the same text, one after the other.
SHARED = plan_of((0, "register", 0, 0), (60, "register", 1, 0))
# Prefixes are pinned when the weights are updated.
PINNED = plan_of(
  (0, "register", 0, 1), (0, "register", 1, 2), (60, "weights", 0, 0), (0, "ask", 0, 1)
)


@functools.cache
def params(numerics, seed: int):
  if numerics == word_engine.NUMERICS:
    return word_engine.params(seed)
  master = parameters.init(numerics_lib.key(seed), word_engine.CONFIG, numerics)
  return parameters.compute_params(jax.tree.map(lambda leaf: leaf * 5, master), numerics)


@functools.cache
def programs(numerics, mesh: tuple[int, int]) -> runner_lib.Runner:
  if numerics == word_engine.NUMERICS and mesh == (1, 1):
    return word_engine.runner()
  made = parallel.make_mesh(data_parallel_size=mesh[0], tensor_parallel_size=mesh[1])
  return runner_lib.Runner(decide(word_engine.CONFIG, numerics), made, max_programs=64)


def make_engine(numerics, mesh, weights: int, *, config=SIZES, kind=Engine, **others) -> Engine:
  model = Model(word_engine.CONFIG, params(numerics, weights), numerics, word_engine.TOKENIZER)
  return kind(
    model, config=config, key=numerics_lib.key(11), runner=programs(numerics, mesh), **others
  )


# References alone.


@functools.cache
def plain_engine(numerics, weights: int) -> Engine:
  alone = dataclasses.replace(SIZES, max_num_seqs=1, enable_prefix_caching=False)
  return make_engine(numerics, (1, 1), weights, config=alone)


@functools.cache
def alone(numerics, weights: int, request: Request) -> Completion:
  """Returns the completion of a request that runs alone in a plain engine."""
  plain = dataclasses.replace(request, request_id="alone", group_id="", namespace="")
  return plain_engine(numerics, weights).generate([plain])[0]


def config_of(plan: Plan) -> RunnerConfig:
  return RunnerConfig(
    num_jobs=plan.num_jobs,
    sleep_tokens=5,
    temperature=0.9,
    parallel_temperature=0.7,
    seed=4,
    num_anticipated=int(plan.has_drafts),
    answer_tokens=6,
  )


@functools.cache
def rewrite_alone(
  numerics, weights: int, context_id: str, text: str, job: int, num_jobs: int
) -> tuple[str, int]:
  """Returns (text, tokens) of a job; its calls run alone in a plain engine, one by one."""
  config = config_of(Plan(0, 0, 0, num_jobs, False, False, ()))
  thinker = EngineThinker(plain_engine(numerics, weights))
  notes, total, is_finished = "", 0, False
  for number in range(config.max_rethinks):
    call = Call(
      messages=sleep_prompts.user(f"{text}{notes}"),
      max_tokens=config.sleep_tokens,
      temperature=config.parallel_temperature if job else config.temperature,
      seed=sleep_lib.job_seed(config.seed, context_id, job, number),
    )
    answer = thinker.complete(**{f.name: getattr(call, f.name) for f in dataclasses.fields(call)})
    total += answer.num_tokens
    notes, is_finished = PROMPTS.read(answer.text, notes)
    if is_finished:
      break
  return notes, total


# Running schedules.


class Watched(Engine):
  """An engine that records which namespace wrote each page, and which one finds it."""

  def __init__(self, *args, **others):
    super().__init__(*args, **others)
    self.strangers: list[str] = []
    memory, writers = self.memory, {}
    remember, find, hold_found = memory.remember, memory.find, memory.hold_found

    def remembering(sequence, tokens, pages=None):
      remember(sequence, tokens, pages)
      held = sequence.pages if pages is None else pages
      for page in held[: -(-len(tokens) // self.config.page_size)]:
        writers[sequence.instance, page] = sequence.owner.namespace

    def check(sequence, pages):
      for page in pages:
        whose, namespace = writers[sequence.instance, page], sequence.owner.namespace
        if whose != namespace:  # An exception here would end only the request.
          self.strangers.append(f"got a page of {whose!r} for {sequence.name!r} of {namespace!r}")

    def finding(sequence, tokens):
      hit = find(sequence, tokens)
      check(sequence, [*hit.pages, *([] if hit.copy_from is None else [hit.copy_from])])
      return hit

    def holding(sequence):
      pages = hold_found(sequence)
      check(sequence, pages)
      return pages

    # Patches this engine only.
    memory.remember, memory.find, memory.hold_found = remembering, finding, holding  # type: ignore


class Schedule:
  """Runs one plan over several engines and registries in turn; `run` checks all results."""

  def __init__(
    self,
    plan: Plan,
    numerics,
    mesh: tuple[int, int],
    directory: pathlib.Path,
    events: collections.Counter[str],
    *,
    engine_kind: Callable[..., Engine] = Watched,
    runner_kind: type[Runner] = Runner,
    contexts_kind: type[Contexts] = Contexts,
  ):
    self.plan, self.numerics, self.mesh, self.directory = plan, numerics, mesh, directory
    self.events = events
    self.kinds = engine_kind, runner_kind, contexts_kind
    self.weights = self.policy_version = 0
    self.visit = self.num_asked = 0
    self.weights_of = {0: 0}  # By policy_version.
    # Expected content of the registry: (namespace, name) to (version, text, expires).
    self.known: dict[tuple[str, str], tuple[int, str, int | None]] = {}
    self.versions: collections.Counter[tuple[str, str]] = collections.Counter()
    self.old: list[tuple[tuple[str, str], Rewrite]] = []
    self.live: dict[str, Request] = {}
    self.paused: dict[str, int] = {}  # Visit at which each request resumes.
    self.own_pins: list[tuple[tuple[int, ...], str]] = []
    self.off: set[tuple[int, ...]] = set()
    self.coming = [*plan.disturbances]
    self.due = self.coming[0].wait if self.coming else 0
    self._open()

  def _open(self) -> None:
    engine_kind, runner_kind, contexts_kind = self.kinds
    # Other tests use the programs of these settings as well.
    is_shared = (self.numerics, self.mesh) == (word_engine.NUMERICS, (1, 1))
    self.contexts = contexts_kind(
      self.directory, identity=NANO, on_drop=lambda dropped: self.runner.dropped(dropped)
    )
    self.engine = make_engine(
      self.numerics,
      self.mesh,
      self.weights,
      config=SIZES if is_shared or not self.plan.is_small else SMALL,
      kind=engine_kind,
      policy_version=self.policy_version,
      drafter=SuffixDrafter(budget=None) if self.plan.has_drafts else None,
      kv_pool=KVPool(KVPoolConfig(host_pages=self.plan.host_pages)),
      step_times=TABLES[self.plan.table],
    )
    self.runner = runner_kind(
      self.engine,
      self.contexts,
      PROMPTS,
      config=config_of(self.plan),
      planner_config=EAGER,
      seen=SEEN,
    )
    self.own_pins.clear()
    self.off.clear()

  def run(self) -> None:
    try:
      while self.coming or self.live or self._sleeps():
        self._disturb()
        self._visit()
        self.visit += 1
        assert self.visit < MAX_VISITS, "the schedule does not end"
      self._check_all()
      self._count()
    finally:
      self.contexts.close()

  def _sleeps(self) -> bool:
    return bool(self.paused or self.engine.num_unfinished or self.runner.num_working)

  # Disturbances.

  def _disturb(self) -> None:
    while self.coming and self.due <= self.visit:
      one = self.coming.pop(0)
      getattr(self, f"_{one.kind}")(one.choice, one.number)
      if self.coming:
        self.due = self.visit + self.coming[0].wait
    every = LOADS[self.plan.load]
    if self.coming and every and self.visit % every == 0 and len(self.live) < 4:
      self._front(self.visit)

  def _key(self, choice: int) -> tuple[str, str]:
    return SPACES[choice % 2], NAMES[choice // 2 % 2]

  def _register(self, choice: int, number: int) -> None:
    self._expire()
    key, text = self._key(choice), TEXTS[number % 3]
    ttl = (None, None, 25)[number // 3 % 3]
    before = self.known.get(key)
    context = self.contexts.register(*key, text, [*text.encode()], step=self.visit, ttl_steps=ttl)
    if before is None or before[1] != text:
      self.versions[key] += 1
      self.events["edits"] += before is not None
    self.events["contexts"] += before is None
    self.known[key] = (self.versions[key], text, None if ttl is None else self.visit + ttl)
    assert context.version == self.versions[key]

  def _forget(self, choice: int, number: int) -> None:
    self._expire()
    key = self._key(choice)
    if key in self.known:
      self.contexts.forget(*key, step=self.visit)
      del self.known[key]
      self.events["forgotten"] += 1

  def _expire(self) -> None:
    over = [key for key, known in self.known.items() if known[2] is not None]
    for key in over:
      expires = self.known[key][2]
      if expires is not None and expires <= self.visit:
        del self.known[key]
        self.events["expired"] += 1

  def _front(self, number: int) -> None:
    prompt = word_engine.tokens_from(number % 5, 3 + number % 19)
    self._submit(
      Request(
        request_id=f"front {self.num_asked}",
        prompt=prompt,
        sampling=SamplingParams(max_tokens=4 + number % 14),
        seed=number,
        namespace=("", *SPACES)[number % 3],
      )
    )
    self.events["requests in front"] += 1

  def _crowd(self, choice: int, number: int) -> None:
    """Submits foreground requests that need all pages."""
    for place in range(3):
      self._submit(
        Request(
          request_id=f"crowd {self.num_asked}",
          prompt=word_engine.tokens_from(60 * place, 30),
          sampling=SamplingParams(max_tokens=28),
          seed=place,
        )
      )

  def _ask(self, choice: int, number: int) -> None:
    self._expire()
    key, question = self._key(choice), QUESTIONS[number % 3]
    if key not in self.known:
      return
    context = self.contexts.get(*key, step=self.visit)
    rewrites = self.contexts.rewrites(*key, step=self.visit)
    notes = PROMPTS.joined([one.text for one in rewrites])
    has_slept = bool(notes.strip())
    messages = PROMPTS.wake(question, "" if has_slept else context.text, notes, 0)
    prompt = tuple(word_engine.TOKENIZER.chat_ids([*messages]))
    if len(prompt) + 8 > SIZES.max_model_len:
      return
    temperature = 0.8 * (number % 2)
    self._submit(
      Request(
        request_id=f"question {self.num_asked}",
        prompt=prompt,
        sampling=SamplingParams(max_tokens=8, temperature=temperature),
        seed=number,
        group_id=sleep_lib.group_of(context),
        namespace=context.namespace,
      )
    )
    self.events[f"questions from {'rewrites' if has_slept else 'text'}"] += 1
    self.runner.answered(context, 8, has_slept=has_slept, question=question if number % 3 else "")

  def _submit(self, request: Request, said: Completion | None = None) -> None:
    self.num_asked += said is None
    self.live[request.request_id] = request
    self.engine.add_request(request, resume_from=said)

  def _any(self, choice: int) -> str:
    """Returns a request that is not paused, for most choices a sleeper; "" if there is none."""
    names = sorted(set(self.engine._requests.live) - set(self.engine.chunks.poll_paused()))
    sleepers = [name for name in names if name.startswith(sleep_lib.NAME)]
    names = sleepers if sleepers and choice % 3 else names
    return names[choice % len(names)] if names else ""

  def _pause(self, choice: int, number: int) -> None:
    name = self._any(choice)
    if name:
      self.engine.chunks.pause(name)
      self.paused[name] = self.visit + 1 + number
      self.events["paused"] += 1

  def _preempt(self, choice: int, number: int) -> None:
    name = self._any(choice)
    if name:
      before = self.engine.counters.preemptions
      self.engine.chunks.preempt(name)
      is_asleep = name.startswith(sleep_lib.NAME)
      self.events["preempted sleep"] += is_asleep * (self.engine.counters.preemptions - before)

  def _spill(self, choice: int, number: int) -> None:
    self._pause(choice, number)
    names = [name for name in self.engine.chunks.poll_paused() if name in self.paused]
    for name in self.engine.chunks.spill(names):
      self.events["spilled sleep"] += name.startswith(sleep_lib.NAME)

  def _pin(self, choice: int, number: int) -> None:
    tokens, space = word_engine.tokens_from(number % 5, 9), ("", *SPACES)[choice % 3]
    used = sum(len(pin.tokens) // self.engine.config.page_size for pin in self.engine.chunks.pins)
    wanted = len(tokens) // self.engine.config.page_size
    if (tokens, space) not in self.own_pins and used + wanted <= self.engine.config.pinned_pages:
      self.engine.chunks.pin(tokens, namespace=space)
      self.own_pins.append((tokens, space))

  def _unpin(self, choice: int, number: int) -> None:
    if self.own_pins:
      tokens, space = self.own_pins.pop(choice % len(self.own_pins))
      self.engine.chunks.unpin(tokens, namespace=space)

  def _weights(self, choice: int, number: int) -> None:
    self.events["cut short"] += self.runner.num_working
    self.runner.stop()
    again, self.live = self.live, {}
    for name in again:
      self.engine.abort_request(name)
    self.paused.clear()
    self.weights, self.policy_version = 1 - self.weights, self.policy_version + 1
    self.weights_of[self.policy_version] = self.weights
    self.engine.update_weights(params(self.numerics, self.weights), self.policy_version)
    kept = [pin for pin in self.engine.chunks.pins if pin.num_kept]
    assert not kept, f"got pins of old weights: {kept}"
    for request in again.values():
      self._submit(request)
    self.events["other weights"] += 1

  def _restart(self, choice: int, number: int) -> None:
    """Only the registry and the streamed tokens of foreground requests survive."""
    said = {name: self.engine.progress(name) for name in self.live}
    self.events["cut short"] += self.runner.num_working
    self._count()
    self.contexts.close()
    self.paused.clear()
    self._open()
    again, self.live = self.live, {}
    for name, request in again.items():
      self._submit(request, said[name] if said[name].tokens else None)
    self.events["restarts"] += 1

  def _late(self, choice: int, number: int) -> None:
    """Delivers a rewrite of an older version or of a removed context, which must be refused."""
    self._expire()
    if not self.old:
      return
    key, rewrite = self.old[choice % len(self.old)]
    is_current = key in self.known and self.versions[key] == rewrite.version
    if is_current:
      return
    assert self.contexts.keep(*key, rewrite, step=self.visit) is None
    self.events["stale refused"] += 1

  def _damage(self, choice: int, number: int) -> None:
    """Changes one character of a rewrite's file."""
    files = sorted(self.directory.glob("rewrites/*/*.txt"))
    if files:
      path = files[choice % len(files)]
      text = path.read_text()
      path.write_text(("b" if text[0] == "a" else "a") + text[1:])

  # Checks.

  def _visit(self) -> None:
    self._expire()
    for name, until in [*self.paused.items()]:
      if until <= self.visit:
        del self.paused[name]
        if name in self.engine._requests.live:
          self.engine.chunks.resume(name)
    self.runner.advance(SPACES, step=self.visit)
    rows, spilled = self.engine.counters.background_rows, self._off()
    updates = self.engine.step()
    assert not self.engine.strangers, self.engine.strangers
    is_shared = any(update.request_id in self.live for update in updates)
    self.events["rows among others"] += is_shared * (self.engine.counters.background_rows - rows)
    taken = self._off() - spilled
    self.events["pins taken off"] += len(taken)
    self.off |= taken
    back = {pin.tokens for pin in self.engine.chunks.pins if pin.num_held} & self.off
    self.events["restored pins"] += len(back)
    self.off -= back
    before = self.runner.jobs.stopped
    for completion in self.runner.take(self.engine.poll(), step=self.visit):
      request = self.live.pop(completion.request_id)
      expected = alone(self.numerics, self.weights, request)
      assert tiny_model.same(completion, expected, 0), (
        f"request {request}: got {completion}, expected {expected}"
      )
    self.events["cut short"] += self.runner.jobs.stopped - before
    self._check()

  def _off(self) -> set[tuple[int, ...]]:
    return {pin.tokens for pin in self.engine.chunks.pins if pin.num_kept and not pin.num_held}

  def _check(self) -> None:
    """Checks that nothing is left of removed contexts: rewrites, pins or drafts."""
    self._expire()
    groups = set()
    for key, (version, text, _) in self.known.items():
      context = self.contexts.get(*key, step=self.visit)
      assert (context.version, context.text) == (version, text)
      groups.add(f"\0{context.namespace}\0{sleep_lib.group_of(context)}")
      found = self.contexts.rewrites(*key, step=self.visit)
      quarantine = self.contexts.quarantine(*key, step=self.visit)
      for one in (*found, *quarantine):
        assert one.version == version, f"got {one}, expected version {version} of {key}"
        weights = self.weights_of[one.policy_version]
        expected = rewrite_alone(
          self.numerics, weights, one.context_id, text, one.job, self.plan.num_jobs
        )
        assert (one.text, one.num_tokens) == expected, f"got {one}, expected {expected}"
        if (key, one) not in self.old:
          self.old.append((key, one))
          self.events["rewrites"] += 1
      assert not any(one.false_equations for one in found)
      assert all(one.false_equations for one in quarantine)
    for space in SPACES:
      named = {name for where, name in self.known if where == space}
      assert set(self.contexts.names(space, step=self.visit)) == named
    own = {(space, tokens) for tokens, space in self.own_pins}
    for pin in self.engine.chunks.pins:
      self.events["pins held"] += pin.num_held > 0
      account = any(
        (pin.namespace, pin.tokens) in account.starts for account in self.runner._accounts.values()
      )
      assert (pin.namespace, pin.tokens) in own or account, f"got the pin {pin} of nothing"
    versions = {(*key, known[0]) for key, known in self.known.items()}
    assert {tuple(key) for key in self.runner._accounts} <= versions
    drafter = self.engine.drafter
    if isinstance(drafter, SuffixDrafter):
      # Questions about a removed context draft from their own text alone.
      for group in {name for name in drafter.group_ids if "\0context " in name} - groups:
        taught = [name for name in drafter._texts[group] if name.startswith(sleep_lib.NAME)]
        assert not taught, f"got drafts {taught} of {group!r}, which is gone"

  def _check_all(self) -> None:
    for key in self.known:
      found = self.contexts.rewrites(*key, step=self.visit)
      quarantine = self.contexts.quarantine(*key, step=self.visit)
      over = [job for known, job in self.runner._over if known[:2] == key]
      jobs = sorted([*(one.job for one in (*found, *quarantine)), *over])
      expected = [*range(self.plan.num_jobs)]
      assert jobs == expected, f"got the jobs {jobs} of {key}, expected {expected}"
      self.events["quarantined"] += len(quarantine)

  def _count(self) -> None:
    """Adds counters of engine, registry and runner; called once for each, when it is abandoned."""
    counters = self.engine.counters
    self.events["taken off for others"] += counters.background_spilled
    self.events["taken off for others"] += counters.background_preempted
    self.events["preempted sleep"] += counters.background_preempted
    self.events["spilled sleep"] += counters.background_spilled
    self.events["drafted tokens"] += counters.drafted_tokens
    self.events["accepted tokens"] += counters.accepted_tokens
    self.events["positions reused"] += counters.reused_tokens
    self.events["damaged"] += self.contexts.counts.damaged
    self.events["scored questions"] += self.runner.jobs.scored


def run_schedules(
  numerics,
  mesh: tuple[int, int],
  events: collections.Counter[str],
  *,
  seed: int,
  num: int,
  **kinds: Callable[..., Any],
) -> None:
  """Runs the schedules that always run, and `num` drawn ones."""

  def check(plan: Plan) -> None:
    with tempfile.TemporaryDirectory() as directory:
      try:
        Schedule(plan, numerics, mesh, pathlib.Path(directory), events, **kinds).run()
      except AssertionError as error:
        error.add_note(f"schedule: {plan}, mesh {mesh}, seed {seed}")
        raise
    events["schedules"] += 1

  for plan in ALWAYS:
    check(plan)
  # A failing schedule is printed unshrunk, because shrinking takes minutes.
  phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
  settings = hypothesis.settings(
    max_examples=num, deadline=None, phases=phases, report_multiple_bugs=False
  )
  hypothesis.seed(seed)(settings(hypothesis.given(plan=PLANS)(check)))()


NUMERICS = {
  "f32": word_engine.NUMERICS,
  "bf16": tiny_model.BFLOAT16,
  "native f32": tiny_model.NATIVE,
  "native bf16": tiny_model.NATIVE_BFLOAT16,
}
MESHES = ((1, 1), (2, 1), (1, 2), (2, 2))  # (instances, model shards)


@pytest.mark.parametrize(
  "dtype, num", [("f32", 1), pytest.param("native bf16", 1, marks=pytest.mark.thorough)]
)
def test_no_sleep_changes_a_bit(dtype, num, seed, tell_events):
  events = collections.Counter()
  run_schedules(NUMERICS[dtype], (1, 1), events, seed=seed, num=num)
  assert events["schedules"] >= len(ALWAYS) + num
  always = ("rewrites", "questions from rewrites", "rows among others", "restored pins")
  tell_events(dtype, events, (*always, "other weights", "restarts", "damaged", "stale refused"))


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("dtype", NUMERICS)
def test_no_sleep_of_three_hundred_changes_a_bit(dtype, mesh, seed, tell_events):
  # One test per block, so that an interrupted run resumes at the block.
  events = collections.Counter()
  run_schedules(NUMERICS[dtype], mesh, events, seed=100 * seed + 7, num=18)
  assert events["schedules"] >= 20
  tell_events(f"{dtype}, {mesh}", events, EVENTS)


# Twins: each breaks one rule, and a schedule that always runs detects it.


class Careless(Contexts):
  """Twin: rewrites of version n are served for n + 1."""

  def _take(self, context):
    kept = dict(self._kept.get((context.namespace, context.name), {}))
    super()._take(context)
    self._kept[context.namespace, context.name] = kept
    return ()


class Trusting(Contexts):
  """Twin: a rewrite is accepted although its file was changed."""

  def _all(self, namespace, name, step):
    for kept in self._kept.get((namespace, name), {}).values():
      path = self._path(namespace, name, kept.rewrite, kept.digest)
      digest = contexts_lib._digest(path.read_text())
      if digest != kept.digest:
        fresh = self._path(namespace, name, kept.rewrite, digest)
        path.rename(fresh)
        self._kept[namespace, name][kept.rewrite.job] = kept._replace(digest=digest)
    return super()._all(namespace, name, step)


class KeepsPins(Watched):
  """Twin: pages of pins are found after a weight update."""

  def _forget_pages(self):
    held = {sequence: list(sequence.pages) for sequence in self._pins.sequences if sequence.pages}
    self.memory.forget_all()
    self._weights.publish(self.memory, self.policy_version)
    for sequence in held:
      self.memory.remember(sequence, sequence.tokens[: sequence.num_written])


TAKES_A_SLOT = functools.partial(Watched, planner=twins.TakesASlot)


class Shared(PrefixIndex):
  """A prefix index that ignores namespaces."""

  def find(self, tokens, owner=BASE):
    return super().find(tokens, Owner(owner.adapter))

  def remember(self, tokens, pages, owner=BASE):
    super().remember(tokens, pages, Owner(owner.adapter))


class FindsAnothers(Watched):
  """Twin: all namespaces find a page."""

  def __init__(self, *args, **others):
    super().__init__(*args, **others)
    for pool in self.memory.pools:
      pool._index = Shared(self.config.page_size)


@pytest.mark.parametrize(
  "plan, kinds, message",
  [
    pytest.param(
      ALWAYS[1], dict(runner_kind=twins.FromTheClock), "expected .'", id="seeds of a clock"
    ),
    pytest.param(ALWAYS[1], dict(contexts_kind=Careless), "expected version 2", id="old version"),
    pytest.param(ALWAYS[1], dict(contexts_kind=Trusting), "expected .'", id="a changed token"),
    pytest.param(PINNED, dict(engine_kind=KeepsPins), "got pins of old", id="pins of old weights"),
    pytest.param(ALWAYS[2], dict(engine_kind=TAKES_A_SLOT), "got ", id="another's slot"),
    pytest.param(
      SHARED, dict(engine_kind=FindsAnothers), "got a page of '(ours|theirs)' for", id="namespaces"
    ),
  ],
)
def test_what_breaks_a_rule_is_found_out(tmp_path, plan, kinds, message):
  events = collections.Counter()
  with pytest.raises(AssertionError, match=message):
    Schedule(plan, NUMERICS["f32"], (1, 1), tmp_path, events, **kinds).run()
