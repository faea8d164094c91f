"""The policy against everything else at equal CPU time: who found it, the policy or the tool?

Claim: none beforehand; the table says what came out. A policy counts only where the median of its
seeds beats the classical method, the polishing tool from random starts, and random sentences in the
same search; otherwise the table says "the tool did it".
Command: bash launch/local.sh experiments.ttt_rivals --workdir=docs/results/ttt/apple_machines
  another problem: --config.problems="('minimum_overlap:51',)" --config.seeds="(0,1,2,3,4)"
Hardware: 2 CPU cores, 45 minutes a cell by estimate. Numbers: docs/results/ttt.md

A cell is a problem and a seed: a run of `ttt.discover`, then each rival for as many CPU seconds as
that took, verdicts included, and, if wanted, the same policy without reuse for as many steps. A
finished cell is one line of cells.jsonl in --workdir: the same command goes on after the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import datetime
import functools
import itertools
import json
import pathlib
import statistics
from typing import Any, NamedTuple

from absl import app, flags, logging
import jax

from experiments import cells, configuration, ttt_discover
from seerjax import metrics, numerics as numerics_lib, rl, self_test, ttt
from seerjax.search import puct
from seerjax.tasks import problems

POLICY, NO_REUSE = "policy", "policy_without_reuse"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contest:
  """Which cells there are.

  Attributes:
    problems: see `problems.load`. Inputs 0 and 100 of AHC058 are not among them: the flagship's
      settings were chosen there.
    seeds: runs of each.
    with_no_reuse: whether the policy also runs with every group at the start.
    run: all else.
  """

  problems: tuple[str, ...] = tuple(
    f"apple_machines:{instance}" for instance in range(1, 11)
  )
  seeds: tuple[int, ...] = (0,)
  with_no_reuse: bool = True
  run: ttt.DiscoverConfig = ttt_discover.FLAGSHIP

  def __post_init__(self):
    if not self.problems or not self.seeds:
      raise ValueError(
        f"Contest: got problems={self.problems}, seeds={self.seeds}, expected at least one of each."
      )

  def cells(self) -> Iterator[Cell]:
    """Yields all cells, seed by seed."""
    for seed, problem in itertools.product(self.seeds, self.problems):
      yield Cell(problem, seed)

  def config_of(self, cell: Cell) -> ttt.DiscoverConfig:
    """Returns the policy's run of a cell."""
    return dataclasses.replace(self.run, problem=cell.problem, seed=cell.seed)


class Cell(NamedTuple):
  """A problem and a seed."""

  problem: str
  seed: int


def settings_of(contest: Contest) -> dict[str, Any]:
  """Returns what cells of one table have in common, as JSON."""
  shared = metrics.encode(dataclasses.asdict(contest.run))
  return json.loads(json.dumps(shared | {"with_no_reuse": contest.with_no_reuse}))


def measure(contest: Contest, cell: Cell, programs: dict[Any, rl.Programs]) -> dict[str, Any]:
  """Runs a cell; returns its record. Runs of one shape share what they compile."""
  config, environment = contest.config_of(cell), problems.load(cell.problem)
  found, rows = cells.discovered(config, environment, programs)
  seconds = found.summary["cpu_seconds"]
  bests = {POLICY: found.score.value} | ttt_discover.rivals(config, environment, seconds)
  if contest.with_no_reuse:
    alone = dataclasses.replace(config, search=puct.SearchConfig(reuse="none"))
    bests[NO_REUSE] = cells.discovered(alone, environment, programs)[0].score.value
  return cell._asdict() | {
    "bests": bests,
    "is_maximised": environment.is_maximised,
    "attempts": found.summary["attempts"],
    "cpu_seconds": seconds,
    "seconds": found.summary["seconds"],
    "by_cpu_seconds": [[row["search/cpu_seconds"], row["search/best"]] for row in rows],
    "max_abs_logprob_gap": max(row.get("contract/max_abs_logprob_gap", 0.0) for row in rows),
    "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    "numerics": numerics_lib.fingerprint(config.numerics)["digest"],
    "settings": settings_of(contest),
  }


def table(records: Sequence[dict[str, Any]]) -> str:
  """Returns a line for each problem as Markdown: medians of the seeds, and who did it."""
  names = list(dict.fromkeys(name for record in records for name in record["bests"]))
  lines = [
    f"| problem | {' | '.join(name.replace('_', ' ') for name in names)} | CPU s | who did it |",
    f"|---|{'---|' * len(names)}---|---|",
  ]
  for problem in dict.fromkeys(record["problem"] for record in records):
    here = [record for record in records if record["problem"] == problem]
    sign = 1 if here[0]["is_maximised"] else -1
    medians = {
      name: statistics.median(record["bests"][name] for record in here)
      for name in names
      if all(name in record["bests"] for record in here)
    }
    others = [value for name, value in medians.items() if name not in (POLICY, NO_REUSE)]
    is_ahead = all(sign * medians[POLICY] > sign * other for other in others)
    shown = " | ".join(f"{medians[name]:.10g}" if name in medians else "" for name in names)
    seconds = statistics.median(record["cpu_seconds"] for record in here)
    verdict = "the policy" if is_ahead else "the tool did it"
    lines.append(f"| {problem} ({len(here)}) | {shown} | {seconds:.0f} | {verdict} |")
  return "\n".join(lines) + "\n"


def run(contest: Contest, directory: pathlib.Path) -> str:
  """Runs the cells that are missing and writes table.md; returns the table.

  Raises:
    ValueError: if the directory holds cells of other settings, or a problem has no language.
  """
  cells.check_problems(contest.problems)
  records = cells.completed(
    list(contest.cells()), directory, settings_of(contest), functools.partial(measure, contest)
  )
  text = table(records)
  (directory / "table.md").write_text(text)
  return text


def main(argv: list[str]) -> None:
  logging.set_verbosity(logging.WARNING)  # Checkpoints would tell of every file.
  args = flags.FLAGS
  with configuration.refusals():
    configuration.check_arguments(argv)
    contest = configuration.from_flags(Contest, args.config)
    jax.config.update("jax_num_cpu_devices", contest.run.num_instances)
    print(self_test.describe(contest.run.numerics), flush=True)
    text = run(contest, pathlib.Path(args.workdir))
  print(f"\n{text}\nwritten to {args.workdir}")


if __name__ == "__main__":
  configuration.define_flags(Contest(), "runs/ttt_rivals")
  app.run(main)
