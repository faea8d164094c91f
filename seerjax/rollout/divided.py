"""Runs a rollout in chunks: carries out the scheduler's decisions on one engine's instances.

    buffer (all requests) -> scheduler (which chunk, where) -> engine.add_request / resume -> steps
      ^                                                                                  |
      +--------------- end of chunk, end of request, keys and values that moved <--------+

Between two chunks a request keeps its pages until a running one needs them. They then move to a
peer with room, to pinned host memory or to the store, and return with the next chunk, on whichever
instance runs it. If nothing has room, the request that needs it waits. No decision reads a clock:
all depend only on the visit and the sampled tokens, so every process takes the same ones.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses

from seerjax import fields
from seerjax.engine.engine import Engine
from seerjax.rollout import groups
from seerjax.rollout.buffer import NOWHERE, Buffer, State
from seerjax.rollout.instances import Decision, Instances
from seerjax.rollout.journal import Journal
from seerjax.rollout.journal_records import Chunk
from seerjax.rollout.policies import Policy
from seerjax.rollout.scheduler import Scheduler
from seerjax.rollout.trace import Span, Trace
from seerjax.types import Completion, Request

# A waiting request's pages move to a peer only if this share of the peer's pages stays free.
PEER_RESERVE = 0.25


@dataclasses.dataclass
class _Running:
  """A running chunk: its decision, first step and first token, and the order of admission."""

  decision: Decision
  begin: int
  first_token: int
  order: int


class DividedRollout:
  """Runs requests to completion, chunk by chunk.

  Attributes:
    trace: trace of the rollout so far.
    buffer: state of all requests.
  """

  @fields.checked
  def __init__(
    self,
    engine: Engine,
    policy: Policy,
    *,
    resume_from: Mapping[str, Completion] | None = None,
    on_chunk: Callable[[Request, Completion], None] = lambda request, so_far: None,
  ):
    """Creates a rollout.

    Args:
      engine: an engine without unfinished requests.
      policy: scheduling policy.
      resume_from: partial completions of unfinished requests from a journal, by request id.
      on_chunk: called with a request and its completion so far when a chunk ends without
        finishing it.

    Raises:
      ValueError: if the engine has unfinished requests.
    """
    if engine.num_unfinished:
      raise ValueError(
        f"DividedRollout: got an engine with {engine.num_unfinished} unfinished requests, expected"
        " none (the scheduler needs all its memory); finish or cancel them."
      )
    self.engine = engine
    self.buffer = Buffer()
    self.trace = Trace()
    self._grows = policy.grows
    self._scheduler = Scheduler(policy, self.buffer)
    self._resume_from = dict(resume_from or {})
    self._on_chunk = on_chunk
    config = engine.config
    self._instances = Instances.empty(
      engine.data_parallel_size,
      page_size=config.page_size,
      num_pages=config.num_pages - 1,
      max_running=config.max_num_seqs,
    )
    self._requests: dict[str, Request] = {}
    self._running: dict[str, _Running] = {}
    self._unread: collections.deque[Completion] = collections.deque()
    self._num_decisions = 0
    self._rows_before = engine.counters.rows

  def run(self, requests: Sequence[Request]) -> Iterator[Completion]:
    """Yields completions as they finish.

    Raises:
      ValueError: as `Engine.add_request`, before anything runs.
    """
    for request in requests:
      self.engine.check(request)
    for request in requests:
      partial = self._resume_from.get(request.request_id)
      self._requests[request.request_id] = request
      wait_in(self.buffer, request, partial)
    while self.buffer.num_unfinished:
      self._decide()
      updates = self.engine.step()
      for update in updates:
        if not update.finish_reason:
          item = self.buffer[update.request_id]
          self.buffer.progress(update.request_id, item.generated + len(update.tokens))
      self._record()
      for completion in self.engine.poll():
        self._end(completion.request_id, len(completion.tokens), finished=True)
        self._unread.append(completion)
      for request_id in self.engine.chunks.poll_paused():
        if request_id in self._running:
          self._end_of_chunk(request_id)
      while self._unread:
        yield self._unread.popleft()

  def stop(self) -> tuple[list[Completion], dict[str, Completion]]:
    """Ends the rollout before all requests are finished, and frees the engine.

    Returns:
      Completions that `run` has not yielded yet, and partial completions of the others by request
      id.
    """
    partials = dict(self._resume_from)
    for request_id in self._requests:
      item = self.buffer[request_id]
      if item.num_chunks and item.state is not State.FINISHED:
        partials[request_id] = self.engine.progress(request_id)
        self.engine.abort_request(request_id)
    finished = list(self._unread)
    self._unread.clear()
    return finished, {name: one for name, one in partials.items() if one.tokens}

  def _record(self) -> None:
    engine = self.engine
    usable = engine.config.num_pages - 1
    self.trace.used_pages.append(
      [usable - engine.chunks.free_pages(instance) for instance in range(engine.data_parallel_size)]
    )
    self.trace.rows.append(engine.counters.rows - self._rows_before)
    self._rows_before = engine.counters.rows

  # Decisions.

  def _decide(self) -> None:
    """Applies decisions until there are none, or there is no room for the next."""
    while True:
      for instance, pages in enumerate(self._pages_to_have()):
        self._instances.see(instance, free_pages=pages)
      decision = self._scheduler.next(self._instances)
      if decision is not None and self._apply(decision):
        continue
      if decision is not None:
        self.trace.held_back += 1
      if self._running or not self.buffer.num_waiting:
        return
      # Nothing runs, and the waiting requests hold the memory that they need.
      self._drop_one()

  def _apply(self, decision: Decision) -> bool:
    """Applies a decision; returns False if no tier has room for the pages it would displace."""
    engine, request_id, target = self.engine, decision.request_id, decision.instance
    chunks = engine.chunks
    is_known = request_id in chunks.poll_paused()
    held = chunks.held_pages(request_id) if is_known else 0
    home = chunks.instance_of(request_id) if is_known else NOWHERE
    needed = decision.num_pages - (held if home == target else 0)
    if not self._make_room(target, needed, keep=request_id):
      return False
    chunk_tokens = self._chunk_tokens(request_id, decision)
    if is_known:
      if held and home != target and decision.pull_tokens:
        self.trace.migrations += chunks.migrate(request_id, target)
      chunks.resume(request_id, chunk_tokens=chunk_tokens, instance=target)
    else:
      request = self._requests[request_id]
      if decision.pull_tokens and decision.pull_from != target:
        pulled = chunks.pull_prefix(
          request.prompt,
          decision.pull_from,
          target,
          adapter=request.adapter,
          namespace=request.namespace,
        )
        self.trace.pulls += pulled > 0
      partial = self._resume_from.pop(request_id, None)
      engine.add_request(request, resume_from=partial, instance=target, chunk_tokens=chunk_tokens)
    item = self.buffer[request_id]
    self._num_decisions += 1
    self._running[request_id] = _Running(
      decision, self.trace.num_steps, item.generated, self._num_decisions
    )
    self.buffer.begin_chunk(request_id, target, decision.max_chunk_tokens)
    self._instances.admit(decision)
    return True

  def _chunk_tokens(self, request_id: str, decision: Decision) -> int:
    """Returns the engine's chunk length: up to the page's end if pages are allocated one by one."""
    if not self._grows:
      return decision.max_chunk_tokens
    item = self.buffer[request_id]
    size = self.engine.config.page_size
    written = item.prompt_tokens + item.generated - 1
    return min(size - written % size, decision.max_chunk_tokens)

  def _pages_to_have(self) -> list[int]:
    """Returns the pages available to a chunk by instance.

    These are free pages and those of waiting requests, which can be displaced. Shared prompt pages
    count once.
    """
    chunks = self.engine.chunks
    pages = [self._free(instance) for instance in range(self.engine.data_parallel_size)]
    for request_id in chunks.poll_paused():
      pages[chunks.instance_of(request_id)] += chunks.held_pages(request_id)
    return pages

  def _free(self, instance: int) -> int:
    """Returns an instance's pages that are free and not reserved."""
    return self.engine.chunks.free_pages(instance) - self.engine.chunks.awaited_pages(instance)

  def _make_room(self, instance: int, num_pages: int, keep: str) -> bool:
    """Displaces waiting requests' pages, longest waiting first; returns whether it succeeded."""
    engine, chunks = self.engine, self.engine.chunks
    for request_id in chunks.poll_paused():
      if self._free(instance) >= num_pages:
        return True
      held = chunks.held_pages(request_id)
      if request_id == keep or not held or chunks.instance_of(request_id) != instance:
        continue
      peer = max(range(engine.data_parallel_size), key=lambda i: (i != instance, self._free(i), -i))
      reserve = int(PEER_RESERVE * (engine.config.num_pages - 1))
      has_room = peer != instance and self._free(peer) - held >= reserve
      if has_room and chunks.migrate(request_id, peer):
        self.buffer.moved(request_id, peer)
        self.trace.migrations += 1
      elif chunks.spill([request_id]):
        self.trace.spills += 1
      else:
        break
    return self._free(instance) >= num_pages

  def _drop_one(self) -> None:
    """Drops the pages of the request that began waiting last, as it has the longest wait ahead."""
    chunks = self.engine.chunks
    held = [name for name in chunks.poll_paused() if chunks.held_pages(name)]
    assert held, "requests wait, nothing runs, and no request holds memory"
    chunks.preempt(held[-1])
    self.buffer.lost_kv(held[-1])
    self.trace.dropped += 1

  # Ends of chunks.

  def _end_of_chunk(self, request_id: str) -> None:
    running = self._running[request_id]
    item = self.buffer[request_id]
    if self._grows and item.generated < item.chunk_end:
      self._grow(request_id, running)
      return
    self._end(request_id, item.generated, finished=False)
    self._on_chunk(self._requests[request_id], self.engine.progress(request_id))

  def _grow(self, request_id: str, running: _Running) -> None:
    """Allocates one more page; preempts the most recently admitted request if there is none."""
    instance = running.decision.instance
    while self._free(instance) < 1:
      victim = max(
        (name for name, one in self._running.items() if one.decision.instance == instance),
        key=lambda name: self._running[name].order,
      )
      self._preempt(victim)
      if victim == request_id:
        return
    item = self.buffer[request_id]
    chunk = min(self.engine.config.page_size, item.chunk_end - item.generated)
    self.engine.chunks.resume(request_id, chunk_tokens=chunk)

  def _preempt(self, request_id: str) -> None:
    running = self._running.pop(request_id)
    self.engine.chunks.pause(request_id)
    self.engine.chunks.preempt(request_id)
    self._add_span(request_id, running, self.buffer[request_id].generated, is_last=False)
    self.buffer.lost_kv(request_id)
    self._instances.release(running.decision.instance, running.decision.num_pages)
    self.trace.preemptions += 1

  def _end(self, request_id: str, generated: int, *, finished: bool) -> None:
    running = self._running.pop(request_id)
    self.buffer.end_chunk(request_id, generated, finished)
    self._instances.release(running.decision.instance, running.decision.num_pages)
    self._add_span(request_id, running, generated, is_last=finished)

  def _add_span(self, request_id: str, running: _Running, generated: int, *, is_last: bool) -> None:
    self.trace.spans.append(
      Span(
        request_id,
        self.buffer[request_id].group.name,
        running.decision.instance,
        running.begin,
        self.trace.num_steps,
        generated - running.first_token,
        running.decision.is_probe,
        is_last,
      )
    )


