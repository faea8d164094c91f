"""The simulator against one that simulates every single step, and by hand."""

from __future__ import annotations

import dataclasses
import math

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from seerjax.rollout.buffer import Buffer, State
from seerjax.rollout.instances import Instances
from seerjax.rollout.policies import (
  ByRoom,
  ContextAware,
  Divided,
  GroupFCFS,
  LongestGroupFirst,
  Oracle,
  Policy,
)
from seerjax.rollout.scheduler import Scheduler
from seerjax.simulate import cluster as cluster_lib
from seerjax.simulate.cluster import ClusterConfig, Simulation
from seerjax.simulate.costs import CostModel
from seerjax.simulate.speculation import SpeculationConfig

MAX_TOKENS = 24
PROMPT = 4
PAGE = 4
COSTS = CostModel(
  num_devices=1,
  device_bytes=200.0,
  device_bandwidth=100.0,
  device_speed=1e6,
  weight_bytes=100.0,
  resident_bytes=100.0,
  active_bytes=100.0,
  active_parameters=100.0,
  kv_bytes=1.0,
  attention_operations=1.0,
  draft_overhead=0.1,
  fixed_seconds=0.5,
  memory_share=0.8,  # 60 positions, 15 pages: two requests of the most tokens
  host_bandwidth=40.0,
  peer_bandwidth=30.0,
)
CLUSTER = ClusterConfig(
  data_parallel_size=2, costs=COSTS, max_running=5, page_size=PAGE, prompt_tokens=PROMPT
)
POLICIES = {
  "baseline": GroupFCFS(),
  "baseline, waits": GroupFCFS(reserves=True),
  "divided": Divided(chunk_tokens=5, min_pull_tokens=3),
  "context": ContextAware(chunk_tokens=7, routing=ByRoom()),
  "oracle": Oracle(chunk_tokens=6),
  "ours": LongestGroupFirst(chunk_tokens=5, min_pull_tokens=3),
  "ours, alike": LongestGroupFirst(chunk_tokens=5, min_correlation=-1.0, min_pull_tokens=3),
}


@dataclasses.dataclass
class Running:
  """A request on an instance of the naive simulator."""

  item: object
  done: int
  end: int


