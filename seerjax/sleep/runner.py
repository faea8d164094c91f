"""Runs sleep-time compute as background requests of an engine that also serves questions.

  contexts  --planner: does it pay?-->  jobs  --background requests-->  rewrites, on disk
                                               |
     pinned prompt prefixes, drafts for questions about the context  <---  from each rewrite
     and from answers to anticipated questions

Between two engine steps, the owner calls `advance`, and `take` with finished completions. A job is
one sleeper of one version of a context. Its seeds depend on the context's digest, the job number
and the call number, not on when it starts, so it produces the same rewrite under any load. An
aborted job leaves nothing and is restarted from the registry: a crash or `stop` (called before new
weights) loses only running jobs.

Predictability of questions is also scored in the background: the engine is forced to generate each
question after its context, and the planner groups contexts by the scores.

Decisions depend on what was registered, asked and measured, never on a clock.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
import dataclasses
import hashlib
import math
from typing import Any, NamedTuple

from seerjax import fields
from seerjax.engine import drafting
from seerjax.engine.engine import Engine
from seerjax.rollout import groups
from seerjax.sleep import planner, thinkers
from seerjax.sleep.contexts import Context, Contexts, Dropped, Rewrite
from seerjax.sleep.engine_thinker import EngineThinker
from seerjax.sleep.planner import Decision, Kind, PlannerConfig, Realised, Seen
from seerjax.sleep.prompts import Prompts
from seerjax.sleep.protocol import MAX_RETHINKS
from seerjax.sleep.states import Jobs, Progress
from seerjax.sleep.thinkers import Call, NoAnswer
from seerjax.speculation.suffix_drafter import SuffixDrafter
from seerjax.tasks.stateful import StatefulContext
from seerjax.types import Completion, Request, SamplingParams

NAME = "\0sleep"  # Prefix of the request ids of this module; no other request has it.
_SEEDS = 3  # Distinct from the seed streams of `protocol`.
_ANTICIPATED = MAX_RETHINKS  # Call number of anticipated answers; no sleeper reaches it.
# Two questions that differ at both ends: their prompts share only the text around them.
_ANY_QUESTIONS = ("How many?", "Who has 1.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerConfig:
  """Budgets of sleep-time compute.

  Attributes:
    num_jobs: sleepers per context; each produces a rewrite.
    max_rethinks: most calls of one sleeper.
    sleep_tokens: most tokens of one call.
    temperature: temperature of the first sleeper.
    parallel_temperature: temperature of the other sleepers.
    num_at_once: most jobs that run concurrently.
    num_anticipated: most questions of `Prompts.anticipated` to answer ahead of time, for drafts.
    answer_tokens: most tokens of such an answer.
    verbosity: index of the verbosity of the answers with pinned prompts.
    seed: seed of the run.
  """

  num_jobs: int = 1
  max_rethinks: int = MAX_RETHINKS
  sleep_tokens: int = 1024
  temperature: float = 0.0
  parallel_temperature: float = 0.5
  num_at_once: int = 4
  num_anticipated: int = 0
  answer_tokens: int = 64
  verbosity: int = 0
  seed: int = 0

  def __post_init__(self):
    none, one = (fields.at_least(least, "see its default") for least in (0, 1))
    fields.check(
      self, num_jobs=one, max_rethinks=fields.between(1, MAX_RETHINKS, "see its default"),
      sleep_tokens=one, num_at_once=one, num_anticipated=none, answer_tokens=one, verbosity=none,
    )  # fmt: skip


def job_seed(seed: int, context_id: str, job: int, number: int) -> int:
  """Returns the seed of a sleeper's call."""
  return groups.request_seed(seed, _SEEDS, thinkers.number_of(context_id), job, number)


def group_of(context: Context) -> str:
  """Returns the `Request.group_id` of questions about a context, which share its drafts.

  Their `Request.namespace` is the context's, so that they find its pages and drafts. Every
  namespace and version has a separate group.
  """
  named = [context.namespace, context.name, context.version, context.context_id]
  return f"context {hashlib.sha256(repr(named).encode()).hexdigest()[:32]}"


class Key(NamedTuple):
  """A version of a context.

  Attributes:
    namespace: namespace of the context.
    name: name in the namespace.
    version: version number.
  """

  namespace: str
  name: str
  version: int


