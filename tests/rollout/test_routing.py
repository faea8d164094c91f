"""Placement of chunks on instances, and the pages that are pulled there."""

from __future__ import annotations

from scheduled import end, filled, take

from seerjax.rollout.instances import Instances
from seerjax.rollout.policies import (
  ByPrefix,
  ByRoom,
  Divided,
)
from seerjax.rollout.scheduler import Scheduler


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
    # Prompt 4 and 7 tokens; the last one has no KV yet, so 10 positions are on instance 0.
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