class Naive:
  """Takes one step of one instance at a time, on plain lists.

  Everything that waits for KV joins when it has come, at the end of the step under way.
  """

  def __init__(self, machines: ClusterConfig, policy: Policy, lengths: np.ndarray):
    self.machines, self.lengths = machines, lengths
    self.preempts = isinstance(policy, GroupFCFS) and not policy.reserves
    if isinstance(policy, Oracle):
      by_id = {f"{g}/{m}": int(n) for (g, m), n in np.ndenumerate(lengths)}
      policy = dataclasses.replace(policy, lengths=by_id)
    self.buffer = Buffer()
    for (g, m), _ in np.ndenumerate(lengths):
      self.buffer.add(f"{g}/{m}", str(g), prompt_tokens=PROMPT, max_tokens=MAX_TOKENS)
    self.view = Instances.empty(
      machines.data_parallel_size,
      page_size=PAGE,
      num_pages=machines.num_pages,
      max_running=machines.max_running,
    )
    self.planner = Scheduler(policy, self.buffer)
    self.clocks = [0.0] * machines.data_parallel_size
    self.batches: list[list[Running]] = [[] for _ in self.clocks]
    self.arrivals: list[tuple[float, int, int, object]] = []
    self.decisions = {}
    self.spilled = set()
    self.num_arrivals = 0
    self.finish = []
    self.preempted = 0
    # Whether two events coincided: rounding decides which is first.
    self.is_tied = False

  def length(self, item) -> int:
    return int(self.lengths[item.group.index, item.member])

  def pages(self, place: int) -> int:
    return sum(math.ceil((PROMPT + run.done) / PAGE) for run in self.batches[place])

  def step_seconds(self, place: int) -> float:
    batch = self.batches[place]
    return self.machines.costs.step_seconds(len(batch), sum(PROMPT + run.done for run in batch))

  def join(self, place: int, item, now: float) -> None:
    """Steps of that instance that end before `now` have been taken; so is the one under way."""
    while self.batches[place] and self.clocks[place] < now - 1e-9:
      self.step(place)
    self.clocks[place] = max(self.clocks[place], now)
    prefill = self.decisions[item.request_id].prefill_tokens
    self.clocks[place] += self.machines.costs.prefill_seconds(prefill)
    self.batches[place].append(
      Running(item, item.generated, min(item.chunk_end, self.length(item)))
    )

  def step(self, place: int) -> None:
    self.clocks[place] += self.step_seconds(place)
    for run in self.batches[place]:
      run.done += 1

  def schedule(self, now: float) -> None:
    while (decision := self.planner.next(self.view)) is not None:
      item = self.buffer[decision.request_id]
      wait = self.machines.costs.peer_seconds(decision.pull_tokens)
      if item.request_id in self.spilled:
        self.spilled.remove(item.request_id)
        wait = max(wait, self.machines.costs.host_seconds(item.kv_tokens))
      self.buffer.begin_chunk(item.request_id, decision.instance, decision.max_chunk_tokens)
      self.view.admit(decision)
      self.decisions[item.request_id] = decision
      if wait > 0:
        self.num_arrivals += 1
        self.arrivals.append((now + wait, self.num_arrivals, decision.instance, item))
      else:
        self.join(decision.instance, item, now)
    self.count_pages()

  def count_pages(self) -> None:
    if self.preempts:
      for place in range(len(self.clocks)):
        self.view.see(place, free_pages=self.machines.num_pages - self.pages(place))

  def next_end(self, place: int) -> float:
    """When that instance's first chunk ends, or its pages run out, if nothing joins."""
    batch = [Running(run.item, run.done, run.end) for run in self.batches[place]]
    clock = self.clocks[place]
    kept, self.batches[place] = self.batches[place], batch
    while all(run.done < run.end for run in batch):
      if self.preempts and self.pages(place) > self.machines.num_pages:
        break
      clock += self.step_seconds(place)
      for run in batch:
        run.done += 1
    self.batches[place] = kept
    return clock

  def run(self) -> Naive:
    self.schedule(0.0)
    while self.buffer.num_unfinished:
      ends = [
        (self.next_end(place), place) for place in range(len(self.clocks)) if self.batches[place]
      ]
      arrival = min(self.arrivals, default=(math.inf, 0, 0, None))
      if not ends or arrival[0] < min(ends)[0] - 1e-9:
        self.arrivals.remove(arrival)
        self.join(arrival[2], arrival[3], arrival[0])
        continue
      now, place = min(ends)
      others = [end for end, other in ends if other != place] + [one[0] for one in self.arrivals]
      self.is_tied |= any(abs(other - now) < 1e-9 for other in others)
      while self.clocks[place] < now - 1e-9:
        self.step(place)
      ended = [run for run in self.batches[place] if run.done >= run.end]
      if not ended:
        while self.pages(place) > self.machines.num_pages:
          run = self.batches[place].pop()
          self.buffer.progress(run.item.request_id, run.done)
          self.buffer.lost_kv(run.item.request_id)
          self.view.see(place, num_running=self.view.num_running[place] - 1)
          self.preempted += 1
        self.count_pages()
        continue
      self.batches[place] = [run for run in self.batches[place] if run.done < run.end]
      for run in ended:
        is_finished = run.end == self.length(run.item)
        decision = self.decisions.pop(run.item.request_id)
        self.view.release(place, decision.num_pages)
        self.buffer.end_chunk(run.item.request_id, run.end, is_finished)
        if is_finished:
          self.finish.append(now)
      self.count_pages()
      self.schedule(now)
      for run in ended:
        if run.item.state is State.WAITING:
          self.spilled.add(run.item.request_id)
    return self


@pytest.mark.parametrize("name", POLICIES)
@hypothesis.given(
  rows=st.integers(1, 3).flatmap(
    lambda size: st.lists(
      st.lists(st.integers(1, MAX_TOKENS), min_size=size, max_size=size), min_size=1, max_size=5
    )
  ),
  data_parallel_size=st.integers(1, 3),
)
@hypothesis.settings(max_examples=15, deadline=None)
def test_many_steps_at_once_are_the_steps_one_by_one(name, rows, data_parallel_size):
  lengths = np.array(rows)
  machines = dataclasses.replace(CLUSTER, data_parallel_size=data_parallel_size)
  naive = Naive(machines, POLICIES[name], lengths).run()
  result = Simulation(machines, POLICIES[name], lengths, max_tokens=MAX_TOKENS).run()
  if not naive.is_tied:
    np.testing.assert_allclose(result.finish_seconds, sorted(naive.finish), rtol=1e-9)
    assert result.num_preemptions == naive.preempted
  assert result.generated == {f"{g}/{m}": n for (g, m), n in np.ndenumerate(lengths)}


