"""Runs schedules of an engine with contexts, and compares every completion and rewrite."""

from __future__ import annotations

import collections
from collections.abc import Callable
import pathlib
import tempfile
from typing import Any

import hypothesis
import sleep_plans
import sleep_references
import tiny_model
import word_engine

from seerjax.engine.engine import Engine
from seerjax.kv.pool import KVPool, KVPoolConfig
from seerjax.sleep import runner as sleep_lib
from seerjax.sleep.contexts import Contexts, Rewrite
from seerjax.sleep.runner import Runner
from seerjax.speculation.suffix_drafter import SuffixDrafter
from seerjax.types import Completion, Request, SamplingParams


class Watched(Engine):
  """An engine that records which namespace wrote each page, and which one finds it."""

  def __init__(self, *args, **others):
    super().__init__(*args, **others)
    self.strangers: list[str] = []
    memory, writers = self.memory, {}
    remember, find, hold_found = memory.remember, memory.find, memory.hold_found

    def remembering(sequence, tokens, pages=None, windows=()):
      remember(sequence, tokens, pages, windows)
      held = sequence.pages if pages is None else pages
      for page in held[: -(-len(tokens) // self.config.page_size)]:
        writers[sequence.instance, page] = sequence.owner.namespace

    def check(sequence, pages):
      for page in pages:
        owner, namespace = writers[sequence.instance, page], sequence.owner.namespace
        if owner != namespace:  # An exception here would end only the request.
          self.strangers.append(f"got a page of {owner!r} for {sequence.name!r} of {namespace!r}")

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
    plan: sleep_plans.Plan,
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
      self.directory,
      identity=sleep_plans.NANO,
      on_drop=lambda dropped: self.runner.dropped(dropped),
    )
    self.engine = sleep_references.make_engine(
      self.numerics,
      self.mesh,
      self.weights,
      config=sleep_plans.SIZES if is_shared or not self.plan.is_small else sleep_plans.SMALL,
      kind=engine_kind,
      policy_version=self.policy_version,
      drafter=SuffixDrafter(budget=None) if self.plan.has_drafts else None,
      kv_pool=KVPool(KVPoolConfig(host_pages=self.plan.host_pages)),
      step_times=sleep_plans.TABLES[self.plan.table],
    )
    self.runner = runner_kind(
      self.engine,
      self.contexts,
      sleep_plans.PROMPTS,
      config=sleep_references.config_of(self.plan),
      planner_config=sleep_plans.EAGER,
      seen=sleep_plans.SEEN,
    )
    self.own_pins.clear()
    self.off.clear()

  def run(self) -> None:
    try:
      while self.coming or self.live or self._sleeps():
        self._disturb()
        self._visit()
        self.visit += 1
        assert self.visit < sleep_plans.MAX_VISITS, "the schedule does not end"
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
    every = sleep_plans.LOADS[self.plan.load]
    if self.coming and every and self.visit % every == 0 and len(self.live) < 4:
      self._front(self.visit)

  def _key(self, choice: int) -> tuple[str, str]:
    return sleep_plans.SPACES[choice % 2], sleep_plans.NAMES[choice // 2 % 2]

  def _register(self, choice: int, number: int) -> None:
    self._expire()
    key, text = self._key(choice), sleep_plans.TEXTS[number % 3]
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
        namespace=("", *sleep_plans.SPACES)[number % 3],
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
    key, question = self._key(choice), sleep_plans.QUESTIONS[number % 3]
    if key not in self.known:
      return
    context = self.contexts.get(*key, step=self.visit)
    rewrites = self.contexts.rewrites(*key, step=self.visit)
    notes = sleep_plans.PROMPTS.joined([one.text for one in rewrites])
    has_slept = bool(notes.strip())
    messages = sleep_plans.PROMPTS.wake(question, "" if has_slept else context.text, notes, 0)
    prompt = tuple(word_engine.TOKENIZER.chat_ids([*messages]))
    if len(prompt) + 8 > sleep_plans.SIZES.max_model_len:
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

  def _submit(self, request: Request, partial: Completion | None = None) -> None:
    self.num_asked += partial is None
    self.live[request.request_id] = request
    self.engine.add_request(request, resume_from=partial)

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
    tokens, space = word_engine.tokens_from(number % 5, 9), ("", *sleep_plans.SPACES)[choice % 3]
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
    self.engine.update_weights(
      sleep_references.params(self.numerics, self.weights), self.policy_version
    )
    kept = [pin for pin in self.engine.chunks.pins if pin.num_kept]
    assert not kept, f"got pins of old weights: {kept}"
    for request in again.values():
      self._submit(request)
    self.events["other weights"] += 1

  def _restart(self, choice: int, number: int) -> None:
    """Only the registry and the streamed tokens of foreground requests survive."""
    partials = {name: self.engine.progress(name) for name in self.live}
    self.events["cut short"] += self.runner.num_working
    self._count()
    self.contexts.close()
    self.paused.clear()
    self._open()
    again, self.live = self.live, {}
    for name, request in again.items():
      self._submit(request, partials[name] if partials[name].tokens else None)
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
    self.runner.advance(sleep_plans.SPACES, step=self.visit)
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
      expected = sleep_references.alone(self.numerics, self.weights, request)
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
        expected = sleep_references.rewrite_alone(
          self.numerics, weights, one.context_id, text, one.job, self.plan.num_jobs
        )
        assert (one.text, one.num_tokens) == expected, f"got {one}, expected {expected}"
        if (key, one) not in self.old:
          self.old.append((key, one))
          self.events["rewrites"] += 1
      assert not any(one.false_equations for one in found)
      assert all(one.false_equations for one in quarantine)
    for space in sleep_plans.SPACES:
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

  def check(plan: sleep_plans.Plan) -> None:
    with tempfile.TemporaryDirectory() as directory:
      try:
        Schedule(plan, numerics, mesh, pathlib.Path(directory), events, **kinds).run()
      except AssertionError as error:
        error.add_note(f"schedule: {plan}, mesh {mesh}, seed {seed}")
        raise
    events["schedules"] += 1

  for plan in sleep_plans.ALWAYS:
    check(plan)
  # A failing schedule is printed unshrunk, because shrinking takes minutes.
  phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
  settings = hypothesis.settings(
    max_examples=num, deadline=None, phases=phases, report_multiple_bugs=False
  )
  hypothesis.seed(seed)(settings(hypothesis.given(plan=sleep_plans.PLANS)(check)))()
