"""No part of the rollout system changes a bit: policies, chunks, instances, tiers, drafts, kills.

Hypothesis draws rollouts: groups of requests, a scheduling policy and its chunk size, 1, 2 or 4
instances with little memory, tiers with more or less room, drafters from good to hostile, and the
visits at which everything except a journal is killed. Every completion is compared with the same
request alone in a plain engine. Event counts are printed, and an event with count 0 is a failure.
"""

from __future__ import annotations

import collections
import pathlib
import tempfile
from typing import NamedTuple

from drawn_requests import SAMPLING, alone, make_engine, tokens
from guessing import Guesser
import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
from seen_inputs import SeesInputs
import tiny_model

from seerjax.engine.engine import EngineConfig
from seerjax.kv.disk_store import DiskStore
from seerjax.kv.pool import KVPool, KVPoolConfig
from seerjax.rollout import policies
from seerjax.rollout.divided import DividedRollout
from seerjax.types import Completion, Request, SamplingParams

# The longest request nearly fills an instance.
SIZES = EngineConfig(
  page_size=4, num_pages=15, max_num_seqs=6, max_model_len=64, batch_size_buckets=(16,)
)
MAX_VISITS = 2000

EVENTS = (
  "requests",
  "chunks",
  "spilled",
  "came from the host",
  "came from the store",
  "migrated",
  "pulled",
  "preempted",
  "drafted tokens",
  "accepted tokens",
  "rejected tokens",
  "side paths",
  "killed",
  "resumed in the middle",
)


class Case(NamedTuple):
  """One rollout: everything that is drawn.

  `prompts` are by group; `members` are (group, sampling fields, seed); `kills` are visits after a
  start; `guesses` is (seed, share of right tokens), None drafts nothing; without `max_spread` free
  room decides where a chunk runs.
  """

  prompts: tuple[tuple[int, ...], ...]
  members: tuple[tuple[int, dict, int], ...]
  policy: str
  chunk_tokens: int
  min_pull_tokens: int
  max_spread: int | None
  host_pages: int
  has_store: bool
  guesses: tuple[int, float] | None
  kills: tuple[int, ...]


# Hypothesis takes the first as the simplest.
POLICIES = ("divided", "context", "ours", "oracle", "fcfs", "waiting fcfs")
CASES = st.integers(2, 3).flatmap(
  lambda count: st.builds(
    Case,
    prompts=st.tuples(*[tokens(1, 30)] * count),
    members=st.lists(
      st.tuples(st.integers(0, count - 1), SAMPLING, st.integers(0, 2**32 - 1)),
      min_size=8,
      max_size=16,
    ).map(tuple),
    policy=st.sampled_from(POLICIES),
    chunk_tokens=st.sampled_from([1, 2, 3, 5, 8, 100]),
    min_pull_tokens=st.sampled_from([0, 0, 8, 512]),
    max_spread=st.sampled_from([0, 1, 32, None]),
    host_pages=st.sampled_from([256, 16, 0]),
    has_store=st.booleans(),
    guesses=st.none() | st.tuples(st.integers(0, 2**32 - 1), st.sampled_from([0.9, 0.6, 0.0])),
    kills=st.lists(st.integers(1, 12), max_size=2).map(tuple),
  )
)


# Always run: killed twice, between chunks of two tokens.
KILLED = Case(
  prompts=((1, 2, 3, 4, 5, 6), (7, 8)),
  members=tuple((index % 2, dict(max_tokens=12), index) for index in range(8)),
  policy="divided",
  chunk_tokens=2,
  min_pull_tokens=0,
  max_spread=0,
  host_pages=256,
  has_store=False,
  guesses=(1, 0.6),
  kills=(5, 6),
)


