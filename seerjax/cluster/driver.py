"""Runs a rollout in chunks on the workers of a cluster, as `DividedRollout` does on one engine.

    buffer (all requests) -> scheduler (which chunk, which worker) -> ChunkOrder -> worker
      ^                                                                               |
      +------- chunk ended, worker lost, worker joined: one event after another <-----+

The instances of all workers are the instances of one scheduler. If a worker is lost, its chunks run
again on other workers, from the end of the previous chunk. Results are identified by chunk number
and count once; a result that arrives after its chunk was reassigned is dropped. The order of
results depends on time, but no token depends on it (the contract), and the order is journalled.

Pages move between workers through a shared store, if there is one; the driver passes on only their
descriptions (`KVManifest`).

The driver does not know how workers are reached: `local_workers` runs them in this process,
`ray_workers` in processes of a cluster.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
from typing import Any, Protocol, runtime_checkable

from absl import logging

from seerjax.cluster import records
from seerjax.cluster.records import (
  ChunkOrder,
  ChunkResult,
  Event,
  Gone,
  Joined,
  Lost,
  Piece,
  TextDelta,
  WeightsRef,
  WorkerReport,
)
from seerjax.kv.manifest import KVManifest
from seerjax.rollout import divided
from seerjax.rollout.buffer import Buffer, State
from seerjax.rollout.instances import Decision, Instances
from seerjax.rollout.journal import Journal
from seerjax.rollout.policies import Policy
from seerjax.rollout.scheduler import Scheduler
from seerjax.rollout.trace import Span, Trace
from seerjax.types import Completion, Request

MOST_NAMED = 4  # Maximum number of workers that a progress line names.


@runtime_checkable
class Workers(Protocol):
  """Worker pool: workers by number, and their events."""

  def put(self, data: bytes) -> Piece:
    """Stores bytes where workers can read them; used by `weights.publish`."""
    ...

  def load(self, weights: WeightsRef, policy_version: int) -> None:
    """Makes every worker, including later ones, load published weights before it joins again.

    Called between two rollouts; does not wait. A worker that fails becomes `Lost`.
    """
    ...

  def begin(self) -> None:
    """Starts a rollout: makes every available worker join it."""
    ...

  def join(self, worker: int) -> None:
    """Makes one worker join again; results in a `Joined` or a `Lost` event."""
    ...

  def check(self, worker: int, requests: Sequence[Request]) -> str:
    """Returns the result of `Worker.check` on a worker that has joined."""
    ...

  def send(self, worker: int, orders: Sequence[ChunkOrder], forget: Sequence[Gone]) -> None:
    """Calls `Worker.run` on a worker without a pending call; results in an `Answered`."""
    ...

  def events(self, *, blocks: bool) -> Sequence[Event]:
    """Returns the events since the last call.

    Args:
      blocks: whether to wait for an event; () then means that none will come, or that the timeout
        has passed.
    """
    ...

  def waits_for(self) -> str:
    """Returns what `events` waited for in vain, for display."""
    ...


@dataclasses.dataclass
class _Member:
  """A worker that has joined.

  Attributes:
    report: its description.
    instances: indices of its instances in the scheduler.
    is_away: whether it is running, so that new orders must wait.
    orders: waiting orders.
    forget: requests it knew that now run elsewhere, or are finished (True).
    chunks: its chunks that have not ended, by request.
    known: number of completion tokens it has sampled or received, by request.
  """

  report: WorkerReport
  instances: list[int]
  is_away: bool = False
  orders: list[ChunkOrder] = dataclasses.field(default_factory=list)
  forget: dict[str, bool] = dataclasses.field(default_factory=dict)
  chunks: dict[str, int] = dataclasses.field(default_factory=dict)
  known: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Running:
  """A running chunk: number, decision, worker, first event and first token."""

  chunk: int
  decision: Decision
  worker: int
  begin: int
  first_token: int


class ClusterRollout:
  """Runs requests to completion, chunk by chunk, on workers that may join and leave.

  Attributes:
    trace: trace of the rollout so far; its steps are events.
    buffer: state of all requests.
    counts: number of events by kind: "joined", "refused", "lost", "ended", "again" (chunks of lost
      workers), "late" (dropped results), "moved" (chunks on another worker than the previous
      chunk), "sent" (tokens sent for siblings' drafts), "drafted" and "accepted" (draft tokens
      verified by workers).
  """

  def __init__(
    self,
    workers: Workers,
    policy: Policy,
    journal: Journal | None = None,
    *,
    resume_from: Mapping[str, Completion] | None = None,
    expected: WorkerReport | None = None,
  ):
    """Creates a rollout.

    Args:
      workers: workers used by this rollout only.
      policy: scheduling policy.
      journal: receives chunks and events, and supplies those of earlier runs; request ids must have
        the form that `groups.place_of` reads. None keeps nothing.
      resume_from: partial completions of unfinished requests, by request id.
      expected: report that all workers must match (`records.SHARED`); None uses that of the first
        worker that joins.

    Raises:
      ValueError: for a policy that runs whole requests, which would restart with every lost worker.
    """
    if not policy.in_chunks:
      raise ValueError(
        f"ClusterRollout.policy: got {type(policy).__name__}, expected a policy that runs requests"
        " in chunks, so that a lost worker costs only a chunk; for example LongestGroupFirst()."
      )
    self.buffer = Buffer()
    self.trace = Trace()
    self.counts: collections.Counter[str] = collections.Counter()
    self._workers = workers
    self._journal = journal
    self._scheduler = Scheduler(policy, self.buffer)
    self._so_far = dict(resume_from or {})
    self._requests: dict[str, Request] = {}
    self._instances: Instances | None = None  # None until the first worker has joined.
    self._first = expected
    self._members: dict[int, _Member] = {}
    self._places: list[tuple[int, int]] = []  # By instance: (worker, index of its instance).
    self._last_worker: dict[str, int] = {}  # By request.
    self._kv: dict[str, KVManifest] = {}  # Exported pages by request.
    self._exporters: dict[str, set[int]] = {}  # Workers that exported pages, by request.
    # Completions so far, by group with unfinished requests and by request.
    self._texts: dict[str, dict[str, tuple[int, ...]]] = {}
    self._running: dict[str, _Running] = {}
    self._unread: collections.deque[Completion] = collections.deque()
    self._num_chunks = 0
    self._reasons: list[str] = []

  def text(self, expected: int) -> str:
    """Returns a display line: how many of the expected workers are up, and what each is doing.

    Another thread may call this during the rollout.
    """
    members = list(self._members.items())
    does = [
      f"{worker} ({member.report.name}) "
      + (f"runs {len(member.chunks)} chunks" if member.is_away else "waits")
      for worker, member in members[:MOST_NAMED]
    ]
    if len(members) > MOST_NAMED:
      others = members[MOST_NAMED:]
      does.append(f"{sum(one.is_away for _, one in others)} of {len(others)} others run")
    parts = [f"{len(members)} of {expected} workers up", *does]
    if lost := self.counts["lost"]:
      parts.append(f"{lost} lost so far")
    return ", ".join(parts)

  def run(self, requests: Sequence[Request]) -> Iterator[Completion]:
    """Yields completions as they finish.

    Raises:
      ValueError: as `Engine.add_request`, before anything runs.
      ConnectionError: if no worker is left, and none comes; the journal has what was sampled.
    """
    if self._journal is not None:
      self._so_far = divided.partial_completions(self._journal, requests) | self._so_far
    self._workers.begin()
    self._take_all(self._workers.events(blocks=False))
    while not self._members:
      self._wait()
    why = self._workers.check(next(iter(self._members)), requests)
    if why:
      raise ValueError(why)
    for request in requests:
      partial = self._so_far.get(request.request_id)
      self._requests[request.request_id] = request
      divided.wait_in(self.buffer, request, partial)
    while self.buffer.num_unfinished:
      self._take_all(self._workers.events(blocks=False))
      self._decide()
      self._send()
      if not self._unread:  # Otherwise the last event may already have been taken.
        self._wait()
      while self._unread:
        yield self._unread.popleft()

  def stop(self) -> tuple[list[Completion], dict[str, Completion]]:
    """Ends the rollout before all requests are finished; running workers finish a chunk first.

    Returns:
      Completions that `run` has not yielded yet, and partial completions of the others by request
      id.
    """
    while any(member.is_away for member in self._members.values()):
      self._wait()
    self._workers.begin()
    finished = list(self._unread)
    self._unread.clear()
    unfinished = {name for name in self._requests if self.buffer[name].state is not State.FINISHED}
    return finished, {
      name: one
      for name, one in self._so_far.items()
      if one.tokens and (name in unfinished or name not in self._requests)
    }

  # Decisions.

  def _decide(self) -> None:
    if self._instances is None or not self._members:
      return
    while (decision := self._scheduler.next(self._instances)) is not None:
      self._apply(decision)

  def _apply(self, decision: Decision) -> None:
    request_id = decision.request_id
    worker, instance = self._places[decision.instance]
    member = self._members[worker]
    before = self._last_worker.get(request_id, worker)
    if before != worker:
      self.counts["moved"] += 1
      if before in self._members:
        self._members[before].forget[request_id] = False
    self._last_worker[request_id] = worker
    member.forget.pop(request_id, None)
    item = self.buffer[request_id]
    member.known[request_id] = max(member.known.get(request_id, 0), item.generated)
    self._num_chunks += 1
    member.orders.append(
      ChunkOrder(
        chunk=self._num_chunks,
        request=self._requests[request_id],
        resume_from=self._so_far.get(request_id),
        max_tokens=decision.max_chunk_tokens,
        instance=instance,
        kv=None if before == worker else self._kv.get(request_id),
        texts=self._news(member, request_id),
        exports=len(self._members) > 1,
      )
    )
    self._running[request_id] = _Running(
      self._num_chunks, decision, worker, self.trace.num_steps, item.generated
    )
    self.buffer.begin_chunk(request_id, decision.instance, decision.max_chunk_tokens)
    assert self._instances is not None
    self._instances.admit(decision)

  def _news(self, member: _Member, request_id: str) -> tuple[TextDelta, ...]:
    """Returns the sibling tokens that a worker does not have yet."""
    found = []
    for name, tokens in self._texts.get(self._requests[request_id].group_id, {}).items():
      known = member.known.get(name, 0)
      if name != request_id and known < len(tokens):
        found.append(TextDelta(request_id=name, start=known, tokens=tokens[known:]))
        member.known[name] = len(tokens)
        self.counts["sent"] += len(tokens) - known
    return tuple(found)

  def _send(self) -> None:
    """Sends work to every worker that is not running, if there is any."""
    for worker, member in self._members.items():
      if member.is_away or not (member.orders or member.chunks or any(member.forget.values())):
        continue
      orders, forget = member.orders, [Gone(*one) for one in member.forget.items()]
      member.orders, member.forget, member.is_away = [], {}, True
      member.chunks |= {order.request.request_id: order.chunk for order in orders}
      self._workers.send(worker, orders, forget)

  # Events.

  def _wait(self) -> None:
    events = self._workers.events(blocks=True)
    if not events:
      last = f" The last lost worker: {self._reasons[-1]}" if self._reasons else ""
      raise ConnectionError(
        f"ClusterRollout: got no worker, expected at least one ({self._workers.waits_for()}); start"
        f" workers and resume, sampled tokens are in the journal.{last}"
      )
    self._take_all(events)

  def _take_all(self, events: Sequence[Event]) -> None:
    """Processes events that arrived together; their journal records wait for the disk once."""
    with contextlib.ExitStack() as stack:
      if self._journal is not None and events:
        stack.enter_context(self._journal.together())
      for event in events:
        self._take(event)

  def _take(self, event: Event) -> None:
    arrived = 0
    if isinstance(event, Joined):
      self._join(event)
    elif isinstance(event, Lost):
      self._lose(event.worker, event.reason)
    elif event.worker in self._members:
      member = self._members[event.worker]
      member.is_away = False
      arrived = sum(self._end(event.worker, result) for result in event.results)
      self.counts["drafted"] += sum(result.drafted_tokens for result in event.results)
      self.counts["accepted"] += sum(result.accepted_tokens for result in event.results)
    else:
      for result in event.results:
        self._note("late", event.worker, result.completion.request_id, result.chunk)
      self._workers.join(event.worker)
    if self._instances is not None:
      self.trace.rows.append(arrived)
      totals, free = self._instances.num_pages, self._instances.free_pages
      self.trace.used_pages.append([total - one for total, one in zip(totals, free)])

  def _join(self, event: Joined) -> None:
    report = event.report
    if event.worker in self._members:  # It was asked twice, or was restarted.
      self._lose(event.worker, "it joined again")
    if self._first is not None:
      why = records.difference(self._first, report)
      if why:
        logging.warning(
          "ClusterRollout: worker %d (%s) is rejected, the rollout continues without it: %s",
          event.worker, report.name, why,
        )  # fmt: skip
        self._note("refused", event.worker, why=why)
        self._reasons.append(f"worker {event.worker} was refused: {why}")
        return
    self._first = self._first or report
    if self._instances is None:
      self._instances = Instances(report.page_size, [], [], [], [])
    numbers = []
    for instance in range(report.data_parallel_size):
      numbers.append(
        self._instances.add(num_pages=report.num_pages, max_running=report.max_running)
      )
      self._places.append((event.worker, instance))
      for used in self.trace.used_pages:
        used.append(0)
    self._members[event.worker] = _Member(report, numbers)
    self._note("joined", event.worker)

  def _lose(self, worker: int, reason: str) -> None:
    member = self._members.pop(worker, None)
    if member is None:
      self._reasons.append(f"worker {worker}: {reason}")
      return  # It never joined, or is lost already.
    logging.warning(
      "ClusterRollout: worker %d (%s) is lost: %s; its chunks run again elsewhere.",
      worker, member.report.name, reason,
    )  # fmt: skip
    self._reasons.append(f"worker {worker} ({member.report.name}): {reason}")
    self._note("lost", worker, why=reason)
    for request_id, running in list(self._running.items()):
      if running.worker == worker:
        del self._running[request_id]
        self._add_span(request_id, running, running.first_token, is_last=False)
        self._note("again", worker, request_id, running.chunk)
    for item in self.buffer:
      if item.kv_instance in member.instances:
        self.buffer.lost_kv(item.request_id)
    for group in self.buffer.groups.values():
      group.prompt_instances.difference_update(member.instances)
    assert self._instances is not None
    for instance in member.instances:
      self._instances.close(instance)

  def _end(self, worker: int, result: ChunkResult) -> int:
    """Processes a chunk's end; returns the number of new tokens."""
    completion = result.completion
    request_id = completion.request_id
    member, running = self._members[worker], self._running.get(request_id)
    if member.chunks.get(request_id) == result.chunk:
      del member.chunks[request_id]
    if running is None or (running.worker, running.chunk) != (worker, result.chunk):
      self._note("late", worker, request_id, result.chunk)
      return 0
    del self._running[request_id]
    is_over, generated = bool(completion.finish_reason), len(completion.tokens)
    self.buffer.end_chunk(request_id, generated, is_over)
    assert self._instances is not None
    self._instances.release(running.decision.instance, running.decision.num_pages)
    self._add_span(request_id, running, generated, is_last=is_over)
    self._note("ended", worker, request_id, result.chunk)
    self._hear(member, completion, is_over)
    if result.kv is not None:
      self._kv[request_id] = result.kv
      self._exporters.setdefault(request_id, set()).add(worker)
    if is_over:
      self._so_far.pop(request_id, None)
      self._kv.pop(request_id, None)
      # The worker that finished it needs no message.
      for other in self._exporters.pop(request_id, set()) & self._members.keys() - {worker}:
        self._members[other].forget[request_id] = True
      self._unread.append(completion)
    else:
      self._so_far[request_id] = completion
      if self._journal is not None:
        divided.keep_in(self._journal)(self._requests[request_id], completion, running.first_token)
    return generated - running.first_token

  def _hear(self, member: _Member, completion: Completion, is_over: bool) -> None:
    """Keeps a completion for siblings on other workers, until the whole group is finished."""
    request_id, generated = completion.request_id, len(completion.tokens)
    member.known[request_id] = max(member.known.get(request_id, 0), generated)
    group = self._requests[request_id].group_id
    if not group:
      return
    self._texts.setdefault(group, {})[request_id] = completion.tokens
    siblings = self.buffer[request_id].group.members
    if is_over and all(one.state is State.FINISHED for one in siblings):
      for name in self._texts.pop(group):
        for one in self._members.values():
          one.known.pop(name, None)

  def _note(
    self, what: str, worker: int, request_id: str = "", chunk: int = 0, *, why: str = ""
  ) -> None:
    """Counts an event and journals it."""
    self.counts[what] += 1
    if self._journal is not None:
      event: dict[str, Any] = {"event": what, "worker": worker}
      if request_id:
        event |= {"request": request_id, "chunk": chunk}
      self._journal.append_event(event | ({"why": why} if why else {}))

  def _add_span(self, request_id: str, running: _Running, generated: int, *, is_last: bool) -> None:
    item = self.buffer[request_id]
    self.trace.spans.append(
      Span(
        request_id,
        item.group.name,
        running.decision.instance,
        running.begin,
        self.trace.num_steps + 1,
        generated - running.first_token,
        running.decision.is_probe,
        is_last,
      )
    )
