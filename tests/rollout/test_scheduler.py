"""Invariants of every schedule under every policy."""

from __future__ import annotations

import dataclasses

import hypothesis
from hypothesis import strategies as st
import pytest
from scheduled import end, filled, names, take

from seerjax.rollout import policies
from seerjax.rollout.buffer import State
from seerjax.rollout.instances import Decision, Instances
from seerjax.rollout.policies import (
  ByPrefix,
  ByRoom,
  ContextAware,
  Divided,
  GroupFCFS,
  LongestGroupFirst,
  Oracle,
)
from seerjax.rollout.scheduler import Scheduler

# Small enough that every rule is met within a few requests.
POLICIES = {
  "waits": GroupFCFS(reserves=True),
  "divided": Divided(chunk_tokens=5),
  "divided by room": Divided(chunk_tokens=5, routing=ByRoom()),
  "context": ContextAware(chunk_tokens=5, routing=ByPrefix(max_spread=1)),
  "oracle": Oracle(chunk_tokens=5, min_pull_tokens=2),
  "ours": LongestGroupFirst(chunk_tokens=5),
  "ours, alike": LongestGroupFirst(chunk_tokens=3, min_correlation=-1.0),
}


def test_a_request_that_fits_no_instance_is_refused():
  planner = Scheduler(Divided(), filled([[0]]))
  instances = Instances.empty(2, page_size=4, num_pages=5, max_running=1)
  with pytest.raises(
    ValueError, match=r"'0/0' of 4 \+ 20 tokens, which needs 6 pages, expected at"
  ):
    planner.next(instances)


@dataclasses.dataclass(frozen=True)
class Case:
  """Groups of lengths, the cluster, and the order of ends."""

  lengths: list[list[int]]
  data_parallel_size: int
  num_pages: int
  max_running: int
  order: list[int]


@st.composite
def cases(draw) -> Case:
  lengths = draw(
    st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=5), min_size=1, max_size=6)
  )
  return Case(
    lengths,
    draw(st.integers(1, 4)),
    draw(st.integers(6, 20)),  # 4 + 20 - 1 positions are 6 pages.
    draw(st.integers(1, 5)),
    draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=20)),
  )


def play(case: Case, policy: policies.Policy) -> list[Decision]:
  """Runs a whole rollout, checks the invariants at every decision, and returns the decisions."""
  if isinstance(policy, Oracle):
    lengths = {
      f"{g}/{m}": n for g, members in enumerate(case.lengths) for m, n in enumerate(members)
    }
    policy = dataclasses.replace(policy, lengths=lengths)
  buffer = filled([[0] * len(case.lengths[0])])
  instances = Instances.empty(
    case.data_parallel_size, page_size=4, num_pages=case.num_pages, max_running=case.max_running
  )
  planner = Scheduler(policy, buffer)
  later = [
    (f"{g}/{m}", str(g)) for g, members in enumerate(case.lengths) for m in range(len(members)) if g
  ]
  running: list[Decision] = []
  decisions = []
  ends = 0
  while buffer.num_unfinished or later:
    for decision in take(planner, instances):
      item = buffer[decision.request_id]
      assert item.state is State.RUNNING
      assert decision.request_id not in names(running)
      positions = item.prompt_tokens + item.generated + decision.max_chunk_tokens - 1
      assert decision.num_pages == -(-positions // 4)
      assert 0 <= decision.prefill_tokens <= item.prompt_tokens + item.generated
      running.append(decision)
      decisions.append(decision)
    assert min(instances.free_pages) >= 0
    assert all(n <= most for n, most in zip(instances.num_running, instances.max_running))
    # While requests wait, something runs: no schedule deadlocks.
    assert running or later
    if running:
      decision = running.pop(case.order[ends % len(case.order)] % len(running))
      group, member = map(int, decision.request_id.split("/"))
      end(planner, instances, decision, case.lengths[group][member])
    ends += 1
    if later:  # Requests arrive while others run.
      request_id, group = later.pop(0)
      buffer.add(request_id, group, prompt_tokens=4, max_tokens=20)
  assert instances.free_pages == instances.num_pages
  for item in buffer:
    assert item.state is State.FINISHED
    assert item.generated == case.lengths[item.group.index][item.member]
    assert item.num_lost == 0
  return decisions


@pytest.mark.parametrize("name", POLICIES)
@hypothesis.given(case=cases())
@hypothesis.settings(max_examples=25, deadline=None)
def test_any_schedule_fits_loses_nothing_and_can_be_had_again(name, case):
  assert play(case, POLICIES[name]) == play(case, POLICIES[name])
