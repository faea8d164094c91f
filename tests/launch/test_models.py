"""launch/models.sh, as far as it installs nothing; test_get.py tests the command that it calls."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
  ("arguments", "status", "message"),
  [
    (("--help",), 0, "usage: bash launch/models.sh smollm2 | qwen25-coder-0.5b | gemma3-270m"),
    ((), 1, "usage: bash launch/models.sh"),
    (("smollm3",), 1, "got the model 'smollm3', expected one that is listed by --help."),
    (("--fast",), 1, "got '--fast', expected the names of models; --help lists them."),
  ],
)
def test_wrong_arguments_are_refused_before_anything_is_made(
  tmp_path, arguments: tuple[str, ...], status: int, message: str
):
  shutil.copytree(ROOT / "launch", tmp_path / "launch")
  done = subprocess.run(
    ["bash", str(tmp_path / "launch" / "models.sh"), *arguments],
    capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert done.returncode == status and message in done.stdout + done.stderr
  assert [path.name for path in tmp_path.iterdir()] == ["launch"]
