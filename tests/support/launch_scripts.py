"""Scripts of launch/: run to their end, copied, and those in Python as modules."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import types

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH = ROOT / "launch"


def copied(root: pathlib.Path) -> pathlib.Path:
  """Copies the launchers alone; returns `root`."""
  shutil.copytree(LAUNCH, root / "launch")
  return root


def run(
  name: str, *arguments: str, root: pathlib.Path = ROOT, **environment: str
) -> tuple[int, str]:
  """Runs a script with this Python; returns its exit status and all that it wrote."""
  done = subprocess.run(
    ["bash", str(root / "launch" / f"{name}.sh"), *arguments],
    env=os.environ | {"SEERJAX_PYTHON": sys.executable} | environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    check=False,
  )
  return done.returncode, done.stdout


def module(name: str) -> types.ModuleType:
  spec = importlib.util.spec_from_file_location(name, LAUNCH / f"{name}.py")
  assert spec is not None and spec.loader is not None
  found = importlib.util.module_from_spec(spec)
  sys.modules[name] = found  # Where its dataclasses look their annotations up.
  spec.loader.exec_module(found)
  return found
