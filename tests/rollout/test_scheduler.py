"""Every policy by hand, and what holds for any schedule of any of them."""

from __future__ import annotations

import dataclasses

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from seerjax.rollout import instances as instances_lib, likeness, policies, queues
from seerjax.rollout.buffer import Buffer, State
from seerjax.rollout.instances import Instances
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


def filled(groups: list[list[int]], *, prompt: int = 4, max_tokens: int = 20) -> Buffer:
  """A buffer with one request for each entry, named group/member; the entry is what it has."""
  buffer = Buffer()
  for group, members in enumerate(groups):
    for member, generated in enumerate(members):
      buffer.add(
        f"{group}/{member}",
        str(group),
        prompt_tokens=prompt,
        max_tokens=max_tokens,
        generated=generated,
      )
  return buffer


def take(planner: Scheduler, instances: Instances) -> list[instances_lib.Decision]:
  """All decisions until None, applied."""
  found = []
  while (decision := planner.next(instances)) is not None:
    planner.buffer.begin_chunk(decision.request_id, decision.instance, decision.max_chunk_tokens)
    instances.admit(decision)
    found.append(decision)
  return found


def end(
  planner: Scheduler, instances: Instances, decision: instances_lib.Decision, length: int = 10**9
) -> None:
  """Ends a chunk where its request has `length` tokens, or else at its end."""
  item = planner.buffer[decision.request_id]
  reached = min(item.chunk_end, length)
  planner.buffer.end_chunk(item.request_id, reached, reached in (length, item.max_tokens))
  instances.release(decision.instance, decision.num_pages)


def names(decisions: list[instances_lib.Decision]) -> list[str]:
  return [decision.request_id for decision in decisions]


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


def order_of(policy: policies.SchedulerConfig, lengths: list[list[int]]) -> list[str]:
  """Which requests began, in their order: one instance, 40 places, all run alongside."""
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
  # As many as run at once began by arrival, and those in the places of the first that finished.
  assert 40 <= common < 60
  rest = [tuple(map(int, name.split("/"))) for name in order[common:]]
  num_probes = sum(member == 0 for _, member in rest)
  assert rest[:num_probes] == [(group, 0) for group in range(28 - num_probes, 28)]
  # Of groups whose first has shown its length when the others are due, the longest are first.
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


def test_kv_is_pulled_where_more_than_the_margin_is_missing():
  for margin, expected in ((9, (0, 10)), (10, (10, 0))):
    instances = Instances.empty(2, page_size=4, num_pages=6, max_running=9)
    planner = Scheduler(
      Divided(chunk_tokens=7, min_pull_tokens=margin), filled([[0]], max_tokens=20)
    )
    (first,) = take(planner, instances)
    end(planner, instances, first)
    instances.see(0, num_running=9)
    (second,) = take(planner, instances)
    # Prompt 4 and 7 tokens, the last of which has no KV yet: 10 positions lie with instance 0.
    assert (second.instance, second.prefill_tokens, second.pull_tokens) == (1, *expected)
    assert second.pull_from == (0 if second.pull_tokens else -1)


def test_a_spread_beyond_the_limit_goes_to_the_least_loaded():
  for spread, expected in ((3, 0), (2, 1)):
    instances = Instances.empty(2, page_size=4, num_pages=100, max_running=9)
    planner = Scheduler(Divided(chunk_tokens=5, routing=ByPrefix(max_spread=spread)), filled([[0]]))
    (first,) = take(planner, instances)
    end(planner, instances, first)
    instances.see(0, num_running=3)
    assert take(planner, instances)[0].instance == expected


def test_by_room_stays_at_home_within_the_imbalance():
  for room, expected in ((93, 0), (92, 1)):
    instances = Instances.empty(2, page_size=4, num_pages=100, max_running=9)
    planner = Scheduler(Divided(chunk_tokens=5, routing=ByRoom()), filled([[0]]))
    (first,) = take(planner, instances)
    end(planner, instances, first)
    instances.see(0, free_pages=room)
    instances.see(1, free_pages=98)
    assert take(planner, instances)[0].instance == expected


def test_by_room_a_sibling_goes_where_the_prompt_is_within_the_imbalance():
  for room, expected in ((93, 0), (92, 1)):
    instances = Instances.empty(2, page_size=4, num_pages=100, max_running=9)
    config = Divided(chunk_tokens=5, routing=ByRoom())
    planner = Scheduler(config, filled([[0, 0]]))
    instances.see(0, max_running=1)
    instances.see(1, max_running=0)
    (first,) = take(planner, instances)
    assert (first.request_id, first.instance) == ("0/0", 0)
    instances.see(0, max_running=9, free_pages=room)
    instances.see(1, max_running=9, free_pages=98)
    assert take(planner, instances)[0].instance == expected


def test_a_request_that_fits_no_instance_is_refused():
  planner = Scheduler(Divided(), filled([[0]]))
  instances = Instances.empty(2, page_size=4, num_pages=5, max_running=1)
  with pytest.raises(
    ValueError, match=r"'0/0' of 4 \+ 20 tokens, which needs 6 pages, expected at"
  ):
    planner.next(instances)


