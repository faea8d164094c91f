"""Simulates one rollout on a cluster, with the scheduler of real rollouts.

    event (a chunk ends | pages run out | KV arrives) -> buffer -> scheduler.next ... -> events

Each instance decodes its batch in steps. A step takes `CostModel.step_seconds` and adds one token
to each request, or more with speculation. Between two events only the context changes, hence
many steps are taken at once: their total time is quadratic in their number. A request joins an
instance at the end of the current step.

Simplifications: instances do not wait for each other at the end of steps, prefill stalls an
instance's decoding, and network transfers overlap with decoding (only the request waits).
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from typing import NamedTuple

import numpy as np

from seerjax import fields
from seerjax.rollout import (
  buffer as buffer_lib,
  instances as instances_lib,
  policies,
  scheduler as scheduler_lib,
)
from seerjax.rollout.buffer import State
from seerjax.simulate import costs, speculation as speculation_lib

_ALMOST = 1e-6  # Tolerance in tokens, because sums of fractions are inexact.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig:
  """Configuration of the machines of a rollout.

  Attributes:
    data_parallel_size: number of equal instances.
    costs: cost model of one instance.
    max_running: maximum running requests per instance.
    page_size: positions of a page.
    prompt_tokens: length of every prompt.
  """

  data_parallel_size: int
  costs: costs.CostModel
  max_running: int
  page_size: int = 16
  prompt_tokens: int = 512

  def __post_init__(self):
    one = fields.at_least(1)
    fields.check(self, data_parallel_size=one, max_running=one, page_size=one, prompt_tokens=one)

  @property
  def num_pages(self) -> int:
    """Number of pages of an instance."""
    return self.costs.kv_tokens // self.page_size


class ChunkRecord(NamedTuple):
  """One chunk that was run: a bar of the Gantt chart."""

  request_id: str
  instance: int
  start_seconds: float
  end_seconds: float
  is_probe: bool


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Result:
  """Result of a simulated rollout.

  Attributes:
    total_seconds: time until the last request finished, or the rollout was stopped.
    finish_seconds: f64[n], finishing times of the finished requests, ascending.
    busy_seconds: f64[instances], time spent on steps and prefill.
    generated_tokens: total generated tokens.
    generated: tokens by request id, of all requests, finished or not.
    num_steps: steps of all instances.
    num_preemptions: how often a request's KV was lost and had to be recomputed.
    num_chunks: number of decisions.
    pulled_bytes: bytes of KV moved between instances.
    spilled_bytes: bytes of KV moved to the host and back.
    mean_accepted: tokens per request and step.
    chunks: all chunks.
  """

  total_seconds: float
  finish_seconds: np.ndarray
  busy_seconds: np.ndarray
  generated_tokens: int
  generated: dict[str, int]
  num_steps: int
  num_preemptions: int
  num_chunks: int
  pulled_bytes: float
  spilled_bytes: float
  mean_accepted: float
  chunks: list[ChunkRecord]

  @property
  def tail_seconds(self) -> float:
    """Time in which only the last tenth of the requests were left."""
    place = math.ceil(0.9 * len(self.finish_seconds)) - 1
    return float(self.finish_seconds[-1] - self.finish_seconds[place])

  @property
  def idle_share(self) -> float:
    """Share of the instances' time in which they were idle."""
    return float(1 - self.busy_seconds.mean() / self.total_seconds)


