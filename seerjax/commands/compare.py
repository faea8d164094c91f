"""Compares runs: one table, and one HTML page with their curves and intervals.

    seerjax compare runs/a runs/b runs/c     prints the table, writes comparison.html

Held-out accuracy and reward have 95 % intervals: of the gains as in a run's own summary, of the
curves from the standard errors of the evaluations.
"""

from __future__ import annotations

import pathlib

from absl import flags

from seerjax.reports import comparison, run_directory
from seerjax.run import command_line


def compare(directories: list[pathlib.Path], out: pathlib.Path) -> str:
  """Writes the page of several runs; returns their table.

  Raises:
    ValueError: if fewer than two runs are named, one is named twice, or one is no run of `train`.
  """
  names = [path.resolve() for path in directories]
  if len(names) < 2 or len({*names}) < len(names):
    raise ValueError(
      f"seerjax compare: got {[str(path) for path in directories]}, expected two or more different"
      " directories of runs; write seerjax compare runs/a runs/b."
    )
  runs = [run_directory.load(path) for path in names]
  labels = comparison.labels([str(path) for path in directories])
  rows = comparison.rows(runs)
  out.parent.mkdir(parents=True, exist_ok=True)
  out.write_text(comparison.page_of(labels, runs), encoding="utf-8")
  return comparison.text_table(labels, rows)


def main(argv: list[str]) -> None:
  with command_line.refusals():
    out = pathlib.Path(flags.FLAGS.out)
    print(compare([pathlib.Path(one) for one in argv[1:]], out))
  print(f"page     {out}")


def define_flags() -> None:
  """Defines the flags of the command."""
  flags.DEFINE_string("out", "comparison.html", "HTML page to write.")
