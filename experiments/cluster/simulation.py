r"""Simulates the cluster of the Seer paper with the real scheduler, and compares its tables.

Claim: the simulator, with free parameters fitted only to the published baseline, shows how much of
the published gains follows from scheduling and drafting as described, and where it does not.
`LongestGroupFirst` takes at most 1 % longer than plain divided rollout on randomly drawn workloads,
in the mean of their samples, and less in the mean of each kind of workload.
Command: bash launch/local.sh experiments.cluster.simulation --workdir=runs/seer_simulation
  some parts:           --parts=paper      (paper, chunks, sweep, drawn, rivals, decisions)
  a public trace:       --trace=lengths.jsonl    (JSON lines, in either format of PolyTrace)
  fit the baseline:     --parts=fit
Hardware: 1 CPU core, about 15 minutes; no accelerator. Numbers: docs/results/seer_simulation.md
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import json
import pathlib
import random
import time
from typing import Any

from absl import flags
import numpy as np

from experiments import measure
from seerjax.rollout import (
  buffer as buffer_lib,
  instances as instances_lib,
  policies,
  scheduler,
)
from seerjax.simulate import (
  baselines,
  calibration,
  cluster,
  drawn as drawn_lib,
  lengths as lengths_lib,
  workloads,
)
from seerjax.simulate.speculation import SpeculationConfig

PARTS = ("paper", "chunks", "sweep", "drawn", "rivals", "decisions")
PAPER_CHUNK = 8192  # From two notes on the paper; the paper does not state it.
OUR_CHUNK = policies.LongestGroupFirst().chunk_tokens
RHOS = (0.05, 0.3, 0.7, 0.9)
BY_ROOM = policies.ByRoom()
# Some seeds below 1000 were used when `LongestGroupFirst` was designed.
DRAWN = range(1000, 1200)
LIKENESS = ((0.0, 0.3), (0.3, 0.6), (0.6, 1.0))  # Ranges of rho in the table of drawn workloads.

Report = Callable[[str], None]
Policy = policies.Policy


def systems(chunk: int) -> dict[str, Policy]:
  """Returns every policy by its label in the tables."""
  return {
    "baseline": policies.GroupFCFS(),
    "baseline, waits": policies.GroupFCFS(reserves=True),
    "divided": policies.Divided(chunk_tokens=chunk),
    "+ context": policies.ContextAware(chunk_tokens=chunk),
    "oracle": policies.Oracle(chunk_tokens=chunk),
    "ours": policies.LongestGroupFirst(chunk_tokens=chunk),
    # The order of `oracle` with our routing: the bound to which ours is compared.
    "oracle, by room": policies.Oracle(chunk_tokens=chunk, routing=BY_ROOM),
  }


def simulate(
  workload: workloads.Workload,
  policy: Policy,
  samples: Sequence[np.ndarray],
  *,
  machines: cluster.ClusterConfig | None = None,
  speculation: SpeculationConfig | None = None,
) -> dict[str, float]:
  """Returns a policy's results, averaged over samples of lengths i64[g, n]."""
  found = []
  for sample in samples:
    start = time.process_time()
    result = cluster.Simulation(
      machines or workload.cluster(),
      policy,
      sample,
      max_tokens=workload.max_tokens,
      speculation=speculation,
    ).run()
    found.append(
      dict(
        seconds=result.total_seconds,
        tail_seconds=result.tail_seconds,
        preemptions=result.num_preemptions / sample.size,
        idle_share=result.idle_share,
        accepted=result.mean_accepted,
        moved_terabytes=(result.pulled_bytes + result.spilled_bytes) / 1e12,
        cpu_seconds=time.process_time() - start,
      )
    )
  return {name: float(np.mean([row[name] for row in found])) for name in found[0]}