class Start(NamedTuple):
  """A pinned prefix of prompts.

  Attributes:
    namespace: namespace of the prompts.
    tokens: token ids of the prefix.
  """

  namespace: str
  tokens: tuple[int, ...]


# The calls of a job; receives replies and returns the notes.
_Calls = Generator[Call, str, str]


@dataclasses.dataclass
class _Job:
  """A running sleeper."""

  context: Context
  job: int
  seed: int
  calls: _Calls
  num_tokens: int = 0
  is_truncated: bool = False  # Whether the last call hit its token limit.


@dataclasses.dataclass
class _Account:
  """State of one version of a context."""

  decision: Decision | None = None
  num_asked: int = 0
  answer_tokens: list[int] = dataclasses.field(default_factory=list)
  sleep_tokens: int = 0
  starts: list[Start] = dataclasses.field(default_factory=list)
  scores: list[float] = dataclasses.field(default_factory=list)
  prepared: tuple[str, ...] = ()
  num_truncated: int = 0  # Jobs that ended without a rewrite because the last call hit its limit.

  @property
  def predicted(self) -> float | None:
    """Mean predictability of the questions so far, in nats a token; None without a score."""
    return math.fsum(self.scores) / len(self.scores) if self.scores else None


class _Answered(NamedTuple):
  """An answer that is recorded once its question is scored."""

  context: Context
  num_tokens: int
  has_slept: bool


