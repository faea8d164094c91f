"""Chunked rollouts: every policy gives equal completions under pressure, and follows its rule."""

from __future__ import annotations

import dataclasses
import functools

import moving_requests
import numpy as np
import pytest
import tiny_model

from seerjax.engine.engine import Engine, EngineConfig
from seerjax.kv.pool import KVPool, KVPoolConfig
from seerjax.rollout.divided import DividedRollout, resumed
from seerjax.rollout.journal import Journal
from seerjax.rollout.policies import (
  ByPrefix,
  ContextAware,
  Divided,
  GroupFCFS,
  LongestGroupFirst,
  Oracle,
)
from seerjax.types import Request, SamplingParams

# Room for two requests at their ends on an instance, for five at their beginnings.
SIZES = EngineConfig(
  page_size=4, num_pages=25, max_num_seqs=5, max_model_len=64, batch_size_buckets=(16,)
)


def asked(num_groups: int = 4, members: int = 4) -> list[Request]:
  """Returns groups with similar member lengths; ends are forced, so that they are known."""
  rng = np.random.default_rng(7)
  return [
    Request(
      request_id=f"{group}/{member}",
      prompt=tuple(range(group, group + 9)),
      sampling=SamplingParams(max_tokens=int(8 * (group + 1) + rng.integers(0, 8))),
      seed=10 * group + member,
      group_id=f"g{group}",
    )
    for group in range(num_groups)
    for member in range(members)
  ]


LENGTHS = {request.request_id: request.sampling.max_tokens for request in asked()}
POLICIES = [
  GroupFCFS(),
  GroupFCFS(reserves=True),
  Divided(chunk_tokens=8, min_pull_tokens=4),
  Divided(chunk_tokens=5, min_pull_tokens=0, routing=ByPrefix(max_spread=1)),
  ContextAware(chunk_tokens=8, min_pull_tokens=4),
  Oracle(chunk_tokens=8, lengths=LENGTHS),
  LongestGroupFirst(chunk_tokens=8, min_pull_tokens=4),
]


def make_engine(data_parallel_size: int, sizes: EngineConfig = SIZES, **others) -> Engine:
  return moving_requests.make_engine((data_parallel_size, 1), sizes, **others)


@functools.cache
def plain() -> dict:
  return {one.request_id: one for one in make_engine(1).generate(asked())}


def run(policy, data_parallel_size=2, **others):
  rollout = DividedRollout(make_engine(data_parallel_size, **others), policy)
  found = {one.request_id: one for one in rollout.run(asked())}
  assert found.keys() == plain().keys()
  assert all(tiny_model.same(found[name], plain()[name], 0) for name in found)
  engine = rollout.engine
  assert [engine.chunks.free_pages(i) for i in range(data_parallel_size)] == [
    24
  ] * data_parallel_size
  assert engine.memory.kv_pool.num_host_pages == 0
  spans = rollout.trace.spans
  assert sum(span.num_tokens for span in spans) == sum(LENGTHS.values())
  assert sum(span.is_last for span in spans) == len(found)
  assert all(0 <= span.begin < span.end <= rollout.trace.num_steps for span in spans)
  assert max(map(max, rollout.trace.used_pages)) <= 24
  return rollout


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_every_policy_says_the_same(policy):
  trace = run(policy).trace
  if policy == GroupFCFS():
    assert trace.preemptions > 0
  else:
    assert trace.preemptions == trace.dropped == 0


@pytest.mark.thorough
def test_every_policy_says_the_same_in_visits_of_several_steps():
  sizes = dataclasses.replace(SIZES, decode_steps_per_call=8)
  for policy in POLICIES:
    rollout = run(policy, sizes=sizes)
    counters = rollout.engine.counters
    # The scheduler counts visits.
    assert counters.visits <= rollout.trace.num_steps < counters.steps


def test_chunks_move_and_spill():
  trace = run(Divided(chunk_tokens=5, min_pull_tokens=0, routing=ByPrefix(max_spread=1))).trace
  assert trace.migrations > 0 and trace.spills > 0
  instances = {}
  for span in trace.spans:
    instances.setdefault(span.request_id, set()).add(span.instance)
  assert any(len(places) == 2 for places in instances.values())