def resumed(
  engine: Engine, policy: Policy, journal: Journal, requests: Sequence[Request]
) -> DividedRollout:
  """Returns a rollout for `requests` that continues from a journal's chunks.

  Its chunks are appended to the journal. Request ids must have the form that `groups.place_of`
  reads.
  """
  return DividedRollout(
    engine, policy, resume_from=partial_completions(journal, requests), on_chunk=keep_in(journal)
  )


def wait_in(buffer: Buffer, request: Request, partial: Completion | None) -> None:
  """Adds a request to a rollout's buffer, with the number of tokens sampled so far."""
  buffer.add(
    request.request_id,
    request.group_id or request.request_id,
    prompt_tokens=len(request.prompt),
    max_tokens=request.sampling.max_tokens,
    generated=len(partial.tokens) if partial else 0,
  )


def partial_completions(journal: Journal, requests: Sequence[Request]) -> dict[str, Completion]:
  """Returns the journal's partial completions of those requests that have one, by request id."""
  partials = {
    request.request_id: journal.partial_completion(
      *groups.place_of(request.request_id), prompt=request.prompt
    )
    for request in requests
  }
  return {name: known for name, known in partials.items() if known is not None}


def keep_in(journal: Journal) -> Callable[..., None]:
  """Returns a function that journals a request's partial completion at the end of a chunk.

  It takes the request, its completion so far, and the start of the chunk. Tokens before the start
  are in the journal already. With start 0, the journal compares all of them with its own.
  """

  def keep(request: Request, so_far: Completion, start: int = 0) -> None:
    # The journal writes only new tokens.
    journal.append_chunk(
      *groups.place_of(request.request_id),
      Chunk(
        request=request,
        start=start,
        tokens=so_far.tokens[start:],
        behaviour_logprobs=so_far.behaviour_logprobs[start:],
        raw_logprobs=so_far.raw_logprobs[start:],
        policy_version=so_far.policy_version,
      ),
    )

  return keep
