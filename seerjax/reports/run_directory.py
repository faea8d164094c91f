"""Reads a run directory for a report; every file is optional.

metrics.jsonl    curves                       (seerjax.metrics)
summary.json     headline numbers and their table
config.json      settings, and optionally "fingerprint"
journal.jsonl    lengths and transcripts      (seerjax.rollout.journal)
traces.jsonl     timeline of chunks           (seerjax.rollout.trace)
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any

import numpy as np

from seerjax import metrics
from seerjax.rollout import journal, trace as trace_lib

Points = tuple[np.ndarray, np.ndarray]  # (steps, values), of equal length.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """Contents of a run directory.

  Attributes:
    name: name of the directory.
    curves: (steps, values) by metric name.
    counts: lists of counts by metric name and step.
    summary: the summary; empty if there is none.
    config: the settings; empty if there are none.
    fingerprints: fingerprints of the journal's epochs, or the one in the config.
    first: rollouts of the journal's first step, by (group, member).
    last: rollouts of its last step; empty if there is only one step.
    traces: trace of each step.
  """

  name: str
  curves: dict[str, Points]
  counts: dict[str, dict[int, list[int]]]
  summary: dict[str, Any]
  config: dict[str, Any]
  fingerprints: tuple[dict[str, str], ...]
  first: tuple[journal.Entry, ...]
  last: tuple[journal.Entry, ...]
  traces: dict[int, trace_lib.StepTrace]


def load(run_dir: str | os.PathLike) -> Run:
  """Reads a run directory.

  Raises:
    ValueError: if it has none of a run's files, or one of them is damaged.
  """
  path = pathlib.Path(run_dir)
  sources = (metrics.FILE_NAME, "summary.json", "config.json", journal.FILE_NAME)
  if not any((path / name).is_file() for name in sources):
    raise ValueError(
      f"report: got {path}, which has none of {', '.join(sources)}, expected a run directory; pass"
      " the one that the experiment printed."
    )
  lines = metrics.read(path / metrics.FILE_NAME) if (path / metrics.FILE_NAME).is_file() else []
  curves: dict[str, tuple[list, list]] = {}
  counts: dict[str, dict[int, list[int]]] = {}
  for line in lines:
    for name, value in line.items():
      if isinstance(value, list):
        counts.setdefault(name, {})[line["step"]] = value
      elif name != "step":
        steps, values = curves.setdefault(name, ([], []))
        steps.append(line["step"])
        values.append(float(value))
  first: tuple[journal.Entry, ...] = ()
  last: tuple[journal.Entry, ...] = ()
  config = read_json(path / "config.json")
  fingerprints: tuple[dict[str, str], ...] = ()
  if isinstance(config.get("fingerprint"), dict):
    fingerprints = (config["fingerprint"],)
  if (path / journal.FILE_NAME).is_file():
    header, entries = journal.read(path / journal.FILE_NAME)
    fingerprints = header.fingerprints
    by_step: dict[int, list[journal.Entry]] = {}
    for entry in entries:
      by_step.setdefault(entry.step, []).append(entry)
      for step in sorted(by_step)[1:-1]:  # Keeps two steps in memory, however long the run.
        del by_step[step]
    ordered = [
      tuple(sorted(by_step[step], key=lambda e: (e.group, e.member))) for step in sorted(by_step)
    ]
    first = ordered[0] if ordered else ()
    last = ordered[-1] if len(ordered) > 1 else ()
  return Run(
    name=path.resolve().name,
    curves={
      name: (np.asarray(steps, float), np.asarray(values, float))
      for name, (steps, values) in curves.items()
    },
    counts=counts,
    summary=read_json(path / "summary.json"),
    config={name: value for name, value in config.items() if name != "fingerprint"},
    fingerprints=fingerprints,
    first=first,
    last=last,
    traces=trace_lib.read(path / trace_lib.FILE_NAME),
  )


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Returns the object in a JSON file; {} if there is no such file.

  Raises:
    ValueError: if the file is not JSON.
  """
  if not path.is_file():
    return {}
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except ValueError as error:
    raise ValueError(
      f"report: got {path}, which is not JSON ({error}), expected a JSON object; fix or remove it."
    ) from error
  return value if isinstance(value, dict) else {"value": value}
