"""Directories without a run are refused."""

from __future__ import annotations

import re

import pytest

from seerjax.reports import run_directory


def test_directories_and_files_that_are_no_run_are_refused(tmp_path):
  with pytest.raises(ValueError, match=r"has none of metrics.jsonl, summary.json"):
    run_directory.load(tmp_path)
  (tmp_path / "summary.json").write_text("{")
  with pytest.raises(ValueError, match=re.escape("summary.json, which is not JSON")):
    run_directory.load(tmp_path)