def test_one_instance_and_no_host_memory_still_ends():
  """Without a place to spill to, waiting requests lose their keys, so that not all wait forever."""
  trace = run(Divided(chunk_tokens=4), 1, kv_pool=KVPool(KVPoolConfig(host_pages=0))).trace
  assert trace.spills == 0 and trace.held_back > 0


@pytest.mark.parametrize("policy", [Divided(chunk_tokens=4), GroupFCFS()], ids=["chunks", "whole"])
def test_a_rollout_that_is_stopped_goes_on_elsewhere(policy):
  engine = make_engine(2)
  rollout, found = DividedRollout(engine, policy), {}
  for completion in rollout.run(asked()):
    found[completion.request_id] = completion
    if len(found) == 5:
      break
  finished, partials = rollout.stop()
  assert engine.num_unfinished == 0 and [engine.chunks.free_pages(i) for i in range(2)] == [24, 24]
  found |= {completion.request_id: completion for completion in finished}
  left = [request for request in asked() if request.request_id not in found]
  assert partials and partials.keys() <= {request.request_id for request in left}
  for completion in DividedRollout(make_engine(1), policy, resume_from=partials).run(left):
    found[completion.request_id] = completion
  assert found.keys() == plain().keys()
  assert all(tiny_model.same(found[name], plain()[name], 0) for name in found)


def test_probes_go_first_and_longest_groups_next():
  policy = ContextAware(chunk_tokens=64)
  spans = sorted(run(policy, 1).trace.spans, key=lambda span: span.begin)
  assert [span.is_probe for span in spans[:4]] == [True] * 4


def test_what_a_journal_holds_is_not_said_again():
  [request] = [one for one in asked() if one.request_id == "3/2"]
  engine = make_engine(2)
  engine.add_request(request, chunk_tokens=11)
  while not engine.chunks.poll_paused():
    engine.step()
  partial = engine.progress("3/2")
  engine.abort_request("3/2")
  before = engine.counters.sampled_tokens
  heard = []
  rollout = DividedRollout(
    engine,
    Divided(chunk_tokens=10),
    resume_from={"3/2": partial},
    on_chunk=lambda request, so_far: heard.append((request.request_id, len(so_far.tokens))),
  )
  [found] = rollout.run([request])
  assert tiny_model.same(found, plain()["3/2"], 0)
  assert engine.counters.sampled_tokens - before == LENGTHS["3/2"] - 11
  assert heard == [("3/2", count) for count in range(21, LENGTHS["3/2"], 10)]


def test_tail_is_what_the_last_tenth_takes_alone():
  rollout = run(GroupFCFS(), 1)
  ends = sorted(span.end for span in rollout.trace.spans if span.is_last)
  assert rollout.trace.tail_steps() == ends[-1] - ends[-2]  # One of sixteen.
  assert rollout.trace.tail_steps(1.0) == ends[-1] - ends[0]


def test_a_bad_request_is_refused_before_anything_runs():
  engine = make_engine(1)
  bad = Request(request_id="bad", prompt=())
  with pytest.raises(ValueError, match=r"request 'bad': got an empty prompt"):
    list(DividedRollout(engine, Divided()).run([*asked(), bad]))
  assert engine.counters.steps == 0


def test_a_rollout_goes_on_from_a_journal_and_adds_to_it(tmp_path):
  policy = Divided(chunk_tokens=8)
  requests = [dataclasses.replace(one, request_id=f"5/{one.request_id}") for one in asked(2, 2)]
  expected = {one.request_id: one for one in make_engine(1).generate(requests)}

  def book() -> Journal:
    return Journal(tmp_path / "journal.jsonl", fingerprint={}, settings={})

  with book() as journal:
    run = resumed(make_engine(1), policy, journal, requests).run(requests)
    ended = next(run)  # Then the process dies.
    assert ended.has_bits_of(expected[ended.request_id])
  left = [one for one in requests if one.request_id != ended.request_id]
  with book() as journal:
    partials = [journal.partial_completion(*map(int, one.request_id.split("/"))) for one in left]
    assert any(partials) and all(len(one.tokens) % 8 == 0 for one in partials if one)
    engine = make_engine(1)
    for one in resumed(engine, policy, journal, left).run(left):
      assert one.has_bits_of(expected[one.request_id])
    known = sum(len(one.tokens) for one in partials if one)
    total = sum(len(expected[one.request_id].tokens) for one in left)
    assert engine.counters.sampled_tokens == total - known
