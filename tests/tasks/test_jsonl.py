"""JSON Lines files."""

from __future__ import annotations

import pytest

from seerjax.tasks import jsonl


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (b'{"prompt": "a"}\n{"prompt"', "line 2: got text that is not JSON"),
    (b"[1]", "line 1: got a JSON list, expected an object"),
    (b'\n{"text": "a"}', r"line 2: got the keys \('text',\), expected 'prompt' among them"),
    (b'{"prompt": ""}', "line 1: got prompt='', expected a non-empty string"),
    (b'{"prompt": 5}', "line 1: got prompt=5, expected a non-empty string"),
    (b"\n \n", "got an empty file, expected at least one row"),
    (b'{"prompt": "\xff"}', "got bytes that are not UTF-8 at offset 12"),
    (b"[" * 100_000, "line 1: got text that is not JSON"),
  ],
)
def test_broken_files_are_refused_by_line(tmp_path, content, message):
  path = tmp_path / "rows.jsonl"
  path.write_bytes(content)
  with pytest.raises(ValueError, match=message):
    jsonl.read_rows(path, ("prompt",))


def test_a_missing_file_is_refused(tmp_path):
  with pytest.raises(FileNotFoundError, match="absent.jsonl: got no such file, expected JSON"):
    jsonl.read_rows(tmp_path / "absent.jsonl", ("prompt",))
