"""An open file of records: what it takes, refuses, and has after a kill."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from seerjax.records import file, lines

KIND = file.Kind("notes", 1, "notebook", "a notebook", "choose another file")


class Notebook(file.RecordFile):
  """Notes in order."""

  def __init__(self, path: pathlib.Path):
    self.records: list[dict[str, Any]] = []
    super().__init__(path, KIND)
    if not self.records:
      self._begin({"owner": "me"})

  def __enter__(self) -> Notebook:
    return self

  def _load_record(self, offset: int, record: dict[str, Any]) -> None:
    assert self._read(offset) == record
    self.records.append(record)

  def note(self, text: str) -> int:
    return self._write({"text": text})


def test_a_file_has_its_header_and_what_was_written(tmp_path: pathlib.Path):
  path = tmp_path / "new" / "notes.jsonl"
  with Notebook(path) as notes, notes.together():
    notes.note("a")
    notes.note("b")
  with Notebook(path) as notes:
    header, *texts = notes.records
    assert header == {"kind": "notes", "format": 1, "owner": "me"}
    assert texts == [{"text": "a"}, {"text": "b"}]
    with pytest.raises(ValueError, match="another writer has open, expected one writer at a time"):
      Notebook(path)


def test_a_torn_tail_is_cut_off_and_a_torn_header_written_again(tmp_path: pathlib.Path):
  path = tmp_path / "notes.jsonl"
  for torn in (lines.line({"kind": "notes"})[:20], b"\0\0"):
    path.write_bytes(torn)
    with Notebook(path) as notes:
      assert notes.truncated_bytes == len(torn) and not notes.records
  with path.open("ab") as out:
    out.write(lines.line({"text": "a"})[:-3])
  with Notebook(path) as notes:
    assert notes.truncated_bytes > 0 and len(notes.records) == 1


def test_other_files_are_refused_and_left_as_they_are(tmp_path: pathlib.Path):
  path = tmp_path / "notes.jsonl"
  for content in (b"hello\n", lines.line({"kind": "notes", "format": 2})):
    path.write_bytes(content)
    with pytest.raises(
      ValueError, match="as the first record, expected a notebook of format 1; ch"
    ):
      Notebook(path)
    assert path.read_bytes() == content
  with pytest.raises(
    ValueError, match="got a directory, expected the notebook's file, or none yet"
  ):
    Notebook(tmp_path)


def test_a_closed_file_takes_nothing(tmp_path: pathlib.Path):
  notes = Notebook(tmp_path / "notes.jsonl")
  notes.close()
  notes.close()
  with pytest.raises(ValueError, match="got a record for a closed notebook, expected an open one"):
    notes.note("late")
