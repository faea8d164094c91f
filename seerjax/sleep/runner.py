"""Sleeps for contexts in the background of an engine that others ask questions.

  contexts  --planner: does it pay?-->  jobs  --background requests-->  rewrites, on disk
                                               |
     pins of prompts' starts, drafts of the context's questions   <---  of each rewrite

Between two steps of the engine its owner calls `advance`, and `take` with what has finished. A job
is one sleeper of one version of a context. Its seeds follow from the context's digest, the job's
number and the call's, never from when it began, so that it leaves the same rewrite under any load.
A job that is cut short leaves nothing and is begun again, from the registry alone: a kill loses the
jobs in work, and `stop` (before new weights) does no more.

No clock decides: what is slept for follows from what was registered, asked and seen.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
import dataclasses
import hashlib
from typing import NamedTuple

from seerjax.engine.engine import Engine
from seerjax.rollout import groups
from seerjax.sleep import planner, thinkers
from seerjax.sleep.contexts import Context, Contexts, Dropped, Rewrite
from seerjax.sleep.engine_thinker import EngineThinker
from seerjax.sleep.planner import Decision, PlannerConfig, Realised, Seen
from seerjax.sleep.prompts import Prompts
from seerjax.sleep.protocol import MAX_RETHINKS
from seerjax.sleep.thinkers import Call, NoAnswer
from seerjax.speculation.suffix_drafter import SuffixDrafter
from seerjax.tasks.stateful import StatefulContext
from seerjax.types import Completion, Request, SamplingParams

NAME = "\0sleep"  # Begins the names of our requests; no other's does.
_SEEDS = 3  # Set apart from the seeds of `protocol`.


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerConfig:
  """How much is slept, and how.

  Attributes:
    num_jobs: sleepers of one context, each of which leaves a rewrite.
    max_rethinks: most calls of one sleeper.
    sleep_tokens: most tokens of one of its calls.
    temperature: of the first sleeper.
    parallel_temperature: of those beside it.
    num_at_once: jobs in work.
    verbosity: of the answers whose prompts are pinned; a place among those of the prompts.
    seed: of the run.
  """

  num_jobs: int = 1
  max_rethinks: int = MAX_RETHINKS
  sleep_tokens: int = 1024
  temperature: float = 0.0
  parallel_temperature: float = 0.5
  num_at_once: int = 4
  verbosity: int = 0
  seed: int = 0

  def __post_init__(self):
    for field, least, most in (
      ("num_jobs", 1, None),
      ("max_rethinks", 1, MAX_RETHINKS),
      ("sleep_tokens", 1, None),
      ("num_at_once", 1, None),
      ("verbosity", 0, None),
    ):
      value = vars(self)[field]
      if value < least or (most is not None and value > most):
        end = "" if most is None else f" and at most {most}"
        raise ValueError(
          f"RunnerConfig.{field}: got {value}, expected at least {least}{end}; see its default."
        )


def job_seed(seed: int, context_id: str, job: int, number: int) -> int:
  """Returns the seed of a sleeper's call.

  Args:
    seed: of the run.
    context_id: digest of the context.
    job: number of the sleeper.
    number: of the call.
  """
  return groups.request_seed(seed, _SEEDS, thinkers.number_of(context_id), job, number)


def group_of(context: Context) -> str:
  """Returns the `Request.group_id` of a context's questions: the drafts of its rewrites are theirs.

  Another namespace's, or version's, is another one.
  """
  named = [context.namespace, context.name, context.version, context.context_id]
  return f"context {hashlib.sha256(repr(named).encode()).hexdigest()[:32]}"


class Key(NamedTuple):
  """A version of a context.

  Attributes:
    namespace: whose.
    name: in the namespace.
    version: of it.
  """

  namespace: str
  name: str
  version: int


class Jobs(NamedTuple):
  """What became of jobs since a runner began.

  Attributes:
    begun: also those that were begun again.
    kept: rewrites.
    empty: sleepers that left nothing.
    failed: that got no answer.
    stale: whose context was gone when they were done.
    stopped: cut short, by `stop` or because their context was gone.
    tokens: of sleep.
  """

  begun: int = 0
  kept: int = 0
  empty: int = 0
  failed: int = 0
  stale: int = 0
  stopped: int = 0
  tokens: int = 0


# What a job asks for, call by call; takes texts and returns its notes.
_Calls = Generator[Call, str, str]


@dataclasses.dataclass
class _Job:
  """A sleeper in work."""

  context: Context
  job: int
  seed: int
  calls: _Calls
  num_tokens: int = 0


@dataclasses.dataclass
class _Account:
  """What is known of a version of a context."""

  decision: Decision | None = None
  num_asked: int = 0
  answer_tokens: list[int] = dataclasses.field(default_factory=list)
  sleep_tokens: int = 0
  starts: list[tuple[int, ...]] = dataclasses.field(default_factory=list)


class Runner:
  """The sleep of one engine and one registry, with one writer, which calls it between two steps.

  Attributes:
    seen: S, b, B and numbers of questions so far; may be set to what an earlier runner had seen.
    jobs: what became of jobs.
    realised: what contexts came to that are over, beside what was predicted; the last are last.
  """

  def __init__(
    self,
    engine: Engine,
    contexts: Contexts,
    prompts: Prompts,
    *,
    config: RunnerConfig = RunnerConfig(),
    planner_config: PlannerConfig | None = None,
    seen: Seen | None = None,
  ):
    """Makes a runner. `Contexts.on_drop` has to be told to call `dropped`.

    Args:
      engine: others may use it, too.
      contexts: the registry.
      prompts: how this model is asked.
      config: budgets.
      planner_config: the price of a token for which a user waits; its defaults if None.
      seen: by an earlier runner; nothing if None.

    Raises:
      ValueError: if the engine has no tokenizer, or the prompts lack `config.verbosity`.
    """
    if config.verbosity >= prompts.num_verbosities:
      raise ValueError(
        f"RunnerConfig.verbosity: got {config.verbosity}, expected a place below"
        f" {prompts.num_verbosities}, the verbosities of these prompts; lower it."
      )
    self._engine, self._contexts, self._prompts = engine, contexts, prompts
    self._config, self._planner_config = config, planner_config or PlannerConfig()
    self._thinker = EngineThinker(engine)
    assert engine.tokenizer is not None  # Else there is no thinker.
    self._tokenizer = engine.tokenizer
    self.seen = seen or Seen()
    self.jobs = Jobs()
    self.realised: list[Realised] = []
    self._accounts: dict[Key, _Account] = {}
    self._working: dict[str, _Job] = {}  # By the id of its request.
    self._filling: dict[str, tuple[int, ...]] = {}  # And of requests that fill a pin.
    # Jobs that left nothing, which would leave nothing again.
    self._over: set[tuple[Key, int]] = set()
    self._num_requests = 0

  @property
  def num_working(self) -> int:
    """Jobs in work."""
    return len(self._working)

  def advance(self, namespaces: Iterable[str], *, step: int) -> None:
    """Begins what is worth doing, as far as there is room for it among the jobs.

    Args:
      namespaces: whose contexts are slept for, first come first served.
      step: of the registry.
    """
    self._fill_pins()
    for namespace in namespaces:
      for name in self._contexts.names(namespace, step=step):
        if len(self._working) >= self._config.num_at_once:
          return
        self._advance(self._contexts.get(namespace, name, step=step), step)

  def _advance(self, context: Context, step: int) -> None:
    key = _key_of(context)
    kept = {
      one.job
      for one in (
        *self._contexts.rewrites(context.namespace, context.name, step=step),
        *self._contexts.quarantine(context.namespace, context.name, step=step),
      )
    }
    working = {one.job for one in self._working.values() if _key_of(one.context) == key}
    for job in range(self._config.num_jobs):
      if len(self._working) >= self._config.num_at_once:
        return
      if job in kept or job in working or (key, job) in self._over:
        continue
      if not self._pays(context):
        return
      self._begin(context, job)

  def _pays(self, context: Context) -> bool:
    """Returns whether to sleep for a context; one that was begun is slept for to its end."""
    account = self._accounts.setdefault(_key_of(context), _Account())
    if account.decision is None or not account.decision.should_sleep:
      kind = planner.kind_of(self._num_tokens(context))
      account.decision = planner.decide(
        self.seen, kind, account.num_asked, self._planner_config
      )
    return account.decision.should_sleep

  def answered(self, context: Context, num_tokens: int, *, has_slept: bool) -> None:
    """Takes that a question about a context was answered, with a rewrite of it or without."""
    account = self._accounts.setdefault(_key_of(context), _Account())
    account.num_asked += 1
    account.answer_tokens.append(num_tokens)
    kind = planner.kind_of(self._num_tokens(context))
    self.seen = planner.saw_answer(self.seen, kind, num_tokens, has_slept=has_slept)

  def take(self, completions: Iterable[Completion], *, step: int) -> list[Completion]:
    """Takes what has finished, and returns what is not ours.

    Args:
      completions: of `Engine.poll`.
      step: of the registry.

    Raises:
      OSError: if the disk is full; the job's rewrite is lost, and every earlier one is there.
    """
    others = []
    for completion in completions:
      if completion.request_id in self._filling:
        self._pin(self._filling.pop(completion.request_id))
      elif completion.request_id in self._working:
        self._go_on(self._working.pop(completion.request_id), completion, step)
      else:
        others.append(completion)
    return others

  def stop(self) -> None:
    """Cuts all jobs short, which begin again: before `Engine.set_params`, or at the end."""
    for request_id in [*self._working, *self._filling]:
      self._engine.cancel(request_id)
    self._count(stopped=len(self._working))
    self._working.clear()
    self._filling.clear()

  def dropped(self, dropped: Dropped) -> None:
    """Lets all go that was made of a version: jobs, pins and drafts, before the next is served."""
    key = Key(dropped.namespace, dropped.name, dropped.version)
    for request_id, job in [*self._working.items()]:
      if _key_of(job.context) == key:
        self._engine.cancel(request_id)
        del self._working[request_id]
        self._count(stopped=1)
    self._over = {entry for entry in self._over if entry[0] != key}
    account = self._accounts.pop(key, None)
    if account is None:
      return
    for start in account.starts:
      for request_id in [name for name, tokens in self._filling.items() if tokens == start]:
        self._engine.cancel(request_id)
        del self._filling[request_id]
      if not any(start in other.starts for other in self._accounts.values()):
        self._engine.unpin(start)
    drafter = self._engine.drafter
    group = _group_of(dropped)
    if isinstance(drafter, SuffixDrafter) and group in drafter.group_ids:
      drafter.drop_group(group)
    self._close(account)

  # Jobs.

  def _begin(self, context: Context, job: int) -> None:
    calls = self._calls(context, job)
    seed = job_seed(self._config.seed, context.context_id, job, 0)
    self._count(begun=1)
    self._ask(_Job(context, job, seed, calls), next(calls))

  def _calls(self, context: Context, job: int) -> _Calls:
    config, notes = self._config, ""
    asked = StatefulContext(context_id=context.context_id, text=context.text)
    for number in range(config.max_rethinks):
      reply = yield Call(
        messages=self._prompts.sleep(asked, notes, number),
        max_tokens=config.sleep_tokens,
        temperature=config.parallel_temperature if job else config.temperature,
        seed=job_seed(config.seed, context.context_id, job, number),
      )
      notes, is_finished = self._prompts.read(reply, notes)
      if is_finished:
        break
    return notes

  def _ask(self, job: _Job, call: Call) -> None:
    self._num_requests += 1
    request_id = f"{NAME} {self._num_requests}"
    try:
      self._engine.submit(self._thinker.request(call, request_id), is_background=True)
    except (NoAnswer, ValueError):  # Too long, for one.
      self._over.add((_key_of(job.context), job.job))
      self._count(failed=1)
      return
    self._working[request_id] = job

  def _go_on(self, job: _Job, completion: Completion, step: int) -> None:
    if completion.finish_reason == "error":
      self._over.add((_key_of(job.context), job.job))
      self._count(failed=1)
      return
    job.num_tokens += len(completion.tokens)
    self._count(tokens=len(completion.tokens))
    try:
      call = job.calls.send(completion.text)
    except StopIteration as end:
      self._end(job, end.value, step)
      return
    self._ask(job, call)

  def _end(self, job: _Job, notes: str, step: int) -> None:
    context, key = job.context, _key_of(job.context)
    account = self._accounts.setdefault(key, _Account())
    account.sleep_tokens += job.num_tokens
    if not notes.strip():
      self._over.add((key, job.job))
      self._count(empty=1)
      return
    rewrite = Rewrite(
      context_id=context.context_id,
      version=context.version,
      job=job.job,
      seed=job.seed,
      policy_version=self._engine.policy_version,
      num_tokens=job.num_tokens,
      text=notes,
    )
    kept = self._contexts.keep(context.namespace, context.name, rewrite, step=step)
    if kept is None:
      self._count(stale=1)
      return
    self._count(kept=1)
    rewrites = self._contexts.rewrites(context.namespace, context.name, step=step)
    num_quarantined = len(
      self._contexts.quarantine(context.namespace, context.name, step=step)
    )
    if len(rewrites) + num_quarantined == self._config.num_jobs:
      kind = planner.kind_of(self._num_tokens(context))
      self.seen = planner.saw_sleep(self.seen, kind, account.sleep_tokens)
    if kept.false_equations:
      return
    self._seed_drafts(context, job.job, notes)
    joined = self._prompts.joined([one.text for one in rewrites])
    self._want(account, self._start(context, joined))

  def _close(self, account: _Account) -> None:
    self.seen = planner.saw_end(self.seen, account.num_asked)
    if account.decision is None:
      return
    expected = account.decision.expected
    self.realised.append(
      planner.realised(
        account.decision,
        sleep_tokens=account.sleep_tokens,
        answer_tokens=account.answer_tokens,
        full_tokens=expected.full_tokens if expected else 0.0,
        config=self._planner_config,
      )
    )

  def _ids(self, text: str) -> list[int]:
    return self._tokenizer.encode(text, special_tokens_as_text=True)

  def _num_tokens(self, context: Context) -> int:
    return max(1, len(self._ids(context.text)))

  def _count(self, **counts: int) -> None:
    values = {field: getattr(self.jobs, field) + count for field, count in counts.items()}
    self.jobs = self.jobs._replace(**values)

  # Pins and drafts.

  def _start(self, context: Context, notes: str) -> tuple[int, ...]:
    """Returns the start that all prompts of a context's questions share."""
    starts = [
      self._tokenizer.chat_ids(
        list(self._prompts.wake(question, "", notes, self._config.verbosity))
      )
      for question in ("How many?", "Who has 1?")
    ]
    count = 0
    while count < min(map(len, starts)) and starts[0][count] == starts[1][count]:
      count += 1
    return tuple(starts[0][:count])

  def _want(self, account: _Account, start: tuple[int, ...]) -> None:
    """Pins a start, if the quota has room for it, in place of the context's earlier ones."""
    for before in account.starts:
      is_shared = any(
        other is not account and before in other.starts for other in self._accounts.values()
      )
      if not is_shared:
        self._engine.unpin(before)
    account.starts.clear()
    size = self._engine.config.page_size
    used = sum(len(pin.tokens) // size for pin in self._engine.pins)
    is_pinned = any(pin.tokens == start for pin in self._engine.pins)
    wanted = 0 if is_pinned else len(start) // size
    has_room = used + wanted <= self._engine.config.pinned_pages
    if len(start) >= size and has_room and self._engine.config.reuse_prefixes:
      account.starts.append(start)
      self._pin(start)

  def _pin(self, start: tuple[int, ...]) -> None:
    if any(start in account.starts for account in self._accounts.values()):
      self._engine.pin(start)

  def _fill_pins(self) -> None:
    """Lets a background request write what a pin lacks: at first, and after new weights."""
    ours = {start for account in self._accounts.values() for start in account.starts}
    for pin in self._engine.pins:
      if pin.num_kept or pin.tokens not in ours or pin.tokens in self._filling.values():
        continue
      self._num_requests += 1
      request_id = f"{NAME} {self._num_requests}"
      sampling = SamplingParams(max_tokens=1, temperature=0.0)
      request = Request(request_id=request_id, prompt=pin.tokens, sampling=sampling)
      self._engine.submit(request, is_background=True)
      self._filling[request_id] = pin.tokens

  def _seed_drafts(self, context: Context, job: int, notes: str) -> None:
    """Gives a rewrite to the suffix tree of the context's questions (`group_of`)."""
    drafter = self._engine.drafter
    if isinstance(drafter, SuffixDrafter):
      # Only to them: not to the prompts that come again, which may be of another namespace.
      drafter.teach(f"{NAME} {job}", group_of(context), self._ids(notes))


def _key_of(context: Context) -> Key:
  return Key(context.namespace, context.name, context.version)


def _group_of(dropped: Dropped) -> str:
  context = Context(
    context_id=dropped.context_id,
    namespace=dropped.namespace,
    name=dropped.name,
    version=dropped.version,
    text="",
    registered_step=0,
    expires_step=None,
  )
  return group_of(context)


def sleep_to_end(
  runner: Runner, engine: Engine, namespaces: Sequence[str], *, step: int
) -> list[Completion]:
  """Sleeps until nothing is worth doing, and returns what else has finished meanwhile."""
  others: list[Completion] = []
  while True:
    runner.advance(namespaces, step=step)
    if not runner.num_working and not engine.num_unfinished:
      return others
    engine.step()
    others += runner.take(engine.poll(), step=step)
