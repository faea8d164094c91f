"""The memory limit of a process, read from small hand-made file systems."""

from __future__ import annotations

import math
import os
import pathlib
import subprocess
import sys

import pytest

from seerjax import host_memory

GIB = 2**30


def write(root: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
  for name, text in files.items():
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)
  return root


HOST = {"proc/meminfo": f"MemTotal: {32 * 2**20} kB\nMemAvailable: {16 * 2**20} kB\n"}


def test_without_a_group_the_host_counts_and_without_a_host_nothing_does(tmp_path):
  assert host_memory.free_bytes(write(tmp_path / "a", HOST)) == 16 * GIB
  assert host_memory.free_bytes(tmp_path / "nothing") == math.inf
  assert host_memory.resident_bytes(tmp_path / "nothing") == 0


def test_the_least_of_a_groups_and_its_parents_limits_counts(tmp_path):
  group = {
    "proc/self/cgroup": "0::/jobs/mine\n",
    "sys/fs/cgroup/jobs/mine/memory.max": "max\n",
    "sys/fs/cgroup/jobs/mine/memory.current": f"{GIB}\n",
    "sys/fs/cgroup/jobs/memory.max": f"{4 * GIB}\n",
    "sys/fs/cgroup/jobs/memory.current": f"{3 * GIB}\n",
    "sys/fs/cgroup/jobs/memory.stat": f"anon {GIB}\ninactive_file {GIB}\n",
  }
  root = write(tmp_path, HOST | group)
  assert host_memory.free_bytes(root) == 2 * GIB
  write(root, {"sys/fs/cgroup/jobs/mine/memory.max": f"{GIB + 5}\n"})
  assert host_memory.free_bytes(root) == 5
  write(root, {"sys/fs/cgroup/jobs/mine/memory.max": "17\n"})
  assert host_memory.free_bytes(root) == 0


@pytest.mark.parametrize("path", ["/docker/abc", "/"])
def test_the_first_version_of_groups_counts_too(tmp_path, path):
  # In a container the cgroup is the root of the mount, whatever its path is.
  group = {
    "proc/self/cgroup": f"5:cpu:/\n4:cpuset,memory:{path}\n0::/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{6 * GIB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{4 * GIB}\n",
    "sys/fs/cgroup/memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n",
  }
  assert host_memory.free_bytes(write(tmp_path, HOST | group)) == 3 * GIB


def test_this_process_holds_memory_and_may_take_more():
  assert host_memory.resident_bytes() > 10 * 2**20
  assert 0 < host_memory.free_bytes() < 2**50


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc returns freed memory on request")
def test_freed_memory_is_returned_to_the_system_on_request():
  """The twin is the first number: with the settings of launch/, freeing alone returns nothing."""
  program = """
from seerjax import host_memory
blocks = [bytearray(b"1") * 2**20 for _ in range(200)]
full = host_memory.resident_bytes()
del blocks
freed = full - host_memory.resident_bytes()
host_memory.give_back()
print(freed < 20 * 2**20, full - host_memory.resident_bytes() > 180 * 2**20)
"""
  kept = {"MALLOC_TRIM_THRESHOLD_": "17179869184", "MALLOC_MMAP_THRESHOLD_": "33554432"}
  done = subprocess.run(
    [sys.executable, "-c", program],
    env=os.environ | kept,
    capture_output=True,
    text=True,
    check=True,
  )
  assert done.stdout == "True True\n"