def paper(seeds: Sequence[int], report: Report) -> dict[str, Any]:
  """Returns the paper's columns and ours, by workload and policy."""
  found: dict[str, Any] = {}
  for workload in workloads.WORKLOADS:
    samples = [workload.lengths(seed) for seed in seeds]
    rows = {}
    for name, policy in systems(PAPER_CHUNK).items():
      rows[name] = simulate(workload, policy, samples)
      report(f"{workload.name}, {name}: {rows[name]['seconds']:.0f} s")
    ours = systems(OUR_CHUNK)
    rows[f"ours, {OUR_CHUNK}"] = simulate(workload, ours["ours"], samples)
    rows[f"oracle, by room, {OUR_CHUNK}"] = simulate(workload, ours["oracle, by room"], samples)
    for name, policy in (
      ("baseline + drafts", policies.GroupFCFS()),
      ("+ drafts", policies.ContextAware(chunk_tokens=PAPER_CHUNK)),
      (f"ours, {OUR_CHUNK} + drafts", ours["ours"]),
    ):
      rows[name] = simulate(workload, policy, samples, speculation=SpeculationConfig())
      report(f"{workload.name}, {name}: {rows[name]['seconds']:.0f} s")
    found[workload.name] = rows
  return found


def chunks(seeds: Sequence[int], report: Report) -> dict[str, Any]:
  """Returns gains over the baseline by chunk length, which the paper does not state."""
  found: dict[str, Any] = {}
  for workload in workloads.WORKLOADS:
    samples = [workload.lengths(seed) for seed in seeds]
    base = simulate(workload, policies.GroupFCFS(), samples)["seconds"]
    found[workload.name] = {}
    for chunk in (1024, 2048, 4096, 8192, 16384):
      rows = systems(chunk)
      gains = {
        name: base / simulate(workload, rows[name], samples)["seconds"]
        for name in ("divided", "+ context", "oracle", "ours", "oracle, by room")
      }
      found[workload.name][chunk] = gains
      report(f"{workload.name}, chunks of {chunk}: divided {gains['divided']:.2f}")
  return found


def sweep(seeds: Sequence[int], report: Report) -> list[dict[str, Any]]:
  """Returns throughput over the baseline by correlation of lengths, KV bound and group size.

  The workload is a quarter of Qwen2-VL-72B: 4 instances, 2400 requests. The variant that is not
  KV-bound has a twentieth of the KV per token, and 100 slots per instance.
  """
  found = []
  for is_kv_bound in (True, False):
    for group_size in (8, 16):
      for rho in RHOS:
        workload = dataclasses.replace(
          workloads.QWEN2_VL_72B,
          data_parallel_size=4,
          num_groups=2400 // group_size,
          group_size=group_size,
          rho=rho,
        )
        if not is_kv_bound:
          workload = dataclasses.replace(workload, kv_bytes=workload.kv_bytes / 20)
        machines = workload.cluster()
        if not is_kv_bound:
          machines = dataclasses.replace(machines, max_running=100)
        samples = [workload.lengths(seed) for seed in seeds]
        rows = {
          name: simulate(workload, policy, samples, machines=machines)["seconds"]
          for name, policy in systems(OUR_CHUNK).items()
        }
        gains = {name: rows["baseline"] / seconds for name, seconds in rows.items()}
        found.append(dict(kv_bound=is_kv_bound, group_size=group_size, rho=rho, gains=gains))
        report(
          f"sweep, {'KV' if is_kv_bound else 'places'} bind, groups of {group_size}, rho {rho}:"
          f" divided {gains['divided']:.2f}, ours {gains['ours']:.2f},"
          f" oracle {gains['oracle, by room']:.2f}"
        )
  return found


