"""Record of the best artefact, best.json, which is written as soon as it is found."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

from seerjax import metrics
from seerjax.discovery import (
  archive as archive_lib,
  environment as environment_lib,
)
from seerjax.discovery.environment import Environment

BEST = "best.json"

# For timed problems: number of states that are measured again, more carefully, at the end.
NUM_CONFIRMED = 8


def check_directory(directory: pathlib.Path, *, resume: bool) -> None:
  """Refuses to start in a directory with another run's best artefact.

  Raises:
    ValueError: if there is one; names the file.
  """
  if not resume and (directory / BEST).is_file():
    raise ValueError(
      f"{directory / BEST}: got the best artefact of another run, expected none; move it away, or"
      " choose another --workdir."
    )


def check_best(directory: pathlib.Path) -> None:
  """Checks the best artefact's file on resume, so that a damaged one does not fail the run later.

  Raises:
    ValueError: if it is damaged; names the file.
  """
  if (directory / BEST).is_file():
    read_best(directory)


def write_first(
  directory: pathlib.Path, environment: Environment, archive: archive_lib.Archive
) -> None:
  """Writes the best state of the archive unless the file exists already."""
  if not (directory / BEST).is_file():
    write_best(directory, environment, archive, archive_lib.best(archive))


def final_best(
  directory: pathlib.Path, environment: Environment, archive: archive_lib.Archive
) -> tuple[dict[str, Any], environment_lib.Score]:
  """Returns the record of a finished run and its score, which is confirmed for a timed problem."""
  if isinstance(environment, environment_lib.Timed):
    # The top value may be due to measurement noise.
    for leader in archive_lib.leaders(archive, NUM_CONFIRMED):
      write_best(directory, environment, archive, leader)
  # Not from the archive: before a crash, a timed problem may have recorded a better one.
  best = read_best(directory)
  return best, environment_lib.record_score(environment, best["artefact"])


def write_best(
  directory: pathlib.Path,
  environment: Environment,
  archive: archive_lib.Archive,
  best: archive_lib.State,
) -> None:
  """Atomically writes the best artefact so far with its lineage, its tree and its score.

  A better record in the file is kept: a crashed process may have found it after its last
  checkpoint.
  """
  score = environment_lib.record_score(environment, best.artefact)
  path = directory / BEST
  if path.is_file():
    if not environment_lib.is_better(environment, score.value, read_best(directory)["value"]):
      return
  elif not score.is_valid:
    raise ValueError(
      f"{environment.name}: got an artefact that was valid before and is not now ({score.reason}),"
      " expected the same verdict; make verify deterministic, or try `seerjax check`."
    )
  lineage = [
    # Steps count from 1, as in metrics.jsonl; the start has step 0.
    dict(
      step=state.step + 1,
      value=environment_lib.signed(environment, state.value),
      tokens=state.tokens,
    )
    for state in archive_lib.lineage(archive, best.state_id)
  ]
  tree = [
    dict(id=state.state_id, parent=state.parent, step=state.step + 1,
         value=environment_lib.signed(environment, state.value))
    for state in archive_lib.family(archive, best.state_id)
  ]  # fmt: skip
  record = dict(
    problem=environment.name,
    value=score.value,
    certificate=score.certificate,
    step=best.step + 1,
    artefact=best.artefact,
    lineage=lineage,
    tree=tree,
  )
  metrics.write_summary(path, json.loads(json.dumps(record)))


def read_best(directory: pathlib.Path) -> dict[str, Any]:
  """Returns the record that `write_best` wrote.

  Raises:
    ValueError: if the file is damaged; names the file.
  """
  path = directory / BEST
  try:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not math.isfinite(found["value"]):
      raise ValueError(f"its value is {found['value']}")
    missing = {"artefact", "step", "lineage", "tree"} - {*found}
    if missing:
      raise ValueError(f"it has no {', '.join(sorted(missing))}")
    return found
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f"{path}: got a damaged file ({type(error).__name__}: {error}), expected the best artefact as"
      " written; restore a copy, or remove it: --resume writes the checkpoint's best again."
    ) from error