def test_a_rollout_by_hand():
  # Two requests of 3 and 5 tokens on one instance, prefilled in 2 * 4 * 100 / 1e6 s.
  machines = dataclasses.replace(CLUSTER, data_parallel_size=1)
  result = Simulation(machines, GroupFCFS(), np.array([[3, 5]]), max_tokens=MAX_TOKENS).run()
  # A step is 0.5 + 1 + context / 100; contexts 8, 10, 12, and 7, 8 once the first is done. The
  # second request's prompt is there.
  first = 0.0008 + 3 * 1.5 + 0.30
  last = first + 2 * 1.5 + 0.15
  np.testing.assert_allclose(result.finish_seconds, [first, last])
  assert result.total_seconds == pytest.approx(last)
  assert result.tail_seconds == pytest.approx(0.0)  # The 90th part of two is the last.
  assert (result.num_steps, result.generated_tokens, result.mean_accepted) == (5, 8, 1.0)
  assert result.idle_share == pytest.approx(0.0)
  assert [chunk.request_id for chunk in result.chunks] == ["0/0", "0/1"]
  assert result.chunks[0].is_probe and not result.chunks[1].is_probe


def test_the_last_tenth_is_the_tail():
  result = cluster_lib.Result(
    total_seconds=20.0,
    finish_seconds=np.arange(1.0, 21.0),
    busy_seconds=np.array([10.0, 20.0]),
    generated_tokens=0,
    generated={},
    num_steps=0,
    num_preemptions=0,
    num_chunks=0,
    pulled_bytes=0,
    spilled_bytes=0,
    mean_accepted=1.0,
    chunks=[],
  )
  assert result.tail_seconds == 2.0
  assert result.idle_share == 0.25


def test_divided_policies_never_preempt_and_the_baseline_does():
  lengths = np.random.default_rng(0).integers(1, MAX_TOKENS, (8, 4))
  for name, policy in POLICIES.items():
    result = Simulation(CLUSTER, policy, lengths, max_tokens=MAX_TOKENS).run()
    assert (result.num_preemptions > 0) == (name == "baseline"), name
    assert result.generated_tokens == lengths.sum()
    # No instance idles while there is work that fits: only the end may be uneven.
    assert result.busy_seconds.max() <= result.total_seconds + 1e-9


def test_moves_and_spills_are_counted():
  lengths = np.full((6, 4), 20)
  result = Simulation(CLUSTER, POLICIES["ours"], lengths, max_tokens=MAX_TOKENS).run()
  assert result.spilled_bytes > 0
  assert result.pulled_bytes > 0
  assert result.num_chunks == 4 * lengths.size


def test_drafts_take_fewer_steps_for_the_same_tokens():
  lengths = np.random.default_rng(1).integers(10, MAX_TOKENS, (4, 4))
  plain = Simulation(CLUSTER, POLICIES["divided"], lengths, max_tokens=MAX_TOKENS).run()
  drafted = Simulation(
    CLUSTER,
    POLICIES["divided"],
    lengths,
    max_tokens=MAX_TOKENS,
    speculation=SpeculationConfig(),
  ).run()
  assert drafted.generated == plain.generated
  assert drafted.num_steps < plain.num_steps
  assert 1.3 < drafted.mean_accepted < 2.6
  assert drafted.total_seconds < plain.total_seconds


def test_a_stopped_rollout_is_gone_on_with():
  lengths = np.random.default_rng(2).integers(1, MAX_TOKENS, (6, 3))
  first = Simulation(
    CLUSTER, POLICIES["divided"], lengths, max_tokens=MAX_TOKENS, stop_after_groups=2
  ).run()
  done = np.array([[first.generated[f"{g}/{m}"] for m in range(3)] for g in range(6)])
  assert 2 <= (done == lengths).all(1).sum() < 6
  assert (done <= lengths).all()
  second = Simulation(
    CLUSTER, POLICIES["divided"], lengths, max_tokens=MAX_TOKENS, generated=done
  ).run()
  assert first.generated_tokens + second.generated_tokens == lengths.sum()
  whole = Simulation(CLUSTER, POLICIES["divided"], lengths, max_tokens=MAX_TOKENS).run()
  assert first.total_seconds < whole.total_seconds


@pytest.mark.parametrize("lengths", [np.array([3]), np.array([[0]]), np.array([[25]])])
def test_lengths_out_of_range_are_refused(lengths):
  with pytest.raises(ValueError, match="between 1 and max_tokens=24; clip them"):
    Simulation(CLUSTER, GroupFCFS(), lengths, max_tokens=MAX_TOKENS)


def test_a_cluster_of_nothing_is_refused():
  with pytest.raises(
    ValueError, match="ClusterConfig.data_parallel_size: got 0, expected at least 1"
  ):
    dataclasses.replace(CLUSTER, data_parallel_size=0)