# Always run, with far more requests than an instance holds: one preempts; one spills waiting
# requests to the host and further (by group estimates another request follows a chunk, by arrival
# the same one); in one an instance that is free early starts a prompt that another has computed.
CROWDED = KILLED._replace(
  prompts=(tuple(range(1, 25)), tuple(range(24, 0, -1))),
  members=tuple((index % 2, dict(max_tokens=24), index) for index in range(16)),
  policy="fcfs",
  max_spread=32,
  host_pages=16,
  has_store=True,
  guesses=None,
  kills=(),
)
SPILLED = CROWDED._replace(policy="context")
PULLED = CROWDED._replace(
  members=tuple(
    (group, dict(max_tokens=count), index)
    for index, (group, count) in enumerate([(0, 24), *[(1, 4)] * 3, *[(0, 24)] * 3])
  ),
  policy="divided",
  chunk_tokens=100,
  has_store=False,
)


class Killed(Exception):
  """Raised when the process is killed."""


class Mortal(SeesInputs):
  """An engine that dies after a number of visits; 0 never dies."""

  visits_to_live = 0

  def step(self):
    assert self.counters.visits < MAX_VISITS, "the rollout does not end"
    if self.visits_to_live and self.counters.visits == self.visits_to_live:
      raise Killed
    return super().step()


class OtherNoise(Mortal):
  """Twin: a request's noise depends on the instance that samples it."""

  def _inputs(self, work):
    inputs = super()._inputs(work)
    own = np.arange(len(inputs.seeds), dtype=np.uint32)
    return inputs._replace(seeds=inputs.seeds + own[:, None])


def policy_of(case: Case, requests: dict[str, Request], answers: dict[str, tuple[int, ...]]):
  parts = dict(
    chunk_tokens=case.chunk_tokens,
    min_pull_tokens=case.min_pull_tokens,
    routing=(
      policies.ByRoom()
      if case.max_spread is None
      else policies.ByPrefix(max_spread=case.max_spread)
    ),
  )
  if case.policy == "fcfs":
    return policies.GroupFCFS()
  if case.policy == "waiting fcfs":
    return policies.GroupFCFS(reserves=True)
  if case.policy == "oracle":
    return policies.Oracle(**parts, lengths={name: len(answers[name]) for name in requests})
  kinds = dict(
    divided=policies.Divided, context=policies.ContextAware, ours=policies.LongestGroupFirst
  )
  return kinds[case.policy](**parts)


def run_case(
  case: Case,
  numerics,
  data_parallel_size: int,
  kind: type[Mortal],
  events: collections.Counter[str],
) -> None:
  """Runs one rollout to its end, through all kills; checks every completion."""
  requests, answers = {}, {}
  for index, (group, fields, seed) in enumerate(case.members):
    name = f"{group}/{index}"
    request = Request(
      request_id=name,
      prompt=case.prompts[group],
      sampling=SamplingParams(**fields),
      seed=seed,
      group_id=f"group {group}",
    )
    requests[name] = request
    answers[name] = alone(numerics, request.prompt, request.sampling, seed).tokens
  guesser = None
  if case.guesses is not None:
    guesser = Guesser(answers, case.guesses[0], right=case.guesses[1])
  policy = policy_of(case, requests, answers)
  finished: dict[str, Completion] = {}
  journal: dict[str, Completion] = {}
  events["requests"] += len(requests)
  with tempfile.TemporaryDirectory() as folder:
    for visits_to_live in (*case.kills, 0):
      store = DiskStore(pathlib.Path(folder) / "kv", max_bytes=10**8) if case.has_store else None
      pool = KVPool(KVPoolConfig(host_pages=case.host_pages), store)
      mesh = (data_parallel_size, 1)
      engine = make_engine(SIZES, numerics, mesh, kind, drafter=guesser, kv_pool=pool)
      engine.visits_to_live = visits_to_live
      rollout = DividedRollout(
        engine,
        policy,
        resume_from=dict(journal),
        on_chunk=lambda request, partial: journal.update({request.request_id: partial}),
      )
      left = [request for name, request in requests.items() if name not in finished]
      events["resumed in the middle"] += sum(request.request_id in journal for request in left)
      try:
        for completion in rollout.run(left):
          finished[completion.request_id] = completion
          journal.pop(completion.request_id, None)
      except Killed:
        events["killed"] += 1
      else:
        assert not engine.num_unfinished and not pool.num_host_pages
        for instance in range(data_parallel_size):
          assert engine.chunks.free_pages(instance) == SIZES.num_pages - 1
      count_events(rollout, pool, events)
      if len(finished) == len(requests):
        break
  for name, request in requests.items():
    expected = alone(numerics, request.prompt, request.sampling, request.seed)
    assert tiny_model.same(finished[name], expected), (
      f"request {request}: got {finished[name]}, expected {expected}"
    )
    assert finished[name].text == expected.text
  events["rollouts"] += 1
  events[f"policy {case.policy}"] += 1