class Runner:
  """Sleep-time compute of one engine and one registry. Called by one owner between engine steps.

  Attributes:
    seen: statistics of S, b, B and question counts; may be set to those of an earlier runner.
    jobs: job counts.
    realised: actual and predicted costs of closed contexts, oldest first.
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
    """Initialises the runner. `Contexts.on_drop` must call `dropped`.

    Args:
      engine: may also serve other requests.
      contexts: the registry.
      prompts: prompts for the model.
      config: budgets.
      planner_config: cost model; defaults if None.
      seen: statistics of an earlier runner; empty if None.

    Raises:
      ValueError: if the engine has no tokenizer, or `config.verbosity` does not exist.
    """
    if config.verbosity >= prompts.num_verbosities:
      raise ValueError(
        f"RunnerConfig.verbosity: got {config.verbosity}, expected a position below"
        f" {prompts.num_verbosities}, the number of verbosities of these prompts; lower it."
      )
    self._engine, self._contexts, self._prompts = engine, contexts, prompts
    self._config, self._planner_config = config, planner_config or PlannerConfig()
    self._thinker = EngineThinker(engine)
    assert engine.tokenizer is not None  # `EngineThinker` checks this.
    self._tokenizer = engine.tokenizer
    self.seen = seen or Seen()
    self.jobs = Jobs()
    self.realised: list[Realised] = []
    self._accounts: dict[Key, _Account] = {}
    self._working: dict[str, _Job] = {}  # Jobs by request id.
    self._filling: dict[str, Start] = {}  # Requests that fill a pinned prefix,
    self._anticipating: dict[str, Key] = {}  # answer an anticipated question,
    self._scoring: dict[str, _Answered] = {}  # or score a question.
    # Jobs that produced nothing; they are not repeated, because they are deterministic.
    self._over: set[tuple[Key, int]] = set()
    self._num_requests = 0

  @property
  def num_working(self) -> int:
    """Number of running jobs."""
    return len(self._working)

  def progress(self, context: Context, *, step: int) -> Progress:
    """Returns the progress of a context."""
    key = _key_of(context)
    account = self._accounts.get(key, _Account())
    kept = self._contexts.provenance(context.namespace, context.name, step=step)
    return Progress(
      num_jobs=self._config.num_jobs,
      num_running=sum(_key_of(job.context) == key for job in self._working.values()),
      num_read=sum(not one.false_equations for one in kept),
      num_quarantined=sum(bool(one.false_equations) for one in kept),
      num_empty=sum((key, job) in self._over for job in range(self._config.num_jobs)),
      num_truncated=account.num_truncated + sum(one.is_truncated for one in kept),
      decision=account.decision,
    )

  def advance(self, namespaces: Iterable[str], *, step: int) -> None:
    """Starts jobs that pay, as far as slots are free.

    Args:
      namespaces: namespaces of the contexts, in order of priority.
      step: step of the registry.
    """
    for namespace in namespaces:
      for name in self._contexts.names(namespace, step=step):
        if len(self._working) < self._config.num_at_once:
          self._advance(self._contexts.get(namespace, name, step=step), step)
    self._fill_pins()

  def _advance(self, context: Context, step: int) -> None:
    key = _key_of(context)
    rewrites = self._contexts.rewrites(context.namespace, context.name, step=step)
    quarantine = self._contexts.quarantine(context.namespace, context.name, step=step)
    kept = {one.job for one in (*rewrites, *quarantine)}
    self._prepare(context, rewrites)
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
    """Returns whether to sleep on a context; a positive decision is never revoked."""
    account = self._accounts.setdefault(_key_of(context), _Account())
    if account.decision is None or not account.decision.should_sleep:
      account.decision = planner.decide(
        self.seen, self._kind(context), account.num_asked, self._planner_config
      )
    return account.decision.should_sleep

  def answered(
    self, context: Context, num_tokens: int, *, has_slept: bool, question: str = ""
  ) -> None:
    """Records an answer to a question about a context.

    Args:
      context: the context in the version that the question used.
      num_tokens: tokens of the answer.
      has_slept: whether the answer used a rewrite.
      question: question to score in the background; "" scores none.
    """
    account = self._accounts.setdefault(_key_of(context), _Account())
    account.num_asked += 1
    account.answer_tokens.append(num_tokens)
    answered = _Answered(context, num_tokens, has_slept)
    if not question.strip() or not self._score(question, answered):
      self._saw(answered)

  def _saw(self, answered: _Answered) -> None:
    context, num_tokens, has_slept = answered
    kind = self._kind(context)
    self.seen = planner.saw_answer(self.seen, kind, num_tokens, has_slept=has_slept)

  def _kind(self, context: Context) -> Kind:
    account = self._accounts.get(_key_of(context))
    predicted = None if account is None else account.predicted
    return planner.kind_of(self._num_tokens(context), predicted)

  def take(self, completions: Iterable[Completion], *, step: int) -> list[Completion]:
    """Processes finished requests of this runner, and returns the other completions.

    Args:
      completions: result of `Engine.poll`.
      step: step of the registry.

    Raises:
      OSError: if the disk is full; only the job's new rewrite is lost.
    """
    others = []
    for completion in completions:
      if completion.request_id in self._filling:
        self._pin(self._filling.pop(completion.request_id))
      elif completion.request_id in self._working:
        self._go_on(self._working.pop(completion.request_id), completion, step)
      elif completion.request_id in self._anticipating:
        del self._anticipating[completion.request_id]
        self._count(anticipated=completion.finish_reason != "error")
      elif completion.request_id in self._scoring:
        self._scored(self._scoring.pop(completion.request_id), completion)
      else:
        others.append(completion)
    return others

  def stop(self) -> None:
    """Aborts all jobs, which restart later; call it before `update_weights` and at the end."""
    for request_id in (
      *self._working, *self._filling, *self._anticipating, *self._scoring
    ):  # fmt: skip
      self._engine.abort_request(request_id)
    self._count(stopped=len(self._working))
    for answered in self._scoring.values():
      self._saw(answered)
    for key in self._anticipating.values():
      self._accounts[key].prepared = ()  # Anticipate again.
    for requests in (self._working, self._filling, self._anticipating, self._scoring):
      requests.clear()

  def dropped(self, dropped: Dropped) -> None:
    """Releases jobs, pins and drafts of a dropped version, before the next one is served."""
    key = Key(dropped.namespace, dropped.name, dropped.version)
    for request_id, job in [*self._working.items()]:
      if _key_of(job.context) == key:
        self._engine.abort_request(request_id)
        del self._working[request_id]
        self._count(stopped=1)
    self._over = {entry for entry in self._over if entry[0] != key}
    for request_id in [name for name, one in self._anticipating.items() if one == key]:
      self._engine.abort_request(request_id)
      del self._anticipating[request_id]
    for request_id, answered in [*self._scoring.items()]:
      if _key_of(answered.context) == key:
        self._engine.abort_request(request_id)
        self._saw(self._scoring.pop(request_id))
    account = self._accounts.pop(key, None)
    if account is None:
      return
    for start in account.starts:
      for request_id in [name for name, one in self._filling.items() if one == start]:
        self._engine.abort_request(request_id)
        del self._filling[request_id]
      if not any(start in other.starts for other in self._accounts.values()):
        self._engine.chunks.unpin(start.tokens, namespace=start.namespace)
    drafter = self._engine.drafter
    group = _drafts_of(_version_of(dropped))
    if isinstance(drafter, SuffixDrafter) and group in drafter.group_ids:
      drafter.drop_group(group)
    self._close(account)

  # Jobs.

  def _begin(self, context: Context, job: int) -> None:
    calls = self._calls(context, job)
    seed = job_seed(self._config.seed, context.context_id, job, 0)
    self._count(started=1)
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
    request_id = self._submit(call, job.context)
    if not request_id:
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
    job.is_truncated = completion.finish_reason == "length"
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
      account.num_truncated += job.is_truncated
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
      is_truncated=job.is_truncated,
    )
    kept = self._contexts.keep(context.namespace, context.name, rewrite, step=step)
    if kept is None:
      self._count(stale=1)
      return
    self._count(kept=1)
    rewrites = self._contexts.rewrites(context.namespace, context.name, step=step)
    num_quarantined = len(self._contexts.quarantine(context.namespace, context.name, step=step))
    if len(rewrites) + num_quarantined == self._config.num_jobs:
      self.seen = planner.saw_sleep(self.seen, self._kind(context), account.sleep_tokens)
    self._prepare(context, rewrites)

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

  # Pins, drafts and scores.

  def _prepare(self, context: Context, rewrites: Sequence[Rewrite]) -> None:
    """Prepares pins and drafts from a context's rewrites, once for each set; also on restart."""
    account = self._accounts.setdefault(_key_of(context), _Account())
    texts = tuple(one.text for one in rewrites)
    if texts == account.prepared:
      return
    account.prepared = texts
    for one in rewrites:
      self._seed_drafts(context, one.job, one.text)
    if not texts:
      return
    joined = self._prompts.joined(texts)
    self._want(account, self._start(context, joined))
    if len(rewrites) == self._config.num_jobs:
      self._anticipate(context, joined)

  def _anticipate(self, context: Context, notes: str) -> None:
    """Answers anticipated questions; the answers become drafts for real ones."""
    if not isinstance(self._engine.drafter, SuffixDrafter):
      return
    config = self._config
    for number, question in enumerate(self._prompts.anticipated(notes)[: config.num_anticipated]):
      call = Call(
        messages=self._prompts.wake(question, "", notes, config.verbosity),
        max_tokens=config.answer_tokens,
        temperature=0.0,  # The most likely answer makes the best draft at any temperature.
        seed=job_seed(config.seed, context.context_id, number, _ANTICIPATED),
      )
      request_id = self._submit(call, context, group_id=group_of(context))
      if request_id:
        self._anticipating[request_id] = _key_of(context)

  def _submit(self, call: Call, context: Context, **fields: Any) -> str:
    """Submits a call as a background request; returns its id, or "" if it is invalid."""
    self._num_requests += 1
    request_id = f"{NAME} {self._num_requests}"
    try:
      request = self._thinker.request(call, request_id)
      request = dataclasses.replace(request, namespace=context.namespace, **fields)
      self._engine.add_request(request, is_background=True)
    except (NoAnswer, ValueError):  # For example, too long.
      return ""
    return request_id

  def _wake_ids(self, question: str, context: str, notes: str) -> list[int]:
    messages = self._prompts.wake(question, context, notes, self._config.verbosity)
    return self._tokenizer.chat_ids(list(messages))

  def _start(self, context: Context, notes: str) -> Start:
    """Returns the prefix shared by the prompts of all questions about a context."""
    one, other = (self._wake_ids(question, "", notes) for question in _ANY_QUESTIONS)
    return Start(context.namespace, tuple(one[: _num_alike(one, other)]))

  def _score(self, question: str, answered: _Answered) -> bool:
    """Scores a question by forced generation after its context; returns False if impossible."""
    context = answered.context
    one, other = (self._wake_ids(any_one, context.text, "") for any_one in _ANY_QUESTIONS)
    ids = self._wake_ids(question, context.text, "")
    begin, end = _num_alike(one, other), _num_alike(one[::-1], other[::-1])
    forced = ids[begin : len(ids) - end]
    if not forced or ids[:begin] != one[:begin]:
      return False
    allowed = tuple((token, token + 1) for token in forced)
    sampling = SamplingParams(temperature=0.0, max_tokens=len(forced), allowed_token_ranges=allowed)
    self._num_requests += 1
    request_id = f"{NAME} {self._num_requests}"
    request = Request(
      request_id=request_id,
      prompt=tuple(ids[:begin]),
      sampling=sampling,
      namespace=context.namespace,
    )
    try:
      self._engine.add_request(request, is_background=True)
    except ValueError:  # Too long.
      return False
    self._scoring[request_id] = answered
    return True

  def _scored(self, answered: _Answered, completion: Completion) -> None:
    account = self._accounts.get(_key_of(answered.context))
    if account is not None and completion.finish_reason != "error":
      account.scores.append(planner.predictability(completion.raw_logprobs))
      self._count(scored=1)
    self._saw(answered)

  def _want(self, account: _Account, start: Start) -> None:
    """Pins a prefix instead of the context's earlier ones, if the quota has room."""
    for before in account.starts:
      is_shared = any(
        other is not account and before in other.starts for other in self._accounts.values()
      )
      if not is_shared:
        self._engine.chunks.unpin(before.tokens, namespace=before.namespace)
    account.starts.clear()
    size = self._engine.config.page_size
    used = sum(len(pin.tokens) // size for pin in self._engine.chunks.pins)
    length = len(start.tokens)
    is_pinned = any((pin.namespace, pin.tokens) == start for pin in self._engine.chunks.pins)
    wanted = 0 if is_pinned else length // size
    has_room = used + wanted <= self._engine.config.pinned_pages
    if length >= size and has_room and self._engine.config.enable_prefix_caching:
      account.starts.append(start)
      self._pin(start)

  def _pin(self, start: Start) -> None:
    if any(start in account.starts for account in self._accounts.values()):
      self._engine.chunks.pin(start.tokens, namespace=start.namespace)

  def _fill_pins(self) -> None:
    """Submits requests that compute missing pages of pins: for new pins, and for new weights."""
    ours = {start for account in self._accounts.values() for start in account.starts}
    for pin in self._engine.chunks.pins:
      start = Start(pin.namespace, pin.tokens)
      if pin.num_kept or start not in ours or start in self._filling.values():
        continue
      self._num_requests += 1
      request_id = f"{NAME} {self._num_requests}"
      sampling = SamplingParams(max_tokens=1, temperature=0.0)
      request = Request(
        request_id=request_id, prompt=pin.tokens, sampling=sampling, namespace=pin.namespace
      )
      self._engine.add_request(request, is_background=True)
      self._filling[request_id] = start

  def _seed_drafts(self, context: Context, job: int, notes: str) -> None:
    """Adds a rewrite to the suffix tree for questions about the context (`group_of`)."""
    drafter = self._engine.drafter
    if isinstance(drafter, SuffixDrafter):
      drafter.teach(f"{NAME} {job}", _drafts_of(context), self._ids(notes))


def _num_alike(one: Sequence[int], other: Sequence[int]) -> int:
  """Returns the length of the common prefix of two sequences."""
  count = 0
  while count < min(len(one), len(other)) and one[count] == other[count]:
    count += 1
  return count


def _key_of(context: Context) -> Key:
  return Key(context.namespace, context.name, context.version)


def _drafts_of(context: Context) -> str:
  """Returns the drafter's group name for questions about a context."""
  one = Request(request_id="", prompt=(), group_id=group_of(context), namespace=context.namespace)
  return drafting.group_name(one)


def _version_of(dropped: Dropped) -> Context:
  return Context(
    context_id=dropped.context_id,
    namespace=dropped.namespace,
    name=dropped.name,
    version=dropped.version,
    text="",
    registered_step=0,
    expires_step=None,
  )


def sleep_to_end(
  runner: Runner, engine: Engine, namespaces: Sequence[str], *, step: int
) -> list[Completion]:
  """Sleeps until no job is worth starting, and returns the other completions."""
  others: list[Completion] = []
  has_news = True  # Whether new jobs may be worth starting.
  while True:
    if has_news:
      runner.advance(namespaces, step=step)
    if not runner.num_working and not engine.num_unfinished:
      return others
    engine.step()
    finished = engine.poll()
    has_news = bool(finished)
    others += runner.take(finished, step=step)
