"""Measures the overhead of a cluster's driver and journal against the same engine alone.

Claim: a cluster of one worker reaches at least 0.95 of the tokens/s of a rollout on one engine
(tiled; 0.85 native), and its driver and journal take at most 1 % of the time of a chunk of 128
tokens (5 % native).
Command: bash launch/local.sh experiments.cluster_price --workdir=runs/cluster_price
  in a minute: --config.turns=2 --config.implementations="('native',)"
Hardware: 2 CPU cores, some minutes. Numbers: docs/results/cluster_cost.md

nano answers word problems without stop tokens, so every chunk has its 128 tokens. Both rollouts
write a journal in --workdir, syncing each chunk to disk before it counts, and take turns. Seconds
are CPU seconds of the process, over all threads. The worker is an engine in this process, so
neither side includes Ray's calls. The driver's share is the time outside the worker: decisions,
records and journal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import json
import pathlib
import tempfile
import time
from typing import Any

from absl import app, flags
import numpy as np
import rich.console

from experiments import cluster_rollout, configuration, speculation_pays
from experiments.cluster_rollout import ClusterRolloutConfig
from seerjax import metrics
from seerjax.cluster.driver import ClusterRollout
from seerjax.cluster.worker import EngineWorker
from seerjax.engine.engine import Engine
from seerjax.rollout import divided, policies
from seerjax.rollout.divided import DividedRollout
from seerjax.rollout.journal import Journal
from seerjax.run import command_line, presets
from seerjax.types import Completion, Request

# Targets: (minimum ratio of tokens/s to the engine alone, maximum driver share of a chunk).
AIMS = {"tiled": (0.95, 0.01), "native": (0.85, 0.05)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterPriceConfig:
  """Workload and number of repetitions.

  Attributes:
    implementations: implementations of the model: "tiled", "native".
    turns: pairs of rollouts; a confidence interval needs two.
    num_groups: number of word problems.
    group_size: completions per problem.
    chunk_tokens: tokens per chunk.
    num_chunks: chunks per completion.
    seed: seed of problems and samples.
  """

  implementations: tuple[str, ...] = ("tiled", "native")
  turns: int = 8
  num_groups: int = 4
  group_size: int = 4
  chunk_tokens: int = 128
  num_chunks: int = 2
  seed: int = 0

  def __post_init__(self):
    if self.turns < 2 or not {*self.implementations} <= {*AIMS}:
      raise ValueError(
        f"ClusterPriceConfig: got turns={self.turns}, implementations={self.implementations},"
        f" expected at least 2 turns and some of {tuple(AIMS)}; an interval needs two turns."
      )

  @property
  def asked(self) -> ClusterRolloutConfig:
    """Returns the same requests as a configuration of `cluster_rollout`."""
    return ClusterRolloutConfig(
      num_groups=self.num_groups,
      group_size=self.group_size,
      max_tokens=self.chunk_tokens * self.num_chunks,
      chunk_tokens=self.chunk_tokens,
      num_pages=2 * self.num_groups * self.group_size * (self.chunk_tokens * self.num_chunks) // 16,
      max_sequences=self.num_groups * self.group_size,
      seed=self.seed,
    )


@contextlib.contextmanager
def new_journal(directory: pathlib.Path) -> Iterator[Journal]:
  """Yields an empty journal in a directory, and removes it afterwards."""
  with (
    tempfile.TemporaryDirectory(dir=directory) as own,
    Journal(pathlib.Path(own) / "journal.jsonl", fingerprint={}, settings={}) as journal,
  ):
    yield journal


def alone(
  engine: Engine, policy: policies.LongestGroupFirst, requests: Sequence[Request],
  directory: pathlib.Path,
) -> tuple[float, list[Completion]]:  # fmt: skip
  """Returns (CPU seconds, completions) of a rollout on an engine."""
  with new_journal(directory) as journal:
    begin = time.process_time()
    rollout = DividedRollout(engine, policy, on_chunk=divided.keep_in(journal))
    return _seconds(begin, list(rollout.run(requests)))


def _seconds(begin: float, answers: list[Completion]) -> tuple[float, list[Completion]]:
  return time.process_time() - begin, answers


def on_worker(
  engine: Engine, policy: policies.LongestGroupFirst, requests: Sequence[Request],
  directory: pathlib.Path,
) -> tuple[float, float, list[Completion]]:  # fmt: skip
  """Returns (CPU seconds, of these inside the worker, completions) of a cluster of one worker."""
  with new_journal(directory) as journal:
    workers = cluster_rollout.Timed([EngineWorker(engine)])
    begin = time.process_time()
    seconds, answers = _seconds(begin, list(ClusterRollout(workers, policy, journal).run(requests)))
  return seconds, workers.seconds, answers


def measure(
  config: ClusterPriceConfig, implementation: str, directory: pathlib.Path, say: Any
) -> dict[str, Any]:
  """Measures one implementation; returns its record.

  Raises:
    AssertionError: if a bit differs.
  """
  main = presets.main_job().numerics
  numerics: Any = dataclasses.replace(main, implementation=implementation)
  engine = cluster_rollout.make_engine(config.asked, numerics)
  policy = policies.LongestGroupFirst(chunk_tokens=config.chunk_tokens)
  requests = [
    dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, stop_token_ids=()))
    for request in cluster_rollout.requests_of(config.asked, engine)
  ]
  ratios, shares, digests = [], [], set()
  for turn in range(config.turns + 1):
    # Alternates which side runs first.
    if turn % 2:
      cluster, within, there = on_worker(engine, policy, requests, directory)
      one, here = alone(engine, policy, requests, directory)
    else:
      one, here = alone(engine, policy, requests, directory)
      cluster, within, there = on_worker(engine, policy, requests, directory)
    digests |= {cluster_rollout.digest_of(here), cluster_rollout.digest_of(there)}
    if turn:  # The first turn compiles.
      ratios.append(one / cluster)
      shares.append(1 - within / cluster)
    say(f"  {implementation}: turn {turn} of {config.turns}")
  assert len(digests) == 1, f"got {len(digests)} digests, expected one: {digests}"
  num_tokens = sum(len(answer.tokens) for answer in here)
  return dict(
    implementation=implementation, ratios=ratios, shares=shares, digest=digests.pop(),
    tokens=num_tokens, seconds=cluster, chunks=len(requests) * config.num_chunks,
  )  # fmt: skip


def table(records: Sequence[dict[str, Any]]) -> str:
  """Returns the records as Markdown."""
  lines = [
    "| implementation | of one engine's tokens/s (95 %) | aim | driver and journal, of all CPU |"
    " aim | ms a chunk |",
    "|---|---|---|---|---|---|",
  ]
  for record in records:
    least, most = AIMS[record["implementation"]]
    middle, low, high = speculation_pays.bound(record["ratios"])
    share = float(np.mean(record["shares"]))
    each = 1e3 * share * record["seconds"] / record["chunks"]
    lines.append(
      f"| {record['implementation']} | {middle:.3f} ({low:.3f} to {high:.3f}) | {least} |"
      f" {share:.2%} | {most:.0%} | {each:.2f} |"
    )
  return "\n".join(lines)


def main(argv: list[str]) -> None:
  args = flags.FLAGS
  with command_line.refusals():
    command_line.check_arguments(argv)
    config = configuration.from_flags(ClusterPriceConfig, args.config)
    directory = pathlib.Path(args.workdir)
    directory.mkdir(parents=True, exist_ok=True)
    say = rich.console.Console(stderr=True).print
    records = [measure(config, name, directory, say) for name in config.implementations]
  metrics.write_summary(directory / "results.json", {"cells": json.loads(json.dumps(records))})
  (directory / "table.md").write_text(table(records) + "\n")
  print(table(records))
  print("equal bits: one engine and a cluster of one worker sampled the same in every turn")


if __name__ == "__main__":
  configuration.define_flags(ClusterPriceConfig(), "runs/cluster_price")
  app.run(main)
