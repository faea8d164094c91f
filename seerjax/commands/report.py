"""Renders the report of a run, of `train` or `discover`, again as one HTML page.

    seerjax report runs/grpo          writes runs/grpo/report.html

Both commands write it at their end; this is for a run that was killed, or for a newer version's
page. A run of `discover` loads its problem for it.
"""

from __future__ import annotations

import pathlib

from absl import flags

from seerjax.commands import problems
from seerjax.discovery import record as record_lib
from seerjax.reports import discovery_report, run_directory, run_report
from seerjax.run import command_line


def render(run: pathlib.Path, loader: str) -> pathlib.Path:
  """Writes the report of a run directory; returns its path.

  Args:
    run: the directory.
    loader: value of `--problems`, for a run of discovery.

  Raises:
    ValueError: if the directory holds no run, or its problem cannot be loaded.
  """
  if not (run / record_lib.BEST).is_file():
    return run_report.render(run)
  config = run_directory.read_json(run / "config.json")
  allow_weak = bool(config.get("programs", {}).get("allow_weak_sandbox", False))
  factory = problems.factory_of(loader, config.get("problem", ""), allow_weak_sandbox=allow_weak)
  return discovery_report.render(run, factory())


def main(argv: list[str]) -> None:
  with command_line.refusals():
    if not argv[1:]:
      raise ValueError(
        "seerjax report: got no run, expected directories of runs; write seerjax report runs/grpo."
      )
    for run in argv[1:]:
      print(render(pathlib.Path(run), flags.FLAGS.problems))


def define_flags() -> None:
  """Defines the flags of the command."""
  problems.define_flag()
