"""Ablates test-time training: objective x reuse x training on or off.

Claim: none in advance; the table reports the results, favourable or not.
Command: bash launch/local.sh experiments.ttt_ablation --workdir=docs/results/ttt
Hardware: 2 CPU cores, about a minute a cell, 120 cells by default.
Numbers: docs/results/ttt_training.md

Every cell is a run of `ttt.discover` of at least 7,680 attempts. With training off the objective
has no effect, so each kind of reuse has one such cell. A finished cell is one line of cells.jsonl
in --workdir: the same command continues after the last one, over days if needed. Cells run seed by
seed, so that partial results are comparable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import datetime
import itertools
import json
import pathlib
import statistics
from typing import Any, NamedTuple

from absl import app, flags, logging
import jax
import numpy as np
from scipy import stats

from experiments import cells, configuration, ttt_discover
from experiments.problems import names as names_lib
from seerjax import metrics, numerics as numerics_lib
from seerjax.discovery import objective as objective_lib, puct
from seerjax.discovery.config import DiscoverConfig
from seerjax.discovery.objective import ObjectiveConfig
from seerjax.run import command_line, self_test
from seerjax.run.programs import Programs

# Replaces the objective in cells without training.
OFF = "off"
MIN_SEEDS = 5  # With fewer, no comparison could be significant after correction.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
  """The grid of cells.

  Attributes:
    problems: names of problems; see `problems.names`.
    objectives: objectives, of `objective_lib.OBJECTIVES`.
    reuses: kinds of reuse, of `puct.REUSE`.
    seeds: seeds of the runs.
    with_off: whether each kind of reuse also runs without training.
    run: all other settings.
  """

  problems: tuple[str, ...] = ("apple_machines_plain:0", "examples/vehicle_routing.py")
  objectives: tuple[str, ...] = objective_lib.OBJECTIVES
  reuses: tuple[str, ...] = ("puct", "epsilon_greedy", "sequential", "none")
  seeds: tuple[int, ...] = (0, 1, 2)
  with_off: bool = True
  run: DiscoverConfig = dataclasses.replace(
    ttt_discover.FLAGSHIP,
    num_steps=60,
    num_workers=0,  # Without polish an attempt is no slower than its transfer to a worker.
    checkpoint_every=60,
    # Published settings.
    search=puct.SearchConfig(),
    objective=ObjectiveConfig(),
  )

  def __post_init__(self):
    unknown = {*self.objectives} - {*objective_lib.OBJECTIVES} | {*self.reuses} - {*puct.REUSE}
    if unknown or not self.problems or not self.seeds:
      raise ValueError(
        f"Grid: got objectives={self.objectives}, reuses={self.reuses}, problems={self.problems},"
        f" seeds={self.seeds}, expected some of {objective_lib.OBJECTIVES} and {puct.REUSE}, a"
        " problem and a seed; correct the spelling."
      )

  def cells(self) -> Iterator[Cell]:
    """Yields all cells, seed by seed."""
    objectives = [*([OFF] if self.with_off else []), *self.objectives]
    for seed, problem, objective, reuse in itertools.product(
      self.seeds, self.problems, objectives, self.reuses
    ):
      yield Cell(problem, objective, reuse, seed)

  def config_of(self, cell: Cell) -> DiscoverConfig:
    """Returns the configuration of a cell."""
    run = self.run
    objective = run.objective
    if cell.objective != OFF:
      objective = dataclasses.replace(objective, kind=cell.objective)
    return dataclasses.replace(
      run,
      problem=cell.problem,
      seed=cell.seed,
      train=cell.objective != OFF,
      objective=objective,
      search=dataclasses.replace(run.search, reuse=cell.reuse),
    )


class Cell(NamedTuple):
  """One run: a problem, an objective or "off", a kind of reuse, a seed."""

  problem: str
  objective: str
  reuse: str
  seed: int


class Comparison(NamedTuple):
  """Comparison of training with no training, for one problem and kind of reuse.

  Attributes:
    off, trained: medians of the best values.
    p_value: one-sided p-value of "training finds nothing better".
    corrected: p-value corrected for all comparisons.
  """

  problem: str
  objective: str
  reuse: str
  off: float
  trained: float
  p_value: float
  corrected: float


def settings_of(grid: Grid) -> dict[str, Any]:
  """Returns the settings that the cells of one table share, as JSON."""
  return json.loads(json.dumps(metrics.encode(dataclasses.asdict(grid.run))))


def measure(grid: Grid, cell: Cell, programs: dict[Any, Programs]) -> dict[str, Any]:
  """Runs a cell; returns its record. Runs of one shape share compiled programs."""
  config = grid.config_of(cell)
  environment = names_lib.load(cell.problem)
  found, rows = cells.discovered(config, environment, programs)
  return cell._asdict() | {
    "best": found.score.value,
    "artefact": found.artefact,
    "is_maximised": environment.is_maximised,
    "attempts": found.summary["attempts"],
    "cpu_seconds": found.summary["cpu_seconds"],
    "bests": [row["search/best"] for row in rows],
    "medians": [row.get("search/value_median") for row in rows],
    "valid_rates": [row["search/valid_rate"] for row in rows],
    "kl_to_base": [row.get("objective/kl_to_base") for row in rows],
    "seed_trees_alive": [row["search/seed_trees_alive"] for row in rows],
    "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    "numerics": numerics_lib.fingerprint(config.numerics, config.trainer.remat)["digest"],
    "settings": settings_of(grid),
  }


def tables(records: Sequence[dict[str, Any]]) -> str:
  """Returns a Markdown table per problem: median and range of the best values."""
  lines = []
  for problem in dict.fromkeys(record["problem"] for record in records):
    here = [record for record in records if record["problem"] == problem]
    reuses = list(dict.fromkeys(record["reuse"] for record in here))
    direction = "higher" if here[0]["is_maximised"] else "lower"
    attempts = max(record["attempts"] for record in here)
    lines += [
      f"{problem}: best after {attempts:,} attempts, median (range) of the seeds; {direction} is"
      " better.",
      "",
      f"| objective | {' | '.join(reuses)} |",
      f"|---|{'---|' * len(reuses)}",
    ]
    for objective in dict.fromkeys(record["objective"] for record in here):
      columns = []
      for reuse in reuses:
        bests = [r["best"] for r in here if (r["objective"], r["reuse"]) == (objective, reuse)]
        middle = f"{statistics.median(bests):.7g}" if bests else "not run"
        spread = f" ({min(bests):.7g} to {max(bests):.7g}, {len(bests)})" if bests else ""
        columns.append(middle + spread)
      name = "training off" if objective == OFF else objective
      lines.append(f"| {name} | {' | '.join(columns)} |")
    lines.append("")
  return "\n".join(lines)


def comparisons(records: Sequence[dict[str, Any]]) -> list[Comparison]:
  """Tests whether training finds better values, where at least `MIN_SEEDS` seeds are finished.

  Uses Mann-Whitney tests of the best values: exact by enumeration (which allows ties) up to ten
  seeds per side, with 200,000 random permutations beyond. Corrected by Holm's method.
  """
  bests: dict[tuple[str, str, str], list[float]] = {}
  signs = {record["problem"]: 1 if record["is_maximised"] else -1 for record in records}
  for r in records:
    bests.setdefault((r["problem"], r["objective"], r["reuse"]), []).append(r["best"])
  found: list[tuple[str, str, str, float, float, float]] = []
  for (problem, objective, reuse), trained in bests.items():
    off = bests.get((problem, OFF, reuse), [])
    if objective == OFF or min(len(off), len(trained)) < MIN_SEEDS:
      continue
    sign = signs[problem]
    # Any: scipy's annotations only allow the name of a method.
    method: Any = stats.PermutationMethod(n_resamples=200_000, rng=np.random.default_rng(0))
    test: Any = stats.mannwhitneyu(
      [sign * best for best in trained],
      [sign * best for best in off],
      alternative="greater",
      method=method,
    )
    middles = statistics.median(off), statistics.median(trained)
    found.append((problem, objective, reuse, *middles, float(test.pvalue)))
  corrected = holm([p_value for *_, p_value in found])
  return [Comparison(*one, value) for one, value in zip(found, corrected, strict=True)]


def holm(p_values: Sequence[float]) -> list[float]:
  """Returns p-values corrected by Holm's method (1979), in the given order."""
  corrected, least = [1.0] * len(p_values), 0.0
  order = sorted(range(len(p_values)), key=p_values.__getitem__)
  for rank, place in enumerate(order):
    least = max(least, min(1.0, (len(p_values) - rank) * p_values[place]))
    corrected[place] = least
  return corrected


