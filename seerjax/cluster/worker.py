"""A worker of a cluster: one engine that runs chunks on order.

    run: drop requests, take orders -> engine steps until a chunk ends -> ended chunks

Chunks that have not ended continue in the next `run`. Between two chunks of a request the worker
keeps its pages while there is room, so that the next chunk need not recompute them. If its engine
has a store shared by the workers, it also exports a copy for the worker that may run the next
chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import time
from typing import Protocol, runtime_checkable

import jax
import numpy as np

from seerjax import numerics as numerics_lib
from seerjax.cluster import weights as weights_lib
from seerjax.cluster.records import ChunkOrder, ChunkResult, Gone, WeightsRef, WorkerReport
from seerjax.engine.drafting import Hearer
from seerjax.engine.engine import Engine
from seerjax.kv.manifest import KVManifest
from seerjax.types import Completion, Request


@runtime_checkable
class Worker(Protocol):
  """Runs chunks. The driver treats a worker that raises as lost."""

  def load(self, weights: WeightsRef, policy_version: int) -> str:
    """Drops all requests and switches to published weights.

    Returns:
      The digest of the engine's weights, equal to that of `weights`.
    """
    ...

  def join(self) -> WorkerReport:
    """Drops all requests and returns a description of the worker."""
    ...

  def check(self, requests: Sequence[Request]) -> str:
    """Returns why the worker cannot run one of the requests; "" if it can run all."""
    ...

  def run(self, orders: Sequence[ChunkOrder], forget: Sequence[Gone] = ()) -> Sequence[ChunkResult]:
    """Takes orders, and works until any chunk ends.

    Args:
      orders: chunks of requests that have no running chunk here.
      forget: requests that another worker runs, or that are finished.

    Returns:
      The ended chunks; empty if there is nothing to run.
    """
    ...

  def report(self) -> WorkerReport:
    """Returns a description of the worker, without dropping anything."""
    ...


@dataclasses.dataclass
class _Running:
  order: ChunkOrder
  begin: float


class EngineWorker:
  """A worker that owns an engine exclusively."""

  def __init__(self, engine: Engine, *, name: str = "worker"):
    """Wraps the engine.

    Raises:
      ValueError: if the engine has unfinished requests.
    """
    if engine.num_unfinished:
      raise ValueError(
        f"EngineWorker: got an engine with {engine.num_unfinished} unfinished requests, expected"
        " none (the driver needs all its memory); finish or cancel them."
      )
    self.engine = engine
    self.name = name
    self._running: dict[str, _Running] = {}
    self._held: set[str] = set()  # Requests known to the engine, including running ones.
    # Numbers of drafted and accepted tokens that earlier results reported.
    self._drafts = engine.counters.drafted_tokens, engine.counters.accepted_tokens
    # Digests of the loaded weights and of the engine's; None while there are no valid weights.
    self._digests: tuple[str, str] | None = "", ""

  def load(self, weights: WeightsRef, policy_version: int) -> str:
    """Implements `Worker.load`; frees the previous weights first.

    Raises:
      ConnectionError: if the weights are missing from their location.
      ValueError: if they differ from what was published, or do not fit the model. The worker then
        has no weights, and `join` raises until others are loaded.
    """
    engine = self.engine
    # The engine's weights may have been replaced since.
    is_there = self._digests == (weights.digest, self._engine_digest())
    if is_there and engine.policy_version == policy_version:
      return weights.digest
    self._forget_all()
    self._digests = None
    engine.release_weights()
    store = engine.memory.kv_pool.last_tier
    engine.update_weights(weights_lib.received(weights, engine.mesh, store), policy_version)
    self._digests = weights.digest, self._engine_digest()
    return weights.digest

  def join(self) -> WorkerReport:
    """Implements `Worker.join`.

    Raises:
      ValueError: if loading weights did not complete.
    """
    if self._digests is None:
      raise ValueError(
        f"Worker.join: got {self.name!r} without weights (it did not load the latest), expected"
        " weights; load them again."
      )
    self._forget_all()
    return self.report()

  def check(self, requests: Sequence[Request]) -> str:
    """Implements `Worker.check`."""
    try:
      for request in requests:
        self.engine.check(request)
    except ValueError as error:
      return str(error)
    return ""

  def report(self) -> WorkerReport:
    """Implements `Worker.report`."""
    engine = self.engine
    identity = engine.memory.kv_pool.identity_of()
    counters: dict[str, float] = {}
    for name, value in dataclasses.asdict(engine.counters).items():
      if isinstance(value, dict):
        counters |= {f"{name}.{part}": one for part, one in value.items()}
      else:
        counters[name] = value
    return WorkerReport(
      name=self.name,
      fingerprint=numerics_lib.fingerprint(engine.numerics),
      identity=identity.fingerprint,
      weights=identity.weights,
      policy_version=engine.policy_version,
      key=np.asarray(jax.random.key_data(engine.key)).tobytes().hex(),
      page_size=engine.config.page_size,
      num_pages=engine.config.num_pages - 1,
      max_running=engine.config.max_num_seqs,
      data_parallel_size=engine.data_parallel_size,
      free_pages=tuple(map(engine.chunks.free_pages, range(engine.data_parallel_size))),
      counters=counters,
    )

  def run(self, orders: Sequence[ChunkOrder], forget: Sequence[Gone] = ()) -> Sequence[ChunkResult]:
    """Implements `Worker.run`."""
    for gone in forget:
      self._forget(gone.request_id)
      if gone.is_over:
        self.engine.chunks.forget_kv(gone.request_id)
    for order in orders:
      self._begin(order)
    ended: list[ChunkResult] = []
    while self._running and not ended:
      self.engine.step()
      for completion in self.engine.poll():
        self._held.discard(completion.request_id)
        ended.append(self._result(completion.request_id, completion, None))
      for request_id in self.engine.chunks.poll_paused():
        if request_id in self._running:
          exports = self._running[request_id].order.exports
          kv = self.engine.chunks.export_kv(request_id) if exports else None
          ended.append(self._result(request_id, self.engine.progress(request_id), kv))
    return ended

  def _result(self, request_id: str, completion: Completion, kv: KVManifest | None) -> ChunkResult:
    running = self._running.pop(request_id)
    counters, (drafted, accepted) = self.engine.counters, self._drafts
    self._drafts = counters.drafted_tokens, counters.accepted_tokens
    return ChunkResult(
      chunk=running.order.chunk,
      completion=completion,
      busy_seconds=time.perf_counter() - running.begin,
      kv=kv,
      drafted_tokens=counters.drafted_tokens - drafted,
      accepted_tokens=counters.accepted_tokens - accepted,
    )

  def _begin(self, order: ChunkOrder) -> None:
    engine, chunks, request = self.engine, self.engine.chunks, order.request
    if isinstance(engine.drafter, Hearer):
      for text in order.texts:
        engine.drafter.hear(
          text.request_id, request.group_id, request.prompt, text.start, text.tokens
        )
    name, begin = request.request_id, time.perf_counter()
    if name in self._held and not self._stands_at(name, order.start):
      self._forget(name)  # It has progressed on another worker.
    is_here = name in self._held
    home = chunks.instance_of(name) if is_here else order.instance
    held = chunks.held_pages(name) if is_here and home == order.instance else 0
    positions = len(request.prompt) + order.start + order.max_tokens - 1
    self._make_room(order.instance, chunks.pages_for(positions) - held, keep=name)
    if is_here:
      if home != order.instance:
        chunks.migrate(name, order.instance)
      chunks.resume(name, chunk_tokens=order.max_tokens, instance=order.instance)
    else:
      engine.add_request(
        request,
        resume_from=order.resume_from,
        instance=order.instance,
        chunk_tokens=order.max_tokens,
        kv=order.kv,
      )
      self._held.add(name)
    self._running[name] = _Running(order, begin)

  def _stands_at(self, request_id: str, start: int) -> bool:
    """Returns whether a request is paused here exactly at token `start`."""
    is_paused = request_id in self.engine.chunks.poll_paused()
    return is_paused and len(self.engine.progress(request_id).tokens) == start

  def _make_room(self, instance: int, num_pages: int, keep: str) -> None:
    """Displaces waiting requests' pages from an instance, longest waiting first."""
    chunks = self.engine.chunks
    for request_id in chunks.poll_paused():
      if chunks.free_pages(instance) - chunks.awaited_pages(instance) >= num_pages:
        return
      is_there = chunks.held_pages(request_id) and chunks.instance_of(request_id) == instance
      if is_there and request_id != keep and not chunks.spill([request_id]):
        chunks.preempt(request_id)

  def _engine_digest(self) -> str:
    return self.engine.memory.kv_pool.identity_of().weights

  def _forget_all(self) -> None:
    for request_id in tuple(self._held):
      self._forget(request_id)
    self.engine.poll()

  def _forget(self, request_id: str) -> None:
    self._running.pop(request_id, None)
    if request_id in self._held:
      self._held.discard(request_id)
      self.engine.abort_request(request_id)
