"""Checks of a run's directory, and records that a resume reads back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import pathlib
import re
from typing import Any

from absl import logging

from seerjax import agreement, checkpoint, metrics
from seerjax.records import file
from seerjax.rollout import journal as journal_lib, trace as trace_lib
from seerjax.run import evaluation
from seerjax.run.config import SharedConfig


def check_directory(directory: pathlib.Path, *, resume: bool) -> None:
  """Raises if a run cannot start or resume in a directory.

  On resume, damaged checkpoints are renamed with a warning, as long as there is an earlier one: the
  steps since then are repeated, to the same bits.

  Raises:
    ValueError: if a new run finds another run, or there is nothing to resume.
  """
  if re.match("[a-z][a-z0-9]+:/", str(directory)):
    raise ValueError(
      f"--workdir: got {str(directory)!r}, expected a local directory, because a run appends lines"
      " to its journal and metrics; to keep checkpoints in a store, write its URL (gs://bucket/run)"
      " into a file 'checkpoints' in the run's directory before the run starts."
    )
  if directory.exists() and not directory.is_dir():
    raise ValueError(
      f"{directory}: got a file, expected a run's directory, or no file; choose another --workdir."
    )
  if resume:
    set_aside = lambda: checkpoint.set_aside_damaged(directory / "checkpoints")
    for sentence in agreement.from_first(set_aside):
      logging.warning("%s", sentence)
  latest = checkpoint.latest_step(directory / "checkpoints")
  numbers = directory / metrics.FILE_NAME
  if resume and latest is None:
    raise ValueError(
      f"{directory}: got no checkpoint to resume, expected one under {directory / 'checkpoints'};"
      " start a new run without --resume, or set --workdir to the run's directory."
    )
  if not resume and (latest is not None or (numbers.is_file() and numbers.stat().st_size)):
    found = "its metrics" if latest is None else f"a checkpoint after step {latest}"
    raise ValueError(
      f"{directory}: got the directory of another run ({found}), expected none; continue it with"
      " --resume, choose another --workdir, or remove it."
    )


def with_stored_sizes(
  config: SharedConfig, directory: pathlib.Path, *, resume: bool
) -> SharedConfig:
  """Returns the settings; for a resume, with defaults filled in from the run's checkpoint."""
  if not resume:
    return config
  stored = checkpoint.read_host_state(directory / "checkpoints").get("sizes", {})
  # JSON has lists, not tuples.
  stored = {name: tuple(size) if isinstance(size, list) else size for name, size in stored.items()}

  def filled(part: Any) -> Any:
    is_open = lambda name: vars(part).get(name) in (0, (), "", "auto")
    open_fields = {name: stored[name] for name in stored if is_open(name)}
    return dataclasses.replace(part, **open_fields)

  return dataclasses.replace(config, **{name: filled(part) for name, part in config.parts.items()})


def check_settings(
  stored: Mapping[str, Any],
  current: Mapping[str, Any],
  *,
  free: Sequence[str],
) -> None:
  """Raises if settings differ from those of the run to resume.

  Raises:
    ValueError: naming each difference with both values.
  """
  before, now = (
    {name: value for name, value in settings.items() if name not in free}
    for settings in (stored, current)
  )
  if changed := file.differences(before, now):
    raise ValueError(
      f"--resume: got other settings ({'; '.join(changed)}), expected those of the run; set them as"
      " in its config.json, or choose another --workdir."
    )


def missing_records(
  directory: pathlib.Path, step: int, journal: journal_lib.Journal | None
) -> list[str]:
  """Returns a sentence for each record file that lacks data of completed steps.

  A resumed run does not need this data.

  Args:
    directory: directory of the resumed run.
    step: number of completed steps.
    journal: the run's journal; None if it has none.

  Raises:
    ValueError: if metrics.jsonl is corrupt before its last line.
  """
  sentences = []
  if journal is not None:
    of_rollouts = journal.keys()
    known = {key[0] for key in of_rollouts}
    if missing := [one for one in range(step) if one not in known]:
      sentences.append(
        f"{journal.path}: got no rollouts of {len(missing)} of {step} steps, expected rollouts of"
        " all; the run continues, but these steps cannot be read or replayed: restore the file from"
        " a copy if you need them."
      )
  path = directory / metrics.FILE_NAME
  known = {row["step"] for row in metrics.read(path)} if path.is_file() else set()
  if missing := [one for one in range(1, step + 1) if one not in known]:
    sentences.append(
      f"{path}: got no metrics of {len(missing)} of {step} steps, expected metrics of all; the run"
      " continues, but its report and summary lack them: restore the file from a copy if you need"
      " them."
    )
  path = directory / trace_lib.FILE_NAME
  if damaged := trace_lib.damaged_lines(path):
    sentences.append(
      f"{path}: got damage in line(s) {', '.join(map(str, damaged))}, expected a step's trace in"
      " each; the run continues, but its report lacks them: restore the file from a copy if you"
      " need them."
    )
  return sentences


def accuracy_at(
  directory: pathlib.Path, step: int, room: str = evaluation.ROOM
) -> dict[str, float]:
  """Reads the metrics of the evaluation after a step; empty if there is no complete one.

  Args:
    directory: the run's directory.
    step: step after which the evaluation ran.
    room: metric prefix; see `evaluation.tasks_by_room`.
  """
  path, start = directory / metrics.FILE_NAME, f"{room}/"
  rows = [row for row in metrics.read(path) if row["step"] == step] if path.is_file() else []
  named = [(name, value) for row in rows for name, value in row.items()]
  return {name.removeprefix(start): value for name, value in named if name.startswith(start)}


def best_step(directory: pathlib.Path, metric: str, step: int) -> tuple[int, float] | None:
  """Returns the evaluated step with the highest `metric`, and its value (ties: the earliest).

  Only steps with a checkpoint count, and `step` itself.

  Returns:
    (step, value); None if no such step was evaluated.

  Raises:
    ValueError: if the evaluation after `step` lacks the metric; the message lists its metrics.
  """
  path = directory / metrics.FILE_NAME
  rows = metrics.read(path) if path.is_file() else []
  found = {row["step"]: float(row[metric]) for row in rows if metric in row}
  evaluated = sorted(
    name for row in rows if row["step"] == step for name in row if evaluation.METRIC.fullmatch(name)
  )
  # Evaluations from earlier versions have no reward.
  if f"{evaluation.ROOM}/reward" in evaluated and step not in found:
    raise ValueError(
      f"EvaluationConfig.best: got {metric!r}, expected a metric of the evaluation after step"
      f" {step}: {', '.join(evaluated)}; name one of them."
    )
  saved = {*checkpoint.steps(directory / "checkpoints"), step}
  return max(
    ((one, value) for one, value in found.items() if one in saved),
    key=lambda entry: (entry[1], -entry[0]),
    default=None,
  )
