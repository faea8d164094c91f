"""The order of waiting requests under each policy, by hand."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st
import pytest
from scheduled import end, filled, names, take

from seerjax.rollout import policies
from seerjax.rollout.buffer import State
from seerjax.rollout.instances import Instances
from seerjax.rollout.policies import (
  ContextAware,
  Divided,
  GroupFCFS,
  LongestGroupFirst,
  Oracle,
)
from seerjax.rollout.policies.waiting import Ranked
from seerjax.rollout.scheduler import Scheduler


def test_group_fcfs_deals_groups_out_and_admits_by_present_kv():
  instances = Instances.empty(2, page_size=4, num_pages=6, max_running=3)
  planner = Scheduler(GroupFCFS(), filled([[0, 0], [0, 0], [0, 0]]))
  found = take(planner, instances)
  # Groups 0 and 2 on instance 0, group 1 on instance 1; a page each now, three places.
  assert {d.request_id: d.instance for d in found} == {
    "0/0": 0,
    "0/1": 0,
    "1/0": 1,
    "1/1": 1,
    "2/0": 0,
  }
  assert all((d.max_chunk_tokens, d.num_pages) == (20, 1) for d in found)
  # Preempted, and first in its instance's line again, with its tokens.
  planner.buffer.progress("0/1", 6)
  planner.buffer.lost_kv("0/1")
  instances.release(0, 1)
  assert names(take(planner, instances)) == ["0/1"]
  assert planner.buffer["0/1"].generated == 6
  assert planner.estimate("0") == 20


def test_group_fcfs_that_reserves_waits_for_room():
  # 4 + 20 - 1 positions are 6 pages: one request at a time.
  instances = Instances.empty(1, page_size=4, num_pages=6, max_running=3)
  planner = Scheduler(GroupFCFS(reserves=True), filled([[0, 0]]))
  (first,) = take(planner, instances)
  assert (first.request_id, first.num_pages, first.prefill_tokens) == ("0/0", 6, 4)
  end(planner, instances, first)
  (second,) = take(planner, instances)
  # The prompt's KV is there by now.
  assert (second.request_id, second.prefill_tokens, second.is_probe) == ("0/1", 0, False)


def test_divided_goes_by_arrival_and_reserves_a_chunk():
  # 4 + 5 - 1 positions are 2 pages, 4 + 5 + 5 - 1 are 4.
  instances = Instances.empty(2, page_size=4, num_pages=6, max_running=2)
  planner = Scheduler(Divided(chunk_tokens=5), filled([[0, 0], [0]]))
  found = take(planner, instances)
  # A group's prompt draws its members to one instance, while there is a place.
  assert [(d.request_id, d.instance, d.num_pages) for d in found] == [
    ("0/0", 0, 2),
    ("0/1", 0, 2),
    ("1/0", 1, 2),
  ]
  end(planner, instances, found[0])
  (again,) = take(planner, instances)
  assert (again.request_id, again.instance, again.num_pages, again.prefill_tokens) == (
    "0/0",
    0,
    4,
    0,
  )


def test_the_last_chunk_ends_at_max_tokens():
  instances = Instances.empty(1, page_size=4, num_pages=6, max_running=1)
  planner = Scheduler(Divided(chunk_tokens=8), filled([[17]]))
  (decision,) = take(planner, instances)
  assert (decision.max_chunk_tokens, decision.num_pages, decision.prefill_tokens) == (3, 6, 20)


def test_the_first_of_divided_blocks_those_behind_it():
  instances = Instances.empty(1, page_size=4, num_pages=6, max_running=9)
  planner = Scheduler(Divided(chunk_tokens=5), filled([[14], [0]]))
  instances.see(0, free_pages=3)
  assert planner.next(instances) is None
  instances.see(0, free_pages=6)
  assert names(take(planner, instances)) == ["0/0"]


def test_context_aware_takes_probes_first_then_the_longest_group():
  instances = Instances.empty(1, page_size=4, num_pages=100, max_running=100)
  buffer = filled([[3, 0, 0], [1, 0], [2, 0]])
  for request_id in ("1/1", "2/1"):
    buffer.begin_chunk(request_id, 0, 20)
    buffer.end_chunk(request_id, {"1/1": 9, "2/1": 12}[request_id], True)
  buffer.add("1/2", "1", prompt_tokens=4, max_tokens=20)
  buffer.add("2/2", "2", prompt_tokens=4, max_tokens=20)
  planner = Scheduler(ContextAware(chunk_tokens=5), buffer)
  found = take(planner, instances)
  # Probes by what they have: 1, 2, 3. Group 0 has no finished request, so max_tokens; 2 beats 1.
  assert names(found) == ["1/0", "2/0", "0/0", "0/1", "0/2", "2/2", "1/2"]
  assert [d.is_probe for d in found] == [True] * 3 + [False] * 4
  assert [planner.estimate(group) for group in "012"] == [20, 9, 12]


def test_an_estimate_that_grows_moves_waiting_members_ahead():
  instances = Instances.empty(1, page_size=4, num_pages=100, max_running=2)
  planner = Scheduler(ContextAware(chunk_tokens=20), filled([[0, 0, 0], [0, 0, 0]]))
  probes = take(planner, instances)
  for probe, length in zip(probes, (3, 4)):
    end(planner, instances, probe, length)
  first = take(planner, instances)
  assert names(first) == ["1/1", "1/2"]
  end(planner, instances, first[0], 2)
  (second,) = take(planner, instances)
  assert second.request_id == "0/1"
  end(planner, instances, second, 9)
  assert planner.next(instances) is not None
  assert planner.estimate("0") == 9


def test_oracle_takes_the_most_left_first():
  instances = Instances.empty(1, page_size=4, num_pages=100, max_running=100)
  lengths = {"0/0": 5, "0/1": 12, "1/0": 9}
  planner = Scheduler(Oracle(lengths=lengths), filled([[0, 4], [0]]))
  assert names(take(planner, instances)) == ["1/0", "0/1", "0/0"]
  assert (planner.estimate("0"), planner.estimate("1")) == (12, 9)


ALIKE = [[(11 * group) % 29 + 1] * 4 for group in range(28)]
NOT_ALIKE = [[(7 * group + 12 * member) % 29 + 1 for member in range(4)] for group in range(28)]


def order_of(policy: policies.Policy, lengths: list[list[int]]) -> list[str]:
  """The requests in order of their start: one instance with 40 places."""
  instances = Instances.empty(1, page_size=4, num_pages=1000, max_running=40)
  planner = Scheduler(policy, filled([[0] * len(row) for row in lengths], max_tokens=30))
  order, running = [], []
  while planner.buffer.num_unfinished:
    for decision in take(planner, instances):
      if planner.buffer[decision.request_id].num_chunks == 1:
        order.append(decision.request_id)
      running.append(decision)
    # One token of each at a time.
    for decision in list(running):
      item = planner.buffer[decision.request_id]
      group, member = map(int, decision.request_id.split("/"))
      if item.generated + 1 < min(item.chunk_end, lengths[group][member]):
        planner.buffer.progress(decision.request_id, item.generated + 1)
      else:
        end(planner, instances, decision, lengths[group][member])
        running.remove(decision)
  return order


@pytest.mark.thorough
def test_ours_is_divided_where_lengths_are_not_alike():
  ours, divided = LongestGroupFirst(chunk_tokens=4), Divided(chunk_tokens=4)
  assert order_of(ours, NOT_ALIKE) == order_of(divided, NOT_ALIKE)
  # The twin: with no gate the order is another.
  assert order_of(LongestGroupFirst(chunk_tokens=4, min_correlation=-1.0), NOT_ALIKE) != order_of(
    divided, NOT_ALIKE
  )


def test_ours_probes_all_groups_and_then_takes_the_longest_once_lengths_are_alike():
  order = order_of(LongestGroupFirst(chunk_tokens=4), ALIKE)
  divided = order_of(Divided(chunk_tokens=4), ALIKE)
  common = next(i for i, (one, other) in enumerate(zip(order, divided)) if one != other)
  # The first batch starts by arrival, and so do the requests that replace its first finishers.
  assert 40 <= common < 60
  rest = [tuple(map(int, name.split("/"))) for name in order[common:]]
  num_probes = sum(member == 0 for _, member in rest)
  assert rest[:num_probes] == [(group, 0) for group in range(28 - num_probes, 28)]
  # Groups run longest first if their first member has finished before the others start.
  lengths = [ALIKE[group][0] for group, _ in rest[-20:]]
  assert lengths == sorted(lengths, reverse=True)


def test_ours_counts_a_running_length_as_a_bound():
  instances = Instances.empty(1, page_size=4, num_pages=1000, max_running=6)
  planner = Scheduler(LongestGroupFirst(), filled([[0, 0]], max_tokens=30))
  first, second = take(planner, instances)
  planner.buffer.progress(first.request_id, 4)
  assert planner.next(instances) is None
  assert planner.estimate("0") == 30  # Nothing has finished.
  planner.buffer.end_chunk(second.request_id, 2, True)
  planner.next(instances)
  assert planner.estimate("0") == 4


@pytest.mark.thorough
def test_the_first_that_arrived_goes_first_now_and_then():
  # Alike at once; the probes of groups that keep arriving would always go before 18/3.
  instances = Instances.empty(1, page_size=4, num_pages=1000, max_running=40)
  planner = Scheduler(LongestGroupFirst(chunk_tokens=4), filled([[0] * 4] * 28, max_tokens=30))
  late = 0
  began = []
  while len(began) < 50_000 and "18/3" not in began:
    running = take(planner, instances)
    began += names(running)
    for decision in running:
      group, _, _ = decision.request_id.partition("/")
      end(planner, instances, decision, ALIKE[int(group)][0] if group.isdigit() else 30)
    for _ in range(10):
      planner.buffer.add(f"late{late}/0", f"late{late}", prompt_tokens=4, max_tokens=30)
      late += 1
  assert "18/3" in began


@hypothesis.given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3)), max_size=40))
@hypothesis.settings(max_examples=100, deadline=None)
def test_what_waits_by_the_rank_of_its_group_is_as_if_all_were_sorted(changes):
  """Requests run and return, and groups change rank."""
  buffer = filled([[0] * 3] * 3)
  items, ranks, waiting = list(buffer), [0, 0, 0], Ranked()
  for group in range(3):
    waiting.rank(group, 0)
  for item in items:
    waiting.push(item)
  for index, rank in changes:
    item, group = items[index], items[index].group.index
    if item.state is State.WAITING:
      buffer.begin_chunk(item.request_id, 0, 1)
    else:
      buffer.end_chunk(item.request_id, item.generated + (rank > 0), item.generated + 1 == 20)
    if item.state is State.WAITING:
      waiting.push(item)
    ranks[group] = rank
    waiting.rank(group, rank)
    expected = min(
      (item for item in items if item.state is State.WAITING),
      key=lambda item: (ranks[item.group.index], item.index),
      default=None,
    )
    assert waiting.peek() is expected