@pytest.mark.parametrize(
  "make, message",
  [
    (lambda: Divided(chunk_tokens=0), "Divided: got chunk_tokens=0"),
    (lambda: ContextAware(min_pull_tokens=-1), "ContextAware: got .* min_pull_tokens=-1"),
    (
      lambda: LongestGroupFirst(min_correlation=-2),
      r"got min_correlation=-2, expected a value in \[-1, 2\]",
    ),
    (lambda: LongestGroupFirst(min_correlation=2.5), "got min_correlation=2.5"),
    (lambda: ByPrefix(max_spread=-1), "got max_spread=-1, expected at least 0"),
    (
      lambda: Instances.empty(1, page_size=0, num_pages=1, max_running=1),
      "page_size=0, num_pages=1, max_running=1, expected at least 1",
    ),
  ],
)
def test_settings_out_of_range_are_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_rank_correlation_by_hand():
  done = np.ones((4, 2), bool)
  rising = np.array([[1, 5], [2, 6], [3, 7], [4, 8]])
  assert likeness.rank_correlation(rising, done) == (1.0, 0.0, 6)
  falling = np.stack([rising[:, 0], rising[::-1, 1]], 1)
  assert likeness.rank_correlation(falling, done) == (-1.0, 0.0, 6)
  # One of the six orders turned: (5 - 1) / 6. Without group 0 or 3 it is 1/3, else 1.
  found = likeness.rank_correlation(np.array([[1, 5], [2, 7], [3, 6], [4, 8]]), done)
  assert found.correlation == pytest.approx(4 / 6)
  assert found.error == pytest.approx(np.sqrt(3 / 4 * 4 * (1 / 3) ** 2))
  # Two that still run at 3 are longer than all that finished below, in an order that none knows.
  bounds = np.array([[1, 1], [2, 2], [3, 3], [3, 3]])
  finished = np.array([[True, True], [True, True], [False, False], [False, False]])
  assert likeness.rank_correlation(bounds, finished) == (1.0, 0.0, 5)
  assert likeness.rank_correlation(bounds, finished & False).num_known == 0
  assert likeness.rank_correlation(np.zeros((0, 2), int), np.zeros((0, 2), bool))[2] == 0


def test_rank_correlation_of_larger_groups_is_the_mean_over_pairs_of_places():
  rng = np.random.default_rng(3)
  lengths, finished = rng.integers(1, 9, (7, 4)), rng.random((7, 4)) < 0.7
  agreed = known = 0
  for i in range(4):
    for j in range(i):
      pair = likeness.rank_correlation(lengths[:, [i, j]], finished[:, [i, j]])
      agreed += round(pair.correlation * pair.num_known)
      known += pair.num_known
  found = likeness.rank_correlation(lengths, finished)
  assert found.num_known == known > 30
  assert found.correlation == pytest.approx(agreed / known)


def test_rank_correlation_tells_alike_from_not_alike_while_the_long_ones_still_run():
  rng = np.random.default_rng(0)
  for rho, low, high in ((0.0, -0.2, 0.2), (0.8, 0.6, 1.0)):
    group, own = rng.standard_normal((32, 1)), rng.standard_normal((32, 4))
    lengths = np.exp(6 + 0.8 * (np.sqrt(rho) * group + np.sqrt(1 - rho) * own)).astype(int)
    level = int(np.median(lengths))
    found = likeness.rank_correlation(np.minimum(lengths, level), lengths <= level)
    assert low < found.correlation < high and 0 < found.error < 0.15


@dataclasses.dataclass(frozen=True)
class Case:
  """Groups of lengths, the cluster, and who ends when."""

  lengths: list[list[int]]
  num_instances: int
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


def play(case: Case, policy: policies.SchedulerConfig) -> list[instances_lib.Decision]:
  """A whole rollout; checks what must hold at every decision, and returns them all."""
  if isinstance(policy, Oracle):
    lengths = {
      f"{g}/{m}": n for g, members in enumerate(case.lengths) for m, n in enumerate(members)
    }
    policy = dataclasses.replace(policy, lengths=lengths)
  buffer = filled([[0] * len(case.lengths[0])])
  instances = Instances.empty(
    case.num_instances, page_size=4, num_pages=case.num_pages, max_running=case.max_running
  )
  planner = Scheduler(policy, buffer)
  later = [
    (f"{g}/{m}", str(g)) for g, members in enumerate(case.lengths) for m in range(len(members)) if g
  ]
  running: list[instances_lib.Decision] = []
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
    # Whatever waits, something runs: no schedule stands still.
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


@hypothesis.given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3)), max_size=40))
@hypothesis.settings(max_examples=100, deadline=None)
def test_what_waits_by_the_rank_of_its_group_is_as_if_all_were_sorted(changes):
  """Requests run and come back, and groups get other ranks."""
  buffer = filled([[0] * 3] * 3)
  items, ranks, waiting = list(buffer), [0, 0, 0], queues.Ranked()
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


@hypothesis.given(
  st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["admit", "release", "see"]), st.integers(0, 5)),
    max_size=30,
  )
)
def test_the_room_of_instances_is_kept_true(changes):
  instances = Instances.empty(3, page_size=4, num_pages=9, max_running=2)
  for instance, kind, pages in changes:
    if kind == "admit":
      instances.admit(instances_lib.Decision("a", instance, 1, pages, False, 0))
    elif kind == "release":
      instances.release(instance, pages)
    else:
      instances.see(instance, free_pages=pages, max_running=pages % 4)
    assert instances.room == [
      free if running < most else 0
      for free, running, most in zip(
        instances.free_pages, instances.num_running, instances.max_running, strict=True
      )
    ]
