"""Drawn rollouts on several workers of this process, which may die, halt, join or be rejected.

A seed draws a case: workers of several sizes, a policy, and the faults with their times.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
import functools
import pathlib

import jax
import numpy as np
import tiny_model

from seerjax.cluster.driver import ClusterRollout
from seerjax.cluster.local_workers import LocalWorkers
from seerjax.cluster.records import Answered, ChunkOrder, ChunkResult, Event, Gone, Lost
from seerjax.cluster.worker import EngineWorker
from seerjax.engine.engine import Engine, EngineConfig
from seerjax.kv.disk_store import DiskStore
from seerjax.kv.pool import KVPool, KVPoolConfig
from seerjax.models.loading import Model
from seerjax.numerics import NumericsConfig
from seerjax.rollout.policies import ByPrefix, ByRoom, ContextAware, Divided, LongestGroupFirst
from seerjax.types import Completion, Request, SamplingParams

# (pages, sequences) of an engine; each pair is a program.
SIZES = ((40, 4), (15, 4))


class Watched(Engine):
  """An engine that calls `before_step`, which may raise, before each step."""

  before_step: Callable[[], None] = staticmethod(lambda: None)

  def step(self):
    self.before_step()
    return super().step()


def make_engine(
  numerics: NumericsConfig = tiny_model.NUMERICS,
  *,
  num_pages: int = 40,
  max_num_seqs: int = 4,
  weights_seed: int = 0,
  **others,
) -> Watched:
  """Returns an engine that uses the one program of its numerics."""
  return Watched(
    Model(tiny_model.CONFIG, tiny_model.params(numerics, weights_seed), numerics),
    config=EngineConfig(
      page_size=4,
      num_pages=num_pages,
      max_num_seqs=max_num_seqs,
      max_model_len=64,
      batch_size_buckets=(16,),
    ),
    key=jax.random.key(5),
    runner=tiny_model.runner(numerics),
    **others,
  )


def asked(seed: int = 7, num_groups: int = 3, members: int = 3) -> list[Request]:
  """Returns groups of requests with one prompt each and members of similar lengths."""
  rng = np.random.default_rng(seed)
  found = []
  for group in range(num_groups):
    prompt = tuple(rng.integers(0, 64, int(rng.integers(3, 12))).tolist())
    for member in range(members):
      found.append(
        Request(
          request_id=f"0/{group}/{member}",
          prompt=prompt,
          sampling=SamplingParams(max_tokens=int(6 * (group + 1) + rng.integers(0, 8))),
          seed=int(rng.integers(2**31)),
          group_id=f"0/{group}",
        )
      )
  return found


@functools.cache
def alone(numerics: NumericsConfig, seed: int) -> dict[str, Completion]:
  """Returns the completions of `asked` from a single engine."""
  return {one.request_id: one for one in make_engine(numerics).generate(asked(seed))}


def assert_alone(found: Mapping[str, Completion], seed: int = 7) -> None:
  """Asserts that native completions are those of `asked` from a single engine."""
  wanted = alone(tiny_model.NATIVE, seed)
  assert found.keys() == wanted.keys()
  assert all(found[name].has_bits_of(wanted[name]) for name in found)


def on_store(directory: pathlib.Path, host_pages: int = 64) -> KVPool:
  """Returns the pool of one of several engines that share a store."""
  return KVPool(KVPoolConfig(host_pages=host_pages), DiskStore(directory, max_bytes=10**8))


class Mortal(EngineWorker):
  """A worker that dies in one call of `run`: before, during or after the steps of its orders.

  Attributes:
    dies_at: (preceding calls of `run`, steps before the death): -1 steps is before the orders, a
      large number is after all steps, before the response. None never dies.
  """

  dies_at: tuple[int, int] | None = None
  num_calls = 0

  def run(self, orders: Sequence[ChunkOrder], forget: Sequence[Gone] = ()) -> Sequence[ChunkResult]:
    self.num_calls += 1
    if self.dies_at is None or self.num_calls <= self.dies_at[0]:
      return super().run(orders, forget)
    left = self.dies_at[1]
    if left < 0:
      raise OSError("killed before its orders")

    def count() -> None:
      nonlocal left
      left -= 1
      if left < 0:
        raise OSError("killed in a chunk")

    assert isinstance(self.engine, Watched)
    self.engine.before_step = count
    super().run(orders, forget)
    raise OSError("killed with its answer")


class Halting(LocalWorkers):
  """Workers that may halt: they count as lost and respond after the others have continued.

  Attributes:
    halts: by worker, (index of its late response, number of events that it is late by).
  """

  def __init__(self, workers, **others):
    super().__init__(workers, **others)
    self.halts: dict[int, tuple[int, int]] = {}
    self._held: list[tuple[int, Answered]] = []
    self._num_answers: collections.Counter[int] = collections.Counter()

  def begin(self) -> None:
    super().begin()
    self._held.clear()

  def events(self, *, blocks: bool) -> Sequence[Event]:
    is_idle = blocks and not self._calls  # No further event can arrive.
    due = [answer for at, answer in self._held if at <= 0 or is_idle]
    self._held = [(at - 1, answer) for at, answer in self._held if answer not in due]
    found: list[Event] = list(due)
    for event in super().events(blocks=blocks and not due):
      if isinstance(event, Answered):
        count = self._num_answers[event.worker]
        self._num_answers[event.worker] += 1
        halt = self.halts.get(event.worker)
        if halt is not None and halt[0] == count:
          self._held.append((halt[1], event))
          event = Lost(worker=event.worker, reason="halted")
      found.append(event)
    return found


def draw_policy(rng: np.random.Generator) -> Divided:
  chunk = int(rng.integers(2, 10))
  routing = ByRoom() if rng.random() < 0.5 else ByPrefix(max_spread=int(rng.integers(1, 4)))
  kind = (Divided, ContextAware, LongestGroupFirst)[int(rng.integers(3))]
  return kind(chunk_tokens=chunk, min_pull_tokens=int(rng.integers(0, 8)), routing=routing)


class Case:
  """One drawn rollout.

  Attributes:
    events: counts of what happened, by kind.
  """

  worker_kind: type[Mortal] = Mortal
  workers_kind: type[Halting] = Halting
  rollout_kind: type[ClusterRollout] = ClusterRollout

  def __init__(
    self,
    seed: int,
    numerics: NumericsConfig,
    *,
    num_workers: int | None = None,
    directory: pathlib.Path | None = None,
  ):
    self.rng = np.random.default_rng((seed, 31))
    self.seed, self.numerics = seed, numerics
    self.directory = None if directory is None else directory / str(seed)  # The store's folder.
    self.engines: list[Engine] = []
    drawn = int(self.rng.integers(1, 4))
    self.num_workers = drawn if num_workers is None else num_workers
    self.events: collections.Counter[str] = collections.Counter()

  def make_worker(self, number: int, *, may_die: bool = True) -> Mortal:
    rng = self.rng
    num_pages, max_num_seqs = SIZES[int(rng.integers(len(SIZES)))]
    pool = None if self.directory is None else on_store(self.directory)
    engine = make_engine(
      self.numerics, num_pages=num_pages, max_num_seqs=max_num_seqs, kv_pool=pool
    )
    self.engines.append(engine)
    worker = self.worker_kind(engine, name=f"w{number}")
    if may_die and rng.random() < 0.6:
      steps = int(rng.choice([-1, 0, int(rng.integers(1, 8)), 10**6]))
      worker.dies_at = int(rng.integers(0, 6)), steps
      kind = {-1: "before its orders", 10**6: "with its answer"}.get(steps, "in a chunk")
      self.events[f"to die {kind}"] += 1
    return worker

  def run(self, journal=None) -> dict[str, Completion]:
    """Runs the rollout; workers join during it, so that there is always a live one.

    Raises:
      AssertionError: if a bit or a count is wrong.
    """
    rng, seed = self.rng, self.seed
    workers = self.workers_kind(
      [self.make_worker(number) for number in range(self.num_workers)],
      choose=lambda waiting: waiting[int(rng.integers(len(waiting)))],
    )
    for number in range(self.num_workers):
      if rng.random() < 0.4:
        workers.halts[number] = int(rng.integers(0, 4)), int(rng.integers(0, 4))
        self.events["to halt"] += 1
    rollout = self.rollout_kind(workers, draw_policy(rng), journal)
    # Maps the number of rollout events so far to what joins then.
    arrivals = {int(rng.integers(0, 12)): "worker"}
    if rng.random() < 0.5:
      arrivals[int(rng.integers(0, 12))] = "stranger"
    take = rollout._take

    def taken(event: Event) -> None:
      take(event)
      count = sum(isinstance(seen, str) for seen in self.seen)
      self.seen.append(type(event).__name__)
      if arrivals.get(count) == "stranger":
        workers.add(self.stranger())
      is_last = not rollout._members and not workers._calls
      if arrivals.get(count) == "worker" or (is_last and isinstance(event, Lost)):
        workers.add(self.make_worker(workers._num_ever, may_die=False))

    self.seen: list[str] = []
    rollout._take = taken  # type: ignore[method-assign]
    requests = asked(seed)
    found: dict[str, Completion] = {}
    for completion in rollout.run(requests):
      assert completion.request_id not in found, "a completion came twice"
      found[completion.request_id] = completion
    self.rollout = rollout
    wanted = alone(self.numerics, seed)
    assert found.keys() == wanted.keys()
    for name, completion in found.items():
      assert completion.has_bits_of(wanted[name]), (seed, name, completion, wanted[name])
      assert completion.finish_reason == wanted[name].finish_reason
    spans = rollout.trace.spans
    assert sum(span.num_tokens for span in spans) == sum(len(one.tokens) for one in found.values())
    assert sum(span.is_last for span in spans) == len(found)
    assert all(span.begin < span.end for span in spans)
    self.events += rollout.counts
    self.events[f"of {self.num_workers} workers"] += 1
    for engine in self.engines:
      self.events += collections.Counter(
        exported=engine.counters.imports.exported, adopted=engine.counters.imports.adopted
      )
    return found

  def stranger(self) -> EngineWorker:
    """Returns a worker that must be rejected: its weights differ from the rollout's."""
    self.events["strangers"] += 1
    return EngineWorker(make_engine(self.numerics, weights_seed=1), name="stranger")
