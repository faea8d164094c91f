"""A whole run and an interrupted one, which the tests of this folder share."""

from __future__ import annotations

import pathlib
import shutil

import pytest
import small_run
from tiny_runs import tiny

__all__ = ["stopped", "stopped_copy", "tiny", "whole"]


@pytest.fixture(scope="module")
def whole(programs_on_disk):
  """An uninterrupted run: (directory, result, task)."""
  return small_run.whole_run()


@pytest.fixture(scope="module")
def stopped(programs_on_disk):
  """A run interrupted in its third step, after two of four rollouts were judged."""
  return small_run.stopped_run()


@pytest.fixture
def stopped_copy(stopped, tmp_path):
  return pathlib.Path(shutil.copytree(stopped, tmp_path / "run"))
