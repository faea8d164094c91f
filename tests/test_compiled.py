"""Compiled programs are cached, and recompiled when any of their inputs changes."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from seerjax import compiled

LOW = """
from seerjax import compiled
STEP = {step}

@compiled.inlined
def scaled(step):
  return step * {factor}

@compiled.function
def low(x):
  return x + scaled(STEP)
"""
HIGH = """
from seerjax import compiled
import low
from low import STEP

@compiled.function
def called(x):
  return 10 * low.low(x)

@compiled.function
def read(x):
  return 10 * x + STEP

@compiled.function
def through(x):
  return called(x)
"""
PROGRAM = """
import high
for function in (high.called, high.read, high.through):
  print(function(3), sum(function.stats.cache_hits.values()))
"""


@pytest.mark.thorough
def test_a_change_in_another_file_is_seen_and_nothing_else_compiles_anew(tmp_path: pathlib.Path):
  root = pathlib.Path(compiled.__file__).parents[1]

  def ran(step: int, factor: int) -> str:
    (tmp_path / "low.py").write_text(LOW.format(step=step, factor=factor))
    done = subprocess.run(
      [sys.executable, "-c", PROGRAM],
      capture_output=True,
      text=True,
      cwd=tmp_path,
      # Python takes a file of the same size and second for the same one.
      env={
        "PYTHONPATH": f"{root}:{tmp_path}",
        "PATH": "/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
      },
      check=False,
    )
    return done.stdout or done.stderr

  (tmp_path / "high.py").write_text(HIGH)
  assert ran(1, 1) == "40 0\n31 0\n40 0\n"
  assert ran(1, 1) == "40 1\n31 1\n40 1\n"
  # The value that one reads is unchanged; the functions that the others call are not.
  assert ran(1, 2) == "50 0\n31 1\n50 0\n"
  assert ran(4, 2) == "110 0\n34 0\n110 0\n"
