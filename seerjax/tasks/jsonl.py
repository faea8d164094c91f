"""Reads JSON-lines files."""

from __future__ import annotations

from collections.abc import Sequence
import json
import os
import pathlib
from typing import Any


def read_rows(path: str | os.PathLike[str], required: Sequence[str]) -> list[dict[str, Any]]:
  """Returns the rows of `numbered_rows` without line numbers."""
  return [row for _, row in numbered_rows(path, required)]


def numbered_rows(
  path: str | os.PathLike[str], required: Sequence[str]
) -> list[tuple[int, dict[str, Any]]]:
  """Reads a JSON-lines file of objects as (line number, row) pairs; skips blank lines.

  Args:
    path: path of the file, in UTF-8.
    required: keys that every row must have, with a non-empty string.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if a line is not a JSON object or lacks a key (names the line), or the file is
      empty.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise FileNotFoundError(
      f"{path}: got no such file, expected JSON lines with the keys {tuple(required)};"
      " set --config.task_path to the file."
    )
  rows = []
  try:
    lines = path.read_text(encoding="utf-8").split("\n")
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{path}: got bytes that are not UTF-8 at offset {error.start}, expected UTF-8 JSON lines;"
      " re-encode the file."
    ) from error
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    try:
      row = json.loads(line)
    except (ValueError, RecursionError) as error:
      raise ValueError(
        f"{path}, line {number}: got text that is not JSON ({error}), expected one JSON object per"
        " line; repair or remove that line."
      ) from error
    if not isinstance(row, dict):
      raise ValueError(
        f"{path}, line {number}: got a JSON {type(row).__name__}, expected an object with the keys"
        f" {tuple(required)}; repair or remove that line."
      )
    for key in required:
      if key not in row:
        raise ValueError(
          f"{path}, line {number}: got the keys {tuple(sorted(row))}, expected {key!r} among them;"
          " add it or rename the column."
        )
      if not isinstance(row[key], str) or not row[key].strip():
        raise ValueError(
          f"{path}, line {number}: got {key}={row[key]!r}, expected a non-empty string; repair or"
          " remove that line."
        )
    rows.append((number, row))
  if not rows:
    raise ValueError(f"{path}: got an empty file, expected at least one row; check the export.")
  return rows
