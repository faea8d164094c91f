"""Helpers of the fault tests: drawn moments, a small disk, and a process environment."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os
import pathlib
import subprocess

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
NUM_MOMENTS = 3


def moments(seed: int, last: int, first: int = 1) -> list[int]:
  """Returns three different numbers from `first` to `last`, ascending, drawn by a seed."""
  rng = np.random.default_rng((seed, 7))
  return sorted((first + rng.choice(last + 1 - first, NUM_MOMENTS, replace=False)).tolist())


@contextlib.contextmanager
def small_disk(directory: pathlib.Path, num_bytes: int) -> Iterator[pathlib.Path]:
  """Yields a directory on a file system of `num_bytes`; skips where none can be mounted."""
  directory.mkdir()
  mounted = subprocess.run(
    ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(directory)],
    capture_output=True, text=True,
  ) if os.geteuid() == 0 else None  # fmt: skip
  if mounted is None or mounted.returncode:
    pytest.skip("this user may not mount a small disk")
  try:
    yield directory
  finally:
    subprocess.run(["umount", "-l", str(directory)], check=True)


def environment(num_devices: int = 0) -> dict[str, str]:
  """Returns a child's environment with this process's programs; 0 keeps the number of devices."""
  return os.environ | {
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support"))),
    "JAX_NUM_CPU_DEVICES": str(num_devices or jax.device_count()),
    "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
  }
