"""Estimates a cluster's bookkeeping cost for Kimi-K2's iteration on 32 to 1,024 devices.

Claim: reports the cost of the scheduler, of KV pages that migrate with requests, of publishing
weights to every engine, and of the journal, each as a share of one iteration of Seer's largest
workload.
Command: bash launch/local.sh experiments.cluster_simulation --workdir=runs/cluster_simulation
Hardware: 1 CPU core, some minutes; no accelerator. Numbers: docs/results/cluster_cost.md

An instance of Kimi-K2 has 32 devices and does not fit on 8. Instances and prompts grow together
(100 prompts of 8 completions per instance). The rollout is simulated with the cost model of
`seer_simulation` and our own scheduler and chunks; an iteration is a rollout plus the training and
transfer time of the paper's baseline. Each cost uses its own resource:

  scheduler  decisions times the CPU seconds of one, measured here for that many instances; one core
  pages      bytes pulled and spilled, over the instances' links
  weights    of one engine over its own links: all engines load at once
  journal    records and bytes, each measured here on a real journal, one disk and one core; chunks
             that end while the driver waits for a disk sync share the next one
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import tempfile
import time
from typing import Any, NamedTuple

from absl import app, flags
import numpy as np
import rich.progress

from experiments import seer_simulation
from seerjax import metrics
from seerjax.rollout import journal as journal_lib
from seerjax.run import command_line
from seerjax.simulate import baselines, cluster, workloads
from seerjax.types import Request, SamplingParams

DEVICES = (32, 64, 128, 256, 512, 1024)


class JournalCost(NamedTuple):
  """Cost of one chunk in a journal.

  Attributes:
    seconds: time to write its record and the event of its end to the operating system.
    wait_seconds: time until they are on disk; chunks that end together share it.
    num_bytes: size of both.
  """

  seconds: float
  wait_seconds: float
  num_bytes: float


def journal_cost(directory: pathlib.Path, num_tokens: int, num_records: int = 64) -> JournalCost:
  """Measures the cost of chunks of `num_tokens` tokens in a journal in `directory`."""
  rng = np.random.default_rng(0)
  request = Request(request_id="0/0/0", prompt=tuple(range(256)), sampling=SamplingParams(), seed=0)
  path = directory / "journal.jsonl"
  with journal_lib.Journal(path, fingerprint={"numerics": "simulated"}, settings={}) as journal:
    before, seconds, waits = path.stat().st_size, 0.0, 0.0
    for member in range(num_records):
      logprobs = -rng.random((2, num_tokens), np.float32)
      chunk = journal_lib.Chunk(
        request=request,
        start=0,
        tokens=tuple(rng.integers(0, 160_000, num_tokens).tolist()),
        behaviour_logprobs=logprobs[0],
        raw_logprobs=logprobs[1],
        policy_version=0,
      )
      event = {"event": "ended", "worker": 0, "request": request.request_id, "chunk": member}
      begin = time.perf_counter()
      with journal.together():
        journal.append_event(event)
        journal.append_chunk(0, 0, member, chunk)
        written = time.perf_counter()
      waits += time.perf_counter() - written
      seconds += written - begin
    num_bytes = path.stat().st_size - before
  return JournalCost(*(one / num_records for one in (seconds, waits, num_bytes)))


def num_waits(ends: np.ndarray, cost: JournalCost) -> int:
  """Returns the number of disk syncs: one for all chunks that ended during the previous one.

  Args:
    ends: f64[n], seconds at which chunks ended.
    cost: cost of one chunk.
  """
  ends = np.sort(ends)
  clock, first, count = 0.0, 0, 0
  while first < len(ends):
    begin = max(clock, float(ends[first]))
    behind = int(np.searchsorted(ends, begin, side="right"))
    clock = begin + (behind - first) * cost.seconds + cost.wait_seconds
    first, count = behind, count + 1
  return count


def grown(num_devices: int, groups_per_instance: int) -> workloads.Workload:
  """Returns Kimi-K2's workload on `num_devices` devices.

  Raises:
    ValueError: if `num_devices` is not a multiple of an instance's devices.
  """
  base = workloads.KIMI_K2
  count, rest = divmod(num_devices, base.devices)
  if rest or not count:
    raise ValueError(
      f"cluster_simulation: got {num_devices} devices, expected a multiple of {base.devices}, an"
      f" instance of {base.name}; choose others."
    )
  return dataclasses.replace(base, num_instances=count, num_groups=count * groups_per_instance)


def measured(
  num_devices: int, groups_per_instance: int, cost: JournalCost, seed: int
) -> dict[str, float]:
  """Returns the table row of one cluster size."""
  workload = grown(num_devices, groups_per_instance)
  policy = seer_simulation.systems(seer_simulation.OUR_CHUNK)["ours"]
  sample, machines = workload.lengths(seed), workload.cluster()
  result = cluster.Simulation(machines, policy, sample, max_tokens=workload.max_tokens).run()
  # Training is the part of the paper's baseline iteration that is not rollout. It stays constant,
  # because prompts and devices grow alike.
  iteration = result.total_seconds + baselines.training_seconds(workloads.KIMI_K2)
  decision = 1e-6 * seer_simulation.microseconds(
    policy, np.minimum(sample, 4096), workload.num_instances
  )
  links = workload.num_instances * machines.costs.peer_bandwidth
  hosts = workload.num_instances * machines.costs.host_bandwidth
  scheduler = result.num_chunks * decision
  pages = result.pulled_bytes / links + result.spilled_bytes / hosts
  weights = workload.weight_bytes / machines.costs.peer_bandwidth
  waits = num_waits(np.asarray([chunk.end_seconds for chunk in result.chunks]), cost)
  journal = result.num_chunks * cost.seconds + waits * cost.wait_seconds
  each = result.num_chunks * (cost.seconds + cost.wait_seconds)
  return {
    "devices": num_devices,
    "instances": workload.num_instances,
    "requests": sample.size,
    "chunks": result.num_chunks,
    "rollout_seconds": result.total_seconds,
    "iteration_seconds": iteration,
    "decision_seconds": decision,
    "moved_terabytes": (result.pulled_bytes + result.spilled_bytes) / 1e12,
    "journal_waits": waits,
    "journal_gigabytes": result.num_chunks * cost.num_bytes / 1e9,
    "scheduler_share": scheduler / iteration,
    "pages_share": pages / iteration,
    "weights_share": weights / iteration,
    "journal_share": journal / iteration,
    "journal_each_share": each / iteration,
  }


def table(rows: list[dict[str, float]]) -> str:
  """Returns a Markdown table with one line per cluster."""
  lines = [
    "| devices | instances | requests | chunks | rollout, s | iteration, s | us a decision |"
    " scheduler | pages moved, TB | pages | weights | journal, GB | waits for it | journal |"
    " journal, each by itself |",
    "|" + "---:|" * 15,
  ]
  for row in rows:
    shares = {name: f"{100 * value:.3f} %" for name, value in row.items() if "share" in name}
    lines.append(
      f"| {row['devices']:,} | {row['instances']} | {row['requests']:,} | {row['chunks']:,} |"
      f" {row['rollout_seconds']:,.0f} | {row['iteration_seconds']:,.0f} |"
      f" {1e6 * row['decision_seconds']:.1f} | {shares['scheduler_share']} |"
      f" {row['moved_terabytes']:.2f} | {shares['pages_share']} | {shares['weights_share']} |"
      f" {row['journal_gigabytes']:.1f} | {row['journal_waits']:,} | {shares['journal_share']} |"
      f" {shares['journal_each_share']} |"
    )
  return "\n".join(lines)


def run(
  devices: tuple[int, ...], groups_per_instance: int, seed: int, directory: pathlib.Path
) -> list[dict[str, Any]]:
  """Measures and simulates all clusters; writes table.md and results.json.

  Raises:
    ValueError: if a number of devices is not a multiple of an instance's devices.
  """
  for count in devices:
    grown(count, groups_per_instance)  # Raises before any work is done.
  directory.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=directory) as place:
    cost = journal_cost(pathlib.Path(place), seer_simulation.OUR_CHUNK)
  rows = [
    measured(count, groups_per_instance, cost, seed)
    for count in rich.progress.track(devices, description="clusters")
  ]
  record = {"journal": cost._asdict(), "chunk_tokens": seer_simulation.OUR_CHUNK, "rows": rows}
  metrics.write_summary(directory / "results.json", json.loads(json.dumps(record, default=float)))
  (directory / "table.md").write_text(table(rows) + "\n")
  print(table(rows))
  print(
    f"a journal's record of {seer_simulation.OUR_CHUNK} tokens: {1e3 * cost.seconds:.2f} ms, and"
    f" {1e3 * cost.wait_seconds:.2f} ms for the disk, {cost.num_bytes:,.0f} bytes"
  )
  return rows


def main(argv: list[str]) -> None:
  args = flags.FLAGS
  with command_line.refusals():
    command_line.check_arguments(argv)
    devices = tuple(int(one) for one in args.devices)
    run(devices, args.groups_per_instance, args.seed, pathlib.Path(args.workdir))


if __name__ == "__main__":
  flags.DEFINE_string("workdir", "runs/cluster_simulation", "Output directory for the table.")
  flags.DEFINE_list(
    "devices", [str(one) for one in DEVICES], "Numbers of devices, one per cluster."
  )
  flags.DEFINE_integer(
    "groups_per_instance", 100, "Number of prompts per instance; 100 in the paper.", lower_bound=1
  )
  flags.DEFINE_integer("seed", 0, "Seed of the response lengths.")
  app.run(main)