def drawn(
  seeds: Sequence[int], report: Report, workload_seeds: Sequence[int] = DRAWN
) -> list[dict[str, Any]]:
  """Returns, for each drawn workload, throughput over plain divided rollout by sample of lengths.

  Args:
    seeds: seeds of the samples of a workload's lengths.
    report: receives a line per workload.
    workload_seeds: seeds of the workloads.
  """
  found = []
  for seed in workload_seeds:
    workload = drawn_lib.draw(seed)
    chunk = workload.chunk_tokens
    seconds: dict[str, list[float]] = {"divided": [], "ours": []}
    for sample in seeds:
      lengths = workload.lengths(sample)
      for name, rows in seconds.items():
        result = cluster.Simulation(
          workload.cluster(), systems(chunk)[name], lengths, max_tokens=workload.max_tokens
        ).run()
        rows.append(result.total_seconds)
    ratios = (np.array(seconds["divided"]) / np.array(seconds["ours"])).tolist()
    row = dict(dataclasses.asdict(workload), ours=ratios)
    found.append(row)
    report(f"drawn, {_drawn_line(row)}")
  return found


def _drawn_line(row: dict[str, Any]) -> str:
  ours = ", ".join(f"{ratio:.3f}" for ratio in row["ours"])
  return (
    f"{row['seed']}: {row['scarce']} scarce, rho {row['rho']:.2f}, sigma {row['sigma']:.2f},"
    f" {row['num_groups']} groups of {row['group_size']} on {row['data_parallel_size']} of"
    f" {row['machine']}, {row['waves']:.1f} waves, mean {row['mean_tokens']:.0f}, cap"
    f" {row['max_tokens']}, chunk {row['chunk_tokens']}: {ours}"
  )


def rival_steps(seeds: Sequence[int], report: Report) -> dict[str, Any]:
  """Returns seconds per training step and the age of its data, for the off-policy baselines."""
  found: dict[str, Any] = {}
  for workload in workloads.WORKLOADS:
    baseline, ours = policies.GroupFCFS(), policies.LongestGroupFirst()
    steps = {
      "synchronous, baseline": [baselines.synchronous(workload, baseline, seed) for seed in seeds],
      "one step off, baseline": [
        baselines.one_step_off(workload, baseline, seed) for seed in seeds
      ],
      # The first steps start without leftover requests and are not counted.
      "partial, baseline": baselines.partial(workload, baseline, range(3 + len(seeds)))[3:],
      "synchronous, ours": [baselines.synchronous(workload, ours, seed) for seed in seeds],
    }
    found[workload.name] = {
      name: {
        field.name: float(np.mean([getattr(step, field.name) for step in rows]))
        for field in dataclasses.fields(baselines.Step)
      }
      for name, rows in steps.items()
    }
    report(f"{workload.name}, rivals done")
  return found


def decisions(report: Report, num_groups: int = 10_000, group_size: int = 16) -> dict[str, Any]:
  """Returns CPU microseconds per decision, by policy, with 64 instances."""
  rng = np.random.default_rng(0)
  sample = np.clip(rng.lognormal(6.5, 0.8, (num_groups, group_size)), 1, 4096).astype(int)
  found = {}
  for name, policy in systems(512).items():
    if isinstance(policy, policies.Oracle):
      by_id = {f"{g}/{m}": int(n) for (g, m), n in np.ndenumerate(sample)}
      policy = dataclasses.replace(policy, lengths=by_id)
    found[name] = microseconds(policy, sample)
    report(f"decisions, {name}: {found[name]:.1f} us each")
  return found


