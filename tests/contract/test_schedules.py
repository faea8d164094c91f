"""No schedule changes a bit of what a request says.

Random schedules of arrivals, batch mixes, chunk sizes, page sizes, memory pressure, preemption,
cancelling, prefix hits, further turns, restarts and meshes; every completion is compared, token by
token and log-probability by log-probability, with the same request alone in a plain engine. How
often each event happened is printed, and an event that never happened is a failure.
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest
import tiny_model

from seerjax.engine.engine import EngineConfig
from seerjax.types import Request, SamplingParams

MAX_CONTEXT = 64
# Then a schedule is left to end: a prompt that is always preempted would never be written.
MAX_DISTURBED_STEPS = 60
SIZES = {
  "chunks of 16": EngineConfig(
    page_size=8, num_pages=26, max_sequences=4, max_context=64, row_buckets=(4, 16)
  ),
  "chunks of 1 to 7": EngineConfig(
    page_size=4, num_pages=40, max_sequences=6, max_context=64, row_buckets=(7,)
  ),
  "pages of a split": EngineConfig(
    page_size=16, num_pages=14, max_sequences=3, max_context=64, row_buckets=(3, 9)
  ),
  "small pages": EngineConfig(
    page_size=2, num_pages=90, max_sequences=8, max_context=64, row_buckets=(8, 40)
  ),
  "no reuse": EngineConfig(
    page_size=8,
    num_pages=26,
    max_sequences=5,
    max_context=80,
    row_buckets=(5, 24),
    reuse_prefixes=False,
  ),
}
MESHES = ((1, 1), (2, 1), (1, 2), (2, 2))  # (instances, model shards)

# What a schedule may do to its engine besides running it. Schedule i does action i modulo 6 for
# sure, and each of the others with probability one half.
ACTIONS = ("preempt", "cancel", "pressure", "restart", "turns", "late")
EVENTS = (
  "requests",
  "arrivals between steps",
  "mixed steps",
  "chunked prompts",
  "preempted",
  "cancelled",
  "pages withheld",
  "steps with waiting",
  "restarts",
  "continued requests",
  "further turns",
  "stopped by an id",
  "greedy",
  "filtered",
  "biased",
)
REUSE_EVENTS = ("positions reused", "pages copied")


def random_sampling(rng: np.random.Generator) -> SamplingParams:
  bias = [(int(rng.integers(64)), float(rng.normal() * 3)) for _ in range(rng.integers(0, 4))]
  stops = rng.choice(64, rng.integers(1, 4), replace=False)
  return SamplingParams(
    temperature=float(rng.choice([0.0, 0.6, 1.0, 1.0, 1.7])),
    top_k=int(rng.choice([0, 0, 0, 1, 7])),
    top_p=float(rng.choice([1.0, 1.0, 0.9, 0.5])),
    min_p=float(rng.choice([0.0, 0.0, 0.05, 0.3])),
    logit_bias=tuple(bias) if rng.random() < 0.3 else (),
    max_tokens=int(rng.integers(1, 21)),
    stop_token_ids=tuple(stops.tolist()) if rng.random() < 0.4 else (),
  )


def random_requests(rng: np.random.Generator) -> list[Request]:
  """Groups of one to four; half of the prompts start like another."""
  starts = [rng.integers(0, 64, rng.integers(3, 31)).tolist() for _ in range(2)]
  requests = []
  for group in range(rng.integers(2, 5)):
    prompt = rng.integers(0, 64, rng.integers(1, 13)).tolist()
    if rng.random() < 0.6:
      prompt = starts[rng.integers(2)] + prompt
    sampling, members = random_sampling(rng), int(rng.integers(1, 5))
    for member in range(members):
      requests.append(
        Request(
          request_id=f"{group}-{member}",
          prompt=tuple(prompt),
          sampling=sampling,
          seed=int(rng.integers(2**32)),
          group_id=f"group {group}" if members > 1 else "",
        )
      )
  rng.shuffle(requests)
  return requests


class Schedule:
  """One random schedule over one engine after another; `run` checks every completion."""

  def __init__(self, rng, make, numerics, actions, events):
    self.rng, self.make, self.numerics = rng, make, numerics
    self.actions, self.events = actions, events
    self.engine = make()
    self.todo = random_requests(rng)
    # By request id: the request as first made, tokens said before this engine, tokens said in all.
    self.origin: dict[str, tuple[Request, int]] = {}
    self.said: dict[str, list[int]] = {}
    self.live: dict[str, Request] = {}
    self.withheld: list[tuple[int, list[int]]] = []

  def happens(self, action: str, probability: float) -> bool:
    return action in self.actions and self.rng.random() < probability

  def submit(self, request: Request) -> None:
    self.engine.submit(request)
    self.live[request.request_id] = request
    self.origin.setdefault(request.request_id, (request, 0))
    self.said.setdefault(request.request_id, [])

  def run(self) -> None:
    before = dataclasses.asdict(self.engine.counters)
    step = 0
    while self.todo or self.live:
      self._arrive(step)
      self._release()
      if step < MAX_DISTURBED_STEPS:
        self._disturb(step)
      if not self.live:
        continue
      self._step()
      step += 1
      assert step < 500 + MAX_DISTURBED_STEPS, "the schedule does not end"
    self._count(before)
    assert self.engine.num_unfinished == 0 and not self.engine.poll()

  def _arrive(self, step: int) -> None:
    count = len(self.todo)
    if "late" in self.actions and step:
      count = int(self.rng.integers(0, 3))
    elif "late" in self.actions:
      count = 1
    arrivals, self.todo = self.todo[:count], self.todo[count:]
    for request in arrivals:
      self.submit(request)
      self.events["requests"] += 1
      self.events["arrivals between steps"] += step > 0
      sampling = request.sampling
      self.events["greedy"] += sampling.temperature == 0
      self.events["filtered"] += bool(sampling.top_k) or sampling.top_p < 1 or sampling.min_p > 0
      self.events["biased"] += bool(sampling.logit_bias)
      is_long = len(request.prompt) > self.engine.config.row_buckets[-1]
      self.events["chunked prompts"] += is_long

  def _release(self) -> None:
    for pool, pages in self.withheld:
      for page in pages:
        self.engine._pools[pool].release(page)
    self.withheld = []

  def _disturb(self, step: int) -> None:
    ids = sorted(self.live)
    if ids and self.happens("preempt", 0.3):
      before = self.engine.counters.preemptions
      self.engine.preempt(ids[self.rng.integers(len(ids))])
      self.events["preempted"] += self.engine.counters.preemptions - before
    if ids and self.happens("cancel", 0.1):
      request_id = ids[self.rng.integers(len(ids))]
      self.engine.cancel(request_id)
      # It comes back as it was first asked.
      del self.live[request_id], self.said[request_id]
      request, _ = self.origin.pop(request_id)
      self.todo.append(request)
      self.events["cancelled"] += 1
    if self.happens("pressure", 0.6):
      for pool in range(len(self.engine._pools)):
        count = self.engine._pools[pool].num_available
        if count:
          self.withheld.append((pool, self.engine._pools[pool].take(count)))
          self.events["pages withheld"] += count
    if ids and step and self.happens("restart", 0.08):
      self._restart()

  def _restart(self) -> None:
    """Nothing survives but what was said: each request goes on from there in a new engine."""
    self.events["restarts"] += 1
    self._count({})
    self.engine, self.withheld = self.make(), []
    unfinished, self.live = self.live, {}
    for request_id in sorted(unfinished):
      request, _ = self.origin[request_id]
      said = self.said[request_id]
      self.origin[request_id] = (request, len(said))
      self.events["continued requests"] += bool(said)
      self.submit(
        dataclasses.replace(
          request,
          prompt=request.prompt + tuple(said),
          sampling=dataclasses.replace(
            request.sampling, max_tokens=request.sampling.max_tokens - len(said)
          ),
        )
      )

  def _step(self) -> None:
    prefilling = any(
      sequence.is_prefilling for running in self.engine._running for sequence in running
    )
    updates = self.engine.step()
    self.events["mixed steps"] += prefilling and bool(updates)
    for update in updates:
      self.said[update.request_id].extend(update.tokens)
    for completion in self.engine.poll():
      request_id = completion.request_id
      del self.live[request_id]
      request, first = self.origin[request_id]
      expected = tiny_model.alone(self.numerics, request.prompt, request.sampling, request.seed)
      assert tiny_model.same(completion, expected, first), (
        f"request {request}: got {completion} after {first} tokens, expected {expected}"
      )
      assert tuple(self.said[request_id]) == expected.tokens
      self.events["stopped by an id"] += completion.finish_reason == "stop"
      if self.happens("turns", 0.5):
        self._next_turn(request, expected.tokens)

  def _next_turn(self, request: Request, answer: tuple[int, ...]) -> None:
    question = tuple(self.rng.integers(0, 64, self.rng.integers(1, 5)).tolist())
    prompt = request.prompt + answer + question
    sampling = random_sampling(self.rng)
    if len(prompt) + sampling.max_tokens <= MAX_CONTEXT:
      self.todo.append(
        Request(
          request_id=f"{request.request_id}, then",
          prompt=prompt,
          sampling=sampling,
          seed=request.seed,
        )
      )
      self.events["further turns"] += 1

  def _count(self, before: dict[str, int]) -> None:
    counters = dataclasses.asdict(self.engine.counters)
    for event, field in (
      ("steps with waiting", "waits"),
      ("positions reused", "reused_tokens"),
      ("pages copied", "page_copies"),
      ("steps", "steps"),
      ("tokens", "sampled_tokens"),
    ):
      self.events[event] += counters[field] - before.get(field, 0)


def run_schedules(numerics, size: str, mesh: tuple[int, int], seeds, events) -> None:
  """Runs one schedule a seed; schedules share compiled programs, not pages."""
  num_instances, model_shards = mesh

  def make():
    return tiny_model.make_engine(
      SIZES[size], numerics, num_instances=num_instances, model_shards=model_shards
    )

  for index, seed in enumerate(seeds):
    rng = np.random.default_rng(seed)
    actions = {ACTIONS[index % len(ACTIONS)], *(a for a in ACTIONS if rng.random() < 0.5)}
    try:
      Schedule(rng, make, numerics, actions, events).run()
    except AssertionError as error:
      error.add_note(f"schedule: size {size!r}, mesh {mesh}, seed {seed}, actions {actions}")
      raise
    events["schedules"] += 1
    events[f"instances {num_instances}, model shards {model_shards}"] += 1


NUMERICS = {"f32": tiny_model.NUMERICS, "bf16": tiny_model.BFLOAT16}
QUICK = {
  "f32": (("chunks of 16", (1, 1)), ("chunks of 1 to 7", (2, 1)), ("pages of a split", (1, 2))),
  "bf16": (("chunks of 16", (2, 2)), ("chunks of 1 to 7", (1, 1))),
}


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_no_schedule_changes_a_bit(dtype, seed, tell_events):
  events = collections.Counter()
  for place, (size, mesh) in enumerate(QUICK[dtype]):
    seeds = [(seed, place, index) for index in range(len(ACTIONS))]
    run_schedules(NUMERICS[dtype], size, mesh, seeds, events)
  tell_events(dtype, events, EVENTS + REUSE_EVENTS)


@pytest.mark.long
@pytest.mark.parametrize("block", range(20))
def test_no_schedule_of_five_hundred_changes_a_bit(block, seed, tell_events):
  # Every (dtype, mesh) with at least two of the five sizes; each block is a test of its own, so
  # that an interrupted run goes on where it stopped.
  dtype, mesh = ("f32", "bf16")[block % 2], MESHES[block // 2 % 4]
  size = list(SIZES)[(block + block // 8) % 5]
  events = collections.Counter()
  seeds = [(seed, 1000 + block, index) for index in range(25)]
  run_schedules(NUMERICS[dtype], size, mesh, seeds, events)
  expected = EVENTS + (REUSE_EVENTS if SIZES[size].reuse_prefixes else ())
  tell_events(f"block {block}, {dtype}, {size}, {mesh}", events, expected)
