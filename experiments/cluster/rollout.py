r"""Compares digests of one rollout on one engine and on clusters, with and without dying workers.

Claim: tokens and both log-probabilities of every completion are bit-identical with one engine,
with 1, 2 and 3 workers, and with workers that die in the middle of their chunks.
Command: bash launch/local.sh experiments.cluster.rollout --workdir=runs/cluster_rollout
  in separate processes, one of them killed (kill -9): --config.processes=2
Hardware: 2 CPU cores, some minutes; `processes` needs the extra seerjax[cluster]
Numbers: docs/results/cluster.md

The second table is about drafts. Siblings of a group run on any worker and draft from the tokens of
siblings on other workers, which arrive with the driver's orders. Tokens per step are per request.

Seconds are CPU seconds of the process. The driver's share is all time outside the workers' engines:
decisions, records and bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import hashlib
import json
import os
import pathlib
import signal
import time
from typing import Any

from absl import flags

from experiments import measure
from experiments.cluster import seer as seer_rollout
from seerjax import metrics
from seerjax.cluster.driver import ClusterRollout
from seerjax.cluster.local_workers import LocalWorkers
from seerjax.cluster.ray_workers import RayWorkers
from seerjax.cluster.records import ChunkOrder, ChunkResult, Event, Gone
from seerjax.cluster.worker import EngineWorker
from seerjax.commands import flags as flags_lib
from seerjax.engine.engine import Engine, EngineConfig
from seerjax.models import loading as model_loading
from seerjax.numerics import NumericsConfig
from seerjax.reports import gantt, page
from seerjax.rollout import policies
from seerjax.rollout.divided import DividedRollout
from seerjax.speculation.suffix_drafter import SuffixDrafter
from seerjax.types import Completion, Request, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterRolloutConfig:
  """Workload and workers.

  Attributes:
    num_groups: number of word problems.
    group_size: completions per problem.
    max_tokens: maximum tokens of a completion.
    chunk_tokens: maximum tokens of a chunk.
    num_pages: KV pages of a worker.
    max_num_seqs: concurrent sequences of a worker.
    processes: workers in separate processes; one is killed. 0 skips this case.
    seed: seed of problems and samples.
  """

  num_groups: int = 6
  group_size: int = 4
  max_tokens: int = 96
  chunk_tokens: int = 16
  num_pages: int = 120
  max_num_seqs: int = 8
  processes: int = 0
  seed: int = 0

  def __post_init__(self):
    if self.processes < 0 or self.num_groups < 1 or self.group_size < 1:
      raise ValueError(
        f"ClusterRolloutConfig: got processes={self.processes}, num_groups={self.num_groups},"
        f" group_size={self.group_size}, expected at least 0, 1 and 1; choose others."
      )


class Mortal(EngineWorker):
  """A worker that dies at its third reply, which is lost."""

  num_calls = 0

  def run(self, orders: Sequence[ChunkOrder], forget: Sequence[Gone] = ()) -> Sequence[ChunkResult]:
    self.num_calls += 1
    results = super().run(orders, forget)
    if self.num_calls == 3:
      raise OSError("ended on purpose, with its third answer")
    return results


class Deaf(EngineWorker):
  """A worker that does not receive the tokens of siblings on other workers."""

  def run(self, orders: Sequence[ChunkOrder], forget: Sequence[Gone] = ()) -> Sequence[ChunkResult]:
    return super().run([dataclasses.replace(order, texts=()) for order in orders], forget)


class Timed(LocalWorkers):
  """Local workers that count their CPU seconds."""

  seconds = 0.0

  def events(self, *, blocks: bool) -> Sequence[Event]:
    begin = time.process_time()
    found = super().events(blocks=blocks)
    self.seconds += time.process_time() - begin
    return found


@dataclasses.dataclass(frozen=True)
class MakeWorker:
  """Creates the worker in a separate process."""

  config: ClusterRolloutConfig

  def __call__(self, number: int) -> EngineWorker:
    return EngineWorker(make_engine(self.config), name=f"process {number}")


def make_engine(config: ClusterRolloutConfig, numerics: NumericsConfig | None = None) -> Engine:
  return Engine(
    model_loading.load_model("nano", numerics),
    config=EngineConfig(
      page_size=16,
      num_pages=config.num_pages,
      max_num_seqs=config.max_num_seqs,
      max_model_len=512,
    ),
  )


def requests_of(config: ClusterRolloutConfig, engine: Engine) -> list[Request]:
  """Returns the requests of all groups."""
  tokenizer = engine.tokenizer
  assert tokenizer is not None
  stops = tuple(tokenizer.eos_ids)
  return seer_rollout.requests(
    config.num_groups,
    config.group_size,
    tokenizer=tokenizer,
    sampling=SamplingParams(max_tokens=config.max_tokens, stop_token_ids=stops),
    seed=config.seed,
  )


def digest_of(completions: Sequence[Completion]) -> str:
  """Returns the digest of tokens and both log-probabilities of all completions."""
  digest = hashlib.sha256()
  for one in sorted(completions, key=lambda one: one.request_id):
    digest.update(repr((one.request_id, one.tokens, one.finish_reason)).encode())
    digest.update(one.behaviour_logprobs.tobytes() + one.raw_logprobs.tobytes())
  return digest.hexdigest()


def run(config: ClusterRolloutConfig, directory: pathlib.Path) -> dict[str, dict[str, Any]]:
  """Runs all configurations; writes results.json, table.md and rollout.html.

  Raises:
    AssertionError: if a bit differs.
  """
  policy = policies.LongestGroupFirst(chunk_tokens=config.chunk_tokens)
  engines = [make_engine(config) for _ in range(3)]
  requests = requests_of(config, engines[0])
  for engine in engines:
    list(DividedRollout(engine, policy).run(requests))  # Compiles.
  results: dict[str, dict[str, Any]] = {}

  def note(name: str, completions: Sequence[Completion], begin: float, **others: Any) -> None:
    seconds = time.process_time() - begin
    results[name] = {
      "digest": digest_of(completions),
      "tokens": sum(len(one.tokens) for one in completions),
      "seconds": seconds,
    } | others
    print(f"{name:40s} {results[name]}", flush=True)

  begin = time.process_time()
  plain = DividedRollout(engines[0], policy)
  note("one engine", list(plain.run(requests)), begin, chunks=len(plain.trace.spans))

  def on(name: str, workers: Timed) -> ClusterRollout:
    begin, rollout = time.process_time(), ClusterRollout(workers, policy)
    completions = list(rollout.run(requests))
    share = 1 - workers.seconds / (time.process_time() - begin)
    note(name, completions, begin, driver_share=share, **counts_of(rollout))
    return rollout

  for count in (1, 2, 3):
    on(f"{count} workers", Timed([EngineWorker(one) for one in engines[:count]]))
  drafted = _drafted(config, engines, requests, note)  # First: the dying worker leaves requests.
  dying = Timed([EngineWorker(engines[0]), Mortal(engines[1]), EngineWorker(engines[2])])
  shown = on("3 workers, one of which dies", dying)
  if config.processes:
    shown = _with_processes(config, policy, requests, note)
  directory.mkdir(parents=True, exist_ok=True)
  record = {"config": dataclasses.asdict(config), "results": results}
  metrics.write_summary(directory / "results.json", json.loads(json.dumps(record)))
  (directory / "table.md").write_text(table(results) + "\n\n" + drafted + "\n")
  chart = f"<h1>A rollout with a lost worker</h1><figure>{gantt.gantt(shown.trace)}</figure>"
  (directory / "rollout.html").write_text(page.html_page("A cluster", [chart]), encoding="utf-8")
  digests = {one["digest"] for one in results.values()}
  assert len(digests) == 1, f"got {len(digests)} digests, expected one: {results}"
  return results


def counts_of(rollout: ClusterRollout) -> dict[str, int]:
  """Returns the number of events by kind."""
  counts = rollout.counts
  return {
    "chunks": counts["ended"], "again": counts["again"], "moved": counts["moved"],
    "lost": counts["lost"], "late": counts["late"],
  }  # fmt: skip


def _drafted(
  config: ClusterRolloutConfig,
  engines: Sequence[Engine],
  requests: Sequence[Request],
  note: Callable[..., None],
) -> str:
  """Runs the rollout with drafts on 1, 2 and 3 workers; returns the table of tokens per step."""
  policy = policies.LongestGroupFirst(chunk_tokens=config.chunk_tokens, routing=policies.ByRoom())
  rows = []
  first = 0.0
  for count, kind in ((1, EngineWorker), (2, EngineWorker), (3, EngineWorker), (2, Deaf)):
    for engine in engines:
      engine.drafter = SuffixDrafter(budget=None)
    before = [dataclasses.replace(engine.counters) for engine in engines[:count]]
    workers = Timed([kind(engine) for engine in engines[:count]])
    begin, rollout = time.process_time(), ClusterRollout(workers, policy)
    completions = list(rollout.run(requests))
    ended = [engine.counters for engine in engines[:count]]
    sampled, accepted = (
      sum(getattr(now, name) - getattr(was, name) for now, was in zip(ended, before))
      for name in ("sampled_tokens", "accepted_tokens")
    )
    per_step = sampled / (sampled - accepted)
    first = first or per_step
    sent = 0 if kind is Deaf else 4 * rollout.counts["sent"]
    name = f"{count} workers that draft" + (", without deltas" if kind is Deaf else "")
    note(name, completions, begin, tokens_a_step=per_step, delta_bytes=sent, **counts_of(rollout))
    rows.append((name, f"{per_step:.3f}", f"{per_step / first:.2f}", sent))
  for engine in engines:
    engine.drafter = None
  return measure.table(("system", "tokens per step", "of one worker's", "bytes of deltas"), rows)


def _with_processes(
  config: ClusterRolloutConfig,
  policy: policies.LongestGroupFirst,
  requests: Sequence[Request],
  note: Callable[..., None],
) -> ClusterRollout:
  """Runs the rollout on Ray actors; kills the first actor after the first completion."""
  workers = RayWorkers(MakeWorker(config), count=config.processes)
  try:
    victim = workers.process_ids()[0]
    rollout, found, begin = ClusterRollout(workers, policy), [], time.process_time()
    for completion in rollout.run(requests):
      if not found:
        os.kill(victim, signal.SIGKILL)
      found.append(completion)
    name = f"{config.processes} processes, one killed"
    note(name, found, begin, **counts_of(rollout))
    return rollout
  finally:
    workers.close()


def table(results: dict[str, dict[str, Any]]) -> str:
  """Returns the table of docs/results/cluster.md."""
  rows = []
  for name, one in results.items():
    share = f"{one['driver_share']:.1%}" if "driver_share" in one else ""
    cells = (one.get(key, "") for key in ("tokens", "chunks", "moved", "lost", "again"))
    rows.append((name, f"`{one['digest'][:16]}`", *cells, share))
  names = (
    "system", "digest", "tokens", "chunks", "moved", "lost workers", "run again", "driver's share",
  )  # fmt: skip
  return measure.table(names, rows)


def main(args: flags.FlagValues) -> None:
  config = flags_lib.from_flags(ClusterRolloutConfig, args.config)
  results = run(config, pathlib.Path(args.workdir))
  print(table(results))
  print("equal bits: every system sampled the same tokens with the same log-probabilities")


if __name__ == "__main__":
  flags_lib.define_flags(ClusterRolloutConfig(), "runs/cluster_rollout")
  measure.command(main)
