"""launch/tpu_compile.sh, as far as it runs without installing anything."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
  """A checkout of the launchers alone, in a path with spaces."""
  root = tmp_path / "a checkout"
  shutil.copytree(ROOT / "launch", root / "launch")
  return root


def run(checkout: pathlib.Path, *arguments: str, **environment: str) -> tuple[int, str]:
  """Runs tpu_compile.sh; returns its exit status and all that it wrote."""
  done = subprocess.run(
    ["bash", str(checkout / "launch" / "tpu_compile.sh"), *arguments],
    env=os.environ | environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    check=False,
  )
  return done.returncode, done.stdout


def test_help_says_what_is_installed_and_where(checkout: pathlib.Path):
  status, text = run(checkout, "--help")
  assert status == 0
  assert "Creates .venv-tpu" in text and "libtpu (half a gigabyte, x86-64 Linux)" in text
  assert not (checkout / ".venv-tpu").exists()


def test_a_python_without_a_lock_is_refused(checkout: pathlib.Path, tmp_path: pathlib.Path):
  old = tmp_path / "python3.11"
  old.write_text("#!/bin/sh\necho 3.11\n")
  old.chmod(0o755)
  status, text = run(checkout, SEERJAX_PYTHON=str(old))
  assert status == 1
  assert f"{old} is Python 3.11, expected one of: 3.13 3.12" in text
  assert not (checkout / ".venv-tpu").exists()


def test_every_python_that_is_tried_has_a_lock():
  text = (ROOT / "launch" / "tpu_compile.sh").read_text()
  minors = text.partition('find_python "')[2].partition('"')[0].split()
  locks = {path.stem for path in (ROOT / "launch" / "locks").glob("tpu-compile-*.txt")}
  assert locks == {f"tpu-compile-{minor}" for minor in minors}