class Simulation:
  """One rollout; call `run` once.

  Args:
    cluster: configuration of the machines.
    policy: scheduling policy.
    lengths: i64[g, n], true length of member n of group g: the tokens it has generated when it
      ends.
    max_tokens: maximum number of generated tokens, which the scheduler knows.
    speculation: configuration of drafts, or None.
    generated: i64[g, n], tokens from an earlier iteration, without KV; equal to `lengths` for
      finished requests. None for 0.
    stop_after_groups: stop once this many groups are complete; None runs to the end.
  """

  def __init__(
    self,
    cluster: ClusterConfig,
    policy: policies.Policy,
    lengths: np.ndarray,
    *,
    max_tokens: int,
    speculation: speculation_lib.SpeculationConfig | None = None,
    generated: np.ndarray | None = None,
    stop_after_groups: int | None = None,
  ):
    if lengths.ndim != 2 or lengths.min() < 1 or lengths.max() > max_tokens:
      raise ValueError(
        f"Simulation: got lengths {lengths.shape} from {lengths.min()} to {lengths.max()}, expected"
        f" [groups, members] between 1 and max_tokens={max_tokens}; clip them."
      )
    self._cluster = cluster
    self._speculation = speculation
    num_groups, group_size = lengths.shape
    start = np.zeros_like(lengths) if generated is None else generated
    is_left = start < lengths
    self._buffer = buffer_lib.Buffer()
    for group in range(num_groups):
      for member in np.flatnonzero(is_left[group]).tolist():
        self._buffer.add(
          f"{group}/{member}",
          str(group),
          prompt_tokens=cluster.prompt_tokens,
          max_tokens=max_tokens,
          generated=int(start[group, member]),
        )
    self._items = list(self._buffer)
    self._lengths = lengths[is_left]
    self._group_of = np.nonzero(is_left)[0]
    self._group_size = group_size
    self._stop_after = num_groups if stop_after_groups is None else stop_after_groups
    by_id = {item.request_id: int(self._lengths[item.index]) for item in self._items}
    policy = policy.knowing(by_id)
    self._preempts = policy.grows
    self._scheduler = scheduler_lib.Scheduler(policy, self._buffer)
    self._view = instances_lib.Instances.empty(
      cluster.data_parallel_size,
      page_size=cluster.page_size,
      num_pages=cluster.num_pages,
      max_running=cluster.max_running,
    )
    chances = None
    if speculation is not None:
      chances = speculation_lib.acceptance(speculation, group_size)
    self._machines = [
      _Machine(cluster, speculation, chances) for _ in range(cluster.data_parallel_size)
    ]
    self._events: list[tuple[float, int, int, int, int]] = []
    self._num_events = 0
    self._decisions: dict[int, tuple[instances_lib.Decision, float]] = {}  # Of running requests.
    self._spilled: set[int] = set()  # Waiting requests with KV on the host.
    self._finished_in_group = group_size - is_left.sum(1)
    self._num_whole_groups = int((self._finished_in_group == group_size).sum())
    self._finish_seconds: list[float] = []
    self._chunks: list[ChunkRecord] = []
    self._pulled_tokens = self._spilled_tokens = 0

  def run(self) -> Result:
    """Runs the rollout and returns the result."""
    before = sum(item.generated for item in self._items)
    now = 0.0
    self._schedule(now, set())
    while self._num_whole_groups < self._stop_after:
      assert self._events, "requests wait, but no running request can free memory"
      now, _, place, stamp, joining = heapq.heappop(self._events)
      if joining >= 0:
        self._join(place, joining, now)
        self._plan(place)
      elif stamp == self._machines[place].stamp:
        self._end_segment(place, now)
    generated = {item.request_id: item.generated for item in self._items}
    for machine in self._machines:
      machine.advance_to(now)  # If a rollout is stopped, the others are in the middle of a segment.
      for index, done in zip(machine.index.tolist(), machine.done.tolist()):
        generated[self._items[index].request_id] = int(done + _ALMOST)
    tokens = sum(generated.values()) - before
    request_steps = sum(machine.num_request_steps for machine in self._machines)
    return Result(
      total_seconds=now,
      finish_seconds=np.sort(np.array(self._finish_seconds)),
      busy_seconds=np.array([machine.busy_seconds for machine in self._machines]),
      generated_tokens=tokens,
      generated=generated,
      num_steps=sum(machine.num_steps for machine in self._machines),
      num_preemptions=sum(item.num_lost for item in self._items),
      num_chunks=sum(item.num_chunks for item in self._items),
      pulled_bytes=self._pulled_tokens * self._cluster.costs.kv_bytes,
      spilled_bytes=self._spilled_tokens * self._cluster.costs.kv_bytes,
      mean_accepted=tokens / max(request_steps, 1),
      chunks=self._chunks,
    )

  def _schedule(self, now: float, changed: set[int]) -> None:
    """Starts everything possible, then plans the instances in `changed` and those with new work."""
    while (decision := self._scheduler.next(self._view)) is not None:
      item = self._buffer[decision.request_id]
      wait = self._cluster.costs.peer_seconds(decision.pull_tokens)
      self._pulled_tokens += decision.pull_tokens
      if item.index in self._spilled:
        self._spilled.remove(item.index)
        self._spilled_tokens += 2 * item.kv_tokens
        wait = max(wait, self._cluster.costs.host_seconds(item.kv_tokens))
      self._buffer.begin_chunk(item.request_id, decision.instance, decision.max_chunk_tokens)
      self._view.admit(decision)
      self._decisions[item.index] = (decision, now)
      if wait > 0:
        self._push(now + wait, decision.instance, joining=item.index)
      else:
        self._join(decision.instance, item.index, now)
        changed.add(decision.instance)
    for place in sorted(changed):
      self._plan(place)

  def _join(self, place: int, index: int, now: float) -> None:
    decision, _ = self._decisions[index]
    machine = self._machines[place]
    machine.advance_to(now)
    machine.stall(self._cluster.costs.prefill_seconds(decision.prefill_tokens))
    item = self._items[index]
    end = min(item.chunk_end, int(self._lengths[index]))
    machine.add(index, item.generated, end)

  def _plan(self, place: int) -> None:
    """Plans an instance's next event: the first end of a chunk, or running out of pages."""
    machine = self._machines[place]
    machine.stamp += 1
    self._count_pages(place)
    if not len(machine.index):
      return
    machine.set_rates(self._finished_in_group[self._group_of[machine.index]])
    machine.segment_steps = machine.steps_to_first_end()
    if self._preempts:
      machine.segment_steps = machine.steps_within(self._cluster.num_pages)
    self._push(machine.clock + machine.duration(machine.segment_steps), place, machine.stamp)

  def _count_pages(self, place: int) -> None:
    """Without reservation, sets an instance's free pages to those left after its next step."""
    if self._preempts:
      taken = self._machines[place].pages_of_step(1)
      self._view.see(place, free_pages=self._cluster.num_pages - taken)

  def _end_segment(self, place: int, now: float) -> None:
    machine = self._machines[place]
    machine.take(machine.segment_steps)
    ended = machine.index[machine.done >= machine.end - _ALMOST].tolist()
    if not ended:
      self._preempt(place)
      self._plan(place)
      return
    machine.keep(machine.done < machine.end - _ALMOST)
    for index in ended:
      self._end_chunk(index, now)
    self._count_pages(place)
    self._schedule(now, {place})
    for index in ended:
      if self._items[index].state is State.WAITING:
        self._spilled.add(index)

  def _end_chunk(self, index: int, now: float) -> None:
    item = self._items[index]
    decision, start = self._decisions.pop(index)
    length = int(self._lengths[index])
    is_finished = item.chunk_end >= length
    self._chunks.append(
      ChunkRecord(item.request_id, decision.instance, start, now, decision.is_probe)
    )
    self._view.release(decision.instance, decision.num_pages)
    self._buffer.end_chunk(item.request_id, min(item.chunk_end, length), is_finished)
    if is_finished:
      group = self._group_of[index]
      self._finish_seconds.append(now)
      self._finished_in_group[group] += 1
      self._num_whole_groups += bool(self._finished_in_group[group] == self._group_size)

  def _preempt(self, place: int) -> None:
    """Preempts the most recently admitted requests of an instance until the next step fits."""
    machine = self._machines[place]
    while machine.pages_of_step(1) > self._cluster.num_pages:
      index = int(machine.index[-1])
      item = self._items[index]
      self._buffer.progress(item.request_id, int(machine.done[-1] + _ALMOST))
      self._buffer.lost_kv(item.request_id)
      decision, start = self._decisions.pop(index)
      self._chunks.append(
        ChunkRecord(item.request_id, place, start, machine.clock, decision.is_probe)
      )
      self._view.release(place, decision.num_pages)
      machine.keep(np.arange(len(machine.index)) < len(machine.index) - 1)

  def _push(self, when: float, place: int, stamp: int = 0, joining: int = -1) -> None:
    self._num_events += 1
    heapq.heappush(self._events, (when, self._num_events, place, stamp, joining))