def microseconds(policy: Policy, sample: np.ndarray, data_parallel_size: int = 64) -> float:
  """Returns CPU microseconds per decision in a rollout of lengths i64[g, n]."""
  rng = random.Random(0)
  buffer = buffer_lib.Buffer()
  for (group, member), _ in np.ndenumerate(sample):
    buffer.add(f"{group}/{member}", str(group), prompt_tokens=100, max_tokens=4096)
  instances = instances_lib.Instances.empty(
    data_parallel_size, page_size=32, num_pages=4000, max_running=64
  )
  planner = scheduler.Scheduler(policy, buffer)
  running: list[instances_lib.Decision] = []
  spent = 0.0
  while buffer.num_unfinished:
    while True:
      start = time.process_time()
      decision = planner.next(instances)
      spent += time.process_time() - start
      if decision is None:
        break
      buffer.begin_chunk(decision.request_id, decision.instance, decision.max_chunk_tokens)
      instances.admit(decision)
      running.append(decision)
    for _ in range(max(1, len(running) // 500)):
      place = rng.randrange(len(running))
      running[place], running[-1] = running[-1], running[place]
      ended = running.pop()
      item = buffer[ended.request_id]
      length = int(sample[item.group.index, item.member])
      reached = min(item.chunk_end, length)
      buffer.end_chunk(item.request_id, reached, reached == length)
      instances.release(ended.instance, ended.num_pages)
  return spent / planner.num_decisions * 1e6


def trace(path: str, report: Report) -> dict[str, Any]:
  """Returns gains on a public trace's lengths, on Moonlight's machines with 64 requests each."""
  sample = lengths_lib.read_trace(path)
  workload = dataclasses.replace(
    workloads.MOONLIGHT,
    data_parallel_size=max(sample.size // 64, 1),
    max_tokens=int(sample.max()),
  )
  rows = {
    name: simulate(workload, policy, [sample])["seconds"]
    for name, policy in systems(OUR_CHUNK).items()
  }
  share = lengths_lib.within_share(sample)
  report(f"{path}: {sample.shape[0]} groups, share of ln L between groups {share:.2f}")
  return dict(rho=share, gains={name: rows["baseline"] / seconds for name, seconds in rows.items()})


def paper_tables(found: dict[str, Any]) -> str:
  """Returns Markdown: published and simulated values, their ratio, and whether it is within 10 %.

  Args:
    found: the result of `paper`.
  """
  lines = []

  def row(name: str, column: str, published: float, simulated: float, digits: int) -> None:
    ratio = simulated / published
    values = (f"{value:,.{digits}f}" for value in (published, simulated))
    holds = measure.holds(0.9 <= ratio <= 1.1)
    lines.append((name, column, *values, f"{ratio:.2f}", holds))

  for workload in workloads.WORKLOADS:
    rows, published = found[workload.name], workload.published
    base = rows["baseline"]
    share = base["tail_seconds"] / base["seconds"]
    row(workload.name, "baseline, s (fitted)", published.baseline_seconds, base["seconds"], 0)
    row(workload.name, "baseline, tail share (fitted)", published.tail_share, share, 3)
    if published.preemptions is not None:
      column = "baseline, preemptions per request (fitted)"
      row(workload.name, column, published.preemptions, base["preemptions"], 2)
    for name, gain in zip(("divided", "+ context", "+ drafts"), published.gains):
      row(workload.name, f"gain, {name}", gain, base["seconds"] / rows[name]["seconds"], 2)
    cut = 1 - rows["+ drafts"]["tail_seconds"] / base["tail_seconds"]
    row(workload.name, "tail cut, + drafts", published.tail_cut, cut, 2)
    row(
      workload.name,
      "tokens per step, + drafts",
      published.accepted,
      rows["+ drafts"]["accepted"],
      2,
    )
  names = ("workload", "column", "published", "simulated", "ratio", "within 10 %")
  return measure.table(names, lines)


def policy_table(found: dict[str, Any]) -> str:
  """Returns Markdown: every policy on the three workloads."""
  lines = [
    (name, policy, f"{row['seconds']:,.0f}", f"{rows['baseline']['seconds'] / row['seconds']:.2f}",
     f"{row['tail_seconds']:,.0f}", f"{row['preemptions']:.2f}",
     f"{100 * row['idle_share']:.0f} %", f"{row['accepted']:.2f}", f"{row['moved_terabytes']:.1f}")
    for name, rows in found.items()
    for policy, row in rows.items()
  ]  # fmt: skip
  names = (
    "workload", "policy", "s", "gain", "tail, s", "preemptions", "idle", "tokens per step",
    "moved, TB",
  )  # fmt: skip
  return measure.table(names, lines)


def chunk_table(found: dict[str, Any]) -> str:
  """Returns Markdown: gains over the baseline by chunk length."""
  names = list(next(iter(next(iter(found.values())).values())))
  lines = [
    (workload, chunk, *(f"{gains[name]:.2f}" for name in names))
    for workload, rows in found.items()
    for chunk, gains in rows.items()
  ]
  return measure.table(("workload", "chunk", *names), lines)


def sweep_table(found: list[dict[str, Any]]) -> str:
  """Returns Markdown: the sweep, with ours relative to the oracle and to plain divided rollout."""
  names = list(found[0]["gains"])
  lines = []
  for row in found:
    gains = row["gains"]
    lines.append((
      "KV" if row["kv_bound"] else "places", row["group_size"], row["rho"],
      *(f"{gains[name]:.2f}" for name in names),
      f"{100 * gains['ours'] / gains['oracle, by room']:.1f} %",
      f"{gains['ours'] / gains['divided']:.2f}",
    ))  # fmt: skip
  head = ("what binds", "group", "rho", *names, "ours / oracle, by room", "ours / divided")
  return measure.table(head, lines)


def drawn_table(found: list[dict[str, Any]]) -> str:
  """Returns Markdown: ours relative to plain divided rollout by kind, and every missed target."""
  lines = []
  for scarce in ("KV", "places"):
    for low, high in LIKENESS:
      rows = [row for row in found if row["scarce"] == scarce and low <= row["rho"] < high]
      if not rows:
        continue
      means = np.array([np.mean(row["ours"]) for row in rows])
      replays = np.concatenate([row["ours"] for row in rows])
      lines.append((
        scarce, f"{low} to {high}", len(rows), f"{means.mean():.3f}", f"{means.min():.3f}",
        (means < 0.99).sum(), len(replays), f"{replays.min():.3f}", (replays < 0.99).sum(),
        (replays > 1.01).sum(),
      ))  # fmt: skip
  misses = [row for row in found if min(row["ours"]) < 0.99]
  names = (
    "what binds", "rho", "workloads", "mean", "least workload", "workloads < 0.99", "replays",
    "least replay", "replays < 0.99", "replays > 1.01",
  )  # fmt: skip
  text = f"{measure.table(names, lines)}\n\n{len(misses)} workloads with a replay below 0.99:\n"
  return "\n".join([text, *(f"- {_drawn_line(row)}" for row in misses)])


def baseline_table(found: dict[str, Any]) -> str:
  """Returns Markdown: the cost of a step and the age of its data."""
  lines = [
    (name, loop, f"{row['seconds']:,.0f}", f"{100 * row['stale_share']:.0f} %",
     f"{row['mean_tokens']:,.0f}")
    for name, rows in found.items()
    for loop, row in rows.items()
  ]  # fmt: skip
  return measure.table(("workload", "loop", "s per step", "stale tokens", "mean length"), lines)


def decision_table(found: dict[str, float]) -> str:
  """Returns Markdown: microseconds per decision."""
  rows = ((name, f"{value:.1f}") for name, value in found.items())
  return measure.table(("policy", "us a decision"), rows)


def picture(found: dict[str, Any], path: pathlib.Path) -> None:
  """Draws the published and simulated gains of the three workloads."""
  from matplotlib import figure

  names = ("divided", "+ context", "+ drafts")
  sheet = figure.Figure(figsize=(10, 3.4), layout="constrained")
  for axes, workload in zip(np.atleast_1d(sheet.subplots(1, 3, sharey=True)), workloads.WORKLOADS):
    rows = found[workload.name]
    base = rows["baseline"]["seconds"]
    places = np.arange(len(names))
    axes.bar(places - 0.2, workload.published.gains, 0.38, label="published", color="#bbbbbb")
    simulated = [base / rows[name]["seconds"] for name in names]
    axes.bar(places + 0.2, simulated, 0.38, label="simulated", color="#3b6ea5")
    ours = base / rows[f"ours, {OUR_CHUNK}"]["seconds"]
    axes.axhline(ours, color="#c0504d", linestyle="--", label="ours, no drafts")
    axes.set_xticks(places, names)
    axes.set_title(workload.name)
  sheet.axes[0].set_ylabel("throughput over the baseline")
  sheet.axes[0].legend()
  sheet.savefig(path, dpi=120)


TABLES: dict[str, Callable[[Any], str]] = {
  "paper": lambda found: f"{paper_tables(found)}\n\n{policy_table(found)}",
  "chunks": chunk_table,
  "sweep": sweep_table,
  "drawn": drawn_table,
  "rivals": baseline_table,
  "decisions": decision_table,
}


def run(
  parts: Sequence[str], num_seeds: int, directory: pathlib.Path, report: Report
) -> dict[str, Any]:
  """Runs parts; writes `results.json`, `tables.md` and, for the part "paper", `gains.png`.

  Raises:
    ValueError: if a part is unknown, or there is no seed.
  """
  unknown = sorted(set(parts) - {*PARTS, "fit"})
  if unknown or not parts:
    raise ValueError(
      f"--parts: got {', '.join(unknown) or 'none'}, expected some of {', '.join(PARTS)}, fit."
    )
  if num_seeds < 1:
    raise ValueError(f"--num_seeds: got {num_seeds}, expected at least 1; the tables have 4.")
  directory.mkdir(parents=True, exist_ok=True)
  seeds = range(num_seeds)
  found: dict[str, Any] = {}
  for part in parts:
    start = time.perf_counter()
    match part:
      case "paper":
        found[part] = paper(seeds, report)
        picture(found[part], directory / "gains.png")
      case "chunks":
        found[part] = chunks(seeds, report)
      case "sweep":
        found[part] = sweep(seeds, report)
      case "drawn":
        found[part] = drawn(seeds, report)
      case "rivals":
        found[part] = rival_steps(seeds, report)
      case "decisions":
        found[part] = decisions(report)
      case _:
        fit(seeds, report)
    report(f"{part}: {time.perf_counter() - start:.0f} s")
  (directory / "results.json").write_text(json.dumps(found, indent=1))
  text = "\n\n".join(f"## {part}\n\n{TABLES[part](rows)}" for part, rows in found.items())
  (directory / "tables.md").write_text(text + "\n")
  return found


def fit(seeds: Sequence[int], report: Report) -> None:
  """Fits the free parameters to the baseline again, and reports the result."""
  for workload in workloads.WORKLOADS:
    best = calibration.fit(
      workload, seeds, on_step=lambda now, columns: report(f"{now.fitted} -> {columns}")
    )
    report(f"{workload.name}: {best.fitted}, published {calibration.targets(workload)}")


def main(args: flags.FlagValues) -> None:
  directory = pathlib.Path(args.workdir)
  report = measure.say
  if args.trace:
    gains = trace(args.trace, report)["gains"]
    print("\n".join(f"{name}: {gain:.2f}x the baseline" for name, gain in gains.items()))
    return
  run(args.parts, args.num_seeds, directory, report)
  print((directory / "tables.md").read_text())


if __name__ == "__main__":
  flags.DEFINE_string("workdir", "runs/seer_simulation", "Output directory.")
  flags.DEFINE_list("parts", list(PARTS), f"Parts to run, from {', '.join(PARTS)}, fit.")
  flags.DEFINE_integer("num_seeds", 4, "Number of draws of the lengths; tables show the mean.")
  flags.DEFINE_string(
    "trace", "", "JSON lines with a list `output` or `turns` each; runs only this trace."
  )
  measure.command(main)
