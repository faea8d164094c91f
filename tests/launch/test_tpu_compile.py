"""launch/tpu_compile.sh, as far as it runs without installing anything."""

from __future__ import annotations

import pathlib

import launch_scripts
from launch_scripts import LAUNCH
import pytest


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
  """A checkout of the launchers alone, in a path with spaces."""
  return launch_scripts.copied(tmp_path / "a checkout")


def test_help_says_what_is_installed_and_where(checkout: pathlib.Path):
  status, text = launch_scripts.run("tpu_compile", "--help", root=checkout)
  assert status == 0
  assert "Creates .venv-tpu" in text and "libtpu (half a gigabyte, x86-64 Linux)" in text
  assert not (checkout / ".venv-tpu").exists()


def test_a_python_without_a_lock_is_refused(checkout: pathlib.Path, tmp_path: pathlib.Path):
  old = tmp_path / "python3.11"
  old.write_text("#!/bin/sh\necho 3.11\n")
  old.chmod(0o755)
  status, text = launch_scripts.run("tpu_compile", root=checkout, SEERJAX_PYTHON=str(old))
  assert status == 1
  assert f"{old} is Python 3.11, expected one of: 3.13 3.12" in text
  assert not (checkout / ".venv-tpu").exists()


def test_every_python_that_is_tried_has_a_lock():
  text = (LAUNCH / "tpu_compile.sh").read_text()
  minors = text.partition('find_python "')[2].partition('"')[0].split()
  locks = {path.stem for path in (LAUNCH / "locks").glob("tpu-compile-*.txt")}
  assert locks == {f"tpu-compile-{minor}" for minor in minors}
