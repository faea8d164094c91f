"""The thread that runs all engines: takes jobs and delivers parts of their responses.

    submit --> a queue per client --round robin, as pages allow--> engine --> Job.deliver
    cancel, swap, call, stop ---------------^
                    contexts --in spare rows--------------^

Scheduling never changes the bits of a response (see the contract in DESIGN): queueing, cancelling
and the order of clients only decide when a token arrives.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
import dataclasses
import logging
import math
import threading
import time
from typing import Any, NamedTuple

from seerjax.engine.engine import Engine
from seerjax.engine.sequence import StepOutput, TopLogprobs
from seerjax.serve.grammar import AnswerMask
from seerjax.serve.masking import Masking
from seerjax.serve.refusals import Refusal, shown
from seerjax.serve.sleeping import Reading, Sleeping
from seerjax.types import Completion, Request

LOG = logging.getLogger("seerjax.serve")
# Consecutive failed steps of an engine after which its requests are ended with an error.
MAX_FAILURES = 3
MAX_RETRY_SECONDS = 60
# Delay before sleep that found no room is tried again.
IDLE_SECONDS = 0.05


class Part(NamedTuple):
  """New output of one choice: all of it, or, when streamed, the tokens of the last step.

  Attributes:
    choice: index in `Job.requests`.
    text: new text.
    tokens: new tokens.
    logprobs: their log-probabilities under the processed distribution.
    raw_logprobs: their log-probabilities under softmax(logits).
    tops: for each token, the top (token, log-probability) pairs under the processed distribution,
      if requested.
    finish_reason: why the choice ended; "" while it is running.
    error: the error, if `finish_reason` is "error".
  """

  choice: int
  text: str
  tokens: tuple[int, ...]
  logprobs: tuple[float, ...]
  raw_logprobs: tuple[float, ...]
  tops: tuple[TopLogprobs, ...] = ()
  finish_reason: str = ""
  error: str = ""


class PromptScores(NamedTuple):
  """Log-probabilities of a prompt's tokens under softmax(logits).

  Attributes:
    prompt: index among the prompts of the job.
    logprobs: log-probability of every token but the first.
    tops: for each of these, the top (token, log-probability) pairs.
  """

  prompt: int
  logprobs: tuple[float, ...]
  tops: tuple[TopLogprobs, ...]


class Started(NamedTuple):
  """Event: a job has started; it also finishes on the weights it started with.

  Attributes:
    fingerprint: fingerprint of these weights.
  """

  fingerprint: str


Event = Started | Part | PromptScores | Refusal


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Job:
  """Engine requests that were submitted together.

  Attributes:
    job_id: unique id.
    client: key for fair scheduling.
    model: name of the engine.
    adapter: name of the adapter; "" for the engine's base.
    fingerprint: called on the engine thread when the job starts; None sends no `Started`.
    reading: the context that the prompts were made from, if any; the job is refused if the context
      has changed while it was queued.
    requests: one per choice; the choices of a prompt are adjacent and share its `group_id`.
    masks: one per choice.
    num_choices: choices per prompt.
    is_streamed: whether to deliver a part after every step.
    num_top: length of the entries of `Part.tops`.
    wants_prompt: whether to deliver `PromptScores`.
    num_prompt_top: length of the entries of `PromptScores.tops`.
    deliver: receives events on the engine thread; it must not block.
  """

  job_id: str
  client: str
  model: str
  requests: tuple[Request, ...]
  masks: tuple[AnswerMask | None, ...]
  num_choices: int = 1
  is_streamed: bool = False
  num_top: int = 0
  wants_prompt: bool = False
  num_prompt_top: int = 0
  adapter: str = ""
  fingerprint: Callable[[], str] | None = None
  reading: Reading | None = None
  deliver: Callable[[Event], None]


@dataclasses.dataclass(eq=False)
class _Choice:
  """A choice of a job: its number of delivered tokens, their alternatives, and, if it has a mask,
  its tokens so far."""

  job: Job
  index: int
  sent: int = 0
  tops: list[TopLogprobs] = dataclasses.field(default_factory=list)
  tokens: list[int] = dataclasses.field(default_factory=list)

  @property
  def request(self) -> Request:
    return self.job.requests[self.index]

  @property
  def mask(self) -> AnswerMask | None:
    return self.job.masks[self.index]


class _Asked(NamedTuple):
  """A function to run on the engine thread, and a callback for its result."""

  run: Callable[[], Any]
  done: Callable[[Any], None]


class EngineThread:
  """Runs engines on a separate thread, from `start` to `stop`.

  Attributes:
    engines: engines by name.
    sleeping: contexts by engine name; used only on the thread once it has started.
    refused: number of requests refused because the queue was full.
  """

  def __init__(
    self,
    engines: Mapping[str, Engine],
    *,
    max_queued_requests: int,
    max_waiting_of_client: int,
    on_tokens: Callable[[str, int], None] = lambda model, count: None,
    sleeping: Mapping[str, Sleeping] | None = None,
  ):
    """Initialises the thread.

    Args:
      engines: engines by name; nothing else may use them after `start`.
      max_queued_requests: most queued choices.
      max_waiting_of_client: most queued choices of one client.
      on_tokens: called with an engine's name and the number of tokens that a step sampled.
      sleeping: contexts by engine name; closed when the thread ends.
    """
    self.sleeping = dict(sleeping or {})
    self.engines = dict(engines)
    self.refused = 0
    self._max_waiting = max_queued_requests
    self._max_waiting_of_client = max_waiting_of_client
    self._on_tokens = on_tokens
    self._changed = threading.Condition()
    # Guarded by `_changed`: shared between callers and the thread.
    self._lines: dict[str, collections.deque[_Choice]] = {}
    self._cancelled: set[str] = set()
    self._swaps: collections.deque[_Asked] = collections.deque()
    self._calls: collections.deque[_Asked] = collections.deque()
    self._deadline = math.inf
    self._is_stopping = self._is_over = False
    # Used only on the thread.
    self._live: dict[str, dict[str, _Choice]] = {name: {} for name in engines}
    self._failures: dict[str, int] = dict.fromkeys(engines, 0)
    self._tokens_per_second = 0.0
    self._masking = {name: Masking(engine) for name, engine in engines.items()}
    self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

  # Callable from any thread.

  def start(self) -> None:
    """Starts the thread."""
    self._thread.start()

  def submit(self, job: Job) -> None:
    """Queues a job.

    Raises:
      Refusal: if the server is stopping (503), or the queue is full (429).
    """
    with self._changed:
      if self._is_stopping:
        raise stopping()
      waiting = self.num_waiting
      line = self._lines.get(job.client, ())
      count, own = waiting + len(job.requests), len(line) + len(job.requests)
      # A request larger than the limit is admitted to an empty queue.
      is_full = bool(waiting) and count > self._max_waiting
      if is_full or (line and own > self._max_waiting_of_client):
        self.refused += 1
        seconds = self._retry_seconds()
        raise Refusal(
          f"the server: got {count} responses to queue, {own} of them for this client, expected at"
          f" most {self._max_waiting} and {self._max_waiting_of_client}; retry in {seconds} s.",
          status=429,
          kind="rate_limit_error",
          code="rate_limit_exceeded",
          retry_seconds=seconds,
        )
      line = self._lines.setdefault(job.client, collections.deque())
      line.extend(_Choice(job, index) for index in range(len(job.requests)))
      self._changed.notify_all()

  def cancel(self, job: Job) -> None:
    """Cancels a job in any state; a no-op for a finished job."""
    with self._changed:
      self._cancelled.add(job.job_id)
      self._changed.notify_all()

  def swap(self, run: Callable[[], Any], done: Callable[[Any], None]) -> None:
    """Runs a function on the thread once no engine has requests; `done` gets its result or error.

    Jobs that have started finish before; queued and new jobs run afterwards.

    Raises:
      Refusal: if the server is stopping (503).
    """
    with self._changed:
      if self._is_stopping:
        raise stopping()
      self._swaps.append(_Asked(run, done))
      self._changed.notify_all()

  def call(self, run: Callable[[], Any], done: Callable[[Any], None]) -> None:
    """Runs a short function on the thread between two steps; see `swap`.

    Raises:
      Refusal: if the server is stopping (503).
    """
    with self._changed:
      if self._is_stopping:
        raise stopping()
      self._calls.append(_Asked(run, done))
      self._changed.notify_all()

  def stop(self, grace_seconds: float) -> None:
    """Stops admission; unfinished jobs are refused after the grace period."""
    with self._changed:
      self._is_stopping = True
      self._deadline = min(self._deadline, time.monotonic() + grace_seconds)
      self._changed.notify_all()

  def join(self, timeout: float | None = None) -> None:
    """Waits until the thread has ended."""
    self._thread.join(timeout)

  @property
  def is_alive(self) -> bool:
    """Whether the thread is running."""
    return self._thread.is_alive()

  @property
  def is_stopping(self) -> bool:
    """Whether admission has stopped."""
    return self._is_stopping

  @property
  def num_waiting(self) -> int:
    """Number of queued choices."""
    return sum(len(line) for line in [*self._lines.values()])

  @property
  def num_running(self) -> int:
    """Number of choices that engines are running."""
    return sum(len(live) for live in self._live.values())

  def _retry_seconds(self) -> int:
    tokens = sum(c.request.sampling.max_tokens for line in self._lines.values() for c in line)
    seconds = tokens / self._tokens_per_second if self._tokens_per_second else 1
    return max(1, min(MAX_RETRY_SECONDS, math.ceil(seconds)))

  # Called on the thread.

  def _run(self) -> None:
    while not self._is_over:
      try:
        self._turn()
      except Exception:
        LOG.exception("the engine thread: got an unexpected error; its requests are aborted")
        self._give_up_all(broken())
    for sleeping in self.sleeping.values():
      sleeping.close()

  def _turn(self) -> None:
    with self._changed:
      while not self._has_work():
        if self._is_stopping:
          self._is_over = True
          return
        self._changed.wait()
      cancelled, self._cancelled = self._cancelled, set()
      calls, self._calls = self._calls, collections.deque()
      if cancelled:
        self._drop(cancelled)
    for asked in calls:
      asked.done(self._outcome(asked))
    if time.monotonic() >= self._deadline:
      self._give_up_all(stopping())
      self._give_up_swaps(stopping())
      return
    self._cancel_live(cancelled)
    self._admit()
    for name, engine in self.engines.items():
      sleeping = None if self._is_stopping else self.sleeping.get(name)
      if sleeping is not None:
        sleeping.advance()
      if self._live[name]:
        self._step(name, engine)
      elif sleeping is not None and engine.num_background:
        before = engine.counters.steps
        self._step(name, engine)
        if engine.counters.steps == before:  # Pinned pages leave no room for background rows.
          with self._changed:
            self._changed.wait(IDLE_SECONDS)

  def _has_work(self) -> bool:
    waits = self._lines or self._cancelled or self._swaps or self._calls or self.num_running
    sleeps = not self._is_stopping and any(s.has_work for s in self.sleeping.values())
    return bool(waits or sleeps)

  def _outcome(self, asked: _Asked) -> Any:
    """Returns the result of a function, or the exception that it raised."""
    try:
      return asked.run()
    except (ValueError, Refusal) as error:
      return error
    except Exception:
      LOG.exception("the engine thread: got an internal error in a call to it")
      return broken()

  def _drop(self, job_ids: Iterable[str]) -> None:
    """Removes jobs from the queues. The caller holds the lock."""
    for client, line in [*self._lines.items()]:
      kept = [choice for choice in line if choice.job.job_id not in job_ids]
      if len(kept) < len(line):
        self._lines[client] = collections.deque(kept)
      if not kept:
        del self._lines[client]

  def _cancel_live(self, job_ids: Iterable[str]) -> None:
    for name, live in self._live.items():
      for request_id, choice in [*live.items()]:
        if choice.job.job_id in job_ids:
          self.engines[name].abort_request(request_id)
          del live[request_id]

  def _admit(self) -> None:
    """Admits choices to engines, in turns over clients, while sequences and pages are free."""
    while True:
      with self._changed:
        swap, choice = None, self._next_choice()
        if choice is None:
          # If nothing runs, no started job has choices waiting for room.
          if not self._swaps or self.num_running:
            return
          swap = self._swaps.popleft()
      if swap is not None:
        for sleeping in self.sleeping.values():
          sleeping.stop()  # Jobs start again with the new weights.
        swap.done(self._outcome(swap))
      elif choice is not None:
        self._begin(choice)

  def _next_choice(self) -> _Choice | None:
    """Takes the first choice of the next client in turn; None if its engine has no room.

    While a swap is pending, only takes choices of jobs that have started.
    """
    turns = (client for client, line in self._lines.items() if line[0].index or not self._swaps)
    client = next(turns, None)
    if client is None:
      return None
    line = self._lines[client]
    if not has_room(self.engines[line[0].job.model], line[0].request):
      return None
    choice = line.popleft()
    del self._lines[client]
    if line:
      self._lines[client] = line  # Moves the client to the end.
    return choice

  def _begin(self, choice: _Choice) -> None:
    engine, fingerprint = self.engines[choice.job.model], choice.job.fingerprint
    reading, job = choice.job.reading, choice.job
    if reading is not None and not self.sleeping[choice.job.model].is_current(reading):
      self._give_up(choice.job, _changed(reading))
      return
    if fingerprint is not None and not choice.index:
      choice.job.deliver(Started(fingerprint()))
    try:
      scores_prompt = job.wants_prompt and choice.index % job.num_choices == 0
      prompt_top = job.num_prompt_top if scores_prompt else None
      engine.add_request(
        choice.request, mask=choice.mask, num_top=job.num_top, prompt_top=prompt_top
      )
    except ValueError as error:
      # It was checked before; a swap of weights may have happened since.
      self._give_up(choice.job, Refusal(str(error), status=409, kind="conflict_error"))
      return
    except Exception:
      self._fail(choice.job)
      return
    self._live[choice.job.model][choice.request.request_id] = choice

  def _step(self, name: str, engine: Engine) -> None:
    if not self._take_masks(name) and not engine.num_background:
      return
    before, start = engine.counters.sampled_tokens, time.monotonic()
    try:
      updates = engine.step()
    except Exception:
      self._failures[name] += 1
      LOG.exception("model %s: a step failed (failure %s in a row)", name, self._failures[name])
      if self._failures[name] >= MAX_FAILURES:
        self._failures[name] = 0
        for job in {choice.job for choice in self._live[name].values()}:
          self._give_up(job, broken())
        if name in self.sleeping:  # Background rows may cause the failure.
          LOG.error("model %s: sleep-time compute is off until the server is restarted", name)
          self.sleeping[name].give_up()
      return
    self._failures[name] = 0
    self._ask_masks(name, updates)
    self._masking[name].spent(time.monotonic() - start)
    self._deliver(name, engine, updates)
    sampled = engine.counters.sampled_tokens - before
    self._on_tokens(name, sampled)
    rate = sampled / max(time.monotonic() - start, 1e-9)
    self._tokens_per_second += 0.1 * (rate - self._tokens_per_second)

  def _take_masks(self, name: str) -> bool:
    """Ends requests with a grammar that hit a limit, and holds those without a ready mask; returns
    whether a step has anything to do."""
    live = self._live[name]
    masks = {own: choice.mask for own, choice in live.items() if choice.mask is not None}
    has_work = self._masking[name].hold(masks, len(live) - len(masks))
    for own, mask in masks.items():
      if mask.failure and own in live:  # May have ended with another choice of its job.
        refusal = Refusal(mask.failure, param=mask.grammar.param, code="grammar_limit")
        self._give_up(live[own].job, refusal)
    return has_work

  def _ask_masks(self, name: str, updates: list[StepOutput]) -> None:
    """Requests the masks of the next step, so that they are computed during delivery."""
    compilers = {}
    for update in updates:
      choice = self._live[name].get(update.request_id)
      mask = None if choice is None else choice.mask
      if choice is not None and mask is not None and not update.finish_reason:
        choice.tokens += update.tokens
        mask.ask(choice.tokens)
        compilers[mask.compiler] = None
    for compiler in compilers:
      compiler.gather(0)

  def _deliver(self, name: str, engine: Engine, updates: list[StepOutput]) -> None:
    live = self._live[name]
    completions = engine.poll()
    if name in self.sleeping:
      completions = self.sleeping[name].take(completions)
    finished = {completion.request_id: completion for completion in completions}
    for update in updates:
      choice = live.get(update.request_id)
      if choice is None:
        continue
      choice.tops += update.tops
      if update.prompt is not None:
        choice.job.deliver(
          PromptScores(
            choice.index // choice.job.num_choices,
            tuple(score for score, _ in update.prompt),
            tuple(top for _, top in update.prompt),
          )
        )
      completion = finished.get(update.request_id)
      if completion is not None:
        del live[update.request_id]
        if choice.job.reading is not None:
          self.sleeping[name].answered(choice.job.reading, completion)
      elif choice.job.is_streamed:
        completion = engine.progress(update.request_id)
      else:
        continue
      text = update.text if choice.job.is_streamed else completion.text
      choice.job.deliver(_part(choice, completion, text))

  def _give_up_swaps(self, refusal: Refusal) -> None:
    with self._changed:
      swaps, self._swaps = self._swaps, collections.deque()
    for swap in swaps:
      swap.done(refusal)

  def _fail(self, job: Job) -> None:
    """Ends a job because of the exception being handled; other jobs continue."""
    LOG.exception("%s: got an internal error; the request is aborted", job.job_id)
    self._give_up(job, broken())

  def _give_up(self, job: Job, refusal: Refusal) -> None:
    """Ends a job with a refusal."""
    with self._changed:
      self._drop({job.job_id})
    self._cancel_live({job.job_id})
    job.deliver(refusal)

  def _give_up_all(self, refusal: Refusal) -> None:
    with self._changed:
      jobs = {choice.job: None for line in self._lines.values() for choice in line}
    for live in self._live.values():
      jobs |= {choice.job: None for choice in live.values()}
    for job in jobs:
      self._give_up(job, refusal)


def has_room(engine: Engine, request: Request) -> bool:
  """Returns whether a request could start at once: a sequence and enough pages are free.

  Background requests count as free, because they are preempted.
  """
  num_front = engine.num_unfinished - engine.num_background
  if not num_front:
    return True  # `Engine.check` has ensured that it fits alone.
  if num_front >= engine.config.max_num_seqs * engine.data_parallel_size:
    return False
  chunks = engine.chunks
  needed = chunks.expected_pages(len(request.prompt), request.sampling.max_tokens)
  return any(
    chunks.free_pages(place) + chunks.yielding_pages(place) - chunks.awaited_pages(place) >= needed
    for place in range(engine.data_parallel_size)
  )


def _changed(reading: Reading) -> Refusal:
  name = reading.context.name
  return Refusal(
    f"context: got a question about version {reading.context.version} of {shown(name)}, which"
    " changed or was removed while the question was queued, expected the current version; retry.",
    status=409,
    kind="conflict_error",
    param="context",
    code="context_changed",
    retry_seconds=1,
  )


def stopping() -> Refusal:
  """Returns the refusal of requests while the server stops."""
  return Refusal(
    "the server: got a request while it is shutting down, expected a running server; retry after"
    " the restart: the same seed gives the same bits.",
    status=503,
    kind="server_error",
    code="server_stopping",
    retry_seconds=5,
  )


def broken() -> Refusal:
  """Returns the refusal for an internal error."""
  return Refusal(
    "the server: got an internal error, expected none; see the server's log, and retry.",
    status=500,
    kind="server_error",
    code="internal_error",
  )


def _part(choice: _Choice, completion: Completion, text: str) -> Part:
  """Returns the tokens of a choice that were not delivered yet, and counts them as delivered."""
  first, choice.sent = choice.sent, len(completion.tokens)
  return Part(
    choice=choice.index,
    text=text,
    tokens=completion.tokens[first:],
    logprobs=tuple(completion.behaviour_logprobs[first:].tolist()),
    raw_logprobs=tuple(completion.raw_logprobs[first:].tolist()),
    tops=tuple(choice.tops[first : choice.sent]),
    finish_reason=completion.finish_reason,
    error=completion.error,
  )
