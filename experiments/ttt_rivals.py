"""Compares the policy with baselines at equal CPU time: did the policy find it, or its tool?

Claim: none in advance; the table reports the results. The policy wins only if its median over five
seeds or more beats the classical method, the polish tool from random starts, and random sentences
in the same search. If it is behind or equal the table says "the tool did it", and if it is ahead
with fewer seeds or baselines "not settled".
Command: bash launch/local.sh experiments.ttt_rivals --workdir=docs/results/ttt/apple_machines
  another problem: --config.problems="('minimum_overlap:51',)" --config.seeds="(0,1,2,3,4)"
Hardware: one CPU core, 6 to 12 minutes a cell. Numbers: docs/results/ttt.md

A cell is a problem, a seed and a contestant: a run of `ttt.discover`, then each baseline for as
many CPU seconds as that took, verdicts included; the policy without reuse runs for as many steps.
A finished cell is one line of cells.jsonl in --workdir: the same command continues after the last
one, and a command with more problems, seeds or baselines adds their cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from experiments.problems import names as names_lib
from seerjax import metrics, numerics as numerics_lib
from seerjax.discovery import puct
from seerjax.discovery.config import DiscoverConfig
from seerjax.run import command_line, self_test
from seerjax.run.programs import Programs

POLICY, NO_REUSE = "policy", "policy_without_reuse"
RIVALS = ("classical", NO_REUSE, "random_edits", "tool_from_random_starts")
SETTLED_SEEDS = 5  # Fewer seeds do not decide in favour of the policy.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contest:
  """The grid of cells.

  Attributes:
    problems: names of problems; see `problems.names`. Inputs 0 and 100 of AHC058 are excluded,
      because the main settings were chosen on them.
    seeds: seeds of the runs.
    rivals: baselines, of `RIVALS`; a problem runs those that it has.
    run: all other settings. Everything runs in one process, so that CPU seconds are of one core.
  """

  problems: tuple[str, ...] = tuple(f"apple_machines:{instance}" for instance in range(1, 11))
  seeds: tuple[int, ...] = (0,)
  rivals: tuple[str, ...] = RIVALS
  run: DiscoverConfig = dataclasses.replace(ttt_discover.FLAGSHIP, num_workers=0)

  def __post_init__(self):
    if not self.problems or not self.seeds or {*self.rivals} - {*RIVALS}:
      raise ValueError(
        f"Contest: got problems={self.problems}, seeds={self.seeds}, rivals={self.rivals}, expected"
        f" at least one problem and seed, and rivals of {RIVALS}; correct the spelling."
      )

  def cells(self) -> Iterator[Cell]:
    """Yields all cells, seed by seed, the policy before its baselines."""
    for seed, problem in itertools.product(self.seeds, self.problems):
      there = (NO_REUSE, *ttt_discover.rival_names(names_lib.load(problem)))
      yield Cell(problem, seed, POLICY)
      for rival in self.rivals:
        if rival in there:
          yield Cell(problem, seed, rival)

  def config_of(self, cell: Cell) -> DiscoverConfig:
    """Returns the configuration of a cell's policy."""
    config = dataclasses.replace(self.run, problem=cell.problem, seed=cell.seed)
    if cell.contestant == NO_REUSE:
      return dataclasses.replace(config, search=puct.SearchConfig(reuse="none"))
    return config


class Cell(NamedTuple):
  """A problem, a seed, and `POLICY` or one of `RIVALS`."""

  problem: str
  seed: int
  contestant: str


def settings_of(contest: Contest) -> dict[str, Any]:
  """Returns the settings that the cells of one table share, as JSON."""
  return json.loads(json.dumps(metrics.encode(dataclasses.asdict(contest.run))))