class _Machine:
  """State of an instance; the last of `index` was admitted last.

  Attributes:
    clock: end of the last step taken, in seconds.
    index: i64[n], requests.
    done: f64[n], tokens generated.
    end: f64[n], tokens at which their chunks end.
    rate: f64[n], tokens per step.
    segment_steps: steps until the next event.
    stamp: number of plans; an event with an older one is stale.
  """

  def __init__(
    self,
    cluster: ClusterConfig,
    speculation: speculation_lib.SpeculationConfig | None,
    chances: np.ndarray | None,
  ):
    self._cluster = cluster
    self._speculation = speculation
    self._chances = chances
    self.clock = self.busy_seconds = 0.0
    self.num_steps = self.num_request_steps = 0
    self.index = np.zeros(0, np.int64)
    self.done, self.end, self.rate = np.zeros(0), np.zeros(0), np.zeros(0)
    self.segment_steps = 0
    self.stamp = 0
    self._step = self._slope = 0.0  # Seconds of the next step, and their increase per step.

  def add(self, index: int, done: int, end: int) -> None:
    self.index = np.append(self.index, index)
    self.done = np.append(self.done, done)
    self.end = np.append(self.end, end)
    self.rate = np.append(self.rate, 1.0)

  def keep(self, mask: np.ndarray) -> None:
    self.index, self.done = self.index[mask], self.done[mask]
    self.end, self.rate = self.end[mask], self.rate[mask]

  def set_rates(self, finished_siblings: np.ndarray) -> None:
    """Chooses the draft length, which determines tokens and seconds of a step."""
    model, batch = self._cluster.costs, len(self.index)
    context = float(self.done.sum()) + batch * self._cluster.prompt_tokens
    if self._speculation is None or self._chances is None:
      self.rate = np.ones(batch)
      gamma = 0
    else:
      chance = self._chances[finished_siblings]
      seconds = lambda gamma: model.step_seconds(batch, context, gamma)
      gamma = speculation_lib.draft_tokens(chance, self._speculation.max_draft_tokens, seconds)
      self.rate = speculation_lib.tokens_per_step(chance, gamma)
    self._step = model.step_seconds(batch, context, gamma)
    self._slope = float(self.rate.sum()) * model.context_seconds(gamma)

  def duration(self, steps: int) -> float:
    return steps * self._step + self._slope * (steps * (steps - 1) / 2)

  def take(self, steps: int) -> None:
    seconds = self.duration(steps)
    self.clock += seconds
    self.busy_seconds += seconds
    self.num_steps += steps
    self.num_request_steps += steps * len(self.index)
    self.done = self.done + steps * self.rate
    self._step += steps * self._slope
    self.segment_steps -= steps

  def advance_to(self, when: float) -> None:
    """Takes steps until the clock reaches `when`; an idle instance waits."""
    if not len(self.index):
      self.clock = max(self.clock, when)
      return
    gap = when - self.clock
    if gap > 0:
      # The root of duration(steps) = gap; rounding may be off by one.
      linear = self._step - self._slope / 2
      steps = int(2 * gap / (linear + math.sqrt(linear * linear + 2 * self._slope * gap)))
      steps = max(steps - 1, 0)
      while steps < self.segment_steps and self.duration(steps) < gap:
        steps += 1
      self.take(min(steps, self.segment_steps))

  def stall(self, seconds: float) -> None:
    self.clock += seconds
    self.busy_seconds += seconds

  def steps_to_first_end(self) -> int:
    return max(math.ceil(float(((self.end - self.done) / self.rate).min()) - _ALMOST), 0)

  def pages_of_step(self, steps: int) -> int:
    """Returns the pages of the batch after `steps` more steps."""
    positions = self._cluster.prompt_tokens + self.done + steps * self.rate - self.rate
    return int(np.ceil(positions / self._cluster.page_size - _ALMOST).sum())

  def steps_within(self, num_pages: int) -> int:
    """Returns how many of the segment's steps fit into `num_pages`."""
    low, high = 0, self.segment_steps
    if self.pages_of_step(high) <= num_pages:
      return high
    while high - low > 1:  # `low` fits or is 0, `high` does not fit.
      middle = (low + high) // 2
      if self.pages_of_step(middle) <= num_pages:
        low = middle
      else:
        high = middle
    return low
