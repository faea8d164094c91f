"""Result cells on disk: the state of the file after a kill, and errors."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import textwrap
from typing import NamedTuple

import pytest

from experiments import cells
from seerjax.run import stops


class Cell(NamedTuple):
  name: str
  seed: int


SETTINGS = {"size": 3}
CELLS = [Cell("a", 0), Cell("a", 1), Cell("b", 0)]


def measured(cell: Cell, found, programs) -> dict:
  return {**cell._asdict(), "settings": SETTINGS, "order": len(found)}


def test_a_torn_cell_is_run_again_and_its_place_is_taken(tmp_path: pathlib.Path):
  path = tmp_path / cells.FILE_NAME
  whole = cells.completed(CELLS, tmp_path, SETTINGS, measured)
  text = path.read_text()
  assert [record["order"] for record in whole] == [0, 1, 2]
  for cut in (1, 20, len(text.splitlines()[-1]), len(text.splitlines()[-1]) + 1):
    path.write_text(text[:-cut])
    assert len(cells.read(path, SETTINGS)) == 2
    assert cells.completed(CELLS, tmp_path, SETTINGS, measured) == whole
    assert path.read_text() == text


@pytest.mark.parametrize("line", ["{", "[1]", "3", '{"name": "a"}'])
def test_a_line_that_is_no_cell_is_named(tmp_path: pathlib.Path, line: str):
  path = tmp_path / cells.FILE_NAME
  cells.append(path, {"settings": SETTINGS})
  path.write_text(path.read_text() + line + "\n")
  with pytest.raises(
    ValueError,
    match=r"cells.jsonl: got a line 2 that is not a cell \(.*remove"
    r" tha",
  ):
    cells.read(path, SETTINGS)


def test_cells_of_other_settings_are_refused(tmp_path: pathlib.Path):
  path = tmp_path / cells.FILE_NAME
  cells.append(path, {"settings": {"size": 4}})
  with pytest.raises(ValueError, match="got cells with other size, expected those of this command"):
    cells.completed(CELLS, tmp_path, SETTINGS, measured)


def test_a_cell_that_is_asked_for_twice_is_refused_before_any_is_run(tmp_path: pathlib.Path):
  with pytest.raises(ValueError, match=r"got \('a', 1\) twice, expected each cell once; name no p"):
    cells.completed([*CELLS, CELLS[1]], tmp_path, SETTINGS, measured)
  assert not (tmp_path / cells.FILE_NAME).exists()


@pytest.mark.parametrize(
  "stop", [KeyboardInterrupt, stops.Terminated, lambda: stops.Interrupted("--resume goes on", 130)]
)
@pytest.mark.parametrize(
  "num_finished, message",
  [
    (0, "stopped before the first of 3 cells finished; nothing is saved"),
    (2, "stopped with 2 of 3 cells finished, saved in "),
  ],
)
def test_a_table_that_is_stopped_says_what_it_keeps(stop, num_finished, message, tmp_path):
  def measure(cell, found, programs):
    if len(found) == num_finished:
      raise stop()
    return measured(cell, found, programs)

  with pytest.raises(stops.Interrupted) as stopped:
    cells.completed(CELLS, tmp_path, SETTINGS, measure)
  assert str(stopped.value).startswith(message) and stopped.value.status in (130, 143)
  assert len(cells.read(tmp_path / cells.FILE_NAME, SETTINGS)) == num_finished
  assert len(cells.completed(CELLS, tmp_path, SETTINGS, measured)) == 3


def test_a_full_disk_is_said_and_costs_no_finished_cell(tmp_path: pathlib.Path):
  path = tmp_path / cells.FILE_NAME
  cells.append(path, {"settings": SETTINGS})
  code = """
    import pathlib, resource, sys
    from experiments import cells
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    try:
      cells.append(pathlib.Path(sys.argv[1]), {"settings": {"size": 3}, "text": "x" * 1000})
    except OSError as error:
      print(error)
    """
  done = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(code), str(path)],
    capture_output=True,
    text=True,
    timeout=100,
    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
  )
  assert f"cells: got 'File too large' writing {path} (" in done.stdout, done.stderr
  assert "expected room for it; free some space" in done.stdout
  assert cells.read(path, SETTINGS) == [{"settings": SETTINGS}]


def test_a_cell_is_one_line_of_json(tmp_path: pathlib.Path):
  cells.append(tmp_path / "new" / cells.FILE_NAME, {"settings": SETTINGS, "value": float("nan")})
  (line,) = (tmp_path / "new" / cells.FILE_NAME).read_text().splitlines()
  assert json.loads(line)["settings"] == SETTINGS