def count_events(rollout: DividedRollout, pool: KVPool, events: collections.Counter[str]) -> None:
  engine, trace = rollout.engine, rollout.trace
  events["chunks"] += len(trace.spans)
  events["spilled"] += trace.spills
  events["migrated"] += trace.migrations
  events["pulled"] += trace.pulls
  events["preempted"] += trace.preemptions
  events["dropped"] += trace.dropped
  events["held back"] += trace.held_back
  events["came from the host"] += pool.host.requests_out
  events["came from the store"] += pool.store.requests_out
  events["drafted tokens"] += engine.counters.drafted_tokens
  events["accepted tokens"] += engine.counters.accepted_tokens
  events["rejected tokens"] += engine.counters.drafted_tokens - engine.counters.accepted_tokens
  events["side paths"] += engine.counters.side_paths


def run_cases(
  numerics,
  data_parallel_size: int,
  *,
  seed: int,
  settings: hypothesis.settings,
  events: collections.Counter[str],
  kind: type[Mortal] = Mortal,
) -> None:
  """Runs as many rollouts as the settings specify; they share compiled programs."""

  @hypothesis.seed(seed)
  @settings
  @hypothesis.given(case=CASES)
  @hypothesis.example(case=KILLED)
  @hypothesis.example(case=CROWDED)
  @hypothesis.example(case=SPILLED)
  @hypothesis.example(case=PULLED)
  def check(case: Case) -> None:
    try:
      run_case(case, numerics, data_parallel_size, kind, events)
    except AssertionError as error:
      error.add_note(f"rollout: {data_parallel_size} instances, seed {seed}")
      raise

  check()


NUMERICS = tiny_model.BACKENDS


# Everyday runs use a CPU's default; CI also uses the portable path.
@pytest.mark.parametrize("dtype", [pytest.param("f32", marks=pytest.mark.thorough), "native f32"])
def test_no_rollout_changes_a_bit(dtype, seed, tell_events):
  events = collections.Counter()
  run_cases(
    NUMERICS[dtype],
    2,
    seed=seed,
    settings=hypothesis.settings(max_examples=14),
    events=events,
  )
  tell_events(f"rollouts, {dtype}", events, EVENTS)


@pytest.mark.thorough
def test_noise_that_follows_the_instance_is_found_out(seed):
  settings = hypothesis.settings(
    max_examples=6, phases=[hypothesis.Phase.generate], database=None, report_multiple_bugs=False
  )
  with pytest.raises(AssertionError, match="got Completion"):
    run_cases(
      NUMERICS["f32"],
      2,
      seed=seed,
      settings=settings,
      events=collections.Counter(),
      kind=OtherNoise,
    )


@pytest.mark.long
@pytest.mark.parametrize("backend", ["", "native "], ids=["tiled", "native"])
@pytest.mark.parametrize("block", range(12))
def test_no_rollout_of_three_hundred_changes_a_bit(block, backend, seed, tell_events):
  dtype, data_parallel_size = backend + ("f32", "bf16")[block % 2], (1, 2, 4)[block // 2 % 3]
  events = collections.Counter()
  run_cases(
    NUMERICS[dtype],
    data_parallel_size,
    seed=100 * seed + 10 + block,
    settings=hypothesis.settings(max_examples=26),
    events=events,
  )
  assert events["rollouts"] >= 26
  alone_events = {"migrated", "pulled"} if data_parallel_size == 1 else set()
  name = f"block {block}, {dtype}, {data_parallel_size} instance(s)"
  tell_events(name, events, [event for event in EVENTS if event not in alone_events])
