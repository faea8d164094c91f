"""launch/gpu_compile.sh, as far as it runs without installing anything."""

from __future__ import annotations

import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    ["bash", str(ROOT / "launch" / "gpu_compile.sh"), *arguments],
    capture_output=True,
    text=True,
    check=False,
  )


def test_help_names_every_part():
  done = run("--help")
  assert done.returncode == 0
  for part in ("kernels", "step", "tests"):
    assert f"\n  {part} " in done.stdout


@pytest.mark.parametrize(
  "argument, message",
  [
    ("--fast", "got '--fast', expected --only=, --out= or --help."),
    ("--only=kernels,speed", "--only: got 'speed', expected some of: kernels step tests."),
  ],
)
def test_wrong_arguments_are_refused_before_anything_is_made(argument: str, message: str):
  done = run(argument)
  assert done.returncode == 1 and message in done.stderr


@pytest.mark.parametrize("minor", ["3.12", "3.13"])
def test_the_plugin_is_of_the_version_of_jax(minor: str):
  locks = ROOT / "launch" / "locks"
  (version,) = re.findall(r"^jax==(.*)$", (locks / f"runtime-{minor}.txt").read_text(), re.M)
  lines = (locks / f"gpu-compile-{minor}.txt").read_text().splitlines()
  assert {f"jax-cuda13-plugin=={version}", f"jax-cuda13-pjrt=={version}"} <= {*lines}