def measure(
  contest: Contest,
  cell: Cell,
  finished: dict[Any, dict[str, Any]],
  programs: dict[Any, Programs],
) -> dict[str, Any]:
  """Runs a cell (a baseline for as long as its policy took); returns the cell's record."""
  config, environment = contest.config_of(cell), names_lib.load(cell.problem)
  if cell.contestant in (POLICY, NO_REUSE):
    found, rows = cells.discovered(config, environment, programs)
    result = {
      "best": found.score.value,
      "artefact": found.artefact,
      "cpu_seconds": found.summary["cpu_seconds"],
      "by_cpu_seconds": [[row["search/cpu_seconds"], row["search/best"]] for row in rows],
      "attempts": found.summary["attempts"],
      "seconds": found.summary["seconds"],
      "max_abs_logprob_gap": max(row.get("contract/max_abs_logprob_gap", 0.0) for row in rows),
    }
  else:
    seconds = finished[cell._replace(contestant=POLICY)]["cpu_seconds"]
    improvements = ttt_discover.rival(config, environment, cell.contestant, seconds)
    result = {
      "best": ttt_discover.best_of(improvements),
      "cpu_seconds": seconds,
      "by_cpu_seconds": improvements,
    }
  return cell._asdict() | result | {
    "is_maximised": environment.is_maximised,
    "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    "numerics": numerics_lib.fingerprint(config.numerics, config.trainer.remat)["digest"],
    "settings": settings_of(contest),
  }  # fmt: skip


def table(records: Sequence[dict[str, Any]], rivals: Mapping[str, Sequence[str]]) -> str:
  """Returns a Markdown table with one line per problem: medians over seeds, and the winner.

  Args:
    records: finished cells.
    rivals: baselines that the policy has to beat, by problem.
  """
  names = list(dict.fromkeys(record["contestant"] for record in records))
  lines = [
    f"| problem | {' | '.join(name.replace('_', ' ') for name in names)} | CPU s | who did it |",
    f"|---|{'---|' * len(names)}---|---|",
  ]
  for problem in dict.fromkeys(record["problem"] for record in records):
    here = [record for record in records if record["problem"] == problem]
    bests = {
      name: [record["best"] for record in here if record["contestant"] == name] for name in names
    }
    medians = {name: statistics.median(values) for name, values in bests.items() if values}
    sign = 1 if here[0]["is_maximised"] else -1
    found = [name for name in rivals[problem] if name in medians]
    is_ahead = all(sign * medians[POLICY] > sign * medians[name] for name in found)
    is_settled = all(
      len(bests.get(name, ())) >= SETTLED_SEEDS for name in (POLICY, *rivals[problem])
    )
    shown = " | ".join(f"{medians[name]:.10g}" if name in medians else "" for name in names)
    seconds = statistics.median(
      record["cpu_seconds"] for record in here if record["contestant"] == POLICY
    )
    verdict = "the tool did it"
    if is_ahead:
      verdict = "the policy" if is_settled else "not settled"
    lines.append(f"| {problem} ({len(bests[POLICY])}) | {shown} | {seconds:.0f} | {verdict} |")
  return "\n".join(lines) + "\n"


def run(contest: Contest, directory: pathlib.Path) -> str:
  """Runs the missing cells and writes table.md; returns the table.

  Raises:
    ValueError: if the directory has cells of other settings, or a problem has no language.
  """
  cells.check_problems(contest.problems)
  records = cells.completed(
    list(contest.cells()), directory, settings_of(contest), functools.partial(measure, contest)
  )
  rivals = {
    problem: ttt_discover.rival_names(names_lib.load(problem))
    for problem in {record["problem"] for record in records}
  }
  text = table(records, rivals)
  (directory / "table.md").write_text(text)
  return text


def main(argv: list[str]) -> None:
  logging.set_verbosity(logging.WARNING)  # Orbax logs every file of a checkpoint.
  args = flags.FLAGS
  with command_line.refusals():
    command_line.check_arguments(argv)
    contest = configuration.from_flags(Contest, args.config)
    jax.config.update("jax_num_cpu_devices", contest.run.num_instances)
    print(self_test.describe(contest.run.numerics), flush=True)
    text = run(contest, pathlib.Path(args.workdir))
  print(f"\n{text}\nwritten to {args.workdir}")


if __name__ == "__main__":
  configuration.define_flags(Contest(), "runs/ttt_rivals")
  app.run(main)
