"""Runs the cells of a long experiment and stores each finished cell as a line of JSON.

Finished cells are not run again.
Claim: none; experiments of several cells use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import json
import os
import pathlib
from typing import Any

import rich.progress

from seerjax import metrics
from seerjax.run import stops
from seerjax.run.programs import Programs

FILE_NAME = "cells.jsonl"


def read(path: pathlib.Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
  """Returns the finished cells of a file; [] if it does not exist. Ignores an incomplete last line.

  Args:
    path: the file.
    settings: the settings that all cells of one table share.

  Raises:
    ValueError: if the cells were made with other settings, or naming an invalid line.
  """
  text = path.read_text(encoding="utf-8") if path.is_file() else ""
  records = []
  # Text after the last newline was being written when the process died.
  for number, line in enumerate(text.split("\n")[:-1], 1):
    try:
      records.append(json.loads(line))
      missing = {"settings"} - {*records[-1]}
    except (TypeError, ValueError) as error:
      missing = {str(error)}
    if missing:
      raise ValueError(
        f"{path}: got a line {number} that is not a cell ({', '.join(missing)}), expected a JSON"
        " object with its settings; remove that line to run the cell again."
      )
  for record in records:
    if record["settings"] != settings:
      names = sorted(
        name
        for name in {*settings, *record["settings"]}
        if record["settings"].get(name) != settings.get(name)
      )
      raise ValueError(
        f"{path}: got cells with other {', '.join(names)}, expected those of this command; choose"
        " another --workdir, or the settings of these cells."
      )
  return records


def append(path: pathlib.Path, record: dict[str, Any]) -> None:
  """Appends a finished cell to a file and syncs it to disk; overwrites an incomplete last line.

  Raises:
    OSError: if the disk is full; the cell will be run again.
  """
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    with path.open("rb+") as file:
      file.truncate(file.read().rfind(b"\n") + 1)
      file.seek(0, os.SEEK_END)
      file.write((json.dumps(metrics.encode(record)) + "\n").encode())
      file.flush()
      os.fsync(file.fileno())
  except OSError as error:
    raise metrics.disk_error("cells", path, error) from error


def completed(
  cells: Sequence[Any],
  directory: pathlib.Path,
  settings: dict[str, Any],
  measure: Callable[[Any, dict[Any, dict[str, Any]], dict[Any, Programs]], dict[str, Any]],
) -> list[dict[str, Any]]:
  """Returns the records of all cells in order; runs and stores the missing ones.

  Args:
    cells: named tuples of one type; every record has their fields.
    directory: the directory of the file.
    settings: the settings that the cells share.
    measure: runs a cell, given the records of finished cells by cell, and the programs that earlier
      cells compiled.

  Raises:
    ValueError: if the file has cells of other settings, or a cell is listed twice.
    stops.Interrupted: on Ctrl-C or SIGTERM; the message says how many cells are stored.
  """
  if len({*cells}) < len(cells):
    twice = next(cell for cell in cells if cells.count(cell) > 1)
    raise ValueError(
      f"cells: got {tuple(twice)} twice, expected each cell once; name no problem or seed twice."
    )
  path, names = directory / FILE_NAME, cells[0]._fields
  found = {tuple(record[name] for name in names): record for record in read(path, settings)}
  missing = [cell for cell in cells if cell not in found]
  programs: dict[Any, Programs] = {}
  try:
    for cell in rich.progress.track(
      missing, f"cells, {len(cells) - len(missing)} already finished"
    ):
      found[cell] = measure(cell, found, programs)
      append(path, found[cell])
  except (KeyboardInterrupt, stops.Interrupted) as stop:
    # Replaces the message of the cell's own run; its hint to use `--resume` is wrong for a table.
    count = len(read(path, settings))
    kept = (
      f"with {count} of {len(cells)} cells finished, saved in {path}; the same command continues"
      if count
      else f"before the first of {len(cells)} cells finished; nothing is saved"
    )
    status = stop.status if isinstance(stop, stops.Interrupted) else stops.status_of(stop)
    raise stops.Interrupted(f"stopped {kept}", status) from None
  return [found[cell] for cell in cells]