def significance(found: Sequence[Comparison]) -> str:
  """Returns comparisons as a Markdown table; "" if there are none."""
  if not found:
    return ""
  lines = [
    "Is training better than none? Exact one-sided Mann-Whitney tests, Holm's correction.",
    "",
    "| problem | reuse | objective | off | trained | p | p, corrected |",
    "|---|---|---|---|---|---|---|",
  ]
  for one in found:
    lines.append(
      f"| {one.problem} | {one.reuse} | {one.objective} | {one.off:.7g} | {one.trained:.7g} |"
      f" {one.p_value:.2g} | {one.corrected:.2g} |"
    )
  return "\n".join([*lines, ""])


def run(grid: Grid, directory: pathlib.Path) -> str:
  """Runs the missing cells and writes table.md; returns the tables.

  Raises:
    ValueError: if the directory has cells of other settings, or a problem has no language.
  """
  cells.check_problems(grid.problems)
  records = cells.completed(
    list(grid.cells()),
    directory,
    settings_of(grid),
    lambda cell, _, programs: measure(grid, cell, programs),
  )
  text = "\n".join(filter(None, (tables(records), significance(comparisons(records)))))
  (directory / "table.md").write_text(text)
  return text


def main(argv: list[str]) -> None:
  logging.set_verbosity(logging.WARNING)  # Orbax logs every file of a checkpoint.
  args = flags.FLAGS
  with command_line.refusals():
    command_line.check_arguments(argv)
    grid = configuration.from_flags(Grid, args.config)
    jax.config.update("jax_num_cpu_devices", grid.run.num_instances)
    print(self_test.describe(grid.run.numerics), flush=True)
    text = run(grid, pathlib.Path(args.workdir))
  print(f"\n{text}\nwritten to {args.workdir}")


if __name__ == "__main__":
  configuration.define_flags(Grid(), "runs/ttt_ablation")
  app.run(main)
